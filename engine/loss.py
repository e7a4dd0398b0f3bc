"""
The one token loss and the one log-probability function.

Losses are summed, never averaged, over tokens: the caller divides the sum over the *global* step by the global sum of
weights. A mean per micro-batch, averaged over micro-batches, would weigh a token more in a batch that has few of them.
"""
import torch.nn.functional as F


def token_losses(logits, targets):
    """-log p(target) of each position, fp32.   logits (..., V), targets (...) int64 -> as targets"""
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def logprobs(model, ids, mask, temperature=1.0, with_entropy=False):
    """log p(ids[t+1] | ids[..t]) for every position but the first, fp32.

    ids (B, T) int64; mask (B, T) bool, True where a token is real (padding may be left or right); temperature: that of
    sampling, since a policy that samples at 0.7 and is scored at 1 is two policies.
    -> (B, T-1); with_entropy: also the entropy of each of those distributions, in nats, (B, T-1)."""
    logits = model(ids, mask=mask)[:, :-1].float() / temperature
    logp = logits.log_softmax(-1)                                          # (B, T-1, V)
    chosen = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    if not with_entropy:
        return chosen
    return chosen, -(logp.exp() * logp).sum(-1)
