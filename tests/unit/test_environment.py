"""Every setting that decides kernels, precision or the order of sums shows in a trace when it is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from samerun.train.environment import environment
from samerun.train.inputs import InputWatch


@contextlib.contextmanager
def changed(setter: Callable[[Any], object], before: Any, now: Any) -> Iterator[None]:
    setter(now)
    try:
        yield
    finally:
        setter(before)


def switch_mkldnn(on: bool) -> None:
    torch.backends.mkldnn.enabled = on


CHANGES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, False, True),
    "float32_matmul_precision": lambda: changed(torch.set_float32_matmul_precision, "highest", "high"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "mkldnn": lambda: changed(switch_mkldnn, True, False),
}


def facts(model: nn.Module | None = None) -> dict[str, Any]:
    return environment(nn.Linear(2, 2) if model is None else model)


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_setting_shows_and_nothing_else(name: str) -> None:
    before = facts()
    with CHANGES[name]():
        now = facts()
    assert {key for key in before if before[key] != now[key]} == {name}
    assert facts() == before


@pytest.mark.parametrize("name", ["CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "OMP_NUM_THREADS", "MKL_CBWR"])
def test_variables_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "other")
    assert facts()["variables"][name] == "other"


def test_types_and_compilation_show() -> None:
    assert facts(nn.Linear(2, 2).double())["dtype"] == ["float64"]
    assert facts(torch.compile(nn.Linear(2, 2), backend="eager"))["compiled"] is True  # pyright: ignore
    assert facts()["compiled"] is False


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_autocast_is_seen_where_the_forward_pass_runs(dtype: torch.dtype | None) -> None:
    """A loop enters it after `attach`, which cannot see it."""
    model = nn.Linear(2, 2)
    watch = InputWatch(model)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        model(torch.ones(3, 2))
    found = watch.take() or {}
    assert found.get("autocast") == (None if dtype is None else str(dtype).removeprefix("torch."))
