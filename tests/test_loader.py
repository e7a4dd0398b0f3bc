"""The plan of a run, mixtures, the reading ahead, and the proof of an order."""
import hashlib
import heapq
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from engine.files import open_to_append, write_json
from engine.loader import Mixture, in_thread, interleave, open_mixture, plan_step, read_ahead
from engine.manifest import publish
from engine.parallel import my_share
from engine.samples import log_sample, open_samples, order_problems, path_of, read_samples
from engine.shards import ShardWriter, TokenData, batch, step_blocks, write_index
from small import ALONE, ROOT

WORDS = SimpleNamespace(vocab_size=300, hash="a" * 64, bos_id=1, eos_id=2)


def shards(folder, n_tokens, first=3, tokenizer=WORDS):
    """One document of n_tokens ids, which count upwards, in token shards of its own; -> the folder."""
    entries = {}
    for split in ("train", "val"):
        writer = ShardWriter(folder / "tokens", split, tokenizer.vocab_size, 100)
        writer.add(first + np.arange(n_tokens) % 250)
        entries[split] = writer.close()
    write_index(folder / "tokens", tokenizer, entries)
    return folder

# --- the plan --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("skipped", [[], [(0, 3)], [(5, 8)], [(5, 8), (8, 9)], [(8, 9), (5, 8)], [(5, 8), (6, 10)],
                                     [(3, 9), (4, 5), (11, 12)], [(2, 2), (7, 7)], [[4, 6], [20, 21]]])
def test_the_plan_without_the_windows_skipped(skipped):
    left = [step for step in range(40) if not any(first <= step < end for first, end in skipped)]
    assert [plan_step(done, skipped) for done in range(20)] == left[:20]


def test_a_window_added_at_a_roll_back_leaves_what_was_done_as_it_was():
    windows = []
    for at, size in ((10, 3), (10, 2), (14, 1), (30, 5)):          # twice from the same step
        before = [plan_step(done, windows) for done in range(at)]
        first = plan_step(at, windows) + 1
        windows.append((first, first + size))
        assert [plan_step(done, windows) for done in range(at)] == before
        assert plan_step(at + 1, windows) == first + size or plan_step(at + 1, windows) > first


SHARES = [[1.0], [0.5, 0.5], [0.7, 0.3], [0.999, 0.001], [1 / 3, 1 / 3, 1 / 3], [0.6, 0.3, 0.1], [0.01, 0.29, 0.5, 0.2],
          [1 / 7] * 7, [0.9, *[0.1 / 9] * 9]]


@pytest.mark.parametrize("shares", SHARES)
def test_places_go_to_sources_by_what_is_due_first(shares):
    """Against a merge of the sources' due times that begins at the first place; any window alone."""
    due = lambda s: (((j + 0.5) / shares[s], s, j) for j in itertools.count())
    merged = list(itertools.islice(heapq.merge(*map(due, range(len(shares)))), 3000))
    source, number = interleave(0, 3000, shares)
    assert source.tolist() == [s for _, s, _ in merged] and number.tolist() == [j for _, _, j in merged]
    for first, count in ((1, 1), (17, 5), (1000, 64), (2990, 10)):
        alone = interleave(first, count, shares)
        assert np.array_equal(alone, (source[first:first + count], number[first:first + count]))


@pytest.mark.parametrize("shares", SHARES)
def test_counts_never_leave_the_shares_by_more_than_is_stated(shares):
    bound = [(1 + (len(shares) - 2) * share) / 2 for share in shares]
    for first in (0, 10 ** 6 + 7, 10 ** 12 + 39):
        source, number = interleave(first, 5000, shares)
        for s, share in enumerate(shares):
            had = number[source == s]
            assert np.array_equal(had, had[:1] + np.arange(len(had)) if len(had) else had)       # none left out
            places = first + np.flatnonzero(source == s)
            assert (np.abs(had - places * share) <= bound[s] + 1e-3).all()
            assert (np.abs(had + 1 - (places + 1) * share) <= bound[s] + 1e-3).all()


# --- mixtures --------------------------------------------------------------------------------------------------------

def test_the_order_of_one_folder_is_for_ever(tmp_path):
    """Frozen numbers: a run that was begun with an earlier version continues in its order."""
    stream = lambda *place: hashlib.sha256(step_blocks(*place).astype("<i8").tobytes()).hexdigest()[:16]
    assert step_blocks(0, 8, 50, 1).tolist() == [43, 14, 10, 47, 1, 24, 39, 38]
    assert stream(7, 12, 50, 3) == "3da1ad969bcfb416" and stream(10 ** 6, 64, 12345, 2 ** 40) == "a4c65ad74820351b"
    folder = str(shards(tmp_path / "a", 401))                  # 50 blocks of 8
    for mix in (None, {folder: 3}):
        data = open_mixture(folder, mix, "train", 8)
        for step in (0, 7, 100_003):
            assert np.array_equal(data.step_blocks(step, 12, 3), step_blocks(step, 12, 50, 3))


def test_a_mixture_keeps_shares_epochs_and_texts(tmp_path):
    """Two folders, the smaller with the larger share; by hand: counts, whole epochs, what is read, no common order."""
    small, large = str(shards(tmp_path / "b_small", 41)), str(shards(tmp_path / "a_large", 801, first=10))
    data = open_mixture("nowhere", {small: 7, large: 3}, "train", 8, WORDS.hash)
    assert data.names == ["a_large", "b_small"] and data.sizes == [100, 5] and data.shares.tolist() == [0.3, 0.7]
    stream = np.concatenate([data.step_blocks(step, 12, seed=1) for step in range(60)])
    source = data.source_of(stream)
    for s, share in enumerate(data.shares):
        assert (np.abs(np.cumsum(source == s) - np.arange(1, 721) * share) <= 0.5 + 1e-9).all()
        own = stream[source == s] - data.firsts[s]
        for epoch in range(len(own) // data.sizes[s]):
            assert sorted(own[epoch * data.sizes[s]:][:data.sizes[s]]) == list(range(data.sizes[s]))
    reordered = open_mixture("nowhere", {large: 0.3, small: 0.7}, "train", 8, WORDS.hash)
    assert np.array_equal(reordered.step_blocks(5, 12, 1), data.step_blocks(5, 12, 1))
    assert not np.array_equal(data.step_blocks(5, 12, 2), data.step_blocks(5, 12, 1))
    x, y, w = batch(data, np.array([0, 99, 100, 104]), 8)      # first and last of each
    for row, (folder, block) in enumerate(((large, 0), (large, 99), (small, 0), (small, 4))):
        ids = TokenData(f"{folder}/tokens", "train").read(block * 8, 9)
        assert x[row].tolist() == ids[:8].tolist() and y[row].tolist() == ids[1:].tolist()
    twins = Mixture([data.sources[0]] * 2, ["one", "other"], [1, 1], 8)
    one, other = (twins.step_blocks(0, 200, 1)[s::2] - twins.firsts[s] for s in (0, 1))
    assert sorted(one) == sorted(other) and (one == other).mean() < 0.1
    hashes = {open_mixture("nowhere", mix, "train", 8).data_hash for mix in ({small: 1}, {large: 1}, {small: 1, large: 1})}
    assert len(hashes) == 3


def test_all_that_is_wrong_with_a_mixture_is_said_at_once(tmp_path, capsys):
    good = str(shards(tmp_path / "good", 41))
    other = str(shards(tmp_path / "other", 41, tokenizer=SimpleNamespace(**{**vars(WORDS), "hash": "b" * 64})))
    def said(mix):
        with pytest.raises(SystemExit) as stop:
            open_mixture(good, mix, "train", 8, WORDS.hash, "python prepare_data.py")
        assert stop.value.code == 2
        return capsys.readouterr().err
    assert "data_mix is empty" in said({})
    message = said({good: 0, other: "half", 7: 1.0, "x": float("nan"), "y": True})
    assert message.count("must be a number above 0") == 4 and "folders are texts, found 7" in message
    message = said({good: 1e308, other: float("inf"), "x": -1, "y": 10 ** 400, "z": 1})
    assert message.count("must be a number above 0, at most 1e300") == 4
    (tmp_path / "link").symlink_to(good)
    message = said({good: 1, f"{good}/": 1, str(tmp_path / "link"): 1})
    assert message.count("are one folder") == 2 and f"{good + '/'!r}" in message
    data = open_mixture(good, {good: 1e300, str(shards(tmp_path / "more", 41)): 1e-300}, "train", 8, WORDS.hash)
    assert set(data.source_of(data.step_blocks(10 ** 9, 100, 1))) == {0}
    message = said({good: 1, other: 1, str(tmp_path / "none"): 1})
    assert "b" * 64 in message and "no index.json" in message
    assert f"python prepare_data.py --data_dir={other}" in message and f"--data_dir={tmp_path}/none" in message


# --- reading ahead ---------------------------------------------------------------------------------------------------

def loaders():
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_steps_come_in_order_and_a_few_ahead():
    made = []
    steps = in_thread(lambda step: made.append(step) or step * step, range(3, 40), ahead=2)
    assert not loaders() and next(steps) == 9 and len(loaders()) == 1
    deadline = time.time() + 10
    while len(made) < 4 and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert made == [3, 4, 5, 6]            # one taken, two waiting, one in hand
    assert list(steps) == [step * step for step in range(4, 40)] and not loaders()


@pytest.mark.parametrize("error", [ValueError("no such block"), SystemExit(2), MemoryError(), KeyboardInterrupt()])
def test_what_goes_wrong_in_the_thread_is_raised_in_its_turn(error):
    def prepare(step):
        if step == 5:
            raise error
        return step
    steps = in_thread(prepare, range(9))
    assert [next(steps) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(type(error)) as raised:
        next(steps)
    assert raised.value is error and not loaders()


def test_closed_or_forgotten_it_leaves_no_thread():
    for end in ("close", "forget"):
        steps = in_thread(lambda step: step, range(10 ** 6))
        next(steps)
        assert len(loaders()) == 1
        if end == "close":
            steps.close()
        del steps
        assert not loaders(), end


ENDS = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from engine.loader import in_thread
for how in {ends!r}:
    reader, writer = os.pipe()
    if child := os.fork():
        os.read(reader, 1)
        if "sleep" in how:
            time.sleep(0.2)
            os.kill(child, signal.SIGINT)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        steps = in_thread(lambda step: step, range(10 ** 9))
        next(steps)
        os.write(writer, b".")
        exec(how)
        break
"""


def test_no_end_of_the_main_thread_hangs():
    """Each in a child, since these are ends of processes; the children are forked, since importing takes longer."""
    ends = {"time.sleep(60)": -signal.SIGINT, "1 / 0": 1, "sys.exit(2)": 2, "pass": 0}
    done = subprocess.run([sys.executable, "-c", ENDS.format(root=str(ROOT), ends=list(ends))], capture_output=True, text=True,
                          timeout=60)
    assert done.stdout.split() == [str(code) for code in ends.values()], done.stdout + done.stderr


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_read_ahead_is_what_is_read_at_once(tmp_path, world):
    data = open_mixture(str(shards(tmp_path / "a", 401)), None, "train", 8)
    config, skipped = SimpleNamespace(seed=1, block_size=8, micro_batch_size=3), [(4, 6)]
    for rank in range(world):
        setup = replace(ALONE, rank=rank, world=world)
        steps = list(read_ahead(data, 2, 9, skipped, 12, config, setup))
        assert len(steps) == 7
        for step, (blocks, micro_batches) in zip(range(2, 9), steps):
            expected = step_blocks(plan_step(step, skipped), 12, 50, 1)
            assert np.array_equal(blocks, expected)
            shares = my_share(expected, 3, setup)
            assert len(micro_batches) == len(shares)
            for share, found in zip(shares, micro_batches):
                assert all(np.array_equal(a, b) for a, b in zip(found, batch(data, share, 8)))


def test_a_damaged_shard_is_refused_where_the_reading_comes_to_it(tmp_path, capsys):
    folder = shards(tmp_path / "a", 401)
    data = open_mixture(str(folder), None, "train", 8)
    config = SimpleNamespace(seed=1, block_size=8, micro_batch_size=3)
    last = folder / "tokens" / "train_00004.bin"
    os.truncate(last, 0)                                        # behind the back of a run that has it open
    with pytest.raises(SystemExit) as stop:
        list(read_ahead(data, 0, 50, (), 12, config, ALONE))
    assert stop.value.code == 2 and not loaders()
    assert "train_00004.bin has become shorter" in capsys.readouterr().err


RESIDENT = """
import sys
sys.path.insert(0, {root!r})
import numpy as np
from engine.loader import open_mixture
from engine.shards import batch, step_blocks
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
data = open_mixture({folder!r}, None, "train", 4096)
size = data.sizes[0]
before, read, most = resident(), 0, 0
for step in range(size // 8 // 8):                             # every eighth block: one in each 64 kB
    blocks = step_blocks(step, 8, size, 1) // 8 * 8
    batch(data, blocks, 4096)
    most = max(most, resident())
print(before, most)
"""


def test_reading_a_large_shard_takes_no_memory(tmp_path):
    """600 MB (a file of holes), read all over: the resident memory stays flat."""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc to see the memory")
    folder, n_tokens = shards(tmp_path / "a", 401), 300_000_001
    index = json.loads((folder / "tokens" / "index.json").read_text())
    entry = index["splits"]["train"]
    entry.update(n_tokens=n_tokens, files=[{**entry["files"][0], "tokens": n_tokens}])
    write_json(folder / "tokens" / "index.json", index)
    os.truncate(folder / "tokens" / "train_00000.bin", 2 * n_tokens)
    np.memmap(folder / "tokens" / entry["offsets"]["name"], "<u8", "r+")[-1] = n_tokens
    told = subprocess.run([sys.executable, "-c", RESIDENT.format(root=str(ROOT), folder=str(folder))], capture_output=True,
                          text=True, check=True).stdout
    before, most = map(float, told.splitlines()[-1].split())
    print(f"{before:.0f} MB before, {most:.0f} MB at most")
    assert most - before < 30


# --- the sample log and its proof ------------------------------------------------------------------------------------

@pytest.mark.parametrize("cut", [0, 1, 40, 70_000])
def test_half_a_line_is_cut_off_before_the_next(tmp_path, cut):
    path, line = tmp_path / "log", b'{"a": "' + b"x" * 100_000 + b'"}\n'
    path.write_bytes(line + line[:cut])
    for _ in range(2):
        with open_to_append(path) as file:
            file.write(b'{"b": 1}\n')
    assert path.read_bytes() == line + b'{"b": 1}\n' * 2
    (tmp_path / "other").write_bytes(line[:cut])               # no line at all
    with open_to_append(tmp_path / "other") as file:
        file.write(b"{}\n")
    assert (tmp_path / "other").read_bytes() == b"{}\n"


def run_folder(tmp_path, saved, rollbacks=()):
    """What train.py leaves behind, without the training; -> (folder, the Mixture)."""
    folder, run = shards(tmp_path / "data", 401), tmp_path / "run"
    data = open_mixture(str(folder), None, "train", 8)
    write_json(run / "config.json", {"script": "train", "versions": {}, "environment": {}, "config": {
        "data_dir": str(folder), "data_mix": None, "block_size": 8, "seed": 1, "batch_tokens": 96}})
    write_json(run / "inputs.json", {"data": f"{data.data_hash[:16]} {WORDS.hash[:16]}"})
    full = run / f"full_{saved:08d}"
    write_json(full.with_suffix(".tmp") / "state.json", {"step": saved, "rollbacks": list(rollbacks)})
    write_json(full.with_suffix(".tmp") / "state" / ".metadata", {})
    publish(full.with_suffix(".tmp"), full)
    return run, data


def attempt(run, data, number, world, first, last, skipped=(), torn=0):
    """The lines of an attempt that did the steps first to last; its last rank was killed `torn` lines before."""
    for rank in range(world):
        setup = replace(ALONE, rank=rank, world=world)
        with open_samples(run, setup) as file:
            for done in range(first, last + 1 - (torn if rank == world - 1 else 0)):
                plan = plan_step(done - 1, skipped)
                log_sample(file, number, done, plan, data.step_blocks(plan, 12, 1), setup)
    if torn:
        with open(path_of(run, world - 1), "ab") as file:
            file.write(b'{"format_version": 1, "attempt": 1, "st')


def test_an_order_is_proven_over_kills_other_numbers_of_processes_and_roll_backs(tmp_path):
    windows = [{"window": [11, 13]}, {"window": [16, 17]}]
    run, data = run_folder(tmp_path, 20, windows)
    attempt(run, data, 1, 4, 1, 9, torn=2)
    attempt(run, data, 2, 2, 6, 14)                            # from the checkpoint of step 5
    attempt(run, data, 3, 2, 11, 16, [(11, 13)])               # back to step 10
    attempt(run, data, 4, 3, 11, 12, [(11, 13)], torn=1)       # killed at once
    attempt(run, data, 5, 3, 11, 15, [(11, 13)])
    attempt(run, data, 6, 1, 15, 23, [(11, 13), (16, 17)])     # back to step 14; killed after step 23, saved at 20
    assert order_problems(run) == []
    taken = [plan for step in range(1, 21) for plan in [read_samples(path_of(run, 0))[step]["plan"]]]
    assert taken == [plan for plan in range(23) if plan not in (11, 12, 16)]


def test_what_an_earlier_attempt_wrote_of_a_step_is_no_proof_of_it(tmp_path):
    """The lines of step 8 are lost, as where a machine loses power; those of the attempt before are still there."""
    run, data = run_folder(tmp_path, 12)
    attempt(run, data, 1, 2, 1, 9)
    attempt(run, data, 2, 2, 6, 7)
    attempt(run, data, 2, 2, 9, 12)
    assert "number 8 is the first wrong one: rank 0 of 1 has no line" in order_problems(run)[0]


def test_the_first_wrong_step_is_named(tmp_path):
    run, data = run_folder(tmp_path, 12)
    attempt(run, data, 1, 4, 1, 9)
    attempt(run, data, 2, 3, 8, 12)
    assert order_problems(run) == []
    def after(rank, step, change):
        """What is said when one line of one rank is another."""
        path = path_of(run, rank)
        whole = path.read_bytes()
        lines = [json.loads(line) for line in whole.splitlines()]
        last = max(i for i, line in enumerate(lines) if line["step"] == step)
        changed = change(lines[last])
        path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:last], *changed, *lines[last + 1:]]))
        told = order_problems(run)
        path.write_bytes(whole)
        return told[0] if told else ""
    swap = lambda line: [{**line, "blocks": [line["blocks"][1], line["blocks"][0], *line["blocks"][2:]]}]
    assert "of 12 steps, number 10 is the first wrong one: rank 2 took block" in after(2, 10, swap)
    assert "number 7 is the first wrong one: rank 3 has" not in after(3, 7, lambda line: [line])
    assert "number 7 is the first wrong one: rank 3 of 4 has no line" in after(3, 7, lambda line: [])
    assert "number 5 is the first wrong one: rank 1 took 2 blocks, planned are 3" in after(
        1, 5, lambda line: [{**line, "blocks": line["blocks"][:2]}])
    assert "rank 0 was in step 3 of the plan, it should have been 2" in after(0, 3, lambda line: [{**line, "plan": 3}])
    assert "number 9 is the first wrong one: rank 1 did it in attempt 1 as one of 4, rank 0 in attempt 2 as one of 3" in after(
        1, 9, lambda line: [{**line, "attempt": 1, "world": 4}])
    assert after(3, 9, swap) == "", "rank 3's step 9 was done again without it"
    shards(tmp_path / "data", 402)
    assert "token shards" in order_problems(run)[0]


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        order_problems(*arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_nothing_to_prove_is_said(tmp_path, capsys):
    said = refused(capsys, tmp_path / "none")
    assert f"--order={tmp_path}/none: no run there" in said and "log_samples" not in said
    run, _ = run_folder(tmp_path, 4)
    shutil.rmtree(run / "full_00000004")
    said = refused(capsys, run)
    assert "no full checkpoint yet" in said and "--log_samples=True" in said
    saved = json.loads((run / "config.json").read_text())
    write_json(run / "config.json", {**saved, "script": "sft"})
    assert "is a run of sft.py" in refused(capsys, run)


@pytest.mark.parametrize("form", [b"\xff\xfe", b"[]", b"{", b"5", b"{}", b'{"config": 5}'])
def test_a_config_of_another_form_is_a_sentence(tmp_path, capsys, form):
    run, _ = run_folder(tmp_path, 4)
    (run / "samples").mkdir()
    (run / "config.json").write_bytes(form)
    assert str(run / "config.json") in refused(capsys, run)


@pytest.mark.parametrize("changed", [dict(block_size=0), dict(block_size="8"), dict(batch_tokens=None), dict(seed=[1]),
                                     dict(data_dir=5), dict(data_mix=[1]), dict(batch_tokens=7)])
def test_values_of_another_form_are_a_sentence(tmp_path, capsys, changed):
    run, _ = run_folder(tmp_path, 4)
    (run / "samples").mkdir()
    saved = json.loads((run / "config.json").read_text())
    write_json(run / "config.json", {**saved, "config": {**saved["config"], **changed}})
    assert "config.json is damaged: block_size" in refused(capsys, run)


BAD_LINES = [b"5", b"[1]", b"\xff\xfe", b'{"step": 3}', b"[" * 100_000, *(
    json.dumps({**dict(attempt=1, step=3, plan=2, rank=0, world=1, share=[0, 1], blocks=[1]), **changed}).encode()
    for changed in (dict(step="3"), dict(blocks=[[1], 2]), dict(blocks=None), dict(blocks=["1"]), dict(blocks=[10 ** 30]),
                    dict(share=[0, 0]), dict(share=5), dict(share=[0]), dict(world=0), dict(world="1"), dict(plan=None)))]


@pytest.mark.parametrize("line", BAD_LINES, ids=[line[:60].decode("latin-1") for line in BAD_LINES])
def test_a_line_of_another_form_is_no_proof_and_no_error(tmp_path, line):
    run, data = run_folder(tmp_path, 4)
    attempt(run, data, 1, 1, 1, 4)
    lines = path_of(run, 0).read_bytes().splitlines()
    path_of(run, 0).write_bytes(b"\n".join([*lines[:2], line, *lines[3:]]) + b"\n")
    [said] = order_problems(run)
    assert "of 4 steps, number 3 is the first wrong one: rank 0 " in said
