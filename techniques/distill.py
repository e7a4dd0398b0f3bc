"""
Distillation: a small model learns from a large one's probabilities, and not only from the one right token (Hinton et
al. 2015, arXiv 1503.02531).

    loss of a token = (1 - weight) * -log p(target)  +  weight * T^2 * KL(teacher || student), both softened by T
                      + attention * KL(teacher's attention || student's) of that token, in the last layer

At a temperature T above 1 the teacher's small probabilities show: what else could have stood here. The gradient of the
softened term shrinks like 1 / T^2, hence the factor; without it `weight` would mean less the higher T is.

What the teacher looks at is learned as well with an attention above 0 (Zagoruyko & Komodakis 2017, 1612.03928; of the
last layer alone, as probabilities: Wang et al. 2020, 2002.10957). Its heads' probabilities are averaged, and so are the
student's: so the two may differ in width, depth and heads. This takes the whole (T, T) map of one layer each.

train.py and sft.py switch it on with --teacher=DIR; the mean is over the tokens that are trained, with their weights,
as without a teacher. It pays where data are few: with enough of them the right tokens tell the same (see README).
"""
import math

import torch

from engine.hf import find_folder, read_model
from engine.loss import token_losses
from engine.parallel import bare
from model import rope_table, rotate, visible


def kl_losses(logits, teacher_logits, temperature):
    """T^2 KL(teacher || student) of each position, fp32.   both (..., V) -> (...)"""
    student = (logits.float() / temperature).log_softmax(-1)
    teacher = (teacher_logits.float() / temperature).log_softmax(-1)
    return temperature ** 2 * (teacher.exp() * (teacher - student)).sum(-1)


def attention_map(model, x, begins=None):
    """How much each token looks at each other one in the last layer, on average over its heads: fp32 (B, T, T), rows
    sum to 1. x (B, T, C): what comes into that layer; begins as the model takes it."""
    config, block = model.config, list(model.model.layers.children())[-1]
    batch, time, _ = x.shape
    index = torch.arange(time, device=x.device)
    first = torch.zeros_like(index)[None] if begins is None else (index * begins).cummax(-1).values
    positions = index - first                                              # (1 or B, T)
    allowed = visible(None, 0, x[..., 0], config.sliding_window) & (first[:, None, :, None] == first[:, None, None, :])
    cos, sin = rope_table(positions, config, positions.amax(-1) + 1)
    attention, x = block.self_attn, block.input_layernorm(x)
    heads = lambda y: y.view(batch, time, -1, config.head_dim).transpose(1, 2)             # (B, heads, T, D)
    q, k = heads(attention.q_proj(x)), heads(attention.k_proj(x))
    if config.qk_norm:
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(config.n_head // config.n_kv_head, dim=1)
    scores = (q.float() @ k.float().transpose(-2, -1) / math.sqrt(config.head_dim)).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).mean(1)


def map_losses(found, teachers):
    """KL(teacher || student) of each row of two attention maps, fp32.   both (B, T, T) -> (B, T)"""
    log = lambda map: map.clamp(min=1e-9).log()
    return (teachers * (log(teachers) - log(found))).sum(-1)


def look(model, ids, keep, begins, with_map):
    """(logits, attention map or None) of a forward pass; the arguments are the model's."""
    if not with_map:
        return model(ids, keep=keep, begins=begins), None
    plain, into, before = bare(model), {}, bare(model).model.look

    def see(i, x):
        into[i + 1] = x
        if before is not None:
            before(i, x)
    plain.model.look = see
    try:
        logits = model(ids, keep=keep, begins=begins)
    finally:
        plain.model.look = before
    last = len(plain.model.layers) - 1
    return logits, attention_map(plain, into[last] if last else plain.model.embed_tokens(ids), begins)


class Teacher:
    """A frozen model beside the one that learns; both have the same tokenizer."""

    def __init__(self, model, weight, temperature, attention=0.0):
        self.model = model.eval().requires_grad_(False)
        self.weight, self.temperature, self.attention = weight, temperature, attention

    def losses(self, model, ids, targets, keep=None, begins=None):
        """(what is made small, the ordinary loss) of the student's N targets, fp32, each like targets.

        ids (B, T); targets (B, T), or (N,) with keep (B, T) bool, the positions that have one; begins
        as the model takes it."""
        logits, found = look(model, ids, keep, begins, self.attention > 0)
        with torch.no_grad():
            theirs, map = look(self.model, ids, keep, begins, self.attention > 0)
        losses = token_losses(logits, targets)
        objectives = (1 - self.weight) * losses + self.weight * kl_losses(logits, theirs, self.temperature)
        if self.attention:
            of_maps = map_losses(found, map)
            objectives = objectives + self.attention * (of_maps if keep is None else of_maps[keep])
        return objectives, losses


def open_teacher(config, tokenizer, setup):
    """(the Teacher of config.teacher, its folder, a list of what is wrong); None, None without one."""
    if not config.teacher:
        return None, None, []
    folder = find_folder(config.teacher)
    model, theirs = read_model(folder)
    plain = not setup.layout or setup.layout.plain
    wrong = [sentence for sentence, wrong in {
        f"teacher_weight must be from 0 to 1, found {config.teacher_weight}": not 0 <= config.teacher_weight <= 1,
        f"teacher_attention must be at least 0, found {config.teacher_attention}": config.teacher_attention < 0,
        "teacher_weight and teacher_attention are both 0: the teacher would teach nothing":
            config.teacher_weight == 0 == config.teacher_attention,
        f"teacher_temperature must be at least 0.1, found {config.teacher_temperature}":
            config.teacher_temperature < 0.1,
        "loss_chunk does not go with a teacher, whose logits are needed whole: leave it at 0": config.loss_chunk > 0,
        "n_future does not go with a teacher": getattr(config, "n_future", 1) > 1,
        "pp does not go with a teacher: it would have to be cut into stages as well": not plain and setup.layout.pp > 1,
        "teacher_attention looks into whole layers: it goes with neither fsdp nor tp":
            not plain and config.teacher_attention,
        f"{config.teacher} has another tokenizer ({theirs.hash[:8]}) than the model ({tokenizer.hash[:8]}): the same "
        "id is another token, so its probabilities say nothing here": theirs.hash != tokenizer.hash}.items() if wrong]
    model = model.to(setup.device)
    return Teacher(model, config.teacher_weight, config.teacher_temperature, config.teacher_attention), folder, wrong
