"""The public names and how light they are to import."""

import subprocess
import sys

import pytest

import prm

HEAVY = ("torch", "transformers", "gradio", "openai", "datasets", "peft", "trl", "sklearn", "numpy", "yaml", "fastapi")


def test_the_names_are_pinned():
    assert prm.__all__ == [
        "PRM",
        "DataError",
        "EnvError",
        "ModelError",
        "PrmError",
        "ReplayError",
        "Step",
        "StepLabel",
        "Trajectory",
        "UsageError",
        "append_jsonl",
        "convert",
        "read_jsonl",
    ]
    for name in prm.__all__:
        assert getattr(prm, name) is not None


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("labeling.annotate", ["app"]),
        ("labeling.judge", ["judge"]),
        ("labeling.montecarlo", ["rollout_labels", "tree_labels"]),
        ("labeling.fuse", ["fuse"]),
        ("distill.train", ["distill"]),
        ("distill.evaluate", ["evaluate"]),
        ("rl.rollout", ["rollout"]),
        ("rl.ppo", ["train"]),
    ],
)
def test_the_wings_keep_their_names(module, names):
    import importlib

    for name in names:
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("code", ["import prm", "from prm.cli import main; main(['--help'])", "import prm.env"])
def test_no_heavy_import(code):
    check = f"{code}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_errors_are_one_tree():
    for error in (prm.DataError, prm.UsageError, prm.ModelError, prm.EnvError, prm.ReplayError):
        assert issubclass(error, prm.PrmError)
    assert issubclass(prm.DataError, ValueError)
