"""The nestings in which training scripts save: what is the model, the optimizer, the rest; under which keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samerun.core.state import Role
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int = 2) -> torch.optim.Optimizer:
    for _ in range(updates):
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def adam(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return stepped(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False, **settings))


def saved(state: Any, folder: Path, name: str = "checkpoint.pt") -> Checkpoint:
    torch.save(state, folder / name)
    return open_checkpoint(folder / name)


def codes(checkpoint: Checkpoint) -> list[str]:
    return [problem.code for problem in checkpoint.state.problems]


def check_values(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Asserts that the checkpoint holds exactly these, under the model's own names."""
    expected = {f"param:{name}": p.detach().numpy() for name, p in model.named_parameters()}
    expected |= {f"buffer:{name}": b.numpy() for name, b in model.named_buffers()}
    for name, p in model.named_parameters():
        for slot, value in (optimizer.state[p] if optimizer else {}).items():
            if value is not None:
                expected[f"optim.{slot}:{name}"] = np.asarray(value)
    assert set(checkpoint.state.tensors) == set(expected)
    for key, value in expected.items():
        assert np.array_equal(checkpoint.read(key), value), key


@pytest.mark.parametrize(
    ("model_name", "optimizer_name"),
    [
        ("model", "optimizer"), ("state_dict", "optim"), ("model_state_dict", "optimizer_state_dict"), ("net", "opt"),
        ("module", "optimizer_states"), ("weights", "adam"), ("generator", "optimizer"),
    ],
)  # fmt: skip
def test_usual_names_of_model_and_optimizer(model_name: str, optimizer_name: str, tmp_path: Path):
    model = net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {
        model_name: model.state_dict(),
        optimizer_name: optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 3,
        "global_step": 2,
        "best_loss": 0.5,
        "rng_state": torch.get_rng_state(),
        "args": {"lr": 1e-2},
    }
    checkpoint = saved(state, tmp_path)
    check_values(checkpoint, model, optimizer)
    found = checkpoint.state
    assert (found.progress.update, found.progress.epoch) == (2, 3)
    assert found.scheduler is not None
    assert found.scheduler["step_size"] == 3
    assert list(found.rng) == ["rng_state"]
    assert found.objects["args.lr"] == 1e-2
    assert found.groups[0].params == tuple(name for name, _ in model.named_parameters())
    assert found.groups[0].hyperparameters["weight_decay"] == 0.01
    assert codes(checkpoint) == ["SR-OPT-ORDER"]


def test_a_bare_state_dict_is_the_model(tmp_path: Path):
    model = net()
    checkpoint = saved(model.state_dict(), tmp_path)
    check_values(checkpoint, model)
    assert codes(checkpoint) == []


def test_sections_may_lie_deeper(tmp_path: Path):
    model = net()
    optimizer = adam(model)
    inner = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()], "step": 2}
    checkpoint = saved({"trainer": {"state": inner}, "version": "1"}, tmp_path)
    check_values(checkpoint, model, optimizer)


def test_a_whole_pickled_module_is_read_and_not_built(tmp_path: Path):
    model = net()
    checkpoint = saved({"model": model, "epoch": 1}, tmp_path)
    check_values(checkpoint, model)
    assert not any(entry.role_inferred for entry in checkpoint.state.tensors.values())
    assert codes(checkpoint) == ["SR-PKL-UNKNOWN"]


def test_saved_parameter_names_name_positions(tmp_path: Path):
    model = net()
    groups = [
        {"params": [(n, p) for n, p in model.named_parameters() if p.ndim == 1], "lr": 3e-3},
        {"params": [(n, p) for n, p in reversed(list(model.named_parameters())) if p.ndim > 1]},
    ]
    optimizer = stepped(model, torch.optim.AdamW(groups, foreach=False))
    checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    check_values(checkpoint, model, optimizer)
    assert checkpoint.state.groups[1].params == ("2.weight", "0.weight")
    assert codes(checkpoint) == []


def test_groups_are_dealt_by_order_and_shape(tmp_path: Path):
    model = net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = stepped(model, torch.optim.AdamW(groups, lr=1e-2, foreach=False))
    checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    check_values(checkpoint, model, optimizer)
    assert checkpoint.state.groups[0].params == ("0.weight", "2.weight")
    assert codes(checkpoint) == ["SR-OPT-ORDER"]


def test_positions_that_fit_several_parameters_are_listed(tmp_path: Path):
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    backbone, head = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizer = torch.optim.AdamW([{"params": backbone}, {"params": head, "lr": 1e-1}], foreach=False)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    check_values(checkpoint, model, optimizer)  # the earliest go to the earlier group: here that is right
    problem = checkpoint.state.problems[0]
    assert problem.code == "SR-OPT-OPEN"
    assert "3 positions" in problem.message


def test_an_optimizer_of_another_model_is_not_named(tmp_path: Path):
    other = nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(other.parameters(), foreach=False)
    other(torch.randn(2, 7)).sum().backward()
    optimizer.step()
    checkpoint = saved({"model": net().state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    assert codes(checkpoint) == ["SR-OPT-UNMATCHED"]
    assert checkpoint.read("optim.exp_avg:#0").shape == (5, 7)


def test_an_optimizer_without_a_model_is_kept_by_number(tmp_path: Path):
    checkpoint = saved(adam(net()).state_dict(), tmp_path, "optimizer.pt")
    assert codes(checkpoint) == ["SR-OPT-UNMATCHED"]
    assert {entry.key.fqn for entry in checkpoint.state.tensors.values()} == {f"#{i}" for i in range(6)}


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.SGD(p, lr=1e-2), set()),
        (lambda p: torch.optim.RMSprop(p, centered=True), {"step", "square_avg", "grad_avg"}),
        (lambda p: torch.optim.Adagrad(p), {"step", "sum"}),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (lambda p: torch.optim.NAdam(p), {"step", "exp_avg", "exp_avg_sq", "mu_product"}),
        (lambda p: torch.optim.Adafactor(p), {"step", "row_var", "col_var", "variance"}),
        (lambda p: torch.optim.LBFGS(p), None),
    ],
    ids=["momentum", "sgd", "rmsprop", "adagrad", "amsgrad", "nadam", "adafactor", "lbfgs"],
)  # fmt: skip
def test_slots_of_other_optimizers_are_all_read(make: Any, slots: set[str] | None, tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = make(model.parameters())

    def loss() -> Any:
        optimizer.zero_grad()
        value = model(torch.ones(2, 4)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    found = {entry.key.slot for entry in checkpoint.state.tensors.values() if entry.key.role is Role.OPTIM}
    if slots is not None:
        assert found == slots
        check_values(checkpoint, model, optimizer)
    assert len(checkpoint.state.groups) == 1


def test_steps_kept_as_numbers_are_tensors_of_one_number(tmp_path: Path):
    """torch before 1.12 kept the step as an integer, and some optimizers keep it once per group."""
    model = nn.Linear(2, 2)
    slots = {"exp_avg": torch.ones(2, 2), "step": 7}
    state = {"state": {0: slots}, "param_groups": [{"params": [0, 1], "lr": 0.1, "step": 9}]}
    checkpoint = saved({"model": model.state_dict(), "optimizer": state}, tmp_path)
    assert checkpoint.read("optim.step:weight").item() == 7
    assert checkpoint.read("optim.step:bias").item() == 9


def test_named_and_flattened_optimizer_state(tmp_path: Path):
    import warnings

    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = net()
    optimizer = adam(model)
    for flatten in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            state = get_optimizer_state_dict(model, optimizer, options=options)
        checkpoint = saved({"model": model.state_dict(), "optim": dict(state)}, tmp_path)
        check_values(checkpoint, model, optimizer)
        assert set(checkpoint.state.groups[0].params) == {name for name, _ in model.named_parameters()}
        assert codes(checkpoint) == []


def test_masters_averages_and_scalers_have_their_place(tmp_path: Path):
    model = net().bfloat16()
    named = {
        name: {"master_param": p.detach().float(), "exp_avg": p.detach().float()}
        for name, p in model.named_parameters()
    }
    state = {
        "model": model.state_dict(),
        "ema": {name: value.float() for name, value in model.state_dict().items()},
        "optimizer": {"state": named, "param_groups": [{"params": list(named), "lr": 1.0}]},
        "scaler": {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000},
    }
    found = saved(state, tmp_path).state
    roles = {role: sum(entry.key.role is role for entry in found.tensors.values()) for role in Role}
    assert roles == {Role.PARAM: 6, Role.BUFFER: 3, Role.OPTIM: 6, Role.MASTER: 6, Role.EMA: 9}
    assert found.objects["scaler.scale"] == 65536.0


def test_two_models_with_their_optimizers(tmp_path: Path):
    first, second = nn.Linear(4, 3), nn.Linear(5, 2)
    states = []
    for model, width in ((first, 4), (second, 5)):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.randn(2, width)).sum().backward()
        optimizer.step()
        states.append(optimizer)
    state = {
        "generator": first.state_dict(),
        "discriminator": second.state_dict(),
        "opt_g": states[0].state_dict(),
        "opt_d": states[1].state_dict(),
    }
    checkpoint = saved(state, tmp_path)
    assert np.array_equal(checkpoint.read("param:generator.weight"), first.weight.detach())
    moments = states[1].state[second.weight]["exp_avg"]
    assert np.array_equal(checkpoint.read("optim.exp_avg:discriminator.weight"), moments)


def test_tied_tensors_are_one_key_however_they_were_saved(tmp_path: Path):
    model = nn.ModuleDict({"emb": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["emb"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model["head"](model["emb"](torch.arange(3))).sum().backward()
    optimizer.step()
    shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    copied = {**shared, "model": {name: tensor.clone() for name, tensor in model.state_dict().items()}}
    for state in (shared, copied):
        found = saved(state, tmp_path).state.tensors
        assert set(found) == {"param:emb.weight", "optim.momentum_buffer:emb.weight"}
        assert found["param:emb.weight"].aliases == ("head.weight",)


def test_equal_fresh_norms_are_not_tied(tmp_path: Path):
    model = nn.Sequential(nn.LayerNorm(32), nn.LayerNorm(32))
    state = saved({"model": {name: tensor.clone() for name, tensor in model.state_dict().items()}}, tmp_path).state
    assert len(state.tensors) == 4


def test_a_model_saved_wrapped_and_bare_is_not_merged_in_silence(tmp_path: Path):
    weights = {"layer.weight": torch.ones(2, 2), "module.layer.weight": torch.zeros(2, 2)}
    checkpoint = saved({"model": weights}, tmp_path)
    assert codes(checkpoint) == ["SR-KEY-TWICE"]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_wrappers_are_taken_off_and_named(prefix: str, tmp_path: Path):
    model = net()
    optimizer = adam(model)
    wrapped = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    checkpoint = saved({"model": wrapped, "optimizer": optimizer.state_dict()}, tmp_path)
    check_values(checkpoint, model, optimizer)
    assert codes(checkpoint) == ["SR-OPT-ORDER", "SR-NAME-WRAPPED"]


def test_counters_that_disagree_are_found(tmp_path: Path):
    state = {"model": net().state_dict(), "step": 5, "trainer": {"global_step": 6}}
    assert codes(saved(state, tmp_path)) == ["SR-CNT-DISAGREE"]
    assert codes(saved({**state, "trainer": {"global_step": 5}}, tmp_path)) == []


def test_roles_follow_the_order_of_registration(tmp_path: Path):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 3), requires_grad=False)
            self.gain = nn.Parameter(torch.randn(3))
            self.register_buffer("count", torch.tensor(1))
            self.register_buffer("shift", torch.randn(3))

    model = Odd()
    optimizer = torch.optim.SGD([model.gain], lr=0.1, momentum=0.9)
    model.gain.sum().backward()
    optimizer.step()
    found = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path).state.tensors
    assert set(found) == {
        "param:table", "param:gain", "buffer:count", "buffer:shift", "optim.momentum_buffer:gain",
    }  # fmt: skip
    assert found["param:table"].role_inferred


def test_the_same_state_in_the_legacy_container(tmp_path: Path):
    model = net()
    optimizer = adam(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "c.pt", _use_new_zipfile_serialization=False)
    check_values(open_checkpoint(tmp_path / "c.pt"), model, optimizer)


def test_a_damaged_storage_is_one_finding_and_the_rest_is_read(tmp_path: Path):
    model = net()
    torch.save({"model": model.state_dict()}, tmp_path / "c.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "c.pt").read_bytes()
    (tmp_path / "c.pt").write_bytes(data[:-20])
    checkpoint = open_checkpoint(tmp_path / "c.pt")
    assert codes(checkpoint) == ["SR-FILE-TRUNCATED"]
    lost = [key for key, entry in checkpoint.state.tensors.items() if len(entry.tiling) == 0]
    assert 0 < len(lost) < len(checkpoint.state.tensors)


def test_a_seed_is_no_state_of_a_generator(tmp_path: Path):
    model = net()
    state = {"model": model.state_dict(), "optimizer": adam(model).state_dict(), "meta": {"seed": 7}, "seed": 7}
    assert saved(state, tmp_path).state.rng == {}
    assert list(saved({**state, "rng_state": torch.get_rng_state()}, tmp_path).state.rng) == ["rng_state"]


def test_counters_of_widespread_scripts(tmp_path: Path):
    model = net()
    state = {"model": model.state_dict(), "optimizer": adam(model).state_dict()}
    for name in ("iter_num", "completed_steps", "iteration"):
        assert saved({**state, name: 2}, tmp_path).state.progress.update == 2
        report = inspect_checkpoint(saved({**state, name: 5}, tmp_path))
        assert report.state.progress.update == 5
        assert "SR-CNT-OPTIMIZER" in {problem.code for problem in report.problems}


def test_adapters_beside_their_configuration(tmp_path: Path):
    from safetensors.torch import save_file

    tensors = {f"base_model.model.q.lora_{half}.weight": torch.ones(2, 4) for half in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.state.format == "huggingface"
    assert codes(checkpoint) == ["SR-HF-ADAPTER"]
    assert len(checkpoint.state.tensors) == 2


class Pair(nn.Module):
    """Two modules built alike, each with an optimizer of its own: shapes do not tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.second = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        made = [
            torch.optim.AdamW(self.first.parameters(), lr=1e-2, foreach=False),
            torch.optim.SGD(self.second.parameters(), lr=1e-2, momentum=0.9),
        ]
        for module, optimizer in zip((self.first, self.second), made, strict=True):
            stepped(module, optimizer)
        return made


def check_pair(checkpoint: Checkpoint, model: Pair, optimizers: list[torch.optim.Optimizer]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {(p, s): value for o in optimizers for p, slots in o.state.items() for s, value in slots.items()}
    expected = {f"optim.{slot}:{names[id(p)]}": np.asarray(value) for (p, slot), value in held.items()}
    assert {key for key in checkpoint.state.tensors if key.startswith("optim")} == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(checkpoint.read(key), value), key
    listed = [name for group in checkpoint.state.groups for name in group.params]
    assert sorted(listed) == sorted(names.values())


def test_several_optimizers_over_one_model_share_its_parameters_out(tmp_path: Path):
    model = Pair()
    optimizers = model.optimizers()
    states = [optimizer.state_dict() for optimizer in optimizers]
    checkpoint = saved({"model": model.state_dict(), "optimizers": states}, tmp_path)
    check_pair(checkpoint, model, optimizers)
    assert codes(checkpoint) == ["SR-OPT-OPEN", "SR-OPT-OPEN"]  # the other way round fits as well
    lightning = {
        "state_dict": model.state_dict(), "optimizer_states": states, "lr_schedulers": [], "loops": {},
        "pytorch-lightning_version": "2.6.6", "global_step": 4, "epoch": 0,
    }  # fmt: skip
    check_pair(saved(lightning, tmp_path, "a.ckpt"), model, optimizers)


def test_several_optimizers_beside_sorted_names(tmp_path: Path):
    from safetensors.torch import save_file

    model = Pair()
    optimizers = model.optimizers()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for number, optimizer in enumerate(optimizers):
        torch.save(optimizer.state_dict(), tmp_path / f"optimizer{f'_{number}' if number else ''}.bin")
    torch.save({"random_state": 0, "step": 0}, tmp_path / "random_states_0.pkl")
    checkpoint = open_checkpoint(tmp_path)
    check_pair(checkpoint, model, optimizers)
    assert set(codes(checkpoint)) == {"SR-OPT-ASSUMED"}


def test_models_of_equal_shape_are_given_to_one_optimizer_each(tmp_path: Path):
    model = Pair()
    optimizers = model.optimizers()
    state = {
        "first": model.first.state_dict(), "second": model.second.state_dict(),
        "first_optimizer": optimizers[0].state_dict(), "second_optimizer": optimizers[1].state_dict(),
    }  # fmt: skip
    check_pair(saved(state, tmp_path), model, optimizers)
