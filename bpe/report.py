"""What train_tokenizer.py tells of a vocabulary: how it does on text that it was not learned from, beside others."""
import itertools
import re
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from configurator import refuse
from engine.files import printable
from engine.tokenizer import RANK_FILES, find_tokenizer, valid_unicode

WORD = re.compile(r"[^\W\d_]+")
# What a line is of, the first that fits its beginning; by rules of thumb that nobody should take for more.
KINDS = {
    "mixed languages": r"(?=.*[A-Za-z]{2}).*[^\W\d_\u0000-\u024f]",     # letters beyond the Latin ones, too
    "numbers": r"(?=(?:\D*\d){3})(?:\D{0,3}\d)+\D{0,3}$",
    "code": r"\s*(?:>>>|\.\.\.|[#@{}]|(?:def|class|import|from|return|if|for|while|with|try)\b.*[:(=.]|"
            r"\S*\w\(.*\)|[\w.\[\]]+ [-+*/|]?=[=]? )|.*[;{}]$",
    "prose": r"\W*(?:[^\W\d_]+\W+){5}",
}
OF_A_KIND = re.compile("|".join(f"({form})" for form in KINDS.values()))     # all at once: there are many lines
# More characters than these, of the texts and of their lines by themselves, would take long and change little.
MOST, MOST_LINES = 64_000_000, 8_000_000


def vocabularies(paths):
    """{file or folder: name} of the vocabularies that are named, or lie in the folders that are named."""
    found = {}
    for path in map(Path, paths):
        inside, before = [path] if path.is_file() or find_tokenizer(path) else sorted(path.iterdir()), len(found)
        for file in inside:
            ranks = file.suffix in (".tiktoken", ".bpe") and re.split(r"[_.]", file.name)[0] in RANK_FILES
            if file == path or ranks or ".model" in file.suffixes or file.is_dir() and find_tokenizer(file):
                found[file] = file.name
        if len(found) == before:
            refuse(f"compare: there is no vocabulary in {path}, or it is named twice.")
    names = [*found.values(), "ours"]
    return {find_tokenizer(file) or file: name if names.count(name) == 1 else str(file) for file, name in found.items()}


def thinned(texts, most):
    """All texts while they have no more than `most` characters together, else every second, fourth, eighth, ... one."""
    kept, size, step = [], 0, 1
    for number, text in enumerate(texts):
        if number % step:
            continue
        kept.append(valid_unicode(text))
        size += len(text)
        while size > most and len(kept) > 1:
            kept, step = kept[::2], 2 * step
            size = sum(map(len, kept))
    return kept


def on_text(tokenizer, texts):
    """How a tokenizer does on a list of texts."""
    encoded = list(tokenizer.encode_batch(texts))
    often = np.bincount(np.concatenate([np.zeros(0, np.uint32), *encoded]))
    used = {id: int(often[id]) for id in np.flatnonzero(often).tolist()}
    size, words = sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts)
    tokens = int(often.sum())
    lone = {id for id in used if len(token := tokenizer.token_bytes[id]) == 1 and token[0] >= 0x80
            or tokenizer.model and tokenizer.engine.is_byte(id)}
    unknown = used.get(tokenizer.engine.unk_id(), 0) if tokenizer.model else 0       # bytes have no unknown text
    return {"bytes": size, "tokens": tokens, "bytes_per_token": round(size / max(tokens, 1), 4),
            "tokens_per_word": round(tokens / max(words, 1), 4), "unknown": unknown / max(tokens, 1),
            "byte_fallback": round(sum(used[id] for id in lone) / max(tokens, 1), 6),
            "lossless": all(tokenizer.decode(ids.tolist()) == text for ids, text in zip(encoded, texts)),
            "distinct": len(used)}


def on_words(tokenizer, words, names):
    """How it does on single things. words: Counter; names: of functions, without what stands before and behind."""
    line_end = len(tokenizer.encode("\n"))         # on a line of its own, so that nothing is put before it
    cost = lambda text: len(tokenizer.encode("\n" + text)) - line_end
    rarest = sorted(words, key=lambda word: (words[word], zlib.crc32(word.encode())))[:-(-len(words) // 10)]
    pieces = [cost(" " + word) for word in rarest]
    share = lambda before: round(sum(cost(before + name) == 1 for name in names) / max(len(names), 1), 4)
    return {"rarest_words": {"words": len(rarest), "tokens_per_word": round(sum(pieces) / max(len(pieces), 1), 3),
                             "whole": round(pieces.count(1) / max(len(pieces), 1), 4), "examples": rarest[:5]},
            # The mean over 50 numbers of each length.
            "digits": {n: sum(cost(str(10 ** (n - 1) + i * 7919 % (9 * 10 ** (n - 1)))) for i in range(50)) / 50
                       for n in range(1, 9)},
            "names_whole": {"names": len(names), "with_space": share(" "), "without": share("")}}


def of_vocabulary(tokenizer, words):
    """What is in our own vocabulary: words are the pieces that it was learned from, as bytes."""
    ordinary = [id for id, token in enumerate(tokenizer.ranks) if token]
    encode = tokenizer.engine._encode_single_piece
    used = {*itertools.chain.from_iterable(map(encode, words))}
    texts = {id: text for id in ordinary if "\ufffd" not in (text := tokenizer.ranks[id].decode("utf-8", "replace"))}
    first = len(tokenizer.prefix)
    lost = [id for id, text in texts.items()
            if text[:first] == tokenizer.prefix and tokenizer.encode(text[first:]) != [id]]
    tell = lambda ids, most=20: [shown(tokenizer.ranks[id]) for id in ids[:most]]
    unused = [id for id in ordinary if id not in used]
    return {"longest": tell(sorted(ordinary, key=lambda id: -len(tokenizer.ranks[id])), 10),
            "unused": {"tokens": len(unused), "bytes": sum(len(tokenizer.ranks[id]) == 1 for id in unused),
                       "examples": tell([id for id in unused if len(tokenizer.ranks[id]) > 1])},
            "unreachable": {"tokens": len(lost), "examples": tell(lost)}, "half_characters": len(ordinary) - len(texts)}


def measure(tokenizers, texts, languages, words):
    """The report: tokenizers {name: Tokenizer}, ours first; texts: the held-out ones; languages: {name: texts}."""
    texts = thinned(texts, MOST)
    lines = thinned(itertools.chain.from_iterable(text.split("\n") for text in texts), MOST_LINES)
    lines_of = [[] for _ in KINDS]
    for line in lines:
        if found := OF_A_KIND.match(line[:400]):
            lines_of[found.lastindex - 1].append(line)
    kinds = {kind: ["\n".join(lines)] for kind, lines in zip(KINDS, lines_of) if lines}
    kinds |= {name: thinned(parts, MOST) for name, parts in languages.items()}
    found = Counter(word for line in lines for word in WORD.findall(line))
    names = sorted({name for line in lines for name in re.findall(r"\b([^\W\d]\w{3,})\(", line)})
    held_out, by_kind = [], {kind: {} for kind in kinds}
    for name, tokenizer in tokenizers.items():
        held_out.append({"name": name, "vocab_size": tokenizer.vocab_size, "documents": len(texts),
                         **on_text(tokenizer, texts), **on_words(tokenizer, found, names)})
        for kind, parts in kinds.items():
            by_kind[kind][name] = on_text(tokenizer, parts)
    return {"held_out": held_out, "kinds": by_kind, "vocabulary": of_vocabulary(next(iter(tokenizers.values())), words)}


# ---------------------------------------------------------------------------------------------------------------------
# To be read

def table(head, rows):
    """Lines of a table in Markdown that is one in a terminal too."""
    rows = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |" for row in rows]
    rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""])
    return "\n".join([lines[0], rule, *lines[1:]])


NUMBERS = ("bytes_per_token", "tokens_per_word", "byte_fallback", "unknown")
FORM = {"made_from": dict, "files": dict, "hash": str, "vocab_size": int, "held_out": [{          # of what is read again
    **dict.fromkeys(NUMBERS, (int, float)), **dict.fromkeys(("documents", "bytes", "tokens", "vocab_size"), int), "name": str,
    "lossless": bool}]}


def summary(report):
    rows = report["held_out"]
    head = [f"{rows[0]['documents']} held-out documents, {rows[0]['bytes']:,} bytes", "vocabulary", "tokens",
            "bytes/token", "tokens/word", "byte fallback", "unknown", "lossless"]
    return table(head, [[row["name"], f"{row['vocab_size']:,}", f"{row['tokens']:,}", f"{row['bytes_per_token']:.3f}",
                         f"{row['tokens_per_word']:.3f}", f"{row['byte_fallback']:.2%}", f"{row['unknown']:.2%}",
                         "yes" if row["lossless"] else "NO"] for row in rows])


def page(report):
    """report.md"""
    rows, kinds, own = report["held_out"], report["kinds"], report["vocabulary"]
    sizes = [f"{kind} ({next(iter(found.values()))['bytes']:,} bytes)" for kind, found in kinds.items()]
    by_kind = lambda key: table([key.replace("_", " "), *sizes], [
        [row["name"], *(f"{found[row['name']][key]:.3f}" for found in kinds.values())] for row in rows])
    rare, names = rows[0]["rarest_words"], rows[0]["names_whole"]
    single = table(["one thing at a time", "tokens of a rare word", "rare words whole", "names whole, behind a space",
                    "names whole, at the beginning", *(f"{n} digits" for n in rows[0]["digits"])],
                   [[row["name"], row["rarest_words"]["tokens_per_word"], f"{row['rarest_words']['whole']:.1%}",
                     f"{row['names_whole']['with_space']:.1%}", f"{row['names_whole']['without']:.1%}",
                     *(f"{n:.2f}" for n in row["digits"].values())] for row in rows])
    quoted = lambda tokens: ", ".join(f"`{token}`" for token in tokens) or "none"
    return f"""# {report['vocab_size']:,} tokens, {report['hash'][:16]}

{summary(report)}

Byte fallback: of the tokens those that are one byte of a character, or a byte where pieces are characters. Unknown:
tokens that stand for text which can not be given back; made of bytes there are none.

{by_kind('bytes_per_token') if kinds else ''}

{by_kind('tokens_per_word') if kinds else ''}

Lines of the held-out text were sorted by rules of thumb; words are what spaces separate. Of texts with more than {MOST:,}
characters together every second one is measured, or every fourth, ...; so are lines and words beyond {MOST_LINES:,}.

{single}

Rare: the {rare['words']:,} words that are rarest in the held-out text, such as {', '.join(rare['examples']) or '-'}.
Names: the {names['names']:,} different names of functions that are called there.

- longest tokens: {quoted(own['longest'])}
- not used in the training text any more, since they were merged further: {own['unused']['tokens']:,}, of which
  {own['unused']['bytes']:,} single bytes; {quoted(own['unused']['examples'])}
- unreachable, so that their own text becomes other tokens: {own['unreachable']['tokens']:,};
  {quoted(own['unreachable']['examples'])}
- parts of characters, no text by themselves: {own['half_characters']:,}
"""


def shown(token):
    """A token's bytes as text on one line: spaces as "▁", bytes that are no characters in hexadecimal."""
    text = token.decode("utf-8", "surrogateescape").replace(" ", "\u2581")
    parts = (f"<{ord(c) & 255:02X}>" if "\udc80" <= c <= "\udcff" else c if printable(c) and c.isprintable()
             else repr(c)[1:-1] for c in text)
    return "".join(parts).replace("`", "'")


def coloured(tokenizer, text):
    """The tokens of a text for a terminal, in colours by turns, and their ids."""
    ids = tokenizer.encode(text)
    tokens = zip((tokenizer.token_bytes[id] for id in ids), itertools.cycle((46, 43, 42, 45, 47)))
    parts = [f"\x1b[30;{color}m{shown(token)}\x1b[0m" + "\n" * token.count(b"\n") for token, color in tokens]
    size = len(text.encode("utf-8", "replace"))
    return f"{''.join(parts)}\n{len(ids)} tokens of {size} bytes: {' '.join(map(str, ids))}"
