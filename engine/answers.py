"""What a model answers, and how that reads: for evaluate.py, and for sft.py before and after."""
import re

import numpy as np

from engine import chat
from engine.generate import generate

GRAM = 13       # words; long enough that sharing one is hardly chance (Brown et al. 2020, 2005.14165, appendix C)


def complete(model, prompts, config, max_new_tokens, stop_ids, temperature=0.0):
    """[(new ids without the stop token, whether it stopped)] for prompts of any length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    result = [None] * len(prompts)
    for start in range(0, len(order), config.batch_size):
        part = order[start:start + config.batch_size]
        batch = [prompts[i] for i in part]                                 # of similar length: little padding
        made = generate(model, batch, max_new_tokens, stop_ids, temperature, seed=config.seed + start)
        for i, ids, stopped in zip(part, made.ids, made.stopped):
            result[i] = (ids[:-1] if stopped else ids, stopped)
    return result


def answers(model, tokenizer, entries, config, temperature=0.0):
    """[(answer, stopped, its ids)] to conversations that end with the user's message."""
    prompts = [chat.render(tokenizer, entry["messages"], open_assistant=True)[0] for entry in entries]
    made = complete(model, prompts, config, config.max_new_tokens, chat.stop_ids(tokenizer), temperature)
    return [(tokenizer.decode(ids), stopped, ids) for ids, stopped in made]


def answer_scores(made, pattern=""):
    """Of answers, as `answers` gives them: the shares that end by themselves, that end in a loop, that match a regular
    expression as a whole (None without one); and how many of an answer's words, and of its pairs of tokens, differ."""
    return {"stop": mean(stopped for _, stopped, _ in made), "loops": mean(loops(ids) for _, _, ids in made),
            "format": mean(re.fullmatch(pattern, text, re.DOTALL) is not None for text, _, _ in made) if pattern else None,
            **{f"distinct_{n}": mean(distinct(ids, n) for _, _, ids in made) for n in (1, 2, 3)}}


MEASURED = {"stop": "answers that end", "format": "in the format", "loops": "end in a loop",
            "distinct_1": "different tokens", "distinct_2": "different pairs", "distinct_3": "different triples",
            "text_loss": "loss on text"}


def side_by_side(**found):
    """The table of several such scores, {heading: them}."""
    shown = lambda value: f"{'-':>10}" if value is None else f"{value:>10.3f}"
    rows = [f"{said:<24}" + "".join(shown(scores.get(name)) for scores in found.values())
            for name, said in MEASURED.items()]
    return "\n".join([f"{'':<24}" + "".join(f"{heading:>10}" for heading in found), *rows])


def distinct(ids, n):
    """The share of a text's n-grams that are different ones; None where it has none (Li et al. 2016, 1510.03055)."""
    grams = list(zip(*(ids[i:] for i in range(n))))
    return len(set(grams)) / len(grams) if grams else None


def loops(ids, longest=16, times=3):
    """Whether a text ends in the same run of at most `longest` tokens, `times` times over."""
    return any(len(ids) >= times * period and ids[-times * period:] == ids[-period:] * times
               for period in range(1, longest + 1))


def mean(values):
    """The mean of the values that are not None; None when there are none."""
    values = [value for value in values if value is not None]
    return np.mean(values) if values else None


def grams(words, n=GRAM):
    """Hashes of all runs of n words of a text."""
    return [hash(tuple(words[i:i + n])) for i in range(len(words) - n + 1)]
