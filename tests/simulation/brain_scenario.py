"""What happens in a run of the fleet tier without threads: users, disasters, calm; and what may never be so."""

from collections import Counter
from collections.abc import Callable
from functools import cache

from rollout_engine.base.errors import EngineDeadError, RolloutEngineError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import child_seed, mix
from rollout_engine.base.version_pin import is_pinned, standing_of
from rollout_engine.engine.client import Route
from rollout_engine.fleet.run.client import FleetClient
from tests.simulation.brain_core import END_TOKEN, HANG_SECONDS, BrainCore, spelled
from tests.simulation.brain_fleet import UpdateRound, core_of, make_client, newest, restart_all
from tests.simulation.brain_world import World
from tests.simulation.scheduler import SimulationFailed
from tests.simulation.session_homes import SessionHomes

_WAITS = (0.05, 0.0, 0.01, 0.3, 2.0)
"""Seconds between two things that happen."""
_MAX_EVENTS = 60_000
"""A run that has not ended by then never does."""
_PROVEN_SECONDS = 70
MAX_REPLICAS = 5


class BrainUsers:
    """Every request of a run, and what its user has been told: the listener of the fleet's client."""

    def __init__(self, world: World, client: FleetClient) -> None:
        self._world, self._client = world, client
        self.ends: Counter[int] = Counter()
        """Sequence id -> how often its user was told of its end."""
        self.reasons: Counter[str] = Counter()
        self.is_over = False
        """Whether the user was told that no replica is left."""
        self._requests: dict[int, EngineCoreRequest] = {}
        """Sequence id -> its request."""
        self._tokens: dict[int, list[int]] = {}
        self._aborted: set[int] = set()
        self._refused: set[int] = set()
        """Sequences of requests that were refused: their streams are closed, and what still comes goes nowhere."""
        self._least: dict[int, int] = {}
        """Sequence id -> the newest version as it was added."""
        self._homes = SessionHomes(client._brain)
        client.listen(self)
        world.sent = self._homes.sent

    def add(self) -> None:
        """Add a request, perhaps of a session, or for one replica."""
        choices, first = self._world.choices, len(self._tokens)
        n, most = choices.pick((1, 1, 2, 3)), choices.pick((12, 1, 40))
        session = choices.pick((None, None, "a", "b", "c"))
        serving = self._client._brain.serving
        replica = choices.pick(serving) if session is None and serving and choices.chance(0.1) else None
        request = EngineCoreRequest(
            prompt_token_ids=[3 + choices.below(4)] * 3,
            params=_params(n) if session is not None else self._pinned(n),
            max_tokens=most,
            seed=mix(5, first),
            first_sequence_id=first,
        )
        for sequence_id in range(first, first + n):
            self._requests[sequence_id], self._tokens[sequence_id] = request, []
            self._least[sequence_id] = self._client.policy_version
        self._homes.opened(range(first, first + n), session)
        try:
            self._client.add_request(request, Route(session, replica))
        except RolloutEngineError as error:
            self.refuse(first, error)

    def _pinned(self, n: int) -> SamplingParams:
        """Parameters that may ask for a version: the newest that is known, one before or one to come."""
        choices = self._world.choices
        name = choices.pick((None, None, None, "policy_version", "min_policy_version"))
        if name is None:
            return _params(n)
        version = max(0, self._client.policy_version + choices.pick((0, 0, 1, 1, 2, -1)))
        return _params(n).clone(**{name: version, "version_wait": choices.pick(("wait", "wait", "refuse", "end"))})

    def abort_pinned(self) -> None:
        """Abort the sequences whose version may never come."""
        waiting = [id for id in self.open if is_pinned(self._requests[id].params)]
        self._aborted.update(waiting)
        self._client.abort(waiting)

    def abort(self) -> None:
        """Abort sequences, of which some have ended, and some are told twice."""
        if not self._tokens:
            return
        latest = list(self._tokens)[-8:]
        chosen = [self._world.choices.pick(latest) for _ in range(1 + self._world.choices.below(2))]
        self._aborted.update(chosen)
        self._client.abort(chosen)

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Check the outputs of a step."""
        version = outputs.policy_version
        for sequence_id, token in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            if sequence_id in self._refused:
                continue
            said, request = self._tokens[sequence_id], self._requests[sequence_id]
            assert not self.ends[sequence_id], f"sequence {sequence_id} has a token after its end"
            least = self._least[sequence_id]
            assert version >= least, f"a token of version {version}, asked for after the commit of {least} was noted"
            assert version not in self._world.refuted, f"a token of version {version}, whose update has failed"
            in_range = standing_of(request.params, version) == "in range"
            assert in_range, f"sequence {sequence_id} has a token of version {version}: {request.params}"
            seed = child_seed(request.seed, sequence_id - request.first_sequence_id)
            expected = spelled(seed, len(said), self._world.digests[version])
            assert token == expected, f"sequence {sequence_id}: token {len(said)} is not that of version {version}"
            said.append(token)
        for end in outputs.ended:
            if end.sequence_id in self._refused:
                continue
            said, most = self._tokens[end.sequence_id], self._requests[end.sequence_id].max_tokens
            is_so = {
                "stop": said[-1:] == [END_TOKEN],
                "length": len(said) == most,
                "abort": (end.sequence_id in self._aborted or self._is_past(end)) and not end.is_given_up,
            }
            assert is_so[end.finish_reason], f"sequence {end.sequence_id} ends by {end.finish_reason} behind {said}"
            self._end(end.sequence_id, end.finish_reason)

    def _is_past(self, end: SequenceEnd) -> bool:
        """Whether the end of a sequence is that of its version."""
        params = self._requests[end.sequence_id].params
        exact, newest = params.policy_version, max(self._world.digests)
        return end.error is not None and (params.version_wait == "end" or (exact is not None and exact < newest))

    def refuse(self, first_sequence_id: int, error: RolloutEngineError) -> None:
        """End what is left of a request that a replica did not take."""
        ids = [
            id
            for id, request in self._requests.items()
            if request.first_sequence_id == first_sequence_id and not self.ends[id]
        ]
        may_be = is_pinned(self._requests[first_sequence_id].params) or self._world.refused & {*ids}
        assert self.is_over or may_be, f"nobody has refused request {first_sequence_id}: {error}"
        self._refused.update(ids)
        for sequence_id in ids:
            self._end(sequence_id, "refused")

    def fail_all(self, error: EngineDeadError) -> None:
        """End everything."""
        self.is_over = True
        for sequence_id in self.open:
            self._end(sequence_id, "dead")

    @property
    def open(self) -> list[int]:
        """Sequences that have not ended."""
        return [sequence_id for sequence_id in self._tokens if not self.ends[sequence_id]]

    def _end(self, sequence_id: int, reason: str) -> None:
        self._world.note(f"sequence {sequence_id} ends: {reason}, {len(self._tokens[sequence_id])} tokens")
        self.ends[sequence_id] += 1
        self.reasons[reason] += 1
        assert self.ends[sequence_id] == 1, f"sequence {sequence_id} has ended twice"


class BrainDisasters:
    """What becomes of the replicas of a run."""

    def __init__(self, world: World, client: FleetClient) -> None:
        self._world, self._client = world, client

    def update(self) -> None:
        """Begin an update."""
        UpdateRound(self._world, self._client).begin()

    def strike(self) -> None:
        """Let one thing happen to a replica, or to the fleet."""
        name, strike = self._world.choices.pick(_DISASTERS)
        members = self._client._members
        if members:
            core = core_of(members[self._world.choices.pick(sorted(members))])
            self._world.count(name, core.name)
            strike(self, core)

    def _kill(self, core: BrainCore) -> None:
        core.kill()

    def _terminate(self, core: BrainCore) -> None:
        core.terminate()

    def _cut(self, core: BrainCore) -> None:
        core.cut()

    def _hang(self, core: BrainCore) -> None:
        core.freeze(self._world.choices.pick((2 * HANG_SECONDS, 0.3, 0.7 * HANG_SECONDS)))

    def _slow(self, core: BrainCore) -> None:
        core.step_seconds = self._world.choices.pick((0.5, 0.1, 0.02))

    def _partition(self, core: BrainCore) -> None:
        to_core, to_client = self._world.choices.pick(((True, True), (True, False), (False, True)))
        seconds = self._world.choices.pick((2 * HANG_SECONDS, 0.1, 1.0, 0.9 * HANG_SECONDS))
        core.hold(seconds, to_core=to_core, to_client=to_client)

    def _stall(self, core: BrainCore) -> None:
        self._world.stall(self._world.choices.pick((_PROVEN_SECONDS, 4000)))

    def _scale(self, core: BrainCore) -> None:
        try:
            self._client.scale(1 + self._world.choices.below(MAX_REPLICAS))
        except RolloutEngineError as error:
            self._world.note(f"scale: {type(error).__name__}")

    def _restart(self, core: BrainCore) -> None:
        restart_all(self._world, self._client, list(self._client._brain.wanted))


_DISASTERS: tuple[tuple[str, Callable[[BrainDisasters, BrainCore], None]], ...] = (
    *[("kill", BrainDisasters._kill)] * 3,
    *[("terminate", BrainDisasters._terminate)] * 1,
    *[("broken connection", BrainDisasters._cut)] * 2,
    *[("hang", BrainDisasters._hang)] * 2,
    *[("slow node", BrainDisasters._slow)] * 2,
    *[("partition", BrainDisasters._partition)] * 4,
    *[("clock", BrainDisasters._stall)] * 3,
    *[("scale", BrainDisasters._scale)] * 2,
    *[("restart", BrainDisasters._restart)] * 1,
)


def run_brain(world: World) -> BrainUsers:
    """A fleet and its users in a storm, then in calm. Inside `patched`. AssertionError where a promise is broken."""
    client = make_client(world)
    users, disasters = BrainUsers(world, client), BrainDisasters(world, client)
    acts = (*[users.add] * 8, *[users.abort] * 2, *[disasters.update] * 3, *[disasters.strike] * 7)
    num_acts = 20 + world.choices.below(60)

    def act(number: int) -> None:
        if number == num_acts or client.dead_error is not None:
            world.is_calm = True
            world.note("calm")
            users.abort_pinned()
            return
        world.choices.pick(acts)()
        world.later(world.choices.pick(_WAITS), act, number + 1)

    world.later(0.0, act, 0)
    world.events.run(lambda: world.events.num_done > _MAX_EVENTS)
    if world.events.num_done > _MAX_EVENTS:
        raise SimulationFailed(f"events never end; open: {users.open}")
    _check_rest(client, users)
    return users


def _check_rest(client: FleetClient, users: BrainUsers) -> None:
    """AssertionError unless everything has ended, and nothing is left."""
    brain = client._brain
    assert not users.open, f"these sequences never end: {users.open}"
    assert not client._updates.is_updating, "an update never ends"
    if client.dead_error is not None:
        assert users.is_over and not client._members, "a dead fleet has replicas"
        return
    states = {index: str(replica.state) for index, replica in brain.replicas.items()}
    assert set(states.values()) <= {"SYNCED", "DEAD"}, f"replicas never catch up: {states}"
    strayed = [each.problem for each in brain.replicas.values() if "which no update" in each.problem]
    assert not strayed, f"nobody but updates changes weights here: {strayed}"
    ledger, stats = brain.ledger, brain.balancer.stats
    assert not len(ledger) and not ledger._tokens and not ledger._pending and not brain._waiting, "requests are left"
    assert not any(ledger._foreign.values()), f"sequences are taken from replicas for ever: {ledger._foreign}"
    loads = {**stats.num_requests, **stats.num_kv_tokens}
    assert not any(stats.num_requests.values()) and not any(stats.num_kv_tokens.values()), f"loads are left: {loads}"
    for member in client._members.values():
        core = core_of(member)
        assert not core.is_gone and not core._sequences, f"core {core.name} is gone, or computes for nobody"
        assert core.weights == newest(client), f"core {core.name} serves {core.weights} and not {newest(client)}"


@cache
def _params(n: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=40, stop_token_ids=[END_TOKEN])
