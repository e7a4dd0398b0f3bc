"""
Checkpoints that are whole or not there.

    RUN/step_00000400/   light: a Hugging Face folder (engine/hf.py). For use and for exchange.
    RUN/full_00000400/   full: everything that a run continues from, written by torch.distributed.checkpoint. Its metadata
                         is a pickle, so it is trusted like code and read from the run's own folder only.

How such a folder is published, verified and found again: engine/manifest.py.
"""
import contextlib
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from configurator import refuse
from engine import hf
from engine.files import read_json, write_json
from engine.manifest import PREFIX, abandon, folder_of, newest, publish, steps_of
from engine.parallel import bare, barrier, from_main

# A world of one is no mistake here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# --- writing ---------------------------------------------------------------------------------------------------------

def save_light(run_dir, step, model, tokenizer, setup, extra=None):
    """Rank 0 writes the model as a Hugging Face folder; -> its path. extra: a dict for training.json (step, losses, hashes)."""
    final = folder_of(run_dir, "light", step)
    with _published(final, setup) as folder:
        if setup.is_main:
            hf.save_model(folder, bare(model), tokenizer)
            write_json(folder / "training.json", {"step": step, **(extra or {})})
    return final


def save_full(run_dir, step, modules, optimizers, state, setup):
    """Everything: weights and optimizer moments by parameter name, the random state of each rank, `state` (JSON).

    modules {name: module}, optimizers {module's name: optimizer, or a list of them}. -> the folder."""
    final = folder_of(run_dir, "full", step)
    with _published(final, setup) as folder:
        tensors = {**_tensors(modules, optimizers), **_random_state(setup)}
        dcp.save(tensors, checkpoint_id=folder / "state", no_dist=setup.world == 1)
        if setup.is_main:
            write_json(folder / "state.json", {"step": step, "world": setup.world, "threads": setup.threads, **state})
    return final


@contextlib.contextmanager
def _published(final, setup):
    """A temporary folder for every rank to write into; when all have, it becomes `final` in one rename."""
    temporary = final.with_name(final.name + ".tmp")
    try:
        if setup.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier(setup)
        yield temporary
        barrier(setup)
        if setup.is_main:
            publish(temporary, final)
        barrier(setup)
    # CheckpointException is a BaseException: `except Exception` would let it through.
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        refuse(f"the checkpoint {final} could not be written: {_first_line(error)}. The earlier checkpoints are as they were; "
               "make room (or mend the folder's permissions) and give the same command again, it continues from the newest.")


def _first_line(error):
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error) or type(error).__name__).splitlines()[0]


def prune(run_dir, kind, keep):
    """Removes all but the newest `keep` checkpoints that are whole (0: keeps all). Broken ones never count as kept."""
    if not keep:
        return
    whole = [step for step in steps_of(run_dir, kind) if (folder_of(run_dir, kind, step) / "manifest.json").exists()]
    for step in whole[keep:]:
        shutil.rmtree(folder_of(run_dir, kind, step))


# --- reading ---------------------------------------------------------------------------------------------------------

def resume(run_dir, modules, optimizers, setup):
    """Continues from the newest full checkpoint that verifies: fills modules and optimizers, the random state, and returns
    its state dict; None when there is nothing to continue from. Rank 0 decides which one, for all.

    Checkpoints that lie ahead of it belong to a past that will not happen, and keep another name; half-written folders of
    a killed run are removed."""
    folder = from_main(newest(run_dir, "full") if setup.is_main else None, setup)
    state = load_full(folder, modules, optimizers, setup) if folder else None
    if setup.is_main:
        if state is not None:
            print(f"continuing from {folder}, after step {state['step']}", flush=True)
        for kind in PREFIX:
            for step in steps_of(run_dir, kind):
                if state is None or step > state["step"]:
                    abandon(folder_of(run_dir, kind, step))
        for temporary in Path(run_dir).glob("*_????????.tmp"):
            shutil.rmtree(temporary)
    barrier(setup)
    return state


@torch.no_grad()
def load_full(folder, modules, optimizers, setup):
    """Fills everything from a full checkpoint; -> the state dict that was saved. Works at another number of ranks too: weights
    and moments are the same, the random state of ranks that did not exist is drawn anew."""
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
        setup.say(f"note: saved by {state['world']} processes, continued by {setup.world}: the same data in the same order, but other "
                  "rounding, and other dropout")
    if state["threads"] != setup.threads:
        setup.say(f"note: saved with {state['threads']} threads, continued with {setup.threads}: sums are cut elsewhere, so the "
                  f"last bits differ; --threads={state['threads']} continues exactly")
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
    """Gives fresh optimizers the empty moments that a load can fill. (torch's own helper does it by taking a step with zero
    gradients, which moves the step count from 0 to 1 when there turns out to be nothing to load.)"""
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
