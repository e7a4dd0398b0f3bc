"""The model against transformers' Llama with the same weights, its shapes, its initialisation."""
import hashlib
import math
import shutil

import pytest
import torch

from programs import Program
from small import ALONE, ROOT, config_shape
from engine.flash import attend_on_cpu
from engine.hf import mismatches
from engine.loss import model_losses
from engine.parallel import compile_blocks
from model import KVCache, Llama, ModelConfig, RMSNorm, ScalarModel, apart, attend

SMALL = dict(vocab_size=211, n_layer=3, n_head=4, n_embd=64, n_inner=96, block_size=256)


def theirs(config, model):
    """transformers' Llama with the weights of ours."""
    transformers = pytest.importorskip("transformers")
    hf = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.n_embd, intermediate_size=config.n_inner,
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head,
        max_position_embeddings=config.block_size, rms_norm_eps=config.norm_eps, rope_theta=config.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings, attn_implementation="eager")
    other = transformers.LlamaForCausalLM(hf)
    result = other.load_state_dict(model.state_dict(), strict=False)
    assert not result.unexpected_keys and not [k for k in result.missing_keys if "rotary" not in k]
    return other.eval()


def shapes(config):
    """{name: shape} of a model, without making its weights."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Llama(config).named_parameters()}


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("attention", ["flash", "fp32"])
def test_logits_equal_transformers(n_kv_head, attention):
    config = ModelConfig(**SMALL, n_kv_head=n_kv_head, rope_theta=5e5, attention=attention, tie_embeddings=n_kv_head == 2)
    model = Llama(config).init_weights(3).eval()
    with torch.no_grad():
        for parameter in model.parameters():        # gains and scores away from 1 and 0, where mistakes hide
            parameter.mul_(1.5).add_(torch.randn_like(parameter) * 0.02)
        ids = torch.randint(0, 211, (2, 160))
        other = theirs(config, model)
        assert (model(ids) - other(ids).logits).abs().max() < 1e-4
        mask = torch.ones(2, 160, dtype=torch.bool)
        mask[0, :37] = False                        # left padding
        expected = other(ids, attention_mask=mask.long(), position_ids=(mask.long().cumsum(-1) - 1).clamp(min=0)).logits
        assert (model(ids, mask=mask) - expected)[mask].abs().max() < 1e-4


def test_logits_of_some_positions_are_those_of_all():
    model = Llama(ModelConfig(**SMALL, n_kv_head=2)).init_weights(3).eval()
    ids, keep = torch.randint(211, (3, 20)), torch.rand(3, 20) < 0.3
    torch.testing.assert_close(model(ids, keep=keep), model(ids)[keep], rtol=0, atol=1e-5)
    none = model(ids, keep=torch.zeros_like(keep))
    none.sum().backward()                                 # a rank without a target takes part all the same
    assert none.shape == (0, 211) and all((p.grad == 0).all() for p in model.parameters())


def test_padding_never_reaches_a_real_token():
    model = Llama(ModelConfig(**SMALL, n_kv_head=2)).init_weights(0).eval()
    ids = torch.randint(0, 211, (1, 50))
    alone = model(ids)
    for left, right in ((13, 0), (0, 9), (5, 4)):
        padded = torch.cat([torch.randint(0, 211, (1, left)), ids, torch.randint(0, 211, (1, right))], 1)
        mask = torch.zeros(padded.shape, dtype=torch.bool)
        mask[:, left:left + 50] = True
        logits = model(padded, mask=mask)
        assert torch.isfinite(logits).all()
        assert (logits[:, left:left + 50] - alone).abs().max() < 1e-5
    # In the middle too: positions are counted over the real tokens.
    mask = torch.ones(1, 53, dtype=torch.bool)
    mask[:, 20:23] = False
    padded = torch.cat([ids[:, :20], torch.zeros(1, 3, dtype=torch.long), ids[:, 20:]], 1)
    assert (model(padded, mask=mask)[mask] - alone[0]).abs().max() < 1e-5


def test_cache_equals_the_full_forward():
    model = Llama(ModelConfig(**SMALL, n_kv_head=2)).init_weights(0).eval()
    ids = torch.randint(0, 211, (2, 40))
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, :6] = False
    cache = KVCache(model.config, 2, 40)
    pieces = [model(ids[:, a:b], mask=mask[:, :b], cache=cache) for a, b in ((0, 17), (17, 18), (18, 19), (19, 40))]
    assert ((torch.cat(pieces, 1) - model(ids, mask=mask))[mask]).abs().max() < 1e-5
    with pytest.raises(ValueError, match="room for 40"):
        model(ids[:, :1], cache=cache)
    cache = KVCache(model.config, 2, 40)            # and where there is no padding, so no mask
    pieces = [model(ids[:, a:b], cache=cache) for a, b in ((0, 17), (17, 18), (18, 40))]
    assert (torch.cat(pieces, 1) - model(ids)).abs().max() < 1e-5


@pytest.mark.parametrize("silent", ["self_attn.o_proj", "mlp.down_proj"])
def test_both_sublayers_drop_out_in_training_only(silent):
    model = Llama(ModelConfig(**SMALL, n_kv_head=2, dropout=0.5)).init_weights(0)
    plain = Llama(ModelConfig(**SMALL, n_kv_head=2)).init_weights(0).eval()
    ids = torch.randint(0, 211, (1, 20))
    assert torch.equal(model.eval()(ids), plain(ids))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.get_submodule(silent).weight.zero_()          # what changes now comes from the other sublayer
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


def test_llama2_7b_has_the_papers_shapes():
    config = config_shape("llama2_7b")
    wanted = shapes(config)
    with torch.device("meta"):
        assert Llama(config).n_params() == 6_738_415_616
    assert wanted["model.embed_tokens.weight"] == wanted["lm_head.weight"] == (32000, 4096)
    assert wanted["model.layers.31.self_attn.q_proj.weight"] == (4096, 4096)
    assert wanted["model.layers.0.mlp.gate_proj.weight"] == (11008, 4096)
    assert wanted["model.layers.0.mlp.down_proj.weight"] == (4096, 11008)
    assert len(wanted) == 3 + 32 * 9
    assert config.n_inner == -(-8 * 4096 // 3 // 256) * 256 == 43 * 256        # 8/3 of 4096, up to a multiple of 256


def test_every_wrong_tensor_is_listed_with_its_key():
    from dataclasses import replace
    config = ModelConfig(**SMALL, n_kv_head=2)
    found = mismatches(shapes(config), shapes(replace(config, n_kv_head=4, n_inner=128)))
    assert len(found) == 3 * (2 + 3)                # k, v, gate, up, down in each of three layers
    assert sum("see n_kv_head" in line for line in found) == 6 and sum("see n_inner" in line for line in found) == 9


def test_initialisation():
    config = ModelConfig(vocab_size=500, n_layer=12, n_head=4, n_kv_head=4, n_embd=192, n_inner=512, block_size=64)
    model = Llama(config).init_weights(7)
    small = 0.02 / math.sqrt(24)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all()
        else:
            expected = small if "o_proj" in name or "down_proj" in name else 0.02
            assert abs(p.std().item() / expected - 1) < 0.03, name
    again = dict(Llama(config).init_weights(7).named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in model.named_parameters())
    assert not torch.equal(model.lm_head.weight, Llama(config).init_weights(8).lm_head.weight)
    # A parameter's bits depend on its name and the seed only, not on what else the model has.
    assert not torch.equal(again["model.layers.5.mlp.up_proj.weight"], again["model.layers.6.mlp.up_proj.weight"])
    shallow = dict(Llama(ModelConfig(**{**vars(config), "n_layer": 12, "vocab_size": 300})).init_weights(7).named_parameters())
    assert torch.equal(shallow["model.layers.5.mlp.up_proj.weight"], again["model.layers.5.mlp.up_proj.weight"])


def test_a_scalar_head_starts_small_and_without_bias():
    model = ScalarModel(ModelConfig(**{**SMALL, "n_embd": 1024, "n_layer": 1}, n_kv_head=4)).init_weights(7)
    assert abs(model.score.weight.std().item() * math.sqrt(1025) - 1) < 0.1 and model.score.bias.item() == 0


def test_rmsnorm_where_fp16_would_overflow():
    norm = RMSNorm(8, 1e-5)
    x = torch.full((1, 8), 300.0, dtype=torch.float16)     # 300 squared is beyond fp16's 65504
    y = norm(x).float()
    assert torch.isfinite(y).all() and (y - 1).abs().max() < 1e-3


def test_scores_are_never_rounded_to_bf16():
    """bf16 inputs whose scores differ by less than bf16 can tell apart at their size: both paths must still tell them apart."""
    q = torch.zeros(1, 1, 3, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 3, 64, dtype=torch.bfloat16)
    q[..., 0], q[..., 1] = 64, 8
    k[0, 0, :, 0] = 64                                     # 64 * 64 / 8 = 512, where bf16 counts in steps of 4
    k[0, 0, :, 1] = torch.tensor([0.0, 1.0, 2.0])          # plus 0, 1, 2
    v = torch.eye(3, 64, dtype=torch.bfloat16)[None, None]
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0)    # of the last row, which sees all three
    for kind in ("flash", "fp32"):
        got = attend(q, k, v, None, kind)[0, 0, 2, :3].float()
        assert (got - expected).abs().max() < 0.01, kind
    rounded = attend(q, k, v, None, "bf16")[0, 0, 2, :3].float()
    assert (rounded - expected).abs().max() > 0.2          # the mistake, shown


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("padded", [False, True])
def test_compiled_gradients_of_the_explicit_attention_are_those_of_eager(padded):
    config = ModelConfig(vocab_size=50, n_layer=1, n_head=2, n_kv_head=2, n_embd=128, n_inner=96, block_size=64)
    config.attention = "fp32"
    model = Llama(config).init_weights()
    ids = torch.randint(0, 50, (2, 64), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(64) >= torch.tensor([[0], [9]])) if padded else None

    def gradients():
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(ids, mask).float().logsumexp(-1).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    eager = gradients()
    model.model.layers[0].compile()
    for a, b in zip(eager, gradients(), strict=True):
        assert (a - b).norm() < 0.02 * a.norm()                    # NaN is not smaller


@pytest.mark.parametrize("time", [32, 128, 130, 300])
def test_attentions_own_gradient_is_exact_and_never_rounds_scores(time):
    """Against float64: in fp32 to 1e-5; in bf16, with scores whose rounding would show, as near as torch's own."""
    generator = torch.Generator().manual_seed(time)
    draw = lambda heads, scale=1.0: torch.randn(2, heads, time, 16, generator=generator, dtype=torch.float64) * scale
    def error(q, k, v, gradient, dtype, way):
        rounded = [x.to(dtype) for x in (q, k, v, gradient)]
        def gradients(kind, way):
            leaves = [x.to(kind).requires_grad_() for x in rounded[:3]]
            return torch.autograd.grad(way(*leaves, None, "flash"), leaves, rounded[3].to(kind))
        exact = gradients(torch.float64, attend)
        return max(((a - b).norm() / b.norm().clamp(min=1)).item() for a, b in zip(gradients(dtype, way), exact))
    for n_kv_head in (4, 2, 1):
        tensors = draw(4, 3), draw(n_kv_head, 3), draw(n_kv_head), draw(4)
        assert error(*tensors, torch.float32, attend_on_cpu) < 1e-5
    assert error(*tensors, torch.bfloat16, attend_on_cpu) < 1.5 * error(*tensors, torch.bfloat16, attend) + 2e-3


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("chunk", [0, 40])
def test_a_compiled_step_has_the_losses_and_gradients_of_eager(chunk):
    """With attention's own gradient, and the loss compiled with the head."""
    ids = torch.randint(0, 211, (2, 130), generator=torch.Generator().manual_seed(1))
    results = []
    for wanted in (False, True):
        model = Llama(ModelConfig(**{**SMALL, "n_layer": 1}, n_kv_head=2)).init_weights(3)
        model.n_tokens = 200                                     # the rest pads the vocabulary
        compile_blocks(model, ALONE, wanted)
        assert model.compiled == (model.model.layers[0].self_attn.attend is attend_on_cpu) == wanted
        objectives, losses = model_losses(model, ids, ids % 200, chunk, z_loss=1e-3)
        objectives.mean().backward()
        results.append([objectives, losses, *(p.grad for p in model.parameters())])
    assert results[0][0].allclose(results[1][0], atol=1e-5) and (results[0][0] > results[0][1]).all()
    for eager, compiled in zip(*results):
        assert ((eager - compiled).norm() / eager.norm()).item() < 1e-5


def test_rmsnorm_returns_the_inputs_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):           # with gains in fp32, as in mixed training
        assert RMSNorm(8, 1e-5)(torch.randn(2, 8, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("kind", ["flash", "fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_may_look_at_nothing_is_0_and_its_gradients_too(kind, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 20, 16, dtype=dtype) * 100 for heads in (4, 2, 2))       # products beyond fp16's range
    allowed = torch.rand(2, 1, 20, 20) < 0.5
    allowed[0, :, 3], allowed[1, :, 7:12] = False, False
    full = allowed.clone()
    full[0, :, 3], full[1, :, 7:12] = True, True
    tensors = [tensor.requires_grad_() for tensor in (q, k, v)]
    y = attend(q, k, v, allowed, kind)
    assert torch.isfinite(y).all() and (y[0, :, 3] == 0).all() and (y[1, :, 7:12] == 0).all()
    some = allowed.any(-1).expand(2, 4, 20)
    torch.testing.assert_close(y[some], attend(q, k, v, full, kind)[some], rtol=0.02, atol=0.5)
    for gradient in torch.autograd.grad(y.float().sum(), tensors):
        assert torch.isfinite(gradient).all()
    assert (torch.autograd.grad(attend(q, k, v, allowed, kind).float().sum(), q)[0][~some] == 0).all()


@pytest.mark.parametrize("short", [True, False], ids=["mask", "one by one"])
@pytest.mark.parametrize("attention", ["flash", "fp32"])
def test_documents_in_a_row_are_as_if_each_were_alone(short, attention, monkeypatch):
    monkeypatch.setattr("model.MASK_UP_TO", 1024 if short else 0)
    model = Llama(ModelConfig(**SMALL, n_kv_head=2, attention=attention)).init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    ids, weights = torch.randint(0, 211, (3, 50)), torch.randn(3, 50, 211)
    begins = torch.zeros(3, 50, dtype=torch.bool)
    begins[0, [0, 1, 17, 49]], begins[1, [20]] = True, True        # the third row is one document; a row may begin in the middle
    assert apart(begins)[0][:, [0, 1, 16, 17, 20, 49]].tolist() == [[0, 0, 15, 0, 3, 0], [0, 1, 16, 17, 0, 29], [0, 1, 16, 17, 20, 49]]
    logits = model(ids, begins=begins)
    (logits * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    pieces = [(0, 0, 1), (0, 1, 17), (0, 17, 49), (0, 49, 50), (1, 0, 20), (1, 20, 50), (2, 0, 50)]
    for row, a, b in pieces:
        alone = model(ids[row:row + 1, a:b])
        assert (alone[0] - logits[row, a:b]).abs().max() < 1e-5
        (alone * weights[row, a:b]).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-4)
    assert (model(ids)[0, 1:] - logits[0, 1:]).abs().max() > 1e-3          # they would have looked


def test_documents_apart_go_with_neither_mask_nor_cache():
    model = Llama(ModelConfig(**SMALL, n_kv_head=2))
    ids, begins = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool)
    for more in (dict(mask=begins), dict(cache=KVCache(model.config, 1, 4))):
        with pytest.raises(ValueError, match="neither mask nor cache"):
            model(ids, begins=begins, **more)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("short", [True, False], ids=["mask", "one by one"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_documents_of_any_lengths_are_those_of_eager(short, recompute, monkeypatch):
    monkeypatch.setattr("model.MASK_UP_TO", 1024 if short else 0)
    torch.compiler.reset()
    plain, model = (Llama(ModelConfig(**SMALL, n_kv_head=2, recompute=how)).init_weights(0) for how in ("none", recompute))
    generator = torch.Generator().manual_seed(0)

    def gradients(model, ids, begins):
        model.zero_grad()
        model(ids, begins=begins).logsumexp(-1).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    steps = [(torch.randint(0, 211, (2, 64), generator=generator), torch.rand(2, 64, generator=generator) < share)
             for share in (0.1, 0.0, 0.02, 0.3, 0.1, 0.2, 0.05)]
    eager = [gradients(plain, *step) for step in steps]
    for layer in model.model.layers:
        layer.compile()
    for number, (step, wanted) in enumerate(zip(steps, eager)):
        # What the first four steps compiled serves all further lengths.
        with torch.compiler.set_stance("default" if number < 4 else "fail_on_recompile"):
            for a, b in zip(wanted, gradients(model, *step), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_activations_computed_anew_give_the_same_gradients_and_take_less():
    ids, kept, gradients = torch.randint(0, 211, (2, 40)), {}, {}
    for recompute in ("none", "selective", "full"):
        model = Llama(ModelConfig(**SMALL, n_kv_head=2, dropout=0.3, recompute=recompute)).init_weights(0)
        sizes = []
        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            loss = model(ids).logsumexp(-1).sum()
        loss.backward()
        gradients[recompute] = [parameter.grad for parameter in model.parameters()]
        kept[recompute] = sum(sizes)
    for recompute in ("selective", "full"):
        assert all(map(torch.equal, gradients["none"], gradients[recompute])), recompute
    assert kept["none"] > 1.3 * kept["selective"] > 1.3 * 1.5 * kept["full"]


DRAWN = """
import hashlib, os, sys
sys.path[:0] = [{root!r}]
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from model import Llama, ModelConfig
dist.init_process_group("gloo")
model = Llama(ModelConfig(vocab_size=211, n_layer=2, n_head=5, n_kv_head=5, n_embd=70, n_inner=94, block_size=64)).init_weights(7)
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model, mesh=mesh)               # each process keeps its rows of what it drew; nothing is sent
for name, parameter in model.named_parameters():
    whole = parameter.detach().full_tensor().contiguous()
    if dist.get_rank() == 0:
        print(name, tuple(parameter.to_local().shape), hashlib.sha256(whole.numpy().tobytes()).hexdigest())
dist.destroy_process_group()
"""


def test_the_first_weights_are_the_same_bits_however_they_are_sharded(tmp_path):
    """On 1, 2 and 3 processes, 211 and 70 and 94 rows: 2 and 3 do not divide all of them."""
    (tmp_path / "draw.py").write_text(DRAWN.format(root=str(ROOT)))
    said = {}
    for processes in (1, 2, 3):
        alone = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0") if processes == 1 else {}
        code, told = Program(tmp_path / "draw.py", processes=processes, **alone).wait()
        assert code == 0, told
        said[processes] = [line.split() for line in told.splitlines() if "weight" in line]
    model = Llama(ModelConfig(vocab_size=211, n_layer=2, n_head=5, n_kv_head=5, n_embd=70, n_inner=94, block_size=64)).init_weights(7)
    wanted = {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in model.named_parameters()}
    for processes, lines in said.items():
        assert {words[0]: words[-1] for words in lines} == wanted, processes
    assert said[1] != said[2] != said[3]                                    # the shares were of different shapes


def test_impossible_shapes_are_all_named(capsys):
    with pytest.raises(SystemExit) as stop:
        Llama(ModelConfig(n_head=5, n_kv_head=3, n_embd=64, attention="fast", dropout=1.0))
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("n_head = 5", "n_kv_head = 3", "dropout", "'fast'"))
