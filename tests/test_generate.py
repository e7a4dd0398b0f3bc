"""Generation: with the cache as without it, ragged batches as one by one, greedy, top-k, top-p, stops."""
import math

import pytest
import torch

from engine.generate import generate, pick
from engine.loss import logprobs
from small import small_llama

PROMPTS = [[5, 9, 200, 31, 7], [100], [44, 45, 46, 47, 48, 49, 50, 51, 52]]


@pytest.fixture(scope="module")
def model():
    model = small_llama(3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.dim() > 1 else 1)      # far from uniform, so that an argmax is no toss-up
    return model


def slow_greedy(model, prompt, n):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    return ids[len(prompt):]


def test_cached_ragged_batch_equals_uncached_one_by_one(model):
    batch = generate(model, PROMPTS, 64, stop_ids=set(), temperature=0)
    for prompt, ids, logp in zip(PROMPTS, batch.ids, batch.logprobs):
        assert ids == slow_greedy(model, prompt, 64)
        whole = torch.tensor([prompt + ids])
        with torch.no_grad():
            expected = logprobs(model, whole, torch.ones_like(whole, dtype=torch.bool))[0, len(prompt) - 1:]
        assert (expected - torch.tensor(logp)).abs().max() < 1e-4
    assert batch.stopped == [False] * 3


def test_rows_that_stop_leave_the_others_as_they_are(model):
    free = generate(model, PROMPTS, 30, stop_ids=set(), temperature=0)
    stop = free.ids[1][4]
    halted = generate(model, PROMPTS, 30, stop_ids={stop}, temperature=0)
    for row in range(3):
        first = free.ids[row].index(stop) + 1 if stop in free.ids[row] else 30
        assert halted.ids[row] == free.ids[row][:first]
        assert halted.stopped[row] == (stop in free.ids[row])


def test_seeds(model):
    one, two, other = (generate(model, PROMPTS, 20, set(), 1.0, seed=s).ids for s in (1, 1, 2))
    assert one == two != other


def test_logprobs_are_those_of_the_sampling_temperature(model):
    out = generate(model, PROMPTS, 12, set(), temperature=0.7, seed=4)
    for prompt, ids, logp in zip(PROMPTS, out.ids, out.logprobs):
        whole = torch.tensor([prompt + ids])
        with torch.no_grad():
            scored = logprobs(model, whole, torch.ones_like(whole, dtype=torch.bool), temperature=0.7)[0, len(prompt) - 1:]
        assert (scored - torch.tensor(logp)).abs().max() < 1e-4


def test_top_k_and_top_p():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    drawn = lambda **kw: set(pick(logits, 1.0, kw.get("top_k", 0), kw.get("top_p", 1.0), generator)[0].tolist())
    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 1} and drawn(top_k=1) == {0}
    assert drawn(top_k=99) == {0, 1, 2, 3, 4}                  # more than there are: all
    p = logits[0].softmax(0)                                   # .64 .23 .09 .03 .01
    assert drawn(top_p=p[0].item() - 1e-3) == {0} and drawn(top_p=p[0].item() + 1e-3) == {0, 1}
    assert drawn(top_p=0.0) == {0}                             # the likeliest always stays
    counts = torch.bincount(pick(logits, 1.0, 0, 1.0, generator)[0], minlength=5) / 4000
    assert (counts - p).abs().max() < 0.03
    greedy, logp = pick(logits, 0, 0, 1.0, generator)
    assert set(greedy.tolist()) == {0} and torch.allclose(logp, p[0].log().expand(4000))


def test_rows_that_pad_the_vocabulary_are_never_drawn(tmp_path):
    """Also after a model has been to disk: the tokenizer beside it says what is a token."""
    from engine.hf import read_model, save_model
    from small import byte_tokenizer
    model, tokenizer = small_llama(3, vocab_size=320, tie_embeddings=False), byte_tokenizer()
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.lm_head.weight.zero_()                           # all rows alike: one draw in six would be padding
    save_model(tmp_path, model, tokenizer)
    model = read_model(tmp_path)[0].eval()
    for settings in (dict(), dict(top_k=300), dict(top_p=0.99), dict(temperature=0), dict(temperature=30.0)):
        out = generate(model, PROMPTS, 60, set(), **settings)
        assert max(max(ids) for ids in out.ids) < tokenizer.vocab_size == 263
    assert out.logprobs[0][0] == pytest.approx(-math.log(263), abs=1e-5)


def test_prompts_longer_than_the_context_and_generation_to_its_end(model):
    context = model.config.block_size
    long = [(7 * i) % 250 for i in range(context + 40)]
    out = generate(model, [long, [1, 2, 3]], 10, set(), temperature=0)
    assert len(out.ids[0]) == 1 and not out.stopped[0]         # the last context - 1 tokens were kept: room for one
    assert out.ids[0] == slow_greedy(model, long[-(context - 1):], 1)
    with torch.no_grad():
        expected = model(torch.tensor([long[-(context - 1):]]))[0, -1].log_softmax(-1).max().item()
    assert out.logprobs[0] == pytest.approx([expected], abs=1e-5)
    assert out.ids[1] == slow_greedy(model, [1, 2, 3], 10)
    assert len(generate(model, [[1, 2]], 500, set(), temperature=0).ids[0]) == context - 2


def test_dropout_is_off_and_the_model_left_as_it_was():
    model = small_llama(3, dropout=0.5).train()
    assert generate(model, PROMPTS, 8, set(), temperature=0).ids == generate(model, PROMPTS, 8, set(), temperature=0).ids
    assert model.training


def test_nothing_to_do(model):
    assert generate(model, [], 5, set()).ids == []
    with pytest.raises(ValueError, match="BOS"):
        generate(model, [[1], []], 5, set())


def test_logprobs_do_not_depend_on_padding(model):
    ids = torch.tensor([PROMPTS[2]])
    alone = logprobs(model, ids, torch.ones_like(ids, dtype=torch.bool))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids, torch.zeros(1, 3, dtype=torch.long)], 1)
    mask = torch.tensor([[False] * 5 + [True] * 9 + [False] * 3])
    with torch.no_grad():
        scored, entropy = logprobs(model, padded, mask, with_entropy=True)
    assert (scored[:, 5:13] - alone).abs().max() < 1e-5 and (entropy >= 0).all()
