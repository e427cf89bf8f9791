"""prm-toolkit: process reward models for LLM agents. The public surface; torch loads when it is used."""

from typing import TYPE_CHECKING, Any

from prm.errors import DataError, EnvError, ModelError, PrmError, ReplayError, UsageError
from prm.formats import convert
from prm.records import Step, StepLabel, Trajectory, append_jsonl, read_jsonl

if TYPE_CHECKING:
    from prm.model import PRM

__all__ = [
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


def __getattr__(name: str) -> Any:
    if name == "PRM":
        from prm.model import PRM

        return PRM
    raise AttributeError(f"module 'prm' has no attribute {name!r}")
