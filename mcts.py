"""Monte-Carlo tree search with a learned model for a batch of roots, in plain PyTorch (MuZero and Gumbel MuZero).

    result = search(Root(prior_logits, value, state), recurrent_fn, num_simulations=25)
    action = torch.multinomial(action_probs(result.visit_counts, temperature=1.0), 1)

Every batch row grows its own tree by one node a simulation: `_expand` asks the model, `_backup` carries the value up,
`_choose` decides where to go next.  No loop over rows, actions, nodes or levels, and no wait for a GPU before the end:
  1. An edge leads to one node, so what belongs to the edge (reward, discount, Q, visits) is stored once.
  2. A node stores its line (itself, its parent, ..., the root) and what a value v at the node is worth at each of them:
     offset + scale * v, known once the node is made.  So the backup of a whole line is one expression.
  3. Scores change only on the line that was backed up, so only its nodes choose again; the others keep their choice.
  4. An edge stores its exit: the unvisited edge at which a walk along the choices ends that starts with this edge.  So
     there is no walk: the next simulation expands the exit of the edge into the root.

The rule is mctx's, node by node: normalisation over parent and siblings, ties go to the lowest action.
MuZero: arXiv 1911.08265, appendix B.  Gumbel MuZero: Danihelka et al., "Policy improvement by planning with Gumbel",
ICLR 2022.  Letters: B batch, A actions, K simulations, D levels, X any number of nodes.  Masks: 1 = valid.
"""

import math
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor


class Root(NamedTuple):
    prior_logits: Tensor  # [B, A]
    value: Tensor  # [B]
    embedding: Any  # the model's state: a tensor or nested tuples / dicts of tensors, [B, ...]


class Step(NamedTuple):  # the model's answer to (embedding, action): an edge and the node behind it
    reward: Tensor  # [B]
    discount: Tensor  # [B]; 0 = the episode ends here, negative = the other player moves next
    prior_logits: Tensor  # [B, A]
    value: Tensor  # [B]
    embedding: Any  # as in Root


class Tree(NamedTuple):  # node 0 is the root, node i was added by simulation i; int64, with -1 = none, where not said
    parent: Tensor  # [B, K+1]
    action_from_parent: Tensor  # [B, K+1]
    visits: Tensor  # [B, K+1] N(s), which counts the node's own evaluation
    values: Tensor  # [B, K+1] float, V(s): the mean of the model's value and of all returns backed up
    raw_values: Tensor  # [B, K+1] float, the model's value
    children_index: Tensor  # [B, K+1, A]
    children_visits: Tensor  # [B, K+1, A] n(a)
    children_rewards: Tensor  # [B, K+1, A] float, 0 where unvisited
    children_discounts: Tensor  # [B, K+1, A] float, 0 where unvisited
    children_prior: Tensor  # [B, K+1, A] float, probabilities; the root's with mask and noise


class SearchResult(NamedTuple):
    visit_counts: Tensor  # [B, A] int64, sums to K
    root_value: Tensor  # [B]
    root_q: Tensor  # [B, A], 0 where unvisited
    tree: Tree
    action: Tensor | None = None  # [B] int64, the action to play; gumbel_search only, as the next
    improved_policy: Tensor | None = None  # [B, A], the target to learn


def normalize_q(q: Tensor, visits: Tensor, node_value: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Scale Q to [0, 1] between the least and the greatest among the node's value and its visited children's Q.

    Args: q [X, A], finite, ignored where unvisited; visits [X, A]; node_value [X]; epsilon: the smallest range.
    Returns: [X, A]; 0 for unvisited children, and 0 everywhere if all are equal.
    Source: MuZero appendix B with bounds local to the node (mctx: "by parent and siblings").
    """
    value = node_value.unsqueeze(-1)
    seen = visits.sign().to(q.dtype)  # 1.0 or 0.0: on a CPU arithmetic with it is several times faster than `where`
    known = torch.lerp(value, q, seen)
    low, high = torch.aminmax(known, dim=-1, keepdim=True)
    low, high = torch.minimum(low, value), torch.maximum(high, value)
    return (known - low).div_((high - low).clamp_(min=epsilon)).mul_(seen)


def exploration_rate(node_visits: Tensor, pb_c_init: float = 1.25, pb_c_base: float = 19652.0) -> Tensor:
    """sqrt(N) (c_init + ln((N + c_base + 1) / c_base)), elementwise.  Source: MuZero appendix B."""
    return node_visits.sqrt() * (pb_c_init + torch.log((node_visits + pb_c_base + 1) / pb_c_base))


def puct_scores(q_normalized: Tensor, prior: Tensor, visits: Tensor, exploration: Tensor) -> Tensor:
    """q(a) + P(a) exploration / (1 + n(a)), [X, A]: the search goes to the child with the highest.

    Args: q_normalized, prior (probabilities) and visits n(a), all [X, A]; exploration [X] = `exploration_rate(N)` of
        the node's visits N = 1 + sum of n(a).  Source: MuZero appendix B.
    """
    return torch.addcdiv(q_normalized, prior * exploration.unsqueeze(-1), visits + 1)


def add_root_noise(prior: Tensor, valid_mask: Tensor, alpha: float, fraction: float, generator=None) -> Tensor:
    """(1 - fraction) prior + fraction Dirichlet(alpha), with the noise drawn over the valid actions only.

    Args: prior [B, A], probabilities, 0 where invalid; valid_mask [B, A].  Returns: [B, A], the same kind.
    Source: AlphaZero; ours: mctx draws over all actions and masks afterwards, which makes the noise weaker.
    """
    alphas = torch.full(prior.shape, alpha, dtype=torch.float64, device=prior.device)  # float32 underflows
    gamma = torch._standard_gamma(alphas, generator) * valid_mask
    return torch.lerp(prior, (gamma / gamma.sum(-1, keepdim=True)).to(prior.dtype), fraction)


def complete_q(q, prior, visits, node_visits, raw_value, value_scale=0.1, maxvisit_init=50.0) -> Tensor:
    """sigma(completed Q): unvisited children get the mixed value; scaled to [0, 1], then by value_scale and visits.

    Args: q, prior (probabilities), visits, all [X, A]; node_visits N and raw_value (the model's), [X].
    Returns: [X, A].  Source: Gumbel MuZero, eq. 8 and appendix D.
    """
    seen, tiny = visits.sign(), torch.finfo(q.dtype).tiny
    weight = prior.clamp(min=tiny) * seen  # a visited child counts even where its prior has underflowed to 0
    mean_q = (weight * q).sum(-1) / weight.sum(-1).clamp(min=tiny)
    mixed_value = (raw_value + (node_visits - 1) * mean_q) / node_visits
    completed = torch.lerp(mixed_value.unsqueeze(-1), q, seen)
    low, high = torch.aminmax(completed, dim=-1, keepdim=True)
    scale = (maxvisit_init + visits.amax(-1, keepdim=True)) * value_scale
    return scale * (completed - low) / (high - low).clamp(min=1e-8)


def halving_schedule(num_considered: int, num_simulations: int) -> list[int]:
    """Sequential halving: simulation i goes to the best of the root's actions that have schedule[i] visits so far.

    >>> halving_schedule(4, 8)
    [0, 0, 0, 0, 1, 1, 2, 2]
    """
    if num_considered <= 1:
        return list(range(num_simulations))
    num_rounds, num_left, visits, schedule = math.ceil(math.log2(num_considered)), num_considered, 0, []
    while len(schedule) < num_simulations:
        for _ in range(max(1, num_simulations // (num_rounds * num_left))):
            schedule += [visits] * num_left
            visits += 1
        num_left = max(2, num_left // 2)
    return schedule[:num_simulations]


def action_probs(visit_counts: Tensor, temperature: float) -> Tensor:
    """N^(1 / temperature) / its sum, [B, A]; temperature 0 = one-hot on the first maximum.

    >>> action_probs(torch.tensor([[1, 3]]), temperature=0.5)
    tensor([[0.1000, 0.9000]])
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: must be finite and >= 0")
    _raise_rows(visit_counts.sum(-1) <= 0, "visit_counts: no visit")
    if temperature == 0:
        return torch.nn.functional.one_hot(visit_counts.argmax(-1), visit_counts.shape[-1]).float()
    return torch.softmax(visit_counts.double().log() / temperature, -1).float()  # 25^100 overflows, 100 ln 25 does not


def visit_entropy(visit_counts: Tensor) -> Tensor:
    """Entropy of N / sum N in nats, [B, A] -> [B]: 0 = one action only, ln A = all alike."""
    return torch.special.entr(action_probs(visit_counts, 1.0)).sum(-1)


@torch.no_grad()
def search(
    root: Root, recurrent_fn: Callable[..., Step], num_simulations: int, *,
    valid_mask: Tensor | None = None, max_depth: int | None = None, pb_c_init: float = 1.25, pb_c_base: float = 19652.0,
    dirichlet_alpha: float = 0.3, dirichlet_fraction: float = 0.0, generator: torch.Generator | None = None,
    whole_path: bool = False,
) -> SearchResult:
    """MuZero's search: for every batch row a tree of K = `num_simulations` nodes and the root.

    Args:
        recurrent_fn: `(embedding, action [B] int64) -> Step`, called once a simulation, without gradients.
        valid_mask: [B, A], 1 = valid.  For the root; other nodes take the prior that `recurrent_fn` gives them.
        max_depth: no node lies deeper; a simulation that gets there evaluates the node again.  Default: no limit.
        dirichlet_alpha, dirichlet_fraction: of the noise in the root's prior; fraction 0 = none, as in evaluation.
        whole_path: call `recurrent_fn(embedding, action, mask)`, where the tensors of `embedding` are [B, D, ...]: what
            the parent, its parent, ..., the root have stored, then 0 where `mask` [B, D] is 0.  So a transformer need
            store in a node only the keys and values of the node's own tokens; `mask.sum(1)` is the new node's depth.
            D is the longest path of the batch (finding it makes a GPU wait once a simulation).
    Raises: ValueError, with the rows: no valid action; NaN or infinity in logits (-inf is allowed where invalid),
        values, rewards or discounts.  The model's answers are looked at once, after the last simulation.
    """
    valid, prior = _root_prior(root, valid_mask, num_simulations, max_depth)
    if dirichlet_fraction:
        prior = add_root_noise(prior, valid, dirichlet_alpha, dirichlet_fraction, generator)
    prior = prior.masked_fill(~valid, -math.inf)  # so that not even a tie can choose it; `_result` makes it 0 again
    rates = exploration_rate(torch.arange(num_simulations + 2, device=prior.device).float(), pb_c_init, pb_c_base)

    def choice(t, rows, node_visits, values):
        q, visits, prior = _children(t, rows)
        return puct_scores(normalize_q(q, visits, values), prior, visits, rates.take(node_visits.long())).argmax(-1)

    return SearchResult(*_result(_grow(root, prior, recurrent_fn, num_simulations, max_depth, whole_path, choice)))


@torch.no_grad()
def gumbel_search(
    root: Root, recurrent_fn: Callable[..., Step], num_simulations: int, *,
    valid_mask: Tensor | None = None, max_depth: int | None = None, max_num_considered: int = 16,
    gumbel_scale: float = 1.0, gumbel: Tensor | None = None, generator: torch.Generator | None = None,
    whole_path: bool = False,
) -> SearchResult:
    """Gumbel MuZero's search: sequential halving at the root, a deterministic choice below.  For few simulations.

    Args: as in `search`; max_num_considered: the root actions that get a visit at all; gumbel_scale: 0 in evaluation;
        gumbel: [B, A], the noise, where it is not to be drawn.  Raises: as `search`.
    Returns: `action` maximises gumbel + logits + sigma(q) among the most visited actions, `improved_policy` is
        softmax(logits + sigma(completed q)).  Source: Gumbel MuZero, sections 3 to 5, algorithm 2.
    """
    valid, prior = _root_prior(root, valid_mask, num_simulations, max_depth)
    if gumbel is None:
        gumbel = -torch.empty_like(prior).exponential_(generator=generator).log() * gumbel_scale
    most = min(max_num_considered, prior.shape[1])
    schedules = torch.tensor([halving_schedule(m, num_simulations) for m in range(most + 1)], device=prior.device)
    schedule = schedules[valid.sum(-1).clamp(max=most)].t()  # [K, B]
    logits = prior.log() - prior.log().amax(-1, keepdim=True)

    def root_choice(t, considered):  # considered [B]: the visits of the actions that are still in
        q, visits, _ = _children(t, t.roots)
        sigma = complete_q(q, prior, visits, t.visits.take(t.root_edges), root.value.float())
        scores = (gumbel + logits + sigma).clamp(min=-1e9)  # finite: the last action left is taken, however bad
        return scores.masked_fill((visits != considered.unsqueeze(-1)) | ~valid, -math.inf).argmax(-1), sigma

    def choice(t, rows, node_visits, values):
        q, visits, prior = _children(t, rows)
        sigma = complete_q(q, prior, visits, node_visits, t.raw_values.take(rows))
        return (torch.softmax(prior.log() + sigma, -1) - visits / node_visits.unsqueeze(-1)).argmax(-1)

    at_root = lambda t, k: root_choice(t, schedule[k])[0]
    t = _grow(root, prior, recurrent_fn, num_simulations, max_depth, whole_path, choice, at_root)
    action, sigma = root_choice(t, t.visits.index_select(0, t.roots).amax(-1))
    return SearchResult(*_result(t), action, torch.softmax(prior.log() + sigma, -1))


def _root_prior(root: Root, valid_mask, num_simulations: int, max_depth) -> tuple[Tensor, Tensor]:
    """Check the arguments; returns the valid mask (bool) and the root's prior, 0 where invalid, both [B, A]."""
    if num_simulations < 1 or (max_depth is not None and max_depth < 1):
        raise ValueError(f"num_simulations = {num_simulations}, max_depth = {max_depth}: must be at least 1")
    logits = root.prior_logits.float()
    valid = torch.ones_like(logits, dtype=torch.bool) if valid_mask is None else valid_mask.bool()
    if logits.ndim != 2 or root.value.shape != logits.shape[:1] or valid.shape != logits.shape:
        shapes = tuple(logits.shape), tuple(root.value.shape), tuple(valid.shape)
        raise ValueError(f"root.prior_logits, root.value, valid_mask are {shapes}: must be [B, A], [B], [B, A]")
    _raise_rows(~valid.any(1), "valid_mask: no valid action")
    _raise_rows(~(logits.isfinite() | (~valid & (logits == -math.inf))).all(1), "root.prior_logits: NaN or infinity")
    _raise_rows(~root.value.isfinite(), "root.value: NaN or infinity")
    return valid, torch.softmax(logits.masked_fill(~valid, -math.inf), -1)


def _grow(root, prior, recurrent_fn, num_simulations, max_depth, whole_path, choice, root_choice=None):
    """The search with `choice(tables, rows [X], N [X], V [X]) -> action [X]`, and `root_choice(tables, k)` at the roots if
    that is another one.  Returns the tables of `_plant`, filled."""
    for k in range(num_simulations + 1):
        with torch.inference_mode():  # a quarter faster on a CPU; the model is called in the mode of the caller
            if k == 0:
                t = _plant(root, prior, num_simulations, max_depth or num_simulations)
                rows, returns = t.roots, root.value.float()
            else:
                rows, returns = _add(t, k, parent, edge, step)
            if rows.device.type == "cpu":  # leave nobody out; on a GPU it costs less than the wait for the shape
                real = rows.nonzero().view(-1)
                rows, returns = rows.take(real), returns.take(real)
            edges = t.edge.take(rows)
            node_visits, values = _backup(t, rows, edges, returns)
            if k == num_simulations:
                break
            _choose(t, rows, edges, choice(t, rows, node_visits, values))
            if root_choice is not None:
                _choose(t, t.roots, t.root_edges, root_choice(t, k))
            edge = t.exit.take(t.root_edges)
            parent = edge // t.num_actions
        step = _ask(t, recurrent_fn, whole_path, parent, edge)
    answers = {"reward": t.rewards, "discount": t.discounts, "prior_logits": t.greatest_logits, "value": t.raw_values}
    for name, table in answers.items():
        bad = ~table[len(t.roots) + 1 :].isfinite().view(len(t.roots), -1)  # [B, K+1]
        _raise_rows(bad.any(1), f"recurrent_fn's {name}: NaN or infinity")
    return t


def _plant(root: Root, prior: Tensor, num_simulations: int, max_depth: int):
    """The trees with nothing but their roots, as flat tables.

    Rows: 0 is nobody, 1 + b is the place above root b, then come the K + 1 nodes of each tree.  The edge of action a
    from row i has the number i A + a; the roots hang at edge 0 of the places above them, so that every node has an
    edge.  Lines are filled up with nobody; what is written there is never read.
    """
    (num_batch, num_actions), num_levels = prior.shape, min(max_depth, num_simulations) + 1
    num_rows = 1 + num_batch + num_batch * (num_simulations + 1)
    above = torch.arange(1, num_batch + 1, device=prior.device)
    roots = above * (num_simulations + 1) + num_batch - num_simulations
    floats, ints, depth_limit = prior.new_zeros, roots.new_zeros, max_depth < num_simulations
    t = SimpleNamespace(
        roots=roots, root_edges=above * num_actions,  # [B] rows and edges
        edge=ints(num_rows),  # [R] the edge into the node
        rewards=floats(num_rows), discounts=floats(num_rows),  # [R] of the edge into the node
        values=floats(num_rows), raw_values=floats(num_rows),  # [R] V(s) and the model's value
        greatest_logits=floats(num_rows),  # [R] the greatest |logit|, to find NaN and infinity
        line=ints(num_rows, num_levels),  # [R, D] rows: the node, its parent, ..., the root, nobody, ...
        maps=floats(num_rows, 2, num_levels),  # [R, 2, D] offset and scale from the node to the nodes of its line
        q=floats(num_rows, num_actions), prior=floats(num_rows, num_actions),  # [R, A] of the edges, Q = 0: unvisited
        visits=floats(num_rows, num_actions),  # [R, A] n(a) of the edges, which is N of the node behind
        child=ints(num_rows * num_actions if depth_limit else 0),  # [R A] the row behind the edge, 0 = unvisited
        exit=torch.arange(num_rows * num_actions, device=prior.device),  # [R A] an unvisited edge's exit is itself
        embedding=_map(lambda x: x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, roots, x), root.embedding),
        num_actions=num_actions, depth_limit=depth_limit, one=prior.new_ones(()),
    )
    t.edge[roots], t.line[roots, 0], t.maps[:, 1, 0] = t.root_edges, roots, 1.0
    t.raw_values[roots], t.prior[roots] = root.value.float(), prior
    return t


def _children(t, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q(a), n(a), P(a) of the nodes' edges, each [X, A]."""
    return t.q.index_select(0, rows), t.visits.index_select(0, rows), t.prior.index_select(0, rows)


def _backup(t, rows: Tensor, edge: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """V = (V N + G) / (N + 1), N = N + 1 for these nodes, Q = r + d V for the edges into them.  Returns N, V, [X]."""
    visits = t.visits.take(edge)
    returns = torch.addcmul(returns, t.values.take(rows), visits)
    visits = visits + t.one  # a tensor: to add a Python number takes three times as long
    values = returns / visits
    t.values.scatter_(0, rows, values)
    t.visits.view(-1).scatter_(0, edge, visits)
    t.q.view(-1).scatter_(0, edge, torch.addcmul(t.rewards.take(rows), t.discounts.take(rows), values))
    return visits, values


def _choose(t, rows: Tensor, edge: Tensor, action: Tensor):
    """Give these nodes a new choice, action [X], and the edges into them a new exit.  Lines start with the leaf."""
    choice = torch.add(action, rows, alpha=t.num_actions)
    t.exit.scatter_(0, edge, 0)
    exits = t.exit.take(choice)
    if t.depth_limit:  # at the limit every edge is an exit
        exits = torch.where(t.line[:, -2].index_select(0, rows) > 0, choice, exits)
    # 0: the choice is the node before it on the line, so its exit is that one's, which may come from further below.
    source = (torch.arange(len(rows), device=rows.device) * exits.sign()).cummax(0).values
    t.exit.scatter_(0, edge, exits.take(source))


def _ask(t, recurrent_fn, whole_path: bool, parent: Tensor, edge: Tensor) -> Step:
    """Have the model evaluate these edges, [B]."""
    action = torch.sub(edge, parent, alpha=t.num_actions)
    if not whole_path:
        return recurrent_fn(_map(lambda table: table.index_select(0, parent), t.embedding), action)
    line = t.line.index_select(0, parent)
    line = line[:, : int((line > 0).sum(1).max())]  # [B, D]
    gather = lambda table: table.index_select(0, line.flatten()).unflatten(0, line.shape)
    return recurrent_fn(_map(gather, t.embedding), action, line > 0)


def _add(t, index: int, parent: Tensor, edge: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Put what the model has answered at node `index` of every tree.  Returns the rows and returns of their lines, [X]."""
    new = t.roots + index
    if t.depth_limit:  # at the limit the node may be there already
        child = t.child.take(edge)
        new = torch.where(child > 0, child, new)
        t.child.scatter_(0, edge, new)
    _map(lambda table, x: table.index_copy_(0, new, x), t.embedding, step.embedding)
    reward, discount, logits, value = (x.float() for x in step[:4])
    t.rewards.scatter_(0, new, reward)
    t.discounts.scatter_(0, new, discount)
    t.raw_values.scatter_(0, new, value)
    t.greatest_logits.scatter_(0, new, logits.abs().amax(1))
    t.prior.index_copy_(0, new, torch.softmax(logits, -1))
    t.edge.scatter_(0, new, edge)
    levels = min(index, t.line.shape[1] - 1)  # the parents' lines are no longer
    line = torch.cat([new.unsqueeze(1), t.line[:, :levels].index_select(0, parent)], 1)
    t.line[:, : levels + 1].index_copy_(0, new, line)
    maps = t.maps[:, :, :levels].index_select(0, parent)
    offset, scale = maps.unbind(1)
    offset.addcmul_(scale, reward.unsqueeze(1))
    scale.mul_(discount.unsqueeze(1))
    t.maps[:, :, 1 : levels + 1].index_copy_(0, new, maps)
    value = value.unsqueeze(1)
    return line.view(-1), torch.cat([value, torch.addcmul(offset, scale, value)], 1).view(-1)


def _result(t) -> tuple[Tensor, Tensor, Tensor, Tree]:
    """Visit counts, value and Q of the roots, and the tree as a caller wants it, [B, K+1, ...]."""

    def nodes(table):
        return table[len(t.roots) + 1 :].view(len(t.roots), -1, *table.shape[1:])

    def edges(table):
        return nodes(table.new_zeros(t.q.numel()).scatter_(0, t.edge, table).view_as(t.q))

    roots, edge, child = t.roots.unsqueeze(1), nodes(t.edge), edges(torch.arange(len(t.edge), device=t.edge.device))
    parent = edge // t.num_actions - roots  # negative: the place above the root, or nobody
    tree = Tree(
        parent.clamp(min=-1), (edge % t.num_actions).masked_fill(parent < 0, -1),
        t.visits.take(edge).masked_fill(edge == 0, 0).long(), nodes(t.values).clone(), nodes(t.raw_values).clone(),
        (child - roots.unsqueeze(2)).clamp(min=-1), nodes(t.visits).long(), edges(t.rewards), edges(t.discounts),
        nodes(t.prior).clamp(min=0),
    )
    return tree.children_visits[:, 0], tree.values[:, 0], nodes(t.q)[:, 0].clone(), tree


def _raise_rows(bad: Tensor, what: str):
    """Raise ValueError if a row of `bad` [B] is true."""
    if bad.any():
        raise ValueError(f"{what} in rows {bad.nonzero().flatten().tolist()}")


def _map(function, tree, *more):
    """Apply `function` to the tensors of nested tuples / lists / dicts."""
    if isinstance(tree, Tensor):
        return function(tree, *more)
    if isinstance(tree, dict):
        return {key: _map(function, tree[key], *(other[key] for other in more)) for key in tree}
    return tuple(_map(function, *leaves) for leaves in zip(tree, *more, strict=True))
