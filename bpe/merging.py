"""
The fast trainer: the merges of `train_slowly` in train_tokenizer.py, number for number, in less than a thousandth of
the time.

All distinct words stand behind each other in one array, a place for each byte and a mark between two words:

    byte       l   o   w  |  l   o   w   e   r  |           the words "low" (5 times) and "lower" (twice)
    token      l   o   w  |  l   o   w   e   r  |
    after lo  [lo lo]  w  | [lo lo]  w   e   r  |           a token's id stands at its first and at its last place,
    after low [low .. low]| [low .. low] e   r  |           so that both of its neighbours find it

For each pair there is a list of the places at which it was born, from first to last. A pair is born, with all its
places, in the merge that makes the later of its two tokens, and afterwards only ever loses some. So nobody has to
follow its losses:

    heap      holds each pair once, by the count that it had when it was last looked at: never too low
    next      the uppermost pair's places are looked through, and those where it no longer stands are dropped. When
              its count has fallen it goes back into the heap with the true one; otherwise no other is more frequent
    merge     the new token is written to its places, and with its left and right neighbours new pairs are born

A pair with many places is worked on as numpy arrays, one with few in plain Python, for which numpy would take longer.
Counts are int64 sums (a pair in 100 GB of text occurs more than 2**31 times). With V tokens, ids are below 2**20.
"""
import heapq

import numpy as np

from configurator import refuse
from engine.tokenizer import BYTE_ORDER

MANY = 48                       # places from which on numpy is faster, measured
BITS = 20                       # of a token id; a pair is left << BITS | right, which sorts as (left, right) does
ID = (1 << BITS) - 1
PAIR = (1 << 2 * BITS) - 1
BORDER, GONE = -1, -2           # between two words; where a token began that has become part of another


def merges_of(words, counts, n_merges, min_frequency=1, byte_order=BYTE_ORDER):
    """
    Yields (left id, right id, count) of one merge after another, of which the i-th makes id 256 + i, until there are
    n_merges or no pair occurs min_frequency times. Highest count first; of equals the smallest (left id, right id).

    words: list of bytes, each once; counts: how often each occurs; byte_order: the byte of each of the first 256 ids.
    """
    sizes = np.fromiter(map(len, words), np.int64, len(words))
    total = int((sizes + 1).sum())
    if total >= 1 << 31 or 256 + n_merges > 1 << BITS:
        refuse(f"the different words have {total:,} bytes together and {256 + n_merges:,} tokens are wanted, but 2**31 "
               f"and 2**{BITS} are the most: learn from a part of the text.")
    id_of = np.zeros(256, np.int32)
    id_of[byte_order] = np.arange(256)
    token = id_of[np.frombuffer(b"\0".join(words) + b"\0", np.uint8)]       # (places,), the last one a border
    token[np.cumsum(sizes + 1) - 1] = BORDER
    weight = np.asarray(counts, np.int64)
    weight = np.repeat(weight if weight.max(initial=0) >= 1 << 31 else weight.astype(np.int32), sizes + 1)
    size = np.ones(256 + n_merges, np.int32)                                # of each token, in bytes
    places, heap = {}, []                                                   # {pair: where it was born}

    def born(groups, at, pair_of):
        """New pairs: at their places `at`, grouped by `groups`, of which pair_of(group) is the pair."""
        order = groups.astype(np.int64)                                     # in place, for this may be the whole text
        order <<= 32
        order |= at
        order.sort()
        at = order.astype(np.int32)                                         # the lower half
        order >>= 32
        starts = np.append(0, np.flatnonzero(order[1:] != order[:-1]) + 1)
        sums = np.add.reduceat(weight[at], starts, dtype=np.int64)
        ends = np.append(starts[1:], len(at))
        often = sums >= min_frequency                                       # the others never become tokens
        for group, start, end, count in zip(order[starts[often]].tolist(), starts[often].tolist(),
                                            ends[often].tolist(), sums[often].tolist()):
            pair = pair_of(group)
            places[pair] = at[start:end]
            heapq.heappush(heap, pair - (count << 2 * BITS))

    at = np.flatnonzero((token[:-1] >= 0) & (token[1:] >= 0)).astype(np.int32)
    if len(at):
        born(token[at] << 8 | token[at + 1], at, lambda group: (group >> 8) << BITS | group & 255)
        del at
    # Plain Python reads and writes the same arrays through these, several times faster than through numpy.
    token_at, weight_at, size_of = memoryview(token), memoryview(weight), memoryview(size)
    new, end = 256, 256 + n_merges
    while heap and new < end:
        pair = heap[0] & PAIR
        left, right = pair >> BITS, pair & ID
        step = size_of[left]
        found = places[pair]
        many = len(found) >= MANY
        if many:
            found = np.asarray(found)
            found = found[(token[found] == left) & (token[found + step] == right)]
            count = int(weight[found].sum(dtype=np.int64))
        else:
            found = found if type(found) is list else found.tolist()
            found = [place for place in found if token_at[place] == left and token_at[place + step] == right]
            count = sum([weight_at[place] for place in found])
        if count < -(heap[0] >> 2 * BITS):
            if count >= min_frequency:
                places[pair] = found
                heapq.heapreplace(heap, pair - (count << 2 * BITS))
            else:
                del places[heapq.heappop(heap) & PAIR]
            continue
        heapq.heappop(heap)
        del places[pair]
        yield left, right, count

        width = size_of[new] = step + size_of[right]
        if many:
            if left == right:                    # of "aaaa" the second and the last pair are taken apart by the others
                begins = np.flatnonzero(np.diff(found, prepend=-2 * step) != step)
                within = np.arange(len(found)) - np.repeat(begins, np.diff(begins, append=len(found)))
                found = found[within % 2 == 0]
            token[found + step] = GONE
            token[found] = token[found + (width - 1)] = new
            before, behind = token[found - 1], token[found + width]
            with_left = before >= 0
            with_right = (behind >= 0) & (behind != new)                    # two new ones: once, from the left
            before, behind = before[with_left], behind[with_right]
            groups = np.concatenate([before, behind + end])
            if len(groups):
                at = np.concatenate([found[with_left] - size[before], found[with_right]])
                born(groups, at, lambda group: group << BITS | new if group < end else new << BITS | group - end)
        else:
            merged = []
            for place in found:
                if left != right or token_at[place] == left and token_at[place + step] == right:
                    token_at[place + step] = GONE
                    token_at[place] = token_at[place + width - 1] = new
                    merged.append(place)
            fresh = {}
            for place in merged:
                before, behind = token_at[place - 1], token_at[place + width]
                if before >= 0:
                    fresh.setdefault(before << BITS | new, []).append(place - size_of[before])
                if behind >= 0 and behind != new:
                    fresh.setdefault(new << BITS | behind, []).append(place)
            for pair, at in fresh.items():
                count = sum([weight_at[place] for place in at])
                if count >= min_frequency:
                    places[pair] = at
                    heapq.heappush(heap, pair - (count << 2 * BITS))
        new += 1
