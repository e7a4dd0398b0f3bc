"""Near-duplicates (MinHash), and paragraphs that stood before.

Two texts resemble each other as far as their sets of word 5-grams do: J = |A and B| / |A or B| (Broder 1997). A
signature keeps the minimum of each of 128 hash functions over the set; two signatures agree in a place with
probability J. Comparing all pairs is out of the question, so the signature is cut into 16 bands of 8: texts that agree
in a whole band are candidates, which happens with probability 1 - (1 - J^8)^16 (0.994 at 0.85, but also 0.24 at 0.6).

So a candidate is not yet a duplicate. Without the check below, pages that share a template are joined into one cluster
and all but one are lost; chains A~B~C make it worse. Nor does the signature tell: of pairs at exactly 0.85 it puts half
below. So the hashes of all 5-grams are kept, and a page is dropped only if its set and that of one page that is itself
kept have J >= threshold, counted out: its representative, the earliest such page.

What is left still shares much: menus, licences, and in API documentation every inherited method on every page. So each
paragraph may be kept where it stands first and left out after that, as CCNet does (Wenzek et al. 2019, arXiv
1911.00359, 3.1). No such paragraph is then on both sides of the split either.
"""

import functools
import hashlib
import re
import unicodedata

import numpy as np

NGRAM = 5
ACCENTS = re.compile("[\u0300-\u036f]")
# Of ASCII: small letters, every digit a 0, a space for what is in no word.
PLAIN = bytes(ord(re.sub(r"\W", " ", re.sub("[1-9]", "0", chr(code).lower()))) for code in range(256))
WORDS_KNOWN = 1 << 18         # hashes of words that are kept: 50 MB
SHINGLES_AT_ONCE = 2048       # times 128 hashes: what fits into the cache (a book at once would be half a gigabyte)
MIX = np.uint64(0x9E3779B97F4A7C15)


def text_hash(data):
    """16 bytes that tell exact duplicates, of a text in UTF-8."""
    return hashlib.blake2b(data, digest_size=16).digest()


def words_of(text):
    """Words as they count for resemblance, in UTF-8: no case, accents or punctuation, every digit a 0."""
    if text.isascii():
        return text.encode().translate(PLAIN).split()
    text = re.sub(r"\d", "0", ACCENTS.sub("", unicodedata.normalize("NFKD", text.lower())))
    return " ".join(re.findall(r"\w+", text)).encode("utf-8").split()


class WordHashes(dict):
    """{word: its hash}, 8 bytes each, made when it is asked for."""

    def __missing__(self, word):
        if len(self) == WORDS_KNOWN:
            self.clear()
        # Not Python's hash(), which differs in every process.
        self[word] = hashlib.blake2b(word, digest_size=8).digest()
        return self[word]


HASHES = WordHashes()


def chained(ids, n, begin=0):
    """Hashes of all runs of n of the (m,) uint64 `ids`: (m - n + 1,) uint64, none where there are fewer."""
    mixed = np.full(max(0, len(ids) - n + 1), n + begin, dtype=np.uint64)    # n: "a b" does not begin "a b c d e"
    for offset in range(n):
        mixed = (mixed ^ ids[offset:offset + len(mixed)]) * MIX
        mixed ^= mixed >> np.uint64(29)
    return mixed


@functools.lru_cache(maxsize=1)      # more than one step asks for those of a page
def word_hashes(text):
    """(n,) uint64"""
    return np.frombuffer(b"".join(map(HASHES.__getitem__, words_of(text))), "<u8")


def shingles(text):
    """Hashes of the text's set of word 5-grams: (n,) uint32, sorted, never empty.

    A text of fewer than 5 words is one shingle, its whole sequence of words, so that short texts are duplicates only of
    themselves; without any word it is the text itself.
    """
    hashes = word_hashes(text)
    if not len(hashes):
        hashes = np.frombuffer(HASHES[text.encode("utf-8")], "<u8")
    grams = np.sort((chained(hashes, min(NGRAM, len(hashes))) >> np.uint64(32)).astype(np.uint32))
    return grams[np.append(True, grams[1:] != grams[:-1])]


def fmix32(x):
    """MurmurHash3's finaliser: a bijection of 32 bits in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


class MinHash:
    """A family of bands * rows hash functions a * fmix32(x) + b mod 2^32 with odd a.

    (The often copied (a * x + b) mod (2^61 - 1) overflows 64 bits; datasketch replaced it by this one.)
    """

    def __init__(self, bands, rows, seed):
        self.n_bands = bands
        draw = np.random.Generator(np.random.PCG64(seed))
        self.a = draw.integers(0, 1 << 32, bands * rows, dtype=np.uint32) | np.uint32(1)
        self.b = draw.integers(0, 1 << 32, bands * rows, dtype=np.uint32)
        self.room = np.empty(bands * rows * SHINGLES_AT_ONCE, dtype=np.uint32)      # fresh memory each time costs more

    def signature(self, grams):
        """(bands * rows,) uint32: for each function the minimum over the shingles (n,) uint32."""
        mixed = fmix32(grams)
        lowest = np.full(len(self.a), 0xFFFFFFFF, dtype=np.uint32)
        for start in range(0, len(mixed), SHINGLES_AT_ONCE):
            part = mixed[start:start + SHINGLES_AT_ONCE]
            values = self.room[:len(self.a) * len(part)].reshape(len(self.a), -1)       # (bands * rows, n)
            np.multiply(self.a[:, None], part, out=values)
            values += self.b[:, None]
            np.minimum(lowest, values.min(axis=1), out=lowest)
        return lowest

    def bands(self, signature):
        """(keys, sketch): for each band one number that stands for it, (bands,) uint64; and of each minimum the lowest
        byte, (bands * rows,) uint8, which estimates J well enough to choose what to verify."""
        keys = np.zeros(self.n_bands, dtype=np.uint64)
        for row in signature.reshape(self.n_bands, -1).T.astype(np.uint64):
            keys = (keys ^ row) * MIX
            keys ^= keys >> np.uint64(29)
        return keys, (signature & np.uint32(0xFF)).astype(np.uint8)


def candidate_probability(resemblance, bands, rows):
    """That two texts agree in at least one band: the S-curve."""
    return 1 - (1 - resemblance ** rows) ** bands


def buckets(keys):
    """(documents,) int32 from one band's keys (documents,) uint64: the number of the bucket that a document shares with
    others, from 0 on, or -1."""
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    shared = counts > 1
    return np.where(shared[inverse], (np.cumsum(shared) - 1)[inverse], -1).astype(np.int32)


def jaccard(a, b):
    """Of two sets, sorted and without repetition."""
    together = len(np.intersect1d(a, b, assume_unique=True))
    return together / (len(a) + len(b) - together)


MANY = 2048         # candidates of which the sketch is looked at
VERIFIED = 64       # candidates that are verified
DOUBT = 0.15        # how far the sketch may be off: over four standard deviations


def representatives(shared, sketches, sizes, shingles_of, threshold):
    """(representative, resemblance) of every document, in order: itself and 1.0 if it is kept.

    shared (documents, bands): `buckets` of each band; sketches (documents, n) uint8; sizes (documents,): of their sets
    of shingles, which shingles_of(document) gives. One pass in document order. A document is compared with the kept
    ones that share a bucket with it, and becomes a kept one itself if it resembles none of them enough. The first of
    every cluster is therefore always kept, and what is dropped resembles a document that is there.

    Thousands of pages of one template share buckets and are all kept. Then only the MANY that share most buckets are
    looked at, and of those the VERIFIED whose sketch agrees most: time and memory grow with the number of documents.
    """
    # The buckets of all bands, numbered through, each with room for its members; filled as documents are kept.
    first = np.concatenate([[0], np.cumsum(shared.max(axis=0, initial=-1) + 1)])
    places = np.where(shared >= 0, shared + first[:-1], -1)
    starts = np.concatenate([[0], np.cumsum(np.bincount(places[places >= 0], minlength=first[-1]))])
    ends, members = starts[:-1].copy(), np.zeros(starts[-1], dtype=np.int32)
    chosen, resemblance = np.arange(len(shared)), np.ones(len(shared))
    for document in np.flatnonzero((shared >= 0).any(axis=1)):
        mine = places[document][places[document] >= 0]
        found = [members[starts[place]:ends[place]] for place in mine]
        candidates = closest(np.concatenate(found), document, sketches, sizes, threshold)
        for other in candidates:
            exact = jaccard(shingles_of(document), shingles_of(other))
            if exact >= threshold:
                chosen[document], resemblance[document] = other, exact
                break
        else:
            members[ends[mine]] = document
            ends[mine] += 1
    return chosen, resemblance


def closest(found, document, sketches, sizes, threshold):
    """Those of the documents `found`, each as often as it shares a bucket, that are worth verifying; in their order."""
    candidates, votes = np.unique(found, return_counts=True)
    if len(candidates) > MANY:
        votes = votes.astype(np.int16)                          # which are sorted fast
        candidates = np.sort(candidates[np.argsort(-votes, kind="stable")[:MANY]])
    # Of two sets of 85 and 100 members J is 0.85 at most.
    least, most = np.minimum(sizes[candidates], sizes[document]), np.maximum(sizes[candidates], sizes[document])
    candidates = candidates[least >= threshold * most - 1e-6]
    agreement = (sketches[candidates] == sketches[document]).mean(axis=1)
    candidates, agreement = (part[agreement >= threshold - DOUBT] for part in (candidates, agreement))
    if len(candidates) > VERIFIED:
        candidates = np.sort(candidates[np.argsort(-agreement, kind="stable")[:VERIFIED]])
    return candidates


# --- Paragraphs -------------------------------------------------------------------------------------------------------

PARAGRAPH_BREAK = "\n\n"       # a blank line, of which normalised text has at most one at a time


def paragraph_hashes(text, min_chars):
    """(n, 2) uint64: for each paragraph of a text its hash, 0 for one of fewer than `min_chars` characters, and its
    length in characters. Case, accents, punctuation and the values of digits do not count, as in CCNet. min_chars 0:
    no rows."""
    rows = []
    for paragraph in text.split(PARAGRAPH_BREAK) if min_chars else ():
        long = len(paragraph) >= min_chars
        key = text_hash(b" ".join(words_of(paragraph)) or paragraph.encode("utf-8"))[:8] if long else b""
        rows.append((int.from_bytes(key, "little"), len(paragraph)))
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)


def repeated(paragraphs, counts, kept, min_chars=0):
    """Which paragraphs stood before: in a kept document that came earlier, or further up in the same one.

    paragraphs (P, 2) as above, of all documents in order; counts (documents,): how many each has; kept: bool. One pass
    in this order. A document that has less than min_chars left without them is going to be dropped, so what it was the
    first to have counts as new where it stands next.
    -> a list of bool arrays, one for each document, and the characters that each has left without those paragraphs"""
    before, again, left = set(), [], []
    for rows, judged in zip(np.split(paragraphs, np.cumsum(counts)[:-1]), kept):
        here, out = set(), np.zeros(len(rows), dtype=bool)
        for place, key in enumerate(rows[:, 0].tolist() if judged else ()):
            out[place] = key != 0 and (key in before or key in here)
            here.add(key)
        lengths = rows[~out, 1].astype(np.int64)
        left.append(max(0, lengths.sum() + len(PARAGRAPH_BREAK) * (len(lengths) - 1)))
        again.append(out)
        if left[-1] >= min_chars or not out.any():
            before |= here
    return again, np.array(left)
