"""Learning curves of PaW and its ablations: six arms, several seeds, equal updates, the same evaluation episodes.

    arm            flags of paw.py                  what it is
    grpo           --wm none                        the base algorithm
    grpo+paw       (defaults)                       PaW on GRPO
    grpo+ce        --wm ce                          cross-entropy instead of the clipped MAE (the paper's ablation)
    grpo+lambda1   --no-adaptive_lambda             world-model weight 1 instead of eq. 10 (the paper's ablation)
    gigpo          --algo gigpo --wm none           the other base algorithm
    gigpo+paw      --algo gigpo                     PaW on GiGPO

Run it (an hour on 2 CPU cores; stop it with Ctrl-C and start it again with the same command: it goes on where it was):
    python benchmarks/paw_curves.py
A minute, to see that it works:
    python benchmarks/paw_curves.py --runs runs/try --results runs/try --seeds 2 --updates 2 \
        -- --groups 2 --group_size 4 --max_steps 8 --eval_episodes 8
What follows `--` goes to every run of paw.py.  A finished run (result.json) is kept, one with a checkpoint is continued.
Out come, in benchmarks/results/: paw_curves.json, paw_curves.png and paw_curves.md.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
import paw  # noqa: E402
from benchmarks.plot import draw_band, plt, read_metrics, smooth  # noqa: E402
from envs import InputError, make_env  # noqa: E402

ARMS = {"grpo": ["--wm", "none"], "grpo+paw": [], "grpo+ce": ["--wm", "ce"], "grpo+lambda1": ["--no-adaptive_lambda"],
        "gigpo": ["--algo", "gigpo", "--wm", "none"], "gigpo+paw": ["--algo", "gigpo"]}
COLORS = dict(zip(ARMS, ("dimgray", "tab:blue", "tab:red", "tab:orange", "tab:brown", "tab:green")))
KEPT = ("success", "lambda", "wm_loss", "valid_action_rate", "entropy", "seconds_env", "seconds_generate", "seconds_train")
WINDOW = 5  # updates in the moving average of the training success


# ---- Training ------------------------------------------------------------------------------------------------------------

def paw_flags(arm, seed, args):
    """The flags of one run of paw.py."""
    passed = [f"--{name}={getattr(args, name)}" for name in ("updates", "eval_every") if getattr(args, name) is not None]
    return ["--env", "alfworld", "--seed", str(seed), *ARMS[arm], *passed, *args.extra,
            "--run_dir", str(Path(args.runs) / f"{arm}-seed{seed}")]


def config_of(flags):
    """The Config that paw.py makes of these flags.  Raises InputError for flags that it refuses."""
    cfg = paw.Config(**paw.parse_arguments(flags)[0])
    cfg.validate()
    return cfg


def is_finished(cfg):
    """Whether the run of this Config is there.  Raises InputError where its folder holds one with other settings."""
    folder = Path(cfg.run_dir)
    if not (folder / "result.json").exists():
        return False
    there = json.loads((folder / "config.json").read_text())
    for name, value in dataclasses.asdict(cfg).items():
        if name in paw.RESUMABLE - {"updates"}:
            continue
        if there.get(name) != value:
            raise InputError(f"{folder}: a finished run with {name} {there.get(name)}, not {value}: remove it, or name another --runs")
    return True


def make_houses(configs):
    """Make the games that these runs will play: else the arm that is first to play one pays for it in its seconds."""
    for split in ("train", configs[0].eval_split):
        env, games = make_env("alfworld", **configs[0].env_options(split)), set()
        for cfg in configs:
            games.update(task for update in range(cfg.updates) for task in paw.draw_tasks(update, cfg, env.num_tasks))
        games = games if split == "train" else range(min(configs[0].eval_episodes, env.num_tasks))
        for task in tqdm(sorted(games), desc=f"{split} houses"):
            env.reset(options={"task": task})
        env.close()


def train(flags, folder):
    """One run of paw.py, new or continued, in a process of its own; what it prints goes to a file beside its folder."""
    resume = ["--resume"] if (folder / "checkpoint.pt").exists() else []
    log = folder.with_name(folder.name + ".log")
    with open(log, "a") as file:
        code = subprocess.run([sys.executable, str(REPOSITORY / "paw.py"), *flags, *resume], stdout=file,
                              stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
    if code:
        raise RuntimeError(f"{folder.name} ended with exit code {code}; {log} says: {log.read_text().strip().splitlines()[-1]}")


def train_all(args):
    """Train what is not finished, args.jobs runs at a time, seed by seed: an early stop leaves whole seeds."""
    jobs = [paw_flags(arm, seed, args) for seed in range(1, args.seeds + 1) for arm in ARMS]
    jobs = [(flags, cfg) for flags in jobs for cfg in [config_of(flags)] if not is_finished(cfg)]
    if not jobs:
        return
    Path(args.runs).mkdir(parents=True, exist_ok=True)
    make_houses([cfg for _, cfg in jobs])
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(train, flags, Path(cfg.run_dir)) for flags, cfg in jobs]
        try:
            for future in tqdm(concurrent.futures.as_completed(futures), total=len(futures), desc="runs", unit="run"):
                future.result()
        except BaseException:  # Ctrl-C, which the runs got too (they save and end), or a run that failed: start no other
            pool.shutdown(wait=True, cancel_futures=True)
            raise


# ---- Collecting ----------------------------------------------------------------------------------------------------------

def cpu_model():
    """The processor's name as Linux gives it, else as Python does."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor()


def collect_run(folder):
    """What is kept of one finished run: lists over its updates, and {task type: [solved, episodes]} before and after."""
    rows, result = read_metrics(folder), json.loads((folder / "result.json").read_text())
    short = lambda value: value if isinstance(value, int) else float(f"{value:.4g}")
    return {"seed": json.loads((folder / "config.json").read_text())["seed"], "update": [r["update"] for r in rows],
            **{name: [short(r[name]) for r in rows] for name in KEPT},
            "eval_success": {r["update"]: short(r["eval_success"]) for r in rows if "eval_success" in r},
            "before": result["before"], "after": result["after"]}


def collect(args):
    """All finished runs as one dictionary, what paw_curves.json holds.  Raises InputError where there is none."""
    arms = {}
    for arm in ARMS:
        folders = [Path(args.runs) / f"{arm}-seed{seed}" for seed in range(1, args.seeds + 1)]
        runs = [collect_run(folder) for folder in folders if (folder / "result.json").exists()]
        if runs:
            arms[arm] = {"flags": ARMS[arm], "runs": runs}
    if not arms:
        raise InputError(f"--runs {args.runs}: it holds no finished run; train some first (without --collect_only)")
    flags = [word for word in sys.argv[1:] if word != "--collect_only"]
    return {"command": shlex.join(["python", "benchmarks/paw_curves.py", *flags]), "date": datetime.date.today().isoformat(),
            "machine": f"{cpu_model()}, {os.cpu_count()} cores; {args.jobs} runs at a time, 1 thread each",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
            "arms": arms}


# ---- Showing -------------------------------------------------------------------------------------------------------------

def rate(run, when):
    """Success of a run's evaluation "before" or "after", in %."""
    solved, episodes = run[when]["all"]
    return 100 * solved / max(episodes, 1)


def seconds_of(run):
    """Seconds of each update, its evaluations left out: env + generate + train."""
    return np.sum([run[f"seconds_{phase}"] for phase in ("env", "generate", "train")], axis=0)


def mean_std(values):
    """ "mean +- std" (unbiased) of one number per seed."""
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def table(data):
    """paw_curves.md: evaluation before and after, each seed, the difference to the base algorithm, training success, seconds."""
    some = next(iter(data["arms"].values()))["runs"][0]
    episodes, updates = some["after"]["all"][1], len(some["update"])
    lines = [f"Success in % on {episodes} evaluation episodes before and after {updates} updates, mean ± std over seeds. \"vs base\": the",
             "difference to grpo or gigpo with the same seed. One evaluation of this many episodes has a standard error of up to",
             f"{50 / max(episodes, 1) ** 0.5:.1f} points by chance alone. Training: success of all training episodes of a run (how fast it learnt), each seed.",
             "Seconds per update: environments, generation, training.", "",
             "| arm | flags | before | after | each seed | vs base | training | s per update (env + generate + train) |", "|---|---|---|---|---|---|---|---|"]
    for arm, entry in data["arms"].items():
        runs, base = entry["runs"], data["arms"].get(arm.split("+")[0], {"runs": []})["runs"]
        base_after = {run["seed"]: rate(run, "after") for run in base}
        gains = [rate(run, "after") - base_after[run["seed"]] for run in runs if run["seed"] in base_after]
        phases = [np.mean([np.mean(run[f"seconds_{phase}"]) for run in runs]) for phase in ("env", "generate", "train")]
        cells = [arm, f"`{' '.join(entry['flags'])}`" if entry["flags"] else "", mean_std([rate(run, "before") for run in runs]),
                 mean_std([rate(run, "after") for run in runs]), ", ".join(f"{rate(run, 'after'):.1f}" for run in runs),
                 mean_std(gains) if gains and "+" in arm else "",
                 ", ".join(f"{100 * np.mean(run['success']):.1f}" for run in runs), f"{sum(phases):.1f} ({' + '.join(f'{p:.1f}' for p in phases)})"]
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    return "\n".join(lines + ["", f"Made by `{data['command']}` on {data['date']}; {data['machine']}; {versions}."]) + "\n"


def over_updates(runs, name, window=1):
    """(updates [N], curves [seeds, N]) of a metric, up to the shortest run."""
    length = min(len(run["update"]) for run in runs)
    return np.arange(1, length + 1), [smooth(run[name], window)[:length] for run in runs]


def over_seconds(runs, name, window):
    """The same over training seconds: each seed's curve at common times, up to the fastest run's end."""
    times = [np.cumsum(seconds_of(run)) for run in runs]
    grid = np.linspace(max(t[0] for t in times), min(t[-1] for t in times), 200)
    return grid, [np.interp(grid, t, smooth(run[name], window)) for t, run in zip(times, runs)]


def draw_evaluations(axis, arms):
    """Success of the evaluations: points are means over seeds, bars their minimum to maximum, arms side by side."""
    for k, (arm, entry) in enumerate(arms.items()):
        points = {}
        for run in entry["runs"]:
            inner = {int(update) + 1: 100 * value for update, value in run["eval_success"].items()}
            for x, y in ({0: rate(run, "before")} | inner | {len(run["update"]): rate(run, "after")}).items():
                points.setdefault(x, []).append(y)
        x, ys = sorted(points), [points[u] for u in sorted(points)]
        mean = [np.mean(y) for y in ys]
        spread = [[m - min(y) for m, y in zip(mean, ys)], [max(y) - m for m, y in zip(mean, ys)]]
        axis.errorbar(np.array(x) + 0.02 * max(x) * (k - len(arms) / 2), mean, spread, fmt="o:", capsize=2, markersize=4,
                      linewidth=1, color=COLORS[arm], label=arm)


def draw(data, out):
    """paw_curves.png: training success over updates and seconds, evaluations, lambda, world-model loss."""
    arms = data["arms"]
    figure, axes = plt.subplots(2, 3, figsize=(17, 9), constrained_layout=True)
    for arm, entry in arms.items():
        runs, style = entry["runs"], {"color": COLORS[arm], "label": arm}
        x, curves = over_updates(runs, "success", WINDOW)
        draw_band(axes[0, 0 if arm.startswith("grpo") else 1], x, 100 * np.array(curves), **style)
        x, curves = over_seconds(runs, "success", WINDOW)
        draw_band(axes[0, 2], x, 100 * np.array(curves), **style)
        if "--wm" not in entry["flags"] or "ce" in entry["flags"]:
            draw_band(axes[1, 1], *over_updates(runs, "lambda", WINDOW), **style)
            is_ce = "ce" in entry["flags"]
            style["label"] += " (in nats / 10)" if is_ce else ""
            x, curves = over_updates(runs, "wm_loss", WINDOW)
            draw_band(axes[1, 2], x, np.array(curves) / (10 if is_ce else 1), **style)
    draw_evaluations(axes[1, 0], arms)
    top = max(axis.get_ylim()[1] for axis in axes[0])
    num_seeds = max(len(entry["runs"]) for entry in arms.values())
    for axis, title, x in zip(axes.flat, ("GRPO: training success, %", "GiGPO: training success, %", "training success, %",
                                          "evaluation success, % (bars: min to max over seeds)", "lambda",
                                          "world-model loss of the selected transitions"),
                              ("update", "update", "training seconds (env + generate + train)", "updates done", "update", "update")):
        axis.set(title=title, xlabel=x)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    for axis in axes[0]:
        axis.set_ylim(0, top)
    figure.suptitle(f"PaW and its ablations: mean over {num_seeds} seeds, band = min to max; each curve is a moving average over {WINDOW} updates")
    figure.savefig(out, dpi=100)
    plt.close(figure)


def parse_arguments(argv):
    """The flags, with what follows `--` as .extra."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="What follows -- goes to every run of paw.py.")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 ... N of every arm [3]")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each [2]")
    parser.add_argument("--runs", default="runs/paw_curves", help="folder of the run folders [runs/paw_curves]")
    parser.add_argument("--results", default=str(REPOSITORY / "benchmarks" / "results"), help="folder of what is made [benchmarks/results]")
    parser.add_argument("--updates", type=int, help="as in paw.py [its default]")
    parser.add_argument("--eval_every", type=int, help="as in paw.py [its default]")
    parser.add_argument("--collect_only", action="store_true", help="do not train: collect and draw the finished runs")
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    args.extra = argv[cut + 1:]
    return args


def main(argv):
    args = parse_arguments(argv)
    if not args.collect_only:
        train_all(args)
    data, results = collect(args), Path(args.results)
    results.mkdir(parents=True, exist_ok=True)
    (results / "paw_curves.json").write_text(json.dumps(data))
    (results / "paw_curves.md").write_text(table(data))
    draw(data, results / "paw_curves.png")
    print(table(data))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (InputError, RuntimeError) as error:
        sys.exit(print(f"paw_curves.py: {error}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(print("stopped; the same command goes on from here", file=sys.stderr) or 130)
