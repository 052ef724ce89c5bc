"""A check that an engine has released everything once its requests have ended."""

from typing import Any

from rollout_engine.faces.llm_engine import LLMEngine


def assert_clean(engine: LLMEngine) -> None:
    """Raise `AssertionError` if an idle engine still holds a request, a block, a reference or runner state."""
    assert not engine.has_unfinished_requests(), f"{engine.get_num_unfinished_requests()} requests are unfinished"
    engine.check_integrity()
    usage = engine.get_cache_usage()
    assert usage == 0, f"{usage:.1%} of the KV blocks are still referenced"
    client: Any = engine.frontend.client
    assert hasattr(client, "driver"), "the runner of another process cannot be looked at"
    while client.driver.core.has_unfinished_requests():  # tokens that drafts brought behind a stop string
        engine.step()
    engine.step()  # lets the runner forget ended sequences
    num_sequences = client.driver.executor.num_sequences
    assert num_sequences == 0, f"the runner still holds {num_sequences} sequences"
