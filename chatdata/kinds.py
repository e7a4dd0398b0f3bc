"""The kinds of questions that the demonstration's instruction data asks about the documentation.

Three sorts, and the difference is the point:

    memory    module, what               the answer stood on some page; on a page never seen it can only be guessed
    reading   count, optional, default   a signature stands in the prompt and has to be read
    rule      style, words, spell, snake a rule turns the question into the answer, for names never seen as well

`remark` is the alignment task (remark.py): many answers are right, so it has a format and a score but no exact answer.

`about_copying` says whether the answer's pieces may be found in the prompt: only for such kinds may a score depend on
text that stands in the prompt. Every answer is `frame` with its core filled in, and the format of a kind is that same
frame with `core` as a regular expression: what follows the format can still be wrong, what is right follows the
format.
"""

import random
import re
from dataclasses import dataclass

from chatdata import remark
from chatdata.pages import Definition


@dataclass(frozen=True)
class Question:
    kind: str
    subject: str         # what the question is about: a name, some words or a signature
    question: str
    answer: str


@dataclass(frozen=True)
class Kind:
    sort: str            # memory, reading, rule or remark
    about_copying: bool
    share: float         # of the training questions
    phrasings: tuple[str, ...]
    frame: str           # the answer around its core
    core: str            # regular expression
    # Of the answer's tokens in the loss: long answers of chance would drown the short ones; and where the content can
    # not be foreseen, and the questions are few, the form needs more than its share.
    weight: float = 1.0

    def follows_format(self, answer):
        before, after = map(re.escape, self.frame.split("{}"))
        return re.fullmatch(before + f"(?:{self.core})" + after, answer) is not None


KINDS = {
    "module": Kind("memory", False, 0.03,
                   ("Which module holds `{}`?", "Where is `{}` defined?", "In which module do I find `{}`?"),
                   "It is in the module `{}`.", r"[A-Za-z_][\w.]*", weight=2),
    "what": Kind("memory", False, 0.03,
                 ("What does `{}` do?", "What is `{}` for?", "Explain `{}` in one sentence."),
                 "{}", r"[A-Z][^.!?]+\.", weight=0.25),
    "count": Kind("reading", False, 0.20,
                  ("How many parameters has `{}`?", "Count the parameters of `{}`.",
                   "Here is `{}`. How many parameters are there?"),
                  "Parameters: {}.", r"\d+"),
    "optional": Kind("reading", True, 0.03,
                     ("Which parameters of `{}` have a default?", "What may I leave out when I call `{}`?",
                      "Name the parameters of `{}` that have a default."),
                     "With a default: {}.", r"[A-Za-z_]\w*(, [A-Za-z_]\w*)*", weight=2),
    "default": Kind("reading", True, 0.03,
                    ("In `{}`, what is the default of {}?", "Here is `{}`. Which default has {}?",
                     "Look at `{}` and tell me the default of {}."),
                    "It is {}", r"[A-Za-z_]\w*=(-?\w[\w.]*|'\w*')", weight=2),
    "style": Kind("rule", False, 0.25,
                  ("How is the name `{}` written?", "Describe the style of `{}`.", "What kind of name is `{}`?"),
                  "It is {}.", r"(public|private), (lower case|capitals|CamelCase|mixedCase|of no style)"),
    "words": Kind("rule", False, 0.15,
                  ("Of how many words is `{}` made?", "How many words are in `{}`?", "Count the words of `{}`."),
                  "Words: {}.", r"\d+"),
    "spell": Kind("rule", False, 0.03,
                  ("Spell `{}`.", "How is `{}` spelled?", "Give me the letters of `{}`.", "Spell out the name `{}`."),
                  "{}", r"\S( \S)*"),
    "snake": Kind("rule", True, 0.03,
                  ("Make one name of the words `{}`.", "What would a function for `{}` be called?",
                   "Join `{}` into a name."),
                  "`{}`", r"[a-z][a-z0-9]*(_[a-z0-9]+)*"),
    "remark": Kind("remark", False, 0.22, remark.QUESTIONS, "{}", remark.GRAMMAR.pattern, weight=0.25),
}


# --- the answers ------------------------------------------------------------------------------------------------------

def style(name):
    """Who may use a name and how it is written: `_wrapText` is private, mixedCase."""
    bare = name.strip("_")
    case = ("lower case" if bare.islower() else "capitals" if bare.isupper() else "of no style" if "_" in bare
            else "CamelCase" if bare[0].isupper() else "mixedCase")
    return f"{'private' if name.startswith('_') else 'public'}, {case}"


def count_words(name):
    """Of how many words a name is made; `HTTPServer` is HTTP and Server."""
    return len(re.findall(r"[A-Z]?[a-z][a-z0-9]*|[A-Z0-9]+(?![a-z])", name))


# The answer to a kind about names, and: most names are alike, so held-out ones are drawn so that no answer is more
# frequent than one in this many.
BALANCED = {"style": (style, 8), "words": (count_words, 4)}

# A number, a name or a short text: no brackets, no commas. Not None, which half of all defaults are: who knew only the
# name asked about would be right that often.
SIMPLE_DEFAULT = re.compile(r"(?!None$)(-?\w[\w.]*|'\w*')")


def ask(kind, subject, core, rng, *more):
    """A question of this kind in one of its phrasings; `more`: what else is asked about."""
    asked = rng.choice(KINDS[kind].phrasings).format(subject, *more)
    return Question(kind, " of ".join([*more, subject]), asked, KINDS[kind].frame.format(core))


def about(kind, subject, rng):
    """The question of this kind about a Definition (memory and reading kinds) or about a name (the others)."""
    if kind == "module":
        return ask(kind, subject.name, subject.module, rng)
    if kind == "what":
        return ask(kind, f"{subject.module}.{subject.name}", subject.sentence, rng)
    if kind == "count":
        return ask(kind, subject.signature, len(subject.parameters), rng)
    if kind == "optional":
        return ask(kind, subject.signature, ", ".join(parameter.name for parameter in subject.optional), rng)
    if kind == "default":
        parameter = rng.choice([p for p in subject.optional if SIMPLE_DEFAULT.fullmatch(p.default)])
        return ask(kind, subject.signature, parameter, rng, parameter.name)
    if kind == "spell":
        return ask(kind, subject, " ".join(subject), rng)
    if kind == "snake":
        return ask(kind, subject.replace("_", " "), subject, rng)
    if kind == "remark":
        return ask(kind, subject, remark.sample(rng), rng)
    return ask(kind, subject, BALANCED[kind][0](subject), rng)


# --- which definitions and names can carry a question of a kind -------------------------------------------------------

MAX_SIGNATURE = 90       # characters: a signature longer than that makes a poor question


def suits(kind, subject):
    """Whether a definition (memory and reading kinds) or a name (the others) can carry a question of this kind."""
    # Nobody asks about `__init__`, but its parameters can be read as well as any.
    if KINDS[kind].sort == "memory":
        return not subject.name.startswith("__") and (kind != "what" or subject.sentence != "")
    if KINDS[kind].sort == "reading":
        if subject.parameters is None or len(subject.signature) > MAX_SIGNATURE or "`" in subject.signature:
            return False
        if kind == "optional":      # without these two conditions "None." would be right three times out of four
            return len(subject.parameters) > 1 and len(subject.optional) > 0
        # One default alone could be found without knowing whose it is.
        return kind == "count" or (len(subject.optional) > 2
                                   and any(SIMPLE_DEFAULT.fullmatch(p.default) for p in subject.optional))
    pattern = {"spell": r".{3,20}", "snake": r"[a-z]+(_[a-z]+){1,3}", "remark": ".+"}
    return re.fullmatch(pattern.get(kind, r"_?[A-Za-z][A-Za-z0-9_]{2,23}"), subject) is not None


def made_name(kind, words, rng):
    """A name put together from one to four words of the documentation: `wrap_socket`, `sizeHint`, `_TIMEOUT`.

    The names that the pages define are too few to teach spelling: each piece of the vocabulary has to be seen spelled.
    """
    while True:
        parts = [rng.choice(words) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
        capitalised = [part[0].upper() + part[1:].lower() for part in parts]
        snake = "_".join(parts).lower()
        name = snake if kind == "snake" else rng.choice((
            snake, snake if kind == "spell" else snake.upper(), "".join(capitalised),
            parts[0].lower() + "".join(capitalised[1:])))
        if kind not in ("spell", "snake") and rng.random() < 0.3:
            name = "_" + name
        if suits(kind, name):
            return name


def made_definition(kind, names, parameters, rng):
    """A definition whose signature is put together from parameters that occur, in the order that Python wants them."""
    while True:
        drawn = rng.sample(parameters, min(len(parameters), rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7))))
        # A name once, at most one *args and one **kwargs; without a default, with one, *args, **kwargs.
        once = {p.name.count("*") or p.name: p for p in drawn}
        ordered = sorted(once.values(), key=lambda p: (p.name.count("*"), p.default is not None))
        definition = Definition(rng.choice(names), "", tuple(ordered), "")
        if suits(kind, definition):
            return definition


def generator(seed, *purpose):
    """A generator of its own for each purpose, so that one more question of one kind changes no other kind."""
    return random.Random("/".join(map(str, (seed, *purpose))))
