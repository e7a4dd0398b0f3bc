"""What became of every page: documents and bytes into and out of each filter, reasons, examples, histograms.

An audit is a plain dict that can be written as JSON, and the audits of several files add up: the sum does not depend on
the order or on the number of workers.
"""

import hashlib
import heapq
import re
from bisect import bisect_right

import numpy as np

from engine.files import printable

EXAMPLES = 5          # kept for each reason: those with the smallest hashes, so always the same ones
HOSTS = 50            # counted separately for each reason; the sum of the others stands under "other"
# bytes_in = bytes_out + bytes_trimmed (off pages that went on: markup, spaces) + the bytes of all reasons.
COUNTS = ("documents_in", "documents_out", "bytes_in", "bytes_out", "bytes_trimmed")


# What each threshold is compared with: measure -> (keys; whether a page must reach or must not pass them; edges of the
# histogram's bins). The thresholds in use are added to the edges, so that a bin lies on one side of them.
HISTOGRAMS = {
    "replacement_share": (("max_replacement",), [n / 1000 for n in range(0, 51)]),
    "characters": (("min_chars", "max_chars"), [m * 10 ** e for e in range(7) for m in (1, 1.5, 2, 3, 4, 5, 7)]),
    "language_score": (("language_threshold",),
                       [*(n / 50 for n in range(48)), .95, .96, .97, .98, .985, .99, .995, .999, 1]),
    "entropy": (("min_entropy",), [n / 10 for n in range(0, 81)]),
    "ascii_share": (("min_ascii",), [n / 50 for n in range(51)]),
    "perplexity": ((), [round(1.1 ** n, 2) for n in range(75)]),
}


def edges_of(name, settings):
    """The lower edges of a histogram's bins, ascending; what lies below the first is counted in it."""
    keys, edges = HISTOGRAMS[name]
    return sorted({*edges, *(settings[key] for key in keys)})


# What is read of audit.json again.
FORM = {"key": str, "settings": dict, "inputs": [{"file": str, "part": str}],
        "documents": [{"file": str, "split": str, "bytes": int, "sha256": str}]}


def empty_audit(names, settings):
    """An audit of the filters `names`, with nothing in it."""
    edges = {name: edges_of(name, settings) for name in HISTOGRAMS}
    return {
        "filters": {name: {**dict.fromkeys(COUNTS, 0), "reasons": {}} for name in names},
        "notes": {},                                              # what was mended in pages that were kept
        "languages": {}, "domains": {},                           # of pages as far as it was asked; of documents
        "histograms": {name: {"threshold": {key: settings[key] for key in HISTOGRAMS[name][0]}, "edges": edges[name],
                              "counts": [0] * len(edges[name])} for name in HISTOGRAMS},
    }


def judge(stage, page, reason, size, size_after, detail=""):
    """Count a page of `size` bytes in a filter's entry: dropped for `reason`, or let through with `size_after`."""
    stage["documents_in"] += 1
    stage["bytes_in"] += size
    if reason:
        tally(stage["reasons"], reason, page, size, detail)
    else:
        stage["documents_out"] += 1
        stage["bytes_out"] += size_after
        stage["bytes_trimmed"] += size - size_after


def host_of(url):
    """The host's name in small letters; "" where there is none. (urlsplit raises for some URLs that occur.)"""
    host = re.match(r"https?://(?:[^/@]*@)?([^/:?#]+)", url, re.IGNORECASE)
    return host.group(1).lower() if host else ""


def tally(reasons, reason, page, size, detail=""):
    """Count one page under a reason or a note."""
    start = page.get("text") or page.get("body", b"")[:400].decode("utf-8", "replace")
    example = {"url": page["url"] or page["id"], "detail": detail, "start": printable(start[:200])[:120]}
    add_reasons(reasons, {reason: {"documents": 1, "bytes": size, "examples": [example],
                                   "hosts": {host_of(page["url"]) or "(none)": 1}}})


def add_reasons(into, reasons):
    for reason, theirs in reasons.items():
        ours = into.setdefault(reason, {"documents": 0, "bytes": 0, "hosts": {}, "examples": []})
        ours["documents"] += theirs["documents"]
        ours["bytes"] += theirs["bytes"]
        for host, count in theirs["hosts"].items():
            ours["hosts"][host] = ours["hosts"].get(host, 0) + count
        ours["examples"] = heapq.nsmallest(EXAMPLES, ours["examples"] + theirs["examples"], key=lambda example: (
            hashlib.blake2b(example["url"].encode("utf-8", "replace"), digest_size=8).digest(), example["start"]))


def measure(audit, measures):
    """Add the numbers that the filters judged one page by to the histograms."""
    for name, value in measures.items():
        histogram = audit["histograms"][name]
        # A value equal to an upper limit is inside, so that one's bin ends behind it.
        place = bisect_right(histogram["edges"], value) - 1
        if value in [limit for key, limit in histogram["threshold"].items() if key.startswith("max")]:
            place -= 1
        histogram["counts"][max(place, 0)] += 1


def add(into, other):
    """Add the audit `other` to the audit `into`."""
    for name, theirs in other["filters"].items():
        ours = into["filters"][name]
        for key in COUNTS:
            ours[key] += theirs[key]
        add_reasons(ours["reasons"], theirs["reasons"])
    add_reasons(into["notes"], other["notes"])
    for language, count in other["languages"].items():
        into["languages"][language] = into["languages"].get(language, 0) + count
    for name, theirs in other["histograms"].items():
        ours = into["histograms"][name]
        ours["counts"] = np.add(ours["counts"], theirs["counts"]).tolist()


def finished(audit):
    """The audit as it is written: rare hosts summed, histograms of what was not measured left out."""
    for reasons in [audit["notes"], *(stage["reasons"] for stage in audit["filters"].values())]:
        for counts in reasons.values():
            counts["hosts"] = most_frequent(counts["hosts"])
    measured = {name: told for name, told in audit["histograms"].items() if any(told["counts"])}
    return audit | {"domains": most_frequent(audit["domains"]), "histograms": measured}


def most_frequent(counts):
    """The first HOSTS of them, and the sum of the others."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    others = sum(count for _, count in ranked[HOSTS:])
    return dict(ranked[:HOSTS]) | ({"other": others} if others else {})


def other_thresholds(histogram):
    """For each threshold of a histogram: (key, [(another value, how many more pages would pass it)]), exact. A later
    filter may still drop them."""
    edges, counts = histogram["edges"], histogram["counts"]
    for key, limit in histogram["threshold"].items():
        passed = lambda value: sum(count for edge, count in zip(edges, counts)
                                   if (edge < value if key.startswith("max") else edge >= value))
        yield key, [(value, passed(value) - passed(limit)) for value in edges]


def waterfall(audit):
    """The lines of a table: what went in, what every filter took away and why, what is left."""
    yield f"{'filter':<18}{'documents':>10}{'dropped':>9}{'bytes':>13}   reasons"
    for name, stage in audit["filters"].items():
        dropped = stage["documents_in"] - stage["documents_out"]
        reasons = sorted(stage["reasons"].items(), key=lambda item: (-item[1]["documents"], item[0]))
        told = ", ".join(f"{reason} {counts['documents']:,}" for reason, counts in reasons)
        yield f"{name:<18}{stage['documents_out']:>10,}{dropped:>9,}{stage['bytes_out']:>13,}   {told}".rstrip()
