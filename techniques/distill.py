"""
Distillation: a small model learns from a large one's probabilities, and not only from the one right token (Hinton et al.
2015, arXiv 1503.02531).

    loss of a token = (1 - weight) * -log p(target)  +  weight * T^2 * KL(teacher || student), both softened by T

At a temperature T above 1 the teacher's small probabilities show: what else could have stood here. The gradient of the
softened term shrinks like 1 / T^2, hence the factor; without it `weight` would mean less the higher T is. sft.py switches
it on with --teacher=DIR; the mean is over the tokens that are trained, with their weights, as without a teacher.
"""
import torch

from engine.loss import token_losses


def kl_losses(logits, teacher_logits, temperature):
    """T^2 KL(teacher || student) of each position, fp32.   both (..., V) -> (...)"""
    student = (logits.float() / temperature).log_softmax(-1)
    teacher = (teacher_logits.float() / temperature).log_softmax(-1)
    return temperature ** 2 * (teacher.exp() * (teacher - student)).sum(-1)


class Teacher:
    """A frozen model beside the one that learns; both have the same tokenizer."""

    def __init__(self, model, weight, temperature):
        self.model = model.eval().requires_grad_(False)
        self.weight, self.temperature = weight, temperature

    def losses(self, logits, targets, ids, keep):
        """(N,) fp32 of the N positions that keep (B, T) names in ids (B, T); logits (N, V) are the student's there."""
        with torch.no_grad():
            theirs = self.model(ids, keep=keep)
        softened = kl_losses(logits, theirs, self.temperature)
        return (1 - self.weight) * token_losses(logits, targets) + self.weight * softened


def problems(config, tokenizer, theirs):
    """What is wrong with the settings, a sentence each. theirs: the teacher's tokenizer."""
    return [sentence for sentence, wrong in {
        f"teacher_weight must be above 0 and at most 1, found {config.teacher_weight}": not 0 < config.teacher_weight <= 1,
        f"teacher_temperature must be at least 0.1, found {config.teacher_temperature}": config.teacher_temperature < 0.1,
        "loss_chunk does not go with a teacher, whose logits are needed whole: leave it at 0": config.loss_chunk > 0,
        f"{config.teacher} has another tokenizer ({theirs.hash[:8]}) than the model ({tokenizer.hash[:8]}): the same id is "
        "another token, so its probabilities say nothing here": theirs.hash != tokenizer.hash}.items() if wrong]
