"""
Files that are whole or not there: everything this project writes goes through here.

A file is written beside its place as NAME.tmp, flushed to the disk (fsync) and then renamed, so that a reader, or a
second run after a crash, sees the old content or the new one and never a half. The folder is flushed as well, because
on most file systems a rename is durable only when the folder that records it is.
"""
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import weakref
from pathlib import Path

from configurator import refuse

FORMAT_VERSION = 1     # of every file that we write; a reader refuses what is newer than itself


def fsync_folder(path):
    """Flushes a folder's list of names to the disk; or a file's content, for which the call is the same."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:     # some network file systems cannot flush a folder; nothing to be done there
            raise
    finally:
        os.close(descriptor)


def publish(file, path):
    """Flushes an open temporary file to the disk and gives it its name."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
    fsync_folder(Path(path).parent)


def write_atomic(path, content):
    """Writes bytes or text to `path`, making its folder. What stood there stays until the new content is safe."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    # Half of a surrogate pair, as names that are not UTF-8 have, becomes the escape that JSON has for it.
    content = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            publish(file, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()     # on a full disk the half file would stand in everybody's way
        refuse(f"cannot write {path}: {error.strerror}. Nothing that was there before has been touched.")


def open_to_append(path):
    """`path`, a file of lines, open for more of them, unbuffered: each write is on its way at once and whole. Half a
    line, as a kill or a full disk leaves it, is cut off, or the next one would be glued to it."""
    file = open(path, "ab+", buffering=0)
    end = size = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - (1 << 16))
        file.seek(begin)
        if newline := file.read(end - begin).rfind(b"\n") + 1:
            end = begin + newline
            break
        end = begin
    if end < size:
        file.truncate(end)
    return file


def plain(value):
    """`value` in JSON's own types: numpy and torch numbers and arrays unpacked, paths as text, nan and inf as null.
    TypeError for what has no such form."""
    # JSON has no word for nan and inf, and readers in other languages stop at the NaN that Python writes.
    unpack = lambda other: other.tolist() if hasattr(other, "tolist") else os.fspath(other)
    return json.loads(json.dumps(value, default=unpack), parse_constant=lambda word: None)


def json_text(obj):
    """The dict `obj` with its format_version as JSON, readable by people: one key a line."""
    content = {"format_version": FORMAT_VERSION, **obj, "format_version": FORMAT_VERSION}
    return json.dumps(plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path, obj):
    write_atomic(path, json_text(obj))


class Entries(dict):
    """An object in a JSON file. A key that it should have and has not is the file's fault, and refused as such."""

    def __missing__(self, key):
        refuse(f"{self.path} has no {key!r}: it is damaged, or not what this program writes. Remove it and make it "
               "anew.")


def fits(value, like):
    """Whether `value` is like `like`: an object that has at least its keys, with values that fit; a list of members
    that fit its one; or of this type, or one of these. True and False are no numbers."""
    if isinstance(like, dict):
        return isinstance(value, dict) and all(
            name in value and fits(value[name], inner) for name, inner in like.items())
    if isinstance(like, list):
        return isinstance(value, list) and all(fits(member, like[0]) for member in value)
    return isinstance(value, like) and not (isinstance(value, bool) and isinstance(0, like))


def read_json(path, missing=None, like={}):
    """The dict in `path`; refuses a file that is damaged, does not fit `like` or was written by a newer version than
    this one, and also one that is not there, unless `missing` says what to take for it."""
    if missing is not None and not Path(path).exists():
        return missing
    def entries(content):
        found = Entries(content)
        found.path = str(path)
        return found
    try:
        obj = json.loads(Path(path).read_bytes().decode("utf-8"), object_hook=entries)
    except OSError as error:
        refuse(f"{path} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:     # bad UTF-8 or bad JSON
        refuse(f"{path} is damaged: {error}")
    if not isinstance(obj, dict):
        refuse(f"{path} holds a {type(obj).__name__}, expected an object with named values")
    refuse(*(f"{path}: {name!r} is missing, damaged, or not what this program writes. Remove the file and make it anew."
             for name, inner in like.items() if not fits(obj, {name: inner})))
    version = obj.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        refuse(f"{path} has format_version {version!r}, this program reads up to {FORMAT_VERSION}: use a newer program")
    return obj


def json_lines(path):
    """What stands in the lines of a .jsonl file, nothing when there is none; a line that a kill or a full disk cut
    short, or that is damaged otherwise, is left out."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line)


def read_saved(path):
    """The dict that Config.save wrote to `path`; refuses what has another form."""
    return read_json(path, like={"script": str, "config": dict, "versions": dict, "environment": dict})


def sha256_file(path):
    """Hex digest of a file's content, read in pieces so that its size does not matter."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def intact(folder, checksums):
    """Whether the files in `folder` are as they were written. checksums: {name: sha256}."""
    return isinstance(checksums, dict) and all(
        (Path(folder) / name).is_file() and sha256_file(Path(folder) / name) == checksum
        for name, checksum in checksums.items())


def lock_folder(folder, wait=False):
    """
    Makes `folder` if need be and takes it for this process alone; refuses when another one holds
    it, or says so and waits.

    Returns an open file: the lock lasts until it is closed or the process ends, in whatever way, so a crash leaves none
    behind. (A lock file whose mere existence counts would have to be removed by hand after a kill -9.)
    """
    path = Path(folder) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")
    except OSError as error:
        refuse(f"cannot write into {folder}: {error.strerror}. Choose another --out_dir or --data_dir.")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        used = f"{folder} is in use by {file.read().strip() or 'another process'}"
        if not wait:
            refuse(f"{used}; two runs never share a folder. Wait for it, end it, or choose another --out_dir.")
        print(f"{used}, or by a stage that it left behind; waiting for it", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:     # some network file systems know no locks: better unlocked, and said, than not at all
        print(f"note: {folder} cannot be locked ({error.strerror}); do not start two runs in it")
    # A worker forked from here would hold the lock as well, and it may outlive a kill -9 of this process.
    held = weakref.ref(file)
    os.register_at_fork(after_in_child=lambda: held() and held().close())
    with contextlib.suppress(OSError):     # a full disk: what is written next will say so
        file.truncate(0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return file


def in_use(folder):
    """Whether a process, on this machine or another that shares the disk, holds lock_folder's lock."""
    try:
        with open(Path(folder) / ".lock", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:        # BlockingIOError: it is held. Anything else: no lock, or none that can be asked for
        return isinstance(error, BlockingIOError)
    return False


CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"                      # terminal sequences: colours, cursor, ...
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\)"             # ... the window's title, links, ...
    r"|\x1b[ -/]*[0-~]?"                            # ... and whatever else begins with escape
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"              # other controls, but not line feed and tab
    r"|[\u200e\u200f\u202a-\u202e\u2066-\u2069]"   # marks that reorder a line, so that it reads as something else
    r"|[\ud800-\udfff]", re.DOTALL)                 # halves of surrogate pairs, which no terminal can be sent


def gone(folder):
    """Where a run's folder is no longer there, the sentence about it in a list: made anew by the next file that is
    written, it would hold neither settings nor log."""
    return [] if Path(folder).is_dir() else [
        f"{folder} is gone: somebody has removed it, or its disk is no longer there. What the run has learned can not be "
        "saved; the same command begins anew."]


def printable(text):
    """`text` without what a terminal would obey rather than show: for whatever came from the web or from a model."""
    return CONTROLS.sub("", text)
