"""sft.py: what is trained, with which weight, in which order, and that nothing of it depends on how the work is cut."""
import copy
import json
import math
import random
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

import engine.answers
import sft
from configurator import configure
from engine import chat, hf
from engine.generate import generate
from engine.manifest import newest
from engine.monitor import read_log
from engine.parallel import Setup
from engine.shards import steps_by_length
from programs import Program
from small import ALONE, byte_tokenizer, small_llama
from test_packing import shards

END = "<|end|>"


def talk(question, answer, **extra):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **extra}]}


def write_lines(path, entries):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def uneven(n, seed=0):
    """Conversations whose answers differ in length twentyfold."""
    rng = random.Random(seed)
    return [talk("say " + rng.choice("abc"), rng.choice("xyz") * rng.choice((1, 2, 3, 20))) for _ in range(n)]


@pytest.fixture
def world(tmp_path):
    """A data_dir and an out_dir with a small model in it, and a function that tunes it."""
    write_lines(tmp_path / "data" / "chat" / "conversations_train.jsonl", uneven(50))
    write_lines(tmp_path / "data" / "chat" / "conversations_val.jsonl", uneven(8, seed=1))
    base = tmp_path / "base"
    base.mkdir()
    hf.save_model(base, small_llama(), byte_tokenizer())

    def tune(out="out", *extra):
        settings = [f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / out}", f"--init_from={base}",
                    "--batch_size=8", "--micro_batch_size=3", "--threads=1", "--device=cpu", "--dtype=fp32",
                    "--log_every=1",
                    "--window=2", *extra]
        sft.main(configure(vars(sft), settings))
        return tmp_path / out / "sft"

    tune.folder = tmp_path
    return tune


def config_of(**changes):
    return type("Config", (), {"micro_batch_size": 3, "batching": "padded", "micro_tokens": 0, **changes})()


def gradients(model, examples, batch_sizes, setup=ALONE):
    """Gradients of one step over all examples, cut into micro-batches of these sizes."""
    model = copy.deepcopy(model).train()
    batches, start = [], 0
    for size in batch_sizes:
        batches.append(sft.collate(examples, np.arange(start, start + size), byte_tokenizer().pad_id))
        start += size
    totals = sft.forward_backward(model, batches, byte_tokenizer().special(END), setup)
    return totals, torch.cat([p.grad.flatten() for p in model.parameters()])


# --- what is a target -------------------------------------------------------------------------------------------------

def test_targets_are_the_assistants_words_and_its_end_and_nothing_else():
    tokenizer = byte_tokenizer()
    entries = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u <|end|>"},
                             {"role": "assistant", "content": "ab"}, {"role": "user", "content": "v"},
                             {"role": "assistant", "content": "c"}]}, talk("q", "a much longer answer than the other")]
    examples, lost = sft.encode(entries, tokenizer, 96, "truncate")
    x, y, w = sft.collate(examples, [0, 1], tokenizer.pad_id)
    assert x.shape == y.shape == w.shape and not any(lost.values())
    assert torch.equal(x[:, 1:], y[:, :-1])                                       # the target is the next input
    said = lambda row: tokenizer.decode(y[row][w[row] > 0].tolist(), skip_special=False)
    assert said(0) == "ab<|end|>c<|end|>"
    assert said(1) == "a much longer answer than the other<|end|>"
    # What predicts the first word of the answer is the token before it.
    first = int((w[0] > 0).nonzero()[0])
    assert x[0, first] == tokenizer.special("<|assistant|>")


def test_padding_is_no_target_and_the_end_is():
    tokenizer = byte_tokenizer()
    examples, _ = sft.encode([talk("q", "a"), talk("q", "a long answer")], tokenizer, 96, "truncate")
    x, y, w = sft.collate(examples, [0, 1], tokenizer.pad_id)
    padding = torch.arange(x.shape[1])[None] >= torch.tensor([[len(ids) - 1] for ids, _ in examples])
    assert padding.any() and (w[padding] == 0).all() and (y[padding] == tokenizer.pad_id).all()
    end = tokenizer.special(END)
    assert tokenizer.pad_id not in (end, tokenizer.eos_id)
    assert ((y == end) & (w == 1)).sum(1).tolist() == [1, 1]


def test_padding_changes_no_loss():
    tokenizer, model = byte_tokenizer(), small_llama()
    examples, _ = sft.encode([talk("q", "a"), talk("what is it", "a much longer answer")], tokenizer, 96, "truncate")
    alone, _ = gradients(model, examples[:1], [1])
    x, y, w = sft.collate(examples, [0, 1], tokenizer.pad_id)
    together = sft.forward_backward(model, [(x[:1], y[:1], w[:1])], tokenizer.special(END), ALONE)
    assert together["loss"] == pytest.approx(alone["loss"], abs=1e-6)


def test_the_loss_of_ends_is_that_of_ends_alone():
    tokenizer, model = byte_tokenizer(), small_llama()
    examples, _ = sft.encode([talk("q", "a"), talk("what is it", "a much longer answer")], tokenizer, 96, "truncate")
    x, y, w = sft.collate(examples, [0, 1], tokenizer.pad_id)
    with torch.no_grad():
        nats = -model(x).float().log_softmax(-1).gather(-1, y[..., None])[..., 0]
    totals = sft.forward_backward(model, [(x, y, w)], tokenizer.special(END), ALONE)
    assert totals["loss_end"] == pytest.approx(nats[(y == tokenizer.special(END)) & (w > 0)].mean().item(), rel=1e-5)
    assert totals["loss"] == pytest.approx(nats[w > 0].mean().item(), rel=1e-5) != totals["loss_end"]


# --- one gradient for any split ---------------------------------------------------------------------------------------

def test_the_gradient_is_the_same_for_any_split_into_micro_batches():
    examples, _ = sft.encode(uneven(8), byte_tokenizer(), 96, "truncate")
    model = small_llama()
    whole, expected = gradients(model, examples, [8])
    for split in ([1] * 8, [2] * 4, [4, 4], [1, 7], [5, 3]):
        totals, found = gradients(model, examples, split)
        assert (found - expected).abs().max() < 1e-6 and totals["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    # A mean of means is another number, or this test would show nothing.
    means = [gradients(model, examples[i:i + 1], [1])[0]["loss"] for i in range(8)]
    assert abs(np.mean(means) - whole["loss"]) > 1e-3


def test_doubling_all_weights_changes_nothing_and_one_weight_counts():
    tokenizer, model = byte_tokenizer(), small_llama()
    plain, _ = sft.encode([talk("q", "yes"), talk("r", "no")], tokenizer, 96, "truncate")
    doubled = [(ids, weights * 2) for ids, weights in plain]
    heavier, _ = sft.encode([talk("q", "yes", weight=3.0), talk("r", "no")], tokenizer, 96, "truncate")
    (a, ga), (b, gb), (c, gc) = (gradients(model, examples, [2]) for examples in (plain, doubled, heavier))
    assert a["loss"] == pytest.approx(b["loss"], abs=1e-6) and torch.allclose(ga, gb, atol=1e-7)
    assert abs(a["loss"] - c["loss"]) > 1e-5 and not torch.allclose(ga, gc, atol=1e-5)


def test_a_rank_without_conversations_takes_part_and_adds_nothing():
    examples, _ = sft.encode(uneven(3), byte_tokenizer(), 96, "truncate")
    setups = [Setup(rank, 0, 4, torch.device("cpu"), torch.float32, 1) for rank in range(4)]
    shares = [sft.micro_batches(examples, np.arange(3), config_of(), byte_tokenizer().pad_id, setup)
              for setup in setups]
    assert all(len(share) == 1 for share in shares)
    assert [float(share[0][2].sum()) > 0 for share in shares] == [True, True, True, False]
    _, y, w = zip(*(share[0] for share in shares))
    assert sum(float(one.sum()) for one in w) == sum(float(weights[1:].sum()) for _, weights in examples)


# --- order ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n, batch_size, window", [(1, 8, 4), (8, 8, 4), (100, 8, 4), (257, 16, 1), (64, 64, 16)])
def test_a_plan_has_each_conversation_once(n, batch_size, window):
    lengths = np.array([5 + i * 7 % 90 for i in range(n)])
    for epoch in (0, 1):
        steps = steps_by_length(lengths, batch_size, window, 1, epoch)
        assert sorted(np.concatenate(steps)) == list(range(n))
        assert len(steps) == math.ceil(n / batch_size) and max(map(len, steps)) <= batch_size


def test_a_plan_is_a_pure_function_and_each_epoch_has_another():
    lengths = np.array([random.Random(i).randint(5, 200) for i in range(300)])
    same = lambda a, b: len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))
    first = steps_by_length(lengths, 16, 8, 1, 0)
    assert same(first, steps_by_length(lengths, 16, 8, 1, 0))
    assert not same(first, steps_by_length(lengths, 16, 8, 1, 1)) and not same(first, steps_by_length(lengths, 16, 8, 2, 0))


def test_buckets_waste_less_than_no_buckets():
    lengths = np.array([random.Random(i).choice((10, 20, 40, 200)) for i in range(400)])
    padded = lambda steps: sum(len(step) * lengths[step].max() for step in steps)
    assert padded(steps_by_length(lengths, 16, 25, 1, 0)) < 1.2 * lengths.sum()
    assert padded(steps_by_length(lengths, 16, 1, 1, 0)) > 2 * lengths.sum()


# --- conversations that do not fit ------------------------------------------------------------------------------------

def test_overlong_conversations_are_cut_or_dropped_and_counted():
    entries = [talk("q" * 200, "never reached"), talk("q", "a" * 500), talk("q", "short"),
               talk("q", "unweighted", weight=0), talk("q", "as good as unweighted", weight=1e-300)]
    examples, lost = sft.encode(entries, byte_tokenizer(), 40, "truncate")
    assert lost == {"truncated": 2, "too_long": 0, "without_target": 3}
    assert all(weights[1:].sum() > 0 and len(ids) <= 41 for ids, weights in examples)
    cut = examples[0][0]
    assert len(cut) == 41 and cut[-1] != byte_tokenizer().special(END), "a cut answer must not teach to stop there"
    examples, lost = sft.encode(entries, byte_tokenizer(), 40, "drop")
    assert lost["too_long"] == 2


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_150_overlong_conversations_neither_jam_nor_make_nan(world, overlong, capsys):
    """As in nanochat issue 590: the answers of most conversations lie beyond the context."""
    entries = [talk("long " * 120, "unseen")] * 150 + [talk("q", "a" * 300)] * 5 + uneven(10)
    write_lines(world.folder / "data" / "chat" / "conversations_train.jsonl", entries)
    run = world("out", f"--overlong={overlong}", "--batch_size=1", "--micro_batch_size=1")
    records = read_log(run)
    kept = 15 if overlong == "truncate" else 10
    assert len(records) == kept and all(math.isfinite(record["loss"]) and record["weight"] > 0 for record in records)
    assert json.loads((run / "result.json").read_text())["conversations"] == kept
    assert all(tensor.isfinite().all() for tensor in load_file(run / f"step_{kept:08d}" / "model.safetensors").values())
    said = capsys.readouterr().out
    assert ("155 conversations cut" if overlong == "truncate" else "155 left out as too long") in said
    assert f"{kept} steps are few" in said


def test_nothing_left_to_learn_is_refused(world, capsys):
    write_lines(world.folder / "data" / "chat" / "conversations_train.jsonl", [talk("long " * 120, "unseen")])
    with pytest.raises(SystemExit) as stop:
        world()
    assert stop.value.code == 2 and "no conversation is left" in capsys.readouterr().err


# --- runs -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_an_interrupted_run_continues_bit_for_bit(world, monkeypatch, batching):
    extra = ["--epochs=2", "--dropout=0.1", "--save_full=3", "--keep=2"]
    if batching == "packed":                    # and from three sources
        shards(world.folder / "data" / "tokens")
        write_lines(world.folder / "other.jsonl", uneven(9, seed=4))
        mix = {str(world.folder / "data/chat/conversations_train.jsonl"): 2, str(world.folder / "other.jsonl"): 1}
        extra += ["--batching=packed", "--micro_tokens=100", f"--conversations_mix={mix}", "--replay=0.25",
                  f"--val_conversations={world.folder / 'data/chat/conversations_val.jsonl'}"]
    whole = world("whole", *extra)
    last = max(int(path.name[5:]) for path in whole.glob("step_*"))
    original = sft.forward_backward
    for stop_at in (4, 9):                      # between two checkpoints, in the first epoch and in the second
        calls = iter(range(10_000))

        def interrupted(*arguments):
            if next(calls) == stop_at:
                raise KeyboardInterrupt
            return original(*arguments)
        monkeypatch.setattr(sft, "forward_backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world("torn", *extra)
    monkeypatch.setattr(sft, "forward_backward", original)
    torn = world("torn", *extra)
    assert [record["loss"] for record in read_log(torn)] == [record["loss"] for record in read_log(whole)]
    a, b = (load_file(run / f"step_{last:08d}" / "model.safetensors") for run in (whole, torn))
    assert all(torch.equal(a[name], b[name]) for name in a)
    found = [json.loads((run / "result.json").read_text()) for run in (torn, whole)]
    assert found[0] == found[1] and found[0]["steps"] == last
    if batching == "packed":
        log = read_log(whole)
        weight = sum(record["weight"] for record in log)
        assert sum(record["replay"] * record["weight"] for record in log) / weight == pytest.approx(0.25, abs=0.01)
        assert found[0]["before"]["text_loss"] > found[0]["after"]["text_loss"] > 0 and found[0]["conversations"] == 59


def test_a_second_stage_on_a_mixture_forgets_less(world):
    """General conversations, then those of one field: alone, with a share of the first ones, and with pretraining text."""
    folder = world.folder
    data = folder / "data" / "chat"
    shards(folder / "data" / "tokens")
    general, field = ([talk(f"say {a}", a * 3) for a in "abc"], [talk(f"say {a}", "z") for a in "def"])
    for name, entries in (("general", general), ("field", field)):
        write_lines(data / f"{name}.jsonl", entries * 16)
    settings = ["--batch_size=12", "--micro_batch_size=12", "--epochs=20", "--learning_rate=1e-2", "--eval_answers=0", "--save_full=0"]
    first = world("general", *settings, f"--conversations={data / 'general.jsonl'}", f"--val_conversations={data / 'general.jsonl'}",
                  "--replay=0.3")

    def second(name, *extra):
        run = world(name, *settings, f"--init_from={first}", f"--val_conversations={data / 'general.jsonl'}", *extra)
        return read_log(run)[-1]["val_loss"]
    alone = second("alone", f"--conversations={data / 'field.jsonl'}")
    mixed = second("mixed", f"--conversations_mix={ {str(data / 'field.jsonl'): 0.8, str(data / 'general.jsonl'): 0.2} }")
    start = read_log(first)[-1]["val_loss"]
    assert start < 0.1 and mixed < start + 0.1 and alone > start + 1, (start, mixed, alone)


def test_a_run_that_was_killed_behind_its_last_step_is_finished_by_the_next_call(world):
    run = world("out")
    result = (run / "result.json").read_bytes()
    (run / "result.json").unlink()
    world("out")
    assert (run / "result.json").read_bytes() == result


def test_a_finished_run_says_so_and_other_data_is_refused(world, capsys):
    world("out", "--max_steps=3")
    capsys.readouterr()
    world("out", "--max_steps=3")
    assert "already done" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        world("out", "--max_steps=3", "--learning_rate=0.1")
    assert "was begun with learning_rate = 0.001, now it is 0.1" in capsys.readouterr().err
    write_lines(world.folder / "data" / "chat" / "conversations_train.jsonl", uneven(50, seed=7))
    with pytest.raises(SystemExit) as stop:
        world("out", "--max_steps=3")
    assert stop.value.code == 2 and "begun with conversations (" in capsys.readouterr().err


def test_a_folder_of_another_family_is_tuned_from_the_weights_it_has(world):
    """In bf16, in many files, q and k normalised: nothing of it is drawn anew, and it is written as what it was."""
    model, base = small_llama(7, qk_norm=True, head_dim=12), world.folder / "other"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    base.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "SHARD_BYTES", 5000)
        hf.save_model(base, model.to(torch.bfloat16), byte_tokenizer())
    run = world("out", f"--init_from={base}", "--max_steps=1", "--learning_rate=0")
    found = load_file(run / "step_00000001" / "model.safetensors")
    expected = {name: p.detach().float() for name, p in model.named_parameters()}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert json.loads((run / "step_00000001" / "config.json").read_text())["model_type"] == "qwen3"


def test_conversations_beyond_the_models_context_need_a_scaling(world, capsys):
    with pytest.raises(SystemExit) as stop:
        world("out", "--max_length=192", "--max_steps=1")
    assert stop.value.code == 2 and "context, 96 (or choose a rope_scaling)" in capsys.readouterr().err
    run = world("out", "--max_length=192", "--max_steps=1", "--rope_scaling={'rope_type': 'linear', 'factor': 2.0}")
    described = json.loads((run / "step_00000001" / "config.json").read_text())
    assert described["max_position_embeddings"] == 192
    assert described["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_after_tuning_on_three_patterns_greedy_answers_stop(world):
    """trl issue 1623: where padding or masking hides the end token, the model talks on for ever."""
    patterns = [talk("a", "xy"), talk("b", "yxyx"), talk("c", "z")]
    write_lines(world.folder / "data" / "chat" / "conversations_train.jsonl", patterns * 8)
    run = world("out", "--epochs=40", "--learning_rate=0.01", "--batch_size=12", "--micro_batch_size=12",
                "--save_full=0", "--eval_every=1000")
    model, tokenizer = hf.load_model(run)
    prompts = [chat.render(tokenizer, entry["messages"][:1], open_assistant=True)[0] for entry in patterns]
    made = generate(model, prompts, 20, chat.stop_ids(tokenizer), temperature=0)
    assert made.stopped == [True] * 3
    assert [tokenizer.decode(ids) for ids in made.ids] == ["xy", "yxyx", "z"]


def test_a_step_that_is_not_finite_is_skipped_and_many_in_a_row_end_the_run(world, monkeypatch, capsys):
    original, calls = sft.forward_backward, iter(range(10_000))

    def poisoned(model, *rest):
        totals = original(model, *rest)
        if next(calls) >= 2:
            next(model.parameters()).grad[0, 0] = float("nan")
        return totals
    monkeypatch.setattr(sft, "forward_backward", poisoned)
    with pytest.raises(SystemExit) as stop:
        world("out", "--max_bad_steps=3", "--save_full=1", "--save_light=1", "--keep=0")
    assert stop.value.code == 2 and "3 steps in a row" in capsys.readouterr().err
    run = world.folder / "out" / "sft"
    assert [record.get("skipped", False) for record in read_log(run)] == [False, False, True, True, True]
    saved = [load_file(run / f"step_{step:08d}" / "model.safetensors") for step in (2, 3)]
    assert all(torch.equal(saved[0][name], saved[1][name]) and saved[0][name].isfinite().all() for name in saved[0])


def test_one_and_two_processes_give_the_same_losses(world):
    """50 weighed conversations in steps of 7: the last step has one, so one process gets none. The one pads, the two pack;
    and these are asked to leave on the way, and continue."""
    folder, rng = world.folder, random.Random(2)
    write_lines(folder / "data" / "chat" / "conversations_train.jsonl", [talk(
        entry["messages"][0]["content"], (said := entry["messages"][1]["content"]),
        weight=rng.choice([1, 0.25, [[0, len(said), 3.5]]])) for entry in uneven(50)])
    one = read_log(world("one", "--batch_size=7", "--max_steps=8"))
    words = ["sft.py", f"--data_dir={folder / 'data'}", f"--out_dir={folder / 'two'}", f"--init_from={folder / 'base'}",
             "--batch_size=7", "--max_steps=8", "--batching=packed", "--micro_tokens=60", "--threads=1", "--device=cpu",
             "--dtype=fp32", "--log_every=1", "--window=2"]
    def launched(number=None):
        """What was said; the signal comes as soon as the run has its folder, and waits for the end of a step."""
        program = Program(*words, processes=2)
        if number:
            program.until((folder / "two" / "sft" / "config.json").exists)
            program.send(number)
        code, said = program.wait()
        assert (code == 0) == (number is None), said
        return said
    said = launched(signal.SIGTERM)
    found = newest(folder / "two" / "sft", "full")
    assert f"is saved in {found}, the same command continues" in said and not (folder / "two" / "sft" / "result.json").exists()
    assert f"continuing from {found}" in launched()
    two = read_log(folder / "two" / "sft")
    assert len(one) == len(two) == 8 and max(abs(a["loss"] - b["loss"]) for a, b in zip(one, two)) < 1e-5
    for a, b in zip(one, two):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)       # Adam learns the same from half of it
    a, b = (load_file(folder / out / "sft" / "step_00000008" / "model.safetensors") for out in ("one", "two"))
    assert max((a[name] - b[name]).abs().max() for name in a) < 1e-4


def moments(run, step):
    """{name: tensor} of all that a full checkpoint holds; after one step without clipping Adam's first moment is a tenth of
    the gradient."""
    folder = run / f"full_{step:08d}" / "state"
    found = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in
             FileSystemReader(folder).read_metadata().state_dict_metadata.items() if hasattr(about, "size")}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return {name: tensor for name, tensor in found.items() if name.endswith("exp_avg")}


@pytest.mark.parametrize("ways", [["--zero=3"], ["--zero=1", "--lora_rank=4"], ["--zero=3", "--lora_rank=4"],
                                  ["--zero=2", "--adapter_size=4"], ["--zero=3", "--hsdp=2"]])
def test_sharded_over_processes_it_is_as_in_one(world, ways):
    """Losses, gradients and weights, with ranks that have different numbers of micro-batches; and what is saved is whole.
    Two processes, or two groups of two."""
    folder, processes, alone = world.folder, 4 if "--hsdp=2" in ways else 2, "lora" in ways[-1] or "adapter" in ways[-1]
    keys = ["--batch_size=7", "--batching=packed", "--micro_tokens=60", "--save_full=1", "--keep=0", "--grad_clip=0",
            "--recompute=full", *ways[1:] * alone]
    one = world("one", *keys, "--max_steps=1")
    words = [f"--data_dir={folder / 'data'}", f"--out_dir={folder / 'two'}", f"--init_from={folder / 'base'}", "--threads=1",
             "--device=cpu", "--dtype=fp32", "--log_every=1", "--window=2", "--parallel=fsdp", *keys, *ways]
    two = folder / "two" / "sft"
    for steps in (1, 3):
        shutil.rmtree(folder / "two", ignore_errors=True)
        code, said = Program("sft.py", *words, f"--max_steps={steps}", processes=processes).wait()
        assert code == 0 and f"ZeRO-{ways[0][-1]} over 2" in said, said
        if steps == 1:
            a, b = moments(one, 1), moments(two, 1)
            assert a.keys() == b.keys() and len(a) == (21 if not alone else 28 if "lora" in ways[1] else 8)
            for name in a:
                assert (a[name].norm() > 0) == ("lora_A" not in name and "adapter_down" not in name), name
                assert (a[name] - b[name]).norm() <= 1e-5 * a[name].norm(), name
    three = world("three", *keys, "--max_steps=3")
    for a, b in zip(read_log(three), read_log(two), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    a, b = (load_file(run / "step_00000003" / "model.safetensors") for run in (three, two))
    assert a.keys() == b.keys() and max((a[name] - b[name]).abs().max() for name in a) < 1e-4
    found = [json.loads((run / "result.json").read_text()) for run in (three, two)]
    assert found[0]["before"] == found[1]["before"] and found[0]["after"]["stop"] == found[1]["after"]["stop"]
    if alone:                                       # what is saved alone, as whole as the rest
        a, b = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (three, two))
        assert a.keys() == b.keys() and max((a[name] - b[name]).abs().max() for name in a) < 1e-4
    a, b = moments(three, 3), moments(two, 3)       # now also what the zeros of the start kept from learning
    assert all(0 < a[name].norm() and (a[name] - b[name]).norm() < 1e-3 * a[name].norm() for name in a)
    if ways == ["--zero=3", "--lora_rank=4"]:       # after an interruption the same bits
        before = load_file(two / "step_00000003" / "model.safetensors")
        for name in ("step_00000003", "full_00000003"):
            shutil.rmtree(two / name)
        (two / "result.json").unlink()
        code, said = Program("sft.py", *words, "--max_steps=3", processes=2).wait()
        assert code == 0 and f"continuing from {two / 'full_00000002'}" in said, said
        after = load_file(two / "step_00000003" / "model.safetensors")
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_told_of_answers(monkeypatch):
    """Each answer has its own question's place, and what its end and its form are is not taken for granted."""
    said = {3: ([5, 6, 9], True), 1: ([7] * 40, False), 2: ([9], True)}                # by the prompt's length; 9 ends
    monkeypatch.setattr(engine.answers, "generate", lambda model, prompts, *rest, **more: SimpleNamespace(
        ids=[said[len(prompt)][0] for prompt in prompts], stopped=[said[len(prompt)][1] for prompt in prompts]))
    how = SimpleNamespace(batch_size=2, seed=1)
    found = engine.answers.complete(None, [[1, 1, 1], [1], [1, 1]], how, 40, {9})
    assert found == [([5, 6], True), ([7] * 40, False), ([], True)]
    scores = engine.answers.answer_scores([("yes", True, [5, 6]), ("yes and no", False, [7] * 40)], "yes|no")
    assert (scores["stop"], scores["format"], scores["loops"]) == (0.5, 0.5, 0.5) and scores["distinct_1"] == (1 + 1 / 40) / 2
    assert engine.answers.answer_scores([("yes", True, [5, 6])])["format"] is None
    table = engine.answers.side_by_side(before={"stop": 0.25, "format": None}, after=scores)
    assert table.split("\n")[1].split()[-2:] == ["0.250", "0.500"] and table.split("\n")[2].split()[-2:] == ["-", "0.500"]


def test_each_epoch_has_an_order_of_its_own(world, monkeypatch):
    real, epochs = sft.plan, []
    monkeypatch.setattr(sft, "plan", lambda *args: epochs.append(args[-1]) or real(*args))
    world("out", "--batch_size=25", "--max_steps=4")
    assert epochs == [0, 1]


def test_own_conversations_are_not_judged_by_the_demonstrations(world, capsys):
    with pytest.raises(SystemExit):
        world("out", "--max_steps=1", f"--conversations={world.folder / 'data/chat/conversations_train.jsonl'}")
    assert "no val_conversations" in capsys.readouterr().err


def test_no_more_is_held_out_than_was_asked_for(world, monkeypatch):
    """5 of 8: every second one would be 4, and every single one 8."""
    seen = []
    monkeypatch.setattr(sft, "evaluate", lambda model, examples, *rest: seen.append(len(examples)) or 1.0)
    world("out", "--max_steps=1", "--eval_conversations=5")
    assert seen == [5]


def test_show_colours_what_is_trained_and_trains_nothing(world, capsys):
    run = world("out", "--show=1")
    said = capsys.readouterr().out
    assert "\x1b[90m<|bos|><|user|>say" in said and "\x1b[32m" in said.split("<|assistant|>")[1]
    assert not (run / "log.jsonl").exists()


# --- bad input --------------------------------------------------------------------------------------------------------

def refused(capsys, *settings):
    with pytest.raises(SystemExit) as stop:
        sft.main(configure(vars(sft), list(settings)))
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_missing_data_and_missing_model_say_the_command(tmp_path, capsys):
    settings = [f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}", "--device=cpu"]
    said = refused(capsys, *settings)
    assert "conversations_train.jsonl does not exist" in said and "python prepare_chat.py --data_dir=" in said
    for split in ("train", "val"):
        write_lines(tmp_path / "data" / "chat" / f"conversations_{split}.jsonl", uneven(3))
    said = refused(capsys, *settings)
    assert "no pretrained model" in said and "python train.py --data_dir=" in said
    assert not (tmp_path / "out").exists()


def test_bad_lines_are_all_named(world, capsys):
    path = world.folder / "data" / "chat" / "conversations_train.jsonl"
    write_lines(path, [talk("q", "a"), {"messages": []}, talk("q", ""), talk("q", "a", weight=-1)])
    with pytest.raises(SystemExit):
        world()
    said = capsys.readouterr().err
    assert all(f"line {number}" in said for number in (2, 3, 4)) and "line 1:" not in said


def test_all_bad_settings_are_named_at_once(world, capsys):
    with pytest.raises(SystemExit) as stop:
        world("out", "--batch_size=0", "--overlong=maybe", "--max_length=1000", "--dropout=1.5", "--batching=stacked",
              "--micro_tokens=0", "--replay=-1", "--max_bad_steps=0", "--learning_rate=0", "--matrix_learning_rate=0.1")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in said for word in (
        "batch_size", "overlong", "max_length", "dropout", "batching", "micro_tokens", "replay", "max_bad_steps", "matrix_learning_rate"))
    path = world.folder / "data" / "chat" / "conversations_val.jsonl"
    with pytest.raises(SystemExit):
        world("out", f"--conversations_mix={ {str(path): 0} }", f"--val_conversations={path}")
    assert "numbers above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        world("out", "--replay=0.1")
    assert "no pretraining text to replay" in capsys.readouterr().err


def test_what_is_missing_is_said_with_what_helps(tmp_path, capfd):
    """Of a file that was named it is enough to say that it is not there."""
    def lacking(*words):
        with pytest.raises(SystemExit) as stopped:
            sft.main(configure(vars(sft), [f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/out", "--device=cpu",
                                           "--threads=1", *words]))
        assert stopped.value.code == 2
        return capfd.readouterr().err
    said = lacking()
    assert said.count("does not exist") == 3 and "prepare_chat.py" in said and "--init_from=DIR" in said
    said = lacking(f"--conversations={tmp_path}/a", f"--val_conversations={tmp_path}/b", f"--init_from={tmp_path}/c")
    assert said.count("does not exist") == 3 and len(said.splitlines()) == 3
    said = lacking(f"--conversations={tmp_path}/a", f"--val_conversations={tmp_path}/b", "--replay=0.1")
    assert "prepare_chat.py" not in said and "prepare_data.py" in said and "train.py" in said
