"""
Deduplication on planted pairs of known resemblance, beside datasketch's "optimal" bands, and its limits.

    python bench/dedup.py                       recall and wrong removals at each resemblance
    python bench/dedup.py --crowd=50000         time and memory for so many pages of one template
    python bench/dedup.py --many=1000000        time and memory for so many short documents

Documents are sets of 5-grams, given as random 32-bit hashes, so that the resemblance of a pair is exact: the two share
as many as makes it so, and nothing with any other pair. datasketch's bands are used as it does, without verification.
Seconds are those of one core.
"""
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from configurator import configure
from prepare.dedup import MinHash, buckets, candidate_probability, jaccard, representatives

pairs = 300                     # at each resemblance
size = 1300                     # 5-grams in a document
threshold = 0.85
bands = 16
rows = 8
crowd = 0                       # pages of one template, at 0.75 of each other
many = 0                        # documents of 100 5-grams, one in a hundred a near-copy
seed = 1

LEVELS = (0.6, 0.7, 0.74, 0.8, 0.84, 0.85, 0.87, 0.9, 0.95)


def pair(draw, size, level):
    """Two sorted sets of `size` numbers whose resemblance is the smallest from `level` on."""
    same = int(np.ceil(2 * size * level / (1 + level)))
    numbers = np.unique(draw.integers(0, 2 ** 32, 3 * size, dtype=np.uint32))
    draw.shuffle(numbers)
    first, fresh = numbers[:size], numbers[size:2 * size - same]
    return np.sort(first), np.sort(np.concatenate([first[:same], fresh]))


def chosen_of(sets, threshold, bands, rows, verified=True):
    """The representative of each; without verification, the earliest that shares a bucket with it."""
    minhash = MinHash(bands, rows, 1)
    keys, sketches = zip(*(minhash.bands(minhash.signature(grams)) for grams in sets))
    shared = np.stack([buckets(column) for column in np.array(keys).T], axis=1)
    if verified:
        sizes = np.array([len(grams) for grams in sets])
        return representatives(shared, np.array(sketches), sizes, sets.__getitem__, threshold)[0]
    both = [(shared[number] == shared[number ^ 1]) & (shared[number] >= 0) for number in range(len(sets))]
    return np.array([number & ~1 if both[number].any() else number for number in range(len(sets))])


def table(config):
    draw = np.random.default_rng(config.seed)
    peer = None
    try:
        from datasketch.lsh import _optimal_param
        peer = _optimal_param(config.threshold, config.bands * config.rows, 0.5, 0.5)
    except ImportError:
        print("(datasketch is not installed: the second column is its 8 bands of 16 for 0.85, by our own hashes)")
    b, r = peer or (8, 16)
    print(f"{config.pairs} pairs of {config.size} 5-grams at each resemblance; removed from {config.threshold} on\n"
          f"{'resemblance':>12}{f'ours, {config.bands} x {config.rows}, verified':>26}{'compared (expected)':>22}"
          f"{f'{b} x {r}, not verified':>24}")
    for level in LEVELS:
        sets = [grams for _ in range(config.pairs) for grams in pair(draw, config.size, level)]
        assert all(jaccard(*sets[2 * n:2 * n + 2]) >= level for n in range(config.pairs))
        ours = (chosen_of(sets, config.threshold, config.bands, config.rows)[1::2] % 2 == 0).mean()
        theirs = (chosen_of(sets, 0, b, r, verified=False)[1::2] % 2 == 0).mean()
        compared = candidate_probability(level, config.bands, config.rows)
        print(f"{level:>12}{ours:>26.1%}{compared:>22.1%}{theirs:>24.1%}")


def crowd_of(config):
    """Pages at 0.75 of each other, all kept, and a near-copy of each hundredth."""
    draw = np.random.default_rng(config.seed)
    template = np.unique(draw.integers(0, 2 ** 32, 857, dtype=np.uint32))
    pages = [np.unique(np.concatenate([template, draw.integers(0, 2 ** 32, 143, dtype=np.uint32)]))
             for _ in range(config.crowd)]
    copies = [np.unique(np.concatenate([page[:980], draw.integers(0, 2 ** 32, 20, dtype=np.uint32)]))
              for page in pages[::100]]
    timed(f"{len(pages) + len(copies):,} pages of one template", pages + copies, config,
          np.arange(0, len(pages), 100))


def many_of(config):
    draw = np.random.default_rng(config.seed)
    sets = [np.sort(draw.integers(0, 2 ** 32, 100, dtype=np.uint32)) for _ in range(config.many)]
    for number in range(99, config.many, 100):
        sets[number] = np.sort(np.concatenate([sets[number - 1][:97], sets[number][:3]]))
    timed(f"{len(sets):,} documents of 100 5-grams", sets, config)


def timed(what, sets, config, originals=None):
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    minhash = MinHash(config.bands, config.rows, 1)
    begin = time.process_time()
    keys, sketches = np.zeros((len(sets), config.bands), "<u8"), np.zeros((len(sets), config.bands * config.rows), "u1")
    for number, grams in enumerate(sets):
        keys[number], sketches[number] = minhash.bands(minhash.signature(grams))
    signed, before = time.process_time(), peak()
    shared = np.stack([buckets(column) for column in keys.T], axis=1)
    sorted_at = time.process_time()
    sizes = np.array([len(grams) for grams in sets])
    chosen, _ = representatives(shared, sketches, sizes, sets.__getitem__, config.threshold)
    compared = time.process_time()
    print(f"{what}: signatures {signed - begin:.1f} s, buckets {sorted_at - signed:.1f} s, comparing "
          f"{compared - sorted_at:.1f} s; {(chosen != np.arange(len(sets))).sum():,} removed; memory {peak():,.0f} MB "
          f"at most, {peak() - before:,.0f} MB more than with the documents and signatures")
    if originals is not None:
        print(f"{(chosen[-len(originals):] == originals).mean():.1%} of the near-copies are found")


def main(config):
    if not (config.crowd or config.many):
        table(config)
    if config.crowd:
        crowd_of(config)
    if config.many:
        many_of(config)


if __name__ == "__main__":
    main(configure(globals()))
