"""The client of a core that runs in another process."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError, LifecycleError, RequestError, RPCError
from rollout_engine.base.messages import EngineCoreRequest, UpdateOptions
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.children.values import pack
from rollout_engine.engine.calls import CallFuture
from rollout_engine.engine.client import ANYWHERE, EngineInfo, Listener, Route
from rollout_engine.engine.verb import Verb
from rollout_engine.engine.verbs import VERBS
from rollout_engine.execution.group_executor import GroupSettings
from rollout_engine.process.client_routing import slices
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_launcher import CoreProcess
from rollout_engine.process.keys import Keys
from rollout_engine.process.request_columns import with_columns
from rollout_engine.process.weight_client import WeightClient
from rollout_engine.process.weight_server import WEIGHT_VERBS
from rollout_engine.process.wire import Abort, Draining, Outputs, Refused
from sync.base import WeightSource

logger = logging.getLogger("rollout_engine")

HANG_SECONDS = 4.5
"""How long a core's process may give no sign of life before it is killed: its callers get an error within 5 s."""
START_SECONDS = 600.0
"""How long a core may take to load its model."""
HEARTBEAT_SECONDS = 0.5
MAX_BACKLOG_BYTES = 64 << 20
"""Bytes that may wait for a client that does not read before the core cuts it off."""
_MAX_ABORTED = 1000
"""Sequence ids in one message."""
_CALL_BYTES, _ARRAY_BYTES = 256, 32
"""Most bytes of a call's other fields, and of an array's place in it or its padding."""


class ProcessClient:
    """An `EngineClient` over a socket. Outputs are delivered on the socket's thread."""

    needs_turns = False

    def __init__(self, socket: ClientSocket) -> None:
        self._socket = socket
        ready = socket.wait_welcome()
        self.pid = ready.pid
        """Process id of the core, on its machine."""
        self.config_digest = ready.config_digest
        """A digest of the core's configuration, equal for cores that were started with the same one."""
        self.info: EngineInfo = ready.info
        self._listener: Listener | None = None
        self.on_draining: Callable[[EngineDeadError], None] = lambda error: None
        """Called on the socket's thread with `ending`'s error when the core begins to end."""
        self._weights = WeightClient(self)
        socket.listen(self._take, self._die)

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        hang_seconds: float = HANG_SECONDS,
        start_seconds: float = START_SECONDS,
        group: GroupSettings | None = None,
        on_process: Callable[[CoreProcess], object] = lambda process: None,
    ) -> Self:
        """Start a core, which ends with this client. `meanwhile` is called while the core loads the model.

        `hang_seconds`: a core that gives no sign of life for this long is killed. `start_seconds`: how long loading may
        take. `group`: its place among the engines that divide experts. `on_process` is called with the process that
        loads: any thread may kill it. Raises `ConfigError`, `EngineDeadError`.
        """
        options: Any = dict(heartbeat_seconds=HEARTBEAT_SECONDS, max_backlog_bytes=MAX_BACKLOG_BYTES)
        process = CoreProcess(config, **options, group=group)
        try:
            on_process(process)
            meanwhile()
            process.wait_ready(start_seconds)
            client = cls(ClientSocket.start(process, hang_seconds=hang_seconds))
        except BaseException:
            process.end(kill=True)
            raise
        logger.info("%s, core process %d", client.info.choices, process.pid)
        return client

    @classmethod
    def connect(cls, address: str, *, keys: Keys | None = None, hang_seconds: float = HANG_SECONDS) -> Self:
        """Connect to a core that was started elsewhere: by its directory, or with its `keys` at "tcp://HOST:PORT".

        Raises `EngineDeadError`, and `ConfigError` for an address that does not go with the keys.
        """
        return cls(ClientSocket.connect(address, keys=keys, hang_seconds=hang_seconds))

    @property
    def index(self) -> int:
        """Which client of its core this is, from 0."""
        return self._socket.client_index

    @property
    def policy_version(self) -> int:
        """Version of the live weights and adapters, as last received: before tokens sampled under it."""
        return self._socket.policy_version

    @property
    def address(self) -> str:
        """Directory of the core, to which other clients connect, or the TCP address to which this one did."""
        return self._socket.address

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is gone; None while it lives."""
        return self._socket.dead_error

    @property
    def ending(self) -> EngineDeadError | None:
        """Why the core is gone, or takes no more requests because it is about to end; None while it takes them."""
        if self.dead_error is not None or not self._socket.draining:
            return self.dead_error
        return EngineDeadError(f"The engine's core is about to end: {self._socket.draining}.")

    def listen(self, listener: Listener) -> None:
        """Set the listener for outputs. Call it before the first request is added."""
        self._listener = listener

    def add_request(self, request: EngineCoreRequest, route: Route = ANYWHERE) -> None:
        """Queue a request. If the core refuses it, the listener gets the error. Raises `EngineDeadError`."""
        self.require_usable()
        self._socket.send(with_columns(request))

    def abort(self, sequence_ids: list[int]) -> None:
        """End sequences; no-op if the core is gone."""
        with suppress(EngineDeadError):
            for start in range(0, len(sequence_ids), _MAX_ABORTED):
                self._socket.send(Abort(sequence_ids[start : start + _MAX_ABORTED]))

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallFuture:
        """Call a verb; the future gives its result, or raises its error.

        Raises, before a byte is sent, `RequestError` or `RPCError` for arguments that cannot cross.
        """
        verb = VERBS.get(name) or WEIGHT_VERBS[name]
        if not verb.crosses:
            self.require_usable()
            advice = "call a method of a worker extension by its name, or use an engine in this process"
            raise LifecycleError(f"{verb.public_name or name}: functions do not cross processes; {advice}.")
        try:
            packed = pack(dict(arguments))
            struct_bytes = len(packed.body) + len(name) + _CALL_BYTES + _ARRAY_BYTES * len(packed.arrays)
            message_bytes = struct_bytes + sum(array.nbytes + _ARRAY_BYTES for array in packed.arrays)
            self._socket.limits.check_sizes(struct_bytes, message_bytes, 1 + len(packed.arrays))
        except (TypeError, ValueError, OverflowError) as problem:
            raise _unsendable(verb, arguments, problem) from None
        seconds = verb.seconds(arguments)
        deadline = None if seconds is None else time.monotonic() + seconds
        return self._socket.call(name, packed, verb.result, deadline=deadline, title=verb.title(arguments))

    def update_weights(self, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
        """Carry out one whole weight update. Blocks."""
        self.require_usable()
        return self._weights.push_to_core(source, version, options)

    def stage_weights(self, path: str, version: int | None, options: UpdateOptions) -> tuple[int, str]:
        """Have the core stage weights that it reads at an absolute path, and hold it; returns version and digest.

        It is dropped after `options.timeout` without `commit_weights`. Blocks; raises as `update_weights`.
        """
        self.require_usable()
        return self._weights.stage(path, version, options)

    def commit_weights(self, timeout: float) -> UpdateReport:
        """Have the core commit the staged weights. Blocks; raises as `update_weights`."""
        self.require_usable()
        return self._weights.commit(timeout)

    def drop_staged_weights(self) -> UpdateReport | None:
        """Have the core drop the staged weights. Blocks; no-op if it is gone.

        Returns the report of its last update if that was committed. Raises `TransferTimeoutError` if that is unknown.
        """
        with suppress(EngineDeadError):
            return self._weights.drop()
        return None

    def turn(self, has_news: Callable[[], bool]) -> bool:
        """Return False: steps are computed in the core's process."""
        self._socket.require_own_process()
        return False

    def require_usable(self) -> None:
        """Raise `LifecycleError` in a forked child, `EngineDeadError` if the core is gone."""
        self._socket.require_own_process()
        if self.dead_error is not None:
            raise EngineDeadError(*self.dead_error.args)

    def shutdown(self) -> None:
        """Leave the core, or end it if it is this client's. Calls in flight raise `EngineDeadError`."""
        self._socket.close()
        self._weights.close()

    def _take(self, message: Outputs | Refused | Draining) -> None:
        if isinstance(message, Draining):
            assert self.ending is not None
            self.on_draining(self.ending)
            return
        assert self._listener is not None, "a listener is set before requests are added"
        if isinstance(message, Refused):
            self._listener.refuse(message.first_sequence_id, message.failure.as_error())
            return
        for outputs in message.steps:
            for part in slices(outputs):
                self._listener.deliver(part)

    def _die(self, error: EngineDeadError) -> None:
        if self._listener is not None:
            self._listener.fail_all(error)


def _unsendable(verb: Verb, arguments: Mapping[str, Any], problem: Exception) -> Exception:
    title = verb.title(arguments)
    if verb.name == "collective_rpc":
        return RPCError(f"collective_rpc: {title}: {problem}.", method=str(title)[:80])
    return RequestError(f"{title}: an argument cannot be sent to the engine's process: {problem}.", field="arguments")
