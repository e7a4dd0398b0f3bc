"""The files of preferences: each form and each mistake, and the collections that are read as they are published."""
import json


from engine.rankings import read_preferences
from test_chat import ANSWER, USER, lines, refused


def test_pairs_and_rankings(tmp_path):
    plain = {"prompt": [USER], "chosen": "yes", "rejected": "no", "dimension": "truth", "margin": 2, "subject": "x"}
    ranked = {"prompt": [USER, ANSWER, USER], "ranked": ["a", ["b", "c"], "d"], "margin": 1}
    read, left_out = read_preferences(lines(tmp_path, plain, ranked))
    assert read[0] == {"prompt": [USER], "ranked": [["yes"], ["no"]], "dimension": "truth", "margin": 2, "worth": [2, 0]}
    assert read[1]["ranked"] == [["a"], ["b", "c"], ["d"]] and read[1]["prompt"] == ranked["prompt"] and left_out == []


def test_graded_answers_to_one_prompt_are_compared_in_each_dimension(tmp_path):
    other = {"role": "user", "content": "another"}
    grades = [("a", {"truth": 3, "tone": 1}), ("b", {"truth": 1, "tone": 1.0}), ("c", {"truth": 2}), ("a", {"truth": 4})]
    entries = [{"prompt": [USER], "answer": text, "grades": given} for text, given in grades]
    entries.insert(1, {"prompt": [other], "answer": "alone", "grades": {"truth": 9}})
    read, left_out = read_preferences(lines(tmp_path, *entries), ["truth", "tone"])
    assert [(r["ranked"], r["worth"], r["dimension"]) for r in read] == [([["a"], ["c"], ["b"]], [3.5, 2, 1], "truth")]
    assert len(left_out) == 2 and any("tone" in why for why in left_out) and any("another" in why for why in left_out)
    read, _ = read_preferences(lines(tmp_path, *entries))                       # one score: the mean of an answer's grades
    assert [(r["ranked"], r["worth"], r["dimension"]) for r in read] == [([["a"], ["c"], ["b"]], [3, 2, 1], "")]


PAIR = {"prompt": [USER], "chosen": "a", "rejected": "b"}
BAD = [
    ({"chosen": "a", "rejected": "b"}, "prompt must be a list"),
    ({**PAIR, "prompt": "q"}, "found 'q'"), ({**PAIR, "prompt": [USER, ANSWER]}, "message of the user"),
    ({"prompt": [USER], "chosen": "a"}, "must be texts"), ({**PAIR, "rejected": ""}, "not empty"),
    ({**PAIR, "chosen": ["a"]}, "must be texts"), ({**PAIR, "rejected": "a"}, "no preference"),
    ({"prompt": [USER], "ranked": ["a"]}, "two or more"), ({"prompt": [USER], "ranked": ["a", 1]}, "members of ranked"),
    ({"prompt": [USER], "ranked": ["a", "b", "a"]}, "no preference"),
    ({"prompt": [USER], "ranked": ["a", ["b", "a"]]}, "no preference"),
    ({"prompt": [USER], "ranked": [["a", "b"]]}, "two or more"), ({"prompt": [USER], "ranked": ["a", []]}, "two or more"),
    ({"prompt": [USER], "ranked": "ab"}, "two or more"), ({"prompt": [USER], "ranked": ["a", [["b"]]]}, "two or more"),
    ({**PAIR, "ranked": ["a", "b"]}, "only be one"), ({**PAIR, "margin": -1}, "margin"),
    ({**PAIR, "margin": float("nan")}, "margin"),
    ({**PAIR, "dimension": 3}, "dimension must be a name, found 3"), ({**PAIR, "dimension": ["truth"]}, "must be a name"),
    ({**PAIR, "dimension": "truht"}, "'truht' is none of truth, tone"),
    ({"prompt": [USER], "answer": "a", "grades": {"truht": 3}}, "'truht' is none of truth, tone"),
    ({"prompt": [USER], "answer": "a", "grades": {"truth": "3"}}, "a number each"),
    ({"prompt": [USER], "answer": "a", "grades": {}}, "a number each"), ({"prompt": [USER], "answer": "a"}, "a number each"),
    ({"prompt": [USER], "grades": {"truth": 3}}, "answer must be a text"),
    ({"prompt": "q", "answer": "a", "grades": {"truth": 3}}, "found 'q'"),
    ({"prompt": [USER], "answer": "a", "grades": {"truth": 3}, "ranked": ["a", "b"]}, "only be one"),
    ({"instruction": "q"}, "prompt must be a list"),
]


def test_every_bad_line_is_reported_with_number_and_reason(tmp_path, capsys):
    good = {**PAIR, "dimension": "tone"}
    path = lines(tmp_path, *(entry for bad, _ in BAD for entry in (bad, good)))
    said = refused(lambda path: read_preferences(path, ["truth", "tone"]), path, capsys).splitlines()
    for number, (bad, reason) in enumerate(BAD):
        own = [line for line in said if f"line {2 * number + 1}: " in line]
        assert any(reason in line for line in own), (bad, own)
    assert not any(f"line {number}: " in line for line in said for number in range(2, 2 * len(BAD), 2))


def test_anthropics_dialogues(tmp_path):
    """Both texts hold the whole dialogue. What has no answer, the same answer twice, or two different questions is left out."""
    begin = "\n\nHuman: How?\n\nAssistant: So.\n\nHuman: And\n\nthen?\n\nAssistant:"
    rows = [{"chosen": begin + " Thus.\n\nOr thus.", "rejected": begin + " No idea."},
            {"chosen": begin + " Thus.", "rejected": begin}, {"chosen": begin + " Thus.", "rejected": begin + " Thus."},
            {"chosen": begin + " Thus.", "rejected": begin.replace("How", "Why") + " No."}]
    (read,), left_out = read_preferences(lines(tmp_path, *rows))
    turns = [("user", "How?"), ("assistant", "So."), ("user", "And\n\nthen?")]
    assert read["prompt"] == [{"role": role, "content": content} for role, content in turns]
    assert read["ranked"] == [["Thus.\n\nOr thus."], ["No idea."]] and len(left_out) == 3
    assert "not empty" in left_out[0] and "no preference" in left_out[1] and "differ before" in left_out[2]


def test_ultrafeedback(tmp_path):
    """Four answers with ratings, of which some are "N/A"; and the pairs that were made of it."""
    rating = lambda text, **found: {"response": text, "overall_score": 7.0, "model": "m",
                                    "annotations": {name: {"Rating": value, "Rationale": "..."} for name, value in found.items()}}
    row = {"source": "s", "instruction": "q", "models": ["m"], "completions": [
        rating("a", honesty="3", helpfulness="5"), rating("b", honesty="N/A", helpfulness="1"),
        rating("c", honesty="5", helpfulness="5"), rating("d", honesty="3", helpfulness="2")]}
    read, left_out = read_preferences(lines(tmp_path, row), ["honesty"])        # of what else was rated nothing is asked
    assert [(r["ranked"], r["dimension"]) for r in read] == [([["c"], ["a", "d"]], "honesty")] and left_out == []
    (read,), _ = read_preferences(lines(tmp_path, row))
    assert read["ranked"] == [["c"], ["a"], ["d"], ["b"]] and read["worth"] == [5, 4, 2.5, 1]
    said = lambda text: [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    pairs = [{"prompt": "q", "chosen": said("a"), "rejected": said("b"), "messages": said("a"), "score_chosen": 8.0, "score_rejected": 6.5},
             {"prompt": [USER], "chosen": said("a")[1:], "rejected": said("b")[1:]}]
    read, left_out = read_preferences(lines(tmp_path, *pairs))
    assert read[0]["prompt"] == said("a")[:1] and read[0]["ranked"] == [["a"], ["b"]] and read[0]["worth"] == [8.0, 6.5]
    assert read[1]["prompt"] == [USER] and not left_out
    broken = {**row, "completions": [{"response": "a"}, "b", None]}
    assert len(read_preferences(lines(tmp_path, broken, row))[1]) == 1


def test_the_collections_names_survive_json(tmp_path):
    """What stands behind "\\u2028" is still one line."""
    (read,), _ = read_preferences(lines(tmp_path, json.dumps({**PAIR, "chosen": "a\u2028b"}, ensure_ascii=False).encode()))
    assert read["ranked"][0] == ["a\u2028b"]
