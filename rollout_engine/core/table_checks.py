"""Checks that one sequence and its block table agree, for tests."""

from collections.abc import Callable

from rollout_engine.core.request import Sequence


def check_table(sequence: Sequence, block_size: int, is_shared: Callable[[int], bool]) -> None:
    """Assert that blocks, computed tokens and known prefix of a sequence agree. `is_shared`: of a block."""
    name = sequence.sequence_id
    num_computed, num_blocks = sequence.num_computed_tokens, len(sequence.block_ids)
    assert num_computed <= sequence.num_tokens, f"{name}: computed {num_computed} of {sequence.num_tokens} tokens"
    assert num_computed <= num_blocks * block_size, f"{name}: {num_computed} tokens in {num_blocks} blocks"
    assert (num_computed == 0) == (sequence.kv_min_version is None), f"{name}: KV without a version"
    assert len(sequence.prefix) <= num_computed // block_size, f"{name}: a partial block was published"
    assert sequence.num_sent_blocks <= num_blocks, f"{name}: the runner knows more blocks than there are"
    written = sequence.block_ids[num_computed // block_size : sequence.num_writable_tokens // block_size]
    assert not any(map(is_shared, written)), f"{name}: a shared block would be written"
    for index, identity in enumerate(sequence.prefix):
        tokens = sequence.token_ids[index * block_size : (index + 1) * block_size]
        if sequence.request.prompt_keys is not None:
            tokens = sequence.request.put_keys(tokens, index * block_size)
        assert identity.holds(tokens), f"{name}: block {index} was published with other tokens"
