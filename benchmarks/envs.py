"""How fast the environments are, what a random agent and the expert reach, and which moves Jericho's lists miss.

    python benchmarks/envs.py --rom_dir FOLDER   # all of them: benchmarks/results/envs_<name>.json, and envs.md from these
    python benchmarks/envs.py --only alfworld    # about 3 minutes
    python benchmarks/envs.py --only babyai      # about 2 minutes
    python benchmarks/envs.py --only jericho --rom_dir FOLDER   # about 10 minutes; FOLDER holds the story files

Times are CPU times of one thread, so that other programs on the machine matter little.
"""

import argparse, concurrent.futures, json, multiprocessing, os, platform, random, sys, tempfile, time
from pathlib import Path
from statistics import mean, median

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


def episodes(env, choose, tasks) -> dict:
    """Play each task, `choose(info)` giving the actions; means over the episodes."""
    returns, won, actions = [], [], []
    for number, task in enumerate(tasks):
        _, info = env.reset(seed=number if env.num_tasks == 1 and len(tasks) > 1 else None, options={"task": task})
        over = False
        while not over and (action := choose(info)) is not None:
            _, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        returns.append(info["score"]), won.append(info["won"]), actions.append(env.num_steps)
    return {"episodes": len(tasks), "return": round(mean(returns), 3), "solved": round(mean(won), 3),
            "actions": round(mean(actions), 2)}


def randomly(seed: int = 0):
    """A policy that picks any admissible action."""
    rng = random.Random(seed)
    return lambda info: rng.choice(info["admissible_actions"])


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


def alfworld_returns(houses: str, count: int) -> dict:
    """Random actions, and the planner, in unseen houses, 50 actions an episode."""
    env = envs.make_env("alfworld", houses=houses, split="valid_unseen")
    return {"random": episodes(env, randomly(), range(count)),
            "expert": episodes(env, lambda info: env.expert_action(), range(count))}


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
            players = in_fresh_process(alfworld_returns, houses, 60 if houses == "small" else 12)
        rows[houses] = {"stock_ms": stock, "ours_ms": ours, **players}
        print(f"\nALFWorld, {houses} houses: {players}")
        print(f"\nALFWorld, {houses} houses{'stock ms':>35} {'ours ms':>9} {'times':>7}")
        for name, ms in ours.items():
            old = stock.get(name)
            print(f"{name:50}{old or '':>9} {ms:>9} {f'{old / ms:.0f}' if old else '':>7}")
    return rows


# ---- BabyAI ----

def babyai() -> dict:
    """{level: commands per second of random play, resets included (median and best of three runs), returns}."""
    levels = {}
    for level in envs.BABYAI_LEVELS:
        env, speeds = envs.make_env("babyai", level=level, split="valid_unseen"), []
        env.reset(seed=0)  # builds the level
        for _ in range(3):
            start = time.process_time()
            chance = episodes(env, randomly(), range(100))
            speeds.append(100 * chance["actions"] / (time.process_time() - start))
        expert = episodes(env, lambda info: env.expert_action(), range(100))
        levels[level] = {"commands_per_s": round(median(speeds)), "best": round(max(speeds)), "random": chance, "expert": expert}
        print(f"{level:20s} {median(speeds):6.0f} commands/s   random {chance['return']:.2f}   "
              f"expert {expert['return']:.2f}, solved {expert['solved']:.2f}", flush=True)
    speed = {name: round(mean(row[name] for row in levels.values())) for name in ("commands_per_s", "best")}
    print(f"mean of the levels: {speed['commands_per_s']} commands/s")
    return {**speed, "levels": levels}


# ---- Jericho ----

RANDOM_EPISODES = {"detective": 10, "acorncourt": 3, "omniquest": 3, "zork1": 2}


def best_ms(function) -> float:
    """The shortest of five calls, in milliseconds."""
    times = []
    for _ in range(5):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1000 * min(times)


def reaches(frotz, before, actions, command, goal) -> bool:
    """Whether the command, or another action that leads to the same world and score (`goal`), is among the actions."""
    for action in sorted(actions, key=lambda action: action != command):
        frotz.set_state(before)
        frotz.step(action)
        if (frotz.get_world_state_hash(), frotz.get_score()) == goal:
            return True
    return False


def follow_walkthrough(env) -> dict:
    """Recall of the valid actions along the walkthrough, without a cap, and the times of the steps on the way.

    Moves that change neither the world nor the score do not count.  The uncached times are those of the first walk, each
    with the search for valid actions; on the second walk every state is in the cache.
    """
    frotz, hits, missed, counts, cached, beside_hash = env._frotz, [], [], [], [], []
    start = time.process_time()
    _, info = env.reset()
    uncached, over = [time.process_time() - start], False
    while not over:
        command, actions, before = env.expert_action(), info["admissible_actions"], env.get_state()
        world = frotz.get_world_state_hash(), frotz.get_score()
        start = time.process_time()
        _, _, terminated, truncated, info = env.step(command)
        uncached.append(time.process_time() - start)
        after, goal, over = env.get_state(), (frotz.get_world_state_hash(), frotz.get_score()), terminated or truncated
        if goal != world:
            hits.append(reaches(frotz, before[1], actions, command, goal))
            missed += [] if hits[-1] else [command]
            counts.append(len(actions))
            env.set_state(after)
    score = info["game_score"]
    env.reset()
    while (command := env.expert_action()) is not None:
        before = env.get_state()
        cached.append(best_ms(lambda: (env.set_state(before), env.step(command))))
        if not env._ended:
            beside_hash.append(best_ms(env._valid_actions) - best_ms(frotz.get_world_state_hash))
    return {"recall": round(mean(hits), 4), "recall_first_60": round(mean(hits[:60]), 4), "moves": len(hits), "missed": missed,
            "valid_mean": round(mean(counts), 1), "valid_max": max(counts), "score": score,
            "uncached_ms": {"mean": round(1000 * mean(uncached)), "median": round(1000 * median(uncached)),
                            "max": round(1000 * max(uncached))},
            "cached_ms": {"mean": round(mean(cached), 2), "median": round(median(cached), 2), "max": round(max(cached), 2)},
            "list_beside_hash_ms": {"mean": round(mean(beside_hash), 3), "max": round(max(beside_hash), 3)}}


def jericho(rom_dir) -> dict:
    """{game: recall, times, returns with the paper's action cap and step limit}."""
    games = {}
    for game, count in RANDOM_EPISODES.items():
        games[game] = follow_walkthrough(envs.make_env("jericho", game=game, rom_dir=rom_dir, action_cap=1000, max_steps=1000))
        env, cut, choose = envs.make_env("jericho", game=game, rom_dir=rom_dir), [], randomly()
        games[game] |= {
            "random": episodes(env, lambda info: cut.append(info["actions_cut"] > 0) or choose(info), [0] * count),
            "expert": episodes(env, lambda info: env.expert_action(), [0]), "max_return": env.max_return}
        games[game]["share_of_states_cut"] = round(mean(cut), 3)
        print(game, json.dumps(games[game]), flush=True)
        env.close()
        envs.JerichoEnv._caches.clear()
    return games


# ---- The report ----

def table(head: str, rows) -> str:
    lines = [head.split("|"), ["---"] * len(head.split("|")), *rows]
    return "\n".join(f"| {' | '.join(str(cell).strip() for cell in line)} |" for line in lines)


def report(results: dict) -> str:
    """The Markdown tables of whatever was measured: {name: content of envs_<name>.json}."""
    parts = ["# The environments in figures\n\nWritten by `python benchmarks/envs.py --rom_dir FOLDER` (`--only NAME` for one of "
             "them). CPU times of one thread. Random: any admissible action with equal chance."]
    for name, result in results.items():
        rows, machine = result[name], f"Measured on {result['machine']}."
        if name == "alfworld":
            parts.append(f"## ALFWorld\n\n{machine} Return: share of solved games, 50 actions each, unseen houses; the expert is "
                         "the planner. Stock: the packages as they are.")
            parts += [table(f"{houses} houses | stock ms | ours ms | times", (
                (what, row["stock_ms"].get(what, ""), ms, f"{row['stock_ms'][what] / ms:.0f}" if what in row["stock_ms"] else "")
                for what, ms in row["ours_ms"].items())) for houses, row in rows.items()]
            if all("random" in row for row in rows.values()):  # older files lack the returns
                parts.append(table("houses | games | random: return | actions | expert: return | actions", (
                    (houses, row["random"]["episodes"], row["random"]["return"], row["random"]["actions"],
                     row["expert"]["return"], row["expert"]["actions"]) for houses, row in rows.items())))
        if name == "babyai":
            parts.append(f"## BabyAI\n\n{machine} Random valid commands, resets included: {rows['commands_per_s']} commands/s "
                         f"(mean of the 18 levels' medians of three runs; best runs: {rows['best']}). 100 unseen layouts a level, 20 "
                         "commands, no memory; the expert knows the whole grid but may only use the listed commands.")
            parts.append(table("level | commands/s | random: return | solved | expert: return | solved | commands", (
                (level, row["commands_per_s"], row["random"]["return"], row["random"]["solved"], row["expert"]["return"],
                 row["expert"]["solved"], row["expert"]["actions"]) for level, row in rows["levels"].items())))
        if name == "jericho":
            parts.append(f"## Jericho\n\n{machine} A step includes the list of valid actions. Recall: share of the walkthrough's "
                         "moves that are in the list, or another that leads to the same world and score. Returns with the paper's cap "
                         "and step limit, points above the score at the start; the expert is Jericho's walkthrough.")
            parts.append(table("game | cached step, median ms | list at a second visit, beside the hash, ms | uncached step, mean ms | "
                               "largest, s", ((game, row["cached_ms"]["median"], row["list_beside_hash_ms"]["mean"],
                                               row["uncached_ms"]["mean"], row["uncached_ms"]["max"] / 1000)
                                              for game, row in rows.items())))
            parts.append(table("game | recall | first 60 moves | moves | missed | valid actions, mean | max", (
                (game, row["recall"], row["recall_first_60"], row["moves"], ", ".join(row["missed"]) or "none", row["valid_mean"],
                 row["valid_max"]) for game, row in rows.items())))
            parts.append(table("game | random: episodes | return | states with actions cut | expert: return | actions | highest", (
                (game, row["random"]["episodes"], row["random"]["return"], f"{row['share_of_states_cut']:.1%}",
                 row["expert"]["return"], row["expert"]["actions"], row["max_return"]) for game, row in rows.items())))
    return "\n\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("alfworld", "babyai", "jericho"), help="one of the environments")
    parser.add_argument("--rom_dir", help="folder of Jericho's story files (default: the environment variable JERICHO_ROMS)")
    flags = parser.parse_args()
    benchmarks = {"alfworld": alfworld, "babyai": babyai, "jericho": lambda: jericho(flags.rom_dir)}
    folder, results = ROOT / "benchmarks" / "results", {}
    for name, benchmark in benchmarks.items():
        file = folder / f"envs_{name}.json"
        if flags.only in (None, name):
            result = {"machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}",
                      "times": "CPU time of one thread", name: benchmark()}
            file.write_text(json.dumps(result, indent=1) + "\n")
            print(f"\nwrote {file.relative_to(ROOT)}")
        if file.exists():
            results[name] = json.loads(file.read_text())
    (folder / "envs.md").write_text(report(results))


if __name__ == "__main__":
    main()
