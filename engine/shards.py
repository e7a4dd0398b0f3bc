"""Documents and token shards on disk, and the order in which training reads them.

    data_dir/docs/{train,val}_NNNNN.jsonl.zst     one document a line: url, text, length, ...
    data_dir/tokens/{train,val}_NNNNN.bin         token ids, raw little-endian uint16 or uint32, no header
    data_dir/tokens/{train,val}_offsets.bin       uint64, where each document begins, and the end: n_docs + 1 numbers
    data_dir/tokens/index.json                    types, counts, checksums, and which tokenizer the ids belong to

Ids without their tokenizer are noise, and nothing in a .bin file could tell. So the index carries the tokenizer's hash,
and a reader that holds another tokenizer refuses.

The order of training is a pure function of (seed, step): no state, nothing to store but the step, the same for any
number of processes and after any resume. See `permuted`.
"""

import hashlib
import io
import json
import os
import zlib
from pathlib import Path

import numpy as np
import zstandard

from configurator import refuse
from engine.files import fits, intact, publish, read_json, write_atomic, write_json


# --------------------------------------------------------------------------------------------------------------------
# Documents

def document_files(data_dir, split):
    """The files of the documents of "train" or "val", in order."""
    audit = Path(data_dir) / "audit.json"
    if not audit.exists():
        refuse(f"there are no finished documents in {data_dir}/docs ({audit} is missing); "
               "make them with prepare_data.py and the same config files")
    written = read_json(audit, like={"documents": [{"file": str, "split": str}]})["documents"]
    return [Path(data_dir) / entry["file"] for entry in written if entry["split"] == split]


def read_documents(data_dir, split):
    """Yield the documents (dicts with url, text, length, language, split, ...) of "train" or "val", in order."""
    for file in document_files(data_dir, split):
        yield from read_jsonl_zst(file)


def read_jsonl_zst(path):
    """Yield the objects of a .jsonl.zst file. Lines end at "\\n" only, since texts may contain U+2028 or U+0085."""
    try:
        with open(path, "rb") as file:
            stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            for line in io.BufferedReader(stream, 1 << 20):
                yield json.loads(line)
    except OSError as error:
        refuse(f"{path} cannot be read: {error.strerror or error}; run prepare_data.py again with the same config")
    except (zstandard.ZstdError, ValueError) as error:
        refuse(f"{path} is damaged: {error}; delete it and run prepare_data.py again with the same config")


# --------------------------------------------------------------------------------------------------------------------
# Writing tokens

def dtype_for(vocab_size):
    """The smallest type that holds every id below vocab_size."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardWriter:
    """Writes the ids of one split, document by document, into files of `shard_tokens` ids (the last one shorter).

    Each file is written as .tmp, flushed to the disk and renamed; nothing is allocated in advance. A document may begin
    in one file and end in the next.
    """

    def __init__(self, folder, split, vocab_size, shard_tokens):
        self.folder, self.split = Path(folder), split
        self.vocab_size, self.shard_tokens = vocab_size, shard_tokens
        self.dtype = dtype_for(vocab_size)
        self.offsets = [0]
        self.files = []
        self.current, self.room, self.digest = None, 0, None
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, ids):
        """Append one document, BOS and EOS already in it. Refuses an id outside the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            # Never wrapped: 70,000 stored as uint16 would come back as the innocent-looking 4,464.
            wrong = int(ids.max() if ids.max() >= self.vocab_size else ids.min())
            refuse(f"token id {wrong} in document {len(self.offsets) - 1} of {self.split}: "
                   f"the vocabulary has the ids 0 to {self.vocab_size - 1}")
        self.offsets.append(self.offsets[-1] + len(ids))
        ids = ids.astype(self.dtype)
        while len(ids):
            if self.current is None:
                path = self.folder / f"{self.split}_{len(self.files):05d}.bin.tmp"
                self.current, self.room, self.digest = open(path, "wb"), self.shard_tokens, hashlib.sha256()
            part, ids = ids[:self.room], ids[self.room:]
            self.current.write(part)
            self.digest.update(part)
            self.room -= len(part)
            if self.room == 0:
                self._finish_file()

    def _finish_file(self):
        name = f"{self.split}_{len(self.files):05d}.bin"
        publish(self.current, self.folder / name)
        self.files.append({"name": name, "tokens": self.shard_tokens - self.room, "sha256": self.digest.hexdigest()})
        self.current = None

    def close(self):
        """Finish the last file and the offsets; the split's entry in index.json."""
        if self.current is not None:
            self._finish_file()
        name = f"{self.split}_offsets.bin"
        data = np.array(self.offsets, dtype="<u8").tobytes()
        write_atomic(self.folder / name, data)
        return {"n_tokens": self.offsets[-1], "n_docs": len(self.offsets) - 1, "files": self.files,
                "offsets": {"name": name, "sha256": hashlib.sha256(data).hexdigest()}}


def write_index(folder, tokenizer, splits, **origin):
    """Write index.json, which makes the shards valid: until it is there they do not exist for any reader.

    splits: {"train": what ShardWriter.close gave, ...}; origin: more entries, which say what the shards were made from.
    """
    write_json(Path(folder) / "index.json", {
        "dtype": dtype_for(tokenizer.vocab_size).name, "byte_order": "little",
        "vocab_size": tokenizer.vocab_size, "tokenizer_hash": tokenizer.hash,
        "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, **origin, "splits": splits,
    })


# --------------------------------------------------------------------------------------------------------------------
# Reading tokens

INDEX = {"splits": dict, "tokenizer_hash": str, "dtype": str, "vocab_size": int, "bos_id": int | None, "eos_id": int}
SPLIT = {"n_tokens": int, "n_docs": int, "files": [{"name": str, "tokens": int, "sha256": str}],
         "offsets": {"name": str, "sha256": str}}
READ_AT_START = 2**28       # bytes of a split up to which its files are compared with their checksums at each start


def changed_files(folder, files):
    """Sentences about those of these files, entries of an index, that are not as they were. Reads every byte."""
    paths = [Path(folder) / file["name"] for file in files]
    return [f"{path} " + ("has other content than index.json says" if path.is_file() else "is missing")
            for path, file in zip(paths, files) if not intact(folder, {path.name: file["sha256"]})]


def shard_problems(folder):
    """The same about all files of a tokens/ folder."""
    splits = [*read_json(Path(folder) / "index.json", like=INDEX)["splits"].values()]
    if not fits(splits, [SPLIT]):
        return [f"{folder}/index.json is damaged: its splits have another form"]
    return changed_files(folder, [file for split in splits for file in (*split["files"], split["offsets"])])


class TokenData:
    """The token stream of one split: shard files joined into one sequence of n_tokens ids.

    `rebuild` is the command that makes the shards; it stands in the messages of the refusals.
    """

    def __init__(self, folder, split, tokenizer_hash=None, rebuild="python prepare_data.py"):
        self.folder, self.rebuild = Path(folder), rebuild
        if not (self.folder / "index.json").exists():
            self.refuse("there are no token shards (no index.json)")
        self.index = read_json(self.folder / "index.json")
        if wrong := [name for name, like in INDEX.items() if not fits(self.index, {name: like})]:
            self.refuse(f"index.json is damaged or not ours: {', '.join(wrong)}")
        if tokenizer_hash is not None and tokenizer_hash != self.index["tokenizer_hash"]:
            self.refuse("the shards were made with another tokenizer than the one in use\n"
                        f"    shards     {self.index['tokenizer_hash']}\n    tokenizer  {tokenizer_hash}\n"
                        "so their ids mean nothing to it")
        entry = self.index["splits"].get(split)
        if entry is None or fits(entry, SPLIT) and not entry["n_docs"]:
            self.refuse(f"there are no documents in the split '{split}': raise val_fraction or give more input")
        if not fits(entry, SPLIT) or self.index["dtype"] not in ("uint16", "uint32"):
            self.refuse(f"index.json is damaged: the dtype, or what it says of the split '{split}'")
        self.n_tokens, self.n_docs = entry["n_tokens"], entry["n_docs"]
        self.bos_id, self.eos_id = self.index["bos_id"], self.index["eos_id"]
        self.dtype = np.dtype(self.index["dtype"]).newbyteorder("<")
        # Not mapped: every page that was ever looked at would count as this process's memory, and a file that is cut
        # short or a disk that fails would kill it without a word.
        self.files = [open(self._path(file["name"], self.dtype, file["tokens"]), "rb", 0) for file in entry["files"]]
        self.starts = np.cumsum([0] + [file["tokens"] for file in entry["files"]])
        offsets = self._path(entry["offsets"]["name"], np.dtype("<u8"), self.n_docs + 1)
        self.offsets = np.memmap(offsets, np.dtype("<u8"), "r")
        if not self.n_tokens == self.starts[-1] == self.offsets[-1]:
            self.refuse(f"index.json is damaged: n_tokens = {self.n_tokens}, the files of '{split}' have "
                        f"{self.starts[-1]} and its documents end at {self.offsets[-1]}")
        listed = [*entry["files"], entry["offsets"]]
        self._compare(listed)
        checksums = [file["sha256"] for file in listed]
        self.data_hash = hashlib.sha256("".join(checksums).encode()).hexdigest()

    def _compare(self, listed):
        """With the checksums, where that takes no time; of more data it is said which are newer than their index."""
        stats = {file["name"]: (self.folder / file["name"]).stat() for file in listed}
        newer = [name for name, stat in stats.items() if stat.st_mtime > (self.folder / "index.json").stat().st_mtime]
        if sum(stat.st_size for stat in stats.values()) <= READ_AT_START:
            if problems := changed_files(self.folder, listed):
                self.refuse("; ".join(problems))
        elif newer and os.environ.get("RANK", "0") == "0":
            print(f"note: {len(newer)} files in {self.folder}, {newer[0]} first, are newer than index.json: "
                  f"changed or copied since. python doctor.py --verify={self.folder} compares them; touch index.json "
                  "ends this note", flush=True)

    def refuse(self, problem):
        refuse(f"{self.folder}: {problem}. Make the shards anew with\n    {self.rebuild}")

    def _path(self, name, dtype, count):
        """The path of a file that has `count` numbers; refuses one that has not."""
        path = self.folder / name
        size = path.stat().st_size if path.exists() else None
        if size != count * dtype.itemsize:
            found = "is missing" if size is None else f"has {size:,} bytes"
            self.refuse(f"{name} {found}, expected {count * dtype.itemsize:,} bytes")
        return path

    def read_block(self, block, block_size):
        """Its inputs and, one further, its targets: (block_size + 1,) int64; fewer at the end of the data."""
        return self.read(int(block) * block_size, block_size + 1)

    def read(self, start, count):
        """(count,) int64: the tokens from position `start` on; fewer at the end of the data."""
        end = min(start + count, self.n_tokens)
        first, last = np.searchsorted(self.starts, start, side="right") - 1, np.searchsorted(self.starts, end)
        parts = [self._read_file(number, max(start, self.starts[number]), min(end, self.starts[number + 1]))
                 for number in range(first, last)]
        ids = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        if len(ids) and ids.max() >= self.index["vocab_size"]:
            self.refuse(f"the shards are damaged: token id {ids.max()} at {start:,} or behind, where the "
                        f"vocabulary has {self.index['vocab_size']}")
        return ids

    def _read_file(self, number, start, end):
        """The tokens from position start to end, which file `number` has. Any thread may ask: there is no file
        pointer."""
        file, size = self.files[number], self.dtype.itemsize
        try:
            found = os.pread(file.fileno(), int(end - start) * size, int(start - self.starts[number]) * size)
        except OSError as error:
            self.refuse(f"{Path(file.name).name} cannot be read: {error.strerror}")
        if len(found) < (end - start) * size:
            self.refuse(f"{Path(file.name).name} has become shorter since it was opened")
        return np.frombuffer(found, self.dtype)


# --------------------------------------------------------------------------------------------------------------------
# Order

def mix64(x):
    """splitmix64's finaliser: array of uint64 -> the same, every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


ROUNDS = 6


def permuted(i, n, seed):
    """Where `i` goes in a permutation of range(n) that `seed` chooses: int64, of the shape of `i`.

    Nothing is stored or shuffled: a Feistel network is a bijection of all numbers of 2h bits, whatever its round
    function is. Where it leaves range(n), it is applied again until it returns ("cycle walking"): since a bijection
    moves in cycles and the start was inside, it must come back, and two starts never meet. The domain is less than
    4n large, so that takes fewer than 4 rounds on average.
    """
    i = np.asarray(i, dtype=np.int64)
    if n < 1 or (i.size and (i.min() < 0 or i.max() >= n)):
        raise ValueError(f"permuted: positions must lie in range({n})")
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    golden = 0x9E3779B97F4A7C15
    keys = mix64(np.array([(seed * (ROUNDS + 1) + r + 1) * golden % (1 << 64) for r in range(ROUNDS)], dtype=np.uint64))

    def network(x):
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (mix64(right + key) & mask)
        return (left << half) | right

    x = network(i.ravel().astype(np.uint64))
    outside = np.flatnonzero(x >= np.uint64(n))
    while outside.size:
        x[outside] = network(x[outside])
        outside = outside[x[outside] >= np.uint64(n)]
    return x.astype(np.int64).reshape(i.shape)


def n_blocks(n_tokens, block_size):
    """How many blocks cover all targets, which are the tokens 1 to n_tokens - 1; the last block may be padded."""
    return max(0, -(-(n_tokens - 1) // block_size))


def step_blocks(step, blocks_per_step, n_blocks, seed):
    """(blocks_per_step,) int64: the blocks of global step `step`.

    Steps cut an endless stream of epochs, each a permutation of all blocks of its own: every block comes once an epoch,
    a step may lie across the edge of two, and nothing but the step's number is needed to find the place again.
    """
    return blocks_at(step * blocks_per_step + np.arange(blocks_per_step, dtype=np.int64), n_blocks, seed)


def blocks_at(places, n_blocks, seed):
    """The blocks at these ascending places of the endless stream: int64, of their shape. seed: a number or a text."""
    epoch, within = np.divmod(places, n_blocks)
    parts = [np.empty(0, dtype=np.int64)]
    for number in np.unique(epoch):
        epoch_seed = int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little")
        parts.append(permuted(within[epoch == number], n_blocks, epoch_seed))
    return np.concatenate(parts)


def steps_by_length(lengths, batch_size, window, seed, epoch):
    """The steps of one epoch over rows of these lengths, a list of arrays of row numbers: each row once; one step may
    be short.

    All are permuted, then within each `window` steps sorted by length, so that the rows of a step are of similar length
    and little of it is padding; then the order of the steps is permuted, so that lengths do not rise and fall."""
    def shuffled(n, what):
        return permuted(np.arange(n), n, zlib.crc32(f"{seed} {epoch} {what}".encode()))

    order, steps = shuffled(len(lengths), "conversations"), []            # the word is part of the seed
    for start in range(0, len(order), batch_size * window):
        bucket = order[start:start + batch_size * window]
        bucket = bucket[np.argsort(lengths[bucket], kind="stable")]
        steps += [bucket[i:i + batch_size] for i in range(0, len(bucket), batch_size)]
    return [steps[i] for i in shuffled(len(steps), "steps")]


def batch(data, block_ids, block_size):
    """The blocks as (inputs, targets, weights): int64 (B, T), int64 (B, T), float32 (B, T).

    Block b holds the tokens b*T to b*T+T: T inputs and, one further, T targets. The weight of a target is 0 where it is
    padding behind the end of the data, and where it is BOS: what document comes next is not to be learned.
    """
    ids = np.full((len(block_ids), block_size + 1), data.eos_id, dtype=np.int64)
    real = np.zeros((len(block_ids), block_size + 1), dtype=bool)
    for row, block in enumerate(block_ids):
        part = data.read_block(block, block_size)
        ids[row, :len(part)] = part
        real[row, :len(part)] = True
    targets = ids[:, 1:]
    weights = (real[:, 1:] & (targets != data.bos_id)).astype(np.float32)
    return ids[:, :-1].copy(), targets.copy(), weights


def begins_of(ids, tokenizer):
    """Where in rows of tokens, a tensor (B, T), a document begins, (B, T) bool: at its BOS; behind an EOS where the
    tokenizer has no BOS, as Qwen's, and documents are `text EOS`."""
    if tokenizer.bos_id is not None:
        return ids == tokenizer.bos_id
    begins = ids.new_zeros(ids.shape, dtype=bool)
    begins[:, 1:] = ids[:, :-1] == tokenizer.eos_id
    return begins
