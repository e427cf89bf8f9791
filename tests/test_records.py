"""Records and JSON Lines: ids follow the text, bad lines name themselves, crashes and many writers lose nothing."""

import json
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prm import DataError, Step, StepLabel, Trajectory, append_jsonl, read_jsonl

text = st.text(st.characters())  # lone surrogates included
trajectories = st.builds(
    Trajectory,
    text,
    st.lists(st.builds(Step, text, text), max_size=4),
    st.none() | st.floats(0, 1),
    st.dictionaries(text, st.none() | st.integers() | text, max_size=2),
)
labels = st.builds(
    StepLabel,
    trajectory_id=st.text(min_size=1),
    step=st.integers(0, 9),
    score=st.floats(0, 1),
    source=st.sampled_from(["human:ana", "judge:m", "mc:p"]),
    weight=st.floats(0.001, 100),
    note=text,
)


@given(st.lists(trajectories | labels, min_size=1, max_size=5))
def test_records_survive_the_file(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("jsonl") / "records.jsonl"
    assert append_jsonl(path, records) == len(records)
    assert read_jsonl(path) == records


def test_id_follows_task_and_steps_alone():
    one = Trajectory("t", [Step("a", "b")], 1.0, {"seed": 1})
    assert one.id == Trajectory("t", (Step("a", "b"),)).id
    assert one.id != Trajectory("t", [Step("ab", "")]).id
    assert one.id != Trajectory("t", [Step("a", "b"), Step("", "")]).id
    with pytest.raises(DataError, match="the text was changed"):
        Trajectory.from_dict({**one.to_dict(), "task": "changed"})


def test_id_is_the_same_in_another_process():
    code = "from prm import Step, Trajectory; print(Trajectory('t\\ud800é', [Step('a', 'b')]).id)"
    env = {**os.environ, "PYTHONHASHSEED": "99"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
    assert out.strip() == Trajectory("t\ud800é", [Step("a", "b")]).id


GOOD = {"trajectory_id": "x", "step": 0, "score": 1, "source": "human:ana"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**GOOD, "score": 2}, r"score must lie in \[0, 1\], got 2"),
        ({**GOOD, "score": "1"}, "score must be a number, got '1'"),
        ({**GOOD, "score": 10**400}, r"score must lie in \[0, 1\], got inf"),
        ({**GOOD, "score": None}, "score must be a number, got None"),
        ({**GOOD, "step": -1}, "step must be an integer >= 0, got -1"),
        ({**GOOD, "step": 1.5}, "step must be an integer"),
        ({**GOOD, "step": True}, "step must be an integer"),
        ({**GOOD, "weight": 0}, "weight must be > 0"),
        ({**GOOD, "source": ""}, "source must not be empty"),
        ({**GOOD, "reason": "x"}, "unknown field 'reason'"),
        ({"step": 0, "score": 1, "trajectory_id": "x"}, "missing source"),
        ({"task": "t", "steps": [{"observation": "o"}]}, "step 0 must be an object with an action"),
        ({"task": "t", "steps": [{"action": None}]}, "step 0: action must be a string, got None"),
        ({"task": "t", "steps": {"action": "a"}}, "steps must be a list"),
        ({"task": 1, "steps": []}, "task must be a string, got 1"),
        ({"task": "t", "steps": [], "outcome": 1.5}, r"outcome must lie in \[0, 1\], got 1.5"),
        ([1, 2], "expected a JSON object"),
    ],
)
def test_a_bad_line_names_file_line_and_reason(tmp_path, row, says):
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"labels\.jsonl:3: .*" + says):
        read_jsonl(path)


def test_nan_is_no_score(tmp_path):
    path = tmp_path / "labels.jsonl"
    path.write_text('{"trajectory_id": "x", "step": 0, "score": NaN, "source": "s"}\n')
    with pytest.raises(DataError, match=r"labels\.jsonl:1: NaN is no JSON number"):
        read_jsonl(path)
    with pytest.raises(DataError, match="got nan"):
        StepLabel("x", 0, math.nan, "s")


def test_skip_bad_counts_and_goes_on(tmp_path, capsys):
    path = tmp_path / "labels.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n{oops}\n\xff\n" + json.dumps(GOOD).encode())
    assert len(read_jsonl(path, StepLabel, skip_bad=True)) == 2
    assert "skipped 2 bad line(s), the first" in capsys.readouterr().err


def test_wrong_kind_of_file_says_so(tmp_path):
    path = tmp_path / "t.jsonl"
    append_jsonl(path, Trajectory("t", []))
    with pytest.raises(DataError, match=r"t\.jsonl:1: this is a trajectory, expected a step label"):
        read_jsonl(path, StepLabel)
    with pytest.raises(DataError, match="no such file"):
        read_jsonl(tmp_path / "none.jsonl")


@pytest.mark.parametrize("keep", [1, 10, 40])
def test_a_torn_last_line_is_named_then_mended(tmp_path, capsys, keep):
    path = tmp_path / "labels.jsonl"
    label = StepLabel.from_dict(GOOD)
    append_jsonl(path, [label, label])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:keep])
    with pytest.raises(DataError, match=r"labels\.jsonl:3: the last line is torn"):
        read_jsonl(path)
    assert read_jsonl(path, skip_bad=True) == [label, label]
    append_jsonl(path, label)
    assert path.read_bytes() == whole + whole[: len(whole) // 2]
    assert "removed a torn last line" in capsys.readouterr().err


def test_a_missing_last_newline_costs_nothing(tmp_path):
    path = tmp_path / "labels.jsonl"
    label = StepLabel.from_dict(GOOD)
    append_jsonl(path, label)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    append_jsonl(path, label)
    assert read_jsonl(path) == [label, label]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "labels.jsonl"
    label = StepLabel.from_dict(GOOD)
    append_jsonl(path, label)
    before = path.read_bytes()
    real = os.write

    def short(handle, data):
        if len(data) < 200:
            raise OSError(28, "No space left on device")
        return real(handle, data[:50])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(OSError, match="No space left"):
        append_jsonl(path, [label] * 3)
    assert path.read_bytes() == before


def test_several_processes_append_to_one_file(tmp_path):
    path = tmp_path / "labels.jsonl"
    code = (
        "import sys; from prm import StepLabel, append_jsonl\n"
        "for i in range(50): append_jsonl(sys.argv[1], StepLabel('x', i, 1, 'human:' + sys.argv[2], note='n' * 5000))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "ab"]
    assert [p.wait() for p in running] == [0, 0]
    assert sorted((r.source, r.step) for r in read_jsonl(path)) == [(f"human:{n}", i) for n in "ab" for i in range(50)]


def test_meta_is_a_copy_of_json_values():
    meta = {"list": [1]}
    record = Trajectory("t", [], meta=meta)
    meta["list"].append(2)
    assert record.meta == {"list": [1]}
    with pytest.raises(DataError, match="meta must hold JSON values only"):
        Trajectory("t", [], meta={"x": object()})


@pytest.mark.parametrize("depth", [99, 100, 400, 700, 900, 5000])
def test_meta_nested_too_deeply_is_one_line(tmp_path, depth):
    """Also where the parser still takes it: copying and writing it would not."""
    (tmp_path / "t.jsonl").write_text(
        '{"task": "t", "steps": [{"action": "a"}], "meta": {"x": ' + "[" * depth + "]" * depth + "}}\n"
    )
    if depth < 100:
        (t,) = read_jsonl(tmp_path / "t.jsonl", Trajectory)
        append_jsonl(tmp_path / "again.jsonl", [t])
        assert read_jsonl(tmp_path / "again.jsonl") == [t]
    else:
        with pytest.raises(DataError, match=r"t\.jsonl:1: .*nested (too deeply|deeper than 100 levels)"):
            read_jsonl(tmp_path / "t.jsonl", Trajectory)
