"""
How long a full checkpoint stops the training loop: written in the background, against written on the spot.

    python bench/checkpoint.py

The same state (a Llama's weights, AdamW's moments) to the same disk, in turns; each save then removes the one before,
as in a run. What is compared is the time until the loop may go on, by the median of the rounds' ratios. Also told: how
long the writing in the background takes when nothing else is going on.
"""
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from configurator import configure
from engine import checkpoint, parallel
from engine.optim import adamw
from model import Llama, ModelConfig
from timing import ratio, seconds_of

n_layer = 8
n_embd = 512
vocab_size = 8192
folder = "."                    # on whose disk the checkpoints are written, in a folder of their own that is removed
rounds = 7
device = "auto"
threads = 0


def main(config):
    setup = parallel.start(config.device, "fp32", None, config.threads)
    shape = ModelConfig(config.vocab_size, config.n_layer, 8, 8, config.n_embd, 4 * config.n_embd, 256)
    model = Llama(shape).init_weights(1).to(setup.device)
    optimizer = adamw(model, 1e-3, 0.1)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    size = sum(t.nbytes for t in checkpoint._tensors({"model": model}, {"model": optimizer}).values())

    times = {"on the spot": [], "in the background": [], "its writing": []}
    with tempfile.TemporaryDirectory(dir=config.folder) as run:
        def save(step, in_background):
            checkpoint.save_full(run, step, {"model": model}, {"model": optimizer}, {}, setup, in_background,
                                 lambda: checkpoint.prune(run, "full", 1))
        for number in range(-1, config.rounds):                 # the first round fills buffers and caches, and counts not
            for in_background in (False, True)[::1 if number % 2 else -1]:
                step = 2 * (number + 1) + in_background
                seconds = seconds_of(lambda: save(step, in_background), setup.device)
                rest = seconds_of(checkpoint.wait, setup.device)
                if number >= 0 and in_background:
                    times["its writing"].append(rest)
                if number >= 0:
                    times["in the background" if in_background else "on the spot"].append(seconds)
    print(f"torch {torch.__version__}, {setup.device}, {setup.threads} threads; {size / 1e6:,.0f} MB of state")
    for name, seconds in times.items():
        print(f"{name:<20}{statistics.median(seconds):>8.3f} s  ({min(seconds):.3f} to {max(seconds):.3f})")
    share = ratio(times, "in the background", "on the spot")
    print(f"the loop is stopped for {share:.1%} of the time that saving on the spot takes (target: below 20 %)")


if __name__ == "__main__":
    main(configure(globals()))
