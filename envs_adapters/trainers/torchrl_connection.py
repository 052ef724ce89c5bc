"""The engine behind an object of TorchRL's that may be pickled: at hand, or found by its address."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from rollout_engine.base.errors import ConfigError, LifecycleError, refused
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.faces.llm import LLM
from rollout_engine.faces.llm_engine import LLMEngine
from rollout_engine.faces.rollout_service import RolloutService
from rollout_engine.rollouts.policy import RolloutPolicy

Engine = RolloutPolicy | LLM | LLMEngine | AsyncLLM | RolloutService | str | os.PathLike[str] | Sequence[str]
"""A policy, an engine, or addresses as `AsyncLLM.connect` takes them."""

_HOW = (
    "Pickled, it is an address at which another process connects. Give it one: the `address` of an AsyncLLM, or the "
    "tcp://HOST:PORT that `rollout-engine core MODEL --listen ...` prints, with its key_file; or give the collector a "
    "policy_factory."
)


class Connection:
    """A rollout policy that pickles as the address of its engine and the path of the key file, and connects anew.

    `close` disconnects an engine that it connected itself; one that it was given is left to its owner. Replicas have no
    address of their own: a policy over several is not pickled.
    """

    def __init__(self, engine: Engine, key_file: str | os.PathLike[str] | None = None) -> None:
        """`key_file`: of an engine on TCP. Raises `ConfigError`, and whatever `AsyncLLM.connect` raises."""
        self._key_file = None if key_file is None else os.path.abspath(key_file)
        self._address: str | list[str] | None = None
        if isinstance(engine, RolloutPolicy):
            self.policy = engine
        elif isinstance(engine, LLM | LLMEngine | AsyncLLM | RolloutService):
            self.policy = RolloutPolicy(engine)
        elif isinstance(engine, str | os.PathLike):
            self._address = os.fspath(engine)
        elif isinstance(engine, Sequence) and engine and all(isinstance(each, str) for each in engine):
            self._address = list(engine)
        else:
            bound = "a RolloutPolicy, an engine (LLM, LLMEngine, AsyncLLM, RolloutService) or the address of one"
            raise ConfigError(refused("engine", engine, bound))
        if self._address is not None:
            self.policy = RolloutPolicy(AsyncLLM.connect(self._address, key_file=self._key_file))

    def close(self) -> None:
        """End the connection if it was made here. May be called again."""
        if self._address is not None:
            self.policy.shutdown()

    def __reduce__(self) -> tuple[Callable[..., "Connection"], tuple[str, str | None]]:
        return Connection, (self._found_at(), self._key_file)

    def _found_at(self) -> str:
        engine, address = self.policy.engine, self._address
        if isinstance(engine, LLM | LLMEngine):
            raise ConfigError(f"This policy's engine is in this process, so it cannot be pickled. {_HOW}")
        if isinstance(engine, AsyncLLM):
            with suppress(LifecycleError):  # a fleet
                address = engine.address
        if not isinstance(address, str):
            raise ConfigError(
                "This policy's engine has several replicas, which follow the updates of one client alone, so it cannot "
                f"be pickled. {_HOW}"
            )
        if address.startswith("tcp://") and self._key_file is None:
            raise ConfigError(
                f"This policy's engine is at {address}, where nobody connects without its key file. Give the policy "
                "key_file= too; the file has to be at that path wherever it is unpickled."
            )
        return address
