"""The seam through which a fleet gets its replicas: processes of this machine, or actors of a Ray cluster."""

from typing import Protocol

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, refused
from rollout_engine.process.process_client import ProcessClient


def check_count(num_replicas: object) -> None:
    """Raise `ConfigError` for a value that is no number of replicas."""
    if type(num_replicas) is not int or num_replicas < 1:
        raise ConfigError(refused("num_replicas", num_replicas, "an int, at least 1"))


class Replica(Protocol):
    """One engine that a provider has started."""

    @property
    def client(self) -> ProcessClient:
        """The fleet's client for this replica."""
        ...

    @property
    def node(self) -> str:
        """Name of the machine or cluster node that it runs on."""
        ...

    def near(self, store: str, seconds: float) -> str:
        """Path at which the replica can read the current version in a published store of this machine.

        Raises `WeightUpdateError`, `EngineDeadError` or `RetryableError` if it is not there within `seconds`.
        """
        ...

    def end(self, *, kill: bool = False) -> None:
        """Leave the engine and end it; calling it again is a no-op. `kill`: do not let its requests end first."""


class Provider(Protocol):
    """A source of replicas: it checks that there is room for them, and starts them."""

    def share(self, config: EngineConfig, num_replicas: int) -> EngineConfig:
        """The configuration of each of `num_replicas`: its share of the processors, unless `config` sets its own."""
        ...

    def check(self, num_more: int, config: EngineConfig, num_present: int = 0) -> None:
        """Raise `ConfigError` if there is no room for `num_more` replicas in addition to `num_present`.

        The error names the number asked for, the number that fits, and the nodes. The rule is the same when scaled.
        """

    def start(self, index: int, config: EngineConfig) -> Replica:
        """Start the replica of that index. Returns once its model is loaded; several threads may call it at once.

        Raises `ConfigError`, `EngineDeadError`, `RetryableError`.
        """
        ...

    def close(self) -> None:
        """Start nothing more, and end the replicas that are starting: their `start` raises."""

    def shutdown(self) -> None:
        """Release all that is not a replica's own."""
