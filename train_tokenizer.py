"""
Stage 2: learn a vocabulary. Byte-level byte-pair encoding (BPE), written by hand.

    python train_tokenizer.py config/demo.py                       after prepare_data.py config/demo.py
    python train_tokenizer.py config/demo.py --compare=gpt2_vocab.bpe,cl100k_base.tiktoken

BPE starts from the 256 bytes and, again and again, makes a new token of the pair of neighbouring tokens that occurs
most often, until the vocabulary is full:

    low low lower     l o w   l o w   l o w e r       most frequent pair: l o  -> new token "lo"
                      lo w    lo w    lo w e r        most frequent pair: lo w -> new token "low"
                      low     low     low e r

Two facts make that fast. Pairs never cross the borders of the pieces that the pattern cuts (about: words), so each
distinct piece is needed only once, with its count: 10 MB of text are a few ten thousand pieces. And a merge changes
only the pieces that hold its pair, so counts are kept up to date instead of being taken again. (The tests hold `train`,
merge for merge, against the algorithm that counts all pairs for each merge.) Of pairs that occur equally often the one
with the smallest (left id, right id) wins, so the result depends on nothing but the text, not on the order of documents
nor on the number of workers.

Only the training split is read. Results, in data_dir/tokenizer:

    tokenizer.json, tokenizer_config.json    Hugging Face's form; transformers loads the folder
    tokenizer.tiktoken                       the ranks in tiktoken's form
    report.json                              bytes per token on held-out text; what the tokenizer was made from
    config.json                              the settings and circumstances of the run that made it

A second call finds that it is done, or does it again when the documents or the keys have changed.
"""

import heapq
import itertools
import os
import re
from collections import Counter, defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import regex
from tqdm import tqdm

from configurator import configure, refuse
from engine.files import intact, lock_folder, read_json, sha256_file, write_json
from engine.shards import read_documents
from engine.tokenizer import BYTE_ORDER, PATTERNS, SPECIAL_TOKENS, Tokenizer, valid_unicode

data_dir = "data/demo"
vocab_size = 4096           # of the whole vocabulary: 256 bytes, merges, and the 7 special tokens
min_frequency = 2           # a pair that occurs less often never becomes a token
compare: tuple[str] = ()    # rank files to report beside ours: gpt2's vocab.bpe, cl100k_base.tiktoken
workers = 0                 # processes that count pieces; 0: one for each core


# ---------------------------------------------------------------------------------------------------------------------
# Counting pieces

BATCH = 100                 # documents that a worker is given at a time: sending them costs little, and little memory


def count_pieces(documents, pattern):
    """How often each piece occurs. -> Counter of str. Pieces never cross the border of a document."""
    cut = regex.compile(pattern).findall
    # Python's own `re` is more than twice as fast, and on ASCII it can say the same: there \p{L} is [A-Za-z].
    # (re.ASCII keeps its \s from matching \x1c to \x1f, which no other engine counts as space.)
    ascii_pattern = pattern.replace(r"\p{L}\p{N}", "A-Za-z0-9").replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    cut_ascii = re.compile(ascii_pattern, re.ASCII).findall
    counts = Counter()
    for document in documents:
        counts.update(cut_ascii(document) if document.isascii() else cut(valid_unicode(document)))
    return counts


def count_in_parallel(documents, pattern, workers):
    """count_pieces() by several processes; sums do not care who counted what."""
    if workers == 1:
        return count_pieces(documents, pattern)
    documents, counts, running = iter(documents), Counter(), deque()
    try:
        with ProcessPoolExecutor(workers) as pool:
            while batch := list(itertools.islice(documents, BATCH)):
                running.append(pool.submit(count_pieces, batch, pattern))
                if len(running) > 2 * workers:                  # so that no more than this waits in memory
                    counts.update(running.popleft().result())
            for future in running:
                counts.update(future.result())
    except BrokenProcessPool:
        refuse("one of the counting processes was killed, perhaps for want of memory. Try again, with --workers=1.")
    return counts


# ---------------------------------------------------------------------------------------------------------------------
# Merging

BYTE_ID = {byte: id for id, byte in enumerate(BYTE_ORDER)}


def join(ids, pair, new_id):
    """Puts new_id in the place of each occurrence of the pair, in place, from the left."""
    joined = []
    for id in ids:
        if joined and (joined[-1], id) == pair:
            joined[-1] = new_id
        else:
            joined.append(id)
    ids[:] = joined


def train(words, n_merges, min_frequency=1, progress=lambda: None):
    """
    words: dict bytes -> count. -> list of (left id, right id); the i-th merge makes id 256 + i.

    A heap holds the pairs by count. When a pair loses occurrences its entry is not touched: counts only ever fall (a
    pair is born, with all its occurrences, in the merge that makes the later of its symbols), so an entry is never too
    low, and one that turns out too high when it comes up is put back with what is true. For the same reason `places`
    only has to name the pieces in which a pair was born.
    """
    pieces = [[BYTE_ID[byte] for byte in word] for word in words]
    weights = list(words.values())
    counts, places = Counter(), defaultdict(list)

    def tally(place, sign):
        for pair in zip(pieces[place], pieces[place][1:]):
            counts[pair] += sign * weights[place]

    for place, ids in enumerate(pieces):
        tally(place, 1)
        for pair in set(zip(ids, ids[1:])):
            places[pair].append(place)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges = []
    while heap and len(merges) < n_merges:
        expected, best = heapq.heappop(heap)
        if counts[best] != -expected:
            heapq.heappush(heap, (-counts[best], best))
            continue
        if counts[best] < min_frequency:
            break
        new_id = 256 + len(merges)
        merges.append(best)
        born = set()
        for place in places.pop(best):
            ids = pieces[place]
            tally(place, -1)
            join(ids, best, new_id)
            tally(place, 1)
            for pair in {pair for pair in zip(ids, ids[1:]) if new_id in pair}:
                places[pair].append(place)
                born.add(pair)
        for pair in born:
            heapq.heappush(heap, (-counts[pair], pair))
        progress()
    return merges


# ---------------------------------------------------------------------------------------------------------------------
# Input and output

def check(config):
    """Refuses keys that make no sense, all at once."""
    smallest = 256 + len(SPECIAL_TOKENS) + 1      # bytes, and one piece to learn
    refuse(*(f"{file} does not exist" for file in config.compare if not Path(file).is_file()),
           *config.outside(vocab_size=(smallest,), min_frequency=(1,), workers=(0,)))


def measure(config, tokenizer, others):
    """Bytes per token of ours and of those to compare with, on the same held-out text. -> list of rows, ours first"""
    texts = [valid_unicode(document["text"]) for document in read_documents(config.data_dir, "val")]
    size = sum(len(text.encode()) for text in texts)
    rows = []
    for name, other in [("ours", tokenizer), *others]:
        encoded = [other.encode(text) for text in texts]
        tokens = sum(map(len, encoded))
        rows.append({"name": name, "vocab_size": other.vocab_size, "documents": len(texts), "bytes": size,
                     "tokens": tokens, "bytes_per_token": round(size / max(tokens, 1), 4),
                     "lossless": [other.decode(ids) for ids in encoded] == texts})
    return rows


def print_report(report):
    first = report["held_out"][0]
    print(f"held-out text: {first['documents']} documents, {first['bytes']:,} bytes")
    print(f"  {'tokenizer':<24} {'vocabulary':>10} {'tokens':>10} {'bytes/token':>12}  lossless")
    for row in report["held_out"]:
        print(f"  {row['name']:<24} {row['vocab_size']:>10,} {row['tokens']:>10,} {row['bytes_per_token']:>12.3f}  "
              f"{'yes' if row['lossless'] else 'NO'}")


def main(config):
    check(config)
    folder = Path(config.data_dir) / "tokenizer"
    lock = lock_folder(folder)

    # 1. Nothing to do when the tokenizer that stands there was made from the same and is whole.
    files = [*sorted(Path(config.data_dir, "docs").glob("*.jsonl.zst")), *map(Path, config.compare)]
    made_from = {"vocab_size": config.vocab_size, "min_frequency": config.min_frequency,
                 "files": [[file.name, sha256_file(file)] for file in files]}
    report = read_json(folder / "report.json", {})
    if report.get("made_from") == made_from and intact(folder, report["files"]):
        print(f"{folder}: already done ({report['vocab_size']} tokens, hash {report['hash'][:16]})")
        return print_report(report)
    others = [(Path(file).name, Tokenizer.load(file)) for file in config.compare]   # before the work
    config.save(folder)

    # 2. The pieces of the training text, each with its count.
    texts = (document["text"] for document in read_documents(config.data_dir, "train"))
    texts = tqdm(texts, unit=" docs", desc="counting", disable=None)     # only on a terminal
    counts = count_in_parallel(texts, PATTERNS["gpt4"], config.workers or os.cpu_count())
    words = {piece.encode(): count for piece, count in counts.items()}
    if not words:
        refuse(f"{config.data_dir}/docs: there is no text in it, so there is nothing to learn from.")
    print(f"counted {sum(words.values()):,} pieces, {len(words):,} different ones")

    # 3. Merges, until the vocabulary is full or no pair is left that occurs often enough.
    wanted = config.vocab_size - 256 - len(SPECIAL_TOKENS)
    with tqdm(total=wanted, unit=" merges", desc="merging", disable=None) as bar:
        merges = train(words, wanted, config.min_frequency, bar.update)
    if len(merges) < wanted:
        print(f"vocab_size = {config.vocab_size} was asked for, but no pair is left that occurs min_frequency = "
              f"{config.min_frequency} times:\n  the vocabulary has {256 + len(merges) + len(SPECIAL_TOKENS)} tokens. "
              "More text, or a smaller min_frequency, gives more.")

    # 4. The tokenizer: bytes, then what the merges made, then the special tokens.
    ranks = [bytes([byte]) for byte in BYTE_ORDER]
    for left, right in merges:
        ranks.append(ranks[left] + ranks[right])
    specials = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(ranks, PATTERNS["gpt4"], specials, merges)
    tokenizer.save(folder)
    tokenizer.save_ranks(folder / "tokenizer.tiktoken")

    # 5. How well it does on text it has not seen. The report is written last and has the others' checksums: with it in
    # place and true, the folder is whole; after a kill anywhere before, it is not, and all is made again.
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.tiktoken")
    report = {
        "vocab_size": tokenizer.vocab_size, "vocab_size_asked": config.vocab_size, "hash": tokenizer.hash,
        "config_hash": config.hash, "made_from": made_from, "held_out": measure(config, tokenizer, others),
        "files": {name: sha256_file(folder / name) for name in names},
    }
    write_json(folder / "report.json", report)
    print(f"{folder}: {tokenizer.vocab_size:,} tokens, hash {tokenizer.hash[:16]}")
    print_report(report)
    lock.close()


if __name__ == "__main__":
    main(configure(globals()))
