"""The core's end of the socket, met by raw sockets: bad frames, strangers, readers that stop, an absent parent."""

import queue
import socket
import threading
import time

import msgspec
import numpy as np
import pytest

from rollout_engine.base.errors import RPCError
from rollout_engine.base.messages import EngineCoreOutputs, Pooled, PromptLogprobs, SequenceEnd
from rollout_engine.children.failure import Failure
from rollout_engine.children.values import pack, unpack
from rollout_engine.process.core_socket import CoreSocket
from rollout_engine.process.inbox import MAX_MESSAGES, ClientLeft, FromClient, Stop
from rollout_engine.process.wire import (
    MAX_FRAME_BYTES,
    MAX_STRUCT_BYTES,
    PROTOCOL,
    Abort,
    Call,
    Draining,
    Farewell,
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    Outputs,
    Refused,
    Rejected,
    Reply,
    Welcome,
)
from tests.faults.peers import READY, RawClient


class Core:
    """A `CoreSocket` with nobody behind it, and raw clients."""

    def __init__(self, directory):
        self.directory = directory
        self.parent, self.child = socket.socketpair()
        self.io = CoreSocket(directory, self.child, heartbeat_seconds=0.05, max_backlog_bytes=1 << 20)
        self.orphaned, self.clients = [], []
        self.io.start(lambda: READY, on_orphaned=lambda: self.orphaned.append(True))

    def client(self, **options):
        self.clients.append(RawClient(self.directory, **options))
        return self.clients[-1]

    def next(self):
        return self.io.inbox.get(timeout=60)

    def close(self):
        self.io.close("the test is over")
        for client in self.clients:
            client.close()
        self.parent.close()
        self.child.close()


@pytest.fixture
def core(tmp_path_factory):
    core = Core(tmp_path_factory.mktemp("io"))
    yield core
    core.close()


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_messages_reach_the_inbox_with_their_client(core):
    first, second = core.client(), core.client()
    second.say(Abort([7]))
    assert core.next() == FromClient(1, Abort([7]))
    first.say(Abort([8]))
    assert core.next() == FromClient(0, Abort([8]))
    assert core.io.stats.num_clients == 2


def test_what_was_on_its_way_when_its_client_left_is_no_strangers(core):
    client = core.client()
    for _ in range(
        MAX_MESSAGES + 54
    ):  # more than the core takes while nobody reads its inbox, less than its socket takes
        client.say(Abort([7]))
    client.send([b"\xc1"])
    client.say(Goodbye())
    wait_until(lambda: core.io.inbox.is_full)
    client.close(linger=60)
    wait_until(lambda: not core.io.stats.num_clients)  # a heartbeat finds nobody
    assert core.io.stats.num_rejected == 0
    while not isinstance(core.next(), ClientLeft):
        pass
    wait_until(lambda: core.io.stats.num_rejected)  # the rest is read in order
    core.client().say(Abort([8]))
    assert core.next().client_index == 1, "the rest has been read"
    assert core.io.stats.num_rejected == 1, "the bad one alone"
    assert core.io.inbox.qsize() == 0


def test_a_flood_is_held_back_and_lets_others_through(core):
    flooder, bystander = core.client(), core.client()
    flood = threading.Thread(target=lambda: [flooder.say(Abort([7])) for _ in range(5000)])
    flood.start()
    wait_until(lambda: core.io.inbox.is_full)
    bystander.say(Abort([8]))
    taken = [core.next()]
    while taken[-1].client_index == 0 and len(taken) < 4500:  # by then no flood fills the inbox any more
        wait_until(lambda: core.io.inbox.is_full)
        taken.append(core.next())
    assert taken[-1] == FromClient(1, Abort([8])), "it waited for a flood that was there before it"
    for _ in range(5001 - len(taken)):
        assert core.next().client_index == 0
        assert core.io.inbox.qsize() <= MAX_MESSAGES
    flood.join()


def test_an_abort_of_many_sequences_comes_in_parts(core):
    client, ids = core.client(), list(range(10_000))
    client.say(Abort(ids))
    parts = [core.next().message.sequence_ids for _ in range(3)]
    assert sum(parts, []) == ids and max(map(len, parts)) == 4096
    assert core.io.inbox.qsize() == 0


def test_bad_frames_are_rejected_and_counted_and_everything_goes_on(core):
    bad, good = core.client(), core.client()
    for i in range(300):
        bad.send([b"\xc1" * (i % 7), b"x"][: 1 + i % 2])
    for _ in range(300):
        assert isinstance(bad.hear(), Rejected)
    good.say(Abort([7]))
    bad.say(Abort([8]))
    assert {core.next().client_index, core.next().client_index} == {0, 1}
    assert core.io.stats.num_rejected == 300


def test_strangers_and_second_hellos_are_rejected(core):
    stranger = core.client(hello=False)
    stranger.say(Abort([7]))
    assert "hello" in stranger.hear().reason
    stranger.say(Hello(PROTOCOL))
    assert isinstance(stranger.hear(), Welcome)
    stranger.say(Hello(PROTOCOL))
    assert "hello" in stranger.hear().reason
    with pytest.raises(queue.Empty):
        core.io.inbox.get(timeout=0.1)


def test_every_client_is_told_of_a_drain_before_refusals_and_new_ones_are_turned_away(core):
    clients = [core.client(), core.client()]
    core.io.drain("it is told to end")
    core.io.send(0, Refused(7, Failure("RetryableError", "no")))
    assert [client.hear() for client in clients] == [Draining("it is told to end")] * 2
    assert isinstance(clients[0].hear(), Refused)
    late = core.client(hello=False)
    late.say(Hello(PROTOCOL))
    farewell = late.hear()
    assert isinstance(farewell, Farewell) and "about to end (it is told to end)" in farewell.reason
    clients[1].say(Abort([7]))
    assert core.next().client_index == 1, "those that it has are served on"


def test_another_protocol_is_told_so(core):
    client = core.client(hello=False)
    client.say(Hello(PROTOCOL + 1))
    assert f"protocol {PROTOCOL}" in client.hear().reason


def test_a_struct_that_is_too_long_is_rejected_and_its_client_stays(core):
    client = core.client()
    client.send([bytes(MAX_STRUCT_BYTES + 1)])
    assert f"at most {MAX_STRUCT_BYTES} bytes beside its arrays" in client.hear().reason
    client.send([b"\xc1"] * 5000)
    assert "at most 64 frames" in client.hear().reason
    client.say(Abort([7]))
    assert core.next() == FromClient(0, Abort([7]))


def test_a_message_of_66_mib_arrives_in_parts_while_others_are_heard(core):
    large, other = core.client(), core.client()
    arguments = pack({"x": np.arange(33 << 18)})
    for number in range(3):
        large.say(Call(number, "score", arguments.body, arguments.arrays))
        other.say(Abort([number]))
    received = [core.next() for _ in range(6)]
    calls = [each.message for each in received if each.client_index == 0]
    assert [call.number for call in calls] == [0, 1, 2]
    assert np.array_equal(unpack(calls[2].arguments, calls[2].arrays)["x"], np.arange(33 << 18))
    assert [each.message for each in received if each.client_index == 1] == [Abort([number]) for number in range(3)]


def test_a_result_of_66_mib_reaches_its_client_in_parts_and_heartbeats_go_on(core):
    large, other = core.client(), core.client()
    result = pack(np.arange(33 << 18))
    core.io.send(0, Reply(1, result.body, arrays=result.arrays))
    assert isinstance(other.hear(skip=()), Heartbeat)
    received = large.hear()
    assert np.array_equal(unpack(received.result, received.arrays), np.arange(33 << 18))
    assert isinstance(large.hear(skip=()), Heartbeat)


def test_a_result_that_its_client_would_not_take_fails_that_call_alone(core):
    client = core.client(limits=Limits(message_bytes=1 << 16))
    result = pack(np.zeros(100_000, np.uint8))
    for number, reply in enumerate((Reply(0), Reply(1, result.body, arrays=result.arrays), Reply(2))):
        core.io.send(0, reply)
        received = client.hear()
        assert received.number == number and (received.failure is not None) == (number == 1)
        if received.failure is not None:
            error = received.failure.as_error("score")
            assert isinstance(error, RPCError) and str(error).startswith("score: ") and "may take 65536" in str(error)


def test_results_of_pooling_that_are_too_long_for_one_message_come_no_later_than_their_ends(core):
    client = core.client(limits=Limits(struct_bytes=1 << 12, message_bytes=1 << 16))
    ends = [SequenceEnd(number, "stop") for number in range(40)]
    pooled = {number: Pooled(np.full(1000, number, np.float32), 3) for number in range(40)}
    rows = [*range(100, 1600)]
    core.io.send(0, Outputs([EngineCoreOutputs(0, rows, rows, rows, ended=ends, pooled=pooled)]))
    core.io.send(0, Outputs([EngineCoreOutputs(2, [9], [9], [9])]))
    come, steps = set(), []
    while not steps or steps[-1].policy_version != 2:
        steps += client.hear().steps
    for step in steps:
        assert all(result.data.tolist() == [number] * 1000 for number, result in step.pooled.items())
        come |= step.pooled.keys()
        assert come >= {end.sequence_id for end in step.ended}
    assert come == set(range(40)) and [end for step in steps for end in step.ended] == ends


def test_outputs_that_are_too_long_for_one_message_arrive_in_several(core):
    client = core.client(limits=Limits(struct_bytes=1 << 12, message_bytes=1 << 16))
    ids = [*range(3000)]
    ends = [SequenceEnd(number, "length") for number in ids]
    logprobs = {number: PromptLogprobs(np.full(1000, number, np.float32)) for number in range(50)}
    step = EngineCoreOutputs(0, ids, ids, ids, ended=ends, prompt_logprobs=logprobs, num_cached_tokens={5: 1})
    core.io.send(0, Outputs([EngineCoreOutputs(1, [9], [9], [9]), step]))
    core.io.send(0, Outputs([EngineCoreOutputs(2, [9], [9], [9])]))
    received, steps = [], []
    while not steps or steps[-1].policy_version != 2:
        received.append(client.hear())
        steps += received[-1].steps
    assert [message.number for message in received] == [*range(len(received))] and len(received) > 60
    first, *parts, _ = steps
    assert first.policy_version == 1
    for name in ("sequence_ids", "token_ids", "kv_min_versions"):
        assert [each for part in parts for each in getattr(part, name)] == ids
    assert [each for part in parts for each in part.ended] == ends
    assert {k: v.logprobs[0] for part in parts for k, v in part.prompt_logprobs.items()} == {k: k for k in range(50)}
    begun = next(i for i, part in enumerate(parts) if part.sequence_ids)
    assert sum(len(part.prompt_logprobs) for part in parts[: begun + 1]) == 50, "they come with the first tokens"
    assert {5: 1} in [part.num_cached_tokens for part in parts[: begun + 1]]


def test_a_message_that_cannot_be_sent_at_all_ends_its_client_alone(core):
    client, other = core.client(limits=Limits(message_bytes=1 << 12)), core.client()
    core.io.send(0, Outputs([EngineCoreOutputs(0, prompt_logprobs={0: PromptLogprobs(np.zeros(2000, np.float32))})]))
    assert "is too long" in client.hear().reason
    assert core.next() == ClientLeft(0)
    other.say(Abort([7]))
    assert core.next() == FromClient(1, Abort([7]))


def test_an_oversized_frame_ends_only_its_own_connection(core):
    bad, good = core.client(), core.client()
    bad.send([bytes(MAX_FRAME_BYTES + 1)])
    good.say(Abort([7]))
    left = {type(core.next()), type(core.next())}
    assert left == {FromClient, ClientLeft}


def test_a_client_that_stops_reading_is_cut_off_within_bounds_and_told_why(core):
    slow, good = core.client(receive_limit=1), core.client()
    body, arrays = pack([np.zeros(100_000, np.uint8)])
    for number in range(400):
        core.io.send(0, Reply(number, body, arrays=arrays))
        core.io.send(1, Reply(number, body, arrays=arrays))
        assert good.hear().number == number
    assert core.next() == ClientLeft(0)
    assert core.io.stats.num_clients_cut_off == 1
    while not isinstance(message := slow.hear(), Farewell):
        pass
    assert "stopped reading" in message.reason


def test_clients_that_leave_or_vanish_are_noticed(core):
    polite, rude = core.client(), core.client()
    polite.say(Goodbye())
    assert core.next() == ClientLeft(0)
    rude.close()
    assert core.next() == ClientLeft(1)  # found by its heartbeat
    core.io.send(1, Reply(0))


def test_a_silent_core_gives_signs_of_life(core):
    client = core.client()
    for _ in range(4):
        assert isinstance(client.hear(skip=()), Heartbeat)


def test_an_absent_parent_stops_the_loop_and_then_the_process(core):
    core.parent.close()
    assert isinstance(core.next(), Stop)
    wait_until(lambda: core.orphaned, seconds=5)


def test_everybody_hears_the_farewell(core, tmp_path):
    clients = [core.client() for _ in range(3)]
    core.io.close("that was all")
    assert [client.hear().reason for client in clients] == ["that was all"] * 3
    core.io = CoreSocket(tmp_path, core.child, heartbeat_seconds=1, max_backlog_bytes=1)
    core.io.start(lambda: READY, on_orphaned=lambda: None)


def test_a_thousand_mutated_frames_leave_the_thread_alive(core):
    client = core.client()
    body = msgspec.msgpack.encode(Abort([7]))
    for i in range(1000):
        client.send([body[: i % len(body)] + bytes([i % 256]), body][: 1 + (i % 3 == 0)])
    client.say(Abort([99]))
    while core.next().message.sequence_ids != [99]:
        pass
    assert core.io.stats.num_rejected > 900
