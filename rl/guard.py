"""Rules between a policy and its tools, the same in training and in deployment: an environment around an environment.

A blocked action does not reach the environment. The policy reads why, as an observation, and goes on.

    refund.amount > 100 -> ask
    transfer.to.country not in ["SE", "NO"] and transfer.amount >= 1e3 -> deny
    delete_account -> deny
    *.path contains ".." -> deny

A rule that cannot be decided (the argument is missing, or of another kind than the value) applies: the guard fails
closed. So does an action whose calls cannot be read, where there are rules. In an environment without `tools` a line
that begins with the name of a ruled tool is such a call.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prm.config import option
from prm.env import Env, EnvFactory
from prm.errors import EnvError, UsageError
from rl.calls import Call, find_calls, plain_name

OPERATORS = ("not in", "in", "contains", "==", "!=", ">=", "<=", ">", "<")
_NAME = r"[\w\-]+|\*"
_CONDITION = re.compile(rf"\s*({_NAME})((?:\.[\w\-]+)+)\s*(not\s+in\b|in\b|contains\b|==|!=|>=|<=|>|<)\s*")
_RULE = re.compile(rf"\s*({_NAME})\s*")
_END = re.compile(r"\s*->\s*(deny|ask)\s*\Z")
_AND = re.compile(r"\s+and\s+")


@dataclass(frozen=True)
class GuardConfig:
    rules: tuple[str, ...] = option((), "rules, for example 'refund.amount > 100 -> ask'")
    deny: tuple[str, ...] = option((), "tools that may not be called")
    allow: tuple[str, ...] = option((), "the only tools that may be called (default: all)")
    time_limits: tuple[str, ...] = option((), "seconds a call may take: SECONDS, or TOOL=SECONDS")
    retries: tuple[str, ...] = option((), "how often a call that raised is made again: N, or TOOL=N")

    @property
    def on(self) -> bool:
        """Whether there is anything to guard."""
        return any(vars(self).values())


@dataclass(frozen=True)
class Condition:
    """`tool.path operator value`."""

    path: tuple[str, ...]
    operator: str
    value: Any

    def holds(self, arguments: Mapping[str, Any]) -> bool | None:
        """Whether it holds for any of the values found there; None where that cannot be said."""
        found = _at(arguments, self.path)
        answers = [_compare(value, self.operator, self.value) for value in found]
        if any(answers):
            return True
        return None if not answers or None in answers else False


@dataclass(frozen=True)
class Rule:
    """What to do with calls of `tool` ("*": any) for which all conditions hold: "deny" or "ask"."""

    text: str
    tool: str
    conditions: tuple[Condition, ...]
    then: str

    def applies(self, call: Call) -> str:
        """Why the rule applies to a call; "" where it does not."""
        if self.tool not in ("*", plain_name(call.name)):
            return ""
        answers = [condition.holds(call.arguments) for condition in self.conditions]
        if False in answers:
            return ""
        if None in answers:
            path = ".".join(self.conditions[answers.index(None)].path)
            return f"the rule {self.text!r} cannot be checked: {path} is missing or of another kind"
        return f"the rule {self.text!r} applies"


def parse_rule(text: str) -> Rule:
    """Parse `TOOL -> deny|ask` or `TOOL.ARGUMENT OP VALUE [and ...] -> deny|ask`; values are JSON.

    Raises:
        UsageError: it is no such rule; the message says where reading stopped.
    """
    if start := re.match(rf"\s*({_NAME})\s*->", text):
        at, tool, conditions = start.end(1), start[1], list[Condition]()
    else:
        at, tool = 0, ""
        conditions = []
        while True:
            found = _CONDITION.match(text, at)
            if found is None:
                raise _bad(text, at, "TOOL.ARGUMENT and one of " + ", ".join(OPERATORS))
            if tool and found[1] != tool:
                raise _bad(text, at, f"another condition on {tool}")
            tool, operator = found[1], " ".join(found[3].split())
            try:
                value, at = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text, found.end())
            except (ValueError, RecursionError):
                raise _bad(text, found.end(), 'a JSON value (text in "quotes")') from None
            if operator in ("in", "not in") and not isinstance(value, list):
                raise _bad(text, found.end(), "a list")
            if operator in (">", ">=", "<", "<=") and not _number(value):
                raise _bad(text, found.end(), "a number")
            conditions.append(Condition(tuple(found[2][1:].split(".")), operator, value))
            more = _AND.match(text, at)
            if not more:
                break
            at = more.end()
    end = _END.match(text, at)
    if end is None:
        raise _bad(text, at, "-> deny, or -> ask")
    return Rule(" ".join(text.split()), plain_name(tool), tuple(conditions), end[1])


class Guard:
    """An environment behind rules. Follows `prm.env.Env`.

    What is not carried out is an observation that begins with "Blocked:" (a rule; `info["blocked"]` says which), or
    with "The tool" (`info["error"]` is "timeout" or "failed"); the step's reward is then 0.

    A call that takes longer than its limit is not awaited, and not made again: it may still take effect. Its late
    result comes before that of the next action; while it is still running the next action is not carried out. Calls
    that raised are made again as often as `retries` allows.

    Args:
        env: what to guard; or a function that makes it, which a reset needs after a call that never ended.
        config: the rules.
        approve: asked about actions that a rule says to ask about; without it they are blocked.

    Raises:
        UsageError: a rule, limit or number of retries that cannot be read.
    """

    def __init__(
        self, env: Env | EnvFactory, config: GuardConfig, approve: Callable[[str, str], bool] | None = None
    ) -> None:
        self._make = None if hasattr(env, "reset") and not isinstance(env, type) else env
        self._env: Any = self._make() if callable(self._make) else env
        self._rules = [parse_rule(text) for text in config.rules]
        self._denied = {plain_name(name) for name in config.deny}
        self._allowed = {plain_name(name) for name in config.allow}
        self._limits = _by_tool("time-limits", config.time_limits, float)
        self._retries = _by_tool("retries", config.retries, int)
        self._approve = approve
        self._late: _Running | None = None
        self._tools: list[dict[str, Any]] = []
        self._watch = {rule.tool for rule in self._rules} | self._denied

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """As the environment's own."""
        if self._late is not None and not self._late.wait(0.0):
            if not callable(self._make):
                raise EnvError("a call of the last episode is still running, and the guard cannot make another env")
            self._env = self._make()
        self._late = None
        self._tools = self._all_tools()
        kwargs: dict[str, Any] = {"seed": seed} if options is None else {"seed": seed, "options": options}
        return self._env.reset(**kwargs)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As the environment's own, or why the action was not carried out."""
        calls = find_calls(action, self._tools, self._watch)
        if reason := self.blocks(action, calls):
            return f"Blocked: {reason}.", 0.0, False, False, {"blocked": reason}
        name = calls[0].name if calls else ""
        limit = min((self._of(self._limits, c.name, 0.0) or 1e9 for c in calls or [Call("")]), default=1e9)
        late = ""
        if self._late is not None:
            if not self._late.wait(limit if limit < 1e9 else self._late.limit):
                return self._lost(self._late.tool, "is still at the call before", "timeout")
            result, self._late = self._late.result(), None
            if result is None or result[2] or result[3]:
                return result or self._lost(name, "failed at the call before", "failed")
            late = f"(late, from the call before) {result[0]}\n"
        for tries_left in range(min(self._of(self._retries, c.name, 0) for c in calls or [Call("")]), -1, -1):
            running = _Running(lambda: self._env.step(action), name, limit)
            if not running.wait(limit):
                self._late = running
                return self._lost(name, f"gave no answer within {limit:g} s", "timeout")
            if running.error is None:
                observation, reward, terminated, truncated, info = running.checked()
                return late + observation, reward, terminated, truncated, info
            if isinstance(running.error, EnvError):
                raise running.error
            if tries_left:
                time.sleep(min(0.1 * 2 ** -tries_left, 1.0))
        what = f"failed: {type(running.error).__name__}: {running.error!s:.300}"
        return self._lost(name, what, "failed")

    def tools(self) -> list[dict[str, Any]]:
        """The environment's tools, less those that may not be called."""
        tools = self._all_tools()
        return [tool for tool in tools if not self._listed(str((tool.get("function") or tool).get("name")))]

    def blocks(self, action: str, calls: Sequence[Call]) -> str:
        """Why an action may not be carried out; "" where it may. All of its calls must be allowed."""
        strict = bool(self._rules or self._denied or self._allowed)
        for call in calls:
            if reason := self._listed(call.name):
                return reason
            if strict and not call.name:
                return f"the call cannot be read ({call.problem})"
            for rule in self._rules:
                reason = rule.applies(call)
                if reason and rule.then == "deny":
                    return reason
        asked = [reason for call in calls for rule in self._rules if (reason := rule.applies(call))]
        if asked and not (self._approve and self._approve(action, asked[0])):
            return f"{asked[0]}: a person has to approve it" + (", and did not" if self._approve else "")
        return ""

    def _all_tools(self) -> list[dict[str, Any]]:
        found = getattr(self._env, "tools", None)
        return list(found()) if callable(found) else []

    def _listed(self, name: str) -> str:
        if plain_name(name) in self._denied or "*" in self._denied:
            return f"{name} may not be called"
        if self._allowed and name and plain_name(name) not in self._allowed:
            return f"{name} may not be called; allowed: {', '.join(sorted(self._allowed))}"
        return ""

    def _of(self, values: Mapping[str, Any], name: str, default: Any) -> Any:
        return values.get(plain_name(name), values.get("", default))

    def _lost(self, name: str, what: str, error: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"The tool {name or 'call'} {what}.", 0.0, False, False, {"error": error, "tool": name}


class _Running:
    """One call of the environment in a thread that nothing waits for at exit; in this thread without a limit."""

    def __init__(self, call: Callable[[], Any], tool: str, limit: float) -> None:
        self.tool, self.limit = tool, limit
        self.error: BaseException | None = None
        self._result: Any = None
        self._thread: threading.Thread | None = None
        if limit >= 1e9:
            self._run(call)
        else:
            self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, within so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> Any:
        """What the call gave; None where it raised."""
        return self.checked() if self.error is None else None

    def checked(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not (isinstance(self._result, tuple) and len(self._result) == 5 and isinstance(self._result[0], str)):
            what = f"{self._result!r:.80}"
            raise EnvError(f"step: expected (str, float, terminated, truncated, dict), got {what}")
        return self._result

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except Exception as error:
            self.error = error


def guarded(env: Any, config: GuardConfig, approve: Callable[[str, str], bool] | None = None) -> EnvFactory:
    """A function that makes guarded environments. The rules are read now, so that a bad one is an error at once."""
    for text in config.rules:
        parse_rule(text)
    _by_tool("time-limits", config.time_limits, float)
    _by_tool("retries", config.retries, int)
    if not config.on:
        return env
    return lambda: Guard(env, config, approve)


def _at(value: Any, path: Sequence[str]) -> list[Any]:
    """The values at a path; a list on the way means each of its elements."""
    if isinstance(value, list):
        return [found for inner in value for found in _at(inner, path)]
    if not path:
        return [value]
    return _at(value[path[0]], path[1:]) if isinstance(value, Mapping) and path[0] in value else []


def _compare(value: Any, operator: str, wanted: Any) -> bool | None:
    """None where the two cannot be compared. Text that spells a number counts as one beside a number."""
    if operator in ("in", "not in"):
        answers = [_compare(value, "==", one) for one in wanted]
        found = any(answers)
        if not found and None in answers and all(answer is None for answer in answers):
            return None
        return found == (operator == "in")
    if operator == "contains":
        return str(wanted).casefold() in value.casefold() if isinstance(value, str) else None
    if _number(wanted):
        try:
            number = float(value) if isinstance(value, str) or _number(value) else None
        except (ValueError, OverflowError):
            number = None
        if number is None or number != number:
            return None
        signs = {">": number > wanted, ">=": number >= wanted, "<": number < wanted, "<=": number <= wanted}
        return {**signs, "==": number == wanted, "!=": number != wanted}[operator]
    if type(value) is not type(wanted):
        return None
    same = value.casefold() == wanted.casefold() if isinstance(value, str) else value == wanted
    return same == (operator == "==")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _by_tool(what: str, given: Sequence[str], kind: type) -> dict[str, Any]:
    """"5" and "search=5" as {"": 5, "search": 5}."""
    found = {}
    for text in given:
        name, sign, value = text.rpartition("=")
        try:
            number = kind(value)
            if not number >= 0 or (sign and not name.strip()):
                raise ValueError
        except ValueError:
            raise UsageError(f"--{what} {text!r}: expected a number >= 0, or TOOL=NUMBER") from None
        found[plain_name(name)] = number
    return found


def _bad(text: str, at: int, expected: str) -> UsageError:
    return UsageError(f"rule {text!r}: expected {expected} at {text[at:].strip()[:30]!r}")


def _no_constant(name: str) -> Any:
    raise ValueError(name)

