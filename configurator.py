"""
Configuration for every script of this repository.

A script's defaults block is its schema. Everything between the imports and the first function that looks like

    learning_rate = 3e-4                # peak, reached after the warm-up
    warmup_steps: int | None = None     # None: min(2000, 0.004 * max_steps)

becomes a key, with its type, default and help text, and the script ends in

    if __name__ == "__main__":
        main(configure(globals()))

Values come, in this order, from the defaults, from any number of config files, and from the command line:

    python train.py config/demo.py config/mine.py --learning_rate=1e-3 --out_dir=out/try

One config file serves all stages. In it, `seed = 1` is for every script that has a key `seed`, and
`sft = dict(learning_rate=1e-4)` is for sft.py only. A config file is Python and is run: trust it like code.
Names with a leading underscore, imported modules and functions are the file's own helpers.

A name that no script has is refused, with the nearest one that exists: a typo must never become a new variable that
nobody reads. All problems are reported at once, then the exit status is 2.
"""
import ast
import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import traceback
import types
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# Keys that do not change what is computed, only where, how fast or how often it is looked at. They are left out of the
# config hash, so two runs with one hash are the same experiment. A key that is not listed counts as changing results.
RESULT_FREE = [
    "data_dir", "out_dir",                                                        # folders
    "log_every", "log_samples", "eval_every", "save_light", "save_full",          # intervals, records
    "eval_blocks", "eval_conversations", "show", "verdicts", "explain", "inspect", "eval_answers", "answer_format",   # how much to look at
    "keep", "keep_best", "async_save", "trust_state",                             # checkpoints
    "device", "threads", "workers",                                               # machines
    "parallel", "zero", "hsdp", "tp", "pp", "cpu_offload",                        # how the processes divide the work
    "recompute",             # memory against time, the same bits
    # the loss is a sum over the global batch, so any split of it has the same gradient
    "micro_batch_size", "loss_chunk", "batching", "micro_tokens",
    "max_bad_steps", "timeout", "hang_timeout", "leave_within",    # when to give up, and on whom
    "log_blocks", "peak_flops", "profile", "watch_stats",                         # gauges
    "plan", "plan_gpu", "plan_disk",                                              # what would be
]

# Keys that may differ when a run is resumed; a change of any other one is refused (changed_keys). Beyond the list above
# these are the same mathematics with other rounding. max_steps is not among them, since the learning rate is a function
# of it: to train a finished model further, start a new run with --init_from.
MAY_CHANGE_ON_RESUME = RESULT_FREE + [
    "attention", "compile", "deterministic", "watch_nan",
    "on_spike", "spike_z", "spike_norm", "spike_window", "rollback_window", "rollback_lr", "max_rollbacks",
]


# What is recorded of the environment, by the beginnings of the names. Never all of it: that holds people's tokens, and
# the record is shared.
VARIABLES = ("OMP_", "GOMP_", "MKL_", "NCCL_", "TORCH", "CUDA_", "CUBLAS_", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "PYTHONHASHSEED")


def refuse(*problems):
    """Ends the program because of something the user can mend: every problem on stderr, exit status 2. Nothing happens
    when there is no problem."""
    if not problems:
        return
    rank = os.environ.get("RANK", "0")
    for problem in problems:
        problem = f"[rank {rank}] {problem}" if rank != "0" else str(problem)
        print(problem.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)    # a name may be no UTF-8
    raise SystemExit(2)


# --------------------------------------------------------------------------------------------------------------------
# The schema: what a script's source says about its keys

# Keys that mean the same in every stage that has them.
EVERYWHERE = {"data_dir", "out_dir", "seed", "device", "dtype", "threads"}
KINDS = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict)}


@dataclasses.dataclass
class Key:
    name: str
    default: object
    comment: str
    kind: type              # one of KINDS
    item: type | None       # of a list's or tuple's members
    optional: bool          # whether None is allowed

    @property
    def expected(self):
        members = f" of {self.item.__name__}" if self.item else ""
        return ("True or False" if self.kind is bool else self.kind.__name__) + members + (" or None" if self.optional else "")


def constant(node):
    """The value of an expression of literals and arithmetic (`8 * 1024`, `(0.9, 0.95)`), or ValueError."""
    allowed = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List, ast.Dict, ast.operator, ast.unaryop,
               ast.expr_context)
    if not all(isinstance(part, allowed) for part in ast.walk(node)):
        raise ValueError("not a constant")
    try:
        for part in ast.walk(node):
            grows = isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Pow, ast.LShift))
            if grows and constant(part.right) > 1000:
                raise ValueError("a number that would not fit into memory")       # 9**9**9
        return eval(compile(ast.Expression(node), "<constant>", "eval"))
    except Exception as error:
        raise ValueError(str(error))


def refuse_twice(tree):
    """ValueError where a dict in this code has a key twice: Python would take the last of the two without a word."""
    for node in ast.walk(tree):
        keys = [ast.unparse(key) for key in node.keys if key] if isinstance(node, ast.Dict) else []
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"line {node.lineno}: the key {twice[0]} is there twice")


def read_schema(path):
    """{name: Key} of the script at `path`, or None when it is no script. Raises SyntaxError.

    A key's type is its annotation's (`int | None`, `tuple[str]`) or else its default's."""
    source = Path(path).read_text(encoding="utf-8")
    if not re.search(r"^( {4})?\w.*\bconfigure\(globals\(\)\)", source, re.MULTILINE):
        return None
    lines, schema = source.encode().split(b"\n"), {}     # ast counts columns in bytes
    for node in ast.parse(source, str(path)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            break
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not node.value:
            continue
        annotated = isinstance(node, ast.AnnAssign)
        name = ast.unparse(node.target if annotated else node.targets[0])
        if not re.fullmatch("[a-z][a-z0-9_]*", name):
            continue
        try:
            default = constant(node.value)
        except ValueError:
            continue     # something computed: an ordinary module variable
        words = re.findall(r"\w+", ast.unparse(node.annotation)) if annotated else [type(default).__name__]
        kind, item = [*(KINDS[word] for word in words if word in KINDS), None][:2]
        comment = lines[node.end_lineno - 1][node.end_col_offset:].decode().lstrip("# ")
        schema[name] = Key(name, default, comment, kind, item, "None" in words)
    return schema


def read_schemas(script):
    """{stem: schema} of this script and of all others, which lie beside this file or in runs/; of two with one name
    (train.py, bench/train.py) this script's."""
    schemas = {}
    for path in (*sorted({*ROOT.glob("*.py"), *ROOT.glob("runs/*.py")} - {script}), script):
        try:
            if (schema := read_schema(path)) is not None:
                schemas[path.stem] = schema
        except (OSError, SyntaxError) as error:
            # A neighbour that somebody is just writing is no reason to stop: this stage can run without it.
            print(f"note: the keys of {path.name} are unknown: {error}", file=sys.stderr)
    return schemas


# --------------------------------------------------------------------------------------------------------------------
# Values

def fit(key, value):
    """`value` as the key's type, or ValueError. An int serves as a float, a list as a tuple, a bool not as a number."""
    if type(value) in (int, float) and key.kind is float and abs(value) <= sys.float_info.max:
        return float(value)
    if beyond_64_bits(value):
        raise ValueError(f"{key.name} must be {key.expected} within 64 bits, found a larger number")
    if value is None and key.optional or type(value) is key.kind is not float and not key.item:
        return value
    if type(value) in (list, tuple) and key.item:
        member = dataclasses.replace(key, kind=key.item, item=None, optional=False)
        with contextlib.suppress(ValueError):     # one member is wrong: the whole value is shown
            return key.kind(fit(member, item) for item in value)
    raise ValueError(f"{key.name} must be {key.expected}, found {value!r:.200}")


def beyond_64_bits(value):
    """Whether it is, or holds, an int that no tensor and no JSON reader takes; Python cannot even print the largest."""
    members = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, int) and abs(value) >= 2 ** 63 or any(map(beyond_64_bits, members))


def parse(key, text):
    """The value of `--key=text`, or ValueError."""
    if key.kind is str and not (key.optional and text == "None"):
        return text
    text = {"true": "True", "false": "False"}.get(text, text) if key.kind is bool else text
    # --inputs=a.jsonl,b.jsonl needs no brackets, and --languages= means none.
    as_words = lambda: fit(key, [*filter(None, text.split(","))] if key.item is str else text)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):         # ValueError: NUL bytes, or what is no UTF-8
        return as_words()
    refuse_twice(tree)
    try:
        return fit(key, constant(tree.body))
    except ValueError:
        return as_words()


def nearest(name, names):
    close = difflib.get_close_matches(str(name), list(names), 1, 0.5)
    return f"; the nearest is '{close[0]}'" if close else ""


# --------------------------------------------------------------------------------------------------------------------
# Config files

def run_file(path):
    """Runs one config file. Returns (its names, {(name,) or (section, name): line}); ValueError says what is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        code, tree = compile(text, path, "exec"), ast.parse(text)
        refuse_twice(tree)
    except FileNotFoundError:
        raise ValueError(f"config file {path} does not exist (looked in {os.getcwd()})")
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: syntax error: {error.msg}")
    except (OSError, ValueError) as error:     # no text, NUL bytes in it, a key twice
        raise ValueError(f"config file {path} cannot be read: {error}")
    names, lines = {"__file__": path, "__name__": "config"}, {}
    try:
        exec(code, names)
    except BaseException as error:      # exit() and Ctrl-C too
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        raise ValueError(f"{path}, line {own[-1]}: {type(error).__name__}: {error}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[(node.id,)] = node.lineno
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
            lines.update({(name, word.arg): word.value.lineno for word in getattr(node.value, "keywords", ())})
    return names, lines


def settings_of(path, script, schemas, problems):
    """{key: value} that the config file at `path` holds for `script`; adds to `problems` whatever is wrong in it."""
    try:
        names, lines = run_file(path)
    except ValueError as error:
        problems.append(str(error))
        return {}
    known = {name for schema in schemas.values() for name in schema}
    # A key of a section that is no dict(...) is where its section is.
    where = lambda *place: f"{path}, line {lines.get(place) or lines.get(place[:1], '?')}"
    shared, own = [], []     # (script, key, value, place in the file)
    for name, value in names.items():
        if name.startswith("_") or isinstance(value, types.ModuleType) or callable(value) and name not in known:
            continue     # the file's own helper
        if isinstance(value, dict) and name in schemas:
            own += [(name, key, inner, where(name, key)) for key, inner in value.items()]
        elif name in known:
            shared += [(stem, name, value, where(name)) for stem in schemas if name in schemas[stem]]
        elif name in schemas:
            problems.append(f"{where(name)}: {name} must be a dict of keys for {name}.py, found {value!r}")
        else:
            problems.append(f"{where(name)}: no script has a key '{name}'{nearest(name, known | set(schemas))}")
    settings = {}
    for stem, key, value, place in shared + own:     # in this order: a script's own section counts more
        if key not in schemas[stem]:
            problems.append(f"{place}: {stem}.py has no key '{key}'{nearest(key, schemas[stem])}")
            continue
        try:
            value = fit(schemas[stem][key], value)
        except ValueError as error:
            problems.append(f"{place}: {error} (for {stem}.py)")
        if stem == script:
            settings[key] = value
    return settings


# --------------------------------------------------------------------------------------------------------------------
# The result

class Config:
    """The settled configuration: `config.learning_rate` and so on, and where it came from. It does not change."""

    def __init__(self, script, values, files, overrides, schemas):
        kept = {name: value for name, value in sorted(values.items()) if name not in RESULT_FREE}
        digest = hashlib.sha256(json.dumps([script, kept]).encode()).hexdigest()[:8]
        self.__dict__.update(values, script=script, files=files, hash=digest, _values=values, _overrides=overrides,
                             _schemas=schemas)

    def __setattr__(self, name, value):
        raise AttributeError(f"config.{name} is settled (and saved, and hashed); keep a changed value in a local name")

    def items(self):
        return self._values.items()

    def below_one(self, *names):
        """A sentence for each of these keys that is below 1, for those that count something."""
        return self.outside(**dict.fromkeys(names, (1,)))

    def outside(self, **bounds):
        """A sentence for each of these keys, as far as the script has them, that lies outside its bounds."""
        inside = lambda value, low, high=None: value is None or low <= value and (high is None or value <= high)
        return [f"{name} must be " + (f"from {limits[0]} to {limits[1]}" if limits[1:] else f"at least {limits[0]}")
                + f", found {self._values[name]}" for name, limits in bounds.items()
                if name in self._values and not inside(self._values[name], *limits)]

    def default(self, name):
        return self._schemas[self.script][name].default

    def command(self, script):
        """The command that runs a stage with the same config files and overrides; of another stage, those overrides
        that mean the same in all of them: `inputs` and `learning_rate` are each stage's own."""
        script = script.removesuffix(".py")
        shared = [f"--{name}={text}" for name, text in self._overrides.items() if name in self._schemas.get(script, {})
                  and (script == self.script or name in EVERYWHERE)]
        return shlex.join(["python", script + ".py", *self.files, *shared])

    def save(self, folder):
        """Prints the configuration with its circumstances and writes both to folder/config.json. On rank 0 only."""
        if os.environ.get("RANK", "0") != "0":
            return
        from engine.files import write_json      # here, not at the top, since engine/ stands on this file
        commit = git_commit()
        # From the installed packages' records, so that nobody waits for an import of torch.
        packages = {name: metadata.version(name) for name in ("torch", "numpy")}
        versions = {"python": platform.python_version(), **packages}
        environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
        write_json(Path(folder) / "config.json", {
            "script": self.script, "hash": self.hash, "config": dict(self.items()), "files": self.files,
            "commit": commit, "versions": versions, "argv": sys.argv, "environment": environment})
        print(f"{self.script}.py  config {self.hash}  commit {commit}", *map(" ".join, versions.items()), sep="  ")
        print("called as ", shlex.join(sys.argv), *map("=".join, environment.items()), sep="  ")
        told = [(f"{name}={value!r}", value == self.default(name)) for name, value in self.items()]
        print("set       ", *(text for text, is_default in told if not is_default), sep="  ")
        print("defaults  ", *(text for text, is_default in told if is_default), sep="  ", flush=True)


def git_commit():
    """The checkout's commit, with '+' when tracked files differ from it; None outside a git checkout."""
    command = ["git", f"--git-dir={ROOT}/.git", f"--work-tree={ROOT}",     # and not the one of some outer repository
               "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None     # no git on this machine, or no commit yet: a run needs neither


def changed_keys(old, config):
    """[(key, old value, new value)] of what forbids to resume the run whose config.json is `old`."""
    pairs = [(name, old["config"].get(name, config.default(name)), value) for name, value in config.items()]
    pairs = json.loads(json.dumps(pairs))     # tuples as lists
    return [(name, before, now) for name, before, now in pairs if before != now and name not in MAY_CHANGE_ON_RESUME]


def tell(kind, error, trace):
    """The last word of a script: of Ctrl-C one word and no trace, of anything else the trace."""
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def configure(namespace, argv=None):
    """The Config of the script whose globals() are given, from `argv` (by default the command line)."""
    script = Path(namespace["__file__"]).resolve()
    if argv is None and script in STARTED:
        return STARTED[script]
    argv = sys.argv[1:] if argv is None else argv
    schemas = read_schemas(script)
    schema = schemas[script.stem]
    if "--help" in argv or "-h" in argv:
        print((namespace.get("__doc__") or script.name).strip())
        print("\nKeys (--key=value, or key = value in a config file):\n")
        for key in schema.values():
            print(f"  {f'--{key.name}={key.default!r}':<36}  {key.comment} [{key.expected}]")
        raise SystemExit(0)

    problems, overrides = [], {}
    values = {name: key.default for name, key in schema.items()}
    files = [word for word in argv if word.endswith(".py") and not word.startswith("-")]
    for file in files:
        values.update(settings_of(file, script.stem, schemas, problems))
    for before, word in zip(["", *argv], argv):
        name, equals, text = word[2:].partition("=")     # only the first '=': the value may hold more
        if word in files:
            continue
        if not word.startswith("--") and problems and problems[-1].startswith(f"{before}: needs a value"):
            problems[-1] = f"{before} {word}: write it as one word, {before}={word}"
        elif not word.startswith("--") or not name:
            problems.append(f"{word}: expected --key=value or a config file ending in .py; --help lists the keys")
        elif name not in schema:
            others = ", ".join(f"{stem}.py" for stem in schemas if name in schemas[stem])
            section, _, inner = name.partition(".")
            hint = (f"; in a config file that is {section} = dict({inner}=...)" if inner and section in schemas else
                    f" ({others} has)" if others else nearest(name, schema))
            problems.append(f"{word}: {script.name} has no key '{name}'{hint}")
        elif not equals:
            problems.append(f"{word}: needs a value, --{name}=... ({schema[name].expected})")
        else:
            try:
                values[name], overrides[name] = parse(schema[name], text), text
            except ValueError as error:
                problems.append(f"{word:.200}: {error}")
    problems += [f"{name} must name a folder, found {values[name]!r}" for name in ("data_dir", "out_dir")
                 if name in values and not str(values[name]).strip()]
    sys.excepthook = tell
    if problems and os.environ.get("LOCAL_RANK", "0") != "0":     # every rank of a node found the same; one says it
        raise SystemExit(2)
    refuse(*problems)
    return Config(script.stem, values, files, overrides, schemas)


# The scripts import this file before torch, so that --help and what is wrong with the settings need not wait for it.
STARTED = {}
_script = Path(getattr(sys.modules["__main__"], "__file__", None) or ROOT).resolve()
if _script.parent == ROOT and _script.is_file() and read_schema(_script):
    STARTED[_script] = configure(vars(sys.modules["__main__"]))
