"""Four roles on one frozen base: each reads with its own adapter, and none changes another."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from prm.errors import UsageError
from prm.model import PRM
from prm.records import Step, Trajectory
from rl.policies import PolicyConfig, TransformersPolicy
from rl.roles import Batch, Roles, adapter_prm
from tests import tiny

TRAJECTORIES = [
    Trajectory("what is the capital?", (Step("search: France", "Paris is the capital."), Step("answer: Paris"))),
    Trajectory("river", (Step("search: river", "none"),)),
]
BATCH = ([[5, 6, 7, 8, 9, 10], [5, 9, 7]], [[2, 3, 5], [1]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def prm(base, tmp_path_factory):
    """The folder of a PRM, a LoRA adapter whose weights are not zero, on the base."""
    folder = tmp_path_factory.mktemp("prm") / "prm"
    made = PRM.create(base, lora_rank=3, seed=1)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if "lora_" in name or "score" in name or "head" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    made.save(folder)
    return str(folder)


def policy(base):
    return TransformersPolicy.load(base, PolicyConfig(base))


def test_a_prm_on_the_policys_base_scores_as_it_does_alone(base, prm):
    alone = PRM.load(prm)
    roles = Roles(policy(base).model, lora_rank=4)
    with torch.no_grad():
        for parameter in roles.parameters("policy").values():
            parameter.add_(0.1)
    before = roles.logprobs(Batch.of(*BATCH))[0]
    shared = adapter_prm(prm, roles)
    for got, want in zip(shared.score(TRAJECTORIES), alone.score(TRAJECTORIES), strict=True):
        assert got == pytest.approx(want, abs=1e-5)
    assert shared.fingerprint() == alone.fingerprint()
    assert torch.equal(roles.logprobs(Batch.of(*BATCH))[0], before), "the policy reads without the PRM"
    own = {id(p) for p in roles.backbone.parameters()}
    assert {id(p) for p in shared.backbone.parameters()} == own, "there is one base"


def test_a_prm_of_another_base_or_a_whole_one_is_refused(prm, base, tmp_path):
    other = tiny.checkpoint(tmp_path / "other", seed=5)
    with pytest.raises(UsageError, match="its base is not the policy's"):
        adapter_prm(prm, Roles(policy(other).model, lora_rank=4))
    PRM.create(base, seed=1).save(tmp_path / "whole")
    with pytest.raises(UsageError, match="only a PRM that is a LoRA adapter"):
        adapter_prm(tmp_path / "whole", Roles(policy(base).model, lora_rank=4))


def test_the_critic_starts_from_the_prm(base, prm):
    roles = Roles(policy(base).model, lora_rank=4, critic=prm)
    alone = PRM.load(prm)
    batch = Batch.of(*BATCH)
    with torch.no_grad():
        hidden = roles._hidden(batch, "critic")
        want = alone.backbone(input_ids=batch.ids[:1]).last_hidden_state[0, torch.tensor([1, 2, 4])]
    assert torch.allclose(hidden[:3], want, atol=1e-5)
    assert roles.values(batch).tolist() == [0.0] * 4, "the value head starts at zero"
    assert any(".critic." in name for name in roles.parameters("critic"))


def test_the_roles_are_independent(base):
    roles = Roles(policy(base).model, lora_rank=4)
    batch = Batch.of(*BATCH)

    def reads():
        with torch.no_grad():
            return [roles.logprobs(batch)[0], roles.logprobs(batch, "reference")[0], roles._hidden(batch, "critic")]

    before = reads()
    with torch.no_grad():
        for parameter in roles.parameters("policy").values():
            parameter.add_(0.1)
    policy_moved = reads()
    assert not torch.equal(policy_moved[0], before[0])
    assert torch.equal(policy_moved[1], before[1]) and torch.equal(policy_moved[2], before[2])
    with torch.no_grad():
        for name, parameter in roles.parameters("critic").items():
            if "value_head" not in name:
                parameter.add_(0.1)
    critic_moved = reads()
    assert torch.equal(critic_moved[0], policy_moved[0]) and torch.equal(critic_moved[1], before[1])
    assert not torch.equal(critic_moved[2], before[2])


@pytest.mark.parametrize("lora", [4, None])
def test_checkpointing_changes_no_gradient(base, lora):
    """Also the critic's, whose forward pass is run again during backward with its own adapter on."""

    def gradients(checkpointing):
        roles = Roles(policy(base).model, lora_rank=lora, gradient_checkpointing=checkpointing)
        with torch.no_grad():
            for role in ("policy", "critic"):
                for i, parameter in enumerate(roles.parameters(role).values()):
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
        batch = Batch.of(*BATCH)
        roles.backward(roles.logprobs(batch)[0].sum(), "policy")
        roles.backward(roles.values(batch).sum(), "critic")
        return {f"{role} {k}": p.grad for role in ("policy", "critic") for k, p in roles.parameters(role).items()}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        if gradient is not None:
            assert torch.allclose(gradient, again[name], atol=1e-5), name
    assert any(
        g is not None and g.abs().sum() > 0 for k, g in plain.items() if k.startswith("critic") and "lora" in k
    ) or (lora is None)


def test_no_critic_where_none_is_wanted(base):
    assert Roles(policy(base).model, critic=False).critic is None
    roles = Roles(policy(base).model, lora_rank=4, critic=False)
    assert not any(".critic." in name for name, _ in roles.model.named_parameters())


def test_another_rank_than_the_adapters_is_refused(base):
    model = get_peft_model(policy(base).model, LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(UsageError, match="an adapter of rank 2, not 8"):
        Roles(model, lora_rank=8)


@pytest.mark.parametrize("lora", [4, None])
def test_neither_padding_nor_neighbours_change_a_token(base, lora):
    roles = Roles(policy(base).model, lora_rank=lora)
    with torch.no_grad():
        together = roles.logprobs(Batch.of(*BATCH))[0]
        alone = torch.cat([roles.logprobs(Batch.of([i], [p]))[0] for i, p in zip(*BATCH, strict=True)])
        left = copy.deepcopy(BATCH[0])
        width = max(map(len, left))
        shift = [width - len(row) for row in left]
        ids = torch.tensor([[0] * s + row for s, row in zip(shift, left, strict=True)])
        mask = torch.tensor([[0] * s + [1] * len(row) for s, row in zip(shift, left, strict=True)])
        batch = Batch.of(*BATCH)
        moved = Batch(ids, mask, batch.row, batch.column + torch.tensor(shift)[batch.row])
        padded = roles.logprobs(moved)[0]
    assert torch.allclose(together, alone, atol=1e-5) and torch.allclose(together, padded, atol=1e-5)
