"""The placement of a fleet's replicas: by name, `placement="processes"` or `placement="ray"`, or by address."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, unknown_name
from rollout_engine.engine.client import EngineClient
from rollout_engine.fleet.plan.balancer import Balancer
from rollout_engine.fleet.ray.provider import RayProvider
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.fleet.run.connected import ConnectedProvider
from rollout_engine.fleet.run.processes import ProcessProvider
from rollout_engine.fleet.run.provider import Provider, check_count
from rollout_engine.process.keys import Keys
from rollout_engine.process.process_client import ProcessClient

StartClient: TypeAlias = Callable[[EngineConfig, Callable[[], object]], EngineClient]
"""`start(config, meanwhile)` starts the engines of a config, and calls `meanwhile` as they load."""
StartFleet: TypeAlias = Callable[[EngineConfig, Callable[[], object]], FleetClient]
PLACEMENTS = ("processes", "ray")
"""Processes of this machine, or actors of a Ray cluster."""


def make_provider(placement: str, ray_address: str | None = None) -> Provider:
    """Make the provider of that name. `ray_address`: as `RayProvider`'s `address`.

    Raises `ConfigError` for a name that is unknown, an address that is not for it, and if no Ray cluster answers.
    """
    if placement not in PLACEMENTS:
        raise ConfigError(unknown_name("placement", str(placement)[:80], PLACEMENTS))
    if placement == "ray":
        return RayProvider(ray_address)
    if ray_address is not None:
        what = f"ray_address={ray_address!r:.80} is given with placement={placement!r}, which uses no Ray cluster"
        raise ConfigError(f"{what}: add placement='ray', or leave the address out.")
    return ProcessProvider()


def fleet_starter(
    *,
    num_replicas: int = 1,
    placement: str = "processes",
    ray_address: str | None = None,
    balancer: Balancer | None = None,
) -> StartFleet:
    """A function that starts a fleet, of one replica too, and waits until all are loaded, as `FleetClient.start` does.

    Options that are not allowed raise `ConfigError` here, before any of the model is read. Also as `make_provider`.
    """
    check_count(num_replicas)
    provider = make_provider(placement, ray_address)
    return partial(FleetClient.start, num_replicas=num_replicas, provider=provider, balancer=balancer)


def connect_client(address: str | Sequence[str], *, keys: Keys | None, hang_seconds: float) -> EngineClient:
    """Connect to a core that others have started, or to several as a fleet.

    Raises `EngineDeadError`, and `ConfigError` for a value that is no address and for cores that differ.
    """
    if isinstance(address, str):
        return ProcessClient.connect(address, keys=keys, hang_seconds=hang_seconds)
    provider = ConnectedProvider(address, keys=keys, hang_seconds=hang_seconds)
    return FleetClient.start(provider.read_config(), num_replicas=provider.num_cores, provider=provider)


def client_starter(
    *, num_replicas: int = 1, placement: str = "processes", ray_address: str | None = None
) -> StartClient:
    """A function that starts the engines of a face: one in a process of its own, or a fleet, as `fleet_starter`.

    On Ray one replica is a fleet too: its core may be on another node, and is started again when it dies.
    """
    start = fleet_starter(num_replicas=num_replicas, placement=placement, ray_address=ray_address)
    return partial(_start_one_or_fleet, start) if num_replicas == 1 and placement == "processes" else start


def _start_one_or_fleet(fleet: StartFleet, config: EngineConfig, meanwhile: Callable[[], object]) -> EngineClient:
    """Start one core, or those that divide its experts."""
    return ProcessClient.start(config, meanwhile) if config.data_parallel_size == 1 else fleet(config, meanwhile)
