"""engine/packing.py: every conversation once in any form, each as if alone, and the same gradient; mixtures and replay."""
import random

import numpy as np
import pytest
import torch

import sft
from engine.loss import token_losses
from engine.packing import BATCHINGS, collate, cut, pack, plan, rounded, text_examples
from engine.parallel import Setup
from engine.shards import ShardWriter, TokenData, write_index
from small import ALONE, byte_tokenizer, small_llama

PAD = byte_tokenizer().pad_id


def talks(lengths, seed=0):
    """Conversations of these lengths, with weights of all kinds, most of them 0."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        weights = rng.choice([0, 0, 1, 0.25, 3.5], length).astype(np.float32)
        weights[-1] = 1.0
        made.append((rng.integers(0, 256, length), weights))
    return made


LONG_TAILED = [random.Random(i).choice((5, 9, 12, 30, 90)) for i in range(40)]


def config_of(batching, rows=3, tokens=128):
    return type("Config", (), {"batching": batching, "micro_batch_size": rows, "micro_tokens": tokens})()


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("tokens", [1, 64, 100, 4096])
def test_each_conversation_is_in_one_micro_batch_and_the_budget_holds(batching, tokens):
    parts = cut(LONG_TAILED, batching, 3, tokens)
    assert sorted(sum(parts, [])) == list(range(40)) and all(parts)
    for part in parts:
        lengths = [LONG_TAILED[place] for place in part]
        size = sum(lengths) if batching == "packed" else rounded(max(lengths)) * len(part)
        assert len(part) <= 3 if batching == "padded" else size <= tokens or len(part) == 1
    if batching != "padded":
        needed = sum(LONG_TAILED) / tokens
        assert len(parts) <= max(1, 2 * needed + 5) or tokens < 90       # no budget lies idle


def test_best_fit_leaves_the_least_over():
    assert cut([60, 50, 40, 10], "packed", 0, 100) == [[0, 2], [1, 3]]
    assert cut([60, 50, 40, 10, 40, 31, 30], "packed", 0, 100) == [[0, 2], [1, 4, 3], [5, 6]]
    assert cut([8, 64, 8, 8], "buckets", 0, 64) == [[1], [0, 2, 3]]


@pytest.mark.parametrize("attention", ["flash", "fp32"])
@pytest.mark.parametrize("copies", [1, 9])
def test_a_packed_row_has_the_losses_of_its_conversations_alone(attention, copies):
    """Also in rows of more than 1024 tokens, where attention is computed conversation by conversation."""
    model, examples = small_llama(attention=attention), talks([12, 90, 5, 30, 2, 7] * copies)
    x, y, w, begins = pack(examples, range(len(examples)), PAD)
    assert x.shape == y.shape == w.shape == begins.shape and x.shape[1] % 8 == 0 and (x.shape[1] > 1024) == (copies == 9)
    assert begins.sum() == len(examples) + (w.shape[1] > sum(len(ids) - 1 for ids, _ in examples))
    with torch.no_grad():
        together, start = token_losses(model(x, begins=begins), y)[0], 0
        for ids, weights in examples:
            ids, end = torch.from_numpy(ids), start + len(ids) - 1
            alone = token_losses(model(ids[None, :-1]), ids[None, 1:])[0]
            assert (together[start:end] - alone).abs().max() < 1e-5
            assert torch.equal(w[0, start:end], torch.from_numpy(weights[1:])) and torch.equal(y[0, start:end], ids[1:])
            start = end
    assert not w[0, start:].any() and (y[0, start:] == PAD).all()
    if copies == 1:                                 # or the model would not notice
        assert (token_losses(model(x), y)[0] - together).abs().max() > 1e-3


def test_the_gradient_is_the_same_in_any_form_and_budget():
    examples, numbers = talks(LONG_TAILED[:17]), np.random.default_rng(0).permutation(17)
    weight = sum(w[1:].sum() for _, w in examples)
    found = {}
    for batching, rows, tokens in (("padded", 17, 0), ("padded", 2, 0), ("buckets", 0, 128), ("buckets", 0, 1), ("packed", 0, 64),
                                   ("packed", 0, 2048)):
        model = small_llama().train()
        batches = sft.micro_batches(examples, numbers, config_of(batching, rows, tokens), PAD, ALONE)
        totals = sft.forward_backward(model, batches, byte_tokenizer().special("<|end|>"), ALONE)
        assert totals["weight"] == pytest.approx(weight)
        found[batching, rows, tokens] = totals["loss"], torch.cat([p.grad.flatten() for p in model.parameters()])
    (loss, gradient), *others = found.values()
    for other_loss, other in others:
        assert other_loss == pytest.approx(loss, abs=1e-6) and (other - gradient).abs().max() < 1e-6


@pytest.mark.parametrize("batching", BATCHINGS)
def test_ranks_share_a_step_without_rest(batching):
    examples, numbers = talks(LONG_TAILED[:7]), np.arange(7)
    for world in (2, 3, 9):
        setups = [Setup(rank, 0, world, torch.device("cpu"), torch.float32, 1) for rank in range(world)]
        shares = [sft.micro_batches(examples, numbers, config_of(batching), PAD, setup) for setup in setups]
        weights = [sum(float(batch[2].sum()) for batch in share) for share in shares]
        assert all(shares) and sum(weights) == pytest.approx(sum(float(w[1:].sum()) for _, w in examples))
        assert sum(weight == 0 for weight in weights) == max(0, world - 7)


def test_what_counts_for_the_budget_are_positions():
    """A conversation of 33 tokens has 32: two fill a row of 64, and not one of 63."""
    rows = lambda tokens: [batch[0].numel() for batch in sft.micro_batches(talks([33, 33]), np.arange(2), config_of("packed", 0, tokens), PAD, ALONE)]
    assert rows(64) == [64] and rows(63) == [32, 32]


def test_padding_of_the_three():
    examples, share = talks(LONG_TAILED), {}
    for batching in BATCHINGS:
        batches = sft.micro_batches(examples, np.arange(40), config_of(batching, 8, 512), PAD, ALONE)
        share[batching] = 1 - (sum(LONG_TAILED) - 40) / sum(batch[0].numel() for batch in batches)
    assert share["packed"] < 0.05 < share["buckets"] < 0.35 < share["padded"]


# --- what an epoch takes ----------------------------------------------------------------------------------------------

def test_a_plan_takes_of_each_source_what_it_should():
    sizes, counts = [50, 20, 300], [50, 45, 30]
    lengths = np.random.default_rng(0).integers(5, 90, sum(sizes))
    seen = np.zeros(sum(sizes), dtype=int)
    for epoch in range(4):
        steps = plan(lengths, sizes, counts, 16, 4, 1, epoch)
        assert all(np.array_equal(a, b) for a, b in zip(steps, plan(lengths, sizes, counts, 16, 4, 1, epoch)))
        rows = np.concatenate(steps)
        assert len(steps) == -(-125 // 16)
        assert [((rows >= first) & (rows < last)).sum() for first, last in ((0, 50), (50, 70), (70, 370))] == counts
        seen += np.bincount(rows, minlength=sum(sizes))
    assert (seen[:50] == 4).all() and set(seen[50:70]) == {9} and set(seen[70:]) == {0, 1}
    assert not np.array_equal(np.concatenate(plan(lengths, sizes, counts, 16, 4, 2, 0)), np.concatenate(plan(lengths, sizes, counts, 16, 4, 1, 0)))


def shards(folder, pages=40, splits=("train", "val")):
    """Pages of random letters as token shards."""
    tokenizer, rng, made = byte_tokenizer(), random.Random(3), {}
    for split in splits:
        writer = ShardWriter(folder, split, tokenizer.vocab_size, 10 ** 6)
        for _ in range(pages):
            text = "".join(rng.choice("abcdef ") for _ in range(rng.randint(1, 150)))
            writer.add([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id])
        made[split] = writer.close()
    write_index(folder, tokenizer, made)
    return tokenizer


def test_pieces_of_text_do_not_reach_over_a_documents_end(tmp_path):
    tokenizer = shards(tmp_path)
    data = TokenData(tmp_path, "train", tokenizer.hash)
    everything = text_examples(data, tokenizer, 32, 10 ** 9, seed=1)
    assert 0 < data.n_tokens - sum(len(ids) for ids, _ in everything) + data.n_tokens // 32 < data.n_tokens // 8
    for ids, weights in everything:
        assert 2 <= len(ids) <= 33 and tokenizer.bos_id not in ids[1:] and (weights == 1).all()
    some = text_examples(data, tokenizer, 32, 500, seed=1)
    assert 500 <= sum(len(ids) - 1 for ids, _ in some) < 533
    assert any(not np.array_equal(a[0], b[0]) for a, b in zip(some, text_examples(data, tokenizer, 32, 500, seed=2)))
