"""The read-only server of `prm show`: the view of the labelling page, with nothing to change."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from labeling.annotate.server import TYPES, Guard
from labeling.annotate.show import Shown
from prm.records import dump_json


def show_app(found: Shown) -> FastAPI:
    """The read-only server, for the loopback address."""
    folder = resources.files("labeling.annotate") / "static"
    files = {name: (folder / name).read_bytes() for name in ("show.html", "show.js", "view.js", "keys.js", "style.css")}
    sources = sorted({label.source for labels in found.at.values() for label in labels})
    app = FastAPI(title="prm show", docs_url=None, redoc_url=None, openapi_url=None)

    def answer(value: Any) -> Response:
        return Response(dump_json(value), media_type="application/json")

    @app.get("/")
    def page() -> Response:
        return Response(files["show.html"], media_type="text/html")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in files:
            return Response(status_code=404)
        return Response(files[name], media_type=TYPES[Path(name).suffix])

    @app.get("/api/about")
    def about() -> Response:
        numbers = {"count": len(found.trajectories), "labels": len(found.labels)}
        return answer({"name": found.name, "sources": sources, "notes": list(found.notes), **numbers})

    @app.get("/api/item/{index}")
    def item(index: int) -> Response:
        if not 0 <= index < len(found.trajectories):
            return Response(status_code=404)
        t = found.trajectories[index]
        own = [[label.to_dict() for label in found.at.get((t.id, k), ())] for k in range(len(t.steps))]
        return answer({**t.to_dict(), "labels": own})

    @app.get("/api/labels")
    def labels(request: Request) -> Response:
        first = request.query_params.get("from", "0")
        start = int(first) if first.isdecimal() else 0
        return answer([label.to_dict() for label in found.labels[start : start + 200]])

    app.add_middleware(Guard, local=True)
    return app
