"""Several processes as one: losses, gradients, weights and checkpoints of every layout against those of one process."""
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import layouts
from engine import checkpoint, hf
from engine.monitor import read_log
from engine.optim import LossScale, optimizers_of
from engine.parallel import divide
from engine.samples import order_problems
from layouts import LAYOUTS, OFTEN, config_of
from model import Llama, ModelConfig
from programs import Program
from small import ALONE
from test_resume import kill_all_after
from test_train import launch, losses, make_data, same, weights

OF_LAYOUTS = ("parallel", "zero", "hsdp", "tp", "pp", "cpu_offload")


def run_layouts(processes, *words):
    code, said = Program("tests/layouts.py", *words, processes=processes).wait(600)
    assert code == 0, said


def results(folder, name, processes):
    return [torch.load(folder / f"{name}.{rank}", weights_only=True) for rank in range(processes)]


_serial = {}


def serial(keys):
    """What `layouts.steps` finds on one process, with the keys that are no layout's."""
    rest = {key: value for key, value in keys.items() if key not in OF_LAYOUTS}
    if str(rest) not in _serial:
        _serial[str(rest)] = layouts.steps(config_of(**rest), ALONE)
    return _serial[str(rest)]


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """A function: the folder in which all LAYOUTS of so many processes have left what they found, in one launch."""
    folders = {}

    def of(processes):
        if processes not in folders:
            folders[processes] = tmp_path_factory.mktemp("steps")
            names = [name for name, (count, _) in LAYOUTS.items() if count == processes]
            run_layouts(processes, "steps", folders[processes], ",".join(names))
        return folders[processes]
    return of


@pytest.mark.parametrize("processes", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_parallel_equals_serial(stepped, processes):
    """Over 3 steps of 6 to 2 micro-batches, with masked targets, blocks computed anew, and clipping to a tenth of the norm."""
    names = [name for name, (count, _) in LAYOUTS.items() if count == processes and "overflow" not in name]
    for name in names:
        wanted, found = serial(LAYOUTS[name][1]), results(stepped(processes), name, processes)
        for what, limit in (("initial", 0), ("gradients", 1e-5), ("clipped", 1e-5)):
            assert set().union(*(part[what] for part in found)) == wanted[what].keys(), (name, what)
            for part in found:
                for parameter, value in part[what].items():
                    reference = wanted[what][parameter]
                    assert (value - reference).norm() <= limit * reference.norm(), (name, what, parameter)
        for part in found:
            assert part["losses"] == pytest.approx(wanted["losses"], abs=1e-5), name
            assert part["norms"] == pytest.approx(wanted["norms"], rel=1e-3), name
        assert min(wanted["norms"]) > 0.5                       # all steps are clipped, to 0.1


def test_collectives_of_a_step(stepped):
    """4 units (3 blocks and the rest) and 3 micro-batches; ZeRO-3 gathers blocks forward and backward, the rest once. Two
    all-reduces are the sums of weights and losses; DDP has one bucket. Gradients of blocks travel while those of the blocks
    before them are computed: early are all but the rest's."""
    met = {name: results(stepped(2), name, 2)[0]["met"] for name in ("ddp", "zero1", "zero2", "zero3")}
    assert met == {"ddp": {"allreduce": 3, "early": 0},
                   "zero1": {"allgather": 4, "reduce_scatter": 4, "allreduce": 2, "early": 3},
                   "zero2": {"allgather": 4, "reduce_scatter": 4 * 3, "allreduce": 2, "early": 3 * 3},
                   "zero3": {"allgather": (3 + 3 + 1) * 3, "reduce_scatter": 4 * 3, "allreduce": 2, "early": 3 * 3}}


def test_an_overflow_on_one_rank_is_skipped_on_all(stepped):
    for name in ("ddp overflow", "zero3 overflow", "pp2 overflow"):
        one, two = results(stepped(2), name, 2)
        for part in (one, two):
            assert [math.isfinite(norm) for norm in part["norms"]] == [True, True, False, True], name
            assert part["moved"] == [True, True, False, True] and part["scale"] == 32768, name
            assert part["counted"] == [3], name                 # Adam's own count, in its bias correction
            assert all(math.isfinite(loss) for loss in part["losses"])
            assert part["losses"][:3] == pytest.approx(serial({})["losses"][:3], abs=1e-2)
        assert one["losses"] == two["losses"]


def test_the_scale_of_fp16():
    scaled = LossScale(torch.float16)
    assert scaled.value == 65536 and scaled.overflowed(1.0, math.inf) and scaled.value == 32768
    assert not scaled.overflowed(math.nan, math.nan) and scaled.value == 32768          # that is no matter of scale
    again = LossScale(torch.float16, [scaled.value, 1998])
    assert not again.overflowed(1.0, 1.0) and again.value == 32768 and not again.overflowed(1.0, 1.0) and again.value == 65536
    one = LossScale(torch.bfloat16)
    assert one.value == 1 and not one.overflowed(1.0, math.inf) and one.value == 1
    for last in (1.0, 2.0):                                                             # below 1 it is a real fault
        assert LossScale(torch.float16, [last, 0]).overflowed(1.0, math.nan) == (last > 1)


def test_how_a_world_is_divided():
    shape = ModelConfig(264, 3, 4, 2, 32, 64, 16)
    of = lambda world, **keys: divide(config_of(**keys), replace(shape, tie_embeddings=keys.get("tie_embeddings", False)), world)
    layout, problems = of(8, parallel="fsdp", hsdp=2, tp=2, micro_batch_size=1)
    assert (layout.pp, layout.replicas, layout.shards, layout.tp, layout.dp) == (1, 2, 2, 2, 4) and not problems
    assert layout.micro * layout.n_micro * layout.dp * 16 == 192
    assert of(2)[0].plain and of(1, parallel="fsdp")[0].plain and not of(2, parallel="fsdp")[0].plain
    layout, problems = of(4, pp=2, batch_tokens=64, micro_batch_size=8)        # 2 sequences each: 2 micro-batches of 1
    assert (layout.micro, layout.n_micro, layout.dp, problems) == (1, 2, 2, [])
    said = "; ".join(of(6, parallel="fsdp", hsdp=4, tp=3, pp=5, tie_embeddings=True, matrix_learning_rate=0.1, watch_nan=True)[1])
    for part in ("6 process(es) are no multiple of tp * pp = 3 * 5", "n_head = 4 must", "n_kv_head = 2 must", "n_inner = 64 must",
                 "block_size = 16 must", "n_layer = 3 is less", "tie_embeddings", "Muon", "watch_nan"):
        assert part in said, part
    assert "vocab_size = 264 must" not in said
    assert "hsdp = 4 does not divide the 6 ranks" in of(6, parallel="fsdp", hsdp=4)[1][0]
    said = "; ".join(of(4, zero=2, hsdp=2, cpu_offload=True)[1])
    assert all(f"{name} shards states" in said for name in ("zero = 2", "hsdp = 2", "cpu_offload = True"))
    assert "keep no pipeline" in of(3, pp=3, batch_tokens=32)[1][0] and "no multiple" in of(5)[1][0]
    assert len(of(2, parallel="other", zero=4, tp=0)[1]) == 3


# --- train.py --------------------------------------------------------------------------------------------------------

RUNS = {"zero3": dict(watch_stats=3), "tp2": dict(watch_stats=3), "pp2": {}, "zero3 muon": dict(matrix_learning_rate=0.02),
        "zero1 fp16": dict(dtype="fp16"), "pp2 future": dict(n_future=2), "ddp future": dict(n_future=2)}
SLOW = {"zero3 bf16 compiled": dict(dtype="bf16"), "tp2 bf16 compiled": dict(dtype="bf16"), "pp2 fp16": dict(dtype="fp16")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """train.py in each of RUNS, on two processes; a function that does the same on one."""
    folder, alone = tmp_path_factory.mktemp("runs"), {}
    make_data(folder / "data")
    run_layouts(2, "runs", folder, ",".join(RUNS))

    def one(**keys):
        name = "one" + "".join(f" {key}={value}" for key, value in keys.items())
        if name not in alone:
            alone[name] = layouts.runs(name, folder, ALONE, **keys)
        return name
    return SimpleNamespace(folder=folder, one=one)


@pytest.mark.slow
def test_other_dtypes_in_a_layout(trained):
    run_layouts(2, "runs", trained.folder, ",".join(SLOW))
    for name in SLOW:
        test_training_in_a_layout(trained, name)


@pytest.mark.parametrize("name", RUNS)
def test_training_in_a_layout(trained, name):
    """Losses, held-out losses, norms, how far weights move, and the light checkpoint, which is whole."""
    keys = {**RUNS, **SLOW}[name]
    one = trained.one(**keys)
    found, wanted = read_log(trained.folder / name / "pretrain"), read_log(trained.folder / one / "pretrain")
    loose = 3e-2 if "dtype" in keys else 1e-2 if "muon" in name else 1e-5
    assert [record["step"] for record in found] == list(range(1, 7))
    for a, b in zip(found, wanted, strict=True):
        if a.get("skipped"):
            continue
        assert a["loss"] == pytest.approx(b["loss"], abs=loose) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=max(loose, 1e-3))
        for what in ("val_loss", "val_bits_per_byte", "val_loss_eos"):
            assert a.get(what) == pytest.approx(b.get(what), abs=loose)
        if loose == 1e-5:
            assert a["update_ratio"] == pytest.approx(b["update_ratio"], rel=1e-3)
            assert a["update_ratio_blocks"] == pytest.approx(b["update_ratio_blocks"], rel=1e-2)
            assert a["next_saves_bytes"] == pytest.approx(b["next_saves_bytes"], rel=1e-2)
    a, b = weights(trained.folder / name, 6), weights(trained.folder / one, 6)
    assert a.keys() == b.keys() and all(a[n].shape == b[n].shape for n in a)
    assert loose > 1e-5 or max((a[n] - b[n]).abs().max() for n in a) < 1e-4
    assert not order_problems(trained.folder / name / "pretrain")
    if "watch_stats" in keys:
        seen, by_one = (next(record["blocks_seen"] for record in log if "blocks_seen" in record) for log in (found, wanted))
        for block in by_one:
            assert seen[block] == pytest.approx(by_one[block], rel=1e-3, abs=1e-7), block


def fresh(keys):
    """A model and optimizers of this process for a run's keys."""
    config = config_of(**{**OFTEN, **keys})
    model = Llama(ModelConfig(**{key: getattr(config, key) for key in ModelConfig.__dataclass_fields__}))
    return model, optimizers_of(model, 1e-3, config.matrix_learning_rate, 0.1)


def loaded(folder, keys):
    """(digests of all weights and moments that one process reads from a full checkpoint, its state)."""
    model, optimizers = fresh(keys)
    state = checkpoint.load_full(folder, {"model": model}, {"model": optimizers}, ALONE)
    return layouts.digest(model, optimizers), state


def merged(parts, what):
    return {name: value for part in parts for name, value in part[what].items()}


@pytest.mark.parametrize("name", ["zero3", "tp2", "pp2", "zero3 muon", "pp2 future", "zero1 fp16"])
def test_a_layouts_checkpoint_on_one_process(trained, name):
    found, state = loaded(trained.folder / name / "pretrain" / "full_00000006", RUNS[name])
    saved = merged(results(trained.folder, name, 2), "saved")
    assert found == saved and any(".exp_avg_sq" in part for part in found)
    scale, since = state["loss_scale"]
    assert (scale, since) == (1, 6) if "fp16" not in name else scale in (65536, 32768, 16384)


def test_one_processes_checkpoint_in_layouts(trained, tmp_path):
    """Weights and moments are the same bits, and training goes on as it would have."""
    one = trained.folder / trained.one() / "pretrain"
    (tmp_path / "data").symlink_to(trained.folder / "data")
    names = ("zero3", "tp2", "pp2")
    run_layouts(2, "runs", tmp_path, ",".join(names), f"resume_from={one / 'full_00000003'}", "trust_state=True")
    wanted, _ = loaded(one / "full_00000003", {})
    for name in names:
        assert merged(results(tmp_path, name, 2), "loaded") == wanted, name
        assert losses(tmp_path / name) == pytest.approx(losses(one.parent)[3:], abs=1e-5), name


def test_heads_for_later_tokens_lie_apart(trained):
    for name in ("ddp future", "pp2 future"):
        folder, one = (trained.folder / which / "pretrain" / "step_00000006" for which in (name, trained.one(n_future=2)))
        head, wanted = (load_file(place / "heads.safetensors") for place in (folder, one))
        assert head.keys() == wanted.keys() == {"future_heads.0.weight"}
        assert (head["future_heads.0.weight"] - wanted["future_heads.0.weight"]).abs().max() < 1e-4
        start = Llama(fresh(dict(n_future=2))[0].config).init_weights(1).future_heads[0].weight
        assert (head["future_heads.0.weight"] - start).abs().max() > 1e-3               # it has learned
        model, _ = hf.load_model(folder)                                                # without it, a model like any
        assert len(model.future_heads) == 0 and not any("future" in part for part in weights(trained.folder / name, 6))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["--parallel=fsdp"], ["--parallel=fsdp", "--zero=1", "--dtype=fp16"], ["--pp=2"]])
def test_kill_9_and_resume_in_a_layout(trained, tmp_path, keys):
    extra = [*keys, "--max_steps=16", "--save_full=3", "--dropout=0.1", "--tie_embeddings=False"]
    data = trained.folder / "data"
    launch(data, tmp_path / "whole", *extra, processes=2)
    killed = kill_all_after(data, tmp_path / "torn", 8, *extra, processes=2)
    assert killed < 16
    assert "continuing from" in launch(data, tmp_path / "torn", *extra, processes=2)
    assert losses(tmp_path / "torn") == losses(tmp_path / "whole")
    assert same(weights(tmp_path / "torn", 16), weights(tmp_path / "whole", 16))
