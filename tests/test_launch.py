"""How runs are launched: two torchruns as two nodes, Slurm's script with real signals; and who is waited for."""
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time

import pytest

from engine.manifest import folder_of, steps_of, verify
from engine.monitor import read_log
from faults import LARGE, Launched, Run
from small import ROOT
from test_faults import SKIP, data             # noqa: F401
from test_train import SHAPE, losses, train


def torchrun(*words, processes=2):
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", *words]


def free_port():
    """In the range that runs/slurm.sh takes a job's port from."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", random.randrange(20000, 30000)))
            return probe.getsockname()[1]


# --- A rank that is slow, or does not come ---------------------------------------------------------------------------

PATCHED = """
import os, sys, time
sys.path.insert(0, {root!r})
import train as script
from configurator import configure
from engine import loader
from model import Trunk
rank, batches, passes, real_batch, real_forward = int(os.environ["RANK"]), 0, 0, loader.batch, Trunk.forward
def batch(*words):                      # two for each step and rank
    global batches
    batches += 1
    {batch}
    return real_batch(*words)
def forward(self, *words, **more):
    global passes
    passes += self.training
    {forward}
    return real_forward(self, *words, **more)
loader.batch, Trunk.forward = batch, forward
script.main(configure(vars(script)))
"""


def patched(tmp_path, batch="pass", forward="pass"):
    file = tmp_path / "patched_train.py"
    file.write_text(PATCHED.format(root=str(ROOT), batch=batch, forward=forward))
    return [str(file)]


def test_a_straggler_is_named(data, tmp_path):      # noqa: F811
    """Rank 1 really sleeps while it reads the data of its first 10 steps, rank 0 while it computes those from 14 on."""
    words = patched(tmp_path, "if rank == 1 and batches <= 20: time.sleep(0.3)", "if rank == 0 and passes > 26: time.sleep(0.3)")
    code, said = Run(data, tmp_path / "out", "--save_full=0", "--save_light=0", words=words).wait()
    assert code == 0, said
    log = read_log(tmp_path / "out" / "pretrain")
    host = socket.gethostname()
    # Mostly: a machine with other work to do may hold up the other one for as long.
    assert statistics.mode(record["slowest"] for record in log[2:8]) == f"rank 1 on {host}"
    assert statistics.mode(record["slowest"] for record in log[14:]) == f"rank 0 on {host}"
    assert all(record["slowest_seconds"] > 0.6 for record in log[14:])                                  # it sleeps twice
    (alarm,) = [alarm for record in log for alarm in record.get("alarms", ()) if alarm.startswith("straggler")]
    assert alarm.startswith(f"straggler: rank 1 on {host} takes ") and f": {alarm}" in said


STUCK = "while rank == 1 and batches == 11: time.sleep(0.1)"        # for its 6th step, and its process lives


def test_a_rank_that_lives_and_does_not_come_is_named(data, tmp_path):      # noqa: F811
    run = Run(data, tmp_path / "out", "--hang_timeout=4", words=patched(tmp_path, STUCK))
    run.until_step(4)
    second = run.pids[1]
    code, said = run.wait(100)
    assert code != 0 and (f"rank 1 (process {second} on {socket.gethostname()}) lives and does not come: it is in step 6, data; "
                          "the others have waited in step 6, forward and backward for 4 seconds") in said, said


def test_asked_to_leave_while_a_rank_does_not_come_nothing_is_published(data, tmp_path):      # noqa: F811
    out = tmp_path / "out"
    run = Run(data, out, "--leave_within=4", "--save_full=2", words=patched(tmp_path, STUCK))
    run.until_step(7)           # lines: one for each of five steps, and of two saves
    os.kill(run.pids[0], signal.SIGUSR1)
    code, said = run.wait(100)
    assert code != 0 and "the ranks did not come to the end of a step together: nothing is saved" in said, said
    assert "within 4 seconds" in said and run.ranks[0].exitcode == 1 and run.ranks[1].exitcode != 75
    assert steps_of(out / "pretrain", "full") == [4, 2] and not (out / "pretrain/requeue").exists()
    assert all(verify(folder_of(out / "pretrain", "full", step)) == [] for step in (2, 4))


# --- Several machines ------------------------------------------------------------------------------------------------

def agents(data, out, *extra, ports, conf=("", "")):      # noqa: F811
    """Two torchruns as two nodes of one process each."""
    return [Launched(data, out, *extra, said=out.with_name(f"node{node}.txt"), launcher=torchrun(
        "--nnodes=2", f"--node_rank={node}", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=7",
        "--max-restarts=1", f"--rdzv_conf=join_timeout=40{more}", processes=1))
        for node, (port, more) in enumerate(zip(ports, conf))]


@pytest.mark.slow
def test_two_nodes_train_as_one_process_and_start_again_together(data, tmp_path):      # noqa: F811
    """The worker of one node is killed: that node counts one restart and the other none. The addresses of the first time
    are of no use then."""
    port, extra = free_port(), [*SKIP, "--save_full=2"]
    runs = agents(data, tmp_path / "two", *extra, "--timeout=5", ports=[port, port])
    assert runs[1].until(lambda: steps_of(tmp_path / "two/pretrain", "full") and runs[1].pids), runs[1].text()
    os.kill(runs[1].pids[0], signal.SIGKILL)
    told = ""
    for run in runs:
        code, said = run.wait(150)
        told += said
        assert code == 0, said
    assert told.count("topology ") == told.count("2 processes x 2 micro-batches") == 2 and told.count("continuing from") == 1, told
    train(data, tmp_path / "one", *LARGE, *extra)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)


@pytest.mark.slow
def test_what_a_wrong_port_says(data, tmp_path):      # noqa: F811
    """is_host=0: as on a machine that the address is not of. What it says is torchrun's; README.md says what it means."""
    runs = agents(data, tmp_path / "out", ports=[free_port(), 9], conf=("", ",is_host=0,read_timeout=5"))
    (second, said), (first, waited) = runs[1].wait(100), runs[0].wait(100)
    assert second != 0 and "RendezvousConnectionError: The connection to the C10d store has failed" in said
    assert first != 0 and "RendezvousTimeoutError" in waited
    readme = (ROOT / "README.md").read_text()
    assert "RendezvousConnectionError" in readme and "RendezvousTimeoutError" in readme


# --- Slurm -----------------------------------------------------------------------------------------------------------

FAKES = {
    "bin/srun": """#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift; done              # its own options
for node in 0 1; do SLURM_NODEID=$node "$@" & echo $! >> $FAKE/tasks; done
code=0
wait -n || code=$?
[ $code = 0 ] || { sleep 5; kill -9 $(jobs -p) 2>/dev/null; }           # --kill-on-bad-exit
wait || true
exit $code
""",
    "bin/scontrol": """#!/bin/bash
echo "$@" >> $FAKE/scontrol
[ "$1" != show ] || echo localhost
""",
    ".venv/bin/python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
    ".venv/bin/torchrun": f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n',
}
NO_TORCHRUN = f'''#!/bin/bash
while [ "${{1#-}}" != "$1" ]; do shift; done
exec {sys.executable} "$@"
'''


class Job:
    """runs/slurm.sh as sbatch would start it, in a folder of its own with links to everything."""

    def __init__(self, folder, data, *extra, restarts="3", torchrun=FAKES[".venv/bin/torchrun"]):      # noqa: F811
        self.folder, self.out = folder, folder / "out"
        if not folder.exists():
            folder.mkdir()
            for path in ROOT.iterdir():
                if not path.name.startswith((".", "out")):
                    (folder / path.name).symlink_to(path)
            for name, text in {**FAKES, ".venv/bin/torchrun": torchrun}.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
                (folder / name).chmod(0o755)
        (folder / "tasks").write_text("")
        environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "FAKE": str(folder), "OMP_NUM_THREADS": "1",
                       "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": str(free_port() - 20000), "SLURM_NNODES": "2",
                       "RESTARTS": restarts, "SLURM_JOB_NODELIST": "nodes[1-2]", "SLURM_GPUS_ON_NODE": "1"}
        self.number = environment["SLURM_JOB_ID"]
        with open(folder / "said.txt", "w") as file:
            self.process = subprocess.Popen(
                ["bash", str(ROOT / "runs/slurm.sh"), f"--data_dir={data}", f"--out_dir={self.out}", *SHAPE, *LARGE, *extra],
                stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)

    def until_step(self, count, seconds=150):
        log, deadline = self.out / "pretrain/log.jsonl", time.time() + seconds
        before = log.read_bytes().count(b"\n") if log.exists() else 0
        while not log.exists() or log.read_bytes().count(b"\n") < before + count:
            assert self.process.poll() is None and time.time() < deadline, self.text()
            time.sleep(0.05)

    def signal(self, number):
        for pid in (self.folder / "tasks").read_text().split():
            os.kill(int(pid), number)

    def wait(self):
        try:
            return self.process.wait(150), self.text()
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def text(self):
        return (self.folder / "said.txt").read_text()

    def requeued(self):
        return (self.folder / "scontrol").read_text().count(f"requeue {self.number}\n")


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_slurms_signal_saves_and_puts_the_job_into_the_queue_again(data, tmp_path, jobs):      # noqa: F811
    job = Job(tmp_path / "job", data, *SKIP, "--max_steps=400")
    job.until_step(3)
    job.signal(signal.SIGUSR1)                      # as --signal=USR1@600 does, to the tasks
    code, said = job.wait()
    (newest, *_) = steps_of(job.out / "pretrain", "full")
    assert code != 0 and f"asked to leave: step {newest} is saved" in said and job.requeued() == 1, said
    assert verify(folder_of(job.out / "pretrain", "full", newest)) == [] and "User defined signal" not in said
    assert said.count("not started again") >= 1 and "continuing from" not in said, said      # --max-restarts
    if jobs == 1:
        return
    job = Job(tmp_path / "job", data, *SKIP, "--max_steps=400")         # from the queue
    job.until_step(2)
    job.signal(signal.SIGTERM)
    code, said = job.wait()
    assert code != 0 and f"continuing from {job.out}/pretrain/full_{newest:08d}" in said and job.requeued() == 1, said
    assert steps_of(job.out / "pretrain", "full")[0] > newest


def test_a_job_that_fails_is_not_put_into_the_queue_again(data, tmp_path):      # noqa: F811
    """Not even when the note of an earlier time is there; and settings that are no settings start nothing."""
    job = Job(tmp_path / "job", data, "--batch_tokens=250", restarts="0", torchrun=NO_TORCHRUN)
    (job.out / "pretrain").mkdir(parents=True)
    (job.out / "pretrain/requeue").write_text("")
    code, said = job.wait()
    assert code != 0 and "batch_tokens = 250 is no multiple" in said and job.requeued() == 0, said
    job = Job(tmp_path / "job", data, "--learning_rat=1")
    code, said = job.wait()
    assert code == 2 and "the nearest is 'learning_rate'" in said and (job.folder / "tasks").read_text() == ""
