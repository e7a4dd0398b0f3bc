"""Near-duplicates: the hashing is right, every cluster keeps exactly one member, and nothing unlike is lost."""

import random
import subprocess
import sys

import numpy as np
import pytest

from prepare import dedup
from prepare.dedup import (MinHash, buckets, candidate_probability, fmix32, jaccard, paragraph_hashes, repeated,
                           representatives, shingles, text_hash, words_of)

BANDS, ROWS, THRESHOLD = 16, 8, 0.85


def of_sets(sets, threshold=THRESHOLD, bands=BANDS, rows=ROWS):
    """representatives of documents that are these sets of shingles, (n,) uint32 sorted."""
    minhash = MinHash(bands, rows, 1)
    keys, sketches = zip(*(minhash.bands(minhash.signature(grams)) for grams in sets))
    shared = np.stack([buckets(column) for column in np.array(keys).T], axis=1)
    return representatives(shared, np.array(sketches), np.array([len(grams) for grams in sets]), sets.__getitem__, threshold)


def kept_of(texts, threshold=THRESHOLD):
    chosen, resemblance = of_sets([shingles(text) for text in texts], threshold)
    return chosen.tolist(), resemblance


def word(draw):
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6))          # no digits: those all count as the same


def text_of(seed, words=400):
    draw = random.Random(seed)
    return " ".join(word(draw) for _ in range(words))


def with_changes(text, count, seed=0):
    """`count` words replaced, evenly spread: about 5 * count 5-grams differ on each side."""
    words, draw = text.split(), random.Random(f"changes {seed}")
    for i in range(count):
        words[(2 * i + 1) * len(words) // (2 * count)] = word(draw)
    return " ".join(words)


def resemblance_of(a, b):
    a, b = ({tuple(words[i:i + 5]) for i in range(len(words) - 4)} for words in (words_of(a), words_of(b)))
    return len(a & b) / len(a | b)


def test_r30_clusters_keep_one_unique_ones_stay_and_short_ones_are_not_merged():
    base = text_of(1)
    texts = [base, base, base, with_changes(base, 2), with_changes(base, 3, 1),
             *(text_of(seed) for seed in range(10, 15)),
             "", "two words", "other words", "two words", "!", "?", "a b c d"]
    chosen, _ = kept_of(texts)
    assert chosen[:5] == [0] * 5
    assert chosen[5:10] == [5, 6, 7, 8, 9]
    assert chosen[10:] == [10, 11, 12, 11, 14, 15, 16]


def test_what_is_dropped_resembles_one_that_is_kept():
    """A chain A~B~C~...: transitive closure would leave one. Each dropped text is near its own representative."""
    texts, draw = [text_of(1, 500)], random.Random(0)
    for step in range(20):
        words = texts[-1].split()
        for i in range(4):
            words[(step * 23 + i * 110) % 500] = word(draw)
        texts.append(" ".join(words))
    assert resemblance_of(texts[0], texts[1]) > 0.9 and resemblance_of(texts[0], texts[-1]) < 0.4
    chosen, resemblance = kept_of(texts)
    assert 3 <= len(set(chosen)) < len(texts)
    for number, representative in enumerate(chosen):
        assert chosen[representative] == representative                       # it is itself kept
        assert representative <= number                                       # and came first
        if number != representative:
            assert resemblance[number] >= THRESHOLD and resemblance_of(texts[number], texts[representative]) >= THRESHOLD


def test_pages_of_one_template_are_not_duplicates():
    """Pairs at 0.6 land in a common bucket one time in four; without the check most of these pages would be lost."""
    template = text_of(2, 300)
    texts = [template + " " + text_of(100 + number, 90) for number in range(40)]
    assert 0.55 < resemblance_of(texts[0], texts[1]) < 0.7
    assert len(set(kept_of(texts)[0])) == 40


def test_the_signature_estimates_the_resemblance():
    base = text_of(3, 2000)
    minhash = MinHash(128, 8, 5)                                              # 1024 functions: standard error 0.015
    for changes in (5, 20, 60, 150):
        other = with_changes(base, changes)
        estimate = (minhash.signature(shingles(base)) == minhash.signature(shingles(other))).mean()
        assert abs(estimate - resemblance_of(base, other)) < 0.06
    assert (minhash.signature(shingles(base)) == minhash.signature(shingles(text_of(4, 2000)))).mean() < 0.02


def test_pairs_at_the_threshold_are_found():
    found = 0
    for seed in range(60):
        base = text_of(1000 + seed)
        other = with_changes(base, 4, seed)                                   # about 0.905
        found += kept_of([base, other])[0] == [0, 0]
    assert found >= 54


def test_the_family_is_affine_and_its_mixer_a_bijection():
    x = np.arange(1 << 16, dtype=np.uint32) * np.uint32(65537)
    assert len(np.unique(fmix32(x))) == len(x)
    assert fmix32(np.array([0, 1, 2], dtype=np.uint32)).tolist() == [0, 0x514E28B7, 0x30F4C306]      # MurmurHash3's
    assert int(fmix32(np.array([0xDEADBEEF], dtype=np.uint32))[0]) == 0x0DE5C6A9
    minhash = MinHash(2, 3, 9)
    text = text_of(5, 40)
    for place, (a, b) in enumerate(zip(minhash.a.tolist(), minhash.b.tolist())):
        assert a % 2 == 1
        values = [(a * h + b) % 2 ** 32 for h in fmix32(shingles(text)).tolist()]
        assert minhash.signature(shingles(text))[place] == min(values)


def test_long_texts_are_hashed_in_pieces_to_the_same_result(monkeypatch):
    text, minhash = text_of(6, 3000), MinHash(BANDS, ROWS, 1)
    whole = minhash.signature(shingles(text))
    monkeypatch.setattr("prepare.dedup.SHINGLES_AT_ONCE", 7)
    assert np.array_equal(minhash.signature(shingles(text)), whole)


def test_resemblance_ignores_case_accents_punctuation_and_digits():
    assert words_of("Café, no. 12 —\n  WHILE x_1") == [b"cafe", b"no", b"00", b"while", b"x_0"]
    assert np.array_equal(shingles("A b, c (d) é 17!"), shingles("a B c d e 23"))
    assert text_hash(b"a") != text_hash(b"A")


def test_words_count_alike_whether_their_text_is_ascii_or_not():
    ascii_text = "".join(map(chr, range(128))) + " The 12 Mice_3, don't\tSTOP\n"
    assert words_of(ascii_text + "\u2026") == words_of(ascii_text)


def test_hashes_of_words_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(dedup, "WORDS_KNOWN", 3)
    table = dedup.WordHashes()
    first = [table[word] for word in (b"a", b"b", b"c", b"d")]
    assert len(table) == 1 and [table[word] for word in (b"a", b"b", b"c", b"d")] == first and len(set(first)) == 4


@pytest.mark.parametrize("copies", [2, 3, 50])
def test_d28_of_identical_documents_the_first_survives(copies):
    assert kept_of([text_of(7), *[text_of(8)] * copies, text_of(9)])[0] == [0, *[1] * copies, copies + 1]


def test_d28_signatures_do_not_depend_on_the_process():
    program = ("import sys; sys.path.insert(0, sys.argv[1]); from prepare.dedup import MinHash, shingles;"
               "m = MinHash(16, 8, 1); s = shingles('a text of some few words, the same for all');"
               "print(s.tolist(), [part.tolist() for part in m.bands(m.signature(s))])")
    root = str(__import__("pathlib").Path(__file__).resolve().parent.parent)
    outputs = {subprocess.run([sys.executable, "-c", program, root], env={"PYTHONHASHSEED": seed}, capture_output=True,
                              text=True, check=True).stdout for seed in ("0", "1", "2")}
    assert len(outputs) == 1


def test_thousands_of_copies_take_no_quadratic_time():
    import time
    sets = [shingles(text_of(1))] * 20_000
    start = time.process_time()
    chosen, _ = of_sets(sets, bands=4, rows=4)
    assert set(chosen.tolist()) == {0} and time.process_time() - start < 20


def sets_of(*overlaps, size=1000, seed=7):
    """A set of random numbers, and for each overlap another one whose J with the first is this, and with each other less."""
    draw = np.random.default_rng(seed)
    numbers = draw.permutation(2 ** 16)[:size * (len(overlaps) + 1)].astype(np.uint32).reshape(-1, size)
    sets = [np.sort(numbers[0])]
    for fresh, overlap in zip(numbers[1:], overlaps):
        same = round(2 * size * overlap / (1 + overlap))
        sets.append(np.sort(np.concatenate([draw.permutation(numbers[0])[:same], fresh[:size - same]])))
    return sets


def test_the_threshold_is_that_of_the_sets_not_of_the_signature():
    """Pairs at 0.84 and 0.86: a signature of 128 puts one in three on the wrong side."""
    assert jaccard(*sets_of(0.86)) == pytest.approx(0.86, abs=0.001)
    kept = [of_sets(sets_of(share, seed=number))[0].tolist() for share in (0.84, 0.86) for number in range(30)]
    assert kept[:30] == [[0, 1]] * 30 and kept[30:].count([0, 0]) >= 29          # one in 250 shares no band
    minhash = MinHash(BANDS, ROWS, 1)
    estimates = [np.mean(np.equal(*map(minhash.signature, sets_of(0.86, seed=number)))) for number in range(30)]
    assert sum(estimate < THRESHOLD for estimate in estimates) > 5
    exactly = np.arange(37, dtype=np.uint32), np.arange(3, 40, dtype=np.uint32)     # 34 of 40
    for threshold, representative in ((0.85, 0), (0.8500001, 1)):
        assert of_sets(list(exactly), threshold, 32, 2)[0].tolist() == [0, representative]


def test_the_first_candidate_need_not_be_the_right_one():
    """Buckets by hand: the third shares one with the first and next to nothing else, but is nearly the second."""
    first, second, third = sets_of(0.1, 0.1)[:2] + [None]
    third = np.sort(np.concatenate([second[:980], np.arange(20, dtype=np.uint32) + 2 ** 23]))
    shared = np.array([[0, -1], [-1, 0], [0, 0]])
    sets, sketches = [first, second, third], np.zeros((3, 128), np.uint8)
    chosen, resemblance = representatives(shared, sketches, np.full(3, 1000), sets.__getitem__, THRESHOLD)
    assert chosen.tolist() == [0, 1, 1] and resemblance[2] == jaccard(second, third) > 0.95


def test_the_earliest_that_is_close_enough_represents_not_the_closest():
    third, first, second = sets_of(0.875, 0.95)
    for threshold, chosen in ((0.85, 0), (0.87, 0), (0.88, 1)):
        assert of_sets([first, second, third], threshold)[0].tolist() == [0, 1, chosen]


@pytest.mark.parametrize("many, verified", [(2048, 64), (30, 64), (30, 5)])
def test_in_a_crowd_of_one_template_the_nearest_are_still_found(monkeypatch, many, verified):
    """400 pages at 0.75 of each other, all kept; then a copy at 0.95 of each fifth."""
    monkeypatch.setattr(dedup, "MANY", many)
    monkeypatch.setattr(dedup, "VERIFIED", verified)
    draw = np.random.default_rng(3)
    template = np.arange(857, dtype=np.uint32)
    fresh = lambda count: draw.integers(2 ** 20, 2 ** 32, count, dtype=np.uint32)
    pages = [np.concatenate([template, fresh(143)]) for _ in range(400)]
    copies = [np.concatenate([page[:974], fresh(26)]) for page in pages[::5]]
    chosen, _ = of_sets([np.sort(page) for page in pages + copies])
    assert chosen[:400].tolist() == list(range(400))
    found = chosen[400:] == np.arange(0, 400, 5)
    assert found.mean() >= (0.97 if many > 400 else 0.9)
    assert set(chosen[400:][~found]) <= set(range(400, 480))


def test_the_curve_is_the_one_that_is_known():
    known = {.5: .061, .6: .237, .7: .613, .75: .815, .8: .947, .85: .994, .9: 1.0}     # of 16 bands of 8
    assert {share: round(candidate_probability(share, 16, 8), 3) for share in known} == known
    assert round(candidate_probability(0.85, 8, 16), 3) == 0.461


def test_buckets_number_what_is_shared():
    keys = np.array([7, 3, 7, 2 ** 64 - 1, 5, 3, 7], dtype=np.uint64)
    assert buckets(keys).tolist() == [1, 0, 1, -1, -1, 0, 1] and buckets(keys[:0]).tolist() == []


# --------------------------------------------------------------------------------------------------------------------
# Paragraphs

def test_paragraphs_are_kept_where_they_stand_first_in_what_is_kept():
    a, b, c = (text_of(seed, 8) for seed in (1, 2, 3))
    texts = [f"{a}\n\nshort\n\n{b}",                      # dropped: says nothing about the others
             f"{b}\n\nshort\n\n{b}",                      # twice on one page
             f"short\n\n{a.upper()}, {b[:-1]}\n\n{a}",      # a alone is new here
             f"{c}!\n\n{a}  \n\n({c.title()})\n\nshort"]     # punctuation and case say nothing
    rows = [paragraph_hashes(text, 20) for text in texts]
    counts = np.array([len(row) for row in rows])
    kept = np.array([False, True, True, True])
    again, left = repeated(np.concatenate(rows), counts, kept)
    assert [flags.tolist() for flags in again] == [
        [False] * 3, [False, False, True], [False] * 3, [False, True, True, False]]
    for text, flags, size in zip(texts, again, left):
        assert size == len("\n\n".join(part for part, out in zip(text.split("\n\n"), flags) if not out))


def test_what_a_page_that_goes_had_first_stays_where_it_stands_next():
    a, b, c = (text_of(seed, 8) for seed in (1, 2, 3))
    rows = [paragraph_hashes(text, 20) for text in (a, f"{a}\n\n{b}", f"{b}\n\n{c}", f"{b}\n\n{c}\n\n{a}")]
    again, left = repeated(np.concatenate(rows), np.array([1, 2, 2, 3]), np.ones(4, dtype=bool), len(b) + 1)
    assert [flags.tolist() for flags in again] == [[False], [True, False], [False, False], [True] * 3]
    assert left.tolist() == [len(a), len(b), len(b) + 2 + len(c), 0]


def test_digits_in_paragraphs_count_as_zeros_and_those_without_words_by_themselves():
    keys = [int(paragraph_hashes(text, 1)[0, 0]) for text in ("Chapter 17, page 4", "chapter 22 page 9!", "chapter 2",
                                                              "-----", "=====", "-----")]
    assert keys[0] == keys[1] and keys[3] == keys[5] and len(set(keys)) == 4
    assert paragraph_hashes("a b c\n\nd", 0).shape == (0, 2)      # off: not even counted


def test_no_documents_no_paragraphs():
    again, left = repeated(np.zeros((0, 2), dtype=np.uint64), np.zeros(2, dtype=np.int64), np.array([True, True]))
    assert [len(flags) for flags in again] == [0, 0] and left.tolist() == [0, 0]
