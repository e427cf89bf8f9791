"""Options: flags win over files, mistakes are named, and what was resolved can be given again."""

from dataclasses import dataclass

import pytest

from prm.config import Positional, option, parse, save, write_text
from prm.errors import UsageError


@dataclass(frozen=True)
class Config:
    out: str = option(..., "where")
    rate: float = option(1e-6, "speed")
    count: int | None = option(None, "how many")
    names: tuple[str, ...] = option((), "who")
    fast: bool = option(False, "hurry")
    kind: str = option("a", "which", choices=("a", "b"))


def run(*argv, places=()):
    return parse("try", "tries", places, [Config], argv)[1]


@pytest.mark.parametrize(("name", "text"), [("c.yaml", "out: f\nrate: 2\nfast: true\nnames: [x, y]\n"),
                                            ("c.toml", 'out = "f"\nrate = 2\nfast = true\nnames = ["x", "y"]\n')])
def test_flags_win_over_the_file(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    assert run("--config", str(file)) == Config("f", 2.0, None, ("x", "y"), True, "a")
    assert run("--config", str(file), "--no-fast", "--names", "z", "--out", "g") == Config("g", 2.0, None, ("z",))


def test_what_was_resolved_can_be_given_again(tmp_path):
    config = run("--out", "ö", "--rate", "-0.5", "--count", "3", "--names", "a", "b", "--fast", "--kind", "b")
    file = save(tmp_path / "product.jsonl", "try", config)
    assert file.name == "product.jsonl.config.yaml"
    assert run("--config", str(file)) == config
    assert save(tmp_path, "try", config).name == "try.config.yaml"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("out: f\nrats: 1", "unknown option 'rats'; did you mean 'rate'"),
        ("out: f\nrate: fast", "rate: expected float, got 'fast'"),
        ("out: f\nrate: .nan", "rate: expected float, got nan"),
        ("out: f\ncount: 1.5", "count: expected int, got 1.5"),
        ("out: f\ncount: true", "count: expected int, got True"),
        ("out: f\nkind: c", "kind: expected one of a, b, got 'c'"),
        ("- a", "expected options"),
        ("a: [", "not YAML"),
        ("rate: 1", "--out is required"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, says):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        run("--config", str(file))


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read"):
        run("--config", str(tmp_path / "none.yaml"))


def test_positionals(capsys):
    places, _ = parse("try", "tries", [Positional("one", "x"), Positional("rest", "y", many=True)], [Config],
                      ["a", "b", "c", "--out", "o"])
    assert (places.one, places.rest) == ("a", ["b", "c"])
    with pytest.raises(SystemExit):
        run("--help")
    shown = capsys.readouterr().out
    assert "speed (default: 1e-06)" in shown and "where (required)" in shown and "--no-fast" in shown


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "a" / "x.txt"
    write_text(target, "one")
    with pytest.raises(TypeError):
        write_text(target, None)
    assert target.read_text() == "one"


@pytest.mark.parametrize(("text", "rate"), [("1e-6", 1e-6), ("-2E+3", -2e3), ("1.5e-3", 1.5e-3), ("1e-6 ", 1e-6)])
def test_a_number_with_an_exponent_is_one_in_yaml(tmp_path, text, rate):
    file = tmp_path / "c.yaml"
    file.write_text(f"out: f\nrate: {text}\n")
    assert run("--config", str(file)).rate == rate
    file.write_text("out: f\ncount: 1e3\n")
    with pytest.raises(UsageError, match="count: expected int"):
        run("--config", str(file))


@pytest.mark.parametrize("text", ["nan", "NaN", "-nan", "fast", ""])
def test_a_flag_that_is_no_number_is_refused(capsys, text):
    with pytest.raises(SystemExit):
        run("--out", "f", f"--rate={text}")
    assert "argument --rate: expected a number" in capsys.readouterr().err
    assert run("--out", "f", "--rate", "inf").rate == float("inf")
