"""Training tokens a second against the last TRL `PRMTrainer` (trl 1.13, experimental.prm), same model, rows and batch.

Tokens are those of the rows, without padding, by seconds of the training process on one thread (its own CPU time, so
that a busy machine does not decide). Rows of mixed length (log-uniform, 40 to 800 words) and, beside them, of one
length, where padding can make no difference; there the mean losses of the last tenth of the steps are compared too.
float32, no gradient checkpointing, AdamW, 8 rows an update; the same ids, read at the newline after each step. The
order of rows is each trainer's own, and theirs has a head of two logits.

Needs trl 1.13 in a folder of its own:  pip install --no-deps --target DIR trl==1.13.0;  TRL113=DIR

Usage: TRL113=DIR python bench/distill_speed.py [--quick]
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
WORDS = ["capital", "river", "country", "France", "Paris", "search", "find", "long", "two", "numbers"]
BATCH, LR = 8, 1e-3


def rows(n: int, low: int, high: int) -> list[dict[str, Any]]:
    """Stepwise rows of about so many words; a step is bad where "none" stands in it."""
    random, made = Random(0), []
    for i in range(n):
        words = round(math.exp(random.uniform(math.log(low), math.log(high))))
        steps = []
        while words > 0:
            own = [random.choice(WORDS) for _ in range(min(10, words))]
            if random.random() < 0.3:
                own[-1] = "none"
            steps.append(" ".join(own))
            words -= 10
        labels = ["none" not in step for step in steps]
        made.append({"prompt": f"question {i}", "completions": steps, "labels": labels})
    return made


def base(folder: str) -> str:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.tiny import tokenizer

    torch.manual_seed(0)
    own = tokenizer()
    config = Qwen2Config(
        vocab_size=len(own),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=own.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


def ours(model: str, data: list[dict[str, Any]], out: str) -> dict[str, Any]:
    from collections import Counter

    from distill.data import merge
    from distill.data import rows as made
    from distill.train import DistillConfig, Run
    from prm import PRM, convert

    converted = convert(data)
    prm = PRM.create(model, layout="text", step_token="\n")
    config = DistillConfig(base=model, out=out, epochs=1, batch=BATCH, lr=LR, checkpoint_every=10**9)
    own = made(prm, converted.trajectories, merge(converted.labels), Counter())
    run = Run(prm, own, [], config, "")
    start = time.process_time()
    run.train()
    seconds = time.process_time() - start
    losses = [json.loads(line)["loss"] for line in run.lines.read_text().splitlines()]
    return {"tokens": sum(len(r.part.ids) for r in own), "seconds": seconds, "losses": losses}


def theirs(model: str, data: list[dict[str, Any]], out: str) -> dict[str, Any]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import trl
    from datasets import Dataset
    from transformers import AutoModelForTokenClassification, AutoTokenizer
    from trl.experimental.prm import PRMConfig, PRMTrainer

    if not trl.__version__.startswith("1.13"):
        raise SystemExit(f"expected trl 1.13 in TRL113, got {trl.__version__}")
    config = PRMConfig(
        output_dir=out,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        warmup_steps=max(1, round(0.1 * len(data) / BATCH)),
        weight_decay=0.01,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PRMTrainer(
        model=AutoModelForTokenClassification.from_pretrained(model, num_labels=2),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list(data),
    )
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    tokens = sum(len(row["input_ids"]) for row in trainer.train_dataset)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"tokens": tokens, "seconds": seconds, "losses": [float(x) for x in losses]}


def run(who: str, model: str, n: int, low: int, high: int) -> dict[str, Any]:
    path = os.environ["TRL113"] if who == "theirs" else ""
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--child", json.dumps([who, model, n, low, high, out])]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if not Path(os.environ.get("TRL113", ""), "trl").is_dir():
        raise SystemExit("TRL113 must be a folder with trl 1.13: pip install --no-deps --target DIR trl==1.13.0")
    n, times = (96, 1) if "--quick" in sys.argv else (400, 3)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = base(folder)
        for name, low, high in (("mixed", 40, 800), ("equal", 200, 200)):
            rates: dict[str, list[float]] = {"ours": [], "theirs": []}
            last = {}
            for _ in range(times):
                for who, own in rates.items():
                    done = run(who, model, n, low, high)
                    own.append(done["tokens"] / done["seconds"])
                    tail = done["losses"][-max(1, len(done["losses"]) // 10) :]
                    last[who] = sum(tail) / len(tail)
            found[name] = max(rates["ours"]) / max(rates["theirs"])
            print(
                f"{name}: {max(rates['ours']):,.0f} tokens/s against {max(rates['theirs']):,.0f}, ratio "
                f"{found[name]:.2f}; last losses {last['ours']:.3f} against {last['theirs']:.3f}",
                flush=True,
            )
    line = {"name": "distill_speed", "value": round(found["mixed"], 2), "target": 1.5, "better": "higher"}
    print(json.dumps(line | {"unit": "times TRL 1.13's training tokens a second"}))


if __name__ == "__main__":
    if "--child" in sys.argv:
        who, model, n, low, high, out = json.loads(sys.argv[-1])
        print(json.dumps({"ours": ours, "theirs": theirs}[who](model, rows(n, low, high), out)))
    else:
        main()
