"""How surprising a text is to a small model of clean text, which is trained here on a file that the user names.

An interpolated model of characters: the probability of a character after the last four mixes what was counted after
four, three, two, one and no characters, each order weighted by how many kinds of characters it has seen follow (Witten
and Bell 1991). Counts lie in tables by hash: n-grams that meet in one place add up, which makes both a little likelier.
The value depends on the model, so a page is never judged by the number, only by its place among all pages (CCNet).
"""

import functools
import hashlib

import numpy as np

from prepare.dedup import chained
from prepare.stream import text_of
from prepare.warc import json_page

ORDER = 5
TRAIN_CHARACTERS = 20_000_000
STRETCH = 1024                # characters each of the beginning, the middle and the end: enough for a mean


def codes_of(text):
    """(n,) uint64: its characters, in small letters, all white space alike."""
    return np.frombuffer(" ".join(text.lower().split()).encode("utf-32-le", "replace"), "<u4").astype(np.uint64)


class Model:
    """counts[k] of runs of k + 1 characters, totals[k] of what followed k characters, kinds[k] how many kinds of it."""

    def __init__(self, text):
        codes = codes_of(text[:TRAIN_CHARACTERS])
        bits = min(22, max(12, int(len(codes)).bit_length() + 1))
        self.shift = np.uint64(64 - bits)
        self.alphabet = len(np.unique(codes)) + 1                 # and one for all that it has not seen
        self.counts, self.totals, self.kinds = [], [], []
        hashed = chained(codes, 0, 1)
        for k in range(ORDER):
            before, hashed = self.at(hashed[:len(codes) - k]), chained(codes, k + 1, 1)
            runs, first = np.unique(hashed, return_index=True)
            self.counts.append(np.bincount(self.at(hashed), minlength=1 << bits).astype(np.float32))
            self.totals.append(np.bincount(before, minlength=1 << bits).astype(np.float32))
            self.kinds.append(np.bincount(before[first], minlength=1 << bits).astype(np.float32))
        tables = b"".join(table.tobytes() for table in (*self.counts, *self.totals, *self.kinds))
        self.hash = hashlib.sha256(tables).hexdigest()

    def at(self, hashed):
        return (hashed >> self.shift).astype(np.int64)

    def perplexity(self, text):
        """Two to the mean of bits a character: from 1, what could not be otherwise, to the size of the alphabet."""
        if len(text) > 3 * STRETCH:
            middle = (len(text) - STRETCH) // 2
            text = f"{text[:STRETCH]} {text[middle:middle + STRETCH]} {text[-STRETCH:]}"
        codes = codes_of(text)
        if not len(codes):
            return float(self.alphabet)
        likely, run = np.full(len(codes), 1 / self.alphabet), self.at(chained(codes, 0, 1))
        for k in range(min(ORDER, len(codes))):
            before, run = run[:len(codes) - k], self.at(chained(codes, k + 1, 1))
            totals, kinds = self.totals[k][before], self.kinds[k][before]
            seen = totals > 0
            mixed = (self.counts[k][run] + kinds * likely[k:]) / np.maximum(1, totals + kinds)
            likely[k:] = np.where(seen, np.minimum(mixed, 1), likely[k:])
        return float(2 ** -np.log2(likely).mean())


@functools.cache
def model_of(path):
    """The model of the file at `path`: plain text, or JSON lines with a "text"."""
    text = text_of(path, TRAIN_CHARACTERS * 4)
    if text.lstrip().startswith("{"):
        pages = (json_page(line.encode()) for line in text.split("\n"))              # the last line may be cut
        text = "\n".join(page["text"] for page in pages if "text" in page) or text
    return Model(text)
