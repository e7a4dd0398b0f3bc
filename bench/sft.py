"""
Tokens a second that carry loss: packed rows and buckets of a token budget against padded rows; LoRA and adapters
against full tuning in time, memory and, by learning rate, loss.

    python bench/sft.py
    python bench/sft.py --n_embd=768 --n_layer=12 --batch_size=256 --micro_tokens=16384          for one GPU
    python bench/sft.py --init_from=out/demo/pretrain --data_dir=data/demo      the learning rates, with sft.py itself

The lengths are long-tailed (log-normal): most conversations are short, few are ten times as long, and of each the last
third is the answer. A step is the same conversations in all forms, one forward and backward pass and AdamW's step, in
turns; ratios are medians over the rounds, to padded rows in the order in which they were drawn. 'sorted' are padded
rows with sft.py's `window`. `full` pads all to max_length, as many trainers do.
The second table is of packed steps. Memory: weights, gradients, AdamW's moments, and what the forward pass of one
micro-batch leaves for the backward pass.
The third is of short runs of sft.py from one model: its held-out loss for each way and peak learning rate.
"""
import contextlib
import io
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import sft
from configurator import configure
from engine import parallel
from engine.files import read_json
from engine.optim import adamw
from engine.packing import plan
from model import Llama, ModelConfig
from techniques import adapters, lora
from timing import in_turns, ratio

n_layer = 4
n_head = 4
n_embd = 256
n_inner = 704
vocab_size = 2048
max_length = 512
median_length = 48              # of the conversations
spread = 0.9                    # of their lengths' logarithms
batch_size = 16
micro_batch_size = 16
micro_tokens = 2048
window = 16
lora_rank = 8
adapter_size = 16
init_from = ""                  # a model: learning rates are tried on it instead
data_dir = "data/demo"
rates: tuple[float] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
tune_steps = 30                 # of 16 conversations
recompute = "none"
compile = False
steps = 2                       # different ones, each round does one
rounds = 4
device = "auto"
dtype = "auto"
threads = 0
seed = 1


def bytes_for_backward(model, batch, setup):
    """What the forward pass of one micro-batch keeps, weights not counted."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = sft.weighted_losses(model, *batch[:3], setup, 0, None, *batch[3:]).sum()
    loss.backward()
    model.zero_grad(set_to_none=True)
    return sum(kept.values())


def ways(config):
    return {"all weights": {}, f"LoRA, rank {config.lora_rank}": dict(lora_rank=config.lora_rank, lora_alpha=2.0 * config.lora_rank),
            f"adapters of {config.adapter_size}": dict(adapter_size=config.adapter_size)}


def try_rates(config):
    print(f"held-out loss after {config.tune_steps} steps\n{'':<18}" + "".join(f"{rate:>10g}" for rate in config.rates), flush=True)
    for name, keys in ways(config).items():
        print(f"{name:<18}", end="", flush=True)
        for rate in config.rates:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                shared = {key: getattr(config, key) for key in (
                    "init_from", "data_dir", "micro_tokens", "device", "dtype", "threads", "seed")}
                keys = {**keys, **shared, "out_dir": folder, "learning_rate": rate, "max_steps": config.tune_steps, "batch_size": 16,
                        "eval_conversations": 64, "batching": "packed", "eval_answers": 0, "save_full": 0, "attention": "fp32"}
                sft.main(configure(vars(sft), [f"--{key}={value}" for key, value in keys.items()]))
                loss = read_json(f"{folder}/sft/result.json")["val_loss"]
            print(f"{loss:>10.3f}", end="", flush=True)
        print(flush=True)


def main(config):
    if config.init_from:
        return try_rates(config)
    setup = parallel.start(config.device, config.dtype, None, config.threads, config.seed)
    rng = np.random.default_rng(config.seed)
    lengths = np.exp(rng.normal(np.log(config.median_length), config.spread, config.batch_size * config.window * 4))
    lengths = np.clip(lengths.astype(int), 4, config.max_length)
    talks = [(rng.integers(0, config.vocab_size, n + 1), (np.arange(n + 1) > n * 2 // 3).astype(np.float32)) for n in lengths]

    def tuned(lora_rank=0, lora_alpha=0.0, adapter_size=0):
        shape = ModelConfig(config.vocab_size, config.n_layer, config.n_head, config.n_head, config.n_embd, config.n_inner,
                            config.max_length, tie_embeddings=True, recompute=config.recompute, adapter_size=adapter_size)
        model = Llama(shape).init_weights(config.seed)
        if lora_rank:
            lora.add(model, lora_rank, lora_alpha)
        elif adapter_size:
            adapters.freeze(model)
        model.to(setup.device).train()
        parallel.compile_blocks(model, setup, config.compile, dynamic=True)
        return model, adamw(model, 1e-4, 0.0)

    def batches(batching, numbers, full=False):
        how = SimpleNamespace(batching=batching, micro_batch_size=config.micro_batch_size, micro_tokens=config.micro_tokens)
        made = sft.micro_batches(talks, numbers, how, 0, setup)
        if full:
            made = [tuple(torch.nn.functional.pad(part, (0, config.max_length - part.size(1))) for part in batch) for batch in made]
        return made

    order = lambda window: plan(lengths + 1, [len(talks)], [len(talks)], config.batch_size, window, config.seed, 0)[:config.steps]
    drawn, together = order(1), order(config.window)
    forms = {"full": [batches("padded", step, full=True) for step in drawn],
             "padded": [batches("padded", step) for step in drawn], "sorted": [batches("padded", step) for step in together],
             "buckets": [batches("buckets", step) for step in drawn], "packed": [batches("packed", step) for step in drawn]}
    carried = {name: sum(float((w > 0).sum()) for step in of for _, _, w, *_ in step) / config.steps for name, of in forms.items()}
    filled = {name: sum(lengths[step].sum() for step in (together if name == "sorted" else drawn))
              / sum(x.numel() for step in of for x, *_ in step) for name, of in forms.items()}

    def work(model, optimizer, form, at=[0]):
        def step():
            at[0] += 1
            sft.forward_backward(model, form[at[0] % config.steps], -1, setup)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return step

    model, optimizer = tuned()
    times = in_turns({name: work(model, optimizer, form, [0]) for name, form in forms.items()}, config.rounds, setup.device, warm_up=1)
    print(f"torch {torch.__version__}, {setup.device}, {str(setup.dtype)[6:]}, {setup.threads} threads; "
          f"{config.n_layer} layers of {config.n_embd}, {config.batch_size} conversations a step, {lengths.mean():.0f} "
          f"tokens on average, {lengths.max()} at most\n"
          f"{'':<10}{'ms a step':>12}{'padding':>10}{'tokens/s with loss':>22}{'x padded':>10}")
    speed = {name: [carried[name] / seconds for seconds in times[name]] for name in forms}
    for name in forms:
        print(f"{name:<10}{1000 * statistics.median(times[name]):>12.0f}{1 - filled[name]:>10.0%}"
              f"{statistics.median(speed[name]):>22,.0f}{ratio(speed, name, 'padded'):>10.2f}")

    pairs = {name: tuned(**keys) if keys else (model, optimizer) for name, keys in ways(config).items()}
    times = in_turns({name: work(*pair, forms["packed"], [0]) for name, pair in pairs.items()}, config.rounds, setup.device, warm_up=1)
    print(f"\n{'':<18}{'ms a step':>10}{'x all':>8}{'trained':>12}{'weights, MB':>14}{'gradients':>11}{'moments':>9}{'activations':>13}{'together':>10}")
    for name, (model, _) in pairs.items():
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        parts = [4 * model.n_params(), 4 * trained, 8 * trained, bytes_for_backward(model, forms["packed"][0][0], setup)]
        print(f"{name:<18}{1000 * statistics.median(times[name]):>10.0f}{ratio(times, name, 'all weights'):>8.2f}{trained:>12,}"
              + "".join(f"{size / 1e6:>{width}.1f}" for size, width in zip([*parts, sum(parts)], (14, 11, 9, 13, 10))))


if __name__ == "__main__":
    main(configure(globals()))
