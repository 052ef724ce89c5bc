"""The processes of an engine's other ranks, as rank 0 holds them, and their launchers.

RankLauncher    LocalLauncher     on this machine: memory that the ranks share, and pairs of sockets
                RemoteLauncher    on other machines: a gloo group, and sockets over TCP (`remote_ranks`)
"""

import os
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec
import torch

from rollout_engine.base.errors import ConfigError
from rollout_engine.children.channel import Channel
from rollout_engine.children.child import Child
from rollout_engine.children.process import environment_with_package, start_module
from rollout_engine.execution.rank_wire import MAX_BYTES, NUM_SOCKETS, RankSettings
from rollout_engine.kernels.cpu import turns
from rollout_engine.model.ranks.exchange import Meeting
from rollout_engine.model.ranks.part import Region
from rollout_engine.model.ranks.pipe_place import PipePlace
from rollout_engine.model.ranks.shared_exchange import TOTAL_BYTES, SharedExchange
from sync.locked_directories import PREFIX, lock_directory

MODULE = "rollout_engine.execution.rank_main"
"""The module that a rank's process runs."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Rank(ABC):
    """One other rank: its process and the four sockets to it."""

    name: str
    """The rank and its process, for messages."""

    def __init__(self, settings: RankSettings, life: Channel, steps: Channel, calls: Channel, pulse: Channel) -> None:
        self.rank, self.life, self.steps, self.calls, self.pulse = settings.rank, life, steps, calls, pulse
        self.is_started = threading.Event()
        """Set when it has started, and when it never will."""
        self.regions: Mapping[str, Region] = {}
        """Name of a weight -> the elements of it that are the rank's; empty before it has started."""
        try:
            self.life.send(settings)
        except OSError:
            pass  # it has ended already, which its watch sees

    @abstractmethod
    def how_it_ended(self) -> str:
        """Wait for the end of its process, whose socket is closed: "with status 1"."""

    def end(self) -> None:
        """End the process, and wait for it."""
        for channel in (self.steps, self.calls, self.pulse, self.life):
            channel.close()
        self._end_process()

    @abstractmethod
    def _end_process(self) -> None:
        """Wait for the end of the process, whose sockets are closed; kill it if that takes long."""


class RankLauncher(ABC):
    """Starts the ranks from 1 on."""

    meeting: Meeting
    """Rank 0's end of the exchange between hosts."""
    rendezvous: str | None
    """Address of the group of the ranks' devices, or of CPUs that share no memory; None without a group."""
    is_remote: bool
    """Whether ranks may be on other machines: each has the threads of its own."""
    place: PipePlace | None = None
    """Rank 0's place among the stages, if there are several."""

    @abstractmethod
    def start(self, settings: Sequence[RankSettings]) -> Iterator[Rank]:
        """Start a rank for each of the settings, which begins to load. Raises `ConfigError` if it cannot be.

        Ranks that were yielded are the caller's to end.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the launcher's resources; all ranks have ended."""


class LocalRank(Rank):
    """A child of this process."""

    def __init__(
        self,
        settings: RankSettings,
        memory: int,
        num_ranks: int,
        environment: Mapping[str, str],
        belts: Sequence[int] = (),
    ) -> None:
        """`environment`: variables in addition to this process's. `belts`: descriptors of ends between stages."""
        variables = environment_with_package() | {"OMP_NUM_THREADS": str(settings.num_threads), **environment}
        start = partial(start_module, MODULE, [str(num_ranks)], environment=variables)
        self._child = Child(
            lambda ends: start(descriptors=[memory, *ends, *belts]), num_channels=NUM_SOCKETS, max_bytes=MAX_BYTES
        )
        self.name = f"rank {settings.rank} (process {self._child.pid})"
        super().__init__(settings, *self._child.channels)

    def how_it_ended(self) -> str:
        return f"with status {self._child.wait(None)}"

    def _end_process(self) -> None:
        self._child.end()


class LocalLauncher(RankLauncher):
    """Starts ranks on this machine."""

    is_remote = False

    def __init__(self, num_ranks: int, *, has_group: bool, device: torch.device) -> None:
        """Raises `ConfigError` if ranks cannot share memory, or there are too few devices.

        `has_group`: whether they exchange tensors by a process group, instead of through the memory.
        """
        if not turns.is_available() or not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"{num_ranks} ranks need Linux and the C++ kernels, which could not be built here. "
                "Install g++, or leave it out."
            )
        self._on_device = device.type == "cuda"
        if self._on_device:
            _check_devices(num_ranks, torch.cuda.device_count())
        self._memory: int | None = os.memfd_create("rollout-engine-ranks")
        self._directory = tempfile.mkdtemp(prefix=f"{PREFIX}ranks-") if has_group else None
        self._locked: int | None = None
        self.rendezvous = None if self._directory is None else f"file://{self._directory}/rendezvous"
        try:
            if self._directory is not None:
                self._locked = lock_directory(self._directory)
            self._share(self._memory, num_ranks)
        except BaseException:
            self.close()
            raise

    def start(self, settings: Sequence[RankSettings]) -> Iterator[Rank]:
        assert self._memory is not None, "ranks are started once"
        for each in settings:
            mine = msgspec.structs.replace(each, rendezvous=self.rendezvous)
            variables = _device_variables(each.rank) if self._on_device else {}
            yield LocalRank(mine, self._memory, self.meeting.num_ranks, variables, self._take_belts(each.rank))
        self._close_memory()  # each rank has it open

    def _share(self, memory: int, num_ranks: int) -> None:
        """Make rank 0's end of the exchange in a new file, of its descriptor `memory`."""
        os.ftruncate(memory, TOTAL_BYTES)
        self.meeting = SharedExchange(memory, 0, num_ranks)

    def _take_belts(self, rank: int) -> list[int]:
        """Descriptors of a rank's ends between stages, which it inherits."""
        return []

    def close(self) -> None:
        self._close_memory()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        locked, self._locked = self._locked, None
        if locked is not None:
            os.close(locked)

    def _close_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            os.close(memory)


def _device_variables(rank: int) -> dict[str, str]:
    """Variables by which a rank's process sees one device, its own."""
    visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    return {_VISIBLE: visible[rank].strip() if visible else str(rank)}


def _check_devices(num_ranks: int, num_devices: int) -> None:
    if num_devices < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} with device='cuda' needs {num_ranks} devices, one for each rank, and "
            f"this process sees {num_devices} ({_VISIBLE}={os.environ.get(_VISIBLE, 'not set')}). Lower it, make "
            "more devices visible, or spread the ranks over the nodes of a Ray cluster (executor='ray')."
        )
