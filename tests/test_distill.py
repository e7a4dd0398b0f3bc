"""techniques/distill.py: the loss by hand, nothing to learn from oneself, and a student that has few conversations."""
import pytest
import torch

import sft
from engine import chat, hf
from engine.monitor import read_log
from small import ALONE, byte_tokenizer, small_llama
from techniques import distill
from test_sft import uneven
from test_lora import IDS, base, tune      # noqa: F401 (base is a fixture)


def test_the_loss_by_hand():
    student, teacher = torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([[0.0, 3.0, 1.0]])
    p, q = (torch.softmax(x[0] / 2, 0) for x in (teacher, student))
    assert distill.kl_losses(student, teacher, 2.0).item() == pytest.approx(4 * (p * (p / q).log()).sum().item(), rel=1e-5)
    assert distill.kl_losses(student, student + 7, 0.5).item() == pytest.approx(0, abs=1e-6)
    far = distill.kl_losses(torch.tensor([[0.0, -300.0]]), torch.tensor([[-300.0, 0.0]]), 1.0)
    assert torch.isfinite(far).all() and far.item() == pytest.approx(300)


def test_of_itself_a_model_learns_nothing():
    model = small_llama().train()
    keep = torch.zeros(3, 19, dtype=torch.bool)
    keep[:, 5:] = True
    x, y, w = IDS[:, :-1], IDS[:, 1:], keep.float()
    itself = distill.Teacher(small_llama(), weight=1.0, temperature=3.0)
    losses = sft.weighted_losses(model, x, y, w, ALONE, teacher=itself)
    losses.sum().backward()
    assert losses.shape == (3 * 14,) and losses.abs().max() < 1e-5
    assert max(p.grad.abs().max() for p in model.parameters()) < 1e-5
    half = distill.Teacher(small_llama(), weight=0.25, temperature=3.0)
    plain = sft.weighted_losses(model, x, y, w, ALONE)
    torch.testing.assert_close(sft.weighted_losses(model, x, y, w, ALONE, teacher=half), 0.75 * plain, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in itself.model.parameters())


def test_a_student_comes_nearer_to_its_teacher(base, capsys):      # noqa: F811
    (base / "teacher").mkdir()
    teacher = small_llama(seed=9, n_layer=3)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(20)         # or its probabilities are nearly all alike
    hf.save_model(base / "teacher", teacher, byte_tokenizer())
    talks = [chat.render(byte_tokenizer(), entry["messages"])[0] for entry in uneven(8, seed=1)]

    def distance(run):
        student = hf.load_model(run / "step_00000020")[0]
        return sum(distill.kl_losses(*(model(torch.tensor([ids])) for model in (student, teacher)), 1.0).mean().item() for ids in talks)
    extra = ["--lora_rank=0", "--learning_rate=3e-3", "--epochs=4"]
    alone = tune(base, "alone", *extra)
    taught = tune(base, "taught", *extra, f"--teacher={base / 'teacher'}", "--teacher_weight=1.0", "--teacher_temperature=1.0")
    assert distance(taught) < 0.8 * distance(alone) and read_log(taught)[-1]["loss"] < 0.8 * read_log(taught)[0]["loss"]
    with pytest.raises(SystemExit) as stop:
        tune(base, "no", *extra, f"--teacher={base / 'teacher'}", "--teacher_weight=2", "--teacher_temperature=0", "--loss_chunk=4")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in said for word in ("teacher_weight", "teacher_temperature", "loss_chunk"))
