"""The token loss: in chunks as at once, with its gradients, and never more logits than a chunk's; the z-loss."""
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.loss import model_losses, token_losses
from small import small_llama


def problem(seed=0, batch=3, time=11):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(0, 263, (batch, time), generator=generator)
    return draw(), draw(), torch.rand(batch, time, generator=generator)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("chunk", [1, 7, 33, 1000])
@pytest.mark.parametrize("tie", [True, False])
def test_in_chunks_as_at_once(chunk, tie):
    model, (x, y, w) = small_llama(2, tie_embeddings=tie), problem()
    plain = token_losses(model(x), y)
    wanted = gradients(model, (plain * w).sum())
    objectives, losses = model_losses(model, x, y, chunk)
    torch.testing.assert_close(losses, plain, rtol=1e-6, atol=1e-6)
    found = gradients(model, (objectives * w).sum())
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-6)


def test_in_chunks_of_what_is_kept():
    model, (x, y, _) = small_llama(2), problem()
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    for some in (keep, torch.zeros_like(keep)):
        losses = model_losses(model, x, y[some], chunk=4, keep=some)[1]
        torch.testing.assert_close(losses, token_losses(model(x), y)[some])
    losses.sum().backward()                               # a rank without a target takes part all the same
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


class Largest(TorchDispatchMode):
    """Remembers the most numbers that a tensor had which any operation gave."""
    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            self.numbers = max(self.numbers, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return out


def test_no_more_logits_exist_than_a_chunks():
    model = small_llama(2, vocab_size=4000, n_embd=16, n_inner=32)
    ids = torch.randint(0, 4000, (4, 96))
    found = {}
    for chunk in (0, 32):
        kept = []
        with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            model_losses(model, ids, ids, chunk, z_loss=1e-4)[0].sum().backward()
        assert (max(kept) >= 32 * 4000) == (chunk == 0)   # none is kept for the backward pass either
        found[chunk] = largest.numbers
    assert found == {0: 4 * 96 * 4000, 32: 32 * 4000}     # the largest weight has 16 * 4000


def test_z_loss_pulls_the_sum_of_the_softmax_to_1():
    model, (x, y, _) = small_llama(2), problem()
    log_z = model(x).logsumexp(-1)
    for chunk in (0, 5):
        objectives, losses = model_losses(model, x, y, chunk, z_loss=0.01)
        torch.testing.assert_close(objectives - losses, 0.01 * log_z.square(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(losses, token_losses(model(x), y))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model_losses(model, x, y, z_loss=1.0)[0].mean().backward()
        optimizer.step()
    assert log_z.abs().mean() > 5 > 1 > model(x).logsumexp(-1).abs().mean()


def test_padding_of_the_vocabulary_is_in_no_softmax():
    model, (x, y, _) = small_llama(2, tie_embeddings=False), problem()
    padded = small_llama(2, tie_embeddings=False, vocab_size=320)
    padded.n_tokens = 263
    with torch.no_grad():
        for name, p in padded.named_parameters():
            p[:model.get_parameter(name).size(0)] = model.get_parameter(name)
        padded.lm_head.weight[263:] = 50.0                # would win every softmax
    torch.testing.assert_close(padded(x), model(x))
    for chunk in (0, 6):
        losses = model_losses(padded, x, y, chunk, z_loss=0.1)[0]
        torch.testing.assert_close(losses, model_losses(model, x, y, chunk, z_loss=0.1)[0])
        assert (gradients(padded, losses.sum())["lm_head.weight"][263:] == 0).all()
    assert losses.max() < 2 * math.log(263) ** 2


def test_losses_of_later_tokens_by_hand():
    """Two further heads; the row's end and what follows a target without weight are not foretold."""
    model, (x, y, _) = small_llama(2, n_future=3), problem()
    w = (torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.7).float()
    hidden, time, wanted = model.model(x), y.size(1), token_losses(model(x), y).clone()
    for head, layer in enumerate(model.future_heads, start=1):
        losses = token_losses(layer(hidden), y.roll(-head, dims=1))
        for t in range(time - head):
            wanted[:, t] += losses[:, t] * w[:, t + 1:t + head + 1].prod(dim=1)
    for chunk in (0, 7):
        objectives, losses = model_losses(model, x, y, chunk, weights=w)
        torch.testing.assert_close(objectives, wanted)
        torch.testing.assert_close(losses, token_losses(model(x), y))
        gradients(model, (objectives * w).sum())
        assert all(head.weight.grad.abs().max() > 0 for head in model.future_heads)
