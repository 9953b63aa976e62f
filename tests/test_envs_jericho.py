"""Jericho in envs.py: scores, seeds, states, valid actions and their cache.  The story files are in ../shared/roms."""

import os
import pickle
import random
import shutil
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import envs  # noqa: E402
from envs import InputError, JerichoEnv, make_env  # noqa: E402

ROMS = ROOT.parent / "shared" / "roms"
GAMES = {"acorncourt": 30, "detective": 360, "omniquest": 50, "zork1": 350}  # maximum scores


@pytest.fixture(autouse=True)
def roms(monkeypatch):
    """The folder of the story files; an empty cache for every test."""
    if not ROMS.is_dir():
        reason = f"no story files in {ROMS}: see the README on how to get Jericho's games"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    monkeypatch.setenv("JERICHO_ROMS", str(ROMS))
    monkeypatch.setattr(JerichoEnv, "_caches", {})


@pytest.fixture
def untried(monkeypatch):
    """No search for valid actions, for tests that are about other things."""
    monkeypatch.setattr(JerichoEnv, "_find_actions", lambda self, state: ["north", "south", "wait"])


def play(env, commands, seed=None):
    """The transcript: what reset and each step return."""
    transcript = [env.reset(seed=seed)]
    for command in commands:
        transcript.append(env.step(command))
        if transcript[-1][2] or transcript[-1][3]:
            break
    return transcript


@pytest.mark.parametrize("game", GAMES)
def test_case28_walkthrough_reaches_the_maximum_score(game, untried):
    env, rewards = make_env("jericho", game=game), []
    for _ in range(2):  # the second time: reset forgets the last score
        obs, info = env.reset()
        assert info["game_score"] == env.start_score and info["score"] == 0 and info["won"] is False
        rewards, over = [], False
        while not over:
            obs, reward, terminated, truncated, info = env.step(env.expert_action())
            rewards.append(reward)
            over = terminated or truncated
            assert info["score"] == sum(rewards) and env.start_score + sum(rewards) == info["game_score"]
    assert terminated and not truncated and info["won"] and info["admissible_actions"] == []
    assert sum(rewards) + env.start_score == info["game_score"] == GAMES[game]
    assert env.max_return == sum(rewards) == GAMES[game] - (10 if game == "detective" else 0)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")


def test_case28_a_lower_score_is_a_negative_reward(untried):
    env = make_env("jericho", game="zork1")
    env.reset()
    for command in ("north", "north", "up", "get egg", "down", "south", "east", "open window"):
        _, reward, _, _, info = env.step(command)
    score = info["game_score"]
    assert score == 5
    rewards = []
    for command in ("west", "up"):  # a dark attic: going on in the dark is death, which costs 10 points
        rewards.append(env.step(command)[1])
    for _ in range(40):
        _, reward, terminated, _, info = env.step(random.Random(len(rewards)).choice(["down", "up", "east", "north"]))
        rewards.append(reward)
        if min(rewards) < 0 or terminated:
            break
    assert min(rewards) == -10 and score + sum(rewards) == info["game_score"]


def test_case29_limit_victory_and_death(untried):
    env = make_env("jericho", game="acorncourt", max_steps=3)
    assert [step[2:4] for step in play(env, ["look"] * 3)[1:]] == [(False, False), (False, False), (False, True)]
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")
    for steps in (17, 16):  # the walkthrough of 17 commands: the victory on the last one is no truncation
        env = make_env("jericho", game="acorncourt", max_steps=steps)
        walkthrough = [command.lower() for command in env._frotz.get_walkthrough()]
        _, _, terminated, truncated, info = play(env, walkthrough)[-1]
        assert (terminated, truncated, info["won"]) == ((True, False, True) if steps == 17 else (False, True, False))
    env = make_env("jericho", game="omniquest")  # the ledge above the abyss, without wings
    walkthrough = env._frotz.get_walkthrough()
    _, reward, terminated, truncated, info = play(env, [*walkthrough[:-2], "jump"])[-1]
    assert (reward, terminated, truncated, info["won"]) == (0.0, True, False, False)


def test_the_papers_caps_and_limits(untried):
    paper = (("detective", 12, 100), ("omniquest", 25, 100), ("acorncourt", 45, 50), ("zork1", 55, 500))
    for game, cap, steps in paper:
        env = make_env("jericho", game=game)
        assert (env.action_cap, env.max_steps, env.num_tasks) == (cap, steps, 1)
    env = make_env("jericho", game="detective", action_cap=7, max_steps=9)
    assert (env.action_cap, env.max_steps) == (7, 9)


def test_seeds(untried):
    fight = make_env("jericho", game="zork1")._frotz.get_walkthrough()[:27] + ["kill troll with sword"] * 6
    texts = {}
    for seed in (0, 12, 7, 0, None):  # None is 12, the seed of the walkthrough
        transcript = play(make_env("jericho", game="zork1"), fight, seed)
        assert texts.setdefault(seed, transcript) == transcript
    assert texts[12] == texts[None] and texts[0] != texts[12] != texts[7] != texts[0]
    env = make_env("jericho", game="zork1")
    assert play(env, fight, 7) == texts[7] and play(env, fight, 0) == texts[0]  # the seed acts at every reset
    with pytest.raises(gymnasium.error.Error):
        env.reset(seed=-1)
    with pytest.raises(InputError):
        env.reset(options={"task": 1})


def test_several_environments_do_not_disturb_each_other(untried):
    games = ("detective", "zork1", "detective")
    walks = [make_env("jericho", game=game)._frotz.get_walkthrough()[:15] for game in games]
    walks[2] = ["w", "e"] * 7
    alone = [play(make_env("jericho", game=game), walk) for game, walk in zip(games, walks)]
    together = [make_env("jericho", game=game) for game in games]
    mixed = [[env.reset()] for env in together]
    for t in range(14):
        for env, walk, transcript in zip(together, walks, mixed):
            transcript.append(env.step(walk[t]))
    assert mixed == [transcript[:15] for transcript in alone]


@pytest.mark.parametrize("game", ("zork1", "detective"))
def test_case27_a_restored_state_replays_exactly(game, untried):
    env = make_env("jericho", game=game)
    walk = env._frotz.get_walkthrough()
    play(env, walk[:7])
    saved, rest = env.get_state(), [*walk[7:27], "look", "no such thing"]
    saved = pickle.loads(pickle.dumps(saved))  # a checkpoint may hold it
    assert env.num_steps == 7
    runs = []
    for other in (env, make_env("jericho", game=game), env):
        if other is not env:
            other.reset(seed=3)
        other.set_state(saved)
        assert other.num_steps == 7
        runs.append([other.step(command) for command in rest])
        assert other.num_steps == 7 + len(rest)
    assert runs[0] == runs[1] == runs[2]
    assert max(step[1] for step in runs[0]) > 0  # points were made after the save ...
    env.set_state(saved)
    assert env.step("look")[1] == 0.0  # ... and giving them back is no negative reward


def test_case27_the_limit_is_part_of_the_state(untried):
    env = make_env("jericho", game="detective", max_steps=5)
    play(env, ["look"] * 3)
    saved = env.get_state()
    assert [env.step("look")[3] for _ in range(2)] == [False, True]
    env.set_state(saved)
    assert [env.step("look")[3] for _ in range(2)] == [False, True]


def test_recall_along_the_walkthrough_of_detective():
    env, hits, moves, cut = make_env("jericho", game="detective"), 0, 0, []
    obs, info = env.reset()
    frotz, over = env._frotz, False

    def world():
        return frotz.get_world_state_hash(), frotz.get_score()

    while not over:
        actions, before, world_before = info["admissible_actions"], env.get_state(), world()
        assert actions == sorted(set(actions)) and 0 < len(actions) <= 12
        cut.append(info["actions_cut"])
        obs, _, terminated, truncated, info = env.step(env.expert_action())
        after, world_after, over = env.get_state(), world(), terminated or truncated
        if world_after != world_before:
            reached = False
            for action in actions:
                frotz.set_state(before[1])
                frotz.step(action)
                reached = reached or world() == world_after
            hits, moves = hits + reached, moves + 1
            env.set_state(after)
    assert moves == 46 and hits / moves >= 0.99 and sum(cut) == 0


@pytest.mark.parametrize("game, walked, expected", (
    ("acorncourt", 0, {"take ball", "point machine at tree"}),
    ("acorncourt", 5, {"plug bucket with acorn"}),  # "acorns" are seen, and one is used
    ("omniquest", 0, {"east", "examine tree"}),
    ("zork1", 0, {"north", "south", "west", "open mailbox"})))
def test_valid_actions_of_every_game(game, walked, expected):
    env = make_env("jericho", game=game)
    env._find_actions = lambda state: ["wait"]
    play(env, env._frotz.get_walkthrough()[:walked])
    del env._find_actions
    env._cache.clear()
    actions = env.step("look")[4]["admissible_actions"]
    assert expected <= set(actions) and actions == sorted(actions), actions


def test_valid_actions_change_the_world_and_leave_no_trace():
    env = make_env("jericho", game="detective")
    _, info = env.reset()
    before = env.get_state()
    assert len(info["admissible_actions"]) == 4
    for action in info["admissible_actions"]:
        env.set_state(before)
        _, reward, _, _ = env._frotz.step(action)
        assert env._frotz._world_changed() or reward, action
    env.set_state(before)
    transcript = [env.step(command) for command in ("take paper", "west", "take gun")]
    quiet = make_env("jericho", game="detective")
    quiet._find_actions = lambda state: ["wait"]  # the same game without any search for valid actions
    quiet._cache = {}
    quiet.reset()
    assert [step[:4] for step in transcript] == [quiet.step(c)[:4] for c in ("take paper", "west", "take gun")]


def test_looking_for_valid_actions_leaves_the_dice_alone_and_does_not_hang_on_them():
    env, transcripts = make_env("jericho", game="zork1"), []
    fight = ["kill troll with sword", "take axe", "kill troll with sword", "east"]
    env._find_actions = lambda state: ["wait"]
    play(env, env._frotz.get_walkthrough()[:27])
    start, emulator = env.get_state(), env._frotz.get_state()
    transcripts.append([(env.step(command)[:4], env._frotz.get_state()[7]) for command in fight])
    del env._find_actions
    env._cache.clear()
    env.set_state(start)
    transcripts.append([(env.step(command)[:4], env._frotz.get_state()[7]) for command in fight])
    assert transcripts[0] == transcripts[1]
    lists = set()
    for dice in (1, 2, 3, 12345):
        env._frotz.set_state(emulator[:7] + ((dice, 0, 0),) + emulator[8:])
        env._cache.clear()
        lists.add(tuple(env._valid_actions()[0]))
    assert len(lists) == 1


def test_valid_action_and_text():
    env = make_env("jericho", game="detective", list_actions=True, location=True, inventory=True)
    obs, info = env.reset()
    assert obs.endswith("\nValid actions: " + ", ".join(info["admissible_actions"])) and "take paper" in obs
    assert obs.count("<< Chief's office >>") == 2 and "You are carrying nothing." in obs and "\n\n" not in obs
    plain = make_env("jericho", game="detective")
    plain.reset()
    for action, valid in (("  TAKE   Paper ", True), ("sing", False), ("WEST", True)):
        obs, _, _, _, info = env.step(action)
        assert info["valid_action"] is valid, action
        assert obs.startswith(plain.step(action)[0])
    assert env._frotz.get_moves() == plain._frotz.get_moves() and "a piece of white paper" in obs  # the inventory


def test_cap_counts_what_it_cuts():
    env = make_env("jericho", game="acorncourt", action_cap=5)
    _, info = env.reset()
    everything = make_env("jericho", game="acorncourt", action_cap=99).reset()[1]
    assert len(info["admissible_actions"]) == 5 and info["admissible_actions"] == sorted(info["admissible_actions"])
    assert info["actions_cut"] == len(everything["admissible_actions"]) - 5 > 5 and everything["actions_cut"] == 0
    assert set(info["admissible_actions"]) < set(everything["admissible_actions"])


def test_cache_in_memory_and_in_a_file(tmp_path, monkeypatch):
    calls, find = [], JerichoEnv._find_actions
    monkeypatch.setattr(JerichoEnv, "_find_actions", lambda self, state: calls.append(1) or find(self, state))
    file = tmp_path / "valid.jsonl"
    first = play(make_env("jericho", game="detective", cache_file=str(file)), ["w", "e", "w", "e"])
    assert len(calls) == len(file.read_text().splitlines()) == 2  # two rooms, each tried once
    again = play(make_env("jericho", game="detective", cache_file=str(file)), ["w", "e", "w", "e"])
    assert len(calls) == 2 and again == first  # from memory
    with open(file, "a") as lines:
        lines.write('["half a li')  # another process is writing
    JerichoEnv._caches.clear()
    again = play(make_env("jericho", game="detective", cache_file=str(file)), ["w", "e", "w", "e"])
    assert len(calls) == 2 and again == first  # from the file


@pytest.mark.parametrize("command", ("quit", "Q", "save", "restore", "RESTART", "undo", "script", "look. quit",
                                     "north then save", "wait\nquit", "restarting", ", quit"))
def test_commands_outside_the_game_do_not_reach_it(command, untried):
    env = make_env("jericho", game="zork1")
    play(env, ["north"])
    before = env._frotz.get_world_state_hash(), env._frotz.get_moves()
    obs, reward, terminated, truncated, info = env.step(command)
    assert (reward, terminated, truncated, info["valid_action"]) == (0.0, False, False, False) and obs
    assert (env._frotz.get_world_state_hash(), env._frotz.get_moves()) == before and env.num_steps == 2
    assert "forest" in env.step("north")[0].lower()


def test_strange_text_is_survived(untried):
    env = make_env("jericho", game="zork1")
    env.reset()
    warnings.simplefilter("error")  # Jericho warns of a command that is too long for it
    for command in ("", "  ", "ÁÀ \x81 \u4e2d\u6587", "x" * 1000, "a;b;c", "look\x00quit", "\x00", "say \"hello\""):
        obs, reward, terminated, _, info = env.step(command)
        assert isinstance(obs, str) and reward == 0.0 and not terminated and not info["valid_action"]


def test_missing_and_unsupported_files(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="ztuu.*rom_dir") as error:
        make_env("jericho", game="ztuu")
    assert "\n" not in str(error.value)
    monkeypatch.delenv("JERICHO_ROMS")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="JERICHO_ROMS"):
        make_env("jericho")
    assert make_env("jericho", game="detective", rom_dir=str(ROMS)).max_return == 350
    shutil.copy(ROMS / "detective.z5", tmp_path / "detective.z5")
    (tmp_path / "detective.z5").chmod(0o600)
    with open(tmp_path / "detective.z5", "ab") as story:
        story.write(b"\0")
    with pytest.raises(InputError, match="support"):
        make_env("jericho", game="detective", rom_dir=str(tmp_path))


def test_case47_the_same_list_in_every_process():
    code = """
import sys
if sys.argv[1] == "torch":
    import torch  # after it, `import jericho.util` gives ctypes.util
import envs
env = envs.make_env("jericho", game="detective")
print(env.reset()[1]["admissible_actions"], env.step("west")[4]["admissible_actions"])
assert (sys.argv[1] == "torch") == ("torch" in sys.modules) and "spacy" not in sys.modules
"""
    outputs = {subprocess.run([sys.executable, "-c", code, first], cwd=ROOT, check=True, capture_output=True, text=True,
                              env={**os.environ, "PYTHONHASHSEED": seed}).stdout
               for seed, first in (("1", "none"), ("2", "none"), ("3", "torch" if find_spec("torch") else "none"))}
    assert len(outputs) == 1 and "take paper" in outputs.pop()


def test_open_step_close_leaks_nothing():
    def usage():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return len(os.listdir("/proc/self/fd")), len(children), pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    closed = []  # kept, so that close() alone must free the emulator
    for cycle in range(220):
        if cycle == 20:
            start = usage()
        closed.append(make_env("jericho", game="detective"))
        closed[-1].reset()
        closed[-1].step("look")
        closed[-1].close()
    end = usage()
    assert end[:2] == start[:2] and end[2] - start[2] < 20, (start, end)


def test_play_in_the_terminal(capsys, untried):
    arguments = "--env jericho --game detective --expert 1 --random 1 --max_steps 60"
    assert envs.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "[won: 350 of 350 in 51 actions]" in out and "in 60 actions]" in out
    assert envs.main(["--env", "jericho", "--game", "nosuchgame"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("envs.py: no story file nosuchgame") and error.count("\n") == 1
