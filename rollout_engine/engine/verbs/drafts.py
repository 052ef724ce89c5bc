"""Verbs for the finished samples that tokens are drafted from: read them, and add to them."""

from rollout_engine.base.errors import RequestError
from rollout_engine.base.kept_samples import KeptSamples
from rollout_engine.engine import combine
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.verb_table import VERBS


@VERBS.add(public=False, combine=combine.samples)
def get_kept_samples(driver: EngineDriver, *, timeout: float | None = None) -> KeptSamples:
    """The finished samples that the engine keeps to draft from; of a fleet, those of all replicas."""
    index = driver.core.draft_index
    return KeptSamples.of([] if index is None else index.list_prompts())


@VERBS.add(public=False, combine=combine.nothing)
def add_kept_samples(driver: EngineDriver, samples: KeptSamples, *, timeout: float | None = None) -> None:
    """Keep these samples, as the newest, to draft from; of a fleet every replica keeps them.

    An engine that keeps none drops them. Raises `RequestError`, nothing kept, for a token that the model does not have.
    """
    vocab_size = driver.executor.info.vocab_size
    if len(samples.token_ids) and int(samples.token_ids.max()) >= vocab_size:
        bound = f"tokens of the model's vocabulary, 0 to {vocab_size - 1}"
        raise RequestError(f"add_kept_samples: the samples have token {samples.token_ids.max()}; must be {bound}.")
    if driver.core.draft_index is not None:
        driver.core.draft_index.add(samples.prompts())
