"""Sampling with a cache across turns: the same tokens and log-probabilities as reading everything anew."""

from random import Random

import pytest
import torch

from prm.env import Action, History
from prm.errors import ModelError, UsageError
from prm.render import prompt, text_layout
from rl.generate import Generator
from rl.policies import EndpointPolicy, PolicyConfig, TransformersPolicy, load_policy
from rl.tiny import tiny_model, tiny_tokenizer

TEXTS = ["Task: find the river\n\nStep: search: river Nile\n\nResult: The Nile flows. Egypt", "Let x = 4.\n\nThen"]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(TEXTS * 3, 320)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer, width=32, layers=2).eval()


def reference(model, prompt_ids, ids, temperature=1.0):
    """Log-probabilities by one plain forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt_ids, *ids]])).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, -1)
    return [logprobs[len(prompt_ids) - 1 + i, t].item() for i, t in enumerate(ids)]


PROMPTS = [[5, 6, 7], [9] * 20, [11, 12, 13, 14, 15, 16, 17, 18, 19], [40]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(model, temperature):
    out = Generator(model, [1])(PROMPTS, max_tokens=6, temperature=temperature, randoms=[Random(i) for i in range(4)])
    for p, s in zip(PROMPTS, out, strict=True):
        assert s.logprobs == pytest.approx(reference(model, p, s.ids, temperature), abs=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(model):
    together = Generator(model, [1])(PROMPTS, max_tokens=6, randoms=[Random(i) for i in range(4)])
    backwards = Generator(model, [1])(PROMPTS[::-1], max_tokens=6, randoms=[Random(i) for i in range(3, -1, -1)])[::-1]
    alone = [Generator(model, [1])([p], max_tokens=6, randoms=[Random(i)])[0] for i, p in enumerate(PROMPTS)]
    assert [s.ids for s in together] == [s.ids for s in alone] == [s.ids for s in backwards]


def test_later_turns_read_only_what_is_new(model):
    """Three turns, rows that drop out, siblings of one prefix and a stranger: equal to reading all of it anew."""
    cached = Generator(model, [1])
    rows = [list(p) for p in PROMPTS]
    for turn in range(3):
        before = cached.read_tokens
        out = cached(rows, max_tokens=4, randoms=[Random(100 * turn + i) for i in range(len(rows))])
        fresh = Generator(model, [1])(rows, max_tokens=4, randoms=[Random(100 * turn + i) for i in range(len(rows))])
        assert [s.ids for s in out] == [s.ids for s in fresh]
        for row, one in zip(rows, out, strict=True):
            assert one.logprobs == pytest.approx(reference(model, row, one.ids), abs=1e-5)
        if turn:
            assert cached.read_tokens - before <= sum(1 + turn + 2 for _ in rows) + 7
        rows = [row + one.ids + [50 + turn] * (turn + 2) for row, one in zip(rows, out, strict=True)]
        if turn == 0:
            rows = [rows[2], rows[0], [*rows[0][:-1], 77], rows[0], [8] * 7]


def test_a_stop_id_and_the_limit_end_a_row(model):
    greedy = Generator(model, [])([PROMPTS[0]], max_tokens=5, temperature=0)[0]
    assert greedy.finish == "length" and len(greedy.ids) == 5
    stopped = Generator(model, [greedy.ids[2]])([PROMPTS[0]], max_tokens=5, temperature=0)[0]
    first = greedy.ids.index(greedy.ids[2])
    assert stopped.finish == "stop" and stopped.ids == greedy.ids[: first + 1]


def test_the_distribution_is_the_models(model):
    with torch.no_grad():
        probs = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].float().softmax(-1)
    n = 4000
    out = Generator(model, [1])([[5, 6, 7]] * n, max_tokens=1, randoms=[Random(i) for i in range(n)])
    counts = torch.bincount(torch.tensor([s.ids[0] for s in out]), minlength=len(probs))
    expected = probs * n
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    degrees = len(probs) - 1
    assert abs(chi2 - degrees) < 5 * (2 * degrees) ** 0.5


def test_nucleus_keeps_the_most_likely(model):
    with torch.no_grad():
        probs = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].float().softmax(-1)
    ranked, by_rank = probs.sort(descending=True)
    allowed = set(by_rank[ranked.cumsum(0) - ranked < 0.3].tolist())
    out = Generator(model, [1])([[5, 6, 7]] * 300, max_tokens=1, top_p=0.3, randoms=[Random(i) for i in range(300)])
    assert {s.ids[0] for s in out} <= allowed


def policy(model, tokenizer, **options):
    return TransformersPolicy(model, tokenizer, PolicyConfig("p", **options))


def test_what_is_fed_is_what_was_sampled(model, tokenizer):
    acting = policy(model, tokenizer, max_action_tokens=5)
    history = History("find the river", seed=1)
    recorded: list[int] = []
    for turn in range(3):
        fed = prompt(history, tokenizer, acting.layout())
        assert fed[: len(recorded)] == recorded
        action = acting.act([history])[0]
        assert len(action.token_ids) == len(action.logprobs) > 0
        recorded = fed + list(action.token_ids)
        history = history.then(action, f"answer {turn}")


def test_cut_and_continue_is_one_shot_greedy(model, tokenizer):
    """A prefix is continued byte for byte: no turn is opened, no second BOS, no end of turn in between."""
    task = "Let x = 4.\n\n"
    greedy = policy(model, tokenizer, layout="text", temperature=0.0, max_action_tokens=24)
    whole = greedy.act([History(task)])[0]
    for cut in range(1, len(whole.token_ids)):
        head = Action(tokenizer.decode(whole.token_ids[:cut]), whole.token_ids[:cut])
        rest = greedy.act([History(task, (head,), ("",))])[0]
        assert list(head.token_ids + rest.token_ids)[: len(whole.token_ids)] == list(whole.token_ids)


@pytest.mark.parametrize("prefix", ["Let x = 4.\n\n", "Then 2x = 8. ", "    indented code\n", "tab\t\r\n", "é\u200b"])
def test_a_text_prefix_reaches_the_model_unchanged(tokenizer, prefix):
    ids = prompt(History("Solve.\n", (Action(prefix),), ("",)), tokenizer, text_layout(tokenizer))
    assert tokenizer.decode(ids) == "Solve.\n" + prefix
    assert tokenizer.bos_token_id not in ids and tokenizer.eos_token_id not in ids


def test_stop_texts_end_a_step_and_stay_in_it(model, tokenizer):
    free = policy(model, tokenizer, layout="text", max_action_tokens=60).act([History("Let x", seed=3)])[0]
    stop = free.text[len(free.text) // 2]
    cut = policy(model, tokenizer, layout="text", max_action_tokens=60, stop=(stop,)).act([History("Let x", seed=3)])[0]
    assert stop in cut.text and stop not in cut.text[: cut.text.index(stop)]
    assert free.token_ids[: len(cut.token_ids)] == cut.token_ids and cut.finish == "stop"


def test_a_full_context_is_an_empty_action_not_a_crash(model, tokenizer):
    small = policy(model, tokenizer, max_context_tokens=40, max_action_tokens=8)
    long, short = small.act([History("river " * 100), History("go")])
    assert (long.text, long.token_ids, long.finish) == ("", (), "length") and short.token_ids


def test_draws_differ_by_seed_and_step_only(model, tokenizer):
    acting = policy(model, tokenizer, max_action_tokens=12)
    texts = [a.text for a in acting.act([History("go", seed=s) for s in (1, 2, 3, 1)])]
    assert texts[0] == texts[3] and len(set(texts)) == 3


def test_a_missing_checkpoint_and_a_thing_that_cannot_act_are_named(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_policy(PolicyConfig(str(tmp_path / "none")))
    with pytest.raises(UsageError, match="cannot be made without arguments"):
        load_policy(PolicyConfig("prm.records:Step"))
    with pytest.raises(UsageError, match="a dict has no act"):
        load_policy(PolicyConfig("builtins:dict"))
    with pytest.raises(UsageError, match="temperature must be >= 0"):
        EndpointPolicy("m", PolicyConfig("openai:m", temperature=-1.0, base_url="http://127.0.0.1:1"))
