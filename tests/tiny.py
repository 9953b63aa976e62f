"""What the tests of paw.py share: tiny random language models, a tokenizer of 64 tokens, an environment without an engine."""

import string
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config,
                          Qwen2ForCausalLM)

import paw

VOCABULARY = ["<pad>", "</s>", "<unk>", "<think>", "</think>", "<action>", "</action>", "look", "open door 1", "go", "\n", " ",
              *string.ascii_lowercase, *string.digits, *"<>/:.,'[]()-!?T#"]
PAD, EOS = 0, 1


def tokenizer(**special):
    """Words of the toy environment and single characters; `special` overrides the pad and EOS tokens."""
    scores = [(piece, -1.0 if len(piece) > 1 else -10.0) for piece in VOCABULARY]
    backend = Tokenizer(models.Unigram(scores, unk_id=2))
    backend.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def lm(kind="llama", seed=0, **settings):
    """A two-layer Llama, Qwen2 or GPT-2 of width 32 with weights large enough for its predictions to be far from uniform."""
    torch.manual_seed(seed)
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
                     "gpt2": (GPT2Config, GPT2LMHeadModel)}[kind]
    settings = dict(vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=512, initializer_range=.3, pad_token_id=PAD,
                    eos_token_id=EOS, bos_token_id=None, tie_word_embeddings=kind != "llama") | settings
    return model(config(**settings)).eval()


def settings(**changed):
    """A Config for the CPU whose defaults suit the tiny LM: compact prompt, one forward pass, short responses."""
    return paw.Config(**(dict(device="cpu", prompt="compact", max_response_len=6, groups=2, group_size=3, token_budget=10**6,
                              max_grad_norm=1e9, adv_norm="std") | changed))


def policy(cfg=None, kind="llama", seed=0, **model_settings):
    return paw.make_policy(lm(kind, seed, **model_settings), tokenizer(), cfg or settings())


class TableLM(torch.nn.Module):
    """A language model whose next token depends on the last one alone: p(next | last) = softmax(table[last])."""

    def __init__(self, table):
        super().__init__()
        self.head = torch.nn.Linear(*table.shape, bias=False)
        self.head.weight.data = table.T.contiguous()
        self.config = SimpleNamespace(to_dict=dict)

    def base_model(self, input_ids, **_):
        return SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(input_ids, self.head.in_features).float(), cache=None)

    def get_output_embeddings(self):
        return self.head


def script(*steps, size=len(VOCABULARY)):
    """A table [V, V] in which each (token, next token) of `steps` is certain; all other rows are uniform."""
    table = torch.zeros(size, size)
    for token, following in steps:
        table[token] = -1e4
        table[token, following] = 0
    return table


def ids(text):
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def sampled_update(policy, cfg, returns, steps=2, seed=0):
    """Transitions and episodes whose responses the policy samples; prompts, next observations and states are random.

    `returns`: one list of episode returns per group; each episode has `steps` transitions.
    """
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))
    tokens = lambda low, high: torch.randint(3, len(VOCABULARY), (draw(low, high),), generator=g).tolist()
    episodes = [paw.Episode(group, f"game {group}", "pick_and_place_simple", ret=float(ret), won=ret >= 10)
                for group, rets in enumerate(returns) for ret in rets]
    owners = [e for e in range(len(episodes)) for _ in range(steps)]
    prompts = [tokens(3, 12) for _ in owners]
    admissible = [["look", "open door 1", "go a"]] * len(owners) if cfg.constrain else None
    max_len = 20 if cfg.constrain else cfg.max_response_len
    responses = paw.generate(policy, prompts, max_len, cfg.temperature, g, admissible)
    transitions = [paw.Transition(p, r, tokens(2, 9), f"state {draw(0, 3)}", draw(-1, 3) / 2, True, e, episodes[e].group, policy.version)
                   for p, r, e in zip(prompts, responses, owners)]
    for t in transitions:
        episodes[t.episode].steps.append((t.state, "", t.reward, "next"))
    return transitions, episodes


class Recorder:
    """Stands for an optimiser: keeps a copy of the gradient of every step, and leaves the weights alone."""

    def __init__(self, model):
        self.model, self.gradients = model, []

    def step(self):
        self.gradients.append({n: p.grad.clone() for n, p in paw.trainable(self.model).items()})

    def zero_grad(self, set_to_none=True):
        self.model.zero_grad(set_to_none)


def update(policy, transitions, episodes, cfg, optimizer=None, reference=None, seed=0):
    """One update_policy with a fixed mini-batch order; returns (gradients of the recorder or [], metrics)."""
    recorder = optimizer or Recorder(policy.model)
    metrics = paw.update_policy(policy, reference or paw.Reference(policy.model), recorder, transitions, episodes, cfg,
                                torch.Generator().manual_seed(seed))
    return ([] if optimizer else recorder.gradients), metrics


def assert_same_gradient(a, b, tol=1e-6):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=tol), (name, (a[name] - b[name]).abs().max())


class DoorPool:
    """Stands for EnvPool: in task i the action `actions[i]` wins; "go" changes the room; anything else is not admissible.

    It keeps what it was told in `received`, one list of actions per environment.
    """

    actions = ["look", "open door 1", "go"]
    num_tasks, max_return = 3, 1.0

    def __init__(self, max_steps=3):
        self.max_steps, self.task, self.room, self.count, self.received = max_steps, {}, {}, {}, {}

    def info(self, i, valid=True, won=False):
        return {"goal": f"task {self.task[i]}", "admissible_actions": list(self.actions), "task_id": f"id {self.task[i]}",
                "task_type": "pick_and_place_simple", "won": won, "valid_action": valid, "score": float(won)}

    def reset(self, indices, tasks):
        for i, task in zip(indices, tasks):
            self.task[i], self.room[i], self.count[i], self.received[i] = task, 0, 0, []
        return [("room 0", self.info(i)) for i in indices]

    def step(self, indices, actions):
        return [self.step_one(i, action) for i, action in zip(indices, actions, strict=True)]

    def step_one(self, i, action):
        self.received[i].append(action)
        self.count[i] += 1
        self.room[i] += action == "go"
        won = action == self.actions[self.task[i]]
        obs = "you won" if won else f"room {self.room[i]}" if action in self.actions else "nothing happens"
        return obs, float(won), won, not won and self.count[i] >= self.max_steps, self.info(i, action in self.actions, won)
