"""A core of the fleet tier without threads: it spells tokens on an event queue, and answers over two pipes."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollout_engine.capacity.events import Events
from rollout_engine.errors import (
    DirtyWeightsError,
    EngineDeadError,
    RequestError,
    RetryableError,
    TransferTimeoutError,
    WeightUpdateError,
)
from rollout_engine.fleet.member import Member
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.process.client_routing import first_sequence_of
from rollout_engine.seeds import child_seed, mix
from tests.simulation.choices import Choices

HANG_SECONDS = 5.0
"""Silence after which a client takes its core for gone."""
CALL_SECONDS = 4.0
"""How long an update waits for a core's answer."""
END_TOKEN = 7
_NUM_TOKENS = 24
_DELAYS = (0.001, 0.003, 0.02, 0.1)
KINDS = ("start", "refusal", "weights", "late commit", "half a commit", "told twice")
"""Failures that strike where the fleet's own work passes, each at a rate of its own in every run."""


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


class World:
    """The event queue of a run, its choices, its failures and its log."""

    def __init__(self, choices: Choices) -> None:
        self.choices, self.events = choices, Events()
        self.is_calm = False
        """Whether nothing fails any more."""
        self.faults: Counter[str] = Counter()
        self.log: list[tuple[float, str, str]] = []
        self.digests = {0: 0}
        """Version -> digest of the newest weights that were sent under it."""
        self.refuted: set[int] = set()
        """Versions of updates that no replica has taken."""
        self.refused: set[int] = set()
        """First sequence ids of requests that a core has refused."""
        self.sent: Callable[[int, int], None] = lambda replica, sequence_id: None
        """Hears of each request that is sent: replica, and first sequence id."""
        self._rates = {kind: choices.pick([0.0, 0.02, 0.1]) for kind in KINDS}
        self._stalls = self._num_digests = 0

    def monotonic(self) -> float:
        """Seconds on the machine's clock, which stalls and jumps."""
        return self.events.now + self._stalls

    def stall(self, seconds: int) -> None:
        """Let the clock jump."""
        self._stalls += seconds

    def later(self, seconds: float, event: Callable[..., object], *arguments: Any) -> None:
        """Plan an event."""
        self.events.plan(self.events.now + seconds, event, *arguments)

    def delayed(self, event: Callable[..., object], *arguments: Any) -> None:
        """Plan an event after a delay that the seed chooses."""
        self.later(self.choices.pick(_DELAYS), event, *arguments)

    def told(self, event: Callable[..., object], *arguments: Any) -> None:
        """Plan a notice: late, and perhaps twice."""
        self.later(self.choices.pick((0.0, 0.01, 0.3, 2.0, 10.0)), event, *arguments)
        if self.strikes("told twice"):
            self.later(self.choices.pick((0.0, 0.3, 2.0, 10.0)), event, *arguments)

    def strikes(self, kind: str) -> bool:
        """Whether a failure of a kind strikes here."""
        if self.is_calm or not self.choices.chance(self._rates[kind]):
            return False
        self.count(kind)
        return True

    def count(self, what: str, where: object = "") -> None:
        """Count a failure."""
        self.faults[what] += 1
        self.note(f"fault: {what} {where}")

    def note(self, event: str) -> None:
        """Add a line to the log."""
        self.log.append((self.events.now, "", event))

    def new_weights(self, version: int) -> Weights:
        """Weights that no core has."""
        self._num_digests += 1
        self.refuted.discard(version)
        self.digests[version] = self._num_digests
        return Weights(version, self._num_digests)


class _Pipe:
    """One way of a connection. Messages arrive in order, some time after they were sent."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._messages: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.held_until = 0.0

    @property
    def is_held(self) -> bool:
        """Whether nothing arrives now."""
        return self.held_until > self._world.events.now

    def send(self, arrive: Callable[..., object], *arguments: Any) -> None:
        """Call `arrive` at the other end."""
        self._messages.append((arrive, arguments))
        self._world.delayed(self._arrive)

    def flush(self) -> None:
        """Let all that is on its way arrive."""
        while self._messages:
            arrive, arguments = self._messages.popleft()
            arrive(*arguments)

    def lose(self) -> None:
        """Let nothing arrive of what is on its way."""
        self._messages.clear()

    def _arrive(self) -> None:
        if self.is_held:
            self._world.events.plan(self.held_until, self._arrive)
        elif self._messages:  # else it was flushed, or lost
            arrive, arguments = self._messages.popleft()
            arrive(*arguments)


class _Call:
    """A call on a core: `done` hears its result, or its error, once."""

    def __init__(self, done: Callable[[Any], None]) -> None:
        self._done: Callable[[Any], None] | None = done

    def end(self, result: Any) -> None:
        """Tell the result, unless the call has ended."""
        done, self._done = self._done, None
        if done is not None:
            done(result)


class BrainCore:
    """A core, the client of it, and its replica: what a `Member` talks to."""

    info = None
    node = "here"

    def __init__(self, world: World, replica: int, name: str) -> None:
        self._world, self._replica, self.name = world, replica, name
        self.index = world.choices.pick((0, 1, 3))
        """As which client the fleet talks to it: its sequence ids begin at `index << 40`."""
        self._first = first_sequence_of(self.index)
        self.weights: Weights | None = Weights(0, 0)
        """None: a mixture."""
        self.step_seconds = 0.02
        self.is_gone = False
        """Whether its process has ended."""
        self._staged: Weights | None = None
        self._report: Report | None = None
        self._frozen_until = 0.0
        self._is_lost = self._is_armed = False
        self._sequences: dict[int, tuple[int, list[int], int]] = {}
        """Sequence id -> seed, tokens, most tokens."""
        self._to_core, self._to_client = _Pipe(world), _Pipe(world)
        self._calls: list[_Call] = []
        self._after_answer: EngineCoreOutputs | None = None
        self._listener: Any = None

    # What a member and an update ask of it

    @property
    def client(self) -> Any:
        """The client of it."""
        return self

    @property
    def policy_version(self) -> int:
        """Version of its weights."""
        return -1 if self.weights is None else self.weights.version

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
        call = _Call(done)
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
        if self._world.strikes("half a commit"):
            self.weights = None
            return DirtyWeightsError("some tensors are new")
        self._report = Report(self.weights.version, str(self.weights.digest))
        self._arm()
        if self._world.strikes("late commit"):
            return TransferTimeoutError("the answer came too late")
        return self._report

    def drop_staged_weights(self) -> Report | None:
        """Drop what is staged; the report of the last update if that was committed."""
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
        """Have its process end itself: it gives up what it has."""
        self._finish()

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
        if self._world.strikes("refusal"):
            self._world.refused.add(first - self._first)
            self._to_client.send(self._say, Member.refuse, first, RequestError("it is not taken"))
            return
        for index in range(request.params.n):
            seed = child_seed(request.seed, index)
            self._sequences[first + index] = seed, list(request.output_token_ids), request.max_tokens
        self._arm()

    def _abort(self, sequence_ids: Sequence[int]) -> None:
        ended = [SequenceEnd(id, "abort") for id in sequence_ids if self._sequences.pop(id, None)]
        if ended:
            self._tell(EngineCoreOutputs(self.policy_version, ended=ended))

    def _carry_out(self, work: Callable[[], Any], call: _Call) -> None:
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

    def _answer(self, call: _Call, result: Any) -> None:
        call.end(result)

    def _lose(self) -> None:
        """Notice that the core is gone; told again, it is the same."""
        self._is_lost = True
        calls, self._calls = self._calls, []
        for call in calls:
            call.end(EngineDeadError("the core is gone"))
        self._listener.fail_all(EngineDeadError("the core is gone"))
