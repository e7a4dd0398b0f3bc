"""
Measures the models of a run on what they have not seen, beside what is to be beaten.

    python evaluate.py config/demo.py                          every model that out_dir has: pretrain, sft, ppo
    python evaluate.py config/demo.py --models=sft,DIR         a stage of the run, or any model's folder
    python evaluate.py config/demo.py --probes=MINE.jsonl      completions of your own, with expected answers

Writes out_dir/evaluate.json and prints it as tables; a second call on the same models and data only prints. What
was measured of models that are not asked for now is kept in evaluate.before.json. In it:

  text        loss and bits per byte on the held-out pages. Beside it, also where it looks bad: xz on the same bytes, xz
              that has seen the training text, bits per byte on lines that stand nowhere in the training text, and how
              much of the held-out text does (13-grams). Documentation repeats itself; a number alone would flatter.
  questions   for each kind: exact answers, answers in the right format, answers that end by themselves (decoded
              greedily). Beside it the best of three baselines that understand nothing (prepare_chat.py). A kind has
              generalised when it is 30 points or more above its best baseline.
  remarks     sampled at temperature 1: mean programmatic score, its spread, length
  repetition  greedy continuations of held-out pages: share of different bigrams, share of texts that end in a loop
  probes      config/probes.jsonl: does the model say what is expected? Once as given, once with the last word of the
              prompt cut in the middle: that makes a token boundary which training never showed.
  leakage     how many of the evaluation's questions, answers and probes stand in the training shards, by 13-grams
"""
import lzma
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configurator import ROOT, configure, nearest, refuse

import numpy as np
import torch

from chatdata import kinds, remark
from engine import chat, parallel
from engine.answers import GRAM, answers, complete, distinct, grams, loops, mean
from engine.files import printable, read_json, write_json
from engine.hf import find_folder, read_model
from engine.loss import token_losses
from engine.manifest import steps_of
from engine.run import fingerprint
from engine.shards import TokenData, begins_of
from engine.tokenizer import Tokenizer

data_dir = "data/demo"          # its tokens/ and chat/ hold what is asked
out_dir = "out/demo"            # the run whose models are measured
models = "pretrain,sft,ppo"     # stages of out_dir or model folders, separated by commas; stages not there are left out
probes = ""                     # file of {"prompt": text, "expected": text}, one a line; empty: config/probes.jsonl
seed = 1                        # of the sampled remarks
text_tokens = 0                 # held-out tokens that are scored; 0: all
stride = 192                    # tokens scored per window, what is before them in the window is context
batch_size = 64                 # windows, or prompts, at a time
questions = 60                  # per kind
remarks = 100                   # sampled answers to held-out remark prompts
continuations = 16              # held-out pages that are continued
continuation_tokens = 96        # how long the continuations are
max_new_tokens = 64             # for an answer
compare_xz = True               # compress the same text with xz, alone and after the training text
device = "auto"                 # 'auto', 'cpu' or 'cuda'
dtype = "auto"                  # of matrix products: 'auto' (bf16 where the machine has it), 'bf16', 'fp32'
threads = 0                     # of a CPU; 0: its cores, divided by the processes

STAGES = ("pretrain", "sft", "ppo", "dpo")             # folders of out_dir with a language model
LEAD = 0.30                     # above the best baseline: generalised
XZ_WINDOW = 64 << 20            # bytes that `xz -9e` looks back


# --- Text -------------------------------------------------------------------------------------------------------------

@torch.inference_mode()
def token_nats(model, ids, config, setup, tokenizer=None):
    """-log p of ids[1:], (n - 1,), in windows of block_size tokens that begin every `stride` tokens: each token but the
    first ones sees at least block_size - stride before it; or its own document only, if the model was trained so."""
    size, stride = model.config.block_size, min(config.stride, model.config.block_size)
    starts = [0] + list(range(stride, max(1, len(ids) - 1 - (size - stride)), stride))
    nats, padded = np.empty(len(ids) - 1), np.pad(ids, (0, size))
    for first in range(0, len(starts), config.batch_size):
        part = starts[first:first + config.batch_size]
        rows = torch.from_numpy(np.stack([padded[start:start + size + 1] for start in part])).to(setup.device)
        begins = begins_of(rows[:, :-1], tokenizer) if model.config.separate_documents else None
        with setup.autocast():
            losses = token_losses(model(rows[:, :-1], begins=begins), rows[:, 1:])
        for row, start in enumerate(part):
            begin = 0 if start == 0 else size - stride
            end = min(size, len(ids) - 1 - start)
            nats[start + begin:start + end] = losses[row, begin:end].double().cpu().numpy()
    return nats


def text_scores(nats, targets, tokenizer, known_lines):
    """Loss and bits per byte: nats of the text's tokens / ln 2 / bytes, BOS and EOS in neither.

    *_new_lines: the same over lines that are not among known_lines. A token belongs to the line in which it begins."""
    counts = np.array([len(tokenizer.token_bytes[i]) for i in targets])
    text = (targets != tokenizer.bos_id) & (targets != tokenizer.eos_id)
    content = b"".join(tokenizer.token_bytes[i] for i in targets[text])
    is_new = np.array([line != b"" and line not in known_lines for line in map(bytes.strip, content.split(b"\n"))])
    ends_line = np.frombuffer(content, dtype=np.uint8) == ord("\n")
    line_of_byte = np.cumsum(ends_line) - ends_line      # a line feed itself belongs to the line that it ends
    new = is_new[line_of_byte[np.cumsum(counts[text]) - counts[text]]]
    bits = nats[text] / math.log(2)
    return {"loss": nats[targets != tokenizer.bos_id].mean(), "bits_per_byte": bits.sum() / counts[text].sum(),
            "bits_per_byte_new_lines": bits[new].sum() / max(1, counts[text][new].sum()),
            "bytes": counts[text].sum(), "bytes_new_lines": counts[text][new].sum()}


def xz_bits(train, val):
    """Bits per byte that `xz -9e` needs for val alone, and for val when it follows train in one stream; the latter is
    None when xz, at the end, would no longer see all of train.

    For the second number there is one compression, and a decompressor says how much of it the training text took: fed
    in small pieces until it has given back all of train."""
    preset = 9 | lzma.PRESET_EXTREME
    alone = len(lzma.compress(val, preset=preset)) * 8 / len(val)
    if len(train) + len(val) > XZ_WINDOW:
        return {"xz": alone, "xz_primed": None}
    together = lzma.compress(train + val, preset=preset)
    decompressor, given, taken = lzma.LZMADecompressor(), 0, 0
    while given < len(train):
        piece = together[taken:taken + 256]
        given += len(decompressor.decompress(piece))
        taken += len(piece)
    return {"xz": alone, "xz_primed": (len(together) - taken) * 8 / len(val)}


def documents_of(data, tokenizer, limit=None):
    """The documents in the shards as bytes: exactly what was trained on."""
    offsets = data.offsets[:].astype(np.int64)
    ids = data.read(0, int(offsets[-1]))[:limit]
    return [b"".join(tokenizer.token_bytes[i] for i in ids[start:end]) for start, end in zip(offsets, offsets[1:])
            if start < len(ids)]


def leakage(train_documents, texts):
    """{name: what share of the 13-grams of the list texts[name] stands in the training text, and how many texts do}

    A text counts as found when one of its 13-grams is; one of fewer words when all of it stands there."""
    known = {gram for document in train_documents for gram in grams(document.split())}
    result = {}
    for name, pieces in texts.items():
        hits = [[gram in known for gram in grams(piece.split())] for piece in pieces]
        found = [any(hit) if hit else any(piece in document for document in train_documents)
                 for piece, hit in zip(pieces, hits)]
        together = sum(hits, [])
        result[name] = {"grams": len(together), "share": mean(together), "texts": len(pieces),
                        "texts_found": sum(found)}
    return result


# --- Answers ----------------------------------------------------------------------------------------------------------

def question_scores(model, tokenizer, entries, config):
    """{kind: exact, format, stop shares}, and one over all of them, for held-out conversations of one question each."""
    asked = [{"messages": entry["messages"][:-1]} for entry in entries]
    rows = {}
    for entry, (text, stopped, ids) in zip(entries, answers(model, tokenizer, asked, config)):
        kind = entry.get("kind", "questions")
        # A kind that is not ours has no format of its own; a remark has no one right answer.
        in_format = kinds.KINDS[kind].follows_format(text) if kind in kinds.KINDS else None
        exact = None if kind == "remark" else text == entry["messages"][-1]["content"]
        rows.setdefault(kind, []).append({"exact": exact, "format": in_format, "stop": stopped,
                                          "format_and_stop": in_format and stopped, "loops": loops(ids),
                                          "distinct_2": distinct(ids, 2)})
    shares = lambda rows, *names: {"n": len(rows), **{name: mean(row[name] for row in rows) for name in names}}
    return ({kind: shares(of_kind, "exact", "format", "stop") for kind, of_kind in rows.items()},
            shares(sum(rows.values(), []), "format", "stop", "format_and_stop", "loops", "distinct_2"))


def remark_scores(model, tokenizer, prompts, config):
    """The programmatic score of sampled remarks: mean, spread, and how they read."""
    made = answers(model, tokenizer, prompts, config, temperature=1.0)
    scores = np.array([remark.score(text) for text, _, _ in made])
    return {"n": len(made), "score": scores.mean(), "score_std": scores.std(),
            "format": mean(remark.parse(text) is not None for text, _, _ in made),
            "stop": mean(stopped for _, stopped, _ in made), "tokens": mean(len(ids) for _, _, ids in made),
            "different": len({text for text, _, _ in made}) / len(made)}


def repetition(model, tokenizer, val, config):
    """Greedy continuations of the first 32 tokens of held-out pages, which is where small models begin to loop."""
    pages = list(zip(val.offsets, val.offsets[1:]))[:config.continuations]
    starts = [val.read(int(start), min(32, int(end - start))).tolist() for start, end in pages]
    made = [ids for ids, _ in complete(model, starts, config, config.continuation_tokens, {tokenizer.eos_id})]
    return {"n": len(made), "distinct_2": mean(distinct(ids, 2) for ids in made), "loops": mean(map(loops, made))}


# --- Probes -----------------------------------------------------------------------------------------------------------

def wrong_probe(entry):
    """What is wrong with a line of the probes' file, for chat.read_lines."""
    good = all(isinstance(entry.get(key), str) and entry[key] for key in ("prompt", "expected"))
    return [] if good else [f'expected {{"prompt": text, "expected": text}}, found {printable(str(entry)[:80])}']


def cut_inside(probe):
    """The probe with the prompt's last word cut in the middle, its rest expected too; None if it has one letter."""
    last = re.search(r"\S*\Z", probe["prompt"])[0]
    if len(last) < 2:
        return None
    rest = len(last) - len(last) // 2
    return {"prompt": probe["prompt"][:-rest], "expected": probe["prompt"][-rest:] + probe["expected"]}


def probe_scores(model, tokenizer, probes, config):
    """For each probe, as given and cut: whether the greedy completion begins with the expected text, and what it is."""
    rows = [{"prompt": probe["prompt"], "expected": probe["expected"]} for probe in probes]
    variants = [(row, name, variant) for name, form in (("whole", dict), ("cut", cut_inside)) for row in rows
                if (variant := form(row))]
    bos = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    prompts = [bos + tokenizer.encode(variant["prompt"]) for _, _, variant in variants]
    longest = max(len(tokenizer.encode(variant["expected"])) for _, _, variant in variants) + 4
    made = complete(model, prompts, config, longest, {tokenizer.eos_id})
    for (row, name, variant), (ids, _) in zip(variants, made):
        text = tokenizer.decode(ids, begins=False)
        row.update({name: text.startswith(variant["expected"]), f"{name}_text": text})
    return {"n": len(rows), "whole": mean(row["whole"] for row in rows), "cut": mean(row.get("cut") for row in rows),
            "probes": rows}


# --- Output -----------------------------------------------------------------------------------------------------------

def print_report(result):
    """What evaluate.json holds, in tables with a column for each model."""
    text, models, bars = result["text"], result["models"], result["kinds"]
    show = lambda value, form: "-" if value is None else format(value, form)
    row = lambda label, cells: print(f"{label:<32}" + "".join(f"{cell:>14}" for cell in cells))

    def rows(part, form, **labels):
        for key, label in labels.items():
            row(label, [show((scores[part] if part else scores)[key], form) for scores in models.values()])

    print(f"\nheld-out pages: {text['tokens']:,} tokens, {text['bytes']:,} bytes; "
          f"{show(text['grams_in_training'], '.0%')} of their {GRAM}-grams stand in the training text")
    row("", [name[-12:] for name in models])
    rows(None, ".3f", loss="loss", bits_per_byte="bits per byte", bits_per_byte_new_lines="  on lines never seen")
    if "xz" in text:
        row("xz -9e on the same bytes", [show(text["xz"], ".3f")])
        row("xz after the training text", [show(text["xz_primed"], ".3f")])
    rows("repetition", ".0%", distinct_2="different bigrams", loops="texts that end in a loop")
    rows("probes", ".0%", whole="probes as given", cut="probes, last word cut")
    if not bars:
        return
    print(f"\nheld-out questions, exact answers (*: {LEAD:.0%} or more above the best baseline)")
    row("kind           n   best baseline", [name[-12:] for name in models])
    for kind, bar in bars.items():
        scores = {name: model["questions"][kind] for name, model in models.items()}
        row(f"{kind:<12}{[score['n'] for score in scores.values()][0]:>4}{show(bar['best_baseline'], '.0%'):>16}",
            [show(score["exact"], ".0%") + ("  ", " *")[name in bar["generalised"]] for name, score in scores.items()])
    rows("all_questions", ".0%", format="in the right format", stop="end by themselves", format_and_stop="both")
    print("\nremarks, sampled")
    rows("remarks", ".2f", score="programmatic score", score_std="its standard deviation",
         format="share in the grammar", stop="share that end by themselves", tokens="tokens")
    leaks = [f"{leak['texts_found']} of {leak['texts']} {name}" for name, leak in result["leakage"].items()
             if name != "held-out pages"]
    print(f"in the training shards (a {GRAM}-gram of it, or all of a shorter one): {', '.join(leaks)}")


def open_models(config):
    """{name: folder} of the models that are there; refuses when none is."""
    found, missing = {}, []
    for name in filter(None, map(str.strip, config.models.split(","))):
        stage, folder = Path(config.out_dir) / name, Path(name)
        if stage.is_dir() and (steps_of(stage, "light") or any(stage.glob("*.safetensors"))):
            folder = stage
        if folder.is_dir():
            found[name] = find_folder(folder)
        elif name not in STAGES:                   # a stage that has not begun, or has no checkpoint yet, is left out
            missing.append(f"{name}: no such folder, neither there nor in {config.out_dir}{nearest(name, STAGES)}")
    if missing or not found:
        refuse(*(missing or [f"{config.out_dir} has none of the models {config.models}. Train one first:",
                             f"  {config.command('train.py')}"]))
    return found


def sample_questions(entries, config):
    """The same `questions` conversations of each kind for every model, spread over the file."""
    by_kind = {}
    for entry in entries:
        by_kind.setdefault(entry.get("kind", "questions"), []).append(entry)
    spread = lambda rows: rows[::max(1, len(rows) // config.questions)][:config.questions]
    return [entry for rows in by_kind.values() for entry in spread(rows)]


def main(config):
    problems = config.below_one("stride", "batch_size", "questions", "remarks", "continuations", "continuation_tokens",
                                "max_new_tokens")
    if config.text_tokens and config.text_tokens < 16:
        problems.append(f"text_tokens must be 0 (all) or at least 16, found {config.text_tokens}")
    refuse(*problems)
    setup = parallel.start(config.device, config.dtype, None, config.threads, config.seed)
    if setup.world > 1:
        refuse("evaluate.py runs in one process: start it with python, not with torchrun")

    # 1. What there is to measure, and with what. Nothing to do when this very thing was measured before.
    folders, tokens, chat_data = open_models(config), Path(config.data_dir) / "tokens", Path(config.data_dir) / "chat"
    output = Path(config.out_dir) / "evaluate.json"
    probes_file = Path(config.probes or ROOT / "config/probes.jsonl")
    inputs = [*folders.values(), probes_file, tokens / "index.json"]
    inputs += [chat_data / name for name in ("index.json", "conversations_val.jsonl", "prompts_val.jsonl",
                                             "baselines.json")]
    made_from = {"config_hash": config.hash, **{str(path): fingerprint(path) for path in inputs if path.exists()}}
    before = read_json(output, {})
    if before.get("made_from") == made_from:
        setup.say(f"{output}: already done; to measure anew, remove it")
        return print_report(before)
    if others := before.get("models", {}).keys() - folders.keys():
        output.replace(kept := output.with_suffix(".before.json"))
        setup.say(f"note: what was measured of {', '.join(sorted(others))} is in {kept} from now on")
    probes = chat.read_lines(probes_file, wrong_probe)
    questions, prompts, bars = [], [], {}
    if (chat_data / "index.json").exists():
        questions = sample_questions(chat.read_conversations(chat_data / "conversations_val.jsonl"), config)
        prompts = chat.read_prompts(chat_data / "prompts_val.jsonl")[:config.remarks]
        bars = read_json(chat_data / "baselines.json")["kinds"]

    # 2. The text itself: what is known of it, and what xz makes of it, in a thread beside the models.
    shards = lambda split, tokenizer: TokenData(tokens, split, tokenizer.hash, config.command("prepare_data.py"))
    tokenizer = Tokenizer.load(next(iter(folders.values())))
    train_documents = documents_of(shards("train", tokenizer), tokenizer)
    val_documents = documents_of(shards("val", tokenizer), tokenizer, config.text_tokens or None)
    known_lines = {line.strip() for document in train_documents for line in document.split(b"\n")}
    xz = config.compare_xz and ThreadPoolExecutor(1).submit(xz_bits, b"".join(train_documents), b"".join(val_documents))
    leaks = leakage(train_documents, {
        "held-out pages": val_documents,
        "probes": [(probe["prompt"] + probe["expected"]).encode() for probe in probes],
        "held-out questions": [entry["messages"][0]["content"].encode() for entry in questions],
        "held-out answers": [entry["messages"][-1]["content"].encode() for entry in questions]})

    # 3. Each model, on everything. The text is read with the model's own tokenizer, which the shards must belong to.
    models = {}
    for name, folder in folders.items():
        model, tokenizer = read_model(folder)
        model.to(setup.device).eval()
        val = shards("val", tokenizer)
        ids = val.read(0, config.text_tokens or val.n_tokens)
        scores = text_scores(token_nats(model, ids, config, setup, tokenizer), ids[1:], tokenizer, known_lines)
        scores["repetition"] = repetition(model, tokenizer, val, config)
        scores["probes"] = probe_scores(model, tokenizer, probes, config)
        if questions:
            scores["questions"], scores["all_questions"] = question_scores(model, tokenizer, questions, config)
            scores["remarks"] = remark_scores(model, tokenizer, prompts, config)
        models[name] = {"folder": str(folder), **scores}
        setup.say(f"measured {name} ({folder})")

    # 4. Side by side.
    by_kind = {}
    for kind in scores.get("questions", {}):
        best = bars.get(kind, {}).get("best")
        exact = {name: measured["questions"][kind]["exact"] for name, measured in models.items()}
        by_kind[kind] = {"best_baseline": best, "baselines": bars.get(kind),
                         "generalised": [name for name, share in exact.items()
                                         if None not in (best, share) and share >= best + LEAD]}
    write_json(output, {
        "made_from": made_from, "models": models, "leakage": leaks, "kinds": by_kind,
        "text": {"tokens": len(ids), "bytes": sum(map(len, val_documents)),
                 "grams_in_training": leaks["held-out pages"]["share"], **(xz.result() if xz else {})}})
    print_report(read_json(output))
    setup.say(f"\nall of it in {output}")


if __name__ == "__main__":
    main(configure(globals()))
