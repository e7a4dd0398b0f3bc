"""What an answerer without understanding gets right: the bars that a tuned model is measured against.

    constant   the answer that the training questions of this kind have most often
    copy       a fixed way to copy from the prompt, the best one of COPIES for this kind
    nearest    the answer of the training question that looks most alike (Jaccard similarity of letter trigrams)

All three are given what a model is given: the training questions and the held-out question. Exactness is the same
comparison as for the models, so a baseline's share can be subtracted from a model's.
"""

import re
from collections import Counter

import numpy as np

from chatdata.kinds import KINDS

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=[^,)]+")

COPIES = {
    "all of it": lambda subject: subject,
    "the first name": lambda subject: (_NAME.findall(subject) or [""])[0],
    "the last name": lambda subject: (_NAME.findall(subject) or [""])[-1],
    "every name but the first": lambda subject: ", ".join(_NAME.findall(subject)[1:]),
    "the first assignment": lambda subject: (_ASSIGNMENT.findall(subject) or [""])[0],
    "the last assignment": lambda subject: (_ASSIGNMENT.findall(subject) or [""])[-1],
    "what stands before an equals sign": lambda subject: ", ".join(re.findall(r"(\w+)=", subject)),
}
# `optional` asks for what stands before an equals sign: there this is no blind copy but a program that solves it.
SOLVES = {"optional": "what stands before an equals sign"}


def trigrams(text):
    text = f"  {text.lower()} "
    return {text[i:i + 3] for i in range(len(text) - 2)}


def nearest_answers(train, held_out):
    """For each held-out question, the answer to the training question with the most similar subject."""
    sizes = np.zeros(len(train))
    holders = {}
    for number, question in enumerate(train):
        grams = trigrams(question.subject)
        sizes[number] = len(grams)
        for gram in grams:
            holders.setdefault(gram, []).append(number)
    holders = {gram: np.array(numbers) for gram, numbers in holders.items()}
    answers = []
    for question in held_out:
        grams = trigrams(question.subject)
        shared = np.zeros(len(train))
        for gram in grams & holders.keys():
            shared[holders[gram]] += 1
        answers.append(train[int(np.argmax(shared / (sizes + len(grams) - shared)))].answer)
    return answers


def baselines(kind, train, held_out):
    """Shares of exact answers on held_out for the three baselines, and which constant and which copy these are."""
    if not train or not held_out:
        return {"questions": len(held_out)}
    frame = KINDS[kind].frame
    exact = lambda answers: sum(a == q.answer for a, q in zip(answers, held_out)) / len(held_out)
    constant = Counter(question.answer for question in train).most_common(1)[0][0]
    copies = {name: exact([frame.format(copy(question.subject)) for question in held_out])
              for name, copy in COPIES.items() if SOLVES.get(kind) != name}
    if kind == "default":
        # The name asked about can be copied without looking at the signature; then the likeliest default.
        usual = Counter(question.answer.split("=")[1] for question in train).most_common(1)[0][0]
        copies[f"the first name, and {usual}"] = exact(
            [frame.format(f"{COPIES['the first name'](question.subject)}={usual}") for question in held_out])
    best_copy = max(copies, key=copies.get)
    shares = {
        "constant": exact([constant] * len(held_out)),
        "copy": copies[best_copy],
        "nearest": exact(nearest_answers(train, held_out)),
    }
    return {"questions": len(held_out), **shares, "best": max(shares.values()),
            "constant_answer": constant, "copied": best_copy}
