"""Verbs on pictures: their features, and forgetting those that are kept.

None changes a result or a request in flight: those have their pictures.
"""

from collections.abc import Sequence

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import EncodedPictures, Picture
from rollout_engine.engine import combine
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.verb_table import VERBS


@VERBS.add(combine=combine.nothing)
def reset_mm_cache(driver: EngineDriver, *, timeout: float | None = None) -> None:
    """Forget the pictures that other processes keep so that each is sent to them once; later requests send theirs.

    Of all clients: one that reads no messages at present has its pictures kept until it does. An engine of one rank in
    this process keeps none, and this does nothing.
    """
    driver.forget_received_pictures()
    driver.executor.reset_mm_cache()


@VERBS.add(combine=combine.nothing)
def reset_encoder_cache(driver: EngineDriver, *, timeout: float | None = None) -> None:
    """Forget the vision tower's outputs, on every rank; the pictures of later requests are encoded again.

    Not needed after an update: the tower's outputs are dropped with its weights. A model without a vision tower keeps
    none, and this does nothing.
    """
    driver.executor.reset_encoder_cache()


@VERBS.add(public=False)
def get_picture_features(
    driver: EngineDriver,
    digests: Sequence[bytes],
    arrays: Sequence[dict[str, np.ndarray]],
    *,
    timeout: float | None = None,
) -> EncodedPictures:
    """The features of pictures under the live weights, without an adapter; both lists have an entry for each.

    If the arrays of a picture are empty, its features are given if the engine keeps them. Else they are computed, under
    the digest that the arrays have. Raises `RequestError` if the model takes no pictures, and `ConfigError` for arrays
    that it does not take as a picture.
    """
    driver.core.lifecycle.require_weights("get_picture_features")
    info = driver.executor.info.pictures
    refusal = "This engine's model takes no pictures." if info is None else info.unsupported_reason
    if refusal:
        raise RequestError.for_field("pictures", f"{len(digests)} pictures", "absent", refusal)
    if len(arrays) != len(digests):
        raise RequestError.for_field("arrays", f"a list of {len(arrays)}", f"one for each of {len(digests)} digests")
    pairs = zip(digests, arrays, strict=True)
    return driver.executor.encode_pictures([Picture.of(each) if each else Picture(key, {}) for key, each in pairs])
