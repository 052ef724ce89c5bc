"""Open requests of a core elsewhere: what arrives is kept for its reader, and reading never blocks the loop."""

import asyncio
import threading

import msgspec
import numpy as np
import pytest

from rollout_engine.base.errors import EngineDeadError, RequestError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, IdLogprobs, SequenceEnd
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.faces.loop_waker import LoopWaker
from rollout_engine.process.client_routing import slices
from rollout_engine.results.open_streams import OpenStreams


def request(number, **params):
    params = SamplingParams(**params)
    return EngineCoreRequest(prompt_token_ids=[3], params=params, max_tokens=9, seed=0, first_sequence_id=number)


def add(streams, number, wake=lambda stream: None, **params):
    return streams.add(f"r{number}", request(number, **params), None, wake)


def step(numbers, token_id, *, ended=()):
    ends = [SequenceEnd(number, "length") for number in ended]
    return EngineCoreOutputs(1, list(numbers), [token_id] * len(numbers), [1] * len(numbers), ended=ends)


def deliver_slices(streams, outputs):
    for part in slices(outputs):
        streams.deliver(part)


@pytest.fixture
def streams():
    aborted = []
    streams = OpenStreams(None, aborted.extend)
    streams.aborted = aborted
    return streams


def test_a_reader_gets_what_has_gathered_then_nothing_then_the_end(streams):
    woken = []
    stream = add(streams, 0, woken.append, output_kind="delta")
    assert streams.take(stream) is None
    for token_id in (5, 6):
        streams.deliver(step([0], token_id))
    assert streams.take(stream).outputs[0].token_ids == [5, 6]
    assert streams.take(stream) is None
    streams.deliver(step([0], 7, ended=[0]))
    last = streams.take(stream)
    assert last.finished and last.outputs[0].token_ids == [7]
    assert woken == [stream] * 3 and len(streams) == 0
    streams.close(stream)
    assert streams.aborted == []


def test_steps_that_arrive_together_are_taken_in_order_and_timed_apart(streams):
    stream = add(streams, 0, output_kind="final_only")
    parts = [step([0], 5), step([0], 6), step([0], 7, ended=[0])]
    for part, start in zip(parts, (1.0, 1.25, 1.75), strict=True):
        part.start_time = start
        streams.deliver(part)
    assert streams.take(stream).outputs[0].token_ids == [5, 6, 7]
    assert (streams.stats.inter_token_seconds.count, streams.stats.inter_token_seconds.sum) == (2, 0.75)


def test_a_stream_that_is_closed_early_is_aborted_once_and_hears_no_more(streams):
    stream = add(streams, 0)
    streams.close(stream)
    streams.close(stream)
    streams.deliver(step([0], 5, ended=[0]))
    assert streams.aborted == [0] and len(streams) == 0


def test_a_reader_hears_of_a_stop_string_after_the_core_did(codec):
    told = []
    streams = OpenStreams(codec, told.append)
    stream = add(streams, 0, lambda _: told.append("reader"), stop=["F"])
    streams.deliver(step([0], *codec.encode("F")))
    assert told == [[0], "reader"]
    assert streams.take(stream).outputs[0].finish_reason == "stop" and "r0" not in streams


def test_a_new_request_under_the_id_of_one_before_gets_none_of_its_news(streams):
    first = add(streams, 0)
    streams.close(first)
    second = streams.add("r0", msgspec.structs.replace(request(0), first_sequence_id=7), None, lambda _: None)
    streams.deliver(step([0], 5, ended=[0]))
    streams.deliver(step([7], 6, ended=[7]))
    streams.refuse(0, RequestError.for_field("n", 0, "at least 1"))
    assert streams.take(first) is None
    assert streams.take(second).outputs[0].token_ids == [6]


def test_death_reaches_every_stream_after_what_it_still_had(streams):
    first, second, done = (add(streams, number) for number in range(3))
    streams.deliver(step([0, 2], 5, ended=[2]))
    streams.fail_all(EngineDeadError("gone"))
    assert streams.take(first).outputs[0].token_ids == [5]
    assert streams.take(done).finished
    errors = []
    for stream in (first, second):
        with pytest.raises(EngineDeadError, match="gone") as raised:
            streams.take(stream)
        errors.append(raised.value)
        streams.close(stream)
    assert errors[0] is not errors[1] and streams.aborted == [] and len(streams) == 0


def test_a_refused_request_raises_why_and_others_go_on(streams):
    refused, other = add(streams, 0), add(streams, 1)
    streams.refuse(0, RequestError.for_field("n", 0, "at least 1"))
    with pytest.raises(RequestError, match="n=0"):
        streams.take(refused)
    assert streams.take(other) is None


def test_ten_thousand_streams_leave_the_loop_free(streams):
    """Other work of the loop waits for a few readers, never for all."""
    count, steps = 10_000, 4
    served = set()

    async def read(number):
        waker, event = LoopWaker.of(asyncio.get_running_loop()), asyncio.Event()
        stream = add(streams, number, lambda _: waker.wake(event), output_kind="delta")
        tokens = []
        while True:
            event.clear()
            output = streams.take(stream)
            if output is None:
                await event.wait()
                continue
            served.add(number)
            tokens += output.outputs[0].token_ids
            if output.finished:
                return tokens

    async def run():
        readers, most = [asyncio.create_task(read(number)) for number in range(count)], 0
        while len(streams) < count:
            await asyncio.sleep(0)
        core = threading.Thread(target=deliver)
        core.start()
        while not all(reader.done() for reader in readers):
            served.clear()
            await asyncio.sleep(0)
            most = max(most, len(served))
        core.join()
        assert all(reader.result() == list(range(steps)) for reader in readers)
        return most

    def deliver():
        for token_id in range(steps):
            deliver_slices(streams, step(range(count), token_id, ended=range(count) if token_id == steps - 1 else ()))

    assert 0 < asyncio.run(run()) <= 64


def test_many_tokens_of_one_step_keep_their_ranks_and_log_probs_of_ids(streams):
    asked = dict(logprobs=2, logprob_token_ids=[7])
    opened = {number: add(streams, number, **(asked if number % 2 else {})) for number in range(1500)}
    outputs = step(range(1500), 5, ended=range(1500))
    outputs.logprobs = [0.0] * 1500
    outputs.top_logprobs = np.zeros((1500, 2), np.int32), np.zeros((1500, 2), np.float32)
    outputs.sampled_ranks = np.arange(1500, dtype=np.int32)
    outputs.id_logprobs = IdLogprobs.of({n: np.float32([-n]) for n in range(1, 1500, 2)})
    deliver_slices(streams, outputs)
    for number, stream in opened.items():
        sample = streams.take(stream).outputs[0]
        if number % 2:
            assert sample.sampled_ranks.tolist() == [number]
            assert sample.token_id_logprobs.tolist() == [[-number]]
        else:
            assert sample.sampled_ranks is sample.token_id_logprobs is None


def tables_of(streams):
    """Everything that is kept of requests."""
    processor, timer = streams._processor, streams._processor._timer
    timed = timer._last_token.keys() | timer._of_last_step[0]
    tables = (streams._streams, processor._requests, processor._owners, processor._live, timed)
    return [len(table) for table in tables]


def test_a_stream_that_its_reader_forgets_is_aborted_and_nothing_is_kept_of_it(streams):
    kept, dropped = add(streams, 0), [add(streams, number, n=2) for number in range(2, 4000, 2)]
    streams.deliver(step([0, *range(2, 4000)], 5))
    assert tables_of(streams)[-1] == 3999
    del dropped
    streams.deliver(step([0, *range(2, 4000)], 6))
    assert sorted(streams.aborted) == list(range(2, 4000))
    streams.deliver(step([0], 7, ended=range(2, 4000)))  # their ends, as the core says them
    assert tables_of(streams) == [1] * 5
    assert streams.take(kept).outputs[0].token_ids == [5, 6, 7]


@pytest.mark.parametrize("look", [len, OpenStreams.has_live, lambda streams: "r0" in streams])
def test_a_forgotten_stream_is_aborted_when_somebody_looks(streams, look):
    add(streams, 0)
    assert streams.aborted == []
    look(streams)
    assert streams.aborted == [0] and "r0" not in streams


def test_a_stream_may_be_forgotten_while_outputs_are_delivered(streams):
    """The garbage collector runs anywhere, even inside the lock."""
    held = [add(streams, number) for number in range(4)]
    update = streams._processor.update

    def update_and_forget(outputs):
        held.clear()
        return update(outputs)

    streams._processor.update = update_and_forget
    streams.deliver(step(range(4), 5))
    streams.deliver(step(range(4), 6))
    assert sorted(streams.aborted) == [0, 1, 2, 3] and len(streams) == 0


def test_a_stream_that_ended_before_it_was_forgotten_is_forgotten_too(streams):
    ended = add(streams, 0)
    streams.deliver(step([0], 5, ended=[0]))
    del ended
    assert len(streams) == 0 and tables_of(streams) == [0] * 5


def test_a_waker_tells_when_its_loop_is_closed():
    loop, event = asyncio.new_event_loop(), asyncio.Event()
    waker = LoopWaker.of(loop)
    assert waker.wake(event)
    loop.close()
    assert not waker.wake(event) and not waker.wake(event)


def test_tokens_of_a_request_that_nobody_reads_leave_no_time_behind(streams):
    """Its end may come before them: aborted between two outputs, in process."""
    closed = add(streams, 0)
    streams.close(closed)
    streams.deliver(step([], 5, ended=[0]))
    streams.deliver(step([0], 5))
    assert tables_of(streams) == [0] * 5
