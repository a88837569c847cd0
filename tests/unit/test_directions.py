"""Directions of changes and gradients: sketches that no layout changes, and what turned or permuted tensors come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samerun.core.digest import STRIDE
from samerun.core.dtype import parse_dtype
from samerun.core.mix import fold_key, mix64
from samerun.core.sketch import apart
from samerun.core.tolerance import bands_from_json, bands_to_json
from samerun.errors import Problem, Severity
from samerun.trace import read_trace
from samerun.train import Recorder
from samerun.train.boxpart import BoxPart
from samerun.train.flatpart import FlatPart
from samerun.train.shards import LocalShard
from samerun.train.sketch import COLUMNS, directions, sketch
from samerun.verify.evidence.observed import Observed, observe
from samerun.verify.updates.bands import plan_bands, split_bands
from samerun.verify.updates.compare import compare_window
from samerun.verify.updates.controls import Controls, complete_reference
from samerun.verify.updates.directions import direction_bands, direction_floor
from support.observations import BATCH, FIRST, make_evaluation, make_observed, make_update
from unit.test_updates import make_plan, tolerances

Change = Callable[[nn.Module], None]
VALUES = torch.randn(7, 9, generator=torch.Generator().manual_seed(3))


def of_whole(values: torch.Tensor, name: str = "w") -> torch.Tensor:
    return sketch(name, LocalShard.whole(values), values)


def direction(values: torch.Tensor, name: str = "w") -> list[float]:
    return directions(of_whole(values, name).tolist(), [name], {name: values.numel()})[name]


def test_a_sketch_is_the_sum_of_weights_times_values() -> None:
    expected = [0.0] * 8
    for index, value in enumerate(VALUES.flatten().tolist()):
        word = mix64(fold_key(*b"w") + index * STRIDE)
        fields = [(word >> 8 * k) & 0xFF for k in range(8)]
        weights = [((field - 256 if field >> 7 else field) + 0.5) * (12 / (2**16 - 1)) ** 0.5 for field in fields]
        expected = [total + weight * value for total, weight in zip(expected, weights, strict=True)]
    assert of_whole(VALUES).tolist() == pytest.approx([*expected, float(VALUES.square().sum()), 63], rel=1e-5)


def flat(values: torch.Tensor, start: int, stop: int) -> FlatPart:
    return FlatPart(tuple(values.shape), values.reshape(-1)[start:stop], start)


def boxes(values: torch.Tensor, *rows: int) -> BoxPart:
    return BoxPart(tuple(values.shape), values.dtype, lambda: [((row, 2), values[row : row + 1, 2:]) for row in rows])


def strided(values: torch.Tensor, *rows: int) -> LocalShard:
    held = tuple((row, row + 1) for row in rows)
    return LocalShard(tuple(values.shape), values[list(rows)][:, :2], (held, ((0, 2),)), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_parts_of_any_cut_add_up(dtype: torch.dtype) -> None:
    values = VALUES.to(dtype) * (1 + 2j if dtype.is_complex else 1)
    cuts: list[list[Any]] = [
        [flat(values, 0, 31), flat(values, 31, 31), flat(values, 31, 63)],
        [boxes(values, 0, 3, 6), boxes(values, 1, 2, 4, 5), strided(values, 0, 2, 4, 6), strided(values, 1, 3, 5)],
    ]
    for parts in cuts:
        together = torch.stack([sketch("w", part, part.local) for part in parts]).sum(0)
        assert together.tolist() == pytest.approx(of_whole(values).tolist(), rel=1e-5)


def test_what_is_not_whole_not_finite_or_zero_has_no_direction() -> None:
    names = ["w", "part", "zero", "nan"]
    zero, bad = torch.zeros(63), torch.full((63,), float("nan"))
    part = flat(VALUES, 0, 62)
    rows = [of_whole(VALUES), sketch("part", part, part.local), of_whole(zero), of_whole(bad)]
    assert directions(torch.cat(rows).tolist(), names, dict.fromkeys(names, 63)).keys() == {"w"}
    assert len(rows[0]) == COLUMNS


def test_distances_of_directions() -> None:
    base = direction(VALUES)
    assert apart(base, direction(3 * VALUES)) < 1e-5
    order = torch.Generator().manual_seed(0)
    permuted = [direction(VALUES.flatten()[torch.randperm(63, generator=order)]) for _ in range(20)]
    assert min(apart(base, other) for other in permuted) > 0.2
    turned = [apart(direction(VALUES, str(name)), direction(-VALUES, str(name))) for name in range(200)]
    assert min(turned) > 0.6
    assert sum(distance**2 for distance in turned) / 200 == pytest.approx(4.0, rel=0.1)


def job(folder: Path, after: Change | None = None, before: Change | None = None, noise: float = 0.0) -> Observed:
    """One update, whose loss shows nothing of what is done to it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    recorder = Recorder(folder)
    recorder.attach(model, optimizer)
    recorder.loaded(update=FIRST - 1)
    model(torch.randn(8, 6)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.mul_(1 + noise * torch.randn_like(parameter))  # type: ignore[union-attr]
        if before:
            before(model)
        old = {name: parameter.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        if after:
            for name, parameter in model.named_parameters():
                parameter.sub_(old[name])  # what is left is the change
            after(model)
            for name, parameter in model.named_parameters():
                parameter.add_(old[name])
    recorder.record(update=FIRST, loss=1.0, sample_ids=list(range(BATCH)))
    recorder.close()
    return observe(read_trace(folder))


def turn(model: Any) -> None:
    model[1].weight.neg_()


def permute(model: Any) -> None:
    model[1].weight.copy_(model[1].weight.flip(1))


def turn_gradient(model: Any) -> None:
    model[0].bias.grad.neg_()


def judge(
    controls: Sequence[Observed], candidate: Observed, precision: str = "float32"
) -> tuple[list[Problem], list[Problem]]:
    """Returns (findings about the candidate, notes about the controls)."""
    names = tuple(map(str, range(len(controls))))
    every = complete_reference(
        Controls(names=names, observed=tuple(controls), evaluations=(make_evaluation(),) * len(controls))
    )
    table = tolerances(parameter_delta={"from": "control", "factor": 10.0, "floor": 1e-2})
    bands = plan_bands(every, table, first_update=FIRST, num_updates=1, precision=parse_dtype(precision))
    kept, noise, notes = split_bands(bands)
    sealed = bands_from_json(bands_to_json(kept, noise))
    assert {(band.metric, band.tensor): band for band in sealed} == {(b.metric, b.tensor): b for b in kept}
    plan = make_plan(num_updates=1, window_updates=1, boundaries=(), trainable=None, bands=sealed)
    return list(compare_window(every.reference, candidate, plan).problems), notes


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> list[Observed]:
    top = tmp_path_factory.mktemp("controls")
    return [job(top / "first"), job(top / "second", noise=1e-6)]


def test_plain_descent_goes_against_the_gradient(clean: list[Observed]) -> None:
    (update,) = clean[0].updates
    assert update.moved_direction is not None
    assert update.gradients_direction is not None
    assert update.moved_direction.keys() == update.gradients_direction.keys()
    for tensor, gradient in update.gradients_direction.items():
        assert apart(update.moved_direction[tensor], [-value for value in gradient]) < 1e-3


def test_a_clean_candidate_is_silent(clean: list[Observed], tmp_path: Path) -> None:
    assert judge(clean, job(tmp_path, noise=1e-6)) == ([], [])


@pytest.mark.parametrize("change", [turn, permute])
def test_an_update_that_goes_another_way_is_named(clean: list[Observed], change: Change, tmp_path: Path) -> None:
    (found,), _ = judge(clean, job(tmp_path, after=change))
    assert (found.code, found.where["tensor"], found.where["key"]) == (
        "SR-UPD-DIRECTION",
        "1.weight",
        "change_direction",
    )
    assert found.severity is Severity.ERROR


def test_a_gradient_that_is_turned_is_named(clean: list[Observed], tmp_path: Path) -> None:
    found, _ = judge(clean, job(tmp_path, before=turn_gradient))
    assert [(p.code, p.where["tensor"], p.where["key"]) for p in found] == [
        ("SR-UPD-DIRECTION", "0.bias", "gradient_direction"),
        ("SR-UPD-DIRECTION", "0.bias", "change_direction"),
    ]


def test_controls_that_point_elsewhere_cannot_judge_and_say_so(clean: list[Observed], tmp_path: Path) -> None:
    noisy = job(tmp_path / "noisy", noise=0.6)
    found, notes = judge([clean[0], noisy], job(tmp_path / "turned", after=turn))
    assert "SR-UPD-DIRECTION" not in {problem.code for problem in found}
    said = [note for note in notes if note.code == "SR-CONTROL-DIRECTION"]
    assert [note.where["key"] for note in said] == ["gradient_direction", "change_direction"]
    assert {note.severity for note in said} == {Severity.NOTE}


def test_a_gradient_that_is_rounding_alone_points_anywhere(clean: list[Observed]) -> None:
    controls = Controls(names=("a", "b"), observed=tuple(clean), evaluations=(None, None))
    bands = plan_bands(controls, tolerances(), first_update=FIRST, num_updates=1)
    kept, _, _ = split_bands(bands, frozenset({"0.bias"}))
    judged = {(band.metric, band.tensor) for band in kept}
    assert ("change_direction", "1.bias") in judged
    assert not {("change_direction", "0.bias"), ("gradient_direction", "0.bias")} & judged


def test_traces_without_directions() -> None:
    old = make_observed(make_update(FIRST))
    told: dict[str, Any] = {"moved_direction": {"norm.weight": (1.0, 0.5, -0.5, -1.0) * 2}}
    new = make_observed(make_update(FIRST, **told))
    assert [problem.code for problem in judge([old, old], new)[0]] == []
    (missing,), _ = judge([new, new], old)
    assert (missing.code, missing.where["key"]) == ("SR-UPD-UNRECORDED", "moved_direction")
    ledger = replace(old, updates=(replace(old.updates[0], moved=None, deltas={}), *old.updates[1:]))
    reference = complete_reference(Controls(names=("a", "b"), observed=(ledger, new), evaluations=(None, None)))
    assert reference.reference.by_update()[FIRST].moved_direction == told["moved_direction"]


def test_a_band_is_no_narrower_than_what_a_change_may_differ_by(clean: list[Observed]) -> None:
    def widest(*observed: Observed, **tolerance: Any) -> float:
        controls = Controls(names=tuple("ab"[: len(observed)]), observed=observed, evaluations=(None,) * len(observed))
        table = tolerances(parameter_delta=tolerance)
        bands = direction_bands(controls, table["parameter_delta"], FIRST, parse_dtype("float32"))
        return max(band.limit(FIRST) for band in bands if band.metric == "change_direction")

    assert widest(*clean, **{"from": "control", "factor": 10.0, "floor": 1e-5}) == 0.05
    assert widest(*clean, **{"from": "control", "factor": 10.0, "floor": 0.2}) == 0.2
    assert widest(*clean, **{"from": "user", "limit": 0.3, "reason": "cast"}) == 0.3
    assert widest(*clean, **{"from": "user", "limit": 0.3, "reason": "cast", "absolute": True}) == 0.05
    assert widest(clean[0], **{"from": "analysis"}) == 0.05


def test_floors() -> None:
    assert direction_floor(parse_dtype("float64")) == direction_floor(parse_dtype("float32")) == 0.05
    assert direction_floor(parse_dtype("bfloat16")) == direction_floor(parse_dtype("float16")) > 0.05
