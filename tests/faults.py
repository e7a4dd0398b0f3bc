"""Runs of train.py on two real processes, and what can happen to them: signals, damaged files, bad data, full disks."""
import contextlib
import os
import random
import signal
import subprocess
import time

import numpy as np

from engine.manifest import folder_of, steps_of
from engine.shards import ShardWriter, n_blocks, step_blocks, write_index
from programs import TORCHRUN, Program
from small import ROOT, byte_tokenizer
from test_train import SHAPE

# Large enough that a save takes a while: full checkpoints of 20 MB.
LARGE = ("--n_embd=256 --n_inner=704 --tie_embeddings=False --warmup_steps=2 --max_steps=24 --save_full=4 "
         "--save_light=8 --keep=3 --dropout=0.1").split()
STAGES = ("folder", "state", "metadata", "manifest", "renamed")


def processes():
    """{pid: (parent, command)} of all processes."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {int(row[0]): (int(row[1]), row[2]) for row in rows if len(row) == 3}


class Run(Program):
    """train.py on two processes, or with processes=1 on one."""

    def __init__(self, data, out, *extra, processes=2, words=("train.py",)):
        self.out = out
        super().__init__(*words, f"--data_dir={data}", f"--out_dir={out}", *SHAPE, *LARGE, *extra, processes=processes)

    def until_step(self, step):
        log = self.out / "pretrain" / "log.jsonl"
        before = log.read_bytes().count(b"\n") if log.exists() else 0
        assert self.until(lambda: log.exists() and log.read_bytes().count(b"\n") >= before + step), self.text()

    def kill_in_save(self, wanted):
        """kill -9 of everything while a full checkpoint is written, at one of these stages; -> the stage, None when the
        run came to its end before. All are stopped first, to see where they are; at another stage they go on."""
        self.until_step(1)
        known = set(steps_of(self.out / "pretrain", "full"))
        while self.until(lambda: stage(self.out, known) is not None):
            self.send(signal.SIGSTOP)
            found = stage(self.out, known)
            if found in wanted:
                self.kill()
                return stage(self.out, known)
            if found == "renamed":
                known = set(steps_of(self.out / "pretrain", "full"))
            self.send(signal.SIGCONT)
            time.sleep(0.001)
        return None


class Launched(Run):
    """The same by another program: torchrun."""

    def __init__(self, data, out, *extra, launcher=TORCHRUN, words=("train.py",), said=None):
        self.out, self.said = out, said or out.with_name(f"{out.name}.{time.time_ns()}.txt")
        self.errors, self.children = self.said, []
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(self.said, "w") as file:
            words = [*launcher, *words, f"--data_dir={data}", f"--out_dir={out}", *SHAPE, *LARGE, *extra]
            self.process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                                            env={**os.environ, "OMP_NUM_THREADS": "1"})

    @property
    def pids(self):
        """Of the ranks, rank 0 first; known once they run."""
        if not self.children and self.process.poll() is None:
            self.children = sorted(pid for pid, (parent, words) in processes().items()
                                   if parent == self.process.pid and "train.py" in words)
        return self.children

    def poll(self):
        return self.process.poll()

    def send(self, number):
        """To all of them at once, torchrun included."""
        for pid in [*self.pids, self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self):
        self.send(signal.SIGKILL)
        self.process.wait()

    def wait(self, seconds=200):
        try:
            return self.process.wait(seconds), self.text()
        finally:
            self.kill()


def stage(out, known):
    """How far the writing of a full checkpoint has come that is not among the known ones."""
    run = out / "pretrain"
    if set(steps_of(run, "full")) - known:
        return "renamed"
    for folder in run.glob("full_*.tmp"):
        if (folder / "manifest.json").exists():
            return "manifest"
        if (folder / "state" / ".metadata").exists():
            return "metadata"
        return "state" if list(folder.glob("**/*.distcp")) else "folder"
    return None


def newest_full(out):
    return folder_of(out / "pretrain", "full", steps_of(out / "pretrain", "full")[0])


def damage(folder, kind):
    """Really damages the largest file of a checkpoint, or takes its manifest."""
    victim = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    if kind == "bit":
        with open(victim, "r+b") as file:
            file.seek(victim.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 64]))
    elif kind == "truncated":
        os.truncate(victim, victim.stat().st_size - 1)
    elif kind == "manifest":
        (folder / "manifest.json").unlink()


def make_data(folder, bad_steps=(), bad=b"z", n_docs=400, seed=0):
    """Documents of made-up words of a to h. The texts that these steps read, with seed 1 and 8 blocks of 32, are
    nothing but z; or with bad=b"" one letter in the first of these steps is a q. -> (begins of documents, the blocks)."""
    tokenizer, rng = byte_tokenizer(), random.Random(seed)
    words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(1, 6))) for _ in range(40)]
    texts = [" ".join(rng.choice(words) for _ in range(rng.randint(3, 40))) for _ in range(n_docs)]
    documents = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    flat, begins = np.concatenate(documents), np.cumsum([0] + [len(document) for document in documents])
    total, z, q = n_blocks(len(flat), 32), tokenizer.encode("z")[0], tokenizer.encode("q")[0]
    blocks = [block for step in bad_steps for block in step_blocks(step, 8, total, 1)]
    text = flat < 256
    for block in blocks if bad else ():
        part = slice(block * 32, block * 32 + 32)
        flat[part][text[part]] = z
    if blocks and not bad:
        place = next(place for place in range(blocks[0] * 32 + 5, len(flat)) if text[place])
        flat[place] = q
    splits = {}
    for split, count in (("train", n_docs), ("val", 8)):
        writer = ShardWriter(folder / "tokens", split, tokenizer.vocab_size, shard_tokens=3000)
        for a, b in zip(begins[:count], begins[1:]):
            writer.add(flat[a:b])
        splits[split] = writer.close()
    write_index(folder / "tokens", tokenizer, splits)
    tokenizer.save(folder / "tokenizer")
    return begins, blocks
