"""Other models' tokenizers: SentencePiece against its library and Hugging Face's engine, Qwen's; models that have them."""
import io
import json
import unicodedata
from types import SimpleNamespace

import pytest
import sentencepiece
import torch

import prepare_data
import sample
import sft
import train as train_script
from bpe import report
from configurator import configure
from engine import chat, hf
from engine.files import read_json
from engine.generate import TextStream, generate
from engine.pieces import SPACE
from engine.shards import TokenData, begins_of
from engine.tokenizer import PATTERNS, Tokenizer, valid_unicode
from small import small_llama
from test_tokenizer import SPECIMENS, TOPICS, as_text, fuzz_texts, make_tokenizer, write_documents
from train_tokenizer import count_pieces, train

CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
TEXTS = [*SPECIMENS, *fuzz_texts(500, seed=6), *TOPICS[:20], "a" * 999 + "  b" * 99, " \n  \n" * 40, "<s></s><unk><0x0A>"]


def trained(**settings):
    """The content of a tokenizer.model with 700 pieces, in Llama 2's settings but for what is given."""
    out = io.BytesIO()
    settings = {"vocab_size": 700, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, **settings}
    lines = [line for text in TOPICS[:15] for line in text.splitlines()]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, minloglevel=2, **settings)
    return out.getvalue()


@pytest.fixture(scope="module")
def own():
    return trained()


def published(model):
    """A tokenizer.json as Llama 2's and Mistral's folders have it: all pairs that make a piece, the best piece's first."""
    engine = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab = {engine.id_to_piece(id): id for id in range(len(engine))}
    named = {name for name, id in vocab.items() if engine.is_control(id) or engine.is_unknown(id)}
    texts = {name for name, id in vocab.items() if name not in named and not engine.is_byte(id)}
    pairs = [(name[:i], name[i:]) for name in vocab if name in texts for i in range(1, len(name))
             if {name[:i], name[i:]} <= texts]
    pairs.sort(key=lambda pair: -engine.get_score(vocab["".join(pair)]))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, "decoder": None,
            "added_tokens": [{"id": vocab[name], "content": name, **flags} for name in vocab if name in named],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]},
            "pre_tokenizer": None,
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
                      "merges": [" ".join(pair) for pair in pairs]}}


def written(folder, content, **config):
    """A folder with that tokenizer.model, or that tokenizer.json."""
    folder.mkdir(exist_ok=True)
    name = "tokenizer.model" if isinstance(content, bytes) else "tokenizer.json"
    (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


@pytest.mark.parametrize("which", ["own", "mistral"])
def test_ids_are_those_of_the_library_and_of_transformers(which, request, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    content = request.getfixturevalue("own") if which == "own" else (
        request.getfixturevalue("shared_data") / "vocabs" / "mistral_tokenizer.model.v1").read_bytes()
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    one, other = (Tokenizer.load(written(tmp_path / name, form))
                  for name, form in (("a", content), ("b", published(content))))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "b" / "tokenizer.json"))
    theirs.encode_special_tokens = True                                    # not "<s>" in a text
    for text in TEXTS:
        text = one.clean(text)
        ids = one.encode(text)
        assert ids == library.encode(text) == other.encode(text) == theirs.encode(text, add_special_tokens=False).ids
        assert one.decode(ids) == text.replace(SPACE, " ")
        assert not set(ids) & set(one.specials.values())
        stream = TextStream(one, begins=True)
        assert "".join(map(stream.feed, ids)) + stream.finish() == one.decode(ids)
    assert (one.bos_id, one.eos_id, one.pad_id, one.vocab_size) == (1, 2, 0, len(library)) and one.hash != other.hash
    assert other.specials == one.specials == {"<unk>": 0, "<s>": 1, "</s>": 2}
    for tokenizer, folder in ((one, "a"), (other, "b")):                   # the very files, and what they mean
        tokenizer.save(tmp_path / "again" / folder)
        assert {file.name: file.read_bytes() for file in (tmp_path / folder).iterdir()} == {
            file.name: file.read_bytes() for file in (tmp_path / "again" / folder).iterdir()}
        assert Tokenizer.load(tmp_path / "again" / folder).hash == tokenizer.hash
    row = report.on_text(one, ["the\n"])                                   # a line's end is no piece, but a byte
    assert row["byte_fallback"] == round(1 / row["tokens"], 6) and row["unknown"] == 0
    alone = Tokenizer.load(tmp_path / "a" / "tokenizer.model")
    alone.save(tmp_path / "alone")
    assert Tokenizer.load(tmp_path / "alone").hash == alone.hash == one.hash


def test_what_transformers_5_writes_is_read_as_it_reads_it(own, tmp_path):
    """It puts the runs of spaces first, where SentencePiece has them last; and no second space before a text with one."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaTokenizer.from_pretrained(written(tmp_path / "a", own))
    theirs.save_pretrained(tmp_path / "b")
    ours = Tokenizer.load(tmp_path / "b")
    for text in TEXTS:
        if not text.startswith((" ", SPACE)):
            assert ours.encode(text) == as_text(theirs, ours.clean(text)), text


@pytest.mark.parametrize("settings, reason", [
    ({"normalization_rule_name": "nmt_nfkc"}, "changes text"), ({"remove_extra_whitespaces": True}, "changes text"),
    ({"byte_fallback": False}, "256 bytes"), ({"treat_whitespace_as_suffix": True}, "changes text")])
def test_pieces_that_would_lose_text_are_refused(settings, reason, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        Tokenizer.load(written(tmp_path, trained(**settings)))
    assert stop.value.code == 2 and reason in capsys.readouterr().err


@pytest.mark.parametrize("scheme, prefix", [("first", " "), ("never", "")])
def test_whether_a_space_is_put_before_a_text_is_read_from_the_file(scheme, prefix, own, tmp_path):
    data = {**published(own), "normalizer": None, "pre_tokenizer": {
        "type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}}
    ours = Tokenizer.load(written(tmp_path, data))
    assert ours.prefix == prefix and ours.decode_bytes(ours.encode("the")).decode() == prefix + "the"


def first_of_several(data):
    """Where the merges of the first piece stand that several pairs make."""
    made = [pair.replace(" ", "") for pair in data["model"]["merges"]]
    return next(i for i, piece in enumerate(made) if made.count(piece) > 1)


@pytest.mark.parametrize("change, reason", [
    (lambda d: d["model"]["merges"].pop(5), "all pairs"), (lambda d: d["model"]["merges"].reverse(), None),
    (lambda d: d["model"]["merges"].append(d["model"]["merges"].pop(first_of_several(d))), "all pairs"),
    (lambda d: d["model"]["vocab"].update({"zzz": 900}), "without a gap"), (lambda d: d.update(normalizer=None), "otherwise"),
    (lambda d: d["model"]["vocab"].update({"<un>": d["model"]["vocab"].pop("<unk>")}), "no <unk>")])
def test_files_of_pieces_that_the_library_would_read_otherwise(change, reason, own, tmp_path, capsys):
    data = published(own)
    change(data)
    if reason is None:                                                     # another order, but a whole one: other ids
        assert Tokenizer.load(written(tmp_path, data)).encode(TOPICS[0]) != Tokenizer.load(
            written(tmp_path, published(own))).encode(TOPICS[0])
        return
    with pytest.raises(SystemExit) as stop:
        Tokenizer.load(written(tmp_path, data))
    assert stop.value.code == 2 and reason in capsys.readouterr().err


def test_special_tokens_that_text_would_become_and_files_that_are_none(own, tmp_path, capsys):
    for content in (trained(user_defined_symbols="[X]"), b"IQ== 0\n"):
        folder = written(tmp_path, content, added_tokens_decoder={"3": {"content": "[X]"}})
        with pytest.raises(SystemExit) as stop:
            Tokenizer.load(folder)
        said = capsys.readouterr().err
        assert stop.value.code == 2 and ("'[X]'" in said or "not a SentencePiece model" in said)
    for odd, reason in (('{"x": "y"}', "the id 'y'"), ('{"x": 1000000000000}', "below 2**20"), ('{"x": -1}', "below"),
                        ('{"x": 700, "y": 700}', "one id")):
        (tmp_path / "added_tokens.json").write_text(odd)
        with pytest.raises(SystemExit) as stop:
            Tokenizer.load(written(tmp_path, own))
        assert stop.value.code == 2 and reason in capsys.readouterr().err
    (tmp_path / "added_tokens.json").unlink()
    for key, odd in (("added_tokens_decoder", {"5": 7}), ("added_tokens_decoder", 5), ("bos_token", [])):
        with pytest.raises(SystemExit) as stop:
            Tokenizer.load(written(tmp_path, own, **{key: odd}))
        assert stop.value.code == 2 and key in capsys.readouterr().err
    (tmp_path / "added_tokens.json").write_text('{"<|end|>": 700}')
    added = Tokenizer.load(written(tmp_path, own))
    assert added.special("<|end|>") == 700 and added.vocab_size == 701 and 700 not in added.encode("<|end|>")


# --- Qwen's ----------------------------------------------------------------------------------------------------------

ACCENTS = ["e\u0301 \u1100\u1161 \u212b \u0958 q\u0323\u0307", "<think>\u0338 a</think>", "<think", "x<think><think>y",
           "\ufb01 \uff21", "a\u0301\ud800", "<|im_end|><|endoftext|>"]


def qwen(merges, **changes):
    base = make_tokenizer(merges, PATTERNS["qwen"])
    first = len(base.ranks)
    specials = {name: first + i for i, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
    return Tokenizer(base.ranks, base.pattern, specials, merges, {"bos": None, "eos": "<|im_end|>", "pad": "<|endoftext|>"},
                     **{"words": {"<think>": first + 3, "</think>": first + 4}, "nfc": True, **changes})


def merges_of(ranks):
    """The pair that made each token behind the 256 bytes: what its bytes join to by lower ranks alone."""
    rank_of, pairs = {token: rank for rank, token in enumerate(ranks)}, []
    for rank, token in enumerate(ranks[256:], start=256):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [min(rank_of.get(a + b, rank), rank) for a, b in zip(parts, parts[1:])]
            i = joined.index(min(joined))
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        pairs.append((rank_of[parts[0]], rank_of[parts[1]]))
    return pairs


@pytest.mark.parametrize("real", [False, True], ids=["own", "qwen"])
def test_text_in_nfc_gives_the_ids_of_transformers(real, request, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    if real:
        ranks = Tokenizer.load(request.getfixturevalue("shared_data") / "vocabs" / "qwen.tiktoken").ranks
        merges = merges_of(ranks)
        ours = Tokenizer(ranks, PATTERNS["qwen"], {"<|endoftext|>": len(ranks)}, merges, nfc=True,
                         words={"<think>": len(ranks) + 1, "</think>": len(ranks) + 2})
    else:
        ours = qwen(train({p.encode(): n for p, n in count_pieces(TOPICS[:20], PATTERNS["qwen"]).items()}, 700))
    ours.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    for text in [*ACCENTS, *TEXTS]:
        ids = again.encode(text)
        assert ids == ours.encode(text) == theirs.encode(valid_unicode(text), add_special_tokens=False).ids, text
        assert again.decode(ids) == again.clean(text) and not set(ids) & set(again.specials.values())
    assert again.encode("e\u0301") == again.encode("\u00e9") and again.decode(again.encode("e\u0301")) == "\u00e9"
    plain = qwen([], words={})
    assert plain.encode("e\u0301", allowed=["<|im_end|>"]) == plain.encode("e\u0301") == plain.encode("\u00e9")
    row = report.on_text(again, ["e\u0301"])
    assert row["lossless"] is False and report.on_text(again, ["\u00e9"])["lossless"] is True
    renamed = {**ours.words, "<x>": again.vocab_size}
    assert again.hash != Tokenizer(ours.ranks, ours.pattern, ours.specials, ours.merges, nfc=True, words=renamed).hash
    assert again.hash == ours.hash != Tokenizer(ours.ranks, ours.pattern, ours.specials, ours.merges, words=ours.words).hash
    assert ours.words["<think>"] in again.encode("x<think>y")


def test_added_words_are_found_in_the_text_as_it_is_written(tmp_path):
    """And not in its NFC, which could make one, or undo one."""
    tokenizers = pytest.importorskip("tokenizers")
    first = (plain := qwen([])).vocab_size
    ours = qwen([], words={**plain.words, "<\u00e9>": first, "<e\u0301>": first + 1})
    ours.save(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    for text in ("x<e\u0301>y", "x<\u00e9>y", "<e\u0301\u0301>", "e\u0301<\u00e9>e\u0301<e\u0301>", "<\u00e9\u0301>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids == next(ours.encode_batch([text])).tolist(), text
        assert ours.decode(ids) == ours.clean(text)
    assert first in ours.encode("x<\u00e9>") and first + 1 in ours.encode("x<e\u0301>")


def test_weights_stand_over_the_characters_that_were_given():
    """Spans count characters of the text as written; the tokens are those of its NFC."""
    tokenizer = qwen([])
    content = "e\u0301x\u212bz"                                            # 5 characters, in NFC 4: é x Å z
    message = {"role": "assistant", "content": content, "weight": [[0, 2, 0.25], [2, 3, 0.5], [3, 4, 0.75], [4, 5, 2.0]]}
    ids, weights = chat.render(tokenizer, [{"role": "user", "content": "a"}, message])
    said = [(tokenizer.token_bytes[id], w) for id, w in zip(ids, weights) if w]
    assert [w for _, w in said] == [0.25, 0.25, 0.5, 0.75, 0.75, 2.0, 1.0]
    assert b"".join(text for text, _ in said).decode() == unicodedata.normalize("NFC", content)


# --- models that have them -------------------------------------------------------------------------------------------

ZEPHYR = ("{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}")
LLAMA_2 = (             # as in the folder of its chat model, but for the roles' order, which is checked elsewhere
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + "
    "message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}")
TALK = [{"role": "user", "content": "hi  you"}, {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "?"}, {"role": "assistant", "content": "no"}]


def test_conversations_of_pieces_are_those_of_the_models_template(own, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.load(written(tmp_path, published(own), chat_template=ZEPHYR))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for messages, opened in ((TALK, False), (TALK[:3], True), (TALK[:1], True)):
        text = theirs.apply_chat_template(messages, add_generation_prompt=opened, tokenize=False)
        ids, weights = chat.render(tokenizer, messages, opened)
        assert ids == [1, *theirs.encode(text, add_special_tokens=False)] and len(ids) == len(weights)
    ids, weights = chat.render(tokenizer, TALK)
    said = [id for id, weight in zip(ids, weights) if weight]
    assert tokenizer.decode(said, skip_special=False) == "Yes.</s>no</s>" and chat.stop_ids(tokenizer) == {2}
    weighed = [TALK[0], {**TALK[1], "weight": [[0, 3, 0.0]]}]
    assert [tokenizer.token_bytes[id] for id, w in zip(*chat.render(tokenizer, weighed)) if w] == [b".", b""]
    with pytest.raises(SystemExit) as stop:
        chat.render(Tokenizer.load(written(tmp_path, own, chat_template="[INST] {{ x }} [/INST]")), TALK)
    assert stop.value.code == 2 and "[INST]" in capsys.readouterr().err


def test_llama_2s_conversations_are_those_of_its_template(own, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.load(written(tmp_path, published(own), chat_template=LLAMA_2))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    system = {"role": "system", "content": " Be brief.\n"}
    blanks = [{"role": "user", "content": "\n what is \u4e2d 7?  "}, {"role": "assistant", "content": "  7 [/INST]  is\n"}]
    for messages in (TALK, [system, *TALK], [system, *blanks, *TALK], [*TALK, *blanks], TALK[:1], [system, *TALK[:3]]):
        opened = messages[-1]["role"] == "user"
        text = theirs.apply_chat_template(messages, add_generation_prompt=opened, tokenize=False)
        ids, weights = chat.render(tokenizer, messages, opened)
        assert ids == theirs.encode(text, add_special_tokens=False) and len(ids) == len(weights)
    ids, weights = chat.render(tokenizer, [system, *TALK])
    said = [tokenizer.decode([id], skip_special=False) for id, weight in zip(ids, weights) if weight]
    assert "".join(said).replace(" ", "") == "Yes.</s>no</s>" and said.count("</s>") == 2
    # The answer's tokens come right behind what is asked of the model.
    prompt, _ = chat.render(tokenizer, [system, *TALK[:1]], open_assistant=True)
    assert ids[:len(prompt)] == prompt and weights[len(prompt)] == 1 and not any(weights[:len(prompt)])
    weighed = [TALK[0], {"role": "assistant", "content": " Yes. ", "weight": [[0, 4, 0.25], [4, 6, 3.0]]}]
    ids, weights = chat.render(tokenizer, weighed)
    assert [w for w in weights if w][-1] == 1.0 and {0.25, 3.0} <= set(weights)


@pytest.mark.parametrize("form", ["zephyr", "llama2"])
def test_a_base_model_takes_the_form_that_is_chosen_and_keeps_it(form, own, tmp_path, capsys):
    """Its tokenizer tells nothing; what is saved tells us and transformers."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "saved").mkdir()
    tokenizer = Tokenizer.load(written(tmp_path, published(own)))
    chat.adopt(tokenizer, form)
    tokenizer.save(tmp_path / "saved")
    again, theirs = Tokenizer.load(tmp_path / "saved"), transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert chat.form_of(again) == form
    for messages in ([{"role": "system", "content": "S"}, *TALK], TALK[:3]):
        opened = messages[-1]["role"] == "user"
        text = theirs.apply_chat_template(messages, add_generation_prompt=opened, tokenize=False)
        assert chat.render(again, messages, opened)[0] == theirs.encode(text, add_special_tokens=False), text
    with pytest.raises(SystemExit) as stop:
        chat.adopt(tokenizer, "chatml")
    assert stop.value.code == 2 and "zephyr, llama2" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["model", "json", "qwen"])
def test_a_model_with_such_a_tokenizer_is_tuned_saved_and_spoken_to(kind, own, tmp_path, capsys):
    base, lines = tmp_path / "base", tmp_path / "talk.jsonl"
    if kind == "qwen":
        base.mkdir()
        qwen([]).save(base)
    else:
        written(base, own if kind == "model" else published(own))
    tokenizer = Tokenizer.load(base)
    hf.save_model(base, small_llama(vocab_size=704), tokenizer)            # a few rows that only pad
    lines.write_text((json.dumps({"messages": TALK}) + "\n") * 24)
    words = [f"--init_from={base}", f"--conversations={lines}", f"--val_conversations={lines}", f"--out_dir={tmp_path}",
             "--batch_size=8", "--device=cpu", "--dtype=fp32", "--threads=1", "--epochs=25", "--learning_rate=1e-2",
             "--loss_chunk=7", "--recompute=full"]
    sft.main(configure(vars(sft), words))
    assert read_json(tmp_path / "sft" / "result.json")["val_loss"] < 0.1
    saved = hf.find_folder(tmp_path / "sft")
    for file in base.iterdir():
        if file.name.startswith("tokenizer"):
            assert (saved / file.name).read_bytes() == file.read_bytes()
    capsys.readouterr()
    ask = [f"--model={tmp_path / 'sft'}", "--device=cpu", "--dtype=fp32", "--threads=1", "--temperature=0"]
    sample.main(configure(vars(sample), [*ask, "--chat=True", "--prompt=hi  you"]))
    assert capsys.readouterr().out == "Yes.\n"


def test_documents_of_a_tokenizer_without_bos():
    """They are `text EOS`: a document begins behind an EOS, and there is no first token after a BOS."""
    tokenizer, rows = qwen([]), torch.tensor([[5, 258, 6, 7, 258, 8]])
    assert tokenizer.eos_id == 258 and begins_of(rows, tokenizer).tolist() == [[False, False, True, False, False, True]]
    ones = torch.ones(1, 5)
    assert train_script.sums(ones, rows[:, :-1], rows[:, 1:], ones, tokenizer).tolist() == [5, 3, 2, 0, 0, 3, 2, 0, 0]


@pytest.mark.parametrize("kind", ["model", "qwen"])
def test_documents_for_such_a_model_and_its_training(kind, own, tmp_path):
    base, data = tmp_path / "base", tmp_path / "data"
    for folder in (base, data / "tokenizer"):
        folder.mkdir(parents=True)
        written(folder, own) if kind == "model" else qwen([]).save(folder)
    tokenizer = Tokenizer.load(base)
    hf.save_model(base, small_llama(vocab_size=704), tokenizer)
    write_documents(data, TOPICS[:3], TOPICS[3:4])
    audit = {"documents": [{"split": "train", "bytes": 3}, {"split": "val", "bytes": 1}], "source_hash": "-"}
    config = SimpleNamespace(data_dir=data, shard_tokens=10**6, hash="-", workers=1, window_chars=0, window_overlap=0)
    prepare_data.write_tokens(config, tokenizer, "-", audit)
    stored, bos = TokenData(data / "tokens", "train", tokenizer.hash), [1] if kind == "model" else []
    assert stored.read(0, int(stored.offsets[1])).tolist() == [*bos, *tokenizer.encode(TOPICS[0]), tokenizer.eos_id]
    train_script.main(configure(vars(train_script), [
        f"--init_from={base}", f"--data_dir={data}", f"--out_dir={tmp_path}", "--max_steps=2", "--batch_tokens=256",
        "--block_size=64", "--micro_batch_size=2", "--eval_blocks=2", "--separate_documents=True", "--device=cpu", "--dtype=fp32",
        "--threads=1", "--compile=False"]))
    model, again = hf.load_model(tmp_path / "pretrain")
    assert again.hash == tokenizer.hash and model.config.separate_documents and model.config.n_embd == 32


def test_an_answer_begins_without_the_space_that_pieces_begin_with(own, tmp_path):
    """Behind a special token a text begins; behind text it goes on, and there a space is a space."""
    tokenizer, model = Tokenizer.load(written(tmp_path, own)), small_llama(vocab_size=700)
    prompts = [[1], [1, *tokenizer.encode("so")]]
    spaces = []
    for seed in range(30):
        heard = ["", ""]

        def on_text(row, text):
            heard[row] += text
        made = generate(model, prompts, 4, {2}, 1.0, seed=seed, tokenizer=tokenizer, on_text=on_text)
        assert made.texts == heard == generate(model, prompts, 4, {2}, 1.0, seed=seed, tokenizer=tokenizer).texts
        assert tokenizer.decode(prompts[1] + made.ids[1]) == "so" + heard[1]
        spaces += [tokenizer.decode_bytes(ids)[:1] == b" " and text[:1] != " " for ids, text in zip(made.ids, heard)]
    assert any(spaces[::2]) and not any(spaces[1::2])
