"""BabyAI and Jericho in envs.py: speed, recall of Jericho's valid actions, returns of a random agent and the expert.

    python benchmarks/envs_text.py --rom_dir FOLDER     # writes benchmarks/results/envs_babyai_jericho.json

Times are CPU seconds of one process, so that a busy machine does not change them much.  The floors of the project:
1,000 BabyAI commands/s (mean over the levels), 5 ms for a cached Jericho step on detective, 300 ms for an uncached one
on detective and zork1, no step above 2 s; recall 0.99 (detective, zork1), 0.97 (omniquest, 60 moves), 0.9 (acorncourt).
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs import BABYAI_LEVELS, JERICHO_GAMES, JerichoEnv, make_env  # noqa: E402


def episodes(env, choose, tasks):
    """Play each task; returns {"return", "solved", "actions"}: means over the episodes, and the CPU seconds."""
    total, won, actions, start = 0.0, 0, 0, time.process_time()
    for task in tasks:
        _, info = env.reset(options={"task": task})
        over = False
        while not over and (action := choose(info)) is not None:
            _, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        total, won, actions = total + info["score"], won + info["won"], actions + env.num_steps
    n = len(tasks)
    return {"return": total / n, "solved": won / n, "actions": actions / n}, time.process_time() - start


def babyai(num_episodes):
    """{level: {commands_per_s, random, expert}}; random valid commands, resets included in the speed."""
    figures = {}
    for level in BABYAI_LEVELS:
        env, rng = make_env("babyai", level=level, split="valid_unseen"), random.Random(0)
        env.reset(seed=0)  # builds the level
        chance, seconds = episodes(env, lambda info: rng.choice(info["admissible_actions"]), range(num_episodes))
        expert, _ = episodes(env, lambda info: env.expert_action(), range(num_episodes))
        speed = chance["actions"] * num_episodes / seconds
        figures[level] = {"commands_per_s": speed, "random": chance, "expert": expert}
        print(f"{level:20s} {speed:6.0f} commands/s   random {chance['return']:.2f}   "
              f"expert {expert['return']:.2f}, solved {expert['solved']:.2f}", flush=True)
    mean = sum(figures[level]["commands_per_s"] for level in BABYAI_LEVELS) / len(BABYAI_LEVELS)
    print(f"mean {mean:.0f} commands/s")
    return {"commands_per_s": mean, "levels": figures}


def recall(game, rom_dir):
    """Along the walkthrough: is the next move, or one to the same world state and score, among the valid actions?

    Moves that change neither are left out.  The cap is off; the times of the uncached and then of the cached steps are
    those of this walk.
    """
    env = make_env("jericho", game=game, rom_dir=rom_dir, action_cap=1000, max_steps=1000)
    frotz, times, counts, hits, missed = env._frotz, {"uncached": [], "cached": []}, [], [], []

    def world():
        return frotz.get_world_state_hash(), frotz.get_score()

    for kind in times:  # the second walk finds every state in the cache
        _, info = env.reset()
        over = False
        while not over:
            command, actions, before, at_first = (env.expert_action(), info["admissible_actions"], env.get_state(),
                                                  world())
            start = time.process_time()
            _, _, terminated, truncated, info = env.step(command)
            times[kind].append(1000 * (time.process_time() - start))
            after, goal, over = env.get_state(), world(), terminated or truncated
            if kind == "uncached" and goal != at_first:
                hits.append(False)
                for action in actions:
                    frotz.set_state(before[1])
                    frotz.step(action)
                    hits[-1] = hits[-1] or world() == goal
                missed += [] if hits[-1] else [command]
                counts.append(len(actions))
                env.set_state(after)
    mean = {kind: sum(steps) / len(steps) for kind, steps in times.items()}
    return {"recall": sum(hits) / len(hits), "recall_60": sum(hits[:60]) / len(hits[:60]), "moves": len(hits),
            "missed": missed, "valid_mean": sum(counts) / len(counts), "valid_max": max(counts),
            "uncached_step_ms": mean["uncached"], "uncached_step_ms_max": max(times["uncached"]),
            "cached_step_ms": mean["cached"], "score": info["game_score"]}


def jericho(rom_dir, num_episodes):
    """{game: recall, times, random agent's and walkthrough's mean sum of rewards with the paper's cap and limit}."""
    figures = {}
    for game in [game for game in JERICHO_GAMES if game != "other"]:
        figures[game] = recall(game, rom_dir)
        env, rng, cut = make_env("jericho", game=game, rom_dir=rom_dir), random.Random(0), []

        def choose(info):
            cut.append(info["actions_cut"])
            return rng.choice(info["admissible_actions"])

        chance, seconds = episodes(env, choose, [0] * num_episodes)
        figures[game]["random"] = chance
        figures[game]["expert"], _ = episodes(env, lambda info: env.expert_action(), [0])
        figures[game]["random_step_ms"] = 1000 * seconds / (chance["actions"] * num_episodes)
        figures[game]["share_of_states_cut"] = sum(count > 0 for count in cut) / len(cut)
        figures[game]["states"] = sum(map(len, JerichoEnv._caches.values()))
        print(game, json.dumps(figures[game], indent=1), flush=True)
        JerichoEnv._caches.clear()
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rom_dir", help="folder of Jericho's story files; without it, BabyAI only")
    parser.add_argument("--babyai_episodes", type=int, default=100, help="per level")
    parser.add_argument("--jericho_episodes", type=int, default=5, help="of the random agent")
    flags = parser.parse_args()
    figures = {"babyai": babyai(flags.babyai_episodes)}
    if flags.rom_dir:
        figures["jericho"] = jericho(flags.rom_dir, flags.jericho_episodes)
    out = Path(__file__).parent / "results" / "envs_babyai_jericho.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
