"""Shared-prefix scoring: the same scores as alone, each distinct token read once, and nothing padded."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import (
    AutoModel,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from prm import PRM, Step, StepLabel, Trajectory, append_jsonl, read_jsonl
from prm.cli import main
from prm.shared import SharedReader, readable
from tests.tiny import model, tokenizer


def mistral(**options):
    own = tokenizer()
    config = MistralConfig(
        vocab_size=len(own), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return MistralForCausalLM(config).eval()


def qwen3():
    own = tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(own), hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=8, initializer_range=0.3, use_sliding_window=True, sliding_window=8,
        max_window_layers=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer()), n_embd=32, n_layer=2, n_head=2)).eval()


MODELS = {
    "llama": model,
    "qwen2": lambda: model(kind="qwen2"),
    "mistral, window 8": lambda: mistral(sliding_window=8),
    "grouped heads": lambda: mistral(sliding_window=None),
    "qwen3, some layers with a window": qwen3,
    "gpt2": gpt2,
}


@pytest.fixture(scope="module")
def prms():
    return {name: PRM.create(make(), tokenizer=tokenizer()) for name, make in MODELS.items()}


def unique(sequences):
    """How many distinct non-empty prefixes there are: the nodes of a trie with one token a node."""
    return len({tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)})


def reader(prm, keep_tokens=0):
    return SharedReader(prm.backbone, prm.readout, keep_tokens)


def alone(prm, sequences):
    with torch.no_grad():
        return [prm.readout(prm.backbone(input_ids=torch.tensor([s])).last_hidden_state[0]) for s in sequences]


def agree(found, expected, tolerance=1e-5):
    assert [len(x) for x in found] == [len(x) for x in expected]
    assert all(float((a - b).abs().max()) < tolerance for a, b in zip(found, expected, strict=True))


SIBLINGS = [
    Trajectory("What is 2 + 2?", (*(Step(f"search: {w}", "Paris is the capital. " * 4) for w in "abc"), Step(last)))
    for last in ("answer: 4", "answer: 5", "search: once more", "answer: 4")
]
GROWING = [Trajectory(SIBLINGS[0].task, SIBLINGS[0].steps[:n]) for n in range(5)]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_siblings_score_as_alone_and_each_token_is_read_once(prms, name):
    prm = prms[name]
    assert prm.shares
    texts = [*SIBLINGS, *GROWING, Trajectory("other", (Step("a"), Step("b", "c")))]
    parts = [part for t in texts for part in prm.render(t)]
    expected = [prm.logits([part]).detach() for part in parts]
    assert sum(len(p.ids) for p in parts) > 3 * unique([p.ids for p in parts])
    for pass_tokens in (1, 40, 150, 1 << 20):
        one = reader(prm)
        agree(prm.raw(parts, batch_tokens=pass_tokens, reader=one), expected)
        assert one.read_tokens == unique([p.ids for p in parts])
    scores = prm.score(texts)
    assert scores[0] == scores[3] and scores[4] == []
    for t, own in zip(texts, scores, strict=True):
        assert own == pytest.approx(prm.score([t])[0], abs=1e-5)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_any_sequences_in_any_passes(prms, sequences, pass_tokens, calls):
    """Small alphabets branch everywhere: in the middle of a run, at its end, after one token, in the cache."""
    prm = prms["mistral, window 8"]
    expected = alone(prm, sequences)
    one = reader(prm)
    agree(one(sequences, pass_tokens=pass_tokens), expected)
    assert one.read_tokens == unique(sequences)
    kept, seen = reader(prm, keep_tokens=1 << 20), []
    for call in range(calls + 1):
        own = sequences[call:] + sequences[:1]
        agree(kept(own, pass_tokens=pass_tokens), [*expected[call:], expected[0]])
        seen += own
        assert kept.read_tokens == unique(seen)


def test_a_session_reads_only_what_is_new(prms):
    prm = prms["qwen2"]
    session, texts = prm.session(), []
    for grown in [*GROWING, *SIBLINGS]:
        assert session.score([grown])[0] == pytest.approx(prm.score([grown])[0], abs=1e-5)
        texts.append(grown)
    parts = [part.ids for t in texts for part in prm.render(t)]
    assert session.read_tokens == unique(parts)
    small = prm.session(keep_tokens=100)
    for grown in GROWING * 2:
        assert small.score([grown])[0] == pytest.approx(prm.score([grown])[0], abs=1e-5)
    assert small._reader._kept <= 100 + max(map(len, parts))


def test_no_language_model_head_is_computed(prms):
    def refuse(*_):
        raise AssertionError("the vocabulary was computed")

    prm = PRM.create(model(), tokenizer=tokenizer())
    sizes = [len(m.weight) for m in prm.model.modules() if isinstance(m, torch.nn.Linear)]
    assert max(sizes) < len(tokenizer())
    before = prm.backbone.config._attn_implementation
    prm.score(SIBLINGS)
    assert prm.backbone.config._attn_implementation == before


def test_training_goes_on_as_before(prms):
    """Scoring changes neither the mode of the model nor what a training step computes."""
    prm = PRM.create(model(), tokenizer=tokenizer())
    part = prm.render(SIBLINGS[0])
    prm.model.train()
    before = prm.logits(part)
    prm.score(SIBLINGS)
    assert prm.model.training
    after = prm.logits(part)
    assert torch.equal(before, after) and after.requires_grad
    after.sum().backward()
    assert all(p.grad is not None for p in prm.backbone.parameters())


def test_lora_is_read_as_a_tree(prms):
    prm = PRM.create(model(), tokenizer=tokenizer(), lora_rank=4)
    with torch.no_grad():
        for name, p in prm.model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.2)
    assert prm.shares
    parts = [p for t in SIBLINGS for p in prm.render(t)]
    agree(prm.raw(parts), [prm.logits([p]).detach() for p in parts])


def test_bfloat16_keeps_its_tolerance(prms):
    prm = PRM.create(model(), tokenizer=tokenizer(), dtype="bfloat16")
    assert prm.shares
    for t, own in zip(SIBLINGS, prm.score(SIBLINGS), strict=True):
        assert own == pytest.approx(prm.score([t])[0], abs=0.02)


def test_a_model_that_reads_otherwise_is_seen(prms):
    """What does not go through the attention interface, or mixes tokens along the row, falls back to padded batches."""
    prm = PRM.create(model(), tokenizer=tokenizer())

    class Mixes(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, **kwargs):
            out = self.inner(**kwargs)
            out.last_hidden_state = out.last_hidden_state.cumsum(1)
            return out

    assert readable(prm.backbone, prm.readout)
    assert not readable(Mixes(prm.backbone), prm.readout)
    prm.backbone.config.layer_types = ["linear_attention", "full_attention"]
    assert not readable(prm.backbone, prm.readout)


def test_padded_batches_give_the_same(prms):
    prm = PRM.create(model(), tokenizer=tokenizer())
    shared = prm.score(SIBLINGS + GROWING)
    prm.__dict__["shares"] = False
    for a, b in zip(prm.score(SIBLINGS + GROWING), shared, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    assert prm.session().read_tokens == 0


def test_compiled_scores_are_the_same(prms, tmp_path):
    PRM.create(model(), tokenizer=tokenizer()).save(tmp_path / "prm")
    plain = PRM.load(tmp_path / "prm")
    compiled = PRM.load(tmp_path / "prm")
    # The compiler's front end alone: its back end needs a C++ compiler and minutes.
    compiled.compiled = torch.compile(compiled.backbone, dynamic=True, backend="eager")
    assert not compiled.shares
    for a, b in zip(compiled.score(SIBLINGS), plain.score(SIBLINGS), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_a_stream_is_read_in_chunks(prms, monkeypatch):
    from prm import batching

    monkeypatch.setattr(batching, "CHUNK_TRAJECTORIES", 3)
    prm, asked = prms["llama"], 0

    def source():
        nonlocal asked
        for t in SIBLINGS * 3:
            asked += 1
            yield t

    stream = prm.stream(source())
    next(stream)
    assert asked == 3
    assert [t.id for t, _ in stream] == [t.id for t in (SIBLINGS * 3)[1:]]


def test_the_plain_backbone_is_untouched(tmp_path):
    made = model()
    made.save_pretrained(tmp_path)
    plain = AutoModel.from_pretrained(tmp_path).eval()
    prm = PRM.create(made, tokenizer=tokenizer())
    ids = torch.tensor([[5, 6, 7, 8]])
    prm.score(SIBLINGS)
    with torch.no_grad():
        assert torch.equal(plain(ids).last_hidden_state, prm.backbone(ids).last_hidden_state)


def test_processes_share_a_file(prms, tmp_path, monkeypatch, capsys):
    """Each of several processes scores its share; together, and after a crash of one, each trajectory once."""
    PRM.create(model(), tokenizer=tokenizer()).save(tmp_path / "prm")
    texts = [Trajectory(f"task {i}", SIBLINGS[0].steps[: 1 + i % 4]) for i in range(11)]
    append_jsonl(tmp_path / "t.jsonl", texts)
    out = tmp_path / "labels.jsonl"
    argv = ["score", str(tmp_path / "prm"), str(tmp_path / "t.jsonl"), "--out", str(out)]
    for rank, total in ((1, 3), (2, 3), (0, 1)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(total))
        assert main(argv) == 0
    labels = read_jsonl(out, StepLabel)
    assert len(labels) == len({(x.trajectory_id, x.step) for x in labels}) == sum(len(t.steps) for t in texts)
    expected = PRM.load(tmp_path / "prm").label(texts)
    by = {(x.trajectory_id, x.step): x.score for x in expected}
    assert all(x.score == pytest.approx(by[x.trajectory_id, x.step], abs=1e-5) for x in labels)
    PRM.create(model(seed=1), tokenizer=tokenizer()).save(tmp_path / "prm")
    capsys.readouterr()
    assert main(argv) == 2 and "as it is now did not write" in capsys.readouterr().err
