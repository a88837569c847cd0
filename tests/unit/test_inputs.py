"""What a model is given, as one number: the same however samples are dealt, another for other samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samerun.train.inputs import InputWatch


class Echo(nn.Module):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        return tokens.float()


def given(*passes: tuple[Any, ...], whole: bool = True, **named: Any) -> dict[str, Any] | None:
    model = Echo()
    watch = InputWatch(model, whole=whole)
    for arguments in passes:
        model(*arguments, **named)
    return watch.take()


TOKENS = torch.arange(60).view(6, 10) % 7


def test_portions_and_order_make_no_difference() -> None:
    whole = given((TOKENS,))
    assert whole is not None
    assert whole["rows"] == 6
    assert given((TOKENS[3:],), (TOKENS[:3],)) == whole
    assert given((TOKENS[[4, 1]],), (TOKENS[[0, 2, 3, 5]],)) == whole
    assert given((TOKENS,), (TOKENS[:0],)) == whole


def test_one_other_token_shows_and_so_does_one_in_another_place() -> None:
    whole, changed, moved = given((TOKENS,)), TOKENS.clone(), TOKENS.clone()
    changed[5, 9] += 1
    moved[2] = moved[2].roll(1)
    assert len({str(given((tokens,))) for tokens in (TOKENS, changed, moved)}) == 3
    assert given((TOKENS, TOKENS > 3)) != whole
    assert given((TOKENS,), labels=TOKENS) != whole


def test_only_training_counts_and_activations_do_not() -> None:
    model = Echo()
    watch = InputWatch(model)
    with torch.no_grad():
        model(TOKENS)
    model.eval()(TOKENS)
    assert watch.take() is None
    assert given((TOKENS.float(),), whole=False) is None  # a later pipeline stage is given activations
    assert given((TOKENS.float(),)) is not None
    model.train()
    before = len(model._forward_pre_hooks)
    assert before == 0  # take() has stopped watching
