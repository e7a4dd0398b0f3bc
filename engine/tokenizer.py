"""
Byte-level BPE, in use: text to token ids and back. (The training stands in train_tokenizer.py.) Other models' too:
SentencePiece's pieces stand in engine/pieces.py.

A tokenizer is four things, and nothing else decides an id:

    pattern     a regular expression that cuts text into pieces; no token ever crosses a piece's border
    ranks       the byte strings of the ordinary tokens, in the order in which training made them; id = rank
    merges      which two tokens each of them was made of (only Hugging Face's file wants to know)
    specials    names such as <|bos|> with ids behind the ranks; text never turns into one of them

Encoding a piece: start from its single bytes, and as long as some neighbouring pair joins into a token, join the pair
of lowest rank. tiktoken does that, at 18 MB/s; tests/test_tokenizer.py has it by hand, in ten lines.

`hash` is a sha256 over those contents. It is written beside every shard and checkpoint, so that ids are never read
with another tokenizer than the one they were made with.
"""

import base64
import hashlib
import json
import re
import unicodedata
from pathlib import Path

import regex
import tiktoken
from sentencepiece import SentencePieceProcessor

from configurator import refuse
from engine import pieces
from engine.files import read_json, write_atomic, write_json

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

# How text is cut. The GPT-4 form, in Llama-3's spelling: contractions; a word with the one character before it
# (mostly its space); digits in groups of at most three; punctuation with the line ends behind it; line ends; spaces,
# of which the last is left for the word that follows. OpenAI's newer files write `\p{N}{1,3}+`: possessive for some
# engines, but for the one inside Hugging Face's tokenizers "repeat the group", which gives other tokens. The plain
# form means the same everywhere.
PATTERNS = {
    "gpt4": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}

# tiktoken's regex engine gives up (as a panic, which `except Exception` does not catch) at a million steps of
# backtracking, and `\s+(?!\S)` takes one step for each character of a run of whitespace.
LONG_WHITESPACE = 100_000


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
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Tokenizer:
    """
    ranks     list of bytes, the ordinary tokens in order of their ids
    pattern   regular expression that cuts text into pieces
    specials  dict name -> id (not inside the ranks)
    merges    list of (left id, right id) in the order of training; empty where it is not known
    roles     which special is 'bos', 'eos', 'pad' (a dict of names)
    words     dict name -> id of further tokens that are no specials: a text that has the name has the token (Qwen)
    nfc       whether text is brought into Unicode's normal form C first: decode(encode(text)) is that form of it
    model     the content of a SentencePiece tokenizer.model, in place of a pattern; ranks are the bytes of its pieces
    """

    def __init__(self, ranks, pattern, specials, merges=(), roles=None, words=None, nfc=False, model=None):
        self.ranks, self.pattern, self.specials, self.merges = ranks, pattern, specials, list(merges)
        self.words, self.nfc, self.model = words or {}, nfc, model
        self.roles = roles or {role: f"<|{role}|>" for role in ("bos", "eos", "pad")}
        self.vocab_size = max([len(ranks) - 1, *specials.values(), *self.words.values()]) + 1
        self.bos_id, self.eos_id, self.pad_id = (specials.get(self.roles[role]) for role in ("bos", "eos", "pad"))
        self.files = {}         # name -> content, where it was read from a folder
        # Bytes of each id; none for specials, so that len(token_bytes[id]) counts what a token adds to a text.
        self.token_bytes = ranks + [b""] * (self.vocab_size - len(ranks))
        for word, id in self.words.items():
            self.token_bytes[id] = word.encode()
        longest_first = sorted(self.words, key=len, reverse=True)
        self._words = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if words else None
        self._names = {id: name.encode() for name, id in specials.items()}
        # The specials must be known to tiktoken (an Encoding without any is a quarter slower), but encode_ordinary, the
        # only entry that we use, never produces them.
        if model is None:
            rank_of = {token: rank for rank, token in enumerate(ranks)}
            self.engine = tiktoken.Encoding("teardown", pat_str=pattern, mergeable_ranks=rank_of,
                                            special_tokens=specials)
        else:
            self.engine = SentencePieceProcessor(model_proto=model)
        # What encode puts before every text, and decode takes away.
        self.prefix = " " if model and self.engine.normalize("a") != "a" else ""
        head = {"format": 1, "pattern": pattern, "specials": sorted(specials.items()),
                "normalizer": "NFC" if nfc else None, **({"words": sorted(self.words.items())} if words else {})}
        # With lengths: [b"ab"] is not [b"a", b"b"].
        parts = [json.dumps(head).encode(), *ranks, *([model] if model else [])]
        self.hash = hashlib.sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).hexdigest()

    def special(self, name):
        """The id of a special token; KeyError when there is none of that name."""
        return self.specials[name]

    # ---- text to ids

    def encode(self, text):
        """
        -> list of int. Adds no BOS or EOS, and never makes a special token: "<|eos|>" in a text is seven ordinary
        tokens. decode(encode(text)) is the text that `clean` gives; with SentencePiece, which writes it so, "\u2581"
        comes back as a space.
        """
        if not self.words:
            return self._encode(self.clean(text))
        return [id for part in self._words.split(self.clean(text))
                for id in ([self.words[part]] if part in self.words else self._encode(part))]

    def clean(self, text):
        """The text that encode reads: with lone surrogates as U+FFFD and, where the tokenizer wants it, in NFC."""
        text = valid_unicode(text)
        if not self.nfc or unicodedata.is_normalized("NFC", text):
            return text
        parts = self._words.split(text) if self.words else [text]      # no accent reaches over a word's border
        return "".join(unicodedata.normalize("NFC", part) for part in parts)

    def _encode(self, text):
        if self.model:
            return self.engine.encode(text)
        if len(text) >= LONG_WHITESPACE and max(map(len, re.findall(r"\s+", text)), default=0) >= LONG_WHITESPACE:
            # The slow way round (see LONG_WHITESPACE): another regex engine cuts, tiktoken still merges.
            cut = regex.findall(self.pattern, text)
            return [id for piece in cut for id in self.engine._encode_single_piece(piece)]
        return self.engine.encode_ordinary(text)

    # ---- ids to text

    def decode_bytes(self, ids, skip_special=True):
        """The bytes that the ids stand for. One token may be half a character: to show text while it is being
        generated, feed these bytes to an incremental UTF-8 decoder. An id beyond the vocabulary stands for nothing: a
        model may have more rows than its tokenizer has tokens, and until it is trained it says them."""
        names = {} if skip_special else self._names
        return b"".join([names.get(id) or self.token_bytes[id] for id in map(int, ids) if id < self.vocab_size])

    def decode(self, ids, skip_special=True, begins=True):
        """Text; bytes that are not UTF-8 (half a character, say) come out as U+FFFD. begins: a text begins with them,
        so what encode has put before it is taken away."""
        text = self.decode_bytes(ids, skip_special).decode("utf-8", "replace")
        return text.removeprefix(self.prefix) if begins else text

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
        chars = [bytes_to_chars(token) for token in self.ranks]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added = sorted({**self.specials, **self.words}.items(), key=lambda item: item[1])
        # No format_version of ours: tokenizers refuses the file when it meets an unknown key.
        content = {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": id, "content": name, **flags, "special": name in self.specials}
                             for name, id in added],
            "normalizer": {"type": "NFC"} if self.nfc else None,
            "pre_tokenizer": _pre_tokenizer(self.pattern),
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE", **dict.fromkeys(UNUSED), "fuse_unk": False, "byte_fallback": False,
                # Training leaves one merge for each token. With fewer or more of them (a foreign vocabulary may list
                # every way to make a token) a piece that is a token must be looked up before anything is merged.
                "ignore_merges": len(self.merges) != len(self.ranks) - 256,
                "vocab": {token: rank for rank, token in enumerate(chars)},
                "merges": [f"{chars[left]} {chars[right]}" for left, right in self.merges],
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
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self.ranks)]
        write_atomic(file, b"".join(lines))


def find_tokenizer(folder):
    """The file that a folder's tokenizer is read from; None when there is none."""
    return next((Path(folder) / name for name in SOURCES if (Path(folder) / name).is_file()), None)


def _pre_tokenizer(pattern):
    return {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]}


def _from_json(file):
    """Hugging Face's tokenizer.json, when it is a BPE that we can reproduce exactly: byte-level, or SentencePiece's."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["model"].get("byte_fallback") and data["model"].get("type") == "BPE":
            content, reasons = pieces.written(data)
            added = {token["content"]: token["id"] for token in data["added_tokens"]}
            return _from_pieces(file, content, reasons, added)
        model, vocab, added = data["model"], data["model"]["vocab"], data.get("added_tokens", [])
        pattern = data["pre_tokenizer"].get("pretokenizers", [{}])[0].get("pattern", {}).get("Regex", "")
        for step in data["pre_tokenizer"].get("pretokenizers", []):
            step.update({"trim_offsets": True} if "trim_offsets" in step else {})      # not about ids
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        made = [vocab[left + right] for left, right in pairs]
        ids = [*vocab.values(), *(token["id"] for token in added)]
        ranks = [chars_to_bytes(token) for token in sorted(vocab, key=vocab.get)]
        reasons = {
            f"the model is {model.get('type')}, not BPE": model.get("type", "BPE") != "BPE",
            "text is changed first, and not into NFC": data.get("normalizer") not in (None, {"type": "NFC"}),
            "the model has unknown tokens, affixes or dropout": any(model.get(key) for key in UNUSED),
            "the pre_tokenizer is not Split(Regex, Isolated) and ByteLevel without prefix space":
                data["pre_tokenizer"] != _pre_tokenizer(pattern),
            "the pattern has a possessive count, like {1,3}+, which engines read differently":
                re.search(r"\{\d*,?\d*\}\+", pattern),
            "the pattern passes over some characters, which would be lost": regex.sub(pattern, "", SAMPLE),
            "there are added tokens that are matched in ordinary text in a way of their own":
                any(not token["special"] and any(token.get(flag) for flag in FLAGS) for token in added),
            "two tokens have one id": len(set(ids)) < len(ids),
            "the vocabulary's ids are not 0, 1, 2, ... without a gap": max(vocab.values()) >= len(vocab),
            "not all of the 256 bytes are tokens": sum(len(token) == 1 for token in ranks) < 256,
            "the merges do not make the tokens behind the 256 bytes one by one, in their order":
                not model.get("ignore_merges") and made != list(range(256, len(vocab))),
        }
        merges = [(vocab[left], vocab[right]) for left, right in pairs]
        specials, words = ({token["content"]: token["id"] for token in added if token["special"] is special}
                           for special in (True, False))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, regex.error) as error:
        refuse(f"{file} is not the whole tokenizer.json of a byte-level BPE ({type(error).__name__}: {error}).")
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        refuse(*(f"{file}: {reason}. Its tokens could not be reproduced exactly." for reason in wrong))
    return Tokenizer(ranks, pattern, specials, merges, _roles(file), words, nfc=data.get("normalizer") is not None)


def _roles(file, **defaults):
    """{role: name of its token, or None}, as the tokenizer_config.json beside the file has it."""
    config = read_json(file.with_name("tokenizer_config.json"), {})
    names = {role: config.get(f"{role}_token", defaults.get(role, f"<|{role}|>")) for role in ("bos", "eos", "pad")}
    # An object where older transformers wrote it.
    return {role: name["content"] if isinstance(name, dict) else name for role, name in names.items()}


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
        added = {**read_json(file.with_name("added_tokens.json"), {}),
                 **{token["content"]: int(id) for id, token in config.get("added_tokens_decoder", {}).items()}}
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
    pattern = {"gpt2": "gpt2", "cl100k": "gpt4", "qwen": "qwen"}.get(re.split(r"[_.]", path.name)[0])
    if pattern is None:
        refuse(f"{path}: a rank file does not say how text is cut; known by their names are gpt2, cl100k and qwen.")
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        refuse(f"{path} cannot be read: {error.strerror}.")
    merges = path.suffix == ".bpe"
    ranks = {bytes([byte]): id for id, byte in enumerate(BYTE_ORDER)} if merges else {}
    for number, line in enumerate(lines, 1):
        if line.startswith("#version:"):
            continue
        try:
            first, second = line.split()
            token = chars_to_bytes(first + second) if merges else base64.b64decode(first, validate=True)
            if token in ranks or not merges and int(second) != len(ranks):
                raise ValueError
        except (ValueError, KeyError):
            refuse(f"{path}, line {number}: found {line!r}, expected a token that no line before has, as "
                   + ("two parts." if merges else "base64 and its rank: 0, 1, 2, ... from the first line on."))
        ranks[token] = len(ranks)
    if sum(len(token) == 1 for token in ranks) < 256:
        refuse(f"{path}: not all of the 256 bytes are tokens, so there is text that it could not encode.")
    return Tokenizer(list(ranks), PATTERNS[pattern], {"<|endoftext|>": len(ranks)},
                     roles={"bos": None, "eos": "<|endoftext|>", "pad": None})
