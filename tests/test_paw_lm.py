"""paw.py with tiny random language models: padding, sampling, the loss of a whole update, LoRA, prompts, rollouts.

`case 18` and the like: faults that others made, each with the right value.
"""

import dataclasses
import hashlib
import math
from collections import defaultdict

import pytest
import torch

import paw
import tiny
from tiny import EOS, PAD, Recorder, TableLM, assert_same_gradient, ids, sampled_update, script, settings, update

KINDS = ("llama", "qwen2")
RETURNS = [[10.0, 0, -.1], [0, 0, 9.9]]


def respond(*token_ids, logps=None, allowed=None, truncated=False):
    n = len(token_ids)
    return paw.Response(list(token_ids), list(logps or [-1.0] * n), [0.0] * n, allowed, truncated)


def transition(prompt, response, obs=(), **changed):
    values = dict(state="s", reward=0.0, valid=True, episode=0, group=0, version=0) | changed
    return paw.Transition(list(prompt), response if isinstance(response, paw.Response) else respond(*response), list(obs), **values)



def naive_logps(model, t, temperature=1.0):
    """(log-probabilities of the response tokens, of the observation tokens) of a transition, from full logits of one row."""
    row, first = t.prompt_ids + t.response.ids + t.obs_ids, len(t.prompt_ids)
    logits = model(input_ids=torch.tensor([row])).logits[0].float()
    action, obs = [], []
    for n, token in enumerate(row[first:]):
        scores, allowed = logits[first + n - 1], t.response.allowed
        if n >= len(t.response.ids):
            obs.append(torch.log_softmax(scores, -1)[token])
        elif allowed:
            action.append(scores[token] / temperature - torch.logsumexp(scores[allowed[n]] / temperature, -1))
        else:
            action.append(torch.log_softmax(scores / temperature, -1)[token])
    return torch.stack(action), torch.stack(obs) if obs else torch.zeros(0)


def weight_hash(model, wanted=lambda name, p: True):
    chosen = [p.detach().numpy().tobytes() for name, p in sorted(model.named_parameters()) if wanted(name, p)]
    assert chosen
    return hashlib.sha256(b"".join(chosen)).hexdigest()


def table_policy(table, **special):
    return paw.make_policy(TableLM(table), tiny.tokenizer(**special), settings(model="table"))


def sample(policy, prompts, max_len=6, temperature=1.0, seed=0, admissible=None):
    return paw.generate(policy, prompts, max_len, temperature, torch.Generator().manual_seed(seed), admissible)


# ---- Scoring: padding, shift, observations -------------------------------------------------------------------------------

def test_case9_the_logit_at_t_predicts_the_token_at_t_plus_1():
    table = torch.full((5, 5), math.log(.1 / 4))
    for i in range(4):
        table[i, i + 1] = math.log(.9)
    batch = paw.make_batch([transition([1], [2, 3])], [False], "cpu")
    logp, _ = paw.response_logps(TableLM(table), batch)
    assert logp.shape == (1, 2) and torch.allclose(logp, torch.full((1, 2), math.log(.9)), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [.4, 1.0])
def test_response_logps_equal_a_naive_forward_of_every_row_alone(kind, temperature):
    model = tiny.lm(kind)
    rows = [transition([5, 6, 7, 8], [9, 10, 11], [12, 13]), transition([20], [21], [22, 23, 24, 25, 26]),
            transition([30, 31, 32], [33, 34, 35, 36], []), transition([40, 41], [42, 43], [44])]
    batch = paw.make_batch(rows, [True] * 4, "cpu", temperature)
    action, obs = paw.response_logps(model, batch)
    assert action.shape == (4, 4) and obs.shape == (4, 5) and action.dtype == obs.dtype == torch.float32
    for b, t in enumerate(rows):
        naive_action, naive_obs = naive_logps(model, t, temperature)
        assert torch.allclose(action[b, :len(t.response.ids)], naive_action, atol=1e-5)
        assert torch.allclose(obs[b, :len(t.obs_ids)], naive_obs, atol=1e-5)  # the world model has no temperature
        assert (action[b, len(t.response.ids):] == 0).all() and (obs[b, len(t.obs_ids):] == 0).all()


@pytest.mark.parametrize("kind", [*KINDS, "gpt2"])  # GPT-2 has absolute positions: a shift shows
def test_case1_padding_on_either_side_changes_nothing(kind):
    model, t = tiny.lm(kind), transition([5, 6, 7], [8, 9], [10, 11, 12])
    alone = paw.make_batch([t], [True], "cpu")
    zeros = torch.zeros(1, 3, dtype=torch.long)
    pad = lambda left, right: alone._replace(
        ids=torch.cat([left, alone.ids, right], 1), attention_mask=torch.cat([left, alone.attention_mask, right], 1),
        prompt_len=alone.prompt_len + left.shape[1])
    right = paw.response_logps(model, pad(zeros[:, :0], zeros))
    left = paw.response_logps(model, pad(zeros, zeros[:, :0]))
    crowd = paw.response_logps(model, paw.make_batch([t, transition(range(3, 30), [30])], [True, False], "cpu"))
    alone = paw.response_logps(model, alone)
    for other in (left, right, tuple(x[:1] for x in crowd)):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone, other))


@pytest.mark.parametrize("kind", KINDS)
def test_case10_appended_observations_do_not_move_the_logits_of_actions(kind):
    model = tiny.lm(kind)
    score = lambda with_obs, *obs: paw.response_logps(model, paw.make_batch(
        [transition([5, 6, 7], [8, 9, 10, 11], obs), transition([20, 21], [22], [23, 24])], with_obs, "cpu"))
    without, _ = score([False, False], 12, 13, 14, 15, 16)
    appended, obs = score([True, True], 12, 13, 14, 15, 16)
    another, other_obs = score([True, True], 40, 41, 42, 43, 44)
    assert torch.equal(appended, another) and not torch.equal(obs, other_obs)  # same shapes, same kernels: no difference at all
    assert (appended - without).abs().max() <= 1e-5
    assert (score([True, False], 12, 13, 14, 15, 16)[0] - without).abs().max() <= 1e-5


def test_case10_masks_are_disjoint_and_observations_only_where_asked():
    rows = [transition([5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15, 16])] * 2
    batch = paw.make_batch(rows, [True, False], "cpu")
    assert batch.action_mask.sum(1).tolist() == [4, 4] and batch.obs_mask.sum(1).tolist() == [5, 0]
    assert batch.attention_mask.sum(1).tolist() == [12, 7] and batch.ids[1].tolist() == [5, 6, 7, 8, 9, 10, 11] + [0] * 5


def test_case10_rl_loss_has_no_gradient_at_observation_targets():
    model, hidden = tiny.lm(), []
    model.model.register_forward_hook(lambda m, a, out: hidden.append(out.last_hidden_state) or out.last_hidden_state.retain_grad())
    batch = paw.make_batch([transition([5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15, 16])], [True], "cpu")
    action, obs = paw.response_logps(model, batch)
    paw.policy_loss(action, action.detach(), torch.ones(1), batch.action_mask, .2, .2).backward(retain_graph=True)
    touched = hidden[0].grad[0].abs().sum(-1) > 0
    assert touched.tolist() == [False] * 2 + [True] * 4 + [False] * 6  # positions 2 to 5 predict tokens 3 to 6
    hidden[0].grad = None
    paw.clipped_mae(obs, batch.obs_mask, 1.0).sum().backward()
    touched = hidden[0].grad[0].abs().sum(-1) > 0
    assert touched.tolist() == [False] * 6 + [True] * 5 + [False]


def test_the_lm_head_is_applied_at_scored_positions_only():
    model, rows = tiny.lm(), []
    model.lm_head.register_forward_pre_hook(lambda m, args: rows.append(args[0].numel() // 32))
    paw.response_logps(model, paw.make_batch([transition(range(3, 40), [8, 9], [12, 13, 14]), transition([5], [6], [7])],
                                             [True, False], "cpu"))
    assert sum(rows) == 2 + 3 + 1


def test_case9_scoring_and_the_update_leave_their_inputs_alone():
    cfg = settings()
    policy = tiny.policy(cfg)
    transitions, episodes = sampled_update(policy, cfg, RETURNS)
    before = [(list(t.prompt_ids), list(t.response.ids), list(t.response.logps), list(t.obs_ids)) for t in transitions]
    update(policy, transitions, episodes, cfg)
    assert before == [(t.prompt_ids, t.response.ids, t.response.logps, t.obs_ids) for t in transitions]


# ---- Masks come from lengths -----------------------------------------------------------------------------------------------

def test_case6_masks_do_not_look_at_token_values():
    # pad = eos = 9: the response ends with its first 9, which is trained; the others are padding
    rows = [transition([9, 5, 9], [7, 9]), transition([9, 5, 9], [5, 6, 9, 9, 9])]
    batch = paw.make_batch([rows[0]], [False], "cpu")
    assert batch.attention_mask.tolist() == [[1] * 5] and batch.action_mask.tolist() == [[1, 1]]
    batch = paw.make_batch(rows, [False, False], "cpu")
    assert batch.attention_mask.tolist() == [[1] * 5 + [0] * 3, [1] * 8] and batch.prompt_len.tolist() == [3, 3]
    assert batch.action_mask.tolist() == [[1, 1, 0, 0, 0], [1] * 5]


def test_case6_the_first_eos_ends_a_response_and_belongs_to_it():
    # eos and pad are both "9"; from 5 the model goes 6, 9, and would write 9 for ever
    nine, five, six, seven = ids("9567")
    policy = table_policy(script((five, six), (six, nine), (nine, nine), (seven, seven)), eos_token="9", pad_token="9")
    assert policy.tokenizer.pad_token_id == policy.tokenizer.eos_token_id == nine
    ended, cut, longer = sample(policy, [[five], [seven], [nine, five, nine, five]], max_len=5)
    assert ended.ids == longer.ids == [six, nine] and not ended.truncated and not longer.truncated
    assert cut.ids == [seven] * 5 and cut.truncated
    batch = paw.make_batch([transition([five], ended), transition([seven], cut)], [False] * 2, "cpu")
    assert batch.action_mask.tolist() == [[1, 1, 0, 0, 0], [1] * 5]


@pytest.mark.parametrize("special, pad", [({"pad_token": None}, EOS), ({"pad_token": None, "eos_token": None}, 0)])
def test_case7_a_tokenizer_without_pad_token_gets_an_existing_one(special, pad, capsys):
    tokenizer, model = tiny.tokenizer(**special), tiny.lm()
    size, cfg = len(tokenizer), settings()
    policy = paw.make_policy(model, tokenizer, cfg)
    assert tokenizer.pad_token_id == pad and "pad" in capsys.readouterr().out
    assert len(tokenizer) == size and model.get_input_embeddings().num_embeddings == size
    transitions, episodes = sampled_update(policy, cfg, RETURNS)
    expected = sampled_update(tiny.policy(cfg), cfg, RETURNS)[0]
    assert special.get("eos_token", 1) is None or [t.response.ids for t in transitions] == [t.response.ids for t in expected]
    assert update(policy, transitions, episodes, cfg)[1]["first_ratio_deviation"] <= 1e-5


# ---- Sampling ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("constrain", [False, True])
@pytest.mark.parametrize("temperature", [.4, 1.0])
def test_case2_sampled_log_probs_equal_the_scored_ones(kind, constrain, temperature):
    cfg = settings(constrain=constrain, temperature=temperature)
    policy = tiny.policy(cfg, kind)
    transitions, _ = sampled_update(policy, cfg, RETURNS)
    batch = paw.make_batch(transitions, [True] * len(transitions), "cpu", temperature)
    scored, _ = paw.response_logps(policy.model, batch)
    assert (scored - batch.old_logp).exp().sub(1).abs().max() <= 1e-5
    for t in transitions:  # and both are those of the naive forward
        assert torch.allclose(torch.tensor(t.response.logps), naive_logps(policy.model, t, temperature)[0], atol=2e-5)


def test_case54_entropies_are_those_of_the_sampling_distribution():
    four = ids("abcd")
    table = script(*((i, i) for i in four))
    table[ids("x")[0]] = -1e4
    table[ids("x")[0], four] = 0  # after x: a, b, c or d, each with p = 1/4
    response, = sample(table_policy(table), [ids("x")], max_len=2)
    assert response.entropies == pytest.approx([math.log(4), 0], abs=1e-6) and response.logps == pytest.approx([-math.log(4), 0], abs=1e-6)
    policy, prompts = tiny.policy(), [[5, 6, 7], [8]]
    for prompt, r in zip(prompts, sample(policy, prompts, temperature=.7)):
        logits = policy.model(input_ids=torch.tensor([prompt + r.ids])).logits[0, len(prompt) - 1:-1] / .7
        assert torch.allclose(torch.tensor(r.entropies), torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "gpt2"])
def test_case1_a_response_does_not_depend_on_the_other_rows(kind):
    policy = tiny.policy(kind=kind)
    alone = sample(policy, [[5, 6, 7]], temperature=0)[0]
    crowd = sample(policy, [[5, 6, 7], list(range(3, 30)), [9]], temperature=0)
    assert alone.ids == crowd[0].ids and alone.logps == pytest.approx(crowd[0].logps, abs=1e-5)


def test_case4_greedy_decoding_takes_the_first_maximum_of_fp32_logits():
    table = torch.zeros(64, 64)
    table[5, 20], table[5, 21] = 8.04, 8.06  # equal in bf16, which spaces them by 0.0625
    table[21, 30] = table[21, 40] = 8.0
    assert sample(table_policy(table), [[5]], max_len=2, temperature=0)[0].ids == [21, 30]


def test_sampling_frequencies_are_the_softmax_at_the_temperature():
    table = torch.zeros(64, 64) - 1e4
    table[5, 20], table[5, 21] = 0, math.log(4)  # p = 1/5, 4/5; at temperature 0.5: 1/17, 16/17
    policy, expected = table_policy(table), {1.0: 4 / 5, .5: 16 / 17}
    for temperature, p in expected.items():
        drawn = [r.ids[0] for r in sample(policy, [[5]] * 4000, max_len=1, temperature=temperature)]
        assert drawn.count(21) / 4000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000))


def test_generation_stops_at_the_end_of_the_action_tag_or_at_eos():
    tag, look = ids("</action>")[0], ids("look")[0]
    policy = table_policy(script((20, look), (look, tag), (tag, 21), (22, EOS), (23, 23)))
    by_tag, by_eos, cut, exact = sample(policy, [[20], [22], [23], [look]], max_len=3)
    assert by_tag.ids == [look, tag] and not by_tag.truncated
    assert by_eos.ids == [EOS] and not by_eos.truncated
    assert cut.ids == [23, 23, 23] and cut.truncated and len(cut.logps) == len(cut.entropies) == 3
    assert exact.ids == [tag]
    assert sample(policy, [[20]], max_len=2)[0] == by_tag  # completed by its last allowed token: not truncated
    assert sample(policy, [[20]], max_len=1)[0].truncated


def test_generation_stops_at_an_action_tag_that_is_spelled_in_single_characters():
    spelled = [tiny.VOCABULARY.index(c) for c in "</action>"]
    response, = sample(table_policy(script(*zip([60, *spelled[:-1]], spelled))), [[60]], max_len=12)
    assert response.ids == spelled and not response.truncated


def test_a_tag_in_the_prompt_does_not_end_the_response():
    tag = ids("</action>")[0]
    response, = sample(table_policy(script((tag, 30), (30, 30))), [[tag, tag]], max_len=3)
    assert response.ids == [30, 30, 30] and response.truncated


@pytest.mark.parametrize("temperature", [0, 1.0, 3.0])
def test_constrain_yields_admissible_actions_only(temperature):
    lists = [["look", "go"], ["go", "go a", "go ab"], ["open door 1"]] * 30  # some are prefixes of others
    policy = tiny.policy()
    responses = sample(policy, [[5 + n % 40] for n in range(90)], max_len=20, temperature=temperature, admissible=lists)
    chosen = [paw.parse_response(policy.tokenizer.decode(r.ids), a) for r, a in zip(responses, lists)]
    assert None not in chosen and not any(r.truncated for r in responses)
    if temperature == 3.0:
        assert set(chosen) == {"look", "go", "go a", "go ab", "open door 1"}
    for r in responses:
        assert len(r.allowed) == len(r.ids) and all(token in allowed for token, allowed in zip(r.ids, r.allowed))
        assert all(logp == 0 for logp, allowed in zip(r.logps, r.allowed) if len(allowed) == 1)  # a forced token
    only = responses[2]
    assert sum(only.logps) == 0 and sum(only.entropies) == pytest.approx(0, abs=1e-6)


def test_constrain_that_is_cut_short_is_truncated():
    response, = sample(tiny.policy(), [[5]], max_len=3, admissible=[["look"]])
    assert response.truncated and len(response.ids) == len(response.allowed) == 3


# ---- The first update sees the policy that sampled -------------------------------------------------------------------------

@pytest.mark.parametrize("changed, model_settings", [
    ({}, {}), ({"temperature": .4}, {}), ({"constrain": True, "max_response_len": 20}, {}), ({"lora_rank": 2}, {}),
    ({}, {"attention_dropout": .1}),                                       # case 3: dropout
    ({"gradient_checkpointing": True}, {"attention_dropout": .1})])        # which trains in train() mode
@pytest.mark.parametrize("kind", KINDS)
def test_case3_ratio_1_clip_0_kl_0_over_two_whole_updates_without_learning(kind, changed, model_settings):
    cfg = settings(lr=0.0, mini_batch=5, epochs=2, token_budget=60, **changed)
    policy = tiny.policy(cfg, kind, **model_settings)
    reference = paw.Reference(policy.model)
    optimizer = torch.optim.AdamW(paw.trainable(policy.model).values(), lr=0.0)
    for seed in range(2):
        transitions, episodes = sampled_update(policy, cfg, RETURNS, seed=seed)
        _, metrics = update(policy, transitions, episodes, cfg, optimizer, reference)
        assert metrics["first_ratio_deviation"] <= 1e-5 and metrics["clip_frac"] == 0
        assert metrics["kl"] == pytest.approx(0, abs=1e-9) and metrics["grad_norm"] > 0


def test_case3_dropout_modules_are_switched_off():
    model = tiny.lm(attention_dropout=.1)
    model.extra = torch.nn.Dropout(.1)
    paw.make_policy(model, tiny.tokenizer(), settings())
    assert model.extra.p == 0 and model.model.layers[0].self_attn.attention_dropout == 0


# ---- The loss of a whole update ------------------------------------------------------------------------------------------

def naive_entropy(t, kind):
    terms = [-math.exp(x) * x for x in t.response.logps] if kind == "sampled" else t.response.entropies
    return sum(terms) / len(terms)


def naive_world_model_loss(t, model, cfg):
    logp = naive_logps(model, t)[1]
    if cfg.wm == "ce":
        return -logp.sum() / len(logp)
    return sum((1 - x.exp() for x in logp if x.exp() <= cfg.rho), torch.zeros(())) / len(logp)


def naive_loss(transitions, episodes, model, start, cfg):
    """eq. 11 for a whole update, transition by transition; returns (loss, its parts by metric name)."""
    groups = sorted({e.group for e in episodes})
    advantages, lambdas = {}, {}
    for g in groups:
        returns = torch.tensor([e.ret for e in episodes if e.group == g])
        lambdas[g] = max(0.0, min(1.0, 1 - returns.mean().item() / 10)) if cfg.adaptive_lambda else 1.0
        for n in [n for n, e in enumerate(episodes) if e.group == g]:
            equal = bool((returns == returns[0]).all())
            advantages[n] = 0.0 if equal else (episodes[n].ret - returns.mean()) / (5 if cfg.adv_norm == "mean" else returns.std() + 1e-6)
    policy_terms, kl_terms, clipped = [], [], 0
    for t in transitions:
        a = torch.as_tensor(advantages[t.episode])
        logps, ref_logps = naive_logps(model, t, cfg.temperature)[0], naive_logps(start, t, cfg.temperature)[0].detach()
        for logp, old, ref in zip(logps, t.response.logps, ref_logps):
            ratio = (logp - old).exp()
            bounded = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
            policy_terms.append(-torch.minimum(ratio * a, bounded * a))
            clipped += bool(bounded * a < ratio * a)
            kl_terms.append((ref - logp).exp() - (ref - logp) - 1)
    order = sorted(range(len(transitions)), key=lambda n: (-naive_entropy(transitions[n], cfg.entropy), n))
    selected = order[:math.ceil(cfg.alpha * len(order))] if cfg.wm != "none" else []
    world_model = torch.zeros(())
    for g in groups:
        losses = [naive_world_model_loss(transitions[n], model, cfg) for n in selected if transitions[n].group == g]
        if losses:
            world_model = world_model + lambdas[g] * sum(losses) / len(losses) / len(groups)
    parts = {"pg_loss": sum(policy_terms) / len(policy_terms), "kl": sum(kl_terms) / len(kl_terms), "lambda": sum(lambdas.values()) / len(groups),
             "clip_frac": clipped / len(policy_terms), "wm_selected": len(selected),
             "wm_loss": sum(naive_world_model_loss(transitions[n], model, cfg) for n in selected) / max(len(selected), 1)}
    return parts["pg_loss"] + cfg.kl_coef * parts["kl"] + world_model, parts


def trained_away(policy, size=.02):
    """Move the weights a little, so that ratios differ from 1 and the KL term from 0; returns the start as a model."""
    start = tiny.lm()
    start.load_state_dict(policy.model.state_dict())
    torch.manual_seed(9)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(size * torch.randn_like(p))
    return start


def gradient_of(loss, model):
    names, parameters = zip(*model.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, parameters)))


@pytest.mark.parametrize("changed", [
    {}, {"wm": "ce"}, {"wm": "none"}, {"adaptive_lambda": False}, {"entropy": "full"}, {"adv_norm": "mean"}, {"alpha": .3}, {"rho": .05},
    {"kl_coef": 0.0}, {"temperature": .6}, {"constrain": True}, {"clip_low": .05, "clip_high": .01}],
    ids=lambda c: "_".join(f"{k}={v}" for k, v in c.items()) or "paper")
def test_eq11_loss_gradient_and_metrics_of_an_update_equal_the_naive_formula(changed):
    cfg = settings(**{"kl_coef": .1} | changed)
    policy = tiny.policy(cfg)
    returns = [[10.0, 0, -.1], [2, 2, 2], [-.5, 0, -1]]  # lambda 0.67, 0.8, 1 (clamped); the second group has no advantage
    transitions, episodes = sampled_update(policy, cfg, returns)
    reference = paw.Reference(policy.model)
    start = trained_away(policy)
    loss, parts = naive_loss(transitions, episodes, policy.model, start, cfg)
    (gradient,), metrics = update(policy, transitions, episodes, cfg, reference=reference)
    assert_same_gradient(gradient, gradient_of(loss, policy.model), tol=2e-5)
    for name, value in parts.items():
        if cfg.kl_coef or name not in ("pg_loss", "kl", "clip_frac"):  # without KL, transitions without gradient are left out
            assert metrics[name] == pytest.approx(torch.as_tensor(value).item(), abs=2e-5), name
    assert metrics["frac_zero_std"] == pytest.approx(1 / 3)  # case 11
    norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradient.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_metrics_that_do_not_come_from_the_loss():
    cfg = settings(rho=.05)
    policy = tiny.policy(cfg)
    transitions, episodes = sampled_update(policy, cfg, RETURNS, steps=3)
    _, metrics = update(policy, transitions, episodes, cfg)
    entropies = [h for t in transitions for h in t.response.entropies]
    assert metrics["entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-6)
    assert metrics["reward"] == pytest.approx((10 + 0 - .1 + 0 + 0 + 9.9) / 6) and metrics["success"] == 1 / 6
    assert metrics["frac_zero_std"] == 0 and metrics["frac_unsolved"] == 1 / 2
    assert metrics["truncated_frac"] == sum(t.response.truncated for t in transitions) / 18 and metrics["episode_len"] == 3
    best = sorted(range(18), key=lambda n: (-naive_entropy(transitions[n], "sampled"), n))[:14]  # ceil(0.75 * 18)
    probabilities = [p.exp().item() for n in best for p in naive_logps(policy.model, transitions[n])[1]]
    assert 0 < metrics["wm_clipped_frac"] == pytest.approx(sum(p > .05 for p in probabilities) / len(probabilities), abs=1e-6)


def test_case54_several_epochs_are_means_too_and_count_each_transition_once():
    results = []
    for epochs in (1, 3):
        cfg = settings(epochs=epochs)
        policy = tiny.policy(cfg)
        gradients, metrics = update(policy, *sampled_update(policy, cfg, RETURNS), cfg)
        assert len(gradients) == epochs and metrics["wm_selected"] == 9  # ceil(0.75 * 12)
        results.append({k: metrics[k] for k in ("pg_loss", "wm_loss", "entropy", "grad_norm", "wm_clipped_frac")})
    assert results[0] == pytest.approx(results[1], abs=1e-6)  # the recorder takes no step


@pytest.mark.parametrize("changed", [{}, {"wm": "none"}, {"wm": "ce", "kl_coef": 0.0}, {"algo": "gigpo"}])
def test_the_token_budget_does_not_change_the_gradient(changed):
    results = []
    for budget in (1, 40, 150, 10**6):  # every row alone, ..., all in one batch
        cfg = settings(token_budget=budget, **changed)
        policy = tiny.policy(cfg)
        transitions, episodes = sampled_update(policy, cfg, [[10.0, 0, -.1], [3, 3, 3]])
        reference = paw.Reference(policy.model)
        trained_away(policy)
        results.append(update(policy, transitions, episodes, cfg, reference=reference))
    for (gradient,), metrics in results[1:]:
        assert_same_gradient(gradient, results[0][0][0], tol=1e-5)
        for name, value in metrics.items():  # case 54: means over all micro-batches, not the last one's
            assert value == pytest.approx(results[0][1][name], abs=1e-5, rel=1e-4), name


def test_mini_batches_share_the_gradient_of_the_whole_update():
    whole = None
    for mini_batch in (100, 5, 1):
        cfg = settings(mini_batch=mini_batch)
        policy = tiny.policy(cfg)
        transitions, episodes = sampled_update(policy, cfg, RETURNS)
        gradients, metrics = update(policy, transitions, episodes, cfg)
        assert len(gradients) == math.ceil(12 / mini_batch)
        mean = {n: sum(g[n] for g in gradients) / len(gradients) for n in gradients[0]}
        whole = whole or mean
        assert_same_gradient(mean, whole, tol=1e-5)


def test_micro_batches_hold_every_row_once_within_the_budget():
    rows = [transition([5] * n, [6] * (n % 3 + 1), [7] * (n % 5)) for n in range(1, 30)]
    with_obs = [n % 2 == 0 for n in range(29)]
    length = lambda n: len(rows[n].prompt_ids) + len(rows[n].response.ids) + with_obs[n] * len(rows[n].obs_ids)
    for budget in (1, 33, 100, 10**6):
        batches = paw.micro_batches(set(range(29)), rows, with_obs, budget)
        assert sorted(sum(batches, [])) == list(range(29))
        assert all(len(b) == 1 or len(b) * max(map(length, b)) <= budget for b in batches)
    assert len(batches) == 1 and paw.micro_batches(set(), rows, with_obs, 100) == []


def plain_grpo(policy, start, optimizer, transitions, episodes, cfg):
    """GRPO with a KL term, written without anything of PaW: one batch, one optimiser step."""
    order = sorted(range(len(transitions)), key=lambda n: (-len(transitions[n].prompt_ids) - len(transitions[n].response.ids), n))
    rows = [transitions[n] for n in order]
    returns = torch.tensor([e.ret for e in episodes]).view(-1, cfg.group_size)
    advantage = ((returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-6)).flatten()
    advantage = advantage[[t.episode for t in rows]][:, None]
    batch = paw.make_batch(rows, [False] * len(rows), "cpu", cfg.temperature)
    logp, mask = paw.response_logps(policy.model, batch)[0], batch.action_mask.bool()
    with torch.no_grad():
        ref_logp = paw.response_logps(start, batch)[0]
    ratio = (logp - batch.old_logp).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantage)
    kl = (ref_logp - logp).exp() - (ref_logp - logp) - 1
    loss = -(surrogate * mask).sum() / mask.sum() + cfg.kl_coef * kl[mask].mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), cfg.max_grad_norm)
    optimizer.step()


@pytest.mark.parametrize("kl_coef", [0.0, .01])
def test_wm_none_is_grpo_bit_for_bit(kl_coef, monkeypatch):
    cfg, make_batch, appended = settings(wm="none", kl_coef=kl_coef, max_grad_norm=1.0), paw.make_batch, []
    hashes = []
    for ours in (True, False):
        policy = tiny.policy(cfg)
        reference, start = paw.Reference(policy.model), tiny.lm()
        optimizer = torch.optim.AdamW(paw.trainable(policy.model).values(), lr=1e-3, weight_decay=.01)
        for seed in range(3):
            transitions, episodes = sampled_update(policy, cfg, RETURNS, seed=seed)
            if ours:
                monkeypatch.setattr(paw, "make_batch", lambda rows, with_obs, *a: appended.extend(with_obs) or make_batch(rows, with_obs, *a))
                update(policy, transitions, episodes, cfg, optimizer, reference)
                monkeypatch.undo()
            else:
                plain_grpo(policy, start, optimizer, transitions, episodes, cfg)
        hashes.append(weight_hash(policy.model))
    assert hashes[0] == hashes[1] and hashes[0] != weight_hash(tiny.lm())
    assert appended and not any(appended)  # no observation token is ever appended


def test_wm_none_and_paw_use_the_same_random_numbers():
    drawn = []
    for wm in ("none", "cmae"):
        cfg = settings(wm=wm, mini_batch=5)
        policy, generator = tiny.policy(cfg), torch.Generator().manual_seed(0)
        transitions, episodes = sampled_update(policy, cfg, RETURNS)
        paw.update_policy(policy, paw.Reference(policy.model), Recorder(policy.model), transitions, episodes, cfg, generator)
        drawn.append(([t.response for t in transitions], torch.randint(10**9, (1,), generator=generator).item()))
    assert drawn[0] == drawn[1]


def test_a_world_model_that_is_sure_of_everything_leaves_grpo_alone():
    gradients = []
    for changed in ({"wm": "none"}, {"rho": 1e-9}):  # every observation token is above rho: no gradient through the mask
        cfg = settings(**changed)
        policy = tiny.policy(cfg)
        gradients.append(update(policy, *sampled_update(policy, cfg, RETURNS), cfg)[0][0])
    assert_same_gradient(*gradients)


def test_observations_are_appended_to_the_selected_transitions_only(monkeypatch):
    cfg, make_batch, appended = settings(alpha=.5, kl_coef=0.0), paw.make_batch, []
    policy = tiny.policy(cfg)
    transitions, episodes = sampled_update(policy, cfg, RETURNS)
    spy = lambda rows, with_obs, *a: appended.extend(t for t, w in zip(rows, with_obs) if w) or make_batch(rows, with_obs, *a)
    monkeypatch.setattr(paw, "make_batch", spy)
    update(policy, transitions, episodes, cfg)
    best = sorted(range(12), key=lambda n: (-naive_entropy(transitions[n], "sampled"), n))[:6]
    assert sorted(map(id, appended)) == sorted(id(transitions[n]) for n in best)


def test_case11_equal_returns_give_a_world_model_gradient_and_no_policy_gradient():
    for wm, learns in (("none", False), ("cmae", True)):
        cfg = settings(wm=wm, kl_coef=0.0)
        policy = tiny.policy(cfg)
        gradients, metrics = update(policy, *sampled_update(policy, cfg, [[.1] * 3, [0] * 3]), cfg)
        assert metrics["frac_zero_std"] == 1 and metrics["pg_loss"] == 0
        assert bool(gradients) == learns and (metrics["grad_norm"] > 0) == learns and policy.version == learns
        assert all(math.isfinite(value) for value in metrics.values())


def test_without_kl_zero_gradient_transitions_are_dropped_and_the_gradient_stays(monkeypatch):
    gradients, sizes, make_batch = [], [], paw.make_batch
    for kl_coef in (0.0, 1e-30):  # with a KL term, however small, every transition is computed
        cfg, seen = settings(wm="none", kl_coef=kl_coef), []
        policy = tiny.policy(cfg)
        transitions, episodes = sampled_update(policy, cfg, [[10.0, 0, 0], [3, 3, 3]])
        monkeypatch.setattr(paw, "make_batch", lambda rows, *a: seen.extend(rows) or make_batch(rows, *a))
        gradients.append(update(policy, transitions, episodes, cfg)[0][0])
        sizes.append(len({id(t) for t in seen}))
        monkeypatch.setattr(paw, "make_batch", make_batch)
    assert sizes == [6, 12]
    assert_same_gradient(*gradients)


def test_gigpo_anchors_are_equal_observations_within_a_group():
    cfg = settings(algo="gigpo", group_size=2)
    episodes = [paw.Episode(g, f"game {g}", "t", ret=ret) for g, ret in ((0, 10.0), (0, 0.0), (1, 0.0), (1, 0.0))]
    step = lambda e, state, reward: transition([5], [6], [7], episode=e, group=episodes[e].group, state=state, reward=reward)
    # All four episodes start in state A; rollout order is by step, then by episode.
    transitions = [step(0, "A", 0.0), step(1, "A", 0.0), step(2, "A", 0.0), step(3, "A", -.1), step(0, "B", 10.0), step(1, "C", 0.0)]
    # Group 0: episodes +-0.7071; in A step returns 9.5 and 0: +-0.7071; B and C are alone: 0.
    # Group 1: equal returns: 0; in A step returns 0 and -0.1: mean -0.05, std 0.070711, so +-0.7071.
    right = torch.tensor([1.41421, -1.41421, .70710, -.70710, .70711, -.70711])
    assert torch.allclose(paw.compute_advantages(transitions, episodes, cfg), right, atol=2e-4)
    cfg.gigpo_omega = 0.0
    assert torch.allclose(paw.compute_advantages(transitions, episodes, cfg), right.sign() * torch.tensor([.70711, .70711, 0, 0, .70711, .70711]), atol=1e-4)
    cfg.algo = "grpo"
    assert torch.allclose(paw.compute_advantages(transitions, episodes, cfg)[:2], torch.tensor([.70711, -.70711]), atol=1e-4)
    cfg.adv_norm = "mean"  # (10 - 5) / 5, whatever the std
    assert paw.compute_advantages(transitions, episodes, cfg).tolist() == [1, -1, 0, 0, 1, -1]
    cfg.algo, cfg.gigpo_omega = "gigpo", 1.0  # in A step returns 9.5 and 0, or 0 and -0.1: +-4.75 / 5, +-0.05 / 5
    right = torch.tensor([1.95, -1.95, .01, -.01, 1, -1])
    assert torch.allclose(paw.compute_advantages(transitions, episodes, cfg), right, atol=1e-6)


def test_case48_world_model_weights_of_an_update():
    cfg, episodes = settings(alpha=.5), [paw.Episode(g, "", "", ret=r) for g, r in ((0, 10.0), (0, 0.0), (1, -.5), (1, -.5))]
    logps = [math.log(q) for q in (.37, .3, .01, .02)]  # -q ln q: 0.368, 0.361, 0.046, 0.078
    transitions = [transition([5], respond(6, logps=[logp]), [7], episode=e, group=e // 2) for e, logp in enumerate(logps)]
    weights, lambdas = paw.world_model_weights(transitions, episodes, cfg)
    assert lambdas.tolist() == [.5, 1.0]  # raw 1.05 for the second
    assert weights.tolist() == [.125, .125, 0, 0]  # both selected in group 0: 0.5 / 2 / 2 groups; none in group 1
    cfg.adaptive_lambda = False
    assert paw.world_model_weights(transitions, episodes, cfg)[0].tolist() == [.25, .25, 0, 0]
    cfg.wm = "none"
    assert paw.world_model_weights(transitions, episodes, cfg)[0].tolist() == [0] * 4


# ---- What must not go unnoticed --------------------------------------------------------------------------------------------

def poison(transitions, n, value=math.nan):
    t = transitions[n]
    transitions[n] = dataclasses.replace(t, response=t.response._replace(logps=[value] * len(t.response.ids)))


@pytest.mark.parametrize("budget", [1, 10**6])
@pytest.mark.parametrize("bad", [[4], [0, 11]])
def test_case55_a_non_finite_loss_raises_with_step_and_rows(budget, bad):
    cfg = settings(token_budget=budget)
    policy = tiny.policy(cfg)
    policy.version = 17
    transitions, episodes = sampled_update(policy, cfg, RETURNS)
    for n in bad:
        poison(transitions, n)
    before, optimizer = weight_hash(policy.model), torch.optim.AdamW(policy.model.parameters(), lr=.1)
    with pytest.raises(FloatingPointError) as caught:
        update(policy, transitions, episodes, settings(token_budget=budget, wm="none"), optimizer)
    assert "17" in str(caught.value) and all(str(n) in str(caught.value) for n in bad) and "3" not in str(caught.value).split("in ")[-1]
    assert weight_hash(policy.model) == before and policy.version == 17 and not optimizer.state


def test_case55_nan_weights_raise_too():
    cfg = settings()
    policy = tiny.policy(cfg)
    transitions, episodes = sampled_update(policy, cfg, RETURNS)
    with torch.no_grad():
        policy.model.lm_head.weight[7, 0] = math.nan
    with pytest.raises(FloatingPointError):
        update(policy, transitions, episodes, cfg)


def test_case52_a_rollout_uses_the_newest_weights_and_says_which():
    cfg = settings(lr=1e-2)
    policy = tiny.policy(cfg)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=cfg.lr)
    transitions, episodes = sampled_update(policy, cfg, RETURNS)
    assert {t.version for t in transitions} == {0}
    update(policy, transitions, episodes, settings(mini_batch=6), optimizer)
    again, _ = sampled_update(policy, cfg, RETURNS)
    assert policy.version == 2 and {t.version for t in again} == {2}  # two optimiser steps
    assert [t.response.logps for t in again] != [t.response.logps for t in transitions]
    with torch.no_grad():
        policy.model.model.norm.weight.zero_()  # all logits 0: every token has p = 1/64
    assert all(logp == pytest.approx(-math.log(64)) for r in sample(policy, [[5], [6, 7]]) for logp in r.logps)


def test_case52_the_policy_version_is_logged():
    cfg = settings()
    policy = tiny.policy(cfg)
    policy.version = 5
    metrics = update(policy, *sampled_update(policy, cfg, RETURNS), cfg)[1]
    assert 5 in [value for name, value in metrics.items() if "version" in name]


# ---- LoRA and the reference --------------------------------------------------------------------------------------------------

def with_adapters(kind="llama", rank=2, **changed):
    """A LoRA policy whose adapters are not zero, as after some training."""
    cfg = settings(lora_rank=rank, **changed)
    policy = tiny.policy(cfg, kind)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=.2)
    return policy, cfg


@pytest.mark.parametrize("kind", KINDS)
def test_lora_starts_as_the_base_model_and_trains_adapters_only(kind):
    policy, base = tiny.policy(settings(lora_rank=2), kind), tiny.lm(kind)
    tokens = torch.arange(3, 20)[None]
    assert torch.equal(policy.model(input_ids=tokens).logits, base(input_ids=tokens).logits)
    names = set(paw.trainable(policy.model))
    assert len(names) == 2 * 2 * 7 and all(".lora_A." in n or ".lora_B." in n for n in names)  # 2 layers, 7 linears, A and B


def test_case51_frozen_weights_stay_what_they_were():
    policy, cfg = with_adapters(lr=.1)
    optimizer = torch.optim.AdamW(paw.trainable(policy.model).values(), lr=.1, weight_decay=.5)
    frozen = lambda name, p: "lora" not in name
    before, adapters = weight_hash(policy.model, frozen), weight_hash(policy.model)
    reference = paw.Reference(policy.model)
    for seed in range(5):
        update(policy, *sampled_update(policy, cfg, RETURNS, seed=seed), cfg, optimizer, reference)
    assert weight_hash(policy.model, frozen) == before and weight_hash(policy.model) != adapters
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert not any(id(p) in held for n, p in policy.model.named_parameters() if frozen(n, p))


def reference_hash(reference):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in reference.start.values())).hexdigest()


@pytest.mark.parametrize("lora", [True, False])
def test_case19_the_reference_is_the_start_not_the_base(lora):
    policy, cfg = with_adapters() if lora else (tiny.policy(settings()), settings())
    reference = paw.Reference(policy.model)
    start, state = reference_hash(reference), weight_hash(policy.model)
    training = [m.training for m in policy.model.modules()]
    optimizer = torch.optim.AdamW(paw.trainable(policy.model).values(), lr=1e-2)
    transitions, episodes = sampled_update(policy, cfg, RETURNS)
    ours = paw.response_logps(policy.model, paw.make_batch(transitions, [False] * 12, "cpu"))[0]
    assert torch.equal(reference.logps(policy, transitions, 1.0), ours)
    assert weight_hash(policy.model) == state and [m.training for m in policy.model.modules()] == training
    assert all(p.grad is None for p in policy.model.parameters())
    kls = [update(policy, transitions, episodes, cfg, optimizer, reference)[1]["kl"] for _ in range(2)]
    assert kls[0] == pytest.approx(0, abs=1e-9) and kls[1] > 1e-4
    assert reference_hash(reference) == start and not any(t.requires_grad for t in reference.start.values())


def test_case19_kl_at_the_start_is_exactly_0():
    for algo in ("grpo", "gigpo"):
        cfg = settings(algo=algo)
        policy = tiny.policy(cfg)
        assert update(policy, *sampled_update(policy, cfg, RETURNS), cfg)[1]["kl"] == 0


def test_case19_an_error_in_the_reference_pass_restores_the_policy(monkeypatch):
    policy, cfg = with_adapters()
    reference = paw.Reference(policy.model)
    transitions, _ = sampled_update(policy, cfg, RETURNS)
    with torch.no_grad():
        next(iter(paw.trainable(policy.model).values())).add_(1)
    state = weight_hash(policy.model)
    monkeypatch.setattr(paw, "response_logps", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reference.logps(policy, transitions, 1.0)
    assert weight_hash(policy.model) == state


@pytest.mark.parametrize("kind", KINDS)
def test_saved_adapters_load_in_peft_with_equal_logits(kind, tmp_path):
    peft = pytest.importorskip("peft")
    policy, cfg = with_adapters(kind, rank=3)
    paw.save_model(policy, tmp_path / "adapters", cfg)
    loaded = peft.PeftModel.from_pretrained(tiny.lm(kind), tmp_path / "adapters").eval()
    tokens = torch.arange(3, 30)[None]
    assert torch.allclose(loaded(input_ids=tokens).logits, policy.model(input_ids=tokens).logits, atol=1e-4)
    assert not torch.allclose(policy.model(input_ids=tokens).logits, tiny.lm(kind)(input_ids=tokens).logits, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_loads_again_with_equal_logits_and_ids(kind, tmp_path):
    policy = tiny.policy(kind=kind)
    paw.save_model(policy, tmp_path, settings())
    loaded = paw.load_policy(settings(model=str(tmp_path)))
    tokens = torch.arange(3, 30)[None]
    assert torch.equal(loaded.model(input_ids=tokens).logits, policy.model(input_ids=tokens).logits)
    if kind == "llama":  # transformers gives a folder with a Qwen2 config Qwen2's own tokenizer class
        assert loaded.tokenizer("look at door 1\n")["input_ids"] == policy.tokenizer("look at door 1\n")["input_ids"]
    assert all(p.dtype == torch.float32 for p in loaded.model.parameters())


PIECES = ["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789<>/:.,'[]()-!?T#", "Ġ", "Ċ", "lo", "loo", "look", "go",
          "<x0>", "<x1>", "<x2>"]  # Ġ and Ċ: how byte-level tokenizers write space and line break


def write_gguf(gguf, path, model):
    """A Llama as a GGUF file in fp32, as llama.cpp writes it: the rows of query and key permuted, byte-level BPE."""
    c, writer = model.config, gguf.GGUFWriter(path, "llama")
    for key, value in {"context_length": 512, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64, "head_count": 4,
                       "head_count_kv": 2, "layer_norm_rms_eps": c.rms_norm_eps, "rope_dimension_count": 8, "rope_freq_base": 10000.0,
                       "vocab_size": 64, "tokenizer_model": "gpt2", "token_list": PIECES, "token_types": [3] * 3 + [1] * 61,
                       "token_merges": ["l o", "lo o", "loo k", "g o"], "pad_token_id": PAD, "eos_token_id": EOS}.items():
        getattr(writer, f"add_{key}")(value)
    names = {"model.layers": "blk", "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
             "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}
    for name, tensor in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
        if heads:
            tensor = tensor.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(-1, 32)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()


def test_case50_a_gguf_file_and_its_twin_have_equal_logits_and_ids(tmp_path):
    gguf, model = pytest.importorskip("gguf"), tiny.lm()  # four query heads share two key-value heads
    write_gguf(gguf, tmp_path / "tiny.gguf", model)
    policy = paw.load_policy(settings(model=str(tmp_path / "tiny.gguf")))
    tokens = torch.arange(3, 30)[None]
    assert torch.allclose(policy.model(input_ids=tokens).logits, model(input_ids=tokens).logits, atol=1e-5)
    pieces = ["go", "Ġ", "look", "Ġ", "a", "t", "Ġ", "1", "Ċ", "lo", "g"]
    assert policy.tokenizer("go look at 1\nlog")["input_ids"] == [PIECES.index(piece) for piece in pieces]
    assert policy.tokenizer.eos_token_id == EOS and sample(policy, [[5, 6], [7]])


# ---- Prompts and responses -----------------------------------------------------------------------------------------------

ADMISSIBLE = ["look", "open door 1"]


@pytest.mark.parametrize("text, action", [
    ("<think>x</think><action>look</action>", "look"),
    ("<think>x</think><action>open door 1</action>", "open door 1"),
    ("<THINK>x</THINK><Action> LOOK </Action>", "look"),
    ("<think>a\nb</think>\n<action>\nlook\n</action>", "look"),
    ("<think></think><action>look</action>", "look"),
    ("<action>look</action>", None),                                                   # no thought
    ("</action><action>", None),
    ("</action><action>look", None),
    ("<think>x</think></action><action>look", None),
    ("<think>x</think><action>look</action><action>open door 1</action>", None),       # two
    ("<think>x</think><action>look</action><action>look</action>", None),
    ("<think>x</think><action><action>look</action></action>", None),                  # nested
    ("<think>x</think><action>fly</action>", None),                                    # not admissible
    ("<think>x</think><action></action>", None),
    ("<think>x</think><action>look</action> and more", "look"),                        # ignored
    ("<think>x<action>look</action>", None),                                           # still thinking
    ("<think>a < b</think><action>look</action>", "look"),
    ("<think>x</think><action>look", None),
    ("look", None), ("", None)])
def test_case20_action_tags(text, action):
    assert paw.parse_response(text, ADMISSIBLE) == action


def test_case20_the_shortest_response_names_its_action():
    for action in ADMISSIBLE:
        assert paw.parse_response(paw.format_response(action), ADMISSIBLE) == action
    assert paw.parse_response(paw.format_response("LOOK"), ["Look"]) == "Look"  # returned as the environment spells it


HISTORY = [("o0", "a0"), ("o1", "a1"), ("o2", "a2")]


@pytest.mark.parametrize("style", ["paper", "compact"])
def test_case22_history_pairs_each_observation_with_its_own_action(style):
    prompt = paw.build_prompt(style, "find it", "o3", ["look", "go"], HISTORY, 2)
    order = [prompt.index(part) for part in ("find it", "o1", "a1", "o2", "a2", "o3")]
    assert order == sorted(order) and "o0" not in prompt and "a0" not in prompt
    assert all(prompt.count(part) == 1 for part in ("o1", "a1", "o2", "a2", "o3"))
    assert "look" in prompt[order[-1]:] and "3" in prompt.replace("o3", "")  # steps taken so far = t


def test_case22_paper_prompt_counts_steps():
    prompt = paw.build_prompt("paper", "find it", "o3", ["look", "go"], HISTORY, 2)
    assert "taken 3 step(s)" in prompt and "now at step 4" in prompt
    assert "[Observation 2: 'o1', Action 2: 'a1']" in prompt and "[Observation 3: 'o2', Action 3: 'a2']" in prompt
    assert "['look', 'go']" in prompt and "<think>" in prompt and "<action>" in prompt


@pytest.mark.parametrize("style", ["paper", "compact"])
@pytest.mark.parametrize("history, history_len", [([], 2), (HISTORY, 0)])
def test_case22_no_history_section_where_there_is_none(style, history, history_len):
    prompt = paw.build_prompt(style, "find it", "o3", ["look"], history, history_len)
    assert not any(word in prompt for word in ("taken", "Observation", "Act:", "o2", "a2"))
    assert history_len == 2 or "step 4" in prompt or "Step: 3" in prompt


def test_a_prompt_that_is_too_long_loses_its_oldest_history_first():
    policy, history = tiny.policy(), [("a" * 40, "b"), ("c" * 40, "d")]
    encode = lambda limit: paw.encode_prompt(policy, settings(max_prompt_len=limit), "go", "look", ["go"], history)
    text = lambda limit: policy.tokenizer.decode(encode(limit))
    full, one, none = (len(encode(n)) for n in (500, len(encode(500)) - 1, 60))
    assert full > one > none and len(encode(60)) <= 60
    assert "aaaa" in text(500) and "cccc" in text(500)
    assert "aaaa" not in text(full - 1) and "cccc" in text(full - 1)
    assert "cccc" not in text(one - 1) and len(encode(20)) == 20 and encode(20) == encode(none)[-20:]


QWEN_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}")


def test_case23_a_qwen_chat_template_gives_one_system_turn_and_the_assistant_header():
    policy = tiny.policy()
    policy.tokenizer.chat_template = QWEN_TEMPLATE
    size = len(policy.tokenizer)
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    prompt = paw.encode_prompt(policy, settings(), "go", "look", ["go"], [])
    start = policy.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert start == size and prompt.count(start) == 3 and prompt.count(start + 1) == 2
    text = policy.tokenizer.decode(prompt)
    assert prompt[0] == start and ids("assistant\n") == prompt[-len(ids("assistant\n")):] and text.count("system") == 1


def test_case23_without_a_chat_template_the_plain_prompt_is_used_and_said_once(capsys):
    cfg = settings(model="no-template", max_response_len=3)
    policy = tiny.policy(cfg)
    assert policy.tokenizer.chat_template is None and "chat template" in capsys.readouterr().out
    prompt = paw.encode_prompt(policy, cfg, "go", "look", ["go"], [])
    assert prompt == policy.tokenizer(paw.build_prompt("compact", "go", "look", ["go"], [], 2), add_special_tokens=False)["input_ids"]
    play(policy, cfg, [0])
    assert "template" not in capsys.readouterr().out


# ---- Rollouts --------------------------------------------------------------------------------------------------------------

def play(policy, cfg, tasks, pool=None, seed=0):
    return paw.rollout(policy, pool or tiny.DoorPool(), tasks, cfg.group_size, cfg, cfg.temperature,
                       torch.Generator().manual_seed(seed), defaultdict(float))


def test_a_rollout_in_all_its_parts():
    cfg, pool = settings(constrain=True, max_response_len=20, group_size=4), tiny.DoorPool(max_steps=3)
    policy = tiny.policy(cfg)
    policy.version = 6
    transitions, episodes = play(policy, cfg, [0, 2, 1], pool)
    assert [e.group for e in episodes] == [0] * 4 + [1] * 4 + [2] * 4
    assert [e.task_id for e in episodes] == ["id 0"] * 4 + ["id 2"] * 4 + ["id 1"] * 4
    assert {t.version for t in transitions} == {6} and all(t.valid for t in transitions)
    assert {e.won for e in episodes} == {True, False}  # else the test shows little
    for number, episode in enumerate(episodes):
        own = [t for t in transitions if t.episode == number]
        actions = pool.received[number]
        assert len(own) == len(episode.steps) == len(actions) <= 3 and {t.group for t in own} == {episode.group}
        texts = [policy.tokenizer.decode(t.response.ids) for t in own]
        assert [paw.parse_response(text, pool.actions) for text in texts] == actions  # the same function for log and environment
        right = pool.actions[pool.task[number]]
        assert episode.won == (right in actions) and (right not in actions[:-1])
        assert episode.ret == sum(t.reward for t in own) == (10 if episode.won else 0)
        rooms = [sum(a == "go" for a in actions[:n]) for n in range(len(actions))]
        assert [t.state for t in own] == [f"room {room}" for room in rooms]
        next_obs = [policy.tokenizer.decode(t.obs_ids) for t in own]
        assert next_obs[:-1] == [t.state for t in own[1:]] and (next_obs[-1] == "you won") == episode.won  # the terminal one stays
        history = [(t.state, a) for t, a in zip(own, actions)]
        for n, t in enumerate(own):  # cases 22, 23: scoring sees the ids that were sampled from; nothing of another episode
            assert t.prompt_ids == paw.encode_prompt(policy, cfg, f"task {pool.task[number]}", t.state, pool.actions, history[:n])


def test_a_second_rollout_in_the_same_pool_knows_nothing_of_the_first():
    cfg, pool, policy = settings(max_response_len=3), tiny.DoorPool(), tiny.policy()
    first, _ = play(policy, cfg, [0, 1], pool)
    again, _ = play(policy, cfg, [0, 1], pool)
    assert [(t.prompt_ids, t.response, t.obs_ids) for t in first] == [(t.prompt_ids, t.response, t.obs_ids) for t in again]


def test_case17_a_cut_response_is_invalid_and_costs_the_penalty_once():
    # the model writes "a" for ever
    policy, cfg = table_policy(script(*((n, 12) for n in range(64)))), settings(max_response_len=4, group_size=2)
    pool = tiny.DoorPool(max_steps=3)
    transitions, episodes = play(policy, cfg, [0], pool)
    assert len(transitions) == 6 and all(t.response.truncated and len(t.response.ids) == 4 for t in transitions)
    assert not any(t.valid for t in transitions) and [t.reward for t in transitions] == [-.1] * 6
    assert [e.ret for e in episodes] == pytest.approx([-.3, -.3]) and not any(e.won for e in episodes)
    assert paw.make_batch(transitions, [False] * 6, "cpu").action_mask.tolist() == [[1] * 4] * 6
    assert not any(a in pool.actions for a in pool.received[0])
    assert tiny.tokenizer().decode(transitions[0].obs_ids) == "nothing happens"
    metrics = update(policy, transitions, episodes, cfg)[1]
    assert metrics["truncated_frac"] == 1 and metrics["valid_action_rate"] == 0 and metrics["episode_len"] == 3


def test_rewards_are_scaled_to_the_papers():
    class RichPool(tiny.DoorPool):
        max_return = 50.0

        def step(self, indices, actions):
            return [(obs, 50 * reward, *rest) for obs, reward, *rest in super().step(indices, actions)]

    cfg = settings(constrain=True, max_response_len=20, group_size=4)
    _, episodes = play(tiny.policy(cfg), cfg, [0, 1, 2], RichPool())
    assert {e.ret for e in episodes} == {0.0, 10.0}


def test_long_observations_are_cut_for_the_world_model_only():
    cfg = settings(max_obs_len=3, max_response_len=3)
    transitions, _ = play(tiny.policy(), cfg, [0])
    assert all(len(t.obs_ids) == 3 for t in transitions) and {t.state for t in transitions} == {"room 0", "nothing happens"}


def test_evaluation_plays_each_task_once_with_its_own_random_numbers():
    cfg = settings(constrain=True, max_response_len=20, eval_episodes=10, eval_temperature=1.0)
    policy, pool = tiny.policy(cfg), tiny.DoorPool()
    torch.manual_seed(1)
    first = paw.evaluate(policy, pool, cfg)
    torch.manual_seed(2)
    assert paw.evaluate(policy, pool, cfg) == first
    assert sum(n for kind, (_, n) in first.items() if kind != "all") == 10


# ---- It learns ---------------------------------------------------------------------------------------------------------------

def test_a_random_model_learns_the_door_that_pays():
    cfg = settings(constrain=True, max_response_len=20, groups=3, group_size=8, lr=1e-3, max_grad_norm=1.0)
    policy, success = tiny.policy(cfg), []
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=cfg.lr)
    reference, generator = paw.Reference(policy.model), torch.Generator().manual_seed(0)
    for n in range(12):
        transitions, episodes = play(policy, cfg, [2, 2, 2], tiny.DoorPool(max_steps=1), seed=n)
        success.append(paw.update_policy(policy, reference, optimizer, transitions, episodes, cfg, generator)["success"])
    assert success[0] < .5 and sum(success[-4:]) / 4 > .85
