"""The shapes in config/: exact numbers of parameters, the arithmetic in their comments, files that can say them."""
import math
import re
from itertools import pairwise

import pytest
import torch

from engine.hf import family_of, inexpressible, read_config, write_config
from model import Llama
from small import ROOT, byte_tokenizer, config_shape

# name -> (parameters, the family whose files it is written as)
COUNTS = {
    "llama2_7b": (6_738_415_616, "llama"), "llama3_8b": (8_030_261_248, "llama"),
    "qwen1_5_4b": (3_950_369_280, "qwen2"),
    "phi3_mini": (3_821_079_552, "phi3"),
    "tinyllama_1b": (1_100_048_384, "llama"), "llama_124m": (123_587_328, "llama"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_counted_to_the_last_one(name, tmp_path):
    count, family = COUNTS[name]
    config = config_shape(name)
    with torch.device("meta"):
        model = Llama(config)
    assert model.n_params() == count
    assert not config.problems() and not inexpressible(config) and family_of(config) == family
    write_config(tmp_path, config, byte_tokenizer(), torch.float32)
    again = read_config(tmp_path)
    with torch.device("meta"):
        assert [p.shape for p in Llama(again).parameters()] == [p.shape for p in model.parameters()]
    assert again.rope_theta == config.rope_theta and again.sliding_window == config.sliding_window


@pytest.mark.parametrize("name", COUNTS)
def test_the_arithmetic_in_the_comments_is_right(name):
    """Every product in the table of parameters, the sum of a layer's parts, and the sum of all."""
    text = (ROOT / "config" / f"{name}.py").read_text()
    table = text[text.index("# Parameters:"):]
    table = table[:table.index(f"{COUNTS[name][0]:,}")]                    # the last line is the sum
    layer, total = 0, 0
    for line in table.splitlines()[1:]:
        sides = [re.search(r"[\d,]+(\s*\*\s*[\d,]+)*\s*$", side)[0] for side in re.sub(r"\(.*?\)", "", line).split("=")
                 if re.search(r"\d\s*$", side)]
        sides = [[int(factor.replace(",", "")) for factor in side.split("*")] for side in sides]
        for left, right in pairwise(sides):
            assert math.prod(left) == right[0], line
        if "one layer" in line:
            assert sides[0][0] == layer, line
            total += sides[1][0]
        elif len(sides) == 3:
            total += sides[2][0]
        elif sides:
            layer += sides[1][0]
    assert total == COUNTS[name][0]
