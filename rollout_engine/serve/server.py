"""The server on a socket: uvicorn's, with `App` behind connections of our own."""

import socket
import threading
from types import FrameType, TracebackType
from typing import Any

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.lora_training import LoraTrainer
from rollout_engine.base.threads import start_thread
from rollout_engine.faces.verb_methods import Face
from rollout_engine.serve.app import App
from rollout_engine.serve.http_protocol import connections_of
from rollout_engine.serve.options import ServeOptions

_BACKLOG = 2048
_START_SECONDS = 60.0


class HttpServer:
    """Serves one engine over HTTP, here (`run`) or on a thread of its own (`start`, or as a context manager).

    >>> with HttpServer(policy, ServeOptions(port=0)) as server:
    ...     openai.OpenAI(base_url=f"{server.url}/v1", api_key="-").models.list()

    The engine is its owner's to shut down.
    """

    def __init__(self, engine: Face, options: ServeOptions | None = None, trainer: LoraTrainer | None = None) -> None:
        """Listen. Raises `ConfigError` for an address that cannot be had, and without the extra `server`.

        `trainer`: of adapters, for clients of Tinker's protocol.
        """
        self.app = App(engine, options, trainer)
        self.options = self.app.served.options
        self._socket = _listening(self.options)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        """Its URL, for example "http://127.0.0.1:8000"; once it has stopped, no server answers there."""
        self._server = _uvicorn(self.app)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C, which let open requests end first, or until `stop`."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.app.served.tinker.close()

    def start(self) -> "HttpServer":
        """Serve on a thread, until `stop` or the end of this process. Returns this server once it answers."""
        self._thread = start_thread(self.run, name="http server")
        deadline = threading.Event()
        for _ in range(int(_START_SECONDS / 0.01)):
            if self._server.started or not self._thread.is_alive():
                break
            deadline.wait(0.01)
        return self

    def stop(self) -> None:
        """Take no new requests, let the open ones end for `ServeOptions.drain_seconds`, and end. Returns at once."""
        self.app.served.is_ending = True
        self._server.should_exit = True

    def __enter__(self) -> "HttpServer":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()


def check_server(options: ServeOptions) -> None:
    """Raise `ConfigError` if `HttpServer` would, before an engine is loaded."""
    _import_uvicorn(options)
    _listening(options).close()


def _listening(options: ServeOptions) -> socket.socket:
    kind = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(kind, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((options.host, options.port))
        made.listen(_BACKLOG)
    except OSError as problem:
        made.close()
        what = f"host='{options.host}', port={options.port} cannot be listened on ({problem})"
        raise ConfigError(f"{what}: give another port, or port=0 for any that is free.") from problem
    made.set_inheritable(True)
    return made


def _uvicorn(app: App) -> Any:
    options = app.served.options
    uvicorn, connections = _import_uvicorn(options)

    class Server(uvicorn.Server):  # type: ignore[misc,name-defined]
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.served.is_ending = True
            super().handle_exit(sig, frame)

    return Server(
        uvicorn.Config(
            app,
            http=connections,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(options.drain_seconds)),
        )
    )


def _import_uvicorn(options: ServeOptions) -> tuple[Any, Any]:
    """The package, and the class of connections. Raises `ConfigError` without the extra `server`."""
    try:
        import uvicorn

        return uvicorn, connections_of(options.max_connections)
    except ImportError as problem:
        what = f"The HTTP server needs packages that are not installed ({problem})"
        raise ConfigError(f'{what}: pip install "rollout-engine[server]".') from problem
