"""State files with anything changed inside: findings or a clear refusal, never a traceback, never a hang."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samerun.errors import SamerunError
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support.zero import slots_of, write_stage2, write_stage3

JUNK: list[Any] = [
    None, 0, -1, 3, 10**6, 2**70, 1.5, float("nan"), True, "", "a.w", [], {}, [1], [-5], [[1, 2]], {"a": 1}, {0: {}},
    torch.ones(3), torch.ones(2, 2), torch.tensor(3.0), torch.zeros(0), b"x", (1, 2), {"a.w": torch.Size([2])},
]  # fmt: skip
AFFINE = {
    "version": 1,
    "params": {
        r"^a\.w$": {
            "logical_shape": [14, 3],
            "ranks": {
                rank: {
                    "shard_shape": [7, 3],
                    "pieces": [
                        {"shape": [7, 3], "source": [rank * 21, [3, 1]], "dest": [0, [3, 1]], "locations": [rank]}
                    ],
                }
                for rank in (0, 1)
            },
        }
    },
}


def build(root: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    groups = [slots_of(rng, {"a.w": (7, 3), "b.w": (5, 5)}), slots_of(rng, {"a.b": (7,)})]
    write_stage2(root / "two" / "global_step3", groups, 2, lr_scheduler={"last_batch_iteration": 2}, epoch=1)
    write_stage3(root / "three" / "global_step3", [[group] for group in groups], 2)
    degrees = {"mp_world_size": 2, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2}}
    target = root / "tensor" / "global_step3"
    for rank in (0, 1):
        info = {"affine_map": AFFINE, "tp_replicated_parameter_patterns": ["a.b"]}
        part = write_stage2(root / f"part{rank}", groups, 1, universal_checkpoint_info=info, **degrees)
        target.mkdir(parents=True, exist_ok=True)
        for path in part.iterdir():
            path.rename(target / path.name.replace("mp_rank_00", f"mp_rank_0{rank}"))
    return [root / name for name in ("two", "three", "tensor")]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield from places(inner, (*path, key))


def mutate(value: Any, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(places(value))))
    for key in path[:-1]:
        value = value[key]
    match data.draw(st.sampled_from(["replace", "replace", "delete", "rename"])):
        case "delete":
            del value[path[-1]]
        case "rename" if isinstance(value, dict):
            value[data.draw(st.sampled_from(["x", "a.w", 5, None]))] = value.pop(path[-1])
        case _:
            value[path[-1]] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build(tmp_path_factory.mktemp("built"))


@settings(max_examples=60, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything_changed_inside_is_no_traceback(built: list[Path], tmp_path: Path, data: st.DataObject):
    root = tmp_path / "changed"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(data.draw(st.sampled_from(built)), root)
    path = data.draw(st.sampled_from(sorted(root.rglob("*.pt"))))
    value = torch.load(path, weights_only=False)
    for _ in range(data.draw(st.integers(1, 2))):
        mutate(value, data)
    torch.save(value, path)
    with contextlib.suppress(SamerunError):
        inspect_checkpoint(open_checkpoint(root), deep=True).to_json()
