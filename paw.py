"""PaW: a language agent that learns to act and to predict what its actions do, in one pass (arXiv 2606.02388).

The policy is a causal LM.  A group of G episodes of one task gives advantages (GRPO, or GiGPO); PaW adds a world-model
loss on the NEXT observation o_{t+1}, appended behind the action that is trained anyway, so that one forward pass over
[h_t, a_t, o_{t+1}] serves both losses:  L = E_g[ L_RL(g) + lambda_g * L_WM(S_alpha of g) ].

    paper                                              function here
    eq. 1      clipped policy-gradient loss            policy_loss (advantages: group_advantages, gigpo_advantages)
    3.1        action entropy of a transition          action_entropy
    eq. 4      the alpha fraction of highest entropy   select_transitions
    eq. 5      cross-entropy loss (ablation)           cross_entropy_wm
    eq. 7-8    clipped MAE over observation tokens     clipped_mae
    eq. 10     reward-adaptive weight lambda_g         world_model_weight
    eq. 9, 11  mean over selected, then over groups    transition_weights, summed in loss_of

On 2 CPU cores, no GPU, no network (the shipped tiny LM in offline ALFWorld houses; time and result: README):
    python paw.py --env alfworld
On one GPU with the paper's model and settings: the command in README.md (`--help` names the paper's values).
"""

import argparse, dataclasses, difflib, json, math, os, random, re, signal, sys, time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from envs import EnvPool, InputError

# Dimension letters: N transitions of an update, B rows of a batch, T tokens of a row, P prompt tokens, S response tokens,
# O observation tokens, G episodes of a group, V vocabulary, D width.

disable_progress_bar()
TINY_FOLDER = Path(__file__).parent / "tiny_lm"
TASK_NAMES = {  # ALFWorld task type -> column of the paper's table 1
    "pick_and_place_simple": "Pick", "look_at_obj_in_light": "Look", "pick_clean_then_place_in_recep": "Clean", "all": "All",
    "pick_heat_then_place_in_recep": "Heat", "pick_cool_then_place_in_recep": "Cool", "pick_two_obj_and_place": "Pick2"}

# ---- Settings -----------------------------------------------------------------------------------------------------------
def flag(default, help, choices=None, low=None, high=None):
    """A Config field: its default, one line of help (meaning, unit, origin), and its choices or its range."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})

@dataclass
class Config:
    """Every setting, once; each becomes a command-line flag.  Defaults fit 2 CPU cores; "PaW:" marks the paper's value."""
    env: str = flag("alfworld", "environment", ("alfworld", "babyai", "jericho"))
    houses: str = flag("small", "ALFWorld games: small or full (made offline), official (ALFWORLD_DATA)", ("small", "full", "official"))
    task_types: str = flag("", "ALFWorld task types to use, comma-separated; empty = all six")
    level: str = flag("GoToRedBall", "BabyAI level, or all")
    game: str = flag("detective", "Jericho game")
    rom_dir: str = flag("", "folder with Jericho story files; empty = the environment variable JERICHO_ROMS")
    eval_split: str = flag("valid_unseen", "split that is evaluated", ("train", "valid_seen", "valid_unseen"))
    env_workers: int = flag(0, "environment processes; 0 = step them in this process", low=0)
    model: str = flag("tiny", "causal LM: tiny (shipped), a Hugging Face name, a folder, or a .gguf file")
    prompt: str = flag("auto", "prompt text; auto = compact for the tiny LM, paper for others", ("auto", "compact", "paper"))
    constrain: bool = flag(False, "sample only admissible actions, without a thought (a token trie; same mask in training)")
    lora_rank: int = flag(0, "LoRA rank; 0 trains all weights", low=0)
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, more time")
    history_len: int = flag(2, "observation/action pairs in the prompt (PaW: 2)", low=0)
    max_prompt_len: int = flag(2048, "prompt tokens; older history is dropped first (PaW: 2048)", low=16)
    max_response_len: int = flag(16, "response tokens (PaW: 512; the tiny LM needs 6)", low=1)
    max_obs_len: int = flag(512, "observation tokens that the world-model loss sees", low=1)
    algo: str = flag("grpo", "advantage estimator", ("grpo", "gigpo"))
    adv_norm: str = flag("mean", "advantages: std = (R - mean) / std (PaW), mean = (R - mean) / (R_max / 2) (ours)", ("mean", "std"))
    wm: str = flag("cmae", "world-model loss: cmae (eq. 8), ce (eq. 5), none (the base algorithm)", ("cmae", "ce", "none"))
    alpha: float = flag(0.75, "fraction of transitions in the world-model loss (PaW: 0.75)", low=1e-9, high=1)
    rho: float = flag(0.2, "observation tokens above this probability are masked (PaW: 0.2)", low=1e-9, high=1)
    adaptive_lambda: bool = flag(True, "weigh the world-model loss by eq. 10; off: weight 1 (PaW's ablation)")
    entropy: str = flag("sampled", "selection entropy: sampled (PaW 3.1) or full (over the vocabulary; ours)", ("sampled", "full"))
    updates: int = flag(40, "policy updates", low=0)
    groups: int = flag(8, "groups (tasks) per update (PaW: 16)", low=1)
    group_size: int = flag(8, "episodes per group (PaW: 8)", low=2)
    max_steps: int = flag(20, "actions per episode (PaW: 50)", low=1)
    temperature: float = flag(1.0, "sampling temperature of rollouts (PaW: 1.0)", low=1e-9)
    eval_temperature: float = flag(0.4, "sampling temperature of evaluation; 0 = greedy (PaW: 0.4)", low=0)
    reward_success: float = flag(10.0, "return of a solved episode, R_max of eq. 10 (PaW: 10)", low=1e-9)
    reward_invalid: float = flag(-0.1, "added for each invalid action (PaW: -0.1)", high=0)
    gigpo_omega: float = flag(1.0, "weight of GiGPO's step advantage (PaW: 1)", low=0)
    gigpo_gamma: float = flag(0.95, "discount of GiGPO's step returns (PaW: 0.95)", low=0, high=1)
    lr: float = flag(2e-4, "learning rate of AdamW (PaW: 1e-6 for 1.5B and 7B)", low=0)
    weight_decay: float = flag(0.01, "weight decay of AdamW (verl's default)", low=0)
    max_grad_norm: float = flag(1.0, "gradient-norm clip (verl's default)", low=1e-9)
    epochs: int = flag(1, "passes over the rollouts of an update", low=1)
    mini_batch: int = flag(256, "transitions per optimiser step (PaW: 256)", low=1)
    clip_low: float = flag(0.2, "PPO clip below 1", low=0, high=1)
    clip_high: float = flag(0.2, "PPO clip above 1", low=0)
    kl_coef: float = flag(0.01, "weight of the k3 KL to the frozen start; 0 = off (verl-agent: 0.01)", low=0)
    token_budget: int = flag(4096, "padded tokens of one forward pass; the gradient does not depend on it", low=1)
    eval_every: int = flag(0, "updates between evaluations; 0 = only before and after", low=0)
    eval_episodes: int = flag(252, "episodes of an evaluation; 0 = none", low=0)
    sample_every: int = flag(10, "updates between sample transcripts", low=1)
    save_every: int = flag(1, "updates between checkpoints", low=1)
    seed: int = flag(1, "seed of everything but the evaluation", low=0, high=2 ** 32 - 2)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    run_dir: str = flag("", "output folder; empty = runs/<env>-<algo>-<wm>-seed<seed>-<time>")

    @property
    def prompt_style(self) -> str:
        return self.prompt if self.prompt != "auto" else ("compact" if self.model == "tiny" else "paper")

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")

    def env_options(self, split: str) -> dict:
        """Keyword arguments of make_env for this run's environment."""
        types = tuple(t.strip() for t in self.task_types.split(",") if t.strip()) or None
        babyai_split = "train" if split == "train" else "valid_unseen"
        return {"alfworld": dict(houses=self.houses, split=split, task_types=types, max_steps=self.max_steps),
                "babyai": dict(level=self.level, split=babyai_split, max_steps=self.max_steps),
                "jericho": dict(game=self.game, rom_dir=self.rom_dir or None, max_steps=self.max_steps)}[self.env]

    def validate(self):
        """Raise InputError with the flag, its value and what is allowed."""
        for f in dataclasses.fields(self):
            value, choices, low, high = getattr(self, f.name), *(f.metadata[k] for k in ("choices", "low", "high"))
            if choices and value not in choices:
                near = difflib.get_close_matches(str(value), choices, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise InputError(f"--{f.name} {value}: choose one of {', '.join(choices)}{hint}")
            low, high = -math.inf if low is None else low, math.inf if high is None else high
            if not isinstance(value, str) and not (low <= value <= high and math.isfinite(value)):
                raise InputError(f"--{f.name} {value}: must lie between {low} and {high}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise InputError(f"--device {self.device}: choose one of auto, cpu, cuda, cuda:N")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(f"--device {self.device}: this machine has no usable CUDA device; use --device cpu")

# ---- The formulas -------------------------------------------------------------------------------------------------------
def masked_mean(x, mask):
    """Mean of x over mask == 1 in each row: [B, S], [B, S] -> [B]; a row without any gives 0."""
    return torch.where(mask.bool(), x, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)

def action_entropy(logp, action_mask):
    """Entropy of a response from the sampled tokens alone: -(1/|a|) sum_i q_i log q_i, q_i = the sampled token's probability.
    Not the full-vocabulary entropy (`--entropy full`), but one term of its sum per token, as the paper writes it.
    Args: logp [B, S] natural log; action_mask [B, S], 1 = response token.  Returns [B], in nats.  Source: PaW 3.1.
    >>> action_entropy(torch.tensor([[.5, .25]]).log(), torch.ones(1, 2))
    tensor([0.3466])
    """
    return masked_mean(-logp.exp() * logp, action_mask)

def select_transitions(entropy, alpha):
    """The ceil(alpha N) transitions of the WHOLE update with the highest entropy; ties go to the lower index.
    Args: entropy [N]; alpha in (0, 1].  Returns bool [N].  Source: PaW eq. 4 (the rounding is ours).
    """
    num_kept = math.ceil(alpha * len(entropy) - 1e-9)  # 0.07 * 100 is 7.000000000000001 in floating point: 7 is meant
    selected = torch.zeros(len(entropy), dtype=torch.bool, device=entropy.device)
    selected[torch.argsort(entropy, descending=True, stable=True)[:num_kept]] = True
    return selected

def clipped_mae(logp, obs_mask, rho):
    """Clipped mean absolute error of a predicted observation: sum_i m_i (1 - p_i) / |o|, m_i = [p_i <= rho] a constant.
    |o| counts ALL observation tokens, not the unmasked ones.
    Args: logp [B, O]; obs_mask [B, O], 1 = observation token; rho in (0, 1].  Returns [B].  Source: PaW eq. 7-8.
    >>> clipped_mae(torch.tensor([[.1, .2, .5]]).log(), torch.ones(1, 3), rho=.2)
    tensor([0.5667])
    """
    return masked_mean(uncertain_mask(logp, rho) * (1 - logp.exp()), obs_mask)

def uncertain_mask(logp, rho):
    """m of PaW eq. 7: True where p <= rho, up to the rounding of exp(log(rho)) in fp32; no gradient."""
    return logp.detach().exp() <= rho * (1 + 1e-6)

def cross_entropy_wm(logp, obs_mask):
    """Mean of -log p over an observation's tokens: [B, O], [B, O] -> [B].  Source: PaW eq. 5 (the ablation)."""
    return masked_mean(-logp, obs_mask)

def world_model_weight(returns, r_max):
    """lambda_g = 1 - mean return / R_max of one group: returns [G] -> scalar.  Source: PaW eq. 10."""
    # DEVIATION: clamped to [0, 1]; with the penalty for invalid actions a mean return can be negative.
    return (1 - (returns * 1.0).mean() / r_max).clamp(0, 1)

def group_normalize(x, group_ids, scale=None):
    """(x - mean) / (std + 1e-6) in each group (unbiased std), or (x - mean) / scale; exactly 0 where all its values are equal.
    Args: x [N]; group_ids [N].  Returns [N]."""
    out = torch.zeros_like(x)
    for g in group_ids.unique():
        rows = group_ids == g
        values = x[rows]
        if (values != values[0]).any():  # std of equal fp32 numbers can be 1e-8 instead of 0
            out[rows] = (values - values.mean()) / (scale or values.std() + 1e-6)
    return out

def group_advantages(returns, group_ids, scale=None):
    """GRPO's advantage (A of PaW eq. 1) of each episode in its group: returns [N], group_ids [N] -> [N].
    With a scale: Dr. GRPO's, not divided by std (Liu et al. 2025, 2503.20783).  Raises ValueError for a group of one.
    >>> group_advantages(torch.tensor([10., 0, 0, 0]), torch.zeros(4, dtype=torch.long))
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """
    if group_ids.unique(return_counts=True)[1].min() < 2:
        raise ValueError("a group needs at least 2 episodes: a single one has no advantage")
    return group_normalize(returns * 1.0, group_ids, scale)

def discounted_returns(rewards, gamma):
    """R_t = sum_{k >= t} gamma^(k-t) r_k of one episode: rewards [T] -> [T]."""
    out, total = torch.zeros_like(rewards), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        total = rewards[t] + gamma * total
        out[t] = total
    return out

def gigpo_advantages(returns, group_ids, step_returns, episode_ids, anchor_ids, omega=1.0, scale=None):
    """GiGPO's advantage of each step: the episode's, plus omega times the step's among equal states of its group.
    Args: returns, group_ids [E] of the episodes; step_returns [N], discounted; episode_ids [N], rows of `returns`;
    anchor_ids [N], equal for the same group and observation text.  Returns [N].  Source: Feng et al. 2025 (2505.10978).
    """
    episode_advantages = group_advantages(returns, group_ids, scale)
    return episode_advantages[episode_ids] + omega * group_normalize(step_returns, anchor_ids, scale)

def policy_loss(logp, old_logp, advantage, action_mask, clip_low, clip_high):
    """PPO's clipped surrogate, mean over all response tokens of the batch.  Source: PaW eq. 1 with GRPO's clip.
    Args: logp, old_logp [B, S]; advantage [B]; action_mask [B, S].  Returns a scalar, 0 for an empty mask.
    """
    ratio = torch.where(action_mask.bool(), logp - old_logp, 0.0).exp()
    a = advantage[:, None]
    loss = -torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)
    return (loss * action_mask).sum() / action_mask.sum().clamp(min=1)

def k3_kl(logp, ref_logp):
    """Schulman's k3 estimate of KL(policy || reference) per token, never negative: exp(d) - d - 1, d = ref - policy."""
    d = ref_logp - logp
    return d.exp() - d - 1

def transition_weights(selected, group_ids, lambdas):
    """Weight of each transition's world-model loss: lambda_g / (|S_alpha of g| * number of groups) if selected, else 0.
    The weighted sum is the second term of eq. 11.  Args: selected bool [N]; group_ids [N]; lambdas [groups].  Returns [N].
    """
    counts = torch.zeros_like(lambdas).index_add_(0, group_ids, selected.to(lambdas.dtype))  # [groups]
    return selected * (lambdas / counts.clamp(min=1) / len(lambdas))[group_ids]

# ---- Prompts and responses ----------------------------------------------------------------------------------------------
PAPER_PROMPT = """You are an expert agent operating in the ALFRED embodied environment. Your task is: {goal}
{history}You are now at step {step} and your current observation is: {obs}
Your admissible actions of the current situation are: [{actions}].
Now it is your turn to act. First reason step by step about the current situation inside <think> </think> tags. Then choose \
one admissible action and give it inside <action> </action> tags."""
PAPER_HISTORY = "You have taken {taken} step(s). The last {kept} observations and the actions you took then:\n{pairs}\n"
COMPACT_PROMPT = "Task: {goal}\nStep: {step}{history}\nObs: {obs}\nActions:{actions}\nAnswer:\n"

def build_prompt(style, goal, obs, admissible, history, history_len):
    """The text the policy reads at one step: task, steps taken, recent history, observation, admissible actions.
    Args: style "paper" (PaW's slots in their order) or "compact" (the same slots for the tiny LM); history: (observation,
    action) pairs from the episode's start, of which the last history_len are shown.  Source: PaW, Prompt.
    """
    taken, kept = len(history), history[max(len(history) - history_len, 0):]
    if style == "compact":
        past = "".join(f"\nObs: {o}\nAct:\n{a}" for o, a in kept)
        return COMPACT_PROMPT.format(goal=goal, step=taken, history=past, obs=obs, actions="".join("\n" + a for a in admissible))
    pairs = "\n".join(f"[Observation {n}: '{o}', Action {n}: '{a}']" for n, (o, a) in enumerate(kept, taken - len(kept) + 1))
    past = PAPER_HISTORY.format(taken=taken, kept=len(kept), pairs=pairs) if kept else ""
    actions = ", ".join(f"'{a}'" for a in admissible)
    return PAPER_PROMPT.format(goal=goal, history=past, step=taken + 1, obs=obs, actions=actions)

def encode_prompt(policy, cfg, goal, obs, admissible, history):
    """Token ids of a prompt, in the chat template where there is one; over max_prompt_len, the oldest history goes first."""
    for kept in range(min(cfg.history_len, len(history)), -1, -1):
        text = build_prompt(cfg.prompt_style, goal, obs, admissible, history, kept)
        if policy.tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            text = policy.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= cfg.max_prompt_len:
            break
    return ids[-cfg.max_prompt_len:]

INVALID_ACTION = "(invalid action)"  # what environment and history get for an invalid response: nothing happens
RESPONSE = re.compile(r"\s*<think>((?:(?!</?think>|</?action>).)*)</think>\s*<action>([^<>]*)</action>", re.I | re.S)

def format_response(action):
    """The shortest valid response: what the tiny LM is taught and what `--constrain` allows."""
    return f"<think></think><action>\n{action}\n</action>"

def parse_response(text, admissible):
    """The admissible action that a response names, or None (an invalid action).
    Valid = one <think>...</think>, then one <action>...</action> whose content is admissible; tags and action are
    case-insensitive, spaces at the action's ends do not count, text after </action> is ignored.  Source: PaW, Prompt.
    >>> parse_response("<think>x</think><action> LOOK </action>", ["look"])
    'look'
    """
    match = RESPONSE.match(text)
    if match is None or re.search(r"<action>", text[match.end():], re.I):
        return None
    action = match.group(2).strip().lower()
    return next((a for a in admissible if a.lower() == action), None)

# ---- The language model -------------------------------------------------------------------------------------------------
@dataclass
class Policy:
    """A causal LM with its tokenizer; `version` counts optimiser steps and is stored with every transition."""
    model: nn.Module
    tokenizer: object
    device: torch.device
    version: int = 0

    def autocast(self):
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

def load_policy(cfg):
    """Load model and tokenizer named by --model.  Raises InputError with one line where that is not possible."""
    path = TINY_FOLDER if cfg.model == "tiny" else Path(cfg.model)
    if not path.exists() and (path.suffix == ".gguf" or cfg.model[0] in "./~" or len(path.parts) > 2):  # no hub name
        raise InputError(f"--model {cfg.model}: there is no such file or folder")
    name, kwargs = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (str(path), {})
    dtype = torch.bfloat16 if cfg.lora_rank and cfg.torch_device.type == "cuda" else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **kwargs)
        if kwargs:  # GGUF: the weights are ordinary ones by now, and shall be saved as such
            model.hf_quantizer = None
            model.config.__dict__.pop("quantization_config", None)
    except (OSError, ValueError, ImportError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(f"--model {cfg.model}: transformers cannot load it ({str(error).strip().splitlines()[0]})") from error
    return make_policy(model, tokenizer, cfg)

def make_policy(model, tokenizer, cfg):
    """Prepare a loaded LM for rollout and training: pad token, no dropout, LoRA, device."""
    if model.config.to_dict().get("final_logit_softcapping"):
        raise InputError(f"--model {cfg.model}: models with logit soft-capping (Gemma 2) are not supported")
    if tokenizer.pad_token_id is None:  # any existing id will do: every mask here comes from lengths, never from ids
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        print(f"the tokenizer has no pad token: padding with {tokenizer.pad_token!r}")
    if not tokenizer.chat_template and cfg.model != "tiny":
        print("the tokenizer has no chat template: prompts are plain text, the response follows directly")
    for module in model.modules():  # no dropout: rollout and update must see the same function (first ratio exactly 1)
        for name in [n for n in vars(module) if n.endswith("dropout") or (n == "p" and isinstance(module, nn.Dropout))]:
            setattr(module, name, 0.0)
    if cfg.lora_rank:
        add_lora(model, cfg.lora_rank)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train(cfg.gradient_checkpointing)  # transformers checkpoints in train mode only; dropout is off in both
    return Policy(model.to(cfg.torch_device), tokenizer, cfg.torch_device)

class LoRALinear(nn.Module):
    """y = W x + (alpha / rank) B A x with W frozen; A random, B zero, alpha = 2 rank (Hu et al. 2021, arXiv 2106.09685)."""
    def __init__(self, base, rank):
        super().__init__()
        self.base, self.scaling = base.requires_grad_(False), 2.0
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.scaling * self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))).to(x.dtype)

def add_lora(model, rank):
    """Freeze the model and give every linear layer but the LM head an adapter, in place."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LoRALinear(module, rank))

def trainable(model):
    """{name: parameter} of what is trained."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}

def save_model(policy, folder, cfg):
    """Write weights (with LoRA: the adapters, in PEFT's format) and tokenizer to a folder."""
    policy.tokenizer.save_pretrained(folder)
    if not cfg.lora_rank:
        return policy.model.save_pretrained(folder)
    adapters = {f"base_model.model.{n}": p.detach().cpu().contiguous() for n, p in trainable(policy.model).items()}
    save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    base = str(TINY_FOLDER) if cfg.model == "tiny" else cfg.model
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": cfg.lora_rank,
              "lora_alpha": 2 * cfg.lora_rank, "target_modules": sorted({n.split(".")[-3] for n in adapters})}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))

# ---- Sampling -----------------------------------------------------------------------------------------------------------
class Response(NamedTuple):
    """A sampled response."""
    ids: list        # token ids, EOS included
    logps: list      # fp32 log-probability of each, at the sampling temperature and under the constraint
    entropies: list  # full-vocabulary entropy at each token, nats
    allowed: list    # token ids allowed at each position under --constrain, else None
    truncated: bool  # cut at max_response_len: neither EOS nor </action>

def allowed_tokens(sequences, prefix):
    """Token ids that may follow the prefix (a list) among the tokenised valid responses of a state, ascending."""
    n = len(prefix)
    return sorted({s[n] for s in sequences if len(s) > n and s[:n] == prefix}) or [0]  # [0]: the row has ended

def pad(rows, dtype, device, side):
    """Token lists (or lists of numbers) -> [B, longest], padded with 0 on one side."""
    return pad_sequence([torch.tensor(r, dtype=dtype) for r in rows], batch_first=True, padding_side=side).to(device)

def positions_of(mask):
    """Position ids that do not count padding: mask [B, T] -> [B, T]; [0,0,1,1,1] -> [0,0,0,1,2]."""
    return (mask.cumsum(-1) - 1).clamp(min=0)

def next_log_probs(logits, temperature, allowed):
    """fp32 log-probabilities [B, V] of what is sampled from; `allowed`: the token ids allowed in each row, or None for all."""
    logits = logits.float() if temperature in (0, 1) else logits.float() / temperature
    if allowed is not None:
        pairs = torch.tensor([(b, i) for b, ids in enumerate(allowed) for i in ids], device=logits.device)
        outside = torch.ones_like(logits, dtype=torch.bool)
        outside[pairs[:, 0], pairs[:, 1]] = False
        logits = logits.masked_fill(outside, -torch.inf)
    return torch.log_softmax(logits, -1)

@torch.no_grad()
def generate(policy, prompts, max_len, temperature, generator, admissible=None):
    """Sample a Response per prompt (token list), all rows together; a row stops at EOS or at the end of `</action>`.
    temperature 0 takes the first maximum; `admissible` (a list of actions per row) constrains the responses to those.
    """
    ids, mask = (pad(rows, torch.long, policy.device, "left") for rows in (prompts, [[1] * len(p) for p in prompts]))
    tries = admissible and [policy.tokenizer([format_response(a) for a in actions], add_special_tokens=False)["input_ids"]
                            for actions in admissible]
    head, cache, step_ids = policy.model.get_output_embeddings(), None, ids
    done = torch.zeros(len(prompts), dtype=torch.bool, device=policy.device)
    tokens, logps, entropies, lengths, allowed_ids = [], [], [], torch.full_like(done, max_len, dtype=torch.long), []
    for s in range(max_len):
        with policy.autocast():
            out = policy.model.base_model(input_ids=step_ids, attention_mask=mask, use_cache=True, cache=cache,
                                          position_ids=positions_of(mask)[:, -step_ids.shape[1]:])
            logits, cache = head(out.last_hidden_state[:, -1]), out.cache  # [B, V]
        prefixes = torch.stack(tokens, 1).tolist() if tries and tokens else [[]] * len(prompts)
        allowed_ids.append(tries and [allowed_tokens(t, p) for t, p in zip(tries, prefixes)])
        log_probs = next_log_probs(logits, temperature, allowed_ids[-1])
        probs = log_probs.exp()
        token = torch.multinomial(probs, 1, generator=generator)[:, 0] if temperature else log_probs.argmax(-1)
        tokens.append(token)
        logps.append(log_probs.gather(1, token[:, None])[:, 0])
        entropies.append(-(probs * log_probs.clamp(min=-1e9)).sum(-1))
        recent = policy.tokenizer.batch_decode(torch.stack(tokens[-12:], 1).tolist())  # 12 tokens hold a whole `</action>`
        closed = torch.tensor(["</action>" in text.lower() for text in recent], device=policy.device)
        ended = (token == policy.tokenizer.eos_token_id) | closed
        lengths = torch.where(ended & ~done, s + 1, lengths)
        done = done | ended
        if bool(done.all()):
            break
        step_ids, mask = token[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    columns = [torch.stack(x, 1).tolist() for x in (tokens, logps, entropies)]
    return [Response(*(c[b][:n] for c in columns), tries and [step[b] for step in allowed_ids[:n]], not ended)
            for b, (n, ended) in enumerate(zip(lengths.tolist(), done.tolist()))]

# ---- Rollout ------------------------------------------------------------------------------------------------------------
@dataclass
class Transition:
    """One step of one episode: what was read, written and seen next."""
    prompt_ids: list
    response: Response
    obs_ids: list  # the NEXT observation o_{t+1}
    state: str     # the observation acted on (GiGPO's anchor)
    reward: float
    valid: bool
    episode: int   # row of the episode in this rollout
    group: int
    version: int   # policy version that sampled it

@dataclass
class Episode:
    """One finished episode: its numbers, and its text for the transcripts."""
    group: int
    task_id: str
    task_type: str
    ret: float = 0.0   # sum of rewards (the return)
    won: bool = False
    steps: list = field(default_factory=list)  # (observation, response text, reward, next observation)

def rollout(policy, pool, tasks, group_size, cfg, temperature, generator, seconds):
    """Play every task (an index) group_size times; returns (transitions, episodes) and adds to seconds["env"], ["generate"]."""
    clock = time.perf_counter()
    live = list(range(len(tasks) * group_size))
    current = dict(zip(live, pool.reset(live, [tasks[i // group_size] for i in live])))  # row -> (obs, info)
    episodes = [Episode(i // group_size, current[i][1]["task_id"], current[i][1]["task_type"]) for i in live]
    history, transitions, scale = {i: [] for i in live}, [], cfg.reward_success / pool.max_return
    while live:
        prompts = [encode_prompt(policy, cfg, info["goal"], obs, info["admissible_actions"], history[i])
                   for i in live for obs, info in [current[i]]]
        seconds["env"] += (now := time.perf_counter()) - clock
        admissible = [current[i][1]["admissible_actions"] for i in live]
        responses = generate(policy, prompts, cfg.max_response_len, temperature, generator, admissible if cfg.constrain else None)
        seconds["generate"] += (clock := time.perf_counter()) - now
        texts = [policy.tokenizer.decode(r.ids, skip_special_tokens=True) for r in responses]
        actions = [parse_response(t, a) for t, a in zip(texts, admissible)]
        shown = [a or INVALID_ACTION for a in actions]
        results = pool.step(live, shown)
        for k, (i, (next_obs, reward, terminated, truncated, info)) in enumerate(zip(list(live), results)):
            obs, reward = current[i][0], scale * reward + (0.0 if actions[k] else cfg.reward_invalid)
            obs_ids = policy.tokenizer(next_obs, add_special_tokens=False)["input_ids"][:cfg.max_obs_len]
            transitions.append(Transition(prompts[k], responses[k], obs_ids, obs, reward, actions[k] is not None, i,
                                          episodes[i].group, policy.version))
            history[i].append((obs, shown[k]))
            episodes[i].ret += reward
            episodes[i].won |= info["won"]
            episodes[i].steps.append((obs, texts[k], reward, next_obs))
            current[i] = next_obs, info
            if terminated or truncated:
                live.remove(i)
    seconds["env"] += time.perf_counter() - clock
    return transitions, episodes

# ---- Update -------------------------------------------------------------------------------------------------------------
class Batch(NamedTuple):
    """Right-padded rows [h_t, a_t, o_{t+1}] (o_{t+1} only where it is scored) and what their loss needs."""
    ids: torch.Tensor             # [B, T]
    attention_mask: torch.Tensor  # [B, T], 1 = token
    prompt_len: torch.Tensor      # [B]
    response_len: torch.Tensor    # [B]
    action_mask: torch.Tensor     # [B, S], 1 = response token
    obs_mask: torch.Tensor        # [B, O], 1 = observation token
    old_logp: torch.Tensor        # [B, S] at rollout
    temperature: float = 1.0
    allowed: list = None          # --constrain: per row and response token, the allowed ids

def make_batch(transitions, with_obs, device, temperature=1.0):
    """Pad transitions into a Batch; with_obs (list of bool) says to which rows the next observation is appended."""
    parts = [(t.prompt_ids, t.response.ids, t.obs_ids if w else []) for t, w in zip(transitions, with_obs)]
    longs = lambda rows: pad(rows, torch.long, device, "right")
    ones = lambda *columns: longs([[1] * sum(len(p[c]) for c in columns) for p in parts])  # masks: from lengths, never from ids
    return Batch(longs([p + a + o for p, a, o in parts]), ones(0, 1, 2), longs([[len(p)] for p, _, _ in parts])[:, 0],
                 longs([[len(a)] for _, a, _ in parts])[:, 0], ones(1), ones(2),
                 pad([t.response.logps for t in transitions], torch.float32, device, "right"), temperature,
                 [t.response.allowed for t in transitions] if transitions[0].response.allowed else None)

def response_logps(model, batch, rho=None):
    """Log-probabilities of response [B, S] and observation [B, O] tokens from one forward pass, 0 where masked.
    The response's are at the batch's temperature and constraint.  The LM head is applied at scored positions only.  With rho,
    observation tokens above that probability get no gradient: eq. 7 drops them, so the head's backward pass is spared.
    """
    hidden = model.base_model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False,
                              position_ids=positions_of(batch.attention_mask)).last_hidden_state  # [B, T, D]
    head, allowed = model.get_output_embeddings(), batch.allowed and [a for row in batch.allowed for a in row]
    # The logit at position t predicts token t + 1.
    action = scored_logp(head, hidden, batch.ids, batch.prompt_len - 1, batch.action_mask, batch.temperature, allowed)
    obs = scored_logp(head, hidden, batch.ids, batch.prompt_len + batch.response_len - 1, batch.obs_mask, 1.0, None, rho)
    return action, obs

def scored_logp(head, hidden, ids, first, mask, temperature, allowed, rho=None):
    """fp32 log-probabilities [B, S] of the tokens after positions first [B], first + 1, ...; 0 where mask [B, S] is 0."""
    rows, offsets = mask.nonzero(as_tuple=True)
    h, targets = hidden[rows, first[rows] + offsets], ids[rows, first[rows] + offsets + 1]  # [scored tokens, D], [scored tokens]
    score = lambda h, targets: next_log_probs(head(h), temperature, allowed).gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(rho is None and torch.is_grad_enabled()):
        logp = score(h, targets)
    if rho is not None:
        kept = uncertain_mask(logp, rho)
        logp = logp.masked_scatter(kept, score(h[kept], targets[kept]))
    return torch.zeros(mask.shape, dtype=logp.dtype, device=logp.device).index_put((rows, offsets), logp)

def compute_advantages(transitions, episodes, cfg):
    """Advantage of every transition [N] by --algo."""
    returns, groups = torch.tensor([e.ret for e in episodes]), torch.tensor([e.group for e in episodes])
    episode_ids = torch.tensor([t.episode for t in transitions])
    scale = cfg.reward_success / 2 if cfg.adv_norm == "mean" else None  # = the std where every second episode succeeds
    if cfg.algo == "grpo":
        return group_advantages(returns, groups, scale)[episode_ids]
    rewards, anchors, step_returns = torch.tensor([t.reward for t in transitions]), {}, torch.zeros(len(transitions))
    for episode in range(len(episodes)):
        steps = episode_ids == episode  # in the order of play
        step_returns[steps] = discounted_returns(rewards[steps], cfg.gigpo_gamma)
    anchor_ids = torch.tensor([anchors.setdefault((t.group, t.state), len(anchors)) for t in transitions])
    return gigpo_advantages(returns, groups, step_returns, episode_ids, anchor_ids, cfg.gigpo_omega, scale)

def world_model_weights(transitions, episodes, cfg):
    """PaW's share of an update: (weight of each transition's world-model loss [N], lambda of each group)."""
    returns = [torch.tensor([e.ret for e in episodes if e.group == g]) for g in range(episodes[-1].group + 1)]
    lambdas = torch.stack([world_model_weight(r, cfg.reward_success) if cfg.adaptive_lambda else torch.tensor(1.0) for r in returns])
    if cfg.wm == "none":
        return torch.zeros(len(transitions)), lambdas
    logps = [torch.tensor([t.response.logps]) for t in transitions]
    entropy = (torch.cat([action_entropy(logp, torch.ones_like(logp)) for logp in logps]) if cfg.entropy == "sampled"
               else torch.tensor([float(np.mean(t.response.entropies)) for t in transitions]))
    group_ids = torch.tensor([t.group for t in transitions])
    return transition_weights(select_transitions(entropy, cfg.alpha), group_ids, lambdas), lambdas

def micro_batches(rows, transitions, with_obs, token_budget):
    """Cut rows, longest first, into lists whose padded size stays within the token budget (or that hold a single row)."""
    length = {n: len(t.prompt_ids) + len(t.response.ids) + with_obs[n] * len(t.obs_ids) for n in rows for t in [transitions[n]]}
    batches, rows = [], sorted(rows, key=lambda n: (-length[n], n))
    while rows:
        size = max(1, token_budget // length[rows[0]])
        batches, rows = batches + [rows[:size]], rows[size:]
    return batches

class Reference:
    """The frozen start of the policy for the KL term: its trainable weights, swapped in for a forward pass."""
    def __init__(self, model):
        self.start = {n: p.detach().clone() for n, p in trainable(model).items()}

    def swap(self, model):
        for name, p in trainable(model).items():
            p.data, self.start[name] = self.start[name], p.data

    @torch.no_grad()
    def logps(self, policy, transitions, temperature):
        """Response log-probabilities [B, S] under the start; the policy is unchanged afterwards."""
        batch = make_batch(transitions, [False] * len(transitions), policy.device, temperature)
        self.swap(policy.model)
        try:
            with policy.autocast():
                return response_logps(policy.model, batch)[0]
        finally:
            self.swap(policy.model)

def loss_of(policy, batch, ref_logp, advantage, wm_weight, shares, cfg):
    """Loss of a micro-batch (eq. 11 plus the KL term), sums for the log [9], log-ratio [B, S].
    shares = (response tokens per optimiser step, optimiser steps per epoch): with these denominators the gradient does not
    depend on how a mini-batch is cut up; each token (eq. 1) and transition (eq. 9) weighs what the whole update gives it.
    """
    tokens_per_step, num_steps = shares
    with policy.autocast():
        logp, obs_logp = response_logps(policy.model, batch, cfg.rho if cfg.wm == "cmae" else None)
    num_tokens, mask = batch.action_mask.sum(), batch.action_mask.bool()
    pg = policy_loss(logp, batch.old_logp, advantage, mask, cfg.clip_low, cfg.clip_high)
    wm = cross_entropy_wm(obs_logp, batch.obs_mask) if cfg.wm == "ce" else clipped_mae(obs_logp, batch.obs_mask, cfg.rho)
    kl = k3_kl(logp, ref_logp)[mask].mean() if cfg.kl_coef else torch.zeros_like(pg)
    loss = (pg + cfg.kl_coef * kl) * (num_tokens / tokens_per_step) + num_steps * (wm_weight * wm).sum()
    log_ratio, scored = (logp - batch.old_logp).detach(), wm_weight > 0
    step = log_ratio.exp() * advantage[:, None].sign() - advantage[:, None].sign()  # > 0: moved the way the advantage says
    clipped = mask & (step > torch.where(advantage > 0, cfg.clip_high, cfg.clip_low)[:, None])
    confident = ~uncertain_mask(obs_logp, cfg.rho) & batch.obs_mask.bool()
    return loss, torch.stack([num_tokens, pg.detach() * num_tokens, clipped.sum(), kl.detach() * num_tokens,
                              (wm.detach() * scored).sum(), scored.sum(), confident.sum(), batch.obs_mask.sum(),
                              batch.attention_mask.sum()]), log_ratio

def update_policy(policy, reference, optimizer, transitions, episodes, cfg, generator):
    """One update of the paper's algorithm on a rollout; returns its metrics."""
    advantages = compute_advantages(transitions, episodes, cfg)
    wm_weights, lambdas = world_model_weights(transitions, episodes, cfg)
    with_obs = (wm_weights > 0).tolist()
    # A transition without any gradient need not be computed; the denominators below still count it.
    used = {n for n in range(len(transitions)) if cfg.kl_coef or with_obs[n] or advantages[n] != 0}
    num_steps = math.ceil(len(transitions) / cfg.mini_batch)
    shares = sum(len(t.response.ids) for t in transitions) / num_steps, num_steps
    sums, first_deviation, grad_norms = torch.zeros(9, device=policy.device), None, []
    for _ in range(cfg.epochs):
        order = torch.randperm(len(transitions), generator=generator).tolist()
        for chosen in (used.intersection(order[step::num_steps]) for step in range(num_steps)):
            log_ratios, batches = [], micro_batches(chosen, transitions, with_obs, cfg.token_budget)
            for rows in batches:
                batch = make_batch([transitions[n] for n in rows], [with_obs[n] for n in rows], policy.device, cfg.temperature)
                ref_logp = reference.logps(policy, [transitions[n] for n in rows], cfg.temperature) if cfg.kl_coef else None
                loss, batch_sums, log_ratio = loss_of(policy, batch, ref_logp, advantages[rows].to(policy.device),
                                                      wm_weights[rows].to(policy.device), shares, cfg)
                loss.backward()
                sums, log_ratios = sums + batch_sums, log_ratios + [log_ratio.abs().amax(1)]
            if not batches:
                continue
            grad_norms.append(optimizer_step(policy, optimizer, sum(batches, []), torch.cat(log_ratios), cfg))
            first_deviation = torch.cat(log_ratios).max().expm1() if first_deviation is None else first_deviation
    return update_metrics(transitions, episodes, lambdas, sum(with_obs), sums, first_deviation, grad_norms)

def optimizer_step(policy, optimizer, rows, log_ratios, cfg):
    """Clip the gradient and step; a non-finite gradient raises FloatingPointError with its transitions.  Returns the norm."""
    norm = nn.utils.clip_grad_norm_(trainable(policy.model).values(), cfg.max_grad_norm)
    if not bool(torch.isfinite(norm)):
        bad = [n for n, ok in zip(rows, torch.isfinite(log_ratios).tolist()) if not ok] or rows
        raise FloatingPointError(f"optimiser step {policy.version}: non-finite loss or gradient in transitions {bad}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    policy.version += 1
    return norm

def update_metrics(transitions, episodes, lambdas, num_selected, sums, first_deviation, grad_norms):
    """The figures of one update as plain numbers; loss terms are token-weighted means over all its micro-batches."""
    tokens, pg, clipped, kl, wm, wm_rows, confident, obs_tokens, all_tokens = sums.tolist()
    mean = lambda xs: float(np.mean(list(xs)))
    returns = [{e.ret for e in episodes if e.group == g} for g in range(len(lambdas))]
    return {
        "reward": mean(e.ret for e in episodes), "success": mean(e.won for e in episodes),
        "valid_action_rate": mean(t.valid for t in transitions), "episode_len": mean(len(e.steps) for e in episodes),
        "pg_loss": pg / max(tokens, 1), "clip_frac": clipped / max(tokens, 1), "kl": kl / max(tokens, 1),
        "entropy": mean(h for t in transitions for h in t.response.entropies), "wm_loss": wm / max(wm_rows, 1),
        "wm_clipped_frac": confident / max(obs_tokens, 1), "wm_selected": num_selected, "lambda": float(lambdas.mean()),
        "frac_zero_std": mean(len(r) == 1 for r in returns), "truncated_frac": mean(t.response.truncated for t in transitions),
        "grad_norm": float(torch.stack(grad_norms).mean()) if grad_norms else 0.0, "train_tokens": int(all_tokens),
        "first_ratio_deviation": float(first_deviation) if grad_norms else 0.0, "transitions": len(transitions),
        "version": transitions[0].version, "frac_unsolved": 1 - len({e.group for e in episodes if e.won}) / len(lambdas)}

# ---- Evaluation ---------------------------------------------------------------------------------------------------------
def evaluate(policy, pool, cfg):
    """Play tasks 0 .. eval_episodes - 1 of the pool once, with fixed seeds; returns {task type: [solved, episodes]}."""
    generator, counts = torch.Generator(policy.device).manual_seed(20260602), {}
    num_envs = cfg.groups * cfg.group_size
    for first in range(0, cfg.eval_episodes, num_envs):
        tasks = [n % pool.num_tasks for n in range(first, min(first + num_envs, cfg.eval_episodes))]
        for e in rollout(policy, pool, tasks, 1, cfg, cfg.eval_temperature, generator, defaultdict(float))[1]:
            solved, episodes = counts.get(e.task_type, (0, 0))
            counts[e.task_type] = [solved + e.won, episodes + 1]
    counts = dict(sorted(counts.items(), key=lambda c: (list(TASK_NAMES) + [c[0]]).index(c[0])))
    return counts | {"all": [sum(column) for column in zip(*counts.values())] or [0, 0]}

def success_table(rows):
    """The paper's table 1 as text: rows {label: what evaluate returned} -> success in %."""
    types = list(next(iter(rows.values())))
    lines = ["success, %".ljust(12) + "".join(TASK_NAMES.get(t, t)[:9].rjust(10) for t in types) + "  episodes"]
    for label, counts in rows.items():
        cells = [f"{100 * solved / max(episodes, 1):10.1f}" for solved, episodes in counts.values()]
        lines.append(label.ljust(12) + "".join(cells) + f"{counts['all'][1]:10d}")
    return "\n".join(lines)

# ---- Checkpoints and files ----------------------------------------------------------------------------------------------
RESUMABLE = {"updates", "device", "run_dir", "env_workers", "eval_every", "sample_every", "save_every"}  # may change at --resume

def atomic_write(path, write):
    """Call write(temporary path), then rename it to path: a crash or a full disk leaves the old file whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

def save_checkpoint(path, policy, reference, optimizer, generators, update, cfg, before):
    """All that an exact continuation needs: weights, frozen start, optimiser, random states, counters, config."""
    state = {"config": dataclasses.asdict(cfg), "update": update, "version": policy.version, "before": before,
             "weights": trainable(policy.model), "reference": reference.start, "optimizer": optimizer.state_dict(),
             "torch_rng": torch.get_rng_state(), "generators": {k: g.get_state() for k, g in generators.items()}}
    atomic_write(path, lambda temporary: torch.save(state, temporary))

def load_checkpoint(path):
    """Read a checkpoint (weights_only: nothing but tensors and plain values is unpickled).  Raises InputError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        Config(**state["config"]), state["weights"], state["optimizer"], state["update"]
    except Exception as error:  # torch.load fails in many ways on a missing or damaged file; all mean the same to the user
        raise InputError(f"{path}: not a readable checkpoint of paw.py ({type(error).__name__}); name another one") from error
    return state

def load_weights(policy, weights, path):
    """Copy a checkpoint's weights into the model; raises InputError where the shapes differ."""
    own = trainable(policy.model)
    if {n: p.shape for n, p in own.items()} != {n: w.shape for n, w in weights.items()}:
        raise InputError(f"{path}: its weights have another shape than this model; give the --model and --lora_rank it was made with")
    for name, p in own.items():
        p.data.copy_(weights[name])

def open_run_dir(cfg, resume):
    """Create the run's folder; raises InputError where it cannot be written or already holds a run."""
    path = Path(cfg.run_dir or f"runs/{cfg.env}-{cfg.algo}-{cfg.wm}-seed{cfg.seed}-{time.strftime('%m%d-%H%M%S')}")
    if (path / "checkpoint.pt").exists() and not resume:
        raise InputError(f"--run_dir {path}: it already holds a run; add --resume to go on with it, or name another folder")
    try:
        (path / "transcripts").mkdir(parents=True, exist_ok=True)
        atomic_write(path / "config.json", lambda t: t.write_text(json.dumps(dataclasses.asdict(cfg), indent=1)))
    except OSError as error:
        raise InputError(f"--run_dir {path}: cannot write there ({error.strerror})") from error
    return path

class Log:
    """What a run prints and writes: header, progress bar, a line and a JSON object per update, transcripts, the table."""
    def __init__(self, run_dir, cfg, policy, start):
        self.run_dir, self.cfg, self.start_time = run_dir, cfg, time.perf_counter()
        total, trained = (sum(p.numel() for p in ps) for ps in (policy.model.parameters(), trainable(policy.model).values()))
        print(f"paw.py: {cfg.model} ({total:,} parameters, {trained:,} trained, {policy.model.dtype}) on {policy.device}, "
              f"{cfg.env}, {cfg.algo} + wm {cfg.wm}, seed {cfg.seed}; files in {run_dir}")
        path = run_dir / "metrics.jsonl"  # on resume: drop the lines of updates after the checkpoint
        lines = path.read_text().splitlines()[:start] if path.exists() else []
        atomic_write(path, lambda t: t.write_text("".join(line + "\n" for line in lines)))
        self.bar = tqdm(range(start, cfg.updates), initial=start, total=cfg.updates, desc="updates", unit="update")

    def update(self, update, metrics, seconds, episodes):
        """Write the figures of one update everywhere; now and then a transcript."""
        row = {"update": update, **metrics, "tokens_per_s": metrics["train_tokens"] / max(seconds["train"], 1e-9),
               **{f"seconds_{k}": v for k, v in seconds.items()}, "seconds": sum(seconds.values())}
        with open(self.run_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        self.bar.set_postfix({k: f"{row[k]:.2f}" for k in ("success", "reward", "valid_action_rate")})
        shown = "reward success valid_action_rate episode_len pg_loss wm_loss lambda kl clip_frac entropy grad_norm seconds"
        tqdm.write(f"update {update}: " + "  ".join(f"{k} {row[k]:.3g}" for k in shown.split()))
        if update % self.cfg.sample_every == 0:
            (self.run_dir / "transcripts" / f"update_{update:05d}.txt").write_text(transcript(episodes[0]))

    def finish(self, before, after):
        """Print and keep the table of the whole run."""
        seconds = time.perf_counter() - self.start_time
        (self.run_dir / "result.json").write_text(json.dumps({"before": before, "after": after, "seconds": seconds}))
        print(f"\n{self.cfg.eval_split}, temperature {self.cfg.eval_temperature}:")
        print(success_table({"before": before, "after": after}) + f"\n{seconds:.0f} s; model in {self.run_dir / 'model'}")

def transcript(episode):
    """One episode as readable text."""
    lines = [f"{episode.task_id} ({episode.task_type}): {'solved' if episode.won else 'not solved'}, return {episode.ret:.1f}"]
    for t, (obs, response, reward, _) in enumerate(episode.steps):
        lines += [f"\n[{t}] {obs}", f"    > {response.strip()}    (reward {reward:+.1f})"]
    return "\n".join(lines + [f"\n[end] {episode.steps[-1][3]}\n"])

# ---- The run ------------------------------------------------------------------------------------------------------------
def seed_everything(seed, device):
    """Seed python, numpy and torch, and return the named generators of the run."""
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    return {"sampling": torch.Generator(device).manual_seed(seed), "mini_batches": torch.Generator().manual_seed(seed + 1)}

def draw_tasks(update, cfg, num_tasks):
    """The tasks of an update: the next slice of a seeded permutation of all games, over and over."""
    order = torch.randperm(num_tasks, generator=torch.Generator().manual_seed(cfg.seed)).tolist()
    return [order[k % num_tasks] for k in range(update * cfg.groups, (update + 1) * cfg.groups)]

def restore(state, policy, reference, optimizer, generators):
    """Put a checkpoint back; returns (next update, the evaluation before training)."""
    load_weights(policy, state["weights"], "--resume")
    reference.start = {n: t.to(policy.device) for n, t in state["reference"].items()}
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
    for name, generator in generators.items():
        generator.set_state(state["generators"][name])
    policy.version = state["version"]
    return state["update"], state["before"]

def train(cfg, state=None):
    """The whole job: evaluate, train, evaluate again, print the table.  `state`: a checkpoint to continue."""
    generators = seed_everything(cfg.seed, cfg.torch_device)
    policy = load_policy(cfg)
    reference = Reference(policy.model)
    optimizer = torch.optim.AdamW(trainable(policy.model).values(), lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
    start, before = restore(state, policy, reference, optimizer, generators) if state else (0, None)
    num_envs, workers = cfg.groups * cfg.group_size, cfg.env_workers
    with (EnvPool(cfg.env, num_envs, workers, **cfg.env_options("train")) as pool,
          EnvPool(cfg.env, num_envs, workers, **cfg.env_options(cfg.eval_split)) as eval_pool):
        run_dir = open_run_dir(cfg, resume=state is not None)
        log = Log(run_dir, cfg, policy, start)
        before = before or evaluate(policy, eval_pool, cfg)
        interrupted = []  # Ctrl-C ends the run after the update in progress; a second Ctrl-C ends it at once
        signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.default_int_handler)))
        for update in log.bar:
            seconds, tasks = defaultdict(float), draw_tasks(update, cfg, pool.num_tasks)
            transitions, episodes = rollout(policy, pool, tasks, cfg.group_size, cfg, cfg.temperature, generators["sampling"], seconds)
            clock = time.perf_counter()
            metrics = update_policy(policy, reference, optimizer, transitions, episodes, cfg, generators["mini_batches"])
            seconds["train"] = time.perf_counter() - clock
            if cfg.eval_episodes and cfg.eval_every and (update + 1) % cfg.eval_every == 0:
                solved, episodes_played = evaluate(policy, eval_pool, cfg)["all"]
                metrics["eval_success"] = solved / episodes_played
            log.update(update, metrics, seconds, episodes)
            if (update + 1) % cfg.save_every == 0 or update + 1 == cfg.updates or interrupted:
                save_checkpoint(run_dir / "checkpoint.pt", policy, reference, optimizer, generators, update + 1, cfg, before)
            if interrupted:
                raise KeyboardInterrupt
        save_model(policy, run_dir / "model", cfg)
        log.finish(before, evaluate(policy, eval_pool, cfg))

def parse_arguments(argv):
    """(explicit settings, mode arguments): a flag per Config field, and the flags that choose what to do."""
    parser = argparse.ArgumentParser(prog="paw.py", description=__doc__.split("\n")[0], argument_default=argparse.SUPPRESS)
    parser.error = lambda message: (_ for _ in ()).throw(InputError(message))
    for f in dataclasses.fields(Config):
        text = f"{f.metadata['help']} [{f.default}]"
        kind = {"action": argparse.BooleanOptionalAction} if isinstance(f.default, bool) else {"type": type(f.default)}
        parser.add_argument(f"--{f.name}", help=text.replace("%", "%%"), **kind)
    parser.add_argument("--resume", nargs="?", const="", help="continue a run: its checkpoint, or none for the one in --run_dir")
    parser.add_argument("--eval", metavar="CKPT", help="evaluate a checkpoint instead of training")
    parser.add_argument("--plot", nargs="+", metavar="RUN", help="draw the curves of run folders to curves.png instead of training")
    parser.add_argument("--warm_start", action="store_true", help="make the tiny LM anew in tiny_lm/ (README: how long)")
    arguments = vars(parser.parse_args(argv))
    modes = {k: arguments.pop(k) for k in ("resume", "eval", "plot", "warm_start") if k in arguments}
    return arguments, modes

def main(argv=None):
    """Run what the command line asks for."""
    explicit, modes = parse_arguments(argv)
    cfg = Config(**explicit)
    cfg.validate()
    if "plot" in modes:
        from benchmarks.plot import plot
        return plot(modes["plot"], "curves.png")
    if "warm_start" in modes:
        from tiny_lm import make  # not part of the method: it stands in for the pretraining of a real LLM
        return make.main(cfg)
    if "eval" not in modes and "resume" not in modes:
        return train(cfg)
    path = Path(modes.get("eval") or modes["resume"] or Path(cfg.run_dir) / "checkpoint.pt")
    state = load_checkpoint(path)
    cfg = Config(**state["config"] | {"run_dir": str(path.parent)} | explicit)  # a checkpoint's settings, and the flags given
    cfg.validate()
    if "eval" in modes:
        load_weights(policy := load_policy(cfg), state["weights"], path)
        with EnvPool(cfg.env, cfg.groups * cfg.group_size, cfg.env_workers, **cfg.env_options(cfg.eval_split)) as pool:
            print(f"{path} after {state['update']} updates, {cfg.eval_split}, temperature {cfg.eval_temperature}:")
            return print(success_table({"success": evaluate(policy, pool, cfg)}))
    for name, value in explicit.items():
        if name not in RESUMABLE and value != state["config"][name]:
            raise InputError(f"--{name} {value}: the checkpoint was made with {state['config'][name]}; leave the flag out to resume")
    if (there := Path(cfg.run_dir) / "checkpoint.pt").exists() and not there.samefile(path):
        raise InputError(f"--run_dir {cfg.run_dir}: it already holds another run; name another folder")
    train(cfg, state)

if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(print(f"paw.py: {error}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(130)
