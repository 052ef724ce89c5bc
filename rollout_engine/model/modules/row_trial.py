"""Finds parts of a module that may make a row depend on its batch: watches one forward and tries its operations.

moves data, or rounds each element correctly     cannot
a function of each element, or of each row       tried at the sizes seen, alone and in batches, on 1 and more threads
a product, or anything not known here            may; our own products are left out: `kernels.linear` proves them

Operations inside our own functions over tokens are left out too: their kernels have tests of their own.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.modules.composites import text_parts
from rollout_engine.model.modules.heads import trunk_of
from rollout_engine.model.packing.linear_groups import without_products

_HARMLESS = set(
    """
    abs add add_ alias arange argsort bitwise_and bitwise_or cat ceil clamp clamp_max clamp_min clone constant_pad_nd
    contiguous copy_ detach detach_ div div_ embedding empty empty_like empty_strided eq expand fill_ floor full
    full_like gather ge gt index index_put index_select isinf isnan le lift_fresh logical_and logical_not logical_or lt
    masked_fill masked_fill_ max maximum minimum mul mul_ ne neg new_empty new_empty_strided new_full new_ones new_zeros
    ones ones_like reciprocal relu relu_ repeat rsub scalar_tensor scatter scatter_ select_scatter set_ sign
    slice_scatter sort sqrt stack sub sub_ to topk tril triu where zero_ zeros zeros_like _local_scalar_dense _to_copy
    _unsafe_view
    """.split()
)
"""Operations of aten, in addition to all views. With `alpha` some elements of `add` are fused products."""
_TRIED = set(
    """
    cos erf exp exp_ expm1 gelu hardswish log log1p log_softmax logsumexp mean native_layer_norm norm pow rsqrt sigmoid
    silu sin softplus square sum tanh var var_mean linalg_vector_norm _fused_rms_norm _log_softmax _softmax
    """.split()
)
"""Functions of the elements or the last dimension of their first argument."""
_NUM_TOKENS = 2
_HEIGHTS = (1, 2, 3, 5, 7, 16, 17)
_MANY_ELEMENTS = 70_000
"""Enough for any operation to use several threads."""

_Key = tuple[object, ...]
_known_results: dict[_Key, bool] = {}
_proven = threading.local()


@contextmanager
def proven_operations() -> Iterator[None]:
    """Inside, operations of this thread are those of our own kernels, which are proven elsewhere."""
    before = getattr(_proven, "active", False)
    _proven.active = True
    try:
        yield
    finally:
        _proven.active = before


def unproven_parts(replaced: type | UnionType, module: nn.Module) -> list[str]:
    """Parts of a causal LM that may make a row depend on its batch: weights, or else operations of its forward.

    Weights of more than one row count unless a module of the classes `replaced`, or an embedding, holds them: something
    else multiplies them, such as GPT-2's own linears.
    """
    found = []
    for part in text_parts(module):
        for path, child in part.named_modules():
            if not isinstance(child, replaced | nn.Embedding):
                own = child.named_parameters(recurse=False)
                found += [f"{path}.{name}" for name, parameter in own if parameter.squeeze().dim() > 1]
    return found or unproven_operations(module)


def unproven_operations(module: nn.Module) -> list[str]:
    """Names of operations in a forward of two tokens of a causal LM that may make a row depend on its batch.

    The second forward is watched: the first may compute and keep constants, such as "longrope" rotary frequencies.
    """
    module = trunk_of(module)
    watch, tokens = _Watch(), torch.arange(_NUM_TOKENS, device=next(module.parameters()).device)[None]
    try:
        with torch.no_grad(), without_products(module):
            module(input_ids=tokens, use_cache=False)
            with watch:
                module(input_ids=tokens, use_cache=False)
    except (ConfigError, BrokenTurnsError):  # the second: another rank has failed, which is no result about this module
        raise
    except Exception as problem:  # foreign modules may fail in any way
        return [f"its forward, which fails on two tokens ({type(problem).__name__}: {problem})"]
    threads = torch.get_num_threads()
    try:
        return [name for name, call in watch.tried if not _keeps_rows(*call, threads)] + watch.others
    finally:
        torch.set_num_threads(threads)


class _Watch(TorchDispatchMode):
    """Records each kind of call once: the operation, and the kinds of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[tuple[str, tuple[_Key, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]] = []
        self.others: list[str] = []
        self._seen: set[_Key] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if getattr(_proven, "active", False):
            return
        name = func.overloadpacket.__name__
        harmless = func.is_view or (name in _HARMLESS and "alpha" not in kwargs)
        harmless = harmless or _is_outer_product(name, args) or _is_power_of_table(name, args)
        harmless = harmless or _is_of_one_weight(name, args)
        if harmless or not _has_floats(result):
            return
        key = (func, *map(_kind, args), *map(_kind, kwargs.values()))
        if key in self._seen:
            return
        self._seen.add(key)
        if name in _TRIED:
            self.tried.append((name, (key, func, args, kwargs)))
        else:
            self.others.append(name)


def _keeps_rows(
    key: _Key, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], threads: int
) -> bool:
    """Whether rows of `func(x, ...)` for x [..., R, D] are the same bits in windows of any height; tried once a kind.

    It is tried in float32, whose rounding hides no last bits, and in the dtype seen. An operation that cannot
    be tried, because its first argument is no tensor or it uses more than the last dimension, is not proven.
    """
    if key not in _known_results:
        try:
            _known_results[key] = _passes(func, args, kwargs, threads)
        except Exception:  # operations may fail in any way on inputs they were not written for
            _known_results[key] = False
    return _known_results[key]


def _passes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], threads: int) -> bool:
    first, *rest = args
    size = first.shape[-1] if first.dim() else 1
    shape = [1] * (first.dim() - 2) + [-(-_MANY_ELEMENTS // size), size]  # dimensions keep their numbers
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(first.device)
    precise = [r.float() if isinstance(r, Tensor) and r.is_floating_point() else r for r in rest]
    return _same_in_windows(lambda part: func(part, *precise, **kwargs), x, threads) and (
        first.dtype == torch.float32
        or _same_in_windows(lambda part: func(part, *rest, **kwargs), x.to(first.dtype), threads)
    )


def _same_in_windows(compute: Callable[[Tensor], Any], x: Tensor, threads: int) -> bool:
    *_, rows, size = x.shape

    def rows_of(start: int, height: int) -> Tensor:
        result = compute(x.narrow(-2, start, height).clone())
        rows: Tensor = (result[0] if isinstance(result, tuple) else result).nan_to_num()
        return rows

    torch.set_num_threads(1)
    expected = rows_of(0, rows)
    small = itertools.product(_HEIGHTS, range(0, rows - max(_HEIGHTS), max(1, rows // max(8, 400 // size))))
    for height, start in small:
        if not torch.equal(rows_of(start, height), expected.narrow(-2, start, height)):
            return False
    for count, start in itertools.product({1, 2, threads}, (0, 1)):
        torch.set_num_threads(count)
        if not torch.equal(rows_of(start, rows - start), expected.narrow(-2, start, rows - start)):
            return False
    return True


def _has_floats(result: Any) -> bool:
    results = result if isinstance(result, tuple | list) else (result,)
    return any(isinstance(r, Tensor) and r.is_floating_point() for r in results)


def _is_outer_product(name: str, args: tuple[Any, ...]) -> bool:
    """Whether this is a product over one element, as in rotary embeddings, which sums nothing."""
    return name in ("mm", "bmm") and args[0].shape[-1] == 1


def _is_power_of_table(name: str, args: tuple[Any, ...]) -> bool:
    """Whether this is a number to the powers of a table of one size in any batch, as in rotary frequencies."""
    return name == "pow" and not isinstance(args[0], Tensor) and args[1].dim() == 1 and len(args[1]) != _NUM_TOKENS


def _is_of_one_weight(name: str, args: tuple[Any, ...]) -> bool:
    """Whether this is a function of a parameter with one element, and of no other tensor."""
    if name not in _TRIED or not args:
        return False
    first, *rest = args
    is_one = isinstance(first, nn.Parameter) and first.numel() == 1
    return is_one and not any(isinstance(each, Tensor) for each in rest)


def _kind(argument: Any) -> object:
    if isinstance(argument, Tensor):
        return (argument.shape[-1] if argument.dim() else 1, argument.dtype, argument.device)
    return repr(argument)
