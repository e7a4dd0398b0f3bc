"""
Quality beside speed: characters of Shakespeare with nanoGPT's settings for a CPU, our Llama beside a GPT-2.

    python bench/quality.py --text=shakespeare.txt                          karpathy/char-rnn's data/tinyshakespeare
    python bench/quality.py --text=shakespeare.txt --nanogpt=DIR            nanoGPT's model from a checkout
    python bench/quality.py --text=shakespeare.txt --runs='ours 4e-3' --seeds=7,          one more run

4 layers of 128, 4 heads, blocks of 64, 12 a step, 2,000 steps, AdamW with beta2 0.99 and decay 0.1, no dropout; 100
steps of warm-up, then a cosine down to a tenth. The first nine tenths of the text are learned from. All see the same
windows of it, drawn anew for each seed, and are measured on the same held-out characters: all that there are, in blocks
of 64. Ours has a SwiGLU of 344, which makes 800,000 parameters; the GPT-2 has 804,096. Ours is trained by train.py's
functions, the GPT-2 as nanoGPT trains it on a CPU: fp32, eager.

A run is `gpt RATE`, `ours RATE` or `ours RATE RATE-OF-MATRICES` (Muon). Its result is kept in out_dir; a run that is
there is not done again, and the table is of all that are there. Seconds are those of the training steps without the
first, in which compilation falls, and without the measuring.
"""
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

import gpt
import train
from configurator import configure, refuse
from engine import parallel
from engine.files import read_json, write_json
from engine.optim import clip, lr_at, optimizers_of, set_lr
from model import Llama, ModelConfig

text = ""                       # the file; without it there is nothing to do
nanogpt = ""                    # a checkout of nanoGPT; "": the model in bench/gpt.py
runs: tuple[str] = ("gpt 1e-3", "ours 2e-3", "ours 4e-3 0.02")
seeds: tuple[int] = (1, 2, 3)
out_dir = "out/quality"
target = 1.886                  # held-out loss: nanoGPT's after 2,000 steps, once
max_steps = 2000
measure_every = 100             # steps
attention = "flash"             # of ours
compile = True                  # ours
dtype = "auto"                  # of ours
threads = 0

SHAPE = dict(n_layer=4, n_head=4, n_embd=128, block_size=64)
N_INNER, BATCH, BETAS, DECAY, WARMUP = 344, 12, (0.9, 0.99), 0.1, 100


def read_characters(path):
    """(ids of the first nine tenths, ids of the rest, how many different characters)"""
    characters = Path(path).read_text(encoding="utf-8")
    number = {character: i for i, character in enumerate(sorted(set(characters)))}
    ids = torch.tensor([number[character] for character in characters])
    cut = int(0.9 * len(ids))
    return ids[:cut], ids[cut:], len(number)


def windows(ids, starts):
    """(inputs, targets), each (len(starts), block_size)"""
    rows = torch.stack([ids[start:start + SHAPE["block_size"] + 1] for start in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@torch.no_grad()
def held_out_loss(logits_of, ids):
    """Mean loss over all blocks of the held-out text, in fp32."""
    size = SHAPE["block_size"]
    x, y = windows(ids, torch.arange(0, len(ids) - size, size))
    return sum(F.cross_entropy(logits_of(x[i:i + 128], y[i:i + 128]).flatten(0, 1), y[i:i + 128].flatten(),
                               reduction="sum").item() for i in range(0, len(x), 128)) / y.numel()


def ours(rates, seed, n_tokens, config, setup):
    """(model, optimizers, step(x, y), logits_of(x, y)) of our Llama."""
    shape = ModelConfig(n_tokens, n_kv_head=SHAPE["n_head"], n_inner=N_INNER, tie_embeddings=True,
                        attention=config.attention, **SHAPE)
    model = Llama(shape).init_weights(seed)
    parallel.compile_blocks(model, setup, config.compile)
    optimizers = optimizers_of(model, rates[0], rates[1] if len(rates) > 1 else 0.0, DECAY, BETAS)
    settings = SimpleNamespace(loss_chunk=0, z_loss=0.0, separate_documents=False)
    no_tokens = SimpleNamespace(bos_id=-1, eos_id=-1)
    ones = torch.ones(BATCH, SHAPE["block_size"])

    def step(x, y):
        total = train.forward_backward(model, [(x, y, ones)], settings, no_tokens, setup)
        clip(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total[0].item()
    return model, optimizers, step, lambda x, y: model(x)


def theirs(rates, seed, n_tokens, config):
    torch.manual_seed(seed)
    model, _ = gpt.make(config.nanogpt, vocab_size=n_tokens, **SHAPE)
    optimizer = gpt.optimizer_of(model, rates[0], DECAY, BETAS)
    return model, [optimizer], lambda x, y: gpt.step(model, optimizer, x, y), lambda x, y: model(x, y)[0]


def train_once(run, seed, config, setup, learned, held_out, n_tokens):
    """One run from random weights to the end; -> its result."""
    kind, *rates = run.split()
    rates = [float(rate) for rate in rates]
    model, optimizers, step, logits_of = (ours(rates, seed, n_tokens, config, setup) if kind == "ours" else
                                          theirs(rates, seed, n_tokens, config))
    torch.use_deterministic_algorithms(kind == "ours")      # what train.py does by default, and nanoGPT does not
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(learned) - SHAPE["block_size"], (config.max_steps, BATCH), generator=generator)
    seconds, first, curve = 0.0, 0.0, []
    for done in range(1, config.max_steps + 1):
        began = time.perf_counter()
        x, y = windows(learned, starts[done - 1])
        for optimizer in optimizers:
            set_lr(optimizer, lr_at(done - 1, config.max_steps, rates[0], WARMUP))
        step(x, y)
        taken = time.perf_counter() - began
        first, seconds = (taken, 0.0) if done == 1 else (first, seconds + taken)
        if done % config.measure_every == 0:
            model.eval()
            curve.append((done, held_out_loss(logits_of, held_out), seconds))
            model.train()
    return {"run": run, "seed": seed, "parameters": sum(p.numel() for p in model.parameters()), "curve": curve,
            "first_step": first, "loss": curve[-1][1]}


def show(folder, target):
    """Prints a line for each run of which there are results."""
    results = {}
    for path in sorted(folder.glob("*.json")):
        found = read_json(path)
        results.setdefault(found["run"], []).append(found)
    print(f"| run | parameters | held-out loss | seeds | mean | step, seconds at {target} | ms a step |\n"
          "|---|---:|---|---|---:|---|---:|")
    for run, found in results.items():
        found.sort(key=lambda result: result["seed"])
        reached = [next((f"{step}: {seconds:.0f}" for step, loss, seconds in result["curve"] if loss <= target), "-")
                   for result in found]
        pace = statistics.median(1000 * r["curve"][-1][2] / (r["curve"][-1][0] - 1) for r in found)
        losses = [result["loss"] for result in found]
        cells = [run, f"{found[0]['parameters']:,}", ", ".join(f"{loss:.3f}" for loss in losses),
                 ", ".join(str(result["seed"]) for result in found), f"{statistics.mean(losses):.3f}",
                 ", ".join(reached), f"{pace:.1f}"]
        print("| " + " | ".join(cells) + " |")


def main(config):
    if not config.text or not Path(config.text).exists():
        print(f"text = {config.text!r} is no file, so there is nothing to do. What is wanted is "
              "data/tinyshakespeare/input.txt of karpathy/char-rnn.")
        return
    refuse(*[f"runs: {run!r} is not 'gpt RATE', 'ours RATE' or 'ours RATE RATE'" for run in config.runs
             if run.split()[0] not in ("gpt", "ours") or len(run.split()) not in (2, 3)],
           *config.below_one("max_steps", "measure_every"))
    setup = parallel.start("cpu", config.dtype, None, config.threads)
    learned, held_out, n_tokens = read_characters(config.text)
    folder = Path(config.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for seed in config.seeds:
        for run in config.runs:
            path = folder / f"{run.replace(' ', '_')}_seed_{seed}.json"
            if path.exists():
                continue
            result = train_once(run, seed, config, setup, learned, held_out, n_tokens)
            write_json(path, result)
            print(f"{run}, seed {seed}: {result['loss']:.4f}, {result['curve'][-1][2]:.0f} s", flush=True)
    show(folder, config.target)


if __name__ == "__main__":
    main(configure(globals()))
