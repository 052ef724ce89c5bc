"""Numbers that stand for pictures in the identities of KV blocks: equal for equal pictures, and for no others.

    token ids   5  9  [img] [img] [brk] [img]  7      of a prompt; spans of pictures begin and end with a placeholder
    keys        5  9   2k   2k+1  [brk] 2k+1   7      k: of this picture alone, from 2**30 on

So a block is found again only if the features before and in it are those of the same pictures. Token ids are below
2**31. The first placeholder of a span has a number of its own: the same picture twice is not one of twice its length.
A picture whose span has other tokens between its placeholders has another number: where tokens see a picture to its
end, KV depends on the span behind them.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable

from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.pictures import PictureInfo

_FIRST, _END = 1 << 30, 1 << 31
FIRST_KEY = 2 * _FIRST
"""The smallest key of a picture's token; those of other tokens are their ids, which are smaller."""
_MAX_KNOWN = 1 << 16
"""Identities that are remembered: those used last. A picture that was forgotten gets a new number: a miss."""


class PictureKeys:
    """Numbers of pictures in their spans; none is given twice."""

    def __init__(self, info: PictureInfo | None, *, max_known: int = _MAX_KNOWN) -> None:
        self._info, self._max_known = info, max_known
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = _FIRST

    def keys_of(self, request: EngineCoreRequest) -> list[int]:
        """Keys of the tokens of a prompt with pictures, which has been checked. Raises `LifecycleError`."""
        assert self._info is not None, "pictures are checked by then"
        return keyed_prompt(request, self._info.image_token_id, self._number_of)

    def _number_of(self, identity: bytes) -> int:
        number = self._numbers.get(identity)
        if number is None:
            if self._next == _END:
                raise LifecycleError(f"add_request: this engine has had {_END - _FIRST} pictures: make a new one.")
            number = self._numbers[identity] = self._next
            self._next += 1
            if len(self._numbers) > self._max_known:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(identity)
        return number


def keyed_prompt(request: EngineCoreRequest, image_token_id: int, number_of: Callable[[bytes], int]) -> list[int]:
    """A prompt's token ids, with numbers of pictures in the placeholders of their spans: 2k, 2k+1, 2k+1...

    `number_of`: gives k for the 16 bytes that identify a picture and the tokens of its span.
    """
    keys = request.prompt_token_ids.copy()
    for placed in request.pictures:
        span = keys[placed.start : placed.end]
        number = 2 * number_of(_identity_of(placed.picture.digest, span))
        keys[placed.start : placed.end] = [number + 1 if each == image_token_id else each for each in span]
        keys[placed.start] = number
    return keys


def picture_identities(request: EngineCoreRequest, keys: list[int]) -> dict[int, bytes]:
    """k -> the 16 bytes that identify a picture and the tokens of its span. `keys`: those of the request's prompt."""
    tokens = request.prompt_token_ids
    return {
        keys[each.start] >> 1: _identity_of(each.picture.digest, tokens[each.start : each.end])
        for each in request.pictures
    }


def _identity_of(digest: bytes, span: list[int]) -> bytes:
    return hashlib.blake2b(digest + array("I", span).tobytes(), digest_size=16).digest()
