"""Text environments behind one interface: ALFWorld, BabyAI and Jericho.

    env = make_env("alfworld", houses="small", split="valid_unseen", max_steps=20)
    obs, info = env.reset(seed=0, options={"task": 3})
    obs, reward, terminated, truncated, info = env.step(info["admissible_actions"][0])

Every environment is a `TextEnv` (gymnasium's `Env` with str observations and str actions) and `EnvPool` steps many of
them together.  This file knows nothing of the two methods that use it.
"""

import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import traceback
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import gymnasium


class InputError(ValueError):
    """The user's input is wrong: the message is one line that says what and how to mend it (scripts exit with 2)."""


class TextEnv(gymnasium.Env):
    """A text environment: observation str, action str.

    Subclasses define `_reset(seed, options) -> (obs, info)` and `_step(action) -> (obs, reward, terminated, info)`;
    this class counts the steps, tells truncation from termination and refuses a step after the end.

    `info` always carries: goal (str), admissible_actions (list of str, stable order), task_id (str), task_type (str),
    won (bool), valid_action (bool: the last action was admissible; True after reset), score (float: sum of rewards).

    Attributes:
        max_steps: actions per episode; the episode is truncated there unless it terminated on that very step.
        num_tasks: how many tasks `options={"task": i}` can pick, 0 <= i < num_tasks.
        max_return: the highest possible sum of rewards, used to scale rewards (PaW's R_max).
    """

    max_steps: int = 50
    num_tasks: int = 1
    max_return: float = 1.0
    _ended = True

    def reset(self, *, seed=None, options=None):
        """Start an episode; `options={"task": i}` picks the task, else the seed does. Returns (obs, info)."""
        super().reset(seed=seed)
        self.num_steps, self._ended = 0, False
        return self._reset(seed, options or {})

    def step(self, action: str):
        """Apply one action; returns (obs, reward, terminated, truncated, info). Raises RuntimeError after the end."""
        if self._ended:
            raise RuntimeError("step() called on an episode that has ended or was never reset: call reset() first")
        obs, reward, terminated, info = self._step(action)
        self.num_steps += 1
        truncated = not terminated and self.num_steps >= self.max_steps
        self._ended = terminated or truncated
        return obs, float(reward), terminated, truncated, info


def make_env(name: str, **options) -> TextEnv:
    """Build one environment by name ("alfworld", "babyai", "jericho"). Raises InputError for an unknown name."""
    if name not in ENVS:
        raise InputError(f"unknown environment '{name}': choose one of {', '.join(sorted(ENVS))}")
    return ENVS[name](**options)


ENVS = {}


class EnvPool:
    """A fixed set of environments of one kind, built once, stepped together, and re-loaded with task after task.

        with EnvPool("alfworld", num_envs=16, houses="small") as pool:
            results = pool.reset(range(16), [3] * 8 + [4] * 8)  # two groups of 8: [(obs, info), ...]
            results = pool.step([0, 5], ["look", "inventory"])  # [(obs, reward, terminated, truncated, info), ...]

    Args:
        name, options: what `make_env` takes.
        num_envs: how many environments; they are called 0 ... num_envs - 1.
        workers: 0 keeps them in this process; N shares them among N spawned processes, which never see CUDA.
        timeout: seconds that a worker may spend on one reset or step.

    A worker that dies, hangs or raises makes reset and step raise a RuntimeError that names its task; the pool is closed.
    """

    def __init__(self, name: str, num_envs: int, workers: int = 0, timeout: float = 300.0, **options):
        self.name, self.timeout, self.tasks = name, timeout, [None] * num_envs
        self.envs, self.workers = [], []
        if workers:
            context = multiprocessing.get_context("spawn")
            for w in range(min(workers, num_envs)):
                here, there = context.Pipe()
                shares = range(w, num_envs, workers)
                process = context.Process(target=serve_envs, args=(there, name, len(shares), options), daemon=True)
                process.start()
                there.close()  # so that a dead worker reads as the end of the pipe
                self.workers.append((process, here))
            sizes = [self._receive(w, "start") for w in range(len(self.workers))]
            self.num_tasks, self.max_return = sizes[0]
        else:
            self.envs = [make_env(name, **options) for _ in range(num_envs)]
            self.num_tasks, self.max_return = self.envs[0].num_tasks, self.envs[0].max_return

    def reset(self, indices, tasks) -> list:
        """Environment indices[k] starts task tasks[k]; a list of (obs, info) in the order of `indices`."""
        for index, task in zip(indices, tasks, strict=True):
            self.tasks[index] = task
        return self._run("reset", indices, tasks)

    def step(self, indices, actions) -> list:
        """Environment indices[k] takes actions[k]; a list of (obs, reward, terminated, truncated, info) in that order."""
        return self._run("step", indices, actions)

    def _run(self, method: str, indices, arguments) -> list:
        calls = list(zip(indices, arguments, strict=True))
        if not self.workers:
            return [call_env(self.envs[index], method, argument) for index, argument in calls]
        shares = [[] for _ in self.workers]
        for k, (index, argument) in enumerate(calls):
            shares[index % len(self.workers)].append((k, index, argument))
        for (process, pipe), share in zip(self.workers, shares):
            try:
                pipe.send([(method, index // len(self.workers), argument) for _, index, argument in share])
            except OSError:
                pass  # it is dead, and _receive says so
        results = [None] * len(calls)
        for w, share in enumerate(shares):
            for k, index, argument in share:
                results[k] = self._receive(w, f"{method}({argument!r}) of environment {index}, task {self.tasks[index]}")
        return results

    def _receive(self, w: int, doing: str):
        """The next answer of worker `w`, which works on `doing`."""
        process, pipe = self.workers[w]
        try:
            if not pipe.poll(self.timeout):
                problem = f"did not answer within {self.timeout:g} s"
            else:
                ok, answer = pipe.recv()
                if ok:
                    return answer
                if isinstance(answer, InputError):
                    raise answer
                problem = f"failed: {answer}"
        except (EOFError, OSError):
            process.join(1)
            problem = f"died (exit code {process.exitcode})"
        self.close()
        raise RuntimeError(f"{self.name} worker {w} {problem}, at {doing}")

    def close(self):
        """End the workers, close the environments."""
        for process, pipe in self.workers:
            process.terminate()
            process.join()
            pipe.close()
        for env in self.envs:
            env.close()
        self.workers, self.envs = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def call_env(env: TextEnv, method: str, argument):
    """reset(argument: task) or step(argument: action).  The task is the seed too, so that equal tasks start equal."""
    return env.reset(seed=argument, options={"task": argument}) if method == "reset" else env.step(argument)


def serve_envs(pipe, name: str, num_envs: int, options: dict):
    """A worker's life: build `num_envs` environments, then answer lists of (method, index, argument) one by one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        envs = [make_env(name, **options) for _ in range(num_envs)]
        pipe.send((True, (envs[0].num_tasks, envs[0].max_return)))
        while True:
            for method, index, argument in pipe.recv():
                pipe.send((True, call_env(envs[index], method, argument)))
    except EOFError:
        pass  # the parent has gone
    except InputError as error:
        pipe.send((False, error))
    except Exception:  # whatever it is, the parent must hear of it
        pipe.send((False, traceback.format_exc()))


# ---- ALFWorld ----
# The engine (PddlEnv, AlfredDemangler, AlfredInfos, the experts) is the textworld and alfworld packages' own.  Here are:
# houses that need no download, the loader of the official ones, and faster versions of a few functions of the engine.

# `import alfworld` creates the folder $ALFWORLD_DATA and sets the variable; the planner's modules parse sys.argv.
USERS_OWN = os.environ.get("ALFWORLD_DATA"), sys.argv
os.environ["ALFWORLD_DATA"], sys.argv = tempfile.gettempdir(), ["translate.py", "domain", "task"]
import alfworld  # noqa: E402
import fast_downward  # noqa: E402
import textworld.logic  # noqa: E402
import textworld.envs.pddl.logic as pddl_logic  # noqa: E402
import textworld.envs.pddl.textgen as textgen  # noqa: E402
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos  # noqa: E402
from alfworld.agents.expert import (HandCodedAgentFailed, HandCodedAgentTimeout, HandCodedTWAgent,  # noqa: E402
                                    handcoded_expert)
from alfworld.gen import constants, goal_library  # noqa: E402
from fast_downward.translate import pddl, timers  # noqa: E402
from fast_downward.translate.pddl_parser import lisp_parser, parsing_functions  # noqa: E402
from textworld.envs.pddl import PddlEnv  # noqa: E402

os.environ["ALFWORLD_DATA"], sys.argv = USERS_OWN[0] or "", USERS_OWN[1]
if USERS_OWN[0] is None:
    del os.environ["ALFWORLD_DATA"]

ALFWORLD_TASKS = ("pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
                  "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place")
SPLITS = {"train": 3000, "valid_seen": 300, "valid_unseen": 300}  # split -> default number of generated games
HOUSE_SIZES = {"small": ((6, 8), (9, 11), 2), "full": ((25, 30), (32, 38), 4)}  # receptacles, objects, most of a type
# What holds what.  Movable receptacles (a plate) are mere objects here, as in the official games.
FITS = {recep: sorted(obj for obj in objs if not obj.endswith("Sliced"))
        for recep, objs in sorted(constants.VAL_RECEPTACLE_OBJECTS.items()) if recep not in constants.MOVABLE_RECEPTACLES}
LAMPS, LAMP_STANDS = ("DeskLamp", "FloorLamp"), ("CoffeeTable", "Desk", "DiningTable", "Dresser", "Shelf", "SideTable")
ALL_ROOMS = ("Bathroom", "Bedroom", "Kitchen", "LivingRoom")
TASK_NEEDS = {  # task -> (rooms, one of these receptacles must be there, ability of the object)
    "pick_and_place_simple": (ALL_ROOMS, (), None),
    "look_at_obj_in_light": (("Bedroom", "LivingRoom"), LAMP_STANDS, None),
    "pick_clean_then_place_in_recep": (("Bathroom", "Kitchen"), ("SinkBasin",), "Cleanable"),
    "pick_heat_then_place_in_recep": (("Kitchen",), ("Microwave",), "Heatable"),
    "pick_cool_then_place_in_recep": (("Kitchen",), ("Fridge",), "Coolable"),
    "pick_two_obj_and_place": (ALL_ROOMS, (), None),
}
PDDL_ESCAPES = (("-", "_minus_"), ("#", "-"), ("|", "_bar_"), ("+", "_plus_"), (".", "_dot_"), (",", "_comma_"))


def thing_type(thing_id: str) -> str:
    """Type of an id as floor plans write it: "Mug|+01.2|..." -> "Mug", "Sink|+01.2|...|SinkBasin" -> "SinkBasin"."""
    parts = thing_id.split("|")
    return parts[-1] if parts[-1].endswith("Basin") else parts[0]


def new_id(rng, kind: str) -> str:
    """An id at a random place: "Mug|+01.20|-00.31|+02.75"."""
    place = "|".join(f"{rng.uniform(-5, 5):+06.2f}" for _ in range(3))
    return f"{kind[:-5]}|{place}|{kind}" if kind.endswith("Basin") else f"{kind}|{place}"


@functools.cache
def floor_plan(scene: int):
    """(ids of the receptacles whose position is known, all types of things that the plan names), from the package."""
    folder = Path(alfworld.__file__).parent / "gen" / "layouts"
    ids = json.loads((folder / f"FloorPlan{scene}-openable.json").read_text())
    types = json.loads((folder / f"FloorPlan{scene}-objects.json").read_text())
    return [i for i in sorted(ids) if thing_type(i) in FITS], sorted(set(types))


def choose_receptacles(rng, scene: int, wants: tuple, count: int) -> list:
    """`count` receptacle ids for a scene: one whose type is in `wants` (if any), then a mix that favours rare types."""
    ids, types = floor_plan(scene)
    known = {thing_type(i) for i in ids}
    ids = ids + [new_id(rng, kind) for kind in types if kind in FITS and kind not in known
                 for _ in range(4 if kind == "StoveBurner" else 1)]
    ids += [new_id(rng, rng.choice(("Cabinet", "Drawer", "Shelf"))) for _ in range(count - len(ids))]
    copies = Counter(map(thing_type, ids))
    ids.sort(key=lambda i: rng.random() ** (copies[thing_type(i)] ** 0.5), reverse=True)
    first = [i for i in ids if thing_type(i) in wants][:1] or [new_id(rng, kind) for kind in wants[-1:]]
    return first + [i for i in ids if i not in first][:count - len(first)]


def choose_target(rng, scene: int, task_type: str, receptacles: list):
    """(object type, goal receptacle type, types of receptacles where the object may start); None if nothing fits."""
    _, wants, ability = TASK_NEEDS[task_type]
    kinds, options = sorted({thing_type(i) for i in receptacles}), {}
    for obj in floor_plan(scene)[1]:
        homes = [kind for kind in kinds if obj in FITS[kind]]
        if ability and obj not in constants.VAL_ACTION_OBJECTS[ability]:
            continue
        if task_type == "look_at_obj_in_light":
            goals = [(None, homes)] if homes else []
        else:
            goals = [(g, [h for h in homes if h != g]) for g in homes if g not in wants and len(homes) > 1]
        if goals:
            options[obj] = goals
    if not options:
        return None
    obj = rng.choice(sorted(options))
    return obj, *rng.choice(options[obj])


def place_objects(rng, scene: int, size: str, task_type: str, receptacles: list, target: tuple):
    """(dict object id -> receptacle id, lamp type or None).  The goal does not hold at the start."""
    _, num_objects, copies = HOUSE_SIZES[size]
    obj, _, homes = target
    types = floor_plan(scene)[1]
    wanted = [obj] * (2 if task_type == "pick_two_obj_and_place" else rng.choice((1, 1, 2)))
    places = {new_id(rng, obj): rng.choice([r for r in receptacles if thing_type(r) in homes]) for obj in wanted}
    lamps = [kind for kind in types if kind in LAMPS] or list(LAMPS[:1] if task_type == "look_at_obj_in_light" else ())
    stands = [r for r in receptacles if thing_type(r) in LAMP_STANDS]
    lamp = rng.choice(lamps) if lamps and stands else None
    if lamp:
        places[new_id(rng, lamp)] = rng.choice(stands)
    others = [(kind, [r for r in receptacles if kind in FITS[thing_type(r)]]) for kind in types if kind != obj]
    others = [(kind, spots) for kind, spots in others if spots] * copies
    rng.shuffle(others)
    for kind, spots in others[:rng.randint(*num_objects) - len(places)]:
        places[new_id(rng, kind)] = rng.choice(spots)
    return places, lamp


def pddl_problem(receptacles: list, places: dict, goal: str) -> str:
    """The house as a problem of the package's PDDL domain; `places` maps object ids to receptacle ids."""
    locations = {recep: f"loc|{n}" for n, recep in enumerate(sorted(receptacles))}
    rtypes = sorted({thing_type(r) for r in receptacles} | {"SinkBasin", "Fridge", "Microwave"})  # the domain names these
    otypes = sorted({thing_type(o) for o in places} | {"Knife", "ButterKnife"})
    things = ["agent1 # agent", "loc|start # location"] + [f"{loc} # location" for loc in locations.values()]
    things += [f"{recep} # receptacle" for recep in receptacles] + [f"{obj} # object" for obj in places]
    things += [f"{kind}Type # rtype" for kind in rtypes] + [f"{kind}Type # otype" for kind in otypes]
    facts = ["(atLocation agent1 loc|start)"]
    facts += [f"(canContain {r}Type {o}Type)" for r in rtypes for o in otypes if o in FITS[r]]
    for recep, loc in locations.items():
        facts += [f"(receptacleType {recep} {thing_type(recep)}Type)", f"(receptacleAtLocation {recep} {loc})"]
        facts += [f"(openable {recep})"] if thing_type(recep) in constants.OPENABLE_CLASS_LIST else []
    for obj, recep in places.items():
        kind = thing_type(obj)
        facts += [f"(objectType {obj} {kind}Type)", f"(inReceptacle {obj} {recep})"]
        facts += [f"(objectAtLocation {obj} {locations[recep]})"]
        facts += [f"({ability.lower()} {obj})" for ability in sorted(constants.VAL_ACTION_OBJECTS)
                  if kind in constants.VAL_ACTION_OBJECTS[ability]]
        facts += [f"(pickupable {obj})"] if kind not in LAMPS else []
        facts += [f"(isReceptacleObject {obj})"] if kind in constants.MOVABLE_RECEPTACLES else []
    text = "\n".join(["(define (problem house)", "(:domain alfred)", "(:objects", *things, ")", "(:init", *facts, ")" + goal])
    return functools.reduce(lambda text, escape: text.replace(*escape), PDDL_ESCAPES, text)


def make_house(size: str, split: str, index: int, attempt: int):
    """Game number `index` of a split, a function of the arguments alone.

    Returns (folder relative to the split, game, traj_data, core): game and traj_data as the official files hold them but
    not proven yet, core the PDDL problem without the things that do not matter; None if the task does not fit the draw.
    """
    rng = random.Random(f"{size} {split} {index} {attempt}")  # a str seed does not depend on PYTHONHASHSEED
    task_type = ALFWORLD_TASKS[index % len(ALFWORLD_TASKS)]
    rooms, wants, _ = TASK_NEEDS[task_type]
    numbers = constants.TEST_SCENE_NUMBERS if split == "valid_unseen" else constants.TRAIN_SCENE_NUMBERS
    room = constants.SCENE_TYPE[rng.choice(rooms)]
    scene = rng.choice([number for number in numbers if number in room])
    receptacles = choose_receptacles(rng, scene, wants, rng.randint(*HOUSE_SIZES[size][0]))
    target = choose_target(rng, scene, task_type, receptacles)
    if target is None:
        return None
    places, lamp = place_objects(rng, scene, size, task_type, receptacles, target)
    toggle = lamp if task_type == "look_at_obj_in_light" else ""
    names = {"obj": target[0], "recep": target[1] or "", "toggle": toggle}
    library = goal_library.gdict[task_type]
    goal = library["pddl"].format(**names)
    problem = pddl_problem(receptacles, places, goal)
    core_places = {thing: recep for thing, recep in places.items() if thing_type(thing) in (target[0], toggle)}
    core = pddl_problem([recep for recep in receptacles if recep in core_places.values()
                         or thing_type(recep) in (target[1], *wants)], core_places, goal)
    sentence = rng.choice(library["templates"]).format(**{key: name.lower() for key, name in names.items()})
    trial = f"trial_{index:05d}_{hashlib.sha256((problem + sentence).encode()).hexdigest()[:8]}"
    data = Path(alfworld.__file__).parent / "data"
    grammar = (data / "alfred.twl2").read_text().replace("UNKNOWN GOAL", sentence)
    game = {"pddl_domain": (data / "alfred.pddl").read_text(), "grammar": grammar, "pddl_problem": problem,
            "solvable": None, "walkthrough": None}
    params = {"object_target": names["obj"], "parent_target": names["recep"], "toggle_target": toggle,
              "mrecep_target": "", "object_sliced": False}
    traj_data = {"task_id": trial, "task_type": task_type, "pddl_params": params,
                 "scene": {"floor_plan": f"FloorPlan{scene}", "scene_num": scene},
                 "turk_annotations": {"anns": [{"task_desc": sentence, "high_descs": []}]}}
    return f"{task_type}-{names['obj']}-None-{names['recep'] or toggle}-{scene}/{trial}", game, traj_data, core


def cache_folder() -> Path:
    """Where generated houses and translated problems are kept: $TEXT_ENVS_CACHE, else houses/ beside this file."""
    return Path(os.environ.get("TEXT_ENVS_CACHE") or Path(__file__).resolve().parent / "houses")


def write_file(path: Path, data: bytes):
    """Write through a temporary name, so that other processes see the whole file or none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    os.replace(part, path)


# The stock engine parses its grammar and copies its whole state again and again: 35 ms a step in a small house, 315 ms in
# a full one.  `patch_engine` puts the functions below in place of the package's; every output stays the same.
PATCHED_VERSIONS = {"alfworld": "0.4.2", "textworld": "1.7.0"}
STOCK = {"pddl2sas": fast_downward.pddl2sas, "parse_grammar": pddl_logic._parse_and_convert,
         "parse_text": textgen._parse_and_convert, "parse_query": textworld.logic.Rule.parse_conjunctive_query,
         "apply": pddl_logic.PddlState.apply, "replan": pddl_logic.PddlState.replan}


def run_pddl2sas(domain: str, problem: str, optimize: bool) -> bytes:
    """fast_downward.pddl2sas, which leaves its own sys.argv behind and takes sys.stdout while it works."""
    argv, stdout = sys.argv, sys.stdout
    try:
        return STOCK["pddl2sas"](domain, problem, optimize=optimize)[1].encode()
    finally:
        sys.argv, sys.stdout = argv, stdout


def translate(domain: str, problem: str, optimize: bool) -> bytes:
    """fast-downward's translation (SAS) of a problem, kept on disk: it takes 30 ms in a small house, 600 in a full one."""
    digest = hashlib.sha256(f"{optimize}\n{domain}\n{problem}".encode()).hexdigest()
    path = cache_folder() / "translated" / digest[:2] / f"{digest}.sas.gz"
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error):
        pass  # not there yet, or damaged: make it
    sas = run_pddl2sas(domain, problem, optimize)
    try:
        write_file(path, gzip.compress(sas, compresslevel=1, mtime=0))
    except OSError:
        pass  # a folder that we may not write to costs time and nothing else
    return sas


class Translation:
    """What the engine derives from (domain, problem) alone: shared by every environment that plays this game.

    Attributes:
        sas: the planning task in fast-downward's format.
        start: copies of the four dictionaries of the first PddlState; None before there is one.
        actions: operator id -> textworld.logic.Action, filled when an operator is first applicable.
        commands: operator id -> command, valid while the things are called `names` (dict id -> name).
    """

    def __init__(self, domain: str, problem: str):
        self.sas = translate(domain, problem, optimize=False)
        self.task = parsing_functions.parse_task(lisp_parser.parse_nested_list(domain.split("\n")),
                                                 lisp_parser.parse_nested_list(problem.split("\n")))
        self.start, self.actions, self.names, self.commands = None, {}, None, {}


@functools.lru_cache(maxsize=64)
def translation(domain: str, problem: str) -> Translation:
    return Translation(domain, problem)


def init_pddl_state(self, downward_lib, pddl_problem, logic):
    """PddlState.__init__ without the translation for the planner, which `replan` makes when it is first asked."""
    game = translation(logic.domain, pddl_problem)
    self.game, self.task, self.sas, self.replan_loaded = game, game.task, game.sas, False
    self._logic, self.downward_lib, self.pddl_problem = logic, downward_lib, pddl_problem
    self._actions = {action.name: action for action in game.task.actions}
    self.name2type = {thing.name: thing.type_name for thing in game.task.objects}
    for kind in game.task.types:
        if kind.name not in logic.types._types:
            logic.types.add(textworld.logic.Type(kind.name, kind.supertype_names))
    if downward_lib.__dict__.get("fresh") is not game:  # load() and reset() build a state each
        downward_lib.load_sas(game.sas)
        downward_lib.fresh = game
    if game.start is None:
        self._facts, self._vars_by_name = defaultdict(set), {}
        self._vars_by_type, self._var_counts = defaultdict(set), Counter()
        for atom in game.task.init:
            if isinstance(atom, pddl.Atom) and atom.predicate != "=":
                arguments = [textworld.logic.Variable(arg, self.name2type[arg]) for arg in atom.args]
                self.add_fact(textworld.logic.Proposition(atom.predicate, arguments))
        atoms = (pddl_logic.Atom * downward_lib.get_state_size())()
        downward_lib.get_state(atoms)
        facts = [atom.get_fact(self.name2type) for atom in atoms]
        self.add_facts(fact for fact in facts if not fact.is_negation)
        game.start = (self._facts, self._vars_by_name, self._vars_by_type, self._var_counts)
    facts, by_name, by_type, counts = game.start
    self._facts = defaultdict(set, {signature: set(props) for signature, props in facts.items()})
    self._vars_by_name, self._var_counts = dict(by_name), counts.copy()
    self._vars_by_type = defaultdict(set, {kind: set(variables) for kind, variables in by_type.items()})


def apply(self, action):
    """PddlState.apply, which notes that the planner's library has left the start."""
    self.downward_lib.fresh = None
    return STOCK["apply"](self, action)


def replan(self, infos):
    """PddlState.replan, which loads the planner's own translation at the first call."""
    if not self.replan_loaded:
        self.downward_lib.load_sas_replan(translate(self._logic.domain, self.pddl_problem, optimize=True))
        self.replan_loaded = True
    return STOCK["replan"](self, infos)


def all_applicable_actions(self):
    """PddlState.all_applicable_actions, which makes the Action of an operator once per game."""
    operators = (fast_downward.Operator * self.downward_lib.get_applicable_operators_count())()
    self.downward_lib.get_applicable_operators(operators)
    self._operators = {operator.id: operator for operator in operators}
    actions = {}  # operators of one name differ in how they fulfil a condition: the first stands for all
    for number, operator in self._operators.items():
        action = self.game.actions.get(number)
        if action is None:
            name, *arguments = operator.name.split()
            action = textworld.logic.Action(name=name, preconditions=[], postconditions=[])
            action.id, action.operator_name = number, operator.name
            action.mapping = {textworld.logic.Placeholder(p.name.strip("?"), p.type_name):
                              textworld.logic.Variable(argument, p.type_name)
                              for p, argument in zip(self._actions[name].parameters, arguments)}
            action.command_template = self._logic.actions[name].template
            action.feedback_rule = self._logic.actions[name].feedback_rule
            self.game.actions[number] = action
        actions.setdefault(action.operator_name, action)
    return list(actions.values())


def gather_infos(self):
    """PddlEnv._gather_infos, which derives each command's text once per game: it depends on names and static facts."""
    state, game, facts = self._pddl_state, self._pddl_state.game, list(self._pddl_state.facts)
    names = {key: info.name for key, info in self._entity_infos.items()}
    if game.names != names:
        game.names, game.commands = names, {}
    actions = state.all_applicable_actions()
    for action in actions:
        if action.id not in game.commands:
            context = {"state": state, "facts": facts, "mapping": action.mapping, "entity_infos": self._entity_infos,
                       "variables": {ph.name: self._entity_infos[var.name] for ph, var in action.mapping.items()}}
            template = self._logic.grammar.derive(action.command_template, context)
            game.commands[action.id] = template.format(**names)
    commands = [game.commands[action.id] for action in actions]
    self.state.update({
        "command_templates": sorted({action.template for action in self._logic.actions.values()}),
        "won": state.check_goal(), "lost": False, "_entity_infos": dict(self._entity_infos), "_facts": facts,
        "last_action": None, "_last_action": self._last_action, "_valid_actions": actions, "_valid_commands": commands,
        "admissible_commands": sorted(set(commands))})
    if self.request_infos.facts:
        self.state["facts"] = [self._get_human_readable_fact(fact) for fact in facts]
    if self.request_infos.moves:
        self.state["moves"] = self._moves
    if self.request_infos.policy_commands:
        self.state["policy_commands"] = state.replan(self._entity_infos)


def light_copy(value):
    """Stands for deepcopy in textgen: copies lists, dictionaries and symbols, shares the things that they hold."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list):
        return [light_copy(item) for item in value]
    twin = object.__new__(type(value))
    twin.__dict__.update(value.__dict__)
    if isinstance(value, textgen.ListSymbol):
        twin.symbol = light_copy(value.symbol)  # derive() writes its context into this one
    return twin


@functools.lru_cache(maxsize=4096)
def parsed_text(text: str, rule_name: str):
    return STOCK["parse_text"](text, rule_name=rule_name)


@functools.lru_cache(maxsize=16)
def parsed_grammar(domain: str, grammar: str):
    """(actions, rules, types) of a grammar; the types are filled by the first PddlState of the domain."""
    return *STOCK["parse_grammar"](grammar, rule_name="pddlStart"), textworld.logic.TypeHierarchy()


def init_game_logic(self, domain, grammar):
    """GameLogic.__init__, which parses a grammar once for all tasks: games differ in their task's sentence alone."""
    before, start, rest = grammar.partition('"Your task is to: ')
    sentence, end, after = rest.partition('"')
    self.domain, self.grammar, self.actions = domain, textgen.ContextSensitiveGrammar(), {}
    actions, rules, self.types = parsed_grammar(domain, before + start + end + after)
    self.actions.update(actions)
    self.grammar.update(rules)
    if start:
        text = json.loads(start + sentence + end)
        self.grammar._rules["task"] = [textgen.ProductionRule("task", textgen._parse_and_convert(text, "symbols"))]


def patch_engine():
    """Replace the functions named here; a second call changes nothing.

    Raises RuntimeError if a package has another version than the one that the replacements were written for.
    """
    for package, version in PATCHED_VERSIONS.items():
        if importlib.metadata.version(package) != version:
            raise RuntimeError(f"{package} {importlib.metadata.version(package)} is installed, but envs.py speeds up "
                               f"{package} {version}: pip install {package}=={version}")
    PddlEnv._gather_infos = gather_infos
    pddl_logic.GameLogic.__init__ = init_game_logic
    pddl_logic.PddlState.__init__ = init_pddl_state
    pddl_logic.PddlState.all_applicable_actions = all_applicable_actions
    pddl_logic.PddlState.apply = apply
    pddl_logic.PddlState.replan = replan
    timers.timing = lambda *_, **__: contextlib.nullcontext()  # the print-outs of times cost 5 ms a game
    textgen.deepcopy = light_copy
    textgen._parse_and_convert = lambda text, rule_name, trace=False: light_copy(parsed_text(text, rule_name))
    textworld.logic.Rule.parse_conjunctive_query = functools.lru_cache(maxsize=1024)(STOCK["parse_query"])


class HandcodedExpert:
    """The package's hand-coded agent, which does not know where things are, with its two faults mended.

    It awaits "put X in/on Y" where the engine says "move X to Y", and it draws from the global random generator.
    """

    def __init__(self, game_file: Path, feedback: str, seed: str):
        self.agent, self.rng, self.action = HandCodedTWAgent(max_steps=200), random.Random(seed), "look"
        self.agent.reset(str(game_file))
        self.agent.observe(feedback)

    def observe(self, state: dict, command: str):
        """Follow one step; afterwards `action` is the next action, None if the agent gave up."""
        command = "put " + command[len("move "):] if command.startswith("move ") else command
        stock_random, handcoded_expert.random = handcoded_expert.random, self.rng
        try:
            action = self.agent.act(state, 0, state["won"], command)
            self.action = action if action in state["admissible_commands"] else "look"
        except (HandCodedAgentFailed, HandCodedAgentTimeout):
            self.action = None
        finally:
            handcoded_expert.random = stock_random


@functools.lru_cache(maxsize=16)
def official_games(root: Path, task_types: tuple) -> tuple:
    """Folders of the downloaded games below `root`, by relative path, without those that the package leaves out too."""
    folders = [file.parent for file in sorted(root.rglob("game.tw-pddl"), key=lambda file: file.relative_to(root).parts)]
    if not folders:
        raise InputError(f"no ALFWorld games in {root}: run alfworld-download, or let ALFWORLD_DATA name the folder that "
                         "holds json_2.1.1")
    chosen = tuple(folder for folder in folders if folder.parent.name.split("-")[0] in task_types
                   and "movable" not in str(folder) and "Sliced" not in str(folder)
                   and json.loads((folder / "game.tw-pddl").read_text()).get("solvable"))
    if not chosen:
        raise InputError(f"no solvable games of the types {', '.join(task_types)} in {root}")
    return chosen


class AlfworldEnv(TextEnv):
    """Household tasks in text (arXiv 2010.03768), in the packages' own engine.  Reward 1 on success, else 0.

    Args:
        houses: "small" (6-8 receptacles) or "full" (25-30, like the official ones), generated when first asked for; or
            "official": those of $ALFWORLD_DATA.
        split: "train", "valid_seen" (other games in the floor plans of train) or "valid_unseen" (other floor plans).
        task_types: names out of ALFWORLD_TASKS; None for all six.  Generated: task i has type i modulo these.
        max_steps: actions per episode.
        num_games: how many tasks; None for SPLITS[split], or for all the official games.
        expert: who answers `expert_action`: "planner" (knows everything, shortest plan) or "handcoded" (the package's
            agent, which has to look for things).
    """

    _folders = {}  # (cache folder, size, split, number of the game) -> its folder; known to all environments

    def __init__(self, houses="small", split="train", task_types=None, max_steps=50, num_games=None, expert="planner"):
        task_types = tuple(task_types or ALFWORLD_TASKS)
        for name, values, allowed in (("houses", [houses], (*HOUSE_SIZES, "official")), ("split", [split], SPLITS),
                                      ("task_types", task_types, ALFWORLD_TASKS),
                                      ("expert", [expert], ("planner", "handcoded"))):
            for value in values:
                if value not in allowed:
                    raise InputError(f"{name}: unknown value '{value}', choose from {', '.join(allowed)}")
        if num_games is not None and num_games < 1:
            raise InputError(f"num_games is {num_games}, but must be at least 1")
        patch_engine()
        self.houses, self.split, self.task_types, self.max_steps = houses, split, task_types, max_steps
        self.num_tasks = num_games or SPLITS[split]
        if houses == "official":
            data = Path(os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()
            self.games = official_games(data / "json_2.1.1" / split, task_types)[:num_games]
            self.num_tasks = len(self.games)
        self.expert = expert
        self.engine = AlfredInfos(AlfredDemangler(PddlEnv(textworld.EnvInfos(facts=expert == "handcoded"))))
        self._loaded = None

    def _index(self, task: int) -> int:
        """Number of a task in the list of all generated games of the split, which a filter of types only picks from."""
        rounds, kind = divmod(task, len(self.task_types))
        return rounds * len(ALFWORLD_TASKS) + ALFWORLD_TASKS.index(self.task_types[kind])

    def tasks_hash(self) -> str:
        """Identifies the list of tasks: equal on two machines if task i is the same game on both, for all i."""
        if self.houses == "official":
            ids = ["/".join(folder.parts[-2:]) for folder in self.games]
        else:  # games are a function of their number: a few stand for all
            ids = [make_house(self.houses, self.split, self._index(task), 0) for task in range(min(12, self.num_tasks))]
        return hashlib.sha256(repr((self.num_tasks, ids)).encode()).hexdigest()[:16]

    def _prove(self, game: dict, core: str):
        """A shortest plan, found without the things that do not matter and played to the end in the engine.

        Returns the list of commands; None if there is no plan or the engine does not call its end a success.
        """
        library = self.engine.downward_lib
        library.fresh = self._loaded = None
        if not library.solve_sas(run_pddl2sas(game["pddl_domain"], core, optimize=True), False):
            return None
        operators = (fast_downward.Operator * library.get_last_plan_length())()
        library.get_last_plan(operators)
        self.engine.load(game)
        state = self.engine.reset()
        names = [operator.name for operator in operators]
        plan = self.engine._pddl_state.plan_to_templated_actions(names, self.engine._entity_infos)
        for command in plan:
            state, _, _ = self.engine.step(command)
        return plan if state["won"] else None

    def _generate(self, root: Path, index: int) -> Path:
        """Folder of game number `index`, which is made, proven and written below `root` if it is not there yet."""
        for attempt in range(100):
            house = make_house(self.houses, self.split, index, attempt)
            if house is None:
                continue
            path, game, traj_data, core = house
            if (root / path / "game.tw-pddl").exists():
                return root / path
            game["walkthrough"] = self._prove(game, core)
            game["solvable"] = bool(game["walkthrough"])
            if not game["solvable"]:
                continue
            try:
                write_file(root / path / "traj_data.json", json.dumps(traj_data, indent=1).encode())
                write_file(root / path / "game.tw-pddl", json.dumps(game).encode())
            except OSError as error:
                raise InputError(f"cannot write houses to {cache_folder()} ({error.strerror}): let TEXT_ENVS_CACHE name "
                                 "a folder that you may write to") from error
            return root / path
        raise RuntimeError(f"no solvable {self.houses} house in 100 attempts: split {self.split}, game {index}")

    def _folder(self, task: int) -> Path:
        if self.houses == "official":
            return self.games[task]
        root, index = cache_folder() / self.houses / self.split, self._index(task)
        if not self._folders.get((root, index), root / "none").exists():
            self._folders[root, index] = self._generate(root, index)
        return self._folders[root, index]

    def _reset(self, seed, options):
        task = options.get("task")
        if task is None:
            task = int(self.np_random.integers(self.num_tasks))
        if not 0 <= task < self.num_tasks:
            raise InputError(f"task {task} does not exist: this environment has tasks 0 to {self.num_tasks - 1}")
        folder = self._folder(task)
        if self._loaded != folder:
            self._loaded = None
            self.engine.load(str(folder / "game.tw-pddl"))
            self._loaded = folder
        self.state = self.engine.reset()
        banner, obs, goal = self.state["feedback"].split("\n\n")
        self._goal, self._task_id = goal.removeprefix("Your task is to: "), "/".join(folder.parts[-2:])
        # Official walkthroughs are the hand-coded expert's, not the planner's.
        self._plan = None if self.houses == "official" else list(self.engine.walkthrough)
        if self.expert == "handcoded":
            self._agent = HandcodedExpert(folder / "game.tw-pddl", self.state["feedback"], f"{seed} {task}")
        return obs, self._info(valid_action=True)

    def _step(self, action):
        command = action.strip().lower()
        valid = command in self.state["admissible_commands"]
        self.state, reward, done = self.engine.step(command)
        self._plan = self._plan[1:] if self._plan and self._plan[0] == command else None
        if self.expert == "handcoded" and not done:
            self._agent.observe(self.state, command)
        return self.state["feedback"], reward, done, self._info(valid)

    def _info(self, valid_action: bool) -> dict:
        won = bool(self.state["won"])
        return {"goal": self._goal, "admissible_actions": list(self.state["admissible_commands"]),
                "task_id": self._task_id, "task_type": self._task_id.split("-")[0], "won": won,
                "valid_action": valid_action, "score": float(won)}

    def expert_action(self):
        """The expert's action in the current state; None if it has none (it gave up, or the episode is over).

        The planner knows the way from the start; off it, it plans again: quick in small houses, seconds in full ones.
        """
        if self.expert == "handcoded":
            return self._agent.action
        if not self._plan:
            self._plan = self.engine._pddl_state.replan(self.engine._entity_infos)
        return self._plan[0] if self._plan else None


ENVS["alfworld"] = AlfworldEnv
