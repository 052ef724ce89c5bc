"""Numbers that stand for pictures in the identities of KV blocks: equal for equal pictures, and for no others.

    token ids   5  9  [img] [img] [brk] [img]  7      of a prompt; spans of pictures begin and end with a placeholder
    keys        5  9   2k   2k+1  [brk] 2k+1   7      k: of this picture alone, from 2**30 on

So a block is found again only if the features before and in it are those of the same pictures. Token ids are below
2**31. The first placeholder of a span has a number of its own: the same picture twice is not one of twice its length.
"""

from collections import OrderedDict
from collections.abc import Callable

from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.pictures import PictureInfo

_FIRST, _END = 1 << 30, 1 << 31
_MAX_KNOWN = 1 << 16
"""Digests that are remembered: those used last. A picture that was forgotten gets a new number: a miss."""


class PictureKeys:
    """Numbers of pictures, by their digests; none is given twice."""

    def __init__(self, info: PictureInfo | None, *, max_known: int = _MAX_KNOWN) -> None:
        self._info, self._max_known = info, max_known
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = _FIRST

    def keys_of(self, request: EngineCoreRequest) -> list[int]:
        """Keys of the tokens of a prompt with pictures, which has been checked. Raises `LifecycleError`."""
        assert self._info is not None, "pictures are checked by then"
        return keyed_prompt(request, self._info.image_token_id, self._number_of)

    def _number_of(self, digest: bytes) -> int:
        number = self._numbers.get(digest)
        if number is None:
            if self._next == _END:
                raise LifecycleError(f"add_request: this engine has had {_END - _FIRST} pictures: make a new one.")
            number = self._numbers[digest] = self._next
            self._next += 1
            if len(self._numbers) > self._max_known:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(digest)
        return number


def keyed_prompt(request: EngineCoreRequest, image_token_id: int, number_of: Callable[[bytes], int]) -> list[int]:
    """A prompt's token ids, with `number_of` a picture's digest in the placeholders of its span: 2k, 2k+1, 2k+1..."""
    keys = request.prompt_token_ids.copy()
    for placed in request.pictures:
        number = 2 * number_of(placed.picture.digest)
        span = keys[placed.start : placed.end]
        keys[placed.start : placed.end] = [number + 1 if each == image_token_id else each for each in span]
        keys[placed.start] = number
    return keys
