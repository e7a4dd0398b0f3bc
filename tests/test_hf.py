"""Model folders: ours to transformers and back, and everything that is refused."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import checkpoint, hf
from engine.hf import load_model, load_weights, save_model
from engine.tokenizer import Tokenizer
from model import Llama, ScalarModel
from small import ALONE, byte_tokenizer, shape, small_llama


@pytest.mark.parametrize("tie", [True, False])
def test_a_folder_goes_to_transformers_and_back(tmp_path, tie):
    transformers = pytest.importorskip("transformers")
    model = small_llama(5, tie_embeddings=tie, rope_theta=5e5, norm_eps=1e-6)
    (tmp_path / "ours").mkdir()
    save_model(tmp_path / "ours", model, byte_tokenizer())
    assert ("lm_head.weight" in load_file(tmp_path / "ours" / "model.safetensors")) == (not tie)

    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    ids = torch.randint(0, 263, (2, 90))        # long enough that a wrong q/k permutation or theta shows
    with torch.no_grad():
        assert (model(ids) - other(ids).logits).abs().max() < 1e-4
        other.save_pretrained(tmp_path / "theirs")
        byte_tokenizer().save(tmp_path / "theirs")
        again, _ = load_model(tmp_path / "theirs")
        assert torch.equal(again(ids), model(ids))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer.encode("a name, ünïcode", add_special_tokens=False) == byte_tokenizer().encode("a name, ünïcode")


def test_weights_come_back_bit_for_bit(tmp_path):
    model = small_llama(1)
    save_model(tmp_path, model, byte_tokenizer())
    again, _ = load_model(tmp_path)
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_tokenizer_with_bos_and_eos_alone_and_described_as_older_files_do(tmp_path):
    """A model that was trained with it must not be lost in the end, when it is saved."""
    bare = Tokenizer(byte_tokenizer().ranks, byte_tokenizer().pattern, {"<|bos|>": 256, "<|eos|>": 257})
    save_model(tmp_path, small_llama(1, vocab_size=258), bare)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [257]
    file = tmp_path / "tokenizer_config.json"
    described = {**json.loads(file.read_text()), "bos_token": {"__type": "AddedToken", "content": "<|bos|>"}}
    file.write_text(json.dumps(described))
    _, again = load_model(tmp_path)
    assert (again.bos_id, again.eos_id, again.pad_id) == (256, 257, None)


def test_large_models_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 20_000)
    model = small_llama(1)
    save_model(tmp_path, model, byte_tokenizer())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    again, _ = load_model(tmp_path)
    ids = torch.randint(0, 263, (1, 20))
    assert torch.equal(again(ids), model(ids))


def test_a_reward_model_keeps_its_head_apart(tmp_path):
    save_model(tmp_path, small_llama(1), byte_tokenizer())
    scalar, _ = load_model(tmp_path, kind="scalar")             # from a language model: the head is new, the trunk loaded
    assert torch.equal(scalar.model.embed_tokens.weight, small_llama(1).model.embed_tokens.weight)
    torch.nn.init.constant_(scalar.score.weight, 0.5)           # not as a new one would be drawn
    (tmp_path / "rm").mkdir()
    save_model(tmp_path / "rm", scalar, byte_tokenizer())
    assert set(load_file(tmp_path / "rm" / "heads.safetensors")) >= {"score.weight"}
    again, _ = load_model(tmp_path / "rm", kind="scalar")
    ids = torch.randint(0, 263, (2, 9))
    assert torch.equal(again(ids), scalar(ids)) and isinstance(again, ScalarModel)


def refused(capsys, call):
    with pytest.raises(SystemExit) as stop:
        call()
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_another_shape_lists_every_tensor(tmp_path, capsys):
    save_model(tmp_path, small_llama(1), byte_tokenizer())
    said = refused(capsys, lambda: load_weights(Llama(shape(n_inner=48, n_layer=1)), tmp_path))
    assert said.count("see n_inner") == 3 and said.count("is not part of a model of this shape") == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite_are_loaded_with_a_warning(tmp_path, capsys, dtype):
    model = small_llama(1, tie_embeddings=False).to(dtype)
    for name, spoiled in (("whole", {}), ("spoiled", {"model.layers.0.mlp.up_proj.weight": float("nan"),
                                                      "model.norm.weight": -float("inf")})):
        (tmp_path / name).mkdir()
        with torch.no_grad():               # the largest numbers, whose sum is none, are no fault
            model.lm_head.weight.fill_(torch.finfo(dtype).max)
            for place, value in spoiled.items():
                model.get_parameter(place).view(-1)[-1] = value
        hf.save_model(tmp_path / name, model, byte_tokenizer())
        loaded, _ = hf.read_model(tmp_path / name)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.float())
        said = capsys.readouterr().err
        assert ("in 2 of 21 tensors, first in model.layers.0.mlp.up_proj.weight" in said) if spoiled else said == "", said


def test_missing_tensors_are_named_and_nothing_is_left_random(tmp_path, capsys):
    save_model(tmp_path, small_llama(1), byte_tokenizer())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    said = refused(capsys, lambda: load_model(tmp_path))
    assert "model.layers.1.mlp.up_proj.weight is missing" in said and "model.norm.weight is missing" in said


def test_what_is_not_computed_here_is_refused_by_name(tmp_path, capsys):
    save_model(tmp_path, small_llama(1), byte_tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(attention_bias=True, hidden_act="gelu", head_dim=7, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = refused(capsys, lambda: load_model(tmp_path))
    assert all(word in said for word in ("attention_bias", "'gelu'", "llama3 needs high_freq_factor", "found 7"))


def test_a_config_of_another_kind_or_without_a_key_is_refused(tmp_path, capsys):
    save_model(tmp_path, small_llama(1), byte_tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_key_value_heads"]           # as in the first Llama's folders: as many as heads
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hf.read_config(tmp_path).n_kv_head == 4
    del config["rms_norm_eps"]                  # theirs would be 1e-6 and ours 1e-5: fluent and wrong
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "rms_norm_eps is missing" in refused(capsys, lambda: load_model(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 32, "n_head": 4}))
    said = refused(capsys, lambda: load_model(tmp_path))
    assert "'gpt2' is not supported" in said and "hidden_size is missing" in said


def test_absurd_sizes_are_refused_at_once_and_not_built(tmp_path, capsys):
    save_model(tmp_path, small_llama(1), byte_tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(num_hidden_layers=10 ** 12, vocab_size=10 ** 12, max_position_embeddings=10 ** 12, head_dim=10 ** 12)
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = refused(capsys, lambda: load_model(tmp_path))
    assert all(f"{key} must be from" in said for key in ("n_layer", "vocab_size", "block_size", "head_dim"))
    assert said.count("found 1,000,000,000,000") == 4
    (tmp_path / "config.json").write_text('{"files": []}')
    assert "hidden_size is missing" in refused(capsys, lambda: load_model(tmp_path))


def test_pickles_and_empty_folders_are_refused(tmp_path, capsys):
    assert "no model there" in refused(capsys, lambda: load_model(tmp_path / "nothing"))
    checkpoint.save_light(tmp_path / "run/sft", 1, small_llama(1), byte_tokenizer(), ALONE)
    assert f"Name one of its stages: {tmp_path}/run/sft\n" in refused(capsys, lambda: load_model(tmp_path / "run"))
    save_model(tmp_path / "reward", ScalarModel(small_llama(1).config), byte_tokenizer())
    assert "reward is a reward model" in refused(capsys, lambda: load_model(tmp_path / "reward"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert "pickled" in refused(capsys, lambda: load_model(tmp_path))


def test_a_cut_file_is_refused(tmp_path, capsys):
    save_model(tmp_path, small_llama(1), byte_tokenizer())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "can not be read" in refused(capsys, lambda: load_model(tmp_path))
    for index in ("{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        assert "expected a weight_map" in refused(capsys, lambda: load_model(tmp_path))


def test_a_damaged_checkpoint_is_not_loaded_when_it_is_named_either(tmp_path, capsys):
    folder = checkpoint.save_light(tmp_path, 1, small_llama(1), byte_tokenizer(), ALONE)
    load_model(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-5] ^= 64                       # a bit of a weight: the file is sound as such
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        load_model(folder)
    assert stop.value.code == 2 and "other content than when it was written" in capsys.readouterr().err
