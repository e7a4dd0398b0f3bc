"""The filters, in the order in which a page meets them. Each is a plain function

    filter(page, settings) -> None, or the reason why the page is dropped

that may add to the page (its text, its language), leaves the numbers it judged by in page["measures"], of which the
audit draws histograms, and appends to page["notes"] what was mended. TABLE at the end has them all, each with its
thresholds and where those come from. Rules for prose that have numbers of their own are in prepare/rules.py.
"""

import functools
import ipaddress
import json
import re

import numpy as np

from prepare.audit import host_of
from prepare.dedup import chained, word_hashes
from prepare.perplexity import model_of
from prepare.rules import RULES, first
from prepare.stream import text_of
from prepare.text import changed_by_normalising, codec_of, decode, extract, language_of, normalise

ACCEPTED_TYPES = ("text/html", "application/xhtml+xml", "text/plain")


# --- From a record to clean text --------------------------------------------------------------------------------------

def readable(page, settings):
    """The reader could make sense of it."""
    return page.get("drop")


def protocol(page, settings):
    """HTTP status 200 and a declared type that is text. WET records, JSON lines and text files have neither."""
    return None if "status" not in page else first({
        "http_status": page["status"] != 200, "content_type": page["content_type"] not in ACCEPTED_TYPES})


@functools.cache
def block_list(path):
    """The lines of the file at `path`: a domain, which stands for its subdomains too, or the beginning of a URL."""
    lines = (line.split("#")[0].strip().lower() for line in text_of(path).split("\n"))
    return frozenset(re.sub(r"^\w+://(www\.)?", "", line).rstrip("/") for line in lines) - {""}


def blocked(page, settings):
    """Its host, a domain above it, or a folder of its URL is on the list."""
    listed, host = block_list(settings["block_list"]), host_of(page["url"])
    labels = host.split(".")
    path = re.sub(r"^\w+://[^/?#]*", "", page["url"].lower()).partition("?")[0].rstrip("/").split("/")
    folders = {host.removeprefix("www.") + "/".join(path[:depth]) for depth in range(1, len(path) + 1)}
    domains = {".".join(labels[depth:]) for depth in range(len(labels))}
    return None if listed.isdisjoint(domains | folders) else "blocked"


def decoded(page, settings):
    """Bytes to characters. What cannot be decoded stands as U+FFFD, and not more than a share of it is accepted."""
    if "text" in page:
        page["decoded_by"] = "json"
        return None
    body = page["body"]
    page["text"], page["decoded_by"], codec = decode(body, page.get("charset", ""), page["kind"] == "html")
    # ASCII is the same in every declared charset, so its label is never wrong enough to matter.
    if page.get("charset") and codec_of(page["charset"]) != codec and not body.isascii():
        page["notes"].append("mislabelled_charset")
    share = page["measures"]["replacement_share"] = page["text"].count("\ufffd") / max(1, len(page["text"]))
    return "undecodable" if share > settings["max_replacement"] else None


def extracted(page, settings):
    """HTML to text. Plain text never goes through the extractor, which would join its lines and eat its "<"."""
    if page["kind"] == "html":
        page["text"] = extract(page["text"], settings["main_content"])
    return None if page["text"].strip() else "empty"


def normalised(page, settings):
    page["notes"] += changed_by_normalising(page["text"])
    page["text"] = normalise(page["text"], settings["keep_indentation"])
    return None if page["text"] else "empty"


def length(page, settings):
    size = len(page["text"])
    page["measures"]["characters"] = size
    return first({"too_short": size < settings["min_chars"], "too_long": size > settings["max_chars"]})


def language(page, settings):
    page["language"], page["language_score"] = language_of(page["text"], settings["language_model"])
    page["measures"]["language_score"] = page["language_score"]
    return first({
        "no_language": page["language"] == "zxx",
        "other_language": settings["languages"] and page["language"] not in settings["languages"],
        "unsure_language": page["language_score"] < settings["language_threshold"]})


# --- Guards: cheap, and no more than guards. Lorem ipsum passes the entropy, a Japanese shop the share of ASCII. ------

def entropy(page, settings):
    """Bits per character of the distribution of characters: stops "aaaa" and "-----", English has 4.2 to 5.1."""
    counts = np.bincount(np.frombuffer(page["text"].encode("utf-32-le"), "<u4"))
    shares = counts[counts > 0] / counts.sum()
    bits = page["measures"]["entropy"] = float(-(shares * np.log2(shares)).sum())
    return "low_entropy" if bits < settings["min_entropy"] else None


# Languages written in Latin letters: only of them a share of ASCII can be expected.
LATIN = set("""
    af an az br bs ca cs cy da de en eo es et eu fi fo fr fy ga gd gl hr ht hu id is it jv la lb lt lv mg ms mt nb
    nl nn no oc pl pt qu ro rw se sk sl sq sr sv sw tl tr uz vi vo wa xh zu""".split())


def ascii_share(page, settings):
    share = page["measures"]["ascii_share"] = len(page["text"].encode("ascii", "ignore")) / len(page["text"])
    return "low_ascii" if share < settings["min_ascii"] and page.get("language", "en") in LATIN else None


# --- Beside other texts: clean ones, and those that a model will be examined with -------------------------------------

def perplexity(page, settings):
    """Measures only: the cut is a percentile, so it is made over all pages, in prepare_data.py."""
    page["measures"]["perplexity"] = model_of(settings["perplexity_text"]).perplexity(page["text"])


EVALUATION_NGRAM = 13      # as GPT-3's authors took it (Brown et al. 2020, appendix C)


@functools.cache
def ngrams_of(path):
    """Hashes of all word 13-grams of a file: (n,) uint64, sorted. A line is a text, or JSON with texts in it."""
    found = [chained(word_hashes(text), EVALUATION_NGRAM) for line in text_of(path).split("\n")
             for text in strings_of(line)]
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *found]))


@functools.cache
def evaluation_ngrams(paths):
    """Those of all the files."""
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *map(ngrams_of, paths)]))


def strings_of(line):
    """The texts in a line: those of a JSON object or list, however deep, or the line itself."""
    def walk(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, (list, dict)):
            for part in value.values() if isinstance(value, dict) else value:
                yield from walk(part)
    try:
        value = json.loads(line)
        return [*walk(value)] if isinstance(value, (list, dict)) else [line]
    except (ValueError, RecursionError):
        return [line]


def contaminated(page, settings):
    """It shares a word 13-gram with an evaluation file."""
    known = evaluation_ngrams(settings["contaminated"])
    grams = chained(word_hashes(page["text"]), EVALUATION_NGRAM)
    places = np.minimum(np.searchsorted(known, grams), max(0, len(known) - 1))
    if not len(known) or not (known[places] == grams).any():
        return None
    page["notes"].append("contaminated")
    return "contaminated" if settings["contaminated_drop"] else None


# --- Personal data ----------------------------------------------------------------------------------------------------

EMAIL = re.compile(r"\b[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")
# What must not stand before it comes behind the first digit: patterns that begin with a class are searched faster.
ADDRESS = re.compile(r"\d(?<![\w.].)\d{0,2}\.(?:\d{1,3}\.){2}\d{1,3}(?![\w.]*\d)")
STAND_INS = "name@example.com", "192.0.2.1"       # RFC 2606 and 5737 keep them for this


def masked(page, settings):
    """E-mail and public IPv4 addresses give way to stand-ins that read like them. Private addresses say nothing."""
    def stand_in(found):
        try:
            return STAND_INS[1] if ipaddress.IPv4Address(found[0]).is_global else found[0]
        except ValueError:                          # 300.1.1.1, 01.2.3.4
            return found[0]
    text = EMAIL.sub(STAND_INS[0], page["text"]) if "@" in page["text"] else page["text"]
    text = ADDRESS.sub(stand_in, text)
    if text != page["text"]:
        page["notes"].append("masked_addresses")
        page["text"] = text


# --- The table: name, function, the keys that decide, where the default comes from ------------------------------------

TABLE = (
    ("readable", readable, (), "prepare/warc.py: what the reader could not make a page of"),
    ("protocol", protocol, (), "HTTP; other toolkits keep error pages"),
    ("blocked", blocked, ("block_list",), "the file that is named"),
    ("decoded", decoded, ("max_replacement",), "1 %: one accident in a page is no reason to lose it"),
    ("extracted", extracted, ("main_content",), "resiliparse, as in DCLM and dolma"),
    ("normalised", normalised, ("keep_indentation",), "Unicode NFC"),
    ("length", length, ("min_chars", "max_chars"), "CCNet takes 300 at least, C4 190,000 at most"),
    ("language", language, ("languages", "language_threshold"),
     "C4: 0.99 for a naive-Bayes detector; FineWeb: 0.65 for fastText"),
    ("entropy", entropy, ("min_entropy",), "English has 4.2 to 5.1, \"lorem ipsum\" over and over 3.5"),
    ("ascii_share", ascii_share, ("min_ascii",), "a guard against what only claims to be such a language"),
    *((name, rule, ("rules",), rule.__doc__.split("\n")[0]) for name, rule in RULES.items()),
    ("masked", masked, ("mask_personal",), "as FineWeb does"),
    ("contaminated", contaminated, ("contaminated", "contaminated_drop"), "Brown et al. 2020: 13-grams"),
    ("perplexity", perplexity, ("perplexity_text",), "CCNet, Wenzek et al. 2019"),
)
# Those that run only when their first key is set; rules run when they are named.
OPTIONAL = ("blocked", "contaminated", "masked", "perplexity")
FILTERS = {name: step for name, step, _, _ in TABLE if name not in (*OPTIONAL, *RULES)}


def steps_of(settings):
    """[(name, function)] of the filters that run with these settings, in order."""
    chosen = {name for name, _, keys, _ in TABLE if name in OPTIONAL and settings[keys[0]]} | set(settings["rules"])
    return [(name, FILTERS.get(name, step)) for name, step, _, _ in TABLE if name in FILTERS or name in chosen]
