"""How many KV blocks, and how long a sequence may be."""

from collections.abc import Sequence

import psutil
import torch

from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError
from rollout_engine.model.geometry import LayerGeometry

_CPU_POOL_BYTES = 4 << 30


def bytes_per_block(geometry: Sequence[LayerGeometry], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block, keys and values of all layers."""
    per_token = sum(layer.num_kv_heads * (layer.head_dim_k + layer.head_dim_v) for layer in geometry)
    return per_token * block_size * dtype.itemsize


def size_pool(config: EngineConfig, geometry: Sequence[LayerGeometry], dtype: torch.dtype, model_len: int) -> int:
    """Number of KV blocks: as given, or as many as `kv_cache_bytes` or the CPU default hold.

    The default never exceeds what `max_num_seqs` sequences of `model_len` tokens can fill.
    """
    block_bytes = bytes_per_block(geometry, config.block_size, dtype)
    if config.num_kv_blocks is not None:
        _check_fits("num_kv_blocks", config.num_kv_blocks, config.num_kv_blocks * block_bytes)
        return config.num_kv_blocks
    given = config.kv_cache_bytes
    if given is not None:
        _check_fits("kv_cache_bytes", given, given)
    pool_bytes = given if given is not None else min(_CPU_POOL_BYTES, psutil.virtual_memory().available // 4)
    num_blocks = pool_bytes // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_bytes={pool_bytes} holds not even one KV block: one block of {config.block_size} tokens takes "
            f"{block_bytes} bytes ({len(geometry)} layers). Give at least that, or a smaller block_size."
        )
    if given is None:
        num_blocks = min(num_blocks, config.max_num_seqs * -(-model_len // config.block_size))
    return num_blocks


def _check_fits(field: str, value: int, num_bytes: int) -> None:
    """The pool's pages come at first touch: one that is too large would only be noticed when the system ends us."""
    total = psutil.virtual_memory().total
    if num_bytes > total:
        raise ConfigError(f"{field}={value} asks for {num_bytes} bytes of KV pool; this machine has {total} in all.")


def cap_model_len(config: EngineConfig, checkpoint_len: int, num_blocks: int) -> int:
    """`max_model_len`: the checkpoint's or the user's, capped so that one sequence fits the pool."""
    pool_tokens = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(checkpoint_len, pool_tokens)
    if config.max_model_len > checkpoint_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {checkpoint_len} positions this checkpoint has."
        )
    if config.max_model_len > pool_tokens:
        raise ConfigError(
            f"max_model_len={config.max_model_len} does not fit the KV pool of {num_blocks} blocks of "
            f"{config.block_size} = {pool_tokens} tokens. Give more KV memory or a smaller max_model_len."
        )
    return config.max_model_len
