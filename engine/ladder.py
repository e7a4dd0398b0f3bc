"""
What is done about a step that went wrong, rung by rung: look on, skip it, go back before it, stop.

A loss or gradient that is not finite is never learned from: one NaN in Adam's moments stays there. A spike is a
gradient norm far above the recent ones: `spike_z` standard deviations above their mean, or after the warm-up above
`spike_norm`. The recent ones are those of the last `spike_window` steps that were taken, so nothing that was skipped,
and no NaN, is ever in the statistics. All is computed from numbers that are the same on all ranks (`agree`).

A roll-back goes to a full checkpoint from before the bad data, leaves these data out from then on and lowers the
learning rate. (PaLM, arXiv 2204.02311, section 5.1, found that the same data do no harm to other weights: it is the
pair that does.) The decision is written into RUN/rollbacks.json before anything is renamed, and the rest is a function
of that file and of the checkpoints' own state: a run that is killed in the middle comes to the same end.
"""
import itertools
import json
import math
import statistics

import numpy as np
import torch

from configurator import refuse
from engine import checkpoint, parallel
from engine.checkpoint import on_main
from engine.files import fits, printable, read_json, write_json
from engine.loader import plan_step
from engine.manifest import abandon, folder_of, steps_of
from engine.optim import LossScale
from engine.shards import read_jsonl_zst

POLICIES = ("log", "skip", "rollback", "stop")


def ladder_problems(config):
    """What is wrong with the keys that are used here, a sentence each."""
    policies = [policy for policy in POLICIES if policy != "rollback" or goes_back(config)]
    wrong = [f"on_spike must be one of {', '.join(policies)}, found '{config.on_spike}'"] * (config.on_spike not in policies)
    return wrong + config.outside(max_bad_steps=(1,), spike_window=(1,), rollback_window=(1,), rollback_lr=(0.01, 1),
                                  spike_z=(0,), spike_norm=(0,), max_rollbacks=(0,), keep=(0,), keep_best=(0,))


def goes_back(config):
    return hasattr(config, "max_rollbacks")         # train.py's alone


def agree(loss, norm, asked, setup):
    """(loss, gradient norm, whether any rank was asked to leave), the same bits on every rank. A NaN that only one of
    them has comes out as NaN: a sum cannot lose it, where a maximum may."""
    ours = torch.stack([loss.double(), norm.double(), torch.full_like(loss, bool(asked), dtype=torch.float64)])
    loss, norm, asked = parallel.all_sum(ours, setup).tolist()
    return loss / setup.world, norm / setup.world, asked > 0


def trouble(loss, norm, recent, warm, config):
    """What is unusual about a step, in words; '' when nothing is. recent: norms of the steps before; warm: whether the
    warm-up is over. The deviation counts from half a window on, and is taken as 5 % of the mean at least: where all
    norms are alike, a small change is none that matters."""
    if not math.isfinite(loss + norm):
        return f"loss {loss}, gradient norm {norm}"
    if warm and config.spike_norm and norm > config.spike_norm:
        return f"gradient norm {norm:.3g} is above spike_norm = {config.spike_norm:g}"
    if config.spike_z and 2 * len(recent) >= max(config.spike_window, 4):
        mean = statistics.fmean(recent)
        z = (norm - mean) / max(statistics.pstdev(recent, mean), 0.05 * mean, 1e-12)
        if z > config.spike_z:
            return f"gradient norm {norm:.3g} is {z:.1f} deviations above {mean:.3g}, the mean of {len(recent)} steps"
    return ""


def rung(loss, norm, wrong, in_a_row, config):
    """What is to be done about a step: '' (take it), 'skip', 'rollback' or 'stop'. wrong: its `trouble`; in_a_row: the
    steps in a row that would be skipped, this one included."""
    finite = math.isfinite(loss + norm)
    if not wrong or finite and config.on_spike == "log":
        return ""
    if finite and config.on_spike in ("rollback", "stop"):
        return config.on_spike
    if in_a_row < config.max_bad_steps:
        return "skip"
    return "rollback" if config.on_spike in ("skip", "rollback") and goes_back(config) else "stop"


class Past:
    """What a loop remembers of the steps behind it, the same on every rank: the norms of the last ones, how many in a
    row were skipped, the roll-backs, and fp16's loss scale. `facts` go into full checkpoints, `state` is from one."""

    def __init__(self, config, state, dtype=torch.float32):
        self.config = config
        self.recent, self.in_a_row, self.rollbacks = (state.get(name, empty) for name, empty in (
            ("recent", []), ("in_a_row", 0), ("rollbacks", [])))
        self.loss_scale = LossScale(dtype, state.get("loss_scale"))

    def judge(self, loss, norm, warm):
        """Takes note of a step; -> (what is wrong with it, '' when nothing is; what is to be done then, see `rung`)."""
        scale = self.loss_scale.value
        if self.loss_scale.overflowed(loss, norm):          # of fp16, and no fault of the step's: it does not count
            return f"a gradient overflows at a loss scale of {scale:g}, halved", "skip"
        wrong = trouble(loss, norm, self.recent, warm, self.config)
        deed = rung(loss, norm, wrong, self.in_a_row + 1, self.config)
        if deed:
            self.in_a_row += 1
        else:
            self.in_a_row, self.recent = 0, [*self.recent, norm][-self.config.spike_window:]
        return wrong, deed

    @property
    def windows(self):
        """Those of the data's plan that are left out, as plan_step takes them."""
        return windows_of(self.rollbacks)

    def facts(self):
        return {"recent": self.recent, "in_a_row": self.in_a_row, "rollbacks": self.rollbacks,
                "loss_scale": [self.loss_scale.value, self.loss_scale.since]}


# --- going back ------------------------------------------------------------------------------------------------------

def decisions_of(run, state=None):
    """All roll-backs of a run so far, oldest first. A checkpoint's own list may lack the last ones, and knows them when
    the file was lost. Refuses a file that says something else."""
    written = read_json(run / "rollbacks.json", {"rollbacks": []})["rollbacks"]
    if not fits(written, [{"to": int, "window": [int], "lr_factor": (int, float)}]) or not all(
            len(each["window"]) == 2 and min(each["to"], *each["window"]) >= 0 and 0 < each["lr_factor"] <= 1
            for each in written):
        refuse(f"{run}/rollbacks.json is damaged: it says where the run went back, as 'to', 'window' and 'lr_factor'. "
               "Put back a copy of it, or remove it: then what the newest full checkpoint knows of that counts.")
    return max(written, (state or {}).get("rollbacks", []), key=len)


def windows_of(decisions):
    """The windows of the data's plan that are left out, as plan_step takes them."""
    return [decision["window"] for decision in decisions]


def lr_factor(decisions, step):
    """How far the roll-backs have lowered the learning rate of a step: from the place on to which each went back."""
    return math.prod(decision["lr_factor"] for decision in decisions if decision["to"] <= step)


def decide(deed, run, step, wrong, in_a_row, decisions, culprits, config):
    """Writes down a roll-back because of what is `wrong` in step number `step` (from 0). Refuses when the run ends:
    deed 'stop', too many roll-backs, or no checkpoint to go back to. On rank 0."""
    if in_a_row >= config.max_bad_steps:
        wrong = f"{in_a_row} steps in a row had a loss or gradient that is not finite or leaps, the last {wrong}"
    told = [f"step {step + 1}: {wrong}", *describe(culprits)]
    end = ("so the run ends. The last good checkpoint is as it was. Lower --learning_rate, try --dtype=fp32, or look "
           "at the data: log.jsonl says what each skipped step read.")
    if deed == "stop":
        refuse(*told, f"on_spike = '{config.on_spike}', {end}")
    whole = [k for k in steps_of(run, "full") if (folder_of(run, "full", k) / "manifest.json").exists() and k <= step]
    if len(decisions) >= config.max_rollbacks:
        refuse(*told, f"The run went back max_rollbacks = {config.max_rollbacks} times, {end}")
    if not whole:
        refuse(*told, f"There is no full checkpoint to go back to (a smaller --save_full makes one earlier), {end}")
    began = max(0, step + 1 - max(config.rollback_window, in_a_row))       # the first step of the bad window
    back = next((k for k in whole if k <= began), whole[-1])
    windows = windows_of(decisions)
    window = [plan_step(max(began, back), windows), plan_step(step, windows) + 1]
    decision = {"step": step + 1, "wrong": wrong, "to": back, "window": window, "lr_factor": config.rollback_lr,
                "culprits": culprits}
    write_json(run / "rollbacks.json", {"rollbacks": [*decisions, decision]})
    if back > began:
        told.append(f"no full checkpoint lies before the {step + 1 - began} steps that are to be left out: what steps "
                    f"{began + 1} to {back} have taught stays (save_full and keep decide how far checkpoints reach "
                    "back)")
    print(*told, f"back to step {back}, without steps {window[0]} to {window[1] - 1} of the data's plan, the learning "
          f"rate times {config.rollback_lr:g} (roll-back {len(decisions) + 1} of {config.max_rollbacks})", sep="\n",
          flush=True)


def settle(run):
    """Sets aside the checkpoints that a roll-back went behind. Those lie after the step that it went back to and do not
    know of it; what was saved since then does. Can be done again at any time. On rank 0."""
    decisions = decisions_of(run)
    for kind, name in (("full", "state.json"), ("light", "training.json")) if decisions else ():
        for step in steps_of(run, kind):
            folder = folder_of(run, kind, step)
            try:
                known = len(json.loads((folder / name).read_bytes()).get("rollbacks", []))
            except (OSError, ValueError, TypeError, AttributeError):
                continue                # damaged; whoever reads it will find that
            if any(decision["to"] < step for decision in decisions[known:]):
                abandon(folder)


def go_on(run, modules, moments, setup, config, data_hash=None, again=False):
    """What checkpoint.resume does and gives, after what a roll-back left to do, and with all roll-backs in the state.
    Of a run that begins, with these data, step 0. again: after a step that went wrong; there must be a way back."""
    checkpoint.wait()
    on_main(lambda: settle(run), setup)
    found = checkpoint.resume(run, modules, moments, setup, config.resume_from, config.trust_state)
    if found is None and again:
        parallel.refuse_once(setup, f"no full checkpoint in {run} can be read, so there is no way back; the run ends")
    state = {"step": 0, "tokens": 0, "data_hash": data_hash, "rollbacks": [], **(found or {})}
    decisions = parallel.from_main(on_main(lambda: decisions_of(run, state), setup), setup)
    if len(decisions) > len(state["rollbacks"]):        # the bad steps that were being counted will not happen
        state.update(rollbacks=decisions, in_a_row=0)
    return state


# --- whose fault -----------------------------------------------------------------------------------------------------

def name_documents(train, tokenizer, blocks, losses, most=5):
    """The documents in those of a step's blocks that have the highest loss, as dicts: block, its mean loss, folder and
    number of the document in the training text there, url where the documents are still there, and how the text begins.
    At most five blocks, and of each the first five documents. train: a Mixture; losses: (blocks,) of the blocks."""
    losses, culprits = np.nan_to_num(losses, nan=math.inf), []
    for place in np.argsort(-losses, kind="stable")[:most]:
        number = int(train.source_of(blocks[place]))
        source, first = train.sources[number], int(blocks[place] - train.firsts[number]) * train.block_size
        last = min(first + train.block_size, source.n_tokens) - 1
        begin, end = np.searchsorted(source.offsets, [first, last], side="right") - 1
        for document in range(begin, min(end + 1, begin + most)):
            text = tokenizer.decode(source.read(int(source.offsets[document]) + 1, 50).tolist())
            data_dir = source.folder.parent
            culprits.append({"block": int(blocks[place]), "loss": float(losses[place]), "data": str(data_dir),
                             "document": document, "url": url_of(data_dir, document), "begins": printable(text)[:80]})
    return culprits


def url_of(data_dir, number):
    """The url of document `number` of the training text, None when the documents are no longer there."""
    try:
        for entry in json.loads((data_dir / "audit.json").read_bytes())["documents"]:
            if entry["split"] == "train" and number < entry["documents"]:
                return next(itertools.islice(read_jsonl_zst(data_dir / entry["file"]), number, None))["url"]
            number -= entry["documents"] if entry["split"] == "train" else 0
    except (OSError, ValueError, KeyError, StopIteration, SystemExit):
        pass
    return None


def describe(culprits):
    """A line for each of name_documents' dicts."""
    return [f"    block {c['block']}, loss {c['loss']:.3g}: document {c['document']} of {c['data']}"
            + (f", {c['url']}" if c["url"] else "") + f": {c['begins']!r}" for c in culprits]
