"""
One more token for each row: the step that generation repeats.

It computes what model.py computes (tests/test_generate.py holds the two together), arranged for its size. With one new
token per row, every weight is read for a handful of products: a step can not be faster than the memory, and next to
that reading only the number of operations counts, since each costs some microseconds however little it does. So

  - the stream of the tokens stands in columns, (C, B), and a weight before it, W x: W's rows are then read as they lie,
    where x Wᵀ makes the CPU's libraries lay them out anew in every step (at 16 rows mostly 1.1 to 2 times the time);
  - q_proj, k_proj and v_proj are one product, gate_proj and up_proj are another;
  - a norm is four operations, and the stream is fp32, so that none of them has to widen or round it;
  - RoPE's angles are looked up, and q and k turn together;
  - the query heads that share a key head stand where a sequence would have its tokens, so nothing is repeated for them;
  - what is padding is said by a mask that is made once.

Letters as in model.py; G: query heads to one key head.
"""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model import attend, rope_table

COMPILED_ROOM = 256     # the cache of a compiled step is a multiple of it: each length costs a compilation


def room(tokens, compile):
    """For how many tokens a cache is made that has to hold so many."""
    return -(-tokens // COMPILED_ROOM) * COMPILED_ROOM if compile else tokens


class Layer(NamedTuple):
    """The weights of a block as the step wants them; None where a family has no such thing."""
    attention_norm: tuple                   # norms are as _norm takes them
    qkv: torch.Tensor                       # (H D + 2 K D, C)
    qkv_bias: torch.Tensor | None           # (H D + 2 K D, 1)
    qk_norm: tuple | None
    o: torch.Tensor
    o_adapter: tuple | None                 # (size, C) and (C, size)
    mlp_norm: tuple
    gate_up: torch.Tensor                   # (2 n_inner, C)
    down: torch.Tensor
    down_adapter: tuple | None


def together(*linears):
    """The weights of layers that read the same input, as one matrix (all outputs, inputs).

    No copy of them: the layers' parameters become parts of that matrix, each under its own name as before, and whoever
    updates them in place updates it. The next call finds them lying side by side, and takes the matrix as it is."""
    weights = [linear.weight for linear in linears]
    first, rows = weights[0], [weight.size(0) for weight in weights]
    ends = [first.data_ptr()]
    for weight in weights:
        ends.append(ends[-1] + weight.nbytes)
    beside = all(weight.is_contiguous() and weight.data_ptr() == end for weight, end in zip(weights, ends))
    if not beside or len({weight.untyped_storage().data_ptr() for weight in weights}) > 1:
        with torch.inference_mode(False), torch.no_grad():   # a tensor of inference mode could never be trained again
            whole = torch.cat([weight.detach() for weight in weights])
            for weight, part in zip(weights, whole.split(rows)):
                weight.data = part
    return first.detach().as_strided((sum(rows), first.size(1)), (first.size(1), 1))


class Decoder:
    """A Llama, a KVCache that holds the prompts, how many columns of padding each row has before its, and the dtype of
    the products. The model's own matrices are read; only where their dtype is another one are they copied.

    compile: a step of fixed shapes that reads all of the cache's room under a mask, for torch.compile."""

    def __init__(self, model, cache, padding, dtype, compile=False):
        config, device = model.config, cache.keys.device
        if any("lora_" in name for name, _ in model.named_parameters()):
            raise RuntimeError("generation reads the weights alone: do it within techniques.lora.merged(model)")
        self.config, self.cache, self.compiled, self.dtype = config, cache, compile, dtype
        self.window = config.sliding_window or cache.max_length
        self.n_tokens = model.n_tokens                                     # rows behind it are no tokens
        self.embedding, self.head = model.model.embed_tokens.weight, model.lm_head.weight.to(dtype)
        self.norm = _gain(config.norm_eps, model.model.norm)
        self.layers = [_layer(block, config, dtype) for block in model.model.layers]
        self.column = torch.arange(cache.keys.size(3), device=device)
        pad = torch.tensor(padding, device=device)[:, None] if any(padding) else None                    # (B, 1)
        positions = self.column[None] if pad is None else (self.column - pad).clamp(min=0)               # (1 or B, S)
        reach = cache.max_length - (torch.zeros(1, device=device) if pad is None else pad[:, 0])
        cos, sin = (table.transpose(1, 3) for table in rope_table(positions, config, reach))  # (1 or B, D/2, S, 1) each
        # (S, 2, D/2, 1 or B): x cos + (x with its halves exchanged) sin', so that a rotation is two operations.
        self.cos = torch.cat([cos, cos], 3).permute(2, 3, 1, 0).contiguous()
        self.sin = torch.cat([-sin, sin], 3).permute(2, 3, 1, 0).contiguous()
        self.blocked = None
        if pad is not None:
            # Added to the scores: -inf where there is padding. A row always sees its own token, so none is all -inf.
            blocked = torch.zeros(positions.shape, device=device, dtype=dtype)
            self.blocked = blocked.masked_fill_(self.column < pad, float("-inf"))[:, None, None]         # (B, 1, 1, S)
        self.take_rows()
        self.run = self.logits
        if compile:
            self.at = torch.zeros(1, dtype=torch.long, device=device)
            # Not fullgraph: behind torch's limit of shapes a call then runs uncompiled, where it would be an error.
            self.run = torch.compile(self.logits, dynamic=False)

    def take_rows(self, rows=None):
        """Takes up the cache's tensors, after it has kept only these rows (an index tensor)."""
        self.keys, self.values = self.cache.keys.unbind(0), self.cache.values.unbind(0)
        if rows is not None and self.blocked is not None:
            self.cos, self.sin, self.blocked = self.cos[..., rows], self.sin[..., rows], self.blocked[rows]

    def step(self, ids):
        """ids (B,), the newest token of each row -> logits (B, V) of the next one. Writes their keys into the cache."""
        at = self.cache.length
        if self.compiled:
            at = self.at.fill_(at)
        logits = self.run(ids, at)
        self.cache.length += 1
        return logits

    def logits(self, ids, at):
        """ids (B,), at the column of the cache that they are written to (int; compiled: a tensor of one) -> (B, V)"""
        config, dtype, batch = self.config, self.dtype, ids.size(0)
        heads, groups, width = config.n_head, config.n_kv_head, config.head_dim
        if self.compiled:
            cos, sin = self.cos.index_select(0, at)[0], self.sin.index_select(0, at)[0]
            seen = slice(None)
            hidden = (self.column > at) | (self.column <= at - self.window)
            mask = torch.zeros_like(self.column, dtype=dtype).masked_fill(hidden, float("-inf"))[None, None, None]
            mask = mask if self.blocked is None else mask + self.blocked   # (1 or B, 1, 1, S)
        else:
            cos, sin = self.cos[at], self.sin[at]                          # (2, D/2, 1 or B)
            seen = slice(max(0, at + 1 - self.window), at + 1)
            mask = None if self.blocked is None else self.blocked[..., seen]

        x = F.embedding(ids, self.embedding).float().t()                   # (C, B)
        x = x if _few(x, dtype) else x.contiguous()
        for layer, keys, values in zip(self.layers, self.keys, self.values):
            y = _product(layer.qkv, _norm(x, layer.attention_norm, dtype))
            if layer.qkv_bias is not None:
                y = y + layer.qkv_bias
            y = y.view(-1, width, batch)                                   # (H + 2 K, D, B)
            qk = y[:heads + groups]
            if layer.qk_norm is not None:
                qk = _norm(qk, layer.qk_norm, dtype)
            qk = qk.unflatten(1, (2, -1))                                  # (H + K, 2, D/2, B)
            qk = torch.addcmul(qk * cos, qk.flip(1), sin).to(dtype).flatten(1, 2).permute(2, 0, 1)     # (B, H + K, D)
            k, v = qk[:, heads:], y[heads + groups:].permute(2, 0, 1)      # (B, K, D)
            if self.compiled:
                keys.index_copy_(2, at, k[:, :, None])
                values.index_copy_(2, at, v[:, :, None])
            else:
                keys[:, :, at], values[:, :, at] = k, v
            q = qk[:, :heads].contiguous().view(batch, groups, heads // groups, width)    # (B, K, G, D)
            y = _attend(q, keys[:, :, seen], values[:, :, seen], mask, config.attention)
            x += _adapted(_product(layer.o, y.reshape(batch, heads * width).t()), layer.o_adapter)
            gate, up = _product(layer.gate_up, _norm(x, layer.mlp_norm, dtype)).chunk(2)
            x += _adapted(_product(layer.down, F.silu(gate) * up), layer.down_adapter)
        return self.scores(_norm(x, self.norm, dtype))

    def scores(self, hidden):
        """hidden (C, B), after the last norm -> logits (B, V), fp32"""
        y = _product(self.head, hidden.to(self.dtype))[:self.n_tokens]
        return torch.empty(y.shape[::-1], device=y.device).copy_(y.t())    # turned and widened in one go


def _layer(block, config, dtype):
    attention, mlp = block.self_attn, block.mlp
    qkv = attention.q_proj, attention.k_proj, attention.v_proj
    matrix = lambda *linears: together(*linears).to(dtype)
    adapter = lambda linear: None if not config.adapter_size else (
        linear.adapter_down.to(dtype), linear.adapter_up.to(dtype))
    norm = lambda *modules: _gain(config.norm_eps, *modules)
    bias = torch.cat([linear.bias for linear in qkv])[:, None].to(dtype) if config.qkv_bias else None
    qk_norm = [attention.q_norm] * config.n_head + [attention.k_norm] * config.n_kv_head if config.qk_norm else []
    return Layer(norm(block.input_layernorm), matrix(*qkv), bias, norm(*qk_norm) if qk_norm else None,
                 matrix(attention.o_proj), adapter(attention.o_proj), norm(block.post_attention_layernorm),
                 matrix(mlp.gate_proj, mlp.up_proj), matrix(mlp.down_proj), adapter(mlp.down_proj))


def _gain(eps, *modules):
    """RMSNorms over n numbers as _norm takes them: their weights times sqrt(n), fp32, (n, 1), of several (N, n, 1), and
    sqrt(n eps)."""
    weights = torch.stack([module.weight.float() for module in modules])[..., None]
    n = weights.size(1)
    return (weights if len(modules) > 1 else weights[0]) * math.sqrt(n), weights.new_tensor(math.sqrt(n * eps))


def _norm(x, norm, dtype):
    """RMSNorm over the last dimension but one -> like x, in dtype

    x / sqrt(mean(x²) + eps) is sqrt(n) x / hypot(|x|, sqrt(n eps)): four operations, where F.rms_norm makes ten of it
    on a CPU."""
    gain, least = norm
    length = torch.linalg.vector_norm(x, dim=-2, keepdim=True, dtype=torch.float32)
    return (x * gain).div_(length.hypot_(least)).to(dtype)


def _few(x, dtype):
    """Whether x (C, B) has so few columns that x Wᵀ is the faster product: on a CPU, in fp32 only."""
    return dtype == torch.float32 and x.size(1) < 8


def _product(weight, x):
    """weight (outputs, inputs) @ x (inputs, B) -> (outputs, B)"""
    single = x.size(1) == 1
    if single and not torch.compiler.is_compiling():            # which makes sums of products of it: at 124M a step
        return torch.mv(weight, x[:, 0])[:, None]               # takes 1.4 times as long
    return F.linear(x.t(), weight).t() if single or _few(x, weight.dtype) else torch.mm(weight, x)


def _adapted(y, adapter):
    """y (C, B) with what the bottleneck behind the matrix adds to it, where there is one."""
    return y if adapter is None else y + _product(adapter[1], F.silu(_product(adapter[0], y)))


def _attend(q, k, v, mask, kind):
    """q (B, K, G, D); k, v (B, K, S, D); mask (B, 1, 1, S), added to the scores, or None: all is seen -> like q

    A kernel's scores and softmax are fp32 inside, as 'fp32' wants them."""
    if kind in ("flash", "fp32"):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    allowed = torch.ones(k.size(2), dtype=torch.bool, device=k.device) if mask is None else mask == 0
    return attend(q, k, v, allowed.expand(q.size(0), 1, q.size(2), k.size(2)), kind)
