"""
Byte-level BPE, in use: text to token ids and back. (The training stands in train_tokenizer.py.) Other models' too:
SentencePiece's pieces stand in engine/pieces.py.

A tokenizer is four things, and nothing else decides an id:

    pattern     a regular expression that cuts text into pieces; no token ever crosses a piece's border
    ranks       the byte strings of the ordinary tokens, in the order in which training made them; id = rank
    merges      which two tokens each of them was made of (only Hugging Face's file wants to know)
    specials    names such as <|bos|> with ids of their own; text turns into one of them only where the caller allows it

Encoding a piece: start from its single bytes, and as long as some neighbouring pair joins into a token, join the pair
of lowest rank. `encode_by_hand` is that, to be read; tiktoken does the same work at 18 MB/s.

`hash` is a sha256 over those contents. It is written beside every shard and checkpoint, so that ids are never read
with another tokenizer than the one they were made with.
"""

import base64
import codecs
import hashlib
import heapq
import json
import re
from pathlib import Path

import numpy as np
import regex
import tiktoken
from sentencepiece import SentencePieceProcessor

from configurator import refuse
from engine import pieces
from engine.files import read_json, write_atomic, write_json
from engine.nfc import nfc
from engine.workers import in_parallel, text_batches

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

# How text is cut. The GPT-4 form, in Llama-3's spelling: contractions; a word with the one character before it
# (mostly its space); digits in groups of at most three; punctuation with the line ends behind it; line ends; spaces,
# of which the last is left for the word that follows. OpenAI's newer files write `\p{N}{1,3}+`: possessive for some
# engines, but for the one inside Hugging Face's tokenizers "repeat the group", which gives other tokens. The plain
# form means the same everywhere. SmolLM's files cut digits off first, each by itself, and then each stretch between
# them as GPT-2 does; in one pattern that is to take a digit for the end of the text.
PATTERNS = {
    "gpt4": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "smollm": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
             r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
             r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
             r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
             r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# What a rank file does not say, by its name's beginning: how text is cut, and the special tokens.
RANK_FILES = {
    "gpt2": ("gpt2", {"<|endoftext|>": 50256}),
    "cl100k": ("gpt4", {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259,
                        "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276}),
    "o200k": ("o200k", {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    "qwen": ("qwen", {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}),
}

# tiktoken's regex engine gives up (as a panic, which `except Exception` does not catch) at a million steps of
# backtracking, and `\s+(?!\S)` takes one step for each character of a run of whitespace. So long a run fills four
# places in a row of every (LONG_WHITESPACE // 4)th, which costs nothing to look at.
LONG_WHITESPACE = 100_000
FOUR_SPACES = re.compile(r"\s{4}")

# The one printable character that stands for each byte in tokenizer.json, GPT-2's invention: bytes that print stand for
# themselves, the other 68 are moved to U+0100 and up. The first 256 ids are the bytes in the order of these characters.
PRINTING = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
BYTE_ORDER = PRINTING + [byte for byte in range(256) if byte not in PRINTING]                   # id -> byte
BYTE_TO_CHAR = dict(zip(BYTE_ORDER, map(chr, [*PRINTING, *range(0x100, 0x100 + 68)])))
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}

# The layout of engine/chat.py, in the language in which Hugging Face stores such things.
CHAT_TEMPLATE = (
    "{{- '<|bos|>' -}}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

# What a folder of Hugging Face's has of a tokenizer. Read from one, they are written back as they are.
SOURCES = ("tokenizer.json", "tokenizer.model")          # either is enough
FILES = (*SOURCES, "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
         "added_tokens.json", "vocab.json", "merges.txt")

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")                                # of its added tokens
UNUSED = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")     # of Hugging Face's BPE

# Where a pattern finds all of this, it passes over nothing.
SAMPLE = "".join(chr(i) + " a1" + chr(i) * 2 + "\n" for i in range(0x400))


def wrong_pattern(pattern):
    """What is wrong with a pattern that is to cut text. -> list of sentences"""
    try:
        cut = regex.compile(pattern)
        tiktoken.Encoding("", pat_str=pattern, mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={})
    except (regex.error, ValueError) as error:
        return [f"the pattern {pattern!r} is no regular expression for both regex and tiktoken: {error}"]
    left = cut.sub("", SAMPLE)
    reasons = {
        "the pattern has a possessive count, like {1,3}+, which engines read differently":
            re.search(r"\{\d*,?\d*\}\+", pattern),
        "the pattern has ^ or $, for some engines the ends of the text and for others of each line":
            re.search(r"[$^]", re.sub(r"\\.|\[(?:\\.|[^\\\]])*\]", "", pattern)),
        f"the pattern passes over some characters, which would be lost: {''.join(dict.fromkeys(left))[:20]!r}": left,
        "the pattern matches where nothing is": cut.fullmatch(""),
    }
    return [reason for reason, holds in reasons.items() if holds]


def wrong_names(named):
    """What is wrong with {name: id} of tokens that a file adds to its vocabulary. -> list of sentences"""
    return [f"the added token {name!r} has the id {id!r}: a text and a whole number below 2**20 are expected"
            for name, id in named.items() if not (isinstance(name, str) and name and valid_unicode(name) is name
                                                  and type(id) is int and 0 <= id < 1 << 20)]


def bytes_to_chars(token):
    """b' the' -> 'Ġthe', the form in which tokenizer.json stores a token."""
    return "".join([BYTE_TO_CHAR[byte] for byte in token])


def chars_to_bytes(token):
    """The way back. KeyError for a character that stands for no byte."""
    return bytes([CHAR_TO_BYTE[char] for char in token])


def valid_unicode(text):
    """
    The text with each lone surrogate (half of a UTF-16 pair; not a character, has no UTF-8 form) replaced by U+FFFD,
    and a proper pair of surrogates by its character. JSON and broken web pages contain them.
    """
    try:
        if not text.isascii():
            text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode_by_hand(tokenizer, text):
    """
    What Tokenizer.encode gives for a byte-level tokenizer, without tiktoken: to be read, and to test against.

    Of all neighbours in a piece whose bytes together are a token, those are joined that make the token of lowest rank
    (the leftmost of equals), again and again. A heap has the candidates, so that a piece of n bytes takes n log n steps
    and not n * n: there are texts of a million letters without a space.
    """
    rank_of = tokenizer.rank_of

    def ids_of(piece):
        if piece in rank_of:
            return [rank_of[piece]]
        end_of = list(range(1, len(piece) + 1))         # where the token that begins here ends; None: none begins here
        before = list(range(-1, len(piece)))            # where the token begins that ends here
        heap = []

        def offer(left):
            if left >= 0 and (middle := end_of[left]) < len(piece):
                end = end_of[middle]
                if (rank := rank_of.get(piece[left:end])) is not None:
                    heapq.heappush(heap, (rank, left, middle, end))

        for place in range(len(piece)):
            offer(place)
        while heap:
            _, left, middle, end = heapq.heappop(heap)
            if end_of[left] == middle and end_of[middle] == end:        # both are still there
                end_of[left], end_of[middle], before[end] = end, None, left
                offer(before[left])
                offer(left)
        ids, place = [], 0
        while place < len(piece):
            ids.append(rank_of[piece[place:end_of[place]]])
            place = end_of[place]
        return ids

    return [id for piece in tokenizer.cut(tokenizer._normal(text)) for id in ids_of(piece)]


class Tokenizer:
    """
    ranks     list of bytes, the ordinary tokens in order of their ids; b"" where a special has its id among them
    pattern   regular expression that cuts text into pieces
    specials  dict name -> id
    merges    list of (left id, right id) in the order of training; empty where it is not known
    roles     which special is 'bos', 'eos', 'pad' (a dict of names)
    words     dict name -> id of further tokens that are no specials: a text that has the name has the token (Qwen)
    nfc       whether text is brought into Unicode's normal form C first: decode(encode(text)) is that form of it
    marker    whether a space is put before every text, as SentencePiece does, so that a word is the same token at the
              beginning of a text and within; decode takes it away
    model     the content of a SentencePiece tokenizer.model, in place of a pattern; ranks are the bytes of its pieces
    """

    def __init__(self, ranks, pattern, specials, merges=(), roles=None, words=None, nfc=False, model=None,
                 marker=False):
        self.ranks, self.pattern, self.specials, self.merges = ranks, pattern, specials, list(merges)
        self.words, self.nfc, self.model, self.marker = words or {}, nfc, model, marker
        self.roles = roles or {role: f"<|{role}|>" for role in ("bos", "eos", "pad")}
        self.vocab_size = max([len(ranks) - 1, *specials.values(), *self.words.values()]) + 1
        self.bos_id, self.eos_id, self.pad_id = (specials.get(self.roles[role]) for role in ("bos", "eos", "pad"))
        self.files = {}         # name -> content, where it was read from a folder
        # Bytes of each id; none for specials, so that len(token_bytes[id]) counts what a token adds to a text.
        self.token_bytes = ranks + [b""] * (self.vocab_size - len(ranks))
        for word, id in self.words.items():
            self.token_bytes[id] = word.encode()
        self._words = _splitter(self.words) if words else None
        name_of = {id: name.encode() for name, id in specials.items()}
        self._named_bytes = [name_of.get(id, token) for id, token in enumerate(self.token_bytes)]
        self.missing = b""      # bytes that are no tokens, and are passed over
        # The specials must be known to tiktoken (an Encoding without any is a quarter slower), but encode_ordinary, the
        # only entry that we use, never produces them.
        self.rank_of = rank_of = {token: rank for rank, token in enumerate(ranks) if token} if model is None else {}
        named = [*specials.items(), *self.words.items()]
        refuse(*(f"the token {name!r} would have the id {id}, which {ranks[id]!r} has"
                 for name, id in named if id < len(ranks) and ranks[id]),
               *(f"{name!r} is a special token and an ordinary one: of two ids for one text readers take either"
                 for name in specials if name.encode() in rank_of),
               *(["two special tokens have one id"] if len({id for _, id in named}) < len(named) else []))
        if model is None:
            self.engine = tiktoken.Encoding("teardown", pat_str=pattern, mergeable_ranks=rank_of,
                                            special_tokens=specials)
            self.missing = bytes(byte for byte in range(256) if bytes([byte]) not in rank_of)
        else:
            self.engine = SentencePieceProcessor(model_proto=model)
        # What encode puts before every text, and decode takes away.
        self.prefix = " " if marker or model and self.engine.normalize("a") != "a" else ""
        head = {"format": 1, "pattern": pattern, "specials": sorted(specials.items()),
                "normalizer": "NFC" if nfc else None, **({"words": sorted(self.words.items())} if words else {}),
                **({"marker": True} if marker else {})}
        # With lengths: [b"ab"] is not [b"a", b"b"].
        parts = [json.dumps(head).encode(), *ranks, *([model] if model else [])]
        self.hash = hashlib.sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).hexdigest()

    def special(self, name):
        """The id of a special token; KeyError when there is none of that name."""
        return self.specials[name]

    # ---- text to ids

    def encode(self, text, bos=False, eos=False, allowed=()):
        """
        -> list of int. BOS and EOS only when asked for. "<|eos|>" in a text is seven ordinary tokens, unless it is
        among the names `allowed`, of which the longest one counts; what is between them is encoded as texts of their
        own. decode(encode(text)) is the text that `clean` gives; with SentencePiece, which writes it so, "\u2581" comes
        back as a space.
        """
        if unknown := {*allowed} - self.specials.keys():
            raise ValueError(f"no special tokens: {sorted(unknown)}; there are {', '.join(self.specials)}")
        if bos and self.bos_id is None or eos and self.eos_id is None:
            raise ValueError("BOS or EOS was asked for, but this tokenizer has none")
        if not (bos or eos or allowed or self.words):
            return self._encode(self._normal(text))
        ids = [self.bos_id] if bos else []
        for part in _splitter(allowed).split(text) if allowed else [text]:
            if part in allowed:
                ids.append(self.specials[part])
            elif self.words:
                for span in self._words.split(valid_unicode(part)):        # before NFC, which could make a word
                    ids += [self.words[span]] if span in self.words else self._encode(self._normal(span))
            else:
                ids += self._encode(self._normal(part))
        return ids + [self.eos_id] if eos else ids

    def encode_batch(self, texts, workers=1):
        """Yields the ids of each text, in order: those of encode, as arrays of uint32, which is faster than lists.
        `texts` may be endless: no more than a few megabytes for each worker wait in memory."""
        for arrays in in_parallel(self._encode_arrays, text_batches(texts, 1 << 20 if workers > 1 else 1), workers):
            yield from arrays

    def _encode_arrays(self, texts):
        arrays = []
        for text in texts:
            if self.model or self.words or self.missing or self._long_whitespace(text := self._normal(text)):
                arrays.append(np.array(self.encode(text), np.uint32))
            else:
                arrays.append(self.engine.encode_to_numpy(self.prefix + text if text else "", disallowed_special=()))
        return arrays

    def encode_bytes(self, data):
        """The ids of any bytes, UTF-8 or not, which decode_bytes gives back (with the prefix). Where there is a model
        or a normal form, which are about characters, what is not UTF-8 becomes U+FFFD first."""
        text = data.decode("utf-8", "surrogateescape")
        if valid_unicode(text) is text or self.model or self.nfc or self.words:
            return self.encode(data.decode("utf-8", "replace"))
        if self._long_whitespace(text):
            return [id for piece in self.cut(text) for id in self.engine._encode_single_piece(piece)]
        return self.engine._encode_bytes(self.prefix.encode() + data.translate(None, self.missing))

    def _normal(self, text):
        text = valid_unicode(text)
        if not self.nfc or text.isascii():
            return text
        parts = self._words.split(text) if self.words else [text]      # no accent reaches over a word's border
        return "".join(part if part in self.words else nfc(part) for part in parts)

    def clean(self, text):
        """The text that encode reads: with lone surrogates as U+FFFD; where the tokenizer wants it, in NFC; and without
        the bytes that it has no tokens for, if there are any."""
        text = self._normal(text)
        return text.encode().translate(None, self.missing).decode("utf-8", "replace") if self.missing else text

    def cut(self, text):
        """The pieces of a text, as bytes; by another regex engine than tiktoken's, which gives up on some texts."""
        pieces = regex.finditer(self.pattern, self.prefix + text if text else "")
        pieces = (piece[0].encode("utf-8", "surrogateescape").translate(None, self.missing) for piece in pieces)
        return [piece for piece in pieces if piece]

    def _encode(self, text):
        if self.model:
            return self.engine.encode(text)
        if self._long_whitespace(text) or self.missing and self.clean(text) != text:
            return [id for piece in self.cut(text) for id in self.engine._encode_single_piece(piece)]
        return self.engine.encode_ordinary(self.prefix + text if text else "")

    def _long_whitespace(self, text):
        """Whether tiktoken could give up on it (see LONG_WHITESPACE)."""
        return (len(text) >= LONG_WHITESPACE and FOUR_SPACES.search(text[::max(1, LONG_WHITESPACE // 4)])
                and max(map(len, re.findall(r"\s+", text))) >= LONG_WHITESPACE)

    # ---- ids to text

    def decode_bytes(self, ids, skip_special=True):
        """The bytes that the ids stand for. One token may be half a character: to show text while it is being
        generated, feed these bytes to an incremental UTF-8 decoder. An id outside the vocabulary stands for nothing: a
        model may have more rows than its tokenizer has tokens, and until it is trained it says them."""
        bytes_of = self.token_bytes if skip_special else self._named_bytes
        return b"".join([bytes_of[id] for id in map(int, ids) if 0 <= id < self.vocab_size])

    def decode(self, ids, skip_special=True, begins=True):
        """Text; bytes that are not UTF-8 (half a character, say) come out as U+FFFD. begins: a text begins with them,
        so what encode has put before it is taken away."""
        text = self.decode_bytes(ids, skip_special).decode("utf-8", "replace")
        return text.removeprefix(self.prefix) if begins else text

    def decode_stream(self, ids, skip_special=True, begins=True):
        """Yields text as ids come, whole characters only (a token may be half of one, or end in the middle of one)."""
        utf8, prefix = codecs.getincrementaldecoder("utf-8")("replace"), self.prefix if begins else ""
        for id in ids:
            if text := utf8.decode(self.decode_bytes([id], skip_special)):
                yield text.removeprefix(prefix)
                prefix = ""
        yield utf8.decode(b"", final=True)

    def offsets(self, ids):
        """(decode(ids), for each id the place in it of the character in which its bytes begin)."""
        utf8, text = codecs.getincrementaldecoder("utf-8")("replace"), self.decode(ids)
        places, whole = [], len(text) - len(self.decode(ids, begins=False))     # below 0: what decode takes away
        for data in (self.decode_bytes([id]) for id in ids):
            whole += len(utf8.decode(data[:1]))
            half = len(utf8.getstate()[0].decode("utf-8", "replace"))               # of a character that has begun
            places.append(max(0, whole - 1 + (half or not data)))
            whole += len(utf8.decode(data[1:]))
        return text, places

    # ---- files

    @classmethod
    def load(cls, path):
        """
        A folder with tokenizer.json or tokenizer.model (SentencePiece), such a file itself, or a rank file (.tiktoken,
        or GPT-2's .bpe) of a known name. In a folder with both tokenizer.json is read, as transformers does.
        Refuses a file whose tokens it could not reproduce, with the reason.
        """
        path = Path(path)
        if path.suffix in (".tiktoken", ".bpe"):
            return _from_rank_file(path)
        is_file = path.suffix == ".json" or ".model" in path.suffixes
        file = path if is_file else find_tokenizer(path) or path / "tokenizer.json"
        if not file.is_file():
            refuse(f"{file} does not exist; python train_tokenizer.py makes one (with the config file of this run).")
        tokenizer = _from_json(file) if file.suffix == ".json" else _from_pieces(file, file.read_bytes())
        if not is_file:
            tokenizer.files = {name: (path / name).read_bytes() for name in FILES if (path / name).is_file()}
        elif tokenizer.model:
            tokenizer.files = {SOURCES[file.suffix != ".json"]: file.read_bytes()}
        return tokenizer

    def save(self, folder):
        """tokenizer.json and tokenizer_config.json, a folder that transformers reads. The same bytes every time; or the
        very files of the folder that it was read from: another family's chat template, or what it puts before a text,
        is nothing that we know, and must not be replaced by ours."""
        for name, content in self.files.items():
            write_atomic(Path(folder) / name, content)
        if self.files:
            return
        name_of = {id: name for name, id in self.specials.items()}
        chars = [bytes_to_chars(token) if token else name_of[rank] for rank, token in enumerate(self.ranks)]
        made = sum(len(token) > 1 for token in self.ranks)
        merges = self.merges or every_split(self.ranks)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added = sorted({**self.specials, **self.words}.items(), key=lambda item: item[1])
        # No format_version of ours: tokenizers refuses the file when it meets an unknown key.
        content = {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": id, "content": name, **flags, "special": name in self.specials}
                             for name, id in added],
            "normalizer": {"type": "NFC"} if self.nfc else PREPENDED if self.marker else None,
            "pre_tokenizer": _pre_tokenizer(self.pattern),
            "post_processor": None,
            "decoder": WITHOUT_PREPENDED if self.marker else BYTE_LEVEL,
            "model": {
                "type": "BPE", **dict.fromkeys(UNUSED), "fuse_unk": False, "byte_fallback": False,
                # Training leaves one merge for each token. With fewer or more of them (a foreign vocabulary may list
                # every way to make a token) a piece that is a token must be looked up before anything is merged.
                "ignore_merges": len(merges) != made,
                "vocab": {token: rank for rank, token in enumerate(chars)},
                "merges": [f"{chars[left]} {chars[right]}" for left, right in merges],
            },
        }
        write_atomic(Path(folder) / "tokenizer.json", json.dumps(content, ensure_ascii=False, indent=1) + "\n")
        write_json(Path(folder) / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{role}_token": name for role, name in self.roles.items()},
            "add_bos_token": False, "add_eos_token": False,
            "clean_up_tokenization_spaces": False,             # the clean-up removes spaces that were in the text
            "model_max_length": 10**18,                        # the model's config.json knows it
            "chat_template": CHAT_TEMPLATE,
        })

    def save_ranks(self, file):
        """tiktoken's form: one line a token, its bytes in base64 and its rank. Knows neither pattern nor specials."""
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self.ranks) if token]
        write_atomic(file, b"".join(lines))


def every_split(ranks):
    """The merges of a vocabulary of which only the ranks are known: for each token every pair of tokens that makes it.
    (Some have none that lower ranks alone would join: Llama 3's ".:.:" needs the whole piece to be looked up.)"""
    rank_of = {token: rank for rank, token in enumerate(ranks) if token}
    return [pair for token in ranks if len(token) > 1 for pair in sorted(
        (rank_of[token[:i]], rank_of[token[i:]]) for i in range(1, len(token))
        if token[:i] in rank_of and token[i:] in rank_of)]


def _splitter(names):
    """Finds these names in a text, the longest first; its split() leaves them in between."""
    return re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")


def find_tokenizer(folder):
    """The file that a folder's tokenizer is read from; None when there is none."""
    return next((Path(folder) / name for name in SOURCES if (Path(folder) / name).is_file()), None)


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
PREPENDED = {"type": "Prepend", "prepend": " "}
WITHOUT_PREPENDED = {"type": "Sequence", "decoders": [
    BYTE_LEVEL, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}


def _pre_tokenizer(pattern):
    return {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {**BYTE_LEVEL, "add_prefix_space": False, "use_regex": False},
    ]}


# How GPT-2's and SmolLM's files say their patterns.
AS_GPT2 = {**BYTE_LEVEL, "add_prefix_space": False}
OTHER_FORMS = {"gpt2": AS_GPT2, "smollm": {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True}, AS_GPT2]}}


def _from_json(file):
    """Hugging Face's tokenizer.json, when it is a BPE that we can reproduce exactly: byte-level, or SentencePiece's."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["model"].get("byte_fallback") and data["model"].get("type") == "BPE":
            content, reasons = pieces.written(data)
            added = {token["content"]: token["id"] for token in data["added_tokens"]}
            return _from_pieces(file, content, reasons, added)
        model, vocab, added = data["model"], data["model"]["vocab"], data.get("added_tokens") or []
        cut = data["pre_tokenizer"]
        for step in [cut, *cut.get("pretokenizers", [])]:
            step.update({"trim_offsets": True} if "trim_offsets" in step else {})      # not about ids
        pattern = cut.get("pretokenizers", [{}])[0].get("pattern", {}).get("Regex", "")
        pattern = next((PATTERNS[name] for name, form in OTHER_FORMS.items() if cut == form), pattern)
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        made = [vocab[left + right] for left, right in pairs]
        own = {token["content"]: token["id"] for token in added}        # these may stand in the vocabulary as well
        ids = [*(id for name, id in vocab.items() if own.get(name) != id), *(token["id"] for token in added)]
        sound_ids = all(type(id) is int for id in vocab.values()) and sorted(vocab.values()) == list(range(len(vocab)))
        ranks = [b"" if own.get(token) == vocab[token] else chars_to_bytes(token)
                 for token in sorted(vocab, key=vocab.get)]
        merges = [(vocab[left], vocab[right]) for left, right in pairs]
        missing = {*range(256)} - {token[0] for token in ranks if len(token) == 1}
        reasons = {
            f"the model is {model.get('type')}, not BPE": model.get("type", "BPE") != "BPE",
            "text is changed first, and not into NFC": data.get("normalizer") not in (None, {"type": "NFC"}, PREPENDED),
            "the model has unknown tokens, affixes or dropout": any(model.get(key) for key in UNUSED),
            "the pre_tokenizer is not Split(Regex, Isolated) and ByteLevel without prefix space":
                cut != _pre_tokenizer(pattern) and cut not in OTHER_FORMS.values(),
            **dict.fromkeys(wrong_pattern(pattern), True),
            "there are added tokens that are matched in ordinary text in a way of their own":
                any(not token["special"] and any(token.get(flag) for flag in FLAGS) for token in added),
            "two tokens have one id": len(set(ids)) < len(ids),
            "two added tokens have one name": len(own) < len(added),
            "an added token stands in the vocabulary with another id": any(
                vocab.get(name, id) != id for name, id in own.items()),
            "a space is put before each text between added tokens, and could not be taken away again":
                data.get("normalizer") == PREPENDED and not all(token["special"] for token in added),
            'an added token\'s "special" is not true or false': {type(token["special"]) for token in added} - {bool},
            **dict.fromkeys(wrong_names(own), True),
            "the vocabulary's ids are not 0, 1, 2, ... without a gap": not sound_ids,
            # What no tokens are for is left out of a text. Of control characters and rare scripts one may bear that.
            "not all of the 256 bytes are tokens": missing & {*b"\n", *range(32, 127), *range(0x80, 0xC0)},
            "the merges do not make the other tokens one by one, in their order":
                made != [rank for rank, token in enumerate(ranks) if len(token) > 1]
                and not (model.get("ignore_merges") and made == sorted(made) and {*merges} == {*every_split(ranks)}),
        }
        specials, words = ({token["content"]: token["id"] for token in added if token["special"] is special}
                           for special in (True, False))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        refuse(f"{file} is not the whole tokenizer.json of a byte-level BPE ({type(error).__name__}: {error}).")
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        refuse(*(f"{file}: {reason}. Its tokens could not be reproduced exactly." for reason in wrong))
    normalizer = data.get("normalizer")
    return Tokenizer(ranks, pattern, specials, merges, _roles(file), words, nfc=normalizer == {"type": "NFC"},
                     marker=normalizer == PREPENDED)


def _roles(file, **defaults):
    """{role: name of its token, or None}, as the tokenizer_config.json beside the file has it."""
    config = read_json(file.with_name("tokenizer_config.json"), {})
    names = {role: config.get(f"{role}_token", defaults.get(role, f"<|{role}|>")) for role in ("bos", "eos", "pad")}
    # An object where older transformers wrote it.
    names = {role: name.get("content", name) if isinstance(name, dict) else name for role, name in names.items()}
    refuse(*(f"{file.with_name('tokenizer_config.json')}: {role}_token is {name!r}, expected the name of a token"
             for role, name in names.items() if not (name is None or isinstance(name, str))))
    return names


def _from_pieces(file, content, reasons=None, added=None):
    """A tokenizer of SentencePiece's pieces; content: of a tokenizer.model. added: what stands behind them, in a folder
    with tokenizer.model alone read from what lies beside it."""
    try:
        engine = SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        refuse(*(f"{file}: {reason}." for reason, holds in (reasons or {}).items() if holds),
               f"{file} is not a SentencePiece model ({str(error).splitlines()[0]}).")
    ranks, specials, more = pieces.described(engine)
    if added is None:
        config = read_json(file.with_name("tokenizer_config.json"), {})
        try:
            added = {**read_json(file.with_name("added_tokens.json"), {}),
                     **{token["content"]: int(id) for id, token in config.get("added_tokens_decoder", {}).items()}}
        except (ValueError, TypeError, AttributeError):
            refuse(f"{file.parent}: the added_tokens_decoder is not " + '{id: {"content": name}, ...}.')
    refuse(*(f"{file}: {reason}" for reason in wrong_names(added)))
    specials = {**specials, **added}
    for id in added.values():
        if id < len(ranks):
            ranks[id] = b""
    wrong = [reason for reason, holds in {**(reasons or {}), **more}.items() if holds]
    wrong += [f"text becomes the special token {name!r}" for name, id in specials.items() if id in engine.encode(name)]
    refuse(*(f"{file}: {reason}. Its tokens could not be reproduced exactly." for reason in wrong))
    name_of = {id: name for name, id in specials.items()}
    unknown = name_of[engine.unk_id()]
    roles = _roles(file, bos=name_of.get(engine.bos_id()), eos=name_of.get(engine.eos_id()))
    # With all bytes in it nothing is unknown: where there is no padding, that token is free to be it.
    roles["pad"] = roles["pad"] if roles["pad"] in specials else unknown
    return Tokenizer(ranks, None, specials, roles=roles, model=content)


def _from_rank_file(path):
    """
    A vocabulary to compare with: GPT-2's vocab.bpe (one merge a line, behind the 256 bytes) or tiktoken's lines of
    base64 and rank. Such a file says neither its pattern nor its special tokens, so both come from its name.
    """
    pattern, specials = RANK_FILES.get(re.split(r"[_.]", path.name)[0], (None, None))
    if pattern is None:
        refuse(f"{path}: a rank file does not say how text is cut; known by their names are {', '.join(RANK_FILES)}.")
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        refuse(f"{path} cannot be read: {error.strerror}.")
    merges = path.suffix == ".bpe"
    ranks = {bytes([byte]): id for id, byte in enumerate(BYTE_ORDER)} if merges else {}
    for number, line in enumerate(lines, 1):
        if number == 1 and merges and line.startswith("#version:"):        # further down it would be a token
            continue
        try:
            first, second = line.split()
            if merges:
                left, right = chars_to_bytes(first), chars_to_bytes(second)
                token, sound = left + right, left in ranks and right in ranks
            else:
                token, sound = base64.b64decode(first, validate=True), second == str(len(ranks))
            if token in ranks or not sound:
                raise ValueError
        except (ValueError, KeyError):
            refuse(f"{path}, line {number}: found {line!r}, expected a token that no line before has, as "
                   + ("two earlier ones." if merges else "base64 and its rank: 0, 1, 2, ... from the first line on."))
        ranks[token] = len(ranks)
    if sum(len(token) == 1 for token in ranks) < 256:
        refuse(f"{path}: not all of the 256 bytes are tokens, so there is text that it could not encode.")
    specials = {name: id for name, id in specials.items() if id >= len(ranks)}
    return Tokenizer(list(ranks), PATTERNS[pattern], specials, roles={"bos": None, "eos": "<|endoftext|>", "pad": None})
