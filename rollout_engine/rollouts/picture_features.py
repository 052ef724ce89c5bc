"""The engine's own features of a rollout's pictures, for a trainer whose vision tower is frozen.

digests ──> features that the engine keeps;  arrays of the others ──> those, encoded
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from tensordict import NonTensorStack, TensorDictBase

from rollout_engine.base.errors import RetryableError
from rollout_engine.base.pictures import EncodedPicture, EncodedPictures, Picture
from rollout_engine.batches.layout import check_batch
from rollout_engine.engine.verbs import VERBS
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.verb_methods import Face

Batch = TypeVar("Batch", bound=TensorDictBase)


class PictureFeatureMethods(Face):
    """Methods of a policy for the features of pictures."""

    def add_picture_features(self, batch: Batch, *, timeout: float | None = None) -> Batch:
        """Add the features that the engine's vision tower and projector compute of a rollout's pictures.

        Returns `batch`.

        `batch["picture_features"]` has for each sequence a tuple of `EncodedPicture`, in the order of
        `batch["pictures"]`. They are computed under the live weights without an adapter, or were kept since the
        rollout. `exact.inputs(batch, features=True)` gives them to a trainer with the same tower, which then encodes
        nothing. A batch without pictures stays as it is.

        After `timeout` seconds for each of two calls it raises `CallTimeoutError`; `RequestError` for anything but a
        rollout, and for a model that takes no pictures; `RetryableError` if weights arrive between the two calls.
        """
        self.frontend.require_own_process()
        rows = batch.get("pictures").tolist() if "pictures" in check_batch(batch).keys() else []
        pictures = {each.picture.digest: each.picture for row in rows for each in row}
        if pictures:
            found = _encode(self.frontend, list(pictures.values()), timeout)
            column = [tuple(found[each.picture.digest] for each in row) for row in rows]
            batch["picture_features"] = NonTensorStack(*column)
        return batch


def _encode(frontend: Frontend, pictures: Sequence[Picture], timeout: float | None) -> dict[bytes, EncodedPicture]:
    kept = _ask(frontend, pictures, [{} for _ in pictures], timeout)
    missing = [each for each, rows in zip(pictures, kept.rows, strict=True) if not len(rows)]
    found = _by_digest(pictures, kept)
    if missing:
        made = _ask(frontend, missing, [each.arrays for each in missing], timeout)
        if made.tower != kept.tower:
            what = "The weights of the vision tower changed while features of pictures were fetched"
            raise RetryableError(f"{what}: call add_picture_features again.")
        found |= _by_digest(missing, made)
    return found


def _ask(
    frontend: Frontend, pictures: Sequence[Picture], arrays: list[dict[str, np.ndarray]], timeout: float | None
) -> EncodedPictures:
    verb = VERBS["get_picture_features"]
    arguments: dict[str, Any] = {"digests": [each.digest for each in pictures], "arrays": arrays, "timeout": timeout}
    found: EncodedPictures = frontend.client.call(verb.name, arguments).wait(verb, arguments)
    return found


def _by_digest(pictures: Sequence[Picture], found: EncodedPictures) -> dict[bytes, EncodedPicture]:
    parts = zip(pictures, found.rows, found.deepstack, strict=True)
    return {
        each.digest: EncodedPicture(each.digest, found.tower, found.dtype, rows, deepstack)
        for each, rows, deepstack in parts
    }
