"""The parts of priorzero.py that hold weights: world model, search, replay, LLM scores and the two training phases."""

import copy
import math

import pytest
import torch

import priorzero as pz
import tiny_priorzero as tiny


@pytest.fixture
def alone(monkeypatch):
    """A UniZero agent with some episodes in its replay, its heads away from zero."""
    agent = tiny.agent(monkeypatch)
    agent.games = tiny.collected(agent)
    shake(agent.model)
    return agent


@pytest.fixture
def guided(monkeypatch):
    """A PriorZero agent with some episodes in its replay."""
    agent = tiny.agent(monkeypatch, alpha=0.5, llm_updates=3)
    agent.games = tiny.collected(agent, steps=9)
    return agent


def shake(model, seed=1, scale=0.3):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=g))


def roots_of(agent, histories):
    """Roots of made-up histories: a list of (observations, actions between them) for each row; the list of actions is always the same.
    A fourth action is known, but in no list."""
    actions = agent.bank(["press red", "press green", "press blue"])
    known = sorted([*actions, *agent.bank(["press gold"])])
    obs = pz.pad([agent.bank(o) for o, _ in histories], "cpu")
    taken = pz.pad([agent.bank(a) for _, a in histories], "cpu")
    return pz.encode_roots(agent.model, agent.bank, obs, taken, torch.tensor([actions] * len(histories)), torch.tensor([0, 0, 0, *known]))


def path_of(roots, stored):
    """What the nodes of a path have stored, the parent first: (kv [B, K, 2, L, 2, D], slots [B, K, A]); the root comes last."""
    root = torch.zeros(len(roots.value), 2, *roots.past.shape[2:]), roots.slots
    return tuple(torch.stack(parts, 1) for parts in zip(*reversed(stored), root))


HISTORIES = [(["one", "two words", "three"], ["press red", "press blue"]), (["alone"], []), (["two", "of them"], ["press green"])]


# ---- World model ---------------------------------------------------------------------------------------------------------

def test_the_start_is_neutral(monkeypatch):
    agent = tiny.agent(monkeypatch)
    roots = roots_of(agent, HISTORIES)
    assert roots.logits.abs().max() == 0 and roots.value.abs().max() < 1e-6
    step = pz.imagine(agent.model, roots, path_of(roots, []), torch.ones(3, 1, dtype=torch.bool), torch.tensor([0, 1, 2]), 0.9)
    assert step.reward.abs().max() < 1e-6 and step.value.abs().max() < 1e-6 and (step.discount == 0.9).all()


@torch.no_grad()
def test_cached_equals_full_context(alone):
    """Three imagined steps with stored keys/values against one pass over all tokens, rows of different history length."""
    model, roots = alone.model, roots_of(alone, HISTORIES)
    choices, stored, steps, played = torch.tensor([[0, 2, 1], [1, 1, 0], [2, 0, 2]]), [], [], []
    for depth in range(1, 4):
        kv, slots = path_of(roots, stored)
        played.append(slots[:, 0].gather(1, choices[:, depth - 1, None])[:, 0])
        mask = torch.ones(3, depth, dtype=torch.bool)
        kv, slots, mask = (torch.cat([x, torch.full_like(x[:, :1], n)], 1) for x, n in ((kv, 7), (slots, 1), (mask, 0)))  # padding holds anything
        steps.append(pz.imagine(model, roots, (kv, slots), mask, choices[:, depth - 1], 0.9))
        stored.append(steps[-1].embedding)
    for row, (obs, taken) in enumerate(HISTORIES):
        z, = pz.encode_texts(model, alone.bank, torch.tensor(alone.bank(obs)))
        a = pz.encode_texts(model, alone.bank, torch.tensor(alone.bank(taken), dtype=torch.long))[0] if taken else z[:0]
        tokens = [t for pair in zip(z, [*a, None]) for t in pair][:-1]
        for depth, step in enumerate(steps):
            tokens.append(roots.tokens[played[depth][row]])
            x = model.run(torch.stack(tokens)[None] + model.positions[:len(tokens)])[0][0, -1]
            assert torch.allclose(model.decode(model.reward, x), step.reward[row], atol=1e-5)
            tokens.append(model.normalize(model.latent(x)))
            x = model.run(torch.stack(tokens)[None] + model.positions[:len(tokens)])[0][0, -1]
            assert torch.allclose(model.decode(model.value, x), step.value[row], atol=1e-5)
            scores, valid = (model.score(head, x, roots.keys) for head in (model.policy, model.valid))
            likeliest = valid[3:].topk(3)
            assert torch.equal(step.embedding[1][row], likeliest.indices + 3)
            expected = torch.where((likeliest.values >= 0) | (torch.arange(3) == 0), scores[likeliest.indices + 3], -1e9)
            assert torch.allclose(expected, step.prior_logits[row], atol=1e-5)


@torch.no_grad()
def test_an_imagined_state_may_have_actions_that_the_root_has_not(alone):
    """With the root's list instead, a step into another room looks worth little, and the search prefers to idle."""
    roots, gold = roots_of(alone, HISTORIES), alone.bank(["press gold"])[0]
    def imagined(*likely):  # numbers of the actions [B, A] of imagined states where these are likely valid, and their priors
        keys = torch.where(torch.isin(roots.known, torch.tensor(likely))[:, None], 1.0, -1.0).expand_as(roots.keys)
        step = pz.imagine(alone.model, roots._replace(keys=keys), path_of(roots, []), torch.ones(3, 1, dtype=torch.bool), torch.tensor([0, 1, 2]), 0.9)
        return roots.known[step.embedding[1]], step.prior_logits.softmax(-1)

    hook = alone.model.valid.register_forward_hook(lambda *_: torch.full((3, alone.cfg.width), 9.0))
    red, green, blue = alone.bank(["press red", "press green", "press blue"])
    names, prior = imagined(gold)
    assert (names[:, 0] == gold).all() and (prior[:, 0] == 1).all()
    names, prior = imagined(gold, green)
    assert all(set(row[:2]) == {gold, green} for row in names.tolist()) and prior[:, 2].max() == 0 < prior[:, :2].min()
    names, prior = imagined(red, green, blue)
    assert not (names == gold).any() and prior.min() > 0
    names, prior = imagined()
    assert prior[:, 0].min() > 0  # none likely: the likeliest all the same
    hook.remove()


@torch.no_grad()
def test_root_equals_training_forward(alone):
    obs, taken = HISTORIES[0]
    z, a = pz.encode_texts(alone.model, alone.bank, torch.tensor([alone.bank(obs)]), torch.tensor([alone.bank([*taken, "go"])]))
    at_obs, _ = alone.model(z, a)
    roots = roots_of(alone, HISTORIES)
    assert torch.allclose(alone.model.decode(alone.model.value, at_obs[0, 2]), roots.value[0], atol=1e-5)
    assert torch.allclose(alone.model.score(alone.model.policy, at_obs[0, 2], roots.keys)[roots.slots[0]], roots.logits[0], atol=1e-5)


@torch.no_grad()
def test_rows_do_not_touch_each_other(alone):
    together = roots_of(alone, HISTORIES)
    for row, history in enumerate(HISTORIES):
        by_itself = roots_of(alone, [history])
        assert torch.allclose(by_itself.value[0], together.value[row], atol=1e-5)
        assert torch.allclose(by_itself.logits[0], together.logits[row], atol=1e-5)


def test_an_action_is_its_text(alone):
    """The same command at another place of the list: its score moves with it."""
    lists = torch.tensor([alone.bank(["press red", "press green"]), alone.bank(["press green", "press red"])])
    obs = torch.tensor([alone.bank(["one"])] * 2)
    roots = pz.encode_roots(alone.model, alone.bank, obs, obs[:, :0], lists, torch.tensor([0, 0, *sorted(lists[0].tolist())]))
    assert torch.allclose(roots.logits[0], roots.logits[1].flip(0), atol=1e-6)


# ---- Search --------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def test_the_prior_is_injected_at_the_root_only(alone):
    roots = roots_of(alone, HISTORIES)
    llm = torch.tensor([[-0.1, -3.0, -3.0]] * 3)
    logits = pz.fuse_root_prior(roots.logits, llm, roots.valid, 0.5, 1.0)
    tree = pz.tree_search(alone.model, roots, logits, alone.cfg, 16).tree
    assert torch.allclose(tree.children_prior[:, 0], logits.softmax(-1), atol=1e-6)
    checked = 0
    for row in range(3):
        for node in range(1, 17):
            actions, at = [], node
            while at > 0:
                actions.insert(0, int(tree.action_from_parent[row, at]))
                at = int(tree.parent[row, at])
            if int(tree.parent[row, node]) < 0:
                continue  # at the greatest depth a simulation evaluates an old node again
            stored = []
            for depth, action in enumerate(actions, 1):
                step = pz.imagine(alone.model, roots, path_of(roots, stored), torch.ones(3, depth, dtype=torch.bool), torch.tensor([action] * 3), 0.97)
                stored.append(step.embedding)
            assert torch.allclose(tree.children_prior[row, node], step.prior_logits[row].softmax(-1), atol=1e-5)
            checked += 1
    assert checked > 20


@torch.no_grad()
def test_case34_invalid_actions_and_noise(alone):
    actions = alone.bank(["press red", "press green", "press blue"])
    lists = torch.tensor([actions, [actions[0], actions[2], 0]])
    obs = torch.tensor([alone.bank(["one"])] * 2)
    roots = pz.encode_roots(alone.model, alone.bank, obs, obs[:, :0], lists, torch.tensor([0, 0, 0, *sorted(actions)]))
    result = pz.tree_search(alone.model, roots, roots.logits, alone.cfg, 12)
    assert (result.visit_counts.sum(1) == 12).all() and result.visit_counts[1, 2] == 0
    prior = result.tree.children_prior[1][result.tree.visits[1] > 0]  # [nodes, A]
    assert len(prior) > 3 and torch.allclose(prior.sum(-1), torch.ones(len(prior))) and prior[0, 2] == 0
    assert torch.equal(result.visit_counts, pz.tree_search(alone.model, roots, roots.logits, alone.cfg, 12).visit_counts)  # case 56


def test_noise_and_temperature_are_for_collection_only(alone, monkeypatch):
    """Evaluation: the same decisions whatever the random numbers, and the most visited action; collection: neither."""
    games = list(alone.games.values())
    def decide(seed, *how):
        return pz.decide(alone, games, 8, *how, pz.make_generators(seed, "cpu"))[:2]
    greedy, noisy, drawn = ([decide(seed, *how) for seed in range(6)] for how in ((0.0, False), (0.0, True), (1.0, False)))
    assert all(run == greedy[0] for run in greedy) and all(p[k] == max(p) for k, p in zip(*greedy[0]))
    assert any(run[1] != greedy[0][1] for run in noisy) and any(p[k] < max(p) for run in drawn for k, p in zip(*run))
    seen, play = [], pz.play
    monkeypatch.setattr(pz, "play", lambda agent, pool, games, *how: seen.append(how[1:3]) or play(agent, pool, games, *how))
    alone.cfg.env_steps, alone.env_steps, alone.cfg.temperature, alone.cfg.final_temperature = 80, 0, 1.0, 0.2
    tiny.collected(alone, steps=20)
    temperatures, noise = zip(*seen)
    assert all(noise) and temperatures[0] == 1.0 and temperatures[5] == pytest.approx(0.6)
    assert temperatures[10:] == pytest.approx((0.2,) * 10)
    seen.clear()
    alone.cfg.eval_episodes = 2
    pz.evaluate(alone, tiny.LampPool())
    assert set(seen) == {(0.0, False)}


def test_depth_stays_within_the_positions(monkeypatch):
    """The deepest imagined step, from the longest history, uses the last position or the last but one."""
    for window, context in ((6, 3), (10, 4), (3, 2), (10, 1)):
        agent, seen, imagine = tiny.agent(monkeypatch, window=window, context=context, td_steps=1, num_simulations=40), [], pz.imagine
        monkeypatch.setattr(pz, "imagine", lambda m, roots, path, mask, *a: seen.append(int((roots.lengths + 2 * mask.sum(1)).max())) or
                            imagine(m, roots, path, mask, *a))
        obs, go = (torch.tensor(agent.bank([text])) for text in ("one", "go"))
        known = torch.cat([torch.zeros(1, dtype=torch.long), go])  # a single action: the tree is one long line
        roots = pz.encode_roots(agent.model, agent.bank, obs.expand(1, context), go.expand(1, context - 1), go[None], known)
        pz.tree_search(agent.model, roots, roots.logits, agent.cfg, 40)
        monkeypatch.undo()
        assert 2 * window - 1 <= max(seen) <= 2 * window


# ---- Replay and targets --------------------------------------------------------------------------------------------------

class Played:
    """A finished game with given rewards."""

    def __init__(self, number, rewards, terminated):
        self.steps = [{"obs": number + t, "action": 1, "reward": r, "list": [1, 2], "visits": [0.75, 0.25]} for t, r in enumerate(rewards)]
        self.number, self.terminated = number + len(rewards), terminated


def test_windows_end_with_the_episode():
    replay = pz.Replay(1000, 4, "cpu")
    assert replay.add(Played(100, [1.0, 0, 2], True)) == 0 and replay.add(Played(200, [5.0], False)) == 4
    w = replay.window(torch.tensor([0, 2, 4]), 5)
    assert w.obs.tolist() == [[100, 101, 102, 103, 103], [102, 103, 103, 103, 103], [200, 201, 201, 201, 201]]
    assert w.mask.long().tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert w.terminated.long().tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert w.truncated.long().tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert w.reward[0].tolist() == [1, 0, 2, 0, 0] and w.list[0, 0].tolist() == [1, 2, 0, 0] and w.visits[0, 3].sum() == 0
    ten = torch.full((3, 5), 10.0)
    q = pz.n_step_targets(w.reward[:, :-1], ten, w.terminated[:, :-1], w.truncated[:, :-1], 0.9, 3)
    assert torch.allclose(q[0], torch.tensor([2.62, 1.8, 2.0, 0.0])) and torch.allclose(q[1, :2], torch.tensor([2.0, 0.0]))
    assert q[2, 0] == pytest.approx(14.0)  # 5 + .9 * 10: the time limit is no end


def test_draws_are_uniform_over_all_steps():
    replay = pz.Replay(1000, 4, "cpu")
    replay.add(Played(100, [0.0], True)), replay.add(Played(200, [0.0] * 7, True))
    counts = torch.bincount(replay.draw(8000, torch.Generator().manual_seed(0)), minlength=10)
    assert counts[1] == 0 and counts[9] == 0  # the observations behind the ends are no steps
    assert counts[[0, 2, 3, 4, 5, 6, 7, 8]].min() > 850 and counts.sum() == 8000


def test_the_ring_keeps_whole_steps():
    replay = pz.Replay(20, 4, "cpu")
    for n in range(12):
        replay.add(Played(100 * n, [float(n)] * (1 + n % 5), True))
        starts = replay.draw(200, torch.Generator().manual_seed(n))
        w = replay.window(starts, 6)
        assert (w.obs // 100 == w.obs[:, :1] // 100).all()  # no window holds two episodes
        assert (w.reward[:, 0] == w.obs[:, 0] // 100).all()


def test_what_is_left_of_an_overwritten_episode_is_not_drawn():
    replay = pz.Replay(20, 4, "cpu")
    for n, T in enumerate((10, 7, 4), 1):  # places 0-10, 11-18, and again 0-4: of the first episode 5-10 are left
        replay.add(Played(100 * n, [float(n)] * T, True))
    assert sorted(set(replay.draw(500, torch.Generator().manual_seed(0)).tolist())) == [0, 1, 2, 3, *range(11, 18)]


def test_behind_a_win_the_value_learns_zero(alone):
    """The loss sees value 0 at the observation behind a terminated episode, and nothing there behind a truncated one."""
    replay, cfg = pz.Replay(1000, 5, "cpu"), alone.cfg
    a, b = (replay.add(Played(1, [1.0], terminated)) for terminated in (True, False))
    losses = []
    for place in (a, b):
        w = replay.window(torch.tensor([place]), cfg.window + cfg.td_steps)
        alone.model.zero_grad()
        losses.append(pz.world_model_losses(alone.model, alone.target, alone.bank, w, cfg)[1]["value_loss"])
        z, act = pz.encode_texts(alone.model, alone.bank, w.obs[:, :cfg.window], w.action[:, :cfg.window])
        logp = alone.model.value(alone.model(z, act)[0]).log_softmax(-1)[0]
        v_next = pz.target_values(alone.target, alone.bank, w, cfg)[0][0, 1]
        first = pz.two_hot(pz.value_transform(1.0 + v_next * (0 if place == a else cfg.gamma)), alone.model.support)
        rows = [-(first * logp[0]).sum()] + ([-logp[t, 50] for t in range(1, cfg.window)] if place == a else [])
        assert torch.allclose(losses[-1], torch.stack(rows).mean(), atol=1e-5)


@torch.no_grad()
def test_policy_loss_sees_the_list_and_valid_loss_all_actions(alone):
    """The policy loss compares the actions of the state's own list; the valid loss asks for each of the batch whether it is in the list."""
    cfg = alone.cfg
    w = alone.replay.window(alone.replay.draw(6, torch.Generator().manual_seed(0)), cfg.window + cfg.td_steps)
    terms = pz.world_model_losses(alone.model, alone.target, alone.bank, w, cfg)[1]
    H, names = cfg.window, sorted({n for n in w.list[:, :cfg.window].flatten().tolist() if n})
    z, a = pz.encode_texts(alone.model, alone.bank, w.obs[:, :H], w.action[:, :H])
    at_obs, _ = alone.model(z, a)
    valid, policy = [], []
    for b in range(6):
        for t in range(H):
            if w.mask[b, t]:
                keys = alone.model.action_key(pz.encode_texts(alone.model, alone.bank, torch.tensor(names))[0])
                p, q = (alone.model.score(head, at_obs[b, t], keys) for head in (alone.model.policy, alone.model.valid))
                own, p = [names.index(n) for n in w.list[b, t].tolist() if n], p.softmax(-1)
                valid.append(sum(math.log1p(math.exp(-x if k in own else x)) for k, x in enumerate(q.tolist())) / cfg.num_slots)
                policy.append(-sum(v * math.log(p[k] / sum(p[own].tolist())) for v, k in zip(w.visits[b, t].tolist(), own)))
    assert float(terms["valid_loss"]) == pytest.approx(sum(valid) / len(valid), abs=1e-5)
    assert float(terms["policy_loss"]) == pytest.approx(sum(policy) / len(policy), abs=1e-5)


def test_target_values_have_history(alone):
    """Values at steps H .. H+n-1 come with at least n real steps before them; all are the target's, not the online model's."""
    cfg, starts = alone.cfg, alone.replay.draw(8, torch.Generator().manual_seed(0))
    w = alone.replay.window(starts, cfg.window + cfg.td_steps)
    shake(alone.target, 3)  # its heads are at zero
    values, z = pz.target_values(alone.target, alone.bank, w, cfg)
    assert values.shape == (8, cfg.window + cfg.td_steps) and z.shape[:2] == values.shape
    later = alone.replay.window(starts, 100)
    for j in range(cfg.window + cfg.td_steps):
        first = 0 if j < cfg.window else cfg.td_steps
        obs, action = (x[:, first:first + cfg.window] for x in (later.obs, later.action))
        zz, aa = pz.encode_texts(alone.target, alone.bank, obs, action)
        expected = alone.target.decode(alone.target.value, alone.target(zz, aa)[0])[:, j - first]
        assert torch.allclose(values[:, j], expected, atol=1e-5)
    before = values.clone()
    shake(alone.model, 5)
    assert torch.equal(pz.target_values(alone.target, alone.bank, w, cfg)[0], before)


def test_case40_target_network_lags(alone):
    old = [p.clone() for p in alone.target.parameters()]
    pz.update_world_model(alone)
    for was, now, online in zip(old, alone.target.parameters(), alone.model.parameters()):
        assert torch.allclose(now, 0.95 * was + 0.05 * online, atol=1e-6) and not now.requires_grad
    assert not alone.target.training and alone.wm_updates == 1


def test_case55_a_non_finite_loss_stops_the_run(alone):
    with torch.no_grad():
        alone.model.value[0].weight[0, 0] = float("nan")
    before = copy.deepcopy(alone.model.state_dict())
    with pytest.raises(FloatingPointError, match="world-model update 0: .* places"):
        pz.update_world_model(alone)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before.values(), alone.model.state_dict().values()))


@pytest.mark.parametrize("norm", ["layernorm", "simnorm"])
def test_one_batch_can_be_learnt(monkeypatch, norm):
    agent = tiny.agent(monkeypatch, latent_norm=norm, wm_lr=5e-3)
    tiny.collected(agent, steps=20)
    w = agent.replay.window(agent.replay.draw(16, agent.generators["replay"]), agent.cfg.window + agent.cfg.td_steps)
    w.visits[:] = torch.eye(agent.cfg.num_slots)[0] * w.mask[..., None]  # the targets of an untrained search say nothing
    history = []
    for _ in range(80):
        loss, terms = pz.world_model_losses(agent.model, agent.target, agent.bank, w, agent.cfg)
        loss.backward()
        agent.optimizer.step(), agent.optimizer.zero_grad()
        history.append({k: float(v.detach()) for k, v in terms.items()})
    assert history[-1]["reward_loss"] < 0.4 < history[0]["reward_loss"] and history[-1]["value_loss"] < 0.5 * history[0]["value_loss"]
    assert history[-1]["policy_loss"] < 0.2 < history[0]["policy_loss"]


# ---- The LLM's scores ----------------------------------------------------------------------------------------------------

ACTIONS = [["go", "go north", "press red"], ["press blue"], ["press green", "go"]]
PROMPTS = ["a short one.", "this prompt is a good deal longer than the others.", "x"]


def full_logps(llm, context, action):
    """Log-probabilities of " <action><eos>" from a forward pass of its own, without cache, mask or padding."""
    answer = llm.answer_ids(action)
    ids = torch.tensor([context + answer])
    return llm.model(input_ids=ids).logits[0, len(context) - 1:-1].log_softmax(-1)[range(len(answer)), answer]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@torch.no_grad()
def test_scores_equal_separate_passes(kind):
    llm = tiny.language_model(kind=kind)
    for budget in (10**6, 1):  # all rows together, one by one
        llm.token_budget = budget
        scores = pz.action_scores(llm, PROMPTS, ["Action:"] * 3, ACTIONS)
        for row, (prompt, actions) in enumerate(zip(PROMPTS, ACTIONS)):
            for n, action in enumerate(actions):
                expected = full_logps(llm, llm.ids(prompt) + llm.ids("Action:"), action)
                assert scores[row][n] == pytest.approx(float(expected.mean()), abs=1e-4)
    fewer = pz.action_scores(llm, PROMPTS[:1], ["Action:"], [["go north"]])  # case 41: leaving one out changes no other
    assert fewer[0][0] == pytest.approx(float(scores[0][1]), abs=1e-4)


def test_case41_context_and_action_are_tokenised_apart():
    llm = tiny.language_model()
    assert llm.answer_ids("go") == [*llm.ids(" go"), 1] and llm.answer_ids("go north")[:1] == llm.ids(" go")
    assert all(len(llm.answer_ids(a)) > 1 for row in ACTIONS for a in row)


def samples_of(llm, cfg, seed=0):
    """Samples as a rollout stores them, the second one with an analysis."""
    actions = [row[0] for row in ACTIONS]
    analyses = pz.generate_analyses(llm, [llm.ids(p) for p in PROMPTS], cfg, torch.Generator().manual_seed(seed))
    logps = llm.action_logps([llm.ids(p) + a["ids"] for p, a in zip(PROMPTS, analyses)], [[a] for a in actions])
    return [{"prompt": llm.ids(p), **a, "action": act, "action_logps": x[0]} for p, a, act, x in zip(PROMPTS, analyses, actions, logps)]


@pytest.mark.parametrize("cot", [False, True])
def test_case3_first_ratio_is_one(cot):
    cfg = tiny.settings(cot=cot, max_cot_len=12)
    llm = pz.LanguageModel(tiny.tokenizer(), tiny.lm(attention_dropout=0.1), cfg)
    assert not llm.model.training
    samples = samples_of(llm, cfg)
    logp = pz.response_logps(llm, samples)
    for row, s in enumerate(samples):
        old = torch.tensor(s["logps"] + s["action_logps"])
        scored = torch.tensor(s["written"] + [1] * len(s["action_logps"])).bool()
        assert (logp[row, :len(old)] - old)[scored].abs().max() < 1e-4 and len(s["ids"]) == len(s["logps"]) == len(s["written"])
        assert logp[row, len(old):].abs().sum() == 0
    with torch.no_grad():
        llm.swap_start()
        assert torch.equal(pz.response_logps(llm, samples), logp)  # KL to the start: 0
        llm.swap_start()


def test_case1_padding_does_not_matter():
    llm = tiny.language_model()
    samples = samples_of(llm, tiny.settings())
    together = pz.response_logps(llm, samples)
    for row, s in enumerate(samples):
        by_itself = pz.response_logps(llm, [s])[0]
        assert torch.allclose(together[row, :len(by_itself)], by_itself, atol=1e-5)


def test_analysis_is_cut_at_the_action():
    llm = tiny.language_model()
    text = "Reasoning: a lamp.\nAction: press red\n\nmore"
    ids = llm.ids(text)
    a = pz.cut_analysis(llm, ids, list(range(len(ids))))
    assert llm.tokenizer.decode(a["ids"]) == "Reasoning: a lamp.\nAction:" and a["format_ok"] and a["written"] == [1] * len(a["ids"])
    assert a["logps"] == list(range(len(a["ids"])))
    b = pz.cut_analysis(llm, [*llm.ids("I am lost"), 1, 5], [0.0] * 20)  # EOS, then anything
    assert llm.tokenizer.decode(b["ids"]) == "I am lost\nAction:" and not b["format_ok"]
    assert sum(b["written"]) == len(llm.ids("I am lost")) and b["written"][-1] == 0  # what we add is not trained


def test_case22_prompt_history():
    llm, cfg = tiny.language_model(), tiny.settings(history_len=2)
    history = [(f"o{t}", f"a{t}", float(t)) for t in range(3)]
    text = llm.tokenizer.decode(pz.encode_prompt(llm, cfg, "o3", ["go"], history))
    assert "o0" not in text and "Step 2. Observation: o1\nAction: a1\nReward: 1" in text and "Step 3. Observation: o2\nAction: a2" in text
    assert text.index("o2") < text.index("CURRENT OBSERVATION ===\no3") < text.index("VALID ACTIONS ===\ngo")
    assert "(none)" in llm.tokenizer.decode(pz.encode_prompt(llm, cfg, "o0", ["go"], []))
    short = tiny.settings(history_len=2, max_prompt_len=len(pz.encode_prompt(llm, cfg, "o3", ["go"], history[:1])))
    text = llm.tokenizer.decode(pz.encode_prompt(llm, short, "o3", ["go"], history))
    assert "o1" not in text and "o3" in text and text.rstrip().endswith("copied exactly>")  # the oldest goes first, never the end


def test_case7_no_pad_token():
    """Nothing here needs one: padding is 0, and every mask comes from lengths."""
    with_pad, without = (pz.LanguageModel(tiny.tokenizer(**kwargs), tiny.lm(), tiny.settings()) for kwargs in ({}, {"pad_token": None}))
    assert without.tokenizer.pad_token is None
    rows = [pz.action_scores(llm, ["a b", "c"], ["Action:"] * 2, [["go", "go north"]] * 2) for llm in (with_pad, without)]
    assert all(torch.equal(*pair) for pair in zip(*rows))


def test_case23_chat_template():
    llm, cfg = tiny.language_model(), tiny.settings()
    plain = llm.tokenizer.decode(pz.encode_prompt(llm, cfg, "o", ["go"], []))
    assert plain.startswith(pz.ROLE["babyai"]) and plain.endswith("\n")
    llm.tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    chat = llm.tokenizer.decode(pz.encode_prompt(llm, cfg, "o", ["go"], []))
    assert chat.count("[system]") == chat.count("[user]") == 1 and chat.endswith("[assistant]")


def test_case4_log_probabilities_are_fp32():
    llm = tiny.language_model()
    llm.model.bfloat16()
    logp = llm.log_probs(torch.randn(2, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)))
    assert logp.dtype == torch.float32 and torch.allclose(logp.exp().sum(-1), torch.ones(2), atol=1e-5)


# ---- The LLM's phase -----------------------------------------------------------------------------------------------------

def test_a_prior_is_computed_once(guided, monkeypatch):
    calls = []
    monkeypatch.setattr(guided.llm, "action_logps", lambda contexts, actions: calls.append(len(contexts)) or [[[-1.0]] * len(a) for a in actions])
    guided.llm.cache.clear()
    games = list(guided.games.values())
    first, again = (pz.llm_priors(guided.llm, games * 2, guided.cfg, guided.generators["sampling"]) for _ in range(2))
    assert len(calls) == 1 and calls[0] <= len(games) and first == again


def test_case45_priors_belong_to_their_game(guided):
    games = [guided.games[i] for i in (0, 2, 3)]
    guided.llm.cache.clear()
    together = pz.llm_priors(guided.llm, games, guided.cfg, guided.generators["sampling"])
    guided.llm.cache.clear()
    alone = pz.llm_priors(guided.llm, games[1:2], guided.cfg, guided.generators["sampling"])[0]
    assert together[1]["prompt"] == alone["prompt"] and len(alone["action_logps"]) == len(games[1].actions)
    assert all(a == pytest.approx(b, abs=1e-4) for a, b in zip(together[1]["action_logps"], alone["action_logps"]))


def test_case19_the_reference_is_the_start(guided):
    """KL 0 before the first update, more after it; computing the reference leaves weights and modes as they were."""
    samples, advantages = guided.samples[:4], torch.tensor([1.0, -1, 1, -1])
    before = {n: p.clone() for n, p in guided.llm.model.named_parameters()}
    assert pz.backward_llm(guided, samples, advantages)[3] == 0
    assert all(torch.equal(p, before[n]) for n, p in guided.llm.model.named_parameters()) and not guided.llm.model.training
    for group in guided.llm_optimizer.param_groups:
        group["lr"] = 1e-2
    guided.llm_optimizer.step()
    assert pz.backward_llm(guided, samples, advantages)[3] > 0
    assert all(torch.equal(p, before[n]) for n, p in guided.llm.start.items()) and not any(p.requires_grad for p in guided.llm.start.values())


def test_gradients_do_not_cross(guided):
    """The world model's update leaves the LLM alone, the LLM's phase the world model; both change what is theirs."""
    state = lambda module: {n: p.clone() for n, p in module.state_dict().items()}  # noqa: E731
    same = lambda a, b: all(torch.equal(a[n], b[n]) for n in a)  # noqa: E731
    wm, llm = state(guided.model), state(guided.llm.model)
    pz.update_world_model(guided)
    assert not same(wm, state(guided.model)) and same(llm, state(guided.llm.model))
    assert all(p.grad is None for p in guided.llm.model.parameters())
    wm, target = state(guided.model), state(guided.target)
    figures = pz.train_llm(guided)
    assert same(wm, state(guided.model)) and same(target, state(guided.target)) and not same(llm, state(guided.llm.model))
    assert all(p.grad is None for p in guided.model.parameters())
    assert figures["first_ratio_deviation"] < 1e-4 and guided.llm.version == 3 and not guided.samples and not guided.llm.cache


def test_advantages_come_from_the_target(guided):
    shake(guided.target)
    samples, replay, cfg = guided.samples, guided.replay, guided.cfg
    advantages = pz.sample_advantages(guided, samples)
    for n in range(0, len(samples), 5):
        first, t = samples[n]["first"], samples[n]["time"]
        back = min(t, cfg.window - 1 - cfg.td_steps)
        w = replay.window(torch.tensor([first + t - back]), cfg.window)
        z, a = pz.encode_texts(guided.target, guided.bank, w.obs, w.action)
        v = guided.target.decode(guided.target.value, guided.target(z, a)[0])[0].tolist()
        q, discount = 0.0, 1.0
        for i in range(cfg.td_steps):
            q += discount * float(w.reward[0, back + i])
            discount *= cfg.gamma
            if w.terminated[0, back + i] or w.truncated[0, back + i]:
                q += 0 if w.terminated[0, back + i] else discount * v[back + i + 1]
                break
        else:
            q += discount * v[back + cfg.td_steps]
        assert float(advantages[n]) == pytest.approx(q - v[back], abs=1e-4)
    shake(guided.model)  # the online model has no say
    assert torch.equal(pz.sample_advantages(guided, samples), advantages)


def test_case54_micro_batches_change_neither_gradient_nor_figures(guided):
    samples, advantages, gradients = guided.samples[:8], torch.linspace(-1, 1, 8), []
    shake(guided.llm.model, scale=0.02)  # away from the start: KL and clipping act
    for budget in (10**6, 1):
        object.__setattr__(guided.cfg, "token_budget", budget)
        sums = pz.backward_llm(guided, samples, advantages)
        gradients.append([p.grad.clone() for p in guided.llm.model.parameters()] + [sums])
        guided.llm.model.zero_grad()
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*gradients))


def test_llm_learns_what_paid(guided):
    """Advantage 1 for one action and -1 for another: the scores move apart."""
    llm = guided.llm
    contexts = [llm.ids("a lamp") + llm.ids("Action:")] * 2
    def gap():
        a, b = llm.action_logps(contexts[:1], [["press red", "press blue"]])[0]
        return sum(a) / len(a) - sum(b) / len(b)
    old = llm.action_logps(contexts, [["press red"], ["press blue"]])
    label = {"ids": llm.ids("Action:"), "logps": [0.0] * len(llm.ids("Action:")), "written": [0] * len(llm.ids("Action:")), "format_ok": True}
    samples = [{"prompt": llm.ids("a lamp"), **label, "action": a, "action_logps": o[0]} for a, o in zip(("press red", "press blue"), old)]
    before = gap()
    for _ in range(3):
        pz.backward_llm(guided, samples, torch.tensor([1.0, -1.0]))
        guided.llm_optimizer.step(), guided.llm_optimizer.zero_grad()
    assert gap() > before + 0.01


def test_case51_lora_leaves_the_base_alone(monkeypatch):
    agent = tiny.agent(monkeypatch, alpha=0.5, lora_rank=2, llm_updates=2, llm_lr=1e-2)
    base = {n: p.clone() for n, p in agent.llm.model.named_parameters() if not p.requires_grad}
    assert base and all("lora_" in n for n in agent.llm.trainable())
    plain = tiny.language_model()
    assert torch.allclose(pz.action_scores(agent.llm, ["x"], ["Action:"], [["go"]])[0], pz.action_scores(plain, ["x"], ["Action:"], [["go"]])[0])
    tiny.collected(agent, steps=8)
    adapters = {n: p.clone() for n, p in agent.llm.trainable().items()}
    pz.train_llm(agent)
    now = dict(agent.llm.model.named_parameters())
    assert all(torch.equal(p, now[n]) for n, p in base.items()) and any(not torch.equal(p, now[n]) for n, p in adapters.items())


def test_case52_priors_follow_the_weights(guided):
    games = list(guided.games.values())
    before = pz.llm_priors(guided.llm, games, guided.cfg, guided.generators["sampling"])
    pz.train_llm(guided)
    after = pz.llm_priors(guided.llm, games, guided.cfg, guided.generators["sampling"])
    assert before[0]["action_logps"] != after[0]["action_logps"]


@torch.no_grad()
def test_reanalyze_searches_with_the_real_history(alone, monkeypatch):
    seen = []
    encode_roots = pz.encode_roots
    monkeypatch.setattr(pz, "encode_roots", lambda *a: seen.append(a[2:]) or encode_roots(*a))
    places = alone.replay.draw(8, torch.Generator().manual_seed(0))
    policies, data = pz.reanalyze(alone, places), alone.replay.data
    obs, actions, lists, _ = seen[0]
    for row, place in enumerate(places.tolist()):
        back = min(int(data["time"][place]), alone.cfg.context - 1)
        assert obs[row].tolist() == data["obs"][place - back:place + 1].tolist() + [0] * (alone.cfg.context - 1 - back)
        assert actions[row].tolist() == data["action"][place - back:place].tolist() + [0] * (alone.cfg.context - 1 - back)
        assert torch.equal(lists[row], data["list"][place]) and policies[row, data["list"][place] == 0].sum() == 0
    assert torch.allclose(policies.sum(1), torch.ones(8))
    alone.cfg.reanalyze = 0.25
    with torch.enable_grad():
        pz.update_world_model(alone)


@pytest.mark.parametrize("cot", [False, True])
def test_the_format_reward_needs_an_analysis(guided, monkeypatch, cot):
    """What train_llm hands on: raw advantages normalised over the phase, and with --cot blended with the format reward."""
    cfg, raw, seen = guided.cfg, torch.tensor([1.0, 2.0, 6.0]), []
    cfg.cot, cfg.format_weight, cfg.llm_batch, cfg.llm_updates = cot, 0.25, 3, 1
    guided.phase = (1, 1, 1)
    guided.samples = [{**s, "format_ok": n == 1} for n, s in enumerate(guided.samples[:3])]
    firsts = [(s["first"], s["time"]) for s in guided.samples]
    monkeypatch.setattr(pz, "sample_advantages", lambda agent, samples: raw)
    monkeypatch.setattr(pz, "backward_llm", lambda agent, part, a: seen.append((part, a)) or torch.ones(5))
    pz.train_llm(guided)
    (part, advantages), std = seen[0], math.sqrt(7)  # mean 3: deviations -2, -1, 3, (4 + 1 + 9) / 2 = 7
    for s, a in zip(part, advantages.tolist()):
        n = firsts.index((s["first"], s["time"]))
        hat = (-2 / std, -1 / std, 3 / std)[n]
        assert a == pytest.approx(0.75 * hat + 0.25 * (n == 1) if cot else hat, abs=1e-4)


def test_sft_imitates_what_was_drawn(guided):
    """The gradient of --loss sft is that of -mean log p over the action tokens, whatever the advantage and the old log-probabilities."""
    guided.cfg.loss, guided.cfg.kl_coef, samples = "sft", 0.0, guided.samples[:4]
    pz.backward_llm(guided, [{**s, "action_logps": [x - 1 for x in s["action_logps"]]} for s in samples], torch.tensor([1.0, -2.0, 0.0, 5.0]))
    ours = [p.grad.clone() for p in guided.llm.trainable().values()]
    guided.llm.model.zero_grad()
    logp = pz.response_logps(guided.llm, samples)
    mask = pz.pad([[0] * len(s["ids"]) + [1] * len(s["action_logps"]) for s in samples], "cpu")
    (-(logp * mask).sum() / mask.sum()).backward()
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(ours, guided.llm.trainable().values()))


def test_alpha_is_adaptive_in_evaluation_too(guided, monkeypatch):
    seen, fuse = [], pz.fuse_root_prior
    monkeypatch.setattr(pz, "fuse_root_prior", lambda wm, llm, valid, alpha, t: seen.append(alpha) or fuse(wm, llm, valid, alpha, t))
    guided.cfg.adaptive_alpha, guided.cfg.eval_episodes = True, 2
    pz.evaluate(guided, tiny.LampPool())
    assert all(isinstance(alpha, torch.Tensor) and (alpha > 0.29).all() and (alpha < 0.71).all() for alpha in seen)


def test_evaluation_leaves_the_priors_of_training_alone(guided):
    games = list(guided.games.values())
    pz.llm_priors(guided.llm, games, guided.cfg, pz.make_generators(9, "cpu")["sampling"])
    known = set(guided.llm.cache)
    pz.llm_priors(guided.llm, games, guided.cfg, guided.generators["sampling"])
    assert len(set(guided.llm.cache) - known) == len({key[1:] for key in set(guided.llm.cache) - known}) > 0


@pytest.mark.parametrize("change", ["no EOS", "softcap", "no Linear for LoRA"])
def test_an_lm_that_does_not_fit_is_refused(change):
    model, tokenizer, cfg = tiny.lm(), tiny.tokenizer(), tiny.settings(lora_rank=2 if "LoRA" in change else 0)
    if change == "no EOS":
        tokenizer.eos_token = None
    elif change == "softcap":
        model.config.final_logit_softcapping = 30.0
    else:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear) and child is not model.lm_head:
                    setattr(module, name, torch.nn.Identity())
    with pytest.raises(pz.InputError, match="needs an EOS token"):
        pz.LanguageModel(tokenizer, model, cfg)


def test_switches_change_what_is_played(guided, monkeypatch):
    """--no-mcts acts from the fused prior, --llm_only from the LLM alone; neither searches."""
    games = list(guided.games.values())
    priors = pz.llm_priors(guided.llm, games, guided.cfg, guided.generators["sampling"])
    best = [max(range(len(p["action_logps"])), key=lambda n: sum(p["action_logps"][n]) / len(p["action_logps"][n])) for p in priors]
    monkeypatch.setattr(pz, "tree_search", None)
    assert pz.decide(guided, games, 8, 0.0, False, guided.generators, llm_only=True)[0] == best
    guided.cfg.mcts = False
    _, policies, _, _ = pz.decide(guided, games, 8, 1.0, False, guided.generators)
    scores = torch.tensor([sum(x) / len(x) / guided.cfg.prior_temperature for x in priors[0]["action_logps"]]).softmax(0)
    assert torch.allclose(torch.tensor(policies[0][:len(scores)]), 0.5 / len(scores) + 0.5 * scores, atol=1e-4)  # its own prior is uniform


def test_schedule_of_phases(monkeypatch):
    for changed, expected in (({}, [(14, 3), (18, 6), (22, 9)]), ({"alternate": False}, [(1, 1), (2, 2), (3, 3)])):
        agent = tiny.agent(monkeypatch, alpha=0.5, wm_updates=4, llm_updates=3, wm_warmup=10, **changed)
        agent.replay.add(Played(1, [1.0], True))
        agent.samples, phases = [{}], []
        def phase(agent):
            agent.llm.version += agent.phase[1]
            phases.append((agent.wm_updates, agent.llm.version))
            return {}
        monkeypatch.setattr(pz, "train_llm", phase)
        monkeypatch.setattr(pz, "update_world_model", lambda agent: setattr(agent, "wm_updates", agent.wm_updates + 1) or {})
        agent.env_steps = 8 + 22
        pz.learn(agent)
        monkeypatch.undo()
        assert phases[:3] == expected, changed
