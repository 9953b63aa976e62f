"""paw.py as a program: bad input, files, seeds, checkpoints and exact resume, Ctrl-C, and that it learns.

Most runs happen in this process (`paw.main`); a process of its own is started only where that is the point.
"""

import dataclasses
import functools
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import envs
import paw
import tiny
from envs import EnvPool

SCRIPT = Path(paw.__file__).resolve()
SMALL = ["--env", "alfworld", "--groups", "2", "--group_size", "2", "--max_steps", "3", "--eval_episodes", "2", "--device", "cpu"]
TIMES = re.compile(r"seconds|elapsed|tokens_per_s|eta")
METRICS = ("reward success valid_action_rate episode_len pg_loss clip_frac kl entropy wm_loss wm_clipped_frac wm_selected lambda "
           "frac_zero_std truncated_frac grad_norm tokens_per_s seconds_env seconds_generate seconds_train").split()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Every test works in an empty folder, and leaves pytest's answer to Ctrl-C as it was."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def start(*arguments):
    """`python paw.py ...` as a process, with as many threads as this one (sums depend on it)."""
    return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())})


def finish(process):
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


@pytest.fixture
def command_line(monkeypatch, capsys):
    """`python paw.py ...` without a new process: returns (exit code, stdout, stderr); a traceback fails the test."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        capsys.readouterr()
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()
    return run


def files(folder):
    """{relative path: content} of all files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def assert_refused(result, *words):
    code, out, err = result
    assert code == 2, (code, out, err)
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("paw.py: ") and "Traceback" not in err, err
    assert all(word in lines[0] for word in words), (words, lines[0])


def rows(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def without_times(rows):
    return [{k: v for k, v in row.items() if not TIMES.search(k)} for row in rows]


def same(a, b):
    """Equal bit for bit, through dictionaries, lists and tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def assert_same_state(run, other):
    """Two runs hold equal checkpoints: weights, reference, optimiser, random states, counters, settings but the folder."""
    a, b = (torch.load(Path(r) / "checkpoint.pt", weights_only=True) for r in (run, other))
    a["config"].pop("run_dir"), b["config"].pop("run_dir")
    assert a.keys() == b.keys()
    for key in a:
        assert same(a[key], b[key]), key


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of four updates."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    handler = signal.getsignal(signal.SIGINT)
    paw.main([*SMALL, "--updates", "4", "--run_dir", str(folder)])
    signal.signal(signal.SIGINT, handler)
    return folder


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """The folder of a model that has another shape than the shipped one."""
    folder = tmp_path_factory.mktemp("model")
    paw.save_model(tiny.policy(), folder, tiny.settings())
    return folder


# ---- Bad input: one line, exit code 2, nothing written -----------------------------------------------------------------------

@pytest.mark.parametrize("arguments, words", [
    (["--env", "alfword"], ["alfword", "did you mean alfworld"]),
    (["--model", "/no/such/folder"], ["--model /no/such/folder"]),
    (["--model", "./folder"], ["--model ./folder"]),
    (["--model", "model.gguf"], ["--model model.gguf"]),
    (["--model", ""], ["--model"]),
    (["--group_size", "1"], ["--group_size 1"]),
    (["--alpha", "0"], ["--alpha 0"]),
    (["--alpha", "1.5"], ["--alpha 1.5"]), (["--alpha", "nan"], ["--alpha nan"]), (["--alpha", "much"], ["--alpha", "much"]),
    (["--rho", "0"], ["--rho 0"]), (["--temperature", "0"], ["--temperature 0"]), (["--lr", "-1"], ["--lr -1"]),
    (["--wm", "mse"], ["--wm mse", "cmae, ce, none"]), (["--algo", "gipgo"], ["did you mean gigpo"]),
    (["--houses", "tiny"], ["--houses tiny", "small"]), (["--task_types", "pick,fly"], ["pick"]),
    (["--device", "gpu"], ["gpu"]), (["--no_such_flag", "1"], ["no_such_flag"]), (["--updates"], ["--updates"]),
    (["--run_dir", "/proc/run"], ["/proc/run"]), (["--run_dir", "a_file/run"], ["a_file/run"]), (["--run_dir", "a_file"], ["a_file"]),
    (["--eval", "missing.pt"], ["missing.pt"]), (["--resume", "missing.pt"], ["missing.pt"]), (["--resume"], ["checkpoint"]),
    (["--run_dir", "missing", "--resume"], ["missing"]), (["--plot", "missing"], ["missing"])],
    ids=lambda x: "_".join(x).replace("/", ".") if isinstance(x, list) else None)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, command_line, tmp_path):
    (tmp_path / "a_file").write_text("not a folder")
    assert_refused(command_line(*SMALL, *arguments), *words)
    assert files(tmp_path) == {"a_file": b"not a folder"} and len(list(tmp_path.iterdir())) == 1


def test_bad_input_of_a_real_process(tmp_path):
    assert_refused(finish(start("--env", "alfword")), "alfword", "did you mean alfworld")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_bad_input_cuda_where_there_is_none(command_line):
    assert_refused(command_line(*SMALL, "--device", "cuda"), "cuda")


@pytest.mark.parametrize("empty", [True, False])
def test_bad_input_official_houses_without_data(empty, command_line, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / ("data" if empty else "missing")))
    assert_refused(command_line(*SMALL, "--houses", "official", "--run_dir", "run"), "ALFWORLD_DATA")
    assert [p.name for p in tmp_path.iterdir()] == ["data"] and not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("damage", ["empty folder", "cut weights", "no tokenizer", "bad config"])
def test_bad_input_damaged_model_folder(damage, command_line, other_model, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for name, content in files(other_model).items() if damage != "empty folder" else ():
        content = content[:len(content) // 2] if (damage, name) == ("cut weights", "model.safetensors") else content
        content = b"{" if (damage, name) == ("bad config", "config.json") else content
        if damage != "no tokenizer" or "tokenizer" not in name:
            (broken / name).write_bytes(content)
    assert_refused(command_line(*SMALL, "--model", broken, "--run_dir", "run"), f"--model {broken}")
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


def test_help_explains_every_setting(command_line):
    code, out, _ = command_line("--help")
    assert code == 0 and all(f"--{field.name}" in out for field in dataclasses.fields(paw.Config))


def test_every_setting_is_checked_against_its_own_range():
    for field in dataclasses.fields(paw.Config):
        for bad in [field.metadata[bound] + step for bound, step in (("low", -1), ("high", 1)) if field.metadata[bound] is not None]:
            with pytest.raises(paw.InputError, match=f"--{field.name} "):
                paw.Config(**{field.name: type(field.default)(bad)}).validate()
    paw.Config().validate()


# ---- What a run leaves behind ------------------------------------------------------------------------------------------------

def test_metrics_config_transcripts_and_result_of_a_run(finished):
    metrics = rows(finished)
    assert [row["update"] for row in metrics] == [0, 1, 2, 3]
    for row in metrics:
        assert not set(METRICS) - set(row) and all(math.isfinite(v) for v in row.values())
        assert row["first_ratio_deviation"] <= 1e-4 and row["transitions"] == 12 and row["wm_selected"] == 9  # ceil(0.75 * 12)
        assert 0 <= row["lambda"] <= 1 and row["grad_norm"] > 0 and row["tokens_per_s"] > 0
    config = json.loads((finished / "config.json").read_text())
    assert config == dataclasses.asdict(paw.Config(groups=2, group_size=2, max_steps=3, eval_episodes=2, device="cpu", updates=4,
                                                       run_dir=str(finished)))
    transcript, = (finished / "transcripts").iterdir()
    assert "[0] You are in the middle of a room" in transcript.read_text() and "reward" in transcript.read_text()
    result = json.loads((finished / "result.json").read_text())
    assert sum(n for kind, (_, n) in result["after"].items() if kind != "all") == 2 and result["before"].keys() == result["after"].keys()
    assert not [name for name in files(finished) if name.endswith(".tmp")]


def test_the_saved_model_is_the_trained_one(finished):
    weights = torch.load(finished / "checkpoint.pt", weights_only=True)["weights"]
    loaded = paw.load_policy(paw.Config(model=str(finished / "model"), device="cpu"))
    assert same({k: v.detach() for k, v in weights.items()}, {k: v.detach() for k, v in paw.trainable(loaded.model).items()})


def test_plot_makes_a_picture(finished, command_line, tmp_path):
    before = set(files(finished))
    code, *_ = command_line("--plot", finished, finished)
    pictures = [p for folder in (tmp_path, finished) for p in folder.glob("*.png")]
    assert code == 0 and len(pictures) == 1 and pictures[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert set(files(finished)) - before <= {pictures[0].name}


def test_eval_prints_success_per_task_type_twice_the_same(finished, command_line, monkeypatch):
    before, splits = files(finished), []
    monkeypatch.setattr(envs, "EnvPool", lambda *args, **options: splits.append(options["split"]) or EnvPool(*args, **options))
    arguments = ["--eval", finished / "checkpoint.pt", "--eval_episodes", 12, "--groups", 3]
    results = [command_line(*arguments) for _ in range(2)]
    assert results[0] == results[1] and results[0][0] == 0
    head, numbers = results[0][1].strip().splitlines()[-2:]
    assert all(name in head for name in ("Pick", "Look", "Clean", "Heat", "Cool", "Pick2", "All")) and numbers.split()[-1] == "12"
    assert "valid_unseen" in results[0][1] and files(finished) == before
    assert "valid_seen" in command_line(*arguments, "--eval_split", "valid_seen")[1]
    assert splits == ["valid_unseen", "valid_unseen", "valid_seen"]


def test_the_smoke_command(tmp_path):
    code, out, err = finish(start(*"--env alfworld --updates 2 --groups 2 --group_size 4 --max_steps 8 --eval_episodes 8".split()))
    assert code == 0, err
    run, = (tmp_path / "runs").iterdir()
    assert run.name.startswith("alfworld-grpo-cmae-seed1") and len(rows(run)) == 2
    assert [line.split()[0] for line in out.splitlines()[-3:-1]] == ["before", "after"] and "Pick2" in out and "Traceback" not in err


@pytest.mark.parametrize("flags", [
    ["--algo", "gigpo", "--wm", "ce", "--entropy", "full", "--no-adaptive_lambda", "--constrain", "--kl_coef", "0", "--epochs", "2"],
    ["--gradient_checkpointing", "--token_budget", "300", "--mini_batch", "5", "--prompt", "paper", "--eval_every", "1"],
    ["--eval_episodes", "0", "--eval_every", "1"]], ids=lambda flags: flags[0])
def test_other_settings_run_too(flags, tmp_path):
    paw.main([*SMALL, "--updates", "1", "--run_dir", str(tmp_path / "run"), *flags])
    row, = rows(tmp_path / "run")
    assert all(math.isfinite(value) for value in row.values()) and row["grad_norm"] > 0
    assert "--no-adaptive_lambda" not in flags or row["lambda"] == 1


# ---- Seeds -----------------------------------------------------------------------------------------------------------------

def test_a_seed_fixes_a_run_and_wm_none_draws_the_same_numbers(finished, tmp_path):
    first = {}
    for name, flags in (("again", []), ("none", ["--wm", "none"]), ("seed", ["--seed", "2"])):
        paw.main([*SMALL, "--updates", "1", "--run_dir", str(tmp_path / name), *flags])
        first[name], = without_times(rows(tmp_path / name))
    original = without_times(rows(finished))[0]
    assert first["again"] == original
    assert all(first["none"][k] == original[k] for k in ("reward", "entropy", "valid_action_rate", "truncated_frac"))
    assert first["none"]["wm_selected"] == 0 and first["none"]["train_tokens"] < original["train_tokens"]
    assert first["seed"]["entropy"] != original["entropy"]


# ---- Checkpoints -----------------------------------------------------------------------------------------------------------

def test_case42_interrupted_and_resumed_in_a_new_process_equals_uninterrupted(finished, tmp_path, monkeypatch):
    update_policy, calls = paw.update_policy, []

    def interrupt(*arguments):
        calls.append(len(calls))
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return update_policy(*arguments)

    monkeypatch.setattr(paw, "update_policy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        paw.main([*SMALL, "--updates", "4", "--run_dir", "run"])
    assert len(calls) == 2 and torch.load("run/checkpoint.pt", weights_only=True)["update"] == 2
    assert without_times(rows("run")) == without_times(rows(finished))[:2]
    code, out, err = finish(start("--run_dir", "run", "--resume"))
    assert code == 0, err
    assert without_times(rows("run")) == without_times(rows(finished))
    assert_same_state("run", finished)
    assert same(json.loads(Path("run/result.json").read_text())["after"], json.loads((finished / "result.json").read_text())["after"])


def test_case42_two_updates_then_two_more_equal_four_with_lora_and_gigpo(tmp_path):
    flags = [*SMALL, "--lora_rank", "2", "--algo", "gigpo", "--mini_batch", "5", "--eval_episodes", "0"]
    paw.main([*flags, "--updates", "3", "--run_dir", "whole"])
    paw.main([*flags, "--updates", "1", "--run_dir", "parts"])
    with open("parts/metrics.jsonl", "a") as file:
        file.write(json.dumps(rows("parts")[0] | {"update": 1, "reward": 99}) + "\n")  # an update after the last checkpoint
    paw.main(["--resume", "parts/checkpoint.pt", "--updates", "3"])
    assert without_times(rows("parts")) == without_times(rows("whole"))
    assert_same_state("parts", "whole")
    assert (tmp_path / "whole/model/adapter_model.safetensors").exists() and not (tmp_path / "whole/model/model.safetensors").exists()


def test_ctrl_c_in_a_real_process_saves_and_ends_with_130():
    process = start(*SMALL, "--updates", "1000", "--save_every", "1000", "--run_dir", "run", "--eval_episodes", "0")
    while process.poll() is None and not (Path("run/metrics.jsonl").exists() and rows("run")):
        time.sleep(.05)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and "Traceback" not in err
    assert paw.load_checkpoint(Path("run/checkpoint.pt"))["update"] == len(rows("run")) < 1000


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_case42_a_crash_while_saving_leaves_the_old_checkpoint(error, finished, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes((finished / "checkpoint.pt").read_bytes())

    def crash(state, file):
        Path(file).write_bytes(b"half a checkpoint")
        raise error

    policy = tiny.policy()
    optimizer = torch.optim.AdamW(policy.model.parameters())
    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        paw.save_checkpoint(path, policy, paw.Reference(policy.model), optimizer, {}, 9, tiny.settings(), None)
    assert files(tmp_path) == {"checkpoint.pt": (finished / "checkpoint.pt").read_bytes()}
    monkeypatch.undo()
    assert paw.load_checkpoint(path)["update"] == 4


def test_case42_what_a_killed_save_leaves_does_not_disturb_the_next(tmp_path):
    path = tmp_path / "file"
    paw.atomic_write(path, lambda temporary: temporary.write_text("old"))
    (tmp_path / "file.tmp").write_text("half of someth")  # killed before the rename
    assert path.read_text() == "old"
    paw.atomic_write(path, lambda temporary: temporary.write_text("new"))
    assert files(tmp_path) == {"file": b"new"}


def test_an_existing_run_is_not_overwritten(finished, command_line):
    before = files(finished)
    assert_refused(command_line(*SMALL, "--run_dir", finished), str(finished), "--resume")
    assert files(finished) == before


@pytest.mark.parametrize("flag, value", [("lr", "0.5"), ("groups", "3"), ("seed", "2"), ("wm", "none"), ("lora_rank", "4")])
def test_case42_resume_refuses_a_changed_flag(flag, value, finished, command_line):
    before = files(finished)
    assert_refused(command_line("--run_dir", finished, "--resume", f"--{flag}", value), f"--{flag} {value}")
    assert files(finished) == before


@pytest.mark.parametrize("mode", ["--resume", "--eval"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "text", "another file of torch", "folder"])
def test_a_corrupt_checkpoint_is_refused(damage, mode, finished, command_line, tmp_path):
    whole, path = (finished / "checkpoint.pt").read_bytes(), tmp_path / "bad.pt"
    content = {"cut": whole[:len(whole) // 2], "garbage": b"PK\x03\x04" + bytes(1000), "empty": b"", "text": b"hello world\n"}
    if damage == "folder":
        path.mkdir()
    elif damage == "another file of torch":
        torch.save({"weights": torch.zeros(2)}, path)
    else:
        path.write_bytes(content[damage])
    before = files(tmp_path)
    assert_refused(command_line(mode, path), "bad.pt")
    assert files(tmp_path) == before


@pytest.mark.parametrize("mode", ["--resume", "--eval"])
def test_a_checkpoint_of_another_model_shape_is_refused(mode, finished, other_model, command_line, tmp_path):
    path = tmp_path / "checkpoint.pt"
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    state["config"]["model"] = str(other_model)  # the folder that it was made with now holds another model
    torch.save(state, path)
    before = files(tmp_path)
    assert_refused(command_line(mode, path), "shape")
    if mode == "--eval":
        assert_refused(command_line("--eval", finished / "checkpoint.pt", "--model", other_model), "shape")
        assert_refused(command_line("--eval", finished / "checkpoint.pt", "--lora_rank", 2), "shape")
    assert files(tmp_path) == before


# ---- The shipped tiny LM, and that it learns -----------------------------------------------------------------------------------

@functools.cache
def tiny_start():
    """The weights of the shipped tiny LM."""
    return paw.load_policy(paw.Config(device="cpu"))


def test_the_shipped_tiny_lm_copies_admissible_actions_of_unseen_houses():
    cfg = paw.Config(device="cpu", max_steps=6)
    with EnvPool("alfworld", 48, **cfg.env_options("valid_unseen")) as pool:
        transitions, _ = paw.rollout(tiny_start(), pool, list(range(48)), 1, cfg, 1.0, torch.Generator().manual_seed(0), defaultdict(float))
    valid = [t.valid for t in transitions]
    assert sum(valid) / len(valid) >= .87  # 0.90 is asked for; this is less than two standard errors below it


def test_two_games_are_learnt():
    """PaW with its default settings (but lr), from the shipped LM, on two games that it wins now and then."""
    cfg = paw.Config(device="cpu", groups=2, group_size=12, lr=3e-4)
    policy, generator, success = tiny_start(), torch.Generator().manual_seed(1), []
    start = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    reference, optimizer = paw.Reference(policy.model), torch.optim.AdamW(policy.model.parameters(), lr=cfg.lr)
    play = lambda pool, tasks: paw.rollout(policy, pool, tasks, cfg.group_size, cfg, cfg.temperature, generator, defaultdict(float))
    with EnvPool("alfworld", 144, **cfg.env_options("train")) as pool:
        _, episodes = play(pool, list(range(12)))
        wins = [sum(e.won for e in episodes if e.group == task) / cfg.group_size for task in range(12)]
        tasks = sorted(range(12), key=lambda task: abs(wins[task] - .5))[:2]
        for _ in range(11):
            transitions, episodes = play(pool, tasks)
            success.append(paw.update_policy(policy, reference, optimizer, transitions, episodes, cfg, generator)["success"])
    policy.model.load_state_dict(start)
    before, after = sum(success[:2]) / 2, sum(success[-5:]) / 5
    assert after > before + .2 and after > .6, success


def test_resuming_into_the_folder_of_another_run_is_refused(finished, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoint.pt").write_bytes(b"another run's")
    with pytest.raises(paw.InputError, match="another run"):
        paw.main(["--resume", str(finished / "checkpoint.pt"), "--run_dir", str(other), "--updates", "9"])
    assert (other / "checkpoint.pt").read_bytes() == b"another run's" and len(list(other.iterdir())) == 1


@pytest.mark.parametrize("line", ['{"a": 1}', "3", "[]"])
def test_plot_refuses_metrics_of_something_else(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(paw.InputError, match="not one of ours"):
        paw.main(["--plot", str(tmp_path)])


def test_a_model_folder_whose_weights_do_not_fit_is_one_line(tmp_path):
    shutil.copytree(paw.TINY_FOLDER, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(paw.InputError, match="cannot load it"):
        paw.load_policy(paw.Config(model=str(tmp_path / "m")))
