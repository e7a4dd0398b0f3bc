"""bench/gpu.py, which is for a GPU, with tiny models on a CPU: each of its cells gives numbers, and it keeps to its time."""
import subprocess
import sys

import pytest

from small import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import gpu


def run(*words):
    done = subprocess.run([sys.executable, "bench/gpu.py", "--tiny=True", "--steps=1", *words], capture_output=True, text=True,
                          cwd=ROOT, timeout=2000)
    assert done.returncode == 0, done.stderr
    return [[part.strip() for part in line.strip("|").split("|")] for line in done.stdout.splitlines() if line.startswith("|")][2:]


@pytest.mark.slow
def test_every_cell_gives_numbers_and_a_plan():
    rows = run("--limit=300", "--total=1900")
    assert len(rows) == 11 and len({row[0] for row in rows}) == 11
    for name, size, ms, speed, mfu, peak, planned in rows:
        assert size == "2 x 64" and float(ms) > 0 and float(speed.replace(",", "")) > 0 and (mfu, peak) == ("-", "-"), name
        assert float(planned) >= 0, name


def test_a_cell_that_is_too_slow_or_fails_is_a_line_with_its_reason():
    assert gpu.row_of(gpu.CELLS[0], 1, small=True) == ("| 7B of 8, compiled | failed: more than 1 s | | | | | |", None)
    line, device = gpu.row_of(("none", "no_such_config", 1, {}), 60, small=True)
    assert line.startswith("| none | failed: ") and "no_such_config" in line and device is None
    assert gpu.total + 15 < 360                             # of all cells: what is left bounds each
