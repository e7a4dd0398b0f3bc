"""
What each way to align a model comes to on the demonstration's task: SFT, DPO, PPO, PPO without its divergence, GRPO.

    bash runs/demo.sh                                            the models that they start from
    python bench/alignment.py                                    all of it: about 40 minutes on two cores
    python bench/alignment.py --methods=grpo, --seeds=2,         a part; the table then shows what there is

All start from out_dir/sft, PPO and GRPO with out_dir/reward, with config/demo.py's settings and the same number of
answers. Each run is in work_dir/METHOD_SEED, and one that is there is not made again. Measured on sampled answers to
the 256 held-out prompts: gold, the rule that the preferences came from, from -2 to 2, and what it cost to get there:
the divergence from SFT in nats per answer, the length in tokens and the share of answers that end by themselves. CPU
seconds of the training runs themselves, loading and evaluation included.
"""
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import rlhf  # noqa: E402
from configurator import configure, refuse  # noqa: E402
from engine.chat import rendered_prompts  # noqa: E402
from engine.files import read_json, write_json  # noqa: E402
from engine.hf import find_folder, read_model  # noqa: E402
from engine.monitor import read_log  # noqa: E402
from engine.parallel import start  # noqa: E402

data_dir = "data/demo"
out_dir = "out/demo"            # with sft and reward
work_dir = "out/alignment"
settings = "config/demo.py"
methods: tuple[str] = ("dpo", "ppo", "ppo_free", "grpo")
seeds: tuple[int] = (1, 2, 3)
threads = 1

SCRIPTS = {"dpo": ["dpo.py"], "ppo": ["rlhf.py"], "ppo_free": ["rlhf.py", "--kl_coef=0.0"], "grpo": ["rlhf.py", "--group=8"]}
NAMES = {"sft": "SFT", "dpo": "DPO", "ppo": "PPO", "ppo_free": "PPO, `kl_coef=0`", "grpo": "GRPO, `group=8`"}


def run(method, seed, config):
    """Trains it where it is not there yet, and leaves alignment.json: its numbers and seconds."""
    out = Path(config.work_dir) / f"{method}_{seed}"
    if (out / "alignment.json").exists():
        return
    script, *more = SCRIPTS[method]
    source = "--init_from" if method == "dpo" else "--policy_from"
    more += [] if method == "dpo" else [f"--reward_from={config.out_dir}/reward"]
    begun_before, spent = out.exists(), cpu_seconds()
    subprocess.run([sys.executable, str(ROOT / script), config.settings, f"--data_dir={config.data_dir}", f"--out_dir={out}",
                    f"{source}={config.out_dir}/sft", f"--seed={seed}", f"--threads={config.threads}", "--device=cpu",
                    "--save_full=4", *more],
                   check=True)
    seconds = None if begun_before else cpu_seconds() - spent           # of a run in two parts nobody knows the first's
    if method == "dpo":
        found = {"after": measured(out / "dpo", seed, config)}
    else:
        found = {name: read_json(out / "ppo" / "result.json")[name] for name in ("before", "after")}
    write_json(out / "alignment.json", {**found, "cpu_seconds": seconds})


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(folder, seed, config):
    """The numbers that rlhf.py gives of a policy, of one that it has not trained."""
    theirs = configure(vars(rlhf), [config.settings, f"--data_dir={config.data_dir}", f"--policy_from={config.out_dir}/sft",
                                    f"--reward_from={config.out_dir}/reward", f"--seed={seed}", "--device=cpu"])
    setup = start("cpu", "fp32", True, config.threads, seed)
    reference, reward, tokenizer, _ = rlhf.read_models(theirs, setup)
    policy, _ = read_model(find_folder(folder), attention=theirs.attention)
    prompts, _ = rendered_prompts(Path(config.data_dir) / "chat" / "prompts_val.jsonl", tokenizer,
                                  policy.config.block_size - theirs.max_new_tokens)
    networks = [network.eval().requires_grad_(False) for network in (policy, reference)]
    return rlhf.evaluate(*networks, None, reward.eval(), prompts[:theirs.eval_prompts], tokenizer, theirs, setup)


def table(config):
    print("| | gold, mean (each seed) | KL, nats | length | answers that stop | CPU seconds "
          "|\n|---|---|---:|---:|---:|---:|")
    found = {}
    for method in SCRIPTS:
        places = [Path(config.work_dir) / f"{method}_{seed}" / "alignment.json" for seed in config.seeds]
        found[method] = [read_json(place) for place in places if place.exists()]
    starts = [{"after": each["before"], "cpu_seconds": 0.0} for each in found["ppo"]]
    for method, runs in {"sft": starts, **found}.items():
        if runs:
            mean = lambda name: statistics.mean(each["after"][name] for each in runs)
            each = ", ".join(f"{each['after']['gold']:.2f}" for each in runs)
            kl = ", ".join(f"{each['after']['kl']:.1f}" for each in runs)
            seconds = [run["cpu_seconds"] for run in runs if run["cpu_seconds"] is not None]
            print(f"| {NAMES[method]} | {mean('gold'):.2f} ({each}) | {mean('kl'):.1f} ({kl}) | {mean('length'):.1f} | "
                  f"{mean('stop_rate'):.1%} | {f'{statistics.mean(seconds):.0f}' if seconds else '-'} |")
    print("\nThe reward model's score (0 and 1 deviation at the start) against the rule's, by how far the policy has "
          "drifted:")
    for method in ("ppo", "ppo_free", "grpo"):
        for seed in config.seeds:
            log = read_log(Path(config.work_dir) / f"{method}_{seed}" / "ppo")
            points = [f"{line['kl']:.1f}: {line['score']:.2f}, {line['gold']:.2f}" for line in log if "gold" in line][::3]
            if points:
                print(f"{NAMES[method]}, seed {seed}   KL: score, gold   {'   '.join(points)}")


def main(config):
    refuse(*(f"methods: {name} is not one of {', '.join(SCRIPTS)}" for name in config.methods if name not in SCRIPTS))
    for method in config.methods:
        for seed in config.seeds:
            run(method, seed, config)
    table(config)


if __name__ == "__main__":
    main(configure(globals()))
