"""Starts a core's process, and ends it; `rollout_engine.process.lifeline` connects the two.

The parent makes the directory in which the core lives, and the child keeps it locked (`sync.locked_directories`). If
the parent is killed, so is the core, and the parent's guard removes its files.
"""

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from rollout_engine.base.class_names import import_path, name_elsewhere
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, EngineDeadError
from rollout_engine.children.child import Child
from rollout_engine.children.failure import Failure
from rollout_engine.children.guard import GUARD
from rollout_engine.children.process import environment_with_package, start_module
from rollout_engine.cluster.ray_cluster import variables_of_children
from rollout_engine.execution.group_executor import GroupSettings
from rollout_engine.process.descriptors import CORE_DESCRIPTORS, require
from rollout_engine.process.keys import Keys
from rollout_engine.process.lifeline import MAX_LIFELINE_BYTES, CoreSettings
from rollout_engine.process.post_mortem import keep_stacks
from rollout_engine.process.tcp_address import require_keys
from rollout_engine.process.wire import PROTOCOL, Ready
from sync.locked_directories import PREFIX, SHARED_MEMORY, lock_directory, sweep_stale_directories

logger = logging.getLogger("rollout_engine")

CORE_MODULE = "rollout_engine.process.core_main"
_MAX_ADDRESS_BYTES = 100
"""Length of a unix socket's address, less than the system's limit."""
_SPIN_COUNT = "20000"
"""Spins of an idle OpenMP thread before it sleeps, about 0.4 ms: it is awake when the next step begins, and asleep soon
after the last one."""
_ABORT_SECONDS = 1.0
"""How long a core may take to write its stacks."""


def address_in(directory: str | Path) -> str:
    """The zmq address of the core that has this directory."""
    return f"ipc://{directory}/core"


def config_digest(config: EngineConfig) -> str:
    """A digest of the configuration, to compare with that of the other process."""
    return hashlib.blake2b(msgspec.json.encode(config, order="sorted"), digest_size=16).hexdigest()


class CoreProcess(Child):
    """The parent's handle of a core's process. `end` leaves neither process nor directory behind."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        heartbeat_seconds: float,
        max_backlog_bytes: int,
        listen: str = "",
        keys: Keys | None = None,
        group: GroupSettings | None = None,
    ) -> None:
        """Start the process; it loads the model while the caller continues. Raises `ConfigError`.

        `listen`: a TCP address at which the core also takes clients with these `keys`; `Ready.address` has its port.
        `group`: the engine's place in its group, whose memory the process opens while it loads.
        """
        require_keys(listen, keys, "listen")
        _refuse_cores_of_cores()
        require(CORE_DESCRIPTORS, "An engine in a process of its own")
        sweep_stale_directories(tempfile.gettempdir())
        sweep_stale_directories(SHARED_MEMORY)
        config = named_elsewhere(config)
        self._config, self._is_loading = config, True
        self.directory = tempfile.mkdtemp(prefix=PREFIX)
        if len(address_in(self.directory)) > _MAX_ADDRESS_BYTES:
            os.rmdir(self.directory)
            raise ConfigError(f"TMPDIR is too long for a unix socket: {self.directory}. Set a shorter one.")
        settings = CoreSettings(
            protocol=PROTOCOL,
            config=config,
            heartbeat_seconds=heartbeat_seconds,
            max_backlog_bytes=max_backlog_bytes,
            log_level=logger.getEffectiveLevel(),
            import_path=import_path(),
            listen=listen,
            keys=keys,
            group=group,
        )
        locked = lock_directory(self.directory)
        GUARD.add_path(self.directory, f"{SHARED_MEMORY}/{os.path.basename(self.directory)}-")
        try:
            super().__init__(lambda ends: _start(ends[0], locked, self.directory), max_bytes=MAX_LIFELINE_BYTES)
        except BaseException:
            self._remove_files()
            raise
        finally:
            os.close(locked)  # the core has a copy
        self.lifeline = self.channel
        try:
            self.lifeline.send(settings)
        except OSError:
            pass  # it has ended already; `wait_ready` raises

    def wait_ready(self, timeout: float) -> Ready:
        """Block until the model is loaded. Raises the error that prevented it, or `EngineDeadError`."""
        try:
            answer = self.receive(Ready | Failure, timeout)
        except TimeoutError:
            self.end(kill=True)
            raise EngineDeadError(f"The core was not ready within {timeout:g} s and was ended.") from None
        except (EOFError, OSError, msgspec.MsgspecError) as problem:
            self._is_loading = False
            status = self.end()
            raise EngineDeadError(f"The core ended at start-up with status {status} ({problem}).") from None
        self._is_loading = False
        if isinstance(answer, Failure):
            self.end()
            raise answer.as_error("start-up")
        assert isinstance(answer, Ready), "decoded as Ready | Failure"
        if answer.config_digest != config_digest(self._config):
            self.end(kill=True)
            raise EngineDeadError("The core runs another configuration than it was given.")
        return answer

    def keep_stacks(self, *, abort: bool) -> str:
        """Keep the Python stacks that a crashed core has left, and describe their place; "": it left none.

        `abort`: have it crash now, because its interpreter hangs.
        """
        if abort:
            self.signal(signal.SIGABRT)
            self.wait(_ABORT_SECONDS)
        file = keep_stacks(self.directory, self.pid)
        return "" if file is None else f" (its stacks are in {file})"

    def end(self, *, kill: bool = False) -> int | None:
        """End the process, wait for it, remove the directory. Returns its status; calling it again is a no-op.

        A core that still loads its model is killed.
        """
        if not self.is_ours:
            return None
        status = super().end(kill=kill or self._is_loading)
        self._remove_files()
        return status

    def _remove_files(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        GUARD.drop_path(self.directory)


def _start(lifeline: int, locked: int, directory: str) -> "subprocess.Popen[bytes]":
    """Start a core's process, which inherits two descriptors: its end of the lifeline, and the locked file."""
    return start_module(CORE_MODULE, [directory], descriptors=[lifeline, locked], environment=_environment())


def _refuse_cores_of_cores() -> None:
    """Raise `ConfigError` in a core's process: importing the program for one of its classes must start no core."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == CORE_MODULE:
        raise ConfigError(
            "an engine is started where the core's process imports the program: put what the program runs under "
            '`if __name__ == "__main__":`'
        )


def named_elsewhere(config: EngineConfig) -> EngineConfig:
    """Rename the user's classes so that the core's process can import them. Raises `ConfigError`."""
    fields = ("logits_processors", "worker_extensions")
    names = {field: tuple(name_elsewhere(name, field) for name in getattr(config, field)) for field in fields}
    return msgspec.structs.replace(config, **names)


def _environment() -> dict[str, str]:
    """Environment of the core. Its idle threads spin only briefly: the parent needs their CPU cores to read outputs."""
    environment = environment_with_package() | variables_of_children()
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    return environment
