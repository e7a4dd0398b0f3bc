"""
The Llama, in one file: RMSNorm before each sublayer, rotary positions, grouped-query attention, SwiGLU.

    tokens (B, T) --embed--> x (B, T, C)
        n_layer times:   x = x + attention(norm(x))        every token looks back at the tokens before it
                         x = x + mlp(norm(x))              every token thinks for itself
    x --norm--> lm_head --> logits (B, T, V)               the scores of the next token

Sources: Touvron et al. 2023 (arXiv 2302.13971, 2307.09288); RMSNorm: Zhang & Sennrich 2019 (1910.07467); RoPE: Su et
al. 2021 (2104.09864); GQA: Ainslie et al. 2023 (2305.13245); SwiGLU: Shazeer 2020 (2002.05202).

Modules and parameters carry the names that Hugging Face's Llama gives them (`model.layers.0.self_attn.q_proj.weight`),
so a checkpoint of ours is one of theirs without a mapping. This file knows nothing of GPUs, ranks or files: those come
to it from outside.

Letters in the shape comments:  B batch   T new tokens   S tokens that can be seen (cache and new)   C n_embd
                                H n_head   K n_kv_head   D head_dim = C / H   V vocab_size
"""
import hashlib
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from configurator import refuse

ORIGINAL = "original_max_position_embeddings"       # the context before it was stretched
MASK_UP_TO = 1024       # tokens of a row; in longer ones documents are attended to one by one (see `apart`)
# The smallest and largest of each that is no slip: a model of 10**12 layers would be built for ever.
BOUNDS = {"vocab_size": (1, 1 << 24), "n_layer": (1, 1 << 12), "n_head": (1, 1 << 12), "n_kv_head": (1, 1 << 12),
          "n_embd": (1, 1 << 18), "n_inner": (1, 1 << 20), "block_size": (1, 1 << 30), "head_dim": (0, 1 << 14),
          "n_future": (1, 64), "adapter_size": (0, 1 << 18)}


@dataclass
class ModelConfig:
    vocab_size: int = 32000
    n_layer: int = 32
    n_head: int = 32
    n_kv_head: int = 32             # fewer than n_head: that many query heads share one key/value head
    n_embd: int = 4096
    n_inner: int = 11008            # width of the SwiGLU: about 8/3 of n_embd, since it has three matrices and not two
    block_size: int = 4096          # the longest sequence that it is trained on
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False    # one matrix both embeds tokens and scores them
    dropout: float = 0.0            # on the sublayers' outputs only: in attention it would cost SDPA its fast path
    attention: str = "flash"        # 'flash': SDPA, fp32 inside; 'fp32': the same in the open; 'bf16': a mistake, shown
    recompute: str = "none"         # in the backward pass, to save memory: 'selective': the MLPs; 'full': whole blocks
    separate_documents: bool = False    # it was trained on documents that do not see each other (see `apart`)
    # What other families do otherwise
    head_dim: int = 0               # width of a head; 0: n_embd / n_head
    qkv_bias: bool = False          # Qwen 1.5 to 2.5: q, k and v have a bias
    qk_norm: bool = False           # Qwen3: each head's q and k are normalised before they are turned
    sliding_window: int = 0         # Mistral: a token sees so many, itself among them; 0: all before it
    rope_scaling: dict | None = None    # {"rope_type": ..., "factor": ...}, see rope_frequencies; None: as trained
    family: str = ""                # whose files it is written as; "": the plainest that can say all this
    n_future: int = 1               # tokens ahead that are predicted, each by a head (Gloeckle et al. 2024, arXiv 2404.19737)
    adapter_size: int = 0           # width of a bottleneck behind each sublayer (techniques/adapters.py); 0: none

    def __post_init__(self):
        self.head_dim = self.head_dim or self.n_embd // max(1, self.n_head)

    def problems(self):
        """Everything about the shape that can not work, a sentence each."""
        found = [f"{name} must be from {low} to {high:,}, found {getattr(self, name):,}"
                 for name, (low, high) in BOUNDS.items() if not low <= getattr(self, name) <= high]
        if found:
            return found
        quotient = self.head_dim == self.n_embd // self.n_head
        return [sentence for sentence, wrong in {
            f"n_embd = {self.n_embd} must be an even multiple of n_head = {self.n_head} (RoPE turns pairs of numbers), "
            f"or head_dim be given apart, as an even number; found {self.head_dim}":
                self.head_dim < 2 or self.head_dim % 2 or quotient and self.n_embd % self.n_head,
            f"n_head = {self.n_head} must be a multiple of n_kv_head = {self.n_kv_head}": self.n_head % self.n_kv_head,
            f"rope_theta must be above 1 and norm_eps at least 0, found {self.rope_theta} and {self.norm_eps}":
                not self.rope_theta > 1 or not self.norm_eps >= 0,
            f"sliding_window must be at least 0, found {self.sliding_window}": self.sliding_window < 0,
            f"dropout must be in [0, 1), found {self.dropout}": not 0 <= self.dropout < 1,
            f"attention must be 'flash', 'fp32' or 'bf16', found {self.attention!r}":
                self.attention not in ("flash", "fp32", "bf16"),
            f"recompute must be 'none', 'selective' or 'full', found {self.recompute!r}":
                self.recompute not in ("none", "selective", "full"),
        }.items() if wrong]

    def inseparable(self):
        """Why documents of one row can not be kept apart in this model (see `apart`), the end of a sentence each."""
        return [sentence for sentence, wrong in {
            f"does not go with sliding_window = {self.sliding_window}: its mask has no window": self.sliding_window,
            "does not go with longrope, which turns all documents of a row alike":
                (self.rope_scaling or {}).get("rope_type") == "longrope"}.items() if wrong]


class RMSNorm(nn.Module):
    """Scales each vector to root mean square 1, then by a learned gain. Computed in fp32 whatever comes in, since the
    square of 300 already overflows fp16; the result has the input's dtype."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(x.dtype)).to(x.dtype)


def rope_table(positions, config, reach):
    """cos and sin of the angle by which RoPE turns each pair at each position.

    positions (1 or B, T), whole numbers; reach (1 or B,): how long each row is or will become; -> two fp32 tensors
    (1 or B, 1, T, D/2), the middle 1 being the heads. The angles need fp32: bf16 has 8 bits and can not tell position
    257 from 256."""
    frequency, scale = rope_frequencies(config, reach)
    angle = positions.float()[:, None, :, None] * frequency[..., None, None, :]
    return angle.cos() * scale, angle.sin() * scale


def rope_frequencies(config, reach):
    """The angle per position of each pair, fp32 (D/2,), or (1 or B, D/2) where it depends on reach (as in rope_table);
    and what cos and sin are multiplied by.

    A pair that turns slowly has not come round once within the context of the training: beyond it, it stands at angles
    never seen. So it is slowed by `factor`; fast pairs tell neighbours apart and are left as they are.
      linear     all pairs alike (Chen et al. 2023, arXiv 2306.15595)
      llama3     between low_freq_factor and high_freq_factor turns within the original context: both (2407.21783)
      yarn       the same between beta_slow and beta_fast, straight over the pairs' numbers; larger scores (2309.00071)
      longrope   a divisor for each pair, searched for; others for rows beyond the original context (2402.13753)"""
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling or {}
    frequency = theta ** (-torch.arange(0, dim, 2, device=reach.device, dtype=torch.float32) / dim)
    kind, factor, original = (scaling.get(key) for key in ("rope_type", "factor", ORIGINAL))
    if kind is None:
        return frequency, 1.0
    if kind == "linear":
        return frequency / factor, 1.0
    if kind == "longrope":
        divided = lambda key: frequency / torch.tensor(scaling[key], device=reach.device)
        grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        chosen = torch.where((reach > original)[:, None], divided("long_factor"), divided("short_factor"))
        return chosen, scaling.get("attention_factor", grown)
    if kind == "llama3":
        low, high, scale = scaling["low_freq_factor"], scaling["high_freq_factor"], 1.0
        kept = (original * frequency / (2 * math.pi) - low) / (high - low)
    else:
        # The number of the pair (not whole) that makes so many turns within the original context.
        pair = lambda turns: dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        first = max(math.floor(pair(scaling.get("beta_fast", 32))), 0)
        last = min(math.ceil(pair(scaling.get("beta_slow", 1))), dim - 1)
        kept = 1 - (torch.arange(dim // 2, device=reach.device) - first) / max(last - first, 0.001)
        scale = scaling.get("attention_factor", 0.1 * math.log(factor) + 1)
    kept = kept.clamp(0, 1)
    return frequency * kept + frequency / factor * (1 - kept), scale


def rotate(x, cos, sin):
    """Turns the pairs (x[i], x[i + D/2]) of x (B, heads, T, D). Hugging Face pairs halves; Meta's own files pair
    neighbours (x[2i], x[2i+1]). Mixing the two up works for about 20 tokens and then reads as gibberish."""
    half = x.size(-1) // 2
    # Slices, and not x.chunk(2): from that, under the explicit attention in bf16, torch 2.13 compiles for a CPU a
    # gradient that is NaN in k_proj when T is a multiple of 32.
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def attend(q, k, v, allowed, kind):
    """softmax(q kᵀ / sqrt(D)) v.   q (B, H, T, D); k, v (B, K, S, D) -> like q

    allowed: what each token may look at. None: itself and what is before it (T == S). (B, 1, T, S) bool: where it is
    True; a row without any gives 0. (n,) int64 on the CPU: its document (see `apart`).

    The scores q kᵀ are never rounded to bf16: from 256 on bf16 counts in steps of 2, and a score that is off by 1 is a
    probability that is off by a factor e. 'flash' kernels keep scores and softmax in fp32 inside; 'fp32' does it where
    it can be seen; 'bf16' makes that mistake, so that it can be measured (bench/attention.py)."""
    if allowed is not None and allowed.dim() == 1:
        return attend_apart(q, k, v, allowed, kind)
    if kind == "flash":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None,
                                              enable_gqa=q.size(1) != k.size(1))
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    causal = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril() if allowed is None else allowed
    with torch.autocast(q.device.type, enabled=False):                     # autocast would round the product again
        scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.size(-1))      # (B, H, T, S), fp32
        if kind == "bf16":
            scores = scores.bfloat16().float()
        # The lowest number and not -inf: a softmax over nothing but -inf is 0/0.
        weights = scores.masked_fill(~causal, torch.finfo(scores.dtype).min).softmax(dim=-1)      # fp32
        y = weights.to(v.dtype) @ v
    return y if allowed is None else y.masked_fill(~allowed.any(-1, keepdim=True), 0)


@torch.compiler.disable           # of one length each, what is compiled for one step would not fit the next
def attend_apart(q, k, v, lengths, kind):
    """attend for each document alone, in rows that are cut into documents of these lengths, one behind the other. This
    costs the squares of the documents' lengths, where a mask costs the square of the row's."""
    batch, _, time, _ = q.shape
    # Split and not sliced: the gradient of a slice is a tensor as large as the whole.
    parts = zip(*(y.transpose(1, 2).flatten(0, 1).split(lengths.tolist()) for y in (q, k, v)))   # (L, heads, D) each
    done = [attend(*(y.transpose(0, 1)[None] for y in part), None, kind)[0].transpose(0, 1) for part in parts]
    return torch.cat(done).unflatten(0, (batch, time)).transpose(1, 2)


class AdaptedLinear(nn.Linear):
    """The last matrix of a sublayer, with a bottleneck behind it that adds to its output: y + up silu(down y)."""

    def __init__(self, n_in, n_out, size):
        super().__init__(n_in, n_out, bias=False)
        self.adapter_down = nn.Parameter(torch.zeros(size, n_out))
        self.adapter_up = nn.Parameter(torch.zeros(n_out, size))

    def forward(self, x):
        y = super().forward(x)
        return y + F.linear(F.silu(F.linear(y, self.adapter_down)), self.adapter_up)


def last_linear(n_in, config):
    """What writes a sublayer's output, n_in wide, into the residual stream."""
    if config.adapter_size:
        return AdaptedLinear(n_in, config.n_embd, config.adapter_size)
    return nn.Linear(n_in, config.n_embd, bias=False)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.attend = config, attend       # parallel.compile_blocks knows a faster one for CPUs
        width, kv_width = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.q_proj = nn.Linear(config.n_embd, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.n_embd, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.n_embd, kv_width, bias=config.qkv_bias)
        self.o_proj = last_linear(width, config)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x, cos, sin, allowed, remember):
        batch, time, _ = x.shape
        heads = lambda y: y.view(batch, time, -1, self.config.head_dim).transpose(1, 2)      # (B, heads, T, D)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if remember is not None:
            k, v = remember(k, v)
        y = self.attend(q, k, v, allowed, self.config.attention)
        return self.o_proj(y.transpose(1, 2).reshape(batch, time, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.down_proj = last_linear(config.n_inner, config)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout, self.recompute = config.dropout, config.recompute == "selective"
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, allowed=None, remember=None, keep=None):
        drop = lambda y: F.dropout(y, self.dropout, self.training)
        think = lambda x: self.mlp(self.post_attention_layernorm(x))
        if self.recompute and torch.is_grad_enabled():          # what is widest is kept for no layer but one at a time
            think = partial(checkpoint, think, use_reentrant=False)
        x = x + drop(self.self_attn(self.input_layernorm(x), cos, sin, allowed, remember))
        x = x if keep is None else x[keep]                      # (N, C): nobody looks at the others any more
        return x + drop(think(x))


class KVCache:
    """Keys and values of the tokens seen so far, in room that is set aside once: growing it by concatenation would copy
    everything at every token. All rows of a batch share one length; what is padding is told by the mask."""

    def __init__(self, config, batch, max_length, device=None, dtype=torch.float32):
        shape = (config.n_layer, batch, config.n_kv_head, max_length, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.max_length, self.length = max_length, 0

    def append(self, layer, k, v):
        """Writes a layer's new k, v (B, K, T, D) behind what is there; -> all its keys, all its values (B, K, S, D)."""
        start, end = self.length, self.length + k.size(2)
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, start:end], values[:, :, start:end] = k, v
        return keys[:, :, :end].to(k.dtype), values[:, :, :end].to(v.dtype)

    def keep_rows(self, rows):
        """Forgets every row of the batch that is not in rows (a 1-D index tensor)."""
        for kept in (self.keys, self.values):               # moved up in place: a second cache might not fit beside it
            kept[:, :len(rows), :, :self.length] = kept[:, rows, :, :self.length]
        self.keys, self.values = self.keys[:, :len(rows)], self.values[:, :len(rows)]

    @property
    def rows(self):
        return self.keys.size(1)


class Trunk(nn.Module):
    """Tokens in, a vector per token out: what the language model, the reward model and the value network share."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.look = None        # called with the number of each block and what it gives, where somebody wants to see it

    def forward(self, ids, mask=None, cache=None, begins=None, hidden=None, keep=None):
        """ids (B, T) -> (B, T, C); with keep (B, T) bool of these N positions only, (N, C).

        Of a model cut into stages (parallel.spread) only the first one embeds and only the last one has the norm;
        hidden (B, T, C): what the stage before gave.
        mask (B, S): True where a token is real, over the cached and the new tokens; None where all are.
        cache: a KVCache; the new tokens are written behind what it holds.
        begins (B, T): True where a document begins: none sees another, each has the positions 0, 1, ... Without mask
        and cache."""
        if begins is not None and (mask is not None or cache is not None):
            raise ValueError("begins separates the documents of whole rows: it goes with neither mask nor cache")
        start = cache.length if cache is not None else 0
        if cache is not None and start + ids.size(1) > cache.max_length:
            raise ValueError(f"the cache has room for {cache.max_length} tokens; {start} are in it, {ids.size(1)} come")
        if mask is None:
            positions = torch.arange(start, start + ids.size(1), device=ids.device)[None]
        else:                   # counted over the real tokens, so that padding on the left does not shift a sequence
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, start:]
        window = self.config.sliding_window
        causal = mask is None and start == 0 and not 0 < window < ids.size(1)
        allowed = None if causal else visible(mask, start, ids, window)
        if begins is not None:
            positions, allowed = apart(begins)
        reach = positions.amax(-1) + 1                                     # (1 or B,)
        if cache is not None:                   # chosen once for all it will hold: what is in it stays turned
            reach = reach + cache.max_length - start - ids.size(1)
        cos, sin = rope_table(positions, self.config, reach)

        x = self.embed_tokens(ids) if hidden is None else hidden           # (B, T, C)
        for name, layer in self.layers.named_children():
            i = int(name)
            kept = keep if i == self.config.n_layer - 1 else None
            if self.config.recompute == "full" and torch.is_grad_enabled() and cache is None:
                x = checkpoint(layer, x, cos, sin, allowed, None, kept, use_reentrant=False)
            else:
                x = layer(x, cos, sin, allowed, partial(cache.append, i) if cache is not None else None, kept)
            if self.look is not None:
                self.look(i, x)
        if cache is not None:
            cache.length += ids.size(1)
        return x if self.norm is None else self.norm(x)


def visible(mask, start, ids, window=0):
    """(B, 1, T, S) bool: which of the S tokens each new token may look at: real ones, not later than itself and, with
    a window, among the last `window`. A token always sees itself: a row without any would be a softmax over nothing,
    which is NaN, and NaN spreads from padding to all."""
    batch, time = ids.shape
    seen = torch.arange(start + time, device=ids.device)
    own = torch.arange(start, start + time, device=ids.device)[:, None]
    allowed = seen <= own if not window else (seen <= own) & (seen > own - window)
    allowed = allowed.expand(batch, 1, time, start + time)
    return allowed if mask is None else (allowed & mask[:, None, None, :]) | (seen == own)


def apart(begins):
    """Positions (B, T) and `allowed` for rows in which documents stand one behind the other, each taken as if alone.
    begins (B, T) bool: True at the first token of each; with a row one begins in any case.

    A mask where rows are short, since it is one call for all; lengths where they are long, so that what is not looked
    at costs nothing (bench/documents.py)."""
    batch, time = begins.shape
    index = torch.arange(time, device=begins.device)
    first = (index * begins).cummax(-1).values                             # (B, T): where each token's document begins
    if time <= MASK_UP_TO:
        return index - first, ((first[:, :, None] == first[:, None]) & (index <= index[:, None]))[:, None]
    starts = (first == index).flatten().nonzero()[:, 0]
    return index - first, torch.diff(starts, append=starts.new_tensor([batch * time])).cpu()


def generator_of(seed, name):
    """The random numbers of the parameter of that name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        refuse(*config.problems())
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.future_heads = nn.ModuleList(nn.Linear(config.n_embd, config.vocab_size, bias=False)
                                          for _ in range(1, config.n_future))
        self.compiled = False                   # parallel.compile_blocks; then the loss is compiled as well
        self.n_tokens = config.vocab_size       # below it: further rows only pad the matrix, and are no tokens
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids, mask=None, cache=None, keep=None, begins=None, read=None, hidden=None):
        """ids (B, T) -> logits (B, T, n_tokens) of the token after each. Arguments as in Trunk.forward.

        keep (B, T) bool: only at these N positions -> (N, n_tokens); what is no target needs no logits.
        read: what to do with (self, hidden) instead; so a loss can be had without all logits at once.
        A stage without the head gives what it has computed, (B, T, C)."""
        early = keep if not self.compiled and self.model.look is None else None      # compiled blocks have one shape
        hidden = self.model(ids, mask, cache, begins, hidden, early)
        if self.lm_head is None:
            return hidden
        hidden = hidden if early is keep else hidden[keep]
        return self.logits(hidden) if read is None else read(self, hidden)

    def logits(self, hidden, head=0):
        """(..., C) -> (..., n_tokens). What pads the vocabulary is in no softmax, so neither learned nor drawn.
        head: 0 scores the next token, 1 the one after it, ..."""
        return (self.future_heads[head - 1] if head else self.lm_head)(hidden)[..., :self.n_tokens]

    def n_params(self):
        """Numbers that are learned; a tied matrix counts once."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def init_weights(self, seed=0, put=torch.Tensor.copy_):
        """N(0, 0.02) for matrices, 1 for gains; -> the model. o_proj and down_proj (not up_proj or gate_proj) write
        into the residual stream, 2 n_layer times in all: scaled by 1/sqrt(2 n_layer), so that the stream's variance at
        the start does not grow with depth (GPT-2, section 2.3).

        Each parameter has a generator of its own, seeded by (seed, name): the same bits whatever else is drawn, and
        whoever holds only a slice of it can draw the whole and keep the slice: put(parameter, whole). A
        scalar head starts at 1/sqrt(C + 1): larger scores would be noise in the first updates (Stiennon et
        al. 2020, arXiv 2009.01325)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = 0.0 if name.endswith("adapter_up") else 0.02              # so at first an adapter adds nothing
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std = 0.02 / math.sqrt(2 * self.config.n_layer)
            if name == "score.weight":
                std = 1 / math.sqrt(self.config.n_embd + 1)
            put(parameter, torch.randn(parameter.shape, generator=generator_of(seed, name)) * std)
        return self


class ScalarModel(nn.Module):
    """The trunk with one number per position for a head: a reward model (read at the last token) or a value network. Or
    with several, each of which judges something else: dimensions, {name: weight in the sum}."""

    def __init__(self, config, dimensions=None):
        super().__init__()
        self.config, self.dimensions = config, dimensions or {}
        self.model = Trunk(config)
        # Its bias says where 0 is; no ranking loss does (see reward.py).
        self.score = nn.Linear(config.n_embd, max(1, len(self.dimensions)))
        nn.init.zeros_(self.score.bias)

    def forward(self, ids, mask=None, keep=None):
        """ids (B, T) -> fp32 (B, T), with several heads (B, T, heads). keep (B, T) bool: only there, (N,)."""
        return self.score(self.model(ids, mask, keep=keep)).squeeze(-1).float()

    @torch.no_grad()
    def add_up(self, weights):
        """Makes one head of several: a weighted sum of linear heads is a linear head; -> the model."""
        weights = torch.tensor([list(weights.values())], device=self.score.weight.device)              # (1, heads)
        one = nn.Linear(self.config.n_embd, 1).to(self.score.weight)
        one.weight.copy_(weights @ self.score.weight)
        one.bias.copy_(weights[0] @ self.score.bias)
        self.score, self.dimensions = one, {}
        return self

    init_weights = Llama.init_weights
