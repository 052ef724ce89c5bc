"""How a core's process is started and how both sides notice the other's end: one socket, both ends in this file.

    parent   CoreProcess.start ── CoreSettings ──────> child   serve_lifeline
             wait_ready         <── Ready | Failure ──
             the socket stays open: the end of either process, however it comes, closes it

Every engine has a directory of its own, mode 0700, with a random name. It holds the zmq socket and a file that the core
keeps locked, so that directories left by killed runs can be told from live ones.
"""

import hashlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import msgspec

from rollout_engine.class_names import import_path, name_elsewhere
from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError, EngineDeadError
from rollout_engine.frontend.wire import PROTOCOL, Failure, Ready
from sync.own_process import OwnProcess
from sync.shared_files import lock, try_lock

logger = logging.getLogger("rollout_engine")

CORE_MODULE = "rollout_engine.frontend.core_proc"
SHARED_MEMORY = "/dev/shm"
"""Where weights pass between processes of one machine, where there is room."""
_PREFIX = "rollout-engine-"
_STALE_SECONDS = 60.0
"""A lock younger than this may not be taken yet."""
_STARTING_SECONDS = 1800.0
"""A directory younger than this may belong to an engine that has no lock yet: on a busy machine imports take long."""
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_ADDRESS_BYTES = 100
"""Of a unix socket, less than the system's limit."""
_SPIN_COUNT = "20000"
"""How often an idle thread of OpenMP looks for work before it sleeps: about 0.4 milliseconds, so that it is awake
when the next step begins, and asleep soon after the last one."""
_END_SECONDS = 5.0
"""How long a core that was told to end may take before it is killed."""


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the child is told."""

    protocol: int
    config: EngineConfig
    directory: str
    heartbeat_seconds: float
    max_backlog_bytes: int
    log_level: int
    import_path: list[str]
    """Where modules of the user are found, as in the parent."""


def address_in(directory: str | Path) -> str:
    """The zmq address of the core whose directory this is."""
    return f"ipc://{directory}/core"


def config_digest(config: EngineConfig) -> str:
    """Equal for equal configurations."""
    return hashlib.blake2b(msgspec.json.encode(config, order="sorted"), digest_size=16).hexdigest()


class Lifeline:
    """One end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        end.set_inheritable(False)
        _HERE.add(self)

    def close(self) -> None:
        """Tell the other end that this one is gone."""
        self.socket.close()

    def write(self, message: CoreSettings | Ready | Failure) -> None:
        """Raises `OSError` when the other end is gone."""
        body = msgspec.msgpack.encode(message)
        self.socket.sendall(len(body).to_bytes(4, "big") + body)

    def read(self, kind: type, timeout: float | None) -> object:
        """The next message. Raises `EOFError` when the other end is gone, `TimeoutError` after `timeout` seconds,
        `msgspec.DecodeError` for what is no message."""
        deadline = None if timeout is None else time.monotonic() + timeout
        length = int.from_bytes(self._read_exactly(4, deadline), "big")
        if length > _MAX_MESSAGE_BYTES:
            raise EOFError(f"a message of {length} bytes")
        body = self._read_exactly(length, deadline)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except UnicodeDecodeError as problem:
            raise msgspec.DecodeError(str(problem)) from None

    def _read_exactly(self, count: int, deadline: float | None) -> bytes:
        data = b""
        while len(data) < count:
            self.socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            part = self.socket.recv(count - len(data))
            if not part:
                raise EOFError("the other end is gone")
            data += part
        return data


_HERE: "weakref.WeakSet[Lifeline]" = weakref.WeakSet()


def _close_all() -> None:
    """In a forked child, which would otherwise keep the cores alive that its parent leaves."""
    for lifeline in list(_HERE):
        lifeline.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


class CoreProcess:
    """The parent's handle of a core's process. `end` leaves neither process nor directory behind."""

    def __init__(self, config: EngineConfig, *, heartbeat_seconds: float, max_backlog_bytes: int) -> None:
        """Start the process; it loads the model while the caller goes on. Raises `ConfigError`."""
        _refuse_cores_of_cores()
        sweep_stale_directories()
        sweep_stale_directories(SHARED_MEMORY)
        config = _named_elsewhere(config)
        self._config, self._owner = config, OwnProcess()
        self.directory = tempfile.mkdtemp(prefix=_PREFIX)
        if len(address_in(self.directory)) > _MAX_ADDRESS_BYTES:
            os.rmdir(self.directory)
            raise ConfigError(f"TMPDIR is too long for a unix socket: {self.directory}. Set a shorter one.")
        settings = CoreSettings(
            protocol=PROTOCOL,
            config=config,
            directory=self.directory,
            heartbeat_seconds=heartbeat_seconds,
            max_backlog_bytes=max_backlog_bytes,
            log_level=logger.getEffectiveLevel(),
            import_path=import_path(),
        )
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", CORE_MODULE, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        self.lifeline = Lifeline(ours)
        try:
            self.lifeline.write(settings)
        except OSError:
            pass  # it has ended already, which `wait_ready` tells

    @property
    def pid(self) -> int:
        """Of the core's process."""
        return self._process.pid

    def wait_ready(self, timeout: float) -> Ready:
        """Block until the model is loaded. Raises what prevented it, typed as in process, or `EngineDeadError`."""
        try:
            answer = self.lifeline.read(Ready | Failure, timeout)  # type: ignore[arg-type]
        except TimeoutError:
            self.end(kill=True)
            raise EngineDeadError(f"The core was not ready within {timeout:g} s and was ended.") from None
        except (EOFError, OSError, msgspec.MsgspecError) as problem:
            status = self.end()
            raise EngineDeadError(f"The core ended at start-up with status {status} ({problem}).") from None
        if isinstance(answer, Failure):
            self.end()
            raise answer.as_error("start-up")
        assert isinstance(answer, Ready), "by its type"
        if answer.config_digest != config_digest(self._config):
            self.end(kill=True)
            raise EngineDeadError("The core runs another configuration than it was given.")
        return answer

    def wait(self, seconds: float) -> int | None:
        """The process's exit status, as `subprocess` gives it; None: it still runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self, *, kill: bool = False) -> int | None:
        """End the process, wait for it, remove the directory. Returns its status; calling it again is a no-op."""
        if not self._owner.is_here:  # the process is not ours to end
            return None
        if kill:
            self._process.kill()
        self.lifeline.close()
        if self.wait(_END_SECONDS) is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        return self._process.returncode


def _refuse_cores_of_cores() -> None:
    """A core's process may import the program for the sake of a class in it; that must not start the next core."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == CORE_MODULE:
        raise ConfigError(
            "an engine is started where the core's process imports the program: put what the program runs under "
            '`if __name__ == "__main__":`'
        )


def _named_elsewhere(config: EngineConfig) -> EngineConfig:
    """The same with classes of the user named as the core's process finds them. Raises `ConfigError`."""
    fields = ("logits_processors", "worker_extensions")
    names = {field: tuple(name_elsewhere(name, field) for name in getattr(config, field)) for field in fields}
    return msgspec.structs.replace(config, **names)


def lock_directory(directory: str | Path) -> int:
    """Mark a directory as in use until this process ends. Returns the descriptor that holds the lock."""
    descriptor = os.open(Path(directory) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    lock(descriptor)
    return descriptor


def sweep_stale_directories(parent: str | None = None) -> None:
    """Remove directories of engines that were killed together with their parents."""
    for path in Path(parent or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            status = path.lstat()
            if status.st_uid == os.getuid() and _is_abandoned(path, time.time() - status.st_mtime):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # somebody else removes it now


def _is_abandoned(directory: Path, age: float) -> bool:
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return age > _STARTING_SECONDS
    try:
        return try_lock(descriptor) and age > _STALE_SECONDS
    finally:
        os.close(descriptor)


def _environment() -> dict[str, str]:
    """The core's. Its idle threads spin only briefly: the parent wants their cores, to read outputs."""
    environment = os.environ | {"PYTHONPATH": _python_path()}
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    return environment


def _python_path() -> str:
    """The child imports this very copy of the package."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
