"""Replicas that were started elsewhere: cores on this machine or on others, which a fleet joins and leaves."""

import threading
import time
from collections.abc import Sequence

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, EngineDeadError, WeightUpdateError, refused
from rollout_engine.process.keys import Keys
from rollout_engine.process.process_client import START_SECONDS, ProcessClient
from rollout_engine.process.tcp_address import is_tcp

_LOOK_SECONDS = 0.5
"""How long after a core was not found it is looked for again."""


class ConnectedReplica:
    """A connection to a core that others own."""

    def __init__(self, client: ProcessClient, address: str, provider: "ConnectedProvider") -> None:
        self.client, self.node = client, address
        self._provider = provider

    def near(self, store: str, seconds: float) -> str:
        """The same path, for a core of this machine."""
        if not is_tcp(self.node):
            return store
        what = f"update_weights: the core at {self.node} cannot read what is published in this machine's memory"
        advice = "write the weights where every core can read them, by sync.publish(directory, source, version)"
        raise WeightUpdateError(f"{what}: {advice}, and give that directory.")

    def end(self, *, kill: bool = False) -> None:
        """Leave the core to its owner."""
        self.client.shutdown()
        self._provider.release(self.node)


class ConnectedProvider:
    """Connections to cores at given addresses, all of one configuration.

    A core that is gone is looked for at its address, for as long as a core may take to start.
    """

    def __init__(self, addresses: Sequence[str], *, keys: Keys | None, hang_seconds: float) -> None:
        """`addresses`: as for `ProcessClient.connect`. Raises `ConfigError` unless they are some, each once."""
        known = isinstance(addresses, Sequence) and all(isinstance(address, str) for address in addresses)
        if not known or not addresses or len(set(addresses)) < len(addresses):
            raise ConfigError(refused("address", addresses, "an address, or a list of some, each once"))
        self._free, self._num_cores = list(addresses), len(addresses)
        self._keys, self._hang_seconds = keys, hang_seconds
        self._lock = threading.Lock()
        self._config_digest = ""
        self._met: set[str] = set()
        """Addresses of cores that have been replicas."""
        self._closing = threading.Event()

    @property
    def num_cores(self) -> int:
        """How many addresses there are."""
        return self._num_cores

    def read_config(self) -> EngineConfig:
        """Read the configuration of the core at the first address. Raises as `ProcessClient.connect`."""
        client = self._connect(self._free[0])
        self._config_digest = client.config_digest
        client.shutdown()
        return client.info.config

    def share(self, config: EngineConfig, num_replicas: int) -> EngineConfig:
        """The configuration as it is: the cores run already."""
        return config

    def check(self, num_more: int, config: EngineConfig, num_present: int = 0) -> None:
        """Raise `ConfigError` for more replicas than there are addresses left."""
        if num_more > len(self._free):
            what = f"{num_more} more replicas were asked for, and {len(self._free)} of the {self._num_cores} cores"
            raise ConfigError(f"{what} that were connected are free: start more cores, and connect to all of them.")

    def start(self, index: int, config: EngineConfig) -> ConnectedReplica:
        """Connect to a core that the fleet does not use. Raises `ConfigError` for one of another configuration."""
        with self._lock:
            if not self._free:
                raise EngineDeadError("Every core that was connected is in use.")
            address = self._free.pop(0)
        try:
            client = self._connect_again(address) if address in self._met else self._connect(address)
            self._met.add(address)
            if client.config_digest != self._config_digest:
                client.shutdown()
                both = f"configuration {client.config_digest}, the first core has {self._config_digest}"
                advice = "start all cores of a fleet with the same model and options"
                raise ConfigError(f"The core at {address} has {both}: {advice}.")
        except BaseException:
            self.release(address)
            raise
        return ConnectedReplica(client, address, self)

    def release(self, address: str) -> None:
        """Let another replica use a core. Calling it again is a no-op."""
        with self._lock:
            if address not in self._free:
                self._free.append(address)

    def close(self) -> None:
        """Stop looking for cores."""
        self._closing.set()

    def shutdown(self) -> None:
        """Do nothing: the cores belong to others."""

    def _connect_again(self, address: str) -> ProcessClient:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return self._connect(address)
            except EngineDeadError:
                if time.monotonic() > deadline or self._closing.wait(_LOOK_SECONDS):
                    raise

    def _connect(self, address: str) -> ProcessClient:
        return ProcessClient.connect(address, keys=self._keys, hang_seconds=self._hang_seconds)
