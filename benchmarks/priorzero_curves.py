"""Learning curves of PriorZero, its ablations and UniZero: several seeds, equal environment steps, the same evaluation episodes.

    arm             flags of priorzero.py        what it is
    priorzero       (defaults)                   LLM prior at the root, alternating PPO of the LLM
    unizero         --alpha 0                    the same without any LLM
    frozen          --freeze_llm                 the prior is never trained (the paper's ablation; only with --arms)
    ...             any other arm can be added to ARMS

Run it (an hour or two on 2 idle cores; stop it with Ctrl-C and start it again: it goes on where it was):
    python benchmarks/priorzero_curves.py
A minute, to see that it works:
    python benchmarks/priorzero_curves.py --runs runs/try --results runs/try --seeds 1 -- --env_steps 320 --eval_every 160 --eval_episodes 16
What follows `--` goes to every run of priorzero.py.  Out come, in benchmarks/results/: priorzero_curves.json, .png and .md, with the
evaluation return over environment steps (mean and range over seeds), the final table, and the step at which PriorZero's mean
curve reaches UniZero's final return.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from benchmarks.plot import draw_band, plt, read_metrics  # noqa: E402

ARMS = {"priorzero": [], "unizero": ["--alpha", "0"], "frozen": ["--freeze_llm"], "no-alternate": ["--no-alternate"], "no-mcts": ["--no-mcts"],
        "sft": ["--loss", "sft"]}


def run(arm, seed, args):
    """One run of priorzero.py, or what is left of it; returns its folder."""
    folder = Path(args.runs) / f"{arm}-seed{seed}"
    if (folder / "result.json").exists():
        return folder
    resume = ["--resume"] if (folder / "checkpoint.pt").exists() else []
    flags = [] if resume else [*ARMS[arm], "--seed", str(seed), "--no-baseline", *args.extra]
    command = [sys.executable, str(REPOSITORY / "priorzero.py"), *flags, "--run_dir", str(folder), *resume]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log:
        subprocess.run(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return folder


def curve(folder):
    """(environment steps, evaluation return) of a run, its evaluations before and after included."""
    result = json.loads((folder / "result.json").read_text())
    rows = read_metrics(folder)
    name = next(name for name in ("PriorZero", "UniZero") if f"{name} before" in result)
    points = {0: result[f"{name} before"]["return"]} | {r["env_steps"]: r["eval_return"] for r in rows if "eval_return" in r}
    points[rows[-1]["env_steps"]] = result[f"{name} after"]["return"]
    return np.array(sorted(points.items())).T


def first_reaching(steps, values, goal):
    """The first step, linearly between points, at which the curve reaches `goal`; None if never.

    >>> first_reaching([0, 10, 20], [0.0, 0.5, 0.4], 0.25)
    5.0
    """
    for k, value in enumerate(values):
        if value >= goal:
            if k == 0:
                return float(steps[0])
            share = (goal - values[k - 1]) / (value - values[k - 1])
            return float(steps[k - 1] + share * (steps[k] - steps[k - 1]))
    return None


def report(folders, results):
    """Draw and write what came out; folders: {arm: [folder of each seed]}."""
    results.mkdir(parents=True, exist_ok=True)
    figure, axis = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    means, lines = {}, ["| arm | seeds | final return, mean (range) | LLM alone after, mean |", "|---|---|---|---|"]
    data = {}
    for arm, runs in folders.items():
        curves = [curve(folder) for folder in runs]
        steps = curves[0][0]
        values = np.array([np.interp(steps, *c) for c in curves])
        draw_band(axis, steps, values, label=f"{arm} ({len(runs)} seeds)", marker="o")
        means[arm], final = (steps, values.mean(0)), values[:, -1]
        alone = [r["LLM alone after"]["return"] for f in runs if "LLM alone after" in (r := json.loads((f / "result.json").read_text()))]
        lines.append(f"| {arm} | {len(runs)} | {final.mean():.3f} ({final.min():.3f} to {final.max():.3f}) | "
                     f"{f'{np.mean(alone):.3f}' if alone else '-'} |")
        data[arm] = {"steps": steps.tolist(), "returns": values.round(4).tolist(), "llm_alone_after": alone}
    if {"priorzero", "unizero"} <= means.keys():
        goal = float(means["unizero"][1][-1])
        step = first_reaching(*means["priorzero"], goal)
        at = f"at {step:.0f} of {means['unizero'][0][-1]:.0f} steps" if step is not None else "never"
        lines.append(f"\nPriorZero's mean curve reaches UniZero's final return ({goal:.3f}) {at}.")
        data["reaches_unizero_at"] = step
    axis.set(xlabel="environment steps", ylabel="return on unseen seeds", title="Evaluation: mean and range over seeds")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(results / "priorzero_curves.png", dpi=110)
    (results / "priorzero_curves.json").write_text(json.dumps(data) + "\n")
    (results / "priorzero_curves.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arms", default="priorzero,unizero", help=f"comma-separated: {', '.join(ARMS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--runs", default="runs/priorzero_curves")
    parser.add_argument("--results", default=str(Path(__file__).resolve().parent / "results"))
    parser.add_argument("extra", nargs="*", help="flags for every run, behind --")
    args = parser.parse_args()
    arms = args.arms.split(",")
    jobs = [(arm, seed) for seed in range(1, args.seeds + 1) for arm in arms]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        done = dict(zip(jobs, pool.map(lambda job: run(*job, args), jobs)))
    report({arm: [done[arm, seed] for seed in range(1, args.seeds + 1)] for arm in arms}, Path(args.results))


if __name__ == "__main__":
    main()
