"""Preferences as token ids: rankings of answers to one prompt, and the pairs in them. For reward.py and dpo.py."""
import math
from itertools import combinations

import torch

from engine import chat
from engine.parallel import my_share


def read_rankings(path, tokenizer, block_size):
    """The rankings of a preference file: a list of {"dialogues": lists of token ids, best first, "level": for each of
    them a number, smaller is better, "prompt": how many ids are the prompt, "margin", "gap"}, and the number of those
    left out since, without the dialogues that are longer than the model can read, nothing is left to compare.

    A dialogue ends in <|end|> (or what the model's form has for it), and that is where it is scored: there the model has
    read all of the answer and knows that it is over."""
    def dialogue_of(record, text):
        ids, weights = chat.render(tokenizer, [*record["prompt"], {"role": "assistant", "content": text}])
        behind = next(i for i, weight in enumerate(reversed(weights)) if weight)        # ChatML has a line end there
        return ids[:len(ids) - behind]

    rankings, too_long = [], 0
    for record in chat.read_preferences(path):
        read = [(i, dialogue_of(record, text)) for i, texts in enumerate(record["ranked"]) for text in texts]
        read = [(i, dialogue) for i, dialogue in read if len(dialogue) <= block_size]
        level = [i for i, _ in read]
        if len(set(level)) < 2:
            too_long += 1
            continue
        prompt = len(chat.render(tokenizer, record["prompt"], open_assistant=True)[0])
        rankings.append({"dialogues": [dialogue for _, dialogue in read], "level": level, "prompt": prompt,
                         "margin": record.get("margin", 0.0), "gap": gap_of(record)})
    return rankings, too_long


def gap_of(record):
    """By how much a pair's chosen answer is better, for the report only; NaN where the file does not tell."""
    scores = record.get("scores")                      # the user's own key may be anything
    if isinstance(scores, dict) and all(type(scores.get(side)) in (int, float) and abs(scores[side]) <= 1e9
                                        for side in ("chosen", "rejected")):
        return scores["chosen"] - scores["rejected"]
    return record.get("margin", math.nan)


def batch_problems(path, rankings, too_long, context, config, setup):
    """Why the rankings of a file make no step, a sentence each. context: tokens that the model reads."""
    problems = []
    if len(rankings) < config.batch_size:
        problems.append(f"{path} has {len(rankings)} usable pairs or rankings ({too_long} are longer than the "
                        f"model's {context} tokens; max_rankings = {config.max_rankings}), fewer than batch_size = "
                        f"{config.batch_size}")
    if config.batch_size % setup.world:
        problems.append(f"batch_size = {config.batch_size} can not be shared by {setup.world} processes")
    return problems


def longest(ranking):
    return max(map(len, ranking["dialogues"]))


def pairs_of(rankings, device="cpu"):
    """All pairs of a better and a worse answer to one prompt: (better, worse, ranking), three int64 tensors (P,). The
    first two count the dialogues of all rankings one after the other."""
    pairs, offset = [], 0
    for number, ranking in enumerate(rankings):
        level = ranking["level"]
        both = combinations(range(len(level)), 2)
        pairs += [(offset + i, offset + j, number) for i, j in both if level[i] < level[j]]
        offset += len(level)
    return torch.tensor(pairs, device=device).unbind(1)


def micro_batches(rankings, setup, size, length=longest):
    """This rank's share of a step, in micro-batches of similar length, so that little of them is padding. The loss is a
    sum over rankings, so neither the order within the step nor the cut changes its gradient."""
    return my_share(sorted(rankings, key=length), size, setup)
