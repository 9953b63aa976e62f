"""The formulas of paw.py against hand-computed numbers, naive loops written from the paper, and their gradients.

No model and no environment is needed here.  `case 18` and the like: faults that others made, each with the right value.
"""

import doctest
import math
from fractions import Fraction

import pytest
import torch

import paw

LN4 = math.log(4)


def logs(*rows):
    """Natural logarithms of probabilities, [B, S]."""
    return torch.tensor(rows).log()


def random_logp(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).clamp(min=1e-3).log()


def random_mask(lengths, width):
    return (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()


def close(tensor, *numbers, tol=1e-5):
    return torch.allclose(torch.as_tensor(tensor, dtype=torch.float64), torch.tensor(numbers, dtype=torch.float64), rtol=0, atol=tol)


def test_examples_in_docstrings():
    result = doctest.testmod(paw)
    assert result.failed == 0 and result.attempted >= 4


# ---- 3.1: action entropy -------------------------------------------------------------------------------------------------

def test_action_entropy_equals_a_naive_loop():
    logp, mask = random_logp(5, 7), random_mask([7, 1, 4, 0, 6], 7)
    for row, kept, value in zip(logp, mask, paw.action_entropy(logp, mask)):
        probabilities = [math.exp(x) for x, keep in zip(row.tolist(), kept.tolist()) if keep]
        assert value.item() == pytest.approx(sum(-q * math.log(q) for q in probabilities) / max(len(probabilities), 1), abs=1e-6)


def test_case48_entropy_is_minus_q_log_q():
    # (0.5 ln 2 + 0.25 ln 4) / 2 = (0.346574 + 0.346574) / 2; the mean of -ln q would be 1.0397
    assert close(paw.action_entropy(logs([.5, .25]), torch.ones(1, 2)), 0.346574)


def test_case15_action_entropy_of_an_empty_row_is_0_and_padding_does_not_count():
    logp = logs([.5, .25, .3], [.5, .25, .9])
    assert close(paw.action_entropy(logp, torch.tensor([[0, 0, 0], [1, 1, 0]])), 0, 0.346574)
    logp[1, 2] = -torch.inf  # -0 * inf would be NaN
    assert close(paw.action_entropy(logp, torch.tensor([[0, 0, 0], [1, 1, 0]])), 0, 0.346574)


# ---- eq. 4: selection ----------------------------------------------------------------------------------------------------

def test_case48_selection_is_over_the_whole_update():
    # groups {0, 1} and {2, 3}: half of all four are 0 and 1; half of each group would be 0 and 3
    selected = paw.select_transitions(torch.tensor([.9, .8, .1, .2]), .5)
    assert selected.dtype == torch.bool and selected.tolist() == [True, True, False, False]


@pytest.mark.parametrize("n, alpha, kept", [
    (5, .75, 4),      # ceil(3.75)
    (4, .75, 3), (1, .01, 1), (3, 1.0, 3), (1, 1.0, 1),
    (100, .07, 7),    # 0.07 * 100 = 7.000000000000001 in floating point
    (10, .3, 3), (1000, .001, 1), (7, .5, 4)])
def test_case48_selection_keeps_ceil_alpha_n(n, alpha, kept):
    assert paw.select_transitions(torch.rand(n), alpha).sum() == kept


def test_selection_count_is_exact_for_every_percentage():
    for n in (1, 3, 16, 64, 250):
        for percent in range(1, 101):
            kept = paw.select_transitions(torch.zeros(n), percent / 100).sum().item()
            assert kept == math.ceil(Fraction(percent, 100) * n), (n, percent)


def test_case48_selection_breaks_ties_by_index():
    assert paw.select_transitions(torch.tensor([.1, .5, .5, .5, .9]), .6).tolist() == [False, True, True, False, True]
    many = paw.select_transitions(torch.zeros(1000), .25)  # an unstable sort shows on long inputs only
    assert many[:250].all() and not many[250:].any()


def test_selection_equals_a_naive_sort():
    entropy = torch.randint(0, 9, (200,), generator=torch.Generator().manual_seed(0)) / 10  # many ties
    best = sorted(range(200), key=lambda n: (-entropy[n].item(), n))[:150]
    assert paw.select_transitions(entropy, .75).nonzero()[:, 0].tolist() == sorted(best)


# ---- eq. 5 to 9: the world-model losses ------------------------------------------------------------------------------------

def test_clipped_mae_equals_a_naive_loop():
    logp, mask = random_logp(6, 9), random_mask([9, 0, 1, 5, 8, 3], 9)
    for rho in (.05, .2, .5, 1.0):
        for row, kept, value in zip(logp, mask, paw.clipped_mae(logp, mask, rho)):
            probabilities = [math.exp(x) for x, keep in zip(row.tolist(), kept.tolist()) if keep]
            naive = sum(1 - p for p in probabilities if p <= rho) / max(len(probabilities), 1)
            assert value.item() == pytest.approx(naive, abs=1e-6)


def test_case18_clipped_mae_divides_by_the_full_length():
    # (0.9 + 0.8 + 0) / 3; over the two unmasked tokens it would be 0.85, without a mask 0.7333
    assert close(paw.clipped_mae(logs([.1, .2, .5]), torch.ones(1, 3), .2), 0.566667)


def test_case18_gradient_is_minus_one_over_the_length_below_rho_and_0_above():
    p = torch.tensor([[.1, .2, .5]], requires_grad=True)
    paw.clipped_mae(p.log(), torch.ones(1, 3), .2).sum().backward()
    assert close(p.grad[0], -1 / 3, -1 / 3, 0) and p.grad[0, 2] == 0


def test_eq6_clipped_mae_has_a_bounded_gradient_and_cross_entropy_has_not():
    p = torch.tensor([[1e-6, .5]], requires_grad=True)
    mae = torch.autograd.grad(paw.clipped_mae(p.log(), torch.ones(1, 2), 1.0).sum(), p)[0]
    ce = torch.autograd.grad(paw.cross_entropy_wm(p.log(), torch.ones(1, 2)).sum(), p)[0]
    assert close(mae[0], -.5, -.5, tol=1e-4)
    assert ce[0].tolist() == pytest.approx([-.5e6, -1.0], rel=1e-4)  # -1 / (2 p)


def test_case18_the_threshold_belongs_to_the_loss():
    # exp(log 0.2) is 0.19999999 or 0.20000002 in fp32: in; 0.2001 is out
    assert close(paw.clipped_mae(logs([.2], [.2001], [.1999]), torch.ones(3, 1), .2), .8, 0, .8001)
    for rho in (.1, .2, .3, .7, .9, 1.0):
        assert close(paw.clipped_mae(logs([rho]), torch.ones(1, 1), rho), 1 - rho)


@pytest.mark.parametrize("loss", [lambda logp, mask: paw.clipped_mae(logp, mask, .2), paw.cross_entropy_wm])
def test_case18_padding_never_counts(loss):
    alone, mask = logs([.1, .2, .15]), torch.ones(1, 3)
    padded = torch.cat([alone, torch.tensor([[-5.0, -torch.inf]])], 1).requires_grad_()
    value = loss(padded, torch.tensor([[1, 1, 1, 0, 0]]))
    assert torch.equal(value, loss(alone, mask))
    value.sum().backward()
    assert (padded.grad[0, 3:] == 0).all() and torch.isfinite(padded.grad).all()


@pytest.mark.parametrize("loss", [lambda logp, mask: paw.clipped_mae(logp, mask, .2), paw.cross_entropy_wm])
def test_case15_world_model_loss_of_an_empty_observation_is_0_without_gradient(loss):
    logp = random_logp(2, 3).requires_grad_()
    value = loss(logp, torch.tensor([[0, 0, 0], [1, 1, 1]]))
    value.sum().backward()
    assert value.shape == (2,) and value[0] == 0 and (logp.grad[0] == 0).all()
    assert loss(torch.zeros(2, 0), torch.zeros(2, 0)).tolist() == [0, 0]


def test_cross_entropy_equals_a_naive_loop_and_hand_number():
    logp, mask = random_logp(4, 6), random_mask([6, 2, 0, 5], 6)
    for row, kept, value in zip(logp, mask, paw.cross_entropy_wm(logp, mask)):
        terms = [-x for x, keep in zip(row.tolist(), kept.tolist()) if keep]
        assert value.item() == pytest.approx(sum(terms) / max(len(terms), 1), abs=1e-6)
    assert close(paw.cross_entropy_wm(logs([.5, .25]), torch.ones(1, 2)), 1.039721)  # (ln 2 + ln 4) / 2


@pytest.mark.parametrize("returns, r_max, weight", [
    ([10, 0, 0, 0], 10, .75), ([10, 10], 10, 0), ([0, 0, 0], 10, 1), ([1, 0], 1, .5), ([9.7, -.3, -.3, -.3], 10, .78),
    ([-.5, -.5], 10, 1),   # raw 1.05: the penalty for invalid actions makes a mean return negative
    ([12, 12], 10, 0)])    # raw -0.2
def test_case48_world_model_weight_is_clamped(returns, r_max, weight):
    value = paw.world_model_weight(torch.tensor(returns, dtype=torch.float32), r_max)
    assert value.shape == () and value.item() == pytest.approx(weight, abs=1e-6)


def test_eq11_transition_weights_by_hand():
    # three groups: two of group 0 selected, none of group 1, one of group 2; lambdas 0.5, 1, 0.25
    selected = torch.tensor([True, False, True, False, False, True])
    weights = paw.transition_weights(selected, torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([.5, 1, .25]))
    # 0.5 / 2 / 3 = 1/12 twice; 0.25 / 1 / 3 = 1/12
    assert close(weights, 1 / 12, 0, 1 / 12, 0, 0, 1 / 12, tol=1e-7)


def test_eq9_and_eq11_weighted_sum_equals_the_naive_formula():
    g = torch.Generator().manual_seed(3)
    losses, group_ids = torch.rand(40, generator=g), torch.randint(0, 5, (40,), generator=g)
    selected, lambdas = torch.rand(40, generator=g) < .4, torch.rand(5, generator=g)
    naive = 0
    for group in range(5):
        chosen = [losses[n].item() for n in range(40) if selected[n] and group_ids[n] == group]
        naive += lambdas[group].item() * (sum(chosen) / len(chosen) if chosen else 0) / 5
    assert (paw.transition_weights(selected, group_ids, lambdas) * losses).sum().item() == pytest.approx(naive, abs=1e-6)


# ---- Advantages ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("returns, advantages", [
    # unbiased std: [10,0,0,10] has mean 5, std sqrt(100 / 3) = 5.7735; [10,0,0,0] mean 2.5, std 5 (biased: 1.7321)
    ([10., 0, 0, 10], [.8660254, -.8660254, -.8660254, .8660254]), ([10., 0, 0, 0], [1.5, -.5, -.5, -.5]),
    ([10., 0], [.7071068, -.7071068])])
def test_case11_group_advantages_by_hand(returns, advantages):
    assert close(paw.group_advantages(torch.tensor(returns), torch.zeros(len(returns), dtype=torch.long)), *advantages)


def test_group_advantages_with_a_scale_by_hand():
    # The second group holds no success: with std its penalties would be as loud (0.7071) as the first group's success.
    advantages = paw.group_advantages(torch.tensor([10., 0, 0, -.2]), torch.tensor([0, 0, 1, 1]), scale=5.0)
    assert close(advantages, 1, -1, .02, -.02)
    assert paw.group_advantages(torch.tensor([3., 3]), torch.tensor([0, 0]), scale=5.0).tolist() == [0, 0]


@pytest.mark.parametrize("value", [.1, 0, -.1, 10, -1.7, 1e-8])
def test_case11_equal_returns_give_exactly_0(value):
    # eight times 0.1 in fp32 has a standard deviation of 8e-9, and a naive advantage of -0.007
    assert (paw.group_advantages(torch.full((8,), value), torch.zeros(8, dtype=torch.long)) == 0).all()


def test_case13_groups_do_not_touch_each_other_in_any_order():
    returns = torch.tensor([10., 10, 10, 10, 0, 0, 10, 0])
    groups, right = torch.tensor([7, 7, 7, 7, 3, 3, 3, 3]), torch.tensor([0., 0, 0, 0, -.5, -.5, 1.5, -.5])
    for seed in range(5):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(paw.group_advantages(returns[order], groups[order]), right[order], atol=1e-5)
    changed = returns.clone()
    changed[0] = -3.0
    assert torch.equal(paw.group_advantages(changed, groups)[4:], paw.group_advantages(returns, groups)[4:])


@pytest.mark.parametrize("groups", [[0], [0, 0, 1], [5, 2, 2, 9, 9]])
def test_case13_a_group_of_one_is_refused(groups):
    with pytest.raises(ValueError, match="2 episodes"):
        paw.group_advantages(torch.rand(len(groups)), torch.tensor(groups))


def naive_normalize(values):
    mean = sum(values) / len(values)
    if len(values) < 2 or all(v == values[0] for v in values):
        return [0.0] * len(values)
    return [(v - mean) / (math.sqrt(sum((w - mean) ** 2 for w in values) / (len(values) - 1)) + 1e-6) for v in values]


def test_group_advantages_equal_a_naive_loop():
    g = torch.Generator().manual_seed(1)
    groups = torch.randint(0, 6, (60,), generator=g)
    returns = torch.randint(-3, 8, (60,), generator=g) * 1.7
    advantages = paw.group_advantages(returns, groups)
    for group in range(6):
        rows = (groups == group).nonzero()[:, 0].tolist()
        assert close(advantages[rows], *naive_normalize([returns[n].item() for n in rows]))


def test_discounted_returns_by_hand_and_naive():
    # 1 + 0.5 * (0 + 0.5 * 4) = 2, 0 + 0.5 * 4 = 2, 4
    assert paw.discounted_returns(torch.tensor([1., 0, 4]), .5).tolist() == [2, 2, 4]
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(2))
    naive = [sum(.95 ** (k - t) * rewards[k].item() for k in range(t, 12)) for t in range(12)]
    assert close(paw.discounted_returns(rewards, .95), *naive)
    assert paw.discounted_returns(rewards, 0.0).equal(rewards) and paw.discounted_returns(torch.zeros(0), .9).shape == (0,)


def test_case13_every_trajectory_counts_once_however_long_it_is():
    # return 10 in 5 steps, 0 in 50 steps: +-0.7071 per trajectory; over steps it would be 3.133 and -0.313
    episode_ids = torch.tensor([0] * 5 + [1] * 50)
    advantage = paw.gigpo_advantages(torch.tensor([10., 0]), torch.tensor([0, 0]), torch.rand(55), episode_ids, torch.arange(55))
    assert close(advantage, *[.7071068] * 5, *[-.7071068] * 50)  # anchors all differ: the step part is 0


def test_gigpo_by_hand():
    # One group of two episodes of two steps each, returns 10 and 0: +-0.7071.  Both start in state A with step returns
    # 9.5 and 0 (mean 4.75, std 6.7175: +-0.7071); then each is alone in its state: 0.
    advantage = paw.gigpo_advantages(torch.tensor([10., 0]), torch.tensor([0, 0]), torch.tensor([9.5, 10, 0, 0]),
                                     torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 2]), omega=1.0)
    assert close(advantage, 1.4142136, .7071068, -1.4142136, -.7071068)


@pytest.mark.parametrize("omega", [0.0, 1.0, .5])
def test_gigpo_equals_a_naive_loop(omega):
    g = torch.Generator().manual_seed(5)
    returns, groups = torch.rand(6, generator=g), torch.tensor([0, 0, 0, 1, 1, 1])
    episode_ids = torch.randint(0, 6, (50,), generator=g)
    step_returns, anchors = torch.rand(50, generator=g), torch.randint(0, 20, (50,), generator=g)
    episode_part = naive_normalize(returns[:3].tolist()) + naive_normalize(returns[3:].tolist())
    naive = []
    for n in range(50):
        members = [m for m in range(50) if anchors[m] == anchors[n]]
        step_part = naive_normalize([step_returns[m].item() for m in members])[members.index(n)]
        naive.append(episode_part[episode_ids[n]] + omega * step_part)
    assert close(paw.gigpo_advantages(returns, groups, step_returns, episode_ids, anchors, omega), *naive)


# ---- eq. 1: the clipped surrogate, and the KL term ---------------------------------------------------------------------------

def naive_policy_loss(logp, old_logp, advantage, mask, low, high):
    """The clipped surrogate from its formula, token by token; a differentiable scalar."""
    terms = []
    for b in range(len(logp)):
        for s in range(logp.shape[1]):
            if mask[b, s]:
                ratio = (logp[b, s] - old_logp[b, s]).exp()
                clipped = min(max(ratio.item(), 1 - low), 1 + high) if not 1 - low <= ratio.item() <= 1 + high else ratio
                terms.append(-min(ratio * advantage[b], clipped * advantage[b]))
    return sum(terms) / len(terms)


def test_policy_loss_and_its_gradient_equal_a_naive_loop():
    logp = random_logp(6, 5).requires_grad_()
    old_logp = (logp + .4 * torch.randn(6, 5, generator=torch.Generator().manual_seed(4))).detach()
    advantage, mask = torch.tensor([1.5, -.5, 0, .7, -2, .1]), random_mask([5, 3, 1, 0, 5, 2], 5)
    ours = paw.policy_loss(logp, old_logp, advantage, mask, .2, .3)
    naive = naive_policy_loss(logp, old_logp, advantage, mask, .2, .3)
    assert ours.shape == () and ours.item() == pytest.approx(naive.item(), abs=1e-6)
    for a, b in zip(torch.autograd.grad(ours, logp), torch.autograd.grad(naive, logp)):
        assert torch.allclose(a, b, atol=1e-7) and a.abs().sum() > 0


@pytest.mark.parametrize("ratio, advantage, loss, gradient", [
    (1.0, 2.0, -2.0, -2.0),    # first update: the gradient is that of -A log pi
    (1.5, 1.0, -1.2, 0.0),     # clipped at 1 + 0.2: no gradient
    (0.5, 1.0, -0.5, -0.5),    # the wrong way: not clipped, d(-r A)/d log p = -r A
    (0.5, -1.0, 0.7, 0.0),     # clipped at 1 - 0.3
    (1.5, -1.0, 1.5, 1.5),
    (1.1, 0.0, 0.0, 0.0)])
def test_policy_loss_by_hand(ratio, advantage, loss, gradient):
    logp = torch.tensor([[math.log(.3 * ratio)]], requires_grad=True)
    value = paw.policy_loss(logp, logs([.3]), torch.tensor([advantage]), torch.ones(1, 1), .3, .2)
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-6) and logp.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_policy_loss_is_a_mean_over_tokens_not_over_rows():
    # 1 token with A = 4, 3 tokens with A = 0: -4 / 4; a mean of row means would be -2
    logp = random_logp(2, 3)
    assert close(paw.policy_loss(logp, logp, torch.tensor([4., 0]), random_mask([1, 3], 3), .2, .2), -1.0)


def test_case15_policy_loss_of_an_empty_mask_is_0():
    logp = random_logp(2, 3).requires_grad_()
    value = paw.policy_loss(logp, logp.detach(), torch.ones(2), torch.zeros(2, 3), .2, .2)
    value.backward()
    assert value.item() == 0 and (logp.grad == 0).all()


def test_case15_an_empty_row_adds_nothing_to_the_shared_denominator():
    logp, old = random_logp(2, 4, seed=1), random_logp(2, 4, seed=2)
    alone = paw.policy_loss(logp[1:], old[1:], torch.tensor([1.5]), torch.tensor([[1, 1, 1, 0]]), .2, .2)
    both = paw.policy_loss(logp, old, torch.tensor([9.0, 1.5]), torch.tensor([[0, 0, 0, 0], [1, 1, 1, 0]]), .2, .2)
    assert torch.equal(alone, both)


def test_policy_loss_ignores_whatever_stands_in_the_padding():
    logp, old = random_logp(1, 3).requires_grad_(), random_logp(1, 3, seed=1)
    padded = torch.cat([logp, torch.tensor([[200.0, 0.0]])], 1)  # exp(200) is inf in fp32
    ours = paw.policy_loss(padded, torch.cat([old, torch.zeros(1, 2)], 1), -torch.ones(1), torch.tensor([[1, 1, 1, 0, 0]]), .2, .2)
    assert torch.equal(ours, paw.policy_loss(logp, old, -torch.ones(1), torch.ones(1, 3), .2, .2))
    assert torch.isfinite(torch.autograd.grad(ours, logp)[0]).all()


def test_case9_no_function_writes_to_its_arguments():
    logp, old, mask = random_logp(3, 4), random_logp(3, 4, seed=1), random_mask([4, 2, 0], 4)
    returns, groups = torch.tensor([1.0, 0, 3]), torch.tensor([0, 0, 0])
    inputs = [logp, old, mask, returns, groups]
    before = [x.clone() for x in inputs]
    paw.action_entropy(logp, mask), paw.clipped_mae(logp, mask, .2), paw.cross_entropy_wm(logp, mask), paw.k3_kl(logp, old)
    paw.policy_loss(logp, old, returns, mask, .2, .2), paw.group_advantages(returns, groups), paw.discounted_returns(returns, .9)
    paw.select_transitions(returns, .5), paw.world_model_weight(returns, 10)
    paw.gigpo_advantages(returns, groups, returns, groups, groups), paw.transition_weights(returns > 0, groups, returns[:1])
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))


def test_k3_by_hand_and_its_gradient():
    logp = logs([.25, .5, .5]).requires_grad_()
    value = paw.k3_kl(logp, logs([.5, .5, .25]))
    # d = ln 2: 2 - ln 2 - 1 = 0.306853; d = 0: 0; d = -ln 2: 0.5 + ln 2 - 1 = 0.193147
    assert value.shape == (1, 3) and close(value[0], .306853, 0, .193147)
    value.sum().backward()
    assert close(logp.grad[0], -1, 0, .5)  # d/d logp (exp(ref - logp) - (ref - logp) - 1) = 1 - exp(ref - logp)


def test_k3_is_never_negative_and_its_expectation_is_the_kl_divergence():
    p, q = (torch.softmax(torch.randn(2, 50, generator=torch.Generator().manual_seed(6)), -1))
    estimate = paw.k3_kl(p.log(), q.log())
    assert (estimate >= 0).all()
    assert (p * estimate).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


# ---- Sampling distribution, padding, micro-batches -----------------------------------------------------------------------------

def test_case2_temperature_belongs_to_the_log_probability():
    logits = torch.tensor([[0, LN4]])
    assert close(paw.next_log_probs(logits, .5, None)[0, 1], -.060625)  # ln(16 / 17)
    assert close(paw.next_log_probs(logits, 1.0, None)[0, 1], -.223144)  # ln(4 / 5)


def test_constrained_log_probs_are_renormalised_over_the_allowed_tokens():
    logits = torch.tensor([[0, LN4, 0, 50.0], [1.0, 2, 3, 4]])
    log_probs = paw.next_log_probs(logits, 1.0, [[0, 1], [2]])
    assert close(log_probs[0, :2], math.log(1 / 5), math.log(4 / 5)) and log_probs[1, 2] == 0
    assert log_probs[0, 2:].isneginf().all() and log_probs[1, [0, 1, 3]].isneginf().all()


def test_case4_log_probs_are_fp32_even_from_bf16_logits():
    logits = torch.tensor([[8.04, 8.06, -4.3]])
    log_probs = paw.next_log_probs(logits.bfloat16(), 1.0, None)
    assert log_probs.dtype == torch.float32
    assert torch.allclose(log_probs, torch.log_softmax(logits.bfloat16().float(), -1), atol=0)
    assert paw.next_log_probs(logits, 1.0, None).argmax() == 1  # in bf16 both are 8.0625


def test_case1_positions_do_not_count_padding():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert paw.positions_of(mask).tolist()[0] == [0, 0, 0, 1, 2]
    assert paw.positions_of(mask)[1, :3].tolist() == [0, 1, 2] and paw.positions_of(mask)[2].tolist() == [0, 1, 2, 3, 4]


def test_allowed_tokens_walk_the_trie():
    sequences = [[5, 6, 7], [5, 6, 8, 9], [4, 2, 3]]
    assert paw.allowed_tokens(sequences, []) == [4, 5] and paw.allowed_tokens(sequences, [5, 6]) == [7, 8]
    assert paw.allowed_tokens(sequences, [5, 6, 8]) == [9]


# ---- The order of tasks -----------------------------------------------------------------------------------------------------

def test_draw_tasks_visits_every_game_once_per_pass_in_a_seeded_order():
    cfg = paw.Config(groups=4, seed=3)
    drawn = [task for update in range(5) for task in paw.draw_tasks(update, cfg, 10)]  # 20 = two passes over 10 games
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[8:12] == paw.draw_tasks(2, cfg, 10)  # a function of the update alone: nothing to save for a resume
    assert drawn != [task for update in range(5) for task in paw.draw_tasks(update, paw.Config(groups=4, seed=4), 10)]


# ---- Table 1 ---------------------------------------------------------------------------------------------------------------

def test_success_table_has_a_column_per_task_type_and_the_total():
    counts = {"pick_and_place_simple": [1, 2], "pick_two_obj_and_place": [0, 6], "all": [1, 8]}
    head, row = paw.success_table({"before": counts}).splitlines()
    assert head.split()[2:] == ["Pick", "Pick2", "All", "episodes"] and row.split() == ["before", "50.0", "0.0", "12.5", "8"]
