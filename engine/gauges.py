"""
What a training step looks like from outside: how far the weights move, memory, disk, network, GPU.

The gauges only look: no weight, gradient or random number is touched, so a run has the same bits with them as without.
What a machine does not tell (no /proc and no psutil, no GPU, no nvidia-ml-py) is left out of the record.
"""
import contextlib
import os
import re
import shutil
import socket
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist

from engine import parallel
from engine.layout import copies, local

# FLOP/s of one device in bf16 products, dense, by the name that torch has for it, from NVIDIA's data sheets (those give
# the rate with structured sparsity, which is twice this, for all but A100 and GeForce). The whole name must fit: a part
# or a slice of a GPU has another peak, and a figure from a wrong one is worse than none.
PEAKS = {
    r"NVIDIA A100(-SXM4|-PCIE|-PCIe)?[- ](40|80)GB( PCIe)?": 312e12,       # "A100 Tensor Core GPU", 2020
    r"NVIDIA H100 80GB HBM3": 989.4e12,                                    # "H100 Tensor Core GPU", 2022: SXM5
    r"NVIDIA H100 PCIe": 756e12,                                           # the same
    r"NVIDIA H100 NVL": 835e12,                                            # the same, edition of 2024
    r"NVIDIA H200": 989.4e12,                                              # "H200 Tensor Core GPU", 2023: SXM
    r"NVIDIA H200 NVL": 835e12,                                            # the same, edition of 2024
    r"NVIDIA L40S": 362e12,                                                # "L40S", 2023
    r"NVIDIA L4": 121e12,                                                  # "L4 Tensor Core GPU", 2023
    r"NVIDIA GeForce RTX 4090": 165.2e12,                                  # "Ada GPU Architecture", 2022, fp32 sums
    r"NVIDIA GeForce RTX 3090": 71e12,                                     # "GA102 GPU Architecture", 2020, fp32 sums
}
ALL_REDUCE_EVERY = 10           # logged steps between two samples of the network
ALL_REDUCE_BYTES = 16 * 2**20   # about a bucket of DDP's; less where the gradient is smaller


def flops_per_token(shape, n_params, separate_documents=False):
    """Floating point operations of forward and backward per token: 6 N + 12 L H D S.

    N: the parameters that are multiplied with, so without the lookup in the embedding (a tied one is the head as well,
    and counts). S: how many tokens one looks at on average, with a causal mask half the block, T/2; less with a sliding
    window; taken for 0 with separate_documents, since it depends on them. Recomputed activations are not counted (that
    would be "hardware FLOPs"). PaLM (arXiv 2204.02311, appendix B) has S = T, so up to 7 % more for Llama 2 7B."""
    n = n_params - (0 if shape.tie_embeddings else shape.vocab_size * shape.n_embd)
    window = min(shape.sliding_window or shape.block_size, shape.block_size)
    seen = 0 if separate_documents else window * (1 - window / (2 * shape.block_size))
    return 6 * n + 12 * shape.n_layer * shape.n_head * shape.head_dim * seen


def peak_of(device, dtype):
    """FLOP/s that one device can do, for products in bf16; None where it is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)


class Gauges:
    """Made on every rank and read on all alike, since some things are measured together; rank 0's reading is logged."""

    def __init__(self, run, model, optimizers, flops, config, setup):
        self.run, self.optimizers, self.flops, self.setup = run, optimizers, flops, setup
        self.weights = {name: p for name, p in parallel.bare(model).named_parameters() if p.requires_grad}
        self.sharded = setup.layout and not setup.layout.plain
        self.n_weights = sum(p.numel() for p in self.weights.values())    # of shards too: the whole
        self.stages = 1.0                                                # how much more all stages have than this one
        if self.sharded:
            own = torch.tensor(self.n_weights, dtype=torch.float64, device=setup.device)
            each = setup.world / setup.layout.pp                         # ranks of a stage
            self.stages = (parallel.all_sum(own, setup) / each / own).item()
        self.per_block, self.readings = config.log_blocks, 0
        self.peak = config.peak_flops or peak_of(setup.device, setup.dtype)
        self.nvml = _nvml(setup.device) if setup.is_main else None
        self.counted, self.when = _counters(self.nvml), time.perf_counter()
        self.own, self.marks = [], []        # seconds of this rank's own; when they begin and end
        if setup.world > 1:                  # alone, nobody is slower than another
            trunk = parallel.bare(model).model
            trunk.register_forward_pre_hook(partial(self._mark, False))
            trunk.register_forward_hook(partial(self._mark, True))
        known = f"{self.peak:.4g} FLOP/s" if self.peak else "unknown; --peak_flops names it"
        self.formula = (f"mfu         {flops:.3e} FLOPs a token (6 N + 12 L H D S, engine/gauges.py) x tokens/s / "
                        f"{setup.world} devices / the peak of one, {known}")

    def _mark(self, after, *_):
        """The trunk begins a forward pass (of the step's micro-batches the first is kept), or has ended one (the
        last)."""
        if torch.is_grad_enabled():                                  # evaluation is no part of it
            self.marks = [*self.marks[:1], _now(self.setup.device)] if after else self.marks or [_now(self.setup.device)]

    def step_done(self, waited):
        """Keeps how long this rank took for its own part of the step: `waited` for data, and computing from its first
        forward pass to the end of its last. Around that are collectives, in which the fast ranks wait for the slow."""
        if self.setup.world == 1:
            return
        first, last = self.marks
        if self.setup.device.type == "cuda":
            last.synchronize()
            waited += first.elapsed_time(last) / 1000
        else:
            waited += last - first
        self.own.append(waited)
        self.marks = []

    def pace(self):
        """The mean of these over the steps since the last reading, of the rank in the middle and of the slowest."""
        if not self.own:
            return {}
        mine, self.own = statistics.fmean(self.own), []
        seconds, hosts = zip(*parallel.from_all((mine, socket.gethostname()), self.setup))
        slowest = seconds.index(max(seconds))
        return {"rank_seconds": statistics.median_low(seconds), "slowest_seconds": seconds[slowest],
                "slowest": f"rank {slowest} on {hosts[slowest]}"}

    def before_step(self):
        """Keeps what the weights are, until `read`. On logged steps only: it takes the memory of the weights once more,
        where that of the activations is free again, and two passes over them."""
        self.before = {name: local(p).detach().clone() for name, p in self.weights.items()}

    def update_ratios(self):
        """How far the optimizer has moved the weights, relative to where they were: |w - w0| / |w0|, each the Euclidean
        norm over all trained parameters as one vector, w0 the weights before the step, so weight decay and the learning
        rate are in it. Healthy is about 1e-3 at the peak. log_blocks: the same for each block and what is outside."""
        squares = {}
        with torch.no_grad():
            norms = {name: (torch.linalg.vector_norm(old), torch.linalg.vector_norm(old.sub_(local(self.weights[name]))))
                     for name, old in self.before.items()}           # in place: no third copy
        self.before = None
        values = torch.stack([torch.stack(pair) for pair in norms.values()]).double().square()
        found = list(zip(norms, values.tolist()))
        if self.sharded:                # a rank has its part of the sum, as many others the same one
            mine = [(name, [value / copies(self.weights[name]) for value in pair]) for name, pair in found]
            found = [each for part in parallel.from_all(mine, self.setup) for each in part]
        for name, (old, moved) in found:
            for group in ("", re.search(r"layers\.\d+|$", name)[0] or name):
                was, by = squares.get(group, (0.0, 0.0))
                squares[group] = was + old, by + moved
        ratios = {group: (moved / old) ** 0.5 if old else None for group, (old, moved) in squares.items()}
        total = {"update_ratio": ratios.pop("")}
        return {**total, "update_ratio_blocks": ratios} if self.per_block else total

    def read(self, seconds, waited, tokens):
        """The gauges' part of a record. seconds: of this step, of them `waited` for data; tokens: of it, over all
        ranks. Waiting and memory are the largest of any rank. All ranks must call it."""
        self.readings += 1
        speed = tokens / seconds
        record = {"tokens_per_second": speed, "step_seconds": seconds, **self.update_ratios(), **self.all_reduce(), **self.pace(),
                  "mfu": self.flops * speed / self.setup.world / self.peak if self.peak else "unknown"}
        seen = parallel.from_all({"data_seconds": waited, **memory(self.setup.device)}, self.setup)
        record.update({name: max(each.get(name, 0) for each in seen) for name in seen[0]})
        if not self.setup.is_main:
            return record
        counted, now = _counters(self.nvml), time.perf_counter()
        # A counter that has begun again from 0 says nothing about the time between.
        record.update({f"{name}_bytes_per_second": (value - self.counted[name]) / (now - self.when)
                       for name, value in counted.items() if value >= self.counted.get(name, value + 1)})
        self.counted, self.when = counted, now
        light = sum(p.numel() * p.element_size() for p in self.weights.values()) * self.stages
        moments = sum(value.numel() * value.element_size() for optimizer in self.optimizers
                      for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)) * self.stages
        record["next_saves_bytes"] = round(2 * light + moments)
        with contextlib.suppress(OSError):                           # a folder that is gone the next save tells of
            record["disk_free_bytes"] = shutil.disk_usage(self.run).free
        if self.nvml:
            with contextlib.suppress(Exception):                     # as in _nvml
                library, handle = self.nvml
                record["gpu_utilisation"] = library.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        return record

    def all_reduce(self):
        """Time and bus bandwidth of an all-reduce, in every tenth reading; the median of three. Waiting for late ranks
        is not in it. Bandwidth: 2 (n-1)/n bytes / seconds, what each link must carry, as nccl-tests counts it."""
        world, device = self.setup.world, self.setup.device
        if world == 1 or (self.readings - 1) % ALL_REDUCE_EVERY:
            return {}
        buffer = torch.zeros(min(ALL_REDUCE_BYTES // 4, int(self.n_weights * self.stages)), device=device)
        seconds = time_all_reduce(buffer, self.setup)
        return {"all_reduce_seconds": seconds,
                "all_reduce_bytes_per_second": 2 * (world - 1) / world * 4 * buffer.numel() / seconds}


def time_all_reduce(buffer, setup):
    """Seconds of an all-reduce, the median of three; waiting for late ranks is not in it."""
    times = []
    for _ in range(3):
        parallel.barrier(setup)
        _wait(setup.device)
        began = time.perf_counter()
        dist.all_reduce(buffer)
        _wait(setup.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _now(device):
    """A mark in the work of this rank: a time, or on CUDA an event, since the CPU runs ahead."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device):
    """{name: bytes} of this process (resident, and how much of that is mapped files or shared), and what torch has of
    the GPU (in tensors, taken from the driver, most in tensors since the start)."""
    found = {}
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in file.read().split()[:3])
        found = {"rss_bytes": resident, "rss_file_bytes": shared}
    except OSError:                                                  # no /proc, as on a Mac
        with contextlib.suppress(ImportError):
            import psutil
            found = {"rss_bytes": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        found.update(gpu_memory_allocated_bytes=torch.cuda.memory_allocated(device),
                     gpu_memory_reserved_bytes=torch.cuda.memory_reserved(device),
                     gpu_memory_peak_bytes=torch.cuda.max_memory_allocated(device))
    return found


def _nvml(device):
    """(pynvml, its handle of this device), or None: whatever is missing there, the run goes on."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
        pynvml.nvmlInit()
        # Not by number: CUDA_VISIBLE_DEVICES numbers anew.
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:
        return None


# Fields of nvmlDeviceGetFieldValues: (number, scope, bytes in its unit). They are counters and cost nothing to read,
# where nvmlDeviceGetPcieThroughput stops the caller for 20 ms. NVLink: of all links together.
FIELDS = {"pcie_sent": (197, 0, 1), "pcie_received": (198, 0, 1),
          "nvlink_sent": (138, 0xFFFFFFFF, 1024), "nvlink_received": (139, 0xFFFFFFFF, 1024)}


def _counters(nvml):
    """{name: bytes since some start}: read from disks by this process (not what was in memory already), and over this
    GPU's PCIe and NVLink."""
    found = {}
    with contextlib.suppress(OSError):
        with open("/proc/self/io") as file:
            found["disk_read"] = int(re.search(r"^read_bytes: (\d+)", file.read(), re.MULTILINE)[1])
    if nvml:
        with contextlib.suppress(Exception):                         # as in _nvml
            library, handle = nvml
            values = library.nvmlDeviceGetFieldValues(handle, [(number, scope) for number, scope, _ in FIELDS.values()])
            found.update({name: value.value.ullVal * unit for (name, (_, _, unit)), value in zip(FIELDS.items(), values)
                          if value.nvmlReturn == 0})
    return found
