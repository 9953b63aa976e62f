"""How fast the environments are.

    python benchmarks/envs.py                  # all of them; a table each, and benchmarks/results/envs_<name>.json
    python benchmarks/envs.py --only alfworld  # about 2 minutes

Times are milliseconds of CPU time of one thread, so that other programs on the machine matter little.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import envs  # noqa: E402


class Clock:
    """Collects CPU times by name: `with clock("step"): ...`; `mean_ms()` gives their means in milliseconds."""

    def __init__(self):
        self.times = {}

    def __call__(self, name):
        self.name = name
        return self

    def __enter__(self):
        self.start = time.process_time()

    def __exit__(self, *_):
        self.times.setdefault(self.name, []).append(time.process_time() - self.start)

    def mean_ms(self) -> dict:
        return {name: round(1000 * sum(times) / len(times), 2) for name, times in self.times.items()}


def in_fresh_process(function, *args):
    """function(*args) in a spawned process: nothing is cached or patched there yet."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(function, *args).result()


# ---- ALFWorld ----

def make_games(houses: str, count: int) -> tuple:
    """(files of `count` new games, milliseconds to make, prove and write one)."""
    env, clock, files = envs.make_env("alfworld", houses=houses), Clock(), []
    env._folder(count)  # the first one pays for the grammar
    for task in range(count):
        with clock("make a game"):
            files.append(str(env._folder(task) / "game.tw-pddl"))
    return files, clock.mean_ms()["make a game"]


def play_games(patched: bool, files: list, load_name: str, steps: int) -> dict:
    """Load the games, play `steps` random steps in each, load them again; mean milliseconds by name."""
    if patched:
        envs.patch_engine()
    engine = envs.AlfredInfos(envs.AlfredDemangler(envs.PddlEnv(envs.pddl_logic.textworld.EnvInfos())))
    clock = Clock()
    for number, file in enumerate(files):
        with clock(load_name if number else "first game of the process"):
            engine.load(file)
        with clock("reset"):
            state = engine.reset()
        rng = random.Random(number)
        for _ in range(steps):
            command = rng.choice(state["admissible_commands"])
            with clock("step and admissible commands"):
                state, _, done = engine.step(command)
            if done:
                break
    for file in files:
        with clock("load a known game"):
            engine.load(file)
    return clock.mean_ms()


def pool_step_ms(houses: str) -> float:
    """Milliseconds of one environment's step in an in-process pool of 48: 6 groups of 8, 16 random steps, twice."""
    rng, clock = random.Random(0), Clock()
    with envs.EnvPool("alfworld", 48, houses=houses) as pool:
        for first in (0, 6):
            results = pool.reset(range(48), [first + k // 8 for k in range(48)])
            live = list(range(48))
            for _ in range(16):
                actions = [rng.choice(results[index][-1]["admissible_actions"]) for index in live]
                with clock("pool step"):
                    answers = pool.step(live, actions)
                for index, answer in zip(live, answers):
                    results[index] = answer
                live = [index for index in live if not results[index][2]]
    return round(clock.mean_ms()["pool step"] / 48, 2)


def alfworld() -> dict:
    rows = {}
    for houses, count, steps in (("small", 12, 50), ("full", 6, 25)):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TEXT_ENVS_CACHE"] = cache
            files, made = in_fresh_process(make_games, houses, count)
            stock = in_fresh_process(play_games, False, files, "load a new game", steps)
            ours = in_fresh_process(play_games, True, files, "load a new game, translated before", steps)
            os.environ["TEXT_ENVS_CACHE"] = str(Path(cache) / "empty")
            ours["load a new game"] = in_fresh_process(play_games, True, files, "load a new game", 0)["load a new game"]
            os.environ["TEXT_ENVS_CACHE"] = cache
            ours |= {"make a game": made, "step in a pool of 48": in_fresh_process(pool_step_ms, houses)}
        rows[houses] = {"stock_ms": stock, "ours_ms": ours}
        print(f"\nALFWorld, {houses} houses{'stock ms':>35} {'ours ms':>9} {'times':>7}")
        for name, ms in ours.items():
            old = stock.get(name)
            print(f"{name:50}{old or '':>9} {ms:>9} {f'{old / ms:.0f}' if old else '':>7}")
    return rows


BENCHMARKS = {"alfworld": alfworld}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(BENCHMARKS), help="one of the environments")
    only = parser.parse_args().only
    for name in [only] if only else BENCHMARKS:
        result = {"machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}",
                  "times": "CPU milliseconds of one thread", name: BENCHMARKS[name]()}
        file = ROOT / "benchmarks" / "results" / f"envs_{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwrote {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
