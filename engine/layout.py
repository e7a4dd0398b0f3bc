"""
Models that several ranks hold together: train.py's `parallel`, `zero`, `hsdp`, `tp`, `pp`, `cpu_offload`.

The engines are PyTorch's: DDP, FSDP2 (fully_shard), tensor parallel on DTensors, pipelining with the 1F1B schedule, all
over one mesh. Which ranks do what is parallel.Layout; here it is done, on CPUs with gloo too, so that every layout can
be compared with one process (tests/test_parallel.py).
"""
import math
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel,
                                               SequenceParallel, parallelize_module)

from engine.parallel import bare, compile_blocks, from_all, wrap

# Nothing here changes a model's output in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def join(setup, layout):
    """The Setup with its layout and the mesh (pp, replica, shard, tp) of all ranks."""
    if layout.plain:
        return replace(setup, layout=layout)
    sizes = (layout.pp, layout.replicas, layout.shards, layout.tp)
    mesh = init_device_mesh(setup.device.type, sizes, mesh_dim_names=("pp", "replica", "shard", "tp"))
    return replace(setup, layout=layout, mesh=mesh)


def build(make, setup, seed, compiled=False, dynamic=None, fill=None):
    """The model that make() gives, laid out over the ranks and filled from the seed, or by fill(model): the same bits
    for every layout. No rank ever holds more of it than its part and one whole parameter. dynamic: compile_blocks's."""
    fill = fill or (lambda model: model.init_weights(seed, put))
    if setup.layout.plain:
        model = make()
        fill(model)
        compile_blocks(model.to(setup.device), setup, compiled, dynamic)
        return model
    with torch.device("meta"):
        model = make()
    spread(model, setup, compiled, dynamic)
    model.to_empty(device="cpu" if setup.layout.offload else setup.device)
    fill(model)
    return model


def spread(model, setup, compiled=False, dynamic=None):
    """Lays out a model, which may be on the meta device, in place: stages, then matrices, then torch.compile, then
    states. Each step needs the one before."""
    layout, mesh = setup.layout, setup.mesh
    if layout.pp > 1:
        keep_stage(model, setup.stage, layout.pp)
    if layout.tp > 1:
        split_matrices(model, mesh["tp"])
    compile_blocks(model, setup, compiled, dynamic)
    narrow = None if setup.dtype == torch.float32 else setup.dtype
    # Weights travel and multiply in bf16, gradients are summed in fp32. Inputs are not cast: RoPE's angles need fp32.
    settings = dict(mesh=mesh["replica", "shard"] if layout.replicas > 1 else mesh["shard"],
                    mp_policy=MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False))
    if layout.offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=setup.device.type == "cuda")
    for block in model.model.layers.children():
        fully_shard(block, reshard_after_forward=layout.zero == 3, **settings)
    fully_shard(model, reshard_after_forward=False, **settings)       # embedding and head: needed at both ends
    model.zero = layout.zero


def keep_stage(model, stage, stages):
    """Leaves of a Llama the layers of one stage, as even as they go, the first stages having one more; the embedding
    with the first of them, norm and heads with the last. Names stay."""
    trunk, count = model.model, len(model.model.layers)
    ends = [i * (count // stages) + min(i, count % stages) for i in (stage, stage + 1)]
    trunk.layers = nn.ModuleDict({str(i): trunk.layers[i] for i in range(*ends)})
    if stage > 0:
        trunk.embed_tokens = None
    if stage < stages - 1:
        trunk.norm = model.lm_head = None
        model.future_heads = nn.ModuleList()


def split_matrices(model, mesh):
    """Tensor parallel: a rank has some heads and a part of the MLP's width, so each sublayer ends in a sum over
    the ranks (Shoeybi et al. 2019, arXiv 1909.08053). Between sublayers each rank has a part of the tokens
    (sequence parallel, Korthikanti et al. 2022, 2205.05198): norms and dropout are not done tp times. The
    heads' logits are gathered."""
    trunk, by_token = model.model, Shard(1)
    row = lambda: RowwiseParallel(output_layouts=by_token)
    gathered = lambda n: PrepareModuleInput(input_layouts=(by_token,) + (None,) * n, use_local_output=True,
                                            desired_input_layouts=(Replicate(),) + (None,) * n)
    for block in trunk.layers.children():
        plan = {"input_layernorm": SequenceParallel(use_local_output=True), "self_attn": gathered(4),
                "post_attention_layernorm": SequenceParallel(use_local_output=True), "mlp": gathered(0),
                "self_attn.o_proj": row(), "mlp.down_proj": row(),
                **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
                **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}}
        if hasattr(block.self_attn, "q_norm"):          # of (B, heads, T, D): over its own heads
            plan.update({f"self_attn.{name}": SequenceParallel(sequence_dim=1, use_local_output=True)
                         for name in ("q_norm", "k_norm")})
        parallelize_module(block, mesh, plan)
    if trunk.embed_tokens is not None:
        parallelize_module(trunk, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate(),
                                                                         output_layouts=by_token)})
        # A copy waits for what the ranks have sent. A compiled block that gets it unwaited for (AsyncCollectiveTensor)
        # gives no gradient back, in torch 2.13: the embedding would not be learned.
        trunk.embed_tokens.register_forward_hook(lambda module, ids, found: found.clone())
    if model.lm_head is not None:
        parallelize_module(trunk, mesh, {"norm": SequenceParallel(use_local_output=True)})
        parallelize_module(trunk, mesh, PrepareModuleOutput(output_layouts=by_token, desired_output_layouts=Replicate()))
        for head in (model.lm_head, *model.future_heads):
            parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
        if model.config.tie_embeddings:
            model.lm_head.weight = trunk.embed_tokens.weight


def put(parameter, whole):
    """Copies a whole tensor into a parameter that may hold a part of it; no rank talks to another."""
    parameter, part = local(parameter), parameter
    if isinstance(part, DTensor):
        whole = local(distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None))
    parameter.copy_(whole)


def local(tensor):
    """What this rank has of a tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    """All of a tensor; the ranks that share it must all ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copies(tensor):
    """How many ranks hold the same numbers of a tensor as this one."""
    if not isinstance(tensor, DTensor):
        return 1
    return math.prod(size for size, place in zip(tensor.device_mesh.shape, tensor.placements) if place.is_replicate())


def whole_parameters(model, setup):
    """{name: all of the parameter, on the CPU} of all stages, on rank 0; {} on the others. All ranks must ask."""
    found, device = {}, setup.device
    mine = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    names = from_all(mine, setup)
    per_stage = setup.world // setup.layout.pp
    for stage in range(setup.layout.pp):
        for name, shape in names[stage * per_stage]:
            tensor = whole(model.get_parameter(name).detach()).to(device) if stage == setup.stage else None
            if stage and setup.rank == stage * per_stage:
                dist.send(tensor, 0)
            elif stage and setup.is_main:
                dist.recv(tensor := torch.empty(shape, device=device), stage * per_stage)
            if setup.is_main:
                found[name] = tensor.cpu()
    return found


class Pipeline(nn.Module):
    """A stage of the model, with the schedules by which micro-batches go through the stages. Every rank has the data of
    all of them: targets are needed in the last stage, but the tokens in each, for positions and documents."""

    def __init__(self, module, setup):
        super().__init__()
        self.module, self.setup, self.schedules = module, setup, {}
        self.first, self.last = setup.stage == 0, setup.stage == setup.layout.pp - 1

    def run(self, micro_batches, score, backward):
        """score(x, y, w, hidden) of every micro-batch in this stage, and with backward the gradients."""
        x, y, w = (torch.cat(parts) for parts in zip(*micro_batches))
        self.score, self.left = score, len(micro_batches) * backward
        schedule = self.schedule(len(micro_batches), x.size(0) // len(micro_batches), x.size(1), backward)
        schedule.step(*[x] * self.first, target=w if self.last and backward else None, x=x, y=y, w=w)

    def forward(self, given, x, y, w):
        found = self.score(x, y, w, None if self.first else given)
        if self.left and found.requires_grad:               # in 1F1B the backward passes come in this order too
            self.left -= 1
            last = self.left == 0
            found.register_hook(lambda gradient: meet(self.module, last))
        return found.reshape(1) if self.last else found

    def schedule(self, n, rows, time, backward):
        """Made once for each shape; 1F1B (Narayanan et al. 2019, PipeDream-flush) keeps no more micro-batches'
        activations than there are stages after this one."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe    # loads the compiler
        key = n, rows, time, backward
        if key not in self.schedules:
            setup, config = self.setup, self.module.config
            hidden = torch.empty(rows, time // setup.layout.tp, config.n_embd, dtype=setup.dtype, device="meta",
                                 requires_grad=backward)
            ids, loss = torch.empty(rows, time, dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
            stage = PipelineStage(self, setup.stage, setup.layout.pp, setup.device, ids if self.first else hidden,
                                  loss.requires_grad_(backward) if self.last else hidden,
                                  group=setup.mesh.get_group("pp"))
            self.schedules[key] = (Schedule1F1B(stage, n, loss_fn=lambda out, target: out.sum(), scale_grads=False)
                                   if backward else ScheduleGPipe(stage, n))
        return self.schedules[key]


def wrapped(model, setup):
    """What the training loop calls: DDP where several ranks hold everything, the Pipeline where there are stages. DDP
    and FSDP average gradients over the ranks that share the data; the losses here are sums over the global step, so
    they are multiplied by the number of shares, setup.dp, where they are formed (see train.py)."""
    if setup.layout.plain:
        return wrap(model, setup)
    return Pipeline(model, setup) if setup.layout.pp > 1 else model


def go_through(model, micro_batches, score, backward=True):
    """score(x, y, w, hidden=None) of each micro-batch: -> its loss, of which this does the backward pass, or what a
    stage gives to the next one. All ranks must have as many micro-batches."""
    if isinstance(model, Pipeline):
        model.run(list(micro_batches), score, backward)
    elif backward:
        for i, micro_batch in enumerate(micro_batches):
            meet(model, i == len(micro_batches) - 1)
            score(*micro_batch).backward()
    else:
        for micro_batch in micro_batches:
            score(*micro_batch)
    if not backward:
        settle(model)


def meet(model, last):
    """Whether gradients travel between the ranks in the next backward pass, the last one of a step or not. ZeRO-1: with
    the last only, as DDP; ZeRO-2 and 3: in each, so that nobody holds them whole. ZeRO-1 and 2 keep whole weights
    until the last."""
    if not isinstance(model, FSDPModule):
        model.require_backward_grad_sync = last
    elif model.zero < 3:
        model.set_requires_gradient_sync(last or model.zero == 2)
        model.set_reshard_after_backward(last)


def settle(model):
    """After a forward pass alone FSDP's modules still hold whole weights; parameters() gives the shards after this."""
    for module in bare(model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()
