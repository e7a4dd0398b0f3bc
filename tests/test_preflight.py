"""What is looked at before step 1: each check by itself, and two real processes that differ, or do not."""
import os
import random
import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dpo
import reward
import rlhf
import sft
import test_train
import toy
from engine import parallel, preflight
from engine.tokenizer import PATTERNS, SPECIAL_TOKENS, Tokenizer
from faults import Run
from model import ScalarModel
from programs import run
from small import ALONE, ROOT, byte_tokenizer
from test_train import SHAPE, launch, losses, make_data, train
from test_train import data                         # noqa: F401

GPU = replace(ALONE, device=torch.device("cuda", 3), rank=11, world=16, local_rank=3)


def facts(rank, host="one", **more):
    return {"rank": rank, "host": host, "device": f"cuda:{rank % 4} (NVIDIA H200)", "interface": "eth0 (10.0.0.1)",
            "nic": 400e9, "clock": 100.0, "values": {"torch": "2.13.0", "seed": 1}, "environment": {}, "problems": [], **more}


RANKS = [facts(rank, "one" if rank < 4 else "two") for rank in range(8)]


# --- The disk --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("light, full, needed", [(0, 0, 4 * 4 + 3 * 12), (1, 0, 3 * 4 + 3 * 12), (3, 2, 4 + 12), (9, 1, 4 + 24)])
def test_room_for_all_checkpoints_that_are_there_at_once(tmp_path, monkeypatch, light, full, needed):
    """A parameter is 4 bytes in a light one and 12 in a full one; what is kept already needs no more room. keep=2 and
    keep_best=1: 4 light ones, 3 full ones."""
    for name, count in (("step", light), ("full", full)):
        for step in range(count):
            (tmp_path / f"{name}_{step + 1:08d}").mkdir()
    (tmp_path / "full_00000099.tmp").mkdir()
    config, n, usage = SimpleNamespace(keep=2, keep_best=1, save_light=9, save_full=9), 1000, namedtuple("usage", "free")
    for free in (needed * n, needed * n - 1):
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage(free))
        problems = preflight.disk_problems(config, tmp_path, {"light": n, "full": 3 * n})
        assert len(problems) == (free < needed * n)
    assert f"{needed * n - 1:,} bytes are free, and {needed * n:,} more are needed" in problems[0]
    kept = preflight.kept_at_once
    assert kept(SimpleNamespace(save_full=5)) == {"light": 1, "full": 2}                    # reward.py, dpo.py, rlhf.py
    assert kept(SimpleNamespace(save_full=0, save_light=0, keep=0)) == {"light": 1, "full": 1}
    assert kept(SimpleNamespace(save_full=5, save_light=5, keep=0)) == {"light": 3, "full": 3}


@pytest.mark.parametrize("script, words, full", [
    (sft, ["--keep=1"], 2 * 3), (sft, ["--lora_rank=2"], 2 * 1), (reward, [], 2 * 3), (dpo, [], 2 * 3), (rlhf, [], 2 * 6),
    (rlhf, ["--group=4"], 2 * 3)])
def test_every_stage_asks_the_disk_first(tmp_path, monkeypatch, capsys, script, words, full):
    """full: numbers per parameter in the full checkpoints of a run; PPO's have the critic as well."""
    tokenizer = toy.tokenizer()
    model = toy.model(tokenizer)
    toy.write_data(tmp_path / "data", pairs=16, control=4)
    rows = [{"messages": toy.question(random.Random(i)) + [{"role": "assistant", "content": "a remark"}]} for i in range(8)]
    for name in ("train", "val"):
        toy.write_lines(tmp_path / f"data/chat/conversations_{name}.jsonl", rows)
    toy.save(tmp_path / "out/sft", model, tokenizer)
    toy.save(tmp_path / "out/reward", ScalarModel(model.config).init_weights(1), tokenizer)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: namedtuple("usage", "free")(0))
    start = [f"--init_from={tmp_path}/out/sft"] if script is not rlhf else ["--episodes=8", "--max_new_tokens=8"]
    with pytest.raises(SystemExit) as stop:
        script.main(toy.config_of(script, f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/out", *start,
                                  *([] if script in (sft, rlhf) else ["--batch_size=8"]), *words))
    said, n = capsys.readouterr().err, model.n_params()
    count, size = re.search(r"(\d+) full checkpoint\(s\) of ([\d,]+)", said).groups()
    assert stop.value.code == 2 and int(count) * int(size.replace(",", "")) == 4 * full * n, said


def test_a_parameter_has_so_many_bytes_in_real_checkpoints(data, tmp_path):      # noqa: F811
    """Weights large enough that names and headers do not count."""
    said = train(data, tmp_path / "out", "--max_steps=1", "--n_embd=256", "--n_inner=704")
    n_params = int(re.search(r"model +([\d,]+) parameters", said)[1].replace(",", ""))
    size = {kind: sum(file.stat().st_size for file in (tmp_path / "out/pretrain" / f"{kind}_00000001").rglob("*") if file.is_file())
            for kind in ("step", "full")}
    assert 4 < size["step"] / n_params < 4.2 and 12 < size["full"] / n_params < 12.5


def test_a_folder_in_which_nothing_can_be_written(tmp_path, monkeypatch):
    assert preflight.write_problems(tmp_path / "new" / "run") == [] and list((tmp_path / "new" / "run").iterdir()) == []
    (tmp_path / "file").write_text("")
    (problem,) = preflight.write_problems(tmp_path / "file" / "run")
    assert "cannot write into" in problem and "(Not a directory)" in problem

    def no_rename(self, target):
        raise OSError(18, "Invalid cross-device link")
    monkeypatch.setattr(Path, "rename", no_rename)
    (problem,) = preflight.write_problems(tmp_path / "new" / "run")
    assert "Invalid cross-device link" in problem


# --- What ranks tell, compared ---------------------------------------------------------------------------------------

def test_ranks_that_differ_are_named_together():
    ranks = [dict(rank) for rank in RANKS]
    for rank in (4, 5, 6, 7):
        ranks[rank] = facts(rank, "two", values={"torch": "2.11.0", "seed": 1})
    ranks[2] = facts(2, values={"torch": "2.13.0", "seed": 2, "commit": "abc"})
    told = preflight.differences(ranks, "values")
    assert [sentence.partition(";")[0] for sentence in told] == [
        "ranks 4-7 on two: torch = '2.11.0', but rank 0 on one has '2.13.0'",
        "rank 2 on one: seed = 2, but rank 0 on one has 1",
        "rank 2 on one: commit = 'abc', but rank 0 on one has 'nothing'"]
    assert preflight.differences(RANKS, "values") == []
    assert preflight.spans([8, 0, 1, 2, 5, 6]) == "0-2, 5-6, 8"


def test_clocks():
    late = [*RANKS[:4], *(facts(rank, "two", clock=97.5) for rank in range(4, 8))]
    (note,) = preflight.clock_notes(late)
    assert note.startswith("the clock of two is 2.5 s behind that of one")
    assert preflight.clock_notes(RANKS) == preflight.clock_notes([*RANKS[:7], facts(7, "two", clock=100.9)]) == []


def test_topology_has_a_line_for_each_machine():
    first, second = preflight.topology([*RANKS[:4], *(facts(rank, "two", interface="ib0 (10.1.0.2)") for rank in range(4, 8))])
    assert first == "one: ranks 0-3 on " + ", ".join(f"cuda:{i} (NVIDIA H200)" for i in range(4)) + "; over eth0 (10.0.0.1)"
    assert second.startswith("two: ranks 4-7 on") and second.endswith("over ib0 (10.1.0.2)")


def test_a_gpu_that_gives_no_memory(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB\nGPU 3 has ...")
    monkeypatch.setattr(torch, "empty", full)
    (problem,) = preflight.allocation_problems(GPU)
    assert "rank 11 on" in problem and "cuda:3 can not give 268,435,456 bytes (CUDA out of memory. Tried" in problem
    assert "nvidia-smi" in problem


# --- The environment -------------------------------------------------------------------------------------------------

def test_variables_that_are_unknown_renamed_or_harmful(tmp_path, monkeypatch):
    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    (tmp_path / "torch/lib/libtorch_cuda.so").write_bytes(b"\1TORCH_NCCL_NAN_CHECK\0x")
    (tmp_path / "nvidia/nccl/lib/libnccl.so.2").write_bytes(b"\0NCCL_BUFFSIZE\0NCCL_QQ_QQQQQ_QQQQ ...\0")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    notes = preflight.environment_notes({
        "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "0", "NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_SOCKET_IFNAMES": "eth0",
        "TORCH_DISTRIBUTED_DEBUG": "detail", "NCCL_DEBUG": "INFO", "NCCL_VERSION": "2.27.3-1", "NCCL_QQ_QQQQQ_QQQQ": "1", "PATH": "x",
        "NCCL_BUFFSIZE": "1", "TORCH_NCCL_NAN_CHECK": "1"})
    assert [note.split()[0] for note in notes] == ["NCCL_IB_DISABLE=1", "TORCH_DISTRIBUTED_DEBUG=DETAIL", "NCCL_ASYNC_ERROR_HANDLING",
                                                   "NCCL_QQ_QQQQQ_QQQQ", "NCCL_SOCKET_IFNAMES"]
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING is what torch and NCCL read now" in notes[2]
    assert notes[3].endswith("so it does nothing") and notes[4].endswith("the nearest is NCCL_SOCKET_IFNAME")


def test_the_library_is_read_for_unusual_names_only_and_knows_gloos(monkeypatch):
    assert "GLOO_LOG_LEVEL" in preflight.names_in_libraries()
    monkeypatch.setattr(preflight, "names_in_libraries", lambda: pytest.fail("no need to read it"))
    assert preflight.environment_notes({"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "lo", "TORCH_FR_BUFFER_SIZE": "9"}) == []
    assert not set(preflight.RENAMED) & preflight.USUAL


# --- The network -----------------------------------------------------------------------------------------------------

def test_what_a_link_should_give(tmp_path):
    assert preflight.link(RANKS[:4]) == (450e9, "NVLink's data sheet")
    assert preflight.link(RANKS)[0] == 400e9                                    # two machines: the slower of the two ways
    assert preflight.link([*RANKS[:7], facts(7, "two", nic=0)]) is None
    assert preflight.link([facts(0, device="cpu"), facts(1, device="cpu")]) is None
    assert preflight.link([facts(0, device="cuda:0 (NVIDIA L4)")] * 2) is None
    for port in range(2):
        (tmp_path / f"infiniband/mlx5_{port}/ports/1").mkdir(parents=True)
        (tmp_path / f"infiniband/mlx5_{port}/ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    assert preflight.network_rate("eth0", tmp_path) == 100e9
    shutil.rmtree(tmp_path / "infiniband")
    (tmp_path / "net/eth0").mkdir(parents=True)
    for text, rate in (("25000\n", 3.125e9), ("-1\n", 0)):
        (tmp_path / "net/eth0/speed").write_text(text)
        assert preflight.network_rate("eth0", tmp_path) == rate
    assert preflight.network_rate("none", tmp_path) == 0


def test_bandwidth_is_counted_as_nccl_tests_does():
    told, notes = preflight.bandwidth(0.25, 2**30, 8, (450e9, "NVLink's data sheet"))
    assert told == "1024 MiB in 250.00 ms, 7.52 GB/s on each link, 2% of 450 (NVLink's data sheet)"         # 7/4 * 2**30 / 0.25
    assert len(notes) == 1 and "2% of what the link should give" in notes[0]
    assert preflight.bandwidth(0.006, 2**30, 8, (450e9, ""))[1] == []
    assert preflight.bandwidth(0.5, 2**20, 2, None) == ("1 MiB in 500.00 ms, 0.00 GB/s on each link", [])


def test_a_sum_that_is_wrong_is_a_problem(monkeypatch):
    monkeypatch.setattr(preflight, "time_all_reduce", lambda buffer, setup: 1.0)
    monkeypatch.setattr(parallel, "all_sum", lambda tensor, setup: tensor * 0 + 5)
    _, (problem,) = preflight.measure(replace(ALONE, world=2))
    assert "the sum of 1 to 2 over the ranks came out as 5, and is 3" in problem
    monkeypatch.setattr(parallel, "all_sum", lambda tensor, setup: tensor * 0 + 3)
    assert preflight.measure(replace(ALONE, world=2))[1] == []


# --- The batch -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("read, total, factors", [
    ([[(2, 32)] * 2] * 2, 256, "2 processes x 2 micro-batches x 2 x 32"),
    ([[(2, 32)] * 3] * 2, 384, "2 processes x 3 micro-batches x 2 x 32"),
    ([[(2, 32), (1, 32)], [(2, 32)]], 160, "rank 0: 2 x 32 + 1 x 32; rank 1: 2 x 32"),
    ([[(4, 32)], []], 128, "rank 0: 4 x 32; rank 1: nothing")])
def test_the_batch_is_what_the_ranks_have_read(monkeypatch, capsys, read, total, factors):
    monkeypatch.setattr(parallel, "from_all", lambda mine, setup: [mine, *enumerate(read[1:], 1)])
    mine = [(torch.zeros(shape), None) for shape in read[0]]
    preflight.refuse_other_batch(mine, total, ALONE)
    assert f"{total} tokens in the first step: {factors}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        preflight.refuse_other_batch(mine, total + 32, ALONE)
    assert stop.value.code == 2 and f"batch_tokens = {total + 32} tokens, and the ranks have read {total} ({factors})" in capsys.readouterr().err


# --- Real processes --------------------------------------------------------------------------------------------------

def test_one_and_two_processes_read_the_same_tokens_a_step(data, tmp_path):      # noqa: F811
    """The whole of what is printed, on one machine; none of it but two lines with one process."""
    one = train(data, tmp_path / "one", "--max_steps=2")
    assert "read        256 tokens in the first step: 1 processes x 4 micro-batches x 2 x 32" in one
    assert "determinism on:" in one and "topology" not in one and "all-reduce" not in one
    os.environ["NCCL_IB_DISABLE"] = "1"
    try:
        two = launch(data, tmp_path / "two", "--max_steps=2", "--deterministic=False", processes=2)
    finally:
        del os.environ["NCCL_IB_DISABLE"]
    assert "read        256 tokens in the first step: 2 processes x 2 micro-batches x 2 x 32" in two
    assert "determinism off" in two and re.search(r"topology +\S+: ranks 0-1 on cpu; over lo \(127\.0\.0\.1\)", two), two
    assert re.search(r"all-reduce +4 MiB in [\d.]+ ms, [\d.]+ GB/s on each link\n", two), two
    assert two.count("note: NCCL_IB_DISABLE=1 gives up InfiniBand") == 1
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)
    assert not list((tmp_path / "two").rglob(".trial*"))


DIFFER = """
import os, runpy, sys
folder = {root!r}
if os.environ["RANK"] == "1":
    for name, module in list(sys.modules.items()):          # what the copy has of its own
        file = getattr(module, "__file__", None) or ""
        if file.startswith(folder + "/") and "site-packages" not in file and name != "__main__":     # .venv lies there too
            del sys.modules[name]
    folder = {folder!r} + "/copy"
    sys.path[:0] = [folder, {folder!r} + "/site"]
    sys.argv += ["--seed=2", "--eval_every=7", "--data_dir=" + {folder!r} + "/other"]
runpy.run_path(folder + "/train.py", run_name="__main__")
"""


def test_ranks_with_other_settings_data_code_and_packages_are_refused_at_once(data, tmp_path, monkeypatch):      # noqa: F811
    """Rank 1 has another seed, interval of evaluation and tokenizer, an edited copy of the code, and another numpy."""
    letters = byte_tokenizer()
    monkeypatch.setattr(test_train, "byte_tokenizer", lambda: Tokenizer(
        letters.token_bytes[:256][::-1], PATTERNS["gpt4"], {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)}))
    make_data(tmp_path / "other")
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".git", "out", "data", "tests", "bench", "workshop", ".*"))
    with open(copy / "model.py", "a") as file:
        file.write("# edited here only\n")
    fake = tmp_path / "site/numpy-9.9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")
    (tmp_path / "differ.py").write_text(DIFFER.format(root=str(ROOT), folder=str(tmp_path)))
    code, said = Run(data, tmp_path / "out", words=[tmp_path / "differ.py"]).wait()
    found = [line for line in said.splitlines() if "but rank 0 on" in line]
    named = [re.search(r"rank 1 on \S+: ([\w ()]+) = .*, but rank 0", line)[1] for line in found]
    assert code != 0 and {"numpy", "code", "config hash", "data (content)", "data_dir", "seed", "eval_every"} == set(named) - {"commit"}, said
    assert len(found) == len(set(found)) and "Traceback" not in said
    assert not (tmp_path / "out/pretrain").exists() or not list((tmp_path / "out/pretrain").iterdir())
    assert any("seed = 2, but" in line and "has 1" in line for line in found)


def test_ranks_that_do_not_meet_say_where_and_what_to_do(data, tmp_path):      # noqa: F811
    done = run("train.py", f"--data_dir={data}", f"--out_dir={tmp_path}", *SHAPE, "--hang_timeout=2",
               RANK="1", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="9")
    assert done.returncode == 2 and "rank 1 on" in done.stderr and "did not find the other 1 within 2 seconds" in done.stderr, done.stderr
    assert "localhost:9 can not be reached from here: Connection refused" in done.stderr and "firewall" in done.stderr
    assert "Traceback" not in done.stderr
