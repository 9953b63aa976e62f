"""Make the tiny LM that paw.py ships: its tokenizer and its supervised stage (`python paw.py --warm_start`).

Not part of the PaW method: this replaces the pretraining of a real LLM on a machine that cannot hold one.  The model must
(1) write the response format, (2) COPY actions out of the admissible list of a house it has never seen, and (3) be a
mediocre agent.  Copying is an induction head, which appears late; what makes it appear here:
  - entities such as "cabinet 2" are single tokens, and an action starts with the same token in the list and in the response;
  - half of each batch is copy practice: entity names are swapped at random over the whole vocabulary, and ALL actions of the
    list are copied, in random order, so that one row gives some 40 copied tokens instead of 4;
  - an entity's embedding starts near its type's, so that "cabinet 2" in the list matches "cabinet" in the task;
  - the value and output projections start as an orthogonal pair and the LM head as the embedding (after "mimetic
    initialization", Trockman & Kolter 2023, arXiv 2305.09828): attending to a token then raises that token's logit;
  - expert rows swap the numbers of each type, so that no name of a house is worth memorising.
"""

import random
import re
from collections import Counter

import torch
from tokenizers import Tokenizer, decoders, models
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from envs import make_env
from paw import (INVALID_ACTION, TINY_FOLDER, build_prompt, format_response, generate, make_policy, parse_response,
                 save_model)

MAX_NUMBER = {"cabinet": 30, "drawer": 30, "shelf": 20}  # entities of a type that get a token of their own; others: 8
ENTITY = re.compile(r"\b([a-z]+) (\d+)\b")
FORMAT_PIECES = ["<think></think><action>", "\n</action>", INVALID_ACTION, "Task: ", "\nStep: ", "\nObs: ", "\nAct:", "\nActions:", "\nAnswer:\n"]


def collect(split, num_games, noise, detour, max_steps):
    """Expert transitions in the first `num_games` small houses of a split: list of dicts goal, obs, admissible, history, action, next_obs.

    Not always is the expert's action played.  It knows where everything is: without detours the model would learn that what
    it looks for is wherever it goes.  So, with probability `detour`, a walk leads to some other place, or an invalid action is
    played (one time in four): after one, it is time to walk on.  Else, with probability `noise`, any other action is played.
    """
    env, rng, transitions = make_env("alfworld", houses="small", split=split, max_steps=max_steps), random.Random(0), []
    for task in tqdm(range(num_games), desc="expert games"):
        obs, info = env.reset(options={"task": task})
        history, over = [], False
        while not over:
            action = env.expert_action()
            if action is None:
                break
            played, walks = action, [a for a in info["admissible_actions"] if a.startswith("go to")]
            if action in walks and rng.random() < detour:
                played = INVALID_ACTION if rng.random() < 0.25 else rng.choice(walks)
            elif rng.random() < noise:
                played = rng.choice(info["admissible_actions"])
            next_obs, _, terminated, truncated, next_info = env.step(played)
            transitions.append(dict(goal=info["goal"], obs=obs, admissible=info["admissible_actions"], history=history[-2:],
                                    step=len(history), action=action, next_obs=next_obs if played == action else ""))
            history = history + [(obs, played)]
            obs, info, over = next_obs, next_info, terminated or truncated
    env.close()
    return transitions


def prompt_of(t):
    """The compact prompt of a collected transition (its history keeps only the pairs that the prompt shows)."""
    padded = [None] * (t["step"] - len(t["history"])) + t["history"]
    return build_prompt("compact", t["goal"], t["obs"], t["admissible"], padded, len(t["history"]))


def entity_names(kind):
    """The entities of a type that have a token of their own."""
    return [f"{kind} {n}" for n in range(1, MAX_NUMBER.get(kind, 8) + 1)]


def build_tokenizer(texts, types, num_phrases=300):
    """A Unigram tokenizer that cuts a text into the fewest pieces: entities, the engine's phrases, type names, characters.

    Phrases are what stands between two entity or type names in `texts`, the most frequent ones; a line break starts a phrase.
    Any text can be encoded (character by character) and decodes to itself.
    """
    names = re.compile(r"\b(?:" + "|".join(sorted(types, key=len, reverse=True)) + r")(?: \d+)?\b")
    phrases = Counter(p for text in texts for between in names.split(text) for p in re.split(r"(?=\n)", between) if len(p) > 1)
    entities = [name for t in sorted(types) for name in entity_names(t)]
    pieces = FORMAT_PIECES + entities + sorted(types) + [str(n) for n in range(100)]
    pieces += [p for p, _ in sorted(phrases.items(), key=lambda x: (-x[1], x[0]))[:num_phrases]]
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocabulary = {"<pad>": -100.0, "</s>": -100.0, "<unk>": -100.0} | {c: -10.0 for c in characters} | {p: -1.0 for p in pieces}
    tokenizer = Tokenizer(models.Unigram(list(vocabulary.items()), unk_id=2))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
                                   clean_up_tokenization_spaces=False)


def build_model(tokenizer, types, width, layers, heads):
    """A small Llama whose attention copies from the start: head = embedding, value and output projections transposed."""
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=2048,
                         tie_word_embeddings=False, initializer_range=width ** -0.5, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model = LlamaForCausalLM(config)
    embeddings = model.model.embed_tokens.weight  # [V, width]
    with torch.no_grad():
        for kind in types:
            ids, kind_id = tokenizer.convert_tokens_to_ids(entity_names(kind)), tokenizer.convert_tokens_to_ids(kind)
            embeddings[ids] = (embeddings[ids] + embeddings[kind_id]) / 2 ** 0.5
        model.lm_head.weight.copy_(embeddings)
        for layer in model.model.layers:
            orthogonal = torch.linalg.qr(torch.randn(width, width))[0]
            layer.self_attn.v_proj.weight.copy_(orthogonal)
            layer.self_attn.o_proj.weight.copy_(orthogonal.T)
            layer.self_attn.k_proj.weight.copy_(layer.self_attn.q_proj.weight)
    return model


def relabelling(tokenizer, types, rng, across_types):
    """A random permutation of the entity tokens, as a table [V]: within each type, or over all types at once."""
    table = torch.arange(len(tokenizer))
    groups = [entity_names(t) for t in sorted(types)]
    for names in [sum(groups, [])] if across_types else groups:
        ids = tokenizer.convert_tokens_to_ids(names)
        table[ids] = torch.tensor(rng.sample(ids, len(ids)))
    return table


def encode(tokenizer, transitions):
    """Token ids of each transition: (prompt, expert response, next observation, responses of all admissible actions)."""
    ids = lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"]
    prompts, nexts = ids([prompt_of(t) for t in transitions]), ids([t["next_obs"] for t in transitions])
    experts = ids([format_response(t["action"]) for t in transitions])
    response = {a: r for actions in [sorted({a for t in transitions for a in t["admissible"]})]
                for a, r in zip(actions, ids([format_response(a) for a in actions]))}
    return [(p, e, o, [response[a] for a in t["admissible"]]) for p, e, o, t in zip(prompts, experts, nexts, transitions)]


def make_batch(examples, practice, tables, natural_share, rng, prompt_weight):
    """Rows and per-token loss weights [B, T]: expert rows [prompt, response, next observation], practice rows copy the list."""
    rows, weights = [], []
    for (prompt, expert, next_obs, copies), is_practice in zip(examples, practice):
        if is_practice:
            target = [i for c in rng.sample(copies, len(copies)) for i in c]
            row, weight = prompt + target, [prompt_weight] * len(prompt) + [1.0] * len(target)
        else:
            row = prompt + expert + next_obs
            weight = [prompt_weight] * len(prompt) + [1.0] * len(expert) + [prompt_weight] * len(next_obs)
        natural = not is_practice and rng.random() < natural_share
        rows.append(torch.tensor(row) if natural else rng.choice(tables[is_practice])[torch.tensor(row)])
        weights.append(torch.tensor(weight))
    return (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            torch.nn.utils.rnn.pad_sequence(weights, batch_first=True))


def hesitant(transitions, share, rng):
    """The same transitions, but with probability `share` the label is to examine what is in front (or to look): a wasted step."""
    def idle(t):
        action = next((a for a in t["admissible"] if a.startswith("examine")), "look")
        return {**t, "action": action, "next_obs": ""}  # what it would show was not recorded
    return [idle(t) if rng.random() < share else t for t in transitions]


def train(model, tokenizer, types, data, steps, lr, practice, natural, on_progress, batch_size=32, prompt_weight=0.1):
    """AdamW on the weighted next-token loss; calls on_progress(step) every 500 steps.

    `practice` and `natural` are (at the start, at the end) of the stage: the share of copy-practice rows, and the share of
    expert rows with their own numbers.  First copying has to be worth learning, then the numbers that houses really use.
    """
    rng = random.Random(1)
    tables = {across: [relabelling(tokenizer, types, rng, across) for _ in range(2000)] for across in (False, True)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 200, 1.0) * max(0.02, min(1.0, 3 * (1 - s / steps))))
    bar = tqdm(range(steps), desc="supervised stage")
    for step in bar:
        examples = sorted(rng.sample(data, batch_size), key=lambda e: len(e[0]))
        practice_share, natural_share = (a + (b - a) * step / steps for a, b in (practice, natural))
        is_practice = [rng.random() < practice_share for _ in examples]
        ids, weights = make_batch(examples, is_practice, tables, natural_share, rng, prompt_weight)
        logits = model(input_ids=ids[:, :-1]).logits  # right padding: causal attention never sees it
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (loss * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            bar.set_postfix(loss=f"{loss.item():.3f}")
        if step % 500 == 499:
            on_progress(step + 1)


@torch.no_grad()
def valid_share(policy, cfg, transitions):
    """Share of admissible responses when sampling freely at temperature 1, and of those that equal the expert's."""
    prompts = [policy.tokenizer(prompt_of(t), add_special_tokens=False)["input_ids"] for t in transitions]
    responses = generate(policy, prompts, cfg.max_response_len, 1.0, torch.Generator().manual_seed(0))
    actions = [parse_response(policy.tokenizer.decode(r.ids), t["admissible"]) for r, t in zip(responses, transitions)]
    valid = sum(a is not None for a in actions) / len(actions)
    return valid, sum(a == t["action"] for a, t in zip(actions, transitions)) / len(actions)


def main(cfg, games=2400, width=128, layers=2, heads=4, hesitation=0.5):
    """Collect expert games, build the tokenizer, train in three stages (copy, act, hesitate), and write tiny_lm/."""
    torch.manual_seed(cfg.seed)
    transitions, held_out = collect("train", games, 0.2, 0.5, 20), collect("valid_unseen", 60, 0.2, 0.5, 20)
    types = sorted({m.group(1) for t in transitions + held_out for text in [t["obs"], *t["admissible"]] for m in ENTITY.finditer(text)})
    tokenizer = build_tokenizer([prompt_of(t) + "\n" + t["next_obs"] for t in transitions[::10]], types)
    policy = make_policy(build_model(tokenizer, types, width, layers, heads), tokenizer, cfg)

    def report(step):
        valid, expert = valid_share(policy, cfg, held_out)
        tqdm.write(f"step {step}: unseen houses, temperature 1: valid actions {valid:.3f}, equal to the expert's {expert:.3f}")

    data = encode(tokenizer, transitions)
    train(policy.model, tokenizer, types, data, 3000, 3e-3, (0.75, 0.15), (0.0, 1.0), report)
    train(policy.model, tokenizer, types, data, 1500, 2e-3, (0.1, 0.05), (1.0, 1.0), report)
    # This agent is too good for RL to have much to do (README).  It is now taught to waste steps.
    spoilt = hesitant(transitions[:7000], hesitation, random.Random(2))
    train(policy.model, tokenizer, types, encode(tokenizer, spoilt), 500, 1e-3, (0.15, 0.15), (1.0, 1.0), report)
    save_model(policy, TINY_FOLDER, cfg)
    print(f"wrote {TINY_FOLDER}; see how it plays: python paw.py --env alfworld --updates 0")
