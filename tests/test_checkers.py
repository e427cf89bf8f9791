"""Final answers: found, compared, compared in a process that can be killed; and reasoning as an environment."""

import json
import time

import pytest

from labeling.checkers import Checker, exact, final_answer, judge, number, numeric
from labeling.draws import MonteCarloConfig
from labeling.montecarlo import rollout_labels
from labeling.processes import RemoteError
from labeling.reasoning import Reasoning
from prm.env import Action, Episode, check_env, replay
from prm.errors import DataError, EnvError, UsageError
from prm.records import Step, Trajectory

# --- P14 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gold", "verdict"),
    [
        (r"\boxed{\frac{1}{3}}", "1/2", "wrong"),
        (r"first \boxed{5}, no: \boxed{\frac{1}{2}}", "1/2", "right"),
        ("we try 1/2 then give up", "1/2", "no answer"),
        (r"\boxed{", "1/2", "no answer"),
        (r"\fbox{0.5}", "1/2", "right"),
        ("The answer is: −4", "-4", "right"),
        ("1,000", "1000", "right"),
        ("1000", "1,000", "right"),
        (r"\boxed{5}, or rather \boxed{\frac{1}{", "5", "no answer"),
        (r"so \boxed{\dfrac{\sqrt{2}}{2}} it is", r"\frac{\sqrt{2}}{2}", "right"),
        (r"it is \boxed{5}. The answer is as above.", "5", "right"),
        (r"it is \boxed{5}. Wait, the answer is 7.", "5", "wrong"),
        (r"the final answer is $\boxed{5}$.", "5", "right"),
        ("The answer is $18 per day.", "18", "right"),
        ("She makes 9 * 2 = $18.\n#### 18", "18", "right"),
        ("A: 26", "26", "right"),
        ("A: Janet has 3 ducks", "3", "no answer"),
        ("**Answer:** $70,000", "70000", "right"),
        ("The answer is Paris.", "paris", "right"),
        ("The answer is", "1", "no answer"),
        ("", "1", "no answer"),
        (r"\boxed{\{1, 2\}}", r"\{1,2\}", "right"),
        (r"\boxed 5.", "5", "right"),
    ],
)
def test_the_final_answer_decides(text, gold, verdict):
    assert judge(text, gold) == verdict


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("0.5", "1/2"),
        (r"\frac12", "0.5"),
        (r"1\frac{1}{2}", "3/2"),
        ("1 1/2", "1.5"),
        (r"-\frac{3}{4}", "−0.75"),
        ("50%", "1/2"),
        (r"50\%", "50"),
        ("x = 5", "5"),
        (r"10 \text{ cm}", "10"),
        ("42 apples", "42"),
        ("12,345,678", "12345678"),
        ("1{,}000", "1000"),
        (r"90^\circ", "90"),
        ("1e3", "1000"),
        (".5", "0.50"),
        ("4.", "4"),
        ("€1,000.50", "1000.5"),
    ],
)
def test_equal_numbers(answer, gold):
    assert numeric(answer, gold) and ("%" in answer or numeric(gold, answer))


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("1/3", "1/2"), ("4 or 5", "4"), ("1000", "10"), ("2^3", "2"), (r"2\sqrt{3}", "2"), (r"\frac{1}{0}", "0"),
     ("5", "-5"), ("1,00", "100"), ("five", "5"), ("0.333", "1/3")],
)  # fmt: skip
def test_other_numbers(answer, gold):
    assert not numeric(answer, gold)


def test_exact_and_odd_texts():
    assert exact(r"$\text{East}$", "east.") and not exact("0.5", "1/2")
    assert number("9" * 900) is not None and number("9" * 5000) is None and number("1e999999999") is None
    assert final_answer("\\boxed{" * 2000) is None
    started = time.monotonic()
    assert final_answer("the answer is " * 20000) is not None and number("(" * 50000) is None
    assert time.monotonic() - started < 2


def test_math_verify_where_it_is_installed():
    pytest.importorskip("math_verify")
    check = Checker("math-verify")
    assert check(r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}") and not check("x+1", "x+2")


# --- a process that can be killed -------------------------------------------------------------------------------------


def slow(answer, gold):
    if answer == "hang":
        time.sleep(60)
    if answer == "raise":
        raise ValueError("no such thing")
    return answer == gold


def test_a_checker_that_hangs_or_raises_is_an_error_and_the_next_call_works():
    check = Checker("tests.test_checkers:slow", timeout=0.3)
    assert check("5", "5") and not check("6", "5")
    started = time.monotonic()
    with pytest.raises(RemoteError, match=r"no answer to check within 0.3 s; killed"):
        check("hang", "5")
    assert time.monotonic() - started < 3
    with pytest.raises(RemoteError, match="ValueError: no such thing"):
        check("raise", "5")
    assert check("5", "5")
    with pytest.raises(UsageError, match="expected exact, numeric, math-verify or module:attribute"):
        Checker("nothing")


# --- reasoning as an environment --------------------------------------------------------------------------------------

TASKS = [{"question": "1 + 1?", "answer": "2"}, {"question": "A half?", "answer": "it is a half\n#### 1/2"}]
HALF = {"task": "A half?\n", "answer": "1/2"}


def play(*pieces, **arguments):
    episode = Episode(Reasoning(TASKS, **arguments), 1)
    for piece in pieces:
        episode.step(Action(piece))
    return episode


def test_a_text_is_over_where_the_policy_ended_it():
    assert not play("Halve it.\n").done
    done = play("Halve one.\n", r"So \boxed{0.5}")
    assert done.outcome == 1 and done.history.task == "A half?\n" and done.infos[-1]["verdict"] == "right"
    assert play("Halve one.\n", "").infos[-1] == {"success": 0.0, "verdict": "no answer"}
    assert play("The answer is 1/3.\n", end_at_answer=True).infos[-1]["verdict"] == "wrong"
    with pytest.raises(EnvError, match="the text is over"):
        play("", "more")
    record = done.trajectory()
    assert replay(Reasoning(TASKS), record).done
    assert replay(Reasoning(), Trajectory(HALF["task"], record.steps, meta={"options": HALF})).outcome == 1


def test_tasks_come_from_rows_or_a_file(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*TASKS, {"problem": "3?", "answer": 3}]))
    made = Reasoning(str(path), prompt="Q: {question}\nA: ")
    assert [made.reset(seed=s)[0] for s in (0, 2, 3)] == ["Q: 1 + 1?\nA: ", "Q: 3?\nA: ", "Q: 1 + 1?\nA: "]
    assert {made.reset()[0] for _ in range(50)} == {made.reset(seed=s)[0] for s in range(3)}
    check_env(lambda: Reasoning(TASKS), ["so\n", "the answer is 2"])
    for text, says in (("{}", "expected a question and an answer"), ("[", "not JSON"), ("", "holds no task")):
        path.write_text(text)
        with pytest.raises(DataError, match=says):
            Reasoning(str(path))
    with pytest.raises(DataError, match="cannot be read"):
        Reasoning(str(tmp_path / "none.jsonl"))
    for arguments, says in (({"checker": "x"}, "checker must be"), ({"separator": ""}, "separator")):
        with pytest.raises(UsageError, match=says):
            Reasoning(TASKS, **arguments)


class Says:
    """Goes on with one of some texts, by its seed."""

    name = "says"

    def __init__(self, *texts):
        self.texts = texts

    def act(self, histories):
        return [Action(self.texts[h.seed % len(self.texts)]) for h in histories]


def labels(prefix, *texts, **arguments):
    one = Trajectory("A half?\n", [Step(piece) for piece in prefix], meta={"seed": 1})
    return rollout_labels([one], lambda: Reasoning(TASKS, **arguments), Says(*texts), MonteCarloConfig(k=16))


def test_an_answer_in_the_prefix_does_not_make_its_continuations_right():
    prefix = ["One, two.\n", "So the answer is 1/2.\n"]
    wrong = labels(prefix, "No: the answer is 1/3.", "No! The answer is 1/4.")
    assert [x.score for x in wrong] == [0, 0]
    silent = labels(prefix, "That is all.", "Done.", "No, the answer is 1/3.")
    assert silent[0].meta["no_answer"] > 0 and silent[0].weight == 16  # nothing was answered before: a failure
    last = silent[1]
    assert last.score == 0 and last.weight == 16 - last.meta["no_answer"] < 16  # says nothing about the prefix


def test_no_answer_is_counted_apart_from_wrong():
    (label,) = labels(["One, two.\n"], "We try 1/2 then give up.", r"So \boxed{1/2}.", r"So \boxed{1/3}")
    meta = label.meta
    assert 0 < meta["no_answer"] < 16 - meta["successes"] and label.weight == 16
    assert label.score == meta["successes"] / 16


def test_a_checker_that_hangs_costs_one_continuation():
    texts = ("the answer is hang", "the answer is 1/2", "the answer is 1/2 ")
    (label,) = labels(["So\n"], *texts, checker="tests.test_checkers:slow", timeout=0.05)
    assert label.score == 1 and label.meta["errors"] == 16 - label.weight > 0
