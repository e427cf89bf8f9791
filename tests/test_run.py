"""`prm ppo` and `prm run` from end to end through files: the guard and the reward of training, at work."""

import json

import pytest

from prm import Step, StepLabel, Trajectory, append_jsonl, read_jsonl
from prm.cli import main
from prm.errors import DataError, UsageError
from prm.model import PRM
from prm.serve.app import app
from prm.serve.config import ServeConfig
from rl.rewards import load_frozen
from rl.run import frozen_reward
from tests import tiny
from tests.test_remote import running

ENV = "tests.test_run:Shop"
TOOLS = [{"name": "refund", "parameters": {"type": "object", "properties": {"text": {"type": "string"}},
                                           "required": ["text"]}}]  # fmt: skip


class Shop:
    """Two steps; anything is carried out."""

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return f"case {seed}", {}

    def step(self, action):
        self.count += 1
        return "done", 0.0, self.count == 2, False, {"success": bool(len(action) % 2)} if self.count == 2 else {}

    def tools(self):
        return [dict(tool) for tool in TOOLS]


class Refunds:
    def act(self, histories):
        from prm.env import Action

        return [Action("refund: all" if len(h.actions) % 2 else "ok") for h in histories]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("base"), init=0.02)


def ppo(base, out, *more):
    """The command line of one small update."""
    argv = ["ppo", "--env", ENV, "--policy", base, "--layout", "plain", "--out", str(out), "--boards", "none"]
    return [*argv, "--updates", "1", "--episodes", "4", "--minibatch", "4", "--max-action-tokens", "4", *more]


@pytest.fixture(scope="module")
def prm(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prm") / "prm"
    PRM.create(base, lora_rank=2, seed=1).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(base, prm, tmp_path_factory):
    """A LoRA run from the command line: guard, PRM on the same base, critic from it, a warm start, checks."""
    folder = tmp_path_factory.mktemp("run")
    expert = [Trajectory(f"case {i}", (Step("ok", "done"), Step("yes", "done")), 1.0) for i in range(4)]
    append_jsonl(folder / "expert.jsonl", expert)
    argv = ppo(base, folder / "run", "--eval-episodes", "4", "--prm", prm, "--critic-from-prm", "--lora-rank", "2")
    argv += ["--warm-start", str(folder / "expert.jsonl"), "--checks", "arguments"]
    argv += ["--rules", 'refund.text contains "all" -> ask', "--retries", "1"]
    assert main(argv) == 0
    return folder / "run"


def test_what_a_run_leaves(run):
    names = {path.name for path in run.iterdir()}
    assert {
        "reward.json",
        "metrics.jsonl",
        "ppo.config.yaml",
        "checkpoint.pt",
        "policy",
        "result.json",
        "warm",
    } <= names
    (line,) = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    series = {"success", "reward", "reward_process", "reward_outcome", "steps", "tool_success", "kl", "entropy",
              "clip_share", "explained_variance", "score_success", "score_failure", "check_arguments",
              "penalty_repeat", "penalty_invalid", "penalty_limit", "penalty_blocked", "ratio_error"}  # fmt: skip
    assert series <= line.keys()
    assert line["ratio_error"] < 1e-4 and line["kl"] == pytest.approx(0, abs=1e-4), "the warm start is the reference"
    assert (run / "policy" / "adapter_config.json").exists() and not (run / "policy" / "critic").exists()


def test_the_policy_at_work_behind_the_guard_of_its_training(run, tmp_path, capsys):
    out = tmp_path / "work.jsonl"
    argv = [
        "run",
        "--env",
        ENV,
        "--policy",
        "tests.test_run:Refunds",
        "--like",
        str(run),
        "--n",
        "3",
        "--out",
        str(out),
    ]
    assert main([*argv, "--max-steps", "3"]) == 0
    assert "3 episodes" in capsys.readouterr().out
    for t in read_jsonl(out, Trajectory):
        assert 'Blocked: the rule \'refund.text contains "all"' in t.steps[1].observation
        assert len(t.meta["step_rewards"]) == len(t.meta["scores"]) == len(t.steps)
        assert t.meta["step_rewards"][1] < t.meta["step_rewards"][0] + 1, "blocked costs"
    assert main([*argv, "--max-steps", "3"]) == 0 and len(read_jsonl(out)) == 3, "what is there is not run again"
    trained = ["run", "--env", ENV, "--policy", str(run / "policy"), "--layout", "plain", "--max-action-tokens", "4"]
    assert main([*trained, "--like", str(run), "--out", str(tmp_path / "trained.jsonl"), "--n", "2"]) == 0


def test_the_frozen_reward_is_that_of_training(run, prm, tmp_path):
    reward = frozen_reward(str(run))
    assert reward.config.process_weight == 0.3 and list(reward.checks) == ["arguments"]
    t = Trajectory("case 1", (Step("a", "done"), Step("b", "done")))
    assert reward.score([t]) == PRM.load(prm).score([t])
    changed = tmp_path / "changed"
    changed.mkdir()
    row = json.loads((run / "reward.json").read_text())
    (changed / "reward.json").write_text(json.dumps({**row, "prm_fingerprint": "0" * 16}))
    with pytest.raises(UsageError, match="is not the PRM that the run was trained with"):
        frozen_reward(str(changed))
    for bad, says in (
        ({**row, "format": 2}, "expected format 1"),
        ({**row, "reward": {**row["reward"], "kl": 1}}, "expected format 1 with a reward of"),
        ({**row, "reward": {**row["reward"], "check_weight": "x"}}, "check_weight must be a number"),
        ({**row, "reward": {**row["reward"], "shape": "sum"}}, "shape must be one of"),
    ):
        (changed / "reward.json").write_text(json.dumps(bad))
        with pytest.raises(DataError, match=says):
            load_frozen(changed)
    (changed / "reward.json").write_text("{")
    with pytest.raises(DataError, match=r"reward\.json: not JSON"):
        load_frozen(changed)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--rules", "refund.amount >"], "rule 'refund.amount >': expected a JSON value"),
        (["--checks", "grammar"], "unknown scorer 'grammar'"),
        (["--boards", "paper"], "unknown board 'paper'"),
        (["--advantages", "grpo", "--group", "3"], "--group must be at least 2 and divide --episodes 4, got 3"),
        (["--episodes", "0"], "--episodes must be at least 1, got 0"),
        (["--lr", "-1"], "--lr must be > 0, got -1"),
        (["--gamma", "1.5"], "--gamma must lie in [0, 1], got 1.5"),
        (["--critic-from-prm"], "--critic-from-prm needs --prm"),
        (["--time-limits", "soon"], "--time-limits 'soon': expected a number"),
        (["--warm-start", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
)
def test_bad_options_are_one_line(base, tmp_path, capsys, more, says):
    argv = ppo(base, tmp_path / "run", "--eval-episodes", "0", "--process-weight", "0")
    assert main([*argv, *more]) == 2
    err = capsys.readouterr().err.strip()
    assert says in err and len(err.splitlines()) == 1


class Endless(Shop):
    """Seed 0 is solved in two steps; the others never end."""

    def reset(self, *, seed=None, options=None):
        self.first = seed == 0
        return super().reset(seed=seed)

    def step(self, action):
        over = super().step(action)[2] and self.first
        return "done", 0.0, over, False, {"success": True} if over else {}


def test_episodes_that_were_cut_are_no_failures(tmp_path, capsys):
    argv = ["run", "--env", "tests.test_run:Endless", "--policy", "tests.test_run:Refunds", "--n", "4"]
    assert main([*argv, "--max-steps", "3", "--out", str(tmp_path / "o.jsonl")]) == 0
    assert "4 episodes, success 1.000; of 11 actions" in capsys.readouterr().out
    assert [t.outcome for t in read_jsonl(tmp_path / "o.jsonl")].count(None) == 3


def test_run_without_a_run(tmp_path, capsys):
    argv = ["run", "--env", ENV, "--policy", "tests.test_run:Refunds", "--out", str(tmp_path / "o.jsonl")]
    assert main([*argv, "--like", str(tmp_path)]) == 2
    assert "holds no reward.json" in capsys.readouterr().err


def test_a_served_prm_trains_like_the_same_one_here(base, prm, tmp_path):
    """`--prm URL`: the reward of each step crosses the network and nothing else changes."""
    more = ["--eval-episodes", "0", "--seed", "3"]
    with running(app(PRM.load(prm), ServeConfig())) as url:
        assert main(ppo(base, tmp_path / "far", "--prm", url, *more)) == 0
    assert main(ppo(base, tmp_path / "near", "--prm", prm, *more)) == 0
    far, near = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("far", "near"))
    far, near = json.loads(far), json.loads(near)
    assert near["reward_process"] != 0
    for name in ("reward", "reward_process", "score_success", "score_failure", "value_loss", "entropy"):
        assert far[name] == pytest.approx(near[name], abs=1e-5), name
    frozen = [json.loads((tmp_path / name / "reward.json").read_text()) for name in ("far", "near")]
    assert frozen[0]["prm_fingerprint"] == frozen[1]["prm_fingerprint"] and frozen[0]["prm"] == url


def test_the_loop_closes(base, prm, tmp_path):
    """audit.jsonl -> labels -> distill: what training found is labelled again, and refreshes the PRM."""
    argv = ppo(base, tmp_path / "run", "--eval-episodes", "0", "--process-weight", "0", "--audit-every", "1")
    assert main(argv) == 0
    audit = tmp_path / "run" / "audit.jsonl"
    found = read_jsonl(audit, Trajectory)
    assert found
    rows = [StepLabel(t.id, i, i % 2, "human:ana") for t in found for i in range(len(t.steps))]
    append_jsonl(tmp_path / "l.jsonl", rows)
    argv = ["distill", str(audit), str(tmp_path / "l.jsonl"), "--from", prm, "--out", str(tmp_path / "prm")]
    assert main([*argv, "--epochs", "1", "--holdout", "0", "--calibration", "none"]) == 0
    assert PRM.load(tmp_path / "prm").score(found) != PRM.load(prm).score(found)
