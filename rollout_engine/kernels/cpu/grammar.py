"""ctypes wrapper of `grammar.cpp`. Callers check that `build.load_kernels()` is not None."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_double, c_int64, c_size_t, c_uint8, c_uint32, c_void_p
from enum import IntEnum
from functools import cache

import numpy as np
import torch

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import array_address

FUNCTIONS = (
    "consume_tokens",
    "validate_tokens",
    "rollback",
    "compute_mask_into",
    "is_accepting",
    "is_stopped",
    "is_error",
)
"""llguidance's C functions that `fill` calls, in the order of their addresses; each name begins with llg_matcher_."""


class Outcome(IntEnum):
    """How the grammar of one sequence was followed; all but `FILLED` leave masks that allow all tokens."""

    FILLED = 0
    """The masks hold the tokens that the grammar allows."""
    ENDED = 1
    """The sequence has ended: it has no matcher, or one of its tokens ends it."""
    REFUSED = 2
    """The grammar does not allow one of the sequence's tokens."""
    FAILED = 3
    """The matcher reports an error."""
    SLOW = 4
    """A mask took longer than allowed."""
    STUCK = 5
    """The matcher cannot go back to the place before the draft."""


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("functions", c_void_p),
        ("sequences", c_int64),
        *((name, c_void_p) for name in ("matchers", "token_ends", "num_drafted", "tokens", "text_bits", "stop_bits")),
        *((name, c_void_p) for name in ("masks", "first_masks")),
        ("words", c_int64),
        ("max_seconds", c_double),
        *((name, c_void_p) for name in ("outcomes", "places", "seconds")),
        ("threads", c_int64),
    ]


class Followed:
    """Results of `fill` for N sequences."""

    def __init__(self, num_sequences: int) -> None:
        self.outcomes = np.zeros(num_sequences, np.int64)
        """int64 [N], the `Outcome` of each sequence."""
        self.places = np.zeros(num_sequences, np.int64)
        """int64 [N], index of the refused token among the sequence's own; 0 where none was refused."""
        self.seconds = np.zeros(num_sequences)
        """float64 [N], computing time of the sequence's slowest mask."""


def functions(library: ctypes.CDLL) -> np.ndarray:
    """The addresses of `FUNCTIONS` in llguidance's library, uint64. Raises `AttributeError` where one is missing."""
    found = [ctypes.cast(getattr(library, f"llg_matcher_{name}"), c_void_p).value for name in FUNCTIONS]
    return np.array(found, np.uint64)


def fill(
    functions: np.ndarray,
    matchers: np.ndarray,
    tokens: np.ndarray,
    token_ends: np.ndarray,
    num_drafted: np.ndarray,
    bits: tuple[np.ndarray, np.ndarray],
    masks: np.ndarray,
    first_masks: np.ndarray,
    max_seconds: float,
) -> Followed:
    """Let N matchers take their sequences' new tokens, and fill the masks behind them and behind drafted ones.

    Args:
        functions: those of the function `functions`.
        matchers: addresses of llguidance's matchers, uint64 [N]; 0 for a sequence that has ended.
        tokens: the tokens of all sequences end to end, uint32; the drafted ones of each come last.
        token_ends: where each sequence's tokens end, int64 [N].
        num_drafted: how many of them are drafted, int64 [N]. Matchers do not keep those.
        bits: addresses uint64 [N] of masks: of the tokens that end no sequence, and of those that end this one.
        masks: filled with the masks, uint32 [N + drafted tokens, W].
        first_masks: the mask behind each sequence, int64 [N]; those behind its drafted tokens follow it.
        max_seconds: computing time that one mask may take.
    """
    count, words = len(matchers), masks.shape[1]
    one, index, place = (count,), np.dtype(np.int64), np.dtype(np.uint64)
    found = Followed(count)
    args = _Arguments(
        array_address("functions", functions, place, (len(FUNCTIONS),)),
        count,
        array_address("matchers", matchers, place, one),
        array_address("token_ends", token_ends, index, one),
        array_address("num_drafted", num_drafted, index, one),
        array_address("tokens", tokens, np.dtype(np.uint32)),
        *(array_address("bits", each, place, one) for each in bits),
        array_address("masks", masks, np.dtype(np.uint32)),
        array_address("first_masks", first_masks, index, one),
        words,
        max_seconds,
        found.outcomes.ctypes.data,
        found.places.ctypes.data,
        found.seconds.ctypes.data,
        threads=min(count, torch.get_num_threads()),
    )
    _library().grammar_fill(ctypes.addressof(args))
    return found


DIVIDE = ctypes.CFUNCTYPE(c_size_t, c_void_p, POINTER(c_uint8), c_size_t, POINTER(c_uint32), c_size_t)


class TokensOfTexts:
    """Divides texts into tokens for llguidance, from any thread; a text that was seen before without Python."""

    def __init__(self, divide: Callable[[bytes], Sequence[int]]) -> None:
        def divided(_: int, text: "ctypes._Pointer[c_uint8]", length: int, tokens: object, size: int) -> int:
            found = divide(ctypes.string_at(text, length)) if length else ()
            for place, token in enumerate(found[:size]):
                tokens[place] = token  # type: ignore[index]
            return len(found)

        self._divide = DIVIDE(divided)  # alive as long as C++ may call it
        self.address = _library().grammar_texts_new(self._divide)
        self.function = ctypes.cast(_library().grammar_texts_divide, c_void_p).value
        """Address of a function like llguidance's LlgTokenizeFn, whose user data is `address`."""

    def close(self) -> None:
        """Free it; nothing may divide texts any more."""
        _library().grammar_texts_free(self.address)


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        grammar_fill=(None, c_void_p),
        grammar_texts_new=(c_void_p, DIVIDE),
        grammar_texts_free=(None, c_void_p),
        grammar_texts_divide=(c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t),
    )
