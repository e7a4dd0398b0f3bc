"""
How fast a step of training is: train.py's own, beside a GPT-2 in fp32 and transformers' Llama, and beside the machine.

    python bench/train.py                                   6 layers of 384 (14 million parameters), with the peers
    python bench/train.py --nanogpt=DIR                     nanoGPT's model from a checkout, for the GPT-2
    python bench/train.py --shape=wide --peers=False --rounds=5          4 layers of 2048
    python bench/train.py --profile=3                       where the time of 3 steps goes

All train on the same tokens and take turns, a step each; ratios are medians over the rounds of their time / our time.
A step is forward, backward, gradients clipped to a norm of 1, and AdamW. Ours is what train.py does by default: on a
CPU deterministic, with freed memory kept (parallel.keep_memory). The peers do neither by themselves, so they have a
process of their own; peers_keep_memory=True gives them the second too. The GPT-2 has as many layers, heads and
channels; it is in fp32, as nanoGPT is on a CPU, eager and compiled. transformers' Llama has our shape and is compiled
whole, once with its weights in bf16, once under autocast as ours, each with the fused AdamW.

MFU: the step's FLOPs over what the product of two bf16 matrices of 4096 x 4096 reaches in the same rounds. Counted are
6 for each token and weight of the layers and the head (the table of embeddings is read, not multiplied) and the causal
half of the attention; nothing for what is computed twice.
"""
import contextlib
import multiprocessing
import statistics
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import gpt
import train
from configurator import configure, refuse
from engine import parallel
from engine.optim import clip, optimizers_of
from model import Llama, ModelConfig
from timing import in_turns, ratio

shape = "14m"                   # '14m' or 'wide'
batch = 16                      # sequences of a step
peers = True                    # False: ours alone
peers_keep_memory = False
nanogpt = ""                    # a checkout of nanoGPT; "": the model in bench/gpt.py
attention = "flash"             # of ours: 'flash' or 'fp32'
profile = 0                     # so many steps under torch's profiler, ours alone; 0: none
rounds = 9
device = "auto"
dtype = "auto"                  # of ours
threads = 0

SHAPES = {
    "14m": dict(n_layer=6, n_head=6, n_kv_head=6, n_embd=384, n_inner=1024),
    "wide": dict(n_layer=4, n_head=16, n_kv_head=16, n_embd=2048, n_inner=5632),
}
COMMON = dict(vocab_size=4096, block_size=256)
PRODUCT = "4096^3"
# Where an operation belongs, by its name: the first that fits.
PARTS = {
    "attention": ("scaled_dot_product", "bmm", "exp_mul"),
    "optimizer": ("adam", "Optimizer", "vector_norm", "foreach", "clip", "zero_grad"),
    "loss": ("log_softmax", "nll_loss"),
    "products": ("::mm", "::addmm", "linear_pointwise", "mkl_linear", "matmul"),
    "norms, RoPE, SwiGLU, sums, casts": ("fused", "triton"),
}


def batch_of(config, device):
    """(inputs, targets), each (B, T), the same in both processes"""
    size, random = (config.batch, COMMON["block_size"] + 1), torch.Generator().manual_seed(1)
    ids = torch.randint(0, COMMON["vocab_size"], size, generator=random).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def our_step(model, x, y, setup):
    """A function that does what a step of train.py does, from a batch to new weights."""
    optimizers = optimizers_of(model, 1e-3, 0.0, 0.1, (0.9, 0.95))
    settings = SimpleNamespace(loss_chunk=0, z_loss=0.0, separate_documents=False)
    tokenizer, weights = SimpleNamespace(bos_id=0, eos_id=1), torch.ones(y.shape, device=y.device)

    def step():
        total = train.forward_backward(model, [(x, y, weights)], settings, tokenizer, setup)
        loss, _ = total[0].item(), clip(model.parameters(), 1.0).item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss
    return step


def gpt_step(compiled, x, y, config, settings):
    model, name = gpt.make(config.nanogpt, n_layer=settings["n_layer"], n_head=settings["n_head"],
                           n_embd=settings["n_embd"], **COMMON)
    model.to(x.device)
    optimizer = gpt.optimizer_of(model, 1e-3)
    run = torch.compile(model) if compiled else model
    return f"{name}, fp32, {'compiled' if compiled else 'eager'}", lambda: gpt.step(run, optimizer, x, y)


def transformers_step(dtype, x, settings):
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=COMMON["vocab_size"], num_hidden_layers=settings["n_layer"], hidden_size=settings["n_embd"],
        num_attention_heads=settings["n_head"], num_key_value_heads=settings["n_kv_head"],
        intermediate_size=settings["n_inner"], max_position_embeddings=COMMON["block_size"], use_cache=False,
        attn_implementation="sdpa")).to(x.device, dtype)
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2]},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model)

    def step():
        with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == torch.float32):
            loss = run(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()
    return step


def serve(pipe, config):
    """The peers' process: tells their names, then does a step of each that it is told."""
    setup = parallel.start(config.device, "fp32", False, config.threads)
    if config.peers_keep_memory:
        parallel.keep_memory(setup)
    settings = SHAPES[config.shape]
    x, y = batch_of(config, setup.device)
    steps = dict(gpt_step(compiled, x, y, config, settings) for compiled in (False, True))
    try:
        for name, kind in (("bf16", torch.bfloat16), ("autocast to bf16", torch.float32)):
            steps[f"transformers' Llama, {name}, compiled"] = transformers_step(kind, x, settings)
    except ImportError:
        print("transformers is not installed (requirements-test.txt): without it")
    pipe.send(list(steps))
    with contextlib.suppress(EOFError):             # the other process has ended
        while True:
            pipe.send(steps[pipe.recv()]())


def peers_of(config):
    """{name: function that has a step done in the peers' process}; the process ends with this one."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    context.Process(target=serve, args=(theirs, SimpleNamespace(**dict(config.items()))), daemon=True).start()
    theirs.close()              # so that a failure of the other process is the end of this one, too

    def ask(name):
        pipe.send(name)
        return pipe.recv()
    return {name: partial(ask, name) for name in pipe.recv()}


def show_profile(step, config, setup):
    """Prints the share of each of PARTS in the time of a step, and the largest operations."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled
    for _ in range(2):
        step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (setup.device.type == "cuda")
    with profiled(activities=activities) as found:
        for _ in range(config.profile):
            step()
    kind = "self_device_time_total" if setup.device.type == "cuda" else "self_cpu_time_total"
    spent = {event.key: getattr(event, kind) / 1000 / config.profile for event in found.key_averages()}
    shares = dict.fromkeys([*PARTS, "the rest"], 0.0)
    for name, milliseconds in spent.items():
        part = next((part for part, words in PARTS.items() if any(word in name for word in words)), "the rest")
        shares[part] += milliseconds
    whole = sum(shares.values())
    print(f"\n| part of a step of {whole:.0f} ms under the profiler | ms | share |\n|---|---:|---:|")
    for part, milliseconds in shares.items():
        print(f"| {part} | {milliseconds:.1f} | {milliseconds / whole:.0%} |")
    print("\nthe largest operations, ms a step")
    for name in sorted(spent, key=spent.get, reverse=True)[:25]:
        print(f"{spent[name]:9.2f}  {name}")


def main(config):
    if config.shape not in SHAPES:
        refuse(f"shape = {config.shape} is none of {', '.join(SHAPES)}")
    settings = SHAPES[config.shape]
    setup = parallel.start(config.device, config.dtype, None, config.threads, 1)
    parallel.keep_memory(setup)
    model = Llama(ModelConfig(**settings, **COMMON, attention=config.attention)).init_weights(1).to(setup.device)
    if config.profile and setup.device.type == "cpu":
        from torch._inductor.config import cpp
        cpp.enable_kernel_profile = True        # compiled loops by their names
    parallel.compile_blocks(model, setup, True)
    x, y = batch_of(config, setup.device)
    ours = our_step(model, x, y, setup)
    print(f"torch {torch.__version__}, {setup.device}, {setup.threads} threads; {model.n_params():,} parameters, "
          f"{settings['n_layer']} layers of {settings['n_embd']}, {config.batch} x {COMMON['block_size']} tokens a "
          "step")
    if config.profile:
        return show_profile(ours, config, setup)
    left, right = (torch.randn(4096, 4096, device=setup.device).bfloat16() for _ in range(2))
    # Five in a row: the first after a step of many seconds finds neither its memory nor its kernel where it left them.
    works = {PRODUCT: lambda: [left @ right for _ in range(5)], "ours": ours}
    works |= peers_of(config) if config.peers else {}
    times = in_turns(works, config.rounds, setup.device)
    head_and_layers = model.n_params() - model.model.embed_tokens.weight.numel()
    flops = 6 * x.numel() * (head_and_layers + settings["n_layer"] * settings["n_embd"] * COMMON["block_size"])
    product = 5 * 2 * 4096 ** 3 / statistics.median(times[PRODUCT])
    mfu = flops / (5 * 2 * 4096 ** 3) * ratio(times, PRODUCT, "ours")
    print(f"bf16 product of 4096 x 4096 matrices: {product / 1e12:.2f} TFLOP/s; our step: "
          f"{flops / statistics.median(times['ours']) / 1e12:.2f} TFLOP/s, MFU {mfu:.1%}\n\n"
          "| step | ms | tokens/s | time / ours |\n|---|---:|---:|---:|")
    for name in list(works)[1:]:
        seconds = statistics.median(times[name])
        print(f"| {name} | {1000 * seconds:.0f} | {x.numel() / seconds:,.0f} | {ratio(times, name, 'ours'):.2f} |")


if __name__ == "__main__":
    main(configure(globals()))
