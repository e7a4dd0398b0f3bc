"""
How fast tokens come, beside transformers' generate() with the same weights and dtype, and beside the memory.

    python bench/generate.py                                  the demo's size and 124M, batch 1 and 16, fp32 and bf16
    python bench/generate.py --shapes=demo --dtypes=fp32 --batches=1, --pairs=9

Each line is of `pairs` pairs: ours, theirs, ours, theirs, ... in one process, greedy, the same prompt and number of new
tokens, one call before that is not counted. The ratio is the median over the pairs of their time / our time, so what
else the machine does meets both. "of memory" is what share of the rate at which this machine reads memory our weights
were read with, prompt and all else included: bytes of the weights * steps / seconds, each over the rate of a read of as
many bytes right before (the faster of a sum and a matrix-vector product). At batch 1 that rate is the limit: every
weight is read once for one token.
"""
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configurator import configure, refuse  # noqa: E402
from engine import parallel  # noqa: E402
from engine.generate import generate  # noqa: E402
from model import Llama, ModelConfig  # noqa: E402

shapes: tuple[str] = ("demo", "124m")
dtypes: tuple[str] = ("fp32", "bf16")
batches: tuple[int] = (1, 16)
prompt_tokens = 16
new_tokens = 96
pairs = 5
compile = False         # our step through torch.compile
peer = True             # False: only ours, without transformers
device = "auto"
threads = 0

SHAPES = {
    "demo": dict(vocab_size=2048, n_layer=4, n_head=4, n_kv_head=4, n_embd=256, n_inner=704, block_size=256),
    "124m": dict(vocab_size=50304, n_layer=12, n_head=12, n_kv_head=12, n_embd=768, n_inner=2048, block_size=1024,
                 tie_embeddings=True),
}


def theirs_like(model):
    """transformers' Llama with the weights of ours."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = model.config
    made = LlamaForCausalLM(LlamaConfig(
        vocab_size=config.vocab_size, num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
        num_key_value_heads=config.n_kv_head, hidden_size=config.n_embd, intermediate_size=config.n_inner,
        max_position_embeddings=config.block_size, rms_norm_eps=config.norm_eps, rope_theta=config.rope_theta,
        tie_word_embeddings=config.tie_embeddings, bos_token_id=0, eos_token_id=None, pad_token_id=0))
    made.load_state_dict(model.state_dict())
    return made.to(model.lm_head.weight).eval()


def seconds(work, device):
    """-> (how long it took, its result)"""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, result


def read_rate(memory, device):
    """Bytes a second at which a tensor (rows, columns) is read: the better of two ways, each of which reads it once."""
    ones = torch.ones(memory.size(1), device=device, dtype=memory.dtype)
    return memory.nbytes / min(seconds(lambda: memory.sum(), device)[0], seconds(lambda: memory @ ones, device)[0])


def measure(name, dtype, batch, config, setup):
    model = Llama(ModelConfig(**SHAPES[name])).init_weights(1)
    with torch.no_grad():
        for parameter in model.parameters():         # wider apart than at the start, so that greedy is no toss-up
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    model = model.to(setup.device, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).eval()
    size = sum(parameter.nbytes for parameter in model.parameters())
    if not model.config.tie_embeddings:              # of a table of its own, a step reads a row per token
        size -= model.model.embed_tokens.weight.nbytes
    prompts = torch.randint(1, 2000, (batch, config.prompt_tokens), generator=torch.Generator().manual_seed(batch))
    rows, prompts = prompts.tolist(), prompts.to(setup.device)
    memory = torch.zeros(size // 4 // 1024, 1024, device=setup.device).add_(1)
    ours = lambda: generate(model, rows, config.new_tokens, set(), temperature=0, compile=config.compile)
    if config.peer:
        peer = theirs_like(model)
        length = dict(max_new_tokens=config.new_tokens, min_new_tokens=config.new_tokens)
        other = lambda: peer.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, **length)
        first, same = other()[:, config.prompt_tokens:].tolist(), ours().ids
        agree = sum(a == b for x, y in zip(same, first) for a, b in zip(x, y)) / batch / config.new_tokens
    ours()
    times, peer_times, shares = [], [], []
    with torch.inference_mode():
        read_rate(memory, setup.device)
        for _ in range(config.pairs):
            rate = read_rate(memory, setup.device)
            times.append(seconds(ours, setup.device)[0])
            shares.append(size * config.new_tokens / times[-1] / rate)
            if config.peer:
                peer_times.append(seconds(other, setup.device)[0])
    tokens, median = batch * config.new_tokens, statistics.median
    cells = [name, dtype, f"{batch}", f"{tokens / median(times):,.0f}"]
    cells += [f"{tokens / median(peer_times):,.0f}", f"{median(b / a for a, b in zip(times, peer_times)):.2f}",
              f"{agree:.0%}"] if config.peer else ["-"] * 3
    return [*cells, f"{median(shares):.0%}", f"{size * config.new_tokens / median(times) / median(shares) / 1e9:.1f}"]


def main(config):
    unknown = [f"shapes: {name} is not one of {', '.join(SHAPES)}" for name in config.shapes if name not in SHAPES]
    unknown += [f"dtypes: {name} is neither fp32 nor bf16" for name in config.dtypes if name not in ("fp32", "bf16")]
    refuse(*unknown, *config.below_one("prompt_tokens", "new_tokens", "pairs"))
    setup = parallel.start(config.device, "fp32", False, config.threads)
    if config.peer:
        try:
            import transformers
        except ImportError:
            refuse("transformers is not installed, with which this compares: requirements-test.txt, or --peer=False")
        print(f"torch {torch.__version__}, transformers {transformers.__version__}, {setup.device}, "
              f"{setup.threads} threads")
    print("| shape | dtype | batch | tokens/s | transformers | ratio | same tokens | of memory | memory, GB/s |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in config.shapes:
        for dtype in config.dtypes:
            for batch in config.batches:
                print("| " + " | ".join(measure(name, dtype, batch, config, setup)) + " |", flush=True)


if __name__ == "__main__":
    main(configure(globals()))
