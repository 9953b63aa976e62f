"""What the tests of priorzero.py share: a tokenizer of characters, tiny random language models, an environment without an engine."""

import string

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import priorzero as pz

COLORS = ("red", "green", "blue")


def tokenizer(**special):
    """Characters, and a few words; `special` overrides the pad and EOS tokens."""
    pieces = ["<pad>", "</s>", "<unk>", "Action:", "Reasoning:", " press", " go", *string.printable[:95], "\n"]
    backend = Tokenizer(models.Unigram([(p, -1.0 if len(p) > 1 else -10.0) for p in pieces], unk_id=2))
    backend.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def lm(kind="llama", seed=0, **settings):
    """A two-layer Llama or Qwen2 of width 32 with grouped-query heads and weights large enough for sharp predictions."""
    torch.manual_seed(seed)
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    settings = dict(vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=1024, initializer_range=.2, pad_token_id=0, eos_token_id=1,
                    bos_token_id=None, tie_word_embeddings=False) | settings
    return model(config(**settings))


def settings(**changed):
    """A small Config without an LLM."""
    return pz.Config(**(dict(alpha=0.0, device="cpu", width=16, heads=2, window=6, td_steps=2, context=3, max_actions=5, num_envs=4, max_steps=6,
                             num_simulations=8, eval_simulations=8, replay_size=1000, batch_size=16, warmup_steps=8, replay_ratio=1.0,
                             eval_episodes=12, eval_every=0, log_every=40, save_every=40, model="toy", cot=False, llm_batch=8, prior_temperature=0.25) | changed))


def language_model(cfg=None, **changed):
    return pz.LanguageModel(tokenizer(), lm(**changed), cfg or settings())


def agent(monkeypatch, seed=0, **changed):
    """An Agent; with alpha > 0 its LLM is the tiny random one."""
    monkeypatch.setattr(pz, "load_pretrained", lambda *_: (tokenizer(), lm(seed=seed)))
    return pz.Agent(settings(**changed))


class LampPool:
    """Stands for EnvPool: `rooms` lamps one after the other; pressing the lamp's colour leads on, the last one wins (reward 1).

    With `deadly` a wrong colour ends the episode, otherwise time runs on.  It is a context manager, as EnvPool is.
    """

    num_tasks, max_return, rooms, deadly = 6, 1.0, 2, False

    def __init__(self, name="toy", num_envs=4, workers=0, max_steps=6, **_):
        self.max_steps, self.state = max_steps, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def look(self, i, won=False):
        task, room, steps = self.state[i]
        actions = ["press " + c for c in COLORS] + ["go"] * (room > 0)
        obs = "the end" if won else f"room {room}: the {COLORS[(task + room) % 3]} lamp is on"
        return obs, {"admissible_actions": actions, "won": won, "task_id": f"lamp {task}", "goal": "", "task_type": "lamp"}

    def reset(self, indices, tasks):
        for i, task in zip(indices, tasks, strict=True):
            self.state[i] = [task, 0, 0]
        return [self.look(i) for i in indices]

    def step(self, indices, actions):
        return [self.step_one(i, action) for i, action in zip(indices, actions, strict=True)]

    def step_one(self, i, action):
        task, room, _ = state = self.state[i]
        assert action in self.look(i)[1]["admissible_actions"]
        right = action == "press " + COLORS[(task + room) % 3]
        state[1], state[2] = room + right, state[2] + 1
        won = state[1] == self.rooms
        terminated = won or (self.deadly and not right)
        obs, info = self.look(i, won)
        return obs, float(won), terminated, not terminated and state[2] >= self.max_steps, info


def collected(agent, steps=40, pool=None):
    """Play `steps` rounds in every environment; returns the games still going on."""
    pool = pool or LampPool()
    games = {i: pz.new_game(agent, pool, i) for i in range(agent.cfg.num_envs)}
    for _ in range(steps):
        pz.collect(agent, pool, games)
    return games
