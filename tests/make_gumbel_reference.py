"""Write tests/gumbel_reference.json: what mctx's gumbel_muzero_policy answers on small random tables.

    python -m venv .venv-mctx && .venv-mctx/bin/pip install mctx==0.0.71 && .venv-mctx/bin/python tests/make_gumbel_reference.py

Takes a minute on one core.  The noise that mctx drew is stored with each problem, so that another library can use it.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import mctx
import numpy as np

# name: number of simulations, actions, considered actions, scale of the noise, share of discounts 0, masks?, depth limit
CASES = {
    "plain 8": (8, 4, 16, 1.0, 0.0, False, None),
    "plain 25": (25, 4, 16, 1.0, 0.0, False, None),
    "no noise": (25, 5, 16, 0.0, 0.0, False, None),
    "two simulations": (2, 6, 16, 1.0, 0.0, False, None),
    "one considered": (9, 4, 1, 1.0, 0.0, False, None),
    "three considered": (20, 6, 3, 1.0, 0.0, False, None),
    "more considered than simulations": (5, 9, 16, 1.0, 0.0, False, None),
    "masks": (16, 6, 16, 1.0, 0.0, True, None),
    "masks, four considered": (25, 6, 4, 1.0, 0.0, True, None),
    "discount 0": (25, 4, 16, 1.0, 0.4, False, None),
    "50": (50, 5, 16, 1.0, 0.1, True, None),
    "depth 2": (16, 3, 16, 1.0, 0.0, False, 2),
}
NUM_STATES, NUM_BATCH = 7, 2


def make_problem(seed, num_actions, zeros, masked):
    rng = np.random.default_rng(seed)
    shape = NUM_STATES, num_actions
    draw = lambda *size: np.round(rng.normal(size=size), 3).astype(np.float32)  # noqa: E731
    mask = rng.random((NUM_BATCH, num_actions)) < 0.4
    mask[:, seed % num_actions] = False
    return {
        "next_state": rng.integers(NUM_STATES, size=shape),
        "reward": draw(*shape),
        "discount": np.where(rng.random(shape) < zeros, 0.0, 0.97).astype(np.float32),
        "prior_logits": draw(*shape),
        "value": draw(NUM_STATES),
        "root_states": rng.integers(NUM_STATES, size=NUM_BATCH),
        "invalid_actions": mask.astype(int) if masked else None,
    }


def answer(problem, seed, num_simulations, num_considered, scale, max_depth):
    """Returns the noise and mctx's answer."""
    tables = {name: jnp.array(problem[name]) for name in ("next_state", "reward", "discount", "prior_logits", "value")}
    states = jnp.array(problem["root_states"])

    def recurrent_fn(params, key, action, state):
        new = tables["next_state"][state, action]
        output = mctx.RecurrentFnOutput(
            reward=tables["reward"][state, action],
            discount=tables["discount"][state, action],
            prior_logits=tables["prior_logits"][new],
            value=tables["value"][new],
        )
        return output, new

    invalid = problem["invalid_actions"]
    output = mctx.gumbel_muzero_policy(
        params=None,
        rng_key=jax.random.PRNGKey(seed),
        root=mctx.RootFnOutput(prior_logits=tables["prior_logits"][states], value=tables["value"][states], embedding=states),
        recurrent_fn=recurrent_fn,
        num_simulations=num_simulations,
        invalid_actions=None if invalid is None else jnp.array(invalid),
        max_depth=max_depth,
        max_num_considered_actions=num_considered,
        gumbel_scale=scale,
    )
    tree = output.search_tree
    return tree.extra_data.root_gumbel, {
        "parent": tree.parents,
        "action_from_parent": tree.action_from_parent,
        "visits": tree.node_visits,
        "values": tree.node_values,
        "visit_counts": tree.summary().visit_counts,
        "action": output.action,
        "improved_policy": output.action_weights,
    }


def main():
    problems = []
    for seed, (name, (num_simulations, num_actions, considered, scale, zeros, masked, depth)) in enumerate(CASES.items()):
        problem = make_problem(seed, num_actions, zeros, masked)
        noise, expected = answer(problem, seed, num_simulations, considered, scale, depth)
        problem |= {"name": name, "num_simulations": num_simulations, "max_num_considered": considered, "max_depth": depth}
        problems.append(problem | {"gumbel": noise, "mctx": expected})
    plain = lambda x: np.asarray(x).tolist()  # noqa: E731
    path = Path(__file__).with_name("gumbel_reference.json")
    lines = ",\n".join(json.dumps(problem, default=plain) for problem in problems)
    path.write_text('{"mctx": "0.0.71", "problems": [\n' + lines + "\n]}\n")
    print(f"{path.name}: {len(problems)} problems, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
