"""The filters, in the order in which a page meets them. Each is a plain function

    filter(page, settings) -> None, or the reason why the page is dropped

that may add to the page (its text, its language) and leaves the numbers it judged by in page["measures"], of which the
audit draws histograms. FILTERS names those that always run; RULES those that the config can switch on (`rules`).
"""

import math
import re
from collections import Counter

import numpy as np

from prepare.text import INVISIBLE, codec_of, decode, extract, language_of, normalise

ACCEPTED_TYPES = ("text/html", "application/xhtml+xml", "text/plain")


def first(reasons):
    """The first of these reasons that holds, or None."""
    return next((reason for reason, holds in reasons.items() if holds), None)


# --------------------------------------------------------------------------------------------------------------------
# From a record to clean text

def readable(page, settings):
    """The reader could make sense of it."""
    return page.get("drop")


def protocol(page, settings):
    """HTTP status 200 and a declared type that is text. WET records, JSON lines and text files have neither."""
    return None if "status" not in page else first({
        "http_status": page["status"] != 200, "content_type": page["content_type"] not in ACCEPTED_TYPES})


def decoded(page, settings):
    """Bytes to characters. What cannot be decoded stands as U+FFFD, and not more than a share of it is accepted."""
    if "text" in page:
        page["decoded_by"] = "json"
        return None
    body = page["body"]
    page["text"], page["decoded_by"], codec = decode(body, page.get("charset", ""), page["kind"] == "html")
    # ASCII is the same in every declared charset, so its label is never wrong enough to matter.
    page["mislabelled"] = bool(page.get("charset")) and codec_of(page["charset"]) != codec and not body.isascii()
    share = page["measures"]["replacement_share"] = page["text"].count("\ufffd") / max(1, len(page["text"]))
    return "undecodable" if share > settings["max_replacement"] else None


def extracted(page, settings):
    """HTML to text. Plain text never goes through the extractor, which would join its lines and eat its "<"."""
    if page["kind"] == "html":
        page["text"] = extract(page["text"], settings["main_content"])
    return None if page["text"].strip() else "empty"


def normalised(page, settings):
    page["invisible"] = INVISIBLE.search(page["text"]) is not None
    page["text"] = normalise(page["text"])
    return None if page["text"] else "empty"


def length(page, settings):
    size = len(page["text"])
    page["measures"]["log10_characters"] = math.log10(max(1, size))
    return first({"too_short": size < settings["min_chars"], "too_long": size > settings["max_chars"]})


def language(page, settings):
    page["language"], page["language_score"] = language_of(page["text"])
    page["measures"]["language_score"] = page["language_score"]
    return first({
        "no_language": page["language"] == "zxx",
        "other_language": settings["languages"] and page["language"] not in settings["languages"],
        "unsure_language": page["language_score"] < settings["language_threshold"]})


# --------------------------------------------------------------------------------------------------------------------
# Guards: cheap, and no more than guards. Lorem ipsum passes the entropy, a Japanese shop the share of ASCII.

def entropy(page, settings):
    """Bits per character of the distribution of characters: stops "aaaa" and "-----", English has 4.2 to 5.1."""
    counts = np.array(list(Counter(page["text"]).values()))
    shares = counts / counts.sum()
    bits = page["measures"]["entropy"] = float(-(shares * np.log2(shares)).sum())
    return "low_entropy" if bits < settings["min_entropy"] else None


def ascii_share(page, settings):
    share = page["measures"]["ascii_share"] = len(page["text"].encode("ascii", "ignore")) / len(page["text"])
    return "low_ascii" if share < settings["min_ascii"] else None


# --------------------------------------------------------------------------------------------------------------------
# Rule sets for prose, each off unless named in the config

STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}


def gopher_quality(page, settings):
    """Rae et al. 2021 (arXiv 2112.11446, A1.1), with the constants as datatrove reads them."""
    text, words = page["text"], page["text"].split()
    real = [word for word in words if any(character.isalnum() for character in word)]
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return first({
        "gopher_word_count": not 50 <= len(real) <= 100_000,
        "gopher_word_length": not 3 <= sum(map(len, real)) / max(1, len(real)) <= 10,
        "gopher_hashes": text.count("#") / len(words) > 0.1,
        "gopher_ellipses": (text.count("...") + text.count("\u2026")) / len(words) > 0.1,
        "gopher_bullets": sum(line.startswith(("\u2022", "-")) for line in lines) / len(lines) > 0.9,
        "gopher_line_ellipses": sum(line.endswith(("...", "\u2026")) for line in lines) / len(lines) > 0.3,
        "gopher_letters": sum(any(map(str.isalpha, word)) for word in words) / len(words) < 0.8,
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
    words = text.split()
    size = sum(map(len, words))
    for n in range(2, min(10, len(words)) + 1):
        grams = list(zip(*(words[start:] for start in range(n))))
        if n in TOP_NGRAMS:
            top = max((count * len("".join(gram)) for gram, count in Counter(grams).items() if count > 1), default=0)
            if top / size > TOP_NGRAMS[n]:
                return f"gopher_top_{n}gram"
        else:
            # The words covered by the second and later occurrences of an n-gram, each counted once.
            seen, covered = set(), set()
            for start, gram in enumerate(grams):
                if gram in seen:
                    covered.update(range(start, start + n))
                seen.add(gram)
            if sum(len(words[place]) for place in covered) / size > REPEATED_NGRAMS[n]:
                return f"gopher_repeated_{n}gram"
    return None


POLICY = ("javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies",
          "use cookies")


def is_c4_line(line):
    words = line.split()
    return (line.endswith((".", "?", "!", '"')) and not line.endswith("...")
            and len(words) >= 5 and max(map(len, words)) <= 1000
            and not any(phrase in line.lower() for phrase in POLICY))


def c4(page, settings):
    """Raffel et al. 2020 in the reference's own constants (tensorflow_datasets c4_utils): 5 words a line, 3 sentences.

    Drops lines, then judges what is left. (datatrove has swapped the two numbers.)
    """
    lowered = page["text"].lower()
    if "lorem ipsum" in lowered:
        return "c4_lorem_ipsum"
    if "{" in lowered:
        return "c4_brace"
    page["text"] = "\n".join(filter(is_c4_line, map(str.strip, page["text"].split("\n"))))
    return "c4_sentences" if len(re.findall(r"[.?!]+[\"')]*(?:\s|$)", page["text"])) < 3 else None


def fineweb(page, settings):
    """Penedo et al. 2024 (arXiv 2406.17557, 3.6), with the paper's 0.1 for repeated lines (their code has 0.01)."""
    lines = [line for line in page["text"].split("\n") if line.strip()]
    words = page["text"].split()
    ended = sum(line.rstrip().endswith((".", "?", "!", '"', "'")) for line in lines)
    repeated = sum((count - 1) * len(line) for line, count in Counter(lines).items())
    return first({
        "fineweb_line_ends": ended / len(lines) < 0.12,
        "fineweb_short_lines": sum(len(line) <= 30 for line in lines) / len(lines) > 0.67,
        "fineweb_repeated_lines": repeated / sum(map(len, lines)) > 0.1,
        "fineweb_newlines": page["text"].count("\n") / len(words) > 0.3,
    })


FILTERS = (readable, protocol, decoded, extracted, normalised, length, language, entropy, ascii_share)
RULES = {rule.__name__: rule for rule in (gopher_quality, gopher_repetition, c4, fineweb)}

# What each threshold is compared with, for the audit's histograms: measure -> (config key, lowest, highest).
HISTOGRAMS = {
    "replacement_share": ("max_replacement", 0.0, 0.05),
    "log10_characters": ("min_chars", 0.0, 7.0),
    "entropy": ("min_entropy", 0.0, 8.0),
    "ascii_share": ("min_ascii", 0.0, 1.0),
    "language_score": ("language_threshold", 0.0, 1.0),
}
