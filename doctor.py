"""
Looks into the folders of runs, finished or not, and says what is wrong there. It changes nothing.

    python doctor.py --verify=out/demo          reads every byte of all checkpoints and compares it with their manifests
    python doctor.py --verify=data/demo         the same of the token shards there and their index
    python doctor.py --diff=out/one,out/two     what differs between two runs: settings, inputs, code, machine, and from
                                                which step on their logs differ
    python doctor.py --order=out/demo           proves that a run with --log_samples=True took exactly the planned blocks
    python doctor.py --alarms=out/demo          what the rules of engine/alarms.py find in the logs

A folder is an out_dir with its stages, one stage's folder, or for --verify a single checkpoint. Each finding is one
sentence. Exit status: 0 nothing found, 1 something found, 2 there was nothing to look at.
"""
import re
import sys
from pathlib import Path

from configurator import RESULT_FREE, configure, refuse
from engine.alarms import Alarms
from engine.files import in_use, read_json, read_saved
from engine.manifest import PREFIX, verify as faults_of
from engine.monitor import read_log
from engine.samples import order_problems
from engine.shards import shard_problems

verify = ""                     # a folder whose checkpoints or token shards are read and compared with their checksums
diff: tuple[str] = ()           # two folders of runs to compare
order = ""                      # a pretraining run whose sample log is compared with its plan
alarms = ""                     # a folder whose logs are gone through for signs of trouble

CHECKPOINT = re.compile(rf"({'|'.join(PREFIX.values())})_\d{{8}}(\.tmp)?")
LEARNED = ("loss", "val_", "lr", "grad_norm", "skipped", "accuracy", "score", "kl")     # logged, and no measure of time
LAUNCHER = ("MASTER_", "TORCHELASTIC_", "WORLD_SIZE")          # variables that differ in every launch, or are told apart


# --- Checkpoints ------------------------------------------------------------------------------------------------------

def checkpoints_in(folder):
    """The checkpoints that `folder` is or holds, also in folders of its stages, by name. What a run has set aside is
    none of them, unless it is named itself."""
    if (folder / "manifest.json").exists() or CHECKPOINT.fullmatch(folder.resolve().name):
        return [folder]
    return sorted(path for path in (*folder.glob("*"), *folder.glob("*/*"))
                  if path.is_dir() and CHECKPOINT.fullmatch(path.name))


def scrub(folder):
    """Verifies all checkpoints there, or the token shards of a data_dir, and tells of each whether it is sound;
    -> sentences about those that are not."""
    found, faults = checkpoints_in(folder) if folder.is_dir() else [], []
    tokens = [path for path in (folder, folder / "tokens") if (path / "index.json").exists()]
    if not found and not tokens:
        refuse(f"--verify={folder}: no checkpoint there. Expected a run's folder with step_NNNNNNNN or full_NNNNNNNN "
               "in it, an out_dir with such folders, a single checkpoint, or a data_dir with tokens/index.json.")
    for path in tokens:
        faults += (wrong := shard_problems(path))
        if not wrong:
            print(f"sound    {path}  (token shards)")
    for path in found:
        live = in_use(path.parent)
        if path.suffix == ".tmp":
            left_over = f"{path} was being written when its run ended; the next call of that run removes it"
            wrong = [] if live else [left_over]
        else:
            wrong = faults_of(path)
        if live and (path.suffix == ".tmp" or not path.exists()):       # being written, or just removed as too old
            continue
        if not wrong:
            print(f"sound    {path}  ({sum(file.stat().st_size for file in path.rglob('*') if file.is_file()):,} "
                  "bytes)")
        faults += wrong
    return faults


# --- Two runs ---------------------------------------------------------------------------------------------------------

def compare(one, other):
    """Sentences about all that differs between two runs; the folders are of one stage, or hold stages."""
    if (one / "config.json").exists() and (other / "config.json").exists():
        return differences(one, other)
    stages = [path.name for path in sorted(one.glob("*")) if (path / "config.json").exists()]
    stages = [name for name in stages if (other / name / "config.json").exists()]
    if not stages:
        refuse(f"--diff={one},{other}: no run there that can be compared. Expected two folders with a config.json, or "
               "two out_dirs with a stage that both have.")
    return [f"{name}: {found}" for name in stages for found in differences(one / name, other / name)]


def differences(one, other):
    """The same for two folders of one stage each."""
    facts = [facts_of(folder) for folder in (one, other)]
    keys = sorted(facts[0].keys() | facts[1].keys(), key=list({**facts[0], **facts[1]}).index)
    found = [f"{key}: {facts[0].get(key)!r}, {facts[1].get(key)!r}" for key in keys if facts[0].get(key) != facts[1].get(key)]
    if "commit" in keys and facts[0]["commit"] == facts[1]["commit"] and str(facts[0]["commit"]).endswith("+"):
        found.append(f"commit: both were run with changes to {facts[0]['commit'][:8]} that no commit holds: not "
                     "comparable")
    return found + log_differences(read_log(one), read_log(other))


def facts_of(folder):
    """{what: value} of everything that a run was made with, in the order in which it is told."""
    saved = read_saved(folder / "config.json")
    facts = {"script": saved["script"]}
    for name, value in saved["config"].items():
        if name != "out_dir":
            facts[f"{name} (changes no result)" if name in RESULT_FREE else name] = value
    facts.update((f"content of {what}", value) for what, value in read_json(folder / "inputs.json", missing={}).items()
                 if what != "format_version")
    facts["commit"] = saved["commit"]
    facts.update((f"version of {name}", value) for name, value in saved["versions"].items())
    facts["processes"] = int(saved["environment"].get("WORLD_SIZE", 1))
    facts.update((f"variable {name}", value) for name, value in saved["environment"].items()
                 if not name.startswith(LAUNCHER))
    return facts


def log_differences(one, other):
    """The first step that both logged and that came out differently, and how far each log goes."""
    one, other = ({record["step"]: record for record in log} for log in (one, other))
    both, found = sorted(one.keys() & other.keys()), []
    for before, step in zip([None, *both], both):
        unlike = [f"{name} {one[step].get(name)}, {other[step].get(name)}" for name in one[step].keys() | other[step].keys()
                  if name.startswith(LEARNED) and one[step].get(name) != other[step].get(name)]
        if unlike:
            upto = f"the same up to step {before}, then " if before else ""
            found.append(f"log: {upto}different from step {step} on: {'; '.join(sorted(unlike))}")
            break
    ends = [max(log, default=0) for log in (one, other)]
    return found + [f"log: ends at step {ends[0]}, {ends[1]}"] * (ends[0] != ends[1])


# --- Alarms -----------------------------------------------------------------------------------------------------------

def alarms_of(folder):
    """The alarms of a stage's log, or of the logs of all stages there, each with the step at which it was to be
    seen."""
    logs = sorted({*folder.glob("log.jsonl"), *folder.glob("*/log.jsonl")})
    if not logs:
        refuse(f"--alarms={folder}: no log there. Expected a stage's folder with a log.jsonl, or an out_dir with "
               "stages.")
    found = []
    for log in logs:
        rules = Alarms()
        found += [f"{log.parent.name}: from step {record['step']} on: {sentence}" for record in read_log(log.parent)
                  for sentence in rules.hear(record)]
    return found


def main(config):
    if not any((config.verify, config.diff, config.order, config.alarms)):
        refuse("nothing to do: --verify=DIR scrubs checkpoints, --diff=DIR,DIR compares two runs, --order=DIR proves "
               "the order of a run's data, --alarms=DIR goes through logs; --help says more")
    if config.diff and len(config.diff) != 2:
        refuse(f"--diff needs two folders, --diff=out/one,out/two; found {len(config.diff)}")
    findings = []
    if config.verify:
        findings += scrub(Path(config.verify))
    if config.diff:
        found = compare(*map(Path, config.diff))
        if found:
            print(f"first {config.diff[0]}, then {config.diff[1]}:")
        findings += found
    if config.order:
        findings += order_problems(Path(config.order))
    if config.alarms:
        findings += alarms_of(Path(config.alarms))
    for finding in findings:
        print(finding)
    print(f"{len(findings)} found" if findings else "nothing found")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main(configure(globals()))
