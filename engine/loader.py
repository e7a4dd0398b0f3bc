"""
What a training run reads, in which order, and the thread that reads it ahead.

A run has a plan: an endless list of steps, each a set of blocks, that is a pure function of the data, the seed, the
shares of a mixture and the tokens of a step. Ranks and micro-batches only slice a step. What a run must remember is how
many steps it has done and which windows of the plan it went around (a roll-back past bad data): `plan_step`.
"""
import contextlib
import hashlib
import os
import queue
import threading
from pathlib import Path

import numpy as np
import torch

from configurator import refuse
from engine import parallel
from engine.shards import TokenData, batch, blocks_at, n_blocks


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

    weights: of the sources, > 0; their shares of the blocks are these over their sum. Each source has epochs of its
    own, so a small one with a large share comes round more often. A single source is in the order of `step_blocks`."""

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

    def describe(self, blocks):
        """In words: of each source its share and how often so many blocks of training go through it."""
        told = [f"{name}: {share:.4g} of it, {share * blocks / size:.2f} epochs of {source.n_tokens:,} tokens"
                for name, share, size, source in zip(self.names, self.shares, self.sizes, self.sources)]
        return "; ".join(told)

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
    first = {}                              # {real path: how it was named}
    for folder, weight in mix.items():
        if not isinstance(folder, str):
            problems.append(f"data_mix: folders are texts, found {folder!r}")
        elif (other := first.setdefault(os.path.realpath(folder), folder)) != folder:
            problems.append(f"data_mix: {other!r} and {folder!r} are one folder: give it one weight")
        if type(weight) not in (int, float) or not 0 < weight <= 1e300:         # sums stay finite
            problems.append(f"data_mix: the weight of {folder!r} must be a number above 0, at most 1e300, "
                            f"found {weight!r}")
    return problems


# --- reading ahead ---------------------------------------------------------------------------------------------------

def read_ahead(data, step, last, skipped, per_step, config, setup):
    """Yields for each step of training from `step` to the one before `last` its blocks, (per_step,) int64, and this
    rank's share of them as micro-batches on its device: [(inputs, targets, weights), ...], each (B, T).

    One thread reads the next steps meanwhile, so that between steps only the copying is left; on CUDA from pinned
    memory, which the GPU fetches by itself. To go on elsewhere in the plan, close() this and begin another."""
    on_cuda = setup.device.type == "cuda"
    size = setup.layout.micro if setup.layout else config.micro_batch_size

    def prepare(step):
        if on_cuda:
            torch.cuda.set_device(setup.device)         # else this thread would open a context on the first GPU
        blocks = data.step_blocks(plan_step(step, skipped), per_step, config.seed)
        return blocks, [[torch.from_numpy(part).pin_memory() if on_cuda else torch.from_numpy(part)
                         for part in batch(data, share, config.block_size)]
                        for share in parallel.my_share(blocks, size, setup)]

    with contextlib.closing(in_thread(prepare, range(step, last))) as prepared:
        for blocks, micro_batches in prepared:
            yield blocks, [tuple(part.to(setup.device, non_blocking=True) for part in parts) for parts in micro_batches]


def in_thread(prepare, steps, ahead=2):
    """Yields prepare(step) of each of `steps`, called in one thread, up to `ahead` steps before they are asked for.

    What it raises, a refusal too, is raised here in its turn. The thread ends when this generator does, whether it was
    used up, closed or forgotten, and when the main thread has ended: it never keeps a process alive."""
    made, stop = queue.Queue(ahead), threading.Event()

    def work():
        for step in steps:
            try:
                item = prepare(step), None
            except BaseException as error:              # SystemExit is none of the Exceptions
                item = None, error
            while not hand_over(item):
                if stop.is_set() or not threading.main_thread().is_alive():
                    return
            if item[1]:
                return

    def hand_over(item):
        with contextlib.suppress(queue.Full):
            made.put(item, timeout=0.1)
            return True

    thread = threading.Thread(target=work, name="loader")
    thread.start()
    try:
        for _ in steps:
            result, error = made.get()
            if error:
                raise error
            yield result
    finally:
        stop.set()
        thread.join()
