"""
What test_parallel.py runs in several processes: a small model trained in one layout after the other, in one process group.

    torchrun --nproc_per_node=N tests/layouts.py steps FOLDER NAME,NAME,...      see `steps`
    torchrun --nproc_per_node=N tests/layouts.py runs FOLDER NAME,NAME,...       train.py itself, see `runs`
"""
import contextlib
import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist

import train as script
from bench.timing import Met
from configurator import configure
from engine import checkpoint, parallel
from engine.layout import build, join, whole, wrapped
from engine.optim import LossScale, clip, optimizers_of
from engine.parallel import divide
from model import Llama, ModelConfig

FSDP = dict(parallel="fsdp")
LAYOUTS = {                                             # name: (processes, keys)
    "ddp": (2, {}), "zero1": (2, dict(FSDP, zero=1)), "zero2": (2, dict(FSDP, zero=2)), "zero3": (2, FSDP),
    "replicas": (2, dict(FSDP, hsdp=2)), "tp2": (2, dict(tp=2)), "pp2": (2, dict(pp=2)),
    "pp2 zero1": (2, dict(FSDP, pp=2, zero=1)), "offload": (2, dict(FSDP, cpu_offload=True)),
    "ddp future": (2, dict(n_future=2)), "zero3 future": (2, dict(FSDP, n_future=2)), "pp2 future": (2, dict(pp=2, n_future=2)),
    "tp2 other": (2, dict(tp=2, tie_embeddings=True, qk_norm=True, loss_chunk=7, z_loss=1e-3)),
    "ddp overflow": (2, dict(dtype="fp16")), "zero3 overflow": (2, dict(FSDP, dtype="fp16")),
    "pp2 overflow": (2, dict(pp=2, dtype="fp16")), "tp2 biases": (2, dict(tp=2, qkv_bias=True)),
    "zero3 other": (2, dict(FSDP, tie_embeddings=True, qk_norm=True, loss_chunk=7, z_loss=1e-3)),
    "ddp 3": (3, {}), "zero1 3": (3, dict(FSDP, zero=1)), "zero2 3": (3, dict(FSDP, zero=2)), "zero3 3": (3, FSDP),
    "pp3": (3, dict(pp=3)),
    "ddp 4": (4, dict(micro_batch_size=1)), "hsdp2": (4, dict(FSDP, hsdp=2, micro_batch_size=1)), "zero3 tp2": (4, dict(FSDP, tp=2)), "ddp tp2": (4, dict(tp=2)),
    "zero3 pp2": (4, dict(FSDP, pp=2)), "zero1 pp2": (4, dict(FSDP, pp=2, zero=1)),
    "dp2 tp2 pp2": (8, dict(FSDP, tp=2, pp=2)), "hsdp2 pp2 zero2": (8, dict(FSDP, pp=2, zero=2, hsdp=2, micro_batch_size=1)),
}
SHAPE = ("--n_layer=3 --n_head=4 --n_kv_head=2 --n_embd=32 --n_inner=64 --block_size=16 --batch_tokens=192 --vocab_size=264 "
         "--micro_batch_size=2 --tie_embeddings=False --recompute=full --device=cpu --dtype=fp32 --compile=False --threads=1").split()
ENDS = SimpleNamespace(bos_id=256, eos_id=257)


def config_of(*words, **keys):
    return configure(vars(script), [*SHAPE, *words, *(f"--{name}={value}" for name, value in keys.items())])


def step_data(number):
    """A step's sequences: 12 of 16 tokens, with targets of which some count, in few of the sequences most."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 256, (12, 17), generator=generator)
    share = torch.linspace(0.05, 1, 12)[torch.randperm(12, generator=generator)]
    return ids[:, :-1], ids[:, 1:], (torch.rand(12, 16, generator=generator) < share[:, None]).float()


def digest(model, optimizers):
    """Of all weights and moments, whole, by name; {name: sha256} of this rank's stage."""
    tensors = checkpoint._tensors({"model": model}, {"model": optimizers})
    return {name: hashlib.sha256(whole(t).contiguous().numpy().tobytes()).hexdigest() for name, t in tensors.items()}


def steps(config, setup, count=3, overflow=None):
    """Losses and gradient norms of the first steps; initial weights, and the first gradients before and after clipping,
    whole and by name; how often the ranks met in the first step. overflow: number of a step in which rank 1 has an
    infinite gradient, while all losses are finite."""
    setup = replace(setup, dtype=parallel.dtype_named(config.dtype, setup.device))
    shape = ModelConfig(**{key: getattr(config, key) for key in ModelConfig.__dataclass_fields__})
    layout, problems = divide(config, shape, setup.world)
    assert not problems, problems
    setup = join(setup, layout)
    module = build(lambda: Llama(shape), setup, 1, config.compile)
    module.n_tokens = 263
    gather = lambda of: {name: whole(of(p)).detach().clone() for name, p in module.named_parameters()}
    found = {"losses": [], "norms": [], "moved": [], "initial": gather(lambda p: p)}
    optimizers = optimizers_of(module, 1e-2, config.matrix_learning_rate, 0.1)
    model, scaled = wrapped(module, setup), LossScale(setup.dtype)
    losses_of = script.losses_of

    def overflowing(*words):
        objectives = (found := losses_of(*words))[0]
        if not torch.is_tensor(found):
            objectives.register_hook(lambda gradient: gradient * float("inf"))
        return found
    for number in range(count):
        shares = list(zip(*(parallel.my_share(part, layout.micro, setup) for part in step_data(number))))
        bad = overflow == number and setup.rank == 1
        counting = Met(getattr(module.model, "embed_tokens", None)) if number == 0 else contextlib.nullcontext()
        with mock.patch.object(script, "losses_of", overflowing if bad else losses_of), counting:
            total = script.forward_backward(model, shares, config, ENDS, setup, [], scaled.value)
        if number == 0:
            found["met"] = {kind: often for kind, (often, _) in counting.counts.items()} | {"early": counting.early}
            found["gradients"] = gather(lambda p: p.grad)
        norm = clip(model.parameters(), 0.1, setup, scaled.value)
        if number == 0:
            found["clipped"] = gather(lambda p: p.grad)
        before = gather(lambda p: p) if overflow else {}
        if not scaled.overflowed(total[0].item(), norm.item()):
            for optimizer in optimizers:
                optimizer.step()
        after = gather(lambda p: p) if overflow else {}
        found["moved"].append(any(not torch.equal(before[name], after[name]) for name in before))
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=not layout.in_buckets)
        found["losses"].append(total[0].item())
        found["norms"].append(norm.item())
    found["scale"] = scaled.value
    found["counted"] = sorted({int(state["step"]) for optimizer in optimizers for state in optimizer.state.values() if "step" in state})
    return found


RUNS = {                                                # of train.py: as in LAYOUTS, or other keys
    "zero3": dict(FSDP, watch_stats=3), "tp2": dict(tp=2, watch_stats=3), "zero3 muon": dict(FSDP, matrix_learning_rate=0.02),
    "zero1 fp16": dict(FSDP, zero=1, dtype="fp16"), "zero3 bf16 compiled": dict(FSDP, dtype="bf16", compile=True),
    "pp2 fp16": dict(pp=2, dtype="fp16"), "tp2 bf16 compiled": dict(tp=2, dtype="bf16", compile=True),
}
OFTEN = dict(max_steps=6, eval_every=3, eval_blocks=13, log_every=1, save_light=3, save_full=3, keep=0, batch_tokens=128,
             learning_rate=3e-3, log_blocks=True, log_samples=True)


def runs(name, folder, setup, **keys):
    """train.py on FOLDER/data into FOLDER/NAME. Keeps the digests of what was loaded and of what was saved last."""
    keys = {**(RUNS.get(name) or LAYOUTS.get(name, (1, {}))[1]), **keys}
    config = config_of(f"--data_dir={folder}/data", f"--out_dir={folder}/{name}", **{**OFTEN, **keys})
    setup = replace(setup, dtype=parallel.dtype_named(config.dtype, setup.device))
    found, end, go_on = {}, script.end_step, script.ladder.go_on

    def saved(run, done, total, config, modules, moments, *more):
        if done % config.save_full == 0:
            found["saved"] = digest(modules["model"], moments["model"])
        return end(run, done, total, config, modules, moments, *more)

    def loaded(run, modules, moments, *more, **further):
        state = go_on(run, modules, moments, *more, **further)
        found["loaded"] = digest(modules["model"], moments["model"])
        return state
    with mock.patch.multiple(script, end_step=saved, finish=lambda setup: None), \
            mock.patch.object(script.ladder, "go_on", loaded):
        script.pretrain(config, setup, SimpleNamespace(asked=0), SimpleNamespace(watch=lambda *_: None))
    return found


def main(what, folder, names, *words):
    setup = parallel.start("cpu", "fp32", True, 1)
    keys = dict(word.split("=", 1) for word in words)
    for name in names.split(","):
        if what == "steps":
            found = steps(config_of(**LAYOUTS[name][1]), setup, **(dict(count=4, overflow=2) if "overflow" in name else {}))
        else:
            found = runs(name, folder, setup, **keys)
        torch.save(found, f"{folder}/{name}.{setup.rank}")
        dist.barrier()
    parallel.finish(setup)


if __name__ == "__main__":
    main(*sys.argv[1:])
