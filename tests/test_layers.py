"""The arrows between packages: the wings import `prm` and never each other; `prm` imports no wing, but for its CLI."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WINGS = {"labeling", "distill", "rl"}
FILES = sorted(p for top in ("prm", *WINGS) for p in (ROOT / top).rglob("*.py"))


def imported(tree: ast.AST) -> list[tuple[str, bool]]:
    """(top package, inside a function) of each import."""
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name.split(".")[0], id(node) in inner) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.append(((node.module or "").split(".")[0], id(node) in inner))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows(path):
    home = path.relative_to(ROOT).parts[0]
    for top, inside in imported(ast.parse(path.read_text())):
        if top in WINGS and top != home:
            assert path == ROOT / "prm" / "cli.py", f"{path.name} imports {top}"
            assert inside, f"cli.py imports {top} outside a function"


def test_it_looks_at_something():
    assert {p.relative_to(ROOT).parts[0] for p in FILES} == {"prm", *WINGS}
