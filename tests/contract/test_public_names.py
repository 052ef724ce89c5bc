"""The names users rely on: they exist, keep their arguments, and every error is among them."""

import inspect

import pytest

import rollout_engine
from rollout_engine.base import errors

# Name -> the arguments it must take, in this order; "*" starts the keyword-only ones. More arguments may follow.
SIGNATURES = {
    "LLM.generate": "self prompts sampling_params * use_tqdm priority session_id",
    "LLM.chat": "self messages sampling_params",
    "LLM.score": "self prompt_token_ids completion_token_ids * temperature timeout",
    "LLM.update_weights": "self source * version mode kv staging reset_version timeout",
    **{
        f"{owner}.{verb}": arguments
        for owner in ("AsyncLLM", "LLM", "LLMEngine", "RolloutPolicy")
        for verb, arguments in {
            "pause_generation": "self * mode clear_cache wait_for_inflight_requests",
            "resume_generation": "self",
            "is_paused": "self",
            "wait_for_requests_to_drain": "self drain_timeout",
            "sleep": "self level mode",
            "wake_up": "self tags",
            "is_sleeping": "self",
            "reset_prefix_cache": "self reset_running_requests",
            "reset_mm_cache": "self",
            "reset_encoder_cache": "self",
            "collective_rpc": "self method timeout args kwargs",
            "save_sharded_state": "self path pattern max_size",
        }.items()
    },
    "AsyncLLM.from_config": "config",
    "AsyncLLM.generate": "self prompt sampling_params request_id * priority session_id trace_headers"
    " data_parallel_rank",
    "AsyncLLM.abort": "self request_ids",
    "AsyncLLM.score": "self prompt_token_ids completion_token_ids * temperature timeout",
    "AsyncLLM.update_weights": "self source * version kv reset_version timeout",
    **{f"AsyncLLM.{name}": "self" for name in ("check_health", "get_tokenizer", "get_metrics", "get_model_metadata")},
    **{f"AsyncLLM.{name}": "self" for name in ("get_cache_usage", "get_num_unfinished_requests", "shutdown")},
    **{
        f"{owner}.{name}": "self"
        for owner in ("AsyncLLM", "LLM", "LLMEngine", "RolloutPolicy")
        for name in ("get_default_sampling_params", "get_supported_tasks", "is_tracing_enabled")
    },
    "RolloutService.launch": "config num_replicas * balancer",
    "RolloutService.from_pretrained": "model num_devices num_replicas verbose",
    "RolloutService.generate": "self prompts sampling_params * prompt_token_ids use_tqdm timeout_seconds replica_index",
    "RolloutService.agenerate": "self prompts sampling_params * prompt_token_ids timeout_seconds replica_index",
    "RolloutService.create_load_balancer": "self strategy prefix_length overload_threshold",
    "RolloutService.get_num_unfinished_requests": "self replica_index",
    "RolloutService.get_cache_usage": "self replica_index",
    "RolloutService.init_weight_update_group": "self master_address master_port",
    "RolloutService.update_weights": "self source * version mode kv reset_version timeout",
    "RolloutService.collective_rpc": "self method timeout args kwargs",
    **{
        f"RolloutService.get_{name}": "self"
        for name in ("tp_size", "model_metadata", "master_address", "master_port", "balancer_stats")
    },
    "RolloutService.scale": "self num_replicas",
    "RolloutService.health": "self",
    "RolloutService.shutdown": "self",
    "make_rollout_service": "model num_devices num_replicas verbose",
    "LoadBalancer": "service_or_replicas strategy * prefix_length overload_threshold",
    "LoadBalancer.select_replica": "self prompt",
    "LoadBalancer.get_stats": "self",
    "SamplingParams.clone": "self",
    **{f"{owner}.apply_model": "self fn" for owner in ("LLM", "LLMEngine", "RolloutPolicy")},
    "LLM.encode": "self prompts pooling_params *",
    "LLM.reward": "self prompts *",
    "AsyncLLM.encode": "self prompt pooling_params request_id * priority session_id trace_headers data_parallel_rank",
    "RewardModel": "model *",
    "LLMEngine.from_config": "config",
    "LLMEngine.add_request": "self request_id prompt params * priority session_id trace_headers",
    "LLMEngine.step": "self",
    "LLMEngine.abort_request": "self request_ids",
    "LLMEngine.has_unfinished_requests": "self",
    "LLMEngine.get_num_unfinished_requests": "self",
    "LLMEngine.get_cache_usage": "self",
    "LLMEngine.get_model_metadata": "self",
    "LLMEngine.update_weights": "self source * version mode kv staging reset_version timeout",
    "RolloutPolicy.rollout": "self prompts sampling_params * num_samples columns reward_fn reward_weights seed layout",
    "RolloutPolicy.arollout": "self prompts sampling_params * num_samples columns reward_fn reward_weights seed layout",
    "RolloutPolicy.collect": "self dataset sampling_params * num_samples groups_per_batch max_staleness max_in_flight",
    "RolloutPolicy.score": "self batch temperature",
    "RolloutPolicy.add_picture_features": "self batch * timeout",
    "RolloutPolicy.gateway": "self sampling_params * host port",
    "RolloutPolicy.update_weights": "self source",
    "RolloutPolicy.shutdown": "self",
    "advantages.grpo": "rewards group_ids * scale",
    "advantages.rloo": "rewards group_ids",
    "advantages.gae": "rewards values mask * truncated final_values gamma lam",
    "advantages.per_token": "batch advantages",
    "concat": "batches * group_ids",
    "minibatches": "batch size * shuffle generator keep_groups",
    "to_jsonl": "batch path * append",
    "to_trl": "batch advantages",
    "float32_masters": "optimizer",
    "to_trl_rollout": "batch",
    "exact.enable": "model",
    "exact.inputs": "batch * features",
    "exact.token_logprobs": "model input_ids attention_mask * temperature routed_experts support",
    "exact.token_entropy": "model input_ids attention_mask * temperature routed_experts",
    "exact.check": "batch logprobs temperature * model engine full",
    "RolloutPolicy.distributions": "self token_ids places * temperature lora_request",
}
FIELDS = {
    "EngineConfig": "model tokenizer dtype device max_model_len block_size kv_cache_bytes num_kv_blocks max_num_seqs "
    "max_num_batched_tokens enable_prefix_caching async_scheduling seed deterministic num_threads load_format "
    "tensor_parallel_size skip_tokenizer_init logits_processors worker_extensions admission stream_interval",
    "SamplingParams": "n temperature top_p top_k min_p max_tokens min_tokens stop stop_token_ids ignore_eos "
    "seed logprobs logprobs_mode detokenize skip_special_tokens include_stop_str_in_output truncate_prompt_tokens "
    "spaces_between_special_tokens stop_regex logprob_token_ids "
    "output_kind repetition_penalty presence_penalty frequency_penalty logit_bias allowed_token_ids bad_words "
    "prompt_logprobs extra_args return_routed_experts return_support entropy return_hidden_states "
    "policy_version min_policy_version version_wait",
    "PoolingParams": "kind normalize step_token_ids",
    "PoolingRequestOutput": "request_id prompt_token_ids outputs finished num_cached_tokens",
    "RequestOutput": "request_id prompt prompt_token_ids prompt_logprobs outputs finished num_cached_tokens metrics",
    "CompletionOutput": "index text token_ids logprobs top_logprobs cumulative_logprob kept_logprob_mass finish_reason "
    "stop_reason version_spans seed error sampled_ranks token_id_logprobs routed_experts support entropies "
    "hidden_states",
    "VersionSpan": "start end policy_version kv_min_version",
    "ReplicaHealth": "index state policy_version pid node num_unfinished_requests cache_usage",
    "BalancerStats": "decisions num_fallbacks num_requests num_kv_tokens",
    "UpdateReport": "version digest num_tensors num_bytes seconds stall_seconds num_in_flight",
}


@pytest.mark.parametrize("name", rollout_engine.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(rollout_engine, name) is not None
    assert name in dir(rollout_engine)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        rollout_engine.LLMM  # noqa: B018


def test_every_error_is_public():
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert classes <= set(rollout_engine.__all__)


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_keep_their_names_and_places(path):
    function = rollout_engine
    for part in path.split("."):
        function = getattr(function, part)
    positional, _, keywords = SIGNATURES[path].partition(" *")
    have = inspect.signature(function).parameters
    places = [name for name, p in have.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert places[: len(positional.split())] == positional.split()
    assert [name for name in keywords.split() if name not in have] == []


@pytest.mark.parametrize("name", FIELDS)
def test_fields_keep_their_names(name):
    assert set(FIELDS[name].split()) <= set(getattr(rollout_engine, name).__struct_fields__)
