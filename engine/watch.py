"""
A closer look at some steps, all off by default: --profile, --watch_nan, --watch_stats.

They touch no number. But --watch_nan runs the blocks without torch.compile, which hides what is inside them, and so
rounds in other places; the other two look at compiled blocks from outside and leave every bit as it is.
"""
import contextlib
import os
import re
from functools import partial

import torch

from engine import parallel

LAST_PHASE = "log, evaluate, save"      # of a step


def watch_problems(config):
    """What is wrong with the settings of a closer look, a sentence each."""
    found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", config.profile)
    problems = []
    if config.profile and not found:
        problems.append("profile must be STEP:COUNT, both at least 1, as 100:3 for the steps 100 to 102; found "
                        f"'{config.profile}'")
    elif found and int(found[1]) + int(found[2]) - 1 > config.max_steps:
        problems.append(f"profile = {config.profile} ends behind the last step, max_steps = {config.max_steps}")
    return problems + config.outside(watch_stats=(0,))


class Watch:
    """Made on every rank before the model is wrapped; step(n), phase(name), ..., end() in each step of the loop."""

    def __init__(self, run, model, config, setup):
        self.run, self.setup, self.model, self.every = run, setup, model, config.watch_stats
        first, count = (int(part) for part in (config.profile or "0:0").split(":"))
        self.profiled, self.profiler, self.open = range(first, first + count), None, contextlib.ExitStack()
        self.number, self.phases, self.finding, self.sums, self.inputs = 0, [], None, {}, {}
        self.watching = config.watch_nan
        if self.watching:
            setup.say("watch_nan   every module is looked into: slow, and without torch.compile")
            self.hook_everything()

    def step(self, number):
        """Step `number` (1 is the first) begins, with its first phase, which is called data."""
        self.number, self.phases, self.finding, self.sums = number, [], None, {}
        self.model.model.look = self.look if self.every and number % self.every == 0 else None
        if number in self.profiled and self.profiler is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if self.setup.device.type == "cuda" else []
            self.profiler = torch.profiler.profile(activities=kinds)
            self.profiler.start()
        self.phase("data")

    def phase(self, name):
        """What follows is called `name` in the profile and, on CUDA, by an NVTX range; what went before ends."""
        self.open.close()
        self.phases.append(name)
        if self.profiler:
            self.open.enter_context(torch.profiler.record_function(name))
            if self.setup.device.type == "cuda":
                self.open.enter_context(torch.cuda.nvtx.range(name))

    def where(self):
        """(step, how many of its phases have begun, the last of them), for engine/alive.py; '' for what takes its
        time."""
        name = (self.phases or [""])[-1]
        return self.number, len(self.phases), "" if name == LAST_PHASE else name

    def end(self):
        """The step is over; after the last that is profiled, writes run/profile/."""
        self.open.close()
        self.model.model.look = None
        if self.profiler and self.number == self.profiled[-1]:
            if self.setup.device.type == "cuda":
                torch.cuda.synchronize()                             # the GPU's part of these steps is still to come
            self.profiler.stop()
            folder = self.run / "profile"
            folder.mkdir(exist_ok=True)
            path = folder / f"steps_{self.profiled[0]}_to_{self.profiled[-1]}_rank_{self.setup.rank}.json"
            self.profiler.export_chrome_trace(f"{path}.tmp")
            os.replace(f"{path}.tmp", path)
            self.setup.say(f"profile     {path}, to be opened in https://ui.perfetto.dev or chrome://tracing")
            self.profiler, self.profiled = None, range(0)

    # --- What each block gives and gets --------------------------------------------------------------------------

    def look(self, block, x):
        """Adds up what `block` gives, x (B, T, C), and, in the backward pass, the gradient that comes to it."""
        if torch.is_grad_enabled():
            self.add(block, "output", x)
            x.register_hook(lambda gradient: self.add(block, "gradient", gradient))

    @torch.no_grad()
    def add(self, block, what, x):
        wide = x.float()
        sums = torch.stack([wide.sum(dtype=torch.float64), wide.square().sum(dtype=torch.float64)])
        count, before, most = self.sums.get((block, what), (0, 0, sums.new_zeros(())))
        self.sums[block, what] = count + x.numel(), before + sums, torch.maximum(most, wide.abs().max().double())

    def stats(self, scale=1.0):
        """{"blocks_seen": {block: mean, std and largest absolute value of its output and of the gradient of it}}, over
        all sequences of this global step; empty where the step is not watched. The gradient is that of the step's mean
        loss. All ranks must call it."""
        if not self.sums:
            return {}
        ours, found = [(count, *sums.tolist(), most.item()) for count, sums, most in self.sums.values()], {}
        for (block, what), *of_ranks in zip(self.sums, *parallel.from_all(ours, self.setup)):
            counts, totals, squares, largest = zip(*of_ranks)
            # Backward starts from the loss times the ranks that share the data, since DDP and FSDP divide by them, and
            # in fp16 times its scale.
            unit, mean = self.setup.dp * scale if what == "gradient" else 1, sum(totals) / sum(counts)
            std = max(sum(squares) / sum(counts) - mean * mean, 0) ** 0.5
            found.setdefault(f"layers.{block}", {}).update(
                {f"{what}_mean": mean / unit, f"{what}_std": std / unit, f"{what}_max": max(largest) / unit})
        return {"blocks_seen": found}

    # --- Where something stops being finite ----------------------------------------------------------------------

    def hook_everything(self):
        """Hooks on tensors, which leave the order in which gradients are added as it is: those on modules do not."""
        names = {module: name or type(module).__name__ for name, module in self.model.named_modules()}
        parents = {child: names[module] for module in names for child in module.children()}
        for module, name in names.items():
            module.register_forward_hook(partial(self.after_forward, name, parents.get(module)))
        for name, parameter in self.model.named_parameters():
            parameter.register_hook(partial(self.after_gradient, name))

    def after_forward(self, name, parent, module, inputs, output):
        """Modules come in the order in which they are done, the innermost first, so the first finding is the cause."""
        if not torch.is_grad_enabled() or self.finding:
            return
        for x in floats(inputs):
            self.takers(x).append(name)
            if not_finite(x):                   # all that modules gave before was finite: it came after
                return self.report(f"forward, {parent}: what it computes before it calls {name} gives {describe(x)}")
        self.inputs[name] = "; ".join(describe(x) for x in floats(inputs)) or "token ids"
        for x in floats(output):
            self.takers(x, name)
            if not_finite(x):
                weights = [f"; its {own} has {describe(p)}" for own, p in module.named_parameters() if not_finite(p)]
                told = f"output {describe(x)} of input {self.inputs[name]}{''.join(weights)}"
                return self.report(f"forward, {name}: {told}")

    def takers(self, x, giver=None):
        """The list of the modules that take x for input, which is kept with it; at first sight hooks its gradient."""
        if not hasattr(x, "takers"):
            x.takers = takers = []
            if x.requires_grad:
                x.register_hook(lambda gradient: self.after_backward(giver, takers, gradient))
        return x.takers

    def after_backward(self, giver, takers, gradient):
        if self.finding or not not_finite(gradient):
            return
        if inner := [name for name in takers if not any(other.startswith(f"{name}.") for other in takers)]:
            self.report(f"backward, {', '.join(inner)}: gradient of its input {describe(gradient)}; its input was "
                        f"{self.inputs.get(inner[0])}")
        else:
            self.report(f"backward, after {giver}: gradient of its output {describe(gradient)}; its input was "
                        f"{self.inputs.get(giver)}")

    def after_gradient(self, name, gradient):
        if not self.finding and not_finite(gradient):
            module = name.rpartition(".")[0]
            self.report(f"backward, {module}: gradient of {name} {describe(gradient)}; its input was "
                        f"{self.inputs.get(module)}")

    def report(self, sentence):
        self.finding = f"step {self.number}, rank {self.setup.rank}, {sentence}"

    def found(self):
        """{"not_finite": where it began}, of the first rank that saw it; said as well. All ranks must call it, for a
        step whose loss or gradient is not finite."""
        if not self.watching:
            return {}
        sentence = next(filter(None, parallel.from_all(self.finding, self.setup)), f"step {self.number}: finite in "
                        "every module on every rank, and not in the sum over micro-batches and ranks")
        self.setup.say(f"not finite  {sentence}")
        return {"not_finite": sentence}


def floats(tensors):
    """The tensors of real numbers among a module's inputs or outputs."""
    tensors = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
    return [x for x in tensors if torch.is_tensor(x) and x.is_floating_point() and x.numel()]


def not_finite(x):
    return not torch.isfinite(x.detach()).all()     # detached: else isfinite keeps tensors for a backward pass


def describe(x):
    """A tensor's shape, range, and how much of it is not finite, in words."""
    x = x.detach()
    finite, bad = x[torch.isfinite(x)], {"nan": x.isnan().sum().item(), "inf": x.isinf().sum().item()}
    told = [f"{count:,} {word}" for word, count in bad.items() if count]
    told += [f"{finite.min():.3g} to {finite.max():.3g}"] if finite.numel() else []
    return f"{tuple(x.shape)} [{', '.join(told)}]"
