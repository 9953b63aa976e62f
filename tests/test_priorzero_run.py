"""priorzero.py as a program: bad input, files, checkpoints and exact resume, Ctrl-C, switches, and that it learns.

Runs happen in this process (`priorzero.main`), in an environment without an engine; bad input goes through the real ones.
"""

import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch

import priorzero as pz
import tiny_priorzero as tiny

SCRIPT = Path(pz.__file__).resolve()
SMALL = ("--width 16 --heads 2 --window 6 --td_steps 2 --context 3 --num_envs 4 --num_simulations 6 --eval_simulations 6 --replay_size 1000 "
         "--batch_size 8 --warmup_steps 16 --replay_ratio 0.5 --eval_episodes 6 --eval_every 0 --log_every 40 --save_every 40 "
         "--wm_updates 8 --llm_updates 2 --wm_warmup 4 --llm_batch 4 --device cpu --max_steps 6").split()
TIMES = re.compile(r"_ms$|_s$|seconds")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Every test works in an empty folder, and leaves pytest's answer to Ctrl-C as it was."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def toy(monkeypatch):
    """Runs in the lamp environment, with the tiny random LM as the prior."""
    monkeypatch.setattr(pz, "EnvPool", tiny.LampPool)
    monkeypatch.setattr(pz, "load_pretrained", lambda *_: (tiny.tokenizer(), tiny.lm()))
    return lambda *flags: pz.main([*SMALL, *map(str, flags)])


def metrics(run_dir):
    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not TIMES.search(k)} for row in rows]


def same(a, b):
    """Bit for bit the same nested values."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# ---- Bad input -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, message", [
    ("--level Nowhere", "unknown value 'Nowhere'"),
    ("--env jericho --alpha 0 --game nothing", "no story file nothing.z1"),
    ("--env jericho --alpha 0 --rom_dir /does/not/exist", "'/does/not/exist'"),
    ("--model ./no/such/folder", "--model ./no/such/folder: there is no such file or folder"),
    ("--model missing.gguf", "--model missing.gguf: there is no such file or folder"),
    ("--encoder ./no/such/encoder", "--encoder ./no/such/encoder: there is no such file or folder"),
    ("--alpha 1.5", "--alpha 1.5: must lie between 0 and 1"),
    ("--alpha x", "argument --alpha"),
    ("--num_simulations 0", "--num_simulations 0: must lie between 1"),
    ("--env alfworld", "--env alfworld: choose one of babyai, jericho"),
    ("--env jericho", "--model tiny: knows BabyAI only"),
    ("--nonsense", "--nonsense"),
    ("--resume --run_dir nowhere", "not a readable checkpoint"),
    ("--eval nowhere.pt", "not a readable checkpoint"),
    ("--eval=", "not a readable checkpoint"),
    ("--alp 0.5", "unrecognized arguments"),
    ("--plot nowhere", "no readable metrics.jsonl"),
    ("--device cuda:99", "--device cuda:99: choose one of auto, cpu"),
    ("--llm_only", "--llm_only: is for --eval"),
    ("--seed 5000000000", "--seed 5000000000: must lie between 0 and 4294967295"),
    ("--alpha 0 --max_steps 2000 --replay_size 1500", "--replay_size 1500: must exceed"),
])
def test_bad_input_is_one_line(monkeypatch, capsys, flags, message):
    monkeypatch.delenv("JERICHO_ROMS", raising=False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags.split()])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    err = capsys.readouterr().err.strip()
    assert exit_.value.code == 2 and err.startswith("priorzero.py: ") and message in err and "\n" not in err


def test_a_run_that_diverges_ends_with_one_line(monkeypatch, capsys):
    flags = "--alpha 0 --env_steps 96 --eval_episodes 0 --warmup_steps 0 --replay_ratio 1 --wm_lr 1e30 --num_simulations 2 --max_steps 2 --run_dir a"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags.split()])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and "non-finite loss or gradient, places" in err.splitlines()[-1] and "Traceback" not in err


def test_checkpoint_of_another_shape(toy, capsys):
    toy("--alpha", 0, "--env_steps", 8, "--run_dir", "a")
    with pytest.raises(pz.InputError, match="another shape"):
        toy("--eval", "a/checkpoint.pt", "--width", 32)
    with pytest.raises(pz.InputError, match="--width 32: the checkpoint was made with 16"):
        toy("--resume", "a/checkpoint.pt", "--width", 32)
    with pytest.raises(pz.InputError, match="already holds a run"):
        toy("--alpha", 0, "--env_steps", 8, "--run_dir", "a")
    with pytest.raises(pz.InputError, match="--action_slots index: the checkpoint was made with text"):
        toy("--eval", "a/checkpoint.pt", "--action_slots", "index")
    toy("--alpha", 0, "--env_steps", 8, "--run_dir", "b")
    with pytest.raises(pz.InputError, match="already holds a run"):
        toy("--resume", "a/checkpoint.pt", "--run_dir", "b", "--env_steps", 16)
    for damaged in ('{"broken\n', '{"a": 1}\n', "[1]\n"):
        Path("b/metrics.jsonl").write_text(damaged)
        with pytest.raises(pz.InputError, match="metrics.jsonl is damaged"):
            toy("--resume", "b/checkpoint.pt", "--env_steps", 16)
    state = torch.load("b/checkpoint.pt", weights_only=True)
    torch.save({name: value for name, value in state.items() if name != "texts"}, "b/checkpoint.pt")
    with pytest.raises(pz.InputError, match="not a readable checkpoint"):
        toy("--eval", "b/checkpoint.pt")
    Path("a/checkpoint.pt").write_bytes(Path("a/checkpoint.pt").read_bytes()[:-100])
    with pytest.raises(pz.InputError, match="not a readable checkpoint"):
        toy("--resume", "a/checkpoint.pt")


@pytest.mark.parametrize("content", ["[]", "{}", '{"version": "1.0"}'])
def test_a_folder_that_is_no_lm(tmp_path, content):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(content)
    with pytest.raises(pz.InputError, match="--model .*transformers cannot load it"):
        pz.load_pretrained(pz.AutoModelForCausalLM, tmp_path, "--model")


def test_a_checkpoint_from_another_kind_of_device(toy):
    toy("--alpha", 0, "--env_steps", 8, "--run_dir", "a")
    state = torch.load("a/checkpoint.pt", weights_only=True)
    for name in ("search", "sampling"):
        state["generators"][name] = torch.zeros(16, dtype=torch.uint8)  # what a CUDA generator saves
    torch.save(state, "a/checkpoint.pt")
    toy("--eval", "a/checkpoint.pt", "--eval_episodes", 2)


def test_a_crash_loses_no_checkpoint(toy, monkeypatch):
    """A save that fails half-way leaves the last checkpoint; a log line that was cut off is dropped."""
    toy("--alpha", 0, "--env_steps", 40, "--run_dir", "a")
    save = torch.save
    def full_disk(state, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError):
        toy("--resume", "a/checkpoint.pt", "--env_steps", 80)
    monkeypatch.setattr(torch, "save", save)
    assert pz.load_checkpoint("a/checkpoint.pt")["counters"]["env_steps"] == 40
    with open("a/metrics.jsonl", "a") as file:
        file.write('{"env_steps": 4')
    toy("--resume", "a/checkpoint.pt", "--env_steps", 80)
    assert [row["env_steps"] for row in metrics("a")] == [40, 80]


# ---- Runs ----------------------------------------------------------------------------------------------------------------

def test_unizero_loads_no_llm(toy, monkeypatch, capsys):
    monkeypatch.setattr(pz, "load_pretrained", lambda *_: pytest.fail("an LLM was loaded"))
    toy("--alpha", 0, "--env_steps", 48, "--run_dir", "a")
    out = capsys.readouterr().out
    assert "UniZero before" in out and "UniZero after" in out and "LLM alone" not in out
    assert [row["env_steps"] for row in metrics("a")] == [40, 48] and json.loads(Path("a/config.json").read_text())["alpha"] == 0


def test_the_whole_job_ends_with_a_table(toy, capsys):
    toy("--env_steps", 80, "--run_dir", "a", "--no-cot")
    out, rows = capsys.readouterr().out, metrics("a")
    for name in ("PriorZero before", "PriorZero after", "LLM alone before", "LLM alone after", "UniZero before", "UniZero after"):
        assert re.search(rf"{name} +[\d.]+ +[\d.]+% +[\d.]+ +6\n", out), name
    assert rows[-1]["llm_version"] > 0 and rows[-1]["wm_updates"] == 32  # 0.5 * (80 - 16)
    assert {"return", "solved", "episode_len", "visit_entropy", "prior_entropy", "wm_loss", "latent_loss", "policy_loss", "value_loss",
            "reward_loss", "clipped_share", "wm_grad_norm"} <= set(rows[-1])
    phase = next(row for row in rows if "llm_kl" in row)
    assert phase["first_ratio_deviation"] < 1e-4 and phase["format_ok"] == 1
    assert any(p.read_text().count("> press") for p in Path("a/transcripts").iterdir())
    assert (Path("a/unizero/checkpoint.pt")).exists()


@pytest.mark.parametrize("flags", ["--alpha 0", "--alpha 0.5 --model toy --max_cot_len 6 --history_len 1 --lora_rank 2 --adaptive_alpha"])
def test_case42_resume_equals_an_uninterrupted_run(toy, monkeypatch, flags):
    flags = [*flags.split(), "--env_steps", "80", "--no-baseline"]
    toy(*flags, "--run_dir", "whole")
    collect = pz.collect

    def interrupted(agent, *how):
        result = collect(agent, *how)
        if agent.env_steps == 36:  # no step at which a checkpoint or a line of the log is due
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(pz, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toy(*flags, "--run_dir", "parts")
    assert pz.load_checkpoint(Path("parts/checkpoint.pt"))["counters"]["env_steps"] == 36
    monkeypatch.setattr(pz, "collect", collect)
    if (state := pz.load_checkpoint(Path("parts/checkpoint.pt")))["llm"]:  # the priors of this phase go on, analyses and all
        pz.restore(agent := pz.Agent(pz.Config(**state["config"])), state, "parts")
        assert agent.llm.cache and agent.llm.cache == state["llm"][4]
    toy("--resume", "parts/checkpoint.pt")
    whole, parts = (pz.load_checkpoint(Path(name, "checkpoint.pt")) for name in ("whole", "parts"))
    for state in (whole, parts):
        state["config"].pop("run_dir")
    for name in whole.keys() - {"path"}:
        assert same(whole[name], parts[name]), name
    rows = {row["env_steps"]: row for row in metrics("parts")}
    assert rows.pop(36) and metrics("whole")[1:] == list(rows.values())[1:]  # Ctrl-C adds a line, and splits the means of the next
    assert json.loads(Path("whole/result.json").read_text()) == json.loads(Path("parts/result.json").read_text())


def test_the_same_seed_gives_the_same_run(toy):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        toy("--alpha", 0, "--env_steps", 48, "--seed", seed, "--run_dir", name)
    assert metrics("a") == metrics("b") != metrics("c")


@pytest.mark.parametrize("flags", ["--no-mcts", "--freeze_llm", "--no-alternate", "--loss sft", "--w_cot 1 --model toy --max_cot_len 4 --history_len 1",
                                   "--action_slots index --latent_norm simnorm"])
def test_ablations_run(toy, flags):
    toy(*flags.split(), "--env_steps", 56, "--no-baseline", "--run_dir", "a", "--eval_episodes", 0)
    rows = metrics("a")
    assert (rows[-1]["llm_version"] == 0) == (flags == "--freeze_llm") and rows[-1]["wm_updates"] == 20
    toy("--eval", "a/checkpoint.pt", "--llm_only", "--eval_episodes", 2)


def test_it_learns(toy, monkeypatch, capsys):
    """UniZero from chance (a third; a wrong lamp ends the game) to nearly always right."""
    monkeypatch.setattr(tiny.LampPool, "deadly", True)
    monkeypatch.setattr(tiny.LampPool, "rooms", 1)
    toy("--alpha", 0, "--env_steps", 400, "--replay_ratio", 1, "--batch_size", 16, "--width", 32, "--wm_lr", 3e-3, "--run_dir", "a")
    result = json.loads(Path("a/result.json").read_text())
    assert result["UniZero before"]["return"] <= 0.4 and result["UniZero after"]["return"] >= 0.8


def test_plot(toy, capsys):
    toy("--alpha", 0, "--env_steps", 48, "--run_dir", "a")
    pz.main(["--plot", "a"])
    assert Path("curves.png").stat().st_size > 10_000
    Path("paw").mkdir()
    Path("paw/metrics.jsonl").write_text('{"update": 0, "reward": 1.0}\n')
    with pytest.raises(pz.InputError, match="of the other script"):
        pz.main(["--plot", "paw"])
