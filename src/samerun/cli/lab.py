"""`samerun lab`: equal current values hide different continuations, to try out in a browser."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="lab")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the page to this file and stop.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Where to serve it.  [default: a free port]")
@click.option("--no-open", is_flag=True, help="Print the address, open no browser.")
def command(output: Path | None, port: int, no_open: bool) -> None:
    """Open the optimization lab: one weight on a parabola, step by step.

    Two runs meet at the same value and part at the next update; momentum, Adam,
    a schedule and the order of samples do the same. Each is linked to the check
    that tells the runs apart. The page is served to this machine only, until
    Ctrl-C, and fetches nothing.

    \b
    samerun lab
    samerun lab --no-open --port 8765
    samerun lab -o lab.html
    """
    from samerun.web.lab.page import render_lab

    page = render_lab()
    if output is not None:
        from samerun.stores.local import write_atomic

        write_atomic(output, page)
        click.echo(output)
        return
    from samerun.web.serve import PageServer

    def listening(address: str) -> None:
        click.echo(address)
        click.echo("Ctrl-C ends it", err=True)
        if not no_open:
            import webbrowser

            webbrowser.open(address)

    PageServer(page, port).serve_until_interrupted(listening)
