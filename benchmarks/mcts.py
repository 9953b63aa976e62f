"""Time of a whole search: mcts.py, mctx (jitted) and LightZero's class with its C++ tree, side by side, on one core.

    python benchmarks/mcts.py --install   # once: benchmarks/.venv/mctx and benchmarks/.venv/lightzero from PyPI (6 GB)
    python benchmarks/mcts.py             # measure (10 minutes), write benchmarks/results/mcts.json and .md
    python benchmarks/mcts.py --profile   # where mcts.py's time goes, and how many operations a simulation takes

Without their environments the others are left out, with a message.  Each library runs in its own process, pinned to one
core with one thread; the processes take turns, case by case, and every turn is several searches after a warm-up.  The
figure is CPU time (`time.process_time`), which a busy machine disturbs less than wall time: the minimum is the one to
compare, the median shows how quiet it was.  Compilation is not counted.

The model is the same everywhere: embedding 128, two layers of 128 and heads for reward, value, logits and the next
embedding, random weights.  Cases: "values" has no rewards and grows trees of moderate depth, "rewards" grows paths of up to
50 levels, as trained models do that have found something; "tree only" has next to no model.  mctx and mcts.py search by the
same rule, so their visits can be compared; LightZero's rule is another one (min-max over the whole tree, ties at random).
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VENVS = Path(__file__).resolve().parent / ".venv"
PACKAGES = {"mctx": ["mctx==0.0.71"], "lightzero": ["lightzero==0.2.0"]}
WIDTH, SIMULATIONS, DISCOUNT = 128, 50, 0.997
CASES = {
    "values, B = 8": ("values", 8, 20),
    "values, B = 32": ("values", 32, 20),
    "values, B = 128": ("values", 128, 20),
    "rewards, B = 8": ("rewards", 8, 20),
    "rewards, B = 32": ("rewards", 32, 20),
    "rewards, B = 128": ("rewards", 128, 20),
    "tree only, B = 128, A = 55": ("tree only", 128, 55),
}


# -------------------------------------------------------------------------- the model, in numpy, torch and jax


def weights(kind, num_actions):
    """Arrays of the model; the rows of `out` give the next embedding, the reward, the value and the logits."""
    import numpy as np

    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))  # noqa: E731
    w = {"state": draw(WIDTH, WIDTH), "action": draw(num_actions, WIDTH), "hidden": draw(WIDTH, WIDTH)}
    w["out"] = draw(WIDTH, WIDTH + 2 + num_actions)
    if kind == "values":
        w["out"][:, WIDTH] = 0.0
        w["out"][:, :WIDTH] *= 3.0
    return w


def roots(num_batch):
    import numpy as np

    return np.random.default_rng(1).normal(size=(num_batch, WIDTH)).astype(np.float32)


def torch_model(kind, num_batch, num_actions):
    """Returns the roots' embedding and `(embedding, action) -> (reward, value, logits, embedding)`."""
    import torch

    embedding = torch.from_numpy(roots(num_batch))
    if kind == "tree only":
        zero, logits = torch.zeros(num_batch), embedding[:, :num_actions].contiguous()

        def model(state, action):
            state = torch.sin(state * 9.1 + action)
            return zero, state, logits, state

        return embedding[:, 0].contiguous(), model
    w = {name: torch.from_numpy(array) for name, array in weights(kind, num_actions).items()}

    def model(state, action):
        hidden = torch.relu_(torch.addmm(w["action"].index_select(0, action), state, w["state"]))
        out = torch.relu_(hidden @ w["hidden"]) @ w["out"]
        return out[:, WIDTH], out[:, WIDTH + 1], out[:, WIDTH + 2 :], torch.tanh(out[:, :WIDTH])

    return embedding, model


def jax_model(kind, num_batch, num_actions):
    import jax
    import jax.numpy as jnp

    embedding = jnp.array(roots(num_batch))
    if kind == "tree only":
        zero, logits = jnp.zeros(num_batch), embedding[:, :num_actions]

        def model(state, action):
            state = jnp.sin(state * 9.1 + action)
            return zero, state, logits, state

        return embedding[:, 0], model
    w = {name: jnp.array(array) for name, array in weights(kind, num_actions).items()}

    def model(state, action):
        out = jax.nn.relu(jax.nn.relu(w["action"][action] + state @ w["state"]) @ w["hidden"]) @ w["out"]
        return out[:, WIDTH], out[:, WIDTH + 1], out[:, WIDTH + 2 :], jnp.tanh(out[:, :WIDTH])

    return embedding, model


# ------------------------------------------------------------------------------------------- the three searches


def ours(kind, num_batch, num_actions):
    """Returns a function that searches, and how to get visit counts and the depth of the trees from its result."""
    import torch

    sys.path.insert(0, str(REPOSITORY))
    from mcts import Root, Step, search

    torch.set_num_threads(1)
    embedding, model = torch_model(kind, num_batch, num_actions)
    logits = torch.from_numpy(roots(num_batch)[:, :num_actions].copy())
    discount = torch.full((num_batch,), DISCOUNT)

    def recurrent_fn(state, action):
        reward, value, logits, state = model(state, action)
        return Step(reward, discount, logits, value, state)

    def facts(result):
        depth = torch.zeros_like(result.tree.parent)
        for node in range(1, SIMULATIONS + 1):
            depth[:, node] = depth.gather(1, result.tree.parent[:, node : node + 1])[:, 0] + 1
        return {"visits": result.visit_counts.tolist(), "mean_depth": depth[:, 1:].float().mean().item()}

    root = Root(logits, torch.zeros(num_batch), embedding)
    return lambda: search(root, recurrent_fn, SIMULATIONS), facts


def theirs_mctx(kind, num_batch, num_actions):
    import jax
    import jax.numpy as jnp
    import mctx

    embedding, model = jax_model(kind, num_batch, num_actions)

    def recurrent_fn(params, key, action, state):
        reward, value, logits, state = model(state, action)
        discount = jnp.full(num_batch, DISCOUNT)
        return mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value), state

    @jax.jit
    def search(embedding, logits):
        root = mctx.RootFnOutput(prior_logits=logits, value=jnp.zeros(num_batch), embedding=embedding)
        key = jax.random.PRNGKey(0)
        output = mctx.muzero_policy(None, key, root, recurrent_fn, SIMULATIONS, dirichlet_fraction=0.0)
        return output.search_tree.summary().visit_counts

    logits = jnp.array(roots(num_batch)[:, :num_actions])
    return lambda: search(embedding, logits).block_until_ready(), lambda visits: {"visits": visits.tolist()}


def theirs_lightzero(kind, num_batch, num_actions):
    import torch
    from easydict import EasyDict
    from lzero.mcts import MuZeroMCTSCtree

    torch.set_num_threads(1)
    embedding, model = torch_model(kind, num_batch, num_actions)

    class Model(torch.nn.Module):
        def recurrent_inference(self, state, action):
            reward, value, logits, state = model(state, action)
            return EasyDict(reward=reward, value=value, policy_logits=logits, latent_state=state)

    support = {"support_scale": 300, "categorical_distribution": False}  # scalars, as in the other two
    config = {"num_simulations": SIMULATIONS, "discount_factor": DISCOUNT, "device": "cpu", "model": support}
    tree, net, state = MuZeroMCTSCtree(EasyDict(config)), Model(), embedding.numpy()
    logits = roots(num_batch)[:, :num_actions].tolist()
    actions, nobody = [list(range(num_actions)) for _ in range(num_batch)], [-1] * num_batch

    def search():
        root = tree.roots(num_batch, actions)
        root.prepare_no_noise([0.0] * num_batch, logits, nobody)
        tree.search(root, net, state, nobody)
        return root.get_distributions()

    return search, lambda visits: {"visits": visits}


SEARCHES = {"mcts.py": ours, "mctx": theirs_mctx, "lightzero": theirs_lightzero}


def worker(name):
    """Serve the parent: for each line (case, number of searches) on stdin write one line of CPU and wall milliseconds."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is not an answer
    searches, facts = {}, {}
    for line in sys.stdin:
        case, num_searches = json.loads(line)
        if case not in searches:
            searches[case], describe = SEARCHES[name](*CASES[case])
            facts[case] = describe(searches[case]())
            searches[case]()
        times = []
        for _ in range(num_searches):
            wall, cpu = time.perf_counter(), time.process_time()
            searches[case]()
            times.append([(time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3])
        replies.write(json.dumps([times, facts[case]]) + "\n")
        replies.flush()


# -------------------------------------------------------------------------------------------------- the parent


def install():
    for name, packages in PACKAGES.items():
        subprocess.run([sys.executable, "-m", "venv", str(VENVS / name)], check=True)
        subprocess.run([str(VENVS / name / "bin" / "python"), "-m", "pip", "install", "-q", *packages], check=True)


def start(name):
    """Start the worker of a library on the last core, or return None with a message."""
    python = Path(sys.executable) if name == "mcts.py" else VENVS / name / "bin" / "python"
    if not python.exists():
        print(f"{name} is left out: run `python benchmarks/mcts.py --install` once")
        return None
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    pin = (lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})) if hasattr(os, "sched_setaffinity") else None
    command = [str(python), str(Path(__file__).resolve()), "--worker", name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, env=environment, preexec_fn=pin, **pipes)


def ask(process, case, num_searches):
    process.stdin.write(json.dumps([case, num_searches]) + "\n")
    process.stdin.flush()
    reply = process.stdout.readline()
    if not reply:
        raise RuntimeError(f"the worker {process.args[-1]} died: run it by hand, type [{json.dumps(case)}, 1]")
    return json.loads(reply)


def measure(num_rounds, num_searches):
    """Returns {case: {library: {"cpu_ms": [...], "wall_ms": [...], facts}}}."""
    processes = {name: process for name in SEARCHES if (process := start(name))}
    results = {case: {name: {"cpu_ms": [], "wall_ms": []} for name in processes} for case in CASES}
    for round_ in range(num_rounds):
        for case in CASES:
            for name, process in processes.items():
                times, facts = ask(process, case, num_searches)
                result = results[case][name]
                result |= facts
                result["cpu_ms"] += [round(cpu, 3) for cpu, _ in times]
                result["wall_ms"] += [round(wall, 3) for _, wall in times]
            line = ", ".join(f"{name} {min(results[case][name]['cpu_ms']):.1f}" for name in processes)
            print(f"round {round_ + 1}/{num_rounds}  {case}: {line} ms", flush=True)
    for process in processes.values():
        process.stdin.close()
        process.wait()
    for case in results.values():
        visits = {name: result.pop("visits") for name, result in case.items()}
        if "mctx" in visits:
            pairs = list(zip(visits["mcts.py"], visits["mctx"]))
            case["mcts.py"]["rows_equal_mctx"] = sum(a == b for a, b in pairs) / len(pairs)
    return results


def table(results):
    names = [name for name in SEARCHES if name in next(iter(results.values()))]
    lines = [
        "| case | mean depth | " + " | ".join(names) + " | mcts.py : mctx | visits as mctx |",
        "|---|---|" + "---|" * len(names) + "---|---|",
    ]
    for case, result in results.items():
        cells = [f"{min(result[n]['cpu_ms']):.1f} ({statistics.median(result[n]['cpu_ms']):.1f})" for n in names]
        ratio, same = "", ""
        if "mctx" in result:
            ratio = f"{min(result['mcts.py']['cpu_ms']) / min(result['mctx']['cpu_ms']):.2f}"
            same = f"{result['mcts.py']['rows_equal_mctx']:.0%}"
        lines.append(f"| {case} | {result['mcts.py']['mean_depth']:.1f} | " + " | ".join(cells) + f" | {ratio} | {same} |")
    return "\n".join(lines)


def summary(results):
    """What the table shows, with the wall time and the number of searches: {case: {library: {...}}}."""
    short = {case: {name: dict(result) for name, result in libraries.items()} for case, libraries in results.items()}
    for result in (result for libraries in short.values() for result in libraries.values()):
        result["searches"] = len(result["cpu_ms"])
        for name in ("cpu_ms", "wall_ms"):
            times = result.pop(name)
            result[name] = f"min {min(times):.2f}, median {statistics.median(times):.2f}"
    return short


def write(results, folder, arguments):
    packages = "import importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in %r), sep=', ')"
    versions = []
    for python, wanted in [
        (sys.executable, ["torch"]),
        (VENVS / "mctx/bin/python", ["mctx", "jax"]),
        (VENVS / "lightzero/bin/python", ["LightZero", "torch"]),
    ]:
        if Path(python).exists():
            command = [str(python), "-c", packages % (wanted,)]
            versions.append(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        cpu = next((x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")), cpu)
    facts = {
        "command": "python benchmarks/mcts.py" + "".join(f" {argument}" for argument in arguments),
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "load": round(os.getloadavg()[0], 1),
        "versions": versions,
    }
    folder.mkdir(parents=True, exist_ok=True)
    cases = ",\n".join(f"  {json.dumps(case)}: {json.dumps(result)}" for case, result in summary(results).items())  # a line each
    (folder / "mcts.json").write_text(json.dumps(facts, indent=1)[:-2] + f',\n "cases": {{\n{cases}\n }}\n}}\n')
    text = f"""CPU milliseconds of one search on one core, minimum (median): 50 simulations, A = 20 unless said otherwise.

{table(results)}

`{facts["command"]}`, {facts["date"]}, {cpu}, load {facts["load"]} at the end; {"; ".join(versions)}. CUDA is not measured.
"""
    (folder / "mcts.md").write_text(text)
    print("\n" + text)


def profile():
    """Print operations a simulation, and the time of each function of mcts.py and of the model (wall, median)."""
    import torch
    from torch.profiler import ProfilerActivity

    for case in ("values, B = 8", "values, B = 128"):
        search, _ = ours(*CASES[case])
        import mcts

        search()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as prof:
            search()
        num_operations = sum(event.cpu_parent is None for event in prof.events())
        plain, seconds, functions = {}, {}, ("_ask", "_backup", "_children", "_choose", "_add", "_tables", "_result")
        for name in (*functions, "normalize_q", "puct_scores"):
            plain[name] = getattr(mcts, name)
            setattr(mcts, name, timed(plain[name], seconds.setdefault(name, [])))
        for _ in range(20):
            search()
        for name, function in plain.items():
            setattr(mcts, name, function)
        print(f"{case}: {num_operations / SIMULATIONS:.0f} operations a simulation; ms a search (functions inside included):")
        for name, times in seconds.items():
            print(f"  {name:12s} {statistics.median(times) * len(times) / 20 * 1e3:6.2f}  ({len(times) // 20} calls)")


def timed(function, times):
    def wrapper(*args, **kwargs):
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        times.append(time.perf_counter() - begin)
        return result

    return wrapper


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="make the environments of mctx and LightZero and stop")
    parser.add_argument("--profile", action="store_true", help="print where the time goes and stop")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every library in every case")
    parser.add_argument("--searches", type=int, default=8, help="searches a turn")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--worker", choices=list(SEARCHES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
    elif options.install:
        install()
    elif options.profile:
        profile()
    else:
        write(measure(options.rounds, options.searches), options.results, sys.argv[1:])


if __name__ == "__main__":
    main()
