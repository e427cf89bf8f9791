"""Other people's environments as `prm.env.Env`, and ours as theirs where that makes sense.

    simple       reset() -> str, step(action) -> (str, float, bool), get_tools()
    openenv      OpenEnv clients: reset() and step(action object) -> result with observation, reward, done
    trl          TRL environment factories: public methods are tools, get_reward() pays;  `to_trl` is the way back
    verifiers    multi-turn environments of the verifiers library: env_response, is_completed, a rubric
    mcp          tools of an MCP server over stdio, with tasks and a check of your own

None of the libraries is imported. What an environment cannot do is said: one that takes no seed warns, since its
episodes cannot be repeated. Each function returns a function that makes fresh environments, so name it on the command
line by a function of your own: `def make(): return simple(MyEnv)()` and `--env my_module:make`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
import subprocess
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prm.env import Env, EnvFactory
from prm.errors import DataError, EnvError, UsageError
from rl.calls import Call, find_calls, load_strict

Result = tuple[str, float, bool, bool, dict[str, Any]]
KINDS: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
KINDS = {**KINDS, list: "array", dict: "object"}


def simple(make: Callable[..., Any]) -> EnvFactory:
    """Environments with `reset() -> str`, `step(action) -> (str, float, bool)` and, optionally, `get_tools()`.

    The seed goes to `reset`, or to `make`, whichever has such a parameter.
    """
    return lambda: _Simple(make)


class _Simple:
    def __init__(self, make: Callable[..., Any]) -> None:
        self._make, self._by_make = make, _takes(make, "seed")
        self._env: Any = None if self._by_make else make()

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        _no_options(options)
        if self._by_make:
            self._env = self._make(seed=seed)
        kwargs = {"seed": seed} if _takes(self._env.reset, "seed") else {}
        if not kwargs and not self._by_make and seed is not None:
            _warn_seed(self._env)
        return _text(self._env.reset(**kwargs), "reset"), {}

    def step(self, action: str) -> Result:
        found = self._env.step(action)
        if not (isinstance(found, tuple) and len(found) == 3):
            raise EnvError(f"step: expected (str, float, bool), got {found!r:.80}")
        return _text(found[0], "step"), float(found[1]), bool(found[2]), False, {}

    def tools(self) -> list[dict[str, Any]]:
        env = self._env if self._env is not None else self._make(seed=0)
        return list(env.get_tools()) if hasattr(env, "get_tools") else []


def openenv(
    make: Callable[[], Any],
    *,
    action: Callable[[str], Any],
    text: Callable[[Any], str] = str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> EnvFactory:
    """OpenEnv clients, whose `reset` and `step` give a result with `observation`, `reward` (or None) and `done`.

    Args:
        make: makes (and, where it has to, connects) a client.
        action: the client's action object from what the policy wrote; a ValueError in it is an invalid action.
        text: an observation object as text.
        tools: JSON-schema functions to show to the policy.
    """
    return lambda: _OpenEnv(make, action, text, tools)


class _OpenEnv:
    def __init__(self, make: Any, action: Any, text: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        self._env, self._action, self._as_text, self._tools = make(), action, text, tools

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        _no_options(options)
        kwargs = {"seed": seed} if _takes(self._env.reset, "seed") else {}
        if not kwargs and seed is not None:
            _warn_seed(self._env)
        return _text(self._as_text(self._env.reset(**kwargs).observation), "reset"), {}

    def step(self, action: str) -> Result:
        try:
            made = self._action(action)
        except ValueError as error:
            return f"Invalid action: {error}", 0.0, False, False, {"error": "invalid"}
        result = self._env.step(made)
        observation = _text(self._as_text(result.observation), "step")
        return observation, float(result.reward or 0.0), bool(result.done), False, {}

    def tools(self) -> list[dict[str, Any]]:
        return [dict(tool) for tool in self._tools]


def trl(make: Callable[[], Any], rows: Sequence[Mapping[str, Any]], prompt: str = "prompt") -> EnvFactory:
    """TRL environment factories: `reset(**row) -> str | None`, public methods as tools, `get_reward()` at the end.

    An episode is the row `seed % len(rows)`. A step calls the tools that the policy called, in order; one without a
    call is the final answer and ends the episode.

    Args:
        make: TRL's `environment_factory`.
        rows: the data set; `row[prompt]` is text, or chat messages whose user turns are the task.
    """
    if not rows:
        raise UsageError("no rows, so there is no task")
    return lambda: _Trl(make, rows, prompt)


class _Trl:
    def __init__(self, make: Callable[[], Any], rows: Sequence[Mapping[str, Any]], prompt: str) -> None:
        self._make, self._rows, self._prompt, self._count = make, rows, prompt, 0
        self._env = make()

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        _no_options(options)
        self._count += 1
        row = dict(self._rows[(self._count if seed is None else seed) % len(self._rows)])
        self._env = self._make()  # its fields are the episode's state
        more = self._env.reset(**row) if hasattr(self._env, "reset") else None
        return _task(row.get(self._prompt)) + (_text(more, "reset") if more is not None else ""), {}

    def step(self, action: str) -> Result:
        calls = find_calls(action, self.tools())
        if not calls:
            reward = _wait(self._env.get_reward()) if hasattr(self._env, "get_reward") else 0.0
            return "", float(reward or 0.0), True, False, {}
        return _answer(calls, lambda call: str(_wait(getattr(self._env, call.name)(**call.arguments))))

    def tools(self) -> list[dict[str, Any]]:
        names = [n for n in dir(self._env) if not n.startswith("_") and n not in ("reset", "get_reward", "close")]
        return [_schema(n, getattr(self._env, n)) for n in names if callable(getattr(self._env, n))]


def to_trl(make: EnvFactory) -> Callable[[], Any]:
    """Our environment as TRL's `environment_factory`: its tools become methods, the sum of its rewards `get_reward`.

    A row of the data set may have a `seed`, which `reset` uses. After the end a tool says that the episode is over.

    Raises:
        UsageError: the environment has no tools, or one whose name or argument is no Python name.
    """
    tools = [tool.get("function") or tool for tool in getattr(make(), "tools", list)()]
    if not tools:
        raise UsageError("an environment without tools() cannot be a TRL environment: its methods are the tools")

    def reset(self: Any, **row: Any) -> str:
        self._env, self._reward, self._over = make(), 0.0, False
        return self._env.reset(seed=row.get("seed"))[0]

    def get_reward(self: Any) -> float:
        return self._reward

    body: dict[str, Any] = {"reset": reset, "get_reward": get_reward}
    for tool in tools:
        body[tool["name"]] = _method(tool)
    return type("Environment", (), body)


def _method(tool: Mapping[str, Any]) -> Callable[..., str]:
    properties = (tool.get("parameters") or {}).get("properties") or {}
    required = (tool.get("parameters") or {}).get("required") or ()
    for name in (tool["name"], *properties):
        if not name.isidentifier() or name in ("reset", "get_reward", "self"):
            raise UsageError(f"{name!r} cannot be the name of a method or argument")

    def method(self: Any, **arguments: Any) -> str:
        if self._over:
            return "The episode is over."
        call = json.dumps({"name": tool["name"], "arguments": {k: v for k, v in arguments.items() if v is not None}})
        observation, reward, terminated, truncated, _ = self._env.step(f"<tool_call>\n{call}\n</tool_call>")
        self._reward += reward
        self._over = terminated or truncated
        return observation

    types = {kind: python for python, kind in KINDS.items()}
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name in sorted(properties, key=lambda n: n not in required):
        default = inspect.Parameter.empty if name in required else None
        kind = types.get(properties[name].get("type"), str)
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    lines = [f"    {name}: {properties[name].get('description', name)}" for name in properties]
    method.__name__ = tool["name"]
    method.__doc__ = "\n".join([tool.get("description", tool["name"]), "", "Args:", *lines] if lines else
                               [tool.get("description", tool["name"])])  # fmt: skip
    method.__signature__ = inspect.Signature(own, return_annotation=str)  # type: ignore[attr-defined]
    method.__annotations__ = {p.name: p.annotation for p in own[1:]} | {"return": str}
    return method


def verifiers(
    env: Any, rows: Sequence[Mapping[str, Any]], reward: Callable[[dict[str, Any]], float] | None = None
) -> EnvFactory:
    """Multi-turn environments of the verifiers library; one object serves all episodes, each with a state of its own.

    Args:
        env: has `env_response(messages, state)` and `is_completed(...)`, and maybe `setup_state(state)`; async or not.
        rows: the data set, each with `prompt` (messages or text); an episode is the row `seed % len(rows)`.
        reward: the reward of a finished state; without it `state["reward"]`, as the environment's rubric leaves it
            there (an environment that leaves none is an error).
    """
    if not rows:
        raise UsageError("no rows, so there is no task")
    return lambda: _Verifiers(env, rows, reward)


class _Verifiers:
    def __init__(self, env: Any, rows: Sequence[Mapping[str, Any]], reward: Any) -> None:
        self._env, self._rows, self._reward, self._count = env, rows, reward, 0
        self._state: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        _no_options(options)
        self._count += 1
        row = json.loads(json.dumps(dict(self._rows[(self._count if seed is None else seed) % len(self._rows)])))
        self._state = {**row, "completion": [], "trajectory": [], "turn": 0}
        if hasattr(self._env, "setup_state"):
            self._state = _wait(self._env.setup_state(self._state)) or self._state
        return _task(row.get("prompt")), {}

    def step(self, action: str) -> Result:
        state, prompt = self._state, self._state["prompt"]
        head = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        state["completion"].append({"role": "assistant", "content": action})
        state["turn"] += 1
        if self._done(head + state["completion"]):
            return "", self._paid(), True, False, {}
        found = _wait(self._env.env_response(head + state["completion"], state))
        replies, self._state = found if isinstance(found, tuple) else (found, state)
        self._state["completion"] = [*state["completion"], *replies]
        text = "\n".join(_text(message.get("content"), "env_response") for message in replies)
        done = self._done(head + self._state["completion"])
        return text, self._paid() if done else 0.0, done, False, {}

    def _done(self, messages: list[Any]) -> bool:
        takes = len(inspect.signature(self._env.is_completed).parameters)
        return bool(_wait(self._env.is_completed(*((messages, self._state) if takes > 1 else (self._state,)))))

    def _paid(self) -> float:
        given = self._reward(self._state) if self._reward else self._state.get("reward")
        if given is None:
            raise EnvError("the finished state holds no reward, and no function of it was given")
        return float(_wait(given))


def mcp(
    command: Sequence[str], tasks: Sequence[str], check: Callable[[str, str], float], *, timeout: float = 60.0
) -> EnvFactory:
    """The tools of an MCP server over stdio. Each episode has a server process of its own, so that none sees another's.

    A step calls the tools that the policy called, in order; one without a call is the answer, and ends the episode.

    Args:
        command: starts the server.
        tasks: an episode is the task `seed % len(tasks)`.
        check: success in [0, 1] of (task, answer).
        timeout: seconds until a call without a reply is an error.
    """
    if not tasks:
        raise UsageError("no tasks")
    return lambda: _Mcp(command, tasks, check, timeout)


class _Mcp:
    def __init__(self, command: Sequence[str], tasks: Sequence[str], check: Any, timeout: float) -> None:
        self._command, self._tasks, self._check, self._timeout = list(command), tasks, check, timeout
        self._count = self._id = 0
        self._task, self._tools = "", list[dict[str, Any]]()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        _no_options(options)
        self.close()
        self._count += 1
        self._task = self._tasks[(self._count if seed is None else seed) % len(self._tasks)]
        self._start()
        return self._task, {}

    def step(self, action: str) -> Result:
        calls = find_calls(action, self.tools())
        if not calls:
            success = float(self._check(self._task, action))
            return "", success, True, False, {"success": success}

        def make(call: Call) -> str:
            found = self._ask("tools/call", {"name": call.name, "arguments": dict(call.arguments)})
            parts = found.get("content") or []
            text = "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))
            if found.get("isError"):
                raise DataError(text)
            return text

        return _answer(calls, make)

    def tools(self) -> list[dict[str, Any]]:
        if self._process is None:
            self._start()
        return json.loads(json.dumps(self._tools))

    def close(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    __del__ = close

    def _start(self) -> None:
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
        except OSError as error:
            raise EnvError(f"MCP server {self._command[0]}: {error}") from None
        self._lines = queue.Queue()
        threading.Thread(target=_read_lines, args=(self._process.stdout, self._lines), daemon=True).start()
        about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "prm", "version": "0"}}
        self._ask("initialize", about)
        self._send({"method": "notifications/initialized"})
        found = self._ask("tools/list", {}).get("tools") or []
        self._tools = [
            {"name": t["name"], "description": t.get("description", ""), "parameters": t.get("inputSchema") or {}}
            for t in found
        ]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EnvError(f"MCP server {self._command[0]}: {error}") from None

    def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._id += 1
        self._send({"id": self._id, "method": method, "params": params})
        while True:
            try:
                line = self._lines.get(timeout=self._timeout)
            except queue.Empty:
                raise EnvError(f"MCP server: no reply to {method} within {self._timeout:g} s") from None
            if not line:
                raise EnvError(f"MCP server {self._command[0]}: it ended before it answered {method}")
            try:
                reply = load_strict(line)
            except DataError as error:
                raise EnvError(f"MCP server: a line that is no message: {error}") from None
            if isinstance(reply, dict) and reply.get("id") == self._id and "method" not in reply:
                if "error" in reply:
                    raise DataError(str((reply["error"] or {}).get("message", reply["error"])))
                return dict(reply.get("result") or {})


def _read_lines(stream: Any, lines: queue.Queue[str]) -> None:
    try:
        for line in stream:
            if line.strip():
                lines.put(line)
    except ValueError:
        pass  # closed while it was read
    lines.put("")


def _answer(calls: Sequence[Call], make: Callable[[Call], str]) -> Result:
    """Carry out calls; what goes wrong in one is its observation, and an error in the info."""
    texts, info = [], dict[str, Any]()
    for call in calls:
        try:
            texts.append(make(call) if not call.problem else f"Invalid call: {call.problem}")
        except EnvError:
            raise
        except Exception as error:
            texts.append(f"The tool {call.name} failed: {error}")
            info["error"] = "failed"
        if call.problem:
            info["error"] = "invalid"
    return "\n".join(texts), 0.0, False, False, info


def _schema(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """A JSON-schema function from a method's signature and the first line of its docstring."""
    properties, required = {}, []
    for parameter in inspect.signature(method, eval_str=True).parameters.values():
        kind = KINDS.get(parameter.annotation)
        properties[parameter.name] = {"type": kind} if kind else {}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    about = (inspect.getdoc(method) or name).splitlines()[0]
    return {"name": name, "description": about,
            "parameters": {"type": "object", "properties": properties, "required": required}}  # fmt: skip


def _task(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    turns = [m.get("content") for m in prompt or () if isinstance(m, Mapping) and m.get("role") == "user"]
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise EnvError(f"a prompt is text, or messages with a user turn of text, got {prompt!r:.80}")
    return "\n\n".join(map(str, turns))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise EnvError(f"{where}: expected text, got {value!r:.80}")
    return value


def _wait(value: Any) -> Any:
    """The value, awaited where it has to be; also where a loop runs already (notebooks)."""
    if not inspect.isawaitable(value):
        return value
    box: list[Any] = []

    async def run() -> Any:
        return await value

    def work() -> None:
        try:
            box.append((asyncio.run(run()), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    result, error = box[0]
    if error is not None:
        raise error
    return result


def _takes(call: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _no_options(options: Any) -> None:
    if options:
        raise UsageError(f"this environment takes no options, got {options!r:.80}")


def _warn_seed(env: Env | Any) -> None:
    what = f"{type(env).__name__} takes no seed, so its episodes cannot be repeated"
    warnings.warn(what, stacklevel=3)
