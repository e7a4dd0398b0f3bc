"""
The short cut: preferences in, an aligned model out, without a reward model and without sampling.

    python dpo.py config/demo.py                          after sft.py and prepare_chat.py
    torchrun --nproc_per_node=2 dpo.py config/demo.py     the same steps and losses on two processes

PPO needs a reward model r, since it must score answers that nobody has compared. But the policy that maximises r under
a KL penalty is known in closed form (Rafailov et al. 2023, arXiv 2305.18290, eq. 4):

    policy(y | x)  ~  reference(y | x) exp(r(x, y) / beta)     so     r(x, y) = beta log(policy / reference) + const(x)

and in a pair the constant falls out. So the policy itself can be trained as its own reward model, on pairs:

    loss = -log sigmoid(beta (log(policy / reference) of the chosen - that of the rejected answer))

What decides, and where it stands below:
  - log-probabilities are *summed* over the answer's tokens, its <|end|> among them, the prompt not. (IPO takes means.)
  - The reference is the starting model. Its sums are computed once, before the first step, with the same function and
    without dropout; so it costs no memory while training, and the first loss is ln 2 = 0.693: checked.
  - Nothing in the loss asks the chosen answer to become likelier, only likelier than the other. Often both fall; the
    log has both (`chosen`, `rejected`), and anchor > 0 adds the chosen answers' own loss.

Reads data_dir/chat/preferences_{train,val}.jsonl (the forms: engine/rankings.py). Rankings give all their pairs, each
answer goes through the model once. Writes, in out_dir/dpo: step_NNNNNNNN/, log.jsonl, result.json. An interrupted run
is continued by the same command, bit for bit on a CPU; a finished one says that it is done.
"""
import math
import time
from pathlib import Path

from configurator import configure

import torch

from engine import checkpoint, rl
from engine.alive import Alive
from engine.files import write_json
from engine.hf import find_folder, read_model
from engine.loss import model_losses
from engine.monitor import Monitor
from engine.optim import lr_at, optimizers_of
from engine.parallel import accumulate, all_sum, compile_blocks, finish, start, wrap
from engine.rankings import longest, means_of_pairs, micro_batches, pairs_of, planned, read_files, take_step
from engine.run import end_step, open_run, refuse_once

data_dir = "data/demo"         # its chat/ holds the preferences
out_dir = "out/demo"           # this stage writes into out_dir/dpo
init_from = ""                 # folder of the model to start from, which is the reference too; empty: out_dir/sft
seed = 1                       # of the order of the rankings
device = "auto"                # 'auto', 'cpu', 'cuda'
dtype = "auto"                 # of the matrix products: 'auto', 'bf16', 'fp32'
threads = 0                    # of a CPU; 0: the cores of the machine, shared by its processes
deterministic = True           # the same bits in every run
compile = False                # torch.compile, per block; pays in a run of more than some hundred steps
attention = "flash"            # 'flash' or 'fp32'; the explicit one is the faster one for short rows on a CPU
max_rankings = 0               # how many of the training file's lines to use; 0: all
epochs = 1
batch_size = 32                # rankings (a pair is one of two) in the global batch
window = 25                    # steps whose rankings are sorted by length together: more is less padding
micro_batch_size = 32          # rankings at once on one device
learning_rate = 1e-5           # peak; far below SFT's: the loss is steep, and answers decay before it is low
warmup_share = 0.1             # of all steps
weight_decay = 0.0
grad_clip = 1.0                # largest norm of the gradient
beta = 0.1                     # how dear it is to leave the reference: a larger one stays nearer
loss = "dpo"                   # 'dpo' or 'ipo', see engine/rl.py
label_smoothing = 0.0          # share of pairs that may be labelled the wrong way round
anchor = 0.0                   # weight of the best answers' own loss, nats per token
log_every = 10                 # steps
save_full = 50                 # steps between the checkpoints that a rerun continues from


def answer_logprobs(model, rankings, pad_id, setup):
    """The answers' log-probabilities: sums over their tokens (N,), N dialogues of all rankings, and how many tokens
    each has (N,). The tokens are those behind the prompt, <|end|> the last; the token at place t is predicted at t - 1.

    One forward pass for all of them, padded on the right: no real token sees padding."""
    dialogues = [dialogue for ranking in rankings for dialogue in ranking["dialogues"]]
    prompts = torch.tensor([ranking["prompt"] for ranking in rankings for _ in ranking["dialogues"]])
    width = -(-(max(map(len, dialogues)) - 1) // 8) * 8 + 1       # few different widths, so that memory is reused
    ids = torch.tensor([d + [pad_id] * (width - len(d)) for d in dialogues])                               # (N, T)
    lengths, place = torch.tensor([len(d) for d in dialogues]), torch.arange(1, width)
    keep = (place >= prompts[:, None]) & (place < lengths[:, None])                                    # (N, T - 1)
    rows, keep, ids = keep.nonzero()[:, 0].to(setup.device), keep.to(setup.device), ids.to(setup.device)
    with setup.autocast():
        _, losses = model_losses(model, ids[:, :-1], ids[:, 1:][keep], keep=keep)
    return losses.new_zeros(len(dialogues)).index_add(0, rows, -losses), rows.bincount(minlength=len(dialogues))


@torch.no_grad()
@torch.compiler.set_stance("force_eager")          # compiling for so few batches would take longer than they do
def reference_logprobs(model, rankings, config, pad_id, setup):
    """answer_logprobs of all rankings, as a tensor each: `reference` is put into them. The ranks share the work."""
    model.eval()
    width = max(len(ranking["level"]) for ranking in rankings)
    table = torch.zeros(len(rankings), width, device=setup.device)
    everything, length_of = list(range(len(rankings))), lambda i: longest(rankings[i])
    for numbers in micro_batches(everything, setup, config.micro_batch_size, length_of):
        part = [rankings[n] for n in numbers]
        sums, _ = answer_logprobs(model, part, pad_id, setup)
        for n, found in zip(numbers, sums.split([len(ranking["level"]) for ranking in part])):
            table[n, :len(found)] = found
    for ranking, row in zip(rankings, all_sum(table, setup).cpu()):
        ranking["reference"] = row[:len(ranking["level"])]
    model.train()


def losses(model, rankings, config, pad_id, setup):
    """-> five tensors (B,), the mean over each ranking's pairs of: the loss, whether the pair is ranked right, the
    chosen and the rejected answer's log(policy / reference); and last the loss per token of its best answers."""
    sums, tokens = answer_logprobs(model, rankings, pad_id, setup)
    ratios = sums - torch.cat([ranking["reference"] for ranking in rankings]).to(sums)
    better, worse, of = pairs_of(rankings, sums.device)
    judged = ratios / tokens if config.loss == "ipo" else ratios
    loss = rl.dpo_loss(judged[better], judged[worse], config.beta, config.loss, config.label_smoothing)
    mean = lambda x: means_of_pairs(x, of)
    best, first = torch.tensor([[level == min(ranking["level"]), number] for number, ranking in enumerate(rankings)
                                for level in ranking["level"]], device=sums.device).unbind(1)
    own = sums.new_zeros(2, len(rankings)).index_add(1, first, torch.stack([-sums, tokens.to(sums)]) * best)
    return (mean(loss), mean(rl.pair_accuracy(judged[better], judged[worse])), mean(ratios[better]),
            mean(ratios[worse]), own[0] / own[1])


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def evaluate(model, rankings, config, pad_id, setup):
    """The means of `losses` over held-out rankings, as a dict."""
    model.eval()
    total = torch.zeros(6, device=setup.device)
    for part in micro_batches(rankings, setup, config.micro_batch_size):
        found = torch.stack(losses(model, part, config, pad_id, setup))
        total += torch.cat([found.sum(1), found.new_tensor([len(part)])])
    model.train()
    *sums, count = all_sum(total, setup).tolist()
    return dict(zip(("loss", "accuracy", "chosen", "rejected", "best"), (value / count for value in sums)))


def check_start(first, config, setup):
    """The first loss is known beforehand. Another one is a wrong reference, sum, mask or shift, and the run would still
    learn something."""
    expected = math.log(2) if config.loss == "dpo" else 1 / (2 * config.beta) ** 2
    allowed = 1e-4 if setup.dtype == torch.float32 else 0.05        # both were rounded, and in batches of other widths
    if not abs(first - expected) <= allowed * max(1.0, expected):
        refuse_once(setup, f"the first loss is {first:.6f}, and {expected:.6f} while policy and reference are the "
                    "same: the reference was computed otherwise (dropout? another precision?), or the tokens that are "
                    "summed differ")


def main(config):
    setup = start(config.device, config.dtype, config.deterministic, config.threads, config.seed)
    with Alive(setup) as alive:
        learn(config, setup, alive)


def learn(config, setup, alive):
    # 1. Whether there is anything left to do.
    source = find_folder(config.init_from or Path(config.out_dir) / "sft")
    model, tokenizer = read_model(source, attention=config.attention)
    path, train, left_out, others, problems = read_files(config, tokenizer, model.config.block_size, setup, ["val"])
    val, pad_id = others.get("val", []), tokenizer.pad_id
    problems += config.outside(beta=(1e-6,), label_smoothing=(0, 0.5), anchor=(0,))
    if config.loss not in ("dpo", "ipo"):
        problems.append(f"loss must be 'dpo' or 'ipo', found {config.loss!r}")
    if config.loss == "ipo" and config.label_smoothing:
        problems.append("label_smoothing is part of the loss 'dpo'; 'ipo' has none")
    refuse_once(setup, *problems)
    run, lock = open_run(config, "dpo", setup, model.n_params(), model=source, preferences=path)
    if lock is None:
        return

    # 2. What the starting model thinks of all the answers; it is not needed any more after that.
    usable = len(train)
    train, steps, batch_of = planned(train, config)
    model.to(setup.device).train()
    reference_logprobs(model, [*train, *val], config, pad_id, setup)

    # 3. What it will cost.
    warmup = int(config.warmup_share * steps)
    setup.say(f"dpo: {len(train):,} rankings ({len(left_out)} left out, {usable - len(train)} more fill no step), "
              f"{len(pairs_of(train)[0]):,} pairs; {steps} steps of {config.batch_size} rankings; "
              f"{model.n_params():,} parameters on {setup.device}, {setup.dtype}")

    # 4. Training, from wherever the last full checkpoint stands.
    optimizers = optimizers_of(model, config.learning_rate, 0.0, config.weight_decay)
    modules, moments = {"model": model}, {"model": optimizers}
    compile_blocks(model, setup, config.compile, dynamic=True)
    wrapped = wrap(model, setup)
    state = checkpoint.resume(run, modules, moments, setup) or {"step": 0}
    monitor = Monitor(run, setup, steps, state["step"], label="dpo")
    for step in range(state["step"], steps):
        began = time.perf_counter()
        lr = lr_at(step, steps, config.learning_rate, warmup, "linear", final=0.0)
        total = torch.zeros(5, device=setup.device)
        for micro in accumulate(micro_batches(batch_of(step), setup, config.micro_batch_size), wrapped):
            found = losses(wrapped, micro, config, pad_id, setup)
            # Summed over the global step's rankings, divided by their number. DDP averages over ranks: * world.
            ((found[0] + config.anchor * found[4]).sum() * setup.world / config.batch_size).backward()
            total += torch.stack([each.detach().sum() for each in found])
        means, norm = take_step(model, optimizers, lr, total, step, run, config, setup)
        loss, accuracy, chosen, rejected, own = means
        if step == 0:
            check_start(loss, config, setup)
        done = step + 1
        if done == 1 or done % config.log_every == 0 or done == steps:
            line = (f"loss {loss:.4f}  ranked right {accuracy:.1%}  "
                    f"log ratio chosen {chosen:+.2f}, rejected {rejected:+.2f}")
            monitor.log(done, line, loss=loss, accuracy=accuracy, chosen=chosen, rejected=rejected, best=own, lr=lr,
                        grad_norm=norm, step_seconds=time.perf_counter() - began)
        monitor.advance()
        leaving = alive.leaving()
        if done < steps:
            end_step(run, done, steps, config, modules, moments, tokenizer, {}, setup, monitor, leaving)
    monitor.close()

    # 5. What it came to: on pairs that it has not seen; then the model, and last of all the sign
    #    that the stage is done.
    result = {"train_rankings": len(train), "steps": steps}
    if val:
        result["val"] = evaluate(model, val, config, pad_id, setup)
        setup.say("held-out pairs: ranked right {accuracy:.1%}, loss {loss:.4f}, log ratio chosen {chosen:+.2f}, "
                  "rejected {rejected:+.2f}".format(**result["val"]))
    folder = checkpoint.save_light(run, steps, model, tokenizer, setup, {"config_hash": config.hash})
    if setup.is_main:
        write_json(run / "result.json", result)
    setup.say(f"aligned model in {folder}")
    finish(setup)


if __name__ == "__main__":
    main(configure(globals()))
