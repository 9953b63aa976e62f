"""Text environments behind one interface: ALFWorld, BabyAI and Jericho.

    env = make_env("alfworld", houses="small", split="valid_unseen", max_steps=20)
    obs, info = env.reset(seed=0, options={"task": 3})
    obs, reward, terminated, truncated, info = env.step(info["admissible_actions"][0])

Every environment is a `TextEnv` (gymnasium's `Env` with str observations and str actions) and `EnvPool` steps many of
them together.  This file knows nothing of the two methods that use it.
"""

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
