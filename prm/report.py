"""Self-contained HTML pages: no script, no outside file, every text escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from prm.records import Trajectory

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1a1c20, #e6e7ea); --soft: light-dark(#5a6069, #a4abb6);
  --line: light-dark(#d9dce1, #3a3f47); --card: light-dark(#f6f7f9, #22262c); --page: light-dark(#ffffff, #17191d); }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .3rem .9rem .3rem 0; }
th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line); }
td.number { font-variant-numeric: tabular-nums; text-align: right; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.trajectory { border: 1px solid var(--line); border-radius: .5rem; margin: 1rem 0; overflow: hidden; }
.trajectory > p { margin: 0; padding: .6rem .9rem; background: var(--card); }
.step { border-left: .5rem solid var(--line); padding: .5rem .9rem; border-top: 1px solid var(--line); }
.step b { float: right; font-variant-numeric: tabular-nums; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.45 ui-monospace, monospace; }
pre.observation { color: var(--soft); }
"""
COLOURS = ("#2f6fde", "#c2571a", "#2c8a57", "#8a4fc4", "#b8324f")


def page(title: str, *parts: str) -> str:
    """A whole page around parts that are HTML already."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{text(title)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n'
        f"<body><h1>{text(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """A heading and what belongs below it."""
    return f"<section><h2>{text(heading)}</h2>\n" + "\n".join(parts) + "</section>"


def paragraph(words: str) -> str:
    return f"<p>{text(words)}</p>"


def table(header: Sequence[str], rows: Sequence[Sequence[str | float | None]]) -> str:
    """A table; numbers are right-aligned with three digits after the point, None is a dash."""

    def cell(value: str | float | None) -> str:
        if value is None:
            return '<td class="number">–</td>'
        return f"<td>{text(value)}</td>" if isinstance(value, str) else f'<td class="number">{_number(value)}</td>'

    head = "".join(f"<th>{text(name)}</th>" for name in header)
    body = "\n".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str, y_range: tuple[float, float] | None
) -> str:
    """Lines of (x, y) points as an inline SVG; points that are not finite are left out."""
    clean = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in series.items()}
    xs = [x for points in clean.values() for x, _ in points]
    ys = [y for points in clean.values() for _, y in points]
    if not xs:
        return paragraph("No points to draw.")
    low_x, high_x = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    low_y, high_y = y_range or (min(ys), max(ys) if max(ys) > min(ys) else min(ys) + 1)
    left, top, width, height = 48, 12, 640, 240

    def place(x: float, y: float) -> str:
        across = left + (x - low_x) / (high_x - low_x) * width
        return f"{across:.1f},{top + (high_y - y) / (high_y - low_y) * height:.1f}"

    parts = []
    for i in range(5):
        y = low_y + (high_y - low_y) * i / 4
        down = top + height - height * i / 4
        parts.append(f'<path d="M{left} {down:.1f}h{width}" stroke="currentColor" opacity=".12"/>')
        parts.append(f'<text x="{left - 6}" y="{down + 4:.1f}" text-anchor="end">{y:.2g}</text>')
        x = low_x + (high_x - low_x) * i / 4
        across = left + width * i / 4
        parts.append(f'<text x="{across:.1f}" y="{top + height + 18}" text-anchor="middle">{x:.4g}</text>')
    for i, (name, points) in enumerate(clean.items()):
        colour = COLOURS[i % len(COLOURS)]
        line = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = top + 14 + 18 * i
        parts.append(f'<rect x="{left + width + 16}" y="{y - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + width + 36}" y="{y - 3}">{text(name)}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">{text(x_label)}</text>')
    label = text(f"{y_label} over {x_label}: {', '.join(clean)}")
    return f'<svg viewBox="0 0 880 300" role="img" aria-label="{label}">' + "".join(parts) + "</svg>"


def trajectory(record: Trajectory, scores: Sequence[float | None], heading: str = "") -> str:
    """A trajectory with each step's edge coloured by its score, from red (0) to green (1); grey where there is none.

    Raises ValueError where there is not one score (or None) a step.
    """
    outcome = "unknown" if record.outcome is None else f"{record.outcome:g}"
    parts = [f'<div class="trajectory"><p><strong>{text(heading or record.id)}</strong> · outcome {outcome}</p>']
    parts.append(f'<div class="step"><pre>{text(record.task)}</pre></div>')
    for step, score in zip(record.steps, scores, strict=True):
        shown = "–" if score is None else f"{score:.2f}"
        colour = "" if score is None else f' style="border-left-color:{score_colour(score)}"'
        answer = f'<pre class="observation">{text(step.observation)}</pre>' if step.observation else ""
        parts.append(f'<div class="step"{colour}><b>{shown}</b><pre>{text(step.action)}</pre>{answer}</div>')
    return "\n".join(parts) + "</div>"


def score_colour(score: float) -> str:
    """From red (0) by amber to green (1), as a CSS colour."""
    return f"hsl({round(130 * score)} 65% 42%)"


def text(words: str) -> str:
    """Outside text, made safe and exact: control and direction characters are shown as escapes."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in words))


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) > 255 else f"\\x{ord(character):02x}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
