"""The config scheme on two scripts made here: what is accepted, what is refused in which words, what is recorded."""
import json
import os
import subprocess
import sys

import pytest

import configurator
from configurator import MAY_CHANGE_ON_RESUME, RESULT_FREE, changed_keys, configure

ALPHA = '''
"""
Alpha's manual.
"""
import os

data_dir = "data/x"                      # where the documents are
out_dir = "out/x"                        # the run's root
seed = 1                                 # of everything
learning_rate = 3e-4                     # peak, after the warm-up
batch_tokens = 8 * 1024                  # arithmetic is allowed
warmup_steps: int | None = None          # None: chosen by the length
name = "plain"                           # größer als ASCII
compile = False                          # True or False
betas: tuple[float] = (0.9, 0.95)
inputs: list[str] = []                   # files
only_alpha = 0
scaling: dict | None = None              # several numbers that belong together
computed = os.getpid()                   # not a constant, so not a key
UPPER = 5
_hidden = 6


def main(config):
    after = 1
    config.save("saved")
    print("RESULT", config.learning_rate, config.name)


late = 3                                 # behind the first function: not a key

if __name__ == "__main__":
    main(configure(globals()))
'''.lstrip()

BETA = '''
"""Beta's manual."""
from configurator import configure

data_dir = "data/x"
seed = 1
learning_rate = 1e-5
epochs = 3


def main(config):
    pass


if __name__ == "__main__":
    main(configure(globals()))
'''.lstrip()


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A repository of two scripts, as the working folder; call(*argv) is alpha's configuration."""
    (tmp_path / "alpha.py").write_text(ALPHA)
    (tmp_path / "beta.py").write_text(BETA)
    (tmp_path / "library.py").write_text('"""Speaks of configure(globals()) without calling it."""\nnot_a_key = 1\n')
    monkeypatch.setattr(configurator, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*argv, script="alpha.py"):
    return configure({"__file__": os.path.abspath(script), "__doc__": "Manual."}, list(argv))


def refused(capsys, *argv, script="alpha.py"):
    """What is printed when the arguments are refused, line by line."""
    with pytest.raises(SystemExit) as stop:
        call(*argv, script=script)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()


def write(name, text):
    with open(name, "w") as file:
        file.write(text)
    return name


# What is a key

def test_keys_are_the_constants_above_the_first_function(repo):
    assert [name for name, _ in call().items()] == [
        "data_dir", "out_dir", "seed", "learning_rate", "batch_tokens", "warmup_steps", "name", "compile", "betas",
        "inputs", "only_alpha", "scaling"]
    assert call().batch_tokens == 8192


def test_configurator_itself_and_libraries_are_no_scripts(repo):
    assert configurator.read_schema(configurator.__file__) is None
    assert set(configurator.read_schemas(repo / "alpha.py")) == {"alpha", "beta"}


def test_a_neighbour_that_does_not_parse_does_not_stop_this_stage(repo, capsys):
    write("beta.py", BETA + "\ndef broken(:\n")
    assert call("--seed=4").seed == 4
    assert "beta.py" in capsys.readouterr().err


# The command line

@pytest.mark.parametrize("argument, key, value", [
    ("--learning_rate=1", "learning_rate", 1.0),
    ("--learning_rate=1e-3", "learning_rate", 1e-3),
    ("--learning_rate=-1", "learning_rate", -1.0),
    ("--seed=-7", "seed", -7),
    ("--batch_tokens=4*2048", "batch_tokens", 8192),
    ("--name=a=b=c", "name", "a=b=c"),
    ("--name=", "name", ""),
    ("--name=None", "name", "None"),            # not annotated as optional: a word like any other
    ("--name=3", "name", "3"),
    ("--warmup_steps=None", "warmup_steps", None),
    ("--warmup_steps=12", "warmup_steps", 12),
    ("--compile=True", "compile", True),
    ("--compile=False", "compile", False),
    ("--betas=(0.8,0.9)", "betas", (0.8, 0.9)),
    ("--betas=[1, 0.9]", "betas", (1.0, 0.9)),
    ("--betas=0.8,0.9", "betas", (0.8, 0.9)),
    ("--inputs=['a','b=c']", "inputs", ["a", "b=c"]),
    ("--inputs=a.warc.gz,b.warc.gz", "inputs", ["a.warc.gz", "b.warc.gz"]),
    ("--inputs=a.warc.gz", "inputs", ["a.warc.gz"]),
    ("--inputs=", "inputs", []),
    ("--inputs=[]", "inputs", []),
    ("--scaling={'kind': 'a', 'factors': [1, 2.5]}", "scaling", {"kind": "a", "factors": [1, 2.5]}),
    ("--scaling=None", "scaling", None),
    ("--compile=true", "compile", True),
    ("--compile=false", "compile", False),
])
def test_accepted(repo, argument, key, value):
    found = getattr(call(argument), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("argument, words", [
    ("--learning_rat=1", ["learning_rat", "nearest is 'learning_rate'"]),
    ("--nosuch=1", ["nosuch", "alpha.py has no key"]),
    ("--epochs=1", ["alpha.py has no key 'epochs'", "beta.py has"]),
    ("--computed=1", ["no key 'computed'"]),
    ("--late=1", ["no key 'late'"]),
    ("--seed=1.5", ["seed must be int", "1.5"]),
    ("--seed=True", ["seed must be int", "True"]),
    ("--seed=abc", ["seed must be int", "'abc'"]),
    ("--seed=__import__('os').getpid()", ["seed must be int"]),
    ("--seed=1/0", ["seed must be int"]),
    ("--seed=9**9**9", ["seed must be int", "9**9**9"]),
    ("--seed=0x" + 5000 * "9", ["seed must be int, found '0x99999"]),
    ("--seed=" + 5000 * "9", ["seed must be int, found '99999"]),
    ("--out_dir=", ["out_dir must name a folder"]),
    ("--seed=", ["seed must be int", "''"]),
    ("--seed=None", ["seed must be int"]),
    ("--warmup_steps=1.5", ["warmup_steps must be int or None", "1.5"]),
    ("--compile=TRUE", ["compile must be True or False", "'TRUE'"]),
    ("--compile=1", ["compile must be True or False", "1"]),
    ("--learning_rate=1e999", ["learning_rate must be float", "1e999"]),
    ("--betas=0.9", ["betas must be tuple of float", "0.9"]),
    ("--betas=(0.9,'x')", ["betas must be tuple of float", "'x'"]),
    ("--scaling=[1]", ["scaling must be dict or None", "[1]"]),
    ("--scaling={1: print}", ["scaling must be dict or None"]),
    ("--seed", ["needs a value", "--seed=... (int)"]),
    ("-x", ["-x", "--key=value"]),
    ("-x=1.py", ["-x=1.py", "--key=value"]),
    ("--", ["--key=value"]),
    ("--=3", ["--key=value"]),
    ("word", ["word", "config file ending in .py"]),
    ("missing.py", ["missing.py does not exist"]),
])
def test_refused_on_the_command_line(repo, capsys, argument, words):
    lines = refused(capsys, argument)
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_all_problems_at_once(repo, capsys):
    write("bad.py", "sead = 1\nlearning_rate = 'high'\nbeta = dict(epoch=2)\n")
    lines = refused(capsys, "-x", "bad.py", "--seed=no", "none.py", "--nosuch=1")
    assert len(lines) == 8     # learning_rate is wrong for both scripts
    assert sum("bad.py, line" in line for line in lines) == 4


# Config files

def test_order_is_defaults_files_command_line(repo):
    write("one.py", "seed = 2\nlearning_rate = 2.0\nname = 'one'\n")
    write("two.py", "seed = 3\n")
    config = call("--name=x", "one.py", "two.py")     # the place on the command line does not matter, the kind does
    assert (config.seed, config.learning_rate, config.name) == (3, 2.0, "x")
    assert config.files == ["one.py", "two.py"]


def test_one_file_serves_every_script(repo):
    write("all.py", "seed = 5\nepochs = 9\nalpha = dict(learning_rate=1)\nbeta = {'learning_rate': 2, 'seed': 6}\n")
    alpha, beta = call("all.py"), call("all.py", script="beta.py")
    assert (alpha.seed, alpha.learning_rate) == (5, 1.0)
    assert (beta.seed, beta.learning_rate, beta.epochs) == (6, 2.0, 9)


def test_a_section_counts_more_than_the_top_of_its_file_wherever_it_stands(repo):
    write("all.py", "alpha = dict(seed=7)\nseed = 5\n")
    assert call("all.py").seed == 7
    write("later.py", "seed = 8\n")
    assert call("all.py", "later.py").seed == 8     # but a later file counts more


def test_helpers_in_a_config_file_are_ignored(repo):
    write("all.py", "import math\nfrom math import ceil\n_width = 3\ndef double(x):\n    return 2 * x\n"
                    "seed = double(_width) + ceil(0.5)\n")
    assert call("all.py").seed == 7


@pytest.mark.parametrize("text, words", [
    ("\nlearning_rat = 1\n", ["line 2", "no script has a key 'learning_rat'", "nearest is 'learning_rate'"]),
    ("alpha = dict(\n  learning_rat=1)\n", ["line 2", "alpha.py has no key 'learning_rat'", "'learning_rate'"]),
    ("beta = dict(learning_rat=1)\n", ["line 1", "beta.py has no key 'learning_rat'", "'learning_rate'"]),
    ("beta = dict(only_alpha=1)\n", ["beta.py has no key 'only_alpha'"]),
    ("beta = {'epoch': 1}\n", ["line 1", "beta.py has no key 'epoch'", "'epochs'"]),
    ("beta = 5\n", ["line 1", "beta must be a dict of keys for beta.py", "5"]),
    ("\nepoch: int = 1\n", ["line 2", "no script has a key 'epoch'"]),
    ("\nepoch, seed = 1, 2\n", ["line 2", "no script has a key 'epoch'"]),
    ("\nseed = epoch = 1\n", ["line 2", "no script has a key 'epoch'"]),
    ("seed = 1\nreturn seed\n", ["line 2", "syntax error", "outside function"]),
    ("bta = dict(epochs=1)\n", ["line 1", "no script has a key 'bta'", "'beta'"]),
    ("epochs = 10 ** 5000\n", ["line 1", "epochs must be int within 64 bits", "beta.py"]),
    ("alpha = dict(scaling={'a': [-2 ** 70]})\n", ["line 1", "scaling must be dict or None within 64 bits", "alpha.py"]),
    ("epochs = 1.5\n", ["line 1", "epochs must be int", "1.5", "beta.py"]),
    ("beta = dict(epochs='3')\n", ["epochs must be int", "'3'", "beta.py"]),
    ("only_alpha = True\n", ["only_alpha must be int", "True"]),
    ("seed = 1\nx = (\n", ["line 2", "syntax error"]),
    ("seed = 1\ndef f():\n    return 1 / 0\nseed = f()\n", ["line 3", "ZeroDivisionError"]),
    ("import nosuchmodule\n", ["line 1", "ModuleNotFoundError"]),
    ("raise SystemExit(0)\n", ["line 1", "SystemExit"]),
    ("seed = 1\0\n", ["bad.py"]),
])
def test_refused_in_a_file(repo, capsys, text, words):
    write("bad.py", text)
    lines = refused(capsys, "bad.py")
    assert len(lines) == 1, lines
    for word in ["bad.py", *words]:
        assert word in lines[0]


def test_files_that_are_no_text_or_no_file(repo, capsys):
    (repo / "config" / "folder.py").mkdir(parents=True)
    (repo / "config" / "latin.py").write_bytes(b"name = '\xff'\n")
    lines = refused(capsys, "config/latin.py", "config/folder.py")
    assert "latin.py" in lines[0] and "folder.py" in lines[1] and len(lines) == 2


# What comes back

def test_config_does_not_change(repo):
    with pytest.raises(AttributeError, match="settled"):
        call().seed = 3


def test_command_of_another_stage(repo):
    write("all.py", "seed = 5\n")
    config = call("all.py", "--only_alpha=3", "--data_dir=data/my own")
    assert config.command("beta") == "python beta.py all.py '--data_dir=data/my own'"
    assert config.command("alpha.py") == "python alpha.py all.py --only_alpha=3 '--data_dir=data/my own'"


def test_hash_is_over_what_changes_results(repo):
    plain = call()
    assert len(plain.hash) == 8 and int(plain.hash, 16) >= 0
    assert call("--data_dir=elsewhere", "--out_dir=elsewhere").hash == plain.hash
    assert call("--learning_rate=0.0003").hash == plain.hash
    assert call("--learning_rate=0.0004").hash != plain.hash
    assert call("--seed=2").hash != plain.hash
    assert call("--betas=[0.9,0.95]").hash == plain.hash
    write("twin.py", ALPHA)
    assert call(script="twin.py").hash != plain.hash     # another script with the same keys is another experiment


def test_changed_keys(repo, monkeypatch):
    old = json.loads(json.dumps({"config": dict(call().items())}))
    assert changed_keys(old, call()) == []
    assert changed_keys(old, call("--data_dir=moved", "--compile=True")) == []
    changes = changed_keys(old, call("--seed=2", "--betas=(0.5,0.6)"))
    assert changes == [("seed", 1, 2), ("betas", [0.9, 0.95], [0.5, 0.6])]
    del old["config"]["only_alpha"]     # a key that this script got after the old run: its default changes nothing
    assert changed_keys(old, call()) == []
    assert changed_keys(old, call("--only_alpha=1")) == [("only_alpha", 0, 1)]
    assert set(RESULT_FREE) <= set(MAY_CHANGE_ON_RESUME)
    assert not {"seed", "learning_rate", "batch_tokens", "max_steps", "dropout", "dtype"} & set(MAY_CHANGE_ON_RESUME)


def test_saved_and_printed(repo, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    monkeypatch.setattr(configurator, "git_commit", lambda: "abcd" * 10 + "+")     # of a checkout that was edited
    monkeypatch.setattr(sys, "argv", ["alpha.py", "--seed=9"])
    config = call("--seed=9")
    config.save(repo / "out")
    printed = capsys.readouterr().out
    record = json.loads((repo / "out" / "config.json").read_text())
    assert record["config"] == json.loads(json.dumps(dict(config.items())))
    assert record["hash"] == config.hash and record["script"] == "alpha" and record["format_version"] == 1
    assert set(record["versions"]) == {"python", "torch", "numpy"} and record["argv"] == ["alpha.py", "--seed=9"]
    assert record["environment"]["NCCL_DEBUG"] == "INFO"
    assert "hush" not in json.dumps(record) + printed
    for word in (config.hash, f"commit {'abcd' * 10}+", "seed=9", "--seed=9", "NCCL_DEBUG=INFO", "learning_rate=0.0003", "python"):
        assert word in printed
    monkeypatch.setenv("RANK", "1")
    config.save(repo / "out1")
    assert capsys.readouterr().out == "" and not (repo / "out1").exists()


def test_commit_of_this_very_folder(repo):
    assert configurator.git_commit() is None
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    write("untracked", "")
    assert configurator.git_commit() == commit
    write("beta.py", BETA + "\n")
    assert configurator.git_commit() == commit + "+"


def test_help(repo, capsys):
    with pytest.raises(SystemExit) as stop:
        call("--help", "nothing.py")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("Manual.")
    for key in call().items():
        assert f"--{key[0]}={key[1]!r}" in text
    assert "peak, after the warm-up" in text and "None: chosen by the length [int or None]" in text


def test_ranks_say_it_once_a_node(repo, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "8"), monkeypatch.setenv("LOCAL_RANK", "0")
    assert refused(capsys, "--nosuch=1")[0].startswith("[rank 8] ")
    monkeypatch.setenv("RANK", "9"), monkeypatch.setenv("LOCAL_RANK", "1")
    assert refused(capsys, "--nosuch=1") == []


# The real thing: as a program, and on this repository's own scripts

def test_as_a_program(root, repo):
    def run(*words):
        return subprocess.run([sys.executable, "alpha.py", *words], capture_output=True, text=True)
    start = f"import os, sys\nsys.path.insert(0, {str(root)!r})\nfrom configurator import configure\n"
    write("alpha.py", ALPHA.replace("import os\n", start))
    good = run("--learning_rate=1", "--name=a=b")
    assert good.returncode == 0 and "RESULT 1.0 a=b" in good.stdout, good.stderr
    assert os.path.exists("saved/config.json")
    bad = run("--learning_rat=1")
    assert bad.returncode == 2 and "Traceback" not in bad.stderr and "'learning_rate'" in bad.stderr


def test_no_wait_for_torch(root, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError")
    for script, word in (("sft", "--help"), *((script, "--nosuch=1") for script in ("reward", "rlhf", "evaluate", "sample"))):
        said = subprocess.run([sys.executable, f"{script}.py", word], cwd=root, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(tmp_path)})
        assert f"--{'init_from' if word == '--help' else 'nosuch'}=" in said.stdout + said.stderr.split("Traceback")[0]
    code = "import sys, configurator, engine.files; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert "configurator" in loaded.split() and "torch" not in loaded.split()


OURS = configurator.read_schemas(configurator.ROOT / "configurator.py")
STAGES = {"prepare_data", "train_tokenizer", "prepare_chat", "train", "sft", "reward", "rlhf", "dpo", "sample", "evaluate"}


@pytest.mark.parametrize("script", sorted(OURS))
@pytest.mark.parametrize("path", sorted((configurator.ROOT / "config").glob("*.py")), ids=lambda path: path.name)
def test_our_own_config_files_fit_our_own_scripts(script, path):
    configure({"__file__": str(configurator.ROOT / f"{script}.py")}, [str(path)])


def test_lists_name_real_keys():
    """A key in the two lists that no script has is a typo, or was renamed: then the hash would silently change."""
    assert STAGES <= set(OURS)
    assert set(MAY_CHANGE_ON_RESUME) - {name for schema in OURS.values() for name in schema} == set()


def test_every_programs_own_defaults_are_taken():
    """Benches too, whose keys may be forbidden values in a script."""
    programs = [path for folder in (".", "techniques", "bench", "runs") for path in (configurator.ROOT / folder).glob("*.py")
                if path.read_text().endswith("\n    main(configure(globals()))\n")]
    assert len(programs) > 30
    for path in programs:
        configurator.configure({"__file__": str(path)}, [])


def test_ctrl_c_ends_with_a_word_and_no_trace(capsys):
    configurator.tell(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "\ninterrupted\n"
    configurator.tell(ValueError, ValueError("what it was"), None)
    assert "ValueError: what it was" in capsys.readouterr().err


def test_of_two_scripts_with_one_name_each_has_its_own_keys():
    keys = {name: configurator.read_schemas(configurator.ROOT / name)["train"] for name in ("train.py", "bench/train.py")}
    assert "max_steps" in keys["train.py"] and "nanogpt" in keys["bench/train.py"]
    assert "nanogpt" not in keys["train.py"] and "max_steps" not in keys["bench/train.py"]


def test_a_key_that_a_dict_has_twice_is_refused(tmp_path, capsys):
    file = tmp_path / "twice.py"
    file.write_text("seed = 2\ndata_mix = {'data/a': 0.5,\n            'data/a': 0.5}\n")
    for word in (str(file), "--data_mix={'data/a': 0.5, 'data/a': 0.5}"):
        with pytest.raises(SystemExit) as stop:
            configure({"__file__": str(configurator.ROOT / "train.py")}, [word])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and "the key 'data/a' is there twice" in said and word in said
