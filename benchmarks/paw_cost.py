"""What PaW costs over GRPO: time, peak memory and tokens of an update, on identical rollouts and identical kept transitions.

    arm    what an update computes
    none   GRPO: one forward and backward pass over [h_t, a_t]
    cmae   PaW as paw.py does it: one pass over [h_t, a_t, o_{t+1}] serves both losses
    naive  the same two losses from a pass each: [h_t, a_t], and again [h_t, a_t, o_{t+1}] of the selected transitions

Every repetition starts from the same weights, a new optimiser and the same order of transitions; the arms alternate.  Kept are
the transitions that GRPO has a gradient for (advantage not 0): without a KL term it skips the others.  Two measurements, each
with its half of benchmarks/results/paw_cost.json and paw_cost.md:

    python benchmarks/paw_cost.py        # the tiny LM in small houses (10 min); goal: time added <= tokens added + 1 %
    python benchmarks/paw_cost.py --big  # Qwen2.5-0.5B's shape, random weights (15 min, 20 GB); goal: time added <= 3 %

Peak memory is read on Linux or from CUDA; CPU seconds mean nothing on a GPU, wall seconds do.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import multiprocessing
import platform
import shlex
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
import paw  # noqa: E402
from benchmarks.paw_curves import cpu_model  # noqa: E402
from envs import EnvPool, InputError  # noqa: E402

ARMS = ("none", "cmae", "naive")
OBS_NOTE = ("Observation: 40 tokens assumed; Qwen's tokenizer gives 20 to 25 on average (up to 206, a look around) for what follows an "
            "action in 6 of our full houses.")
QWEN_SHAPE = dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
                  vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=4096)
ONE_PASS = paw.response_logps
CPU_ATTENTION = {  # torch counts attention on GPUs only; as there, causal attention counts in full
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)}


# ---- The arms ------------------------------------------------------------------------------------------------------------

def two_passes(model, batch, rho=None):
    """paw.response_logps with a forward pass of its own for the observations: same numbers, more work."""
    lens = batch.prompt_len + batch.response_len
    bare = (torch.arange(int(lens.max()), device=lens.device) < lens[:, None]).long()  # [B, P + S], 1 = prompt or response
    action, obs = ONE_PASS(model, batch._replace(ids=batch.ids[:, :bare.shape[1]] * bare, attention_mask=bare,
                                                 obs_mask=batch.obs_mask[:, :0]))
    rows = batch.obs_mask.any(1).nonzero()[:, 0]
    if not len(rows):
        return action, torch.zeros_like(batch.obs_mask, dtype=action.dtype)
    part = paw.Batch(*(x[rows] for x in batch[:7]))._replace(action_mask=batch.action_mask[rows, :0])
    return action, torch.zeros_like(batch.obs_mask, dtype=action.dtype).index_copy(0, rows, ONE_PASS(model, part, rho)[1])


def run_update(arm, policy, start, transitions, episodes, cfg, optimizer_class):
    """One update of an arm from the weights `start`; returns its metrics and its CPU and wall seconds."""
    cfg = dataclasses.replace(cfg, wm="none" if arm == "none" else "cmae")
    paw.load_weights(policy, start, "start")
    reference = paw.Reference(policy.model) if cfg.kl_coef else None
    optimizer = optimizer_class(paw.trainable(policy.model).values(), lr=cfg.lr)
    paw.response_logps = two_passes if arm == "naive" else ONE_PASS
    cpu, wall = time.process_time(), time.perf_counter()
    metrics = paw.update_policy(policy, reference, optimizer, transitions, episodes, cfg, torch.Generator().manual_seed(1))
    if policy.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    paw.response_logps = ONE_PASS
    return metrics, seconds


def resident(key):
    """VmRSS (now) or VmHWM (peak) of this process in MB, as Linux counts it."""
    return next(int(line.split()[1]) / 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


def peak_memory(pipe, arm, transitions, episodes, cfg):
    """In a fresh process: send the memory in MB, {"before": the update, "peak": during it}; None where it cannot be read."""
    torch.set_num_threads(1)
    policy = paw.load_policy(cfg)
    start = {name: p.detach().clone() for name, p in paw.trainable(policy.model).items()}
    if policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2 ** 20
        run_update(arm, policy, start, transitions, episodes, cfg, torch.optim.AdamW)
        return pipe.send({"before": before, "peak": torch.cuda.max_memory_allocated() / 2 ** 20})
    if not Path("/proc/self/clear_refs").exists():
        return pipe.send(None)
    # Not getrusage: its ru_maxrss starts from the parent's peak.
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    run_update(arm, policy, start, transitions, episodes, cfg, torch.optim.AdamW)
    pipe.send({"before": before, "peak": resident("VmHWM")})


def in_fresh_process(function, *arguments):
    """What function(pipe, *arguments) sends, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments))
    process.start()
    there.close()
    answer = here.recv()
    process.join()
    return answer


def compare(policy, transitions, episodes, cfg, optimizer_class, repeats, naive_repeats, warm_up):
    """Updates of all arms on the same transitions: {arm: {"cpu": [seconds], "wall": [seconds], "train_tokens": ..., "gflop": ...}}.

    The first round counts floating-point operations, which takes time of its own; with warm_up it is not timed.
    """
    start = {name: p.detach().clone() for name, p in paw.trainable(policy.model).items()}
    out = {arm: {"cpu": [], "wall": []} for arm in ARMS}
    rounds = [(r, arm) for r in range(-warm_up, repeats) for arm in (ARMS if r < naive_repeats else ARMS[:2])[::-1 if r % 2 else 1]]
    for r, arm in tqdm(rounds, desc=f"updates, kl_coef {cfg.kl_coef}"):
        counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
        with counter if r == -warm_up else contextlib.nullcontext():
            metrics, seconds = run_update(arm, policy, start, transitions, episodes, cfg, optimizer_class)
        if r == -warm_up:
            out[arm].update({k: metrics[k] for k in ("train_tokens", "wm_selected", "lambda", "grad_norm")}, gflop=counter.get_total_flops() / 1e9)
        if r >= 0:
            for clock in seconds:
                out[arm][clock].append(round(seconds[clock], 4))
    paw.load_weights(policy, start, "start")
    if not np.isclose(out["cmae"]["grad_norm"], out["naive"]["grad_norm"], rtol=1e-3):
        raise RuntimeError(f"cmae and naive must have the same gradient: norms {out['cmae']['grad_norm']}, {out['naive']['grad_norm']}")
    return out


# ---- What is measured ----------------------------------------------------------------------------------------------------

def kept_transitions(transitions, episodes, cfg):
    """The transitions with an advantage, and their groups' episodes, numbered anew."""
    advantages = paw.compute_advantages(transitions, episodes, cfg)
    kept = [t for t, a in zip(transitions, advantages) if a != 0]
    groups = {g: n for n, g in enumerate(sorted({t.group for t in kept}))}
    rows = {i: n for n, i in enumerate(i for i, e in enumerate(episodes) if e.group in groups)}
    return ([dataclasses.replace(t, episode=rows[t.episode], group=groups[t.group]) for t in kept],
            [dataclasses.replace(episodes[i], group=groups[episodes[i].group]) for i in rows])


def measure_tiny(args):
    """The tiny LM on one rollout of paw.py's default run, with and without the KL term."""
    cfg = paw.Config(**{"groups": args.groups} if args.groups else {}, device=args.device)
    policy = paw.load_policy(cfg)
    with EnvPool(cfg.env, cfg.groups * cfg.group_size, **cfg.env_options("train")) as pool:
        generators = paw.seed_everything(cfg.seed, policy.device)
        transitions, episodes = paw.rollout(policy, pool, paw.draw_tasks(0, cfg, pool.num_tasks), cfg.group_size, cfg,
                                            cfg.temperature, generators["sampling"], defaultdict(float))
    kept, kept_episodes = kept_transitions(transitions, episodes, cfg)
    if not kept:
        raise InputError("no group of the rollout has episodes of different returns, so GRPO has nothing to learn: try more --groups")
    lens = {"prompt": np.mean([len(t.prompt_ids) for t in kept]), "response": np.mean([len(t.response.ids) for t in kept]),
            "observation": np.mean([len(t.obs_ids) for t in kept])}
    clock = "cpu" if policy.device.type == "cpu" else "wall"
    result = {"title": "The tiny LM, one rollout in small houses", "transitions": len(transitions), "kept": len(kept),
              "mean_lens": {k: round(float(v), 1) for k, v in lens.items()}, "kl": {}, "verdict": []}
    for kl_coef in (0.01, 0.0):
        kl_cfg = dataclasses.replace(cfg, kl_coef=kl_coef)
        memory = {arm: in_fresh_process(peak_memory, arm, kept, kept_episodes, kl_cfg) for arm in ARMS}
        arms = compare(policy, kept, kept_episodes, kl_cfg, torch.optim.AdamW, args.repeats or 7, 3, warm_up=1)
        result["kl"][str(kl_coef)] = {arm: arms[arm] | {"memory": memory[arm]} for arm in ARMS}
        share = more(arms["cmae"], arms["none"], "train_tokens")
        limit = share + 1
        time_added, flops_added = added(arms["cmae"], arms["none"], clock)[0], more(arms["cmae"], arms["none"], "gflop")
        result["verdict"].append(
            f"- kl_coef {kl_coef}: PaW adds {time_added:+.2f} % {clock} time and {flops_added:+.2f} % floating-point operations for {share:+.2f} % "
            f"tokens (goal: at most {limit:.2f} %): {'met' if time_added <= limit else 'MISSED'}. Two passes would add "
            f"{added(arms['naive'], arms['none'], clock)[0]:+.1f} %.")
    head = 100 * sum(len(t.response.ids) for t in kept) / sum(len(t.prompt_ids) + len(t.response.ids) for t in kept)
    result["verdict"].append(f"- GRPO applies the LM head to {head:.0f} % of its tokens, the responses; PaW to every token that it adds, which therefore "
                             "costs more than an average one. The reference pass of the KL term has no observations: with it the share is smaller.")
    return result


def measure_big(args):
    """A model of Qwen2.5-0.5B's shape on one transition of the paper's lengths, whose observation is selected."""
    torch.manual_seed(1)
    # Without KL, whose reference pass is the same in both arms and would make the share look smaller.
    cfg = paw.Config(alpha=1.0, kl_coef=0.0, device=args.device)
    config = transformers.Qwen2Config(**QWEN_SHAPE | {"num_hidden_layers": args.layers})
    with cfg.torch_device:
        policy = paw.Policy(transformers.Qwen2ForCausalLM(config), None, cfg.torch_device)
    policy.model.eval()
    draw = lambda n: torch.randint(config.vocab_size, (n,)).tolist()
    prompt, response, obs = args.prompt_len, args.response_len, args.obs_len
    logps = [-float(np.log(config.vocab_size))] * response  # about what random weights give
    # Two episodes, for an advantage; only the first one's step is computed, so that a repetition is a single sample.
    transition = paw.Transition(draw(prompt), paw.Response(draw(response), logps, logps, None, False), draw(obs), "", 0.0, True, 0, 0, 0)
    episodes = [paw.Episode(0, "", "", ret=ret) for ret in (0.0, 10.0)]
    # SGD without momentum: the paper takes an optimiser step in 256 samples, so it must not weigh in here.
    arms = compare(policy, [transition], episodes, cfg, torch.optim.SGD, args.repeats or 3, 1, warm_up=0)
    clock = "cpu" if policy.device.type == "cpu" else "wall"
    share, flops = (more(arms["cmae"], arms["none"], key) for key in ("train_tokens", "gflop"))
    cpu = added(arms["cmae"], arms["none"], clock)[0]
    worst, alpha = max(cpu, flops), paw.Config().alpha
    verdict = (f"On a selected transition PaW adds {cpu:+.2f} % {clock} time and {flops:+.2f} % floating-point operations for {share:+.2f} % tokens; with "
               f"alpha {alpha} of the transitions selected, {alpha * cpu:+.2f} % and {alpha * flops:+.2f} % of the training phase (goal: at most "
               f"3 %): {'met' if alpha * worst <= 3 else 'MISSED'}. Two passes would add {alpha * added(arms['naive'], arms['none'], clock)[0]:+.0f} %. "
               f"{OBS_NOTE}")
    return {"title": f"Qwen2.5-0.5B's shape ({args.layers} layers, random fp32 weights), one selected transition",
            "parameters": sum(p.numel() for p in policy.model.parameters()), "transitions": 1, "kept": 1,
            "mean_lens": {"prompt": prompt, "response": response, "observation": obs}, "kl": {str(cfg.kl_coef): arms}, "verdict": [verdict]}


# ---- Showing -------------------------------------------------------------------------------------------------------------

def added(arm, base, clock):
    """Time that an arm adds, in %: (ratio of the minima, median ratio of repetitions in the same round).

    The minima count: other work on the machine only ever adds time.
    """
    return (100 * (min(arm[clock]) / min(base[clock]) - 1), float(np.median([100 * (a / b - 1) for a, b in zip(arm[clock], base[clock])])))


def more(arm, base, key):
    """What an arm has more of than the base arm, in %."""
    return 100 * (arm[key] / base[key] - 1)


def table(result):
    """One half of paw_cost.md."""
    lens = result["mean_lens"]
    lines = [f"## {result['title']}", "",
             f"{result['kept']} kept of {result['transitions']} transitions; tokens of a transition: prompt {lens['prompt']}, response "
             f"{lens['response']}, next observation {lens['observation']} (mean).", "",
             "| kl_coef | arm | tokens | added | GFLOP | added | CPU s min / median | added: minima / pairs | wall s min / median | added | "
             "peak MB | added |", "|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for kl_coef, arms in result["kl"].items():
        base = arms["none"]
        for name, arm in arms.items():
            plus = lambda key: f"{more(arm, base, key):+.2f} %" if arm is not base else ""
            times = [f"{min(arm[c]):.2f} / {np.median(arm[c]):.2f}" for c in ("cpu", "wall")]
            slower = ["{:+.2f} / {:+.2f} %".format(*added(arm, base, c)) if arm is not base else "" for c in ("cpu", "wall")]
            memory = [f"{arm['memory']['peak']:.0f}", f"{more(arm['memory'], base['memory'], 'peak'):+.1f} %"
                      if arm is not base else ""] if arm.get("memory") else ["not measured", ""]
            cells = [kl_coef, name, str(arm["train_tokens"]), plus("train_tokens"), f"{arm['gflop']:.0f}", plus("gflop"),
                     times[0], slower[0], times[1], slower[1], *memory]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *result["verdict"], "", f"Made by `{result['command']}` on {result['date']}; {result['machine']}; {result['versions']}."]
    return "\n".join(lines) + "\n"


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--big", action="store_true", help="measure a model of Qwen2.5-0.5B's shape instead of the tiny LM")
    parser.add_argument("--layers", type=int, default=QWEN_SHAPE["num_hidden_layers"], help="layers of the big model [24]; fewer: a trial")
    parser.add_argument("--prompt_len", type=int, default=2048, help="tokens of the big model's prompt (PaW A.1: 2048)")
    parser.add_argument("--response_len", type=int, default=512, help="tokens of its response (PaW A.1: 512)")
    parser.add_argument("--obs_len", type=int, default=40, help="tokens of the observation that follows [40; measured: 20-25 on average]")
    parser.add_argument("--groups", type=int, default=0, help="groups in the tiny LM's rollout [as in paw.py]")
    parser.add_argument("--repeats", type=int, default=0, help="timed repetitions of none and cmae [7; --big: 3]")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads [1]")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda [auto]")
    parser.add_argument("--results", default=str(REPOSITORY / "benchmarks" / "results"), help="folder of what is made [benchmarks/results]")
    return parser.parse_args(argv)


def main(argv):
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    half = measure_big(args) if args.big else measure_tiny(args)
    device = paw.Config(device=args.device).torch_device
    half |= {"command": shlex.join(["python", "benchmarks/paw_cost.py", *argv]), "date": datetime.date.today().isoformat(),
             "machine": f"{cpu_model()}, {args.threads} thread" if device.type == "cpu" else torch.cuda.get_device_name(device),
             "versions": f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"}
    folder = Path(args.results)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "paw_cost.json"
    both = (json.loads(path.read_text()) if path.exists() else {}) | {"big" if args.big else "tiny": half}
    path.write_text(json.dumps(both, indent=1))
    text = "# PaW's cost over GRPO\n\n" + "\n".join(table(both[name]) for name in ("tiny", "big") if name in both)
    (folder / "paw_cost.md").write_text(text)
    print(table(half))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(print(f"paw_cost.py: {error}", file=sys.stderr) or 2)
