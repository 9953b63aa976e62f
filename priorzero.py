"""PriorZero: an LLM tells a latent tree search where to look first, and learns from what the search finds (arXiv 2605.12289).

UniZero (arXiv 2406.10667) = a transformer that predicts latent observations, rewards, policy and value, searched by MCTS.
PriorZero mixes the LLM's opinion into the ROOT prior of that search only, and trains world model and LLM in turns: the LLM by
PPO, with the world model's n-step advantage.  No gradient crosses: the LLM shapes what is collected, the world model a scalar.

    paper                                                  function here
    3.1   history -> latent, imagined steps                WorldModel.forward, encode_roots, imagine
    3.1   policy, value, reward, next-latent losses        world_model_losses (two_hot, n_step_targets, simnorm)
    3.2   mixture at the root, adaptive weight             fuse_root_prior, adaptive_alpha
    3.2   analyse, then score each action                  generate_analyses, action_scores
    3.3   A = Q_n - v of the target model                  sample_advantages, normalize_advantages, blend_format_reward
    3.3   clipped loss, w_cot, k3 KL                       ppo_loss, token_weights, k3_kl
    table 2   the loop                                     train

On 2 CPU cores, no GPU, no network (a shipped tiny LM as the prior; result and time: README):
    python priorzero.py --env babyai
On one GPU with the paper's sizes (Jericho; the story file is yours to get):
    python priorzero.py --env jericho --game detective --rom_dir ROMS --model Qwen/Qwen2.5-3B-Instruct --encoder BAAI/bge-base-en-v1.5 \\
        --width 768 --heads 24 --lora_rank 32 --llm_lr 1e-6 --wm_updates 2000 --llm_updates 200 --llm_batch 128 --env_steps 50000

DEVIATION: an action is its TEXT, not its place in the list.  In these games place i means another command in every state, so an
action token embeds the command, and the policy scores the commands of the state's own list (imagined states: of the root's list).
`--action_slots index` is the public code's way.
"""

import argparse, copy, dataclasses, difflib, json, math, os, random, re, signal, sys, time, zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from envs import BABYAI_ACTION_CAP, JERICHO_GAMES, EnvPool, InputError
from mcts import Root, Step, action_probs, search, visit_entropy

# Dimension letters: B rows, H steps of a window, W steps read with it (H + n), C steps of a root's context, A actions, K keys,
# D width, L layers, M support bins, N any number, T tokens, P prompt tokens, S scored tokens.  Masks: 1 = keep.

disable_progress_bar()
TINY_FOLDER = Path(__file__).parent / "tiny_lm_babyai"
PANELS = ("return", "solved", "episode_len", "eval_return", "visit_entropy", "prior_entropy", "value_loss", "llm_kl")
PRESETS = {"babyai": {}, "jericho": dict(gamma=0.95)}  # defaults that differ between environments

# ---- Settings -----------------------------------------------------------------------------------------------------------
def flag(default, help, choices=None, low=None, high=None):
    """A Config field: its default, one line of help (meaning, unit, origin), and its choices or its range."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})

@dataclass
class Config:
    """Every setting, once; each becomes a command-line flag.  Defaults fit 2 CPU cores; "PZ:" marks the paper's value."""
    env: str = flag("babyai", "environment", ("babyai", "jericho"))
    level: str = flag("PickupLoc", "BabyAI level, or all")
    game: str = flag("detective", "Jericho game")
    rom_dir: str = flag("", "folder with Jericho story files; empty = the environment variable JERICHO_ROMS")
    max_steps: int = flag(0, "actions per episode; 0 = the environment's (PZ: BabyAI 20, Jericho 50-500 by game)", low=0)
    env_workers: int = flag(0, "environment processes; 0 = step them in this process", low=0)
    env_steps: int = flag(12000, "environment steps of the run (PZ: 50k Jericho, 100k BabyAI)", low=0)
    num_envs: int = flag(16, "environments played side by side", low=1)
    # the prior
    model: str = flag("tiny", "causal LM of the prior: tiny (shipped, BabyAI), a Hugging Face name, a folder, or a .gguf file")
    alpha: float = flag(0.5, "weight of the LLM in the root prior; 0 = UniZero, no LLM is loaded (PZ: 0.5)", low=0, high=1)
    adaptive_alpha: bool = flag(False, "the surer the world model, the larger alpha (PZ 3.2), in [alpha_min, alpha_max]")
    alpha_min: float = flag(0.3, "least adaptive alpha", low=0, high=1)
    alpha_max: float = flag(0.7, "greatest adaptive alpha", low=0, high=1)
    prior_temperature: float = flag(1.0, "softmax temperature of the LLM's scores (PZ: 1)", low=1e-6)
    cot: bool = flag(True, "the LLM analyses the situation before actions are scored (the tiny LM never does)")
    max_cot_len: int = flag(512, "tokens of an analysis at most (PZ: 512)", low=1)
    history_len: int = flag(10, "past steps in the LLM's prompt (public code: BabyAI 10, Jericho 25)", low=0)
    max_prompt_len: int = flag(2048, "prompt tokens; older history is dropped first", low=16)
    lora_rank: int = flag(0, "LoRA rank; 0 trains all weights of the LLM", low=0)
    token_budget: int = flag(8192, "padded tokens of one LLM pass; neither scores nor gradients depend on it", low=1)
    # the search
    mcts: bool = flag(True, "search; off: act from the fused root prior")
    num_simulations: int = flag(25, "simulations per step (PZ: 25)", low=1)
    eval_simulations: int = flag(25, "simulations per step of evaluation (PZ: Jericho 25, BabyAI 50)", low=1)
    dirichlet_alpha: float = flag(0.3, "root noise", low=1e-6)
    dirichlet_fraction: float = flag(0.25, "share of the noise in the root prior; evaluation has none", low=0, high=1)
    temperature: float = flag(1.0, "exponent 1/temperature of the visits an action is drawn from, at the start", low=0)
    final_temperature: float = flag(0.25, "the same from half of the run on (public code: 0.25 always)", low=0)
    gamma: float = flag(0.97, "discount per step (PZ: 0.997)", low=0, high=1)
    # the world model
    encoder: str = flag("hash", "text encoder: hash (trained), or a frozen Hugging Face encoder by name or folder (PZ: BGE-base)")
    hash_buckets: int = flag(8192, "rows of the hash encoder's table", low=2)
    action_slots: str = flag("text", "what an action token embeds: text or index (its place in the list)", ("text", "index"))
    latent_norm: str = flag("layernorm", "latent normalisation and loss: layernorm + MSE or simnorm + KL", ("layernorm", "simnorm"))
    width: int = flag(64, "width of the world model (PZ: 768)", low=8)
    layers: int = flag(2, "transformer layers (PZ: 2)", low=1)
    heads: int = flag(4, "attention heads (PZ: 24)", low=1)
    window: int = flag(10, "H, steps of a training window (PZ: 10)", low=2)
    context: int = flag(4, "C, real steps before the root of a search (PZ: 4)", low=1)
    # training of the world model
    replay_size: int = flag(100_000, "steps kept (PZ: 3e5 Jericho, 5e5 BabyAI)", low=100)
    replay_ratio: float = flag(0.3, "world-model updates per environment step (public code: 0.1)", low=0)
    warmup_steps: int = flag(400, "environment steps before the first update", low=0)
    batch_size: int = flag(64, "windows per world-model update (PZ: 64)", low=1)
    td_steps: int = flag(5, "n of the n-step targets (PZ: 5)", low=1)
    wm_lr: float = flag(1e-3, "learning rate of the world model (PZ: 3e-4)", low=0)
    wm_weight_decay: float = flag(1e-4, "weight decay of matrices", low=0)
    wm_grad_norm: float = flag(10.0, "gradient-norm clip (public code: 10)", low=1e-9)
    entropy_weight: float = flag(0.005, "entropy bonus of the policy loss (public code: 0.05)", low=0)
    ema: float = flag(0.05, "step of the target network at every update (public code: 0.05)", low=0, high=1)
    reanalyze: float = flag(0.0, "share of the windows whose first policy target is searched anew (public code: 0)", low=0, high=1)
    # training of the LLM
    wm_updates: int = flag(100, "world-model updates of a phase (PZ: 2000 Jericho, 500 BabyAI)", low=1)
    llm_updates: int = flag(20, "LLM updates of a phase (PZ: 200, 100)", low=0)
    wm_warmup: int = flag(300, "world-model updates before the first LLM phase", low=0)
    freeze_llm: bool = flag(False, "never train the LLM (ablation)")
    alternate: bool = flag(True, "phases; off: LLM updates from the first world-model update on (ablation)")
    loss: str = flag("ppo", "LLM loss: ppo, or sft = imitate the action drawn from the visits (the paper rejects it)", ("ppo", "sft"))
    llm_lr: float = flag(3e-4, "learning rate of the LLM (PZ: 1e-6 for 3B)", low=0)
    llm_batch: int = flag(32, "samples per LLM update (PZ: 128)", low=1)
    llm_grad_norm: float = flag(1.0, "gradient-norm clip of the LLM (PZ: 1)", low=1e-9)
    clip: float = flag(0.2, "PPO clip on both sides (PZ: 0.2)", low=0)
    kl_coef: float = flag(0.1, "weight of the k3 KL to the frozen start (PZ: BabyAI 0.1, Jericho 0.01)", low=0)
    w_cot: float = flag(0.1, "weight of an analysis token; action tokens weigh 1 (PZ: 0.1)", low=0)
    format_weight: float = flag(0.3, "share of the format reward in the advantage, with --cot (PZ: BabyAI 0.3, Jericho 0.5)", low=0, high=1)
    # evaluation and files
    baseline: bool = flag(True, "after PriorZero, train UniZero with the same budget for the table")
    llm_only: bool = flag(False, "evaluate the LLM alone: the action with the best score (with --eval)")
    eval_every: int = flag(2000, "environment steps between evaluations; 0 = only before and after", low=0)
    eval_episodes: int = flag(100, "episodes of an evaluation; 0 = none", low=0)
    log_every: int = flag(400, "environment steps between lines of the log", low=1)
    save_every: int = flag(2000, "environment steps between checkpoints", low=1)
    seed: int = flag(1, "seed of everything but the evaluation", low=0)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    run_dir: str = flag("", "output folder; empty = runs/priorzero-<env>-alpha<alpha>-seed<seed>-<time>")

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")

    @property
    def num_slots(self) -> int:
        """The most actions of a state."""
        return BABYAI_ACTION_CAP if self.env == "babyai" else JERICHO_GAMES.get(self.game, JERICHO_GAMES["other"])[0]

    @property
    def use_cot(self) -> bool:
        return self.cot and self.model != "tiny"

    @property
    def phase(self) -> tuple:
        """(world-model updates, LLM updates) of a phase, and world-model updates before the first LLM update."""
        if self.alternate:
            return self.wm_updates, self.llm_updates, self.wm_warmup + self.wm_updates
        return max(1, round(self.wm_updates / max(self.llm_updates, 1))), 1, 1

    def env_options(self, evaluation: bool) -> dict:
        """Keyword arguments of make_env for this run's environment."""
        if self.env == "jericho":
            return dict(game=self.game, rom_dir=self.rom_dir or None, max_steps=self.max_steps or None)
        return dict(level=self.level, split="valid_unseen" if evaluation else "train", max_steps=self.max_steps or 20)

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
        for ok, text in ((self.width % self.heads == 0, f"--width {self.width}: must be a multiple of --heads {self.heads}"),
                         (self.width % 8 == 0, f"--width {self.width}: must be a multiple of 8"),
                         (self.td_steps < self.window, f"--td_steps {self.td_steps}: must be less than --window {self.window}"),
                         (self.context <= self.window, f"--context {self.context}: must be at most --window {self.window}"),
                         (self.alpha_min <= self.alpha_max, f"--alpha_min {self.alpha_min}: must be at most --alpha_max {self.alpha_max}"),
                         (self.env == "babyai" or self.model != "tiny" or self.alpha == 0,
                          "--model tiny: knows BabyAI only; name a causal LM, or --alpha 0 for UniZero"),
                         (re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device), f"--device {self.device}: choose one of auto, cpu, cuda, cuda:N"),
                         (not self.device.startswith("cuda") or torch.cuda.is_available(),
                          f"--device {self.device}: this machine has no usable CUDA device; use --device cpu")):
            if not ok:
                raise InputError(text)

# ---- The formulas: values -----------------------------------------------------------------------------------------------
def simnorm(x, group):
    """Softmax within groups of `group` neighbours: [..., D] -> [..., D], each group sums to 1.  Source: UniZero, SimNorm."""
    return x.unflatten(-1, (-1, group)).softmax(-1).flatten(-2)

def value_transform(x):
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x, elementwise: game units -> h-space.  Source: MuZero, appendix F.
    >>> value_transform(torch.tensor([1., 10.]))
    tensor([0.4152, 2.3266])
    """
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + 0.001 * x

def inverse_value_transform(y):
    """h^-1, elementwise: h-space -> game units; a form without cancellation in fp32.  Source: MuZero, appendix F."""
    a = y.abs() + 1.001
    return y.sign() * ((2 * a / ((1 + 0.004 * a).sqrt() + 1)) ** 2 - 1)

def two_hot(x, support):
    """Weights on the two bins next to x, whose mean is x: [...] -> [..., M], rows sum to 1; beyond the ends: the end bin.
    Args: x in the support's units (h-space here); support [M], ascending in steps of 1.  Source: UniZero 3.2; MuZero, appendix F.
    >>> two_hot(torch.tensor([1.25]), torch.arange(4.))
    tensor([[0.0000, 0.7500, 0.2500, 0.0000]])
    """
    return (1 - (x.clamp(support[0], support[-1]).unsqueeze(-1) - support).abs()).clamp(min=0)

def expected_value(logits, support):
    """Mean of the support under softmax(logits): [..., M], [M] -> [...], in the support's units.  Source: UniZero 3.2."""
    return logits.softmax(-1) @ support

def n_step_targets(rewards, values, terminated, truncated, gamma, n):
    """Q_n(t) = sum_{i < n} gamma^i r_{t+i} + gamma^n v_{t+n}, which never looks beyond an episode's end.

    Args: rewards [..., T] game units; values [..., T+1], v(o_t); terminated, truncated bool [..., T]: step t ends its episode,
        and then v(o_{t+1}) counts as 0, or takes the place of all that would come.  T may end in the middle of an episode.
    Returns: [..., T].  Source: PriorZero 3.3, MuZero eq. 3.
    >>> n_step_targets(torch.tensor([1., 0, 2]), torch.full((4,), 10.), torch.tensor([0, 0, 1]), torch.zeros(3), 0.9, 5)
    tensor([2.6200, 1.8000, 2.0000])
    """
    returns, last = values, values[..., -1:]
    for _ in range(n):
        after = torch.where(truncated.bool(), values[..., 1:], returns[..., 1:]).masked_fill(terminated.bool(), 0.0)
        returns = torch.cat([rewards + gamma * after, last], -1)
    return returns[..., :-1]

# ---- The formulas: prior and LLM loss -----------------------------------------------------------------------------------
def fuse_root_prior(wm_logits, llm_scores, valid_mask, alpha, temperature):
    """Root logits log((1 - alpha) pi_WM + alpha pi_LLM + 1e-8); both are masked first and normalised over valid actions only.

    Args: wm_logits, llm_scores (mean log-probability per token), valid_mask, all [B, A]; alpha in [0, 1], a number or [B];
        temperature of the scores.  Returns: [B, A], -inf where invalid.  Source: PriorZero 3.2.
    """
    alpha, invalid = torch.as_tensor(alpha, dtype=wm_logits.dtype, device=wm_logits.device).view(-1, 1), ~valid_mask.bool()
    wm = wm_logits.masked_fill(invalid, -torch.inf).softmax(-1)
    llm = (llm_scores / temperature).masked_fill(invalid, -torch.inf).softmax(-1)
    return ((1 - alpha) * wm + alpha * llm + 1e-8).log().masked_fill(invalid, -torch.inf)

def adaptive_alpha(wm_probs, valid_mask, alpha_min, alpha_max):
    """alpha_min + (alpha_max - alpha_min) (1 - H(pi_WM) / ln |A|): [B, A], [B, A] -> [B].  One valid action: H counts as 0.
    Source: PriorZero 3.2.
    """
    entropy = torch.special.entr(wm_probs * valid_mask).sum(-1)
    return alpha_min + (alpha_max - alpha_min) * (1 - entropy / valid_mask.sum(-1).clamp(min=2).log())

def normalize_advantages(a):
    """(a - mean) / (std + 1e-6) over a phase (unbiased std), 0 where all are equal: [N] -> [N].  Source: PriorZero 3.3."""
    if len(a) < 2 or bool((a == a[0]).all()):  # std of equal fp32 numbers can be 1e-8 instead of 0
        return torch.zeros_like(a)
    return (a - a.mean()) / (a.std() + 1e-6)

def blend_format_reward(a_hat, format_ok, weight):
    """(1 - weight) A_hat + weight r_fmt, r_fmt = 1 where the format is kept, else 0: [N], [N] -> [N].  Source: PriorZero 3.3."""
    return (1 - weight) * a_hat + weight * torch.as_tensor(format_ok, dtype=a_hat.dtype, device=a_hat.device)

def token_weights(cot_mask, action_mask, w_cot):
    """w_cot on analysis tokens, 1 on action tokens, 0 elsewhere: [B, S], [B, S] -> [B, S].  Source: PriorZero 3.3."""
    return w_cot * cot_mask + action_mask

def k3_kl(logp, ref_logp):
    """Schulman's k3 estimate of KL(policy || reference) per token, never negative: exp(d) - d - 1, d = ref - policy."""
    d = ref_logp - logp
    return d.exp() - d - 1

def ppo_loss(logp, old_logp, ref_logp, advantage, weights, mask, clip, kl_coef, num_tokens=None):
    """Clipped surrogate, each token weighted, plus kl_coef times the k3 KL; the ratio itself is not weighted.

    Args: logp, old_logp (at rollout), ref_logp [B, S]; advantage [B]; weights [B, S] from token_weights; mask [B, S], 1 = token
        of the LLM; num_tokens: the denominator, the tokens of the WHOLE batch where this is a part of it (default: of mask).
    Returns: scalar, 0 for an empty mask.  Source: PriorZero 3.3.
    """
    keep = mask.bool()
    ratio, a = torch.where(keep, logp - old_logp, 0.0).exp(), advantage[:, None]
    surrogate = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a) * weights
    kl = k3_kl(torch.where(keep, logp, 0.0), torch.where(keep, ref_logp, 0.0)) if kl_coef else 0.0
    total = torch.where(keep, surrogate + kl_coef * kl, 0.0).sum()
    return total / torch.as_tensor(mask.sum() if num_tokens is None else num_tokens).clamp(min=1)

def format_ok(text):
    """Whether an answer is exactly one "Reasoning:", at its start, followed by exactly one "Action:" line.  Source: PriorZero 3.2.
    >>> format_ok("Reasoning: a door is ahead\\nAction: open door"), format_ok("Action: open door")
    (True, False)
    """
    text = text.strip()
    return (text.startswith("Reasoning:") and text.count("Reasoning:") == 1 and len(re.findall(r"^Action:", text, re.M)) == 1
            and re.search(r"\nAction:[^\n]*\S[^\n]*$", text) is not None)

# ---- The world model ----------------------------------------------------------------------------------------------------
class TextBank:
    """Numbers for texts, and what the encoder reads of each: hashed words and n-grams, or a frozen encoder's CLS vector."""
    def __init__(self, cfg):
        self.index, self.device, self.buckets, self.frozen = {"": 0}, cfg.torch_device, cfg.hash_buckets, None
        self.features = torch.zeros(1, 1, dtype=torch.long, device=self.device)  # [texts, n-grams], 0 = none; number 0: no text
        if cfg.encoder != "hash":
            self.tokenizer, self.frozen = load_pretrained(AutoModel, cfg.encoder, "--encoder", torch.float32)
            self.frozen = self.frozen.to(self.device).eval().requires_grad_(False)  # eval: no dropout in latents and targets
            self.features = torch.zeros(1, self.frozen.config.hidden_size, device=self.device)

    def __call__(self, texts):
        """Numbers of these texts, a list."""
        new = [text for text in dict.fromkeys(texts) if text not in self.index]
        if new:
            rows = self.embed(new) if self.frozen else self.hash(new)
            self.index.update(zip(new, range(len(self.index), len(self.index) + len(new))))
            width, known = max(rows.shape[1], self.features.shape[1]), self.features[:len(self.index) - len(new)]
            self.features = torch.cat([F.pad(x, (0, width - x.shape[1])) for x in (known, rows)])
        return [self.index[text] for text in texts]

    def hash(self, texts):
        words = [re.findall(r"[a-z0-9']+|[^\sa-z0-9']", text.lower())[:512] for text in texts]
        grams = [{" ".join(w[i:i + n]) for n in (1, 2, 3) for i in range(len(w) - n + 1)} for w in words]
        rows = [[1 + zlib.crc32(gram.encode()) % (self.buckets - 1) for gram in sorted(g)] for g in grams]
        return pad_sequence([torch.tensor(r, dtype=torch.long) for r in rows], batch_first=True).to(self.device)

    @torch.no_grad()
    def embed(self, texts):
        inputs = self.tokenizer(texts, truncation=True, max_length=512, padding=True, return_tensors="pt").to(self.device)
        return self.frozen(**inputs).last_hidden_state[:, 0].float()

class Head(nn.Module):
    """LayerNorm is behind the transformer; then Linear, LayerNorm, GELU, and a last linear layer that starts at zero."""
    def __init__(self, width, out):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(approximate="tanh"))
        self.last = nn.Linear(width, out)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x):
        return self.last(self.body(x))

class Block(nn.Module):
    """A pre-norm transformer layer that can attend to the stored keys and values of earlier tokens."""
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, past=None, mask=None):
        """x [B, T, D], past [B, K, 2, D] or None, mask bool [B, 1, T, K + T] or None = causal.  Returns x, own [B, T, 2, D]."""
        width = x.shape[-1]
        q, own = self.qkv(self.norm1(x)).split([width, 2 * width], -1)
        own = own.unflatten(-1, (2, width))
        keys = own if past is None else torch.cat([past, own], 1)
        k, v = keys.unflatten(-1, (self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, K + T, D / heads] each
        y = F.scaled_dot_product_attention(q.unflatten(-1, (self.heads, -1)).transpose(1, 2), k, v, mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), own

class WorldModel(nn.Module):
    """UniZero: tokens z_0 a_0 z_1 a_1 ...; the output at z_t gives policy and value, that at a_t reward and the next latent."""
    def __init__(self, cfg, feature_width):
        super().__init__()
        D = cfg.width
        self.norm_kind, self.hashed = cfg.latent_norm, cfg.encoder == "hash"
        self.table = nn.Embedding(cfg.hash_buckets, D) if self.hashed else nn.Linear(feature_width, D)
        self.norm_in, self.action_key = nn.LayerNorm(D), nn.Linear(D, D)
        self.positions = nn.Parameter(0.02 * torch.randn(2 * cfg.window, D))
        self.blocks, self.norm_out = nn.ModuleList([Block(D, cfg.heads) for _ in range(cfg.layers)]), nn.LayerNorm(D)
        self.register_buffer("support", torch.arange(-50.0, 51.0))  # h-space
        self.policy, self.value, self.reward, self.latent = Head(D, D), Head(D, 101), Head(D, 101), Head(D, D)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.weight.any():
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def encode(self, features):
        """What the bank keeps of texts [N, ...] -> normalised latents [N, D]."""
        if self.hashed:
            return self.normalize(F.embedding_bag(features, self.table.weight, mode="mean", padding_idx=0))
        return self.normalize(self.table(features))

    def normalize(self, x):
        return simnorm(x, 8) if self.norm_kind == "simnorm" else self.norm_in(x)

    def forward(self, latents, actions):
        """Latents and actions [B, H, D] -> outputs at latents, outputs at actions, [B, H, D] each.  Source: PriorZero 3.1."""
        x = torch.stack([latents, actions], 2).flatten(1, 2) + self.positions[:2 * latents.shape[1]]
        x = self.step(x)[0]
        return x[:, 0::2], x[:, 1::2]

    def step(self, x, past=None, mask=None):
        """Run tokens x [B, T, D] behind stored ones, past [B, K, L, 2, D].  Returns outputs and own keys/values [B, T, L, 2, D]."""
        own = []
        for n, block in enumerate(self.blocks):
            x, kv = block(x, None if past is None else past[:, :, n], mask)
            own.append(kv)
        return self.norm_out(x), torch.stack(own, 2)

    def decode(self, head, x):
        """Outputs [..., D] -> game units [...]: the value or reward head's mean, transformed back."""
        return inverse_value_transform(expected_value(head(x), self.support))

    def policy_logits(self, x, keys):
        """Scores of actions: outputs [B, D], keys [B, A, D] -> [B, A]."""
        return torch.bmm(keys, self.policy(x).unsqueeze(2)).squeeze(2) / math.sqrt(x.shape[-1])

def encode_texts(model, bank, *numbers):
    """Latents [..., D] of tensors of text numbers [...], each text encoded once."""
    unique, inverse = torch.cat([n.flatten() for n in numbers]).unique(return_inverse=True)
    parts = inverse.split([n.numel() for n in numbers])
    table = model.encode(F.embedding(unique, bank.features) if model.hashed is False else bank.features.index_select(0, unique))
    return [F.embedding(part.view(n.shape), table) for part, n in zip(parts, numbers)]

# ---- Search -------------------------------------------------------------------------------------------------------------
class Roots(NamedTuple):
    """Real states at which a search starts."""
    logits: torch.Tensor   # [B, A] of the world model, -inf where invalid
    value: torch.Tensor    # [B] game units
    valid: torch.Tensor    # [B, A]
    tokens: torch.Tensor   # [B, A, D] action tokens of the state's list
    keys: torch.Tensor     # [B, A, D] policy keys of the same
    past: torch.Tensor     # [B, 2C-1, L, 2, D] keys/values of the real history
    lengths: torch.Tensor  # [B] tokens of the history; the rest of `past` is padding

def encode_roots(model, bank, obs, actions, steps, lists):
    """Encode the last real steps.  Args: text numbers obs [B, C], actions [B, C-1] and the valid actions' lists [B, A], 0 = padding
    on the right; steps [B]: observations of the history.  Source: PriorZero 3.1 (H = 4 at test time)."""
    z, a, tokens = encode_texts(model, bank, obs, actions, lists)
    x = torch.stack([z, F.pad(a, (0, 0, 0, 1))], 2).flatten(1, 2)[:, :-1] + model.positions[:2 * obs.shape[1] - 1]
    x, past = model.step(x)
    lengths, valid = 2 * steps - 1, lists > 0
    x = x[torch.arange(len(x), device=x.device), lengths - 1]
    keys = model.action_key(tokens)
    logits = model.policy_logits(x, keys).masked_fill(~valid, -torch.inf)
    return Roots(logits, model.decode(model.value, x), valid, tokens, keys, past, lengths)

def imagine(model, roots, path, path_mask, action, gamma):
    """One imagined step for each row; a node stores the keys/values of its two tokens (its action, its latent) only.

    Args: path [B, K, 2, L, 2, D]: what the parent, its parent, ..., the root stored; path_mask [B, K]; action [B], a place in
        the root's list.  Returns: mcts.Step.  Source: PriorZero 3.1, g(z, a) -> (z', r).
    """
    depth, context = path_mask.sum(1), torch.arange(roots.past.shape[1], device=path.device) < roots.lengths[:, None]
    own = F.pad(path_mask[:, 1:], (0, 1))  # a path ends with the root, whose tokens are in roots.past already
    mask = F.pad(torch.cat([context, own.repeat_interleave(2, 1)], 1), (0, 1), value=True)[:, None, None]  # [B, 1, 1, K + 1]
    past = torch.cat([roots.past, path.flatten(1, 2)], 1)
    position = roots.lengths + 2 * (depth - 1)
    token = roots.tokens[torch.arange(len(action), device=action.device), action]
    x, kv_action = model.step((token + F.embedding(position, model.positions))[:, None], past, mask)
    x = x[:, 0]
    reward, latent = model.decode(model.reward, x), model.normalize(model.latent(x))
    mask = F.pad(mask, (0, 1), value=True)
    x, kv_latent = model.step((latent + F.embedding(position + 1, model.positions))[:, None], torch.cat([past, kv_action], 1), mask)
    logits = model.policy_logits(x[:, 0], roots.keys).masked_fill(~roots.valid, -1e9)
    return Step(reward, torch.full_like(reward, gamma), logits, model.decode(model.value, x[:, 0]), torch.cat([kv_action, kv_latent], 1))

def tree_search(model, roots, logits, cfg, num_simulations, noise, generator):
    """MCTS from these roots with `logits` [B, A] as root prior; inner nodes have the world model's prior alone."""
    empty = roots.past.new_zeros(len(logits), 2, *roots.past.shape[2:])
    return search(Root(logits, roots.value, empty), lambda path, action, mask: imagine(model, roots, path, mask, action, cfg.gamma),
                  num_simulations, valid_mask=roots.valid, max_depth=(2 * cfg.window - 2 * cfg.context + 1) // 2, whole_path=True,
                  dirichlet_alpha=cfg.dirichlet_alpha, dirichlet_fraction=cfg.dirichlet_fraction if noise else 0.0, generator=generator)

# ---- Replay and the world model's update --------------------------------------------------------------------------------
class Window(NamedTuple):
    """B windows of W = H + n steps; steps behind an episode's end repeat its last observation and are masked."""
    obs: torch.Tensor         # [B, W] text numbers
    action: torch.Tensor      # [B, W] text numbers
    lists: torch.Tensor       # [B, W, A] text numbers of the valid actions, 0 = padding
    visits: torch.Tensor      # [B, W, A] search policy
    reward: torch.Tensor      # [B, W]
    terminated: torch.Tensor  # [B, W]; also true at the observation behind the last step
    truncated: torch.Tensor   # [B, W]
    mask: torch.Tensor        # [B, W], 1 = an action was taken here
    slots: torch.Tensor       # [B, W] places in the replay

class Replay:
    """The last `size` steps, whole episodes one behind the other; an episode of T steps takes T + 1 places."""
    def __init__(self, size, num_slots, device):
        empty = lambda *shape, dtype=torch.long: torch.zeros(shape, dtype=dtype, device=device)
        self.data = {"obs": empty(size), "action": empty(size), "lists": empty(size, num_slots, dtype=torch.int32),
                     "visits": empty(size, num_slots, dtype=torch.float32), "reward": empty(size, dtype=torch.float32),
                     "terminated": empty(size, dtype=torch.bool), "truncated": empty(size, dtype=torch.bool),
                     "end": empty(size), "time": empty(size), "serial": empty(size)}  # end: the episode's last place
        self.size, self.write, self.count, self.starts = size, 0, 0, None

    def add(self, game):
        """Store a finished Game; returns the place of its first step."""
        T, width = len(game.steps), self.data["lists"].shape[1]
        first = self.write if self.write + T < self.size else 0
        rows = lambda name, dtype: pad_sequence([torch.tensor(step[name], dtype=dtype) for step in game.steps], batch_first=True)
        column = lambda name, last: torch.tensor([step[name] for step in game.steps] + [last])
        place, ended = slice(first, first + T + 1), [False] * (T - 1)
        for name, value in (("obs", column("obs_id", game.obs_id)), ("action", column("action_id", 0)), ("reward", column("reward", 0.0)),
                            ("terminated", torch.tensor(ended + [game.terminated] * 2)), ("time", torch.arange(T + 1)),
                            ("truncated", torch.tensor(ended + [not game.terminated, False])), ("serial", torch.tensor(self.count + 1)),
                            ("end", torch.tensor(first + T)), ("lists", F.pad(x := rows("list", torch.int32), (0, width - x.shape[1], 0, 1))),
                            ("visits", F.pad(x := rows("visits", torch.float32), (0, width - x.shape[1], 0, 1)))):
            self.data[name][place] = value.to(self.data[name].device)
        self.write, self.count, self.starts = first + T + 1, self.count + 1, None
        return first

    def draw(self, batch_size, generator):
        """Places of steps, uniform over all steps stored."""
        if self.starts is None:
            self.starts = (self.data["end"] > torch.arange(self.size, device=self.data["end"].device)).nonzero()[:, 0]
        return self.starts[torch.randint(len(self.starts), (batch_size,), generator=generator).to(self.starts.device)]

    def window(self, starts, length):
        """The Window of `length` steps from each of these places [B]."""
        end, slots = self.data["end"][starts][:, None], starts[:, None] + torch.arange(length, device=starts.device)
        mask, slots = slots < end, slots.minimum(end)
        return Window(*(self.data[name][slots] for name in Window._fields[:7]), mask, slots)

@torch.no_grad()
def target_values(target, bank, obs, actions, window, n):
    """v(o_0), ..., v(o_{W-1}) of the target model, [B, W], W = window + n, each with at least the n real steps before it as context
    (as far as the text numbers obs, actions [B, W] reach), and the target latents of all observations [B, W, D]."""
    z, a = encode_texts(target, bank, obs, actions)
    halves = [target(z[:, i:i + window], a[:, i:i + window])[0] for i in (0, n)]
    return target.decode(target.value, torch.cat([halves[0], halves[1][:, window - n:]], 1)), z

def mean_where(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)

def world_model_losses(model, target, bank, w, cfg):
    """The four losses of a Window of H + n steps, each a mean over its valid steps, and the clipped share of the values.

    10 latent + 1 policy (cross-entropy to the visits, entropy bonus) + 0.5 value + 1 reward.  Source: PriorZero 3.1, UniZero eq. 5.
    """
    H, support = cfg.window, model.support
    values, target_latents = target_values(target, bank, w.obs, w.action, H, cfg.td_steps)
    returns = n_step_targets(w.reward[:, :-1], values, w.terminated[:, :-1], w.truncated[:, :-1], cfg.gamma, cfg.td_steps)[:, :H]
    mask, lists, visits = w.mask[:, :H], w.lists[:, :H].long(), w.visits[:, :H]
    names, places = lists.unique(return_inverse=True)
    z, a, tokens = encode_texts(model, bank, w.obs[:, :H], w.action[:, :H], names)
    at_obs, at_action = model(z, a)
    scores = model.policy(at_obs) @ model.action_key(tokens).T / math.sqrt(cfg.width)  # [B, H, names]
    logp = scores.gather(2, places).masked_fill(lists == 0, -1e9).log_softmax(-1)
    target_policy = visits / visits.sum(-1, keepdim=True).clamp(min=1e-9)
    policy = -(target_policy * logp).sum(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    in_h = value_transform(returns)
    cross_entropy = lambda logits, x: -(two_hot(x, support) * logits.log_softmax(-1)).sum(-1)
    value = cross_entropy(model.value(at_obs), in_h)
    reward = cross_entropy(model.reward(at_action), value_transform(w.reward[:, :H]))
    predicted, goal = model.normalize(model.latent(at_action)), target_latents[:, 1:H + 1]
    latent = F.mse_loss(predicted, goal, reduction="none").mean(-1) if cfg.latent_norm == "layernorm" else (
        -(goal * (predicted + 1e-6).log()).unflatten(-1, (-1, 8)).sum(-1).mean(-1))
    value_mask = mask | w.terminated[:, :H]  # behind the end of a terminated episode the value is 0; of a truncated one unknown
    losses = {"latent_loss": mean_where(latent, mask), "policy_loss": mean_where(policy, mask), "value_loss": mean_where(value, value_mask),
              "reward_loss": mean_where(reward, mask), "policy_entropy": mean_where(entropy, mask),
              "clipped_share": mean_where((in_h.abs() > 50).float(), value_mask)}
    loss = (10 * losses["latent_loss"] + losses["policy_loss"] + 0.5 * losses["value_loss"] + losses["reward_loss"]
            - cfg.entropy_weight * losses["policy_entropy"])
    return loss, losses

def update_world_model(agent, cfg):
    """One update and one step of the target network; returns its figures as a dict of scalar tensors."""
    starts = agent.replay.draw(cfg.batch_size, agent.generators["replay"])
    window = agent.replay.window(starts, cfg.window + cfg.td_steps)
    if cfg.reanalyze:
        reanalyze(agent, window, math.ceil(cfg.reanalyze * cfg.batch_size), cfg)
    loss, losses = world_model_losses(agent.model, agent.target, agent.bank, window, cfg)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(agent.model.parameters(), cfg.wm_grad_norm)
    if not bool(torch.isfinite(norm)):
        raise FloatingPointError(f"world-model update {agent.wm_updates}: non-finite loss or gradient, replay places {starts.tolist()}")
    agent.optimizer.step()
    agent.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.target.parameters()), list(agent.model.parameters()), cfg.ema)
    agent.wm_updates += 1
    return {"wm_loss": loss.detach(), **{k: v.detach() for k, v in losses.items()}, "wm_grad_norm": norm}

@torch.no_grad()
def reanalyze(agent, window, rows, cfg):
    """Replace the first policy targets of some rows by those of a fresh search (without the LLM).  Source: MuZero Reanalyze."""
    roots = encode_roots(agent.model, agent.bank, window.obs[:rows, :1], window.action[:rows, :0],
                         torch.ones(rows, dtype=torch.long, device=window.obs.device), window.lists[:rows, 0].long())
    result = tree_search(agent.model, roots, roots.logits, cfg, cfg.num_simulations, False, agent.generators["search"])
    agent.replay.data["visits"][window.slots[:rows, 0]] = action_probs(result.visit_counts, 1.0)
    window.visits[:rows, 0] = action_probs(result.visit_counts, 1.0)

# ---- The language model -------------------------------------------------------------------------------------------------
@dataclass
class LanguageModel:
    """A causal LM with its tokenizer; `version` counts optimiser steps; `start` holds the frozen start of what is trained."""
    model: nn.Module
    tokenizer: object
    device: torch.device
    token_budget: int = 8192
    version: int = 0
    cache: dict = field(default_factory=dict)  # (prompt, actions) -> Prior, of this version

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def autocast(self):
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

def load_pretrained(kind, model, flag_name, dtype):
    """(tokenizer, model) by name, folder or GGUF file.  Raises InputError with one line where that is not possible."""
    path = TINY_FOLDER if model == "tiny" else Path(model)
    if not path.exists() and (path.suffix == ".gguf" or model[0] in "./~" or len(path.parts) > 2):  # no hub name
        raise InputError(f"{flag_name} {model}: there is no such file or folder")
    name, kwargs = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (str(path), {})
    try:
        return AutoTokenizer.from_pretrained(name, **kwargs), kind.from_pretrained(name, dtype=dtype, **kwargs)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise InputError(f"{flag_name} {model}: transformers cannot load it ({str(error).strip().splitlines()[0]})") from error

def load_llm(cfg):
    """The LLM of --model, ready to score and to train."""
    dtype = torch.bfloat16 if cfg.lora_rank and cfg.torch_device.type == "cuda" else torch.float32
    tokenizer, model = load_pretrained(AutoModelForCausalLM, cfg.model, "--model", dtype)
    return make_llm(model, tokenizer, cfg)

def make_llm(model, tokenizer, cfg):
    """Prepare a loaded LM: pad token, no dropout, LoRA, device."""
    if model.config.to_dict().get("final_logit_softcapping"):
        raise InputError(f"--model {cfg.model}: models with logit soft-capping (Gemma 2) are not supported")
    if tokenizer.pad_token_id is None:  # any existing id will do: every mask here comes from lengths, never from ids
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        print(f"the tokenizer has no pad token: padding with {tokenizer.pad_token!r}")
    for module in model.modules():  # no dropout: rollout and update must see the same function (first ratio exactly 1)
        for name in [n for n in vars(module) if n.endswith("dropout") or (n == "p" and isinstance(module, nn.Dropout))]:
            setattr(module, name, 0.0)
    if cfg.lora_rank:
        model.requires_grad_(False)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, LoRALinear(module, cfg.lora_rank))
    return LanguageModel(model.eval().to(cfg.torch_device), tokenizer, cfg.torch_device, cfg.token_budget)

class LoRALinear(nn.Module):
    """y = W x + (alpha / rank) B A x with W frozen; A random, B zero, alpha = 2 rank (Hu et al. 2021, arXiv 2106.09685)."""
    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))).to(x.dtype)

def trainable(model):
    """{name: parameter} of what is trained."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}

SYSTEM = {"babyai": "You guide an agent in a grid world.  It sees objects and walls in front of it, and acts by short commands.",
          "jericho": "You play a text adventure and want the highest score in few moves."}
FORMAT = """Answer in exactly two parts:
Reasoning: <a neutral analysis of the situation: where you are, what is in reach, what is still to be done; name no choice yet>
Action: <one of the valid actions, copied exactly>"""

def build_prompt(cfg, obs, actions, history):
    """(system, user) texts of one step; history: (observation, action, reward) from the episode's start.  Source: PriorZero 3.2."""
    kept = history[len(history) - min(cfg.history_len, len(history)):]
    past = "".join(f"\nStep {n}. Observation: {o}\nAction: {a}\nReward: {r:g}" for n, (o, a, r) in enumerate(kept, len(history) - len(kept) + 1))
    return SYSTEM[cfg.env], (f"=== HISTORY ==={past or ' (none)'}\n\n=== CURRENT OBSERVATION ===\n{obs}\n\n=== VALID ACTIONS ===\n"
                             + "\n".join(actions) + f"\n\n=== INSTRUCTION ===\n{FORMAT if cfg.use_cot else 'Answer: Action: <one of the valid actions>'}")

def encode_prompt(llm, cfg, obs, actions, history):
    """Token ids of a prompt, in the chat template where there is one; over max_prompt_len, the oldest history goes first.
    The tiny LM reads its own short form: the last two actions and the observation."""
    if cfg.model == "tiny":
        return llm.ids(f"Did: {', '.join(a for _, a, _ in history[-2:]) or 'nothing'}. {obs}")[-cfg.max_prompt_len:]
    for kept in range(min(cfg.history_len, len(history)), -1, -1):
        system, user = build_prompt(dataclasses.replace(cfg, history_len=kept), obs, actions, history)
        text = f"{system}\n\n{user}\n"
        if llm.tokenizer.chat_template:
            turns = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            text = llm.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        if len(ids := llm.ids(text)) <= cfg.max_prompt_len:
            break
    return ids[-cfg.max_prompt_len:]

def pad(rows, device, side, dtype=torch.long):
    """Lists of numbers -> [B, longest], padded with 0 on one side, and the mask of what is not padding."""
    put = lambda rows, dtype: pad_sequence([torch.tensor(r, dtype=dtype) for r in rows], batch_first=True, padding_side=side).to(device)
    return put(rows, dtype), put([[1] * len(r) for r in rows], torch.long)

class Analysis(NamedTuple):
    """What stands between prompt and action."""
    ids: list       # token ids; the last ones say "Action:"
    logps: list     # log-probability of each at rollout
    written: list   # 1 = written by the LLM, 0 = put there by us
    format_ok: bool

@torch.no_grad()
def generate_analyses(llm, prompts, cfg, generator):
    """Sample an Analysis for every prompt (token ids), all rows together: temperature 1, until a blank line or the end; what follows
    the first "Action:" is cut off, since the actions are scored, not parsed.  Without --cot: "Action:" alone.  Source: PriorZero 3.2.
    """
    label = llm.ids("Action:")
    if not cfg.use_cot:
        return [Analysis(label, [0.0] * len(label), [0] * len(label), True)] * len(prompts)
    ids, mask = pad(prompts, llm.device, "left")
    cache, step, tokens, logps, texts = None, ids, [], [], [""] * len(prompts)
    for _ in range(cfg.max_cot_len):
        with llm.autocast():
            out = llm.model.base_model(input_ids=step, attention_mask=mask, position_ids=positions_of(mask)[:, -step.shape[1]:],
                                       use_cache=True, cache=cache)
            logits = llm.model.get_output_embeddings()(out.last_hidden_state[:, -1])
        cache, log_probs = out.cache, logits.float().log_softmax(-1)
        tokens.append(torch.multinomial(log_probs.exp(), 1, generator=generator))
        logps.append(log_probs.gather(1, tokens[-1]))
        step, mask = tokens[-1], F.pad(mask, (0, 1), value=1)
        texts = llm.tokenizer.batch_decode(torch.cat(tokens, 1))
        eos = llm.tokenizer.eos_token
        if all("\n\n" in t.strip() or (eos and eos in t) for t in texts):
            break
    return [cut_analysis(llm, *row, label) for row in zip(torch.cat(tokens, 1).tolist(), torch.cat(logps, 1).tolist())]

def cut_analysis(llm, ids, logps, label):
    """The Analysis in sampled tokens: up to the end or blank line for the format, up to "Action:" for the scores."""
    text = lambda n: llm.tokenizer.decode(ids[:n])
    first = lambda found: next((n for n in range(1, len(ids) + 1) if found(text(n))), len(ids))
    ids = ids[:ids.index(llm.tokenizer.eos_token_id)] if llm.tokenizer.eos_token_id in ids else ids
    ids = ids[:first(lambda t: "\n\n" in t.strip())]
    good, n = format_ok(text(len(ids))), first(lambda t: "Action:" in t)
    added = [] if "Action:" in text(n) else llm.ids("\nAction:")
    return Analysis(ids[:n] + added, logps[:n] + [0.0] * len(added), [1] * n + [0] * len(added), good)

def positions_of(mask):
    """Position ids that do not count padding: mask [B, T] -> [B, T]; [0,0,1,1,1] -> [0,0,0,1,2]."""
    return (mask.cumsum(-1) - 1).clamp(min=0)

@torch.no_grad()
def action_logps(llm, contexts, actions):
    """Log-probabilities of the tokens of " <action><eos>" behind each context: contexts (token ids), actions (a list of texts for each)
    -> for each context and action a list.  The keys and values of a context are computed once; its actions stand behind it side by
    side in ONE row, where none sees another.  Source: PriorZero 3.2."""
    llm_ids = {a: llm.ids(f" {a}") + [llm.tokenizer.eos_token_id] for a in {a for row in actions for a in row}}
    width = max(map(len, contexts)) + max(sum(len(llm_ids[a]) for a in row) for row in actions)
    size, head, out = max(1, llm.token_budget // width), llm.model.get_output_embeddings(), []
    for chunk in (slice(i, i + size) for i in range(0, len(contexts), size)):
        rows = [[llm_ids[a] for a in row] for row in actions[chunk]]
        prompt, prompt_mask = pad(contexts[chunk], llm.device, "left")
        places, own_mask = pad([[n for n, c in enumerate(row) for _ in c] for row in rows], llm.device, "right")  # [B, S] whose token
        ids = pad([sum(row, []) for row in rows], llm.device, "right")[0]
        offsets = pad([[i for c in row for i in range(len(c))] for row in rows], llm.device, "right")[0]
        same = (places[:, :, None] == places[:, None]) & (offsets[:, :, None] >= offsets[:, None]) & own_mask[:, None].bool()
        seen = torch.cat([prompt_mask[:, None].expand(-1, ids.shape[1], -1).bool(), same], 2)[:, None]  # [B, 1, S, P + S]
        with llm.autocast():
            first = llm.model.base_model(input_ids=prompt, attention_mask=prompt_mask, position_ids=positions_of(prompt_mask), use_cache=True)
            bias = torch.zeros(seen.shape, dtype=first.last_hidden_state.dtype, device=seen.device)
            later = llm.model.base_model(input_ids=ids, cache=first.cache, use_cache=True, position_ids=prompt_mask.sum(1, True) + offsets,
                                         attention_mask=bias.masked_fill(~seen, torch.finfo(bias.dtype).min))
            # The token before: the previous one of the same action, or the context's last.
            before = torch.where(offsets[..., None] == 0, first.last_hidden_state[:, -1:], later.last_hidden_state.roll(1, 1))
            b, s = own_mask.nonzero(as_tuple=True)
            logp = head(before[b, s]).float().log_softmax(-1).gather(1, ids[b, s][:, None])[:, 0].tolist()
        numbers = iter(logp)
        out += [[[next(numbers) for _ in c] for c in row] for row in rows]
    return out

def action_scores(model, prompts, analyses, actions):
    """s(a) = mean over the tokens of " <action><eos>" of log p(token | prompt, analysis, tokens before).  Source: PriorZero 3.2.

    Args: model, a LanguageModel; prompts, analyses: texts or token ids, one for each row; actions: a list of texts for each row.
    Returns: a list of tensors [A_i], natural logarithm.
    """
    as_ids = lambda x: x if isinstance(x, list) else model.ids(x)
    logps = action_logps(model, [as_ids(p) + as_ids(c) for p, c in zip(prompts, analyses)], actions)
    return [torch.tensor([sum(x) / len(x) for x in row]) for row in logps]

# ---- Playing ------------------------------------------------------------------------------------------------------------
class Game:
    """An episode in progress: the observation and actions now, and its steps so far (dicts of plain values, for the checkpoint)."""
    def __init__(self, agent, task, obs, info, steps=None):
        self.task, self.steps, self.ret, self.won, self.terminated = task, steps or [], 0.0, False, False
        self.look(agent, obs, info)

    def look(self, agent, obs, info):
        self.obs, self.actions, self.won = obs, info["admissible_actions"][:agent.cfg.num_slots], info["won"]
        self.task_id, names = info["task_id"], self.actions
        if agent.cfg.action_slots == "index":
            names = [f"slot {n}" for n in range(len(self.actions))]
        self.obs_id, *self.list = agent.bank([obs, *names])

    def record(self, agent, slot, policy, sample, result):
        """Append the step just played; returns whether the episode is over."""
        obs, reward, self.terminated, truncated, info = result
        self.steps.append({"obs": self.obs, "action": self.actions[slot], "reward": reward, "obs_id": self.obs_id, "list": self.list,
                           "action_id": self.list[slot], "visits": policy[:len(self.list)], "sample": sample})
        self.ret += reward
        self.look(agent, obs, info)
        return self.terminated or truncated

    def history(self):
        return [(s["obs"], s["action"], s["reward"]) for s in self.steps]

class Prior(NamedTuple):
    """The LLM's opinion of one state."""
    prompt_ids: list
    analysis: Analysis
    logps: list  # for each action, of each token of " <action><eos>"

def llm_priors(llm, games, cfg, generator):
    """A Prior for each game; equal prompts are computed once per LLM version."""
    keys = [(tuple(encode_prompt(llm, cfg, g.obs, g.actions, g.history())), tuple(g.actions)) for g in games]
    new = [key for key in dict.fromkeys(keys) if key not in llm.cache]
    prompts = [list(prompt) for prompt, _ in new]
    analyses = generate_analyses(llm, prompts, cfg, generator) if new else []
    contexts = [p + a.ids for p, a in zip(prompts, analyses)]
    logps = action_logps(llm, contexts, [actions for _, actions in new]) if new else []
    llm.cache.update({key: Prior(*row) for key, *row in zip(new, prompts, analyses, logps)})
    return [llm.cache[key] for key in keys]

@torch.no_grad()
def decide(agent, games, num_simulations, temperature, explore, llm_only=False):
    """Choose an action for every game: LLM prior, fusion at the root, search.  Source: PriorZero table 2.
    Returns (slots, policies as lists, samples for the LLM's training, figures as tensors [B])."""
    cfg, llm, C = agent.cfg, agent.llm, agent.cfg.context
    put = lambda rows, width: pad_sequence([torch.tensor(r + [0] * (width - len(r))) for r in rows], batch_first=True).to(agent.device)
    recent = [g.steps[len(g.steps) - min(C - 1, len(g.steps)):] for g in games]
    obs = put([[s["obs_id"] for s in r] + [g.obs_id] for r, g in zip(recent, games)], C)
    roots = encode_roots(agent.model, agent.bank, obs, put([[s["action_id"] for s in r] for r in recent], C - 1), (obs > 0).sum(1),
                         put([g.list for g in games], max(len(g.list) for g in games)))
    logits, priors, scores = roots.logits, [None] * len(games), None
    if llm is not None:
        priors = llm_priors(llm, games, cfg, agent.generators["sampling"])
        scores = pad([[sum(x) / len(x) for x in p.logps] for p in priors], agent.device, "right", torch.float32)[0]
        wm = logits.softmax(-1)
        alpha = adaptive_alpha(wm, roots.valid, cfg.alpha_min, cfg.alpha_max) if cfg.adaptive_alpha else cfg.alpha
        logits = fuse_root_prior(logits, scores, roots.valid, 1.0 if llm_only else alpha, cfg.prior_temperature)
    if cfg.mcts and not llm_only:
        policy = tree_search(agent.model, roots, logits, cfg, num_simulations, explore, agent.generators["search"]).visit_counts
    else:
        policy = logits.softmax(-1)
    probs = action_probs(policy, temperature)
    slots = torch.multinomial(probs, 1, generator=agent.generators["search"])[:, 0].tolist()
    policy = action_probs(policy, 1.0)
    samples = [p and {"prompt": p.prompt_ids, "ids": p.analysis.ids, "logps": p.analysis.logps, "written": p.analysis.written,
                      "format_ok": p.analysis.format_ok, "action_logps": p.logps[k], "version": llm.version} for p, k in zip(priors, slots)]
    entropy = lambda p: torch.special.entr(p).sum(-1)
    figures = {"visit_entropy": entropy(policy), "prior_entropy": entropy(logits.softmax(-1)), "root_value": roots.value}
    return slots, policy.tolist(), samples, figures

def collect(agent, pool, games, temperature):
    """One step in every environment; finished games go to the replay.  Returns (finished games, figures)."""
    slots, policies, samples, figures = decide(agent, list(games.values()), agent.cfg.num_simulations, temperature, explore=True)
    clock, finished = time.perf_counter(), []
    results = pool.step(list(games), [g.actions[k] for g, k in zip(games.values(), slots)])
    for i, *played in zip(list(games), slots, policies, samples, results):
        if (game := games[i]).record(agent, *played):
            place = agent.replay.add(game)
            if agent.llm is not None:
                serial = agent.replay.count
                agent.samples += [s["sample"] | {"action": s["action"], "place": place + t, "serial": serial} for t, s in enumerate(game.steps)]
            finished.append(game)
            games[i] = new_game(agent, pool, i)
    agent.env_steps += len(games)
    figures["seconds_env"] = time.perf_counter() - clock
    return finished, figures

def new_game(agent, pool, i):
    """Start the next task of the run's seeded order in environment i."""
    epoch, n = divmod(agent.tasks_begun, pool.num_tasks)
    if n == 0 or agent.order is None:
        agent.order = np.random.default_rng((agent.cfg.seed, epoch)).permutation(pool.num_tasks)
    agent.tasks_begun += 1
    return Game(agent, task := int(agent.order[n]), *pool.reset([i], [task])[0])

def evaluate(agent, pool, llm_only=False):
    """Play tasks 0 .. eval_episodes - 1 once, greedily, without noise: {"return", "solved", "length", "episodes"}; {} if none."""
    cfg, waiting, played, games = agent.cfg, list(range(min(agent.cfg.eval_episodes, pool.num_tasks))), [], {}
    while waiting or games:
        for i in range(cfg.num_envs):
            if i not in games and waiting:
                games[i] = Game(agent, waiting[0], *pool.reset([i], [waiting.pop(0)])[0])
        slots, policies, samples, _ = decide(agent, list(games.values()), cfg.eval_simulations, 0.0, False, llm_only)
        results = pool.step(list(games), [g.actions[k] for g, k in zip(games.values(), slots)])
        for i, *step in zip(list(games), slots, policies, samples, results):
            if games[i].record(agent, *step):
                played.append(games.pop(i))
    mean = lambda xs: float(np.mean(list(xs)))
    return played and {"return": mean(g.ret for g in played), "solved": mean(g.won for g in played),
                       "length": mean(len(g.steps) for g in played), "episodes": len(played)}

# ---- The LLM's phase ----------------------------------------------------------------------------------------------------
@torch.no_grad()
def sample_advantages(agent, samples):
    """A = Q_n - v(z_t) of the target world model for steps in the replay, n-step within real history: -> [N].  Source: PriorZero 3.3."""
    cfg, replay, out = agent.cfg, agent.replay, []
    for part in torch.tensor([s["place"] for s in samples], device=agent.device).split(256):
        back = replay.data["time"][part].clamp(max=cfg.window - 1 - cfg.td_steps)  # real steps before t in the window
        w = replay.window(part - back, cfg.window)
        z, a = encode_texts(agent.target, agent.bank, w.obs, w.action)
        values = agent.target.decode(agent.target.value, agent.target(z, a)[0])
        q = n_step_targets(w.reward[:, :-1], values, w.terminated[:, :-1], w.truncated[:, :-1], cfg.gamma, cfg.td_steps)
        out.append((q - values[:, :-1]).gather(1, back[:, None])[:, 0])
    return torch.cat(out)

def response_logps(llm, samples):
    """Log-probabilities [B, S] of analysis and action behind each prompt, fp32, 0 on padding, from one forward pass."""
    rows = [(s["prompt"], s["ids"] + llm.ids(f" {s['action']}") + [llm.tokenizer.eos_token_id]) for s in samples]
    ids, mask = pad([p + r for p, r in rows], llm.device, "right")
    scored = pad([[1] * len(r) for _, r in rows], llm.device, "right")[0]  # [B, S]
    with llm.autocast():
        hidden = llm.model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False).last_hidden_state
        b, s = scored.nonzero(as_tuple=True)
        at = torch.tensor([len(p) - 1 for p, _ in rows], device=llm.device)[b] + s  # the position t predicts token t + 1
        logits = llm.model.get_output_embeddings()(hidden[b, at])
    logp = logits.float().log_softmax(-1).gather(1, ids[b, at + 1][:, None])[:, 0]
    return torch.zeros(scored.shape, device=llm.device).index_put((b, s), logp)

def swap_start(llm, start):
    """Exchange the trained weights with the frozen start (the KL term's reference), in place."""
    for name, p in trainable(llm.model).items():
        p.data, start[name] = start[name], p.data

def llm_batch_loss(agent, samples, advantages):
    """Backpropagate the loss of one batch of samples in micro-batches (the gradient does not depend on their size).
    Returns sums over the LLM's tokens [5]: tokens, loss, clipped, KL, |first ratio - 1|'s maximum."""
    cfg, llm = agent.cfg, agent.llm
    length = max(len(s["prompt"]) + len(s["ids"]) + len(s["action_logps"]) for s in samples)
    size, sums = max(1, cfg.token_budget // length), torch.zeros(5, device=llm.device)
    num_tokens = sum(sum(s["written"]) + len(s["action_logps"]) for s in samples)
    for i in range(0, len(samples), size):
        part, advantage = samples[i:i + size], advantages[i:i + size]
        float_rows = lambda rows: pad(rows, llm.device, "right", torch.float32)[0]
        old_logp = float_rows([s["logps"] + s["action_logps"] for s in part])
        cot_mask = float_rows([s["written"] + [0] * len(s["action_logps"]) for s in part])
        action_mask = float_rows([[0] * len(s["ids"]) + [1] * len(s["action_logps"]) for s in part])
        mask, weights = cot_mask + action_mask, token_weights(cot_mask, action_mask, cfg.w_cot)
        with torch.no_grad():
            swap_start(llm, agent.llm_start)
            ref_logp = response_logps(llm, part) if cfg.kl_coef else old_logp
            swap_start(llm, agent.llm_start)
        logp = response_logps(llm, part)
        if cfg.loss == "sft":  # imitation: the gradient of -log p of the action that search chose
            old_logp, advantage = logp.detach(), torch.ones_like(advantage)
        loss = ppo_loss(logp, old_logp, ref_logp, advantage, weights, mask, cfg.clip, cfg.kl_coef, num_tokens)
        loss.backward()
        ratio = ((logp - old_logp).detach() * mask).exp()
        clipped = torch.where(advantage[:, None] > 0, ratio > 1 + cfg.clip, ratio < 1 - cfg.clip) * mask
        sums += torch.stack([mask.sum(), loss.detach() * num_tokens, clipped.sum(), (k3_kl(logp.detach(), ref_logp) * mask).sum(),
                             ((ratio - 1).abs() * mask).sum()])
    return sums

def train_llm(agent):
    """One LLM phase: --llm_updates optimiser steps on the samples since the last phase.  Returns its figures.  Source: PriorZero 3.3."""
    cfg, llm, count = agent.cfg, agent.llm, agent.phase_llm
    serial = agent.replay.data["serial"]
    samples = [s for s in agent.samples[-count * cfg.llm_batch:] if int(serial[s["place"]]) == s["serial"]]
    if not samples:
        return {}
    raw = sample_advantages(agent, samples)
    good = [s["format_ok"] for s in samples]
    advantages = normalize_advantages(raw)
    if cfg.use_cot:
        advantages = blend_format_reward(advantages, good, cfg.format_weight)
    sums, norms, order = [], [], []
    for _ in range(count):
        if len(order) < min(cfg.llm_batch, len(samples)):
            order = torch.randperm(len(samples), generator=agent.generators["mini_batches"]).tolist()
        batch, order = order[:cfg.llm_batch], order[cfg.llm_batch:]
        agent.llm_optimizer.param_groups[0]["lr"] = cfg.llm_lr * agent.llm_schedule()
        sums.append(llm_batch_loss(agent, [samples[n] for n in batch], advantages[batch].to(llm.device)))
        norms.append(nn.utils.clip_grad_norm_(trainable(llm.model).values(), cfg.llm_grad_norm))
        if not bool(torch.isfinite(norms[-1])):
            raise FloatingPointError(f"LLM update {llm.version}: non-finite loss or gradient, replay places {[samples[n]['place'] for n in batch]}")
        agent.llm_optimizer.step()
        agent.llm_optimizer.zero_grad(set_to_none=True)
        llm.version += 1
    llm.cache.clear()  # the priors of the old weights
    agent.samples = []
    tokens, loss, clipped, kl, _ = torch.stack(sums).sum(0).tolist()
    first = sums[0].tolist()
    return {"llm_loss": loss / tokens, "llm_clip_frac": clipped / tokens, "llm_kl": kl / tokens, "llm_grad_norm": float(torch.stack(norms).mean()),
            "advantage_mean": float(raw.mean()), "advantage_std": float(raw.std()), "llm_samples": len(samples),
            "format_ok": float(np.mean(good)), "first_ratio_deviation": first[4] / first[0], "llm_version": llm.version}

# ---- Agent, checkpoints, files ------------------------------------------------------------------------------------------
class Agent:
    """Everything that a run changes: networks, optimisers, replay, counters, random generators."""
    def __init__(self, cfg):
        random.seed(cfg.seed), np.random.seed(cfg.seed), torch.manual_seed(cfg.seed)
        self.cfg, self.device = cfg, cfg.torch_device
        self.generators = {name: torch.Generator(self.device if name != "replay" and name != "mini_batches" else "cpu").manual_seed(cfg.seed + k)
                           for k, name in enumerate(("search", "sampling", "replay", "mini_batches"))}
        self.bank = TextBank(cfg)
        self.model = WorldModel(cfg, self.bank.features.shape[1]).to(self.device)
        self.target = copy.deepcopy(self.model).eval().requires_grad_(False)
        matrices, others = [[p for p in self.model.parameters() if (p.dim() > 1) == m] for m in (True, False)]
        self.optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": cfg.wm_weight_decay}, {"params": others, "weight_decay": 0.0}],
                                           lr=cfg.wm_lr, betas=(0.9, 0.95), fused=True)
        self.replay = Replay(cfg.replay_size, cfg.num_slots, self.device)
        self.llm, self.samples, self.order = None, [], None
        self.env_steps = self.wm_updates = self.phase_start = self.tasks_begun = 0
        self.phase_wm, self.phase_llm, self.phase_first = cfg.phase
        if cfg.alpha > 0 or cfg.llm_only:
            self.llm = load_llm(cfg)
            self.llm_start = {n: p.detach().clone() for n, p in trainable(self.llm.model).items()}
            self.llm_optimizer = torch.optim.AdamW(trainable(self.llm.model).values(), lr=cfg.llm_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def llm_schedule(self):
        """Warm-up over 3 % of the LLM's updates, then a cosine down to a tenth.  Source: PriorZero, appendix."""
        total = max(1.0, self.cfg.env_steps * self.cfg.replay_ratio * self.phase_llm / self.phase_wm)
        done = min(self.llm.version / total, 1.0)
        return min(1.0, (self.llm.version + 1) / (0.03 * total + 1)) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

RESUMABLE = {"env_steps", "device", "run_dir", "env_workers", "eval_every", "eval_episodes", "log_every", "save_every", "baseline"}
COUNTERS = ("env_steps", "wm_updates", "phase_start", "tasks_begun")

def atomic_write(path, write):
    """Call write(temporary path), then rename it to path: a crash or a full disk leaves the old file whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

def save_checkpoint(path, agent, games, results):
    """All that an exact continuation needs."""
    llm = agent.llm and {"version": agent.llm.version, "weights": trainable(agent.llm.model), "start": agent.llm_start,
                         "optimizer": agent.llm_optimizer.state_dict()}
    state = {"config": dataclasses.asdict(agent.cfg), "model": agent.model.state_dict(), "target": agent.target.state_dict(),
             "optimizer": agent.optimizer.state_dict(), "texts": list(agent.bank.index), "features": agent.bank.features,
             "replay": agent.replay.data, "replay_write": (agent.replay.write, agent.replay.count), "llm": llm, "samples": agent.samples,
             "counters": {name: getattr(agent, name) for name in COUNTERS}, "results": results, "torch_rng": torch.get_rng_state(),
             "games": {i: (g.task, g.steps) for i, g in games.items()}, "generators": {k: g.get_state() for k, g in agent.generators.items()}}
    atomic_write(path, lambda temporary: torch.save(state, temporary))

def load_checkpoint(path):
    """Read a checkpoint (weights_only: nothing but tensors and plain values is unpickled).  Raises InputError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        Config(**state["config"]), state["model"], state["replay"], state["games"]
    except Exception as error:  # torch.load fails in many ways on a missing or damaged file; all mean the same to the user
        raise InputError(f"{path}: not a readable checkpoint of priorzero.py ({type(error).__name__}); name another one") from error
    return state

def restore(agent, state, path):
    """Put a checkpoint back into an agent.  Raises InputError where the shapes differ."""
    agent.bank.index, agent.bank.features = {t: n for n, t in enumerate(state["texts"])}, state["features"].to(agent.device)
    pairs = [(agent.model.state_dict(), state["model"])]
    if agent.llm and state["llm"]:
        pairs.append((trainable(agent.llm.model), state["llm"]["weights"]))
    for own, saved in pairs:
        if {n: p.shape for n, p in own.items()} != {n: p.shape for n, p in saved.items()}:
            raise InputError(f"{path}: its weights have another shape than this model; give the sizes it was made with")
    agent.model.load_state_dict(state["model"])
    agent.target.load_state_dict(state["target"])
    agent.optimizer.load_state_dict(state["optimizer"])
    if agent.llm and state["llm"]:
        with torch.no_grad():
            for name, p in trainable(agent.llm.model).items():
                p.copy_(state["llm"]["weights"][name])
        agent.llm_start = {n: p.to(agent.device) for n, p in state["llm"]["start"].items()}
        agent.llm.version = state["llm"]["version"]
        agent.llm_optimizer.load_state_dict(state["llm"]["optimizer"])
    agent.replay.data = {k: v.to(agent.device) for k, v in state["replay"].items()}
    (agent.replay.write, agent.replay.count), agent.replay.starts, agent.samples = state["replay_write"], None, state["samples"]
    torch.set_rng_state(state["torch_rng"])
    for name, value in state["counters"].items():
        setattr(agent, name, value)
    for name, generator in agent.generators.items():
        generator.set_state(state["generators"][name])

def resume_games(agent, pool, saved):
    """Bring the environments back to where they were: the same tasks, the same actions again."""
    games = {}
    for i, (task, steps) in saved.items():
        result = pool.reset([i], [task])[0]
        for step in steps:
            obs, _, _, _, info = pool.step([i], [step["action"]])[0]
            result = obs, info
        games[i] = Game(agent, task, *result, steps)
        games[i].ret = sum(s["reward"] for s in steps)
    return games

def open_run_dir(cfg, resume):
    """Create the run's folder; raises InputError where it cannot be written or already holds a run."""
    path = Path(cfg.run_dir or f"runs/priorzero-{cfg.env}-alpha{cfg.alpha:g}-seed{cfg.seed}-{time.strftime('%m%d-%H%M%S')}")
    if (path / "checkpoint.pt").exists() and not resume:
        raise InputError(f"--run_dir {path}: it already holds a run; add --resume to go on with it, or name another folder")
    try:
        (path / "transcripts").mkdir(parents=True, exist_ok=True)
        atomic_write(path / "config.json", lambda t: t.write_text(json.dumps(dataclasses.asdict(cfg), indent=1)))
    except OSError as error:
        raise InputError(f"--run_dir {path}: cannot write there ({error.strerror})") from error
    return path

class Log:
    """What a run prints and writes: header, progress bar, a line and a JSON object every --log_every steps, transcripts."""
    def __init__(self, run_dir, agent):
        self.run_dir, self.cfg, self.sums, self.finished, self.clock = run_dir, agent.cfg, defaultdict(list), [], time.perf_counter()
        sizes = [sum(p.numel() for p in m.parameters()) for m in (agent.model, agent.llm.model if agent.llm else nn.Module())]
        print(f"priorzero.py: world model of {sizes[0]:,} parameters, " + (f"{agent.cfg.model} LLM of {sizes[1]:,}" if agent.llm else "no LLM (UniZero)")
              + f" on {agent.device}, {agent.cfg.env}, alpha {agent.cfg.alpha}, seed {agent.cfg.seed}; files in {run_dir}")
        path = run_dir / "metrics.jsonl"  # on resume: drop the lines written after the checkpoint
        lines = [line for line in path.read_text().splitlines() if json.loads(line)["env_steps"] <= agent.env_steps] if path.exists() else []
        atomic_write(path, lambda t: t.write_text("".join(line + "\n" for line in lines)))
        self.bar = tqdm(total=agent.cfg.env_steps, initial=agent.env_steps, desc="env steps", unit="step")

    def add(self, figures, finished=()):
        self.finished += finished
        for name, value in figures.items():
            self.sums[name].append(torch.as_tensor(value, dtype=torch.float32).mean())

    def write(self, agent, result):
        """One line of means since the last one."""
        mean, n = lambda xs: float(np.mean(list(xs))) if xs else None, len(self.sums["seconds_search"]) * self.cfg.num_envs
        row = {"env_steps": agent.env_steps, "wm_updates": agent.wm_updates, "llm_version": agent.llm.version if agent.llm else 0,
               "return": mean([g.ret for g in self.finished]), "solved": mean([float(g.won) for g in self.finished]),
               "episode_len": mean([len(g.steps) for g in self.finished]), "episodes": len(self.finished),
               **{k: float(torch.stack(v).mean()) for k, v in self.sums.items() if v}, **{f"eval_{k}": v for k, v in result.items()},
               "search_ms": 1e3 * float(sum(self.sums["seconds_search"])) / max(n, 1), "seconds": time.perf_counter() - self.clock}
        with open(self.run_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        shown = ("return solved episode_len wm_loss latent_loss policy_loss value_loss reward_loss visit_entropy prior_entropy wm_grad_norm llm_kl "
                 "llm_clip_frac search_ms update_ms eval_return eval_solved")
        tqdm.write(f"step {agent.env_steps}: " + "  ".join(f"{k} {row[k]:.3g}" for k in shown.split() if row.get(k) is not None))
        if self.finished:
            (self.run_dir / "transcripts" / f"step_{agent.env_steps:07d}.txt").write_text(transcript(self.finished[-1]))
        self.sums, self.finished, self.clock = defaultdict(list), [], time.perf_counter()

def transcript(game):
    """One episode as readable text."""
    lines = [f"{game.task_id}: {'solved' if game.won else 'not solved'}, return {game.ret:g}"]
    for t, s in enumerate(game.steps):
        lines += [f"\n[{t}] {s['obs']}", f"    > {s['action']}    (reward {s['reward']:+g})"]
    return "\n".join(lines + [f"\n[end] {game.obs}\n"])

# ---- The run ------------------------------------------------------------------------------------------------------------
def learn(agent, log):
    """The updates that are due (--replay_ratio), and an LLM phase after every --wm_updates of them.  Source: PriorZero table 2."""
    cfg = agent.cfg
    while agent.env_steps >= cfg.warmup_steps and agent.wm_updates < (agent.env_steps - cfg.warmup_steps) * cfg.replay_ratio and agent.replay.count:
        clock = time.perf_counter()
        log.add(update_world_model(agent, cfg))
        log.add({"update_ms": 1e3 * (time.perf_counter() - clock)})
        due = max(agent.phase_start + agent.phase_wm, agent.phase_first)
        if agent.llm and not cfg.freeze_llm and agent.wm_updates >= due:
            agent.phase_start, clock = agent.wm_updates, time.perf_counter()
            log.add(train_llm(agent))
            log.add({"seconds_llm": time.perf_counter() - clock})

def train(cfg, state=None):
    """PriorZero's loop, with evaluation before and after.  Returns {row of the table: result}."""
    agent = Agent(cfg)
    with (EnvPool(cfg.env, cfg.num_envs, cfg.env_workers, **cfg.env_options(False)) as pool,
          EnvPool(cfg.env, cfg.num_envs, cfg.env_workers, **cfg.env_options(True)) as eval_pool):
        run_dir = open_run_dir(cfg, resume=state is not None)
        if state:
            restore(agent, state, run_dir)
        log, name = Log(run_dir, agent), "PriorZero" if agent.llm else "UniZero"
        results = state["results"] if state else {f"{name} before": evaluate(agent, eval_pool)}
        if agent.llm and not state:
            results["LLM alone before"] = evaluate(agent, eval_pool, llm_only=True)
        games = resume_games(agent, pool, state["games"]) if state else {i: new_game(agent, pool, i) for i in range(cfg.num_envs)}
        interrupted = []  # Ctrl-C ends the run after the step in progress; a second Ctrl-C ends it at once
        signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.default_int_handler)))
        while agent.env_steps < cfg.env_steps:
            clock, before = time.perf_counter(), agent.env_steps
            progress = min(1.0, 2 * agent.env_steps / cfg.env_steps)
            finished, figures = collect(agent, pool, games, cfg.temperature + progress * (cfg.final_temperature - cfg.temperature))
            log.add(figures | {"seconds_search": time.perf_counter() - clock - figures["seconds_env"]}, finished)
            learn(agent, log)
            log.bar.update(cfg.num_envs)
            due = lambda every: every and agent.env_steps // every > before // every
            result = evaluate(agent, eval_pool) if due(cfg.eval_every) and agent.env_steps < cfg.env_steps else {}
            last = agent.env_steps >= cfg.env_steps or interrupted
            if due(cfg.log_every) or result or last:
                log.write(agent, result)
            if due(cfg.save_every) or last:
                save_checkpoint(run_dir / "checkpoint.pt", agent, games, results)
            if interrupted:
                raise KeyboardInterrupt
        results[f"{name} after"] = evaluate(agent, eval_pool)
        if agent.llm:
            results["LLM alone after"] = evaluate(agent, eval_pool, llm_only=True)
    (run_dir / "result.json").write_text(json.dumps(results))
    return results, run_dir

def table(results):
    """The end of a run: one row for each agent."""
    lines = ["".ljust(18) + "return    solved    length  episodes"]
    lines += [f"{name:15s}{r['return']:9.3f}{100 * r['solved']:9.1f}%{r['length']:10.1f}{r['episodes']:10d}" for name, r in results.items() if r]
    return "\n".join(lines)

def parse_arguments(argv):
    """(explicit settings, mode arguments): a flag per Config field, and the flags that choose what to do."""
    parser = argparse.ArgumentParser(prog="priorzero.py", description=__doc__.split("\n")[0], argument_default=argparse.SUPPRESS)
    parser.error = lambda message: (_ for _ in ()).throw(InputError(message))
    for f in dataclasses.fields(Config):
        text = f"{f.metadata['help']} [{f.default}]"
        kind = {"action": argparse.BooleanOptionalAction} if isinstance(f.default, bool) else {"type": type(f.default)}
        parser.add_argument(f"--{f.name}", help=text.replace("%", "%%"), **kind)
    parser.add_argument("--resume", nargs="?", const="", help="continue a run: its checkpoint, or none for the one in --run_dir")
    parser.add_argument("--eval", metavar="CKPT", help="evaluate a checkpoint instead of training")
    parser.add_argument("--plot", nargs="+", metavar="RUN", help="draw the curves of run folders to curves.png instead of training")
    parser.add_argument("--warm_start", action="store_true", help="make the tiny LM anew in tiny_lm_babyai/ (README: how long)")
    arguments = vars(parser.parse_args(argv))
    modes = {k: arguments.pop(k) for k in ("resume", "eval", "plot", "warm_start") if k in arguments}
    return arguments, modes

def main(argv=None):
    """Run what the command line asks for."""
    explicit, modes = parse_arguments(argv)
    cfg = Config(**PRESETS.get(explicit.get("env", "babyai"), {}) | explicit)
    cfg.validate()
    if "plot" in modes:
        from benchmarks.plot import plot
        return plot(modes["plot"], "curves.png", PANELS, "env_steps")
    if "warm_start" in modes:
        from tiny_lm_babyai import make  # not part of the method: it stands in for the pretraining of a real LLM
        return make.main(cfg)
    state = None
    if "eval" in modes or "resume" in modes:
        path = Path(modes.get("eval") or modes["resume"] or Path(cfg.run_dir) / "checkpoint.pt")
        state = load_checkpoint(path)
        cfg = Config(**state["config"] | {"run_dir": str(path.parent)} | explicit)  # a checkpoint's settings, and the flags given
        cfg.validate()
        for name, value in explicit.items():
            if "resume" in modes and name not in RESUMABLE and value != state["config"][name]:
                raise InputError(f"--{name} {value}: the checkpoint was made with {state['config'][name]}; leave the flag out to resume")
    if "eval" in modes:
        restore(agent := Agent(cfg), state, path)
        with EnvPool(cfg.env, cfg.num_envs, cfg.env_workers, **cfg.env_options(True)) as pool:
            return print(table({"LLM alone" if cfg.llm_only else "evaluation": evaluate(agent, pool, cfg.llm_only)}))
    results, run_dir = train(cfg, state)
    if cfg.baseline and cfg.alpha > 0 and cfg.env_steps:
        other = run_dir / "unizero"
        base = load_checkpoint(other / "checkpoint.pt") if state and (other / "checkpoint.pt").exists() else None
        results |= train(dataclasses.replace(cfg, alpha=0.0, run_dir=str(other)), base)[0]
    print(f"\n{cfg.env}, {cfg.eval_episodes} unseen episodes, {cfg.env_steps} environment steps:\n{table(results)}\nfiles in {run_dir}")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(print(f"priorzero.py: {error}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(130)
