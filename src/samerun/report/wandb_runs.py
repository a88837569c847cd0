"""Curves as offline runs of Weights & Biases, which `wandb sync` sends. Needs the package `wandb`."""
# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path

from samerun.report.curves import Curves, environment, series


def write(curves: Curves, folder: Path, final: Path, began: float) -> list[Path]:
    """Writes the runs, and returns each one's place in `folder`. What W&B notes about a machine is left out."""
    with environment(WANDB_ERROR_REPORTING="false", WANDB_SILENT="true"):
        import wandb

        settings = wandb.Settings(
            console="off", disable_code=True, disable_git=True, silent=True,
            x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        for name, updates in curves.items():
            (folder / name).mkdir()
            run = wandb.init(mode="offline", project="samerun", name=name, dir=folder / name, settings=settings)
            for item in updates:
                run.log(dict(series(item)), step=item.update)
            run.finish()
        wandb.teardown()
    return [Path(name) for name in curves]
