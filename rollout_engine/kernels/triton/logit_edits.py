"""Edits of logits on the device, bit for bit as the CPU's logits processors do them.

    copy kernel      (row, 4096 tokens)   the model's logits as float32, -inf for tokens that are not allowed
    edit kernel      (row)                counts the token drawn last; applies penalties, biases and masks

Each sequence has a *record* in device memory: its settings, and the counts of its tokens. The device updates it, so the
next step's edits include a token that the host does not have yet. Its lists hold only the tokens concerned: 8 bytes for
each distinct token of a sequence, while counts over a whole vocabulary would take 300 KB.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

_COPIED = 4096
"""Tokens per program of the copy."""
_NAMED = 1024
"""Tokens edited together."""
ALWAYS = 2**31 - 1
"""A position past every token: masked until it means always masked."""


class Field(IntEnum):
    """32-bit words in a record's header. Its lists follow the header in this order."""

    NUM_NOTED = 0
    """Tokens of the sequence that the lists SEEN and RECENT include."""
    NUM_PROMPT = 1
    NUM_SEEN = 2
    """Used entries of `MAX_SEEN`: ids, then the number of times each is in the output."""
    MAX_SEEN = 3
    NUM_BIASES = 4
    """Ids, then float32 values."""
    NUM_MASKED = 5
    """Ids, then the positions before which they are masked."""
    NUM_WORDS = 6
    """Bad words of several tokens: start of each among `NUM_WORD_TOKENS`, then its length."""
    NUM_WORD_TOKENS = 7
    NUM_RECENT = 8
    """Size of a ring buffer of the last tokens, indexed by position modulo this: one less than the longest word."""
    NUM_ALLOWED = 9
    """32-bit words of a bitmap over the vocabulary; 0 if all tokens are allowed."""
    REPETITION = 10
    """float32, like the next two."""
    FREQUENCY = 11
    PRESENCE = 12


_HEADER = tl.constexpr(16)
_NUM_NOTED, _NUM_PROMPT = tl.constexpr(Field.NUM_NOTED.value), tl.constexpr(Field.NUM_PROMPT.value)
_NUM_SEEN, _MAX_SEEN = tl.constexpr(Field.NUM_SEEN.value), tl.constexpr(Field.MAX_SEEN.value)
_NUM_BIASES, _NUM_MASKED = tl.constexpr(Field.NUM_BIASES.value), tl.constexpr(Field.NUM_MASKED.value)
_NUM_WORDS, _NUM_WORD_TOKENS = tl.constexpr(Field.NUM_WORDS.value), tl.constexpr(Field.NUM_WORD_TOKENS.value)
_NUM_RECENT, _NUM_ALLOWED = tl.constexpr(Field.NUM_RECENT.value), tl.constexpr(Field.NUM_ALLOWED.value)
_REPETITION, _FREQUENCY = tl.constexpr(Field.REPETITION.value), tl.constexpr(Field.FREQUENCY.value)
_PRESENCE = tl.constexpr(Field.PRESENCE.value)


def record(
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    *,
    penalties: Sequence[float] = (1.0, 0.0, 0.0),
    seen: tuple[np.ndarray, np.ndarray] | None = None,
    max_seen: int = 0,
    biases: tuple[np.ndarray, np.ndarray] | None = None,
    masked: Sequence[tuple[int, int]] = (),
    words: Sequence[Sequence[int]] = (),
    allowed: np.ndarray | None = None,
    vocab_size: int = 0,
) -> np.ndarray:
    """The record, int32 [words], of a sequence with `token_ids`, prompt first.

    `penalties`: repetition, frequency, presence; they apply to `seen`, (distinct ids, counts in the output), which may
    grow to `max_seen` entries. `biases`: ids and float32 values. `masked`: (id, position before which it is masked).
    `words`: bad words of two tokens or more. `allowed`: ids below `vocab_size`; None allows all.
    """
    header = np.zeros(_HEADER.value, np.int32)
    header[[Field.NUM_NOTED, Field.NUM_PROMPT]] = len(token_ids), num_prompt_tokens
    header[Field.REPETITION : Field.PRESENCE + 1] = np.array(penalties, np.float32).view(np.int32)
    parts = [header]
    if seen is not None:
        size = max(max_seen, len(seen[0]))
        header[[Field.NUM_SEEN, Field.MAX_SEEN]] = len(seen[0]), size
        parts += [np.pad(column.astype(np.int32), (0, size - len(column))) for column in seen]
    if biases is not None:
        header[Field.NUM_BIASES] = len(biases[0])
        parts += [biases[0].astype(np.int32), biases[1].astype(np.float32).view(np.int32)]
    if masked:
        header[Field.NUM_MASKED] = len(masked)
        parts.append(np.array(masked, np.int32).T.reshape(-1))
    if words:
        lengths = np.array([len(word) for word in words], np.int32)
        header[[Field.NUM_WORDS, Field.NUM_WORD_TOKENS]] = len(words), lengths.sum()
        header[Field.NUM_RECENT] = size = lengths.max() - 1
        recent = np.zeros(size, np.int32)
        for position in range(max(0, len(token_ids) - int(size)), len(token_ids)):
            recent[position % size] = token_ids[position]
        tokens = np.array([token for word in words for token in word], np.int32)
        parts += [(lengths.cumsum() - lengths).astype(np.int32), lengths, tokens, recent]
    if allowed is not None:
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[allowed] = 1
        header[Field.NUM_ALLOWED] = len(bits) // 32
        parts.append(np.packbits(bits, bitorder="little").view(np.int32))
    return np.concatenate(parts)


def edit(
    logits: Tensor,
    rows: Tensor,
    records: Tensor,
    last_tokens: Tensor,
    places: Tensor,
    positions: Tensor,
    edited: Tensor,
) -> None:
    """Fill `edited` float32 [E, V] with the edited `rows` int64 [E] of `logits` [N, V].

    `records` int64 [E]: addresses of distinct records. `positions` int64 [E]: position of the token to draw next; the
    token before it is `last_tokens[places]`, int64, and is counted if a record does not include it yet.
    """
    num_rows, vocab_size = edited.shape
    _copy_edited_kernel[(num_rows, triton.cdiv(vocab_size, _COPIED))](
        *(logits, rows, records, edited, logits.stride(0), edited.stride(0), vocab_size), BLOCK=_COPIED, num_warps=8
    )
    _edit_kernel[(num_rows,)](
        *(records, last_tokens, places, positions, edited, edited.stride(0)),
        BLOCK=_NAMED,
        num_warps=4,
        enable_fp_fusion=False,  # a fused multiply-add would skip the rounding of a product
    )


@triton.jit
def _copy_edited_kernel(
    logits_ptr, rows_ptr, records_ptr, edited_ptr, stride, edited_stride, vocab_size, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits_ptr + tl.load(rows_ptr + i) * stride + token, mask=inside, other=0.0).to(tl.float32)
    record = tl.load(records_ptr + i).to(tl.pointer_type(tl.int32))
    num_allowed = tl.load(record + _NUM_ALLOWED)
    if num_allowed > 0:
        allowed = _recent(record) + tl.load(record + _NUM_RECENT)
        bits = tl.load(allowed + (token >> 5), mask=(token >> 5) < num_allowed, other=0)
        x = tl.where((bits >> (token & 31)) & 1 != 0, x, -float("inf"))
    tl.store(edited_ptr + i * edited_stride + token, x, mask=inside)


@triton.jit
def _edit_kernel(
    records_ptr, last_tokens_ptr, places_ptr, positions_ptr, edited_ptr, edited_stride, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    record = tl.load(records_ptr + i).to(tl.pointer_type(tl.int32))
    edited_ptr += i * edited_stride
    position = tl.load(positions_ptr + i).to(tl.int32)
    _note(record, position, last_tokens_ptr + tl.load(places_ptr + i), BLOCK)
    _penalise(record, edited_ptr, BLOCK)
    tl.debug_barrier()  # a token may be in several lists
    _bias(record, edited_ptr, BLOCK)
    tl.debug_barrier()
    _mask(record, edited_ptr, position, BLOCK)
    _mask_words(record, edited_ptr, position, BLOCK)


@triton.jit
def _note(record, position, last_token_ptr, BLOCK: tl.constexpr):
    """Count the token before `position`, if the record does not include it yet."""
    num_noted, count = tl.load(record + _NUM_NOTED), tl.load(record + _NUM_SEEN)
    size = tl.load(record + _MAX_SEEN)
    token = tl.load(last_token_ptr).to(tl.int32)
    place = count
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        ids = tl.load(record + _HEADER + index, mask=index < count, other=-1)
        place = tl.minimum(place, tl.min(tl.where(ids == token, index, count)))
    times = tl.load(record + _HEADER + size + place, mask=place < count, other=0)
    tl.debug_barrier()  # all threads have read before one writes
    if num_noted < position:
        seen = record + _HEADER
        tl.store(seen + place, token, mask=place < size)
        tl.store(seen + size + place, times + 1, mask=place < size)
        tl.store(record + _NUM_SEEN, tl.where(place < size, tl.maximum(count, place + 1), count))
        num_recent = tl.load(record + _NUM_RECENT)
        if num_recent > 0:
            tl.store(_recent(record) + (position - 1) % num_recent, token)
        tl.store(record + _NUM_NOTED, position)
    tl.debug_barrier()


@triton.jit
def _penalise(record, edited_ptr, BLOCK: tl.constexpr):
    """Penalties in float32, each operation rounded, as on the CPU."""
    count, size = tl.load(record + _NUM_SEEN), tl.load(record + _MAX_SEEN)
    repetition = tl.load(record + _REPETITION).to(tl.float32, bitcast=True)
    frequency = tl.load(record + _FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(record + _PRESENCE).to(tl.float32, bitcast=True)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        ids = tl.load(record + _HEADER + index, mask=inside, other=0)
        times = tl.load(record + _HEADER + size + index, mask=inside, other=0).to(tl.float32)
        x = tl.load(edited_ptr + ids, mask=inside, other=0.0)
        if repetition != 1:
            x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        if (frequency != 0) | (presence != 0):
            x = x - frequency * times - tl.where(times > 0, presence, 0.0)
        tl.store(edited_ptr + ids, x, mask=inside)


@triton.jit
def _bias(record, edited_ptr, BLOCK: tl.constexpr):
    count, biases = tl.load(record + _NUM_BIASES), _biases(record)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        ids = tl.load(biases + index, mask=inside, other=0)
        values = tl.load(biases + count + index, mask=inside, other=0).to(tl.float32, bitcast=True)
        x = tl.load(edited_ptr + ids, mask=inside, other=0.0)
        tl.store(edited_ptr + ids, x + values, mask=inside)


@triton.jit
def _mask(record, edited_ptr, position, BLOCK: tl.constexpr):
    count, masked = tl.load(record + _NUM_MASKED), _masked(record)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        ids = tl.load(masked + index, mask=inside, other=0)
        until = tl.load(masked + count + index, mask=inside, other=0)
        tl.store(edited_ptr + ids, -float("inf"), mask=inside & (position < until))


@triton.jit
def _mask_words(record, edited_ptr, position, BLOCK: tl.constexpr):
    """Mask tokens that would complete a bad word."""
    count, words = tl.load(record + _NUM_WORDS), _words(record)
    num_recent, recent = tl.load(record + _NUM_RECENT), _recent(record)
    num_output = position - tl.load(record + _NUM_PROMPT)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        first = tl.load(words + index, mask=inside, other=0)
        length = tl.load(words + count + index, mask=inside, other=0)
        last = words + 2 * count + first + length - 1
        matches = inside & (length <= num_output + 1)
        for back in range(1, num_recent + 1):
            token = tl.load(recent + (position - back + num_recent) % num_recent)
            expected = tl.load(last - back, mask=inside & (back < length), other=0)
            matches = matches & ((back >= length) | (expected == token))
        tl.store(edited_ptr + tl.load(last, mask=inside, other=0), -float("inf"), mask=matches)


@triton.jit
def _biases(record):
    return record + _HEADER + 2 * tl.load(record + _MAX_SEEN)


@triton.jit
def _masked(record):
    return _biases(record) + 2 * tl.load(record + _NUM_BIASES)


@triton.jit
def _words(record):
    return _masked(record) + 2 * tl.load(record + _NUM_MASKED)


@triton.jit
def _recent(record):
    return _words(record) + 2 * tl.load(record + _NUM_WORDS) + tl.load(record + _NUM_WORD_TOKENS)
