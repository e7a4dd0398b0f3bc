"""
Conversations out of a table, and more of them out of few: templates with slots; paraphrase and
translation there and back.

    python techniques/augment.py --templates=T.jsonl --table=FACTS.csv --against=MY_VAL.jsonl --out=made.jsonl
    python techniques/augment.py --conversations=made.jsonl --models=DIR --against=MY_VAL.jsonl --out=more.jsonl
    python techniques/augment.py --conversations=made.jsonl --models=EN_FR,FR_EN --out=more.jsonl \\
        --prompts="('Translate into French: {text}', 'Translate into English: {text}')"

A template is a conversation (engine/chat.py) with names of the table's columns in braces: "What is the capital of
{country}?"; {{ and }} are braces. Each template is filled with each row. The table is a .csv with a line of names, or
.jsonl.

Other words: the user's messages go through the prompts one after the other, each to its model (the last one to all that
are left); answers stay as they are. What a model says is taken as it is, so read some of it: only what does not end, is
empty or says the same again is left out.

What is too near to something that is there already (Jaccard of the sets of 3 words, `near`) is left out, and what
stands in `against` is too: 13 words in a row are shared (Brown et al. 2020, 2005.14165, appendix C), or the whole of a
message or conversation of 4 to 12 words. All of it is counted.
"""
import csv
import json
import re
import string
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurator import configure, refuse
from engine import chat, parallel
from engine.answers import GRAM, answers, grams
from engine.files import write_atomic
from engine.hf import find_folder, read_model

templates = ""                  # file of conversations with slots
table = ""                      # what the slots are filled with
conversations = ""              # file of conversations to say in other words
models: tuple[str] = ()         # folders of the models that do so
prompts: tuple[str] = ("Say this in other words: {text}",)
copies = 1                      # other words for each of them
temperature = 0.8               # of the sampled words
max_new_tokens = 128            # longest message, in tokens
against: tuple[str] = ()        # files of conversations for evaluation, of which nothing may be made
near = 0.8                      # of two that share so much the later one is left out; above 1: none
out = ""                        # file to be written
batch_size = 32                 # messages at a time
device = "auto"                 # 'auto', 'cpu' or 'cuda'
dtype = "auto"                  # of matrix products: 'auto' (bf16 where the machine has it), 'bf16', 'fp32'
threads = 0                     # of a CPU; 0: its cores, divided by the processes
seed = 1                        # the same seed, the same words


def read_table(path):
    """-> list of dicts, a row each"""
    if str(path).endswith(".jsonl"):
        return chat.read_lines(path, lambda row: [])
    try:
        rows = list(csv.DictReader(open(path, newline="", encoding="utf-8-sig"), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        refuse(f"{path} cannot be read as a table: {error}")
    refuse(*[f"{path}, line {i}: it has not as many values as the first line has names" for i, row in enumerate(rows, 2)
             if None in row or None in row.values()][:chat.MOST_REPORTED],
           *([f"{path} has no rows"] if not rows else []))
    return rows


def fill(template, row):
    """The template, a text or what has texts in it, with row's values in its slots. KeyError for one without."""
    if isinstance(template, str):
        return string.Formatter().vformat(template, (), row)
    if isinstance(template, list):
        return [fill(part, row) for part in template]
    return {key: fill(part, row) for key, part in template.items()} if isinstance(template, dict) else template


def filled(path, rows):
    """Each template of a file with each row; refuses slots that the rows have no value for, all of them at once."""
    made, problems = [], []
    for number, entry in enumerate(chat.read_conversations(path), 1):
        for i, row in enumerate(rows, 1):
            try:
                made.append({**entry, "messages": fill(entry["messages"], row)})
            except (KeyError, ValueError, IndexError, AttributeError) as error:
                problems.append(f"{path}, template {number}: row {i} of the table does not fill it ({error!r})")
    refuse(*problems[:chat.MOST_REPORTED])
    return made


def reworded(entries, config, setup):
    """`copies` of each conversation in which the models have put the user's messages in other words. -> conversations,
    and how many were left out since a message did not end, was empty or came back the same"""
    asked = [(i, j) for i, entry in enumerate(entries) for j, m in enumerate(entry["messages"]) if m["role"] == "user"]
    made, useless = [], 0
    loaded = [read_model(find_folder(folder)) for folder in config.models]
    for copy in range(config.copies):
        texts = {place: entries[place[0]]["messages"][place[1]]["content"] for place in asked}
        for k, prompt in enumerate(config.prompts):
            model, tokenizer = loaded[min(k, len(loaded) - 1)]
            how = SimpleNamespace(batch_size=config.batch_size, seed=config.seed + copy * 1000003,
                                  max_new_tokens=config.max_new_tokens)
            questions = [{"messages": [{"role": "user", "content": prompt.format(text=text)}]}
                         for text in texts.values()]
            said = answers(model.to(setup.device).eval(), tokenizer, questions, how, config.temperature)
            texts = {place: text.strip() for place, (text, stopped, _) in zip(texts, said) if stopped and text.strip()}
        for i, entry in enumerate(entries):
            messages = [{**m, "content": texts.get((i, j), "")} if m["role"] == "user" else m
                        for j, m in enumerate(entry["messages"])]
            bad = any(not m["content"] for m in messages) or messages == entry["messages"]
            useless += bad
            made += [] if bad else [{**entry, "messages": messages}]
    return made, useless


# --- What must not be there twice -------------------------------------------------------------------------------------

def words_of(text):
    return re.findall(r"\w+", text.lower())


def near_duplicates(entries, near, n=3):
    """Numbers of the conversations that share `near` or more of their n-grams of words with an
    earlier one that stays."""
    having, sizes, found = defaultdict(list), {}, set()
    for i, entry in enumerate(entries):
        words = words_of(" ".join(message["content"] for message in entry["messages"]))
        own = {tuple(words[k:k + n]) for k in range(max(1, len(words) - n + 1))}
        shared = Counter(other for gram in own for other in having[gram])
        if any(count >= near * (len(own) + sizes[other] - count) for other, count in shared.items()):
            found.add(i)
            continue
        sizes[i] = len(own)
        for gram in own:
            having[gram].append(i)
    return found


def leaked(entries, evaluation):
    """Numbers of the conversations of which something stands in those for evaluation."""
    contents = lambda entry: [message["content"] for message in entry["messages"]]
    texts = lambda entry: [*contents(entry), " ".join(contents(entry))]
    known = defaultdict(set)                    # by their length
    for text in {text for entry in evaluation for text in texts(entry)}:
        words = words_of(text)
        if len(words) >= 4:
            known[min(GRAM, len(words))].update(grams(words, min(GRAM, len(words))))
    return {i for i, entry in enumerate(entries)
            if any(not known[n].isdisjoint(grams(words_of(texts(entry)[-1]), n)) for n in [*known])}


def main(config):
    reword = bool(config.conversations)
    refuse(*(sentence for sentence, wrong in {
        "out must name the file that is written": not config.out,
        "give either --templates and --table, or --conversations and --models":
            reword == bool(config.templates or config.table) or reword != bool(config.models)
            or not reword and not (config.templates and config.table),
        "each of the prompts must have {text} in it, where the message stands":
            any("{text}" not in prompt for prompt in config.prompts),
    }.items() if wrong), *config.below_one("copies", "batch_size", "max_new_tokens"),
           *config.outside(near=(0.01,), temperature=(0,)))
    useless, there = 0, []
    if reword:
        setup = parallel.start(config.device, config.dtype, None, config.threads, config.seed)
        there = chat.read_conversations(config.conversations)
        made, useless = reworded(there, config, setup)
    else:
        made = filled(config.templates, read_table(config.table))
    twice = {i - len(there) for i in near_duplicates([*there, *made], config.near)}
    taken = leaked(made, [entry for path in config.against for entry in chat.read_conversations(path)])
    kept = [entry for i, entry in enumerate(made) if i not in twice | taken]
    print(f"{len(made) + useless:,} made: {useless:,} did not end, were empty or the same; "
          f"{len(twice & {*range(len(made))}) :,} near duplicates; {len(taken - twice):,} stand in "
          f"{', '.join(config.against) or '(nothing to compare with)'}; {len(kept):,} kept")
    refuse(*([] if kept else ["nothing is left to be written"]))
    write_atomic(config.out, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept))


if __name__ == "__main__":
    main(configure(globals()))
