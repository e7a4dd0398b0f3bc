"""train.py as a user runs it: real signals, several processes, exact comparisons."""
import contextlib
import io
import itertools
import json
import math
import os
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train as script
from configurator import configure
from engine import hf
from engine.manifest import newest, verify
from engine.monitor import read_log
from engine.shards import ShardWriter, TokenData, batch, n_blocks, write_index
from programs import Program, run
from small import ALONE, ROOT, byte_tokenizer, small_llama

SHAPE = ("--n_layer=2 --n_head=2 --n_kv_head=2 --n_embd=32 --n_inner=64 --block_size=32 --batch_tokens=256 --micro_batch_size=2 "
         "--learning_rate=3e-3 --eval_every=1000 --eval_blocks=4 --log_every=1 --threads=1 --device=cpu --dtype=fp32 --compile=False").split()


def make_data(folder, n_docs=60, seed=0):
    """Documents of made-up words as token shards, and the byte tokenizer they were made with."""
    tokenizer, rng = byte_tokenizer(), random.Random(seed)
    words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(1, 6))) for _ in range(40)]
    splits = {}
    for split, count in (("train", n_docs), ("val", 8)):
        writer = ShardWriter(folder / "tokens", split, tokenizer.vocab_size, shard_tokens=3000)
        for _ in range(count):
            text = " ".join(rng.choice(words) for _ in range(rng.randint(3, 40)))
            writer.add(np.array([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]))
        splits[split] = writer.close()
    write_index(folder / "tokens", tokenizer, splits)
    tokenizer.save(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


def command(data, out, *extra, file=ROOT / "train.py"):
    return [str(file), f"--data_dir={data}", f"--out_dir={out}", *SHAPE, *extra]


def launch(*words, code=0, processes=1, **more):
    """train.py in processes of its own; -> what it printed."""
    ended, said = Program(*command(*words, **more), processes=processes).wait()
    assert ended == code, said
    return said


def train(data, out, *extra, code=0):
    """The same in this process, which saves its start; -> what it printed."""
    said, ended = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            script.main(configure(vars(script), [f"--data_dir={data}", f"--out_dir={out}", *SHAPE, *extra]))
        except SystemExit as stop:
            ended = stop.code
    assert ended == code, said.getvalue()
    return said.getvalue()


def losses(out):
    return [record["loss"] for record in read_log(out / "pretrain") if "loss" in record]


def weights(out, step):
    return load_file(out / "pretrain" / f"step_{step:08d}" / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kill_after(data, out, step, *extra):
    """Starts a run and sends kill -9 once its log says that `step` is done; -> the last step that it logged."""
    program, log = Program(*command(data, out, *extra)), out / "pretrain" / "log.jsonl"
    program.until(lambda: log.exists() and log.read_bytes().count(b"\n") >= step)
    program.kill()
    return log.read_bytes().count(b"\n")


@pytest.mark.parametrize("mode", ["fp32 eager", "bf16 compiled", "fp32 eager, Muon"])
def test_kill_and_resume_is_bit_identical(data, tmp_path, mode):
    """With dropout, accumulation over two micro-batches, saves in the background, and a kill -9 at random steps: two of
    them, one where each start is long."""
    extra = ["--max_steps=24", "--save_full=5", "--save_light=0", "--dropout=0.1", "--micro_batch_size=4", "--async_save=True"]
    if mode == "bf16 compiled":
        extra += ["--dtype=bf16", "--compile=True"]
    if "Muon" in mode:
        extra += ["--matrix_learning_rate=0.02"]
    train = launch if mode == "bf16 compiled" else globals()["train"]     # what is compiled for one run is not reused for another
    train(data, tmp_path / "whole", *extra)
    rng = random.Random(time.time())
    steps = sorted(rng.sample(range(6, 23), 2 if mode == "fp32 eager" else 1))
    for number, step in enumerate(steps):               # the second comes to have one line more, of the step done again
        kill_after(data, tmp_path / "torn", step + number, *extra)
    train(data, tmp_path / "torn", *extra)
    assert losses(tmp_path / "torn") == losses(tmp_path / "whole"), steps
    assert same(weights(tmp_path / "torn", 24), weights(tmp_path / "whole", 24)), steps
    attempts = {json.loads(line)["attempt"] for line in (tmp_path / "torn" / "pretrain" / "log.jsonl").read_text().splitlines()}
    assert len(attempts) >= 2, "the kill came too late to test anything"
    assert "already done" in train(data, tmp_path / "torn", *extra)


def test_one_and_two_processes_give_the_same_losses(data, tmp_path):
    extra = ["--max_steps=8"]
    said = train(data, tmp_path / "one", *extra)
    other = launch(data, tmp_path / "two", *extra, processes=2)
    assert "256 tokens = 1 x 4 x 2 x 32" in said and "256 tokens = 2 x 2 x 2 x 32" in other
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 8 and max(abs(a - b) for a, b in zip(one, two)) < 1e-5
    assert one[-1] < one[0] - 0.5
    one, two = ([record["grad_norm"] for record in read_log(tmp_path / out / "pretrain")] for out in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-3)                 # Adam learns the same from half a gradient
    a, b = weights(tmp_path / "one", 8), weights(tmp_path / "two", 8)
    assert max((a[name] - b[name]).abs().max() for name in a) < 1e-4


def test_any_split_into_micro_batches_is_the_same_step(data, tmp_path):
    runs = {}
    for size in (1, 8):
        train(data, tmp_path / str(size), "--max_steps=3", f"--micro_batch_size={size}")
        runs[size] = losses(tmp_path / str(size))
    assert max(abs(a - b) for a, b in zip(*runs.values())) < 1e-6


def poison(calls, rank=0):
    """model_losses as train.py calls it, but NaN at these calls (the first is 1) of one rank."""
    real, count = script.model_losses, itertools.count(1)

    def losses(*words, **more):
        bad = next(count) in calls and int(os.environ.get("RANK", 0)) == rank
        return tuple(part * (math.nan if bad else 1.0) for part in real(*words, **more))
    return losses


def test_a_step_that_is_not_finite_is_skipped_and_reported(data, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "model_losses", poison({9}))                      # the first micro-batch of the third step
    assert "step skipped" in train(data, tmp_path / "out", "--max_steps=8")
    records = {record["step"]: record for record in read_log(tmp_path / "out" / "pretrain")}
    assert records[3]["skipped"] and len(records[3]["blocks"]) == 8 and "skipped" not in records[4]
    assert all(torch.isfinite(w).all() for w in weights(tmp_path / "out", 8).values())


def test_too_many_such_steps_end_the_run_with_the_last_good_checkpoint(data, tmp_path, monkeypatch):
    extra = ["--max_steps=30", "--save_full=2", "--save_light=2", "--max_bad_steps=3"]
    for begin in (17, 1):               # from the fifth step on; then again from the checkpoint of the sixth, where two were counted
        with monkeypatch.context() as patch:
            patch.setattr(script, "model_losses", poison(range(begin, 200)))
            assert "step 7: 3 steps in a row" in refused(data, tmp_path / "out", *extra)
    train(data, tmp_path / "good", *extra, "--keep=0")
    good = weights(tmp_path / "good", 4)
    assert same(weights(tmp_path / "out", 4), good)                               # as it was
    said = train(data, tmp_path / "out", *extra)                                  # and the run can go on from it
    assert "pretrained model in" in said


ONE_RANK_IS_BAD = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
from test_train import configure, poison, script
end = script.end_step
def watched(run, done, total, config, modules, *rest):
    bits = torch.cat([p.detach().flatten() for p in modules["model"].parameters()])
    torch.save(bits, config.out_dir + "/rank" + os.environ["RANK"] + "_step" + str(done))
    return end(run, done, total, config, modules, *rest)
script.end_step, script.model_losses = watched, poison({calls}, rank=1)
script.main(configure(vars(script)))
"""


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(data, tmp_path):
    """Two micro-batches a step on each rank. NaN on rank 1 only: in the first of step 3, and in all from step 7 on."""
    file, out = tmp_path / "bad.py", tmp_path / "out"
    file.write_text(ONE_RANK_IS_BAD.format(root=str(ROOT), tests=str(ROOT / "tests"), calls={5, *range(13, 100)}))
    extra = ["--max_steps=12", "--save_full=2", "--save_light=2", "--max_bad_steps=3"]
    said = launch(data, out, *extra, processes=2, file=file, code=1)
    assert said.count("step skipped") == 4 and said.count("3 steps in a row") == 1
    assert [record["step"] for record in read_log(out / "pretrain") if record.get("skipped")] == [3, 7, 8, 9]
    first, second = ([torch.load(out / f"rank{rank}_step{step}", weights_only=True) for step in range(1, 9)] for rank in (0, 1))
    for step, (one, other) in enumerate(zip(first, second), start=1):
        assert torch.isfinite(one).all() and torch.equal(one, other), step
        assert step == 1 or torch.equal(one, first[step - 2]) == (step in (3, 7, 8)), step
    found = newest(out / "pretrain", "full")
    assert found.name == "full_00000008" and verify(found) == []
    kept = torch.cat([w.flatten() for w in weights(out, 8).values()])
    assert torch.equal(kept.sort().values, first[5].sort().values)                # as after step 6, the last good one
    assert "saved by 2 processes, continued by 1" in train(data, out, *extra)     # and the run can go on from it


def refused(data, out, *extra, **kw):
    return train(data, out, *extra, code=2, **kw)


def test_no_data_names_the_commands(tmp_path):
    done = run("train.py", "config/llama2_7b.py", f"--data_dir={tmp_path}/none", f"--out_dir={tmp_path}/out")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "python prepare_data.py config/llama2_7b.py" in done.stderr and "python train_tokenizer.py config/llama2_7b.py" in done.stderr


def test_no_data_on_two_processes(tmp_path):
    done = run(*command(tmp_path / "none", tmp_path / "out"), processes=2)
    assert done.returncode != 0 and done.stderr.count("no tokenizer") == 1        # one rank says it
    assert "python prepare_data.py" in done.stderr


def test_a_folder_that_only_rank_0_finds_taken_is_one_sentence(data, tmp_path):
    (tmp_path / "taken").write_text("a file")
    done = run(*command(data, tmp_path / "taken"), processes=2)
    assert done.returncode != 0 and "cannot write into" in done.stderr and "RuntimeError" not in done.stderr


@pytest.mark.parametrize("world, micro_batches", [(1, 1), (2, 1), (8, 1)])
def test_the_readmes_commands_fit_their_configs(world, micro_batches):
    """torchrun --nproc_per_node=2 train.py config/demo.py: fewer sequences each than micro_batch_size are no error."""
    config, tokenizer = configure(vars(script), [str(ROOT / "config" / "demo.py")]), byte_tokenizer()
    data, setup = SimpleNamespace(sources=[]), replace(ALONE, world=world)
    shape = script.shape_of(config, tokenizer)
    layout = script.check(config, shape, tokenizer, data, setup)
    assert (layout.dp, layout.n_micro) == (world, micro_batches)
    assert world * layout.n_micro * layout.micro * config.block_size == config.batch_tokens


def test_everything_wrong_is_said_at_once(data, tmp_path):
    said = refused(data, tmp_path / "out", "--n_head=3", "--schedule=step", "--vocab_size=10", "--block_size=100000", "--dropout=2",
                   "--max_bad_steps=0", "--learning_rate=0", "--matrix_learning_rate=0.1")
    for part in ("max_bad_steps must be", "matrix_learning_rate needs", "n_head = 3", "schedule must be", "vocab_size = 10", "fewer than one block", "dropout must be"):
        assert part in said
    assert not (tmp_path / "out" / "pretrain" / "config.json").exists()
    said = refused(data, tmp_path / "out", "--n_layer=10**12", "--n_inner=10**12", "--schedule=step")
    assert all(part in said for part in ("n_layer must be from 1 to", "n_inner must be from 1 to", "schedule must be"))
    said = refused(data, tmp_path / "out", "--batch_tokens=300")
    assert "multiple of block_size * micro_batch_size * processes = 32 * 2 * 1 = 64; set batch_tokens = 320" in said


def test_another_tokenizer_is_refused_with_both_hashes(tmp_path):
    folder = make_data(tmp_path / "data")
    tokenizer = byte_tokenizer()
    other = type(tokenizer)(tokenizer.ranks + [b"ab"], tokenizer.pattern, {name: id + 1 for name, id in tokenizer.specials.items()})
    other.save(folder / "tokenizer")
    said = refused(folder, tmp_path / "out")
    assert tokenizer.hash in said and other.hash in said and "prepare_data.py" in said


def test_other_settings_do_not_continue_a_run(data, tmp_path):
    train(data, tmp_path / "out", "--max_steps=2")
    said = refused(data, tmp_path / "out", "--max_steps=2", "--n_embd=48", "--seed=9")
    assert "n_embd = 32, now it is 48" in said and "seed = 1, now it is 9" in said
    said = refused(make_data(data.parent / "other", seed=5), tmp_path / "out", "--max_steps=4")
    assert "max_steps" in said


def test_other_data_does_not_continue_a_run(tmp_path):
    folder = make_data(tmp_path / "data")
    kill_after(folder, tmp_path / "out", 4, "--max_steps=4000", "--save_full=2")
    make_data(tmp_path / "data", seed=5)
    assert "was begun with data of other content" in refused(folder, tmp_path / "out", "--max_steps=4000", "--save_full=2")


def test_a_folder_is_for_one_run_at_a_time(data, tmp_path):
    program = Program(*command(data, tmp_path / "out", "--max_steps=100000"))
    try:
        assert program.until((tmp_path / "out" / "pretrain" / "log.jsonl").exists), program.text()
        assert f"in use by process {program.pids[0]}" in refused(data, tmp_path / "out", "--max_steps=100000")
    finally:
        program.kill()


def test_init_from_keeps_every_weight(data, tmp_path):
    train(data, tmp_path / "first", "--max_steps=3")
    start = tmp_path / "first" / "pretrain" / "step_00000003"
    train(data, tmp_path / "second", "--max_steps=1", f"--init_from={start}", "--learning_rate=0", "--weight_decay=0")
    assert same(weights(tmp_path / "second", 1), weights(tmp_path / "first", 3))
    said = refused(data, tmp_path / "third", f"--init_from={start}", "--n_embd=64", "--n_inner=96")
    assert "n_embd = 64" in said and "n_inner = 96" in said


def foreign_folder(folder, **changes):
    """A model of another family, in bf16, in many files, as one from elsewhere; -> (its folder, its weights in fp32)."""
    model = small_llama(5, **{**dict(n_head=2, n_kv_head=2, block_size=64, qkv_bias=True, rope_theta=1e6), **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "SHARD_BYTES", 5000)
        hf.save_model(folder, model.to(torch.bfloat16), byte_tokenizer())
    return folder, {name: p.detach().float() for name, p in model.named_parameters()}


def test_init_from_a_folder_of_another_family_keeps_every_weight(data, tmp_path):
    start, expected = foreign_folder(tmp_path / "start")
    assert len(list(start.glob("*.safetensors"))) > 3
    train(data, tmp_path / "out", "--max_steps=1", f"--init_from={start}", "--learning_rate=0", "--weight_decay=0")
    found = weights(tmp_path / "out", 1)
    assert any(name.endswith("q_proj.bias") and p.abs().min() > 0 for name, p in found.items()) and same(found, expected)
    described = json.loads((tmp_path / "out" / "pretrain" / "step_00000001" / "config.json").read_text())
    assert (described["model_type"], described["rope_theta"], described["max_position_embeddings"]) == ("qwen2", 1e6, 64)
    assert described["torch_dtype"] == "float32"


def test_a_block_beyond_the_models_context_needs_a_scaling(data, tmp_path):
    start, _ = foreign_folder(tmp_path / "start")
    settings = ["--max_steps=1", f"--init_from={start}", "--block_size=128"]
    said = train(data, tmp_path / "out", *settings, code=2)
    assert "block_size = 128 is beyond the max_position_embeddings = 64" in said and "'factor': 2.0" in said
    yarn = "--rope_scaling={'rope_type': 'yarn', 'factor': %s}"
    assert "set factor = 2 or more" in train(data, tmp_path / "out", *settings, yarn % 1.5, code=2)
    assert "yarn needs factor" in train(data, tmp_path / "out", *settings, "--rope_scaling={'rope_type': 'yarn'}", code=2)
    train(data, tmp_path / "out", *settings, yarn % 2.0)
    described = json.loads((tmp_path / "out" / "pretrain" / "step_00000001" / "config.json").read_text())
    assert described["max_position_embeddings"] == 128
    assert described["rope_scaling"] == {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


def test_init_from_a_model_with_another_tokenizer_is_refused(data, tmp_path):
    start, _ = foreign_folder(tmp_path / "start")
    content = (start / "tokenizer.json").read_text().replace("<|pad|>", "<|fill|>")
    (start / "tokenizer.json").write_text(content)
    assert "the same id is another token" in train(data, tmp_path / "out", "--max_steps=1", f"--init_from={start}", code=2)


def test_a_vocabulary_larger_than_the_tokenizers_is_no_contradiction(data, tmp_path):
    start, expected = foreign_folder(tmp_path / "start", vocab_size=320)
    train(data, tmp_path / "out", "--max_steps=1", f"--init_from={start}", "--learning_rate=0", "--weight_decay=0")
    assert same(weights(tmp_path / "out", 1), expected)


def test_switches_that_no_file_can_say_are_refused_before_the_run(data, tmp_path):
    said = train(data, tmp_path / "out", "--max_steps=1", "--qkv_bias=True", "--qk_norm=True", code=2)
    assert "qkv_bias = True can not be said" in said and not (tmp_path / "out").exists()


def test_gradients_are_clipped(data, tmp_path):
    train(data, tmp_path / "first", "--max_steps=1")
    start = tmp_path / "first" / "pretrain" / "step_00000001"
    for clip, moved in (("1e-12", False), ("1", True)):         # far below Adam's epsilon of 1e-8 nothing moves
        train(data, tmp_path / clip, "--max_steps=1", f"--init_from={start}", "--weight_decay=0", f"--grad_clip={clip}")
        old, new = weights(tmp_path / "first", 1), weights(tmp_path / clip, 1)
        assert (max((old[name] - new[name]).abs().max() for name in old) > 1e-5) == moved


def test_held_out_numbers_by_hand(data):
    tokenizer, model = byte_tokenizer(), small_llama(3, dropout=0.5).train()
    val = TokenData(data / "tokens", "val", tokenizer.hash)
    blocks = range(n_blocks(val.n_tokens, 32))                  # the last of them is padded
    byte_counts = torch.tensor([len(b) for b in tokenizer.token_bytes])
    settings = SimpleNamespace(micro_batch_size=2, block_size=32, loss_chunk=7, z_loss=0.1, separate_documents=False)
    scores = script.evaluate(model, val, blocks, settings, tokenizer, byte_counts, ALONE)
    assert model.training
    x, y, w = (torch.from_numpy(part) for part in batch(val, blocks, 32))
    losses = -model.eval()(x).log_softmax(-1).gather(-1, y[..., None])[..., 0]
    real, eos, bos, first = w > 0, y == tokenizer.eos_id, y == tokenizer.bos_id, x == tokenizer.bos_id
    assert not real.all() and not (real & bos).any()
    by_hand = {"loss": losses[real].mean(), "loss_eos": losses[real & eos].mean(), "loss_bos": losses[bos].mean(),
               "loss_first": losses[real & first].mean(), "loss_ordinary": losses[real & ~eos & ~first].mean(),
               "bits_per_byte": losses[real & (y < 256)].mean() / math.log(2)}        # each byte is a token
    assert scores == pytest.approx({name: value.item() for name, value in by_hand.items()}, rel=1e-5)


def test_data_that_ends_starts_again(tmp_path):
    folder = make_data(tmp_path / "data", n_docs=6)
    train(folder, tmp_path / "out", "--max_steps=12")
    index = json.loads((folder / "tokens" / "index.json").read_text())
    assert 12 * 256 > 3 * index["splits"]["train"]["n_tokens"]        # three epochs and more
    assert len(losses(tmp_path / "out")) == 12


def test_a_mixture_is_trained_on_and_held_out_by_source(data, tmp_path):
    """Held-out numbers of each source as of that source alone, and the whole weighted by the shares."""
    other = make_data(tmp_path / "other", seed=3)
    mix = f"--data_mix={ {str(data): 3, str(other): 1} }"
    train(data, tmp_path / "first", "--max_steps=2")
    start = [f"--init_from={tmp_path / 'first' / 'pretrain'}", "--max_steps=1", "--learning_rate=0", "--weight_decay=0"]
    alone = {}
    for folder in (data, other):
        train(folder, tmp_path / f"alone_{folder.name}", *start, "--eval_blocks=8")
        alone[folder.name] = read_log(tmp_path / f"alone_{folder.name}" / "pretrain")[-1]
    said = train(data, tmp_path / "mixed", *start, "--eval_blocks=16", mix)
    assert f"{data.name}: 0.75 of it" in said and "other: 0.25 of it" in said
    found = read_log(tmp_path / "mixed" / "pretrain")[-1]
    for name, record in alone.items():
        assert found[f"val_loss_of_{name}"] == pytest.approx(record["val_loss"], rel=1e-6)
    for name in ("val_loss", "val_bits_per_byte", "val_loss_eos"):
        whole = 0.75 * alone[data.name][name] + 0.25 * alone["other"][name]
        assert found[name] == pytest.approx(whole, rel=1e-6), name
    result = json.loads((tmp_path / "mixed" / "pretrain" / "result.json").read_text())
    assert result["val_loss_of_other"] == found["val_loss_of_other"]
    said = refused(data, tmp_path / "no", "--data_mix={'data/none': 0.5, 'data/neither': 0.5}")
    assert "data/none" in said and "data/neither" in said
    said = refused(data, tmp_path / "mixed", *start[:1], mix.replace(": 3", ": 2"))
    assert "data_mix = " in said


def test_losses_are_split_by_target(data, tmp_path):
    train(data, tmp_path / "out", "--max_steps=2")
    record = read_log(tmp_path / "out" / "pretrain")[-1]
    assert {"loss_ordinary", "loss_eos", "loss_bos", "loss_first", "val_bits_per_byte", "tokens_per_second", "data_seconds"} <= record.keys()


def test_a_folder_that_can_not_be_written(data, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(data, tmp_path / "file").lower()


def test_cuda_asked_for_where_there_is_none(data, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "sees no CUDA device" in refused(data, tmp_path / "out", "--device=cuda")


def test_what_saves_memory_changes_no_result(data, tmp_path):
    """The loss in chunks, whole blocks or the MLPs computed anew; with dropout, whose noise must come out the same."""
    runs = {"plain": [], "full": ["--recompute=full"], "selective": ["--recompute=selective"], "chunks": ["--loss_chunk=5"]}
    for name, extra in runs.items():
        train(data, tmp_path / name, "--max_steps=4", "--dropout=0.2", *extra)
    plain = losses(tmp_path / "plain")
    for name in ("full", "selective"):
        assert losses(tmp_path / name) == plain and same(weights(tmp_path / name, 4), weights(tmp_path / "plain", 4)), name
    assert max(abs(a - b) for a, b in zip(losses(tmp_path / "chunks"), plain)) < 1e-6
    said = refused(data, tmp_path / "out", "--loss_chunk=-1", "--z_loss=-1", "--recompute=some", "--attention=fast")
    assert all(part in said for part in ("loss_chunk must", "z_loss must", "recompute must", "attention must"))


def test_two_processes_with_all_of_that_at_once(data, tmp_path):
    """Documents apart, loss in chunks, MLPs computed anew, vocabulary padded: on two processes as on one."""
    extra = ["--max_steps=3", "--separate_documents=True", "--loss_chunk=20", "--recompute=selective", "--z_loss=1e-3",
             "--vocab_size=320"]
    train(data, tmp_path / "one", *extra)
    launch(data, tmp_path / "two", *extra, processes=2)
    assert max(abs(a - b) for a, b in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True)) < 1e-5


def test_documents_apart_are_trained_and_held_out_as_if_alone(data):
    tokenizer, model = byte_tokenizer(), small_llama(3)
    val = TokenData(data / "tokens", "val", tokenizer.hash)
    blocks = range(n_blocks(val.n_tokens, 32))
    settings = SimpleNamespace(micro_batch_size=2, block_size=32, loss_chunk=0, z_loss=0.0, separate_documents=True)
    byte_counts = torch.tensor([len(b) for b in tokenizer.token_bytes])
    found = script.evaluate(model, val, blocks, settings, tokenizer, byte_counts, ALONE)["loss"]
    x, y, w = (torch.from_numpy(part) for part in batch(val, blocks, 32))
    total = 0.0
    for ids, targets, weight in zip(x, y, w):                      # by hand: each piece of a block up to the next BOS
        edges = [0, *(i for i in range(1, 32) if ids[i] == tokenizer.bos_id), 32]
        for a, b in itertools.pairwise(edges):
            logp = model(ids[None, a:b])[0].log_softmax(-1)
            total -= (logp[range(b - a), targets[a:b]] * weight[a:b]).sum().item()
    assert found == pytest.approx(total / w.sum().item(), rel=1e-5)
    total = script.forward_backward(model, [(x, y, w)], settings, tokenizer, ALONE)
    assert total[0].item() == pytest.approx(found, rel=1e-5)
    settings.separate_documents = False
    other = script.evaluate(model, val, blocks, settings, tokenizer, byte_counts, ALONE)["loss"]
    assert abs(other - found) > 1e-4                               # and they would have been seen


def test_rows_that_pad_the_vocabulary_are_neither_counted_nor_learned(data, tmp_path):
    train(data, tmp_path / "plain", "--max_steps=3", "--weight_decay=0")
    train(data, tmp_path / "padded", "--max_steps=3", "--weight_decay=0", "--vocab_size=384")
    n = byte_tokenizer().vocab_size
    trained = weights(tmp_path / "padded", 3)["model.embed_tokens.weight"]
    start = script.Llama(script.ModelConfig(384, 2, 2, 2, 32, 64, 32)).init_weights(1).model.embed_tokens.weight
    assert torch.equal(trained[n:], start[n:]) and not torch.equal(trained[:n], start[:n])
    # Another matrix is drawn, so the runs differ; but as the model begins, its loss is that of n tokens and not of 384.
    assert losses(tmp_path / "padded")[0] == pytest.approx(math.log(n), abs=0.02)
