"""
A small world for the tests of reward.py and rlhf.py: the demonstration's task (remarks and the rule that scores them),
with a tokenizer in which each of its words is one token and a model of two narrow layers.
"""
import json
import random
import re
from pathlib import Path

import pytest
import torch

from chatdata import remark
from configurator import configure
from engine import chat, hf
from engine.loss import token_losses
from engine.tokenizer import PATTERNS, SPECIAL_TOKENS, Tokenizer
from model import Llama, ModelConfig

NAMES = ("fill", "wrap", "copy", "join text", "split it up", "walk the tree", "open")      # not all of one length


def tokenizer():
    """All bytes, and all words of the task with the space before them."""
    sentences = [*remark.OPENINGS, *remark.CLOSINGS, *remark.SIGN, *remark.STRENGTH, *remark.QUESTIONS, *NAMES, "and"]
    words = sorted({word for text in sentences for word in re.findall(r" ?\w+", text)})
    words += sorted({" " + word for word in words if not word.startswith(" ")} - set(words))
    ranks = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words if len(word) > 1]
    return Tokenizer(ranks, PATTERNS["gpt4"], {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)})


def model(words, seed=0, sharpness=1.0, **shape):
    """An untrained policy. sharpness > 1 scales its logits: untrained ones are so flat that most mistakes hardly
    show."""
    shape = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "n_inner": 128, "block_size": 128, **shape}
    made = Llama(ModelConfig(vocab_size=words.vocab_size, **shape)).init_weights(seed)
    with torch.no_grad():
        made.lm_head.weight.mul_(sharpness)
        for layer in made.model.layers:                        # attention of an untrained model is even flatter
            layer.self_attn.q_proj.weight.mul_(sharpness)
            layer.self_attn.v_proj.weight.mul_(sharpness)
    return made


def question(rng):
    return [{"role": "user", "content": rng.choice(remark.QUESTIONS).format(rng.choice(NAMES))}]


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_data(folder, prompts=40, pairs=64, control=20, seed=0):
    """chat/ with prompts and preferences, as prepare_chat.py writes it."""
    rng, chat_folder = random.Random(seed), Path(folder) / "chat"
    for name in ("train", "val"):
        write_lines(chat_folder / f"prompts_{name}.jsonl",
                    [{"messages": question(rng), "kind": "remark"} for _ in range(prompts)])
    write_lines(chat_folder / "preferences_train.jsonl",
                [{"prompt": question(rng), "ranked": remark.sample_ranking(rng, 4, 1)} for _ in range(pairs)])
    rows = []
    for i in range(pairs):
        better, worse = remark.sample_pair(rng, 0.5, chosen_is_longer=i % 2 == 0, spoiled=rng.random() < 0.25)
        rows.append({"prompt": question(rng), "chosen": better, "rejected": worse,
                     "scores": {"chosen": remark.score(better), "rejected": remark.score(worse)}})
    write_lines(chat_folder / "preferences_val.jsonl", rows)
    rows = []
    for long, short in remark.sample_control_pairs(rng, control, 1.8):
        chosen, rejected = rng.sample((long, short), 2)
        rows.append({"prompt": question(rng), "chosen": chosen, "rejected": rejected,
                     "scores": {"chosen": remark.score(chosen), "rejected": remark.score(rejected)}})
    write_lines(chat_folder / "preferences_control.jsonl", rows)


def untrained(folder, words, **data):
    """-> the folder, with data and an untrained model where sft.py would have put a trained one."""
    write_data(folder / "data", **data)
    save(folder / "out" / "sft", model(words, sharpness=4.0), words)
    return folder


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def save(folder, made, words):
    """A run's folder with one checkpoint in it."""
    hf.save_model(Path(folder), made, words)


def config_of(script, *arguments):
    """The Config of a stage (a module) with one thread and no machine-dependent choice."""
    return configure(vars(script), ["--device=cpu", "--dtype=fp32", "--threads=1", *arguments])


def instruct(made, words, steps, seed=0, rows=64):
    """Teaches the toy policy to remark, in whatever tone; a few seconds."""
    rng, optimizer = random.Random(seed), torch.optim.AdamW(made.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        rendered = [chat.render(words, question(rng) + [{"role": "assistant", "content": remark.sample(rng)}])
                    for _ in range(rows)]
        width = max(len(ids) for ids, _ in rendered)
        ids = torch.tensor([ids + [words.pad_id] * (width - len(ids)) for ids, _ in rendered])
        weights = torch.tensor([w + [0.0] * (width - len(w)) for _, w in rendered])[:, 1:]
        loss = (token_losses(made(ids[:, :-1]), ids[:, 1:]) * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
