"""Text environments behind one interface: ALFWorld, BabyAI and Jericho.

    env = make_env("alfworld", houses="small", split="valid_unseen", max_steps=20)
    obs, info = env.reset(seed=0, options={"task": 3})
    obs, reward, terminated, truncated, info = env.step(info["admissible_actions"][0])

Every environment is a `TextEnv` (gymnasium's `Env` with str observations and str actions) and `EnvPool` steps many of
them together.  This file knows nothing of the two methods that use it.
"""

import contextlib
import copy
import io
import itertools
import math
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
        return self._text(), self._info(valid_action=True)

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
        return self._text(), reward, terminated, self._info(valid_action=moves is not None)

    def _info(self, valid_action):
        return {"goal": self._world.mission, "admissible_actions": list(self._commands), "task_id": self._task_id,
                "task_type": self._level, "won": self._won, "valid_action": valid_action, "score": self._score,
                "actions_cut": self._actions_cut}

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

    def _text(self):
        """Goal, objects in sight, objects remembered, nearest walls ahead, left and right, what is carried."""
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
        return (f"Goal: {self._world.mission}. You see {'; '.join(seen) or 'no objects'}."
                + (f" You remember {'; '.join(remembered)}." if remembered else "")
                + (f" Walls: {', '.join(walls)}." if walls else "")
                + f" You carry {f'a {carried.color} {carried.type}' if carried else 'nothing'}.")

    def expert_action(self):
        """The next command of a scripted expert that knows the mission and the whole grid; None where it has no way."""
        verb, cells = self._expert_goal()
        far, pose = self._distances(cells), (self._cell, self._heading)
        if pose not in far:  # shut off by a locked door: first fetch a key of its colour
            things = [thing for thing in self._world.grid.grid if thing is not None]
            locked = {thing.color for thing in things if thing.type == "door" and thing.is_locked}
            keys = [thing for thing in things if thing.type == "key" and thing.color in locked]
            verb, cells = "pick up", [complex(*key.cur_pos) for key in keys]
            far = self._distances(cells)
        if verb == "pick up" and self._world.carrying:
            return "drop" if "drop" in self._commands else "turn left"
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
                return "drop", [cell for cell in near if self._world.grid.get(int(cell.real), int(cell.imag)) is None]
            return "pick up", [complex(*thing.cur_pos) for thing in part.desc_move.obj_set]
        verb = "pick up" if isinstance(part, verifier.PickupInstr) else "toggle"
        return verb, [complex(*thing.cur_pos) for thing in part.desc.obj_set if thing.type != "wall"]  # walls are grey

    def _distances(self, targets):
        """{pose: primitive moves from there to facing a target cell}, as far out as the agent's own pose."""
        def free(cell):
            thing = self._world.grid.get(int(cell.real), int(cell.imag))
            return thing is None or thing.can_overlap() or can_toggle(thing, self._world.carrying)

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
    """Steps ahead (real) and to the right (imaginary) in words.

    >>> steps_text(3-2j), steps_text(-1+0j), steps_text(1j)
    ('3 steps in front and 2 to the left', '1 step behind', '1 step to the right')
    """
    ahead, right = int(steps.real), int(steps.imag)
    parts = [f"{abs(ahead)} {'in front' if ahead > 0 else 'behind'}"] if ahead else []
    parts += [f"{abs(right)} to the {'right' if right > 0 else 'left'}"] if right else []
    number, rest = " and ".join(parts).split(" ", 1)
    return f"{number} step{'' if number == '1' else 's'} {rest}"


ENVS["babyai"] = BabyAIEnv
