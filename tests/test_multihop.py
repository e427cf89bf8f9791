"""The question answering environment: its data, its questions, what it pays, what it never tells, and its expert."""

import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prm.env import Action, Env, Episode, History, check_env, load_attribute, replay
from prm.errors import EnvError, UsageError
from rl.envs import multihop
from rl.envs.multihop import (
    HOPS,
    LATE,
    NOTHING,
    RELATIONS,
    RIGHT,
    SPLITS,
    USAGE,
    WRONG,
    Expert,
    MultiHop,
    accepts,
    facts,
    find,
    normalise,
    parse_action,
    question,
    questions,
    search,
)

STEADY = settings(max_examples=150, deadline=None, derandomize=True)
ALL = [q for split in SPLITS for q in questions(split)]
SAMPLE = random.Random(7).sample(ALL, 200)
LIMA = next(q for q in ALL if q.hops[0] == ("Lima", "capital of", "Peru"))


def start(asked, **parameters):
    env = MultiHop(split=asked.split, **parameters)
    index = questions(asked.split).index(asked)
    assert env.reset(options={"question": index})[0] == asked.text
    return env


def query(hop):
    return f"{RELATIONS[hop[1]].query} {hop[0]}"


def play(policy, seed, **parameters):
    episode = Episode(MultiHop(**parameters), seed)
    while not episode.done:
        episode.step(policy.act([episode.history])[0])
    return episode


# --- the data ---------------------------------------------------------------------------------------------------------


def test_counts():
    assert len(facts()) >= 1000 and len({f.sentence for f in facts()}) == len(facts())
    assert len(ALL) >= 2000 and len({q.text for q in ALL}) == len(ALL)
    for split in SPLITS:
        for hops in HOPS:
            assert len(questions(split, hops)) >= 300
            assert {len(q.hops) for q in questions(split, (hops,))} == {hops}


def test_a_name_is_written_in_one_way():
    spellings = {}
    for fact in facts():
        for name in (fact.subject, fact.object):
            if fact.relation not in ("internet domain", "calling code", "symbol", "atomic number"):
                spellings.setdefault(normalise(name), set()).add(name)
    assert not {tuple(names) for names in spellings.values() if len(names) > 1}


def test_known_facts():
    held = {(f.subject, f.relation, f.object) for f in facts()}
    assert held >= {
        ("Peru", "capital", "Lima"), ("Japan", "currency", "Japanese yen"), ("iron", "symbol", "Fe"),
        ("Faust", "author", "Johann Wolfgang von Goethe"), ("Albert Einstein", "birthplace", "Ulm"),
        ("Nile", "mouth", "Egypt"), ("germanium", "discoverer", "Clemens Winkler"), ("Kazakhstan", "capital", "Astana"),
    }  # fmt: skip


def test_splits_share_no_start_and_no_bridge():
    entities = {split: {e for q in questions(split) for e in q.entities} for split in SPLITS}
    assert not entities["train"] & (entities["dev"] | entities["test"])
    assert not entities["dev"] & entities["test"]


def test_chains_hang_together_and_questions_do_not_hold_their_answer():
    for q in ALL:
        assert all(first[2] == second[0] for first, second in pairwise(q.hops))
        assert q.answers[0] == q.hops[-1][2] and q.answers[0] not in q.entities
        words = f" {normalise(q.text)} "
        assert not [a for a in (*q.answers, *q.entities[1:]) if f" {normalise(a)} " in words], q
        assert normalise(q.entities[0]) in words
        for (subject, _, obj), fact in zip(q.hops, q.facts, strict=True):
            assert {subject, obj} == {fact.subject, fact.object}
            assert subject in fact.sentence and obj in fact.sentence
        assert len(q.text.split()) <= 25


def test_the_expert_query_finds_the_fact_of_each_hop():
    first = 0
    hops = {(hop, fact) for q in ALL for hop, fact in zip(q.hops, q.facts, strict=True)}
    for hop, fact in hops:
        found = search(query(hop))
        assert fact in found
        first += found[0] == fact
    assert first / len(hops) > 0.98
    assert search("Peru currency")[0] == search("currency Peru")[0] == search("CURRENCY, péru?")[0]


def test_choosing_questions():
    assert question("dev", 3) is questions("dev")[3] is find(questions("dev")[3].text)
    assert questions("dev", 2) == questions("dev", (2,)) == questions("dev", [2, 2])
    for bad in (-1, 10**6, True, "1", None, 1.0):
        with pytest.raises(UsageError, match="from 0 to"):
            question("dev", bad)
    with pytest.raises(UsageError, match="split must be one of"):
        questions("valid")
    with pytest.raises(UsageError, match="no question of this environment"):
        find("What is 1 + 1?")


# --- answers and actions ----------------------------------------------------------------------------------------------


def test_normalise():
    for text in ("The São-Tomé!", "sao tome", "  SÃO\n tomé.", "ｓａｏ ＴＯＭＥ", "a são\u00a0tomé"):
        assert normalise(text) == "sao tome", text
    assert normalise("Łódź") == "lodz" and normalise("Ørsted") == "orsted" and normalise("Größe") == "grosse"
    assert normalise("N'Djamena") == normalise("N’Djamena") == "ndjamena" and normalise("U.S.A.") == "usa"
    assert normalise("-89") == "minus 89" != normalise("89") and normalise("x-89") == "x 89", "a sign is not a hyphen"
    assert normalise("The") == "the" and normalise("\0!?") == "" and normalise("+51") == "51"


@given(st.text())
@STEADY
def test_normalise_is_a_projection(text):
    assert normalise(normalise(text)) == normalise(text) or normalise(text).split()[0] in ("the", "a", "an")


@pytest.mark.parametrize("text", ["United States", "the united states", "USA", "U.S.A.", "United States of America."])
def test_aliases_are_right(text):
    assert accepts(next(q for q in ALL if q.answers[0] == "United States"), text)


@pytest.mark.parametrize(
    "text", ["Peru or Chile", "Peru, Chile, Brazil", "Peru is the country", "not Peru", "Per", "eru", "Peruvian", "",
             "!", "the", "Peru " * 500, "Peru\0Chile", "Peru Peru"]
)  # fmt: skip
def test_more_or_less_than_the_answer_is_wrong(text):
    peru = next(q for q in ALL if q.answers[0] == "Peru")
    assert accepts(peru, "peru.") and not accepts(peru, text)


CALL = '{"name": "search", "arguments": {"query": "capital Peru"}}'


@pytest.mark.parametrize(
    "text",
    ["search: capital Peru", "  SEARCH :capital Peru  ", "I need the capital.\nSearch: capital Peru\n",
     "<think>\nanswer: Rome?\n</think>\n\nsearch: capital Peru", "answer: Rome\n</think>search: capital Peru",
     "search: capital Peru\r\nand then we shall see", "search: capital Peru\nsearch: capital Peru",
     CALL, f"<tool_call>{CALL}</tool_call>", f"Well.\n<tool_call>\n{CALL}\n</tool_call>\n", f"<tool_call>{CALL}",
     json.dumps({"name": "search", "arguments": json.dumps({"query": "capital Peru"})})],
)  # fmt: skip
def test_actions_that_search(text):
    assert parse_action(text) == ("search", "capital Peru")


@pytest.mark.parametrize(
    "text",
    ["", "capital Peru", "research: Peru", "I will search: Peru", "search Peru", "answer:", "answer:  \n", "\0", "{",
     "[]", "search: Peru\nanswer: Lima", "answer: Lima\nanswer: Cusco", f"<tool_call>{CALL}</tool_call>\nanswer: Lima",
     f"<tool_call>{CALL}</tool_call><tool_call>{CALL.replace('Peru', 'Chile')}</tool_call>",
     f"<tool_call>{CALL[:-1]}</tool_call>", '{"name": "look", "arguments": {"query": "x"}}', '{"name": ["search"]}',
     '{"name": "search", "arguments": {"text": "x"}}', '{"name": "search", "arguments": {"query": 3}}',
     '{"name": "search", "arguments": [1]}', '{"name": "search", "arguments": "x"}', "<tool_call></tool_call>",
     '{"name": {}, "arguments": {}}', "{" * 5000, '{"a":' * 50000, '{"name": ' + "1" * 5000 + "}"],
)  # fmt: skip
def test_texts_that_are_no_action(text):
    assert parse_action(text) is None
    env = start(LIMA, invalid=-0.25)
    assert env.step(text) == (USAGE, -0.25, False, False, {"error": "invalid"})
    assert env.step(f"answer: {LIMA.answers[0]}")[1:] == (1.0, True, False, {"success": True})


def test_tools_are_what_parse_action_reads():
    for tool in MultiHop().tools():
        name, parameters = tool["function"]["name"], tool["function"]["parameters"]
        call = {"name": name, "arguments": {parameters["required"][0]: "x"}}
        assert parse_action(f"<tool_call>\n{json.dumps(call)}\n</tool_call>") == (name, "x")


HOSTILE = ['"', "'", "a\" OR \"b", "NEAR(", "words:Lima", "* AND NOT", "(", "-", "^Lima", "\0", "Lima\0Peru", "{lima}",
           "x" * 100_000, "Lima " * 20_000, "; DROP TABLE fact", "\ud800", "ﷺ" * 1000, "½ ² ౪", "\u202e"]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_queries(text):
    assert len(search(text)) <= 3
    observation, reward, *_ = start(LIMA).step(f"search: {text}")
    assert observation and reward in (0.0, -0.1)


@given(st.text(st.characters(), max_size=60))
@STEADY
def test_any_query_and_any_action_is_taken(text):
    assert search(text) == search(text) and len(search(text, 2)) <= 2
    observation, reward, _, _, info = start(LIMA).step(text)
    assert isinstance(observation, str) and isinstance(reward, float) and set(info) <= {"error", "success"}


# --- the environment --------------------------------------------------------------------------------------------------


def test_it_keeps_to_the_protocol():
    actions = ["search: capital Peru", "nonsense", "search: Lima", "search: zzz", "answer: Peru"]
    assert isinstance(MultiHop(), Env)
    check_env(MultiHop, actions)
    check_env(lambda: MultiHop(split="test", hops=4, max_steps=2), actions)
    assert load_attribute("rl.envs.multihop:MultiHop") is MultiHop
    assert load_attribute("rl.envs.multihop:Expert")().act([]) == []


def test_rewards_are_parameters():
    pays = {"right": 3.0, "wrong": -4.0, "irrelevant_search": -5.0, "out_of_steps": -6.0, "invalid": -7.0}
    env = start(LIMA, **pays, max_steps=4)
    assert env.step("search: zzz") == (NOTHING, -5.0, False, False, {})
    assert env.step("search: capital Lima")[1] == 0.0
    assert env.step("hello")[1] == -7.0
    assert env.step("search: zzz") == (f"{NOTHING}\n{LATE}", -6.0, False, True, {"success": False})
    assert start(LIMA, **pays).step("answer: Atlantis") == (WRONG, -4.0, True, False, {"success": False})
    assert start(LIMA, **pays).step(f"answer: {LIMA.answers[0]}") == (RIGHT, 3.0, True, False, {"success": True})


def test_default_rewards():
    env = start(LIMA)
    assert env.step("search: atomic number iron")[1] == -0.1
    assert env.step("what?")[1] == -0.1
    assert env.step("answer: Atlantis")[1] == -0.5


def test_a_search_for_the_answer_alone_is_not_told_from_others():
    q = next(q for q in ALL if q.answers[0] == "Spree" and len(q.hops) == 4)
    env = start(q)
    assert env.step("search: river Seine")[1] == -0.1
    found = search("river Tiber")
    assert not any(e in (f.subject, f.object) for f in found for e in q.entities)
    assert env.step("search: Ponte Vecchio")[1] == -0.1
    assert env.step(f"search: {q.entities[1]}")[1] == 0.0


def test_the_step_limit():
    for q, limit in ((questions("dev", 2)[0], 5), (questions("dev", 3)[0], 5), (questions("dev", 4)[0], 6)):
        env = start(q)
        results = [env.step("search: zzz") for _ in range(limit)]
        assert [r[3] for r in results] == [False] * (limit - 1) + [True]
        assert not any(r[2] for r in results)
        assert results[-1][1] == -1.0 and results[-1][4] == {"success": False}
    for spare in (0, 2):
        env = start(LIMA, spare=spare)
        results = [env.step("search: zzz") for _ in range(len(LIMA.hops) + 1 + spare)]
        assert [r[3] for r in results] == [False] * (len(results) - 1) + [True]
    env = start(LIMA, max_steps=1)
    assert env.step("???") == (f"{USAGE}\n{LATE}", -1.0, False, True, {"error": "invalid", "success": False})
    env = start(LIMA, max_steps=1)
    assert env.step(f"answer: {LIMA.answers[0]}")[1:4] == (1.0, True, False)


def test_steps_outside_an_episode():
    env = MultiHop()
    with pytest.raises(EnvError, match="call reset before step"):
        env.step("search: x")
    env.reset(seed=1)
    with pytest.raises(EnvError, match="string, got NoneType"):
        env.step(None)
    env.step("answer: Atlantis")
    for _ in range(2):
        with pytest.raises(EnvError, match="the episode is over"):
            env.step("search: x")
    env.reset()
    env.step("search: x")


@pytest.mark.parametrize(
    "parameters", [{"split": "valid"}, {"split": None}, {"hops": 1}, {"hops": ()}, {"hops": (2, 5)}, {"hops": "2"},
                   {"hops": True}, {"max_steps": 0}, {"max_steps": 2.5}, {"snippets": 0}, {"snippets": True},
                   {"spare": -1}, {"spare": True}, {"spare": 0, "max_steps": 4}]
)  # fmt: skip
def test_parameters_that_make_no_sense(parameters):
    with pytest.raises(UsageError, match=next(iter(parameters))):
        MultiHop(**parameters)


def test_options():
    env = MultiHop(hops=2)
    assert env.reset(options={"question": 5, "split": "test"})[0] == question("test", 5).text
    for _ in range(5):
        q = find(env.reset(options={"split": "dev", "hops": [3, 4]})[0])
        assert q.split == "dev" and len(q.hops) in (3, 4)
        q = find(env.reset()[0])
        assert q.split == "train" and len(q.hops) == 2
    for options in ({"level": 1}, {"question": -1}, {"hops": 7}, {"split": "x"}):
        with pytest.raises(UsageError):
            env.reset(options=options)
    assert len(start(LIMA, snippets=1).step("search: capital Lima")[0].split("\n")) == 1


def test_seeds():
    env, other = MultiHop(), MultiHop()
    first = env.reset(seed=123)[0]
    env.step("search: x")
    assert [env.reset(seed=123)[0] for _ in range(3)] == [first] * 3 == [other.reset(seed=123)[0] for _ in range(3)]
    assert len({env.reset(seed=seed)[0] for seed in range(-50, 450)}) == 500
    after = [(e.reset(seed=9), [e.reset()[0] for _ in range(50)])[1] for e in (env, other)]
    assert after[0] == after[1] and len(set(after[0])) > 45
    drawn = [env.reset()[0] for _ in range(50)]
    assert all(a != b for a, b in pairwise(drawn))
    assert [MultiHop().reset()[0] for _ in range(3)] != [MultiHop().reset()[0] for _ in range(3)]


def test_the_global_generator_is_left_alone():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    tasks = [MultiHop().reset()[0] for _ in range(5)]
    play(Expert(0.5), 3)
    assert random.random() == expected
    random.seed(5)
    assert [MultiHop().reset()[0] for _ in range(5)] != tasks


SCRIPT = """
import json, sys
from prm.env import Episode
from rl.envs.multihop import Expert, MultiHop
assert "torch" not in sys.modules
out = []
for seed in range(12):
    episode = Episode(MultiHop(), seed)
    while not episode.done:
        episode.step(Expert(0.4).act([episode.history])[0])
    out.append([episode.history.task, [s.action for s in episode.history.steps], episode.history.observations[-1]])
print(json.dumps([out, MultiHop().reset(seed=123)[0]]))
"""


def test_processes_agree():
    def run(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=True).stdout

    output = run("1")
    assert output == run("77")
    assert json.loads(output)[1] == MultiHop().reset(seed=123)[0]


def test_sixteen_episodes_side_by_side():
    alone = [play(Expert(0.3), seed).trajectory() for seed in range(16)]
    episodes = [Episode(MultiHop(), seed) for seed in range(16)]
    draw = random.Random(0)
    while running := [e for e in episodes if not e.done]:
        episode = draw.choice(running)
        episode.step(Expert(0.3).act([episode.history])[0])
    assert [e.trajectory() for e in episodes] == alone
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda seed: play(Expert(0.3), seed).trajectory(), range(16))) == alone
    assert [replay(MultiHop(), t).trajectory() for t in alone] == alone


def test_what_is_returned_is_not_what_is_kept():
    env = MultiHop()
    task, info = env.reset(seed=4)
    info["x"] = 1
    for tool in (tools := env.tools()):
        tool["function"].clear()
    tools.clear()
    _, _, _, _, info = env.step("hello")
    info.clear()
    assert env.reset(seed=4) == (task, {}) and len(env.tools()) == 2 and env.tools()[0]["function"]["name"] == "search"
    assert env.step("hello")[4] == {"error": "invalid"}
    assert not [v for v in vars(MultiHop).values() if isinstance(v, list | dict | set)]


# --- what it never tells ----------------------------------------------------------------------------------------------

SENTENCES = {f.sentence for f in facts()}
WORDS = st.sampled_from([w for f in facts()[::40] for w in f.sentence.rstrip(".").split()])
ACTIONS = st.one_of(
    st.lists(WORDS, max_size=4).map(lambda words: "search: " + " ".join(words)),
    st.sampled_from(["answer: Atlantis", "answer:", "help", "tell me the answer", "", '{"name": "answer"}', CALL]),
    st.text(max_size=30),
)


def test_no_fixed_text_holds_an_answer():
    fixed = " ".join([USAGE, NOTHING, RIGHT, WRONG, LATE, json.dumps(MultiHop().tools())])
    for answer in {a for q in ALL for a in q.answers}:
        assert not re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", fixed), answer


@given(st.sampled_from(SAMPLE), st.lists(ACTIONS, max_size=7))
@STEADY
def test_only_a_search_finds_anything(asked, actions):
    env = start(asked)
    assert env.reset(options={"question": questions(asked.split).index(asked)})[1] == {}
    for action in actions:
        observation, _, terminated, truncated, info = env.step(action)
        verb, argument = parse_action(action) or ("", "")
        lines = observation.removesuffix(f"\n{LATE}").split("\n")
        if verb == "search":
            assert lines == ([f.sentence for f in search(argument)] or [NOTHING])
        else:
            assert lines == [{"answer": WRONG}.get(verb, USAGE)] or accepts(asked, argument)
        assert set(info) <= {"error", "success"} and ("success" in info) == (terminated or truncated)
        if terminated or truncated:
            break


def test_the_answer_shows_only_where_the_last_fact_was_found():
    for q in SAMPLE:
        env = start(q)
        for hop, fact in zip(q.hops[:-1], q.facts[:-1], strict=True):
            observation = env.step(f"search: {query(hop)}")[0]
            assert fact.sentence in observation.split("\n")
            assert set(observation.split("\n")) <= SENTENCES
        assert env.step("answer: Atlantis")[0] == WRONG


# --- the expert -------------------------------------------------------------------------------------------------------


def test_the_expert_solves_every_question_from_what_it_has_seen():
    expert, envs = Expert(), {split: MultiHop(split=split, right=2.0) for split in SPLITS}
    for split in SPLITS:
        for index, q in enumerate(questions(split)):
            task, _ = envs[split].reset(options={"question": index})
            history, done = History(task), False
            while not done:
                action = expert.act([history])[0]
                named = action.text.removeprefix("answer: ")
                if action.text.startswith("search"):
                    named = next(e for e in q.entities[len(history.actions):] if action.text.endswith(f" {e}"))
                assert any(named in text for text in (task, *history.observations))
                observation, reward, done, _, info = envs[split].step(action.text)
                assert reward == (2.0 if done else 0.0)
                history = history.then(action, observation)
            assert info == {"success": True} and 2 <= len(history.actions) <= len(q.hops) + 1


def test_the_expert_errs_as_often_as_asked():
    right = {error: sum(play(Expert(error), s).outcome for s in range(60)) for error in (0.0, 0.3, 0.7)}
    assert right[0.0] == 60 > right[0.3] > right[0.7]
    with pytest.raises(UsageError, match="error must lie"):
        Expert(1.5)
    with pytest.raises(UsageError, match="no question"):
        Expert().act([History("What is 1 + 1?")])


def test_the_slips_of_the_expert():
    task = LIMA.text
    slips = {Expert(1.0).act([History(task, seed=seed)])[0].text for seed in range(200)}
    assert {"search: currency", "search: river Lima", "answer: Lima"} <= slips
    assert all(parse_action(slip) for slip in slips)
    found = search("capital Lima")
    history = History(task).then(Action("search: capital Lima"), "\n".join(f.sentence for f in found))
    seen = f"{task}\n{history.observations[0]}"
    for seed in range(200):
        text = Expert(1.0).act([History(task, history.actions, history.observations, seed=seed)])[0].text
        verb, argument = parse_action(text)
        relation = next((r.query for r in sorted(RELATIONS.values(), key=lambda r: -len(r.query))
                         if verb == "search" and argument.startswith(r.query)), "")  # fmt: skip
        assert argument.removeprefix(relation).strip() in seen
        assert verb == "search" or not accepts(LIMA, argument)


def test_the_expert_depends_on_the_history_alone():
    histories = [History(LIMA.text, seed=seed) for seed in range(40)]
    expert = Expert(0.5)
    at_once = expert.act(histories)
    assert [Expert(0.5).act([h])[0] for h in reversed(histories)] == at_once[::-1] == expert.act(histories)[::-1]
    assert len({a.text for a in at_once}) > 3


def test_without_fts5_the_message_says_so(monkeypatch):
    class Poor:
        def execute(self, *_):
            raise multihop.sqlite3.OperationalError("no such module: fts5")

    monkeypatch.setattr(multihop.sqlite3, "connect", lambda *_, **__: Poor())
    with pytest.raises(EnvError, match=r"needs an SQLite with FTS5.*no such module"):
        multihop._index.__wrapped__()
