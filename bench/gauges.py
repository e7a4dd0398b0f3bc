"""
What the gauges cost: a training step that is logged with all of them against one that is not.

    python bench/gauges.py                                                        the demo's shape
    torchrun --nproc_per_node=2 bench/gauges.py --device=cpu                      and the network measured as well

The steps take turns, and the median of the ratios is that of a run in which every step is logged. Logged every
`log_every` steps, the share of the time is that many times smaller. Beside it, the time spent in the gauges, in the log
with its alarms and in TensorBoard, by the clock.
"""
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from configurator import configure
from engine import parallel
from engine.gauges import Gauges, flops_per_token
from engine.monitor import Monitor
from engine.optim import clip, optimizers_of
from timing import demo_model, in_turns, ratio
from train import forward_backward

block_size = 256                # at most
batch_tokens = 4096             # over all processes
learning_rate = 4e-3
matrix_learning_rate = 0.02
log_every = 10
rounds = 40
compile = True
dtype = "auto"
seed = 1
device = "auto"
threads = 0


def main(config):
    setup = parallel.start(config.device, config.dtype, None, config.threads, config.seed)
    model = demo_model(config, setup)
    shape, n_params = model.config, model.n_params()
    optimizers = optimizers_of(model, config.learning_rate, config.matrix_learning_rate, 0.1)
    model = parallel.wrap(model, setup)
    rows = config.batch_tokens // config.block_size // setup.world
    ids = torch.randint(0, shape.vocab_size, (rows, config.block_size), device=setup.device)
    weights = torch.ones(ids.shape, device=setup.device)
    ends = SimpleNamespace(eos_id=0, bos_id=1)
    settings = SimpleNamespace(loss_chunk=0, z_loss=0.0, separate_documents=False, log_blocks=True, peak_flops=1e12)
    inside, steps = [], 0

    with tempfile.TemporaryDirectory() as folder:
        gauges = Gauges(folder, model, optimizers, flops_per_token(shape, n_params), settings, setup)
        monitor = Monitor(folder, setup, 10**6)

        def step(logged):
            nonlocal steps
            began, spent = time.perf_counter(), 0.0
            total = forward_backward(model, [(ids, ids, weights)], settings, ends, setup)
            norm, loss = clip(model.parameters(), 1.0).item(), total[0].item()
            if logged:
                entered = time.perf_counter()
                gauges.before_step()
                spent = time.perf_counter() - entered
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if logged:
                entered, steps = time.perf_counter(), steps + 1
                record = gauges.read(entered - began, 0.0, config.batch_tokens)
                monitor.log(steps, None, loss=loss, grad_norm=norm, **record)
                inside.append(spent + time.perf_counter() - entered)

        times = in_turns({"without": lambda: step(False), "with": lambda: step(True)}, config.rounds, setup.device)
        monitor.close()
    plain, own = statistics.median(times["without"]), statistics.fmean(inside[2:])
    more = ratio(times, "with", "without") - 1
    every = f"with log_every = {config.log_every}"
    setup.say(f"torch {torch.__version__}, {setup.world} x {setup.device.type}, {str(setup.dtype)[6:]}, "
              f"{setup.threads} threads; {n_params:,} parameters, {config.batch_tokens:,} tokens a step, "
              f"{config.rounds} rounds\n"
              f"step without gauges, median        {1000 * plain:9.1f} ms\n"
              f"a logged step to one that is not   {1 + more:9.4f}   {every}: {more / config.log_every:.3%}\n"
              f"in the gauges, mean, by the clock  {1000 * own:9.2f} ms, {every}: "
              f"{own / plain / config.log_every:.3%} of the time")
    parallel.finish(setup)


if __name__ == "__main__":
    main(configure(globals()))
