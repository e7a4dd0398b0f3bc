"""techniques/distill.py: the losses by hand, nothing to learn from oneself, and students that have little to learn from."""
import copy
import random

import pytest
import torch

import sft
import train as train_script
from configurator import configure
from engine import chat, hf
from engine.monitor import read_log
from engine.packing import collate, pack
from engine.shards import ShardWriter, write_index
from small import ALONE, byte_tokenizer, small_llama
from techniques import distill
from test_lora import IDS, base, tune      # noqa: F401 (base is a fixture)
from test_packing import PAD, talks
from test_sft import uneven

X, Y = IDS[:, :-1], IDS[:, 1:]
W = torch.ones_like(Y, dtype=torch.float32)
W[:, :5] = 0


def test_the_loss_by_hand():
    student, teacher = torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([[0.0, 3.0, 1.0]])
    p, q = (torch.softmax(x[0] / 2, 0) for x in (teacher, student))
    assert distill.kl_losses(student, teacher, 2.0).item() == pytest.approx(4 * (p * (p / q).log()).sum().item(), rel=1e-5)
    assert distill.kl_losses(student, student + 7, 0.5).item() == pytest.approx(0, abs=1e-6)
    far = distill.kl_losses(torch.tensor([[0.0, -300.0]]), torch.tensor([[-300.0, 0.0]]), 1.0)
    assert torch.isfinite(far).all() and far.item() == pytest.approx(300)


def test_softened_gradients_do_not_fade():
    """For a large T that of T^2 KL is (student - teacher) / V, both centred; without T^2 it would go to 0."""
    student, teacher = torch.randn(1, 50, requires_grad=True), torch.randn(1, 50)
    distill.kl_losses(student, teacher, 1000.0).sum().backward()
    difference = (student - teacher).detach()
    torch.testing.assert_close(student.grad, (difference - difference.mean()) / 50, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("attention", [0.0, 2.0])
def test_of_itself_a_model_learns_nothing(attention):
    model = small_llama().train()
    itself = distill.Teacher(small_llama(dropout=0.5).train(), weight=1.0, temperature=3.0, attention=attention)    # which has none
    losses = sft.weighted_losses(model, X, Y, W, ALONE, teacher=itself)
    losses.sum().backward()
    assert losses.shape == (3 * 14,) and losses.abs().max() < 1e-5
    assert max(p.grad.abs().max() for p in model.parameters()) < 1e-5
    half = distill.Teacher(small_llama(), weight=0.25, temperature=3.0, attention=attention)
    plain = sft.weighted_losses(model, X, Y, W, ALONE)
    torch.testing.assert_close(sft.weighted_losses(model, X, Y, W, ALONE, teacher=half), 0.75 * plain, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in itself.model.parameters())
    other = distill.Teacher(small_llama(seed=4), weight=1.0, temperature=3.0, attention=attention)
    assert sft.weighted_losses(model, X, Y, W, ALONE, teacher=other).min() > 0


def sharp(seed=0, **changes):
    """A model that looks at some tokens more than at others, as an untrained one hardly does."""
    model = small_llama(seed, **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(30)
            layer.self_attn.k_proj.weight.mul_(30)
    return model


@pytest.mark.parametrize("changes", [{}, {"n_layer": 1}, {"n_head": 8, "n_kv_head": 2, "qk_norm": True, "head_dim": 8}])
def test_an_attention_map_is_the_average_over_transformers_heads(changes, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = sharp(**changes)
    hf.save_model(tmp_path, model, byte_tokenizer())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        expected = theirs(X, output_attentions=True).attentions[-1].mean(1)
        _, found = distill.look(model, X, None, None, True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.amax() > 0.3 and torch.allclose(found.sum(-1), torch.ones(3, 19))


def test_a_teacher_with_other_heads_teaches_what_to_look_at():
    student, teacher = sharp(seed=2), distill.Teacher(sharp(1, n_layer=3, n_head=8, n_kv_head=4, n_embd=64), 0.0, 1.0, attention=1.0)
    optimizer, distances = torch.optim.Adam(student.parameters(), 1e-3), []
    for _ in range(60):
        objectives, losses = teacher.losses(student, X, Y)
        assert objectives.shape == losses.shape == Y.shape
        distances.append((objectives - losses).mean().item())
        optimizer.zero_grad()
        (objectives - losses).mean().backward()
        optimizer.step()
    assert distances[-1] < 0.5 * distances[0] and student.model.layers[-1].self_attn.k_proj.weight.grad.any()
    assert student.model.look is None and teacher.model.model.look is None


def test_packed_rows_are_taught_what_each_conversation_would_be():
    examples, numbers = talks([30, 12, 50, 7]), range(4)
    teacher = distill.Teacher(sharp(1, n_head=8, n_kv_head=4, n_embd=64), 0.5, 2.0, attention=1.0)
    model, end = sharp().train(), byte_tokenizer().special("<|end|>")
    found = []
    for batches in ([pack(examples, numbers, PAD)], [collate(examples, numbers, PAD)], [collate(examples, [n], PAD) for n in numbers]):
        student = copy.deepcopy(model)
        totals = sft.forward_backward(student, batches, end, ALONE, teacher=teacher)
        found.append((totals["loss"], torch.cat([p.grad.flatten() for p in student.parameters()])))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-5) and (gradient - found[0][1]).abs().max() < 1e-4 * gradient.abs().max()
    # The scale does not depend on how long or how many they are: the mean is over tokens.
    longer = sft.forward_backward(model, [collate(examples, [0, 0, 0, 0], PAD)], end, ALONE, teacher=teacher)
    once = sft.forward_backward(model, [collate(examples, [0], PAD)], end, ALONE, teacher=teacher)
    assert longer["loss"] == pytest.approx(once["loss"], rel=1e-5)


def language(folder, tokenizer, pages, seed):
    """Pages of a language with eight letters, where the last two say what may follow."""
    rng, table = random.Random(seed), random.Random(0)
    follows = {(a, b): table.sample("abcdefgh", 2) for a in "abcdefgh" for b in "abcdefgh"}
    splits = {}
    for split, count in (("train", pages), ("val", 30)):
        writer = ShardWriter(folder / "tokens", split, tokenizer.vocab_size, 10 ** 6)
        for _ in range(count):
            text = rng.choices("abcdefgh", k=2)
            while len(text) < 60:
                text.append(rng.choices(follows[text[-2], text[-1]], [0.7, 0.3])[0])
            writer.add([tokenizer.bos_id, *tokenizer.encode("".join(text)), tokenizer.eos_id])
        splits[split] = writer.close()
    write_index(folder / "tokens", tokenizer, splits)
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")


def pretrain(folder, out, data, *extra):
    train_script.main(configure(vars(train_script), [
        f"--data_dir={folder / data}", f"--out_dir={folder / out}", "--n_layer=2", "--n_head=4", "--n_kv_head=2", "--n_embd=48",
        "--n_inner=96", "--block_size=64", "--batch_tokens=1024", "--micro_batch_size=16", "--max_steps=160", "--learning_rate=6e-3",
        "--eval_every=1000", "--log_every=40", "--save_full=0", "--device=cpu", "--dtype=fp32", "--threads=1", "--compile=False", *extra]))
    return folder / out / "pretrain"


def test_where_text_is_scarce_a_teacher_helps_and_where_it_is_not_it_need_not(tmp_path, capsys):
    """In pretraining: a student with 4 pages, alone and with a teacher that has seen 400."""
    for name, pages in (("much", 400), ("little", 4)):
        language(tmp_path / name, byte_tokenizer(), pages, seed=pages)
    teacher = pretrain(tmp_path, "teacher", "much")
    taught = [f"--teacher={teacher}", "--teacher_weight=0.9", "--teacher_attention=0.1"]
    losses = {name: read_log(run)[-1]["val_loss"] for name, run in {
        "teacher": teacher, "alone": pretrain(tmp_path, "alone", "little"),
        "taught": pretrain(tmp_path, "taught", "little", *taught)}.items()}
    print(losses)
    assert losses["teacher"] < 1.0 and losses["taught"] < losses["alone"] - 1.0, losses
    with pytest.raises(SystemExit) as stop:
        pretrain(tmp_path, "no", "little", *taught, "--n_future=2", "--loss_chunk=8", "--teacher_attention=-1")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in said for word in ("n_future", "loss_chunk", "teacher_attention"))


def test_a_student_comes_nearer_to_its_teacher(base, capsys):      # noqa: F811
    (base / "teacher").mkdir()
    teacher = small_llama(seed=9, n_layer=3)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(20)         # or its probabilities are nearly all alike
    hf.save_model(base / "teacher", teacher, byte_tokenizer())
    talked = [chat.render(byte_tokenizer(), entry["messages"])[0] for entry in uneven(8, seed=1)]

    def distance(run):
        student = hf.load_model(run / "step_00000020")[0]
        return sum(distill.kl_losses(*(model(torch.tensor([ids])) for model in (student, teacher)), 1.0).mean().item() for ids in talked)
    extra = ["--lora_rank=0", "--learning_rate=3e-3", "--epochs=4", "--eval_answers=0"]
    alone = tune(base, "alone", *extra)
    taught = tune(base, "taught", *extra, f"--teacher={base / 'teacher'}", "--teacher_weight=1.0", "--teacher_temperature=1.0")
    assert distance(taught) < 0.8 * distance(alone) and read_log(taught)[-1]["loss"] < 0.8 * read_log(taught)[0]["loss"]
    with pytest.raises(SystemExit) as stop:
        tune(base, "no", *extra, f"--teacher={base / 'teacher'}", "--teacher_weight=2", "--teacher_temperature=0", "--loss_chunk=4")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in said for word in ("teacher_weight", "teacher_temperature", "loss_chunk"))
