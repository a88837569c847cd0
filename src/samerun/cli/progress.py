"""A progress bar over bytes, on stderr, and only where somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def bytes_progress(what: str, total_bytes: int) -> Generator[Callable[[str, int], None] | None]:
    """Shows a bar while the block runs; yields the function to call with (key, bytes) as each tensor is done.

    Yields None when stderr is not a terminal, or when there is too little to do for a bar to be of use.
    """
    if not sys.stderr.isatty() or total_bytes < 64 << 20:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from samerun.cli.output import stderr_console

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda key, num_bytes: bar.update(task, advance=num_bytes, description=f"{what} {key}")
