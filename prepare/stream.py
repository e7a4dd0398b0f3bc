"""From a file to a stream of decompressed bytes, and a window that moves over it.

The container is told by its first bytes, never by the file's name. A .warc.gz is many gzip members one after the other
(one a record), so that a damaged one costs one record: after damage we look for the next member and go on. Everything
that is lost on the way is counted in `losses`.
"""

import os
import re
import zlib
from collections import Counter

import zstandard

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
DICTIONARY = b"\x5d\x2a\x4d\x18"         # a skippable frame, the first of .warc.zst files
DICTIONARY_LIMIT = 64 << 20
# How a gzip member begins: magic, deflate, no reserved flag; what has been read may end (\Z) anywhere in it.
MEMBER = re.compile(rb"\x1f(\Z|\x8b(\Z|\x08(\Z|[\x00-\x1f])))")
# A frame of zstd, and one that is skipped: 16 magic numbers.
FRAME = re.compile(rb"\x28(\Z|\xb5(\Z|\x2f(\Z|\xfd)))|[\x50-\x5f](\Z|\x2a(\Z|\x4d(\Z|\x18)))")
CHUNK = 1 << 16
# A kilobyte of zstd can stand for 32 MB (one repeated byte takes 4 bytes a 128 KB block), and its decompressor has no
# limit on output. Feeding it little at a time bounds what one call can return.
ZSTD_CHUNK = 1 << 10
PIECE = 1 << 20                            # most bytes that one call of the gzip decompressor may return


def chunks(path, losses, max_decompressed, position=lambda at: None):
    """Yield the decompressed bytes of the file at `path` in pieces; stops, and counts it, after `max_decompressed`.

    losses (a Counter) gains: truncated, bad_gzip, bad_zstd, over_cap; bytes_file, and of those bytes_damaged, which
    were passed over. position(bytes) is told how far the file has been read. Raises OSError.
    """
    left = max_decompressed
    with open(path, "rb") as file:
        losses["bytes_file"] += os.fstat(file.fileno()).st_size
        magic = file.read(4)
        file.seek(0)
        if magic[:2] == GZIP:
            source = _members(file, losses, "bad_gzip", MEMBER, lambda: zlib.decompressobj(wbits=31), CHUNK, PIECE)
        elif len(magic) == 4 and FRAME.match(magic):
            words = _dictionary(file, losses)
            if words is None:
                return
            # All frames: the library's own reader stops after the first one unless it is told not to.
            new = lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31, **words).decompressobj()
            source = _members(file, losses, "bad_zstd", FRAME, new, ZSTD_CHUNK)
        else:
            source = iter(lambda: file.read(CHUNK), b"")
        for piece in source:
            position(file.tell())
            if len(piece) > left:
                losses["over_cap"] += 1
                yield piece[:left]
                return
            left -= len(piece)
            yield piece


def text_of(path, limit=1 << 40):
    """The text of a file that a setting names, plain or compressed, up to about `limit` bytes. ValueError if it is
    none: what is compared with noise finds nothing, and nobody would notice."""
    losses = Counter()
    data = b"".join(chunks(path, losses, limit))
    if b"\0" in data or not data.strip() or losses.keys() & {"truncated", "bad_gzip", "bad_zstd"}:
        raise ValueError(f"{path} is empty, damaged or no text; expected UTF-8, as it is or in gzip or zstd")
    return data.decode("utf-8-sig", "replace")


def _members(file, losses, kind, heads, new, size, *limit):
    """What is in the members of a gzip file or the frames of a zstd file, one after the other, with zeros allowed
    between them as tapes leave them. heads finds where one begins, new() makes its decompressor, which gets `size`
    bytes at a time; limit: the most that one call of it may return."""
    member, raw, healthy = None, b"", True             # not healthy: between damage and the next member that is sound
    begin = 0                                          # of the member, in the file
    for piece in iter(lambda: file.read(size), b""):
        raw += piece                                   # to the beginning of a head, if there is one
        tried = raw
        while raw:
            if not member:
                head = heads.search(raw)
                start = head.start() if head else len(raw)
                if healthy and raw[:start].strip(b"\0"):
                    losses[kind] += 1
                    healthy = False
                losses["bytes_damaged"] += 0 if healthy else start
                raw = raw[start:]
                if len(raw) < 4:
                    break
                member, tried, begin = new(), raw[1:], file.tell() - len(raw)
            try:
                yield member.decompress(raw, *limit)
                raw = member.unconsumed_tail
                if member.eof:
                    raw, member, healthy = member.unused_data, None, True
            except (zlib.error, zstandard.ZstdError):  # damaged data or a wrong checksum
                losses[kind] += healthy
                raw, member, healthy = tried, None, False
                losses["bytes_damaged"] += file.tell() - len(raw) - begin
                yield b"\r\n\r\n"                    # so that the next record begins on a line of its own
    if member or raw:
        losses["truncated"] = 1                        # the file ends inside a member


def _dictionary(file, losses):
    """The dictionary for all frames of a zstd file, which a skippable frame at its beginning may hold (IIPC's
    warc-zstd), as keywords of the decompressor; None for one that is no good."""
    head = file.read(8)
    if head[:4] != DICTIONARY:
        file.seek(0)
        return {}
    size = int.from_bytes(head[4:], "little")
    content = file.read(min(size, DICTIONARY_LIMIT))
    if len(head) < 8 or len(content) < size:
        losses["truncated" if len(content) < DICTIONARY_LIMIT else "bad_zstd"] += 1
        return None
    try:
        if content.startswith(ZSTD):
            content = zstandard.ZstdDecompressor().stream_reader(content).read(DICTIONARY_LIMIT)
        words = {"dict_data": zstandard.ZstdCompressionDict(content)}
        zstandard.ZstdDecompressor(**words).decompressobj()            # where a broken one is noticed
        return words
    except (zstandard.ZstdError, ValueError):
        losses["bad_zstd"] += 1
        return None


class Window:
    """A buffer over a stream of pieces, from which lines and blocks are taken."""

    def __init__(self, pieces):
        self.pieces = iter(pieces)
        self.buffer = bytearray()
        self.taken = 0                 # how many bytes have been

    def fill(self, size):
        """Try to have `size` bytes ready; the number that are."""
        while len(self.buffer) < size:
            piece = next(self.pieces, None)
            if piece is None:
                break
            self.buffer += piece
        return len(self.buffer)

    def peek(self, size):
        self.fill(size)
        return bytes(self.buffer[:size])

    def take(self, size):
        """The next `size` bytes, fewer only at the end of the stream."""
        data = self.peek(size)
        del self.buffer[:len(data)]
        self.taken += len(data)
        return data

    def line(self, limit):
        """The next line with its line end, cut at `limit` bytes; b"" at the end of the stream."""
        searched = 0
        while (end := self.buffer.find(b"\n", searched, limit)) < 0 and len(self.buffer) < limit:
            searched = len(self.buffer)
            if self.fill(searched + 1) == searched:
                break
        return self.take(end + 1 if end >= 0 else limit)
