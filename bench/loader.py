"""
The loader alone: tokens a second beside those that a model trains on, and what its reading does to the resident memory.

    python bench/loader.py

All in turns in one run, the shards a file of holes (so no disk is measured, only what is done to each token): reading
with engine/loader.py, the same blocks from a mapped file (np.memmap, as is usual), and forward and backward of a Llama.
Then the share of a training loop that it waits for data, read ahead by the thread and read when it is needed.
"""
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from configurator import configure
from engine import parallel
from engine.files import sha256_file, write_json
from engine.loader import open_mixture, read_ahead
from engine.loss import model_losses
from engine.shards import batch
from timing import demo_model, in_turns, ratio

block_size = 256                # at most
micro_batch_size = 32
batch_tokens = 8192
megabytes = 600                 # of shards
steps = 100                     # of reading in a round
rounds = 5
seed = 1
compile = True
dtype = "auto"
device = "auto"
threads = 0


def shards_of_holes(folder, config):
    """Token shards of `megabytes` that take no room on the disk."""
    n_tokens = config.megabytes * 500_000
    (folder / "tokens").mkdir()
    with open(folder / "tokens" / "train_00000.bin", "wb") as file:
        file.truncate(2 * n_tokens)
    np.array([0, n_tokens], "<u8").tofile(folder / "tokens" / "train_offsets.bin")
    write_json(folder / "tokens" / "index.json", {
        "dtype": "uint16", "vocab_size": 2048, "tokenizer_hash": "", "bos_id": 1, "eos_id": 2, "splits": {"train": {
            "n_tokens": n_tokens, "n_docs": 1, "files": [{"name": "train_00000.bin", "tokens": n_tokens,
                                                        "sha256": sha256_file(folder / "tokens" / "train_00000.bin")}],
            "offsets": {"name": "train_offsets.bin", "sha256": sha256_file(folder / "tokens" / "train_offsets.bin")}}}})
    return folder / "tokens" / "train_00000.bin"


def resident():
    """MB of memory that this process has, where the system tells (Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
    except OSError:
        return float("nan")


def main(config):
    setup = parallel.start(config.device, config.dtype, None, config.threads, config.seed)
    model = demo_model(config, setup)
    per_step, step = config.batch_tokens // config.block_size, 0
    with tempfile.TemporaryDirectory() as folder:
        path = shards_of_holes(Path(folder), config)
        data = open_mixture(folder, None, "train", config.block_size)
        mapping = np.memmap(path, "<u2", "r")
        mapped = SimpleNamespace(bos_id=1, eos_id=2, read_block=lambda block, size: mapping[block * size:][:size + 1])
        grown = {"loader": 0.0, "mapped": 0.0}

        def read(name, work):
            before = resident()
            work()
            grown[name] += resident() - before

        def with_loader():
            nonlocal step
            for _ in read_ahead(data, step, step + config.steps, (), per_step, config, setup):
                step += 1

        def with_map():
            for number in range(step, step + config.steps):
                batch(mapped, data.step_blocks(number, per_step, config.seed), config.block_size)

        def train(micro_batches):
            for x, y, w in micro_batches:
                with setup.autocast():
                    losses = model_losses(model, x, y)[0]
                (losses * w).sum().backward()
            if setup.device.type == "cuda":
                torch.cuda.synchronize()

        some = next(read_ahead(data, 0, 1, (), per_step, config, setup))[1]
        times = in_turns({"loader": lambda: read("loader", with_loader), "mapped": lambda: read("mapped", with_map),
                          "model": lambda: train(some)}, config.rounds, setup.device)
        speed = {name: config.batch_tokens * (1 if name == "model" else config.steps) / statistics.median(seconds)
                 for name, seconds in times.items()}
        print(f"{setup.device}, {setup.threads} threads, blocks of {config.block_size}, {config.megabytes} MB of "
              "shards")
        for name, rate in speed.items():
            grew = f", resident memory {grown[name]:+.0f} MB" if name in grown else ""
            print(f"{name:<8}{rate:>14,.0f} tokens/s, {rate / speed['model']:>8.1f} of the model's{grew}")
        print(f"loader over mapped: {1 / ratio(times, 'loader', 'mapped'):.2f} of its speed")

        for name in ("read ahead", "when needed"):
            began, waited = time.perf_counter(), 0.0
            batches = read_ahead(data, 0, config.rounds * 4, (), per_step, config, setup) if name == "read ahead" else (
                next(read_ahead(data, n, n + 1, (), per_step, config, setup)) for n in range(config.rounds * 4))
            for _ in range(config.rounds * 4):
                asked = time.perf_counter()
                _, micro_batches = next(batches)
                waited += time.perf_counter() - asked
                train(micro_batches)
            print(f"{name}: {100 * waited / (time.perf_counter() - began):.2f} % of a training loop is waiting for "
                  "data")


if __name__ == "__main__":
    main(configure(globals()))
