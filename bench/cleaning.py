"""
Does cleaning pay? The same small model on equal tokens of raw and of cleaned text, from three seeds.

    python bench/cleaning.py                          the demo's archive
    python bench/cleaning.py --warc=crawl.warc.gz --out_dir=out/crawl --max_steps=400

Raw is the text of every HTML or text page that was answered with 200: no filter judges it, and only exact copies of a
page are left out. Cleaned is what the demo's settings leave. A page is held out on both sides or on neither. Both are
written in the vocabulary that raw text teaches, which can only help the raw side.

All are measured in bits per byte (smaller is better) on the held-out pages of both sides; 'new lines' counts only lines
that stand in the training text of neither side: what raw text has twice may be both learned and held out.

Everything is kept in out_dir, and what is there is not done again.
"""
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import evaluate
from configurator import configure, refuse
from engine import parallel
from engine.files import read_json, write_json
from engine.hf import find_folder, read_model
from engine.shards import TokenData
from engine.tokenizer import Tokenizer

warc = "data/demo/input/pydoc.warc.gz"
out_dir = "out/cleaning"
seeds: tuple[int] = (1, 2, 3)
max_steps = 100
batch_tokens = 4096             # of a step
vocab_size = 2048

CLEANED = ("--paragraph_min_chars=40",)
RAW = ("--languages=,", "--language_threshold=0", "--min_chars=1", "--max_chars=1000000000", "--min_entropy=0",
       "--min_ascii=0", "--max_replacement=1", "--minhash_threshold=0")
SIDES = {"raw": RAW, "cleaned": CLEANED}
MODEL = ("--n_layer=4", "--n_head=4", "--n_kv_head=4", "--n_embd=128", "--n_inner=344", "--learning_rate=4e-3",
         "--matrix_learning_rate=0.02", "--micro_batch_size=16", "--eval_every=100000", "--save_full=100000",
         "--save_light=100000", "--compile=False")


def script(name, *arguments):
    done = subprocess.run([sys.executable, str(ROOT / name), *arguments], capture_output=True, text=True)
    if done.returncode:
        refuse(f"{name} {' '.join(arguments)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def make_data(config, folder):
    """Documents and token shards of both sides, in one vocabulary."""
    for step in ("documents", "tokens"):
        for side, options in SIDES.items():
            script("prepare_data.py", f"--data_dir={folder / side}", f"--inputs={config.warc}", *options)
        if step == "documents":
            script("train_tokenizer.py", f"--data_dir={folder / 'raw'}", f"--vocab_size={config.vocab_size}")
            shutil.copytree(folder / "raw" / "tokenizer", folder / "cleaned" / "tokenizer", dirs_exist_ok=True)


def train(config, folder, side, seed):
    """The folder of the model."""
    run = folder / f"{side}_{seed}"
    script("train.py", f"--data_dir={folder / side}", f"--out_dir={run}", f"--seed={seed}", *MODEL,
           f"--max_steps={config.max_steps}", f"--batch_tokens={config.batch_tokens}")
    return find_folder(run / "pretrain")


def scores(model_folder, data, tokenizer, known, setup):
    """{held-out side: (bits per byte, bits per byte of new lines)}"""
    model, _ = read_model(model_folder)
    model.to(setup.device).eval()
    options, found = SimpleNamespace(stride=192, batch_size=64), {}
    for side in SIDES:
        ids = data[side, "val"].read(0, data[side, "val"].n_tokens)
        nats = evaluate.token_nats(model, ids, options, setup, tokenizer)
        told = evaluate.text_scores(nats, ids[1:], tokenizer, known)
        found[side] = float(told["bits_per_byte"]), float(told["bits_per_byte_new_lines"])
    return found


def show(config, results):
    columns = [f"{side} pages{new}" for side in SIDES for new in ("", ", new lines")]
    print("| trained on | " + " | ".join(f"{name}: seeds | mean" for name in columns) + " |\n|---"
          + "|---|---:" * len(columns) + "|")
    for side in SIDES:
        cells = []
        for held_out in SIDES:
            for new in (0, 1):
                values = [results[side, seed][held_out][new] for seed in config.seeds]
                cells += [" ".join(f"{value:.3f}" for value in values), f"{statistics.mean(values):.3f}"]
        print(f"| {side} | " + " | ".join(cells) + " |")


def main(config):
    if not Path(config.warc).is_file():
        refuse(f"there is no archive {config.warc}; python prepare_data.py config/demo.py makes the demo's")
    setup, folder = parallel.start("cpu", "auto", None, 0), Path(config.out_dir)
    make_data(config, folder)
    tokenizer = Tokenizer.load(folder / "raw" / "tokenizer")
    data = {(side, split): TokenData(folder / side / "tokens", split, tokenizer.hash) for side in SIDES
            for split in ("train", "val")}
    known = set()
    for side in SIDES:
        audit, train_data = read_json(folder / side / "audit.json"), data[side, "train"]
        known |= {line.strip() for text in evaluate.documents_of(train_data, tokenizer) for line in text.split(b"\n")}
        print(f"{side}: {sum(entry['documents'] for entry in audit['documents']):,} documents, {train_data.n_tokens:,} "
              f"tokens to learn from, of which {config.max_steps * config.batch_tokens:,} are taken", flush=True)
    results = {}
    for seed in config.seeds:
        for side in SIDES:
            path = folder / f"{side}_{seed}.json"
            if not path.exists():
                write_json(path, scores(train(config, folder, side, seed), data, tokenizer, known, setup))
            results[side, seed] = read_json(path)
    show(config, results)


if __name__ == "__main__":
    main(configure(globals()))
