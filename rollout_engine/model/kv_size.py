"""Sizes the KV pool, and caps the length of a sequence to the tokens that fit it."""

import psutil

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.model.modules.loaded_model import LoadedModel

_CPU_POOL_BYTES = 4 << 30


def bytes_per_block(loaded: LoadedModel, block_size: int) -> int:
    """Bytes of one block in this process: keys and values, or latents, of all layers that have their own."""
    return sum(layer.cached_per_token for layer in loaded.geometry) * block_size * loaded.dtype.itemsize


def describe_pool(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> str:
    """The size of the KV pool, for the start-up line."""
    mib = num_blocks * bytes_per_block(loaded, config.tokens_per_block) / 2**20
    return f"KV pool {num_blocks} blocks of {config.tokens_per_block} tokens ({mib:.0f} MiB)"


DRAFT_SHARE = 8
"""The draft model's KV pool has this part of the bytes of the policy's, unless its size is given."""


def size_pool(config: EngineConfig, loaded: LoadedModel, device_bytes: int | None = None) -> int:
    """Number of KV blocks: as given, or as many as `kv_cache_bytes` or the CPU default hold.

    The default never exceeds the tokens of `max_num_seqs` sequences of the longest length. `device_bytes`: all memory
    of the device that holds the pool; None: the host does. Raises `ConfigError` for a pool larger than that.
    """
    block_bytes = bytes_per_block(loaded, config.tokens_per_block)
    if config.num_kv_blocks is not None:
        num_bytes = config.num_kv_blocks * block_bytes * loaded.num_ranks
        _check_fits("num_kv_blocks", config.num_kv_blocks, num_bytes, device_bytes)
        return config.num_kv_blocks
    given = config.kv_cache_bytes
    if given is not None:
        _check_fits("kv_cache_bytes", given, given, device_bytes)
    pool_bytes = given if given is not None else min(_CPU_POOL_BYTES, psutil.virtual_memory().available // 4)
    num_blocks = pool_bytes // (block_bytes * loaded.num_ranks)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_bytes={pool_bytes} holds not even one KV block: one block of {config.tokens_per_block} tokens "
            f"takes {block_bytes} bytes ({len(loaded.geometry)} layers). Give at least that, or a smaller block_size."
        )
    return num_blocks if given is not None else min(num_blocks, most_blocks(config, loaded))


def most_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    """Blocks that `max_num_seqs` sequences of the longest length fill."""
    return config.max_num_seqs * -(-(config.max_model_len or loaded.max_model_len) // config.tokens_per_block)


def _check_fits(field: str, value: int, num_bytes: int, device_bytes: int | None) -> None:
    """Refuse a pool larger than memory: host pages are allocated at first touch, which would kill the process later."""
    place = "machine" if device_bytes is None else "device"
    total = psutil.virtual_memory().total if device_bytes is None else device_bytes
    if num_bytes > total:
        raise ConfigError(f"{field}={value} asks for {num_bytes} bytes of KV pool; this {place} has {total} in all.")


def cap_model_len(config: EngineConfig, checkpoint_len: int, num_blocks: int) -> int:
    """`max_model_len`: the checkpoint's or the user's, capped so that one sequence fits the pool."""
    pool_tokens = num_blocks * config.tokens_per_block
    if config.max_model_len is None:
        return min(checkpoint_len, pool_tokens)
    if config.max_model_len > checkpoint_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {checkpoint_len} positions this checkpoint has."
        )
    if config.max_model_len > pool_tokens:
        raise ConfigError(
            f"max_model_len={config.max_model_len} does not fit the KV pool of {num_blocks} blocks of "
            f"{config.tokens_per_block} = {pool_tokens} tokens. Give more KV memory or a smaller max_model_len."
        )
    return config.max_model_len
