"""Normal form C against Python's own, where that is slow."""
import random
import unicodedata

from engine.nfc import nfc

MARKS = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)).startswith("M")]
LATIN = [mark for mark in MARKS if "\u0300" <= mark < "\u0370"]
LOOSE = [mark for mark in MARKS if not unicodedata.combining(mark)]


def test_towers_of_marks_are_those_of_unicodedata():
    draw = random.Random(1)
    for _ in range(1000):
        kinds = draw.choices([MARKS, LATIN, LOOSE, "ae\u00e9\u1100\u1161\uac00"], [3, 6, 1, 0.1], k=draw.randint(90, 400))
        text = "".join(map(draw.choice, kinds))
        assert nfc(text) == unicodedata.normalize("NFC", text)


def test_a_tower_of_half_a_million_marks_ends():
    """Sorted by insertion it would take a quarter of an hour."""
    draw = random.Random(2)
    found = nfc("".join(draw.choices([mark for mark in LATIN if mark not in LOOSE], k=500_000)))
    classes = [unicodedata.combining(mark) for mark in found]
    assert classes == sorted(classes) and len(found) >= 500_000
