"""
Mistakes that trainers of others have had, planted one by one in rlhf.py and engine/rl.py, with what finds each of them:
a test of these formulas, of a scene or of a run, or, where a sentence stands in its place, the self-check that ends the
run itself at its first update. None survives. (DPO's and the reward model's stand in their own tests.)
"""
import pytest

import rlhf
import test_grpo
import test_rl
import test_rlhf
from engine import checkpoint, rl
from planted import passes, plant
from test_rlhf import config_of, scene, spy, words, world      # noqa: F401 (fixtures)

SCORED = "between generation and scoring"
DRAWN = "not drawn from the distribution"
MISTAKES = {
    # rewards and advantages
    "the divergence is rewarded": (rl, "kl_rewards", "-kl_coef *", "kl_coef *", test_rl.test_three_tokens_by_hand),
    "the score stands behind the end": (
        rl, "place_score", "is_last(mask)", "is_last(mask).roll(1, 1)", test_rl.test_score_lands_on_the_last_response_token),
    "every token gets the score": (rl, "place_score", "is_last(mask)", "mask", test_rl.test_three_tokens_by_hand),
    "who ended is punished": (
        rl, "penalise_missing_end", "scores, scores - penalty", "scores - penalty, scores", test_rl.test_missing_end_costs_exactly_the_penalty),
    "the penalty is forgotten": (
        rlhf, "ppo", "place_score(rewards, penalised,", "place_score(rewards, scores,", test_rlhf.test_an_update_put_together_again_by_hand),
    "values of padding are believed": (
        rl, "gae", "torch.where(mask, values, 0.0), ", "values, ", test_rl.test_gae_equals_its_definition),
    "something follows the end": (
        rl, "gae", "torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])", "torch.zeros_like(values[:, 0]), values[:, -1]",
        test_rl.test_gae_equals_its_definition),
    "lambda is forgotten": (rl, "gae", "gamma * lam * after", "gamma * after", test_rl.test_gae_equals_its_definition),
    "advantages keep their mean": (
        rl, "whiten", "white + mean if keep_mean else white", "white if keep_mean else white + mean",
        test_rl.test_whitening_removes_the_mean_under_the_mask_only),
    "padding is whitened along": (
        rl, "whiten", "mean = masked_mean(x, mask, total)", "mean = x.mean()", test_rl.test_whitening_removes_the_mean_under_the_mask_only),
    "advantages are not whitened": (
        rlhf, "ppo", "rl.whiten(advantages, batch.answer, total=total)", "advantages",
        test_rlhf.test_an_update_put_together_again_by_hand),
    "a large divergence lowers its weight": (
        rl, "adapted_kl_coef", "kl / target - 1", "1 - kl / target", test_rl.test_adaptive_coefficient_moves_the_right_way),
    "an adapted weight is forgotten on resume": (
        rlhf, "ppo", 'facts = {"kl_coef": kl_coef', 'facts = {"kl_coef": config.kl_coef', test_rlhf.test_interrupted_and_continued_is_the_same),
    # losses
    "the policy's loss has the wrong sign": (
        rl, "policy_loss", "-advantages * ratio, -advantages", "advantages * ratio, advantages", test_rl.test_policy_clip_truth_table),
    "the better of two policy losses counts": (
        rl, "policy_loss", "torch.max(", "torch.min(", test_rl.test_policy_clip_truth_table),
    "a ratio overflows": (rl, "policy_loss", ".clamp(-20, 20)", "", test_rl.test_huge_ratios_stay_finite),
    "the better of two value losses counts": (rl, "value_loss", "torch.max(", "torch.min(", test_rl.test_value_clip_truth_table),
    "values are clipped around the new one": (
        rl, "value_loss", "old_values + (values - old_values)", "values + (old_values - values)", test_rl.test_value_clip_truth_table),
    "the ratio is that to the last step": (
        rlhf, "improve", "policy_loss(new, before,", "policy_loss(new, new.detach(),", test_rlhf.test_the_second_step_still_looks_at_what_was_sampled),
    "a mean of means": (
        rlhf, "improve", "loss = rl.masked_sum(loss, mask)\n", "loss = rl.masked_mean(loss, mask) * count / len(rows) * len(micro)\n",
        test_rlhf.test_gradients_do_not_depend_on_the_micro_batches),
    "a stop that goes on with Adam's momentum": (
        rlhf, "improve", "            break\n", "            [p.grad.zero_() for network in networks for p in network.parameters()]\n",
        test_rlhf.test_an_early_stop_leaves_every_parameter_as_it_was),
    "policy and critic share one norm": (
        rlhf, "improve", "[clip(network.parameters(), config.grad_clip).item() for network in networks]",
        "[clip([p for network in networks for p in network.parameters()], config.grad_clip).item()]",
        test_rlhf.test_policy_and_critic_are_clipped_apart),
    # gauges
    "gauges are diluted by padding": (
        rl, "masked_mean", "mask.sum().to(x.dtype)", "x.new_tensor(mask.numel())", test_rl.test_approx_kl_is_not_diluted_by_padding),
    "padding has a log-probability of 1.0": (
        rl, "masked_sum", "0.0", "1.0", test_rl.test_a_mean_over_the_step_is_not_a_mean_of_means),
    # what is sampled and what is scored
    "top-k sampling": (rlhf, "roll_out", "temperature=config.temperature", "temperature=config.temperature, top_k=4", DRAWN),
    "nucleus sampling": (rlhf, "roll_out", "temperature=config.temperature", "temperature=config.temperature, top_p=0.7", DRAWN),
    "scored at temperature 1": (rlhf, "answer_logprobs", "config.temperature", "1.0", SCORED),
    "sampled at temperature 1": (rlhf, "roll_out", "temperature=config.temperature", "temperature=1.0", SCORED),
    "scored at other places": (
        rlhf, "answer_logprobs", "logprobs(model, ids", "logprobs(model, ids.roll(-1, 1)", SCORED),
    "sorted by length, and left so": (rlhf, "judge", "(column)[back]", "(column)", SCORED),
    "padding is attended to": (
        rlhf, "answer_logprobs", "else rl.spread(found, answer)",
        "else logprobs(model, batch.ids[rows], None, config.temperature)[:, batch.prompt_width - 1:]", "changes the log-probabilities"),
    "the end is no token of the answer": (
        rlhf, "roll_out", "mask[row, start:end]", "mask[row, start:end - answers.stopped[row]]", test_rlhf.test_the_scene_has_what_the_tests_need),
    "padding is learned": (rlhf, "roll_out", "mask[row, start:end]", "mask[row, start:]", test_rlhf.test_the_scene_has_what_the_tests_need),
    "dropout in the update": (
        rlhf, "improve", "answer_logprobs(policy,", "answer_logprobs(policy.train(),", test_rlhf.test_an_honest_run_passes_the_self_check),
    "dropout in the whole run": (
        rlhf, "ppo", "policy.to(setup.device).eval()", "policy.to(setup.device).train()", test_rlhf.test_an_honest_run_passes_the_self_check),
    # the other networks
    "the reference is scored otherwise": (
        rlhf, "judge", "answer_logprobs(reference, batch, rows, config)", "0.9 * answer_logprobs(reference, batch, rows, config)",
        "policy and reference differ"),
    "the reference is the policy": (
        rlhf, "ppo", "copy.deepcopy(policy).requires_grad_(False)", "policy", test_rlhf.test_reference_and_reward_model_are_frozen_and_the_others_move),
    "the policy is scored as its own reference": (
        rlhf, "judge", "answer_logprobs(reference, batch", "answer_logprobs(policy, batch",
        test_rlhf.test_reference_and_reward_model_are_frozen_and_the_others_move),
    "a value has seen its token": (
        rlhf, "answer_values", "value(ids[:, :-1], keep=chooses)", "value(ids[:, 1:], keep=chooses)",
        test_rlhf.test_values_see_what_came_before_and_not_the_token_itself),
    "the critic attends to padding": (
        rlhf, "answer_values", "rl.spread(value(ids[:, :-1], keep=chooses), batch.answer[rows])",
        "value(batch.ids[rows])[:, batch.prompt_width - 1:-1]", "changes the values"),
    "the critic's head is drawn": (
        rlhf, "critic_from", "zeros_(value.score.weight)", "normal_(value.score.weight)", test_rlhf.test_the_critic_begins_as_the_reward_models_trunk),
    "the critic begins from nothing": (
        rlhf, "critic_from", "copy.deepcopy(reward)", "copy.deepcopy(reward).init_weights(1)",
        test_rlhf.test_the_critic_begins_as_the_reward_models_trunk),
    "the score is read from padding": (
        rlhf, "answer_scores", "reward(ids, keep=ends)", "reward(ids)[:, -1]", "changes the scores"),
    # GRPO
    "the groups are torn apart": (
        rlhf, "ppo", "for i in order for _ in range(times)", "for _ in range(times) for i in order", test_grpo.test_a_run),
    "better than the answers to all prompts": (
        rl, "group_advantages", "groups.mean(1, keepdim=True)", "groups.mean()", test_grpo.test_advantages_of_groups_by_hand),
    "a rounding is an advantage": (
        rl, "group_advantages", "torch.where(equal, 0.0, advantages)", "advantages", test_grpo.test_advantages_of_groups_by_hand),
    "the estimator the wrong way round": (
        rl, "kl_loss", "(ref_logprobs - logprobs)", "(logprobs - ref_logprobs)", test_grpo.test_the_divergence_in_the_loss),
    "long answers' tokens weigh less": (
        rl, "token_weights", '"token": 1 / tokens', '"token": 1 / (answers * mask.sum(1, keepdim=True))', test_grpo.test_what_a_token_weighs),
}


@pytest.mark.parametrize("mistake", [name for name, (*_, found_by) in MISTAKES.items() if found_by == SCORED])
def test_in_bf16_too(mistake, world, tmp_path, monkeypatch, capsys):      # noqa: F811
    """Where rounding alone moves single tokens by more than some mistakes do."""
    module, name, old, new, _ = MISTAKES[mistake]
    plant(monkeypatch, module, name, old, new)
    with pytest.raises(SystemExit):
        rlhf.main(config_of(world, tmp_path, "--updates=1", "--episodes=24", "--temperature=0.7", "--dtype=bf16"))
    assert SCORED in capsys.readouterr().err


WHOLE_RUNS = (test_rlhf.test_interrupted_and_continued_is_the_same, test_rlhf.test_an_update_put_together_again_by_hand,
              test_rlhf.test_reference_and_reward_model_are_frozen_and_the_others_move, test_grpo.test_a_run)
mark = lambda name: pytest.mark.slow if MISTAKES[name][-1] in WHOLE_RUNS else ()


@pytest.mark.parametrize("mistake", [pytest.param(name, marks=mark(name)) for name in MISTAKES])
def test_no_mistake_survives(mistake, request, world, tmp_path, monkeypatch, capsys):      # noqa: F811
    module, name, old, new, found_by = MISTAKES[mistake]
    plant(monkeypatch, module, name, old, new)
    if callable(found_by):
        assert not passes(found_by, request)
        return
    with pytest.raises(SystemExit) as refused:
        rlhf.main(config_of(world, tmp_path, "--updates=1", "--episodes=24", "--temperature=0.7"))
    error = capsys.readouterr().err
    assert refused.value.code == 2 and found_by in error, error
    assert not (tmp_path / "ppo" / "result.json").exists() and checkpoint.newest(tmp_path / "ppo") is None
