"""
One more token for each row: the step that generation repeats.

It computes what model.py computes (tests/test_generate.py holds the two together), arranged for its size. With one new
token per row, every weight is read for a handful of products: a step can not be faster than the memory, and next to
that reading only the number of operations counts, since each costs some microseconds however little it does. So

  - q_proj, k_proj and v_proj are one product, gate_proj and up_proj are another;
  - RoPE's angles are looked up, and q and k turn together;
  - the query heads that share a key head stand where a sequence would have its tokens, so nothing is repeated for them;
  - what is padding is said by a mask that is made once;
  - on a CPU, matrices in bf16 are laid out anew, once, the way in which its matrix units take them. Else every product
    does that by itself, which takes longer than the product.

Letters as in model.py; G: query heads to one key head.
"""
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model import attend, rope_table

PACKED_AT_MOST = 4 * 2**30      # bytes of weights in that layout, since it is a copy
COMPILED_ROOM = 256             # the cache of a compiled step is a multiple of it: each length costs a compilation


def room(tokens, compile):
    """For how many tokens a cache is made that has to hold so many."""
    return -(-tokens // COMPILED_ROOM) * COMPILED_ROOM if compile else tokens


class Layer(NamedTuple):
    """The weights of a block as the step wants them; None where a family has no such thing."""
    attention_norm: torch.Tensor
    qkv: torch.Tensor                       # (H D + 2 K D, C)
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor                   # (2 n_inner, C)
    down: torch.Tensor


class Weights(NamedTuple):
    """A model's matrices as the step wants them."""
    dtype: torch.dtype                      # of the products
    head: torch.Tensor
    layers: list


def weights_of(model, dtype=None, pack=True):
    """The Weights of a model, in the dtype of its own or another. pack: on a CPU and in bf16, as a copy in the layout
    of the matrix units. That takes about as long as eight steps and does not follow when the model is trained: it is for
    who keeps a model as it is, or makes many tokens at once."""
    head = model.lm_head.weight
    dtype = dtype or head.dtype
    size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    pack = pack and head.device.type == "cpu" and dtype == torch.bfloat16 and size <= PACKED_AT_MOST and can_pack()
    with torch.inference_mode():
        return Weights(dtype, _ready(head, dtype, pack), [_layer(block, dtype, pack) for block in model.model.layers])


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
    """A Llama, its Weights, a KVCache that holds the prompts, and how many columns of padding each row has before its.

    compile: a step of fixed shapes that reads all of the cache's room under a mask, for torch.compile; not for packed
    weights, since it lays them out by itself."""

    def __init__(self, model, weights, cache, padding, compile=False):
        config, device = model.config, cache.keys.device
        self.config, self.cache, self.compiled = config, cache, compile
        self.window = config.sliding_window or cache.max_length
        self.n_tokens = model.n_tokens                                     # rows behind it are no tokens
        self.embedding, self.norm = model.model.embed_tokens.weight, model.model.norm.weight
        self.dtype, self.head, self.layers = weights
        dtype = self.dtype
        self.column = torch.arange(cache.max_length, device=device)
        padding = torch.tensor(padding, device=device)[:, None] if any(padding) else None                # (B, 1)
        positions = self.column[None] if padding is None else (self.column - padding).clamp(min=0)       # (1 or B, S)
        cos, sin = rope_table(positions, config, positions.amax(-1) + 1)                    # (1 or B, 1, S, D/2) each
        # (1 or B, S, 1, 2, D/2): x cos + (x with its halves exchanged) sin', so that a rotation is two operations.
        self.cos = torch.stack([cos, cos], -2).transpose(1, 2)
        self.sin = torch.stack([-sin, sin], -2).transpose(1, 2)
        self.blocked = None
        if padding is not None:
            # Added to the scores: -inf where there is padding. A row always sees its own token, so none is all -inf.
            blocked = torch.zeros(positions.shape, device=device, dtype=dtype)
            self.blocked = blocked.masked_fill_(self.column < padding, float("-inf"))[:, None, None]     # (B, 1, 1, S)
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
            self.cos, self.sin, self.blocked = self.cos[rows], self.sin[rows], self.blocked[rows]

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
        turning = (heads + groups) * width                                 # of a row's numbers, those of q and k
        if self.compiled:
            cos, sin = self.cos.index_select(1, at)[:, 0], self.sin.index_select(1, at)[:, 0]
            seen = slice(None)
            hidden = (self.column > at) | (self.column <= at - self.window)
            mask = torch.zeros_like(self.column, dtype=dtype).masked_fill(hidden, float("-inf"))[None, None, None]
            mask = mask if self.blocked is None else mask + self.blocked   # (1 or B, 1, 1, S)
        else:
            cos, sin = self.cos[:, at], self.sin[:, at]                    # (1 or B, 1, 2, D/2)
            seen = slice(max(0, at + 1 - self.window), at + 1)
            mask = None if self.blocked is None else self.blocked[..., seen]

        x = F.embedding(ids, self.embedding)                               # (B, C)
        for layer, keys, values in zip(self.layers, self.keys, self.values):
            y = _linear(_norm(x, layer.attention_norm, config).to(dtype), layer.qkv, layer.qkv_bias)
            qk = y[:, :turning].view(batch, heads + groups, width)
            if layer.q_norm is not None:
                q, k = _norm(qk[:, :heads], layer.q_norm, config), _norm(qk[:, heads:], layer.k_norm, config)
                qk = torch.cat([q, k], 1)
            qk = qk.view(batch, heads + groups, 2, width // 2)
            qk = torch.addcmul(qk * cos, qk.flip(2), sin).to(dtype).view(batch, heads + groups, width)
            k, v = qk[:, heads:], y[:, turning:].view(batch, groups, width)
            if self.compiled:
                keys.index_copy_(2, at, k[:, :, None])
                values.index_copy_(2, at, v[:, :, None])
            else:
                keys[:, :, at], values[:, :, at] = k, v
            q = qk[:, :heads].view(batch, groups, heads // groups, width)  # (B, K, G, D)
            y = _attend(q, keys[:, :, seen], values[:, :, seen], mask, config.attention)
            x = x + _linear(y.reshape(batch, heads * width), layer.o)
            y = _linear(_norm(x, layer.mlp_norm, config).to(dtype), layer.gate_up)
            gate, up = y.chunk(2, -1)
            x = x + _linear(F.silu(gate) * up, layer.down)
        return self.scores(_norm(x, self.norm, config))

    def scores(self, hidden):
        """hidden (B, C), after the last norm -> logits (B, V), fp32"""
        return _linear(hidden.to(self.dtype), self.head)[:, :self.n_tokens].float()


def _layer(block, dtype, pack):
    attention, mlp = block.self_attn, block.mlp
    qkv = attention.q_proj, attention.k_proj, attention.v_proj
    matrix = lambda *linears: _ready(together(*linears), dtype, pack)
    norm = lambda name: getattr(getattr(attention, name, None), "weight", None)
    bias = None if attention.q_proj.bias is None else torch.cat([linear.bias for linear in qkv]).to(dtype)
    return Layer(block.input_layernorm.weight, matrix(*qkv), bias, norm("q_norm"), norm("k_norm"),
                 matrix(attention.o_proj), block.post_attention_layernorm.weight,
                 matrix(mlp.gate_proj, mlp.up_proj), matrix(mlp.down_proj))


def _ready(weight, dtype, pack):
    """The matrix in the dtype of the products and, if it is to be packed, in oneDNN's own layout."""
    weight = weight.detach().to(dtype)
    return torch.ops.mkldnn._reorder_linear_weight(weight) if pack else weight


@functools.cache
def can_pack():
    """Whether this torch has the products on packed weights that torch.compile uses; they are no public part of it."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(8, 8, dtype=torch.bfloat16))
        return _linear(torch.ones(1, 8, dtype=torch.bfloat16), packed).sum().item() == 64
    except (AttributeError, RuntimeError):
        return False


def _linear(x, weight, bias=None):
    """x (B, inputs), weight (outputs, inputs), packed or not -> (B, outputs)"""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _norm(x, weight, config):
    """RMSNorm as in model.py, in fewer operations."""
    return F.rms_norm(x, x.shape[-1:], weight, config.norm_eps)


def _attend(q, k, v, mask, kind):
    """q (B, K, G, D); k, v (B, K, S, D); mask (B, 1, 1, S), added to the scores, or None: all is seen -> like q

    A kernel's scores and softmax are fp32 inside, as 'fp32' wants them."""
    if kind in ("flash", "fp32"):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    allowed = torch.ones(k.size(2), dtype=torch.bool, device=k.device) if mask is None else mask == 0
    return attend(q, k, v, allowed.expand(q.size(0), 1, q.size(2), k.size(2)), kind)
