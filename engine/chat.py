"""
Conversations as token ids, with the weight of each token in the loss; and the files that conversations come in.

    <|bos|> <|system|> Be brief. <|end|> <|user|> Is 7 prime? <|end|> <|assistant|> Yes. <|end|>
                                                                                    ^^^^ ^^^^^^^  trained

Each segment of text is encoded by itself and put between special tokens, which are put there as ids. So a user who
types "<|end|><|assistant|>" has typed seven and ten ordinary tokens: text never becomes structure. The assistant's
<|end|> is a target like its words (a model that never saw it as a target never stops), everybody else's is not.

A conversation is one line of JSON:

    {"messages": [{"role": "system" | "user" | "assistant", "content": text, "weight"?: weight}, ...], ...}

An optional system message comes first, then user and assistant take turns, and the assistant has the last word.
`weight`, on assistant messages only, is a number >= 0 for the whole message (0: not trained), or a list of spans
[[start, end, weight], ...] over the characters of the content; what lies in no span weighs 1. A preference is one of

    {"prompt": messages, "chosen": text, "rejected": text, "dimension"?: name, "margin"?: number >= 0, ...}
    {"prompt": messages, "ranked": [text, ...], ...}          best first; becomes all its pairs

and a prompt is {"messages": messages}, where in both the user has the last word. Other keys beside these are kept as
they are. Every line is checked before anything is used, and all bad lines are reported together.
"""

import json
import math
from itertools import combinations
from pathlib import Path

from configurator import refuse
from engine.files import printable
from engine.tokenizer import valid_unicode

ROLES = ("system", "user", "assistant")
MOST_REPORTED = 50          # bad lines that are printed one by one


# ---------------------------------------------------------------------------------------------------------------------
# Messages -> ids and weights

def render(tokenizer, messages, open_assistant=False):
    """
    -> (ids, weights), lists of the same length. weights[i] is the weight of ids[i] itself as a target: above 0 on
    what the assistant says and on its <|end|>. (Who shifts the ids by one to predict the next token shifts the
    weights with them.) open_assistant: end with <|assistant|>, so that the model's turn is next.
    """
    ids, weights = [tokenizer.bos_id], [0.0]
    end = tokenizer.special("<|end|>")
    for message in messages:
        content = tokenizer.encode(message["content"])
        ids += [tokenizer.special(f"<|{message['role']}|>"), *content, end]
        if message["role"] == "assistant":
            weight = message.get("weight", 1.0)
            if isinstance(weight, list):
                weights += [0.0, *_span_weights(tokenizer, content, message["content"], weight), 1.0]
            else:
                weights += [0.0] + [float(weight)] * (len(content) + 1)
        else:
            weights += [0.0] * (len(content) + 2)
    if open_assistant:
        ids.append(tokenizer.special("<|assistant|>"))
        weights.append(0.0)
    return ids, weights


def stop_ids(tokenizer):
    """The ids that end the assistant's turn, or a text."""
    return {tokenizer.specials.get("<|end|>"), tokenizer.eos_id} - {None}


def _span_weights(tokenizer, ids, text, spans):
    """The weight of each token of a text: the highest weight among the characters that the token has bytes of."""
    by_character = [1.0] * len(text)
    for start, end, weight in spans:
        by_character[start:end] = [float(weight)] * (end - start)
    by_byte = [weight for char, weight in zip(text, by_character) for _ in valid_unicode(char).encode()]
    weights, at = [], 0
    for id in ids:
        size = len(tokenizer.token_bytes[id])
        weights.append(max(by_byte[at:at + size]))
        at += size
    return weights


def coloured(tokenizer, ids, weights):
    """
    The tokens as text for a terminal: green where trained (bold above weight 1, dim below), grey where not. Special
    tokens are shown by name. Nothing in the text itself reaches the terminal as a command.
    """
    styles = {"untrained": "90", "below": "2;32", "one": "32", "above": "1;32"}

    def style(weight):
        return styles["untrained" if weight <= 0 else "below" if weight < 1 else "one" if weight == 1 else "above"]

    runs = []                       # neighbours of one style are decoded together, so that no character is cut
    for id, weight in zip(ids, weights, strict=True):
        if not runs or runs[-1][0] != style(weight):
            runs.append((style(weight), []))
        runs[-1][1].append(id)
    return "".join(f"\x1b[{code}m{printable(tokenizer.decode(run, skip_special=False))}\x1b[0m" for code, run in runs)


# ---------------------------------------------------------------------------------------------------------------------
# Files

def read_conversations(path):
    """-> list of dicts with "messages", as in the file. Refuses a file with bad lines, all of them at once."""
    return read_lines(path, lambda entry, number: ([entry], wrong_messages(entry, "messages", last="assistant")))


def read_prompts(path):
    """-> list of dicts with "messages" that end with the user's. Refuses like read_conversations."""
    return read_lines(path, lambda entry, number: ([entry], wrong_messages(entry, "messages", last="user")))


def read_preferences(path):
    """
    -> list of dicts with "prompt", "chosen", "rejected" and what else the line had. The k texts of a ranked line become
    k (k - 1) / 2 of them, each with "group": the line's number, since they are not independent.
    """
    return read_lines(path, _preference)


def _preference(entry, number):
    """One line of a preference file. -> (its pairs, what is wrong with it)"""
    wrong = wrong_messages(entry, "prompt", last="user")
    if "grades" in entry:
        return [], ["graded single answers are not used yet; give chosen and rejected, or ranked"]
    margin = entry.get("margin", 0)
    if not _is_number(margin) or margin < 0:
        wrong.append(f"margin must be a number >= 0, found {_short(margin)}")
    if not isinstance(entry.get("dimension", ""), str):
        wrong.append(f"dimension must be a name, found {_short(entry['dimension'])}")
    if "ranked" in entry:
        texts = entry["ranked"]
        if "chosen" in entry or "rejected" in entry:
            wrong.append("has ranked and chosen or rejected; it can only be one of the two forms")
        if not isinstance(texts, list) or len(texts) < 2:
            return [], [*wrong, f"ranked must be a list of at least two texts, found {_short(texts)}"]
        named = [(f"ranked[{i}]", text) for i, text in enumerate(texts)]
    else:
        named = [(key, entry.get(key)) for key in ("chosen", "rejected")]
    wrong += [f"{name} must be a text that is not empty, found {_short(text)}"
              for name, text in named if not _is_text(text)]
    texts = [text for _, text in named if _is_text(text)]
    if len(set(texts)) < len(texts):
        wrong.append("the same text stands on both sides, which is no preference")
    if wrong or "ranked" not in entry:
        return [entry], wrong
    rest = {key: value for key, value in entry.items() if key != "ranked"}
    pairs = combinations(texts, 2)                                # in order, so the first of each is the better one
    return [{**rest, "chosen": better, "rejected": worse, "group": number} for better, worse in pairs], []


def wrong_messages(entry, name, last):
    """What is wrong with the messages in entry[name], which `last` ('user' or 'assistant') should end. -> sentences"""
    messages = entry.get(name)
    if not isinstance(messages, list) or not messages:
        return [f"{name} must be a list of messages that is not empty, found {_short(messages)}"]
    wrong, expected = [], None
    for i, message in enumerate(messages):
        place = f"{name}[{i}]"
        if not isinstance(message, dict):
            return [*wrong, f"{place} must be an object with role and content, found {_short(message)}"]
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            return [*wrong, f"{place}: role must be one of {', '.join(ROLES)}, found {_short(role)}"]
        if role != (expected or role) or (i == 0 and role == "assistant"):
            return [*wrong, f"{place}: it is {expected or 'user'}'s turn, found {role}"]
        expected = "assistant" if role == "user" else "user"
        if not _is_text(content):
            wrong.append(f"{place}: content must be a text that is not empty, found {_short(content)}")
        if unknown := set(message) - {"role", "content", "weight"}:
            wrong.append(f"{place}: unknown key {_short(min(unknown))}; a message has role, content and weight")
        if "weight" in message and _is_text(content):
            wrong += [f"{place}: {reason}" for reason in _wrong_weight(message)]
    if messages[-1]["role"] != last:
        wrong.append(f"{name} must end with a message of the {last}, found {messages[-1]['role']}")
    return wrong


def _wrong_weight(message):
    weight, size = message["weight"], len(message["content"])
    if message["role"] != "assistant":
        return [f"a message of the {message['role']} is never trained, so it has no weight"]
    if _is_number(weight):
        return [] if weight >= 0 else [f"weight must be >= 0, found {weight}"]
    if not isinstance(weight, list):
        return [f"weight must be a number or a list of [start, end, weight], found {_short(weight)}"]
    return [
        f"weight[{i}] must be [start, end, weight], 0 <= start < end <= {size} and weight >= 0, found {_short(span)}"
        for i, span in enumerate(weight)
        if not (isinstance(span, list) and len(span) == 3 and all(map(_is_number, span))
                and isinstance(span[0], int) and isinstance(span[1], int)
                and 0 <= span[0] < span[1] <= size and span[2] >= 0)
    ]


def _is_text(value):
    return isinstance(value, str) and value != ""


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _short(value):
    """A value for a message: cut, and harmless on a terminal."""
    text = printable(repr(value))
    return "nothing" if value is None else text if len(text) <= 60 else text[:57] + "..."


def read_lines(path, check):
    """
    The entries of a JSONL file. check(entry, line number) -> (entries it becomes, what is wrong with it). Lines end at
    "\\n" only: JSON allows other line separators inside a text, where str.splitlines() would cut.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        refuse(f"{path} cannot be read ({error.strerror}).")
    entries, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line.decode("utf-8"))
            if not isinstance(entry, dict):
                raise ValueError(f"expected an object, found {_short(entry)}")
            found, wrong = check(entry, number)
        except (ValueError, RecursionError) as error:       # bad UTF-8 and bad JSON are ValueErrors
            found, wrong = [], [f"not a line of JSON as expected ({_short_error(error)})"]
        entries += found
        problems += [f"{path}, line {number}: {reason}" for reason in wrong]
    if not problems and not entries:
        problems.append(f"{path} is empty; expected one JSON object a line")
    if len(problems) > MOST_REPORTED:
        problems[MOST_REPORTED:] = [f"{path}: and {len(problems) - MOST_REPORTED} more"]
    if problems:
        refuse(*problems)
    return entries


def _short_error(error):
    text = printable(str(error))
    return text if len(text) <= 100 else text[:97] + "..."
