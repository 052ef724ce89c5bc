"""Long lists of a request travel as arrays, and the core gets the request that was sent."""

import numpy as np
import pytest

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, PromptLogprobs
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.children.failure import WireError
from rollout_engine.process import wire
from rollout_engine.process.request_columns import check_answer, request_of, with_columns
from rollout_engine.process.wire import AddRequest, Decoder, Encoder, Limits, MessageTooLongError


def request(prompt=(3, 4), bad_words=(), **params):
    return EngineCoreRequest(
        prompt_token_ids=[*prompt],
        params=SamplingParams(**params),
        max_tokens=5,
        seed=1,
        first_sequence_id=0,
        bad_words=[*bad_words],
    )


def travelled(message):
    frames = [bytes(frame) for frame in Encoder().encode(message)]
    return Decoder(wire.ToCore).decode(frames), len(frames[0])


@pytest.mark.parametrize(
    "sent",
    [
        request(),
        request(range(1_000_000)),
        request(allowed_token_ids=[*range(300_000)], logit_bias={i: 1.5 for i in range(1024)}),
        request(bad_words=[[i, i + 1] for i in range(0, 200_000, 2)] + [[7] * 10_000]),
        request(range(5000), [[5] * 5000], allowed_token_ids=[*range(5000)], stop_token_ids=[*range(1024)]),
    ],
    ids=["short", "prompt", "allowed_token_ids", "bad_words", "all"],
)
def test_a_request_arrives_as_it_was_and_its_struct_is_short(sent):
    received, num_bytes = travelled(with_columns(sent))
    assert request_of(received) == sent
    assert num_bytes < 20_000


def test_the_core_is_not_sent_texts_of_which_it_has_the_token_ids():
    received = request_of(
        travelled(
            with_columns(
                request(
                    bad_words=[[5]],
                )
            )
        )[0]
    )
    assert received.bad_words == [[5]]
    sent = EngineCoreRequest(
        prompt_token_ids=[3], params=SamplingParams(bad_words=["x" * 1000] * 1024), max_tokens=5, seed=1,
        first_sequence_id=0, bad_words=[[5]],
    )  # fmt: skip
    message, num_bytes = travelled(with_columns(sent))
    assert num_bytes < 1000 and request_of(message).bad_words == [[5]]


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt_token_ids": np.zeros(3, np.float32)},
        {"prompt_token_ids": np.zeros((3, 1), np.int32)},
        {"other": np.zeros(3, np.int32)},
        {"bad_words": np.zeros(3, np.int32)},
        {"bad_words": np.zeros(3, np.int32), "bad_word_lengths": np.array([2, 2], np.int32)},
        {"bad_words": np.zeros(3, np.int32), "bad_word_lengths": np.array([4, -1], np.int32)},
    ],
)
def test_columns_that_are_none_of_a_request_are_refused(columns):
    with pytest.raises(WireError, match="column"):
        request_of(AddRequest(request(), columns))


VOCAB_SIZE = 150_000


def asks(num_tokens, prompt_logprobs):
    return with_columns(request(range(num_tokens), prompt_logprobs=prompt_logprobs))


def test_log_probs_of_a_prompt_that_no_message_could_carry_are_refused_with_the_request():
    check_answer(asks(6000, 64), Limits(), VOCAB_SIZE)
    small = Limits(message_bytes=1 << 21)
    with pytest.raises(
        MessageTooLongError, match="prompt_logprobs=64 of 6000 tokens take .* may take 2097152; ask for"
    ):
        check_answer(asks(6000, 64), small, VOCAB_SIZE)
    check_answer(asks(100_000, None), small, VOCAB_SIZE)


def test_those_of_every_token_of_the_vocabulary_count_as_many():
    check_answer(asks(100, -1), Limits(), VOCAB_SIZE)
    with pytest.raises(MessageTooLongError, match="prompt_logprobs=-1 of 100 tokens take 120066336 bytes"):
        check_answer(asks(100, -1), Limits(message_bytes=100 << 20), VOCAB_SIZE)


@pytest.mark.parametrize("width", [1, 1000, -1])
def test_what_is_counted_is_what_a_message_takes(width):
    """Within the bytes counted for the step's other outputs, and never less."""
    num_tokens, top = 500, 3000 if width == -1 else width
    shape = num_tokens, top
    found = PromptLogprobs(
        np.zeros(num_tokens, np.float32),
        (np.zeros(shape, np.int32), np.zeros(shape, np.float32)),
        np.zeros(num_tokens, np.int32),
    )
    sent = wire.Outputs([EngineCoreOutputs(0, [1], [1], [1], prompt_logprobs={1: found})])
    num_bytes = sum(map(len, Encoder().encode(sent)))
    check_answer(asks(num_tokens, width), Limits(message_bytes=num_bytes + (1 << 16)), top)
    with pytest.raises(MessageTooLongError):
        check_answer(asks(num_tokens, width), Limits(message_bytes=num_bytes), top)


def test_routed_experts_of_a_prompt_that_fit_no_message_are_refused_before_it_is_sent():
    routed = with_columns(request(range(6000), return_routed_experts=True))
    check_answer(routed, Limits(), VOCAB_SIZE, num_routed_bytes=384)
    small = Limits(message_bytes=1 << 21)
    check_answer(with_columns(request(range(6000))), small, VOCAB_SIZE, num_routed_bytes=384)
    with pytest.raises(MessageTooLongError, match="routed experts of 6000 prompt tokens take 23.* bytes.*shorter"):
        check_answer(routed, small, VOCAB_SIZE, num_routed_bytes=384)
