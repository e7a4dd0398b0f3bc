"""
What a run tells: one line a logged step in log.jsonl, the same numbers for TensorBoard, a bar on a terminal.

log.jsonl is the record; everything that draws or diagnoses reads that file only. A run that was interrupted writes some
steps again: every line carries `attempt`, and read_log keeps the highest for each step.
"""
import json
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from engine.files import FORMAT_VERSION, plain


class Monitor:
    """Rank 0 writes; on other ranks every method does nothing."""

    def __init__(self, run_dir, setup, total_steps, start_step=0, label="train"):
        self.is_main, self.label, self.started = setup.is_main, label, time.time()
        self.file = self.board = self.bar = None
        if not self.is_main:
            return
        path = Path(run_dir) / "log.jsonl"
        _drop_half_line(path)
        self.attempt = 1 + max((line.get("attempt", 0) for line in read_lines(path)), default=0)
        self.file = open(path, "a", encoding="utf-8")
        self.board = _tensorboard(Path(run_dir) / "tensorboard")
        self.bar = tqdm(total=total_steps, initial=start_step, desc=label, disable=not sys.stderr.isatty(), dynamic_ncols=True)
        self.total = total_steps

    def log(self, step, line=None, **numbers):
        """One record for `step`; `line`: what a person reads, where there is no terminal for a bar."""
        if not self.is_main:
            return
        record = {"format_version": FORMAT_VERSION, "attempt": self.attempt, "step": step, "time": round(time.time(), 3), **numbers}
        self.file.write(json.dumps(plain(record), allow_nan=False) + "\n")
        self.file.flush()
        for name, value in numbers.items() if self.board else ():
            if isinstance(value, (int, float)):
                self.board.add_scalar(f"{self.label}/{name}", value, step)
        if line and self.bar.disable:
            print(f"{self.label} {step}/{self.total}  {line}", flush=True)
        elif line:
            self.bar.set_postfix_str(line)

    def advance(self):
        if self.bar is not None:
            self.bar.update()

    def close(self):
        if self.is_main:
            self.bar.close()
            self.file.close()
            if self.board:
                self.board.close()


def _tensorboard(folder):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("note: tensorboard is not installed; the same numbers are in log.jsonl", flush=True)
        return None
    return SummaryWriter(str(folder))


def _drop_half_line(path):
    """A run that was killed while it wrote leaves half a line, to which the next one would be glued."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            content = file.read()
            if not content.endswith(b"\n"):
                file.truncate(content.rfind(b"\n") + 1)
                os.fsync(file.fileno())


def read_lines(path):
    path = Path(path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def read_log(run_dir):
    """The records of a run, one per step (the last attempt's), in order."""
    latest = {}
    for record in read_lines(Path(run_dir) / "log.jsonl"):
        latest[record["step"]] = record          # attempts follow each other in the file
    return [latest[step] for step in sorted(latest)]
