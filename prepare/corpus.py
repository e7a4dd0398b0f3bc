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

from tqdm import tqdm

from configurator import refuse
from engine.files import intact, read_json, sha256_file, write_atomic, write_json

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


# --- The pages --------------------------------------------------------------------------------------------------------

def child(folder, *arguments):
    """What a rendering child answers: a list of objects, shorter when it dies or takes too long."""
    command = [sys.executable, *ISOLATED, str(Path(__file__).with_name("render.py")), *arguments]
    try:
        output = subprocess.run(command, env=ENVIRONMENT, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, timeout=TIME_LIMIT).stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    # A crash may cut the last line off in the middle.
    return [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]


def render_block(folder, modules):
    """[(module, html or None, why not)] in the order of `modules`. A module that kills its child is passed over."""
    pages, left = {}, modules
    while left:
        answers = child(folder, "page", *left)
        if not answers:
            refuse(f"{sys.executable} cannot render module pages: it answers nothing when run with "
                   f"{' '.join(ISOLATED)}")
        pages |= {answer["module"]: answer for answer in answers if "module" in answer}
        if "begin" in answers[-1]:
            pages[answers[-1]["begin"]] = {"skipped": f"the interpreter died or took more than {TIME_LIMIT} s"}
        left = [module for module in left if module not in pages]
    return [(module, pages[module].get("html"), pages[module].get("skipped")) for module in modules]


def render_pages(folder, limit):
    """({module: html}, {module: why it is skipped}); limit > 0 takes that many modules, evenly spread over the list."""
    candidates = child(folder, "list")
    skipped = {item["module"]: item["skipped"] for item in candidates if item["skipped"]}
    # Public modules first: where a page is nearly a copy of another one (decimal of _decimal), the first is kept.
    modules = sorted((item["module"] for item in candidates if not item["skipped"]),
                     key=lambda module: (module.startswith("_") or "._" in module, module))
    if 0 < limit < len(modules):
        modules = [modules[i * len(modules) // limit] for i in range(limit)]
    blocks = [modules[start:start + BLOCK] for start in range(0, len(modules), BLOCK)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(lambda block: render_block(folder, block), blocks)
        rendered = [page for block in tqdm(done, "rendering", len(blocks), leave=False, disable=None) for page in block]
    skipped |= {module: reason for module, html, reason in rendered if html is None}
    return {module: html for module, html, _ in rendered if html is not None}, skipped


# --- The noise --------------------------------------------------------------------------------------------------------

# In `who` to `why`, the parts of sentences; in the languages' lists, whole ones.
PHRASES = json.loads(Path(__file__).with_name("phrases.json").read_text(encoding="utf-8"))

STATUS = {"not_found": "404 Not Found", "redirect": "302 Found"}
MEDIA = {"image": "image/png", "pdf": "application/pdf", "no_type": None,
         "utf8_as_latin1": "text/html; charset=iso-8859-1"}
MAGIC = {"image": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-1.4\n"}


def story(draw, sentences=60):
    """English prose of our own, as a list of sentences that no other page has in this order."""
    return [" ".join(draw.choice(PHRASES[part]) for part in ("who", "did", "what", "where", "why")).capitalize() + "."
            for _ in range(sentences)]


def page_of(title, sentences):
    paragraphs = [" ".join(sentences[i:i + 5]) for i in range(0, len(sentences), 5)]
    body = "\n".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    return f"<!DOCTYPE html>\n<html><head><title>{title}</title></head>\n<body>\n{body}\n</body></html>\n"


def content_of(kind, number):
    """What a planted page holds: text, or bytes where the bytes are the point."""
    draw = random.Random(f"{kind} {number}")
    sentences, more = story(draw), ""
    if kind in MAGIC:
        return MAGIC[kind] + draw.randbytes(2000)
    if kind == "undecodable":
        return b"<html><body>" + draw.randbytes(3000).replace(b"<", b"\xff") + b"\xff\xfe</body></html>"
    if kind == "script_only":
        return f"<html><head><script>n = {number};</script></head><body><script>go(n)</script></body></html>"
    if kind == "exact_copy":
        return content_of("prose", number)
    if kind == "near_copy":
        # Another last sentence: 13 of some 1000 word 5-grams differ, so the resemblance is about 0.97.
        html = content_of("prose", number)
        end = html.rindex(". ") + 2
        return html[:end] + story(draw, 1)[0] + html[html.index("</p>", end):]
    if kind == "boilerplate":
        sentences = ["Home", "Products", "About us", "Contact", f"Copyright 20{number:02d}"]
    elif kind in PHRASES:
        sentences = draw.choices(PHRASES[kind], k=30)
    elif kind == "gibberish":
        sentences = ["".join(draw.choices("bcdfghjklmnpqrstvwxz", k=draw.randint(4, 11))) for _ in range(300)]
    elif kind == "ruler":
        sentences, more = sentences[:3], "<p>" + "-" * 8000 + "</p>"
    elif kind == "braille":
        sentences, more = sentences[:12], f"<p>{''.join(chr(0x2801 + draw.randrange(255)) for _ in range(4000))}</p>"
    elif kind == "latin1_as_utf8":
        sentences = [sentence.replace("notebook", "café notebook") for sentence in sentences] + ["Là, Zoë?"]
    elif kind == "utf8_as_latin1":
        sentences.append("The café “Zoë” is over there — voilà.")
    elif kind == "controls":
        sentences = [sentence.replace(" ", " \u202e\u200b", 1).replace(".", "\u202c.\u00ad&#0;\x00")
                     for sentence in sentences]
    html = page_of(f"{kind} {number}", sentences).replace("</body>", more + "</body>")
    return html.encode("cp1252") if kind == "latin1_as_utf8" else html


def planted():
    """Yield (kind, number, status line, content type or None, body) of every planted response."""
    for kind, (count, _, _) in PLANTED.items():
        for number in range(count):
            body = content_of(kind, number)
            yield (kind, number, STATUS.get(kind, "200 OK"), MEDIA.get(kind, "text/html; charset=utf-8"),
                   body.encode("utf-8") if isinstance(body, str) else body)


# --- The archive ------------------------------------------------------------------------------------------------------

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
    yield member(response.replace(b"\r\nContent-Length: ", b"\r\nContent-Length: x", 1))
    _, response = exchange(f"http://{PLANTED_HOST}/bad_gzip/0", "200 OK", "text/html", b"<p>A bit has flipped.</p>")
    broken = bytearray(member(response))
    broken[len(broken) // 2] ^= 0x40
    yield bytes(broken)


def write_archive(path, pages):
    """The .warc.gz: real pages in their order, with the planted ones spread evenly between them."""
    noise = [b"".join(map(member, exchange(f"http://{PLANTED_HOST}/{kind}/{number}", status, media, body)))
             for kind, number, status, media, body in planted()]
    noise += damaged_members()
    info = b"software: teardown prepare_data.py\r\nformat: WARC File Format 1.0\r\n"
    parts = [member(record("warcinfo", "", info, "application/warc-fields"))]
    for number, (module, html) in enumerate(pages.items()):
        url = f"http://{PAGES_HOST}/{module}.html"
        parts += map(member, exchange(url, "200 OK", "text/html; charset=utf-8", html.encode("utf-8")))
        parts += noise[number * len(noise) // len(pages):(number + 1) * len(noise) // len(pages)]
    write_atomic(path, b"".join(parts))


def build_corpus(folder, limit):
    """The path of the archive in `folder`, made anew unless the one that is there is whole and of the same making."""
    folder = Path(folder)
    archive, marker = folder / "pydoc.warc.gz", folder / "pydoc.json"
    program = [sha256_file(Path(__file__).with_name(name)) for name in ("corpus.py", "phrases.json", "render.py")]
    made_by = hashlib.sha256(repr([sys.version, limit, program]).encode()).hexdigest()
    known = read_json(marker, {})
    if known.get("made_by") == made_by and intact(folder, {archive.name: known["sha256"]}):
        return archive, known, False
    empty = folder / "empty"                                   # where the children run: nothing there to be found
    empty.mkdir(parents=True, exist_ok=True)
    pages, skipped = render_pages(empty, limit)
    if not pages:
        refuse(f"{sys.executable} could not render a single module page")
    write_archive(archive, pages)
    known = {"made_by": made_by, "sha256": sha256_file(archive), "pages": len(pages),
             "html_bytes": sum(len(html.encode("utf-8")) for html in pages.values()), "skipped": skipped,
             "planted": {kind: count for kind, (count, _, _) in PLANTED.items()}}
    write_json(marker, known)
    if not any(empty.iterdir()):
        empty.rmdir()
    return archive, known, True
