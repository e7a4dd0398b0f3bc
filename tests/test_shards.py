"""Token shards and the order of blocks: what is written is read, nothing wraps, every block comes once an epoch."""

import collections
import json
import os
import types

import numpy as np
import pytest
import zstandard

import doctor
from configurator import configure
from engine import shards
from engine.files import write_json
from engine.shards import (ShardWriter, TokenData, batch, dtype_for, n_blocks, permuted, read_documents, step_blocks,
                           write_index)

BOS, EOS = 1, 2


def tokenizer(vocab_size=300, hash="a" * 64):
    return types.SimpleNamespace(vocab_size=vocab_size, hash=hash, bos_id=BOS, eos_id=EOS)


def write(folder, documents, vocab_size=300, shard_tokens=1000, splits=("train",)):
    entries = {}
    for split in splits:
        writer = ShardWriter(folder, split, vocab_size, shard_tokens)
        for document in documents:
            writer.add(np.array(document))
        entries[split] = writer.close()
    write_index(folder, tokenizer(vocab_size), entries, config_hash="c", source_hash="s")
    return TokenData(folder, splits[0])


def some_documents(count, seed=0):
    draw = np.random.default_rng(seed)
    return [[BOS, *draw.integers(3, 300, draw.integers(0, 40)).tolist(), EOS] for _ in range(count)]


# --------------------------------------------------------------------------------------------------------------------
# Files

@pytest.mark.parametrize("shard_tokens", [1, 7, 64, 10_000])
def test_what_is_written_is_read_across_the_edges_of_files(tmp_path, shard_tokens):
    documents = some_documents(30)
    stream = np.concatenate(documents)
    data = write(tmp_path, documents, shard_tokens=shard_tokens)
    assert data.n_tokens == len(stream) and data.n_docs == 30
    assert len(data.files) == -(-len(stream) // shard_tokens)
    for start in range(0, len(stream), 13):
        for count in (0, 1, 5, 100):
            part = data.read(start, count)
            assert part.dtype == np.int64 and np.array_equal(part, stream[start:start + count])
    for number, document in enumerate(documents):
        first, last = int(data.offsets[number]), int(data.offsets[number + 1])
        assert data.read(first, last - first).tolist() == document
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["format_version"] == 1 and index["dtype"] == "uint16" and index["tokenizer_hash"] == "a" * 64
    assert not list(tmp_path.glob("*.tmp"))


def test_r28_the_type_follows_the_vocabulary_and_ids_never_wrap(tmp_path, capsys):
    assert dtype_for(65536) == np.dtype("<u2") and dtype_for(65537) == np.dtype("<u4")
    data = write(tmp_path / "large", [[BOS, 70_000, 65_536, EOS]], vocab_size=100_000)
    assert data.index["dtype"] == "uint32" and data.read(0, 4).tolist() == [BOS, 70_000, 65_536, EOS]
    data = write(tmp_path / "edge", [[BOS, 65_535, EOS]], vocab_size=65_536)
    assert data.index["dtype"] == "uint16" and data.read(0, 3).tolist() == [BOS, 65_535, EOS]
    for wrong in (70_000, 300, -1):
        with pytest.raises(SystemExit) as stop:
            ShardWriter(tmp_path / "small", "train", 300, 10).add(np.array([BOS, wrong, EOS]))
        assert stop.value.code == 2 and str(wrong) in capsys.readouterr().err


def test_another_tokenizer_is_refused_with_both_hashes_and_the_command(tmp_path, capsys):
    write(tmp_path, some_documents(3))
    TokenData(tmp_path, "train", "a" * 64)
    with pytest.raises(SystemExit) as stop:
        TokenData(tmp_path, "train", "b" * 64, "python prepare_data.py config/x.py")
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert "a" * 64 in message and "b" * 64 in message and "python prepare_data.py config/x.py" in message


def test_ids_that_are_no_tokens_and_an_index_without_keys_are_refused(tmp_path, capsys, monkeypatch):
    write(tmp_path, some_documents(30))
    content = bytearray((tmp_path / "train_00000.bin").read_bytes())
    content[101] = 0xff                     # the high byte of an id
    (tmp_path / "train_00000.bin").write_bytes(content)
    monkeypatch.setattr(shards, "READ_AT_START", 0)
    data = TokenData(tmp_path, "train", rebuild="REBUILD")
    assert len(data.read(0, 50)) == 50
    with pytest.raises(SystemExit) as stop:
        data.read(0, 60)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "damaged" in said and "vocabulary has 300" in said and "REBUILD" in said
    write_json(tmp_path / "index.json", {"splits": {}})
    with pytest.raises(SystemExit) as stop:
        TokenData(tmp_path, "train", rebuild="REBUILD")
    assert stop.value.code == 2 and "tokenizer_hash" in capsys.readouterr().err


def test_changed_bytes_are_found(tmp_path, capsys, monkeypatch):
    """One bit that stays within the vocabulary, in tokens and in offsets: at the start where there are few, by doctor.py
    always; of many a note when the files are newer than the index."""
    folder = tmp_path / "tokens"
    write(folder, some_documents(30), splits=("train", "val"))
    assert shards.shard_problems(folder) == []
    victim = folder / "train_00000.bin"
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        TokenData(folder, "train", rebuild="REBUILD")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and f"{victim} has other content than index.json says" in said and "REBUILD" in said
    assert TokenData(folder, "val").n_docs
    monkeypatch.setattr(shards, "READ_AT_START", 0)
    os.utime(victim, (1, 1))
    assert TokenData(folder, "train").n_docs and "note" not in capsys.readouterr().out
    os.utime(victim, (2 ** 32, 2 ** 32))
    assert TokenData(folder, "train").n_docs
    said = capsys.readouterr().out
    assert "note: 1 files in " in said and f"--verify={folder}" in said
    (folder / "val_offsets.bin").unlink()
    for path in (tmp_path, folder):
        with pytest.raises(SystemExit) as stop:
            doctor.main(configure(vars(doctor), [f"--verify={path}"]))
        said = capsys.readouterr().out
        assert stop.value.code == 1 and "2 found" in said and f"{folder}/val_offsets.bin is missing" in said


@pytest.mark.parametrize("change, word", [
    (lambda index: index.clear() or index.update(files=[]), "splits, tokenizer_hash, dtype, vocab_size, bos_id, eos_id"),
    (lambda index: index.update(splits=[]), "damaged"),
    (lambda index: index.update(dtype="nothing"), "damaged"),
    (lambda index: index["splits"].update(train={"files": []}), "damaged"),
    (lambda index: index.update(eos_id=True), "damaged or not ours: eos_id"),
    (lambda index: index["splits"]["train"].update(n_docs=True), "damaged"),
    (lambda index: index["splits"]["train"].update(files=[]), "damaged: n_tokens"),
    (lambda index: index["splits"]["train"].update(files=[5]), "damaged"),
    (lambda index: index["splits"]["train"].update(n_tokens=7), "damaged: n_tokens = 7"),
    (lambda index: index["splits"]["train"].update(offsets=None), "damaged"),
])
def test_an_index_that_is_json_and_no_index_is_refused(tmp_path, capsys, change, word):
    write(tmp_path, some_documents(3))
    index = json.loads((tmp_path / "index.json").read_text())
    change(index)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(SystemExit) as stop:
        TokenData(tmp_path, "train")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and word in said and str(tmp_path) in said


def test_missing_empty_and_shortened_shards_are_refused(tmp_path, capsys):
    def refused(word, split="train"):
        with pytest.raises(SystemExit) as stop:
            TokenData(tmp_path, split, rebuild="REBUILD")
        message = capsys.readouterr().err
        assert stop.value.code == 2 and word in message and "REBUILD" in message

    refused("no index.json")
    write(tmp_path, some_documents(3), splits=("train", "val"))
    refused("split 'test'", "test")
    with open(tmp_path / "train_00000.bin", "ab") as file:
        file.truncate(10)
    refused("10 bytes")
    (tmp_path / "train_00000.bin").unlink()
    refused("is missing")
    with pytest.raises(SystemExit):
        write(tmp_path, [])
    refused("no documents")


def test_data_hash_follows_the_content(tmp_path):
    hashes = {write(tmp_path / str(number), documents, shard_tokens=50).data_hash
              for number, documents in enumerate([some_documents(9), some_documents(9), some_documents(9, seed=1)])}
    assert len(hashes) == 2


def test_data_hash_follows_the_borders_of_documents(tmp_path):
    one = write(tmp_path / "one", [[BOS, 5, EOS], [BOS, 6, EOS]])
    other = write(tmp_path / "other", [[BOS, 5], [EOS, BOS, 6, EOS]])
    assert one.read(0, 6).tolist() == other.read(0, 6).tolist() and one.data_hash != other.data_hash


def test_every_file_is_flushed_before_it_gets_its_name_and_its_folder_after(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace
    path_of = lambda descriptor: os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("no /proc to see what is flushed")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append(path_of(descriptor)), fsync(descriptor)))
    name_of = os.path.basename
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(f"-> {name_of(new)}"), replace(old, new)))
    write(tmp_path / "tokens", [[BOS, *range(3, 12), EOS]], shard_tokens=6)
    names = ["train_00000.bin", "train_00001.bin", "train_offsets.bin", "index.json"]
    assert events == [event for name in names for event in (f"{name}.tmp", f"-> {name}", "tokens")]


def test_all_frames_of_a_file_of_documents_are_read(tmp_path):
    write_json(tmp_path / "audit.json", {"documents": [{"file": "a.jsonl.zst", "split": "train"}]})
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in ("one\u2028two", "three")]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, lines)))
    assert [document["text"] for document in read_documents(tmp_path, "train")] == ["one\u2028two", "three"]


def test_documents_without_an_audit_are_unfinished(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        list(read_documents(tmp_path, "train"))
    assert stop.value.code == 2 and "prepare_data.py" in capsys.readouterr().err
    write_json(tmp_path / "audit.json", {"documents": [{"file": "docs/train_00000.jsonl.zst", "split": "train"}]})
    with pytest.raises(SystemExit):
        list(read_documents(tmp_path, "train"))
    write_json(tmp_path / "audit.json", {"files": []})
    with pytest.raises(SystemExit):
        list(read_documents(tmp_path, "train"))
    assert "audit.json: 'documents' is missing" in capsys.readouterr().err
    write_json(tmp_path / "audit.json", {"documents": [{"file": "docs/train_00000.jsonl.zst", "split": "train"}]})
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "train_00000.jsonl.zst").write_bytes(b"not zstd")
    with pytest.raises(SystemExit):
        list(read_documents(tmp_path, "train"))
    assert "damaged" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# Order

@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 100, 255, 256, 257, 1000, 65_537])
def test_permuted_is_a_permutation(n):
    for seed in (0, 1, 12345, 2 ** 63, -5):
        assert np.array_equal(np.sort(permuted(np.arange(n), n, seed)), np.arange(n))


def test_permuted_needs_no_neighbours_and_depends_on_the_seed():
    n = 10_000
    whole = permuted(np.arange(n), n, 7)
    draw = np.random.default_rng(0).integers(0, n, 50)
    assert np.array_equal(permuted(draw, n, 7), whole[draw])
    assert int(permuted(17, n, 7)) == whole[17]
    assert permuted(draw.reshape(5, 10), n, 7).shape == (5, 10)
    assert (permuted(np.arange(n), n, 8) == whole).mean() < 0.01


def test_permuted_reaches_beyond_32_bits():
    n = 10 ** 12 + 39
    out = permuted(np.array([0, 1, n - 1, n // 2]), n, 3)
    assert len(set(out.tolist())) == 4 and out.min() >= 0 and out.max() < n


def test_permuted_is_well_mixed():
    """Over seeds, each position goes everywhere equally often, and neighbours are torn apart (chi-square, 5 sigma)."""
    n, seeds = 40, 1500
    counts, pairs = np.zeros((n, n)), np.zeros((n, n))
    for seed in range(seeds):
        out = permuted(np.arange(n), n, seed)
        counts[np.arange(n), out] += 1
        np.add.at(pairs, (out[:-1], out[1:]), 1)
    for table, freedom in ((counts.ravel(), (n - 1) ** 2), (pairs[~np.eye(n, dtype=bool)], n * (n - 1) - 1)):
        expected = table.mean()
        assert ((table - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5
    large = permuted(np.arange(100_000), 100_000, 1)
    assert abs(np.corrcoef(np.arange(100_000), large)[0, 1]) < 0.02
    assert (np.abs(np.diff(large)) < 10).mean() < 0.001


def test_permuted_refuses_positions_outside():
    for i, n in ((5, 5), (-1, 5), (0, 0)):
        with pytest.raises(ValueError):
            permuted(i, n, 0)


def test_n_blocks_covers_every_target_once():
    for n_tokens in range(0, 40):
        for block_size in (1, 4, 7):
            count = n_blocks(n_tokens, block_size)
            targets = max(0, n_tokens - 1)
            assert count == 0 == targets or count * block_size >= targets > (count - 1) * block_size


@pytest.mark.parametrize("blocks, per_step", [(10, 3), (10, 10), (3, 10), (1, 4), (7, 1)])
def test_r10_r11_every_epoch_visits_every_block_once_for_ever(blocks, per_step):
    epochs = 5
    steps = -(-epochs * blocks // per_step)
    stream = np.concatenate([step_blocks(step, per_step, blocks, seed=1) for step in range(steps)])
    orders = [stream[epoch * blocks:(epoch + 1) * blocks].tolist() for epoch in range(epochs)]
    for order in orders:
        assert sorted(order) == list(range(blocks))
    if blocks == 10:
        assert len(set(map(tuple, orders))) == epochs            # each epoch has its own order
    assert step_blocks(1, per_step, blocks, 1).tolist() == stream[per_step:2 * per_step].tolist()    # no state


def test_the_order_is_the_same_for_any_split_over_ranks():
    steps = [step_blocks(step, 12, 50, seed=3) for step in range(9)]
    for world in (1, 2, 3, 4):
        ranks = [[step_blocks(step, 12, 50, seed=3)[rank::world] for step in range(9)] for rank in range(world)]
        for step in range(9):
            assert sorted(np.concatenate([rank[step] for rank in ranks])) == sorted(steps[step])


# --------------------------------------------------------------------------------------------------------------------
# Batches

@pytest.mark.parametrize("block_size", [1, 4, 16, 1000])
@pytest.mark.parametrize("shard_tokens", [5, 10_000])
def test_batches_hold_every_target_once_with_the_right_weights(tmp_path, block_size, shard_tokens):
    documents = some_documents(12)
    stream = np.concatenate(documents)
    data = write(tmp_path, documents, shard_tokens=shard_tokens)
    blocks = n_blocks(data.n_tokens, block_size)
    x, y, w = batch(data, np.arange(blocks), block_size)
    assert x.shape == y.shape == w.shape == (blocks, block_size)
    assert (x.dtype, y.dtype, w.dtype) == (np.int64, np.int64, np.float32)
    flat = y.ravel()[:len(stream) - 1]
    assert np.array_equal(flat, stream[1:]) and np.array_equal(x.ravel()[:len(stream) - 1], stream[:-1])
    weights = w.ravel()
    assert np.array_equal(weights[:len(flat)], (stream[1:] != BOS).astype(np.float32)) and not weights[len(flat):].any()
    assert w.sum() == len(stream) - len(documents)               # all tokens but each document's BOS are learned
    seen = collections.Counter(EOS == y[w > 0])
    assert seen[True] == len(documents)                          # EOS is a target


def test_batch_takes_blocks_in_the_given_order(tmp_path):
    data = write(tmp_path, some_documents(12))
    x, y, w = batch(data, np.array([3, 0, 3]), 8)
    assert np.array_equal(x[0], x[2]) and np.array_equal(x[1], data.read(0, 8))
    assert np.array_equal(y[0], data.read(25, 8))
