"""The options by which `report` and `trace` write curves for other tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

_SHOWN_BY = {"tensorboard": "`tensorboard --logdir`", "wandb": "`wandb sync`", "mlflow": "`mlflow ui`"}


def curve_options(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds an option for each tool; the command takes them as `**folders`."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for tool, shown_by in reversed(_SHOWN_BY.items()):
            text = f"{what}, for {shown_by}."
            command = click.option(f"--{tool}", type=click.Path(path_type=Path), metavar="DIR", help=text)(command)
        return command

    return add


def chosen(folders: Mapping[str, Path | None]) -> tuple[str, Path] | None:
    """Returns (tool, folder) of the option that was given; None without.

    Raises:
        click.UsageError: for two of them.
    """
    given = [(tool, folder) for tool, folder in folders.items() if folder is not None]
    if len(given) > 1:
        raise click.UsageError(" and ".join(f"--{tool}" for tool, _ in given) + ": one at a time")
    return given[0] if given else None
