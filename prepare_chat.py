"""
Makes the demonstration's instruction data from the documents: conversations, preferences and prompts.

    python prepare_chat.py config/demo.py            after prepare_data.py; writes data_dir/chat/, once
    python prepare_chat.py config/demo.py --show=20  prints twenty held-out questions with their answers as well

Nobody wrote these conversations. The documents are API documentation; names, signatures and first sentences are read
out of them (chatdata/pages.py) and put into question templates (chatdata/kinds.py). So the right answer to each
question is known, and so is what an answerer without understanding would score: baselines.json has that, for each
kind of question.

The held-out questions come from the held-out pages. A name also defined on a training page is no held-out name, and a
held-out name occurs in no training question of any kind. What stands in each file:

    conversations_train.jsonl    one to `turns` questions each, of mixed kinds
    conversations_val.jsonl      one held-out question each
    preferences_train.jsonl      some remarks on a name, best first
    preferences_val.jsonl        two, the better one chosen, on held-out names and with combinations of adjectives never
                                 trained on
    preferences_control.jsonl    two remarks of equal score and very different length
    prompts_train.jsonl          questions to remark on, for PPO; prompts_val.jsonl has held-out names
    baselines.json, index.json   what is to be beaten; what these files were made from and how many lines they have

To tune on your own instructions you need none of this: write your own JSONL files in the same form and call sft.py.
"""
import hashlib
import json
from collections import Counter
from operator import attrgetter
from pathlib import Path

from chatdata import kinds, pages, remark
from chatdata.baselines import baselines
from configurator import configure, refuse
from engine.files import lock_folder, printable, read_json, write_atomic, write_json
from engine.shards import read_documents

data_dir = "data/demo"         # documents are read from data_dir/docs, the chat data is written to data_dir/chat
seed = 1                       # of every draw below
questions = 40000              # training questions of all kinds together
val_questions = 150            # held-out questions of each kind, fewer when the held-out pages give fewer
turns = 3                      # a training conversation has one to this many questions
preferences = 1500             # training rankings
answers = 8                    # of each of them
val_preferences = 600          # held-out pairs
control_preferences = 600      # pairs of equal score and different length
min_margin = 0.5               # by how much the scores of a held-out pair differ at least
spoiled_share = 0.25           # of a ranking's answers, and of the held-out pairs' worse ones: outside the grammar
control_ratio = 1.8            # how many times as long (in characters) the longer remark of a control pair is at least
prompts = 2000                 # PPO prompts
val_prompts = 300              # held-out PPO prompts
show = 0                       # held-out questions to print


# --- 1. Documents -> definitions --------------------------------------------------------------------------------------

def read_pages(config, split):
    """(definitions, words, hash of the texts) of one split; refuses when there is nothing to ask about."""
    found, words, digest = [], set(), hashlib.sha256()
    for document in read_documents(config.data_dir, split):
        found += pages.definitions(document)
        words.update(pages.WORD.findall(document["text"]))
        digest.update(document["text"].encode("utf-8", "surrogatepass"))
    if not found:
        refuse(f"The {split} documents in {config.data_dir}/docs define no functions or classes, so there is nothing "
               "to ask about. This script makes questions about API documentation; for other documents, write your own "
               "conversations (the form is described in sft.py).")
    return found, words, digest.hexdigest()


# --- 2. Which names are held out --------------------------------------------------------------------------------------

def split_names(train_definitions, val_definitions):
    """(training names, held-out names): what a training page defines, in whatever case, is not held out."""
    train, val = (sorted({d.name for d in definitions if not d.name.startswith("__")},
                         key=lambda name: (name.lower(), name)) for definitions in (train_definitions, val_definitions))
    known = {name.lower() for name in train}
    return train, [name for name in val if name.lower() not in known]


def held_out_made_names(words, names, config):
    """Names put together from words of the held-out pages, which no training page defines: for the kinds in which the
    answers are balanced, since the pages' own names are mostly alike."""
    rng, known = kinds.generator(config.seed, "val", "names"), {name.lower() for name in names}
    made = {kinds.made_name("words", words, rng) for _ in range(8 * config.val_questions)} if words else set()
    return sorted(name for name in made if name.lower() not in known)


def held_out_signatures(train_definitions, val_definitions, names, config):
    """Definitions for the reading kinds, no parameter list of which stands on a training page, each list once.

    First what the held-out pages define, then, since that is little, some put together from the parameters there."""
    rng = kinds.generator(config.seed, "val", "signatures")
    suitable = [d for d in val_definitions if kinds.suits("count", d)]
    parameters = parameters_of(suitable)
    count = config.val_questions if names else 0
    made = [kinds.made_definition("default", names, parameters, rng) for _ in range(count)]
    known = {d.parameters for d in train_definitions}
    new = {}
    for definition in suitable + made:
        if definition.parameters not in known:
            new.setdefault(definition.parameters, definition)
    return list(new.values())


# --- 3. Questions -----------------------------------------------------------------------------------------------------

def training_questions(kind, count, definitions, names, words, held, config):
    """`count` questions of one kind about the training pages; memory kinds repeat themselves in other phrasings.

    What is put together here may by chance be something held out, a name in lower case or a parameter list in `held`:
    then it is put together anew."""
    rng, sort = kinds.generator(config.seed, "train", kind), kinds.KINDS[kind].sort
    about_names = sort not in ("memory", "reading")
    suitable = [subject for subject in (names if about_names else definitions) if kinds.suits(kind, subject)]
    if sort == "memory":
        suitable = unambiguous(kind, suitable)
        rng.shuffle(suitable)
        return [kinds.about(kind, suitable[i % len(suitable)], rng) for i in range(count if suitable else 0)]
    if about_names:
        make, identity = lambda: kinds.made_name(kind, words, rng), str.lower
    elif suitable:
        parameters = parameters_of(suitable)
        make, identity = lambda: kinds.made_definition(kind, names, parameters, rng), attrgetter("parameters")
    else:
        return []
    # Half of the subjects are the pages' own, half are put together from the words and parameters that occur there.
    # Fewer of the former for kinds whose held-out answers are balanced, since most of those names are written alike.
    every, found = 6 if kind in kinds.BALANCED else 2, []
    for i in range(count):
        subject = rng.choice(suitable) if suitable and i % every == 1 else make()
        while identity(subject) in held:
            subject = make()
        found.append(kinds.about(kind, subject, rng))
    return found


def parameters_of(definitions):
    return sorted({parameter for d in definitions for parameter in d.parameters}, key=str)


def held_out_questions(kind, val_definitions, held_out, made, signatures, config):
    """At most config.val_questions questions about the held-out pages."""
    rng, names = kinds.generator(config.seed, "val", kind), set(held_out)
    candidates = {"memory": [d for d in val_definitions if d.name in names], "reading": signatures}
    subjects = [s for s in candidates.get(kinds.KINDS[kind].sort, held_out) if kinds.suits(kind, s)]
    if kinds.KINDS[kind].sort == "memory":
        subjects = unambiguous(kind, subjects)
    if kind in kinds.BALANCED:
        answer, different = kinds.BALANCED[kind]
        subjects = balanced(subjects + made, answer, config.val_questions // different, rng)
    return [kinds.about(kind, subject, rng)
            for subject in rng.sample(subjects, min(len(subjects), config.val_questions))]


def balanced(subjects, answer, most, rng):
    """At most `most` subjects with the same answer: many names are alike, so a constant would be right too often."""
    count, kept = Counter(), []
    for subject in rng.sample(subjects, len(subjects)):
        count[answer(subject)] += 1
        if count[answer(subject)] <= most:
            kept.append(subject)
    return kept


def unambiguous(kind, definitions):
    """Definitions whose name alone determines the answer: for `module` a name that stands on one page only."""
    unique = {(d.module, d.name): d for d in definitions}
    pages_of = Counter(name for _, name in unique)
    return [d for d in unique.values() if kind != "module" or pages_of[d.name] == 1]


# --- 4. Conversations -------------------------------------------------------------------------------------------------

def turn(question):
    weight = kinds.KINDS[question.kind].weight
    return [{"role": "user", "content": question.question},
            {"role": "assistant", "content": question.answer, **({} if weight == 1 else {"weight": weight})}]


def training_conversations(questions, config):
    """All questions once, shuffled, in conversations of one to config.turns questions."""
    rng = kinds.generator(config.seed, "conversations")
    rng.shuffle(questions)
    conversations = []
    while questions:
        taken = [questions.pop() for _ in range(min(len(questions), rng.randint(1, config.turns)))]
        conversations.append({"messages": sum(map(turn, taken), []), "kinds": [question.kind for question in taken]})
    return conversations


# --- 5. Preferences and prompts ---------------------------------------------------------------------------------------

def remark_question(name, rng):
    return [{"role": "user", "content": rng.choice(remark.QUESTIONS).format(name)}]


def preference(pair, names, rng):
    name, (better, worse) = rng.choice(names), pair
    return {"prompt": remark_question(name, rng), "chosen": better, "rejected": worse, "kind": "remark",
            "subject": name, "scores": {"chosen": remark.score(better), "rejected": remark.score(worse)}}


def rankings_by_rule(count, names, config):
    """Training rankings. Of their answers a share is no proper remark at all."""
    rng = kinds.generator(config.seed, "preferences", "train")
    rankings = []
    for _ in range(count):
        spoiled = int(config.spoiled_share * config.answers + rng.random())          # on average that share
        name, ranked = rng.choice(names), remark.sample_ranking(rng, config.answers, min(spoiled, config.answers - 1))
        rankings.append({"prompt": remark_question(name, rng), "ranked": ranked, "kind": "remark", "subject": name})
    return rankings


def preferences_by_rule(count, names, config):
    """Held-out pairs in which the better remark is chosen; in every second one it is the longer, so that length says
    nothing. In a share of them the worse one is no proper remark at all."""
    rng = kinds.generator(config.seed, "preferences", "val")
    pairs = [preference(remark.sample_pair(rng, config.min_margin, chosen_is_longer=i % 2 == 0, held_out=True,
                                           spoiled=rng.random() < config.spoiled_share), names, rng)
             for i in range(count)]
    rng.shuffle(pairs)
    return pairs


def control_preferences_by_rule(count, names, config):
    """Pairs of equal score, one much longer than the other; which of them is called chosen is decided by a coin."""
    rng = kinds.generator(config.seed, "preferences", "control")
    return [preference(pair if rng.random() < 0.5 else pair[::-1], names, rng)
            for pair in remark.sample_control_pairs(rng, count, config.control_ratio, held_out=True)]


def remark_prompts(split, count, names, config):
    rng = kinds.generator(config.seed, "prompts", split)
    drawn = [rng.choice(names) for _ in range(count)]
    return [{"messages": remark_question(name, rng), "kind": "remark", "subject": name} for name in drawn]


# --- 6. Out -----------------------------------------------------------------------------------------------------------

def print_table(train, val, bars):
    row = lambda kind, *cells: print(f"{kind:<10}" + "".join(f"{cell:>10}" for cell in cells))
    bases = ("constant", "copy", "nearest")
    row("kind", "sort", "copying", "train", "held out", *bases)
    for kind, about in kinds.KINDS.items():
        row(kind, about.sort, "yes" if about.about_copying else "no", len(train[kind]), len(val[kind]),
            *(f"{bars[kind][name]:.1%}" if name in bars.get(kind, ()) else "-" for name in bases))


def main(config):
    refuse(*config.below_one("questions", "val_questions", "turns", "preferences", "val_preferences",
                             "control_preferences", "prompts", "val_prompts"),
           # What lies beyond these is hardly ever drawn, and waited for.
           *config.outside(answers=(2, 16), spoiled_share=(0, 0.5), min_margin=(0, 2), control_ratio=(1, 3)))
    chat = Path(config.data_dir) / "chat"
    lock = lock_folder(chat)

    # 1. What the pages define. Nothing to do when questions about these very pages stand there already.
    train_definitions, words, train_hash = read_pages(config, "train")
    val_definitions, val_words, val_hash = read_pages(config, "val")
    index, source = chat / "index.json", {"train": train_hash, "val": val_hash}
    if index.exists() and not config.show:
        before = read_json(index, like={"lines": dict})
        files = ["baselines.json", *(f"{name}.jsonl" for name in before["lines"])]
        if ((before.get("config_hash"), before.get("documents")) == (config.hash, source)
                and all((chat / file).exists() for file in files)):
            return print(f"{chat}: already done; to make it anew, remove {index}")

    # 2. What is held out. A word of the training text that is a held-out name is no material for spelling either.
    names, held_out = split_names(train_definitions, val_definitions)
    signatures = held_out_signatures(train_definitions, val_definitions, held_out, config)
    made = held_out_made_names(sorted(val_words), names, config)
    held = {name.lower() for name in held_out}
    words = sorted(word for word in words if word.lower() not in held)
    held |= {name.lower() for name in made} | {d.parameters for d in signatures}

    # 3. Questions of each kind.
    counts = {kind: round(about.share * config.questions) for kind, about in kinds.KINDS.items()}
    train = {kind: training_questions(kind, count, train_definitions, names, words, held, config)
             for kind, count in counts.items()}
    val = {kind: held_out_questions(kind, val_definitions, held_out, made, signatures, config) for kind in kinds.KINDS}

    # 4. and 5. All that is learned from.
    rows = {
        "conversations_train": training_conversations(sum(train.values(), []), config),
        "conversations_val": [{"messages": turn(question), "kind": question.kind, "subject": question.subject}
                              for question in sum(val.values(), [])],
        "preferences_train": rankings_by_rule(config.preferences, names, config),
        "preferences_val": preferences_by_rule(config.val_preferences, held_out or names, config),
        "preferences_control": control_preferences_by_rule(config.control_preferences, held_out or names, config),
        "prompts_train": remark_prompts("train", config.prompts, names, config),
        "prompts_val": remark_prompts("val", config.val_prompts, held_out or names, config),
    }

    # 6. What is to be beaten, and the files. index.json is written last: where it stands, the rest is whole.
    bars = {kind: baselines(kind, train[kind], val[kind]) for kind in kinds.KINDS if kinds.KINDS[kind].sort != "remark"}
    index.unlink(missing_ok=True)
    for name, content in rows.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        write_atomic(chat / f"{name}.jsonl", "".join(lines))
    write_json(chat / "baselines.json", {"kinds": bars})
    write_json(index, {
        "config_hash": config.hash, "seed": config.seed, "documents": source,
        "lines": {name: len(content) for name, content in rows.items()},
        "definitions": {"train": len(train_definitions), "val": len(val_definitions)},
        "names": {"train": len(names), "held_out": len(held_out)},
        "kinds": {kind: {"sort": about.sort, "about_copying": about.about_copying, "train": len(train[kind]),
                         "held_out": len(val[kind])} for kind, about in kinds.KINDS.items()},
    })
    print_table(train, val, bars)
    for question in kinds.generator(config.seed, "show").choices(sum(val.values(), []), k=config.show):
        print(printable(f"  {question.kind:<10} {question.question}\n             {question.answer}"))
    print(f"chat data: {', '.join(f'{name} {len(content)}' for name, content in rows.items())} -> {chat}")
    lock.close()


if __name__ == "__main__":
    main(configure(globals()))
