"""
Model folders in Hugging Face's form: config.json, model.safetensors (in parts above 5 GB), the tokenizer's files.

Our parameter names are theirs, so nothing is renamed or permuted. What is peculiar to a family's files stands here, and
model.py sees only its switches: Phi-3 stores q, k and v as one matrix and gate and up as another, Qwen2 says
`use_sliding_window`, Qwen3 has heads of 128 unless it says otherwise. Heads that a language model has not (a reward
model's score) lie apart, in heads.safetensors.

What a config.json asks for and we do not do is refused by name, and so is a key that we do not know: a model that is
computed a little differently answers fluently and wrongly.
"""
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configurator import refuse
from engine.chat import short, stop_ids
from engine.files import read_json, write_json
from engine.manifest import newest, verify
from engine.tokenizer import Tokenizer
from model import ORIGINAL, Llama, ModelConfig, ScalarModel

SHARD_BYTES = 5 * 10**9

# model_type -> how transformers' classes are called. Which of model.py's switches a family has: `expressible`.
# TinyLlama and SmolLM2 are "llama", Qwen1.5 and Qwen2.5 are "qwen2".
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}

# our name -> theirs
NAMES = {"vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
         "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size", "n_inner": "intermediate_size",
         "block_size": "max_position_embeddings", "rope_theta": "rope_theta", "norm_eps": "rms_norm_eps",
         "tie_embeddings": "tie_word_embeddings", "head_dim": "head_dim", "separate_documents": "separate_documents",
         "adapter_size": "adapter_size"}
# Those without which a folder means what we take: as many key heads as heads (Llama and Phi only), theta 10000, untied,
# heads of the quotient's width.
OPTIONAL = {"num_key_value_heads", "rope_theta", "tie_word_embeddings", "head_dim", "separate_documents",
            "adapter_size"}

# Keys that change nothing in what is computed, or that read_config reads by name. Any other one that is set is refused.
HARMLESS = {"_attn_implementation", "_name_or_path", "architectures", "attn_implementation", "auto_map", "bos_token_id",
            "dimensions", "do_sample", "dtype", "eos_token_id", "format_version", "id2label", "initializer_range", "is_llama_config",
            "label2id", "max_length", "max_window_layers", "model_type", "num_labels", "pad_token_id", "pretraining_tp",
            "problem_type", "return_dict", "temperature", "top_p", "torch_dtype", "transformers.js_config",
            "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache"}
READ = {"layer_types", ORIGINAL, "rope_parameters", "rope_scaling", "sliding_window", "use_sliding_window"}
FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1}                    # the one value that is computed

# How RoPE may be stretched beyond the context that a model was trained on, with what each way must be told and what it
# may be told beside that. Names and meanings are those of rope_scaling in Hugging Face's config.json.
SCALINGS = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", ORIGINAL}, set()),
    "yarn": ({"factor", ORIGINAL}, {"beta_fast", "beta_slow", "attention_factor"}),
    "longrope": ({"factor", "short_factor", "long_factor", ORIGINAL}, {"attention_factor"}),
}

# Matrices that Phi-3 stores as one, row under row.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

ADAPTER = ("adapter_down", "adapter_up")        # ends of the names of what a model without adapters has not

# Which of our keys decide each dimension of which tensor: a wrong shape is reported with the keys that are to blame.
CAUSES = {"adapter_down": (("adapter_size",), ("n_embd",)), "adapter_up": (("n_embd",), ("adapter_size",)),
          "qkv_proj": (("n_head", "n_kv_head", "head_dim"), ("n_embd",)), "gate_up_proj": (("n_inner",), ("n_embd",)),
          "embed_tokens": (("vocab_size",), ("n_embd",)), "lm_head": (("vocab_size",), ("n_embd",)),
          "q_proj": (("n_head", "head_dim"), ("n_embd",)), "k_proj": (("n_kv_head", "head_dim"), ("n_embd",)),
          "v_proj": (("n_kv_head", "head_dim"), ("n_embd",)), "o_proj": (("n_embd",), ("n_head", "head_dim")),
          "gate_proj": (("n_inner",), ("n_embd",)), "up_proj": (("n_inner",), ("n_embd",)),
          "down_proj": (("n_embd",), ("n_inner",)), "q_norm": (("head_dim",),), "k_norm": (("head_dim",),),
          "norm": (("n_embd",),), "score": ((), ("n_embd",))}
# And which decides whether it is there at all.
PRESENCE = {"adapter_": "adapter_size", "q_norm": "qk_norm", "k_norm": "qk_norm", "bias": "qkv_bias",
            "lm_head": "tie_embeddings"}


def load_model(path, kind="lm", dtype=torch.float32):
    """A model and its tokenizer from a Hugging Face folder, or the newest sound light checkpoint of a run's folder.
    Refuses a folder without weights, weights of another shape (all of them listed), pickled weights."""
    model, tokenizer = read_model(find_folder(path), kind)
    return model.to(dtype), tokenizer


def read_model(folder, kind="lm", dimensions=None, **settings):
    """load_model for a folder that find_folder has given: its files are not compared with their checksums again.

    kind: 'lm' -> Llama, 'scalar' -> ScalarModel (its head is drawn anew when the folder has none) with
    these dimensions, or those of the folder. settings: what a folder does not say, attention and
    dropout. -> (model, tokenizer)"""
    config = replace(read_config(folder), **settings)
    if dimensions is None:
        dimensions = read_json(Path(folder) / "config.json").get("dimensions")
    model = Llama(config) if kind == "lm" else ScalarModel(config, dimensions)
    load_weights(model, folder, new=ADAPTER if settings.get("adapter_size") else ())
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
    if (path / "state.json").exists():
        refuse(f"{path} is a full checkpoint, which is for continuing a run and trusted like code. To start from its "
               f"weights name the light one of its step, {path.name.replace('full_', 'step_')}; train.py "
               f"--resume_from={path} takes all of it, moments and step included.")
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        refuse(f"{path} holds pickled weights (.bin, .pth), which can run any code when they are opened. Convert them "
               "where you trust them:  transformers.AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR2)")
    found = newest(path, "light")
    if found is None:
        stages = sorted({str(step.parent) for step in path.glob("*/step_????????")})
        refuse(f"{path}: no model there. Expected a folder with config.json and model.safetensors, or a stage's folder "
               "with step_NNNNNNNN in it. " + (f"Name one of its stages: {', '.join(stages)}" if stages else
               "Train the stage before this one first, or name another folder."))
    return found


# --- config.json ------------------------------------------------------------------------------------------------------

def read_config(folder):
    """ModelConfig from a folder's config.json; refuses, all at once, what this Llama does not compute."""
    path = Path(folder) / "config.json"
    theirs = read_json(path)
    family = theirs.get("model_type")
    broken = [] if family in FAMILIES else [f"model_type {family!r} is not supported; {', '.join(FAMILIES)} are"]
    optional = OPTIONAL - (set() if family in ("llama", "phi3") else {"num_key_value_heads"})
    broken += [f"{name} is missing" for name in NAMES.values() if name not in theirs and name not in optional]
    known = HARMLESS | READ | set(NAMES.values())
    problems = [f"{name} {short(value)} is not supported" for name, value in theirs.items()
                if (value != FIXED[name] if name in FIXED else value and name not in known)]

    values = {ours: theirs[name] for ours, name in NAMES.items() if theirs.get(name) is not None}
    values["rope_scaling"] = _read_scaling(theirs, values, problems)
    values["sliding_window"] = _read_window(theirs, problems)
    for ours, value in values.items():
        kind = type(getattr(ModelConfig, ours))
        if ours != "rope_scaling" and type(value) is not kind and not (kind is float and type(value) is int):
            broken.append(f"{NAMES.get(ours, ours)} must be {kind.__name__}, found {short(value)}")
    if not broken:                                                         # a shape that can be asked for its problems
        values.setdefault("n_kv_head", values["n_head"])
        if family == "qwen3":
            values.setdefault("head_dim", 128)                             # not the quotient, where it is not named
        config = ModelConfig(**values, qkv_bias=family == "qwen2", qk_norm=family == "qwen3", family=family)
        wrong = config.problems() + scaling_problems(config.rope_scaling, config.head_dim)
        problems += wrong or inexpressible(config)
    refuse(*(f"{path}: {problem}" for problem in broken + problems))
    return config


def _read_scaling(theirs, values, problems):
    """The rope_scaling of a config.json in the form that ModelConfig has; None without one. Sets values["rope_theta"]
    where it stands among these (transformers 5 writes rope_parameters); adds to problems."""
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        problems.append(f"rope_scaling must be an object, found {short(rope)}")
        return None
    rope = {name: value for name, value in rope.items() if value is not None}
    if (theta := rope.pop("rope_theta", None)) is not None:
        values["rope_theta"] = theta
    if (part := rope.pop("partial_rotary_factor", 1)) != 1:
        problems.append(f"partial_rotary_factor {short(part)} is not supported")
    if rope.get("truncate") is True:                                       # of yarn's first and last pair: as we do
        del rope["truncate"]
    older = rope.pop("type", "default")
    kind = str(rope.pop("rope_type", older))
    if kind == "default":
        problems += [f"rope scaling {name} {short(value)} is not supported without a rope_type"
                     for name, value in rope.items() if name != ORIGINAL]
        return None
    kind = "longrope" if kind == "su" else kind                            # its first name
    context = values.get("block_size", 0)
    if kind in ("llama3", "yarn", "longrope"):
        of_phi3 = 4096 if theirs.get("model_type") == "phi3" else None
        rope[ORIGINAL] = theirs.get(ORIGINAL) or of_phi3 or rope.get(ORIGINAL) or context
    if kind in ("yarn", "longrope") and all(type(n) is int and n > 0 for n in (context, rope[ORIGINAL])):
        rope.setdefault("factor", context / rope[ORIGINAL])
    return {"rope_type": kind, **rope}


def _read_window(theirs, problems):
    """The sliding window of a config.json, 0 without one; adds to problems: a window in some of the layers only."""
    family, window, layers = theirs.get("model_type"), theirs.get("sliding_window"), theirs.get("num_hidden_layers")
    if family == "mistral" and "sliding_window" not in theirs:
        window = 4096                                                      # what its class takes
    if family == "llama" and window:
        problems.append(f"sliding_window {short(window)} is not supported in model_type 'llama', which computes none")
    if family in ("qwen2", "qwen3"):
        first = theirs.get("max_window_layers", 28)                        # layers before this one see everything
        asked = theirs.get("use_sliding_window") and window and isinstance(first, int) and isinstance(layers, int)
        if asked and 0 < first < layers:
            problems.append(f"sliding_window {short(window)} from layer {first} of {layers} on is not supported")
        window = window if asked and first <= 0 else 0
    kinds = list(theirs.get("layer_types") or "")
    expected = "sliding_attention" if window else "full_attention"
    if any(kind != expected for kind in kinds):
        problems.append(f"layer_types {short(kinds)} is not supported: all layers must be {expected!r}")
    return window or 0


def family_of(config):
    """The family whose files the model is written as: the one it was read from, or the plainest that can express it."""
    if config.family:
        return config.family
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias:
        return "qwen2"
    return "mistral" if config.sliding_window or config.n_embd % config.n_head else "llama"


def inexpressible(config):
    """What of a model no file of its family can say, a sentence each: asked before a run, not when it is saved."""
    family = family_of(config)
    if family not in FAMILIES:
        return [f"family must be one of {', '.join(FAMILIES)}, found {family!r}"]
    kind = (config.rope_scaling or {}).get("rope_type")
    found = scaling_problems(config.rope_scaling, config.head_dim)
    return found + [f"{what} can not be said in a config.json of the family {family!r}" for what, wrong in {
        f"qkv_bias = {config.qkv_bias}": config.qkv_bias != (family == "qwen2"),
        f"qk_norm = {config.qk_norm}": config.qk_norm != (family == "qwen3"),
        f"sliding_window = {config.sliding_window}": config.sliding_window and family == "llama",
        f"n_embd = {config.n_embd}, which {config.n_head} heads do not divide,":
            config.n_embd % config.n_head and family in ("llama", "phi3"),
        f"head_dim = {config.head_dim} apart from n_embd / n_head":
            family == "phi3" and config.head_dim * config.n_head != config.n_embd,
        f"rope_scaling {kind!r}": family == "phi3" and kind not in (None, "longrope"),
    }.items() if wrong]


def scaling_problems(scaling, head_dim):
    """What is wrong with a rope_scaling, a sentence each."""
    if scaling is None:
        return []
    kind = scaling.get("rope_type")
    if kind not in SCALINGS:
        return [f"rope_scaling: rope_type must be one of {', '.join(SCALINGS)}, found {kind!r}"]
    needs, may = SCALINGS[kind]
    found = [f"rope_scaling: {kind} needs {name}" for name in sorted(needs - scaling.keys())]
    for name in sorted(scaling.keys() - {"rope_type"}):
        value, per_pair = scaling[name], name in ("short_factor", "long_factor")
        numbers = value if per_pair and isinstance(value, list) else [value]
        if name not in needs | may:
            found.append(f"rope_scaling: {kind} with {name} = {value!r} is not supported")
        elif not all(type(number) in (int, float) and number > 0 for number in numbers):
            found.append(f"rope_scaling: {name} must be above 0, found {value!r}")
        elif per_pair and len(numbers) != head_dim // 2:
            found.append(f"rope_scaling: {name} must be head_dim / 2 = {head_dim // 2} numbers, found {value!r}")
    if not found and kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        found.append(f"rope_scaling: low_freq_factor must be below high_freq_factor, found {scaling}")
    return found


def lengthen(shape, length, scaling, source, key="block_size"):
    """The shape for training on sequences of `length` tokens. A model whose positions end before that is refused unless
    a scaling of RoPE is chosen: it would train, at angles that it has never seen, and quietly be worse.

    shape: of the model in the folder `source`; scaling: a rope_scaling or None; key: the setting that it comes from.
    -> a ModelConfig"""
    context = shape.block_size
    if scaling is None:
        if length > context:
            refuse(f"{key} = {length} is beyond the max_position_embeddings = {context} of {source}. Take "
                   f"{context} or less, or choose a scaling (SCALINGS in engine/hf.py), e.g. "
                   f"--rope_scaling=\"{{'rope_type': 'yarn', 'factor': {-(-length // context)}.0}}\"")
        return shape
    original = scaling.get(ORIGINAL) or (shape.rope_scaling or {}).get(ORIGINAL, context)
    if scaling.get("rope_type") != "linear":
        scaling = {**scaling, ORIGINAL: original}
    shape = replace(shape, block_size=max(length, context), rope_scaling=scaling)
    refuse(*shape.problems(), *inexpressible(shape))
    if scaling["rope_type"] in ("linear", "yarn") and length > scaling["factor"] * original:
        refuse(f"{key} = {length} is beyond factor * original context = {scaling['factor']} * {original}: "
               f"set factor = {-(-length // original)} or more")
    return shape


def write_config(folder, config, tokenizer, dtype, lm=True, dimensions=None):
    """config.json and, for a language model, generation_config.json. dimensions: a reward model's."""
    family, window, scaling = family_of(config), config.sliding_window, config.rope_scaling
    refuse(*inexpressible(config))
    name = FAMILIES[family] + ("ForCausalLM" if lm else "ForSequenceClassification")
    theirs = {"architectures": [name], "model_type": family, **{key: getattr(config, k) for k, key in NAMES.items()},
              "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": scaling}
    if family == "phi3" and scaling:
        # Its own form: the original context apart, and for some versions of transformers exactly three keys here.
        implied = scaling["factor"] == config.block_size / scaling[ORIGINAL]
        left_out = {"rope_type", ORIGINAL} | ({"factor"} if implied else set())
        theirs["rope_scaling"] = {"type": "longrope", **{k: v for k, v in scaling.items() if k not in left_out}}
        theirs[ORIGINAL] = scaling[ORIGINAL]
    if family != "llama":
        theirs["sliding_window"] = window or None
    if family in ("qwen2", "qwen3"):
        theirs.update(use_sliding_window=window > 0, max_window_layers=0 if window else config.n_layer)
    theirs.update(bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
                  torch_dtype=str(dtype).removeprefix("torch."), initializer_range=0.02)
    write_json(Path(folder) / "config.json", theirs if lm else {
        **theirs, "num_labels": max(1, len(dimensions or {})), "dimensions": dimensions or {}})
    if lm:
        write_json(Path(folder) / "generation_config.json",
                   {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id,
                    "eos_token_id": sorted(stop_ids(tokenizer))})


# --- weights ----------------------------------------------------------------------------------------------------------

def layout(names, config):
    """{name of a tensor in the files: our parameters that lie in it, row under row}. One each, but for Phi-3's."""
    files = {}
    for name in names:
        place = name
        for fused, parts in FUSED.items() if family_of(config) == "phi3" else ():
            for part in parts:
                place = place.replace(f".{part}.", f".{fused}.")
        files.setdefault(place, []).append(name)
    return files


def save_model(folder, model, tokenizer, tensors=None):
    """Writes a Hugging Face folder. Called with a folder that nobody reads yet (see checkpoint.save_light).
    tensors: {name: the whole parameter, on the CPU}, where the model holds parts only."""
    folder = Path(folder)
    write_config(folder, model.config, tokenizer, next(model.parameters()).dtype, isinstance(model, Llama),
                 getattr(model, "dimensions", None))
    tokenizer.save(folder)

    ours = tensors or {name: p.detach().cpu() for name, p in model.named_parameters()}
    tensors = {place: torch.cat([ours[name] for name in names]) if names[1:] else ours[names[0]].contiguous()
               for place, names in layout(ours, model.config).items()}
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
def load_weights(model, folder, put=torch.Tensor.copy_, new=()):
    """Fills the model from a folder's safetensors, in bf16, fp16 or fp32. Every tensor must be there with its shape;
    all that are wrong are listed at once, with the keys that decide them. Never leaves a weight as it was drawn,
    but for a scalar head or heads for later tokens that the folder does not have.
    put(parameter, whole): keeps a part of it, where parameters are parts. new: ends of the names of those that are
    to be learned yet, which a folder need not have. Says so when a number is not finite."""
    folder = Path(folder)
    index, heads = folder / "model.safetensors.index.json", folder / "heads.safetensors"
    try:
        names = set(read_json(index).get("weight_map").values()) if index.exists() else ["model.safetensors"]
        paths = [folder / name for name in sorted(names)] + [heads] * heads.exists()
    except (AttributeError, TypeError):
        refuse(f"{index} is damaged: expected a weight_map of tensors' names to files")
    opened, problems = {}, []                               # each tensor's name, and the open file that it is in
    for file in paths:
        try:
            content = safe_open(file, framework="pt")
            opened.update(dict.fromkeys(content.keys(), content))
        except (OSError, SafetensorError) as error:
            problems.append(f"{file} can not be read: {error}")
    parameters = dict(model.named_parameters())
    if isinstance(model, ScalarModel):
        if "score.weight" not in opened:
            model.init_weights(seed=0)
        # Hugging Face's scalar heads have no bias: it stays 0.
        parameters = {name: p for name, p in parameters.items() if name in opened or not name.startswith("score.")}
    elif "score.weight" in opened:
        refuse(f"{folder} is a reward model: it says how good an answer is, and writes none. Name the folder of the "
               "model that it judges.")
    if isinstance(model, ScalarModel) or model.config.tie_embeddings:
        opened.pop("lm_head.weight", None)
    further = lambda name: name.startswith("future_heads.") or name.endswith(new)
    parameters = {name: p for name, p in parameters.items() if name in opened or not further(name)}
    opened = {name: file for name, file in opened.items() if name in parameters or not further(name)}
    # Older conversions store RoPE's frequencies, which follow from the config.
    opened = {name: file for name, file in opened.items() if not name.endswith("rotary_emb.inv_freq")}

    files = layout(parameters, model.config)
    if model.model.embed_tokens is None or getattr(model, "lm_head", 0) is None:       # a stage has its own layers only
        opened = {name: file for name, file in opened.items() if name in files}
    height = lambda place: sum(parameters[name].size(0) for name in files[place])
    shapes = {place: (height(place), *parameters[ours[0]].shape[1:]) for place, ours in files.items()}
    found = {name: file.get_slice(name) for name, file in opened.items()}
    problems += mismatches(shapes, {name: tuple(part.get_shape()) for name, part in found.items()})
    problems += [f"{name} is of {part.get_dtype()}, expected BF16, F16 or F32: quantised weights are not supported"
                 for name, part in found.items() if part.get_dtype() not in ("BF16", "F16", "F32")]
    refuse(*(f"{folder}: {problem}" for problem in problems))
    spoiled = []
    for place, ours in files.items():
        rows, tensor = [parameters[name].size(0) for name in ours], opened[place].get_tensor(place)
        for name, part in zip(ours, tensor.split(rows)):
            put(parameters[name], part)
        # The sum costs next to nothing, and may be infinite where no number is; a look at each is for that case only.
        if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
            spoiled.append(place)
    if spoiled and os.environ.get("RANK", "0") == "0":
        print(f"warning: {folder}: not all weights are finite, in {len(spoiled)} of {len(files)} tensors, first in "
              f"{spoiled[0]}: what comes of them means nothing", file=sys.stderr, flush=True)


def mismatches(wanted, found):
    """Sentences about every tensor whose shape is not the expected one, with the keys of the config that decide it (our
    name, and theirs in config.json where it is another).   wanted, found: {name: shape}"""
    def told(keys):
        return ", ".join(f"{key} ({NAMES[key]})" if NAMES.get(key, key) != key else key for key in keys)

    def decides(name, others):
        """What decides whether a tensor is there at all: n_layer where nothing of its layer is."""
        layer = name.split(".")[:3]                                        # model, layers, 7
        alone = layer[1:2] == ["layers"] and not any(other.split(".")[:3] == layer for other in others)
        return told(["n_layer"] if alone else [key for part, key in PRESENCE.items() if part in name])

    problems = [f"{name} is missing; expected shape {wanted[name]}: see {decides(name, found) or 'the files'}"
                for name in wanted if name not in found]
    problems += [f"{name} {found[name]} is not part of a model of this shape: see "
                 f"{decides(name, wanted) or 'the files'}"
                 for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        if wanted[name] != found[name]:
            causes = next((keys for part, keys in CAUSES.items() if part in name), ())
            keys = [key for several, a, b in zip(causes, wanted[name], found[name]) if a != b for key in several]
            problems.append(f"{name} is {found[name]}, expected {wanted[name]}: see "
                            f"{told(dict.fromkeys(keys)) or 'the config'}")
    return sorted(problems)
