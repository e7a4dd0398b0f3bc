"""From bytes to clean text, and the rules that judge it: each with input that just passes and input that just fails."""

import time

import pytest

from archives import PROSE, prose
from prepare import filters, rules
from prepare.text import changed_by_normalising, codec_of, decode, extract, language_of, language_window, \
    normalise, short_lines

SETTINGS = {"max_replacement": 0.01, "main_content": False, "languages": ("en",), "language_threshold": 0.995,
            "min_chars": 200, "max_chars": 1_000_000, "min_entropy": 3.2, "min_ascii": 0.3, "keep_indentation": True,
            "language_model": "", "rules": (), "block_list": "", "mask_personal": False, "contaminated": (),
            "contaminated_drop": True, "perplexity_text": ""}


def page(**fields):
    return {"url": "", "id": "x", "kind": "html", "charset": "", "measures": {}, "notes": [], **fields}


def run(*steps, **fields):
    """(the reason of the first step that drops the page or None, the page)"""
    item = page(**fields)
    for step in steps:
        reason = step(item, SETTINGS)
        if reason:
            return reason, item
    return None, item


CLEAN = (filters.decoded, filters.extracted, filters.normalised)


# --------------------------------------------------------------------------------------------------------------------
# Protocol

@pytest.mark.parametrize("status, media, reason", [
    (200, "text/html", None), (200, "application/xhtml+xml", None), (200, "text/plain", None),
    (404, "text/html", "http_status"), (302, "text/html", "http_status"), (206, "text/html", "http_status"),
    (200, "image/png", "content_type"), (200, "application/pdf", "content_type"), (200, "", "content_type"),
])
def test_d21_status_and_declared_type(status, media, reason):
    assert run(filters.protocol, status=status, content_type=media)[0] == reason


def test_records_without_http_have_no_status_to_fail():
    assert run(filters.protocol)[0] is None


# --------------------------------------------------------------------------------------------------------------------
# Charsets

TEXT = "Zoë's café — “naïve” résumé"


@pytest.mark.parametrize("body, http, how, text", [
    (TEXT.encode(), "utf-8", "utf-8", TEXT),
    (TEXT.encode(), "iso-8859-1", "utf-8", TEXT),                            # wrong label, mended
    (TEXT.encode(), "utf8mb4", "utf-8", TEXT),                             # unknown label: a LookupError for many
    (TEXT.encode("cp1252"), "latin1", "http", TEXT),                         # as browsers read it: cp1252
    (b'<meta charset="windows-1251">' + "Привет, мир".encode("cp1251"), "", "meta", "Привет, мир"),
    (b"\xef\xbb\xbf" + TEXT.encode(), "latin1", "bom", TEXT),
    (b"\xff\xfe" + TEXT.encode("utf-16-le"), "utf-8", "bom", TEXT),
    ("日本語のページです。".encode("iso2022_jp"), "iso-2022-jp", "http", "日本語のページです。"),      # 7 bits: valid ASCII
    ("中文網頁".encode("gb18030"), "gb2312", "http", "中文網頁"),               # beyond gb2312 itself
    ("北へ行く電車はその朝ほとんど一時間遅れて到着しました。①".encode("cp932"), "shift_jis", "http", "①"),
    (("北へ行く電車はその朝ほとんど一時間遅れて到着しました。" * 9).encode("euc_jp"), "", "detected", "電車"),
    (b'<meta charset="utf-16">' + TEXT.encode(), "", "utf-8", TEXT),
    (b'<meta charset="utf-16">' + (TEXT * 9).encode("cp1252"), "", "detected", TEXT),       # even length: would decode
])
def test_charsets_in_the_order_that_loses_least(body, http, how, text):
    decoded, by, codec = decode(body, http, is_html=True)
    assert by == how and text in decoded


def test_labels_are_read_as_browsers_read_them():
    assert codec_of("ISO-8859-1") == "cp1252" and codec_of("GB2312") == "gb18030" and codec_of("nonsense") is None
    assert codec_of("") is None


def test_what_cannot_be_decoded_is_dropped_by_share():
    noise = bytes(range(128, 256)) * 20
    reason, item = run(filters.decoded, body=b"<p>" + noise, charset="utf-8")
    assert reason == "undecodable" and item["measures"]["replacement_share"] > 0.01
    reason, item = run(filters.decoded, body=("é" * 5000).encode() + b"\xff" + b"\x81\x8d", charset="utf-8")
    assert reason is None and "é" * 99 in item["text"]


@pytest.mark.parametrize("body, charset, wrong", [
    (TEXT.encode(), "utf-8", False), (TEXT.encode("cp1252"), "iso-8859-1", False), (TEXT.encode(), "latin1", True),
    ((TEXT * 9).encode("cp1252"), "utf-8", True), (b"plain ascii", "koi8-r", False), (TEXT.encode(), "", False),
])
def test_wrong_labels_are_noted(body, charset, wrong):
    assert ("mislabelled_charset" in run(filters.decoded, body=body, charset=charset)[1]["notes"]) is wrong


# --------------------------------------------------------------------------------------------------------------------
# Extraction

def text_of(html):
    return normalise(extract(html, False))


def test_lines_indentation_and_definitions_survive():
    html = ("<h1>Title</h1><script>no()</script><style>no{}</style><p>One paragraph.</p>"
            "<dl><dt>first(a)</dt><dd>Does the&nbsp;first<br>&nbsp;&nbsp;&nbsp;&nbsp;indented</dd>"
            "<dt>second(b)</dt><dd>Does the second</dd></dl>"
            "<pre>def f():\n    return 1\n</pre><table><tr><td>a</td><td>b</td></tr></table>")
    text = text_of(html)
    assert "no" not in text.split() and "One paragraph." in text
    assert "\n\nfirst(a)\nDoes the first\n    indented\n\nsecond(b)\nDoes the second" in text
    assert "def f():\n    return 1" in text
    assert "a\tb" in text


def test_empty_first_cells_leave_no_indentation():
    html = "<table><tr><td>&nbsp;&nbsp;&nbsp;</td><td>&nbsp;</td><td>Methods defined here:</td></tr></table>"
    assert text_of(html) == "Methods defined here:"


def test_d22_plain_text_is_not_extracted():
    reason, item = run(*CLEAN, kind="text", body=b"if a <b and c> d:\n    go()\n<p>not a tag</p>\n")
    assert reason is None and item["text"] == "if a <b and c> d:\n    go()\n<p>not a tag</p>"


@pytest.mark.parametrize("html, expected", [
    ("<svg><template>\n" * 50 + "<p>after", "after"), ("<div>" * 20_000 + "deep" + "</div>" * 20_000, "deep"),
    ("<p>before<script>never closed " + "x" * 10_000, "before"), ("<title>never closed " + "x" * 10_000, ""),
    (f'<a href="{"x" * 1_000_000}">link text</a>', "link text"), ("<" * 100_000, ""), ("&" * 100_000, "&"),
    ("<table>" * 3000 + "cell", "cell"), ("\0" * 1000, ""), ("", ""),
], ids=["svg", "nested", "script", "title", "attribute", "lt", "amp", "tables", "nul", "nothing"])
def test_d24_hostile_markup_takes_no_time(html, expected):
    start = time.process_time()
    reason, item = run(*CLEAN, body=html.encode())
    assert time.process_time() - start < 1
    assert expected in item["text"] if expected else reason == "empty" or "<" in item["text"]


# --------------------------------------------------------------------------------------------------------------------
# Normalisation

FAMILY = "\U0001F468\u200d\U0001F469\u200d\U0001F467"
PERSIAN = "می\u200cخواهم"


def test_d23_what_cannot_be_seen_goes_what_spells_stays():
    html = ("<p>&#0;&#xd800;&#xdfff;&#x110000;A&#x80;\0B Foo&lrm;bar \u202etxet\u202c \u2066x\u2069 soft\u00adhyphen "
            f"b\ufeffom z\u200bw {FAMILY} {PERSIAN}</p>")
    text = text_of(html)
    assert "Foobar" in text and "softhyphen" in text and "bom zw" in text and FAMILY in text and PERSIAN in text
    for character in "\0\ufffd\u200e\u202e\u202c\u2066\u2069\u00ad\ufeff\u200b\x80":
        assert character not in text
    text.encode("utf-8")
    assert normalise("\ud83d lone \udfff") == " lone"
    assert normalise("e\u0301 \ufb01 x\u00b2") == "é ﬁ x²"                        # NFC, not NFKC


def test_d24_a_page_of_accents_takes_no_quadratic_time():
    tower, start = "a" + "\u0301\u0323" * 20_000 + " e\u0301", time.process_time()
    assert changed_by_normalising(tower) == ["normalised_stacked_accents", "normalised_to_nfc"]
    once = normalise(tower)
    assert time.process_time() - start < 1 and len(once) < 40 and once.endswith(" \u00e9") and normalise(once) == once
    assert normalise("\u0e01\u0e34\u0e48" + "x\u0335" * 50) == "\u0e01\u0e34\u0e48" + "x\u0335" * 50


def test_whitespace():
    assert normalise("a\r\nb\rc\u2028d\u0085e\x0cf") == "a\nb\nc\nd\ne\nf"
    assert normalise("a  b   c\t \td  \n    indented   code\n\n\n\n\nend\u3000here\n\n") == \
        "a b c\td\n    indented code\n\nend here"
    assert normalise("\tx:\n\t\ty  z") == "\tx:\n\t\ty z"
    assert normalise(" \n \n\t") == ""
    start = time.process_time()
    normalise(" " * 1_000_000 + "x" + "\n" * 1_000_000 + "\t " * 500_000)
    assert time.process_time() - start < 2


def test_normalising_twice_changes_nothing():
    for text in ("a\r\n\r\n  b  \u00a0c\u00ad\u0301", "\u0344\u00adx\u0301", PROSE, "x\u200b\u0301 \u00ad\u0301",
                 " \u00ad a"):
        once = normalise(text)
        assert normalise(once) == once, repr(text)


# --------------------------------------------------------------------------------------------------------------------
# Language and guards

GERMAN = "Der Zug nach Norden hatte an diesem Morgen Verspätung, und niemand wusste, warum die Fenster offen standen. "
SPANISH = "El tren hacia el norte llegó tarde y nadie sabía por qué estaban abiertas las ventanas de la casa vieja. "
JAPANESE = "北へ行く電車はその朝ほとんど一時間遅れて到着しました。古い家の窓がなぜ開いていたのか、誰も知りませんでした。"


@pytest.mark.parametrize("text, language", [(PROSE, "en"), (GERMAN * 5, "de"), (SPANISH * 5, "es"),
                                            (JAPANESE * 5, "ja"), (PROSE.upper(), "en"),
                                            (PROSE.replace(". ", ".\n"), "en")])
def test_languages(text, language):
    found, probability = language_of(text)
    assert found == language and probability >= 0.99


def test_the_window_finds_the_prose_among_names_and_code():
    menu = "\n".join(f"Module{i}.Class{i}(object) = <method at 0x{i:04x}>" for i in range(200))
    assert language_of(menu + "\n" + PROSE * 3 + "\n" + menu)[0] == "en"
    assert "committee met on tuesday" in language_window(menu + "\n" + PROSE * 3 + "\n" + menu)
    assert len(language_window(PROSE * 1000)) <= 1024
    assert language_window("we went\nthe people of the town\nwere glad") == "we went the people of the town were glad"
    assert "".join(short_lines("x" * 250, 100)) == "x" * 250 and list(short_lines("", 100)) == []
    assert [len(piece) <= 100 for piece in short_lines(PROSE, 100)] == [True] * len(list(short_lines(PROSE, 100)))


def test_language_filter_and_its_reasons(monkeypatch):
    assert run(filters.language, text=PROSE)[0] is None
    assert run(filters.language, text=GERMAN * 5)[0] == "other_language"
    assert run(filters.language, text="zxq vbnm qrst wrtz " * 40)[0] == "no_language"
    for text in ("", "1234 5678", "^" * 1_000_000, "名"):                        # nothing to go by: dropped, no crash
        assert run(filters.language, text=text)[0] is not None
    item = page(text=GERMAN * 5)
    assert filters.language(item, {**SETTINGS, "languages": ()}) is None and item["language"] == "de"
    monkeypatch.setattr(filters, "language_of", lambda text, model: ("en", 0.9949))
    assert run(filters.language, text="x")[0] == "unsure_language"


def test_guards_just_pass_and_just_fail():
    assert run(filters.length, text="x" * 199)[0] == "too_short" and run(filters.length, text="x" * 200)[0] is None
    assert run(filters.length, text="x" * 1_000_000)[0] is None
    assert run(filters.length, text="x" * 1_000_001)[0] == "too_long"
    assert run(filters.entropy, text="aaaa" * 99)[0] == "low_entropy"
    assert run(filters.entropy, text="abcdefgh" * 9)[0] == "low_entropy"         # 3 bits
    assert run(filters.entropy, text="abcdefghij" * 9)[0] is None                # 3.32 bits
    assert run(filters.entropy, text=PROSE)[1]["measures"]["entropy"] == pytest.approx(4.2, abs=0.3)
    assert run(filters.ascii_share, text="a" * 29 + "é" * 71)[0] == "low_ascii"
    assert run(filters.ascii_share, text="a" * 30 + "é" * 70)[0] is None


def test_d26_a_million_equal_characters_are_dropped():
    for character in "^a":
        assert run(filters.length, filters.entropy, text=character * 1_000_000)[0] == "low_entropy"


# --------------------------------------------------------------------------------------------------------------------
# Rule sets for prose

GOOD = prose("alder")


@pytest.mark.parametrize("text, reason", [
    (GOOD, None), ("the and of word " * 5, "gopher_word_count"), ("a b c the of be " * 20, "gopher_word_length"),
    (GOOD + " # #" * 60, "gopher_hashes"), (GOOD.replace(" the ", " the... "), "gopher_ellipses"),
    ("\n".join("- the item of " + word for word in GOOD.split()), "gopher_bullets"),
    ("\n".join("there is more of the same " + word + "..." for word in GOOD.split()[:60]), "gopher_ellipses"),
    ("\n".join("there is more and more and more of the same thing here " + word + "..." for word in GOOD.split()[:60]),
     "gopher_line_ellipses"),
    (GOOD + " 1234 5678" * 60, "gopher_letters"), ("Katze Hund Maus Vogel Pferd " * 20, "gopher_stop_words"),
    ("Katze Hund the Vogel Pferd " * 20, "gopher_stop_words"), ("Katze Hund the and Pferd " * 20, None),
])
def test_gopher_quality(text, reason):
    assert run(rules.gopher_quality, text=text)[0] == reason


@pytest.mark.parametrize("text, reason", [
    (PROSE, None), ("A line.\n" * 20, "gopher_lines"), ("one two three four five six seven eight nine ten", None),
    ("One short line.\n\n" + "The same long paragraph again, over and over.\n\n" * 2
     + "\n\n".join(f"Paragraph {n}." for n in range(8)), "gopher_line_characters"),
    (" ".join(f"again and {word}" for word in GOOD.split()[:50]), "gopher_top_2gram"),
    (GOOD + " " + " ".join(GOOD.split()[:40]), "gopher_repeated_5gram"),
    (" ".join(f"w{n}" for n in (*range(10, 66), *range(10, 15), *range(40, 45))), "gopher_repeated_5gram"),   # 10 of 66
    (" ".join(f"w{n}" for n in (*range(10, 67), *range(10, 15), *range(40, 45))), None),                      # 10 of 67
])
def test_gopher_repetition(text, reason):
    if text.startswith(GOOD):
        text = " ".join(f"{word}{number}" for number, word in enumerate(GOOD.split()[:100]))
        text += " " + " ".join(text.split()[:25])                               # 25 of 125 words occur again: 0.2 of it
    assert run(rules.gopher_repetition, text=text)[0] == reason


def test_repeated_ngrams_against_a_slow_count():
    """The shares are those of a count by hand, on texts with many repetitions."""
    import random
    from collections import Counter
    for seed in range(200):
        draw = random.Random(seed)
        words = [draw.choice(["a", "bb", "ccc", "dddd", "e"]) + str(draw.randrange(draw.choice([2, 5, 40, 99])))
                 for _ in range(draw.randint(1, 120))]
        total, expected = sum(map(len, words)), None
        for n in range(2, min(10, len(words)) + 1):
            grams = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
            counts = Counter(grams)
            if n <= 4:
                top = max((count * sum(map(len, gram)) for gram, count in counts.items() if count > 1), default=0)
                if top / total > rules.TOP_NGRAMS[n]:
                    expected = f"gopher_top_{n}gram"
                    break
            else:
                seen, covered = set(), set()
                for i, gram in enumerate(grams):
                    if gram in seen:
                        covered.update(range(i, i + n))
                    seen.add(gram)
                if sum(len(words[i]) for i in covered) / total > rules.REPEATED_NGRAMS[n]:
                    expected = f"gopher_repeated_{n}gram"
                    break
        assert run(rules.gopher_repetition, text=" ".join(words))[0] == expected, seed


@pytest.mark.parametrize("text, reason, left", [
    (PROSE.replace(". ", ".\n"), None, 3), (PROSE + "Lorem ipsum dolor.", "c4_lorem_ipsum", None),
    (PROSE + "{", "c4_brace", None), ("One sentence that is long enough to be kept.", "c4_sentences", None),
    (PROSE.replace(". ", ".\n") + "Too short.\nNo mark at the end of this longer line\n"
     "And this one trails off like that...\nPlease enable JavaScript to see this page.\n"
     "We value you, see our privacy policy for more.\n", None, 3),
])
def test_c4(text, reason, left):
    found, item = run(rules.c4, text=text)
    assert found == reason and (left is None or len(item["text"].split("\n")) == left)


@pytest.mark.parametrize("text, reason", [
    (PROSE.replace(". ", ".\n"), None),
    ("A long line without any mark at its end, many words\nanother one here", "fineweb_line_ends"),
    ("Short.\nAlso short.\nTiny.\n" + PROSE, "fineweb_short_lines"),
    ("This is a line of more than thirty letters.\n" * 3 + PROSE, "fineweb_repeated_lines"),
    ("\n".join(f"Thirtyoneormoreletters{n}inthisword. yes." for n in "abcdef"), "fineweb_newlines"),
])
def test_fineweb(text, reason):
    assert run(rules.fineweb, text=text)[0] == reason
