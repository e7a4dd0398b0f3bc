"""
Folders that are whole or not there, and the steps of a run that are kept as such folders.

A folder is written under another name (NAME.tmp), gets a manifest with the size and sha256 of each of its files, is
flushed to the disk and renamed. One that exists is never written into; one whose manifest is missing or does not fit is
never read.
"""
import contextlib
import json
import os
import re
import sys
from pathlib import Path

from engine.files import fsync_folder, json_text, sha256_file

PREFIX = {"light": "step", "full": "full"}


def folder_of(run_dir, kind, step):
    return Path(run_dir) / f"{PREFIX[kind]}_{step:08d}"


def steps_of(run_dir, kind):
    """Steps of the checkpoints in a run's folder, newest first; temporary and abandoned ones are none."""
    found = Path(run_dir).glob(f"{PREFIX[kind]}_" + "[0-9]" * 8)
    return sorted((int(folder.name[-8:]) for folder in found), reverse=True)


def publish(temporary, final):
    """Makes a finished temporary folder final: everything in it flushed, the manifest last of all, one rename."""
    paths = sorted(temporary.rglob("*"))
    for path in paths:
        fsync_folder(path)
    listed = {str(path.relative_to(temporary)): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
              for path in paths if path.is_file()}
    (temporary / "manifest.json").write_text(json_text({"files": listed}), encoding="utf-8")
    fsync_folder(temporary / "manifest.json")
    fsync_folder(temporary)
    if final.exists():                  # a step that was reached before and is broken: it must not stand in the way
        abandon(final)
    os.replace(temporary, final)
    fsync_folder(final.parent)


def abandon(folder):
    """Renames a checkpoint that nothing shall continue from; it is kept for whoever asks what happened."""
    taken = (re.search(r"\.abandoned-(\d+)$", other.name) for other in folder.parent.glob(folder.name + ".*"))
    number = 1 + max((int(m[1]) for m in taken if m), default=0)
    os.replace(folder, folder.with_name(f"{folder.name}.abandoned-{number}"))


def verify(folder, part=0, parts=1, only=()):
    """Sentences about everything that is wrong with a folder's files; none when it is sound. Reads every byte, or of
    every `parts`-th file, from the `part`-th on, where several processes divide the work; or of the files `only`."""
    folder = Path(folder)
    if not (folder / "manifest.json").exists():
        return [f"{folder} has no manifest.json: its writing was interrupted"]
    try:
        listed = json.loads((folder / "manifest.json").read_bytes())["files"]
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in listed.items()}
        if not listed:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):      # a bit may flip in the manifest as well
        return [f"{folder}/manifest.json is damaged"]
    numbered = re.match(PREFIX["full"] + r"_(\d{8})", folder.name)
    if numbered and not {"state.json", "state/.metadata"} <= listed.keys():
        return [f"{folder}/manifest.json lists no state: there is nothing to continue from"]
    problems = []
    for name, (size, checksum) in [item for item in listed.items() if not only or item[0] in only][part::parts]:
        path = folder / name
        try:
            if not path.is_file():
                problems.append(f"{path} is missing")
            elif path.stat().st_size != size:
                problems.append(f"{path} has {path.stat().st_size} bytes, the manifest says {size}")
            elif sha256_file(path) != checksum:
                problems.append(f"{path} has other content than when it was written")
        except OSError as error:        # a disk that can not read its sectors any more
            problems.append(f"{path} can not be read: {error.strerror}")
    if not problems and numbered:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):         # damaged, as another part finds
            step = json.loads((folder / "state.json").read_bytes())["step"]
            if step != int(numbered[1]):
                problems.append(f"{folder} is named as step {int(numbered[1])} and holds step {step}")
    return problems


def newest(run_dir, kind="light", faults=verify, say=True):
    """The newest checkpoint in a run's folder that verifies, or None; says which it skipped and why."""
    for step in steps_of(run_dir, kind):
        folder = folder_of(run_dir, kind, step)
        problems = faults(folder)
        if not problems:
            return folder
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        if say:
            print(f"skipping a damaged checkpoint: {problems[0]}{more}", file=sys.stderr, flush=True)
    return None
