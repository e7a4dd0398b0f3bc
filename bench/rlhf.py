"""
How many answers PPO learns from in a second, beside TRL's PPO on the same model, prompts, lengths, epochs and
minibatches.

    pip install 'trl==1.10.0'          the last one with a PPO: trl.experimental.ppo; in an environment of its own
    python bench/rlhf.py                                        an untrained model, whose answers end after about 27 tokens
    python bench/rlhf.py --ends=False --new_tokens=32           every answer has all of new_tokens
    python bench/rlhf.py --models=out/demo --data_dir=data/demo                 the demo's

Each of `pairs` pairs is a run of ours and one of theirs in one process, `updates` updates each, of which the first is
not counted (it warms up, and checks itself). All of an update counts: sampling, scoring by reference, critic and
reward model, two epochs of two minibatches; loading, saving and what is evaluated before and after do not. fp32,
nothing compiled. The ratio is the median over the pairs. The products of matrices take the time, and where every
answer is as long as the limit both do nearly the same ones. Where answers end by themselves TRL still samples, scores
and learns at the limit's width; rlhf.py reads answers of one length together, and has logits and the last layer's MLP
for the answers' tokens only.
"""
import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import rlhf  # noqa: E402
from configurator import configure, refuse  # noqa: E402
from engine import hf  # noqa: E402
from engine.chat import rendered_prompts  # noqa: E402
from engine.files import write_atomic  # noqa: E402
from engine.monitor import read_log  # noqa: E402
from engine.tokenizer import PATTERNS, SPECIAL_TOKENS, Tokenizer  # noqa: E402
from model import Llama, ModelConfig, ScalarModel  # noqa: E402

pairs = 3
updates = 3
episodes = 64           # answers per update
new_tokens = 64
ends = True             # of the untrained model: each of its tokens is the end with probability 1/30
threads = 1
models = ""             # a folder with sft and reward, for prompts in data_dir; empty: made here
data_dir = "data/demo"
peer = True             # False: only ours

SHAPE = dict(vocab_size=2048, n_layer=4, n_head=4, n_kv_head=4, n_embd=256, n_inner=704, block_size=256)    # the demo's
RATE = 1e-7             # next to nothing, so that answers stay as long as they are at the start


def tokenizer():
    """Bytes, pairs of letters, and the special tokens: 2,048 in all."""
    two = (bytes(pair) for pair in product(range(33, 127), repeat=2))
    ranks = [bytes([b]) for b in range(256)] + [next(two) for _ in range(2048 - 256 - len(SPECIAL_TOKENS))]
    return Tokenizer(ranks, PATTERNS["gpt4"], {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)})


def write_world(folder):
    """An untrained policy, a reward model, and prompts of 12 to 27 tokens."""
    words = tokenizer()
    policy = Llama(ModelConfig(**SHAPE)).init_weights(1)
    end = words.special("<|end|>")
    with torch.no_grad():       # one coordinate is the same at every position, and it alone decides whether the answer ends
        policy.model.embed_tokens.weight[:, 0] = 1
        for layer in policy.model.layers.children():
            layer.self_attn.o_proj.weight[0], layer.mlp.down_proj.weight[0] = 0, 0
        policy.lm_head.weight[:, 0], policy.lm_head.weight[end] = 0, 0
        policy.lm_head.weight[end, 0] = math.log(2047 / 29) / policy.model(torch.arange(256)[None])[..., 0].mean()
    hf.save_model(folder / "sft", policy, words)
    hf.save_model(folder / "reward", ScalarModel(policy.config).init_weights(2), words)
    for name in ("train", "val"):
        lines = [json.dumps({"messages": [{"role": "user", "content": "?" * (9 + number % 16)}]}) for number in range(256)]
        (folder / "chat").mkdir(exist_ok=True)
        write_atomic(folder / "chat" / f"prompts_{name}.jsonl", "\n".join(lines) + "\n")


def ours(folder, config, number):
    """Seconds of each update but the first, and their parts."""
    ends, source, data = config.models or config.ends, config.models or folder, config.data_dir if config.models else folder
    if not ends:
        rlhf.chat.stop_ids = lambda words: set()
    settings = configure(vars(rlhf), [
        f"--data_dir={data}", f"--policy_from={source}/sft", f"--reward_from={source}/reward", f"--out_dir={folder}/{number}",
        "--device=cpu", f"--threads={config.threads}", f"--updates={config.updates}", f"--episodes={config.episodes}",
        f"--max_new_tokens={config.new_tokens}", "--micro_batch_size=32", "--eval_prompts=1", "--attention=fp32",
        "--max_approx_kl=0.0", "--save_full=0", "--verdicts=False", f"--learning_rate={RATE}", f"--value_learning_rate={RATE}",
        f"--seed={number + 1}"])
    with contextlib.redirect_stdout(io.StringIO()):
        rlhf.main(settings)
    records = [record for record in read_log(folder / str(number) / "ppo") if "rollout_seconds" in record][1:]
    assert all(record["optimizer_steps"] == 4 and (ends or record["length"] == config.new_tokens) for record in records)
    return [[record[f"{part}_seconds"] for part in ("rollout", "scoring", "update")] for record in records]


def theirs(folder, config, number):
    """Seconds of each update but the first."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast, TrainerCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    class Clock(TrainerCallback):
        times = []

        def on_step_end(self, *args, **more):
            self.times.append(time.perf_counter())

    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(config.threads)
    sft, reward = (hf.find_folder(Path(config.models or folder) / stage) for stage in ("sft", "reward"))
    words = Tokenizer.load(sft)
    data = Path(config.data_dir if config.models else folder)
    prompts, _ = rendered_prompts(data / "chat" / "prompts_train.jsonl", words, 256 - config.new_tokens)
    asked = Dataset.from_dict({"input_ids": [prompt["ids"] for prompt in prompts]})
    processor = PreTrainedTokenizerFast(tokenizer_file=str(sft / "tokenizer.json"), padding_side="left",
                                        pad_token="<|pad|>", eos_token="<|eos|>")
    policies = [LlamaForCausalLM.from_pretrained(sft, dtype=torch.float32) for _ in range(2)]
    scorers = [LlamaForSequenceClassification.from_pretrained(reward, num_labels=1, dtype=torch.float32)
               for _ in range(2)]
    settings = PPOConfig(
        output_dir=str(folder / f"trl{number}"), per_device_train_batch_size=32, gradient_accumulation_steps=config.episodes // 32,
        num_mini_batches=2, num_ppo_epochs=2, total_episodes=config.episodes * config.updates, response_length=config.new_tokens,
        local_rollout_forward_batch_size=config.episodes, temperature=1.0, kl_coef=0.05, learning_rate=RATE, use_cpu=True,
        bf16=False, report_to="none", save_strategy="no", num_sample_generations=0, disable_tqdm=True, seed=number + 1,
        stop_token_id=words.special("<|end|>") if config.models or config.ends else None)
    clock = Clock()
    clock.times = []
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = PPOTrainer(args=settings, processing_class=processor, model=policies[0], ref_model=policies[1],
                             reward_model=scorers[0], value_model=scorers[1], train_dataset=asked,
                             eval_dataset=asked.select(range(1)), callbacks=[clock])
        trainer.train()
    return [b - a for a, b in zip(clock.times, clock.times[1:])]


def main(config):
    problems = config.below_one("pairs", "new_tokens", "threads")
    if config.updates < 2 or config.episodes % 64:
        problems.append("expected at least 2 updates (the first is not counted) and a multiple of 64 episodes")
    refuse(*problems)
    if config.peer:
        try:
            import trl
            from trl.experimental.ppo import PPOTrainer  # noqa: F401
        except ImportError as error:
            refuse(f"{error}: pip install 'trl==1.10.0', or --peer=False")
        print(f"torch {torch.__version__}, trl {trl.__version__}, {config.threads} threads")
    ratios, mine, other = [], [], []
    with tempfile.TemporaryDirectory() as place:
        write_world(Path(place))
        for number in range(config.pairs):
            parts = ours(Path(place), config, number)
            mine.append([statistics.mean(column) for column in zip(*parts)])
            if config.peer:
                other.append(statistics.mean(theirs(Path(place), config, number)))
                ratios.append(other[-1] / sum(mine[-1]))
    rate = lambda seconds: config.episodes / statistics.median(seconds) / config.threads
    print("| PPO | answers/s per core | rollout, s | scoring, s | update, s |\n|---|---:|---:|---:|---:|")
    split = " | ".join(f"{statistics.median(column):.2f}" for column in zip(*mine))
    print(f"| rlhf.py | {rate([sum(parts) for parts in mine]):.2f} | {split} |")
    if config.peer:
        print(f"| TRL | {rate(other):.2f} | - | - | - |\nratio {statistics.median(ratios):.2f} "
              f"(of {config.pairs} pairs: {min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main(configure(globals()))
