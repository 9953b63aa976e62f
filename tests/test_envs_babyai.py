"""BabyAI in envs.py: the 18 levels, what the text shows, what the commands do, splits, states, the terminal."""

import collections
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import envs  # noqa: E402
from envs import BABYAI_ACTION_CAP, BABYAI_LEVELS, InputError, make_env  # noqa: E402


def drive(env, rng):
    """Walk on: a random command, or one of the expert's now and then, so that doors and keys come up."""
    choice = env.expert_action() if rng.random() < 0.3 else None
    return choice or rng.choice(list(env._commands))


def states(level, count, memory="none", seed=0):
    """`count` environments in the middle of an episode of a level."""
    rng, env = random.Random(seed), make_env("babyai", level=level, memory=memory)
    for task in range(count):
        obs, info = env.reset(options={"task": task})
        for _ in range(rng.randrange(8)):
            before = env.get_state()
            obs, _, terminated, truncated, info = env.step(drive(env, rng))
            if terminated or truncated:
                env.set_state(before)
                break
        yield env


@pytest.mark.parametrize("level", BABYAI_LEVELS)
def test_expert_and_bot_solve_every_level(level, capsys):
    from minigrid.utils.baby_ai_bot import BabyAIBot

    env, solved, commands = make_env("babyai", level=level), 0, 0
    for task in range(20):
        obs, info = env.reset(options={"task": task})
        assert info["task_type"] == level and not info["won"] and info["goal"] in obs
        over = False
        while not over:
            obs, reward, terminated, truncated, info = env.step(env.expert_action())
            assert info["valid_action"] and info["goal"] in obs
            over = terminated or truncated
        solved, commands = solved + info["won"], commands + env.num_steps
        assert reward == pytest.approx(1 - 0.9 * env.num_steps / 20 if info["won"] else 0.0)

        env.reset(options={"task": task})  # the same layout for minigrid's own bot, in primitive moves
        bot, move, terminated = BabyAIBot(env._world), None, False
        for _ in range(500):
            move = bot.replan(move)
            _, reward, terminated, _, _ = env._world.step(move)
            if terminated:
                break
        assert terminated and reward > 0, f"the bot finds no solution of {info['task_id']}"
    with capsys.disabled():
        print(f"\n{level}: the expert solves {solved}/20 in {commands / 20:.1f} commands")
    assert solved >= 18


def view_of(env):
    """What minigrid's own 7x7 image shows: Counter of (name, steps ahead, steps to the right)."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT
    from minigrid.minigrid_env import MiniGridEnv

    image, things = MiniGridEnv.gen_obs(env._world)["image"], collections.Counter()
    for column in range(7):
        for row in range(7):
            kind, colour, state = image[column, row]
            if IDX_TO_OBJECT[kind] in ("door", "key", "ball", "box") and (column, row) != (3, 6):
                door = ("open ", "closed ", "locked ")[state] if IDX_TO_OBJECT[kind] == "door" else ""
                things[f"{door}{IDX_TO_COLOR[colour]} {IDX_TO_OBJECT[kind]}", 6 - row, column - 3] += 1
    return things


def things_in(sentence):
    """The same out of the text of an observation."""
    things = collections.Counter()
    for name, place in re.findall(r"\ban? ((?:\w+ )?\w+ (?:door|key|ball|box)) \d+, ([^;.]*)", sentence):
        ahead = re.search(r"(\d+)(?: steps?)? in front", place), re.search(r"(\d+)(?: steps?)? behind", place)
        right = re.search(r"(\d+)(?: steps?)? to the right", place), re.search(r"(\d+)(?: steps?)? to the left", place)
        things[name, *(int((plus or [0, 0])[1]) - int((minus or [0, 0])[1]) for plus, minus in (ahead, right))] += 1
    return things


@pytest.mark.parametrize("level", BABYAI_LEVELS)
def test_text_shows_the_view_and_nothing_else(level):
    for env in states(level, 20):
        text = env._observe(True)[0]
        assert things_in(text) == view_of(env), text
        assert "remember" not in text


def test_map_memory_keeps_what_was_seen():
    rng, more = random.Random(0), 0
    blind, env = make_env("babyai", level="SynthLoc"), make_env("babyai", level="SynthLoc", memory="map")
    for task in range(10):
        ever = {}
        for player in (blind, env):
            obs, info = player.reset(options={"task": task})
        for _ in range(12):
            for cell in env._in_sight:
                ever[cell] = env._known[cell]
            seen, _, remembered = obs.partition(" You remember ")
            assert things_in(seen) == view_of(env)
            assert sum(things_in(remembered).values()) == sum(  # cells seen before, out of sight now
                thing is not None and thing.type != "wall" and cell not in env._in_sight and cell != env._cell
                for cell, thing in ever.items())
            assert set(blind._commands) <= set(env._commands) or info["actions_cut"] or remembered
            more += len(env._commands) > len(blind._commands)
            moves = rng.choice(["turn left", "turn right", "move forward"])
            if moves not in env._commands:
                continue
            blind.step(moves)
            obs, _, terminated, _, info = env.step(moves)
            if terminated:
                break
    assert more > 20


@pytest.mark.parametrize("memory", ("none", "map"))
@pytest.mark.parametrize("level", BABYAI_LEVELS)
def test_every_listed_command_does_what_it_says(level, memory):
    done = collections.Counter()
    for env in states(level, 8, memory):
        before, commands = env.get_state(), list(env._commands)
        assert commands[:2] == ["turn left", "turn right"] and len(set(commands)) == len(commands) <= BABYAI_ACTION_CAP
        for command in commands:
            env.set_state(before)
            verb, _, name = re.fullmatch(r"(.*?)( (\w+ \w+ \d+))?", command).groups()
            thing = env._known[env._objects[name]] if name else None
            cell, heading, held = env._cell, env._heading, env._world.carrying
            front = env._known[cell + heading]
            was_open = verb == "toggle" and front.is_open
            obs, reward, terminated, truncated, info = env.step(command)
            assert info["valid_action"]
            done[verb] += 1
            if terminated:  # the goal came up on the way
                continue
            front_now = env._world.grid.get(*env._world.front_pos)
            if verb in ("turn left", "turn right"):
                assert env._cell == cell and env._heading == heading * {"turn left": -1j, "turn right": 1j}[verb]
            elif verb == "move forward":
                assert env._cell == cell + heading
            elif verb == "go to":
                assert front_now is thing
            elif verb == "pick up":
                assert env._world.carrying is thing and "You carry a" in obs
            elif verb == "drop":
                assert env._world.carrying is None and front_now is held
            elif verb == "toggle":
                assert front.is_open != was_open
            else:
                assert verb in ("go through", "toggle and go through")
                assert env._world.grid.get(*env._world.agent_pos) is thing and thing.is_open
    assert done["go to"] and done["move forward"]


def test_the_cap_cuts_the_farthest_and_counts():
    env, cut = make_env("babyai", level="GoToObjDoor"), []
    for task in range(40):
        _, info = env.reset(options={"task": task})
        assert len(info["admissible_actions"]) <= BABYAI_ACTION_CAP
        assert info["actions_cut"] == 0 or len(info["admissible_actions"]) == BABYAI_ACTION_CAP
        cut.append(info["actions_cut"])
    assert max(cut) > 0


def test_a_blocked_way_stops_the_command():
    from minigrid.core.world_object import Ball

    tried = 0
    for env in states("GoToRedBall", 30):
        for command, moves in env._commands.items():
            if moves[:2] == [envs.FORWARD] * 2 and {envs.LEFT, envs.RIGHT} & set(moves):
                start, heading, blocked = env._cell, env._heading, env._cell + 2 * env._heading
                held = env._world.carrying
                env._world.grid.set(int(blocked.real), int(blocked.imag), Ball("grey"))  # appears after the look
                env.step(command)
                assert (env._cell, env._heading) == (start + heading, heading) and env._world.carrying is held
                tried += 1
                break
    assert tried > 3


def test_an_unknown_command_changes_nothing_but_the_clock():
    env = make_env("babyai", level="PickupLoc")
    first, _ = env.reset(options={"task": 0})
    obs, reward, terminated, truncated, info = env.step("fly to the moon")
    assert (obs, reward, terminated, truncated) == (first, 0.0, False, False)
    assert info["valid_action"] is False and env.num_steps == 1
    assert env.step("  Turn   LEFT ")[4]["valid_action"] is True  # case and spaces do not matter


def test_types_of_everything_that_step_returns():
    env = make_env("babyai", level="all")
    obs, info = env.reset(seed=0)
    step = env.step(info["admissible_actions"][0])
    assert [type(value) for value in step] == [str, float, bool, bool, dict]
    assert {name: type(value) for name, value in step[4].items()} == {
        "goal": str, "admissible_actions": list, "task_id": str, "task_type": str, "won": bool, "valid_action": bool,
        "score": float, "actions_cut": int}


def test_case22_nothing_of_the_last_episode_remains():
    env = make_env("babyai", level="all", memory="map")
    fresh = {task: make_env("babyai", level="all", memory="map").reset(options={"task": task}) for task in range(18)}
    rng = random.Random(0)
    for _ in range(2):
        for task in range(18):
            obs, info = env.reset(options={"task": task})
            assert (obs, info) == fresh[task] and env.num_steps == 0 and info["score"] == 0.0
            for _ in range(5):
                _, _, terminated, _, _ = env.step(drive(env, rng))
                if terminated:
                    break


def test_case27_a_restored_state_replays_exactly():
    carried = 0
    for level in ("PickupLoc", "SynthLoc", "GoToSeqS5R2", "GoToImpUnlock"):
        for env in states(level, 6, memory="map"):
            rng, saved = random.Random(1), pickle.loads(pickle.dumps(env.get_state()))  # a checkpoint may hold it
            carried += env._world.carrying is not None
            runs = []
            for other in (env, make_env("babyai", level=level, memory="map"), env):
                other.set_state(saved)
                plan, run = [], [other._observe(True), other.num_steps]
                for _ in range(6):
                    plan.append(runs[0][1][len(plan)] if runs else drive(other, rng))
                    run.append(other.step(plan[-1]))
                    if run[-1][2] or run[-1][3]:
                        break
                runs.append((run, plan))
            assert runs[0][0] == runs[1][0] == runs[2][0]
    assert carried > 0


def test_case29_limit_success_and_failure():
    env = make_env("babyai", level="PickupDistDebug", max_steps=3)  # there, a wrong pick-up fails the mission
    wrong = right = 0
    for task in range(30):
        assert env.max_steps == 3
        _, info = env.reset(options={"task": task})
        expert = env.expert_action()
        for _ in range(2):
            assert env.step("nothing")[2:4] == (False, False)
        start = env.get_state()
        assert env.step("nothing")[1:4] == (0.0, False, True)  # the limit
        for command in info["admissible_actions"]:
            env.set_state(start)
            _, reward, terminated, truncated, info = env.step(command)
            if command == expert and command.startswith("pick up"):
                assert (reward, terminated, truncated, info["won"]) == (pytest.approx(0.1), True, False, True)
                right += 1
            elif command.startswith("pick up") and terminated and not info["won"]:
                assert (reward, truncated) == (0.0, False)
                wrong += 1
    assert right and wrong
    env = make_env("babyai", level="GoToObjS6")
    env.reset(options={"task": 0})
    while not (expert := env.expert_action()).startswith("go to"):
        env.step(expert)
    while env.num_steps < 9:
        env.step("nothing")
    assert env.step(expert)[1] == pytest.approx(0.55)  # success at command 10 of 20: 1 - 0.9 * 10 / 20
    with pytest.raises(RuntimeError, match="reset"):
        env.step("turn left")


def test_splits_tasks_and_fixed_layouts():
    ids = {}
    for split in ("train", "valid_unseen"):
        env = make_env("babyai", level="all", split=split)
        assert env.num_tasks % 18 == 0 and env.max_return == 1.0 and env.max_steps == 20
        some = [*range(36), env.num_tasks - 1]
        infos = [env.reset(options={"task": task})[1] for task in some]
        assert [info["task_type"] for info in infos[:36]] == list(BABYAI_LEVELS) * 2
        first, num_layouts = envs.BABYAI_LAYOUTS[split]
        assert env.num_tasks == 18 * num_layouts
        ids[split] = set(range(first, first + num_layouts))
        assert all(int(info["task_id"].split("-")[1]) % 10_000_000 in ids[split] for info in infos)
        with pytest.raises(InputError):
            env.reset(options={"task": env.num_tasks})
    assert not ids["train"] & ids["valid_unseen"]
    fixed = [make_env("babyai", level="PickupLoc", split=split, fixed_layouts=True) for split in ids]
    assert [env.num_tasks for env in fixed] == [1, 1] and fixed[0].reset(seed=1) == fixed[1].reset(seed=2)


def test_seeds_draw_tasks():
    env, again = make_env("babyai", level="all"), make_env("babyai", level="all")
    firsts = [env.reset(seed=seed)[1]["task_id"] for seed in range(30)]
    assert firsts == [again.reset(seed=seed)[1]["task_id"] for seed in range(30)] and len(set(firsts)) == 30
    env.reset(seed=0)
    drawn = collections.Counter(env.reset()[1]["task_type"] for _ in range(360))
    assert set(drawn) == set(BABYAI_LEVELS) and max(drawn.values()) < 45  # 20 expected each


@pytest.mark.parametrize("wrong", ({"level": "GoToMoon"}, {"split": "test"}, {"memory": "all"}))
def test_wrong_options_are_one_line(wrong):
    with pytest.raises(InputError) as error:
        make_env("babyai", **wrong)
    assert "\n" not in str(error.value) and next(iter(wrong)) in str(error.value)


def test_case43_and_47_no_torch_and_the_same_in_every_process():
    code = """
import sys, envs
env = envs.make_env("babyai", level="all")
out = [env.reset(options={"task": task}) for task in range(36)]
assert "torch" not in sys.modules
print(out)
"""
    outputs = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True,
                              env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(outputs) == 1 and "GoToRedBall" in outputs.pop()


def test_open_step_close_leaks_nothing():
    def usage():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return len(os.listdir("/proc/self/fd")), len(children), pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    for cycle in range(220):
        if cycle == 20:
            start = usage()
        env = make_env("babyai", level=BABYAI_LEVELS[cycle % 18])
        env.reset(seed=cycle)
        env.step("turn left")
        env.close()
    end = usage()
    assert end[:2] == start[:2] and end[2] - start[2] < 20, (start, end)


def test_play_in_the_terminal(capsys, monkeypatch):
    answers = iter(["1", "move forward", "jump", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    assert envs.main(["--env", "babyai", "--level", "GoToRedBallNoDists", "--task", "3"]) == 0
    out = capsys.readouterr().out
    assert "0 turn left   1 turn right" in out and "> turn right\n" in out and "> move forward" in out
    assert "> jump   (not in the list)" in out and out.count("Goal: go to the red ball.") == 4
    assert envs.main(["--env", "babyai", "--level", "all", "--random", "2", "--expert", "2", "--seed", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("[GoToRedBallGrey-0]") == 2 and out.count("[GoToRedBall-0]") == 2
    assert "random: mean sum of rewards" in out and "expert: mean sum of rewards 0.9" in out
    assert envs.main(["--level", "GoToMoon"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_steps_in_words():
    words = {3 - 2j: "3 steps in front and 2 to the left", -1: "1 step behind", 1j: "1 step to the right",
             1 + 1j: "1 step in front and 1 to the right", 11: "11 steps in front"}
    assert {steps: envs.steps_text(complex(steps)) for steps in words} == words
