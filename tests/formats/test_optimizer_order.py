"""Naming the positions of an optimizer: against trying every assignment, and on orders of registration."""

from __future__ import annotations

from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.formats.detect import open_checkpoint
from samerun.formats.statedict.order import Candidate, Position, match_order, match_shapes
from samerun.formats.statedict.registration import match_registration

SHAPES = ((2,), (3,), (2, 3), (3, 2))


def every_dealing(shapes: list[tuple[int, ...]], groups: list[list[tuple[int, ...] | None]]) -> list[dict[str, str]]:
    """Returns every assignment of candidates to places that keeps the order inside each group. A dumb oracle."""
    found: list[dict[str, str]] = []

    def deal(rest: list[int], number: int, made: dict[str, str]) -> None:
        if number == len(groups):
            found.append(dict(made))
            return
        for chosen in combinations(rest, len(groups[number])):
            if all(want in (None, shapes[i]) for i, want in zip(chosen, groups[number], strict=True)):
                named = {f"{number}.{place}": f"p{i}" for place, i in enumerate(chosen)}
                deal([i for i in rest if i not in chosen], number + 1, made | named)

    deal(list(range(len(shapes))), 0, {})
    return found


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[list[tuple[int, ...] | None]]]:
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6))
    owners = draw(st.lists(st.sampled_from((-1, 0, 1)), min_size=len(shapes), max_size=len(shapes)))
    hidden = draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    groups: list[list[tuple[int, ...] | None]] = [[], []]
    for shape, owner, hide in zip(shapes, owners, hidden, strict=True):
        if owner >= 0:
            groups[owner].append(None if hide else shape)
    if draw(st.booleans()):  # sometimes one that does not fit
        groups[0].append(draw(st.sampled_from(SHAPES)))
    return shapes, groups


@given(problems())
@settings(max_examples=300, deadline=None)
def test_dealing_agrees_with_trying_everything(
    problem: tuple[list[tuple[int, ...]], list[list[tuple[int, ...] | None]]],
):
    shapes, groups = problem
    candidates = [Candidate(f"p{i}", shape) for i, shape in enumerate(shapes)]
    places = [[Position(f"{g}.{i}", shape) for i, shape in enumerate(group)] for g, group in enumerate(groups)]
    ways = every_dealing(shapes, groups)
    found = match_order(candidates, places)
    if not ways:
        assert found is None
        return
    assert found is not None
    assert found.names in ways
    keys = [place.key for group in places for place in group]
    assert found.open == {key for key in keys if len({way[key] for way in ways}) > 1}


def test_a_parameter_without_state_takes_what_its_group_usually_holds():
    candidates = [Candidate("table", (5, 3)), Candidate("frozen", (3,)), Candidate("bias", (3,))]
    found = match_order(candidates, [[Position("0", None), Position("1", (3,))]])
    assert found is not None
    assert found.names == {"0": "frozen", "1": "bias"}


def test_without_a_dealing_only_unique_shapes_are_named():
    candidates = [Candidate("a", (2,)), Candidate("b", (3,)), Candidate("c", (3,))]
    groups = [[Position("0", (3,)), Position("1", (2,)), Position("2", (7,))]]
    assert match_order(candidates, groups) is None
    assert match_shapes(candidates, groups).names == {"1": "a"}


# Orders in which real classes register, to be found again from sorted names.
LLAMA = [
    "model.embed_tokens.weight",
    *(
        f"model.layers.{i}.{name}.weight"
        for i in (0, 1, 10)
        for name in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
            "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
        )
    ),
    "model.norm.weight",
    "lm_head.weight",
]  # fmt: skip
GPT2 = [
    "wte.weight", "wpe.weight",
    *(
        f"h.{i}.{name}.{leaf}"
        for i in range(2)
        for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        for leaf in ("weight", "bias")
    ),
    "ln_f.weight", "ln_f.bias",
]  # fmt: skip
OPT = [
    "embed_tokens.weight", "embed_positions.weight", "final_layer_norm.weight", "final_layer_norm.bias",
    *(
        f"layers.{i}.{name}.{leaf}"
        for i in range(2)
        for name in (
            "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj", "self_attn_layer_norm",
            "fc1", "fc2", "final_layer_norm",
        )
        for leaf in ("weight", "bias")
    ),
]  # fmt: skip
BERT = [
    "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight",
    "embeddings.token_type_embeddings.weight", "embeddings.LayerNorm.weight", "embeddings.LayerNorm.bias",
    *(
        f"encoder.layer.{i}.{name}.{leaf}"
        for i in range(2)
        for name in (
            "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
            "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
        )
        for leaf in ("weight", "bias")
    ),
    "pooler.dense.weight", "pooler.dense.bias",
]  # fmt: skip
# The decoder of the head is tied, so no file lists it: only the module's name tells that its norm comes first.
ALBERT = [
    "albert.embeddings.word_embeddings.weight", "albert.embeddings.position_embeddings.weight",
    "albert.embeddings.token_type_embeddings.weight", "albert.embeddings.LayerNorm.weight",
    "albert.embeddings.LayerNorm.bias", "albert.encoder.embedding_hidden_mapping_in.weight",
    "albert.encoder.embedding_hidden_mapping_in.bias",
    *(
        f"albert.encoder.albert_layer_groups.0.albert_layers.0.{name}.{leaf}"
        for name in (
            "full_layer_layer_norm", "attention.query", "attention.key", "attention.value", "attention.dense",
            "attention.LayerNorm", "ffn", "ffn_output",
        )
        for leaf in ("weight", "bias")
    ),
    "predictions.bias", "predictions.LayerNorm.weight", "predictions.LayerNorm.bias", "predictions.dense.weight",
    "predictions.dense.bias",
]  # fmt: skip
TORCH_ENCODER = [
    f"layers.{i}.{name}"
    for i in range(2)
    for name in (
        "self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight", "self_attn.out_proj.bias",
        "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias", "norm1.weight", "norm1.bias",
        "norm2.weight", "norm2.bias",
    )
]  # fmt: skip

RECURRENT = [name for name, _ in torch.nn.LSTM(8, 8, num_layers=11, bidirectional=True, proj_size=4).named_parameters()]


def shape_of(name: str) -> tuple[int, ...]:
    """A shape that tells as little as a real model's: square projections, equal vectors."""
    if name.endswith("bias") or name.startswith("bias_") or "norm" in name.lower() or "ln_" in name:
        return (8,)
    if any(word in name for word in ("embed", "wte", "head")):
        return (31, 8)
    if any(word in name for word in ("gate_proj", "up_proj", "c_fc", "fc1", "intermediate", "linear1")):
        return (20, 8)
    if any(word in name for word in ("down_proj", "mlp.c_proj", "fc2", "linear2")):
        return (8, 20)
    return (8, 8)


@pytest.mark.parametrize(
    "names",
    [LLAMA, GPT2, OPT, BERT, ALBERT, TORCH_ENCODER, RECURRENT],
    ids=["llama", "gpt2", "opt", "bert", "albert", "torch", "recurrent"],
)
@pytest.mark.parametrize("split", [False, True], ids=["one group", "decay and no decay"])
def test_usual_models_are_put_in_order(names: list[str], split: bool):
    vectors = [name for name in names if len(shape_of(name)) == 1]
    members = [[name for name in names if name not in vectors], vectors] if split else [names]
    numbered = [name for group in members for name in group]
    keys = iter(range(len(numbered)))
    groups = [[Position(str(next(keys)), shape_of(name)) for name in group] for group in members]
    found = match_registration([Candidate(name, shape_of(name)) for name in sorted(names)], groups)
    assert found is not None
    assert [found.matching.names[str(i)] for i in range(len(numbered))] == numbered
    assert found.assumed


@pytest.mark.parametrize("order", list(permutations(["alpha", "beta", "gamma"])))
def test_shapes_overrule_convention(order: tuple[str, ...]):
    shapes = {"alpha": (2,), "beta": (3,), "gamma": (4,)}
    candidates = [Candidate(f"blocks.{i}.{name}.weight", shapes[name]) for i in range(2) for name in shapes]
    names = [f"blocks.{i}.{name}.weight" for i in range(2) for name in order]
    groups = [[Position(str(i), shapes[name.split(".")[2]]) for i, name in enumerate(names)]]
    found = match_registration(candidates, groups)
    assert found is not None
    assert [found.matching.names[str(i)] for i in range(6)] == names
    assert found.assumed == frozenset()  # numbers and shapes tell every one


def test_a_model_that_fits_in_no_order_is_not_named():
    candidates = [Candidate("a.weight", (2,)), Candidate("b.weight", (3,))]
    assert match_registration(candidates, [[Position("0", (5,))]]) is None


def test_what_only_convention_names_is_marked(tmp_path: Path):
    """A model whose order of registration is unusual: positions of equal shape may be misnamed, never unmarked."""
    from safetensors.torch import save_file

    order = ["head.weight", "norm.weight", "query.weight", "odd.weight", "key.weight", "embed.weight"]
    shapes = {"norm.weight": (8,), "embed.weight": (13, 8)}
    torch.manual_seed(0)
    tensors = {name: torch.randn(shapes.get(name, (8, 8))) for name in order}
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    optimizer = torch.optim.AdamW(list(parameters.values()))
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1, "epoch": 0.5}')
    checkpoint = open_checkpoint(tmp_path)
    for name, parameter in parameters.items():
        entry = checkpoint.state.tensors[f"optim.exp_avg:{name}"]
        right = np.array_equal(checkpoint.read(f"optim.exp_avg:{name}"), optimizer.state[parameter]["exp_avg"].numpy())
        assert right or entry.name_inferred, name
    assert not checkpoint.state.tensors["optim.exp_avg:embed.weight"].name_inferred
