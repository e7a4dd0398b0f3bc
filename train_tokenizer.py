"""
Stage 2: learn a vocabulary. Byte-level byte-pair encoding (BPE), written by hand.

    python train_tokenizer.py config/demo.py                       after prepare_data.py config/demo.py
    python train_tokenizer.py --text=a.txt,b.txt --data_dir=out/x  plain text files, each one document
    python train_tokenizer.py config/demo.py --show="def f(x):"    how a text is cut, in colours

BPE starts from the 256 bytes and, again and again, makes a new token of the pair of neighbouring tokens that occurs
most often, until the vocabulary is full:

    low low lower     l o w   l o w   l o w e r       most frequent pair: l o  -> new token "lo"
                      lo w    lo w    lo w e r        most frequent pair: lo w -> new token "low"
                      low     low     low e r

Two facts make that fast. Pairs never cross the borders of the pieces that the pattern cuts (about: words), so each
distinct piece is needed only once, with its count: 10 MB of text are a few ten thousand pieces. And a merge changes
only the places where its pair stands, so counts are kept up to date instead of being taken again. `train_slowly` is
the algorithm without the second fact; `train` is the same, merge for merge, thousands of times faster, and the tests
hold them against each other. Of pairs that occur equally often the one with the smallest (left id, right id) wins, so
the result depends on nothing but the text: not on the order of documents, nor on the number of workers.

Only the training split is read. Results, in data_dir/tokenizer:

    tokenizer.json, tokenizer_config.json    Hugging Face's form; transformers loads the folder
    tokenizer.tiktoken                       the ranks in tiktoken's form
    report.json                              bytes per token on held-out text; what the tokenizer was made from
    config.json                              the settings and circumstances of the run that made it

A second call finds that it is done, or does it again when the documents or the keys have changed.
"""

import hashlib
import heapq
import os
import re
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import regex
from tqdm import tqdm

from configurator import configure, refuse
from engine.files import lock_folder, printable, read_json, sha256_file, write_json
from engine.shards import read_documents
from engine.tokenizer import BYTE_ORDER, PATTERNS, SPECIAL_TOKENS, Tokenizer, valid_unicode

data_dir = "data/demo"
vocab_size = 4096           # of the whole vocabulary: 256 bytes, merges, and the 7 special tokens
pattern = "gpt4"            # how text is cut: gpt4, gpt4_digits2, gpt4_digits1 (shorter groups of digits) or gpt2
min_frequency = 2           # a pair that occurs less often never becomes a token
text: tuple[str] = ()       # plain text files to train on, instead of data_dir/docs
held_out: tuple[str] = ()   # plain text files to report on, instead of the documents held out
compare: tuple[str] = ()    # rank files to report beside ours: gpt2's vocab.bpe, cl100k_base.tiktoken
workers = 0                 # processes that count pieces; 0: one for each core
show = ""                   # a text to print in the colours of its tokens; nothing is trained if there is a tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Counting pieces

BATCH_CHARS = 2_000_000     # what a worker is given at a time: enough that sending it costs little, small in memory


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
    """count_pieces() by several processes; sums do not care who counted what. -> (Counter, documents, characters)"""
    counts, seen = Counter(), {"documents": 0, "characters": 0}
    bar = tqdm(unit=" docs", desc="counting", disable=not sys.stdout.isatty())

    def batches():
        batch, size = [], 0
        for document in documents:
            batch.append(document)
            size += len(document)
            seen["documents"] += 1
            seen["characters"] += len(document)
            bar.update()
            if size >= BATCH_CHARS:
                yield batch
                batch, size = [], 0
        yield batch

    if workers == 1:
        for batch in batches():
            counts.update(count_pieces(batch, pattern))
    else:
        try:
            with ProcessPoolExecutor(workers) as pool:
                running = set()
                for batch in batches():
                    running.add(pool.submit(count_pieces, batch, pattern))
                    if len(running) > 2 * workers:                  # so that no more than this waits in memory
                        done, running = wait(running, return_when=FIRST_COMPLETED)
                        for future in done:
                            counts.update(future.result())
                for future in running:
                    counts.update(future.result())
        except BrokenProcessPool:
            refuse("one of the counting processes was killed, perhaps for want of memory. Try again, with --workers=1.")
    bar.close()
    return counts, seen["documents"], seen["characters"]


# ---------------------------------------------------------------------------------------------------------------------
# Merging. Both trainers: dict bytes -> count, in; list of (left id, right id), out; the i-th merge makes id 256 + i.

def train_slowly(words, n_merges, min_frequency=1):
    """The algorithm, to read and to test against: count all pairs, merge the best one everywhere, again."""
    byte_id = {byte: id for id, byte in enumerate(BYTE_ORDER)}
    words = [([byte_id[byte] for byte in word], count) for word, count in words.items()]
    merges = []
    for new_id in range(256, 256 + n_merges):
        counts = Counter()
        for ids, count in words:
            for pair in zip(ids, ids[1:]):
                counts[pair] += count
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        if counts[best] < min_frequency:
            break
        merges.append(best)
        for ids, _ in words:
            i = 0
            while i < len(ids) - 1:
                if (ids[i], ids[i + 1]) == best:
                    ids[i:i + 2] = [new_id]
                i += 1
    return merges


SHIFT = 20                  # a pair is kept as one integer, left << 20 | right: sorts like the tuple, hashes faster
FEW = 64                    # below so many places, plain Python beats numpy's cost per call


class Corpus:
    """
    All distinct words, one behind the other, as a linked list of symbols: a merge joins two neighbours by unlinking the
    right one. Position p holds symbol[p] (-1: unlinked); before[p], after[p] are its neighbours in the word (-1: none).

    counts   pair -> how often it occurs now
    places   pair -> positions where its left symbol stands or stood, ascending; to be checked before use
    """

    def __init__(self, words):
        items = sorted(item for item in words.items() if len(item[0]) > 1)      # a word of one byte has no pair
        lengths = np.array([len(word) for word, _ in items], dtype=np.int64)
        byte_id = np.empty(256, dtype=np.int32)
        byte_id[BYTE_ORDER] = np.arange(256)
        self.symbol = byte_id[np.frombuffer(bytearray().join(word for word, _ in items), dtype=np.uint8)]
        self.weight = np.array([count for _, count in items], dtype=np.int64)    # 2**31 is soon reached
        self.word = np.repeat(np.arange(len(items), dtype=np.int32), lengths)
        position = np.arange(len(self.symbol), dtype=np.int32)
        starts = np.cumsum(lengths) - lengths
        self.before, self.after = position - 1, position + 1
        self.before[starts] = -1
        self.after[starts + lengths - 1] = -1
        # The same memory once more: reading one element is several times faster through a memoryview than through
        # numpy.
        arrays = self.symbol, self.before, self.after, self.word, self.weight
        self.views = [memoryview(array) for array in arrays]
        self.counts, self.places = {}, {}
        self.enter(np.flatnonzero(self.after >= 0).astype(np.int32))

    def enter(self, left):
        """Counts the pairs that start at these positions, all of them new, and remembers their places. -> their keys"""
        if len(left) == 0:
            return []
        keys = self.symbol[left].astype(np.int64) << SHIFT | self.symbol[self.after[left]]
        order = np.argsort(keys, kind="stable")
        keys, left = keys[order], left[order]
        starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        sums = np.add.reduceat(self.weight[self.word[left]], starts)
        new = keys[starts].tolist()
        self.counts.update(zip(new, sums.tolist()))
        ends = [*starts[1:].tolist(), len(left)]
        self.places.update((key, left[start:end]) for key, start, end in zip(new, starts.tolist(), ends))
        return new

    def merge(self, key, new_id):
        """Joins the pair everywhere. -> keys of the pairs that came into being (all of them hold the new symbol)"""
        left_id, right_id = key >> SHIFT, key & (1 << SHIFT) - 1
        places = self.places.pop(key)
        del self.counts[key]
        merge = self.merge_few if len(places) < FEW else self.merge_many
        return merge(places, left_id, right_id, new_id)

    def merge_many(self, left, a, b, new_id):
        symbol, before, after, counts = self.symbol, self.before, self.after, self.counts
        # 1. The places where the pair still stands. after[] of an unlinked position is stale, its symbol is -1.
        left = left[(symbol[left] == a) & (after[left] >= 0)]
        left = left[symbol[after[left]] == b]
        if a == b:
            # In a run "aaaa" each place overlaps the next: from the left, take every second one of each run.
            index = np.arange(len(left))
            starts_run = np.concatenate(([True], left[1:] != after[left[:-1]]))
            left = left[(index - np.maximum.accumulate(np.where(starts_run, index, 0))) % 2 == 0]
        right = after[left]
        outer_left, outer_right = before[left], after[right]
        # 2. Pairs that end. In "abab" the pair (b, a) in the middle is the right neighbour of the first merge and the
        # left neighbour of the second: it is counted on the right only, and marked by its b, which is unlinked here.
        symbol[right] = -1
        has_left = outer_left >= 0
        has_left[has_left] = symbol[outer_left[has_left]] >= 0
        has_right = outer_right >= 0
        ended = np.concatenate((symbol[outer_left[has_left]].astype(np.int64) << SHIFT | a,
                                np.int64(b) << SHIFT | symbol[outer_right[has_right]]))
        weights = self.weight[self.word[np.concatenate((left[has_left], left[has_right]))]]
        keys, which = np.unique(ended, return_inverse=True)
        loss = np.zeros(len(keys), dtype=np.int64)
        np.add.at(loss, which, weights)
        for key, lost in zip(keys.tolist(), loss.tolist()):
            if key in counts:                              # not the merged pair itself, which is gone as a whole
                counts[key] -= lost
        # 3. The new symbol takes both places.
        symbol[left] = new_id
        after[left] = outer_right
        before[outer_right[has_right]] = left[has_right]
        # 4. Pairs that begin: one at each neighbour on the left that was not part of a merge, one at each new symbol.
        return self.enter(np.concatenate((outer_left[has_left], left[has_right])))

    def merge_few(self, places, a, b, new_id):
        """The same, place by place, from left to right."""
        symbol, before, after, word, weight = self.views
        counts = self.counts
        born = {}                                          # key -> [count, places]
        for left in places.tolist():
            right = after[left]
            if symbol[left] != a or right < 0 or symbol[right] != b:
                continue
            times = weight[word[left]]
            outer_left, outer_right = before[left], after[right]
            symbol[left], symbol[right], after[left] = new_id, -1, outer_right
            if outer_left >= 0:
                other = symbol[outer_left]
                self.exchange(other << SHIFT | a, other << SHIFT | new_id, outer_left, times, born)
            if outer_right >= 0:
                other = symbol[outer_right]
                before[outer_right] = left
                self.exchange(b << SHIFT | other, new_id << SHIFT | other, left, times, born)
        for key, (count, positions) in born.items():
            counts[key], self.places[key] = count, np.array(positions, dtype=np.int32)
        return list(born)

    def exchange(self, old, new, position, times, born):
        """One occurrence of the pair `old` has become one of the pair `new`."""
        if old in born:                                    # it came into being a moment ago: (new, a) in "abab"
            born[old][0] -= times
        elif old in self.counts:
            self.counts[old] -= times
        entry = born.setdefault(new, [0, []])
        entry[0] += times
        entry[1].append(position)


def train(words, n_merges, min_frequency=1, progress=lambda: None):
    """
    The same merges as train_slowly. A heap holds the pairs by count. When a pair loses occurrences its entry is not
    touched: counts only ever fall (a pair is born, with all its occurrences, in the merge that makes the later of its
    symbols), so an entry is never too low, and one that turns out too high when it comes up is put back with what is
    true.
    """
    corpus, merges = Corpus(words), []
    heap = [(-count, key) for key, count in corpus.counts.items()]
    heapq.heapify(heap)
    while heap and len(merges) < n_merges:
        count, key = heapq.heappop(heap)
        now = corpus.counts[key]
        if now != -count:
            if now >= min_frequency:
                heapq.heappush(heap, (-now, key))
            continue
        if now < min_frequency:
            break
        merges.append((key >> SHIFT, key & (1 << SHIFT) - 1))
        for born in corpus.merge(key, 255 + len(merges)):
            heapq.heappush(heap, (-corpus.counts[born], born))
        progress()
    return merges


# ---------------------------------------------------------------------------------------------------------------------
# Input and output

def documents(config, split):
    """The texts of a split ('train' or 'val'), one after the other."""
    files = config.text if split == "train" else config.held_out
    if files:
        for file in files:
            try:
                yield Path(file).read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                refuse(f"{file}: cannot be read ({error.strerror}); --text and --held_out take plain text files.")
    elif not config.text:
        for document in read_documents(config.data_dir, split):
            yield document["text"]


def check(config):
    """Refuses keys that make no sense, all at once."""
    problems = []
    smallest = 256 + len(SPECIAL_TOKENS)
    if not smallest < config.vocab_size < 1 << SHIFT:
        problems.append(f"vocab_size = {config.vocab_size}: expected more than {smallest} (the bytes and the special "
                        f"tokens) and less than {1 << SHIFT}")
    if config.pattern not in PATTERNS:
        problems.append(f"pattern = {config.pattern!r}: expected one of {', '.join(PATTERNS)}")
    if config.min_frequency < 1:
        problems.append(f"min_frequency = {config.min_frequency}: expected at least 1")
    if config.workers < 0:
        problems.append(f"workers = {config.workers}: expected 1 or more, or 0 for one for each core")
    problems += [f"{file} does not exist" for file in (*config.text, *config.held_out, *config.compare)
                 if not Path(file).is_file()]
    if problems:
        refuse(*problems)


def made_from(config):
    """Everything that decides the result: if it is the same, so is the tokenizer. Goes into report.json."""
    docs = [] if config.text else sorted(Path(config.data_dir, "docs").glob("*.jsonl.zst"))
    files = {"docs": docs, "text": config.text, "held_out": config.held_out, "compare": config.compare}
    keys = {key: getattr(config, key) for key in ("vocab_size", "pattern", "min_frequency")}
    return keys | {kind: [[Path(name).name, sha256_file(name)] for name in names] for kind, names in files.items()}


def finished(folder, source):
    """The report of an earlier run when it stands for exactly this one and its tokenizer is whole, else None."""
    if not (folder / "report.json").is_file():
        return None
    report = read_json(folder / "report.json")
    whole = all((folder / name).is_file() and sha256_file(folder / name) == digest
                for name, digest in report.get("files", {}).items())
    return report if whole and report.get("made_from") == source else None


def measure(config, tokenizer):
    """Bytes per token of ours and of those to compare with, on the same held-out text. -> list of rows, ours first"""
    texts = list(documents(config, "val"))
    size = sum(len(valid_unicode(text).encode()) for text in texts)
    if not size:
        return []
    rows = []
    for name, other in [("ours", tokenizer), *((Path(file).name, Tokenizer.load(file)) for file in config.compare)]:
        encoded = other.encode_batch(texts)
        tokens = sum(map(len, encoded))
        lossless = all(other.decode(ids) == valid_unicode(text) for ids, text in zip(encoded, texts))
        rows.append({"name": name, "vocab_size": other.vocab_size, "documents": len(texts), "bytes": size,
                     "tokens": tokens, "bytes_per_token": round(size / tokens, 4), "lossless": lossless})
    return rows


def print_report(report):
    if not report["held_out"]:
        print("no held-out text to report on (with --text, name some by --held_out)")
        return
    first = report["held_out"][0]
    print(f"held-out text: {first['documents']} documents, {first['bytes']:,} bytes")
    print(f"  {'tokenizer':<24} {'vocabulary':>10} {'tokens':>10} {'bytes/token':>12}  lossless")
    for row in report["held_out"]:
        print(f"  {row['name']:<24} {row['vocab_size']:>10,} {row['tokens']:>10,} {row['bytes_per_token']:>12.3f}  "
              f"{'yes' if row['lossless'] else 'NO'}")


def coloured(tokenizer, text):
    """The text with its tokens in alternating colours; several tokens that share one character are shown as one."""
    out, stream = [], tokenizer.stream()
    for id in tokenizer.encode(text):
        if piece := stream.add(id):
            background = (46, 43, 42, 45)[len(out) % 4]
            out.append(f"\x1b[30;{background}m{printable(piece)}\x1b[0m")
    return "".join(out)


def main(config):
    check(config)
    folder = Path(config.data_dir) / "tokenizer"
    if config.show and (folder / "tokenizer.json").is_file():
        return print(coloured(Tokenizer.load(folder), config.show))

    # 1. Nothing to do when this very tokenizer stands there already.
    lock = lock_folder(folder)
    source = made_from(config)
    if report := finished(folder, source):
        print(f"{folder}: already done ({report['vocab_size']} tokens, hash {report['hash'][:16]})")
        return print_report(report)
    config.save(folder)

    # 2. The pieces of the training text, each with its count.
    start = time.perf_counter()
    counts, n_documents, n_characters = count_in_parallel(
        documents(config, "train"), PATTERNS[config.pattern], config.workers or os.cpu_count())
    words = {piece.encode(): count for piece, count in counts.items()}
    if not words:
        place = ", ".join(config.text) or f"{config.data_dir}/docs"
        refuse(f"{place}: there is no text in it, so there is nothing to learn from.")
    seconds = time.perf_counter() - start
    print(f"counted {n_characters:,} characters in {n_documents:,} documents, {n_documents / seconds:,.0f} documents/s")
    print(f"  {sum(words.values()):,} pieces, {len(words):,} different ones")

    # 3. Merges, until the vocabulary is full or no pair is left that occurs often enough.
    start = time.perf_counter()
    wanted = config.vocab_size - 256 - len(SPECIAL_TOKENS)
    with tqdm(total=wanted, unit=" merges", desc="merging", disable=not sys.stdout.isatty()) as bar:
        merges = train(words, wanted, config.min_frequency, bar.update)
    print(f"made {len(merges):,} merges in {time.perf_counter() - start:.1f} s")
    if len(merges) < wanted:
        print(f"vocab_size = {config.vocab_size} was asked for, but no pair is left that occurs min_frequency = "
              f"{config.min_frequency} times:\n  the vocabulary has {256 + len(merges) + len(SPECIAL_TOKENS)} tokens. "
              "More text, or a smaller min_frequency, gives more.")

    # 4. The tokenizer: bytes, then what the merges made, then the special tokens.
    ranks = [bytes([byte]) for byte in BYTE_ORDER]
    for left, right in merges:
        ranks.append(ranks[left] + ranks[right])
    specials = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(ranks, PATTERNS[config.pattern], specials, merges)
    tokenizer.save(folder)
    tokenizer.save_ranks(folder / "tokenizer.tiktoken")

    # 5. How well it does on text it has not seen. The report is written last and has the others' checksums: with it in
    # place and true, the folder is whole; after a kill anywhere before, it is not, and all is made again.
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.tiktoken")
    report = {
        "vocab_size": tokenizer.vocab_size, "vocab_size_asked": config.vocab_size, "hash": tokenizer.hash,
        "config_hash": config.hash, "made_from": source, "held_out": measure(config, tokenizer),
        "files": {name: sha256_file(folder / name) for name in names},
    }
    write_json(folder / "report.json", report)
    print(f"{folder}: {tokenizer.vocab_size:,} tokens, hash {tokenizer.hash[:16]}")
    print_report(report)
    if config.show:
        print(coloured(tokenizer, config.show))
    lock.close()


if __name__ == "__main__":
    main(configure(globals()))
