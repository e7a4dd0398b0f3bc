"""Rule sets for prose, each off unless the config names it in `rules`, and their variants: readers of one paper have
made different constants of it, and which one a corpus was made with decides what is in it."""

import functools
import re
from collections import Counter

import numpy as np

from prepare.dedup import MIX, chained


def first(reasons):
    """The first of these reasons that holds, or None."""
    return next((reason for reason, holds in reasons.items() if holds), None)


STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}


def gopher_quality(page, settings, average=np.mean, bullets=("\u2022", "-")):
    """Rae et al. 2021 (arXiv 2112.11446, A1.1), with the constants as datatrove reads them."""
    text = page["text"]
    words, lines = text.split(), [line.strip() for line in text.split("\n") if line.strip()]
    real = [len(word) for word in words if word[0].isalnum() or any(map(str.isalnum, word))]
    return first({
        "gopher_word_count": not 50 <= len(real) <= 100_000,
        "gopher_word_length": not 3 <= (average(real) if real else 0) <= 10,
        "gopher_hashes": text.count("#") / len(words) > 0.1,
        "gopher_ellipses": (text.count("...") + text.count("\u2026")) / len(words) > 0.1,
        "gopher_bullets": sum(line.startswith(bullets) for line in lines) / len(lines) > 0.9,
        "gopher_line_ellipses": sum(line.endswith(("...", "\u2026")) for line in lines) / len(lines) > 0.3,
        "gopher_letters": sum(word[0].isalpha() or any(map(str.isalpha, word)) for word in words) / len(words) < 0.8,
        "gopher_stop_words": len(STOP_WORDS.intersection(map(str.lower, words))) < 2,
    })


TOP_NGRAMS = {2: 0.20, 3: 0.18, 4: 0.16}
REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


def gopher_repetition(page, settings):
    """Rae et al. 2021, table A1: shares of repeated lines, paragraphs and word n-grams.

    Shares of characters count words only, in numerator and denominator alike, so that they never exceed 1; an n-gram
    that occurs once is no repetition (a text of ten words would fail otherwise); blank lines are no lines.
    """
    text = page["text"]
    for name, parts in (("line", re.split(r"\n+", text)), ("paragraph", re.split(r"\n{2,}", text))):
        parts = [part.strip() for part in parts if part.strip()]
        counts = Counter(parts)
        repeated = len(parts) - len(counts)
        characters = sum((count - 1) * len(part) for part, count in counts.items())
        if repeated / len(parts) > 0.30:
            return f"gopher_{name}s"
        if characters / sum(map(len, parts)) > 0.20:
            return f"gopher_{name}_characters"
    words, numbers = text.split(), {}
    # Each word a number, each n-gram a hash of n numbers.
    ids = np.array([numbers.setdefault(word, len(numbers)) for word in words], dtype=np.uint64)
    until = np.concatenate([[0], np.cumsum([len(word) for word in words])])      # characters before each word
    places = np.arange(len(words))                                     # where an n-gram begins that occurs again
    grams = chained(ids, 1)
    for n in range(2, min(10, len(words)) + 1):
        # What does not occur again with n - 1 words does not with n: few places are left soon.
        inside = places + n <= len(words)
        places = places[inside]
        grams = (grams[inside] ^ ids[places + n - 1]) * MIX
        grams ^= grams >> np.uint64(29)
        order = np.argsort(grams, kind="stable")                       # equal ones side by side, the earliest first
        starts = np.flatnonzero(np.diff(grams[order], prepend=~grams[order[:1]]))
        counts = np.diff(np.append(starts, len(order)))
        if n in TOP_NGRAMS:
            first = places[order[starts]]
            characters = np.where(counts > 1, counts * (until[first + n] - until[first]), 0)
            if characters.max(initial=0) / until[-1] > TOP_NGRAMS[n]:
                return f"gopher_top_{n}gram"
        else:
            # The words covered by the second and later occurrences of an n-gram, each counted once.
            later = np.delete(places[order], starts)
            cover = np.bincount(later, minlength=len(words) + 1) - np.bincount(later + n, minlength=len(words) + 1)
            if np.diff(until)[np.cumsum(cover)[:-1] > 0].sum() / until[-1] > REPEATED_NGRAMS[n]:
                return f"gopher_repeated_{n}gram"
        again = np.zeros(len(order), dtype=bool)
        again[order] = np.repeat(counts > 1, counts)
        places, grams = places[again], grams[again]
    return None


POLICY = ("javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies",
          "use cookies")


def is_c4_line(line, line_words, ends):
    words = line.split()
    return ((not ends or line.endswith(ends) and not line.endswith("..."))
            and len(words) >= line_words and max(map(len, words)) <= 1000
            and not any(phrase in line.lower() for phrase in POLICY))


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
