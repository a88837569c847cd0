"""`samerun ui`: checkpoints and run directories in a browser."""

from __future__ import annotations

import click

from samerun.errors import Problem, UsageError


@click.command(name="ui")
@click.argument("path", nargs=-1)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Where to serve it.  [default: a free port]")
@click.option("--no-open", is_flag=True, help="Print the address, open no browser.")
def command(path: tuple[str, ...], port: int, no_open: bool) -> None:
    """Look at checkpoints and run directories in a browser.

    PATH is a checkpoint, a run directory, or a folder with several of either;
    the current folder by default. A checkpoint shows its verdict, its tensors
    as tree, table and sizes, who holds which part of each, gaps where they
    are, and the spread of values; two are compared; a run that goes on is
    followed. The page is served to this machine only, under an address with a
    secret in it, until Ctrl-C. Nothing is written, nothing else is readable.

    \b
    samerun ui ckpt/
    samerun ui ckpt/step-100 moved/step-100
    samerun ui move.run --no-open --port 8765
    """
    try:
        from samerun.web.explorer.server import ExplorerServer
    except ImportError as error:
        raise UsageError(_missing(error.name or str(error))) from error

    server = ExplorerServer(path or (".",), port)
    click.echo(server.address)
    click.echo("Ctrl-C ends it", err=True)
    if not no_open:
        import webbrowser

        webbrowser.open(server.address)
    server.serve()


def _missing(name: str) -> Problem:
    return Problem(
        "SR-UI-EXTRA",
        f"the explorer needs {name}, which is not installed",
        hint="pip install samerun[ui]",
    )
