"""The log of a run: whole lines, attempts, what is told to whom."""
import json
from dataclasses import replace

from engine.monitor import Monitor, read_log
from programs import run
from small import ALONE, ROOT


def attempt(folder, *steps, **numbers):
    monitor = Monitor(folder, ALONE, 100, label="stage")
    for step in steps:
        monitor.log(step, f"loss of step {step}", **numbers)
        monitor.advance()
    monitor.close()


def test_what_a_later_attempt_went_over_is_left_out(tmp_path):
    attempt(tmp_path, 10, 20, 23, 30, run=1)
    attempt(tmp_path, 21, 30, run=2)     # from a checkpoint at 20; whatever the first told of step 23 is void
    assert [(record["step"], record["attempt"], record["run"]) for record in read_log(tmp_path)] == [
        (10, 1, 1), (20, 1, 1), (21, 2, 2), (30, 2, 2)]
    attempt(tmp_path, 30, run=3)
    assert [(record["step"], record["run"]) for record in read_log(tmp_path)] == [(10, 1), (20, 1), (21, 2), (30, 3)]


def test_a_line_is_in_the_file_at_once(tmp_path):
    monitor = Monitor(tmp_path, ALONE, 100)
    monitor.log(1, loss=2.0)
    assert read_log(tmp_path)[0]["loss"] == 2.0     # after a kill -9 here it would be there too
    monitor.close()


def test_half_a_line_costs_nothing_but_itself(tmp_path):
    attempt(tmp_path, 1, 2)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"attempt": 1, "step": 3, "lo')
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2]     # while it is there
    attempt(tmp_path, 3)
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2, 3]
    assert all(json.loads(line)["format_version"] == 1 for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert read_log(tmp_path / "none") == []


def test_what_is_told(tmp_path, capsys):
    attempt(tmp_path, 5, loss=float("nan"))
    assert "stage 5/100  loss of step 5" in capsys.readouterr().out.splitlines()
    assert read_log(tmp_path)[0]["loss"] is None
    silent = Monitor(tmp_path / "other", replace(ALONE, rank=1), 100)
    silent.log(1, "line", loss=1.0), silent.advance(), silent.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "other").exists()


FULL_DISK = """
import resource, signal, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from engine.monitor import Monitor
from small import ALONE
monitor = Monitor({folder!r}, ALONE, 100)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for step in range(1000):
    monitor.log(step, loss=1.0)
"""


def test_a_full_disk_is_one_sentence(tmp_path):
    (tmp_path / "full.py").write_text(FULL_DISK.format(root=str(ROOT), folder=str(tmp_path)))
    done = run(tmp_path / "full.py")
    assert done.returncode == 2 and "cannot write" in done.stderr and "the same command again" in done.stderr
    assert len(read_log(tmp_path)) > 5


def test_damaged_lines_of_a_log_are_left_out(tmp_path):
    good = [{"attempt": 1, "step": step, "loss": 1.0} for step in (1, 2)]
    lines = [json.dumps(good[0]).encode(), b"5", b"[1]", b'{"step": 36}', b'{"attempt": 1, "step": null}', b"\xff\xfe junk",
             b"\x00\x00", json.dumps(good[1]).encode()]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert read_log(tmp_path) == good
