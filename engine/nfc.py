"""Unicode's normal form C in time that grows with the text alone.

Marks on one letter are put into a canonical order first (the Unicode Standard, 3.11), for which Python's unicodedata
sorts by insertion: 40,000 of them take two seconds, 400,000 minutes. In order already they take no time.
"""
import itertools
import unicodedata

import regex

TOWER = regex.compile(r"\p{M}{100,}")


def nfc(text):
    """unicodedata.normalize("NFC", text)"""
    return unicodedata.normalize("NFC", TOWER.sub(lambda tower: in_order(tower[0]), text))


def in_order(marks):
    """The same marks, decomposed and in the canonical order: by combining class, those of one class as they stood. What
    has class 0 stays where it is."""
    apart = "".join(unicodedata.normalize("NFD", mark) for mark in marks)
    groups = itertools.groupby(apart, lambda mark: unicodedata.combining(mark) > 0)
    return "".join("".join(sorted(group, key=unicodedata.combining) if moves else group) for moves, group in groups)
