"""
Model folders in Hugging Face's form: config.json, model.safetensors (in parts above 5 GB), the tokenizer's files.

Our parameter names are theirs, so nothing is renamed or permuted. Heads that a language model does not have (a reward
model's score) lie apart, in heads.safetensors. What a config.json asks for and we do not do is refused by name: a model
that is computed a little differently answers fluently and wrongly.
"""
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configurator import refuse
from engine.chat import stop_ids
from engine.files import read_json, write_json
from engine.manifest import newest, verify
from engine.tokenizer import Tokenizer
from model import Llama, ModelConfig, ScalarModel

SHARD_BYTES = 5 * 10**9

# our name -> theirs
NAMES = {"vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
         "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size", "n_inner": "intermediate_size",
         "block_size": "max_position_embeddings", "rope_theta": "rope_theta", "norm_eps": "rms_norm_eps",
         "tie_embeddings": "tie_word_embeddings"}
OPTIONAL = {"num_key_value_heads", "rope_theta", "tie_word_embeddings"}      # without which a folder means what we take

# Which of our keys decides a dimension of which tensor: a wrong shape is reported with the key that is to blame.
CAUSES = {"embed_tokens": ("vocab_size", "n_embd"), "lm_head": ("vocab_size", "n_embd"), "q_proj": ("n_embd", "n_embd"),
          "k_proj": ("n_kv_head", "n_embd"), "v_proj": ("n_kv_head", "n_embd"), "o_proj": ("n_embd", "n_embd"),
          "gate_proj": ("n_inner", "n_embd"), "up_proj": ("n_inner", "n_embd"), "down_proj": ("n_embd", "n_inner"),
          "norm": ("n_embd",), "score": ("1", "n_embd")}


def load_model(path, kind="lm", dtype=torch.float32):
    """A model and its tokenizer from a Hugging Face folder, or from the newest sound light checkpoint of a run's folder.
    Refuses a folder without weights, weights of another shape (all of them listed), pickled weights."""
    model, tokenizer = read_model(find_folder(path), kind)
    return model.to(dtype), tokenizer


def read_model(folder, kind="lm", **settings):
    """load_model for a folder that find_folder has given: its files are not compared with their checksums again.

    kind: 'lm' -> Llama, 'scalar' -> ScalarModel (its head is drawn anew when the folder has none). settings: what a
    folder does not say, attention and dropout. -> (model, tokenizer)"""
    config = replace(read_config(folder), **settings)
    model = (Llama if kind == "lm" else ScalarModel)(config)
    load_weights(model, folder)
    tokenizer = Tokenizer.load(folder)
    if kind == "lm":
        model.n_tokens = tokenizer.vocab_size        # the rows behind those only pad the vocabulary
    return model, tokenizer


def find_folder(path):
    """`path` itself when it is a model's folder, else the newest light checkpoint in it that verifies; or refuses."""
    path = Path(path)
    if (path / "model.safetensors").exists() or (path / "model.safetensors.index.json").exists():
        # A folder of ours has a manifest; one from elsewhere has none, and is taken as it is.
        if (path / "manifest.json").exists() and (problems := verify(path)):
            refuse(*problems, f"{path} is damaged: nothing is loaded from it.")
        return path
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        refuse(f"{path} holds pickled weights (.bin, .pth), which can run any code when they are opened. Convert them where you "
               "trust them:  transformers.AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR2)")
    found = newest(path, "light")
    if found is None:
        refuse(f"{path}: no model there. Expected a folder with config.json and model.safetensors, or a run's folder with "
               "step_NNNNNNNN in it. Train the stage before this one first, or name another folder.")
    return found


def read_config(folder):
    """ModelConfig from a folder's config.json; refuses, all at once, what this Llama does not compute."""
    path = Path(folder) / "config.json"
    theirs = read_json(path)
    rope = theirs.get("rope_parameters") or {}                             # transformers 5 keeps theta here
    scaling = theirs.get("rope_scaling") or {}
    head_dim = theirs.get("head_dim")                                      # where it is not named, it is the quotient
    problems = [f"{path}: {what} is not supported" for what, asked in {
        f"model_type {theirs.get('model_type')!r}": theirs.get("model_type") != "llama",
        f"hidden_act {theirs.get('hidden_act')!r}": theirs.get("hidden_act", "silu") != "silu",
        "attention_bias": theirs.get("attention_bias"),
        "mlp_bias": theirs.get("mlp_bias"),
        f"rope scaling {rope or scaling}": {rope.get("rope_type", "default"), scaling.get("rope_type", "default"),
                                            scaling.get("type", "default")} != {"default"},
        f"head_dim {head_dim} apart from hidden_size / num_attention_heads":
            head_dim and head_dim * theirs.get("num_attention_heads", 0) != theirs.get("hidden_size")}.items() if asked]
    problems += [f"{path}: {name} is missing" for name in NAMES.values() if name not in theirs and name not in OPTIONAL]
    if problems:
        refuse(*problems)
    values = {ours: theirs[name] for ours, name in NAMES.items() if name in theirs}
    values.setdefault("n_kv_head", values["n_head"])
    if "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]
    return ModelConfig(**values)


def save_model(folder, model, tokenizer):
    """Writes a Hugging Face folder. Called with a folder that nobody reads yet (see checkpoint.save_light)."""
    folder, config, lm = Path(folder), model.config, isinstance(model, Llama)
    theirs = {"architectures": ["LlamaForCausalLM" if lm else "LlamaForSequenceClassification"], "model_type": "llama",
              **{name: getattr(config, ours) for ours, name in NAMES.items()},
              "head_dim": config.head_dim, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
              "bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id,
              "torch_dtype": str(next(model.parameters()).dtype).removeprefix("torch."), "initializer_range": 0.02}
    write_json(folder / "config.json", theirs if lm else {**theirs, "num_labels": 1})
    if lm:
        write_json(folder / "generation_config.json",
                   {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id,
                    "eos_token_id": sorted(stop_ids(tokenizer))})
    tokenizer.save(folder)

    tensors = {name: p.detach().contiguous().cpu() for name, p in model.named_parameters()}
    heads = {name: tensor for name, tensor in tensors.items() if not name.startswith(("model.", "lm_head."))}
    if heads:
        save_file(heads, folder / "heads.safetensors", metadata={"format": "pt"})
    parts, size = [{}], 0
    for name in sorted(tensors.keys() - heads.keys()):
        if parts[-1] and size + tensors[name].nbytes > SHARD_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensors[name]
        size += tensors[name].nbytes
    place = {}                                             # of each tensor: its file
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors" if parts[1:] else "model.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        place.update(dict.fromkeys(part, file))
    if parts[1:]:
        total = sum(tensors[name].nbytes for name in place)
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": place})


@torch.no_grad()
def load_weights(model, folder):
    """Fills the model from a folder's safetensors. Every tensor must be there and have its shape; all that are wrong are
    listed at once, with the key of the config that decides them. Never leaves a weight as it was drawn, but for a scalar
    head that the folder does not have."""
    folder = Path(folder)
    index, heads = folder / "model.safetensors.index.json", folder / "heads.safetensors"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    opened, problems = {}, []                               # each tensor's name, and the open file that it is in
    for file in [folder / name for name in names] + [heads] * heads.exists():
        try:
            content = safe_open(file, framework="pt")
            opened.update(dict.fromkeys(content.keys(), content))
        except (OSError, SafetensorError) as error:
            problems.append(f"{file} can not be read: {error}")
    wanted = dict(model.named_parameters())
    if isinstance(model, ScalarModel):
        if "score.weight" not in opened:
            model.init_weights(seed=0)
        # Hugging Face's scalar heads have no bias: it stays 0.
        wanted = {name: p for name, p in wanted.items() if name in opened or not name.startswith("score.")}
    if isinstance(model, ScalarModel) or model.config.tie_embeddings:
        opened.pop("lm_head.weight", None)
    problems += mismatches({name: tuple(p.shape) for name, p in wanted.items()},
                           {name: tuple(file.get_slice(name).get_shape()) for name, file in opened.items()})
    if problems:
        refuse(*[f"{folder}: {problem}" for problem in problems])
    for name, parameter in wanted.items():
        parameter.copy_(opened[name].get_tensor(name))


def mismatches(wanted, found):
    """Sentences about every tensor whose shape is not the expected one.   wanted, found: {name: shape}"""
    problems = [f"{name} is missing; expected shape {wanted[name]}" for name in wanted if name not in found]
    problems += [f"{name} {found[name]} is not part of a model of this shape" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        if wanted[name] != found[name]:
            keys = next((keys for part, keys in CAUSES.items() if part in name), ())
            guilty = sorted({key for key, a, b in zip(keys, wanted[name], found[name]) if a != b})
            problems.append(f"{name} is {found[name]}, expected {wanted[name]}: see {', '.join(guilty) or 'the config'}")
    return sorted(problems)
