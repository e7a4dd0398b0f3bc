"""techniques/lora.py: nothing changes before the first step, what is frozen never does, and merging is exact and leaves no trace."""
import copy
import json

import pytest
import torch
from safetensors.torch import load_file

import sft
from configurator import configure
from engine import hf
from engine.generate import generate
from engine.monitor import read_log
from programs import Program
from small import byte_tokenizer, small_llama
from techniques import lora
from test_sft import uneven, write_lines

IDS = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(1))
SETTINGS = ["--lora_rank=4", "--lora_alpha=8", "--learning_rate=1e-2", "--batch_size=8", "--micro_batch_size=3", "--threads=1",
            "--device=cpu", "--dtype=fp32", "--log_every=1", "--window=2", "--warmup_steps=1"]


def with_lora(seed=0, dropout=0.0, **changes):
    """A model whose A and B are both away from 0."""
    model = lora.add(small_llama(seed, **changes), rank=4, alpha=8, dropout=dropout)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in lora.layers_of(model).values():
            layer.lora_B.copy_(0.05 * torch.randn(layer.lora_B.shape, generator=generator))
    return model


@pytest.fixture
def base(tmp_path):
    write_lines(tmp_path / "data" / "chat" / "conversations_train.jsonl", uneven(40))
    write_lines(tmp_path / "data" / "chat" / "conversations_val.jsonl", uneven(8, seed=1))
    (tmp_path / "base").mkdir()
    hf.save_model(tmp_path / "base", small_llama(), byte_tokenizer())
    return tmp_path


def arguments(folder, out, *extra):
    return [f"--data_dir={folder / 'data'}", f"--init_from={folder / 'base'}", f"--out_dir={folder / out}", *SETTINGS, *extra]


def tune(folder, out, *extra):
    sft.main(configure(vars(sft), arguments(folder, out, *extra)))
    return folder / out / "sft"


def weights(run, step):
    return load_file(run / f"step_{step:08d}" / "model.safetensors")


def test_at_first_it_is_the_model_itself():
    model = small_llama()
    before = model(IDS)
    lora.add(model, rank=4, alpha=8, dropout=0.5)
    assert torch.equal(model.train()(IDS), before)
    layers = lora.layers_of(model)
    assert len(layers) == 2 * 7 and all(layer.lora_A.abs().min() > 0 and not layer.lora_B.any() for layer in layers.values())
    assert all(layer.lora_A.abs().max() <= layer.in_features ** -0.5 for layer in layers.values())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    wide = {"q_proj": 64, "k_proj": 48, "v_proj": 48, "o_proj": 64, "gate_proj": 96, "up_proj": 96, "down_proj": 96}
    assert trained == 2 * 4 * sum(wide.values())            # in + out, times the rank, for both blocks
    again = lora.layers_of(lora.add(small_llama(), 4, 8))
    assert all(torch.equal(layers[name].lora_A, again[name].lora_A) for name in layers)


def test_the_difference_is_alpha_over_rank_times_b_a():
    model, plain = with_lora(), small_llama()
    for name, layer in lora.layers_of(model).items():
        delta = 8 / 4 * layer.lora_B @ layer.lora_A
        plain.get_submodule(name).weight.data += delta
    torch.testing.assert_close(model(IDS), plain(IDS), rtol=0, atol=1e-5)
    assert (model(IDS) - small_llama()(IDS)).abs().max() > 0.05


def test_merging_is_exact_and_leaves_no_trace():
    model = with_lora()
    before, logits = copy.deepcopy(model.state_dict()), model(IDS)
    with lora.merged(model):
        assert {name for name, _ in model.named_parameters()} == {name for name, _ in small_llama().named_parameters()}
        torch.testing.assert_close(model(IDS), logits, rtol=0, atol=1e-5)
        tokens = generate(model, [IDS[0].tolist()], 6, set(), temperature=0).ids      # which reads weights by itself
        with pytest.raises(RuntimeError, match="merged already"), lora.merged(model):
            pass
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and len(model.state_dict()) == len(before)
    with pytest.raises(ZeroDivisionError), lora.merged(model):
        1 / 0
    assert torch.equal(model(IDS), logits)
    row = IDS[:1]
    for token in tokens[0]:
        assert token == model(row)[0, -1].argmax()
        row = torch.cat([row, torch.tensor([[token]])], 1)


def test_generating_without_merging_is_refused():
    with pytest.raises(RuntimeError, match="merged"):
        generate(with_lora(), [IDS[0].tolist()], 2, set(), temperature=0)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_only_a_and_b_have_gradients_also_where_activations_are_computed_anew(recompute):
    """The input of the first block needs no gradient here, which has made checkpointed LoRA learn nothing elsewhere."""
    model = with_lora(recompute=recompute).train()
    model(IDS).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.abs().sum() > 0) == ("lora_" in name), name
    if recompute != "none":
        plain = with_lora().train()
        plain(IDS).logsumexp(-1).sum().backward()
        assert all(p.grad is None or torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))


def test_dropout_is_on_the_way_to_a_only():
    model = with_lora(dropout=0.9)
    assert torch.equal(model(IDS), model(IDS)) and not torch.equal(model.train()(IDS), model(IDS))
    for layer in lora.layers_of(model).values():
        layer.lora_B.data.zero_()
    assert torch.equal(model(IDS), small_llama()(IDS))


def test_saved_alone_and_read_again(tmp_path):
    model = with_lora()
    lora.save(tmp_path / "a", model, "the base")
    assert (tmp_path / "a" / "adapter_model.safetensors").stat().st_size < 40_000
    assert torch.equal(lora.load(tmp_path / "a", small_llama())(IDS), model(IDS))


def test_peft_reads_it(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    (tmp_path / "base").mkdir()
    hf.save_model(tmp_path / "base", small_llama(), byte_tokenizer())
    model = with_lora()
    lora.save(tmp_path / "a", model, tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "a")
    torch.testing.assert_close(theirs(IDS).logits, model(IDS), rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(lora.load(tmp_path / "theirs", small_llama())(IDS), model(IDS), rtol=0, atol=1e-6)


def test_an_adapter_that_does_not_fit(tmp_path, capsys):
    def refused(folder, model):
        with pytest.raises(SystemExit) as stop:
            lora.load(folder, model)
        assert stop.value.code == 2
        return capsys.readouterr().err
    lora.save(tmp_path / "a", with_lora(), "base")
    assert "neither LoRA nor adapters" in refused(tmp_path / "none", small_llama())
    said = refused(tmp_path / "a", small_llama(n_inner=96))
    assert said.count("the model wants") == 2 * 3           # A of down_proj, B of gate_proj and up_proj, in both blocks
    assert "is missing" in refused(tmp_path / "a", small_llama(n_layer=3))
    assert "has no place for" in refused(tmp_path / "a", small_llama(n_layer=1))
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**settings, "use_dora": True}))
    assert "use_dora" in refused(tmp_path / "a", small_llama())
    for odd in (dict(r="4"), dict(lora_alpha=None), dict(target_modules=None), dict(target_modules="all-linear"),
                dict(peft_type="BOTTLENECK", adapter_size="4")):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**settings, **odd}))
        said = refused(tmp_path / "a", small_llama())
        assert f"does not say {'adapter_size' if len(odd) == 2 else 'r, lora_alpha'}" in said


def test_tuning_with_it(base):
    """The frozen weights keep their bits, the light checkpoint is the merged model, and a run that stopped goes on exactly."""
    run = tune(base, "whole", "--save_full=2", "--save_light=2")
    log = read_log(run)
    assert log[-1]["val_loss"] < log[0]["loss"] - 0.2
    start = load_file(base / "base" / "model.safetensors")
    model = lora.load(run / "adapter", small_llama())
    assert all(torch.equal(parameter, start[name]) for name, parameter in model.named_parameters() if name in start)
    assert all(layer.lora_B.any() for layer in lora.layers_of(model).values())
    saved = weights(run, 5)
    with lora.merged(model):
        assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
    assert saved.keys() == start.keys() and not torch.equal(saved["model.layers.0.mlp.up_proj.weight"], start["model.layers.0.mlp.up_proj.weight"])
    half = tune(base, "half", "--save_full=2", "--save_light=2", "--max_steps=5")
    for name in ("full_00000005", "step_00000005", "result.json"):
        path = half / name
        path.unlink() if path.is_file() else __import__("shutil").rmtree(path)
    half = tune(base, "half", "--save_full=2", "--save_light=2", "--max_steps=5")
    assert all(torch.equal(value, saved[name]) for name, value in weights(half, 5).items())


def test_two_processes_do_as_one(base):
    one = tune(base, "one", "--max_steps=3")
    code, said = Program("sft.py", *arguments(base, "two", "--max_steps=3"), processes=2).wait()
    assert code == 0, said
    for a, b in zip(read_log(one), read_log(base / "two" / "sft")):
        if "loss" in a:
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_bad_settings(base, capsys):
    with pytest.raises(SystemExit) as stop:
        tune(base, "no", "--lora_rank=-1", "--lora_alpha=0", "--lora_dropout=1", "--lora_targets=('q_proj', 'lm_head')")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in said for word in ("lora_rank", "lora_alpha", "lora_dropout", "lm_head"))
