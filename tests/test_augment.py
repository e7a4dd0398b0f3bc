"""techniques/augment.py: templates filled, other words by a model, and nothing twice or out of the evaluation."""

import pytest

from configurator import configure
from engine import chat, hf
from engine.answers import GRAM
from small import byte_tokenizer, small_llama
from techniques import augment
from test_sft import talk, write_lines


def made(tmp_path, *settings):
    augment.main(configure(vars(augment), [f"--out={tmp_path / 'made.jsonl'}", "--device=cpu", "--dtype=fp32", "--threads=1", *settings]))
    return chat.read_conversations(tmp_path / "made.jsonl")


def test_each_template_is_filled_with_each_row(tmp_path, capsys):
    write_lines(tmp_path / "t.jsonl", [talk("What is the capital of {country}?", "{city}, in {{braces}}.", weight=2),
                                       {**talk("Where is {city} then, please tell me now?", "In {country}."), "kind": "place"}])
    (tmp_path / "facts.csv").write_text('country,city\nFrance,Paris\n"Korea, South",Seoul\n', encoding="utf-8")
    found = made(tmp_path, f"--templates={tmp_path / 't.jsonl'}", f"--table={tmp_path / 'facts.csv'}")
    assert found[1] == talk("What is the capital of Korea, South?", "Seoul, in {braces}.", weight=2)
    assert found[2]["kind"] == "place" and len(found) == 4 and "4 kept" in capsys.readouterr().out
    write_lines(tmp_path / "facts.jsonl", [{"country": "France", "city": "Paris"}, {"country": "Chad"}])
    with pytest.raises(SystemExit) as stop:
        made(tmp_path, f"--templates={tmp_path / 't.jsonl'}", f"--table={tmp_path / 'facts.jsonl'}")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "template 1: row 2" in said and "template 2: row 2" in said and "city" in said
    (tmp_path / "facts.csv").write_text("country,city\nFrance\n")
    with pytest.raises(SystemExit):
        made(tmp_path, f"--templates={tmp_path / 't.jsonl'}", f"--table={tmp_path / 'facts.csv'}")
    assert "line 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        made(tmp_path, f"--templates={tmp_path / 't.jsonl'}", "--prompts=('no slot',)", "--copies=0")
    said = capsys.readouterr().err
    assert all(word in said for word in ("either --templates", "{text}", "copies"))


def test_near_duplicates_are_left_out_and_the_first_stays():
    words = "one two three four five six seven eight nine ten eleven twelve".split()
    text = lambda *changes: talk(" ".join(changes[i] if i < len(changes) else word for i, word in enumerate(words)), "yes")
    entries = [text(), text("ONE!"), text("new"), talk("short", "one"), text(), talk("short", "one"), text("new", "and", "other")]
    assert augment.near_duplicates(entries, 0.8) == {1, 2, 4, 5}
    assert augment.near_duplicates(entries, 0.9) == {1, 4, 5}
    assert augment.near_duplicates(entries, 1.1) == set()


def test_what_stands_in_the_evaluation_is_left_out():
    thirteen = " ".join(f"w{i}" for i in range(GRAM))
    evaluation = [talk("a question of five words", "no"), talk(f"x {thirteen} y", "z"), talk("hi", "ho")]
    entries = [talk("Well, a question of five WORDS?", "yes"), talk("another question of five words", "no"), talk(thirteen, "b"),
               talk(thirteen.replace("w6", "v"), "b"), talk("hi", "ho"), talk("a question", "of five words")]
    assert augment.leaked(entries, evaluation) == {0, 2, 5}


def test_other_words_come_from_the_models_in_turn(tmp_path, monkeypatch, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
        hf.save_model(tmp_path / name, small_llama(seed=ord(name)), byte_tokenizer())
    write_lines(tmp_path / "talks.jsonl", [talk("first", "1"), {"messages": [*talk("second", "2")["messages"], *talk("third", "3")["messages"]]},
                                           talk("never ends", "4"), talk("same", "5")])
    asked = []

    def answers(model, tokenizer, entries, how, temperature):
        texts = [entry["messages"][0]["content"] for entry in entries]
        asked.append((model.model.embed_tokens.weight[0, 0].item(), texts))
        return [(" same" if "same" in text else f"other {text.split(': ')[1]} words", "never" not in text, [1]) for text in texts]
    monkeypatch.setattr(augment, "answers", answers)
    settings = [f"--conversations={tmp_path / 'talks.jsonl'}", f"--models={tmp_path / 'a'},{tmp_path / 'b'}",
                "--prompts=('Into French: {text}', 'Into English: {text}')"]
    found = made(tmp_path, *settings)
    assert [[m["content"] for m in entry["messages"]] for entry in found] == [
        ["other other first words words", "1"], ["other other second words words", "2", "other other third words words", "3"]]
    assert [texts[0] for _, texts in asked] == ["Into French: first", "Into English: other first words"] and asked[0][0] != asked[1][0]
    assert "2 did not end" in capsys.readouterr().out
    write_lines(tmp_path / "talks.jsonl", [talk("first", "1"), talk("other other first words words", "1"), talk("second", "2")])
    found = made(tmp_path, *settings)                                  # one of the two comes near to what is there
    assert [entry["messages"][0]["content"] for entry in found] == ["other other other other first words words words words",
                                                                    "other other second words words"]
    assert "1 near duplicates" in capsys.readouterr().out.replace("\n", " ")
    monkeypatch.undo()
    with pytest.raises(SystemExit):                                    # what an untrained model says does not end
        made(tmp_path, *settings, "--max_new_tokens=4")
    assert "nothing is left" in capsys.readouterr().err
