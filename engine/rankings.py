"""
Preferences: the files that they come in, as token ids, and the pairs in them. For reward.py and dpo.py.

A line of JSON has one of these forms, messages as in engine/chat.py with the user's last:

    {"prompt": messages, "chosen": text, "rejected": text, "margin"?: number >= 0, "dimension"?: name}
    {"prompt": messages, "ranked": [text, ...], "margin"?, "dimension"?}       best first; equally good ones as a list among them
    {"prompt": messages, "answer": text, "grades": {dimension: number, ...}}   the higher, the better

A dimension is what is judged ("helpful", "safe"); a line without one is about the answers as a whole. Of graded
answers, those to one prompt are compared, in each dimension for itself. Other keys are ignored, but for "scores":
{"chosen": number, "rejected": number}, by which the report tells how far apart a pair is.

Every line is checked before anything is used, and all bad lines are reported together. Two collections are
read as they are published (`as_preference`); what they have that is no preference is left out and counted,
since nobody here wrote it.
"""
import contextlib
import json
import math
import re
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from engine import chat
from engine.optim import clip, optimiser_problems, set_lr
from engine.parallel import all_sum, my_share, refuse_once
from engine.run import refuse_missing
from engine.shards import steps_by_length


# --- Files -----------------------------------------------------------------------------------------------------------

def read_preferences(path, dimensions=()):
    """-> (records, left_out): dicts with "prompt", "ranked" (lists of texts, best first; what stands in one list is
    equally good), "dimension" ("": as a whole), "margin", "worth" (a number for each of those lists, NaN where nobody
    told); and why the others were left out, a sentence each.

    dimensions: the names that a line may have; none: any, and an answer's grade is the mean of its grades."""
    lines = chat.read_lines(path, partial(_wrong, dimensions=dimensions), as_preference)
    left_out = [entry["left_out"] for entry in lines if "left_out" in entry]
    records, graded = [], {}
    for entry in lines:
        if "graded" in entry:
            answers = graded.setdefault(json.dumps(entry["prompt"], sort_keys=True), (entry["prompt"], {}))[1]
            for text, grades in entry["graded"]:
                grades = grades if dimensions else {"": sum(grades.values()) / len(grades)}
                for name, grade in grades.items():
                    answers.setdefault(name, {}).setdefault(text, []).append(grade)
        elif "left_out" not in entry:
            worth = [math.nan] * len(entry["ranked"]) if "ranked" in entry else _worth(entry)
            records.append({"prompt": entry["prompt"], "ranked": _levels(entry), "dimension": entry.get("dimension", ""),
                            "margin": entry.get("margin", 0.0), "worth": worth})
    for prompt, answers in graded.values():
        for name in dimensions or answers:
            of_grade = {}
            for text, grades in answers.get(name, {}).items():
                of_grade.setdefault(sum(grades) / len(grades), []).append(text)
            worth = sorted(of_grade, reverse=True)
            if len(worth) > 1:
                records.append({"prompt": prompt, "ranked": [of_grade[grade] for grade in worth], "dimension": name,
                                "margin": 0.0, "worth": worth})
            elif worth:
                left_out.append(f"no two different grades {name} of answers to {chat.short(prompt[-1]['content'])}")
    return records, left_out


def as_preference(entry):
    """The line in our form, if it is in one of these; otherwise as it is, and the check tells what is wrong.

        {"chosen": dialogue, "rejected": dialogue}        Anthropic's HH (Bai et al. 2022, arXiv 2204.05862), a dialogue
                                                          being "\\n\\nHuman: ...\\n\\nAssistant: ...",
                                                          the last answer the judged one
        {"instruction": text, "completions": [{"response": text, "annotations": {name: {"Rating": "4"}}}, ...]}
                                                          UltraFeedback (Cui et al. 2023, arXiv 2310.01377)
        {"chosen": messages, "rejected": messages, "score_chosen"?, "score_rejected"?}       its pairs, and others' """
    ends = [entry.get("chosen"), entry.get("rejected")]
    if "prompt" not in entry and all(isinstance(text, str) for text in ends):
        ends = [_turns(text) for text in ends]
    found, imported = dict(entry), True
    if all(isinstance(messages, list) and messages and isinstance(messages[-1], dict) for messages in ends):
        chosen, rejected = ends
        if chosen[:-1] != rejected[:-1]:
            return {"left_out": "chosen and rejected differ before the last answer"}
        found.update(prompt=chosen[:-1] or entry.get("prompt"), chosen=chosen[-1].get("content"),
                     rejected=rejected[-1].get("content"))
        found.setdefault("scores", {side: entry.get(f"score_{side}") for side in ("chosen", "rejected")})
    elif isinstance(entry.get("completions"), list) and isinstance(entry.get("instruction"), str):
        graded = [_graded(completion) for completion in entry["completions"] if isinstance(completion, dict)]
        found = {"prompt": entry["instruction"], "graded": [each for each in graded if each[1]]}
        if len(found["graded"]) < 2:
            return {"left_out": "fewer than two answers have ratings"}
    else:
        imported = False
        if "answer" in entry or "grades" in entry:
            found["graded"] = [(entry.get("answer"), entry.get("grades"))]
    if imported and isinstance(found["prompt"], str):
        found["prompt"] = [{"role": "user", "content": found["prompt"]}]
    return {"left_out": "; ".join(wrong)} if imported and (wrong := _wrong(found)) else found


def _turns(dialogue):
    """The messages of "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    parts = re.split(r"(?:\A|\n\n)(Human|Assistant):", dialogue)
    return [{"role": {"Human": "user", "Assistant": "assistant"}[who], "content": text.strip()}
            for who, text in zip(parts[1::2], parts[2::2])]


def _graded(completion):
    """(answer, {name: grade}) of one of UltraFeedback's; a rating may be "N/A"."""
    grades = {}
    annotations = completion.get("annotations")
    for name, found in annotations.items() if isinstance(annotations, dict) else ():
        with contextlib.suppress(TypeError, KeyError, ValueError, OverflowError):
            grades[name] = float(found["Rating"])
    return completion.get("response"), grades


def _levels(entry):
    """The texts of a preference, those of one worth in a list; none when `ranked` is no list."""
    ranked = entry.get("ranked", [[entry.get("chosen")], [entry.get("rejected")]])
    return [texts if isinstance(texts, list) else [texts] for texts in ranked] if isinstance(ranked, list) else []


def _worth(entry):
    """[chosen, rejected] of a pair, for the report only: numbers whose difference tells how far apart they are."""
    scores = entry.get("scores")                       # the user's own key may be anything
    if isinstance(scores, dict) and all(_is_number(scores.get(side), -1e9) for side in ("chosen", "rejected")):
        return [scores["chosen"], scores["rejected"]]
    return [entry.get("margin", math.nan), 0.0]


def _is_number(value, least=0):
    return type(value) in (int, float) and least <= value <= 1e9


def _wrong(entry, dimensions=()):
    """What is wrong with a line, a sentence each."""
    if "left_out" in entry:
        return []
    wrong = chat.wrong_messages(entry, "prompt", last="user")
    if sum((bool(entry.keys() & keys)) for keys in ({"graded"}, {"ranked"}, {"chosen", "rejected"})) > 1:
        wrong.append("has more than one of ranked, chosen and rejected, answer and grades; it can only be one of the "
                     "forms")
    names = {entry["dimension"]} if "dimension" in entry and not isinstance(entry["dimension"], (list, dict)) else set()
    if "dimension" in entry and not isinstance(entry["dimension"], str):
        wrong.append(f"dimension must be a name, found {chat.short(entry['dimension'])}")
    if "graded" in entry:
        for text, grades in entry["graded"]:
            if not isinstance(text, str) or not text:
                wrong.append(f"answer must be a text that is not empty, found {chat.short(text)}")
            if not isinstance(grades, dict) or not grades or not all(_is_number(grade, -1e9) for grade in grades.values()):
                wrong.append(f"grades must be an object of dimensions with a number each, found {chat.short(grades)}")
            elif "answer" in entry:
                names |= grades.keys()
    else:
        levels = _levels(entry)
        texts = sum(levels, [])
        if not _is_number(entry.get("margin", 0)):
            wrong.append(f"margin must be a number from 0 to 1e9, found {chat.short(entry['margin'])}")
        if len(levels) < 2 or not all(levels) or not all(isinstance(text, str) and text for text in texts):
            wrong.append("chosen and rejected, or the two or more members of ranked, must be texts that are not empty "
                         f"(or lists of such that are equally good), found {chat.short(entry.get('ranked', levels))}")
        elif len(set(texts)) < len(texts):
            wrong.append("the same text stands there twice, which is no preference")
    if dimensions and (unknown := names - {*dimensions, ""}):
        wrong.append(f"dimension {chat.short(min(map(str, unknown)))} is none of {', '.join(dimensions)}")
    return wrong


def weight_problems(dimensions):
    """What is wrong with {name: weight}, a sentence each."""
    wrong = [f"dimensions: the weight of {chat.short(name)} must be a number from -1e9 to 1e9, found "
             f"{chat.short(weight)}"
             for name, weight in dimensions.items() if not (isinstance(name, str) and name and _is_number(weight, -1e9))]
    if dimensions and not wrong and not any(dimensions.values()):
        wrong.append(f"dimensions: all weights of {', '.join(dimensions)} are 0")
    return wrong


def shares(dimensions):
    """{name: weight} -> the same with sizes that add up to 1. Of heads with deviation 1 their sum has at most that."""
    total = sum(map(abs, dimensions.values()))
    return {name: weight / total for name, weight in dimensions.items()}


# --- Rankings of token ids -------------------------------------------------------------------------------------------

def read_rankings(path, tokenizer, block_size, dimensions=None):
    """The rankings of a preference file, and why others were left out, a sentence each: of those nothing is to be
    compared, or not without the dialogues that are longer than the model can read. A ranking is a dict:

        "dialogues"    lists of token ids, best first          "prompt"     how many of the ids are the prompt
        "level"        a number for each, smaller is better    "margin"     by which a better one should be ahead
        "worth"        a number for each, for the report       "dimension"  what was judged, "": the answers as a whole
        "heads"        what each head of the model counts in the score: 1 for that of the dimension, or all their weights

    dimensions: {name: weight}. A dialogue ends in <|end|> (or what the model's form has for it), and that is where it
    is scored: there the model has read all of the answer and knows that it is over."""
    def dialogue_of(record, text):
        ids, weights = chat.render(tokenizer, [*record["prompt"], {"role": "assistant", "content": text}])
        behind = next(i for i, weight in enumerate(reversed(weights)) if weight)        # ChatML has a line end there
        return ids[:len(ids) - behind]

    dimensions = dimensions or {}
    rankings, (records, left_out) = [], read_preferences(path, dimensions)
    for record in records:
        read = [(i, dialogue_of(record, text)) for i, texts in enumerate(record["ranked"]) for text in texts]
        read = [(i, dialogue) for i, dialogue in read if len(dialogue) <= block_size]
        level = [i for i, _ in read]
        if len(set(level)) < 2:
            left_out.append(f"the answers to {chat.short(record['prompt'][-1]['content'])} are longer than "
                            f"{block_size} tokens")
            continue
        prompt, name = len(chat.render(tokenizer, record["prompt"], open_assistant=True)[0]), record["dimension"]
        heads = [float(name == other) if name in dimensions else weight for other, weight in dimensions.items()]
        rankings.append({"dialogues": [dialogue for _, dialogue in read], "level": level, "prompt": prompt,
                         "margin": record["margin"], "worth": [record["worth"][i] for i in level], "dimension": name,
                         "heads": heads})
    return rankings, left_out


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


def means_of_pairs(x, ranking):
    """x (P,) of pairs, ranking (P,) the number of each one's ranking -> the mean of each ranking (B,)."""
    return x.new_zeros(int(ranking[-1]) + 1).index_add(0, ranking, x) / ranking.bincount()


# --- A run on them ---------------------------------------------------------------------------------------------------

def read_files(config, tokenizer, context, setup, names, dimensions=None):
    """The rankings of data_dir/chat/preferences_*.jsonl: (path, train, left_out, {name: rankings} of those of `names`
    that are there, problems). context: tokens that the model reads; problems: why they, and the settings that both
    stages have, make no step, a sentence each."""
    place = lambda name: Path(config.data_dir) / "chat" / f"preferences_{name}.jsonl"
    path, others = place("train"), {}
    refuse_missing(setup, {path: "preferences"}, f"The demonstration's: {config.command('prepare_chat.py')}",
                   "Your own go there, in a form of those at the top of engine/rankings.py")
    train, left_out = read_rankings(path, tokenizer, context, dimensions)
    train = train[:config.max_rankings or None]
    for name in names:
        if place(name).exists():
            others[name], lacking = read_rankings(place(name), tokenizer, context, dimensions)
            if not others[name]:
                refuse_once(setup, f"{place(name)}: of all {len(lacking)} lines nothing can be compared: {lacking[0]}")
            elif lacking:
                setup.say(f"note: {place(name)}: {len(lacking)} lines are left out, the first since {lacking[0]}")
    problems = config.below_one("batch_size", "window", "micro_batch_size", "epochs", "log_every")
    problems += config.outside(max_rankings=(0,), save_full=(0,)) + optimiser_problems(config)
    if len(train) < config.batch_size:
        why = f", the first since {left_out[0]}" if left_out else ""
        problems.append(f"{path} has {len(train)} usable pairs or rankings, fewer than batch_size = "
                        f"{config.batch_size} (max_rankings = {config.max_rankings}; {len(left_out)} are left "
                        f"out{why}): a smaller --batch_size")
    if config.batch_size % setup.world:
        problems.append(f"batch_size = {config.batch_size} can not be shared by {setup.world} processes")
    return path, train, left_out, others, problems


def planned(train, config):
    """-> (the rankings that fill steps, the number of steps, and a function: step -> its rankings). A short step would
    weigh its answers more, so what is left over is not used."""
    per_epoch = len(train) // config.batch_size
    train = train[:per_epoch * config.batch_size]
    lengths = np.array([longest(ranking) for ranking in train])
    plan_of = lru_cache(1)(partial(steps_by_length, lengths, config.batch_size, config.window, config.seed))
    batch_of = lambda step: [train[i] for i in plan_of(step // per_epoch)[step % per_epoch]]
    return train, config.epochs * per_epoch, batch_of


def micro_batches(rankings, setup, size, length=longest):
    """This rank's share of a step, in micro-batches of similar length, so that little of them is padding. The loss is a
    sum over rankings, so neither the order within the step nor the cut changes its gradient."""
    return my_share(sorted(rankings, key=length), size, setup)


def take_step(model, optimizers, lr, sums, step, run, config, setup):
    """The end of a step: clips the gradients and moves the weights; -> (means, norm). sums: what was added up over this
    rank's rankings, the loss first; means: over the step's rankings on all ranks. Refuses a loss that is not finite."""
    norm = clip(model.parameters(), config.grad_clip).item()
    means = (all_sum(sums, setup) / config.batch_size).tolist()
    if not math.isfinite(means[0] + norm):
        refuse_once(setup, f"step {step}: loss {means[0]}, gradient norm {norm}: nothing that could be learned from. "
                    f"The last checkpoint in {run} is as it was; lower --learning_rate, or use --dtype=fp32, in "
                    "another --out_dir")
    for optimizer in optimizers:
        set_lr(optimizer, lr)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return means, norm
