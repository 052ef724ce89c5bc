"""Settings of pooling requests: bounds, shapes, and what a model lacks for them."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pooling_params import (
    PoolingInfo,
    PoolingParams,
    as_pooling_params,
    check_pooling,
    supported_tasks,
)

CAUSAL = PoolingInfo(hidden_size=64)
REWARD = PoolingInfo(hidden_size=64, head="sequence", labels=["LABEL_0"])
CLASSES = PoolingInfo(hidden_size=64, head="sequence", labels=["a", "b", "c"])
TOKENS = PoolingInfo(hidden_size=64, head="token", labels=["a", "b"])


@pytest.mark.parametrize(
    "params, match",
    [
        (dict(kind="score"), "kind='score' is not allowed: must be one of 'last', .* kind='reward' gives the logit"),
        (dict(kind="embed"), "kind='embed' .* kind='last' with normalize=True gives an embedding"),
        (dict(kind="STEP"), "kind='STEP' .* Give kind='reward' with step_token_ids"),
        (dict(kind="lst"), "kind='lst' is not allowed: must be one of 'last', .* Did you mean 'last'"),
        (dict(kind="rewards"), "Did you mean 'reward'"),
        (dict(kind=3), "kind=3"),
        (dict(kind="classify", normalize=True), "normalize=True is not allowed: must be False"),
        (dict(kind="mean", step_token_ids=[3]), "step_token_ids=.*kind one of 'token', 'classify', 'reward'"),
        (dict(kind="token", step_token_ids=[]), "1 to 1024 ids"),
        (dict(kind="token", step_token_ids=[-1]), "token ids >= 0"),
        (dict(truncate_prompt_tokens=0), "-1 or >= 1"),
        (dict(knd="last"), "Unknown PoolingParams option 'knd'. Did you mean 'kind'"),
        (dict(pooling_type="MEAN"), "an option of vLLM's that does not exist here: give kind"),
        (dict(temperature=1.0), "'temperature' is not an option of PoolingParams: give it to SamplingParams"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_do(params, match):
    with pytest.raises(RequestError, match=match):
        PoolingParams(**params)


def test_one_step_token_id_will_do_as_a_number():
    assert as_pooling_params({"kind": "token", "step_token_ids": 7}).step_token_ids == [7]


@pytest.mark.parametrize(
    "info, params, positions, shape",
    [
        (CAUSAL, dict(kind="last"), "last", (64,)),
        (CAUSAL, dict(kind="mean"), "all", (64,)),
        (CAUSAL, dict(kind="cls"), "first", (64,)),
        (CAUSAL, dict(kind="token"), "all", (9, 64)),
        (CLASSES, dict(kind="classify"), "last", (3,)),
        (CLASSES, dict(kind="classify", step_token_ids=[1]), "all", (9, 3)),
        (TOKENS, dict(kind="classify"), "all", (9, 2)),
        (REWARD, dict(kind="reward"), "last", (1,)),
        (REWARD, dict(kind="reward", step_token_ids=[1]), "all", (9,)),
    ],
)
def test_a_result_has_the_shape_of_its_kind(info, params, positions, shape):
    params = PoolingParams(**params)
    assert info.positions(params) == positions and info.shape(params, 9) == shape


def test_a_model_tells_the_tasks_that_it_serves():
    assert supported_tasks(True, CAUSAL) == ["generate", "last", "mean", "cls", "token"]
    assert supported_tasks(False, CLASSES) == ["last", "mean", "cls", "token", "classify"]
    assert supported_tasks(False, REWARD)[-1] == "reward" and supported_tasks(True, None) == ["generate"]


@pytest.mark.parametrize(
    "info, params, num_tokens, match",
    [
        (CLASSES, dict(kind="reward"), 9, "Its head has 3 labels, and a reward is one number: use kind='classify'"),
        (CAUSAL, dict(kind="token"), 1 << 20, "1048576 tokens give 67108864. Give a shorter prompt"),
        (None, dict(kind="last"), 9, "device='cpu'"),
    ],
)
def test_what_a_model_cannot_pool_is_refused(info, params, num_tokens, match):
    with pytest.raises(RequestError, match=match):
        check_pooling(PoolingParams(**params), info, num_tokens)
