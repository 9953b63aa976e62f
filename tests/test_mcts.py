"""mcts.py: against mctx's answers, against a slow recursive search written from the formulas, and by its invariants.

`case32` and the like: faults that others made, each with the right value.
"""

import doctest
import json
import collections
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mcts
from mcts import Root, Step, action_probs, add_root_noise, gumbel_search, normalize_q, search, visit_entropy

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT.parent / "shared" / "golden" / "mctx_search.json"
GUMBEL = ROOT / "tests" / "gumbel_reference.json"


def load_golden():
    if GOLDEN.exists():
        return json.loads(GOLDEN.read_text())["problems"]
    if os.environ.get("CI"):
        raise FileNotFoundError(f"{GOLDEN} is missing, and with CI set that is a failure")
    return []


class Tabular:
    """A model given by tables over states: `next_state, reward, discount, prior_logits` [S, A] and `value` [S]."""

    def __init__(self, problem):
        self.next_state = torch.as_tensor(problem["next_state"])
        names = ("reward", "discount", "prior_logits", "value")
        tensors = (torch.as_tensor(problem[name], dtype=torch.float32) for name in names)
        self.reward, self.discount, self.prior_logits, self.value = tensors

    def root(self, states):
        states = torch.as_tensor(states)
        return Root(self.prior_logits[states], self.value[states], states)

    def __call__(self, state, action):
        new = self.next_state[state, action]
        reward, discount = self.reward[state, action], self.discount[state, action]
        return Step(reward, discount, self.prior_logits[new], self.value[new], new)


def random_tabular(seed, num_states=9, num_actions=4, discount=0.97, zeros=0.0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    shape = num_states, num_actions
    discounts = torch.full(shape, discount) * (torch.rand(shape, generator=g) >= zeros)
    tables = {
        "next_state": torch.randint(num_states, shape, generator=g),
        "reward": scale * torch.randn(shape, generator=g),
        "discount": discounts,
        "prior_logits": torch.randn(shape, generator=g),
        "value": scale * torch.randn(num_states, generator=g),
    }
    return Tabular(tables)


def assert_same(a, b, exact=True):
    """Two search results (or the parts of two that are compared) hold the same tensors."""
    for x, y in zip(flatten(a), flatten(b), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y) if exact or not x.is_floating_point() else torch.allclose(x, y, rtol=1e-5, atol=1e-5)


def flatten(result):
    return [x for part in result for x in (flatten(part) if isinstance(part, tuple) else [part]) if x is not None]


def rows(result, index):
    return [x[index] for x in flatten(result)]


# ---------------------------------------------------------------------------------------------- mctx


@pytest.mark.skipif(not GOLDEN.exists() and not os.environ.get("CI"), reason=f"needs {GOLDEN.name} in ../shared/golden")
@pytest.mark.parametrize("num_simulations", [8, 25, 50])
def test_golden_problems_equal_mctx(num_simulations):
    problems = load_golden()
    assert len(problems) == 14
    for problem in problems:
        model, expected = Tabular(problem), problem["results"]["mctx"][str(num_simulations)]
        invalid = problem["invalid_actions"]
        mask = None if invalid is None else 1 - torch.tensor(invalid)
        result = search(model.root(problem["root_states"]), model, num_simulations, valid_mask=mask)
        tree = result.tree
        assert tree.parent.tolist() == expected["parent"], problem["id"]
        assert tree.action_from_parent.tolist() == expected["action"], problem["id"]
        assert tree.visits.tolist() == expected["node_visits"], problem["id"]
        assert result.visit_counts.tolist() == expected["visit_counts"], problem["id"]
        scale = model.value.abs().max().item() + model.reward.abs().max().item()
        for ours, name in [
            (tree.values, "node_values"),
            (tree.raw_values, "raw_value"),
            (result.root_value, "root_value"),
            (result.root_q, "root_qvalues"),
        ]:
            torch.testing.assert_close(ours, torch.tensor(expected[name]), rtol=1e-5, atol=1e-6 * scale)


# ------------------------------------------------------------------- a slow search, from the formulas


class Node:
    """The search as one would explain it: Python numbers (float64), one tree, recursion."""

    def __init__(self, model, state):
        self.model, self.state, self.children = model, state, {}
        self.value, self.visits = float(model.value[state]), 1
        self.prior = torch.softmax(model.prior_logits[state].double(), 0).tolist()
        self.allowed = list(range(len(self.prior)))

    def q(self, action):
        reward, discount = self.edge(action)
        return reward + discount * self.children[action].value

    def edge(self, action):
        return float(self.model.reward[self.state, action]), float(self.model.discount[self.state, action])

    def scores(self):
        q = {action: self.q(action) for action in self.children}
        low, high = min([self.value, *q.values()]), max([self.value, *q.values()])
        rate = math.sqrt(self.visits) * (1.25 + math.log((self.visits + 19652 + 1) / 19652))
        scores = {}
        for action in self.allowed:
            visits = self.children[action].visits if action in self.children else 0
            normalized = (q[action] - low) / max(high - low, 1e-8) if action in q else 0.0
            scores[action] = normalized + self.prior[action] * rate / (1 + visits)
        return scores

    def simulate(self, names, depth_left):
        """One simulation below this node; returns the return G seen from here and the margin of the closest choice."""
        scores = self.scores()
        ranked = sorted(scores.values(), reverse=True)
        margin = ranked[0] - ranked[1] if len(ranked) > 1 else math.inf
        action = max(scores, key=scores.get)
        reward, discount = self.edge(action)
        if action not in self.children:
            child = self.children[action] = Node(self.model, int(self.model.next_state[self.state, action]))
            names[child] = len(names), names[self][0], action
            below = child.value
        elif depth_left == 1:  # the depth limit: the child is evaluated again
            child = self.children[action]
            below = float(self.model.value[child.state])
            child.value, child.visits = (child.value * child.visits + below) / (child.visits + 1), child.visits + 1
            names[object()] = None  # this simulation's place in the tree stays empty
        else:
            below, margin_below = self.children[action].simulate(names, depth_left - 1)
            margin = min(margin, margin_below)
        total = reward + discount * below
        self.value, self.visits = (self.value * self.visits + total) / (self.visits + 1), self.visits + 1
        return total, margin


def slow_search(model, state, num_simulations, valid=None, max_depth=None):
    """Returns parents, actions, visits and values of the nodes (-1, -1, 0, 0 if none) and the smallest margin."""
    root = Node(model, state)
    if valid is not None:
        root.allowed = [a for a in root.allowed if valid[a]]
        total = sum(root.prior[a] for a in root.allowed)
        root.prior = [p / total for p in root.prior]
    names = {root: (0, -1, -1)}
    margin = min(root.simulate(names, max_depth or num_simulations)[1] for _ in range(num_simulations))
    nodes = [(-1, -1, 0, 0.0) if name is None else (*name[1:], node.visits, node.value) for node, name in names.items()]
    return [list(column) for column in zip(*nodes)], margin


KINDS = {
    "plain": {},
    "masks": {"mask": True},
    "zero discounts": {"zeros": 0.4},
    "two players": {"discount": -1.0, "zeros": 0.1},
    "discount 1": {"discount": 1.0},
    "large": {"scale": 1e4},
    "small": {"scale": 1e-3, "mask": True},
    "depth limit": {"max_depth": 3},
    "depth limit 1": {"max_depth": 1, "mask": True},
    "many actions": {"num_actions": 9, "num_states": 30},
}


@pytest.mark.parametrize("kind", KINDS)
def test_recursive_reference_agrees_on_20_problems_of_each_kind(kind):
    """Problems in which rounding could change a choice (margin below 1e-4) are replaced by the next."""
    options = dict(KINDS[kind])
    masked, max_depth = options.pop("mask", False), options.pop("max_depth", None)
    done, seed = 0, 1000 * list(KINDS).index(kind)
    while done < 20:
        seed += 1
        model, num_simulations = random_tabular(seed, **options), (8, 25, 50)[seed % 3]
        num_states, num_actions = model.reward.shape
        states, mask = torch.arange(3) % num_states, None
        if masked:
            mask = torch.rand(3, num_actions, generator=torch.Generator().manual_seed(seed)) < 0.6
            mask[torch.arange(3), torch.arange(3) % num_actions] = True
        slow = []
        for row, state in enumerate(states.tolist()):
            slow.append(slow_search(model, state, num_simulations, None if mask is None else mask[row], max_depth))
        if min(margin for _, margin in slow) < 1e-4:
            continue
        result = search(model.root(states), model, num_simulations, valid_mask=mask, max_depth=max_depth)
        for row, ((parents, actions, visits, values), _) in enumerate(slow):
            assert result.tree.parent[row].tolist() == parents, seed
            assert result.tree.action_from_parent[row].tolist() == actions, seed
            assert result.tree.visits[row].tolist() == visits, seed
            atol = 1e-5 * options.get("scale", 1.0)
            torch.testing.assert_close(result.tree.values[row], torch.tensor(values), rtol=1e-5, atol=atol)
        done += 1
    assert seed % 1000 < 60, "most problems were thrown away"


# ---------------------------------------------------------------------------------------- invariants


def batch_problem(seed=0, num_batch=7):
    model = random_tabular(seed, num_states=20, num_actions=5, zeros=0.1)
    states = torch.arange(num_batch) % 20
    mask = torch.rand(num_batch, 5, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[:, 0] |= ~mask.any(1)
    return model, states, mask


@pytest.mark.parametrize("method", [search, gumbel_search])
def test_rows_do_not_influence_each_other(method):
    model, states, mask = batch_problem()
    gumbel = {"gumbel": torch.randn(7, 5)} if method is gumbel_search else {}
    whole = method(model.root(states), model, 20, valid_mask=mask, **gumbel)
    for row in range(7):
        one = slice(row, row + 1)
        alone = method(model.root(states[one]), model, 20, valid_mask=mask[one], **{k: v[one] for k, v in gumbel.items()})
        assert_same(rows(whole, one), rows(alone, slice(None)))


def test_permuting_rows_permutes_results_and_extra_rows_change_nothing():
    model, states, mask = batch_problem()
    result = search(model.root(states), model, 25, valid_mask=mask)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    permuted = search(model.root(states[order]), model, 25, valid_mask=mask[order])
    assert_same(rows(result, order), rows(permuted, slice(None)))
    more = torch.cat([states, torch.tensor([11, 12, 13])]), torch.cat([mask, torch.ones(3, 5, dtype=torch.bool)])
    padded = search(model.root(more[0]), model, 25, valid_mask=more[1])
    assert_same(rows(result, slice(None)), rows(padded, slice(7)))


def test_permuting_actions_permutes_visits():
    model, states, mask = batch_problem(seed=5)
    order = torch.tensor([2, 0, 4, 1, 3])
    other = Tabular({name: getattr(model, name) for name in ("next_state", "reward", "discount", "prior_logits", "value")})
    for name in ("next_state", "reward", "discount", "prior_logits"):
        setattr(other, name, getattr(model, name)[:, order])
    visits = search(model.root(states), model, 30, valid_mask=mask).visit_counts
    assert torch.equal(visits[:, order], search(other.root(states), other, 30, valid_mask=mask[:, order]).visit_counts)


@pytest.mark.parametrize("method", [search, gumbel_search])
@pytest.mark.parametrize("max_depth", [None, 3])
def test_the_parts_of_the_tree_fit_together(method, max_depth):
    model, states, mask = batch_problem(seed=2)
    result = method(model.root(states), model, 30, valid_mask=mask, max_depth=max_depth)
    tree = result.tree
    assert result.visit_counts.sum(1).tolist() == [30] * 7
    assert torch.equal(result.visit_counts, tree.children_visits[:, 0])
    assert torch.equal(result.root_value, tree.values[:, 0])
    assert (result.visit_counts[~mask] == 0).all() and (result.root_q[~mask] == 0).all()
    assert (tree.children_prior[:, 0][~mask] == 0).all()
    for row in range(7):
        for node in range(1, 31):
            parent, action = tree.parent[row, node].item(), tree.action_from_parent[row, node].item()
            if parent == -1:  # the depth limit leaves places empty
                assert max_depth and action == -1 and tree.visits[row, node] == 0
                continue
            assert parent < node and tree.children_index[row, parent, action] == node
            assert tree.children_visits[row, parent, action] == tree.visits[row, node]
        for node in range(31):
            children = tree.children_index[row, node]
            assert torch.equal(children < 0, tree.children_visits[row, node] == 0)
            assert (tree.children_rewards[row, node][children < 0] == 0).all()
            assert (tree.children_discounts[row, node][children < 0] == 0).all()
            if max_depth is None:
                assert tree.visits[row, node] == 1 + tree.children_visits[row, node].sum()
    reward, discount = tree.children_rewards[:, 0], tree.children_discounts[:, 0]
    value = tree.values.gather(1, tree.children_index[:, 0].clamp(min=0))
    seen = result.visit_counts > 0
    torch.testing.assert_close(result.root_q[seen], (reward + discount * value)[seen])
    assert torch.allclose(tree.children_prior[:, 0].sum(1), torch.ones(7))


def depths(tree):
    """Depth of every node, [B, K+1], -1 where there is none."""
    depth = torch.zeros_like(tree.parent)
    for node in range(1, depth.shape[1]):
        parent = tree.parent[:, node]
        depth[:, node] = torch.where(parent < 0, -1, depth.gather(1, parent.clamp(min=0)[:, None])[:, 0] + 1)
    return depth


def test_max_depth():
    model, states, mask = batch_problem(seed=3)
    free = search(model.root(states), model, 40, valid_mask=mask)
    assert depths(free.tree).max() > 4
    for limit in (1, 2, 4):
        result = search(model.root(states), model, 40, valid_mask=mask, max_depth=limit)
        assert depths(result.tree).max() == limit
        assert result.visit_counts.sum(1).tolist() == [40] * 7
    deep = int(depths(free.tree).max())
    assert_same(free, search(model.root(states), model, 40, valid_mask=mask, max_depth=deep + 1))
    assert_same(free, search(model.root(states), model, 40, valid_mask=mask, max_depth=1000))


def test_embedding_may_be_nested_tuples_and_dicts_of_any_dtype():
    model, states, mask = batch_problem(seed=4)
    plain = search(model.root(states), model, 25, valid_mask=mask)

    def nested(embedding, action):
        state, (half, table) = embedding["state"], embedding["more"]
        assert half.dtype == torch.float16 and table["x"].shape == (7, 2, 3) and table["x"].dtype == torch.bool
        assert (half[:, 0] == state).all() and (table["x"] == (state % 2 == 0)[:, None, None]).all()
        return (step := model(state, action))._replace(embedding=wrap(step.embedding))

    def wrap(state):
        even = (state % 2 == 0)[:, None, None].expand(7, 2, 3)
        return {"state": state, "more": (state[:, None].half(), {"x": even})}

    assert_same(plain, search(model.root(states)._replace(embedding=wrap(states)), nested, 25, valid_mask=mask))


def test_ties_go_to_the_lowest_action():
    def flat(state, action):
        return Step(torch.zeros(2), torch.ones(2), torch.zeros(2, 4), torch.zeros(2), state)

    root = Root(torch.zeros(2, 4), torch.zeros(2), torch.zeros(2))
    result = search(root, flat, 6, valid_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]))
    assert result.tree.action_from_parent[0, 1:5].tolist() == [0, 1, 2, 3]
    assert result.tree.action_from_parent[1, 1:3].tolist() == [2, 3]


def test_an_invalid_action_does_not_win_a_tie_when_a_valid_prior_underflows():
    """Softmax of (0, -1e4) is (1, 0): action 2's prior is exactly 0, as the invalid action 0's."""
    root = Root(torch.tensor([[5.0, 0.0, -1e4]]), torch.zeros(1), torch.zeros(1))

    def worse(state, action):
        return Step(torch.where(action == 1, -1.0, -2.0), torch.zeros(1), torch.zeros(1, 3), torch.zeros(1), state)

    for method in (search, gumbel_search):
        assert method(root, worse, 50, valid_mask=torch.tensor([[0, 1, 1]])).visit_counts[0, 0] == 0
        assert method(root, worse, 50, valid_mask=torch.tensor([[0, 0, 1]])).visit_counts.tolist() == [[0, 0, 50]]


def test_the_model_may_be_trained_after_a_search_and_results_are_ordinary_tensors():
    layer = torch.nn.Linear(3, 5)

    def model(state, action):
        model.cache = state + 1  # what a model keeps must not be an inference tensor
        assert not torch.is_grad_enabled()
        out = layer(state)
        return Step(out[:, 0], torch.ones(2), out, out[:, 1], state * 0.5)

    state = torch.randn(2, 3)
    out = layer(state)
    result = search(Root(out, out[:, 0], state), model, 5)
    assert not any(x.is_inference() or x.requires_grad for x in flatten(result))
    loss = -(action_probs(result.visit_counts, 1.0) * torch.log_softmax(layer(model.cache), -1)).sum()
    loss = loss + (result.root_value - layer(state)[:, 0]).square().sum()
    loss.backward()
    with torch.inference_mode():
        assert torch.equal(search(Root(out, out[:, 0], state), model, 5).visit_counts, result.visit_counts)


def test_the_shape_of_what_the_model_returns_is_enforced():
    model, states, _ = batch_problem()
    for field in ("reward", "discount", "value"):
        with pytest.raises(RuntimeError):
            search(model.root(states), lambda s, a: model(s, a)._replace(**{field: torch.zeros(7, 1)}), 3)
    with pytest.raises(RuntimeError):
        search(model.root(states), lambda s, a: model(s, a)._replace(prior_logits=torch.zeros(7, 4)), 3)
    with pytest.raises(ValueError, match=r"must be \[B, A\]"):
        search(model.root(states)._replace(value=torch.zeros(7, 1)), model, 3)


class CountCalls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.calls[str(function)] += 1
        return function(*arguments, **(options or {}))


def test_torch_calls_a_simulation_depend_on_nothing_and_the_host_never_waits_for_a_number():
    """About 90, whatever the batch, the actions and the depth.  `.item()`, `if tensor` are aten._local_scalar_dense."""
    per_simulation = []
    for num_batch, num_actions, reward in [(2, 3, 0.0), (40, 11, 0.0), (5, 3, 9.0)]:
        model = random_tabular(1, num_actions=num_actions, scale=reward or 1.0)
        counts = []
        for num_simulations in (10, 30):
            with CountCalls() as counter:
                search(model.root(torch.arange(num_batch) % 9), model, num_simulations)
            counts.append(counter.calls)
        per_simulation.append((counts[1].total() - counts[0].total()) / 20)
        assert counts[1]["aten._local_scalar_dense.default"] == counts[0]["aten._local_scalar_dense.default"]
    assert len(set(per_simulation)) == 1 and per_simulation[0] < 130, per_simulation


# -------------------------------------------------------------------------------------- bad numbers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["reward", "discount", "prior_logits", "value"])
@pytest.mark.parametrize("method", [search, gumbel_search])
def test_nan_and_infinity_from_the_model_raise_with_the_row(method, field, bad):
    model, states, _ = batch_problem()
    calls = []

    def sick(state, action):
        step, calls[:] = model(state, action), [*calls, 1]
        if len(calls) == 4:
            poisoned = getattr(step, field).clone()
            poisoned[5, ...] = torch.where(torch.arange(poisoned[5].numel()) == 0, bad, poisoned[5]).view_as(poisoned[5])
            step = step._replace(**{field: poisoned})
        return step

    with pytest.raises(ValueError, match=rf"{field}: NaN or infinity in rows \[5\]"):
        method(model.root(states), sick, 6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_in_the_root_raise_with_the_row(bad):
    model, states, _ = batch_problem()
    root = model.root(states)
    logits, value = root.prior_logits.clone(), root.value.clone()
    logits[2, 1], value[4] = bad, bad
    with pytest.raises(ValueError, match=r"prior_logits: NaN or infinity in rows \[2\]"):
        search(root._replace(prior_logits=logits), model, 3)
    with pytest.raises(ValueError, match=r"value: NaN or infinity in rows \[4\]"):
        search(root._replace(value=value), model, 3)
    mask = torch.ones(7, 5, dtype=torch.bool)
    mask[2, 1] = False
    if bad == -math.inf:  # says the same as the mask
        search(root._replace(prior_logits=logits), model, 3, valid_mask=mask)
    else:
        with pytest.raises(ValueError, match=r"rows \[2\]"):
            search(root._replace(prior_logits=logits), model, 3, valid_mask=mask)


def test_very_low_finite_logits_are_allowed():
    """Models mask with the lowest finite number; two of them must not add up to infinity in the check."""
    model, states, _ = batch_problem()
    lowest = torch.finfo(torch.float32).min

    def masked(state, action):
        step = model(state, action)
        return step._replace(prior_logits=step.prior_logits.masked_fill(torch.arange(5) > 1, lowest))

    tree = search(model.root(states), masked, 25).tree
    assert (tree.children_visits[:, 1:, 2:] == 0).all()


def test_no_valid_action_raises_with_the_rows():
    model, states, mask = batch_problem()
    mask[[1, 6]] = False
    for method in (search, gumbel_search):
        with pytest.raises(ValueError, match=r"no valid action in rows \[1, 6\]"):
            method(model.root(states), model, 5, valid_mask=mask)


@pytest.mark.parametrize("arguments", [{"num_simulations": 0}, {"num_simulations": 3, "max_depth": 0}])
def test_senseless_numbers_raise(arguments):
    model, states, _ = batch_problem()
    with pytest.raises(ValueError, match="at least 1"):
        search(model.root(states), model, **arguments)


# ------------------------------------------------------------------------------- noise, temperature


def test_root_noise_by_its_moments():
    """Dirichlet(alpha) over n actions: mean 1/n, variance (1/n)(1 - 1/n) / (n alpha + 1).  Here n = 3 valid of 5."""
    valid = torch.tensor([[1, 0, 1, 1, 0]]).bool().expand(20000, 5)
    prior = torch.tensor([[0.5, 0.0, 0.25, 0.25, 0.0]]).expand(20000, 5)
    noise = add_root_noise(prior, valid, 0.3, 1.0, torch.Generator().manual_seed(0))
    assert (noise[~valid] == 0).all() and torch.allclose(noise.sum(1), torch.ones(20000), atol=1e-5)
    noise = noise[:, [0, 2, 3]]
    assert torch.allclose(noise.mean(0), torch.full((3,), 1 / 3), atol=0.01)
    assert torch.allclose(noise.var(0), torch.full((3,), (1 / 3) * (2 / 3) / 1.9), atol=0.005)
    mixed = add_root_noise(prior, valid, 0.3, 0.25, torch.Generator().manual_seed(0))
    assert torch.allclose(mixed[:, [0, 2, 3]], 0.75 * prior[:, [0, 2, 3]] + 0.25 * noise, atol=1e-6)


def test_root_noise_with_a_tiny_alpha_stays_finite():
    noise = add_root_noise(torch.full((500, 4), 0.25), torch.ones(500, 4).bool(), 1e-3, 1.0, torch.Generator().manual_seed(0))
    assert noise.isfinite().all() and torch.allclose(noise.sum(1), torch.ones(500), atol=1e-5)


def test_action_probs():
    assert action_probs(torch.tensor([[3, 1, 0]]), 1.0).tolist() == [[0.75, 0.25, 0.0]]
    assert action_probs(torch.tensor([[2, 5, 5], [1, 0, 0]]), 0).tolist() == [[0, 1, 0], [1, 0, 0]]  # the first maximum
    assert action_probs(torch.tensor([[25, 26]]), 1e-6).tolist() == [[0.0, 1.0]]
    hot = action_probs(torch.tensor([[1, 49, 0]]), 1e6)
    assert hot.tolist()[0] == pytest.approx([0.5, 0.5, 0.0], abs=1e-5)
    for temperature in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature"):
            action_probs(torch.tensor([[1, 1]]), temperature)
    with pytest.raises(ValueError, match=r"no visit in rows \[1\]"):
        action_probs(torch.tensor([[1, 1], [0, 0]]), 1.0)


def test_visit_entropy():
    entropy = visit_entropy(torch.tensor([[5, 5, 5, 5], [0, 7, 0, 0], [1, 3, 0, 0]]))
    expected = [math.log(4), 0.0, -0.25 * math.log(0.25) - 0.75 * math.log(0.75)]
    assert entropy.tolist() == pytest.approx(expected, abs=1e-6)


def test_puct_by_hand():
    """N = 4, P = 0.5, n = 1: 0.3 + 0.5 sqrt(4) / 2 (1.25 + ln(19657 / 19652)) = 0.3 + 0.5 * 1.250254 = 0.925127."""
    rate = mcts.exploration_rate(torch.tensor([4.0]))
    score = mcts.puct_scores(torch.tensor([[0.3]]), torch.tensor([[0.5]]), torch.tensor([[1.0]]), rate)
    assert score.item() == pytest.approx(0.925127, abs=1e-6)
    other = mcts.exploration_rate(torch.tensor([9.0]), pb_c_init=2.0, pb_c_base=10.0)  # 3 (2 + ln(20 / 10)) = 8.079442
    assert other.item() == pytest.approx(8.079442, abs=1e-5)


# ------------------------------------------------------------------------- more simulations are better


def test_more_simulations_find_the_best_action_more_often():
    """Two-level trees with exact values: a root action's value is the best reward below it.

    128 random trees of 3 x 3 leaves in [0, 1] whose best root action is better than the others by 0.2.  From one number
    of simulations to the next the share of trees whose most visited action is the best may not fall by more than 0.02 (2
    trees), and the share of visits that the best action gets, meaned over the trees, must rise.  At 512 simulations it is
    above 0.9: the others still get visits in proportion to sqrt(N).
    """
    leaves = torch.rand(1000, 3, 3, generator=torch.Generator().manual_seed(0))
    best, second, _ = leaves.amax(-1).sort(-1, descending=True).values.unbind(1)
    leaves = leaves[best - second >= 0.2][:128]
    values, tree = leaves.amax(-1), torch.arange(128)

    def model(place, action):  # place [B, 2]: level 0 / 1 / 2 and the root action
        level, first = place[:, 0], torch.where(place[:, 0] == 0, action, place[:, 1])
        reward = torch.where(level == 1, leaves[tree, first, action], 0.0)
        value = torch.where(level == 0, values[tree, first], 0.0)
        place = torch.stack([(level + 1).clamp(max=2), first], 1)
        return Step(reward, (level == 0).float(), torch.zeros(128, 3), value, place)

    root = Root(torch.zeros(128, 3), values.amax(-1), torch.zeros(128, 2, dtype=torch.int64))
    found, shares = [], []
    for num_simulations in (4, 8, 16, 32, 64, 128, 512):
        visits = search(root, model, num_simulations).visit_counts
        found.append((visits.argmax(1) == values.argmax(1)).float().mean().item())
        shares.append((visits[tree, values.argmax(1)] / num_simulations).mean().item())
    assert all(after >= before - 0.02 for before, after in zip(found, found[1:])), found
    assert all(after > before for before, after in zip(shares, shares[1:])), shares
    assert found[0] < 0.8 and found[-1] > 0.95 and shares[-1] > 0.9, (found, shares)


# --------------------------------------------------------------- the whole path: attention over a tree


class ToyTransformer(torch.nn.Module):
    """Two causal attention layers over (latent, action) tokens, as a world model has; one step of a path is two tokens.

    The context of every batch row are C tokens before the root's.  Position ids count from the context's first token.
    """

    width, num_actions, context_len = 8, 3, 4

    def __init__(self):
        super().__init__()
        linear = lambda out: torch.nn.Linear(self.width, out)  # noqa: E731
        self.qkv = torch.nn.ModuleList(linear(3 * self.width) for _ in range(2))
        self.mlp = torch.nn.ModuleList(linear(self.width) for _ in range(2))
        self.action, self.position = torch.nn.Embedding(3, self.width), torch.nn.Embedding(64, self.width)
        self.next_latent, self.heads = linear(self.width), linear(3 + self.num_actions)

    def forward(self, x, positions, past, past_mask):
        """x [B, T, E] new tokens; past [B, P, 2 layers, 2, E]: keys and values; past_mask [B, P].  Also returns theirs."""
        x, own = x + self.position(positions), []
        for layer, (qkv, mlp) in enumerate(zip(self.qkv, self.mlp)):
            query, key, value = qkv(x).chunk(3, -1)
            own.append(torch.stack([key, value], 2))  # [B, T, 2, E]
            keys, values = torch.cat([past[:, :, layer], own[-1]], 1).unbind(2)
            causal = torch.ones(x.shape[1], x.shape[1]).tril().bool().expand(len(x), -1, -1)
            mask = torch.cat([past_mask[:, None].expand(-1, x.shape[1], -1), causal], 2)
            scores = (query @ keys.transpose(1, 2) / self.width**0.5).masked_fill(~mask, -math.inf)
            x = x + torch.softmax(scores, -1) @ values
            x = x + torch.tanh(mlp(x))
        return x, torch.stack(own, 2)  # [B, T, E], [B, T, 2, 2, E]

    def outputs(self, x):
        """The action token gives the reward and the next latent, the latent token logits and value."""
        heads = 3 * self.heads(x)
        return heads[..., 0], torch.tanh(3 * self.next_latent(x)), heads[..., 3:], heads[..., 1]

    def step(self, action, past, past_mask, length):
        """Append an action and then the latent that it leads to; length [B] = tokens before."""
        moved, own_action = self(self.action(action)[:, None], length[:, None], past, past_mask)
        reward, latent, _, _ = self.outputs(moved[:, 0])
        past = torch.cat([past, own_action], 1)
        past_mask = torch.cat([past_mask, past_mask.new_ones(len(past), 1)], 1)
        seen, own_latent = self(latent[:, None], length[:, None] + 1, past, past_mask)
        _, _, logits, value = self.outputs(seen[:, 0])
        return reward, logits, value, latent, torch.cat([own_action, own_latent], 1)  # the last: [B, 2, 2, 2, E]

    def empty(self, num_batch):
        return torch.zeros(num_batch, 0, 2, 2, self.width), torch.zeros(num_batch, 0, dtype=torch.bool)


def toy_problem(num_batch=5):
    torch.manual_seed(0)
    model = ToyTransformer()
    tokens = torch.randn(num_batch, model.context_len + 1, model.width)  # the context, and the root's latent
    seen, own = model(tokens, torch.arange(model.context_len + 1).expand(num_batch, -1), *model.empty(num_batch))
    _, _, logits, value = model.outputs(seen[:, -1])
    return model, tokens, own, logits, value


@pytest.mark.parametrize("method", [search, gumbel_search])
@pytest.mark.parametrize("max_depth", [None, 4])
@torch.no_grad()
def test_a_transformer_may_keep_only_its_own_tokens_in_a_node(method, max_depth):
    """Keys and values of the path's nodes, gathered by the search, against encoding the whole sequence anew."""
    model, tokens, context, logits, value = toy_problem()
    num_batch, discount = len(tokens), torch.full((len(tokens),), 0.9)
    first = model.context_len + 1
    seen_depths = []

    def cached(own, action, mask):  # own [B, D, 2, 2, 2, E]: two tokens of each ancestor; the root's are in the context
        assert own.shape[:2] == mask.shape and mask[:, 0].all() and (mask.int().diff(dim=1) <= 0).all()
        assert (own[~mask] == 0).all()
        depth = mask.sum(1)  # of the new node; its ancestors other than the root have 2 (depth - 1) tokens
        seen_depths.append(depth)
        below_root = mask & (torch.arange(mask.shape[1]) < (depth - 1)[:, None])
        past = torch.cat([context, own.flatten(1, 2)], 1)
        past_mask = torch.cat([torch.ones(num_batch, first).bool(), below_root.repeat_interleave(2, 1)], 1)
        reward, logits, value, _, new = model.step(action, past, past_mask, first + 2 * (depth - 1))
        return Step(reward, discount, logits, value, new)

    def anew(embedding, action):  # the sequence [B, 60, E] and its length: all is computed from the beginning
        sequence, length = embedding
        steps = []
        for row in range(num_batch):
            tokens = sequence[row : row + 1, : length[row]]
            _, past = model(tokens, torch.arange(length[row])[None], *model.empty(1))
            here = length[row : row + 1], action[row : row + 1]
            reward, logits, value, latent, _ = model.step(here[1], past, torch.ones(1, int(length[row])).bool(), here[0])
            new = sequence[row : row + 1].clone()
            new[0, length[row]], new[0, length[row] + 1] = model.action(action[row]), latent[0]
            steps.append((reward, logits, value, new))
        reward, logits, value, new = (torch.cat(parts) for parts in zip(*steps))
        return Step(reward, discount, logits, value, (new, length + 2))

    gumbel = {"gumbel": torch.randn(num_batch, 3)} if method is gumbel_search else {}
    root = Root(logits, value, torch.zeros(num_batch, 2, 2, 2, model.width))
    ours = method(root, cached, 24, whole_path=True, max_depth=max_depth, **gumbel)
    sequence = torch.cat([tokens, torch.zeros(num_batch, 50, model.width)], 1)
    full = method(root._replace(embedding=(sequence, torch.full((num_batch,), first))), anew, 24, max_depth=max_depth, **gumbel)
    assert_same(ours, full, exact=False)
    assert len(torch.stack(seen_depths).unique()) >= 4, "the paths should have different lengths"
    if max_depth is None:
        assert torch.equal(torch.stack(seen_depths, 1), depths(ours.tree)[:, 1:])


def test_whole_path_gives_the_embeddings_of_parent_grandparent_and_so_on():
    model, states, mask = batch_problem(seed=6)
    paths = []

    def record(embedding, action, path_mask):
        paths.append((embedding["name"], path_mask))
        step = model(embedding["state"][:, 0], action)
        name = torch.full((7,), len(paths))  # node i is made by call i
        return step._replace(embedding={"state": step.embedding, "name": name})

    root = model.root(states)._replace(embedding={"state": states, "name": torch.zeros(7, dtype=torch.int64)})
    result = search(root, record, 30, valid_mask=mask, whole_path=True)
    assert_same(result, search(model.root(states), model, 30, valid_mask=mask))
    for node, (names, path_mask) in enumerate(paths, start=1):
        assert path_mask.shape[1] == path_mask.sum(1).max()
        for row in range(7):
            line, at = [], node
            while (at := result.tree.parent[row, at].item()) >= 0:
                line.append(at)
            assert names[row, path_mask[row]].tolist() == line
            assert (names[row, ~path_mask[row]] == 0).all()


# ------------------------------------------------------------------------------------------- Gumbel


def test_gumbel_search_equals_mctx():
    """tests/make_gumbel_reference.py has run mctx's gumbel_muzero_policy on these problems, with this noise."""
    problems = json.loads(GUMBEL.read_text())["problems"]
    assert len(problems) >= 10
    for problem in problems:
        model, name = Tabular(problem), problem["name"]
        invalid = problem["invalid_actions"]
        result = gumbel_search(
            model.root(problem["root_states"]),
            model,
            problem["num_simulations"],
            valid_mask=None if invalid is None else 1 - torch.tensor(invalid),
            max_depth=problem["max_depth"],
            max_num_considered=problem["max_num_considered"],
            gumbel=torch.tensor(problem["gumbel"]),
        )
        expected = problem["mctx"]
        assert result.tree.parent.tolist() == expected["parent"], name
        assert result.tree.action_from_parent.tolist() == expected["action_from_parent"], name
        assert result.tree.visits.tolist() == expected["visits"], name
        assert result.visit_counts.tolist() == expected["visit_counts"], name
        assert result.action.tolist() == expected["action"], name
        assert torch.allclose(result.tree.values, torch.tensor(expected["values"]), rtol=1e-5, atol=1e-5), name
        policy = torch.tensor(expected["improved_policy"])
        assert torch.allclose(result.improved_policy, policy, rtol=1e-4, atol=1e-5), name


def test_gumbel_noise_is_drawn_with_the_generator_and_scaled():
    model, states, mask = batch_problem(seed=8)
    root = model.root(states)
    draws = [gumbel_search(root, model, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert_same(draws[0], draws[1])
    assert not torch.equal(draws[0].visit_counts, draws[2].visit_counts)
    quiet = [gumbel_search(root, model, 8, gumbel_scale=0.0, valid_mask=mask) for _ in range(2)]
    assert_same(quiet[0], quiet[1])
    assert_same(quiet[0], gumbel_search(root, model, 8, gumbel=torch.zeros(7, 5), valid_mask=mask))
    policy = quiet[0].improved_policy
    assert (policy[~mask] == 0).all() and torch.allclose(policy.sum(1), torch.ones(7), atol=1e-6)
    assert mask[torch.arange(7), quiet[0].action].all()


def test_gumbel_visits_at_most_the_considered_actions():
    """16 simulations over 4 of 6 actions: 4 x 2 visits, then the better two get 8 more, 4 each."""
    model = random_tabular(3, num_states=12, num_actions=6)
    result = gumbel_search(model.root(torch.arange(5)), model, 16, max_num_considered=4)
    for visits in result.visit_counts:
        assert sorted(visits.tolist()) == [0, 0, 2, 2, 6, 6]
    assert (result.visit_counts.gather(1, result.action[:, None]) == 6).all()


# ----------------------------------------------------------------------------------- numbered faults


def test_case32_normalisation_without_a_spread_is_zero_and_finite():
    nothing = torch.tensor([[0.0, 0.0, 0.0]])
    with torch.autograd.set_detect_anomaly(True):
        for q, visits, value in [
            ([[7.0, 7.0, 7.0]], nothing, [7.0]),  # no child visited
            ([[3.0, 0.0, 0.0]], torch.tensor([[1.0, 0.0, 0.0]]), [3.0]),  # one, with the node's own value
            ([[2.0, 2.0, 2.0]], torch.tensor([[4.0, 1.0, 9.0]]), [2.0]),  # all equal
        ]:
            q = torch.tensor(q, requires_grad=True)
            normalized = normalize_q(q, visits, torch.tensor(value))
            assert normalized.tolist() == [[0.0, 0.0, 0.0]]
            normalized.sum().backward()
            assert q.grad.isfinite().all()


def test_case32_bounds_are_the_node_value_and_its_visited_children():
    some = torch.tensor([[1, 1, 0]])
    assert normalize_q(torch.tensor([[2.0, 4.0, 99.0]]), some, torch.tensor([3.0])).tolist() == [[0.0, 1.0, 0.0]]
    assert normalize_q(torch.tensor([[3.0, 4.0, -9.0]]), some, torch.tensor([2.0])).tolist() == [[0.5, 1.0, 0.0]]
    both = torch.tensor([[1, 2]])  # with all children visited the node's value counts all the same
    assert normalize_q(torch.tensor([[3.0, 4.0]]), both, torch.tensor([2.0])).tolist() == [[0.5, 1.0]]
    assert normalize_q(torch.tensor([[3.0, 4.0]]), both, torch.tensor([5.0])).tolist() == [[0.0, 0.5]]
    large = normalize_q(torch.tensor([[1e6, 1e6 + 1]]), torch.tensor([[1, 1]]), torch.tensor([1e6]))
    assert large.tolist() == [[0.0, 1.0]]


def test_case32_bounds_use_the_reward_and_the_discounted_value():
    """Arm 0: r = 1, d = 0.5, v = 2: Q = 2.  Arm 1: r = 0, d = 0.5, v = 6: Q = 3."""

    def arms(state, action):
        return Step(1.0 - action, torch.tensor([0.5]), torch.zeros(1, 2), 2.0 + 4.0 * action, state)

    result = search(Root(torch.zeros(1, 2), torch.tensor([2.5]), torch.zeros(1)), arms, 2, max_depth=1)
    assert result.root_q.tolist() == [[2.0, 3.0]]


def test_case33_reward_and_discount_in_the_backup():
    """root -a-> n1 (r = 1) -b-> leaf (r = 2, v = 4), discount 0.9: G(n1) = 2 + 0.9 * 4 = 5.6, G(root) = 1 + 0.9 * 5.6."""
    rewards, values = torch.tensor([1.0, 2.0]), torch.tensor([5.6, 4.0])  # v(n1) = its return, so the mean is the return

    def chain(depth, action):
        return Step(rewards[depth], torch.tensor([0.9]), torch.zeros(1, 1), values[depth], depth + 1)

    root = Root(torch.zeros(1, 1), torch.tensor([6.04]), torch.zeros(1, dtype=torch.int64))
    result = search(root, chain, 2)
    assert result.tree.values[0].tolist() == pytest.approx([6.04, 5.6, 4.0])
    assert result.root_q.item() == pytest.approx(6.04)


def test_case33_the_reward_is_in_q_where_values_are_0_and_the_better_arm_gets_the_visits():
    def arms(state, action):
        return Step(action.float(), torch.ones(1), torch.zeros(1, 2), torch.zeros(1), state)

    root = Root(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1))
    assert search(root, arms, 2, max_depth=1).root_q.tolist() == [[0.0, 1.0]]
    visits = search(root, lambda s, a: arms(s, a)._replace(discount=torch.zeros(1)), 25).visit_counts[0]
    assert visits[1] > visits[0] and visits.sum() == 25


def test_case34_invalid_actions_get_no_prior_noise_or_visits():
    model, states, mask = batch_problem(seed=7)
    result = search(
        model.root(states), model, 25, valid_mask=mask, dirichlet_fraction=0.25, generator=torch.Generator().manual_seed(0)
    )
    prior = result.tree.children_prior[:, 0]
    assert (prior[~mask] == 0).all() and torch.allclose(prior.sum(1), torch.ones(7), atol=1e-5)
    assert (result.visit_counts[~mask] == 0).all() and (result.visit_counts.sum(1) == 25).all()
    # Noise over valid actions only: where one action is valid there is no noise at all.
    one = torch.zeros(7, 5)
    one[:, 3] = 1
    alone = search(model.root(states), model, 5, valid_mask=one, dirichlet_fraction=1.0)
    assert (alone.tree.children_prior[:, 0, 3] == 1).all()


def test_case34_the_mask_comes_before_the_mixture():
    """A = 3, valid (1, 1, 0): logits 0 give (.5, .5, 0), not (1/3, 1/3, 0), before anything is mixed in."""
    root = Root(torch.zeros(1, 3), torch.zeros(1), torch.zeros(1))

    def model(state, action):
        return Step(torch.zeros(1), torch.ones(1), torch.zeros(1, 3), torch.zeros(1), state)

    valid = torch.tensor([[1, 1, 0]])
    assert search(root, model, 1, valid_mask=valid).tree.children_prior[0, 0].tolist() == [0.5, 0.5, 0.0]
    noisy = add_root_noise(torch.tensor([[0.5, 0.5, 0.0]]), valid, 0.3, 0.25, torch.Generator().manual_seed(0))
    assert noisy.sum().item() == pytest.approx(1.0, abs=1e-6) and noisy[0, 2] == 0
    assert (noisy[0, :2] >= 0.75 * 0.5).all()


def test_case34_evaluation_has_no_noise_and_training_has_it_once():
    model, states, mask = batch_problem(seed=9)
    root = model.root(states)
    quiet = search(root, model, 10, valid_mask=mask)
    clean = torch.softmax(root.prior_logits.masked_fill(~mask, -math.inf), 1)
    assert torch.allclose(quiet.tree.children_prior[:, 0], clean, atol=1e-6)
    noisy = search(root, model, 10, valid_mask=mask, dirichlet_fraction=0.25, generator=torch.Generator().manual_seed(0))
    expected = add_root_noise(clean, mask, 0.3, 0.25, torch.Generator().manual_seed(0))
    assert torch.allclose(noisy.tree.children_prior[:, 0], expected, atol=1e-6)


def test_case36_the_policy_target_keeps_its_slots_and_temperatures_do_not_overflow():
    visits = torch.zeros(1, 6, dtype=torch.int64)
    visits[0, 2], visits[0, 5] = 3, 1
    assert action_probs(visits, 1.0).tolist() == [[0, 0, 0.75, 0, 0, 0.25]]
    assert action_probs(torch.tensor([[1, 3]]), 0.5)[0].tolist() == pytest.approx([0.1, 0.9])
    assert action_probs(visits, 0).tolist() == [[0, 0, 1, 0, 0, 0]]
    assert action_probs(torch.tensor([[25, 1]]), 0.01).tolist() == [[1.0, 0.0]]


def test_case56_noise_changes_the_root_only():
    model, states, mask = batch_problem(seed=10)
    root, generator = model.root(states), torch.Generator().manual_seed(0)
    noisy = search(root, model, 25, valid_mask=mask, dirichlet_fraction=0.5, generator=generator)
    tree, state = noisy.tree, torch.zeros(7, 26, dtype=torch.int64)
    state[:, 0] = states
    clean = torch.softmax(root.prior_logits.masked_fill(~mask, -math.inf), 1)
    assert not torch.allclose(tree.children_prior[:, 0], clean, atol=1e-3)
    for node in range(1, 26):
        parent = state.gather(1, tree.parent[:, node : node + 1])[:, 0]
        state[:, node] = model.next_state[parent, tree.action_from_parent[:, node]]
    assert torch.allclose(tree.children_prior[:, 1:], torch.softmax(model.prior_logits[state], -1)[:, 1:], atol=1e-6)


def test_case56_without_noise_two_searches_are_identical():
    model, states, mask = batch_problem(seed=11)
    searches = [search(model.root(states), model, 25, valid_mask=mask) for _ in range(2)]
    assert_same(*searches)
    noisy = [
        search(model.root(states), model, 25, dirichlet_fraction=0.25, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert_same(noisy[0], noisy[1])
    assert not torch.equal(noisy[0].tree.children_prior, noisy[2].tree.children_prior)


# ---------------------------------------------------------------------------------- the GPU's branch


def test_the_branch_for_other_devices_gives_the_same(monkeypatch):
    """On a GPU the padded paths are not compacted.  That branch is run here on the CPU, by hiding the device's name."""
    model, states, mask = batch_problem(seed=12)
    expected = [f(model.root(states), model, 30, valid_mask=mask, **options) for f, options in BRANCH_CASES]
    source = Path(mcts.__file__).read_text()
    assert source.count('rows.device.type == "cpu"') == 1
    namespace = {"__name__": "mcts_other"}
    exec(compile(source.replace('rows.device.type == "cpu"', "False"), "mcts_other", "exec"), namespace)
    for (f, options), result in zip(BRANCH_CASES, expected):
        assert_same(result, namespace[f.__name__](model.root(states), model, 30, valid_mask=mask, **options))


BRANCH_CASES = [
    (search, {}),
    (search, {"max_depth": 3}),
    (gumbel_search, {"gumbel_scale": 0.0}),
    (gumbel_search, {"gumbel_scale": 0.0, "max_depth": 2}),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_gives_the_same_as_cpu():
    model, states, mask = batch_problem(seed=13)
    expected = search(model.root(states), model, 30, valid_mask=mask)
    for name in ("next_state", "reward", "discount", "prior_logits", "value"):
        setattr(model, name, getattr(model, name).cuda())
    result = search(model.root(states.cuda()), model, 30, valid_mask=mask.cuda())
    assert_same(expected, [x.cpu() for x in flatten(result)], exact=False)


# ------------------------------------------------------------------------------------ documentation


def test_doctests():
    assert doctest.testmod(mcts).failed == 0


def readme_section():
    return re.search(r"^## Search alone.*?(?=^## )", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]


def test_the_readme_example_runs_and_prints_what_the_readme_says():
    section = readme_section()
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    printed = re.search(r"prints\s+```\n(.*?)```", section, re.DOTALL)[1]
    assert len(code.strip().splitlines()) <= 24
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == printed


def test_the_readme_table_is_the_benchmark_s():
    lines = (ROOT / "benchmarks" / "results" / "mcts.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) > 4 and set(table) <= set((ROOT / "README.md").read_text().splitlines())


# ---- Found by a reader who tried to break it ------------------------------------------------------------------------------

@pytest.mark.parametrize("field", ["reward", "discount", "value", "prior_logits"])
@pytest.mark.parametrize("call", [1, 3, 6])
def test_every_answer_is_looked_at_also_where_a_node_is_evaluated_again(field, call):
    calls = []

    def model(embedding, action):
        calls.append(action)
        step = Step(torch.zeros(2), torch.ones(2), torch.tensor([[5.0, -5]] * 2), torch.zeros(2), embedding)
        if len(calls) == call:
            getattr(step, field)[1] = math.nan
        return step

    with pytest.raises(ValueError, match=rf"{field}: NaN or infinity in rows \[1\]"):
        search(Root(torch.tensor([[5.0, -5]] * 2), torch.zeros(2), torch.zeros(2)), model, 6, max_depth=1)


def test_returns_that_overflow_raise():
    root = Root(torch.zeros(1, 3), torch.full((1,), 1e30), torch.zeros(1))
    with pytest.raises(ValueError, match="overflow"):
        search(root, lambda e, a: Step(e * 0, e + 1e5, torch.zeros(1, 3), e + 1e30, e), 20, valid_mask=torch.tensor([[0, 1, 1]]))


def test_a_named_tuple_stays_one():
    State = collections.namedtuple("State", "x y")
    model = lambda e, a: Step(e.x, torch.ones(2), torch.zeros(2, 3), e.y["z"], State(e.x + 1, {"z": e.y["z"]}))
    result = search(Root(torch.zeros(2, 3), torch.zeros(2), State(torch.zeros(2), {"z": torch.zeros(2)})), model, 8)
    assert (result.visit_counts.sum(1) == 8).all()


@pytest.mark.parametrize("changed", [{"dirichlet_fraction": 2.0}, {"dirichlet_fraction": math.nan}, {"dirichlet_fraction": .25, "dirichlet_alpha": 0.0}])
def test_senseless_noise_is_refused(changed):
    with pytest.raises(ValueError, match="dirichlet"):
        search(Root(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1)), lambda e, a: 1 / 0, 4, **changed)


def test_action_probs_at_the_least_temperature_and_of_no_counts():
    assert action_probs(torch.tensor([[3, 3, 1]]), 1e-320).tolist() == [[.5, .5, 0]]
    for bad in ([[5.0, -1]], [[5, math.nan]]):
        with pytest.raises(ValueError, match="visit_counts"):
            action_probs(torch.tensor(bad), 1.0)


def test_exploration_constants_reach_the_search():
    # Equal priors, action 0 is worth 1 and action 1 nothing: a large constant shares the visits, a small one does not.
    model = lambda e, a: Step(1.0 - a.float(), torch.zeros(1), torch.zeros(1, 2), torch.zeros(1), e)
    counts = [search(Root(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1)), model, 40, **c).visit_counts[0, 0].item()
              for c in ({"pb_c_init": .1}, {"pb_c_init": 20.0}, {"pb_c_init": .1, "pb_c_base": 1.0})]
    assert counts[0] > 35 and counts[1] < 25 and counts[2] < counts[0]
