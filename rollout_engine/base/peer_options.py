"""Options of other libraries, and their replacements here.

Only names that do not exist here are looked up; remove a name from these tables when it becomes an option.
"""

from collections.abc import Mapping

Peers = Mapping[str, Mapping[str, str]]

_GREEDY = "temperature=0 is greedy, any other temperature samples"
_NO_BEAMS = "LLM.beam_search(prompts, BeamSearchParams(beam_width=...)) searches; SamplingParams sample"
_GRAMMAR = 'give structured_outputs: {"json": schema}, {"regex": ...}, {"grammar": Lark}, {"choice": [...]}'
_NO_PARALLEL = "a model is cut by tensor_parallel_size and pipeline_parallel_size alone; leave it out"
_SEVERAL_ENGINES = "RolloutService.from_pretrained(model, num_replicas=...) runs several engines; leave it out"
_NO_REMOTE_CODE = "code of checkpoints is never run; the architecture must be one of transformers' own"
_NO_REVISION = "download the revision first (huggingface_hub.snapshot_download) and give its directory as model"
_ADD_LORA = "leave it out: add_lora(LoRARequest(...)) works at any time"
_ALWAYS_ON = "it is always on; leave it out"
_SUPPORT = "it belongs to one request: SamplingParams(return_support=True, logprobs_mode='processed')"
_QUANTIZATION = (
    "quantized checkpoints are dequantized at load; quantization='int8' rounds the weights of layers at load, on a CPU"
)

_ALLOW_MEDIA = "the server alone fetches pictures: `rollout-engine serve --allow-media HOST --allow-media-dir DIR`"

ENGINE_PEERS: Peers = {
    "vLLM's": {
        "allowed_local_media_path": f"{_ALLOW_MEDIA}; in Python give paths, bytes or images",
        "allowed_media_domains": f"{_ALLOW_MEDIA}; in Python give paths, bytes or images",
        "attention_backend": "attention is computed by our own kernels; leave it out",
        "compilation_config": "kernels are compiled already, and cuda_graphs=... replays steps; leave it out",
        "cpu_offload_gb": "weights stay where the model runs; leave it out",
        "disable_cascade_attn": "there is no cascade attention; leave it out",
        "disable_custom_all_reduce": _NO_PARALLEL,
        "disable_log_requests": "requests are not logged; leave it out",
        "disable_log_stats": "give log_stats=False",
        "distributed_executor_backend": "give executor='process' or executor='ray'",
        "download_dir": "set the environment variable HF_HOME, or give a directory as model",
        "enable_chunked_prefill": f"{_ALWAYS_ON}; max_num_batched_tokens bounds a chunk",
        "enable_expert_parallel": "data_parallel_size and tensor_parallel_size divide the experts; leave it out",
        "enable_lora": _ADD_LORA,
        "enable_return_routed_experts": "it belongs to one request: SamplingParams(return_routed_experts=True)",
        "enable_sleep_mode": _ALWAYS_ON,
        "enable_tower_connector_lora": f"adapters of the vision tower are added as others are; {_ADD_LORA}",
        "enforce_eager": "on a CPU nothing is captured or compiled; on a device give cuda_graphs=False",
        "generation_config": "end ids come from the checkpoint's generation_config.json, sampling settings never do",
        "guided_decoding_backend": "grammars are llguidance's; leave it out",
        "hf_overrides": "edit config.json in a copy of the checkpoint",
        "hf_token": "set the environment variable HF_TOKEN",
        "kv_cache_dtype": "keys and values have the model's dtype; leave it out",
        "kv_cache_memory_bytes": "give kv_cache_bytes",
        "kv_offloading_backend": "give kv_connector='host'",
        "kv_offloading_size": "give kv_connector='host' and kv_connector_bytes",
        "kv_transfer_config": "give kv_connector='host', 'shm' or 'disk:DIRECTORY' (docs/kv.md)",
        "limit_mm_per_prompt": "give max_prompt_pictures, the most pictures of a prompt",
        "logprobs_mode": "it belongs to one request: SamplingParams(logprobs_mode=...)",
        "max_logprobs": "SamplingParams(logprobs=...) is bounded by itself; leave it out",
        "max_seq_len_to_capture": "leave it out",
        "mm_processor_cache_gb": "give mm_cache_bytes, for pictures, and encoder_cache_bytes, for the tower's outputs",
        "mm_processor_cache_type": "a picture crosses to each process once, by mm_cache_bytes; leave it out",
        "mm_processor_kwargs": "the checkpoint's files set how pictures are processed; leave it out",
        "model_impl": "models are transformers' own modules; leave it out",
        "num_gpu_blocks_override": "give num_kv_blocks",
        "num_scheduler_steps": "leave it out; async_scheduling prepares the next step while one runs",
        "override_generation_config": "give these settings in SamplingParams",
        "preemption_mode": "preempted requests are recomputed, or loaded with kv_connector='host'; leave it out",
        "profiler_config": "give profiler_dir, and the rest to start_profile",
        "return_sampling_mask": _SUPPORT,
        "return_sampling_mask_logprobs": _SUPPORT,
        "revision": _NO_REVISION,
        "rope_scaling": "edit config.json in a copy of the checkpoint",
        "rope_theta": "edit config.json in a copy of the checkpoint",
        "runner": "the checkpoint says it: generate and encode work where it has what they need; leave it out",
        "scheduling_policy": "requests always run by priority, then by arrival: generate(..., priority=...)",
        "served_model_name": "leave it out",
        "speculative_config": "give speculation='auto' or SpeculationConfig(draft_model=..., max_draft_tokens=...)",
        "swap_space": "give kv_connector='host' and kv_connector_bytes",
        "task": "the checkpoint says it: generate and encode work where it has what they need; leave it out",
        "tokenizer_mode": "the tokenizer that transformers loads is used; leave it out",
        "tokenizer_revision": _NO_REVISION,
        "trust_remote_code": _NO_REMOTE_CODE,
        "weight_transfer_config": "update_weights(...) needs no set-up; leave it out",
        "worker_cls": "give worker_extensions",
        "worker_extension_cls": "give worker_extensions",
    },
    "Hugging Face's": {
        "attn_implementation": "attention runs by our own kernels; leave it out",
        "cache_dir": "set the environment variable HF_HOME, or give a directory as model",
        "device_map": "give device='cpu' or device='cuda'",
        "load_in_4bit": _QUANTIZATION,
        "load_in_8bit": _QUANTIZATION,
        "low_cpu_mem_usage": _ALWAYS_ON,
        "pretrained_model_name_or_path": "give model",
        "quantization_config": _QUANTIZATION,
        "torch_dtype": "give dtype",
    },
    "TorchRL's": {
        "enable_fp32_output": "give fp32_head",
        "num_devices": "give tensor_parallel_size",
    },
    "SGLang's": {
        "chunked_prefill_size": "give max_num_batched_tokens",
        "context_length": "give max_model_len",
        "disable_cuda_graph": "give cuda_graphs=False",
        "disable_radix_cache": "give enable_prefix_caching=False",
        "dp_size": _SEVERAL_ENGINES,
        "enable_deterministic_inference": "give deterministic=True",
        "enable_hierarchical_cache": "give kv_connector='host'",
        "hicache_size": "give kv_connector='host' and kv_connector_bytes",
        "max_running_requests": "give max_num_seqs",
        "mem_fraction_static": "give gpu_memory_utilization",
        "model_path": "give model",
        "page_size": "give block_size",
        "pp_size": "give pipeline_parallel_size",
        "random_seed": "give seed",
        "tokenizer_path": "give tokenizer",
        "tp_size": "give tensor_parallel_size",
    },
}
"""Library -> option of its engine -> advice for this engine."""

SPECULATION_PEERS: Peers = {
    "vLLM's": {
        "method": "give sources and draft_model",
        "num_speculative_tokens": "give max_draft_tokens",
        "prompt_lookup_max": "give sources=('ngram',) and max_draft_tokens",
        "rejection_sample_method": "a draft is kept exactly when it is the token that would be drawn; leave it out",
    },
    "Hugging Face's": {
        "assistant_model": "give draft_model",
        "num_assistant_tokens": "give max_draft_tokens",
        "prompt_lookup_num_tokens": "give sources=('ngram',) and max_draft_tokens",
    },
    "SGLang's": {
        "speculative_draft_model_path": "give draft_model",
        "speculative_num_draft_tokens": "give max_draft_tokens",
    },
}
"""Library -> option of its speculative decoding -> advice for this engine."""

SAMPLING_PEERS: Peers = {
    "vLLM's": {
        "best_of": "give n and keep the best by cumulative_logprob",
        "early_stopping": _NO_BEAMS,
        "flat_logprobs": "log-probs are always flat arrays, float32 [tokens]; leave it out",
        "guided_decoding": _GRAMMAR,
        "length_penalty": _NO_BEAMS,
        "logits_processors": "give EngineConfig(logits_processors=...) and their arguments as extra_args",
        "prompt_logprob_start": "LLM.score_candidates scores completions alone, behind their prompts",
        "prompt_logprob_token_ids": "LLM.score_candidates(prompts, completions, candidate_ids) scores given tokens",
        "repetition_detection": "give stop_regex, or end requests yourself with abort",
        "routed_experts_prompt_start": "routed_experts are those of all tokens but the last; take a slice of them",
        "skip_reading_prefix_cache": "prompt_logprobs bypasses the cache by itself; leave it out",
        "thinking_token_budget": "give thinking_budget",
        "use_beam_search": _NO_BEAMS,
    },
    "Hugging Face's": {
        "bad_words_ids": "give bad_words, as strings",
        "begin_suppress_tokens": "give logit_bias",
        "do_sample": _GREEDY,
        "eos_token_id": "end ids are the checkpoint's own; add others as stop_token_ids",
        "epsilon_cutoff": "give min_p or top_p",
        "eta_cutoff": "give min_p or top_p",
        "forced_eos_token_id": "a completion cut by max_tokens has finish_reason 'length'; append the token yourself",
        "logits_processor": "give EngineConfig(logits_processors=...) and their arguments as extra_args",
        "max_length": "it counts the prompt: give max_tokens, the new tokens only",
        "max_new_tokens": "give max_tokens",
        "min_length": "it counts the prompt: give min_tokens, the new tokens only",
        "min_new_tokens": "give min_tokens",
        "no_repeat_ngram_size": "give repetition_penalty, presence_penalty or frequency_penalty",
        "num_beams": _NO_BEAMS,
        "num_return_sequences": "give n",
        "output_logits": "give logprobs",
        "output_scores": "give logprobs",
        "pad_token_id": "outputs are not padded; a rollout pads with the tokenizer's own",
        "return_dict_in_generate": "outputs are always objects; leave it out",
        "stop_strings": "give stop",
        "stopping_criteria": "give stop, stop_regex or stop_token_ids, or end requests yourself with abort",
        "streamer": "AsyncLLM.generate streams",
        "suppress_tokens": "give logit_bias or bad_words",
        "typical_p": "give min_p or top_p",
        "use_cache": _ALWAYS_ON,
    },
    "OpenAI's": {
        "max_completion_tokens": "give max_tokens",
        "response_format": _GRAMMAR,
        "stream": "AsyncLLM.generate streams; output_kind says what",
        "top_logprobs": "give logprobs, the number of most likely tokens",
    },
    "SGLang's": {
        "custom_params": "give thinking_budget, or EngineConfig(logits_processors=...) and extra_args",
        "ebnf": _GRAMMAR,
        "json_schema": _GRAMMAR,
        "max_thinking_tokens": "give thinking_budget",
        "no_stop_trim": "give include_stop_str_in_output=True",
        "regex": _GRAMMAR,
        "return_entropy": "give entropy=True",
        "return_logprob": "give logprobs=0",
        "return_sampling_mask": "give return_support=True",
        "sampling_seed": "give seed",
        "token_ids_logprob": "give logprob_token_ids",
        "top_logprobs_num": "give logprobs, the number of most likely tokens",
    },
}
"""Library -> setting of one request -> advice for this engine."""

LORA_PEERS: Peers = {
    "vLLM's": {
        "base_model_name": "leave it out: an adapter of another base is refused by its shapes",
        "load_inplace": "give a higher revision for other values",
        "lora_int_id": "leave it out: adapters have names alone",
        "lora_local_path": "give path",
        "lora_name": "give name",
        "lora_path": "give path",
        "lora_tensors": "give tensors",
        "peft_config": "give config",
    },
}
"""Library -> option of its adapters -> advice for this engine."""

POOLING_PEERS: Peers = {
    "vLLM's": {
        "activation": "give kind='classify' for logits, and apply a function to them yourself",
        "dimensions": "cut the rows of the result yourself",
        "embed_dtype": "results are float32; convert them yourself",
        "pooling_task": "give kind",
        "pooling_type": "give kind",
        "returned_token_ids": "choose columns of the result yourself",
        "softmax": "kind='classify' returns logits; apply softmax yourself",
        "step_tag_id": "give step_token_ids",
        "task": "give kind",
        "use_activation": "kind='classify' returns logits; apply softmax or sigmoid yourself",
    },
    "sentence-transformers'": {
        "normalize_embeddings": "give normalize",
        "pooling_mode": "give kind",
    },
}
"""Library -> setting of one pooling request -> advice for this engine."""

CALL_PEERS: Peers = {
    "vLLM's": {
        "chat_template_content_format": "parts reach templates that read them, others get one str; leave it out",
        "guided_options_request": _GRAMMAR,
        "mm_processor_kwargs": "the checkpoint's files set how pictures are processed; leave it out",
        "prompt_token_ids": "give the lists of ids as prompts",
        "tokenization_kwargs": 'give {"prompt": text, "add_special_tokens": False} as prompt or truncate_prompt_tokens',
    },
    "Hugging Face's": {
        "add_special_tokens": 'give {"prompt": text, "add_special_tokens": False} as a prompt',
        "attention_mask": "give ids without padding, and no mask",
        "documents": "give chat_template_kwargs={'documents': ...}",
        "enable_thinking": "give chat_template_kwargs={'enable_thinking': ...}",
        "generation_config": "give sampling_params; get_default_sampling_params() tells the checkpoint's",
        "input_ids": "give the lists of ids as prompts, without padding",
        "inputs": "give prompts",
    },
    "TorchRL's": {
        "actor_index": "give replica_index to RolloutService.generate",
    },
    "TRL's": {
        "generation_kwargs": "give sampling_params",
        "max_completion_length": "give sampling_params=SamplingParams(max_tokens=...)",
        "max_prompt_length": "give sampling_params=SamplingParams(truncate_prompt_tokens=...)",
        "num_generations": "give num_samples to rollout, or n in sampling_params",
        "reward_funcs": "give reward_fn",
    },
}
"""Library -> argument of a call that generates -> advice for this engine."""


def peer_option(peers: Peers, name: str) -> str | None:
    """Message for an option of another library; None if no table has `name`."""
    for whose, options in peers.items():
        if name in options:
            return f"'{name}' is an option of {whose} that does not exist here: {options[name]}."
    return None
