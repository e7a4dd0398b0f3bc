"""The archive reader: WARC and WET (ISO 28500), JSON lines, Parquet and text files, to a stream of pages.

A page is a dict: url, id, date, kind ("html" or "text"), body (bytes) or text (str), and for WARC responses status,
content_type and charset. A record that cannot become a page comes as a page with a `drop` reason, so that the audit
counts it like any other.

Archives found in the wild are damaged in every way. The rule is to honour the declared length, to notice when it was
wrong, to go on at the next record, and to count what was lost in `losses`.

Every byte is accounted for, there too: bytes_read (unpacked, out of the file) = bytes_pages (what becomes pages, as it
stands in the archive) + bytes_heads (headers, names, line ends) + bytes_other (records of other kinds) + skipped_bytes
(lost). What the pages hold once unchunked and unpacked is bytes_pages + bytes_unpacked.
"""

import json
import os
import re
import zlib
from pathlib import Path

from prepare.stream import GZIP, Window, chunks

LINE_LIMIT = 1 << 16                 # of a header line
HEADER_LINES = 1000
RECORD_LIMIT = 64 << 20              # of one record, line or unpacked body: a length of 10^15 must not allocate

PARQUET = b"PAR1"
# Of a file's name only this counts: what it says it is, where the content is too damaged or too odd to tell.
WARC_NAMES = (".warc", ".wet", ".wat", ".arc")
JSONL_NAMES = (".jsonl", ".ndjson", ".json")
TEXT_NAMES = (".txt", ".text", ".md", ".rst")
PATHS = re.compile(rb"\S+\.(?:warc|wet|wat|arc|parquet|jsonl|gz|zst)\r?\n")     # a list of files, as crawls have them
CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
HTTP_HEAD_LIMIT = 1 << 20
STATUS_LINE = re.compile(rb"HTTP/\S*\s+([0-9]{3})\b", re.IGNORECASE)
BLANK_LINE = re.compile(rb"\r?\n\r?\n")
CHUNK_HEAD = re.compile(rb"(?:\r?\n)?([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\n]*)?\r?\n")
VERSION_LINE = re.compile(rb"WARC/\d+\.\d+\s*")
NEXT_RECORD = re.compile(rb"\r?\n(?=WARC/[01]\.\d+[ \t]*\r?\n[A-Za-z-]+:)")


def shown_name(path):
    """A file's name as text that can be written: a name need not be UTF-8."""
    return os.fsencode(Path(path).name).decode("utf-8", "replace")


def kind_of(start, name):
    """What a file is by its first bytes (unpacked): "warc", "json", "html", "text", or by what it is refused."""
    begins = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    line = begins.partition(b"\n")[0]
    says = lambda names: name.lower().removesuffix(".gz").removesuffix(".zst").endswith(names)
    if begins.startswith(b"WARC/") or says(WARC_NAMES) and not begins.startswith(b"filedesc:"):
        return "warc"
    if begins.startswith(b"filedesc:"):
        return "old_arc_format"                         # the predecessor of WARC, before 2009
    if says(JSONL_NAMES) or line.startswith(b"{") and (is_json(line) or line == begins and start[LINE_LIMIT - 1:]):
        return "json"
    if PATHS.match(begins):
        return "not_a_warc"
    if says(TEXT_NAMES) or start.startswith((b"\xff\xfe", b"\xfe\xff")) or not CONTROL.search(start):
        return "html" if begins[:99].lower().startswith((b"<!doctype html", b"<html")) else "text"
    return "not_a_warc"


def is_json(line):
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def read_pages(path, losses, max_decompressed=1 << 40, position=lambda at: None):
    """Yield the pages of the file at `path`, in order. Raises OSError when the file itself cannot be read."""
    with open(path, "rb") as file:
        if file.read(4) == PARQUET:
            yield from parquet_pages(path, losses)
            return
    window = Window(chunks(path, losses, max_decompressed, position))
    start = window.peek(LINE_LIMIT)
    if not start:
        if not losses.keys() - {"bytes_file", "bytes_damaged"}:     # unless it was something that cannot be unpacked
            losses["empty_file"] = 1
        return
    kind = kind_of(start, Path(path).name)
    if kind == "warc":
        yield from warc_pages(window, losses)
    elif kind == "json":
        yield from json_pages(window, shown_name(path), losses)
    elif kind in ("text", "html"):
        yield text_page(window, shown_name(path), kind, losses)
    else:
        losses[kind] += 1
        losses["skipped_bytes"] += rest(window)
    losses["bytes_read"] += window.taken


def rest(window):
    """Pass over what is left; its size."""
    before = window.taken
    while window.take(LINE_LIMIT):
        pass
    return window.taken - before


# --- WARC records -----------------------------------------------------------------------------------------------------

def warc_pages(window, losses):
    """Pages of `response` (HTTP) and `conversion` (WET: text already) records; other kinds are only counted."""
    kinds = set()
    for headers, block in records(window, losses):
        kind = headers.get("warc-type", "").lower()
        kinds.add(kind)
        losses["records"] += 1
        page = {
            "url": headers.get("warc-target-uri", "").strip("<> "),     # wget wrote <http://...>
            "id": headers.get("warc-record-id", "").strip("<> "),
            "date": headers.get("warc-date", ""),
        }
        if "warc-truncated" in headers:
            losses["warc_truncated_header"] += 1                        # cut by the crawler: kept, but counted
        if kind == "response" and not page["url"].lower().startswith(("dns:", "ftp:", "gopher:")):
            page |= http_response(block)
        elif kind == "conversion":
            # No HTTP part: neither status nor content type apply, the crawler has made text of it already.
            page |= {"kind": "text", "body": block, "charset": "utf-8", "stored": len(block)}
        else:
            losses["other_records"] += 1
            losses["bytes_other"] += len(block)
            continue
        stored = page.pop("stored")
        losses["bytes_pages"] += stored
        losses["bytes_heads"] += len(block) - stored
        losses["bytes_unpacked"] += len(page["body"]) - stored
        yield page
    if kinds and kinds <= {"warcinfo", "metadata"}:
        losses["metadata_only"] += 1                                    # a WAT file: what is known about pages, no page
    if not losses["records"] and not losses["truncated"]:
        losses["not_a_warc"] += 1


def records(window, losses):
    """Yield (headers, block) of each record. Never splits on text inside a block whose declared length is right."""
    def lost(size):
        if size:
            losses["skipped_bytes"] += size

    while line := window.line(LINE_LIMIT):
        begin = window.taken - len(line)
        if not VERSION_LINE.fullmatch(line):
            lost(len(line.strip()))
            losses["bytes_heads"] += len(line) - len(line.strip())
            continue
        headers = read_headers(window)
        declared = (headers or {}).get("content-length", "")
        if not re.fullmatch(r"[0-9]{1,18}", declared) or int(declared) > RECORD_LIMIT:
            # No way to know where the block ends: the record is lost, the next one begins where a line says so.
            losses["bad_header" if headers is None else "bad_length"] += 1
            lost(window.taken - begin)
            continue
        head, size = window.taken - begin, int(declared)
        short = window.fill(size + 64) < size
        following = window.buffer[size:size + 64].lstrip(b"\r\n")       # should be nothing or the next record
        swallowed = None
        if short or not b"WARC/".startswith(following[:5]):
            # The length was wrong. If too large, the block holds the beginning of the next record, and ends there.
            swallowed = NEXT_RECORD.search(window.buffer, 0, size)
            if short and not swallowed:
                losses["truncated"] = 1                                 # the file ends inside this record
                lost(head + len(window.take(size)))
                return
            losses["bad_length"] += 1
        block = window.take(swallowed.end() if swallowed else size)
        if swallowed:
            head += len(block)
            block = block[:swallowed.start()].rstrip(b"\r\n")
            head -= len(block)
        losses["bytes_heads"] += head
        yield headers, block


def read_headers(window):
    """The headers up to a blank line; None if there is no end to them."""
    lines = []
    while line := window.line(LINE_LIMIT) if len(lines) < HEADER_LINES else b"":
        if not line.strip():
            return parse_headers(lines, "utf-8")
        lines.append(line)
    return None


def parse_headers(lines, charset):
    """{lower-case name: value} of WARC's and HTTP's header lines. Of two with one name the first counts."""
    headers, name = {}, ""
    for line in lines:
        text = line.decode(charset, "replace")
        before, colon, value = text.partition(":")
        if text.startswith((" ", "\t")) and name:                       # continuation of the line before
            headers[name] += " " + text.strip()
        elif colon:                                                     # lines without one occur, and mean nothing
            name = before.strip().lower()
            headers.setdefault(name, value.strip())
    return headers


# --- The HTTP part of a response --------------------------------------------------------------------------------------

def http_response(block):
    """Status, headers and body of an HTTP response, unchunked and unpacked only where that is what it really is."""
    # The header block ends at the first blank line, with either line end.
    end = BLANK_LINE.search(block, 0, HTTP_HEAD_LIMIT)
    head, body = (block[:end.start()], block[end.end():]) if end else (block[:HTTP_HEAD_LIMIT], b"")
    status = STATUS_LINE.match(head)
    if not status:
        return {"drop": "bad_http", "body": block, "stored": len(block)}
    stored = len(body)
    headers = parse_headers(head.split(b"\n")[1:], "latin-1")
    media, _, parameters = headers.get("content-type", "").partition(";")
    media = media.strip(" \"'").lower()
    charset = re.search(r"charset\s*=\s*[\"']?([^\s\"';,]+)", parameters, re.IGNORECASE)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = unchunk(body)
    return {"status": int(status.group(1)), "content_type": media, "charset": charset.group(1) if charset else "",
            "kind": "text" if media == "text/plain" else "html", "body": body, "stored": stored,
            **unpack(body, headers.get("content-encoding", "").strip().lower())}


def unchunk(body):
    """The body without its chunk lengths; as it is where it is not really chunked (crawlers often have undone it)."""
    whole, at = bytearray(), 0
    while head := CHUNK_HEAD.match(body, at):
        size = int(head.group(1), 16)
        at = head.end() + size
        whole += body[head.end():at]
        if size == 0:
            return bytes(whole)
    return bytes(whole) + body[at:].strip(b"\r\n")                    # not chunked, or no longer: better kept than lost


def unpack(body, encoding):
    """{"body": ...} decompressed as `encoding` says, or {"drop": reason}. The header lies often: believe the bytes."""
    if body.startswith(GZIP):                                           # which no text does, whatever it is called
        attempts = (31,)
    elif encoding == "deflate":
        attempts = (15, -15)                                            # as the standard says, or as many servers do it
    else:
        return {"drop": "content_encoding"} if encoding in ("br", "zstd", "compress") else {"body": body}
    for wbits in attempts:
        unpacker = zlib.decompressobj(wbits)
        try:
            whole = unpacker.decompress(body, RECORD_LIMIT)
        except zlib.error:
            continue
        if unpacker.unconsumed_tail:
            return {"drop": "body_too_large"}
        if unpacker.eof or whole and wbits != -15:                      # which many a text looks like for some bytes
            cut = not unpacker.eof or unpacker.unused_data.startswith(GZIP)
            return {"body": whole, "notes": ["unpacked_body_cut_short"] * cut}
    return {"drop": "content_encoding"} if body.startswith(GZIP) else {"body": body}


# --- JSON lines, Parquet and text files -------------------------------------------------------------------------------

def json_pages(window, source, losses):
    """One page a line, from objects with a "text" (or "content", "raw_content"). Each line is judged by itself.

    Lines are bytes up to "\\n": str.splitlines would also cut at U+2028 and U+0085, which occur inside texts.
    """
    for number, line in enumerate(iter(lambda: window.line(RECORD_LIMIT), b""), 1):
        page, size = {"url": "", "id": f"{source}:{number}", "date": "", "kind": "text", "body": line}, len(line)
        if not line.strip():
            losses["bytes_heads"] += size
            continue
        if size >= RECORD_LIMIT:
            while line and not line.endswith(b"\n"):
                line = window.line(LINE_LIMIT)
                size += len(line)
            page |= {"drop": "json_too_long", "body": page["body"][:1000], "size": size}
        else:
            page |= json_page(line)
            size = size_of(page)
            losses["bytes_heads"] += len(line) - size
        losses["bytes_pages"] += size
        yield page


def size_of(page):
    """Bytes of its text, or of what it has as long as it has none."""
    return page.get("size") or len(page["text"].encode("utf-8", "replace") if "text" in page else page["body"])


def json_page(line):
    try:
        item = json.loads(line.decode("utf-8-sig"))              # the first one may begin with a byte order mark
    except UnicodeDecodeError:
        return {"drop": "json_not_utf8"}
    except (RecursionError, ValueError):              # bad JSON, very deep JSON, an integer of thousands of digits
        return {"drop": "json_syntax"}
    if not isinstance(item, dict):
        return {"drop": "json_not_an_object"}
    return page_of(item)


def page_of(item):
    """The page of an object with a text, however that is called."""
    text = next((item[key] for key in ("text", "raw_content", "content") if key in item), None)
    if not isinstance(text, str):
        return {"drop": "json_no_text"}
    page = {"text": text, "url": item.get("url", ""), "date": item.get("date", item.get("date_download", ""))}
    if isinstance(item.get("id"), (str, int)):
        page["id"] = str(item["id"])
    # Half of a surrogate pair is valid JSON ("\\ud83d") but no text: nothing could be written with it.
    return {key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""
            for key, value in page.items()}


def parquet_pages(path, losses):
    """One page a row of a table with a column "text" (or "content", "raw_content"). Needs pyarrow."""
    import pyarrow
    import pyarrow.parquet
    losses["bytes_file"] += os.stat(path).st_size
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            wanted = [name for name in ("text", "raw_content", "content", "url", "id", "date", "date_download")
                      if name in table.schema_arrow.names]
            for rows in table.iter_batches(64, columns=wanted):
                for number, cells in enumerate(zip(*rows.columns) if wanted else ((),) * len(rows), number + 1):
                    page = {"url": "", "id": f"{shown_name(path)}:{number}", "date": "", "kind": "text", "body": b""}
                    page |= table_page(dict(zip(rows.schema.names, cells)))
                    losses["bytes_pages"] += size_of(page)
                    losses["bytes_read"] += size_of(page)
                    yield page
    except (pyarrow.ArrowException, OSError):                   # OSError is also what it says of damaged pages
        losses["bad_parquet"] += 1


def table_page(cells):
    """The page of a row {name: a value of pyarrow's}, each judged by itself: there are tables with text stored as
    bytes, with strings that are not UTF-8, and with dates that Python has no form for."""
    item = {}
    for name, cell in cells.items():
        try:
            raw = cell.is_valid and hasattr(cell, "as_buffer")
            value = cell.as_buffer().to_pybytes().decode() if raw else cell.as_py()
            item[name] = str(value) if name.startswith("date") and value else value
        except UnicodeDecodeError:
            return {"drop": "json_not_utf8"}
        except (ValueError, OverflowError):
            item[name] = None
    return page_of(item)


def text_page(window, source, kind, losses):
    """A text or HTML file is one page."""
    page = {"url": "", "id": source, "date": "", "kind": kind, "body": window.take(RECORD_LIMIT), "charset": ""}
    size = len(page["body"]) + rest(window)
    losses["bytes_pages"] += size
    return page if size == len(page["body"]) else page | {"drop": "file_too_long", "body": page["body"][:1000],
                                                          "size": size}
