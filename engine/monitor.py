"""
What a run tells: one line a logged step in log.jsonl, the same numbers for TensorBoard, a bar on a terminal.

log.jsonl is the record; everything that draws or diagnoses reads that file only. A run that was interrupted goes over
some steps again: every line carries `attempt`, and read_log leaves out what a later attempt went over.
"""
import json
import sys
import time
from pathlib import Path

from tqdm import tqdm

from configurator import refuse
from engine.alarms import Alarms
from engine.files import FORMAT_VERSION, fits, gone, json_lines, open_to_append, plain


class Monitor:
    """Rank 0 writes; on other ranks every method does nothing."""

    def __init__(self, run_dir, setup, total_steps, start_step=0, label="train"):
        self.is_main, self.label, self.total = setup.is_main, label, total_steps
        if not self.is_main:
            return
        path = Path(run_dir) / "log.jsonl"
        open_to_append(path).close()        # makes it, or cuts off the half line of a run that was killed while it wrote
        self.attempt = 1 + max((record["attempt"] for record in records_of(path)), default=0)
        self.alarms = Alarms()
        for record in read_log(run_dir):
            if record["step"] <= start_step:
                self.alarms.hear(record)
        self.file = open(path, "a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(str(Path(run_dir) / "tensorboard"))
        except ImportError:
            print("note: tensorboard is not installed; the same numbers are in log.jsonl", flush=True)
            self.board = None
        self.bar = tqdm(total=total_steps, initial=start_step, desc=label, disable=not sys.stderr.isatty(),
                        dynamic_ncols=True)

    def log(self, step, line=None, **numbers):
        """One record for `step`; `line`: what a person reads, where there is no terminal for a bar."""
        if not self.is_main:
            return
        record = {"format_version": FORMAT_VERSION, "attempt": self.attempt, "step": step,
                  "time": round(time.time(), 3), **numbers}
        refuse(*gone(Path(self.file.name).parent))
        alarms = self.alarms.hear(record)
        if alarms:
            record["alarms"] = alarms
        try:
            self.file.write(json.dumps(plain(record), allow_nan=False) + "\n")
            self.file.flush()
            for name, value in flat(numbers) if self.board else ():
                self.board.add_scalar(f"{self.label}/{name}", value, step)
        except OSError as error:
            refuse(f"cannot write {self.file.name}: {error.strerror}. The checkpoints are as they were; make room and "
                   "give the same command again, it continues from the newest.")
        if line and self.bar.disable:
            print(f"{self.label} {step}/{self.total}  {line}", flush=True)
        elif line:
            self.bar.set_postfix_str(line)
        for alarm in alarms:
            self.bar.write(f"alarm at step {step}: {alarm}")

    def advance(self):
        if self.is_main:
            self.bar.update()

    def again(self, step, attempt):
        """After a roll-back to `step`: what is logged from here on is another attempt."""
        if self.is_main:
            self.attempt, self.bar.n = attempt, step

    def close(self):
        if self.is_main:
            self.bar.close()
            self.file.close()
            if self.board:
                self.board.close()


def flat(numbers, prefix=""):
    """(name, number) of everything that a curve can be drawn of; within a dict the name is outer/inner."""
    for name, value in numbers.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield prefix + name, value


def records_of(path):
    """Of the lines of a log those that are records of a step: a damaged one must not keep a run from going on."""
    return [record for record in json_lines(path) if fits(record, {"attempt": int, "step": int})]


def read_log(run_dir):
    """The records of a run in order, each step once: what became known of a step after its line was written stands in
    another line. What an attempt logged behind the place where a later one took up is left out: those steps were done
    again."""
    records, place = [], lambda record: (record["attempt"], record["step"])
    for record in records_of(Path(run_dir) / "log.jsonl"):
        if records and place(records[-1]) == place(record):
            record = {**records.pop(), **record}
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    return records
