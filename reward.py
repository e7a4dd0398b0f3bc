"""
Stage 5a: a reward model, which reads a prompt with an answer and says how much people would like it.

    python reward.py config/demo.py
    torchrun --nproc_per_node=2 reward.py config/demo.py

Nobody can say how good an answer is on a scale, but nearly everybody can say which of two is better. So the data are
pairs, and the model is the instruction-tuned one with a head of one number, trained so that the chosen answer's number
is higher:

    loss = -log sigmoid(score(chosen) - score(rejected))         Bradley & Terry 1952; Stiennon et al. 2020 (2009.01325)

Where more than two answers to one prompt were put in order, each goes through the model once and is compared with all
others: K answers give K (K - 1) / 2 pairs, whose mean is the ranking's loss (Ouyang et al. 2022, 2203.02155).

One answer can be helpful and not safe. With --dimensions="{'helpful': 1, 'safe': 2}" there is a head for each, a line
that names a dimension trains that one alone, and a line that names none their weighted sum. Each head is scaled for
itself, and what PPO gets is their mean with these weights.

Reads   data_dir/chat/preferences_{train,val,control}.jsonl: pairs, rankings or grades, see engine/rankings.py. val and
        control may be missing. Control pairs are equally good (which of them is called chosen does not matter) and very
        different in length: a model without a taste for length prefers the longer one half the time.
Writes  out_dir/reward/step_N/        the model: a Hugging Face trunk, the head in heads.safetensors beside it
        out_dir/reward/log.jsonl      loss, its share along the answers (`along_until`) and accuracy, now and then
        out_dir/reward/result.json    on held-out pairs, in each dimension: accuracy, by how far apart they are; whether a
                                      probability of 80 % is right in 80 %; control pairs; mean and scale of the scores

An interrupted run is continued by the same command; a finished one says that it is done.
"""
import math
from pathlib import Path

from configurator import configure

import torch

from engine import chat, checkpoint, rl
from engine.alive import Alive
from engine.files import printable, write_json
from engine.generate import generate
from engine.hf import find_folder, read_model
from engine.monitor import Monitor
from engine.optim import lr_at, optimizers_of
from engine.parallel import accumulate, compile_blocks, finish, start, wrap
from engine.rankings import (longest, means_of_pairs, micro_batches, pairs_of, planned, read_files, shares, take_step,
                             weight_problems)
from engine.run import end_step, open_run, refuse_once
from engine.shards import step_blocks

data_dir = "data/demo"         # its chat/ holds the preferences
out_dir = "out/demo"           # this stage writes into out_dir/reward
init_from = ""                 # folder of the model to start from; empty: out_dir/sft
seed = 1                       # of the order of the rankings
device = "auto"                # 'auto', 'cpu', 'cuda'
dtype = "auto"                 # of the matrix products: 'auto', 'bf16', 'fp32'
threads = 0                    # of a CPU; 0: the cores of the machine, shared by its processes
deterministic = True           # the same bits in every run
compile = False                # torch.compile, per block; pays in a run of more than some hundred steps
attention = "flash"            # 'flash' or 'fp32'; the explicit one is the faster one for short rows on a CPU
dimensions: dict = {}          # {name: weight} of what is judged apart, see above; {}: one score
max_rankings = 0               # how many of the training file's lines to use; 0: all
epochs = 1                     # with more than one it learns them by heart
batch_size = 64                # rankings (a pair is one of two) in the global batch
window = 25                    # steps whose rankings are sorted by length together: more is less padding
micro_batch_size = 32          # rankings at once on one device
learning_rate = 1e-4           # peak
matrix_learning_rate = 0.0     # above 0: Muon for the layers' matrices with this peak, AdamW for the rest
warmup_share = 0.1             # of all steps
weight_decay = 0.01            # of matrices
grad_clip = 1.0                # largest norm of the gradient
along_until = 0.0              # share of the run in which answers are judged word by word too (`losses`); 0: none
centring = 0.0                 # weight of (chosen + rejected)^2, which holds scores near 0 while they are learned
sft_samples = 256              # answers of the starting model whose scores are made to have mean 0 and deviation 1
max_new_tokens = 64            # of each of them
control_ratio = 1.5            # control pairs count when one has at least this many times the tokens of the other
log_every = 10                 # steps
save_full = 50                 # steps between the checkpoints that a rerun continues from

MARGINS = (0.0, 1.0, 1.5, 2.0, math.inf)     # edges of the buckets in which the accuracy is told
CERTAINTIES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


# --- Scores ----------------------------------------------------------------------------------------------------------

def scores_along(model, dialogues, prompts, pad_id, device):
    """What the head says at each token of the answers: dialogues, N lists of token ids, the first prompts[n] of which
    are the prompt -> (N, R), R tokens of the longest answer, or (N, R, heads). Behind the end of an answer its last
    number is repeated; so [:, -1] is the answers' scores.

    Padding is on the right, where no real token looks: the model needs no mask, and attention keeps its fast path."""
    width = -(-max(map(len, dialogues)) // 8) * 8      # few different widths, so that memory is reused
    ids = torch.tensor([d + [pad_id] * (width - len(d)) for d in dialogues], device=device)            # (N, T)
    first, last = torch.tensor(prompts, device=device), torch.tensor([len(d) - 1 for d in dialogues], device=device)
    reach = max(len(d) - prompt for d, prompt in zip(dialogues, prompts))
    at = first[:, None] + torch.arange(reach, device=device)                                           # (N, R)
    return model(ids)[torch.arange(len(ids), device=device)[:, None], torch.minimum(at, last[:, None])]


def score_rankings(model, rankings, pad_id, device):
    """-> (N, R), N dialogues, of the heads that each ranking is about. All go through the model in one forward pass:
    DDP expects one, and so all have the same padding and precision."""
    dialogues = [dialogue for ranking in rankings for dialogue in ranking["dialogues"]]
    prompts = [ranking["prompt"] for ranking in rankings for _ in ranking["dialogues"]]
    along = scores_along(model, dialogues, prompts, pad_id, device)
    if along.dim() == 2:
        return along
    heads = torch.tensor([ranking["heads"] for ranking in rankings for _ in ranking["dialogues"]], device=device)
    return (along * heads[:, None]).sum(-1)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")          # compiling for so few batches would take longer than they do
def score_all(model, rankings, pad_id, setup, size):
    """The scores of all dialogues of all rankings, in their order -> (N,) on the CPU. Each rank scores all of them."""
    order, scores = sorted(range(len(rankings)), key=lambda i: longest(rankings[i])), {}
    for i in range(0, len(order), size):
        rows = order[i:i + size]
        with setup.autocast():
            found = score_rankings(model, [rankings[r] for r in rows], pad_id, setup.device)[:, -1].cpu()
        scores.update(zip(rows, found.split([len(rankings[r]["level"]) for r in rows])))
    return torch.cat([scores[r] for r in range(len(rankings))])


def losses(along, rankings, share, centring=0.0):
    """The loss of each ranking (B,), the mean over its pairs, and the share of its pairs that are ranked right (B,).

    `share` of the loss is taken all along the answers, at every token up to the longer one's end, much as in
    DeepSpeed-Chat (Yao et al. 2023, 2308.01320; there from the first token that differs): each number says what the
    answer is worth as far as it has been read, so a word that decides is found where it stands. The final score alone
    learns that slowly. But as long as it counts, having gone on without a fault is worth something, and with it length:
    so `share` is to be 0 at the end of the run."""
    better, worse, ranking = pairs_of(rankings, along.device)
    margin = torch.tensor([r["margin"] for r in rankings], device=along.device)[ranking]
    chosen, rejected = along[better, -1], along[worse, -1]
    loss = rl.ranking_loss(chosen, rejected, margin, centring)
    if share:
        length = torch.tensor([len(d) - r["prompt"] for r in rankings for d in r["dialogues"]], device=along.device)
        real = torch.arange(along.size(1), device=along.device) < torch.maximum(length[better], length[worse])[:, None]
        each = rl.ranking_loss(along[better], along[worse], margin[:, None], centring)                 # (P, R)
        loss = (1 - share) * loss + share * torch.where(real, each, 0.0).sum(1) / real.sum(1)
    return means_of_pairs(loss, ranking), means_of_pairs(rl.pair_accuracy(chosen, rejected), ranking)


# --- Reports ---------------------------------------------------------------------------------------------------------

def report(rankings, scores):
    """Accuracy on held-out pairs: in all, by how far apart they are, by how certain the model is, and of each
    dimension. Ties count half.

    certainty: sigmoid of the difference is the probability that the answer with the higher score is the better one, and
    the loss asks that it be right as often as it says; calibration_error: by how much it is not, on average over pairs
    (Guo et al. 2017, arXiv 1706.04599, eq. 3)."""
    better, worse, ranking = pairs_of(rankings)
    right = rl.pair_accuracy(scores[better], scores[worse])
    certainty = torch.sigmoid((scores[better] - scores[worse]).abs())
    worth = torch.tensor([value for r in rankings for value in r["worth"]], dtype=torch.float64)

    def buckets(values, edges):
        found = []
        for low, high in zip(edges, edges[1:]):
            inside = (values >= low) & ((values < high) | (high == edges[-1]))
            if inside.any():
                found.append({"from": low, "to": high, "pairs": int(inside.sum()),
                              "accuracy": right[inside].mean().item(), "mean": values[inside].mean().item()})
        return found
    by_certainty = buckets(certainty, CERTAINTIES)
    error = sum(bucket["pairs"] * abs(bucket["accuracy"] - bucket["mean"]) for bucket in by_certainty) / len(right)
    told = {"pairs": len(right), "accuracy": right.mean().item(),
            "by_margin": buckets(worth[better] - worth[worse], MARGINS), "by_certainty": by_certainty, "calibration_error": error,
            "loss": rl.ranking_loss(scores[better], scores[worse]).mean().item()}
    names = {r["dimension"] for r in rankings}
    if len(names) > 1:
        parts = scores.split([len(r["level"]) for r in rankings])
        of_name = lambda name: [i for i, r in enumerate(rankings) if r["dimension"] == name]
        told["by_dimension"] = {
            name: report([rankings[i] for i in of_name(name)], torch.cat([parts[i] for i in of_name(name)]))
            for name in sorted(names)}
    return told


def report_control(rankings, scores, ratio):
    """What length does to the score when nothing else differs, over pairs of which one has `ratio` x the tokens."""
    better, worse, _ = pairs_of(rankings)
    lengths = torch.tensor([float(len(d) - r["prompt"]) for r in rankings for d in r["dialogues"]])
    both = torch.stack([lengths[better], lengths[worse]])
    apart = both.amax(0) / both.amin(0)                    # an answer has its <|end|> at least
    kept = apart >= ratio
    if not kept.any():
        return {"pairs": 0, "left_out": len(kept)}
    right = rl.pair_accuracy(scores[better], scores[worse])
    longer_preferred = torch.where(lengths[better] > lengths[worse], right, 1 - right)
    return {"pairs": int(kept.sum()), "left_out": int((~kept).sum()), "smallest_length_ratio": apart[kept].min().item(),
            "accuracy": right[kept].mean().item(), "prefers_longer": longer_preferred[kept].mean().item()}


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def standardise(model, policy, prompts, tokenizer, config, setup):
    """Moves and scales each head so that the starting model's own answers have scores of mean 0 and deviation 1.

    The loss fixes neither, since it sees differences only. But for PPO a score is then a number of deviations above the
    start, the critic need not chase an offset first, and a clip range of 0.2 means something. Both go into the head's
    weight and bias: kept in a file beside it, a reload by hand would silently lose them."""
    answers = generate(policy, prompts, config.max_new_tokens, chat.stop_ids(tokenizer), seed=config.seed).ids
    dialogues, lengths = [p + a for p, a in zip(prompts, answers)], list(map(len, prompts))
    size, pad_id = config.micro_batch_size, tokenizer.pad_id
    with setup.autocast():
        scores = torch.cat([scores_along(model, dialogues[i:i + size], lengths[i:i + size], pad_id, setup.device)[:, -1]
                            for i in range(0, len(dialogues), size)]).view(len(dialogues), -1)         # (N, heads)
    mean, deviation = scores.mean(0), scores.std(0).clamp(min=1e-6)
    model.score.weight.div_(deviation[:, None])
    model.score.bias.sub_(mean).div_(deviation)
    return {"answers": len(answers), "mean": mean.tolist(), "deviation": deviation.tolist()}


def show(result, folder, names):
    """The result, for people. names: of the heads."""
    if val := result.get("val"):
        print(f"held-out pairs ranked right: {val['accuracy']:.1%} of {val['pairs']}; a certainty is off by "
              f"{val['calibration_error']:.1%} on average")
        for kind, words in (("by_margin", "apart"), ("by_certainty", "certain")):
            for bucket in val[kind]:
                edges = f"{bucket['from']:.1f} to {bucket['to']:.1f}"
                print(f"    {edges} {words}: {bucket['accuracy']:.1%} of {bucket['pairs']}")
        for name, part in val.get("by_dimension", {}).items():
            print(f"    {printable(name) or 'as a whole'}: {part['accuracy']:.1%} of {part['pairs']}")
    if control := result.get("control"):
        if control["pairs"]:
            print(f"equally good, one at least {control['smallest_length_ratio']:.2f} x as long: the longer one is "
                  f"preferred in {control['prefers_longer']:.1%} of {control['pairs']}")
        if control["pairs"] < 400:
            print(f"note: {control['pairs']} control pairs say little about length; 400 tell it to within 5 %")
    samples = result["sft_samples"]
    for name, mean, deviation in zip(names or [""], samples["mean"], samples["deviation"]):
        print(f"scores of the starting model's answers{' in ' * bool(name)}{printable(name)}: mean {mean:.2f}, "
              f"deviation {deviation:.2f}; now 0 and 1")
    print(f"reward model in {folder}", flush=True)


# --- The run ---------------------------------------------------------------------------------------------------------

def main(config):
    setup = start(config.device, config.dtype, config.deterministic, config.threads, config.seed)
    with Alive(setup) as alive:
        learn(config, setup, alive)


def learn(config, setup, alive):
    # 1. Whether there is anything left to do.
    source = find_folder(config.init_from or Path(config.out_dir) / "sft")
    # What is asked of the settings and the pairs, before the folder is bound to them.
    refuse_once(setup, *weight_problems(config.dimensions))
    weights = shares(config.dimensions)
    policy, tokenizer = read_model(source, attention=config.attention)
    path, train, left_out, held_out, problems = read_files(config, tokenizer, policy.config.block_size, setup,
                                                           ["val", "control"], weights)
    problems += config.below_one("max_new_tokens")
    problems += config.outside(sft_samples=(2,), along_until=(0, 1), control_ratio=(1.01,))
    without = weights.keys() - {ranking["dimension"] for ranking in train}
    if without and "" not in {ranking["dimension"] for ranking in train}:
        problems.append(f"{path} says nothing about {', '.join(sorted(without))}: that head would stay as it was drawn")
    refuse_once(setup, *problems)
    run, lock = open_run(config, "reward", setup, policy.n_params(), model=source, preferences=path)
    if lock is None:
        return

    # 2. The starting model's trunk once more, under a head of one number, or of one for each dimension.
    model, _ = read_model(source, kind="scalar", dimensions=weights, attention=config.attention)
    model.to(setup.device).eval()                                          # dropout would be noise in a difference

    # 3. What it will cost.
    usable = len(train)
    train, steps, batch_of = planned(train, config)
    pairs = len(pairs_of(train)[0])
    setup.say(f"reward: {len(train):,} rankings ({len(left_out)} left out, {usable - len(train)} more fill no step), "
              f"{pairs:,} pairs; {steps} steps of {config.batch_size} rankings; "
              f"{sum(p.numel() for p in model.parameters()):,} parameters on {setup.device}, {setup.dtype}")
    named = {ranking["dimension"] for ranking in train} - {""}
    if named and not weights:
        setup.say(f"note: pairs of {len(named)} dimensions ({', '.join(map(printable, sorted(named)))}) train one "
                  "score; --dimensions gives each its own")

    # 4. Training, from wherever the last full checkpoint stands.
    optimizers = optimizers_of(model, config.learning_rate, config.matrix_learning_rate, config.weight_decay)
    modules, moments = {"model": model}, {"model": optimizers}
    compile_blocks(model, setup, config.compile, dynamic=True)
    wrapped = wrap(model, setup)
    state = checkpoint.resume(run, modules, moments, setup) or {"step": 0}
    first, warmup = state["step"], int(config.warmup_share * steps)
    monitor = Monitor(run, setup, steps, first, label="reward")
    for step in range(first, steps):
        lr = lr_at(step, steps, config.learning_rate, warmup, "linear", final=0.0)
        sums = torch.zeros(2, device=setup.device)                         # loss, share of pairs ranked right
        share = max(0.0, 1 - step / (config.along_until * steps)) if config.along_until else 0.0
        for micro in accumulate(micro_batches(batch_of(step), setup, config.micro_batch_size), wrapped):
            with setup.autocast():
                along = score_rankings(wrapped, micro, tokenizer.pad_id, setup.device)
                loss, right = losses(along, micro, share, config.centring)
                # Summed over the global step's rankings, divided by their number. DDP averages over ranks: * world.
                (loss.sum() * setup.world / config.batch_size).backward()
            sums += torch.stack([loss.sum(), right.sum()]).detach()
        (loss, accuracy), norm = take_step(model, optimizers, lr, sums, step, run, config, setup)
        monitor.advance()
        done = step + 1
        if done % config.log_every == 0 or done == steps:
            line = f"loss {loss:.4f}  ranked right {accuracy:.1%}"
            monitor.log(done, line, loss=loss, along=share, accuracy=accuracy, lr=lr, grad_norm=norm)
        leaving = alive.leaving()
        if done < steps:
            end_step(run, done, steps, config, modules, moments, tokenizer, {}, setup, monitor, leaving)
    monitor.close()

    # 5. What it knows: on pairs that it has not seen, and on pairs that differ in nothing but length.
    result = {"train_rankings": len(train), "train_pairs": pairs, "steps": steps, "dimensions": weights}
    for name, rankings in held_out.items():
        scores = score_all(model, rankings, tokenizer.pad_id, setup, config.micro_batch_size)
        result[name] = (report(rankings, scores) if name == "val"
                        else report_control(rankings, scores, config.control_ratio))

    # 6. The scale of its scores; then the model, and last of all the sign that the stage is done.
    picked = [train[i] for i in step_blocks(0, config.sft_samples, len(train), config.seed + 1)]
    prompts = [ranking["dialogues"][0][:ranking["prompt"]] for ranking in picked]
    policy.to(setup.device).eval()
    result["sft_samples"] = standardise(model, policy, prompts, tokenizer, config, setup)
    facts = {"config_hash": config.hash, "sft_samples": result["sft_samples"]}
    folder = checkpoint.save_light(run, steps, model, tokenizer, setup, facts)
    if setup.is_main:
        write_json(run / "result.json", result)
        show(result, folder, list(weights))
    finish(setup)


if __name__ == "__main__":
    main(configure(globals()))
