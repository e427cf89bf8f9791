"""Tables and outside text as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def plain(text: str) -> str:
    """Outside text on one line of Markdown, as text."""
    return "".join("\\" + c if c in "\\`*_{}[]<>#|!" else c for c in " ".join(text.split()))


def shown(value: str | float | None) -> str:
    """A cell: text as text, a number with four digits, None as a dash."""
    if value is None:
        return "–"
    return plain(value) if isinstance(value, str) else str(value) if isinstance(value, int) else f"{value:.4f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str | float | None]]) -> list[str]:
    """The lines of a table."""
    lines = ["| " + " | ".join(map(shown, header)) + " |", "|" + " - |" * len(header)]
    return lines + ["| " + " | ".join(map(shown, row)) + " |" for row in rows]
