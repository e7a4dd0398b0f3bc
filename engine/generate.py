"""The one generation loop: sample.py, reward.py, rlhf.py and evaluate.py all speak through it."""
import codecs
from dataclasses import dataclass
from functools import partial

import torch

from engine.decode import Decoder, room
from model import KVCache


@dataclass
class Generation:
    ids: list               # per prompt: the new tokens, the stop token included when one came
    logprobs: list          # per new token: the model's log-probability at the sampling temperature, over all tokens
    stopped: list           # per prompt: whether it ended by itself, by a stop token or a stop string
    texts: list = None      # per prompt, where a tokenizer was given: its text, without the stop string that ended it


def generate(model, prompts, max_new_tokens, stop_ids, temperature=1.0, top_k=0, top_p=1.0, seed=0, *,
             repetition_penalty=1.0, tokenizer=None, stop_strings=(), on_text=None, compile=False):
    """Continues each prompt, a list of token ids, until a stop token, a stop string, max_new_tokens, or the end of the
    context. -> Generation

    temperature 0 is greedy. top_k keeps the k likeliest tokens (0, or more than there are: all), top_p the likeliest
    that together reach that probability; equally likely ones stay or go together. repetition_penalty r: logits of
    tokens that the row already has are divided by r where positive, else multiplied (Keskar et al. 2019, 1909.05858).
    The same seed gives the same batch the same answers.

    With a tokenizer there are texts and stop_strings, and on_text(row, text) is called as text comes: whole characters,
    without what may yet become a stop string. compile: the step goes through torch.compile.

    A prompt that does not fit keeps its last block_size - 1 tokens. Where the context ends, generation ends, and
    `stopped` is False: further positions were never trained, and to shift the window would be to compute all of it anew
    for every token."""
    if any(not prompt for prompt in prompts):
        raise ValueError("a prompt needs at least one token: begin with BOS")
    if (stop_strings or on_text) and tokenizer is None:
        raise ValueError("stop_strings and on_text are about text: they need a tokenizer")
    context, head = model.config.block_size, model.lm_head.weight
    prompts = [prompt[-(context - 1):] for prompt in prompts]
    limits = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]       # new tokens of each, at most
    # Behind a special token a text begins, behind other tokens it goes on.
    begins = [tokenizer is not None and not tokenizer.token_bytes[prompt[-1]] for prompt in prompts]
    streams = [TextStream(tokenizer, stop_strings, first) for first in begins] if stop_strings or on_text else []
    choose = partial(pick, temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty,
                     generator=torch.Generator(device=head.device).manual_seed(seed))
    was_training = model.training
    model.eval()                                                           # dropout would make it another model
    try:
        with torch.inference_mode():
            rows = _continue(model, prompts, limits, stop_ids, choose, streams, on_text, repetition_penalty != 1,
                             compile) if max(limits, default=0) > 0 else []
    finally:
        model.train(was_training)
    out = Generation([], [], [], [] if tokenizer else None)
    for row, (ids, logprobs) in enumerate(rows or [([], [])] * len(prompts)):
        out.ids.append(ids)
        out.logprobs.append(logprobs)
        out.stopped.append(bool(ids) and ids[-1] in stop_ids or bool(streams) and streams[row].stopped)
        if streams and (rest := streams[row].finish()) and on_text:
            on_text(row, rest)
        if tokenizer:
            out.texts.append(streams[row].text if streams else tokenizer.decode(ids, begins=begins[row]))
    return out


def _continue(model, prompts, limits, stop_ids, choose, streams, on_text, keep_seen, compile):
    """-> [(new ids, their log-probabilities)] of the prompts"""
    head, rows = model.lm_head.weight, len(prompts)
    device, dtype = head.device, head.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)

    # 1. The prompts stand right-aligned, padded on the left: the newest token is in the same column for every row.
    longest, most = max(map(len, prompts)), max(limits)
    padding = [longest - len(prompt) for prompt in prompts]
    prompt_ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts)], device=device)
    mask = None
    if any(padding):
        mask = torch.arange(longest, device=device) >= torch.tensor(padding, device=device)[:, None]
    cache = KVCache(model.config, rows, room(longest + most, compile), device, dtype)
    cache.max_length = longest + most       # and not all of its room: RoPE may ask how long rows can become
    hidden = model.model(prompt_ids, mask, cache)[:, -1]                  # (rows, C): only the last position is scored
    decoder = Decoder(model, cache, padding, dtype, compile)
    logits = decoder.scores(hidden.t())                                    # (rows, V)

    # 2. What is kept beside them, all of it on the device.
    ids = torch.zeros(rows, most, dtype=torch.long, device=device)
    logprobs = torch.zeros(rows, most, device=device)
    written = torch.zeros(rows, dtype=torch.long, device=device)
    stops = torch.zeros(logits.size(-1), dtype=torch.bool, device=device)
    stops[[id for id in stop_ids if id < len(stops)]] = True
    last = torch.tensor(limits, device=device)
    seen = torch.zeros_like(logits, dtype=torch.bool) if keep_seen else None         # the tokens that each row has
    for row, prompt in enumerate(prompts if keep_seen else []):
        seen[row, prompt] = True
    alive = place = torch.arange(rows, device=device)        # the prompts that go on, and the row of the cache of each
    over = torch.zeros(rows, dtype=torch.bool, device=device)
    # To ask whether a row is over means to wait for the device. A CPU has nothing to wait for, and asks every time.
    every = 1 if device.type == "cpu" or streams else 8

    # 3. Token by token.
    for step in range(most):
        if step > 0:
            logits = decoder.step(newest)
            logits = logits if len(place) == len(logits) else logits[place]
        chosen, logp = choose(logits, seen=seen)
        ids.select(1, step).index_copy_(0, alive, chosen)
        logprobs.select(1, step).index_copy_(0, alive, logp)
        if keep_seen:
            seen.scatter_(1, chosen[:, None], True)
        over = over | stops[chosen]
        if step + 1 >= min(limits):
            over = over | (last[alive] <= step + 1)
        if streams:
            for row, token in zip(alive.tolist(), chosen.tolist()):
                if (text := streams[row].feed(token)) and on_text:
                    on_text(row, text)
            over = over | torch.tensor([streams[row].stopped for row in alive.tolist()], device=device)
        if (step + 1) % every == 0 and over.any():
            written.index_fill_(0, alive, step + 1)
            going = ~over
            alive, place, chosen, over = alive[going], place[going], chosen[going], over[going]
            seen = seen[going] if keep_seen else None
            if not len(alive):
                break
            # Rows that are over cost a share of each step until they are moved out, which costs a copy of the cache.
            if len(alive) <= 0.75 * cache.rows and not compile:
                cache.keep_rows(place)
                decoder.take_rows(place)
                place = torch.arange(len(alive), device=device)
        newest = chosen
        if len(place) < cache.rows:
            newest = torch.zeros(cache.rows, dtype=torch.long, device=device).index_copy_(0, place, chosen)
    written.index_fill_(0, alive, step + 1)
    out = []
    for new, logp, count, limit in zip(ids.tolist(), logprobs.tolist(), written.tolist(), limits):
        new = new[:min(count, limit)]
        end = next((i + 1 for i, token in enumerate(new) if token in stop_ids), len(new))
        out.append((new[:end], logp[:end]))
    return out


def pick(logits, temperature, top_k, top_p, generator, repetition_penalty=1.0, seen=None):
    """One token per row. logits (rows, V) fp32; seen (rows, V) bool: what the penalty is for -> chosen (rows,), and
    (rows,) its log-probability at this temperature before penalty, top_k and top_p"""
    logp = (logits if temperature in (0, 1) else logits / temperature).log_softmax(-1)
    if seen is not None:
        less_likely = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(seen, less_likely, logits)
    if temperature == 0:
        chosen = logits.max(-1, keepdim=True).indices           # as argmax; on a CPU in less than half its time
        return chosen.squeeze(-1), logp.gather(-1, chosen).squeeze(-1)
    probs = logp.exp() if seen is None else (logits / temperature).softmax(-1)
    if 0 < top_k < probs.size(-1) or top_p < 1:
        likeliest = probs.topk(top_k if 0 < top_k < probs.size(-1) else probs.size(-1)).values          # in order
        # A token stays when those before it have not passed top_p yet, so the likeliest one always does.
        stay = likeliest.cumsum(-1) - likeliest <= top_p * likeliest.sum(-1, keepdim=True)
        smallest = likeliest.gather(-1, stay.sum(-1, keepdim=True) - 1)
        probs = probs.masked_fill(probs < smallest, 0.0)
    chosen = torch.multinomial(probs, 1, generator=generator)
    return chosen.squeeze(-1), logp.gather(-1, chosen).squeeze(-1)


class TextStream:
    """The text of tokens as they come: whole characters only (a token may be half of one), nothing that may yet become
    a stop string, and nothing from a stop string on. begins: as in Tokenizer.decode."""

    def __init__(self, tokenizer, stop_strings=(), begins=False):
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        self.prefix = tokenizer.prefix if begins else ""
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.text, self.held, self.stopped = "", "", False

    def feed(self, token):
        """-> the text that can be shown now"""
        text = self.utf8.decode(self.tokenizer.decode_bytes([token]))
        if text and self.prefix:
            text, self.prefix = text.removeprefix(self.prefix), ""
        return self._take(text)

    def finish(self):
        """-> the rest, when no token comes any more"""
        text = self._take(self.utf8.decode(b"", final=True))
        rest, self.held = self.held, ""
        self.text += rest
        return text + rest

    def _take(self, text):
        if self.stopped:
            return ""
        self.held += text
        found = [at for stop in self.stop_strings if (at := self.held.find(stop)) >= 0]
        if found:
            ready, self.held, self.stopped = self.held[:min(found)], "", True
        else:
            lengths = range(max(map(len, self.stop_strings), default=1) - 1, 0, -1)
            keep = next((n for n in lengths if any(stop.startswith(self.held[-n:]) and n < len(stop)
                                                  for stop in self.stop_strings) and n <= len(self.held)), 0)
            ready, self.held = self.held[:len(self.held) - keep], self.held[len(self.held) - keep:]
        self.text += ready
        return ready
