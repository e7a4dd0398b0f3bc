"""A stage's folder: taken, compared with what it was begun from, done or to be continued; when checkpoints are due."""
import json
from types import SimpleNamespace

import pytest
import torch

from configurator import configure
from engine import checkpoint, parallel, run
from engine.run import fingerprint, open_run, save_when_due
from small import ALONE, ROOT


def config_of(out, *words):
    return configure({"__file__": str(ROOT / "train.py")}, [f"--out_dir={out}", *words])


def refused(capsys, function, *arguments, **named):
    with pytest.raises(SystemExit) as stop:
        function(*arguments, **named)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def data(tmp_path):
    (tmp_path / "index.json").write_text("one")
    return tmp_path / "index.json"


def test_a_run_is_begun_continued_and_done(tmp_path, data, capsys):
    folder, lock = open_run(config_of(tmp_path), "stage", ALONE, data=data)
    assert folder == tmp_path / "stage" and json.loads((folder / "config.json").read_text())["script"] == "train"
    assert "is in use by" in refused(capsys, open_run, config_of(tmp_path), "stage", ALONE, data=data)
    lock.close()
    folder, lock = open_run(config_of(tmp_path, "--log_every=3"), "stage", ALONE, data=data)
    assert lock is not None     # a key that may change
    lock.close()
    (folder / "result.json").write_text("{}")
    assert open_run(config_of(tmp_path), "stage", ALONE, data=data) == (folder, None)
    assert "already done" in capsys.readouterr().out


@pytest.mark.parametrize("done", [False, True])
def test_other_settings_and_other_inputs_are_refused_together(tmp_path, data, capsys, done):
    folder, lock = open_run(config_of(tmp_path), "stage", ALONE, data=data)
    lock.close()
    if done:
        (folder / "result.json").write_text("{}")
    before = {path.name: path.read_text() for path in folder.glob("*.json")}
    data.write_text("two")
    said = refused(capsys, open_run, config_of(tmp_path, "--seed=2"), "stage", ALONE, data=data)
    assert f"in the same shape, with --init_from={folder}." in said
    assert "begun with seed = 1, now it is 2" in said and f"begun with data ({data}) of other content" in said
    assert {path.name: path.read_text() for path in folder.glob("*.json")} == before


def full_of(folder, config, data, step=4, **changed):
    """A full checkpoint in a run's folder, as a run with these settings and inputs writes it; its own files are kept."""
    kept = {name: (folder / name).read_bytes() for name in checkpoint.RECORD if (folder / name).exists()}
    run.record(config, folder, {"data": fingerprint(data)})
    made = checkpoint.save_full(folder, step, {"model": torch.nn.Linear(2, 2)}, {}, changed, ALONE)
    for name in checkpoint.RECORD:
        (folder / name).unlink()
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    return made


@pytest.mark.parametrize("own_config", [True, False])
def test_a_full_checkpoint_of_another_run_is_refused(tmp_path, data, capsys, own_config):
    """Of other settings, other data, another stage; with and without the folder's own config.json. Not of a run whose
    changes change nothing, and not a damaged one, which is skipped later."""
    folder = tmp_path / "stage"
    if own_config:
        open_run(config_of(tmp_path), "stage", ALONE, data=data)[1].close()
    full_of(folder, config_of(tmp_path, "--log_every=3", "--attention=fp32"), data)
    open_run(config_of(tmp_path), "stage", ALONE, data=data)[1].close()
    assert (f"{folder}/config.json is missing; the full" in capsys.readouterr().out) == (not own_config)
    other = data.with_name("other.json")
    other.write_text("two")
    foreign = full_of(folder, config_of(tmp_path, "--seed=2"), other, step=6)
    if not own_config:
        (folder / "config.json").unlink()
    said = refused(capsys, open_run, config_of(tmp_path), "stage", ALONE, data=data)
    assert all(f"{foreign} was begun with {what}" in said for what in ("seed = 2, now it is 1", f"data ({data}) of other content"))
    assert "move away" in said and "Give the old value" in said and "00004" not in said
    (foreign / "config.json").write_text("damaged")
    open_run(config_of(tmp_path), "stage", ALONE, data=data)[1].close()
    sft = configure({"__file__": str(ROOT / "sft.py")}, [f"--out_dir={tmp_path}"])
    full_of(folder, sft, data, step=8)
    said = refused(capsys, open_run, config_of(tmp_path), "stage", ALONE, data=data)
    assert "begun with script = 'sft', now it is 'train'" in said


def test_what_says_nothing_of_its_run_is_refused(tmp_path, data, capsys):
    full = checkpoint.save_full(tmp_path / "stage", 4, {"model": torch.nn.Linear(2, 2)}, {}, {}, ALONE)
    for _ in range(2):
        assert f"{full} does not say which run" in refused(capsys, open_run, config_of(tmp_path), "stage", ALONE, data=data)
    (tmp_path / "done" / "stage").mkdir(parents=True)
    (tmp_path / "done" / "stage" / "result.json").write_text("{}")
    said = refused(capsys, open_run, config_of(tmp_path / "done"), "stage", ALONE, data=data)
    assert "holds a finished run" in said and "config.json is missing" in said


@pytest.mark.parametrize("form", [b"\xff\xfe", b"[]", b"{", b"5", b"{}", b'{"config": 5}', b'{"config": {}, "script": 1}',
                                  b"[" * 10 ** 5])
@pytest.mark.parametrize("name", ["config.json", "inputs.json"])
def test_records_of_another_form_are_sentences(tmp_path, data, capsys, name, form):
    open_run(config_of(tmp_path), "stage", ALONE, data=data)[1].close()
    (tmp_path / "stage" / name).write_bytes(form)
    assert str(tmp_path / "stage") in refused(capsys, open_run, config_of(tmp_path), "stage", ALONE, data=data)


def test_fingerprint(tmp_path):
    for name in ("a.safetensors", "config.json", "training.log"):
        (tmp_path / name).write_text(name)
    first = fingerprint(tmp_path)
    (tmp_path / "training.log").write_text("more")
    assert fingerprint(tmp_path) == first and len(first) == 16
    (tmp_path / "a.safetensors").write_text("more")
    assert fingerprint(tmp_path) not in (first, fingerprint(tmp_path / "config.json"))
    listed = lambda **files: (tmp_path / "manifest.json").write_text(json.dumps({"files": files}))
    listed(model={"sha256": "a"}, **{"config_hash.txt": {"sha256": "b"}})
    with_manifest = fingerprint(tmp_path)
    (tmp_path / "a.safetensors").write_text("not looked at")
    assert fingerprint(tmp_path) == with_manifest != first
    listed(model={"sha256": "a"}, **{"config_hash.txt": {"sha256": "by another commit"}})
    assert fingerprint(tmp_path) == with_manifest
    listed(model={"sha256": "c"}, **{"config_hash.txt": {"sha256": "b"}})
    assert fingerprint(tmp_path) != with_manifest


@pytest.fixture
def save(monkeypatch, tmp_path):
    """save(step, **intervals) -> what a run of 7 steps wrote and pruned after that step."""
    calls = []
    monkeypatch.setattr(run.checkpoint, "save_light", lambda folder, step, *_: calls.append(("light", step)))
    monkeypatch.setattr(run.checkpoint, "save_full", lambda *words: (calls.append(("full", words[1])), words[-1]()))
    monkeypatch.setattr(run.checkpoint, "prune", lambda folder, kind, keep, best: calls.append((f"prune {kind}", keep)))

    def make(step, save_light, save_full, value=1.0):
        calls.clear()
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.bias, value)
        config = SimpleNamespace(save_light=save_light, save_full=save_full, keep=5)
        saved = save_when_due(tmp_path, step, 7, config, {"model": model}, {}, None, {}, ALONE)
        checkpoint.wait()
        assert (saved > 0) == bool(calls)
        return list(calls)
    make.calls = calls
    return make


def test_checkpoints_are_saved_when_they_are_due(save, capsys):
    made = {step: [kind for kind, _ in save(step, 2, 3)] for step in range(1, 8)}
    light, full, both = ["light", "prune light"], ["full", "prune full"], ["light", "full", "prune light", "prune full"]
    assert made == {1: [], 2: light, 3: full, 4: light, 5: [], 6: both, 7: both}     # at the end in any case
    assert save(4, 2, 3) == [("light", 4), ("prune light", 5)]
    assert [save(step, 0, 0) != [] for step in (6, 7)] == [False, True]


def test_weights_that_are_not_finite_are_not_saved(save, capsys):
    assert save(5, 2, 3, value=float("nan")) == []     # not looked at when nothing is due
    for value in (float("nan"), float("inf")):
        assert "no longer finite" in refused(capsys, save, 6, 2, 3, value=value) and save.calls == []


def test_start_settles_determinism_dtype_and_a_seed_for_each_rank(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    for has, name in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        torch.use_deterministic_algorithms(False)
        setup = parallel.start("cpu", "auto", deterministic=None if has else False, threads=1, seed=5)
        assert (setup.rank, setup.world, setup.dtype) == (1, 1, name) and torch.initial_seed() == 6
        assert torch.are_deterministic_algorithms_enabled() == has
    said = refused(capsys, parallel.start, "tpu", "fp8", threads=-1, seed=2 ** 64)
    assert all(word in said for word in ("'tpu'", "'fp8'", "threads", "seed"))
