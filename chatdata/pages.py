"""Reads a page of the documentation, as plain text, into names, signatures and first sentences.

The pages are what `pydoc` prints about a module once the HTML is gone:

    fill(text, width=70, **kwargs)
    Fill a single paragraph of text, returning a new string.
    <blank line>
    Reformat the single paragraph in 'text' to fit ...

A line counts as a definition only when all of it reads as one call with a sound parameter list; examples such as
`print(x + 1)` do not. What is not understood is left out: the questions need many definitions, not all of them.
"""

import re
from dataclasses import dataclass
from itertools import takewhile

_CALL = re.compile(r"([A-Za-z_]\w*)\((.*)\)(?:\s*->\s*\S.*)?")
_CLASS = re.compile(r"class ([A-Za-z_]\w*)(?:\(.*\))?")
_PARAMETER = re.compile(r"(\*{0,2})([A-Za-z_]\w*)(\s*:\s*[^=]+?)?(\s*=\s*(\S.*))?")
_SENTENCE = re.compile(r"[A-Z][^.!?]{10,88}\.(?=\s|$)")
_PIECE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^'"]""", re.DOTALL)     # a quoted text, or a character
WORD = re.compile(r"[A-Za-z]{2,12}")       # the plain words of a page, for spelling and for putting names together


@dataclass(frozen=True)
class Parameter:
    name: str            # with its stars: "text", "*args", "**kwargs"
    default: str | None  # as printed, None when there is none

    def __str__(self):
        return self.name if self.default is None else f"{self.name}={self.default}"


@dataclass(frozen=True)
class Definition:
    """A documented function, method or class."""
    name: str
    module: str
    parameters: tuple[Parameter, ...] | None     # None: the page does not say
    sentence: str                                # first sentence of its text, "" when there is none that ends

    @property
    def optional(self):
        return [parameter for parameter in self.parameters if parameter.default is not None]

    @property
    def signature(self):
        return f"{self.name}({', '.join(map(str, self.parameters))})"


def split_arguments(text):
    """The parts of a parameter list between top-level commas; None when brackets or quotes do not close."""
    pieces, parts, depth = _PIECE.findall(text), [""], 0
    if "".join(pieces) != text:
        return None
    for piece in pieces:
        depth += (piece in "([{<") - (piece in ")]}>")
        if depth < 0:
            return None
        if piece == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return None if depth else [part for part in map(str.strip, parts) if part]


def parse_parameters(text):
    """Parameters of a printed signature, `self`, `cls`, `/` and `*` left out; None when it is not one."""
    parts = split_arguments(text)
    matches = [_PARAMETER.fullmatch(part) for part in parts or () if part not in ("/", "*", "self", "cls")]
    if parts is None or not all(matches) or any(match[1] and match[5] for match in matches):
        return None
    parameters = tuple(Parameter(match[1] + match[2], match[5]) for match in matches)
    return parameters if len({parameter.name for parameter in parameters}) == len(parameters) else None


def module_name(document):
    """The module that a page is about: the last part of its address, else the first word of its text."""
    match = re.search(r"([\w.]+?)(?:\.html?)?$", document.get("url") or "")
    return match[1] if match else (document["text"].split() or [""])[0]


def definitions(document):
    """All definitions on a page, in order, the first of each name only."""
    module, found = module_name(document), {}
    lines = [line.strip() for line in document["text"].split("\n")]
    for number, line in enumerate(lines):
        call, heading = _CALL.fullmatch(line), _CLASS.fullmatch(line)
        if heading:
            name, parameters = heading[1], None
        elif call and (parameters := parse_parameters(call[2])) is not None:
            name = call[1]
        else:
            continue
        sentence = first_sentence(lines[number + 1:number + 6])
        before = found.get(name)
        # A class appears as a heading and again as a call: keep one entry, with what each of the two knows.
        if before is None or (before.parameters is None and parameters is not None):
            found[name] = Definition(name, module, parameters, sentence or (before.sentence if before else ""))
    return list(found.values())


def first_sentence(lines):
    """The sentence that the text of a definition begins with; "" when it does not end within a few lines."""
    text = takewhile(lambda line: line and not _CALL.fullmatch(line) and not _CLASS.fullmatch(line), lines)
    match = _SENTENCE.match(" ".join(" ".join(text).split()))
    return match[0] if match and "`" not in match[0] else ""
