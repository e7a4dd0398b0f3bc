"""The archive reader: WARC and WET (ISO 28500), JSON lines and plain text files, to a stream of pages.

A page is a dict: url, id, date, kind ("html" or "text"), body (bytes) or text (str), and for WARC responses status,
content_type and charset. A record that cannot become a page comes as a page with a `drop` reason, so that the audit
counts it like any other.

Archives found in the wild are damaged in every way. The rule is to honour the declared length, to notice when it was
wrong, to go on at the next record, and to count what was lost in `losses`.
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

WARC_NAMES = (".warc", ".wet", ".wat", ".arc")
JSONL_NAMES = (".jsonl", ".ndjson", ".json")
TEXT_NAMES = (".txt", ".text", ".md", ".rst")
HTTP_HEAD_LIMIT = 1 << 20
STATUS_LINE = re.compile(rb"HTTP/\S*\s+([0-9]{3})\b", re.IGNORECASE)
BLANK_LINE = re.compile(rb"\r?\n\r?\n")
CHUNK_HEAD = re.compile(rb"(?:\r?\n)?([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\n]*)?\r?\n")
VERSION_LINE = re.compile(rb"WARC/\d+\.\d+\s*")
NEXT_RECORD = re.compile(rb"\r?\n(?=WARC/[01]\.\d+[ \t]*\r?\n[A-Za-z-]+:)")


def shown_name(path):
    """A file's name as text that can be written: a name need not be UTF-8."""
    return os.fsencode(Path(path).name).decode("utf-8", "replace")


def read_pages(path, losses, max_decompressed=1 << 40):
    """Yield the pages of the file at `path`, in order. Raises OSError when the file itself cannot be read."""
    window = Window(chunks(path, losses, max_decompressed))
    name = Path(path).name.lower().removesuffix(".gz").removesuffix(".zst")
    start = window.peek(LINE_LIMIT)
    if not start:
        if not losses:                              # unless something was there that could not be unpacked
            losses["empty_file"] = 1
    elif start.startswith(b"WARC/") or name.endswith(WARC_NAMES):
        yield from warc_pages(window, losses)
    elif name.endswith(JSONL_NAMES) or start.lstrip().startswith(b"{"):
        yield from json_pages(window, shown_name(path))
    elif name.endswith(TEXT_NAMES):
        yield text_page(window, shown_name(path))
    else:
        losses["not_a_warc"] += 1


# --------------------------------------------------------------------------------------------------------------------
# WARC records

def warc_pages(window, losses):
    """Pages of `response` (HTTP) and `conversion` (WET: text already) records; other kinds are only counted."""
    for headers, block in records(window, losses):
        kind = headers.get("warc-type", "").lower()
        losses["records"] += 1
        page = {
            "url": headers.get("warc-target-uri", "").strip("<> "),     # wget wrote <http://...>
            "id": headers.get("warc-record-id", "").strip("<> "),
            "date": headers.get("warc-date", ""),
        }
        if "warc-truncated" in headers:
            losses["warc_truncated_header"] += 1                        # cut by the crawler: kept, but counted
        if kind == "response" and not page["url"].lower().startswith(("dns:", "ftp:", "gopher:")):
            yield page | http_response(block)
        elif kind == "conversion":
            # No HTTP part: neither status nor content type apply, the crawler has made text of it already.
            yield page | {"kind": "text", "body": block, "charset": "utf-8"}
        else:
            losses["other_records"] += 1
    if not losses["records"] and not losses["truncated"]:
        losses["not_a_warc"] += 1


def records(window, losses):
    """Yield (headers, block) of each record. Never splits on text inside a block whose declared length is right."""
    skipped = 0
    while line := window.line(LINE_LIMIT):
        if not VERSION_LINE.fullmatch(line):
            skipped += len(line.strip())
            continue
        headers = read_headers(window)
        if headers is None:
            losses["bad_header"] += 1
            continue
        declared = headers.get("content-length", "")
        if not re.fullmatch(r"[0-9]{1,18}", declared) or int(declared) > RECORD_LIMIT:
            # No way to know where the block ends: the record is lost, the next one begins where a line says so.
            losses["bad_length"] += 1
            continue
        block = window.take(int(declared))
        short = len(block) < int(declared)
        following = window.peek(64).lstrip(b"\r\n")                     # should be nothing or the next record
        if short or not b"WARC/".startswith(following[:5]):
            # The length was wrong. If too large, it swallowed the beginning of the next record: give that back.
            swallowed = NEXT_RECORD.search(block)
            if short and not swallowed:
                losses["truncated"] = 1                                 # the file ends inside this record
                skipped += len(block)
                break
            losses["bad_length"] += 1
            if swallowed:
                window.give_back(block[swallowed.end():])
                block = block[:swallowed.start()].rstrip(b"\r\n")
        yield headers, block
    if skipped:
        losses["skipped_bytes"] += skipped


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


# --------------------------------------------------------------------------------------------------------------------
# The HTTP part of a response

def http_response(block):
    """Status, headers and body of an HTTP response, unchunked and unpacked only where that is what it really is."""
    # The header block ends at the first blank line, with either line end.
    end = BLANK_LINE.search(block, 0, HTTP_HEAD_LIMIT)
    head, body = (block[:end.start()], block[end.end():]) if end else (block[:HTTP_HEAD_LIMIT], b"")
    status = STATUS_LINE.match(head)
    if not status:
        return {"drop": "bad_http", "body": body}
    headers = parse_headers(head.split(b"\n")[1:], "latin-1")
    media, _, parameters = headers.get("content-type", "").partition(";")
    media = media.strip(" \"'").lower()
    charset = re.search(r"charset\s*=\s*[\"']?([^\s\"';,]+)", parameters, re.IGNORECASE)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = unchunk(body)
    return {"status": int(status.group(1)), "content_type": media, "charset": charset.group(1) if charset else "",
            "kind": "text" if media == "text/plain" else "html", "body": body,
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
    if body.startswith(GZIP) and (not encoding or "gzip" in encoding):
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
        return {"drop": "body_too_large"} if unpacker.unconsumed_tail else {"body": whole}
    return {"body": body} if encoding == "deflate" else {"drop": "content_encoding"}


# --------------------------------------------------------------------------------------------------------------------
# JSON lines and text files

def json_pages(window, source):
    """One page a line, from objects with a "text" (or "content", "raw_content"). Each line is judged by itself.

    Lines are bytes up to "\\n": str.splitlines would also cut at U+2028 and U+0085, which occur inside texts.
    """
    for number, line in enumerate(iter(lambda: window.line(RECORD_LIMIT), b""), 1):
        page = {"url": "", "id": f"{source}:{number}", "date": "", "kind": "text", "body": line}
        if len(line) >= RECORD_LIMIT:
            while line and not line.endswith(b"\n"):
                line = window.line(LINE_LIMIT)
            yield page | {"drop": "json_too_long", "body": page["body"][:1000]}
        elif line.strip():
            yield page | json_page(line)


def json_page(line):
    try:
        item = json.loads(line.decode("utf-8-sig"))              # the first one may begin with a byte order mark
    except UnicodeDecodeError:
        return {"drop": "json_not_utf8"}
    except (RecursionError, ValueError):              # bad JSON, very deep JSON, an integer of thousands of digits
        return {"drop": "json_syntax"}
    if not isinstance(item, dict):
        return {"drop": "json_not_an_object"}
    text = next((item[key] for key in ("text", "raw_content", "content") if key in item), None)
    if not isinstance(text, str):
        return {"drop": "json_no_text"}
    page = {"text": text, "url": item.get("url", ""), "date": item.get("date", item.get("date_download", ""))}
    if isinstance(item.get("id"), (str, int)):
        page["id"] = str(item["id"])
    # Half of a surrogate pair is valid JSON ("\\ud83d") but no text: nothing could be written with it.
    return {key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""
            for key, value in page.items()}


def text_page(window, source):
    """A text file is one page."""
    page = {"url": "", "id": source, "date": "", "kind": "text", "body": window.take(RECORD_LIMIT), "charset": ""}
    return page | {"drop": "file_too_long"} if window.peek(1) else page
