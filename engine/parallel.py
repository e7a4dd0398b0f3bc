"""
Where a run stands: rank, device, dtype, and what the ranks do together. The one place that decides device and dtype.

Started by `torchrun` it joins the process group (nccl on CUDA, gloo on CPU); started by `python` it is a world of one.
"""
import contextlib
import os
import random
import shutil
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configurator import refuse


@dataclass
class Setup:
    rank: int
    local_rank: int
    world: int
    device: torch.device
    dtype: torch.dtype          # of the matrix products; weights and optimizer stay in fp32
    threads: int

    @property
    def is_main(self):
        return self.rank == 0

    def say(self, text):
        if self.is_main:
            print(text, flush=True)

    def autocast(self):
        """Matrix products in bf16, where the run is in bf16; weights keep their fp32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def start(device="auto", dtype="auto", deterministic=None, threads=0, seed=0):
    """Chooses device, dtype and threads, joins the other ranks, seeds everything; -> Setup.

    device: 'auto', 'cpu', 'cuda', 'mps'. dtype: 'auto' (bf16 where the machine multiplies it natively), 'bf16', 'fp32'.
    deterministic: None = yes on CPU, where it costs about 4 %. threads: 0 = the cores divided by the processes of this machine."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    chosen = _device(device, local_rank)
    # torchrun sets OMP_NUM_THREADS=1 when nobody else did, which leaves most of a CPU idle; so the count is set here.
    threads = threads or max(1, len(_cores()) // local_world)
    torch.set_num_threads(threads)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        # TF32 only where a product is asked for in fp32: it keeps 10 bits of mantissa, and these runs promise fp32.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if chosen.type == "cpu" if deterministic is None else deterministic:
        # Without this, compiled bf16 on two threads gives other bits in every run, and a resume can not be proven exact.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=chosen.type != "cpu")
        # It would also fill every new tensor with NaN, to show reads of memory never written: a cost at each step.
        torch.utils.deterministic.fill_uninitialized_memory = False
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    for seed_it in (random.seed, np.random.seed, torch.manual_seed):
        seed_it(seed + rank)        # dropout differs between ranks; weights come from (seed, name), so they do not
    return Setup(rank, local_rank, world, chosen, _dtype(dtype, chosen), threads)


def _cores():
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _device(name, local_rank):
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            refuse(f"device = '{name}', but this torch ({torch.__version__}) sees no CUDA device; use --device=cpu or install a CUDA build")
        return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)
    if name == "mps" and not torch.backends.mps.is_available():
        refuse("device = 'mps', but this machine has no Metal device; use --device=cpu")
    if name not in ("cpu", "mps"):
        refuse(f"device must be 'auto', 'cpu', 'cuda' or 'mps', found '{name}'")
    return torch.device(name)


def _dtype(name, device):
    if name == "auto":
        name = "bf16" if _native_bf16(device) else "fp32"
    if name not in ("bf16", "fp32"):
        refuse(f"dtype must be 'auto', 'bf16' or 'fp32', found '{name}'")
    return torch.bfloat16 if name == "bf16" else torch.float32


def _native_bf16(device):
    """Whether bf16 is faster than fp32 here. A CPU without AMX or AVX512-BF16 emulates it and is several times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    has = lambda name: getattr(torch.cpu, name, lambda: False)()
    return has("_is_amx_tile_supported") or has("_is_avx512_bf16_supported")


def all_sum(tensor, setup):
    """The sum of a tensor over all ranks, on all ranks."""
    if setup.world > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def from_main(value, setup):
    """Rank 0's value (any JSON-like object), on all ranks: what must be decided once is decided there."""
    if setup.world == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier(setup):
    if setup.world > 1:
        dist.barrier()


def finish(setup):
    if setup.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


def wrap(model, setup):
    """DDP where there are several ranks. DDP averages gradients over ranks; the losses here are sums over the global step,
    so they are multiplied by the world size where they are formed (see train.py)."""
    if setup.world == 1:
        return model
    return DistributedDataParallel(model, device_ids=[setup.local_rank] if setup.device.type == "cuda" else None)


def bare(model):
    """The module itself, without DDP around it: its names are those that are saved."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def accumulating(model, last):
    """Gradients travel between the ranks once per step, with the last micro-batch; entered before the forward pass, since
    that is where DDP decides (decided later, it silently sends nothing)."""
    return contextlib.nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()


def compiler(setup, wanted):
    """Whether torch.compile can be used; says in one line why not. On CPU it writes C++ and needs a compiler."""
    if not wanted:
        return False
    if setup.device.type == "mps":
        setup.say("compile: not on this device; running without")
        return False
    if setup.device.type == "cpu" and not any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        setup.say("compile: no C++ compiler (g++) found; running without, which is slower and otherwise the same")
        return False
    if sys.version_info >= (3, 15):
        setup.say("compile: not yet for this Python; running without")
        return False
    return True


def compile_blocks(model, setup, wanted):
    """Compiles each block in place (parameter names stay as they are). All blocks have one shape, so one compilation
    serves them all; compiling the whole model instead takes n_layer times as long for a few percent."""
    if compiler(setup, wanted):
        for block in model.model.layers:
            block.compile()
