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
spans [[start, end, weight], ...] over the characters of the content; what lies in no span weighs 1. Lines in
other usual forms are read as well (`as_messages`). A prompt is {"messages": messages}, where the user has the
last word. Other keys beside these are kept as they are. Every line is checked before anything is used, and all
bad lines are reported together.
Preferences: engine/rankings.py.
"""

import json
import re
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from configurator import refuse
from engine.files import printable

ROLES = ("system", "user", "assistant")
CHAT_TOKENS = (*(f"<|{role}|>" for role in ROLES), "<|end|>")


def _alike(before, behind, strip=""):
    return {role: (before.replace("{role}", role), behind, strip) for role in ROLES}


# How a conversation is written down, by name: the special token that ends an answer; what stands before all; and
# for each role what stands before and behind a message's text, and whether blanks at its ends are cut off
# ("prompted": the user's first one behind a system's). {bos}, {end} and names of special tokens stand for these
# tokens; what lies between two of them is one text and encoded together, as transformers does. A model answers in
# the form that it was taught.
FORMS = {
    "own": ("<|end|>", "{bos}", _alike("<|{role}|>", "{end}")),
    "chatml": ("<|im_end|>", "", _alike("<|im_start|>{role}\n", "{end}\n")),
    "llama3": ("<|eot_id|>", "{bos}", _alike("<|start_header_id|>{role}<|end_header_id|>\n\n", "{end}", "strip")),
    "zephyr": ("</s>", "{bos}", _alike("<|{role}|>\n", "{end}\n")),                       # and TinyLlama's chat
    "llama2": ("</s>", "", {"system": ("{bos}[INST] <<SYS>>\n", "\n<</SYS>>\n\n", ""), "prompted": ("", " [/INST]", "rstrip"),
                            "user": ("{bos}[INST] ", " [/INST]", "strip"), "assistant": (" ", " {end}", "strip")}),
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
    end, start, roles = FORMS[form_of(tokenizer, for_training=not open_assistant)]
    ids, weights, runs = [], [], []             # runs: [(text, its weight)] since the last special token

    def close():
        if runs:
            found = tokenizer.encode("".join(text for text, _ in runs))
            ids.extend(found)
            weights.extend(_weights_of(tokenizer, found, runs))
            runs.clear()

    def put(text, weight):
        for part in _parts(tokenizer, end, text):
            if isinstance(part, int):
                close()
                ids.append(part)
                weights.append(weight)
            else:
                runs.append((part, weight))

    put(start, 0.0)
    for i, message in enumerate(messages):
        role = message["role"]
        if i and "prompted" in roles and role == "user" and messages[i - 1]["role"] == "system":
            role = "prompted"
        before, behind, strip = roles[role]
        weight = message.get("weight", 1.0) if role == "assistant" else 0.0
        said = _runs(message["content"], weight, strip)
        # The blank that Llama 2's answers begin with is no part of the prompt, so the assistant has to say it.
        put(before.rstrip(" ") if role == "assistant" else before, 0.0)
        runs += [(" ", said[0][1])] * (role == "assistant" and before.endswith(" ")) + said
        until, token, rest = behind.partition("{end}")
        put(until + token, 1.0 if isinstance(weight, list) else float(weight))
        put(rest, 0.0)
    if open_assistant:
        put(roles["assistant"][0].rstrip(" "), 0.0)
    close()
    return ids, weights


@lru_cache(256)
def _parts(tokenizer, end, text):
    """What a form's text is made of: special tokens' ids, and texts."""
    ids = {**tokenizer.specials, "{bos}": tokenizer.bos_id, "{end}": tokenizer.specials[end]}
    names = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    return [ids.get(part, part) for part in re.split(f"({names})", text) if part]


def _runs(content, weight, strip):
    """[(text, weight)] of a message, whose weight is a number or a list of spans."""
    kept = getattr(content, strip)() if strip else content
    if not isinstance(weight, list):
        return [(kept, float(weight))]
    by_character = [1.0] * len(content)
    for start, stop, value in weight:
        by_character[start:stop] = [float(value)] * (stop - start)
    first = content.index(kept)
    pairs = zip(kept, by_character[first:first + len(kept)])
    return [("".join(char for char, _ in run), value) for value, run in groupby(pairs, key=itemgetter(1))] or [("", 1.0)]


def _weights_of(tokenizer, ids, runs):
    """The weight of each token of runs, joined: the highest weight among the characters that the token has bytes of."""
    if len({weight for _, weight in runs}) == 1:
        return [runs[0][1]] * len(ids)
    text, by_character = "", []
    for part, weight in runs:
        text += part
        by_character += [weight] * (len(tokenizer.clean(text)) - len(by_character))
    by_byte = [weight for char, weight in zip(tokenizer.clean(text), by_character) for _ in char.encode()]
    by_byte[:0] = by_byte[:1] * len(tokenizer.prefix)
    weights, at = [], 0
    for id in ids:
        size = len(tokenizer.token_bytes[id])
        weights.append(max(by_byte[at:at + size]))
        at += size
    return weights


def forms_for(tokenizer):
    """The names of the forms whose special tokens this tokenizer has."""
    return [name for name, (end, _, _) in FORMS.items() if end in tokenizer.specials
            and (name != "own" or all(token in tokenizer.specials for token in CHAT_TOKENS))]


def form_of(tokenizer, for_training=False):
    """The name of the form in which the model with this tokenizer writes conversations: that of its template, if it is
    one that `jinja` wrote, else the first whose end the tokenizer has. Refuses where it has none."""
    template, config = (tokenizer.files.get(file, b"") for file in ("chat_template.jinja", "tokenizer_config.json"))
    able = forms_for(tokenizer)
    name = next((name for name in able if template and template == jinja(tokenizer, name)), None)
    if not name and able[:1] == ["zephyr"] and b"[INST]" in (template or config):
        if b"<<SYS>>" not in (template or config):
            refuse("this model's conversations are in the form [INST] ... [/INST] of Mistral's chat models, which is "
                   "not written here: in another form it would answer worse. Its base model can be taken, or --prompt.")
        name = "llama2"
    name = name or next(iter(able), None)
    lacking = [token for token in CHAT_TOKENS if token not in tokenizer.specials] if name is None else []
    roles = ["bos"] * (name is None or "{bos}" in repr(FORMS[name])) + ["pad"] * (name is None or for_training)
    lacking += [role for role in roles if getattr(tokenizer, f"{role}_id") is None]
    if lacking:
        refuse(f"this tokenizer has no {', '.join(lacking)}: conversations can not be written with it. Use a model "
               "whose tokenizer comes from train_tokenizer.py, or is in the form of ChatML, Llama 2 or 3, or Zephyr.")
    return name


def adopt(tokenizer, name):
    """Has the tokenizer write conversations in this form, also when it has been saved and is read again."""
    able = forms_for(tokenizer)
    if name not in able:
        refuse(f"template must be one of those whose special tokens the tokenizer has ({', '.join(able) or 'none'}), "
               f"found '{name}'")
    tokenizer.files["chat_template.jinja"] = jinja(tokenizer, name)


@lru_cache
def jinja(tokenizer, name):
    """A form in the language of Hugging Face's templates, as bytes."""
    end, start, roles = FORMS[name]
    text = lambda part: repr(part.replace("{bos}", tokenizer.roles.get("bos") or "").replace("{end}", end))
    tests = {role: f"message['role'] == '{role}'" for role in ROLES}
    tests["prompted"] = "loop.index0 == 1 and messages[0]['role'] == 'system'"
    cases = [f"if {tests[role]} -%}}{{{{- {text(before)} + message['content']" + f".{strip}()" * bool(strip)
             + f" + {text(behind)} -}}}}" for role, (before, behind, strip) in
             sorted(roles.items(), key=lambda item: item[0] != "prompted")]
    opening = text(roles["assistant"][0].rstrip(" "))
    return (f"{{{{- {text(start)} -}}}}{{%- for message in messages -%}}{{%- {'{%- el'.join(cases)}{{%- endif -%}}"
            "{%- endfor -%}{%- if add_generation_prompt -%}"
            f"{{{{- {opening} -}}}}{{%- endif -%}}").encode()


def end_token(tokenizer):
    """The special token that ends what the assistant says."""
    return FORMS[form_of(tokenizer)][0]


def stop_ids(tokenizer):
    """The ids that end the assistant's turn, or a text."""
    return {tokenizer.eos_id, *(tokenizer.specials.get(end) for end, _, _ in FORMS.values())} - {None}


LEGEND = "\x1b[90mno weight\x1b[0m  \x1b[36mbelow 1\x1b[0m  \x1b[32mtrained\x1b[0m  \x1b[93mabove 1\x1b[0m"


def coloured(tokenizer, ids, weights):
    """The tokens as text for a terminal, in colours for their weights (LEGEND), special tokens by name."""
    parts = []                      # neighbours of one colour are decoded together, so that no character is cut
    colour = lambda pair: 90 if pair[1] == 0 else 36 if pair[1] < 1 else 32 if pair[1] == 1 else 93
    for number, run in groupby(zip(ids, weights, strict=True), key=colour):
        text = printable(tokenizer.decode([id for id, _ in run], skip_special=False))
        parts.append(f"\x1b[{number}m{text}\x1b[0m")
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


def rendered_prompts(path, tokenizer, longest):
    """The prompts of a file, each with its "ids", and how many were left out as longer than `longest`: generation would
    cut them, and the answer would be to another question."""
    prompts = [{**entry, "ids": render(tokenizer, entry["messages"], open_assistant=True)[0]}
               for entry in read_prompts(path)]
    short = [prompt for prompt in prompts if len(prompt["ids"]) <= longest]
    return short, len(prompts) - len(short)


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
    form(entry) of each entry of a JSONL file. check(that) -> what is wrong with it. Lines end at "\\n" only: JSON
    allows other line separators inside a text, where str.splitlines() would cut.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        refuse(f"{path} cannot be read ({error.strerror}).")
    if next(filter(None, map(bytes.strip, lines)), b"")[:1] == b"[":
        refuse(f"{path} is a JSON array; expected one object a line, without brackets around them or commas behind "
               "them")
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
