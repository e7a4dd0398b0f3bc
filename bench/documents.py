"""
What it costs that packed documents do not see each other: a training step with boundaries against one without.

    python bench/documents.py

Forward and backward of a Llama on the same tokens, in turns; the median of the ratios to the step without boundaries in
the same round. 'mask' is one call with a mask over the whole row, 'one by one' a call per document; the model takes the
first up to model.MASK_UP_TO tokens of a row, the second above. Documents' lengths are drawn from an exponential
distribution with the mean that is given.
"""
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import model as llama
from configurator import configure
from engine import parallel
from engine.loss import model_losses
from timing import in_turns, ratio

lengths: tuple[int] = (256, 1024, 4096)      # tokens of a row
means: tuple[int] = (100, 400, 1600)         # tokens of a document
tokens = 8192                   # of all rows together
n_layer = 6
n_head = 6
n_embd = 384
n_inner = 1024
vocab_size = 4096
compile = True
dtype = "auto"
rounds = 9
seed = 1
device = "auto"
threads = 0


def main(config):
    setup = parallel.start(config.device, config.dtype, None, config.threads, config.seed)
    parallel.keep_memory(setup)         # as train.py does
    print(f"torch {torch.__version__}, {setup.device}, {str(setup.dtype)[6:]}, {setup.threads} threads; "
          f"{config.n_layer} layers of {config.n_embd}, {config.tokens} tokens a step\n"
          f"{'row':>8}{'document':>10}{'without, ms':>14}{'mask / without':>18}"
          f"{'one by one / without':>24}{'taken':>13}")
    switch = llama.MASK_UP_TO
    for time in config.lengths:
        shape = llama.ModelConfig(config.vocab_size, config.n_layer, config.n_head, config.n_head, config.n_embd,
                                  config.n_inner, time, tie_embeddings=True)
        model = llama.Llama(shape).init_weights(config.seed).to(setup.device)
        torch.compiler.reset()
        parallel.compile_blocks(model, setup, config.compile)
        ids = torch.randint(0, config.vocab_size, (max(1, config.tokens // time), time), device=setup.device)
        for mean in config.means:
            generator = torch.Generator().manual_seed(config.seed)
            begins = (torch.rand(ids.shape, generator=generator) < 1 / mean).to(setup.device)

            def step(begins, mask_up_to):
                llama.MASK_UP_TO = mask_up_to
                with setup.autocast():
                    loss = model_losses(model, ids, ids, begins=begins)[0].mean()
                loss.backward()
                model.zero_grad()

            times = in_turns({"without": lambda: step(None, 0), "mask": lambda: step(begins, time),
                              "one by one": lambda: step(begins, 0)}, config.rounds, setup.device)
            print(f"{time:>8}{mean:>10}{1000 * statistics.median(times['without']):>14.1f}"
                  f"{ratio(times, 'mask', 'without'):>18.2f}{ratio(times, 'one by one', 'without'):>24.2f}"
                  f"{'mask' if time <= switch else 'one by one':>13}", flush=True)


if __name__ == "__main__":
    main(configure(globals()))
