"""The formulas of engine/rl.py: each against its definition, a hand-worked case or the mistake that it is known for."""
import math

import pytest
import torch

from engine import rl

RIGHT = dict(rtol=1e-5, atol=1e-6)


def prefix_mask(lengths, width):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------------- masks

def test_last_real_token_wherever_the_padding_is():
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    values = torch.arange(25.0).view(5, 5)
    assert rl.at_last(values, mask).tolist() == [2.0, 9.0, 12.0, 19.0, 0.0]
    assert rl.is_last(mask).sum(-1).tolist() == [1, 1, 1, 1, 0]


def test_padding_may_be_nan_without_touching_anything():
    mask = prefix_mask([2, 4], 4)
    x = torch.where(mask, noise(2, 4), float("nan"))
    clean = torch.where(mask, x, 0.0)
    assert rl.masked_sum(x, mask) == rl.masked_sum(clean, mask)
    torch.testing.assert_close(rl.whiten(x, mask), rl.whiten(clean, mask))
    for dirty, good in zip(rl.gae(x, x, mask), rl.gae(clean, clean, mask)):
        assert torch.equal(dirty, good)
    assert torch.isfinite(rl.kl_rewards(x, x, mask, 0.1)).all()


def test_a_mean_over_the_step_is_not_a_mean_of_means():
    """[1, 2] and [3 .. 7]: 4.0 over all seven, 3.25 as the mean of the two means. And two ranks give what one would."""
    first, second = torch.tensor([1.0, 2, 0, 0, 0]), torch.tensor([3.0, 4, 5, 6, 7])
    x, mask = torch.stack([first, second]), prefix_mask([2, 5], 5)
    assert rl.masked_mean(x, mask) == 4.0
    other_rank = torch.stack([second.sum(), torch.tensor(5.0)])
    assert rl.masked_mean(first[None], mask[:1], total=lambda t: t + other_rank) == 4.0


def test_whitening_removes_the_mean_under_the_mask_only():
    mask = prefix_mask([3, 6, 1], 6)
    white = rl.whiten(5 + 3 * noise(3, 6), mask)
    inside = white[mask]
    assert abs(inside.mean()) < 1e-5 and abs(inside.std(unbiased=False) - 1) < 1e-4
    assert (white[~mask] == 0).all()
    kept = rl.whiten(torch.tensor([[5.0, 6, 7, 8]]), torch.ones(1, 4).bool(), keep_mean=True)
    assert abs(kept.mean() - 6.5) < 1e-5


def test_whitening_of_equal_numbers_is_zero():
    assert (rl.whiten(torch.full((2, 3), 7.0), prefix_mask([2, 3], 3)) == 0).all()


# ----------------------------------------------------------------------------------------------------------- rewards

def test_three_tokens_by_hand():
    """KL in the reward with its sign, the score on the end token, then GAE: numbers worked out on paper."""
    logprobs, ref = torch.tensor([[-1.0, -2.0, -0.5, -9.0]]), torch.tensor([[-1.5, -1.0, -0.5, -1.0]])
    mask = prefix_mask([3], 4)
    rewards = rl.place_score(rl.kl_rewards(logprobs, ref, mask, 0.1), torch.tensor([2.0]), mask)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 0.1, 2.0, 0.0]]))
    values = torch.tensor([[0.5, 1.0, 1.5, 99.0]])
    advantages, returns = rl.gae(rewards, values, mask, gamma=1.0, lam=0.5)
    # delta: -.05 + 1 - .5 = .45;  .1 + 1.5 - 1 = .6;  2 + 0 - 1.5 = .5.   A: .5;  .6 + .25 = .85;  .45 + .425 = .875
    torch.testing.assert_close(advantages, torch.tensor([[0.875, 0.85, 0.5, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[1.375, 1.85, 2.0, 0.0]]))


def test_score_lands_on_the_last_response_token():
    """Ended early, cut at the limit, and of length 1, in one batch; with V = 0 the end token's advantage is the score
    itself."""
    mask = prefix_mask([3, 5, 1], 5)
    rewards = rl.place_score(torch.zeros(3, 5), torch.tensor([1.0, 2.0, 3.0]), mask)
    assert rewards.nonzero().tolist() == [[0, 2], [1, 4], [2, 0]]
    advantages, _ = rl.gae(rewards, torch.zeros(3, 5), mask)
    assert [advantages[0, 2], advantages[1, 4], advantages[2, 0]] == [1.0, 2.0, 3.0]
    wider = rl.gae(rl.place_score(torch.zeros(3, 9), torch.tensor([1.0, 2, 3]), prefix_mask([3, 5, 1], 9)),
                   torch.full((3, 9), 7.0), prefix_mask([3, 5, 1], 9))
    narrow = rl.gae(rewards, torch.full((3, 5), 7.0), mask)
    for a, b in zip(wider, narrow):                                # more padding changes nothing
        assert torch.equal(a[:, :5], b) and (a[:, 5:] == 0).all()


def test_missing_end_costs_exactly_the_penalty():
    scores = rl.penalise_missing_end(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), 0.75)
    assert scores.tolist() == [1.0, 0.25]


def test_adaptive_coefficient_moves_the_right_way():
    assert rl.adapted_kl_coef(0.1, kl=12.0, target=6.0, answers=64, horizon=640) == pytest.approx(0.1 * 1.02)
    assert rl.adapted_kl_coef(0.1, kl=1.0, target=6.0, answers=64, horizon=640) == pytest.approx(0.1 * 0.98)
    assert rl.adapted_kl_coef(0.1, kl=6.0, target=6.0, answers=64, horizon=640) == 0.1


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.97, 0.0)])
def test_gae_equals_its_definition(gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, written as the double loop that it is."""
    lengths, width = [7, 1, 4, 6], 7
    mask, rewards, values = prefix_mask(lengths, width), noise(4, width, seed=1), noise(4, width, seed=2)
    advantages, returns = rl.gae(rewards, values, mask, gamma, lam)
    for row, length in enumerate(lengths):
        v = [values[row, t].item() if t < length else 0.0 for t in range(width + 1)]
        delta = [rewards[row, t].item() + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(width):
            expected = sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, length))
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-5)
        if lam == 1.0:                                             # then the return is the discounted reward to go
            to_go = sum(gamma ** t * rewards[row, t].item() for t in range(length))
            assert returns[row, 0].item() == pytest.approx(to_go, abs=1e-5)


# ------------------------------------------------------------------------------------------------------------ losses

@pytest.mark.parametrize("advantage, ratio, loss, slope", [
    (+1.0, 1.5, -1.2, 0.0),         # better than allowed: the gain ends at the edge, and so does the gradient
    (+1.0, 0.5, -0.5, -0.5),        # it got less likely although it was good: paid in full
    (-1.0, 1.5, +1.5, +1.5),        # it got likelier although it was bad: paid in full
    (-1.0, 0.5, +0.8, 0.0),         # worse than allowed: the gain ends
    (+1.0, 1.1, -1.1, -1.1),        # inside the clip nothing is clipped
    (-1.0, 0.9, +0.9, +0.9)])
def test_policy_clip_truth_table(advantage, ratio, loss, slope):
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    found = rl.policy_loss(new, torch.zeros(1, 1), torch.tensor([[advantage]]), clip=0.2)
    found.sum().backward()
    assert found.item() == pytest.approx(loss, rel=1e-5)
    assert new.grad.item() == pytest.approx(slope, rel=1e-5)


def test_policy_loss_at_ratio_one_is_the_policy_gradient():
    new = noise(2, 3).requires_grad_()
    advantages = noise(2, 3, seed=5)
    rl.policy_loss(new, new.detach(), advantages, 0.2).sum().backward()
    torch.testing.assert_close(new.grad, -advantages)


@pytest.mark.parametrize("new, old, target, loss", [
    (1.1, 1.0, 2.0, 0.5 * 0.9 ** 2),        # inside the clip
    (1.5, 1.0, 2.0, 0.5 * 0.8 ** 2),        # clipped value 1.2 is the farther one
    (3.0, 1.0, 2.9, 0.5 * 1.7 ** 2),        # nearly right but too far from the old value: counted as if at 1.2
    (0.0, 1.0, 2.0, 0.5 * 2.0 ** 2)])       # clipped 0.8 would be nearer: the unclipped counts
def test_value_clip_truth_table(new, old, target, loss):
    found = rl.value_loss(torch.tensor(new), torch.tensor(old), torch.tensor(target), clip=0.2)
    assert found.item() == pytest.approx(loss, rel=1e-5)


def test_huge_ratios_stay_finite():
    loss = rl.policy_loss(torch.tensor([[0.0]]), torch.tensor([[-500.0]]), torch.tensor([[-1.0]]), 0.2)
    assert torch.isfinite(loss).all()


def test_ranking_loss():
    chosen, rejected = noise(4, seed=1), noise(4, seed=2)
    equal = rl.ranking_loss(chosen, chosen)
    torch.testing.assert_close(equal, torch.full((4,), math.log(2)))
    torch.testing.assert_close(rl.ranking_loss(chosen + 5, rejected + 5), rl.ranking_loss(chosen, rejected))
    torch.testing.assert_close(rl.ranking_loss(chosen, rejected),
                               -torch.log(torch.sigmoid(chosen - rejected)))
    torch.testing.assert_close(rl.ranking_loss(chosen, rejected, margin=torch.ones(4)),
                               rl.ranking_loss(chosen - 1, rejected))
    assert torch.equal(rl.ranking_loss(chosen, rejected) < rl.ranking_loss(rejected, chosen), chosen > rejected)
    torch.testing.assert_close(rl.ranking_loss(chosen, rejected, centring=0.1) - rl.ranking_loss(chosen, rejected),
                               0.1 * (chosen + rejected) ** 2)


def test_eos_in_loss_and_pad_grad_zero():
    """The stop decision is an action like any other; what stands behind it must not move a thing."""
    lengths, width = [2, 5], 6
    mask = prefix_mask(lengths, width)
    logits = noise(2, width, 11).requires_grad_()
    ids = torch.randint(11, (2, width), generator=torch.Generator().manual_seed(3))
    new = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    rl.masked_sum(rl.policy_loss(new, new.detach(), noise(2, width, seed=4), 0.2), mask).backward()
    for row, length in enumerate(lengths):
        assert logits.grad[row, length - 1].abs().max() > 1e-3     # the end token's own step
    assert (logits.grad[~mask] == 0).all()


# ------------------------------------------------------------------------------------------------------------ gauges

def test_approx_kl_is_not_diluted_by_padding():
    new, old, mask = torch.tensor([[0.2, 0.0, 0.0, 0.0]]), torch.zeros(1, 4), prefix_mask([1], 4)
    assert rl.masked_mean(rl.approx_kl(new, old), mask).item() == pytest.approx(0.02)
    assert rl.clipped(torch.tensor([0.3, 0.1, -0.3]), torch.zeros(3), 0.2).tolist() == [1.0, 0.0, 1.0]


def test_explained_variance():
    mask, returns = prefix_mask([3, 4], 4), noise(2, 4)
    assert rl.explained_variance(returns, returns, mask).item() == 1.0
    assert rl.explained_variance(torch.full((2, 4), 3.0), returns, mask).item() == pytest.approx(0.0, abs=1e-5)
    assert rl.explained_variance(-returns, returns, mask).item() < 0
    dirty = torch.where(mask, returns, 1e6)
    assert rl.explained_variance(dirty, returns, mask).item() == 1.0


def test_ties_count_half():
    assert rl.pair_accuracy(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 0.0, 3.0])).tolist() == [1.0, 0.5, 0.0]


# ------------------------------------------------------------------------------------------------------- self-checks

def sampled(top_k=0, temperature=1.0, rows=200, peaked=1.0):
    logits = peaked * noise(rows, 8, 50, seed=7)
    drawn_from = logits / temperature
    if top_k:
        drawn_from = drawn_from.masked_fill(drawn_from < drawn_from.topk(top_k).values[..., -1:], float("-inf"))
    ids = torch.distributions.Categorical(logits=drawn_from)
    torch.manual_seed(0)
    return logits, ids.sample()


def test_entropy_identity_holds_for_honest_samples():
    for peaked in (0.0, 1.0, 6.0, 40.0):                           # also when nearly every token is certain
        logits, ids = sampled(peaked=peaked)
        _, standard_errors = rl.entropy_gap(*rl.surprise(logits, ids), torch.ones_like(ids).bool())
        assert abs(standard_errors) < 3, peaked


@pytest.mark.parametrize("wrong", [dict(top_k=10), dict(top_k=20), dict(temperature=0.8), dict(temperature=1.2)])
def test_entropy_identity_catches_another_sampling_distribution(wrong):
    logits, ids = sampled(**wrong)
    _, standard_errors = rl.entropy_gap(*rl.surprise(logits, ids), torch.ones_like(ids).bool())
    assert abs(standard_errors) > 5


def test_surprise_against_torch_and_entropy_never_negative():
    logits, ids = sampled(rows=3)
    logits[0, 0, :] = torch.where(torch.arange(50) == 4, 0.0, float("-inf"))      # a certain token: 0 * -inf is not NaN
    ids[0, 0] = 4
    surprise, entropy, variance = rl.surprise(logits, ids)
    torch.testing.assert_close(entropy[1:], torch.distributions.Categorical(logits=logits[1:]).entropy(), **RIGHT)
    assert surprise[0, 0] == entropy[0, 0] == variance[0, 0] == 0
    assert (entropy >= 0).all() and (variance >= 0).all()


def test_largest_counts_nan_as_infinite():
    mask = prefix_mask([1], 2)
    assert rl.largest(torch.tensor([[-2.0, 9.0]]), mask) == 2.0
    assert rl.largest(torch.tensor([[float("nan"), 0.0]]), mask) > 1e30
