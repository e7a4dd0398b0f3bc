"""Real runs of train.py, killed with kill -9 and continued by other numbers of processes: the data's order stays whole."""
import json
import os
import random
import signal
import time

import numpy as np

from engine.loader import open_mixture
from engine.manifest import steps_of
from engine.monitor import read_log
from engine.samples import order_problems, path_of, read_samples
from programs import Program
from test_train import SHAPE, make_data, train

STEPS, PER_STEP = 40, 12


def last_step(path):
    lines = path.read_bytes().splitlines(True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines[-1:] if line.endswith(b"\n")), default=0)


def killed(out, settings, world, target, rng):
    """Runs until rank 0 has logged step `target`, then kill -9 to all, one after the other; -> the step it had come to."""
    path = path_of(out / "pretrain", 0)
    size = path.stat().st_size if path.exists() else 0
    program = Program("train.py", f"--out_dir={out}", *SHAPE, *settings, processes=world)
    assert program.until(lambda: path.exists() and path.stat().st_size > size and last_step(path) >= target), program.text()
    for pid in rng.sample(program.pids, world):
        os.kill(pid, signal.SIGKILL)
    program.kill()
    assert all(rank.exitcode == -signal.SIGKILL for rank in program.ranks), "it had ended before it was killed"
    return last_step(path)


def test_kills_and_other_numbers_of_processes_leave_the_stream_whole(tmp_path):
    """kill -9 at the edge of an epoch, again before anything new was saved, and at a random step; 4, 2, 3 and 1 processes."""
    folders = [make_data(tmp_path / name, docs, seed) for name, docs, seed in (("large", 25, 1), ("small", 4, 2))]
    settings = [f"--data_dir={folders[0]}", f"--data_mix={ {str(folders[0]): 0.7, str(folders[1]): 0.3} }", "--log_samples=True",
                f"--batch_tokens={32 * PER_STEP}", f"--max_steps={STEPS}", "--save_full=3", "--save_light=0", "--micro_batch_size=1"]
    data = open_mixture(None, {str(folders[0]): 0.7, str(folders[1]): 0.3}, "train", 32)
    train(folders[0], tmp_path / "whole", *settings)
    stream = np.array([line["blocks"] for line in read_samples(path_of(tmp_path / "whole" / "pretrain", 0)).values()])
    assert stream.shape == (STEPS, PER_STEP)
    source = data.source_of(stream.ravel())
    own = [stream.ravel()[source == s] - data.firsts[s] for s in (0, 1)]
    for blocks, size in zip(own, data.sizes):                                   # X6: each epoch has each block once
        assert len(blocks) > 2 * size, "too few epochs to test anything"
        assert all(sorted(blocks[i:i + size]) == list(range(size)) for i in range(0, len(blocks) - size + 1, size))

    rng, out, run = random.Random(time.time()), tmp_path / "torn", tmp_path / "torn" / "pretrain"
    places = np.flatnonzero(source == 0)                                        # where in the stream the large one's blocks are
    edge = int(places[data.sizes[0] - 1]) // PER_STEP + 1                        # its first epoch ends within this step
    came = [killed(out, settings, 4, edge, rng)]
    came.append(killed(out, settings, 2, max(steps_of(run, "full")) + 1, rng))  # X8: twice in a row
    came.append(killed(out, settings, 3, max(steps_of(run, "full")) + rng.randint(7, 11), rng))     # two saves further
    assert came[2] < STEPS - 3 and order_problems(run) == [], came
    train(folders[0], out, *settings)

    lines = [read_samples(path_of(run, rank)) for rank in range(4)]
    worlds = [lines[0][step]["world"] for step in range(1, STEPS + 1)]
    for step, world in enumerate(worlds, start=1):
        together = np.empty(PER_STEP, dtype=np.int64)
        for rank in range(world):
            together[rank::world] = lines[rank][step]["blocks"]
        assert np.array_equal(together, stream[step - 1]), (step, came)
    assert set(worlds) >= {4, 3, 1}, (worlds, came)                              # of 2 processes nothing may have been saved
    assert order_problems(run) == [], came
    losses = [[record["loss"] for record in read_log(folder / "pretrain")] for folder in (out, tmp_path / "whole")]
    assert len(losses[0]) == STEPS and np.abs(np.subtract(*losses)).max() < 1e-4, came

    path = path_of(run, 0)                                                       # and the proof would have seen it
    text = path.read_text().splitlines(True)
    line = json.loads(text[-3])
    path.write_text("".join([*text[:-3], json.dumps({**line, "blocks": line["blocks"][::-1]}) + "\n", *text[-2:]]))
    assert f"number {line['step']} is the first wrong one" in order_problems(run)[0]
    code, said = Program("doctor.py", f"--order={run}").wait()
    assert code == 1 and f"number {line['step']} is the first wrong one" in said
