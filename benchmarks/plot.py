"""Curves of runs: `plot` serves `--plot RUN ...` of both scripts, the rest serves the curves in benchmarks/ too."""

import json
from pathlib import Path

import matplotlib
import numpy as np

from envs import InputError

matplotlib.use("Agg")  # draws to files, needs no display
import matplotlib.pyplot as plt  # noqa: E402

PANELS = ("success", "reward", "valid_action_rate", "episode_len", "entropy", "wm_loss", "lambda", "kl")


def read_metrics(run_dir):
    """The lines of a run's metrics.jsonl as a list of dicts.  Raises InputError where there are none to read."""
    path = Path(run_dir) / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except OSError as error:
        raise InputError(f"--plot {run_dir}: it has no readable metrics.jsonl ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"--plot {run_dir}: its metrics.jsonl is damaged ({error})") from error
    if not all(isinstance(row, dict) and ("update" in row or "env_steps" in row) for row in rows):
        raise InputError(f"--plot {run_dir}: its metrics.jsonl is not one of ours")
    if not rows:
        raise InputError(f"--plot {run_dir}: its metrics.jsonl is empty: no update has ended yet")
    return rows


def smooth(values, window):
    """Mean of each value and of up to window - 1 values before it: array [N] -> [N].

    >>> smooth([0, 2, 4, 6], 2)
    array([0., 1., 3., 5.])
    """
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=float)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_band(axis, x, curves, **style):
    """The mean of several curves over common x [N], and their minimum to maximum as a shaded band: curves [K, N]."""
    curves = np.asarray(curves)
    line, = axis.plot(x, curves.mean(0), **style)
    axis.fill_between(x, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.15, linewidth=0)


def plot(run_dirs, out, panels=PANELS, x="update"):
    """Draw the curves of one or several run folders to a PNG: one panel a metric, one line a run; x: the metric below.

    A metric that a line of metrics.jsonl lacks (an evaluation, the LLM's phase) is drawn where it is there.
    """
    runs = [(Path(run).resolve().name, read_metrics(run)) for run in run_dirs]  # before anything is drawn
    for run, (_, rows) in zip(run_dirs, runs):
        if x not in rows[0]:
            raise InputError(f"--plot {run}: its metrics.jsonl is of the other script: it has no {x}")
    figure, axes = plt.subplots(-(-len(panels) // 4), 4, figsize=(16, 3.5 * -(-len(panels) // 4)), constrained_layout=True)
    for axis, name in zip(axes.flat, panels):
        for label, rows in runs:
            rows = [r for r in rows if name in r]
            axis.plot([r[x] for r in rows], [r[name] for r in rows], label=label)
        axis.set(title=name, xlabel=x.replace("_", " "))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=7)
    figure.savefig(out, dpi=110)
    plt.close(figure)
    print(f"wrote {out}")
