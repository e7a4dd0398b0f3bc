"""
What a training run reads, in which order, and the thread that reads it ahead.

A run has a plan: an endless list of steps, each a set of blocks, that is a pure function of the data, the seed, the
shares of a mixture and the tokens of a step. Ranks and micro-batches only slice a step. What a run must remember is how
many steps it has done and which windows of the plan it went around (a roll-back past bad data): `plan_step`.
"""
import hashlib
from pathlib import Path

import numpy as np

from configurator import refuse
from engine.shards import TokenData, blocks_at, n_blocks


# --- the plan --------------------------------------------------------------------------------------------------------

def plan_step(done, skipped=()):
    """The step of the plan that comes after `done` steps of training; also: how much of the plan these have consumed,
    what they went around included.

    skipped: windows [(first, end), ...] of plan steps, end not in them, that are never trained on. Training takes the
    others in order. A window that begins at plan_step(r) or later leaves the steps before r as they were, so a
    roll-back to step r may add such windows, any number of times, and what was done up to r stays proven."""
    place, behind = done, 0
    for first, end in sorted(map(tuple, skipped)):
        if first > place:
            break
        place += max(0, end - max(first, behind))
        behind = max(end, behind)
    return place


def interleave(first, count, shares):
    """Which source each of the places first, ..., first + count - 1 of an endless stream belongs to, and the number of
    the block among that source's own: two int64 arrays (count,). shares: (n,) float64, sum 1.

    Block j of a source with share s is due at (j + 1/2) / s; what is due first comes first, of two the earlier source.
    So of the first p places a source has p * s, give or take at most (1 + (n - 2) * s) / 2: half a block when there are
    two. Nothing is gone through from the start: what is due before the first place is counted."""
    shares, n = np.asarray(shares, dtype=np.float64), len(shares)
    due_before = lambda time: np.maximum(0, np.ceil(time * shares - 0.5)).astype(np.int64)
    begin, end = due_before(first - n), due_before(first + count + n)       # of each source, surely enough on both sides
    source = np.repeat(np.arange(n), end - begin)
    number = np.concatenate([np.arange(a, b) for a, b in zip(begin, end)])
    order = np.lexsort((source, (number + 0.5) / shares[source]))[first - begin.sum():][:count]
    return source[order], number[order]


class Mixture:
    """The tokens of one or more folders as one supply of blocks, numbered through: the first source's, then the next's.

    weights: of the sources, > 0; their shares of the blocks are these over their sum. Each source has epochs of its own,
    so a small one with a large share comes round more often. A single source is in the order of `step_blocks`."""

    def __init__(self, sources, names, weights, block_size):
        self.sources, self.names, self.block_size = sources, names, block_size
        self.shares = np.array(weights, dtype=np.float64) / sum(weights)
        self.sizes = [n_blocks(source.n_tokens, block_size) for source in sources]
        self.firsts = np.cumsum([0, *self.sizes])
        self.bos_id, self.eos_id = sources[0].bos_id, sources[0].eos_id
        hashes = [source.data_hash for source in sources]
        self.data_hash = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

    def step_blocks(self, step, per_step, seed):
        """(per_step,) int64: the blocks of step `step` of the plan (see plan_step)."""
        source, number = interleave(step * per_step, per_step, self.shares)
        blocks = np.empty(per_step, dtype=np.int64)
        for s, size in enumerate(self.sizes):
            mine = source == s
            blocks[mine] = self.firsts[s] + blocks_at(number[mine], size, f"{seed} {s}" if s else seed)
        return blocks

    def source_of(self, blocks):
        """The number of the source (its name: self.names) of each of these blocks: int64, of the shape of `blocks`."""
        return np.searchsorted(self.firsts, blocks, side="right") - 1

    def read_block(self, block, block_size):
        source = int(self.source_of(block))
        return self.sources[source].read_block(block - int(self.firsts[source]), block_size)


def open_mixture(data_dir, data_mix, split, block_size, tokenizer_hash=None, rebuild="python prepare_data.py"):
    """The Mixture that a config asks for: the shards of the folders in data_mix {folder: weight}, or of data_dir alone.

    Sources are in the order of their folders' names: how data_mix lists them means nothing. Refuses with all that is
    wrong: weights that are no positive numbers, folders without shards, ids of another tokenizer."""
    mix = {data_dir: 1.0} if data_mix is None else dict(sorted(data_mix.items(), key=lambda item: str(item[0])))
    refuse(*mix_problems(mix))
    sources = []
    for folder in mix:
        command = rebuild if data_mix is None else f"{rebuild} --data_dir={folder}"
        try:
            sources.append(TokenData(Path(folder) / "tokens", split, tokenizer_hash, command))
        except SystemExit:
            continue                        # it has said what is wrong; the other folders' problems are wanted too
    if len(sources) < len(mix):
        raise SystemExit(2)
    short = [Path(folder).name for folder in mix]
    return Mixture(sources, short if len(set(short)) == len(short) else list(mix), list(mix.values()), block_size)


def mix_problems(mix):
    """Sentences about what is wrong with a data_mix itself."""
    problems = [] if mix else ["data_mix is empty: name folders and their weights, {'data/a': 0.7, 'data/b': 0.3}"]
    for folder, weight in mix.items():
        if not isinstance(folder, str):
            problems.append(f"data_mix: folders are texts, found {folder!r}")
        if type(weight) not in (int, float) or not 0 < weight < float("inf"):
            problems.append(f"data_mix: the weight of {folder!r} must be a number above 0, found {weight!r}")
    return problems
