"""What a run measures of itself, against values made by hand; and that looking changes nothing."""
import builtins
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine import gauges, hf, layout
from engine.files import sha256_file
from engine.gauges import Gauges, flops_per_token, memory, peak_of
from engine.loader import open_mixture
from engine.monitor import flat, read_log
from engine.optim import optimizers_of
from engine.shards import TokenData, batch, n_blocks, step_blocks
from small import ALONE, byte_tokenizer, config_shape, shape, small_llama
from test_train import data, launch, make_data, refused, same, train, weights      # noqa: F401

CONFIG = SimpleNamespace(log_blocks=True, peak_flops=0.0)


# --- One by one ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("muon", [0.0, 0.02])
def test_update_to_weight_ratio_by_hand(tmp_path, muon):
    model = small_llama(1, tie_embeddings=False)
    optimizers = optimizers_of(model, 1e-2, muon, 0.1)
    read = Gauges(tmp_path, model, optimizers, 1.0, CONFIG, ALONE)
    model(torch.arange(60).view(2, 30)).square().mean().backward()
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    read.before_step()
    for optimizer in optimizers:
        optimizer.step()
    record = read.read(1.0, 0.0, 60)
    after = {name: p.detach().double() for name, p in model.named_parameters()}

    def by_hand(names):
        moved, were = (sum(x[n].square().sum() for n in names) for x in ({n: after[n] - before[n] for n in names}, before))
        return (moved / were).sqrt().item()
    assert record["update_ratio"] == pytest.approx(by_hand(list(before)), rel=1e-5)
    groups = {"layers.0": [n for n in before if ".layers.0." in n], "layers.1": [n for n in before if ".layers.1." in n],
              **{n: [n] for n in before if ".layers." not in n}}
    assert len(groups) == 5
    assert record["update_ratio_blocks"] == pytest.approx({g: by_hand(names) for g, names in groups.items()}, rel=1e-5)
    assert all(torch.equal(after[n].float(), p) for n, p in model.named_parameters()) and read.before is None
    size = sum(p.numel() for p in model.parameters())
    assert record["next_saves_bytes"] == pytest.approx(4 * size * (1 + 1 + (2 if not muon else 1.5)), rel=0.2)


def test_flops_are_those_that_are_done():
    """Counted operation by operation, for a whole (not causal) score matrix, which is what the explicit attention does."""
    form = shape(attention="fp32", tie_embeddings=False)
    model = small_llama(0, attention="fp32", tie_embeddings=False).train()
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 263, (2, form.block_size))).sum().backward()
    attention = 12 * form.n_layer * form.n_head * form.head_dim * form.block_size
    multiplied = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert counter.get_total_flops() / (2 * form.block_size) == flops_per_token(form, multiplied) + attention / 2
    assert flops_per_token(form, multiplied, separate_documents=True) == flops_per_token(form, multiplied) - attention / 2
    window = shape(sliding_window=10, tie_embeddings=False)       # position i sees min(i + 1, 10) tokens
    seen = sum(min(i + 0.5, 10 - 0.5 * (i < 10)) if i < 10 else 10 for i in range(96)) / 96
    assert flops_per_token(window, 0) + 6 * 263 * 32 == pytest.approx(12 * 2 * 4 * 8 * seen, rel=0.01)
    llama2 = config_shape("llama2_7b")
    assert flops_per_token(llama2, 6_738_415_616) == pytest.approx(42.9e9, rel=2e-3)


def test_a_peak_is_that_of_the_whole_name_or_none(monkeypatch):
    cuda = torch.device("cuda", 0)
    for name, peak in {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA H100 80GB HBM3": 989.4e12,
                       "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989.4e12, "NVIDIA RTX A1000": None, "NVIDIA H20": None,
                       "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None, "NVIDIA H200 MIG 1g.18gb": None, "Tesla V100-SXM2-16GB": None,
                       "NVIDIA GeForce RTX 4090": 165.2e12, "NVIDIA GeForce RTX 4090 Laptop GPU": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        assert peak_of(cuda, torch.bfloat16) == peak, name
        assert peak_of(cuda, torch.float32) is None                       # the table is of bf16
    assert peak_of(torch.device("cpu"), torch.bfloat16) is None


def test_memory_of_the_process_with_proc_with_psutil_and_without(monkeypatch):
    psutil = pytest.importorskip("psutil")
    block = torch.ones(50_000_000 // 4)
    resident = psutil.Process().memory_info().rss
    found = memory(ALONE.device)
    assert found["rss_bytes"] == pytest.approx(resident, rel=0.05) and 0 < found["rss_file_bytes"] < resident - block.nbytes
    real = builtins.open

    def no_proc(path, *more, **named):
        if str(path).startswith("/proc/self"):
            raise FileNotFoundError(path)
        return real(path, *more, **named)
    monkeypatch.setattr(builtins, "open", no_proc)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=7)))
    assert memory(ALONE.device) == {"rss_bytes": 7} and gauges._counters(None) == {}
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert memory(ALONE.device) == {}


class FakeNvml:
    """A GPU as nvidia-ml-py shows it: counters that can be set, of which those in `missing` are not supported."""

    def __init__(self, missing=(), **counters):
        self.missing, self.counters = missing, {number: 0 for number, _, _ in gauges.FIELDS.values()}

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1234"
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetFieldValues(self, handle, fields):
        return [SimpleNamespace(nvmlReturn=3 if number in self.missing else 0, value=SimpleNamespace(ullVal=self.counters[number]))
                for number, _ in fields]


def test_what_nvml_gives(tmp_path, monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    assert (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES) == (197, 198)
    assert (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX) == (138, 139)
    fake, now = FakeNvml(missing={139}), [100.0]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(gauges.time, "perf_counter", lambda: now[0])
    opened = gauges._nvml(torch.device("cuda", 0))
    assert opened == (fake, "handle") and gauges._nvml(torch.device("cpu")) is None
    monkeypatch.setattr(gauges, "_nvml", lambda device: opened)
    read = Gauges(tmp_path, small_llama(), [], 1.0, CONFIG, ALONE)
    now[0], fake.counters = 110.0, {197: 5000, 198: 700, 138: 30, 139: 30}
    read.before_step()
    record = read.read(1.0, 0.0, 10)
    assert record["gpu_utilisation"] == 0.87 and record["pcie_sent_bytes_per_second"] == 500
    assert record["pcie_received_bytes_per_second"] == 70 and record["nvlink_sent_bytes_per_second"] == 3072
    assert "nvlink_received_bytes_per_second" not in record
    now[0], fake.counters[197], fake.counters[198] = 120.0, 10, 800                   # the first has begun again
    read.before_step()
    record = read.read(1.0, 0.0, 10)
    assert "pcie_sent_bytes_per_second" not in record and record["pcie_received_bytes_per_second"] == 10
    now[0] = 130.0
    monkeypatch.setattr(fake, "nvmlDeviceGetUtilizationRates", None)                 # whatever it is that fails
    monkeypatch.setattr(fake, "nvmlDeviceGetFieldValues", None)
    read.before_step()
    assert not any(name.startswith(("gpu", "pcie", "nvlink")) for name in read.read(1.0, 0.0, 10))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gauges._nvml(torch.device("cuda", 0)) is None


def test_waiting_and_memory_are_the_largest_of_all_ranks(tmp_path, monkeypatch):
    other = {"data_seconds": 0.7, "rss_bytes": 1000, "rss_file_bytes": 10**15}
    monkeypatch.setattr(gauges.parallel, "from_all", lambda ours, setup: [ours, other])
    monkeypatch.setattr(gauges, "memory", lambda device: {"rss_bytes": 5000, "rss_file_bytes": 100})
    read = Gauges(tmp_path, small_llama(), [], 1.0, CONFIG, replace(ALONE, world=2))
    read.readings = 1                           # the network is not measured in this one
    read.before_step()
    found = read.read(seconds=1.0, waited=0.1, tokens=100)
    assert [found[name] for name in ("data_seconds", "rss_bytes", "rss_file_bytes")] == [0.7, 5000, 10**15]


# --- In a run --------------------------------------------------------------------------------------------------------

def test_each_logged_step_has_them_and_no_other_copies_weights(data, tmp_path, monkeypatch):      # noqa: F811
    copies, real = [], Gauges.before_step
    monkeypatch.setattr(Gauges, "before_step", lambda self: (copies.append(1), real(self)))
    said = train(data, tmp_path / "out", "--max_steps=7", "--log_every=3", "--peak_flops=1e9")
    records = [record for record in read_log(tmp_path / "out" / "pretrain") if "loss" in record]
    assert [record["step"] for record in records] == [1, 3, 6, 7] and len(copies) == 4
    flops = float(re.search(r"mfu +([\d.e+]+) FLOPs a token", said)[1])
    for record in records:
        assert record["mfu"] == pytest.approx(flops * record["tokens_per_second"] / 1e9, rel=1e-3)
        assert 0 < record["data_seconds"] < record["step_seconds"] and 1e-5 < record["update_ratio"] < 0.2
        assert 5e7 < record["rss_bytes"] < 1e11 and record["disk_free_bytes"] > 1e6
        assert not {"update_ratio_blocks", "all_reduce_seconds", "gpu_utilisation", "gpu_memory_peak_bytes"} & record.keys()
    written = sum(file.stat().st_size for folder in ("step", "full") for file in
                  (tmp_path / "out" / "pretrain" / f"{folder}_00000007").rglob("*")
                  if file.suffix in (".safetensors", ".distcp"))
    assert records[-1]["next_saves_bytes"] == pytest.approx(written, rel=0.3)
    train(data, tmp_path / "other", "--max_steps=1", "--log_blocks=True")
    [record] = read_log(tmp_path / "other" / "pretrain")
    assert record["mfu"] == "unknown" and record["update_ratio_blocks"].keys() >= {"layers.0", "layers.1"}
    assert ("update_ratio_blocks/layers.0", record["update_ratio_blocks"]["layers.0"]) in list(flat(record))
    assert "mfu" not in dict(flat(record))


def test_looking_changes_no_bit(data, tmp_path):      # noqa: F811
    """Each closer look, and every step logged or none."""
    settings = ["--max_steps=4", "--dropout=0.1"]
    train(data, tmp_path / "plain", *settings)
    expected = weights(tmp_path / "plain", 4)
    for i, look in enumerate(["--watch_nan=True", "--watch_stats=2", "--profile=2:2", "--log_every=100", "--log_blocks=True"]):
        train(data, tmp_path / str(i), *settings, look)
        assert same(weights(tmp_path / str(i), 4), expected), look
    trace = json.loads((tmp_path / "2" / "pretrain" / "profile" / "steps_2_to_3_rank_0.json").read_text())["traceEvents"]
    phases = [event["name"] for event in sorted(trace, key=lambda event: event.get("ts", 0))
              if event.get("cat") == "user_annotation" and not event["name"].startswith(("Optimizer", "ProfilerStep"))]
    assert phases == 2 * ["data", "forward and backward", "optimizer", "log, evaluate, save"]
    assert any(event["name"] == "aten::scaled_dot_product_attention" for event in trace)


def test_wrong_settings_of_a_closer_look(data, tmp_path):      # noqa: F811
    said = refused(data, tmp_path / "out", "--max_steps=10", "--profile=5", "--watch_stats=-1")
    assert "profile must be STEP:COUNT" in said and "watch_stats must be at least 0" in said
    assert "profile must be" in refused(data, tmp_path / "out", "--profile=0:3")
    assert "ends behind the last step" in refused(data, tmp_path / "out", "--max_steps=10", "--profile=8:4")


@pytest.fixture(scope="module")
def on_two(data, tmp_path_factory):      # noqa: F811
    """(a second folder of data, the folder of a run on two processes that reads both, its settings)"""
    folder = tmp_path_factory.mktemp("two")
    other = make_data(folder / "other", seed=3)
    settings = ["--max_steps=12", "--watch_stats=6", "--log_every=1", "--peak_flops=1e9",
                f"--data_mix={{'{data}': 0.7, '{other}': 0.3}}"]
    launch(data, folder / "out", *settings, processes=2)
    return other, folder / "out", settings


def test_loss_of_each_source_by_hand(data, on_two, tmp_path):      # noqa: F811
    other, mix = on_two[0], on_two[2][-1]
    train(data, tmp_path / "out", "--max_steps=2", mix)
    [record, _] = read_log(tmp_path / "out" / "pretrain")
    tokenizer = byte_tokenizer()
    tokens = open_mixture(str(data), {str(data): 0.7, str(other): 0.3}, "train", 32, tokenizer.hash)
    blocks = tokens.step_blocks(0, 8, 1)
    x, y, w = (torch.from_numpy(part) for part in batch(tokens, blocks, 32))
    model = small_llama(1, n_head=2, n_kv_head=2, block_size=32, tie_embeddings=True)
    losses = -model(x).log_softmax(-1).gather(-1, y[..., None])[..., 0] * w
    source, found = tokens.source_of(blocks), {name: record.pop(f"loss_of_{name}") for name in tokens.names}
    by_hand = {name: (losses[source == i].sum() / w[source == i].sum()).item() for i, name in enumerate(tokens.names)}
    assert found == pytest.approx(by_hand, rel=1e-5) and len(found) == 2 and min(w[source == i].sum() for i in (0, 1)) > 0
    assert not any(name.startswith("loss_of_") for name in record)
    train(data, tmp_path / "single", "--max_steps=1")
    assert not any(name.startswith("loss_of_") for name in read_log(tmp_path / "single" / "pretrain")[0])
    two = read_log(on_two[1] / "pretrain")[0]
    assert {name: two[f"loss_of_{name}"] for name in tokens.names} == pytest.approx(by_hand, rel=1e-5)


# --- Where it stops being finite -------------------------------------------------------------------------------------

def folder_with(path, change, **form):
    """A model's folder, in fp32, with its weights changed by change({name: parameter})."""
    model = small_llama(5, **{**dict(n_head=2, n_kv_head=2, block_size=64, tie_embeddings=False), **form})
    with torch.no_grad():
        change(dict(model.named_parameters()))
    path.mkdir()
    hf.save_model(path, model, byte_tokenizer())
    return path


def watched(data, tmp_path, change, *extra, **form):      # noqa: F811
    """The sentence about the first step of a run from such a folder, in the log and on the screen."""
    start = folder_with(tmp_path / "start", change, **form)
    said = refused(data, tmp_path / "out", f"--init_from={start}", "--watch_nan=True", "--max_bad_steps=1", *extra)
    [record] = read_log(tmp_path / "out" / "pretrain")
    assert record["step"] == 1 and record["skipped"] and f"not finite  {record['not_finite']}" in said
    return record["not_finite"]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_weight_that_is_inf_is_named_with_its_module_and_input(data, tmp_path, monkeypatch, recompute):      # noqa: F811
    compiled = []
    monkeypatch.setattr(layout, "compile_blocks", lambda model, setup, wanted, dynamic: compiled.append(wanted))
    def spoil(weights):
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.inf
    found = watched(data, tmp_path, spoil, f"--recompute={recompute}", "--compile=True")
    assert re.fullmatch(r"step 1, rank 0, forward, model\.layers\.1\.mlp\.up_proj: output \(2, 32, 64\) \[64 inf, -[\d.]+ to "
                        r"[\d.]+\] of input \(2, 32, 32\) \[-[\d.]+ to [\d.]+\]; its weight has \(64, 32\) \[1 inf, "
                        r"-[\d.]+ to [\d.]+\]", found), found
    assert compiled == [False]


def test_what_overflows_between_modules_is_told_by_the_next_one(data, tmp_path):      # noqa: F811
    def spoil(weights):                         # each is finite, the product of what they give is not
        for part in ("gate_proj", "up_proj"):
            weights[f"model.layers.0.mlp.{part}.weight"].mul_(1e24)
    found = watched(data, tmp_path, spoil)
    assert found.startswith("step 1, rank 0, forward, model.layers.0.mlp: what it computes before it calls "
                            "model.layers.0.mlp.down_proj gives (2, 32, 64) ["), found
    assert "inf" in found


def test_a_gradient_that_overflows_is_named_where_the_forward_pass_was_finite(data, tmp_path):      # noqa: F811
    """Vectors of 1e-19 are normalised to 1 without trouble; the derivative of 1 / sqrt(v) at 1e-38 is no fp32 number."""
    found = watched(data, tmp_path, lambda weights: weights["model.embed_tokens.weight"].mul_(2e-18), norm_eps=1e-38)
    assert re.fullmatch(r"step 1, rank 0, backward, model\.layers\.0\.input_layernorm: gradient of its input \(2, 32, 32\) "
                        r"\[.*(nan|inf).*\]; its input was \(2, 32, 32\) \[-[\d.e-]+-1[89] to [\d.e-]+-1[89]\]", found), found


# --- Two processes ---------------------------------------------------------------------------------------------------

def test_statistics_of_blocks_by_hand_and_on_two_processes(data, on_two, tmp_path):      # noqa: F811
    """All sequences of a step at once, against 4 micro-batches and against 2 x 2. The same launch: the network is
    measured in the first reading and the eleventh, and the ratio is the same as on one process."""
    said = train(data, tmp_path / "one", *on_two[2])
    flops = float(re.search(r"mfu +([\d.e+]+) FLOPs a token", said)[1])
    one, two = read_log(tmp_path / "one" / "pretrain"), read_log(on_two[1] / "pretrain")
    assert [record["step"] for record in one if "blocks_seen" in record] == [6, 12]
    for a, b in zip(one, two, strict=True):
        assert a["update_ratio"] == pytest.approx(b["update_ratio"], rel=1e-3)
        for block, values in a.get("blocks_seen", {}).items():
            assert b["blocks_seen"][block] == pytest.approx(values, rel=2e-3, abs=1e-7), block
    assert [record["step"] for record in two if "all_reduce_seconds" in record] == [1, 11]
    for record in two:
        assert ("all_reduce_bytes_per_second" in record) == ("all_reduce_seconds" in record)
        assert {"rss_bytes", "data_seconds"} <= record.keys()
        assert record["mfu"] == pytest.approx(flops * record["tokens_per_second"] / 2 / 1e9, rel=1e-3)
    assert two[0]["all_reduce_bytes_per_second"] * two[0]["all_reduce_seconds"] == pytest.approx(4 * 29056)      # 2 (n-1)/n = 1

    train(data, tmp_path / "first", "--max_steps=1", "--watch_stats=1")
    found = read_log(tmp_path / "first" / "pretrain")[0]["blocks_seen"]
    tokenizer = byte_tokenizer()
    tokens = TokenData(data / "tokens", "train", tokenizer.hash)
    model = small_llama(1, n_head=2, n_kv_head=2, block_size=32, tie_embeddings=True).train()
    rows = step_blocks(0, 8, n_blocks(tokens.n_tokens, 32), 1)
    x, y, w = (torch.from_numpy(part) for part in batch(tokens, rows, 32))
    seen = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, inputs, output, i=i: (output.retain_grad(), seen.update({i: output})) and None)
    losses = -model(x).log_softmax(-1).gather(-1, y[..., None])[..., 0]
    ((losses * w).sum() / w.sum()).backward()
    for i, output in seen.items():
        for what, values in (("output", output.detach().double()), ("gradient", output.grad.double())):
            by_hand = {"mean": values.mean(), "std": values.std(correction=0), "max": values.abs().max()}
            for name, value in by_hand.items():
                assert found[f"layers.{i}"][f"{what}_{name}"] == pytest.approx(value.item(), rel=1e-3, abs=1e-8), (i, what, name)


def test_the_rank_where_it_began_is_named(tmp_path):
    """The embedding of one rare byte is inf; only the rank that reads it sees that, and one step only."""
    folder, tokenizer = make_data(tmp_path / "data"), byte_tokenizer()
    tokens, [token] = TokenData(folder / "tokens", "train", tokenizer.hash), tokenizer.encode("Z")
    place = 32 * int(step_blocks(1, 8, n_blocks(tokens.n_tokens, 32), 1)[1]) + 5            # in step 2, a row of rank 1
    shard = folder / "tokens" / f"train_{place // 3000:05d}.bin"
    index, before = folder / "tokens" / "index.json", sha256_file(shard)
    np.memmap(shard, "<u2", "r+")[place % 3000] = token
    index.write_text(index.read_text().replace(before, sha256_file(shard)))

    def spoil(weights):
        weights["model.embed_tokens.weight"][token, 7] = torch.inf
    start = folder_with(tmp_path / "start", spoil)
    said = launch(folder, tmp_path / "out", "--max_steps=3", "--max_bad_steps=1", f"--init_from={start}", "--watch_nan=True",
                  processes=2, code=1)
    [first, second] = read_log(tmp_path / "out" / "pretrain")
    assert "skipped" not in first and second["not_finite"].startswith("step 2, rank 1, forward, model.embed_tokens: output ")
    assert "of input token ids; its weight has (263, 32) [1 inf" in second["not_finite"] and said.count("not finite  ") == 1
