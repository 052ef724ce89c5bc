"""A client's end of the socket, over a real core's end with nobody behind it."""

import queue
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_engine.base.errors import RequestError, RPCError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, PromptLogprobs
from rollout_engine.base.sampling_params import MAX_PROMPT_LOGPROB_VALUES, SamplingParams
from rollout_engine.process import client_socket
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_socket import CoreSocket
from rollout_engine.process.process_client import ProcessClient
from rollout_engine.process.wire import Limits, Outputs
from tests.faults.peers import READY


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path)


@pytest.fixture
def core(directory):
    parent, child = socket.socketpair()
    with parent, child:
        io = CoreSocket(directory, child, heartbeat_seconds=60.0, max_backlog_bytes=1 << 20)
        io.start(lambda: READY, on_orphaned=lambda: None)
        yield io


def test_what_a_core_sent_before_it_ended_is_heard_by_a_client_that_was_late(core, directory, monkeypatch):
    numbers, deaths, dead = [], [], threading.Event()
    standing, go_on = threading.Event(), threading.Event()

    def stand_still():  # as on a machine that has no time for this thread
        standing.set()
        go_on.wait(60)

    client = ClientSocket.connect(directory, hang_seconds=60)
    client.wait_welcome()
    client.listen(
        lambda outputs: numbers.append(outputs.steps[0].policy_version),
        lambda error: (deaths.append(str(error)), dead.set()),
    )
    monkeypatch.setattr(client, "_send_outbox", stand_still)
    assert standing.wait(60)
    for number in range(20):
        core.send(0, Outputs([EngineCoreOutputs(number)]))
    core.close("the test ends it")
    assert client._link.monitor.poll(60_000), "the connection is lost, and what came before that has come"
    time.sleep(0.2)  # for zmq to act on it
    go_on.set()
    assert dead.wait(60)
    client.close()
    assert numbers == list(range(20))
    assert len(deaths) == 1 and "the test ends it" in deaths[0]


def test_how_a_core_ended_is_told_though_its_status_comes_after_its_silence(core, directory, monkeypatch):
    class Process:
        """Its files are closed, and the kernel is not done with it."""

        def __init__(self, lifeline):
            self.directory, self.lifeline, self.gone = directory, SimpleNamespace(socket=lifeline), threading.Event()

        def wait(self, seconds):
            return -9 if self.gone.wait(seconds) else None

        def keep_stacks(self, *, abort):
            return ""

        def end(self, *, kill):
            self.gone.set()

    monkeypatch.setattr(client_socket, "_DISCONNECT_SECONDS", 0.01)  # its connection does not end with it
    ours, theirs = socket.socketpair()
    process, deaths, dead = Process(ours), [], threading.Event()
    with ours:
        client = ClientSocket.start(process, hang_seconds=600)
        client.wait_welcome()
        client.listen(lambda _: None, lambda error: (deaths.append(str(error)), dead.set()))
        theirs.close()
        threading.Timer(0.3, process.gone.set).start()
        assert dead.wait(60)
        core.close("the test ends it")
        client.close()
    assert len(deaths) == 1 and "ended with status -9" in deaths[0]


def test_outputs_of_600_requests_with_log_probs_of_their_prompts_reach_their_client(core, directory):
    heard, client = queue.SimpleQueue(), ClientSocket.connect(directory, hang_seconds=60)
    client.wait_welcome()
    client.listen(heard.put, heard.put)
    arrays = np.zeros((20, 64), np.int32), np.zeros((20, 64), np.float32)
    logprobs = {number: PromptLogprobs(np.full(20, number, np.float32), arrays) for number in range(600)}
    core.send(0, Outputs([EngineCoreOutputs(0, prompt_logprobs=logprobs)]))
    [step] = heard.get(timeout=60).steps
    assert [values.logprobs[7] for values in step.prompt_logprobs.values()] == [*range(600)]
    client.close()
    core.close("the test ends it")


def test_the_longest_log_probs_of_a_prompt_reach_a_client_that_reads(core, directory):
    heard, client = queue.SimpleQueue(), ClientSocket.connect(directory, hang_seconds=60)
    client.wait_welcome()
    client.listen(heard.put, heard.put)
    shape = MAX_PROMPT_LOGPROB_VALUES // 1024, 1024
    top = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    found = PromptLogprobs(np.zeros(shape[0], np.float32), top, np.full(shape[0], 9, np.int32))
    core.send(0, Outputs([EngineCoreOutputs(0, prompt_logprobs={0: found})]))
    core.send(0, Outputs([EngineCoreOutputs(1)]))
    [first], [second] = (heard.get(timeout=60).steps for _ in range(2))
    assert first.prompt_logprobs[0].top_logprobs[0].shape == shape and first.prompt_logprobs[0].ranks[-1] == 9
    assert second.policy_version == 1
    client.close()
    core.close("the test ends it")


@pytest.mark.parametrize("asked", [-1, 5])
def test_log_probs_of_a_prompt_that_would_be_too_long_are_refused_before_they_are_computed(
    core, directory, monkeypatch, asked
):
    monkeypatch.setattr(client_socket, "_LIMITS", Limits(message_bytes=1 << 17))
    client = ProcessClient(ClientSocket.connect(directory, hang_seconds=60))
    refused = queue.SimpleQueue()
    client.listen(SimpleNamespace(refuse=lambda *refusal: refused.put(refusal), fail_all=lambda _: None))
    params = SamplingParams(prompt_logprobs=asked)
    width = READY.info.vocab_size if asked == -1 else asked
    for first, num_tokens in enumerate((64, 4000)):
        prompt = [0] * num_tokens
        request = EngineCoreRequest(
            prompt_token_ids=prompt, params=params, max_tokens=1, seed=1, first_sequence_id=first
        )
        client.add_request(request)
    first, error = refused.get(timeout=60)
    assert first == 1 and isinstance(error, RequestError)
    num_bytes = 4000 * (8 + 8 * width) + (1 << 16)
    assert f"prompt_logprobs={asked} of 4000 tokens take {num_bytes} bytes, and a message may take 131072" in str(error)
    assert core.inbox.get(timeout=60).message.request.first_sequence_id == 0
    client.shutdown()
    core.close("the test ends it")


def test_a_client_sends_no_more_than_the_core_takes_and_fails_that_call_or_request_alone(core, directory):
    client = ProcessClient(ClientSocket.connect(directory, hang_seconds=60))
    refused = queue.SimpleQueue()
    client.listen(SimpleNamespace(refuse=lambda *refusal: refused.put(refusal), fail_all=lambda _: None))
    client._socket.limits = Limits(struct_bytes=1 << 12, message_bytes=1 << 20)
    for arguments in ({"x": np.zeros(1 << 20)}, {"x": {str(i): None for i in range(1000)}}):
        with pytest.raises(RequestError, match=r"^score: an argument cannot be sent .*: it takes \d+ and may take \d+"):
            client.call("score", arguments)
        with pytest.raises(RPCError, match=r"^collective_rpc: m: it takes \d+ and may take \d+"):
            client.call("collective_rpc", dict(method="m", timeout=None, args=[arguments], kwargs={}))
    params = SamplingParams(extra_args={"x": "y" * 8000})
    request = EngineCoreRequest(prompt_token_ids=[1], params=params, max_tokens=1, seed=1, first_sequence_id=5)
    client.add_request(request)
    first, error = refused.get(timeout=60)
    assert first == 5 and isinstance(error, RequestError) and "it takes" in str(error)
    client.abort([*range(50_000)])
    calls = [core.inbox.get(timeout=60).message for _ in range(50)]
    assert [number for abort in calls for number in abort.sequence_ids] == [*range(50_000)]
    client.shutdown()
    core.close("the test ends it")
