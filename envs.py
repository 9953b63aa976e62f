"""Text environments behind one interface: ALFWorld, BabyAI and Jericho.

    env = make_env("alfworld", houses="small", split="valid_unseen", max_steps=20)
    obs, info = env.reset(seed=0, options={"task": 3})
    obs, reward, terminated, truncated, info = env.step(info["admissible_actions"][0])

Every environment is a `TextEnv` (gymnasium's `Env`, observation and action are str); `EnvPool` steps many of them together.
"""

import argparse, contextlib, copy, functools, gc, gzip, hashlib, importlib.metadata, inspect, io, itertools, json, math
import multiprocessing, os, random, re, signal, sys, tempfile, traceback, warnings, zlib
from collections import Counter, defaultdict, deque
from pathlib import Path
from unittest import mock

import gymnasium

class InputError(ValueError):
    """The user's input is wrong: the message is one line that says what and how to mend it (scripts exit with 2)."""

class TextEnv(gymnasium.Env):
    """A text environment: observation str, action str.  Subclasses define `_reset(task, seed) -> (obs, info)` and
    `_step(action) -> (obs, reward, terminated, info)`; this class picks the task, counts the steps, tells truncation from
    termination and refuses a step after the end.
    `info` always carries: goal (str), admissible_actions (list of str, stable order), task_id (str), task_type (str),
    won (bool), valid_action (bool: the last action was admissible; True after reset), score (float: sum of rewards).
    """
    max_steps: int = 50  # actions per episode; it is truncated there unless it terminated on that very step
    num_tasks: int = 1  # `options={"task": i}` picks one of them, 0 <= i < num_tasks
    max_return: float = 1.0  # the highest possible sum of rewards, used to scale rewards (PaW's R_max)
    _ended = True

    def reset(self, *, seed=None, options=None):
        """Start an episode; `options={"task": i}` picks the task, else the seed does. Returns (obs, info)."""
        self._ended = True  # until _reset has succeeded
        super().reset(seed=seed)
        task = (options or {}).get("task")
        task = int(self.np_random.integers(self.num_tasks)) if task is None else task
        if not 0 <= task < self.num_tasks:
            raise InputError(f"there is no task {task}: this environment has tasks 0 to {self.num_tasks - 1}")
        if self.max_steps < 1:
            raise InputError(f"max_steps is {self.max_steps}, it must be at least 1")
        result = self._reset(task, seed)
        self.num_steps, self._ended = 0, False
        return result

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
    check_choice("env", name, ENVS)
    return ENVS[name](**options)

def check_choice(name: str, value, allowed):
    """Raises InputError unless the option `name` has one of the allowed values."""
    if value not in allowed:
        raise InputError(f"{name}: unknown value '{value}', choose from {', '.join(allowed)}")

class EnvPool(contextlib.AbstractContextManager):
    """A fixed set of environments of one kind, built once, stepped together, and re-loaded with task after task.

        with EnvPool("alfworld", num_envs=16, houses="small") as pool:
            results = pool.reset(range(16), [3] * 8 + [4] * 8)  # two groups of 8: [(obs, info), ...]
            results = pool.step([0, 5], ["look", "inventory"])  # [(obs, reward, terminated, truncated, info), ...]

    `options` is what `make_env` takes.  With workers=0 all environments live in this process, else they are shared among so
    many spawned processes, which never see CUDA.  A worker that dies, raises, or spends more than `timeout` seconds on one
    reset or step makes these raise a RuntimeError that names its task; the pool closes.
    """
    def __init__(self, name: str, num_envs: int, workers: int = 0, timeout: float = 300.0, **options):
        self.name, self.timeout, self.tasks, self.envs, self.workers = name, timeout, {}, [], []
        if not workers:
            self.envs = [make_env(name, **options) for _ in range(num_envs)]
            self.num_tasks, self.max_return = self.envs[0].num_tasks, self.envs[0].max_return
            return
        context, main = multiprocessing.get_context("spawn"), sys.modules["__main__"]
        for w in range(min(workers, num_envs)):
            here, there = context.Pipe()
            share = there, name, len(range(w, num_envs, workers)), options
            process = context.Process(target=serve_envs, args=share, daemon=True)
            # Without these two names a worker does not import the main script, which may bring torch along.
            with mock.patch.object(main, "__spec__", None), mock.patch.object(main, "__file__", None, create=True):
                process.start()
            there.close()  # so that a dead worker reads as the end of the pipe
            self.workers.append((process, here))
        self.num_tasks, self.max_return = [self._receive(w, "start") for w in range(len(self.workers))][0]

    def reset(self, indices, tasks) -> list:
        """Environment indices[k] starts task tasks[k]; a list of (obs, info) in the order of `indices`."""
        self.tasks |= zip(indices, tasks, strict=True)
        return self._run("reset", indices, tasks)

    def step(self, indices, actions) -> list:
        """Environment indices[k] takes actions[k]; a list of (obs, reward, terminated, truncated, info) in order."""
        return self._run("step", indices, actions)

    def _run(self, method: str, indices, arguments) -> list:
        calls, num_workers = list(zip(indices, arguments, strict=True)), len(self.workers)
        if not self.workers and not self.envs:
            raise RuntimeError("this EnvPool is closed")
        if not self.workers:
            return [call_env(self.envs[index], method, argument) for index, argument in calls]
        for w, (_, pipe) in enumerate(self.workers):
            with contextlib.suppress(OSError):  # it is dead, and _receive says so
                pipe.send([(method, i // num_workers, argument) for i, argument in calls if i % num_workers == w])
        return [self._receive(i % num_workers, f"{method}({argument!r}) of environment {i}, task {self.tasks.get(i)}")
                for i, argument in calls]  # a worker answers its calls in their order

    def _receive(self, w: int, doing: str):
        """The next answer of worker `w`, which works on `doing`."""
        process, pipe = self.workers[w]
        answer, problem = None, f"did not answer within {self.timeout:g} s"
        try:
            if pipe.poll(self.timeout):
                ok, answer = pipe.recv()
                if ok:
                    return answer
                problem = f"failed: {answer}"
        except (EOFError, OSError):
            process.join(1)
            problem = f"died (exit code {process.exitcode})"
        self.close()
        raise answer if isinstance(answer, InputError) else RuntimeError(f"{self.name} worker {w} {problem}, at {doing}")

    def close(self, *_):
        """End the workers, close the environments."""
        for process, pipe in self.workers:
            process.kill()  # a stopped process would not hear terminate()
            process.join()
            pipe.close()
        for env in self.envs:
            env.close()
        self.workers, self.envs = [], []

    __exit__ = close

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
    except Exception as error:  # whatever it is, the parent must hear of it
        pipe.send((False, error if isinstance(error, InputError) else traceback.format_exc()))

# ---- ALFWorld ---------------------------------------------------------------------------------------------------------
# The engine (PddlEnv, AlfredDemangler, AlfredInfos, the expert) is the textworld and alfworld packages' own; here are
# houses that need no download, faster versions of a few functions of the engine, and the environment around it.
# `import alfworld` creates the folder $ALFWORLD_DATA and sets the variable; the planner's modules parse sys.argv.
with mock.patch.dict(os.environ, ALFWORLD_DATA=tempfile.gettempdir()), mock.patch.object(sys, "argv", ["", "", ""]):
    import fast_downward
    import textworld.envs.pddl.logic as pddl_logic
    import textworld.envs.pddl.textgen as textgen
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
    from alfworld.gen import constants, goal_library
    from fast_downward.translate.pddl_parser import lisp_parser, parsing_functions
    from textworld.envs.pddl import PddlEnv
    from textworld.logic import Rule

ROOMS, LAMPS = ("Bathroom", "Bedroom", "Kitchen", "LivingRoom"), ("DeskLamp", "FloorLamp")
LAMP_STANDS = ("CoffeeTable", "Desk", "DiningTable", "Dresser", "Shelf", "SideTable")
TASK_NEEDS = {  # task type -> (rooms, one of these receptacles must be there, what is done to the object)
    "pick_and_place_simple": (ROOMS, (), None),
    "look_at_obj_in_light": (("Bedroom", "LivingRoom"), LAMP_STANDS, None),
    "pick_clean_then_place_in_recep": (("Bathroom", "Kitchen"), ("SinkBasin",), "Cleanable"),
    "pick_heat_then_place_in_recep": (("Kitchen",), ("Microwave",), "Heatable"),
    "pick_cool_then_place_in_recep": (("Kitchen",), ("Fridge",), "Coolable"), "pick_two_obj_and_place": (ROOMS, (), None)}
ALFWORLD_TASKS = tuple(TASK_NEEDS)
SPLITS = {"train": 3000, "valid_seen": 300, "valid_unseen": 300}  # split -> default number of generated games
HOUSE_SIZES = {"small": ((6, 8), (9, 11), 2), "full": ((25, 30), (32, 38), 5)}  # receptacles, objects, most of a type
OBJECT_FACTS = {**constants.VAL_ACTION_OBJECTS, "isReceptacleObject": constants.MOVABLE_RECEPTACLES,
                "pickupable": constants.OBJECTS_SET - set(LAMPS)}
PACKAGE = Path(constants.__file__).parents[1]
# What holds what.  Movable receptacles (a plate) are mere objects here, as in the official games.
FITS = {recep: {obj for obj in objs if not obj.endswith("Sliced")}
        for recep, objs in constants.VAL_RECEPTACLE_OBJECTS.items() if recep not in constants.MOVABLE_RECEPTACLES}

def thing_type(thing_id: str) -> str:
    """Type of an id as floor plans write it: "Mug|+01.2|..." -> "Mug", "Sink|+01.2|...|SinkBasin" -> "SinkBasin"."""
    return thing_id.split("|")[-1 if thing_id.endswith("Basin") else 0]

def new_id(rng, kind: str) -> str:
    """An id at a random place: "Mug|+01.20|-00.31|+02.75"."""
    place = "|".join(f"{rng.uniform(-5, 5):+06.2f}" for _ in range(3))
    return f"{kind[:-5]}|{place}|{kind}" if kind.endswith("Basin") else f"{kind}|{place}"

@functools.cache
def floor_plan(scene: int):
    """(ids of the receptacles whose position is known, all types of things that the plan names), from the package."""
    files = [PACKAGE / f"gen/layouts/FloorPlan{scene}-{part}.json" for part in ("openable", "objects")]
    ids, types = (json.loads(file.read_text()) for file in files)
    return [i for i in sorted(ids) if thing_type(i) in FITS], sorted(set(types))

def choose_receptacles(rng, scene: int, wants: tuple, count: int) -> list:
    """`count` receptacle ids for a scene: one whose type is in `wants` (if any), then a mix that favours rare types."""
    ids, types = floor_plan(scene)
    unplaced = sorted({kind for kind in types if kind in FITS} - {thing_type(i) for i in ids})
    ids = ids + [new_id(rng, kind) for kind in unplaced for _ in range(4 if kind == "StoveBurner" else 1)]
    ids += [new_id(rng, rng.choice(("Cabinet", "Drawer", "Shelf"))) for _ in range(count - len(ids))]
    copies = Counter(map(thing_type, ids))
    ids.sort(key=lambda i: rng.random() ** copies[thing_type(i)] ** 0.5, reverse=True)
    first = [i for i in ids if thing_type(i) in wants][:1] or [new_id(rng, kind) for kind in wants[-1:]]
    return first + [i for i in ids if i not in first][:count - len(first)]

def place_objects(rng, size: str, task_type: str, types: list, receptacles: list):
    """Draw the task and place things so that its goal does not hold yet.  Returns (object type, goal receptacle type or "",
    lamp type, dict object id -> receptacle id); None if the task fits none of the types."""
    _, wants, ability = TASK_NEEDS[task_type]
    spots = {kind: [recep for recep in receptacles if kind in FITS[thing_type(recep)]] for kind in types}
    goals = {}  # object type -> possible choices of (goal receptacle type, receptacles where the object may start)
    for obj in types:
        homes = sorted({thing_type(recep) for recep in spots[obj]} - set(wants))
        homes = [""] if task_type == "look_at_obj_in_light" else homes
        choices = [(goal, starts) for goal in homes if (starts := [r for r in spots[obj] if thing_type(r) != goal])]
        if choices and (not ability or obj in constants.VAL_ACTION_OBJECTS[ability]):
            goals[obj] = choices
    if not goals:
        return None
    obj = rng.choice(list(goals))
    goal, spots[obj] = rng.choice(goals[obj])
    others = [kind for kind in types if kind != obj and spots[kind]] * HOUSE_SIZES[size][2]
    kinds = [obj] * (2 if task_type == "pick_two_obj_and_place" else rng.choice((1, 1, 2)))
    lamp = rng.choice([kind for kind in types if kind in LAMPS] or LAMPS[:1])
    spots[lamp] = [recep for recep in receptacles if thing_type(recep) in LAMP_STANDS]
    if task_type == "look_at_obj_in_light" or (lamp in types and spots[lamp]):
        kinds.append(lamp)
    rng.shuffle(others)
    kinds += others[:rng.randint(*HOUSE_SIZES[size][1]) - len(kinds)]
    return obj, goal, lamp, {new_id(rng, kind): rng.choice(spots[kind]) for kind in kinds}

def pddl_problem(receptacles: list, places: dict, goal: str) -> str:
    """The house as a problem of the package's PDDL domain; `places` maps object ids to receptacle ids."""
    location = {recep: f"loc|{n}" for n, recep in enumerate(receptacles)}
    rtypes = sorted({*map(thing_type, receptacles), "SinkBasin", "Fridge", "Microwave"})
    otypes = sorted({*map(thing_type, places), "Knife", "ButterKnife"})  # the domain names these too
    things = {"agent": ["agent1"], "location": ["loc|start", *location.values()], "receptacle": receptacles,
              "object": places, "rtype": [f"{r}Type" for r in rtypes], "otype": [f"{o}Type" for o in otypes]}
    facts = [f"(canContain {r}Type {o}Type)" for r in rtypes for o in otypes if o in FITS[r]]
    for recep, spot in location.items():
        facts += [f"(receptacleType {recep} {thing_type(recep)}Type)", f"(receptacleAtLocation {recep} {spot})"]
        facts += [f"(openable {recep})"] * (thing_type(recep) in constants.OPENABLE_CLASS_LIST)
    for obj, recep in places.items():
        facts += [f"(inReceptacle {obj} {recep})", f"(objectAtLocation {obj} {location[recep]})"]
        facts += [f"(objectType {obj} {thing_type(obj)}Type)"]
        facts += [f"({fact} {obj})" for fact, kinds in OBJECT_FACTS.items() if thing_type(obj) in kinds]
    text = "\n".join(["(define (problem house)", "(:domain alfred)", "(:objects"]
                     + [f"{thing} # {kind}" for kind, names in things.items() for thing in names]
                     + [")", "(:init", "(atLocation agent1 loc|start)", *facts, ")" + goal])
    for char, escape in (("-", "_minus_"), ("#", "-"), ("|", "_bar_"), ("+", "_plus_"), (".", "_dot_")):
        text = text.replace(char, escape)
    return text

@functools.lru_cache(maxsize=256)
def make_house(size: str, split: str, index: int, attempt: int):
    """Game number `index` of a split, a function of the arguments alone; None if this draw has no room for the task.
    Returns (folder relative to the split, game and traj_data as the official files hold them but not proven yet, the PDDL
    problem without the things that do not matter)."""
    rng = random.Random(f"{size} {split} {index} {attempt}")  # a str as seed does not depend on PYTHONHASHSEED
    task_type = ALFWORLD_TASKS[index % len(ALFWORLD_TASKS)]
    rooms, wants, _ = TASK_NEEDS[task_type]
    scenes = constants.TEST_SCENE_NUMBERS if split == "valid_unseen" else constants.TRAIN_SCENE_NUMBERS
    scene = rng.choice(sorted(set(scenes) & set(constants.SCENE_TYPE[rng.choice(rooms)])))
    receptacles = choose_receptacles(rng, scene, wants, rng.randint(*HOUSE_SIZES[size][0]))
    drawn = place_objects(rng, size, task_type, floor_plan(scene)[1], receptacles)
    if drawn is None:
        return None
    obj, recep, lamp, places = drawn
    toggle = lamp if task_type == "look_at_obj_in_light" else ""
    goal = goal_library.gdict[task_type]["pddl"].format(obj=obj, recep=recep, toggle=toggle)
    sentence = rng.choice(goal_library.gdict[task_type]["templates"]).format(obj=obj, recep=recep, toggle=toggle).lower()
    core = {thing: spot for thing, spot in places.items() if thing_type(thing) in (obj, toggle)}
    core = pddl_problem([r for r in receptacles if r in core.values() or thing_type(r) in (recep, *wants)], core, goal)
    domain, grammar = ((PACKAGE / "data" / name).read_text() for name in ("alfred.pddl", "alfred.twl2"))
    game = {"pddl_domain": domain, "pddl_problem": pddl_problem(receptacles, places, goal),
            "grammar": grammar.replace("UNKNOWN GOAL", sentence)}
    trial = f"trial_{index:05d}_{hashlib.sha256(json.dumps(game).encode()).hexdigest()[:8]}"
    traj_data = {"task_id": trial, "task_type": task_type, "pddl_params": {
        "object_target": obj, "parent_target": recep, "toggle_target": toggle, "mrecep_target": "",
        "object_sliced": False}, "scene": {"floor_plan": f"FloorPlan{scene}", "scene_num": scene},
        "turk_annotations": {"anns": [{"task_desc": sentence, "high_descs": []}]}}
    return f"{task_type}-{obj}-None-{recep or toggle}-{scene}/{trial}", game, traj_data, core

def cache_folder() -> Path:
    """Where generated houses and translated problems are kept: $TEXT_ENVS_CACHE, else houses/ beside this file."""
    return Path(os.environ.get("TEXT_ENVS_CACHE") or Path(__file__).resolve().parent / "houses")

def write_file(path: Path, data: bytes):
    """Write under a temporary name, then rename: other processes see the whole file or none.  Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    part.write_bytes(data)
    os.replace(part, path)

# The stock engine parses its grammar and copies its whole state again and again: 25 ms a step in a small house, 80 in a
# full one.  `patch_engine` puts the functions below in place of the package's; every output stays the same.
STOCK_PDDL2SAS, STOCK_DERIVE = fast_downward.pddl2sas, textgen.ContextSensitiveGrammar.derive
STOCK_INIT_STATE, STOCK_REPLAN = pddl_logic.PddlState.__init__, pddl_logic.PddlState.replan
STOCK_LOAD_LIB, spare_libraries = fast_downward.load_lib, []  # a copy for each environment; unloading one is a crash at exit
parse_text = functools.lru_cache(maxsize=4096)(textgen._parse_and_convert)
parse_grammar = functools.lru_cache(maxsize=16)(pddl_logic._parse_and_convert)
parse_query = functools.lru_cache(maxsize=1024)(Rule.parse_conjunctive_query)
game_memo = functools.lru_cache(maxsize=64)(lambda domain, problem: {"commands": {}})  # shared by all who play the game

def translate(domain: str, problem: str, optimize: bool) -> bytes:
    """fast-downward's translation (SAS) of a problem, kept on disk: it takes 30 ms in a small house, 300 in a full."""
    digest = hashlib.sha256(f"{optimize}\n{domain}\n{problem}".encode()).hexdigest()
    path = cache_folder() / "translated" / digest[:2] / f"{digest}.sas.gz"
    with contextlib.suppress(OSError, EOFError, zlib.error):  # it is not there yet, or damaged
        if sas := gzip.decompress(path.read_bytes()):
            return sas
    collecting = gc.isenabled()
    gc.disable()  # garbage collection takes a quarter of the time
    try:
        with mock.patch.object(sys, "argv"), mock.patch.object(sys, "stdout"):  # the translator puts its own there
            sas = STOCK_PDDL2SAS(domain, problem, optimize=optimize)[1].encode()
    finally:
        if collecting:
            gc.enable()
    with contextlib.suppress(OSError):  # a folder that we may not write to costs time and nothing else
        write_file(path, gzip.compress(sas, compresslevel=1, mtime=0))
    return sas

def pddl2sas(domain: str, problem: str, verbose=False, optimize=False):
    """fast_downward.pddl2sas from the disk; the planner's own translation (optimize) is left to `replan`."""
    if optimize:
        return None, ""
    parsed = [lisp_parser.parse_nested_list(text.split("\n")) for text in (domain, problem)]
    return parsing_functions.parse_task(*parsed), translate(domain, problem, optimize=False).decode()

def init_state(self, downward_lib, pddl_problem, logic):
    """PddlState.__init__, which works out the facts of a game once and copies them for each later state."""
    memo = game_memo(logic.domain, pddl_problem)
    if "start" not in memo:
        STOCK_INIT_STATE(self, downward_lib, pddl_problem, logic)
        memo["start"] = {**vars(self), "memo": memo, "sas": self.sas.encode()}
    else:
        downward_lib.load_sas(memo["start"]["sas"])
    logic.types = memo["start"]["_logic"].types
    vars(self).update(memo["start"], downward_lib=downward_lib, _logic=logic)
    self._vars_by_name, self._var_counts = dict(self._vars_by_name), self._var_counts.copy()
    self._facts = defaultdict(set, {signature: set(facts) for signature, facts in self._facts.items()})
    self._vars_by_type = defaultdict(set, {kind: set(things) for kind, things in self._vars_by_type.items()})

def replan(self, infos):
    """PddlState.replan, which hands the planner its own translation now that it is needed."""
    self.downward_lib.load_sas_replan(translate(self._logic.domain, self.pddl_problem, optimize=True))
    return STOCK_REPLAN(self, infos)

def derive(self, start: str, context: dict) -> str:
    """ContextSensitiveGrammar.derive; a command (no "#") depends on names and static facts alone: once per game."""
    if "#" in start:
        return STOCK_DERIVE(self, start, context)
    commands = context["state"].memo["commands"]
    key = (start, *(context["entity_infos"][thing.name].name for thing in context["mapping"].values()))
    if key not in commands:
        commands[key] = STOCK_DERIVE(self, start, context)
    return commands[key]

def light_copy(value):
    """deepcopy for textgen's symbols, lists and dictionaries, which shares the things that they hold."""
    if isinstance(value, list):
        return [light_copy(item) for item in value]
    twin = copy.copy(value)
    if isinstance(value, textgen.ListSymbol):
        twin.symbol = copy.copy(value.symbol)  # its derive() writes into this one
    return twin

def init_logic(self, domain, grammar):
    """GameLogic.__init__, which parses a grammar once for all games that differ in their task's sentence alone."""
    before, start, rest = grammar.partition('"Your task is to: ')
    sentence, end, after = rest.partition('"')
    self.actions, rules = parse_grammar(before + start + end + after, rule_name="pddlStart")
    self.domain, self.types = domain, pddl_logic.textworld.logic.TypeHierarchy()
    self.grammar = textgen.ContextSensitiveGrammar()
    self.grammar.update(rules)
    if start:
        task = textgen._parse_and_convert(json.loads(start + sentence + end), rule_name="symbols")
        self.grammar._rules["task"] = [textgen.ProductionRule("task", task)]

def patch_engine():
    """Replace the functions named here, in this process.  Raises InputError for versions that it was not made for."""
    for package, version in (("alfworld", "0.4.2"), ("textworld", "1.7.0")):
        found = importlib.metadata.version(package)
        if found != version:
            raise InputError(f"{package} {found} is installed, not {version}: pip install {package}=={version}")
    fast_downward.pddl2sas, Rule.parse_conjunctive_query = pddl2sas, parse_query
    fast_downward.load_lib = lambda: spare_libraries.pop() if spare_libraries else STOCK_LOAD_LIB()
    pddl_logic.PddlState.__init__, pddl_logic.PddlState.replan = init_state, replan
    pddl_logic.GameLogic.__init__, textgen.ContextSensitiveGrammar.derive = init_logic, derive
    textgen.deepcopy, textgen._parse_and_convert = light_copy, lambda *args, **kw: light_copy(parse_text(*args, **kw))
    pddl_logic.PddlState.facts = property(lambda self: list(itertools.chain.from_iterable(self._facts.values())))
    # The engine sorts these facts with slow comparisons, of which few are needed when they are in order already.
    pddl_logic.PddlState.facts_with_signature = lambda self, of: sorted(self._facts.get(of, ()), key=lambda f: f.names)

@functools.lru_cache(maxsize=16)
def official_games(root: Path, task_types: tuple) -> list:
    """Folders of the downloaded games below `root`, sorted; those that the package leaves out are left out here too."""
    files = sorted(root.rglob("game.tw-pddl"), key=lambda file: file.parts)
    games = [file.parent for file in files if file.parts[-3].split("-")[0] in task_types
             and "Sliced" not in file.parts[-3] and json.loads(file.read_text()).get("solvable")]
    if not games:
        raise InputError(f"no games of the types {', '.join(task_types)} in {root}: run alfworld-download, or let "
                         "ALFWORLD_DATA name the folder that holds json_2.1.1")
    return games

class AlfworldEnv(TextEnv):
    """Household tasks in text (arXiv 2010.03768), in the packages' own engine.  Reward 1 on success, else 0.
    houses: "small" (6-8 receptacles), "full" (25-30, as in the official games) or "official" ($ALFWORLD_DATA).
    split: "train", "valid_seen" (other games in the floor plans of train) or "valid_unseen" (other floor plans).
    task_types: names out of ALFWORLD_TASKS, a list or one str with commas, empty for all six.  In generated houses task i
        has type i modulo these.
    num_games: how many tasks; None for SPLITS[split], or for all the official games.
    """
    def __init__(self, houses: str = "small", split: str = "train", task_types: str = "", max_steps: int = 50,
                 num_games: int = None):
        task_types = task_types.split(",") if isinstance(task_types, str) and task_types else task_types
        task_types = tuple(task_types or ALFWORLD_TASKS)
        check_choice("houses", houses, (*HOUSE_SIZES, "official"))
        check_choice("split", split, SPLITS)
        for task_type in task_types:
            check_choice("task_types", task_type, ALFWORLD_TASKS)
        if num_games is not None and num_games < 1:
            raise InputError(f"num_games is {num_games}, it must be at least 1")
        patch_engine()
        self.houses, self.split, self.task_types, self.max_steps = houses, split, task_types, max_steps
        self.num_tasks, self._games = num_games or SPLITS[split], None
        if houses == "official":
            data = Path(os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()
            self._games = official_games(data / "json_2.1.1" / split, task_types)[:num_games]
            self.num_tasks = len(self._games)
        self.engine = AlfredInfos(AlfredDemangler(PddlEnv(pddl_logic.textworld.EnvInfos())))

    def _prove(self, game: dict, core: str):
        """Commands of a shortest plan for `core`, which the engine calls a success in the whole house; else None."""
        library = self.engine.downward_lib
        if not library.solve_sas(translate(game["pddl_domain"], core, optimize=True), False):
            return None
        operators = (fast_downward.Operator * library.get_last_plan_length())()
        library.get_last_plan(operators)
        self.engine.load(game)
        state, names = self.engine.reset(), [operator.name for operator in operators]
        plan = self.engine._pddl_state.plan_to_templated_actions(names, self.engine._entity_infos)
        for command in plan:
            state, _, _ = self.engine.step(command)
        return plan if state["won"] else None

    def _folder(self, task: int) -> Path:
        """Folder of a task's game; a generated one is proven, and written, if it is not there yet."""
        if self._games:
            return self._games[task]
        rounds, kind = divmod(task, len(self.task_types))  # a filter of types picks from the same list of games
        index = rounds * len(ALFWORLD_TASKS) + ALFWORLD_TASKS.index(self.task_types[kind])
        for attempt in range(100):
            path, game, traj_data, core = make_house(self.houses, self.split, index, attempt) or (None,) * 4
            folder = cache_folder() / self.houses / self.split / (path or "none")
            if (folder / "game.tw-pddl").exists():
                return folder
            if path and (plan := self._prove(game, core)):
                game = {**game, "solvable": True, "walkthrough": plan}
                try:
                    write_file(folder / "traj_data.json", json.dumps(traj_data).encode())
                    write_file(folder / "game.tw-pddl", json.dumps(game).encode())
                except OSError as error:
                    raise InputError(f"cannot write {folder} ({error.strerror}): set TEXT_ENVS_CACHE to another folder")
                return folder
        raise RuntimeError(f"no solvable {self.houses} house in 100 attempts: split {self.split}, game {index}")

    def _reset(self, task, seed):
        folder = self._folder(task)
        self.engine.load(str(folder / "game.tw-pddl"))
        self.state, self._task_id = self.engine.reset(), "/".join(folder.parts[-2:])
        _, obs, goal = self.state["feedback"].split("\n\n")
        self._goal = goal.removeprefix("Your task is to: ")
        self._plan = None if self._games else self.engine.walkthrough  # the official ones are the hand-coded expert's
        return obs, self._info(valid_action=True)

    def _step(self, action):
        command = action.strip().lower()
        valid = command in self.state["admissible_commands"]
        self.state, reward, done = self.engine.step(command)
        self._plan = self._plan[1:] if self._plan and self._plan[0] == command else None
        return self.state["feedback"], reward, done, self._info(valid)

    def _info(self, valid_action: bool) -> dict:
        return {"goal": self._goal, "admissible_actions": list(self.state["admissible_commands"]),
                "task_id": self._task_id, "task_type": self._task_id.split("-")[0], "won": bool(self.state["won"]),
                "valid_action": valid_action, "score": float(self.state["won"])}

    def expert_action(self):
        """The next action of a shortest plan, before the end.  The planner knows everything; off the plan it plans again,
        which is quick in small houses and takes seconds or more in full ones."""
        if not self._plan:
            self._plan = self.engine._pddl_state.replan(self.engine._entity_infos)
        return self._plan[0] if self._plan else None

    def close(self):
        """Leave the planner's library to the next environment; this one cannot be used afterwards."""
        spare_libraries.extend([self.engine.downward_lib] if self.engine else [])
        self.engine, self._ended = None, True

# ---- BabyAI -----------------------------------------------------------------------------------------------------------
BABYAI_LEVELS = tuple(  # PriorZero's 18, by the paper's names
    "GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObjS6 GoToLocalS8N7 GoToObjMazeS7 GoToImpUnlock GoToSeqS5R2 "
    "GoToRedBlueBall GoToDoor GoToObjDoor PickupLoc PickupDistDebug PickupAbove ActionObjDoor FindObjS7 "
    "OneRoomS20 SynthLoc".split())
BABYAI_LAYOUTS = {"train": (0, 100_000), "valid_unseen": (1_000_000, 1_000)}  # split -> (first seed, seeds per level)
BABYAI_ACTION_CAP = 20
LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE, DONE = range(7)  # minigrid's primitive moves; DONE changes nothing
TURNS = (1, 1j, -1, -1j)  # a cell is x + y j, y growing downwards, and a heading is one of these: times 1j turns right

class BabyAIEnv(TextEnv):
    """BabyAI in words: the agent's 7x7 view as a sentence, high-level commands as actions (PriorZero, appendix).
    Task i is level i % L (L = 1, or 18 for "all") on the layout of seed first_seed + i // L.  Train and valid_unseen have
    other seeds (BABYAI_LAYOUTS).  Reward: 1 - 0.9 t / max_steps at success, t counted in commands, not in moves; else 0.
    level: one of BABYAI_LEVELS, or "all" for the multi-task mix.
    memory: "none", or "map" (ours): what was seen earlier in the episode stays in the text and the commands.
    fixed_layouts: one layout a level (seed 0) in both splits, as the authors' public code trains and tests.
    """
    def __init__(self, level: str = "GoToRedBall", split: str = "train", max_steps: int = 20, memory: str = "none",
                 fixed_layouts: bool = False):
        import minigrid
        check_choice("level", level, ("all", *BABYAI_LEVELS))
        check_choice("split", split, BABYAI_LAYOUTS)
        check_choice("memory", memory, ("none", "map"))
        gymnasium.register_envs(minigrid)
        self.levels, self.max_steps, self.memory = BABYAI_LEVELS if level == "all" else (level,), max_steps, memory
        self.first_seed, num_layouts = (0, 1) if fixed_layouts else BABYAI_LAYOUTS[split]
        self.num_tasks, self._worlds = num_layouts * len(self.levels), {}  # level -> its minigrid, built when needed

    def _reset(self, task, seed):
        self._level, layout = self.levels[task % len(self.levels)], self.first_seed + task // len(self.levels)
        if self._level not in self._worlds:
            name = f"BabyAI-{self._level}-v{int(self._level == 'GoToObjS6')}"  # that level is registered as v1 only
            self._worlds[self._level] = gymnasium.make(name, max_steps=10**6, disable_env_checker=True).unwrapped
            self._worlds[self._level].gen_obs = dict  # no image at every primitive move: we look once a command
        self._world, self._score, self._won = self._worlds[self._level], 0.0, False
        for layout in itertools.count(layout, 10_000_000):
            with contextlib.redirect_stdout(io.StringIO()):  # minigrid prints every layout that it rejects
                self._world.reset(seed=layout)
            self._task_id, self._known = f"{self._level}-{layout}", {}
            self._look()
            # DEVIATION: minigrid may lock the only key in with the target (1 in 9); such a layout is replaced.
            if self._level != "GoToImpUnlock" or self.expert_action() is not None:
                break
        return self._observe(valid_action=True)

    def _step(self, action):
        moves = self._commands.get(" ".join(action.lower().split()))
        reward, terminated = 0.0, False
        for move in moves or ():
            before = tuple(self._world.agent_pos)
            _, success, terminated, _, _ = self._world.step(move)
            if terminated or (move == FORWARD and tuple(self._world.agent_pos) == before):  # the end, or a blocked way
                break
        if terminated and success > 0:  # picking up the wrong thing ends some levels with 0
            self._won, reward = True, 1 - 0.9 * (self.num_steps + 1) / self.max_steps
        self._score += reward
        self._look()
        obs, info = self._observe(valid_action=moves is not None)
        return obs, reward, terminated, info

    def get_state(self):
        """The whole episode, step counter included, as a value that later steps leave alone."""
        return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_worlds"})

    def set_state(self, state):
        """Go back to a `get_state()` of an environment with the same settings; the state can be used again."""
        vars(self).update(copy.deepcopy(state))
        self._worlds[self._level] = self._world

    def _look(self):
        """Refresh known cells, named objects and commands from the 7x7 view, and from nothing else."""
        self._cell, self._heading = complex(*self._world.agent_pos), 1j ** int(self._world.agent_dir)
        if self.memory == "none":
            self._known = {}  # cell -> minigrid object, or None where it is free
        view, visible = self._world.gen_obs_grid()  # the agent is in column 3 of row 6 and faces row 0
        self._in_sight = set()
        for column, row in zip(*visible.nonzero()):
            if (column, row) != (3, 6):  # minigrid shows there what the agent carries
                cell = self._cell + complex(6 - row, column - 3) * self._heading
                self._in_sight.add(cell)
                self._known[cell] = view.get(column, row)
        self._known.setdefault(self._cell, None)
        count, self._objects = Counter(), {}  # "red ball 1" -> cell: nearest first, equal ones numbered in that order
        by_steps = {self._steps(cell): cell for cell in self._known if cell != self._cell}  # not the doorway underfoot
        for steps in sorted(by_steps, key=lambda steps: (abs(steps.real) + abs(steps.imag), -steps.real, steps.imag)):
            cell, thing = by_steps[steps], self._known[by_steps[steps]]
            if thing is not None and thing.type != "wall":
                kind = f"{thing.color} {thing.type}"
                count[kind] += 1
                self._objects[f"{kind} {count[kind]}"] = cell
        self._list_commands()

    def _steps(self, cell):
        """Steps from the agent to a cell: ahead (real part) and to the right (imaginary part)."""
        return (cell - self._cell) * self._heading.conjugate()

    def _list_commands(self):
        """{command: its primitive moves}; beyond BABYAI_ACTION_CAP the farthest objects lose theirs."""
        def free(cell):
            return cell in self._known and (self._known[cell] is None or self._known[cell].can_overlap())
        carried, ahead = self._world.carrying, self._known[self._cell + self._heading]
        commands = {"turn left": [LEFT], "turn right": [RIGHT]}
        if free(self._cell + self._heading):
            commands["move forward"] = [FORWARD]
        if carried and ahead is None:
            commands["drop"] = [DROP]
        if can_toggle(ahead, carried):
            commands["toggle"] = [TOGGLE]
        paths = pose_paths([(self._cell, self._heading)], free)
        for name, cell in self._objects.items():
            thing, poses = self._known[cell], [(cell - turn, turn) for turn in TURNS if (cell - turn, turn) in paths]
            if not poses:
                continue  # no known free cell beside it can be reached
            moves = min((paths[pose] for pose in poses), key=len)
            commands[f"go to {name}"] = moves or [DONE]
            if thing.can_pickup() and not carried:
                commands[f"pick up {name}"] = moves + [PICK_UP]
            elif thing.can_overlap():
                commands[f"go through {name}"] = moves + [FORWARD]  # into the doorway, from where the next room is seen
            elif can_toggle(thing, carried):
                commands[f"toggle and go through {name}"] = moves + [TOGGLE, FORWARD]
        self._actions_cut = max(0, len(commands) - BABYAI_ACTION_CAP)
        self._commands = dict(list(commands.items())[:BABYAI_ACTION_CAP])

    def _observe(self, valid_action):
        """(observation, info): goal, objects in sight and remembered, walls ahead and beside, what is carried."""
        seen, remembered, walls = [], [], []
        for name, cell in self._objects.items():
            thing = self._known[cell]
            if thing.type == "door":
                name = ("open " if thing.is_open else "locked " if thing.is_locked else "closed ") + name
            phrase = f"{'an' if name.startswith('o') else 'a'} {name}, {steps_text(self._steps(cell))}"
            (seen if cell in self._in_sight else remembered).append(phrase)
        for turn in (1, -1j, 1j):
            cell = self._cell + self._heading * turn
            while cell in self._known and (self._known[cell] is None or self._known[cell].type != "wall"):
                cell += self._heading * turn
            if cell in self._known:
                walls.append(steps_text(self._steps(cell)))
        carried = self._world.carrying
        obs = (f"Goal: {self._world.mission}. You see {'; '.join(seen) or 'no objects'}."
               + (f" You remember {'; '.join(remembered)}." if remembered else "")
               + (f" Walls: {', '.join(walls)}." if walls else "")
               + f" You carry {f'a {carried.color} {carried.type}' if carried else 'nothing'}.")
        return obs, {"goal": self._world.mission, "task_id": self._task_id, "task_type": self._level, "won": self._won,
                     "admissible_actions": list(self._commands), "actions_cut": self._actions_cut,
                     "valid_action": valid_action, "score": self._score}

    def expert_action(self):
        """The next command of a scripted expert that knows the mission and the whole grid; None where it has no way."""
        (verb, cells), held, pose = self._expert_goal(), self._world.carrying, (self._cell, self._heading)
        far = self._distances(cells, held)
        if pose not in far:  # behind a locked door, so fetch a key first; or behind a thing, so take that away first
            things, goal, verb = [thing for thing in self._world.grid.grid if thing is not None], cells, "pick up"
            locked = [thing.color for thing in things if thing.type == "door" and thing.is_locked]
            cells = [complex(*thing.cur_pos) for thing in things if thing.type == "key" and thing.color in locked]
            far = self._distances(cells, held)
            if pose not in far:
                movable = [complex(*thing.cur_pos) for thing in things if thing.can_pickup()]
                cells = [cell for cell in movable if pose in self._distances(goal, held, cleared=cell)]
                far = self._distances(cells, held)
        if verb == "pick up" and held:  # the hands must be empty; put it where it is not in the way
            if "drop" in self._commands and pose in self._distances(cells, None, blocked=self._cell + self._heading):
                return "drop"
            if far.get(pose) == 0:
                return "turn left" if self._grid_at(self._cell - 1j * self._heading) is None else "turn right"
        if verb in self._commands and far.get(pose) == 0:  # "drop" or "toggle", at the right place
            return verb
        for name, cell in self._objects.items():
            command = f"{'toggle and go through' if verb == 'toggle' else verb} {name}"
            if cell in cells and command in self._commands:
                return command
        left = {command: far.get(self._pose_after(moves), math.inf) for command, moves in self._commands.items()}
        best = min(left, key=left.get)
        return best if left[best] < far.get(pose, 0) else None

    def _expert_goal(self):
        """The first open part of the mission as (verb, cells): use the verb while facing one of the cells."""
        from minigrid.envs.babyai.core import verifier
        part = self._world.instrs
        while isinstance(part, verifier.SeqInstr):
            if isinstance(part, verifier.AfterInstr):  # "a after b"
                part = part.instr_a if part.b_done == "success" else part.instr_b
            else:
                part = part.instr_b if part.a_done == "success" else part.instr_a
        if isinstance(part, verifier.GoToInstr):
            return "go to", [complex(*cell) for cell in part.desc.obj_poss]
        if isinstance(part, verifier.PutNextInstr):
            if any(self._world.carrying is thing for thing in part.desc_move.obj_set):
                near = [complex(*cell) + turn for cell in part.desc_fixed.obj_poss for turn in TURNS]
                return "drop", [cell for cell in near if self._grid_at(cell) is None]
            return "pick up", [complex(*thing.cur_pos) for thing in part.desc_move.obj_set]
        verb = "pick up" if isinstance(part, verifier.PickupInstr) else "toggle"
        return verb, [complex(*thing.cur_pos) for thing in part.desc.obj_set if thing.type != "wall"]  # walls are grey

    def _grid_at(self, cell):
        return self._world.grid.get(int(cell.real), int(cell.imag))

    def _distances(self, targets, held, cleared=None, blocked=None):
        """{pose: primitive moves from there to facing a target cell}, as far out as the agent's own pose.  `held` opens its
        doors; the cells `cleared` and `blocked` count as free and as occupied."""
        def free(cell):
            thing = self._grid_at(cell)
            return cell == cleared or cell != blocked and (thing is None or thing.can_overlap() or can_toggle(thing, held))
        # The way from (a, h) to (b, g) is as long as the way from (b, -g) to (a, -h).
        starts = [(cell - turn, -turn) for cell in targets for turn in TURNS if free(cell - turn)]
        paths = pose_paths(starts, free, until=(self._cell, -self._heading))
        return {(cell, -heading): len(moves) for (cell, heading), moves in paths.items()}

    def _pose_after(self, moves):
        cell, heading = self._cell, self._heading
        for move in moves:
            cell += heading * (move == FORWARD)
            heading *= {LEFT: -1j, RIGHT: 1j}.get(move, 1)
        return cell, heading

def pose_paths(starts, free, until=None):
    """Breadth-first search over poses (cell, heading): {pose: primitive moves from the nearest start}."""
    paths, queue = {pose: [] for pose in starts}, deque(starts)
    while queue and until not in paths:
        cell, heading = pose = queue.popleft()
        for move, after in ((FORWARD, (cell + heading, heading)), (LEFT, (cell, heading * -1j)),
                            (RIGHT, (cell, heading * 1j))):
            if after not in paths and (move != FORWARD or free(after[0])):
                paths[after] = paths[pose] + [move]
                queue.append(after)
    return paths

def can_toggle(thing, carried):
    """Whether toggling is of use: on a door that is not locked, or whose key is in hand (a toggled box is lost)."""
    is_door = thing is not None and thing.type == "door"
    return is_door and (not thing.is_locked or carried is not None and (carried.type, carried.color) == ("key", thing.color))

def steps_text(steps):
    """Steps ahead (real) and to the right (imaginary) in words: 3-2j is "3 steps in front and 2 to the left"."""
    ways = ((steps.real, "in front", "behind"), (steps.imag, "to the right", "to the left"))
    first, *more = [f"{abs(number):.0f} {plus if number > 0 else minus}" for number, plus, minus in ways if number]
    return " and ".join([first.replace(" ", " step " if first.startswith("1 ") else " steps ", 1), *more])

# ---- Jericho ----------------------------------------------------------------------------------------------------------
JERICHO_GAMES = {  # game -> (action cap, max steps) of PriorZero's appendix; "other" is ours, for any further game
    "detective": (12, 100), "omniquest": (25, 100), "acorncourt": (45, 50), "zork1": (55, 500), "other": (50, 100)}
NOT_OBJECTS = set(  # nouns to a game's parser, but ways to go and pronouns to us
    "n s e w ne nw se sw u d in out up down north south east west northeast northwest southeast southwest "
    "inside outside it them him her all me myself self one two three four five six seven eight nine ten".split())
OUT_OF_GAME = re.compile(  # commands that end the game or write files; a parser may look at six letters of a word only
    r"(^|[.,;]|\bthen\b)\W*(q\b|quit|restar|restor|save|undo|(un|no|tran)?script|record|replay)")
STILL_DICE = (1, 0, 0)  # random state in which commands are tried out: what is valid must not hang on the next throw

class JerichoEnv(TextEnv):
    """Text adventures in Jericho's emulator.  The story files are not ours to ship.
    Reward: the change of the game's score, an integer, maybe negative; game_score = score + the score at the start.
    The episode terminates with the game, won or lost.  Any text may be sent, admissible or not, but for OUT_OF_GAME.
    `info` adds game_score and actions_cut, the number of valid actions that the cap cut.
    game, rom_dir: name of the story file without its ending, and its folder (None: the environment variable JERICHO_ROMS).
    max_steps, action_cap: None for JERICHO_GAMES.  cache_file: valid actions are kept here as well; processes may share it.
    list_actions: end the observation with the valid actions (for a world model, which sees nothing else).
    location, inventory: add the answers to "look" and "inventory" to the observation; they take no turn.
    """
    _caches = {}  # (story, cache file) -> {world-state hash: valid actions}, common to the environments of a process

    def __init__(self, game: str = "detective", rom_dir: str = None, max_steps: int = None, action_cap: int = None,
                 list_actions: bool = False, location: bool = False, inventory: bool = False, cache_file: str = None):
        import jericho
        folder = rom_dir or os.environ.get("JERICHO_ROMS", ".")
        stories = [story for version in range(1, 9) if os.path.exists(story := f"{folder}/{game}.z{version}")]
        if not stories:
            raise InputError(f"no story file {game}.z1 to .z8 in folder '{folder}': get it from Jericho's game suite "
                             "(github.com/BYU-PCCL/z-machine-games), then --rom_dir FOLDER or JERICHO_ROMS=FOLDER")
        with warnings.catch_warnings(action="ignore"):
            self._frotz = jericho.FrotzEnv(stories[0])
        if not self._frotz.is_fully_supported:
            raise InputError(f"{stories[0]} is not a file that Jericho fully supports: take the one of its game suite")
        cap, steps = JERICHO_GAMES.get(game, JERICHO_GAMES["other"])
        self.game, self.max_steps, self.action_cap = game, max_steps or steps, action_cap or cap
        self.list_actions, self.extras = list_actions, ["look"] * location + ["inventory"] * inventory
        self.start_score = self._frotz.get_score()
        self.max_return = float(self._frotz.get_max_score() - self.start_score)
        self._cache_file, self._cache = cache_file, self._caches.setdefault((stories[0], cache_file), {})
        if cache_file and os.path.exists(cache_file):
            with open(cache_file) as lines:  # a line without an end is just being written by another process
                self._cache.update(json.loads(line) for line in lines if line.endswith("\n"))
        self._read_grammar()

    def _read_grammar(self):
        """What the game's parser knows: words for objects, templates of commands with 0, 1 and 2 of them."""
        from jericho.util import verb_usage_count  # not jericho.util.verb_usage_count: that may be ctypes.util
        words = self._frotz.get_dictionary()  # reads the file at every call
        self._word_len = max(len(word.word) for word in words)  # the letters of a word that the parser looks at
        self._object_words = {word.word for word in words if (word.is_noun or word.is_adj) and not word.is_dir}
        self._object_words -= {word[:self._word_len] for word in NOT_OBJECTS}
        templates = {*self._frotz.act_gen.templates, "drop all", "take OBJ", "take all from OBJ", "put all in OBJ"}
        self._templates = [[text for text in sorted(templates, key=lambda text: (-verb_usage_count(text), text))
                            if text.count("OBJ") == holes] for holes in (0, 1, 2)]
        # A try takes 0.02 ms in Infocom's own early games (words of 6 letters), 0.2 to 0.4 ms in those of Inform.
        self._max_tries, self._verb_count = 20_000 if self._word_len <= 6 else 3_000, verb_usage_count

    def _reset(self, task, seed):
        # None is the seed of Jericho's walkthrough; so would 0 be, to Jericho: here 0 is a seed of its own.
        self._frotz.seed(None if seed is None else seed % (2**31 - 1) or 2**31 - 1)
        text, _ = self._frotz.reset()
        self._score, self._won, self._walked = 0, False, 0 if seed is None else math.inf
        return self._observe(text, terminated=False, valid_action=True)

    def _step(self, action):
        # Printable ASCII, one line, within Jericho's buffer of 198: a zero byte hangs the emulator for good.
        command = " ".join(re.sub(r"[^ -~]", " ", action.lower()).split())[:190]
        valid_action = command in self._actions
        self._walked = self._walked + 1 if command == self.expert_action() else math.inf
        text, reward, terminated = "That is not possible here.", 0, False
        if not OUT_OF_GAME.search(command):
            text, reward, terminated, _ = self._frotz.step(command)
        self._score, self._won = self._score + reward, self._frotz.victory()
        obs, info = self._observe(text, terminated, valid_action)
        return obs, reward, terminated, info

    def _observe(self, text, terminated, valid_action):
        """(observation, info) after the game's answer `text`."""
        self._actions, cut = ([], 0) if terminated else self._valid_actions()
        extras = [self._try(self._frotz.get_state(), command) for command in self.extras if not terminated]
        lines = (" ".join(line.split()) for line in "\n".join([text, *extras]).splitlines())
        obs = "\n".join(line for line in lines if line and line[0] != ">")  # ">": a prompt, maybe with the status line
        if self.list_actions:
            obs += f"\nValid actions: {', '.join(self._actions)}"
        return obs, {"goal": f"Score as many points as you can in {self.game}.", "task_id": self.game,
                     "task_type": self.game, "admissible_actions": list(self._actions), "actions_cut": cut,
                     "won": self._won, "valid_action": valid_action, "score": float(self._score),
                     "game_score": self.start_score + self._score}

    def expert_action(self):
        """The next command of Jericho's walkthrough, as long as it is followed from a reset(seed=None); else None."""
        walkthrough = self._frotz.get_walkthrough()
        return walkthrough[self._walked].lower() if self._walked < len(walkthrough) else None

    def get_state(self):
        """The whole episode: emulator with its dice, score, step counter; later steps leave it alone."""
        own = ("_actions", "_score", "_won", "_walked", "num_steps", "_ended")
        return {name: vars(self)[name] for name in own}, self._frotz.get_state()

    def set_state(self, state):
        """Go back to a `get_state()` of an environment of the same game; the state can be used again."""
        vars(self).update(state[0])
        self._frotz.set_state(state[1])

    def close(self):
        """Free the emulator, whose destructor unloads it; the environment cannot be used afterwards."""
        self._frotz, self._ended = None, True

    def _try(self, state, command):
        """The game's answer to a command in a state, to which the game then returns."""
        self._frotz.set_state(state)
        text = self._frotz.step(command)[0]
        self._frotz.set_state(state)
        return text

    def _valid_actions(self):
        """(valid actions in alphabetical order, how many the cap cut), from the cache or found by trying."""
        key = self._frotz.get_world_state_hash()
        if key not in self._cache:
            state = self._frotz.get_state()
            self._cache[key] = self._find_actions(state[:7] + (STILL_DICE,) + state[8:]) or ["wait"]
            self._frotz.set_state(state)
            if self._cache_file:
                with open(self._cache_file, "a") as lines:
                    lines.write(json.dumps([key, self._cache[key]]) + "\n")
        found = self._cache[key]
        return sorted(found[:self.action_cap]), max(0, len(found) - self.action_cap)

    def _find_actions(self, state):
        """Commands that change the world, one for each change, short and usual ones first (the cap cuts the end).  As in
        Jericho itself, but the game's own dictionary, not spaCy, says what an object is, and two are tried together only if
        the one to be used (the second after "with", else the first) is or can be carried."""
        def rank(command):
            return command.count(" "), " all" in command, -self._verb_count(command), command
        names, carried = self._objects(state)
        bare, single, double = self._templates
        self._frotz.set_state(state)
        tries = (bare + [text.replace("OBJ", name) for name in names for text in single])[:self._max_tries]
        changes = self._frotz._filter_candidate_actions(tries, use_ctypes=True)  # {world difference: commands}
        takeable = {name for name in names if any(f"take {name}" in commands for commands in changes.values())}
        pairs = [(first in carried and second in carried, text.replace("OBJ", first, 1).replace("OBJ", second, 1))
                 for text in double for first, second in itertools.permutations(names, 2)
                 if len(names) <= 5 or (second if " with " in text else first) in carried | takeable]
        pairs.sort(key=lambda pair: pair[0])  # what may stay untried: rare verbs with two carried things
        tries = [text for _, text in pairs[:self._max_tries - len(tries)]]
        for change, commands in self._frotz._filter_candidate_actions(tries, use_ctypes=True).items():
            changes[change] += commands
        for command in changes.pop((0,) * 128, []):  # no object differs: tell victory, death and points apart
            self._frotz.set_state(state)
            score = self._frotz.step(command)[3]["score"]
            changes[score, self._frotz.victory(), self._frotz.game_over()].append(command)
        return sorted((min(commands, key=rank) for commands in changes.values()), key=rank)

    def _objects(self, state):
        """(one name for each object in reach, those of them that are carried); names with one description are one."""
        from jericho.util import get_subtree, recognized
        room = self._frotz.get_player_location()
        things = get_subtree(room.child, self._frotz.get_world_objects()) if room is not None else []
        tree = [self._nouns(thing.name) for thing in things if thing.num != self._frotz.player_obj_num]
        look, held = self._nouns(self._try(state, "look")), self._nouns(self._try(state, "inventory"))
        names = [words[-1] for words in tree if words] + look + held + list(itertools.chain(*tree))
        names += [name[:-1] for name in names if name.endswith("s") and name[:-1] in self._object_words]
        aliases = {}  # description -> names
        for name in dict.fromkeys(names):
            answer = " ".join(self._try(state, f"examine {name}").split())
            if recognized(answer) and not answer.startswith(("Which ", "You can't use multiple", "I only understood")):
                aliases.setdefault(answer, []).append(name)
        return [group[0] for group in aliases.values()], {group[0] for group in aliases.values() if {*held} & {*group}}

    def _nouns(self, text):
        words = re.findall(r"[a-z0-9'-]+", text.lower())
        return [word for word in words if word[:self._word_len] in self._object_words]

ENVS = {"alfworld": AlfworldEnv, "babyai": BabyAIEnv, "jericho": JerichoEnv}

# ---- Play in the terminal ---------------------------------------------------------------------------------------------
def play(env, choose, seed, task):
    """Print one episode; `choose(info)` gives the next action, or None to stop. Returns the sum of rewards."""
    obs, info = env.reset(seed=seed, options={"task": task})
    print(f"[{info['task_id']}] {info['goal']}\n{obs}")
    over = False
    while not over and (action := choose(info)) is not None:
        obs, reward, terminated, truncated, info = env.step(action)
        over = terminated or truncated
        print(f"\n> {action}{'' if info['valid_action'] else '   (not in the list)'}\n{obs}")
        print(f"[reward {reward:g}]\n" if reward else "", end="")
    print(f"[{'won' if info['won'] else 'not won'}: {info['score']:g} of {env.max_return:g} in {env.num_steps} actions]\n")
    return info["score"]

def ask(info):
    """Let the user choose: a number of the list, or any text; nothing, or the end of the input, stops."""
    actions = info["admissible_actions"]
    print("   ".join(f"{number} {action}" for number, action in enumerate(actions)))
    try:
        answer = input("action: ").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return actions[int(answer)] if answer.isdigit() and int(answer) < len(actions) else answer or None

def run(argv):
    """Play, or print transcripts: python envs.py --env babyai --level GoToRedBall [--random N | --expert N]."""
    parser = argparse.ArgumentParser(prog="envs.py", description=run.__doc__, add_help=False, allow_abbrev=False)
    parser.error = lambda message: (_ for _ in ()).throw(InputError(message))
    parser.add_argument("--env", default="babyai", help=f"one of {', '.join(ENVS)}")
    name = parser.parse_known_args(argv)[0].env
    check_choice("--env", name, ENVS)
    parser.add_argument("--help", action="help")
    for flag, meaning in (("task", "which task (default: drawn by the seed, or the first ones)"), ("seed", "of the episode"),
                          ("random", "print so many episodes of random admissible actions"),
                          ("expert", "print so many episodes of the environment's expert")):
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=meaning)
    own = inspect.signature(ENVS[name]).parameters  # the options of the environment become flags
    for option, parameter in own.items():
        kind = {"action": argparse.BooleanOptionalAction} if parameter.annotation is bool else {"type": parameter.annotation}
        parser.add_argument(f"--{option}", default=parameter.default, **kind)
    flags = vars(parser.parse_args(argv))
    for agent in ("random", "expert"):
        if flags[agent] is not None and flags[agent] < 1:
            raise InputError(f"--{agent} {flags[agent]}: must be at least 1")
    seed, task, env = flags["seed"], flags["task"], make_env(name, **{option: flags[option] for option in own})
    rng = random.Random(seed)
    if not flags["random"] and not flags["expert"]:
        play(env, ask, seed, task)
    for agent, choose in (("random", lambda info: rng.choice(info["admissible_actions"])),
                          ("expert", lambda info: env.expert_action())):
        returns = [play(env, choose, seed, i % env.num_tasks if task is None else task) for i in range(flags[agent] or 0)]
        if returns:
            print(f"{agent}: mean sum of rewards {sum(returns) / len(returns):g} in {len(returns)} episodes")
    env.close()

def main(argv=None):
    try:
        run(argv)
    except InputError as error:
        print(f"envs.py: {error}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main())
