"""Curves as runs of an MLflow file store, one experiment for all. Needs the package `mlflow` or `mlflow-skinny`."""
# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path

from samerun.report.curves import Curves, environment, series

_MOST_METRICS = 1000
"""What MLflow takes in one call."""


def write(curves: Curves, folder: Path, final: Path, began: float) -> list[Path]:
    """Writes the runs, and returns each one's place in `folder`. A value lies as long after `began` as its update.

    MLflow keeps file stores only where it is told to (MLFLOW_ALLOW_FILE_STORE; seen in 3.17), and has telemetry.
    """
    with environment(MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true"):
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        client = MlflowClient(tracking_uri=folder.as_uri())
        experiment = client.create_experiment("samerun", artifact_location=(final / "artifacts").as_uri())
        places: list[Path] = []
        for name, updates in curves.items():
            run = client.create_run(experiment, start_time=round(began * 1000), run_name=name).info.run_id
            when = [round((began + (item.seconds or 0.0)) * 1000) for item in updates]
            metrics = [
                Metric(tag, value, at, item.update)
                for item, at in zip(updates, when, strict=True)
                for tag, value in series(item)
            ]
            for first in range(0, len(metrics), _MOST_METRICS):
                client.log_batch(run, metrics=metrics[first : first + _MOST_METRICS])
            client.set_terminated(run, end_time=when[-1])
            places.append(Path(experiment) / run)
    return places
