"""
What a training step's memory is made of, by arithmetic; and what a run says that has run out of it. The same by running
a step without numbers: engine/fake.py.
"""
import re
import traceback

import torch

from configurator import refuse
from engine.layout import keep_stage, local
from model import Llama

STATES = ("weights", "gradients", "optimizer")
COMPONENTS = (*STATES, "activations", "logits", "gathers")
GIB = 2 ** 30


def dtype_of(config):
    return {"fp32": torch.float32, "fp16": torch.float16}.get(config.dtype, torch.bfloat16)


def total(parts):
    return sum(parts[name] for name in COMPONENTS)


def numbers_of(shape, layout, stage=0):
    """(numbers of parameters on a rank of this stage before they are sharded, those of one layer, layers)."""
    with torch.device("meta"):
        model = Llama(shape)
    if layout.pp > 1:
        keep_stage(model, stage, layout.pp)
    own = lambda module: sum(p.numel() / (layout.tp if p.dim() > 1 else 1) for p in module.parameters())
    blocks = list(model.model.layers.children())
    return own(model), own(blocks[0]), len(blocks)


def kept_per_token(shape, layout, b):
    """Bytes that a layer keeps for its backward pass, per token: (nothing computed anew, 'selective', 'full'). b: of a
    number in the products. Attention is 'flash', which keeps no scores."""
    c, heads, kv, t = shape.n_embd, shape.n_head * shape.head_dim, shape.n_kv_head * shape.head_dim, layout.tp
    r = 4 if layout.plain else b            # of the residual stream: autocast leaves the embedding's fp32, FSDP gives it in b
    casts = lambda n: n if r > b else 1     # autocast narrows a norm's output anew for each matrix that reads it
    norm = lambda readers: (4 + r) * c / t + casts(readers) * b * c       # its input in fp32, scaled, and given out
    attention = norm(3) + b * (3 * heads + 2 * kv) / t                    # q, k, v turned, the result, put in order
    mlp = norm(2) + b * 4 * shape.n_inner / t                             # gate, silu(gate), up, their product
    return attention + mlp, attention + r * c / t, r * c / t


def waiting(config, shape, layout, stage):
    """Bytes that a pipeline's stage sets aside for each micro-batch of a step: hidden states that come, gradients that
    come back. torch.distributed.pipelining has them for all at once."""
    ways = (stage > 0) + (stage < layout.pp - 1)
    return ways * dtype_of(config).itemsize * layout.micro * config.block_size * shape.n_embd / layout.tp


def arithmetic(config, shape, layout, stage=0):
    """{component: (bytes, how)} of a rank of this stage at the larger of two moments: when the loss has been computed,
    and in the backward pass of the last layer but one."""
    own, block, layers = numbers_of(shape, layout, stage)
    b, s, tokens = dtype_of(config).itemsize, 1 if layout.plain else layout.shards, layout.micro * config.block_size
    none, selective, full = kept_per_token(shape, layout, b)
    kept = {"none": none, "selective": selective, "full": full}[shape.recompute] * tokens
    if layout.plain and b < 4:
        kept, none = kept + b * block * (shape.recompute != "full"), none + b * block / tokens    # autocast's narrow weights
    flight = min(layout.pp - stage, layout.n_micro)
    once = (none * tokens - kept) + 3 * b * shape.n_inner / layout.tp * tokens
    last = stage == layout.pp - 1
    scored = min(config.loss_chunk or tokens, tokens)
    logits = last * (12 * shape.vocab_size * scored + 8 * shape.n_embd * tokens)
    muon = config.matrix_learning_rate > 0
    whole_gradients = not layout.plain and layout.zero == 1 and layout.n_micro > 1
    parts = {"weights": (4 * own / s, f"4 N / {s}: fp32" if s > 1 else "4 N: fp32"),
             "gradients": (4 * own / (1 if whole_gradients else s),
                           "4 N, whole until they travel" if whole_gradients or s == 1
                           else f"4 N / {s}: fp32"),
             "optimizer": ((8 * own - muon * 4 * block * layers) / s, f"{'4 or ' * muon}8 N / {s}: moments in fp32")}
    outside, kept_whole = b * (own - layers * block), layout.plain or layout.zero < 3
    gathered = 0 if layout.plain else outside + b * block * (layers if kept_whole else 1)
    at_loss = {"activations": flight * layers * kept, "logits": logits, "gathers": gathered}
    going_back = {"activations": (flight * layers - 1) * kept + once, "logits": 0,
                  "gathers": gathered + (0 if layout.plain else (b * (not kept_whole) + b + 4) * block)}
    more = max(at_loss, going_back, key=lambda found: sum(found.values()))
    more["activations"] += layout.n_micro * waiting(config, shape, layout, stage)
    return parts | {
        "activations": (more["activations"],
                        f"{flight * layers} layers x {tokens:,} tokens x {kept / tokens / 1024:,.1f} KiB"),
        "logits": (more["logits"],
                   f"12 V per token ({shape.vocab_size:,} numbers three times in fp32)" if last else ""),
        "gathers": (more["gathers"], "" if layout.plain else f"{b} bytes of what is outside of layers, and of "
                    + ("all layers" if kept_whole else "one layer or two"))}


KNOBS = {
    "weights": "parallel=fsdp with zero=3, or more GPUs: states are shared out among them",
    "gradients": "parallel=fsdp with zero=2 or 3: no rank then holds all gradients",
    "optimizer": "parallel=fsdp: the moments are shared out; cpu_offload=True puts them into the CPU's memory",
    "activations": "a smaller micro_batch_size, or recompute=selective, or recompute=full: the result is the same",
    "logits": "loss_chunk=1024: so many tokens' logits at a time; or a smaller micro_batch_size",
    "gathers": "zero=3, which gathers one layer's weights at a time",
    "fragments": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment; of the memory taken from the "
                 "driver much is free, in pieces that are too small",
}
# Where in the code each is made; the innermost of the frames that one of these fits counts.
PLACES = {"optimizer": r"optim(/|\.py)", "gathers": r"_fully_shard", "logits": r"loss\.py:(scores|token_losses)",
          "activations": r"model\.py"}


class Explained:
    """A context in which running out of memory ends with what grew, what the plan says of it, and what can be done."""

    def __init__(self, config):
        self.config, self.setup, self.made = config, None, None

    def watch(self, shape, model, optimizers, setup):
        """What holds the memory, once it is there."""
        self.made, self.setup = (shape, model, optimizers), setup

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        wanted = asked_for(error)
        if wanted is not None and self.made:
            refuse(*self.sentences(wanted, traceback.extract_tb(trace)))

    def sentences(self, wanted, frames):
        (shape, model, optimizers), setup = self.made, self.setup
        plan = arithmetic(self.config, shape, setup.layout, setup.stage)
        now = {"weights": held_by(model.parameters()), "gradients": held_by(p.grad for p in model.parameters()),
               "optimizer": held_by(value for optimizer in optimizers for state in optimizer.state.values()
                                 for value in state.values() if torch.is_tensor(value))}
        planned = {name: plan[name][0] for name in STATES}
        # The rest can not be told apart by what lives; but where it ended says what was being made.
        rest, held, free = "all else", 0, 0                    # how much a process has of a CPU's memory torch does not know
        if setup.device.type == "cuda":
            held = torch.cuda.memory_allocated(setup.device)
            free = torch.cuda.memory_reserved(setup.device) - held
        now[rest] = max(held - sum(now.values()), 0) + wanted
        planned[rest] = sum(size for size, _ in plan.values()) - sum(planned.values())
        grew = max(STATES, key=lambda name: now[name] - planned[name])
        if now[grew] - planned[grew] < max(wanted, 0.05 * sum(planned.values())):
            grew = next((name for frame in reversed(frames) for name, mark in PLACES.items()
                         if re.search(mark, f"{frame.filename}:{frame.name}")), "activations")
        known = plan.get(grew, (0, ""))
        if free > max(wanted, 0.1 * (free + held)):
            grew = "fragments"
        table = [f"  {name:<12}{now[name] / GIB:9.2f} GiB{planned[name] / GIB:9.2f} planned" for name in now]
        return [f"out of memory on rank {setup.rank}: there was no room for another {wanted / GIB:.2f} GiB", *table,
                f"What grew: {grew}. The plan's line for it: {known[0] / GIB:.2f} GiB"
                f"{': ' * bool(known[1])}{known[1]}.",
                f"What helps: {KNOBS[grew]}. `{self.config.command('train.py')} --plan={setup.world}` shows by how "
                "much."]


def held_by(tensors):
    """Bytes behind what this rank has of some tensors, each storage once: a layer's gradients share one under FSDP."""
    storages = (local(t).untyped_storage() for t in tensors if t is not None)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def asked_for(error):
    """Bytes that could not be had, when that is what this exception says; else None."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        found = re.search(r"allocate ([\d.]+) (\w+)", text)
        return float(found[1]) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(found[2].replace("bytes", "B")) if found else 0
    found = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", text)
    return int(found[1]) if found and isinstance(error, RuntimeError) else None
