"""
Checkpoints that are whole or not there.

    RUN/step_00000400/   light: a Hugging Face folder (engine/hf.py). For use and for exchange.
    RUN/full_00000400/   full: everything that a run continues from, written by torch.distributed.checkpoint. Its metadata
                         is a pickle, so it is trusted like code and read from the run's own out_dir only.

A full one holds state/ (weights and moments by parameter name, the random state of each rank), state.json (step,
tokens, hashes, and what else a loop counts: schedules and the order of data are functions of the step, and where a loss
has a scale it belongs in there) and the run's config.json and inputs.json, which say whose it is. How such a folder is
published, verified and found again: engine/manifest.py.

A full save may go on in the background: the state is copied, training goes on, and a thread writes the copy, publishes
it and only then removes older ones. Its ranks talk through a process group of their own: in the default group their
messages would be taken for those of the training step. There is one such save at a time.
"""
import contextlib
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from configurator import refuse
from engine import hf
from engine.files import json_text, read_json, sha256_file
from engine.layout import whole_parameters
from engine.manifest import PREFIX, abandon, folder_of, newest, publish, steps_of, verify
from engine.parallel import bare, barrier, from_all, from_main, refuse_once

# A world of one is no mistake here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# CheckpointException is a BaseException: `except Exception` would let it through.
FAILURES = (OSError, SafetensorError, RuntimeError, CheckpointException)
REFUSED = "one of its files could not be written"         # which a refusal has said before
RECORD = ("config.json", "inputs.json")         # what a run is made with, see engine/run.py

# --- writing ---------------------------------------------------------------------------------------------------------

_worker = ThreadPoolExecutor(1, "checkpoint")
_under_way = []             # at most one: (what it works on, its future)
_own = {}                   # the process group and the buffers of saves in the background, made when first needed


def save_light(run_dir, step, model, tokenizer, setup, extra=None):
    """Rank 0 writes the model as a Hugging Face folder; -> its path. extra: a dict for training.json
    (step, losses, hashes)."""
    wait()
    final = folder_of(run_dir, "light", step)

    sharded = setup.layout and not setup.layout.plain
    tensors = whole_parameters(bare(model), setup) if sharded else None

    def write():
        temporary = _new_folder(final)
        hf.save_model(temporary, bare(model), tokenizer, tensors)
        _complete(temporary, final, "training.json", json_text({"step": step, **(extra or {})}))
    with _refusing(final):
        on_main(write, setup)
    return final


def save_full(run_dir, step, modules, optimizers, state, setup, in_background=False, then=None):
    """Everything: weights and optimizer moments by parameter name, the random state of each rank, `state` (JSON).

    modules {name: module}, optimizers {module's name: optimizer, or a list of them}. in_background: returns as soon as
    all of it is copied; the writing is waited for by the next save, or by wait(). then(): what rank 0 does when the
    checkpoint has its name. -> the folder, which in the background is not there yet."""
    wait()
    final = folder_of(run_dir, "full", step)
    tensors = {**_tensors(modules, optimizers), **_random_state(setup)}
    text = json_text({"step": step, "world": setup.world, "threads": setup.threads, **state})
    group = _background_group(setup) if in_background else None

    def write():
        on_main(lambda: _new_folder(final), setup, group)
        dcp.save(tensors, checkpoint_id=_temporary(final) / "state", process_group=group, no_dist=setup.world == 1)
        on_main(lambda: _complete(_temporary(final), final, "state.json", text), setup, group)
        if then and setup.is_main:
            then()
    if in_background:
        tensors = _copied(tensors)
        do_in_background(write, final)
    else:
        with _refusing(final):
            write()
    return final


def do_in_background(work, what):
    """work() in the thread that saves; an error in it ends the run at the next save or wait()."""
    wait()
    _under_way.append((what, _worker.submit(work)))


def wait():
    """Waits for the save in the background, if there is one; refuses when it has failed."""
    while _under_way:
        final, future = _under_way.pop()
        with _refusing(final):
            future.result()


def _background_group(setup):
    if setup.world > 1 and "group" not in _own:
        _own["group"] = dist.new_group(backend="gloo")
    return _own.get("group")


def _copied(tensors):
    """The tensors as they are now, in memory of the CPU that is kept for the next save: where the machine has to find
    that much memory each time, it takes longer than the copying itself."""
    kept, copies = _own.pop("copies", {}), {}
    kind = lambda t: (type(t), t.shape, t.dtype, getattr(t, "placements", None), getattr(t, "device_mesh", None))
    for name, tensor in tensors.items():
        copy = kept.get(name)
        if copy is None or kind(copy) != kind(tensor):
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        copies[name] = copy.copy_(tensor)
    _own["copies"] = copies
    return copies


def on_main(work, setup, group=None):
    """What work() gives, on rank 0, and None on the others. When it fails there, the others fail as well; when it is
    refused, they end, and do not bury the reason under a complaint about a lost connection."""
    result = failure = None
    try:
        result = work() if setup.is_main else None
    except (*FAILURES, SystemExit) as error:
        failure = error
    problem = from_main(failure and _first_line(failure), setup, group)
    if failure:
        raise failure
    if problem:
        raise SystemExit(2) if problem == REFUSED else RuntimeError(problem)
    return result


def _temporary(final):
    return final.with_name(final.name + ".tmp")


def _new_folder(final):
    shutil.rmtree(_temporary(final), ignore_errors=True)
    _temporary(final).mkdir(parents=True)
    return _temporary(final)


def _complete(temporary, final, name, text):
    """The last files of a checkpoint, then its name. What the run was made with goes into each of them: in short, and
    into a full one all that a resume compares (engine/run.py)."""
    (temporary / name).write_text(text, encoding="utf-8")
    for made_with in ("config_hash.txt", *RECORD * (name == "state.json")):
        if (final.parent / made_with).exists():
            shutil.copyfile(final.parent / made_with, temporary / made_with)
    publish(temporary, final)


@contextlib.contextmanager
def _refusing(final):
    try:
        yield
    except (*FAILURES, SystemExit) as error:
        free = shutil.disk_usage(final.parent).free if final.parent.exists() else 0
        shutil.rmtree(_temporary(final), ignore_errors=True)
        refuse(f"the checkpoint {final} could not be written: {_first_line(error)} ({free:,} bytes are free on that "
               "disk). The earlier checkpoints are as they were; make room (or mend the folder's permissions) and give "
               "the same command again, it continues from the newest.")


def _first_line(error):
    if isinstance(error, SystemExit):
        return REFUSED
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if "unexpected pos" in str(error):          # all that torch.save says when its file could not take what it wrote
        return "a file could not take all that was written to it (most likely: No space left on device)"
    return (str(error) or type(error).__name__).splitlines()[0]


def prune(run_dir, kind, keep, keep_best=0):
    """Removes all but the newest `keep` checkpoints (0: keeps all), and but the `keep_best` with the lowest held-out
    loss among those that were measured when they were saved. What was set aside goes once the run is there again.

    Only what is read now and found sound counts as kept: nothing is removed for the sake of a broken one."""
    steps, set_aside = steps_of(run_dir, kind), [*Path(run_dir).glob(f"{PREFIX[kind]}_????????.abandoned-*")]
    if not keep or len(steps) <= keep and not set_aside:
        return
    sound = [step for step in steps if not verify(folder_of(run_dir, kind, step))]
    for folder in set_aside:
        if int(folder.stem[-8:]) <= max(sound, default=-1):
            shutil.rmtree(folder, ignore_errors=True)
    if len(sound) < keep:
        return
    measured = {step: read_json(folder_of(run_dir, kind, step) / "training.json", missing={}).get("val_loss")
                for step in sound} if keep_best else {}
    best = sorted((loss, step) for step, loss in measured.items() if loss is not None)[:keep_best]
    for step in steps:
        if step < sound[keep - 1] and step not in [step for _, step in best]:
            folder = folder_of(run_dir, kind, step)
            try:
                # By another name first: a removal that is interrupted would leave a damaged checkpoint.
                shutil.rmtree(_temporary(folder), ignore_errors=True)
                shutil.rmtree(folder.rename(_temporary(folder)))
            except OSError as error:
                print(f"note: {folder} could not be removed: {error.strerror}", file=sys.stderr, flush=True)


# --- reading ---------------------------------------------------------------------------------------------------------

def resume(run_dir, modules, optimizers, setup, elsewhere="", trust_state=False):
    """Continues from the newest full checkpoint that verifies: fills modules and optimizers, the random state, and
    returns its state dict; None when there is nothing to continue from. A run that has none yet may take one of
    another run, `elsewhere`.

    Rank 0 decides which one, for all; each rank reads and compares other files of it. Checkpoints that lie ahead of it
    belong to a past that will not happen, and keep another name; half-written folders of a killed run are removed."""
    wait()
    folder = _newest_for_all(run_dir, setup)
    if folder is None:
        on_main(lambda: refuse(*_none_sound(run_dir)), setup)
    if folder is None and elsewhere:
        folder = Path(elsewhere)
        if problems := _faults_for_all(folder, setup):
            refuse_once(setup, *problems, f"{folder}: nothing is loaded from it.")
    state = None
    if folder:
        refuse_foreign(folder, run_dir, trust_state, setup)
        state = load_full(folder, modules, optimizers, setup)
        setup.say(f"continuing from {folder}, after step {state['step']}")
    if setup.is_main:
        for kind in PREFIX:
            for step in steps_of(run_dir, kind):
                if state is None or step > state["step"]:
                    abandon(folder_of(run_dir, kind, step))
        for temporary in Path(run_dir).glob("*_????????.tmp"):
            shutil.rmtree(temporary)
    barrier(setup)
    return state


def resume_problems(elsewhere, run_dir):
    """A sentence when `elsewhere`, from which a run shall continue that has no full checkpoint yet, is none."""
    if not elsewhere or steps_of(run_dir, "full") or (path := Path(elsewhere)).joinpath("state.json").exists():
        return []
    inside = [str(folder_of(each, "full", step)) for each in (path, *path.glob("*/"))
              for step in steps_of(each, "full")[:1]]
    what = ("does not exist" if not path.exists() else f"holds some: name one, {' or '.join(inside)}" if inside else
            f"is a light one, which has weights only: --init_from={elsewhere}" if (path / "training.json").exists() else
            "is none")
    return [f"resume_from takes a full checkpoint (a folder full_NNNNNNNN), and {elsewhere} {what}"]


def _newest_for_all(run_dir, setup):
    """The newest full checkpoint that verifies. Refuses when ranks see different ones: with a folder on each machine's
    own disk, some would continue and others begin anew."""
    manifests = {step: folder_of(run_dir, "full", step) / "manifest.json" for step in steps_of(run_dir, "full")}
    seen = from_all({step: sha256_file(path) for step, path in manifests.items() if path.exists()}, setup)
    if unlike := [rank for rank, theirs in enumerate(seen) if theirs != seen[0]]:
        shown = lambda rank: ", ".join(f"{step}" for step in seen[rank]) or "none"
        refuse_once(setup, f"{run_dir}: the processes do not see the same full checkpoints: rank 0 those of steps "
                    f"{shown(0)}; rank {unlike[0]} {shown(unlike[0])}" + ", with other content" * (
                        seen[0].keys() == seen[unlike[0]].keys()) + ". Every machine needs the same out_dir, on a disk "
                    "that all share.")
    return newest(run_dir, "full", lambda folder: _faults_for_all(folder, setup), say=setup.is_main)


def _none_sound(run_dir):
    """What to do where no full checkpoint verifies, when there are some. Rank 0 alone asks, and the others wait for it:
    it reads a whole light checkpoint, and torchrun ends it as soon as another rank has ended."""
    if not (broken := steps_of(run_dir, "full")):
        return []
    light = newest(run_dir, "light", verify, say=False)
    return [f"no full checkpoint in {run_dir} is sound (steps {', '.join(map(str, broken))}), so the run can not go "
            f"on. Put a sound copy back; or remove {run_dir} and begin anew" + f"; or, in another --out_dir, take the "
            f"weights of {light} as --init_from" * bool(light)]


def _faults_for_all(folder, setup):
    """verify(), but each rank reads its share of the files."""
    return [problem for problems in from_all(verify(folder, setup.rank, setup.world), setup) for problem in problems]


def refuse_foreign(folder, run_dir, trust_state, setup):
    """Refuses a full checkpoint from outside the run's out_dir: reading it can run any code that its writer put in."""
    if trust_state or Path(run_dir).resolve().parent in folder.resolve().parents:
        return
    refuse_once(setup, f"{folder} lies outside this run's out_dir. A full checkpoint is trusted like code: what "
                "describes its tensors is a pickle, which can run anything when it is opened. From others take light "
                "checkpoints (step_NNNNNNNN), with --init_from. If you wrote this one yourself: --trust_state=True")


@torch.no_grad()
def load_full(folder, modules, optimizers, setup):
    """Fills everything from a full checkpoint; -> the state dict that was saved. Works at another number of ranks too:
    weights and moments are the same, the random state of ranks that did not exist is drawn anew."""
    state = read_json(folder / "state.json")
    _make_moments(optimizers)
    tensors = _tensors(modules, optimizers)
    known_rank = setup.rank < state["world"]
    if known_rank:
        tensors.update(_random_state(setup))
    try:
        dcp.load(tensors, checkpoint_id=folder / "state", no_dist=setup.world == 1)
    except (CheckpointException, RuntimeError, ValueError) as error:
        refuse(f"{folder} does not fit this model: {_first_line(error)}")
    if known_rank:
        torch.set_rng_state(tensors[f"random.cpu.{setup.rank}"])
        if setup.device.type == "cuda":
            torch.cuda.set_rng_state(tensors[f"random.cuda.{setup.rank}"])
    if state["world"] != setup.world:
        setup.say(f"note: saved by {state['world']} processes, continued by {setup.world}: the same data in the same "
                  "order, but other rounding, and other dropout")
    if state["threads"] != setup.threads:
        setup.say(f"note: saved with {state['threads']} threads, continued with {setup.threads}: sums are cut "
                  f"elsewhere, so the last bits differ; --threads={state['threads']} continues exactly")
    return state


def _tensors(modules, optimizers):
    """One flat {name: tensor} over weights and moments, keyed by parameter names and not by their order."""
    tensors = {}
    for label, module in modules.items():
        module = bare(module)
        tensors.update({f"{label}.{name}": p.detach() for name, p in module.named_parameters()})
        for optimizer in _each(optimizers.get(label)):
            for name, parameter in module.named_parameters():
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{label}.{name}.{key}"] = value
    return tensors


def _each(optimizers):
    """A module may have no optimizer, one, or a list of several."""
    return optimizers if isinstance(optimizers, list) else [optimizers] if optimizers else []


def _make_moments(optimizers):
    """Gives fresh optimizers the empty moments that a load can fill. (torch's own helper does it by taking a step with
    zero gradients, which moves the step count from 0 to 1 when there turns out to be nothing to load.)"""
    for optimizer in (each for several in optimizers.values() for each in _each(several)):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if isinstance(optimizer, torch.optim.Muon):
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
            elif not optimizer.state[parameter]:
                on_device = parameter.device if optimizer.defaults.get("fused") else "cpu"
                optimizer.state[parameter].update(
                    step=torch.zeros((), dtype=torch.float32, device=on_device),
                    exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))


def _random_state(setup):
    state = {f"random.cpu.{setup.rank}": torch.get_rng_state()}
    if setup.device.type == "cuda":
        state[f"random.cuda.{setup.rank}"] = torch.cuda.get_rng_state()
    return state
