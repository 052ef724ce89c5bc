"""The Ray actor on a replica's node, which starts the core there and holds it until it ends.

    driver   RemoteCore.start      ── CoreOrder ───────────> actor   ReplicaActor.start
                                   <── CorePlace | Failure ──
             RemoteCore.heartbeat  <── Beat ───────────────          in the concurrency group "heartbeat"
             RemoteCore.end        ── kill ────────────────>         in the concurrency group "control"

All of it is bytes of msgpack: Ray pickles no object of ours. The core ends with its actor, which holds its lifeline.
This module loads no model code: the actor's process is not its core's.
"""

import logging
import sys
import threading
from typing import TypeVar

import msgspec

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, EngineDeadError
from rollout_engine.children.failure import failure_of
from rollout_engine.cluster.ray_answers import SAME_VERSION
from rollout_engine.cluster.ray_cluster import import_ray
from rollout_engine.process.core_launcher import CoreProcess
from rollout_engine.process.keys import Keys
from rollout_engine.process.wire import PROTOCOL

logger = logging.getLogger("rollout_engine")

ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""Environment of an actor's process. Ray would kill the children of an actor that ends, and with them the guard,
which has to remove the core's files."""


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of orders to actors."""

    protocol: int


_Order = TypeVar("_Order", bound=Order)


class CoreOrder(Order, frozen=True, kw_only=True, tag="core", forbid_unknown_fields=True):
    """Order to an actor: the core that it is to start."""

    config: EngineConfig
    import_path: list[str]
    """`sys.path` of the driver, on which the user's modules are found."""
    log_level: int
    heartbeat_seconds: float
    max_backlog_bytes: int
    start_seconds: float
    driver_node_id: str
    """Ray's id of the driver's node. A core on another one listens on TCP, for clients that have the keys."""
    keys: Keys


class CorePlace(msgspec.Struct, frozen=True, kw_only=True, tag="place", forbid_unknown_fields=True):
    """The place of a core that is ready: its directory, address, process and node."""

    directory: str
    address: str
    """Its address on TCP; "": it has none, since the driver is on its node."""
    pid: int
    node_id: str
    """Ray's id of its node."""


class Beat(msgspec.Struct, frozen=True, tag="beat", forbid_unknown_fields=True):
    """A sign of life of an actor."""

    status: int | None
    """Exit status of its core; None: it runs, or is not started yet."""


class ReplicaActor:
    """The actor of one replica: it starts a core on its node and holds it until it ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: CoreProcess | None = None
        self._place: CorePlace | None = None
        self._is_ready = self._is_ended = False

    def start(self, order: bytes) -> bytes:
        """Start the core; return once it is ready. An error is returned as a `Failure`.

        A driver that has lost the answer may call it again: an actor starts one core.
        """
        try:
            return msgspec.msgpack.encode(self._start(read_order(order, CoreOrder)))
        except Exception as error:
            return msgspec.msgpack.encode(failure_of(error))

    def heartbeat(self) -> bytes:
        """Report that this actor lives, and whether its core does."""
        process = self._process
        return msgspec.msgpack.encode(Beat(None if process is None else process.wait(0)))

    def end(self, kill: bool) -> None:
        """End the core and wait for its process. A later `start` is refused."""
        with self._lock:
            self._is_ended, process = True, self._process
        if process is not None:
            process.end(kill=kill or not self._is_ready)

    def _start(self, order: CoreOrder) -> CorePlace:
        logger.setLevel(order.log_level)
        sys.path.extend(entry for entry in order.import_path if entry not in sys.path)
        ray = import_ray()
        if self._place is not None:
            return self._place
        node_id = ray.get_runtime_context().get_node_id()
        is_far = node_id != order.driver_node_id
        with self._lock:
            if self._is_ended:
                raise EngineDeadError("The replica was ended before it started.")
            self._process = CoreProcess(
                order.config,
                heartbeat_seconds=order.heartbeat_seconds,
                max_backlog_bytes=order.max_backlog_bytes,
                listen=_any_port(ray.util.get_node_ip_address()) if is_far else "",
                keys=order.keys if is_far else None,
            )
        ready = self._process.wait_ready(order.start_seconds)
        self._is_ready = True
        directory = self._process.directory
        self._place = CorePlace(directory=directory, address=ready.address, pid=ready.pid, node_id=node_id)
        return self._place


def _any_port(ip_address: str) -> str:
    host = f"[{ip_address}]" if ":" in ip_address else ip_address
    return f"tcp://{host}:0"


def read_order(order: bytes, kind: type[_Order]) -> _Order:
    """Decode an order to an actor. Raises `ConfigError` for that of a driver of another version."""
    try:
        read = msgspec.msgpack.decode(order, type=kind)
    except msgspec.MsgspecError as problem:
        raise ConfigError(f"The replica's node cannot read its orders ({problem}): {SAME_VERSION}") from None
    if (sent := read.protocol) != PROTOCOL:
        raise ConfigError(f"Protocol {PROTOCOL} on the replica's node, {sent} here: {SAME_VERSION}")
    return read
