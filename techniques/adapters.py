"""
Bottleneck adapters: the model stays as it is, and behind each sublayer a small network learns what to add (Houlsby et
al. 2019, arXiv 1902.00751). And what they share with LoRA: being learned beside a frozen rest, and being saved alone.

    y = W x,   y + up silu(down y)          W of o_proj or down_proj, frozen; down (size, C), up (C, size)

`up` starts at 0, so the first forward pass is the model's own, bit for bit. sft.py switches them on with
--adapter_size=16. A nonlinearity can not be merged into a matrix as LoRA can: adapters stay in the model, as its config
says (adapter_size), cost some time in every forward pass, and a checkpoint has them among its weights. transformers
reads such a folder as the model without them, and says that it leaves them out. The layer itself is
model.AdaptedLinear. As in the rest of a Llama there are no biases; Houlsby's have some, and learn the norms too.
"""
import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from configurator import refuse
from engine.files import fits, json_text, write_atomic
from model import generator_of

PARTS = ("lora_A", "lora_B", "adapter_down", "adapter_up")      # ends of the names of what is learned beside the rest
SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."        # PEFT's names are those of the model with this before them


def freeze(model):
    """Of the model only the PARTS are learned from now on."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(PARTS))


@torch.no_grad()
def draw(model, seed, put=torch.Tensor.copy_):
    """The PARTS as they are at first: what reads x as nn.Linear draws its weights (uniform up to 1 / sqrt(in)), each
    from its own generator, so that whoever holds a slice can keep that: put(parameter, whole). What writes is 0."""
    for name, parameter in model.named_parameters():
        if name.endswith(("lora_A", "adapter_down")):
            drawn = torch.rand(parameter.shape, generator=generator_of(seed, name), device="cpu")
            put(parameter, (2 * drawn - 1) / math.sqrt(parameter.size(1)))
        elif name.endswith(PARTS):
            parameter.zero_()


def save(folder, model, base, tokenizer=None, write=True, settings=None):
    """Writes the PARTS alone, some megabytes. base: the folder or name of the model that they belong to; tokenizer: to
    be put beside them; settings: LoRA's. Where ranks hold slices all of them must call it; those with write do."""
    whole = lambda p: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
    tensors = {f"{PREFIX}{name}.weight": whole(parameter).cpu().contiguous()
               for name, parameter in model.named_parameters() if name.endswith(PARTS)}
    if not write:
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        tokenizer.save(folder)
    shape = {key: getattr(model.config, key) for key in ("block_size", "rope_scaling")}     # sft.py may have changed
    save_file(tensors, folder / f"{WEIGHTS}.tmp",
              metadata={"format": "pt", "format_version": "1", "shape": json.dumps(shape)})
    (folder / f"{WEIGHTS}.tmp").replace(folder / WEIGHTS)
    write_atomic(folder / SETTINGS, json_text({
        "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base),
        **(settings or {"peft_type": "BOTTLENECK", "adapter_size": model.config.adapter_size})}))


def read(folder):
    """(settings, tensors) of what was saved alone, by `save` or by PEFT."""
    folder = Path(folder)
    try:
        found = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        like = ({"adapter_size": int} if found.get("peft_type") == "BOTTLENECK" else
                {"r": int, "lora_alpha": (int, float), "target_modules": [str]})
        if not fits(found, like):
            raise ValueError(f"{SETTINGS} does not say {', '.join(like)}, or not in the usual form")
        return found, load_file(folder / WEIGHTS)
    except Exception as error:
        refuse(f"{folder} holds neither LoRA nor adapters that can be read ({error!r}): expected {SETTINGS} and "
               f"{WEIGHTS}")


def base_of(folder):
    """(the model's folder, how its shape is to be changed) of what was saved alone: adapter_size, not for LoRA, and,
    if `save` wrote it, a longer context. PEFT reads LoRA without that."""
    found, _ = read(folder)
    if not fits(found, {"base_model_name_or_path": str}) or not found["base_model_name_or_path"]:
        refuse(f"{folder}/{SETTINGS} does not say what model it belongs to: base_model_name_or_path")
    with safe_open(Path(folder) / WEIGHTS, "pt") as file:
        shape = json.loads((file.metadata() or {}).get("shape", "{}"))
    return found["base_model_name_or_path"], {**shape, **{key: found[key] for key in ("adapter_size",) if key in found}}


@torch.no_grad()
def fill(folder, model, tensors):
    """Puts saved PARTS into the model's places for them. All that does not fit is told."""
    wanted = {f"{PREFIX}{name}.weight": p for name, p in model.named_parameters() if name.endswith(PARTS)}
    refuse(*(f"{folder}: {name} is missing" for name in sorted(wanted.keys() - tensors.keys())),
           *(f"{folder}: the model has no place for {name}" for name in sorted(tensors.keys() - wanted.keys())),
           *(f"{folder}: {name} is {tuple(tensors[name].shape)}, the model wants {tuple(wanted[name].shape)}"
             for name in sorted(wanted.keys() & tensors.keys()) if tensors[name].shape != wanted[name].shape))
    for name, parameter in wanted.items():
        parameter.copy_(tensors[name])
