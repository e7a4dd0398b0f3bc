"""Rule sets for prose, each off unless the config names it in `rules`, and their variants: readers of one paper have
made different constants of it, and which one a corpus was made with decides what is in it."""

import functools
import re
from collections import Counter

import numpy as np


def first(reasons):
    """The first of these reasons that holds, or None."""
    return next((reason for reason, holds in reasons.items() if holds), None)


STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}


def gopher_quality(page, settings, average=np.mean, bullets=("\u2022", "-")):
    """Rae et al. 2021 (arXiv 2112.11446, A1.1), with the constants as datatrove reads them."""
    text = page["text"]
    words, lines = text.split(), [line.strip() for line in text.split("\n") if line.strip()]
    times = Counter(words)
    real = {word: count for word, count in times.items() if word[0].isalnum() or any(map(str.isalnum, word))}
    lengths = np.repeat(list(map(len, real)), list(real.values())) if real else [0]
    letters = sum(count for word, count in real.items() if word[0].isalpha() or any(map(str.isalpha, word)))
    return first({
        "gopher_word_count": not 50 <= sum(real.values()) <= 100_000,
        "gopher_word_length": not 3 <= average(lengths) <= 10,
        "gopher_hashes": text.count("#") / len(words) > 0.1,
        "gopher_ellipses": (text.count("...") + text.count("\u2026")) / len(words) > 0.1,
        "gopher_bullets": sum(line.startswith(bullets) for line in lines) / len(lines) > 0.9,
        "gopher_line_ellipses": sum(line.endswith(("...", "\u2026")) for line in lines) / len(lines) > 0.3,
        "gopher_letters": letters / len(words) < 0.8,
        "gopher_stop_words": len(STOP_WORDS.intersection(map(str.lower, times))) < 2,
    })


TOP_NGRAMS = {2: 0.20, 3: 0.18, 4: 0.16}
REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
WORDS = 1 << 21                # of a text that are looked at: the third power of their number is below 2^64


def gopher_repetition(page, settings):
    """Rae et al. 2021, table A1: shares of repeated lines, paragraphs and word n-grams.

    Shares of characters count words only, in numerator and denominator alike, so that they never exceed 1; an n-gram
    that occurs once is no repetition (a text of ten words would fail otherwise); blank lines are no lines.
    """
    text = page["text"]
    for name, parts in (("line", text.split("\n")), ("paragraph", text.split("\n\n"))):
        parts = list(filter(None, map(str.strip, parts)))
        counts = Counter(parts)
        repeated = len(parts) - len(counts)
        characters = sum((count - 1) * len(part) for part, count in counts.items())
        if repeated / len(parts) > 0.30:
            return f"gopher_{name}s"
        if characters / sum(map(len, parts)) > 0.20:
            return f"gopher_{name}_characters"
    words = text.split()[:WORDS]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    ids = np.fromiter(map(numbers.__getitem__, words), np.uint64, len(words))
    until = np.cumsum([0, *map(len, words)])                            # characters before each word
    # Where an n-gram begins that occurs again, and which one of those it is.
    places, grams = np.arange(len(words), dtype=np.uint64), ids
    for n in range(2, min(10, len(words)) + 1):
        # What does not occur again with n - 1 words does not with n: few places are left soon.
        inside = places + n <= len(words)
        places, grams = places[inside], grams[inside]
        if not len(places):
            return None
        # Equal ones side by side, the earliest first. Three numbers in one, since numpy sorts those fast.
        keys = np.sort((grams * len(numbers) + ids[places + n - 1]) * len(words) + places)
        grams, places = np.divmod(keys, len(words))
        starts = np.flatnonzero(np.diff(grams, prepend=~grams[:1]))
        counts = np.diff(np.append(starts, len(grams)))
        if n in TOP_NGRAMS:
            first = places[starts]
            characters = np.where(counts > 1, counts * (until[first + n] - until[first]), 0)
            if characters.max() / until[-1] > TOP_NGRAMS[n]:
                return f"gopher_top_{n}gram"
        else:
            # The words covered by the second and later occurrences of an n-gram, each counted once.
            later = np.delete(places, starts).astype(np.int64)
            cover = np.bincount(later, minlength=len(words) + 1) - np.bincount(later + n, minlength=len(words) + 1)
            if np.diff(until)[np.cumsum(cover)[:-1] > 0].sum() / until[-1] > REPEATED_NGRAMS[n]:
                return f"gopher_repeated_{n}gram"
        again = np.repeat(counts > 1, counts)
        places, grams = places[again], np.repeat(np.arange(len(counts), dtype=np.uint64), counts)[again]
    return None


POLICY = ("javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies",
          "use cookies")


def is_c4_line(line, line_words, ends):
    words, lowered = line.split(), line.lower()
    return ((not ends or line.endswith(ends) and not line.endswith("..."))
            and len(words) >= line_words and max(map(len, words)) <= 1000
            and not any(phrase in lowered for phrase in POLICY))


def c4(page, settings, line_words=5, sentences=3, ends=(".", "?", "!", '"')):
    """Raffel et al. 2020 in the reference's own constants (tensorflow_datasets c4_utils): 5 words a line, 3 sentences.

    Drops lines, then judges what is left.
    """
    lowered = page["text"].lower()
    if "lorem ipsum" in lowered:
        return "c4_lorem_ipsum"
    if "{" in lowered:
        return "c4_brace"
    lines = [line for line in map(str.strip, page["text"].split("\n")) if is_c4_line(line, line_words, ends)]
    page["text"] = "\n".join(lines)
    return "c4_sentences" if len(re.findall(r"[.?!]+[\"')]*(?:\s|$)", page["text"])) < sentences else None


def fineweb(page, settings, repeated_lines=0.1):
    """Penedo et al. 2024 (arXiv 2406.17557, 3.6), with the paper's 0.1 for repeated lines."""
    lines = [line for line in page["text"].split("\n") if line.strip()]
    words = page["text"].split()
    ended = sum(line.rstrip().endswith((".", "?", "!", '"', "'")) for line in lines)
    repeated = sum((count - 1) * len(line) for line, count in Counter(lines).items())
    return first({
        "fineweb_line_ends": ended / len(lines) < 0.12,
        "fineweb_short_lines": sum(len(line) <= 30 for line in lines) / len(lines) > 0.67,
        "fineweb_repeated_lines": repeated / sum(map(len, lines)) > repeated_lines,
        "fineweb_newlines": page["text"].count("\n") / len(words) > 0.3,
    })


def variant(rule, source, **constants):
    """The rule with other constants."""
    made = functools.partial(rule, **constants)
    made.__doc__ = source
    return made


RULES = {
    "gopher_quality": gopher_quality,
    "gopher_quality_dolma": variant(gopher_quality, "the same as dolma reads it: median length of words, bullets - *",
                                    average=np.median, bullets=("*", "-")),
    "gopher_repetition": gopher_repetition,
    "c4": c4,
    "c4_datatrove": variant(c4, "the same as datatrove has it: 3 words a line, 5 sentences, ' ends a line too",
                            line_words=3, sentences=5, ends=(".", "?", "!", '"', "'")),
    "c4_lines_without_end": variant(c4, "the same without the rule for how lines end, as FineWeb was made", ends=()),
    "fineweb": fineweb,
    "fineweb_code": variant(fineweb, "the same with 0.01 for repeated lines, as FineWeb's code has it",
                            repeated_lines=0.01),
}
