"""What is done about a bad step: the rules on made-up numbers, and a roll-back's bookkeeping on real folders."""
import json
import math

import pytest
import torch

import sft
import train
from configurator import Config, configure
from engine import ladder
from engine.files import read_json, write_json
from engine.loader import plan_step
from small import ALONE

KEYS = dict(on_spike="log", spike_z=6.0, spike_norm=5.0, spike_window=8, max_bad_steps=3, rollback_window=4,
            rollback_lr=0.8, max_rollbacks=2)
STAGES = {stage: configure(vars(stage), []) for stage in (train, sft)}
RECENT = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.0]


def keys(stage=train, **changed):
    config = STAGES[stage]
    values = {name: value for name, value in {**KEYS, **changed}.items() if hasattr(config, name)}
    return Config(config.script, {**dict(config.items()), **values}, [], {}, {})


def trouble(norm, recent=RECENT, warm=True, loss=2.0, **changed):
    return ladder.trouble(loss, norm, recent, warm, keys(**changed))


def test_what_leaps():
    assert trouble(1.2) == "" and "deviations above 1, the mean of 8 steps" in trouble(1.5)
    assert trouble(0.01) == ""                                          # less is no trouble
    assert trouble(1.5, RECENT[:4]) != "" and trouble(1.5, RECENT[:3]) == ""        # from half a window on
    assert trouble(1.25, [1.0] * 8) == "" and trouble(1.31, [1.0] * 8) != ""        # at least 5 % of the mean
    assert "above spike_norm" in trouble(5.1, []) and trouble(5.1, [], warm=False) == "" and trouble(5.0, []) == ""
    assert trouble(100.0, spike_z=0.0, spike_norm=0.0) == "" and trouble(0.1, [0.0] * 8) != ""
    for number in (math.nan, math.inf):
        assert "gradient norm" in trouble(number, [], warm=False) and "loss" in trouble(1.0, [], loss=number)


def test_the_rungs():
    spiked, bad = (1.0, 9.0, "leaps"), (math.nan, 1.0, "nan")
    deeds = {policy: [ladder.rung(*step, row, keys(on_spike=policy)) for step in (spiked, bad) for row in (1, 2, 3)]
             for policy in ladder.POLICIES}
    assert deeds == {"log": ["", "", "", "skip", "skip", "stop"], "stop": ["stop"] * 3 + ["skip", "skip", "stop"],
                     "skip": ["skip", "skip", "rollback"] * 2, "rollback": ["rollback"] * 3 + ["skip", "skip", "rollback"]}
    assert ladder.rung(2.0, 1.0, "", 1, keys(on_spike="stop")) == ""
    assert [ladder.rung(*bad, 3, keys(sft, on_spike=policy)) for policy in ("log", "skip")] == ["stop"] * 2   # no way back


def test_all_ranks_hear_of_a_nan():
    loss, norm = torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.1)
    assert ladder.agree(loss, norm, 15, ALONE) == (2.0, norm.item(), True)
    assert math.isnan(ladder.agree(loss, norm * math.nan, 0, ALONE)[1]) and not ladder.agree(loss, norm, 0, ALONE)[2]


def test_keys_that_can_not_be(capsys):
    said = ladder.ladder_problems(keys(on_spike="retry", rollback_lr=1.5, spike_z=-1.0, max_rollbacks=-1))
    assert len(said) == 4 and "log, skip, rollback, stop" in said[0]
    [said] = ladder.ladder_problems(keys(sft, on_spike="rollback"))
    assert "one of log, skip, stop" in said and ladder.ladder_problems(keys(sft)) == ladder.ladder_problems(keys()) == []


def checkpoint(run, kind, step, **state):
    folder = ladder.folder_of(run, kind, step)
    write_json(folder / {"full": "state.json", "light": "training.json"}[kind], {"step": step, **state})
    write_json(folder / "manifest.json", {"files": {}})
    return folder


def decide(run, step, decisions=(), deed="rollback", row=1, **changed):
    ladder.decide(deed, run, step, "it leaps", row, list(decisions), [], keys(**changed))
    return read_json(run / "rollbacks.json")["rollbacks"]


def test_one_roll_back_after_another(tmp_path, capsys):
    for step in (4, 8, 12, 16):
        checkpoint(tmp_path, "full", step, rollbacks=[]), checkpoint(tmp_path, "light", step, rollbacks=[])
    (ladder.folder_of(tmp_path, "full", 16) / "manifest.json").unlink()
    first = decide(tmp_path, 14)                        # steps 11 to 14 are bad, and 8 is the last that has seen none of it
    assert [(d["to"], d["window"]) for d in first] == [(8, [11, 15])] and "roll-back 1 of 2" in capsys.readouterr().out
    names = lambda: sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    for _ in range(2):                                  # again, as after a kill
        ladder.settle(tmp_path)
        assert names() == ["full_00000004", "full_00000008", "full_00000012.abandoned-1", "full_00000016.abandoned-1",
                           "step_00000004", "step_00000008", "step_00000012.abandoned-1", "step_00000016.abandoned-1"]
    checkpoint(tmp_path, "full", 12, rollbacks=first)   # made since then: it knows
    ladder.settle(tmp_path)
    assert "full_00000012" in names()
    windows = ladder.windows_of(first)
    assert [plan_step(step, windows) for step in (8, 10, 11, 14)] == [8, 10, 15, 18]
    second = decide(tmp_path, 14, first, row=3, rollback_window=1)      # three skipped in a row: all three are left out
    assert [(d["to"], d["window"]) for d in second[1:]] == [(12, [16, 19])] and second[:1] == first
    assert [ladder.lr_factor(second, step) for step in (7, 8, 11, 12)] == [1, 0.8, 0.8, pytest.approx(0.64)]
    third = decide(tmp_path, 13, second, max_rollbacks=3)               # 12 itself is within the window: what it saw is done
    assert (third[2]["to"], third[2]["window"]) == (8, [10, plan_step(13, ladder.windows_of(second)) + 1])
    ladder.settle(tmp_path)
    assert names().count("full_00000012") == 0 and "full_00000012.abandoned-2" in names()


def test_checkpoints_that_do_not_reach_back_before_the_window(tmp_path, capsys):
    """The oldest is taken, and it is said what its weights have seen of the window."""
    for step in (11, 12, 13):
        checkpoint(tmp_path, "full", step, rollbacks=[])
    [decision] = decide(tmp_path, 14, rollback_window=6)                # steps 9 to 14 are to be left out, from 0
    assert (decision["to"], decision["window"]) == (11, [11, 15])
    assert "before the 6 steps that are to be left out: what steps 10 to 11 have taught stays" in capsys.readouterr().out
    [decision] = decide(tmp_path, 14, rollback_window=4)                # 11 to 14
    assert (decision["to"], decision["window"]) == (11, [11, 15]) and "taught" not in capsys.readouterr().out


GOOD = {"to": 4, "window": [1, 2], "lr_factor": 0.8}
FORMS = [b"\xff\xfe", b"[]", b"5", b'{"rollbacks"', b"{}", *(json.dumps({"rollbacks": odd}).encode() for odd in (
    5, None, "ab", [5], [[]], [None], [{}], *([{**GOOD, **odd}] for odd in (
        dict(to="4"), dict(to=-1), dict(window=5), dict(window=[1]), dict(window=["a", "b"]), dict(window=None),
        dict(lr_factor="0.8"), dict(lr_factor=0), dict(lr_factor=2), dict(lr_factor=None)))))]


@pytest.mark.parametrize("form", FORMS, ids=[form[:70].decode("latin-1") for form in FORMS])
def test_roll_backs_of_another_form_are_a_sentence(tmp_path, capsys, form):
    (tmp_path / "rollbacks.json").write_bytes(form)
    with pytest.raises(SystemExit) as end:
        ladder.settle(tmp_path)
    said = capsys.readouterr().err
    assert end.value.code == 2 and str(tmp_path / "rollbacks.json") in said


@pytest.mark.parametrize("form", [b"\xff", b"[]", b"5", b'{"rollbacks": 5}', b'{"roll'])
def test_a_damaged_checkpoint_does_not_end_a_roll_back(tmp_path, form):
    """Which damage it is, the one says who reads all of it."""
    write_json(tmp_path / "rollbacks.json", {"rollbacks": [GOOD]})
    damaged, behind = (checkpoint(tmp_path, "full", step, rollbacks=[]) for step in (8, 9))
    (damaged / "state.json").write_bytes(form)
    ladder.settle(tmp_path)
    assert damaged.exists() and not behind.exists()


def test_the_end_of_the_ladder(tmp_path, capsys):
    def refused(*words, **changed):
        with pytest.raises(SystemExit) as end:
            decide(tmp_path, *words, **changed)
        assert end.value.code == 2 and not (tmp_path / "rollbacks.json").exists()
        return capsys.readouterr().err
    assert "no full checkpoint to go back to" in refused(9)
    checkpoint(tmp_path, "full", 4, rollbacks=[])
    assert "on_spike = 'log'" in refused(9, deed="stop", row=3) and "step 10: " in refused(9, deed="stop")
    assert "went back max_rollbacks = 2 times" in refused(9, [dict(window=[1, 2])] * 2)
    assert "3 steps in a row" in refused(9, deed="stop", row=3)


def test_decisions_outlive_the_file_and_the_checkpoint(tmp_path):
    decision = decide_once = {"to": 4, "window": [1, 2], "lr_factor": 0.8}
    assert ladder.decisions_of(tmp_path) == [] and ladder.decisions_of(tmp_path, {"rollbacks": [decision]}) == [decision]
    write_json(tmp_path / "rollbacks.json", {"rollbacks": [decision, decide_once]})
    assert len(ladder.decisions_of(tmp_path, {"rollbacks": [decision]})) == 2
