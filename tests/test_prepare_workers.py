"""prepare_data.py in several processes: what kills them, and that neither their number nor their deaths show in the result."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from archives import html, members, prose, response
import prepare_data
from configurator import configure
from prepare import clean, workers
from prepare.progress import Progress
from programs import run
from small import ROOT, byte_tokenizer
from test_prepare_data import NAMES, documents, many, results

# Started as a script it cleans with what the tests have done to its filters; so do the processes that it starts.
SCRIPT = f"""
import os, sys, time
sys.path[:0] = [{str(ROOT)!r}]
import prepare_data
from configurator import configure
from prepare import filters, workers
from pathlib import Path

def length(page, settings, real=filters.FILTERS["length"]):
    flag = Path(os.environ["FLAGS"]) / "once"
    if "POISON" in page["text"]:
        os.kill(os.getpid(), 9)
    if "HANG" in page["text"]:
        time.sleep(1000)
    if "ONCE" in page["text"] and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), 9)
    time.sleep(float(os.environ.get("SLOW", 0)))
    return real(page, settings)

filters.FILTERS["length"] = length
workers.PATIENCE = float(os.environ.get("PATIENCE", 300))
if __name__ == "__main__":
    prepare_data.main(configure(vars(prepare_data)))
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "in").mkdir()

    def begin(folder, *arguments, **environment):
        command = [sys.executable, str(tmp_path / "script.py"), f"--data_dir={folder}", f"--inputs={tmp_path / 'in'}", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                                env={**os.environ, "FLAGS": str(tmp_path), **environment})
    return begin


def archive(path, names, extra=None):
    """Pages of these names; extra: {name: more words}"""
    pages = [response(html(f"{prose(name)} {(extra or {}).get(name, '')}"), f"http://a.example/{name}") for name in names]
    path.write_bytes(members(pages))


def test_pages_that_kill_or_hold_a_process_are_left_out_and_named_and_the_rest_is_as_without_them(tmp_path, start):
    archive(tmp_path / "in" / "a.warc.gz", NAMES[:6], {"cedar": "POISON", "elder": "HANG", "fir": "ONCE"})
    archive(tmp_path / "in" / "b.warc.gz", NAMES[6:])
    done = start(tmp_path / "d", "--workers=2", PATIENCE="4")
    said = done.communicate(timeout=120)[0]
    assert done.returncode == 0, said
    assert "page 2, http://a.example/cedar of a.warc.gz" in said and "page 4, http://a.example/elder of a.warc.gz" in said
    assert said.count("died at page 2") == said.count("took too long at page 4") == 2 and "died at page 5" in said
    assert {document["url"] for document in documents(tmp_path / "d")} == {
        f"http://a.example/{name}" for name in NAMES if name not in ("cedar", "elder")}
    told = json.loads((tmp_path / "d" / "audit.json").read_text())
    (reason, counts), = told["filters"]["readable"]["reasons"].items()
    assert reason == "killed_its_process" and counts["documents"] == 2 and not told["inputs"][0]["whole"]
    assert "http://a.example/cedar" in (tmp_path / "d" / "audit.html").read_text()
    again = start(tmp_path / "d", "--workers=1")
    assert "documents: done before and unchanged" in again.communicate(timeout=60)[0] and again.returncode == 0


def test_a_long_way_between_two_pages_is_no_page_that_takes_too_long(tmp_path, monkeypatch):
    now, seen, slot = [5], [], [0] * clean.SLOTS

    def pages(path, losses, limit, position):
        yield {"url": "", "id": "x", "date": "", "kind": "text", "text": "x"}
        now[0] = 1000
        position(1)
        seen.append(slot[clean.SINCE])

    settings = prepare_data.settings_of(configure(vars(prepare_data), []))
    monkeypatch.setattr(clean, "read_pages", pages)
    monkeypatch.setattr(clean.time, "monotonic", lambda: now[0])
    clean.clean_file(tmp_path / "x", tmp_path / "target", settings, (), slot)
    assert seen == [1000] and slot[clean.SINCE] == 0


def children_of(parent):
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in listed if line.split()[1] == str(parent) and "spawn_main" in line]


def test_d31_killed_workers_and_killed_runs_leave_no_trace(tmp_path, start):
    """kill -9 of workers again and again, then of the run itself; the results are those of an undisturbed run."""
    for number in range(4):
        many(tmp_path / "in" / f"{number}.jsonl", 20, f"http://{number}.example/")
    whole = start(tmp_path / "whole", "--workers=0")
    draw, killed = random.Random(1), 0
    process = start(tmp_path / "d", "--workers=2", SLOW="0.1")
    deadline = time.time() + 60
    while killed < 4 and process.poll() is None and time.time() < deadline:
        if not list((tmp_path / "d").glob("work/*.tmp")):
            continue                                                       # nobody has begun
        time.sleep(draw.uniform(0.2, 0.9))        # twice at one place would be the page's fault
        for pid in children_of(process.pid)[:1]:
            os.kill(pid, signal.SIGKILL)
            killed += 1
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and killed >= 2, said
    assert whole.communicate(timeout=60)[0] and whole.returncode == 0
    assert "is left out" in said or results(tmp_path / "d") == results(tmp_path / "whole")
    process = start(tmp_path / "e", "--workers=2", SLOW="0.1")
    while not (pids := children_of(process.pid)) or not list((tmp_path / "e").glob("work/*.tmp")):
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.time() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and os.path.exists("/proc/self"):
        assert time.time() < deadline, "the workers live on"
        time.sleep(0.1)
    assert start(tmp_path / "e", "--workers=2").communicate(timeout=60)[0]
    assert results(tmp_path / "e") == results(tmp_path / "whole")


def test_an_error_in_a_worker_is_the_runs_error(tmp_path, monkeypatch):
    """What is raised there is raised here, with the place where it happened."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": prose("alder")}))
    with pytest.raises(KeyError) as error:
        workers.clean_files([(tmp_path / "a.jsonl", tmp_path / "target")], {"rules": ()}, 1)
    assert "minhash_bands" in str(error.value) or "clean_file" in "".join(error.value.__notes__)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_machines_that_share_a_folder_give_the_bytes_of_one_process(tmp_path, ranks):
    (tmp_path / "in").mkdir()
    for number in range(5):
        many(tmp_path / "in" / f"{number}.jsonl", 12, f"http://{number}.example/")       # the same texts in each
        archive(tmp_path / "in" / f"{number}.warc.gz", NAMES[number:number + 5])
    options = ("--paragraph_min_chars=40", "--val_fraction=0.3", "--shard_tokens=5000")
    for folder in ("one", "many", "bad"):
        byte_tokenizer().save(tmp_path / folder / "tokenizer")
    launch = lambda ranks, folder, inputs: run("prepare_data.py", f"--data_dir={tmp_path / folder}", f"--inputs={tmp_path / inputs}",
                                               *options, processes=ranks)
    done = launch(ranks, "many", "in")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens/train") == 1 and "10 cleaned, 0 cleaned before" in done.stdout
    assert launch(1, "one", "in").returncode == 0
    assert results(tmp_path / "many") == results(tmp_path / "one")
    assert len({document["url"] for document in documents(tmp_path / "one")}) == len(documents(tmp_path / "one")) == 21
    if ranks == 2:
        assert launch(2, "bad", "none").returncode != 0


def test_progress_tells_speed_share_and_time_left(capsys, monkeypatch):
    told = Progress("cleaning", 10_000_000)
    assert told.line(500, 150, 2_500_000, 10) == "cleaning: 500 documents, 50/s, 0.2 MB/s, 30% kept, 25% done, 0:30 left"
    assert told.line(0, 0, 0, 1).endswith("0% done, 0:00 left")
    told(5, 5, 5)
    assert not capsys.readouterr().out
    told.last -= 31
    told(5, 5, 5)
    assert "cleaning: 5 documents" in capsys.readouterr().out


def test_a_file_whose_reader_dies_is_refused_by_name(tmp_path, capsys):
    worker = workers.Worker.__new__(workers.Worker)
    worker.task, worker.slot = (tmp_path / "x.warc", "target"), [-1] + [0] * 5
    deaths, skip = Counter(), {"target": set()}
    workers._died(worker, "died", deaths, skip)
    with pytest.raises(SystemExit) as stop:
        workers._died(worker, "died", deaths, skip)
    assert stop.value.code == 2 and "x.warc" in capsys.readouterr().err and not skip["target"]
