"""The archive reader on damaged, odd and hostile input: nothing crashes, what can be read is, every loss is counted."""

import gzip
import json
import time
import tracemalloc
import zlib
from collections import Counter

import pytest
import zstandard

from archives import html, http, members, record, response
from prepare import warc
from prepare.stream import Window, chunks
from prepare.warc import read_pages, size_of, unpack


def read(path, **options):
    """(pages, losses), and no byte of it unaccounted for: a second pass over the file counts what is unpacked."""
    losses = Counter()
    pages = list(read_pages(path, losses, **options))
    if path.suffix != ".parquet":
        unpacked = sum(map(len, chunks(path, Counter(), options.get("max_decompressed", 1 << 40))))
        assert losses["bytes_read"] == unpacked == losses["skipped_bytes"] + sum(
            losses[name] for name in ("bytes_pages", "bytes_heads", "bytes_other"))
    assert sum(map(size_of, pages)) == losses["bytes_pages"] + losses["bytes_unpacked"]
    assert losses["bytes_file"] == path.stat().st_size and 0 <= losses["bytes_damaged"] <= losses["bytes_file"]
    return pages, Counter({name: count for name, count in losses.items() if not name.startswith("bytes_")})


def read_bytes(folder, data, name="x.warc", **options):
    path = folder / name
    path.write_bytes(data)
    return read(path, **options)


def urls(pages):
    return [page["url"][-1] for page in pages]


def three(second, **options):
    """Three records, the second one as given."""
    return [response(html("one"), "http://a.example/1"), second, response(html("three"), "http://a.example/3")]


# --------------------------------------------------------------------------------------------------------------------
# Containers

@pytest.mark.parametrize("pack", [
    bytes, gzip.compress, lambda data: zstandard.compress(data),
    lambda data: members(three(response(html("two"), "http://a.example/2"))),
    lambda data: members(three(response(html("two"), "http://a.example/2"))) + b"\0" * 70_000,     # as tapes do
], ids=["plain", "one member", "zstd", "a member a record", "zero padding"])
def test_the_container_is_told_by_its_bytes_whatever_the_name(tmp_path, pack):
    data = b"".join(three(response(html("two"), "http://a.example/2")))
    for name in ("x.warc", "x.warc.gz", "x.warc.zst"):
        pages, losses = read_bytes(tmp_path, pack(data), name)
        assert urls(pages) == ["1", "2", "3"]
        assert losses == {"records": 3}


@pytest.mark.parametrize("gap", [b"", b"\0" * 3000], ids=["one behind the other", "zeros between"])
def test_d17_all_frames_of_a_zstd_file_are_read(tmp_path, gap):
    lines = [json.dumps({"text": f"line {i}"}).encode() + b"\n" for i in range(4)]
    data = zstandard.compress(b"".join(lines[:2])) + gap + zstandard.compress(b"".join(lines[2:])) + gap
    pages, losses = read_bytes(tmp_path, data, "x.jsonl.zst")
    assert [page["text"] for page in pages] == [f"line {i}" for i in range(4)] and not losses


def test_d3_a_cut_off_gzip_keeps_what_stands_before_the_cut_and_is_marked(tmp_path):
    data = members(three(response(b"<p>" + bytes(range(32, 127)) * 3000, "http://a.example/2")))
    start = time.process_time()
    for cut in range(2, len(data) - 1, 97):
        pages, losses = read_bytes(tmp_path, data[:cut], "x.warc.gz")
        assert urls(pages) == ["1", "2", "3"][:len(pages)]
        # A cut exactly between two members cannot be seen; none of these is one.
        assert losses["truncated"] == 1
    assert time.process_time() - start < 20


def test_a_cut_off_zstd_and_a_cut_off_plain_file_are_marked_too(tmp_path):
    data = b"".join(three(response(html("two"), "http://a.example/2")))
    pages, losses = read_bytes(tmp_path, zstandard.compress(data)[:-9], "x.warc.zst")
    assert losses["truncated"] == 1
    pages, losses = read_bytes(tmp_path, data[:-30])
    assert urls(pages) == ["1", "2"] and losses["truncated"] == 1 and losses["skipped_bytes"] > 0


@pytest.mark.parametrize("where", ["head", "middle", "checksum", "magic"])
def test_a_damaged_gzip_member_costs_its_record_only(tmp_path, where):
    parts = [bytearray(members([part])) for part in three(response(html("two " * 500), "http://a.example/2"))]
    place = {"head": 12, "middle": len(parts[1]) // 2, "checksum": -6, "magic": 0}[where]
    parts[1][place] ^= 0x55
    pages, losses = read_bytes(tmp_path, b"".join(parts), "x.warc.gz")
    assert urls(pages) == ["1", "3"] and losses["bad_gzip"] == 1


def test_each_damage_is_counted_once_however_many_false_heads_follow_it(tmp_path):
    parts = [bytearray(members([response(html("page " * 200), f"http://a.example/{i}")])) for i in range(5)]
    for part in (parts[1], parts[3]):
        part[len(part) // 2] ^= 0x55
        part[-20:-20] = b"\x1f\x8b\x08\0" * 4
    pages, losses = read_bytes(tmp_path, b"".join(parts), "x.warc.gz")
    assert urls(pages) == ["0", "2", "4"] and losses["bad_gzip"] == 2


def test_lines_are_cut_at_the_limit_wherever_their_end_is():
    window = Window(iter([b"abcdefgh\nij", b"kl"]))
    assert [window.line(5) for _ in range(5)] == [b"abcde", b"fgh\n", b"ijkl", b"", b""]


@pytest.mark.parametrize("gap", [b"", b"\0" * 200_000, b"junk" * 40_000], ids=["none", "zeros", "junk"])
@pytest.mark.parametrize("shift", range(5))
def test_the_head_of_a_gzip_member_may_lie_across_the_edge_of_a_read(tmp_path, shift, gap):
    import random
    first = members([response(random.Random(0).randbytes(70_000), "http://a.example/1")])
    gap += b"\0" * (-len(first + gap) % 65_536 + 65_536 - shift)
    second = members([response(html("two"), "http://a.example/2")])
    pages, losses = read_bytes(tmp_path, first + gap + second, "x.warc.gz")
    assert urls(pages) == ["1", "2"] and losses["bad_gzip"] == (b"junk" in gap)


def test_a_member_that_begins_right_behind_another_at_the_edge_of_a_read(tmp_path):
    def first(size):
        return gzip.compress(record("metadata", b"x" * size), compresslevel=0, mtime=0)
    second = members([response(html("two"), "http://a.example/2")])
    for shift in range(5):
        size = 65_536 - shift - len(first(65_000)) + 65_000
        assert len(first(size)) == 65_536 - shift
        pages, losses = read_bytes(tmp_path, first(size) + second, "x.warc.gz")
        assert urls(pages) == ["2"] and losses == {"records": 2, "other_records": 1}


def test_what_was_unpacked_before_the_damage_does_not_spoil_the_next_record(tmp_path):
    import random
    records = three(response(random.Random(0).randbytes(3_000_000), "http://a.example/2"))
    parts = [bytearray(members([part])) for part in records]
    parts[1][-1000] ^= 0x55                                       # near the end: much of it has been handed on by then
    pages, losses = read_bytes(tmp_path, b"".join(parts), "x.warc.gz")
    assert urls(pages)[-1] == "3" and losses["bad_gzip"] == 1


def test_garbage_behind_the_last_member(tmp_path):
    data = members(three(response(html("two"), "http://a.example/2"))) + b"garbage" * 9
    pages, losses = read_bytes(tmp_path, data, "x.gz")
    assert urls(pages) == ["1", "2", "3"] and losses["bad_gzip"] == 1


def test_decompression_stops_at_the_cap(tmp_path):
    bombs = [pack(b"a" * 200_000_000) for pack in (gzip.compress, zstandard.compress)]
    tracemalloc.start()
    pages, losses = read_bytes(tmp_path, bombs[0], "x.txt.gz", max_decompressed=5_000_000)
    assert losses["over_cap"] == 1
    pages, losses = read_bytes(tmp_path, bombs[1], "x.jsonl.zst", max_decompressed=5_000_000)
    assert losses["over_cap"] == 1 and "text" not in pages[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000_000


def test_a_bomb_inside_a_response_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(warc, "RECORD_LIMIT", 1_000_000)
    body = gzip.compress(b"a" * 3_000_000)
    pages, _ = read_bytes(tmp_path, response(body, headers=("Content-Type: text/html", "Content-Encoding: gzip")))
    assert pages[0]["drop"] == "body_too_large"


@pytest.mark.parametrize("pack", [bytes, zstandard.compress], ids=["as it is", "compressed"])
def test_zstd_with_its_dictionary_inside(tmp_path, pack):
    """As archive.org writes it: a skippable frame with a dictionary, then a frame a record that needs it."""
    records = [response(html(f"page {i} " * 20), f"http://a.example/{i}") for i in range(9)]
    words = zstandard.train_dictionary(800, records * 20)
    content = pack(words.as_bytes())
    head = b"\x5d\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content
    frames = [zstandard.ZstdCompressor(dict_data=words).compress(part) for part in records]
    with pytest.raises(zstandard.ZstdError):
        zstandard.ZstdDecompressor().decompress(frames[0])
    pages, losses = read_bytes(tmp_path, head + b"".join(frames), "x.warc.zst")
    assert urls(pages) == list("012345678") and losses == {"records": 9}
    for cut in (6, 40, len(head) - 1):
        assert read_bytes(tmp_path, head[:cut], "x.warc.zst")[1] == {"truncated": 1}
    pages, losses = read_bytes(tmp_path, head[:8] + b"\x37\xa4\x30\xec" + bytes(len(content) - 4) + frames[0], "x")
    assert not pages and losses == {"bad_zstd": 1}                            # no dictionary, though it begins like one
    skippable = b"\x50\x2a\x4d\x18" + (70_000).to_bytes(4, "little") + b"x" * 70_000
    pages, losses = read_bytes(tmp_path, skippable.join(map(zstandard.compress, records)), "x")
    assert urls(pages) == list("012345678") and losses == {"records": 9}


@pytest.mark.parametrize("where", ["head", "middle", "junk between"])
def test_a_damaged_zstd_frame_costs_its_record_only(tmp_path, where):
    import random
    records = three(response(random.Random(0).randbytes(5000), "http://a.example/2"))
    parts = [bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(part)) for part in records]
    if where == "junk between":
        parts[1] = b"junk" * 2000
    else:
        parts[1][{"head": 1, "middle": 2500}[where]] ^= 0x55
    pages, losses = read_bytes(tmp_path, b"".join(map(bytes, parts)), "x.warc.zst")
    assert urls(pages)[0] == "1" and urls(pages)[-1] == "3" and losses["bad_zstd"] == 1
    assert "2" not in urls(pages) or where == "middle"


# --------------------------------------------------------------------------------------------------------------------
# Records

def test_d13_the_mark_inside_a_block_of_right_length_is_text(tmp_path):
    body = b"line\r\nWARC/1.0\r\nWARC-Type: fake\r\n\r\nend"
    pages, losses = read_bytes(tmp_path, b"".join(three(response(body, "http://a.example/2"))))
    assert urls(pages) == ["1", "2", "3"] and pages[1]["body"] == body
    assert losses == {"records": 3}


@pytest.mark.parametrize("pack", [b"".join, members], ids=["plain", "members"])
@pytest.mark.parametrize("wrong", ["short", "long", "missing", "-5", "2 bytes", "1" + "0" * 15, "1" * 400, "+1", "0x1"])
def test_d14_wrong_lengths(tmp_path, wrong, pack):
    block = http(html("two"))
    length = {"short": str(len(block) - 4), "long": str(len(block) + 30), "missing": ""}.get(wrong, wrong)
    records = three(record("response", block, "http://a.example/2", length=length))
    tracemalloc.start()
    pages, losses = read_bytes(tmp_path, pack(records))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert urls(pages) in (["1", "3"], ["1", "2", "3"])
    assert losses["bad_length"] == 1
    assert peak < 10_000_000
    if wrong in ("short", "long"):
        assert urls(pages) == ["1", "2", "3"]
        assert pages[1]["body"][:20] == html("two")[:20] and b"WARC" not in pages[1]["body"]


def test_a_length_too_long_in_the_last_record_is_a_truncated_file(tmp_path):
    pages, losses = read_bytes(tmp_path, response(html("one"), "http://a.example/1")
                               + record("response", http(html("two")), "http://a.example/2", length="99999"))
    assert urls(pages) == ["1"] and losses["truncated"] == 1


def test_a_length_that_swallows_the_rest_of_the_file_gives_it_back(tmp_path):
    pages, losses = read_bytes(tmp_path, b"".join(three(record("response", http(html("two")), "http://a.example/2",
                                                               length="99999"))))
    assert urls(pages) == ["1", "2", "3"] and losses["bad_length"] == 1 and not losses["truncated"]


def test_records_around_a_gap_larger_than_the_buffers(tmp_path):
    junk = record("response", b"x" * 300_000, "http://a.example/2", length="")
    pages, losses = read_bytes(tmp_path, b"".join(three(junk)))
    assert urls(pages) == ["1", "3"] and losses["skipped_bytes"] > 299_000
    junk = record("response", b"line of junk\n" * 30_000, "http://a.example/2", length="nonsense")
    pages, losses = read_bytes(tmp_path, b"".join(three(junk)))
    assert urls(pages) == ["1", "3"]


@pytest.mark.parametrize("edge", [65536, 131072])
@pytest.mark.parametrize("shift", range(0, 60, 3))
def test_the_mark_of_the_next_record_may_lie_across_the_edge_of_a_read(tmp_path, shift, edge):
    def parts(size):
        return three(record("response", b"x" * size, "http://a.example/2", length="?"))
    room = edge - shift - sum(map(len, parts(0)[:2]))
    data = parts(room)
    assert len(data[0] + data[1]) == edge - shift                # there the third one's mark begins
    pages, _ = read_bytes(tmp_path, b"".join(data))
    assert urls(pages) == ["1", "3"]


def test_a_length_of_10_to_the_15_does_not_read_the_rest_of_the_file_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(warc, "RECORD_LIMIT", 1 << 20)
    data = b"".join(three(record("response", b"x" * 40_000_000, "http://a.example/2", length="1" + "0" * 15)))
    (tmp_path / "x.warc").write_bytes(data)
    tracemalloc.start()
    pages, losses = read(tmp_path / "x.warc")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert urls(pages) == ["1", "3"] and losses["bad_length"] == 1 and peak < 10_000_000


def test_d14_lengths_that_reach_far_beyond_the_next_records_take_no_quadratic_time(tmp_path):
    whole = record("response", http(html("text")), length="60000000") * 8000
    start = time.process_time()
    pages, losses = read_bytes(tmp_path, whole)
    assert len(pages) == losses["bad_length"] == 7999 and losses["truncated"] and time.process_time() - start < 5


def test_d15_line_feeds_only(tmp_path):
    records = [record("response", http(html(str(i)), eol=b"\n"), f"http://a.example/{i}", eol=b"\n") for i in (1, 2)]
    pages, losses = read_bytes(tmp_path, b"".join(records))
    assert urls(pages) == ["1", "2"] and [page["body"] for page in pages] == [html("1"), html("2")]
    assert [page["status"] for page in pages] == [200, 200] and losses == {"records": 2}


def test_headers_in_odd_spellings(tmp_path):
    block = http(html("x"))
    data = (b"\r\n\r\nWARC/1.1\r\nwarc-type:response\r\nWARC-TARGET-URI:\t<http://a.example/odd>\r\n"
            b"X-Long: one\r\n  two\r\nX-\xff: \xfe\r\nno colon here\r\n"
            b"content-length: " + str(len(block)).encode() + b"\r\n\r\n" + block)
    pages, losses = read_bytes(tmp_path, data)
    assert [page["url"] for page in pages] == ["http://a.example/odd"] and losses == {"records": 1}


def test_d7_other_kinds_give_no_documents(tmp_path):
    kinds = ("warcinfo", "request", "metadata", "resource", "revisit", "nonsense")
    data = b"".join(record(kind, http(b"")) for kind in kinds) + record("response", b"\0\1", "dns:a.example")
    pages, losses = read_bytes(tmp_path, data)
    assert pages == [] and losses == {"records": 7, "other_records": 7}


def test_wet_records_have_no_http_part(tmp_path):
    data = record("warcinfo", b"x") + record("conversion", "Zwei\nZeilen, schön".encode(), "http://a.example/w")
    (page,), losses = read_bytes(tmp_path, data, "x.warc.wet")
    assert page["kind"] == "text" and "status" not in page and page["body"].decode() == "Zwei\nZeilen, schön"


def test_d9_what_is_no_archive_is_said_to_be_none(tmp_path):
    for data, name, loss in ((b"crawl-data/CC/segments/1.warc.gz\n" * 9, "warc.paths.gz", "not_a_warc"),
                             (b"<html>no archive</html>", "x.warc", "not_a_warc"), (b"", "x.warc", "empty_file"),
                             (b"", "x.jsonl", "empty_file"), (gzip.compress(b""), "x.warc.gz", "empty_file"),
                             (bytes(range(256)) * 99, "picture.bin", "not_a_warc")):
        pages, losses = read_bytes(tmp_path, data, name)
        assert pages == [] and losses[loss] == 1, name


# --------------------------------------------------------------------------------------------------------------------
# HTTP

@pytest.mark.parametrize("status", ["HTTP/2 200", "HTTP/1.1  200 OK", "HTTP/1.0 200", "http/1.1 200 Fine"])
def test_d19_status_lines(tmp_path, status):
    headers = ("Power by: x", "a line without colon", "Content-Type: text/html")
    (page,), _ = read_bytes(tmp_path, response(html("x"), status=status, headers=headers))
    assert (page["status"], page["content_type"], page["body"]) == (200, "text/html", html("x"))


@pytest.mark.parametrize("header, media, charset", [
    ('"text/html"', "text/html", ""), ('text/html;charset="utf-8"', "text/html", "utf-8"),
    ("TEXT/HTML", "text/html", ""), ("text/html ; x=1; Charset = 'ISO-8859-1'", "text/html", "ISO-8859-1"),
    ("", "", ""), ("text/html;;", "text/html", ""),
])
def test_d19_content_types(tmp_path, header, media, charset):
    (page,), _ = read_bytes(tmp_path, response(html("x"), headers=(f"content-TYPE: {header}",)))
    assert (page["content_type"], page["charset"]) == (media, charset)


def test_of_two_headers_of_one_name_the_first_counts(tmp_path):
    headers = ("Content-Type: text/html", "content-type: image/png")
    (page,), _ = read_bytes(tmp_path, response(html("x"), headers=headers))
    assert page["content_type"] == "text/html"


@pytest.mark.parametrize("headers", [
    ("Content-Type: text/html;", " charset=windows-1251"),                    # a header folded onto a second line
    ("Content-Type: text/html; title=\u00c3\u0085; charset=windows-1251",),     # 85 ends a line elsewhere
], ids=["folded", "byte 85"])
def test_a_header_ends_where_its_line_ends_and_the_next_begins(tmp_path, headers):
    (page,), _ = read_bytes(tmp_path, response(html("x"), headers=headers))
    assert (page["content_type"], page["charset"]) == ("text/html", "windows-1251")


def test_nonsense_instead_of_http(tmp_path):
    for block in (b"", b"\r\n\r\n", b"garbage", b"HTTP/1.1 abc\r\n\r\nx", bytes(range(256)),
                  b"HTTP/1.1 \xb2 OK\r\n\r\nx", b"HTTP/1.1 " + b"9" * 5000 + b"\r\n\r\nx"):
        (page,), _ = read_bytes(tmp_path, record("response", block))
        assert page["drop"] == "bad_http"


def chunked(body, size=7, eol=b"\r\n", extra=b""):
    pieces = [body[i:i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x" % len(piece) + extra + eol + piece + eol for piece in pieces) + b"0" + eol + eol


@pytest.mark.parametrize("send", [chunked, lambda body: chunked(body, 1000), lambda body: chunked(body, extra=b";a=b"),
                                  lambda body: chunked(body, eol=b"\n"), lambda body: chunked(body)[:-5],
                                  lambda body: body],
                         ids=["small", "one", "extension", "lf", "no last chunk", "not chunked at all"])
def test_d8_chunks_are_undone_only_where_there_are_some(tmp_path, send):
    body = html("Unchunked text\r\n1f40\r\nof two lines" * 9)
    headers = ("Content-Type: text/html", "Transfer-Encoding: chunked")
    (page,), _ = read_bytes(tmp_path, response(send(body), headers=headers))
    assert page["body"] == body


@pytest.mark.parametrize("encoding, pack, expected", [
    ("gzip", gzip.compress, "body"), ("x-gzip", gzip.compress, "body"), ("gzip", bytes, "body"),
    ("", gzip.compress, "body"),
    ("deflate", zlib.compress, "body"), ("deflate", lambda data: zlib.compress(data, wbits=-15), "body"),
    ("br", bytes, "content_encoding"), ("gzip", lambda data: b"\x1f\x8b\x08" + data, "content_encoding"),
])
def test_d7_bodies_are_unpacked_by_what_they_are(tmp_path, encoding, pack, expected):
    body = html("some text " * 20)
    headers = ("Content-Type: text/html", f"Content-Encoding: {encoding}")
    (page,), _ = read_bytes(tmp_path, response(pack(body), headers=headers))
    assert page.get("drop") == expected if expected != "body" else page["body"] == body


# --------------------------------------------------------------------------------------------------------------------
# JSON lines and text

@pytest.mark.parametrize("encoding", ["deflate", "identity", "utf-8", "br"])
def test_gzip_is_unpacked_under_whatever_name(encoding):
    assert unpack(gzip.compress(b"text"), encoding) == {"body": b"text", "notes": []}


def test_what_is_lost_of_a_packed_body_is_noted_and_text_that_is_called_deflate_stays():
    cut = ["unpacked_body_cut_short"]
    whole = gzip.compress(bytes(range(256)) * 9)
    assert unpack(whole[:-30], "gzip")["notes"] == cut and unpack(whole + whole, "gzip")["notes"] == cut
    assert unpack(zlib.compress(b"text" * 99)[:-3], "deflate")["notes"] == cut
    assert unpack(b"", "deflate") == unpack(b"", "gzip") == {"body": b""}
    for text in (b'd0CZ"', b"d", b"lu", b"<p>text"):                  # valid beginnings of deflate, some of them
        assert unpack(text, "deflate") == {"body": text}


def test_d25_each_line_of_json_is_judged_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(warc, "RECORD_LIMIT", 1_000_000)
    lines = [
        ('{"text": "one\u2028two\u0085three", "url": "http://a.example/1", "id": 7}'.encode(), None),
        (b'{"text": "half \\ud83d of a pair", "url": "http://a.example/\\ud83d"}', None),
        (b'{"text": "a \\u0000 nul"}', None),
        (b'{"text": "' + b"a" * 2_000_000 + b'"}', "json_too_long"),
        (b'{"text": null}', "json_no_text"),
        (b'{"url": "http://a.example/"}', "json_no_text"),
        (b'["text"]', "json_not_an_object"),
        (b'{"text": "bad utf-8 \xff"}', "json_not_utf8"),
        (b"{" * 100_000, "json_syntax"),
        (b'{"n": ' + b"9" * 9999 + b', "text": "big number"}', "json_syntax"),
        (b'{"raw_content": "ccnet", "url": null}', None),
        (b'{"text": "half a li', "json_syntax"),
    ]
    data = b"\xef\xbb\xbf" + lines[0][0] + b"\n\n  \r\n" + b"\n".join(line for line, _ in lines[1:])
    pages, losses = read_bytes(tmp_path, data, "x.jsonl")
    assert [page.get("drop") for page in pages] == [reason for _, reason in lines]
    assert pages[0]["text"] == "one\u2028two\u0085three" and pages[0]["id"] == "7" and pages[1]["id"] == "x.jsonl:4"
    for page in pages:
        (page.get("text", "") + page["url"] + page["id"]).encode("utf-8")     # nothing that cannot be written
    assert pages[10]["text"] == "ccnet" and pages[10]["url"] == ""


@pytest.mark.parametrize("data, kinds", [
    (b'{"text": "a"}\n{"text": "b"}\n', ["text"] * 2), (b'\xef\xbb\xbf{"text": "a"}', ["text"]),
    (b'\n\n' + json.dumps({"text": "long " * 40_000}).encode() + b"\n", ["text"]),
    (b"{ this is no JSON }\nbut text\n", ["text"]), ("Ein schöner Text\n".encode(), ["text"]),
    ("Ein schöner Text\n".encode("utf-16"), ["text"]), (b"\n <!DOCTYPE html><p>a", ["html"]), (b"<HTML><p>a", ["html"]),
    (response(html("one")), ["html"]), (b"\r\n" + response(html("one")), ["html"]),
], ids=["lines", "mark", "long line", "braces", "utf-8", "utf-16", "doctype", "html", "warc", "blank"])
def test_the_content_says_what_a_file_is_whatever_its_name(tmp_path, data, kinds):
    for name in ("README", "x.bin", "x.dat.gz"):
        for pack in (bytes, gzip.compress, zstandard.compress):
            pages, losses = read_bytes(tmp_path, pack(data), name)
            assert [page.get("drop") or page["kind"] for page in pages] == kinds, (name, losses)


def test_archives_of_the_old_form_and_of_metadata_are_refused_by_name(tmp_path):
    arc = b"filedesc://x.arc 0.0.0.0 20060101000000 text/plain 76\n1 0 a\nURL IP-address Archive-date\n" + b"\0" * 99
    assert read_bytes(tmp_path, gzip.compress(arc), "x.arc.gz") == ([], {"old_arc_format": 1, "skipped_bytes": len(arc)})
    wat = record("warcinfo", b"x") + record("metadata", b'{"Container": {}}') * 3
    assert read_bytes(tmp_path, wat, "x") == ([], {"records": 4, "other_records": 4, "metadata_only": 1})


def test_tables_are_read_where_pyarrow_is(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import datetime

    import pyarrow.parquet as parquet
    texts = [f"text {i}" for i in range(200)] + [None]
    table = pyarrow.table({"text": texts, "url": [f"http://a.example/{i}" for i in range(201)],
                           "date": [datetime.datetime(2024, 1, 2)] * 201, "number": range(201)})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=50)
    pages, losses = read(tmp_path / "x.parquet")
    assert [page.get("text") for page in pages] == texts and not losses and pages[200]["drop"] == "json_no_text"
    assert (pages[7]["url"], pages[7]["id"], pages[7]["date"][:10]) == ("http://a.example/7", "x.parquet:8", "2024-01-02")
    whole = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "y.parquet").write_bytes(whole[:-30])
    assert read(tmp_path / "y.parquet") == ([], {"bad_parquet": 1})
    parquet.write_table(pyarrow.table({"words": ["a"]}), tmp_path / "z.parquet")
    assert [page["drop"] for page in read(tmp_path / "z.parquet")[0]] in ([], ["json_no_text"])


def test_each_cell_of_a_table_is_judged_by_itself(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet
    binary = pyarrow.array([b"good", b"\xff\xfe", b"last"], pyarrow.binary())
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 3, binary.buffers())
    dates = [pyarrow.array([1, 2 ** 62, None], kind) for kind in (pyarrow.timestamp("ns"), pyarrow.timestamp("us"))]
    for text in (binary, broken):
        for date in dates:
            parquet.write_table(pyarrow.table({"text": text, "date": date, "id": date}), tmp_path / "x.parquet")
            pages, losses = read(tmp_path / "x.parquet")
            assert [page.get("text", page.get("drop")) for page in pages] == ["good", "json_not_utf8", "last"]
            assert pages[2]["id"] == "x.parquet:3" and pages[2]["date"] == "" and not losses


def test_every_byte_of_damaged_files_is_accounted_for(tmp_path):
    """`read` compares the sums; here on some hundred files with every kind of damage (the fuzzing below has more)."""
    data = b"".join(three(response(chunked(html("two " * 99)), "http://a.example/2"))) + record("request", b"GET / HTTP/1.1")
    body = gzip.compress(html("packed " * 99))
    data += response(body, headers=("Content-Type: text/html", "Content-Encoding: gzip")) + record("response", b"nonsense")
    for cut in range(1, len(data), 41):
        read_bytes(tmp_path, data[:cut])
        read_bytes(tmp_path, data[cut:])
        read_bytes(tmp_path, data[:cut] + b"junk\n" + data[cut:])
        read_bytes(tmp_path, members([data[:cut], data[cut:]])[:-cut])
        read_bytes(tmp_path, data, max_decompressed=cut)
    lines = b'{"text": "a \\u00e9"}\n\n{"a": 1}\n[]\n\xff\n{"text": "' + b"b" * 99 + b'"}'
    for cut in range(1, len(lines)):
        read_bytes(tmp_path, lines[:cut], "x.jsonl")


def test_memory_is_bounded_on_a_line_of_200_mb(tmp_path, monkeypatch):
    monkeypatch.setattr(warc, "RECORD_LIMIT", 4 << 20)
    path = tmp_path / "x.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "')
        for _ in range(200):
            file.write(b"a" * (1 << 20))
        file.write(b'"}\n{"text": "after it"}\n')
    tracemalloc.start()
    pages, _ = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [page.get("drop") for page in pages] == ["json_too_long", None] and peak < 40_000_000


def test_d22_a_text_file_is_one_page(tmp_path):
    (page,), _ = read_bytes(tmp_path, b"a <b\nc\n", "notes.txt")
    assert page["kind"] == "text" and page["body"] == b"a <b\nc\n"


# --------------------------------------------------------------------------------------------------------------------
# Real files

def test_d1_d2_d3_d7_d8_d9_real_archives(shared_data):
    folder = shared_data / "warc"

    pages, losses = read(folder / "example-trunc.warc")
    assert len(pages) <= 1 and losses["bad_length"] == 1 and losses["records"] == 4

    pages, losses = read(folder / "example-bad-non-chunked.warc.gz")
    assert losses["records"] == 6 and not losses["truncated"] and b"Example Domain" in pages[0]["body"]

    start = time.process_time()
    pages, losses = read(folder / "clipped.warc.gz")
    assert pages == [] and losses["truncated"] == 1 and time.process_time() - start < 20

    (page,), losses = read(folder / "example.warc.gz")
    assert b"Example Domain" in page["body"] and losses["records"] == 6

    (page,), _ = read(folder / "example-iana.org-chunked.warc")
    assert page["body"].startswith(b"<!doctype html>") and b"\r\n1f40\r\n" not in page["body"]

    counts = {name: len(read(folder / name)[0]) for name in
              ("whirlwind.warc.gz", "whirlwind.warc.wet.gz", "whirlwind.warc.wat.gz", "CC-MAIN-2024-22.warc.paths.gz")}
    assert list(counts.values()) == [1, 1, 0, 0]
    losses = read(folder / "CC-MAIN-2024-22.warc.paths.gz")[1]
    assert losses["not_a_warc"] == 1 and losses["skipped_bytes"] > 10_000
    assert read(folder / "whirlwind.warc.wat.gz")[1]["metadata_only"] == 1
    for path in sorted(folder.iterdir()):
        read(path)                                                    # which accounts for every byte

    pages, _ = read(folder / "dolma-sample-0000.warc.gz")
    assert len(pages) == 22 and all(page["url"].startswith("http") for page in pages)


@pytest.mark.slow
def test_nothing_crashes_or_hangs_on_random_damage(tmp_path):
    import random
    draw = random.Random(1)
    whole = members(three(response(chunked(html("two " * 99)), "http://a.example/2"))) * 3
    plain = b"".join(three(response(html("two " * 99), "http://a.example/2"))) * 3
    for round_number in range(4000):
        data = bytearray(draw.choice([whole, plain]))
        for _ in range(draw.randint(1, 6)):
            place = draw.randrange(len(data))
            damage = draw.choice(["flip", "cut", "insert", "remove", "repeat"])
            if damage == "flip":
                data[place] ^= 1 << draw.randrange(8)
            elif damage == "cut":
                del data[place:]
            elif damage == "insert":
                data[place:place] = draw.randbytes(draw.randint(1, 50))
            elif damage == "remove":
                del data[place:place + draw.randint(1, 200)]
            else:
                data[place:place] = data[max(0, place - 100):place]
            data = data or bytearray(b"\0")
        start = time.process_time()
        read_bytes(tmp_path, bytes(data), "x.warc.gz")
        assert time.process_time() - start < 5, round_number
