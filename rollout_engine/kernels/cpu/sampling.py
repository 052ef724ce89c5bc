"""ctypes wrapper of `sampling.cpp`. Callers check that `build.load_kernels()` is not None."""

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import DTYPES, address, argument_error, check_ids
from rollout_engine.kernels.row_stats import CHUNK, KeptTokens, RowStats, TokenMasks, TokenSets, Truncation, UniformsOf

_SMALL = 1 << 15
"""Number of logits below which a second thread does not pay."""


class _Rows(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("is_bf16", c_int64),
        ("rows", c_int64),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("temperature", "token", "maximum", "log_total", "logprob")),
        *((name, c_void_p) for name in ("uniform", "seed", "position", "greedy", "mass")),
        *((f"rules_{name}", c_void_p) for name in Truncation._fields),
        *((name, c_void_p) for name in ("candidate", "kept_log_total", "floor", "last_tie", "mask")),
        ("mask_words", c_int64),
        *((name, c_void_p) for name in ("mask_row", "masked", "grad", "grad_logits", "support_start", "support")),
        ("threads", c_int64),
    ]


class _Kept(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        *((name, c_int64) for name in ("is_bf16", "rows", "vocab_size", "stride")),
        *((name, c_void_p) for name in ("row", "floor", "last_tie", "count", "start", "ids")),
        ("threads", c_int64),
    ]


class PreparedRows:
    """N rows of logits to draw from, as C++ reads them, and maybe those of later steps.

    Results are written to `stats`, and with rules to `kept`. Raises `ValueError` for tensors it cannot read. The
    arguments are those of `kernels.draw.draw`; `drawn`: its result, for rows that are drawn again.
    """

    num_unusable = 0
    """Rows that could not be drawn from."""

    def __init__(
        self,
        logits: Tensor,
        temperatures: Tensor,
        uniforms: Tensor | UniformsOf,
        greedy: Tensor,
        rules: Truncation | None,
        drawn: tuple[RowStats, KeptTokens | None] | None = None,
    ) -> None:
        logits = readable(logits)
        self.num_rows, vocab_size = logits.shape
        if drawn is None:
            kept = None if rules is None else KeptTokens.empty(self.num_rows)
            drawn = RowStats.empty(self.num_rows, "cpu"), kept
        self.stats, self.kept = stats, kept = drawn
        self.args = _rows(logits, temperatures, stats)
        self.num_threads = self._num_threads_now()
        """Number of threads that there is memory for."""
        mass = torch.empty(self.num_threads, -(-vocab_size // CHUNK), dtype=torch.float64)
        if isinstance(uniforms, UniformsOf):
            self.args.seed = address("seeds", uniforms.seeds, torch.int64, (self.num_rows,))
            self.args.position = address("positions", uniforms.positions, torch.int64, (self.num_rows,))
        else:
            self.args.uniform = address("uniforms", uniforms, torch.float64, (self.num_rows,))
        self.args.greedy = address("greedy", greedy, torch.bool, (self.num_rows,))
        self.args.mass = mass.data_ptr()
        self._form = _form(logits)
        self._logits: Tensor | None = logits
        self._alive: list[object] = [temperatures, uniforms, greedy, mass]
        if rules is not None and kept is not None:
            rules, scratch = Truncation(*(c.contiguous() for c in rules)), torch.empty(2, self.num_threads, vocab_size)
            for name, found in zip(rules._fields, _rule_addresses(rules, self.num_rows), strict=True):
                setattr(self.args, f"rules_{name}", found)
            self.args.kept_log_total, self.args.floor, self.args.last_tie = _kept_addresses(kept, self.num_rows)
            self.args.candidate, self.args.masked = scratch[0].data_ptr(), scratch[1].data_ptr()
            self._alive += [rules, scratch]

    @property
    def has_seeds(self) -> bool:
        """Whether uniforms are given by what they depend on."""
        return self.args.uniform is None

    @property
    def address(self) -> int:
        """Address of the arguments that describe the rows."""
        return ctypes.addressof(self.args)

    def move(self, logits: Tensor, positions: Tensor) -> bool:
        """Move to the rows of another step, at these positions int64 [N].

        False if the logits have another form, or there are more or fewer threads than before.
        """
        if _form(logits) != self._form or self._num_threads_now() != self.num_threads:
            return False
        self.args.logits = address("logits", logits, logits.dtype, logits.shape, strided_rows=True)
        self.args.position = address("positions", positions, torch.int64, (self.num_rows,))
        self._logits, self._positions = logits, positions
        return True

    def release(self) -> None:
        """Release the logits; nothing is drawn before `move`."""
        self._logits = None

    def draw(self) -> tuple[RowStats, KeptTokens | None]:
        """C++ side of `kernels.draw.draw`."""
        self.num_unusable = _library().sampling_draw(self.address)
        return self.stats, self.kept

    def redraw(self, masks: TokenMasks) -> None:
        """C++ side of `kernels.draw.redraw`. Raises `ValueError` for masks that it cannot read."""
        self.args.mask, self.args.mask_row = _mask_addresses(masks, self.num_rows, self.args.vocab_size)
        self.args.mask_words = masks.bits.shape[1]
        _library().sampling_draw(self.address)
        self.args.mask = None

    def _num_threads_now(self) -> int:
        return min(self.num_rows, torch.get_num_threads())


def _form(logits: Tensor) -> tuple[object, ...]:
    return logits.shape, logits.dtype, logits.stride()


def score(logits: Tensor, temperatures: Tensor, tokens: Tensor, support: TokenSets | None = None) -> RowStats:
    """Statistics of every row, with the log-prob of its given token; `tokens` int64 [N].

    `support`: the only tokens that count; None: all. Raises `ValueError` for tensors it cannot read.
    """
    logits = readable(logits)
    stats = RowStats.empty(len(logits), "cpu")._replace(tokens=tokens.contiguous())
    args = _rows(logits, temperatures, stats)
    check_ids("token_ids", tokens, logits.shape[1], of="the vocabulary of these logits")
    _set_support(args, support)
    _library().sampling_score(ctypes.addressof(args))
    return stats


def kept_ids(logits: Tensor, rows: Tensor, floor: Tensor, last_tie: Tensor) -> TokenSets:
    """Tokens of some `rows` of `logits`, int64 [n], that edges [n] keep: C++ side of `kernels.truncation.kept_ids`."""
    logits, count = readable(logits), len(rows)
    check_ids("rows", rows, len(logits), of="the rows of these logits")
    found = torch.empty(count, dtype=torch.int64)
    args = _Kept(
        address("logits", logits, logits.dtype, logits.shape, strided_rows=True),
        logits.dtype == torch.bfloat16,
        count,
        logits.shape[1],
        logits.stride(0),
        address("rows", rows, torch.int64, (count,)),
        address("floor", floor, torch.float32, (count,)),
        address("last_tie", last_tie, torch.int64, (count,)),
        found.data_ptr(),
        threads=1 if count * logits.shape[1] < _SMALL else min(count, torch.get_num_threads()),
    )
    _library().sampling_kept(ctypes.addressof(args))
    starts = torch.zeros(count + 1, dtype=torch.int64)
    torch.cumsum(found, 0, out=starts[1:])
    ids = torch.empty(int(starts[-1]), dtype=torch.int32)
    if len(ids):
        args.start, args.ids = starts.data_ptr(), ids.data_ptr()
        _library().sampling_kept(ctypes.addressof(args))
    return TokenSets(starts, ids)


def gradient(
    logits: Tensor, temperatures: Tensor, stats: RowStats, grad: Tensor, support: TokenSets | None = None
) -> Tensor:
    """Gradient [N, V] of the log-probs with respect to `logits`, in their dtype, times `grad` float32 [N].

    `support`: that of `score`. Raises `ValueError` for tensors it cannot read.
    """
    own = readable(logits)
    args = _rows(own, temperatures, stats)
    _set_support(args, support)
    grad, result = grad.contiguous(), torch.empty(own.shape, dtype=own.dtype)
    args.grad, args.grad_logits = address("grad", grad, torch.float32, own.shape[:1]), result.data_ptr()
    _library().sampling_gradient(ctypes.addressof(args))
    return result.to(logits.dtype)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """C++ side of `kernels.rng.uniforms`. Raises `ValueError` for tensors it cannot read."""
    if not isinstance(seeds, Tensor) or seeds.dim() != 1:
        raise argument_error("seeds", seeds, "a tensor of one dimension")
    count = len(seeds)
    seeds, positions = seeds.contiguous(), positions.contiguous()  # alive until the call has read them
    result = torch.empty(count, dtype=torch.float64)
    keys = address("seeds", seeds, torch.int64, (count,))
    counters = address("positions", positions, torch.int64, (count,))
    _library().sampling_uniforms(keys, counters, count, result.data_ptr())
    return result


def _rows(logits: Tensor, temperatures: Tensor, stats: RowStats) -> _Rows:
    n, vocab_size = logits.shape
    if vocab_size == 0:
        raise argument_error("logits", logits, "of at least one token")
    return _Rows(
        address("logits", logits, logits.dtype, logits.shape, strided_rows=True),
        logits.dtype == torch.bfloat16,
        n,
        vocab_size,
        logits.stride(0),
        address("temperatures", temperatures, torch.float32, (n,)),
        address("token_ids", stats.tokens, torch.int64, (n,)),
        address("stats.maximum", stats.maximum, torch.float32, (n,)),
        address("stats.log_total", stats.log_total, torch.float64, (n,)),
        address("stats.logprobs", stats.logprobs, torch.float32, (n,)),
        threads=1 if n * vocab_size < _SMALL else min(n, torch.get_num_threads()),
    )


def _set_support(args: _Rows, support: TokenSets | None) -> None:
    """Set the tokens of each row; the caller has checked the ids. `support` has to outlive the call of C++."""
    if support is not None:
        args.support_start = address("support.starts", support.starts, torch.int64, (args.rows + 1,))
        args.support = address("support.ids", support.ids, torch.int32, (int(support.starts[-1]),))


def _kept_addresses(kept: KeptTokens, n: int) -> list[int]:
    dtypes = torch.float64, torch.float32, torch.int64
    named = zip(KeptTokens._fields, kept, dtypes, strict=True)
    return [address(f"kept.{name}", column, dtype, (n,)) for name, column, dtype in named]


def _rule_addresses(rules: Truncation, n: int) -> list[int]:
    dtypes = {"top_k": torch.int64}
    named = rules._asdict().items()
    addresses = [address(f"rules.{name}", x, dtypes.get(name, torch.float64), (n,)) for name, x in named]
    if not bool((rules.temperature > 0).all()):  # it scales the bins that tokens are sorted into
        raise ValueError(f"rules.temperature should be above 0, and its lowest is {float(rules.temperature.min())}.")
    return addresses


def _mask_addresses(masks: TokenMasks, n: int, vocab_size: int) -> tuple[int, int]:
    bits, places = masks
    if not isinstance(bits, Tensor) or bits.dim() != 2 or bits.shape[1] * 32 < vocab_size:
        raise argument_error("masks.bits", bits, f"an int32 tensor [M, W] with at least {vocab_size} bits in a row")
    found = (
        address("masks.bits", bits, torch.int32, tuple(bits.shape)),
        address("masks.places", places, torch.int64, (n,)),
    )
    if n and int(places.max()) >= len(bits):
        raise ValueError(f"masks.places should be below {len(bits)}, and its highest is {int(places.max())}.")
    return found


def readable(logits: Tensor) -> Tensor:
    """`logits` as float32 or bfloat16 [N, V] with contiguous rows."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        raise argument_error("logits", logits, "a tensor of floats [N, V]")
    if logits.dtype not in DTYPES:
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        sampling_draw=(c_int64, c_void_p),
        sampling_score=(None, c_void_p),
        sampling_gradient=(None, c_void_p),
        sampling_kept=(None, c_void_p),
        sampling_uniforms=(None, c_void_p, c_void_p, c_int64, c_void_p),
    )
