"""Makes the core over a loaded model, and describes that model and every choice made at start-up."""

import msgspec

from rollout_engine.base.config import EngineConfig
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.tier import Tier
from rollout_engine.engine.client import EngineInfo
from rollout_engine.engine.step_trace import StepTrace
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.execution.model_info import ModelInfo

_STATE_INTERVAL = 512
"""Tokens between the states of a long prompt that the prefix cache keeps, rounded up to blocks."""


def make_core(config: EngineConfig, executor: InlineExecutor) -> EngineCore:
    """Make the core over a loaded model; with `config.step_trace` its steps are written there. Raises `ConfigError`."""
    sizes = core_config(config, executor.info)
    core = EngineCore(executor, sizes, prepare=executor.prepare_grammar, tier=make_tier(executor))
    if config.step_trace is not None:
        core.recorders.append(StepTrace(config.step_trace, config.step_trace_bytes, config.model))
    return core


def make_tier(executor: InlineExecutor) -> Tier | None:
    """The core's tier over the executor's KV connector; None without one."""
    link = executor.kv_link
    if link is None:
        return None
    return Tier(
        link,
        block_bytes=link.layout.block_bytes,
        state_bytes=link.layout.state_bytes,
        weights=lambda: executor.live_digest,
        save_now=executor.save_kv,
    )


def core_config(config: EngineConfig, info: ModelInfo) -> CoreConfig:
    """Sizes of the core over a loaded model."""
    return CoreConfig(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=info.vocab_size,
        max_prefill_beside_decode=info.max_prefill_beside_decode,
        enable_prefix_caching=config.enable_prefix_caching,
        admission=config.admission,
        async_scheduling=config.schedules_ahead,
        max_loras=config.max_loras,
        speculation=config.speculates if info.step_seconds else None,
        step_seconds=info.step_seconds,
        drafted_step_seconds=info.drafted_step_seconds,
        draft=info.draft,
        generates=info.generates,
        pooling=info.pooling,
        routing=info.routing,
        num_state_slots=info.num_state_slots,
        state_interval=-(-_STATE_INTERVAL // info.block_size) * info.block_size,
        pictures=info.pictures,
        max_prompt_pictures=config.max_prompt_pictures,
        has_tier=config.kv_connector is not None,
        num_stages=config.pipeline_parallel_size,
    )


def describe_choices(config: EngineConfig, info: ModelInfo) -> str:
    """Every choice made at start-up, in one line."""
    tokenizer = "none" if config.skip_tokenizer_init else config.tokenizer or config.model
    return (
        f"{info.choices}{_describe_connector(config)}, max_model_len {info.max_model_len}, "
        f"max_num_seqs {config.max_num_seqs}, max_num_batched_tokens {config.max_num_batched_tokens}, "
        f"async scheduling {'on' if config.schedules_ahead else 'off'}, "
        f"speculation {'on' if info.step_seconds else 'off'}, tokenizer {tokenizer}, "
        f"end ids of the checkpoint {info.eos_token_ids}, seed {config.seed}"
    )


def _describe_connector(config: EngineConfig) -> str:
    return "" if config.kv_connector is None else f", KV connector {config.kv_connector}"


def engine_info(config: EngineConfig, info: ModelInfo) -> EngineInfo:
    """Describe a loaded model to front ends."""
    sizes = msgspec.structs.asdict(info) | {"choices": describe_choices(config, info)}
    return EngineInfo(config=config, **sizes)
