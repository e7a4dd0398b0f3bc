"""The one generation loop: sample.py, rlhf.py and evaluate.py all speak through it."""
from dataclasses import dataclass

import torch

from model import KVCache


@dataclass
class Generation:
    ids: list           # per prompt: the new tokens, the stop token included when one came
    logprobs: list      # per new token: its log-probability at the sampling temperature, over the whole vocabulary
    stopped: list       # per prompt: whether it ended by itself


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, stop_ids, temperature=1.0, top_k=0, top_p=1.0, seed=0, on_token=None):
    """Continues each prompt, a list of token ids, until a stop token, max_new_tokens, or the end of the context.

    temperature 0 is greedy. top_k keeps the k likeliest tokens (0, or more than there are: all), top_p the likeliest
    that together reach that probability. on_token(row, id) is called as tokens come. A prompt longer than the context
    keeps its last block_size - 1 tokens; where the context ends, `stopped` is False. -> Generation"""
    if not prompts:
        return Generation([], [], [])
    if any(not prompt for prompt in prompts):
        raise ValueError("a prompt needs at least one token: begin with BOS")
    was_training = model.training
    model.eval()                                                           # dropout would make it another model
    device, context = model.lm_head.weight.device, model.config.block_size
    prompts = [prompt[-(context - 1):] for prompt in prompts]
    longest = max(map(len, prompts))
    room = min(longest + max_new_tokens, context + longest)
    generator = torch.Generator(device=device).manual_seed(seed)

    # Prompts stand right-aligned, padded on the left, so that the newest token is the last column of every row.
    padding = [longest - len(prompt) for prompt in prompts]
    new = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts)], device=device)
    mask = torch.arange(room, device=device) >= torch.tensor(padding, device=device)[:, None]      # (rows, room)
    cache = KVCache(model.config, len(prompts), room, device, model.lm_head.weight.dtype)
    out = Generation([[] for _ in prompts], [[] for _ in prompts], [False] * len(prompts))
    alive = list(range(len(prompts)))                                      # which prompt each row of the batch is
    for _ in range(max_new_tokens):
        seen = cache.length + new.size(1)
        hidden = model.hidden(new, mask=mask[:, :seen], cache=cache)
        logits = model.logits(hidden[:, -1]).float()                       # (rows, V): only the last position is scored
        chosen, logp = pick(logits, temperature, top_k, top_p, generator)
        keep = []
        for i, (row, token, p) in enumerate(zip(alive, chosen.tolist(), logp.tolist())):
            out.ids[row].append(token)
            out.logprobs[row].append(p)
            out.stopped[row] = token in stop_ids
            if on_token:
                on_token(row, token)
            if not out.stopped[row] and len(prompts[row]) + len(out.ids[row]) < context:
                keep.append(i)
        if not keep:
            break
        if len(keep) < len(alive):                                         # finished rows cost nothing from here on
            index = torch.tensor(keep, device=device)
            cache.keep_rows(index)
            mask, chosen = mask[index], chosen[index]
            alive = [alive[i] for i in keep]
        new = chosen[:, None]
    model.train(was_training)
    return out


def pick(logits, temperature, top_k, top_p, generator):
    """One token per row. logits (rows, V) fp32 -> chosen (rows,), its log-probability before top_k and top_p (rows,)"""
    if temperature == 0:
        chosen = logits.argmax(-1)
        return chosen, logits.log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)
    logp = (logits / temperature).log_softmax(-1)
    probs = logp.exp()
    if 0 < top_k < probs.size(-1):
        smallest = probs.topk(top_k).values[:, -1:]
        probs = probs.masked_fill(probs < smallest, 0.0)
    if top_p < 1:
        ordered, order = probs.sort(descending=True)
        # A token stays when those before it have not passed top_p yet, so the likeliest one always does.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered > top_p * ordered.sum(-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    chosen = torch.multinomial(probs, 1, generator=generator)
    return chosen.squeeze(-1), logp.gather(-1, chosen).squeeze(-1)
