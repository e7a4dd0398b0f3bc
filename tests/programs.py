"""
Processes of our scripts that are there at once. Importing torch takes longer than most of what a test has a process do,
so each is forked from a server (multiprocessing's) that has imported it: a process of its own all the same, with its own
environment, exit status and death. Several ranks find each other as under torchrun, through a store that outlives them.
What is about torchrun itself, or about how Python starts, calls them.
"""
import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from small import ROOT

IMPORTED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
            "torch.distributed.tensor.parallel", "train", "sft", "reward", "rlhf", "dpo", "doctor", "prepare_data", "programs"]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:0"]


@functools.cache
def _server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}", OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def _become(words, folder, environment, said, errors):
    """Does in a new process what `python WORDS` would."""
    for path, number in ((said, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.path.abspath(words[0])
    sys.argv, sys.path[:0] = words, [os.path.dirname(file)]
    try:
        runpy.run_path(file, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


class Program:
    """`python WORDS`, or with processes=2 `torchrun --nproc_per_node=2 WORDS`, in FOLDER, begun. said: a file that keeps
    all it says. Further keys go into its environment."""

    def __init__(self, *words, processes=1, folder=ROOT, said=None, **environment):
        self.place = tempfile.TemporaryDirectory()
        self.said = Path(said or f"{self.place.name}/said")
        self.errors = self.said if said else Path(f"{self.place.name}/errors")
        self.said.touch(), self.errors.touch()
        self.told = None                                    # when the others were told that one has failed
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        if processes > 1:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(processes),
                            "LOCAL_WORLD_SIZE": str(processes), "TORCHELASTIC_USE_AGENT_STORE": "True",
                            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)] if processes > 1 else [{}]
        self.ranks = [_server().Process(target=_become, args=(
            [*map(str, words)], folder, {**environment, **rank}, self.said, self.errors)) for rank in ranks]
        for rank in self.ranks:
            rank.start()
        self.pids = [rank.pid for rank in self.ranks]

    def poll(self):
        """The exit status, None while any rank lives. When one fails, the others are asked to leave, as torchrun does."""
        codes = [rank.exitcode for rank in self.ranks]
        if any(codes) and None in codes:
            self.told = self.told or (self.send(signal.SIGTERM), time.monotonic())[1]
            if time.monotonic() > self.told + 30:
                self.send(signal.SIGKILL)
        return None if None in codes else codes[0] if len(codes) == 1 else int(any(codes))

    def until(self, condition, seconds=200):
        """Waits for something to be seen from outside; whether it was, while the program was alive."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.poll() is None:
            if condition():
                return True
            time.sleep(0.001)
        return False

    def send(self, number):
        for rank in self.ranks:
            if rank.exitcode is None:
                with contextlib.suppress(ProcessLookupError):       # gone a moment ago: its exit status is on its way
                    os.kill(rank.pid, number)

    def kill(self):
        self.send(signal.SIGKILL)
        for rank in self.ranks:
            rank.join()

    def wait(self, seconds=300):
        """Until the end; -> (exit status, what it said)."""
        deadline = time.monotonic() + seconds
        try:
            while self.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not at its end after {seconds} seconds, and has said:\n{self.text()}")
                multiprocessing.connection.wait([rank.sentinel for rank in self.ranks if rank.exitcode is None], 0.5)
            return self.poll(), self.text()
        finally:
            self.kill()

    def text(self):
        return self.said.read_text() + (self.errors.read_text() if self.errors != self.said else "")


def run(*words, seconds=300, **more):
    """Such a program until its end, as subprocess.run gives it."""
    program = Program(*words, **more)
    code, _ = program.wait(seconds)
    return subprocess.CompletedProcess(words, code, program.said.read_text(), program.errors.read_text())
