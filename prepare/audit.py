"""What became of every page: documents and bytes into and out of each filter, reasons, examples, histograms.

An audit is a plain dict that can be written as JSON, and the audits of several files add up: the sum does not depend on
the order or on the number of workers.
"""

import hashlib
import heapq
import re

import numpy as np

from engine.files import printable
from prepare.filters import HISTOGRAMS

EXAMPLES = 5          # kept for each reason: those with the smallest hashes, so always the same ones
HOSTS = 50            # counted separately for each reason; the sum of the others stands under "other"
BINS = 50
COUNTS = ("documents_in", "documents_out", "bytes_in", "bytes_out")


def empty_audit(names):
    """An audit of the filters `names`, with nothing in it."""
    return {
        "filters": {name: {**dict.fromkeys(COUNTS, 0), "reasons": {}} for name in names},
        "notes": {},                                              # what was mended in pages that were kept
        "histograms": {name: [0] * BINS for name in HISTOGRAMS},
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


def tally(reasons, reason, page, size, detail=""):
    """Count one page under a reason or a note."""
    host = re.match(r"https?://(?:[^/@]*@)?([^/:?#]+)", page["url"])     # urlsplit raises for some that occur
    start = page.get("text") or page.get("body", b"")[:400].decode("utf-8", "replace")
    example = {"url": page["url"] or page["id"], "detail": detail, "start": printable(start[:200])[:120]}
    add_reasons(reasons, {reason: {"documents": 1, "bytes": size, "examples": [example],
                                   "hosts": {host.group(1).lower() if host else "(none)": 1}}})


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
        _, low, high = HISTOGRAMS[name]
        place = int((value - low) / (high - low) * BINS)
        audit["histograms"][name][min(max(place, 0), BINS - 1)] += 1


def add(into, other):
    """Add the audit `other` to the audit `into`."""
    for name, theirs in other["filters"].items():
        ours = into["filters"][name]
        for key in COUNTS:
            ours[key] += theirs[key]
        add_reasons(ours["reasons"], theirs["reasons"])
    add_reasons(into["notes"], other["notes"])
    for name, bins in other["histograms"].items():
        into["histograms"][name] = np.add(into["histograms"][name], bins).tolist()


def finished(audit, settings):
    """The audit as it is written: rare hosts summed, histograms with their edges and thresholds."""
    for reasons in [audit["notes"], *(stage["reasons"] for stage in audit["filters"].values())]:
        for counts in reasons.values():
            ranked = sorted(counts["hosts"].items(), key=lambda item: (-item[1], item[0]))
            counts["hosts"] = dict(ranked[:HOSTS])
            if ranked[HOSTS:]:
                counts["hosts"]["other"] = sum(count for _, count in ranked[HOSTS:])
    return audit | {"histograms": {
        name: {"threshold": {key: settings[key]}, "from": low, "to": high, "counts": audit["histograms"][name]}
        for name, (key, low, high) in HISTOGRAMS.items()}}


def waterfall(audit):
    """The lines of a table: what went in, what every filter took away and why, what is left."""
    yield f"{'filter':<18}{'documents':>10}{'dropped':>9}{'bytes':>13}   reasons"
    for name, stage in audit["filters"].items():
        dropped = stage["documents_in"] - stage["documents_out"]
        reasons = sorted(stage["reasons"].items(), key=lambda item: (-item[1]["documents"], item[0]))
        told = ", ".join(f"{reason} {counts['documents']:,}" for reason, counts in reasons)
        yield f"{name:<18}{stage['documents_out']:>10,}{dropped:>9,}{stage['bytes_out']:>13,}   {told}".rstrip()
