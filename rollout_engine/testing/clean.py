"""Nothing may be left behind when work has ended."""

from rollout_engine.frontend.llm_engine import LLMEngine


def assert_clean(engine: LLMEngine) -> None:
    """AssertionError, saying what, if an idle engine still holds a request, a block, a reference or runner state."""
    assert not engine.has_unfinished_requests(), f"{engine.get_num_unfinished_requests()} requests are unfinished"
    engine.check_integrity()
    usage = engine.get_cache_usage()
    assert usage == 0, f"{usage:.1%} of the KV blocks are still referenced"
    engine.step()  # lets the runner forget what has ended
    num_sequences = engine.num_sequences_in_runner
    assert num_sequences == 0, f"the runner still holds {num_sequences} sequences"
