"""Small true things for tests: a tokenizer of single bytes, a model of a few thousand parameters, a world of one."""
from pathlib import Path

import torch

from configurator import read_schema, run_file
from engine.parallel import Setup
from engine.tokenizer import BYTE_ORDER, PATTERNS, SPECIAL_TOKENS, Tokenizer
from model import Llama, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
ALONE = Setup(rank=0, local_rank=0, world=1, device=torch.device("cpu"), dtype=torch.float32, threads=1)


def byte_tokenizer():
    """256 bytes and the special tokens, nothing merged."""
    return Tokenizer([bytes([b]) for b in BYTE_ORDER], PATTERNS["gpt4"], {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)})


def shape(**changes):
    return ModelConfig(**{**dict(vocab_size=263, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=64, block_size=96), **changes})


def small_llama(seed=0, **changes):
    return Llama(shape(**changes)).init_weights(seed).eval()


def config_shape(name):
    """The shape that config/NAME.py stands for."""
    values = {key.name: key.default for key in read_schema(ROOT / "train.py").values()}
    values.update(run_file(str(ROOT / "config" / f"{name}.py"))[0]["train"])
    return ModelConfig(**{name: values[name] for name in ModelConfig.__dataclass_fields__})
