"""Make the tiny LM that priorzero.py ships as its prior for BabyAI.

    python -m tiny_lm.babyai.make        # two minutes on one core

Not part of the PriorZero method: it stands in for the pretraining of a real LLM on a machine that cannot hold one.  It imitates
the scripted expert on LEVELS, which are NOT the levels that the README evaluates (PickupLoc, GoToObjDoor, ActionObjDoor), and on
training seeds, which are never evaluated.  "behind you" and "on your left" it has seen in the mazes of SynthLoc only.
  - Words are tokens; numbers, too.
  - Half of the rows swap the colours at random, so that the goal's colour has to be looked up, not memorised.
  - Copying is made easy at the start: value and output projections are an orthogonal pair and the LM head is the embedding (after
    "mimetic initialization", Trockman & Kolter 2023, arXiv 2305.09828).
"""

import random
import re

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from envs import make_env
from priorzero import TINY_FOLDER, Config, LanguageModel, encode_prompt, pad

LEVELS = ("GoToRedBallGrey", "GoToRedBall", "GoToObjS6", "GoToLocalS8N7", "GoToRedBlueBall", "GoToDoor", "PickupDistDebug", "PickupAbove",
          "SynthLoc")
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
FIRST_TASK = 50_000  # training tasks from here on


def collect(episodes, noise, rng):
    """Expert steps (observation, history, expert's action); with probability `noise` another action is played, to see mistakes."""
    steps = []
    for level in tqdm(LEVELS, desc="expert levels"):
        env = make_env("babyai", level=level, split="train", max_steps=20)
        for task in range(FIRST_TASK, FIRST_TASK + episodes):
            (obs, info), history, over = env.reset(options={"task": task}), [], False
            while not over and (action := env.expert_action()) is not None:
                played = rng.choice(info["admissible_actions"]) if rng.random() < noise else action
                steps.append((obs, history[-2:], action))
                history.append((obs, played, 0.0))
                obs, _, terminated, truncated, info = env.step(played)
                over = terminated or truncated
        env.close()
    return steps


def build_tokenizer(texts):
    """Words and signs as tokens, of these texts and a few more that other levels use."""
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)} | {str(n) for n in range(21)})
    vocabulary = {word: n for n, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, pre_tokenizers.Punctuation("isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def build_model(vocab_size, width, layers, heads):
    """A small Llama whose attention copies from the start: head = embedding, value and output projections transposed."""
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=width ** -0.5,
        pad_token_id=0, eos_token_id=1, bos_token_id=None))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        for layer in model.model.layers:
            orthogonal = torch.linalg.qr(torch.randn(width, width))[0]
            layer.self_attn.v_proj.weight.copy_(orthogonal)
            layer.self_attn.o_proj.weight.copy_(orthogonal.T)
            layer.self_attn.k_proj.weight.copy_(layer.self_attn.q_proj.weight)
    return model


def recoloring(tokenizer, rng):
    """A table [V] that permutes the colours."""
    table, ids = torch.arange(len(tokenizer)), tokenizer.convert_tokens_to_ids(list(COLORS))
    table[ids] = torch.tensor(rng.sample(ids, len(ids)))
    return table


def train(llm, examples, steps, lr, rng, batch_size=32, prompt_weight=0.1):
    """AdamW on the next-token loss of (prompt, answer) rows; the prompt's tokens weigh `prompt_weight`."""
    tables = [recoloring(llm.tokenizer, rng) for _ in range(200)]
    optimizer = torch.optim.AdamW(llm.model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 100, 1.0) * max(0.02, min(1.0, 2 * (1 - s / steps))))
    for _ in (bar := tqdm(range(steps), desc="imitation")):
        rows = rng.sample(examples, batch_size)
        ids = pad([p + a for p, a in rows], "cpu")
        weights = pad([[prompt_weight] * len(p) + [1.0] * len(a) for p, a in rows], "cpu", dtype=torch.float32)
        swapped = torch.stack([rng.choice(tables)[row] if rng.random() < 0.5 else row for row in ids])
        logits = llm.model(input_ids=swapped[:, :-1]).logits  # right padding: causal attention never sees it
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), swapped[:, 1:].flatten(), reduction="none")
        loss = (loss * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llm.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)


def main(cfg, episodes=250, steps=1000, noise=0.2, width=64, layers=2, heads=4):
    """Collect expert steps, build the tokenizer, imitate, and write the LM to tiny_lm/babyai/."""
    rng = random.Random(cfg.seed)
    torch.manual_seed(cfg.seed)
    demos = collect(episodes, noise, rng)
    tokenizer = build_tokenizer([f"{obs} {action} Did: nothing, Action: drop front behind left right you on your the in of open toggle "
                                 "go through pick up put next to then and after" for obs, _, action in demos])
    llm = LanguageModel(tokenizer, build_model(len(tokenizer), width, layers, heads), cfg)
    label = llm.ids("Action:")
    examples = [(encode_prompt(llm, cfg, obs, [], history) + label, llm.answer_ids(action)) for obs, history, action in demos]
    print(f"{len(demos)} expert steps, {len(tokenizer)} tokens, {sum(p.numel() for p in llm.model.parameters()):,} parameters")
    train(llm, examples, steps, 3e-3, rng)
    tokenizer.save_pretrained(TINY_FOLDER)
    llm.model.save_pretrained(TINY_FOLDER)
    print(f"wrote {TINY_FOLDER}; see how it plays: python priorzero.py --env_steps 0 --no-baseline")


if __name__ == "__main__":
    main(Config())
