"""
Activations computed anew in the backward pass: what each setting of `recompute` saves in memory and costs in time.

    python bench/recompute.py

Forward and backward of a Llama, in turns; the median of the ratios to 'none' of the same round. Memory is what autograd
keeps between the two passes, counted tensor by tensor (what shares its storage once, the weights not).
"""
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from configurator import configure
from engine import parallel
from engine.loss import model_losses
from model import Llama, ModelConfig
from timing import in_turns, ratio

n_layer = 6
n_head = 6
n_embd = 384
n_inner = 1024
vocab_size = 4096
block_size = 1024
micro_batch_size = 8
compile = True
dtype = "auto"
rounds = 9
seed = 1
device = "auto"
threads = 0

KINDS = ("none", "selective", "full")


def kept_bytes(model, loss_of):
    """Bytes that are kept between forward and backward, besides the weights."""
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model)
    loss.backward()
    return sum(kept.values())


def main(config):
    setup = parallel.start(config.device, config.dtype, None, config.threads, config.seed)
    print(f"torch {torch.__version__}, {setup.device}, {str(setup.dtype)[6:]}, {setup.threads} threads; "
          f"{config.n_layer} layers of {config.n_embd}, {config.micro_batch_size} x {config.block_size} tokens")
    ids = torch.randint(0, config.vocab_size, (config.micro_batch_size, config.block_size), device=setup.device)

    def loss_of(model):
        with setup.autocast():
            return model_losses(model, ids, ids, chunk=1024)[0].mean()

    models = {}
    for kind in KINDS:
        shape = ModelConfig(config.vocab_size, config.n_layer, config.n_head, config.n_head, config.n_embd,
                            config.n_inner, config.block_size, tie_embeddings=True, recompute=kind)
        models[kind] = Llama(shape).init_weights(config.seed).to(setup.device)
        parallel.compile_blocks(models[kind], setup, config.compile)
    works = {kind: lambda kind=kind: loss_of(models[kind]).backward() for kind in KINDS}
    times = in_turns(works, config.rounds, setup.device)
    kept = {kind: kept_bytes(models[kind], loss_of) for kind in KINDS}
    print(f"{'recompute':>12}{'kept, MiB':>12}{'of none':>10}{'step, ms':>12}{'of none':>10}")
    for kind in KINDS:
        print(f"{kind:>12}{kept[kind] / 2**20:>12.0f}{kept[kind] / kept['none']:>10.2f}"
              f"{1000 * statistics.median(times[kind]):>12.0f}{ratio(times, kind, 'none'):>10.2f}")


if __name__ == "__main__":
    main(configure(globals()))
