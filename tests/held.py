"""
What two real processes hold in two steps of train.py, in bytes, for test_plan.py: their parts of weights, gradients and
moments; and the peak of PyTorch's allocator, from its own record.

    torchrun --nproc_per_node=2 tests/held.py
"""
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
from torch.profiler import ProfilerActivity, profile

import train as script
from configurator import configure
from engine import parallel
from engine.layout import build, join, wrapped
from engine.memory import held_by
from engine.optim import clip, optimizers_of
from engine.parallel import divide
from model import Llama, ModelConfig

# Where bf16 is emulated, these steps take minutes in it, and seconds in fp32.
DTYPE = "bf16" if parallel.dtype_named("auto", torch.device("cpu")) == torch.bfloat16 else "fp32"
SHAPE = ("--n_layer=3 --n_head=4 --n_kv_head=4 --n_embd=256 --n_inner=704 --block_size=256 --vocab_size=2048 --micro_batch_size=4 "
         f"--tie_embeddings=False --batch_tokens=4096 --dtype={DTYPE} --device=cpu --threads=1 --compile=False").split()
WAYS = {"ddp": "--parallel=ddp", "zero1": "--parallel=fsdp --zero=1", "zero2": "--parallel=fsdp --zero=2",
        "zero3": "--parallel=fsdp", "full": "--parallel=fsdp --recompute=full"}
ENDS = SimpleNamespace(bos_id=256, eos_id=257)


def peak_of(recorded):
    """The largest sum of what PyTorch's allocator has given out and not got back, since the record began."""
    deltas = [event.nbytes() for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())
              if event.name() == "[memory]"]
    now = most = 0
    for delta in deltas:
        now += delta
        most = max(most, now)
    return most


def held(config, shape, setup):
    """{what: bytes} of this process."""
    batch = lambda: torch.randint(0, 250, (setup.layout.micro, config.block_size))
    micro_batches = [(batch(), batch(), torch.ones(setup.layout.micro, config.block_size)) for _ in range(2)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = build(lambda: Llama(shape), setup, 1)
        optimizers = optimizers_of(model, 1e-3, 0, 0.1)
        outer = wrapped(model, setup)
        for number in range(2):
            script.forward_backward(outer, micro_batches, config, ENDS, setup)
            clip(model.parameters(), 1.0, setup)
            for optimizer in optimizers:
                optimizer.step()
                if number == 0:
                    optimizer.zero_grad(set_to_none=not setup.layout.in_buckets)
    found = {"weights": held_by(model.parameters()), "gradients": held_by(p.grad for p in model.parameters()), "optimizer": held_by(
        value for optimizer in optimizers for state in optimizer.state.values() for value in state.values() if value.dim())}
    return {**found, "peak": peak_of(recorded)}


def main():
    setup = parallel.start("cpu", DTYPE, None, 1, 1)
    for name, words in WAYS.items():
        config = configure(vars(script), [*SHAPE, *words.split()])
        shape = ModelConfig(**{key: getattr(config, key) for key in ModelConfig.__dataclass_fields__})
        layout, problems = divide(config, shape, setup.world)
        assert not problems, problems
        real = held(config, shape, join(setup, layout))
        setup.say(f"{name} " + " ".join(f"{key}={value}" for key, value in real.items()))
    parallel.finish(setup)


if __name__ == "__main__":
    main()
