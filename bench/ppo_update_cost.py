"""What an update costs beside the bare passes, and rollouts beside plain batched `generate`.

Update: one call of `rl.ppo.learn` (one epoch) against the passes it cannot do without, on the same micro-batches of the
same tokens: policy and critic forward + backward, reference and values forward. Printed as well: against the policy's
forward + backward alone. Rollouts: sampled tokens a second of `TransformersPolicy.act` over whole episodes against
`generate` on the same prompts, turn by turn, with the same number of new tokens. Medians of rounds that alternate.

    python bench/ppo_update_cost.py [--quick]
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from prm.env import Action, History
from rl.policies import PolicyConfig, TransformersPolicy
from rl.ppo import PPOConfig, Sample, _micro, learn
from rl.roles import Batch, Roles
from rl.tiny import tiny_model, tiny_tokenizer

QUICK = "--quick" in sys.argv
ROUNDS = 5 if QUICK else 11
EPISODES = 16 if QUICK else 32
WORDS = "go stay look search answer the river of the country is long and green"


def samples(vocabulary: int) -> list[Sample]:
    """Episodes of 4 turns: 40 tokens read and 12 sampled a turn, as the model's log-probabilities would be."""
    draw, out = random.Random(0), []
    for _ in range(EPISODES):
        ids, places = [], []
        for _ in range(4):
            ids += [draw.randrange(3, vocabulary) for _ in range(draw.randrange(30, 50))]
            n = draw.randrange(8, 16)
            places += range(len(ids), len(ids) + n)
            ids += [draw.randrange(3, vocabulary) for _ in range(n)]
        out.append(Sample(ids, places, torch.full((len(places),), -5.0), torch.zeros(len(places))))
        out[-1].rewards[-1] = draw.random()
    return out


def bare(own: list[Sample], roles: Roles, config: PPOConfig, *, all_roles: bool) -> None:
    groups = _micro([len(s.ids) for s in own], config.micro_tokens)
    batches = [Batch.of([own[i].ids for i in g], [own[i].places for i in g]) for g in groups]
    for batch in batches:
        if all_roles:
            with torch.no_grad():
                roles.logprobs(batch, "reference")
                roles.values(batch)
        roles.logprobs(batch)[0].sum().backward()
        if all_roles:
            roles.values(batch).sum().backward()


def update_cost(model: Any, vocabulary: int) -> tuple[float, float]:
    config = PPOConfig(out="", epochs=1, minibatch=EPISODES, micro_tokens=4096, critic_warmup=0)
    roles = Roles(model)
    optimisers: dict[str, Any] = {
        r: torch.optim.SGD(roles.parameters(r).values(), lr=0.0) for r in ("policy", "critic")
    }
    own = samples(vocabulary)
    ratios, alone = [], []
    for _ in range(ROUNDS + 1):
        times = []
        for call in (
            lambda: learn(own, roles, optimisers, config, 0.01, 5),
            lambda: bare(own, roles, config, all_roles=True),
            lambda: bare(own, roles, config, all_roles=False),
        ):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
        ratios.append(times[0] / times[1])
        alone.append(times[0] / times[2])
    return median(ratios[1:]), median(alone[1:])


def rollout_speed(policy: TransformersPolicy) -> float:
    """Tokens a second of whole episodes over those of `generate`."""
    tokenizer, ratios = policy.tokenizer, []
    policy.generator.stop_ids = frozenset()  # all rows sample as many tokens as `generate` is told to
    for number in range(ROUNDS):
        speeds = []
        for ours in (True, False):
            histories = [History(f"{WORDS} {i}", seed=number * 100 + i) for i in range(EPISODES)]
            policy.generator.forget()
            spent = 0.0
            for _ in range(4):
                start = time.process_time()
                if ours:
                    actions = policy.act(histories)
                else:
                    from prm.render import prompt

                    prompts = [prompt(h, tokenizer, policy.layout()) for h in histories]
                    width = max(map(len, prompts))
                    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
                    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
                    made = policy.model.generate(
                        input_ids=ids,
                        attention_mask=mask,
                        max_new_tokens=24,
                        min_new_tokens=24,
                        do_sample=True,
                        top_k=0,
                    )[:, width:].tolist()
                    actions = [Action(tokenizer.decode(row), tuple(row), (0.0,) * 24) for row in made]
                spent += time.process_time() - start
                histories = [h.then(a, WORDS) for h, a in zip(histories, actions, strict=True)]
            speeds.append(EPISODES * 4 * 24 / spent)
        ratios.append(speeds[0] / speeds[1])
    return median(ratios[1:])


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = tiny_tokenizer([WORDS] * 4, 400)
    model = tiny_model(tokenizer, width=128 if QUICK else 256, layers=4, context=2048)
    policy = TransformersPolicy(model, tokenizer, PolicyConfig("tiny", max_action_tokens=24))
    speed = rollout_speed(policy)
    print(f"rollouts: {speed:.2f} times the tokens a second of generate (target 0.8)")
    ratio, alone = update_cost(model, len(tokenizer))
    print(f"update: {ratio:.2f} times its bare passes (target 1.3); {alone:.2f} times the policy's forward + backward")
    result = {"name": "ppo_update_cost", "value": round(ratio, 3), "target": 1.3, "better": "lower"}
    print(json.dumps({**result, "unit": "CPU seconds over those of the bare passes", "rollout_ratio": round(speed, 3)}))


if __name__ == "__main__":
    main()
