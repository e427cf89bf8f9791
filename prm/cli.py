"""The command line: one function a command. This is the one file that may import the wings, and only inside functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prm.config import Positional, option, parse, save
from prm.errors import DataError, PrmError, UsageError
from prm.records import Trajectory, read_jsonl


def main(argv: Sequence[str] | None = None) -> int:
    """Run `prm COMMAND ...`; the exit status. Bad usage and bad data print one line on stderr and give 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        from importlib.metadata import version

        print(version("prm-toolkit"))
        return 0
    command = argv[0]
    if command not in COMMANDS:
        print(f"prm: unknown command {command!r}; prm --help lists them", file=sys.stderr)
        return 2
    try:
        return COMMANDS[command](argv[1:]) or 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    except (PrmError, OSError) as error:
        print(f"prm {command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"prm {command}: interrupted; what is written is whole, the same command goes on", file=sys.stderr)
        return 130


def usage() -> str:
    """The text of `prm --help`."""
    lines = [f"  {name:<10} {(call.__doc__ or '').splitlines()[0]}" for name, call in COMMANDS.items()]
    return "\n".join(
        ["usage: prm COMMAND ...   (prm COMMAND --help for its options)", "", "commands:", *lines]
    )


def convert(argv: list[str]) -> int:
    """read what people have (chats, reasoning text, data sets) as trajectories or labels"""
    from dataclasses import dataclass

    from prm import formats
    from prm.config import write_text
    from prm.records import append_jsonl, dump_json

    @dataclass(frozen=True)
    class ConvertConfig:
        out: str = option(..., "write here; must not exist yet")
        to: str = option("trajectories", "what to write", choices=("trajectories", "labels", "trl"))
        kind: str = option("auto", "the format of IN: " + ", ".join(formats.KINDS))
        split: str | None = option(None, "how reasoning text becomes steps", choices=("blank-line", "line"))
        skip_bad: bool = option(False, "count bad rows and go on")

    where, config = parse("convert", convert.__doc__ or "", [Positional("in", "the file to read")], [ConvertConfig], argv)
    refuse_existing(config.out)
    converted = formats.convert(getattr(where, "in"), kind=config.kind, split=config.split, skip_bad=config.skip_bad)
    if config.to == "trl":
        rows, skipped = formats.to_trl(converted.trajectories, converted.labels)
        write_text(config.out, b"".join(dump_json(row) + b"\n" for row in rows).decode())
        written = len(rows)
        for reason, count in skipped.items():
            print(f"skipped {count}: {reason}", file=sys.stderr)
    else:
        written = append_jsonl(config.out, getattr(converted, config.to))
    print(converted.summary(), file=sys.stderr)
    if not written:
        raise DataError(f"nothing to write to {config.out}: IN holds no {config.to}")
    save(config.out, "convert", config)
    print(config.out)
    return 0


# --- shared by the commands ---------------------------------------------------------------------------------------------


def read_records(path: str, cls: type[Any], *, skip_bad: bool = False) -> list[Any]:
    """The records of an input file; one that holds none is an error."""
    records = read_jsonl(path, cls, skip_bad=skip_bad)
    if not records:
        raise DataError(f"{path}: holds no {'trajectory' if cls is Trajectory else 'label'}")
    return records


def refuse_existing(path: str) -> None:
    """Commands that write their product at once do not write over another."""
    if Path(path).exists():
        raise UsageError(f"{path} exists already; remove it or write elsewhere")


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "convert": convert,
}

if __name__ == "__main__":
    sys.exit(main())
