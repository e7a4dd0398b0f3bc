"""
Before step 1: what would go wrong hours later, or would quietly make the run another one, is said now, all at once.

What can not work is a problem, and the run is refused with all of them. What only makes it slow or hard to understand
is a note. What the ranks tell of themselves is gathered once, so every rank comes to the same verdict.

With one process there is nothing to compare and nobody to reach: what is left takes a millisecond or two.
"""
import contextlib
import difflib
import fcntl
import hashlib
import mmap
import os
import platform
import re
import shutil
import socket
import struct
import time
from importlib import metadata
from pathlib import Path

import torch

from configurator import ROOT, git_commit
from engine import parallel
from engine.gauges import time_all_reduce
from engine.manifest import steps_of

TRIAL_BYTES = 2**28             # what is allocated on each GPU to see whether it can be
CLOCKS = 1.0                    # seconds that the machines' clocks may differ without a word
MAY_DIFFER = ("device", "threads")      # keys of the config, from rank to rank


def preflight(config, folder, prints, setup, numbers):
    """Looks at what a run in `folder` needs, on all ranks and machines, and prints what it found; refuses with every
    problem at once. prints: {what: hash} of the run's inputs; numbers: in a checkpoint, {'light': ..., 'full': ...}."""
    mine = facts_of(config, prints, setup)
    if not setup.local_rank:
        mine["problems"] += write_problems(folder)
    if setup.is_main:
        mine["problems"] += disk_problems(config, folder, numbers)
    parallel.barrier(setup)                                     # all look at their clocks at one time
    mine["clock"] = time.time()
    ranks = parallel.from_all(mine, setup)
    problems, notes = [problem for rank in ranks for problem in rank["problems"]], []
    setup.say(determinism(setup))
    if setup.world > 1:
        setup.say("topology    " + "\n            ".join(topology(ranks)))
        problems += differences(ranks, "values")
        notes += differences(ranks, "environment") + clock_notes(ranks)
        notes += environment_notes(os.environ) if setup.is_main else []
        seconds, wrong = measure(setup)
        problems += wrong
        told, slow = bandwidth(*seconds, setup.world, link(ranks))
        setup.say(f"all-reduce  {told}")
        notes += slow
    for note in notes:
        setup.say(f"note: {note}")
    parallel.refuse_once(setup, *problems)


# --- what each rank tells of itself ----------------------------------------------------------------------------------

def facts_of(config, prints, setup):
    """What a rank tells the others: `values` must be equal everywhere, `environment` should be."""
    facts = {"rank": setup.rank, "host": socket.gethostname(), "device": str(setup.device), "problems": []}
    if setup.device.type == "cuda":
        facts["device"] += f" ({torch.cuda.get_device_name(setup.device)})"
        facts["problems"] = allocation_problems(setup)
    if setup.world == 1:
        return facts
    name, address = interface()
    commit = git_commit()
    values = {"python": platform.python_version(), **{name: metadata.version(name) for name in ("torch", "numpy")},
              "cuda": torch.version.cuda, "code": code_hash(), "script": config.script, "config hash": config.hash,
              **({"commit": commit} if commit else {}),
              **{f"{what} (content)": found for what, found in prints.items()},
              **{key: value for key, value in config.items() if key not in MAY_DIFFER}}
    if setup.device.type == "cuda":
        values["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {**facts, "interface": f"{name} ({address})", "nic": network_rate(name), "values": values,
            "environment": {key: value for key, value in os.environ.items() if key.startswith(FAMILIES)}}


def code_hash():
    """8 hex digits over this repository's programs: a copy on one machine that was edited there has the same commit."""
    files = sorted(path for folder in (ROOT, ROOT / "engine", ROOT / "techniques") for path in folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def allocation_problems(setup):
    """Takes memory of the GPU and writes into it: that a GPU is listed does not say that it can be used."""
    try:
        torch.empty(TRIAL_BYTES, dtype=torch.uint8, device=setup.device).fill_(1)
        torch.cuda.synchronize(setup.device)
        torch.cuda.empty_cache()
        return []
    except RuntimeError as error:                               # out of memory is one
        return [f"rank {setup.rank} on {socket.gethostname()}: {setup.device} can not give {TRIAL_BYTES:,} bytes ("
                f"{str(error).splitlines()[0]}). nvidia-smi shows who uses it; leave it out with CUDA_VISIBLE_DEVICES, "
                "or choose another machine"]


def interface():
    """(name, address) of the network interface over which this machine reaches the place where the ranks meet. NCCL and
    gloo choose their own for the data, unless NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME says which."""
    try:
        where = socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM)[0]
        with socket.socket(where[0], socket.SOCK_DGRAM) as probe:
            probe.connect(where[4])                             # sends nothing: only asks which way it would go
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):              # Linux, SIOCGIFADDR: the interface's IPv4 address
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))
                    if socket.inet_ntoa(answer[20:24]) == address:
                        return name, address
            return ("lo" if address in ("127.0.0.1", "::1") else "unknown"), address
    except (OSError, KeyError):
        return "unknown", "unknown"


def network_rate(name, root=Path("/sys/class")):
    """Bytes per second of all InfiniBand and RoCE ports of this machine together, else of the interface; 0: unknown."""
    rates = []
    for file in root.glob("infiniband/*/ports/*/rate"):         # "400 Gb/sec (4X NDR)"
        with contextlib.suppress(OSError, ValueError):
            rates.append(float(file.read_text().split()[0]) * 1e9 / 8)
    with contextlib.suppress(OSError, ValueError):              # megabits; -1 where it has none
        rates = rates or [max(0, int((root / "net" / name / "speed").read_text())) * 1e6 / 8]
    return sum(rates)


# --- the disk --------------------------------------------------------------------------------------------------------

def write_problems(folder):
    """Makes, renames and removes a file in `folder`: what every checkpoint needs, and a network disk may not let
    one."""
    trial = folder / f".trial-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(bytes(1000))
        renamed = trial.rename(trial.with_suffix(".renamed"))
        size = renamed.stat().st_size
        renamed.unlink()
        return [] if size == 1000 else [f"{folder}: a file of 1000 bytes has {size} after it was renamed"]
    except OSError as error:
        return [f"cannot write into {folder} on {socket.gethostname()}, or not rename there ({error.strerror}); mend "
                "its permissions, or choose another --out_dir"]


def kept_at_once(config):
    """{kind: how many checkpoints there are at once}: those that are kept, and the next one, which is whole before an
    older one goes. That is 3 with keep=2 (or 0, all). A kind without an interval is written once, at the end."""
    count = (getattr(config, "keep", 1) or 2) + 1
    return {"light": count + getattr(config, "keep_best", 0) if getattr(config, "save_light", 0) else 1,
            "full": count if getattr(config, "save_full", 0) else 1}


def disk_problems(config, folder, numbers):
    """Room for the checkpoints of a run. numbers: {kind: how many numbers of 4 bytes one has}. Those that are there
    count, but for the next one's place."""
    there = {kind: min(count - 1, len(steps_of(folder, kind))) for kind, count in kept_at_once(config).items()}
    more = {kind: count - there[kind] for kind, count in kept_at_once(config).items()}
    needed = sum(4 * numbers[kind] * count for kind, count in more.items())
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents, Path.cwd()) if path.exists())).free
    return [] if free >= needed else [
        f"{folder}: {free:,} bytes are free, and {needed:,} more are needed: " + " and ".join(
            f"{count} {kind} checkpoint(s) of {4 * numbers[kind]:,}" for kind, count in more.items())
        + "; make room, keep fewer (--keep), or choose another --out_dir"]


# --- what the ranks tell, compared -----------------------------------------------------------------------------------

def spans(numbers):
    """'0-3, 8' of [0, 1, 2, 3, 8]."""
    parts = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in parts)


def grouped(ranks, key):
    """{key(rank): 'rank 3' or 'ranks 0-2'}, in the order of the ranks."""
    groups = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank["rank"])
    return {found: f"rank{'s' * (len(numbers) > 1)} {spans(numbers)}" for found, numbers in groups.items()}


def topology(ranks):
    """A line for each machine: its ranks, their devices, the interface."""
    lines = []
    for host, who in grouped(ranks, lambda rank: rank["host"]).items():
        there = [rank for rank in ranks if rank["host"] == host]
        devices = list(dict.fromkeys(rank["device"] for rank in there))
        interfaces = ", ".join(grouped(there, lambda rank: rank["interface"]))
        lines.append(f"{host}: {who} on {', '.join(devices)}; over {interfaces}")
    return lines


def differences(ranks, what):
    """A sentence for each thing of ranks[...][what] that some ranks have otherwise than rank 0, with who and what."""
    told, first = [], ranks[0]
    for name in dict.fromkeys(name for rank in ranks for name in rank[what]):
        of = lambda rank: rank[what].get(name, "nothing")
        others = [rank for rank in ranks if of(rank) != of(first)]
        for (host, value), who in grouped(others, lambda rank: (rank["host"], repr(of(rank)))).items():
            told.append(f"{who} on {host}: {name} = {value}, but rank 0 on {first['host']} has {of(first)!r}; every "
                        "rank needs the same command, code, packages and data")
    return told


def clock_notes(ranks):
    """Machines whose clocks differ. Nothing is computed from the time of day, but logs and what is newest on a disk are
    read by it."""
    ahead = {rank["host"]: rank["clock"] - ranks[0]["clock"] for rank in ranks}
    return [f"the clock of {host} is {abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} that of {ranks[0]['host']}; "
            "chrony or ntpd sets it" for host, by in ahead.items() if abs(by) > CLOCKS]


def determinism(setup):
    """The switch, and what it guarantees."""
    if torch.are_deterministic_algorithms_enabled():
        without = "is refused" if setup.device.type == "cpu" else "is warned of"
        return ("determinism on: another run on the same build, devices, threads and number of processes has the same "
                f"bits; an operation that can not give them {without}")
    return "determinism off: another run may round otherwise; --deterministic=True gives it the same bits, for some speed"


# --- variables of the environment ------------------------------------------------------------------------------------

FAMILIES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "TORCH_GLOO_")
RENAMED = {
    **{f"NCCL_{name}": f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG",
                                                          "ENABLE_TIMING", "AVOID_RECORD_STREAMS")},
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE", "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL", "NCCL_LL_THRESHOLD": "NCCL_PROTO", "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS", "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS"}
HARMFUL = {
    "NCCL_IB_DISABLE=1": "gives up InfiniBand and RoCE for TCP: a way to find a fault, no setting to keep",
    "NCCL_P2P_DISABLE=1": "takes the GPUs of a machine off NVLink: a way to find a fault, no setting to keep",
    "NCCL_SHM_DISABLE=1": "sends through the network what could stay in one machine's memory",
    "NCCL_DEBUG=TRACE": "writes a line for every call; INFO tells the choice of networks once",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING=0": "lets the others wait for ever for a rank that died",
    "TORCH_NCCL_BLOCKING_WAIT=1": "holds the CPU in every collective, so that it can not run ahead of the GPU",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "checks every collective with another one: a way to find a fault, slow",
    "CUDA_LAUNCH_BLOCKING=1": "waits for every kernel: a way to find a fault, several times slower"}
# NCCL_VERSION says what an image holds, and switches nothing.
USUAL = {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_DUMP_ON_TIMEOUT",
         "NCCL_VERSION", *RENAMED.values(), *(setting.partition("=")[0] for setting in HARMFUL)}


def environment_notes(environment):
    """A sentence for each variable that torch or NCCL would not know, knows by another name, or that does harm."""
    notes = [f"{setting} {why}; unset it" for setting, why in HARMFUL.items()
             if environment.get(setting.partition("=")[0], "").upper() == setting.partition("=")[2]]
    names = sorted(name for name in environment if name.startswith(FAMILIES))
    known = names_in_libraries() if set(names) - USUAL - set(RENAMED) else USUAL
    for name in names:
        if name in RENAMED:
            notes.append(f"{name} is an old name: {RENAMED[name]} is what torch and NCCL read now")
        elif name not in known:
            close = difflib.get_close_matches(name, sorted(known), 1, 0.6)
            notes.append(f"{name} is no variable of torch or NCCL as they are installed, so it does nothing"
                         + (f"; the nearest is {close[0]}" if close else ""))
    return notes


def names_in_libraries():
    """The variables that the installed torch and NCCL know: there are hundreds, and each version has others."""
    site, found = Path(torch.__file__).parent, set(USUAL)
    for file in (*site.glob("lib/libtorch_c*.so"), *site.parent.glob("nvidia/*/lib/libnccl.so.2")):
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found.update(name.decode() for name in re.findall(
                rb"\b(?:NCCL|TORCH_NCCL|TORCH_FR|GLOO|TORCH_GLOO)_[A-Z0-9_]+(?=\0)", content))
    return found


# --- the network -----------------------------------------------------------------------------------------------------

# Bytes per second of one direction between one GPU and all others of its machine, from NVIDIA's data sheets (these give
# both directions together, twice this). The whole name must fit.
LINKS = {r"NVIDIA A100-SXM.*": 300e9, r"NVIDIA H100 80GB HBM3": 450e9, r"NVIDIA H200": 450e9}


def measure(setup):
    """((seconds, bytes) of an all-reduce, problems): first one whose sum is known, which also sets up the
    connections."""
    known = torch.full((4,), setup.rank + 1.0, device=setup.device)
    found, expected = parallel.all_sum(known, setup).tolist(), setup.world * (setup.world + 1) / 2
    wrong = [f"the sum of 1 to {setup.world} over the ranks came out as {found[0]:g}, and is {expected:g}: the network "
             "or its library is broken, and gradients would be too; try NCCL_DEBUG=INFO"] if set(found) != {expected} else []
    buffer = torch.zeros(2**24 if setup.device.type == "cuda" else 2**20, device=setup.device)
    return (time_all_reduce(buffer, setup), 4 * buffer.numel()), wrong


def link(ranks):
    """(bytes per second that the slowest link should give an all-reduce, what that assumes), or None: unknown."""
    names = [re.search(r"\((.*)\)$", rank["device"]) for rank in ranks]
    within = [next((rate for pattern, rate in LINKS.items() if name and re.fullmatch(pattern, name[1])), 0)
              for name in names]
    found = [(min(within), "NVLink's data sheet")]
    if len({rank["host"] for rank in ranks}) > 1:
        found.append((min(rank["nic"] for rank in ranks), "all network ports of a machine together"))
    return min(found) if all(names) and min(found)[0] else None


def bandwidth(seconds, size, world, expected):
    """(what is printed, notes) of an all-reduce of `size` bytes; counted as nccl-tests does, 2
    (n-1)/n bytes / seconds."""
    rate = 2 * (world - 1) / world * size / seconds
    told = f"{size / 2**20:.0f} MiB in {1000 * seconds:.2f} ms, {rate / 1e9:.2f} GB/s on each link"
    if expected is None:
        return told, []
    share = rate / expected[0]
    told += f", {share:.0%} of {expected[0] / 1e9:.0f} ({expected[1]})"
    return told, [f"the all-reduce reaches {share:.0%} of what the link should give; NCCL_DEBUG=INFO tells which way "
                  "it takes, nvidia-smi topo -m which there are"] if share < 0.5 else []


# --- the batch -------------------------------------------------------------------------------------------------------

def refuse_other_batch(micro_batches, designed, setup):
    """Counts what all ranks have really read for their first step and says it by its factors; refuses when that is not
    `designed`, the tokens of a step. micro_batches: this rank's, [(inputs (B, T), ...), ...]."""
    share = getattr(setup, "dp_rank", setup.rank)               # ranks that hold parts of one model read the same
    shares = dict(parallel.from_all((share, [tuple(x.shape) for x, *_ in micro_batches]), setup))
    total, some = sum(rows * tokens for shapes in shares.values() for rows, tokens in shapes), shares[0]
    if some and all(shapes == some[:1] * len(some) for shapes in shares.values()):
        factors = f"{len(shares)} processes x {len(some)} micro-batches x {some[0][0]} x {some[0][1]}"
    else:
        factors = "; ".join(f"rank {rank}: " + (" + ".join(f"{rows} x {tokens}" for rows, tokens in shapes) or "nothing")
                            for rank, shapes in sorted(shares.items()))
    setup.say(f"read        {total:,} tokens in the first step: {factors}")
    if total != designed:
        parallel.refuse_once(setup, f"a step is designed to have batch_tokens = {designed} tokens, and the ranks have "
                             f"read {total} ({factors}): the data are not shared out as they should be")
