"""Every fault as it comes: real signals and really damaged files, against two processes that save in the background."""
import contextlib
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

import faults
from engine import checkpoint, hf
from engine.files import read_json
from engine.manifest import abandon, folder_of, steps_of, verify
from engine.monitor import read_log
from engine.optim import adamw, lr_at
from faults import Launched, Run, damage, newest_full
from programs import TORCHRUN
from small import ALONE, ROOT, byte_tokenizer, small_llama
from test_train import same, train, weights

LAST = 24
SKIP = ["--on_spike=skip", "--spike_norm=0", "--spike_window=8"]
BACK = ["--on_spike=rollback", "--spike_window=8", "--rollback_window=4", "--save_full=2", "--save_light=4", "--keep=0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The 14th step (13 from 0) reads bad text, so the statistics decide something, in every run."""
    folder = tmp_path_factory.mktemp("data")
    faults.make_data(folder, bad_steps=[13])
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The run that nothing happens to."""
    out = tmp_path_factory.mktemp("whole") / "out"
    code, said = Run(data, out, *SKIP).wait()
    assert code == 0, said
    skipped = [record["step"] for record in read_log(out / "pretrain") if record.get("skipped")]
    assert skipped == [14] and "deviations above" in said
    return out


def same_end(out, whole):
    logs = [{record["step"]: record["loss"] for record in read_log(each / "pretrain")} for each in (out, whole)]
    return same(weights(out, LAST), weights(whole, LAST)) and logs[0] == logs[1]


def test_one_accident_after_the_other(data, whole, tmp_path):
    """kill -9 within a save, again with a flipped bit, SIGTERM to torchrun with a cut file, SIGUSR1 to one rank."""
    out, damaged = tmp_path / "out", None
    for kind in ("bit", "truncated"):
        run = Run(data, out, *SKIP)
        run.until_step(1)
        assert damaged is None or f"skipping a damaged checkpoint: {damaged}" in run.text()
        assert run.kill_in_save(faults.STAGES[:4] if kind == "bit" else faults.STAGES[1:]) in faults.STAGES
        if len(steps_of(out / "pretrain", "full")) > 1:
            damaged = newest_full(out)
            damage(damaged, kind)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        run = (Launched if number == signal.SIGTERM else Run)(data, out, *SKIP)
        run.until_step(1)
        assert number == signal.SIGUSR1 or damaged is None or f"skipping a damaged checkpoint: {damaged}" in run.text()
        os.kill(run.process.pid if number == signal.SIGTERM else run.pids[1], number)
        code, said = run.wait()
        assert code != 0 and "asked to leave: step" in said and "Traceback" not in said.split("asked to leave")[0], said
        assert f"step {steps_of(out / 'pretrain', 'full')[0]} is saved" in said and verify(newest_full(out)) == []
    code, said = Run(data, out, *SKIP).wait()
    assert code == 0 and same_end(out, whole), said
    assert not list((out / "pretrain").glob("*.tmp"))


def test_one_process_says_by_its_exit_status_that_it_can_go_on(data, tmp_path):
    """The second time it leaves shortly before the bad step, which only the norms before it show to be bad."""
    for number, steps in ((signal.SIGTERM, 2), (signal.SIGUSR1, 8)):
        run = Run(data, tmp_path / "out", *SKIP, processes=1)
        run.until_step(steps)
        run.send(number)
        code, said = run.wait()
        assert code == 75 and "the same command continues" in said, said
    train(data, tmp_path / "out", *faults.LARGE, *SKIP)
    assert [r["step"] for r in read_log(tmp_path / "out" / "pretrain") if r.get("skipped")] == [14]


def test_disk_full(data, whole, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(disk)]
    mounted = shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        if mounted:         # on a disk that is too small from the start the run does not begin, and then on one that gets full
            code, said = Run(data, disk / "out", *SKIP, processes=1).wait()
            assert code == 2 and "5 light checkpoint(s) of 6,966,272 and 4 full checkpoint(s) of 20,898,816" in said, said
            subprocess.run(["mount", "-o", "remount,size=300m", str(disk)], check=True)
        run = Run(data, disk / "out", *SKIP)
        assert run.until(lambda: steps_of(disk / "out" / "pretrain", "full"))
        first = newest_full(disk / "out")
        with contextlib.suppress(OSError):                  # the run may take the last of it first
            if mounted:
                (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - (5 << 20)))
        for pid in run.pids if not mounted else ():      # who may mount nothing: files have a largest size
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        code, said = run.wait()
        assert code != 0 and "same command again" in said, said
        assert "could not be written" in said or "cannot write" in said
        assert "No space left" in said or "File too large" in said, said
        assert verify(first) == []
        if mounted:
            (disk / "filler").unlink()
        code, said = Run(data, disk / "out", *SKIP).wait()
        assert code == 0 and same_end(disk / "out", whole), said
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_nan_on_one_rank(tmp_path):
    """A damaged weight that only one text touches, which only one of the ranks reads: the row of q in the embedding."""
    _, blocks = faults.make_data(tmp_path / "data", bad_steps=[5], bad=b"")
    model = small_llama(1, n_head=2, n_embd=256, n_inner=704, block_size=32, tie_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[byte_tokenizer().encode("q")[0]] = 3e38
    (tmp_path / "start").mkdir()
    hf.save_model(tmp_path / "start", model, byte_tokenizer())
    out = tmp_path / "out"
    code, said = Run(tmp_path / "data", out, "--max_steps=12", f"--init_from={tmp_path / 'start'}").wait()
    assert code == 0, said
    bad = [record for record in read_log(out / "pretrain") if record.get("skipped")]
    assert [record["step"] for record in bad] == [6] and blocks[0] in bad[0]["blocks"] and bad[0]["grad_norm"] is None
    state = read_json(newest_full(out) / "state.json")
    assert len(state["recent"]) == 11 and all(math.isfinite(norm) for norm in state["recent"])
    optimizer = adamw(model, 1e-3, 0.1)
    checkpoint.load_full(newest_full(out), {"model": model}, {"model": [optimizer]}, ALONE)
    for moments in optimizer.state.values():
        assert moments["step"] == 11 and all(torch.isfinite(value).all() for value in moments.values())


def test_a_rank_that_dies_is_named(data, tmp_path):
    run = Run(data, tmp_path / "out", *SKIP, "--max_steps=100000")
    run.until_step(3)
    dead = run.pids[1]
    os.kill(dead, signal.SIGKILL)
    began = time.time()
    code, said = run.wait(100)
    assert code != 0 and time.time() - began < 90
    assert f"[rank 0] rank 1 (process {dead} on {socket.gethostname()}) gives no sign of life" in said, said
    assert "the same command continues" in said


def test_a_killed_worker_is_started_again_and_the_end_is_the_same(data, whole, tmp_path):
    run = Launched(data, tmp_path / "out", *SKIP, "--timeout=5", launcher=[*TORCHRUN, "--max-restarts=1"])
    assert run.until(lambda: steps_of(tmp_path / "out" / "pretrain", "full") and len(run.pids) == 2), run.text()
    os.kill(run.pids[1], signal.SIGKILL)
    code, said = run.wait()
    assert code == 0 and "continuing from" in said and same_end(tmp_path / "out", whole), said


@pytest.mark.slow
@pytest.mark.parametrize("who", ["stopped rank", "torchrun"])
def test_a_rank_that_hangs_is_named_and_nobody_outlives_torchrun(data, tmp_path, who):
    run = Launched(data, tmp_path / "out", *SKIP, "--max_steps=100000", "--timeout=5")
    run.until_step(3)
    first, second = run.pids
    stopped = who == "stopped rank"
    os.kill(second if stopped else run.process.pid, signal.SIGSTOP if stopped else signal.SIGKILL)
    deadline = time.time() + 60
    alive = lambda pid: pid in faults.processes() and "defunct" not in faults.processes()[pid][1]
    while time.time() < deadline and (alive(first) or who == "torchrun" and alive(second)):
        time.sleep(0.5)
    said = run.text()
    try:
        assert time.time() < deadline, said
        assert (f"rank 1 (process {second} on" if stopped else "the store of the processes is gone") in said
    finally:
        run.kill()


def test_ranks_that_see_different_folders_are_refused_by_name(data, tmp_path):
    """A relative out_dir, and another current folder on each rank: as with a local disk on each machine."""
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
    file = tmp_path / "elsewhere.py"
    file.write_text(f"import os, runpy\nos.chdir('{tmp_path}/rank' + os.environ['RANK'])\n"
                    f"runpy.run_path('{ROOT}/train.py', run_name='__main__')")
    code, said = Run(data, tmp_path / "out", "--out_dir=here", words=[file]).wait()
    assert code != 0 and "rank 1 on" in said and "does not see" in said and "here/pretrain" in said, said
    assert not list(tmp_path.glob("rank*/here/pretrain/full_*"))


@pytest.fixture(scope="module")
def went_back(data, tmp_path_factory):
    """The run that goes back by itself, and is not disturbed in that."""
    out = tmp_path_factory.mktemp("back") / "out"
    code, said = Run(data, out, *BACK).wait()
    assert code == 0 and "roll-back 1 of 3" in said, said
    return out


def test_a_roll_back(data, went_back):
    run = went_back / "pretrain"
    (decision,) = read_json(run / "rollbacks.json")["rollbacks"]
    assert (decision["step"], decision["to"], decision["window"], decision["lr_factor"]) == (14, 10, [10, 14], 0.8)
    assert (run / "full_00000012.abandoned-1").is_dir() and (run / "step_00000012.abandoned-1").is_dir()
    log = read_log(run)
    assert [record["step"] for record in log] == list(range(1, LAST + 1))
    assert not any("skipped" in record for record in log)
    assert [record["attempt"] for record in log] == [1] * 10 + [2] * (LAST - 10)
    expected = [lr_at(step, LAST, 3e-3, 2) * (1 if step < 10 else 0.8) for step in range(LAST)]
    assert [record["lr"] for record in log] == expected
    state = read_json(newest_full(went_back) / "state.json")
    assert state["rollbacks"] == [decision] and len(state["recent"]) == 8
    begins, blocks = faults.make_data(went_back.parent / "again", bad_steps=[13])
    for culprit in decision["culprits"]:
        assert culprit["block"] in blocks and culprit["loss"] > 8
        first, after = begins[culprit["document"]], begins[culprit["document"] + 1]
        assert first < culprit["block"] * 32 + 32 and after > culprit["block"] * 32
    assert any("zzz" in culprit["begins"] for culprit in decision["culprits"])


def test_killed_in_a_roll_back_it_comes_to_the_same_end(data, went_back, tmp_path):
    """kill -9 once the decision is on the disk, wherever that strikes; and a middle state of the folder that it may
    leave: only one of the two checkpoints renamed."""
    out = tmp_path / "killed"
    run = Run(data, out, *BACK)
    assert run.until(lambda: (out / "pretrain" / "rollbacks.json").exists()), run.text()
    run.kill()
    assert len(read_log(out / "pretrain")) == 14
    other = tmp_path / "one renamed"
    shutil.copytree(out, other)
    for path in (other / "pretrain").glob("*.abandoned-1"):
        path.rename(path.with_suffix(""))
    abandon(other / "pretrain" / "full_00000012")
    for each in (out, other):
        code, said = Run(data, each, *BACK).wait()
        assert code == 0 and f"continuing from {each / 'pretrain' / 'full_00000010'}" in said, said
        assert same_end(each, went_back)
        assert len({(folder / "pretrain" / "rollbacks.json").read_bytes() for folder in (each, went_back)}) == 1


def test_a_run_whose_folder_is_moved_away_ends_and_makes_no_other(data, tmp_path):
    run = Run(data, tmp_path / "out", *SKIP, "--max_steps=100000")
    assert run.until(lambda: steps_of(tmp_path / "out" / "pretrain", "full")), run.text()
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    code, said = run.wait(100)
    assert code != 0 and ("pretrain is gone: " in said or "could not be written" in said), said
    assert not any(steps_of(tmp_path / "out" / "pretrain", kind) for kind in ("light", "full"))


@pytest.mark.slow
def test_every_stage_of_a_save(data, whole, tmp_path):
    """kill -9 at each stage of a full save: whatever was there before is there afterwards, and the end is the same."""
    out, wanted = tmp_path / "out", set(faults.STAGES)
    for _ in range(20):
        found = Run(data, out, *SKIP, "--max_steps=24").kill_in_save(wanted)
        if found is None:
            assert same_end(out, whole)
            shutil.rmtree(out)
            continue
        wanted.discard(found)
        run = out / "pretrain"
        assert all(verify(folder_of(run, "full", step)) == [] for step in steps_of(run, "full"))
        if not wanted:
            break
    assert not wanted
    code, said = Run(data, out, *SKIP).wait()
    assert code == 0 and same_end(out, whole), said


@pytest.mark.slow
def test_the_soak_runs():
    found = subprocess.run([sys.executable, str(ROOT / "bench/soak.py"), "--kills=2"], capture_output=True, text=True, timeout=580)
    assert found.returncode == 0 and "2 accidents" in found.stdout, found.stdout + found.stderr
