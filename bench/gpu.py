"""
One GPU, what it reaches and what it holds: MFU of three sizes, compiled or not, with and without activations computed
anew, kinds of attention, and memory beside the plan's. Prints tables in Markdown for bench/README.md.

    python bench/gpu.py                 under 6 minutes on an H100 or H200
    python bench/gpu.py --tiny=True     the same cells with models of nothing, on a CPU in a minute or two

The 7B is the work of one of eight GPUs: train.py's step, sharded over a world of eight of which only rank 0 is there.
Collectives are imagined (engine/fake.py), so nothing travels: this is the ceiling that eight GPUs with a
perfect network would reach. Each cell is a process of its own with a limit of time; what fails is a line of
the table with its reason.
"""
import contextlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import train
from configurator import configure, refuse
from engine import parallel
from engine.fake import fake_world, measure_deep
from engine.gauges import flops_per_token, peak_of
from engine.layout import join, local, spread, wrapped
from engine.memory import GIB
from engine.optim import clip, optimizers_of
from engine.parallel import compile_blocks, divide
from engine.plan import at_the_peak, changed
from model import Llama, ModelConfig

tiny = False
cell = ""                       # one cell, as JSON: what this program calls itself with
only = ""                       # cells whose name has this in it
steps = 5                       # timed ones of each cell
limit = 60                      # seconds of a cell, compiling and planning included
total = 340                     # seconds of all: a cell for which none are left says so

ENDS = SimpleNamespace(bos_id=1, eos_id=2)
TINY = dict(n_layer=2, n_head=4, n_kv_head=4, n_embd=64, n_inner=128, vocab_size=512, block_size=64, micro_batch_size=2)
MICRO_BATCHES, WARM_UP = 2, 3
# (name, config file, GPUs, keys). Most wanted first, since time may run out.
CELLS = [
    ("7B of 8, compiled", "llama2_7b", 8, {"compile": True}),
    ("7B of 8, compiled, selective", "llama2_7b", 8, {"compile": True, "recompute": "selective", "micro_batch_size": 4}),
    ("7B of 8, eager", "llama2_7b", 8, {"compile": False}),
    ("1B, compiled", "tinyllama_1b", 1, {"compile": True, "micro_batch_size": 4}),
    ("1B, eager", "tinyllama_1b", 1, {"compile": False, "micro_batch_size": 4}),
    ("124M, compiled", "llama_124m", 1, {"compile": True}),
    ("124M, eager", "llama_124m", 1, {"compile": False}),
    ("124M, compiled, full", "llama_124m", 1, {"compile": True, "recompute": "full"}),
    ("7B of 8, compiled, full", "llama2_7b", 8, {"compile": True, "recompute": "full", "micro_batch_size": 8}),
    ("124M, attention fp32", "llama_124m", 1, {"compile": True, "attention": "fp32", "micro_batch_size": 8}),
    ("124M, documents apart", "llama_124m", 1, {"compile": True, "separate_documents": True}),
]


def settings(file, world, changes, small):
    """(train.py's Config for a file of config/ with these keys, shape, layout)."""
    config = changed(configure(vars(train), [f"config/{file}.py"]), **{**changes, **(TINY if small else {})})
    if world == 1:
        config = changed(config, parallel="ddp")
    config = changed(config, batch_tokens=config.block_size * config.micro_batch_size * world * MICRO_BATCHES)
    shape = ModelConfig(**{key: getattr(config, key) for key in ModelConfig.__dataclass_fields__})
    layout, problems = divide(config, shape, world)
    refuse(*problems)
    return config, shape, layout


def forward_backward(config, model, micro_batches, setup):
    train.forward_backward(model, micro_batches, config, ENDS, setup)


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(config, shape, layout, steps):
    """(seconds of a step, peak bytes or None, FLOP/s at most or None, device) of rank 0 of the layout."""
    setup = join(replace(parallel.start("auto", "bf16", False, 0, 1), world=layout.dp), layout)
    with torch.device("meta"):
        model = Llama(shape)
    if layout.plain:
        compile_blocks(model, setup, config.compile)
    else:
        spread(model, setup, config.compile)
    model.to_empty(device=setup.device)
    for p in model.parameters():                    # as good as init_weights, which draws 7B on one core
        local(p.detach()).normal_(0, 0.02) if p.dim() > 1 else local(p.detach()).fill_(1)
    optimizers = optimizers_of(model, 1e-5, config.matrix_learning_rate, config.weight_decay)
    ids = torch.randint(2, shape.vocab_size, (layout.micro, config.block_size + 1), device=setup.device)
    ids[:, ::256] = ENDS.bos_id
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.ones(ids[:, 1:].shape, device=setup.device)
    outer = model if layout.plain else wrapped(model, setup)
    times = []
    for number in range(-WARM_UP, steps):
        if number == 0 and setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait(setup.device)
        began = time.perf_counter()
        forward_backward(config, outer, [batch] * MICRO_BATCHES, setup)
        clip(model.parameters(), config.grad_clip, setup)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        wait(setup.device)
        times.append(time.perf_counter() - began)
    held = torch.cuda.max_memory_allocated() if setup.device.type == "cuda" else None
    return statistics.median(times[WARM_UP:]), held, peak_of(setup.device, setup.dtype), setup.device


def measured(name, file, world, changes, small, steps):
    """One cell's numbers. Memory is planned after it was measured, since the plan needs a world of its own."""
    config, shape, layout = settings(file, world, changes, small)
    with fake_world(world) if world > 1 else contextlib.nullcontext():
        seconds, held, peak, device = timed(config, shape, layout, steps)
    tokens = MICRO_BATCHES * layout.micro * config.block_size
    with torch.device("meta"):
        flops = flops_per_token(shape, Llama(shape).n_params(), config.separate_documents)
    found = {"rows": f"{layout.micro} x {config.block_size}", "milliseconds": 1000 * seconds, "speed": tokens / seconds,
             "mfu": flops * tokens / seconds / peak if peak else None, "held": held, "planned": None,
             "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    print(json.dumps(found), flush=True)            # what is known so far, should the plan fail or be too late
    planned = at_the_peak(changed(config, separate_documents=False), shape, layout, forward_backward, measure_deep)[0]
    print(json.dumps({**found, "planned": planned}), flush=True)


def row_of(cell, left, small=False, steps=1):
    """A line of the table, and the device's name or None."""
    name = cell[0]
    words = [sys.executable, __file__, f"--cell={json.dumps(cell)}", f"--tiny={small}", f"--steps={steps}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=max(1, left))
        output, wrong = done.stdout, (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        output, wrong = (late.stdout or b"").decode(), f"more than {left:.0f} s"
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        return f"| {name} | failed: {wrong.replace('|', '/')[:150] or 'it said nothing'} | | | | | |", None
    found = json.loads(lines[-1])
    gib = lambda size: f"{size / GIB:.1f}" if size else "-"
    share = f" ({found['planned'] / found['held']:.2f})" if found["planned"] and found["held"] else ""
    mfu = f"{found['mfu']:.1%}" if found["mfu"] else "-"
    row = (f"| {name} | {found['rows']} | {found['milliseconds']:.1f} | {found['speed']:,.0f} | {mfu} | "
           f"{gib(found['held'])} | {gib(found['planned'])}{share}{' ' + wrong[:80] if wrong else ''} |")
    return row, found["device"]


def main(config):
    if config.cell:
        return measured(*json.loads(config.cell), config.tiny, config.steps)
    began, device = time.monotonic(), None
    print("| work | sequences at a time | ms a step | tokens/s | MFU | peak GiB | planned GiB, eager (its share of the "
          "peak) |\n|---|---|---:|---:|---:|---:|---:|", flush=True)
    for cell in CELLS:
        left = min(config.limit, config.total - (time.monotonic() - began))
        if config.only and config.only not in cell[0]:
            continue
        row, its = f"| {cell[0]} | no time left | | | | | |", None
        if left > 5:
            row, its = row_of(cell, left, config.tiny, config.steps)
        device = device or its
        print(row, flush=True)
    print(f"\ntorch {torch.__version__}, {device or 'no device'}; {MICRO_BATCHES} micro-batches a step, median of "
          f"{config.steps} steps; {time.monotonic() - began:.0f} s. Target for the 7B: 45 % on an H100 or H200.")


if __name__ == "__main__":
    main(configure(globals()))
