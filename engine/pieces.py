"""
SentencePiece's vocabularies (Llama 2, Mistral, TinyLlama, Phi-3): the library cuts text, this file tells it what of.

The pieces are texts, not bytes: a space is written "▁" (U+2581), one more stands before every text, and a character
that no piece has becomes its UTF-8 bytes, each a piece such as <0x0A>. They come as SentencePiece's own file,
tokenizer.model, or as Hugging Face's tokenizer.json, from which the same file is made here.

Where equal characters follow each other there may be two ways to join, both of the same rank. The library takes the
left one, Hugging Face's engine the pair that stands first in its list; the models were trained with the library's ids.
"""
import re
import struct
from itertools import groupby

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6                # kinds of pieces in SentencePiece's files
EVERY_CHARACTER = "".join(chr(code) for code in range(1, 0x30000) if not 0xD800 <= code < 0xE000)


def described(engine):
    """(the bytes of each id, {name: id} of what text never becomes, reasons against it) of a SentencePieceProcessor.
    Pieces without a text of their own have no bytes."""
    ids = range(engine.get_piece_size())
    names = [engine.id_to_piece(id) for id in ids]
    silent = {names[id]: id for id in ids if engine.is_control(id) or engine.is_unknown(id)}
    spelled = [bytes([int(name[3:5], 16)]) if engine.is_byte(id) else name.replace(SPACE, " ").encode()
               for id, name in enumerate(names)]
    written = EVERY_CHARACTER.replace(" ", SPACE)
    reasons = {
        "it changes text before it cuts it, so that it can not be given back":
            engine.normalize(EVERY_CHARACTER) not in (written, SPACE + written)
            or not engine.normalize("  a  ").endswith(f"{SPACE * 2}a{SPACE * 2}"),
        "not all of the 256 bytes are pieces": sum(map(engine.is_byte, ids)) < 256,
    }
    return [b"" if name in silent else text for name, text in zip(names, spelled)], silent, reasons


def written(data):
    """(the content of a tokenizer.model, reasons against it), for a tokenizer.json, parsed, whose model is a BPE with
    byte_fallback. Such a file lists every pair that makes a piece, piece by piece: the place is the piece's score."""
    model, before, cut = data["model"], data.get("normalizer"), data.get("pre_tokenizer") or {}
    unknown = model.get("unk_token") or "<unk>"
    names, silent = sorted(model["vocab"], key=model["vocab"].get), {token["content"] for token in data["added_tokens"]}
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    made = list(map("".join, pairs))
    order = [piece for piece, _ in groupby(made)]
    mixed = len(order) > len(set(order))           # as in Llama 2's: runs of spaces share a score, so their pairs are mixed
    shared = {piece: SPACE for piece in made if mixed and not piece.strip(SPACE)}
    order = [rank for rank, _ in groupby(shared.get(piece, piece) for piece in made)]
    place = {rank: -float(number) for number, rank in enumerate(order)}
    scores = {piece: place[shared.get(piece, piece)] for piece in made}
    joined = [name for name in names if len(name) > 1 and name not in silent and not re.fullmatch("<0x..>", name)]
    texts = {name for name in names if name not in silent}
    every = {(name[:i], name[i:]) for name in joined for i in range(1, len(name)) if {name[:i], name[i:]} <= texts}
    prepended = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE},
                 {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]}
    metaspace = cut.get("type") == "Metaspace" and cut.get("replacement") == SPACE and cut.get("split") is False
    reasons = {
        "text is changed otherwise than by writing spaces as \u2581 and one before the text":
            not (before == prepended and not cut or metaspace and before is None),
        "the vocabulary's ids are not 0, 1, 2, ... without a gap":
            sorted(model["vocab"].values()) != list(range(len(names))),
        "the merges are not, piece by piece, all pairs that make a piece":
            len(order) != len(place) or set(pairs) != every or scores.keys() != set(joined),
        f"it has no {unknown}": unknown not in model["vocab"],
    }
    kind = lambda name: (UNKNOWN if name == unknown else CONTROL if name in silent
                         else BYTE if re.fullmatch("<0x..>", name) else NORMAL)
    pieces = [_field(1, _field(1, name.encode()) + _field(2, scores.get(name, 0.0)) + _field(3, kind(name)))
              for name in names]
    trained = _field(3, 2) + _field(35, 1) + _field(40, model["vocab"].get(unknown, 0))      # BPE, with bytes
    normal = _field(1, b"identity") + _field(3, int(cut.get("prepend_scheme") != "never")) + _field(4, 0)
    return b"".join(pieces) + _field(2, trained) + _field(3, normal), reasons


def _field(number, value):
    """A field of a protocol buffer, in which such files are written: bytes, a float, or a whole number."""
    def varint(n):
        return bytes([n]) if n < 128 else bytes([n % 128 + 128]) + varint(n // 128)

    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3 | 5) + struct.pack("<f", value) if isinstance(value, float) else \
        varint(number << 3) + varint(value)
