"""AdamW with decay on matrices only, Muon as an option, the learning rate as a function of the step, clipping, fp16."""
import math

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from engine.layout import copies, local, put, whole
from engine.parallel import all_sum, dtype_named


def adamw(model, learning_rate, weight_decay, betas=(0.9, 0.95), eps=1e-8):
    """Two groups: matrices and embeddings (two or more dimensions) decay, gains and biases do not. By dimension and not
    by name: a rule for "layer_norm.weight" matches nothing in a Llama, whose norms are called otherwise.

    torch's fused kernel makes one pass over the parameters; it exists for CPU and CUDA."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=fused)


def muon(model, learning_rate, matrix_learning_rate, weight_decay, betas=(0.9, 0.95), eps=1e-8):
    """[Muon for the layers' matrices, AdamW for embeddings and gains]. Muon (Jordan et al. 2024) makes all singular
    values of a matrix's momentum equal before it steps: directions that a few large ones would drown are learned too.
    In short runs it needs about half the tokens; its five rounds of products cost the more the smaller the batch is."""
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2]
    first = Muon(matrices, lr=matrix_learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    first.param_groups[0]["share"] = matrix_learning_rate / learning_rate
    for p in matrices:
        p.requires_grad_(False)         # out of adamw's sight
    second = adamw(model, learning_rate, weight_decay, betas, eps)
    for p in matrices:
        p.requires_grad_(True)
    return [first, second]


class Muon(torch.optim.Muon):
    """torch's, bit for bit where the machine multiplies bf16 natively. Elsewhere torch's emulates bf16, which takes
    longer than all the rest of a step: there the products are in fp32. Where a rank has only rows of each matrix, what
    is to be made orthogonal is gathered, once for a matrix and step, and each rank keeps its rows of the result."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                moved = orthogonal(whole(p.grad.lerp(momentum, group["momentum"])), group["ns_steps"])
                rows = torch.zeros_like(p)
                put(rows, moved)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(rows, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))      # AdamW's usual length of step


def orthogonal(matrix, rounds=5):
    """The matrix with its singular values brought near 1 (0.7 to 1.2) by that many rounds of Newton-Schulz, whose
    coefficients are Jordan's: x <- a x + (b g + c g²) x with g = x xᵀ. (rows, columns) -> the same, bf16 or fp32."""
    wide = matrix.to(dtype_named("auto", matrix.device))
    wide = wide.mT if matrix.size(0) > matrix.size(1) else wide
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if matrix.size(0) > matrix.size(1) else x


def optimizers_of(model, learning_rate, matrix_learning_rate, weight_decay, betas=(0.9, 0.95), eps=1e-8):
    """[AdamW], or with a matrix_learning_rate above 0 [Muon, AdamW]."""
    if matrix_learning_rate:
        return muon(model, learning_rate, matrix_learning_rate, weight_decay, betas, eps)
    return [adamw(model, learning_rate, weight_decay, betas, eps)]


def optimiser_problems(config):
    """What is wrong with those settings of the optimiser that a script has, a sentence each."""
    rates = ("learning_rate", "matrix_learning_rate", "value_learning_rate", "weight_decay", "grad_clip", "final_lr",
             "warmup_steps", "warmup_share")
    problems = config.outside(**dict.fromkeys(rates, (0,)), beta1=(0, 0.999999), beta2=(0, 0.999999),
                              adam_eps=(1e-30,))
    if getattr(config, "matrix_learning_rate", 0) and config.learning_rate <= 0:
        problems.append("matrix_learning_rate needs a learning_rate above 0, whose share it is")
    if getattr(config, "schedule", "linear") not in ("cosine", "linear", "constant"):
        problems.append(f"schedule must be 'cosine', 'linear' or 'constant', found '{config.schedule}'")
    return problems


def warmup_length(max_steps, asked=None):
    """min(2000, 0.4 % of the run) as is common, but not below a tenth of a run of up to 1000 steps or 100
    steps: 0.4 % of 1000 would be 4, and Adam's second moment (beta2 = 0.95) is noise for about 20. None in
    a run of fewer than 10."""
    if asked is not None:
        return asked
    return max(min(2000, int(0.004 * max_steps)), min(100, max_steps // 10))


def lr_at(step, max_steps, learning_rate, warmup, schedule="cosine", final=0.1):
    """The learning rate of step 0, 1, ..., a pure function, so that a resumed run has the same one. Linear warm-up (the
    first step already moves), then cosine, linear or constant down to `final` times the peak at the last step."""
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    if schedule == "constant":
        return learning_rate
    progress = min(1.0, (step - warmup) / max(1, max_steps - 1 - warmup))
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return learning_rate * (final + (1 - final) * share)


def set_lr(optimizer, learning_rate):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("share", 1.0)
    return learning_rate


def clip(parameters, max_norm, setup=None, scale=1.0):
    """Scales all gradients so that their joint norm is at most max_norm (0: only measures); -> the norm before, a
    tensor, over all shards and stages. It is NaN or inf when any gradient is: a free detector, and the caller must then
    not step. scale: what the loss was multiplied with; it is taken out of the gradients first."""
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if scale != 1:
        torch._foreach_div_(gradients, scale)
    if setup and setup.mesh:            # one number from each rank; of what several hold, each has its part
        norms = torch.stack(torch._foreach_norm([local(gradient) for gradient in gradients])).double()
        held = norms.new_tensor([copies(gradient) for gradient in gradients])
        norm = all_sum((norms.square() / held).sum().to(setup.device), setup).sqrt().float()
    else:
        norm = get_total_norm(gradients)
    clip_grads_with_norm_(parameters, max_norm or math.inf, norm)
    return norm


class LossScale:
    """fp16 ends at 65504 above and at 6e-8 below, where small gradients become 0: so the loss is multiplied by as
    much as the gradients bear (Micikevicius et al. 2018, arXiv 1710.03740). Half as much when one overflows,
    twice as much after 2000 steps in which none did. All ranks see the same norm, so they have the same scale.
    Other dtypes: always 1."""

    def __init__(self, dtype, saved=None):
        self.on = dtype == torch.float16
        self.value, self.since = saved or (65536.0 if self.on else 1.0, 0)

    def overflowed(self, loss, norm):
        """Takes note of a step; -> whether only its scale was too large, so that it is to be skipped."""
        self.since += 1
        if self.on and math.isfinite(loss) and not math.isfinite(norm) and self.value > 1:
            self.value, self.since = self.value / 2, 0
            return True
        if self.on and self.since % 2000 == 0:
            self.value *= 2
        return False
