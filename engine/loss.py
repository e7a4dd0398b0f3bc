"""
The one token loss and the one log-probability function.

Losses are summed, never averaged, over tokens: the caller divides the sum over the *global* step by the global sum of
weights. A mean per micro-batch, averaged over micro-batches, would weigh a token more in a batch that has few of them.
"""
import functools

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def token_losses(logits, targets):
    """-log p(target) of each position, fp32.   logits (..., V), targets (...) int64 -> as targets"""
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def scores(model, hidden, targets, z_loss, head=0):
    """(objectives, losses) of hidden (..., C), each like targets (...)."""
    logits = model.logits(hidden, head)
    losses = token_losses(logits, targets)
    return losses + z_loss * logits.float().logsumexp(-1).square() if z_loss else losses, losses


@functools.cache                # made when it is asked for: what only reads a model need not load the compiler
def compiled_scores(dynamic):
    """`scores` with softmax, loss and their gradient in two passes over the logits and not in ten."""
    return torch.compile(scores, dynamic=dynamic)


def model_losses(model, ids, targets, chunk=0, z_loss=0.0, weights=None, **more):
    """What is made small and what is reported, of each target: (objectives, losses), fp32, each like targets.
    Of a stage that is not the last one (see Llama.forward): what it computes.

    ids (B, T); targets (B, T), or (N,) with keep among `more`, which goes to the model.

    chunk: so many tokens' logits exist at a time, 0: all. With a vocabulary of 128,256 the logits of 4,096 tokens are
    2 GiB in fp32, and softmax and gradient each as much again: more than all else that a small model needs. In chunks,
    they are computed anew in the backward pass: one more product with the last layer, and never more than one chunk
    (bench/loss.py).

    z_loss: the objective is the loss + z_loss * log(Z)^2, Z the sum of the softmax. That holds log Z near 0, where the
    logits are not rounded much; 1e-4 is usual (Chowdhery et al. 2022, arXiv 2204.02311, section 5).

    weights (B, T) of the targets: where a model has heads for later tokens (n_future), their losses are added to the
    objectives, for tokens with weight on the way and within the row: what follows a document's end is not foretold."""
    def of_head(model, hidden, targets, head=0):
        score = compiled_scores(model.dynamic) if model.compiled and torch.is_grad_enabled() else scores
        if not chunk:
            return score(model, hidden, targets, z_loss, head)
        pieces = zip(hidden.flatten(0, -2).split(chunk), targets.flatten().split(chunk))
        parts = [checkpoint(score, model, h, t, z_loss, head, use_reentrant=False) for h, t in pieces]
        return tuple(torch.cat(part).view_as(targets) for part in zip(*parts))

    def read(model, hidden):
        objectives, losses = of_head(model, hidden, targets)
        if weights is not None:
            counted = torch.ones_like(weights)
            for head in range(1, model.config.n_future):
                counted = counted[:, :-1] * weights[:, head:]
                further, _ = of_head(model, hidden[:, :-head], targets[:, head:], head)
                objectives = objectives + F.pad(further * counted, (0, head))
        return objectives, losses

    return model(ids, read=read, **more)


def logprobs(model, ids, mask=None, temperature=1.0, with_entropy=False, keep=None):
    """log p(ids[t+1] | ids[..t]) for every position but the last, fp32.

    ids (B, T) int64; mask (B, T) bool, True where a token is real (padding may be left or right; None: right only);
    temperature: that of sampling, since a policy that samples at 0.7 and is scored at 1 is two policies.
    keep (B, T-1) bool: only at these N positions.
    -> (B, T-1) or (N,); with_entropy: also the entropy of each of those distributions, in nats."""
    logits = model(ids[:, :-1], mask=mask if mask is None else mask[:, :-1], keep=keep).float()
    logp = (logits if temperature == 1 else logits / temperature).log_softmax(-1)          # (B, T-1, V) or (N, V)
    chosen = ids[:, 1:] if keep is None else ids[:, 1:][keep]
    chosen = logp.gather(-1, chosen[..., None]).squeeze(-1)
    if not with_entropy:
        return chosen
    return chosen, -(logp.exp() * logp).sum(-1)
