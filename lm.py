"""The language model behind priorzero.py: load any Hugging Face causal LM or a GGUF file, LoRA, hidden states and log-probabilities.

Nothing here is particular to PriorZero.  Letters: B rows, T tokens, D width, V vocabulary.  Masks: 1 = keep.
"""

from pathlib import Path

import torch
import torch.nn as nn
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from envs import InputError

disable_progress_bar()


def pad(rows, device, side="right", dtype=torch.long):
    """Lists of numbers -> [B, longest], padded with 0 on one side."""
    return pad_sequence([torch.tensor(r, dtype=dtype) for r in rows], batch_first=True, padding_side=side).to(device)


def pad_ids(rows, device, side="right"):
    """Token ids [B, T] and their mask, which comes from lengths, never from ids."""
    return pad(rows, device, side), pad([[1] * len(r) for r in rows], device, side)


def load_pretrained(kind, model, flag_name, dtype=torch.float32):
    """(tokenizer, model) by name, folder or GGUF file.  Raises InputError with one line where that is not possible."""
    path = Path(model)
    if not path.exists() and (path.suffix == ".gguf" or str(model)[:1] in "./~" or len(path.parts) > 2):  # no hub name
        raise InputError(f"{flag_name} {model}: there is no such file or folder")
    name, kwargs = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (str(path), {})
    try:
        return AutoTokenizer.from_pretrained(name, **kwargs), kind.from_pretrained(name, dtype=dtype, **kwargs)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise InputError(f"{flag_name} {model}: transformers cannot load it ({str(error).strip().splitlines()[0]})") from error


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
        self.model, self.tokenizer, self.device = model.eval().to(cfg.torch_device), tokenizer, cfg.torch_device
        self.token_budget, self.version, self.cache = cfg.token_budget, 0, {}
        self.start = {name: p.detach().clone() for name, p in self.trainable().items()}

    def trainable(self):
        """{name: parameter} of what is trained."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def swap_start(self):
        """Exchange the trained weights with their frozen start, in place."""
        for name, p in self.trainable().items():
            p.data, self.start[name] = self.start[name], p.data

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def answer_ids(self, action):
        """The tokens of " <action><eos>": tokenised alone, so that the same tokens are scored, stored and trained."""
        return self.ids(f" {action}") + [self.tokenizer.eos_token_id]

    def hidden(self, ids, mask, cache=None, keep=False, positions=None):
        """Last hidden states [B, T, D], and the cache, which is new if `keep` and none is given.  Positions do not count padding: mask
        [0,0,1,1,1] -> [0,0,0,1,2]."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1]:] if positions is None else positions
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            out = self.model.base_model(input_ids=ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=keep)
        return out.last_hidden_state, out.cache

    def log_probs(self, hidden):
        """fp32 log-probabilities of the next token: [..., D] -> [..., V]."""
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
