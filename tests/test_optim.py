"""Which parameters decay, the learning rate as a function of the step, clipping, and steps that are skipped."""
import math

import pytest
import torch

from engine.loss import token_losses
from engine import optim
from engine.optim import Muon, adamw, clip, lr_at, muon, orthogonal, set_lr, warmup_length
from small import small_llama


def test_only_matrices_decay():
    model = small_llama(n_layer=2)
    decayed, others = adamw(model, 1e-3, 0.1).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0
    assert {names[id(p)] for p in others["params"]} == {
        "model.norm.weight", *[f"model.layers.{i}.{n}_layernorm.weight" for i in (0, 1) for n in ("input", "post_attention")]}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= {names[id(p)] for p in decayed["params"]}
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_muon_has_the_layers_matrices_and_adamw_the_rest():
    model = small_llama(n_layer=2)
    first, second = muon(model, 1e-3, 0.02, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    mine, rest = ({names[id(p)] for group in o.param_groups for p in group["params"]} for o in (first, second))
    assert mine == {n for n in names.values() if ".layers." in n and "proj" in n} and rest == set(names.values()) - mine
    set_lr(first, 5e-4), set_lr(second, 5e-4)
    assert first.param_groups[0]["lr"] == pytest.approx(0.01) and second.param_groups[0]["lr"] == 5e-4
    assert all(p.requires_grad for p in model.parameters())


def test_muon_is_torchs_where_bf16_is_native(monkeypatch):
    """Bit for bit, over three steps, with tall, wide and square matrices."""
    monkeypatch.setattr(optim, "dtype_named", lambda name, device: torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    shapes = [(24, 8), (8, 24), (16, 16)]
    starts = [torch.randn(shape, generator=draw) for shape in shapes]
    ours, torchs = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    settings = dict(lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    a, b = Muon(ours, **settings), torch.optim.Muon(torchs, **settings)
    for _ in range(3):
        for p, q in zip(ours, torchs):
            p.grad = q.grad = torch.randn(p.shape, generator=draw)
        a.step(), b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, torchs))
    assert all(torch.equal(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"]) for p, q in zip(ours, torchs))


def test_muon_multiplies_in_fp32_where_bf16_would_be_emulated(monkeypatch):
    monkeypatch.setattr(optim, "dtype_named", lambda name, device: torch.float32)
    matrix = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    moved = orthogonal(matrix)
    assert moved.dtype == torch.float32
    values = u.mT @ moved @ vh.mT                               # the same directions, all of them about as long
    assert (values - values.diag().diag()).abs().max() < 1e-4
    assert 0.6 < values.diag().min() and values.diag().max() < 1.3


def test_learning_rate():
    at = lambda step, **kw: lr_at(step, 100, 1.0, 10, **kw)
    assert [at(s) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert at(10) == 1.0 and at(99) == pytest.approx(0.1) and at(99, schedule="linear") == pytest.approx(0.1)
    assert at(99, schedule="constant") == 1.0 and at(99, final=0.0) == pytest.approx(0.0)
    middle = 10 + (99 - 10) / 2
    assert at(middle) == pytest.approx(0.55) and at(middle, schedule="linear") == pytest.approx(0.55)
    assert all(at(s) > at(s + 1) for s in range(10, 99))


def test_warm_up():
    assert warmup_length(500_000) == 2000 and warmup_length(100_000) == 400
    assert warmup_length(1000) == 100 and warmup_length(50) == 5       # 0.4 % would be 4 and 0
    assert warmup_length(1000, asked=0) == 0 and lr_at(0, 10, 1.0, 0) == 1.0


def test_clip_scales_the_gradients_of_a_module():
    """As the training loops call it, with model.parameters(), which can be read only once."""
    module = torch.nn.Linear(2, 2)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 5.0)
    clip(module.parameters(), 0.5)
    assert torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_clip_scales_to_the_norm_and_tells_what_is_not_finite():
    a, b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    a.grad, b.grad = torch.full((3,), 3.0), torch.full((2,), 4.0)
    norm = math.sqrt(27 + 32)
    assert clip([a, b], 0).item() == pytest.approx(norm) and a.grad[0] == 3
    assert clip([a, b], 1.0).item() == pytest.approx(norm)
    assert math.sqrt(a.grad.square().sum() + b.grad.square().sum()) == pytest.approx(1.0, abs=1e-4)
    b.grad[1] = float("nan")
    assert math.isnan(clip([a, b], 1.0).item())


def test_a_sum_over_the_step_has_one_gradient_for_any_split():
    """Mean of means weighs the tokens of short rows more: shown beside the right way."""
    model, ids = small_llama(1), torch.randint(0, 256, (8, 24))
    weights = (torch.arange(23)[None] < torch.tensor([23, 3, 5, 1, 20, 2, 9, 4])[:, None]).float()
    def gradient(size, mean_of_means=False):
        model.zero_grad()
        for i in range(0, 8, size):
            w = weights[i:i + size]
            losses = token_losses(model(ids[i:i + size, :-1]), ids[i:i + size, 1:]) * w
            (losses.sum() / w.sum() / (8 / size) if mean_of_means else losses.sum() / weights.sum()).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])
    whole = gradient(8)
    for size in (1, 2, 4):
        assert (gradient(size) - whole).abs().max() < 1e-6
    assert (gradient(2, mean_of_means=True) - whole).abs().max() > 1e-4
