"""ALFWorld in envs.py: the interface, the generated houses, the faster engine against the stock one, and EnvPool."""

import gc
import hashlib
import importlib.metadata
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import envs  # noqa: E402
from envs import ALFWORLD_TASKS, EnvPool, InputError, make_env, make_house  # noqa: E402

# Plays 50 random steps in each game (one action in ten is no command) with the packages as they are installed.
PLAY = """
import json, random, sys
def play(env, files):
    for number, file in enumerate(files):
        rng = random.Random(number)
        env.load(file)
        state, done = env.reset(), False
        log = [[state["feedback"], state["admissible_commands"], state["won"], state["extra.gamefile"] == file]]
        for _ in range(50):
            commands = state["admissible_commands"]
            command = rng.choice(commands) if rng.random() < 0.9 else rng.choice(["fly", "", commands[0].upper()])
            state, score, done = env.step(command)
            log.append([command, state["feedback"], state["admissible_commands"], score, done])
            if done:
                break
        yield log
"""
STOCK = PLAY + """
import textworld
from textworld.envs.pddl import PddlEnv
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
env = AlfredInfos(AlfredDemangler(PddlEnv(textworld.EnvInfos())))
for log in play(env, sys.argv[1:]):
    print(json.dumps(log))
"""


def run_python(code, *args, **environ):
    """stdout of a fresh interpreter that can import envs; raises if it fails."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One folder of generated houses for this file; yields it."""
    folder = tmp_path_factory.mktemp("houses")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEXT_ENVS_CACHE", str(folder))
        patch.delenv("ALFWORLD_DATA", raising=False)
        yield folder


@pytest.fixture(scope="module")
def stock_process(cache, tmp_path_factory):
    """The stock engine at play in its own process, meanwhile; (process, game files)."""
    files = []
    for houses, count in (("small", 17), ("full", 3)):
        env = make_env("alfworld", houses=houses)
        files += [str(env._folder(task) / "game.tw-pddl") for task in range(count)]
    data = str(tmp_path_factory.mktemp("alfworld_data"))
    process = subprocess.Popen([sys.executable, "-c", STOCK, *files], env={**os.environ, "ALFWORLD_DATA": data},
                               stdout=subprocess.PIPE, text=True)
    yield process, files
    process.kill()


@pytest.fixture(scope="module")
def env(cache):
    return make_env("alfworld")


def follow_expert(env, task):
    """Play a task as the expert says; returns (actions, last reward, terminated, truncated, info)."""
    obs, info = env.reset(options={"task": task})
    actions = []
    while True:
        actions.append(env.expert_action())
        obs, reward, terminated, truncated, info = env.step(actions[-1])
        if terminated or truncated:
            return actions, reward, terminated, truncated, info


def test_generated_files_are_complete(stock_process):  # first, because it sets the stock engine to work
    for file in map(Path, stock_process[1]):
        game, traj_data = json.loads(file.read_text()), json.loads((file.parent / "traj_data.json").read_text())
        assert game["solvable"] and len(game["walkthrough"]) >= 2 and len(game) == 5
        assert file.parent.name == traj_data["task_id"] and file.parts[-3].startswith(traj_data["task_type"] + "-")
        assert traj_data["turk_annotations"]["anns"][0]["task_desc"] + "." in game["grammar"]


# ---- the interface ----

def test_reset_gives_room_goal_and_info(env):
    obs, info = env.reset(options={"task": 3})
    assert obs.startswith("You are in the middle of a room. Looking quickly around you, you see a ")
    assert "Welcome" not in obs and "task" not in obs and "\n" not in obs
    assert info["goal"].endswith(".") and not info["goal"].startswith("Your task")
    assert info["task_type"] == ALFWORLD_TASKS[3] and info["task_id"].startswith(info["task_type"] + "-")
    assert info["won"] is False and info["valid_action"] is True and info["score"] == 0.0
    assert info["admissible_actions"] == sorted(info["admissible_actions"]) and "look" in info["admissible_actions"]
    assert env.max_return == 1.0 and env.num_tasks == 3000


def test_invalid_action_costs_a_step_and_says_so(env):
    _, before = env.reset(options={"task": 0})
    obs, reward, terminated, truncated, info = env.step("fly to the moon")
    assert (obs, reward, terminated, truncated) == ("Nothing happens.", 0.0, False, False)
    assert info["valid_action"] is False and env.num_steps == 1
    assert info["admissible_actions"] == before["admissible_actions"]
    obs, _, _, _, info = env.step("  LOOK ")
    assert info["valid_action"] is True and obs.startswith("You are in the middle of a room")


def test_changing_the_returned_list_does_not_change_the_environment(env):
    _, info = env.reset(options={"task": 0})
    info["admissible_actions"].clear()
    assert env.step("look")[4]["valid_action"] is True


def test_case25_plain_types_and_task_type_after_step(env):
    actions, reward, terminated, truncated, info = follow_expert(env, 0)
    assert type(reward) is float and terminated is True and truncated is False
    assert info["won"] is True and info["task_type"] == ALFWORLD_TASKS[0] and info["score"] == 1.0
    obs, info = env.reset(options={"task": 0})
    obs, reward, terminated, truncated, info = env.step("look")
    assert type(obs) is str and terminated is False and truncated is False and info["won"] is False
    assert all(type(action) is str for action in info["admissible_actions"])


def test_case29_time_limit_against_real_end(env):
    plan = follow_expert(env, 0)[0]
    limited = make_env("alfworld", max_steps=len(plan))
    assert limited.max_steps == len(plan)
    actions, reward, terminated, truncated, info = follow_expert(limited, 0)
    assert actions == plan and (reward, terminated, truncated, info["won"]) == (1.0, True, False, True)
    limited = make_env("alfworld", max_steps=3)
    limited.reset(options={"task": 0})
    ends = [limited.step("look")[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_step_outside_an_episode_raises():
    env = make_env("alfworld", max_steps=1)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")
    env.reset(options={"task": 0})
    env.step("look")
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")


@pytest.mark.parametrize("options, wrong, message", [
    ({"num_games": 5}, {"task": 5}, "tasks 0 to 4"), ({"max_steps": 0}, {"task": 0}, "max_steps is 0")])
def test_after_a_reset_that_fails_no_episode_runs(options, wrong, message):
    env = make_env("alfworld", **options)
    if "num_games" in options:
        env.reset(options={"task": 0})
    with pytest.raises(InputError, match=message):
        env.reset(options=wrong)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")


def test_seed_picks_the_task(env):
    ids = [env.reset(seed=seed)[1]["task_id"] for seed in (1, 2, 1)]
    assert ids[0] == ids[2] != ids[1]


def test_filter_picks_from_the_same_games(env):
    only = make_env("alfworld", task_types=("pick_cool_then_place_in_recep", "pick_and_place_simple"))
    ids = [only.reset(options={"task": task})[1]["task_id"] for task in range(4)]
    assert ids == [env.reset(options={"task": task})[1]["task_id"] for task in (4, 0, 10, 6)]


@pytest.mark.parametrize("options, message", [
    ({"houses": "tiny"}, "small, full, official"), ({"split": "test"}, "valid_unseen"),
    ({"task_types": ("pick",)}, "look_at_obj_in_light"), ({"num_games": 0}, "at least 1")])
def test_bad_options_are_one_clear_line(options, message):
    with pytest.raises(InputError, match=message) as error:
        make_env("alfworld", **options)
    assert "\n" not in str(error.value)


def test_unknown_task_is_refused():
    env = make_env("alfworld", num_games=5)
    for task in (5, -1):
        with pytest.raises(InputError, match="0 to 4"):
            env.reset(options={"task": task})


# ---- houses ----

@pytest.mark.parametrize("houses, count", [("small", 12), ("full", 6)])
def test_all_types_are_solved_by_the_planner(houses, count):
    env = make_env("alfworld", houses=houses, max_steps=15)
    for task in range(count):
        actions, reward, terminated, _, info = follow_expert(env, task)
        assert info["task_type"] == ALFWORLD_TASKS[task % 6]
        assert reward == 1.0 and terminated, (info["task_id"], actions)
    # Deterministic given the seed, and without touching the global generator.
    state = random.getstate()
    assert follow_expert(env, 5)[0] == follow_expert(env, 5)[0] and random.getstate() == state


def test_planner_finds_back_to_the_way(env):
    obs, info = env.reset(options={"task": 3})
    plan = env.expert_action()
    env.step(next(a for a in info["admissible_actions"] if a.startswith("go to") and a != plan))
    actions = []
    while True:
        actions.append(env.expert_action())
        _, reward, terminated, truncated, _ = env.step(actions[-1])
        if terminated or truncated:
            break
    assert reward == 1.0 and len(actions) <= 9


@pytest.mark.parametrize("houses, count", [("small", 12), ("full", 6)])
def test_the_packages_own_expert_solves_them(houses, count):
    """AlfredExpert as it is: all types but pick_two, where it never learns that it has put the first object down."""
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredExpert, AlfredInfos

    engine = AlfredExpert(AlfredInfos(AlfredDemangler(envs.PddlEnv(envs.pddl_logic.textworld.EnvInfos()))))
    env = make_env("alfworld", houses=houses)
    random.seed(0)
    for task in range(count):
        if ALFWORLD_TASKS[task % 6] == "pick_two_obj_and_place":
            continue
        engine.load(str(env._folder(task) / "game.tw-pddl"))
        state, done = engine.reset(), False
        while not done:  # raises after 200 steps
            state, _, done = engine.step(state["extra.expert_plan"][0])
        assert state["won"]


@pytest.mark.parametrize("houses, receptacles, objects, commands", [
    ("small", (6, 8), (9, 11), (9, 30)), ("full", (25, 30), (30, 38), (30, 60))])
def test_sizes(houses, receptacles, objects, commands):
    for split in envs.SPLITS:
        for index in range(24):
            problem = make_house(houses, split, index, 0)[1]["pddl_problem"]
            for kind, (low, high) in (("receptacle", receptacles), ("object", objects)):
                assert low <= len(re.findall(rf"(?m)^\w+ - {kind}$", problem)) <= high
    env = make_env("alfworld", houses=houses)
    for task in range(6):
        obs, info = env.reset(options={"task": task})
        assert commands[0] <= len(info["admissible_actions"]) <= commands[1]
        assert obs.count(" a ") >= receptacles[0]


def test_splits_share_no_game_and_unseen_no_floor_plan():
    seen = {}
    for split in envs.SPLITS:
        houses = [make_house("small", split, index, 0) for index in range(300)]
        houses = [house for house in houses if house]
        assert len(houses) > 290
        scenes = {traj_data["scene"]["scene_num"] for _, _, traj_data, _ in houses}
        seen[split] = scenes, {game["pddl_problem"] for _, game, _, _ in houses}
        assert len(seen[split][1]) == len(houses)
    assert seen["train"][0] | seen["valid_seen"][0] <= set(envs.constants.TRAIN_SCENE_NUMBERS)
    assert seen["valid_unseen"][0] <= set(envs.constants.TEST_SCENE_NUMBERS)
    assert not set(envs.constants.TRAIN_SCENE_NUMBERS) & set(envs.constants.TEST_SCENE_NUMBERS)
    assert len(set.union(*(problems for _, problems in seen.values()))) == sum(len(p) for _, p in seen.values())
    assert len(seen["train"][0]) > 60 and len(seen["valid_unseen"][0]) > 20


def test_goal_does_not_hold_at_the_start(env):
    for task in range(17):
        _, info = env.reset(options={"task": task})
        assert not info["won"] and len(env.engine.walkthrough) >= 2


def test_case47_games_do_not_depend_on_process_or_hash_seed(tmp_path, cache):
    code = """
import envs, hashlib, sys
for houses, tasks in (("small", (5, 101, 103)), ("full", (2,))):
    env = envs.make_env("alfworld", houses=houses)
    for task in tasks:
        obs, info = env.reset(options={"task": task})
        files = [hashlib.sha256((env._folder(task) / n).read_bytes()).hexdigest() for n in ("game.tw-pddl", "traj_data.json")]
        steps = []
        for _ in range(12):
            steps.append(env.expert_action())
            if env.step(steps[-1])[2]:
                break
        print(info["task_id"], info["goal"], obs, info["admissible_actions"], steps, files)
"""
    outputs = [run_python(code, PYTHONHASHSEED=seed, TEXT_ENVS_CACHE=str(tmp_path / seed)) for seed in ("1", "2")]
    assert outputs[0] == outputs[1] and len(outputs[0].splitlines()) == 4
    names = [make_house("small", split, index, 0)[0] for split in envs.SPLITS for index in range(12)]
    digest = hashlib.sha256(repr(names).encode()).hexdigest()[:16]
    assert digest == "65d74419f07f4711", "the generator now makes other houses: results before and after do not compare"


def test_case47_admissible_actions_have_the_verbs_of_prompts(env):
    verbs = set()
    for task in range(6):
        _, info = env.reset(options={"task": task})
        while True:
            verbs |= {action.split()[0] for action in info["admissible_actions"]}
            _, _, terminated, truncated, info = env.step(env.expert_action())
            if terminated or truncated:
                break
    expected = "go take move open close use heat clean cool examine look inventory help"
    assert verbs - {"slice"} == set(expected.split())


def test_files_load_in_the_packages_own_environment(cache, tmp_path):
    code = """
import json, os, sys
from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv
config = {"env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6], "domain_randomization": False,
                  "expert_type": "handcoded"}, "general": {"training_method": "dqn"},
          "dataset": {"data_path": sys.argv[1], "num_train_games": 0},
          "rl": {"training": {"max_nb_steps_per_episode": 50}}}
games = AlfredTWEnv(config)
env = games.init_env(batch_size=1)
obs, infos = env.reset()
print("RESULT", json.dumps([games.num_games, obs[0], infos["admissible_commands"][0], infos["extra.gamefile"][0]]), flush=True)
os._exit(0)
"""
    folder = tmp_path / "train"
    env = make_env("alfworld")
    for task in range(6):
        source = env._folder(task)
        shutil.copytree(source, folder / source.parent.name / source.name)
    out = run_python(code, folder, ALFWORLD_DATA=str(tmp_path))
    count, obs, commands, file = json.loads(out.split("RESULT", 1)[1])
    assert count == 6 and obs.startswith("-= Welcome to TextWorld, ALFRED! =-")
    tasks = {env.reset(options={"task": task})[1]["task_id"]: task for task in range(6)}
    ours, info = env.reset(options={"task": tasks["/".join(Path(file).parts[-3:-1])]})
    assert ours in obs and info["goal"] in obs and info["admissible_actions"] == commands


def test_cache_that_cannot_be_written_is_one_clear_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TEXT_ENVS_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="TEXT_ENVS_CACHE") as error:
        make_env("alfworld").reset(options={"task": 0})
    assert "\n" not in str(error.value)


def test_damaged_translation_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TEXT_ENVS_CACHE", str(tmp_path))
    game = make_house("small", "train", 0, 0)[1]
    right = envs.translate(game["pddl_domain"], game["pddl_problem"], False)
    file, = tmp_path.rglob("*.gz")
    for damage in (b"", b"not gzip", file.read_bytes()[:-20]):
        file.write_bytes(damage)
        assert envs.translate(game["pddl_domain"], game["pddl_problem"], False) == right
    assert [file.name] == [path.name for path in tmp_path.rglob("*") if path.is_file()]


# ---- official games ----

@pytest.fixture()
def official(tmp_path, monkeypatch):
    """A folder laid out as alfworld-download leaves it, with two games that the package skips."""
    root = tmp_path / "json_2.1.1" / "valid_seen"
    env = make_env("alfworld")
    for task in (4, 2, 0, 5, 1, 3):
        source = env._folder(task)
        shutil.copytree(source, root / source.parent.name / source.name)
    first = sorted(root.iterdir())[0]
    for name, change in (("pick_and_place_simple-AppleSliced-None-Fridge-2", {}),
                         ("pick_and_place_simple-Cup-None-Fridge-2", {"solvable": False})):
        trial = root / name / "trial_T1"
        trial.mkdir(parents=True)
        game = json.loads(next(first.iterdir()).joinpath("game.tw-pddl").read_text())
        (trial / "game.tw-pddl").write_text(json.dumps({**game, **change}))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    return root


def test_case47_official_games_are_sorted_and_filtered(official):
    env = make_env("alfworld", houses="official", split="valid_seen")
    ids = [env.reset(options={"task": task})[1]["task_id"] for task in range(env.num_tasks)]
    assert ids == sorted(ids) and len(ids) == 6 and not any("Sliced" in i or "Cup-None-Fridge-2" in i for i in ids)
    assert make_env("alfworld", houses="official", split="valid_seen", num_games=2).num_tasks == 2
    only = make_env("alfworld", houses="official", split="valid_seen", task_types=("pick_two_obj_and_place",))
    assert only.num_tasks == 1 and follow_expert(only, 0)[1] == 1.0


@pytest.mark.parametrize("empty", [True, False])
def test_official_without_games_names_folder_and_command(tmp_path, monkeypatch, empty):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path if empty else tmp_path / "missing"))
    with pytest.raises(InputError, match="alfworld-download") as error:
        make_env("alfworld", houses="official")
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


# ---- the engine ----

def test_import_and_translation_leave_the_process_as_it_was(tmp_path):
    code = """
import os, sys
sys.argv = ["prog", "--flag"]
import envs
envs.make_env("alfworld").reset(options={"task": 0})
print(sys.argv, sys.stdout is sys.__stdout__, os.environ.get("ALFWORLD_DATA"), os.listdir(os.environ["HOME"]))
"""
    environ = {name: value for name, value in os.environ.items() if name != "ALFWORLD_DATA"}
    environ.update(HOME=str(tmp_path / "home"), TEXT_ENVS_CACHE=str(tmp_path / "cache"), PYTHONPATH=str(ROOT))
    (tmp_path / "home").mkdir()
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == "['prog', '--flag'] True None []\n", done.stderr


def test_case43_no_torch_and_no_cuda():
    code = "import envs, sys; envs.make_env('alfworld').reset(options={'task': 0}); print('torch' in sys.modules)"
    assert run_python(code) == "False\n"


def test_case43_workers_after_cuda_is_in_use():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.zeros(1, device="cuda")
    with EnvPool("alfworld", 2, workers=2) as pool:
        assert len(pool.reset([0, 1], [0, 0])) == 2


@pytest.mark.parametrize("package", ["alfworld", "textworld"])
def test_other_versions_of_the_packages_are_refused(monkeypatch, package):
    stock = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == package else stock(name))
    with pytest.raises(InputError, match=f"{package} 9.9 is installed"):
        envs.patch_engine()


def test_open_step_close_leaks_nothing():
    def usage():
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return len(os.listdir("/proc/self/fd")), len(children), pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    closed = []  # kept, so that close() alone must free what there is to free
    for cycle in range(220):
        if cycle == 20:
            start = usage()
        closed.append(make_env("alfworld"))
        _, info = closed[-1].reset(options={"task": cycle % 6})
        closed[-1].step(info["admissible_actions"][0])
        closed[-1].close()
        closed[-1].close()  # closing twice does no harm
    end = usage()
    assert end[:2] == start[:2] and end[2] - start[2] < 20, (start, end)
    with pytest.raises(RuntimeError, match="reset"):
        closed[-1].step("look")


def test_a_library_of_a_closed_environment_is_as_good_as_new():
    plans = []
    for _ in range(2):
        env, other = make_env("alfworld"), make_env("alfworld")
        assert env.engine.downward_lib is not other.engine.downward_lib
        other.reset(options={"task": 4})
        plans.append(follow_expert(env, 3))
        env.close(), other.close()
    assert plans[0] == plans[1] and plans[0][1] == 1.0


def test_no_growth_over_200_loads(env):
    def usage():
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd"))

    def load(count):
        for number in range(count):
            _, info = env.reset(options={"task": number % 17})
            env.step(info["admissible_actions"][0])

    load(60)
    before = usage()
    load(200)
    after = usage()
    assert after[1] == before[1] and after[0] - before[0] < 4, (before, after)  # MB; a leaked library is 34


# ---- EnvPool ----

def test_group_reset_gives_the_same_game():
    with EnvPool("alfworld", 4) as pool:
        assert (pool.num_tasks, pool.max_return) == (3000, 1.0)
        results = pool.reset([3, 0, 2, 1], [5, 5, 5, 4])
        assert results[0] == results[1] == results[2] != results[3]
        # Members of a group live their own lives.
        acts = [results[0][1]["admissible_actions"][k] for k in (0, 1)]
        first, second = pool.step([3, 2], acts)
        assert first[0] != second[0]
        assert pool.step([0], ["look"])[0][0].startswith("You are in the middle of a room")
        assert pool.step([0], [acts[0]])[0] == first
        assert pool.reset([3, 0, 2, 1], [5, 5, 5, 4]) == results
        assert pool.step([0], ["look"])[0][0].startswith("You are in the middle of a room")


def test_workers_equal_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TEXT_ENVS_CACHE", str(tmp_path))  # the workers make the same new game at the same time
    logs = []
    for workers in (2, 0):
        rng, log = random.Random(0), []
        with EnvPool("alfworld", 3, workers=workers) as pool:
            log.append((pool.num_tasks, pool.max_return))
            for tasks in ([1, 1, 1], [2, 0, 2]):
                results = pool.reset([2, 0, 1], tasks)
                for _ in range(8):
                    log.append(results)
                    results = pool.step([2, 0, 1], [rng.choice(r[-1]["admissible_actions"]) for r in results])
        logs.append(log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("end, message", [(signal.SIGKILL, "died"), (signal.SIGSTOP, "did not answer within 2 s")])
def test_dead_or_hung_worker_is_an_error_that_names_the_task(end, message):
    pool = EnvPool("alfworld", 2, workers=2, timeout=60)
    pool.reset([0, 1], [7, 8])
    pool.timeout = 2
    processes = [process for process, _ in pool.workers]
    os.kill(processes[1].pid, end)
    with pytest.raises(RuntimeError, match=message) as error:
        pool.step([0, 1], ["look", "look"])
    assert "task 8" in str(error.value) and "environment 1" in str(error.value)
    assert not any(process.is_alive() for process in processes)
    pool.close()


def test_workers_do_not_import_the_main_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
print(__name__, flush=True)
from envs import EnvPool
if __name__ == "__main__":
    with EnvPool("alfworld", 2, workers=2) as pool:
        print(len(pool.reset([0, 1], [0, 0])), __file__.endswith("script.py"))
""")
    done = subprocess.run([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                          capture_output=True)
    assert done.stdout == "__main__\n2 True\n", done.stderr


def test_errors_in_a_worker_reach_the_caller():
    with pytest.raises(InputError, match="choose from"):
        EnvPool("alfworld", 2, workers=1, houses="tiny")
    with EnvPool("alfworld", 1, workers=1) as pool:
        with pytest.raises(RuntimeError, match="never reset"):
            pool.step([0], ["look"])
    with EnvPool("alfworld", 2, workers=2, num_games=3) as pool:
        with pytest.raises(InputError, match="no task 3"):
            pool.reset([0, 1], [3, 0])
        with pytest.raises(RuntimeError, match="closed"):
            pool.reset([0, 1], [0, 0])


# ---- the terminal ----

def test_play_in_the_terminal(capsys, monkeypatch):
    answers = iter(["0", "look", "fly", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    first = make_env("alfworld").reset(options={"task": 3})[1]["admissible_actions"][0]
    assert envs.main(["--env", "alfworld", "--task", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("[pick_heat_then_place_in_recep-") and f"0 {first}   1 " in out and f"> {first}\n" in out
    assert "> look\n" in out and "> fly   (not in the list)\nNothing happens." in out and "in 3 actions]" in out
    arguments = "--env alfworld --split valid_unseen --random 1 --expert 2 --seed 0 --max_steps 20 --task_types"
    assert envs.main([*arguments.split(), "pick_cool_then_place_in_recep,pick_and_place_simple"]) == 0
    out = capsys.readouterr().out
    assert out.count("[pick_cool_then_place_in_recep-") == 2 and out.count("[pick_and_place_simple-") == 1
    assert "expert: mean sum of rewards 1 in 2 episodes" in out and "random: mean sum of rewards" in out


@pytest.mark.parametrize("arguments, message", [
    ("--env alfword", "choose from alfworld, babyai, jericho"), ("--env alfworld --houses huge", "small, full, official"),
    ("--env alfworld --task -1", "tasks 0 to 2999"), ("--env alfworld --max_steps 0", "at least 1"),
    ("--env alfworld --max_steps ten", "invalid int"), ("--env alfworld --level GoToDoor", "unrecognized"),
    ("--env babyai --level GoToMoon", "GoToRedBall"), ("--env babyai --task 100000", "tasks 0 to 99999"),
    ("--env jericho --rom_dir /nowhere", "/nowhere.*z-machine-games.*--rom_dir")])
def test_wrong_flags_are_one_line_and_exit_code_2(arguments, message, capsys):
    assert envs.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("envs.py: ") and err.count("\n") == 1 and re.search(message, err), err


def test_the_script_itself_exits_with_2():
    done = subprocess.run([sys.executable, ROOT / "envs.py", "--env", "alfword"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


# ---- the stock engine (last: it plays in its own process meanwhile) ----

def test_outputs_equal_the_stock_engine_character_by_character(stock_process):
    process, files = stock_process
    names = {}
    exec(PLAY, names)
    ours = [json.loads(json.dumps(log)) for log in names["play"](make_env("alfworld").engine, files)]
    theirs = [json.loads(line) for line in process.communicate()[0].splitlines()]
    assert len(theirs) == len(files) == 20
    for file, our_log, their_log in zip(files, ours, theirs):
        for step, (our_line, their_line) in enumerate(zip(our_log, their_log, strict=True)):
            assert our_line == their_line, f"{file}, step {step}"
