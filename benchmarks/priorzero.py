"""Speed of priorzero.py on one core: search, world-model update, LLM prior, environment; with a profile of the first two.

    python benchmarks/priorzero.py        # about a minute; writes benchmarks/results/priorzero.json and priorzero_profile.md

Settings are the defaults (16 environments, 25 simulations, batch 64, H 10, width 64, BabyAI's PickupLoc with the tiny prior).
Figures are CPU milliseconds (`time.process_time`), which a busy machine disturbs less than wall time: the minimum is the one
to compare, the median shows how quiet it was.  The goals: search under 6 ms per environment step, an update under 35 ms.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

import priorzero as pz  # noqa: E402
from envs import EnvPool  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"


def measure(function, repeats, share=1):
    """{"min", "median"} CPU milliseconds of `function()` divided by `share`, after one call to warm up."""
    times = []
    function()
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(1e3 * (time.process_time() - start) / share)
    return {"min": round(min(times), 3), "median": round(statistics.median(times), 3)}


def profile(function, repeats):
    """The table of torch's profiler, by own CPU time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        for _ in range(repeats):
            function()
    return prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=45)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    cfg = pz.Config()
    agent, unizero = pz.Agent(cfg), pz.Agent(pz.Config(alpha=0.0))
    with EnvPool("babyai", cfg.num_envs, 0, **cfg.env_options(False)) as pool:
        games = {i: pz.new_game(unizero, pool, i) for i in range(cfg.num_envs)}
        for _ in range(30):
            pz.collect(unizero, pool, games)
        playing = list(games.values())

        def search():
            pz.decide(unizero, playing, cfg.num_simulations, 1.0, True, unizero.generators)

        def prior():
            agent.llm.cache.clear()
            pz.llm_priors(agent.llm, playing, cfg, agent.generators["sampling"])

        def update():
            pz.update_world_model(unizero)

        def step():
            pool.reset([0], [0]), pool.step([0], ["turn left"])

        update()
        figures = {"search_ms_per_env_step": measure(search, repeats, cfg.num_envs), "update_ms": measure(update, repeats),
                   "prior_ms_per_env_step": measure(prior, max(3, repeats // 3), cfg.num_envs), "env_reset_and_step_ms": measure(step, repeats)}
        tables = {"search of 16 environments, 25 simulations": profile(search, 3), "world-model update": profile(update, 5)}
    figures |= {"goals": {"search_ms_per_env_step": 6, "update_ms": 35}, "load": os.getloadavg()[0], "machine": platform.platform(),
                "python": platform.python_version(), "torch": torch.__version__, "threads": 1, "date": datetime.date.today().isoformat()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "priorzero.json").write_text(json.dumps(figures, indent=1) + "\n")
    text = "".join(f"\n## {name}\n\n```\n{table}\n```\n" for name, table in tables.items())
    (RESULTS / "priorzero_profile.md").write_text("# Where the time of priorzero.py goes (`python benchmarks/priorzero.py`)\n" + text)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
