"""
What small trainers usually train: a GPT-2 in fp32, with LayerNorm, GELU, a learned table of positions, one product for
q, k and v, and the embedding for a head. bench/train.py and bench/quality.py compare with it, or with nanoGPT's own
model when they are given a checkout of it.
"""
import contextlib
import importlib.util
import io
import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import refuse


class Layer(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        linear = lambda width, out: nn.Linear(width, out, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(n_embd, bias=False), nn.LayerNorm(n_embd, bias=False)
        self.qkv, self.out = linear(n_embd, 3 * n_embd), linear(n_embd, n_embd)
        self.up, self.down = linear(n_embd, 4 * n_embd), linear(4 * n_embd, n_embd)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)     # (3, B, H, T, D)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab_size, n_layer, n_head, n_embd, block_size):
        super().__init__()
        self.embed, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.layers = nn.ModuleList(Layer(n_embd, n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:        # what writes into the residual stream starts smaller, the more layers do
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layer) if last else 0.02)

    def forward(self, ids, targets):
        """ids, targets (B, T) -> (logits (B, T, V), mean loss), as nanoGPT's GPT gives them."""
        x = self.embed(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(folder, **shape):
    """-> (model, its name): the GPT above, or, if `folder` is a checkout of nanoGPT, the one that is there. shape:
    vocab_size, n_layer, n_head, n_embd, block_size."""
    if not folder:
        return GPT(**shape), "GPT-2 style"
    path = Path(folder) / "model.py"
    if not path.exists():
        refuse(f"nanogpt = {folder}, but there is no {path}: give the folder of a checkout of nanoGPT, or nothing")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()):         # it tells the number of its parameters
        return module.GPT(module.GPTConfig(**shape, bias=False, dropout=0.0)), "nanoGPT"


def optimizer_of(model, learning_rate, weight_decay=0.1, betas=(0.9, 0.95)):
    """AdamW as nanoGPT has it: matrices decay; the fused kernel on CUDA only."""
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=next(model.parameters()).is_cuda or None)


def step(model, optimizer, x, y):
    """One step of training on x, y (B, T); -> its loss."""
    loss = model(x, y)[1]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()
