"""
Stage 2: learn a vocabulary. Byte-level byte-pair encoding (BPE), written by hand.

    python train_tokenizer.py config/demo.py                       after prepare_data.py config/demo.py
    python train_tokenizer.py config/demo.py --watch=20            the first 20 merges, as they happen
    python train_tokenizer.py config/demo.py --show="Is 7 prime?"  which tokens a text becomes, in colours
    python train_tokenizer.py config/demo.py --compare=gpt2_vocab.bpe,cl100k_base.tiktoken
    python train_tokenizer.py --inputs=a.txt,b.jsonl.zst --held_out=c.txt --vocab_size=32000 --data_dir=data/mine

BPE starts from the 256 bytes and, again and again, makes a new token of the pair of neighbouring tokens that occurs
most often, until the vocabulary is full:

    low low lower     l o w   l o w   l o w e r       most frequent pair: l o  -> new token "lo"
                      lo w    lo w    lo w e r        most frequent pair: lo w -> new token "low"
                      low     low     low e r

`train_slowly` below is that and nothing else. Two facts make it fast. Pairs never cross the borders of the pieces that
the pattern cuts (about: words), so each distinct piece is needed only once, with its count: 10 MB of text are a few ten
thousand pieces. And a merge changes only the pieces that hold its pair; bpe/merging.py looks at no others. Of pairs
that occur equally often the one with the smallest (left id, right id) wins, so the result depends on nothing but the
text, not on the order of documents nor on the number of workers.

Only the training split is read (or `inputs`). Results, in data_dir/tokenizer:

    tokenizer.json, tokenizer_config.json    Hugging Face's form; transformers loads the folder
    tokenizer.tiktoken                       the ranks in tiktoken's form
    counts.zst                               how often each piece occurs: another vocabulary size takes seconds
    report.json, report.md                   how it does on held-out text; what it was made from
    config.json                              the settings and circumstances of the run that made it

A second call finds that it is done, or does it again when the documents or the keys have changed.
"""

import itertools
import json
import os
import re
import resource
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import regex
import zstandard
from tqdm import tqdm

from bpe import report as reports
from bpe.merging import merges_of
from configurator import configure, refuse
from engine.files import fits, intact, lock_folder, read_json, sha256_file, write_atomic, write_json
from engine.shards import document_files, read_jsonl_zst
from engine.tokenizer import BYTE_ORDER, PATTERNS, SPECIAL_TOKENS, Tokenizer, valid_unicode, wrong_pattern
from engine.workers import in_parallel, text_batches
from prepare.stream import GZIP, ZSTD

data_dir = "data/demo"
inputs: tuple[str] = ()     # to learn from: .jsonl.zst files with a "text" a line, or text; none: data_dir's documents
held_out: tuple[str] = ()   # such files for the report; none: data_dir's held-out documents, without inputs
vocab_size = 4096           # of the whole vocabulary: 256 bytes, merges, special and reserved tokens
min_frequency = 2           # a pair that occurs less often never becomes a token
pattern = "gpt4"            # how text is cut: gpt4 (as Llama 3), gpt2, qwen, o200k, smollm, or a regular expression
digits: int | None = None   # as many digits at most are one piece, 1 to 3; None: as the pattern has it
boundary = "space"          # words: space (joined to its word), marker (and one before each text, as "▁"), none (apart)
byte_order = "gpt2"         # ids of the 256 bytes: gpt2 (as OpenAI's and Hugging Face's files) or identity
special_tokens: tuple[str] = ()     # further ones behind the 7 that the stages use
reserved_tokens = 0         # ids kept free for special tokens of later: <|reserved_0|>, ...
multiple_of = 1             # models have a multiple of this many rows; those that only pad are in no vocabulary
compare: tuple[str] = ()    # to report beside ours: gpt2_vocab.bpe, cl100k_base.tiktoken, model folders, folders of such
languages: tuple[str] = ()  # files to report on, each for itself: de=german.txt,ja=japanese.txt
watch = 0                   # so many merges are printed as they happen
show = ""                   # nothing is trained; this text's tokens are shown
workers = 0                 # processes that count pieces; 0: one for each core


# ---------------------------------------------------------------------------------------------------------------------
# How text is cut

def pattern_of(name, digits=None, boundary="space"):
    """The pattern of this name, with at most so many digits in a piece, and spaces apart from words where asked for."""
    pattern = PATTERNS.get(name, name)
    if digits:      # \p{N} and its count, where it is an alternative of its own and no member of a class
        count = f"{{1,{digits}}}" if digits > 1 else ""
        pattern = re.sub(r"\\p\{N\}(\{1,3\}|\+)?(?=\|)", lambda found: r"\p{N}" + count, pattern)
    if boundary == "none":
        for joined in (r"[^\r\n\p{L}\p{N}]?", " ?", r"\s+(?!\S)|", r"\s+(?![^\s\p{N}])|"):
            pattern = pattern.replace(joined, "")
    return pattern


# Of these we know what they mean on ASCII, where Python's `re` can say the same, and that they cut between a line's end
# and a letter. (re.ASCII keeps its \s from matching \x1c to \x1f, which no other engine counts as space.)
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.tiktoken", "report.md")      # beside the report
KNOWN = {pattern_of(*how) for how in itertools.product(PATTERNS, (None, 1, 2, 3), ("space", "none"))}
ON_ASCII = {r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}": "A-Z", r"\p{Ll}\p{Lm}\p{Lo}\p{M}": "a-z", r"\p{L}\p{N}": "A-Za-z0-9",
            r"\s\p{N}": r"\s0-9", r"\p{L}": "[A-Za-z]", r"\p{N}": "[0-9]"}
LINE_BEGINS = re.compile(r"\n(?=[A-Za-z])")


def line_begins(text):
    """Where a line begins with a letter, behind one that does not end in spaces: a known pattern cuts there, and on
    each side in the same way whether or not the other one is there."""
    return [at for found in LINE_BEGINS.finditer(text) if not text[(at := found.end()) - 2:at - 1].isspace()]


# ---------------------------------------------------------------------------------------------------------------------
# Counting pieces

def count_pieces(documents, pattern, prefix=""):
    """How often each piece occurs. -> Counter of str. Pieces never cross the border of a document."""
    cut, counts = regex.compile(pattern).findall, Counter()
    if pattern in KNOWN:        # `re` is more than twice as fast: whatever is ASCII goes there
        cut_ascii = re.compile(re_pattern(pattern), re.ASCII).findall
    for document in documents:
        text = prefix + valid_unicode(document) if document else ""
        if pattern not in KNOWN:
            counts.update(cut(text))
        elif text.isascii():
            counts.update(cut_ascii(text))
        else:
            places, parts = [0, *line_begins(text), len(text)], {True: [], False: []}
            for start, end in zip(places, places[1:]):
                parts[(part := text[start:end]).isascii()].append(part)
            counts.update(cut_ascii("".join(parts[True])))
            counts.update(cut("".join(parts[False])))
    return counts


def re_pattern(pattern):
    for ours, on_ascii in ON_ASCII.items():
        pattern = pattern.replace(ours, on_ascii)
    return pattern


def count_batch(documents, pattern, prefix):
    """-> (count_pieces(), characters that were cut)"""
    return (count_pieces(documents, pattern, prefix),
            sum(len(prefix + valid_unicode(document)) for document in documents if document))


def count_in_parallel(documents, pattern, workers, prefix=""):
    """count_pieces() by several processes; sums do not care who counted what. Refuses a pattern that loses text."""
    counts, characters = Counter(), 0
    batches = text_batches(documents)
    for found, size in in_parallel(partial(count_batch, pattern=pattern, prefix=prefix), batches, workers):
        counts.update(found)
        characters += size
    lost = characters - sum(len(piece) * count for piece, count in counts.items())
    if lost:
        refuse(f"the pattern {pattern!r} passes over {lost:,} of {characters:,} characters "
               f"({100 * lost / characters:.3g} %), which no token would ever stand for.")
    return counts


def save_counts(file, words, counts, made_from):
    head = json.dumps({"made_from": made_from, "words": len(words)}).encode() + b"\n"
    parts = head, np.array(list(map(len, words)), "<u4").tobytes(), np.array(counts, "<i8").tobytes(), *words
    write_atomic(file, zstandard.compress(b"".join(parts)))


def load_counts(file, made_from):
    """(words, counts) that were saved for the same text and pattern; None when there are none."""
    try:
        head, _, rest = zstandard.ZstdDecompressor().decompress(Path(file).read_bytes()).partition(b"\n")
        if (head := json.loads(head))["made_from"] != made_from:
            return None
    except (OSError, ValueError, LookupError, zstandard.ZstdError):
        return None
    n = head["words"]
    ends = np.cumsum(np.frombuffer(rest, "<u4", n)).tolist()
    text = rest[12 * n:]
    return [text[start:end] for start, end in zip([0, *ends], ends)], np.frombuffer(rest, "<i8", n, 4 * n).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Merging

def train_slowly(words, n_merges, min_frequency=1, byte_order=BYTE_ORDER):
    """The algorithm, to read and to test bpe/merging.py against: count all pairs, merge the best one everywhere, again.
    words: dict bytes -> count. -> list of (left id, right id); the i-th merge makes id 256 + i."""
    id_of = {byte: id for id, byte in enumerate(byte_order)}
    pieces = [([id_of[byte] for byte in word], count) for word, count in words.items()]
    merges = []
    while len(merges) < n_merges:
        counts = Counter()
        for ids, count in pieces:
            for pair in zip(ids, ids[1:]):
                counts[pair] += count
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if counts[best] < min_frequency:
            break
        for ids, _ in pieces:
            ids[:] = join(ids, best, 256 + len(merges))
        merges.append(best)
    return merges


def join(ids, pair, new_id):
    """The ids with new_id in the place of each occurrence of the pair, from the left."""
    joined = []
    for id in ids:
        if joined and (joined[-1], id) == pair:
            joined[-1] = new_id
        else:
            joined.append(id)
    return joined


def train(words, n_merges, min_frequency=1, byte_order=BYTE_ORDER):
    """What train_slowly gives, fast."""
    merges = merges_of(list(words), list(words.values()), n_merges, min_frequency, byte_order)
    return [(left, right) for left, right, _ in merges]


# ---------------------------------------------------------------------------------------------------------------------
# Input and output

def check(config, specials):
    """Refuses keys that make no sense, all at once."""
    files = [*config.inputs, *config.held_out, *(language.partition("=")[2] for language in config.languages)]
    names = [language.partition("=")[0] for language in config.languages]
    pattern = pattern_of(config.pattern, config.digits, config.boundary)
    wrong = wrong_pattern(pattern)
    if not wrong and regex.compile(pattern).groups:
        wrong = ["the pattern has groups ( ), which would be taken for the pieces: write (?: )"]
    smallest = 256 + len(specials) + 1            # bytes, and one piece to learn
    choices = {"boundary": ("space", "marker", "none"), "byte_order": ("gpt2", "identity")}
    refuse(*(f"{file} does not exist" for file in config.compare if not Path(file).exists()),
           *(f"{file or '(no name)'} is not a file; each is named by itself, with commas between them"
             for file in files if not Path(file).is_file()),
           *(f"{file} is compressed: .jsonl.zst files or text are read; prepare_data.py makes them from archives"
             for file in files if Path(file).is_file() and not file.endswith(".jsonl.zst") and is_compressed(file)),
           *wrong,
           *(f"{key} must be one of {', '.join(known)}, found {getattr(config, key)!r}"
             for key, known in choices.items() if getattr(config, key) not in known),
           *(f"special_tokens: {name!r} stands there twice, or is one of the usual"
             for name, times in Counter(specials).items() if times > 1),
           *(f"special_tokens: {name!r} is no text" for name in specials if not name or valid_unicode(name) != name),
           *(f"special_tokens: {name!r} is one byte, and all bytes are tokens already" for name in specials
             if len(name) == 1 and name.isascii()),
           *(f"languages: the name {name!r} stands there twice, is empty or that of a kind of lines"
             for name, times in Counter(["", *reports.KINDS, *names]).items() if times > 1),
           *config.outside(vocab_size=(smallest, 1 << 20), min_frequency=(1,), workers=(0,), digits=(1, 3), watch=(0,),
                           reserved_tokens=(0,), multiple_of=(1,)))


def is_compressed(file):
    """Whether a file begins as gzip or zstandard files do."""
    with open(file, "rb") as opened:
        return opened.read(4).startswith((GZIP, ZSTD))


def read_texts(files):
    """The texts of .jsonl.zst files, one a line; plain text in parts of about a megabyte, so that its size does not
    matter. (A part is a document for itself: no piece crosses its border.)"""
    for file in files:
        if str(file).endswith(".jsonl.zst"):
            for line, document in enumerate(read_jsonl_zst(file), 1):
                if not isinstance(document, dict) or not isinstance(document.get("text"), str):
                    refuse(f'{file}, line {line}: expected an object with a "text", found {str(document)[:60]!r}')
                yield document["text"]
            continue
        with open(file, encoding="utf-8", errors="replace", newline="") as text:
            part = ""
            while more := text.read(1 << 20):
                part += more
                end = max(line_begins(part), default=len(part) if len(part) > 1 << 24 else 0)
                if end:
                    yield part[:end]
                    part = part[end:]
            yield part


def peak_memory():
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def main(config):
    specials = (*SPECIAL_TOKENS, *config.special_tokens, *(f"<|reserved_{i}|>" for i in range(config.reserved_tokens)))
    check(config, specials)
    folder = Path(config.data_dir) / "tokenizer"
    if config.show:
        return print(reports.coloured(Tokenizer.load(folder), config.show))
    lock = lock_folder(folder)

    # 1. Nothing to do when the tokenizer that stands there was made from the same and is whole.
    pattern = pattern_of(config.pattern, config.digits, config.boundary)
    prefix = " " if config.boundary == "marker" else ""
    others = reports.vocabularies(config.compare)
    splits = {split: given or ([] if config.inputs else document_files(config.data_dir, split))
              for split, given in (("train", config.inputs), ("val", config.held_out))}
    spoken = [language.partition("=")[::2] for language in config.languages]
    hashes = lambda files: [[Path(file).name, sha256_file(file)] for file in files]
    counted_from = {"pattern": pattern, "prefix": prefix, "files": hashes(splits["train"])}
    made_from = {**counted_from, "vocab_size": config.vocab_size, "min_frequency": config.min_frequency,
                 "byte_order": config.byte_order, "specials": specials, "multiple_of": config.multiple_of,
                 "report": [*hashes([*splits["val"], *others, *(file for _, file in spoken)]), *others.values(),
                            *(name for name, _ in spoken)]}
    made_from = json.loads(json.dumps(made_from))       # tuples as lists
    report = read_json(folder / "report.json", {})
    sound = fits(report, reports.FORM) and report["held_out"] and report["files"].keys() == set(FILES)
    if not config.watch and sound and report["made_from"] == made_from and intact(folder, report["files"]):
        print(f"{folder}: already done ({report['vocab_size']} tokens, hash {report['hash'][:16]})")
        return print(reports.summary(report))
    others = {name: Tokenizer.load(file) for file, name in others.items()}             # before the work
    config.save(folder)

    # 2. The pieces of the training text, each with its count; kept, since only they decide all that follows.
    found = load_counts(folder / "counts.zst", counted_from)
    if found:
        words, counts = found
    else:
        texts = tqdm(read_texts(splits["train"]), unit=" docs", desc="counting", disable=None)     # only on a terminal
        found = count_in_parallel(texts, pattern, config.workers or os.cpu_count(), prefix)
        words, counts = [piece.encode() for piece in found], list(found.values())
        if not words:
            refuse(f"{', '.join(config.inputs) or f'{config.data_dir}/docs'}: there is no text in it, so there is "
                   "nothing to learn from.")
        save_counts(folder / "counts.zst", words, counts, counted_from)
    del found
    print(f"counted {sum(counts):,} pieces, {len(words):,} different ones of {sum(map(len, words)):,} bytes; "
          f"most memory so far {peak_memory():,.0f} MB")

    # 3. Merges, until the vocabulary is full or no pair is left that occurs often enough. The tokens: bytes, then what
    # the merges make.
    wanted = config.vocab_size - 256 - len(specials)
    order = BYTE_ORDER if config.byte_order == "gpt2" else list(range(256))
    ranks, merges, taken = [bytes([byte]) for byte in order], [], {name.encode() for name in specials}
    for left, right, count in tqdm(merges_of(words, counts, wanted, config.min_frequency, order), unit=" merges",
                                   desc="merging", total=wanted, disable=None):
        if len(merges) < config.watch:
            made = [reports.shown(token) for token in (ranks[left], ranks[right], ranks[left] + ranks[right])]
            tqdm.write(f"{256 + len(merges):>7}   {made[0]} + {made[1]} -> {made[2]}   {count:,} times")
        merges.append((left, right))
        ranks.append(ranks[left] + ranks[right])
        if ranks[-1] in taken:
            refuse(f"special_tokens: {ranks[-1].decode()!r} is what the text gives as token {len(ranks) - 1}: of two "
                   "ids for one text readers take either. Choose a name that no text has, <|name|> say")
    if len(merges) < wanted:
        print(f"vocab_size = {config.vocab_size} was asked for, but no pair is left that occurs min_frequency = "
              f"{config.min_frequency} times:\n  the vocabulary has {len(ranks) + len(specials)} tokens. "
              "More text, or a smaller min_frequency, gives more.")

    # 4. The tokenizer: these, and the special tokens behind them.
    tokenizer = Tokenizer(ranks, pattern, {name: len(ranks) + i for i, name in enumerate(specials)}, merges,
                          marker=bool(prefix))
    tokenizer.save(folder)
    tokenizer.save_ranks(folder / "tokenizer.tiktoken")

    # 5. How well it does on text it has not seen. The report is written last and has the others' checksums: with it in
    # place and true, the folder is whole; after a kill anywhere before, it is not, and all is made again.
    report = {
        "vocab_size": tokenizer.vocab_size, "vocab_size_asked": config.vocab_size,
        "rows": -(-tokenizer.vocab_size // config.multiple_of) * config.multiple_of, "hash": tokenizer.hash,
        "config_hash": config.hash, "made_from": made_from, "words": len(words),
        **reports.measure({"ours": tokenizer, **others}, read_texts(splits["val"]),
                          {name: read_texts([file]) for name, file in spoken}, words),
    }
    write_atomic(folder / "report.md", reports.page(report))
    write_json(folder / "report.json", {**report, "files": {name: sha256_file(folder / name) for name in FILES}})
    print(f"{folder}: {tokenizer.vocab_size:,} tokens, hash {tokenizer.hash[:16]}; most memory {peak_memory():,.0f} MB")
    if report["rows"] > tokenizer.vocab_size:
        print(f"{report['rows'] - tokenizer.vocab_size} rows of a model would only pad: train.py "
              f"--vocab_size={report['rows']}")
    print(reports.summary(report))
    lock.close()


if __name__ == "__main__":
    main(configure(globals()))
