"""evaluate.py: each number against a slow or a hand-made one, and the whole on a small run."""
import json
import lzma
import math
import random

import numpy as np
import pytest
import torch

import evaluate
from chatdata import remark
from configurator import configure
from engine import chat, hf
from engine.loss import token_losses
from engine.shards import ShardWriter, write_index
from small import ALONE, byte_tokenizer, small_llama


def config_of(**changes):
    return type("Config", (), {"stride": 16, "batch_size": 4, "seed": 1, "max_new_tokens": 12, "continuations": 3,
                               "continuation_tokens": 8, **changes})()


# --- text -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n, stride", [(5, 16), (33, 16), (34, 16), (100, 16), (101, 32), (257, 5)])
def test_every_token_is_scored_once_with_the_context_that_is_promised(n, stride):
    model = small_llama(block_size=32)
    ids = np.array([random.Random(i).randrange(256) for i in range(n)])
    nats = evaluate.token_nats(model, ids, config_of(stride=stride), ALONE)
    assert nats.shape == (n - 1,)
    for position in range(n - 1):
        # The window it is scored in: the first one, or the one whose last `stride` places hold it.
        start = 0 if position < 32 else stride * math.ceil((position - 31) / stride)
        window = torch.from_numpy(ids[start:position + 2])[None]
        with torch.no_grad():
            expected = token_losses(model(window[:, :-1]), window[:, 1:])[0, -1]
        assert nats[position] == pytest.approx(expected.item(), abs=1e-5)


def test_documents_are_apart_where_the_model_was_trained_so():
    tokenizer, rng = byte_tokenizer(), random.Random(0)
    model = small_llama(block_size=32, separate_documents=True)
    ids = np.array([token for length in (9, 30, 1, 70) for token in [tokenizer.bos_id, *rng.choices(range(256), k=length)]])
    nats = evaluate.token_nats(model, ids, config_of(), ALONE, tokenizer)
    for position in range(len(ids) - 1):
        start = 0 if position < 32 else 16 * math.ceil((position - 31) / 16)
        start = max(start, max(np.flatnonzero(ids[:position + 1] == tokenizer.bos_id)))
        alone = torch.from_numpy(ids[start:position + 2])[None]
        with torch.no_grad():
            expected = token_losses(model(alone[:, :-1]), alone[:, 1:])[0, -1]
        assert nats[position] == pytest.approx(expected.item(), abs=1e-5)


def test_bits_per_byte_by_hand():
    tokenizer = byte_tokenizer()
    text = "old line\nnew ñ\n\nold line\n"
    ids = np.array([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id, tokenizer.bos_id,
                    *tokenizer.encode("x"), tokenizer.eos_id])
    targets = ids[1:]
    nats = np.where(targets == tokenizer.eos_id, 50.0, np.where(targets == tokenizer.bos_id, 1000.0, 2.0))
    nats[9:16] = 3.0                                                 # "new ñ" and its line feed: seven bytes
    scores = evaluate.text_scores(nats, targets, tokenizer, {b"old line", b"x"})
    size = len(text.encode()) + 1
    assert scores["bytes"] == size and scores["bytes_new_lines"] == 7
    assert scores["bits_per_byte"] == pytest.approx((2 * (size - 7) + 3 * 7) / math.log(2) / size)
    assert scores["bits_per_byte_new_lines"] == pytest.approx(3 / math.log(2))
    # The loss has EOS in it and BOS not.
    assert scores["loss"] == pytest.approx((2 * (size - 7) + 3 * 7 + 2 * 50) / (size + 2))


def test_xz_alone_and_after_the_training_text():
    rng = random.Random(0)
    known, unknown = (bytes(rng.choice(b"abcdefghijklmnop") for _ in range(50_000)) for _ in range(2))
    alone = evaluate.xz_bits(known, unknown)
    assert alone["xz"] == len(lzma.compress(unknown, preset=9 | lzma.PRESET_EXTREME)) * 8 / 50_000
    assert alone["xz_primed"] == pytest.approx(4, rel=0.1)          # random letters of 16: 4 bits, whatever came before
    repeated = evaluate.xz_bits(known + b"x" * 100, known)
    assert repeated["xz_primed"] < 0.1 < 3.5 < repeated["xz"]
    # Close to what the difference of two compressions says, and never below it by more than the pieces' size.
    size = lambda content: len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    difference = size(known + unknown) - size(known)
    assert alone["xz_primed"] == pytest.approx(difference * 8 / 50_000, rel=0.05)


def test_leakage_finds_what_was_planted_and_nothing_else():
    words = [f"w{i}" for i in range(1000)]
    train = [" ".join(words[:500]).encode(), " ".join(words[500:]).encode()]
    found = evaluate.leakage(train, {name: [text.encode() for text in texts] for name, texts in {
        "copied": [" ".join(words[100:120])],                        # 20 words: 8 runs of 13, all known
        "half": [" ".join(words[100:113] + ["other"] * 7)],          # 1 of 8
        "across": [" ".join(words[494:507])],                        # 13 words of two documents are no copy of either
        "short": [" ".join(words[:12]), "w1 w3"],
        "other": ["a b c d e f g h i j k l m n o p"]}.items()})
    assert found["copied"] == {"grams": 8, "share": 1.0, "texts": 1, "texts_found": 1}
    assert found["half"]["share"] == 1 / 8
    assert found["across"]["share"] == 0.0
    assert found["short"] == {"grams": 0, "share": None, "texts": 2, "texts_found": 1}
    assert found["other"]["share"] == 0.0


def test_hashes_of_grams_do_not_collide_and_know_the_order():
    rng = random.Random(1)
    texts = {" ".join(rng.choice("abcd") for _ in range(13)) for _ in range(5000)}
    hashes = [int(evaluate.grams(text.encode().split())[0]) for text in texts]
    assert len(set(hashes)) == len(texts)


# --- answers ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ids, looping", [([1, 2, 3, 4, 5, 6], False), ([9, 1, 2, 1, 2, 1, 2], True),
                                          ([5, 5, 5], True), ([5, 5], False),
                                          ([1, 2, 1, 2, 1, 2, 9], False), (list(range(20)) * 3, False)])
def test_loops(ids, looping):
    assert evaluate.loops(ids) == looping


def answer_with(monkeypatch, texts, stopped=True):
    monkeypatch.setattr(evaluate, "answers", lambda model, tokenizer, entries, config, temperature=0.0:
                        [(text, stopped, [7] * 5) for text in texts])


def test_questions_are_scored_by_kind(monkeypatch):
    ask = lambda kind, answer: {"messages": [{"role": "user", "content": "?"},
                                             {"role": "assistant", "content": answer}], "kind": kind}
    entries = [ask("spell", "a b"), ask("spell", "c d"), ask("count", "Parameters: 2."), ask("remark", "It is clear.")]
    answer_with(monkeypatch, ["a b", "c x", "Parameters: two.", "It is dull."])
    by_kind, together = evaluate.question_scores(None, None, entries, config_of())
    assert by_kind["spell"] == {"n": 2, "exact": 0.5, "format": 1.0, "stop": 1.0}
    assert by_kind["count"] == {"n": 1, "exact": 0.0, "format": 0.0, "stop": 1.0}
    assert by_kind["remark"] == {"n": 1, "exact": None, "format": 1.0, "stop": 1.0}
    assert together == {"n": 4, "format": 0.75, "stop": 1.0, "format_and_stop": 0.75, "loops": 1.0, "distinct_2": 0.25}
    answer_with(monkeypatch, ["a b", "c x", "Parameters: two.", "It is dull."], stopped=False)
    assert evaluate.question_scores(None, None, entries, config_of())[1]["format_and_stop"] == 0.0


def test_own_questions_without_a_kind_are_scored_without_a_format(monkeypatch):
    entry = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]}
    answer_with(monkeypatch, ["yes"])
    by_kind, together = evaluate.question_scores(None, None, [entry], config_of())
    assert by_kind["questions"] == {"n": 1, "exact": 1.0, "format": None, "stop": 1.0} and together["format"] is None


def test_remarks_are_scored_by_the_rule(monkeypatch):
    answer_with(monkeypatch, ["It is extremely clear.", "It is ugly.", "nonsense", "nonsense"])
    scores = evaluate.remark_scores(None, None, [None] * 4, config_of())
    assert scores["score"] == pytest.approx((2 - 1 + 2 * remark.ILL_FORMED) / 4)
    assert scores["format"] == 0.5 and scores["different"] == 0.75


# --- probes -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("prompt, expected, cut", [
    ("The capital of France is", " Paris", ("The capital of France i", "s Paris")),
    ("Methods inherited", " from", ("Methods inhe", "rited from")), ("I", " am", None),
    ("ends with space ", "x", None), ("ends a line\n", "x", None)])
def test_a_probe_is_cut_inside_its_last_word(prompt, expected, cut):
    found = evaluate.cut_inside({"prompt": prompt, "expected": expected})
    assert found == (cut and {"prompt": cut[0], "expected": cut[1]})
    assert cut is None or prompt + expected == cut[0] + cut[1]


def test_the_committed_probes_are_sound(root):
    probes = chat.read_lines(root / "config" / "probes.jsonl", evaluate.wrong_probe)
    assert {"prompt": "The capital of France is", "expected": " Paris"} in probes and len(probes) >= 10
    assert all(evaluate.cut_inside(probe) for probe in probes)


def test_bad_probes_are_all_named(tmp_path, capsys):
    path = tmp_path / "probes.jsonl"
    path.write_text('{"prompt": "a", "expected": "b"}\n{"prompt": "a"}\n\nnot json\n{"prompt": 1, "expected": "b"}\n')
    with pytest.raises(SystemExit) as stop:
        chat.read_lines(path, evaluate.wrong_probe)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and all(f"line {n}:" in said for n in (2, 4, 5)) and "line 1:" not in said


# --- the whole --------------------------------------------------------------------------------------------------------

@pytest.fixture
def run(tmp_path):
    """A run's folders with two untrained models, 20 pages, and held-out questions."""
    tokenizer, rng = byte_tokenizer(), random.Random(0)
    splits = {}
    for split, count in (("train", 20), ("val", 4)):
        writer = ShardWriter(tmp_path / "data" / "tokens", split, tokenizer.vocab_size, 3000)
        for _ in range(count):
            text = "\n".join(" ".join(rng.choice(["one", "two", "three"]) for _ in range(20)) for _ in range(3))
            writer.add(np.array([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]))
        splits[split] = writer.close()
    write_index(tmp_path / "data" / "tokens", tokenizer, splits)
    for name, seed in (("pretrain", 0), ("sft", 1)):
        folder = tmp_path / "out" / name
        folder.mkdir(parents=True)
        hf.save_model(folder, small_llama(seed), tokenizer)
    chat_folder = tmp_path / "data" / "chat"
    chat_folder.mkdir()
    turn = lambda question, answer: [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ask = lambda kind, *texts: {"messages": turn(*texts), "kind": kind}
    (chat_folder / "conversations_val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [
        ask("spell", "Spell `ab`.", "a b"), ask("spell", "Spell `cd`.", "c d"),
        ask("remark", "What do you make of `ab`?", "It is clear.")]))
    prompt = {"messages": turn("How do you like `ab`?", "")[:1]}
    (chat_folder / "prompts_val.jsonl").write_text(json.dumps(prompt) + "\n")
    (chat_folder / "baselines.json").write_text(json.dumps({"kinds": {"spell": {"questions": 2, "best": 0.1}}}))
    (chat_folder / "index.json").write_text("{}")

    def measure(*extra):
        settings = [f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}", "--continuation_tokens=6",
                    "--max_new_tokens=6",
                    "--threads=1", "--device=cpu", "--dtype=fp32", *extra]
        evaluate.main(configure(vars(evaluate), settings))
        return json.loads((tmp_path / "out" / "evaluate.json").read_text())

    measure.folder = tmp_path
    return measure


def test_everything_is_measured_for_every_model_there_is(run, capsys):
    (run.folder / "out" / "ppo").mkdir()                                    # begun, and no checkpoint yet
    result = run()
    said = capsys.readouterr().out
    assert list(result["models"]) == ["pretrain", "sft"]                    # no ppo in this run, and no complaint
    for scores in result["models"].values():
        assert 7.5 < scores["bits_per_byte"] < 8.6                          # an untrained model of single bytes: 8
        assert scores["questions"]["spell"]["exact"] == 0.0 and scores["remarks"]["score"] == remark.ILL_FORMED
        assert 0 <= scores["repetition"]["loops"] <= 1 and len(scores["probes"]["probes"]) == scores["probes"]["n"]
    assert result["models"]["pretrain"]["bits_per_byte"] != result["models"]["sft"]["bits_per_byte"]
    assert result["text"]["xz_primed"] < result["text"]["xz"]
    assert result["kinds"]["spell"] == {"best_baseline": 0.1, "baselines": {"questions": 2, "best": 0.1},
                                        "generalised": []}
    assert "bits per byte" in said and "xz after the training text" in said and "spell" in said
    assert run("--compare_xz=False")["models"]["sft"]["loss"] == result["models"]["sft"]["loss"]


def test_what_was_measured_is_not_measured_again_unless_something_has_changed(run, capsys, monkeypatch):
    first = run("--compare_xz=False")
    table = capsys.readouterr().out.split("\nheld-out pages")[1].split("\nall of it")[0]
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "read_model", lambda *_: pytest.fail("it was measured again"))
        assert run("--compare_xz=False") == first
    said = capsys.readouterr().out
    assert "already done" in said and table in said
    hf.save_model(run.folder / "out" / "sft", small_llama(7), byte_tokenizer())       # trained anew
    again = run("--compare_xz=False")
    assert again["models"]["pretrain"] == first["models"]["pretrain"] and again["models"]["sft"] != first["models"]["sft"]
    probes = run.folder / "probes.jsonl"
    probes.write_text('{"prompt": "one", "expected": " two"}\n')
    assert run(f"--probes={probes}")["models"]["sft"]["probes"]["n"] == 1
    capsys.readouterr()
    assert list(run("--models=pretrain", "--compare_xz=False")["models"]) == ["pretrain"]
    kept = run.folder / "out" / "evaluate.before.json"                      # the other's numbers are not lost
    assert "sft" in json.loads(kept.read_text())["models"] and f"sft is in {kept}" in capsys.readouterr().out


def test_an_absolute_folder_without_a_model_is_refused_and_not_left_out(run, capsys):
    empty = run.folder / "empty"
    empty.mkdir()
    with pytest.raises(SystemExit) as stop:
        run(f"--models=sft,{empty}")
    assert stop.value.code == 2 and f"{empty}: no model there" in capsys.readouterr().err


def test_a_kind_30_points_above_its_baseline_has_generalised(run, monkeypatch):
    answer_with(monkeypatch, ["a b", "x y", "It is clear."])
    monkeypatch.setattr(evaluate, "remark_scores", lambda *_: {"score": 0, "score_std": 0, "format": 0, "stop": 0,
                                                               "tokens": 0})
    assert run("--compare_xz=False")["kinds"]["spell"]["generalised"] == ["pretrain", "sft"]         # 0.5 against 0.1
    bars = {"kinds": {"spell": {"questions": 2, "best": 0.3}}}
    (run.folder / "data" / "chat" / "baselines.json").write_text(json.dumps(bars))
    assert run("--compare_xz=False")["kinds"]["spell"]["generalised"] == []                          # 0.5 against 0.3


def test_without_chat_data_the_text_is_measured_all_the_same(run):
    (run.folder / "data" / "chat" / "index.json").unlink()
    result = run("--compare_xz=False")
    assert "questions" not in result["models"]["sft"] and result["models"]["sft"]["bits_per_byte"] > 7


def test_no_model_is_refused(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--models=ppo")
    assert stop.value.code == 2 and "python train.py" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        run("--models=sft,no/such/folder")
    assert stop.value.code == 2 and "no/such/folder" in capsys.readouterr().err


def test_all_bad_settings_are_named_at_once(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--stride=0", "--batch_size=0", "--remarks=0", "--text_tokens=1")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and all(key in said for key in ("stride", "batch_size", "remarks", "text_tokens"))
