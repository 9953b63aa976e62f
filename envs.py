"""Text environments behind one interface: ALFWorld, BabyAI and Jericho.

    env = make_env("alfworld", houses="small", split="valid_unseen", max_steps=20)
    obs, info = env.reset(seed=0, options={"task": 3})
    obs, reward, terminated, truncated, info = env.step(info["admissible_actions"][0])

Every environment is a `TextEnv` (gymnasium's `Env` with str observations and str actions) and `EnvPool` steps many of
them together.  This file knows nothing of the two methods that use it.
"""

import argparse
import contextlib
import copy
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import sys
import warnings
from collections import Counter, deque

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

    def reset(self, *, seed=None, options=None):
        """Start an episode; `options={"task": i}` picks the task, else the seed does. Returns (obs, info)."""
        super().reset(seed=seed)
        self.num_steps, self._ended = 0, False
        return self._reset(seed, options or {})

    def step(self, action: str):
        """Apply one action; returns (obs, reward, terminated, truncated, info). Raises RuntimeError after the end."""
        if getattr(self, "_ended", True):
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


# ---- BabyAI ----

BABYAI_LEVELS = tuple(  # PriorZero's 18, by the paper's names
    "GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObjS6 GoToLocalS8N7 GoToObjMazeS7 GoToImpUnlock GoToSeqS5R2 "
    "GoToRedBlueBall GoToDoor GoToObjDoor PickupLoc PickupDistDebug PickupAbove ActionObjDoor FindObjS7 OneRoomS20 "
    "SynthLoc".split())
BABYAI_LAYOUTS = {"train": (0, 100_000), "valid_unseen": (1_000_000, 1_000)}  # split -> (first seed, seeds per level)
BABYAI_ACTION_CAP = 20
LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE, DONE = range(7)  # minigrid's primitive moves; DONE changes nothing
TURNS = (1, 1j, -1, -1j)  # a cell is x + y j, y growing downwards, and a heading is one of these: times 1j turns right


class BabyAIEnv(TextEnv):
    """BabyAI in words: the agent's 7x7 view as a sentence, high-level commands as actions (PriorZero, appendix).

    Task i is level i % L (L = 1, or 18 for "all") on the layout of seed first_seed + i // L.  Each level has the train
    seeds 0..99,999 and the valid_unseen seeds 1,000,000..1,000,999: no layout is in both.
    Reward: 1 - 0.9 t / max_steps at success, t counted in commands, not in primitive moves; else 0.

    Args:
        level: one of BABYAI_LEVELS, or "all" for the multi-task mix.
        memory: "none", or "map" (ours): what was seen earlier in the episode stays in the text and the commands.
        fixed_layouts: one layout a level (seed 0) in both splits, as the authors' public code trains and tests.
    """

    def __init__(self, level="GoToRedBall", split="train", max_steps=20, memory="none", fixed_layouts=False):
        import minigrid

        for name, value, allowed in (("level", level, ("all", *BABYAI_LEVELS)), ("split", split, BABYAI_LAYOUTS),
                                     ("memory", memory, ("none", "map"))):
            if value not in allowed:
                raise InputError(f"{name}: unknown value '{value}', choose from {', '.join(allowed)}")
        gymnasium.register_envs(minigrid)
        self.levels, self.max_steps, self.memory = BABYAI_LEVELS if level == "all" else (level,), max_steps, memory
        self.first_seed, num_layouts = (0, 1) if fixed_layouts else BABYAI_LAYOUTS[split]
        self.num_tasks, self._worlds = num_layouts * len(self.levels), {}  # level -> its minigrid, built when needed

    def _reset(self, seed, options):
        task = options.get("task")
        task = int(self.np_random.integers(self.num_tasks)) if task is None else task
        if not 0 <= task < self.num_tasks:
            raise InputError(f"there is no task {task}: this environment has tasks 0 to {self.num_tasks - 1}")
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
            if isinstance(part, verifier.AfterInstr):
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
        """{pose: primitive moves from there to facing a target cell}, as far out as the agent's own pose.

        `held` opens its doors; the cells `cleared` and `blocked` count as free and as occupied.
        """
        def free(cell):
            thing = self._grid_at(cell)
            return cell == cleared or cell != blocked and (
                thing is None or thing.can_overlap() or can_toggle(thing, held))

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
    if thing is None or thing.type != "door":
        return False
    return not thing.is_locked or carried is not None and (carried.type, carried.color) == ("key", thing.color)


def steps_text(steps):
    """Steps ahead (real) and to the right (imaginary) in words: 3-2j is "3 steps in front and 2 to the left"."""
    ways = ((steps.real, "in front", "behind"), (steps.imag, "to the right", "to the left"))
    first, *more = [f"{abs(number):.0f} {plus if number > 0 else minus}" for number, plus, minus in ways if number]
    return " and ".join([first.replace(" ", " step " if first.startswith("1 ") else " steps ", 1), *more])


ENVS["babyai"] = BabyAIEnv


# ---- Jericho ----

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

    Args:
        game: name of the story file, without its ending.
        rom_dir: folder of the story files; None for the environment variable JERICHO_ROMS.
        max_steps, action_cap: None for JERICHO_GAMES.
        list_actions: end the observation with the valid actions (for a world model, which sees nothing else).
        location, inventory: add the answers to "look" and "inventory" to the observation; they take no turn.
        cache_file: valid actions once found are kept here as well; processes may share it.
    """

    _caches = {}  # (story, cache file) -> {world-state hash: valid actions}, common to the environments of a process

    def __init__(self, game="detective", rom_dir=None, max_steps=None, action_cap=None, list_actions=False,
                 location=False, inventory=False, cache_file=None):
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

    def _reset(self, seed, options):
        if options.get("task") not in (None, 0):
            raise InputError(f"there is no task {options['task']}: a game is task 0")
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
        self._score += reward
        self._won = self._frotz.victory()
        obs, info = self._observe(text, terminated, valid_action)
        return obs, reward, terminated, info

    def _observe(self, text, terminated, valid_action):
        """(observation, info) after the game's answer `text`."""
        self._actions, cut = ([], 0) if terminated else self._valid_actions()
        if not terminated:
            text = "\n".join([text, *(self._try(self._frotz.get_state(), command) for command in self.extras)])
        lines = (" ".join(line.split()) for line in text.splitlines())
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
        """Commands that change the world, one for each change, short and usual ones first (the cap cuts the end).

        As Jericho's get_valid_actions but for the candidates: the game's own dictionary, not spaCy, says which words
        are objects, and two objects are tried together only if the one to be used (the second after "with", else the
        first) is carried or can be taken.
        """
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


ENVS["jericho"] = JerichoEnv


# ---- Play in the terminal ----

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
    outcome = "won" if info["won"] else "not won"
    print(f"[{outcome}: {info['score']:g} of {env.max_return:g} in {env.num_steps} actions]\n")
    return info["score"]


def ask(info):
    """Let the user choose: a number of the list, or any text; nothing, or the end of the input, stops."""
    actions = info["admissible_actions"]
    print("   ".join(f"{number} {action}" for number, action in enumerate(actions)))
    try:
        answer = input("action: ").strip()
    except EOFError:
        return None
    return actions[int(answer)] if answer.isdigit() and int(answer) < len(actions) else answer or None


def main(arguments=None):
    """Play, or print transcripts: python envs.py --env babyai --level GoToRedBall [--random N | --expert N]."""
    choice = argparse.ArgumentParser(add_help=False)
    choice.add_argument("--env", choices=sorted(ENVS), default="babyai")
    environment = ENVS[choice.parse_known_args(arguments)[0].env]
    parser = argparse.ArgumentParser(description=main.__doc__, parents=[choice])
    for flag, meaning in (("task", "which task (default: drawn by the seed, or the first ones)"), ("seed", ""),
                          ("random", "print so many episodes of random admissible actions"),
                          ("expert", "print so many episodes of the environment's expert")):
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=meaning)
    own = inspect.signature(environment).parameters  # its keyword arguments become flags
    for name, parameter in own.items():
        kind = ({"action": "store_true"} if parameter.default is False
                else {"default": parameter.default, "type": lambda text: int(text) if text.isdigit() else text})
        parser.add_argument(f"--{name}", **kind)
    flags = vars(parser.parse_args(arguments))
    rng, seed, task = random.Random(flags["seed"]), flags["seed"], flags["task"]
    try:
        env = environment(**{name: flags[name] for name in own})
        if not flags["random"] and not flags["expert"]:
            play(env, ask, seed, task)
        for name, choose in (("random", lambda info: rng.choice(info["admissible_actions"])),
                             ("expert", lambda info: env.expert_action())):
            returns = [play(env, choose, seed, ((task or 0) + i) % env.num_tasks) for i in range(flags[name] or 0)]
            if returns:
                print(f"{name}: mean sum of rewards {sum(returns) / len(returns):g} in {len(returns)} episodes")
    except InputError as error:
        print(f"envs.py: {error}", file=sys.stderr)
        return 2
    env.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
