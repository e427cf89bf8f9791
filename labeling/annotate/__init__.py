"""Labels from people: a browser page that saves every key press at once, agreement, adjudication, and `prm show`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from prm.records import Trajectory

__all__ = ["app"]


def app(trajectories: Iterable[Trajectory], *, db: str, **options: Any) -> FastAPI:
    """The labelling server as an ASGI application; see `labeling.annotate.server.make_app` for the options."""
    from labeling.annotate.server import make_app

    return make_app(trajectories, db=db, **options)
