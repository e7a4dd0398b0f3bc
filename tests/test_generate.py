"""Generation: with the cache as without it, ragged batches as one by one, greedy, top-k, top-p, stops."""
import copy
import math
import random

import pytest
import torch

from engine import generate as generation
from engine.generate import TextStream, generate, pick
from engine.loss import logprobs
from small import byte_tokenizer, small_llama

PROMPTS = [[5, 9, 200, 31, 7], [100], [44, 45, 46, 47, 48, 49, 50, 51, 52]]


@pytest.fixture(scope="module")
def model():
    model = small_llama(3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.dim() > 1 else 1)      # far from uniform, so that an argmax is no toss-up
    return model


def slow_greedy(model, prompt, n):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    return ids[len(prompt):]


def test_cached_ragged_batch_equals_uncached_one_by_one(model):
    batch = generate(model, PROMPTS, 64, stop_ids=set(), temperature=0)
    for prompt, ids, logp in zip(PROMPTS, batch.ids, batch.logprobs):
        assert ids == slow_greedy(model, prompt, 64)
        whole = torch.tensor([prompt + ids])
        with torch.no_grad():
            expected = logprobs(model, whole, torch.ones_like(whole, dtype=torch.bool))[0, len(prompt) - 1:]
        assert (expected - torch.tensor(logp)).abs().max() < 1e-4
    assert batch.stopped == [False] * 3


def test_rows_that_stop_leave_the_others_as_they_are(model):
    free = generate(model, PROMPTS, 30, stop_ids=set(), temperature=0)
    stop = free.ids[1][4]
    halted = generate(model, PROMPTS, 30, stop_ids={stop}, temperature=0)
    for row in range(3):
        first = free.ids[row].index(stop) + 1 if stop in free.ids[row] else 30
        assert halted.ids[row] == free.ids[row][:first]
        assert halted.stopped[row] == (stop in free.ids[row])


def test_seeds(model):
    one, two, other = (generate(model, PROMPTS, 20, set(), 1.0, seed=s).ids for s in (1, 1, 2))
    assert one == two != other


def test_logprobs_are_those_of_the_sampling_temperature(model):
    out = generate(model, PROMPTS, 12, set(), temperature=0.7, seed=4)
    for prompt, ids, logp in zip(PROMPTS, out.ids, out.logprobs):
        whole = torch.tensor([prompt + ids])
        with torch.no_grad():
            scored = logprobs(model, whole, torch.ones_like(whole, dtype=torch.bool), temperature=0.7)[0, len(prompt) - 1:]
        assert (scored - torch.tensor(logp)).abs().max() < 1e-4


def test_top_k_and_top_p():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    drawn = lambda **kw: set(pick(logits, 1.0, kw.get("top_k", 0), kw.get("top_p", 1.0), generator)[0].tolist())
    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 1} and drawn(top_k=1) == {0}
    assert drawn(top_k=99) == {0, 1, 2, 3, 4}                  # more than there are: all
    p = logits[0].softmax(0)                                   # .64 .23 .09 .03 .01
    assert drawn(top_p=p[0].item() - 1e-3) == {0} and drawn(top_p=p[0].item() + 1e-3) == {0, 1}
    assert drawn(top_p=0.0) == {0}                             # the likeliest always stays
    counts = torch.bincount(pick(logits, 1.0, 0, 1.0, generator)[0], minlength=5) / 4000
    assert (counts - p).abs().max() < 0.03
    greedy, logp = pick(logits, 0, 0, 1.0, generator)
    assert set(greedy.tolist()) == {0} and torch.allclose(logp, p[0].log().expand(4000))


def test_rows_that_pad_the_vocabulary_are_never_drawn(tmp_path):
    """Also after a model has been to disk: the tokenizer beside it says what is a token."""
    from engine.hf import read_model, save_model
    from small import byte_tokenizer
    model, tokenizer = small_llama(3, vocab_size=320, tie_embeddings=False), byte_tokenizer()
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.lm_head.weight.zero_()                           # all rows alike: one draw in six would be padding
    save_model(tmp_path, model, tokenizer)
    model = read_model(tmp_path)[0].eval()
    for settings in (dict(), dict(top_k=300), dict(top_p=0.99), dict(temperature=0), dict(temperature=30.0)):
        out = generate(model, PROMPTS, 60, set(), **settings)
        assert max(max(ids) for ids in out.ids) < tokenizer.vocab_size == 263
    assert out.logprobs[0][0] == pytest.approx(-math.log(263), abs=1e-5)


def test_prompts_longer_than_the_context_and_generation_to_its_end(model):
    context = model.config.block_size
    long = [(7 * i) % 250 for i in range(context + 40)]
    out = generate(model, [long, [1, 2, 3]], 10, set(), temperature=0)
    assert len(out.ids[0]) == 1 and not out.stopped[0]         # the last context - 1 tokens were kept: room for one
    assert out.ids[0] == slow_greedy(model, long[-(context - 1):], 1)
    with torch.no_grad():
        expected = model(torch.tensor([long[-(context - 1):]]))[0, -1].log_softmax(-1).max().item()
    assert out.logprobs[0] == pytest.approx([expected], abs=1e-5)
    assert out.ids[1] == slow_greedy(model, [1, 2, 3], 10)
    assert len(generate(model, [[1, 2]], 500, set(), temperature=0).ids[0]) == context - 2


def test_dropout_is_off_and_the_model_left_as_it_was():
    model = small_llama(3, dropout=0.5).train()
    assert generate(model, PROMPTS, 8, set(), temperature=0).ids == generate(model, PROMPTS, 8, set(), temperature=0).ids
    assert model.training


def test_nothing_to_do(model):
    assert generate(model, [], 5, set()).ids == []
    with pytest.raises(ValueError, match="BOS"):
        generate(model, [[1], []], 5, set())


def test_logprobs_do_not_depend_on_padding(model):
    ids = torch.tensor([PROMPTS[2]])
    alone = logprobs(model, ids, torch.ones_like(ids, dtype=torch.bool))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids, torch.zeros(1, 3, dtype=torch.long)], 1)
    mask = torch.tensor([[False] * 5 + [True] * 9 + [False] * 3])
    with torch.no_grad():
        scored, entropy = logprobs(model, padded, mask, with_entropy=True)
    assert (scored[:, 5:13] - alone).abs().max() < 1e-5 and (entropy >= 0).all()


# --------------------------------------------------------------------------------------- the step, beside the model

SHAPES = {"all heads": {}, "groups": {"n_kv_head": 1}, "tied": {"tie_embeddings": True, "n_kv_head": 4},
          "in the open": {"attention": "fp32"}, "far angles": {"rope_theta": 5e5, "norm_eps": 1e-6},
          "biases": {"qkv_bias": True}, "q and k normed": {"qk_norm": True, "head_dim": 12, "norm_eps": 1e-3},
          "a window": {"sliding_window": 20}, "a window within the prompt": {"sliding_window": 4, "n_kv_head": 1},
          # The rows of PROMPTS come to 75, 71 and 79 tokens: some of them to more than was trained, some not.
          "longrope": {"rope_scaling": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 74,
                                        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}},
          "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                      "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}}


def unlike(model):
    """The model, with weights that make tokens see each other, and gains and biases that are not all alike."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
            else:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPTS[0], PROMPTS[0][::-1]], [*PROMPTS] * 3, [PROMPTS[2]]],
                         ids=["ragged", "even", "many", "one"])
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_every_token_has_the_logits_of_the_uncached_model(monkeypatch, changes, compile, prompts):
    model, found, real = unlike(small_llama(3, **changes)), [], generation.pick

    def keep(logits, **rest):
        found.append(logits.clone())
        return real(logits, **rest)
    monkeypatch.setattr(generation, "pick", keep)
    out = generate(model, prompts, 70, set(), temperature=1.0, seed=7, compile=compile)
    assert len(found) == 70
    for row, (prompt, ids) in enumerate(zip(prompts, out.ids)):
        with torch.no_grad():
            expected = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1:-1]
        assert expected.std() > 0.05 and len(ids) == 70
        assert (torch.stack([logits[row] for logits in found]) - expected).abs().max() < 1e-4


def test_in_bf16_the_logits_are_as_far_as_rounding_takes_them(monkeypatch, model):
    """From fp32, beside which the uncached model in bf16 is as far; under autocast too, with weights in fp32."""
    found, real = [], generation.pick
    monkeypatch.setattr(generation, "pick", lambda logits, **rest: found.append(logits) or real(logits, **rest))
    with torch.autocast("cpu", torch.bfloat16):
        out = generate(model, PROMPTS[:1], 60, set(), seed=3)
    cached, found[:] = torch.cat(found), []
    whole = torch.tensor([PROMPTS[0] + out.ids[0]])
    with torch.no_grad():
        exact = model(whole)[0, 4:-1]
        with torch.autocast("cpu", torch.bfloat16):
            uncached = model(whole)[0, 4:-1].float()
    assert 0 < (cached - exact).abs().mean() < 1.3 * (uncached - exact).abs().mean()
    assert model.lm_head.weight.dtype == torch.float32
    narrow = copy.deepcopy(model).bfloat16()
    out = generate(narrow, PROMPTS[:1], 60, set(), seed=3)
    whole = torch.tensor([PROMPTS[0] + out.ids[0]])
    with torch.no_grad():
        exact, uncached = model(whole)[0, 4:-1], narrow(whole)[0, 4:-1].float()
    assert 0 < (torch.cat(found) - exact).abs().mean() < 1.3 * (uncached - exact).abs().mean()


def test_fused_weights_are_the_models_own(model):
    """After generation an optimizer's step is seen by the next generation, copies are independent, names and values
    stay."""
    model = copy.deepcopy(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generate(model, PROMPTS, 5, set(), temperature=0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    twin = copy.deepcopy(model)
    for _ in range(2):
        model(torch.tensor([PROMPTS[2]])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert generate(model, PROMPTS, 20, set(), temperature=0).ids == [slow_greedy(model, p, 20) for p in PROMPTS]
    assert generate(twin, PROMPTS, 20, set(), temperature=0).ids == [slow_greedy(twin, p, 20) for p in PROMPTS]
    assert all(torch.equal(p, before[name]) for name, p in twin.named_parameters())
    q, k = (model.model.layers[0].self_attn.get_parameter(f"{name}_proj.weight") for name in "qk")
    assert k.data_ptr() == q.data_ptr() + q.nbytes


def test_rows_come_and_go_without_moving_the_others(model):
    """Many rows that stop at different times, so that the cache is moved up several times."""
    rng = random.Random(0)
    prompts = [[rng.randrange(250) for _ in range(rng.randrange(1, 30))] for _ in range(24)]
    stops = set(rng.sample(range(263), 20))
    out = generate(model, prompts, 50, stops, temperature=0)
    for prompt, ids, stopped in zip(prompts, out.ids, out.stopped):
        free = slow_greedy(model, prompt, min(50, 96 - len(prompt)))
        end = next((i + 1 for i, token in enumerate(free) if token in stops), len(free))
        assert ids == free[:end] and stopped == (free[end - 1] in stops)
    assert len(set(map(len, out.ids))) > 5


def test_repetition_penalty_by_hand(model):
    prompt, ids = [5, 9, 0, 31, 7], []
    for _ in range(30):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids]))[0, -1]
        for token in set(prompt + ids):
            logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
        ids.append(logits.argmax().item())
    out = generate(model, [[1, 2], prompt], 30, set(), temperature=0, repetition_penalty=1.5)
    assert out.ids[1] == ids != generate(model, [prompt], 30, set(), temperature=0).ids[0]
    with torch.no_grad():                                  # the log-probabilities are the model's, without the penalty
        expected = model(torch.tensor([prompt + ids]))[0, 4:-1].log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])
    assert (torch.tensor(out.logprobs[1]) - expected[:, 0]).abs().max() < 1e-4
    drawn = generate(model, [prompt], 60, set(), temperature=1.5, repetition_penalty=1e6).ids[0]
    assert len(set(drawn) | set(prompt)) > 58              # as good as forbidden, where logits are positive or negative


# -------------------------------------------------------------------------------------------------------------- text

def stream(tokens, stops=(), **kinds):
    tokenizer = byte_tokenizer()
    text = TextStream(tokenizer, stops)
    parts = [text.feed(token) for token in tokens]
    return parts, text.finish(), text


def test_streamed_text_is_never_half_a_character():
    tokenizer = byte_tokenizer()
    said = "naïve 👩‍👩‍👧 日本 ok"
    parts, rest, text = stream(tokenizer.encode(said))
    assert "".join(parts) == said == text.text and rest == "" and "\ufffd" not in "".join(parts)
    assert parts[2:4] == ["", "ï"]                                        # two bytes, two tokens, one letter
    parts, rest, text = stream(tokenizer.encode("é")[:1])                  # the end comes in the middle of one
    assert parts == [""] and rest == "\ufffd" == text.text
    end = tokenizer.special("<|end|>")
    assert stream([*tokenizer.encode("a"), end])[0] == ["a", ""]


def test_stop_strings():
    encode = byte_tokenizer().encode
    parts, rest, text = stream(encode("yes\nUser: no"), ["\nUser:", "###"])
    assert "".join(parts) == "yes" == text.text and rest == "" and text.stopped
    parts, rest, text = stream(encode("a##b\nUs"), ["\nUser:", "###"])     # what only began like one is said, late or at the end
    assert parts == ["a", "", "", "##b", "", "", ""] and rest == "\nUs" and text.text == "a##b\nUs" and not text.stopped
    assert stream(encode("xaab"), ["ab"])[2].text == "xa"                  # overlaps with its own beginning
    assert stream(encode("xabc"), ["abcd", "b"])[2].text == "xa"           # one inside what another could become


def test_generation_ends_at_a_stop_string_and_says_what_came_before(model):
    tokenizer, heard = byte_tokenizer(), {0: "", 1: "", 2: ""}
    free = generate(model, PROMPTS, 40, set(), temperature=0, tokenizer=tokenizer)
    assert free.texts == [tokenizer.decode(ids) for ids in free.ids]
    stop = next(free.texts[1][i:i + 2] for i in range(9, 30)
                if free.texts[1].find(free.texts[1][i:i + 2]) == i and "\ufffd" not in free.texts[1][i:i + 2])

    def hear(row, text):
        heard[row] += text
    out = generate(model, PROMPTS, 40, set(), temperature=0, tokenizer=tokenizer, stop_strings=[stop], on_text=hear)
    for row in range(3):
        found = free.texts[row].find(stop)
        assert out.texts[row] == heard[row] == (free.texts[row] if found < 0 else free.texts[row][:found])
        assert out.stopped[row] == (found >= 0) and out.ids[row] == free.ids[row][:len(out.ids[row])]
        assert len(out.logprobs[row]) == len(out.ids[row])
    assert out.stopped[1] and len(out.ids[1]) < 40
    with pytest.raises(ValueError, match="tokenizer"):
        generate(model, PROMPTS, 4, set(), stop_strings=["a"])


def test_training_mode_comes_back_after_an_interruption(model):
    def interrupted(row, text):
        raise KeyboardInterrupt
    model = copy.deepcopy(model).train()
    with pytest.raises(KeyboardInterrupt):
        generate(model, PROMPTS, 40, set(), tokenizer=byte_tokenizer(), on_text=interrupted)
    assert model.training
