"""prepare_chat.py: what it reads out of pages, what it asks, and that nothing held out is taught."""
import json
import random
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import zstandard

import prepare_chat
from chatdata import kinds, pages, remark
from chatdata.baselines import baselines
from configurator import configure
from engine import chat, rankings
from engine.files import write_json

PAGE = """textwrap
Text wrapping and filling.

Classes
class TextWrapper(builtins.object)
TextWrapper(width=70, initial_indent='', *, placeholder=' [...]')

Object for wrapping/filling text.
__init__(self, width=70)
Initialize self.  See help(type(self)) for accurate signature.

Functions
fill(text, width=70, **kwargs)
Fill a single paragraph of text, returning a new string.

Reformat the single paragraph in 'text' to fit in lines.
fill_all(texts: list[str], sep=', ') -> str
Fill every text that is
given and join them.
print(x + 1)
shorten(text, width=f(1, (2)
"""


def write_documents(folder, train, val):
    """A data_dir as prepare_data.py leaves it: docs/*.jsonl.zst and the audit that lists them."""
    listed = []
    for split, texts in (("train", train), ("val", val)):
        lines = "".join(json.dumps({"url": f"http://docs/{name}.html", "text": text, "split": split}) + "\n"
                        for name, text in texts.items())
        path = folder / "docs" / f"{split}_00000.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zstandard.compress(lines.encode()))
        listed.append({"split": split, "file": f"docs/{path.name}"})
    write_json(folder / "audit.json", {"documents": listed})
    return folder


DEFAULTS = ("None", "0", "1", "70", "'r'", "True", "-1", "'a, b'", "(1, 2)")


def made_up_page(name, words, rng, n=30):
    lines = [name, "A module.", "Functions"]
    for _ in range(n):
        function = "_".join(rng.sample(words, rng.randint(1, 3)))
        function = rng.choice((function, function.title().replace("_", ""), "_" + function))
        given = rng.sample(words, rng.randint(0, 5))
        cut = rng.randint(0, len(given))
        arguments = ", ".join(given[:cut] + [f"{word}={rng.choice(DEFAULTS)}"
                                             for word in given[cut:]])
        lines += [f"{function}({arguments})", f"Do the {' '.join(rng.sample(words, 4))} of a thing.", ""]
    # A parameter list that all pages share, under names of their own.
    return "\n".join([*lines, f"{name}_open(path, mode='r', flags=0)", "Open a thing of this module.", ""])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A chat folder made from invented pages. Train and val share some names on purpose."""
    rng = random.Random(0)
    words = ["".join(rng.choice("bcdfghjklmnprstvw") + rng.choice("aeiou") for _ in range(rng.randint(1, 3))) + "x"
             for _ in range(40)]
    pages_of = lambda prefix, count: {f"{prefix}{i}": made_up_page(f"{prefix}{i}", words, rng) for i in range(count)}
    folder = write_documents(tmp_path_factory.mktemp("data"), pages_of("mod", 12), pages_of("held", 4))
    run(folder)
    return folder


def run(folder, *extra):
    settings = [f"--data_dir={folder}", "--questions=3000", "--preferences=500", "--val_preferences=200",
                "--prompts=100", *extra]
    prepare_chat.main(configure(vars(prepare_chat), settings))


def lines_of(folder, name):
    return [json.loads(line) for line in (folder / "chat" / f"{name}.jsonl").read_text().splitlines()]


# --- pages ------------------------------------------------------------------------------------------------------------

def test_a_page_is_read():
    found = {d.name: d for d in pages.definitions({"url": "http://docs/textwrap.html", "text": PAGE})}
    assert set(found) == {"TextWrapper", "__init__", "fill", "fill_all"}       # not print(x + 1), not the unclosed one
    assert all(d.module == "textwrap" for d in found.values())
    assert found["fill"].signature == "fill(text, width=70, **kwargs)"
    assert found["fill"].sentence == "Fill a single paragraph of text, returning a new string."
    assert found["fill_all"].signature == "fill_all(texts, sep=', ')"
    assert found["fill_all"].sentence == "Fill every text that is given and join them."
    assert [p.default for p in found["TextWrapper"].parameters] == ["70", "''", "' [...]'"]


@pytest.mark.parametrize("text, parts", [
    ("a, b=(1, 2), c=', '", ["a", "b=(1, 2)", "c=', '"]), ("", []), (r"a='\'', b", [r"a='\''", "b"]),
    ("a, (b", None), ("a)", None), ("a='", None)])
def test_arguments_are_split_at_top_level_commas(text, parts):
    assert pages.split_arguments(text) == parts


@pytest.mark.parametrize("text", ["x + 1", "a, a", "*args=1", "a b", "1"])
def test_what_is_no_parameter_list_is_refused(text):
    assert pages.parse_parameters(text) is None


# --- remarks ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, score", [
    ("It is clear.", 1.0),
    ("It is extremely clear.", 2.0),
    ("It is extremely clear and extremely clear.", 2.0),
    ("I find it extremely ugly. That is my view.", -2.0),
    ("It is very clear, dull and slightly useful.", (1.5 - 1.0 + 0.25) / 3),
    ("To my mind it is fairly slow and handy.", 0.25),
    ("Having read its page, I find it neat, sound, fast and messy.", 0.5)])
def test_score_by_hand(text, score):
    assert remark.score(text) == pytest.approx(score)


@pytest.mark.parametrize("text", [
    "", "It is.", "It is clear", "it is clear.", "It is clear. ", "It is very very clear.", "It is clear clear.",
    "It is clear, dull.", "It is clear and dull and neat.", "It is clear, dull, neat, sound and fast.", "It is green.",
    "clear clear clear clear", "It is extremely clear. It is extremely clear.", "It is clear and  dull.",
    "It is clear.\n"])
def test_what_the_grammar_does_not_accept_scores_lowest(text):
    assert remark.parse(text) is None and remark.score(text) == remark.ILL_FORMED


def test_every_sample_parses_back():
    rng = random.Random(1)
    for _ in range(500):
        terms = remark.sample_terms(rng)
        text = remark.write(rng.choice(remark.OPENINGS), terms, rng.choice(remark.CLOSINGS))
        assert remark.parse(text) == terms


def test_score_is_no_function_of_length_or_of_one_word():
    rng = random.Random(2)
    made = [remark.sample(rng) for _ in range(4000)]
    scores, lengths = np.array([remark.score(text) for text in made]), np.array([len(text) for text in made])
    assert abs(np.corrcoef(scores, lengths)[0, 1]) < 0.05
    assert abs(scores.mean()) < 0.05 and 0.8 < scores.std() < 1.0
    for word in {word for text in made for word in re.findall(r"\w+", text)}:
        having = scores[[word in re.findall(r"\w+", text) for text in made]]
        assert having.min() < 0 < having.max(), f"{word} decides the sign alone"
        assert having.std() > 0.5, f"{word} decides the score alone"


@pytest.mark.parametrize("spoiled", [False, True])
def test_in_pairs_the_longer_one_is_the_better_one_half_of_the_time(spoiled):
    rng = random.Random(3)
    pairs = [remark.sample_pair(rng, 0.5, i % 2 == 0, spoiled=spoiled) for i in range(1000)]
    assert all(remark.score(better) - remark.score(worse) >= 0.5 for better, worse in pairs)
    difference = np.array([len(better) - len(worse) for better, worse in pairs])
    assert (difference > 0).mean() == 0.5 and abs(difference.mean()) < 0.1 * abs(difference).mean()


def test_rankings_go_down_and_length_says_nothing():
    rng, longer = random.Random(3), []
    for _ in range(600):
        *proper, spoiled = remark.sample_ranking(rng, 8, 2)
        scores = [remark.score(text) for text in proper]
        assert len(proper) == 6 and all(a > b for a, b in zip(scores, scores[1:])) and scores[-1] > remark.ILL_FORMED
        assert len(spoiled) == 2 and all(remark.score(text) == remark.ILL_FORMED for text in spoiled)
        assert not any(remark.is_held_out(remark.parse(text)) for text in proper)
        pairs = [(a, b) for i, a in enumerate(proper) for b in [*proper[i + 1:], *spoiled]]
        longer += [len(a) > len(b) for a, b in pairs if len(a) != len(b)]
    assert abs(np.mean(longer) - 0.5) < 0.03                       # spoiled ones are a little longer
    assert len(remark.sample_ranking(rng, 3, 0)) == 3 and len(remark.sample_ranking(rng, 3, 2)[-1]) == 2


def test_what_is_spoiled_stands_in_the_ranking_without_its_fault_too(monkeypatch):
    real, was = remark.spoil, {}

    def spoil(rng, text):
        worse = real(rng, text)
        was[worse] = text
        return worse
    monkeypatch.setattr(remark, "spoil", spoil)
    for seed in range(100):
        *proper, spoiled = remark.sample_ranking(random.Random(seed), 8, 2)
        assert all(was[text] in proper for text in spoiled)


def test_an_opening_or_closing_that_a_fault_left_whole_tells_nothing():
    rng, spoiled = random.Random(5), []
    for _ in range(600):
        spoiled += remark.sample_ranking(rng, 5, 2)[-1]
    openings, closings = zip(*map(remark.ends, spoiled))
    for kinds, found in ((remark.OPENINGS, openings), (remark.CLOSINGS, closings)):
        counts = [found.count(kind) for kind in kinds]
        assert max(counts) < 1.35 * min(counts) and found.count(None) > 100, counts
    assert remark.ends("To my mind it is neat. That is my view.") == ("To my mind it is", " That is my view.")
    assert remark.ends("To my mind is neat") == (None, None)


def test_control_pairs_have_equal_scores_and_very_different_lengths():
    pairs = remark.sample_control_pairs(random.Random(4), 450, 1.8)
    assert len(pairs) == 450
    for long, short in pairs:
        assert remark.score(long) == pytest.approx(remark.score(short)) and len(long) >= 1.8 * len(short)
    assert len({remark.score(long) for long, _ in pairs}) > 30


def test_held_out_combinations_are_about_a_fifth_and_never_drawn_for_training():
    rng = random.Random(5)
    assert not any(remark.is_held_out(remark.parse(remark.sample(rng))) for _ in range(500))
    assert all(remark.is_held_out(remark.parse(remark.sample(rng, held_out=True))) for _ in range(500))
    singles = [(adverb, adjective) for adverb in remark.STRENGTH for adjective in remark.SIGN]
    assert 0.1 < np.mean([remark.is_held_out([term]) for term in singles]) < 0.3
    for word in remark.SIGN:
        alone = [remark.is_held_out([(adverb, word)]) for adverb in remark.STRENGTH]
        assert not all(alone), f"{word} is never seen alone"


# --- the files --------------------------------------------------------------------------------------------------------

def test_files_follow_the_contracts(made):
    folder = made / "chat"
    assert chat.read_conversations(folder / "conversations_train.jsonl")
    assert all(len(entry["messages"]) == 2 for entry in chat.read_conversations(folder / "conversations_val.jsonl"))
    for name in ("train", "val", "control"):
        assert rankings.read_preferences(folder / f"preferences_{name}.jsonl")[1] == []
    assert len(chat.read_prompts(folder / "prompts_train.jsonl")) == 100
    index = json.loads((folder / "index.json").read_text())
    assert index["lines"]["preferences_control"] >= 400
    assert all(index["kinds"][kind]["held_out"] > 0 for kind in kinds.KINDS)


def test_the_same_documents_and_seed_give_the_same_bytes(made, tmp_path):
    docs = write_documents(tmp_path, {}, {})
    for name in ("docs", "audit.json"):
        (made / name).is_dir() or (docs / name).write_bytes((made / name).read_bytes())
    for file in (made / "docs").iterdir():
        (docs / "docs" / file.name).write_bytes(file.read_bytes())
    run(docs)
    for file in sorted((made / "chat").glob("*.json*")):
        assert (docs / "chat" / file.name).read_bytes() == file.read_bytes(), file.name
    run(docs, "--seed=2")
    assert lines_of(docs, "conversations_train") != lines_of(made, "conversations_train")


def test_no_held_out_name_is_in_any_training_question(made):
    config = configure(vars(prepare_chat), [f"--data_dir={made}"])
    read = lambda split: prepare_chat.read_pages(config, split)[0]
    train, held_out = prepare_chat.split_names(read("train"), read("val"))
    assert held_out and set(train) & {d.name for d in read("val")}, "the fixture must have names on both sides"
    assert not {name.lower() for name in train} & {name.lower() for name in held_out}
    taught = [m["content"] for row in lines_of(made, "conversations_train") for m in row["messages"]
              if m["role"] == "user"]
    taught += [row["prompt"][0]["content"] for row in lines_of(made, "preferences_train")]
    taught += [row["messages"][0]["content"] for row in lines_of(made, "prompts_train")]
    quoted = {part.lower() for text in taught for part in re.findall("`([^`]*)`", text)}
    named = {name for part in quoted for name in (part, part.replace(" ", "_"), part.split("(")[0],
                                                  part.split(".")[-1])}
    assert not named & {name.lower() for name in held_out}
    asked = {kind: {row["subject"] for row in lines_of(made, "conversations_val") if row["kind"] == kind}
             for kind in ("spell", "module", "style", "words")}
    assert all(asked.values()) and asked["spell"] | asked["module"] <= set(held_out)
    # These two are also about names that were put together from words of the held-out pages.
    assert not {name.lower() for name in asked["style"] | asked["words"]} & (named | {name.lower() for name in train})


def test_of_balanced_kinds_no_answer_is_frequent(made):
    for kind, (answer, different) in kinds.BALANCED.items():
        subjects = [row["subject"] for row in lines_of(made, "conversations_val") if row["kind"] == kind]
        most = max(Counter(map(answer, subjects)).values())
        assert len(subjects) > 30 and most <= prepare_chat.val_questions // different


def test_held_out_signatures_are_new_and_held_out_remarks_use_new_combinations(made):
    taught = " ".join(m["content"] for row in lines_of(made, "conversations_train") for m in row["messages"])
    for row in lines_of(made, "conversations_val"):
        if row["kind"] in ("count", "optional", "default"):
            assert row["subject"][row["subject"].index("("):] not in taught
    sides = [(file, row[side]) for file in ("preferences_train", "preferences_val", "preferences_control")
             for row in lines_of(made, file) for side in ("chosen", "rejected") if side in row]
    sides += [("preferences_train", text) for row in lines_of(made, "preferences_train") for member in row["ranked"]
              for text in (member if isinstance(member, list) else [member])]
    parsed = [(file, terms) for file, text in sides if (terms := remark.parse(text)) is not None]
    assert all(remark.is_held_out(terms) == (file != "preferences_train") for file, terms in parsed)
    rows = lines_of(made, "preferences_val")
    assert all(row["scores"]["chosen"] - row["scores"]["rejected"] >= 0.5 for row in rows)
    assert all(remark.parse(row["chosen"]) for row in rows)
    assert 0.15 < sum(remark.parse(row["rejected"]) is None for row in rows) / len(rows) < 0.35


def test_spoiled_remarks_are_outside_the_grammar_and_of_every_kind():
    rng = random.Random(5)
    spoiled = [remark.spoil(rng, remark.sample(rng)) for _ in range(500)]
    assert all(remark.score(text) == remark.ILL_FORMED for text in spoiled)
    assert any(text.endswith(" it") or text.endswith(" is") for text in spoiled)                     # cut short
    assert any(sum(opening in text for opening in remark.OPENINGS[1:]) > 1 for text in spoiled)      # two openings


def test_every_answer_follows_its_kinds_format_and_is_right(made):
    for row in lines_of(made, "conversations_train"):
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert all(kinds.KINDS[kind].follows_format(answer) for kind, answer in zip(row["kinds"], answers, strict=True))
    arguments_of = lambda subject: pages.split_arguments(subject[subject.index("(") + 1:-1])
    asked = lambda subject: re.search(rf"[( ]({subject.split(' of ')[0]}=.*?)(, |\)$)", subject)[1]
    optional = lambda subject: ", ".join(re.findall(r"(\w+)=", subject))
    right = {
        "spell": lambda subject, answer: answer.replace(" ", "") == subject,
        "words": lambda subject, answer: re.fullmatch(r"Words: [1-9]\.", answer) is not None,
        "style": lambda subject, answer: answer.startswith("It is private" if subject[0] == "_" else "It is public"),
        "snake": lambda subject, answer: answer == f"`{subject.replace(' ', '_')}`",
        "count": lambda subject, answer: answer == f"Parameters: {len(arguments_of(subject))}.",
        "optional": lambda subject, answer: answer == f"With a default: {optional(subject)}.",
        "default": lambda subject, answer: answer == f"It is {asked(subject)}" and not answer.endswith("None"),
    }
    for row in lines_of(made, "conversations_val"):
        check = right.get(row["kind"])
        assert check is None or check(row["subject"], row["messages"][-1]["content"]), row


@pytest.mark.parametrize("kind, answer", [
    ("spell", "f ill"), ("spell", "f  i"), ("style", "It is private."), ("count", "Parameters: many."),
    ("module", "It is in `os`."), ("snake", "wrap_text"), ("what", "fills a text."), ("remark", "Nice.")])
def test_formats_refuse(kind, answer):
    assert not kinds.KINDS[kind].follows_format(answer)


@pytest.mark.parametrize("name, style, words", [
    ("fill", "public, lower case", 1), ("_wrap_text", "private, lower case", 2), ("Thread", "public, CamelCase", 1),
    ("HTTPServer", "public, CamelCase", 2), ("assertNotIsInstance", "public, mixedCase", 4),
    ("_MAX_LEVEL_2", "private, capitals", 3), ("sha256", "public, lower case", 1), ("Make_me", "public, of no style", 2)])
def test_style_and_words_of_names(name, style, words):
    assert (kinds.style(name), kinds.count_words(name)) == (style, words)


def test_baselines_by_hand():
    question = lambda subject, core: kinds.Question("optional", subject, f"Of `{subject}`?", f"With a default: {core}.")
    # The first one shares the most trigrams with everything, by its length alone: it must not be the nearest.
    train = [question("read(path, mode='r') walk(top, hidden=False, size=0) sort(items, key=None, long=0)", "long"),
             question("read(path, mode='r')", "mode"), question("walk(top, hidden=False)", "hidden"),
             question("dump(obj, mode='w')", "mode")]
    held_out = [question("read(path, mode='rb')", "mode"), question("walks(top, hidden=True)", "hidden"),
                question("zip(first, size=0)", "size"),
                question("sort(items, key=None, reverse=False)", "key, reverse")]
    bar = baselines("optional", train, held_out)
    assert (bar["constant"], bar["constant_answer"]) == (0.25, "With a default: mode.")
    assert bar["nearest"] == 0.5
    assert (bar["copied"], bar["copy"]) == ("the last name", 0.25)        # elsewhere rb, True and False stand last
    assert bar["best"] == 0.5


def test_a_rule_kind_has_no_baseline_that_solves_it(made):
    bars = json.loads((made / "chat" / "baselines.json").read_text())["kinds"]
    assert set(bars) == set(kinds.KINDS) - {"remark"}
    assert all(bars[kind]["best"] <= 0.5 for kind in bars)
    assert all(0 <= bar[name] <= bar["best"] for bar in bars.values() for name in ("constant", "copy", "nearest"))


def test_rankings_that_could_not_be_drawn_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, "--answers=90", "--spoiled_share=0.9", "--min_margin=9.0", "--control_ratio=99.0", "--turns=0")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "turns must be at least 1" in said
    assert all(f"{key} must be from" in said for key in ("answers", "spoiled_share", "min_margin", "control_ratio"))


def test_what_is_done_is_not_made_again_unless_something_has_changed(made, tmp_path, capsys, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "chat").glob("*.json*")}
    run(tmp_path)
    assert "already done" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "chat").glob("*.json*")} == before
    (tmp_path / "chat" / "prompts_val.jsonl").unlink()
    run(tmp_path)
    assert (tmp_path / "chat" / "prompts_val.jsonl").exists() and "already" not in capsys.readouterr().out
    run(tmp_path, "--show=2")
    assert "`" in capsys.readouterr().out
    monkeypatch.setattr(prepare_chat, "write_atomic", lambda *_: pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception):
        run(tmp_path, "--seed=2")                       # stopped among the files: they are not taken for whole ones
    assert not (tmp_path / "chat" / "index.json").exists()


def test_documents_that_define_nothing_are_refused(tmp_path, capsys):
    write_documents(tmp_path, {"a": "Just some prose about nothing."}, {"b": "More prose."})
    with pytest.raises(SystemExit) as stop:
        run(tmp_path)
    assert stop.value.code == 2 and "define no functions" in capsys.readouterr().err
