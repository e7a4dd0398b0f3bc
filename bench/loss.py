"""
Memory and time of the loss over a large vocabulary, in chunks against all logits at once.

    python bench/loss.py

Forward and backward of the last layer and the loss, on random vectors, in bf16 where the machine has it. Memory is what
a process of its own had resident at most (on CUDA: had allocated) above what vectors, weights and their gradients take,
which all share. Time is the step's, in turns in one process, and the median of the ratios to all at once. The gradients
are compared as well.
"""
import multiprocessing
import resource
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from configurator import configure
from engine import parallel
from engine.loss import model_losses
from timing import in_turns, ratio

vocab_size = 128256             # Llama 3's
n_embd = 512
tokens = 4096
chunks: tuple[int] = (0, 2048, 512, 128)     # tokens' logits at a time; 0: all
rounds = 3
seed = 1
device = "auto"
threads = 0


def problem(config, setup):
    """(step, vectors, head): step(chunk) leaves gradients in the other two."""
    torch.manual_seed(config.seed)
    hidden = torch.randn(config.tokens, config.n_embd, device=setup.device).requires_grad_()
    head = torch.nn.Linear(config.n_embd, config.vocab_size, bias=False, device=setup.device)
    targets = torch.randint(0, config.vocab_size, (config.tokens,), device=setup.device)

    model = SimpleNamespace(logits=lambda hidden, _: head(hidden), compiled=False)

    def step(chunk):
        hidden.grad = head.weight.grad = None
        with setup.autocast():
            loss = model_losses(lambda ids, read: read(model, hidden), None, targets, chunk)[0].mean()
        loss.backward()
        return loss.item()
    return step, hidden, head


def peak(config, chunk):
    """Bytes at most in memory during a step, above vectors, weights and two gradients of them."""
    setup = parallel.start(config.device, "auto", None, config.threads)
    step, hidden, head = problem(config, setup)
    hidden.grad, head.weight.grad = torch.ones_like(hidden), torch.ones_like(head.weight)        # touched, so resident
    if setup.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        step(chunk)
        return torch.cuda.max_memory_allocated() - before
    resident = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    before = resident()
    step(chunk)
    return resident() - before


def main(config):
    setup = parallel.start(config.device, "auto", None, config.threads)
    logits = config.tokens * config.vocab_size
    print(f"torch {torch.__version__}, {setup.device}, {setup.threads} threads; {config.tokens} tokens of "
          f"{config.n_embd}, vocabulary {config.vocab_size:,}: the logits alone are "
          f"{2 * logits / 2**30:.2f} GiB in bf16, {4 * logits / 2**30:.2f} GiB in fp32")
    settings = SimpleNamespace(**dict(config.items()))       # what a process can be sent
    peaks, context = {}, multiprocessing.get_context("spawn")
    for chunk in config.chunks:
        with context.Pool(1) as process:
            peaks[chunk] = process.apply(peak, (settings, chunk))
    step, hidden, head = problem(config, setup)
    gradients = {}
    for chunk in config.chunks:
        gradients[chunk] = step(chunk), hidden.grad, head.weight.grad
    works = {chunk: lambda chunk=chunk: step(chunk) for chunk in config.chunks}
    times = in_turns(works, config.rounds, setup.device, warm_up=1)
    first = config.chunks[0]
    print(f"{'chunk':>8}{'memory, GiB':>14}{'of all at once':>17}{'time, s':>10}{'of all at once':>17}"
          f"{'loss':>12}{'gradients differ by':>22}")
    for chunk in config.chunks:
        far = max(((a - b).norm() / b.norm()).item() for a, b in zip(gradients[chunk][1:], gradients[first][1:]))
        print(f"{chunk or 'all':>8}{peaks[chunk] / 2**30:>14.2f}{peaks[chunk] / peaks[first]:>17.2f}"
              f"{statistics.median(times[chunk]):>10.2f}{ratio(times, chunk, first):>17.2f}"
              f"{gradients[chunk][0]:>12.6f}{far:>22.1e}")


if __name__ == "__main__":
    main(configure(globals()))
