"""The model shape that a config file of this repository stands for."""
from pathlib import Path

from configurator import read_schema, run_file
from model import ModelConfig

ROOT = Path(__file__).resolve().parent.parent


def llama2_7b():
    values = {key.name: key.default for key in read_schema(ROOT / "train.py").values()}
    values.update(run_file(str(ROOT / "config" / "llama2_7b.py"))[0])
    return ModelConfig(**{name: values[name] for name in ModelConfig.__dataclass_fields__})
