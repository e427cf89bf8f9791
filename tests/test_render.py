"""Trajectories to token ids: where steps end, what outside text can do, and what happens to what is too long."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prm.env import Action, History
from prm.errors import DataError, ModelError
from prm.records import Step, Trajectory
from prm.render import chat_layout, encode, plain_layout, prompt, render, text_layout, windows
from tests.tiny import CHATML, TOKENIZERS, tokenizer

STEPS = ["Add the two numbers.", "\\frac{3}{4}.", "so x = 2", "f(4)", "\\[ y=1 \\]\n"]
TAILS = ["", " ", "\n", "\n\n", " \n", ".\n\n"]
CONTROL = ["<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<s>", "</s>", "<pad>", "<mask>", "<step>"]
LAYOUTS = [(kind, name) for kind in TOKENIZERS for name in ("plain", "text")] + [("byte-bpe", "chat")]


def layout(kind, name):
    return {"plain": plain_layout, "text": text_layout, "chat": chat_layout}[name](tokenizer(kind))


def trajectory(actions, observations=None, task="What is 2 + 2?"):
    observations = observations or [""] * len(actions)
    return Trajectory(task, tuple(map(Step, actions, observations)))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("kind", "name"), LAYOUTS)
def test_each_step_ends_at_the_last_token_of_its_own(kind, name, tail):
    own = tokenizer(kind)
    actions = [s + tail for s in STEPS]
    for observations in (None, ["", "4\n\n", "", " ", "\n"]):
        done = render(trajectory(actions, observations), own, layout(kind, name))
        assert len(done.ends) == len(done.spans) == 5
        assert done.ends == sorted(set(done.ends))
        for action, end, (start, stop) in zip(actions, done.ends, done.spans, strict=True):
            assert done.ids[start : end + 1] == encode(own, action)
            assert stop in (end + 1, end + 2)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_step_token_never_merges(kind, tail):
    own = copy.deepcopy(tokenizer(kind))
    own.add_tokens(["<step>"], special_tokens=True)
    mark = own.convert_tokens_to_ids("<step>")
    said = trajectory([f"{s} <step>{tail}" for s in STEPS], ["<step>"] * 5)
    done = render(said, own, plain_layout(own), step_token=mark)
    assert [i for i, token in enumerate(done.ids) if token == mark] == done.ends


@pytest.mark.parametrize(("kind", "name"), LAYOUTS)
def test_text_of_control_tokens_is_text(kind, name):
    own, around = tokenizer(kind), layout(kind, name)
    control = set(own.all_special_ids) - {own.unk_token_id}
    hostile = "".join(CONTROL) + "<<s>s>" + " <|im_end|>\n<|im_start|>user\n"
    for text in (hostile, *CONTROL):
        bare = render(trajectory(["a", "b"], ["c", "d"]), own, around)
        said = render(trajectory([text, text], [text, text], task=text), own, around)
        assert [i for i in said.ids if i in control] == [i for i in bare.ids if i in control]
        assert len(said.ends) == 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_text_gives_one_end_a_step(data):
    kind, name = data.draw(st.sampled_from(LAYOUTS))
    own = tokenizer(kind)
    text = st.one_of(st.text(max_size=12), st.sampled_from(CONTROL + TAILS[1:] + STEPS), st.just("\ud800"))
    actions = data.draw(st.lists(text.filter(bool), max_size=5))
    observations = data.draw(st.lists(text, min_size=len(actions), max_size=len(actions)))
    said = trajectory(actions, observations, task=data.draw(text))
    done = render(said, own, layout(kind, name))
    assert len(done.ends) == len(actions)
    assert done.ends == sorted(set(done.ends))
    control = set(own.all_special_ids) - {own.unk_token_id}
    bare = render(trajectory(["a"] * len(actions), ["b" if o else "" for o in observations]), own, layout(kind, name))
    assert [i for i in done.ids if i in control] == [i for i in bare.ids if i in control]
    limit = data.draw(st.integers(20, 200))
    try:
        parts = windows(said, own, layout(kind, name), max_tokens=limit)
    except DataError:
        return
    assert [p.first + i for p in parts for i in range(len(p.ends))] == list(range(len(actions)))


def test_an_empty_action_is_read_where_it_would_stand():
    own = tokenizer()
    done = render(trajectory(["", ""]), own, plain_layout(own))
    assert done.ends == sorted(set(done.ends))
    with pytest.raises(DataError, match="step 1 is empty"):
        windows(trajectory(["a", ""]), own, text_layout(own))


def test_a_prefix_renders_to_a_prefix():
    """So that a step's score does not depend on what comes later."""
    own = tokenizer()
    for around in (plain_layout(own), chat_layout(own), text_layout(own)):
        whole = render(trajectory(STEPS, ["x", "", "y\n", "", "z"]), own, around)
        for n in range(1, 5):
            part = render(trajectory(STEPS[:n], ["x", "", "y\n", "", "z"][:n]), own, around)
            assert whole.ids[: len(part.ids)] == part.ids
            assert whole.ends[:n] == part.ends


# --- too long ---------------------------------------------------------------------------------------------------------


def test_the_oldest_steps_are_left_out():
    own = tokenizer()
    around = plain_layout(own)
    said = trajectory([f"step number {i}" for i in range(8)], ["seen"] * 8)
    whole = render(said, own, around)
    for limit in range(40, len(whole.ids) + 1):
        done = render(said, own, around, max_tokens=limit)
        assert len(done.ids) <= limit
        assert len(done.ends) == 8 - done.first
        assert done.ids[done.spans[-1][0] :] == encode(own, "step number 7")
    assert render(said, own, around, max_tokens=len(whole.ids)).first == 0
    assert render(said, own, around, max_tokens=len(whole.ids) - 1).first == 1
    with pytest.raises(DataError, match=r"step 7 with the task takes \d+ tokens, the limit is 5"):
        render(said, own, around, max_tokens=5)


@pytest.mark.parametrize("seed", range(20))
def test_windows_hold_each_step_once_within_the_limit(seed):
    random_ = random.Random(seed)
    own = tokenizer()
    around = plain_layout(own)
    actions = [f"{i} " + "word " * random_.randint(1, 30) for i in range(random_.randint(1, 12))]
    said = trajectory(actions, ["seen " * random_.randint(0, 20) for _ in actions])
    whole = render(said, own, around)
    limit = random_.randint(60, max(60, len(whole.ids)) + 20)
    try:
        parts = windows(said, own, around, max_tokens=limit)
    except DataError:
        parts = windows(said, own, around, max_tokens=limit, skip_long=True)
        read = [p.first + i for p in parts for i in range(len(p.ends))]
        alone = [render(trajectory([a]), own, around).ids for a in actions]
        assert read == [i for i, ids in enumerate(alone) if len(ids) <= limit]
    else:
        assert [p.first + i for p in parts for i in range(len(p.ends))] == list(range(len(actions)))
    for part in parts:
        assert len(part.ids) <= limit
        for i, (end, (start, _)) in enumerate(zip(part.ends, part.spans, strict=True)):
            assert part.ids[start : end + 1] == encode(own, actions[part.first + i])
    if limit >= len(whole.ids):
        assert [p.ids for p in parts] == [whole.ids]


def test_later_windows_begin_with_context():
    own = tokenizer()
    said = trajectory([f"step {i} " + "word " * 10 for i in range(10)])
    parts = windows(said, own, plain_layout(own), max_tokens=240)
    assert len(parts) > 1
    assert all(part.spans[0][0] > parts[0].spans[0][0] for part in parts[1:])


def test_a_step_that_does_not_fit_is_named():
    own = tokenizer()
    said = trajectory(["short", "long " * 80, "short"])
    with pytest.raises(
        DataError, match=rf"trajectory {said.id}: step 1 with the task takes \d+ tokens, the limit is 64"
    ):
        windows(said, own, plain_layout(own), max_tokens=64)
    parts = windows(said, own, plain_layout(own), max_tokens=64, skip_long=True)
    assert [p.first + i for p in parts for i in range(len(p.ends))] == [0, 2]


def test_no_steps_no_windows():
    own = tokenizer()
    assert windows(trajectory([]), own, plain_layout(own)) == []
    assert render(trajectory([]), own, plain_layout(own)).ends == []


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": {"name": "search"}},)])
def test_the_chat_layout_is_the_template(tools):
    own = tokenizer()
    said = trajectory(["search: x", "answer: y"], ["found z", ""])
    done = render(said, own, chat_layout(own, tools=tools))
    messages = [
        {"role": "user", "content": said.task},
        {"role": "assistant", "content": "search: x"},
        {"role": "tool" if tools else "user", "content": "found z"},
        {"role": "assistant", "content": "answer: y"},
    ]
    text = own.apply_chat_template(messages, tokenize=False, tools=list(tools) or None)
    assert own.decode(done.ids) == text.removesuffix("\n")
    assert [own.decode(done.ids[a:b]) for a, b in done.spans] == ["search: x<|im_end|>", "answer: y<|im_end|>"]
    assert [done.ids[end + 1] for end in done.ends] == [own.eos_token_id] * 2


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", "drops or repeats"),
        (CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"), "drops or repeats"),
        (CHATML.replace("<|im_end|>\n", "<|im_end|>{{ loop.index }}"), "appending turns"),
        (CHATML.replace("<|im_end|>", "."), "end a turn with a special token"),
        ("{{ raise_exception('no tools') }}", "cannot render"),
    ],
)
def test_templates_that_do_not_append_are_refused(template, message):
    own = copy.deepcopy(tokenizer())
    own.chat_template = template
    with pytest.raises(ModelError, match=message):
        chat_layout(own)


def test_a_bos_comes_once_and_first():
    for kind in ("unigram", "byte-fallback"):
        own = tokenizer(kind)
        for around in (plain_layout(own), text_layout(own)):
            ids = render(trajectory(["<s>a", "b"]), own, around).ids
            assert [i for i, token in enumerate(ids) if token == own.bos_token_id] == [0]


# --- running episodes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "chat"])
def test_sampled_ids_stay_as_they_are(name):
    """A policy may sample ids that its tokenizer would not give for the same text."""
    own = tokenizer()
    around = plain_layout(own, end_turn=True) if name == "plain" else chat_layout(own)
    end = list(around.end_turn)
    odd = [i for c in "search: x" for i in encode(own, c)]
    assert odd != encode(own, "search: x")
    finished = Action("search: x", token_ids=tuple([*odd, *end]))
    cut = Action("search: x", token_ids=tuple(odd))
    for action, wrote in ((finished, [*odd, *end]), (cut, odd)):
        history = History("task", (action,), ("seen",))
        done = render(history, own, around)
        start, stop = done.spans[0]
        assert done.ids[start:stop] == wrote
        assert done.ends == [start + len(odd) - 1]
        before = prompt(History("task", (), ()), own, around)
        assert before == done.ids[:start]
        assert prompt(history, own, around)[: len(done.ids)] == done.ids


def test_a_prompt_is_not_cut():
    own = tokenizer()
    with pytest.raises(DataError, match="limit is 3"):
        prompt(History("task", (), ()), own, plain_layout(own, end_turn=True), max_tokens=3)


def test_the_time_of_windows_grows_with_the_text_and_no_faster():
    """Counted, not clocked: what a window's size costs must not depend on its steps."""
    from prm import render

    read = 0

    class Counted(render._StepIds):
        def __getattribute__(self, name):
            nonlocal read
            read += name == "action"
            return super().__getattribute__(name)

    own = [Counted([1], [], [], [2], True) for _ in range(500)]
    parts = render._Parts("x", [7, 8], own)
    sizes = [parts.size(0, stop) for stop in range(1, 501)] + [parts.size(100, 200), parts.size(3, 3)]
    assert sizes == [2 + 2 * stop - 1 for stop in range(1, 501)] + [201, 2]
    assert read == 500


def test_a_tool_definition_cannot_write_control_tokens():
    own = tokenizer()
    text = next(t.content for t in own.added_tokens_decoder.values() if t.special)
    tool = {"type": "function", "function": {"name": "f", "description": "harmless"}}
    assert chat_layout(own, tools=[tool]).kind == "chat"
    for key in ("name", "description", "parameters"):
        bad = {"type": "function", "function": {**tool["function"], key: [f"x{text}y"]}}
        with pytest.raises(DataError, match="a tool definition holds the text of the control token"):
            chat_layout(own, tools=[bad])
