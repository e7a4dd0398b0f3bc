"""
What a run has come to: one table with every stage's numbers beside what was promised, and a picture.

    python runs/report.py config/demo.py

Reads only what the stages wrote: data_dir/audit.json, data_dir/tokenizer/report.json, out_dir/*/result.json and
log.jsonl, out_dir/evaluate.json, out_dir/timing.jsonl. What is not there is left out. Writes out_dir/report.txt,
report.json and report.png.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurator import configure
from engine.files import read_json, write_atomic, write_json
from engine.monitor import read_log
from prepare.audit import waterfall

data_dir = "data/demo"
out_dir = "out/demo"
judge = True            # say whether the targets are met; they are the demo's, and mean nothing for smaller runs
max_minutes = 15.0      # target for the whole chain


# --- Reading ---------------------------------------------------------------------------------------------------------

def load(path):
    return read_json(path) if path.exists() else {}


def value_at(found, *names):
    """found[a][b][c], or None where one of the names is missing."""
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def read_timing(path):
    """[(stage, wall seconds, CPU seconds)]: the calls of a stage up to the one that finished it count together."""
    sums, finished = {}, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            call = json.loads(line)
        except json.JSONDecodeError:
            continue     # a kill in the middle of the line
        wall, cpu = sums.get(call["stage"], (0, 0))
        sums[call["stage"]] = wall + call["wall_seconds"], cpu + call["cpu_seconds"]
        if call["exit"] == 0:
            finished[call["stage"]] = sums.pop(call["stage"])
    return [(stage, *seconds) for stage, seconds in finished.items()]


# --- The table -------------------------------------------------------------------------------------------------------

class Table:
    """Rows of (stage, what, measured, target, verdict).

    A number that was not measured gets no row, unless something was promised about it."""

    def __init__(self, judge):
        self.rows, self.judge = [], judge

    def add(self, stage, what, value, form, at_least=None, at_most=None, below=None):
        write = lambda number: format(number, form) if not isinstance(number, str) else number
        bounds = {">=": at_least, "<=": at_most, "<": below}
        bounds = [(sign, bound) for sign, bound in bounds.items() if bound is not None]
        target = " ".join(f"{sign} {write(bound)}" for sign, bound in bounds) if self.judge else ""
        if value is None and not target:
            return
        holds = {">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, "<": lambda a, b: a < b}
        verdict = ""
        if target:
            verdict = ("not measured" if value is None else
                       "ok" if all(holds[sign](value, bound) for sign, bound in bounds) else "NOT MET")
        self.rows.append((stage, what, "-" if value is None else write(value), target, verdict))

    def lines(self):
        rows = [("stage", "what", "measured", "target", ""), *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        before = None
        for stage, what, value, target, verdict in rows:
            stage, before = ("" if stage == before else stage), stage
            cells = [f"{stage:<{widths[0]}}", f"{what:<{widths[1]}}", f"{value:>{widths[2]}}", f"{target:<{widths[3]}}"]
            yield "  ".join([*cells, verdict]).rstrip()


def fill(table, found, config):
    """Every number of the run in the order of the stages."""
    scores, text = value_at(found, "evaluate", "models") or {}, value_at(found, "evaluate", "text") or {}
    base, tuned, final = (scores.get(name, {}) for name in ("pretrain", "sft", "ppo"))

    stages = list((value_at(found, "audit", "filters") or {}).values())
    if stages:
        table.add("documents", "pages read", stages[0]["documents_in"], ",")
        table.add("documents", "documents kept", stages[-1]["documents_out"], ",")
        table.add("documents", "bytes of text kept", stages[-1]["bytes_out"], ",")
    for row in value_at(found, "tokenizer", "held_out") or ():
        table.add("tokenizer", f"bytes per token, {row['name']} ({row['vocab_size']:,})", row["bytes_per_token"], ".3f")

    table.add("pretrain", "parameters", value_at(found, "pretrain", "parameters"), ",")
    table.add("pretrain", "tokens trained on", value_at(found, "pretrain", "tokens"), ",")
    table.add("pretrain", "held-out loss (nats per token)", base.get("loss"), ".3f")
    table.add("pretrain", "held-out bits per byte; target: xz -9e alone", base.get("bits_per_byte"), ".3f",
              below=text.get("xz"))
    table.add("pretrain", "  xz that has seen the training text", text.get("xz_primed"), ".3f")
    table.add("pretrain", "  bits per byte on lines never seen", base.get("bits_per_byte_new_lines"), ".3f")
    table.add("pretrain", "  held-out 13-grams that training has", text.get("grams_in_training"), ".1%")

    table.add("sft", "held-out answers in format that stop", value_at(tuned, "all_questions", "format_and_stop"), ".1%",
              at_least=0.95)
    table.add("sft", "  the same before tuning", value_at(base, "all_questions", "format_and_stop"), ".1%")
    kinds = value_at(found, "evaluate", "kinds") or {}
    exact = {kind: value_at(tuned, "questions", kind, "exact") for kind in kinds}
    general = [exact[kind] for kind in kinds if "sft" in kinds[kind]["generalised"]]
    table.add("sft", "best kind that generalises", max(general, default=None), ".1%", at_least=0.80)
    for kind in kinds:
        best = kinds[kind]["best_baseline"]
        beside = "" if best is None else f" (baseline {best:.0%})"
        table.add("sft", f"  exact, {kind}{beside}", exact[kind], ".1%")

    reward = found["reward"]
    table.add("reward", "held-out pairs ranked right", value_at(reward, "val", "accuracy"), ".1%", at_least=0.90)
    table.add("reward", "equal pairs: the longer is preferred", value_at(reward, "control", "prefers_longer"), ".1%",
              at_least=0.40, at_most=0.60)
    table.add("reward", "  number of these pairs", value_at(reward, "control", "pairs"), ",", at_least=400)

    before, after = value_at(found, "ppo", "before") or {}, value_at(found, "ppo", "after") or {}
    bounds = value_at(found, "ppo", "bounds") or {}
    bound = lambda name, side: value_at(bounds, name, side)
    rise = value_at(found, "ppo", "gold_rise_in_deviations")
    table.add("ppo", "rise of the rule's score, in deviations", rise, ".2f", at_least=1.0)
    table.add("ppo", "  the rule's score before", before.get("gold"), ".3f")
    table.add("ppo", "  the rule's score after", after.get("gold"), ".3f")
    table.add("ppo", "KL to the reference, nats per answer", after.get("kl"), ".2f", at_most=bound("kl", "at_most"))
    table.add("ppo", "answers that stop", after.get("stop_rate"), ".1%", at_least=0.95)
    table.add("ppo", "mean length in tokens", after.get("length"), ".1f", at_most=bound("length", "at_most"))
    table.add("ppo", "questions answered exactly, before", mean_exact(tuned), ".1%")
    table.add("ppo", "questions answered exactly, after", mean_exact(final), ".1%")

    for stage, wall, cpu in found["timing"]:
        table.add("seconds", f"{stage} ({cpu:,.0f} of CPU)", wall, ",.0f")
    total = sum(wall for _, wall, _ in found["timing"]) / 60
    table.add("seconds", "minutes in all", total or None, ".1f", at_most=config.max_minutes)


def mean_exact(scores):
    exact = [kind["exact"] for kind in scores.get("questions", {}).values() if kind["exact"] is not None]
    return sum(exact) / len(exact) if exact else None


# --- The picture -----------------------------------------------------------------------------------------------------

def draw(path, found, logs):
    """A panel for each stage that there is something of. False without matplotlib."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    blue, orange, green, grey = "#3b6ea8", "#d9822b", "#4a9a5b", "#9aa0a6"
    figure, axes = pyplot.subplots(2, 4, figsize=(20, 9), layout="constrained")
    panels = iter(axes.flat)

    def panel(title, x="", y=""):
        axis = next(panels)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.spines[["top", "right"]].set_visible(False)
        return axis

    def curve(axis, log, name, label, colour, **style):
        points = [(line["step"], line[name]) for line in log if line.get(name) is not None]
        if points:
            axis.plot(*zip(*points), label=label, color=colour, **style)

    def bars(axis, names, values, colour, form="{:,.0f}"):
        shown = axis.barh(names, values, color=colour)
        axis.bar_label(shown, [form.format(value) for value in values], padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.18)

    filters = value_at(found, "audit", "filters") or {}
    left = [stage["documents_out"] for stage in filters.values()]
    bars(panel("Documents left after each filter"), list(filters), left, blue)

    for name, title in (("pretrain", "Pretraining"), ("sft", "Instruction tuning")):
        axis = panel(f"{title}: loss", "step", "nats per token")
        curve(axis, logs[name], "loss", "training", grey, linewidth=1)
        curve(axis, logs[name], "val_loss", "held out", blue, marker="o")
        if axis.lines:
            axis.legend(frameon=False)

    text, models = value_at(found, "evaluate", "text") or {}, value_at(found, "evaluate", "models") or {}
    named = {"xz -9e alone": text.get("xz"), "xz after training text": text.get("xz_primed"),
             "model": value_at(models, "pretrain", "bits_per_byte"),
             "model, lines never seen": value_at(models, "pretrain", "bits_per_byte_new_lines")}
    named = {name: value for name, value in named.items() if value is not None}
    colours = [blue if name.startswith("model") else grey for name in named]
    bars(panel("Held-out pages: bits per byte"), list(named), list(named.values()), colours, "{:.2f}")

    axis = panel("Held-out questions answered exactly", "share")
    kinds = {kind: about for kind, about in (value_at(found, "evaluate", "kinds") or {}).items()
             if value_at(models, "sft", "questions", kind, "exact") is not None}
    for shift, (label, colour, of) in enumerate((
            ("best baseline", grey, lambda kind: kinds[kind]["best_baseline"]),
            ("after tuning", blue, lambda kind: value_at(models, "sft", "questions", kind, "exact")),
            ("after PPO", orange, lambda kind: value_at(models, "ppo", "questions", kind, "exact")))):
        rows = [row + 0.27 * (shift - 1) for row in range(len(kinds))]
        axis.barh(rows, [of(kind) or 0 for kind in kinds], 0.25, label=label, color=colour)
    axis.set_yticks(range(len(kinds)), list(kinds), fontsize=8)
    axis.set_xlim(0, 1)
    axis.invert_yaxis()
    axis.legend(frameon=False, fontsize=8)

    axis = panel("Reward model: share ranked right", "how far the two are apart in the rule's score")
    buckets = value_at(found, "reward", "val", "by_margin") or []
    names = [f"{b['from']:g}" + (f" to {b['to']:g}" if b["to"] else " or more") for b in buckets]
    shares = [bucket["accuracy"] for bucket in buckets]
    longer = value_at(found, "reward", "control", "prefers_longer")
    if longer is not None:
        names, shares = [*names, "equal: longer"], [*shares, longer]
    axis.bar(names, shares, color=[blue] * len(buckets) + [orange])
    axis.axhline(0.5, color=grey, linestyle=":")
    axis.set_ylim(0, 1)

    axis = panel("PPO", "update", "score")
    curve(axis, logs["ppo"], "gold", "the rule's score", green)
    curve(axis, logs["ppo"], "score", "the reward model's score", blue)
    if axis.lines:
        axis.legend(frameon=False, loc="upper left")
        other = axis.twinx()
        curve(other, logs["ppo"], "kl", "KL", orange, linestyle="--")
        other.set_ylabel("KL to the reference, nats per answer", color=orange)
        other.spines["top"].set_visible(False)

    walls = {stage: wall for stage, wall, _ in found["timing"]}
    bars(panel("Seconds of each stage"), list(walls), list(walls.values()), blue)
    figure.savefig(path.with_suffix(".tmp.png"), dpi=110)
    path.with_suffix(".tmp.png").replace(path)
    pyplot.close(figure)
    return True


def main(config):
    # 1. What the stages have written.
    data, out = Path(config.data_dir), Path(config.out_dir)
    found = {name: load(out / name / "result.json") for name in ("pretrain", "sft", "reward", "ppo")}
    found.update(audit=load(data / "audit.json"), tokenizer=load(data / "tokenizer" / "report.json"),
                 evaluate=load(out / "evaluate.json"), timing=read_timing(out / "timing.jsonl"))
    logs = {name: read_log(out / name) for name in ("pretrain", "sft", "ppo")}

    # 2. As a table.
    table = Table(config.judge)
    fill(table, found, config)
    lines = [*(waterfall(found["audit"]) if found["audit"] else ()), "", *table.lines()]
    missed = sum(row[-1] in ("NOT MET", "not measured") for row in table.rows)
    if config.judge:
        lines += ["", f"{missed} targets are not met" if missed else "all targets are met"]
    print("\n".join(lines))
    write_atomic(out / "report.txt", "\n".join(lines) + "\n")
    names = ("stage", "what", "measured", "target", "verdict")
    write_json(out / "report.json", {"rows": [dict(zip(names, row)) for row in table.rows]})

    # 3. As a picture.
    if draw(out / "report.png", found, logs):
        print(f"\npicture: {out / 'report.png'}")
    else:
        print("\nnote: no picture, since matplotlib is not installed; the numbers are in report.txt and report.json")


if __name__ == "__main__":
    main(configure(globals()))
