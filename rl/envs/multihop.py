"""Questions of two to four hops over real facts, answered with a search tool; and an expert that answers them.

    Question: What is the currency of the country with the capital Lima?
    search: capital Lima            The capital of Peru is Lima.
    search: currency Peru           The currency of Peru is the Peruvian sol.
    answer: Peruvian sol            Right.

Splits hold out entities: no start or bridge of a dev or test question is a start or bridge of a training question.
"""

from __future__ import annotations

import hashlib
import json
import operator
import random
import re
import sqlite3
import threading
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from prm.env import Action, History
from prm.errors import EnvError, UsageError

SPLITS, HOPS = ("train", "dev", "test"), (2, 3, 4)
LONGEST = 1000  # characters of a query or an answer that are read
USAGE = "Invalid action. Write one line, search: QUERY or answer: TEXT."
NOTHING, RIGHT, WRONG, LATE = "Nothing found.", "Right.", "Wrong.", "Out of steps."


class Relation(NamedTuple):
    """How a functional relation is spoken of.

    Args:
        phrase: the object seen from the subject, as questions have it.
        query: what the expert writes in front of the subject to search for it.
        sentence: the fact, with {s} and {o}; none for an inverse, which is read off the fact it inverts.
    """

    phrase: str
    query: str
    sentence: str = ""


_ABOUT_COUNTRY = ("capital", "continent", "currency", "official language", "calling code", "internet domain",
                  "highest mountain")  # fmt: skip
_MADE = ("author", "composer", "artist", "discoverer", "namesake")
_PLAIN = (*_ABOUT_COUNTRY, *_MADE, "country", "river", "city", "birthplace", "symbol", "atomic number")
RELATIONS: Mapping[str, Relation] = {
    **{name: Relation(f"the {name} of {{}}", name, f"The {name} of {{s}} is {{o}}.") for name in _PLAIN},
    "mouth": Relation("the country at the mouth of {}", "mouth", "The mouth of {s} is in {o}."),
    "capital of": Relation("the country with the capital {}", "capital"),
    "symbol of": Relation("the element with the symbol {}", "symbol"),
    "atomic number of": Relation("the element with the atomic number {}", "atomic number"),
}
INVERSES = {"capital": "capital of", "symbol": "symbol of", "atomic number": "atomic number of"}
# The chains that are asked about. "*" stands for each relation in _ABOUT_COUNTRY.
PATHS = tuple(tuple(path.split(" > ")) for path in (
    "country > *", "capital of > *", "mouth > *", "namesake > *", "city > country", "city > river",
    "birthplace > country", "birthplace > river", "symbol of > atomic number", "atomic number of > symbol",
    "country > capital > river", "mouth > capital > river", "city > country > *", "birthplace > country > *",
    "city > country > capital > river", "birthplace > country > capital > river",
    *(f"{made} > birthplace{rest}" for made in _MADE for rest in ("", " > country", " > river", " > country > *")),
    *(f"{key} of > {made} > birthplace{rest}" for key in ("symbol", "atomic number") for made in _MADE[3:]
      for rest in ("", " > country")),
))  # fmt: skip
_VARIANTS = {2: 1, 3: 2, 4: 3}  # questions of one start along one path, so that no number of hops swamps the rest


@dataclass(frozen=True)
class Fact:
    """A triple that holds, and the one sentence that search returns for it."""

    subject: str
    relation: str
    object: str
    sentence: str


@dataclass(frozen=True)
class Question:
    """A question with its gold chain.

    Args:
        text: the task as `MultiHop.reset` returns it.
        hops: (subject, relation, object), each object the next subject; the last object is the answer.
        answers: every spelling that is right, the usual one first.
        facts: the fact behind each hop.
        split: "train", "dev" or "test".
    """

    text: str
    hops: tuple[tuple[str, str, str], ...]
    answers: tuple[str, ...]
    facts: tuple[Fact, ...]
    split: str

    @property
    def entities(self) -> tuple[str, ...]:
        """The start and the bridges; the answer is not among them."""
        return tuple(subject for subject, _, _ in self.hops)


# --- facts and questions ----------------------------------------------------------------------------------------------


@cache
def _data() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8")))


@cache
def facts() -> tuple[Fact, ...]:
    """All facts, in the order of the file. Inverse relations are not listed again."""
    found = []
    for name, pairs in _data()["facts"].items():
        for subject, obj in pairs.items():
            shown = f"the {obj}" if name == "currency" else _with_article(obj)
            sentence = RELATIONS[name].sentence.format(s=_with_article(subject), o=shown)
            found.append(Fact(subject, name, obj, sentence))
    return tuple(found)


@cache
def _with_article(entity: str) -> str:
    known = _data()["facts"]
    the = entity in _data()["article"] or entity in known["mouth"] or entity in known["river"].values()
    return f"the {entity}" if the else entity


@cache
def _graph() -> dict[str, dict[str, Fact]]:
    """relation -> subject -> fact, inverse relations included."""
    graph: dict[str, dict[str, Fact]] = defaultdict(dict)
    for fact in facts():
        graph[fact.relation][fact.subject] = fact
        if fact.relation in INVERSES:
            graph[INVERSES[fact.relation]][fact.object] = fact
    return dict(graph)


@cache
def _splits() -> dict[str, str]:
    """entity -> split. An entity goes where the country, or else the element, that it hangs on goes."""
    graph = _graph()
    up = ("symbol of", "atomic number of", *_MADE, "birthplace", "city", "capital of", "country", "mouth")
    held_out = {entity: split for split, entities in _data()["held_out"].items() for entity in entities}
    found = {}
    for start in {subject for pairs in graph.values() for subject in pairs}:
        entity = start
        while above := next((r for r in up if entity in graph[r]), None):
            entity = _end(graph[above][entity], above)
        found[start] = held_out.get(entity, "train")
    return found


def _end(fact: Fact, relation: str) -> str:
    return fact.object if relation == fact.relation else fact.subject


def _chains(path: Sequence[str], start: str) -> Iterator[tuple[tuple[str, str, str], ...]]:
    for name in _ABOUT_COUNTRY if path[0] == "*" else path[:1]:
        if fact := _graph()[name].get(start):
            hop = (start, name, _end(fact, name))
            yield from ((hop, *rest) for rest in (_chains(path[1:], hop[2]) if path[1:] else [()]))


@cache
def _all_questions() -> dict[str, Question]:
    graph, splits, ambiguous = _graph(), _splits(), frozenset(_data()["ambiguous"])
    found: dict[str, Question] = {}
    for path in PATHS:
        for start in graph[path[0]]:
            if path[0] == "country" and start in ambiguous:
                continue
            kept = 0
            for hops in sorted(_chains(path, start), key=lambda chain: hashlib.sha256(repr(chain).encode()).digest()):
                homes = {splits[subject] for subject, _, _ in hops}
                answers = (hops[-1][2], *_data()["aliases"].get(hops[-1][2], ()))
                if kept < _VARIANTS[len(hops)] and len(homes) == 1 and _fair(hops, text := _ask(hops), answers):
                    chain = tuple(graph[name][subject] for subject, name, _ in hops)
                    found[text] = Question(text, hops, answers, chain, homes.pop())
                    kept += 1
    return found


def _ask(hops: Sequence[tuple[str, str, str]]) -> str:
    phrase = _with_article(hops[0][0])
    for _, name, _ in hops:
        phrase = RELATIONS[name].phrase.format(phrase)
    return f"Question: What is {phrase}?"


def _fair(hops: Sequence[tuple[str, str, str]], text: str, answers: Sequence[str]) -> bool:
    """No entity twice, and neither a bridge nor the answer spelt out in the question."""
    start, *rest = (_plain(e) for e in (hops[0][0], *(obj for _, _, obj in hops)))
    words = f" {normalise(text)} "
    spelt = {*rest, *map(_plain, answers)}
    return len({start, *rest}) == len(hops) + 1 and not any(f" {entity} " in words for entity in spelt)


def questions(split: str, hops: int | Sequence[int] = HOPS) -> tuple[Question, ...]:
    """The questions of a split with any of these numbers of hops. Raises UsageError."""
    return _questions(_checked_split(split), _checked_hops(hops))


@cache
def _questions(split: str, hops: tuple[int, ...]) -> tuple[Question, ...]:
    return tuple(q for q in _all_questions().values() if q.split == split and len(q.hops) in hops)


def question(split: str, index: int) -> Question:
    """`questions(split)[index]`, as `options={"split": ..., "question": ...}` chooses it. Raises UsageError."""
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(questions(split)):
        raise UsageError(f"question must be an integer from 0 to {len(questions(split)) - 1}, got {index!r}")
    return questions(split)[index]


def find(text: str) -> Question:
    """The question with this task text. Raises UsageError where there is none."""
    if text not in _all_questions():
        raise UsageError(f"no question of this environment: {text!r:.100}")
    return _all_questions()[text]


@cache
def _order(split: str, hops: tuple[int, ...]) -> tuple[int, ...]:
    """A fixed shuffle, so that seeds in a row give unlike questions, and none of them twice."""
    order = list(range(len(questions(split, hops))))
    random.Random(f"multihop {split} {hops}").shuffle(order)
    return tuple(order)


# --- text -------------------------------------------------------------------------------------------------------------

_LETTERS = str.maketrans({
    "ł": "l", "ø": "o", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i", "ə": "e", "&": " and ",
    **dict.fromkeys("'’‘ʻʼ`.", ""),
})  # fmt: skip
_MINUS = re.compile(r"(?<![^\W_])[-\u2212](?=\d)")
_WORD = re.compile(r"[^\W_]+")


def normalise(text: str) -> str:
    """Words alone: no case, accents, punctuation, articles or extra blanks. Only articles: they stay. A minus stays."""
    text = _MINUS.sub(" minus ", unicodedata.normalize("NFKD", text))
    text = "".join(c for c in text if not unicodedata.combining(c)).casefold().translate(_LETTERS)
    words = _WORD.findall(text)
    return " ".join([word for word in words if word not in ("the", "a", "an")] or words)


_plain = cache(normalise)  # of entities alone


def accepts(of: Question, text: str) -> bool:
    """Whether this is the answer and nothing else, in any of its spellings."""
    given = normalise(text) if len(text) <= LONGEST else ""
    return bool(given) and given in map(_plain, of.answers)


_LOCK = threading.Lock()


@cache
def _index() -> sqlite3.Connection:
    index = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        index.execute("CREATE VIRTUAL TABLE fact USING fts5(words, tokenize='unicode61')")
    except sqlite3.OperationalError as error:
        raise EnvError(f"search needs an SQLite with FTS5, this is {sqlite3.sqlite_version}: {error}") from None
    index.executemany("INSERT INTO fact VALUES (?)", [(normalise(fact.sentence),) for fact in facts()])
    return index


@lru_cache(maxsize=8192)
def _search(words: tuple[str, ...], count: int) -> tuple[Fact, ...]:
    best = "SELECT rowid FROM fact WHERE fact MATCH ? ORDER BY round(bm25(fact), 6), rowid LIMIT ?"
    with _LOCK:
        rows = _index().execute(best, (" OR ".join(f'"{word}"' for word in words), count)).fetchall()
    return tuple(facts()[rowid - 1] for (rowid,) in rows)


def search(query: str, count: int = 3) -> tuple[Fact, ...]:
    """The best facts for any text, best first, by BM25; ties by the order of the file.

    Only the first 1,000 characters and 32 different words count. A query without a known word finds nothing.
    """
    words = dict.fromkeys(word for word in normalise(query[:LONGEST]).split() if word not in ("of", "is"))
    return _search(tuple(words)[:32], count) if words else ()


# --- actions ----------------------------------------------------------------------------------------------------------

_LINE = re.compile(r"^[ \t]*(search|answer)[ \t]*:(.*)$", re.IGNORECASE | re.MULTILINE)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_ARGUMENT = {"search": "query", "answer": "text"}


def parse_action(text: str) -> tuple[str, str] | None:
    """("search" | "answer", argument) of what a policy wrote; None where it is no action.

    An action is a line `search: QUERY` or `answer: TEXT`, a `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
    block, or that JSON alone. Other lines are thought and passed over, as is everything up to `</think>`. The same
    action several times counts once; different ones in a turn, a broken call, or an empty answer are no action.
    """
    text = text.rpartition("</think>")[2]
    calls = _CALL.findall(text)
    rest = _CALL.sub("", text)
    if not calls and rest.lstrip().startswith("{"):
        calls, rest = [rest], ""
    found = [_parse_call(call) for call in calls]
    found += [(verb.lower(), argument.strip()) for verb, argument in _LINE.findall(rest)]
    if not found or any(action != found[0] for action in found[1:]) or found[0] == ("answer", ""):
        return None
    return found[0]


def _parse_call(text: str) -> tuple[str, str] | None:
    try:
        call = json.loads(text)
        arguments = call["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        argument = arguments[_ARGUMENT[call["name"]]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (call["name"], argument.strip()) if isinstance(argument, str) else None


# --- the environment --------------------------------------------------------------------------------------------------


class MultiHop:
    """One question an episode: search for its hops, then answer. Follows `prm.env.Env`.

    An episode ends with an answer (`terminated`), or without one at the step limit (`truncated`); its last info holds
    `{"success": bool}`. An action that is none costs `invalid` and a step, and its info is `{"error": "invalid"}`.
    A search has nothing to do with the question where none of its snippets has the question's start or a bridge as
    its subject or object. Searches that have are free. Which answer is right shows in no reward, info or message: only
    a search finds it.

    Args:
        split: "train", "dev" or "test".
        hops: 2, 3, 4 or several of them.
        right, wrong: what an answer pays.
        irrelevant_search: what a search that has nothing to do with the question pays.
        out_of_steps: what the last step pays when the limit is reached without an answer, in place of its own reward.
        invalid: what an action that cannot be read pays.
        max_steps: the step limit; None allows two more than the question has hops, and at least 5.
        spare: the step limit of each question: so many steps more than its hops and the answer take, in place of
            `max_steps`. With 0 every slip is fatal.
        snippets: how many facts a search returns at most.

    Raises:
        UsageError: an argument or option makes no sense.
        EnvError: a step before the first reset or after the end.
    """

    def __init__(
        self, split: str = "train", hops: int | Sequence[int] = HOPS, right: float = 1.0, wrong: float = -0.5,
        irrelevant_search: float = -0.1, out_of_steps: float = -1.0, invalid: float = -0.1,
        max_steps: int | None = None, snippets: int = 3, spare: int | None = None,
    ) -> None:  # fmt: skip
        self._split, self._hops = _checked_split(split), _checked_hops(hops)
        self._right, self._wrong, self._irrelevant = right, wrong, irrelevant_search
        self._late, self._invalid = out_of_steps, invalid
        for name, number in (("max_steps", 1 if max_steps is None else max_steps), ("snippets", snippets)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UsageError(f"{name} must be an integer >= 1, got {number!r}")
        if spare is not None and (isinstance(spare, bool) or not isinstance(spare, int) or spare < 0):
            raise UsageError(f"spare must be an integer >= 0, got {spare!r}")
        if spare is not None and max_steps is not None:
            raise UsageError("max_steps and spare are two ways to say one thing: give one")
        self._max_steps, self._snippets, self._spare = max_steps, snippets, spare
        self._random = random.Random()
        self._question: Question | None = None
        self._steps, self._over = 0, False

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask a question: the one of this seed, or else another one than the last.

        `len(questions(split, hops))` seeds in a row give as many different questions.

        Args:
            seed: the same seed and options give the same episode on any object, in any process.
            options: "split" and "hops" in place of the object's own, or "question", the index in `questions(split)`.
        """
        options = dict(options or {})
        if unknown := sorted(set(options) - {"question", "split", "hops"}, key=str):
            raise UsageError(f"unknown option {', '.join(map(repr, unknown))}; there are question, split and hops")
        split = _checked_split(options["split"]) if "split" in options else self._split
        hops = _checked_hops(options["hops"]) if "hops" in options else self._hops
        if seed is not None:
            seed = operator.index(seed)
            self._random = random.Random(f"multihop {seed}")
        if "question" in options:
            chosen = question(split, options["question"])
        else:
            pool = questions(split, hops)
            chosen = self._random.choice(pool) if seed is None else pool[_order(split, hops)[seed % len(pool)]]
            while seed is None and chosen is self._question:
                chosen = self._random.choice(pool)
        self._question, self._steps, self._over = chosen, 0, False
        return chosen.text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """(observation, reward, terminated, truncated, info) of one action, as `parse_action` reads it."""
        if self._question is None or self._over:
            raise EnvError("the episode is over: call reset" if self._over else "call reset before step")
        if not isinstance(action, str):
            raise EnvError(f"an action is a string, got {type(action).__name__}")
        self._steps += 1
        verb, argument = parse_action(action) or ("invalid", "")
        if verb == "answer":
            self._over = True
            right = accepts(self._question, argument)
            reward = self._right if right else self._wrong
            return RIGHT if right else WRONG, reward, True, False, {"success": right}
        info: dict[str, Any] = {}
        if verb == "search":
            found = search(argument, self._snippets)
            observation = "\n".join(fact.sentence for fact in found) or NOTHING
            chain = self._question.entities
            relevant = any(fact.subject in chain or fact.object in chain for fact in found)
            reward = 0.0 if relevant else self._irrelevant
        else:
            observation, reward = USAGE, self._invalid
            info["error"] = "invalid"
        hops = len(self._question.hops)
        limit = self._max_steps or (max(5, hops + 2) if self._spare is None else hops + 1 + self._spare)
        if self._steps < limit:
            return observation, reward, False, False, info
        self._over = True
        return f"{observation}\n{LATE}", self._late, False, True, {**info, "success": False}

    def tools(self) -> list[dict[str, Any]]:
        """The two actions as JSON-schema functions; a fresh list each time."""
        about = {"search": "Look up facts by a few words.", "answer": "Give the answer alone, which ends the episode."}
        return [
            {"type": "function", "function": {"name": name, "description": about[name], "parameters": {
                "type": "object", "properties": {argument: {"type": "string"}}, "required": [argument],
            }}}
            for name, argument in _ARGUMENT.items()
        ]  # fmt: skip


def _checked_split(split: Any) -> str:
    if not isinstance(split, str) or split not in SPLITS:
        raise UsageError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return split


def _checked_hops(hops: Any) -> tuple[int, ...]:
    given = (hops,) if isinstance(hops, int) else tuple(hops) if isinstance(hops, list | tuple | set) else ()
    if not given or any(isinstance(h, bool) or h not in HOPS for h in given):
        raise UsageError(f"hops must be 2, 3, 4 or several of them, got {hops!r}")
    return tuple(sorted(set(given)))


# --- the expert -------------------------------------------------------------------------------------------------------


class Expert:
    """Answers by the gold chain: one search a hop, then the answer; a `prm.env.Policy` to imitate or to spoil.

    It writes only entities that stand in the question or in an observation. What it does depends on the history alone,
    its seed included.

    Args:
        error: the probability, a step, of a plausible wrong move instead: a search without an entity, a search for
            something else that was seen, or a wrong answer, each as likely.
    """

    def __init__(self, error: float = 0.0) -> None:
        if not 0 <= error <= 1:
            raise UsageError(f"error must lie in [0, 1], got {error}")
        self.error = error

    def act(self, histories: Sequence[History]) -> list[Action]:
        """One action for each history. Raises UsageError where the task is no question of this environment."""
        return [Action(self._act(history)) for history in histories]

    def _act(self, history: History) -> str:
        asked = find(history.task)
        seen = {line for observation in history.observations for line in observation.split("\n")}
        draw = random.Random(f"expert {history.seed} {len(history.actions)} {history.task}")
        if draw.random() < self.error:
            return self._slip(asked, seen, draw)
        for (subject, name, _), fact in zip(asked.hops, asked.facts, strict=True):
            if fact.sentence not in seen:
                return f"search: {RELATIONS[name].query} {subject}"
        return f"answer: {asked.answers[0]}"

    def _slip(self, asked: Question, seen: set[str], draw: random.Random) -> str:
        named = {asked.hops[0][0]}
        named |= {entity for f in facts() if f.sentence in seen for entity in (f.subject, f.object)}
        query = draw.choice(sorted({relation.query for relation in RELATIONS.values()}))
        kind = draw.choice(("nothing", "elsewhere", "answer"))
        if kind == "nothing":
            return f"search: {query}"
        if kind == "elsewhere":
            return f"search: {query} {draw.choice(sorted(named.difference(asked.entities[1:])))}"
        return f"answer: {draw.choice(sorted(e for e in named if not accepts(asked, e)))}"


exact, sloppy = Expert(), Expert(error=0.3)
