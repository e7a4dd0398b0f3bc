"""AdamW with decay on matrices only, Muon as an option, the learning rate as a function of the step, and clipping."""
import math

import torch


def adamw(model, learning_rate, weight_decay, betas=(0.9, 0.95), eps=1e-8):
    """Two groups: matrices and embeddings (two or more dimensions) decay, gains and biases do not. By dimension and not
    by name: a rule for "layer_norm.weight" matches nothing in a Llama, whose norms are called otherwise.

    torch's fused kernel makes one pass over the parameters; it exists for CPU and CUDA."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=fused)


def muon(model, learning_rate, matrix_learning_rate, weight_decay, betas=(0.9, 0.95)):
    """[Muon for the layers' matrices, AdamW for embeddings and gains]. Muon (Jordan et al. 2024) makes all singular
    values of a matrix's momentum equal before it steps: directions that a few large ones would drown are learned too.
    In short runs it needs about half the tokens; its five rounds of products cost the more the smaller the batch is."""
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2]
    first = torch.optim.Muon(matrices, lr=matrix_learning_rate, weight_decay=weight_decay,
                             adjust_lr_fn="match_rms_adamw")
    first.param_groups[0]["share"] = matrix_learning_rate / learning_rate
    for p in matrices:
        p.requires_grad_(False)         # out of adamw's sight
    second = adamw(model, learning_rate, weight_decay, betas)
    for p in matrices:
        p.requires_grad_(True)
    return [first, second]


def optimizers_of(model, learning_rate, matrix_learning_rate, weight_decay, betas=(0.9, 0.95)):
    """[AdamW], or with a matrix_learning_rate above 0 [Muon, AdamW]."""
    if matrix_learning_rate:
        return muon(model, learning_rate, matrix_learning_rate, weight_decay, betas)
    return [adamw(model, learning_rate, weight_decay, betas)]


def optimiser_problems(config):
    """What is wrong with those settings of the optimiser that a script has, a sentence each."""
    rates = ("learning_rate", "matrix_learning_rate", "value_learning_rate", "weight_decay", "grad_clip", "final_lr",
             "warmup_steps", "warmup_share")
    problems = config.outside(**dict.fromkeys(rates, (0,)), beta1=(0, 0.999999), beta2=(0, 0.999999))
    if getattr(config, "matrix_learning_rate", 0) and config.learning_rate <= 0:
        problems.append("matrix_learning_rate needs a learning_rate above 0, whose share it is")
    if getattr(config, "schedule", "linear") not in ("cosine", "linear", "constant"):
        problems.append(f"schedule must be 'cosine', 'linear' or 'constant', found '{config.schedule}'")
    return problems


def warmup_length(max_steps, asked=None):
    """min(2000, 0.4 % of the run) as is common, but not below 10 steps or a tenth of a short run: 0.4 % of 1000 steps
    would be 4, and Adam's second moment (beta2 = 0.95) is noise for about 20."""
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


def clip(parameters, max_norm):
    """Scales all gradients so that their joint norm is at most max_norm (0: only measures); -> the norm before, a
    tensor. It is NaN or inf when any gradient is: a free detector, and the caller must then not step."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
