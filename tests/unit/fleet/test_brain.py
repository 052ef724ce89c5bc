"""Random fleets: whatever is killed, missed, aborted or scaled, each sample ends once and with its own tokens."""

import random
from collections import Counter

import pytest

from rollout_engine import SamplingParams
from rollout_engine.fleet.actions import Abort, CatchUp, Fail, Send, Start, Stop, Tell
from rollout_engine.fleet.balancer import Balancer
from rollout_engine.fleet.brain import Brain
from rollout_engine.fleet.replica_state import ReplicaState
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.seeds import child_seed, mix

END = 7
"""Token that ends a sequence."""


def token(seed, position, version):
    """The token that a sequence has at a position under weights of a version."""
    return mix(mix(seed, position), version) % 50


class Engine:
    """A replica's engine: a few of its sequences get a token at a time."""

    def __init__(self, version):
        self.version = version
        self.sequences = {}
        """Sequence id -> [seed, tokens, most tokens]."""

    def add(self, request):
        for index in range(request.params.n):
            row = [child_seed(request.seed, index), list(request.output_token_ids), request.max_tokens]
            self.sequences[request.first_sequence_id + index] = row

    def abort(self, ids):
        return [SequenceEnd(id, "abort") for id in ids if self.sequences.pop(id, None)]

    def give_up(self):
        return [SequenceEnd(id, "abort", is_given_up=True) for id in self.sequences]

    def step(self, choose):
        outputs = EngineCoreOutputs(self.version)
        for id in [id for id in self.sequences if choose.random() < 0.7]:
            seed, tokens, most = self.sequences[id]
            tokens.append(token(seed, len(tokens), self.version))
            outputs.sequence_ids.append(id)
            outputs.token_ids.append(tokens[-1])
            if tokens[-1] == END or len(tokens) == most:
                outputs.ended.append(SequenceEnd(id, "stop" if tokens[-1] == END else "length"))
                del self.sequences[id]
        return outputs


class SimulatedFleet:
    """A brain and the engines that it decides about, under faults that a seed chooses."""

    def __init__(self, seed):
        self.choose = random.Random(seed)
        self.brain, self.now = Brain(Balancer(), 3), 0.0
        self.engines, self.later, self.on_their_way = {}, [], []
        self.requests, self.tokens, self.ends, self.aborted = {}, {}, Counter(), set()
        self.is_failed = False
        for index in range(3):
            self.later.append(Start(index, 0.0))

    def do(self, actions):
        for action in actions:
            match action:
                case Start() | CatchUp():
                    self.later.append(action)
                case Send(index, request):
                    self.engines[index].add(request)
                case Abort(index, ids):
                    self.on_their_way.append((index, EngineCoreOutputs(0, ended=self.engines[index].abort(ids))))
                case Tell(ended):
                    self.take(EngineCoreOutputs(0, ended=ended))
                case Stop(index):
                    del self.engines[index]
                    self.on_their_way = [each for each in self.on_their_way if each[0] != index]
                case Fail():
                    self.is_failed = True
        self.brain.check_integrity()

    def take(self, outputs):
        for id, token_id in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            assert not self.ends[id], f"sequence {id} has a token after its end"
            self.tokens[id].append((token_id, outputs.policy_version))
        for end in outputs.ended:
            self.ends[end.sequence_id] += 1
            assert end.finish_reason != "abort" or end.sequence_id in self.aborted, end

    def run_later(self):
        due = [action for action in self.later if action.at <= self.now]
        self.later = [action for action in self.later if action.at > self.now]
        for action in due:
            index = action.replica
            if isinstance(action, Start):
                if self.choose.random() < 0.2:
                    self.do(self.brain.lost(index, "it did not start", self.now))
                else:
                    self.engines[index] = Engine(0)
                    self.do(self.brain.started(index, 0, self.now))
            elif index in self.engines and self.choose.random() < 0.2:
                self.do(self.brain.missed(index, "the disk is full", self.now))
            elif index in self.engines:
                self.engines[index].version = self.brain.policy_version
                self.do(self.brain.has_weights(index, self.brain.policy_version, self.now))

    def deliver(self, index, outputs):
        if index in self.engines:
            actions = self.brain.received(index, outputs)
            self.take(outputs)
            self.do(actions)

    def add(self):
        number, n = len(self.requests), self.choose.randint(1, 3)
        first = sum(request.params.n for request in self.requests.values())
        params = SamplingParams(n=n, max_tokens=20, stop_token_ids=[END])
        request = EngineCoreRequest(
            prompt_token_ids=[3 + number % 4] * 9,
            params=params,
            max_tokens=20,
            seed=mix(5, number),
            first_sequence_id=first,
        )
        self.requests[number] = request
        self.tokens |= {first + index: [] for index in range(n)}
        self.do(self.brain.added(request))

    def abort(self):
        if self.tokens:
            id = self.choose.choice(list(self.tokens))
            self.aborted.add(id)
            self.do(self.brain.aborted([id]))

    def kill(self):
        if self.engines:
            index = self.choose.choice(list(self.engines))
            engine = self.engines.pop(index)
            # some of what it has said is still read; all of the rest is lost
            said = [each for each in self.on_their_way if each[0] == index]
            self.on_their_way = [each for each in self.on_their_way if each[0] != index]
            read = said[: self.choose.randint(0, len(said))]
            if read == said:  # it was told to end, and has done so in order
                read = [*said, (index, EngineCoreOutputs(0, ended=engine.give_up()))]
            for _, outputs in read:
                actions = self.brain.received(index, outputs)
                self.take(outputs)
                self.do([action for action in actions if not isinstance(action, Stop)])
            self.do(self.brain.lost(index, "killed", self.now))

    def update(self):
        living = self.brain.living
        took = [index for index in living if self.choose.random() < 0.8]
        if took:
            version = self.brain.policy_version + 1
            for index in took:
                self.engines[index].version = version
            self.do(self.brain.committed(took, version, self.now))

    def scale(self):
        self.do(self.brain.scaled(self.choose.randint(1, 4), self.now))

    def restart(self):
        self.do(self.brain.restarted(self.choose.choice(list(self.brain.replicas)), self.now))

    def turn(self):
        self.now += self.choose.choice((0.1, 1.0, 70.0))
        self.run_later()
        for index, engine in list(self.engines.items()):
            self.on_their_way.append((index, engine.step(self.choose)))
        for _ in range(self.choose.randint(0, len(self.on_their_way))):
            if self.on_their_way:  # else a replica was stopped meanwhile
                self.deliver(*self.on_their_way.pop(0))

    def run(self, num_turns=60):
        faults = [self.add] * 8 + [self.abort, self.kill, self.update, self.scale, self.restart]
        for _ in range(num_turns):
            self.choose.choice(faults)()
            self.turn()
        for _ in range(2000):
            if self.is_failed or not len(self.brain.ledger):
                break
            self.now += 100.0
            self.turn()


@pytest.mark.parametrize("seed", range(100))
def test_every_sample_ends_once_and_each_token_is_the_one_of_its_version(seed):
    fleet = SimulatedFleet(seed)
    fleet.run()
    if fleet.is_failed:
        assert all(replica.state is ReplicaState.DEAD for replica in fleet.brain.replicas.values())
        return
    assert fleet.ends == Counter(list(fleet.tokens))
    for request in fleet.requests.values():
        for index in range(request.params.n):
            id, seed = request.first_sequence_id + index, child_seed(request.seed, index)
            said = fleet.tokens[id]
            assert [each for each, _ in said] == [token(seed, i, version) for i, (_, version) in enumerate(said)]
            complete = said and (said[-1][0] == END or len(said) == request.max_tokens)
            assert complete or id in fleet.aborted
    fleet.brain.balancer.check_integrity()


def test_without_a_replica_requests_wait_and_with_none_left_they_fail():
    brain = Brain(Balancer(), 1)
    request = EngineCoreRequest(
        prompt_token_ids=[3], params=SamplingParams(), max_tokens=5, seed=1, first_sequence_id=0
    )
    assert brain.added(request) == []
    assert brain.started(0, 0, 0.0) == [Send(0, request)]
    now, actions = 0.0, brain.lost(0, "killed", 0.0)
    waits = []
    while isinstance(actions[0], Start):
        waits.append(actions[0].at - now)
        now = actions[0].at
        actions = brain.lost(0, "no memory", now)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert isinstance(actions[0], Fail) and "replica 0: no memory" in actions[0].reason


def test_a_replica_that_has_served_for_long_is_started_at_once_again():
    brain = Brain(Balancer(), 2)
    now = 0.0
    for _ in range(50):
        for index in range(2):
            brain.started(index, 0, now)
        now += 100.0
        for index in range(2):
            assert brain.lost(index, "killed", now) == [Start(index, now)]
