"""A run that is out of memory says what grew, what the plan says of it, and what helps."""
import pytest
import torch

import train as script
from configurator import configure
from engine.loss import scores
from engine.memory import Explained, asked_for
from engine.optim import optimizers_of
from programs import run
from small import ALONE, shape
from test_train import make_data


def test_a_real_one_on_a_cpu(tmp_path):
    """The system gives a process no more than 0.8 GB beyond what it has after its imports; one score matrix has 0.5."""
    data = make_data(tmp_path)
    (tmp_path / "limited.py").write_text(
        "import resource, sys, train, torch._dynamo\nfrom configurator import configure\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + 800_000_000,) * 2)\n"
        "train.main(configure(vars(train), sys.argv[1:]))")
    words = ("--n_layer=2 --n_head=4 --n_kv_head=4 --n_embd=32 --n_inner=64 --block_size=256 --attention=fp32 --micro_batch_size=512 "
             f"--batch_tokens=131072 --max_steps=2 --compile=False --threads=1 --dtype=fp32 --device=cpu --data_dir={data} --out_dir={tmp_path}/o")
    done = run(tmp_path / "limited.py", *words.split())
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for word in ("out of memory on rank 0", "another 0.50 GiB", "What grew: activations", "The plan's line for it",
                 "2 layers x 131,072 tokens", "recompute=selective", "--plan=1"):
        assert word in done.stderr, (word, done.stderr)


def made(**keys):
    config = configure(vars(script), [f"--{key}={value}" for key, value in keys.items()])
    model = script.Llama(shape())
    setup = script.join(ALONE, script.divide(config, shape(), 1)[0])
    explained = Explained(config)
    explained.watch(shape(), model, optimizers_of(model, 1e-3, 0, 0.1), setup)
    return explained, model


@pytest.mark.parametrize("grew", ["logits", "optimizer", "gradients"])
def test_what_grew_is_named(grew, capsys, monkeypatch):
    explained, model = made(batch_tokens=192, block_size=96, micro_batch_size=2)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 MiB. GPU 0 has a total capacity of 79.11 GiB")
    with pytest.raises(SystemExit) as end, explained:
        if grew == "logits":
            model.logits = fail
            scores(model, None, None, 0.0)
        for p in model.parameters():
            p.grad = torch.zeros(p.numel() * 100 if grew == "gradients" else p.numel())[:p.numel()].view_as(p)
        if grew == "optimizer":
            explained.made[2][0].register_step_pre_hook(fail)
            explained.made[2][0].step()
        fail()
    said = capsys.readouterr().err
    assert end.value.code == 2 and f"What grew: {grew}" in said and "The plan's line for it" in said
    assert {"logits": "loss_chunk", "optimizer": "cpu_offload", "gradients": "zero=2"}[grew] in said


def test_other_mistakes_are_left_alone():
    explained, _ = made()
    with pytest.raises(RuntimeError, match="shapes"), explained:
        raise RuntimeError("shapes do not fit")
    assert asked_for(torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")) == 2**31
    assert asked_for(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12")) == 4096
    assert asked_for(ValueError("can't allocate memory: you tried to allocate 4096 bytes")) is None and asked_for(None) is None
