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


def empty_audit(names):
    """An audit of the filters `names`, with nothing in it."""
    return {
        "filters": {name: {"documents_in": 0, "documents_out": 0, "bytes_in": 0, "bytes_out": 0, "reasons": {}}
                    for name in names},
        "notes": {},                                              # what was mended in pages that were kept
        "histograms": {name: [0] * BINS for name in HISTOGRAMS},
    }


def tally(counts, page, size, detail=""):
    """Count one page under one reason or note."""
    counts.setdefault("documents", 0)
    counts["documents"] += 1
    counts["bytes"] = counts.get("bytes", 0) + size
    host = re.match(r"https?://(?:[^/@]*@)?([^/:?#]+)", page["url"])     # urlsplit raises for some that occur
    host = host.group(1).lower() if host else "(none)"
    hosts = counts.setdefault("hosts", {})
    hosts[host] = hosts.get(host, 0) + 1
    start = page.get("text") or page.get("body", b"")[:400].decode("utf-8", "replace")
    example = {"url": page["url"] or page["id"], "detail": detail, "start": printable(start[:200])[:120]}
    counts["examples"] = smallest([*counts.get("examples", []), example])


def smallest(examples):
    return heapq.nsmallest(EXAMPLES, examples, key=lambda example: (
        hashlib.blake2b(example["url"].encode("utf-8", "replace"), digest_size=8).digest(), example["start"]))


def measure(audit, measures):
    """Add the numbers that the filters judged one page by to the histograms."""
    for name, value in measures.items():
        _, low, high = HISTOGRAMS[name]
        place = int((value - low) / (high - low) * BINS)
        audit["histograms"][name][min(max(place, 0), BINS - 1)] += 1


def add_counts(into, counts):
    for reason, theirs in counts.items():
        ours = into.setdefault(reason, {"documents": 0, "bytes": 0, "hosts": {}, "examples": []})
        ours["documents"] += theirs["documents"]
        ours["bytes"] += theirs["bytes"]
        for host, count in theirs["hosts"].items():
            ours["hosts"][host] = ours["hosts"].get(host, 0) + count
        ours["examples"] = smallest([*ours["examples"], *theirs["examples"]])


def add(into, other):
    """Add the audit `other` to the audit `into`."""
    for name, theirs in other["filters"].items():
        ours = into["filters"][name]
        for key in ("documents_in", "documents_out", "bytes_in", "bytes_out"):
            ours[key] += theirs[key]
        add_counts(ours["reasons"], theirs["reasons"])
    add_counts(into["notes"], other["notes"])
    for name, bins in other["histograms"].items():
        into["histograms"][name] = np.add(into["histograms"][name], bins).tolist()


def finished(audit, settings):
    """The audit as it is written: rare hosts summed, histograms with their edges and thresholds."""
    for counts in [entry for stage in audit["filters"].values() for entry in stage["reasons"].values()] + \
            list(audit["notes"].values()):
        ranked = sorted(counts["hosts"].items(), key=lambda item: (-item[1], item[0]))
        counts["hosts"] = dict(ranked[:HOSTS])
        if ranked[HOSTS:]:
            counts["hosts"]["other"] = sum(count for _, count in ranked[HOSTS:])
    histograms = {}
    for name, bins in audit["histograms"].items():
        key, low, high = HISTOGRAMS[name]
        histograms[name] = {"threshold": {key: settings[key]}, "from": low, "to": high, "counts": bins}
    return audit | {"histograms": histograms}


def waterfall(audit):
    """The lines of a table: what went in, what every filter took away and why, what is left."""
    yield f"{'filter':<18}{'documents':>10}{'dropped':>9}{'bytes':>13}   reasons"
    for name, stage in audit["filters"].items():
        dropped = stage["documents_in"] - stage["documents_out"]
        reasons = sorted(stage["reasons"].items(), key=lambda item: (-item[1]["documents"], item[0]))
        told = ", ".join(f"{reason} {counts['documents']:,}" for reason, counts in reasons)
        yield f"{name:<18}{stage['documents_out']:>10,}{dropped:>9,}{stage['bytes_out']:>13,}   {told}".rstrip()
