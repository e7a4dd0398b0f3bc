"""Times of functions that are to be compared, taken in turns, so that a busy moment meets all of
them; what ranks exchange."""
import statistics
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import parallel
from model import Llama, ModelConfig


def seconds_of(work, device):
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def in_turns(works, rounds, device=torch.device("cpu"), warm_up=2):
    """{name: [seconds of each round]} of {name: function}. The order within a round turns from round to round."""
    times = {name: [] for name in works}
    for number in range(-warm_up, rounds):
        for name in list(works)[::-1 if number % 2 else 1]:
            seconds = seconds_of(works[name], device)
            if number >= 0:
                times[name].append(seconds)
    return times


def demo_model(config, setup):
    """The demonstration's Llama as train.py has it, compiled by config.compile."""
    model = Llama(ModelConfig(2048, 4, 4, 4, 256, 704, 256, tie_embeddings=True)).init_weights(config.seed).to(setup.device)
    parallel.compile_blocks(model, setup, config.compile)
    return model


def ratio(times, name, peer):
    """The median over the rounds of how much longer `name` took than `peer` in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[peer]))


class Met(TorchDispatchMode):
    """While it is entered, counts what the ranks exchange: {kind: [how often, bytes of the whole tensors]} in .counts.
    Of gradients' sums, `early` counts those that begin before the backward pass has come to `first`, the model's first
    layer: they travel while the rest is computed."""

    def __init__(self, first=None):
        super().__init__()
        self.counts, self.early, self.under_way = {}, 0, False
        self.hook = first and first.register_forward_hook(self.forward_begins)

    def forward_begins(self, module, given, output):
        self.under_way = True
        output.register_hook(lambda gradient: setattr(self, "under_way", False))

    def __exit__(self, *error):
        if self.hook:
            self.hook.remove()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            name = func.__name__.replace("all_", "all")
            kind = next((kind for kind in ("allgather", "reduce_scatter", "allreduce") if kind in name), name.split(".")[0])
            sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            often, size = self.counts.get(kind, (0, 0))
            self.counts[kind] = [often + 1, size + max(sizes, default=0)]
            self.early += self.under_way and kind in ("reduce_scatter", "allreduce")
        return func(*args, **(kwargs or {}))
