"""The alignment task: remarks on a documented name, and the programmatic score that preferences and PPO are judged by.

A user asks for an opinion ("What do you make of `textwrap.fill`?") and the answer comes from a small grammar:

    remark     = opening  terms "."  closing
    terms      = term | term " and " term | term ", " ... " and " term          one to four
    term       = [adverb " "] adjective

    It is very clear, dull and slightly useful.
    To my mind it is extremely handy. That is my view.

The score is the mean over the adjectives of sign x strength, so it lies in [-2, 2], and saying a thing twice does not
make it truer. It is no function of the length (an opening, a closing or one more adjective changes the length and not
the tone), of a single token (an adverb can weigh for or against, and four adjectives share the verdict) or of the
prompt (the name asked about is never looked at). Text that the grammar does not accept gets ILL_FORMED, as low as the
worst remark: a policy cannot gain by leaving the language.

Standard library only: prepare_chat.py samples from here, rlhf.py and evaluate.py score with it.
"""

import re
import zlib

ILL_FORMED = -2.0
MAX_TERMS = 4

QUESTIONS = (
    "What do you make of `{}`?",
    "What is your opinion of `{}`?",
    "Tell me what you think of `{}`.",
    "How do you like `{}`?",
    "Give me your view on `{}`.",
)

# Openings and closings carry no tone: they are there so that the length of an answer says nothing about its score.
OPENINGS = (
    "It is",
    "I find it",
    "To my mind it is",
    "I would say it is",
    "Having read its page, I find it",
    "As far as I can tell from the text, it is",
)
CLOSINGS = (
    "",
    " That is my view.",
    " Others may see it in another way.",
    " I have read its page from the first line to the last.",
)

STRENGTH = {"slightly": 0.25, "fairly": 0.5, "": 1.0, "very": 1.5, "extremely": 2.0}

FAVOURABLE = ("clear", "useful", "handy", "elegant", "fast", "simple", "reliable", "neat", "sound", "pleasant")
UNFAVOURABLE = ("obscure", "useless", "clumsy", "ugly", "slow", "confusing", "fragile", "messy", "faulty", "dull")
SIGN = {**{word: +1 for word in FAVOURABLE}, **{word: -1 for word in UNFAVOURABLE}}
ADJECTIVES = sorted(SIGN)

_TERM = re.compile("(?:(%s) )?(%s)" % ("|".join(filter(None, STRENGTH)), "|".join(SIGN)))
GRAMMAR = re.compile("(?:{openings}) ({term}(?:(?:, {term}){{0,{more}}} and {term})?)\\.(?:{closings})".format(
    openings="|".join(map(re.escape, OPENINGS)), closings="|".join(map(re.escape, CLOSINGS)), term=_TERM.pattern,
    more=MAX_TERMS - 2))


def write(opening, terms, closing):
    """The text of a remark; terms is a list of (adverb or "", adjective)."""
    words = [f"{adverb} {adjective}".strip() for adverb, adjective in terms]
    listed = words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
    return f"{opening} {listed}.{closing}"


def parse(answer):
    """The terms [(adverb or "", adjective), ...] of a remark, or None when the grammar does not accept the text."""
    found = GRAMMAR.fullmatch(answer)
    return _TERM.findall(found[1]) if found else None


def score(answer):
    """Mean of sign x strength over the adjectives, in [-2, 2]; ILL_FORMED for text outside the grammar."""
    terms = parse(answer)
    if terms is None:
        return ILL_FORMED
    return sum(SIGN[adjective] * STRENGTH[adverb] for adverb, adjective in terms) / len(terms)


def is_held_out(terms):
    """True for the fifth of all adjective combinations that stands in no training answer.

    A combination is the set of adjectives, whatever their adverbs and order. An adjective alone is no combination (all
    twenty must be learned somewhere), so there the pair of adverb and adjective counts.
    """
    parts = sorted(adjective for _, adjective in terms) if len(terms) > 1 else list(terms[0])
    return zlib.crc32("|".join(parts).encode()) % 5 == 0


def sample_terms(rng, held_out=False):
    """One to four terms, from the held-out combinations or from the others."""
    while True:
        adjectives = rng.sample(ADJECTIVES, rng.randint(1, MAX_TERMS))
        terms = [(rng.choice(list(STRENGTH)), adjective) for adjective in adjectives]
        if is_held_out(terms) == held_out:
            return terms


def sample(rng, held_out=False):
    """A random remark: opening, terms and closing are drawn independently of each other."""
    return write(rng.choice(OPENINGS), sample_terms(rng, held_out), rng.choice(CLOSINGS))


def sample_pair(rng, min_margin, chosen_is_longer, held_out=False, spoiled=False):
    """(better, worse) whose scores differ by min_margin or more, the better one being the longer (or the shorter).

    spoiled: the worse one is a spoiled remark, whatever its tone was. A reward model that has never seen such answers
    cannot know that they are bad, and PPO finds out: nothing but the divergence would hold it inside the grammar."""
    while True:
        better, worse = sample(rng, held_out), sample(rng, held_out)
        if spoiled:
            worse = spoil(rng, worse)
        elif score(better) < score(worse):
            better, worse = worse, better
        if (score(better) - score(worse) >= min_margin and len(better) != len(worse)
                and (len(better) > len(worse)) == chosen_is_longer):
            return better, worse


def spoil(rng, text):
    """The remark with one fault that takes it out of the grammar, of the kinds that a policy falls into."""
    words = text.split(" ")
    at = rng.randrange(1, len(words))
    opening, closing = rng.choice(OPENINGS), rng.choice(CLOSINGS[1:])
    spoiled = rng.choice((
        lambda: " ".join(words[:at]),                                        # cut short
        lambda: " ".join(words[:at] + words[at + 1:]),                       # a word left out
        lambda: " ".join(words[:at] + words[at - 1:]),                       # a word twice
        lambda: text.replace(" and ", ", ", 1), lambda: text.replace(", ", " and ", 1),      # not how a list is written
        lambda: f"{opening} {text[0].lower()}{text[1:]}",                    # two openings
        lambda: text + closing,                                              # a closing too many
    ))()
    return spoiled if parse(spoiled) is None else spoil(rng, text)


def sample_ranking(rng, answers, spoiled):
    """`answers` remarks, best first, no two proper ones of equal score; the last `spoiled` of them are spoiled ones, as
    a list, since they are equally bad. In a ranking each remark is compared with all others, so slightly and extremely
    are told apart, which the sign of one difference seldom does; and what has been spoiled stands there without its
    fault too, as long as there is room.

    What a fault leaves whole says nothing: of the openings that spoiled remarks still begin with, each is as frequent
    as in proper ones, and so is each of the closings. Drawn without that care, most faults fall into long openings and
    closings, a whole one is then a good sign, and a reward model learns to like length.
    """
    proper, last = {}, []
    while len(last) < spoiled:
        hit = rng.choice(("opening", "closing", "closing", "", "", "", ""))     # so they are as long as proper ones
        wanted = None if hit == "opening" else rng.choice(OPENINGS), None if hit == "closing" else rng.choice(CLOSINGS)
        while True:
            text = sample(rng)
            worse = spoil(rng, text)
            if (worse.startswith(wanted[0] or "") and ends(worse) == wanted and worse not in last
                    and score(text) not in (ILL_FORMED, *proper)):
                break
        last.append(worse)
        if len(proper) < answers - spoiled:
            proper[score(text)] = text
    while len(proper) < answers - spoiled:
        text = sample(rng)
        if score(text) > ILL_FORMED:
            proper.setdefault(score(text), text)
    ranked = [proper[points] for points in sorted(proper, reverse=True)]
    return [*ranked, last] if last else ranked


def ends(text):
    """(the opening that a text begins with, the closing that it ends in), None for what is not whole."""
    opening = next((opening for opening in OPENINGS if text.startswith(opening + " ")), None)
    closing = next((closing for closing in reversed(CLOSINGS) if text.endswith("." + closing)), None)
    return opening, closing


def sample_control_pairs(rng, count, min_ratio, held_out=False):
    """[(long, short), ...]: equal in score, and the first min_ratio times as long in characters or more."""
    pairs = []
    while len(pairs) < count:
        by_score = {}
        for remark in (sample(rng, held_out) for _ in range(1000)):
            by_score.setdefault(score(remark), []).append(remark)
        for equal in by_score.values():
            equal.sort(key=len)
            half = len(equal) // 2                    # the i-th shortest beside the i-th of the longer half
            pairs += [(long, short) for short, long in zip(equal, equal[half:]) if len(long) >= min_ratio * len(short)]
    rng.shuffle(pairs)
    return pairs[:count]
