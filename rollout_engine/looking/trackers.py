"""Trackers that take the statistics of steps: TensorBoard, Weights & Biases, trackio and MLflow, each by its package.

None of them is loaded before it is made. By default all keep their data on this machine.
"""

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rollout_engine.base.errors import ConfigError, unknown_name


class Tracker(Protocol):
    """Takes numbers of steps. Any object with these two methods will do."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Called once a step, with finite numbers and others."""

    def close(self) -> None:
        """Called when the training ends."""


class TensorBoard:
    """Writes event files for TensorBoard: `tensorboard --logdir DIR`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        _package("tensorboard")
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(os.fspath(directory))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Logs to a run of Weights & Biases, without a network unless `mode="online"`.

    `wandb sync DIR/wandb/offline-run-*` sends it later. `options`: arguments of `wandb.init`.
    """

    def __init__(self, directory: str | os.PathLike[str], *, mode: str = "offline", **options: Any) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        given = {"project": "rollout-engine", "name": Path(directory).resolve().name} | options
        self._run: Any = _package("wandb").init(dir=os.fspath(directory), mode=mode, **given)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Logs to a run of trackio, which is kept in the directory of the environment variable TRACKIO_DIR: `trackio show`.

    `options`: arguments of `trackio.init`.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        given = {"project": "rollout-engine", "name": Path(directory).resolve().name, "embed": False} | options
        self._run: Any = _package("trackio").init(**given)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Logs to a run of MLflow, by default into a file of this directory.

    `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db` shows it. `tracking_uri`: another store, as of a server.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        tracking_uri: str | None = None,
        experiment: str = "rollout-engine",
    ) -> None:
        mlflow = _package("mlflow")
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._mlflow: Any = mlflow
        self._client: Any = mlflow.MlflowClient(tracking_uri or f"sqlite:///{Path(directory).resolve()}/mlflow.db")
        found = self._client.get_experiment_by_name(experiment)
        place = (Path(directory).resolve() / "mlartifacts").as_uri()
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment, place)
        self._run_id: str = self._client.create_run(experiment_id, run_name=Path(directory).resolve().name).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


TRACKERS: dict[str, type[TensorBoard] | type[WandB] | type[Trackio] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}
"""Name -> class, which takes the directory of the run."""


def as_tracker(given: str | Tracker, directory: str | os.PathLike[str]) -> Tracker:
    """A tracker by its name, or the one that is given.

    Raises `ConfigError` for an unknown name, a package that is not installed, and an object that is no tracker.
    """
    if isinstance(given, str):
        if given not in TRACKERS:
            raise ConfigError(unknown_name("tracker", given, TRACKERS))
        return TRACKERS[given](directory)
    missing = [name for name in ("log", "close") if not callable(getattr(given, name, None))]
    if missing:
        raise ConfigError(f"tracker {given!r:.80} has no method {', '.join(missing)}: see tracking.trackers.Tracker.")
    return given


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name != name:
            raise
        raise ConfigError(f"The tracker '{name}' needs the package {name}: pip install {name}.") from None
