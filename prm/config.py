"""Options: a frozen dataclass beside the function that it configures, read from flags and from a YAML or TOML file.

A config is declared once, with `option` for each field, and `parse` makes the command's parser of it: `--config FILE`
gives values, flags win, and `save` writes what was resolved beside the product, in a form that `--config` takes again.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prm.errors import UsageError


def option(default: Any, help: str, *, choices: Sequence[str] | None = None) -> Any:
    """A dataclass field with a default and one help line; the flag is the field's name with dashes."""
    metadata = {"help": help, "choices": choices}
    if isinstance(default, list | dict | set):
        raise TypeError("a default must be immutable")
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Positional:
    """A positional argument of a command; `many` takes one or more, `optional` none or one."""

    name: str
    help: str
    many: bool = False
    optional: bool = False


def parse(
    command: str, description: str, positionals: Sequence[Positional], configs: Sequence[type], argv: Sequence[str]
) -> tuple[Any, ...]:
    """Parse a command's arguments.

    Args:
        command: as typed after `prm`.
        positionals: what stands without a flag.
        configs: dataclasses whose fields become flags; no field name may occur twice.
        argv: the arguments after the command.

    Returns:
        A namespace of the positionals, then one instance of each config.

    Raises:
        UsageError: an unknown key in the file, a value of the wrong type, a missing required option (default `...`).
        SystemExit: as argparse does, after `--help` (0) or a wrong flag (2).
    """
    parser = argparse.ArgumentParser(f"prm {command}", description=description, allow_abbrev=False)
    for p in positionals:
        nargs: dict[str, Any] = {"nargs": "+"} if p.many else {"nargs": "?"} if p.optional else {}
        parser.add_argument(p.name, help=p.help, metavar=p.name.upper(), **nargs)
    parser.add_argument("--config", metavar="FILE", help="read options from this YAML or TOML file; flags win")
    known: dict[str, tuple[type, dataclasses.Field[Any], Any]] = {}
    for config in configs:
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.name in known:
                raise TypeError(f"{field.name} is declared by {known[field.name][0].__name__} and {config.__name__}")
            known[field.name] = (config, field, hints[field.name])
            _add_flag(parser, field, hints[field.name])
    namespace = parser.parse_args(argv)
    values = _from_file(namespace.config, known) if namespace.config else {}
    values |= {k: tuple(v) if isinstance(v, list) else v for k, v in vars(namespace).items() if k in known}
    for name, (_, field, _hint) in known.items():
        if field.default is ... and name not in values:
            raise UsageError(f"prm {command}: --{name.replace('_', '-')} is required")
    places = argparse.Namespace(**{p.name: getattr(namespace, p.name) for p in positionals})
    made = (config(**{k: v for k, v in values.items() if known[k][0] is config}) for config in configs)
    return (places, *made)


def save(product: str | os.PathLike[str], command: str, *configs: Any, **more: Any) -> Path:
    """Write the resolved options beside a product: `FILE.config.yaml`, or `DIR/COMMAND.config.yaml`."""
    import yaml

    path = Path(product)
    target = path / f"{command}.config.yaml" if path.is_dir() else path.with_name(path.name + ".config.yaml")
    values: dict[str, Any] = {}
    for config in configs:
        values |= {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}
    note = f"# prm {command} " + " ".join(f"{k}={v}" for k, v in more.items()) + "\n"
    write_text(target, note + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return target


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all (a temporary file, then a rename)."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, target)


def progress(total: int | None, what: str, unit: str = "it", initial: int = 0) -> Any:
    """A tqdm bar on stderr, silent when stderr is no terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, initial=initial, disable=not sys.stderr.isatty(), leave=False)


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    kind, many = _kind(hint)
    shown = "" if field.default in (None, ..., ()) else f" (default: {_shown(field.default)})"
    if field.default is ...:
        shown = " (required)"
    flag = "--" + field.name.rstrip("_").replace("_", "-")  # a field named like a keyword ends in _
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": (field.metadata["help"] + shown).replace("%", "%%")}
    common["dest"] = field.name
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        return
    metavar = {int: "N", float: "X"}.get(kind, field.name.rsplit("_", 1)[-1].upper())
    if field.metadata["choices"]:
        common["choices"] = list(field.metadata["choices"])
    else:
        common["metavar"] = metavar
    if many:
        common["nargs"] = "+"
    parser.add_argument(flag, type=_number if kind is float else kind, **common)


def _from_file(path: str, known: Mapping[str, tuple[type, dataclasses.Field[Any], Any]]) -> dict[str, Any]:
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    if file.suffix == ".toml":
        import tomllib

        try:
            loaded: Any = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path}: not TOML: {error}") from None
    else:
        import yaml

        try:
            loaded = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: expected options, one a line (name: value)")
    values = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        name = f"{name}_" if name not in known and f"{name}_" in known else name
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(f"{path}: unknown option {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        values[name] = _checked(f"{path}: {name}", value, known[name])
    return values


EXPONENT = re.compile(r"[+-]?[0-9]+[eE][+-]?[0-9]+")


def _checked(where: str, value: Any, known: tuple[type, dataclasses.Field[Any], Any]) -> Any:
    _, field, hint = known
    kind, many = _kind(hint)
    if value is None and field.default is None:
        return None
    items = value if many and isinstance(value, list) else [value]
    # YAML 1.1 takes 1e-6 for a text, as it has no point.
    items = [float(i) if kind is float and isinstance(i, str) and EXPONENT.fullmatch(i) else i for i in items]
    for item in items:
        number = kind is float and isinstance(item, int | float) and not isinstance(item, bool)
        exact = isinstance(item, kind) and (kind is bool or not isinstance(item, bool))
        if not (number or exact) or (kind is float and math.isnan(item)):
            raise UsageError(f"{where}: expected {kind.__name__}, got {value!r}")
        if field.metadata["choices"] and item not in field.metadata["choices"]:
            raise UsageError(f"{where}: expected one of {', '.join(field.metadata['choices'])}, got {item!r}")
    items = [float(i) if kind is float else i for i in items]
    return tuple(items) if many else items[0]


def _number(text: str) -> float:
    """A flag's number. Not-a-number passes every comparison that would refuse it, so it ends here."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value


def _kind(hint: Any) -> tuple[type, bool]:
    """(element type, takes several) of an annotation: T, T | None, tuple[T, ...]."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
