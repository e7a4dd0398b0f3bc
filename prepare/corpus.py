"""The embedded corpus: Python's standard library as a web archive, made on the user's own machine, with planted noise.

Each importable module becomes one page, rendered with pydoc by child processes (prepare/render.py). The pages are
written as a crawler would have: a .warc.gz with one gzip member a record, a request and a response for each page. Noise
of known number goes in between, so that every filter has work and the audit can be checked against PLANTED.

Two runs on one machine give the same bytes: dates and record ids are fixed, pages are rendered in blocks of fixed size
whatever the number of processes, and what differs from run to run (addresses, local paths) is scrubbed.
"""

import concurrent.futures
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import uuid
from pathlib import Path

from configurator import refuse
from engine.files import read_json, sha256_file, write_json
from engine.shards import publish

# What is planted: kind -> (how many, the filter that drops it, its reason). A filter of None: kept.
PLANTED = {
    "not_found": (12, "protocol", "http_status"),
    "redirect": (5, "protocol", "http_status"),
    "image": (9, "protocol", "content_type"),
    "pdf": (3, "protocol", "content_type"),
    "no_type": (2, "protocol", "content_type"),
    "undecodable": (3, "decoded", "undecodable"),
    "script_only": (5, "extracted", "empty"),
    "boilerplate": (10, "length", "too_short"),
    "german": (8, "language", "other_language"),
    "spanish": (8, "language", "other_language"),
    "japanese": (8, "language", "other_language"),
    "gibberish": (6, "language", "no_language"),
    "ruler": (4, "entropy", "low_entropy"),
    "braille": (4, "ascii_share", "low_ascii"),
    "prose": (12, None, None),                                  # what the copies below are copies of
    "exact_copy": (12, "exact_duplicate", "exact_duplicate"),
    "near_copy": (12, "near_duplicate", "near_duplicate"),
    "latin1_as_utf8": (4, None, None),                          # kept, noted as mislabelled
    "utf8_as_latin1": (4, None, None),                          # kept, noted as mislabelled
    "controls": (6, None, None),                                # NUL and bidi marks: kept without them, and noted
}
MISLABELLED = ("latin1_as_utf8", "utf8_as_latin1")
# Damage that costs a record; the reader counts it by itself.
DAMAGED = {"bad_length": 1, "bad_gzip": 1}

PLANTED_HOST = "planted.example"
PAGES_HOST = "pydoc.example"
DATE = "2024-01-01T00:00:00Z"

# -s -P -S: no user or site packages and no current folder on the path, so that only the standard library is found; -B:
# write no bytecode. That is -I but for the environment, from which everything else has been removed: -I would not read
# PYTHONHASHSEED, which fixes the order in which sets are printed.
ISOLATED = ["-s", "-P", "-S", "-B"]
ENVIRONMENT = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
BLOCK = 24                 # modules a child renders: what was imported before shows in some pages, so it is fixed
TIME_LIMIT = 120           # seconds for a block


# --------------------------------------------------------------------------------------------------------------------
# The pages

def child(folder, *arguments):
    """What a rendering child answers: (list of objects, whether it ended by itself)."""
    command = [sys.executable, *ISOLATED, str(Path(__file__).with_name("render.py")), *arguments]
    process = subprocess.Popen(command, env=ENVIRONMENT, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    answers = []
    for line in output.splitlines():
        try:
            answers.append(json.loads(line))
        except ValueError:
            break                                             # cut off in the middle by a crash
    return answers, process.returncode == 0


def render_block(folder, modules):
    """[(module, html or None, why not)] in the order of `modules`. A module that kills its child is passed over."""
    pages, left = {}, list(modules)
    while left:
        answers, _ = child(folder, "page", *left)
        begun = [answer["begin"] for answer in answers if "begin" in answer]
        for answer in answers:
            if "module" in answer:
                pages[answer["module"]] = answer
        if begun and begun[-1] not in pages:
            pages[begun[-1]] = {"skipped": f"the interpreter died or took more than {TIME_LIMIT} s"}
        if not begun:
            refuse(f"{sys.executable} cannot render module pages: it answers nothing when run with "
                   f"{' '.join(ISOLATED)}")
        left = [module for module in left if module not in pages]
    return [(module, pages[module].get("html"), pages[module].get("skipped")) for module in modules]


def render_pages(folder, limit, progress):
    """({module: html}, {module: why it is skipped}); limit > 0 takes that many modules, evenly spread over the list."""
    candidates, _ = child(folder, "list")
    skipped = {item["module"]: item["skipped"] for item in candidates if item["skipped"]}
    # Public modules first: where a page is nearly a copy of another one (decimal of _decimal), the first is kept.
    modules = sorted((item["module"] for item in candidates if not item["skipped"]),
                     key=lambda module: (module.startswith("_") or "._" in module, module))
    if 0 < limit < len(modules):
        modules = [modules[i * len(modules) // limit] for i in range(limit)]
    blocks = [modules[start:start + BLOCK] for start in range(0, len(modules), BLOCK)]
    pages = {}
    with concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        for block in progress(pool.map(lambda block: render_block(folder, block), blocks), len(blocks), "rendering"):
            for module, html, reason in block:
                if html is None:
                    skipped[module] = reason
                else:
                    pages[module] = html
    return pages, skipped


# --------------------------------------------------------------------------------------------------------------------
# The noise

WHO = ("the old librarian", "a young surveyor", "my neighbour", "the ferryman", "our teacher", "a travelling cook",
       "the clockmaker", "her cousin", "the night guard", "a quiet gardener", "the postmaster", "an engineer from afar")
DID = ("carried", "repaired", "counted", "described", "painted", "borrowed", "forgot", "discovered", "sold", "hid",
       "measured", "admired")
WHAT = ("a heavy brass key", "three letters without stamps", "the map of the harbour", "an umbrella with a bent handle",
        "the last jar of honey", "a box of coloured glass", "the bell from the chapel", "a notebook full of numbers",
        "two loaves of warm bread", "a picture of a lighthouse", "a bicycle without a chain", "a recipe for plum cake")
WHERE = ("behind the station", "near the frozen river", "under the wooden bridge", "in the attic of the school",
         "at the edge of the market", "on the road to the mill", "beside the dry fountain", "in a garden full of weeds",
         "on the first floor of the museum", "between two rows of elms", "close to the harbour wall", "in the bakery")
WHY = ("because the winter had been long", "although nobody had asked for it", "before the first train arrived",
       "while the children were asleep", "after the rain had stopped at last", "without saying a word to anyone",
       "so that it would not be lost again", "as if it were the most natural thing", "until the lamps were lit",
       "when the bells rang for noon", "in spite of the wind", "for reasons that were never explained")

GERMAN = ("Der Zug nach Norden hatte an diesem Morgen fast eine Stunde Verspätung.",
          "Niemand wusste, warum die Fenster des alten Hauses offen standen.",
          "Sie kaufte zwei Brötchen und setzte sich auf die Bank neben dem Brunnen.",
          "Im Garten blühten die Rosen, obwohl es schon spät im Herbst war.",
          "Der Lehrer erklärte die Aufgabe noch einmal, diesmal etwas langsamer.",
          "Wir haben den ganzen Abend über das Buch gesprochen, das er geschrieben hat.",
          "Am nächsten Tag regnete es so stark, dass der Weg nicht mehr zu sehen war.")
SPANISH = ("El tren hacia el norte llegó aquella mañana con casi una hora de retraso.",
           "Nadie sabía por qué estaban abiertas las ventanas de la casa vieja.",
           "Compró dos panecillos y se sentó en el banco que hay junto a la fuente.",
           "En el jardín florecían las rosas, aunque ya era muy tarde en el otoño.",
           "El maestro explicó otra vez el ejercicio, esta vez un poco más despacio.",
           "Pasamos toda la noche hablando del libro que él había escrito en verano.",
           "Al día siguiente llovió tanto que ya no se podía ver el camino.")
JAPANESE = ("北へ行く電車はその朝ほとんど一時間遅れて到着しました。", "古い家の窓がなぜ開いていたのか、誰も知りませんでした。",
            "彼女はパンを二つ買って、噴水のそばのベンチに座りました。", "もう秋も遅いのに、庭ではまだ薔薇が咲いていました。",
            "先生はもう一度、今度は少しゆっくりと問題を説明しました。", "私たちは彼が書いた本について一晩中話しました。",
            "次の日は雨がとても強くて、道が見えなくなりました。")


def story(draw, sentences=60):
    """English prose of our own, as a list of sentences that no other page has in this order."""
    return [f"{draw.choice(WHO).capitalize()} {draw.choice(DID)} {draw.choice(WHAT)} {draw.choice(WHERE)} "
            f"{draw.choice(WHY)}." for _ in range(sentences)]


def page_of(title, sentences):
    paragraphs = [" ".join(sentences[i:i + 5]) for i in range(0, len(sentences), 5)]
    body = "\n".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    return f"<!DOCTYPE html>\n<html><head><title>{title}</title></head>\n<body>\n{body}\n</body></html>\n"


def planted():
    """Yield (kind, number, status line, content type or None, body) of every planted response."""
    prose = []
    for kind, (count, _, _) in PLANTED.items():
        for number in range(count):
            draw = random.Random(f"{kind} {number}")
            status, media, charset, body = "200 OK", "text/html; charset=utf-8", "utf-8", b""
            title, sentences = f"{kind} {number}", story(draw)
            html = None
            if kind == "not_found":
                status = "404 Not Found"
            elif kind == "redirect":
                status = "302 Found"
            elif kind in ("image", "pdf"):
                media = {"image": "image/png", "pdf": "application/pdf"}[kind]
                body = {"image": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-1.4\n"}[kind] + draw.randbytes(2000)
            elif kind == "no_type":
                media = None
            elif kind == "undecodable":
                body = b"<html><body>" + draw.randbytes(3000).replace(b"<", b"\xff") + b"\xff\xfe</body></html>"
            elif kind == "script_only":
                html = f"<html><head><script>n = {number};</script></head><body><script>go(n)</script></body></html>"
            elif kind == "boilerplate":
                html = page_of(title, ["Home", "Products", "About us", "Contact", f"Copyright 20{number:02d}"])
            elif kind in ("german", "spanish", "japanese"):
                sentences = {"german": GERMAN, "spanish": SPANISH, "japanese": JAPANESE}[kind]
                sentences = draw.choices(sentences, k=30)
            elif kind == "gibberish":
                sentences = ["".join(draw.choices("bcdfghjklmnpqrstvwxz", k=draw.randint(4, 11))) for _ in range(300)]
            elif kind == "ruler":
                html = page_of(title, sentences[:3]).replace("</body>", "<p>" + "-" * 8000 + "</p></body>")
            elif kind == "braille":
                dots = "".join(chr(0x2801 + draw.randrange(255)) for _ in range(4000))
                html = page_of(title, sentences[:12]).replace("</body>", f"<p>{dots}</p></body>")
            elif kind == "prose":
                prose.append(page_of(title, sentences))
            elif kind == "exact_copy":
                html = prose[number % len(prose)]
            elif kind == "near_copy":
                # Another last sentence: 13 of some 1000 word 5-grams differ, so the resemblance is about 0.97.
                html = prose[number % len(prose)]
                end = html.rindex(". ") + 2
                html = html[:end] + story(draw, 1)[0] + html[html.index("</p>", end):]
            elif kind == "latin1_as_utf8":
                sentences = [sentence.replace("notebook", "café notebook") for sentence in sentences] + ["Là, Zoë?"]
                charset = "cp1252"
            elif kind == "utf8_as_latin1":
                sentences = sentences + ["The café “Zoë” is over there — voilà."]
                media = "text/html; charset=iso-8859-1"
            elif kind == "controls":
                sentences = [sentence.replace(" ", " \u202e\u200b", 1).replace(".", "\u202c.\u00ad&#0;\x00")
                             for sentence in sentences]
            body = body or (html or page_of(title, sentences)).encode(charset)
            yield kind, number, status, media, body


# --------------------------------------------------------------------------------------------------------------------
# The archive

def record(kind, url, block, media):
    """One WARC record (ISO 28500). Its id is made from its kind and URL, so it is always the same."""
    name = uuid.uuid5(uuid.NAMESPACE_URL, f"{kind} {url}")
    lines = ["WARC/1.0", f"WARC-Type: {kind}", f"WARC-Record-ID: <urn:uuid:{name}>", f"WARC-Date: {DATE}",
             *([f"WARC-Target-URI: {url}"] if url else []), f"Content-Type: {media}", f"Content-Length: {len(block)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + block + b"\r\n\r\n"


def member(data):
    return gzip.compress(data, mtime=0)


def exchange(url, status, media, body):
    """The request and the response record of one page."""
    _, _, host, path = url.split("/", 3)
    request = f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: teardown\r\nAccept: text/html\r\n\r\n"
    head = [f"HTTP/1.1 {status}", *([f"Content-Type: {media}"] if media else []), f"Content-Length: {len(body)}"]
    block = "\r\n".join(head).encode() + b"\r\n\r\n" + body
    return (record("request", url, request.encode(), "application/http; msgtype=request"),
            record("response", url, block, "application/http; msgtype=response"))


def damaged_members():
    """Records that are lost, and must cost nothing but themselves: (bytes as they stand in the file)."""
    _, response = exchange(f"http://{PLANTED_HOST}/bad_length/0", "200 OK", "text/html", b"<p>The length is wrong.</p>")
    short = response.replace(b"\r\nContent-Length: ", b"\r\nContent-Length: x", 1)
    yield member(short)
    _, response = exchange(f"http://{PLANTED_HOST}/bad_gzip/0", "200 OK", "text/html", b"<p>A bit has flipped.</p>")
    broken = bytearray(member(response))
    broken[len(broken) // 2] ^= 0x40
    yield bytes(broken)


def write_archive(path, pages):
    """The .warc.gz: real pages in their order, with the planted ones spread evenly between them."""
    noise = [[member(part) for part in exchange(f"http://{PLANTED_HOST}/{kind}/{number}", status, media, body)]
             for kind, number, status, media, body in planted()]
    noise += [[damage] for damage in damaged_members()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".tmp"), "wb") as file:
        info = b"software: teardown prepare_data.py\r\nformat: WARC File Format 1.0\r\n"
        file.write(member(record("warcinfo", "", info, "application/warc-fields")))
        done = 0
        for number, (module, html) in enumerate(pages.items()):
            url = f"http://{PAGES_HOST}/{module}.html"
            for part in exchange(url, "200 OK", "text/html; charset=utf-8", html.encode("utf-8")):
                file.write(member(part))
            due = (number + 1) * len(noise) // len(pages)
            for parts in noise[done:due]:
                file.writelines(parts)
            done = due
        publish(file, path)


def build_corpus(folder, limit, progress):
    """The path of the archive in `folder`, made anew unless the one that is there is whole and of the same making."""
    folder = Path(folder)
    archive, marker = folder / "pydoc.warc.gz", folder / "pydoc.json"
    sources = [Path(__file__), Path(__file__).with_name("render.py")]
    program = [sha256_file(source) for source in sources]
    made_by = hashlib.sha256(repr([sys.version, limit, program]).encode()).hexdigest()
    if marker.exists() and archive.exists():
        known = read_json(marker)
        if known["made_by"] == made_by and known["sha256"] == sha256_file(archive):
            return archive, known, False
    marker.unlink(missing_ok=True)
    empty = folder / "empty"                                   # where the children run: nothing there to be found
    empty.mkdir(parents=True, exist_ok=True)
    pages, skipped = render_pages(empty, limit, progress)
    if not pages:
        refuse(f"{sys.executable} could not render a single module page")
    write_archive(archive, pages)
    known = {"made_by": made_by, "sha256": sha256_file(archive), "pages": len(pages),
             "html_bytes": sum(len(html.encode("utf-8")) for html in pages.values()), "skipped": skipped,
             "planted": {kind: count for kind, (count, _, _) in PLANTED.items()}, "damaged": DAMAGED}
    write_json(marker, known)
    if not any(empty.iterdir()):
        empty.rmdir()
    return archive, known, True
