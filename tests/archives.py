"""Builds small archives for the tests of the data stage: WARC records with right or wrong lengths, HTTP responses."""

import gzip


def record(kind, block, url="http://a.example/", eol=b"\r\n", length=None, extra=()):
    """One WARC record. length: the text of its Content-Length, by default the right one; "" leaves the header out."""
    length = str(len(block)) if length is None else length
    lines = [b"WARC/1.0", b"WARC-Type: " + kind.encode(), b"WARC-Target-URI: " + url.encode(),
             b"WARC-Date: 2020-01-01T00:00:00Z", b"WARC-Record-ID: <urn:uuid:" + url.encode() + b">", *extra]
    if length:
        lines.append(b"Content-Length: " + length.encode())
    return eol.join(lines) + eol + eol + block + eol + eol


def http(body, status="HTTP/1.1 200 OK", headers=("Content-Type: text/html; charset=utf-8",), eol=b"\r\n"):
    return eol.join([status.encode(), *(header.encode("latin-1") for header in headers)]) + eol + eol + body


def response(body, url="http://a.example/", **options):
    return record("response", http(body, **options), url)


def html(text):
    return f"<html><body><p>{text}</p></body></html>".encode()


def members(records):
    """Each record as a gzip member of its own."""
    return b"".join(gzip.compress(part, mtime=0) for part in records)


PROSE = ("The committee met on Tuesday and agreed that the bridge should be repaired before the winter. "
         "Several members asked how much the work would cost and who was going to pay for it. "
         "Nobody had an answer to that question, so they decided to write a letter to the council. ")


def prose(name):
    """A document that passes all filters and resembles no other name's."""
    words = [f"{name}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    return PROSE + " ".join(f"The {word} of {name} went to the house and found the {word} there." for word in words)
