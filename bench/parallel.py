"""
What it costs that ranks talk: a step of train.py in several layouts beside the same step by ranks that do not.

    torchrun --nproc_per_node=2 bench/parallel.py
    torchrun --nproc_per_node=2 bench/parallel.py --layouts=ddp,zero1,zero2,zero3,tp,pp --rounds=5

All layouts train the same model on the same tokens of a step, in turns. `alone`: each rank takes its share of the
sequences and nobody waits for anybody, so the same arithmetic loads the machine (tp and pp share out the model and not
the sequences). Counted are the collectives of one rank in a step, and the bytes of the whole tensors in them; `early`
are those of gradients that begin while the backward pass still computes others.
"""
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import train
from configurator import configure, refuse
from engine import parallel
from engine.layout import build, join, wrapped
from engine.optim import clip, optimizers_of
from model import Llama, ModelConfig
from timing import Met, in_turns, ratio

layouts: list[str] = ["ddp", "zero1", "zero2", "zero3"]      # and tp, pp
sequences = 16                  # of a step, over all ranks, 256 tokens each
micro = 4                       # of a micro-batch
rounds = 7
device = "auto"
dtype = "auto"
threads = 0

SHAPE = dict(vocab_size=4096, n_layer=6, n_head=6, n_kv_head=6, n_embd=384, n_inner=1024, block_size=256)


def keys_of(name, world):
    known = {"alone": {}, "ddp": {}, **{f"zero{n}": dict(parallel="fsdp", zero=n) for n in (1, 2, 3)}, "tp": dict(tp=world),
             "pp": dict(pp=world)}
    if name not in known:
        refuse(f"layouts: {name!r} is none of {', '.join(list(known)[1:])}")
    return known[name]


def step_of(name, config, setup):
    """A function that does a step of train.py in that layout, -> the loss; and the model's embedding."""
    words = [f"--{key}={value}" for key, value in keys_of(name, setup.world).items()]
    asked = configure(vars(train), [*words, f"--batch_tokens={config.sequences * 256}", f"--micro_batch_size={config.micro}",
                                    *(f"--{key}={value}" for key, value in SHAPE.items())])
    shape, everything = ModelConfig(**SHAPE), torch.Generator().manual_seed(1)
    layout, problems = parallel.divide(asked, shape, setup.world)
    refuse(*problems)
    mine = join(setup, layout)
    ids = torch.randint(0, 4096, (config.sequences, 257), generator=everything)
    shares = [part.to(setup.device) for part in parallel.my_share(ids, layout.micro, mine)]
    if name == "alone":
        mine = replace(setup, rank=0, world=1)
        mine = join(mine, replace(layout, replicas=1))
    batches = [(part[:, :-1], part[:, 1:], torch.ones(part[:, 1:].shape, device=setup.device)) for part in shares]
    module = build(lambda: Llama(shape), mine, 1, compiled=True)
    optimizers = optimizers_of(module, 1e-3, 0.0, 0.1)
    model, ends = wrapped(module, mine), SimpleNamespace(bos_id=0, eos_id=1)
    settings = SimpleNamespace(loss_chunk=0, z_loss=0.0, separate_documents=False)

    def step():
        total = train.forward_backward(model, batches, settings, ends, mine)
        clip(model.parameters(), 1.0, mine)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not mine.layout.in_buckets)
        return total[0].item()
    return step, getattr(module.model, "embed_tokens", None)


def main(config):
    setup = parallel.start(config.device, config.dtype, None, config.threads, 1)
    if setup.world == 1:
        refuse("one process talks to nobody: torchrun --nproc_per_node=2 bench/parallel.py")
    names = ["alone", *config.layouts]
    works, met, early = {}, {}, {}
    for name in names:
        works[name], first = step_of(name, config, setup)
        works[name]()                       # compiles, and makes the moments
        with Met(first) as counted:
            works[name]()
        met[name], early[name] = counted.counts, counted.early
    times = in_turns(works, config.rounds, setup.device, warm_up=1)
    setup.say(f"torch {torch.__version__}, {setup.world} processes on {setup.device.type}, {setup.threads} threads "
              f"each, {str(setup.dtype)[6:]}; 14 million parameters, {config.sequences} x 256 tokens a step\n\n"
              "| layout | ms | time / alone | all-gathers | reduce-scatters | all-reduces | early | MB "
              "|\n|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in names:
        counts = [met[name].get(kind, (0, 0)) for kind in ("allgather", "reduce_scatter", "allreduce")]
        often = " | ".join(str(count) for count, _ in counts)
        setup.say(f"| {name} | {1000 * statistics.median(times[name]):.0f} | {ratio(times, name, 'alone'):.2f} | "
                  f"{often} | {early[name]} | {sum(size for _, size in met[name].values()) / 1e6:.0f} |")
    parallel.finish(setup)


if __name__ == "__main__":
    main(configure(globals()))
