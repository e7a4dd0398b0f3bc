"""
Speed of prepare_data.py: pages a second beside datatrove's, documents a second with every filter, and where the time goes.

    python bench/data.py --warc=data/demo/input/pydoc.warc.gz --datatrove=OTHER/bin/python
    python bench/data.py --warc= --documents=200

--datatrove names the interpreter of an environment with datatrove 0.10.1, trafilatura, warcio and orjson. There the same
steps run on the same file in one task: WARC, text extraction, Gopher's repetition and quality filters, JSON lines; in turns
with ours, and timed within each process, so that imports do not count. The second table is of prose that is generated here:
every filter, deduplication's hashes, writing; only documents that reach the last filter count.
"""
import collections
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import prepare_data
from configurator import configure
from prepare import clean, dedup, filters
from prepare.clean import clean_file

warc = "data/demo/input/pydoc.warc.gz"      # "": not this part
datatrove = ""                  # python of an environment with datatrove; "": ours alone
documents = 100                 # of generated prose; 0: not this part
words = 1300                    # in each
rounds = 3

PEER = """
import os, sys, time
os.environ["HF_HUB_OFFLINE"] = "1"
from datatrove.pipeline.readers import WarcReader
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.writers.jsonl import JsonlWriter
folder, name, out = sys.argv[1:]
steps = [WarcReader(folder, glob_pattern=name), Trafilatura(favour_precision=True), GopherRepetitionFilter(),
         GopherQualityFilter(), JsonlWriter(out)]
begin, stream = time.perf_counter(), None
for step in steps:
    stream = step.run(stream, rank=0, world_size=1)
for document in stream:
    pass
print("seconds", time.perf_counter() - begin)
"""


def settings(**changes):
    values = {name: key for name, key in vars(prepare_data).items() if name.islower() and isinstance(
        key, (int, float, str, tuple, bool, type(None))) and not name.startswith("_")}
    return {**values, "language_threshold": 0.995, **changes}


def generated(number, words):
    """Prose without sense that passes every filter: common words of English, words of the noise's phrases, rare ones."""
    draw = random.Random(number)
    phrases = json.loads((Path(prepare_data.__file__).parent / "prepare" / "phrases.json").read_text(encoding="utf-8"))
    known = sorted({word for part in ("who", "did", "what", "where", "why") for phrase in phrases[part]
                    for word in re.findall("[a-z]+", phrase.lower())})
    common = ("the of and to in a is that it was for on with as his they be at this have from or had by but not what all "
              "were when we there can an your which their said if do will each about how up out them").split()
    rare = ["".join(draw.choice(letters) for letters in ("bcdfglmnprst", "aeiou", "bdglmnrst", "aeiou", "dlnrst"))
            for _ in range(150)]
    text, count = [], 0
    while count < words:
        sentence = [draw.choice(draw.choices((common, known, rare), (42, 43, 15))[0]) for _ in range(draw.randint(7, 22))]
        count += len(sentence)
        text.append(" ".join(sentence).capitalize() + ".")
    return "\n\n".join(" ".join(text[start:start + 9]) for start in range(0, len(text), 9))


def in_turns_with_datatrove(config, folder):
    path = Path(config.warc).resolve()
    ours, theirs, pages = [], [], 0
    # The same steps: no other filter decides, so the language, length and guards are off.
    same = settings(rules=("gopher_quality", "gopher_repetition"), languages=(), language_threshold=0, min_chars=0,
                    min_entropy=0, min_ascii=0, max_chars=10 ** 9)
    for number in range(config.rounds):
        begin = time.perf_counter()
        slot = [0] * clean.SLOTS
        clean_file(path, folder / f"ours{number}", same, (), slot)
        ours.append(time.perf_counter() - begin)
        pages = slot[clean.DOCUMENTS]
        if config.datatrove:
            done = subprocess.run([config.datatrove, "-c", PEER, path.parent, path.name, folder / f"theirs{number}"],
                                  capture_output=True, text=True)
            if done.returncode:
                print(f"datatrove does not run: {done.stderr[-800:]}")
                return
            theirs.append(float(done.stdout.split()[-1]))
    print(f"{path.name}, {pages} pages, one process: ours {pages / statistics.median(ours):,.1f} pages/s")
    if theirs:
        print(f"    datatrove {pages / statistics.median(theirs):,.1f} pages/s; ours is "
              f"{statistics.median(b / a for a, b in zip(ours, theirs)):.1f} times as fast (median of {config.rounds} rounds)")


def every_filter(config, folder):
    texts = [generated(number, config.words) for number in range(config.documents)]
    (folder / "clean.txt").write_text("\n".join(texts[:20]))
    (folder / "eval.txt").write_text("a line of an evaluation that has thirteen words in it or even some more of them\n")
    (folder / "blocked.txt").write_text("blocked.example\n")
    body = "<html><head><title>x</title></head><body>{}</body></html>".format
    pages = [body("".join(f"<p>{part}</p>" for part in text.split("\n\n"))).encode() for text in texts]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
    record = ("WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.example/{}\r\nContent-Length: {}\r\n\r\n").format
    (folder / "prose.warc").write_bytes(b"".join(
        record(number, len(head + page)).encode() + head + page + b"\r\n\r\n" for number, page in enumerate(pages)))
    everything = settings(rules=("gopher_quality", "gopher_repetition", "c4", "fineweb"), mask_personal=True,
                          block_list=str(folder / "blocked.txt"), contaminated=(str(folder / "eval.txt"),),
                          perplexity_text=str(folder / "clean.txt"), paragraph_min_chars=40, language_threshold=0.9)
    clean_file(folder / "prose.warc", folder / "warm", everything)
    spent, seconds, hashed = collections.Counter(), [], []
    minhash = dedup.MinHash(16, 8, 1)
    for number in range(config.rounds):
        slot = [0] * clean.SLOTS
        begin = time.perf_counter()
        clean_file(folder / "prose.warc", folder / f"all{number}", everything, (), slot)
        seconds.append((time.perf_counter() - begin) / max(1, slot[clean.KEPT]))
        begin = time.perf_counter()
        for text in texts:
            dedup.word_hashes.cache_clear()
            minhash.bands(minhash.signature(dedup.shingles(text)))
        hashed.append((time.perf_counter() - begin) / len(texts))
        for page in pages:
            page = {"url": "http://a.example/x", "id": "", "kind": "html", "charset": "utf-8", "status": 200, "body": page,
                    "content_type": "text/html", "measures": {}, "notes": []}
            for name, step in filters.steps_of(everything):
                begin = time.perf_counter()
                if step(page, everything):
                    break
                spent[name] += time.perf_counter() - begin
    total = statistics.median(seconds)
    print(f"{slot[clean.KEPT]} of {len(texts)} documents of {statistics.mean(len(text.split()) for text in texts):,.0f} words reach "
          f"the end, every filter on, one process: {1 / total:,.0f} documents/s")
    print(f"MinHash, words to signature and bands: {1 / statistics.median(hashed):,.0f} documents/s, {statistics.median(hashed) / total:.0%} "
          "of the run")
    each = {name: value / config.rounds / len(texts) for name, value in spent.items()}
    print("share of the run: " + ", ".join(f"{name} {value / total:.0%}" for name, value in sorted(
        each.items(), key=lambda item: -item[1]) if value / total > 0.005)
          + f"; reading, writing, MinHash and the rest {1 - sum(each.values()) / total:.0%}")


def main(config):
    with tempfile.TemporaryDirectory() as folder:
        if config.warc:
            in_turns_with_datatrove(config, Path(folder))
        if config.documents:
            every_filter(config, Path(folder))


if __name__ == "__main__":
    main(configure(globals()))
