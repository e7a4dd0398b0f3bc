"""doctor.py: every damage in a run's folder is a sentence, and all that differs between two runs is listed."""
import json
import os
import shutil

import pytest

import configurator
import doctor
from configurator import configure
from engine import checkpoint
from engine.files import lock_folder
from small import ALONE, byte_tokenizer, small_llama
from test_checkpoint import damage, save, trained
from test_train import data, train                      # noqa: F401 (a fixture)


def run(capsys, *words):
    """doctor.py's exit status and what it printed."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        doctor.main(configure(vars(doctor), [str(word) for word in words]))
    said = capsys.readouterr()
    return stop.value.code, said.out + said.err


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """An out_dir with two stages and four checkpoints, one of them set aside."""
    out = tmp_path_factory.mktemp("out")
    model, optimizer = trained(1)
    for stage in ("pretrain", "sft"):
        checkpoint.save_light(out / stage, 5, model, byte_tokenizer(), ALONE)
        save(out / stage, 5, model, optimizer)
    shutil.copytree(out / "sft" / "full_00000005", out / "sft" / "full_00000007.abandoned-1")
    (out / "sft" / "full_00000007.abandoned-1" / "manifest.json").unlink()
    return out


def test_sound_checkpoints_are_told_as_such(sound, capsys):
    code, said = run(capsys, f"--verify={sound}")
    assert code == 0 and said.count("sound  ") == 4 and "abandoned" not in said and "nothing found" in said
    code, said = run(capsys, f"--verify={sound}/sft")
    assert code == 0 and said.count("sound  ") == 2
    code, said = run(capsys, f"--verify={sound}/sft/full_00000005")
    assert code == 0 and said.count("sound  ") == 1
    code, said = run(capsys, f"--verify={sound}/sft/full_00000007.abandoned-1")
    assert code == 2 and "no checkpoint there" in said
    assert run(capsys, f"--verify={sound}/none")[0] == 2


EXPECTED = {"bit": "other content", "truncated": "bytes, the manifest says", "missing": "is missing",
            "manifest": "has no manifest.json", "half manifest": "manifest.json is damaged", "unrenamed": "was being written"}


@pytest.mark.parametrize("name", ["step_00000005", "full_00000005"])
@pytest.mark.parametrize("kind", EXPECTED)
def test_each_damage_is_a_sentence(sound, tmp_path, capsys, kind, name):
    shutil.copytree(sound, tmp_path / "out")
    damage(kind, tmp_path / "out" / "sft" / name)
    for place in ("out", "out/sft"):
        code, said = run(capsys, f"--verify={tmp_path / place}")
        assert code == 1 and said.count(EXPECTED[kind]) == 1 and "1 found" in said, said
        assert f"sft/{name}" in next(line for line in said.splitlines() if EXPECTED[kind] in line)
        assert said.count("sound  ") == (3 if place == "out" else 1)


def test_a_folder_with_another_steps_name(sound, tmp_path):
    folder = shutil.copytree(sound / "sft" / "full_00000005", tmp_path / "full_00000009")
    assert doctor.faults_of(folder) == [f"{folder} is named as step 9 and holds step 5"]
    (folder / "manifest.json").write_text('{"files": {}}')
    assert "damaged" in doctor.faults_of(folder)[0]


def test_every_bit_of_a_manifest_counts(sound, tmp_path):
    """A flipped bit in it is never an error of the program, and unnoticed only where it changes nothing that is said."""
    folder = shutil.copytree(sound / "sft" / "full_00000005", tmp_path / "full_00000005")
    content = (folder / "manifest.json").read_bytes()
    said = json.loads(content)["files"]
    for at in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        (folder / "manifest.json").write_bytes(flipped)
        if not doctor.faults_of(folder):
            assert json.loads(flipped)["files"] == said, (at, flipped[at - 20:at + 20])


def test_a_live_run_is_not_at_fault_for_what_it_is_writing(sound, tmp_path, capsys):
    shutil.copytree(sound / "sft", tmp_path / "sft")
    os.rename(tmp_path / "sft" / "full_00000005", tmp_path / "sft" / "full_00000005.tmp")
    lock = lock_folder(tmp_path / "sft")
    assert run(capsys, f"--verify={tmp_path}")[0] == 0
    lock.close()
    assert run(capsys, f"--verify={tmp_path}")[0] == 1


def test_what_differs_between_two_runs(data, tmp_path, capsys, monkeypatch):
    settings = ["--max_steps=4", "--eval_every=2"]
    monkeypatch.setattr(configurator, "git_commit", lambda: "abcdef")
    for name, more in (("one", []), ("same", []), ("other", ["--learning_rate=1e-3", "--log_every=2"])):
        train(data, tmp_path / name, *settings, *more)
    assert run(capsys, f"--diff={tmp_path}/one,{tmp_path}/same") == (0, "nothing found\n")
    code, said = run(capsys, f"--diff={tmp_path}/one,{tmp_path}/other")
    assert code == 1 and said.startswith(f"first {tmp_path}/one, then {tmp_path}/other:\n")
    assert "pretrain: learning_rate: 0.003, 0.001" in said
    assert "pretrain: log_every (changes no result): 1, 2" in said and "out_dir" not in said
    assert "log: different from step 1 on:" in said and "lr 0.003, 0.001" in said

    # Changes that no commit holds, in both.
    one, same = (json.loads((tmp_path / name / "pretrain" / "config.json").read_text()) for name in ("one", "same"))
    for name, saved in (("one", one), ("same", same)):
        (tmp_path / name / "pretrain" / "config.json").write_text(json.dumps({**saved, "commit": "abcdef+"}))
    code, said = run(capsys, f"--diff={tmp_path}/one,{tmp_path}/same")
    assert code == 1 and "commit: both were run with changes to abcdef" in said and "1 found" in said

    # A run with the same settings, on other data, by another commit, elsewhere; the logs part at step 3.
    run_of = lambda name: tmp_path / name / "pretrain"
    saved = json.loads((run_of("same") / "config.json").read_text())
    saved.update(commit="c0ffee", versions={**saved["versions"], "torch": "9.9"})
    saved["environment"].update(WORLD_SIZE="4", MASTER_PORT="1234")
    (run_of("same") / "config.json").write_text(json.dumps(saved))
    (run_of("same") / "inputs.json").write_text(json.dumps({"data": "others"}))
    lines = [json.loads(line) for line in (run_of("same") / "log.jsonl").read_text().splitlines()]
    for record in lines:
        if record["step"] == 3 and "loss" in record:
            record["loss"] += 1e-9
    lines = [record for record in lines if record["step"] < 4]
    (run_of("same") / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    code, said = run(capsys, f"--diff={run_of('one')},{run_of('same')}")
    found = said.splitlines()
    assert code == 1 and len(found) == 8, said
    assert any(line.startswith("content of data: ") and line.endswith("'others'") for line in found)
    assert any(line.startswith("commit: ") and line.endswith("'c0ffee'") for line in found)
    assert any(line.startswith("version of torch: ") and line.endswith("'9.9'") for line in found)
    assert "processes: 1, 4" in found and "MASTER_PORT" not in said
    assert any(line.startswith("log: the same up to step 2, then different from step 3 on: loss ") for line in found)
    assert "log: ends at step 4, 3" in found and found[-1] == "6 found"


def test_nothing_to_do_is_said(capsys, tmp_path):
    assert "--verify=DIR" in run(capsys)[1]
    assert run(capsys, f"--diff={tmp_path}")[0] == 2
    code, said = run(capsys, f"--diff={tmp_path},{tmp_path}")
    assert code == 2 and "no run there that can be compared" in said
    code, said = run(capsys, f"--order={tmp_path}")
    assert code == 2 and f"--order={tmp_path}: no run there" in said and "log_samples" not in said
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"script": "train", "config": [], "versions": 1}')
    code, said = run(capsys, f"--diff={tmp_path}/one,{tmp_path}/two")
    assert code == 2 and all(f"{name!r} is missing, damaged" in said for name in ("config", "versions", "environment"))
