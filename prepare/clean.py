"""Clean one input file: read its pages, run them through the filters, leave what is kept in work/.

A cleaned file is five files: .jsonl.zst has the documents; .rows one record a document of what deduplication and the
split need; .shingles and .paragraphs the hashes that those speak of; .json the counts, and the checksums of the
others, which it makes valid. None of it grows in memory, however large the input is.
"""

import hashlib
import json
import os
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import zstandard

from configurator import refuse
from engine.files import intact, publish, sha256_file, write_json
from prepare.audit import empty_audit, host_of, judge, measure, tally
from prepare.dedup import MinHash, paragraph_hashes, shingles, text_hash
from prepare.filters import steps_of
from prepare.perplexity import model_of
from prepare.warc import read_pages, shown_name, size_of

ARRAYS = (".rows", ".shingles", ".paragraphs")
CLEANED = (".jsonl.zst", *ARRAYS, ".json")
HARMLESS = {"records", "other_records", "warc_truncated_header"}      # counted in reading, but no loss
QUARANTINED = "killed_its_process"
# A page that is worked on is named here for whoever looks on from outside.
PAGE, SINCE, DOCUMENTS, KEPT, READ, SLOTS = range(6)


def row_type(settings):
    """One document, as deduplication and the split see it."""
    bands, rows = settings["minhash_bands"], settings["minhash_rows"]
    return np.dtype([("hash", "<u8", 2), ("bands", "<u8", bands), ("sketch", "u1", bands * rows), ("shingles", "<i8"),
                     ("paragraphs", "<i8"), ("place", "<f8"), ("perplexity", "<f4")])


class DocumentFile:
    """A .jsonl.zst file: written as .tmp, flushed and renamed by close(), which gives its entry for audit.json."""

    def __init__(self, path):
        self.path = Path(path)
        self.file = open(temporary(self.path), "wb")
        self.stream = zstandard.ZstdCompressor(level=3).stream_writer(self.file, closefd=False)
        self.documents = self.bytes = 0

    def add(self, document):
        self.stream.write(json.dumps(document, ensure_ascii=False).encode("utf-8") + b"\n")
        self.documents += 1
        self.bytes += size_of(document)

    def close(self):
        self.stream.close()
        publish(self.file, self.path)
        return {"file": f"{self.path.parent.name}/{self.path.name}", "documents": self.documents, "bytes": self.bytes,
                "sha256": sha256_file(self.path)}


def temporary(path):
    # With the process in its name: one that was left behind by a kill -9 of its parent may still be writing.
    return f"{path}.{os.getpid()}.tmp"


def whole_file(target, end, counts):
    """The path of target + end; refuses one that is not as it was written."""
    path = Path(f"{target}{end}")
    if not intact(path.parent, {path.name: counts["files"][end]}):
        refuse(f"{path} is damaged; delete it and run the same command again")
    return path


def read_array(target, end, dtype, counts):
    """The whole of target + end, mapped."""
    path = whole_file(target, end, counts)
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def clean_file(path, target, settings, skip=(), slot=None, beat=lambda: None):
    """Read one input file, run its pages through the filters, and leave the five files that begin with `target`.

    skip: numbers of pages that are not touched, since they killed the process that did. slot: a list of SLOTS numbers
    that says how far the work is, which may lie in memory that another process sees; beat() is called at each page.
    """
    slot = [0] * SLOTS if slot is None else slot
    slot[:] = [-1] + [0] * (SLOTS - 1)
    steps = steps_of(settings)
    audit, losses = empty_audit([name for name, _ in steps], settings), Counter()
    minhash = MinHash(settings["minhash_bands"], settings["minhash_rows"], settings["minhash_seed"])
    row, quarantined = np.zeros(1, row_type(settings)), []
    documents = DocumentFile(f"{target}.jsonl.zst")
    arrays = [open(temporary(f"{target}{end}"), "wb") for end in ARRAYS]

    def position(at):
        slot[READ] = at
        slot[SINCE] = int(time.monotonic())        # many gigabytes may lie between two pages

    for number, page in enumerate(read_pages(path, losses, settings["max_decompressed"], position)):
        slot[PAGE], slot[SINCE] = number, int(time.monotonic())
        beat()
        if number in skip:
            page["drop"] = QUARANTINED
            quarantined.append(f"page {number}, {page['url'] or page['id']}")
        try:
            kept = passes(page, steps, settings, audit)
        except Exception as error:
            error.add_note(f"while cleaning page {number}, {page['url'] or page['id']}, of {path}")
            raise
        slot[DOCUMENTS] += 1
        if not kept:
            continue
        slot[KEPT] += 1
        text = page["text"]
        documents.add({"id": page["id"], "url": page["url"], "text": text, "length": len(text), "date": page["date"],
                       "language": page["language"], "language_score": round(page["language_score"], 6),
                       "source": shown_name(path)})
        grams = shingles(text)
        keys = paragraph_hashes(text, settings["paragraph_min_chars"])
        bands, sketch = minhash.bands(minhash.signature(grams))
        row[0] = (np.frombuffer(text_hash(text.encode("utf-8")), "<u8"), bands, sketch, len(grams), len(keys),
                  place(page, settings), page["measures"].get("perplexity", 0))
        for file, array in zip(arrays, (row, grams, keys)):
            file.write(array.tobytes())
    slot[SINCE] = 0                                # no page is worked on any more
    entry = documents.close()
    for file, end in zip(arrays, ARRAYS):
        publish(file, f"{target}{end}")
    files = {end: sha256_file(f"{target}{end}") for end in ARRAYS} | {".jsonl.zst": entry["sha256"]}
    sizes = {name: losses.pop(name) for name in sorted(losses) if name.startswith("bytes_")}
    # Whole: nothing of the file was lost on the way. A truncated file is never reported as clean.
    clean_text = settings["perplexity_text"]
    write_json(f"{target}.json", {
        "documents": entry["documents"], "losses": dict(sorted(losses.items())), "bytes": sizes,
        "whole": losses.keys() <= HARMLESS and not quarantined, "quarantined": quarantined, "files": files,
        "audit": audit, "perplexity_model": model_of(clean_text).hash if clean_text else ""})


def passes(page, steps, settings, audit):
    """Run one page through the filters and count it; whether it is kept."""
    measures = page["measures"] = {}
    notes = page.setdefault("notes", [])
    size = size_of(page)
    for name, step in steps:
        reason = step(page, settings)
        before, size = size, size_of(page)
        told = " ".join(f"{name}={value:.4g}" for name, value in measures.items())
        judge(audit["filters"][name], page, reason, before, size, told)
        if reason:
            break
    else:
        for note in [f"decoded_by_{page['decoded_by']}", *notes]:
            tally(audit["notes"], note, page, size)
    measure(audit, measures)
    if "language" in page:
        audit["languages"][page["language"]] = audit["languages"].get(page["language"], 0) + 1
    return not reason


def place(page, settings):
    """Where a page lies in [0, 1): below val_fraction it is held out. -1 for pinned pages.

    It depends on the URL alone, so a page keeps its side when other pages come and go, and all versions of a page are
    on the same one; with val_by="domain" all pages of a host. Pages without a URL go by their text.
    """
    url = page["url"].partition("#")[0]
    if any(fnmatchcase(url, pattern) for pattern in settings["val_pinned"]):
        return -1.0
    by = host_of(url).removeprefix("www.") if settings["val_by"] == "domain" else url
    key = hashlib.blake2b((by or page["text"]).encode("utf-8"), digest_size=6).digest()
    return int.from_bytes(key, "big") / 2 ** 48
