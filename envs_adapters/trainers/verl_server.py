"""The HTTP server of one rollout replica of verl: a process of this engine's own Python, and its client.

verl's pins exclude this engine's, so both have environments of their own. Here, in verl's, nothing is imported but the
standard library and httpx; tokens, log-probs and weights travel by the server's SGLang routes, and scores of prompts
by its vLLM route.
"""

import asyncio
import base64
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any

ENGINE_KWARGS = "rollout_engine"
"""Key of this engine's settings in verl's `engine_kwargs`."""
_START_SECONDS = 600.0
_END_SECONDS = 30.0
_OPTIONS = ("address", "python", "options")


class ServerProcess:
    """`rollout-engine serve` in a process that ends with this object's `close`."""

    def __init__(self, python: str, model: str, options: Mapping[str, Any], logprobs_mode: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        fields = [f"{name}={_as_text(value)}" for name, value in options.items()]
        command = [python, "-m", "rollout_engine", "serve", model, "--port", self.address.split(":")[1]]
        command += ["--logprobs-mode", logprobs_mode, *fields]
        self._log = tempfile.TemporaryFile("w+")
        # Without this process's Python settings: the server has an environment of its own.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        try:
            self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)
        except OSError as problem:
            raise RuntimeError(
                f"{python!r} cannot be started ({problem}): give engine_kwargs.{ENGINE_KWARGS}.python the interpreter "
                "of the environment that has rollout-engine."
            ) from problem

    def require_alive(self) -> None:
        """Raise `RuntimeError`, with the server's last lines, if it has ended."""
        if self._process.poll() is not None:
            self._log.seek(0)
            last = "".join(self._log.readlines()[-15:])
            raise RuntimeError(f"The server of this replica has ended ({self._process.returncode}):\n{last}")

    def close(self) -> None:
        """End the server: open requests first, as long as that takes no more than half a minute."""
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class ServerSettings:
    """The settings `engine_kwargs.rollout_engine`: the servers' addresses, or how to start them."""

    def __init__(self, given: Mapping[str, Any] | None) -> None:
        settings = dict(given or {})
        unknown = sorted(settings.keys() - set(_OPTIONS))
        if unknown:
            raise ValueError(
                f"engine_kwargs.{ENGINE_KWARGS} has {', '.join(unknown)}; known are {', '.join(_OPTIONS)}. Options of "
                "the engine, such as dtype, go into its 'options'."
            )
        addresses = settings.get("address") or []
        self.addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        self.python = settings.get("python") or os.environ.get("ROLLOUT_ENGINE_PYTHON", "")
        self.options: dict[str, Any] = dict(settings.get("options") or {})
        if not self.addresses and not self.python:
            raise ValueError(
                f"engine_kwargs.{ENGINE_KWARGS} names no server: give 'python', the interpreter of the environment "
                "that has rollout-engine (or set ROLLOUT_ENGINE_PYTHON), or 'address', one host:port for each replica "
                "that runs already."
            )

    def address_of(self, replica: int) -> str | None:
        """host:port of a replica's server that runs already; None if it is to be started."""
        if not self.addresses:
            return None
        if replica >= len(self.addresses):
            what = f"engine_kwargs.{ENGINE_KWARGS}.address has {len(self.addresses)} servers"
            raise ValueError(f"{what}, and none for replica {replica}: give one host:port for each.")
        return self.addresses[replica]


class ServerClient:
    """Calls of the server's routes. Raises `RuntimeError` with the server's own message if it refuses."""

    def __init__(self, address: str, process: ServerProcess | None = None) -> None:
        import httpx

        self.address = address
        self._process = process
        keys = os.environ.get("ROLLOUT_ENGINE_API_KEY", ""), os.environ.get("ROLLOUT_ENGINE_ADMIN_KEY", "")
        self._headers = [{"Authorization": f"Bearer {key}"} if key else {} for key in keys]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=f"http://{address}", timeout=None, limits=limits, trust_env=False)

    async def __aenter__(self) -> "ServerClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def wait_until_up(self) -> None:
        """Return once the server answers. Raises `RuntimeError` if it ends, and `TimeoutError` after ten minutes."""
        import httpx

        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process is not None:
                self._process.require_alive()
            try:
                if (await self._http.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
        raise TimeoutError(f"The server at {self.address} does not answer after {_START_SECONDS:g} s.")

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /generate."""
        return await self._post("/generate", body, self._headers[0])

    async def score(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /inference/v1/generate."""
        return await self._post("/inference/v1/generate", body, self._headers[0])

    async def control(self, route: str, **body: Any) -> dict[str, Any]:
        """POST a route of the operator's."""
        return await self._post(route, body, self._headers[1])

    async def send_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Send tensors of an update that was begun, as safetensors."""
        from safetensors.torch import save

        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        text = base64.b64encode(save(held)).decode()
        await self.control("/update_weights_from_tensor", serialized_named_tensors=[text], load_format="safetensors")

    async def _post(self, route: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        import httpx

        try:
            answer = await self._http.post(route, json=dict(body), headers=dict(headers))
        except httpx.TransportError as problem:
            if self._process is not None:
                self._process.require_alive()
            raise RuntimeError(f"{route}: the server at {self.address} is gone ({problem}).") from problem
        if answer.status_code >= 400:
            raise RuntimeError(f"{route}: {self.address} answered {answer.status_code}: {answer.text[:2000]}")
        return dict(answer.json())


def _as_text(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float | bool) else repr(value)
