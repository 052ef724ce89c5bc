"""What the core counts."""

import msgspec


class CoreStats(msgspec.Struct):
    """Counters since start."""

    num_steps: int = 0
    num_failed_steps: int = 0
    """Steps in which the executor raised."""
    num_tokens_computed: int = 0
    num_prompt_tokens_computed: int = 0
    num_tokens_sampled: int = 0
    num_cached_tokens: int = 0
    """Tokens not computed because the prefix cache held them."""
    num_preemptions: int = 0
    """Running sequences that lost their blocks."""
    num_references_dropped: int = 0
    """Forked sequences that lost their blocks while they waited."""
    num_block_copies: int = 0
    num_pauses: int = 0
    last_pause_seconds: float = 0.0
    """From the call of the last pause until it was complete."""
    pause_seconds: float = 0.0
    """Sum over all pauses of the same."""

    def add_pause(self, seconds: float) -> None:
        """A pause took `seconds` to complete."""
        self.num_pauses += 1
        self.last_pause_seconds = seconds
        self.pause_seconds += seconds
