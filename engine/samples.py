"""
What a run really read: the sample log, and the proof that it is what was planned (`doctor.py --order=DIR`).

    RUN/samples/rank_NNNNN.jsonl    a line a step: attempt, step, plan, rank, world, share (which, of how many), blocks

Each rank writes its own file, only ever at the end, a line in one write: a kill leaves half a line at most.
"""
import functools
import json
from pathlib import Path

import numpy as np

from configurator import refuse
from engine.files import FORMAT_VERSION, fits, json_lines, open_to_append, read_json, read_saved
from engine.loader import open_mixture, plan_step
from engine.manifest import folder_of, steps_of, verify

LINE = {"attempt": int, "step": int, "plan": int, "world": int, "blocks": [int], "share": [int]}

SETTINGS = {"block_size": int, "batch_tokens": int, "seed": int, "data_dir": str, "data_mix": dict | None}


def path_of(run_dir, rank):
    return Path(run_dir) / "samples" / f"rank_{rank:05d}.jsonl"


def open_samples(run_dir, setup):
    """This rank's sample log, to append to."""
    path = path_of(run_dir, setup.rank)
    try:
        path.parent.mkdir(exist_ok=True)
        return open_to_append(path)
    except OSError as error:
        refuse(f"cannot write {path}: {error.strerror}. Without --log_samples=True the run does not need it.")


def log_sample(file, attempt, done, plan, blocks, setup):
    """Appends that step number `done` of training took this rank's share of these blocks, those of step `plan` of the
    plan. To be called before the step is saved."""
    line = {"format_version": FORMAT_VERSION, "attempt": attempt, "step": done, "plan": plan, "rank": setup.rank,
            "world": setup.world, "share": [setup.dp_rank, setup.dp], "blocks": blocks[setup.dp_rank::setup.dp].tolist()}
    try:
        file.write(json.dumps(line).encode() + b"\n")
    except OSError as error:
        refuse(f"cannot write {file.name}: {error.strerror}. The checkpoints are as they were; make room and give the "
               "same command again, it continues from the newest.")


def read_samples(path):
    """{step: line} of one rank: of each step the last line, and none that a later line went back behind. What is no
    such line is left out."""
    lines = {}
    for line in json_lines(path):
        if fits(line, LINE) and len(line["share"]) == 2 and min(line["share"][1], line["world"]) >= 1:
            while lines and next(reversed(lines)) >= line["step"]:
                lines.popitem()
            lines[line["step"]] = {**line, "blocks": np.array(line["blocks"])}
    return lines


def order_problems(folder):
    """Proves from the sample logs that a run of train.py, in this folder or out_dir, took exactly the planned blocks in
    every step up to its newest full checkpoint, and says so; -> else a sentence about the first wrong step. Refuses
    where there is nothing to prove.

    The plan is computed anew from config.json, the token shards, and the windows that the checkpoint says were skipped.
    Of a step that was done more than once the last time counts, by however many processes: that is what the weights
    have learned. Steps behind the checkpoint are not looked at, since they will be done again."""
    run = next((path for path in (Path(folder), Path(folder, "pretrain")) if (path / "config.json").exists()), None)
    if run is None:
        refuse(f"--order={folder}: no run there. Expected an out_dir with pretrain/ in it, or that folder, with a "
               "config.json.")
    record = read_saved(run / "config.json")
    if record["script"] != "train":
        refuse(f"{run} is a run of {record['script']}.py; only train.py keeps a record of which blocks it took")
    saved = [step for step in steps_of(run, "full") if not verify(folder_of(run, "full", step), only=["state.json"])]
    refuse(*(f"{run} has no {what}" for what, there in (
        ("full checkpoint yet: no step is final", saved),
        ("samples/: it was run without --log_samples=True", (run / "samples").is_dir())) if not there))
    config, state = record["config"], read_json(folder_of(run, "full", saved[0]) / "state.json")
    if not fits(config, SETTINGS) or not 0 < config["block_size"] <= config["batch_tokens"]:
        refuse(f"{run}/config.json is damaged: block_size, batch_tokens, seed, data_dir or data_mix can not train")
    data = open_mixture(config["data_dir"], config["data_mix"], "train", config["block_size"])
    if data.data_hash[:16] != (was := str(read_json(run / "inputs.json")["data"])[:16]):
        return [f"the token shards that {run} was made from are gone: their hash was {was}, now it is "
                f"{data.data_hash[:16]}"]
    windows = [decision["window"] for decision in state.get("rollbacks", [])]
    log_of = functools.cache(lambda rank: read_samples(path_of(run, rank)))
    most = 0
    for step in range(1, state["step"] + 1):
        plan = plan_step(step - 1, windows)
        planned = data.step_blocks(plan, config["batch_tokens"] // config["block_size"], config["seed"])
        world = log_of(0).get(step, {"world": 1})["world"]
        most = max(most, world)
        if wrong := step_problem([log_of(rank).get(step) for rank in range(world)], plan, planned):
            return [f"{run}: of {state['step']} steps, number {step} is the first wrong one: {wrong}"]
    print(f"proven   {run}: in each of {state['step']} steps the planned blocks, by up to {most} processes")
    return []


def step_problem(lines, plan, planned):
    """What is wrong with a step, a sentence, or ''. lines: of all ranks, None where one has none."""
    shared = []
    for rank, line in enumerate(lines):
        if line is None:
            return f"rank {rank} of {len(lines)} has no line for it"
        if (line["attempt"], line["world"]) != (lines[0]["attempt"], len(lines)):
            return (f"rank {rank} did it in attempt {line['attempt']} as one of {line['world']}, rank 0 in attempt "
                    f"{lines[0]['attempt']} as one of {len(lines)}")
        if line["plan"] != plan:
            return f"rank {rank} was in step {line['plan']} of the plan, it should have been {plan}"
        share, shares = line["share"]                               # ranks that hold one model together have one share
        shared.append((share, shares))
        expected = planned[share::shares]
        if len(line["blocks"]) != len(expected):
            return f"rank {rank} took {len(line['blocks'])} blocks, planned are {len(expected)}"
        if len(other := np.flatnonzero(line["blocks"] != expected)):
            return f"rank {rank} took block {line['blocks'][other[0]]} as number {other[0]}, planned is {expected[other[0]]}"
    if {*shared} != {(share, shared[0][1]) for share in range(shared[0][1])}:
        return f"the ranks took the shares {sorted({*shared})}, which are not all, or not of one division"
    return ""
