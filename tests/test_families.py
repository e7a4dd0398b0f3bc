"""
The families that model.py computes by its switches: each against transformers' own class with the same random weights,
through files both ways, with real vocabularies.
"""
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import hf
from engine.generate import generate
from engine.hf import family_of, inexpressible, read_config, save_model
from model import KVCache, Llama, ModelConfig, rope_frequencies
from small import byte_tokenizer, shape, small_llama

SHAPE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=512, rms_norm_eps=1e-5, pad_token_id=258, bos_token_id=256, eos_token_id=257)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 96}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 96}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + 3.0 * i for i in range(8)]}

# name -> (the family's class in transformers, what it changes in SHAPE)
CASES = {
    "llama-2": ("Llama", dict(vocab_size=32000, num_key_value_heads=4)),
    "llama-3": ("Llama", dict(vocab_size=128256, rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "llama-3.1": ("Llama", dict(vocab_size=128256, rope_parameters=LLAMA3)),
    "llama-3.2": ("Llama", dict(vocab_size=128256, tie_word_embeddings=True,
                                rope_parameters={**LLAMA3, "factor": 32.0})),
    "llama, linear": ("Llama", dict(vocab_size=32000, rope_parameters={"rope_type": "linear", "rope_theta": 1e4,
                                                                       "factor": 2.5})),
    "tinyllama": ("Llama", dict(vocab_size=32000, num_key_value_heads=1)),
    "smollm2": ("Llama", dict(vocab_size=49152, hidden_size=72, num_attention_heads=9, num_key_value_heads=3,
                              tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e5})),
    "mistral 0.1": ("Mistral", dict(vocab_size=32000, sliding_window=48)),
    "mistral 0.3": ("Mistral", dict(vocab_size=32768, sliding_window=None, head_dim=24,
                                    rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "qwen1.5": ("Qwen2", dict(vocab_size=151936, num_key_value_heads=4, rms_norm_eps=1e-6)),
    "qwen2.5, yarn": ("Qwen2", dict(vocab_size=151936, tie_word_embeddings=True, rms_norm_eps=1e-6,
                                    rope_parameters=YARN)),
    "qwen2, window": ("Qwen2", dict(vocab_size=1000, use_sliding_window=True, sliding_window=40, max_window_layers=0)),
    "qwen3": ("Qwen3", dict(vocab_size=151936, head_dim=24, tie_word_embeddings=True, rms_norm_eps=1e-6,
                            rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "phi-3 4k": ("Phi3", dict(vocab_size=32064, num_key_value_heads=4, sliding_window=63)),
    "phi-3 128k, long": ("Phi3", dict(vocab_size=32064, num_key_value_heads=4, rope_parameters=LONG,
                                      original_max_position_embeddings=64)),
    "phi-3 128k, short": ("Phi3", dict(vocab_size=32064, num_key_value_heads=4, rope_parameters=LONG,
                                       original_max_position_embeddings=256)),
    "phi-3, grouped": ("Phi3", dict(vocab_size=1000)),
}


def their_model(name, **changes):
    """transformers' model of that case, with weights that let each of its parts show: scores that differ, gains that
    are not 1, biases that are not 0."""
    transformers = pytest.importorskip("transformers")
    kind, own = CASES[name]
    config = getattr(transformers, kind + "Config")(**{**SHAPE, **json.loads(json.dumps(own)), **changes})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            else:
                parameter.normal_(0, 0.15)
    return model


def save_theirs(model, folder, **how):
    model.save_pretrained(folder, **how)
    byte_tokenizer().save(folder)
    return folder


def load_model(folder):
    """hf.load_model, with all rows of the vocabulary: the folders here have a real one beside a tokenizer of bytes."""
    model, tokenizer = hf.load_model(folder)
    model.n_tokens = model.config.vocab_size
    return model, tokenizer


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_family_is_computed_and_written_as_transformers_does(name, tmp_path):
    import transformers
    theirs = their_model(name)
    ours, tokenizer = load_model(save_theirs(theirs, tmp_path / "theirs"))
    ids = torch.randint(0, theirs.config.vocab_size, (2, 144), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits
    assert expected.std() > 0.5                                            # agreement on nothing would be no agreement
    assert (ours(ids) - expected).abs().max() < 1e-4
    ours.config.attention = "fp32"                                         # the other path; and padding, on either side
    seen = torch.arange(144)
    for mask in (seen >= torch.tensor([[29], [0]]), seen < torch.tensor([[144], [111]])):
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        expected = theirs(ids, attention_mask=mask.long(), position_ids=positions).logits
        assert (ours(ids, mask=mask) - expected)[mask].abs().max() < 1e-4
    ours.config.attention = "flash"

    (tmp_path / "ours").mkdir()
    save_model(tmp_path / "ours", ours, tokenizer)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert type(again) is type(theirs) and not any(info.values())
    assert again.config.architectures == [type(theirs).__name__] and again.config.vocab_size == theirs.config.vocab_size
    state = theirs.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.state_dict().items())
    one, mask = ids[:1], torch.ones(1, 144, dtype=torch.long)
    assert torch.equal(again.eval()(one, attention_mask=mask).logits, theirs(one, attention_mask=mask).logits)
    assert read_config(tmp_path / "ours") == ours.config                   # and nothing is lost on the way through it


@pytest.mark.parametrize("name", CASES)
def test_greedy_answers_are_those_of_transformers(name, tmp_path):
    theirs = their_model(name)
    ours, _ = load_model(save_theirs(theirs, tmp_path))
    make = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, ours.config.vocab_size, (n,), generator=make).tolist() for n in (130, 101, 128)]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False)[:, longest:].tolist()
    assert generate(ours, prompts, 64, stop_ids=set(), temperature=0).ids == expected


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_bf16_is_no_further_from_fp32_than_in_transformers(name, tmp_path):
    """The root mean square of what rounding does to the logits, by the same weights (of bf16), against exact ones."""
    import transformers
    save_theirs(their_model(name, vocab_size=1000).bfloat16(), tmp_path)
    ours, _ = load_model(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    ids = torch.randint(0, 1000, (2, 144), generator=torch.Generator().manual_seed(1))
    exact = ours(ids)
    error = lambda model: (model(ids) - exact).pow(2).mean().sqrt()
    rounding = (theirs.eval()(ids).logits.float() - exact).pow(2).mean().sqrt()
    ours.bfloat16()
    for ours.config.attention in ("flash", "fp32"):
        assert error(ours) < 1.1 * rounding
    assert 0 < rounding < 0.05 * exact.std()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_many_files_is_read_exactly(dtype, tmp_path):
    theirs = their_model("llama-3.2", vocab_size=20000).to(dtype)
    save_theirs(theirs, tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and not (tmp_path / "model.safetensors").exists()
    ours, _ = load_model(tmp_path)
    state = theirs.state_dict()
    assert all(torch.equal(p, state[name].float()) and p.dtype == torch.float32 for name, p in ours.named_parameters())


def test_the_frequencies_at_their_corners():
    """By hand: what is kept, what is divided by the factor, and the step from one to the other."""
    plain = ModelConfig(n_embd=256, n_head=2, n_kv_head=2, rope_theta=1e4)
    frequency = 1e4 ** (-torch.arange(64) / 64)
    turns, reach = 1000 * frequency / (2 * math.pi), torch.tensor([1000, 1001])

    def of(**scaling):
        return rope_frequencies(replace(plain, rope_scaling=scaling), reach)

    torch.testing.assert_close(rope_frequencies(plain, reach)[0], frequency)
    torch.testing.assert_close(of(rope_type="linear", factor=4)[0], frequency / 4)
    original = {"original_max_position_embeddings": 1000, "factor": 4.0}
    for scaling in (dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0),
                    dict(rope_type="yarn", beta_fast=4)):
        found, _ = of(**scaling, **original)
        torch.testing.assert_close(found[turns > 4.3], frequency[turns > 4.3])
        torch.testing.assert_close(found[turns < 0.85], frequency[turns < 0.85] / 4)
        between = (turns < 3.4) & (turns > 1.1)
        assert (found[between] < frequency[between]).all() and (found[between] > frequency[between] / 4).all()
    assert of(rope_type="yarn", **original)[1] == pytest.approx(1 + 0.1 * math.log(4))
    found, scale = of(rope_type="longrope", short_factor=[1.0] * 64, long_factor=[2.0] * 64, **original)
    torch.testing.assert_close(found, torch.stack([frequency, frequency / 2]))         # row by row
    assert scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1000)))


@torch.no_grad()
def test_longrope_with_a_cache_and_with_neighbours():
    """The divisors follow from how long a row will become: its neighbours and the cache change nothing."""
    scaling = {**LONG, "factor": 4.0, "original_max_position_embeddings": 24}
    del scaling["rope_theta"]
    model = small_llama(1, n_embd=64, rope_scaling=scaling)
    for p in model.parameters():
        p.mul_(5 if p.dim() > 1 else 1)
    prompts = [list(range(5, 15)), list(range(40, 70))]
    for new in (10, 30):                                                   # the first row stays within 24, and does not
        together = generate(model, prompts, new, set(), temperature=0)
        alone = [generate(model, [prompt], new, set(), temperature=0) for prompt in prompts]
        assert together.ids == [one.ids[0] for one in alone]
    ids = torch.randint(0, 263, (1, 40))
    short = model(ids[:, :20])
    padded = model(ids, mask=torch.arange(40)[None] < 20)[:, :20]
    assert (short - padded).abs().max() < 1e-5 < (short - model(ids)[:, :20]).abs().max()
    cache = KVCache(model.config, 1, 40)                                   # of what will be 40 long, from the start on
    pieces = [model(ids[:, a:b], cache=cache) for a, b in ((0, 17), (17, 18), (18, 40))]
    assert (torch.cat(pieces, 1) - model(ids)).abs().max() < 1e-5


def test_a_window_is_so_many_tokens_wide():
    model = small_llama(1, n_layer=1, sliding_window=7)
    ids = torch.randint(0, 263, (1, 30))
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 263
    differs = (model(ids) - model(changed)).abs().amax(-1)[0] > 0
    assert differs.nonzero().flatten().tolist() == list(range(10, 17))     # itself and six later ones see it


# --- config.json, as the families' folders have it -------------------------------------------------------------------

COMMON = {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
          "initializer_range": 0.02,
          "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True}
QWEN = {**COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "sliding_window": 32768, "use_sliding_window": False}
PHI = {**COMMON, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "embd_pdrop": 0.0,
       "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "hidden_size": 3072, "intermediate_size": 8192,
       "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "resid_pdrop": 0.0,
       "rms_norm_eps": 1e-5,
       "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False,
       "vocab_size": 32064}
REAL = {
    "TinyLlama 1.1B": (1_100_048_384, {
        **COMMON, "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4, "pretraining_tp": 1,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 32000}),
    "SmolLM2 135M": (134_515_008, {
        **COMMON, "model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "hidden_size": 576,
        "intermediate_size": 1536, "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True,
        "vocab_size": 49152, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
    "Llama 3.2 1B": (1_235_814_400, {
        **COMMON, "model_type": "llama", "attention_bias": False, "mlp_bias": False, "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "vocab_size": 128256, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                               "original_max_position_embeddings": 8192, "rope_type": "llama3"}}),
    "Mistral 7B": (7_241_732_096, {
        **COMMON, "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "max_position_embeddings": 32768, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000}),
    "Qwen1.5 4B": (3_950_369_280, {
        **QWEN, "hidden_size": 2560, "intermediate_size": 6912, "max_window_layers": 21, "num_attention_heads": 20,
        "num_hidden_layers": 40, "num_key_value_heads": 20, "rope_theta": 5000000.0, "tie_word_embeddings": False}),
    "Qwen2.5 0.5B": (494_032_768, {
        **QWEN, "hidden_size": 896, "intermediate_size": 4864, "max_window_layers": 24, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1000000.0, "tie_word_embeddings": True}),
    "Qwen3 0.6B": (596_049_920, {
        **QWEN, "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True}),
    "Phi-3 mini 4k": (3_821_079_552, {
        **PHI, "max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047}),
    "Phi-3 mini 128k": (3_821_079_552, {
        **PHI, "max_position_embeddings": 131072, "sliding_window": 262144,
        "rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [1.07] * 24 + [60.0] * 24}}),
}


def written(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", REAL)
def test_published_configs_give_the_published_number_of_parameters(name, tmp_path):
    count, content = REAL[name]
    config = read_config(written(tmp_path / "a", content))
    with torch.device("meta"):
        assert Llama(config).n_params() == count
    assert family_of(config) == content["model_type"] and not inexpressible(config)
    hf.write_config(tmp_path, config, byte_tokenizer(), torch.bfloat16)
    assert read_config(tmp_path) == config


def test_what_published_configs_mean(tmp_path):
    found = {name: read_config(written(tmp_path / "a", content)) for name, (_, content) in REAL.items()}
    assert found["Mistral 7B"].sliding_window == 4096 and found["Qwen1.5 4B"].sliding_window == 0
    assert found["Qwen3 0.6B"].qk_norm and found["Qwen3 0.6B"].head_dim == 128 and not found["Qwen3 0.6B"].qkv_bias
    assert found["Qwen2.5 0.5B"].qkv_bias and found["Qwen2.5 0.5B"].rope_theta == 1e6
    assert found["Phi-3 mini 128k"].rope_scaling["factor"] == 32 and found["Phi-3 mini 4k"].sliding_window == 2047
    assert found["Llama 3.2 1B"].rope_scaling["original_max_position_embeddings"] == 8192


def test_what_is_not_said_means_what_the_family_takes(tmp_path):
    def without(name, *keys, **changes):
        content = {key: value for key, value in REAL[name][1].items() if key not in keys}
        return read_config(written(tmp_path / "a", {**content, **changes}))

    assert without("Qwen3 0.6B", "head_dim").head_dim == 128
    assert without("Mistral 7B", "sliding_window").sliding_window == 4096
    assert without("Mistral 7B", "rope_theta").rope_theta == 10000
    assert without("TinyLlama 1.1B", "num_key_value_heads").n_kv_head == 32
    assert without("Qwen2.5 0.5B", use_sliding_window=True, max_window_layers=0).sliding_window == 32768
    assert without("Qwen2.5 0.5B", use_sliding_window=True, max_window_layers=24).sliding_window == 0
    assert without("Qwen2.5 0.5B", layer_types=["full_attention"] * 24).sliding_window == 0
    yarn = without("Qwen2.5 0.5B", rope_scaling={"type": "yarn", "factor": 4.0})
    assert yarn.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("name, changes, said", [
    ("TinyLlama 1.1B", {"attention_bias": True}, "attention_bias True"),
    ("TinyLlama 1.1B", {"mlp_bias": True}, "mlp_bias True"),
    ("TinyLlama 1.1B", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("TinyLlama 1.1B", {"quantization_config": {"quant_method": "gptq"}},
     "quantization_config {'quant_method': 'gptq'}"),
    ("TinyLlama 1.1B", {"sliding_window": 512}, "sliding_window 512"),
    ("TinyLlama 1.1B", {"logits_soft_cap": 30.0}, "logits_soft_cap 30.0"),
    ("TinyLlama 1.1B", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ("TinyLlama 1.1B", {"rope_interleaved": True}, "rope_interleaved True"),
    ("TinyLlama 1.1B", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "found 'dynamic'"),
    ("TinyLlama 1.1B", {"rope_scaling": {"factor": 2.0}}, "rope scaling factor 2.0"),
    ("TinyLlama 1.1B", {"rope_scaling": {"type": "linear"}}, "linear needs factor"),
    ("TinyLlama 1.1B", {"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be above 0"),
    ("TinyLlama 1.1B", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "yarn with mscale = 0.7"),
    ("TinyLlama 1.1B", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "yarn with truncate"),
    ("TinyLlama 1.1B", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope scaling full_attention"),
    ("TinyLlama 1.1B", {"hidden_size": "2048"}, "hidden_size must be int, found '2048'"),
    ("TinyLlama 1.1B", {"model_type": "gemma2"}, "model_type 'gemma2'"),
    ("Phi-3 mini 4k", {"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75"),
    ("Phi-3 mini 4k", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
     "partial_rotary_factor"),
    ("Phi-3 mini 4k", {"resid_pdrop": 0.1}, "resid_pdrop 0.1"),
    ("Phi-3 mini 128k", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 48}},
     "short_factor"),
    ("Phi-3 mini 4k", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling 'linear' can not be said"),
    ("Qwen3 0.6B", {"attention_bias": True}, "attention_bias True"),
    ("Qwen2.5 0.5B", {"use_sliding_window": True, "max_window_layers": 7}, "sliding_window 32768 from layer 7 of 24"),
    ("Qwen2.5 0.5B", {"layer_types": ["full_attention", "sliding_attention"] * 12}, "layer_types"),
])
def test_what_is_asked_for_and_not_done_is_refused_by_name(name, changes, said, tmp_path, capsys):
    folder = written(tmp_path / "a", {**REAL[name][1], **changes})
    with pytest.raises(SystemExit) as stop:
        read_config(folder)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and said in error and str(folder / "config.json") in error


def test_all_of_it_at_once(tmp_path, capsys):
    content = {**REAL["TinyLlama 1.1B"][1], "attention_bias": True, "hidden_act": "relu", "qk_layernorm": True}
    del content["rms_norm_eps"]
    with pytest.raises(SystemExit):
        read_config(written(tmp_path / "a", content))
    said = capsys.readouterr().err
    assert all(word in said for word in ("attention_bias", "'relu'", "qk_layernorm", "rms_norm_eps is missing"))


# --- switches that no file can say, wrong tensors --------------------------------------------------------------------

@pytest.mark.parametrize("changes, family", [
    ({}, "llama"), ({"sliding_window": 8}, "mistral"), ({"qkv_bias": True}, "qwen2"),
    ({"qk_norm": True, "head_dim": 12}, "qwen3"),
    ({"n_embd": 36, "n_head": 5, "n_kv_head": 5, "head_dim": 8}, "mistral"), ({"head_dim": 16}, "llama"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "llama"), ({"family": "phi3"}, "phi3")])
def test_the_plainest_family_is_chosen(changes, family, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = small_llama(2, **changes)
    assert family_of(model.config) == family and not inexpressible(model.config)
    save_model(tmp_path, model, byte_tokenizer())
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 263, (2, 90))
    with torch.no_grad():
        assert (model(ids) - other(ids).logits).abs().max() < 1e-4
        assert torch.equal(load_model(tmp_path)[0](ids), model(ids))


@pytest.mark.parametrize("changes, said", [
    ({"qk_norm": True, "qkv_bias": True}, "qkv_bias = True"),
    ({"family": "llama", "sliding_window": 9}, "sliding_window = 9"),
    ({"family": "qwen2"}, "qkv_bias = False"), ({"family": "gemma"}, "'gemma'"),
    ({"family": "phi3", "head_dim": 16}, "head_dim = 16"),
    ({"family": "phi3", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear'")])
def test_what_no_file_can_say(changes, said):
    assert any(said in problem for problem in inexpressible(shape(**changes)))


def test_wrong_tensors_of_a_fused_family_are_named_with_their_keys(tmp_path, capsys):
    model = small_llama(1, family="phi3")
    save_model(tmp_path, model, byte_tokenizer())
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.self_attn.qkv_proj.weight"].shape == (32 + 2 * 16, 32)
    assert stored["model.layers.1.mlp.gate_up_proj.weight"].shape == (128, 32)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)          # of older conversions: not needed
    save_file(stored, tmp_path / "model.safetensors")
    load_model(tmp_path)
    with pytest.raises(SystemExit):
        hf.load_weights(Llama(replace(model.config, n_kv_head=4, n_inner=96)), tmp_path)
    said = capsys.readouterr().err
    assert said.count("qkv_proj.weight is (64, 32), expected (96, 32): see n_head (num_attention_heads), n_kv_he") == 2
    assert said.count("expected (192, 32): see n_inner (intermediate_size)") == 2 and said.count("down_proj") == 2


@pytest.mark.parametrize("switch, tensor, key", [
    ({"qkv_bias": True}, "v_proj.bias", "qkv_bias"), ({"qk_norm": True}, "k_norm.weight", "qk_norm"),
    ({"tie_embeddings": True}, "lm_head.weight", "tie_embeddings (tie_word_embeddings)")])
def test_a_tensor_too_many_or_too_few_names_its_switch(switch, tensor, key):
    shapes = [{name: tuple(p.shape) for name, p in small_llama(**change).named_parameters()} for change in ({}, switch)]
    for a, b in (shapes, shapes[::-1]):
        lines = [line for line in hf.mismatches(a, b) if tensor in line]
        assert lines and all(line.endswith(f"see {key}") for line in lines)


def test_quantised_tensors_are_refused(tmp_path, capsys):
    save_model(tmp_path, small_llama(1), byte_tokenizer())
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.norm.weight"] = stored["model.norm.weight"].to(torch.int8)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit):
        load_model(tmp_path)
    assert "model.norm.weight is of I8" in capsys.readouterr().err


def test_a_foreign_tokenizer_is_written_back_as_it_was(tmp_path):
    """Its chat template, and what it puts before a text, are not ours to replace."""
    model = small_llama(1)
    (tmp_path / "one").mkdir()
    save_model(tmp_path / "one", model, byte_tokenizer())
    (tmp_path / "one" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    file = tmp_path / "one" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "{{ 'x' }}", "add_bos_token": True}))
    again, tokenizer = load_model(tmp_path / "one")
    (tmp_path / "two").mkdir()
    save_model(tmp_path / "two", again, tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
