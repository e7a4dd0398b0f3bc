"""
A run that is killed again and again comes to the same weights as one that is left alone.

    python bench/soak.py                    50 accidents, a quarter of an hour or more
    python bench/soak.py --kills=10

Two processes on the CPU, full checkpoints every other step, bad data on the way that are skipped because of the
statistics of the gradient norms. An accident is, at a random moment: kill -9 of everything, of one rank or of torchrun,
or SIGTERM. Says of each what it was and where it struck, and of each run that came to its end whether its weights and
losses are those of the undisturbed one, bit for bit. Exit status 1 when they are not.
"""
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from configurator import configure
from engine.manifest import folder_of, steps_of, verify
from engine.monitor import records_of
from faults import Launched, make_data, processes, stage
from test_faults import SKIP, same_end

kills = 50                      # accidents
longest = 8.0                   # seconds from a run's first step to the accident, at most
seed = 0

FAULTS = {"kill -9 of all": 0.6, "kill -9 of a rank": 0.15, "kill -9 of torchrun": 0.1, "SIGTERM": 0.15}
KEYS = [*SKIP, "--save_full=2", "--save_light=6"]


def strike(run, fault, rng):
    """Does it and waits until nobody is left."""
    if fault == "kill -9 of all":
        return run.kill()
    pid = rng.choice(run.pids or [run.process.pid]) if fault == "kill -9 of a rank" else run.process.pid
    with contextlib.suppress(ProcessLookupError):       # it may just have come to its end
        os.kill(pid, signal.SIGTERM if fault == "SIGTERM" else signal.SIGKILL)
    run.process.wait(120)
    deadline = time.time() + 60         # the ranks outlive torchrun for as long as it takes them to notice
    while any(pid in processes() for pid in run.pids) and time.time() < deadline:
        time.sleep(0.2)
    run.kill()


def main(config):
    rng, folder = random.Random(config.seed), Path(tempfile.mkdtemp())
    make_data(folder / "data", bad_steps=[13])
    whole, done, finished, equal = folder / "whole", 0, 0, 0
    code, said = Launched(folder / "data", whole, *KEYS).wait()
    if code:
        raise SystemExit(said)
    while done < config.kills or finished == 0:
        out = folder / f"run{finished}"
        run = Launched(folder / "data", out, *KEYS)
        moment = rng.uniform(0, config.longest)
        log = out / "pretrain" / "log.jsonl"
        before = len(records_of(log))
        if done < config.kills and run.until(lambda: len(records_of(log)) > before and run.pids) and not run.until(
                lambda: False, moment) and run.poll() is None:
            fault = rng.choices(list(FAULTS), FAULTS.values())[0]
            at, known = records_of(log)[-1]["step"], set(steps_of(out / "pretrain", "full"))
            saving = stage(out, known)
            strike(run, fault, rng)
            done += 1
            folders = [folder_of(out / "pretrain", "full", step) for step in steps_of(out / "pretrain", "full")]
            sound = [int(folder.name[-8:]) for folder in folders if not verify(folder)]
            print(f"{done:3}  {fault:20} after step {at:2}" + (f", save at stage '{saving}'" if saving else "")
                  + f"; sound checkpoints {sound}", flush=True)
            continue
        code, said = run.wait(300)
        if code:
            raise SystemExit(f"a run that nobody disturbed ended with {code}\n{said}")
        finished, equal = finished + 1, equal + same_end(out, whole)
        print(f"     run {finished} has come to its end after {len({r['attempt'] for r in records_of(log)})} attempts: "
              + ("the same weights and losses" if same_end(out, whole) else f"OTHER WEIGHTS, see {out}"), flush=True)
    print(f"{done} accidents, {finished} runs finished, {equal} of them equal to the undisturbed one, bit for bit")
    raise SystemExit(finished != equal)


if __name__ == "__main__":
    main(configure(globals()))
