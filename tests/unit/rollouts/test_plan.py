"""The arguments of a rollout are checked together and resolved per prompt."""

import numpy as np
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import MAX_N, SamplingParams
from rollout_engine.base.seeds import mix
from rollout_engine.rollouts.plan import RolloutArguments, prompt_tasks


def tasks_of(*args, **arguments):
    return prompt_tasks(RolloutArguments(*args, **arguments))


def params_of(*args, **arguments):
    return [task.params for task in tasks_of(*args, **arguments)]


@pytest.mark.parametrize(
    "prompts,listed",
    [
        ("one", ["one"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ({"prompt": "one"}, [{"prompt": "one"}]),
        (["a", "b"], ["a", "b"]),
        (("a", [1]), ["a", [1]]),
        ((text for text in "ab"), ["a", "b"]),
        ([[1], [2]], [[1], [2]]),
    ],
)
def test_one_prompt_or_many(prompts, listed):
    assert [task.prompt for task in tasks_of(prompts)] == listed


def test_an_array_of_ids_is_one_prompt():
    ids = np.array([1, 2])
    assert tasks_of(ids)[0].prompt is ids


def test_log_probs_are_on_and_more_of_them_are_kept():
    assert params_of("x")[0].logprobs == 0
    assert params_of("x", SamplingParams(logprobs=5))[0].logprobs == 5


def test_other_settings_are_kept_and_only_final_results_are_asked_for():
    params = params_of("x", SamplingParams(temperature=0.5, max_tokens=7, stop=["."]))[0]
    assert (params.temperature, params.max_tokens, params.stop, params.output_kind) == (0.5, 7, ["."], "final_only")


def test_num_samples_overrides_n():
    assert [p.n for p in params_of(["x", "y"], num_samples=4)] == [4, 4]
    assert params_of("x", SamplingParams(n=4), num_samples=4)[0].n == 4
    assert params_of("x", SamplingParams(n=3))[0].n == 3


def test_seeds_depend_on_the_prompts_index():
    assert [p.seed for p in params_of(["x", "x"], seed=9)] == [mix(9, 0), mix(9, 1)]
    assert params_of("x")[0].seed is None
    assert params_of("x", SamplingParams(seed=5))[0].seed == 5


def test_each_prompt_may_have_its_own_params():
    params = params_of(["x", "y"], [SamplingParams(n=2), SamplingParams(n=3)])
    assert [p.n for p in params] == [2, 3]


def test_dicts_and_numpy_numbers_are_taken():
    params = params_of(["x", "y"], [{"temperature": 0.5}, None], num_samples=np.int64(3), seed=np.int64(9))
    assert [(p.temperature, p.n, p.seed) for p in params] == [(0.5, 3, mix(9, 0)), (1.0, 3, mix(9, 1))]
    assert params_of(["x", "y"], {"n": 2})[1].n == 2


def test_a_bad_dict_of_params_is_named_by_its_index():
    with pytest.raises(RequestError, match=r"^sampling_params\[1\]: temperature=-1"):
        tasks_of(["x", "y"], [{}, {"temperature": -1}])


def test_params_for_all_prompts_stay_one_object():
    params = params_of(["x", "y"], {"max_tokens": 3}, num_samples=2)
    assert params[0] is params[1]


def test_rows_of_columns():
    tasks = tasks_of(["x", "y"], columns={"answer": (1, 2), "kind": ["a", "b"]})
    assert [task.columns for task in tasks] == [{"answer": 1, "kind": "a"}, {"answer": 2, "kind": "b"}]
    assert [(task.index, task.prompt, task.input, task.num_kept) for task in tasks] == [
        (0, "x", "x", None),
        (1, "y", "y", None),
    ]


@pytest.mark.parametrize(
    "arguments,field",
    [
        (dict(prompts=[]), "prompts"),
        (dict(prompts=7), "prompt"),
        (dict(prompts="x", sampling_params=[SamplingParams()] * 2), "sampling_params"),
        (dict(prompts="x", sampling_params=["hot"]), "sampling_params"),
        (dict(prompts="x", sampling_params="hot"), "sampling_params"),
        (dict(prompts="x", sampling_params={"nn": 2}), "nn"),
        (dict(prompts="x", sampling_params=SamplingParams(n=2), num_samples=3), "num_samples"),
        (dict(prompts="x", num_samples=MAX_N + 1), "num_samples"),
        (dict(prompts="x", num_samples=0), "num_samples"),
        (dict(prompts="x", sampling_params=SamplingParams(prompt_logprobs=0)), "prompt_logprobs"),
        (dict(prompts="x", num_samples="4"), "num_samples"),
        (dict(prompts="x", seed=-(2**63) - 1), "seed"),
        (dict(prompts="x", seed=2**64), "seed"),
        (dict(prompts="x", seed=1.5), "seed"),
        (dict(prompts="x", seed=True), "seed"),
        (dict(prompts="x", seed=1, sampling_params=SamplingParams(seed=2)), "seed"),
        (dict(prompts=["x", "y"], columns={"answer": [1]}), "columns['answer']"),
        (dict(prompts=["x", "y"], columns={"answer": "ab"}), "columns['answer']"),
        (dict(prompts="x", columns={"answer": 1}), "columns['answer']"),
        (dict(prompts="x", columns={"tokens": [1]}), "columns"),
        (dict(prompts="x", columns={"completions": [1]}), "columns"),
        (dict(prompts="x", columns=["answer"]), "columns"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(arguments, field):
    with pytest.raises(RequestError) as caught:
        tasks_of(**arguments)
    assert caught.value.field == field


def test_sessions_are_one_for_all_or_one_each():
    tasks = tasks_of(["a", "b"], session_id="s")
    assert [task.session_id for task in tasks] == ["s", "s"]
    tasks = tasks_of(["a", "b"], session_id=["s", None])
    assert [task.session_id for task in tasks] == ["s", None]
    with pytest.raises(RequestError, match="session_id='a list of 1' is not allowed"):
        tasks_of(["a", "b"], session_id=["s"])
