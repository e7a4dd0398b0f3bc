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
import difflib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import shlex
import subprocess
import sys
import textwrap
import tokenize
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# Keys that do not change what is computed, only where, how fast or how often it is looked at. They are left out of the
# config hash, so two runs with one hash are the same experiment. A key that is not listed counts as changing results.
RESULT_FREE = [
    "data_dir", "out_dir",                                                        # folders
    "log_every", "eval_every", "eval_blocks", "save_light", "save_full", "keep",  # intervals, and how much to look at
    "device", "threads", "workers",                                               # machines
    "micro_batch_size",      # the loss is a sum over the global batch, so any split of it has the same gradient
    "max_bad_steps",         # when to give up
]

# Keys that may differ when a run is resumed; a change of any other one is refused (changed_keys). Beyond the list above
# these are the same mathematics with other rounding. max_steps is not among them, since the learning rate is a function
# of it: to train a finished model further, start a new run with --init_from.
MAY_CHANGE_ON_RESUME = RESULT_FREE + ["attention", "compile", "deterministic"]

# The part of the environment that decides how a run behaves. Never all of it: it holds people's tokens.
ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
               "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED")
ENVIRONMENT_PREFIXES = ("NCCL_", "TORCH", "CUBLAS_")


def refuse(*problems):
    """Ends the program because of something the user can mend: every problem on stderr, exit status 2."""
    rank = os.environ.get("RANK", "0")
    for problem in problems:
        print(f"[rank {rank}] {problem}" if rank != "0" else problem, file=sys.stderr)
    sys.stderr.flush()
    raise SystemExit(2)


# --------------------------------------------------------------------------------------------------------------------
# The schema: what a script's source says about its keys

@dataclass
class Key:
    name: str
    default: object
    comment: str
    kind: type              # bool, int, float, str, list or tuple
    item: type | None       # of a list's or tuple's members, when it is known
    optional: bool          # whether None is allowed

    @property
    def expected(self):
        kind = f"{self.kind.__name__} of {self.item.__name__}" if self.item else self.kind.__name__
        return kind + (" or None" if self.optional else "")


def constant(node):
    """The value of an expression made of literals and arithmetic (`8 * 1024`, `(0.9, 0.95)`); ValueError otherwise."""
    allowed = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List, ast.operator, ast.unaryop, ast.expr_context)
    if not all(isinstance(part, allowed) for part in ast.walk(node)):
        raise ValueError("not a constant")
    try:
        return eval(compile(ast.Expression(node), "<constant>", "eval"))
    except Exception as error:
        raise ValueError(str(error))


def key_of(name, default, annotation, comment):
    """A Key from one assignment. The type is the annotation's (`int | None`, `list[str]`) or else the default's."""
    words = [part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)] if annotation else []
    kinds = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple)}
    named = [kinds[word] for word in words if word in kinds]     # breadth first: the outer type comes before its member
    kind = named[0] if named else type(default)
    if kind not in kinds.values():
        refuse(f"the default of '{name}' does not show its type; annotate it, for example  {name}: int | None = None")
    item = None
    if kind in (list, tuple):
        item = named[1] if len(named) > 1 else type(default[0]) if default else None
    optional = default is None or any(isinstance(part, ast.Constant) and part.value is None
                                      for part in (ast.walk(annotation) if annotation else ()))
    return Key(name, default, comment, kind, item, optional)


def read_schema(path):
    """{name: Key} of the script at `path`, or None when it does not call configure(globals()). May raise SyntaxError."""
    source = Path(path).read_text(encoding="utf-8")
    if "configure(globals())" not in source:     # cheap, and spares most files the parsing
        return None
    tree = ast.parse(source, str(path))
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not any(call.endswith("configure(globals())") for call in calls):     # it was only spoken of, as in this file
        return None
    comments = {token.start[0]: token.string.lstrip("# ") for token in
                tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT}
    schema = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            break
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, annotation = node.targets[0], None
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, annotation = node.target, node.annotation
        else:
            continue
        if not isinstance(target, ast.Name) or not target.id.islower() or target.id.startswith("_"):
            continue
        try:
            value = constant(node.value)
        except ValueError:
            continue
        if hasattr(Config, target.id) or target.id in ("hash", "script", "files"):
            refuse(f"{path}, line {node.lineno}: '{target.id}' cannot be a key, every config has that name already")
        schema[target.id] = key_of(target.id, value, annotation, comments.get(node.end_lineno, ""))
    return schema


def read_schemas(script):
    """{stem: schema} of the script, of its neighbours, and of the scripts beside this file."""
    schemas = {}
    for path in sorted({*ROOT.glob("*.py"), *script.parent.glob("*.py"), script}):
        try:
            schema = read_schema(path)
        except SyntaxError as error:
            # A neighbour that does not parse is its own reader's trouble: this stage can run without it.
            print(f"note: keys of {path.name} are not known, line {error.lineno}: {error.msg}", file=sys.stderr)
            continue
        if schema is not None:
            schemas[path.stem] = schema
    return schemas


# --------------------------------------------------------------------------------------------------------------------
# Values

def fit(key, value):
    """`value` as the key's type, or ValueError. An int serves as a float, a list as a tuple; a bool is never a number."""
    if value is None and key.optional:
        return None
    if key.kind is float and type(value) is int:
        return float(value)
    if key.kind in (list, tuple) and type(value) in (list, tuple):
        member = Key(key.name, None, "", key.item, None, False)
        return key.kind(fit(member, item) if key.item else item for item in value)
    if type(value) is not key.kind:
        raise ValueError(f"{key.name} must be {key.expected}, found {value!r} ({type(value).__name__})")
    return value


def parse(key, text):
    """The value of `--key=text`, or ValueError."""
    if key.optional and text == "None":
        return None
    if key.kind is str:
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    try:
        value = {"true": True, "false": False}.get(text)
        value = constant(ast.parse(text.strip(), mode="eval").body) if value is None else value
    except (ValueError, SyntaxError):
        value = text.split(",") if key.item is str else text     # --input=a.jsonl,b.jsonl needs no brackets
    try:
        return fit(key, value)
    except ValueError:
        raise ValueError(f"{key.name} must be {key.expected}, found {text!r}")


def nearest(name, names):
    close = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f"; the nearest is '{close[0]}'" if close else "; --help lists all"


# --------------------------------------------------------------------------------------------------------------------
# Config files

def run_file(path):
    """Runs one config file. Returns (its names, {name or (section, name): line}); ValueError says what is wrong."""
    try:
        source = Path(path).read_text(encoding="utf-8")
        tree = ast.parse(source, path)
    except FileNotFoundError:
        raise ValueError(f"config file {path} does not exist (looked in {os.getcwd()})")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config file {path} cannot be read: {error}")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path}, line {getattr(error, 'lineno', '?')}: syntax error: {getattr(error, 'msg', error)}")
    names = {"__file__": path, "__name__": "config"}
    try:
        exec(compile(tree, path, "exec"), names)
    except (Exception, SystemExit) as error:
        trace, line = error.__traceback__, "?"
        while trace:     # the deepest frame that lies in the config file itself
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == path else line
            trace = trace.tb_next
        raise ValueError(f"{path}, line {line}: {type(error).__name__}: {error}")
    lines = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            lines[name] = node.lineno
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
    shared, own = {}, {}

    def check(key, value, where, into):
        try:
            into[key.name] = fit(key, value)
        except ValueError as error:
            problems.append(f"{where}: {error}")

    for name, value in names.items():
        where = f"{path}, line {lines[name]}" if name in lines else path
        if name.startswith("_"):
            continue
        if isinstance(value, dict) and name in schemas:     # a section: the keys of one script
            for inner, setting in value.items():
                where = f"{path}, line {lines[name, inner]}" if (name, inner) in lines else f"{path}, {name}"
                if inner in schemas[name]:
                    check(schemas[name][inner], setting, where, own if name == script else {})
                else:
                    problems.append(f"{where}: {name}.py has no key '{inner}'{nearest(str(inner), schemas[name])}")
        elif name in known:
            for owner, schema in schemas.items():
                if name in schema:
                    check(schema[name], value, f"{where} ({owner}.py)", shared if owner == script else {})
        elif not (isinstance(value, types.ModuleType) or callable(value)):
            problems.append(f"{where}: no script has a key '{name}'{nearest(name, known | set(schemas))}")
    return {**shared, **own}


# --------------------------------------------------------------------------------------------------------------------
# The result

class Config:
    """The settled configuration: `config.learning_rate` and so on, and where it came from. It does not change."""

    def __init__(self, script, values, defaults, files, overrides, schemas):
        kept = {name: value for name, value in sorted(values.items()) if name not in RESULT_FREE}
        digest = hashlib.sha256(json.dumps([script, kept]).encode()).hexdigest()[:8]
        self.__dict__.update(values, script=script, files=files, hash=digest, _names=list(values), _defaults=defaults,
                             _overrides=overrides, _schemas=schemas)

    def __setattr__(self, name, value):
        raise AttributeError(f"config.{name} is settled (and saved, and hashed); keep a changed value in a local name")

    def items(self):
        return [(name, getattr(self, name)) for name in self._names]

    def command(self, script):
        """The command that runs another stage with the same config files and the overrides that it knows too."""
        script = script.removesuffix(".py")
        shared = [f"--{name}={text}" for name, text in self._overrides.items() if name in self._schemas.get(script, {})]
        return shlex.join(["python", script + ".py", *self.files, *shared])

    def save(self, folder):
        """Prints the configuration with its circumstances and writes both to folder/config.json. On rank 0 only."""
        if os.environ.get("RANK", "0") != "0":
            return
        from engine.files import write_json     # here, since engine/ stands on this file
        versions = {"python": platform.python_version(), **{name: version_of(name) for name in ("torch", "numpy")}}
        record = {"script": self.script, "hash": self.hash, "config": dict(self.items()), "files": self.files,
                  "commit": git_commit(), "versions": versions, "argv": sys.argv, "environment": environment()}
        write_json(Path(folder) / "config.json", record)
        print(f"{self.script}.py  config {self.hash}  commit {record['commit']}  "
              + "  ".join(f"{name} {version}" for name, version in versions.items()))
        print("  " + shlex.join(sys.argv) + "".join(f"  {name}={value}" for name, value in environment().items()))
        changed = [f"{name}={value!r}" for name, value in self.items() if value != self._defaults[name]]
        default = [f"{name}={value!r}" for name, value in self.items() if value == self._defaults[name]]
        for title, words in (("set:      ", changed), ("defaults: ", default)):
            # A value is never broken in two: its blanks are hidden from textwrap for the moment.
            text = " ".join(word.replace(" ", "\0") for word in words) or "none"
            print(textwrap.fill(text, 118, initial_indent="  " + title, subsequent_indent=" " * 12,
                                break_long_words=False, break_on_hyphens=False).replace("\0", " "))
        sys.stdout.flush()


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def git_commit():
    """The checkout's commit, with '+' when files differ from it; None outside a git checkout."""
    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, timeout=10, check=True).stdout
    try:
        if not (ROOT / ".git").exists():     # do not take the commit of some outer repository
            return None
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain", "-uno").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


def environment():
    return {name: value for name, value in sorted(os.environ.items())
            if name in ENVIRONMENT or name.startswith(ENVIRONMENT_PREFIXES)}


def changed_keys(old, config):
    """[(key, old value, new value)] of the changes since `old` (a config.json, or its "config") that forbid a resume."""
    old = old.get("config", old)
    new = json.loads(json.dumps({name: [value, config._defaults[name]] for name, value in config.items()}))
    before = {name: old.get(name, default) for name, (_, default) in new.items()}     # a key born since: its default
    return [(name, before[name], value) for name, (value, _) in new.items()
            if name not in MAY_CHANGE_ON_RESUME and before[name] != value]


def show_help(script, doc, schema):
    print((doc or script.name).strip() + "\n\nKeys (--key=value, or key = value in a config file):\n")
    width = max(len(f"--{key.name}={key.default!r}") for key in schema.values()) if schema else 0
    for key in schema.values():
        print(f"  {f'--{key.name}={key.default!r}':<{min(width, 44)}}  {key.comment} [{key.expected}]")


def configure(namespace, argv=None):
    """The Config of the script whose globals() are given, from `argv` (by default the command line)."""
    argv = sys.argv[1:] if argv is None else argv
    script = Path(namespace["__file__"]).resolve()
    schemas = read_schemas(script)
    schema = schemas[script.stem]
    if "--help" in argv or "-h" in argv:
        show_help(script, namespace.get("__doc__"), schema)
        raise SystemExit(0)

    defaults = {name: key.default for name, key in schema.items()}
    files, overrides, problems = [], {}, []
    from_files, from_command_line = {}, {}
    for word in argv:
        name, equals, text = word[2:].partition("=")     # only the first '=': the value may hold more
        if not word.startswith("-"):
            if word.endswith(".py"):
                files.append(word)
                from_files.update(settings_of(word, script.stem, schemas, problems))
            else:
                problems.append(f"{word}: a config file ends in .py, and a key is given as --key=value")
        elif not word.startswith("--") or not name:
            problems.append(f"{word}: options are --key=value; --help lists them")
        elif name not in schema:
            others = [f"{other}.py" for other, keys in schemas.items() if name in keys]
            hint = f"; it is a key of {', '.join(others)}" if others else nearest(name, schema)
            problems.append(f"{word}: {script.name} has no key '{name}'{hint}")
        elif not equals:
            problems.append(f"{word}: needs a value, --{name}=... ({schema[name].expected}; now {defaults[name]!r})")
        else:
            try:
                from_command_line[name], overrides[name] = parse(schema[name], text), text
            except ValueError as error:
                problems.append(f"{word}: {error}")
    if problems:
        if os.environ.get("LOCAL_RANK", "0") != "0":     # every rank of a node found the same; one of them says it
            raise SystemExit(2)
        refuse(*problems)
    return Config(script.stem, {**defaults, **from_files, **from_command_line}, defaults, files, overrides, schemas)
