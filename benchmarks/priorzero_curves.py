"""Learning curves of PriorZero, its ablations and UniZero: several seeds, equal environment steps, the same evaluation episodes.

    arm             flags of priorzero.py        what it is
    priorzero       (defaults)                   LLM prior at the root, alternating PPO of the LLM
    unizero         --alpha 0                    the same without any LLM
    frozen          --freeze_llm                 the prior is never trained (the paper's ablation; only with --arms)
    ...             any other arm can be added to ARMS

Run it (stop it with Ctrl-C and start it again: it goes on where it was):
    python benchmarks/priorzero_curves.py
UniZero on Jericho's detective, whose story file is yours to get:
    python benchmarks/priorzero_curves.py --name priorzero_detective --arms unizero -- --env jericho --game detective --rom_dir ROMS
A minute, to see that it works:
    python benchmarks/priorzero_curves.py --runs runs/try --results runs/try --seeds 1 -- --env_steps 320 --eval_every 160 --eval_episodes 16
What follows `--` goes to every run of priorzero.py.  Out come, in benchmarks/results/: <name>.json, .png and .md, with the
evaluation return over environment steps (mean and range over seeds), the final table, and the step at which PriorZero's mean
curve reaches UniZero's final return.  An evaluation has 200 episodes (detective: the one game there is).
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
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
    flags = [] if resume else [*ARMS[arm], "--seed", str(seed), "--no-baseline", "--eval_episodes", "200", *args.extra]
    command = [sys.executable, str(REPOSITORY / "priorzero.py"), *flags, "--run_dir", str(folder), *resume]
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with open(folder / "log.txt", "a") as log:
        subprocess.run(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    seconds = time.perf_counter() - start + (json.loads((folder / "seconds.json").read_text()) if (folder / "seconds.json").exists() else 0)
    (folder / "seconds.json").write_text(json.dumps(seconds))
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


def report(folders, results, name):
    """Draw and write what came out; folders: {arm: [folder of each seed]}."""
    results.mkdir(parents=True, exist_ok=True)
    figure, axis = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    means, data = {}, {}
    lines = ["| arm | before, mean | after, each seed | after, mean | best evaluation, each seed | LLM alone before, after | minutes a run |",
             "|---|---|---|---|---|---|---|"]
    for arm, runs in folders.items():
        curves, ends = [curve(folder) for folder in runs], [json.loads((folder / "result.json").read_text()) for folder in runs]
        steps = curves[0][0]
        values = np.array([np.interp(steps, *c) for c in curves])
        draw_band(axis, steps, values, label=f"{arm} ({len(runs)} seeds)", marker="o")
        means[arm] = steps, values.mean(0)
        alone = [np.mean([end[f"LLM alone {when}"]["return"] for end in ends]) for when in ("before", "after") if "LLM alone after" in ends[0]]
        minutes = [json.loads((folder / "seconds.json").read_text()) / 60 for folder in runs]
        lines.append(f"| {arm} | {values[:, 0].mean():.3g} | {each(values[:, -1])} | {values[:, -1].mean():.3g} | {each(values.max(1))} | "
                     f"{each(alone) or '-'} | {min(minutes):.1f} to {max(minutes):.1f} |")
        data[arm] = {"steps": steps.tolist(), "returns": values.round(4).tolist(), "results": ends, "minutes": np.round(minutes, 2).tolist()}
    if {"priorzero", "unizero"} <= means.keys():
        goal = float(means["unizero"][1][-1])
        step = first_reaching(*means["priorzero"], goal)
        at = f"at step {step:.0f} of {means['unizero'][0][-1]:.0f}" if step is not None else "never"
        lines.append(f"\nPriorZero's mean curve is at UniZero's final mean ({goal:.3f}) or above it for the first time {at}.")
        data["reaches_unizero_at"] = step
    axis.set(xlabel="environment steps", ylabel="return of the greedy policy", title="Evaluation: mean and range over seeds")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(results / f"{name}.png", dpi=110)
    (results / f"{name}.json").write_text(json.dumps(data) + "\n")
    (results / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def each(values):
    return " ".join(f"{value:.3g}" for value in values)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arms", default="priorzero,unizero", help=f"comma-separated: {', '.join(ARMS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--name", default="priorzero_curves", help="of the results' files")
    parser.add_argument("--runs", default="", help="folder of the runs; empty = runs/<name>")
    parser.add_argument("--results", default=str(Path(__file__).resolve().parent / "results"))
    parser.add_argument("extra", nargs="*", help="flags for every run, behind --")
    args = parser.parse_args()
    arms, args.runs = args.arms.split(","), args.runs or f"runs/{args.name}"
    jobs = [(arm, seed) for seed in range(1, args.seeds + 1) for arm in arms]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        done = dict(zip(jobs, pool.map(lambda job: run(*job, args), jobs)))
    report({arm: [done[arm, seed] for seed in range(1, args.seeds + 1)] for arm in arms}, Path(args.results), args.name)


if __name__ == "__main__":
    main()
