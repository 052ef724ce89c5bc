"""ctypes wrapper of `recurrence.cpp` and `recurrence_backward.cpp`. Callers ask `supports` first."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import DTYPES, address, argument_error, check_floats
from rollout_engine.kernels.cpu.state_chunks import ChunkTable
from rollout_engine.kernels.state_chunks import StateChunks

GRID = 64
"""Tokens between two states that a forward keeps for its backward, which computes those between them again."""

_SMALL = 1 << 16
"""Elements of states, times tokens, below which a second thread does not pay."""


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels are available for these tensors: float32 or bfloat16, on the CPU."""
    return all(x.is_cpu and x.dtype in DTYPES for x in tensors) and build.load_kernels() is not None


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    *,
    delta: bool,
    scale: float,
    chunks: StateChunks,
    states: Tensor | None,
) -> Tensor:
    """C++ side of `kernels.recurrence.gated_recurrence`, which has checked `chunks`.

    Raises `ValueError` for tensors that it cannot read, among them `states` that are not contiguous.
    """
    call, held = _Call(), list[Tensor]()
    call.inputs = _describe(held, q, k, v, log_decay, beta, skip, delta, scale, chunks)
    if states is not None:
        shape = (len(states), v.shape[1], q.shape[2], v.shape[2])
        call.states = address("states", states, torch.float32, shape)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    call.out, call.out_token = out.data_ptr(), v.shape[1] * v.shape[2]
    place = ctypes.addressof(call)
    scratch = _scratch(_library().recurrence_scratch(place), call.inputs.num_threads)
    call.scratch = scratch.data_ptr()
    _library().recurrence_run(place)
    return out


def find_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    kept: Tensor,
    grad: Tensor,
    *,
    delta: bool,
    scale: float,
    chunks: StateChunks,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, `log_decay`, `beta` and `skip`, float32, of their shapes.

    `grad` [T, H, V] is that of the result. `chunks` are sequences from zeros whose states were written after every
    GRID tokens (`StateChunks.write_every`) into `kept` float32 [W, H, K, V]. Raises `ValueError` as `recur` does.
    """
    (num_tokens, num_groups, key_size), (_, num_heads, value_size) = q.shape, v.shape
    call, held = _BackwardCall(), list[Tensor]()
    call.inputs = _describe(held, q, k, v, log_decay, beta, skip, delta, scale, chunks)
    call.kept = address("kept", kept, torch.float32, (chunks.num_slots, num_heads, key_size, value_size))
    call.grad = _operand(held, "grad", grad, tuple(v.shape))
    by_head = torch.zeros(2, num_tokens, num_heads, key_size)
    grad_v, grad_decay = torch.empty(v.shape), torch.zeros(log_decay.shape)
    grad_beta, grad_skip = torch.zeros(beta.shape), torch.zeros(chunks.num_chunks, num_heads)
    call.grad_q, call.grad_k = by_head[0].data_ptr(), by_head[1].data_ptr()
    call.grad_v, call.grad_decay = grad_v.data_ptr(), grad_decay.data_ptr()
    call.grad_beta, call.grad_skip, call.most_tokens = grad_beta.data_ptr(), grad_skip.data_ptr(), GRID
    place = ctypes.addressof(call)
    scratch = _scratch(_library().recurrence_backward_scratch(place), call.inputs.num_threads)
    call.scratch = scratch.data_ptr()
    _library().recurrence_backward(place)
    by_group = by_head.view(2, num_tokens, num_groups, num_heads // num_groups, key_size)
    grad_q, grad_k = by_head if num_heads == num_groups else by_group.sum(3)
    return grad_q, grad_k, grad_v, grad_decay, grad_beta, None if skip is None else grad_skip.sum(0)


def _describe(
    held: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    delta: bool,
    scale: float,
    chunks: StateChunks,
) -> "_Inputs":
    """The inputs as C++ reads them; `held` gets the tensors that have to outlive the call."""
    check_floats("q", q, num_dims=3)
    check_floats("v", v, num_dims=3)
    (num_tokens, num_groups, key_size), (_, num_heads, value_size) = q.shape, v.shape
    if not (num_groups and key_size and value_size) or num_heads % num_groups:
        raise argument_error("v", v, f"of a multiple of {num_groups} heads, and with channels, as q")
    inputs = _Inputs()
    inputs.q = _operand(held, "q", q, (num_tokens, num_groups, key_size))
    inputs.k = _operand(held, "k", k, (num_tokens, num_groups, key_size))
    inputs.v = _operand(held, "v", v, (num_tokens, num_heads, value_size))
    by_head = (num_tokens, num_heads)
    by_channel = log_decay.dim() == 3
    wanted: list[tuple[str, Tensor, tuple[int, ...]]] = [
        ("log_decay", log_decay, (*by_head, key_size) if by_channel else by_head),
        ("beta", beta, by_head),
    ]
    wanted += [] if skip is None else [("skip", skip.float(), (num_heads,))]
    for name, x, shape in wanted:
        held.append(x.contiguous())
        setattr(inputs, name, address(name, held[-1], torch.float32, shape))
    inputs.chunks = ChunkTable.of(chunks)
    inputs.num_heads, inputs.num_groups = num_heads, num_groups
    inputs.key_size, inputs.value_size = key_size, value_size
    inputs.by_channel, inputs.delta, inputs.scale = by_channel, delta, scale
    is_small = num_tokens * num_heads * key_size * value_size < _SMALL
    inputs.num_threads = 1 if is_small else torch.get_num_threads()
    return inputs


def _operand(held: list[Tensor], name: str, x: Tensor, shape: tuple[int, ...]) -> "_Operand":
    check_floats(name, x, num_dims=3)
    held.append(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())
    place = address(name, held[-1], x.dtype, shape, strided_rows=True)
    return _Operand(place, *held[-1].stride()[:2], x.dtype is torch.bfloat16)


def _scratch(num_bytes: int, num_threads: int) -> Tensor:
    return torch.empty(num_bytes * num_threads, dtype=torch.uint8)


class _Operand(ctypes.Structure):
    """Mirror of `recurrence::Operand`."""

    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("token", "head", "half"))]


class _Inputs(ctypes.Structure):
    """Mirror of `recurrence::Inputs`."""

    _fields_ = [
        *((name, _Operand) for name in ("q", "k", "v")),
        *((name, c_void_p) for name in ("log_decay", "beta", "skip")),
        ("chunks", ChunkTable),
        *((name, c_int32) for name in ("num_heads", "num_groups", "key_size", "value_size")),
        *((name, c_int32) for name in ("by_channel", "delta", "num_threads")),
        ("scale", c_float),
        ("normalises", c_int32),
        ("key_epsilon", c_float),
    ]


class _Call(ctypes.Structure):
    """Mirror of `RecurrenceCall`."""

    _fields_ = [
        ("inputs", _Inputs),
        *((name, c_void_p) for name in ("states", "out", "scratch")),
        ("out_token", c_int64),
    ]


class _BackwardCall(ctypes.Structure):
    """Mirror of `RecurrenceBackwardCall`."""

    _fields_ = [
        ("inputs", _Inputs),
        ("kept", c_void_p),
        ("grad", _Operand),
        *((name, c_void_p) for name in ("grad_q", "grad_k", "grad_v", "grad_decay", "grad_beta", "grad_skip")),
        ("scratch", c_void_p),
        ("most_tokens", c_int64),
    ]


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        recurrence_scratch=(c_int64, c_void_p),
        recurrence_run=(None, c_void_p),
        recurrence_backward_scratch=(c_int64, c_void_p),
        recurrence_backward=(None, c_void_p),
    )
