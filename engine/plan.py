"""
What a run needs and takes, told before it is paid for: `python train.py config/llama2_7b.py --plan=8`. It needs no
GPU and no data: memory is that of engine/fake.py and engine/memory.py, time and traffic are arithmetic from what
stands in the next lines.
"""
import math
from dataclasses import replace

import torch

from configurator import Config, refuse
from engine.fake import measure, measure_deep
from engine.gauges import flops_per_token
from engine.memory import COMPONENTS, GIB, STATES, arithmetic, dtype_of, numbers_of, total
from engine.parallel import divide
from engine.preflight import kept_at_once
from model import Llama

# One GPU, from NVIDIA's data sheets: FLOP/s in bf16 (dense), bytes, bytes/s each way over NVLink, and over the network
# adapter that the maker's own machine (DGX) has for each GPU: 200 Gb/s InfiniBand beside A100, 400
# Gb/s beside the others.
GPUS = {"A100": (312e12, 80e9, 300e9, 25e9), "H100": (989.4e12, 80e9, 450e9, 50e9),
        "H200": (989.4e12, 141e9, 450e9, 50e9)}
PER_NODE = 8
# What torch does not count: CUDA's context, NCCL's and cuBLAS's buffers, room between blocks that fits nothing. A
# guess.
UNCOUNTED = 4 * GIB
# Of 16,384 H100s, or of what belongs to them, something failed 419 times in 54 days (Llama 3, arXiv 2407.21783, 3.3.4).
GPU_HOURS_TO_FAILURE = 54 * 24 * 16384 / 419
PCIE = 20e9                     # bytes/s from a GPU to its host, PCIe 4 x16: the copy that stops the loop in a full save
MFUS = (0.3, 0.4, 0.45, 0.5, 0.55, 1.0)
USUAL = 0.45                    # MFU with which what needs one time is said
DAY = 86400


def changed(config, **changes):
    """A Config with other values."""
    return Config(config.script, {**dict(config.items()), **changes}, config.files, config._overrides, config._schemas)


def plan_problems(config):
    found = config.outside(plan=(1,), plan_disk=(0.001,))
    if config.plan_gpu not in GPUS:
        found.append(f"plan_gpu must be one of {', '.join(GPUS)}, found '{config.plan_gpu}'")
    return found


def announce(config, shape, step):
    """Prints the plan for config.plan GPUs. step(config, model, micro_batches, setup): train.py's forward and
    backward."""
    layout, problems = divide(config, shape, config.plan)
    refuse(*plan_problems(config), *shape.problems(), *problems)
    config = changed(config, separate_documents=False)            # one by one they take no more, and nobody knows how many
    with torch.device("meta"):
        n = Llama(shape).n_params()
    flops, (peak, memory, *_) = flops_per_token(shape, n), GPUS[config.plan_gpu]
    print(f"plan        {config.plan} x {config.plan_gpu} ({peak / 1e12:,.0f} TFLOP/s in bf16, {memory / 1e9:.0f} GB = "
          f"{memory / GIB:.1f} GiB): {layout}, {layout.micro} x {config.block_size} tokens at a time, "
          f"{layout.n_micro} times a step, recompute {shape.recompute}")
    print(f"model       {n:,} parameters; {flops:.3e} FLOPs a token (6 N + 12 L H D S, engine/gauges.py)")
    fullest = memory_of_configured(config, shape, layout, step)
    rows = neighbours(config, shape, step, layout, fullest)
    seconds = flops * config.batch_tokens / (config.plan * peak * USUAL)         # of a step
    tokens = config.max_steps * config.batch_tokens
    print(f"\ntime        {config.max_steps:,} steps of {config.batch_tokens:,} tokens: {tokens:.3e} tokens, "
          f"{tokens * flops:.2e} FLOPs")
    print("  MFU       " + "".join(f"{mfu:>9.0%}" for mfu in MFUS))
    print("  days      " + "".join(f"{tokens * flops / (config.plan * peak * mfu) / DAY:>9.1f}" for mfu in MFUS))
    if layout.pp > 1:
        print("  of each step the pipeline's filling and emptying is "
              f"{(layout.pp - 1) / (layout.n_micro + layout.pp - 1):.1%}")
    busy = links(config, shape, layout, seconds)
    saving = checkpoints(config, n, seconds, layout)
    print("\nadvice")
    for sentence in advice(config, layout, fullest[0], memory - UNCOUNTED, rows, busy, saving, seconds):
        print(f"  - {sentence}")
    print("\n" + why(config, n, flops, peak, tokens))


# ---- memory ----------------------------------------------------------------------------------------------------------

def at_the_peak(config, shape, layout, step, by=measure, stages=None):
    """(bytes, {component: bytes}, at rest, stage, moment) of the fullest rank at its fullest moment. stages: those that
    may be it; by default the first, with most micro-batches on the way, and the last, with the logits."""
    found, per_stage = [], layout.dp * layout.tp
    for stage in stages or {0, layout.pp - 1}:
        rest, moments = by(config, shape, layout, step, stage * per_stage)
        moment = max(moments, key=lambda moment: total(moments[moment]))
        parts = moments[moment]
        if layout.offload:                                        # they are on the host
            parts = {**parts, **dict.fromkeys(STATES, 0)}
        found.append((total(parts), parts, rest, stage, moment))
    return max(found, key=lambda one: one[0])


def memory_of_configured(config, shape, layout, step):
    fullest = size, parts, rest, stage, moment = at_the_peak(config, shape, layout, step)
    counted = arithmetic(config, shape, layout, stage)
    name = f" of stage {stage}" * (layout.pp > 1)
    at = moment if isinstance(moment, str) else f"{moment[0]}, layer {moment[1]}"
    print(f"\nmemory      of a GPU{name}, in GiB; when it is fullest ({at}), at rest, and by arithmetic")
    for name in COMPONENTS:
        own, how = counted[name]
        where = ", on the host" * (layout.offload and name in STATES)
        still = f"{rest[name] / GIB:>9.2f}" if name in rest else " " * 9
        print(f"  {name:<12}{parts[name] / GIB:>9.2f}{still}{own / GIB:>9.2f}   {how}{where}")
    on_host = STATES if layout.offload else ()
    states, by_arithmetic = (sum(parts[name] for name in parts if name not in on_host)
                             for parts in (rest, {name: size for name, (size, _) in counted.items()}))
    print(f"  {'all':<12}{size / GIB:>9.2f}{states / GIB:>9.2f}{by_arithmetic / GIB:>9.2f}   eager; compiled blocks "
          "keep less")
    return fullest


def neighbours(config, shape, step, layout, fullest):
    """Prints and returns [(name, bytes or None)]: the layouts beside the configured one, each by running fewer
    layers."""
    capacity = GPUS[config.plan_gpu][1] - UNCOUNTED
    ways = {"as configured": {}, f"micro_batch_size={2 * layout.micro}": {"micro_batch_size": 2 * layout.micro},
            **({f"micro_batch_size={layout.micro // 2}": {"micro_batch_size": layout.micro // 2}}
               if layout.micro > 1 else {}),
            **{f"recompute={kind}": {"recompute": kind} for kind in ("none", "selective", "full")
               if kind != shape.recompute},
            "parallel=ddp": {"parallel": "ddp", "zero": config.default("zero"), "hsdp": 1, "cpu_offload": False},
            **{f"parallel=fsdp zero={zero}": {"parallel": "fsdp", "zero": zero} for zero in (1, 2, 3)}}
    print(f"\nneighbours  GiB; what fits leaves {UNCOUNTED / GIB:.0f} for CUDA, NCCL and fragments, which are not "
          "counted")
    print(f"  {'':<24}" + "".join(f"{name:>12}" for name in COMPONENTS) + f"{'all':>9}{'left':>8}")
    rows = []
    for name, changes in ways.items():
        if changes and all(getattr(config, key) == value for key, value in changes.items()):
            continue
        other = changed(config, **changes)
        its_shape = replace(shape, recompute=changes.get("recompute", shape.recompute))
        its_layout, problems = divide(other, shape, config.plan)
        if problems:
            print(f"  {name:<24}  {problems[0]}")
            continue
        size, parts, *_ = fullest if not changes else at_the_peak(
            other, its_shape, its_layout, step, measure_deep, [fullest[3]])
        rows.append((name, size))
        left = f"{(capacity - size) / GIB:>8.1f}" if size <= capacity else "  no fit"
        print(f"  {name:<24}" + "".join(f"{parts[component] / GIB:>12.2f}" for component in COMPONENTS)
              + f"{size / GIB:>9.2f}{left}")
    return rows


# ---- what travels ----------------------------------------------------------------------------------------------------

def traffic(config, shape, layout):
    """[(what, bytes that a GPU sends in a step, ranks that share it, how far apart two neighbours among them
    are)] of the first stage. Rings: of what n ranks gather, each sends (n - 1) / n; an all-reduce is a
    reduction and a gathering."""
    own, block, layers = numbers_of(shape, layout)
    b, n, tokens = dtype_of(config).itemsize, layout.n_micro, layout.micro * config.block_size
    share = lambda ranks: (ranks - 1) / ranks
    s, reps, t = layout.shards, layout.replicas, layout.tp
    if layout.plain:
        return [("all-reduce of gradients", 2 * share(layout.dp) * 4 * own, layout.dp, 1)] if layout.dp > 1 else []
    found = []
    if s > 1:
        gatherings = n * (own + layers * block) if layout.zero == 3 else own          # layers forward and backward
        found += [("all-gather of weights", share(s) * b * gatherings, s, t),
                  ("reduce-scatter of gradients", share(s) * 4 * own * (1 if layout.zero == 1 else n), s, t)]
    if reps > 1:
        times = 1 if layout.zero == 1 else n
        found += [("all-reduce over replicas", 2 * share(reps) * 4 * own / s * times, reps, s * t)]
    if t > 1:
        passes = 2 + (shape.recompute == "full")                 # each: two gatherings, two reductions
        found += [("activations in layers (tp)", passes * 4 * layers * n * share(t) * b * tokens * shape.n_embd, t, 1)]
    if layout.pp > 1:
        found += [("activations to the next stage", 2 * n * b * tokens * shape.n_embd / t, 2, layout.dp * t)]
    return found


def links(config, shape, layout, seconds):
    """Prints what travels; -> its share of the time that a step computes."""
    _, _, nvlink, network = GPUS[config.plan_gpu]
    print(f"\nlinks       in a step, which computes for {seconds:,.2f} s at {USUAL:.0%} MFU; {PER_NODE} GPUs a machine")
    busy = 0
    for what, size, ranks, apart in traffic(config, shape, layout):
        link, speed = "NVLink", nvlink
        if ranks * apart > PER_NODE:        # a ring over machines uses the adapters of all its members in one of them
            link, speed = "network", min(nvlink, max(1, min(ranks, PER_NODE // apart)) * network)
        busy += size / speed / seconds
        print(f"  {what:<30}{size / 1e9:>10,.1f} GB a GPU, {ranks} ranks, {link} {speed / 1e9:.0f} GB/s:"
              f"{size / speed:>8.2f} s = {size / speed / seconds:.1%}")
    if not busy:
        print("  nothing travels")
    return busy


# ---- what is saved ---------------------------------------------------------------------------------------------------

def checkpoints(config, n, seconds, layout):
    """Prints sizes and times; -> seconds that a full one takes to write."""
    disk, states = config.plan_disk * 1e9, 8 - 4 * bool(config.matrix_learning_rate)
    full, light = (4 + states) * n, 4 * n
    run = config.max_steps * seconds
    shards = 1 if layout.plain else layout.shards
    stop = full / layout.pp / layout.tp / shards / PCIE if config.async_save else full / disk
    print(f"\ncheckpoints at {config.plan_disk:g} GB/s to the disk (plan_disk); steps of {seconds:,.2f} s")
    for name, size, every, stops in (("light", light, config.save_light, light / disk),
                                     ("full", full, config.save_full, stop)):
        if every:
            share = config.max_steps // every * stops / run
            print(f"  {name:<6}{size / 1e9:>8.1f} GB, {size / disk:,.0f} s to write; every {every:,} steps = "
                  f"{every * seconds / 3600:,.1f} h; the loop stops for {stops:,.1f} s, {share:.3%} of the run")
    kept = kept_at_once(config)
    print(f"  room for what is kept (keep={config.keep}, keep_best={config.keep_best}) and one of each being written: "
          f"{(kept['full'] * full + kept['light'] * light) / 1e9:,.0f} GB"
          if config.keep else "  keep=0: every one of them stays on the disk")
    return full / disk


def advice(config, layout, size, capacity, rows, busy, saving, seconds):
    """Sentences on what to change, most important first. size: bytes of the fullest GPU."""
    found = []
    fitting = [(name, its) for name, its in rows[1:] if its <= capacity]
    if size > capacity:
        found.append(f"it does not fit: {size / GIB:.1f} GiB of {capacity / GIB:.1f}. " + (
            "What does: " + ", ".join(f"{name} ({its / GIB:.1f})" for name, its in fitting) if fitting else
            "Nor does any neighbour: more GPUs, tp, pp or cpu_offload"))
    else:
        found.append(f"it fits, with {(capacity - size) / GIB:.1f} GiB of {(capacity + UNCOUNTED) / GIB:.1f} to spare "
                     f"after {UNCOUNTED / GIB:.0f} for what is not counted"
                     + ": room for no more, --loss_chunk=1024 makes some" * (capacity - size < 0.05 * capacity))
    if layout.tp > PER_NODE:
        found.append(f"tp = {layout.tp} goes beyond a machine of {PER_NODE}: every layer then waits for the network")
    if busy > 1:
        found.append(f"what travels takes {busy:.1f} times as long as what is computed: larger micro-batches, hsdp "
                     "(shards within a machine), zero=2 or 1 where they fit")
    elif busy:
        found.append(f"what travels takes {busy:.0%} of the time that computing does; FSDP and DDP hide it behind "
                     "products, tp does not")
    failure = GPU_HOURS_TO_FAILURE * 3600 / config.plan
    best = math.sqrt(2 * saving * failure)
    found.append(f"{config.plan} GPUs fail once in {failure / DAY:,.1f} days (Llama 3's rate), and then half an "
                 f"interval is lost: with save_full={config.save_full} that is "
                 f"{config.save_full * seconds / 7200:,.1f} h. Least is lost in all at one every {best / 3600:,.1f} h, "
                 f"save_full={max(1, round(best / seconds)):,} (Young 1974: sqrt(2 x {saving:.0f} s x "
                 f"{failure / 3600:,.0f} h))")
    return found


def why(config, n, flops, peak, tokens):
    """The paragraph that explains the days."""
    a_day = config.plan * peak * USUAL * DAY
    few = 20 * n
    return (f"Why {tokens * flops / a_day:,.0f} days? A token costs {flops / 1e9:.1f} GFLOP: two for each of "
            f"{n / 1e9:.2f} billion parameters that is multiplied with\n(a product and a sum) going forward, four "
            f"going back, and attention. {tokens:.2e} tokens make {tokens * flops:.1e} FLOPs. {config.plan} x "
            f"{config.plan_gpu} at\n{USUAL:.0%} of their {peak / 1e12:,.0f} TFLOP/s do {a_day:.1e} a day. Only fewer "
            "tokens, more GPUs or a higher MFU make it less: the layout and the\nbatch only decide which MFU is "
            f"reached. For 20 tokens per parameter ({few:.2e}; Hoffmann et al. 2022, arXiv 2203.15556) it "
            f"is\n{few * flops / a_day:,.1f} days, at 40 % MFU {few * flops / a_day * USUAL / 0.4:,.1f}.")
