"""Monte-Carlo tree search with a learned model for a batch of roots, in plain PyTorch: MuZero and Gumbel MuZero.

    result = search(Root(prior_logits, value, state), recurrent_fn, num_simulations=25)
    action = torch.multinomial(action_probs(result.visit_counts, temperature=1.0), 1)

Every batch row grows its own tree by one node a simulation: `_ask` the model, `_add` the node, `_backup` its value,
`_choose` where to go next, by mctx's rule.  No loop over rows, actions, nodes or levels; no wait for a GPU in a search:
  1. An edge leads to one node, so what belongs to the edge (reward, discount, Q, visits) is stored once.
  2. A node stores its line (itself, its parent, ..., the root) and what a value v at the node is worth at each of them:
     offset + scale * v, known once the node is made.  So the backup of a whole line is one expression.
  3. Scores change only on the line that was backed up, so only its nodes choose again; the others keep their choice.
  4. An edge stores its exit: the unvisited edge at which a walk along the choices that starts with it ends.  So there is
     no walk: the next simulation expands the exit of the edge into the root.
MuZero: arXiv 1911.08265, appendix B.  Gumbel MuZero: Danihelka et al., ICLR 2022.  Masks: 1 = valid.  Letters: B batch,
A actions, K simulations, D levels, R rows of the tables, X any number of nodes.
"""
import math
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

class Root(NamedTuple):
    """What the model says of the states to search from."""
    prior_logits: Tensor  # [B, A]
    value: Tensor  # [B]
    embedding: Any  # the model's state: a tensor or nested tuples / dicts of tensors, [B, ...]

class Step(NamedTuple):
    """The model's answer to (embedding, action): an edge and the node behind it."""
    reward: Tensor  # [B]
    discount: Tensor  # [B]; 0 = the episode ends here, negative = the other player moves next
    prior_logits: Tensor  # [B, A]
    value: Tensor  # [B]
    embedding: Any  # as in Root

class Tree(NamedTuple):
    """Node 0 is the root, node i was added by simulation i; int64, with -1 = none, where not said."""
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
    """What a search found about its roots, and the whole tree."""
    visit_counts: Tensor  # [B, A] int64, sums to K
    root_value: Tensor  # [B]
    root_q: Tensor  # [B, A], 0 where unvisited
    tree: Tree
    action: Tensor | None = None  # [B] int64, the action to play; gumbel_search only, as the next
    improved_policy: Tensor | None = None  # [B, A], the target to learn

# Formulas: q, prior (probabilities) and visits n(a) of the children are [X, A], what belongs to the node itself is [X].
def normalize_q(q: Tensor, visits: Tensor, node_value: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Q scaled to [0, 1] by the least and the greatest of the node's value and its visited children's Q (mctx: "by parent
    and siblings"); 0 if unvisited, where q is finite but unused; epsilon is the least range.  Source: MuZero appendix B."""
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
    """q(a) + P(a) exploration / (1 + n(a)), with exploration = `exploration_rate(N)`, [X].  Source: MuZero appendix B."""
    return torch.addcdiv(q_normalized, prior * exploration.unsqueeze(-1), visits + 1)

def add_root_noise(prior: Tensor, valid_mask: Tensor, alpha: float, fraction: float, generator=None) -> Tensor:
    """(1 - fraction) prior + fraction Dirichlet(alpha), drawn over the valid actions only (mctx: over all, so that the mask
    makes it weaker).  prior and valid_mask [B, A].  Source: AlphaZero."""
    alphas = torch.full(prior.shape, alpha, dtype=torch.float64, device=prior.device)  # float32 underflows
    gamma = torch._standard_gamma(alphas, generator) * valid_mask
    return torch.lerp(prior, (gamma / gamma.sum(-1, keepdim=True)).to(prior.dtype), fraction)

def complete_q(q, prior, visits, node_visits, raw_value, value_scale=0.1, maxvisit_init=50.0) -> Tensor:
    """sigma(Q): unvisited children get the mixed value; scaled to [0, 1], then by visits.  Source: Gumbel MuZero, eq. 8."""
    seen, tiny = visits.sign(), torch.finfo(q.dtype).tiny
    weight = prior.clamp(min=tiny) * seen  # a visited child counts even where its prior has underflowed to 0
    mean_q = (weight * q).sum(-1) / weight.sum(-1).clamp(min=tiny)
    mixed_value = (raw_value + (node_visits - 1) * mean_q) / node_visits
    completed = torch.lerp(mixed_value.unsqueeze(-1), q, seen)
    scale = value_scale * (maxvisit_init + visits.amax(-1, keepdim=True))
    return scale * normalize_q(completed, torch.ones_like(q), completed[..., 0])

def halving_schedule(num_considered: int, num_simulations: int) -> list[int]:
    """Sequential halving: simulation i goes to the best of the root's actions that have schedule[i] visits so far.

    >>> halving_schedule(4, 8)
    [0, 0, 0, 0, 1, 1, 2, 2]
    """
    num_rounds, num_left, visits, schedule = max(1, math.ceil(math.log2(num_considered))), num_considered, 0, []
    while len(schedule) < num_simulations:
        more = max(1, num_simulations // (num_rounds * num_left))
        schedule += [v for v in range(visits, visits + more) for _ in range(num_left)]
        visits, num_left = visits + more, max(2, num_left // 2)
    return schedule[:num_simulations]

def action_probs(visit_counts: Tensor, temperature: float) -> Tensor:
    """N^(1 / temperature) / its sum, [B, A]: [[1, 3]] at 0.5 gives [[0.1, 0.9]]; 0 = one-hot on the first maximum."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: must be finite and >= 0")
    _raise_rows(~((visit_counts >= 0).all(-1) & (visit_counts.sum(-1) > 0)), "visit_counts: negative, NaN or no visit")
    if temperature == 0:
        return torch.nn.functional.one_hot(visit_counts.argmax(-1), visit_counts.shape[-1]).float()
    share = visit_counts.double() / visit_counts.amax(-1, keepdim=True)
    return torch.softmax(share.log() / temperature, -1).float()  # 25^100 overflows, 100 ln 25 does not

def visit_entropy(visit_counts: Tensor) -> Tensor:
    """Entropy of N / sum N in nats, [B, A] -> [B]: 0 = one action only, ln A = all alike."""
    return torch.special.entr(action_probs(visit_counts, 1.0)).sum(-1)

@torch.no_grad()
def search(root: Root, recurrent_fn: Callable[..., Step], num_simulations: int, *, valid_mask: Tensor | None = None,
           max_depth: int | None = None, pb_c_init: float = 1.25, pb_c_base: float = 19652.0, dirichlet_alpha: float = 0.3,
           dirichlet_fraction: float = 0.0, generator: torch.Generator | None = None, whole_path=False) -> SearchResult:
    """MuZero's search: for every batch row a tree of K = `num_simulations` nodes and the root.
    recurrent_fn: `(embedding, action [B] int64) -> Step`, called once a simulation, without gradients.
    valid_mask, dirichlet_fraction (0 in evaluation): for the root; inner nodes take the prior that `recurrent_fn` gives.
    max_depth: no node lies deeper; a simulation that gets there evaluates the node again.
    whole_path: call `recurrent_fn(embedding, action, mask)`, where the tensors of `embedding` are [B, D, ...]: what the
        parent, its parent, ..., the root have stored, 0 where `mask` [B, D] is 0.  So a transformer need store in a node
        only the keys and values of its own tokens; `mask.sum(1)` is the new node's depth.  (A GPU waits once a simulation.)
    Raises ValueError with the rows: no valid action; NaN or infinity in logits (-inf only at the root, if invalid), values,
        rewards, discounts or returns.  The model's answers are looked at once, after the last simulation."""
    root, valid = _checked(root, valid_mask, num_simulations, max_depth)
    if not (0 <= dirichlet_fraction <= 1 and dirichlet_alpha > 0):
        raise ValueError(f"dirichlet_fraction = {dirichlet_fraction}, dirichlet_alpha = {dirichlet_alpha}: 0 to 1, above 0")
    if dirichlet_fraction:
        prior = add_root_noise(root.prior_logits.softmax(-1), valid, dirichlet_alpha, dirichlet_fraction, generator)
        root = root._replace(prior_logits=prior.log())
    rates = exploration_rate(torch.arange(num_simulations + 2.0, device=valid.device), pb_c_init, pb_c_base)
    def choice(t, rows, total, values):
        q, visits, prior = _children(t, rows)
        return puct_scores(normalize_q(q, visits, values), prior, visits, rates.index_select(0, total.long())).argmax(-1)
    return SearchResult(*_result(_grow(root, recurrent_fn, num_simulations, max_depth, whole_path, choice)))

@torch.no_grad()
def gumbel_search(root: Root, recurrent_fn: Callable[..., Step], num_simulations: int, *, valid_mask: Tensor | None = None,
                  max_depth: int | None = None, max_num_considered: int = 16, gumbel_scale: float = 1.0,
                  gumbel: Tensor | None = None, generator: torch.Generator | None = None, whole_path=False) -> SearchResult:
    """Gumbel MuZero's search: sequential halving at the root, a deterministic choice below.  For few simulations.
    As `search`; max_num_considered: the root actions that get a visit at all; gumbel_scale: 0 in evaluation; gumbel:
    [B, A], the noise, where it is not to be drawn.  In the result `action` maximises gumbel + logits + sigma(Q) among the
    most visited actions, and `improved_policy` is softmax(logits + sigma(Q)).  Source: sections 3 to 5, algorithm 2."""
    root, valid = _checked(root, valid_mask, num_simulations, max_depth)
    logits = root.prior_logits.log_softmax(-1)
    noise = -torch.empty_like(logits).exponential_(generator=generator).log() * gumbel_scale if gumbel is None else gumbel
    schedules = [halving_schedule(m, num_simulations) for m in range(1, max_num_considered + 1)]
    schedule = torch.tensor(schedules, device=valid.device)[valid.sum(-1).clamp(max=max_num_considered) - 1].t()  # [K, B]
    def root_choice(t, considered):  # considered [B]: the visits of the actions that are still in
        q, visits, prior = _children(t, t.roots)
        sigma = complete_q(q, prior, visits, t.visits.take(t.root_edges), root.value)
        scores = (noise + logits + sigma).clamp(min=-1e9)  # finite: the last action left is taken, however bad
        return scores.masked_fill((visits != considered.unsqueeze(-1)) | ~valid, -math.inf).argmax(-1), sigma
    def choice(t, rows, node_visits, values):
        q, visits, prior = _children(t, rows)
        sigma = complete_q(q, prior, visits, node_visits, t.raw_values.index_select(0, rows))
        return (torch.softmax(prior.log() + sigma, -1) - visits / node_visits.unsqueeze(-1)).argmax(-1)
    t = _grow(root, recurrent_fn, num_simulations, max_depth, whole_path, choice, (root_choice, schedule))
    action, sigma = root_choice(t, t.visits.index_select(0, t.roots).amax(-1))
    return SearchResult(*_result(t), action, torch.softmax(logits + sigma, -1))

def _checked(root: Root, valid_mask, num_simulations: int, max_depth) -> tuple[Root, Tensor]:
    """Check the arguments; returns the root in float32, its logits -inf where invalid, and the valid mask, bool [B, A]."""
    if num_simulations < 1 or (max_depth is not None and max_depth < 1):
        raise ValueError(f"num_simulations = {num_simulations}, max_depth = {max_depth}: must be at least 1")
    logits, value = root.prior_logits.float(), root.value.float()
    valid = torch.ones_like(logits, dtype=torch.bool) if valid_mask is None else valid_mask.bool()
    if logits.ndim != 2 or value.shape != logits.shape[:1] or valid.shape != logits.shape:
        raise ValueError(f"logits, value, mask: {logits.shape}, {value.shape}, {valid.shape}, must be [B, A], [B], [B, A]")
    _raise_rows(~valid.any(1), "valid_mask: no valid action")
    _raise_rows(~(logits.isfinite() | (~valid & (logits == -math.inf))).all(1), "root.prior_logits: NaN or infinity")
    _raise_rows(~value.isfinite(), "root.value: NaN or infinity")
    return Root(logits.masked_fill(~valid, -math.inf), value, root.embedding), valid

def _grow(root: Root, recurrent_fn, num_simulations: int, max_depth, whole_path: bool, choice, at_root=None):
    """Search with `choice(t, rows [X], N [X], V [X]) -> action [X]`, and where the roots choose differently with at_root =
    (function, schedule): `function(t, schedule[simulation]) -> (action [B], ...)`.  Returns the tables t."""
    t = _tables(root, num_simulations, max_depth or num_simulations)
    edge, parent = t.root_edges, t.root_edges // t.num_actions
    step = Step(torch.zeros_like(root.value), torch.zeros_like(root.value), *root)
    for k in range(num_simulations + 1):
        if k > 0:  # the model is called in the mode of the caller
            step = _ask(t, recurrent_fn, whole_path, parent, edge)
        with torch.inference_mode():  # a quarter faster on a CPU
            rows, returns = _add(t, k, parent, edge, step)
            if rows.device.type == "cpu":  # leave nobody out; on a GPU it costs less than the wait for the shape
                real = rows.nonzero().view(-1)
                rows, returns = rows.index_select(0, real), returns.index_select(0, real)
            edges = t.edge.index_select(0, rows)
            node_visits, values = _backup(t, rows, edges, returns)
            if k < num_simulations:
                _choose(t, rows, edges, choice(t, rows, node_visits, values))
                if at_root is not None:
                    _choose(t, t.roots, t.root_edges, at_root[0](t, at_root[1][k])[0])
                edge = t.exit.index_select(0, t.root_edges)
                parent = edge // t.num_actions
    for name, answers in zip(("reward", "discount", "value", "prior_logits"), torch.stack(t.seen[1:], 1)):  # [K, B]
        _raise_rows(~answers.isfinite().all(0), f"recurrent_fn's {name}: NaN or infinity")
    _raise_rows(~_nodes(t, t.values).isfinite().all(1), "the returns: overflow")
    return t

@torch.inference_mode()
def _tables(root: Root, num_simulations: int, max_depth: int):
    """The trees before their roots, as flat tables of R rows: row 0 is nobody, 1 + b the place above root b, then come the
    K + 1 nodes of each tree.  The edge of action a from row i has the number i A + a; the roots hang at edge 0 of the places
    above them, so that every node has an edge.  Lines are filled up with nobody; what is written there is never read."""
    (num_batch, num_actions), num_levels = root.prior_logits.shape, min(max_depth, num_simulations) + 1
    num_rows, above = 1 + num_batch * (num_simulations + 2), torch.arange(1, num_batch + 1, device=root.value.device)
    floats, ints = root.value.new_zeros, above.new_zeros
    shape, answers, maps = (num_rows, num_actions), floats(4, num_rows), floats(num_rows, 2, num_levels)
    maps[:, 1, 0] = 1.0  # a value is worth itself at its own node
    return SimpleNamespace(
        roots=above * (num_simulations + 1) + num_batch - num_simulations, root_edges=above * num_actions,  # [B]
        edge=ints(num_rows), values=floats(num_rows),  # [R] the edge into the node, and V(s)
        seen=[],  # the model's answers of every simulation, each [4, B]
        answers=answers,  # [4, R] the last ones: reward and discount of the edge into the node, value, greatest |logit|
        rewards=answers[0], discounts=answers[1], raw_values=answers[2],  # [R]
        line=ints(num_rows, num_levels),  # [R, D] rows: the node, its parent, ..., the root, nobody, ...
        maps=maps,  # [R, 2, D] offset and scale from the node to the nodes of its line
        q=floats(shape), visits=floats(shape), prior=floats(shape),  # [R, A] of the edges: Q, n(a) = N of the node behind, P
        exit=torch.arange(num_rows * num_actions, device=above.device),  # [R A] an unvisited edge's exit is itself
        embedding=_map(lambda x: x.new_zeros(num_rows, *x.shape[1:]), root.embedding),
        num_actions=num_actions, depth_limit=max_depth < num_simulations, one=floats(()) + 1)

def _children(t, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # Q(a), n(a), P(a) of the nodes' edges, each [X, A]
    return t.q.index_select(0, rows), t.visits.index_select(0, rows), t.prior.index_select(0, rows)

def _ask(t, recurrent_fn, whole_path: bool, parent: Tensor, edge: Tensor) -> Step:  # the model's answer for these edges, [B]
    action = torch.sub(edge, parent, alpha=t.num_actions)
    if not whole_path:
        return recurrent_fn(_map(lambda table: table.index_select(0, parent), t.embedding), action)
    line = t.line.index_select(0, parent)
    line = line[:, : int((line > 0).sum(1).max())]  # [B, D]
    embedding = _map(lambda table: table.index_select(0, line.flatten()).unflatten(0, line.shape), t.embedding)
    return recurrent_fn(embedding, action, line > 0)

def _add(t, index: int, parent: Tensor, edge: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Make the answer node `index` of every tree.  Returns the rows and the returns of the new nodes' lines, [X]."""
    new = t.roots + index
    if t.depth_limit:  # at the limit the node may be there already; then its edge's exit is an edge from it
        exits = t.exit.take(edge)
        new = torch.where(exits == edge, new, exits // t.num_actions)
    _map(lambda table, x: table.index_copy_(0, new, x), t.embedding, step.embedding)
    logits = step.prior_logits.float()
    answers = torch.stack([step.reward, step.discount, step.value, logits.abs().amax(1)]).float()  # [4, B]
    t.answers.index_copy_(1, new, answers)
    t.seen.append(answers)
    reward, discount, value, _ = answers.unsqueeze(2).unbind()  # [B, 1]
    t.prior.index_copy_(0, new, torch.softmax(logits, -1))
    t.edge.scatter_(0, new, edge)
    levels = min(index, t.line.shape[1] - 1)  # the parents' lines are no longer
    line = torch.cat([new.unsqueeze(1), t.line[:, :levels].index_select(0, parent)], 1)
    t.line[:, : levels + 1].index_copy_(0, new, line)
    maps = t.maps[:, :, :levels].index_select(0, parent)
    offset, scale = maps.unbind(1)
    offset.addcmul_(scale, reward)
    scale.mul_(discount)
    t.maps[:, :, 1 : levels + 1].index_copy_(0, new, maps)
    return line.view(-1), torch.cat([value, torch.addcmul(offset, scale, value)], 1).view(-1)

def _backup(t, rows: Tensor, edge: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """V = (V N + G) / (N + 1), N = N + 1 for these nodes, Q = r + d V for the edges into them.  Returns N, V, [X]."""
    visits = t.visits.view(-1).index_select(0, edge)
    returns = torch.addcmul(returns, t.values.index_select(0, rows), visits)
    visits = visits + t.one  # a tensor: to add a Python number takes three times as long
    values = returns / visits
    q = torch.addcmul(t.rewards.index_select(0, rows), t.discounts.index_select(0, rows), values)
    for table, at, new in ((t.values, rows, values), (t.visits.view(-1), edge, visits), (t.q.view(-1), edge, q)):
        table.scatter_(0, at, new)
    return visits, values

def _choose(t, rows: Tensor, edge: Tensor, action: Tensor):
    """Give these nodes a new choice, action [X], and the edges into them a new exit.  Lines start with the leaf."""
    choice = torch.add(action, rows, alpha=t.num_actions)
    t.exit.scatter_(0, edge, 0)
    exits = t.exit.index_select(0, choice)
    if t.depth_limit:  # at the limit every edge is an exit
        exits = torch.where(t.line[:, -2].index_select(0, rows) > 0, choice, exits)
    # 0: the choice is the node before it on the line, so its exit is that one's, which may come from further below.
    source = (torch.arange(len(rows), device=rows.device) * exits.sign()).cummax(0).values
    t.exit.scatter_(0, edge, exits.index_select(0, source))

def _nodes(t, table: Tensor) -> Tensor:  # [R, ...] -> [B, K+1, ...]
    return table[len(t.roots) + 1 :].unflatten(0, (len(t.roots), -1))

def _result(t) -> tuple[Tensor, Tensor, Tensor, Tree]:
    """Visit counts, value and Q of the roots, and the tree as a caller wants it."""
    def behind(table):  # [R] of the nodes -> [B, K+1, A] of the edges into them
        return _nodes(t, table.new_zeros(t.q.numel()).scatter_(0, t.edge, table).view_as(t.q))
    roots, edge, child = t.roots.unsqueeze(1), _nodes(t, t.edge), behind(torch.arange(len(t.edge), device=t.edge.device))
    parent = edge // t.num_actions - roots  # negative: the place above the root, or nobody
    values, raw_values, q, prior = (_nodes(t, x).clone() for x in (t.values, t.raw_values, t.q, t.prior))
    tree = Tree(parent.clamp(min=-1), (edge % t.num_actions).masked_fill(parent < 0, -1),
                t.visits.take(edge).masked_fill(edge == 0, 0).long(), values, raw_values,
                (child - roots.unsqueeze(2)).clamp(min=-1), _nodes(t, t.visits).long(),
                behind(t.rewards), behind(t.discounts), prior)
    return tree.children_visits[:, 0], values[:, 0], q[:, 0], tree

def _raise_rows(bad: Tensor, what: str):
    if bad.any():
        raise ValueError(f"{what} in rows {bad.nonzero().flatten().tolist()}")

def _map(function, tree, *more):  # apply `function` to the tensors of nested tuples / lists / dicts
    if isinstance(tree, Tensor):
        return function(tree, *more)
    if isinstance(tree, dict):
        return {key: _map(function, tree[key], *(other[key] for other in more)) for key in tree}
    leaves = [_map(function, *x) for x in zip(tree, *more, strict=True)]
    return type(tree)(*leaves) if hasattr(tree, "_fields") else tuple(leaves)  # a named tuple stays one
