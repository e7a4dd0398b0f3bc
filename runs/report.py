"""
What a run has come to: one table with every stage's numbers beside what was promised, and a picture.

    python runs/report.py config/demo.py

Reads only what the stages wrote: data_dir/audit.json, data_dir/tokenizer/report.json, out_dir/*/result.json and
log.jsonl, out_dir/evaluate.json, out_dir/timing.jsonl. What is not there is left out. Writes out_dir/report.txt,
report.json and report.png.
"""
import io
import operator
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurator import configure
from engine.files import fits, json_lines, read_json, write_atomic, write_json
from engine.monitor import read_log
from prepare.audit import waterfall

data_dir = "data/demo"
out_dir = "out/demo"
verdicts = True         # say whether the targets are met; they are the demo's, and mean nothing for smaller runs
max_minutes = 15.0      # target for the whole chain


# --- Reading ---------------------------------------------------------------------------------------------------------

class Found(dict):
    """Results in which whatever was not measured is an empty Found, since any stage may be missing."""

    def __init__(self, content=()):
        super().__init__(content)
        self.update({key: Found(value) for key, value in self.items() if isinstance(value, dict)})

    def __missing__(self, key):
        return Found()


def load(path):
    return Found(read_json(path) if path.exists() else {})


def read_timing(path):
    """{stage: (wall seconds, CPU seconds)}: the calls of a stage up to the one that finished it count together."""
    sums, finished = {}, {}
    seconds = (int, float)
    for call in json_lines(path):
        if not fits(call, {"stage": str, "wall_seconds": seconds, "cpu_seconds": seconds, "exit": int}):
            continue
        wall, cpu = sums.get(call["stage"], (0, 0))
        sums[call["stage"]] = wall + call["wall_seconds"], cpu + call["cpu_seconds"]
        if call["exit"] == 0:
            finished[call["stage"]] = sums.pop(call["stage"])
    return finished


# --- The table -------------------------------------------------------------------------------------------------------

COLUMNS = ("stage", "what", "measured", "target", "verdict")
HOLDS = {">=": operator.ge, "<=": operator.le, "<": operator.lt}


def table(found, config):
    """Every number of the run in the order of the stages, as rows of COLUMNS, all text.

    A number that was not measured gets no row, unless something was promised about it."""
    rows = []

    def add(stage, what, value, form, *bounds):
        measured = value not in (None, {})
        bounds = [(sign, bound) for sign, bound in bounds if bound not in (None, {}) and config.verdicts]
        verdict = ("" if not bounds else "not measured" if not measured else
                   "ok" if all(HOLDS[sign](value, bound) for sign, bound in bounds) else "NOT MET")
        if measured or bounds:
            rows.append((stage, what, format(value, form) if measured else "-",
                         " ".join(f"{sign} {bound:{form}}" for sign, bound in bounds), verdict))

    base, tuned = (found["evaluate"]["models"][name] for name in ("pretrain", "sft"))
    for row in found["tokenizer"]["held_out"]:
        add("tokenizer", f"bytes per token, {row['name']} ({row['vocab_size']:,})", row["bytes_per_token"], ".3f")

    text = found["evaluate"]["text"]
    add("pretrain", "parameters", found["pretrain"]["parameters"], ",")
    add("pretrain", "tokens trained on", found["pretrain"]["tokens"], ",")
    add("pretrain", "held-out loss (nats per token)", base["loss"], ".3f")
    add("pretrain", "held-out bits per byte; target: xz -9e alone", base["bits_per_byte"], ".3f", ("<", text["xz"]))
    add("pretrain", "  xz that has seen the training text", text["xz_primed"], ".3f")
    add("pretrain", "  bits per byte on lines never seen", base["bits_per_byte_new_lines"], ".3f")
    add("pretrain", "  held-out 13-grams that training has", text["grams_in_training"], ".1%")

    add("sft", "held-out answers in format that stop", tuned["all_questions"]["format_and_stop"], ".1%", (">=", 0.95))
    add("sft", "  the same before tuning", base["all_questions"]["format_and_stop"], ".1%")
    kinds = found["evaluate"]["kinds"]
    general = [tuned["questions"][kind]["exact"] for kind in kinds if "sft" in kinds[kind]["generalised"]]
    add("sft", "best kind that generalises", max(general, default=None), ".1%", (">=", 0.80))
    for kind, about in kinds.items():
        beside = "" if about["best_baseline"] is None else f" (baseline {about['best_baseline']:.0%})"
        add("sft", f"  exact, {kind}{beside}", tuned["questions"][kind]["exact"], ".1%")

    longer = found["reward"]["control"]["prefers_longer"]
    add("reward", "held-out pairs ranked right", found["reward"]["val"]["accuracy"], ".1%", (">=", 0.90))
    add("reward", "equal pairs: the longer is preferred", longer, ".1%", (">=", 0.40), ("<=", 0.60))
    add("reward", "  number of these pairs", found["reward"]["control"]["pairs"], ",", (">=", 400))

    before, after, bounds = (found["ppo"][name] for name in ("before", "after", "bounds"))
    add("ppo", "rise of the rule's score, in deviations", found["ppo"]["gold_rise_in_deviations"], ".2f", (">=", 1.0))
    add("ppo", "  the rule's score before", before["gold"], ".3f")
    add("ppo", "  the rule's score after", after["gold"], ".3f")
    add("ppo", "KL to the reference, nats per answer", after["kl"], ".2f", ("<=", bounds["kl"]["at_most"]))
    add("ppo", "answers that stop", after["stop_rate"], ".1%", (">=", 0.95))
    add("ppo", "mean length in tokens", after["length"], ".1f", ("<=", bounds["length"]["at_most"]))

    for stage, (wall, cpu) in found["timing"].items():
        add("seconds", f"{stage} ({cpu:,.0f} of CPU)", wall, ",.0f")
    total = sum(wall for wall, _ in found["timing"].values()) / 60
    add("seconds", "minutes in all", total or None, ".1f", ("<=", config.max_minutes))
    return rows


def lines_of(rows):
    """The rows in columns, the name of a stage once."""
    rows = [(*COLUMNS[:-1], ""), *rows]
    a, b, c, d, _ = (max(map(len, column)) for column in zip(*rows))
    before = None
    for stage, what, measured, target, verdict in rows:
        stage, before = ("" if stage == before else stage), stage
        yield f"{stage:<{a}}  {what:<{b}}  {measured:>{c}}  {target:<{d}}  {verdict}".rstrip()


# --- The picture -----------------------------------------------------------------------------------------------------

def draw(path, found, logs):
    """A panel for each stage that there is something of. False without matplotlib."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rcParams.update({"axes.titlelocation": "left", "axes.titlesize": 11, "axes.titleweight": "bold",
                     "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    figure = Figure(figsize=(18, 9), layout="constrained")
    panels = iter(figure.subplots(2, 4).flat)

    def curves(title, x, y, log, *lines):
        axis = next(panels)
        axis.set(title=title, xlabel=x, ylabel=y)
        for name, label, style in lines:
            shown = [record for record in log if record.get(name) is not None]
            axis.plot([record["step"] for record in shown], [record[name] for record in shown], style, label=label)
        axis.legend()

    def bars(title, values, form):
        values = {name: value for name, value in values.items() if value not in (None, {})}
        axis = next(panels)
        axis.set(title=title)
        to_beat = [name.startswith("xz") or name.endswith("baseline") for name in values]
        shown = axis.barh(list(values), list(values.values()), color=["C1" if it else "C0" for it in to_beat])
        axis.bar_label(shown, [format(value, form) for value in values.values()], padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.18)

    filters = found["audit"]["filters"]
    bars("Documents left after each filter", {name: filters[name]["documents_out"] for name in filters}, ",")

    for name, title in (("pretrain", "Pretraining: loss"), ("sft", "Instruction tuning: loss")):
        curves(title, "step", "nats per token", logs[name],
               ("loss", "training", "C7-"), ("val_loss", "held out", "C0o-"))

    text, kinds = found["evaluate"]["text"], found["evaluate"]["kinds"]
    base, tuned = (found["evaluate"]["models"][name] for name in ("pretrain", "sft"))
    bars("Held-out pages: bits per byte", {
        "xz -9e alone": text["xz"], "xz after training text": text["xz_primed"], "model": base["bits_per_byte"],
        "model, lines never seen": base["bits_per_byte_new_lines"]}, ".2f")
    exact = {}
    for kind, about in kinds.items():
        exact[kind], exact[f"{kind}: best baseline"] = tuned["questions"][kind]["exact"], about["best_baseline"]
    bars("Held-out questions answered exactly, after tuning", exact, ".0%")
    ranked = {f"apart by {part['from']:g}" + (f" to {part['to']:g}" if part["to"] else " or more"): part["accuracy"]
              for part in found["reward"]["val"]["by_margin"]}
    ranked["equal: the longer"] = found["reward"]["control"]["prefers_longer"]
    bars("Reward model: pairs ranked right", ranked, ".0%")

    curves("PPO", "update", "score", logs["ppo"], ("gold", "the rule's score", "C1-"),
           ("score", "the reward model's score", "C0-"))
    bars("Seconds of each stage", {stage: wall for stage, (wall, _) in found["timing"].items()}, ",.0f")
    png = io.BytesIO()
    figure.savefig(png, dpi=110)
    write_atomic(path, png.getvalue())
    return True


def main(config):
    # 1. What the stages have written.
    data, out = Path(config.data_dir), Path(config.out_dir)
    found = {name: load(out / name / "result.json") for name in ("pretrain", "sft", "reward", "ppo")}
    found.update(audit=load(data / "audit.json"), tokenizer=load(data / "tokenizer" / "report.json"),
                 evaluate=load(out / "evaluate.json"), timing=read_timing(out / "timing.jsonl"))
    logs = {name: read_log(out / name) for name in ("pretrain", "sft", "ppo")}

    # 2. As a table.
    rows = table(found, config)
    lines = [*(waterfall(found["audit"]) if found["audit"] else ()), "", *lines_of(rows)]
    missed = sum(row[-1] in ("NOT MET", "not measured") for row in rows)
    if config.verdicts:
        lines += ["", f"{missed} target{'s are' if missed > 1 else ' is'} not met" if missed else "all targets are met"]
    print("\n".join(lines))
    write_atomic(out / "report.txt", "\n".join(lines) + "\n")
    write_json(out / "report.json", {"rows": [dict(zip(COLUMNS, row)) for row in rows]})

    # 3. As a picture.
    if draw(out / "report.png", found, logs):
        print(f"\npicture: {out / 'report.png'}")
    else:
        print("\nnote: no picture, since matplotlib is not installed; the numbers are in report.txt and report.json")


if __name__ == "__main__":
    main(configure(globals()))
