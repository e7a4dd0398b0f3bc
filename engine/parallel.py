"""
Where a run stands: rank, device, dtype, and what the ranks do together. The one place that decides device and dtype.

Started by `torchrun` it joins the process group (nccl on CUDA, gloo on CPU); started by `python` it is a world of one.
"""
import contextlib
import ctypes
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configurator import refuse
from engine.flash import attend_on_cpu


@dataclass
class Setup:
    rank: int
    local_rank: int
    world: int
    device: torch.device
    dtype: torch.dtype          # of the matrix products; weights and optimizer stay in fp32
    threads: int
    start: str = ""             # name of this start of the ranks, see open_store
    layout: "Layout" = None     # of the ranks, once it is known (layout.join); None: each has data of its own
    mesh: object = None

    @property
    def dp(self):
        """How many shares the data of a step are cut into: ranks of one share hold parts of one model."""
        return self.layout.dp if self.layout else self.world

    @property
    def dp_rank(self):
        return self.rank // self.layout.tp % self.layout.dp if self.layout else self.rank

    @property
    def stage(self):
        """Which of the layout's pp stages this rank is in."""
        return self.rank * self.layout.pp // self.world

    @property
    def is_main(self):
        return self.rank == 0

    def say(self, text):
        if self.is_main:
            print(text, flush=True)

    def autocast(self):
        """Matrix products in bf16 or fp16, where the run is in that; weights keep their fp32. FSDP's engine gives out
        weights in that dtype already."""
        if self.dtype == torch.float32 or self.layout and not self.layout.plain:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


@dataclass(frozen=True)
class Layout:
    """How the ranks divide the work: pp stages of layers, each on dp * tp ranks, in this order (neighbours in a row
    share matrices, so that the most talkative sit in one machine). dp = replicas * shards: the data are cut into dp
    shares; the states over the shards."""
    pp: int = 1
    replicas: int = 1
    shards: int = 1
    tp: int = 1
    zero: int = 3               # 1: the shards share the optimizer's states, 2: also gradients, 3: also weights
    offload: bool = False
    plain: bool = True          # DDP, or one process; False: FSDP2's engine, which the rest needs
    micro: int = 1              # sequences of a micro-batch
    n_micro: int = 1            # micro-batches of a rank in a step

    @property
    def dp(self):
        return self.replicas * self.shards

    @property
    def in_buckets(self):
        """Whether gradients are views into DDP's buckets. These stay, so gradients are zeroed between steps: freed,
        they would be made a second time beside them."""
        return self.plain and self.replicas > 1

    def __str__(self):
        if self.plain:
            return "each holds everything"
        states = f"ZeRO-{self.zero} over {self.shards}" + f" in {self.replicas} replicas" * (self.replicas > 1)
        return f"pp {self.pp} x dp {self.dp} x tp {self.tp}, {states}" + ", states on the CPU" * self.offload


def share(config, world, tp=1, pp=1):
    """The Layout of so many ranks that the keys parallel, zero, hsdp and cpu_offload ask for, and a sentence for each
    thing that does not fit. A pure function: no process group is needed."""
    found = config.below_one("hsdp")
    if config.parallel not in ("ddp", "fsdp"):
        found.append(f"parallel must be 'ddp' or 'fsdp', found '{config.parallel}'")
    if config.zero not in (1, 2, 3):
        found.append(f"zero must be 1, 2 or 3, found {config.zero}")
    if found:
        return Layout(), found
    sharded, dp = config.parallel == "fsdp", world // (tp * pp)
    found += [sentence for sentence, wrong in {
        f"hsdp = {config.hsdp} does not divide the {dp} ranks that share the data (processes / tp / pp)":
            dp % config.hsdp,
        **{f"{name} = {value} shards states over ranks: it needs parallel = 'fsdp'": not sharded for name, value in (
            ("zero", config.zero), ("hsdp", config.hsdp), ("cpu_offload", config.cpu_offload))
           if value != config.default(name)},
        f"cpu_offload needs several processes that share the states, found {world}": config.cpu_offload and world == 1,
    }.items() if wrong]
    plain = world == 1 or not sharded and tp == pp == 1
    replicas = config.hsdp if sharded else max(1, dp)
    return Layout(pp, replicas, dp // replicas, tp, config.zero, config.cpu_offload, plain), found


def divide(config, shape, world):
    """The Layout that train.py's keys ask for on so many ranks, as in `share`."""
    tp, pp = max(1, config.tp), max(1, config.pp)
    layout, found = share(config, world, tp, pp)
    found += config.below_one("tp", "pp") + [sentence for sentence, wrong in {
        f"{world} process(es) are no multiple of tp * pp = {tp} * {pp}": world % (tp * pp),
        **{f"{name} = {value} must be a multiple of tp = {tp}": value % tp for name, value in (
            ("n_head", shape.n_head), ("n_kv_head", shape.n_kv_head), ("n_inner", shape.n_inner),
            ("vocab_size", shape.vocab_size), ("block_size", config.block_size))},
        f"n_layer = {shape.n_layer} is less than pp = {pp} stages": shape.n_layer < pp,
        "tie_embeddings = True does not go with pp: the first stage embeds and the last one scores, with one matrix":
            pp > 1 and shape.tie_embeddings,
        "matrix_learning_rate (Muon) does not go with tp: it needs whole matrices":
            tp > 1 and config.matrix_learning_rate,
        "watch_nan looks into whole modules: it goes with neither tp nor pp": config.watch_nan and max(tp, pp) > 1,
        "watch_stats does not go with pp: a stage sees its own layers only": config.watch_stats and pp > 1,
        "tp does not go with adapters (adapter_size), which need a sublayer's whole output":
            tp > 1 and shape.adapter_size,
    }.items() if wrong]
    if found or config.below_one("block_size", "micro_batch_size", "batch_tokens"):
        return Layout(), found
    # A rank that has fewer sequences in a step than a micro-batch may hold takes them in one, in a pipeline in pp.
    dp = layout.dp
    micro = min(config.micro_batch_size, max(1, config.batch_tokens // (config.block_size * dp * pp)))
    unit = config.block_size * micro * dp
    if config.batch_tokens % unit:
        near = max(1, round(config.batch_tokens / unit)) * unit
        ranks = "processes" if dp == world else "processes / tp / pp"
        found.append(f"batch_tokens = {config.batch_tokens} is no multiple of block_size * micro_batch_size * {ranks} "
                     f"= {config.block_size} * {micro} * {dp} = {unit}; set batch_tokens = {near}, or a "
                     "micro_batch_size that divides")
    n_micro = config.batch_tokens // unit
    if n_micro < pp:
        found.append(f"{n_micro} micro-batches a step keep no pipeline of pp = {pp} stages busy: at least {pp} are "
                     f"needed, so batch_tokens = {unit * pp} or more")
    return replace(layout, micro=micro, n_micro=n_micro), found


def start(device="auto", dtype="auto", deterministic=None, threads=0, seed=0, patience=600.0):
    """Chooses device, dtype and threads, joins the other ranks, seeds everything; -> Setup.

    device: 'auto', 'cpu' or 'cuda'. dtype: 'auto' (bf16 where the machine multiplies it natively), 'bf16', 'fp16',
    'fp32'.
    deterministic: None = yes on CPU, where it costs about 4 %. threads: 0 = the cores divided by the
    processes of this machine.
    patience: seconds that the ranks wait for each other, at the start and in a collective."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    refuse(*(problem for problem, wrong in {
        f"device must be 'auto', 'cpu' or 'cuda', found '{device}'": device not in ("auto", "cpu", "cuda"),
        f"device = 'cuda', but this torch ({torch.__version__}) sees no CUDA device; use --device=cpu or install a "
        "CUDA build": device == "cuda" and not torch.cuda.is_available(),
        f"dtype must be 'auto', 'bf16', 'fp16' or 'fp32', found '{dtype}'":
            dtype not in ("auto", "bf16", "fp16", "fp32"),
        f"threads must be from 0 (all cores) to 1024, found {threads}": not 0 <= threads <= 1024,
        f"seed must be below 2**63 in size, found {seed}": abs(seed) >= 2 ** 63}.items() if wrong))
    cuda = device != "cpu" and torch.cuda.is_available()
    chosen = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    # torchrun sets OMP_NUM_THREADS=1 when nobody else did, which leaves most of a CPU idle; so the count is set here.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = threads or max(1, cores // local_world)
    torch.set_num_threads(threads)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        # TF32 only where a product is asked for in fp32: it keeps 10 bits of mantissa, and these runs promise fp32.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if chosen.type == "cpu" if deterministic is None else deterministic:
        # Without this, compiled bf16 on two threads gives other bits in every run, and a resume can not be proven
        # exact.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=chosen.type != "cpu")
        # It would also fill every new tensor with NaN, to show reads of memory never written: a cost at each step.
        torch.utils.deterministic.fill_uninitialized_memory = False
    name = connect(rank, world, chosen, patience) if world > 1 else ""
    torch.manual_seed(seed + rank)      # dropout differs between ranks; weights come from (seed, name), so they do not
    return Setup(rank, local_rank, world, chosen, dtype_named(dtype, chosen), threads, name)


def connect(rank, world, device, patience):
    """Makes the process group; -> the name of this start. Refuses when the ranks do not find each other in time."""
    address, port, me = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), socket.gethostname()
    # The flight recorder: when a collective waits too long each rank writes down what it was in;
    # torchfrtrace reads that.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    try:
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        name = _name_of_start(rank, world, patience) if restarts else ""
        # A little longer than engine/alive.py waits, which knows who is missing.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=open_store("group", name, patience),
                                rank=rank, world_size=world, timeout=timedelta(seconds=patience + 10))
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device))          # NCCL connects with the first one
            torch.cuda.synchronize(device)
        return name
    except (RuntimeError, OSError) as error:
        try:
            socket.create_connection((address, port), 3).close()
            found = (f"{address}:{port} answers, so ranks are missing there, or they can not reach each other over the "
                     "interface that was chosen (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)")
        except OSError as wrong:
            found = (f"{address}:{port} can not be reached from here: {wrong.strerror or wrong}. Is that the first "
                     "machine's name, does it run, with the same port, and is the port open in its firewall?")
        refuse(f"rank {rank} on {me} did not find the other {world - 1} within {patience:g} seconds: {found} (torch "
               f"says: {str(error).splitlines()[0]})")


def open_store(what, start, patience=600.0):
    """A connection to the store of the machine where the ranks meet, with keys for `what` in this start only."""
    ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and what == "group" and os.environ["RANK"] == "0"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=ours, multi_tenant=ours,
                          wait_for_workers=False, timeout=timedelta(seconds=patience))
    return dist.PrefixStore(f"{what} {start}", store)


def _name_of_start(rank, world, patience):
    """A name that this start of the ranks has to itself, the same on all of them.

    torchrun --max-restarts starts all ranks again with the same store, where what the ranks before them wrote still stands:
    gloo then calls dead processes (torch 2.13). No variable tells which start it is; the count of restarts is each
    machine's own. So rank 0 opens a door and writes its number into the store. That of an earlier start is closed."""
    store, deadline = open_store("door", "", patience), time.monotonic() + patience
    if rank == 0:
        with socket.create_server(("", 0), backlog=world) as door:
            name = f"{door.getsockname()[1]}-{os.getpid()}"
            store.set("door", name)
            for _ in range(world - 1):
                door.settimeout(max(0.1, deadline - time.monotonic()))
                with door.accept()[0] as visitor:
                    visitor.sendall(name.encode())
        return name
    while True:
        name = store.get("door").decode()
        try:
            with socket.create_connection((os.environ["MASTER_ADDR"], int(name.split("-")[0])), 10) as visit:
                if visit.makefile().read() == name:
                    return name
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def keep_memory(setup):
    """Memory that is freed stays with the process, for runs that ask for tensors of the same sizes in every step. glibc
    returns large blocks to the system at once, which hands them out again page by page, and zeroed: a tenth of
    a step on a CPU. Not for rows that differ in length: the kept pieces would not fit, and memory grow.
    Without glibc: nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt and setup.device.type == "cpu":
        mallopt(-3, 1 << 30)            # M_MMAP_THRESHOLD: below 1 GiB from the heap
        mallopt(-1, 2 ** 31 - 1)        # M_TRIM_THRESHOLD: the heap does not shrink


def dtype_named(name, device):
    """The dtype of that name. 'auto' is bf16 where the machine multiplies it natively: a CPU without AMX or AVX512-BF16
    emulates it and is several times slower than in fp32."""
    if name == "auto" and device.type == "cuda":
        name = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    elif name == "auto":
        has = lambda feature: getattr(torch.cpu, feature, lambda: False)()
        name = "bf16" if has("_is_amx_tile_supported") or has("_is_avx512_bf16_supported") else "fp32"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def all_sum(tensor, setup):
    """The sum of a tensor over all ranks, on all ranks."""
    if setup.world > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def data_sum(tensor, setup):
    """The sum over the shares of the data, on all ranks: where several ranks hold one model, one of them counts, the
    first of those with the head."""
    if setup.layout and (setup.rank % setup.layout.tp or setup.stage < setup.layout.pp - 1):
        tensor = torch.zeros_like(tensor)
    return all_sum(tensor, setup)


def on_all(true, setup):
    """Whether something is true on every rank."""
    return all_sum(torch.tensor(float(not true), device=setup.device), setup).item() == 0


def from_main(value, setup, group=None):
    """Rank 0's value (whatever can be pickled), on all ranks: what must be decided once is decided there."""
    if setup.world == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def from_all(value, setup):
    """[each rank's value], on all ranks."""
    if setup.world == 1:
        return [value]
    values = [None] * setup.world
    dist.all_gather_object(values, value)
    return values


def barrier(setup):
    if setup.world > 1:
        dist.barrier()


def refuse_once(setup, *problems):
    """refuse for what every rank finds alike: one of each machine says it, all of them end."""
    if problems and setup.local_rank:
        raise SystemExit(2)
    refuse(*problems)


def finish(setup):
    """The end of what the ranks do together. gloo's threads need Python's lock to let go of the last collective's
    tensors; a destructor that waits for these threads holds it, and both wait for ever (torch
    2.13). So they get a moment."""
    if setup.world > 1:
        barrier(setup)
        time.sleep(0.2)
        dist.destroy_process_group()


def wrap(model, setup):
    """DDP where there are several ranks. DDP averages gradients over ranks; the losses here are sums over the global
    step, so they are multiplied by the world size where they are formed (see train.py)."""
    if setup.world == 1:
        return model
    return DistributedDataParallel(model, device_ids=[setup.local_rank] if setup.device.type == "cuda" else None,
                                   gradient_as_bucket_view=True)


def bare(model):
    """The module itself, without DDP (or layout.Pipeline) around it: its names are those that are saved."""
    return getattr(model, "module", model)


def my_share(rows, size, setup):
    """This rank's rows of a global step, in slices of at most `size`."""
    mine = rows[setup.dp_rank::setup.dp]
    return [mine[i:i + size] for i in range(0, len(mine), size)]


def accumulate(micro_batches, *models):
    """The micro-batches of a step, one after the other. Gradients travel between the ranks with the last one only: DDP
    asks this attribute in the forward pass already (told later, it silently sends nothing)."""
    for i, micro_batch in enumerate(micro_batches):
        for model in models:
            model.require_backward_grad_sync = i == len(micro_batches) - 1
        yield micro_batch


def compile_blocks(model, setup, wanted, dynamic=None):
    """Compiles each block in place (parameter names stay as they are), and says in one line if it can not. All blocks
    have one shape, so one compilation serves them all; compiling the whole model instead takes n_layer times as long
    for a few percent. On a CPU torch.compile writes C++ and needs a compiler.

    dynamic=True where the batches' widths differ: otherwise the first width is compiled for itself, and all again."""
    if not wanted:
        return
    compilers = os.environ.get("CXX", "g++"), "g++", "clang++"
    if setup.device.type == "cpu" and not any(map(shutil.which, compilers)):
        setup.say("compile: no C++ compiler (g++) found; running without, which is slower and otherwise the same")
        return
    if setup.device.type == "cpu" and " " in torch.__file__:       # it gives the compiler this path without quotes
        setup.say(f"compile: torch can not compile where its path has a space ({Path(torch.__file__).parent}); running "
                  "without, which is slower and otherwise the same")
        return
    for block in model.model.layers.children():
        block.compile(dynamic=dynamic)
        if setup.device.type == "cpu" and dynamic is None:
            block.self_attn.attend = attend_on_cpu
    model.compiled, model.dynamic = True, dynamic       # see engine/loss.py
