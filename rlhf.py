"""
Stage 5b: PPO. The model answers, the reward model scores, and what scored better than expected becomes likelier.

    python rlhf.py config/demo.py                               after sft.py and reward.py
    torchrun --nproc_per_node=2 rlhf.py config/demo.py          the same number of answers, shared by two processes

Four networks: the policy that is trained; the reference, a frozen copy of where it started; the reward model; and the
value network ("critic"), which learns to foresee the score. Each update, in ppo() below, is:

    1. roll out       answers to some prompts, sampled from the policy
    2. judge          a score for each answer; log-probabilities of each token under policy and reference; values
    3. reward         -kl_coef * log(policy / reference) at every token, and the score at the last one
    4. advantages     GAE: how much better than foreseen it went on from each token; then whitened
    5. self-check     in the first update only, see below
    6. improve        a few epochs over these answers with PPO's clipped losses
    7. log, save

PPO with a bug still learns: four different ones, planted in a small task, ended at 88 to 99 % of the full reward. So a
rising reward is no proof. What is proof are identities that hold in the first update and in no run with those bugs:
the ratio of new and old probabilities is 1, the divergence from the reference is 0, the mean of -log p over sampled
tokens is the mean entropy, and padding changes nothing. Where one does not hold, the run ends before its first step and
says what is probably wrong.

Reads   out_dir/sft, out_dir/reward, data_dir/chat/prompts_{train,val}.jsonl: {"messages": [...]} a line, user last
Writes  out_dir/ppo/step_N/         the policy, a Hugging Face folder
        out_dir/ppo/log.jsonl       per update: score, gold, kl, stop_rate, length, entropy, clipfrac, approx_kl, ...
        out_dir/ppo/result.json     the same before and after, on prompts that it was not trained on, and the bounds

With --group=8 the same without a critic, GRPO (Shao et al. 2024, arXiv 2402.03300): each prompt is answered 8 times, an
answer's advantage is by how much it is better than the other 7, and the divergence from the reference is in the loss.

`gold` is the score of the rule that the preferences came from. Only the demonstration has one. It is never trained on:
it is there to see whether the policy got better or only found what the reward model falls for.

Sources: Schulman et al. 2017 (arXiv 1707.06347); Stiennon et al. 2020 (2009.01325); Ouyang et al. 2022 (2203.02155);
Huang et al. 2024 (2403.17031), whose list of details is followed here. The formulas are in engine/rl.py.
"""
import copy
import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

from configurator import configure, refuse

import torch
from torch.nn.functional import pad

from chatdata import remark
from engine import chat, checkpoint, rl
from engine.alive import Alive
from engine.files import printable, read_json, write_json
from engine.generate import generate
from engine.hf import find_folder, read_model
from engine.loss import logprobs
from engine.monitor import Monitor
from engine.optim import adamw, clip, lr_at, optimiser_problems, set_lr
from engine.parallel import accumulate, all_sum, finish, my_share, start, wrap
from engine.rankings import shares, weight_problems
from engine.run import end_step, open_run, refuse_missing, refuse_once
from engine.shards import step_blocks
from techniques import lora

data_dir = "data/demo"         # its chat/ holds the prompts
out_dir = "out/demo"           # reads out_dir/sft and out_dir/reward, writes into out_dir/ppo
policy_from = ""               # folder of the model to start from; empty: out_dir/sft
reward_from = ""               # folder of the reward model; empty: out_dir/reward
dimensions: dict = {}          # {name: weight} of its heads; {}: those it was trained with
seed = 1                       # of prompts, samples and minibatches
device = "auto"                # 'auto', 'cpu', 'cuda'
dtype = "auto"                 # of the matrix products: 'auto' (fp32 on a CPU), 'bf16', 'fp32'
lora_rank = 0                  # above 0: only differences of that rank are learned; learning rates ten times larger
lora_alpha = 16.0              # they are multiplied by alpha / rank, see techniques/lora.py
threads = 0                    # of a CPU; 0: the cores of the machine, shared by its processes
deterministic = True           # the same bits in every run
attention = "flash"            # 'flash' or 'fp32'; the explicit one is the faster one for short rows on a CPU
updates = 24                   # rounds of roll-out and improvement
episodes = 64                  # answers per update, all processes together
max_new_tokens = 64            # longest answer
temperature = 1.0              # of sampling, and therefore of every log-probability
top_k = 0                      # only 0: all of the distribution is sampled from, since all of it is scored
top_p = 1.0                    # only 1.0, for the same reason
group = 0                      # 0: PPO. From 2: GRPO, so many answers to each prompt, compared with each other
group_deviation = True         # GRPO: advantages are divided by the group's deviation; False: Dr. GRPO
aggregation = "token"          # GRPO: how tokens count in the loss, 'token', 'sequence' or 'constant', see engine/rl.py
epochs = 2                     # passes over the answers of an update
minibatches = 2                # optimiser steps per pass
micro_batch_size = 64          # answers at once on one device
learning_rate = 3e-4           # of the policy, at the first update; falls to 0 in a straight line
value_learning_rate = 3e-4     # of the critic, likewise
weight_decay = 0.0             # the reference already holds the policy where it was
grad_clip = 1.0                # largest gradient norm, of policy and critic each
clip_range = 0.2               # of the ratio of new and old probability
value_clip_range = 0.2         # of a value, around what it was when the answers were sampled
gamma = 1.0                    # a later token is worth no less
lam = 0.95                     # GAE's lambda: 1 trusts the rewards only, 0 the critic only
kl_coef = 0.05                 # weight of the divergence from the reference, in the reward
kl_target = 0.0                # nats per answer that the weight is adapted to; 0: it stays as it is
kl_horizon = 10000             # answers in which an adapted weight may change by 20 %
missing_end_penalty = 1.0      # taken from the score of an answer that did not end
max_approx_kl = 0.1            # an update ends early when the policy has moved this far per token; 0: never
self_check = True              # check the first update's identities, and end the run when one fails
eval_prompts = 256             # held-out prompts for the numbers before and after
log_every = 1                  # updates
save_full = 8                  # updates between the checkpoints that a rerun continues from
verdicts = True                # say whether the bounds below are held; they mean nothing for so short a run as smoke.py
bound_kl = 20.0                # stated bounds of the result: nats per answer ...
bound_stop_rate = 0.95         # ... share of answers that end by themselves ...
bound_length = 40.0            # ... and their mean length in tokens

MEASURES = ("score", "gold", "kl", "stop_rate", "length")      # of each answer


@dataclass
class Batch:
    """Answers of this rank, padded on the left before the prompt (P wide) and on the right behind the answer (R):

        ids    . . p p p a a a .        mask     0 0 1 1 1 1 1 1 0        answer (the last R)     1 1 1 0
    """
    ids: torch.Tensor              # (B, P + R) int64
    mask: torch.Tensor             # (B, P + R) bool, True at real tokens
    answer: torch.Tensor           # (B, R) bool, True at the answer's tokens, the end token included
    ended: torch.Tensor            # (B,) bool
    sampled_logprobs: torch.Tensor # (B, R) as the generator had them when it drew
    texts: list                    # the answers

    @property
    def prompt_width(self):
        return self.ids.size(1) - self.answer.size(1)

    def slices(self, rows, size):
        """These rows in slices of at most `size` and of much the same length: padding is computed like all else."""
        slices = []
        for length, row in sorted(zip(self.mask[rows].sum(1).tolist(), rows.tolist())):
            if not slices or len(slices[-1]) == size or length > 1.2 * slices[-1][0][0]:
                slices.append([])
            slices[-1].append((length, row))
        return [rows.new_tensor([row for _, row in part]) for part in slices]

    def read(self, rows):
        """These rows as every network reads them, as wide as the longest: ids (b, T) from the left edge on, padded on
        the right, where no real token sees it; where an answer's token is chosen, (b, T-1) bool, one place before it;
        and where the answer ends, (b, T) bool."""
        mask, width = self.mask[rows], self.prompt_width
        lengths, prompts = mask.sum(1, keepdim=True), mask[:, :width].sum(1, keepdim=True)
        place = torch.arange(int(lengths.max()), device=mask.device)
        ids = self.ids[rows].gather(1, (width - prompts + place).clamp(max=mask.size(1) - 1))
        return ids, ((place >= prompts - 1) & (place < lengths - 1))[:, :-1], place == lengths - 1


# --- The networks at work --------------------------------------------------------------------------------------------

def roll_out(policy, prompts, tokenizer, config, seed, setup):
    """Samples an answer to each prompt (token ids) -> Batch. Without top_k and top_p: with them, what is drawn comes
    from another distribution than the one that is scored. The ratio does not show it (old and new are both scored in
    full), only the entropy identity does."""
    with setup.autocast(), lora.merged(policy):
        answers = generate(policy, prompts, config.max_new_tokens, chat.stop_ids(tokenizer),
                           temperature=config.temperature, seed=seed)
    before, behind = max(map(len, prompts)), max(map(len, answers.ids))
    ids = torch.full((len(prompts), before + behind), tokenizer.pad_id)
    mask, sampled = torch.zeros_like(ids, dtype=torch.bool), torch.zeros(len(prompts), behind)
    for row, (prompt, answer) in enumerate(zip(prompts, answers.ids)):
        start, end = before - len(prompt), before + len(answer)
        ids[row, start:end] = torch.tensor(prompt + answer)
        mask[row, start:end] = True                       # the end token is an answer's token like the others
        sampled[row, :len(answer)] = torch.tensor(answers.logprobs[row])
    ids, mask, sampled, ended = (x.to(setup.device) for x in (ids, mask, sampled, torch.tensor(answers.stopped)))
    return Batch(ids, mask, mask[:, before:], ended, sampled, [tokenizer.decode(answer) for answer in answers.ids])


def answer_logprobs(model, batch, rows, config, with_entropy=False):
    """log p of the answers' tokens at the sampling temperature, (B, R). The one function for policy, reference and
    update: whatever it did wrong it would do wrong in all of them, and the ratio could not drift from 1 by a detail."""
    ids, chooses, _ = batch.read(rows)
    found, answer = logprobs(model, ids, None, config.temperature, with_entropy, chooses), batch.answer[rows]
    return tuple(rl.spread(x, answer) for x in found) if with_entropy else rl.spread(found, answer)


def answer_values(value, batch, rows):
    """What the critic expects *before* each token of the answer is chosen, (B, R). One place later it would have seen
    the token already, and the advantage would measure nothing."""
    ids, chooses, _ = batch.read(rows)
    return rl.spread(value(ids[:, :-1], keep=chooses), batch.answer[rows])


def answer_scores(reward, batch, rows):
    """The reward model's score of prompt and answer at their last real token, (B,)."""
    ids, _, ends = batch.read(rows)
    return reward(ids, keep=ends)


@torch.no_grad()
def judge(policy, reference, value, reward, batch, config, setup):
    """-> scores (B,), logprobs, ref_logprobs, values, entropies (B, R). The policy's log-probabilities are not taken
    from the generator, whose cached keys round differently: in bf16 that alone moves the ratio by 1.5 %."""
    parts, slices = [], batch.slices(torch.arange(len(batch.ids), device=batch.ids.device), config.micro_batch_size)
    for rows in slices:
        with setup.autocast():
            old, entropies = answer_logprobs(policy, batch, rows, config, with_entropy=True)
            parts.append((answer_scores(reward, batch, rows), old, answer_logprobs(reference, batch, rows, config),
                          answer_values(value, batch, rows) if value else torch.zeros_like(old), entropies))
    back = torch.cat(slices).argsort()                    # to the order of the batch
    return tuple(torch.cat(column)[back] for column in zip(*parts))


def critic_from(reward):
    """The value network: the reward model's trunk, which already reads answers for what they are worth, and a head that
    says 0 to everything. A drawn head would say something large and random, and the first updates would be about it."""
    value = copy.deepcopy(reward)
    torch.nn.init.zeros_(value.score.weight)
    torch.nn.init.zeros_(value.score.bias)
    return value.requires_grad_(True)


# --- Improvement -----------------------------------------------------------------------------------------------------

def improve(policy, value, optimizers, batch, old, update, config, setup, check=False):
    """Epochs of minibatches over one batch of answers. old: dict of logprobs, values, advantages, returns (B, R) as
    they were when the answers were sampled. -> dict of means, and first_ratio: the largest |log ratio| before any step.
    policy and value (None in GRPO) have an optimiser and a clipped gradient each: no coefficient has to balance them,
    and a critic that is far off can not take the policy's share of the norm."""
    networks = [network for network in (policy, value) if network]
    generator = torch.Generator().manual_seed(seed_of(config.seed, "minibatches", update, setup.rank))
    sums = torch.zeros(5, device=batch.ids.device)        # policy loss, value loss, approx_kl, clipped, tokens
    steps, first_ratio, stopped = 0, 0.0, False
    orders = [torch.randperm(len(batch.ids), generator=generator).to(batch.ids.device) for _ in range(config.epochs)]
    for rows in [rows for order in orders for rows in order.chunk(config.minibatches)]:
        # All tokens of the step, on all ranks: in a mean of micro-batches' means, a short answer's token weighs more.
        count = all_sum(batch.answer[rows].sum(), setup)
        here = torch.zeros(4, device=batch.ids.device)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for micro in accumulate(batch.slices(rows, config.micro_batch_size), *networks):
            mask, before = batch.answer[micro], old["logprobs"][micro]
            with setup.autocast():
                new = answer_logprobs(policy, batch, micro, config)
                loss = rl.policy_loss(new, before, old["advantages"][micro], config.clip_range)
                if not value:
                    loss = loss + old["kl_coef"] * rl.kl_loss(new, old["ref_logprobs"][micro])
                    loss = loss * count * rl.token_weights(mask, config.aggregation, count, len(rows) * setup.world,
                                                           config.max_new_tokens)         # a sum over tokens, as PPO's
                loss = rl.masked_sum(loss, mask)
                (loss * setup.world / count).backward()                     # DDP averages over ranks: hence * world
                error = torch.zeros_like(loss)
                if value:
                    error = rl.value_loss(answer_values(value, batch, micro), old["values"][micro],
                                          old["returns"][micro], config.value_clip_range)
                    error = rl.masked_sum(error, mask)
                    (error * setup.world / count).backward()
            with torch.no_grad():
                moved = rl.masked_sum(rl.approx_kl(new, before), mask)
                clipped = rl.masked_sum(rl.clipped(new, before, config.clip_range), mask)
                here += torch.stack([loss, error, moved, clipped])
                if steps == 0:
                    first_ratio = max(first_ratio, rl.largest(new - before, mask))
        here = all_sum(here, setup)
        if check and steps == 0:                              # the same weights on the same tokens, so the ratio is 1
            bound = 0.05 if setup.dtype != torch.float32 else 1e-5 if setup.device.type == "cpu" else 1e-4
            stop_if_wrong([
                f"the first minibatch's log ratio is up to {first_ratio:.2g} before any step; at most {bound} is "
                "rounding. Probably the update scores at another temperature than the roll-out, has dropout on, or "
                "looks at other positions."] * (first_ratio >= bound), setup)
        # Has the policy left the neighbourhood in which these answers say something about it? Then no step is taken:
        # multiplying the loss by 0 would not do, Adam's momentum moves the weights without any gradient.
        if stopped := bool(config.max_approx_kl and here[2] / count > config.max_approx_kl):
            break
        norms = [clip(network.parameters(), config.grad_clip).item() for network in networks]
        if not math.isfinite(sum(norms)):
            refuse_once(setup, f"update {update}: the gradients' norms are {norms}: nothing that could be learned "
                        "from. The last checkpoint is as it was; lower --learning_rate, or use --dtype=fp32")
        for optimizer in optimizers:
            optimizer.step()
        steps += 1
        sums += torch.cat([here, count[None]])
    means = (sums[:4] / sums[4].clamp(min=1)).tolist()
    return {**dict(zip(("policy_loss", "value_loss", "approx_kl", "clipfrac"), means)),
            "first_ratio": first_ratio, "optimizer_steps": steps, "stopped_early": stopped}


def seed_of(*parts):
    """A seed that is a function of its parts, say (seed, purpose, update, rank): nothing random is carried from one
    update to the next, so a resumed run draws what it would have drawn."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little")


# --- Self-check ------------------------------------------------------------------------------------------------------

def self_check(policy, reference, reward, batch, judged, config, setup, fresh):
    """The identities that hold before the first step, whatever the task. Ends the run with what is probably wrong."""
    _, old, ref, *_ = judged
    exact, total, problems = setup.dtype == torch.float32, lambda t: all_sum(t, setup), []
    surprises, entropies, variances = witness(policy, batch, config)

    # In bf16 single tokens are 0.07 apart for no other reason than rounding, so there it is the mean, and its measure
    # what rounding does to scoring or generation, whichever is nearer to the witness.
    mean = lambda x: rl.masked_mean(x.abs(), batch.answer, total).item()
    apart = old - batch.sampled_logprobs
    gap, most = (rl.largest(apart, batch.answer), 1e-4) if exact else (
        mean(apart), 2 * min(mean(old + surprises), mean(batch.sampled_logprobs + surprises)))
    if not gap <= most:
        problems.append(
            f"log-probabilities of the sampled tokens are {'up to' if exact else 'on average'} {gap:.2g} apart between "
            f"generation and scoring; rounding explains {most:.2g}. Probably one does not divide by the temperature, "
            "counts positions of padding (on the left of prompts), has dropout on, or another precision.")
    drift = rl.largest(old - ref, batch.answer)
    if fresh and drift != 0:
        problems.append(
            f"before the first step, policy and reference differ by up to {drift:.2g} in a token's log-probability; it "
            "must be exactly 0. Probably the reference is no copy, or scored at another temperature or with dropout.")
    nats, errors = rl.entropy_gap(surprises, entropies, variances, batch.answer, total)
    if abs(errors) > 5:
        problems.append(
            f"the mean of -log p over the sampled tokens is {nats:+.3f} nats away from the mean entropy, {errors:+.1f} "
            "standard errors. The tokens were not drawn from the distribution that scores them. Probably there is "
            f"{'top_k, top_p or a lower' if errors < 0 else 'a higher'} temperature when sampling. No ratio shows it.")
    elif abs(errors) > 3:
        setup.say(f"warning: -log p of the samples is {errors:+.1f} standard errors from the entropy; by chance that "
                  "happens 1 time in 370")
    problems += [f"padding on the left changes the {name} by up to {moved:.2g}. Probably padding is attended to, or "
                 "positions are not counted from the mask."
                 for name, moved in padding_gaps(policy, reward, batch, config, setup).items()
                 if moved > (1e-3 if exact else 0.2)]
    stop_if_wrong(problems, setup)
    setup.say(f"self-check: generation and scoring agree to {gap:.1g}, the reference to {drift:.1g}; -log p of the "
              f"samples is {errors:+.1f} standard errors from the entropy")


@torch.no_grad()
def witness(policy, batch, config):
    """-log p of the sampled tokens, and entropy and variance where each was chosen, (B, R) each. From fp32 logits, with
    padding where the generator had it, and not through `logprobs`, so that it is a second witness."""
    parts, width = [], batch.prompt_width
    for rows in torch.arange(len(batch.ids), device=batch.ids.device).split(config.micro_batch_size):
        logits = policy(batch.ids[rows], mask=batch.mask[rows])[:, width - 1:-1].float() / config.temperature
        parts.append(rl.surprise(logits, batch.ids[rows][:, width:]))
    return tuple(torch.cat(column) for column in zip(*parts))


@torch.no_grad()
def padding_gaps(policy, reward, batch, config, setup, extra=5):
    """-> {name: gap}: how far log-probabilities, values and scores of a few answers are from those of the same rows as
    they stand, with `extra` more padding on the left. Values: what the critic's way of reading gives of the reward
    model, since the critic still says 0 to everything."""
    rows, first = torch.arange(min(4, len(batch.ids)), device=batch.ids.device), batch.prompt_width + extra - 1
    ids, mask, answer = pad(batch.ids[rows], (extra, 0)), pad(batch.mask[rows], (extra, 0)), batch.answer[rows]
    with setup.autocast():
        seen, logp = reward(ids, mask=mask), logprobs(policy, ids, mask, config.temperature)
        return {"log-probabilities": rl.largest(answer_logprobs(policy, batch, rows, config) - logp[:, first:], answer),
                "values": rl.largest(answer_values(reward, batch, rows) - seen[:, first:-1], answer),
                "scores": rl.largest(answer_scores(reward, batch, rows) - rl.at_last(seen, mask), answer.any(1))}


def stop_if_wrong(problems, setup):
    """Refuses on all ranks when one of them found something: a rank alone would leave the others waiting."""
    if all_sum(torch.tensor(float(len(problems)), device=setup.device), setup) > 0:
        refuse(*(problems or ["another process found the first update to be wrong"]),
               "No step was taken. --self_check=False skips these checks; what they found is wrong all the same.")


# --- Prompts and results ---------------------------------------------------------------------------------------------

def measures(batch, prompts, scores, drift):
    """What is told of answers, (5, B) in the order of MEASURES. scores (B,), drift (B, R) log(policy / reference). gold
    is what the rule behind the preferences thinks of them; NaN where there is no rule."""
    gold = [remark.score(text) if prompt.get("kind") == "remark" else math.nan
            for prompt, text in zip(prompts, batch.texts)]
    return torch.stack([scores, torch.tensor(gold, device=scores.device), torch.where(batch.answer, drift, 0.0).sum(-1),
                        batch.ended.float(), batch.answer.sum(-1).float()])


@torch.no_grad()
def evaluate(policy, reference, value, reward, prompts, tokenizer, config, setup):
    """Sampled answers to held-out prompts -> the means of MEASURES, the deviation of gold, and three answers."""
    columns, examples = [], []
    for i, some in enumerate(my_share(prompts, config.micro_batch_size, setup)):
        seed = seed_of(config.seed, "evaluation", i * config.micro_batch_size, setup.rank)
        batch = roll_out(policy, [prompt["ids"] for prompt in some], tokenizer, config, seed, setup)
        scores, old, ref, *_ = judge(policy, reference, value, reward, batch, config, setup)
        found = measures(batch, some, scores, old - ref)
        columns.append(torch.cat([found, found[1:2].square()]))            # gold's square, for its deviation
        examples += [f"{prompt['messages'][-1]['content']} -> {text}" for prompt, text in zip(some, batch.texts)]
    *means, square = (all_sum(torch.cat(columns, dim=1).double().sum(-1), setup) / len(prompts)).tolist()
    numbers = dict(zip(MEASURES, means))
    deviation = max(0.0, square - numbers["gold"] ** 2) ** 0.5
    return {"answers": len(prompts), **numbers, "gold_deviation": deviation, "examples": examples[:3]}


def verdict(before, after, config):
    """Whether the result is within the bounds. gold, if there is one, must rise by a deviation of the start's
    answers."""
    rise = (after["gold"] - before["gold"]) / max(before["gold_deviation"], 1e-9)
    bounds = {name: {"found": found, "at_least": bound, "held": found >= bound} for name, found, bound in (
        ("gold_rise", rise, 1.0), ("stop_rate", after["stop_rate"], config.bound_stop_rate)) if not math.isnan(found)}
    for name, bound in (("kl", config.bound_kl), ("length", config.bound_length)):
        bounds[name] = {"found": after[name], "at_most": bound, "held": after[name] <= bound}
    return {"gold_rise_in_deviations": rise, "bounds": bounds}


def show(result, folder, verdicts):
    """The result, for people."""
    print(f"{'held-out prompts':18}{'before':>10}{'after':>10}")
    gold = ("gold", "gold_deviation") * (not math.isnan(result["after"]["gold"]))      # the demonstration's alone
    for name in (*gold, "score", "kl", "stop_rate", "length"):
        print(f"{name:18}{result['before'][name]:10.3f}{result['after'][name]:10.3f}")
    for name, bound in result["bounds"].items():
        promise = f"at least {bound['at_least']}" if "at_least" in bound else f"at most {bound['at_most']}"
        word = "too short a run to judge" if not verdicts else "held    " if bound["held"] else "NOT HELD"
        print(f"{word}  {name} {bound['found']:.2f}, bound {promise}")
    for text in (*(f"    {example}" for example in result["after"]["examples"]), f"policy in {folder}"):
        print(printable(text), flush=True)


# --- The run ---------------------------------------------------------------------------------------------------------

def problems_of(config, setup):
    """Everything about the configuration that can not work, a sentence each."""
    found = []
    if config.top_k != 0 or config.top_p != 1.0:
        found.append(f"top_k = {config.top_k}, top_p = {config.top_p}: PPO weighs each token by its probability under "
                     "the policy, so it must be drawn from just that distribution, which only 0 and 1.0 do")
    episodes, world = config.episodes, setup.world
    if episodes < 1 or episodes % (world * max(1, config.minibatches)):
        found.append(f"{episodes = } can not be shared by {world} processes and {config.minibatches} minibatches")
    if config.group == 1 or config.group < 0 or episodes % max(1, config.group * world):
        found.append(f"group must be 0 (PPO) or from 2 on, and {world} processes with whole groups must make up "
                     f"{episodes = }; found {config.group}")
    if config.aggregation not in ("token", "sequence", "constant"):
        found.append(f"aggregation must be 'token', 'sequence' or 'constant', found {config.aggregation!r}")
    found += config.below_one("updates", "epochs", "minibatches", "max_new_tokens", "micro_batch_size", "log_every",
                              "kl_horizon")
    found += config.outside(temperature=(0.01,), gamma=(0, 1), lam=(0, 1), clip_range=(0,), value_clip_range=(0,),
                            kl_coef=(0,), kl_target=(0,)) + optimiser_problems(config)
    found += weight_problems(config.dimensions) + lora.problems(config.lora_rank, config.lora_alpha, 0.0, lora.LINEARS)
    if config.eval_prompts < world:
        found.append(f"eval_prompts = {config.eval_prompts}: expected at least one for each of {world} processes")
    return found


def read_models(config, setup):
    """-> policy, reward model, tokenizer, and {what: folder} of both. Refuses two that do not belong together: ids that
    mean something else to the other model, or a head that was drawn at random, give scores that look like any."""
    ours = find_folder(config.policy_from or Path(config.out_dir) / "sft")
    theirs = find_folder(config.reward_from or Path(config.out_dir) / "reward")
    policy, tokenizer = read_model(ours, attention=config.attention)
    reward, other = read_model(theirs, kind="scalar", attention=config.attention)
    found = []
    if tokenizer.hash != other.hash:
        found.append(f"{ours} and {theirs} have different tokenizers ({tokenizer.hash[:16]}, {other.hash[:16]}); train "
                     "the reward model from this policy's own stage: reward.py --init_from=DIR")
    if "ForSequenceClassification" not in str(read_json(theirs / "config.json").get("architectures")):
        found.append(f"{theirs} is no reward model: it has no head of one number. reward.py makes one")
    if reward.config.block_size < policy.config.block_size:
        found.append(f"{theirs} reads {reward.config.block_size} tokens, {ours} writes {policy.config.block_size}")
    if config.lora_rank and policy.config.adapter_size:
        found.append(f"lora_rank goes with no policy that has adapters, as {ours} has: leave it at 0")
    weights = config.dimensions or reward.dimensions
    if unknown := weights.keys() - reward.dimensions.keys():
        found.append(f"dimensions: {theirs} has no head for {', '.join(sorted(unknown))}, but for "
                     f"{', '.join(reward.dimensions) or 'one without a name'}")
    refuse_once(setup, *found)
    if weights:
        reward.add_up({name: shares(weights).get(name, 0.0) for name in reward.dimensions})
    return policy, reward, tokenizer, {"model": ours, "reward": theirs}


def main(config):
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    dtype = "fp32" if config.dtype == "auto" and on_cpu else config.dtype      # bf16 moves the ratio more than a step
    setup = start(config.device, dtype, config.deterministic, config.threads, config.seed)
    with Alive(setup) as alive:
        ppo(config, setup, alive)


def ppo(config, setup, alive):
    refuse_once(setup, *problems_of(config, setup))
    data = Path(config.data_dir) / "chat"
    files = [data / f"prompts_{name}.jsonl" for name in ("train", "val")]
    refuse_missing(setup, dict.fromkeys(files, "prompts"), f"The demonstration's: {config.command('prepare_chat.py')}",
                   'Your own: {"messages": [..., the user\'s turn last]} a line; some of them held out, in the second '
                   'file')
    policy, reward, tokenizer, folders = read_models(config, setup)

    # The prompts: for training, and held out. Looked at before the folder is bound to the settings.
    longest = policy.config.block_size - config.max_new_tokens
    (prompts, long), (held_out, _) = (chat.rendered_prompts(file, tokenizer, longest) for file in files)
    held_out = held_out[:config.eval_prompts]
    if not prompts or len(held_out) < setup.world:
        refuse_once(setup, f"{data}/prompts_*.jsonl: none of at most {longest} tokens (a context of "
                    f"{policy.config.block_size} less max_new_tokens = {config.max_new_tokens}), or fewer than "
                    "processes")
    size = policy.n_params()
    run, lock = open_run(config, "ppo", setup, size, size * (3 if config.group else 6), **folders, prompts=files[0])
    if lock is None:
        return

    # The four networks, in eval mode for the whole run: with dropout on, the ratio would be noise.
    policy.to(setup.device).eval()
    reward.to(setup.device).eval().requires_grad_(False)
    value = None if config.group else critic_from(reward)
    if config.lora_rank:
        reference = lora.SwitchedOff(lora.add(policy, config.lora_rank, config.lora_alpha, seed=config.seed))
        if value:
            lora.add(value, config.lora_rank, config.lora_alpha, seed=config.seed).score.requires_grad_(True)
    else:
        reference = copy.deepcopy(policy).requires_grad_(False)
    held = [network for network in (policy, value, reward, reference) if isinstance(network, torch.nn.Module)]
    memory = sum(p.nbytes * (4 if p.requires_grad else 1) for network in held for p in network.parameters())
    setup.say(f"ppo: {len(held)} networks of {size:,} parameters, {memory / 2**20:,.0f} MiB: policy"
              f"{' and critic' if value else ''} with gradients and Adam's moments, reward model and reference frozen"
              f"{' (the reference is the policy without its LoRA)' if config.lora_rank else ''}; on {setup.device}, "
              f"{setup.dtype}\nppo: {len(prompts):,} prompts ({long} too long), {len(held_out)} held out; "
              f"{config.updates} updates of {config.episodes} answers, {config.epochs} epochs of {config.minibatches} "
              "minibatches")

    # Adam's eps: with the usual 1e-8, parameters whose gradients are next to nothing take steps of full size.
    modules = {"policy": policy, **({"value": value} if value else {})}
    peaks = config.learning_rate, config.value_learning_rate
    moments = {name: adamw(modules[name], peak, config.weight_decay, eps=1e-5) for name, peak in zip(modules, peaks)}
    optimizers = list(moments.values())
    trained = wrap(policy, setup), value and wrap(value, setup)     # so that ranks do not drift apart

    # Where it starts from: a checkpoint of this run, or the held-out numbers of the starting model.
    state = checkpoint.resume(run, modules, moments, setup) or {"step": 0}
    first, kl_coef = state["step"], state.get("kl_coef", config.kl_coef)
    at_start = state.get("before") or evaluate(policy, reference, value, reward, held_out, tokenizer, config, setup)
    at_start = {name: math.nan if found is None else found for name, found in at_start.items()}    # JSON knows no NaN
    total = lambda tensor: all_sum(tensor, setup)
    monitor = Monitor(run, setup, config.updates, first, label="ppo")

    for update in range(first, config.updates):
        began = time.perf_counter()
        lr, *_ = [set_lr(optimizer, lr_at(update, config.updates + 1, peak, 0, "linear", final=0.0))
                 for optimizer, peak in zip(optimizers, peaks)]

        # 1. Roll out. Each rank answers other prompts.
        times = max(1, config.group)
        order = step_blocks(update, config.episodes // times, len(prompts), config.seed)[setup.rank::setup.world]
        asked = [prompts[i] for i in order for _ in range(times)]
        seed = seed_of(config.seed, "rollout", update, setup.rank)
        batch = roll_out(policy, [prompt["ids"] for prompt in asked], tokenizer, config, seed, setup)
        rolled_out = time.perf_counter()

        # 2. Judge.
        judged = judge(policy, reference, value, reward, batch, config, setup)
        scores, old, ref, values, entropies = judged

        # 3. Reward: the divergence is in it and not in the loss, so that GAE hands it on to the tokens before. And
        # 4. advantages: the critic learns returns as they are; the policy gets advantages whitened over all ranks.
        before = {"logprobs": old, "ref_logprobs": ref, "values": values, "kl_coef": kl_coef}
        penalised = rl.penalise_missing_end(scores, batch.ended, config.missing_end_penalty)
        if config.group:
            better = rl.group_advantages(penalised, config.group, config.group_deviation)
            before["advantages"] = torch.where(batch.answer, better[:, None], 0.0)
        else:
            rewards = rl.kl_rewards(old, ref, batch.answer, kl_coef)
            rewards = rl.place_score(rewards, penalised, batch.answer)         # at the end token itself
            advantages, before["returns"] = rl.gae(rewards, values, batch.answer, config.gamma, config.lam)
            before["advantages"] = rl.whiten(advantages, batch.answer, total=total)
        scored = time.perf_counter()

        # 5. Self-check, before anything is learned.
        check = config.self_check and update == first
        if check:
            self_check(policy, reference, reward, batch, judged, config, setup, fresh=update == 0)

        # 6. Improve.
        learned = improve(*trained, optimizers, batch, before, update, config, setup, check)

        # 7. Log, adapt, save.
        means = (total(measures(batch, asked, scores, old - ref).sum(-1)) / config.episodes).tolist()
        numbers = dict(zip(MEASURES, means))
        if value:
            numbers["explained_variance"] = rl.explained_variance(values, before["returns"], batch.answer, total).item()
        numbers.update(learned, entropy=rl.masked_mean(entropies, batch.answer, total).item(), kl_coef=kl_coef, lr=lr,
                       rollout_seconds=rolled_out - began, scoring_seconds=scored - rolled_out,
                       update_seconds=time.perf_counter() - scored)
        if config.kl_target:
            kl_coef = rl.adapted_kl_coef(kl_coef, numbers["kl"], config.kl_target, config.episodes, config.kl_horizon)
        monitor.advance()
        done, leaving = update + 1, alive.leaving()
        if done % config.log_every == 0 or done == config.updates:
            gold = "" if math.isnan(numbers["gold"]) else "gold {gold:+.2f}  "
            line = "score {score:+.2f}  " + gold + "kl {kl:.2f}  stops {stop_rate:.0%}  length {length:.1f}"
            monitor.log(done, line.format(**numbers), **numbers)
        if done < config.updates:
            end_step(run, done, config.updates, config, modules, moments, tokenizer,
                     {"kl_coef": kl_coef, "before": at_start}, setup, monitor, leaving, plain=lora.merged)
    monitor.close()

    # What has come of it, on the held-out prompts.
    after = evaluate(policy, reference, value, reward, held_out, tokenizer, config, setup)
    with lora.merged(policy):
        folder = checkpoint.save_light(run, config.updates, policy, tokenizer, setup, {"config_hash": config.hash})
    if setup.is_main:
        result = {"updates": config.updates, "episodes": config.episodes, "before": at_start, "after": after,
                  **verdict(at_start, after, config)}
        write_json(run / "result.json", result)
        show(result, folder, config.verdicts)
    finish(setup)


if __name__ == "__main__":
    main(configure(globals()))
