"""The command line: help as the README says, one clear line for bad input, and a run from end to end through files."""

import json
import re
from pathlib import Path

import pytest

from prm import Step, StepLabel, Trajectory, append_jsonl, read_jsonl
from prm.cli import COMMANDS, main, usage

MULTIHOP = "rl.envs.multihop:MultiHop"
ROOT = Path(__file__).parents[1]


def test_the_readme_holds_the_help():
    block = re.search(r"<!-- prm --help -->\n```\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block and block.group(1) == usage(), "paste the output of prm --help into README.md"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command, capsys):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: prm {command}") and "--config FILE" in shown
    assert (COMMANDS[command].__doc__ or "").splitlines()[0] in " ".join(shown.split())


def test_the_readmes_commands_exist():
    used = set(re.findall(r"^    prm (\S+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert used and used <= set(COMMANDS)


@pytest.fixture
def files(tmp_path):
    t = Trajectory("task", [Step("a", "b"), Step("c")], 1.0, {"seed": 0})
    append_jsonl(tmp_path / "t.jsonl", t)
    append_jsonl(tmp_path / "l.jsonl", [StepLabel(t.id, i, i / 2, "human:ana") for i in range(2)])
    append_jsonl(tmp_path / "unknown.jsonl", StepLabel("0" * 16, 0, 1.0, "human:ana"))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"task": "t", "steps": [{"observation": "o"}]}\n')
    (tmp_path / "nan.jsonl").write_text('{"trajectory_id": "x", "step": 0, "score": NaN, "source": "s"}\n')
    (tmp_path / "raising.py").write_text("def boom():\n    raise RuntimeError('no luck')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nosuch"], "unknown command 'nosuch'"),
        (["rollout"], "--out is required|--env is required"),
        (["rollout", "--env", "no.module:E", "--policy", "x", "--out", "o"], "cannot import no.module"),
        (["rollout", "--env", "raising:boom", "--policy", "x", "--out", "o"], "cannot be made: RuntimeError: no luck"),
        (["rollout", "--env", MULTIHOP, "--policy", "none", "--out", "o"], "none: no such folder"),
        (["sft", "empty.jsonl", "--base", "tiny", "--out", "o"], "empty.jsonl: holds no trajectory"),
        (["sft", "broken.jsonl", "--base", "tiny", "--out", "o"], "broken.jsonl:1: step 0 must be an object with"),
        (["sft", "none.jsonl", "--base", "tiny", "--out", "o"], "none.jsonl: no such file"),
        (["sft", "t.jsonl", "--base", "none", "--out", "o"], "none: no such folder"),
        (["score", "none", "t.jsonl", "--out", "o"], "none"),
        (["distill", "t.jsonl", "unknown.jsonl", "--base", "none", "--out", "o"], "0000000000000000"),
        (["distill", "t.jsonl", "nan.jsonl", "--base", "none", "--out", "o"], "nan.jsonl:1: NaN is no JSON number"),
        (["evaluate", "empty.jsonl", "l.jsonl", "--out", "o"], "empty.jsonl: holds no"),
        (["convert", "t.jsonl", "--out", "l.jsonl"], "l.jsonl exists already"),
        (["convert", "broken.jsonl", "--out", "o"], "broken.jsonl:1"),
        (["ppo", "--env", MULTIHOP, "--policy", "prm.env:Action", "--out", "o"], "cannot be made"),
        (["ppo", "--env", MULTIHOP, "--policy", "x", "--out", "o", "--prm", "none"], "none"),
        (["mc", "t.jsonl", "--env", MULTIHOP, "--policy", "none", "--out", "o"], "none: no such folder"),
        (["show", "none.jsonl", "--terminal"], "none.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(files, monkeypatch, capsys, argv, says):
    monkeypatch.chdir(files)
    assert main(argv) == 2
    err = capsys.readouterr().err.strip()
    assert re.search(says, err), err
    assert len(err.splitlines()) == 1 and "Traceback" not in err, err


class Raises:
    def reset(self, *, seed=None, options=None):
        return "task", {}

    def step(self, action):
        if self.__class__.steps == 3:
            raise RuntimeError("the tool is away")
        self.__class__.steps += 1
        return "ok", 1.0, True, False, {}

    steps = 0


class Says:
    def act(self, histories):
        from prm.env import Action

        return [Action("word") for _ in histories]


def test_an_environment_that_raises_keeps_what_was_played_and_goes_on_later(tmp_path, monkeypatch, capsys):
    out = tmp_path / "t.jsonl"
    Raises.steps = 0
    argv = ["rollout", "--env", "tests.test_cli:Raises", "--policy", "tests.test_cli:Says", "--n", "6"]
    argv += ["--out", str(out)]
    assert main([*argv, "--batch", "1"]) == 2
    assert "seed 3, step 0: raised RuntimeError: the tool is away" in capsys.readouterr().err
    assert [t.meta["seed"] for t in read_jsonl(out)] == [0, 1, 2]
    Raises.steps = -10
    assert main(argv) == 0
    assert [t.meta["seed"] for t in read_jsonl(out)] == [0, 1, 2, 3, 4, 5]
    assert main(argv) == 0 and len(read_jsonl(out)) == 6


def test_convert_writes_trl_rows(files, monkeypatch):
    monkeypatch.chdir(files)
    rows = [{"prompt": "p", "completions": ["a", "b"], "labels": [True, False]}]
    Path("trl.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert main(["convert", "trl.jsonl", "--to", "labels", "--out", "labels.jsonl"]) == 0
    assert [label.score for label in read_jsonl("labels.jsonl")] == [1.0, 0.0]
    assert main(["convert", "trl.jsonl", "--to", "trl", "--out", "again.jsonl"]) == 0
    assert [json.loads(line) for line in Path("again.jsonl").read_text().splitlines()] == rows
