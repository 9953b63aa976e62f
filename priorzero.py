"""PriorZero: an LLM tells a latent tree search where to look first, and learns from what the search finds (arXiv 2605.12289).

UniZero (arXiv 2406.10667) = a transformer that predicts latent observations, rewards, policy and value, searched by MCTS.
PriorZero mixes the LLM's opinion into the ROOT prior of that search only, and trains world model and LLM in turns: the LLM by
PPO, with the world model's n-step advantage.  No gradient crosses: the LLM shapes what is collected, the world model a scalar.

    paper                                                  function here
    3.1      history -> latent, imagined steps             WorldModel, encode_roots, imagine
    3.1      policy, value, reward, next-latent losses     world_model_losses (two_hot, n_step_targets, simnorm)
    3.2      mixture at the root, adaptive weight          fuse_root_prior, adaptive_alpha
    3.2      analyse, then score each action               generate_analyses, action_scores
    3.3      A = Q_n - v of the target model               sample_advantages, normalize_advantages, blend_format_reward
    3.3      clipped loss, w_cot, k3 KL                    ppo_loss, token_weights, k3_kl
    table 2  the loop                                      train (decide, collect, learn, train_llm)

On 2 CPU cores, no GPU, no network, a shipped tiny LM as the prior; and on one GPU with the paper's sizes (results: README):
    python priorzero.py --env babyai
    python priorzero.py --env jericho --game detective --rom_dir ROMS --model Qwen/Qwen2.5-3B-Instruct --encoder BAAI/bge-base-en-v1.5 \\
        --width 768 --heads 24 --lora_rank 32 --llm_lr 1e-6 --wm_updates 2000 --llm_updates 200 --llm_batch 128 --env_steps 50000

DEVIATION: an action is its TEXT, not its place in the list (`--action_slots index`: the public code's way).  Place i means another
command in every state, so an action token embeds the command, and the policy scores the commands of the state's own list.  An imagined
state, whose list nobody knows, has those of all known commands that are more likely valid than not (`valid_loss`), A at most.
"""

import argparse, copy, dataclasses, importlib, json, math, os, random, re, signal, sys, time, zlib
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, logging

from envs import JERICHO_GAMES, EnvPool, InputError
from mcts import Root, Step, action_probs, search, visit_entropy

# Dimension letters: B rows, H steps of a window, W steps read with it (H + n), C steps of a root's context, A actions, V known actions,
# K keys, D width, L layers, M support bins, N any number, T tokens, P prompt tokens, S scored tokens.  Masks: 1 = keep.
logging.disable_progress_bar()
HASH_BUCKETS, TINY_FOLDER = 8192, Path(__file__).parent / "tiny_lm/babyai"  # rows of the hash encoder's table; the shipped LM
PRESETS = {"jericho": dict(gamma=0.95, eval_simulations=25, eval_episodes=1, kl_coef=0.01, format_weight=0.5)}
SHOWN = ("return solved episode_len wm_loss latent_loss policy_loss value_loss reward_loss visit_entropy llm_kl llm_clip_frac search_ms "
         "prior_ms update_ms eval_return eval_solved").split()

# ---- Settings -----------------------------------------------------------------------------------------------------------
def flag(default, help, choices=None, low=-math.inf, high=math.inf):  # a Config field; help: meaning, unit, origin
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})

@dataclasses.dataclass
class Config:
    """Every setting, once; each becomes a command-line flag.  Defaults fit 2 CPU cores; PZ: the paper's value, code: its public code's."""
    env: str = flag("babyai", "environment", ("babyai", "jericho"))
    level: str = flag("PickupLoc", "BabyAI level, or all")
    game: str = flag("detective", "Jericho game")
    rom_dir: str = flag("", "folder with Jericho story files; empty = the environment variable JERICHO_ROMS")
    max_steps: int = flag(0, "actions per episode; 0 = the environment's (PZ: BabyAI 20, Jericho 50-500 by game)", low=0)
    max_actions: int = flag(0, "actions of a state that are kept, the first ones; 0 = PZ's (BabyAI 20, Jericho 12-55 by game)", low=0)
    env_workers: int = flag(0, "environment processes; 0 = step them in this process", low=0)
    env_steps: int = flag(12000, "environment steps of the run (PZ: 50k Jericho, 100k BabyAI)", low=0)
    num_envs: int = flag(16, "environments played side by side", low=1)
    model: str = flag("tiny", "causal LM of the prior: tiny (shipped, BabyAI), a Hugging Face name, a folder, or a .gguf file")
    alpha: float = flag(0.5, "weight of the LLM in the root prior; 0 = UniZero, no LLM is loaded (PZ: 0.5)", low=0, high=1)
    adaptive_alpha: bool = flag(False, "alpha between 0.3 and 0.7, the higher the surer the world model is (PZ 3.2)")
    prior_temperature: float = flag(0.0, "softmax temperature of the LLM's scores; 0 = 0.25 for tiny, whose are flat, else PZ's 1", low=0)
    cot: bool = flag(True, "the LLM analyses the situation before actions are scored (the tiny LM never does)")
    max_cot_len: int = flag(512, "tokens of an analysis at most (PZ: 512)", low=1)
    history_len: int = flag(10, "past steps in the LLM's prompt (code: BabyAI 10, Jericho 25)", low=0)
    max_prompt_len: int = flag(2048, "prompt tokens; older history is dropped first", low=16)
    lora_rank: int = flag(0, "LoRA rank; 0 trains all weights of the LLM", low=0)
    token_budget: int = flag(8192, "padded tokens of one scoring or training pass of the LLM; results do not depend on it", low=1)
    mcts: bool = flag(True, "search; off: act from the fused root prior (ablation)")
    num_simulations: int = flag(25, "simulations per step (PZ: 25)", low=1)
    eval_simulations: int = flag(50, "simulations per step of evaluation (PZ: Jericho 25, BabyAI 50)", low=1)
    pb_c_init: float = flag(3.0, "weight of the prior in the search (code: 1.25, where an unvisited action is not the worst)", low=0)
    dirichlet_fraction: float = flag(0.25, "share of Dirichlet(0.3) noise in the root prior; evaluation has none", low=0, high=1)
    temperature: float = flag(1.0, "actions are drawn from visits^(1/temperature), at the start of the run", low=0)
    final_temperature: float = flag(0.1, "the same from half of the run on (code: 0.25 always)", low=0)
    gamma: float = flag(0.97, "discount per step (Jericho: 0.95; PZ: 0.997, less steady on detective)", low=0, high=1)
    encoder: str = flag("hash", "text encoder: hash (trained), or a frozen Hugging Face encoder by name or folder (PZ: BGE-base)")
    action_slots: str = flag("text", "what an action token embeds: text or index (its place in the list)", ("text", "index"))
    latent_norm: str = flag("layernorm", "latent normalisation and loss: layernorm + MSE, simnorm + KL", ("layernorm", "simnorm"))
    width: int = flag(64, "width of the world model (PZ: 768)", low=8)
    layers: int = flag(2, "transformer layers (PZ: 2)", low=1)
    heads: int = flag(2, "attention heads (PZ: 24)", low=1)
    window: int = flag(10, "H, steps of a training window (PZ: 10)", low=2)
    context: int = flag(4, "C, real steps that a search starts from (PZ: 4)", low=1)
    replay_size: int = flag(100_000, "steps kept, one place more an episode (PZ: 3e5 Jericho, 5e5 BabyAI)", low=1000)
    replay_ratio: float = flag(0.3, "world-model updates per environment step (code: 0.1)", low=0)
    warmup_steps: int = flag(400, "environment steps before the first update", low=0)
    batch_size: int = flag(64, "windows per world-model update (PZ: 64)", low=1)
    td_steps: int = flag(5, "n of the n-step targets (PZ: 5)", low=1)
    reanalyze: float = flag(0.0, "share of a batch whose first policy target is searched anew, without the LLM (code: 0)", low=0, high=1)
    wm_lr: float = flag(1e-3, "learning rate of the world model (PZ: 3e-4)", low=0)
    entropy_weight: float = flag(0.005, "entropy bonus of the policy loss (code: 0.05)", low=0)
    ema: float = flag(0.05, "step of the target network at every update (code: 0.05)", low=0, high=1)
    wm_updates: int = flag(100, "world-model updates of a phase (PZ: 2000 Jericho, 500 BabyAI)", low=1)
    llm_updates: int = flag(20, "LLM updates of a phase (PZ: 200 Jericho, 100 BabyAI)", low=1)
    wm_warmup: int = flag(300, "world-model updates before the first phase", low=0)
    freeze_llm: bool = flag(False, "never train the LLM (ablation)")
    alternate: bool = flag(True, "phases; off: LLM updates from the first world-model update on (ablation)")
    loss: str = flag("ppo", "LLM loss: ppo, or sft = imitate the action drawn from the visits (ablation)", ("ppo", "sft"))
    llm_lr: float = flag(1e-4, "learning rate of the LLM (PZ: 1e-6 for 3B and 7B)", low=0)
    llm_batch: int = flag(32, "samples per LLM update (PZ: 128)", low=1)
    clip: float = flag(0.2, "PPO clip on both sides (PZ: 0.2)", low=0)
    kl_coef: float = flag(0.1, "weight of the k3 KL to the frozen start (PZ: BabyAI 0.1, Jericho 0.01)", low=0)
    w_cot: float = flag(0.1, "weight of an analysis token; action tokens weigh 1 (PZ: 0.1)", low=0)
    format_weight: float = flag(0.3, "share of the format reward, with --cot (PZ: BabyAI 0.3, Jericho 0.5)", low=0, high=1)
    baseline: bool = flag(True, "after PriorZero, train UniZero with the same budget for the table")
    llm_only: bool = flag(False, "with --eval: the LLM alone, the action with the best score")
    eval_every: int = flag(2000, "environment steps between evaluations; 0 = only before and after", low=0)
    eval_episodes: int = flag(100, "episodes of an evaluation; 0 = none", low=0)
    log_every: int = flag(400, "environment steps between lines of the log", low=1)
    save_every: int = flag(2000, "environment steps between checkpoints", low=1)
    seed: int = flag(1, "seed of everything but the evaluation", low=0, high=2**32 - 1)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    run_dir: str = flag("", "output folder; empty = runs/priorzero-<env>-alpha<alpha>-seed<seed>-<time>")
    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    @property
    def num_slots(self) -> int:  # A, the places in the list of a state's actions
        return self.max_actions or (JERICHO_GAMES.get(self.game, JERICHO_GAMES["other"])[0] if self.env == "jericho" else 20)
    @property
    def use_cot(self) -> bool:
        return self.cot and self.model != "tiny"
    def env_options(self, evaluation: bool) -> dict:  # keyword arguments of make_env
        if self.env == "jericho":
            return dict(game=self.game, rom_dir=self.rom_dir or None, max_steps=self.max_steps or None, action_cap=self.num_slots)
        return dict(level=self.level, split="valid_unseen" if evaluation else "train", max_steps=self.max_steps or 20)
    def validate(self):  # raises InputError with the flag, its value and what is allowed
        for f in dataclasses.fields(self):
            value, choices, low, high = getattr(self, f.name), *(f.metadata[k] for k in ("choices", "low", "high"))
            if choices and value not in choices:
                raise InputError(f"--{f.name} {value}: choose one of {', '.join(choices)}")
            if not isinstance(value, str) and not (low <= value <= high and math.isfinite(value)):
                raise InputError(f"--{f.name} {value}: must lie between {low} and {high}")
        devices = ["auto", "cpu"] + ["cuda", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))] * torch.cuda.is_available()
        for name, ok, allowed in (
                ("width", self.width % math.lcm(8, self.heads) == 0, "must be a multiple of 8 and of --heads"),
                ("window", self.window > max(self.td_steps, self.context), "must be greater than --td_steps and --context"),
                ("model", self.env == "babyai" or self.model != "tiny" or not (self.alpha or self.llm_only), "knows BabyAI only"),
                ("replay_size", self.replay_size > 2 * max(self.max_steps, self.llm_updates * self.llm_batch),
                 "must exceed 2 x --max_steps and 2 x --llm_updates x --llm_batch"),
                ("device", self.device in devices, f"choose one of {', '.join(devices)}")):
            if not ok:
                raise InputError(f"--{name} {getattr(self, name)}: {allowed}")

# ---- The formulas -------------------------------------------------------------------------------------------------------
def simnorm(x, group):
    """Softmax within groups of `group` neighbours: [..., D] -> [..., D], each group sums to 1.  Source: UniZero, SimNorm."""
    return x.unflatten(-1, (-1, group)).softmax(-1).flatten(-2)

def value_transform(x):
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x, elementwise: game units -> h-space.  Source: MuZero, appendix F."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + 0.001 * x

def inverse_value_transform(y):
    """h^-1, elementwise: h-space -> game units; a form without cancellation in fp32.  Source: MuZero, appendix F."""
    a = y.abs() + 1.001
    return y.sign() * ((2 * a / ((1 + 0.004 * a).sqrt() + 1)) ** 2 - 1)

def two_hot(x, support):
    """Weights on the two bins next to x, with mean x: [...] -> [..., M], rows sum to 1; beyond the ends: the end bin.
    Args: x in the support's units (h-space here); support [M], ascending in steps of 1.  Source: UniZero 3.2; MuZero, appendix F."""
    return (1 - (x.clamp(support[0], support[-1]).unsqueeze(-1) - support).abs()).clamp(min=0)

def expected_value(logits, support):
    """Mean of the support under softmax(logits): [..., M], [M] -> [...], in the support's units.  Source: UniZero 3.2."""
    return logits.softmax(-1) @ support

def n_step_targets(rewards, values, terminated, truncated, gamma, n):
    """Q_n(t) = sum_{i < n} gamma^i r_{t+i} + gamma^n v_{t+n}, which never looks beyond an episode's end.
    Args: rewards [..., T] game units; values [..., T+1], v(o_t); terminated, truncated bool [..., T]: step t ends its episode,
        and then v(o_{t+1}) counts as 0, or takes the place of all that would come.  T may end in the middle of an episode.
    Returns: [..., T].  Source: PriorZero 3.3, MuZero eq. 3."""
    returns = values
    for _ in range(n):
        after = torch.where(truncated.bool(), values[..., 1:], returns[..., 1:]).masked_fill(terminated.bool(), 0.0)
        returns = torch.cat([rewards + gamma * after, values[..., -1:]], -1)
    return returns[..., :-1]

def fuse_root_prior(wm_logits, llm_scores, valid_mask, alpha, temperature):
    """Root logits log((1 - alpha) pi_WM + alpha pi_LLM + 1e-8); both are masked first, then normalised over the valid actions.
    Args: wm_logits, llm_scores (mean log-probability per token), valid_mask, all [B, A]; alpha in [0, 1], a number or [B];
        temperature of the scores.  Returns: [B, A], -inf where invalid.  Source: PriorZero 3.2."""
    alpha, invalid = torch.as_tensor(alpha, dtype=wm_logits.dtype, device=wm_logits.device).view(-1, 1), ~valid_mask.bool()
    wm = wm_logits.masked_fill(invalid, -torch.inf).softmax(-1)
    llm = (llm_scores / temperature).masked_fill(invalid, -torch.inf).softmax(-1)
    return ((1 - alpha) * wm + alpha * llm + 1e-8).log().masked_fill(invalid, -torch.inf)

def adaptive_alpha(wm_probs, valid_mask, alpha_min, alpha_max):
    """alpha_min + (alpha_max - alpha_min) (1 - H(pi_WM) / ln |A|): [B, A], [B, A] -> [B]; H = 0 for one action.  Source: PriorZero 3.2."""
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
    return (ref_logp - logp).expm1() - (ref_logp - logp)

def ppo_loss(logp, old_logp, ref_logp, advantage, weights, mask, clip, kl_coef, num_tokens=None):
    """Clipped surrogate, each token weighted, plus kl_coef times the k3 KL; the ratio itself is not weighted.
    Args: logp, old_logp (at rollout), ref_logp [B, S]; advantage [B]; weights [B, S] from token_weights; mask [B, S], 1 = token
        of the LLM; num_tokens: the denominator, the tokens of the WHOLE batch where this is a part of it (default: of mask).
    Returns: scalar, 0 for an empty mask.  Source: PriorZero 3.3."""
    logp, old_logp, ref_logp = (torch.where(mask.bool(), x, 0.0) for x in (logp, old_logp, ref_logp))
    ratio, a = (logp - old_logp).exp(), advantage[:, None]
    surrogate = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a) * weights
    total = ((surrogate + kl_coef * k3_kl(logp, ref_logp)) * mask).sum()
    return total / torch.as_tensor(mask.sum() if num_tokens is None else num_tokens).clamp(min=1)

def format_ok(text):
    """Whether an answer is exactly one "Reasoning:", at its start, followed by exactly one "Action:" line.  Source: PriorZero 3.2."""
    counts = text.count("Reasoning:"), len(re.findall(r"^Action:", text, re.M))
    return counts == (1, 1) and re.fullmatch(r"\s*Reasoning:.*\nAction:[^\n]*\S[^\n]*\s*", text, re.S) is not None

# ---- The world model ----------------------------------------------------------------------------------------------------
class TextBank:
    """Numbers for texts (0 = none), and what the encoder reads of each: hashed words and n-grams, or a frozen encoder's CLS vector."""
    def __init__(self, cfg):
        self.index, self.frozen = {"": 0}, None
        self.features = torch.zeros(1, 1, dtype=torch.int32, device=cfg.torch_device)  # [texts or more, n-grams], 0 = none
        if cfg.encoder != "hash":
            self.tokenizer, frozen = load_pretrained(AutoModel, cfg.encoder, "--encoder")
            self.frozen = frozen.to(cfg.torch_device).eval().requires_grad_(False)  # eval: no dropout in latents and targets
            self.features = torch.zeros(1, frozen.config.hidden_size, device=cfg.torch_device)
    def __call__(self, texts):
        """Numbers of these texts, a list."""
        if new := [text for text in dict.fromkeys(texts) if text not in self.index]:
            self.index.update(zip(new, range(len(self.index), len(self.index) + len(new))))
            if self.frozen:
                inputs = self.tokenizer(new, truncation=True, max_length=512, padding=True, return_tensors="pt")
                rows = self.frozen(**inputs.to(self.features.device)).last_hidden_state[:, 0].float()
            else:
                rows = pad([self.hash(text) for text in new], self.features.device, dtype=torch.int32)
            wider, missing = rows.shape[1] - self.features.shape[1], len(self.index) - len(self.features)
            if wider > 0 or missing > 0:  # grow to twice the size, so that it happens seldom
                self.features = F.pad(self.features, (0, max(wider, 0), 0, len(self.index) if missing > 0 else 0))
            self.features[len(self.index) - len(new):len(self.index), :rows.shape[1]] = rows
        return [self.index[text] for text in texts]
    def hash(self, text):
        words = re.findall(r"[a-z0-9']+|[^\sa-z0-9']", text.lower())[:512]
        grams = {" ".join(words[i:i + n]) for n in (1, 2, 3) for i in range(len(words) - n + 1)}
        return [1 + zlib.crc32(gram.encode()) % (HASH_BUCKETS - 1) for gram in sorted(grams)]

def make_head(width, out):
    """Linear, LayerNorm, GELU, and a last linear layer that starts at zero: uniform policy, value 0, reward 0."""
    last = nn.Linear(width, out)
    nn.init.zeros_(last.weight), nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), last)

class Block(nn.Module):
    """A pre-norm transformer layer that can attend to the stored keys and values of earlier tokens."""
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x, past=None, mask=None):
        """x [B, T, D], past [B, K, 2, D] or None, mask bool [B, 1, T, K + T] or None = causal.  Returns x, own [B, T, 2, D]."""
        width = x.shape[-1]
        q, own = self.qkv(self.norm1(x)).split([width, 2 * width], -1)
        own = own.unflatten(-1, (2, width))
        keys = own if past is None else torch.cat([past, own], 1)
        k, v = keys.unflatten(-1, (self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, K + T, D / heads] each
        y = F.scaled_dot_product_attention(q.unflatten(-1, (self.heads, -1)).transpose(1, 2), k, v, mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), own

class WorldModel(nn.Module):
    """UniZero: tokens z_0 a_0 z_1 a_1 ...; the output at z_t gives policy and value, that at a_t reward and the next latent."""
    def __init__(self, cfg, feature_width):
        super().__init__()
        D, hashed = cfg.width, cfg.encoder == "hash"
        self.normalize = nn.LayerNorm(D) if cfg.latent_norm == "layernorm" else lambda x: simnorm(x, 8)
        self.table = nn.EmbeddingBag(HASH_BUCKETS, D, mode="mean", padding_idx=0) if hashed else nn.Linear(feature_width, D)
        self.action_key, self.positions = nn.Linear(D, D), nn.Parameter(0.02 * torch.randn(2 * cfg.window, D))
        self.blocks, self.norm_out = nn.ModuleList([Block(D, cfg.heads) for _ in range(cfg.layers)]), nn.LayerNorm(D)
        self.register_buffer("support", torch.arange(-50.0, 51.0))  # in h-space
        self.policy, self.valid, self.value, self.reward, self.latent = (make_head(D, out) for out in (D, D, 101, 101, D))
        nn.init.normal_(self.table.weight, std=0.1)  # it is normalised anyway, and what is small is soon learnt
    def encode(self, features):
        """What the bank keeps of texts [N, ...] -> normalised latents [N, D]."""
        return self.normalize(self.table(features))
    def run(self, x, past=None, mask=None):
        """Tokens x [B, T, D] behind stored ones, past [B, K, L, 2, D].  Returns outputs and own keys/values [B, T, L, 2, D]."""
        own = []
        for n, block in enumerate(self.blocks):
            x, kv = block(x, None if past is None else past[:, :, n], mask)
            own.append(kv)
        return self.norm_out(x), torch.stack(own, 2)
    def forward(self, latents, actions):
        """Latents and actions [B, H, D] -> outputs at latents, outputs at actions, [B, H, D] each.  Source: PriorZero 3.1."""
        x = self.run(torch.stack([latents, actions], 2).flatten(1, 2) + self.positions[:2 * latents.shape[1]])[0]
        return x[:, 0::2], x[:, 1::2]
    def decode(self, head, x):
        """Outputs [..., D] -> game units [...]: the mean of the value or reward head, transformed back."""
        return inverse_value_transform(expected_value(head(x), self.support))
    def score(self, head, x, keys):
        """Logits of the policy or of validity: outputs [..., D], action keys [V, D] -> [..., V]."""
        return head(x) @ keys.T / math.sqrt(x.shape[-1])

def encode_texts(model, bank, *numbers):
    """Latents [..., D] of tensors of text numbers [...]; each text is encoded once."""
    unique, inverse = torch.cat([n.flatten() for n in numbers]).unique(return_inverse=True)
    table = model.encode(bank.features.index_select(0, unique))
    return [F.embedding(part.view(n.shape), table) for part, n in zip(inverse.split([n.numel() for n in numbers]), numbers)]

# ---- Search -------------------------------------------------------------------------------------------------------------
# Where a search starts: logits [B, A] of the world model (-inf where invalid), value [B] in game units, valid [B, A]; slots [B, A],
# places of the list's actions among the known; text numbers [V], tokens, keys [V, D] of those; past [B, 2C-1, L, 2, D], lengths [B].
Roots = namedtuple("Roots", "logits value valid slots known tokens keys past lengths")

def encode_roots(model, bank, obs, actions, lists, known):
    """Encode the last real steps.  Args: text numbers of obs [B, C], of the actions between them [B, C-1], of the valid actions
    [B, A], padded with 0 on the right; of all known actions [V], A zeros, then sorted.  Source: PriorZero 3.1 (H = 4 at test time)."""
    z, a, tokens = encode_texts(model, bank, obs, actions, known)
    x = torch.stack([z, F.pad(a, (0, 0, 0, 1))], 2).flatten(1, 2)[:, :-1]
    x, past = model.run(x + model.positions[:x.shape[1]])
    lengths, valid, keys, slots = 2 * (obs > 0).sum(1) - 1, lists > 0, model.action_key(tokens), torch.searchsorted(known, lists)
    x = x[torch.arange(len(x), device=x.device), lengths - 1]
    logits = model.score(model.policy, x, keys).gather(1, slots).masked_fill(~valid, -torch.inf)
    return Roots(logits, model.decode(model.value, x), valid, slots, known, tokens, keys, past, lengths)

def imagine(model, roots, path, path_mask, action, gamma):
    """One imagined step for each row; a node stores the keys/values of its two tokens (its action, its latent) and its actions.
    An imagined state gets those of the known actions that are more likely valid than not, A at most, and at least the likeliest.
    Args: path (kv [B, K, 2, L, 2, D], slots [B, K, A]): what the parent, its parent, ..., the root stored; path_mask [B, K];
        action [B], a place in the parent's list.  Returns: mcts.Step.  Source: PriorZero 3.1, g(z, a) -> (z', r)."""
    path, slots = path
    context = torch.arange(roots.past.shape[1], device=path.device) < roots.lengths[:, None]
    own = F.pad(path_mask[:, 1:], (0, 1))  # a path ends with the root, whose tokens are in roots.past already
    mask = F.pad(torch.cat([context, own.repeat_interleave(2, 1)], 1), (0, 1), value=True)[:, None, None]  # [B, 1, 1, K + 1]
    past = torch.cat([roots.past, path.flatten(1, 2)], 1)
    position = roots.lengths + 2 * (path_mask.sum(1) - 1)
    token = F.embedding(slots[:, 0].gather(1, action[:, None])[:, 0], roots.tokens)
    x, kv_action = model.run((token + F.embedding(position, model.positions))[:, None], past, mask)
    reward, latent = model.decode(model.reward, x[:, 0]), model.normalize(model.latent(x[:, 0]))
    past, mask = torch.cat([past, kv_action], 1), F.pad(mask, (0, 1), value=True)
    x, kv_latent = model.run((latent + F.embedding(position + 1, model.positions))[:, None], past, mask)
    valid, slots = model.score(model.valid, x[:, 0], roots.keys).masked_fill(roots.known == 0, -1e9).topk(slots.shape[2])
    logits = model.score(model.policy, x[:, 0], roots.keys).gather(1, slots).masked_fill(valid < valid[:, :1].clamp(max=0), -1e9)
    return Step(reward, torch.full_like(reward, gamma), logits, model.decode(model.value, x[:, 0]),
                (torch.cat([kv_action, kv_latent], 1), slots))

def tree_search(model, roots, logits, cfg, num_simulations, noise=False, generator=None):
    """MCTS from these roots with `logits` [B, A] as root prior; inner nodes have the world model's prior alone."""
    root = Root(logits, roots.value, (roots.past.new_zeros(len(logits), 2, *roots.past.shape[2:]), roots.slots))
    max_depth = (2 * cfg.window - 2 * cfg.context + 1) // 2  # deeper, the positions would end
    return search(root, lambda path, action, mask: imagine(model, roots, path, mask, action, cfg.gamma), num_simulations,
                  valid_mask=roots.valid, max_depth=max_depth, whole_path=True, pb_c_init=cfg.pb_c_init,
                  dirichlet_fraction=cfg.dirichlet_fraction * noise, generator=generator)

# ---- Replay and the world model's update --------------------------------------------------------------------------------
# B windows of W steps: text numbers obs, action [B, W] and list [B, W, A] (the valid actions, 0 = padding), the search's policy visits
# [B, W, A], reward, terminated (also at the observation behind the last step), truncated, mask [B, W] (1 = an action was taken here;
# behind an episode's end its last observation is repeated).
Window = namedtuple("Window", "obs action list visits reward terminated truncated mask")

class Replay:
    """The last `size` steps, whole episodes one behind the other; an episode of T steps takes T + 1 places."""
    def __init__(self, size, num_slots, device):
        self.data = {name: torch.zeros((size, num_slots) if name in ("list", "visits") else size, dtype=dtype, device=device)
                     for names, dtype in (("obs action list end time", torch.int32), ("visits reward", torch.float32),
                                          ("terminated truncated", torch.bool)) for name in names.split()}
        self.write, self.starts = 0, None
    def add(self, game):
        """Store a finished Game; returns its first place.  `end`: its last place, `time` counts its steps."""
        T, (size, width) = len(game.steps), self.data["list"].shape
        first, self.starts = self.write if self.write + T < size else 0, None
        steps = [*game.steps, {"obs": game.number, "action": 0, "reward": 0.0, "list": [], "visits": []}]
        columns = {name: [step[name] for step in steps] for name in ("obs", "action", "reward")}
        columns |= {name: [step[name] + [0] * (width - len(step[name])) for step in steps] for name in ("list", "visits")}
        columns |= {"terminated": [False] * (T - 1) + [game.terminated] * 2, "truncated": [False] * (T - 1) + [not game.terminated, False],
                    "end": [first + T] * (T + 1), "time": list(range(T + 1))}
        for name, values in columns.items():
            self.data[name][first:first + T + 1] = torch.tensor(values, dtype=self.data[name].dtype)
        self.write = first + T + 1
        if self.write < size and self.data["time"][self.write] > 0:  # the rest of an overwritten episode has lost its history
            self.data["end"][self.write:self.data["end"][self.write] + 1] = 0
        return first
    def draw(self, batch_size, generator):
        """Places of steps [B], uniform over all steps stored."""
        if self.starts is None:
            self.starts = (self.data["end"] > torch.arange(len(self.data["end"]), device=self.data["end"].device)).nonzero()[:, 0]
        return self.starts[torch.randint(len(self.starts), (batch_size,), generator=generator).to(self.starts.device)]
    def window(self, starts, length):
        """The Window of `length` steps from each of these places [B]."""
        end, places = self.data["end"][starts][:, None], starts[:, None] + torch.arange(length, device=starts.device)
        mask, places = places < end, places.minimum(end)
        return Window(*(self.data[name][places] for name in Window._fields[:-1]), mask)

def target_values(target, bank, w, cfg):
    """Values [B, W] of a Window of W = H + n steps and latents [B, W, D], both of the target model.  The last n values come from a
    second window that starts at step n, so that they have real history as context, too."""
    H, n = cfg.window, cfg.td_steps
    z, a = encode_texts(target, bank, w.obs, w.action)
    first, second = (target(z[:, i:i + H], a[:, i:i + H])[0] for i in (0, n))
    return target.decode(target.value, torch.cat([first, second[:, H - n:]], 1)), z

def world_model_losses(model, target, bank, w, cfg):
    """Loss of a Window of H + n steps, and its terms, means over valid steps: 10 latent + 1 policy (with an entropy bonus) + 0.5 value +
    1 reward + 1 valid (ours: binary cross-entropy, which of the batch's actions are in the list).  Source: PriorZero 3.1, UniZero eq. 5."""
    H, support = cfg.window, model.support
    values, goals = target_values(target, bank, w, cfg)
    returns = n_step_targets(w.reward[:, :-1], values, w.terminated[:, :-1], w.truncated[:, :-1], cfg.gamma, cfg.td_steps)[:, :H]
    returns, rewards, goals = value_transform(returns), value_transform(w.reward[:, :H]), goals[:, 1:H + 1]
    lists, visits, mask = w.list[:, :H], w.visits[:, :H], w.mask[:, :H]
    value_mask = mask | w.terminated[:, :H]  # behind the end of a terminated episode the value is 0; of a truncated one unknown
    names, places = lists.unique(return_inverse=True)
    z, a, tokens = encode_texts(model, bank, w.obs[:, :H], w.action[:, :H], names)
    at_obs, at_action = model(z, a)
    keys = model.action_key(tokens)
    logp = model.score(model.policy, at_obs, keys).gather(2, places).masked_fill(lists == 0, -1e9).log_softmax(-1)  # [B, H, A]
    valid = model.score(model.valid, at_obs, keys)  # [B, H, names]
    valid_loss = F.binary_cross_entropy_with_logits(valid, torch.zeros_like(valid).scatter_(2, places, 1.0), reduction="none")
    predicted = model.normalize(model.latent(at_action))
    terms = {"latent_loss": ((predicted - goals).square().mean(-1) if cfg.latent_norm == "layernorm" else  # or the groups' KL, but for
                             -(goals * (predicted + 1e-6).log()).sum(-1) / (cfg.width / 8), mask),         # the goal's own entropy
             "valid_loss": (valid_loss @ (names > 0).float() / lists.shape[2], mask),
             "policy_loss": (-(visits * logp).sum(-1), mask), "policy_entropy": (-(logp.exp() * logp).sum(-1), mask),
             "value_loss": (-(two_hot(returns, support) * model.value(at_obs).log_softmax(-1)).sum(-1), value_mask),
             "reward_loss": (-(two_hot(rewards, support) * model.reward(at_action).log_softmax(-1)).sum(-1), mask),
             "clipped_share": (returns.abs() > support[-1], value_mask)}
    terms = {name: (x * where).sum() / where.sum().clamp(min=1) for name, (x, where) in terms.items()}
    return (10 * terms["latent_loss"] + terms["policy_loss"] + terms["valid_loss"] + 0.5 * terms["value_loss"] + terms["reward_loss"]
            - cfg.entropy_weight * terms["policy_entropy"]), terms

def update_world_model(agent):
    """One update and one step of the target network; returns its figures, scalar tensors."""
    cfg, starts = agent.cfg, agent.replay.draw(agent.cfg.batch_size, agent.generators["replay"])
    window = agent.replay.window(starts, cfg.window + cfg.td_steps)
    if num_rows := round(cfg.reanalyze * cfg.batch_size):
        window.visits[:num_rows, 0] = agent.replay.data["visits"][starts[:num_rows]] = reanalyze(agent, starts[:num_rows])
    loss, terms = world_model_losses(agent.model, agent.target, agent.bank, window, cfg)
    loss.backward()
    norm = optimizer_step(agent.optimizer, agent.model.parameters(), 10.0, f"world-model update {agent.wm_updates}", starts)
    torch._foreach_lerp_(list(agent.target.parameters()), [p.detach() for p in agent.model.parameters()], cfg.ema)
    agent.wm_updates += 1
    return {"wm_loss": loss.detach(), "wm_grad_norm": norm} | {name: term.detach() for name, term in terms.items()}

@torch.no_grad()
def reanalyze(agent, places):
    """Policies [B, A] of a fresh search at these places of the replay, with their real history.  Source: MuZero Reanalyze."""
    cfg, back = agent.cfg, agent.replay.data["time"][places].clamp(max=agent.cfg.context - 1)
    w, row = agent.replay.window(places - back, cfg.context), torch.arange(cfg.context, device=places.device)
    lists = w.list[torch.arange(len(places), device=places.device), back]
    roots = encode_roots(agent.model, agent.bank, w.obs * (row <= back[:, None]), w.action[:, :-1] * (row[:-1] < back[:, None]),
                         lists, agent.known_actions())
    return action_probs(tree_search(agent.model, roots, roots.logits, cfg, cfg.num_simulations).visit_counts, 1.0)

def optimizer_step(optimizer, parameters, max_norm, name, places):  # a non-finite gradient raises before anything changes
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    if not bool(torch.isfinite(norm)):
        raise FloatingPointError(f"{name}: non-finite loss or gradient, places {sorted(set(torch.as_tensor(places).tolist()))} in replay")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm

# ---- The language model -------------------------------------------------------------------------------------------------
def pad(rows, device, side="right", dtype=torch.long):  # lists of numbers -> [B, longest], padded with 0 on one side
    return pad_sequence([torch.tensor(r, dtype=dtype) for r in rows], batch_first=True, padding_side=side).to(device)

def pad_ids(rows, device, side="right"):  # token ids [B, T] and their mask, which comes from lengths, never from ids
    return pad(rows, device, side), pad([[1] * len(r) for r in rows], device, side)

def load_pretrained(kind, model, flag_name, dtype=torch.float32):
    """(tokenizer, model) by name, folder or GGUF file.  Raises InputError with one line where that is not possible."""
    path = Path(model)
    if not path.exists() and (path.suffix == ".gguf" or str(model)[:1] in "./~" or len(path.parts) > 2):  # no hub name
        raise InputError(f"{flag_name} {model}: there is no such file or folder")
    name, kwargs = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (str(path), {})
    try:
        return AutoTokenizer.from_pretrained(name, **kwargs), kind.from_pretrained(name, dtype=dtype, **kwargs)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise InputError(f"{flag_name} {model}: transformers cannot load it ({' '.join(str(error).split())[:200]})") from error

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

class LanguageModel:
    """A causal LM with its tokenizer, its frozen start (the KL term's reference) and the priors computed with this `version` of it."""
    def __init__(self, tokenizer, model, cfg):
        if cfg.lora_rank:
            model.requires_grad_(False)
            for name, module in list(model.named_modules()):
                if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
                    parent, _, child = name.rpartition(".")
                    setattr(model.get_submodule(parent), child, LoRALinear(module, cfg.lora_rank))
        self.model, self.tokenizer, self.device = model.eval().to(cfg.torch_device), tokenizer, cfg.torch_device  # eval: never dropout
        self.token_budget, self.version, self.cache = cfg.token_budget, 0, {}
        self.start = {name: p.detach().clone() for name, p in self.trainable().items()}
        if not self.start or tokenizer.eos_token_id is None or model.config.to_dict().get("final_logit_softcapping"):
            raise InputError(f"--model {cfg.model}: needs an EOS token, nn.Linear layers for LoRA, and no logit soft-capping (Gemma 2)")
    def trainable(self):
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}
    def swap_start(self):  # exchange the trained weights with their frozen start
        for name, p in self.trainable().items():
            p.data, self.start[name] = self.start[name], p.data
    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
    def answer_ids(self, action):  # tokenised alone, so that the same tokens are scored, stored and trained
        return self.ids(f" {action}") + [self.tokenizer.eos_token_id]
    def hidden(self, ids, mask, cache=None, keep=False, positions=None):
        """Last hidden states [B, T, D], and the cache, new if `keep` and none is given.  Positions: mask [0,0,1,1,1] -> [0,0,0,1,2]."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1]:] if positions is None else positions
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            out = self.model.base_model(input_ids=ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=keep)
        return out.last_hidden_state, out.cache
    def log_probs(self, hidden):  # of the next token, fp32: [..., D] -> [..., V]
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.model.get_output_embeddings()(hidden).float().log_softmax(-1)
    @torch.no_grad()
    def action_logps(self, contexts, actions):
        """Log-probabilities of the tokens of " <action><eos>" behind each context (token ids): for each context and action a list.
        Keys and values of a context are computed once; its actions stand behind it side by side in ONE row, where none sees another."""
        widest = max(map(len, contexts)) + max(sum(len(self.answer_ids(a)) for a in row) for row in actions)
        size, out = max(1, self.token_budget // widest), []
        for i in range(0, len(contexts), size):
            prompts, answers = contexts[i:i + size], [[self.answer_ids(a) for a in row] for row in actions[i:i + size]]
            prompt, prompt_mask = pad_ids(prompts, self.device, "left")  # [B, P]
            ids, offset, owner = (pad(rows, self.device) for rows in zip(*(  # [B, S]: token, place in its action, which action (from 1)
                (sum(row, []), [k for c in row for k in range(len(c))], [n for n, c in enumerate(row, 1) for _ in c]) for row in answers)))
            same = (owner[:, :, None] == owner[:, None]) & (offset[:, :, None] >= offset[:, None])
            seen = torch.cat([prompt_mask[:, None].bool().expand(-1, ids.shape[1], -1), same], 2)[:, None]  # [B, 1, S, P + S]
            first, cache = self.hidden(prompt, prompt_mask, keep=True)
            bias = torch.zeros(seen.shape, dtype=first.dtype, device=self.device).masked_fill(~seen, torch.finfo(first.dtype).min)
            later, _ = self.hidden(ids, bias, cache, keep=True, positions=prompt_mask.sum(1, True) + offset)
            # What predicts a token: the one before it in the same action, or the context's last.
            before = torch.where(offset[..., None] == 0, first[:, -1:], later.roll(1, 1))
            b, s = owner.nonzero(as_tuple=True)
            logp = iter(self.log_probs(before[b, s]).gather(1, ids[b, s][:, None])[:, 0].tolist())
            out += [[[next(logp) for _ in c] for c in row] for row in answers]
        return out

ROLE = {"babyai": "You guide an agent in a grid world.  It sees objects and walls in front of it, and acts by short commands.",
        "jericho": "You play a text adventure and want the highest score in few moves."}
FORMAT = """Answer in exactly two parts:
Reasoning: <a neutral analysis of the situation: where you are, what is in reach, what is still to be done; name no choice yet>
Action: <one of the valid actions, copied exactly>"""

def encode_prompt(llm, cfg, obs, actions, history):
    """Token ids: role, history of (observation, action, reward), observation, valid actions, format; in the chat template, if any.  Over
    max_prompt_len the oldest history goes first.  The tiny LM reads the last two actions and the observation.  Source: PriorZero 3.2."""
    if cfg.model == "tiny":
        return llm.ids(f"Did: {', '.join(a for _, a, _ in history[-2:]) or 'nothing'}. {obs}")[-cfg.max_prompt_len:]
    for first in range(max(len(history) - cfg.history_len, 0), len(history) + 1):
        past = [f"Step {n}. Observation: {o}\nAction: {a}\nReward: {r:g}" for n, (o, a, r) in enumerate(history, 1)][first:]
        user = "\n".join(["=== HISTORY ===", *(past or ["(none)"]), "\n=== CURRENT OBSERVATION ===", obs, "\n=== VALID ACTIONS ===",
                          *actions, "\n=== INSTRUCTION ===", FORMAT if cfg.use_cot else FORMAT.splitlines()[-1]])
        turns = [{"role": "system", "content": ROLE[cfg.env]}, {"role": "user", "content": user}]
        text = (llm.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) if llm.tokenizer.chat_template
                else f"{ROLE[cfg.env]}\n\n{user}\n")
        if len(ids := llm.ids(text)) <= cfg.max_prompt_len:
            break
    return ids[-cfg.max_prompt_len:]

def generate_analyses(llm, prompts, cfg, generator):
    """What stands between each prompt (token ids) and the action: "Action:" alone, or with --cot an analysis, sampled at temperature 1
    up to a blank line or EOS, and cut at its first "Action:", since actions are scored, not parsed.  Source: PriorZero 3.2.
    Returns dicts: ids, which end in "Action:"; logps at rollout; written, 1 = token of the LLM; format_ok."""
    if not cfg.use_cot:
        label = llm.ids("Action:")
        return [{"ids": label, "logps": [0.0] * len(label), "written": [0] * len(label), "format_ok": True} for _ in prompts]
    (step, mask), cache, tokens, logps = pad_ids(prompts, llm.device, "left"), None, [], []
    for _ in range(cfg.max_cot_len):
        hidden, cache = llm.hidden(step, mask, cache, keep=True)
        log_probs = llm.log_probs(hidden[:, -1])
        tokens.append(step := torch.multinomial(log_probs.exp(), 1, generator=generator))
        logps.append(log_probs.gather(1, step))
        mask, rows = F.pad(mask, (0, 1), value=1), torch.cat(tokens, 1).tolist()
        if all(llm.tokenizer.eos_token_id in row or "\n\n" in llm.tokenizer.decode(row).lstrip() for row in rows):
            break
    return [cut_analysis(llm, *row) for row in zip(rows, torch.cat(logps, 1).tolist())]

def cut_analysis(llm, ids, logps):
    """The dict of generate_analyses for one row of sampled tokens."""
    ids = ids[:ids.index(llm.tokenizer.eos_token_id)] if llm.tokenizer.eos_token_id in ids else ids
    texts = [llm.tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
    end = next((n for n, text in enumerate(texts) if "\n\n" in text.lstrip()), len(ids))
    ids = ids[:next((n for n, text in enumerate(texts[:end]) if "Action:" in text), end)]
    label = [] if "Action:" in texts[len(ids)] else llm.ids("\nAction:")
    return {"ids": ids + label, "logps": logps[:len(ids)] + [0.0] * len(label),
            "written": [1] * len(ids) + [0] * len(label), "format_ok": format_ok(texts[end])}

def action_scores(model, prompts, analyses, actions):
    """s(a) = mean over the tokens of " <action><eos>" of log p(token | prompt, analysis, tokens before).  Source: PriorZero 3.2.
    Args: model, a LanguageModel; prompts, analyses: a text or token ids for each row; actions: a list of texts for each row.
    Returns: a list of tensors [A_i], natural logarithm."""
    contexts = [sum(((x if isinstance(x, list) else model.ids(x)) for x in pair), []) for pair in zip(prompts, analyses)]
    return [torch.tensor([sum(x) / len(x) for x in row]) for row in model.action_logps(contexts, actions)]

# ---- Playing ------------------------------------------------------------------------------------------------------------
class Game:
    """An episode in progress: what is seen now, and its steps so far (dicts of plain values, for replay and checkpoint)."""
    def __init__(self, agent, pool, i, task, steps=()):
        """Start `task` in environment i of the pool; with `steps` (--resume) play these again."""
        self.agent, self.task, self.steps, self.terminated = agent, task, list(steps), False
        obs, info = pool.reset([i], [task])[0]
        for step in steps:
            obs, *_, info = pool.step([i], [step["command"]])[0]
        self.look(obs, info)
    def look(self, obs, info):
        self.obs, self.actions, self.won = obs or "(nothing)", info["admissible_actions"][:self.agent.cfg.num_slots], info["won"]
        self.task_id, self.ret = info["task_id"], sum(s["reward"] for s in self.steps)
        names = self.actions if self.agent.cfg.action_slots == "text" else [f"slot {n}" for n in range(len(self.actions))]
        self.number, *self.list = self.agent.bank([self.obs, *names])
    def record(self, slot, policy, prior, result):
        """Append the step just played; returns whether the episode is over."""
        obs, reward, self.terminated, truncated, info = result
        sample = prior and {**prior, "action": self.actions[slot], "action_logps": prior["action_logps"][slot]}
        self.steps.append({"text": self.obs, "command": self.actions[slot], "reward": reward, "obs": self.number, "list": self.list,
                           "action": self.list[slot], "visits": policy[:len(self.list)], "sample": sample})
        self.look(obs, info)
        return self.terminated or truncated

def llm_priors(llm, games, cfg, generator):
    """For each game a dict: prompt, what generate_analyses gives, action_logps.  Equal prompts are computed once per LLM version."""
    past = [[(s["text"], s["command"], s["reward"]) for s in g.steps] for g in games]
    keys = [(generator.initial_seed(), tuple(encode_prompt(llm, cfg, g.obs, g.actions, p)), *g.actions) for g, p in zip(games, past)]
    if new := [key for key in dict.fromkeys(keys) if key not in llm.cache]:
        prompts = [list(key[1]) for key in new]
        analyses = generate_analyses(llm, prompts, cfg, generator)
        logps = llm.action_logps([p + a["ids"] for p, a in zip(prompts, analyses)], [key[2:] for key in new])
        llm.cache |= {key: {"prompt": p, "version": llm.version, **a, "action_logps": x}
                      for key, p, a, x in zip(new, prompts, analyses, logps)}
    return [llm.cache[key] for key in keys]

@torch.no_grad()
def decide(agent, games, num_simulations, temperature, noise, generators, llm_only=False):
    """LLM prior, fusion at the root, search (PriorZero table 2).  Returns lists, places of actions, policies, priors; and figures."""
    cfg, llm, clock = agent.cfg, agent.llm, time.perf_counter()
    recent = [g.steps[max(len(g.steps) - cfg.context + 1, 0):] for g in games]
    numbers = ([[*(s["obs"] for s in r), g.number] for r, g in zip(recent, games)], [[s["action"] for s in r] for r in recent],
               [g.list + [0] * (cfg.num_slots - len(g.list)) for g in games])
    roots = encode_roots(agent.model, agent.bank, *(pad(rows, agent.device) for rows in numbers), agent.known_actions(*numbers[2]))
    logits, priors, seconds_prior = roots.logits, [None] * len(games), 0.0
    if llm is not None:
        before, priors = time.perf_counter(), llm_priors(llm, games, cfg, generators["sampling"])
        scores = [[sum(x) / len(x) for x in p["action_logps"]] for p in priors]
        scores = pad([s + [0.0] * (cfg.num_slots - len(s)) for s in scores], agent.device, dtype=torch.float32)
        alpha = adaptive_alpha(logits.softmax(-1), roots.valid, 0.3, 0.7) if cfg.adaptive_alpha else cfg.alpha
        temperature_llm = cfg.prior_temperature or (0.25 if cfg.model == "tiny" else 1.0)
        logits = fuse_root_prior(logits, scores, roots.valid, 1.0 if llm_only else alpha, temperature_llm)
        seconds_prior = time.perf_counter() - before
    visits = policy = logits.softmax(-1)
    if cfg.mcts and not llm_only:
        visits = tree_search(agent.model, roots, logits, cfg, num_simulations, noise, generators["search"]).visit_counts
    slots = torch.multinomial(action_probs(visits, temperature), 1, generator=generators["search"])[:, 0]
    return slots.tolist(), action_probs(visits, 1.0).tolist(), priors, {
        "visit_entropy": visit_entropy(visits), "prior_entropy": visit_entropy(policy), "root_value": roots.value,
        "prior_ms": 1e3 * seconds_prior / len(games), "search_ms": 1e3 * (time.perf_counter() - clock - seconds_prior) / len(games)}

def play(agent, pool, games, *how):
    """One step in every game (a dict by environment).  Returns (environments whose episode is over, figures)."""
    *decisions, figures = decide(agent, list(games.values()), *how)
    results = pool.step(list(games), [game.actions[slot] for game, slot in zip(games.values(), decisions[0])])
    return [i for i, *step in zip(games, *decisions, results) if games[i].record(*step)], figures

def collect(agent, pool, games):
    """One step of every environment; finished games go to the replay and are returned, with figures."""
    cfg, cooled = agent.cfg, min(1.0, 2 * agent.env_steps / agent.cfg.env_steps)
    temperature = cfg.temperature + cooled * (cfg.final_temperature - cfg.temperature)
    over, figures = play(agent, pool, games, cfg.num_simulations, temperature, True, agent.generators)
    finished = [games[i] for i in over]
    for i, game in zip(over, finished):
        agent.known = sorted({*agent.known}.union(*(s["list"] for s in game.steps)))
        first = agent.replay.add(game)
        if agent.llm and not agent.cfg.freeze_llm:
            agent.samples += [s["sample"] | {"first": first, "time": t} for t, s in enumerate(game.steps)]
        games[i] = new_game(agent, pool, i)
    agent.samples = agent.samples[-agent.phase[1] * agent.cfg.llm_batch:]
    agent.env_steps += len(games)
    return finished, figures

def new_game(agent, pool, i):  # a task drawn by --seed and a counter
    task = int(np.random.default_rng((agent.cfg.seed, agent.tasks_begun)).integers(pool.num_tasks))
    agent.tasks_begun += 1
    return Game(agent, pool, i, task)

def open_eval_pool(cfg):  # a larger batch searches faster
    return EnvPool(cfg.env, max(1, min(4 * cfg.num_envs, cfg.eval_episodes)), cfg.env_workers, **cfg.env_options(True))

def evaluate(agent, pool, llm_only=False):
    """Play tasks 0 .. eval_episodes - 1 once, greedily, without noise, with random numbers of its own.  Returns means, {} if none."""
    cfg, games, played = agent.cfg, {}, []
    waiting, generators = list(range(min(cfg.eval_episodes, pool.num_tasks))), make_generators(20260512, agent.device)
    while waiting or games:
        for i in [i for i in range(4 * cfg.num_envs) if i not in games][:len(waiting)]:
            games[i] = Game(agent, pool, i, waiting.pop(0))
        over, _ = play(agent, pool, games, cfg.eval_simulations, 0.0, False, generators, llm_only)
        played += [games.pop(i) for i in over]
    figures = np.array([(g.ret, g.won, len(g.steps)) for g in played])
    return dict(zip(("return", "solved", "length"), figures.mean(0).tolist()), episodes=len(played)) if played else {}

# ---- The LLM's phase ----------------------------------------------------------------------------------------------------
def sample_advantages(agent, samples):
    """A = Q_n - v(z_t) of the target world model for samples in the replay: -> [N], game units.  Source: PriorZero 3.3."""
    cfg, replay, out = agent.cfg, agent.replay, []
    for part in torch.tensor([(s["first"], s["time"]) for s in samples], device=agent.device).split(256):
        back = part[:, 1].clamp(max=cfg.window - 1 - cfg.td_steps)  # real steps before t in the window
        w = replay.window(part.sum(1) - back, cfg.window)
        z, a = encode_texts(agent.target, agent.bank, w.obs, w.action)
        values = agent.target.decode(agent.target.value, agent.target(z, a)[0])
        q = n_step_targets(w.reward[:, :-1], values, w.terminated[:, :-1], w.truncated[:, :-1], cfg.gamma, cfg.td_steps)
        out.append((q - values[:, :-1]).gather(1, back[:, None])[:, 0])
    return torch.cat(out)

def response_logps(llm, samples):
    """Log-probabilities [B, S] of analysis and action behind each prompt, fp32, 0 on padding, from one forward pass."""
    prompts, answers = [s["prompt"] for s in samples], [s["ids"] + llm.answer_ids(s["action"]) for s in samples]
    ids, mask = pad_ids([p + a for p, a in zip(prompts, answers)], llm.device)
    b, s = (scored := pad_ids(answers, llm.device)[1]).nonzero(as_tuple=True)
    at = torch.tensor([len(p) - 1 for p in prompts], device=llm.device)[b] + s  # position t predicts token t + 1
    logp = llm.log_probs(llm.hidden(ids, mask)[0][b, at]).gather(1, ids[b, at + 1][:, None])[:, 0]
    return torch.zeros(scored.shape, device=llm.device).index_put((b, s), logp)

def backward_llm(agent, samples, advantages):
    """Backward pass in micro-batches, whose size does not matter.  Returns sums [5] over tokens: 1, loss, clipped, KL, |ratio - 1|."""
    cfg, llm, sums = agent.cfg, agent.llm, 0
    size = max(1, cfg.token_budget // max(len(s["prompt"]) + len(s["ids"]) + len(s["action_logps"]) for s in samples))
    num_tokens = sum(sum(s["written"]) + len(s["action_logps"]) for s in samples)
    for i in range(0, len(samples), size):
        part, advantage = samples[i:i + size], advantages[i:i + size]
        old_logp, cot_mask, action_mask = (pad(rows, llm.device, dtype=torch.float32) for rows in zip(*(
            (s["logps"] + a, s["written"] + [0] * len(a), [0] * len(s["ids"]) + [1] * len(a)) for s in part for a in [s["action_logps"]])))
        with torch.no_grad():
            llm.swap_start()
            ref_logp = response_logps(llm, part)
            llm.swap_start()
        logp, mask = response_logps(llm, part), cot_mask + action_mask
        if cfg.loss == "sft":  # with ratio 1 and advantage 1 the gradient is that of -log p of what was drawn
            old_logp, advantage = logp.detach(), torch.ones_like(advantage)
        weights = token_weights(cot_mask, action_mask, cfg.w_cot)
        loss = ppo_loss(logp, old_logp, ref_logp, advantage, weights, mask, cfg.clip, cfg.kl_coef, num_tokens)
        loss.backward()
        change = (((logp := logp.detach()) - old_logp) * mask).expm1()  # ratio - 1
        sums += torch.stack([mask.sum(), loss.detach() * num_tokens, (change * advantage[:, None].sign() > cfg.clip).sum(),
                             (k3_kl(logp, ref_logp) * mask).sum(), change.abs().sum()])
    return sums

def train_llm(agent):
    """One LLM phase: optimiser steps on the samples since the last phase.  Returns its figures.  Source: PriorZero 3.3."""
    cfg, llm, samples, sums, norms, order = agent.cfg, agent.llm, agent.samples, [], [], []
    raw, good = sample_advantages(agent, samples).to(llm.device), [s["format_ok"] for s in samples]
    advantages = blend_format_reward(normalize_advantages(raw), good, cfg.format_weight if cfg.use_cot else 0.0)
    total = max(1.0, cfg.env_steps * cfg.replay_ratio * agent.phase[1] / agent.phase[0])  # LLM updates of the run
    for _ in range(agent.phase[1]):
        order = order or torch.randperm(len(samples), generator=agent.generators["mini_batches"]).tolist()
        batch, order = order[:cfg.llm_batch], order[cfg.llm_batch:]
        warm, cosine = min(1.0, (llm.version + 1) / (0.03 * total + 1)), math.cos(math.pi * min(llm.version / total, 1.0))
        agent.llm_optimizer.param_groups[0]["lr"] = cfg.llm_lr * warm * (0.55 + 0.45 * cosine)  # warm-up 3 %, down to a tenth
        sums.append(backward_llm(agent, [samples[n] for n in batch], advantages[batch]))
        places = [samples[n]["first"] for n in batch]
        norms.append(optimizer_step(agent.llm_optimizer, llm.trainable().values(), 1.0, f"LLM update {llm.version}", places))
        llm.version += 1
    llm.cache, agent.samples = {}, []  # the priors of the old weights, and what they made search collect
    tokens, loss, clipped, kl, _ = torch.stack(sums).sum(0).tolist()
    return {"llm_loss": loss / tokens, "llm_clip_frac": clipped / tokens, "llm_kl": kl / tokens, "llm_grad_norm": torch.stack(norms),
            "advantage": raw, "llm_lag": llm.version - np.mean([s["version"] for s in samples]), "llm_samples": len(samples),
            "format_ok": np.mean(good), "first_ratio_deviation": sums[0][4] / sums[0][0]}

# ---- Agent, checkpoints, files ------------------------------------------------------------------------------------------
def make_generators(seed, device):  # by name: switching one feature on leaves the random numbers of the others alone
    return {name: torch.Generator(device if name in ("search", "sampling") else "cpu").manual_seed(seed + k)
            for k, name in enumerate(("search", "sampling", "replay", "mini_batches"))}

class Agent:
    """All that a run changes: networks, optimisers, replay, counters, random generators."""
    def __init__(self, cfg):
        random.seed(cfg.seed), np.random.seed(cfg.seed), torch.manual_seed(cfg.seed)
        self.cfg, self.device, self.generators = cfg, cfg.torch_device, make_generators(cfg.seed, cfg.torch_device)
        # Updates of a phase, world model and LLM, and the world model's before the first of the LLM.
        self.phase = ((cfg.wm_updates, cfg.llm_updates, cfg.wm_warmup + cfg.wm_updates) if cfg.alternate
                      else (max(1, round(cfg.wm_updates / cfg.llm_updates)), 1, 1))
        self.bank = TextBank(cfg)
        self.model = WorldModel(cfg, self.bank.features.shape[1]).to(self.device)
        self.target = copy.deepcopy(self.model).eval().requires_grad_(False)
        groups = [{"params": [p for p in self.model.parameters() if (p.dim() > 1) == matrices], "weight_decay": 1e-4 * matrices}
                  for matrices in (True, False)]
        self.optimizer = torch.optim.AdamW(groups, lr=cfg.wm_lr, betas=(0.9, 0.95), fused=True)
        self.replay, self.samples, self.known = Replay(cfg.replay_size, cfg.num_slots, self.device), [], []
        self.env_steps = self.wm_updates = self.phase_start = self.tasks_begun = 0
        half = torch.bfloat16 if cfg.lora_rank and self.device.type == "cuda" else torch.float32  # frozen weights need no fp32
        self.llm = self.llm_optimizer = None
        if cfg.alpha or cfg.llm_only:
            folder = TINY_FOLDER if cfg.model == "tiny" else cfg.model
            self.llm = LanguageModel(*load_pretrained(AutoModelForCausalLM, folder, "--model", half), cfg)
            self.llm_optimizer = torch.optim.AdamW(self.llm.trainable().values(), cfg.llm_lr, (0.9, 0.95), weight_decay=0.01, fused=True)
    def known_actions(self, *lists):
        """Text numbers of all actions in finished episodes and in these lists, sorted, behind A zeros: so there are always A."""
        known = sorted({*self.known}.union(*lists) - {0})
        return torch.tensor([0] * self.cfg.num_slots + known, device=self.device)

PARTS, COUNTERS = ("model", "target", "optimizer"), ("env_steps", "wm_updates", "phase_start", "tasks_begun", "samples", "known")
RESUMABLE = {"env_steps", "device", "run_dir", "env_workers", "eval_every", "eval_episodes", "log_every", "save_every", "baseline"}

def save_checkpoint(path, agent, games, results):
    """All that an exact continuation needs, to a temporary name that is renamed: a crash leaves the old file whole."""
    llm, replay, temporary = agent.llm, agent.replay, path.with_name(path.name + ".tmp")
    state = {name: getattr(agent, name).state_dict() for name in PARTS} | {
             "config": dataclasses.asdict(agent.cfg), "texts": list(agent.bank.index), "features": agent.bank.features, "results": results,
             "replay": (replay.data, replay.write), "counters": {name: getattr(agent, name) for name in COUNTERS},
             "llm": llm and (llm.trainable(), llm.start, agent.llm_optimizer.state_dict(), llm.version, llm.cache),
             "games": {i: (game.task, game.steps) for i, game in games.items()},
             "generators": {name: generator.get_state() for name, generator in agent.generators.items()}}
    torch.save(state, temporary)
    os.replace(temporary, path)

def load_checkpoint(path):
    """Read a checkpoint (weights_only: nothing but tensors and plain values is unpickled).  Raises InputError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        need = (*PARTS, "texts", "features", "results", "replay", "counters", "llm", "games", "generators")
        return Config(**state["config"]) and {name: state[name] for name in ("config", *need)} | {"path": Path(path)}
    except Exception as error:  # torch.load fails in many ways on a missing or damaged file; all mean the same to the user
        raise InputError(f"{path}: not a readable checkpoint of priorzero.py ({type(error).__name__}); name another one") from error

def restore(agent, state, path):
    """Put a checkpoint back into an agent.  Raises InputError where the shapes differ."""
    try:
        for name in PARTS:
            getattr(agent, name).load_state_dict(state[name])
        if agent.llm and state["llm"]:
            weights, start, optimizer, agent.llm.version, agent.llm.cache = state["llm"]
            agent.llm.model.load_state_dict(weights, strict=False)  # the trained ones; the others are as they were
            agent.llm.start = {name: start[name].to(agent.device) for name in agent.llm.trainable()}
            agent.llm_optimizer.load_state_dict(optimizer)
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(f"{path}: its weights have another shape than this model; give the sizes it was made with") from error
    agent.bank.index, agent.bank.features = {text: n for n, text in enumerate(state["texts"])}, state["features"].to(agent.device)
    data, agent.replay.write = state["replay"]
    agent.replay.data, agent.replay.starts = {name: x.to(agent.device) for name, x in data.items()}, None
    vars(agent).update(state["counters"])
    for name, generator in agent.generators.items():
        if len(saved := state["generators"][name]) == len(generator.get_state()):  # else it comes from the other kind of device
            generator.set_state(saved)

def open_run_dir(cfg, state):
    """Create the run's folder; at --resume drop log lines that the checkpoint does not know.  Raises InputError."""
    path = Path(cfg.run_dir or f"runs/priorzero-{cfg.env}-alpha{cfg.alpha:g}-seed{cfg.seed}-{time.strftime('%m%d-%H%M%S')}")
    if (path / "checkpoint.pt").exists() and not (state and state["path"].samefile(path / "checkpoint.pt")):
        raise InputError(f"--run_dir {path}: it already holds a run; add --resume to go on with it, or name another folder")
    try:
        (path / "transcripts").mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(dataclasses.asdict(cfg), indent=1))
        metrics = path / "metrics.jsonl"
        lines = metrics.read_text().splitlines(True) if state and metrics.exists() else []
        metrics.write_text("".join(x for x in lines if x[-1] == "\n" and json.loads(x)["env_steps"] <= state["counters"]["env_steps"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--run_dir {path}: cannot write there, or its metrics.jsonl is damaged ({error!r})") from error
    return path

def write_log(run_dir, agent, figures, finished, result):
    """One line on the screen and in metrics.jsonl, means since the last one, and the transcript of an episode; empties the lists."""
    row = {"env_steps": agent.env_steps, "wm_updates": agent.wm_updates, "llm_version": agent.llm.version if agent.llm else 0}
    for name in dict.fromkeys(name for new in figures for name in new):
        row[name] = float(torch.stack([torch.as_tensor(new[name], dtype=torch.float32).mean() for new in figures if name in new]).mean())
    if finished:
        games = np.array([(g.ret, g.won, len(g.steps)) for g in finished])
        row |= dict(zip(("return", "solved", "episode_len"), games.mean(0).tolist()), best_return=games[:, 0].max(), episodes=len(games))
        (run_dir / "transcripts" / f"step_{agent.env_steps:07d}.txt").write_text(transcript(finished[-1]))
    row |= {f"eval_{name}": value for name, value in result.items()}
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    tqdm.write(f"step {agent.env_steps}: " + "  ".join(f"{name} {row[name]:.3g}" for name in SHOWN if name in row))
    figures.clear(), finished.clear()

def transcript(game):  # one episode as readable text
    steps = [f"[{t}] {s['text']}\n    > {s['command']}    (reward {s['reward']:+g})\n" for t, s in enumerate(game.steps)]
    return "\n".join([f"{game.task_id}: {'solved' if game.won else 'not solved'}, return {game.ret:g}\n", *steps, f"[end] {game.obs}\n"])

# ---- The run ------------------------------------------------------------------------------------------------------------
def learn(agent):
    """The world-model updates due by --replay_ratio and, whenever a phase of them is complete, the LLM's.  Returns figures."""
    cfg, figures = agent.cfg, []
    while agent.replay.write and agent.wm_updates < cfg.replay_ratio * (agent.env_steps - cfg.warmup_steps):
        clock = time.perf_counter()
        figures.append(update_world_model(agent) | {"update_ms": 1e3 * (time.perf_counter() - clock)})
        if agent.samples and agent.wm_updates >= max(agent.phase_start + agent.phase[0], agent.phase[2]):
            agent.phase_start, clock = agent.wm_updates, time.perf_counter()
            figures.append(train_llm(agent) | {"llm_phase_s": time.perf_counter() - clock})
    return figures

def train(cfg, state=None):
    """PriorZero's loop (UniZero's at alpha 0) with evaluations; `state`: a checkpoint to continue.  Returns (results, run folder)."""
    agent, name, figures, finished, interrupted = Agent(cfg), "PriorZero" if cfg.alpha else "UniZero", [], [], []
    with (EnvPool(cfg.env, cfg.num_envs, cfg.env_workers, **cfg.env_options(False)) as pool,
          open_eval_pool(cfg) as eval_pool):
        run_dir = open_run_dir(cfg, state)
        if state:
            restore(agent, state, run_dir)
            results, games = state["results"], {i: Game(agent, pool, i, *game) for i, game in state["games"].items()}
        else:
            results, games = {f"{name} before": evaluate(agent, eval_pool)}, {i: new_game(agent, pool, i) for i in range(cfg.num_envs)}
            results |= {"LLM alone before": evaluate(agent, eval_pool, llm_only=True)} if agent.llm else {}
        sizes = " + ".join(f"{sum(p.numel() for p in m.parameters()):,}" for m in (agent.model, agent.llm and agent.llm.model) if m)
        print(f"priorzero.py: {name}, {cfg.env}, alpha {cfg.alpha:g}, seed {cfg.seed}, {agent.device}; {sizes} parameters; {run_dir}/")
        bar = tqdm(total=cfg.env_steps, initial=agent.env_steps, desc="env steps", unit="step", mininterval=1.0)
        # Ctrl-C ends the run after the step in progress; a second Ctrl-C ends it at once.
        signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.default_int_handler)))
        while agent.env_steps < cfg.env_steps:
            before, (over, new) = agent.env_steps, collect(agent, pool, games)
            finished += over
            figures += [new, *learn(agent)]
            bar.update(cfg.num_envs)
            last = agent.env_steps >= cfg.env_steps
            evaluated, logged, saved = (n and agent.env_steps // n > before // n for n in (cfg.eval_every, cfg.log_every, cfg.save_every))
            result = evaluate(agent, eval_pool) if evaluated and not last else {}
            if logged or result or saved or last or interrupted:
                write_log(run_dir, agent, figures, finished, result)
            if saved or last or interrupted:
                save_checkpoint(run_dir / "checkpoint.pt", agent, games, results)
            if interrupted:
                raise KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)
        results |= {f"{name} after": evaluate(agent, eval_pool)}
        results |= {"LLM alone after": evaluate(agent, eval_pool, llm_only=True)} if agent.llm else {}
    (run_dir / "result.json").write_text(json.dumps(results))
    return results, run_dir

def table(results):  # one row for each agent
    rows = [f"{n:17s}{r['return']:9.3f}{100 * r['solved']:9.1f}%{r['length']:9.1f}{r['episodes']:10d}" for n, r in results.items() if r]
    return "\n".join(["                    return    solved   length  episodes", *rows])

def parse_arguments(argv):
    """(explicit settings, mode arguments): a flag per Config field, and the flags that choose what to do."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.error = lambda message: (_ for _ in ()).throw(InputError(message))
    for f in dataclasses.fields(Config):
        kind = {"action": argparse.BooleanOptionalAction} if isinstance(f.default, bool) else {"type": type(f.default)}
        parser.add_argument(f"--{f.name}", help=f"{f.metadata['help']} [{f.default}]".replace("%", "%%"), **kind)
    parser.add_argument("--resume", nargs="?", const="", help="continue a run: its checkpoint, or none for the one in --run_dir")
    parser.add_argument("--eval", metavar="CKPT", help="evaluate a checkpoint instead of training")
    parser.add_argument("--plot", nargs="+", metavar="RUN", help="draw the curves of run folders to curves.png instead of training")
    arguments = vars(parser.parse_args(argv))
    return arguments, {k: arguments.pop(k) for k in ("resume", "eval", "plot") if k in arguments}

def main(argv=None):
    """Run what the command line asks for."""
    explicit, modes = parse_arguments(argv)
    cfg, state = Config(**PRESETS.get(explicit.get("env"), {}) | explicit), None
    if "plot" in modes:
        return importlib.import_module("benchmarks.plot").plot(modes["plot"], "curves.png", SHOWN, "env_steps")
    if "eval" in modes or "resume" in modes:
        path = Path(modes.get("eval") or modes.get("resume") or Path(cfg.run_dir) / "checkpoint.pt")
        state = load_checkpoint(path)
        cfg = Config(**state["config"] | {"run_dir": str(path.parent)} | explicit)  # a checkpoint's settings, and the flags given
    cfg.validate()
    if cfg.llm_only and "eval" not in modes:
        raise InputError("--llm_only: is for --eval CKPT (a run's table has the LLM alone, too)")
    for name, value in explicit.items() if state else ():
        if value != state["config"][name] and (name in ("env", "action_slots") if "eval" in modes else name not in RESUMABLE):
            raise InputError(f"--{name} {value}: the checkpoint was made with {state['config'][name]}; leave the flag out")
    if "eval" in modes:
        restore(agent := Agent(cfg), state, path)
        with open_eval_pool(cfg) as pool:
            return print(table({"LLM alone" if cfg.llm_only else "evaluation": evaluate(agent, pool, cfg.llm_only)}))
    results, run_dir = train(cfg, state)
    if cfg.baseline and cfg.alpha:
        path = run_dir / "unizero" / "checkpoint.pt"
        state = load_checkpoint(path) if state and path.exists() else None
        results |= train(dataclasses.replace(cfg, alpha=0.0, run_dir=str(path.parent)), state)[0]
    print(f"\n{cfg.env_steps} environment steps; evaluation on {cfg.env == 'babyai' and 'unseen seeds' or cfg.game}:\n{table(results)}")


if __name__ == "__main__":
    try:
        main()
    except (InputError, FloatingPointError) as error:
        sys.exit(print(f"priorzero.py: {error}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(130)
