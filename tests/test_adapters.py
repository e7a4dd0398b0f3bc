"""Bottleneck adapters: nothing changes before the first step, what is frozen never does, and a folder has them or is them."""
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import sample
from configurator import configure
from engine import hf
from engine.generate import generate
from engine.monitor import read_log
from programs import Program
from small import byte_tokenizer, small_llama
from techniques import adapters, lora
from test_lora import IDS, arguments, base, tune, weights      # noqa: F401 (base is a fixture)

SIZED = ["--lora_rank=0", "--adapter_size=4"]


def with_adapters(seed=0, std=0.3, **changes):
    """A model whose adapters all add something."""
    model = small_llama(seed, adapter_size=4, **changes)
    adapters.freeze(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(adapters.PARTS):
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model


def rest(model):
    return {name: p for name, p in model.named_parameters() if not name.endswith(adapters.PARTS)}


def test_at_first_it_is_the_model_itself():
    plain, model = small_llama(), small_llama(adapter_size=4)
    assert torch.equal(model(IDS), plain(IDS))                             # drawn by init_weights, from names
    adapters.draw(model, seed=3)
    adapters.freeze(model)
    assert torch.equal(model(IDS), plain(IDS))
    parts = {name: p for name, p in model.named_parameters() if name.endswith(adapters.PARTS)}
    assert len(parts) == 2 * 2 * 2 and all(p.requires_grad for p in parts.values())
    assert not any(p.requires_grad for p in rest(model).values())
    for name, p in parts.items():
        assert (not p.any()) == name.endswith("up"), name
        assert p.shape == ((4, 32) if name.endswith("down") else (32, 4)) and p.abs().max() <= 32 ** -0.5
    downs = [p for name, p in parts.items() if name.endswith("down")]
    assert not torch.equal(downs[0], downs[1])
    adapters.draw(again := small_llama(adapter_size=4), seed=3)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in parts.items())


def test_what_it_computes():
    linear = with_adapters().model.layers[1].mlp.down_proj
    x = torch.randn(5, 64)
    y = x @ linear.weight.T
    expected = y + F.silu(y @ linear.adapter_down.T) @ linear.adapter_up.T
    torch.testing.assert_close(linear(x), expected, rtol=0, atol=1e-6)
    assert (expected - y).abs().max() > 0.01
    for linear in ("self_attn.o_proj", "mlp.down_proj"):                   # each of them counts
        model = with_adapters()
        before = model(IDS)
        model.model.layers[0].get_submodule(linear).adapter_up.data.zero_()
        assert (model(IDS) - before).abs().max() > 1e-3


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_only_adapters_have_gradients_also_where_activations_are_computed_anew(recompute):
    model, plain = with_adapters(recompute=recompute).train(), with_adapters().train()
    for each in (model, plain):
        each(IDS).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.abs().sum() > 0) == name.endswith(adapters.PARTS), name
        assert parameter.grad is None or torch.equal(parameter.grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_generation_has_them(compiled):
    model = with_adapters(std=1.0)
    with torch.no_grad():
        for p in rest(model).values():
            p.mul_(3 if p.dim() > 1 else 1)                                # far from uniform
    for prompts in ([IDS[0].tolist()], [IDS[0].tolist(), [7, 8], IDS[1, :5].tolist()]):
        made = generate(model, prompts, 12, set(), temperature=0, compile=compiled).ids
        for prompt, ids in zip(prompts, made):
            for token in ids:
                with torch.no_grad():
                    assert token == model(torch.tensor([prompt]))[0, -1].argmax()
                prompt = [*prompt, token]


def test_a_models_folder_has_them(tmp_path, capsys):
    model = with_adapters()
    hf.save_model(tmp_path, model, byte_tokenizer())
    again, _ = lora.load_model(tmp_path)
    assert torch.equal(again(IDS), model(IDS)) and again.config.adapter_size == 4
    settings = json.loads((tmp_path / "config.json").read_text())
    for size, said in ((8, "adapter_size"), (0, "adapter_size"), (-1, "adapter_size must be from 0")):
        (tmp_path / "config.json").write_text(json.dumps({**settings, "adapter_size": size}))
        with pytest.raises(SystemExit):
            lora.load_model(tmp_path)
        assert said in capsys.readouterr().err


def test_saved_alone_and_read_again(tmp_path, capsys):
    model = with_adapters()
    adapters.save(tmp_path / "a", model, "the base")
    assert (tmp_path / "a" / adapters.WEIGHTS).stat().st_size < 8_000
    found = lora.load(tmp_path / "a", small_llama(adapter_size=4))
    folder, shape = adapters.base_of(tmp_path / "a")
    assert torch.equal(found(IDS), model(IDS)) and (folder, shape["adapter_size"]) == ("the base", 4)
    for other, said in ((small_llama(), "no place for"), (small_llama(adapter_size=4, n_layer=3), "is missing"),
                        (small_llama(adapter_size=8), "the model wants")):
        with pytest.raises(SystemExit) as stop:
            lora.load(tmp_path / "a", other)
        assert stop.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("few", [lora, adapters])
def test_a_longer_context_is_saved_with_it(tmp_path, few):
    """As after sft.py --rope_scaling: the folder that they name has the context from before."""
    base, longer = small_llama(), dict(block_size=128, rope_scaling={"rope_type": "linear", "factor": 2.0})
    hf.save_model(tmp_path / "base", base, byte_tokenizer())
    if few is lora:
        model = lora.add(small_llama(**longer), rank=4, alpha=8)
    else:
        model = with_adapters(**longer)
    few.save(tmp_path / "alone", model, tmp_path / "base")
    found, _ = lora.load_model(tmp_path / "alone")
    assert (found.config.block_size, found.config.rope_scaling) == (128, longer["rope_scaling"])
    assert torch.allclose(found(IDS), model(IDS), atol=1e-5) and not torch.allclose(found(IDS), base(IDS), atol=1e-5)


def talked(capsys, folder):
    """What sample.py says with that --model, greedily."""
    capsys.readouterr()
    sample.main(configure(vars(sample), [f"--model={folder}", "--chat=True", "--prompt=say a", "--temperature=0", "--device=cpu",
                                         "--dtype=fp32", "--threads=1", "--max_new_tokens=12"]))
    return capsys.readouterr().out


@pytest.mark.parametrize("how", [[*SIZED, "--learning_rate=0.3"], ["--learning_rate=3e-2"]])
def test_tuning_and_talking_to_it(base, capsys, how):      # noqa: F811
    """The frozen weights keep their bits; the light checkpoint and what was saved alone are the same model; a run that was
    interrupted goes on exactly."""
    extra = [*how, "--save_full=2", "--save_light=2", "--eval_answers=2"]
    run = tune(base, "whole", *extra)
    log = read_log(run)
    assert log[-1]["val_loss"] < log[0]["loss"] - 0.2
    start, saved = load_file(base / "base" / "model.safetensors"), weights(run, 5)
    if SIZED[1] in how:
        assert all(torch.equal(saved[name], start[name]) for name in start) and len(saved) == len(start) + 8
        assert all(saved[name].any() for name in saved)
    one, two = lora.load_model(run), lora.load_model(run / "adapter")
    with torch.no_grad():
        assert torch.equal(one[0](IDS), two[0](IDS)) and not torch.equal(one[0](IDS), small_llama()(IDS))
    assert one[1].hash == two[1].hash
    assert talked(capsys, run) == talked(capsys, run / "adapter") != talked(capsys, base / "base")
    half = tune(base, "half", *extra, "--max_steps=5")
    for name in ("full_00000005", "step_00000005", "result.json"):
        path = half / name
        path.unlink() if path.is_file() else __import__("shutil").rmtree(path)
    half = tune(base, "half", *extra, "--max_steps=5")
    assert all(torch.equal(value, saved[name]) for name, value in weights(half, 5).items())


def test_a_second_stage_learns_them_further(base):      # noqa: F811
    """Of a folder with adapters they are taken as they are, and not drawn anew."""
    first = tune(base, "first", *SIZED, "--max_steps=3")
    second = tune(base, "second", *SIZED, f"--init_from={first}", "--max_steps=1", "--learning_rate=0")
    assert all(torch.equal(value, weights(second, 1)[name]) for name, value in weights(first, 3).items())
    whole = tune(base, "third", "--lora_rank=0", f"--init_from={first}", "--max_steps=1")       # all weights, theirs too
    assert all(not torch.equal(value, weights(whole, 1)[name]) for name, value in weights(first, 3).items())


def test_two_processes_do_as_one(base):      # noqa: F811
    one = tune(base, "one", *SIZED, "--max_steps=3")
    code, said = Program("sft.py", *arguments(base, "two", *SIZED, "--max_steps=3"), processes=2).wait()
    assert code == 0, said
    for a, b in zip(read_log(one), read_log(base / "two" / "sft")):
        if "loss" in a:
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_bad_settings(base, capsys):      # noqa: F811
    with pytest.raises(SystemExit) as stop:
        tune(base, "no", "--lora_rank=2", "--adapter_size=2", "--matrix_learning_rate=0.1")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "choose one" in said and "Muon" in said
    with pytest.raises(SystemExit):
        tune(base, "no", "--lora_rank=0", "--adapter_size=-1")
    assert "adapter_size must be from 0" in capsys.readouterr().err
    first = tune(base, "first", *SIZED, "--max_steps=1")
    with pytest.raises(SystemExit):
        tune(base, "no", "--lora_rank=0", "--adapter_size=8", f"--init_from={first}")
    assert "adapter_size" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        lora.add(with_adapters(), 2, 4)
    assert "LoRA on a model with adapters" in capsys.readouterr().err
    (base / "none").mkdir()
    (base / "none" / adapters.SETTINGS).write_text('{"peft_type": "BOTTLENECK"}')
    with pytest.raises(SystemExit):
        lora.load_model(base / "none")
    assert "neither LoRA nor adapters" in capsys.readouterr().err
