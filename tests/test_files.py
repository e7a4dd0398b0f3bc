"""Files are whole or not there: writing through crashes, full disks and second processes; reading what was damaged."""
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from engine import files
from engine.files import (FORMAT_VERSION, fsync_folder, lock_folder, printable, read_json, sha256_file, write_atomic,
                          write_json)


def refused(capsys, function, *arguments):
    with pytest.raises(SystemExit) as stop:
        function(*arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_json_round_trip(tmp_path):
    path = tmp_path / "deep" / "er" / "a.json"
    write_json(path, {"text": "é \u2028 語", "number": np.float32(0.5), "count": np.int64(3), "array": np.arange(3),
                      "nan": float("nan"), "inside": [{"inf": np.float64("inf")}], "path": tmp_path, "pair": (1, 2), 3: True})
    assert read_json(path) == {"format_version": FORMAT_VERSION, "text": "é \u2028 語", "number": 0.5, "count": 3,
                               "array": [0, 1, 2], "nan": None, "inside": [{"inf": None}], "path": str(tmp_path),
                               "pair": [1, 2], "3": True}
    assert "語" in path.read_text(encoding="utf-8")     # for people to read
    write_json(path, read_json(path) | {"format_version": 0})     # what was read from elsewhere does not keep its version
    assert read_json(path)["format_version"] == FORMAT_VERSION
    assert os.listdir(path.parent) == ["a.json"]


def test_a_name_that_is_not_utf8_can_be_written(tmp_path):
    """The command line may hold one: Python has half of a surrogate pair in each such byte's place."""
    write_json(tmp_path / "a.json", {"argv": ["--inputs=caf\udce9", "é"]})
    assert read_json(tmp_path / "a.json")["argv"] == ["--inputs=caf\udce9", "é"]


@pytest.mark.parametrize("content, words", [
    (b'{"a": 1,\n "b": }', ["damaged", "line 2"]),
    (b'{"a": "\xff"}', ["damaged", "position 7"]),
    (b"", ["damaged", "line 1"]),
    (b"[1]", ["list"]),
    (b'{"format_version": 99}', ["format_version 99"]),
    (b'{"format_version": "new"}', ["format_version 'new'"]),
])
def test_damaged_json_is_refused(tmp_path, capsys, content, words):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    message = refused(capsys, read_json, path)
    for word in [str(path), *words]:
        assert word in message


def test_a_key_that_a_file_should_have_is_refused_with_the_file_and_the_key(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text('{"files": [], "inner": {"deep": [{"x": 1}]}}')
    found = read_json(path)
    assert found == {"files": [], "inner": {"deep": [{"x": 1}]}} and found.get("splits") is None
    for broken in (lambda: found["splits"], lambda: found["inner"]["splits"], lambda: found["inner"]["deep"][0]["splits"]):
        message = refused(capsys, broken)
        assert str(path) in message and "'splits'" in message
    assert pickle.loads(pickle.dumps(found)) == found     # rank 0 sends such to the others
    assert not files.intact(tmp_path, [])


@pytest.mark.parametrize("content, found", [
    ('{"files": [{"name": "a", "size": 1}], "lines": {}}', True), ('{"files": [], "lines": {}}', True),
    ('{"files": null, "lines": {}}', False), ('{"files": [1], "lines": {}}', False), ('{"files": {}, "lines": {}}', False),
    ('{"files": [{"name": 3}], "lines": {}}', False), ('{"files": [{}], "lines": {}}', False), ('{"files": []}', False)])
def test_a_file_of_another_form_is_refused(tmp_path, capsys, content, found):
    path = tmp_path / "a.json"
    path.write_text(content)
    read = lambda: read_json(path, like={"files": [{"name": str}], "lines": dict})
    assert read()["files"] is not None if found else str(path) in refused(capsys, read)


def test_missing_json_is_refused(tmp_path, capsys):
    assert "No such file" in refused(capsys, read_json, tmp_path / "none.json")
    assert "cannot be read" in refused(capsys, read_json, tmp_path)


def test_text_and_bytes(tmp_path):
    write_atomic(tmp_path / "a", "é\n")
    assert (tmp_path / "a").read_bytes() == b"\xc3\xa9\n"
    write_atomic(tmp_path / "a", b"\0")
    assert (tmp_path / "a").read_bytes() == b"\0"


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments, name=name, real=real: (calls.append(name), real(*arguments)))
    write_atomic(tmp_path / "a", b"x")
    assert calls == ["fsync", "replace", "fsync"]     # the file, its name, the folder that holds the name


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_full_disk_costs_nothing_that_was_there(tmp_path, monkeypatch, capsys, broken):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, broken, full)
    message = refused(capsys, write_json, path, {"new": 2})
    monkeypatch.undo()
    assert "No space left on device" in message and str(path) in message
    assert read_json(path)["old"] == 1 and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_really_full_device(tmp_path, capsys):
    (tmp_path / "a.tmp").symlink_to("/dev/full")     # every write to it fails for want of space
    assert "No space left" in refused(capsys, write_atomic, tmp_path / "a", b"x" * 100)
    assert os.listdir(tmp_path) == []
    (tmp_path / ".lock").symlink_to("/dev/full")
    lock_folder(tmp_path).close()


def test_a_place_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(capsys, write_atomic, tmp_path / "file" / "a", b"")
    assert "cannot write into" in refused(capsys, lock_folder, tmp_path / "file")


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from engine.files import write_json
n = 0
while True:
    write_json(sys.argv[1], {"n": n, "filling": [n] * 20000})
    print(n, flush=True)
    n += 1
"""


def test_kill_9_leaves_the_old_or_the_new(tmp_path, root):
    path = tmp_path / "a.json"
    for attempt in range(4):
        command = [sys.executable, "-c", WRITER, str(path), str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            while writer.stdout.readline() != "2\n":     # it is in full swing
                pass
            time.sleep(0.013 * attempt)
            writer.send_signal(signal.SIGKILL)
        found = json.loads(path.read_text())     # not read_json: no mercy for a half file
        assert found["n"] >= 2 and found["filling"] == [found["n"]] * 20000


def test_sha256(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_fsync_folder_that_cannot(tmp_path, monkeypatch):
    def cannot(_):
        raise OSError(errno.EINVAL, "Invalid argument")
    monkeypatch.setattr(os, "fsync", cannot)
    fsync_folder(tmp_path)
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError):
        fsync_folder(tmp_path / "none")


LOCKER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from engine.files import lock_folder
lock = lock_folder(sys.argv[1])
print("locked", flush=True)
time.sleep(60)
"""


def test_two_processes_never_share_a_folder(tmp_path, root, capsys):
    folder = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", LOCKER, str(folder), str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "locked\n"
        message = refused(capsys, lock_folder, folder)
        assert f"process {other.pid}" in message and str(folder) in message
    finally:
        other.kill()     # -9: nobody has tidied up
        other.wait()
    with lock_folder(folder):
        message = refused(capsys, lock_folder, folder)     # not twice in one process either
        assert f"process {os.getpid()} " in message and str(other.pid) not in message
    lock_folder(folder).close()


FORKER = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from engine.files import lock_folder
lock = lock_folder(sys.argv[1])
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path, root):
    parent = subprocess.Popen([sys.executable, "-c", FORKER, str(tmp_path), str(root)], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    try:
        lock_folder(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def cannot(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(files.fcntl, "flock", cannot)
    lock_folder(tmp_path).close()
    assert "cannot be locked" in capsys.readouterr().out


@pytest.mark.parametrize("text, shown", [
    ("plain é 語 👨‍👩‍👧 می‌خواهم\n\ttab", "plain é 語 👨‍👩‍👧 می‌خواهم\n\ttab"),
    ("\x1b[31mred\x1b[0m", "red"),
    ("\x1b]0;title\x07after", "after"),
    ("\x1b]8;;http://x\x1b\\link", "link"),
    ("\x1bPq#0\x1b\\after", "after"),
    ("\x1b[2J\x1b[Hx", "x"),
    ("a\x1bcb", "ab"),
    ("a\x9b31mb", "a31mb"),
    ("a\rb\x08c\x00d\x7fe", "abcde"),
    ("abc\u202edcba\u202c \u2066x\u2069", "abcdcba x"),
    ("a\ud800b", "ab"),
    ("end\x1b", "end"),
])
def test_printable(text, shown):
    assert printable(text) == shown


def test_printable_leaves_nothing_that_a_terminal_obeys():
    rng = np.random.default_rng(0)
    alphabet = list("\x1b[]PX^_;?0189mHJc \x07\\\x9b\x9d\x08\r\n\tab\u202e\ud800")
    for _ in range(2000):
        shown = printable("".join(rng.choice(alphabet, 30)))
        assert not [c for c in shown if ord(c) < 32 and c not in "\n\t" or 127 <= ord(c) < 160 or c in "\u202e\ud800"]
        assert printable(shown) == shown
