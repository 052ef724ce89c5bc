"""A core of the fleet tier without threads: it spells tokens on an event queue, and answers over two pipes."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from rollout_engine.base.errors import (
    DirtyWeightsError,
    EngineDeadError,
    RequestError,
    RetryableError,
    RolloutEngineError,
    TransferTimeoutError,
    WeightUpdateError,
)
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import child_seed, mix
from rollout_engine.base.version_pin import check_standing, ends_at_commit
from rollout_engine.fleet.run.member import Member
from rollout_engine.process.client_routing import first_sequence_of
from tests.simulation.brain_world import Call, Pipe, World

HANG_SECONDS = 5.0
"""Silence after which a client takes its core for gone."""
CALL_SECONDS = 4.0
"""How long an update waits for a core's answer."""
END_TOKEN = 7
_NUM_TOKENS = 24


def spelled(seed: int, position: int, digest: int) -> int:
    """The token of a sequence at a position under these weights."""
    return mix(mix(seed, position), digest) % _NUM_TOKENS


class Weights(NamedTuple):
    """Weights of a core."""

    version: int
    digest: int


class Report(NamedTuple):
    """What an update needs of an `UpdateReport`."""

    version: int
    digest: str


class BrainCore:
    """A core, the client of it, and its replica: what a `Member` talks to."""

    info = SimpleNamespace(kv_handshake={})
    node = "here"

    def __init__(self, world: World, replica: int, name: str) -> None:
        self._world, self._replica, self.name = world, replica, name
        self.policy_version = 0
        """Version of its newest weights."""
        self.index = world.choices.pick((0, 1, 3))
        """As which client the fleet talks to it: its sequence ids begin at `index << 40`."""
        self._first = first_sequence_of(self.index)
        self.weights: Weights | None = Weights(0, 0)
        """None: a mixture."""
        self.step_seconds = 0.02
        self.is_gone = False
        """Whether its process has ended."""
        self.ending: EngineDeadError | None = None
        """Why it is about to end, as its client has heard."""
        self.on_draining: Callable[[EngineDeadError], None] = lambda error: None
        self._staged: Weights | None = None
        self._report: Report | None = None
        self._frozen_until = 0.0
        self._is_lost = self._is_armed = self._is_draining = False
        self._sequences: dict[int, tuple[int, list[int], int]] = {}
        """Sequence id -> seed, tokens, most tokens."""
        self._params: dict[int, SamplingParams] = {}
        self._to_core, self._to_client = Pipe(world), Pipe(world)
        self._calls: list[Call] = []
        self._after_answer: EngineCoreOutputs | None = None
        self._listener: Any = None

    # What a member and an update ask of it

    @property
    def client(self) -> Any:
        """The client of it."""
        return self

    def listen(self, listener: Any) -> None:
        """Set who hears what it says."""
        self._listener = listener

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send it a request. Raises as a client does."""
        self._world.sent(self._replica, request.first_sequence_id - self._first)
        if self._is_lost:
            raise EngineDeadError("the core is gone")
        if self._world.strikes("refusal"):
            self._world.refused.add(request.first_sequence_id - self._first)
            raise RetryableError("the queue is full")
        self._to_core.send(self._take, request)

    def abort(self, sequence_ids: Sequence[int]) -> None:
        """End sequences."""
        self._to_core.send(self._abort, sequence_ids)

    def call(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Do something at the core; `done` hears the result, the error that it returned, or why there is none."""
        call = Call(done)
        if self._is_lost:
            self._world.later(0.0, call.end, EngineDeadError("the core is gone"))
            return
        self._calls.append(call)
        self._to_core.send(self._carry_out, work, call)
        self._world.later(CALL_SECONDS, call.end, TransferTimeoutError("no answer came in time"))

    def stage(self, weights: Weights) -> tuple[int, str] | Exception:
        """Stage weights. The reader of a store may fail, and somebody may have written there."""
        self._report = None
        if self._world.strikes("weights"):
            if self._world.choices.chance(0.7):
                return WeightUpdateError("the disk is broken")
            weights = Weights(weights.version, -1)
        self._staged = weights
        return weights.version, str(weights.digest)

    def commit(self) -> Report | Exception:
        """Commit what is staged. A step of before may be told after the answer."""
        if self._staged is None:
            return WeightUpdateError("nothing is staged")
        if self._sequences and self.weights is not None and self._world.choices.chance(0.3):
            self._after_answer = self._computed()
        self.weights, self._staged = self._staged, None
        self.policy_version = self.weights.version
        self._end_out_of_range(self.weights.version)
        if self._world.strikes("half a commit"):
            self.weights = None
            return DirtyWeightsError("some tensors are new")
        self._report = Report(self.weights.version, str(self.weights.digest))
        self._arm()
        if self._world.strikes("late commit"):
            return TransferTimeoutError("the answer came too late")
        return self._report

    def _end_out_of_range(self, version: int) -> None:
        """End the sequences that ask for another version, behind the tokens that they have."""
        out = [id for id in self._sequences if ends_at_commit(self._params[id], version, has_begun=True)]
        for id in out:
            del self._sequences[id]
        outputs = self._after_answer or EngineCoreOutputs(version)
        outputs.ended += [_end(id, self._params[id]) for id in out]
        if self._after_answer is None and out:
            self._tell(outputs)

    def drop_staged_weights(self) -> Report | None:
        """Drop what is staged; the report of the last update if that was committed."""
        if self.is_gone and not self._is_lost:
            if self._to_client.is_held:
                raise TransferTimeoutError("nobody knows")
            self._to_client.flush()  # the answer that never comes is waited for until its end is noticed
        if self.is_gone or self._is_lost:
            return None
        if self._to_core.is_held or self._frozen:
            self._to_core.send(self._drop)
            raise TransferTimeoutError("nobody knows")
        self._to_core.flush()
        self._drop()
        if self._to_client.is_held:
            raise TransferTimeoutError("nobody knows")
        return self._report

    def end(self, *, kill: bool = False) -> None:
        """End it, in order behind what it was sent."""
        self._to_core.send(self._finish)

    # What befalls it

    def kill(self) -> None:
        """End its process. What it has said arrives, before or after its end is noticed, or is lost."""
        self._die()
        match self._world.choices.pick(("noticed last", "noticed first", "unheard")):
            case "unheard":
                self._to_client.lose()
            case "noticed first":
                self._world.delayed(self._lose)
        self._to_client.send(self._lose)

    def terminate(self) -> None:
        """Have its process end itself: it gives up what it has, at once or some time after it has said so."""
        seconds = self._world.choices.pick((0.0, 0.1, 1.0))
        if seconds:
            self._is_draining = True
            self._to_client.send(self._hear_draining)
        self._world.later(seconds, self._finish)

    def freeze(self, seconds: float) -> None:
        """Let it do nothing for so long."""
        self._frozen_until = self._world.events.now + seconds
        self.hold(seconds, to_core=True)

    def hold(self, seconds: float, *, to_core: bool = False, to_client: bool = False) -> None:
        """Let nothing arrive for so long. Its client takes it for gone after a while, and it goes on afterwards."""
        until = self._world.events.now + seconds
        for pipe, is_held in ((self._to_core, to_core), (self._to_client, to_client)):
            if is_held:
                pipe.held_until = max(pipe.held_until, until)
        if seconds >= HANG_SECONDS:
            self._world.later(HANG_SECONDS, self._lose)

    def cut(self) -> None:
        """Break its connection; what it says still arrives, too late."""
        self._world.told(self._lose)

    @property
    def _frozen(self) -> bool:
        return self._frozen_until > self._world.events.now

    # The core's end of the pipes

    def _take(self, request: EngineCoreRequest) -> None:
        first = request.first_sequence_id
        if self._is_draining:
            self._to_client.send(self._say, Member.refuse, first, RetryableError("it is about to end"))
            return
        if self._world.strikes("refusal"):
            self._world.refused.add(first - self._first)
            self._to_client.send(self._say, Member.refuse, first, RequestError("it is not taken"))
            return
        ids = range(first, first + request.params.n)
        try:
            standing = check_standing(request.params, self.policy_version, has_tokens=bool(request.output_token_ids))
        except RolloutEngineError as error:  # it has committed, and the brain has not heard of it
            self._to_client.send(self._say, Member.refuse, first, error)
            return
        assert standing != "early", f"request {first} was sent to a replica of version {self.policy_version}"
        if standing == "over":
            self._tell(EngineCoreOutputs(self.policy_version, ended=[_end(id, request.params) for id in ids]))
            return
        for index, id in enumerate(ids):
            self._sequences[id] = child_seed(request.seed, index), list(request.output_token_ids), request.max_tokens
            self._params[id] = request.params
        self._arm()

    def _abort(self, sequence_ids: Sequence[int]) -> None:
        ended = [SequenceEnd(id, "abort") for id in sequence_ids if self._sequences.pop(id, None)]
        if ended:
            self._tell(EngineCoreOutputs(self.policy_version, ended=ended))

    def _carry_out(self, work: Callable[[], Any], call: Call) -> None:
        result = work()
        self._to_client.send(self._answer, call, result)
        if self._after_answer is not None:
            self._tell(self._after_answer)
            self._after_answer = None

    def _drop(self) -> None:
        self._staged = None

    def _finish(self) -> None:
        if not self.is_gone:
            given_up = [SequenceEnd(id, "abort", is_given_up=True) for id in self._sequences]
            self._tell(EngineCoreOutputs(self.policy_version, ended=given_up))
            self._die()
            self._to_client.send(self._lose)

    def _die(self) -> None:
        self.is_gone = True
        self._sequences.clear()
        self._to_core.lose()

    def _arm(self) -> None:
        if self._sequences and self.weights is not None and not self._is_armed:
            self._is_armed = True
            self._world.later(max(self.step_seconds, self._frozen_until - self._world.events.now), self._step)

    def _step(self) -> None:
        self._is_armed = False
        if not self.is_gone and self.weights is not None and not self._frozen:
            self._tell(self._computed())
        if not self.is_gone:
            self._arm()

    def _computed(self) -> EngineCoreOutputs:
        """The outputs of a step, with a token for some of its sequences."""
        assert self.weights is not None
        version, digest = self.weights
        outputs = EngineCoreOutputs(version)
        rows, skips = list(self._sequences.items()), self._world.choices.below(4)
        for number, (id, (seed, tokens, most)) in enumerate(rows):
            if skips and len(rows) > 1 and number % 3 == skips - 1:
                continue
            tokens.append(spelled(seed, len(tokens), digest))
            outputs.sequence_ids.append(id)
            outputs.token_ids.append(tokens[-1])
            outputs.kv_min_versions.append(version)
            if tokens[-1] == END_TOKEN or len(tokens) == most:
                outputs.ended.append(SequenceEnd(id, "stop" if tokens[-1] == END_TOKEN else "length"))
                del self._sequences[id]
        return outputs

    def _tell(self, outputs: EngineCoreOutputs) -> None:
        self._to_client.send(self._say, Member.deliver, outputs)

    # The client's end

    def _say(self, what: Callable[..., None], *arguments: Any) -> None:
        what(self._listener, *arguments)

    def _hear_draining(self) -> None:
        self.ending = EngineDeadError("the core is about to end")
        self.on_draining(self.ending)

    def _answer(self, call: Call, result: Any) -> None:
        call.end(result)

    def _lose(self) -> None:
        """Notice that the core is gone; told again, it is the same."""
        self._is_lost, self.ending = True, EngineDeadError("the core is gone")
        calls, self._calls = self._calls, []
        for call in calls:
            call.end(EngineDeadError("the core is gone"))
        self._listener.fail_all(EngineDeadError("the core is gone"))


def _end(sequence_id: int, params: SamplingParams) -> SequenceEnd:
    """The end of a sequence that asks for another version than the live one."""
    return SequenceEnd(sequence_id, "abort", error=f"policy_version={params.policy_version} is past")
