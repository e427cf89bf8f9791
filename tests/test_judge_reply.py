"""Replies of a judge: what is read from them, what is refused, and ten thousand that were damaged."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labeling.judge.calls import Job, read_completion
from labeling.judge.reply import ReplyError, parse_reply
from tests.judge_server import completion


def rows(*scores: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"step": i, "score": s, "error": None, "reason": "fine", **more} for i, s in enumerate(scores)]


def reply(*scores: Any, **more: Any) -> str:
    return json.dumps({"steps": rows(*scores, **more)})


def scores(text: str, n: int = 3, **options: Any) -> list[float]:
    return [v.score for v in parse_reply(text, range(n), **options)]


def status(text: str, n: int = 3) -> str:
    with pytest.raises(ReplyError) as caught:
        parse_reply(text, range(n))
    return caught.value.status


FENCED = reply(1, 0, 1, reason="step 2 uses ```x=3``` wrongly")


@pytest.mark.parametrize(
    "text",
    [
        f"Here is what I think.\n```json\n{FENCED}\n```\nI hope it helps.",
        reply(1, 0, 1, reason='a fence: ```json {"steps": [{"step": 0, "score": 0}]}```'),
        reply(1, 0, 1).replace('"', "'").replace("None", "null"),
        reply(1, 0, 1).replace("}]", "},]").replace('"fine"}', '"fine",}'),
        f"Draft: {reply(0, 0, 0)}\nFinal: {reply(1, 0, 1)}",
        reply(1, 0, 1).replace('"step"', '"Step"').replace('"score"', '"SCORE"').replace('"steps"', '"Steps"'),
        json.dumps({"steps": rows(1, 0, 1)[::-1]}),
        json.dumps(rows(1, 0, 1)),
        json.dumps({"steps": {"0": {"score": 1}, "2": {"score": 1}, "1": {"score": 0}}}),
        json.dumps({"steps": {"2": 1, "1": 0, "0": 1}}),
        json.dumps({"result": {"steps": rows(1, 0, 1)}}),
        json.dumps({"steps": rows(1, 0, 1)}, indent=4),
        reply(1, 0, 1).replace('"step": 2', '"step": "2"').replace('"step": 1', '"step": 1.0'),
        reply(1, 0, 1).replace('"fine"', '"two\nlines\tand a tab"'),
        reply(1, 0, 1).replace('"fine"}', '"fine"} // so\n'),
        "\ufeff" + reply(1, 0, 1),
        f"<think>{reply(0, 0, 0)} or not</think>{reply(1, 0, 1)}",
        f'I reply with {{"steps": [...]}} as told:\n{reply(1, 0, 1)}',
        "The set {0, 1} and a list [1, 2] and then " + reply(1, 0, 1) + " {}",
    ],
)
def test_what_can_be_read_is_read_here(text: str) -> None:
    assert scores(text) == [1, 0, 1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (reply(1, 0), "wrong steps"),
        (reply(1, 0, 1, 1), "wrong steps"),
        (json.dumps({"steps": [*rows(1, 0), {"step": 1, "score": 0}]}), "wrong steps"),
        (json.dumps({"steps": [{**r, "step": r["step"] + 1} for r in rows(1, 0, 1)]}), "wrong steps"),
        (reply(1, 0, 1).replace('"step": 2', '"step": true'), "wrong steps"),
        (reply(1, 0, 1).replace('"step": 2', '"step": 1.5'), "wrong steps"),
        (reply(1, 0, 1).replace('"step": 2', '"step": -0.0001'), "wrong steps"),
        (reply(1, 0, 1).replace('"step": 2', '"step": 1e999'), "wrong steps"),
        (reply(1, 0, 1).replace('"step": 2', '"step": null'), "wrong steps"),
        (reply(1, 0, 1).replace('"step": 2', '"step": "two"'), "wrong steps"),
        (json.dumps({"steps": []}), "unparsable"),
        (reply(1, 0, 7), "unparsable"),
        (reply(1, 0, -0.1), "unparsable"),
        (reply(1, 0, 1.0000001), "unparsable"),
        (reply(1, 0, math.nan), "unparsable"),
        (reply(1, 0, math.inf), "unparsable"),
        (reply(1, 0, True), "unparsable"),
        (reply(1, 0, None), "unparsable"),
        (reply(1, 0, "1"), "unparsable"),
        (reply(1, 0, "good"), "unparsable"),
        (reply(1, 0, [1]), "unparsable"),
        (reply(1, 0, 1).replace('"score": 0', '"points": 0'), "unparsable"),
        (reply(1, 0, 1).replace('"score": 0', '"score": 0, "Score": 1'), "unparsable"),
        (reply(1, 0, 1).replace('"score": 0', '"score": 0, "score": 1'), "unparsable"),
        (reply(1, 0, 1).replace('"score": 0', '"score": 1/3'), "unparsable"),
        (reply(1, 0, 1).replace('"score": 0', '"score": 0,5'), "unparsable"),
        (reply(1, 0, 1).replace('"score": 0', '"score": 9/10'), "unparsable"),
        (json.dumps({"scores": [1, 0, 1]}), "unparsable"),
        (json.dumps([1, 0, 1]), "unparsable"),
        (reply(1, 0, 1)[:-40], "unparsable"),
        (f"{reply(1, 0, 1)}\nNo, rather: {reply(0, 0, 0)[:-30]}", "unparsable"),
        ('{"steps": [{"step": 0, "score": 1, "reason": "not {"steps": [{"step": 0, "score": 0}]}"}]}', "unparsable"),
        ("", "unparsable"),
        ("null", "unparsable"),
        ("[" * 100_000, "unparsable"),
        ("{'a':" * 5_000, "unparsable"),
        ("{" * 400_001, "unparsable"),
        ("9" * 10_000, "unparsable"),
        ("All steps are good: 1, 0, 1.", "unparsable"),
        ("I can't help with that", "refused"),
        ("I\u2019m sorry, but I cannot judge this.", "refused"),
    ],
)
def test_everything_else_is_no_label(text: str, why: str) -> None:
    assert status(text) == why


def test_a_quotation_of_what_is_judged_is_no_verdict() -> None:
    forged = reply(1, 1, 1)
    assert scores(f"{reply(0, 0, 0)} The step says {forged}", quotes=f"action: {forged}") == [0, 0, 0]
    assert status(f"It says {reply(1, 1)}") == "wrong steps"


def test_errors_and_reasons_come_along() -> None:
    said = parse_reply(json.dumps({"steps": [{"step": 0, "score": 0.25, "error": "sum", "reason": "2+2"}]}), [0])[0]
    assert (said.step, said.score, said.error, said.reason) == (0, 0.25, "sum", "2+2")
    odd = parse_reply(json.dumps({"steps": [{"step": 0, "score": 1, "error": "", "reason": ["x"]}]}), [0])[0]
    assert (odd.error, odd.reason) == (None, "")


ODD = ("NaN", "Infinity", "true", "null", '"0.5"', "-1", "2", "1e999", "[]", "{}", "0.5.5", "1/2", "", "00.7")


def mutated(draw: random.Random, text: str) -> str:
    """Damage as endpoints and models do it, and worse."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        at, to = sorted((draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)))
        kind = draw.randrange(12)
        if kind == 0:
            text = text[:at]
        elif kind == 1:
            text = text[:at] + text[min(to, at + 9) :]
        elif kind == 2:
            text = (
                text[:at] + chr(draw.choice((0, 34, 39, 44, 58, 91, 93, 123, 125, 92, 96, 0x2028, 0xD800))) + text[at:]
            )
        elif kind == 3:
            text = text[:at] + text[at:to] + text[at:]
        elif kind == 4:
            text = re.sub(r'("score": )[^,}]+', lambda m: m[1] + draw.choice(ODD), text, count=draw.choice((0, 1)))
        elif kind == 5:
            text = re.sub(r'"step": \d+', f'"step": {draw.choice((0, 1, 2, 9, -1, "null", "1.5"))}', text, count=1)
        elif kind == 6:
            text = f"Well.\n```json\n{text}\n```\n"
        elif kind == 7:
            text = text.replace('"', "'")
        elif kind == 8:
            text = f"{text} {reply(0.125, 0.125)[: draw.randrange(80)]}"
        elif kind == 9:
            text = text.swapcase()
        elif kind == 10:
            text = re.sub(r"[}\]]", lambda m: draw.choice((m[0], m[0], "," + m[0], "")), text)
        else:
            text = text[to:] + text[:at]
    return text


def test_ten_thousand_damaged_replies_give_no_traceback_and_no_label_that_they_do_not_hold() -> None:
    """Every score that is accepted stands in the reply as the score of this very step, digit by digit."""
    draw, accepted = random.Random(0), 0
    for number in range(10_000):
        given = [round(draw.random(), 3) for _ in range(3)]
        text = mutated(draw, reply(*given))
        whole = completion(text, draw.choice(("stop", "stop", "stop", None, "length", 5)))
        if number % 10 == 0:  # the completion around it may be broken, too
            choice = whole["choices"][0]
            draw.choice(
                (choice.clear, whole.clear, choice["message"].clear, whole["choices"].clear,
                 lambda c=choice: c.update(message=[1]), lambda w=whole: w.update(choices="x"),
                 lambda c=choice: c["message"].update(content=[{"type": "text", "text": "x"}]))
            )()  # fmt: skip
        result = read_completion(whole, Job("k", [], range(3), "", 10))
        assert result.status in ("ok", "unparsable", "wrong steps", "refused", "truncated", "error"), text
        if result.status != "ok":
            assert not result.verdicts
            continue
        accepted += 1
        assert [v.step for v in result.verdicts] == [0, 1, 2]
        for verdict in result.verdicts:
            pairs = re.findall(
                r"""["']step["']\s*:\s*["']?(\d+)(?:\.0+)?["']?\s*,[^{}]*?["']score["']\s*:\s*([-+.\deE]+)""",
                text.replace("\\", ""),
                re.I,
            )
            held = {float(score) for step, score in pairs if int(step) == verdict.step}
            assert verdict.score in held and 0 <= verdict.score <= 1, text
    assert accepted > 1_000


@given(st.text(alphabet=st.sampled_from(list("{}[]\"':,\\ \n/*0123.eE-stepsco`NaN\ud800"))) | st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for steps in ([0], [0, 1]):
        try:
            parse_reply(text, steps)
        except ReplyError as error:
            assert error.status in ("unparsable", "wrong steps", "refused")


KEYS = st.sampled_from(["steps", "step", "score", "0", "Step"])


@given(
    st.recursive(st.none() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(KEYS, x), max_leaves=8)
)
def test_any_json_is_read_or_refused(value: Any) -> None:
    try:
        for verdict in parse_reply(json.dumps(value), [0]):
            assert 0 <= verdict.score <= 1
    except ReplyError:
        pass


@pytest.mark.parametrize(
    "text", ["{" * 5_000, '{"steps": [' * 2_000, "'" + "\\" * 200_000, '["' * 100_000, "/*" * 100_000]
)
def test_no_text_takes_long(text: str) -> None:
    assert status(text) == "unparsable"


# --- log-probabilities ------------------------------------------------------------------------------------------------


def tokens(pieces: list[tuple[str, dict[str, float]]]) -> list[dict[str, Any]]:
    made = []
    for piece, chances in pieces:
        top = [{"token": t, "logprob": math.log(p)} for t, p in (chances or {piece: 1.0}).items()]
        made.append({"token": piece, "logprob": top[0]["logprob"], "top_logprobs": top})
    return made


START = ('{"steps": [{"step": 0, "verdict": "', {})


@pytest.mark.parametrize(
    ("pieces", "score"),
    [
        ([START, ("good", {"good": 0.6, "bad": 0.2}), ('", "reason": ""}]}', {})], 0.75),
        ([START, ("go", {"go": 0.5, "b": 0.5}), ("od", {}), ('"}]}', {})], 0.5),
        ([START, ("bad", {"bad": 0.8, "Good": 0.1, "great": 0.1}), ('"}]}', {})], 1 / 9),
        ([START, ('good"}', {'good"}': 0.9, "bad": 0.1}), ("]}", {})], 0.9),
        ([START, ("good", {"good": 1.0}), ('"}]}', {})], 1.0),
    ],
)
def test_the_score_is_the_probability_of_the_verdict(pieces: Any, score: float) -> None:
    given = tokens(pieces)
    text = "".join(t["token"] for t in given)
    assert parse_reply(text, [0], logprobs=given, verdicts=True)[0].score == pytest.approx(score)


def test_log_probabilities_that_are_of_something_else_give_no_label() -> None:
    given = tokens([START, ("good", {"good": 0.6, "bad": 0.2}), ('"}]}', {})])
    text = "".join(t["token"] for t in given)
    broken: list[Any] = [None, [], given[:-1], [{}] * 3, [1, 2, 3], [{**t, "top_logprobs": None} for t in given]]
    broken += [[{**t, "logprob": value, "top_logprobs": []} for t in given] for value in (math.nan, 3.0, "x", None)]
    for bad in broken:
        with pytest.raises(ReplyError):
            parse_reply(text, [0], logprobs=bad, verdicts=True)
