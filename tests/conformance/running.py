"""Requests on any client: to the end, or in flight for as long as a block lasts; and results as plain values."""

import time
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from rollout_engine import SamplingParams
from rollout_engine.base.errors import LifecycleError
from rollout_engine.testing import tiny_model

ENDLESS = SamplingParams(max_tokens=30_000, ignore_eos=True, seed=3, logprobs=0, detokenize=False)
"""For a request that goes on until somebody ends it: a minute's work."""
SHORT = SamplingParams(max_tokens=12, seed=5, logprobs=0)


_finished = WeakKeyDictionary()
"""By engine, the finished outputs that `step_until` has taken, by request id: a fast engine ends a request early."""


def weights(seed):
    """Weights of the tests' model; those of seed 0 are the checkpoint's."""
    return tiny_model(seed=seed).state_dict()


def outputs_of(engine, prompt, params, **options):
    """Every output of a request, to its end."""
    request_id = engine.add_request("request", prompt, params, **options)
    outputs = []
    while engine.is_unfinished(request_id):
        outputs += engine.step()
    return outputs


def last_of(engine, prompt, params, **options):
    """The finished output of a request."""
    return outputs_of(engine, prompt, params, **options)[-1]


def step_until(engine, condition, seconds=60):
    """Step until `condition()`; returns the outputs that came."""
    outputs, deadline = [], time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        outputs += engine.step()
    _finished.setdefault(engine, {}).update((output.request_id, output) for output in outputs if output.finished)
    return outputs


def num_tokens(engine):
    """Tokens so far of the engine's open requests."""
    return engine._reader.num_tokens()


def step_further(engine, count=3):
    """Step until the requests in flight have some more tokens, or one of them has ended."""
    target, num_open = num_tokens(engine) + count, len(engine._reader._open)
    return step_until(engine, lambda: num_tokens(engine) >= target or len(engine._reader._open) < num_open)


@contextmanager
def in_flight(engine, prompt="hello", params=ENDLESS, **options):
    """A request that computes; unless it has ended it is aborted in the end."""
    request_id = engine.add_request("in flight", prompt, params, **options)
    step_further(engine)
    try:
        yield request_id
    finally:
        engine.abort_request(request_id, discard=True)


def ended(engine, request_id="in flight"):
    """The only sample of a request, once it has ended."""
    step_until(engine, lambda: not engine.is_unfinished(request_id))
    return _finished[engine].pop(request_id).outputs[0]


def bring_back(engine):
    """Have an engine run, with nothing in flight and the checkpoint's weights, whatever its state is."""
    engine.abort_request(list(engine._reader._open), discard=True)
    engine.collective_rpc("abort_weight_update")
    engine.wake_up()
    if engine.get_metrics().core.state == "DIRTY":
        engine.update_weights(weights(0))
    engine.resume_generation()
    with suppress(LifecycleError):
        engine.stop_profile()
    for adapter in engine.list_loras():
        engine.remove_lora(adapter.name)


def plain(value):
    """A value that is equal only where all bits are."""
    match value:
        case np.ndarray():
            return value.dtype.str, value.shape, value.tobytes()
        case dict():
            return {key: plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case msgspec.Struct():
            return plain(msgspec.structs.astuple(value))
        case Exception():
            return type(value).__name__, str(value)
    return value


def told(output):
    """What a finished output says of its request, but for times and what the prefix cache held."""
    return [
        output.prompt,
        output.prompt_token_ids,
        plain(output.prompt_logprobs),
        plain(output.prompt_top_logprobs),
        plain(output.prompt_ranks),
        plain(output.prompt_hidden_states),
        [told_of_sample(sample) for sample in output.outputs],
    ]


def told_of_sample(sample):
    """What a sample says, but for its versions."""
    fields = "index text token_ids finish_reason stop_reason seed error logprobs top_logprobs kept_logprob_mass"
    more = "sampled_ranks token_id_logprobs routed_experts support entropies hidden_states forced"
    return [plain(getattr(sample, name)) for name in f"{fields} {more}".split()]
