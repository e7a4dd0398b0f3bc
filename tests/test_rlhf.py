"""
rlhf.py: the identities that a correct PPO keeps and a wrong one breaks, in the order of what they have caught
elsewhere.

Most tests look at one roll-out of an untrained but sharp policy, with prompts of different lengths (so padding on the
left) and answers of which some end by themselves and some are cut. What is found when a mistake is planted is in
test_rl_mutations.py.
"""
import copy
import gc
import json
import os
import random
import shutil
import signal
import sys
import time

import pytest
import torch

import reward
import rlhf
import toy
from engine import checkpoint, generate as generation, hf, rl
from engine.loss import logprobs
from engine.monitor import read_log
from engine.tokenizer import Tokenizer
from model import ScalarModel
from programs import Program
from small import ALONE, ROOT
from toy import words      # noqa: F401 (fixture)


def sharp_policy(words, seed=0):
    """An untrained policy whose answers end after about ten tokens: the end token's row points to where hidden states
    are."""
    policy = toy.model(words, seed, sharpness=4.0).eval()
    with torch.no_grad():
        ids = torch.randint(words.vocab_size, (64, 16), generator=torch.Generator().manual_seed(seed))
        usual = policy.model(ids).flatten(0, 1).mean(0)
        policy.lm_head.weight[words.special("<|end|>")] += 1.5 * usual / usual.square().sum()
    return policy


def drawn_reward(policy):
    made = ScalarModel(policy.config).init_weights(3)
    made.model.load_state_dict(policy.model.state_dict())
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def world(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rlhf")
    toy.write_data(folder / "data", prompts=24, pairs=1, control=1)
    policy = sharp_policy(words)
    toy.save(folder / "sft", policy, words)
    toy.save(folder / "reward", drawn_reward(policy), words)
    return folder


def config_of(world, out, *more):
    return toy.config_of(rlhf, f"--data_dir={world}/data", f"--out_dir={out}", f"--policy_from={world}/sft",
                         f"--reward_from={world}/reward", "--episodes=8", "--micro_batch_size=3", "--updates=3",
                         "--eval_prompts=8", "--max_new_tokens=12", "--learning_rate=1e-3",
                         "--value_learning_rate=1e-3", *more)


class Scene:
    """One roll-out with everything that PPO knows of it."""

    def __init__(self, world, words, *options):
        self.config = config_of(world, world / "unused", *options)
        self.policy = sharp_policy(words)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.reward = drawn_reward(self.policy)
        self.value = rlhf.critic_from(self.reward)
        with torch.no_grad():
            self.value.score.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(5))
        self.words = words
        prompts, _ = rlhf.chat.rendered_prompts(world / "data" / "chat" / "prompts_train.jsonl", words, 100)
        self.prompts = prompts[:8]
        self.batch = rlhf.roll_out(self.policy, [p["ids"] for p in self.prompts], words, self.config, 7, ALONE)
        self.judged = rlhf.judge(self.policy, self.reference, self.value, self.reward, self.batch, self.config, ALONE)
        scores, old, ref, values, self.entropies = self.judged
        rewards = rl.place_score(rl.kl_rewards(old, ref, self.batch.answer, 0.1), scores, self.batch.answer)
        advantages, returns = rl.gae(rewards, values, self.batch.answer)
        self.old = {"logprobs": old, "values": values, "returns": returns,
                    "advantages": rl.whiten(advantages, self.batch.answer)}

    def optimizers(self, learning_rate=1e-2):
        return [torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
                for model in (self.policy, self.value)]

    def improve(self, optimizers=None, config=None, check=False):
        return rlhf.improve(self.policy, self.value, optimizers or self.optimizers(), self.batch, self.old, 0,
                            config or self.config, ALONE, check)

    def check(self):
        rlhf.self_check(self.policy, self.reference, self.reward, self.batch, self.judged, self.config,
                        ALONE, fresh=True)


@pytest.fixture
def scene(world, words):
    return Scene(world, words)


@pytest.fixture
def spy(monkeypatch):
    """Records the arguments and results of a function of rlhf or rl, by name."""
    seen = {}

    def watch(module, name):
        real, seen[name] = getattr(module, name), []

        def wrapper(*args, **kwargs):
            result = real(*args, **kwargs)
            seen[name].append((args, kwargs, result))
            return result
        monkeypatch.setattr(module, name, wrapper)
        return seen[name]
    return watch


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def set_dropout(model, p):
    for layer in model.model.layers:
        layer.dropout = p


# --------------------------------------------------------------------------------------------------------- the scene

def test_the_scene_has_what_the_tests_need(scene):
    """Left padding, answers that ended and answers that were cut, and padding behind the shorter ones."""
    batch = scene.batch
    assert 0 < batch.ended.sum() < len(batch.ended)
    assert not batch.mask[:, 0].all() and not batch.answer[:, -1].all()
    ends = rl.at_last(batch.ids.float(), batch.mask) == scene.words.special("<|end|>")
    assert torch.equal(ends | (rl.at_last(batch.ids.float(), batch.mask) == scene.words.eos_id), batch.ended)
    for row, prompt in enumerate(scene.prompts):
        real = batch.ids[row][batch.mask[row]]
        assert real[:len(prompt["ids"])].tolist() == prompt["ids"]
        assert scene.words.decode(real[len(prompt["ids"]):]) == batch.texts[row]
        assert batch.answer[row].sum() == len(real) - len(prompt["ids"])


# ------------------------------------------------------------------------------------------------ identities, by rank

@pytest.mark.parametrize("micro", [64, 3, 1])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_without_learning_the_ratio_stays_one(world, words, micro, dropout):
    """lr = 0: in every epoch, minibatch and micro-batch, new and old probabilities are the same; with dropout in the
    config too, since every network is in eval mode."""
    scene = Scene(world, words, f"--micro_batch_size={micro}", "--epochs=2")
    for model in (scene.policy, scene.value):
        set_dropout(model, dropout)
    learned = scene.improve(scene.optimizers(learning_rate=0.0))
    assert learned["optimizer_steps"] == 4
    assert learned["first_ratio"] < 1e-5 and learned["approx_kl"] < 1e-11 and learned["clipfrac"] == 0


def test_policy_equals_reference_before_the_first_step(scene):
    _, old, ref, _, _ = scene.judged
    assert torch.equal(old, ref)


@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_scoring_gives_the_generators_log_probabilities(world, words, temperature):
    scene = Scene(world, words, f"--temperature={temperature}")
    gap = rl.largest(scene.judged[1] - scene.batch.sampled_logprobs, scene.batch.answer)
    assert gap < 1e-4 and scene.batch.sampled_logprobs.min() < -1.0
    scene.check()
    assert scene.improve(scene.optimizers(0.0))["first_ratio"] < 1e-5


def test_entropy_identity(world, words):
    """mean(-log p) over the samples is the mean entropy. With top-k sampling it is not, and the ratio is 1 all the
    same."""
    honest = Scene(world, words)
    identity = lambda scene: rl.entropy_gap(*rlhf.witness(scene.policy, scene.batch, scene.config), scene.batch.answer)
    assert abs(identity(honest)[1]) < 3
    cut = with_patched_generator(world, words, top_k=4)
    nats, errors = identity(cut)
    assert nats < -0.2 and errors < -5
    assert cut.improve(cut.optimizers(0.0))["first_ratio"] < 1e-5          # which is why this identity is needed


def with_patched_generator(world, words, **wrong):
    def wrong_generate(*args, **kwargs):
        return generation.generate(*args, **{**kwargs, **wrong})
    original, rlhf.generate = rlhf.generate, wrong_generate
    try:
        return Scene(world, words)
    finally:
        rlhf.generate = original


def test_padding_on_the_left_changes_nothing(scene):
    gaps = rlhf.padding_gaps(scene.policy, scene.reward, scene.batch, scene.config, ALONE)
    assert set(gaps) == {"log-probabilities", "values", "scores"} and max(gaps.values()) < 1e-4
    for row in range(4):                                                   # and alone, without any padding
        real = scene.batch.ids[row][scene.batch.mask[row]][None]
        alone = logprobs(scene.policy, real, torch.ones_like(real, dtype=torch.bool))[0]
        answer = scene.judged[1][row][scene.batch.answer[row]]
        torch.testing.assert_close(answer, alone[-len(answer):], rtol=0, atol=1e-5)


def test_the_end_token_is_learned_and_padding_is_not(scene):
    """The gradient at the logits: something at the step that chose the end token, exactly nothing in prompt and
    padding."""
    kept = []

    def keep(module, inputs, logits):
        logits.retain_grad()
        kept.append(logits)
    scene.policy.lm_head.register_forward_hook(keep)
    rows = torch.arange(8)
    new = rlhf.answer_logprobs(scene.policy, scene.batch, rows, scene.config)
    losses = rl.policy_loss(new, scene.old["logprobs"], scene.old["advantages"], 0.2)
    rl.masked_sum(losses, scene.batch.answer).backward()
    answer, gradient = scene.batch.answer, kept[0].grad.abs().amax(-1)     # logits exist where an answer's token is chosen only
    assert gradient.shape == (answer.sum(),)
    at_end = rl.at_last(torch.zeros(answer.shape).masked_scatter(answer, gradient), answer)
    assert (at_end[scene.batch.ended] > 1e-6).all()


def test_gradients_do_not_depend_on_the_micro_batches(world, words):
    """Lengths differ, so a mean of the micro-batches' means would differ from the mean over the step."""
    found = []
    for size in (64, 3, 1):
        scene = Scene(world, words, f"--micro_batch_size={size}", "--epochs=1", "--minibatches=1", "--grad_clip=0.0")
        scene.improve(scene.optimizers(0.0))
        found.append([torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (scene.policy, scene.value)])
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert a.norm() > 1e-3
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_mean_over_the_answers_tokens(world, words):
    """The gradients before any step, written down directly: -mean over all answer tokens of A grad log p for the
    policy, and of (V - return) grad V for the critic."""
    scene = Scene(world, words, "--epochs=1", "--minibatches=1", "--grad_clip=0.0")
    scene.improve(scene.optimizers(0.0))
    found = torch.cat([p.grad.flatten() for p in scene.policy.parameters()])
    found_value = torch.cat([p.grad.flatten() for p in scene.value.parameters()])
    scene.policy.zero_grad()
    scene.value.zero_grad()
    new = rlhf.answer_logprobs(scene.policy, scene.batch, torch.arange(8), scene.config)
    (-(new * scene.old["advantages"])[scene.batch.answer].mean()).backward()
    expected = torch.cat([p.grad.flatten() for p in scene.policy.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    error = rlhf.answer_values(scene.value, scene.batch, torch.arange(8)) - scene.old["returns"]
    error[scene.batch.answer].square().mean().div(2).backward()
    expected = torch.cat([p.grad.flatten() for p in scene.value.parameters()])
    torch.testing.assert_close(found_value, expected, rtol=1e-4, atol=1e-6)


def test_values_see_what_came_before_and_not_the_token_itself(scene):
    rows, width = torch.arange(8), scene.batch.prompt_width
    other = copy.copy(scene.batch)
    other.ids = scene.batch.ids.clone()
    other.ids[:, width + 2] = (other.ids[:, width + 2] + 1) % 300          # each answer's third token is another one
    moved = (rlhf.answer_values(scene.value, other, rows) - rlhf.answer_values(scene.value, scene.batch, rows)).abs()
    moved = torch.where(scene.batch.answer, moved, 0.0)
    assert moved[:, :3].max() < 1e-6 and moved[:, 3].max() > 1e-4


def test_scores_are_read_at_the_answers_end(scene):
    rows = torch.arange(8)
    before = rlhf.answer_scores(scene.reward, scene.batch, rows)
    padded = copy.copy(scene.batch)
    padded.ids = torch.where(scene.batch.mask, scene.batch.ids, scene.words.special("<|user|>"))
    assert torch.equal(rlhf.answer_scores(scene.reward, padded, rows), before)
    for row in range(8):
        real = scene.batch.ids[row][scene.batch.mask[row]][None]
        torch.testing.assert_close(scene.reward(real)[0, -1], before[row], rtol=0, atol=1e-5)


def test_the_critic_begins_as_the_reward_models_trunk(scene):
    critic = rlhf.critic_from(scene.reward)
    for a, b in zip(critic.model.parameters(), scene.reward.model.parameters(), strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
    assert (rlhf.answer_values(critic, scene.batch, torch.arange(8)) == 0).all()
    assert all(p.requires_grad for p in critic.parameters())


def test_entropy_is_never_negative(scene):
    assert (scene.entropies >= 0).all() and scene.entropies[scene.batch.answer].mean() > 0.5


def test_an_early_stop_leaves_every_parameter_as_it_was(world, words):
    """The second step would go too far, so it is not taken: policy and critic are, bit for bit, where the first one
    left them, although Adam has momentum by then."""
    def train(*options):
        scene = Scene(world, words, "--minibatches=1", *options)
        learned = scene.improve()
        return learned, flat(scene.policy), flat(scene.value)
    once, *after_one = train("--epochs=1", "--max_approx_kl=1e-9")
    stopped, *after_stop = train("--epochs=4", "--max_approx_kl=1e-9")
    free, *after_four = train("--epochs=4", "--max_approx_kl=0.0")
    assert (once["optimizer_steps"], stopped["optimizer_steps"], free["optimizer_steps"]) == (1, 1, 4)
    assert stopped["stopped_early"] and not once["stopped_early"]
    for one, stop, four in zip(after_one, after_stop, after_four):
        assert torch.equal(one, stop) and not torch.equal(one, four)


def test_every_answer_once_an_epoch_and_in_another_order(world, words, spy):
    """Four minibatches of two answers, each in micro-batches of one; the order is drawn anew for each epoch."""
    scored = spy(rlhf, "answer_logprobs")
    scene = Scene(world, words, "--micro_batch_size=1", "--epochs=2", "--minibatches=4")
    del scored[:]
    assert scene.improve(scene.optimizers(0.0))["optimizer_steps"] == 8
    rows = torch.cat([arguments[2] for arguments, _, _ in scored]).view(2, 8)
    assert (rows.sort(1).values == torch.arange(8)).all() and not torch.equal(*rows)


def test_the_second_step_still_looks_at_what_was_sampled(world, words):
    """Its ratio is that to the policy that answered, not to the one before the step: its gradient, written down."""
    options = ["--minibatches=1", "--grad_clip=0.0", "--max_approx_kl=0.0", "--clip_range=0.05"]
    once, twice = (Scene(world, words, f"--epochs={epochs}", *options) for epochs in (1, 2))
    once.improve()
    assert twice.improve()["clipfrac"] > 0.05
    new = rlhf.answer_logprobs(once.policy, once.batch, torch.arange(8), once.config)
    ratio, advantages = (new - once.old["logprobs"]).exp(), once.old["advantages"]
    worse = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.95, 1.05))
    once.policy.zero_grad()
    worse[once.batch.answer].mean().backward()
    expected, found = (torch.cat([p.grad.flatten() for p in scene.policy.parameters()]) for scene in (once, twice))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_policy_and_critic_are_clipped_apart(world, words):
    """A critic that is far off must not take the policy's share of the gradient's norm."""
    norms = []
    for scale in (1.0, 1000.0):
        scene = Scene(world, words, "--epochs=1", "--minibatches=1", "--grad_clip=0.01", "--value_clip_range=1e9")
        scene.old["returns"] = scene.old["returns"] * scale
        scene.improve(scene.optimizers(0.0))
        norms += [torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
                  for model in (scene.policy, scene.value)]
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)


# ------------------------------------------------------------------------------------------------------------ the run

def test_an_update_put_together_again_by_hand(world, tmp_path, spy):
    """From the tokens, scores and log-probabilities of the second update (in the first one the KL is 0): penalty, KL
    and score at their places, and the advantages that the policy really gets."""
    judge, improve, = spy(rlhf, "judge"), spy(rlhf, "improve")
    rlhf.main(config_of(world, tmp_path, "--updates=2", "--missing_end_penalty=0.75", "--kl_coef=0.3"))
    (_, _, _, _, batch, _, _), _, (scores, old, ref, values, _) = [
        call for call in judge if len(call[2][0]) == 8][1]      # not those of held-out prompts, in threes
    handed = improve[1][0][4]
    assert 0 < batch.ended.sum() < 8 and not torch.equal(old, ref)
    advantages, returns = torch.zeros_like(old), torch.zeros_like(old)
    for row in range(8):
        length = int(batch.answer[row].sum())
        reward = [-0.3 * (old[row, t] - ref[row, t]).item() for t in range(length)]
        reward[-1] += scores[row].item() - (0.0 if batch.ended[row] else 0.75)
        value = [values[row, t].item() for t in range(length)] + [0.0]
        for t in range(length):
            advantages[row, t] = sum(0.95 ** (s - t) * (reward[s] + value[s + 1] - value[s]) for s in range(t, length))
            returns[row, t] = advantages[row, t] + value[t]
    inside = advantages[batch.answer]
    whitened = (advantages - inside.mean()) / inside.std(unbiased=False)
    torch.testing.assert_close(handed["returns"], returns, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(handed["advantages"][batch.answer], whitened[batch.answer], rtol=1e-3, atol=1e-4)
    assert handed["logprobs"] is old and handed["values"] is values


def test_reference_and_reward_model_are_frozen_and_the_others_move(world, tmp_path, spy):
    judge, improve = spy(rlhf, "judge"), spy(rlhf, "improve")
    rlhf.main(config_of(world, tmp_path))
    (policy, reference, value, reward, *_), _, _ = judge[0]
    assert {group["eps"] for optimizer in improve[0][0][2] for group in optimizer.param_groups} == {1e-5}
    start, _ = hf.load_model(world / "sft")
    scorer, _ = hf.load_model(world / "reward", kind="scalar")
    assert torch.equal(flat(reference), flat(start)) and torch.equal(flat(reward), flat(scorer))
    assert not torch.equal(flat(policy), flat(start)) and not torch.equal(flat(value), flat(rlhf.critic_from(scorer)))
    saved, _ = hf.load_model(tmp_path / "ppo")
    assert torch.equal(flat(saved), flat(policy))
    result = json.loads((tmp_path / "ppo" / "result.json").read_text())
    assert result["before"]["kl"] == 0 and result["after"]["kl"] != 0
    log = [json.loads(line) for line in (tmp_path / "ppo" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3] and log[0]["kl"] == 0
    assert log[0]["lr"] == 1e-3 and log[2]["lr"] == pytest.approx(1e-3 / 3)


def test_with_lora_the_reference_is_the_policy_without_it(world, tmp_path, spy, capsys):
    """The base weights of policy and critic stay, bit for bit, and so do the reference's log-probabilities, though the policy
    moves; the reference takes no memory; and what is saved is an ordinary model, the merged one."""
    judge, options = spy(rlhf, "judge"), ["--lora_rank=4", "--learning_rate=1e-2", "--value_learning_rate=1e-2", "--save_full=1"]
    rlhf.main(config_of(world, tmp_path / "a", *options))
    said = capsys.readouterr().out
    (policy, reference, value, *_), _, _ = judge[-1]
    start, scorer = hf.load_model(world / "sft")[0], hf.load_model(world / "reward", kind="scalar")[0]
    names = dict(start.named_parameters())
    assert all(torch.equal(p, names[name]) for name, p in policy.named_parameters() if "lora" not in name)
    assert all(torch.equal(p, dict(scorer.named_parameters())[name]) for name, p in value.model.named_parameters(prefix="model")
               if "lora" not in name)
    assert all(p.abs().max() > 1e-5 for name, p in [*policy.named_parameters(), *value.named_parameters()] if "lora_B" in name)
    assert value.score.weight.abs().max() > 1e-5
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    torch.testing.assert_close(logprobs(reference, ids, everywhere), logprobs(start, ids, everywhere), rtol=0, atol=0)
    broken = policy.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reference(ids)
    broken.remove()
    moved = logprobs(hf.load_model(tmp_path / "a" / "ppo")[0], ids, everywhere)
    assert (moved - logprobs(start, ids, everywhere)).abs().max() > 1e-2              # also after the error: LoRA is on again
    torch.testing.assert_close(logprobs(policy, ids, everywhere), moved, rtol=0, atol=1e-4)
    frozen, trained = (sum(p.numel() for network in (policy, value) for p in network.parameters() if p.requires_grad is is_trained)
                       for is_trained in (False, True))
    size = 4 * (frozen + 4 * trained + sum(p.numel() for p in scorer.parameters()))
    assert "3 networks" in said and f"{size / 2**20:,.0f} MiB" in said and "without its LoRA" in said
    result = json.loads((tmp_path / "a" / "ppo" / "result.json").read_text())
    assert result["before"]["kl"] == 0 and result["after"]["kl"] > 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")                                    # and it can be continued
    (tmp_path / "b" / "ppo" / "result.json").unlink()
    shutil.rmtree(tmp_path / "b" / "ppo" / "step_00000003")
    rlhf.main(config_of(world, tmp_path / "b", *options))
    again = json.loads((tmp_path / "b" / "ppo" / "result.json").read_text())
    assert again["after"] == result["after"]


def test_interrupted_and_continued_is_the_same(world, tmp_path, monkeypatch, capsys):
    """Stopped inside the third update, asked to leave in it the second time: the same weights and, to the last digit,
    result."""
    options = ["--updates=4", "--save_full=2", "--kl_target=1.0", "--kl_horizon=16"]
    rlhf.main(config_of(world, tmp_path / "straight", *options))
    real, calls = rlhf.improve, []

    def interrupt(*args):
        calls.append(args[5])
        if len(calls) == 3:
            raise KeyboardInterrupt
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        return real(*args)
    monkeypatch.setattr(rlhf, "improve", interrupt)
    for end in (KeyboardInterrupt, SystemExit):
        with pytest.raises(end) as raised:
            rlhf.main(config_of(world, tmp_path / "broken", *options))
        assert end is KeyboardInterrupt or raised.value.code == 75
        del raised
        gc.collect()                                                       # the lock goes with the frame that holds it
    assert checkpoint.newest(tmp_path / "broken" / "ppo", "full").name == "full_00000003"
    rlhf.main(config_of(world, tmp_path / "broken", *options))
    assert calls == [0, 1, 2, 2, 3]
    results, policies, logs = [], [], []
    for name in ("straight", "broken"):
        result = json.loads((tmp_path / name / "ppo" / "result.json").read_text())
        results.append({key: value for key, value in result.items() if key != "seconds"})
        policies.append(flat(hf.load_model(tmp_path / name / "ppo")[0]))
        logs.append({record["step"]: (record["score"], record["kl_coef"], record["value_loss"])
                     for record in read_log(tmp_path / name / "ppo")})
    assert torch.equal(*policies) and results[0] == results[1] and logs[0] == logs[1]
    assert len({kl_coef for _, kl_coef, _ in logs[0].values()}) > 1        # the adapted coefficient is carried over too
    capsys.readouterr()
    rlhf.main(config_of(world, tmp_path / "broken", *options))
    assert "already done" in capsys.readouterr().out


def test_prompts_without_a_rule_are_for_learning_too(world, tmp_path, monkeypatch):
    """Nobody knows their gold: it is promised nothing of, also when the run was interrupted and its start was read back."""
    rows = [json.loads(line) for line in (world / "data" / "chat" / "prompts_val.jsonl").read_text().splitlines()]
    for name in ("train", "val"):
        toy.write_lines(tmp_path / "chat" / f"prompts_{name}.jsonl", [{"messages": row["messages"]} for row in rows])
    options = [f"--data_dir={tmp_path}", "--updates=2", "--save_full=1"]
    real = rlhf.improve
    monkeypatch.setattr(rlhf, "improve", lambda *args: real(*args) if args[5] == 0 else sys.exit("killed"))
    with pytest.raises(SystemExit, match="killed"):
        rlhf.main(config_of(world, tmp_path, *options))
    gc.collect()
    monkeypatch.setattr(rlhf, "improve", real)
    rlhf.main(config_of(world, tmp_path, *options))
    result = json.loads((tmp_path / "ppo" / "result.json").read_text())
    assert result["after"]["gold"] is None and set(result["bounds"]) == {"stop_rate", "kl", "length"}


def test_another_starting_model_does_not_continue_the_run(world, words, tmp_path, monkeypatch, capsys):
    """Its reference would be another one in the middle of the run, without a sound."""
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt
    shutil.copytree(world / "sft", tmp_path / "sft")
    options = [f"--policy_from={tmp_path}/sft", "--save_full=1"]
    monkeypatch.setattr(rlhf, "evaluate", lambda *args: {"gold": 0.0})
    monkeypatch.setattr(checkpoint, "prune", interrupt)                    # right after the first checkpoint
    with pytest.raises(KeyboardInterrupt):
        rlhf.main(config_of(world, tmp_path, *options))
    gc.collect()
    shutil.rmtree(tmp_path / "sft")
    toy.save(tmp_path / "sft", sharp_policy(words, seed=9), words)
    with pytest.raises(SystemExit) as refused:
        rlhf.main(config_of(world, tmp_path, *options))
    assert refused.value.code == 2 and "begun with model (" in capsys.readouterr().err


@pytest.mark.parametrize("options, said", [
    (["--top_k=50", "--temperature=0.0", "--episodes=7"], ["top_k = 50", "temperature must be", "episodes = 7"]),
    (["--top_p=0.9"], ["top_p = 0.9"]),
    (["--policy_from=/nowhere"], ["/nowhere"]),
    (["--minibatches=0", "--log_every=0"], ["minibatches must be", "log_every must be"]),
    (["--eval_prompts=0"], ["eval_prompts = 0"]),
    (["--kl_horizon=0", "--lam=7", "--value_learning_rate=-1"], ["kl_horizon must", "lam must", "value_learning_rate must"]),
    (["--data_dir=/nowhere"], ["prompts_train.jsonl", "prompts_val.jsonl", "prepare_chat.py"]),
    (["--max_new_tokens=125"], ["none of at most 3 tokens"])])
def test_refusals(world, tmp_path, capsys, options, said):
    with pytest.raises(SystemExit) as refused:
        rlhf.main(config_of(world, tmp_path, *options))
    error = capsys.readouterr().err
    assert refused.value.code == 2 and all(words in error for words in said)
    assert not (tmp_path / "ppo" / "config.json").exists()     # the folder is not bound to what was refused


def test_models_that_do_not_belong_together_are_refused(world, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        rlhf.main(config_of(world, tmp_path, f"--reward_from={world}/sft"))
    assert refused.value.code == 2 and "is no reward model" in capsys.readouterr().err
    other = Tokenizer(words.ranks[:-1], words.pattern, {name: id - 1 for name, id in words.specials.items()})
    policy = toy.model(other, block_size=256)
    toy.save(tmp_path / "policy", policy, other)
    with pytest.raises(SystemExit) as refused:
        rlhf.main(config_of(world, tmp_path, f"--policy_from={tmp_path}/policy"))
    error = capsys.readouterr().err
    assert words.hash[:16] in error and other.hash[:16] in error and "reads 128 tokens" in error
    toy.save(tmp_path / "adapted", toy.model(words, adapter_size=4), words)
    with pytest.raises(SystemExit):
        rlhf.main(config_of(world, tmp_path / "new", f"--policy_from={tmp_path}/adapted", "--lora_rank=4"))
    assert "lora_rank goes with no policy that has adapters" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


TWO_PROCESSES = """
import sys, hashlib, torch
sys.path[:0] = [{root!r}, {tests!r}]
import rlhf, toy
real = rlhf.improve

def digest(*tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()

clip, norms = rlhf.clip, []
rlhf.clip = lambda *args: norms.append(clip(*args)) or norms[-1]

def improve(policy, value, optimizers, batch, old, update, config, setup, check):
    learned = real(policy, value, optimizers, batch, old, update, config, setup, check)
    if update == 0:
        torch.save((vars(batch), old, norms[:2]), {folder!r} + f"/rank{{setup.rank}}.pt")
    with open({folder!r} + f"/rank{{setup.rank}}", "a") as file:        # both write at once: not to one stream
        prompts = batch.ids[:, :batch.prompt_width]
        print(digest(*policy.parameters(), *value.parameters()), digest(prompts), learned["approx_kl"], file=file)
    return learned

rlhf.improve = improve
rlhf.main(toy.config_of(rlhf, *sys.argv[1:]))
"""


def test_two_processes_hold_the_same_parameters(world, tmp_path):
    """Different prompts on each rank, and after every update the same bits in policy and critic. The first gradients
    are those of one process that has the answers of both (Adam would hide a factor)."""
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES.format(root=str(ROOT), tests=str(ROOT / "tests"), folder=str(tmp_path)))
    arguments = [f"--data_dir={world}/data", f"--out_dir={tmp_path}/out", f"--policy_from={world}/sft",
                 f"--reward_from={world}/reward", "--episodes=8", "--micro_batch_size=3", "--updates=2",
                 "--eval_prompts=8", "--max_new_tokens=8", "--learning_rate=1e-3", "--minibatches=1"]
    code, said = Program(script, *arguments, processes=2).wait()
    assert code == 0, said
    ranks = [[line.split() for line in (tmp_path / f"rank{rank}").read_text().splitlines()] for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 2
    for (parameters, prompts, kl), (other_parameters, other_prompts, other_kl) in zip(*ranks):
        assert parameters == other_parameters and prompts != other_prompts and kl == other_kl
    assert ranks[0][0][0] != ranks[0][1][0]
    halves = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    halves = [(rlhf.Batch(**fields), old, norms) for fields, old, norms in halves]
    policy, value = hf.load_model(world / "sft")[0], rlhf.critic_from(hf.load_model(world / "reward", "scalar")[0])
    count = sum(batch.answer.sum() for batch, _, _ in halves)
    for batch, old, _ in halves:
        rows, inside = torch.arange(4), batch.answer
        new, values = rlhf.answer_logprobs(policy, batch, rows, config_of(world, tmp_path)), rlhf.answer_values(value, batch, rows)
        loss = -new * old["advantages"] + (values - old["returns"]).square() / 2
        (loss[inside].sum() / count).backward()
    expected = [torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item() for model in (policy, value)]
    for *_, norms in halves:
        assert [norm.item() for norm in norms] == pytest.approx(expected, rel=1e-3)
    assert "answers" in json.loads((tmp_path / "out" / "ppo" / "result.json").read_text())["after"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_honest_run_passes_the_self_check(dtype, world, tmp_path, capsys, monkeypatch):
    """Also when the models come with dropout: the run switches it off, and for all of them."""
    real = rlhf.read_model

    def load_with_dropout(*args, **kwargs):
        model, words = real(*args, **kwargs)
        set_dropout(model, 0.1)
        return model.train(), words
    monkeypatch.setattr(rlhf, "read_model", load_with_dropout)
    rlhf.main(config_of(world, tmp_path, "--updates=1", "--episodes=24", f"--dtype={dtype}"))
    assert "self-check" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- slow: proofs

@pytest.mark.slow
def test_killed_and_started_again_is_the_same(world, tmp_path):
    """kill -9 at any moment after the first checkpoint; the second call ends where an undisturbed one does."""
    def command(out):
        return ["rlhf.py", "--device=cpu", "--threads=1", f"--data_dir={world}/data",
                f"--policy_from={world}/sft", f"--reward_from={world}/reward", "--episodes=8", "--updates=12",
                "--save_full=1", "--eval_prompts=8", "--max_new_tokens=12", f"--out_dir={out}"]
    assert Program(*command(tmp_path / "straight")).wait()[0] == 0
    program = Program(*command(tmp_path / "killed"))
    assert program.until(lambda: checkpoint.newest(tmp_path / "killed" / "ppo", "full")), program.text()
    time.sleep(random.random())
    program.kill()
    assert not (tmp_path / "killed" / "ppo" / "result.json").exists()
    assert Program(*command(tmp_path / "killed")).wait()[0] == 0
    policies = [flat(hf.load_model(tmp_path / name / "ppo")[0]) for name in ("straight", "killed")]
    assert torch.equal(*policies)


@pytest.mark.slow
def test_it_learns_and_by_the_right_means(words, tmp_path):
    """A rising reward proves little, so: gold, divergence, stops and length together; and without the divergence in the
    reward the policy must drift further. The whole chain on the toy task, from untrained weights."""
    toy.write_data(tmp_path / "data", prompts=200, pairs=3000, control=100)
    policy = toy.model(words)
    toy.instruct(policy, words, steps=250)
    toy.save(tmp_path / "sft", policy, words)
    reward.main(toy.config_of(reward, f"--data_dir={tmp_path}/data", f"--init_from={tmp_path}/sft",
                              f"--out_dir={tmp_path}", "--batch_size=16", "--learning_rate=2e-3", "--epochs=2",
                              "--along_until=0.7"))
    # One that has not yet found the faults of spoiled remarks is fooled: its score rises, and the gold score falls.
    assert json.loads((tmp_path / "reward" / "result.json").read_text())["val"]["accuracy"] > 0.9
    found = {}
    for kl_coef in ("0.2", "0.0"):
        out = tmp_path / f"kl{kl_coef}"
        rlhf.main(toy.config_of(rlhf, f"--data_dir={tmp_path}/data", f"--policy_from={tmp_path}/sft",
                                f"--reward_from={tmp_path}/reward", f"--out_dir={out}", "--learning_rate=1e-3",
                                "--value_learning_rate=1e-3", "--epochs=4", "--updates=20", f"--kl_coef={kl_coef}"))
        found[kl_coef] = json.loads((out / "ppo" / "result.json").read_text())
    before, after = found["0.2"]["before"], found["0.2"]["after"]
    assert found["0.2"]["gold_rise_in_deviations"] > 0.6 and after["score"] > before["score"] + 0.8
    assert 0.5 < after["kl"] < 12 and after["stop_rate"] > 0.95 and after["length"] < 25
    assert found["0.0"]["after"]["kl"] > 1.3 * after["kl"]
