"""The trainer against its plain twin and Hugging Face's; the tokenizer against tiktoken, Hugging Face's and itself."""
import base64
import json
import os
import pydoc_data.topics
import random
import signal
import subprocess
import sys
import time
import unicodedata
from collections import Counter

import pytest
import regex
import tiktoken
import transformers
import zstandard

import train_tokenizer
from bench.tokenizer import documents, ours, with_rustbpe, with_tokenizers
from bpe import merging
from bpe import report as reports
from configurator import configure
from engine import workers
from engine.files import write_json
from engine.tokenizer import (BYTE_ORDER, PATTERNS, SPECIAL_TOKENS, Tokenizer, bytes_to_chars, encode_by_hand,
                              wrong_pattern)
from train_tokenizer import KNOWN, count_in_parallel, count_pieces, read_texts, train, train_slowly

TOPICS = [text for _, text in sorted(pydoc_data.topics.topics.items())]
SPECIMENS = [
    "", " ", "a", "\n", "\r\n", "a\r\n\r\n b", "\x00", "a\x00b", "  two   spaces    ", "\t\ttabs\t",
    "it's I'LL it'\u017f", "\x1c\x1d \x85 \xa0", "<|eos|>", "<|bos|><|user|>hi<|end|>", "x <|end|>y", "<|pad|",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f44d\U0001f3fd", "na\u00efve nai\u0308ve",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8", "12345678 3.14 0x1F \u0663\u0664", "\u202eabc\u202c \u200b\ufeff\u3000",
    "def f(x):\n    return x  # tail   \n\n\n", "^" * 300, " " * 300 + "x", "\n" * 300, "ab" * 300, "\ufffd\uffff",
    "snake_case_name CamelCase",
]


def fuzz_texts(count, seed):
    """Strings of everything that has gone wrong somewhere, over code points that all engines' Unicode tables know."""
    rng = random.Random(seed)
    planes = [chr(c) for c in range(0x2FFF) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
    planes += [chr(c) for c in range(0x1F300, 0x1F650)] + list("\u4e00\uac00\uff21\ufb01\U00020000")
    common = list("aabbccee  \n\r\t'\".,0123ABst_-") + ["  ", "\r\n", "'s", "'ll", "123", "<|end|>", " the", "\x00"]

    def text(length):
        return "".join(rng.choice(common if rng.random() < 0.7 else planes) for _ in range(length))
    return [text(rng.randrange(1, 60)) for _ in range(count)]


def fuzz_words(rng):
    """A small corpus with many ties, runs of one letter, and overlaps: where incremental counting goes wrong."""
    alphabet = rng.choice(["a", "ab", "abc", "abcdefgh", "\xe9\xe8a"])
    counts = rng.choice([[1], [1, 2], [1, 5, 100], [2**40]])
    lengths = rng.choice([4, 9, 40])
    words = ["".join(rng.choices(alphabet, k=rng.randrange(1, lengths))) for _ in range(rng.randrange(1, 60))]
    return {word.encode(): rng.choice(counts) for word in words}


def make_tokenizer(merges, pattern=PATTERNS["gpt4"]):
    ranks = [bytes([byte]) for byte in BYTE_ORDER]
    for left, right in merges:
        ranks.append(ranks[left] + ranks[right])
    return Tokenizer(ranks, pattern, {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}, merges)


@pytest.fixture(scope="module")
def tokenizer():
    words = {piece.encode(): n for piece, n in count_pieces(TOPICS, PATTERNS["gpt4"]).items()}
    return make_tokenizer(train(words, 1500, 2))


@pytest.fixture
def run(tmp_path, capsys):
    """run(--key=value, ...) -> (report.json, what was printed), of train_tokenizer.py in this process."""
    def call(*words):
        words += (f"--data_dir={tmp_path / 'data'}", "--workers=1")
        train_tokenizer.main(configure(vars(train_tokenizer), list(words)))
        return json.loads((call.folder / "report.json").read_text()), capsys.readouterr().out
    call.folder = tmp_path / "data" / "tokenizer"
    return call


def write_documents(folder, train, val=()):
    """docs/ and audit.json, as prepare_data.py writes them."""
    (folder / "docs").mkdir(parents=True, exist_ok=True)
    entries = []
    for split, texts in (("train", train), ("val", val)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        entries.append({"split": split, "file": f"docs/{split}_00000.jsonl.zst"})
        (folder / entries[-1]["file"]).write_bytes(zstandard.compress(lines.encode()))
    write_json(folder / "audit.json", {"documents": entries})


def results(folder):
    """All files but the lock and the circumstances (config.json has the time's commit and arguments)."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in (".lock", "config.json")}


# ---------------------------------------------------------------------------------------------------------- training

def test_fast_trainer_equals_the_plain_one(monkeypatch):
    rng = random.Random(0)
    for number in range(900):
        # Both ways of working on a pair, and each by itself.
        monkeypatch.setattr(merging, "MANY", [1, 3, 10**6][number % 3])
        words, n_merges, least = fuzz_words(rng), rng.choice([1, 5, 60]), rng.choice([1, 1, 2, 6])
        order = rng.choice([BYTE_ORDER, range(256)])
        assert train(words, n_merges, least, order) == train_slowly(words, n_merges, least, order), words


def test_worked_example():
    # "aaabdaaabac" from the Wikipedia page on BPE: aa and ab both occur 4 times; ties go to the smaller (left, right).
    byte_id = {byte: id for id, byte in enumerate(BYTE_ORDER)}
    a, b, d = (byte_id[ord(char)] for char in "abd")
    assert train({b"aaabdaaabac": 1}, 3) == [(a, a), (a, b), (256, 257)]
    tokenizer = make_tokenizer(train({b"aaabdaaabac": 1}, 3))
    assert tokenizer.encode("aaabdaaabac") == [258, d, 258, a, byte_id[ord("c")]]


def test_one_endless_piece_takes_no_quadratic_time():
    start = time.process_time()
    assert len(train({b"a" * 1_000_000: 1}, 30)) == 25               # 2, 4, 8, ..., 2 ** 19; then what is left over
    assert time.process_time() - start < 20


@pytest.mark.parametrize("many", [1, 48])
def test_counts_beyond_32_bits(many, monkeypatch):
    monkeypatch.setattr(merging, "MANY", many)
    for words in ({b"ab": 2**31, b"ab ": 2**31, b"cd": 2**32 - 1, b"ef": 2**62}, {b"ab": 7, b"cd": 2**31, b"e": 1}):
        assert train(words, 3) == train_slowly(words, 3)


@pytest.mark.parametrize("size", [4096, 32000])
def test_the_same_rank_file_as_rustbpe_and_hugging_face(size):
    texts = list(documents(5))
    identity, gpt2 = (ours(texts, size, order=order) for order in (range(256), BYTE_ORDER))
    assert len(identity) == size and identity == with_rustbpe(texts, size) and gpt2 == with_tokenizers(texts, size)


def test_the_same_ranks_as_rustbpe_and_hugging_face_on_fuzzed_corpora():
    rng = random.Random(3)
    for number in range(150):
        texts = [word.decode() for word, n in fuzz_words(rng).items() for _ in range(min(n, 3))]
        texts = [" ".join(rng.sample(texts, min(len(texts), 9))) for _ in range(9)]
        texts += fuzz_texts(rng.randrange(20), number)
        size = 256 + rng.choice([3, 40, 300])
        identity, gpt2 = (ours(texts, size, order=order) for order in (range(256), BYTE_ORDER))
        assert identity == with_rustbpe(texts, size), texts
        if number % 3 == 0:
            assert gpt2 == with_tokenizers(texts, size), texts


def test_smaller_vocabularies_are_beginnings_of_larger_ones():
    words = {p.encode(): n for p, n in count_pieces(TOPICS[:20], PATTERNS["gpt4"]).items()}
    assert train(words, 700)[:200] == train(words, 200)


def test_whatever_is_ascii_is_cut_alike_within_any_document():
    lines = [*SPECIMENS, *fuzz_texts(300, seed=8), "x\n\ny", "a.\nB", " \nC", "\n", "a\r\nb", "5 \x1c\nz", "e\u0301\nA"]
    rng = random.Random(5)
    texts = ["\n".join(rng.choices(lines, k=12)) for _ in range(60)]
    for pattern in sorted(KNOWN):
        assert not wrong_pattern(pattern)
        for text in texts:
            assert count_pieces([text], pattern) == Counter(regex.findall(pattern, text)), (pattern, text)


def test_a_text_file_of_any_size_is_read_in_parts(tmp_path, monkeypatch):
    text = "\n".join(documents(3))
    (tmp_path / "a.txt").write_bytes(text.encode())
    parts = list(read_texts([tmp_path / "a.txt"]))
    assert "".join(parts) == text and len(parts) >= 3 and max(map(len, parts)) < 2 * 2**20
    for pattern in ("gpt4", "gpt2"):            # cut where pieces end anyway
        assert count_pieces(parts, PATTERNS[pattern]) == count_pieces([text], PATTERNS[pattern])
    (tmp_path / "b.txt").write_text("\u4e00" * (20 << 20), encoding="utf-8")
    assert [len(part) >> 20 for part in read_texts([tmp_path / "b.txt"])] == [17, 3]


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_leave_no_hole_and_ascii_is_cut_alike(name):
    pattern = PATTERNS[name]
    every_ascii = "".join(chr(i) + "a1 " + chr(i) * 2 for i in range(128))
    for text in [*SPECIMENS, *fuzz_texts(500, seed=2), *TOPICS, every_ascii]:
        pieces = regex.findall(pattern, text)
        assert "".join(pieces) == text
        assert sum(count_pieces([text], pattern).values()) == len(pieces)
        if text.isascii():     # took the way through Python's `re`
            assert sorted(count_pieces([text], pattern).elements()) == sorted(pieces)


def test_order_of_documents_and_number_of_workers_do_not_matter(monkeypatch):
    monkeypatch.setattr(train_tokenizer, "text_batches", lambda texts: workers.text_batches(texts, 30_000))
    shuffled = random.Random(0).sample(TOPICS, len(TOPICS))
    one = count_pieces(TOPICS, PATTERNS["gpt4"])
    results = [one] + [count_in_parallel(shuffled, PATTERNS["gpt4"], count) for count in (1, 2, 3)]
    merges = [train({p.encode(): n for p, n in counts.items()}, 300) for counts in results]
    assert results == [one] * 4 and merges == [merges[0]] * 4


def dies(batch, pattern, prefix):
    os._exit(1)


def test_a_killed_worker_is_no_hang_and_no_short_count(monkeypatch, capsys):
    monkeypatch.setattr(train_tokenizer, "count_pieces", dies)
    monkeypatch.setattr(train_tokenizer, "text_batches", lambda texts: workers.text_batches(texts, 30_000))
    with pytest.raises(SystemExit) as stop:
        count_in_parallel(TOPICS, PATTERNS["gpt4"], 2)
    assert stop.value.code == 2 and "was killed" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ encoding

@pytest.fixture(scope="module")
def hugging_face(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    tokenizer.save(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return theirs


def as_text(theirs, text):
    """transformers' ids, with "<|end|>" in a text kept as text (it takes it for the special token unless told so)."""
    return theirs.encode(text, add_special_tokens=False, split_special_tokens=True)


def test_transformers_gives_the_same_ids_on_a_whole_text(tokenizer, hugging_face):
    text = "\n\n".join(TOPICS)
    assert as_text(hugging_face, text) == tokenizer.encode(text) == encode_by_hand(tokenizer, text)


def test_transformers_gives_the_same_ids_on_fuzzed_strings(tokenizer, hugging_face):
    for text in [*SPECIMENS, *fuzz_texts(1500, seed=3)]:
        ids = tokenizer.encode(text)
        assert as_text(hugging_face, text) == ids, text
        assert encode_by_hand(tokenizer, text) == ids, text
        assert hugging_face.decode(ids) == text == tokenizer.decode(ids)


def test_transformers_knows_the_special_tokens(tokenizer, hugging_face):
    assert (hugging_face.bos_token_id, hugging_face.eos_token_id, hugging_face.pad_token_id) == \
        (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    ids = [tokenizer.special(name) for name in SPECIAL_TOKENS]
    assert hugging_face.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == ids
    assert len(hugging_face) == tokenizer.vocab_size
    assert hugging_face.clean_up_tokenization_spaces is False
    assert hugging_face("hi").input_ids == tokenizer.encode("hi")     # adds no BOS by itself either


@pytest.mark.slow
def test_many_fuzzed_strings(tokenizer, hugging_face):
    for text in fuzz_texts(20_000, seed=4):
        assert as_text(hugging_face, text) == tokenizer.encode(text) == encode_by_hand(tokenizer, text), text


def test_demo_data_when_it_is_there(root):
    folder = root / "data" / "demo"
    if not (folder / "tokenizer" / "tokenizer.json").is_file():
        pytest.skip("the demo has not run")
    from engine.shards import read_documents
    ours = Tokenizer.load(folder / "tokenizer")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    for document in read_documents(folder, "val"):
        assert as_text(theirs, document["text"]) == ours.encode(document["text"])


def test_text_never_becomes_a_special_token(tokenizer):
    first = tokenizer.vocab_size - len(SPECIAL_TOKENS)
    text = "".join(SPECIAL_TOKENS) + " <|eos|><|end|>\n<|end|>"
    for ids in (tokenizer.encode(text), encode_by_hand(tokenizer, text)):
        assert max(ids) < first and tokenizer.decode(ids) == text
    assert [tokenizer.special(name) for name in SPECIAL_TOKENS] == list(range(first, first + 7))
    assert tokenizer.pad_id != tokenizer.eos_id


@pytest.mark.parametrize("unit", [" ", "\n", "a", "\U0001f44d", " \n"])
def test_pathological_text_is_safe_and_fast(tokenizer, unit):
    # A million spaces make tiktoken panic with a BaseException; other engines went quadratic on one letter.
    for text in (unit * 1_000_000, unit * 1_000_000 + "x")[unit != " ":]:
        start = time.process_time()
        ids = tokenizer.encode(text)
        assert time.process_time() - start < 3 and tokenizer.decode(ids) == text


def test_the_way_around_long_whitespace_gives_the_same_ids(tokenizer, monkeypatch):
    texts = ["a" + " " * n + tail for n in range(1, 40) for tail in ("", "x", "\n", "\n x", "5", "\u00e9")]
    texts += SPECIMENS + fuzz_texts(300, seed=5)
    expected = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr("engine.tokenizer.LONG_WHITESPACE", 1)
    assert [tokenizer.encode(text) for text in texts] == expected


@pytest.mark.parametrize("unit", [" ", "a", "\n", "\U0001f44d", "\t \u3000"])
def test_pathological_text_in_every_other_entry_point(tokenizer, unit):
    text = unit * (1_000_000 // len(unit)) + "x"
    ids = tokenizer.encode(text)
    for other in (next(tokenizer.encode_batch([text])).tolist(), tokenizer.encode_bytes(text.encode()),
                  tokenizer.encode(text + "<|eos|>", allowed=["<|eos|>"])[:-1]):
        assert other == ids
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(text.encode() + b"\xff")) == text.encode() + b"\xff"
    # In Python, step by step: as long as it may be without the square of it being seen.
    text, start = text[:100_000], time.process_time()
    ids = encode_by_hand(tokenizer, text)
    assert ids == tokenizer.encode(text) and "".join(tokenizer.decode_stream(ids)) == text == tokenizer.offsets(ids)[0]
    assert time.process_time() - start < 10


@pytest.fixture(scope="module")
def with_marker():
    """Words have a space before them at the beginning of a text, too."""
    words = {p.encode(): n for p, n in count_pieces(TOPICS, PATTERNS["gpt4"], " ").items()}
    merges = train(words, 1500, 2)
    ranks = make_tokenizer(merges).ranks
    specials = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    return Tokenizer(ranks, PATTERNS["gpt4"], specials, merges, marker=True)


@pytest.mark.parametrize("kind", ["tokenizer", "with_marker"])
def test_what_goes_in_comes_out(kind, request):
    tokenizer, rng = request.getfixturevalue(kind), random.Random(9)
    every = lambda: chr(rng.choice([rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0xE000, 0x110000)]))
    for text in [*SPECIMENS, *("".join(every() for _ in range(rng.randrange(60))) for _ in range(3000))]:
        ids = tokenizer.encode(text)
        places = tokenizer.offsets(ids)
        assert tokenizer.decode(ids) == text == "".join(tokenizer.decode_stream(ids)) == places[0]
        assert tokenizer.decode_bytes(ids) == ((tokenizer.prefix if text else "") + text).encode()
        assert next(tokenizer.encode_batch([text])).tolist() == ids == tokenizer.encode_bytes(text.encode())
        for id, place, following in zip(ids, places[1], [*places[1][1:], len(text)]):
            token = tokenizer.token_bytes[id].decode("utf-8", "ignore")
            assert token.removeprefix("" if place else tokenizer.prefix) in text[max(0, place - 1):following + 1]
    for _ in range(3000):
        cut = "na\u00efve \u4e00".encode()[:rng.randrange(1, 11)] + b"\xf0\x9f a"
        data = rng.choice([rng.randbytes(rng.randrange(30)), cut])
        assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)).removeprefix(tokenizer.prefix.encode()) == data


def test_text_in_batches_over_processes(tokenizer, with_marker):
    texts = [*TOPICS, *SPECIMENS, "\ud83d x"] * 3
    for one in (tokenizer, with_marker):
        expected = [one.encode(text) for text in texts]
        for count in (1, 2):
            found = list(one.encode_batch(iter(texts), count))
            assert [ids.tolist() for ids in found] == expected and {ids.dtype.name for ids in found} == {"uint32"}
    endless = tokenizer.encode_batch(iter(lambda: "again", None))
    assert [next(endless).tolist() for _ in range(3)] == [tokenizer.encode("again")] * 3


def test_special_tokens_only_where_they_are_allowed_and_the_longest_first(tokenizer):
    names = {"<|a|>": 2000, "<|a|><|b|>": 2001, "<|b|>": 2002}
    other = Tokenizer(tokenizer.ranks, tokenizer.pattern, {**tokenizer.specials, **names}, tokenizer.merges)
    text = "x<|a|><|b|> <|b|><|a|><|eos|>"
    assert max(other.encode(text)) < 1756
    assert other.encode(text, allowed=names) == [
        *other.encode("x"), 2001, *other.encode(" "), 2002, 2000, *other.encode("<|eos|>")]
    assert other.encode(text, allowed=["<|b|>"]).count(2002) == 2 and 2001 not in other.encode(text, allowed=["<|b|>"])
    assert other.encode("hi", bos=True, eos=True) == [other.bos_id, *other.encode("hi"), other.eos_id]
    assert other.encode("hi", eos=True) == [*other.encode("hi"), other.eos_id]
    with pytest.raises(ValueError, match="<|c|>"):
        other.encode("x", allowed=["<|c|>"])
    with pytest.raises(ValueError, match="BOS or EOS"):
        Tokenizer(tokenizer.ranks, tokenizer.pattern, {}).encode("x", bos=True)


def test_a_marker_before_every_text(with_marker, tokenizer, tmp_path):
    """The same word is the same token at the beginning and within; a "\u2581" in a text stays one."""
    assert with_marker.encode("the") == with_marker.encode("x the")[-1:]
    assert tokenizer.encode("the") != tokenizer.encode("x the")[-1:]
    assert with_marker.encode("") == [] and with_marker.decode(with_marker.encode("\u2581 a")) == "\u2581 a"
    with_marker.save(tmp_path)
    again, theirs = Tokenizer.load(tmp_path), transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert again.marker and again.hash == with_marker.hash != tokenizer.hash
    assert again.hash != Tokenizer(again.ranks, again.pattern, again.specials).hash
    for text in [*SPECIMENS, *fuzz_texts(1500, seed=12)]:
        ids = again.encode(text)
        assert ids == as_text(theirs, text) == encode_by_hand(again, text), text
        assert theirs.decode(ids) == text


def test_lone_surrogates_become_the_replacement_character(tokenizer, monkeypatch):
    for text, meant in (("a\ud83db", "a\ufffdb"), ("\udc00", "\ufffd"), ("\ud83d\ude00", "\U0001f600")):
        assert tokenizer.decode(tokenizer.encode(text)) == meant
        assert tokenizer.encode(text) == encode_by_hand(tokenizer, text) == tokenizer.encode(meant)
        assert tokenizer.encode("\ud83d" + " " * 150_000) == tokenizer.encode("\ufffd" + " " * 150_000)
    assert count_pieces(["a\ud83db"], PATTERNS["gpt4"]) == count_pieces(["a\ufffdb"], PATTERNS["gpt4"])


def test_decoding_bytes_and_specials(tokenizer):
    e_acute = tokenizer.encode("\u00e9\u4e00")
    assert tokenizer.decode_bytes(e_acute) == "\u00e9\u4e00".encode()
    byte_id = {byte: id for id, byte in enumerate(BYTE_ORDER)}
    assert tokenizer.decode([byte_id[0xC3]]) == "\ufffd" and tokenizer.decode_bytes([byte_id[0xC3]]) == b"\xc3"
    every_byte = bytes(range(256))
    assert tokenizer.decode_bytes([byte_id[byte] for byte in every_byte]) == every_byte
    ids = [tokenizer.bos_id, *tokenizer.encode("hi"), tokenizer.special("<|end|>")]
    assert tokenizer.decode(ids) == "hi" and tokenizer.decode(ids, skip_special=False) == "<|bos|>hi<|end|>"
    assert sum(len(tokenizer.token_bytes[id]) for id in ids) == 2
    assert tokenizer.decode([tokenizer.vocab_size, *ids, 10**9]) == "hi"                   # rows that only pad a model
    assert "".join(tokenizer.decode_stream([*tokenizer.encode("a"), byte_id[0xC3]])) == "a\ufffd"


# ------------------------------------------------------------------------------------------------------------ files

def test_saved_and_loaded_again(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "one")
    again = Tokenizer.load(tmp_path / "one")
    assert again.hash == tokenizer.hash and again.merges == tokenizer.merges
    again.files = {}                    # made from what was understood, and not the files that were read
    again.save(tmp_path / "two")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert Tokenizer.load(tmp_path / "one" / "tokenizer.json").vocab_size == tokenizer.vocab_size


def test_a_token_that_no_merges_make_stays_one_token(tokenizer, tmp_path):
    """As Llama 3's ".:.:": looked up as a whole piece, by us, and by transformers from our file."""
    ours = Tokenizer([*tokenizer.ranks[:256], b"xyz"], tokenizer.pattern, {"<|eos|>": 257})
    ours.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for one in (ours, Tokenizer.load(tmp_path)):
        assert one.encode("xyz 1") == encode_by_hand(one, "xyz 1") == as_text(theirs, "xyz 1") == [256, *one.encode(" 1")]


def test_hash_changes_with_every_part(tokenizer):
    ranks, specials = tokenizer.ranks, tokenizer.specials
    swapped = ranks[:300] + [ranks[301], ranks[300]] + ranks[302:]
    renamed = {name.replace("pad", "pod"): id for name, id in specials.items()}
    hashes = [Tokenizer(*parts).hash for parts in (
        (ranks, tokenizer.pattern, specials), (swapped, tokenizer.pattern, specials),
        (ranks, PATTERNS["gpt2"], specials), (ranks, tokenizer.pattern, renamed))]
    assert hashes[0] == tokenizer.hash and len(set(hashes)) == 4
    one, other = ([*ranks[:256], *more] for more in ([b"abc", b"de"], [b"ab", b"cde"]))
    assert Tokenizer(one, tokenizer.pattern, specials).hash != Tokenizer(other, tokenizer.pattern, specials).hash


def test_tiktoken_reads_our_ranks(tokenizer, tmp_path):
    from tiktoken.load import load_tiktoken_bpe
    tokenizer.save_ranks(tmp_path / "t.tiktoken")
    ranks = load_tiktoken_bpe(str(tmp_path / "t.tiktoken"))
    theirs = tiktoken.Encoding("t", pat_str=tokenizer.pattern, mergeable_ranks=ranks, special_tokens={})
    assert theirs.encode(TOPICS[0]) == tokenizer.encode(TOPICS[0])


@pytest.mark.parametrize("change, reason", [
    (lambda d: d.update(normalizer={"type": "NFKC"}), "not into NFC"),
    (lambda d: d["model"].update(type="Unigram"), "Unigram"),
    (lambda d: d["model"].update(byte_fallback=True), "all pairs that make a piece"),
    (lambda d: d.update(pre_tokenizer={"type": "Metaspace"}), "pre_tokenizer"),
    (lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "prefix space"),
    (lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\p{N}{1,3}+|\s+|\S"), "possessive"),
    (lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+|\s+"), "passes over"),
    (lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r".+"), "passes over"),
    (lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="("), "no regular expression"),
    (lambda d: (d["model"].update(ignore_merges=True), d["model"]["merges"].pop()), "one by one"),
    (lambda d: (d["model"].update(ignore_merges=True), d["model"]["merges"].reverse()), "in their order"),
    (lambda d: d["added_tokens"].append({"id": 2000, "content": "the", "special": False}), "with another id"),
    (lambda d: (d["added_tokens"].append({"id": 2000, "content": "<x>", "special": False}),
                d.update(normalizer={"type": "Prepend", "prepend": " "})), "a space is put before each text"),
    (lambda d: d["model"]["merges"].reverse(), "in their order"),
    (lambda d: d["model"]["merges"].pop(), "one by one"),
    (lambda d: d["model"]["vocab"].pop("!"), "without a gap"),
    (lambda d: d["model"]["vocab"].pop("!"), "256 bytes"),
    (lambda d: d["added_tokens"].append({"id": 9999, "content": "zz", "special": False, "lstrip": True}),
     "ordinary text"),
    (lambda d: d["added_tokens"][0].update(id=5), "one id"),
    (lambda d: d["added_tokens"][0].update(id="5"), "has the id '5'"),
    (lambda d: d["added_tokens"][0].update(id=10**12), "below 2**20"),
    (lambda d: d["added_tokens"][0].update(content=""), "a text"),
    (lambda d: d["added_tokens"][0].update(content="\ud800"), "a text"),
    (lambda d: d["added_tokens"][0].update(special="yes"), "not true or false"),
    (lambda d: d["added_tokens"].append({**d["added_tokens"][0], "id": 2000}), "one name"),
    (lambda d: d["model"]["vocab"].update({"!": -1}), "without a gap"),
    (lambda d: d["model"]["vocab"].update({"!": 0.0}), "without a gap"),
    (lambda d: d["model"].update(dropout=0.1), "dropout"),
    (lambda d: d["model"].update(unk_token="a"), "unknown tokens"),
    (lambda d: d["model"].update(end_of_word_suffix="</w>"), "affixes"),
    (lambda d: d["added_tokens"].append({"id": 2000, "content": "zz", "special": False, "single_word": True}),
     "ordinary text"),
    (lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"(?V1)[\s\S]"), "for both"),
    (lambda d: d.pop("model"), "not the whole tokenizer.json"),
])
def test_what_cannot_be_reproduced_is_refused_with_the_reason(change, reason, tokenizer, tmp_path, capsys):
    tokenizer.save(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    change(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(SystemExit) as stop:
        Tokenizer.load(tmp_path)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and reason in said and "tokenizer.json" in said


def test_a_version_stands_in_the_first_line_only(tmp_path):
    text = "#version:x"
    merges = [f"{text[:i]} {text[i]}" for i in range(1, len(text))]
    for first in ([], ["#version: 0.2"]):
        (tmp_path / "gpt2.bpe").write_text("\n".join([*first, *merges, "a b"]))
        assert Tokenizer.load(tmp_path / "gpt2.bpe").ranks[256:] == [text[:i].encode() for i in range(2, 11)] + [b"ab"]


@pytest.mark.parametrize("kind", ["tokenizer", "with_marker"])
def test_offsets_of_any_ids(kind, request):
    """Halves of characters, and special tokens between them: the place is that of the character last begun, once the
    token's first byte is there."""
    tokenizer, rng = request.getfixturevalue(kind), random.Random(4)
    for _ in range(3000):
        ids = [rng.randrange(rng.choice([256, tokenizer.vocab_size])) for _ in range(rng.randrange(10))]
        text, places = tokenizer.offsets(ids)
        taken = len(tokenizer.decode(ids, begins=False)) - len(text)
        assert text == tokenizer.decode(ids) and places == sorted(places)
        for number, (id, place) in enumerate(zip(ids, places)):
            if first := tokenizer.token_bytes[id][:1]:
                begun = (tokenizer.decode_bytes(ids[:number]) + first).decode("utf-8", "replace")
                assert place == max(0, len(begun) - 1 - taken)
    assert tokenizer.offsets([*tokenizer.encode("ab"), tokenizer.eos_id])[1][-1] == 2


def test_places_of_characters_that_are_no_utf_8():
    """Where decode shows U+FFFD: each byte's token stands at the character that it is part of, counted by hand."""
    bytes_alone = make_tokenizer([])
    for data, text, places in (
        (b"a\xc3(b", "a\ufffd(b", [0, 1, 2, 3]), (b"\xe4\xb8a", "\ufffda", [0, 0, 1]), (b"\x80\x80a", "\ufffd\ufffda", [0, 1, 2]),
        (b"\xf0\x9f\x98\x80!", "\U0001f600!", [0, 0, 0, 0, 1]), (b"\xe4\xb8\xe4\xb8\xad", "\ufffd\u4e2d", [0, 0, 1, 1, 1]),
        (b"x\xe4", "x\ufffd", [0, 1]), (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd", [0, 1, 2])):
        ids = [bytes_alone.ranks.index(bytes([byte])) for byte in data]
        assert bytes_alone.offsets(ids) == (text, places) and len(text) == max(places) + 1, data


def test_ids_outside_the_vocabulary_stand_for_nothing():
    bytes_alone = make_tokenizer([])
    for id in (-1, -300, bytes_alone.vocab_size, 10 ** 9):
        assert bytes_alone.decode_bytes([id], skip_special=False) == b"" and bytes_alone.decode([id, 97 - 97]) == bytes_alone.decode([0])


@pytest.mark.parametrize("pattern, wrong", [(r"^\w+|.|\n", True), (r"\w+$|.|\n", True), (r"[^a]|a", False), (r"\^|[$]|[^$^]", False)])
def test_a_pattern_with_ends_of_text_is_refused(pattern, wrong):
    """Some engines take them for the ends of each line."""
    assert any("^ or $" in reason for reason in wrong_pattern(pattern)) == wrong


def test_missing_and_damaged_files(tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    (tmp_path / "cl100k_base.tiktoken").write_text("IQ== 0\nIg== zero\n")
    (tmp_path / "cl100k_gap.tiktoken").write_text("IQ== 0\nIg== 2\n")
    (tmp_path / "unknown.tiktoken").write_text("IQ== 0\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "tokenizer.json").write_text("[" * 100_000)
    for name, reason in (
        ("none", "does not exist"), ("", "whole"), ("cl100k_base.tiktoken", "zero"), ("cl100k_gap.tiktoken", "0, 1, 2"),
        ("deep", "whole"), ("unknown.tiktoken", "how text is cut"), ("gpt2.bpe", "No such file"),
    ):
        with pytest.raises(SystemExit) as stop:
            Tokenizer.load(tmp_path / name)
        said = capsys.readouterr().err
        assert stop.value.code == 2 and reason in said and str(tmp_path / name) in said


@pytest.mark.parametrize("name, spoil, line", [
    ("cl100k.tiktoken", lambda lines: lines[:7] + lines[8:], 8),                      # a byte is not there
    ("cl100k.tiktoken", lambda lines: lines[:-1], None),                              # the last one
    ("cl100k.tiktoken", lambda lines: lines[:9] + [lines[3].split()[0] + " 9"] + lines[10:], 10),    # one token twice
    ("cl100k.tiktoken", lambda lines: [*lines, "!!!! 256"], 257),
    ("cl100k.tiktoken", lambda lines: lines[:5] + [""] + lines[5:], 6),
    ("gpt2.bpe", lambda lines: ["#version: 0.2", "a b", "a b"], 3),
    ("cl100k.tiktoken", lambda lines: [*lines, "YWI= 2_56"], 257),
    ("gpt2.bpe", lambda lines: ["#version: 0.2", "a b", "a \u4e00"], 3),
    ("gpt2.bpe", lambda lines: ["#version: 0.2", "a b", "ab cd"], 3),
    ("gpt2.bpe", lambda lines: ["#version: 0.2", "a b", "abc"], 3),
])
def test_rank_files_with_a_fault_are_refused_with_the_line(tmp_path, capsys, name, spoil, line):
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {id}" for id, byte in enumerate(BYTE_ORDER)]
    (tmp_path / name).write_bytes("\r\n".join(lines).encode())
    if name == "cl100k.tiktoken":
        assert Tokenizer.load(tmp_path / name).encode("ab") == [BYTE_ORDER.index(byte) for byte in b"ab"]
    (tmp_path / name).write_text("\n".join(spoil(lines)), encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        Tokenizer.load(tmp_path / name)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and (f"line {line}:" if line else "256 bytes") in said and name in said


def test_known_vocabularies(shared_data):
    """Ids that tiktoken's own tests fix (tests/test_encoding.py there), and a way through our files and back."""
    cl100k = Tokenizer.load(shared_data / "vocabs" / "cl100k_base.tiktoken")
    for text, ids in (
        ("rer", [38149]), ("'rer", [2351, 81]), ("today\n ", [31213, 198, 220]), ("today\n \n", [31213, 27907]),
        ("today\n  \n", [31213, 14211]), (" \x850", [220, 126, 227, 15]), ("it'\u017f", [275, 6, 129, 123]),
        ("<|endoftext|>", [27, 91, 8862, 728, 428, 91, 29]),
    ):
        assert cl100k.encode(text) == encode_by_hand(cl100k, text) == ids
    assert cl100k.encode("<|endoftext|>", allowed=["<|endoftext|>"]) == [100257] and cl100k.encode("\0") == [188]
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
    assert len(cl100k.encode(family)) == 18 and [cl100k.token_bytes[id] for id in cl100k.encode("\r\n")] == [b"\r\n"]
    assert cl100k.encode("it'\u212a") == encode_by_hand(cl100k, "it'\u212a")
    assert cl100k.encode_bytes(b" \xec\x8b\xa4\xed") == [62085]
    tamil = "\u0ba8\u0b9f\u0bbf\u0b95\u0bb0\u0bcd \u0b9a\u0bc2\u0bb0\u0bcd\u0baf\u0bbe"
    places = [0, 0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 9, 10, 11, 12, 12]
    assert cl100k.offsets(cl100k.encode(tamil)) == (tamil, places)
    gpt2 = Tokenizer.load(shared_data / "vocabs" / "gpt2_vocab.bpe")
    official = json.loads((shared_data / "vocabs" / "gpt2_encoder.json").read_text())
    assert [bytes_to_chars(token) for token in gpt2.ranks] == [token for token in official if token != "<|endoftext|>"]
    assert gpt2.encode("0" * 17) == [8269, 10535, 830] and gpt2.encode("hello world") == [31373, 995]
    zeros = [[15], [405], [830], [2388], [20483], [10535], [24598], [8269], [10535, 830], [8269, 405], [8269, 830],
             [8269, 2388], [8269, 20483], [8269, 10535], [8269, 24598], [25645], [8269, 10535, 830]]
    assert [gpt2.encode("0" * n) for n in range(1, 18)] == zeros


# ----------------------------------------------------------------------------------------------------------- script

def test_script_trains_reports_and_knows_that_it_is_done(run, tmp_path):
    write_documents(tmp_path / "data", TOPICS[:40], TOPICS[40:50])
    report, printed = run("--vocab_size=600")
    assert report["vocab_size"] == 600 and report["format_version"] == 1 and "bytes/token" in printed
    row, = report["held_out"]
    assert row["lossless"] and row["bytes"] == len("".join(TOPICS[40:50]).encode()) and 1.5 < row["bytes_per_token"] < 5
    tokenizer = Tokenizer.load(run.folder)
    assert tokenizer.hash == report["hash"] and row["tokens"] == sum(len(tokenizer.encode(text)) for text in TOPICS[40:50])
    lines = (run.folder / "tokenizer.tiktoken").read_text().splitlines()
    assert [base64.b64decode(line.split()[0]) for line in lines] == tokenizer.ranks
    assert "already done" in run("--vocab_size=600")[1]

    before = results(run.folder)
    assert set(before) == {"tokenizer.json", "tokenizer_config.json", "tokenizer.tiktoken", "counts.zst", "report.json",
                           "report.md"}
    (run.folder / "tokenizer.json").write_text("{}")                # damaged: done again, the same bytes
    assert "already done" not in run("--vocab_size=600")[1]
    assert before == results(run.folder)

    assert run("--vocab_size=500")[0]["vocab_size"] == 500                   # another key: done again
    write_documents(tmp_path / "data", TOPICS[:39], TOPICS[40:50])           # another text: done again
    assert run("--vocab_size=500")[0]["hash"] != report["hash"]


def test_only_the_training_split_is_learned_from(run, tmp_path):
    write_documents(tmp_path / "data", ["ab ab ab"], ["zz zz zz"])
    run("--vocab_size=400")
    ranks = Tokenizer.load(run.folder).ranks
    assert b"ab" in ranks and b"zz" not in ranks


def test_killed_and_started_again_gives_the_same_bytes(tmp_path, root):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        write_documents(folder, TOPICS, TOPICS[:3])
    command = [sys.executable, "train_tokenizer.py", "--vocab_size=3000", "--workers=2"]
    start = time.perf_counter()
    subprocess.run([*command, f"--data_dir={whole}"], cwd=root, check=True, capture_output=True)
    duration = time.perf_counter() - start
    for share in (0.5, 0.8, 0.95):
        process = subprocess.Popen([*command, f"--data_dir={cut}"], cwd=root, stdout=subprocess.DEVNULL,
                                   start_new_session=True)
        time.sleep(duration * share)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run([*command, f"--data_dir={cut}"], cwd=root, check=True, capture_output=True)
    assert results(cut / "tokenizer") == results(whole / "tokenizer")


def test_text_that_gives_fewer_tokens_than_asked_for(run, tmp_path):
    write_documents(tmp_path / "data", ["aaa"])
    report, printed = run("--vocab_size=400", "--min_frequency=1")
    assert report["vocab_size"] == 256 + 2 + 7 and report["vocab_size_asked"] == 400      # aa, aaa
    assert "400 was asked for" in printed and "265 tokens" in printed
    assert Tokenizer.load(run.folder).encode("aaa") == [257]


def test_empty_text_is_refused_and_one_letter_is_not(run, tmp_path, capsys):
    write_documents(tmp_path / "data", ["x"])
    assert run("--vocab_size=400")[0]["vocab_size"] == 263
    write_documents(tmp_path / "data", [""])
    with pytest.raises(SystemExit) as stop:
        run("--vocab_size=400")
    assert stop.value.code == 2 and "nothing to learn from" in capsys.readouterr().err


def test_all_wrong_keys_are_named_at_once(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--vocab_size=263", "--min_frequency=0", "--compare=nowhere.bpe")
    said = capsys.readouterr().err
    assert stop.value.code == 2
    expected = ("vocab_size must be from 264 to 1048576, found 263", "min_frequency must be", "nowhere.bpe")
    assert all(key in said for key in expected)


def test_a_vocabulary_that_can_not_be_compared_with_is_refused_before_the_work(run, tmp_path, capsys):
    write_documents(tmp_path / "data", TOPICS[:1], TOPICS[:1])
    (tmp_path / "gpt2.bpe").write_text("h\n")
    with pytest.raises(SystemExit) as stop:
        run("--vocab_size=300", f"--compare={tmp_path}/gpt2.bpe")
    said = capsys.readouterr()
    assert stop.value.code == 2 and "gpt2.bpe, line 1" in said.err and "counted" not in said.out


def test_comparison_with_known_vocabularies(run, tmp_path, shared_data):
    write_documents(tmp_path / "data", TOPICS[:1], TOPICS[:1])
    files = [str(shared_data / "vocabs" / name) for name in ("gpt2_vocab.bpe", "cl100k_base.tiktoken")]
    report, printed = run("--vocab_size=300", f"--compare={','.join(files)}")
    assert [row["vocab_size"] for row in report["held_out"]] == [300, 50257, 100277]
    assert all(row["lossless"] for row in report["held_out"]) and "cl100k_base.tiktoken" in printed


def test_loading_is_fast(tmp_path):
    # 31,737 merges that no text has: each new token is an old one with one more byte.
    byte_tokens = [(i % 256, (i // 256) % 256) for i in range(31737)]
    tokenizer = make_tokenizer(byte_tokens)
    tokenizer.save(tmp_path)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        Tokenizer.load(tmp_path)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.4


def test_another_size_takes_the_saved_counts_and_gives_the_same(run, tmp_path, monkeypatch):
    write_documents(tmp_path / "data", TOPICS[:40], TOPICS[40:43])
    run("--vocab_size=700")
    large = Tokenizer.load(run.folder).ranks
    monkeypatch.setattr(train_tokenizer, "count_in_parallel", None)                  # may not be called again
    assert run("--vocab_size=500")[0]["vocab_size"] == 500
    small, before = Tokenizer.load(run.folder).ranks, results(run.folder)
    assert small == large[:len(small)]
    monkeypatch.undo()
    with pytest.raises(TypeError):
        monkeypatch.setattr(train_tokenizer, "count_in_parallel", None)
        run("--vocab_size=500", "--pattern=gpt2")                                    # other pieces
    monkeypatch.undo()
    (run.folder / "counts.zst").write_bytes((run.folder / "counts.zst").read_bytes()[:-9])
    (run.folder / "report.json").unlink()
    run("--vocab_size=500")
    assert results(run.folder) == before


@pytest.mark.parametrize("spoil", [
    dict(files={}), dict(files=5), dict(held_out=3), dict(held_out=[]), dict(held_out=[{}]), dict(vocab_size="x"), dict(hash=None)])
def test_a_report_of_another_form_is_made_anew(run, spoil):
    text = "the cat sat on the mat and the rat sat too " * 20
    write_documents(run.folder.parent, [text], [text])
    whole, _ = run("--vocab_size=280")
    assert "already done" in run("--vocab_size=280")[1]
    (run.folder / "report.json").write_text(json.dumps({**whole, **spoil}))
    again, said = run("--vocab_size=280")
    assert "already done" not in said and again == whole


def test_a_special_token_that_is_learned_too_is_refused_when_it_is_learned(run, capsys):
    text = "the cat sat on the mat and the rat sat too " * 20
    write_documents(run.folder.parent, [text], [text])
    for name, expected in (("the", "'the' is what the text gives as token 2"), ("a", "'a' is one byte")):
        with pytest.raises(SystemExit) as stop:
            run("--vocab_size=300", f"--special_tokens={name}", "--boundary=none")
        assert stop.value.code == 2 and expected in capsys.readouterr().err
        assert not (run.folder / "tokenizer.json").exists()


def test_keys_for_pattern_boundary_and_special_tokens(run, tmp_path):
    text = "we call frobnicate(12345) and frobnicate again, 12345 times\n" * 40
    write_documents(tmp_path / "data", [text], [text])
    report, printed = run("--vocab_size=420", "--digits=2", "--boundary=none", "--special_tokens=<|tool|>,<|x y|>",
                          "--multiple_of=64", "--reserved_tokens=3", "--byte_order=identity")
    ours = Tokenizer.load(run.folder)
    assert ours.ranks[:256] == [bytes([byte]) for byte in range(256)] and report["vocab_size"] == ours.vocab_size
    assert report["rows"] % 64 == 0 and 0 <= report["rows"] - ours.vocab_size < 64
    first = len(ours.ranks)
    assert [name for name, id in sorted(ours.specials.items(), key=lambda item: item[1])] == [
        *SPECIAL_TOKENS, "<|tool|>", "<|x y|>", "<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>"]
    assert min(ours.specials.values()) == first
    tokens = [ours.token_bytes[id] for id in ours.encode("call frobnicate(12345)")]
    assert tokens == [b"call", b" ", b"frobnicate", b"(", b"12", b"34", b"5", b")"]
    row = report["held_out"][0]
    assert row["names_whole"] == {"names": 1, "with_space": 0.0, "without": 1.0} and row["lossless"]
    marked = run("--vocab_size=420", "--boundary=marker")[0]
    ours = Tokenizer.load(run.folder)
    tokens = [ours.token_bytes[id] for id in ours.encode("call frobnicate")]
    assert ours.prefix == " " and tokens == [b" call", b" frobnicate"]
    assert marked["held_out"][0]["lossless"] and marked["hash"] != report["hash"]
    plain = run("--vocab_size=420")[0]
    assert plain["hash"] not in (marked["hash"], report["hash"])
    assert run("--vocab_size=420", "--digits=3")[0]["hash"] == plain["hash"]


def test_each_key_and_file_that_matters_is_noticed_and_no_other(run, tmp_path):
    """Of two runs that differ in one of them the second does the work again, with the result of a first run."""
    write_documents(tmp_path / "data", ["we see we see to we to"] * 3 + ["x"], ["see we"])
    language, other = tmp_path / "de.txt", tmp_path / "cl100k_x.tiktoken"
    ranks = [f"{base64.b64encode(bytes([byte])).decode()} {id}" for id, byte in enumerate(BYTE_ORDER)]
    language.write_text("ja nein")
    other.write_text("\n".join(ranks))
    words = ["--vocab_size=300", f"--languages=de={language}", f"--compare={other}"]
    first = run(*words)[0]
    assert "already done" in run(*words, "--workers=2")[1]
    for key, field in (("--byte_order=identity", "hash"), ("--min_frequency=9", "vocab_size"),
                       ("--multiple_of=8", "rows"), ("--special_tokens=<|x|>", "vocab_size"), ("--boundary=marker", "words")):
        found, said = run(*words, key)
        assert "already done" not in said and found[field] != first[field], key
        assert run(*words)[0] == first, key
    language.write_text("ja nein vielleicht")
    assert "already done" not in (again := run(*words))[1]
    assert again[0]["kinds"]["de"]["ours"]["bytes"] == 18 and again[0]["hash"] == first["hash"]
    other.write_text("\n".join([*ranks, "c2Vl 256"]))                                      # see
    assert "already done" not in (again := run(*words))[1] and again[0]["held_out"][1]["tokens"] == 4
    write_documents(tmp_path / "data", ["see we others"], ["see we"])                       # the same names
    assert "already done" not in (again := run(*words))[1] and again[0]["words"] == 3 != first["words"]
    train_tokenizer.save_counts(other, [b"a", b" b"], [2**40, 1], first["made_from"])
    assert train_tokenizer.load_counts(other, first["made_from"]) == ([b"a", b" b"], [2**40, 1])


@pytest.mark.parametrize("pattern, reason", [
    (r"\w+", "passes over some characters"), (r"\w*|\W", "where nothing is"), (r"(\w+)|\W+", "groups"),
    (r"(", "no regular expression"), (r"\p{N}{1,3}+|\s|\S", "possessive")])
def test_a_pattern_that_would_lose_text_is_refused(pattern, reason, run, tmp_path, capsys):
    write_documents(tmp_path / "data", TOPICS[:1])
    with pytest.raises(SystemExit) as stop:
        run("--vocab_size=300", f"--pattern={pattern}")
    assert stop.value.code == 2 and reason in capsys.readouterr().err


def test_the_share_that_a_pattern_loses_is_counted(run, tmp_path, capsys):
    """A hole beyond the characters that are looked at before."""
    pattern = r"[^\u4e00-\u4eff]+"
    write_documents(tmp_path / "data", ["ab ab"])
    report = run("--vocab_size=300", f"--pattern={pattern}", "--min_frequency=1")[0]
    assert report["vocab_size"] == 256 + 3 + 7                            # ab, " ab", "ab ab": one piece
    write_documents(tmp_path / "data", ["a" * 97 + "\u4e00\u4e01\u4e02"])
    with pytest.raises(SystemExit) as stop:
        run("--vocab_size=300", f"--pattern={pattern}")
    assert stop.value.code == 2 and "3 of 100 characters (3 %)" in capsys.readouterr().err


def test_all_of_the_report(run, tmp_path, capsys):
    val = ("The quick brown fox jumps over the lazy dog and away.\nfor x in range(3):\n    total = parse_line(x)\n"
           "1 2 3 4 5 6\nthe word \u4f60\u597d means hello\n")
    write_documents(tmp_path / "data", TOPICS[:30], [val])
    for name, text in (("de", "Der schnelle braune Fuchs"), ("ja", "\u3053\u3093\u306b\u3061\u306f " * 9)):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    other = tmp_path / "others" / "small"
    make_tokenizer([]).save(other)
    ranks = "\n".join(f"{base64.b64encode(bytes([byte])).decode()} {id}" for id, byte in enumerate(BYTE_ORDER))
    (tmp_path / "others" / "cl100k_x.tiktoken").write_text(ranks)
    (tmp_path / "others" / "notes.md").write_text("nothing")
    words = ("--vocab_size=900", f"--languages=de={tmp_path}/de.txt,ja={tmp_path}/ja.txt",
             f"--compare={tmp_path}/others")
    report, printed = run(*words, "--watch=3")
    assert [row["name"] for row in report["held_out"]] == ["ours", "cl100k_x.tiktoken", "small"]
    assert set(report["kinds"]) == {"prose", "code", "numbers", "mixed languages", "de", "ja"}
    ja, bytes_alone = report["kinds"]["ja"]["ours"], report["kinds"]["ja"]["small"]
    assert ja["byte_fallback"] > 0.9 and bytes_alone["bytes_per_token"] == 1.0 and bytes_alone["unknown"] == 0
    row = report["held_out"][1]
    assert row["digits"]["5"] == 5.0 and row["names_whole"]["names"] == 2 and row["rarest_words"]["words"] >= 1
    own, ours = report["vocabulary"], Tokenizer.load(run.folder)
    halves = sum("\ufffd" in token.decode("utf-8", "replace") for token in ours.ranks)
    assert own["unreachable"]["tokens"] == 0 and own["half_characters"] == halves >= 128 and len(own["longest"]) == 10
    used = {id for text in TOPICS[:30] for id in ours.encode(text)}
    assert own["unused"]["tokens"] == len(ours.ranks) - len(used)
    page = (run.folder / "report.md").read_text()
    expected = ("bytes per token", "mixed languages", "longest tokens", "unreachable", "names whole")
    assert all(word in page for word in expected)
    merges = [line for line in printed.splitlines() if " times" in line and "+" in line]
    counts = {p.encode(): n for p, n in count_pieces(TOPICS[:30], PATTERNS["gpt4"]).items()}
    assert len(merges) == 3 and merges[0].split()[0] == "256"
    assert [int(line.split()[-2].replace(",", "")) for line in merges] == [n for _, _, n in merging.merges_of(
        list(counts), list(counts.values()), 3)]
    said = capsys.readouterr()
    words = [f"--data_dir={tmp_path / 'data'}", "--show=the \u4f60\n`\x1b[31m`"]
    train_tokenizer.main(configure(vars(train_tokenizer), words))
    said = capsys.readouterr().out
    assert "\x1b[31m" not in said and "\u2581" in said and "<E4>" in said and " tokens of 15 bytes: " in said


def test_numbers_of_the_report_by_hand(monkeypatch):
    """Bytes alone, "ab" and "abc": what each number counts. (Pieces, NFC: tests/test_pieces.py.)"""
    ranks = make_tokenizer([]).ranks
    a, b, c = (ranks.index(char) for char in (b"a", b"b", b"c"))
    ours = make_tokenizer([(a, b), (256, c)])
    text = "abc ab \u00e9\nabc(1) \u4e00 abc abc\nfirst second third fourth fifth sixth\n1 2 3 4\nif ab: (abc)\n"
    found = reports.measure({"ours": ours, "bytes": make_tokenizer([])}, [text], {}, [b"abc", b"abc"])
    row, plain = found["held_out"]
    assert plain["tokens"] == plain["bytes"] == len(text.encode()) and plain["tokens_per_word"] == round(
        plain["tokens"] / len(text.split()), 4) and plain["byte_fallback"] == round(5 / plain["bytes"], 6)
    assert row["tokens"] == len(ours.encode(text)) and row["distinct"] == len({*ours.encode(text)})
    assert row["rarest_words"]["words"] == 2 and "abc" not in row["rarest_words"]["examples"]     # of 11 words
    assert {kind: of["ours"]["bytes"] for kind, of in found["kinds"].items()} == {
        "mixed languages": 18, "numbers": 7, "code": 12, "prose": 37}
    assert found["vocabulary"]["unused"] == {"tokens": 257, "bytes": 256, "examples": ["ab"]}
    assert found["vocabulary"]["half_characters"] == 128
    lost = reports.of_vocabulary(Tokenizer([*ranks, b"a b"], ours.pattern, {}), [])["unreachable"]
    assert lost == {"tokens": 1, "examples": ["a\u2581b"]}                                  # two pieces
    # Texts beyond a size in equal steps from first to last, lines by themselves.
    assert reports.thinned(iter("abcdefghijklmnopqrs"), 7) == ["a", "e", "i", "m", "q"]
    assert reports.thinned(["long", "b"], 2) == ["long"] and reports.thinned(["ab", "c"], 3) == ["ab", "c"]
    monkeypatch.setattr(reports, "MOST_LINES", len(text) // 2)
    assert set(reports.measure({"ours": ours}, [text], {}, [])["kinds"]) < set(found["kinds"])


def test_files_to_learn_from_and_wrong_ones(run, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("low low lower " * 20)
    (tmp_path / "b.txt").write_text("low")
    report, _ = run("--vocab_size=300", f"--inputs={tmp_path}/a.txt", f"--held_out={tmp_path}/b.txt")
    assert report["held_out"][0]["bytes"] == 3 and b" low" in Tokenizer.load(run.folder).ranks
    assert run("--vocab_size=300", f"--inputs={tmp_path}/a.txt")[0]["held_out"][0]["documents"] == 0
    with pytest.raises(SystemExit) as stop:
        run("--inputs=nowhere.txt", "--languages=de,de,code=", "--boundary=x", "--digits=4",
            "--special_tokens=<|eos|>,\udcff", "--byte_order=y")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in said for word in (
        "nowhere.txt", "(no name)", "boundary must be one of space, marker, none", "digits must be from 1 to 3",
        "'<|eos|>' stands", "byte_order", "is no text", "name 'de' stands", "name 'code' stands"))
    for name in ("a", "b"):
        make_tokenizer([]).save(tmp_path / name / "ours")
    (tmp_path / "empty").mkdir()
    for document in ({"text": 5}, {"nope": "x"}, ["text"]):
        lines = json.dumps({"text": "low"}) + "\n" + json.dumps(document)
        (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
        with pytest.raises(SystemExit) as stop:
            run(f"--inputs={tmp_path}/c.jsonl.zst")
        assert stop.value.code == 2 and "c.jsonl.zst, line 2: expected" in capsys.readouterr().err
    found = reports.vocabularies([tmp_path / "a", tmp_path / "b" / "ours"])              # none takes our place
    assert list(found.values()) == [str(tmp_path / "a" / "ours"), str(tmp_path / "b" / "ours")]
    with pytest.raises(SystemExit) as stop:
        reports.vocabularies([tmp_path / "a", tmp_path / "empty"])
    assert stop.value.code == 2 and "no vocabulary" in capsys.readouterr().err
