"""The Ray actor on the node of a rank, which starts the rank's process and holds it until it ends.

    rank 0   start     ── RankOrder ──> actor ── process, which connects to rank 0
                       <── RankPlace ──
             wait_end  <── status ────        in the concurrency group "end"
             end       ──────────────>        in the concurrency group "control"

All of it is bytes of msgpack: Ray pickles no object of ours. This module loads no model code.
"""

import sys
import threading
from functools import partial

import msgspec

from rollout_engine.children.child import Child
from rollout_engine.children.process import environment_with_package, start_module


class RankOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process that an actor is to start."""

    module: str
    arguments: list[str]
    variables: dict[str, str]
    """Variables of the process, in addition to those of the actor."""
    import_path: list[str]
    """`sys.path` of rank 0, on which the user's modules are found."""


class RankPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a process that has begun."""

    pid: int
    node_id: str
    """Ray's id of its node."""


class RankActor:
    """The actor of one rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._has_begun = threading.Event()

    def start(self, order: bytes) -> bytes:
        """Start the process, and return as it begins. A caller that has lost the answer may call it again."""
        import ray

        given = msgspec.msgpack.decode(order, type=RankOrder)
        sys.path.extend(entry for entry in given.import_path if entry not in sys.path)
        with self._lock:
            if self._child is None:
                variables = environment_with_package() | given.variables
                start = partial(start_module, given.module, given.arguments, environment=variables)
                self._child = Child(lambda ends: start(descriptors=ends), num_channels=0)  # it connects to rank 0
                self._has_begun.set()
        place = RankPlace(self._child.pid, ray.get_runtime_context().get_node_id())
        return msgspec.msgpack.encode(place)

    def wait_end(self) -> bytes:
        """The exit status of the process, once it has ended."""
        self._has_begun.wait()
        assert self._child is not None, "it has begun"
        return msgspec.msgpack.encode(self._child.wait(None))

    def end(self) -> None:
        """Wait for the end of the process, whose rank 0 has left it; kill it if that takes long."""
        if self._child is not None:
            self._child.end()
