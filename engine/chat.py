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
`weight`, on assistant messages only, is a number from 0 to 1e9 for the whole message (0: not trained), or a list of
spans [[start, end, weight], ...] over the characters of the content; what lies in no span weighs 1. Lines in other usual
forms are read as well (`as_messages`). A prompt is {"messages": messages}, where the user has the last word. Other keys
beside these are kept as they are. Every line is checked before anything is used, and all bad lines are reported together.
Preferences: engine/rankings.py.
"""

import json
from itertools import groupby
from pathlib import Path

from configurator import refuse
from engine.files import printable

ROLES = ("system", "user", "assistant")
CHAT_TOKENS = (*(f"<|{role}|>" for role in ROLES), "<|end|>")
# How a conversation is written down, by the token that ends a message: what stands before the message's text (special
# tokens, or text), what its text begins with, what follows the end, and whether BOS stands before it all. A model
# answers in the form that it was taught. The first is ours.
FORMS = {
    "<|end|>": (("<|{role}|>",), "", "", True),
    "<|im_end|>": (("<|im_start|>",), "{role}\n", "\n", False),                                           # ChatML
    "<|eot_id|>": (("<|start_header_id|>", "{role}", "<|end_header_id|>"), "\n\n", "", True),             # Llama 3
    "</s>": ((), "<|{role}|>\n", "\n", True),                                                # Zephyr, TinyLlama's chat
}
MOST_REPORTED = 50          # bad lines that are printed one by one


# ---------------------------------------------------------------------------------------------------------------------
# Messages -> ids and weights

def render(tokenizer, messages, open_assistant=False):
    """
    -> (ids, weights), lists of the same length. weights[i] is the weight of ids[i] itself as a target: above 0 on
    what the assistant says and on its <|end|>. (Who shifts the ids by one to predict the next token shifts the
    weights with them.) open_assistant: end with <|assistant|>, so that the model's turn is next.
    """
    missing = [name for name in CHAT_TOKENS if name not in tokenizer.specials]
    end = end_token(tokenizer)
    templates = [tokenizer.files.get(name, b"") for name in ("tokenizer_config.json", "chat_template.jinja")]
    if end == "</s>" and any(b"[INST]" in content for content in templates):
        refuse("this model's conversations are in the form [INST] ... [/INST] (Llama 2's and Mistral's chat models), "
               "which is not written here: in another form it would answer worse. Its base model can be taken, or --prompt.")
    roles = ["bos"] * (end is None or FORMS[end][3]) + ["pad"] * (end is None or not open_assistant)
    lacking = [*(missing if end is None else []), *(role for role in roles if getattr(tokenizer, f"{role}_id") is None)]
    if lacking:
        refuse(f"this tokenizer has no {', '.join(lacking)}: conversations can not be written with it. Use a model "
               "whose tokenizer comes from train_tokenizer.py, or is in the form of ChatML, Llama 3 or Zephyr.")
    before, begin, behind, bos = FORMS[end]

    def opening(role):
        """The ids before a message's text, and what the text begins with."""
        parts = [part.format(role=role) for part in before]
        ids = [[tokenizer.specials[part]] if part in tokenizer.specials else tokenizer.encode(part) for part in parts]
        return sum(ids, []), begin.format(role=role)

    ids, carried = [tokenizer.bos_id] if bos else [], ""
    weights = [0.0] * len(ids)
    for message in messages:
        head, lead = opening(message["role"])
        lead = carried + lead
        # The text is encoded together with what it begins with, as the model has seen it.
        content = tokenizer.encode(lead + message["content"])
        weight = message.get("weight", 1.0) if message["role"] == "assistant" else 0.0
        trained = 1.0 if isinstance(weight, list) else float(weight)
        if isinstance(weight, list) or lead:
            spans = weight if isinstance(weight, list) else [[0, len(message["content"]), weight]]
            spans = [[0, len(lead), 0.0], *([start + len(lead), stop + len(lead), w] for start, stop, w in spans)]
            of_content = _span_weights(tokenizer, content, lead + message["content"], spans)
        else:
            of_content = [trained] * len(content)
        # Where no token opens a message, what is behind an end and the next message's beginning are one text.
        after, carried = (tokenizer.encode(behind), "") if before else ([], behind)
        ids += [*head, *content, tokenizer.specials[end], *after]
        weights += [*[0.0] * len(head), *of_content, trained, *[0.0] * len(after)]
    head, lead = opening("assistant") if open_assistant else ([], "")
    ids += head + tokenizer.encode(carried + lead)
    return ids, weights + [0.0] * (len(ids) - len(weights))


def end_token(tokenizer):
    """The special token that ends a message, the first of FORMS that the tokenizer can write; None without one."""
    ours = all(name in tokenizer.specials for name in CHAT_TOKENS)
    return next((end for end in FORMS if end in tokenizer.specials and (end != "<|end|>" or ours)), None)


def _span_weights(tokenizer, ids, text, spans):
    """The weight of each token of a text: the highest weight among the characters that the token has bytes of."""
    clean = tokenizer.clean(text)
    by_character = [1.0] * len(clean)
    for span in spans:
        start, end = (len(tokenizer.clean(text[:place])) for place in span[:2])
        by_character[start:end] = [float(span[2])] * (end - start)
    by_byte = [weight for char, weight in zip(clean, by_character) for _ in char.encode()]
    by_byte[:0] = by_byte[:1] * len(tokenizer.prefix)
    weights, at = [], 0
    for id in ids:
        size = len(tokenizer.token_bytes[id])
        weights.append(max(by_byte[at:at + size]))
        at += size
    return weights


def stop_ids(tokenizer):
    """The ids that end the assistant's turn, or a text."""
    return {tokenizer.eos_id, *(tokenizer.specials.get(end) for end in FORMS)} - {None}


def coloured(tokenizer, ids, weights):
    """The tokens as text for a terminal: green where trained, grey where not, special tokens by name."""
    parts = []                      # neighbours of one colour are decoded together, so that no character is cut
    for trained, run in groupby(zip(ids, weights, strict=True), key=lambda pair: pair[1] > 0):
        text = printable(tokenizer.decode([id for id, _ in run], skip_special=False))
        parts.append(f"\x1b[{32 if trained else 90}m{text}\x1b[0m")
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# Files

def read_conversations(path):
    """-> list of dicts with "messages", as in the file. Refuses a file with bad lines, all of them at once."""
    return read_lines(path, lambda entry: wrong_messages(entry, "messages", last="assistant"), as_messages)


def as_messages(entry):
    """The line in our form, if it is in one of these; otherwise as it is, and the check will tell what is wrong.

        {"prompt": text or messages, "completion": text or messages}
        {"instruction": text, "input"?: text, "output": text, "system"?: text}     Alpaca's; the input after an empty line
        {"conversations": [{"from": "human" | "gpt" | "system", "value": text}, ...]}     ShareGPT's"""
    if "messages" in entry:
        return entry
    rest, messages = dict(entry), None
    said = lambda role, content: content if isinstance(content, list) else [{"role": role, "content": content}]
    if {"prompt", "completion"} <= entry.keys():
        messages = said("user", rest.pop("prompt")) + said("assistant", rest.pop("completion"))
    elif {"instruction", "output"} <= entry.keys():
        asked, system = [rest.pop("instruction"), *filter(None, [rest.pop("input", "")])], rest.pop("system", "")
        asked = "\n\n".join(asked) if all(isinstance(part, str) for part in asked) else None
        messages = said("system", system)[:bool(system)] + said("user", asked) + said("assistant", rest.pop("output"))
    elif isinstance(entry.get("conversations"), list):
        names = {"human": "user", "gpt": "assistant"}
        messages = [{"role": names.get(str(turn["from"]), turn["from"]), "content": turn["value"],
                     **({"weight": turn["weight"]} if "weight" in turn else {})}
                    if isinstance(turn, dict) and {"from", "value"} <= turn.keys() else turn for turn in rest.pop("conversations")]
    return entry if messages is None else {**rest, "messages": messages}


def read_prompts(path):
    """-> list of dicts with "messages" that end with the user's. Refuses like read_conversations."""
    return read_lines(path, lambda entry: wrong_messages(entry, "messages", last="user"))


def wrong_messages(entry, name, last):
    """What is wrong with the messages in entry[name], which `last` ('user' or 'assistant') should end. -> sentences"""
    messages = entry.get(name)
    if not isinstance(messages, list) or not messages:
        return [f"{name} must be a list of messages that is not empty, found {short(messages)}"]
    wrong, expected = [], None
    for i, message in enumerate(messages):
        place = f"{name}[{i}]"
        if not isinstance(message, dict):
            return [*wrong, f"{place} must be an object with role and content, found {short(message)}"]
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            return [*wrong, f"{place}: role must be one of {', '.join(ROLES)}, found {short(role)}"]
        if role != (expected or role) or (i == 0 and role == "assistant"):
            return [*wrong, f"{place}: it is {expected or 'user'}'s turn, found {role}"]
        expected = "assistant" if role == "user" else "user"
        if not _is_text(content):
            wrong.append(f"{place}: content must be a text that is not empty, found {short(content)}")
        elif "weight" in message and not (role == "assistant" and _is_weight(message["weight"], len(content))):
            wrong.append(f"{place}: weight is for messages of the assistant, a number from 0 to 1e9 or a list of "
                         f"[start, end, weight] within its {len(content)} characters; found "
                         + short(message["weight"]))
        if unknown := set(message) - {"role", "content", "weight"}:
            wrong.append(f"{place}: unknown key {short(min(unknown))}; a message has role, content and weight")
    if messages[-1]["role"] != last:
        wrong.append(f"{name} must end with a message of the {last}, found {messages[-1]['role']}")
    return wrong


def _is_text(value):
    return isinstance(value, str) and value != ""


def _is_weight(value, size=None):
    """A number from 0 to 1e9 or, where the size of the text is given, a list of spans in it."""
    if isinstance(value, list) and size is not None:
        return all(isinstance(span, list) and len(span) == 3 and type(span[0]) == type(span[1]) == int
                   and 0 <= span[0] < span[1] <= size and _is_weight(span[2]) for span in value)
    return type(value) in (int, float) and 0 <= value <= 1e9


def short(value):
    """A value for a message: cut, and harmless on a terminal."""
    text = printable(str(value) if isinstance(value, Exception) else repr(value))
    return "nothing" if value is None else text if len(text) <= 100 else text[:97] + "..."


def read_lines(path, check, form=lambda entry: entry):
    """
    form(entry) of each entry of a JSONL file. check(that) -> what is wrong with it. Lines end at "\\n" only: JSON allows other line
    separators inside a text, where str.splitlines() would cut.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        refuse(f"{path} cannot be read ({error.strerror}).")
    entries, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line.decode("utf-8"))
            entry = form(entry) if isinstance(entry, dict) else entry
            wrong = check(entry) if isinstance(entry, dict) else [f"expected an object, found {short(entry)}"]
            entries.append(entry)
        except (ValueError, RecursionError) as error:       # bad UTF-8 and bad JSON are ValueErrors
            wrong = [f"not a line of JSON ({short(error)})"]
        problems += [f"{path}, line {number}: {reason}" for reason in wrong]
    if not problems and not entries:
        problems.append(f"{path} is empty; expected one JSON object a line")
    if len(problems) > MOST_REPORTED:
        problems[MOST_REPORTED:] = [f"{path}: and {len(problems) - MOST_REPORTED} more"]
    refuse(*problems)
    return entries
