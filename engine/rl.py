"""
The formulas of reinforcement learning from preferences, each a pure function that can be held against its paper.

Letters in the shapes:  B answers   R tokens of the longest answer   T prompt and answer together   V vocabulary

`mask` (B, R) is bool: True at each token of the answer, its end token included; False at the padding behind it. What
stands under False may be anything, inf and NaN too: every function picks with torch.where and never multiplies by a
mask, since NaN * 0 is NaN. There are no sentinel values either: a log-probability of 1.0 that means "padding" ends in
an average one day and the entropy is negative (as in several trainers).

Losses are returned per token (or per pair), not averaged. The caller adds up over the whole optimiser step,
micro-batches and ranks, and divides by the count of the whole step. A mean of means would weigh a token by the company
that it is in.

Sources: PPO: Schulman et al. 2017 (arXiv 1707.06347). GAE: 2015 (1506.02438). RLHF: Stiennon et al. 2020 (2009.01325),
Ouyang et al. 2022 (2203.02155); the details that decide: Huang et al. 2024 (2403.17031).
"""
import torch
import torch.nn.functional as F


# ------------------------------------------------------------------------------------------------------------- masks

def is_last(mask):
    """(B, T) bool -> (B, T) bool: True at each row's last True, wherever the padding is; a row of padding has none."""
    still_to_come = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (still_to_come == 1)


def at_last(values, mask):
    """values (B, T) -> (B,): the value at each row's last real token."""
    return torch.where(is_last(mask), values, 0.0).sum(-1)


def spread(values, mask):
    """values (N,), one for each True of mask -> as mask (B, R), 0 where it is False"""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def masked_sum(x, mask):
    """The sum of x where mask is True. Divide it by the count of the whole optimiser step."""
    return torch.where(mask, x, 0.0).sum()


def masked_mean(x, mask, total=lambda t: t):
    """The mean of x where mask is True. total: sums a tensor over the ranks (engine.parallel.all_sum)."""
    sum_and_count = total(torch.stack([masked_sum(x, mask), mask.sum().to(x.dtype)]))
    return sum_and_count[0] / sum_and_count[1].clamp(min=1)


def whiten(x, mask, keep_mean=False, total=lambda t: t):
    """x (B, R) -> (B, R) with deviation 1 over the True of mask on all ranks, mean 0 unless keep_mean; 0 in padding.

    Advantages lose their mean: otherwise a batch in which everything was good makes every token likelier, whatever it
    was. (Whitened *rewards* keep it.) If all x are equal the result is 0 and not NaN."""
    mean = masked_mean(x, mask, total)
    variance = masked_mean((x - mean).square(), mask, total)
    white = (x - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, white + mean if keep_mean else white, 0.0)


# ----------------------------------------------------------------------------------------------------------- rewards

def kl_rewards(logprobs, ref_logprobs, mask, kl_coef):
    """-> (B, R): minus kl_coef times log(policy / reference) of each token, the estimator called k1.

    It is in the *reward*, so that a token also answers for the drift that it leads to later. Its mean over samples of
    the policy is the exact KL; single values may be negative."""
    return torch.where(mask, -kl_coef * (logprobs - ref_logprobs), 0.0)


def penalise_missing_end(scores, ended, penalty):
    """scores (B,), ended (B,) bool -> (B,). An answer that was cut at the length limit loses `penalty`: its score
    judges a text that nobody would be shown. Otherwise longer and longer answers are a way to a higher score."""
    return torch.where(ended, scores, scores - penalty)


def place_score(rewards, scores, mask):
    """Adds scores (B,) to rewards (B, R) at the last token of each answer, which is the end token where there is one.
    One place later, on padding, GAE would hand the end token only lambda * score."""
    return rewards + torch.where(is_last(mask), scores[:, None], 0.0)


def adapted_kl_coef(kl_coef, kl, target, answers, horizon):
    """The coefficient after `answers` more samples whose mean KL was kl: up when kl is above the target. Changes by at
    most 20 % per `horizon` samples (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * answers / horizon)


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """Generalised advantage estimation. rewards, values (B, R) -> advantages, returns (B, R); 0 in padding.

        delta_t = r_t + gamma V_{t+1} - V_t         V behind the end is 0: nothing follows, whatever the network says
        A_t     = delta_t + gamma lam A_{t+1}        return_t = A_t + V_t
    """
    values, rewards = torch.where(mask, values, 0.0), torch.where(mask, rewards, 0.0)
    advantages = torch.zeros_like(values)
    after, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.size(1))):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        after = delta + gamma * lam * after                      # in the padding, delta is 0 and nothing came after yet
        advantages[:, t], next_value = after, values[:, t]
    return advantages, advantages + values


def group_advantages(scores, size, by_deviation=True):
    """GRPO (Shao et al. 2024, arXiv 2402.03300): an answer is as good as it is better than the others to its prompt; so
    no critic is needed. scores (B,), `size` answers to a prompt one after the other -> (B,), each group's sum 0.

    by_deviation: divided by the group's deviation + 1e-4. A group in which all are equally good then learns nothing,
    and one that differs by a hair as much as one that differs by much; without, as in Dr. GRPO (Liu et al. 2025,
    2503.20783), it learns as much as there is to gain."""
    groups = scores.view(-1, size)
    advantages = groups - groups.mean(1, keepdim=True)
    if by_deviation:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    # Of equal scores the mean may be off by a rounding: that is no advantage.
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0.0, advantages).flatten()


# ------------------------------------------------------------------------------------------------------------ losses

def policy_loss(logprobs, old_logprobs, advantages, clip):
    """PPO's clipped loss of each token, (B, R). The worse of the two counts (max, as losses): gains end at the edge of
    [1 - clip, 1 + clip], while a move in the wrong direction is always paid in full.

    The log ratio is held within 20, or one token that became e^90 times likelier would be inf, and then all would be
    NaN."""
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))


def value_loss(values, old_values, returns, clip):
    """Half the squared error of each token, (B, R), or that of the value clipped to within `clip` of the *old* value,
    whichever is larger. (min would reward running away from the old value.)"""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns).square(), (clipped - returns).square())


def ranking_loss(chosen, rejected, margin=None, centring=0.0):
    """-log sigmoid(chosen - rejected - margin) of each pair: Bradley & Terry 1952. Scores of one shape, margin one that
    fits it or None.

    Only differences matter, so scores may drift off together; centring > 0 adds centring * (chosen + rejected)^2."""
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(difference) + centring * (chosen + rejected).square()


def kl_loss(logprobs, ref_logprobs):
    """(B, R) ref / policy - 1 - log(ref / policy), the estimator called k3: an unbiased one of KL(policy || reference)
    that is never negative (Schulman, joschu.net/blog/kl-approx.html). GRPO has it in the loss. At the start it is 0 and
    so is its gradient."""
    ratio = (ref_logprobs - logprobs).clamp(-20, 20)
    return ratio.exp() - 1 - ratio


def token_weights(mask, kind, tokens, answers, longest):
    """What each token's loss is multiplied by in the sum over an optimiser step, (B, R). tokens, answers: how many
    there are in the whole step, on all ranks; longest: the limit of an answer's length.

    'token'     1 / tokens: all alike (DAPO, Yu et al. 2025, arXiv 2503.14476; PPO too)
    'sequence'  each answer alike, its tokens share that: a long bad answer is punished less per token than a short one,
                so wrong answers become longer (GRPO as published)
    'constant'  1 / (answers longest): all alike, and a step of short answers is a smaller step (Dr. GRPO)"""
    weight = {"token": 1 / tokens, "constant": torch.ones((), device=mask.device) / (answers * longest),
              "sequence": 1 / (answers * mask.sum(1, keepdim=True).clamp(min=1))}[kind]
    return torch.where(mask, weight, 0.0)


def dpo_loss(chosen, rejected, beta, kind="dpo", smoothing=0.0):
    """The loss of each pair, (P,). chosen, rejected (P,): log(policy / reference) of the two answers, what DPO takes
    for their rewards, in units of 1 / beta. It is ln 2 as long as policy and reference are one.

    'dpo'  -log sigmoid(beta (chosen - rejected)), of sums over the tokens (Rafailov et al. 2023, arXiv 2305.18290, eq. 7)
    'ipo'  (chosen - rejected - 1 / (2 beta))^2, of means over the tokens: does not push for ever where all agree (Azar
           et al. 2023, 2310.12036, eq. 17)
    smoothing: the share of pairs that are taken to be labelled the wrong way round (Mitchell 2023, "cDPO")."""
    margin = chosen - rejected
    if kind == "ipo":
        return (margin - 1 / (2 * beta)).square()
    return -(1 - smoothing) * F.logsigmoid(beta * margin) - smoothing * F.logsigmoid(-beta * margin)


# ------------------------------------------------------------------------------------------------------------ gauges

def approx_kl(logprobs, old_logprobs):
    """(B, R) half the squared log ratio: KL(old || new) to second order (Schulman, joschu.net/blog/kl-approx.html),
    never negative. Sum it under the mask: over padding too, it would be diluted by zeros."""
    return 0.5 * (logprobs - old_logprobs).square()


def clipped(logprobs, old_logprobs, clip):
    """(B, R) 1.0 where the ratio left [1 - clip, 1 + clip]; its mean is the `clipfrac` of the log."""
    return (((logprobs - old_logprobs).exp() - 1).abs() > clip).float()


def explained_variance(values, returns, mask, total=lambda t: t):
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 knows only a constant, below 0 is harmful."""
    def variance(x):
        return masked_mean((x - masked_mean(x, mask, total)).square(), mask, total)
    return 1 - variance(returns - values) / variance(returns).clamp(min=1e-12)


def pair_accuracy(chosen, rejected):
    """(B,) 1.0 where the chosen answer scores higher, 0.5 for a tie: a head that says the same to everything is at
    chance and not at zero."""
    return (chosen > rejected).float() + 0.5 * (chosen == rejected).float()


# ------------------------------------------------------------------------------------------------------- self-checks

def surprise(logits, ids):
    """What a sampled token says about the distribution that it was drawn from. logits (B, R, V) already divided by the
    temperature, ids (B, R) the sampled tokens -> three tensors (B, R): -log p(token), its mean over the distribution
    (which is the entropy), and its variance. Written out by itself on purpose: it is the witness against `logprobs`."""
    logp = logits.float().log_softmax(-1)
    p = logp.exp()
    entropy = -torch.where(p > 0, p * logp, 0.0).sum(-1)
    variance = torch.where(p > 0, p * (logp + entropy[..., None]).square(), 0.0).sum(-1)
    return -logp.gather(-1, ids[..., None]).squeeze(-1), entropy, variance


def entropy_gap(surprises, entropies, variances, mask, total=lambda t: t):
    """-> (gap, standard errors): mean(-log p of the samples) - mean(entropy), and that divided by its standard error.

    If the tokens were drawn from the distribution that scores them, -log p has the entropy as its mean at every token,
    the differences do not correlate, and so the second number has variance 1, exactly. Sampling with top-k makes it
    strongly negative, and no other gauge sees that: the ratio is 1 and the reward goes up all the same. (The variance
    is the distribution's own, not the samples': a peaked policy's samples may all be the likely token, and their spread
    then is 0.)"""
    count, gap, variance = total(torch.stack([mask.sum().double(), masked_sum(surprises.double() - entropies, mask),
                                              masked_sum(variances.double(), mask)]))
    variance = variance.clamp(min=1e-6 * count)                  # a uniform or certain policy has only rounding errors
    return (gap / count).item(), (gap / variance.sqrt()).item()


def largest(x, mask):
    """The largest |x| where mask is True, as a number; NaN counts as infinite, or it would pass under a bound."""
    x = torch.where(mask, x, 0.0).abs()
    return torch.nan_to_num(x, nan=float("inf")).max().item() if x.numel() else 0.0
