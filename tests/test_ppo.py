"""PPO against independent references, and what must not change its numbers."""

import json
import random
from dataclasses import replace

import pytest
import torch

from prm.env import Action, Episode, History
from prm.errors import UsageError
from prm.records import Trajectory, read_jsonl
from rl.advantages import gae, whiten
from rl.policies import PolicyConfig, TransformersPolicy
from rl.ppo import PPOConfig, Sample, adapt_kl, k2, k3, learn, policy_loss, sample, train, value_loss
from rl.rewards import RewardConfig
from rl.roles import Batch, Roles
from rl.rollout import episodes
from rl.tiny import tiny_model, tiny_tokenizer

WORDS = "go x go y go z task do ok more text no done"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer([WORDS] * 4, 290)


def tiny(tokenizer, seed=0, **options):
    model = tiny_model(tokenizer, width=32, layers=2, seed=seed)
    return TransformersPolicy(model, tokenizer, PolicyConfig("tiny", max_action_tokens=4, **options))


class Chatty:
    """Answers with `length` words a step, for three steps; an even number of characters at the end is a success."""

    length = 3

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return f"do {seed}", {}

    def step(self, action):
        self.count += 1
        done = self.count == 3
        return "more " * self.length, 0.0, done, False, {"success": len(action) % 2 == 0} if done else {}


def played(policy, env=Chatty, n=8, **options):
    found = dict(episodes(policy, env, range(n), **options))
    return [found[i] for i in range(n)]


def returns(mask, rewards, values, gamma, lam):
    """GAE by its definition, on the masked positions as the time axis."""
    at = [i for i, m in enumerate(mask) if m]
    out = {}
    for n, i in enumerate(at):
        total = 0.0
        for k in range(n, len(at)):
            after = values[at[k + 1]] if k + 1 < len(at) else 0.0
            total += (gamma * lam) ** (k - n) * (rewards[at[k]] + gamma * after - values[at[k]])
        out[i] = total
    return [out[i] for i in at]


def test_gae_is_its_definition():
    rng = random.Random(0)
    for _ in range(50):
        mask = [rng.random() < 0.6 for _ in range(12)]
        rewards = [rng.gauss(0, 1) for _ in mask]
        values = [rng.gauss(0, 1) for _ in mask]
        own = [i for i, m in enumerate(mask) if m]
        got = gae(torch.tensor([rewards[i] for i in own]), torch.tensor([values[i] for i in own]), 0.0, 0.97, 0.9)
        assert got.tolist() == pytest.approx(returns(mask, rewards, values, 0.97, 0.9), abs=1e-5)


def test_credit_passes_over_an_observation():
    zero = torch.zeros(4)
    assert gae(torch.tensor([0, 0.3, 0, 0.7]), zero, 0.0, 1.0, 1.0).tolist() == pytest.approx([1.0, 1.0, 0.7, 0.7])
    three = gae(torch.tensor([0.0, 0, 1]), zero[:3], 0.0, 0.95, 0.9)
    assert three.tolist() == pytest.approx([0.731, 0.855, 1.0], abs=1e-3)


def test_an_episode_that_was_cut_bootstraps():
    got = gae(torch.tensor([0.0, 0.0]), torch.tensor([0.5, 0.5]), 2.0, 1.0, 1.0)
    assert got.tolist() == pytest.approx([1.5, 1.5])


def test_whitening_is_always_finite():
    assert whiten(torch.tensor([0.8])).tolist() == pytest.approx([0.8])
    assert whiten(torch.tensor([])).tolist() == []
    assert whiten(torch.tensor([0.5, 0.5])).tolist() == [0.0, 0.0]
    white = whiten(torch.tensor([1.0, 2.0, 6.0]))
    assert white.mean().item() == pytest.approx(0, abs=1e-6) and white.pow(2).mean().item() == pytest.approx(1)


def test_losses_by_hand():
    loss, clips = policy_loss(torch.log(torch.tensor([1.5, 0.5, 1.1])), torch.zeros(3), torch.tensor([1.0, -1, 2]), 0.2)
    assert loss.tolist() == pytest.approx([-1.2, 0.8, -2.2]) and clips.tolist() == [1, 1, 0]
    value = value_loss(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.9]), torch.tensor([2.0, 1.0]), 0.2)
    assert value.tolist() == pytest.approx([1.8**2 / 2, 0.0])
    half, fifth = torch.log(torch.tensor(0.5)), torch.log(torch.tensor(0.2))
    assert (fifth - half).item() == pytest.approx(-0.916, abs=1e-3)
    assert k3(fifth, half).item() == pytest.approx(0.584, abs=1e-3)


def test_the_kl_rule():
    assert [adapt_kl(0.01, kl) for kl in (0.4, 0.5, 5.0, 5.1)] == [0.005, 0.01, 0.01, 0.02]
    coefficient = 0.01
    for kl, end in ((9.0, 0.1), (0.1, 0.001)):  # however long it lasts, it stays a leash
        for _ in range(20):
            coefficient = adapt_kl(coefficient, kl, 0.01)
        assert coefficient == pytest.approx(end)


def test_what_the_forms_of_the_kl_in_the_loss_do():
    """Exactly, over a whole distribution: the mean gradient of k2 is that of KL(policy || reference), that of k3 is the
    other way round, so that it holds on to all that the reference did."""
    logits, ref = torch.tensor([0.3, -0.2, 0.5, -1.0], requires_grad=True), torch.tensor([-0.5, 0.1, 1.0, 0.2])
    logq = ref.log_softmax(0)

    def gradient(value):
        return torch.autograd.grad(value, logits)[0]

    logp = logits.log_softmax(0)
    reverse = gradient((logp.exp() * (logp - logq)).sum())
    logp = logits.log_softmax(0)
    forward = gradient((logq.exp() * (logq - logp)).sum())
    for form, expected in ((k2, reverse), (k3, forward)):
        logp = logits.log_softmax(0)
        assert torch.allclose(gradient((logp.exp().detach() * form(logp, logq)).sum()), expected, atol=1e-6)


def test_step_credit_takes_the_progress_out_of_the_returns(tokenizer):
    policy = tiny(tokenizer)
    for episode in played(policy):
        one = sample(policy, episode, [0.1, 0.2, 1.3], [0.1, 0.2, 0.3])
        lengths = [len(a.token_ids) for a in episode.history.actions]
        assert one.rewards.sum().item() == pytest.approx(1.0) and one.rewards[-1].item() == pytest.approx(1.0)
        assert one.turns.tolist() == [t for t, n in enumerate(lengths) for _ in range(n)]
        assert one.process.tolist() == pytest.approx([(0.1, 0.2, 0.3)[t] for t in one.turns.tolist()])


def test_the_samples_hold_what_was_sampled(tokenizer):
    policy = tiny(tokenizer)
    for episode in played(policy):
        one = sample(policy, episode, [0.1, 0.2, 0.3])
        sampled = [t for a in episode.history.actions for t in a.token_ids]
        assert [one.ids[i] for i in one.places] == sampled
        assert len(one.places) == len(one.logprobs) == len(one.rewards)
        ends = torch.tensor([len(a.token_ids) for a in episode.history.actions]).cumsum(0) - 1
        assert one.rewards[ends].tolist() == pytest.approx([0.1, 0.2, 0.3])
        assert one.rewards.sum().item() == pytest.approx(0.6)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}])
@pytest.mark.parametrize("lora", [None, 4])
def test_the_ratio_is_one_and_the_kl_zero_at_the_start(tokenizer, options, lora):
    policy = tiny(tokenizer, **options)
    roles = Roles(policy.model, lora_rank=lora, temperature=policy.temperature)
    policy.model = policy.generator.model = roles.model
    samples = [sample(policy, e, [0, 0, 0]) for e in played(policy)]
    batch = Batch.of([s.ids for s in samples], [s.places for s in samples])
    old = torch.cat([s.logprobs for s in samples])
    with torch.no_grad():
        new, _ = roles.logprobs(batch)
        reference, _ = roles.logprobs(batch, "reference")
    assert (new - old).exp().sub(1).abs().max() < 1e-5
    assert (new - reference).abs().max() < 1e-6


def test_a_trained_adapter_is_its_own_reference(tokenizer):
    first = Roles(tiny(tokenizer).model, lora_rank=4)
    with torch.no_grad():
        for parameter in first.parameters("policy").values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    first.model.delete_adapter("critic")
    again = Roles(first.model)
    batch = Batch.of([[5, 6, 7, 8, 9]], [[2, 3, 4]])
    with torch.no_grad():
        policy, reference = again.logprobs(batch)[0], again.logprobs(batch, "reference")[0]
        with again.model.disable_adapter():
            base = again.logprobs(batch)[0]
    assert torch.equal(policy, reference)
    assert (policy - base).abs().max() > 1e-3


def test_observations_get_no_gradient_and_change_no_loss(tokenizer):
    """Other observation tokens of the same number, or padding, leave every measure of the policy's tokens that does not
    depend on reading them; and the loss has no gradient there."""
    roles = Roles(tiny(tokenizer).model)
    ids, places = [5, 6, 7, 8, 9, 10, 11], [1, 2, 5, 6]
    batch = Batch.of([ids], [places])
    embedded = []
    hook = roles.head.register_forward_pre_hook(lambda m, args: embedded.append(args[0].shape))
    loss, _ = roles.logprobs(batch)
    hook.remove()
    assert embedded == [torch.Size([4, 32])], "only the policy's tokens reach the output layer"
    assert loss.shape == (4,)


@pytest.mark.parametrize("length", [0, 1, 50])
def test_longer_observations_change_no_advantage(tokenizer, length):
    """With values of zero, advantages depend on rewards and the policy's tokens only."""
    policy = tiny(tokenizer)
    fixed = [Action("go", ids, (-1.0,) * len(ids)) for ids in ((5, 6, 1), (7, 1), (1,))]
    env = Chatty()
    env.length = length
    episode = Episode(env, 0)
    for action in fixed:
        episode.step(action)
    one = sample(policy, episode, [0.3, 0.0, 0.7])
    got = gae(one.rewards, torch.zeros(6), 0.0, 0.95, 0.9)
    d = 0.95 * 0.9
    assert got.tolist() == pytest.approx([0.3 * d**2 + 0.7 * d**5, 0.3 * d + 0.7 * d**4, 0.3 + 0.7 * d**3,
                                          0.7 * d**2, 0.7 * d, 0.7])


def updated(tokenizer, micro_tokens, lora=None, samples=None, **options):
    """(policy parameters after one update, what it measured)"""
    policy = tiny(tokenizer)
    roles = Roles(policy.model, lora_rank=lora)
    policy.model = policy.generator.model = roles.model
    if lora:
        torch.manual_seed(0)
        for name, parameter in roles.model.named_parameters():
            if "lora_A" in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
    samples = samples or [sample(policy, e, [0.1, -0.2, float(i % 2)]) for i, e in enumerate(played(policy))]
    config = PPOConfig(out="", minibatch=4, micro_tokens=micro_tokens, critic_warmup=0, **options)
    optimisers = {
        role: torch.optim.SGD(roles.parameters(role).values(), lr=0.1) for role in ("policy", "critic")
    }
    measured = learn(samples, roles, optimisers, config, 0.01, 5)
    return {k: v.detach().clone() for role in optimisers for k, v in roles.parameters(role).items()}, measured


@pytest.mark.parametrize("lora", [None, 4])
def test_micro_batches_change_nothing(tokenizer, lora):
    whole, measured = updated(tokenizer, 1 << 20, lora, entropy=0.01)
    single, again = updated(tokenizer, 1, lora, entropy=0.01)
    assert measured["ratio_error"] < 1e-5
    assert measured == pytest.approx(again, abs=1e-4)
    assert all(torch.allclose(whole[k], single[k], atol=1e-5) for k in whole)
    assert measured["policy_loss"] != 0 and measured["value_loss"] > 0


@pytest.mark.parametrize("form", ["k3", "k2", "k1"])
def test_one_token_and_no_token_stay_finite(tokenizer, form):
    one = Sample([5, 6, 1], [2], torch.tensor([-3.0]), torch.tensor([1.0]))
    none = Sample([5, 6], [], torch.tensor([]), torch.tensor([]))
    cut = Sample([5, 6, 7, 8, 9], [2, 3], torch.tensor([-4.0, -4.0]), torch.tensor([0.0, 0.5]), bootstraps=True)
    for samples in ([one], [one, none, cut], [none], [cut, cut]):
        parameters, measured = updated(tokenizer, 100, samples=list(samples), kl_form=form)
        assert all(torch.isfinite(p).all() for p in parameters.values())
        assert all(v == v for v in measured.values())


class Say:
    """Say the letter of the task, twice. A tiny task with a known optimum."""

    def reset(self, *, seed=None, options=None):
        self.word = "xy"[random.Random(seed).randrange(2)]
        self.count = self.right = 0
        return f"do {self.word}", {}

    def step(self, action):
        self.count += 1
        self.right += self.word in action
        return "ok", 0.0, self.count == 2, False, {"success": self.right / 2} if self.count == 2 else {}


def test_a_task_with_a_known_optimum_is_solved(tokenizer, tmp_path):
    config = PPOConfig(out=str(tmp_path / "run"), updates=20, episodes=48, lr=6e-3, critic_lr=6e-3, process_weight=0.0,
                       repeat_penalty=0.0, eval_episodes=60, kl=0.0, kl_adaptive=False, seed=1, boards=("none",))
    result = train(tiny(tokenizer, seed=3), Say, None, config)
    assert result.metrics[0]["success"] < 0.5
    assert result.success > 0.9
    assert (tmp_path / "run" / "policy" / "config.json").exists()


def scorer(trajectories):
    return [[len(s.action) % 10 / 10 for s in t.steps] for t in trajectories]


def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(tokenizer, tmp_path):
    def go(out, updates):
        config = PPOConfig(out=str(out), updates=updates, episodes=8, lr=1e-3, save_every=2, eval_episodes=0,
                           audit_every=2, audit=4)
        return train(tiny(tokenizer), Chatty, scorer, config)

    whole = go(tmp_path / "whole", 4)
    go(tmp_path / "parts", 2)
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:
        file.write('{"update": 2, "success": 9}\n{"upd')  # what a kill after the checkpoint leaves
    parts = go(tmp_path / "parts", 4)

    assert steady(parts.metrics) == steady(whole.metrics)
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [0, 1, 2, 3]
    audited = read_jsonl(tmp_path / "parts" / "audit.jsonl", Trajectory)
    assert len(audited) == 8 and all(len(t.meta["scores"]) == len(t.steps) for t in audited)
    with pytest.raises(UsageError, match="holds a run with another lr"):
        config = PPOConfig(out=str(tmp_path / "parts"), updates=5, episodes=8, lr=1e-4, save_every=2)
        train(tiny(tokenizer), Chatty, scorer, config)


def test_below_float32_the_ratio_starts_at_one_all_the_same(tokenizer):
    policy = tiny(tokenizer)
    policy.model.to(torch.bfloat16)
    roles = Roles(policy.model)
    policy.model = policy.generator.model = roles.model
    samples = [sample(policy, e, [0.1, -0.2, float(i % 2)]) for i, e in enumerate(played(policy))]
    sampled = [s.logprobs for s in samples]
    config = PPOConfig(out="", critic_warmup=0)
    optimisers = {role: torch.optim.SGD(roles.parameters(role).values(), lr=0.1) for role in ("policy", "critic")}
    measured = learn(samples, roles, optimisers, config, 0.01, 5)
    assert measured["ratio_error"] < 1e-6 < measured["sampling_error"] < 0.1
    assert any(not torch.equal(s.logprobs, before) for s, before in zip(samples, sampled, strict=True))


def test_a_lora_run_comes_back_from_disk_as_it_was(tokenizer, tmp_path):
    base = tiny(tokenizer)
    base.model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    options = PolicyConfig(str(tmp_path / "base"), max_action_tokens=4)
    trained = TransformersPolicy.load(str(tmp_path / "base"), options)
    config = PPOConfig(out=str(tmp_path / "run"), updates=1, episodes=8, lora_rank=4, lr=1e-2, critic_warmup=0,
                       eval_episodes=0)
    train(trained, Chatty, scorer, config)
    again = TransformersPolicy.load(str(tmp_path / "run" / "policy"), options)
    trained.generator.forget()
    start = [History("do 3", seed=i) for i in range(4)]
    assert trained.act(start) == again.act(start)
    go_on = replace(config, out=str(tmp_path / "next"), lora_rank=None)
    line = train(again, Chatty, scorer, go_on).metrics[0]
    assert line["kl"] == pytest.approx(0, abs=1e-5) and line["ratio_error"] < 1e-4


def test_rewards_logged_are_rewards_given(tokenizer, tmp_path):
    config = PPOConfig(out=str(tmp_path), updates=1, episodes=8, eval_episodes=0, outcome_weight=2.0)
    line = train(tiny(tokenizer), Chatty, scorer, config).metrics[0]
    parts = [v for k, v in line.items() if k.startswith(("reward_", "penalty_"))]
    assert line["reward"] == pytest.approx(sum(parts))
    assert line["reward_outcome"] == pytest.approx(2 * line["success"])


def steady(metrics):
    return [{k: v for k, v in m.items() if not k.startswith("seconds") and v is not None} for m in metrics]


def test_how_many_play_side_by_side_changes_nothing(tokenizer, tmp_path):
    def go(batch):
        config = PPOConfig(out=str(tmp_path / str(batch)), updates=2, episodes=8, lr=1e-3, eval_episodes=0, batch=batch,
                           boards=("none",))  # fmt: skip
        return steady(train(tiny(tokenizer), Chatty, scorer, config).metrics)

    for one, other in zip(go(8), go(3), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("advantages", ["rloo"])
def test_groups_solve_the_task_without_a_critic(tokenizer, tmp_path, advantages):
    config = PPOConfig(out=str(tmp_path), updates=12, episodes=32, lr=6e-3, process_weight=0.0, repeat_penalty=0.0,
                       eval_episodes=30, kl=0.0, kl_adaptive=False, advantages=advantages, group=8, boards=("none",),
                       seed=1)  # fmt: skip
    result = train(tiny(tokenizer, seed=3), Say, None, config)
    assert result.success > result.metrics[0]["success"] + 0.2
    assert result.metrics[0]["explained_variance"] is None and result.metrics[0]["value_loss"] == 0
    assert set(torch.load(tmp_path / "checkpoint.pt")["weights"]) == {"policy"}


def test_a_kill_while_saving_leaves_the_last_checkpoint(tokenizer, tmp_path, monkeypatch):
    def go(updates):
        config = PPOConfig(out=str(tmp_path), updates=updates, episodes=4, lr=1e-3, save_every=1, eval_episodes=0,
                           boards=("none",))  # fmt: skip
        return train(tiny(tokenizer), Chatty, scorer, config)

    go(1)
    save = torch.save

    def killed(state, file):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        go(2)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["update"] == 1
    monkeypatch.setattr(torch, "save", save)
    assert [m["update"] for m in go(2).metrics] == [0, 1]


def test_an_update_stops_early_on_kl(tokenizer):
    _, free = updated(tokenizer, 1 << 20, epochs=6)
    _, held = updated(tokenizer, 1 << 20, epochs=6, kl_stop=1e-9)
    assert free["stopped_early"] == 0 and held["stopped_early"] == 1
    assert held["kl_step"] < free["kl_step"]


def test_a_filter_on_sampling_is_warned_of(tokenizer, tmp_path):
    config = PPOConfig(out=str(tmp_path), updates=1, episodes=4, eval_episodes=0, boards=("none",))
    with pytest.warns(UserWarning, match="--top-p filters"):
        train(tiny(tokenizer, top_p=0.9), Chatty, scorer, config)


def test_another_prm_does_not_go_on_with_a_run(tokenizer, tmp_path):
    class Scorer:
        def __init__(self, name):
            self.name = name

        def score(self, trajectories):
            return scorer(trajectories)

        def fingerprint(self):
            return self.name

    def go(name, updates):
        config = PPOConfig(out=str(tmp_path), updates=updates, episodes=4, save_every=1, eval_episodes=0,
                           boards=("none",))  # fmt: skip
        train(tiny(tokenizer), Chatty, Scorer(name), config)

    go("a", 1)
    go("a", 2)
    with pytest.raises(UsageError, match="holds a run with another PRM"):
        go("b", 3)


def test_a_process_weight_needs_a_scorer(tokenizer, tmp_path):
    with pytest.raises(UsageError, match="needs a PRM"):
        train(tiny(tokenizer), Chatty, None, PPOConfig(out=str(tmp_path)))
    with pytest.raises(UsageError, match="temperature > 0"):
        train(tiny(tokenizer, temperature=0.0), Chatty, scorer, PPOConfig(out=str(tmp_path)))


def test_ppo_config_keeps_the_reward_defaults():
    config = PPOConfig(out="x")
    assert replace(config) == config
    assert (config.process_weight, config.outcome_weight, config.repeat_penalty, config.kl, config.lr) == (
        0.3, 1.0, -0.1, 0.01, 1e-6)
    assert config.shape == RewardConfig().shape == "progress"
