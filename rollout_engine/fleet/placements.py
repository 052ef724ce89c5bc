"""Where the replicas of a fleet run: by name, `placement="processes"` or `placement="ray"`, or by address."""

from collections.abc import Callable, Sequence

from rollout_engine.config import EngineConfig
from rollout_engine.engine.client import EngineClient
from rollout_engine.errors import ConfigError, unknown_name
from rollout_engine.fleet.balancer import Balancer
from rollout_engine.fleet.client import FleetClient
from rollout_engine.fleet.connected import ConnectedProvider
from rollout_engine.fleet.processes import ProcessProvider
from rollout_engine.fleet.provider import Provider, check_count
from rollout_engine.fleet.ray_provider import RayProvider
from rollout_engine.process.keys import Keys
from rollout_engine.process.process_client import ProcessClient

PLACEMENTS = ("processes", "ray")
"""Processes of this machine, or actors of a Ray cluster."""


def make_provider(placement: str, ray_address: str | None = None) -> Provider:
    """Make the provider of that name. `ray_address`: as `RayProvider`'s `address`.

    Raises `ConfigError` for a name that is unknown, an address that is not for it, and where no Ray cluster answers.
    """
    if placement not in PLACEMENTS:
        raise ConfigError(unknown_name("placement", str(placement)[:80], PLACEMENTS))
    if placement == "ray":
        return RayProvider(ray_address)
    if ray_address is not None:
        what = f"ray_address={ray_address!r:.80} is given with placement={placement!r}, which uses no Ray cluster"
        raise ConfigError(f"{what}: add placement='ray', or leave the address out.")
    return ProcessProvider()


def start_fleet(
    config: EngineConfig,
    meanwhile: Callable[[], object] = lambda: None,
    *,
    num_replicas: int = 1,
    placement: str = "processes",
    ray_address: str | None = None,
    balancer: Balancer | None = None,
) -> FleetClient:
    """Start a fleet, of one replica too, and wait until all are loaded.

    Raises as `make_provider` and `FleetClient.start`.
    """
    check_count(num_replicas)
    provider = make_provider(placement, ray_address)
    return FleetClient.start(config, meanwhile, num_replicas=num_replicas, provider=provider, balancer=balancer)


def connect_client(address: str | Sequence[str], *, keys: Keys | None, hang_seconds: float) -> EngineClient:
    """Connect to a core that others have started, or to several as a fleet.

    Raises `EngineDeadError`, and `ConfigError` for what is no address and for cores that differ.
    """
    if isinstance(address, str):
        return ProcessClient.connect(address, keys=keys, hang_seconds=hang_seconds)
    provider = ConnectedProvider(address, keys=keys, hang_seconds=hang_seconds)
    return FleetClient.start(provider.read_config(), num_replicas=provider.num_cores, provider=provider)


def start_client(
    config: EngineConfig,
    meanwhile: Callable[[], object] = lambda: None,
    *,
    num_replicas: int = 1,
    placement: str = "processes",
    ray_address: str | None = None,
) -> EngineClient:
    """Start the engines of a face and wait until they are loaded: one in a process of its own, or a fleet.

    On Ray one replica is a fleet too: its core may be on another node, and is started again when it dies. Raises as
    `make_provider` and `FleetClient.start`.
    """
    check_count(num_replicas)
    provider = make_provider(placement, ray_address)
    if num_replicas == 1 and isinstance(provider, ProcessProvider):
        return ProcessClient.start(config, meanwhile)
    return FleetClient.start(config, meanwhile, num_replicas=num_replicas, provider=provider)
