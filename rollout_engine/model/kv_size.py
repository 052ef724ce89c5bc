"""Sizes the pools of KV and of states, and caps the length of a sequence to the tokens that fit KV."""

import psutil

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.model.modules.loaded_model import LoadedModel

_CPU_POOL_BYTES = 4 << 30
_SNAPSHOTS_PER_SEQUENCE = 2
"""By default the prefix cache holds at most this many states for each of `max_num_seqs`."""


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
    _check_state_option(config, loaded)
    block_bytes = bytes_per_block(loaded, config.tokens_per_block)
    if config.num_kv_blocks is not None:
        num_bytes = config.num_kv_blocks * block_bytes * loaded.num_ranks
        _check_fits("num_kv_blocks", config.num_kv_blocks, num_bytes, device_bytes)
        return config.num_kv_blocks
    given = config.kv_cache_bytes
    if given is not None:
        _check_fits("kv_cache_bytes", given, given, device_bytes)
    pool_bytes = given if given is not None else min(_CPU_POOL_BYTES, psutil.virtual_memory().available // 4)
    if block_bytes == 0:  # no layer attends
        return most_blocks(config, loaded)
    num_blocks = pool_bytes // (block_bytes * loaded.num_ranks)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_bytes={pool_bytes} holds not even one KV block: one block of {config.tokens_per_block} tokens "
            f"takes {block_bytes} bytes ({len(loaded.geometry)} layers). Give at least that, or a smaller block_size."
        )
    return num_blocks if given is not None else min(num_blocks, most_blocks(config, loaded))


def bytes_per_state(loaded: LoadedModel) -> int:
    """Bytes of one slot: the states that all layers keep of a sequence; 0 if none keeps any."""
    return sum(layer.state.bytes_of(loaded.dtype) for layer in loaded.geometry if layer.state is not None)


def size_states(config: EngineConfig, loaded: LoadedModel, num_blocks: int, device_bytes: int | None = None) -> int:
    """Number of slots of states; 0 if the model keeps none.

    One for each of `max_num_seqs` sequences and one to move a state to, those behind the drafted tokens of a sequence,
    and those of the prefix cache: as many as `state_cache_bytes` hold, by default as half the KV pool's `num_blocks`,
    and no more than two for each sequence. Bytes are of all ranks together. `device_bytes`: as that of `size_pool`.

    Raises `ConfigError` for more than there is.
    """
    _check_state_option(config, loaded)
    slot_bytes = bytes_per_state(loaded)
    if slot_bytes == 0:
        return 0
    drafted = 0 if config.speculates is None else config.speculates.max_draft_tokens
    needed = config.max_num_seqs + 1 + drafted
    _check_fits("max_num_seqs", config.max_num_seqs, needed * slot_bytes * loaded.num_ranks, device_bytes, "states")
    if not config.enable_prefix_caching:
        return needed
    if config.state_cache_bytes is not None:
        _check_fits("state_cache_bytes", config.state_cache_bytes, config.state_cache_bytes, device_bytes, "states")
        return needed + config.state_cache_bytes // (slot_bytes * loaded.num_ranks)
    half = num_blocks * bytes_per_block(loaded, config.tokens_per_block) // 2
    return needed + min(half // slot_bytes, _SNAPSHOTS_PER_SEQUENCE * config.max_num_seqs)


def bytes_of_states(config: EngineConfig, loaded: LoadedModel, room: int, device_bytes: int) -> int:
    """Bytes that states take of `room`, which they share with a KV pool that takes the rest; other arguments as above.

    By default states of the prefix cache get a third of it at most, which is half of the pool's share.
    """
    slot_bytes, num_least = bytes_per_state(loaded), size_states(config, loaded, 0, device_bytes)
    num_bytes = num_least * slot_bytes
    if config.enable_prefix_caching and config.state_cache_bytes is None:
        most = _SNAPSHOTS_PER_SEQUENCE * config.max_num_seqs * slot_bytes
        num_bytes += min(max(room - num_bytes, 0) // 3, most)
    return num_bytes


def describe_states(loaded: LoadedModel, num_slots: int) -> str:
    """The size of the pool of states, for the start-up line; "" without one."""
    if num_slots == 0:
        return ""
    size = f"{num_slots * bytes_per_state(loaded) / 2**20:.0f} MiB"
    if loaded.cut is None or loaded.cut.group is not None:
        return f", states {num_slots} slots ({size})"
    num_recurrences = sum(layer.state is not None and layer.state.recurrence is not None for layer in loaded.geometry)
    whole = ", recurrences whole on every rank" if len(loaded.cut.mixers) < num_recurrences else ""
    return f", states {num_slots} slots ({size} a rank{whole})"


def _check_state_option(config: EngineConfig, loaded: LoadedModel) -> None:
    if config.state_cache_bytes is not None and bytes_per_state(loaded) == 0:
        raise ConfigError(
            f"state_cache_bytes={config.state_cache_bytes} is for models whose layers keep states, and no layer of "
            f"{type(loaded.module).__name__} does. Leave it out."
        )


def most_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    """Blocks that `max_num_seqs` sequences of the longest length fill."""
    return config.max_num_seqs * -(-(config.max_model_len or loaded.max_model_len) // config.tokens_per_block)


def _check_fits(field: str, value: int, num_bytes: int, device_bytes: int | None, what: str = "KV pool") -> None:
    """Refuse a pool larger than memory: host pages are allocated at first touch, which would kill the process later."""
    place = "machine" if device_bytes is None else "device"
    total = psutil.virtual_memory().total if device_bytes is None else device_bytes
    if num_bytes > total:
        raise ConfigError(f"{field}={value} asks for {num_bytes} bytes of {what}; this {place} has {total} in all.")


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
