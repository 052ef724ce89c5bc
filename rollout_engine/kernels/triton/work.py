"""Attention's work of one step, divided into equal shares on the device: the host does not have the lengths in time.

An *item* is up to `tokens_per_item` adjacent tokens that read one block table; with their `group` query heads they are
the rows of one product, so that a KV head is read once for all. Its context is counted in *units* of KV positions from
position 0. The units of all items and KV heads form one line, item by item and in each head by head:

    item 0                      item 1
    head 0   head 1   head 2    head 0       head 1       head 2
    |--+--+- |--+--+- |--+--+-  |--+--+--+-- |--+--+--+-- |--+--+--+--
    |        program 0 |        program 1      |         program 2

Each program of a fixed grid takes `chunk` units, so the load stays balanced when one context is long, and a captured
graph fits every batch. A share may end inside a head of an item, whose parts a second kernel then merges (`attention`).
In a list with `is_whole`, shares are rounded to heads of items, and nothing has to be merged.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.triton.tiling import next_power_of_2

COLUMNS = 8
"""Columns of an item: sequence, first token, number of tokens, first position, end of context, first unit, end unit,
units before it."""
FULL_CONTEXT = 1 << 30
"""First position of an item whose tokens all see its whole context."""
_SEQUENCE_ITEMS_AT_ONCE = 32
_ITEMS_AT_ONCE = 1024
_SEQUENCES_AT_ONCE = 256


class WorkList:
    """Device memory of one list, at constant addresses: a captured graph reads the list that `fill` wrote last."""

    def __init__(
        self,
        max_items: int,
        *,
        tokens_per_item: int,
        unit: int,
        num_kv_heads: int,
        num_programs: int,
        is_whole: bool,
        device: torch.device | str,
    ) -> None:
        """`unit` is in KV positions; `num_programs` is the size of the attention kernel's grid."""
        self.tokens_per_item, self.unit = tokens_per_item, unit
        self.num_kv_heads, self.num_programs, self.is_whole = num_kv_heads, num_programs, is_whole
        self.items = torch.zeros(max_items, COLUMNS, dtype=torch.int32, device=device)
        self.num_items = torch.zeros(1, dtype=torch.int32, device=device)
        self.shares = torch.zeros(num_programs + 1, 2, dtype=torch.int32, device=device)
        """int32 [programs + 1, 2]: item and place in the line at which each program's share begins, then the end."""
        self.line = torch.zeros(2, dtype=torch.int32, device=device)
        """int32 [2]: total units, and `chunk`."""

    @staticmethod
    def items_needed(num_tokens: int, num_sequences: int, tokens_per_item: int) -> int:
        """The maximum number of items of a batch."""
        return min(num_tokens, num_tokens // tokens_per_item + num_sequences)

    def fill(
        self,
        token_starts: Tensor,
        context_lens: Tensor,
        *,
        first_sequence: int = 0,
        sliding_window: int = 0,
        prefix_units: Tensor | None = None,
    ) -> None:
        """List the items of N sequences, the first of which has row `first_sequence` of the block tables.

        token_starts int32 [N + 1]: start of each sequence's tokens in the flat batch, then the end. context_lens int32
        [N]: tokens with these included; 0 for padding sequences. Units outside the `sliding_window` of all tokens are
        left out, and so are the first `prefix_units` int32 [N], which items of shared prefixes read.
        """
        assert not (sliding_window and prefix_units is not None), "prefixes are not shared under a sliding window"
        num_sequences = len(context_lens)
        _list_items[(num_sequences,)](
            self.items,
            self.num_items,
            token_starts,
            context_lens,
            context_lens if prefix_units is None else prefix_units,
            num_sequences,
            first_sequence,
            sliding_window,
            HAS_PREFIXES=prefix_units is not None,
            HAS_WINDOW=sliding_window > 0,
            TOKENS=self.tokens_per_item,
            UNIT=self.unit,
            COLUMNS=COLUMNS,
            BLOCK_N=_SEQUENCES_AT_ONCE,
            BLOCK_T=_SEQUENCE_ITEMS_AT_ONCE,
        )
        self._share_out()

    def put(self, items: Tensor, num_items: Tensor) -> None:
        """List the first `num_items`, int32 [1], of `items` int32 [P, COLUMNS]; the last column is ignored."""
        self.items[: len(items)].copy_(items[: len(self.items)])
        self.num_items.copy_(num_items)
        self._share_out()

    def _share_out(self) -> None:
        _share_out[(self.num_programs + 1,)](
            self.items,
            self.num_items,
            self.shares,
            self.line,
            NUM_PROGRAMS=self.num_programs,
            NUM_KV_HEADS=self.num_kv_heads,
            IS_WHOLE=self.is_whole,
            COLUMNS=COLUMNS,
            BLOCK=min(_ITEMS_AT_ONCE, next_power_of_2(len(self.items))),
        )


@triton.jit(
    do_not_specialize=["num_sequences", "first_sequence", "sliding_window"],
    # Chunks follow the decodes, anywhere in the batch's columns: live steps would wait for the compiler.
    do_not_specialize_on_alignment=["token_starts", "context_lens", "prefix_units"],
)
def _list_items(
    items,
    num_items,
    token_starts,
    context_lens,
    prefix_units,
    num_sequences,
    first_sequence,
    sliding_window,
    HAS_PREFIXES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Each program lists the items of one sequence, after counting those of the sequences before it."""
    sequence = tl.program_id(0)
    place = 0
    for base in range(0, sequence, BLOCK_N):
        others = base + tl.arange(0, BLOCK_N)
        before = others < sequence
        first = tl.load(token_starts + others, mask=before, other=0)
        tokens = tl.load(token_starts + others + 1, mask=before, other=0) - first
        tokens = tl.where(tl.load(context_lens + others, mask=before, other=0) > 0, tokens, 0)
        place += tl.sum((tokens + TOKENS - 1) // TOKENS, 0)
    start, end = tl.load(token_starts + sequence), tl.load(token_starts + sequence + 1)
    context = tl.load(context_lens + sequence)
    count = tl.where(context > 0, (end - start + TOKENS - 1) // TOKENS, 0)
    if sequence == num_sequences - 1:
        tl.store(num_items, place + count)
    for base in range(0, count, BLOCK_T):
        index = base + tl.arange(0, BLOCK_T)
        keep = index < count
        token = start + index * TOKENS
        num_tokens = tl.minimum(end - token, TOKENS)
        position = context - end + token
        first_unit = tl.zeros_like(position)
        if HAS_PREFIXES:
            first_unit += tl.load(prefix_units + sequence)
        if HAS_WINDOW:
            first_unit = tl.maximum(position - sliding_window + 1, 0) // UNIT
        item = items + (place + index) * COLUMNS
        tl.store(item, first_sequence + sequence + tl.zeros_like(position), mask=keep)
        tl.store(item + 1, token, mask=keep)
        tl.store(item + 2, num_tokens, mask=keep)
        tl.store(item + 3, position, mask=keep)
        tl.store(item + 4, position + num_tokens, mask=keep)
        tl.store(item + 5, first_unit, mask=keep)
        tl.store(item + 6, (position + num_tokens + UNIT - 1) // UNIT, mask=keep)


@triton.jit
def _share_out(
    items,
    num_items,
    shares,
    line,
    NUM_PROGRAMS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program finds the beginning of one share."""
    program = tl.program_id(0)
    count = tl.load(num_items)
    total = 0
    for base in range(0, count, BLOCK):
        total += tl.sum(_units(items, base, count, COLUMNS, BLOCK), 0)
    chunk = tl.maximum((total * NUM_KV_HEADS + NUM_PROGRAMS - 1) // NUM_PROGRAMS, 1)
    start = tl.minimum(program * chunk, total * NUM_KV_HEADS)
    before, mine, first = 0, 0, 0
    for base in range(0, count, BLOCK):
        units = _units(items, base, count, COLUMNS, BLOCK)
        after = before + tl.cumsum(units, 0)
        index = base + tl.arange(0, BLOCK)
        if program == 0:
            tl.store(items + index * COLUMNS + 7, after - units, mask=index < count)
        passed = (index < count) & (after * NUM_KV_HEADS <= start)
        mine += tl.sum(passed.to(tl.int32), 0)
        first += tl.sum(tl.where(passed, units, 0), 0)
        before += tl.sum(units, 0)
    if IS_WHOLE and mine < count:
        item = items + mine * COLUMNS
        length = tl.load(item + 6) - tl.load(item + 5)
        heads = (start - first * NUM_KV_HEADS + length - 1) // length
        start = first * NUM_KV_HEADS + heads * length
        mine += tl.where(heads == NUM_KV_HEADS, 1, 0)
    if program == 0:
        tl.store(line, total * NUM_KV_HEADS)
        tl.store(line + 1, chunk)
    tl.store(shares + program * 2, mine)
    tl.store(shares + program * 2 + 1, start)


@triton.jit
def _units(items, base, count, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Units of the items from `base` on, 0 past the last."""
    index = base + tl.arange(0, BLOCK)
    item = items + index * COLUMNS
    return tl.load(item + 6, mask=index < count, other=0) - tl.load(item + 5, mask=index < count, other=0)
