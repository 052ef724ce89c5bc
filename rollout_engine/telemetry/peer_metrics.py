"""An engine's metrics under the names that dashboards of vLLM and SGLang read.

Buckets are ours, values have the meaning that the name has there; a name without a value here is absent.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from rollout_engine.base.metrics import EngineMetrics
from rollout_engine.telemetry.prometheus import counter, counters, gauge, histogram, positions


def vllm_families(metrics: EngineMetrics, model: str, cache: Mapping[str, str]) -> Iterator[Metric]:
    """Metrics by the names of vLLM's V1 engine, labelled `model_name` and `engine`.

    `cache`: the settings of the KV cache, labels of `cache_config_info`.
    """
    core, requests, labels = metrics.core, metrics.requests, {"model_name": model, "engine": "0"}
    counts = core.counters
    for name, text, value in (
        ("num_requests_running", "Sequences with a place in the batch.", core.num_running),
        ("num_requests_waiting", "Sequences that wait for a place.", core.num_waiting),
        ("kv_cache_usage_perc", "KV cache usage, from 0 to 1.", core.cache_usage),
    ):
        yield gauge(f"vllm:{name}", text, value, labels)
    # Sequences wait for a place in the batch, and for nothing else.
    by_reason = {**labels, "reason": "capacity"}
    yield gauge("vllm:num_requests_waiting_by_reason", "The same, by its reason.", core.num_waiting, by_reason)
    yield gauge("vllm:cache_config_info", "Settings of the KV cache.", 1.0, {"engine": "0", **cache})
    for name, text, value in (
        ("num_preemptions", "Running sequences that lost their blocks.", counts.num_preemptions),
        ("prompt_tokens", "Prompt tokens of requests that ended, cached ones too.", requests.prompt_tokens.sum),
        ("generation_tokens", "Tokens sampled.", counts.num_tokens_sampled),
        ("prefix_cache_queries", "Tokens looked up in the prefix cache.", counts.num_looked_up_tokens),
        ("prefix_cache_hits", "Those of them found there.", counts.num_cached_tokens),
        ("spec_decode_num_drafts", "Drafts of one token or more.", sum(counts.drafts.num_drafted[:1])),
        ("spec_decode_num_draft_tokens", "Tokens of drafts.", sum(counts.drafts.num_drafted)),
        ("spec_decode_num_accepted_tokens", "Those of them that were right.", sum(counts.drafts.num_accepted)),
    ):
        yield counter(f"vllm:{name}", text, value, labels)
    name, by_place = "spec_decode_num_accepted_tokens_per_pos", counts.drafts.num_accepted
    yield positions(f"vllm:{name}", "Tokens of drafts that were right, by their place.", by_place, labels)
    yield counters("vllm:request_success", "Samples that ended.", "finished_reason", requests.finished.items(), labels)
    for name, text, values in (
        ("time_to_first_token_seconds", "From arrival.", requests.time_to_first_token_seconds),
        ("inter_token_latency_seconds", "Between two tokens of a sample.", requests.inter_token_seconds),
        ("e2e_request_latency_seconds", "From arrival to the end.", requests.request_seconds),
        ("request_queue_time_seconds", "From arrival to the first step.", requests.queue_seconds),
        ("request_inference_time_seconds", "From the first step to the end.", requests.inference_seconds),
        ("request_prefill_time_seconds", "From the first step to the first token.", requests.prefill_seconds),
        ("request_decode_time_seconds", "From the first token to the end.", requests.decode_seconds),
        ("request_time_per_output_token_seconds", "Mean of a request.", requests.token_seconds),
        ("time_per_output_token_seconds", "The older name of inter_token_latency.", requests.inter_token_seconds),
        ("request_prompt_tokens", "Prompt tokens of a request.", requests.prompt_tokens),
        ("request_generation_tokens", "Sampled tokens of a request.", requests.generation_tokens),
        ("request_params_n", "n of a request.", requests.asked_samples),
        ("request_params_max_tokens", "max_tokens of a request that gives it.", requests.asked_max_tokens),
        ("iteration_tokens_total", "Tokens computed in a step.", counts.step_tokens),
    ):
        yield histogram(f"vllm:{name}", text, values, labels)


def sglang_families(metrics: EngineMetrics, model: str) -> Iterator[Metric]:
    """Metrics by SGLang's names, labelled `model_name` and `engine_type`."""
    core, requests, labels = metrics.core, metrics.requests, {"model_name": model, "engine_type": "unified"}
    counts = core.counters
    for name, text, value in (
        ("num_running_reqs", "Sequences with a place in the batch.", core.num_running),
        ("num_queue_reqs", "Sequences that wait for a place.", core.num_waiting),
        ("token_usage", "KV cache usage, from 0 to 1.", core.cache_usage),
        (
            "cache_hit_rate",
            "Tokens found in the prefix cache / tokens looked up, since start.",
            counts.num_cached_tokens / max(counts.num_looked_up_tokens, 1),
        ),
    ):
        yield gauge(f"sglang:{name}", text, value, labels)
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens of requests that ended, cached ones too.", requests.prompt_tokens.sum),
        ("generation_tokens", "Tokens sampled.", counts.num_tokens_sampled),
        ("cached_tokens", "Tokens found in the prefix cache.", counts.num_cached_tokens),
        ("num_requests", "Requests that ended.", requests.request_seconds.count),
        ("num_aborted_requests", "Samples that were aborted.", requests.finished["abort"]),
    ):
        yield counter(f"sglang:{name}", text, value, labels)
    for name, text, values in (
        ("time_to_first_token_seconds", "From arrival.", requests.time_to_first_token_seconds),
        ("inter_token_latency_seconds", "Between two tokens of a sample.", requests.inter_token_seconds),
        ("e2e_request_latency_seconds", "From arrival to the end.", requests.request_seconds),
        ("queue_time_seconds", "From arrival to the first step.", requests.queue_seconds),
    ):
        yield histogram(f"sglang:{name}", text, values, labels)
