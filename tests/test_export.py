"""Exports: what other programs load gives the scores of the PRM, and a wrong one is refused."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer, BertConfig, BertForMaskedLM

from prm import PRM, ModelError, Step, Trajectory
from prm.checkpoint import Calibration
from prm.cli import main
from tests.tiny import checkpoint, tokenizer

TEXTS = [
    Trajectory("What is 2 + 2?", (Step("search: the sum", "none"), Step("answer: 4"))),
    Trajectory("capital of France", tuple(Step(f"search: {w}", "Paris is the capital. " * 3) for w in "abcde")),
    Trajectory("", (Step("a"),)),
    Trajectory("nothing", ()),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    base = checkpoint(folder / "base")
    prms = {
        "full": PRM.create(base),
        "lora": PRM.create(base, lora_rank=4, layout="chat", add_tokens=["<step>"], step_token="<step>"),
    }
    for name, prm in prms.items():
        with torch.no_grad():
            for p in prm.model.parameters():
                if p.requires_grad:
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
        prm.settings = dataclasses.replace(prm.settings, calibration=Calibration("temperature", temperature=1.7))
        prm.save(folder / name)
    return folder, prms


def near(left, right, tolerance=1e-5):
    assert [len(x) for x in left] == [len(x) for x in right]
    return all(abs(a - b) < tolerance for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", ["full", "lora"])
def test_merged_is_read_by_plain_transformers(made, tmp_path, name, capsys):
    folder, prms = made
    assert main(["export", str(folder / name), "--out", str(tmp_path / "m")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "m")
    prm = prms[name]
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "m").eval()
    assert AutoTokenizer.from_pretrained(tmp_path / "m").get_vocab() == prm.tokenizer.get_vocab()
    assert plain.config.num_labels == 1
    for t in TEXTS[:2]:
        (part,) = prm.render(t)
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([part.ids])).logits[0, part.ends, 0]
        assert near([torch.sigmoid(logits / 1.7).tolist()], prm.score([t]))
    again = PRM.load(tmp_path / "m")
    assert not again.settings.lora and near(again.score(TEXTS), prm.score(TEXTS))
    assert main(["export", str(folder / name), "--out", str(tmp_path / "m")]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.fixture(scope="module")
def exported(made):
    """The LoRA PRM as ONNX (the exporter takes seconds, so once)."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder, _ = made
    assert main(["export", str(folder / "lora"), "--to", "onnx", "--out", str(folder / "onnx")]) == 0
    return folder / "onnx"


def test_onnx_gives_the_same_scores(made, exported):
    from prm.export import OnnxPRM

    prm, onnx = made[1]["lora"], OnnxPRM.load(exported)
    for batch_tokens in (1, 100, 16384):
        assert near(onnx.score(TEXTS, batch_tokens=batch_tokens), prm.score(TEXTS))
    for t in TEXTS:
        assert near(onnx.score([t]), prm.score([t])) and near(onnx.session().score([t]), prm.score([t]))
    assert onnx.label(TEXTS)[0].meta["model"] == OnnxPRM.load(exported).fingerprint()
    # A few lines of anybody's, in a process without torch.
    part = prm.render(TEXTS[0])[0]
    code = (
        "import sys, numpy, onnxruntime\n"
        f"s = onnxruntime.InferenceSession({str(exported / 'model.onnx')!r})\n"
        f"x = s.run(None, {{'input_ids': numpy.array([{part.ids}])}})[0][0, {part.ends}]\n"
        "assert 'torch' not in sys.modules\n"
        "print(*(1 / (1 + numpy.exp(-x / 1.7))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert near([list(map(float, done.stdout.split()))], prm.score(TEXTS[:1]))


def test_what_cannot_be_exported(made, tmp_path, capsys):
    folder, _ = made
    config = BertConfig(vocab_size=len(tokenizer()), hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.warns(UserWarning, match="reads both ways"):
        PRM.create(BertForMaskedLM(config), tokenizer=tokenizer()).save(tmp_path / "bert")
    for argv, says in (
        ([str(tmp_path / "bert"), "--to", "onnx"], "reads both ways"),
        ([str(folder / "full"), "--to", "onnx", "--dtype", "bfloat16"], "written in float32"),
        ([checkpoint(tmp_path / "plain")], "no prm.json"),
    ):
        assert main(["export", *argv, "--out", str(tmp_path / "x")]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "x").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bert", "plain"]
    pytest.importorskip("onnxruntime")
    from prm.export import OnnxPRM

    with pytest.raises(ModelError, match=r"has no model\.onnx"):
        OnnxPRM.load(folder / "full")


def test_other_logits_are_refused(made, exported):
    import prm.export as module

    runtime = module._session(exported)
    module.check(made[1]["lora"], runtime)

    class Other:
        def run(self, names, feed):
            return [x + 0.1 for x in runtime.run(names, feed)]

    with pytest.raises(ModelError, match="ONNX gives other logits"):
        module.check(made[1]["lora"], Other())
