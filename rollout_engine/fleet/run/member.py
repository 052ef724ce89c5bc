"""A replica with an engine, as the fleet's client uses it: its own client, and the owner that gets its outputs.

The sequences of a fleet have ids of their own. A client's ids begin at `index << 40` at its core: that is added to ids
sent there, and subtracted from ids received.
"""

import threading
from typing import Protocol, Self

import msgspec

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError, RolloutEngineError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.fleet.run.provider import Provider, Replica
from rollout_engine.process.client_routing import first_sequence_of


class Owner(Protocol):
    """Callbacks for a replica's outputs, refusals and death, in the fleet's own ids, on the member's thread."""

    def deliver_outputs(self, member: "Member", outputs: EngineCoreOutputs) -> None:
        """Take the outputs of a step."""

    def handle_refusal(self, member: "Member", sequence_id: int, error: RolloutEngineError) -> None:
        """Take the error of a request that the member's core did not take."""

    def handle_loss(self, member: "Member", error: EngineDeadError) -> None:
        """Take the error of a core that is gone."""


class Member:
    """A `Listener` of one replica's client."""

    def __init__(self, index: int, replica: Replica, first_digest: str) -> None:
        """`first_digest`: that of the weights that the replica started with."""
        self.index, self.replica, self.client = index, replica, replica.client
        self.first_digest = first_digest
        self.updating = threading.Lock()
        """Held while its weights change: by an update, or by its catching up."""
        self.num_adapter_changes = 0
        """Number of the fleet's changes of adapters that it has, without a gap."""
        self.draft_digest = ""
        """Digest of the draft model's weights that an update of the fleet gave it last."""
        self._first = first_sequence_of(self.client.index)
        self._owner: Owner | None = None

    @classmethod
    def start(cls, index: int, provider: Provider, config: EngineConfig) -> Self:
        """Start a replica. Raises as `Provider.start`."""
        replica = provider.start(index, config)
        try:
            return cls(index, replica, replica.client.call("get_live_digest", {}).result())
        except BaseException:
            replica.end(kill=True)
            raise

    def join(self, owner: Owner) -> None:
        """Notify `owner` from now on. A core that drains is lost to it: its requests had better continue elsewhere."""
        self._owner = owner
        self.client.on_draining = self.fail_all
        self.client.listen(self)

    def send(self, request: EngineCoreRequest) -> RolloutEngineError | None:
        """Send a request. Returns the error if it cannot be sent; None if the core is gone, whose requests all move."""
        if self._first:
            request = msgspec.structs.replace(request, first_sequence_id=request.first_sequence_id + self._first)
        try:
            self.client.add_request(request)
        except EngineDeadError:
            pass
        except RolloutEngineError as error:
            return error
        return None

    def abort(self, sequence_ids: list[int]) -> None:
        """End sequences that the replica has."""
        self.client.abort([sequence_id + self._first for sequence_id in sequence_ids])

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Pass the outputs of a step on."""
        assert self._owner is not None
        self._owner.deliver_outputs(self, _offset_ids(outputs, self._first) if self._first else outputs)

    def refuse(self, first_sequence_id: int, error: RolloutEngineError) -> None:
        """Pass a refusal on."""
        assert self._owner is not None
        self._owner.handle_refusal(self, first_sequence_id - self._first, error)

    def fail_all(self, error: EngineDeadError) -> None:
        """Pass the end of the core on."""
        assert self._owner is not None
        self._owner.handle_loss(self, error)


def _offset_ids(outputs: EngineCoreOutputs, first: int) -> EngineCoreOutputs:
    """The same outputs with `first` taken from every sequence id."""
    return msgspec.structs.replace(
        outputs,
        sequence_ids=[sequence_id - first for sequence_id in outputs.sequence_ids],
        ended=[msgspec.structs.replace(end, sequence_id=end.sequence_id - first) for end in outputs.ended],
        num_cached_tokens={id - first: count for id, count in outputs.num_cached_tokens.items()},
        prompt_logprobs={id - first: logprobs for id, logprobs in outputs.prompt_logprobs.items()},
        prompt_routed_experts={id - first: routed for id, routed in outputs.prompt_routed_experts.items()},
        prompt_hidden_states={id - first: states for id, states in outputs.prompt_hidden_states.items()},
        id_logprobs=outputs.id_logprobs and outputs.id_logprobs.offset_ids(first),
        supports=outputs.supports and outputs.supports.offset_ids(first),
    )
