"""Mistakes planted in a function, and the test that must not pass with them."""
import inspect
import textwrap
from itertools import product

import pytest


def plant(monkeypatch, module, name, old, new):
    """Replaces module.name by the function whose text has `new` where `old` stood, once."""
    source = textwrap.dedent(inspect.getsource(getattr(module, name)))
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {name}"
    made = {}
    exec(compile(source.replace(old, new), f"{name}, with a mistake", "exec"), vars(module), made)
    monkeypatch.setattr(module, name, made[name])


def passes(test, request):
    """Whether a test passes, with whatever it is parametrised by. An error of another kind is one of this test."""
    marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    names = [name.strip() for given, _ in marks for name in given.split(",")]
    fixtures = {name: request.getfixturevalue(name) for name in inspect.signature(test).parameters if name not in names}
    try:
        for values in product(*(values for _, values in marks)):
            parts = [value if "," in given else [value] for (given, _), value in zip(marks, values)]
            test(**fixtures, **dict(zip(names, [value for part in parts for value in part])))
    except (AssertionError, pytest.fail.Exception):
        return False
    except SystemExit as refused:
        assert refused.code == 2
        return False
    return True
