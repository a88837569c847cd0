"""A checkpoint through a name map: values, places of bytes, coverage, groups and counters against plain NumPy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.box import check_tilings
from samerun.core.mapparse import parse_map
from samerun.core.namemap import NameMap
from samerun.core.state import ParamGroup
from samerun.errors import CorruptCheckpoint, UsageError
from samerun.formats.base import view_extent
from samerun.formats.detect import open_checkpoint
from samerun.formats.mapfile import read_name_map, shipped_maps
from samerun.formats.mapped import MappedCheckpoint
from samerun.stores.local import MappedFiles
from support.memory import MemoryCheckpoint

RNG = np.random.default_rng(5)
LAYERS, HEADS, GROUPS, WIDTH, HIDDEN, INNER, VOCAB = 3, 4, 2, 2, 5, 7, 11
CONFIG = {"args": {"num_attention_heads": HEADS, "num_query_groups": GROUPS}}


def values(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=shape).astype(np.float32)


def megatron(stacked: bool) -> dict[str, np.ndarray[Any, Any]]:
    """A model under Megatron's names, with one moment and one step per parameter."""
    inner = {
        "self_attention.linear_qkv.weight": values(LAYERS, (HEADS + 2 * GROUPS) * WIDTH, HIDDEN),
        "self_attention.linear_qkv.layer_norm_weight": values(LAYERS, HIDDEN),
        "self_attention.linear_proj.weight": values(LAYERS, HIDDEN, HEADS * WIDTH),
        "mlp.linear_fc1.weight": values(LAYERS, 2 * INNER, HIDDEN),
        "mlp.linear_fc1.layer_norm_weight": values(LAYERS, HIDDEN),
        "mlp.linear_fc2.weight": values(LAYERS, HIDDEN, INNER),
    }
    names = {
        "embedding.word_embeddings.weight": values(VOCAB, HIDDEN),
        "decoder.final_layernorm.weight": values(HIDDEN),
    }
    for name, array in inner.items():
        if stacked:
            names[f"decoder.layers.{name}"] = array
        else:
            names |= {f"decoder.layers.{layer}.{name}": array[layer] for layer in range(LAYERS)}
    state = {f"param:{name}": array for name, array in names.items()}
    state |= {f"optim.exp_avg:{name}": values(*array.shape) for name, array in names.items()}
    return state | {f"optim.step:{name}": np.array(4.0, np.float32) for name in names}


def layer_of(
    arrays: dict[str, np.ndarray[Any, Any]], stacked: bool, part: str, layer: int, name: str
) -> np.ndarray[Any, Any]:
    base = f"{part}:decoder.layers"
    return arrays[f"{base}.{name}"][layer] if stacked else arrays[f"{base}.{layer}.{name}"]


def cuts(arrays: dict[str, np.ndarray[Any, Any]], every: int) -> dict[str, list[int]]:
    return {key: list(range(every, array.shape[0], every)) for key, array in arrays.items() if array.ndim}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_megatron_as_llama(stacked: bool, every: int) -> None:
    arrays = megatron(stacked)
    source = MemoryCheckpoint(arrays, cuts=cuts(arrays, every), objects=CONFIG)
    mapped = MappedCheckpoint(source, read_name_map("megatron-to-llama", source.state))
    assert "param:lm_head.weight" not in mapped.state.tensors
    for part in ("param", "optim.exp_avg"):
        for layer in range(LAYERS):
            get = partial(layer_of, arrays, stacked, part, layer)
            qkv = get("self_attention.linear_qkv.weight").reshape(GROUPS, HEADS // GROUPS + 2, WIDTH, HIDDEN)
            expected = {
                "self_attn.q_proj.weight": qkv[:, :-2].reshape(-1, HIDDEN),
                "self_attn.k_proj.weight": qkv[:, -2].reshape(-1, HIDDEN),
                "self_attn.v_proj.weight": qkv[:, -1].reshape(-1, HIDDEN),
                "self_attn.o_proj.weight": get("self_attention.linear_proj.weight"),
                "input_layernorm.weight": get("self_attention.linear_qkv.layer_norm_weight"),
                "mlp.gate_proj.weight": get("mlp.linear_fc1.weight")[:INNER],
                "mlp.up_proj.weight": get("mlp.linear_fc1.weight")[INNER:],
                "post_attention_layernorm.weight": get("mlp.linear_fc1.layer_norm_weight"),
                "mlp.down_proj.weight": get("mlp.linear_fc2.weight"),
            }
            for name, array in expected.items():
                found = mapped.read(f"{part}:model.layers.{layer}.{name}")
                np.testing.assert_array_equal(found, array, err_msg=name)
                assert mapped.read(f"optim.step:model.layers.{layer}.{name}").tolist() == 4.0
    assert len(mapped.state.tensors) == 3 * (2 + 9 * LAYERS)
    coverage = check_tilings([(entry.shape, entry.tiling) for entry in mapped.state.tensors.values()])
    assert all(found.exact for found in coverage)


TURNED = 4  # values per head: with two, pairs are halves


def torchtitan() -> dict[str, np.ndarray[Any, Any]]:
    """torchtitan's Llama: weights saved apart, an optimizer that saw them fused."""
    arrays = {"param:tok_embeddings.weight": values(11, HIDDEN), "param:lm_head.weight": values(11, HIDDEN)}
    arrays["param:norm.weight"] = values(HIDDEN)
    for layer in range(LAYERS):
        base = f"layers.{layer}"
        for name, rows in (("wq", HEADS * TURNED), ("wk", GROUPS * TURNED), ("wv", GROUPS * TURNED)):
            arrays[f"param:{base}.attention.qkv_linear.{name}.weight"] = values(rows, HIDDEN)
        arrays[f"param:{base}.attention.wo.weight"] = values(HIDDEN, HEADS * TURNED)
        for name, shape in (("w1", (INNER, HIDDEN)), ("w3", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER))):
            arrays[f"param:{base}.feed_forward.{name}.weight"] = values(*shape)
        arrays |= {f"param:{base}.{name}.weight": values(HIDDEN) for name in ("attention_norm", "ffn_norm")}
        fused = f"{base}.attention.qkv_linear.wqkv.weight"
        arrays[f"optim.m:{fused}"] = values((HEADS + 2 * GROUPS) * TURNED, HIDDEN)
        arrays[f"optim.step:{fused}"] = np.array(4.0, np.float32)
    for key, array in list(arrays.items()):
        name = key.partition(":")[2]
        if key.startswith("param:") and ".qkv_linear." not in key:
            arrays |= {f"optim.m:{name}": array + 1, f"optim.step:{name}": np.array(4.0, np.float32)}
    return arrays


def turned(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of pairs as rows of halves, by reshaping."""
    return rows.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("every", [1, 3, 100])
def test_torchtitan_as_llama(every: int) -> None:
    arrays = torchtitan()
    source = MemoryCheckpoint(arrays, cuts=cuts(arrays, every), objects=CONFIG)
    mapped = MappedCheckpoint(source, read_name_map("torchtitan-to-llama", source.state))
    for layer in range(LAYERS):
        held = f"layers.{layer}.attention.qkv_linear"
        fused = arrays[f"optim.m:{held}.wqkv.weight"].reshape(GROUPS, HEADS // GROUPS + 2, TURNED, HIDDEN)
        moments = fused[:, :-2].reshape(-1, HIDDEN), fused[:, -2].reshape(-1, HIDDEN), fused[:, -1].reshape(-1, HIDDEN)
        weights = [arrays[f"param:{held}.{name}.weight"] for name in ("wq", "wk", "wv")]
        for part, (query, key, value) in (("optim.m", moments), ("param", weights)):
            expected = {"q_proj": turned(query, HEADS), "k_proj": turned(key, GROUPS), "v_proj": value}
            for name, array in expected.items():
                found = mapped.read(f"{part}:model.layers.{layer}.self_attn.{name}.weight")
                np.testing.assert_array_equal(found, array, err_msg=name)
                assert mapped.read(f"optim.step:model.layers.{layer}.self_attn.{name}.weight").tolist() == 4.0
    assert {key.partition(":")[2] for key in mapped.state.tensors} == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        *(f"model.layers.{layer}.{name}.weight" for layer in range(LAYERS) for name in LLAMA_NAMES),
    }  # fmt: skip


LLAMA_NAMES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


@pytest.mark.parametrize("name", shipped_maps())
def test_the_way_back_is_the_way_there(name: str) -> None:
    arrays = torchtitan() if name == "torchtitan-to-llama" else megatron(stacked=True)
    if name == "megatron-to-gpt2":
        arrays = {key: array for key, array in arrays.items() if "linear_qkv.weight" not in key}
        fused = values(LAYERS, 3 * HEADS * WIDTH, HIDDEN)
        arrays |= {f"{part}:decoder.layers.self_attention.linear_qkv.weight": fused for part in ("param", "optim.m")}
    source = MemoryCheckpoint(arrays, cuts=cuts(arrays, 2), objects=CONFIG)
    there = MappedCheckpoint(source, read_name_map(name, source.state))
    back = MappedCheckpoint(there, read_name_map(f"inverse:{name}", there.state))
    assert set(back.state.tensors) == set(arrays)
    for key, array in arrays.items():
        np.testing.assert_array_equal(back.read(key), array, err_msg=key)
    assert {key for key in there.state.tensors if "decoder" in key or "qkv_linear" in key} == set()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_box_of_any_mapped_tensor(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 5))
    array = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    cut = data.draw(st.lists(st.integers(1, rows - 1), unique=True).map(sorted))
    first = data.draw(st.integers(1, rows - 1))
    steps: list[Any] = [{"split": {"sizes": [first, rows - first]}}]
    if data.draw(st.booleans()):
        steps.append("transpose")
    source = MemoryCheckpoint({"param:w": array}, cuts={"param:w": cut})
    names = parse_map({"samerun-map": 1, "rules": [{"from": "w", "to": ["a", "b"], "do": steps}]}, {})
    mapped = MappedCheckpoint(source, names)
    for key, part in (("param:a", array[:first]), ("param:b", array[first:])):
        expected = part.T if len(steps) == 2 else part
        start = [data.draw(st.integers(0, n - 1)) for n in expected.shape]
        size = [data.draw(st.integers(1, n - a)) for n, a in zip(expected.shape, start, strict=True)]
        box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        np.testing.assert_array_equal(mapped.read(key, tuple(start), tuple(size)), expected[box])
        np.testing.assert_array_equal(mapped.read(key), expected)


@pytest.mark.parametrize("step", ["rotary-halves", "rotary-pairs"])
@pytest.mark.parametrize("cut", [8, 3])
def test_rows_of_heads_lie_where_it_says(step: str, cut: int, tmp_path: Path) -> None:
    """Strided reads of the file, cut at the edge of a head and within one; few pieces where they can be few."""
    tensor = torch.arange(80, dtype=torch.float32).reshape(16, 5)
    torch.save({"model": {"a": tensor[:cut].clone(), "b": tensor[cut:].clone()}}, tmp_path / "model.pt")
    join = {"from": ["a", "b"], "to": "q", "do": [{"concat": {"sizes": [cut, 16 - cut]}}, {step: {"heads": 2}}]}
    mapped = MappedCheckpoint(
        open_checkpoint(tmp_path / "model.pt"), parse_map({"samerun-map": 1, "rules": [join]}, {})
    )
    heads = (2, 4, 2, 5) if step == "rotary-halves" else (2, 2, 4, 5)
    expected = tensor.numpy().reshape(heads).swapaxes(1, 2).reshape(16, 5)
    tiling, files, found = mapped.state.tensors["param:q"].tiling, MappedFiles(), np.full((16, 5), np.nan)
    for piece, (start, size) in enumerate(zip(tiling.offsets.tolist(), tiling.sizes.tolist(), strict=True)):
        box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        assert np.isnan(found[box]).all()
        found[box] = view_extent(files, mapped.locate("param:q", piece))
        np.testing.assert_array_equal(found[box], mapped.read_piece("param:q", piece))
    np.testing.assert_array_equal(found, expected)
    assert len(tiling) == (16 if step == "rotary-pairs" else 4 if cut == 8 else 6)


def test_bytes_lie_where_it_says(tmp_path: Path) -> None:
    tensor = torch.arange(80, dtype=torch.bfloat16).reshape(16, 5)
    torch.save({"model": {"qkv": tensor, "other": torch.ones(3)}}, tmp_path / "model.pt")
    source = open_checkpoint(tmp_path / "model.pt")
    rule = {"from": "qkv", "to": ["q", "k", "v"], "do": [{"split-qkv": {"heads": 4, "groups": 2}}, "transpose"]}
    mapped = MappedCheckpoint(source, parse_map({"samerun-map": 1, "rules": [rule]}, {}))
    (key,) = [key for key in mapped.state.tensors if key.endswith(":q")]
    files = MappedFiles()
    for piece in range(len(mapped.state.tensors[key].tiling)):
        extent = mapped.locate(key, piece)
        assert not extent.contiguous
        np.testing.assert_array_equal(view_extent(files, extent), mapped.read_piece(key, piece))
    whole = tensor.float().numpy().reshape(2, 4, -1, 5)[:, :2].reshape(-1, 5).T
    np.testing.assert_array_equal(mapped.read(key).astype(np.float32), whole)


def test_added_padding_is_zeros_and_lies_nowhere() -> None:
    array = values(5, 3)
    document = {"samerun-map": 1, "rules": [{"from": "w", "to": "w", "do": [{"resize": {"before": 5, "after": 8}}]}]}
    mapped = MappedCheckpoint(MemoryCheckpoint({"param:w": array}), parse_map(document, {}))
    np.testing.assert_array_equal(mapped.read("param:w"), np.concatenate([array, np.zeros((3, 3), np.float32)]))
    with pytest.raises(CorruptCheckpoint, match="SR-MAP-PADDING"):
        mapped.locate("param:w", 1)
    back = MappedCheckpoint(mapped, parse_map(document, {}).inverse())
    np.testing.assert_array_equal(back.read("param:w"), array)


def test_groups_follow_their_parameters() -> None:
    arrays = {f"param:{name}": values(4, 3) for name in "qkvw"}
    groups = (ParamGroup(("q", "k", "v"), {"lr": 1.0}), ParamGroup(("w",), {"lr": 2.0}))
    source = MemoryCheckpoint(arrays, groups=groups, aliases={"param:w": ("tied",)})
    fuse = [{"from": ["q", "k", "v"], "to": "qkv", "do": ["concat"]}, {"from": "w", "to": "head"}]
    mapped = MappedCheckpoint(source, parse_map({"samerun-map": 1, "rules": fuse}, {}))
    assert [group.params for group in mapped.state.groups] == [("qkv",), ("head",)]
    assert mapped.state.tensors["param:head"].aliases == ("tied",)
    crossed = [{"from": ["q", "w"], "to": "qw", "do": ["concat"]}]
    with pytest.raises(UsageError, match="SR-MAP-GROUPS"):
        MappedCheckpoint(source, parse_map({"samerun-map": 1, "rules": crossed}, {}))


def test_a_tensor_that_is_left_out() -> None:
    source = MemoryCheckpoint({"param:a": values(2), "param:b": values(2)}, groups=(ParamGroup(("a", "b"), {}),))
    mapped = MappedCheckpoint(source, parse_map({"samerun-map": 1, "rules": [{"drop": "b"}]}, {}))
    assert list(mapped.state.tensors) == ["param:a"]
    assert mapped.dropped == ("param:b",)
    assert mapped.state.groups[0].params == ("a",)


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ([{"from": "a", "to": "b"}], "would all become param:b"),
        ([{"from": "a", "to": ["x", "y"], "do": [{"split": {"parts": 4}}]}], "split of 3 into 4"),
        ([{"from": "a", "to": "x", "do": [{"split": {"parts": 3}}]}], "more tensors than the 1 names"),
        ([{"from": ["a", "gone"], "to": "x", "do": ["concat"]}], "gone is needed"),
        ([{"from": ["a", "half"], "to": "x", "do": ["concat"]}], "float16 and float32"),
        ([{"from": "l.{i}", "to": "l", "do": [{"stack": "i"}]}], "1 is missing of 0 to 2"),
        ([{"from": "misspelt", "to": "x"}], "SR-MAP-UNUSED"),
    ],
)
def test_rules_that_do_not_fit(rules: list[Any], code: str) -> None:
    arrays = {f"param:{name}": values(3) for name in ("a", "b", "l.0", "l.2")} | {"param:half": np.ones(3, np.float16)}
    with pytest.raises(UsageError) as caught:
        MappedCheckpoint(MemoryCheckpoint(arrays), parse_map({"samerun-map": 1, "rules": rules}, {}))
    assert code in str(caught.value)


def test_numbers_come_from_the_checkpoint_or_from_the_user(tmp_path: Path) -> None:
    empty = MemoryCheckpoint({"param:a": values(3)}).state
    with pytest.raises(UsageError) as caught:
        read_name_map("megatron-to-llama", empty)
    assert [problem.code for problem in caught.value.problems] == ["SR-MAP-SETTING"] * 2
    assert isinstance(read_name_map("megatron-to-llama,heads=4,groups=2", empty), NameMap)
    for text, code in (
        ("megatron-to-llama,heads=4,groups=2,depth=3", "SR-MAP-SETTING"),
        ("megatron-to-llama,heads=many", "SR-MAP-SETTING"),
        ("nowhere.yaml", "SR-MAP-FILE"),
        (str(tmp_path), "SR-MAP-FILE"),
    ):
        with pytest.raises(UsageError) as caught:
            read_name_map(text, empty)
        assert {problem.code for problem in caught.value.problems} == {code}, text
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "half.yaml").write_text("samerun-map: 1\nrules: [{drop: a}]")
    for text in (str(tmp_path / "bad.yaml"), f"inverse:{tmp_path / 'half.yaml'}"):
        with pytest.raises(UsageError, match="SR-MAP-SYNTAX"):
            read_name_map(text, empty)
