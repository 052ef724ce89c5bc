"""The clients of Tinker's protocol: a session each, its samplers, and the one adapter that it may train.

A session is ended by its client, or after `ServeOptions.tinker_idle_seconds` without a request; the SDK sends
a heartbeat every 10 seconds. Its adapter and its requests end with it; checkpoints stay.
"""

import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.base.lora_training import LoraShape
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.tinker.checkpoints import Checkpoint

_MOST_SAMPLERS = 4_096
"""Samplers of one client; the oldest gives way to another."""
KEPT_SNAPSHOTS = 16
"""Unnamed snapshots of one adapter that are kept for samplers; the oldest gives way to another."""


@dataclass(eq=False)
class Sampler:
    """A model or checkpoint that a client samples from."""

    id: str
    client_id: str
    is_base: bool = False
    """Whether it samples from the base model."""
    checkpoint: Checkpoint | None = None
    """The saved adapter; None: it was never saved, or has given way to newer ones."""
    follows: "TrainedModel | None" = None
    """The model whose last in-flight save it samples from; None: it stays with its checkpoint."""

    def adapter(self) -> LoRARequest | None:
        """The adapter of a request that arrives now; None: the base model. Raises `RequestError` if it is gone."""
        checkpoint = self.checkpoint
        if self.follows is not None:
            checkpoint = self.follows.inflight[-1] if self.follows.inflight else None
        if self.is_base:
            return None
        if checkpoint is None:
            bound = f"one of the last {KEPT_SNAPSHOTS} snapshots of a model in training"
            hint = "Others have given way: save_weights_for_sampler(name=...) keeps one."
            raise RequestError.for_field("sampling_session_id", self.id, bound, hint)
        name = checkpoint.path if self.follows is None else f"tinker://{checkpoint.model_id}/inflight"
        revision = int(checkpoint.about.saved_at * 1e6)
        return LoRARequest(name, path=str(checkpoint.directory), revision=revision)


@dataclass(eq=False)
class TrainedModel:
    """The adapter that a client trains."""

    id: str
    shape: LoraShape
    user_metadata: dict[str, str] | None = None
    last_seq_id: int = 0
    failure: str = ""
    """Why a pass since the last step of the optimizer has failed; "": none has."""
    snapshots: list[Sampler] = field(default_factory=list)
    """Samplers of its unnamed snapshots, oldest first."""
    inflight: list[Checkpoint] = field(default_factory=list)
    """Its last in-flight save, behind the one before, which a request may be about to read."""


@dataclass(eq=False)
class Client:
    """One session of Tinker's SDK."""

    id: str
    heard_at: float
    """On the monotonic clock."""
    model: TrainedModel | None = None
    samplers: OrderedDict[str, Sampler] = field(default_factory=OrderedDict)


class Clients:
    """All open sessions; on the server's event loop."""

    def __init__(self, most: int, idle_seconds: float) -> None:
        self._most, self._idle_seconds = most, idle_seconds
        self._by_id: dict[str, Client] = {}

    def add(self) -> Client:
        """Open a session. Raises `HttpProblem` 429 while there are too many."""
        if len(self._by_id) >= self._most:
            what = f"{self._most} sessions are open (tinker_clients={self._most})"
            raise HttpProblem(429, f"{what}: send the request again once one has ended.", headers={"retry-after": "1"})
        made = Client(uuid.uuid4().hex, time.monotonic())
        self._by_id[made.id] = made
        return made

    def get(self, client_id: str) -> Client:
        """An open session, which has sent a request now. Raises `HttpProblem` 410: the SDK's heartbeat then ends."""
        found = self._by_id.get(client_id)
        if found is None:
            idle = f"or it has sent nothing for {self._idle_seconds:g} seconds (tinker_idle_seconds)"
            what = f"There is no session '{client_id:.200}': it has finished, {idle}"
            raise HttpProblem(410, f"{what}. Make another: tinker.ServiceClient().", field="session_id")
        found.heard_at = time.monotonic()
        return found

    def find_sampler(self, sampler_id: str) -> Sampler:
        """A sampler of an open session. Raises `HttpProblem` 404."""
        client = self.get(sampler_id.partition(":")[0])
        found = client.samplers.get(sampler_id)
        if found is None:
            what = f"There is no sampler '{sampler_id:.200}' (a session has its last {_MOST_SAMPLERS})"
            raise HttpProblem(404, f"{what}: create one.", field="sampling_session_id")
        return found

    def find_model(self, model_id: str) -> tuple[Client, TrainedModel]:
        """The adapter of an open session, by its id. Raises `HttpProblem` 404."""
        client = self.get(model_id.partition(":")[0])
        if client.model is None or client.model.id != model_id:
            what = f"There is no model '{model_id:.200}' in training"
            raise HttpProblem(404, f"{what}: it was unloaded, or is no id of create_model.", field="model_id")
        return client, client.model

    def add_sampler(self, client: Client, sampler: Sampler) -> None:
        """Keep a sampler by its id; the oldest gives way if there are too many."""
        client.samplers[sampler.id] = sampler
        if len(client.samplers) > _MOST_SAMPLERS:
            client.samplers.popitem(last=False)

    def remove(self, client_id: str) -> Client | None:
        """End a session."""
        return self._by_id.pop(client_id, None)

    def idle(self) -> list[Client]:
        """Sessions that have sent nothing for too long."""
        late = time.monotonic() - self._idle_seconds
        return [each for each in self._by_id.values() if each.heard_at < late]
