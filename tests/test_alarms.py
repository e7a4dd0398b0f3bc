"""The alarms on made-up logs, with and without each fault."""
import json
import math
import random
import re

import pytest

from engine.alarms import KEPT, OF_THE_LOSS, OF_THE_MACHINE, Alarms
from engine.monitor import Monitor, read_log
from programs import run
from small import ALONE

GIB = 2**30


def healthy(n=150, seed=0, attempt=1, first=0):
    """A log as a run that does well writes it, a record every 10 steps: the first step compiles and waits for the disk,
    memory grows until everything has been done once, EOS is rare and so its loss noisy, each tenth record has a sample of
    the network."""
    rng, records = random.Random(seed), []
    near = lambda value, share: value * (1 + rng.gauss(0, share))
    for i in range(first, first + n):
        seconds = near(1.0, 0.03) * (20 if i == first else 1)
        text = 2.8 + 5 * math.exp(-i / 15) - 0.0005 * i + rng.gauss(0, 0.04)
        records.append({
            "attempt": attempt, "step": max(1, 10 * i), "loss": text + 0.01, "loss_ordinary": text,
            "loss_eos": 2.2 + 5.5 * math.exp(-i / 12) + rng.gauss(0, 0.6), "tokens_per_second": 8192 / seconds,
            "step_seconds": seconds, "data_seconds": near(0.002, 0.3) + (5 if i == first else 0),
            "rss_bytes": int(GIB * (1.5 - 0.4 * math.exp(-(i - first) / 4) + (0.2 if i - first > 25 else 0) + rng.gauss(0, 0.01)
                                    + 0.01 * i)),
            "rss_file_bytes": int(GIB * (0.1 + 0.01 * i)), "gpu_memory_allocated_bytes": int(near(30 * GIB, 0.001)),
            "disk_free_bytes": 100 * GIB - 2 * GIB * min(i // 25, 4), "next_saves_bytes": 6 * GIB,
            "rank_seconds": near(0.4, 0.05), "slowest_seconds": near(0.55, 0.1), "slowest": f"rank {rng.randrange(4)} on node",
            **({"all_reduce_seconds": near(0.012, 0.1)} if i % 10 == 0 else {})})
    return records


def heard(records):
    """[(step, sentence)] of all alarms of a log."""
    alarms = Alarms()
    return [(record["step"], sentence) for record in records for sentence in alarms.hear(record)]


@pytest.mark.parametrize("n", [1, 17, 150, 1200])
def test_a_healthy_log_has_no_alarm(n):
    for seed in range(3 if n > 1000 else 12):
        assert heard(healthy(n, seed)) == [], seed


def change(records, begin=0, **changes):
    """The records with other values from the i-th on: {name: function of (value, how many records since then)}."""
    for i, record in enumerate(records[begin:]):
        record.update({name: new(record[name], i) for name, new in changes.items() if name in record})
    return records


FAULTS = {
    "loss spike": lambda log: change(log, 100, loss=lambda x, i: x + 1.5 * (i == 0)),
    "loss not smooth": lambda log: change(log, 60, loss=lambda x, i: x + 0.2 * math.sin(i / 6)),
    "EOS loss flat": lambda log: change(log, loss_eos=lambda x, i: 7.7 + 0.01 * x),
    "tokens per second fall": lambda log: change(log, tokens_per_second=lambda x, i: x * (1 - 0.003 * i)),
    "the process's memory rises": lambda log: change(log, rss_bytes=lambda x, i: x + i * GIB // 100),
    "the GPU's memory rises": lambda log: change(log, gpu_memory_allocated_bytes=lambda x, i: x + i * GIB // 20),
    "waiting for data": lambda log: change(log, 90, data_seconds=lambda x, i: 0.2),
    "disk full soon": lambda log: change(log, disk_free_bytes=lambda x, i: x - 88 * GIB),
    "straggler": lambda log: change(log, 60, slowest_seconds=lambda x, i: 0.65 + x / 10, slowest=lambda x, i: "rank 3 on n"),
    "all-reduce slower": lambda log: change(log, 80, all_reduce_seconds=lambda x, i: 1.8 * x),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_alarm_with_its_evidence(name):
    for seed in range(6):
        log = FAULTS[name](healthy(seed=seed))
        found = heard(log)
        if name == "loss not smooth":           # the top of such a wave may stand out as well
            found = [(step, sentence) for step, sentence in found if not sentence.startswith("loss spike")]
        [(step, sentence)] = found
        assert sentence.startswith(name + ":"), sentence
        steps = {f"{record['step']:,}" for record in log if record["step"] <= step}
        told = {number for a, b in re.findall(r"steps? ([\d,]*\d)(?: to ([\d,]*\d))?", sentence) for number in (a, b) if number}
        assert told and told <= steps, (sentence, told - steps)


def test_every_rule_has_such_a_test():
    assert len(FAULTS) == len(OF_THE_LOSS + OF_THE_MACHINE)


def test_the_evidence_is_what_the_log_has():
    log = FAULTS["loss spike"](healthy())
    spiked = log[100]
    assert f"{spiked['loss']:.3f} at step 1,000" in heard(log)[0][1]
    [(_, sentence)] = heard(FAULTS["disk full soon"](healthy()))
    assert "12.00 GiB are free" not in sentence and "10.00 GiB are free at step 250" in sentence and "6.00 GiB" in sentence


def test_steps_without_a_number_are_no_evidence():
    log = healthy()
    for i in range(20, 150, 7):
        log[i] = {"attempt": 1, "step": 10 * i, "loss": 9.0 if i % 2 else None, "skipped": True}
        log[i + 1] = {**log[i + 1], "loss": math.inf, "mfu": "unknown", "tokens_per_second": None}
    assert heard(log) == []


def test_another_machine_is_another_beginning():
    """After a restart on a slower machine with less memory free, nothing has become slower or larger; but a leak there is
    said although one was said before."""
    first = healthy(60)
    slower = change(healthy(150, 1, attempt=2, first=60), tokens_per_second=lambda x, i: x / 3,
                    rss_bytes=lambda x, i: x + 5 * GIB, all_reduce_seconds=lambda x, i: 4 * x)
    assert heard(first + slower) == []
    leak = "the process's memory rises"
    twice = heard(FAULTS[leak](healthy(150)) + FAULTS[leak](healthy(150, 1, attempt=2, first=150)))
    assert [sentence.partition(":")[0] for _, sentence in twice] == [leak] * 2


def test_a_log_of_weeks_is_not_kept_whole():
    alarms = Alarms()
    for record in healthy(2000):
        alarms.hear(record)
    assert len(alarms.records) == len(alarms.attempt) == sum(KEPT)
    assert alarms.records[0]["step"] == 1 and alarms.records[-1]["step"] == 19990


def write(folder, records, start=0):
    folder.mkdir(exist_ok=True)
    monitor = Monitor(folder, ALONE, 2000, start)
    for record in records:
        monitor.log(record["step"], "line", **{name: value for name, value in record.items() if name not in ("step", "attempt")})
    monitor.close()


def test_a_run_says_it_once_and_so_does_the_doctor(tmp_path, capsys):
    log = FAULTS["loss spike"](healthy())
    write(tmp_path / "run", log[:120])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("alarm")]
    assert len(said) == 1 and said[0].startswith("alarm at step 1000: loss spike")
    assert [record["step"] for record in read_log(tmp_path / "run") if "alarms" in record] == [1000]
    write(tmp_path / "run", log[110:], start=log[109]["step"])              # continued from a checkpoint: known already
    assert "alarm" not in capsys.readouterr().out
    assert {record["attempt"] for record in read_log(tmp_path / "run")} == {1, 2}
    write(tmp_path / "run", FAULTS["loss spike"](healthy())[60:], start=590)        # ... and from one before it: not so
    assert capsys.readouterr().out.count("alarm at step 1000") == 1
    write(tmp_path / "other", healthy())
    done = {folder: run("doctor.py", f"--alarms={tmp_path / folder}") for folder in (".", "run", "other", "none")}
    assert [done[folder].returncode for folder in done] == [1, 1, 0, 2]
    assert "run: from step 1000 on: loss spike: " in done["run"].stdout and done["."].stdout == done["run"].stdout
    assert "no log there" in done["none"].stderr


def test_alarms_are_lines_of_json(tmp_path):
    write(tmp_path, FAULTS["waiting for data"](healthy()))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum(len(line.get("alarms", ())) for line in lines) == 1
