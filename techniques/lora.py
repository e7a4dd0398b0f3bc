"""
LoRA: a large matrix stays as it is, and learns a small difference (Hu et al. 2021, arXiv 2106.09685).

    y = W x + (alpha / rank) B A dropout(x)          W (out, in) frozen, A (rank, in), B (out, rank)

B starts at 0, so the first forward pass is the model's own, bit for bit. What is trained is about 1 % of the weights,
and so are the gradients and AdamW's two moments: tuning needs the memory of the weights and of the activations, and
little more. sft.py switches it on with --lora_rank=8. Use three to ten times the learning rate of full tuning (README).

All seven matrices of a block have one: leaving out those that are not square (k and v under grouped queries, the whole
MLP) is a common mistake, and costs most of the effect. The head and the embeddings have none.

Whoever saves, generates or scores sees an ordinary model, inside `merged`: W + (alpha / rank) B A is computed, and on
the way out W comes back from a copy. Subtracting instead would leave other bits behind each time.
"""
import contextlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from configurator import refuse
from engine import hf
from engine.tokenizer import Tokenizer, find_tokenizer
from techniques import adapters

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRALinear(nn.Linear):
    """A linear layer with W and b of another, which are not trained, and A and B, which are."""

    def __init__(self, base, rank, alpha, dropout):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Parameter(torch.zeros(rank, base.in_features).to(base.weight))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank).to(base.weight))
        self.scale, self.dropout = alpha / rank, dropout

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        if self.lora_A is None:             # inside `merged`
            return y
        x = F.dropout(x, self.dropout, self.training)
        return y + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def add(model, rank, alpha, dropout=0.0, targets=LINEARS, seed=0):
    """Freezes the model and gives each linear layer of that name its A and B; -> the model. seed None: they are drawn
    later (adapters.draw)."""
    if model.config.adapter_size:
        refuse("LoRA on a model with adapters is not done here: its last matrices are no plain ones")
    linears = {name: module for name, module in model.named_modules()
               if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets}
    for name, linear in linears.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoRALinear(linear, rank, alpha, dropout).train(linear.training))
    adapters.freeze(model)
    if seed is not None:
        adapters.draw(model, seed)
    return model


def problems(rank, alpha, dropout, targets):
    """What is wrong with the settings, a sentence each."""
    unknown = sorted(set(targets) - set(LINEARS))
    return [sentence for sentence, wrong in {
        f"lora_rank must be at least 0 (0: no LoRA), found {rank}": rank < 0,
        f"lora_alpha must be above 0, found {alpha}": alpha <= 0,
        f"lora_dropout must be in [0, 1), found {dropout}": not 0 <= dropout < 1,
        f"lora_targets must be some of {', '.join(LINEARS)}; found {', '.join(unknown) or 'none'}":
            bool(unknown) or not targets}.items() if wrong]


def layers_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


@torch.no_grad()
def absorb(model):
    """Merges the differences into the weights, for good."""
    for layer in layers_of(model).values():
        layer.weight.copy_(layer.weight.float() + layer.scale * (layer.lora_B.float() @ layer.lora_A.float()))
        layer.lora_A = layer.lora_B = None


@contextlib.contextmanager
def merged(model):
    """Within it, the model is the ordinary one that LoRA has made of it: its weights, its parameters' names, its speed.
    Then everything has its old bits again."""
    layers = layers_of(model).values()
    if any(layer.lora_A is None for layer in layers):
        raise RuntimeError("the model is merged already: the difference would be added twice")
    kept = [(layer, layer.weight.detach().clone(), layer.lora_A, layer.lora_B) for layer in layers]
    try:
        absorb(model)
        yield model
    finally:
        with torch.no_grad():
            for layer, weight, a, b in kept:
                layer.weight.copy_(weight)
                layer.lora_A, layer.lora_B = a, b


class SwitchedOff:
    """The model without its LoRA, to be called like the model: what it was before, and no memory."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *args, **more):
        layers = list(layers_of(self.model).values())
        kept = [layer.lora_A for layer in layers]
        try:
            for layer in layers:
                layer.lora_A = None
            return self.model(*args, **more)
        finally:
            for layer, a in zip(layers, kept):
                layer.lora_A = a


def save(folder, model, base, tokenizer=None, write=True):
    """Writes A and B alone, as PEFT reads them; arguments as in adapters.save."""
    layers = layers_of(model)
    first = next(iter(layers.values()))
    rank = len(first.lora_A)
    adapters.save(folder, model, base, tokenizer, write, {
        "peft_type": "LORA", "r": rank, "lora_alpha": first.scale * rank, "lora_dropout": first.dropout, "bias": "none",
        "inference_mode": True, "target_modules": sorted({name.rpartition(".")[2] for name in layers})})


def load(folder, model):
    """Gives the model what was saved alone, LoRA by `save` or PEFT, or adapters, for which it must have the places; ->
    the model. All that does not fit is told."""
    found, tensors = adapters.read(folder)
    if found.get("peft_type") != "BOTTLENECK":
        strange = [key for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save",
                                   "layers_to_transform", "fan_in_fan_out") if found.get(key)]
        rank, alpha, targets = found["r"], found["lora_alpha"], tuple(found["target_modules"])
        refuse(*(f"{folder}/{adapters.SETTINGS} asks for {key} = {found[key]!r}, which is not done here"
                 for key in strange),
               *problems(rank, alpha, 0.0, targets))
        add(model, rank, alpha, found.get("lora_dropout", 0.0), targets)
    adapters.fill(folder, model, tensors)
    return model


def load_model(path, dtype=torch.float32):
    """hf.load_model, and of a folder with LoRA or adapters alone what they have made of the model that it names."""
    if not (Path(path) / adapters.SETTINGS).exists():
        return hf.load_model(path, dtype=dtype)
    base, changed = adapters.base_of(path)
    model, tokenizer = hf.read_model(hf.find_folder(base), **changed)
    absorb(load(path, model))
    if find_tokenizer(path):                                               # which knows the form of the conversations
        tokenizer = Tokenizer.load(path)
    return model.to(dtype), tokenizer
