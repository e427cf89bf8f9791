"""The tool calls in what a policy wrote, read strictly: scorers count them, the guard checks them."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prm.errors import DataError

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL | re.IGNORECASE)
_LINE = re.compile(r"^[ \t]*([\w.\-]+)[ \t]*:(.*)$", re.MULTILINE)
_FIRST = re.compile(r"^[ \t]*(?:action[ \t]*:[ \t]*)?([\w.\-]+)", re.MULTILINE | re.IGNORECASE)
_INSIDE = re.compile(r'"name"\s*:\s*"([^"]*)"|\b([\w\-]+)\(')
LONGEST = 100_000  # characters of an action that are read; a longer one is a broken call


@dataclass(frozen=True)
class Call:
    """One call. `problem` says why it cannot be read ("" where it can); its name or arguments may then be empty."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def find_calls(action: str, tools: Sequence[Mapping[str, Any]] = (), watch: Collection[str] = ()) -> list[Call]:
    """All calls in an action, in order, also those inside its reasoning: what an environment may read is read here.

    A call is a `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` block (closed or not), an action that is such
    an object alone, or a line `NAME: TEXT` where NAME is a tool whose one required argument is text. Names are compared
    without case. A key that is there twice, an unknown tool, arguments that do not fit the tool's schema: each is a
    call with a `problem`. So is a known tool's call in the middle of other text, as JSON or as `NAME(`.

    Args:
        action: as the policy wrote it.
        tools: JSON-schema functions, as `Env.tools` gives them; without any, names and arguments are not checked.
        watch: names of more tools; a line that begins with one (or with `Action: NAME`) is a call that cannot be read.
    """
    if len(action) > LONGEST:
        return [Call("", problem=f"it has {len(action)} characters, at most {LONGEST} are read")]
    known = {plain_name(_function(tool).get("name", "")): _function(tool) for tool in tools}
    watched = {plain_name(name) for name in watch} - known.keys()
    found = [_read(text, known) for text in _BLOCK.findall(action)]
    rest = _BLOCK.sub("", action)
    bare = rest.rpartition("</think>")[2].strip()
    if bare.startswith(("{", "[")):
        found.append(_read(bare, known))
        rest = rest.replace(bare, "")
    rest = rest.replace("</think>", "\n")  # an environment may read on from here, so a line begins
    for name, text in _LINE.findall(rest):
        function = known.get(plain_name(name))
        argument = _text_argument(function) if function else None
        if function and argument:
            found.append(Call(str(function["name"]), {argument: text.strip()}))
    for name in (json_name or code for json_name, code in _INSIDE.findall(rest)):
        if plain_name(name) in known.keys() | watched:
            found.append(Call(name, problem="a call in the middle of other text"))
    for name in _FIRST.findall(rest) if watched else []:
        if plain_name(name) in watched:
            found.append(Call(name, problem="its arguments cannot be read"))
    return found


def schema_problem(arguments: Mapping[str, Any], function: Mapping[str, Any]) -> str:
    """Why arguments do not fit a function's parameters: one is missing, unknown, or of another type; "" where they do.

    Of JSON schema, `required`, `properties`, `type`, `enum` and `additionalProperties` are read, at the top level.
    """
    schema = function.get("parameters") or {}
    properties = schema.get("properties") or {}
    if missing := [name for name in schema.get("required") or () if name not in arguments]:
        return f"{', '.join(missing)} is missing"
    for name, value in arguments.items():
        if name not in properties:
            if not schema.get("additionalProperties", not properties):
                return f"there is no argument {name!r:.40}; there are {', '.join(properties)}"
            continue
        own = properties[name] if isinstance(properties[name], Mapping) else {}
        kinds = own.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds or []
        if kinds and not any(_is(value, kind) for kind in kinds):
            return f"{name} must be {' or '.join(kinds)}, got {value!r:.40}"
        if "enum" in own and value not in own["enum"]:
            return f"{name} must be one of {', '.join(map(repr, own['enum']))}, got {value!r:.40}"
    return ""


def load_strict(text: str) -> Any:
    """JSON in which no key is there twice and no number is NaN or infinite. Raises DataError."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {getattr(error, 'msg', None) or 'nested too deeply'}") from None


def _read(text: str, known: Mapping[str, Mapping[str, Any]]) -> Call:
    try:
        call = load_strict(text.strip())
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return Call("", problem="a call is an object with name and arguments")
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = load_strict(arguments)
    except DataError as error:
        return Call("", problem=str(error))
    if not isinstance(arguments, dict):
        return Call(call["name"], problem=f"arguments must be an object, got {arguments!r:.40}")
    function = known.get(plain_name(call["name"]))
    if function is None:
        there = f"there is no tool {call['name']!r:.40}; there are {', '.join(str(f['name']) for f in known.values())}"
        return Call(call["name"], arguments, there if known else "")
    return Call(str(function["name"]), arguments, schema_problem(arguments, function))


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def _text_argument(function: Mapping[str, Any]) -> str | None:
    """The name of the one argument that must be given, where that is text."""
    schema = function.get("parameters") or {}
    required = list(schema.get("required") or ())
    own = (schema.get("properties") or {}).get(required[0]) if len(required) == 1 else None
    return required[0] if isinstance(own, Mapping) and own.get("type") == "string" else None


def plain_name(name: Any) -> str:
    """A tool's name as names are compared."""
    return unicodedata.normalize("NFKC", str(name)).strip().casefold()


def _is(value: Any, kind: str) -> bool:
    if kind in ("number", "integer"):
        whole = isinstance(value, int) or (kind == "integer" and isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and (whole or (kind == "number" and isinstance(value, float)))
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return kind not in kinds or isinstance(value, kinds[kind])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DataError("not JSON that can be read safely: a key is there twice")
    return found


def _refuse(name: str) -> None:
    raise DataError(f"{name} is no JSON number")
