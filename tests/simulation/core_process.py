"""A core's process, simulated: its tasks are a group of their own, and clients reach it by a simulated transport."""

import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from rollout_engine.base.messages import EngineCoreOutputs
from rollout_engine.process import background, core_endpoint, core_link, core_proc, core_socket, weight_client
from rollout_engine.process.client_routing import client_of
from rollout_engine.process.core_launcher import address_in
from rollout_engine.process.core_socket import CoreSocket
from rollout_engine.process.inbox import Drain, Stop
from rollout_engine.process.output_batcher import OutputBatcher
from rollout_engine.process.weight_rendezvous import Rendezvous
from rollout_engine.process.wire import PROTOCOL, Outputs, Ready, Reply
from sync.inproc import InprocReceiver, InprocSender
from tests.simulation.engine import SimulatedEngine, Sizes
from tests.simulation.faults import RandomFaults
from tests.simulation.scheduler import Scheduler
from tests.simulation.transport import SimulatedTransport, SimulatedWaker

_HEARTBEAT_SECONDS = 0.5
_END_SECONDS = 5.0


class SimulatedCoreProcess:
    """Runs `EngineCoreProc`, and stands for the parent's handle of its process (`core_launcher.CoreProcess`)."""

    def __init__(
        self,
        scheduler: Scheduler,
        faults: RandomFaults,
        transport: SimulatedTransport,
        sizes: Sizes,
        name: str = "core",
    ) -> None:
        """Returns when it is ready, or has ended. `name`: of its tasks and its directory."""
        self.group, self.directory, self.pid = name, f"simulated-{name}", 1
        self._scheduler, self._transport = scheduler, transport
        self._ended, self._orphaned = SimulatedWaker(scheduler), SimulatedWaker(scheduler)
        self.lifeline = SimpleNamespace(socket=self._ended, close=self._orphaned.wake)
        self.status: int | None = None
        self.reason = "it was killed"
        """Why it ended."""
        self.engine: SimulatedEngine
        self.wire = WireRecord()
        self._io: CoreSocket | None = None
        self._is_told = False
        scheduler.spawn(name, partial(self._run, faults, sizes), self.group)
        scheduler.wait(lambda: self._io is not None or self.status is not None, None, "the start of the core")

    def wait(self, seconds: float) -> int | None:
        """Wait for its end. Returns its status; None: it still runs."""
        self._scheduler.wait(lambda: self.status is not None, self._scheduler.clock.now + seconds, "the core's end")
        return self.status

    def end(self, *, kill: bool = False) -> int | None:
        """End it, as the parent does."""
        if kill:
            self.kill()
        self.lifeline.close()
        if self.wait(_END_SECONDS) is None:
            self.kill()
        return self.status

    def terminate(self) -> None:
        """Send it SIGTERM: its requests end first, unless it is the second."""
        assert self._io is not None
        kind, self._is_told = (Stop if self._is_told else Drain), True
        self._io.inbox.put_first(kind("it received SIGTERM"))

    def keep_stacks(self, *, abort: bool) -> str:
        """What the system wrote of its end: nothing."""
        return ""

    def kill(self) -> None:
        """Send it SIGKILL: its tasks stop where they are, and its connections are cut."""
        if self.status is None:
            self.wire.is_whole = False
            self._scheduler.kill(self.group)
            self._transport.cut_off(address_in(self.directory))
            self._exit(-9)

    def _exit(self, status: int) -> None:
        self.status = status
        self._ended.set()

    def _run(self, faults: RandomFaults, sizes: Sizes) -> None:
        try:
            proc, io = self._made(faults, sizes)
        except Exception as error:
            self.reason = f"it did not start: {type(error).__name__}: {error}"
            self._scheduler.kill(self.group)
            self._exit(1)
            return
        try:
            reason, status = proc.run(), 0
        except Exception as error:
            reason, status = f"it failed: {type(error).__name__}: {error}", 1
        io.close(reason)
        self._scheduler.kill(self.group)  # its other threads end with it
        self._exit(status)

    def _made(self, faults: RandomFaults, sizes: Sizes) -> tuple[Any, CoreSocket]:
        """Start a core and its socket."""
        self.engine = engine = SimulatedEngine(self._scheduler, faults, sizes)
        io = CoreSocket(
            self.directory,
            self._orphaned,  # type: ignore[arg-type]  # all that it does is to poll it
            heartbeat_seconds=_HEARTBEAT_SECONDS,
            max_backlog_bytes=64 << 20,
        )
        self.wire.watch_sends(io, self._scheduler)
        self._watch_close(io)
        proc = core_proc.EngineCoreProc(engine.core, engine.executor, io, self.directory, self._now)
        engine.watch(proc.driver)
        self.wire.watch_outputs(proc.driver, self._scheduler)
        io.start(lambda: self._ready(engine), on_orphaned=self.kill)
        self._io, self.driver = io, proc.driver
        return proc, io

    def _watch_close(self, io: CoreSocket) -> None:
        close = io.close

        def close_watched(reason: str) -> None:
            self.reason = reason
            close(reason)

        io.close = close_watched  # type: ignore[method-assign]

    def _now(self) -> float:
        return self._scheduler.clock.now

    def _ready(self, engine: SimulatedEngine) -> Ready:
        return Ready(
            protocol=PROTOCOL,
            pid=self.pid,
            config_digest="",
            heartbeat_seconds=_HEARTBEAT_SECONDS,
            policy_version=engine.core.policy_version,
            info=engine.worker.info,
        )


class WireRecord:
    """The ends of sequences on their way: what the core has told each client, and what each has heard."""

    def __init__(self) -> None:
        self.is_whole = True
        """Whether the core has not been killed."""
        self.told: dict[int, list[int]] = defaultdict(list)
        self.heard: dict[int, list[int]] = defaultdict(list)
        self._unsent: dict[int, set[int]] = defaultdict(set)
        """Ends that the driver has delivered and the batcher has not sent."""
        self._in_delivery: set[int] = set()
        """Those that a thread beside the busy loop is delivering: the loop may answer another verb meanwhile."""
        self.failure: AssertionError | None = None

    def watch_sends(self, io: CoreSocket, scheduler: Scheduler) -> None:
        """Check that a reply leaves after the outputs of what its verb did."""
        send, loop = io.send, scheduler.current

        def send_watched(client_index: int, message: Any) -> None:
            if isinstance(message, Outputs):
                ends = [end.sequence_id for step in message.steps for end in step.ended]
                self._unsent[client_index].difference_update(ends)
                self.told[client_index] += ends
            elif isinstance(message, Reply) and scheduler.current is loop:
                late = sorted(self._unsent[client_index] - self._in_delivery)
                if late:
                    self.failure = AssertionError(f"the reply to a verb is sent before the ends of {late}")
            send(client_index, message)

        io.send = send_watched  # type: ignore[method-assign]

    def watch_outputs(self, driver: Any, scheduler: Scheduler) -> None:
        """Note the ends that a driver delivers."""
        deliver, loop = driver.deliver, scheduler.current

        def deliver_watched(outputs: EngineCoreOutputs) -> None:
            ends = {end.sequence_id for end in outputs.ended}
            for sequence_id in ends:
                self._unsent[client_of(sequence_id)].add(sequence_id)
            beside = ends if scheduler.current is not loop else set()
            self._in_delivery |= beside
            deliver(outputs)
            self._in_delivery -= beside

        driver.deliver = deliver_watched

    def watch_client(self, frontend: Any) -> None:
        """Note the ends that a client hears."""
        deliver, heard = frontend.streams.deliver, self.heard[frontend.client.index]

        def deliver_watched(outputs: EngineCoreOutputs) -> None:
            heard.extend(end.sequence_id for end in outputs.ended)
            deliver(outputs)

        frontend.streams.deliver = deliver_watched

    def wait(self, scheduler: Scheduler, client_index: int) -> None:
        """Return once a client has heard all that it was told, or some seconds later."""
        told, heard = self.told[client_index], self.heard[client_index]
        scheduler.wait(lambda: len(told) == len(heard), scheduler.clock.now + _END_SECONDS, "the last outputs")

    def check(self, client_index: int, *, is_connected: bool) -> None:
        """AssertionError unless a client has heard all that it was told, once and in order."""
        if self.failure is not None:
            raise self.failure
        told, heard = self.told[client_index], self.heard[client_index]
        assert heard == told[: len(heard)], f"client {client_index} was told of the ends {told} and heard {heard}"
        if self.is_whole and is_connected:
            assert len(heard) == len(told), (
                f"client {client_index} was told of {len(told)} ends, and heard {len(heard)}"
            )


class _NoStrangers:
    """Stands in for `Strangers`: nothing but clients connects here."""

    def __init__(self, *settings: Any) -> None:
        self.socket = self

    def is_readable(self) -> bool:
        return False

    def look(self) -> None: ...
    def greet(self, frame: Any) -> None: ...
    def close(self) -> None: ...


def process_patches(scheduler: Scheduler, faults: RandomFaults) -> list[tuple[Any, str, Any]]:
    """(object, name, what stands there): weights travel in memory, and no directory is made."""
    senders: dict[tuple[str, int], InprocSender] = {}

    def make_sender(rendezvous: Rendezvous) -> InprocSender:
        faults.reach("offer")
        return senders.setdefault((rendezvous.directory, rendezvous.number), InprocSender())

    def make_receiver(rendezvous: Rendezvous) -> InprocReceiver:
        faults.reach("connect")
        return _Receiver(senders[rendezvous.directory, rendezvous.number], faults.reach)

    def make_directory(core: str, client_index: int, metadata: Any) -> tuple[str, int]:
        return f"{core}-{client_index}", os.open(os.devnull, os.O_RDONLY)

    def forget(directory: str, client_index: int | None = None) -> None:
        """There is none."""

    return [
        (Rendezvous, "make_sender", make_sender),
        (Rendezvous, "make_receiver", make_receiver),
        (weight_client, "make_directory", make_directory),
        (weight_client, "remove_directories", forget),
        (core_proc, "remove_directories", forget),
        (background, "_lower_priority", lambda: None),
        (core_socket, "make_token", lambda directory: b""),
        (core_socket, "Strangers", _NoStrangers),
        (core_socket, "Authenticator", partial(_OpenDoor, scheduler)),
        (core_endpoint, "read_token", lambda directory: b""),
        (core_endpoint, "show_token", lambda socket, token: None),
        (core_link, "recv_monitor_message", lambda monitor: monitor.take()),
        (core_proc, "OutputBatcher", partial(OutputBatcher, clock=lambda: scheduler.clock.now)),
    ]


class _OpenDoor:
    """Stands for `authentication.Authenticator`: whoever connects may."""

    def __init__(self, scheduler: Scheduler, context: Any, token: bytes, keys: None) -> None:
        self.socket = SimulatedWaker(scheduler)

    def guard(self, socket: Any) -> None:
        """Let everybody in."""

    def answer(self) -> None:
        """Nobody asks."""

    def close(self) -> None:
        """Nobody asks any more."""


class _Receiver(InprocReceiver):
    """Receives in memory, slowly, and not always to the end."""

    def __init__(self, sender: InprocSender, reach: Callable[[str], object]) -> None:
        super().__init__(sender)
        self._reach = reach

    def receive_into(self, shadow: Any, *rest: Any) -> Any:
        self._reach("read")
        return super().receive_into(shadow, *rest)
