"""From the bytes of a page to clean text: decode, extract, normalise; and which language it is in."""

import functools
import re
import unicodedata

import regex
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

# --- Decode -----------------------------------------------------------------------------------------------------------

BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.IGNORECASE)
# Python's codecs of these names know less than browsers do; the second is a superset of the first.
WIDER = {"gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs"}


def codec_of(label):
    """Python's codec for a charset label as browsers read it (latin-1 is really cp1252); None for an unknown label."""
    name = map_encoding_to_html5(label.strip().lower(), fallback_utf8=False) if label else None
    return WIDER.get(name, name)


def decode(body, http_charset, is_html):
    """(text, how, codec): the text, by which hint it was decoded (bom, utf-8, http, meta, detected, replaced), as what.

    Strict UTF-8 is tried before anything declared: other encodings almost never happen to be valid UTF-8, so this
    mends most wrong labels. The exceptions are 7-bit encodings, which look like ASCII: those are believed.
    With "replaced", what could not be decoded stands as U+FFFD in the text.
    """
    for bom, codec in BOMS:
        if body.startswith(bom):
            return body[len(bom):].decode(codec, "replace"), "bom", codec
    meta = META_CHARSET.search(body[:4096]) if is_html else None
    declared = [("http", codec_of(http_charset)), ("meta", codec_of(meta.group(1).decode("ascii")) if meta else None)]
    # A page cannot declare UTF-16 in its own ASCII-readable meta element (the HTML standard says: take it as UTF-8).
    declared = [(how, codec) for how, codec in declared if codec and not (how == "meta" and codec.startswith("utf-16"))]
    seven_bit = [(how, codec) for how, codec in declared if codec.startswith(("iso2022", "hz"))]
    for how, codec in [*seven_bit, ("utf-8", "utf-8"), *declared, ("detected", None)]:
        codec = codec or codec_of(detect_encoding(body, html5_compatible=False) or "") or "utf-8"
        try:
            return body.decode(codec), how, codec
        except (UnicodeDecodeError, LookupError):
            pass
    codec = declared[0][1] if declared else codec
    return body.decode(codec, "replace"), "replaced", codec


# --- Extract ----------------------------------------------------------------------------------------------------------

# Terms of a definition list and what follows a rule begin a paragraph. The extractor ends only a line there, so that in
# a list of functions each would run into the one before.
PARAGRAPH_BEFORE = re.compile(r"<(?=(?:dt|hr)\b)", re.IGNORECASE)
EMPTY_CELL = re.compile(r"^[ \xa0]*[ \xa0]\t[\t \xa0]*")


def extract(html, main_content):
    """Visible text of a page, lines and preformatted indentation kept. main_content: leave out menus and footers."""
    text = extract_plain_text(PARAGRAPH_BEFORE.sub("<p>&nbsp;</p><", html), main_content=main_content,
                              preserve_formatting=True, alt_texts=False, links=False, form_fields=False, noscript=False)
    if "\ufffd" not in html:
        text = text.replace("\ufffd", "")          # the HTML parser's answer to NUL and to references to no character
    # The extractor puts tabs between the cells of a table. An empty first cell leaves spaces and tabs before the text.
    return "\n".join(EMPTY_CELL.sub("", line) if "\t" in line else line for line in text.split("\n"))


# --- Normalise --------------------------------------------------------------------------------------------------------

LINE_ENDS = ("\r\n", *"\r\x85\u2028\u2029\x0b\x0c")
SPACES = "\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
# What a reader cannot see and a model should not learn: control characters, byte order marks, soft hyphens, zero-width
# spaces and joiners of words, marks that turn the writing direction (they can make text read otherwise than it is
# stored), interlinear annotation, language tags, and halves of surrogate pairs. The zero-width joiner U+200D and
# non-joiner U+200C stay: emoji, Persian and the scripts of India are misspelt without them.
KINDS = {
    "control_characters": "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f",
    "soft_hyphens": "\xad",
    "byte_order_marks": "\ufeff",
    "zero_width_spaces": "\u180e\u200b\u2060-\u2064",
    "direction_marks": "\u200e\u200f\u202a-\u202e\u2066-\u206f",
    "annotations_and_tags": "\ufff9-\ufffb\U000e0000-\U000e007f",
    "surrogates": "\ud800-\udfff",
}
# Sorting a run of accents into NFC's order takes quadratic time: a page of nothing else would take for ever. No script
# stacks as many; the limit is that of Unicode's stream-safe text (UAX #15, 13).
STACKED = regex.compile(r"(\p{M}{30})\p{M}+")
INVISIBLE = re.compile(f"[{''.join(KINDS.values())}]")
RUN = re.compile(r"[ \t]+")


def one_kind(text):
    """With one kind of line end and one of space. (Each that is not there costs a search, a regular expression
    more.)"""
    for end in LINE_ENDS:
        text = text.replace(end, "\n")
    for space in SPACES:
        text = text.replace(space, " ")
    return text


def is_plain(text):
    """ASCII, and of control characters only tabs and line ends, as most text is: nothing in it is to be mended."""
    return text.isascii() and text.replace("\n", "").replace("\t", "").isprintable()


def changed_by_normalising(text):
    """Names of what normalise will change in it, beside spaces and line ends that are usual."""
    if is_plain(text):
        return []
    mended = one_kind(text)
    invisible = not is_plain(mended) and INVISIBLE.search(mended) is not None
    found = [f"normalised_{kind}" for kind, codes in KINDS.items() if invisible and re.search(f"[{codes}]", text)]
    found += ["normalised_spaces"] * any(space in text for space in SPACES)
    found += ["normalised_stacked_accents"] * (STACKED.search(text) is not None)
    found += ["normalised_to_nfc"] * (not unicodedata.is_normalized("NFC", STACKED.sub(r"\1", text)))
    return ["invisible_characters_removed"] * invisible + found


def normalise(text, keep_indentation=True):
    """NFC, one kind of line end, no invisible characters, plain spaces, at most one blank line; indentation kept, as
    programs need it, or not."""
    text = one_kind(text)
    if not is_plain(text):
        # NFC after the invisible ones are gone, since one of them may stand between a letter and its accent.
        text = unicodedata.normalize("NFC", STACKED.sub(r"\1", INVISIBLE.sub("", text)))
    # Line by line: as one regular expression, "spaces before the end of a line" takes quadratic time on many spaces.
    lines = [tidy_line(line if keep_indentation else line.lstrip(" \t")) for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def tidy_line(line):
    """Indentation kept; runs of spaces inside the line become one, with a tab among them one tab; none at the end."""
    words = line.strip(" \t")
    if "  " in words or "\t" in words:
        words = RUN.sub(lambda run: "\t" if "\t" in run[0] else " ", words)
    return line[:len(line) - len(line.lstrip(" \t"))] + words if words else ""


# --- Language ---------------------------------------------------------------------------------------------------------

LANGUAGE_WINDOW = 1024      # characters
# A word of running text: letters only, no piece of a dotted name or of code, no capital (names, titles, menus).
PLAIN_WORD = re.compile(r"(?<![\w.(])[^\W\d_A-Z][^\W\d_]++(?![\w(.=])")
# The same in ASCII, faster: first every character gives way to its kind, and "=" ends a word that is none.
SHAPE = bytes(ord(re.sub("[a-z]", "a", re.sub("[A-Z]", "A", re.sub(r"[\d_.(]", ".", re.sub(r"[^\w.(]", " ", chr(code))))))
              for code in range(128)).ljust(256)
PLAIN_SHAPE = re.compile(rb" a[aA]++(?= )")


@functools.cache
def identifier():
    """py3langid's model, which lies in its package: nothing is fetched."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@functools.cache
def fasttext(path):
    """fastText's model in the file at `path`, by whichever package is there (fasttext-predict is enough)."""
    import fasttext
    return fasttext.load_model(path)


def language_of(text, model=""):
    """(language code, probability) of a window of the text: by py3langid, naive Bayes, for which "zxx" means no
    language at all; or by fastText's model in the file `model`, whose probabilities are far lower."""
    window = language_window(text)
    if not model:
        language, probability = identifier().classify(window)
        return language, float(probability)
    labels, probabilities = fasttext(model).predict(window or "-")     # of nothing at all it makes an error
    return labels[0].removeprefix("__label__"), min(1.0, float(probabilities[0]))


def language_window(text):
    """The words of those lines that hold most running text, in the order of the text, in lower case.

    Which part of a page is looked at matters more than which detector: pages begin with menus and lists of names, and
    code looks like no language. Of 727 pages of API documentation, all English, 182 fail 0.995 on their first 1024
    characters, 156 on those in the middle, 50 on this window (all but one of them shorter than 1200 characters).
    """
    pieces = [piece for line in text.split("\n") for piece in short_lines(line.strip(), 100)]
    if text.isascii():
        shapes = (piece.encode().replace(b"=", b"( ").translate(SHAPE) for piece in pieces)
        counts = [len(PLAIN_SHAPE.findall(b" %b " % shape)) for shape in shapes]
    else:
        counts = [len(PLAIN_WORD.findall(piece)) for piece in pieces]
    chosen, size = [], 0
    for index in sorted(range(len(pieces)), key=lambda index: -counts[index]):
        if size > LANGUAGE_WINDOW:
            break
        chosen.append(index)
        size += len(pieces[index]) + 1
    words = re.findall(r"[^\W\d_]+", " ".join(pieces[index] for index in sorted(chosen))[:LANGUAGE_WINDOW])
    return " ".join(words).lower()


def short_lines(line, width):
    """The line in pieces of at most `width` characters, cut at spaces where there are any."""
    start = 0
    while len(line) - start > width:
        space = line.rfind(" ", start + 1, start + width)
        end = space if space > 0 else start + width
        yield line[start:end]
        start = end
    if line[start:]:
        yield line[start:]
