"""The child process that turns one standard-library module after the other into a pydoc page.

    python -s -P -S -B prepare/render.py list                  every candidate module, one name a line
    python -s -P -S -B prepare/render.py page NAME [NAME ...]  one JSON object a line: a page, or why there is none

It runs apart from prepare_data.py, in an empty environment and with nothing but the standard library, for two reasons:
importing 700 modules has side effects that the parent should not share, and pydoc prints what it finds in the process,
`os.environ` with all its secrets among it. prepare/corpus.py starts it and says with which flags and why.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import pydoc
import re
import sys
import sysconfig
import warnings

# Names and parts of names that are never imported. Some act when imported (a browser opens, a poem is printed), some
# are test suites or vendored copies, some are an application rather than a library.
LEFT_OUT = {"antigravity", "this", "__hello__", "__phello__", "__main__", "test", "tests", "idle_test", "_bundled",
            "_vendor", "idlelib", "turtledemo"}


def list_modules():
    """Yield (name, reason to skip it or None) of every standard-library module and submodule, in sorted order.

    Packages are walked on the disk, without importing them.
    """
    def submodules(folders, prefix):
        for found in pkgutil.iter_modules(folders):
            name = prefix + found.name
            yield name
            if found.ispkg:
                yield from submodules([os.path.join(folder, found.name) for folder in folders], name + ".")

    for top in sorted(sys.stdlib_module_names):
        if top in LEFT_OUT or top.startswith(("_test", "_xx", "xx")):
            yield top, "left out"
            continue
        spec = importlib.util.find_spec(top)
        yield top, None if spec else "not on this machine"
        if spec and spec.submodule_search_locations:
            for name in sorted(submodules(spec.submodule_search_locations, top + ".")):
                yield name, None if LEFT_OUT.isdisjoint(name.split(".")) else "left out"


def local_paths():
    """(path, what stands in its place) of every local folder that a page could name, longest first."""
    places = [(sysconfig.get_path("stdlib"), "/usr/lib/python"), (sysconfig.get_path("platstdlib"), "/usr/lib/python"),
              (os.path.dirname(os.path.abspath(__file__)), "/prepare"), (sys.executable, "/usr/bin/python")]
    places += [(getattr(sys, name), "/usr") for name in ("prefix", "base_prefix", "exec_prefix", "base_exec_prefix")]
    places += [(os.path.realpath(path), place) for path, place in places]
    places += [(os.getcwd(), "/tmp"), (os.path.expanduser("~"), "/home/user")]
    return sorted({(path, place) for path, place in places if path and len(path) > 4}, key=lambda p: (-len(p[0]), p))


def scrub(html, paths):
    """Take out what differs from run to run or tells about this machine: object addresses and local paths."""
    html = re.sub(r"\b(at|handle)( |&nbsp;)(0x)?[0-9a-fA-F]{6,16}\b", r"\1\g<2>0x...", html)
    for path, place in paths:
        html = re.sub(re.escape(path) + r"(?![\w.-])", place, html)
    return html


def render(name, paths):
    """The HTML page of one module. Raises whatever importing or documenting the module raises."""
    module = importlib.import_module(name)
    title = "Python: " + pydoc.html.escape(name)
    page = pydoc.html.page(title, pydoc.html.document(module, name))
    return scrub(page, paths)


def main(arguments):
    # Modules print, and C libraries write to descriptor 1: the answers go to a private copy of it.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    if arguments[0] == "list":
        for name, reason in list_modules():
            print(json.dumps({"module": name, "skipped": reason}), file=answers, flush=True)
        return
    warnings.simplefilter("ignore")
    paths = local_paths()
    for name in arguments[1:]:
        print(json.dumps({"begin": name}), file=answers, flush=True)      # so that the parent knows which one crashed
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                answer = {"module": name, "html": render(name, paths)}
        except BaseException as error:                                     # SystemExit too: some modules are scripts
            answer = {"module": name, "skipped": f"{type(error).__name__}: {scrub(str(error), paths)}"[:200]}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)                                  # without running what the imported modules registered for the exit


if __name__ == "__main__":
    main(sys.argv[1:])
