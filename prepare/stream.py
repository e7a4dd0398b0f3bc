"""From a file to a stream of decompressed bytes, and a window that moves over it.

The container is told by its first bytes, never by the file's name. A .warc.gz is many gzip members one after the other
(one a record), so that a damaged one costs one record: after damage we look for the next member and go on. Everything
that is lost on the way is counted in `losses`.
"""

import os
import re
import zlib

import zstandard

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# A skippable frame of zstd: 16 magic numbers, then its length. In the first of .warc.zst files lies their dictionary.
SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
DICTIONARY = b"\x5d\x2a\x4d\x18"
DICTIONARY_LIMIT = 64 << 20
FRAME = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
# How a gzip member begins: magic, deflate, no reserved flag; what has been read may end (\Z) anywhere in it.
MEMBER = re.compile(rb"\x1f(\Z|\x8b(\Z|\x08(\Z|[\x00-\x1f])))")
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
            source = _gunzip(file, losses)
        elif magic == ZSTD or SKIPPABLE.match(magic):
            source = _unzstd(file, losses)
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


def _gunzip(file, losses):
    """The members of a gzip file, one after the other, with zeros allowed between them as tapes leave them."""
    member, raw, healthy = None, b"", True             # not healthy: between damage and the next member that is sound
    begin = 0                                          # of the member, in the file
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
                losses["bytes_damaged"] += 0 if healthy else start
                raw = raw[start:]
                if len(raw) < 4:
                    break
                member, tried, begin = zlib.decompressobj(wbits=31), raw[1:], file.tell() - len(raw)
            try:
                yield member.decompress(raw, PIECE)
                raw = member.unconsumed_tail
                if member.eof:
                    raw, member, healthy = member.unused_data, None, True
            except zlib.error:                         # damaged data or a wrong checksum
                losses["bad_gzip"] += healthy
                raw, member, healthy = tried, None, False
                losses["bytes_damaged"] += file.tell() - len(raw) - begin
                yield b"\r\n\r\n"                    # so that the next record begins on a line of its own
    if member or raw:
        losses["truncated"] = 1                        # the file ends inside a member


def _unzstd(file, losses):
    """All frames of a zstd file (the library's own reader stops after the first one unless it is told not to); the
    dictionary that a skippable frame at the beginning may hold is used for all of them (IIPC's warc-zstd)."""
    raw, words = file.read(8), {}
    if raw[:4] == DICTIONARY:
        size = int.from_bytes(raw[4:], "little")
        content = file.read(min(size, DICTIONARY_LIMIT))
        if len(raw) < 8 or len(content) < size:
            losses["truncated" if len(content) < min(size, DICTIONARY_LIMIT) else "bad_zstd"] += 1
            return
        try:
            if content.startswith(ZSTD):
                content = zstandard.ZstdDecompressor().stream_reader(content).read(DICTIONARY_LIMIT)
            words, raw = {"dict_data": zstandard.ZstdCompressionDict(content)}, b""
            zstandard.ZstdDecompressor(**words).decompressobj()        # where a broken one is noticed
        except (zstandard.ZstdError, ValueError):
            losses["bad_zstd"] += 1
            return
    frame, healthy, begin = None, True, 0
    for piece in iter(lambda: file.read(ZSTD_CHUNK), b""):
        raw += piece
        tried = raw
        while raw:
            if not frame:
                head = FRAME.search(raw)
                start = head.start() if head else max(0, len(raw) - 3)
                if start and healthy:
                    losses["bad_zstd"] += 1
                    healthy = False
                losses["bytes_damaged"] += start
                raw = raw[start:]
                if not head:
                    break
                frame = zstandard.ZstdDecompressor(max_window_size=1 << 31, **words).decompressobj()
                tried, begin = raw[1:], file.tell() - len(raw)
            try:
                yield frame.decompress(raw)
                raw, frame, healthy = (frame.unused_data, None, True) if frame.eof else (b"", frame, healthy)
            except zstandard.ZstdError:
                losses["bad_zstd"] += healthy
                raw, frame, healthy = tried, None, False
                losses["bytes_damaged"] += file.tell() - len(raw) - begin
                yield b"\r\n\r\n"
    if frame or raw:
        losses["truncated"] = 1


class Window:
    """A buffer over a stream of pieces, from which lines and blocks are taken and to which they can be given back."""

    def __init__(self, pieces):
        self.pieces = iter(pieces)
        self.buffer = bytearray()
        self.taken = 0                 # how many bytes have been, without those that were given back

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

    def give_back(self, data):
        self.buffer[:0] = data
        self.taken -= len(data)

    def line(self, limit):
        """The next line with its line end, cut at `limit` bytes; b"" at the end of the stream."""
        searched = 0
        while (end := self.buffer.find(b"\n", searched, limit)) < 0 and len(self.buffer) < limit:
            searched = len(self.buffer)
            if self.fill(searched + 1) == searched:
                break
        return self.take(end + 1 if end >= 0 else limit)
