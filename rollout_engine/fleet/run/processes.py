"""Replicas that are processes of this machine."""

import logging
import os
import platform
import threading
from functools import partial
from typing import Any

import msgspec

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, LifecycleError
from rollout_engine.process.core_launcher import CoreProcess
from rollout_engine.process.process_client import HANG_SECONDS, START_SECONDS, ProcessClient

logger = logging.getLogger("rollout_engine")

_MAX_PER_PROCESSOR = 4
"""Replicas for each processor, each a process with a model of its own."""


class ProcessReplica:
    """A core in a process of its own, which ends with this one."""

    def __init__(self, client: ProcessClient) -> None:
        self.client, self.node = client, platform.node()

    def near(self, store: str, seconds: float) -> str:
        """The same path: it is on the same machine."""
        return store

    def end(self, *, kill: bool = False) -> None:
        """End the core."""
        self.client.shutdown()


class ProcessProvider:
    """Starts cores on this machine. `hang_seconds` and `start_seconds` as for `AsyncLLM.from_config`."""

    def __init__(self, *, hang_seconds: float = HANG_SECONDS, start_seconds: float = START_SECONDS) -> None:
        self._hang_seconds, self._start_seconds = hang_seconds, start_seconds
        self._loading: dict[int, CoreProcess] = {}
        """Replica -> its process, while that loads the model."""
        self._is_closed = False
        self._loading_lock = threading.Lock()

    def share(self, config: EngineConfig, num_replicas: int) -> EngineConfig:
        """The configuration of each of `num_replicas`: its share of the processors, unless `config` sets its own."""
        return with_threads(config, len(os.sched_getaffinity(0)) // num_replicas)

    def check(self, num_more: int, config: EngineConfig, num_present: int = 0) -> None:
        """Raise `ConfigError` for far more replicas than processors, and log a warning for some more."""
        num_processors, num_replicas = len(os.sched_getaffinity(0)), num_present + num_more
        what = f"num_replicas={num_replicas} is more than the {num_processors} processors of this machine"
        if num_replicas > num_processors * _MAX_PER_PROCESSOR:
            raise ConfigError(
                f"{what} carry: at most {_MAX_PER_PROCESSOR} replicas on each are started. Ask for fewer, or spread "
                "them over a cluster (placement='ray')."
            )
        if num_replicas > num_processors:
            logger.warning("%s: they take turns on them, and each step takes longer", what)

    def start(self, index: int, config: EngineConfig) -> ProcessReplica:
        """Start a core and wait until its model is loaded."""
        return self._start(index, config)

    def close(self) -> None:
        """Start nothing more, and kill the cores that load their models: their `start` raises."""
        with self._loading_lock:
            self._is_closed = True
            loading = list(self._loading.values())
        for process in loading:
            process.kill()

    def shutdown(self) -> None:
        """Do nothing: all that there is belongs to replicas."""

    def _start(self, index: int, config: EngineConfig, **options: Any) -> ProcessReplica:
        options |= dict(hang_seconds=self._hang_seconds, start_seconds=self._start_seconds)
        try:
            return ProcessReplica(ProcessClient.start(config, on_process=partial(self._add_loading, index), **options))
        finally:
            with self._loading_lock:
                self._loading.pop(index, None)

    def _add_loading(self, index: int, process: CoreProcess) -> None:
        """Have `close` kill this process. Raises `LifecycleError` after `close`."""
        with self._loading_lock:
            if self._is_closed:
                raise LifecycleError("start: the fleet is being closed. Make a new one.")
            self._loading[index] = process


def with_threads(config: EngineConfig, num_threads: int) -> EngineConfig:
    """The configuration of a replica that computes on `num_threads`, at least one, unless it sets its own."""
    if config.num_threads is not None:
        return config
    return msgspec.structs.replace(config, num_threads=max(num_threads, 1))
