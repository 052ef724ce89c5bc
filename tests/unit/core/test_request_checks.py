import msgspec
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "message", "request_fields"),
    [
        ("prompt_token_ids", "at least one token", dict(prompt=[])),
        ("prompt_token_ids[2]", r"=97 is not allowed: must be in \[0, 97\)", dict(prompt=[0, 96, 97])),
        ("prompt_token_ids[0]", r"in \[0, 97\)", dict(prompt=[-1])),
        ("max_tokens", "at least 1", dict(max_tokens=0)),
        ("max_tokens", "at most 22.*max_model_len=32", dict(max_tokens=23)),
        ("prompt_token_ids", "max_model_len=32", dict(prompt=range(32))),
        ("seed", r"2\*\*64", dict(seed=2**64)),
        ("seed", r"2\*\*64", dict(seed=-1)),
    ],
)
def test_what_can_never_be_served_is_refused_and_others_go_on(make_rig, field, message, request_fields):
    rig = make_rig(max_model_len=32)
    rig.add("good")
    with pytest.raises(RequestError, match=message) as refused:
        rig.add(**(dict(request_id="bad") | request_fields))
    assert refused.value.field == field
    rig.run()
    rig.assert_clean()


def test_a_request_that_fills_the_pool_exactly_is_served_and_one_token_more_is_refused(make_rig):
    rig = make_rig(num_blocks=4, block_size=4)
    with pytest.raises(RequestError, match=r"at most 7.*KV pool's 16 tokens"):
        rig.add("more", range(10), max_tokens=8)
    with pytest.raises(RequestError, match="shorter, to stay within the KV pool"):
        rig.add("prompt alone", range(17), max_tokens=1)
    rig.add("full", range(10), max_tokens=7)
    rig.run()
    rig.assert_clean()


def test_sequence_numbers_in_use_are_refused(make_rig):
    rig = make_rig()
    rig.add("a", n=2)
    rig.add("b")
    for first, n in ((0, 2), (1, 1), (2, 3)):
        request = msgspec.structs.replace(rig.requests["a"], first_sequence_id=first, params=SamplingParams(n=n))
        message = f"first_sequence_id={first} is not allowed: .* no unfinished sequence has"
        with pytest.raises(RequestError, match=message):
            rig.core.add_request(request)
    rig.run()
    rig.assert_clean()


@pytest.mark.parametrize(
    ("field", "message", "fields"),
    [
        ("cache_salt", r"at most 1024 bytes as UTF-8\. It has 1026 bytes", dict(cache_salt="\u00fc" * 513)),
        ("eos_token_ids", "at most 1024 ids", dict(eos_token_ids=[1] * 1_025)),
        ("eos_token_ids", "token ids >= 0", dict(eos_token_ids=[-1])),
        ("bad_words", "at most 2048 spellings", dict(bad_words=[[1]] * 2_049)),
        ("bad_words", "at most 4100 tokens", dict(bad_words=[[1], [1] * 4_101])),
        ("bad_words", "at least one token long", dict(bad_words=[[]])),
    ],
)
def test_what_no_front_end_sends_is_refused(make_rig, field, message, fields):
    rig = make_rig()
    rig.add("good")
    with pytest.raises(RequestError, match=message) as refused:
        rig.core.add_request(msgspec.structs.replace(rig.requests["good"], first_sequence_id=1, **fields))
    assert refused.value.field == field
    rig.run()
    rig.assert_clean()
