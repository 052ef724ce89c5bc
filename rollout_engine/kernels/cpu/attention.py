"""Attention in C++ (`attention.cpp`): over paged KV for the engine, over whole sequences for trainers.

Both run one kernel on one pool layout, so they agree bit for bit. `kernels.paged_attention` is the eager twin.
"""

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import DTYPES, address, argument_error, array_address, check_floats
from rollout_engine.kernels.memory import lazy_zeros

DENSE_BLOCK_SIZE = 64
_TILE = 64  # ATTENTION_TILE of attention.h
_ITEM_TOKENS = 32  # ATTENTION_ITEM_TOKENS of attention.h
_BYTES_PER_ITEM = 20
_PART = 32
"""Most query heads that read a tile of latents together: their rows in an item stay near the L2 cache."""
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_MOST_TOKENS = 1 << 31
"""Limit of tokens in one step: the kernel counts them in 32 bits."""


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernel computes this dtype on this machine."""
    return dtype in DTYPES and build.load_kernels() is not None


class Chunk(NamedTuple):
    """Tokens [first_position, first_position + length) of one sequence."""

    first_position: int
    length: int
    block_ids: list[int]
    """Block table from position 0, covering the chunk."""


class ChunkColumns(NamedTuple):
    """The chunks of one step as arrays, int64 unless stated otherwise."""

    first_positions: np.ndarray
    """[N]."""
    token_starts: np.ndarray
    """[N + 1]: start of each chunk in the flat batch, then the end of the last."""
    blocks: np.ndarray
    """int32, any shape, contiguous: the block tables."""
    block_starts: np.ndarray
    """[N]: start of each block table in flattened `blocks`. Entries past those that cover the chunk are not read."""

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> "ChunkColumns":
        """Convert chunks to arrays."""
        chunks = list(chunks)
        lengths, sizes = [chunk.length for chunk in chunks], [len(chunk.block_ids) for chunk in chunks]
        blocks = [block for chunk in chunks for block in chunk.block_ids]
        return cls(
            np.array([chunk.first_position for chunk in chunks], np.int64),
            np.cumsum([0, *lengths], dtype=np.int64),
            np.array(blocks, np.int32),
            np.cumsum([0, *sizes], dtype=np.int64)[:-1],
        )


class AttentionPlan:
    """Work plan of one step, shared by all layers: the slots to write, and which rows read KV together.

    Raises `ValueError` for columns that do not fit together, and for a block table that does not cover its chunk.
    """

    def __init__(self, chunks: Iterable[Chunk] | ChunkColumns, *, block_size: int, num_kv_heads: int) -> None:
        columns = chunks if isinstance(chunks, ChunkColumns) else ChunkColumns.of(chunks)
        first_positions, token_starts, blocks, block_starts = columns
        self.block_size = _checked_block_size(block_size)
        num_sequences = len(first_positions)
        places = [
            array_address("blocks", blocks, _INT32),
            array_address("block_starts", block_starts, _INT64, (num_sequences,)),
            array_address("token_starts", token_starts, _INT64, (num_sequences + 1,)),
            array_address("first_positions", first_positions, _INT64, (num_sequences,)),
        ]
        self.num_tokens = int(token_starts[-1])
        if token_starts[0] != 0 or not 0 <= self.num_tokens < _MOST_TOKENS:
            raise ValueError(f"token_starts should ascend from 0, and is {token_starts}.")
        num_items = num_sequences + self.num_tokens // _ITEM_TOKENS
        memory = torch.empty(4 * num_sequences + _BYTES_PER_ITEM * num_items, dtype=torch.uint8)
        self.num_threads = torch.get_num_threads()
        self._memory = (blocks, block_starts, token_starts, first_positions, memory)
        places += [memory.data_ptr(), memory.data_ptr() + 4 * num_sequences]
        wanted = -(-2 * self.num_threads // max(num_kv_heads, 1))
        self._plan = _Plan(*places, blocks.size, num_sequences, block_size, 0, wanted)
        self.address = ctypes.addressof(self._plan)
        if (wrong := _library().attention_plan(self.address)) >= 0:
            length = int(token_starts[wrong + 1]) - int(token_starts[wrong])
            raise ValueError(
                f"blocks should name a block >= 0 for every {block_size} tokens of each sequence, and do not for chunk "
                f"{wrong}, of {length} tokens from position {first_positions[wrong]}."
            )
        self.max_block = self._plan.max_block
        """The largest block id that is read or written; -1 without tokens."""
        self._scratch: Tensor | None = None
        self._checked_reach: Tensor | None = None

    def scratch(self, bytes_per_thread: int) -> int:
        """Address of working memory for one layer's kernel."""
        if self._scratch is None or len(self._scratch) < bytes_per_thread * self.num_threads:
            self._scratch = torch.empty(bytes_per_thread * self.num_threads, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def parts_of(self, num_heads: int) -> int:
        """Number of equal parts of heads that share their keys, so that threads have work and each part is small."""
        return num_parts(num_heads, -(-2 * self.num_threads // max(self._plan.num_items, 1)))

    def checked_reach(self, reach: Tensor) -> int:
        """Address of `reach` int32 [T]. Raises `ValueError` if a query would see a position that is not computed."""
        place = address("reach", reach, torch.int32, (self.num_tokens,))
        if reach is not self._checked_reach:
            token_starts = self._memory[2]
            behind = np.repeat(token_starts[1:], np.diff(token_starts)) - np.arange(self.num_tokens) - 1
            check_reach(reach.numpy(), behind)
            self._checked_reach = reach
        return place

    def check_pool(self, num_blocks: int, block_size: int) -> None:
        """Raise `ValueError` unless a pool of this size holds all blocks of the plan."""
        if self.max_block >= num_blocks or self.block_size != block_size:
            raise ValueError(
                f"The plan uses blocks up to {self.max_block}, of {self.block_size} tokens; the KV pool has "
                f"{num_blocks} blocks of {block_size}."
            )


def check_reach(reach: np.ndarray, behind: np.ndarray) -> None:
    """Raise `ValueError` unless each of `reach` [T] is in [0, behind], and falls by one at most to the next token.

    `behind` [T]: how many tokens of its sequence are computed behind each.
    """
    wrong = (reach < 0) | (reach > behind)
    wrong[1:] |= (reach[1:] < reach[:-1] - 1) & (behind[:-1] > 0)
    if wrong.any():
        token = int(wrong.argmax())
        raise ValueError(
            f"reach should fall by one a token at most, within [0, tokens behind in the chunk], and reach[{token}] is "
            f"{reach[token]}, with {behind[token]} tokens behind."
        )


class KVLayer:
    """KV pool of one attention layer, filled with zeros. Raises `ValueError` for sizes or dtypes without a kernel.

    `has_latents`: a value is the first `dim_v` channels of its key, and only keys are stored; `num_kv_heads` is 1.
    """

    def __init__(
        self,
        num_blocks: int,
        num_kv_heads: int,
        dim_k: int,
        dim_v: int,
        *,
        block_size: int,
        dtype: torch.dtype,
        has_latents: bool = False,
    ) -> None:
        if has_latents and (num_kv_heads != 1 or dim_v > dim_k):
            raise ValueError(f"Latents are of one head, with dim_v <= dim_k, not {num_kv_heads}, {dim_v} and {dim_k}.")
        if dtype not in DTYPES or min(num_blocks, num_kv_heads - 1, dim_k - 1, dim_v - 1) < 0:
            sizes = dict(num_blocks=num_blocks, num_kv_heads=num_kv_heads, dim_k=dim_k, dim_v=dim_v)
            raise ValueError(f"A KV pool should be float32 or bfloat16 and have positive sizes, not {dtype}, {sizes}.")
        self.num_blocks, self.block_size = num_blocks, _checked_block_size(block_size)
        per_step = 4 // dtype.itemsize
        steps = -(-dim_k // per_step)
        self.dtype, self.num_kv_heads = dtype, num_kv_heads
        keys = (block_size, dim_k) if has_latents else (num_kv_heads, steps, block_size, per_step)
        self.keys = lazy_zeros(num_blocks, *keys, dtype=dtype)
        """[..., i, p, j]: channel i * per_step + j at position p of the block. Latents: [..., p, channel]."""
        pair = min(per_step, block_size)
        values = (num_blocks, num_kv_heads, block_size // pair, dim_v, pair)
        self.values = None if has_latents else lazy_zeros(*values, dtype=dtype)
        """[..., i, c, j]: channel c at position i * pair + j."""
        self.call = AttentionCall(
            keys=self.keys.data_ptr(),
            values=None if self.values is None else self.values.data_ptr(),
            num_kv_heads=num_kv_heads,
            dk=dim_k,
            dv=dim_v,
            half=dtype == torch.bfloat16,
        )
        """Arguments of the kernel: this pool's; `attend` sets those of the step."""
        self._address = ctypes.addressof(self.call)

    @classmethod
    def of_rows(cls, rows: Tensor, dim_v: int) -> "KVLayer":
        """A pool of latents whose blocks are the rows [S, Dk] of a tensor, which it reads in place."""
        layer = cls(0, 1, rows.shape[1], dim_v, block_size=1, dtype=rows.dtype, has_latents=True)
        layer.num_blocks, layer.keys = len(rows), rows.unsqueeze(1)
        layer.call.keys = address("rows", rows, rows.dtype, tuple(rows.shape))
        return layer

    def tensors(self) -> Iterator[Tensor]:
        """The pool's tensors."""
        yield from (tensor for tensor in (self.keys, self.values) if tensor is not None)

    def attend(
        self,
        plan: AttentionPlan,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        params: AttentionParams,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        reach: Tensor | None = None,
    ) -> Tensor:
        """Write k [T, Hk, Dk] and v [T, Hk, Dv] to their slots, then attend with q [T, H, Dk] -> [T, H, Dv].

        All have the pool's dtype; of latents only `k` is read. Without `k` and `v` nothing is written. `sinks` [H]: one
        extra logit per head in the softmax, without a value. `lse` float32 [T, H] receives the log-sum-exp of each
        row's scores. `reach` int32 [T]: how many positions behind its own each query sees (`Reach.tokens`). Raises
        `ValueError` for unreadable tensors.
        """
        call, dtype = self.call, self.dtype
        check_floats("q", q, num_dims=3)
        q = _with_dense_channels(q)
        num_tokens, num_heads = plan.num_tokens, q.shape[1]
        if num_heads % self.num_kv_heads or not num_heads:
            raise argument_error("q", q, f"of a multiple of {self.num_kv_heads} heads, the keys'")
        plan.check_pool(self.num_blocks, self.block_size)
        out = q.new_empty(num_tokens, num_heads, call.dv)
        call.plan, call.out = plan.address, out.data_ptr()
        call.q = address("q", q, dtype, (num_tokens, num_heads, call.dk), strided_rows=True)
        call.k = call.v = None
        if k is not None and v is not None:
            k, v = self._set_written(num_tokens, k, v)
        call.reach = None if reach is None else plan.checked_reach(reach)
        call.lse = None if lse is None else address("lse", lse, torch.float32, (num_tokens, num_heads))
        if sinks is not None and not sinks.is_floating_point():
            raise argument_error("sinks", sinks, f"a tensor of floats [{num_heads}]")
        sinks = None if sinks is None else sinks.float().contiguous()
        call.sinks = None if sinks is None else address("sinks", sinks, torch.float32, (num_heads,))
        call.q_token, call.q_head, _ = q.stride()
        call.out_token = num_heads * call.dv
        call.num_tokens, call.num_heads, call.num_threads = num_tokens, num_heads, plan.num_threads
        call.scale, call.sliding_window, call.softcap = params
        if self.values is None:
            call.num_kv_heads = plan.parts_of(num_heads)
        kernels = _library()
        call.scratch = plan.scratch(kernels.attention_scratch(self._address))
        kernels.attention(self._address)
        return out

    def _set_written(self, num_tokens: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Set the keys and values that the call writes; returns those that it reads, to be kept until it ends."""
        check_floats("k", k, num_dims=3)
        check_floats("v", v, num_dims=3)
        k, v, call = _with_dense_channels(k), _with_dense_channels(v), self.call
        call.k = address("k", k, self.dtype, (num_tokens, self.num_kv_heads, call.dk), strided_rows=True)
        call.v = address("v", v, self.dtype, (num_tokens, self.num_kv_heads, call.dv), strided_rows=True)
        call.k_token, call.k_head, _ = k.stride()
        call.v_token, call.v_head, _ = v.stride()
        return k, v


def _with_dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def num_parts(num_heads: int, wanted: int = 1) -> int:
    """Number of equal parts of heads that share their keys: `wanted` or more if that can be, and none of them large."""
    least = max(wanted, -(-num_heads // _PART))
    return next(parts for parts in range(min(least, num_heads), num_heads + 1) if num_heads % parts == 0)


def are_latents(k: Tensor, v: Tensor) -> bool:
    """Whether values [B, 1, T, Dv] are a view of the first channels of the keys [B, 1, T, Dk]."""
    return k.shape[1] == 1 and v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.shape[-1] < k.shape[-1]


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    sinks: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """C++ kernel of `kernels.dense_attention.DenseAttention`. Raises `ValueError` for tensors that it cannot read."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floats(name, x, num_dims=4)
    batch, num_heads, length, head_dim = q.shape
    lengths = [length] * batch if lengths is None else lengths
    ends = list(itertools.accumulate((-(-n // DENSE_BLOCK_SIZE) for n in lengths), initial=0))
    sizes, has_latents = (k.shape[1], head_dim, v.shape[-1]), are_latents(k, v)
    layer = KVLayer(ends[-1], *sizes, block_size=DENSE_BLOCK_SIZE, dtype=q.dtype, has_latents=has_latents)
    tables = (list(range(start, end)) for start, end in itertools.pairwise(ends))
    chunks = (Chunk(0, n, table) for n, table in zip(lengths, tables, strict=True))
    plan = AttentionPlan(chunks, block_size=DENSE_BLOCK_SIZE, num_kv_heads=k.shape[1])
    lse = q.new_empty(batch * length, num_heads, dtype=torch.float32)
    query, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    reach = None if reach is None else reach.flatten()
    out = layer.attend(plan, query, keys, values, params, sinks=sinks, lse=lse, reach=reach)
    return out.view(batch, length, num_heads, -1), lse.view(batch, length, num_heads)


class _Plan(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("blocks", "block_starts", "token_starts", "first_position")),
        *((name, ctypes.c_void_p) for name in ("members", "items")),
        ("num_entries", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_sequences", "block_size", "num_items", "items_wanted")),
        ("max_block", ctypes.c_int32),
    ]


class AttentionCall(ctypes.Structure):
    """Mirror of `AttentionCall` in attention.h."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("plan", "q", "k", "v", "out", "lse", "keys", "values", "sinks", "scratch")
        ),
        *((name, ctypes.c_void_p) for name in ("q_weight", "k_weight", "cos", "sin", "q_factors", "reach")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        ("out_token", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_heads", "num_kv_heads", "dk", "dv", "half")),
        *((name, ctypes.c_int32) for name in ("num_threads", "sliding_window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "q_epsilon", "k_epsilon")),
        *((name, ctypes.c_int32) for name in ("rotary", "q_offset", "k_offset")),
    ]


def _checked_block_size(block_size: int) -> int:
    if block_size < 1 or _TILE % block_size:
        raise ValueError(f"block_size should divide {_TILE}, and is {block_size}.")
    return block_size


@cache
def _library() -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    return build.declared(
        attention=(None, pointer),
        attention_plan=(ctypes.c_int32, pointer),
        attention_scratch=(ctypes.c_int64, pointer),
    )
