"""The formulas of priorzero.py against hand-computed numbers, naive loops written from the paper, and their gradients.

No model and no environment is needed here.  `case 18` and the like: faults that others made, each with the right value.
"""

import math

import pytest
import torch

import priorzero as pz

SUPPORT = torch.arange(-50.0, 51.0)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def close(tensor, *numbers, tol=1e-5):
    return torch.allclose(torch.as_tensor(tensor, dtype=torch.float64), torch.tensor(numbers, dtype=torch.float64), rtol=0, atol=tol)


# ---- Values --------------------------------------------------------------------------------------------------------------

def test_simnorm():
    x = torch.tensor([[0.0, math.log(3), 1.0, 1.0]])
    assert close(pz.simnorm(x, 2)[0], 0.25, 0.75, 0.5, 0.5)  # 1 / (1 + 3), 3 / (1 + 3); equal ones share
    y = pz.simnorm(torch.randn(5, 3, 24, generator=generator()), 8)
    assert y.shape == (5, 3, 24) and torch.allclose(y.view(5, 3, 3, 8).sum(-1), torch.ones(5, 3, 3))


def test_case39_value_transform():
    h = pz.value_transform(torch.tensor([0.0, 1, 10, -10, 350, 1e5]))
    assert close(h[:4], 0, 0.415214, 2.326625, -2.326625) and close(h[4], 18.0850, tol=1e-3) and close(h[5], 415.23, tol=1e-2)
    x = torch.linspace(-400, 400, 1601)
    assert (pz.inverse_value_transform(pz.value_transform(x)) - x).abs().max() < 1e-3  # fp32 at 400: 3e-5 a digit
    x = torch.linspace(-2, 2, 401)
    assert (pz.inverse_value_transform(pz.value_transform(x)) - x).abs().max() < 1e-5
    assert pz.inverse_value_transform(torch.tensor(0.0)) == 0
    half = (pz.value_transform(torch.tensor(0.0)) + pz.value_transform(torch.tensor(100.0))) / 2
    assert close(pz.inverse_value_transform(half), 29.75, tol=0.01)  # the mean in h-space is not the mean: 50


def test_case39_two_hot():
    t = pz.two_hot(torch.tensor([2.326625, 2.0, -50.0, 50.0, 415.0, -99.0]), SUPPORT)
    assert close(t[0, 52:54], 0.673375, 0.326625) and t[1, 52] == 1 and t[2, 0] == 1 and t[3, -1] == 1
    assert t[4, -1] == 1 and t[5, 0] == 1 and torch.allclose(t.sum(-1), torch.ones(6))
    x = torch.rand(200, generator=generator()) * 100 - 50
    naive = torch.zeros(200, 101)
    for row, value in zip(naive, x.tolist()):
        low = math.floor(value)
        row[low + 50] += 1 - (value - low)
        if low < 50:
            row[low + 51] += value - low
    assert torch.allclose(pz.two_hot(x, SUPPORT), naive, atol=1e-5)


def test_expected_value_inverts_two_hot():
    x = torch.tensor([[-3.3, 0.0], [7.25, 49.9]])
    logits = pz.two_hot(x, SUPPORT).clamp(min=1e-30).log()
    assert torch.allclose(pz.expected_value(logits, SUPPORT), x, atol=1e-4)
    assert pz.expected_value(torch.zeros(3, 101), SUPPORT).abs().max() < 1e-5  # uniform: what the zero heads say


def naive_targets(rewards, values, terminated, truncated, gamma, n):
    out = []
    for t in range(len(rewards)):
        total, discount = 0.0, 1.0
        for i in range(n):
            if t + i == len(rewards):  # the segment ends here, the episode does not
                total += discount * values[t + i]
                break
            total += discount * rewards[t + i]
            discount *= gamma
            if terminated[t + i]:
                break
            if truncated[t + i]:
                total += discount * values[t + i + 1]
                break
        else:
            total += discount * values[t + n]
        out.append(total)
    return out


def test_case38_targets_at_the_end():
    rewards, none, last = torch.tensor([1.0, 0, 2]), torch.zeros(3, dtype=torch.bool), torch.tensor([False, False, True])
    ten = torch.full((4,), 10.0)
    # 1 + .9 * 0 + .81 * 2, 0 + .9 * 2, 2
    assert close(pz.n_step_targets(rewards, ten, last, none, 0.9, 5), 2.62, 1.8, 2)
    # ... + .729 * 10, + .81 * 10, + .9 * 10
    assert close(pz.n_step_targets(rewards, ten, none, last, 0.9, 5), 9.91, 9.9, 11)
    assert close(pz.n_step_targets(rewards, ten, none, none, 0.9, 5), 9.91, 9.9, 11)  # a segment's end bootstraps, too
    assert close(pz.n_step_targets(rewards, ten, none, none, 0.9, 1), 10, 9, 11)


def test_case38_the_next_episode_does_not_leak():
    rewards = torch.tensor([1.0, 0, 2, 1000, 1000])
    ends = torch.tensor([False, False, True, False, False])
    values = torch.tensor([10.0, 10, 10, 10, 555, 555])
    assert close(pz.n_step_targets(rewards, values, ends, torch.zeros(5), 0.9, 5)[:3], 2.62, 1.8, 2)
    assert close(pz.n_step_targets(rewards, values, torch.zeros(5), ends, 0.9, 5)[:3], 9.91, 9.9, 11)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_targets_against_a_loop(n):
    g = generator(n)
    rewards, values = torch.randn(40, 12, generator=g), torch.randn(40, 13, generator=g)
    terminated, truncated = torch.rand(40, 12, generator=g) < 0.1, torch.rand(40, 12, generator=g) < 0.1
    truncated &= ~terminated
    batch = pz.n_step_targets(rewards, values, terminated, truncated, 0.97, n)
    for row in range(40):
        expected = naive_targets(*(x[row].tolist() for x in (rewards, values, terminated, truncated)), 0.97, n)
        assert close(batch[row], *expected)
    copies = [x.clone() for x in (rewards, values, terminated, truncated)]
    pz.n_step_targets(*copies, 0.97, n)
    assert all(torch.equal(a, b) for a, b in zip(copies, (rewards, values, terminated, truncated)))  # inputs are left alone


# ---- The prior -----------------------------------------------------------------------------------------------------------

def test_case34_mixture_of_masked_probabilities():
    scores = torch.tensor([[0.9, 0.1, 0.99]]).log()
    logits = pz.fuse_root_prior(torch.zeros(1, 3), scores, torch.tensor([[1, 1, 0]]), 0.5, 1.0)
    # WM [.5, .5, 0], LLM [.9, .1, 0] -> [.7, .3, 0]; masked after mixing it would be [.617, ...]
    assert close(logits.softmax(-1)[0], 0.7, 0.3, 0) and logits[0, 2] == -math.inf


def test_fusion_weights_and_temperature():
    wm, scores, valid = torch.tensor([[2.0, 0.0, 9.0]]), torch.tensor([[-2.0, -1.0, -0.1]]), torch.tensor([[True, True, False]])
    only_wm = pz.fuse_root_prior(wm, scores, valid, 0.0, 1.0).softmax(-1)
    assert close(only_wm[0], 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), 0)
    only_llm = pz.fuse_root_prior(wm, scores, valid, 1.0, 1.0).softmax(-1)
    assert close(only_llm[0], 0.268941, 0.731059, 0)  # case 41: a mean of -2 against -1
    assert close(pz.fuse_root_prior(wm, scores, valid, 1.0, 0.5).softmax(-1)[0], 1 / (1 + math.exp(2)), 1 / (1 + math.exp(-2)), 0)
    # Padded scores are ignored, whatever stands there; alpha may differ from row to row.
    padded = torch.tensor([[-2.0, -1.0, 0.0], [-2.0, -1.0, -math.inf]])
    rows = pz.fuse_root_prior(wm.repeat(2, 1), padded, valid.repeat(2, 1), torch.tensor([0.0, 1.0]), 1.0).softmax(-1)
    assert torch.allclose(rows[0], only_wm[0]) and torch.allclose(rows[1], only_llm[0])


def test_a_sure_llm_does_not_exclude_actions():
    logits = pz.fuse_root_prior(torch.zeros(1, 2), torch.tensor([[0.0, -1e4]]), torch.ones(1, 2), 1.0, 1.0)
    assert torch.isfinite(logits).all()  # log(0 + 1e-8)


def test_adaptive_alpha():
    valid = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]])
    probs = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0], [1.0, 0, 0, 0, 0], [1.0, 0, 0, 0, 0]])
    assert close(pz.adaptive_alpha(probs, valid, 0.3, 0.7), 0.3, 0.7, 0.7)
    p = torch.tensor([[0.7, 0.2, 0.1, 0, 0]])
    entropy = -sum(q * math.log(q) for q in (0.7, 0.2, 0.1))
    assert close(pz.adaptive_alpha(p, valid[:1], 0.3, 0.7), 0.3 + 0.4 * (1 - entropy / math.log(4)))


# ---- Advantages and the LLM's loss ---------------------------------------------------------------------------------------

def test_normalize_advantages():
    assert close(pz.normalize_advantages(torch.tensor([1.0, 2, 3])), -1, 0, 1)  # mean 2, unbiased std 1
    assert close(pz.normalize_advantages(torch.tensor([0.1] * 8)), *[0.0] * 8, tol=0)  # case 11: the std of equal numbers is 8e-9
    assert close(pz.normalize_advantages(torch.tensor([5.0])), 0.0, tol=0)


def test_blend_format_reward():
    a = torch.tensor([1.0, -1.0])
    assert close(pz.blend_format_reward(a, [True, False], 0.3), 0.7 + 0.3, -0.7)
    assert torch.equal(pz.blend_format_reward(a, [True, True], 0.0), a)


def test_token_weights():
    cot, action = torch.tensor([[1, 1, 0, 0]]), torch.tensor([[0, 0, 1, 0]])
    assert close(pz.token_weights(cot, action, 0.1)[0], 0.1, 0.1, 1, 0)
    assert close(pz.token_weights(cot, action, 1.0)[0], 1, 1, 1, 0)


def test_k3():
    assert close(pz.k3_kl(torch.tensor([0.0, -1.0]), torch.tensor([0.0, 0.0])), 0.0, math.e - 2)  # e^1 - 1 - 1
    assert (pz.k3_kl(torch.randn(100, generator=generator()), torch.randn(100, generator=generator(1))) >= 0).all()


def test_ppo_loss_by_hand():
    old = torch.zeros(2, 2)
    logp = torch.tensor([[math.log(1.5), 0.0], [math.log(0.5), math.log(1.1)]])
    weights = torch.tensor([[1.0, 0.1], [1.0, 1.0]])
    advantage = torch.tensor([2.0, -1.0])
    # row 1: min(1.5, 1.2) * 2 = 2.4; 1 * 2 * 0.1 = 0.2.  row 2: min(-0.5, -0.8) = -0.8; min(-1.1, -1.1) = -1.1.  Sum 0.7 over 4 tokens.
    loss = pz.ppo_loss(logp, old, old, advantage, weights, torch.ones(2, 2), 0.2, 0.0)
    assert close(loss, -0.7 / 4)
    with_kl = pz.ppo_loss(logp, old, old, advantage, weights, torch.ones(2, 2), 0.2, 0.1)
    kl = sum(math.exp(-x) + x - 1 for x in logp.flatten().tolist())  # its weight is 1 on every token
    assert close(with_kl, (-0.7 + 0.1 * kl) / 4)


def test_ppo_gradient():
    g = generator()
    logp, old, ref = (torch.randn(6, 5, generator=g) * 0.3 - 1 for _ in range(3))
    advantage, mask = torch.randn(6, generator=g), (torch.rand(6, 5, generator=g) < 0.7).float()
    weights = pz.token_weights(mask * (torch.arange(5) < 3), mask * (torch.arange(5) >= 3), 0.1)
    logp.requires_grad_()
    pz.ppo_loss(logp, old, ref, advantage, weights, mask, 0.2, 0.05).backward()
    for b in range(6):
        for t in range(5):
            ratio, a = math.exp(logp[b, t] - old[b, t]), float(advantage[b])
            moved = (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)  # clipped: no gradient from the surrogate
            kl = 1 - math.exp(ref[b, t] - logp[b, t])
            expected = float(mask[b, t]) * ((0 if moved else -ratio * a * float(weights[b, t])) + 0.05 * kl) / float(mask.sum())
            assert float(logp.grad[b, t]) == pytest.approx(expected, abs=1e-6)


def test_ppo_loss_masks_and_parts():
    g = generator(3)
    logp, old, ref = (torch.randn(4, 3, generator=g) for _ in range(3))
    advantage, mask = torch.randn(4, generator=g), torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
    whole = pz.ppo_loss(logp, old, ref, advantage, mask, mask, 0.2, 0.1)
    parts = sum(pz.ppo_loss(*(x[i:i + 1] for x in (logp, old, ref, advantage, mask, mask)), 0.2, 0.1, num_tokens=6) for i in range(4))
    assert torch.allclose(whole, parts)  # accumulated over micro-batches
    wild = torch.where(mask.bool(), logp, float("nan"))  # what stands on padding does not matter
    assert torch.equal(pz.ppo_loss(wild, old, ref, advantage, mask, mask, 0.2, 0.1), whole)
    empty = torch.zeros(4, 3)  # case 15
    logp.requires_grad_()
    loss = pz.ppo_loss(logp, old, ref, advantage, empty, empty, 0.2, 0.1)
    loss.backward()
    assert loss == 0 and torch.equal(logp.grad, torch.zeros(4, 3))


@pytest.mark.parametrize("text, good", [
    ("Reasoning: there is a door.\nAction: open door", True),
    ("  Reasoning: two\nlines of it\nAction: go north\n", True),
    ("Action: go north", False),
    ("Reasoning: nothing follows", False),
    ("I think. Reasoning: late\nAction: go", False),
    ("Reasoning: a\nReasoning: b\nAction: go", False),
    ("Reasoning: a\nAction: go\nAction: stay", False),
    ("Reasoning: a\nAction:", False),
    ("Action: go\nReasoning: a", False),
    ("Reasoning: a Action: go", False),
    ("", False),
])
def test_format_ok(text, good):
    assert pz.format_ok(text) is good


# ---- Settings ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("setting, value", [
    ("alpha", 1.5), ("alpha", -0.1), ("num_simulations", 0), ("env", "doom"), ("loss", "dpo"), ("window", 4), ("width", 65), ("device", "gpu"),
    ("gamma", float("nan"))])
def test_settings_out_of_range(setting, value):
    with pytest.raises(pz.InputError, match=f"--{setting} "):
        pz.Config(**{setting: value}).validate()


def test_the_tiny_prior_is_for_babyai():
    with pytest.raises(pz.InputError, match="BabyAI only"):
        pz.Config(env="jericho").validate()
    pz.Config(env="jericho", alpha=0.0).validate()
