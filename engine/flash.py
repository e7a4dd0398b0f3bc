"""
Attention for compiled training on a CPU. The gradient that torch 2.13 has there takes seven times as long as the
forward pass, for rows of 64 tokens seventeen times. The one below takes half of it at 256 and a fifth at 64, where it
is compiled; eager, or for long rows, it is slower.
"""
import math

import torch

from model import attend

UP_TO = 512         # tokens of a row; longer ones have torch's gradient


def attend_on_cpu(q, k, v, allowed, kind):
    """model.attend; short causal rows through CpuFlash."""
    if kind != "flash" or allowed is not None or q.size(2) > UP_TO:
        return attend(q, k, v, allowed, kind)
    group = q.size(1) // k.size(1)
    return CpuFlash.apply(q, *(y.repeat_interleave(group, dim=1) if group > 1 else y for y in (k, v)))


class CpuFlash(torch.autograd.Function):
    """SDPA, causal, with a gradient of its own. q, k, v (B, H, T, D); the scores are fp32 here too."""

    @staticmethod
    def forward(ctx, q, k, v):
        y, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, y, log_sum)             # log_sum (B, H, T): of the softmax's denominators
        return y

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, y, log_sum = ctx.saved_tensors
        time, scale = q.size(2), 1 / math.sqrt(q.size(-1))
        starts = range(0, time, 128)                           # rows at a time: what they can not see is not computed
        dq, dk, dv = [], [[] for _ in starts], [[] for _ in starts]
        with torch.autocast("cpu", enabled=False):
            for start in starts:
                end = min(time, start + 128)
                rows, up_to = (slice(None), slice(None), slice(start, end)), (slice(None), slice(None), slice(end))
                causal = torch.ones(end - start, end, dtype=torch.bool).tril(start)
                scores = q[rows].float() @ k[up_to].float().transpose(-2, -1) * scale
                weights = torch.where(causal, (scores - log_sum[rows][..., None]).exp(), 0.0)
                d_weights = (gradient[rows] @ v[up_to].transpose(-2, -1)).float()
                middle = (gradient[rows].float() * y[rows].float()).sum(-1, keepdim=True)    # of d_weights, weighted
                d_scores = (weights * (d_weights - middle) * scale).to(q.dtype)
                dq.append(d_scores @ k[up_to])
                for parts, part in ((dk, d_scores.mT @ q[rows]), (dv, weights.to(q.dtype).mT @ gradient[rows])):
                    for i, piece in enumerate(part.split(128, dim=2)):
                        parts[i].append(piece.float())
            join = lambda parts: torch.cat([sum(pieces).to(q.dtype) for pieces in parts], dim=2)
            return torch.cat(dq, dim=2), join(dk), join(dv)
