"""ctypes wrapper of `grammar.h`. Callers check that `build.load_kernels()` is not None."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from enum import IntEnum
from functools import cache

import numpy as np
import torch

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import array_address
from rollout_engine.kernels.cpu.sampling import PreparedRows

FUNCTIONS = (
    "consume_tokens",
    "validate_tokens",
    "rollback",
    "compute_mask_into",
    "is_accepting",
    "is_stopped",
    "is_error",
)
"""llguidance's C functions that are called here, in the order of their addresses; names begin with llg_matcher_."""


_INDEX, _TOKEN, _BOOL = np.dtype(np.int64), np.dtype(np.uint32), np.dtype(np.bool_)


class Outcome(IntEnum):
    """Result of following one sequence's grammar."""

    FOLLOWED = 0
    """The matcher took all of the sequence's tokens, and stands behind them."""
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
        *((name, c_void_p) for name in ("plain_bits", "first_places")),
        ("words", c_int64),
        ("max_seconds", c_double),
        *((name, c_void_p) for name in ("outcomes", "refused", "seconds")),
        ("threads", c_int64),
    ]


class _Restriction(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("rows", "grammars", "row_at", "tries_first", "masks")]


class Followed:
    """Results of following N sequences, until they are followed again."""

    def __init__(self, num_sequences: int) -> None:
        self.outcomes = np.zeros(num_sequences, np.int64)
        """int64 [N], the `Outcome` of each sequence."""
        self.refused = np.zeros(num_sequences, np.int64)
        """int64 [N], index of the refused token among the sequence's own; 0 where none was refused."""
        self.seconds = np.zeros(num_sequences)
        """float64 [N], computing time at the slowest place behind a token of the sequence."""


def functions(library: ctypes.CDLL) -> np.ndarray:
    """The addresses of `FUNCTIONS` in llguidance's library, uint64. Raises `AttributeError` where one is missing."""
    found = [ctypes.cast(getattr(library, f"llg_matcher_{name}"), c_void_p).value for name in FUNCTIONS]
    return np.array(found, np.uint64)


class Matchers:
    """N of llguidance's matchers, which C++ follows together. A *place* is where one stands behind some tokens.

    The first place of a sequence is behind its own tokens; one behind each token of its draft follows.
    """

    def __init__(
        self,
        functions: np.ndarray,
        addresses: np.ndarray,
        bits: tuple[np.ndarray, np.ndarray],
        plain: np.ndarray,
        num_drafted: Sequence[int],
    ) -> None:
        """
        Args:
            functions: those of the function `functions`.
            addresses: of the matchers, uint64 [N]; 0 for a sequence that has ended.
            bits: addresses uint64 [N] of masks: of the tokens that end no sequence, and of those that end this one.
            plain: the tokens that are text, of which a matcher can tell one by one, as a mask, uint32 [W].
            num_drafted: how many tokens of each sequence are drafted. Matchers do not keep those.
        """
        count, one = len(addresses), (len(addresses),)
        drafted = np.array(num_drafted, np.int64)
        ends = np.cumsum(1 + drafted)
        firsts, place = ends - drafted - 1, np.dtype(np.uint64)
        self._num_places = int(ends[-1])
        self._num_threads = min(count, torch.get_num_threads())
        self._scratch = np.empty((self._num_threads, len(plain)), np.uint32)
        self._found = Followed(count)
        self._alive = functions, addresses, bits, plain, drafted, firsts
        self._args = _Arguments(
            functions=array_address("functions", functions, place, (len(FUNCTIONS),)),
            sequences=count,
            matchers=array_address("addresses", addresses, place, one),
            num_drafted=array_address("num_drafted", drafted, _INDEX, one),
            text_bits=array_address("bits", bits[0], place, one),
            stop_bits=array_address("bits", bits[1], place, one),
            plain_bits=array_address("plain", plain, _TOKEN),
            first_places=array_address("firsts", firsts, _INDEX, one),
            words=len(plain),
            outcomes=self._found.outcomes.ctypes.data,
            refused=self._found.refused.ctypes.data,
            seconds=self._found.seconds.ctypes.data,
            threads=self._num_threads,
        )
        self._restriction = _Restriction(grammars=ctypes.addressof(self._args), masks=self._scratch.ctypes.data)
        self._restriction_address = ctypes.addressof(self._restriction)
        self._given: dict[str, np.ndarray] = {}

    def fill(
        self, tokens: np.ndarray, token_ends: np.ndarray, tried: np.ndarray, max_seconds: float
    ) -> tuple[np.ndarray, np.ndarray, Followed]:
        """Follow the sequences, and fill masks uint32 [M, W] of what may come at M places.

        Returns them, bool [M] whether a mask is filled, and how the sequences were followed. None is filled where a
        token is tried that may come, and the masks of a sequence that has ended or fails allow all.

        Args:
            tokens: the new tokens of all sequences end to end, uint32; the drafted ones of each come last.
            token_ends: where each sequence's tokens end, int64 [N].
            tried: a token for each place, int64 [M]; negative where its mask is wanted.
            max_seconds: computing time that one place may take.
        """
        self._take(tokens, token_ends, max_seconds)
        masks = np.empty((self._num_places, self._args.words), np.uint32)
        is_filled = np.empty(self._num_places, np.bool_)
        columns = array_address("tried", tried, _INDEX, (self._num_places,)), masks.ctypes.data
        _library().grammar_fill(ctypes.addressof(self._args), *columns, is_filled.ctypes.data)
        return masks, is_filled, self._found

    def restrict(
        self,
        tokens: np.ndarray,
        token_ends: np.ndarray,
        rows: PreparedRows,
        row_at: np.ndarray,
        tries_first: np.ndarray | None,
        max_seconds: float,
    ) -> Followed:
        """Follow the sequences, and draw the rows of R again whose tokens may not come, of those that may.

        Args:
            tokens: as for `fill`.
            token_ends: as for `fill`.
            rows: those that have been drawn, by uniforms of seeds and positions.
            row_at: the row of each place, int64 [M]; negative for none.
            tries_first: bool [R]: whether the row's token counts, and the second draw is by another uniform. Where not,
                it is drawn in any case, by the same. None: they all count.
            max_seconds: as for `fill`.
        """
        self._take(tokens, token_ends, max_seconds)
        if not rows.has_seeds:
            raise ValueError("rows should have seeds.")
        self._args.threads = min(self._num_threads, rows.num_threads)
        self._restriction.rows = rows.address
        self._give(self._restriction, "row_at", row_at, _INDEX, (self._num_places,))
        self._restriction.tries_first = None
        if tries_first is not None:
            column = array_address("tries_first", tries_first, _BOOL, (rows.num_rows,))
            self._restriction.tries_first = column
        _library().sampling_restrict(self._restriction_address)
        return self._found

    def _take(self, tokens: np.ndarray, token_ends: np.ndarray, max_seconds: float) -> None:
        self._give(self._args, "tokens", tokens, _TOKEN)
        self._give(self._args, "token_ends", token_ends, _INDEX, (self._args.sequences,))
        self._args.max_seconds = max_seconds

    def _give(
        self,
        arguments: ctypes.Structure,
        name: str,
        array: np.ndarray,
        dtype: np.dtype,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Set the address of an array. Most steps give the same one as the last, with other values."""
        if self._given.get(name) is not array:
            setattr(arguments, name, array_address(name, array, dtype, shape))
            self._given[name] = array


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        grammar_fill=(None, c_void_p, c_void_p, c_void_p, c_void_p),
        sampling_restrict=(None, c_void_p),
    )
