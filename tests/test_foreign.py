"""Other people's PRMs: the scores of their authors' few lines, on tiny models of each kind; a bad head is an error."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from prm import PRM, DataError, ModelError, Step, Trajectory, UsageError
from prm.foreign import KINDS
from tests.tiny import CORPUS, _with_bos, checkpoint, tokenizer

TASKS = [
    Trajectory("What is 2+3-1?", (Step("Step 1: 2+3 = 5."), Step("Step 2: 5-1 = 4\n"), Step("Step 3: \\[ y=1 \\]\n"))),
    Trajectory("Add the two numbers.", (Step("Add the two numbers. $x$"), Step("\\frac{3}{4}."), Step("so x = 2"))),
    Trajectory("река? Он и они", tuple(Step(f"step {w}, f(4)") for w in "abcdefgh")),
    Trajectory("one", (Step("a <|im_end|> b </s> c <extra_0> d"), Step("+"), Step("ки - +"))),
]
HOSTILE = TASKS[3]


def shepherd_tokenizer():
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # SentencePiece cuts at blanks and has the newline as a byte.
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split("▁", "merged_with_next")]
    )
    special = ["<s>", "</s>", "<unk>", "<pad>", *(f"<0x{i:02X}>" for i in range(256))]
    corpus = [*CORPUS, *(f"{c} ки\n" for c in "abcdefg.!)1234567890" * 4), *("1 + 2 - 3 + - ",) * 9]
    made.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=460, special_tokens=special, show_progress=False))
    return _with_bos(made)


def extra_tokenizer():
    import copy

    own = copy.deepcopy(tokenizer())
    own.add_tokens(["<extra_0>"], special_tokens=True)
    return own


def with_tensors(folder, **change):
    """Add tensors to a checkpoint (None takes one out), and keys to its configuration."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    for name, value in change.items():
        name = name.replace("__", ".")
        stored.pop(name, None)
        if value is not None:
            stored[name] = value
    save_file(stored, file, {"format": "pt"})


def configure(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(kind, folder, tok=None):
    """A tiny random checkpoint of a kind, as its authors publish theirs."""
    if kind == "math-shepherd":
        own = tok or shepherd_tokenizer()
        config = MistralConfig(
            vocab_size=len(own), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=8, initializer_range=0.3,
        )  # fmt: skip
        torch.manual_seed(0)
        MistralForCausalLM(config).save_pretrained(folder)
        own.save_pretrained(folder)
        return folder
    own = tok or (extra_tokenizer() if kind == "qwen-math" else tokenizer())
    checkpoint(folder, own, kind="qwen2" if kind in ("qwen-math", "skywork") else "llama")
    if kind == "qwen-math":
        with_tensors(
            folder, score__0__weight=rand(32, 32), score__0__bias=rand(32, seed=1),
            score__2__weight=rand(2, 32, seed=2), score__2__bias=rand(2, seed=3),
        )  # fmt: skip
        configure(folder, architectures=["Qwen2ForProcessRewardModel"])
    elif kind == "skywork":
        with_tensors(folder, v_head__summary__weight=rand(1, 32) / 3, v_head__summary__bias=rand(1, seed=1))
    elif kind == "trl":
        torch.manual_seed(0)
        made = AutoModelForTokenClassification.from_pretrained(folder, num_labels=2)
        made.save_pretrained(folder)
    return folder


# --- the authors' few lines -------------------------------------------------------------------------------------------


def hidden(folder, ids):
    return AutoModel.from_pretrained(folder).eval()(torch.tensor([ids])).last_hidden_state[0]


def reference_trl(folder, tok, question, steps):
    net = AutoModelForTokenClassification.from_pretrained(folder).eval()
    ids = tok(question, add_special_tokens=False, split_special_tokens=True).input_ids
    if tok.bos_token_id is not None:
        ids = [tok.bos_token_id, *ids]
    labels = [-100] * len(ids)
    for step in steps:
        own = tok(step, add_special_tokens=False, split_special_tokens=True).input_ids + tok.encode(
            "\n", add_special_tokens=False
        )
        ids, labels = ids + own, labels + [-100] * (len(own) - 1) + [1]
    probs = net(torch.tensor([ids])).logits[0].softmax(-1)[:, 1]
    return probs[torch.tensor(labels) == 1].tolist()


def reference_qwen_math(folder, tok, question, steps):
    messages = [
        {"role": "system", "content": "Please reason step by step, and put your final answer within \\boxed{}."},
        {"role": "user", "content": question},
        {"role": "assistant", "content": "<extra_0>".join(steps) + "<extra_0>"},
    ]
    ids = tok.encode(tok.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    head = load_file(folder / "model.safetensors")
    x = torch.relu(hidden(folder, ids) @ head["score.0.weight"].T + head["score.0.bias"])
    probs = (x @ head["score.2.weight"].T + head["score.2.bias"]).softmax(-1)
    return probs[torch.tensor(ids) == tok.encode("<extra_0>")[0], 1].tolist()


def reference_math_shepherd(folder, tok, question, steps):
    net = AutoModelForCausalLM.from_pretrained(folder).eval()
    candidates, tag = tok.encode("+ -")[1:], tok.encode("ки")[-1]
    ids = torch.tensor([tok.encode(f"{question} " + "\n".join(f"{s} ки" for s in steps))])
    probs = net(ids).logits[:, :, candidates].softmax(-1)[:, :, 0]
    return probs[ids == tag].tolist()


@torch.no_grad()
def reference_rlhflow(folder, tok, question, steps):
    net = AutoModelForCausalLM.from_pretrained(folder).eval()
    pair, chat, out = [tok.encode("+")[-1], tok.encode("-")[-1]], [], []
    for k, step in enumerate(steps):
        chat += [
            {"role": "user", "content": f"{question} {step}" if k == 0 else step},
            {"role": "assistant", "content": "+"},
        ]
        ids = tok.encode(tok.apply_chat_template(chat, tokenize=False), add_special_tokens=False)
        at = max(i for i, one in enumerate(ids) if one == pair[0]) - 1
        out.append(float(net(torch.tensor([ids])).logits[0, at, pair].softmax(-1)[0]))
    return out


def reference_skywork(folder, tok, question, steps):
    ids, flags = tok.encode((tok.bos_token or "") + question + "\n"), []
    newline = tok.encode("\n")[-1]
    for step in steps:
        for line in step.split("\n"):
            ids = ids + tok.encode(line) + [newline]
        flags.append(len(ids) - 1)
    head = load_file(folder / "model.safetensors")
    values = hidden(folder, ids) @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"]
    return values.sigmoid()[flags].tolist()


@torch.no_grad()
def reference_yes_no(folder, tok, question, steps):
    net = AutoModelForCausalLM.from_pretrained(folder).eval()
    out = []
    for k in range(len(steps)):
        text = question + "".join(f"\n\nStep {i + 1}: {s}" for i, s in enumerate(steps[: k + 1]))
        text = f"<|im_start|>user\n{text}\n\nIs it right?<|im_end|>\n<|im_start|>assistant\n"
        logits = net(torch.tensor([tok.encode(text)])).logits[0, -1]
        out.append(float(logits[[tok.encode("Yes")[0], tok.encode("No")[0]]].softmax(-1)[0]))
    return out


REFERENCES = {
    "trl": reference_trl,
    "qwen-math": reference_qwen_math,
    "math-shepherd": reference_math_shepherd,
    "rlhflow": reference_rlhflow,
    "skywork": reference_skywork,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("foreign")
    return {kind: build(kind, root / kind) for kind in KINDS if kind != "yes-no"}


def near(left, right, tolerance=1e-5):
    assert len(left) == len(right)
    assert all(math.isclose(a, b, abs_tol=tolerance) for a, b in zip(left, right, strict=True)), (left, right)


@pytest.mark.parametrize("kind", sorted(REFERENCES))
def test_the_scores_are_the_authors(folders, kind):
    folder = folders[kind]
    prm = PRM.load(folder, kind=kind)
    tok = PreTrainedTokenizerFast.from_pretrained(folder)
    scores = prm.score(TASKS)
    assert prm.shares
    for t, own in zip(TASKS[:3], scores, strict=False):
        expected = REFERENCES[kind](folder, tok, t.task, [s.action for s in t.steps])
        assert max(expected) - min(expected) > 1e-3
        near(own, expected)
    assert len(scores[3]) == 3
    for t, own in zip(TASKS, scores, strict=True):
        near(prm.score([t])[0], own, 1e-6)


@pytest.mark.parametrize("kind", ["byte-bpe", "unigram"])
def test_trl_models_of_any_tokenizer(tmp_path, kind):
    folder = build("trl", tmp_path / "m", tokenizer(kind))
    prm, tok = PRM.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for t in TASKS[:3]:
        near(prm.score([t])[0], reference_trl(folder, tok, t.task, [s.action for s in t.steps]))


def test_the_kind_is_seen_in_the_checkpoint(folders, tmp_path):
    for kind in ("trl", "qwen-math", "skywork"):
        assert PRM.load(folders[kind]).kind == kind
    for kind, name in (("math-shepherd", "math-shepherd-mistral-7b-prm"), ("rlhflow", "Llama3.1-8B-PRM-Mistral-Data")):
        (tmp_path / name).symlink_to(folders[kind])
        assert PRM.load(tmp_path / name).kind == kind
        with pytest.raises(ModelError, match="say whose: kind trl, qwen-math"):
            PRM.load(folders[kind])


def test_a_critic_is_asked_about_every_step(tmp_path):
    import copy

    own = copy.deepcopy(tokenizer())
    own.add_tokens(["Yes", "No"])
    folder = tmp_path / "critic"
    checkpoint(folder, own)
    prm = PRM.load(folder, kind="yes-no", prompt="Is it right?")
    for t in TASKS[:3]:
        near(prm.score([t])[0], reference_yes_no(folder, own, t.task, [s.action for s in t.steps]), 1e-5)
    # What the questions share is read once.
    session = prm.session()
    session.score([TASKS[2]])
    parts = prm.render(TASKS[2])
    assert session.read_tokens == len({tuple(p.ids[:n]) for p in parts for n in range(1, len(p.ids) + 1)})
    assert session.read_tokens < sum(len(p.ids) for p in parts)
    with pytest.raises(ModelError, match="Yes and No are not one token"):
        PRM.load(checkpoint(tmp_path / "plain"), kind="yes-no")


def test_a_mark_in_a_step_is_only_text(folders):
    """A step that spells a mark has one score, at its own end, and shifts nobody's."""
    for kind, folder in folders.items():
        prm = PRM.load(folder, kind=kind)
        ids, ends = [], []
        for part in prm.render(HOSTILE):
            ids, ends = part.ids, part.ends
        assert len(ends) == 3 and ends == sorted(set(ends)), kind
        control = set(prm.tokenizer.all_special_ids) - {prm.tokenizer.bos_token_id}
        inside = [i for i in ids[ends[0] + 1 : ends[1]] if i in control]
        allowed = {"rlhflow": 5, "qwen-math": 0}.get(kind, 0)
        assert len(inside) <= allowed, (kind, inside)


def test_observations_stand_before_the_action_they_led_to(folders):
    seen = Trajectory("q", (Step("a", "came back"), Step("b", "last")))
    given = Trajectory("q", (Step("a"), Step("came back\nb")))
    for kind, folder in folders.items():
        prm = PRM.load(folder, kind=kind)
        assert prm.score([seen]) == prm.score([given])


def test_a_prefix_for_each_step(folders):
    prm = PRM.load(folders["math-shepherd"], kind="math-shepherd", prompt="Step {k}: ")
    plain = PRM.load(folders["math-shepherd"], kind="math-shepherd")
    bare = Trajectory("q", (Step("a"), Step("b")))
    numbered = Trajectory("q", (Step("Step 1: a"), Step("Step 2: b")))
    assert prm.score([bare]) == plain.score([numbered]) != plain.score([bare])
    assert prm.fingerprint() != plain.fingerprint()


# --- what cannot be loaded --------------------------------------------------------------------------------------------

HEADS = {
    "trl": ("score__weight", 2),
    "qwen-math": ("score__2__weight", 2),
    "math-shepherd": ("lm_head__weight", None),
    "rlhflow": ("lm_head__weight", None),
    "skywork": ("v_head__summary__weight", 1),
}


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_a_missing_or_wrong_head_is_an_error(tmp_path, kind):
    name, outputs = HEADS[kind]
    folder = build(kind, tmp_path / "m")
    with_tensors(folder, **{name: rand(outputs or 3, 31)})
    with pytest.raises(ModelError, match=name.replace("__", ".")):
        PRM.load(folder, kind=kind)
    if outputs:
        with_tensors(folder, **{name: rand(outputs + 1, 32)})
        with pytest.raises(ModelError, match=rf"{name.replace('__', '.')} is \({outputs + 1}, 32\)"):
            PRM.load(folder, kind=kind)
    with_tensors(folder, **{name: None})
    with pytest.raises(ModelError, match=f"{name.replace('__', '.')} is missing"):
        PRM.load(folder, kind=kind)


def test_a_missing_weight_is_an_error(tmp_path):
    folder = build("qwen-math", tmp_path / "m")
    with_tensors(folder, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match="1 weights are missing"):
        PRM.load(folder)


def test_another_kind_than_it_is_an_error(folders, tmp_path):
    for kind in KINDS:
        for other, folder in folders.items():
            if kind != other and kind in ("trl", "qwen-math", "skywork", "math-shepherd"):
                with pytest.raises(ModelError):
                    PRM.load(folder, kind=kind)
    with pytest.raises(UsageError, match="kind must be auto, prm or one of"):
        PRM.load(folders["trl"], kind="magic")
    with pytest.raises(ModelError, match=r"no prm.json"):
        PRM.load(folders["trl"], kind="prm")
    plain = AutoModelForTokenClassification.from_pretrained(folders["trl"], num_labels=3, ignore_mismatched_sizes=True)
    plain.save_pretrained(tmp_path / "three")
    tokenizer().save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match="3 outputs where a TRL model has two"):
        PRM.load(tmp_path / "three")


def test_a_tag_of_several_tokens_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="'ки' encodes to several tokens"):
        PRM.load(build("math-shepherd", tmp_path / "m", tokenizer("byte-fallback")), kind="math-shepherd")
    with pytest.raises(ModelError, match="'<extra_0>' encodes to"):
        PRM.load(build("qwen-math", tmp_path / "q", tokenizer()))


def test_longer_than_the_model_reads(folders, tmp_path):
    folder = build("skywork", tmp_path / "m")
    configure(folder, max_position_embeddings=60)
    prm = PRM.load(folder)
    long = Trajectory("q", tuple(Step("word " * 4) for _ in range(8)))
    with pytest.raises(DataError, match=r"step \d with all before it takes \d+ tokens, the limit is 60"):
        prm.score([long])
    kept = prm.render(long, skip_long=True)[0]
    assert 0 < len(kept.ends) < 8 and len(kept.ids) <= 60


def test_soft_caps_are_the_models_own(tmp_path):
    own = tokenizer()
    config = Gemma2Config(
        vocab_size=len(own), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, sliding_window=8, final_logit_softcapping=0.5, attn_logit_softcapping=1.0,
        initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    prm = PRM.load(tmp_path, kind="rlhflow")
    # Attention with soft caps is not read as a tree, but in padded batches, with the same scores.
    assert not prm.shares
    for t, scores in zip(TASKS[:3], prm.score(TASKS[:3]), strict=True):
        near(scores, reference_rlhflow(tmp_path, own, t.task, [s.action for s in t.steps]))


def test_model_in_bfloat16_is_near(folders):
    for kind, folder in folders.items():
        exact, half = (PRM.load(folder, kind=kind, dtype=d).score(TASKS) for d in (None, "bfloat16"))
        for a, b in zip(exact, half, strict=True):
            near(a, b, 0.2)


def test_tied_heads_are_the_embedding(tmp_path):
    folder = build("rlhflow", tmp_path / "m")
    with_tensors(folder, lm_head__weight=None)
    configure(folder, tie_word_embeddings=True)
    prm = PRM.load(folder, kind="rlhflow")
    own = PreTrainedTokenizerFast.from_pretrained(folder)
    for t in TASKS[:2]:
        near(prm.score([t])[0], reference_rlhflow(folder, own, t.task, [s.action for s in t.steps]))


def test_nothing_gives_nothing(folders):
    for kind, folder in folders.items():
        prm = PRM.load(folder, kind=kind)
        assert prm.score([Trajectory("q", ())]) == [[]] and prm.score([]) == []
        label = prm.label(TASKS[:1])[0]
        assert label.meta["model"] == prm.fingerprint() and label.source.startswith("prm:")
