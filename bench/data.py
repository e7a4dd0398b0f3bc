"""
How fast pages become documents: beside datatrove on the demo's archive, and on prose that passes every filter.

    python bench/data.py                              ours alone
    python bench/data.py --datatrove=VENV/bin/python  in turns with it: pip install datatrove==0.10.1 trafilatura spacy
                                                      lxml_html_clean warcio faust-cchardet python-magic orjson
    python bench/data.py --big=2000                   memory while an archive of 2,000 MB is read, tenth by tenth

Both do the same on the same file: read the archive, HTML to text, Gopher's repetition and quality, compressed JSON
lines; one process each, which has loaded its libraries before. Language identification, which theirs would do in a
further step, is left out, their limit of a second a page is lifted, and all other filters of ours let every page pass,
but run. The prose is generated, and only documents that come through every filter count.
"""
import collections
import gzip
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import prepare_data
from configurator import configure, refuse
from prepare import clean, dedup, filters
from prepare.clean import clean_file
from prepare.stream import Window, chunks
from prepare.warc import read_pages, records
from timing import in_turns, ratio

warc = "data/demo/input/pydoc.warc.gz"      # "": not this part
datatrove = ""                  # python of an environment with datatrove; "": ours alone
documents = 100                 # of generated prose; 0: not this part
words = 1300                    # in each
big = 0                         # MB: the archive over and over until it has so many, and only this part; 0: the others
rounds = 3

PEER = """
import os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
from datatrove.pipeline.readers import WarcReader
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.text import split_into_words
folder, name = sys.argv[1:]
Trafilatura().extract("<p>load it</p>"), split_into_words("load it", "eng")
print("ready", flush=True)
for out in sys.stdin:
    stream = None
    for step in (WarcReader(folder, glob_pattern=name), Trafilatura(True, timeout=60), GopherRepetitionFilter(),
                 GopherQualityFilter(), JsonlWriter(out.strip())):
        stream = step.run(stream, rank=0, world_size=1)
    print(sum(1 for document in stream), flush=True)
"""


def settings(**changes):
    """prepare_data.py's defaults, and what is changed."""
    values = {name: value for name, value in vars(prepare_data).items() if name.islower() and name[0] != "_"
              and isinstance(value, (int, float, str, tuple, type(None)))}
    return {**values, "language_threshold": 0.995, **changes}


def generated(number, words):
    """Prose without sense that passes every filter: common words of English, words of the noise's phrases, rare
    ones."""
    draw = random.Random(number)
    phrases = json.loads((Path(prepare_data.__file__).parent / "prepare" / "phrases.json").read_text(encoding="utf-8"))
    known = sorted({word for part in ("who", "did", "what", "where", "why") for phrase in phrases[part]
                    for word in re.findall("[a-z]+", phrase.lower())})
    common = ("the of and to in a is that it was for on with as his they be at this have from or had by but not what "
              "all were when we there can an your which their said if do will each about how up out them").split()
    rare = ["".join(draw.choice(letters) for letters in ("bcdfglmnprst", "aeiou", "bdglmnrst", "aeiou", "dlnrst"))
            for _ in range(150)]
    text, count = [], 0
    while count < words:
        sentence = [draw.choice(draw.choices((common, known, rare), (42, 43, 15))[0])
                    for _ in range(draw.randint(7, 22))]
        count += len(sentence)
        text.append(" ".join(sentence).capitalize() + ".")
    return "\n\n".join(" ".join(text[start:start + 9]) for start in range(0, len(text), 9))


def cleaned(path, target, settings):
    """(pages, documents kept, seconds)"""
    slot, begin = [0] * clean.SLOTS, time.perf_counter()
    clean_file(path, target, settings, (), slot)
    return slot[clean.DOCUMENTS], slot[clean.KEPT], time.perf_counter() - begin


def undamaged(path, folder):
    """A copy of an archive without its damaged records: warcio, which datatrove reads with, ends at the first."""
    copy, losses = folder / f"whole_{path.name.removesuffix('.gz')}.gz", collections.Counter()
    with open(copy, "wb") as file:
        for headers, block in records(Window(chunks(path, losses, 1 << 40)), losses):
            if len(block) == int(headers["content-length"]):
                head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                file.write(gzip.compress(b"WARC/1.0\r\n" + head.encode() + b"\r\n" + block + b"\r\n\r\n"))
    return copy


def beside_datatrove(config, folder):
    path = undamaged(Path(config.warc), folder)
    same = settings(rules=("gopher_quality", "gopher_repetition"), languages=(), language_threshold=0, min_chars=0,
                    min_entropy=0, min_ascii=0, max_chars=10 ** 9)
    filters.FILTERS["language"] = lambda page, settings: page.update(language="", language_score=0.0)
    kept = {}
    works = {"ours": lambda: kept.update(ours=cleaned(path, folder / "ours", same)[:2])}
    if config.datatrove:
        with open(folder / "said", "wb") as said:
            peer = subprocess.Popen([config.datatrove, "-c", PEER, path.parent, path.name], stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE, stderr=said, text=True)
        peer.stdout.readline()                                          # ready

        def theirs():
            print(folder / f"theirs{time.perf_counter()}", file=peer.stdin, flush=True)
            kept["datatrove"] = peer.stdout.readline().strip()
            if not kept["datatrove"]:
                refuse(f"datatrove does not run: {(folder / 'said').read_text()[-800:]}")
        works["datatrove"] = theirs
    times = {name: [] for name in works}
    for number in range(config.rounds):
        for name, seconds in in_turns(works, 1, warm_up=0).items():
            times[name] += seconds
        print(f"round {number}:", ", ".join(f"{name} {told[-1]:.1f} s" for name, told in times.items()), flush=True)
    filters.FILTERS["language"] = filters.language
    pages, documents = kept["ours"]
    for name, seconds in times.items():
        left = documents if name == "ours" else kept[name]
        print(f"{path.name}, {pages} pages, {name}: {pages / statistics.median(seconds):,.1f} pages/s, {left} left")
    if config.datatrove:
        peer.stdin.close()
        print(f"ours is {ratio(times, 'datatrove', 'ours'):.1f} times as fast (median of {config.rounds} rounds)")


def archive_of(texts):
    """(bytes of a WARC with a page of HTML for each text, the pages)"""
    pages = [("<html><head><title>x</title></head><body>"
              + "".join(f"<p>{part}</p>" for part in text.split("\n\n")) + "</body></html>").encode() for text in texts]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
    record = "WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.example/{}\r\nContent-Length: {}\r\n\r\n"
    return b"".join(record.format(number, len(head + page)).encode() + head + page + b"\r\n\r\n"
                    for number, page in enumerate(pages)), pages


def every_filter(config, folder):
    texts = [generated(number, config.words) for number in range(config.documents)]
    data, pages = archive_of(texts)
    (folder / "prose.warc").write_bytes(data)
    (folder / "clean.txt").write_text("\n".join(texts[:20]))
    (folder / "eval.txt").write_text("a line of an evaluation that has thirteen words in it or even a few more of them")
    (folder / "blocked.txt").write_text("blocked.example\n")
    everything = settings(rules=("gopher_quality", "gopher_repetition", "c4", "fineweb"), mask_personal=True,
                          block_list=str(folder / "blocked.txt"), contaminated=(str(folder / "eval.txt"),),
                          perplexity_text=str(folder / "clean.txt"), paragraph_min_chars=40, language_threshold=0.9)
    minhash, spent = dedup.MinHash(16, 8, 1), collections.defaultdict(list)

    def timed(name, work):
        begin = time.perf_counter()
        result = work()
        spent[name].append(time.perf_counter() - begin)
        return result

    def hashed(text):
        dedup.word_hashes.cache_clear()
        return minhash.bands(minhash.signature(dedup.shingles(text)))

    cleaned(folder / "prose.warc", folder / "warm", everything)
    totals = []
    for number in range(config.rounds):
        _, kept, seconds = cleaned(folder / "prose.warc", folder / f"all{number}", everything)
        totals.append(seconds / max(1, kept))
        for page, text in zip(pages, texts):
            page = {"url": "http://a.example/x", "id": "", "kind": "html", "charset": "utf-8", "status": 200,
                    "content_type": "text/html", "body": page, "measures": {}, "notes": []}
            if any(timed(name, lambda: step(page, everything)) for name, step in filters.steps_of(everything)):
                continue
            timed("repeated paragraphs", lambda: dedup.paragraph_hashes(page["text"], 40))
            timed("MinHash", lambda: hashed(text))
        for text in texts:
            timed("alone", lambda: hashed(text))
            grams = dedup.shingles(text)
            timed("signature", lambda: minhash.bands(minhash.signature(grams)))
    alone, signature = (statistics.median(spent.pop(name)) for name in ("alone", "signature"))
    total = statistics.median(totals)
    count = statistics.mean(len(text.split()) for text in texts)
    print(f"{kept} of {len(texts)} documents of {count:,.0f} words reach the end, every filter on, one process: "
          f"{1 / total:,.0f} documents/s")
    each = {name: statistics.median(seconds) for name, seconds in spent.items()}
    print(f"MinHash: {1 / signature:,.0f} signatures/s; from words to signature and bands {1 / alone:,.0f} documents/s "
          f"by itself, {1 / each['MinHash']:,.0f} between the other steps")
    shares = sorted(((seconds / total, name) for name, seconds in each.items()), reverse=True)
    print("share of the run: " + ", ".join(f"{name} {share:.0%}" for share, name in shares if share > 0.005)
          + f"; reading, writing and the rest {1 - sum(each.values()) / total:.0%}")


def memory(config, folder):
    """Memory at most, after each tenth of an archive of config.big MB, which is the small one over and over."""
    with open(folder / "big.warc", "wb") as file:
        while file.tell() < config.big * 1e6:
            file.writelines(chunks(config.warc, collections.Counter(), 1 << 40))
        size = file.tell()
    at, peaks, pages, begin = 0, [], 0, time.perf_counter()

    def position(read):
        nonlocal at
        at = read

    for pages, _ in enumerate(read_pages(folder / "big.warc", collections.Counter(), 1 << 40, position), 1):
        if at >= size * (len(peaks) + 1) / 10:
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(f"an archive of {size:,} bytes, {pages:,} pages read in {time.perf_counter() - begin:,.0f} s; memory at "
          "most, MB, after each tenth: " + " ".join(f"{peak:.0f}" for peak in peaks))


def main(config):
    with tempfile.TemporaryDirectory() as folder:
        if config.big:
            memory(config, Path(folder))
            return
        if config.warc:
            beside_datatrove(config, Path(folder))
        if config.documents:
            every_filter(config, Path(folder))


if __name__ == "__main__":
    main(configure(globals()))
