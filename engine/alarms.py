"""
What a run's log says is wrong: rules over its records, each of which gives one sentence with its evidence, or nothing.

A rule needs enough records to tell a fault from noise, so a short run is silent. The thresholds are for alarms that
mean something: a healthy log has none. Rules about the machine look at one attempt, since another may be on another
machine, and leave out its first record, which has the time of compiling in it.
"""
import math
from statistics import median

KEPT = (100, 300)       # records that are looked at, first and last: a run of weeks has a start and a present


class Alarms:
    """Hears the records of a log one by one and says what is wrong, each once (of the machine: once an attempt)."""

    def __init__(self):
        self.records, self.attempt, self.said = [], [], set()

    def hear(self, record):
        """Takes the next record; -> the sentences that are new."""
        if self.attempt and self.attempt[-1]["attempt"] != record["attempt"]:
            self.attempt, self.said = [], self.said - set(OF_THE_MACHINE)
        for kept in (self.records, self.attempt):
            kept.append(record)
            del kept[KEPT[0]:-KEPT[1]]
        found = {rule: rule(self.records) for rule in OF_THE_LOSS}
        found.update({rule: rule(self.attempt[1:]) for rule in OF_THE_MACHINE})
        new = {rule: sentence for rule, sentence in found.items() if sentence and rule not in self.said}
        self.said.update(new)
        return list(new.values())


def series(records, name):
    """[(step, value)] of the records that have such a number; steps that were skipped have none."""
    return [(record["step"], record[name]) for record in records if not record.get("skipped")
            and isinstance(record.get(name), (int, float)) and math.isfinite(record[name])]


def middle(points):
    return median(value for _, value in points)


def span(points):
    return f"steps {points[0][0]:,} to {points[-1][0]:,}"


def noise(points):
    """Standard deviation without what changes slowly: from the median of the differences between neighbours."""
    return 1.4826 / math.sqrt(2) * median(abs(b - a) for (_, a), (_, b) in zip(points, points[1:]))


# --- The loss --------------------------------------------------------------------------------------------------------

def loss_spike(records):
    """The last loss lies above the median of the ten before it by 6 times the noise, and by 5 %; and above the highest
    of them by 4 times the noise, since what climbs slowly is no spike."""
    *before, last = series(records, "loss")[-41:] or [None]
    if len(before) < 10:
        return
    usual, highest, varies = middle(before[-10:]), max(value for _, value in before[-10:]), noise(before)
    if last[1] > max(usual + 6 * varies, 1.05 * usual, highest + 4 * varies):
        return (f"loss spike: {last[1]:.3f} at step {last[0]:,}, where the median of {span(before[-10:])} is "
                f"{usual:.3f} and the loss varies by {varies:.3f} from record to record")


def loss_not_smooth(records, size=8, groups=8):
    """Taken together by `size` records, the loss still goes up, more than once, and by more than noise would explain:
    the median of 8 values varies about 0.44 times as much as they do, a difference of two 0.6 times."""
    points = series(records, "loss")[-size * groups:]
    if len(points) < size * groups:
        return
    parts = [points[i:i + size] for i in range(0, len(points), size)]
    rises = [(a, b) for a, b in zip(parts, parts[1:])
             if middle(b) - middle(a) > max(2.5 * noise(points), 0.01 * abs(middle(a)))]
    if len(rises) > 1:
        told = "; ".join(f"from {middle(a):.3f} ({span(a)}) to {middle(b):.3f} ({span(b)})" for a, b in rises)
        return (f"loss not smooth: medians of {size} records still rise, {told}, and from record to record it varies "
                f"by {noise(points):.3f} only. Is the learning rate too high, or the data not mixed?")


def eos_loss_flat(records):
    """Since the start the loss of ordinary tokens has fallen by 35 %, so below what their frequencies alone give, and
    that of EOS by less than 5 %."""
    text, eos = series(records, "loss_ordinary"), series(records, "loss_eos")
    if min(len(text), len(eos)) < 20:
        return
    (text_then, text_now), (eos_then, eos_now) = ((middle(p[:3]), middle(p[-5:])) for p in (text, eos))
    if text_now < 0.65 * text_then and eos_now > 0.95 * eos_then:
        return (f"EOS loss flat: {eos_then:.2f} at {span(eos[:3])}, {eos_now:.2f} at {span(eos[-5:])}, while ordinary "
                f"tokens went from {text_then:.2f} to {text_now:.2f}. Do the documents end in EOS, and is it a target?")


# --- The machine -----------------------------------------------------------------------------------------------------

def tokens_per_second_fall(records):
    """The median of the last 10 records is 15 % below that of the first 10, and by twice what they vary."""
    points = series(records, "tokens_per_second")
    if len(points) < 30:
        return
    first, last = points[:10], points[-10:]
    drop = middle(first) - middle(last)
    if drop > max(0.15 * middle(first), 2 * noise(first), 2 * noise(last)):
        return (f"tokens per second fall: {middle(first):,.0f} at {span(first)}, {middle(last):,.0f} at {span(last)} "
                f"(-{drop / middle(first):.0%}). A leak, the disk, heat, or another job on the machine")


def memory_rises(records, name, what):
    """In each of four quarters more than in the one before, by 5 % in all. The first third is left out: evaluating and
    saving for the first time take some; and a single jump is no trend."""
    points = series(records, name)
    points = points[len(points) // 3:]
    if len(points) < 24:
        return
    size = len(points) // 4
    parts = [points[i * size:(i + 1) * size] for i in range(4)]
    rise = middle(parts[3]) - middle(parts[0])
    if rise > 0.05 * middle(parts[0]) and all(middle(b) - middle(a) > 0.15 * rise for a, b in zip(parts, parts[1:])):
        per_step = rise / (parts[3][size // 2][0] - parts[0][size // 2][0])
        return (f"{what} rises: {middle(parts[0]) / 2**30:.2f} GiB at {span(parts[0])}, {middle(parts[3]) / 2**30:.2f} "
                f"GiB at {span(parts[3])}: {1000 * per_step / 2**30:.3f} GiB in 1,000 steps. Something is kept")


def process_memory_rises(records):
    # Without the pages of mapped files: those belong to the system, which takes them back when it needs them.
    return memory_rises([{**record, "own": record["rss_bytes"] - record.get("rss_file_bytes", 0)} for record in records
                         if record.get("rss_bytes")], "own", "the process's memory")


def gpu_memory_rises(records):
    return memory_rises(records, "gpu_memory_allocated_bytes", "the GPU's memory")


def data_wait(records):
    """A tenth of the time of the last 10 records went by until the data were there."""
    waited, took = series(records, "data_seconds")[-10:], series(records, "step_seconds")[-10:]
    if min(len(waited), len(took)) >= 5 and (share := sum(v for _, v in waited) / sum(v for _, v in took)) > 0.1:
        return (f"waiting for data: {share:.0%} of the time of {span(waited)}, {middle(waited):.3f} of "
                f"{middle(took):.3f} seconds a step. Is the disk slow, or busy with something else?")


def disk_full_soon(records):
    """Less room than twice the next checkpoint of each kind: an old one goes when the new one is there."""
    free, needed = series(records[-1:], "disk_free_bytes"), series(records[-1:], "next_saves_bytes")
    if free and needed and free[0][1] < 2 * needed[0][1]:
        return (f"disk full soon: {free[0][1] / 2**30:.2f} GiB are free at step {free[0][0]:,}, and the next light and "
                f"full checkpoint take {needed[0][1] / 2**30:.2f} GiB. Make room, or set a smaller --keep")


def all_reduce_slower(records):
    """The median of the last 4 samples is half as long again as that of the first 4."""
    points = series(records, "all_reduce_seconds")
    if len(points) >= 8 and middle(points[-4:]) > 1.5 * middle(points[:4]):
        first, last = points[:4], points[-4:]
        return (f"all-reduce slower: {1000 * middle(first):.1f} ms at {span(first)}, {1000 * middle(last):.1f} ms at "
                f"{span(last)}. Look at the links, and for a rank whose machine does something else")


def straggler(records):
    """In each of the last 5 records the same rank was the slowest, by half of what the rank in the middle takes, and by
    a tenth of the step's time: so long the others wait for it."""
    last = [record for record in records if "slowest" in record][-5:]
    late = lambda r: r["slowest_seconds"] - r["rank_seconds"]
    if (len(last) == 5 and len({record["slowest"] for record in last}) == 1
            and all(late(r) > max(0.5 * r["rank_seconds"], 0.1 * r["step_seconds"]) for r in last)):
        own, usual = series(last, "slowest_seconds"), series(last, "rank_seconds")
        return (f"straggler: {last[0]['slowest']} takes {middle(own):.3f} s for its own part of a step, the rank in "
                f"the middle {middle(usual):.3f} s ({span(own)}). Does its machine do something else, run hot, or wait "
                "for its disk?")


OF_THE_LOSS = (loss_spike, loss_not_smooth, eos_loss_flat)
OF_THE_MACHINE = (tokens_per_second_fall, process_memory_rises, gpu_memory_rises, data_wait, disk_full_soon,
                  all_reduce_slower, straggler)
