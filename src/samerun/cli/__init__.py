"""The command line: one module per verb, loaded only when that verb is used."""

from __future__ import annotations

import gc
import importlib
import sys
from typing import TYPE_CHECKING

import click

from samerun import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

# Each verb is `command` in `samerun.cli.<module>`; the text is what `samerun --help` shows without importing it.
VERBS: dict[str, tuple[str, str]] = {
    "inspect": ("inspect", "What is in a checkpoint; is it complete; can it resume?"),
    "digest": ("digest", "Layout-independent digest of every tensor."),
    "diff": ("diff", "Compare two checkpoints as logical state."),
    "batch": ("batch", "Every honest way to deal a global batch to N replicas."),
    "convert": ("convert", "Reshard or convert a checkpoint; proved equal."),
    "memory": ("memory", "Memory per destination rank, and on the host."),
    "draft": ("draft", "Write a migration manifest from a checkpoint."),
    "plan": ("plan", "Turn a manifest into a plan; list open decisions."),
    "calibrate": ("calibrate", "Measure how much the run varies by itself."),
    "run": ("run", "Run the migration's checks, cheapest first."),
    "judge": ("judge", "Promote, reject or abstain, with the reasons."),
    "report": ("report", "One self-contained HTML page with the pictures."),
    "trace": ("trace", "Check and summarise what a job recorded."),
    "audit": ("audit", "Samples replayed, omitted or shared, over all starts."),
    "ui": ("ui", "Look at checkpoints and runs in a browser."),
    "explain": ("explain", "What a finding means and what to do about it."),
    "lab": ("lab", "Equal values, different continuations: try it in a browser."),
    "demo": ("demo", "All of the above on a small real run, on CPU."),
}


EXAMPLES = (
    "samerun inspect ckpt/step-400",
    "samerun draft ckpt/step-400 --to dp_shard=3 -o move.yaml",
    "samerun run move.yaml",
)
EXIT_CODES = {
    0: "clean, equal, promote",
    1: "findings that block, different, reject",
    2: "usage error, or input that cannot be read",
    3: "interrupted; the same command goes on",
    4: "abstain: evidence is missing, or the control is too noisy",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        from samerun.cli.help import Verb

        module = importlib.import_module(f"samerun.cli.{VERBS[cmd_name][0]}")
        return Verb.of(module.command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(args[0], VERBS, n=1)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"there is no verb {args[0]!r}.{guess} Verbs: {', '.join(VERBS)}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes verbs without loading any of them."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(verb, help=text) for verb, (_, text) in VERBS.items() if verb.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])
        with formatter.section("Examples"):
            formatter.write_text("\b\n" + "\n".join(EXAMPLES))
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in EXIT_CODES.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(__version__, prog_name="samerun")
def root() -> None:
    """Move a training run onto another GPU count or parallel layout, and prove that it is still the same run.

    Each verb has its own help with examples: samerun VERB --help. Results go to stdout, progress and logs to stderr;
    --json prints one JSON document. Nothing from a checkpoint is executed, and nothing is ever written to one.
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits. The only place where an unexpected exception becomes a message."""
    from samerun.cli.output import report_failure

    gc.set_threshold(100_000, 20, 100)  # metadata is many small objects without cycles: looking for them costs a third
    try:
        code = root.main(args=list(argv) if argv is not None else None, prog_name="samerun", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        code = report_failure(error)
    sys.exit(code if isinstance(code, int) else 0)
