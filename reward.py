"""
Stage 5a: a reward model, which reads a prompt with an answer and says how much people would like it.

    python reward.py config/demo.py
    torchrun --nproc_per_node=2 reward.py config/demo.py

Nobody can say how good an answer is on a scale, but nearly everybody can say which of two is better. So the data are
pairs, and the model is the instruction-tuned one with a head of one number, trained so that the chosen answer's number
is higher:

    loss = -log sigmoid(score(chosen) - score(rejected))         Bradley & Terry 1952; Stiennon et al. 2020 (2009.01325)

Reads   data_dir/chat/preferences_{train,val,control}.jsonl, one object a line:
            {"prompt": messages, "chosen": text, "rejected": text, "margin"?: number}     or
            {"prompt": messages, "ranked": [texts, best first]}                  every pair of them counts
        val and control may be missing. Control pairs are equally good and very different in length: a model without a
        taste for length prefers the longer one half the time.
Writes  out_dir/reward/step_N/        the model: a Hugging Face trunk, the head in heads.safetensors beside it
        out_dir/reward/log.jsonl      loss and accuracy of each step
        out_dir/reward/result.json    accuracy on held-out pairs, by how far apart they are, and on control pairs

An interrupted run is continued by the same command; a finished one says that it is done.
"""
import math
import time
from pathlib import Path

import torch

from configurator import configure
from engine import chat, checkpoint, rl
from engine.files import write_json
from engine.generate import generate
from engine.hf import find_folder, read_config, read_model
from engine.monitor import Monitor
from engine.optim import clip, learning_rate_problems, lr_at, optimizers_of, set_lr
from engine.parallel import accumulating, all_sum, barrier, compile_blocks, finish, start, wrap
from engine.run import open_run, refuse_once
from engine.shards import step_blocks
from engine.tokenizer import Tokenizer

data_dir = "data/demo"         # its chat/ holds the preferences
out_dir = "out/demo"           # this stage writes into out_dir/reward
init_from = ""                 # folder of the model to start from; empty: out_dir/sft
seed = 1                       # of the order of the pairs
device = "auto"                # 'auto', 'cpu', 'cuda'
dtype = "auto"                 # of the matrix products: 'auto', 'bf16', 'fp32'
threads = 0                    # of a CPU; 0: the cores of the machine, shared by its processes
deterministic = True           # the same bits in every run
compile = False                # torch.compile, per block; pays in a run of more than some hundred steps
attention = "flash"            # 'flash' or 'fp32'; the explicit one is the faster one for short rows on a CPU
max_pairs = 0                  # how many of the training pairs to use; 0: all
epochs = 1                     # with more than one it learns the pairs by heart
pairs_per_step = 64            # in the global batch
micro_batch_size = 32          # pairs at once on one device
learning_rate = 1e-4           # peak
matrix_learning_rate = 0.0     # above 0: Muon for the layers' matrices with this peak, AdamW for the rest
warmup_share = 0.1             # of all steps
weight_decay = 0.01            # of matrices
grad_clip = 1.0                # largest norm of the gradient
centring = 0.0                 # weight of (chosen + rejected)^2, which holds scores near 0 while they are learned
sft_samples = 256              # answers of the starting model whose scores are made to have mean 0 and deviation 1
max_new_tokens = 64            # of each of them
control_ratio = 1.5            # control pairs count when one has at least this many times the tokens of the other
log_every = 10                 # steps
save_full = 50                 # steps between the checkpoints that a rerun continues from

MARGINS = (0.0, 1.0, 1.5, 2.0, math.inf)     # edges of the buckets in which the accuracy is told


# --- Pairs -----------------------------------------------------------------------------------------------------------

def read_pairs(path, tokenizer, block_size):
    """The pairs of a preference file: a list of {"chosen", "rejected": token ids of the whole dialogue, "prompt": how
    many of them are the prompt, "margin", "gap"}, and the number of pairs that are longer than the model can read.

    A dialogue ends in <|end|>, and that is where it is scored: there the model has read all of the answer and knows
    that it is over."""
    pairs, too_long = [], 0
    for record in chat.read_preferences(path):
        answers = [{"role": "assistant", "content": record[side]} for side in ("chosen", "rejected")]
        chosen, rejected = (chat.render(tokenizer, [*record["prompt"], answer])[0] for answer in answers)
        if max(len(chosen), len(rejected)) > block_size:
            too_long += 1
            continue
        prompt = len(chat.render(tokenizer, record["prompt"], open_assistant=True)[0])
        pairs.append({"chosen": chosen, "rejected": rejected, "prompt": prompt,
                      "margin": record.get("margin", 0.0), "gap": gap_of(record)})
    return pairs, too_long


def gap_of(record):
    """By how much the chosen answer is better, where the file tells; for the report only. NaN where it does not."""
    scores = record.get("scores")
    return scores["chosen"] - scores["rejected"] if scores else record.get("margin", math.nan)


def micro_batches(pairs, setup, size):
    """This rank's share of a step's pairs, in micro-batches of similar length, so that little of them is padding. The
    loss is a sum over pairs, so neither the order within the step nor the cut changes its gradient."""
    by_length = sorted(pairs, key=lambda pair: max(len(pair["chosen"]), len(pair["rejected"])))
    mine = by_length[setup.rank::setup.world]
    return [mine[i:i + size] for i in range(0, len(mine), size)]


# --- Scores ----------------------------------------------------------------------------------------------------------

def score(model, dialogues, pad_id, device):
    """dialogues: lists of token ids -> (B,): what the head says at the last real token of each."""
    width = -(-max(map(len, dialogues)) // 8) * 8      # few different widths, so that memory is reused
    ids = torch.tensor([d + [pad_id] * (width - len(d)) for d in dialogues], device=device)            # (B, T)
    mask = torch.arange(width, device=device) < torch.tensor([[len(d)] for d in dialogues], device=device)
    return rl.at_last(model(ids, mask=mask), mask)


def score_pairs(model, pairs, pad_id, device):
    """-> chosen (B,), rejected (B,). Both sides go through the model in one forward pass: DDP expects one, and so both
    have the same padding and precision."""
    sides = [pair["chosen"] for pair in pairs] + [pair["rejected"] for pair in pairs]
    return score(model, sides, pad_id, device).chunk(2)


@torch.no_grad()
def score_all(model, pairs, pad_id, setup, size):
    """Scores of all pairs, in their order -> chosen (N,), rejected (N,) on the CPU. Each rank scores all: it is
    short."""
    order = sorted(range(len(pairs)), key=lambda i: max(len(pairs[i]["chosen"]), len(pairs[i]["rejected"])))
    scores = torch.zeros(2, len(pairs))
    for i in range(0, len(order), size):
        rows = order[i:i + size]
        with setup.autocast():
            scores[:, rows] = torch.stack(score_pairs(model, [pairs[r] for r in rows], pad_id, setup.device)).cpu()
    return scores[0], scores[1]


# --- Reports ---------------------------------------------------------------------------------------------------------

def report(pairs, chosen, rejected):
    """Accuracy on held-out pairs, in all and by how far apart they are. Ties count half."""
    right, gaps = rl.pair_accuracy(chosen, rejected), torch.tensor([pair["gap"] for pair in pairs])
    buckets = []
    for low, high in zip(MARGINS, MARGINS[1:]):
        inside = (gaps >= low) & (gaps < high)
        if inside.any():
            accuracy = right[inside].mean().item()
            buckets.append({"from": low, "to": high, "pairs": int(inside.sum()), "accuracy": accuracy})
    return {"pairs": len(pairs), "accuracy": right.mean().item(), "by_margin": buckets,
            "loss": rl.ranking_loss(chosen, rejected).mean().item()}


def report_control(pairs, chosen, rejected, ratio):
    """What length does to the score when nothing else differs; over the pairs whose answers differ `ratio` x in
    tokens."""
    lengths = torch.tensor([[len(p["chosen"]) - p["prompt"], len(p["rejected"]) - p["prompt"]] for p in pairs]).float()
    apart = lengths.max(1).values / lengths.min(1).values.clamp(min=1)
    kept = apart >= ratio
    if not kept.any():
        return {"pairs": 0, "left_out": len(pairs)}
    right = rl.pair_accuracy(chosen, rejected)
    longer_preferred = torch.where(lengths[:, 0] > lengths[:, 1], right, 1 - right)
    return {"pairs": int(kept.sum()), "left_out": int((~kept).sum()), "smallest_length_ratio": apart[kept].min().item(),
            "accuracy": right[kept].mean().item(), "prefers_longer": longer_preferred[kept].mean().item()}


@torch.no_grad()
def standardise(model, policy, prompts, tokenizer, config, setup):
    """Moves and scales the head so that the starting model's own answers have scores of mean 0 and standard deviation
    1.

    The loss fixes neither, since it sees differences only. But for PPO a score is then a number of deviations above the
    start, the critic need not chase an offset first, and a clip range of 0.2 means something. Both go into the head's
    weight and bias: kept in a file beside it, a reload by hand would silently lose them."""
    answers = generate(policy, prompts, config.max_new_tokens, chat.stop_ids(tokenizer), seed=config.seed).ids
    dialogues, size = [p + a for p, a in zip(prompts, answers)], config.micro_batch_size
    with setup.autocast():
        scores = torch.cat([score(model, dialogues[i:i + size], tokenizer.pad_id, setup.device)
                            for i in range(0, len(dialogues), size)])
    mean, deviation = scores.mean(), scores.std().clamp(min=1e-6)
    model.score.weight.div_(deviation)
    model.score.bias.sub_(mean).div_(deviation)
    lengths = torch.tensor([float(len(a)) for a in answers], device=scores.device)
    together = torch.corrcoef(torch.stack([scores, lengths]))[0, 1].nan_to_num(0.0)      # all of one length: none
    return {"answers": len(answers), "mean": mean.item(), "deviation": deviation.item(),
            "correlation_with_length": together.item()}


def show(result, folder):
    """The result, for people."""
    if val := result.get("val"):
        print(f"held-out pairs ranked right: {val['accuracy']:.1%} of {val['pairs']}")
        for bucket in val["by_margin"]:
            edges = f"{bucket['from']:.1f} to {bucket['to']:.1f}"
            print(f"    {edges} apart: {bucket['accuracy']:.1%} of {bucket['pairs']}")
    if control := result.get("control"):
        if control["pairs"]:
            print(f"equally good, one at least {control['smallest_length_ratio']:.2f} x as long: the longer one is "
                  f"preferred in {control['prefers_longer']:.1%} of {control['pairs']}")
        if control["pairs"] < 400:
            print(f"note: {control['pairs']} control pairs say little about length; 400 tell it to within 5 %")
    samples = result["sft_samples"]
    print(f"scores of the starting model's answers: mean {samples['mean']:.2f}, deviation {samples['deviation']:.2f}; "
          f"now 0 and 1; correlation with their length {samples['correlation_with_length']:+.2f}")
    print(f"reward: done in {result['seconds']:.0f} s, model in {folder}", flush=True)


# --- The run ---------------------------------------------------------------------------------------------------------

def main(config):
    # 1. Where we are, and whether there is anything left to do.
    setup = start(config.device, config.dtype, config.deterministic, config.threads, config.seed)
    started, data = time.perf_counter(), Path(config.data_dir) / "chat"
    train_file, source = data / "preferences_train.jsonl", find_folder(config.init_from or Path(config.out_dir) / "sft")
    if not train_file.exists():
        refuse_once(setup, f"{train_file} is missing; the demonstration's is made by: {config.command('prepare_chat')}")
    # What is asked of the settings and the pairs, before the folder is bound to them.
    tokenizer, context = Tokenizer.load(source), read_config(source).block_size
    train, too_long = read_pairs(train_file, tokenizer, context)
    train = train[:config.max_pairs or None]
    problems = config.below_one("pairs_per_step", "micro_batch_size", "epochs", "max_new_tokens", "log_every")
    if config.sft_samples < 2:
        problems.append(f"sft_samples must be at least 2, found {config.sft_samples}: one score has no deviation")
    problems += learning_rate_problems(config)
    if len(train) < config.pairs_per_step:
        problems.append(f"{train_file} has {len(train)} usable pairs ({too_long} are longer than the model's "
                        f"{context} tokens), fewer than pairs_per_step = {config.pairs_per_step}")
    if config.pairs_per_step % setup.world:
        problems.append(f"pairs_per_step = {config.pairs_per_step} can not be shared by {setup.world} processes")
    if problems:
        refuse_once(setup, *problems)
    run, lock = open_run(config, "reward", setup, model=source, pairs=train_file)
    if lock is None:
        return

    # 2. The starting model, and its trunk once more under a head of one number.
    policy, _ = read_model(source, attention=config.attention)
    model, _ = read_model(source, kind="scalar", attention=config.attention)
    policy.to(setup.device).eval()
    model.to(setup.device).eval()                                          # dropout would be noise in a difference

    # 3. What it will cost.
    steps = config.epochs * len(train) // config.pairs_per_step
    setup.say(f"reward: {len(train):,} pairs ({too_long} too long), {steps} steps of {config.pairs_per_step}; "
              f"{sum(p.numel() for p in model.parameters()):,} parameters on {setup.device}, {setup.dtype}")

    # 4. Training, from wherever the last full checkpoint stands.
    optimizers = optimizers_of(model, config.learning_rate, config.matrix_learning_rate, config.weight_decay)
    compile_blocks(model, setup, config.compile)
    wrapped = wrap(model, setup)
    state = checkpoint.resume(run, {"model": model}, {"model": optimizers}, setup) or {"step": 0}
    first, before, warmup = state["step"], state.get("seconds", 0.0), int(config.warmup_share * steps)
    monitor = Monitor(run, setup, steps, first, label="reward")
    for step in range(first, steps):
        lr = lr_at(step, steps, config.learning_rate, warmup, "linear", final=0.0)
        batch = [train[i] for i in step_blocks(step, config.pairs_per_step, len(train), config.seed)]
        micros = micro_batches(batch, setup, config.micro_batch_size)
        model.zero_grad(set_to_none=True)
        sums = torch.zeros(2, device=setup.device)                         # loss, pairs ranked right
        for i, micro in enumerate(micros):
            with accumulating(wrapped, last=i == len(micros) - 1), setup.autocast():
                chosen, rejected = score_pairs(wrapped, micro, tokenizer.pad_id, setup.device)
                margin = torch.tensor([pair["margin"] for pair in micro], device=setup.device)
                loss = rl.ranking_loss(chosen, rejected, margin, config.centring).sum()
                # Summed over the pairs of the global step and divided by their number. DDP averages over ranks: *
                # world.
                (loss * setup.world / config.pairs_per_step).backward()
            sums += torch.stack([loss, rl.pair_accuracy(chosen, rejected).sum()]).detach()
        norm = clip(model.parameters(), config.grad_clip).item()
        loss, accuracy = (all_sum(sums, setup) / config.pairs_per_step).tolist()
        if not math.isfinite(loss + norm):
            refuse_once(setup, f"step {step}: loss {loss}, gradient norm {norm}: nothing that could be learned from. "
                        f"The last checkpoint in {run} is as it was; lower --learning_rate, or use --dtype=fp32")
        for optimizer in optimizers:
            set_lr(optimizer, lr)
            optimizer.step()
        monitor.advance()
        if (step + 1) % config.log_every == 0 or step + 1 == steps:
            line = f"loss {loss:.4f}  ranked right {accuracy:.1%}"
            monitor.log(step + 1, line, loss=loss, accuracy=accuracy, lr=lr, grad_norm=norm)
        if config.save_full and (step + 1) % config.save_full == 0 and step + 1 < steps:
            facts = {"seconds": before + time.perf_counter() - started}
            checkpoint.save_full(run, step + 1, {"model": model}, {"model": optimizers}, facts, setup)
            if setup.is_main:
                checkpoint.prune(run, "full", keep=1)
    monitor.close()

    # 5. What it knows: on pairs that it has not seen, and on pairs that differ in nothing but length.
    result = {"train_pairs": len(train), "steps": steps}
    for name in ("val", "control"):
        file = data / f"preferences_{name}.jsonl"
        if file.exists():
            pairs, _ = read_pairs(file, tokenizer, model.config.block_size)
            scores = score_all(model, pairs, tokenizer.pad_id, setup, config.micro_batch_size)
            result[name] = (report(pairs, *scores) if name == "val"
                            else report_control(pairs, *scores, config.control_ratio))

    # 6. The scale of its scores; then the model, and last of all the sign that the stage is done.
    picked = [train[i] for i in step_blocks(0, config.sft_samples, len(train), config.seed + 1)]
    prompts = [pair["chosen"][:pair["prompt"]] for pair in picked]
    result["sft_samples"] = standardise(model, policy, prompts, tokenizer, config, setup)
    folder = checkpoint.save_light(run, steps, model, tokenizer, setup, {"config_hash": config.hash})
    result["seconds"] = before + time.perf_counter() - started
    if setup.is_main:
        write_json(run / "result.json", result)
        show(result, folder)
    barrier(setup)
    finish(setup)


if __name__ == "__main__":
    main(configure(globals()))
