"""reward.py: where an answer is scored, what the loss sees, what is reported, and that a run can be interrupted."""
import copy
import gc
import json
import math
import os
import random
import shutil
import signal

import pytest
import torch

import reward
import rlhf
import toy
from engine import checkpoint, hf, rankings, rl
from engine.monitor import read_log
from model import ScalarModel
from planted import passes, plant
from programs import Program
from small import ALONE
from toy import words      # noqa: F401 (fixture)


@pytest.fixture(scope="module")
def world(words, tmp_path_factory):
    return toy.untrained(tmp_path_factory.mktemp("reward"), words, pairs=40, control=12)


def scalar(words, seed=3):
    trunk = toy.model(words, sharpness=4.0, n_layer=2)
    made = ScalarModel(trunk.config).init_weights(seed)
    made.model.load_state_dict(trunk.model.state_dict())
    return made.eval()


def config_of(world, out, *more):
    return toy.config_of(reward, f"--data_dir={world}/data", f"--out_dir={out}", f"--init_from={world}/out/sft",
                         "--batch_size=8", "--micro_batch_size=3", "--sft_samples=8", "--max_new_tokens=12", *more)


def rankings_of(world, words, name="train"):
    return rankings.read_rankings(world / "data" / "chat" / f"preferences_{name}.jsonl", words, 128)[0]


def final(model, dialogues, pad_id):
    return reward.scores_along(model, dialogues, [1] * len(dialogues), pad_id, "cpu")[:, -1]


# ------------------------------------------------------------------------------------------------------------- scores

def test_a_score_depends_on_its_own_dialogue_only(world, words):
    """Alone, in a batch with longer ones, padded left or right: the same number. And it is read at the last token."""
    model, read = scalar(words), rankings_of(world, words)
    rows = [ranking["dialogues"][0] for ranking in read[:6]]
    assert len({len(row) for row in rows}) > 1
    together = final(model, rows, words.pad_id)
    alone = torch.cat([final(model, [row], words.pad_id) for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    width = max(map(len, rows)) + 5
    ids = torch.tensor([[words.pad_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    torch.testing.assert_close(rl.at_last(model(ids, mask=mask), mask), alone, rtol=0, atol=1e-5)
    assert torch.equal(final(model, rows, words.bos_id), together)         # whatever the padding is
    full = torch.stack([model(torch.tensor([row]))[0, -1] for row in rows])
    torch.testing.assert_close(together, full, rtol=0, atol=1e-5)
    assert all(row[-1] == words.special("<|end|>") for row in rows)


def test_scores_along_the_answer_are_those_of_its_own_tokens(world, words):
    model, rankings = scalar(words), rankings_of(world, words)[:3]
    along = reward.score_rankings(model, rankings, words.pad_id, "cpu")
    rows = [(d, r["prompt"]) for r in rankings for d in r["dialogues"]]
    assert along.shape == (len(rows), max(len(d) - prompt for d, prompt in rows))
    for found, (dialogue, prompt) in zip(along, rows):
        own = model(torch.tensor([dialogue]))[0, prompt:]
        expected = torch.cat([own, own[-1:].expand(along.size(1) - len(own))])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_all_dialogues_in_one_forward_pass(world, words):
    model, calls = scalar(words), []
    model.register_forward_hook(lambda *args: calls.append(1))
    reward.score_rankings(model, rankings_of(world, words)[:4], words.pad_id, "cpu")
    assert len(calls) == 1


def test_scoring_all_keeps_the_order(world, words):
    model, rankings = scalar(words), rankings_of(world, words) + rankings_of(world, words, "val")
    scores = reward.score_all(model, rankings, words.pad_id, ALONE, size=7)
    ends = [0]
    for ranking in rankings:
        ends.append(ends[-1] + len(ranking["dialogues"]))
    for i in (0, 13, 39, 60):
        one = final(model, rankings[i]["dialogues"], words.pad_id)
        torch.testing.assert_close(scores[ends[i]:ends[i + 1]], one, rtol=0, atol=1e-5)


def test_gradient_does_not_depend_on_the_micro_batches(world, words):
    rankings = rankings_of(world, words)[:6] + rankings_of(world, words, "val")[:2]       # of four answers, and of two
    for share in (0.0, 0.6):
        gradients = []
        for size in (8, 3, 1):
            model = scalar(words)
            for micro in reward.micro_batches(rankings, ALONE, size):
                loss, _ = reward.losses(reward.score_rankings(model, micro, words.pad_id, "cpu"), micro, share)
                (loss.sum() / len(rankings)).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert gradients[0].norm() > 1e-3
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=3e-6)
        torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-4, atol=3e-6)


def test_ranks_share_the_rankings(world, words):
    rankings = rankings_of(world, words)[:8]
    shares = []
    for rank in range(2):
        setup = copy.copy(ALONE)
        setup.rank, setup.world = rank, 2
        shares += [ranking["dialogues"] for micro in reward.micro_batches(rankings, setup, 3) for ranking in micro]
    assert sorted(shares) == sorted(ranking["dialogues"] for ranking in rankings)


# -------------------------------------------------------------------------------------------------------------- losses

def ranking(*lengths, level=None, margin=0.0, prompt=2):
    return {"dialogues": [[0] * (prompt + n) for n in lengths], "prompt": prompt, "margin": margin, "dimension": "",
            "level": level or list(range(len(lengths))), "worth": [math.nan] * len(lengths)}


def test_pairs_are_all_of_different_level():
    better, worse, number = reward.pairs_of([ranking(1, 1, 1, level=[0, 1, 1]), ranking(1, 1)])
    assert (better.tolist(), worse.tolist(), number.tolist()) == ([0, 0, 3], [1, 2, 4], [0, 0, 1])


def test_loss_of_a_ranking_is_the_mean_over_its_pairs_and_of_a_pair_the_formula():
    """By hand: at the end; and along the answers, where the shorter one keeps its last number."""
    nan = math.nan
    along = torch.tensor([[1.0, 2.0, 2.0, nan], [0.5, 0.0, 1.0, nan], [3.0, 3.0, 3.0, nan],       # lengths 2, 3, 1
                          [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])                            # lengths 4, 4
    along[:3, 3] = torch.tensor([2.0, 1.0, 3.0])             # repeated behind the longest of the three: must not count
    both = [ranking(2, 3, 1), ranking(4, 4, margin=0.5)]
    cost = lambda *differences: sum(math.log1p(math.exp(-d)) for d in differences) / len(differences)
    loss, right = reward.losses(along, both, 0.0)
    assert loss.tolist() == pytest.approx([cost(2 - 1, 2 - 3, 1 - 3), cost(1 - 0.5)])
    assert right.tolist() == pytest.approx([1 / 3, 1])
    loss, _ = reward.losses(along, both, 1.0)
    first = (cost(0.5, 2, 1) + cost(-2, -1) + cost(-2.5, -3, -2)) / 3
    assert loss.tolist() == pytest.approx([first, cost(-0.5, -0.5, -0.5, 0.5)])
    mixed, _ = reward.losses(along, both, 0.25)
    assert mixed[0].item() == pytest.approx(0.75 * cost(1, -1, -2) + 0.25 * first)


def test_equally_good_answers_are_not_compared():
    along = torch.tensor([[2.0], [0.0], [7.0]])
    one, _ = reward.losses(along, [ranking(1, 1, 1, level=[0, 1, 1])], 0.0)
    assert one.item() == pytest.approx((math.log1p(math.exp(-2)) + math.log1p(math.exp(5))) / 2)


# ------------------------------------------------------------------------------------------------------------ reports

def test_gaps_are_numbers_or_unknown():
    worth = [rankings._worth({"scores": {"chosen": 3, "rejected": other}, "margin": 7}) for other in (1, 10 ** 400, None, "1")]
    assert [a - b for a, b in worth] == [2, 7, 7, 7] and math.isnan(sum(rankings._worth({})))


def test_report_by_margin_with_ties():
    pairs = [{**ranking(1, 1), "worth": [gap, 0.0]} for gap in (0.5, 0.9, 1.2, 3.0, math.nan)]
    found = reward.report(pairs, torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 3.0, 1.0, 0.0, 0.0, 0.0]))
    assert found["accuracy"] == pytest.approx((1 + 0.5 + 0 + 1 + 0.5) / 5) and found["pairs"] == 5
    buckets = [(bucket["from"], bucket["pairs"], bucket["accuracy"]) for bucket in found["by_margin"]]
    assert buckets == [(0.0, 2, 0.75), (1.0, 1, 0.0), (2.0, 1, 1.0)]
    found = reward.report([ranking(1, 1, 1)], torch.tensor([1.0, 2.0, 0.0]))
    assert (found["pairs"], found["by_margin"]) == (3, []) and found["accuracy"] == pytest.approx(2 / 3)


def test_report_on_control_pairs_counts_tokens_of_the_answer():
    pairs = [ranking(6, 3), ranking(3, 6), ranking(8, 4), ranking(9, 4), ranking(5, 4)]     # the last: not far enough
    pairs = [{**pair, "dialogues": [[0] * 8 + d for d in pair["dialogues"]], "prompt": 10} for pair in pairs]
    found = reward.report_control(pairs, torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]), 1.5)
    assert (found["pairs"], found["left_out"], found["smallest_length_ratio"]) == (4, 1, 2.0)
    assert found["accuracy"] == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    assert found["prefers_longer"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert reward.report_control([ranking(5, 4)], torch.tensor([1.0, 0.0]), 1.5) == {"pairs": 0, "left_out": 1}


def test_both_forms_of_lines_and_margins(tmp_path, words):
    prompt = [{"role": "user", "content": "What?"}]
    toy.write_lines(tmp_path / "p.jsonl", [{"prompt": prompt, "ranked": ["a", ["bb", "ccc", "x" * 300]], "scores": [1]},
                                           {"prompt": prompt, "chosen": "a", "rejected": "b", "margin": 0.5},
                                           {"prompt": prompt, "chosen": "x" * 300, "rejected": "b"}])
    read, left_out = rankings.read_rankings(tmp_path / "p.jsonl", words, 100)
    answers = [[words.decode(d[ranking["prompt"]:]) for d in ranking["dialogues"]] for ranking in read]
    assert answers == [["a", "bb", "ccc"], ["a", "b"]] and [r["level"] for r in read] == [[0, 1, 1], [0, 1]]
    assert [ranking["margin"] for ranking in read] == [0.0, 0.5] and "What?" in left_out[0] and len(left_out) == 1


# --------------------------------------------------------------------------------------------------------- dimensions

def several(words, names=("truth", "tone", "form")):
    """A reward model with a head for each of three things."""
    one = scalar(words)
    made = ScalarModel(one.config, {name: 1 / len(names) for name in names}).init_weights(3).eval()
    made.model.load_state_dict(one.model.state_dict())
    made.score.bias.data = torch.tensor([0.3, -1.0, 2.0])
    return made


def test_a_pair_of_one_dimension_moves_that_head_alone_and_one_without_all_of_them(world, words):
    read = rankings_of(world, words)[:3]
    for which, heads in ((0, [0.0, 1.0, 0.0]), (1, [0.0, 0.0, 1.0]), (2, [0.5, -0.25, 0.25])):
        model = several(words)
        one = {**read[which], "heads": heads}
        along = reward.score_rankings(model, [one], words.pad_id, "cpu")
        alone = reward.scores_along(model, one["dialogues"], [one["prompt"]] * 4, words.pad_id, "cpu")
        torch.testing.assert_close(along, (alone * torch.tensor(heads)).sum(-1))
        reward.losses(along, [one], 0.0)[0].sum().backward()
        moved = model.score.weight.grad.norm(dim=1)
        assert [bool(norm > 1e-4) for norm in moved] == [bool(head) for head in heads]
        assert (moved[torch.tensor(heads) == 0] == 0).all()


def test_each_head_scores_whatever_stands_beside_the_dialogue(world, words):
    model = several(words)
    rows = [ranking["dialogues"][0] for ranking in rankings_of(world, words)[:6]]
    together = final(model, rows, words.pad_id)
    assert together.shape == (6, 3)
    torch.testing.assert_close(together, torch.cat([final(model, [row], words.pad_id) for row in rows]), rtol=0, atol=1e-5)


def test_the_sum_of_heads_is_a_head(world, words):
    model = several(words)
    rows = [ranking["dialogues"][0] for ranking in rankings_of(world, words)[:6]]
    weights = rankings.shares({"truth": 2, "tone": -1, "form": 1})
    assert list(weights.values()) == [0.5, -0.25, 0.25]
    apart = final(model, rows, words.pad_id)
    added = final(model.add_up(weights), rows, words.pad_id)
    torch.testing.assert_close(added, apart @ torch.tensor([0.5, -0.25, 0.25]), rtol=1e-5, atol=1e-5)


def test_accuracy_of_each_dimension_and_whether_a_certainty_is_right():
    pairs = [{**ranking(1, 1), "dimension": name, "worth": [2.0, 0.0]} for name in ("a", "b", "a", "b", "")]
    sure = math.log(0.95 / 0.05)                                # a difference that stands for 95 %
    scores = torch.tensor([[sure, 0], [0, sure], [sure, 0], [0.1, 0], [sure, 0]]).flatten()
    found = reward.report(pairs, scores)
    assert {name: (part["pairs"], part["accuracy"]) for name, part in found["by_dimension"].items()} == {
        "a": (2, 1.0), "b": (2, 0.5), "": (1, 1.0)}
    told = [(bucket["pairs"], bucket["accuracy"]) for bucket in found["by_certainty"]]
    assert told == [(1, 1.0), (4, 0.75)] and found["by_certainty"][1]["mean"] == pytest.approx(0.95)
    expected = (abs(1 - torch.sigmoid(torch.tensor(0.1)).item()) + 4 * (0.95 - 0.75)) / 5
    assert found["calibration_error"] == pytest.approx(expected, rel=1e-5)
    assert "by_dimension" not in found["by_dimension"]["a"]


def test_a_run_with_two_dimensions_that_contradict_each_other(words, world, tmp_path, capsys):
    """The longer answer is the better one in one of them, the shorter one in the other: no single score can have both. Each
    head learns its own, each is scaled for itself, and PPO gets their mean with the weights of the setting."""
    rows, rng = [], random.Random(0)
    for number in range(120):
        long, short = "It is very clear, useful and handy. That is my view.", rng.choice(["It is dull.", "I find it neat."])
        name = ("length", "brevity")[number % 2]
        chosen, rejected = (long, short) if name == "length" else (short, long)
        rows.append({"prompt": toy.question(rng), "chosen": chosen, "rejected": rejected, "dimension": name})
    for name, some in (("train", rows[:80]), ("val", rows[80:])):
        toy.write_lines(tmp_path / "chat" / f"preferences_{name}.jsonl", some)
    options = [f"--data_dir={tmp_path}", "--dimensions={'length': 1, 'brevity': 3}", "--epochs=4", "--learning_rate=3e-3"]
    reward.main(config_of(world, tmp_path, *options))
    with pytest.raises(SystemExit):
        reward.main(config_of(world, tmp_path, f"--data_dir={tmp_path}", "--dimensions={'length': 1, 'brevity': 1, 'wit': 1}"))
    assert "says nothing about wit" in capsys.readouterr().err
    result = json.loads((tmp_path / "reward" / "result.json").read_text())
    assert [result["val"]["by_dimension"][name]["accuracy"] for name in ("brevity", "length")] == [1.0, 1.0]
    model, _ = hf.load_model(tmp_path / "reward", kind="scalar")
    assert model.dimensions == result["dimensions"] == {"length": 0.25, "brevity": 0.75} and len(model.score.weight) == 2
    facts = json.loads((checkpoint.newest(tmp_path / "reward") / "training.json").read_text())
    assert facts["sft_samples"] == result["sft_samples"] and len(facts["sft_samples"]["deviation"]) == 2
    ids = [words.encode(row["chosen"]) for row in rows[:4]]
    apart = final(model, ids, words.pad_id)
    found = {}
    for options in ([], ["--dimensions={'length': 1}"], ["--dimensions={'length': 1, 'wit': 1}"]):
        config = toy.config_of(rlhf, f"--policy_from={world}/out/sft", f"--reward_from={tmp_path}/reward", *options)
        if options[-1:] != ["--dimensions={'length': 1, 'wit': 1}"]:
            found[len(options)] = final(rlhf.read_models(config, ALONE)[1], ids, words.pad_id)
            continue
        with pytest.raises(SystemExit):
            rlhf.read_models(config, ALONE)
    torch.testing.assert_close(found[0], apart @ torch.tensor([0.25, 0.75]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], apart[:, 0], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ the run

def weights_of(out):
    model, _ = hf.load_model(out / "reward", kind="scalar")
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_scores_of_the_starting_models_answers_are_standard(world, words, tmp_path, monkeypatch):
    """Mean 0 and deviation 1 over the very answers that were drawn, by the model as it is read back from its folder."""
    drawn = []

    def remember(policy, prompts, *args, **kwargs):
        drawn.append((prompts, generate(policy, prompts, *args, **kwargs).ids))
        return generate(policy, prompts, *args, **kwargs)
    generate = reward.generate
    monkeypatch.setattr(reward, "generate", remember)
    reward.main(config_of(world, tmp_path))
    model, _ = hf.load_model(tmp_path / "reward", kind="scalar")
    (prompts, answers), = drawn
    with torch.no_grad():
        scores = final(model, [p + a for p, a in zip(prompts, answers)], words.pad_id)
    assert abs(scores.mean()) < 1e-4 and abs(scores.std() - 1) < 1e-4


def test_training_pushes_chosen_over_rejected(world, tmp_path):
    reward.main(config_of(world, tmp_path, "--epochs=12", "--learning_rate=3e-3", "--log_every=1"))
    lines = [json.loads(line) for line in (tmp_path / "reward" / "log.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] > 0.6 and lines[-1]["loss"] < 0.4 and lines[-1]["accuracy"] > 0.8


def test_interrupted_and_continued_is_the_same(world, tmp_path, monkeypatch, capsys):
    """Stopped in the middle of step 4, asked to leave in step 9: the same bits as without the interruptions."""
    more = "--save_full=2", "--epochs=2", "--along_until=0.7"
    reward.main(config_of(world, tmp_path / "straight", *more))
    real, calls = reward.micro_batches, []

    def interrupt(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        if len(calls) == 11:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)
    monkeypatch.setattr(reward, "micro_batches", interrupt)
    for saved, end in ((2, KeyboardInterrupt), (9, SystemExit)):           # five steps an epoch: in the first, the second
        with pytest.raises(end) as raised:
            reward.main(config_of(world, tmp_path / "broken", *more))
        assert end is KeyboardInterrupt or raised.value.code == 75
        del raised
        gc.collect()                                                       # the lock goes with the frame that holds it
        checkpoint.wait()
        assert checkpoint.newest(tmp_path / "broken" / "reward", "full").name == f"full_{saved:08}"
    reward.main(config_of(world, tmp_path / "broken", *more))
    assert len(calls) == 4 + 7 + 1                                         # steps 1 to 3 (4), 3 to 9, 10
    assert torch.equal(weights_of(tmp_path / "straight"), weights_of(tmp_path / "broken"))
    capsys.readouterr()
    reward.main(config_of(world, tmp_path / "broken", *more))
    assert "already done" in capsys.readouterr().out


def test_each_epoch_has_an_order_of_its_own(world, tmp_path, monkeypatch):
    real, epochs = rankings.steps_by_length, []
    monkeypatch.setattr(rankings, "steps_by_length", lambda *args: epochs.append(args[-1]) or real(*args))
    reward.main(config_of(world, tmp_path / "out", "--epochs=2", "--sft_samples=2"))
    assert epochs == [0, 1]


@pytest.mark.parametrize("options, said", [
    (["--batch_size=64"], "40 usable pairs"),
    (["--along_until=1.5"], "along_until must be from 0 to 1"), (["--max_rankings=-1"], "max_rankings must be at least 0"),
    (["--max_rankings=3"], "max_rankings = 3"), (["--control_ratio=1.0"], "control_ratio must be at least"),
    (["--learning_rate=-1.0", "--grad_clip=-2.0"], "grad_clip must be at least 0"),
    (["--log_every=0", "--micro_batch_size=0"], "micro_batch_size must be at least 1"),
    (["--sft_samples=1"], "sft_samples must be at least 2"),
    (["--dimensions={'safe': 'x', 'kind': 0}"], "weight of 'safe' must be"), (["--dimensions={'kind': 0}"], "are 0"),
    (["--init_from=/nowhere"], "/nowhere"),
    (["--data_dir=/nowhere"], "prepare_chat.py")])
def test_refusals(world, tmp_path, capsys, options, said):
    with pytest.raises(SystemExit) as refused:
        reward.main(config_of(world, tmp_path, *options))
    assert refused.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "reward" / "config.json").exists()      # the folder is not bound to what was refused


@pytest.mark.parametrize("line, said", [
    ({"prompt": [{"role": "user", "content": "What?"}], "ranked": [["a", "b"]]}, "two or more members"),
    ({"prompt": [{"role": "user", "content": "x" * 300}], "chosen": "a", "rejected": "b"}, "of all 1 lines nothing can be compared")])
def test_bad_held_out_pairs_are_found_before_the_training(world, tmp_path, capsys, line, said):
    shutil.copytree(world / "data", tmp_path / "data")
    toy.write_lines(tmp_path / "data" / "chat" / "preferences_control.jsonl", [line])
    with pytest.raises(SystemExit) as refused:
        reward.main(config_of(world, tmp_path, f"--data_dir={tmp_path}/data"))
    assert refused.value.code == 2 and said in capsys.readouterr().err and not (tmp_path / "reward").exists()


def test_changed_settings_are_refused_on_resume(world, tmp_path, capsys):
    reward.main(config_of(world, tmp_path))
    (tmp_path / "reward" / "result.json").unlink()
    gc.collect()
    with pytest.raises(SystemExit) as refused:
        reward.main(config_of(world, tmp_path, "--learning_rate=1e-5"))
    assert refused.value.code == 2 and "learning_rate" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "reward")


def test_two_processes_learn_what_one_does(world, tmp_path):
    """The same pairs in each global step, so the same weights but for rounding."""
    arguments = ["--device=cpu", "--dtype=fp32", "--threads=1", f"--data_dir={world}/data",
                 f"--init_from={world}/out/sft", "--batch_size=8", "--micro_batch_size=3", "--sft_samples=8", "--max_new_tokens=12",
                 "--along_until=0.7"]
    reward.main(config_of(world, tmp_path / "one", "--learning_rate=1e-3", "--along_until=0.7"))
    code, said = Program("reward.py", *arguments, f"--out_dir={tmp_path}/two", "--learning_rate=1e-3", processes=2).wait()
    assert code == 0, said
    start, _ = hf.load_model(world / "out" / "sft", kind="scalar")
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    moved = (one - torch.cat([p.detach().flatten() for p in start.parameters()])).abs().max()
    assert moved > 1e-2 and (one - two).abs().max() < 1e-4
    norms = [read_log(tmp_path / name / "reward")[-1]["grad_norm"] for name in ("one", "two")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)                   # Adam learns the same from half a gradient
    results = [json.loads((tmp_path / name / "reward" / "result.json").read_text()) for name in ("one", "two")]
    assert results[0]["val"]["accuracy"] == results[1]["val"]["accuracy"]


MISTAKES = {
    "the score is read from padding": (reward, "scores_along", "torch.minimum(at, last[:, None])", "at.clamp(max=width - 1)",
                                       test_a_score_depends_on_its_own_dialogue_only),
    "the margin is a present": (rl, "ranking_loss", "else chosen - rejected - margin", "else chosen - rejected + margin", test_loss_of_a_ranking_is_the_mean_over_its_pairs_and_of_a_pair_the_formula),
    "the worse one is to be preferred": (rl, "ranking_loss", "-F.logsigmoid(difference)", "-F.logsigmoid(-difference)",
                                         test_loss_of_a_ranking_is_the_mean_over_its_pairs_and_of_a_pair_the_formula),
    "equally good ones are compared": (rankings, "pairs_of", "level[i] < level[j]", "level[i] <= level[j]", test_pairs_are_all_of_different_level),
    "ties are wrong": (rl, "pair_accuracy", " + 0.5 * (chosen == rejected).float()", "", test_report_by_margin_with_ties),
    "a long ranking weighs more": (rankings, "means_of_pairs", " / ranking.bincount()", "",
                                   test_loss_of_a_ranking_is_the_mean_over_its_pairs_and_of_a_pair_the_formula),
    "every head learns every pair": (reward, "score_rankings", "along * heads[:, None]", "along",
                                     test_a_pair_of_one_dimension_moves_that_head_alone_and_one_without_all_of_them),
    "scores keep their offset": (reward, "standardise", "model.score.bias.sub_(mean)", "model.score.bias",
                                 test_scores_of_the_starting_models_answers_are_standard),
    "certainty of the chosen one": (reward, "report", "(scores[better] - scores[worse]).abs()", "scores[better] - scores[worse]",
                                    test_accuracy_of_each_dimension_and_whether_a_certainty_is_right),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_mistake_survives(mistake, request, monkeypatch):
    module, name, old, new, test = MISTAKES[mistake]
    plant(monkeypatch, module, name, old, new)
    if hasattr(reward, name) and module is not reward:         # what reward.py has imported by name
        monkeypatch.setattr(reward, name, getattr(module, name))
    assert not passes(test, request)
