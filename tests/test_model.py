"""The PRM: what is saved is what comes back, in another process too, and a score is the step's own."""

import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from prm import PRM, DataError, ModelError, Step, StepLabel, Trajectory, UsageError
from prm.checkpoint import Calibration
from prm.model import by_length
from tests.tiny import TOKENIZERS, checkpoint, model, tokenizer

TEXTS = [
    Trajectory("What is 2 + 2?", (Step("search: the sum", "none"), Step("answer: 4"))),
    Trajectory("capital of France", tuple(Step(f"search: {w}", "Paris is the capital. " * 3) for w in "abcde")),
    Trajectory("река", (Step("они <step> идут"), Step("", "x"), Step("answer: \n\n"))),
]
FRESH = """
import json, sys, torch
from prm import PRM, read_jsonl
torch.manual_seed(12345)
texts = read_jsonl(sys.argv[1])
out = {}
for name, folder, base in json.loads(sys.argv[2]):
    prm = PRM.load(folder, base=base)
    out[name] = {"scores": prm.score(texts), "row": None}
    if prm.step_token is not None:
        out[name]["row"] = prm.backbone.get_input_embeddings()(torch.tensor(prm.step_token)).tolist()
print(json.dumps(out))
"""


def nudge(prm, steps=3, lr=1e-2):
    """A few steps of training, towards targets that alternate."""
    own = [p for p in prm.model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(own, lr=lr)
    parts = [part for t in TEXTS for part in prm.render(t)]
    for _ in range(steps):
        logits = prm.logits(parts)
        target = (torch.arange(len(logits)) % 2).float()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, target).backward()
        optimiser.step()
        optimiser.zero_grad()
    return prm


def close(left, right, tolerance=1e-6):
    assert [len(x) for x in left] == [len(x) for x in right]
    return max(abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)) < tolerance


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    """PRMs in memory by name, where each is saved, and their scores in one fresh process with another seed."""
    folder = tmp_path_factory.mktemp("prms")
    mixed = Calibration("isotonic", knots=(-1.0, 0.0, 1.0), values=(0.1, 0.1, 0.8))
    prms = {
        "full": PRM.create(base),
        "lora": PRM.create(base, lora_rank=4, layout="chat"),
        "qwen2": PRM.create(
            checkpoint(folder / "base qwen2", kind="qwen2"), lora_rank=2, lora_targets=("q_proj", "v_proj")
        ),
        "token": PRM.create(base, lora_rank=4, add_tokens=["<step>"], step_token="<step>"),
        "full token": PRM.create(base, add_tokens=["<step>", "<other>"], step_token="<step>"),
        "padded token": PRM.create(
            checkpoint(folder / "base padded", rows=len(tokenizer()) + 64),
            lora_rank=4,
            add_tokens=["<step>"],
            step_token="<step>",
        ),
    }
    for kind in TOKENIZERS[1:]:
        prms[kind] = PRM.create(checkpoint(folder / f"base {kind}", tokenizer(kind)), lora_rank=2)
    jobs, heads = [], {name: prm.head.weight.detach().clone() for name, prm in prms.items()}
    for i, (name, prm) in enumerate(prms.items()):
        nudge(prm)
        kinds = (Calibration(), Calibration("temperature", temperature=1.7), mixed)
        prm.settings = dataclasses.replace(prm.settings, calibration=kinds[i % 3], threshold=0.4)
        prm.save(folder / name)
        prm.save(folder / f"{name} merged", merge=True)
        jobs += [[name, str(folder / name), None], [f"{name} merged", str(folder / f"{name} merged"), None]]
    shutil.copytree(folder / "token", folder / "elsewhere" / "copy")
    shutil.copytree(base, folder / "moved base")
    jobs += [["copied", str(folder / "elsewhere" / "copy"), None]]
    jobs += [["base moved", str(folder / "token"), str(folder / "moved base")]]
    jobs += [["twice", str(folder / "token"), None]]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps(t.to_dict()) for t in TEXTS))
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(folder / "texts.jsonl"), json.dumps(jobs)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "newly initialized" not in done.stderr
    return {"prms": prms, "folder": folder, "heads": heads, "fresh": json.loads(done.stdout)}


NAMES = ("full", "lora", "qwen2", "token", "full token", "padded token", *TOKENIZERS[1:])


# --- saved and loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_process_gives_the_same_scores(made, name):
    prm = made["prms"][name]
    scores = prm.score(TEXTS)
    assert [len(s) for s in scores] == [len(t.steps) for t in TEXTS]
    assert close(scores, made["fresh"][name]["scores"])
    assert close(scores, made["fresh"][f"{name} merged"]["scores"])
    assert not torch.equal(prm.head.weight.detach(), made["heads"][name])


def test_copied_moved_and_loaded_twice(made):
    scores = made["prms"]["token"].score(TEXTS)
    for name in ("copied", "base moved", "twice"):
        assert close(scores, made["fresh"][name]["scores"])


@pytest.mark.parametrize("name", ["token", "full token", "padded token"])
def test_a_new_token_comes_back_with_its_row(made, name):
    prm = made["prms"][name]
    row = prm.backbone.get_input_embeddings()(torch.tensor(prm.step_token)).tolist()
    for saved in (name, f"{name} merged"):
        assert np.allclose(made["fresh"][saved]["row"], row, atol=1e-6)


def test_an_adapter_holds_lora_head_and_new_rows_only(made):
    for name, rows in (("lora", 0), ("token", 1), ("padded token", 1)):
        stored = load_file(made["folder"] / name / "adapter_model.safetensors")
        other = {k: v for k, v in stored.items() if "lora_" not in k}
        width = made["prms"][name].head.in_features
        assert sum(v.numel() for v in other.values()) == width + 1 + rows * width
    rows = made["prms"]["padded token"].backbone.get_input_embeddings().weight.shape[0]
    assert rows == len(tokenizer()) + 64


def test_what_is_trained_is_lora_head_and_new_rows(base):
    prm = PRM.create(base, lora_rank=2, add_tokens=["<step>"], step_token="<step>")
    trained = {n for n, p in prm.model.named_parameters() if p.requires_grad}
    rest = {n for n in trained if "lora_" not in n}
    assert rest and all("score" in n or "token_adapter" in n for n in rest)
    assert prm.head.weight.requires_grad
    full = PRM.create(base)
    assert all(p.requires_grad for p in full.model.parameters())


@pytest.mark.parametrize("name", ["full", "lora merged", "full token"])
def test_plain_transformers_loads_a_whole_model(made, name):
    prm = made["prms"][name.removesuffix(" merged")]
    plain = AutoModelForTokenClassification.from_pretrained(made["folder"] / name).eval()
    assert plain.config.num_labels == 1
    for text in TEXTS:
        part = prm.render(text)[0]
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([part.ids])).logits[0, part.ends, 0]
        assert close([prm.settings.calibration(logits).tolist()], prm.score([text]))


def test_loading_is_ready_to_score_and_keeps_its_settings(made):
    prm = PRM.load(made["folder"] / "token")
    assert not any(p.requires_grad for p in prm.model.parameters())
    assert not prm.model.training
    assert prm.settings == made["prms"]["token"].settings
    assert prm.settings.threshold == 0.4
    assert prm.fingerprint() == made["prms"]["token"].fingerprint()
    assert len({p.fingerprint() for p in made["prms"].values()}) == len(made["prms"])


def test_saving_again_keeps_the_old_one_until_the_end(made, base, tmp_path, monkeypatch):
    from prm import checkpoint as module

    old = nudge(PRM.create(base))
    old.save(tmp_path / "prm")
    (tmp_path / "prm" / "log.jsonl").write_text("kept\n")
    (tmp_path / "prm" / "runs").mkdir()
    (tmp_path / "prm" / "runs" / "a").write_text("kept")
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_settings", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made["prms"]["lora"].save(tmp_path / "prm")
    assert [p.name for p in tmp_path.iterdir()] == ["prm"]
    assert close(PRM.load(tmp_path / "prm").score(TEXTS), old.score(TEXTS))
    made["prms"]["lora"].save(tmp_path / "prm")
    assert close(PRM.load(tmp_path / "prm").score(TEXTS), made["prms"]["lora"].score(TEXTS))
    assert not (tmp_path / "prm" / "model.safetensors").exists()
    assert (tmp_path / "prm" / "log.jsonl").read_text() == "kept\n"
    assert (tmp_path / "prm" / "runs" / "a").read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["prm"]


def test_saving_never_replaces_other_models(made, base, tmp_path):
    shutil.copytree(base, tmp_path / "other")
    with pytest.raises(ModelError, match="but no PRM"):
        made["prms"]["full"].save(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        made["prms"]["full"].save(tmp_path / "file")
    assert sorted(p.name for p in (tmp_path / "other").iterdir()) == sorted(os.listdir(base))


# --- what cannot be loaded --------------------------------------------------------------------------------------------


def broken(made, tmp_path, name="token"):
    return shutil.copytree(made["folder"] / name, tmp_path / "prm")


def without(file, part):
    kept = {k: v for k, v in load_file(file).items() if part not in k}
    save_file(kept, file, {"format": "pt"})


def test_a_missing_head_is_an_error(made, base, tmp_path):
    with pytest.raises(ModelError, match=r"no prm.json; it holds a model"):
        PRM.load(base)
    for i, (name, file) in enumerate((("full", "model.safetensors"), ("token", "adapter_model.safetensors"))):
        folder = broken(made, tmp_path / str(i), name)
        without(folder / file, "score")
        with pytest.raises(ModelError, match="score"):
            PRM.load(folder)
        (folder / file).unlink()
        with pytest.raises(ModelError):
            PRM.load(folder)
        (folder / file).write_bytes(b"torn")
        with pytest.raises(ModelError):
            PRM.load(folder)


@pytest.mark.parametrize("part", ["lora_A", "embed_tokens", "layers.1"])
def test_missing_weights_of_an_adapter_are_an_error(made, tmp_path, part):
    folder = broken(made, tmp_path)
    without(folder / "adapter_model.safetensors", part)
    with pytest.raises(ModelError):
        PRM.load(folder)


def test_missing_weights_of_a_model_are_an_error(made, tmp_path):
    folder = broken(made, tmp_path, "full")
    without(folder / "model.safetensors", "layers.1.mlp")
    with pytest.raises(ModelError, match="3 weights are missing"):
        PRM.load(folder)


def test_another_tokenizer_is_an_error(made, base, tmp_path):
    folder = broken(made, tmp_path)
    tokenizer().save_pretrained(folder)
    with pytest.raises(ModelError, match="lacks the token '<step>'"):
        PRM.load(folder)
    tokenizer("unigram").save_pretrained(folder)
    with pytest.raises(ModelError, match="tokenizer"):
        PRM.load(folder)
    folder = broken(made, tmp_path / "full", "full")
    tokenizer("byte-fallback").save_pretrained(folder)
    with pytest.raises(ModelError, match="not the one that the model was trained with"):
        PRM.load(folder)


def test_a_tokenizer_larger_than_the_embedding_is_an_error(tmp_path):
    own = copy.deepcopy(tokenizer())
    model(own).save_pretrained(tmp_path)
    own.add_tokens(["<a>", "<b>"])
    own.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"the tokenizer has \d+ ids, the embedding only \d+ rows"):
        PRM.create(tmp_path)


def test_another_base_is_an_error(made, tmp_path):
    folder = broken(made, tmp_path)
    other = checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match="not the base that it was trained on"):
        PRM.load(folder, base=other)
    row = json.loads((folder / "prm.json").read_text())
    (folder / "prm.json").write_text(json.dumps(row | {"base": str(tmp_path / "gone")}))
    with pytest.raises(ModelError, match="if it moved, give base="):
        PRM.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, this version reads 1"),
        ({"surprise": 1}, "unknown fields: surprise"),
        ({"calibration": {"kind": "isotonic", "temperature": 1.0, "knots": [], "values": []}}, "0 knots"),
        ({"calibration": {"kind": "magic"}}, "malformed"),
        ({"dtype": "int8"}, "dtype must be"),
    ],
)
def test_malformed_settings_are_an_error(made, tmp_path, change, message):
    folder = broken(made, tmp_path, "full")
    row = json.loads((folder / "prm.json").read_text())
    (folder / "prm.json").write_text(json.dumps(row | change))
    with pytest.raises(ModelError, match=message):
        PRM.load(folder)


def test_no_model_at_all(tmp_path):
    for path in (tmp_path / "nowhere", "no such/name/at all"):
        with pytest.raises(ModelError, match="no such folder"):
            PRM.load(path)
        with pytest.raises(ModelError, match="no such folder"):
            PRM.create(path)
    with pytest.raises(ModelError, match="no model"):
        PRM.load(tmp_path)
    with pytest.raises(ModelError):
        PRM.create(tmp_path)


def test_an_adapter_is_no_base(made):
    with pytest.raises(ModelError, match="is an adapter"):
        PRM.create(made["folder"] / "token")


# --- a fresh head -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_backbone_is_taken_over_and_the_head_is_seeded(tmp_path, kind):
    source = model(kind=kind)
    before = torch.random.get_rng_state()
    prms = [PRM.create(checkpoint(tmp_path / "base", kind=kind), seed=s) for s in (0, 0, 1)]
    prms.append(PRM.create(source, tokenizer=tokenizer()))
    assert torch.equal(before, torch.random.get_rng_state())
    for prm in prms:
        for name, value in source.model.named_parameters():
            assert torch.equal(value, prm.backbone.get_parameter(name))
    weights = [p.head.weight for p in prms]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[3])
    assert not torch.equal(weights[0], weights[2])
    nudge(prms[3])
    assert torch.equal(source.model.embed_tokens.weight, prms[0].backbone.embed_tokens.weight)


def test_a_head_called_classifier(tmp_path):
    own = tokenizer()
    GPT2LMHeadModel(GPT2Config(vocab_size=len(own), n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path / "base")
    own.save_pretrained(tmp_path / "base")
    for options in ({}, {"lora_rank": 2}):
        prm = nudge(PRM.create(tmp_path / "base", **options))
        prm.save(tmp_path / "prm")
        assert close(PRM.load(tmp_path / "prm").score(TEXTS), prm.score(TEXTS))
        assert close([prm.score([t])[0] for t in TEXTS], prm.score(TEXTS), 1e-5)


def test_a_base_that_reads_both_ways_is_named(tmp_path):
    own = tokenizer()
    config = BertConfig(vocab_size=len(own), hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    with pytest.warns(UserWarning, match="reads both ways"):
        prm = nudge(PRM.create(BertForMaskedLM(config), tokenizer=own))
    assert not prm.settings.causal
    assert close([prm.score([t])[0] for t in TEXTS], prm.score(TEXTS), 1e-5)


def test_a_base_in_memory_cannot_be_named_by_an_adapter(tmp_path):
    prm = nudge(PRM.create(model(), tokenizer=tokenizer(), lora_rank=2))
    with pytest.raises(ModelError, match="only in memory"):
        prm.save(tmp_path / "prm")
    prm.save(tmp_path / "prm", merge=True)
    assert close(PRM.load(tmp_path / "prm").score(TEXTS), prm.score(TEXTS))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_step_token_of_several_pieces_is_refused(tmp_path, kind):
    own = tokenizer(kind)
    for token in ("<step_end>", "<extra_0>", "кик"):
        n = len(own(token, add_special_tokens=False).input_ids)
        assert n > 1
        with pytest.raises(ModelError, match=f"'{token}' encodes to {n} tokens"):
            PRM.create(model(own), tokenizer=own, step_token=token)


def test_rows_of_zeros_are_named(tmp_path):
    own = tokenizer()
    source = model(own, rows=len(own) + 8)
    with torch.no_grad():
        source.model.embed_tokens.weight[len(own) :] = 0
        source.model.embed_tokens.weight[own.get_vocab()["x"]] = 0
    with pytest.warns(UserWarning, match="new token '<step>' was all zeros"):
        prm = PRM.create(source, tokenizer=own, add_tokens=["<step>"], step_token="<step>")
    assert bool(prm.backbone.embed_tokens.weight[prm.step_token].any())
    assert prm.settings.rows == len(own) + 8
    with pytest.warns(UserWarning, match="step token 'x' is all zeros"):
        PRM.create(source, tokenizer=own, step_token="x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PRM.create(source, tokenizer=own, step_token="y")


def test_an_added_token_changes_no_tokenizer_but_the_prms(base):
    own = tokenizer()
    size = len(own)
    prm = PRM.create(model(own), tokenizer=own, add_tokens=["<step>", "<step>", "x"], step_token="<step>")
    assert len(own) == size
    assert prm.settings.added == ("<step>",)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "prose"},
        {"dtype": "int4"},
        {"max_tokens": 0},
        {"max_tokens": 4096},
        {"lora_rank": 0},
        {"add_tokens": "<step>"},
    ],
)
def test_options_that_make_no_sense(base, options):
    with pytest.raises(UsageError):
        PRM.create(base, **options)


def test_lora_targets_that_are_not_there(base):
    with pytest.raises(ModelError, match="no LoRA fits"):
        PRM.create(base, lora_rank=2, lora_targets=("nothing",))
    with pytest.raises(UsageError, match="needs its tokenizer"):
        PRM.create(model())


# --- scores -----------------------------------------------------------------------------------------------------------


def sized(prm, tokens):
    """A trajectory of exactly so many tokens, in four steps."""

    def of(n):
        steps = [Step(f"step {i}", "word " * (n // 4)) for i in range(3)]
        return Trajectory("task", (*steps, Step("x" + " y" * (n % 4 + n // 40))))

    n = 0
    while len(prm.render(of(n))[0].ids) < tokens:
        n += 1
    return of(n)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_no_score_depends_on_its_batch(kind):
    prm = PRM.create(model(kind=kind), tokenizer=tokenizer())
    with torch.no_grad():
        prm.head.weight.mul_(20)
    short = Trajectory("t", (Step("a"),))
    texts = [short, sized(prm, 200), sized(prm, 900), *TEXTS, Trajectory("none", ())]
    alone = [prm.score([t])[0] for t in texts]
    assert len({round(s, 3) for own in alone for s in own}) > 5
    assert [len(s) for s in alone] == [len(t.steps) for t in texts]
    for batch_tokens in (1, 300, 1900, 1 << 20):
        assert close(prm.score(texts, batch_tokens=batch_tokens), alone, 1e-5)
        assert close(prm.score(texts[::-1], batch_tokens=batch_tokens)[::-1], alone, 1e-5)
    for i in range(len(texts)):
        assert close(prm.score([texts[i], texts[2]]), [alone[i], alone[2]], 1e-5)


def test_a_score_is_the_past_alone():
    prm = PRM.create(model(), tokenizer=tokenizer())
    whole = TEXTS[1]
    for n in range(1, 5):
        assert close(prm.score([Trajectory(whole.task, whole.steps[:n])]), [prm.score([whole])[0][:n]], 1e-5)


def test_a_long_trajectory_has_a_score_for_every_step():
    long = Trajectory("task", tuple(Step(f"step {i}", "word " * 20) for i in range(40)))
    whole, cut = (PRM.create(model(), tokenizer=tokenizer(), max_tokens=m) for m in (None, 256))
    assert whole.settings.max_tokens == 2048
    assert len(whole.render(long)) > 1 and len(cut.render(long)) > 10
    for prm in (whole, cut):
        assert len(prm.score([long])[0]) == 40
    assert close([cut.score([long])[0][:2]], [whole.score([long])[0][:2]], 1e-5)
    with pytest.raises(DataError, match="step 1 with the task"):
        cut.score([Trajectory("task", (Step("a"), Step("word " * 300)))])


def test_nothing_gives_nothing(base):
    prm = PRM.create(base)
    assert prm.score([]) == [] and prm.label([]) == []
    assert prm.score([Trajectory("t", ()), TEXTS[0], Trajectory("u", ())])[::2] == [[], []]


def test_labels_are_scores_with_a_source(made):
    prm = PRM.load(made["folder"] / "full")
    labels = prm.label(TEXTS)
    scores = prm.score(TEXTS)
    assert [(o.trajectory_id, o.step, o.score) for o in labels] == [
        (t.id, i, s) for t, own in zip(TEXTS, scores, strict=True) for i, s in enumerate(own)
    ]
    assert {o.source for o in labels} == {f"prm:{made['folder'] / 'full'}"}
    assert labels[0].meta == {"model": prm.fingerprint(), "threshold": 0.4}
    assert isinstance(labels[0], StepLabel)


def test_broken_weights_give_no_score(base):
    prm = PRM.create(base)
    with torch.no_grad():
        prm.head.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        prm.score(TEXTS)


def test_tools_are_rendered_in_the_chat_layout(base):
    prm = PRM.create(base, layout="chat")
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    plain, with_tools = (Trajectory("q", TEXTS[0].steps, meta=m) for m in ({}, {"tools": tools}))
    assert "Tools: [" in prm.tokenizer.decode(prm.render(with_tools)[0].ids)
    assert "Tools: [" not in prm.tokenizer.decode(prm.render(plain)[0].ids)


def test_bfloat16_is_near_and_its_head_is_exact(made, base, tmp_path):
    full = made["prms"]["full"]
    half = PRM.load(made["folder"] / "full", dtype="bfloat16")
    assert half.backbone.dtype == torch.bfloat16
    assert torch.equal(half.head.weight, full.head.weight)
    assert close(half.score(TEXTS), full.score(TEXTS), 0.1)
    assert close(
        PRM.load(made["folder"] / "lora", dtype="bfloat16").score(TEXTS), made["prms"]["lora"].score(TEXTS), 0.1
    )
    half.save(tmp_path / "half")
    assert close(PRM.load(tmp_path / "half").score(TEXTS), half.score(TEXTS))
    lora = nudge(PRM.create(base, lora_rank=2, dtype="bfloat16"))
    assert all(p.dtype == torch.float32 for p in lora.model.parameters() if p.requires_grad)
    lora.save(tmp_path / "lora")
    assert close(PRM.load(tmp_path / "lora").score(TEXTS), lora.score(TEXTS))


def test_isotonic_is_the_line_through_its_knots():
    knots, values = (-2.0, -1.0, 0.5, 3.0), (0.0, 0.25, 0.25, 1.0)
    at = np.linspace(-5, 5, 201)
    found = Calibration("isotonic", knots=knots, values=values)(torch.tensor(at, dtype=torch.float32))
    assert np.allclose(found, np.interp(at, knots, values), atol=1e-6)
    assert Calibration("isotonic", knots=(0.0,), values=(0.3,))(torch.tensor([-1.0, 2.0])).tolist() == pytest.approx(
        [0.3] * 2
    )
    for wrong in (
        {"kind": "temperature", "temperature": 0.0},
        {"kind": "isotonic", "knots": (1.0, 0.0), "values": (0, 1)},
    ):
        with pytest.raises(ModelError):
            Calibration(**wrong)


def test_batches_by_length_hold_their_budget():
    lengths = [5, 900, 12, 200, 7, 7, 300]
    for budget in (1, 20, 500, 10_000):
        batches = by_length(lengths, budget)
        assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
        assert all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= budget for b in batches)
    assert by_length([], 10) == []
