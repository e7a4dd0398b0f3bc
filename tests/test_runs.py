"""The chain of stages (what it records, how it ends) on stand-ins for the stages, and the report on made-up results."""
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from engine.files import write_json


def load(root, name):
    spec = importlib.util.spec_from_file_location(name, root / "runs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- The chain

STAGE = '''
"""A stage that computes for a moment, and on a second call finds that it is done."""
import sys, time
from pathlib import Path
from configurator import configure

out_dir = "out"
data_dir = "data"
{keys}


def main(config):
    done = Path(config.out_dir) / "{name}" / "done"
    (Path(config.out_dir) / "config.json").write_text("written by every call")
    if done.exists():
        return print("{name}: already done")
    if Path("fail").exists() and "{name}" == Path("fail").read_text():
        raise SystemExit(3)
    if Path("slow").exists() and "{name}" == Path("slow").read_text():
        print("slow", flush=True)
        for _ in range(600):
            time.sleep(0.1 if Path("slow").exists() else 0)
    while time.process_time() < 0.05:
        pass
    done.parent.mkdir(parents=True, exist_ok=True)
    done.write_text("")
    print("{name}: ran with", *sys.argv[1:])


if __name__ == "__main__":
    main(configure(globals()))
'''


@pytest.fixture
def repo(tmp_path, root):
    """A checkout, in a folder with a space in its name, whose stages are stand-ins: train.py has a key max_steps, the
    others have not."""
    chain, tmp_path = load(root, "chain"), tmp_path / "my checkout"
    tmp_path.mkdir()
    for folder in ("runs", "engine", "config"):
        (tmp_path / folder).mkdir()
    for file in ("configurator.py", "engine/files.py", "runs/chain.py"):
        (tmp_path / file).write_bytes((root / file).read_bytes())
    for _, script, _ in chain.STAGES:
        name = os.path.basename(script)[:-3]
        (tmp_path / script).write_text(STAGE.format(name=name, keys="max_steps = 1" if name == "train" else ""))
    (tmp_path / "sample.py").write_text(STAGE.format(name="sample", keys=""))
    (tmp_path / "config" / "demo.py").write_text("out_dir = 'out/demo'\n")
    return tmp_path


def call(repo, *words, **more):
    command = [sys.executable, "runs/chain.py", *words]
    environment = {**os.environ, "PYTHONPATH": str(repo)}
    return subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, **more)


def recorded(repo, out="out/demo"):
    return [json.loads(line) for line in (repo / out / "timing.jsonl").read_text().splitlines()]


def test_every_stage_runs_once_and_is_timed_once(repo):
    first = call(repo)
    assert first.returncode == 0, first.stderr
    times = recorded(repo)
    # prepare_data's second call finds the stand-in done, and the report is not a stage
    assert [line["stage"] for line in times] == [
        "documents", "tokenizer", "chat data", "pretrain", "sft", "reward", "ppo", "evaluate"]
    # Of stand-ins that work for 0.05 seconds; rounded to hundredths.
    assert all(line["wall_seconds"] + 0.02 >= line["cpu_seconds"] >= 0.04 for line in times), times
    assert "python sample.py config/demo.py" in first.stdout
    second = call(repo)
    assert second.returncode == 0 and second.stdout.count("already done") == 10 and recorded(repo) == times


def test_a_call_that_finds_all_done_starts_no_stage_until_something_changes(repo):
    """A stand-in that is started says so by its name without .py."""
    started = lambda *words: re.findall(r"^(\w+): (?:ran with|already done)", call(repo, *words).stdout, re.MULTILINE)
    every = ["prepare_data", "train_tokenizer", "prepare_data", "prepare_chat", "train", "sft", "reward", "rlhf",
             "evaluate", "report"]
    (repo / "inputs").mkdir()
    (repo / "config" / "demo.py").write_text("out_dir = 'out/demo'\ntrain = dict(source='inputs/*.txt')\n")
    with open(repo / "train.py", "r+") as file:
        text = file.read().replace("max_steps = 1", "max_steps = 1\nsource = ''")
        file.seek(0)
        file.write(text)
    assert started() == every and started() == [] and started() == []
    changes = [lambda: (repo / "out/demo/sft/done").unlink(), lambda: (repo / "out/demo/ppo").mkdir() or
               (repo / "out/demo/ppo/new").write_text(""), lambda: os.utime(repo / "sft.py", (1, 1)),
               lambda: (repo / "inputs/a.txt").write_text("named by a config"),
               lambda: (repo / "config/demo.py").write_text("out_dir = 'out/demo'\nmax_steps = 2\n")]
    for number, change in enumerate(changes):
        change()
        assert started() == every, number
        assert started() == [], number
    assert started("--max_steps=3") == every and started() == every      # the record is of one configuration


def test_overrides_reach_the_stages_that_have_the_key(repo):
    done = call(repo, "config/demo.py", "--max_steps=7", "--out_dir=out/two")
    assert done.returncode == 0, done.stderr
    assert "train: ran with config/demo.py --max_steps=7 --out_dir=out/two" in done.stdout
    assert "sft: ran with config/demo.py --out_dir=out/two" in done.stdout
    assert recorded(repo, "out/two")
    wrong = call(repo, "--max_step=7")
    assert wrong.returncode == 2 and "the nearest is 'max_steps'" in wrong.stderr and "ran with" not in wrong.stdout


def test_a_stage_that_fails_ends_the_chain_and_the_next_call_continues(repo):
    (repo / "fail").write_text("sft")
    stopped = call(repo)
    assert stopped.returncode == 3 and "sft.py ended with exit status 3" in stopped.stderr
    assert "bash runs/demo.sh" in stopped.stderr and "reward: ran" not in stopped.stdout
    (repo / "sft.py").write_text((repo / "sft.py").read_text().replace("SystemExit(3)", "SystemExit(75)"))
    stopped = call(repo)                                # asked to leave, it has saved
    assert stopped.returncode == 75 and "sft.py was interrupted" in stopped.stderr
    (repo / "fail").unlink()
    assert call(repo).returncode == 0
    assert [line["stage"] for line in recorded(repo)].count("pretrain") == 1


def test_a_folder_that_can_not_be_written_to(repo):
    (repo / "taken").write_text("a file")
    stopped = call(repo, "--out_dir=taken")
    assert stopped.returncode == 2 and stopped.stderr.startswith("cannot write into taken")
    assert "Traceback" not in stopped.stderr and "ran with" not in stopped.stdout


def test_the_command_that_continues_can_be_pasted(repo):
    (repo / "fail").write_text("prepare_data")
    assert "bash runs/demo.sh '--data_dir=data/my own'\n" in call(repo, "--data_dir=data/my own").stderr


@pytest.mark.parametrize("number, to_group, status", [(signal.SIGTERM, False, 143), (signal.SIGINT, True, 130),
                                                      (signal.SIGINT, False, 143)])
def test_interrupted_chain_takes_its_stage_along(repo, number, to_group, status):
    """A kill reaches the chain alone, Ctrl-C everything that runs in the terminal; SIGINT may reach either."""
    (repo / "slow").write_text("sft")
    chain = subprocess.Popen([sys.executable, "runs/chain.py"], cwd=repo, env={**os.environ, "PYTHONPATH": str(repo)},
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while chain.stdout.readline() != "slow\n":
        pass
    start = time.time()
    os.killpg(chain.pid, number) if to_group else chain.send_signal(number)
    _, errors = chain.communicate(timeout=30)
    assert time.time() - start < 20 and chain.returncode == status
    assert "was interrupted" in errors
    (repo / "slow").unlink()
    assert "sft: ran" in call(repo).stdout


def test_a_stage_that_a_killed_chain_leaves_behind_is_waited_for(repo):
    (repo / "slow").write_text("sft")
    start = lambda: subprocess.Popen([sys.executable, "runs/chain.py"], cwd=repo, stdout=subprocess.PIPE, text=True,
                                     env={**os.environ, "PYTHONPATH": str(repo)})
    killed = start()
    while killed.stdout.readline() != "slow\n":
        pass
    killed.kill()
    killed.wait()
    second = start()
    assert second.stdout.readline().startswith(f"out/demo/chain is in use by process {killed.pid} on ")
    assert not (repo / "out/demo/sft/done").exists()
    (repo / "slow").unlink()
    printed = second.communicate(timeout=60)[0]
    assert second.returncode == 0 and "sft: already done" in printed and "reward: ran" in printed


def test_a_venv_whose_making_was_interrupted_is_made_anew(root, tmp_path):
    """It has a Python then, and no pip."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "setup.sh").write_bytes((root / "runs" / "setup.sh").read_bytes())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    python = tmp_path / "python"     # makes no venv, which would take long
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(["bash", tmp_path / "runs" / "setup.sh"], env={**os.environ, "PYTHON": str(python)},
                          capture_output=True, text=True)
    assert "making .venv" in done.stdout and done.returncode == 2 and "cannot make a virtual environment" in done.stderr
    assert not (tmp_path / ".venv").exists()


# --- The report

def results(data, out):
    """What the stages of a run that met every target would have written."""
    count = {"documents_in": 100, "documents_out": 90, "bytes_in": 1000, "bytes_out": 800, "reasons": {}}
    write_json(data / "audit.json", {"filters": {"readable": count, "length": {**count, "documents_out": 70}}})
    ours = {"name": "ours", "vocab_size": 4096, "bytes_per_token": 4.1}
    write_json(data / "tokenizer" / "report.json", {"held_out": [ours]})
    write_json(out / "pretrain" / "result.json", {"parameters": 10 ** 7, "tokens": 10 ** 7})
    write_json(out / "reward" / "result.json", {
        "val": {"accuracy": 0.93, "by_margin": [{"from": 0.0, "to": 1.0, "accuracy": 0.9},
                                                {"from": 1.0, "to": float("inf"), "accuracy": 1.0}]},
        "control": {"pairs": 400, "prefers_longer": 0.52}})
    write_json(out / "ppo" / "result.json", {
        "before": {"gold": 0.1}, "after": {"gold": 0.9, "kl": 5.0, "stop_rate": 0.99, "length": 20.0},
        "gold_rise_in_deviations": 1.6, "bounds": {"kl": {"at_most": 20.0}, "length": {"at_most": 40.0}}})
    models = {name: {"loss": 2.0, "bits_per_byte": 1.1, "bits_per_byte_new_lines": 1.5,
                     "all_questions": {"format_and_stop": share},
                     "questions": {"member": {"exact": 0.4}, "spell": {"exact": 0.9}, "remark": {"exact": None}}}
              for name, share in (("pretrain", 0.0), ("sft", 0.99), ("ppo", 0.98))}
    write_json(out / "evaluate.json", {
        "models": models, "text": {"xz": 1.7, "xz_primed": 1.2, "grams_in_training": 0.3},
        "kinds": {"member": {"best_baseline": 0.3, "generalised": []},
                  "spell": {"best_baseline": 0.0, "generalised": ["sft"]},
                  "remark": {"best_baseline": None, "generalised": []}}})
    names = ("stage", "wall_seconds", "cpu_seconds", "exit")
    calls = [("pretrain", 30, 60, 0), ("pretrain", 100, 190, 0), ("sft", 50, 90, -2), ("sft", 60, 100, 0)]
    (out / "timing.jsonl").write_text("".join(json.dumps(dict(zip(names, call))) + "\n" for call in calls))
    for name in ("pretrain", "sft", "ppo"):
        (out / name).mkdir(exist_ok=True)
        steps = [{"attempt": 1, "step": step, "loss": 5 / step, "val_loss": 5 / step, "gold": step}
                 for step in range(1, 9)]
        (out / name / "log.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


@pytest.fixture
def report(root, tmp_path, capsys, monkeypatch):
    """report(break_something) -> {what: (measured, target, verdict)} of the table, after changing the results"""
    module = load(root, "report")
    monkeypatch.setattr(module, "draw", lambda *_: True)

    def make(change=lambda data, out: None, *words):
        data, out = tmp_path / "data", tmp_path / "out"
        out.mkdir(exist_ok=True)
        results(data, out)
        change(data, out)
        module.main(module.configure(vars(module), [f"--data_dir={data}", f"--out_dir={out}", *words]))
        make.printed = capsys.readouterr().out
        assert make.printed.startswith((out / "report.txt").read_text()[:-1])
        rows = json.loads((out / "report.json").read_text())["rows"]
        return {row["what"].strip(): (row["measured"], row["target"], row["verdict"]) for row in rows}
    return make


def edit(path, *names, value):
    content = json.loads(path.read_text())
    inner = content
    for name in names[:-1]:
        inner = inner[name]
    inner[names[-1]] = value
    path.write_text(json.dumps(content))


def test_report_of_a_good_run(report):
    rows = report()
    assert [what for what, row in rows.items() if row[2] not in ("ok", "")] == []
    assert sum(row[2] == "ok" for row in rows.values()) == 11
    assert "all targets are met" in report.printed
    assert rows["held-out bits per byte; target: xz -9e alone"] == ("1.100", "< 1.700", "ok")
    assert rows["best kind that generalises"][0] == "90.0%"
    assert rows["pretrain (190 of CPU)"][0] == "100"     # done anew: the last time counts
    assert rows["sft (190 of CPU)"][0] == "110"     # an interrupted call counts with the one that finished
    assert rows["bytes per token, ours (4,096)"][0] == "4.100"


@pytest.mark.parametrize("file, names, value, what", [
    ("evaluate.json", ("text", "xz"), 1.1, "held-out bits per byte; target: xz -9e alone"),     # equal is not below
    ("evaluate.json", ("models", "sft", "all_questions", "format_and_stop"), 0.949,
     "held-out answers in format that stop"),
    ("evaluate.json", ("models", "sft", "questions", "spell", "exact"), 0.79, "best kind that generalises"),
    ("reward/result.json", ("val", "accuracy"), 0.89, "held-out pairs ranked right"),
    ("reward/result.json", ("control", "prefers_longer"), 0.61, "equal pairs: the longer is preferred"),
    ("reward/result.json", ("control", "prefers_longer"), 0.39, "equal pairs: the longer is preferred"),
    ("reward/result.json", ("control", "pairs"), 399, "number of these pairs"),
    ("ppo/result.json", ("gold_rise_in_deviations",), 0.99, "rise of the rule's score, in deviations"),
    ("ppo/result.json", ("after", "kl"), 20.1, "KL to the reference, nats per answer"),
    ("ppo/result.json", ("after", "stop_rate"), 0.94, "answers that stop"),
    ("ppo/result.json", ("after", "length"), 40.1, "mean length in tokens"),
])
def test_report_says_what_is_not_met(report, file, names, value, what):
    rows = report(lambda data, out: edit(out / file, *names, value=value))
    assert [name for name, row in rows.items() if row[2] == "NOT MET"] == [what]
    assert "1 target is not met" in report.printed
    rows = report(lambda data, out: edit(out / file, *names, value=value), "--verdicts=False")
    assert {row[1] + row[2] for row in rows.values()} == {""}


def test_report_of_slow_run(report):
    line = json.dumps({"stage": "ppo", "wall_seconds": 900, "cpu_seconds": 1, "exit": 0})
    rows = report(lambda data, out: open(out / "timing.jsonl", "a").write(line + "\n"))
    assert rows["minutes in all"][2] == "NOT MET"


def test_report_of_nothing_and_of_a_part(report, root, tmp_path):
    def remove(data, out):
        for path in ("out/evaluate.json", "out/ppo/result.json", "out/sft/log.jsonl", "data/audit.json"):
            (tmp_path / path).unlink()
        with open(out / "timing.jsonl", "a") as file:
            file.write('{"stage": "ppo", "wall')     # a kill in the middle of a line
    rows = report(remove)
    assert rows["answers that stop"] == ("-", ">= 95.0%", "not measured")
    assert rows["held-out pairs ranked right"][2] == "ok"
    assert "held-out loss (nats per token)" not in rows
    assert re.search(r"\d targets? (is|are) not met", report.printed)


def test_picture(root, tmp_path, monkeypatch, capsys):
    module, picture = load(root, "report"), tmp_path / "out" / "report.png"
    config = module.configure(vars(module), [f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/out"])
    results(tmp_path / "data", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    module.main(config)
    assert "matplotlib is not installed" in capsys.readouterr().out and not picture.exists()
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    module.main(config)
    assert picture.read_bytes().startswith(b"\x89PNG")
    for path in [*(tmp_path / "out").glob("*/*.json*"), *(tmp_path / "out").glob("*.json")]:
        path.unlink()     # nothing to draw in most of the panels
    module.main(config)


# --- The workshop

def test_commands_in_often_said_exist(root):
    """Every test that the page names is there, under that name."""
    page = (root / "workshop" / "often_said.md").read_text(encoding="utf-8")
    page = page[page.index("\n## "):]     # the explanation at the top speaks of a FILE and a NAME
    missing, file = [], None
    for found in re.finditer(r"(tests/\w+\.py)? ?-k (\w+)", page):
        file = found[1] or file     # "`tests/a.py -k x` and `-k y`"
        names = re.findall(r"^def (test_\w+)", (root / file).read_text(), re.MULTILINE) if file else []
        if not any(found[2] in name for name in names):
            missing.append(found[0])
    assert missing == []
