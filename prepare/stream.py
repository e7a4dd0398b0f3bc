"""From a file to a stream of decompressed bytes, and a window that moves over it.

The container is told by its first bytes, never by the file's name. A .warc.gz is many gzip members one after the other
(one a record), so that a damaged one costs one record: after damage we look for the next member and go on. Everything
that is lost on the way is counted in `losses`.
"""

import re
import zlib

import zstandard

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
ZSTD_DICTIONARY = b"\x5d\x2a\x4d\x18"     # the skippable frame in which .warc.zst files may carry their dictionary
# How a gzip member begins: magic, deflate, no reserved flag; what has been read may end (\Z) anywhere in it.
MEMBER = re.compile(rb"\x1f(\Z|\x8b(\Z|\x08(\Z|[\x00-\x1f])))")
CHUNK = 1 << 16
# A kilobyte of zstd can stand for 32 MB (one repeated byte takes 4 bytes a 128 KB block), and its decompressor has no
# limit on output. Feeding it little at a time bounds what one call can return.
ZSTD_CHUNK = 1 << 10
PIECE = 1 << 20                            # most bytes that one call of the gzip decompressor may return


def chunks(path, losses, max_decompressed):
    """Yield the decompressed bytes of the file at `path` in pieces; stops, and counts it, after `max_decompressed`.

    losses (a Counter) gains: truncated, bad_gzip, bad_zstd, zstd_dictionary, over_cap. Raises OSError.
    """
    left = max_decompressed
    with open(path, "rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic[:2] == GZIP:
            source = _gunzip(file, losses)
        elif magic == ZSTD:
            source = _unzstd(file, losses)
        elif magic == ZSTD_DICTIONARY:
            losses["zstd_dictionary"] += 1     # would need the dictionary; recompress with plain zstd
            return
        else:
            source = iter(lambda: file.read(CHUNK), b"")
        for piece in source:
            if len(piece) > left:
                losses["over_cap"] += 1
                yield piece[:left]
                return
            left -= len(piece)
            yield piece


def _gunzip(file, losses):
    """The members of a gzip file, one after the other, with zeros allowed between them as tapes leave them."""
    member, raw, healthy = None, b"", True             # not healthy: between damage and the next member that is sound
    for piece in iter(lambda: file.read(CHUNK), b""):
        raw += piece                                   # to the beginning of a head, if there is one
        tried = raw
        while raw:
            if not member:
                head = MEMBER.search(raw)
                start = head.start() if head else len(raw)
                if healthy and raw[:start].strip(b"\0"):
                    losses["bad_gzip"] += 1
                    healthy = False
                raw = raw[start:]
                if len(raw) < 4:
                    break
                member, tried = zlib.decompressobj(wbits=31), raw[1:]
            try:
                yield member.decompress(raw, PIECE)
                raw = member.unconsumed_tail
                if member.eof:
                    raw, member, healthy = member.unused_data, None, True
            except zlib.error:                         # damaged data or a wrong checksum
                losses["bad_gzip"] += healthy
                raw, member, healthy = tried, None, False
                yield b"\r\n\r\n"                    # so that the next record begins on a line of its own
    if member or raw:
        losses["truncated"] = 1                        # the file ends inside a member


def _unzstd(file, losses):
    """All frames of a zstd file. (The library's own reader stops after the first one unless it is told not to.)"""
    frame = None
    try:
        for raw in iter(lambda: file.read(ZSTD_CHUNK), b""):
            while raw:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                yield frame.decompress(raw)
                raw, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if frame:
            losses["truncated"] = 1
    except zstandard.ZstdError:
        losses["bad_zstd"] += 1


class Window:
    """A buffer over a stream of pieces, from which lines and blocks are taken and to which they can be given back."""

    def __init__(self, pieces):
        self.pieces = iter(pieces)
        self.buffer = bytearray()

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
        return data

    def give_back(self, data):
        self.buffer[:0] = data

    def line(self, limit):
        """The next line with its line end, cut at `limit` bytes; b"" at the end of the stream."""
        searched = 0
        while (end := self.buffer.find(b"\n", searched, limit)) < 0 and len(self.buffer) < limit:
            searched = len(self.buffer)
            if self.fill(searched + 1) == searched:
                break
        return self.take(end + 1 if end >= 0 else limit)
