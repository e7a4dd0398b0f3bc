"""What every training stage does with its folder: take it, tell if it is new, half done or done, and save into it."""
import contextlib
import hashlib
import json
import os
import socket
import time
from pathlib import Path

import torch

from configurator import changed_keys, refuse
from engine import checkpoint, parallel
from engine.alive import TRY_AGAIN
from engine.checkpoint import on_main
from engine.files import gone, lock_folder, read_json, read_saved, sha256_file, write_atomic, write_json
from engine.layout import local
from engine.manifest import folder_of, steps_of, verify
from engine.parallel import refuse_once
from engine.preflight import preflight


def open_run(config, stage, setup, n_params=0, in_full=0, **made_from):
    """Takes out_dir/stage for this run; -> (folder, lock), or (folder, None) when the run is finished. Of one that is
    not, engine/preflight.py looks at all ranks and machines first. For the room on the disk: n_params of the model that
    a light checkpoint holds; numbers in a full one, by default its weights and AdamW's two moments.

    made_from: {what: path} of the files and folders that it reads, or a text that stands for their content. The lock
    lives as long as the object does: keep it. Refuses a folder that another process uses, and one that was begun with
    other settings or from other inputs: neither to continue it nor to call it done would be right."""
    folder = Path(config.out_dir) / stage
    prints = {what: fingerprint(path) for what, path in made_from.items()}
    if not parallel.from_main((folder / "result.json").exists(), setup):
        preflight(config, folder, prints, setup, {"light": n_params, "full": in_full or 3 * n_params})
    lock = on_main(lambda: lock_folder(folder), setup) or "held by rank 0"
    refuse_other_disk(folder, setup)
    leave_again(folder, setup)
    on_main(lambda: refuse(*begun_otherwise(folder, config, prints, made_from)), setup)
    if (folder / "result.json").exists():
        setup.say(f"{folder}: already done; to do it anew, remove the folder or choose another --out_dir")
        parallel.finish(setup)
        return folder, None
    parallel.barrier(setup)             # nobody writes before everybody has compared
    on_main(lambda: record(config, folder, prints), setup)
    return folder, lock


def begun_otherwise(folder, config, prints, made_from):
    """Sentences that refuse to go on in a run's folder: it, or a full checkpoint in it, is of other settings or inputs,
    or nothing says of which. Of damaged checkpoints nothing: resume skips them and says so."""
    def differences(place):
        saved, inputs = read_saved(place / "config.json"), read_json(place / "inputs.json", missing=prints)
        changed = [("script", saved["script"], config.script)] * (saved["script"] != config.script)
        changed += changed_keys(saved, config) if not changed else []
        contents = [f"{place} was begun with {what}{'' if isinstance(path, str) else f' ({path})'} of other content: "
                    f"its hash was {inputs.get(what)}, now it is {prints[what]}" for what, path in made_from.items()
                    if inputs.get(what) != prints[what]]
        return [f"{place} was begun with {key} = {old!r}, now it is {new!r}" for key, old, new in changed] + contents

    further = hasattr(config, "init_from") and (" What it came to can be trained further there, in the same shape, "
                                                f"with --init_from={folder}.")
    advice = ("Give the old value, or put the old content back, to continue that run; or start anew: remove the "
              f"folder, or give another --out_dir.{further or ''}")
    known = (folder / "config.json").exists()
    if known and (found := differences(folder)):
        return [*found, advice]
    fulls = [folder_of(folder, "full", step) for step in steps_of(folder, "full")]
    fulls = [full for full in fulls if not verify(full, only=("state.json", *checkpoint.RECORD))]
    foreign = [sentence for full in fulls for sentence in (
        differences(full) if (full / "config.json").exists() else [f"{full} does not say which run it is of"])]
    if foreign:
        advice = ("What is another run's, move away: train.py continues from it with --resume_from, in a new "
                  "--out_dir. " + advice)
    elif not known and (folder / "result.json").exists() and not fulls:
        foreign = [f"{folder} holds a finished run, and nothing there says which: its config.json is missing"]
    elif not known and fulls and not foreign:
        print(f"note: {folder}/config.json is missing; the full checkpoints say that they are of this run")
    return foreign and [*foreign, advice]


def may_requeue(folder, done):
    """What a job's script looks for, since torchrun makes 1 of every exit status: this run can go on, and wants to."""
    write_atomic(folder / "requeue", f"asked to leave, and saved after step {done}: the same command continues\n")


def leave_again(folder, setup):
    """Ends what torchrun --max-restarts has started again although the run was asked to leave. Otherwise this is a new
    start, and the request is forgotten."""
    asked = on_main(lambda: (folder / "requeue").exists(), setup)
    if parallel.from_main(asked and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0", setup):
        setup.say("the run was asked to leave: not started again")
        parallel.finish(setup)
        raise SystemExit(TRY_AGAIN)
    on_main(lambda: (folder / "requeue").unlink(missing_ok=True), setup)


def refuse_other_disk(folder, setup, patience=5):
    """Refuses when a rank does not see what rank 0 does: a folder on each machine's own disk, or a relative one with
    other current folders. The lock file that rank 0 has just written tells; a network disk may show it seconds late."""
    path = folder / ".lock"
    seen = lambda: path.read_text() if path.exists() else None
    theirs, deadline = parallel.from_main(seen() if setup.is_main else None, setup), time.monotonic() + patience
    while (wrong := seen() != theirs) and time.monotonic() < deadline:
        time.sleep(0.1)
    where = f"rank {setup.rank} on {socket.gethostname()} does not see the {folder.resolve()} that rank 0 does"
    refuse_once(setup, *(f"{where} ({theirs.strip()}): every process needs the same out_dir, on a disk that all share"
                         for where in parallel.from_all(wrong and where, setup) if where))


def record(config, folder, prints):
    """What the run is made with: config.json and inputs.json for programs; config_hash.txt, of which every checkpoint
    gets a copy, in a few lines for people."""
    config.save(folder)
    write_json(folder / "inputs.json", prints)
    facts = {"config": config.hash, **prints, "commit": read_json(folder / "config.json")["commit"]}
    write_atomic(folder / "config_hash.txt", "".join(f"{what} {value}\n" for what, value in facts.items()))


def fingerprint(path):
    """16 hex digits of what a file or a model's folder holds; of a folder with a manifest, what that lists, but for the
    commit that it was made by. A text stands for itself."""
    if isinstance(path, str):
        return path
    path = Path(path)
    manifest = path / "manifest.json"
    if path.is_file():
        facts = sha256_file(path)
    elif manifest.exists():
        listed = read_json(manifest, like={"files": dict})["files"]
        facts = json.dumps([listed[name] for name in sorted(listed) if name != "config_hash.txt"], sort_keys=True)
    else:
        facts = "".join(sha256_file(file) for file in sorted(path.iterdir()) if file.suffix in (".json", ".safetensors"))
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def refuse_missing(setup, wanted, *advice):
    """Refuses when files or folders are missing, all of them at once. wanted: {path: what it holds}; advice: how to
    come by them."""
    if missing := [f"{path} does not exist: no {what}" for path, what in wanted.items() if not path.exists()]:
        refuse_once(setup, *missing, *advice)


def save_when_due(folder, done, total, config, modules, optimizers, tokenizer, facts, setup, leaving=False,
                  plain=contextlib.nullcontext):
    """Saves after step `done` of `total` what the intervals ask for, when leaving a full checkpoint in any case; -> the
    seconds that this has stopped the loop, 0.0 when nothing was due. Then removes what config.keep and keep_best do not
    keep.

    Light before full: where a full checkpoint is, the light one of its step is too. The first of modules is the model
    that a light checkpoint holds, as it is within plain(model). Weights that are not finite are never saved. A stage
    without these keys saves no light checkpoints here, and keeps one."""
    due = [kind for kind, every in (("light", getattr(config, "save_light", 0)), ("full", config.save_full))
           if done == total or every and done % every == 0 or leaving and kind == "full"]
    if not due:
        return 0.0
    began = time.perf_counter()
    refuse_once(setup, *gone(folder))
    model = next(iter(modules.values()))
    if not parallel.on_all(all(torch.isfinite(local(p)).all() for p in model.parameters()), setup):
        refuse_once(setup, f"step {done}: weights are no longer finite, so nothing is saved; the checkpoints before "
                           "are sound. Lower --learning_rate, or look at the steps before this one in log.jsonl.")

    def tidy():
        for kind in due:
            best = getattr(config, "keep_best", 0) if kind == "light" else 0    # the other kind is there to continue from
            checkpoint.prune(folder, kind, getattr(config, "keep", 1), best)
    if "light" in due:
        with plain(model):
            checkpoint.save_light(folder, done, model, tokenizer, setup, facts)
    if "full" in due:
        checkpoint.save_full(folder, done, modules, optimizers, facts, setup, getattr(config, "async_save", True), tidy)
    elif setup.is_main:
        checkpoint.do_in_background(tidy, folder)
    if done == total:
        checkpoint.wait()
    return time.perf_counter() - began


def end_step(run, done, total, config, modules, optimizers, tokenizer, facts, setup, monitor, leaving,
             plain=contextlib.nullcontext):
    """save_when_due, which is logged. leaving: the process ends, with the exit status that says "the same command
    continues"."""
    if saving := save_when_due(run, done, total, config, modules, optimizers, tokenizer, facts, setup, leaving, plain):
        monitor.log(done, save_seconds=saving)
    if leaving and done < total:
        checkpoint.wait()
        setup.say(f"asked to leave: step {done} is saved in {folder_of(run, 'full', done)}, the same command "
                  "continues")
        monitor.close()
        on_main(lambda: may_requeue(run, done), setup)
        parallel.finish(setup)
        raise SystemExit(TRY_AGAIN)
