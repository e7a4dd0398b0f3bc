"""From a file to a stream of decompressed bytes, and a window that moves over it.

The container is told by its first bytes, never by the file's name. A .warc.gz is many gzip members one after the other
(one a record), so that a damaged one costs one record: after damage we look for the next member and go on. Everything
that is lost on the way is counted in `losses`.
"""

import zlib

import zstandard

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
ZSTD_DICTIONARY = b"\x5d\x2a\x4d\x18"     # the skippable frame in which .warc.zst files may carry their dictionary
CHUNK = 1 << 16
# A kilobyte of zstd can stand for 32 MB (one repeated byte takes 4 bytes a 128 KB block), and its decompressor has no
# limit on output. Feeding it little at a time bounds what one call can return.
ZSTD_CHUNK = 1 << 10
PIECE = 1 << 20                            # most bytes that one call of the gzip decompressor may return


def chunks(path, losses, max_decompressed):
    """Yield the decompressed bytes of the file at `path` in pieces; stops, and counts it, after `max_decompressed`.

    losses (a Counter) gains: truncated, bad_gzip, bad_zstd, zstd_dictionary, over_cap. Raises OSError.
    """
    total = 0
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
            if total + len(piece) > max_decompressed:
                losses["over_cap"] += 1
                yield piece[:max_decompressed - total]
                return
            total += len(piece)
            yield piece


def _gunzip(file, losses):
    """The members of a gzip file, one after the other, with zeros allowed between them as tapes leave them."""
    raw = file.read(CHUNK)
    healthy = True
    while raw:
        if healthy:                                    # at a member's start: skip padding, then expect the magic
            raw = raw.lstrip(b"\0")
        if len(raw) < 18:                              # a member is at least 18 bytes
            raw += file.read(CHUNK)
        if not raw.strip(b"\0"):
            raw = file.read(CHUNK)
            continue
        if not raw.startswith(GZIP):
            if healthy:
                losses["bad_gzip"] += 1
                healthy = False
            raw = _next_member(raw, file, start=0)
            continue
        member = zlib.decompressobj(wbits=31)
        tried = raw
        try:
            while not member.eof:
                if not raw:
                    losses["truncated"] = 1            # the file ends inside a member
                    return
                piece = member.decompress(raw, PIECE)
                raw = member.unconsumed_tail
                yield piece
                if not raw and not member.eof:
                    tried = raw = file.read(CHUNK)
            raw = member.unused_data or file.read(CHUNK)
            healthy = True
        except zlib.error:                             # damaged data or a wrong checksum
            if healthy:
                losses["bad_gzip"] += 1
                healthy = False
            raw = _next_member(tried, file, start=1)
            yield b"\r\n\r\n"                        # so that the next record begins on a line of its own


def _next_member(raw, file, start):
    """`raw` from the next place on that looks like a gzip member (magic, deflate, no reserved flag); b"" at the end."""
    while True:
        at = raw.find(b"\x1f\x8b\x08", start)
        if at >= 0 and len(raw) > at + 3:
            if raw[at + 3] < 0x20:
                return raw[at:]
            start = at + 1
            continue
        more = file.read(CHUNK)
        if not more:
            return b""
        raw, start = (raw[at:] if at >= 0 else raw[-2:]) + more, 0


def _unzstd(file, losses):
    """All frames of a zstd file. (The library's own reader stops after the first one unless it is told not to.)"""
    raw = file.read(ZSTD_CHUNK)
    try:
        while raw:
            frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            while not frame.eof:
                if not raw:
                    losses["truncated"] = 1
                    return
                yield frame.decompress(raw)
                raw = b"" if frame.eof else file.read(ZSTD_CHUNK)
            raw = frame.unused_data or file.read(ZSTD_CHUNK)
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
        while True:
            end = self.buffer.find(b"\n", searched)
            if 0 <= end < limit:
                return self.take(end + 1)
            if len(self.buffer) >= limit:
                return self.take(limit)
            searched = len(self.buffer)
            if self.fill(searched + 1) == searched:
                return self.take(searched)
