"""
The vocabulary's training and use beside others': seconds of CPU on the same text, each measurement in a process of its
own, in turns.

    python bench/tokenizer.py --part=train       against rustbpe and Hugging Face's tokenizers (requirements-test.txt)
    python bench/tokenizer.py --part=plain       against the algorithm that counts everything for each merge, as minbpe
    python bench/tokenizer.py --part=encode      against tiktoken on one core, and over processes
    python bench/tokenizer.py --part=distinct    two million distinct words: seconds and memory

The text is Python's own library, or the .jsonl.zst and text files of `folder`. All trainers are given the same
documents of about 100,000 characters, for pieces never cross a document's border. Times of threads and processes are
added up.
"""
import json
import os
import resource
import statistics
import sys
import sysconfig
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import regex

from bpe.merging import merges_of
from configurator import configure
from engine.tokenizer import BYTE_ORDER, PATTERNS, SPECIAL_TOKENS, Tokenizer, chars_to_bytes
from train_tokenizer import count_in_parallel, join, read_texts

part = "train"
folder = ""                     # of .txt and .jsonl.zst files; empty: Python's library
megabytes = 32                  # of text, at most
vocab_size = 32000
words = 2_000_000               # of the part 'distinct'
merges = 2                      # of the part 'plain': each takes as long as all of ours
rounds = 5


def documents(megabytes, folder=""):
    """Texts of about 100,000 characters: of a folder's files, or Python's own library."""
    if folder:
        texts = read_texts(sorted(file for file in Path(folder).rglob("*") if file.suffix in (".zst", ".txt")))
    else:
        texts = (file.read_text(encoding="utf-8", errors="replace") for file
                 in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")) if "-packages" not in str(file))
    joined, size, room = [], 0, int(megabytes * 1e6)
    for text in texts:
        joined.append(text)
        size += len(text)
        if size > 100_000:
            room -= len((whole := "\n".join(joined)).encode())
            yield whole
            joined, size = [], 0
        if room <= 0:
            return


def measured(work):
    """[result, seconds of CPU, seconds, MB needed beyond what was there] of work() in a process of its own, by way of
    JSON, with bytes in hexadecimal."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        before, began, peak = times(), time.perf_counter(), memory()
        result = work()
        found = (result, times() - before, time.perf_counter() - began, memory() - peak)
        with open(writer, "w") as pipe:
            json.dump(found, pipe, default=bytes.hex)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        found = json.load(pipe)
    os.waitpid(child, 0)
    return found


def times():
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def in_turns(works, rounds):
    """{name: [measured() of each round]}"""
    found = {name: [] for name in works}
    for number in range(rounds):
        for name in list(works)[::-1 if number % 2 else 1]:
            found[name].append(measured(works[name]))
    return found


def show(found, first):
    print(f"{'':<28}{'CPU seconds':>14}{'seconds':>10}{'MB':>8}{'CPU, ours to theirs':>22}")
    for name, runs in found.items():
        ratio = statistics.median(ours[1] / theirs[1] for ours, theirs in zip(found[first], runs))
        cpu, seconds, mb = (statistics.median(run[i] for run in runs) for i in (1, 2, 3))
        print(f"{name:<28}{cpu:>14.2f}{seconds:>10.2f}{mb:>8.0f}{ratio:>22.2f}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------

def ours(texts, vocab_size, workers=1, order=range(256)):
    counts = count_in_parallel(texts, PATTERNS["gpt4"], workers)
    ranks = [bytes([byte]) for byte in order]
    words = [piece.encode() for piece in counts]
    for left, right, _ in merges_of(words, list(counts.values()), vocab_size - 256, 1, order):
        ranks.append(ranks[left] + ranks[right])
    return ranks


def with_rustbpe(texts, vocab_size):
    import rustbpe
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size, pattern=PATTERNS["gpt4"])
    return [bytes(token) for token, _ in trainer.get_mergeable_ranks()]


def with_tokenizers(texts, vocab_size):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    trainer = Tokenizer(models.BPE())
    trainer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERNS["gpt4"]), "isolated"),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=0, special_tokens=[], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    vocab = trainer.get_vocab()
    return [chars_to_bytes(token) for token in sorted(vocab, key=vocab.get)]


def plainly(texts, n_merges):
    """minbpe's way: every piece of the text, and all pairs counted for each merge."""
    pieces = [list(piece.encode()) for text in texts for piece in regex.findall(PATTERNS["gpt4"], text)]
    began = time.process_time()
    for number in range(n_merges):
        counts = Counter()
        for ids in pieces:
            for pair in zip(ids, ids[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=counts.get)
        pieces = [join(ids, best, 256 + number) for ids in pieces]
    return (time.process_time() - began) / n_merges


def train(config, texts):
    found = in_turns({"ours": partial(ours, texts, config.vocab_size), "ours, 2 processes count": partial(
        ours, texts, config.vocab_size, 2), "rustbpe": partial(with_rustbpe, texts, config.vocab_size),
        "tokenizers": partial(with_tokenizers, texts, config.vocab_size)}, config.rounds)
    show(found, "ours")
    print("the same vocabulary as rustbpe's, byte for byte:", found["ours"][0][0] == found["rustbpe"][0][0])


def plain(config, texts):
    _, cpu, _, _ = measured(partial(ours, texts, config.vocab_size))
    each = measured(partial(plainly, texts, config.merges))[0]
    n = config.vocab_size - 256
    print(f"ours: {cpu:.2f} seconds for {n:,} merges. Counting everything for each merge: {each:.1f} seconds a merge, "
          f"measured on the first {config.merges}.\nAs many of those as of ours would take {each * n / 3600:.1f} "
          f"hours, {each * n / cpu:,.0f} times as long (extrapolated: later merges find fewer symbols, and cost "
          "somewhat less).")


def encode(config, texts):
    ranks = ours(texts, config.vocab_size, order=BYTE_ORDER)
    tokenizer = Tokenizer(ranks, PATTERNS["gpt4"], {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)})
    count = lambda encoded: sum(map(len, encoded))
    found = in_turns({
        "encode_batch": lambda: count(tokenizer.encode_batch(texts)),
        "encode": lambda: count(map(tokenizer.encode, texts)),
        "tiktoken encode_ordinary": lambda: count(map(tokenizer.engine.encode_ordinary, texts)),
        "encode_batch, 2 processes": lambda: count(tokenizer.encode_batch(texts, 2))}, config.rounds)
    show(found, "encode_batch")
    same = len({runs[0][0] for runs in found.values()}) == 1
    alone, two = ([run[2] for run in found[name]] for name in ("encode_batch", "encode_batch, 2 processes"))
    faster = statistics.median(a / b for a, b in zip(alone, two))
    print(f"as many tokens each time: {same}; two processes are {faster:.2f} times as fast as one, where this machine "
          f"has {os.cpu_count()} cores")


def distinct(config):
    """Words of a text in an alphabet of syllables, with counts as Zipf's law has them."""
    def work():
        syllables = [a + b + c for a in " tkpsm" for b in "aeiou" for c in ("", "n", "r", "l")]
        rng, found = np.random.default_rng(0), set()
        while len(found) < config.words:
            drawn = rng.integers(0, len(syllables), (config.words // 4, 8))
            lengths = rng.integers(3, 9, len(drawn))
            found |= {" " + "".join([syllables[i] for i in row[:n]])
                      for row, n in zip(drawn.tolist(), lengths.tolist())}
        return {word: 1 + 10**7 // rank for rank, word in enumerate(sorted(found)[:config.words], 1)}
    counts = work()
    print(f"{len(counts):,} distinct words of {sum(map(len, counts)):,} bytes")
    made, cpu, _, mb = measured(lambda: sum(1 for _ in merges_of(
        [word.encode() for word in counts], list(counts.values()), config.vocab_size - 256)))
    print(f"{made:,} merges: {cpu:.1f} seconds of CPU, {mb:,.0f} MB beside the counted words' own {memory():,.0f}")


def main(config):
    if config.part == "distinct":
        return distinct(config)
    texts = list(documents(config.megabytes, config.folder))
    print(f"{len(texts)} documents, {sum(len(text.encode()) for text in texts) / 1e6:.1f} MB, "
          f"{sum(map(len, filter(str.isascii, texts))) / sum(map(len, texts)):.0%} of it in documents of ASCII alone; "
          f"{config.vocab_size:,} tokens", flush=True)
    {"train": train, "plain": plain, "encode": encode}[config.part](config, texts)


if __name__ == "__main__":
    main(configure(globals()))
