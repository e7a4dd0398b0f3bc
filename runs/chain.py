"""
Runs the stages one after the other and records what each took; runs/demo.sh calls this.

    python runs/chain.py [config/demo.py] [more config files] [--key=value of train.py's keys, as --out_dir=out/two]

An override goes to every stage that has the key; what is for one stage alone is better written in a config file.
Every stage decides by itself whether it is done, to be continued, or to be begun, so this list knows nothing of that.
Appends to out_dir/timing.jsonl one line per call that did something: stage, wall and CPU seconds, exit status. The time
of a stage is the sum of its calls up to the one that finished (runs/report.py adds them up); a call that found its
stage done is not recorded. When all are done, out_dir/chain.json gets a hash of what that depends on; while that stays
as it is, another call starts no stage.
"""
import contextlib
import glob
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configurator import configure, read_schema
from engine.files import FORMAT_VERSION, lock_folder, read_json, write_json

STAGES = [
    ("documents", "prepare_data.py", "web archives to clean documents"),
    ("tokenizer", "train_tokenizer.py", "a vocabulary made from them"),
    ("tokens", "prepare_data.py", "the documents as token ids"),
    ("chat data", "prepare_chat.py", "questions, answers and preferences about them"),
    ("pretrain", "train.py", "a Llama that continues text"),
    ("sft", "sft.py", "the same, answering questions"),
    ("reward", "reward.py", "a model of which answer is preferred"),
    ("ppo", "rlhf.py", "answers that are preferred more"),
    ("evaluate", "evaluate.py", "every model, measured"),
    ("report", "runs/report.py", "the table"),
]


def changed_since(moment, *folders):
    """Whether a stage has written anything, but for what it writes before it knows that it is done."""
    paths = (path for folder in folders for path in Path(folder).rglob("*") if path.is_file())
    return any(path.stat().st_mtime > moment for path in paths
               if path.name not in (".lock", "config.json", "timing.jsonl"))


def run(command, lock):
    """Runs one stage. Returns its exit status, wall seconds and CPU seconds (its workers' included)."""
    before, asked = os.times(), []
    child = subprocess.Popen(command, pass_fds=[lock.fileno()])
    # A kill reaches only us, so it is passed on. Ctrl-C reaches the stage too, since it has our terminal; SIGINT
    # sent to us does not: a stage that still runs a while later is told. Either way we stay until it has ended,
    # to record what it took.
    old = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: asked.append(time.monotonic())),
           signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: child.terminate())}
    while (status := child.poll()) is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)
        if asked and time.monotonic() - asked[0] > 3:
            child.terminate()
            asked.clear()
    for number, handler in old.items():
        signal.signal(number, handler)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return status, after.elapsed - before.elapsed, cpu


def words_for(script, arguments):
    """The config files, and those overrides that the script knows."""
    keys = read_schema(ROOT / script)
    return [word for word in arguments if not word.startswith("--") or word[2:].partition("=")[0] in keys]


def standing(arguments):
    """A hash of all that decides whether there is anything left to do: the settled configuration of each stage; the
    programs; and name, size and time of each file in the folders, or that a configuration names."""
    facts, named = [sys.version], {f"{glob.escape(str(ROOT))}/{files}" for files in ("*.py", "*/*.py", "*/*.json*")}
    for _, script, _ in STAGES:
        settled = configure({"__file__": str(ROOT / script), "__doc__": ""}, words_for(script, arguments))
        facts.append([script, *settled.items()])
        for _, value in settled.items():
            texts = value if isinstance(value, (list, tuple, dict)) else [value]
            named.update(text for text in texts if isinstance(text, str))
    for name in sorted(named):
        for path in [name] if os.path.exists(name) else glob.glob(name, recursive=True):
            for file in sorted(Path(path).rglob("*")) if os.path.isdir(path) else [Path(path)]:
                if file.name not in (".lock", "timing.jsonl", "chain.json") and file.is_file():
                    facts.append([str(file), file.stat().st_size, file.stat().st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def main(arguments):
    if not any(word.endswith(".py") for word in arguments):
        arguments = ["config/demo.py", *arguments]
    # train.py's keys, by its name only: importing it would import torch.
    config = configure({"__file__": str(ROOT / "train.py"), "__doc__": __doc__}, arguments)
    out = Path(config.out_dir)
    # The stages get the lock too: the stage of a call that ended without a word (kill -9) goes on, and is waited for.
    lock = lock_folder(out / "chain", wait=True)
    begin, record = time.time(), out / "chain.json"
    done = read_json(record, {}).get("standing") == standing(arguments)
    for number, (stage, script, sentence) in enumerate(STAGES, 1):
        if done:
            print(f"{number}/{len(STAGES)}  {script}: already done")
            continue
        print(f"\n=== {number}/{len(STAGES)}  {script}: {sentence}", flush=True)
        os.utime(lock.fileno())     # the file system's own clock, which may lag behind time.time()
        start = os.stat(lock.fileno()).st_mtime
        command = [sys.executable, str(ROOT / script), *words_for(script, arguments)]
        status, wall, cpu = run(command, lock)
        if stage != "report" and changed_since(start, config.data_dir, out):
            line = {"format_version": FORMAT_VERSION, "stage": stage, "wall_seconds": round(wall, 2),
                    "cpu_seconds": round(cpu, 2), "exit": status}
            with contextlib.suppress(OSError), open(out / "timing.jsonl", "a") as timing:     # a full disk was said
                timing.write(json.dumps(line) + "\n")
        if status:
            again = shlex.join(["bash", "runs/demo.sh", *sys.argv[1:]])
            reason = "was interrupted" if status < 0 or status in (75, 130, 143) else f"ended with exit status {status}"
            print(f"\n{script} {reason}. What is done stays done; to continue:  {again}", file=sys.stderr)
            raise SystemExit(128 - status if status < 0 else status)
    if not done:
        write_json(record, {"standing": standing(arguments)})
    elif (out / "report.txt").exists():
        print("\n" + (out / "report.txt").read_text(encoding="utf-8"))
    print(f"\n{time.time() - begin:.0f} seconds in this call. Talk to the model:\n\n"
          f"  .venv/bin/python sample.py {shlex.join(words_for('sample.py', arguments))} --chat=True\n")


if __name__ == "__main__":
    os.chdir(ROOT)     # config files and folders are named from here
    main(sys.argv[1:])
