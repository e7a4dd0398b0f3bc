"""Checkpoints: exact, whole or not there, and every kind of damage found."""
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from engine import checkpoint
from engine.files import read_json
from engine.manifest import abandon, newest, publish, verify
from engine.optim import adamw
from programs import Program, run
from small import ALONE, ROOT, byte_tokenizer, small_llama


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 256, (2, 16))
    model(ids).logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(steps=3):
    model = small_llama(1)
    optimizer = adamw(model, 1e-3, 0.1)
    for i in range(steps):
        step(model, optimizer, i)
    return model, optimizer


def bits(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def save(run, at, model, optimizer, setup=ALONE, in_background=False, then=None, **state):
    return checkpoint.save_full(run, at, {"model": model}, {"model": optimizer}, state, setup, in_background, then)


def test_everything_comes_back_and_the_next_step_is_the_same(tmp_path):
    model, optimizer = trained()
    torch.manual_seed(99)
    folder = save(tmp_path, 3, model, optimizer, tokens=123)
    drawn = torch.rand(5)
    other = small_llama(2)
    fresh = adamw(other, 1e-3, 0.1)
    state = checkpoint.load_full(folder, {"model": other}, {"model": fresh}, ALONE)
    assert state["tokens"] == 123 and state["step"] == 3 and torch.equal(torch.rand(5), drawn)
    assert torch.equal(bits(other), bits(model))
    step(model, optimizer, 7), step(other, fresh, 7)
    assert torch.equal(bits(other), bits(model))


def test_loading_makes_no_optimizer_step():
    """A helper of torch's makes the moments by stepping, which leaves the step count at 1 and the first real step wrong."""
    model = small_llama(1)
    touched, plain = adamw(model, 1e-3, 0.1), None
    checkpoint._make_moments({"model": touched})
    twin = small_llama(1)
    plain = adamw(twin, 1e-3, 0.1)
    step(model, touched, 5), step(twin, plain, 5)
    assert torch.equal(bits(model), bits(twin))


def test_files_are_flushed_before_the_rename_and_their_folder_after_it(tmp_path, monkeypatch):
    model, done, fsync, replace = small_llama(1), [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(Path(new).name), replace(old, new)))
    folder = checkpoint.save_light(tmp_path, 1, model, byte_tokenizer(), ALONE)
    renamed = done.index("step_00000001")
    assert {path.stat().st_ino for path in folder.iterdir()} <= set(done[:renamed])
    assert tmp_path.stat().st_ino in done[renamed:]


def damage(kind, folder):
    victim = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    if kind == "bit":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 16
        victim.write_bytes(content)
    elif kind == "truncated":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif kind == "missing":
        victim.unlink()
    elif kind == "manifest":
        (folder / "manifest.json").unlink()
    elif kind == "no files":
        (folder / "manifest.json").write_text('{"files": []}')
    elif kind == "empty":
        (folder / "manifest.json").write_text('{"files": {}}')
    elif kind == "half manifest":
        (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:40])
    elif kind == "unrenamed":
        folder.rename(folder.with_name(folder.name + ".tmp"))


@pytest.mark.parametrize("kind", ["bit", "truncated", "missing", "manifest", "half manifest", "no files", "empty", "unrenamed"])
def test_damage_is_found_and_the_one_before_is_taken(tmp_path, kind, capsys):
    model, optimizer = trained()
    before = save(tmp_path, 10, model, optimizer)
    last = save(tmp_path, 20, model, optimizer)
    assert newest(tmp_path, "full") == last and verify(last) == []
    damage(kind, last)
    capsys.readouterr()
    assert newest(tmp_path, "full") == before
    assert kind == "unrenamed" or "full_00000020" in capsys.readouterr().err       # it says what it skipped
    state = checkpoint.resume(tmp_path, {"model": model}, {"model": optimizer}, ALONE)
    assert state["step"] == 10
    assert kind != "unrenamed" or not list(tmp_path.glob("*.tmp"))                 # leftovers of the killed run are gone
    again = save(tmp_path, 20, model, optimizer)                                   # the broken step can be written anew
    assert verify(again) == [] and newest(tmp_path, "full") == again


def test_everything_is_on_the_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    temporary, final, events = tmp_path / "full.tmp", tmp_path / "full", []
    (temporary / "state").mkdir(parents=True)
    for name in ("state.json", "state/a.distcp"):
        (temporary / name).write_text(name)
    inside = {path.stat().st_ino for path in temporary.rglob("*")}     # the inner folder too: it holds its files' names
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(os, "replace", lambda old, new, real=os.replace: (events.append(new), real(old, new)))
    publish(temporary, final)
    manifest, named = events.index((final / "manifest.json").stat().st_ino), events.index(final)
    assert inside <= set(events[:manifest]) and final.stat().st_ino in events[manifest:named]
    assert events[named + 1:] == [tmp_path.stat().st_ino]


def test_a_step_that_is_reached_again_keeps_what_was_there_under_other_names(tmp_path):
    final = tmp_path / "full_00000001"
    for content in ("first", "second", "third"):
        final.with_suffix(".tmp").mkdir()
        (final.with_suffix(".tmp") / "state.json").write_text(content)
        publish(final.with_suffix(".tmp"), final)
    assert {path.name: (path / "state.json").read_text() for path in tmp_path.iterdir()} == {
        "full_00000001": "third", "full_00000001.abandoned-1": "first", "full_00000001.abandoned-2": "second"}


def test_a_resume_sets_aside_what_lies_ahead(tmp_path):
    model, optimizer = trained()
    for at in (10, 20):
        checkpoint.save_light(tmp_path, at, model, byte_tokenizer(), ALONE)
    save(tmp_path, 10, model, optimizer)
    checkpoint.resume(tmp_path, {"model": model}, {"model": optimizer}, ALONE)
    assert newest(tmp_path, "light").name == "step_00000010" and (tmp_path / "step_00000020.abandoned-1").is_dir()


def test_prune_keeps_the_newest_that_are_sound(tmp_path):
    model, optimizer = trained(1)
    for at in (1, 2, 3, 4, 5):
        save(tmp_path, at, model, optimizer)
    damage("manifest", tmp_path / "full_00000005"), damage("bit", tmp_path / "full_00000003")
    (tmp_path / "full_00000001.tmp").mkdir()            # left of a removal that was interrupted
    left = lambda: sorted(int(p.name[5:]) for p in tmp_path.glob("full_*"))
    checkpoint.prune(tmp_path, "full", 2)
    assert left() == [2, 3, 4, 5]                       # the broken ones never count as kept
    checkpoint.prune(tmp_path, "full", 3)
    assert left() == [2, 3, 4, 5]                       # of three that are asked for there are only two
    checkpoint.prune(tmp_path, "full", 1)
    assert left() == [4, 5]
    checkpoint.prune(tmp_path, "full", 0)
    assert left() == [4, 5]


def test_what_was_set_aside_goes_when_the_run_is_there_again(tmp_path):
    model, optimizer = trained(1)
    for at in (2, 3, 4):
        save(tmp_path, at, model, optimizer)
    for at in (3, 4):
        abandon(tmp_path / f"full_0000000{at}")
    (tmp_path / "step_00000002.abandoned-1").mkdir()    # of the other kind
    left = lambda: sorted(path.name for path in tmp_path.glob("full_*"))
    set_aside = [f"full_0000000{at}.abandoned-1" for at in (3, 4)]
    checkpoint.prune(tmp_path, "full", 2)
    assert left() == ["full_00000002", *set_aside]      # the run has not come that far again
    save(tmp_path, 3, model, optimizer)
    damage("bit", tmp_path / "full_00000003")
    checkpoint.prune(tmp_path, "full", 2)
    assert set(left()) > set(set_aside)                 # nor this way
    checkpoint.prune(tmp_path, "full", 0)
    save(tmp_path, 4, model, optimizer)                 # to one more than are kept
    checkpoint.prune(tmp_path, "full", 0)
    assert set(left()) > set(set_aside)                 # where all is kept, this too
    checkpoint.prune(tmp_path, "full", 3)
    assert left() == ["full_00000002", "full_00000003", "full_00000004"]
    assert (tmp_path / "step_00000002.abandoned-1").exists()


def test_prune_keeps_the_best_as_well(tmp_path):
    model = small_llama(1)
    for at, loss in enumerate((3.0, 1.0, 1.5, None, 2.0, 2.5), start=1):
        checkpoint.save_light(tmp_path, at, model, byte_tokenizer(), ALONE, {"val_loss": loss})
    left = lambda: sorted(int(p.name[5:]) for p in tmp_path.glob("step_*"))
    damage("truncated", tmp_path / "step_00000002")
    checkpoint.prune(tmp_path, "light", 2, keep_best=1)
    assert left() == [3, 5, 6]                          # the best that is sound, not the best that was
    checkpoint.prune(tmp_path, "light", 1)
    assert left() == [6]


def test_another_shape_is_refused(tmp_path, capsys):
    model, optimizer = trained(1)
    folder = save(tmp_path, 1, model, optimizer)
    other = small_llama(1, n_inner=48)
    with pytest.raises(SystemExit) as stop:
        checkpoint.load_full(folder, {"model": other}, {"model": adamw(other, 1e-3, 0.1)}, ALONE)
    assert stop.value.code == 2 and "does not fit this model" in capsys.readouterr().err


def test_other_threads_are_told(tmp_path, capsys):
    from dataclasses import replace
    model, optimizer = trained(1)
    folder = save(tmp_path, 1, model, optimizer)
    checkpoint.load_full(folder, {"model": model}, {"model": optimizer}, replace(ALONE, threads=2))
    assert "--threads=1 continues exactly" in capsys.readouterr().out


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB; skips where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_disk_full_loses_nothing(small_disk, capsys):
    model, optimizer = trained(1)
    first = save(small_disk, 1, model, optimizer)
    with pytest.raises(SystemExit) as stop:
        for at in range(2, 50):
            save(small_disk, at, model, optimizer)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "could not be written" in said and "No space left" in said
    assert verify(first) == [] and newest(small_disk, "full") is not None and not list(small_disk.glob("*.tmp"))
    with pytest.raises(SystemExit):
        for at in range(2, 50):
            checkpoint.save_light(small_disk, at, model, byte_tokenizer(), ALONE)
    assert "could not be written" in capsys.readouterr().err and not list(small_disk.glob("*.tmp"))


def held_back(monkeypatch):
    """Saves in the background do not write before this event is set."""
    go, real = threading.Event(), checkpoint.dcp.save
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *words, **more: (go.wait(60), real(*words, **more)))
    return go


def test_a_save_in_the_background_has_the_state_of_its_step(tmp_path, monkeypatch):
    """Twice, since the second one finds the memory that the first one used; lists in the state go on changing as well."""
    model, optimizer = trained()
    for at in (3, 4):
        with monkeypatch.context() as patch:
            go, window = held_back(patch), [at]
            torch.manual_seed(at)
            folder = save(tmp_path, at, model, optimizer, in_background=True, window=window)
            drawn, weights, moments = torch.rand(5), bits(model), optimizer.state[model.model.norm.weight]["exp_avg"].clone()
            step(model, optimizer, at)
            window.append("later")
            assert not folder.exists() and not torch.equal(bits(model), weights)
            go.set()
            checkpoint.wait()
        other, fresh = small_llama(2), None
        fresh = adamw(other, 1e-3, 0.1)
        state = checkpoint.load_full(folder, {"model": other}, {"model": fresh}, ALONE)
        assert verify(folder) == [] and state["window"] == [at] and torch.equal(bits(other), weights)
        assert torch.equal(fresh.state[other.model.norm.weight]["exp_avg"], moments) and torch.equal(torch.rand(5), drawn)


def test_one_save_at_a_time_and_what_is_old_goes_last(tmp_path, monkeypatch):
    model, optimizer = trained(1)
    save(tmp_path, 1, model, optimizer)
    go, seen = held_back(monkeypatch), []
    second = save(tmp_path, 2, model, optimizer, in_background=True,
                  then=lambda: (seen.append(second.exists()), checkpoint.prune(tmp_path, "full", 1)))
    assert [path.name for path in tmp_path.glob("full_????????")] == ["full_00000001"]      # until there is another
    threading.Timer(0.3, go.set).start()
    checkpoint.save_light(tmp_path, 2, model, byte_tokenizer(), ALONE)                      # waits
    assert seen == [True] and [path.name for path in tmp_path.glob("full_*")] == ["full_00000002"]


@pytest.mark.parametrize("next_call", ["save", "wait"])
def test_a_full_disk_in_the_background_is_told_by_the_next_save_or_the_end(small_disk, capsys, next_call):
    model, optimizer = trained(1)
    first = save(small_disk, 1, model, optimizer)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
    save(small_disk, 2, model, optimizer, in_background=True)
    with pytest.raises(SystemExit) as stop:
        checkpoint.wait() if next_call == "wait" else save(small_disk, 3, model, optimizer, in_background=True)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "full_00000002 could not be written" in said
    assert int(said.split(" bytes are free")[0].split("(")[-1].replace(",", "")) <= 8192
    assert newest(small_disk, "full") == first and not list(small_disk.glob("*.tmp"))
    (small_disk / "filler").unlink(), shutil.rmtree(first)
    save(small_disk, 2, model, optimizer, in_background=True), checkpoint.wait()            # nothing is left of the failure
    assert newest(small_disk, "full").name == "full_00000002"


KILLED = """
import os, signal, sys, torch
sys.path[:0] = [{root!r}, {tests!r}]
from test_checkpoint import trained, save
from engine import checkpoint
count, armed, model = 0, False, trained(1)
def die_at(event, args):
    # An audit hook sees every open, rename and removal that Python does: the target-th one is the last.
    global count
    if event in ("open", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree") and armed:
        count += 1
        if count == target:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die_at)

def second_save(folder):
    global armed
    save(folder, 1, *model)
    armed = True
    save(folder, 2, *model, in_background=True, then=lambda: checkpoint.prune(folder, "full", 1))
    checkpoint.wait()
    os._exit(count)

# Each in a child of its own, forked, since importing takes longer than all of it.
targets, events = [0], 0
for target in targets:
    if not (child := os.fork()):
        second_save(sys.argv[1] + f"/killed{{target}}")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if target == 0:
        events = code
        targets += sorted({{1, *range(2, events, 3), events - 4, events - 1}})
    print(target, code)
"""


def test_kill_in_the_middle_of_a_save(tmp_path):
    """kill -9 at points all through a save in the background and the removal of the one before: what is found afterwards is
    whole, the old one or the new one, and nothing else bears the name of a checkpoint."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(root=str(ROOT), tests=str(ROOT / "tests")))
    done = run(script, tmp_path)
    (_, events), *killed = [map(int, line.split()) for line in done.stdout.splitlines()]
    assert events > 10 and len(killed) > events / 3, done.stderr
    for at, code in killed:
        folder = tmp_path / f"killed{at}"
        assert code == -9
        found = newest(folder, "full")
        assert found is not None and verify(found) == [] and read_json(found / "state.json")["step"] in (1, 2)
        assert not any(verify(path) for path in folder.glob("full_????????")), at


MOVED = """
import hashlib, os, sys
sys.path[:0] = [{root!r}, {tests!r}]
from dataclasses import replace
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from engine import checkpoint, parallel
from engine.optim import adamw
from small import small_llama
from test_checkpoint import save, step, trained

def said(what, model, optimizer):
    digest = hashlib.sha256()
    for name, tensor in sorted(checkpoint._tensors({{"model": model}}, {{"model": optimizer}}).items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode() + whole.contiguous().numpy().tobytes())
    print(f"{{what}} {{setup.world}} {{digest.hexdigest()}}\\n", end="", flush=True)      # a line in one piece, as ranks write at once

def sharded(model):
    "Every weight cut along its first dimension over both processes: as tensor parallelism and FSDP hold them."
    mesh, done = init_device_mesh("cpu", (2,)), {{}}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in done:
                done[id(p)] = torch.nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)]))
            module._parameters[name] = done.get(id(p))
    return model

def loaded(folder, model):
    optimizer = adamw(model, 1e-3, 0.1)
    checkpoint.load_full(folder, {{"model": model}}, {{"model": optimizer}}, setup)
    return model, optimizer

def save_and_shard():
    model, optimizer = trained()
    said("saved", model, optimizer)
    save(run, 3, model, optimizer, setup, in_background=True)
    checkpoint.wait()
    said("sharded", *(pair := loaded(run / "full_00000003", sharded(small_llama(2)))))
    save(run, 4, *pair, setup, in_background=True)
    with torch.no_grad():
        pair[0].model.norm.weight.zero_()           # the copy is being written
    checkpoint.wait()
    own = run / f"rank{{rank}}"                     # as if out_dir were on each machine's own disk
    own.mkdir()
    if setup.is_main:
        (own / "full_00000003").symlink_to(run / "full_00000003")
    try:
        checkpoint.resume(own, {{"model": model}}, {{"model": optimizer}}, setup)
    except SystemExit as end:
        print("refused", world, end.code)

run, rank = Path(sys.argv[1]), int(sys.argv[2])
alone = parallel.start("cpu", "fp32", True, 1)
for world in (2, 1, 3, 4):                  # one after the other in the same processes, since starting them takes longest
    if rank >= world:
        continue
    setup = replace(alone, rank=rank, local_rank=rank, world=world)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{{run}}/world{{world}}", rank=rank, world_size=world)
    if world == 2:
        save_and_shard()
    else:
        for at in (3, 4):
            said("plain" + str(at), *loaded(run / f"full_0000000{{at}}", small_llama(2)))
    checkpoint._own.clear()
    parallel.finish(setup)
"""


def test_other_numbers_of_processes_and_other_layouts_have_the_same_state(tmp_path):
    """2 -> 1, 3 and 4 processes; plain tensors -> shards over 2 -> plain ones. Weights and moments are the same bits."""
    script = tmp_path / "moved.py"
    script.write_text(MOVED.format(root=str(ROOT), tests=str(ROOT / "tests")))
    ranks = [Program(script, tmp_path, rank) for rank in range(4)]
    ended = [rank.wait() for rank in ranks]
    assert [code for code, _ in ended] == [0] * 4, ended
    told = [said for _, said in ended]
    assert "rank 0 those of steps 3; rank 1 none" in told[0] and "the same out_dir" in told[0]
    assert verify(tmp_path / "full_00000003") == verify(tmp_path / "full_00000004") == []
    lines = [line.split() for said in told for line in said.splitlines() if line.count(" ") == 2]
    assert lines.count(["refused", "2", "2"]) == 2
    hashes = [line for line in lines if line[0] != "refused"]
    expected = [("plain3", n) for n in (1, 3, 4)] + [("plain4", n) for n in (1, 3, 4)] + [("saved", 2), ("sharded", 2)]
    assert sorted((what, int(world)) for what, world, _ in hashes) == [(what, n) for what, n in expected for _ in range(n)]
    assert len({digest for *_, digest in hashes}) == 1, hashes
