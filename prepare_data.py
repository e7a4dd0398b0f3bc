"""
Stage 1: from raw web archives to clean documents, and from documents to token shards.

    python prepare_data.py config/demo.py          makes its own archive (Python's documentation), then the documents
    python train_tokenizer.py config/demo.py       learns a vocabulary from them
    python prepare_data.py config/demo.py          called again: now the token shards

Your own archives:

    python prepare_data.py --data_dir=data/mine --inputs="archives/*.warc.gz,notes/*.jsonl"

Inputs are WARC (also .gz, .zst), WET, JSON lines with a "text", and text files. What happens to a page, in order:

    read         prepare/warc.py      records, HTTP, chunks and compression; damage is counted and passed over
    clean        prepare/filters.py   protocol, charset, HTML to text (prepare/text.py), length, language, guards, rules
    deduplicate  prepare/dedup.py     exact copies, MinHash with every candidate pair verified, repeated paragraphs
    split        prepare/clean.py     held-out pages by a hash of their URL, so that they stay held out for ever
    tokenise     here                 BOS text EOS into engine/shards.py

Written in data_dir: docs/*.jsonl.zst, audit.json and audit.html (what became of every page, and why), tokens/, and
work/, which holds each input file's cleaned pages, so that a changed input or a kill costs only the files that it
touched; work/ may be deleted. Every result carries the hash of all that it was made from: inputs, configuration,
program, tokenizer. Called again, the script redoes exactly what no longer fits, and says so.

To look at what has been made, and why:

    python prepare_data.py --data_dir=data/mine --inputs="archives/*.warc.gz" --explain=http://example.com/page
    python prepare_data.py --inspect=data/mine                      the shards: index, counts, first documents

Several processes (--workers), and several machines on one shared folder, give the same bytes:

    torchrun --nnodes=4 --nproc_per_node=1 ... prepare_data.py config/mine.py --workers=16
"""

import glob
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import sys
from pathlib import Path

import numpy as np

from configurator import configure, refuse
from engine.files import fits, intact, lock_folder, printable, publish, read_json, sha256_file, write_atomic, write_json
from engine.shards import INDEX, SPLIT, ShardWriter, read_documents, read_jsonl_zst, write_index
from engine.tokenizer import Tokenizer, find_tokenizer
from prepare import look
from prepare.audit import FORM, add, empty_audit, finished, host_of, judge, waterfall
from prepare.clean import CLEANED, HARMLESS, DocumentFile, read_array, row_type, whole_file
from prepare.corpus import build_corpus
from prepare.dedup import MIX, PARAGRAPH_BREAK, buckets, candidate_probability, repeated, representatives
from prepare.filters import EVALUATION_NGRAM, ngrams_of, steps_of
from prepare.page import page_of
from prepare.progress import Progress
from prepare.rules import RULES
from prepare.stream import text_of
from prepare.warc import PARQUET, shown_name, size_of
from prepare.workers import Ranks, clean_files

data_dir = "data/demo"            # everything is written in here
inputs: tuple[str] = ()           # files, folders or globs
corpus = ""                       # "pydoc": make an archive of Python's documentation in data_dir/input, and read it
corpus_modules = 0                # how many modules of it; 0 for all
max_decompressed = 64 * 2 ** 30   # bytes that one input file may unpack to; the rest of it is dropped, and counted
main_content = False              # extract without menus, headers and footers
keep_indentation = True           # of lines, as programs need it
block_list = ""                   # a file of domains and beginnings of URLs, one a line, that are left out
languages: tuple[str] = ("en",)   # kept; () for all
language_model = ""               # a model file of fastText (lid.176.ftz); "": py3langid
language_threshold: float | None = None     # the detector's probability; None: 0.995 for py3langid, 0.65 for fastText
max_replacement = 0.01            # share of characters that could not be decoded
min_chars = 200                   # length of a document
max_chars = 1_000_000             # longer ones are mostly tables and logs
min_entropy = 3.2                 # bits per character: stops "aaaa"; no measure of quality
min_ascii = 0.30                  # share of ASCII characters
rules: tuple[str] = ()            # for prose: gopher_quality, gopher_repetition, c4, fineweb and more: prepare/rules.py
mask_personal = False             # e-mail and IP addresses give way to stand-ins
contaminated: tuple[str] = ()     # evaluation files: pages that share 13 words in a row with them
contaminated_drop = True          # are dropped; False: only counted
perplexity_text = ""              # a file of clean text: a small model of it measures every page
perplexity_percentile = 100.0     # of the pages so many per cent are kept, the least surprising first
minhash_threshold = 0.85          # resemblance from which a page is a near-duplicate; 0: exact duplicates only
minhash_bands = 16                # more bands: more pairs are compared
minhash_rows = 8                  # in each band; bands x rows = 128 hash functions
minhash_seed = 1                  # not the run's seed: another seed of training has the same data
dedup_scope = "all"               # "input": within each pattern of --inputs, say a crawl, by itself
paragraph_min_chars = 0           # from this length on, a paragraph that stood before is left out; 0: none is
val_fraction = 0.05               # of pages, by a hash of the URL
val_by = "page"                   # "domain": all pages of a host on one side
val_pinned: tuple[str] = ()       # URLs held out in any case; * matches anything
window_chars = 0                  # cut pages into windows of so many characters, 2048 say; 0: whole pages
window_overlap = 512              # of two windows: that share of the text is there twice
shard_tokens = 100_000_000        # in each file of tokens/
workers = 1                       # processes; the result does not depend on it. 0: this one, which may die of a page
explain = ""                      # a URL or id: say what each filter says of that page, and stop
inspect = ""                      # a folder with token shards: show what is in it, and stop


DOCS_PER_FILE = 20_000
MOST_HASHES = 1 << 14            # of MinHash: each takes a byte a document, and memory for every shingle of one
# The cleaned pages of an input file depend on all keys but these.
LATER_KEYS = {"data_dir", "inputs", "corpus", "corpus_modules", "perplexity_percentile", "minhash_threshold",
              "dedup_scope", "val_fraction", "window_chars", "window_overlap", "shard_tokens", "workers", "explain",
              "inspect"}
FILE_KEYS = ("block_list", "language_model", "contaminated", "perplexity_text")     # their files' content counts
OURS = {".lock", "audit.json", "audit.html", "work", "docs", "tokens", "tokenizer", "chat"}     # in data_dir
LATER = ("surprising", "exact_duplicate", "near_duplicate", "repeated_paragraphs")
# Changes of these programs change nothing in what a document is.
APART = ("corpus.py", "look.py", "page.py", "progress.py", "render.py")


# --- Small things -----------------------------------------------------------------------------------------------------

def digest(*parts):
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def program_hash():
    """Changes with every change to the code that decides what a document is, and with the libraries under it."""
    folder = Path(__file__).parent
    sources = [Path(__file__), *sorted(path for path in (folder / "prepare").glob("*.py") if path.name not in APART)]
    versions = [importlib.metadata.version(name) for name in ("resiliparse", "py3langid", "zstandard")]
    return digest([sha256_file(source) for source in sources], versions, sys.version)


def settings_of(config):
    """What cleaning depends on: {key: value}, and under "read" the content of the files that keys name."""
    settings = {name: value for name, value in config.items() if name not in LATER_KEYS}
    if config.language_threshold is None:
        settings["language_threshold"] = 0.65 if config.language_model else 0.995
    return settings | {"read": {name: sha256_file(name) for key in FILE_KEYS for name in named_files(settings[key])}}


def named_files(value):
    """The files in the value of one of FILE_KEYS."""
    return [name for name in np.atleast_1d(value).tolist() if name]


def side_file_problem(key, name):
    """What is wrong with a file that is compared with, or None."""
    if not os.access(name, os.R_OK) or Path(name).is_dir():
        return f"--{key}: {name} cannot be read"
    try:
        if key == "contaminated" and not len(ngrams_of(name)):
            return f"--{key}: {name} has no {EVALUATION_NGRAM} words in a row, so no page could share them with it"
        if key in ("block_list", "perplexity_text"):
            text_of(name, 1 << 28)
    except ValueError as error:
        return f"--{key}: {error}"


# --- Clean the input files, each by itself ----------------------------------------------------------------------------

def clean_inputs(paths, config, work, ranks):
    """[(target, counts)] of every input file, in order. What was done before with the same everything is done."""
    settings, program = settings_of(config), program_hash()
    named = {key: value for key, value in settings.items() if key not in FILE_KEYS}
    named |= {"read": {key: [settings["read"][name] for name in named_files(settings[key])] for key in FILE_KEYS}}
    work.mkdir(parents=True, exist_ok=True)
    targets = {}
    for path in paths[ranks.rank::ranks.size]:
        try:
            targets[path] = work / digest(path.name, sha256_file(path), named, program)[:16]
        except OSError as error:
            refuse(f"input {path} cannot be read: {error.strerror}. Mend it or leave it out of --inputs.")
    todo = {target: path for path, target in targets.items()
            if not all(target.with_suffix(end).exists() for end in CLEANED)}
    clean_files([(path, target) for target, path in todo.items()], settings, config.workers)
    everyone = ranks.gather((targets, len(todo)))
    targets = {path: target for others, _ in everyone for path, target in others.items()}
    cleaned = sum(count for _, count in everyone)
    ranks.say(f"input files: {cleaned} cleaned, {len(paths) - cleaned} cleaned before and unchanged")
    if ranks.rank == 0:
        current = {target.name + end for target in targets.values() for end in CLEANED}
        remove_others(work, "[0-9a-f]" * 16 + ".*", current)
    return [(targets[path], read_json(targets[path].with_suffix(".json"))) for path in paths]


def remove_others(folder, pattern, names):
    """Delete what earlier runs with other inputs or settings left in `folder`, but nothing that is not ours."""
    for path in folder.glob(pattern):
        if path.name not in names:
            path.unlink()


# --- Deduplicate over all files, split, write -------------------------------------------------------------------------

def shared_buckets(rows, config, ranks, folder):
    """(documents, bands) int32: which buckets each document shares with others. Every rank does its share of the bands;
    rank 0 has the result."""
    mine = {band: buckets(np.concatenate([part["bands"][:, band] ^ group for part, group in rows]))
            for band in range(ranks.rank, config.minhash_bands, ranks.size)}
    if ranks.size > 1:
        for band, column in mine.items():
            with open(folder / f"band_{band}.tmp", "wb") as file:
                np.save(file, column)
                publish(file, folder / f"band_{band}.npy")
        ranks.gather()
        if ranks.rank:
            return None
        mine = {band: np.load(folder / f"band_{band}.npy") for band in range(config.minhash_bands)}
    return np.stack([mine[band] for band in sorted(mine)], axis=1)


def deduplicate(done, groups, config, ranks, work):
    """What becomes of all documents, in order: surprising ones go, exact copies, near-duplicates, then paragraphs.

    groups: a number for each cleaned file; only those of one number are compared.
    -> places, float array; kept, a bool array; why, for each dropped one (reason, detail, representative); again, for
    each document a bool array that is True at the paragraphs to be left out. None on other ranks than 0.
    """
    files = [(target, counts, np.uint64(group * int(MIX) % 2 ** 64)) for (target, counts), group in zip(done, groups)]
    row = row_type(settings_of(config))
    rows = [(read_array(target, ".rows", row, counts), group) for target, counts, group in files]
    shared = shared_buckets(rows, config, ranks, work) if config.minhash_threshold > 0 else None
    if ranks.rank:
        return None
    column = lambda name: np.concatenate([part[name] for part, _ in rows])
    kept, why = np.ones(sum(len(part) for part, _ in rows), dtype=bool), {}
    if config.perplexity_text and config.perplexity_percentile < 100 and len(kept):
        perplexity = column("perplexity")
        kept = perplexity <= np.percentile(perplexity, config.perplexity_percentile)
        why = {document: ("surprising", f"perplexity={perplexity[document]:.3f}", -1)
               for document in np.flatnonzero(~kept)}
    rest = np.flatnonzero(kept)
    keys = np.concatenate([part["hash"] ^ group for part, group in rows])[rest]
    order = np.lexsort((keys[:, 1], keys[:, 0]))                    # stable: of equal ones the earliest comes first
    new = np.concatenate([[True], (keys[order[1:]] != keys[order[:-1]]).any(axis=1)])[:len(order)]
    first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    for document, original in zip(rest[order[~new]], rest[first[~new]]):
        kept[document], why[document] = False, ("exact_duplicate", "", original)
    if config.minhash_threshold > 0:
        rest = np.flatnonzero(kept)
        sizes = column("shingles")
        ends = np.cumsum(sizes)
        grams = [read_array(target, ".shingles", "<u4", counts) for target, counts, _ in files]
        last = np.cumsum([len(part) for part in grams])

        def shingles_of(number):
            document = rest[number]
            file = np.searchsorted(last, ends[document])
            end = ends[document] - last[file] + len(grams[file])
            return grams[file][end - sizes[document]:end]

        chosen, resemblance = representatives(shared[rest], column("sketch")[rest], sizes[rest], shingles_of,
                                              config.minhash_threshold)
        for document in np.flatnonzero(chosen != np.arange(len(rest))):
            kept[rest[document]] = False
            why[rest[document]] = ("near_duplicate", f"resemblance={resemblance[document]:.3f}", rest[chosen[document]])
    paragraphs = np.concatenate([read_array(target, ".paragraphs", "<u8", counts).reshape(-1, 2)
                                 for target, counts, _ in files])
    groups = np.repeat([group for *_, group in files], [part["paragraphs"].sum() for part, _ in rows])
    paragraphs[:, 0] ^= np.where(paragraphs[:, 0] > 0, groups, 0).astype(np.uint64)          # 0: too short to count
    again, lengths = repeated(paragraphs, column("paragraphs"), kept, config.min_chars)
    for document in np.flatnonzero(kept & (lengths < config.min_chars)):
        if again[document].any():
            kept[document], why[document] = False, ("repeated_paragraphs", f"characters_left={lengths[document]}", -1)
    return column("place"), kept, why, again


def cleaned_documents(done):
    """The documents of all cleaned files, in order. Their numbers stand for them in what is compared, so none may be
    missing."""
    for target, counts in done:
        yield from read_jsonl_zst(whole_file(target, ".jsonl.zst", counts))


def write_documents(done, decided, config, folder, audit):
    """Drop what is to be dropped, split the rest by page and write docs/; their entries for audit.json."""
    places, kept, why, again = decided
    held_out = places < config.val_fraction
    if config.val_fraction > 0 and kept.sum() > 1 and not (held_out & kept).any():
        # Few pages, and none of them below the bar: without a held-out page nothing could be measured.
        held_out = places == places[kept].min()
    folder.mkdir(exist_ok=True)
    entries, open_files = [], {}
    for number, document in enumerate(cleaned_documents(done)):
        size = size_of(document)
        dropped_by, detail, _ = why.get(number, (None, "", -1))
        if kept[number] and again[number].any():
            paragraphs = zip(document["text"].split(PARAGRAPH_BREAK), again[number], strict=True)
            document["text"] = PARAGRAPH_BREAK.join(paragraph for paragraph, out in paragraphs if not out)
            document["length"] = len(document["text"])
        for name in LATER[not config.perplexity_text:]:
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
            domain = host_of(document["url"]) or "(none)"
            audit["domains"][domain] = audit["domains"].get(domain, 0) + 1
            if open_files[split].documents == DOCS_PER_FILE:
                entries.append(open_files.pop(split).close() | {"split": split})
    entries += [file.close() | {"split": split} for split, file in open_files.items()]
    return sorted(entries, key=lambda entry: entry["file"])


# --- Token shards -----------------------------------------------------------------------------------------------------

def windows_of(text, size, overlap):
    """The text in windows of at most `size` characters, cut behind white space where there is some in the second half
    of one; each begins `overlap` characters or a little less before the end of the last one. size 0: the text."""
    start = 0
    while size and len(text) - start > size:
        cut = re.search(r"\s\S*\Z", text[start + size // 2:start + size])
        end = start + size // 2 + cut.start() + 1 if cut else start + size
        yield text[start:end]
        space = re.search(r"\s", text[end - overlap:end - 1])
        start = end - overlap + (space.end() if space else 0)
    yield text[start:]


def write_tokens(config, tokenizer, key, audit):
    """docs/ -> tokens/: every document as BOS text EOS (text EOS without a BOS), windows of one document between the
    two. index.json comes last and makes the shards valid."""
    folder = Path(config.data_dir) / "tokens"
    if tokenizer.eos_id is None:
        refuse(f"the tokenizer in {folder.parent / 'tokenizer'} has no EOS token, but documents are stored as "
               "BOS text EOS")
    before = np.array([tokenizer.bos_id] if tokenizer.bos_id is not None else [], np.int64)
    (folder / "index.json").unlink(missing_ok=True)
    splits = {}
    told = Progress("tokenising", sum(entry["bytes"] for entry in audit["documents"]))
    windows = lambda document: windows_of(document["text"], config.window_chars, config.window_overlap)
    documents = read = text_bytes = 0
    for split in ("train", "val"):
        writer, split_bytes = ShardWriter(folder, split, tokenizer.vocab_size, config.shard_tokens), 0
        counted, ahead = itertools.tee(read_documents(config.data_dir, split))
        encoded = tokenizer.encode_batch((window for document in ahead for window in windows(document)), config.workers)
        for document in counted:
            sizes = [len(window.encode("utf-8")) for window in windows(document)]
            writer.add(np.concatenate([before, *itertools.islice(encoded, len(sizes)), [tokenizer.eos_id]]))
            documents, read, split_bytes = documents + 1, read + size_of(document), split_bytes + sum(sizes)
            told(documents, documents, read)
        splits[split] = entry = writer.close() | {"text_bytes": split_bytes}
        text_bytes += split_bytes
        print(f"tokens/{split}: {entry['n_tokens']:,} tokens of {entry['n_docs']:,} documents", flush=True)
    told.close()
    if config.window_chars:
        print(f"windows of {config.window_chars} characters: {text_bytes / max(1, read) - 1:.1%} of the text is there "
              "twice")
    write_index(folder, tokenizer, splits, key=key, config_hash=config.hash, source_hash=audit["source_hash"])
    return read_json(folder / "index.json")


def token_files(index):
    """{name: sha256}"""
    return {file["name"]: file["sha256"]
            for entry in index["splits"].values() for file in [*entry["files"], entry["offsets"]]}


# --- The flow ---------------------------------------------------------------------------------------------------------

def check(config):
    """{input file: number of the pattern that matched it}, sorted; refuses patterns that match nothing and settings
    that make no sense, all at once."""
    problems = [f"rules: there is no rule set {name!r}; there are {', '.join(RULES)}" for name in config.rules
                if name not in RULES]
    if config.corpus not in ("", "pydoc"):
        problems.append(f"corpus must be 'pydoc' or empty, found {config.corpus!r}")
    if not config.corpus and not config.inputs:
        problems.append("there is nothing to read: give --inputs=FILES, or --corpus=pydoc for Python's documentation")
    shares = ("language_threshold", "max_replacement", "min_ascii", "minhash_threshold", "val_fraction")
    problems += config.outside(**dict.fromkeys(shares, (0, 1)), minhash_seed=(0,), perplexity_percentile=(0, 100),
                               workers=(0,), window_chars=(0,), window_overlap=(0,))
    problems += config.below_one("minhash_bands", "minhash_rows", "shard_tokens", "max_decompressed")
    if config.minhash_bands * config.minhash_rows > MOST_HASHES:
        problems.append(f"minhash_bands x minhash_rows is {config.minhash_bands * config.minhash_rows:,} hash "
                        f"functions; at most {MOST_HASHES:,} are computed, and 128 is usual")
    if config.min_chars > config.max_chars:
        problems.append(f"min_chars is above max_chars: {config.min_chars:,} and {config.max_chars:,}")
    if config.window_chars and config.window_overlap >= config.window_chars // 2:
        problems.append(f"window_overlap must be below half of window_chars, found {config.window_overlap} of "
                        f"{config.window_chars}")
    problems += [f"{key} must be {' or '.join(map(repr, values))}, found {getattr(config, key)!r}"
                 for key, values in (("val_by", ("page", "domain")), ("dedup_scope", ("all", "input")))
                 if getattr(config, key) not in values]
    problems += filter(None, (side_file_problem(key, name) for key in FILE_KEYS
                              for name in named_files(getattr(config, key))))
    if config.language_model and (config.language_threshold or 0) > 0.95:
        problems.append(f"language_threshold {config.language_threshold} is for py3langid, whose probabilities lie "
                        "near 1. Of real English pages fastText gives 0.6 to 0.96, so above 0.95 nothing would be "
                        "left; FineWeb takes 0.65")
    if config.language_model and not importlib.util.find_spec("fasttext"):
        problems.append("language_model needs fastText: pip install fasttext-predict")
    if config.perplexity_percentile < 100 and not config.perplexity_text:
        problems.append("perplexity_percentile needs a file of clean text to compare with: --perplexity_text=FILE")
    # A folder of inputs may be the data folder, or hold it: the second call must not read results as inputs, nor
    # overwrite inputs by results.
    ours = [Path(config.data_dir).resolve() / name for name in OURS]
    paths = {}
    for number, pattern in enumerate(config.inputs, 1):
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
        paths = dict.fromkeys(files - own, number) | paths
        problems += [f"--inputs: the folder {name} cannot be read" for name in names
                     if Path(name).is_dir() and not os.access(name, os.R_OK | os.X_OK)]
        problems += [f"--inputs: {name} is a link to nothing; mend or remove it" for name in names
                     if os.path.islink(name) and not os.path.exists(os.path.realpath(name))]   # a loop has an end there
    # By one of its names only, if it has several: folders of links, a folder and its path from the root.
    paths = {path: paths[path] for path in {path.resolve(): path for path in sorted(paths, reverse=True)}.values()}
    for path in paths:
        try:
            with open(path, "rb") as file:
                if file.read(4) == PARQUET and not importlib.util.find_spec("pyarrow"):
                    problems.append(f"{path} is a Parquet file; to read it: pip install pyarrow")
        except OSError as error:
            problems.append(f"input {path} cannot be read: {error.strerror}. Mend it or leave it out of --inputs.")
    refuse(*problems)
    return dict(sorted(paths.items()))


def report(audit):
    """Print what was lost in reading, the waterfall, and the files of what is left."""
    for item in audit["inputs"]:
        if not item["whole"]:
            lost = ", ".join(f"{name} {count:,}" for name, count in item["losses"].items() if name not in HARMLESS)
            print(f"{item['file']} was not read whole: {lost}")
        for page in item["quarantined"]:
            print(f"left out, since it twice killed the process that cleaned it: {printable(page)} of {item['file']}")
    read = {name: sum(item["bytes"].get(name, 0) for item in audit["inputs"]) for name in
            ("bytes_read", "bytes_pages", "bytes_heads", "bytes_other")}
    skipped = sum(item["losses"].get("skipped_bytes", 0) for item in audit["inputs"])
    print("{bytes_read:,} bytes unpacked = {bytes_pages:,} of pages + {bytes_heads:,} of headers + {bytes_other:,} of "
          "other records".format(**read) + f" + {skipped:,} lost")
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
    if config.inspect:
        look.inspect(Path(config.inspect))
        return
    paths, root, ranks = check(config), Path(config.data_dir), Ranks()
    if config.explain:
        look.explain(config, paths, settings_of(config))
        return
    paths = ranks.gather(paths)[0]
    held = lock_folder(root) if ranks.rank == 0 else None
    ranks.gather()
    try:
        prepare(config, root, paths, ranks)
    except OSError as error:                     # a full disk, a folder that may not be written to
        for folder in ("input", "work", "docs", "tokens"):
            for half in (root / folder).glob("*.tmp"):
                half.unlink(missing_ok=True)
        refuse(f"cannot go on in {root}: {error}. What was finished is kept; run the same command again.")
    finally:
        if held:
            held.close()


def say_changes(before, settings, inputs):
    """Documents that were made otherwise are about to be replaced: says by what they differ. before: their audit."""
    old, new = before.get("settings", {}), json.loads(json.dumps(settings))
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            print(f"documents: made before with {name} = {old[name]!r}, now {new[name]!r}")
    files = {entry["file"] for entry in before.get("inputs", ())}
    for what, names in (("no longer read", files - {*inputs}), ("new", {*inputs} - files)):
        if files and names:
            print(f"documents: {len(names)} input files {what}, {sorted(names)[0]} first")


def prepare(config, root, paths, ranks):
    # 1. The embedded corpus becomes an input file like any other.
    if config.corpus == "pydoc":
        made = build_corpus(root / "input", config.corpus_modules) if ranks.rank == 0 else None
        archive, corpus, anew = ranks.gather(made)[0]
        paths = {archive: 0} | paths
        failed = sorted(module for module, reason in corpus["skipped"].items() if ": " in reason)
        ranks.say(f"{'made' if anew else 'unchanged:'} {archive}: {corpus['pages']} pages of documentation, "
                  f"{corpus['html_bytes'] / 1e6:.1f} MB of HTML, {sum(corpus['planted'].values())} planted pages",
                  "modules that cannot be imported here: " + (", ".join(failed) or "none"))

    # 2. Clean each input file by itself.
    done = clean_inputs(list(paths), config, root / "work", ranks)

    # 3. Deduplicate over all of them, split by page, write documents and audit.
    groups = [number if config.dedup_scope == "input" else 0 for number in paths.values()]
    source_hash = digest([target.name for target, _ in done])
    key = digest(source_hash, config.minhash_threshold, config.val_fraction, config.perplexity_percentile, groups)
    audit_file, index_file = root / "audit.json", root / "tokens" / "index.json"
    audit = read_json(audit_file, {}) if ranks.rank == 0 else {}
    audit = audit if fits(audit, FORM) else {}             # one of another form vouches for nothing
    files = {entry["file"]: entry["sha256"] for entry in audit.get("documents", ())}
    known = ranks.gather(audit.get("key") == key and intact(root, files))[0]
    if known:
        ranks.say("documents: done before and unchanged")
    else:
        if config.minhash_threshold > 0:
            curve = [f"{share}: {candidate_probability(share, config.minhash_bands, config.minhash_rows):.3f}"
                     for share in (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)]
            ranks.say(f"{config.minhash_bands} bands of {config.minhash_rows}: pairs of this resemblance are compared "
                      f"with probability  {'  '.join(curve)}; duplicates from {config.minhash_threshold} on")
        decided = deduplicate(done, groups, config, ranks, root / "work")
    if ranks.rank:
        return                                       # the rest is in one piece
    if not known:
        for path in (audit_file, index_file):        # nothing vouches for what is there from now on
            path.unlink(missing_ok=True)
        settings = settings_of(config)
        say_changes(audit, settings, [shown_name(path) for path in paths])
        names = [name for name, _ in steps_of(settings)]
        counts = empty_audit([*names, *LATER[not config.perplexity_text:]], settings)
        for _, part in done:
            add(counts, part["audit"])
        documents = write_documents(done, decided, config, root / "docs", counts)
        audit = {"key": key, "source_hash": source_hash, "settings": settings,
                 "inputs": [{"file": shown_name(path), "part": target.name, **{name: part[name] for name in (
                     "documents", "whole", "losses", "bytes", "quarantined")}}
                     for path, (target, part) in zip(paths, done)],
                 **finished(counts), "documents": documents}
        if config.perplexity_text:
            audit["perplexity_model"] = next((part["perplexity_model"] for _, part in done), None)
        report(audit)
        look.remember(root / "work", decided)
        write_atomic(root / "audit.html", page_of(audit))
        write_json(audit_file, audit)
        for path in (root / "work").glob("band_*"):
            path.unlink()
    elif not (root / "audit.html").exists():
        write_atomic(root / "audit.html", page_of(audit))
    if not audit["documents"]:
        refuse_empty(audit)
    remove_others(root / "docs", "*_[0-9][0-9][0-9][0-9][0-9].jsonl.zst*",
                  [Path(entry["file"]).name for entry in audit["documents"]])

    # 4. Token shards, once there is a tokenizer.
    print(f"what was dropped and why: {root / 'audit.html'}")
    if not find_tokenizer(root / "tokenizer"):
        print(f"next: {config.command('train_tokenizer.py')}\nthen: {config.command('prepare_data.py')}")
        return
    tokenizer = Tokenizer.load(root / "tokenizer")
    tokens_key = digest(key, [entry["sha256"] for entry in audit["documents"]], tokenizer.hash, config.hash)
    index = read_json(index_file, {})
    sound = fits(index, INDEX) and fits([*index["splits"].values()], [SPLIT])
    if sound and index.get("key") == tokens_key and intact(root / "tokens", token_files(index)):
        print("tokens: done before and unchanged")
    else:
        index = write_tokens(config, tokenizer, tokens_key, audit)
        told = read_json(root / "tokenizer" / "report.json", {})
        read = told["made_from"]["files"] if fits(told, {"made_from": {"files": [list]}}) else ()
        read = [checksum for name, checksum in read if name.startswith("train_")]           # and not files of the user's
        if read and read != [entry["sha256"] for entry in audit["documents"] if entry["split"] == "train"]:
            print("note: this tokenizer was learned from other documents. To learn it from these, and then encode "
                  f"anew:\n  {config.command('train_tokenizer.py')} && {config.command('prepare_data.py')}")
    remove_others(root / "tokens", "*.bin*", token_files(index))


if __name__ == "__main__":
    main(configure(globals()))
