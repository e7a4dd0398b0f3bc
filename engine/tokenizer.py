"""
Byte-level BPE, in use: text to token ids and back. (The training stands in train_tokenizer.py.)

A tokenizer is four things, and nothing else decides an id:

    pattern     a regular expression that cuts text into pieces; no token ever crosses a piece's border
    ranks       the byte strings of the ordinary tokens, in the order in which training made them; id = rank
    merges      which two tokens each of them was made of (only Hugging Face's file wants to know)
    specials    names such as <|bos|> with ids behind the ranks; text never turns into one of them

Encoding a piece: start from its single bytes, and as long as some neighbouring pair joins into a token, join the pair
of lowest rank. `encode_by_hand` says that in ten lines; tiktoken does the same at 18 MB/s and is the engine for all
real work.

`hash` is a sha256 over those contents. It is written beside every shard and checkpoint, so that ids are never read
with another tokenizer than the one they were made with.
"""

import base64
import codecs
import hashlib
import json
import re
from pathlib import Path

import regex
import tiktoken

from configurator import refuse
from engine.files import read_json, write_atomic, write_json

FORMAT = 1
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

# How text is cut. The GPT-4 form, in Llama-3's spelling: contractions; a word with the one character before it
# (mostly its space); digits in groups of at most three; punctuation with the line ends behind it; line ends; spaces,
# of which the last is left for the word that follows. OpenAI's newer files write `\p{N}{1,3}+`: possessive for some
# engines, but for the one inside Hugging Face's tokenizers "repeat the group", which gives other tokens. The plain
# form means the same everywhere.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt4": _GPT4,
    "gpt4_digits2": _GPT4.replace("{1,3}", "{1,2}"),
    "gpt4_digits1": _GPT4.replace("{1,3}", ""),
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}

# tiktoken's regex engine gives up (as a panic, which `except Exception` does not catch) at a million steps of
# backtracking, and `\s+(?!\S)` takes one step for each character of a run of whitespace.
LONG_WHITESPACE = 100_000


def _byte_alphabet():
    """
    The one printable character that stands for each byte in tokenizer.json, GPT-2's invention: bytes that print stand
    for themselves, the other 68 are moved to U+0100 and up. -> list of 256 characters, indexed by the byte.
    """
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    moved = [byte for byte in range(256) if byte not in printing]
    place = {byte: byte for byte in printing} | {byte: 0x100 + i for i, byte in enumerate(moved)}
    return [chr(place[byte]) for byte in range(256)]


BYTE_TO_CHAR = _byte_alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}
BYTE_ORDER = sorted(range(256), key=BYTE_TO_CHAR.__getitem__)      # id -> byte, for the first 256 ids
_TO_CHARS = {byte: BYTE_TO_CHAR[byte] for byte in range(256)}      # for str.translate, over bytes read as latin-1
_TO_BYTES = {ord(char): byte for char, byte in CHAR_TO_BYTE.items()}

# The layout of engine/chat.py, in the language in which Hugging Face stores such things.
CHAT_TEMPLATE = (
    "{{- '<|bos|>' -}}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def bytes_to_chars(token):
    """b' the' -> 'Ġthe', the form in which tokenizer.json stores a token."""
    return token.decode("latin-1").translate(_TO_CHARS)


def valid_unicode(text):
    """
    The text with each lone surrogate (half of a UTF-16 pair; not a character, has no UTF-8 form) replaced by U+FFFD,
    and a proper pair of surrogates by its character. JSON and broken web pages contain them. Any other text comes
    back as it is.
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
    merges    list of (left id, right id) in the order of training, or None where it is not known
    roles     which special is 'bos', 'eos', 'pad' (a dict of names)
    """

    def __init__(self, ranks, pattern, specials, merges=None, roles=None, source="tokenizer"):
        roles = roles or {"bos": "<|bos|>", "eos": "<|eos|>", "pad": "<|pad|>"}
        problems = _problems(ranks, pattern, specials)
        if problems:
            refuse(*(f"{source}: {problem}" for problem in problems))
        self.ranks, self.pattern, self.specials, self.merges, self.roles = ranks, pattern, specials, merges, roles
        self.vocab_size = max([len(ranks) - 1, *specials.values()]) + 1
        self.bos_id, self.eos_id, self.pad_id = (specials.get(roles[role]) for role in ("bos", "eos", "pad"))
        # Bytes of each id; none for specials, so that len(token_bytes[id]) counts what a token adds to a text.
        self.token_bytes = ranks + [b""] * (self.vocab_size - len(ranks))
        self._names = {id: name.encode() for name, id in specials.items()}
        # The specials must be known to tiktoken (an Encoding without any is a quarter slower), but encode_ordinary, the
        # only entry that we use, never produces them.
        rank_of = {token: rank for rank, token in enumerate(ranks)}
        self.engine = tiktoken.Encoding("teardown", pat_str=pattern, mergeable_ranks=rank_of, special_tokens=specials)
        self.hash = self._content_hash()

    def special(self, name):
        """The id of a special token; KeyError when there is none of that name."""
        return self.specials[name]

    # ---- text to ids

    def encode(self, text):
        """
        -> list of int. Adds no BOS or EOS, and never makes a special token: "<|eos|>" in a text is seven ordinary
        tokens. Lone surrogates count as U+FFFD; otherwise decode(encode(text)) == text for every text.
        """
        if len(text) >= LONG_WHITESPACE and _longest_whitespace(text) >= LONG_WHITESPACE:
            # The slow way round (see LONG_WHITESPACE): another regex engine cuts, tiktoken still merges.
            pieces = regex.findall(self.pattern, valid_unicode(text))
            return [id for piece in pieces for id in self.engine._encode_single_piece(piece)]
        return self.engine.encode_ordinary(text)

    def encode_batch(self, texts):
        """encode() of each. One after the other: threads gained nothing, whoever has cores uses processes."""
        return [self.encode(text) for text in texts]

    def encode_by_hand(self, text):
        """The same ids as encode(), by the algorithm in the open. For reading and for tests; a hundred times slower."""
        rank_of = self.engine._mergeable_ranks
        ids = []
        for piece in regex.findall(self.pattern, valid_unicode(text)):
            piece = piece.encode()
            parts = [piece[i:i + 1] for i in range(len(piece))]
            while len(parts) > 1:
                joined = [rank_of.get(left + right, len(rank_of)) for left, right in zip(parts, parts[1:])]
                lowest = min(joined)
                if lowest == len(rank_of):
                    break
                i = joined.index(lowest)                       # the leftmost one when the pair occurs twice
                parts[i:i + 2] = [parts[i] + parts[i + 1]]
            ids.extend(rank_of[part] for part in parts)
        return ids

    # ---- ids to text

    def decode_bytes(self, ids, skip_special=True):
        """The bytes that the ids stand for. ValueError for an id that is not in the vocabulary."""
        ids = [int(id) for id in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(id for id in ids if not 0 <= id < self.vocab_size)
            raise ValueError(f"token id {wrong} is not in the vocabulary of {self.vocab_size}")
        if skip_special:
            return b"".join([self.token_bytes[id] for id in ids])
        return b"".join([self._names.get(id) or self.token_bytes[id] for id in ids])

    def decode(self, ids, skip_special=True):
        """Text; bytes that are not UTF-8 (half a character, say) come out as U+FFFD."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", "replace")

    def stream(self):
        """A TextStream: decodes ids one at a time, for text that is shown while it is being generated."""
        return TextStream(self)

    # ---- identity

    def _content_hash(self):
        digest = hashlib.sha256()
        specials = sorted(self.specials.items())
        head = {"format": FORMAT, "pattern": self.pattern, "specials": specials, "normalizer": None}
        for part in [json.dumps(head).encode(), *self.ranks]:
            digest.update(len(part).to_bytes(4, "little") + part)      # lengths: [b"ab"] is not [b"a", b"b"]
        return digest.hexdigest()

    # ---- files

    @classmethod
    def load(cls, path):
        """
        A folder with tokenizer.json, that file itself, or a rank file (.tiktoken, or GPT-2's .bpe) of a known name.
        Refuses a file whose tokens it could not reproduce, with the reason.
        """
        path = Path(path)
        if path.suffix in (".tiktoken", ".bpe"):
            return _from_rank_file(path)
        file = path / "tokenizer.json" if path.suffix != ".json" else path
        if not file.is_file():
            refuse(f"{file} does not exist; python train_tokenizer.py makes one (with the config file of this run).")
        return _from_json(file)

    def save(self, folder):
        """tokenizer.json and tokenizer_config.json, a folder that transformers reads. The same bytes every time."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # tokenizer.json has no format_version of ours: tokenizers refuses the file when it meets an unknown key.
        write_atomic(folder / "tokenizer.json", json.dumps(self._as_json(), ensure_ascii=False, indent=1) + "\n")
        write_json(folder / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.roles["bos"], "eos_token": self.roles["eos"], "pad_token": self.roles["pad"],
            "add_bos_token": False, "add_eos_token": False,
            "clean_up_tokenization_spaces": False,             # the clean-up removes spaces that were in the text
            "model_max_length": 10**18,                        # the model's config.json knows it
            "chat_template": CHAT_TEMPLATE,
        })

    def save_ranks(self, file):
        """tiktoken's form: one line a token, its bytes in base64 and its rank. Knows neither pattern nor specials."""
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self.ranks)]
        write_atomic(file, b"".join(lines))

    def _as_json(self):
        chars = [bytes_to_chars(token) for token in self.ranks]
        merges = self.merges if self.merges is not None else _every_split(self.ranks)
        return {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [
                {"id": id, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": True}
                for name, id in sorted(self.specials.items(), key=lambda item: item[1])
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ]},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                "ignore_merges": self.merges is None,
                "vocab": {token: rank for rank, token in enumerate(chars)},
                "merges": [f"{chars[left]} {chars[right]}" for left, right in merges],
            },
        }


class TextStream:
    """
    Decodes a growing sequence. `add(id)` returns the text that has become certain: a character of four bytes appears
    when its last byte has come, never as halves. `end()` returns what is left (U+FFFD for a character that stayed
    incomplete).
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, id):
        return self.decoder.decode(self.tokenizer.decode_bytes([id]))

    def end(self):
        return self.decoder.decode(b"", final=True)


def _longest_whitespace(text):
    return max((match.end() - match.start() for match in re.finditer(r"\s+", text)), default=0)


def _problems(ranks, pattern, specials):
    """What keeps these parts from being a tokenizer. -> list of sentences."""
    problems = []
    known = set(ranks)
    if missing := [byte for byte in range(256) if bytes([byte]) not in known]:
        problems.append(f"{len(missing)} of the 256 single bytes are not tokens (the first: {missing[0]}), "
                        "so some texts could not be encoded at all")
    if len(known) != len(ranks):
        problems.append(f"{len(ranks) - len(known)} tokens occur twice, so ids would not be unique")
    taken = set(range(len(ranks)))
    for name, id in specials.items():
        if id in taken:
            problems.append(f"the special token {name} has id {id}, which another token has")
        if name.encode() in known:
            problems.append(f"the special token {name} is an ordinary token too")
        taken.add(id)
    if re.search(r"\{\d*,?\d*\}\+", pattern):
        problems.append(f"the pattern has a possessive count, like {{1,3}}+, which engines read differently: {pattern}")
    try:
        regex.compile(pattern)
    except regex.error as error:
        problems.append(f"the pattern is not a regular expression ({error}): {pattern}")
    return problems


def _every_split(ranks):
    """
    Merges for a vocabulary of which only the ranks are known: each way to put a token together from two others, in
    the order of the tokens' ids. One split a token is not enough: some real tokens (Llama-3's ".:.:") are reached by
    no single one.
    """
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    merges = []
    for token in ranks:
        splits = [(rank_of.get(token[:i]), rank_of.get(token[i:])) for i in range(1, len(token))]
        merges.extend(sorted(split for split in splits if None not in split))
    return merges


def _from_json(file):
    """Hugging Face's tokenizer.json, when it is a byte-level BPE that we can reproduce exactly."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if reasons := _foreign(data):
            refuse(*(f"{file}: {reason}. Its tokens could not be reproduced exactly." for reason in reasons))
        vocab, pattern = data["model"]["vocab"], _pattern_of(data["pre_tokenizer"])
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in data["model"]["merges"]]
        specials = {token["content"]: token["id"] for token in data.get("added_tokens", [])}
        made = [vocab[left + right] for left, right in merges]
        merges = [(vocab[left], vocab[right]) for left, right in merges]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(f"{file} is not a whole tokenizer.json ({type(error).__name__}: {error}).")
    problems = []
    if list(vocab.values()) != list(range(len(vocab))):
        vocab = dict(sorted(vocab.items(), key=lambda item: item[1]))
        if list(vocab.values()) != list(range(len(vocab))):
            problems.append("the ids of the vocabulary are not 0, 1, 2, ... without a gap")
    if strange := set("".join(vocab)) - set(BYTE_TO_CHAR):
        problems.append(f"the vocabulary has characters that stand for no byte: {sorted(strange)[:5]}")
    if any(a > b for a, b in zip(made, made[1:])):
        problems.append("the merges do not stand in the order of the ids they make")
    ignore_merges = data["model"].get("ignore_merges", False)
    if not ignore_merges and len(set(made)) != len(vocab) - 256:
        problems.append(f"{len(vocab) - 256} tokens are longer than a byte, the merges make {len(set(made))} of them")
    if problems:
        refuse(*(f"{file}: {problem}. Its tokens could not be reproduced exactly." for problem in problems))
    ranks = [token.translate(_TO_BYTES).encode("latin-1") for token in vocab]
    # One merge for each token is how training leaves it; other files are written back with every split, as they came.
    trained = not ignore_merges and len(merges) == len(ranks) - 256
    return Tokenizer(ranks, pattern, specials, merges if trained else None, _roles(file.parent), str(file))


def _foreign(data):
    """What in a tokenizer.json is outside byte-level BPE without normalisation. -> list of reasons."""
    model, reasons = data["model"], []
    if model.get("type", "BPE") != "BPE":
        reasons.append(f"the model is {model['type']}, not BPE")
    if normalizer := data.get("normalizer"):
        reasons.append(f"text is normalised first ({normalizer.get('type')}), so decode(encode(text)) is not the text")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            reasons.append(f"the model has {key} = {model[key]!r}")
    if _pattern_of(data.get("pre_tokenizer")) is None:
        reasons.append("the pre_tokenizer is not Split(Regex, Isolated) and ByteLevel without prefix space")
    if (data.get("decoder") or {}).get("type") != "ByteLevel":
        reasons.append("the decoder is not ByteLevel")
    if plain := [token["content"] for token in data.get("added_tokens", []) if not token.get("special")]:
        reasons.append(f"{len(plain)} added tokens are matched in ordinary text (the first: {plain[0]!r})")
    return reasons


def _pattern_of(pre_tokenizer):
    """The regular expression of a pre_tokenizer, or None where it does anything else than cut and map bytes."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if len(steps) == 1:
        return PATTERNS["gpt2"] if last.get("use_regex", True) else None
    split = steps[0]
    plain_split = split.get("type") == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    if len(steps) != 2 or last.get("use_regex", True) or not plain_split:
        return None
    return split["pattern"].get("Regex")


def _roles(folder):
    """Which special tokens are BOS, EOS and padding, from tokenizer_config.json where there is one."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    config = read_json(file)

    def name(role):
        value = config.get(f"{role}_token")
        return value["content"] if isinstance(value, dict) else value
    return {role: name(role) for role in ("bos", "eos", "pad")}


def _from_rank_file(path):
    """
    A rank file says neither its pattern nor its special tokens, so both come from its name. Such a tokenizer has no
    BOS; it serves to compare.
    """
    patterns = {"gpt2": "gpt2", "r50k": "gpt2", "p50k": "gpt2", "cl100k": "gpt4"}
    name = next((name for name in patterns if name in path.name), None)
    if name is None:
        refuse(f"{path}: a rank file does not say how text is cut; known by their names are {', '.join(patterns)}.")
    if not path.is_file():
        refuse(f"{path} does not exist.")
    ranks = _read_bpe(path) if path.suffix == ".bpe" else _read_tiktoken(path)
    return Tokenizer(ranks, PATTERNS[patterns[name]], {"<|endoftext|>": len(ranks)}, source=str(path),
                     roles={"bos": None, "eos": "<|endoftext|>", "pad": None})


def _read_tiktoken(path):
    """Lines of base64 and rank. -> list of bytes in order of rank."""
    ranks, problems = {}, []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            if int(rank) in ranks:
                problems.append(f"{path}, line {number}: rank {int(rank)} was there before")
            ranks[int(rank)] = base64.b64decode(token, validate=True)
        except ValueError:
            if line.strip():
                problems.append(f"{path}, line {number}: not base64 and a rank: {line[:40]!r}")
    if sorted(ranks) != list(range(len(ranks))):
        problems.append(f"{path}: the ranks are not 0, 1, 2, ... without a gap")
    if problems:
        refuse(*problems[:20])
    return [ranks[rank] for rank in range(len(ranks))]


def _read_bpe(path):
    """GPT-2's vocab.bpe: one merge a line, in order of rank, behind the 256 bytes. -> list of bytes."""
    lines = path.read_text(encoding="utf-8").split("\n")
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    try:
        made = [bytes(CHAR_TO_BYTE[char] for char in left + right) for left, right in merges]
    except (ValueError, KeyError) as error:
        refuse(f"{path} is not a list of merges ({type(error).__name__}: {error}).")
    return [bytes([byte]) for byte in BYTE_ORDER] + made
