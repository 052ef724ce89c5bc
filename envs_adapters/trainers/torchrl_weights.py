"""TorchRL's weight synchronisation with an engine: each `send` is one verified update, or none."""

import os
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from torchrl.modules.llm import LLMWrapperBase
from torchrl.weight_update import WeightStrategy, WeightSyncScheme

from envs_adapters.trainers.torchrl_connection import Connection, Engine
from rollout_engine.base.errors import ConfigError, refused


class EngineWeightSyncScheme(WeightSyncScheme):  # type: ignore[misc]  # TorchRL has no types
    """Pushes the weights of a trained model into the engine: checked and swapped as a whole between two of its steps.

        sync = EngineWeightSyncScheme(policy)  # or the engine, or its address
        sync.init_on_sender(model_id="policy", model=trained)
        sync.register_collector(collector)
        sync.connect()  # the first push
        ...
        sync.send()  # after each optimizer step

    Requests in flight continue, and their tokens carry the version that sampled them. A push that fails raises, and the
    old weights serve on. All policies over one engine see each push, wherever they are, so collectors have nothing to
    receive: a receiver's `receive` returns None at once. Pickled, it is the address of the engine.
    """

    def __init__(
        self, engine: Engine | Any, *, key_file: str | os.PathLike[str] | None = None, partial: bool = False
    ) -> None:
        """
        Args:
            engine: an `EnginePolicy`, or an argument to make one: a `RolloutPolicy`, an engine, or its address.
            key_file: of an engine on TCP.
            partial: the sent tensors may lack weights, which keep their values.
        """
        super().__init__()
        self._strategy = _AsItIs()
        connection = getattr(engine, "connection", engine)
        self._connection = connection if isinstance(connection, Connection) else Connection(connection, key_file)
        self._partial = partial
        self._collectors: list[Any] = []
        self._source: nn.Module | None = None

    def register_collector(self, collector: Any) -> None:
        """Have `collector` count its policy's versions: `collector.increment_version()` after each push."""
        self._collectors.append(collector)

    @property
    def policy_version(self) -> int:
        """The version of the engine's live weights, as last reported."""
        return self._connection.policy.policy_version

    def create_transport(self, **_: Any) -> "_EngineTransport":
        """The one transport: into the engine."""
        return _EngineTransport(self._connection, self._partial)

    def prepare_weights(self, weights: Any, model_id: str, strategy: Any, context: Any = None) -> Any:
        """The weights to push: `weights`, or the model of `init_on_sender`."""
        source = self._source if weights is None else weights
        if source is None:
            raise ConfigError(
                "There are no weights to send: give send() a model, or init_on_sender(model=...) the one that is "
                "trained. The policy itself has none, the engine has."
            )
        return source

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Replace the engine's weights; returns when they serve.

        `weights`: a model, a TransformersWrapper over one, or whatever `RolloutPolicy.update_weights` takes; None: the
        model of `init_on_sender`.
        `worker_ids` changes nothing: workers have no weights. Raises whatever `RolloutPolicy.update_weights` raises.
        """
        super().send(weights)
        for collector in self._collectors:
            collector.increment_version()

    def receive(self, timeout: float | None = None) -> None:
        """Do nothing: the engine has the weights."""

    def _init_on_sender_impl(
        self, *, model_id: str | None = None, context: Any = None, model: Any = None, **_: Any
    ) -> None:
        self._model_id, self.context = model_id or "policy", context
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(refused("model", model, "the nn.Module that is trained"))
        self._source = model
        self.shared_transport = self.create_transport()

    def _init_on_receiver_impl(self, *, model_id: str, context: Any = None, **_: Any) -> None:
        self._model_id, self.context = model_id, context

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        if weights is not None or self._source is not None:
            self.shared_transport.send_weights(self.prepare_weights(weights, self._model_id or "", self._strategy))

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"_source": None, "_collectors": [], "_shared_transport": None}


class _AsItIs(WeightStrategy):  # type: ignore[misc]
    """Leaves models whole, so that the engine's own checks see tied, sharded and adapted weights."""

    def extract_weights(self, source: Any) -> Any:
        return source


class _EngineTransport:
    """TorchRL's `TransportBackend` into an engine."""

    def __init__(self, connection: Connection, partial: bool) -> None:
        self._connection, self._partial = connection, partial

    def send_weights(self, weights: Any) -> None:
        """Push a model, or weights by name."""
        self._connection.policy.update_weights(_source(weights), partial=self._partial)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> None:
        """Do nothing: the engine has the weights."""

    def check_connection(self) -> bool:
        """Whether the engine lives."""
        return self._connection.policy.frontend.client.dead_error is None


def _source(weights: Any) -> Any:
    """The weights in a form that `RolloutPolicy.update_weights` takes."""
    if isinstance(weights, TensorDictBase):
        raise ConfigError(
            "EngineWeightSyncScheme sends models, and this is a TensorDict: TensorDict.from_module also has buffers "
            "that are no weights, and hides which are tied or sharded. Give the model itself, or the wrapper over it."
        )
    return weights.model if isinstance(weights, LLMWrapperBase) else weights
