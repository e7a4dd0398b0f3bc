"""
Why 11,008 and not 11,000: the feed-forward of Llama 2 7B with a width that is a multiple of 256, and one that is not.

    python bench/width.py                          on a GPU where there is one, else on the CPU
    python bench/width.py --device=cpu --tokens=256 --rounds=5

Both widths take turns within a round, in alternating order, and the medians of the rounds are compared: what else the
machine does then falls on both. Times are per weight, so the ratio says what a crooked width costs.
"""
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurator import configure
from engine.parallel import start
from timing import in_turns

n_embd = 4096
widths: list[int] = [11008, 11000]     # the first is what the others are compared with
tokens = 0                      # rows that are multiplied at once; 0: 8192 on a GPU, 512 on a CPU
rounds = 15
device = "auto"                 # 'auto', 'cpu' or 'cuda'
dtype = "auto"                  # 'bf16' or 'fp32'; auto: bf16 where the machine has it natively
threads = 0                     # 0: all cores


def feed_forward(x, gate, up, down):
    """The SwiGLU of model.py: x (N, C), gate and up (F, C), down (C, F) -> (N, C)"""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@torch.inference_mode()
def main(config):
    setup = start(config.device, config.dtype, False, config.threads)
    rows = config.tokens or (8192 if setup.device.type == "cuda" else 512)
    make = lambda *size: torch.randn(size, device=setup.device).to(setup.dtype) * 0.02
    x, calls = make(rows, config.n_embd), {}
    for width in config.widths:
        weights = make(width, config.n_embd), make(width, config.n_embd), make(config.n_embd, width)
        calls[width] = lambda weights=weights: feed_forward(x, *weights)
    times = in_turns(calls, config.rounds, setup.device)
    setup.say(f"{rows} tokens, n_embd {config.n_embd}, {str(setup.dtype)[6:]} on {setup.device.type}, {setup.threads} "
              f"threads, {config.rounds} rounds")
    first = config.widths[0]
    for width in config.widths:
        flops = 6 * rows * config.n_embd * width / statistics.median(times[width])
        pairs = [(a / width) / (b / first) for a, b in zip(times[width], times[first])]
        setup.say(f"  width {width:>6}  {1e3 * statistics.median(times[width]):9.2f} ms  {flops / 1e12:8.3f} TFLOP/s  "
                  f"time per weight against {first}: {statistics.median(pairs):.3f}  "
                  f"({min(pairs):.3f} to {max(pairs):.3f})")


if __name__ == "__main__":
    main(configure(globals()))
