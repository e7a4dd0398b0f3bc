"""
What each kind of attention gets wrong, and what it costs.

    python bench/attention.py

Error: queries, keys and values are drawn in bf16 such that the scores q kᵀ / sqrt(D) have a given standard deviation.
The result of `attend` is compared with the same formula in float64 on the same bf16 numbers; what is printed is the
norm of the difference over the norm of the result. The first column is what no kind can avoid: the float64 result
itself, rounded to bf16. Then the same with inputs in fp32, where 'flash' and 'fp32' have no roundings but fp32's.

Speed: forward and backward, in turns; milliseconds, and the median of the ratios to 'flash' of the same round.
"""
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from configurator import configure
from engine import parallel
from model import attend
from timing import in_turns, ratio

magnitudes: tuple[float] = (1, 10, 100, 1000, 10000)     # standard deviations of the scores
lengths: tuple[int] = (64, 256, 1024, 2048)              # tokens of a row, for the speed
tokens = 4096                   # of all rows together, for the speed
heads = 6
head_dim = 64
rounds = 15
seed = 1
device = "auto"
threads = 0

KINDS = ("flash", "fp32", "bf16")


def exact(q, k, v):
    """Causal attention in float64."""
    q, k, v = q.double(), k.double(), v.double()
    later = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(later, -math.inf).softmax(-1) @ v


def errors(config, setup, dtype):
    """A line per magnitude."""
    print(f"\ninputs in {str(dtype)[6:]}: norm of the error / norm of the result\n"
          f"{'scores':>8}{'rounding the result':>22}" + "".join(f"{kind:>12}" for kind in KINDS))
    generator = torch.Generator().manual_seed(config.seed)
    for size in config.magnitudes:
        q, k, v = (torch.randn(2, config.heads, 512, config.head_dim, generator=generator).to(setup.device)
                   for _ in range(3))
        q, k, v = (q * math.sqrt(size)).to(dtype), (k * math.sqrt(size)).to(dtype), v.to(dtype)
        wanted = exact(q, k, v)
        error = lambda y: ((y.double() - wanted).norm() / wanted.norm()).item()
        print(f"{size:>8,.0f}{error(wanted.to(dtype)):>22.1e}"
              + "".join(f"{error(attend(q, k, v, None, kind)):>12.1e}" for kind in KINDS))


def speed(config, setup):
    print(f"\n{config.tokens} tokens, {config.heads} heads of {config.head_dim}, bf16, forward and backward\n"
          f"{'row':>8}" + "".join(f"{kind + ' ms':>12}" for kind in KINDS)
          + "".join(f"{kind:>7} / flash" for kind in KINDS[1:]))
    for time in config.lengths:
        shape = (max(1, config.tokens // time), config.heads, time, config.head_dim)
        q, k, v, g = (torch.randn(shape, dtype=torch.bfloat16, device=setup.device) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]

        def work(kind):
            torch.autograd.grad(attend(q, k, v, None, kind), inputs, g)

        times = in_turns({kind: lambda kind=kind: work(kind) for kind in KINDS}, config.rounds, setup.device)
        print(f"{time:>8}" + "".join(f"{1000 * statistics.median(times[kind]):>12.1f}" for kind in KINDS)
              + "".join(f"{ratio(times, kind, 'flash'):>15.2f}" for kind in KINDS[1:]))


def main(config):
    setup = parallel.start(config.device, "bf16", None, config.threads, config.seed)
    print(f"torch {torch.__version__}, {setup.device}, {setup.threads} threads")
    errors(config, setup, torch.bfloat16)
    errors(config, setup, torch.float32)
    speed(config, setup)


if __name__ == "__main__":
    main(configure(globals()))
