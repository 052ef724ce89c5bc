"""Sampling settings of TRL's trainers as ours, without TRL."""

from types import SimpleNamespace

from envs_adapters.trainers.trl_settings import sampling_params


def test_a_pattern_for_completions_is_a_form_whose_ends_are_those_of_the_trainer():
    args = SimpleNamespace(generation_kwargs=None, vllm_structured_outputs_regex="a+")
    options = dict(temperature=0.9, top_p=1.0, top_k=None, min_p=None, repetition_penalty=1.0, max_completion_length=6)
    params = sampling_params(SimpleNamespace(args=args, eos_token_ids=[2], **options))
    assert params.structured_outputs == {"regex": "a+"}
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs_mode) == ([2], True, "processed")
    args.vllm_structured_outputs_regex = None
    assert sampling_params(SimpleNamespace(args=args, eos_token_ids=[2], **options)).structured_outputs is None
