"""dpo.py: what is summed, what the first loss is, and that nothing depends on how the work is cut."""
import gc
import math
import os
import shutil
import signal

import pytest
import torch

import dpo
import toy
from engine import rl
from engine.loss import logprobs
from engine.monitor import read_log
from engine.rankings import read_rankings
from planted import passes, plant
from safetensors.torch import load_file
from programs import Program
from small import ALONE
from toy import words      # noqa: F401 (fixture)


@pytest.fixture(scope="module")
def world(words, tmp_path_factory):
    folder = toy.untrained(tmp_path_factory.mktemp("dpo"), words, pairs=64, control=4)
    shutil.copyfile(folder / "data" / "chat" / "preferences_train.jsonl", folder / "data" / "chat" / "preferences_val.jsonl")
    return folder


def arguments(world, out, *more):
    return [f"--data_dir={world}/data", f"--out_dir={out}", f"--init_from={world}/out/sft", "--batch_size=8", "--micro_batch_size=3",
            "--learning_rate=1e-3", "--log_every=1", "--save_full=3", "--device=cpu", "--dtype=fp32", "--threads=1", *more]


def run(world, out, *more):
    dpo.main(toy.config_of(dpo, *arguments(world, out, *more)))
    return out / "dpo"


def steps_of(run):
    return [record for record in read_log(run) if "loss" in record]


def rankings_of(world, words, count=6):
    return read_rankings(world / "data" / "chat" / "preferences_train.jsonl", words, 128)[0][:count]


def test_the_loss_by_hand():
    chosen, rejected = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([0.0, -1.0, 3.0])
    found = rl.dpo_loss(chosen, rejected, beta=0.5)
    assert found[0].item() == pytest.approx(math.log(2), abs=1e-7)
    assert found[1].item() == pytest.approx(math.log(1 + math.exp(-1.5)), abs=1e-6)
    assert found[2].item() == pytest.approx(math.log(1 + math.exp(2.0)), abs=1e-6)
    smooth = rl.dpo_loss(chosen, rejected, beta=0.5, smoothing=0.25)
    assert smooth[1].item() == pytest.approx(0.75 * math.log(1 + math.exp(-1.5)) + 0.25 * math.log(1 + math.exp(1.5)), abs=1e-6)
    assert rl.dpo_loss(chosen, rejected, beta=0.5, kind="ipo").tolist() == pytest.approx([1.0, (3 - 1) ** 2, (-4 - 1) ** 2])


def test_what_is_summed(world, words):
    """The answer's tokens with their <|end|>, as the one function for log-probabilities has them, whatever stands beside."""
    rankings, model = rankings_of(world, words), toy.model(words, sharpness=4.0).eval()
    sums, tokens = dpo.answer_logprobs(model, rankings, words.pad_id, ALONE)
    at = 0
    for ranking in rankings:
        for dialogue in ranking["dialogues"]:
            ids = torch.tensor([dialogue])
            alone = logprobs(model, ids, torch.ones_like(ids, dtype=torch.bool))[0, ranking["prompt"] - 1:]
            assert sums[at].item() == pytest.approx(alone.sum().item(), abs=1e-3) and tokens[at] == len(alone) == len(dialogue) - ranking["prompt"]
            assert dialogue[-1] == words.specials["<|end|>"]
            at += 1
    assert at == len(sums)


def test_gradients_of_a_ranking_by_hand(world, words):
    """All pairs of different levels, their mean, and DPO's gradient: beta sigmoid(-margin) on either side."""
    ranking = rankings_of(world, words, 1)[0]
    model = toy.model(words, sharpness=4.0).eval()
    config = toy.config_of(dpo, "--beta=0.3", "--data_dir=x", "--out_dir=x")
    ranking["reference"] = torch.linspace(-20, -10, len(ranking["level"]))
    sums, _ = dpo.answer_logprobs(model, [ranking], words.pad_id, ALONE)
    ratio = sums.detach() - ranking["reference"]
    level = ranking["level"]
    pairs = [(i, j) for i in range(len(level)) for j in range(len(level)) if level[i] < level[j]]
    weights = [torch.sigmoid(-0.3 * (ratio[i] - ratio[j])) * 0.3 / len(pairs) for i, j in pairs]
    by_hand = sum(w * (sums[j] - sums[i]) for w, (i, j) in zip(weights, pairs))
    expected = torch.autograd.grad(by_hand, model.lm_head.weight)[0]
    found = dpo.losses(model, [ranking], config, words.pad_id, ALONE)
    torch.testing.assert_close(torch.autograd.grad(found[0].sum(), model.lm_head.weight)[0], expected, rtol=1e-4, atol=1e-6)
    assert found[1].item() == pytest.approx(sum((ratio[i] > ratio[j]).item() for i, j in pairs) / len(pairs))


@pytest.mark.parametrize("kind, first", [("dpo", math.log(2)), ("ipo", 25.0)])
def test_the_first_loss_is_known_and_the_run_learns(kind, first, world, tmp_path):
    records = steps_of(run(world, tmp_path, "--epochs=3", f"--loss={kind}"))
    assert records[0]["loss"] == pytest.approx(first, rel=1e-6) and records[0]["grad_norm"] > 1e-3
    assert records[0]["accuracy"] == pytest.approx(0.5, abs=0.15) and records[0]["chosen"] == pytest.approx(0, abs=1e-4)
    assert records[-1]["accuracy"] > 0.65 and records[-1]["loss"] < first - 0.05


def test_the_cut_changes_nothing_and_a_run_that_was_asked_to_leave_goes_on_exactly(world, tmp_path, monkeypatch):
    whole = run(world, tmp_path / "a")
    cut = run(world, tmp_path / "b", "--micro_batch_size=1")
    assert [r["loss"] for r in steps_of(cut)] == pytest.approx([r["loss"] for r in steps_of(whole)], abs=2e-5)
    real, calls = dpo.take_step, []
    def asked(*words):
        calls.append(words)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*words)
    monkeypatch.setattr(dpo, "take_step", asked)
    with pytest.raises(SystemExit) as left:
        run(world, tmp_path / "c")
    assert left.value.code == 75 and len(calls) == 5
    del left
    gc.collect()                            # the lock goes with the frame that holds it
    half = run(world, tmp_path / "c")       # from full_00000005
    assert len(calls) == 8
    name = "step_00000008/model.safetensors"
    assert all(torch.equal(value, load_file(whole / name)[key]) for key, value in load_file(half / name).items())
    assert steps_of(half)[-1]["step"] == 8 and len(steps_of(half)) == 8


def test_two_processes_do_as_one(world, tmp_path):
    one = steps_of(run(world, tmp_path / "one", "--epochs=1"))
    code, said = Program("dpo.py", *arguments(world, tmp_path / "two"), processes=2).wait()
    assert code == 0, said
    two = steps_of(tmp_path / "two" / "dpo")
    for key in ("loss", "chosen", "rejected", "accuracy", "best"):
        assert [r[key] for r in two] == pytest.approx([r[key] for r in one], abs=1e-3), key
    assert [r["grad_norm"] for r in two] == pytest.approx([r["grad_norm"] for r in one], rel=1e-3)


def test_a_wrong_reference_is_found_at_the_first_step(world, tmp_path, monkeypatch, capsys):
    right = dpo.reference_logprobs

    def wrong(model, rankings, *more):
        right(model, rankings, *more)
        for ranking in rankings:                # as means over tokens would be
            ranking["reference"] = ranking["reference"] / 9
    monkeypatch.setattr(dpo, "reference_logprobs", wrong)
    with pytest.raises(SystemExit) as stop:
        run(world, tmp_path)
    assert stop.value.code == 2 and "the first loss is" in capsys.readouterr().err


def test_bad_settings_are_told_all_at_once(world, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(world, tmp_path, "--beta=0", "--loss=kto", "--label_smoothing=0.7", "--anchor=-1", "--batch_size=1000")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in said for word in ("beta", "'kto'", "label_smoothing", "anchor", "batch_size = 1000"))


MISTAKES = {
    "the prompt is summed along": (dpo, "answer_logprobs", "(place >= prompts[:, None]) & ", "", test_what_is_summed),
    "<|end|> is left out": (dpo, "answer_logprobs", "place < lengths[:, None]", "place < lengths[:, None] - 1", test_what_is_summed),
    "a mean over tokens": (dpo, "answer_logprobs", "index_add(0, rows, -losses)",
                           "index_add(0, rows, -losses) / rows.bincount(minlength=len(dialogues))", test_what_is_summed),
    "a token predicts itself": (dpo, "answer_logprobs", "ids[:, 1:][keep]", "ids[:, :-1][keep]", test_what_is_summed),
    "the policy is its own reference": (
        dpo, "losses", 'torch.cat([ranking["reference"] for ranking in rankings]).to(sums)', "sums.detach()", test_gradients_of_a_ranking_by_hand),
    "no reference": (
        dpo, "losses", ' - torch.cat([ranking["reference"] for ranking in rankings]).to(sums)', "", test_gradients_of_a_ranking_by_hand),
    "the rejected one is chosen": (rl, "dpo_loss", "chosen - rejected\n", "rejected - chosen\n", test_the_loss_by_hand),
    "beta is forgotten": (rl, "dpo_loss", "F.logsigmoid(beta * margin) - smoothing", "F.logsigmoid(margin) - smoothing", test_the_loss_by_hand),
    "all labels are smoothed away": (rl, "dpo_loss", "-(1 - smoothing)", "-smoothing", test_the_loss_by_hand),
    "IPO wants twice the margin": (rl, "dpo_loss", "1 / (2 * beta)).square", "1 / beta).square", test_the_loss_by_hand),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_mistake_survives(mistake, request, monkeypatch):
    module, name, old, new, test = MISTAKES[mistake]
    plant(monkeypatch, module, name, old, new)
    assert not passes(test, request)
