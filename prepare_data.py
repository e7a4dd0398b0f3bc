"""
Stage 1: from raw web archives to clean documents, and from documents to token shards.

    python prepare_data.py config/demo.py          makes its own archive (Python's documentation), then the documents
    python train_tokenizer.py config/demo.py       learns a vocabulary from them
    python prepare_data.py config/demo.py          called again: now the token shards

Your own archives:

    python prepare_data.py --data_dir=data/mine --inputs="archives/*.warc.gz,notes/*.jsonl"

Inputs are WARC (also .gz, .zst), WET, JSON lines with a "text", and text files. What happens to a page, in order:

    read         prepare/warc.py      records, HTTP, chunks and compression; damage is counted and passed over
    clean        prepare/filters.py   protocol, charset, HTML to text (prepare/text.py), length, language, guards
    deduplicate  prepare/dedup.py     exact copies, MinHash with every candidate pair verified, repeated paragraphs
    split        here                 held-out pages by a hash of their URL, so that they stay held out for ever
    tokenise     here                 BOS text EOS into engine/shards.py

Written in data_dir: docs/*.jsonl.zst, audit.json (what became of every page, and why), tokens/, and work/, which holds
each input file's cleaned pages, so that a changed input or a kill costs only the files that it touched; work/ may be
deleted. Every result carries the hash of all that it was made from: inputs, configuration, program, tokenizer. Called
again, the script redoes exactly what no longer fits, and says so.
"""

import concurrent.futures
import glob
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import sys
import time
import zipfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import zstandard
from tqdm import tqdm

from configurator import configure, refuse
from engine.files import intact, lock_folder, publish, read_json, sha256_file, write_json
from engine.shards import ShardWriter, read_documents, read_jsonl_zst, write_index
from engine.tokenizer import Tokenizer, find_tokenizer
from prepare.audit import add, empty_audit, finished, judge, measure, tally, waterfall
from prepare.corpus import build_corpus
from prepare.dedup import PARAGRAPH_BREAK, MinHash, paragraph_hashes, repeated, representatives, text_hash
from prepare.filters import FILTERS, RULES
from prepare.warc import read_pages, shown_name

data_dir = "data/demo"            # everything is written in here
inputs: tuple[str] = ()           # files, folders or globs
corpus = ""                       # "pydoc": make an archive of Python's documentation in data_dir/input, and read it
corpus_modules = 0                # how many modules of it; 0 for all
max_decompressed = 64 * 2 ** 30   # bytes that one input file may unpack to; the rest of it is dropped, and counted
main_content = False              # extract without menus, headers and footers
languages: tuple[str] = ("en",)   # kept; () for all
language_threshold = 0.995        # py3langid's probability; languages it is less sure of are dropped
max_replacement = 0.01            # share of characters that could not be decoded
min_chars = 200                   # length of a document
max_chars = 1_000_000             # longer ones are mostly tables and logs
min_entropy = 3.2                 # bits per character: stops "aaaa"; no measure of quality
min_ascii = 0.30                  # share of ASCII characters
rules: tuple[str] = ()            # also gopher_quality, gopher_repetition, c4, fineweb: made for prose, see filters.py
minhash_threshold = 0.85          # resemblance from which a page is a near-duplicate; 0: exact duplicates only
minhash_bands = 16                # more bands: more pairs are compared
minhash_rows = 8                  # in each band; bands x rows = 128 hash functions
minhash_seed = 1                  # not the run's seed: another seed of training has the same data
paragraph_min_chars = 0           # from this length on, a paragraph that stood before is left out; 0: none is
val_fraction = 0.05               # of pages, by a hash of the URL
val_pinned: tuple[str] = ()       # URLs held out in any case; * matches anything
shard_tokens = 100_000_000        # in each file of tokens/
workers = 1                       # processes; the result does not depend on it


DOCS_PER_FILE = 20_000
# The cleaned pages of an input file depend on all keys but these.
LATER_KEYS = {"data_dir", "inputs", "corpus", "corpus_modules", "minhash_threshold", "val_fraction", "shard_tokens",
              "workers"}
OURS = {".lock", "audit.json", "work", "docs", "tokens", "tokenizer", "chat"}     # in data_dir
CLEANED = (".jsonl.zst", ".npz", ".json")         # of one input file: its documents, what is compared of them, counts
HARMLESS = {"records", "other_records", "warc_truncated_header"}      # counted in reading, but no loss
NOTES = {"mislabelled": "mislabelled_charset", "invisible": "invisible_characters_removed"}     # of pages that are kept
DUPLICATES = ("exact_duplicate", "near_duplicate", "repeated_paragraphs")


# --------------------------------------------------------------------------------------------------------------------
# Small things

def digest(*parts):
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def program_hash():
    """Changes with every change to the code that decides what a document is, and with the libraries under it."""
    sources = [Path(__file__), *sorted((Path(__file__).parent / "prepare").glob("*.py"))]
    versions = [importlib.metadata.version(name) for name in ("resiliparse", "py3langid", "zstandard")]
    return digest([sha256_file(source) for source in sources], versions, sys.version)


def progress(items, total, label):
    """The items, with a bar on a terminal and a plain line every half minute otherwise."""
    if sys.stderr.isatty():
        yield from tqdm(items, total=total, desc=label, leave=False)
        return
    last = time.perf_counter()
    for number, item in enumerate(items, 1):
        yield item
        if time.perf_counter() - last > 30:
            last = time.perf_counter()
            print(f"{label}: {number:,}{f' of {total:,}' if total else ''}", flush=True)


def size_of(page):
    """Bytes of its text, or of what it has as long as it has none."""
    return len(page["text"].encode("utf-8", "replace") if "text" in page else page["body"])


class DocumentFile:
    """A .jsonl.zst file: written as .tmp, flushed and renamed by close(), which gives its entry for audit.json."""

    def __init__(self, path):
        self.path = Path(path)
        self.file = open(self.path.with_name(self.path.name + ".tmp"), "wb")
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


# --------------------------------------------------------------------------------------------------------------------
# Clean one input file

def clean_file(path, target, settings, alone=True):
    """Read one input file, run its pages through the filters, and leave three files that begin with `target`.

    .jsonl.zst has the documents, .npz what deduplication and the split need of them, .json the counts; the last one
    makes the others valid. Runs in a worker process unless `alone`.
    """
    steps = [*FILTERS, *(RULES[name] for name in settings["rules"])]
    audit, losses = empty_audit([step.__name__ for step in steps]), Counter()
    minhash = MinHash(settings["minhash_bands"], settings["minhash_rows"], settings["minhash_seed"])
    row = [("hash", "u8", 2), ("signature", "u4", len(minhash.a)), ("place", "f8"), ("paragraphs", "i8")]
    rows, paragraphs = [], []
    documents = DocumentFile(f"{target}.jsonl.zst")
    pages = read_pages(path, losses, settings["max_decompressed"])
    for page in progress(pages, None, f"cleaning {shown_name(path)}") if alone else pages:
        try:
            if not passes(page, steps, settings, audit):
                continue
        except Exception as error:
            error.add_note(f"while cleaning {page['url'] or page['id']} of {path}")
            raise
        text = page["text"]
        documents.add({"id": page["id"], "url": page["url"], "text": text, "length": len(text), "date": page["date"],
                       "language": page["language"], "language_score": round(page["language_score"], 6),
                       "source": shown_name(path)})
        paragraphs.append(paragraph_hashes(text, settings["paragraph_min_chars"]))
        rows.append((np.frombuffer(text_hash(text), dtype=np.uint64), minhash.signature(text),
                     place(page, settings["val_pinned"]), len(paragraphs[-1])))
    documents.close()
    with open(f"{target}.npz.tmp", "wb") as file:
        np.savez(file, rows=np.array(rows, dtype=row),
                 paragraphs=np.concatenate([np.zeros((0, 2), dtype=np.uint64), *paragraphs]))
        publish(file, f"{target}.npz")
    # Whole: nothing of the file was lost on the way. A truncated file is never reported as clean.
    write_json(f"{target}.json", {"documents": documents.documents, "losses": dict(sorted(losses.items())),
                                  "whole": losses.keys() <= HARMLESS, "audit": audit})


def passes(page, steps, settings, audit):
    """Run one page through the filters and count it; whether it is kept."""
    measures = page["measures"] = {}
    size = size_of(page)
    for step in steps:
        reason = step(page, settings)
        before, size = size, size_of(page)
        told = " ".join(f"{name}={value:.4g}" for name, value in measures.items())
        judge(audit["filters"][step.__name__], page, reason, before, size, told)
        if reason:
            break
    else:
        for note in [f"decoded_by_{page['decoded_by']}", *(NOTES[key] for key in NOTES if page.get(key))]:
            tally(audit["notes"], note, page, size)
    measure(audit, measures)
    return not reason


def place(page, pinned):
    """Where a page lies in [0, 1): below val_fraction it is held out. -1 for pinned pages.

    It depends on the URL alone, so a page keeps its side when other pages come and go, and all versions of a page are
    on the same one. Pages without a URL (JSON lines, text files) go by their text.
    """
    url = page["url"].partition("#")[0]
    if any(fnmatchcase(url, pattern) for pattern in pinned):
        return -1.0
    key = hashlib.blake2b((url or page["text"]).encode("utf-8"), digest_size=6).digest()
    return int.from_bytes(key, "big") / 2 ** 48                # below 2^53: exact


def clean_inputs(paths, config, work):
    """[(target, counts)] of every input file, in order. What was done before with the same everything is done."""
    settings, program = {name: value for name, value in config.items() if name not in LATER_KEYS}, program_hash()
    work.mkdir(parents=True, exist_ok=True)
    targets = []
    for path in paths:
        try:
            targets.append(work / digest(path.name, sha256_file(path), settings, program)[:16])
        except OSError as error:
            refuse(f"input {path} cannot be read: {error.strerror}. Mend it or leave it out of --inputs.")
    todo = {target: path for path, target in zip(paths, targets)
            if not all(target.with_suffix(end).exists() for end in CLEANED)}
    if config.workers > 1 and len(todo) > 1:
        # Not multiprocessing.Pool, which waits for ever for a worker that the system has killed.
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(config.workers, spawn) as pool:
            jobs = [pool.submit(clean_file, path, target, settings, False) for target, path in todo.items()]
            try:
                for job in progress(concurrent.futures.as_completed(jobs), len(jobs), "cleaning files"):
                    job.result()
            except concurrent.futures.BrokenExecutor:
                refuse("a worker process died while cleaning, perhaps for want of memory. What was finished is kept; "
                       "run the same command again, with --workers=1 to see at which file it happens.")
    else:
        for target, path in todo.items():
            clean_file(path, target, settings)
    print(f"input files: {len(todo)} cleaned, {len(paths) - len(todo)} cleaned before and unchanged", flush=True)
    remove_others(work, "[0-9a-f]" * 16 + ".*", {target.name + end for target in targets for end in CLEANED})
    return [(target, read_json(target.with_suffix(".json"))) for target in targets]


def remove_others(folder, pattern, names):
    """Delete what earlier runs with other inputs or settings left in `folder`, but nothing that is not ours."""
    for path in folder.glob(pattern):
        if path.name not in names:
            path.unlink()


# --------------------------------------------------------------------------------------------------------------------
# Deduplicate over all files, split, write

def deduplicate(rows, paragraphs, config):
    """What becomes of all documents, in order: exact copies go, then near-duplicates, then paragraphs.

    -> kept, a bool array; why, for each dropped one (reason, detail); again, for each document a bool array that is
    True at the paragraphs to be left out. See prepare/dedup.py.
    """
    _, first = np.unique(rows["hash"], axis=0, return_index=True)
    kept = np.isin(np.arange(len(rows)), first)
    why = {document: ("exact_duplicate", "") for document in np.flatnonzero(~kept)}
    if config.minhash_threshold > 0:
        rest = np.flatnonzero(kept)
        chosen, resemblance = representatives(rows["signature"][rest], config.minhash_bands, config.minhash_threshold)
        for document in np.flatnonzero(chosen != np.arange(len(rest))):
            kept[rest[document]] = False
            why[rest[document]] = ("near_duplicate", f"resemblance={resemblance[document]:.3f}")
    again, lengths = repeated(paragraphs, rows["paragraphs"], kept, config.min_chars)
    for document in np.flatnonzero(kept & (lengths < config.min_chars)):
        if again[document].any():
            kept[document] = False
            why[document] = ("repeated_paragraphs", f"characters_left={lengths[document]}")
    return kept, why, again


def cleaned_documents(done):
    """The documents of all cleaned files, in order. Their numbers stand for them in what is compared, so none may be
    missing."""
    for target, counts in done:
        found = 0
        for found, document in enumerate(read_jsonl_zst(f"{target}.jsonl.zst"), 1):
            yield document
        if found != counts["documents"]:
            refuse(f"{target}.jsonl.zst is damaged: {found} documents of {counts['documents']}; delete it "
                   "and run the same command again")


def write_documents(done, config, folder, audit):
    """Drop duplicates, split the rest by page and write docs/; their entries for audit.json."""
    rows, paragraphs = [], []
    for target, _ in done:
        try:
            with np.load(target.with_suffix(".npz")) as arrays:
                rows.append(arrays["rows"])
                paragraphs.append(arrays["paragraphs"])
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            refuse(f"{target}.npz is damaged: {error}; delete it and run the same command again")
    rows = np.concatenate(rows)
    kept, why, again = deduplicate(rows, np.concatenate(paragraphs), config)
    places = rows["place"]
    held_out = places < config.val_fraction
    if config.val_fraction > 0 and kept.sum() > 1 and not (held_out & kept).any():
        # Few pages, and none of them below the bar: without a held-out page nothing could be measured.
        held_out = places == places[kept].min()
    folder.mkdir(exist_ok=True)
    entries, open_files = [], {}
    for number, document in enumerate(cleaned_documents(done)):
        size = size_of(document)
        dropped_by, detail = why.get(number, (None, ""))
        if kept[number] and again[number].any():
            paragraphs = zip(document["text"].split(PARAGRAPH_BREAK), again[number], strict=True)
            document["text"] = PARAGRAPH_BREAK.join(paragraph for paragraph, out in paragraphs if not out)
            document["length"] = len(document["text"])
        for name in DUPLICATES:
            reason = name if name == dropped_by else None
            size_after = size_of(document) if name == "repeated_paragraphs" else size
            judge(audit["filters"][name], document, reason, size, size_after, detail)
            if reason:
                break
        if kept[number]:
            split = "val" if held_out[number] else "train"
            if split not in open_files:
                shard = sum(entry["split"] == split for entry in entries)
                open_files[split] = DocumentFile(folder / f"{split}_{shard:05d}.jsonl.zst")
            open_files[split].add(document | {"split": split})
            if open_files[split].documents == DOCS_PER_FILE:
                entries.append(open_files.pop(split).close() | {"split": split})
    entries += [file.close() | {"split": split} for split, file in open_files.items()]
    return sorted(entries, key=lambda entry: entry["file"])


# --------------------------------------------------------------------------------------------------------------------
# Token shards

def write_tokens(config, tokenizer, key, audit):
    """docs/ -> tokens/: every document as BOS text EOS (text EOS without a BOS).
    index.json comes last and makes the shards valid."""
    folder = Path(config.data_dir) / "tokens"
    if tokenizer.eos_id is None:
        refuse(f"the tokenizer in {folder.parent / 'tokenizer'} has no EOS token, but documents are stored as "
               "BOS text EOS")
    before = np.array([tokenizer.bos_id] if tokenizer.bos_id is not None else [], np.int64)
    (folder / "index.json").unlink(missing_ok=True)
    splits = {}
    for split in ("train", "val"):
        writer, text_bytes = ShardWriter(folder, split, tokenizer.vocab_size, config.shard_tokens), 0
        total = sum(entry["documents"] for entry in audit["documents"] if entry["split"] == split)
        documents, ahead = itertools.tee(progress(read_documents(config.data_dir, split), total, f"tokenising {split}"))
        encoded = tokenizer.encode_batch((document["text"] for document in ahead), config.workers)
        for document, ids in zip(documents, encoded):
            writer.add(np.concatenate([before, ids, [tokenizer.eos_id]]))
            text_bytes += size_of(document)
        splits[split] = entry = writer.close() | {"text_bytes": text_bytes}
        print(f"tokens/{split}: {entry['n_tokens']:,} tokens of {entry['n_docs']:,} documents", flush=True)
    write_index(folder, tokenizer, splits, key=key, config_hash=config.hash, source_hash=audit["source_hash"])
    return read_json(folder / "index.json")


def token_files(index):
    """{name: sha256}"""
    return {file["name"]: file["sha256"]
            for entry in index["splits"].values() for file in [*entry["files"], entry["offsets"]]}


# --------------------------------------------------------------------------------------------------------------------
# The flow

def check(config):
    """The input files, sorted; refuses patterns that match nothing and settings that make no sense, all at once."""
    problems = [f"rules: there is no rule set {name!r}; there are {', '.join(RULES)}" for name in config.rules
                if name not in RULES]
    if config.corpus not in ("", "pydoc"):
        problems.append(f"corpus must be 'pydoc' or empty, found {config.corpus!r}")
    if not config.corpus and not config.inputs:
        problems.append("there is nothing to read: give --inputs=FILES, or --corpus=pydoc for Python's documentation")
    shares = ("language_threshold", "max_replacement", "min_ascii", "minhash_threshold", "val_fraction")
    problems += config.outside(**dict.fromkeys(shares, (0, 1)), minhash_seed=(0,))
    problems += config.below_one("minhash_bands", "minhash_rows", "shard_tokens", "workers", "max_decompressed")
    # A folder of inputs may be the data folder, or hold it: the second call must not read results as inputs, nor
    # overwrite inputs by results.
    ours = [Path(config.data_dir).resolve() / name for name in OURS]
    paths = set()
    for pattern in config.inputs:
        names = [pattern]                                # a file's own name may hold brackets
        if not Path(pattern).is_file():
            names = glob.glob(f"{glob.escape(pattern)}/**" if Path(pattern).is_dir() else pattern, recursive=True)
        files = {Path(name) for name in names if Path(name).is_file()}
        own = {path for path in files if any(path.resolve().is_relative_to(result) for result in ours)}
        if not files:
            problems.append(f"--inputs: {pattern!r} matches no file (looked in {os.getcwd()})")
        elif files == own:
            problems.append(f"--inputs: {pattern!r} matches only files of {config.data_dir} that are written by this "
                            "script or the next ones; choose another --data_dir")
        paths |= files - own
    refuse(*problems)
    return sorted(paths)


def report(audit):
    """Print what was lost in reading, the waterfall, and the files of what is left."""
    for item in audit["inputs"]:
        if not item["whole"]:
            lost = ", ".join(f"{name} {count:,}" for name, count in item["losses"].items())
            print(f"{item['file']} was not read whole: {lost}")
    print("", *waterfall(audit), "", sep="\n")
    for entry in audit["documents"]:
        print(f"{entry['file']}: {entry['documents']:,} documents, {entry['bytes']:,} bytes of text", flush=True)


def refuse_empty(audit):
    """No document is left: say what dropped them."""
    first = audit["filters"]["readable"]["documents_in"]
    if not first:
        refuse("the inputs hold no documents at all (see above what was lost in reading them)")
    name, stage = max(audit["filters"].items(), key=lambda item: item[1]["documents_in"] - item[1]["documents_out"])
    reasons = ", ".join(f"{reason} {counts['documents']:,}" for reason, counts in stage["reasons"].items())
    refuse(f"of {first:,} documents none is left. Most were dropped by the filter '{name}' ({reasons}); "
           "audit.json has examples of each reason")


def main(config):
    paths, root = check(config), Path(config.data_dir)
    with lock_folder(root):
        try:
            prepare(config, root, paths)
        except OSError as error:                     # a full disk, a folder that may not be written to
            for folder in ("input", "work", "docs", "tokens"):
                for half in (root / folder).glob("*.tmp"):
                    half.unlink(missing_ok=True)
            refuse(f"cannot go on in {root}: {error}. What was finished is kept; run the same command again.")


def prepare(config, root, paths):
    # 1. The embedded corpus becomes an input file like any other.
    if config.corpus == "pydoc":
        archive, corpus, made = build_corpus(root / "input", config.corpus_modules, progress)
        paths = [archive, *paths]
        print(f"{'made' if made else 'unchanged:'} {archive}: {corpus['pages']} pages of documentation, "
              f"{corpus['html_bytes'] / 1e6:.1f} MB of HTML, {sum(corpus['planted'].values())} planted pages")
        failed = sorted(module for module, reason in corpus["skipped"].items() if ": " in reason)
        print("modules that cannot be imported here: " + (", ".join(failed) or "none"), flush=True)

    # 2. Clean each input file by itself.
    done = clean_inputs(paths, config, root / "work")

    # 3. Deduplicate over all of them, split by page, write documents and audit.
    source_hash = digest([target.name for target, _ in done])
    key = digest(source_hash, config.minhash_threshold, config.val_fraction)
    audit_file = root / "audit.json"
    audit = read_json(audit_file, {})
    files = {entry["file"]: entry["sha256"] for entry in audit.get("documents", ())}
    if audit.get("key") == key and intact(root, files):
        print("documents: done before and unchanged")
    else:
        audit_file.unlink(missing_ok=True)
        counts = empty_audit([*(step.__name__ for step in FILTERS), *config.rules, *DUPLICATES])
        for _, part in done:
            add(counts, part["audit"])
        documents = write_documents(done, config, root / "docs", counts)
        audit = {"key": key, "source_hash": source_hash,
                 "inputs": [{"file": shown_name(path), "part": target.name, "documents": part["documents"],
                             "whole": part["whole"], "losses": part["losses"]}
                            for path, (target, part) in zip(paths, done)],
                 **finished(counts, dict(config.items())), "documents": documents}
        report(audit)
        write_json(audit_file, audit)
    if not audit["documents"]:
        refuse_empty(audit)
    remove_others(root / "docs", "*_[0-9][0-9][0-9][0-9][0-9].jsonl.zst*",
                  [Path(entry["file"]).name for entry in audit["documents"]])

    # 4. Token shards, once there is a tokenizer.
    if not find_tokenizer(root / "tokenizer"):
        print(f"next: {config.command('train_tokenizer.py')}\nthen: {config.command('prepare_data.py')}")
        return
    tokenizer = Tokenizer.load(root / "tokenizer")
    tokens_key = digest(key, [entry["sha256"] for entry in audit["documents"]], tokenizer.hash, config.hash)
    index = read_json(root / "tokens" / "index.json", {})
    if index.get("key") == tokens_key and intact(root / "tokens", token_files(index)):
        print("tokens: done before and unchanged")
    else:
        index = write_tokens(config, tokenizer, tokens_key, audit)
    remove_others(root / "tokens", "*.bin*", token_files(index))


if __name__ == "__main__":
    main(configure(globals()))
