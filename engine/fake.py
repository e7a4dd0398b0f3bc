"""
A step of training without numbers, machines or memory: what each rank of a large world would hold, counted.

train.py's own step, laid out over a world that is only imagined, runs on tensors that have a shape and no
content, and every one of them is counted while it lives. Eager and with a CPU's kernels, which keep what flash
attention keeps on CUDA; compiled blocks keep less. All that is used of PyTorch's private parts stands here, since
it may move with any release.
"""
import contextlib
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from configurator import refuse
from engine.layout import join, spread, wrapped
from engine.memory import STATES, dtype_of, waiting
from engine.optim import optimizers_of
from engine.parallel import Setup
from model import Llama

USED = ("_track", "_track_module_params_and_buffers", "_update_peak_stats", "_pre_fw_hook", "_post_fw_hook", "_pre_bw_hook",
        "_post_bw_hook", "_ref_class", "_curr_mem_snap", "_mod_tracker")
try:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
    from torch.testing._internal.distributed.fake_pg import FakeStore
    MOVED = ", ".join(f"MemTracker.{name}" for name in USED if not hasattr(MemTracker(), name))
except (ImportError, AttributeError) as error:
    MemTracker, MOVED = object, str(error)
GATHERS, LOGITS = "gathers", "logits"


@contextlib.contextmanager
def fake_world(size, rank=0):
    """In it this process is `rank` of a world of `size`, whose collectives do nothing and give anything."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        with contextlib.suppress(ImportError):      # DTensors remember groups by name, and those of the next world differ
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache
            _clear_sharding_prop_cache()


def answer_for_neighbours(schedule):
    """A pipeline's stages first ask each other whether they know the shapes of what they send; imagined ones say
    nothing, so here each is told that all do."""
    if hasattr(schedule, "_warmup_p2p"):
        from torch.distributed.pipelining.stage import InferenceMode
        schedule._warmup_p2p = lambda stages, *_: [setattr(stage, "_inference_mode", InferenceMode.STATIC) for stage in stages]


class Tracker(MemTracker):
    """Bytes of tensors by kind, and how they stood when they were most, in each `moment` that the caller names.

    MemTracker tells weights, gradients, the optimizer's state, activations and their gradients apart. Here also what is
    made in the moment 'loss', and what travels: FSDP's buffers are flat, activations of a Llama never are.
    flat_above: numbers from which on a flat tensor is such a buffer."""

    def __init__(self, flat_above):
        super().__init__()
        self._ref_class = [*_MemRefType, GATHERS, LOGITS]
        self.flat_above, self.moment, self.peaks = flat_above, "start", {}

    @property
    def in_backward(self):
        return self._mod_tracker.is_bw

    def by_name(self, bytes_of=None):
        """{name of a kind: bytes}: of what lives now, or of one of `peaks`."""
        bytes_of = bytes_of or next(iter(self._curr_mem_snap.values()), {})
        return {getattr(kind, "value", kind).lower(): count for kind, count in bytes_of.items()}

    def _track(self, kind, tensor):
        if kind in (_MemRefType.ACT, _MemRefType.TEMP):
            if tensor.dim() == 1 and tensor.numel() > self.flat_above:
                kind = GATHERS
            elif self.moment == "loss":
                kind = LOGITS
        super()._track(kind, tensor)

    def _update_peak_stats(self, state):
        for now in self._curr_mem_snap.values():
            if now["Total"] > self.peaks.get(self.moment, {"Total": -1})["Total"]:
                self.peaks[self.moment] = dict(now)

    # What MemTracker does for each module besides takes a third of the time, and does not go with 1F1B.
    def _pre_fw_hook(self, module, inputs):
        self._track_module_params_and_buffers(module)

    _post_fw_hook = _pre_bw_hook = _post_bw_hook = lambda *_: None


def measure(config, shape, layout, step, rank=0):
    """Bytes on one rank in a step: (at rest {state: bytes}, {moment: {component: bytes}} at the fullest of each
    moment).

    step(config, model, micro_batches, setup): forward and backward. Moments: ('forward', layer), 'loss', ('backward',
    layer), 'optimizer'. Two micro-batches are run (with stages one more than these), since from the second on there are
    gradients beside the activations."""
    refuse(*[f"this torch ({torch.__version__}) keeps elsewhere what the plan needs ({MOVED}). It was tested with "
             "torch 2.13; all private names that it uses stand at the top of engine/fake.py"] * bool(MOVED))
    world = layout.pp * layout.dp * layout.tp
    setup = Setup(rank, 0, world, torch.device("cpu"), dtype_of(config), 1)
    with fake_world(world, rank):
        setup = join(setup, replace(layout, offload=False))       # meshes compute, so they are made outside of the fake
        if layout.tp > 1:       # what DTensors work out the first time, on shapes of the whole, is no memory: so once before
            run_counted(config, replace(shape, n_layer=layout.pp), setup, step)
        return run_counted(config, shape, setup, step)


def run_counted(config, shape, setup, step):
    layout, count = setup.layout, min(setup.layout.n_micro, setup.layout.pp + 1)
    with torch.device("meta"):
        model = Llama(shape)
    if not layout.plain:
        spread(model, setup)
    with FakeTensorMode(allow_non_fake_inputs=True):              # no memory, no numbers; meshes must be made outside of it
        model.to_empty(device="cpu")
        optimizers = optimizers_of(model, 1e-3, config.matrix_learning_rate, config.weight_decay)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group.update(fused=False, foreach=False)              # lists of tensors are counted wrong
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for optimizer in optimizers:                              # its state is there from the first step on
            optimizer.step()
            optimizer.zero_grad(set_to_none=not layout.in_buckets)
        batch = lambda dtype: torch.zeros(layout.micro, config.block_size, dtype=dtype)
        micro_batches = [(batch(torch.int64), batch(torch.int64), batch(torch.float32)) for _ in range(count)]
        outer = model if layout.plain else wrapped(model, setup)  # DDP needs numbers; its buckets are the gradients
        if layout.pp > 1:
            answer_for_neighbours(outer.schedule(count, layout.micro, config.block_size, True))
        tracker = Tracker(flat_above=2 * layout.micro * config.block_size)
        tracker.track_external(model, *optimizers)
        weights, rests = tracker.by_name()["parameter"], []
        mark_moments(model, tracker, rests)
        with tracker:
            step(config, outer, micro_batches, setup)
            now = tracker.by_name()
    # ZeRO-1's whole gradients, not yet reduced: in bf16 sums of its engine's own, in fp32 the parameters' gradients.
    second = rests[-1] if count > 1 == layout.pp else {}
    held = second.get("temp", 0)
    moments = {moment: components(tracker.by_name(peak), weights, held) for moment, peak in tracker.peaks.items()}
    unseen = (layout.n_micro - count) * waiting(config, shape, layout, setup.stage)
    for parts in moments.values():
        parts["activations"] += unseen
    rest = components(now, weights, 0)
    # Each logged step keeps a copy of the weights beside the states (Gauges.before_step).
    moments["optimizer"] = {**rest, "activations": 0, "gathers": weights}
    gradients = max(rest["gradients"], held, second.get("gradient", 0))
    return {**{name: rest[name] for name in STATES}, "gradients": gradients}, moments


def mark_moments(model, tracker, rests):
    """Tells the tracker where the step is; what lives at the begin of each forward pass is added to rests."""
    blocks = list(model.model.layers.children())

    def enter(i, *_):
        if not tracker.in_backward:                               # else the block is computed anew
            tracker.moment = ("forward", i)

    def leave(i, module, args, out):
        if not tracker.in_backward:
            out.register_hook(lambda gradient: setattr(tracker, "moment", ("backward", i)))
            tracker.moment = "loss" if i == len(blocks) - 1 else tracker.moment
    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(enter, i))
        block.register_forward_hook(partial(leave, i))
    model.model.register_forward_pre_hook(lambda *_: rests.append(tracker.by_name()))


def components(kinds, weights, held):
    """The tracker's kinds as COMPONENTS. weights: of this rank at rest; what are more of them has been gathered."""
    gathers = kinds.get(GATHERS, 0) + kinds["parameter"] - weights
    rest = kinds["total"] - kinds["parameter"] - kinds["gradient"] - kinds["optstate"] - kinds.get(GATHERS, 0) \
        - kinds.get(LOGITS, 0)
    held = min(held, rest)
    return {"weights": weights, "gradients": kinds["gradient"] + held, "optimizer": kinds["optstate"],
            "activations": rest - held, "logits": kinds.get(LOGITS, 0), "gathers": gathers}


def measure_deep(config, shape, layout, step, rank=0):
    """`measure` from two models of 3 and 4 layers (of a stage): from layer to layer everything grows evenly, so what
    lies between the first two layers and the last two is not needed."""
    if shape.n_layer <= 4 * layout.pp or shape.n_layer % layout.pp:
        return measure(config, shape, layout, step, rank)
    few, more = (measure(config, replace(shape, n_layer=n * layout.pp), layout, step, rank) for n in (3, 4))
    further = shape.n_layer // layout.pp - 3
    extend = lambda small, large: {name: small[name] + further * (large[name] - small[name]) for name in small}
    pairs = {moment: (few[1][moment], more[1][moment]) for moment in few[1] if isinstance(moment, str)}
    pairs |= {(phase, i): (few[1][phase, i % 3], more[1][phase, i % 4])
              for phase in ("forward", "backward") for i in (0, 1, -2, -1)}
    return extend(few[0], more[0]), {moment: extend(*pair) for moment, pair in pairs.items()}
