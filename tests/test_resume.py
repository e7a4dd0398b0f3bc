"""Runs that are continued: on one process and on two, elsewhere, from light checkpoints; and what a run's folder records."""
import json
import os
import shutil

import pytest

import train as script
from configurator import configure, git_commit
from engine import hf
from engine.manifest import verify
from engine.monitor import read_log, records_of
from engine.optim import adamw, clip, lr_at, set_lr, warmup_length
from engine.shards import TokenData, n_blocks, step_blocks
from programs import Program
from small import ALONE, byte_tokenizer
from test_train import SHAPE, command, data, launch, losses, same, train, weights     # noqa: F401 (data is a fixture)


def kill_all_after(data, out, step, *extra, processes):
    """Starts a run and sends kill -9 to all its processes once its log has `step`; -> the last one it has."""
    program = Program(*command(data, out, *extra), processes=processes)
    last = lambda: max((record["step"] for record in records_of(out / "pretrain" / "log.jsonl")), default=0)
    program.until(lambda: last() >= step)
    program.kill()
    return last()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32 eager", "bf16 compiled"])
def test_two_processes_resume_bit_for_bit(data, tmp_path, mode):
    """Beyond test_faults.py, which does the first in every run: small steps, and torch.compile."""
    extra = ["--max_steps=16", "--save_full=3", "--dropout=0.1"]
    extra += ["--dtype=bf16", "--compile=True"] if "bf16" in mode else []
    launch(data, tmp_path / "whole", *extra, processes=2)
    killed = kill_all_after(data, tmp_path / "torn", 8, *extra, processes=2)
    assert killed < 16 and (tmp_path / "torn/pretrain/full_00000003").exists()
    said = launch(data, tmp_path / "torn", *extra, processes=2)
    assert "continuing from" in said
    assert losses(tmp_path / "torn") == losses(tmp_path / "whole")
    assert same(weights(tmp_path / "torn", 16), weights(tmp_path / "whole", 16))


def test_a_save_in_the_background_and_one_that_is_waited_for_are_the_same(data, tmp_path):
    """And neither disturbs training: losses, learning rates and weights are those of a run that saves at its end only."""
    extra = ["--max_steps=8", "--save_light=0", "--dropout=0.1", "--keep=0"]
    train(data, tmp_path / "quiet", *extra, "--save_full=0")
    for name in ("True", "False"):
        train(data, tmp_path / name, *extra, "--save_full=2", f"--async_save={name}")
        run = tmp_path / name / "pretrain"
        (run / "result.json").unlink()
        for kind in ("full_00000008", "step_00000008", "full_00000006"):       # goes on after step 4
            os.rename(run / kind, run / f"old-{kind}")
        train(data, tmp_path / name, *extra, "--save_full=2", f"--async_save={name}")
        assert same(weights(tmp_path / name, 8), weights(tmp_path / "quiet", 8))
        learned = [[(r["step"], r["loss"], r["lr"]) for r in read_log(tmp_path / out / "pretrain")] for out in (name, "quiet")]
        assert learned[0] == learned[1]
        stops = [r["step"] for r in read_log(run) if r.get("save_seconds", 0) > 0]
        assert stops == [2, 4, 6, 8]                    # each step once, with its loss and what saving it took


def test_what_a_run_was_made_with_stands_in_its_folder_and_every_checkpoint(data, tmp_path):
    train(data, tmp_path / "out", "--max_steps=2", "--eval_every=1", "--save_full=1", "--save_light=1")
    run = tmp_path / "out" / "pretrain"
    config = configure(vars(script), [f"--data_dir={data}", f"--out_dir={tmp_path}", *SHAPE, "--max_steps=2", "--eval_every=1"])
    tokens = TokenData(data / "tokens", "train", byte_tokenizer().hash)
    assert (run / "config_hash.txt").read_text().splitlines() == [
        f"config {config.hash}", f"data {tokens.data_hash[:16]} {byte_tokenizer().hash[:16]}", f"commit {git_commit()}"]
    for name in ("step_00000001", "full_00000001", "step_00000002", "full_00000002"):
        assert (run / name / "config_hash.txt").read_text() == (run / "config_hash.txt").read_text()
        assert "config_hash.txt" in json.loads((run / name / "manifest.json").read_text())["files"] and not verify(run / name)
    state = json.loads((run / "full_00000001" / "state.json").read_text())
    assert (state["step"], state["tokens"], state["config_hash"], state["data_hash"], state["world"]) == (
        1, 256, config.hash, tokens.data_hash, 1)
    assert state["val_loss"] == read_log(run)[0]["val_loss"]


def test_the_first_step_from_a_light_checkpoint_is_that_of_a_fresh_optimizer(data, tmp_path):
    train(data, tmp_path / "first", "--max_steps=3")
    start = tmp_path / "first" / "pretrain" / "step_00000003"
    train(data, tmp_path / "second", "--max_steps=1", f"--init_from={start}")
    config = configure(vars(script), [f"--data_dir={data}", *SHAPE, "--max_steps=1"])
    model, tokenizer = hf.read_model(start)
    optimizer = adamw(model, config.learning_rate, config.weight_decay)
    tokens = TokenData(data / "tokens", "train", tokenizer.hash)
    numbers = step_blocks(0, 8, n_blocks(tokens.n_tokens, 32), config.seed)
    script.forward_backward(model, list(script.load(tokens, numbers, config, ALONE)), config, tokenizer, ALONE)
    clip(model.parameters(), config.grad_clip)
    set_lr(optimizer, lr_at(0, 1, config.learning_rate, warmup_length(1)))
    optimizer.step()
    assert all(state["step"] == 1 for state in optimizer.state.values())
    assert same(weights(tmp_path / "second", 1), {name: p.detach() for name, p in model.named_parameters()})


def test_a_full_checkpoint_from_outside_is_code_and_needs_trust(data, tmp_path):
    extra = ["--max_steps=6", "--save_full=3", "--keep=0"]
    train(data, tmp_path / "theirs", *extra)
    theirs = tmp_path / "theirs" / "pretrain" / "full_00000003"
    told = train(data, tmp_path / "mine", *extra, f"--init_from={theirs}", code=2)
    assert "full checkpoint" in told and "step_00000003" in told and "--resume_from" in told
    told = train(data, tmp_path / "mine", *extra, f"--resume_from={theirs}", code=2)
    assert f"{theirs} lies outside" in told and "--init_from" in told and "--trust_state=True" in told
    mine, linked = tmp_path / "mine" / "pretrain", tmp_path / "linked" / "pretrain"
    linked.mkdir(parents=True)
    (linked / "full_00000003").symlink_to(theirs)                               # inside by name only
    assert "lies outside" in train(data, tmp_path / "linked", *extra, code=2)
    said = train(data, tmp_path / "mine", *extra, f"--resume_from={theirs}", "--trust_state=True")
    assert f"continuing from {theirs}, after step 3" in said
    assert same(weights(tmp_path / "mine", 6), weights(tmp_path / "theirs", 6))
    assert [record["step"] for record in read_log(mine)] == [4, 5, 6]
    own = ["--resume_from=" + str(tmp_path / "theirs/pretrain/full_00000006"), "--trust_state=True"]
    assert "max_steps" in train(data, tmp_path / "late", *extra, *own, code=2)   # there would be nothing left to do
    wrong = {"none": "does not exist", "theirs": f"holds some: name one, {theirs.with_name('full_00000006')}",
             "theirs/pretrain/step_00000006": "is a light one, which has weights only: --init_from=",
             "theirs/pretrain/full_00000003/state": "is none"}
    for name, why in wrong.items():
        said = train(data, tmp_path / "typo", *extra, f"--resume_from={tmp_path / name}", code=2)
        assert f"resume_from takes a full checkpoint (a folder full_NNNNNNNN), and {tmp_path / name} {why}" in said
    assert not (tmp_path / "typo" / "pretrain" / "config.json").exists()        # the folder is not bound to what was refused
    with open(theirs / "state" / "__0_0.distcp", "r+b") as file:
        file.seek(1000), file.write(b"bit rot")
    said = train(data, tmp_path / "new", *extra, f"--resume_from={theirs}", "--trust_state=True", code=2)
    assert "other content than when it was written" in said


def test_what_another_run_has_left_in_the_folder_is_not_continued_from(data, tmp_path):
    """Its full checkpoint, put there by hand; and a folder whose config.json is lost, continued with other settings."""
    extra = ["--max_steps=6", "--save_full=3", "--keep=0"]
    train(data, tmp_path / "theirs", *extra, "--seed=7")
    foreign = tmp_path / "mine" / "pretrain" / "full_00000003"
    shutil.copytree(tmp_path / "theirs" / "pretrain" / "full_00000003", foreign)
    said = train(data, tmp_path / "mine", *extra, code=2)
    assert f"{foreign} was begun with seed = 7, now it is 1" in said
    shutil.rmtree(foreign)
    train(data, tmp_path / "mine", *extra)
    for name in ("result.json", "config.json"):
        (foreign.parent / name).unlink()
    said = train(data, tmp_path / "mine", *extra, "--learning_rate=1e-3", code=2)
    assert "learning_rate = 0.003, now it is 0.001" in said
    said = train(data, tmp_path / "mine", *extra)
    assert "config.json is missing; the full checkpoints say" in said and "continuing from" in said
    assert (foreign.parent / "config.json").exists() and (foreign.parent / "result.json").exists()
    start = tmp_path / "theirs" / "pretrain" / "step_00000006"
    train(data, tmp_path / "third", *extra, f"--init_from={start}")
    shutil.rmtree(start)
    shutil.copytree(foreign.parent / "step_00000006", start)
    assert f"model ({start}) of other content" in train(data, tmp_path / "third", *extra, f"--init_from={start}", code=2)
