"""bench/loss.py runs, at a size that is nothing: what it calls has changed before without it."""
import re
import subprocess
import sys

from small import ROOT


def test_it_compares_chunks_with_all_at_once():
    words = "--tokens=64 --n_embd=16 --vocab_size=500 --chunks=0,16 --rounds=1 --device=cpu --threads=1".split()
    done = subprocess.run([sys.executable, "bench/loss.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r" +(all|16) ", line)]
    assert [row[0] for row in rows] == ["all", "16"] and rows[0][5] == rows[1][5] and float(rows[1][6]) < 1e-5
