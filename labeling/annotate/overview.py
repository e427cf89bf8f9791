"""The agreement page, a Gradio app of figures: progress, agreement, gold scores. No agent's text goes through it.

Gradio takes seconds to import, so it is loaded at the first visit: labels are taken a second after the start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import Receive, Scope, Send

from labeling.annotate import review
from labeling.annotate.assign import Plan
from labeling.annotate.store import PROVENANCES, Store

PATH = "/agreement"
TABLES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "pairs": (
        "Pairs of people, on the steps that both rated",
        (
            ("a", "One"),
            ("b", "The other"),
            ("steps", "Steps"),
            ("agree", "Same rating"),
            ("kappa", "Cohen's kappa"),
            ("trajectories", "Trajectories"),
            ("first_error", "Same first error"),
            ("within_one", "Within one step"),
        ),
    ),
    "error_types": (
        "Error types, over all pairs",
        (
            ("type", "Type"),
            ("steps", "Named by either"),
            ("both", "Named by both"),
            ("agree", "Agreement"),
            ("kappa", "Cohen's kappa"),
        ),
    ),
    "gold": (
        "Against the known answers",
        (
            ("person", "Person"),
            ("steps", "Steps"),
            ("agree", "Right"),
            ("kappa", "Cohen's kappa"),
            ("trajectories", "Trajectories"),
            ("first_error", "First error right"),
            ("within_one", "Within one step"),
        ),
    ),
    "model": (
        "Against the model, where its opinion was shown and where it was withheld (blind)",
        (
            ("person", "Person"),
            ("assist", "Opinion"),
            ("steps", "Steps"),
            ("agree", "Same rating"),
            ("kappa", "Cohen's kappa"),
            ("first_error", "Same first error"),
            ("within_one", "Within one step"),
        ),
    ),
    "progress": (
        "Progress",
        (
            ("person", "Person"),
            ("submitted", "Submitted"),
            ("open", "Begun"),
            ("skipped", "Skipped"),
            ("labels", "Steps rated"),
            ("total", "Trajectories in the file"),
        ),
    ),
}
CSS = """
.gradio-container { max-width: 68rem !important; margin: 0 auto !important; }
.prm-figures table { border-collapse: collapse; width: 100%; margin: .2rem 0 1.6rem; }
.prm-figures caption { text-align: left; font-weight: 600; padding: .3rem 0; color: var(--body-text-color); }
.prm-figures th, .prm-figures td { padding: .35rem .8rem .35rem 0; text-align: left; color: var(--body-text-color);
  border-bottom: 1px solid var(--border-color-primary); font-variant-numeric: tabular-nums; }
.prm-figures p { margin: .2rem 0 1rem; color: var(--body-text-color); }
.prm-links a { color: var(--body-text-color); text-decoration: underline; margin-right: 1.2rem; }
"""
DRAW = """
function draw() {
  const root = element.querySelector('.prm-figures');
  const cell = (tag, text, attributes) => {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    return made;
  };
  root.replaceChildren();
  const shown = props.value || {lines: [], tables: []};
  for (const line of shown.lines) root.append(cell('p', line));
  for (const table of shown.tables) {
    const made = document.createElement('table'), head = document.createElement('tr');
    made.append(cell('caption', table.title));
    for (const name of table.columns) head.append(cell('th', name, {scope: 'col'}));
    made.append(head);
    for (const row of table.rows) {
      const line = document.createElement('tr');
      row.forEach((text, i) => line.append(i ? cell('td', text) : cell('th', text, {scope: 'row'})));
      made.append(line);
    }
    root.append(made);
  }
}
draw();
watch('value', draw);
"""
HEAD = '<meta name="robots" content="noindex">'


def figures(store: Store, plan: Plan, provenance: Sequence[str]) -> dict[str, Any]:
    """The report as lines and tables of texts; a figure that is not defined is a dash."""
    found = review.report(store, plan, provenance)
    lines = [
        f"Krippendorff's alpha (ordinal, everyone): {_shown(found['alpha'])}",
        f"Steps on which people disagree: {found['disagreements']}",
    ]
    tables = [
        {
            "title": title,
            "columns": [name for _, name in columns],
            "rows": [[_shown(row[key]) for key, _ in columns] for row in found[part]],
        }
        for part, (title, columns) in TABLES.items()
        if found[part]
    ]
    return {"lines": lines, "tables": tables}


def blocks(store: Store, plan: Plan) -> Any:
    """The page as `gr.Blocks`."""
    import gradio as gr

    with gr.Blocks(title="Agreement · prm annotate", analytics_enabled=False, fill_width=False) as page:
        gr.HTML(
            html_template='<h1>Agreement</h1><p class="prm-links"><a href="/">Label</a>'
            '<a href="/adjudicate">Adjudicate</a><a href="/api/export">Export labels</a>'
            '<a href="/api/audit">Export the audit trail</a></p>',
            apply_default_css=True,
        )
        which = gr.CheckboxGroup(
            list(PROVENANCES), value=list(PROVENANCES), label="Labels that came about so", elem_id="provenance"
        )
        shown = gr.HTML(
            value={"lines": [], "tables": []},
            html_template='<div class="prm-figures" role="region" aria-label="Figures" aria-live="polite"></div>',
            js_on_load=DRAW,
            apply_default_css=False,
        )
        again = gr.Button("Count again")

        def count(chosen: list[str]) -> dict[str, Any]:
            return figures(store, plan, chosen)

        for trigger in (page.load, which.change, again.click):
            trigger(count, which, shown, api_visibility="private", show_progress="hidden", concurrency_limit=None)
    return page


class Overview:
    """An ASGI application that becomes the Gradio app at its first visit, for those who may see it."""

    def __init__(self, store: Store, plan: Plan, allowed: Callable[[Request], bool]) -> None:
        self._store = store
        self._plan = plan
        self._allowed = allowed
        self._loading = asyncio.Lock()
        self._app: FastAPI | None = None
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        path = scope["path"]
        if not self._allowed(request):
            page = scope["method"] == "GET" and path.rstrip("/") == PATH
            refusal = RedirectResponse("/", 303) if page else PlainTextResponse("this page is for reviewers\n", 403)
            await refusal(scope, receive, send)
            return
        if any(part in path for part in ("/upload", "/file", "/proxy", "/deep_link", "/component_server")):
            await PlainTextResponse("not found\n", 404)(scope, receive, send)
            return
        async with self._loading:
            if self._app is None:
                await self._load()
        assert self._app is not None
        # the path as the visitor typed it: Gradio is mounted there in an application of its own
        await self._app({**scope, "root_path": "", "app": self._app}, receive, send)

    async def stop(self) -> None:
        """End what Gradio keeps running."""
        if self._running:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running

    async def _load(self) -> None:
        await asyncio.to_thread(__import__, "gradio")
        import gradio as gr

        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        own = ["system-ui", "sans-serif"]  # nothing is fetched from elsewhere
        theme = gr.themes.Default(primary_hue="blue", font=own, font_mono=["ui-monospace", "monospace"])
        gr.mount_gradio_app(
            app,
            blocks(self._store, self._plan),
            path=PATH,
            footer_links=[],
            run_history=False,
            show_error=False,
            ssr_mode=False,
            theme=theme,
            css=CSS,
            head=HEAD,
        )
        ready = asyncio.Event()

        async def hold() -> None:
            async with app.router.lifespan_context(app):
                ready.set()
                await asyncio.Event().wait()

        self._running = asyncio.create_task(hold())
        await ready.wait()
        self._app = app


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
