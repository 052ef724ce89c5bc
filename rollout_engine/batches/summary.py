"""The TensorDict of a rollout, with a readable `repr`.

>>> batch
RolloutBatch, padded: 8 sequences, 2 groups, 97 sampled tokens (1 to 16 each), policy version 0
  ended by: stop 5, length 3
  reward: mean 0.25, from 0 to 1
  first: '2 + 2 =' -> ' 4'
  tokens         prompt [8, 9] int64, response [8, 16] int64, full [8, 25] int64
  ...
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.base import _register_tensor_class
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from rollout_engine.base.provenance import EpisodesNote, attach, joined, rollout_note
from rollout_engine.batches.episodes import counted, episodes
from rollout_engine.batches.layout import is_packed, leaves, num_sequences
from rollout_engine.batches.notebook import LISTED_KEYS, html

WIDTH, MAX_KEYS, MAX_TEXT = 110, 24, 40
_TOKENS = ("tokens", "full")
"""Key of the tensor that the note is on."""
_GROUPS = "group_id"


class RolloutBatch(TensorDict):  # type: ignore[misc]
    """A TensorDict whose `repr` shows, on one screen, the content of the rollout along with its shapes.

    `batch["group_id"]` brings to `advantages` which rows are of one episode, and which failed.

    Indexing, `to`, `reshape`, `stack` and the like return a `RolloutBatch`; `to_tensordict()` returns a plain one.
    `memmap` and `save` write a plain TensorDict, which can be loaded without this library.
    """

    def __repr__(self) -> str:
        try:
            head = [_counts(self), *_facts(self)] if _is_whole(self) else None
        except RuntimeError:  # tensors without values: on the meta device, or inside vmap
            head = None
        head = head or [f", batch size {list(self.batch_size)}"]
        text = "\n".join([type(self).__name__ + head[0], *head[1:], *_keys(self)])
        return text.replace("\n", "\n  ")

    def _repr_html_(self) -> str:
        """HTML for notebooks, as of `show(batch)`; the `repr` if the batch is no list of samples any more."""
        return html(self) if _is_listed(self) else f"<pre>{escape(repr(self))}</pre>"

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, str) and index == _GROUPS:
            attach(found, _episodes_note(self))
        return self._add_note(found)

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """A copy, as of `TensorDict.clone`."""
        return self._add_note(super().clone(*args, **kwargs))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The batch on another device or in another dtype, as of `TensorDict.to`."""
        return self._add_note(super().to(*args, **kwargs))

    def split(self, *args: Any, **kwargs: Any) -> Any:
        """Parts of the batch, as of `TensorDict.split`."""
        return tuple(map(self._add_note, super().split(*args, **kwargs)))

    def memmap(self, *args: Any, **kwargs: Any) -> Any:
        """A plain TensorDict of memory-mapped tensors; arguments as for `TensorDict.memmap`."""
        return _plain(self).memmap(*args, **kwargs)

    def _add_note(self, part: Any) -> Any:
        return with_note(part, [self]) if isinstance(part, RolloutBatch) else part

    def memmap_like(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self).memmap_like(*args, **kwargs)


def with_note(batch: Any, sources: Iterable[TensorDictBase]) -> Any:
    """Give the tokens of `batch`, if they have no note, the one that those of `sources` have; return the batch."""
    tokens = batch.get(_TOKENS, None)
    if tokens is not None and rollout_note(tokens) is None:
        note = joined(rollout_note(source.get(_TOKENS, None)) for source in sources)
        if note is not None:
            attach(tokens, note)
    return batch


def _episodes_note(batch: TensorDictBase) -> EpisodesNote | None:
    """The note on its group ids; None if each row is an episode of its own and none failed."""
    if "episode_id" not in batch.keys() or batch.get(_GROUPS).dim() != 1:
        return None
    try:
        ids, is_counted = batch.get("episode_id").tolist(), counted(batch)
        is_plain = len(episodes(batch)) == len(ids) and all(is_counted)
    except RuntimeError:  # tensors without values: on the meta device, or inside vmap
        return None
    return None if is_plain else EpisodesNote(tuple(ids), tuple(is_counted))


def _plain(batch: TensorDictBase) -> TensorDict:
    return TensorDict(dict(batch.items()), batch_size=batch.batch_size, device=batch.device)


def _rollout_batch(plain: TensorDictBase) -> RolloutBatch:
    return RolloutBatch(dict(plain.items()), batch_size=plain.batch_size)


_register_tensor_class(RolloutBatch)  # `memmap_` writes this class's name
register_pytree_node(
    RolloutBatch,
    lambda batch: ([_plain(batch)], None),
    lambda children, _: _rollout_batch(*children),
    serialized_type_name="rollout_engine.batches.summary.RolloutBatch",
)


def _is_whole(batch: RolloutBatch) -> bool:
    """Whether it still is a batch of sequences: not reshaped, not a single row, with the keys that `_counts` reads."""
    is_listed = is_packed(batch) or batch.batch_dims == 1
    return is_listed and {"tokens", "masks", "policy_version", "group_id"} <= set(batch.keys())


def _is_listed(batch: RolloutBatch) -> bool:
    """Whether its samples can be read one by one, with real values."""
    keys = set(batch.keys(include_nested=True))
    return _is_whole(batch) and keys >= LISTED_KEYS and batch["group_id"].device.type != "meta"


def _counts(batch: RolloutBatch) -> str:
    """The rest of the first line, after the class name."""
    num_rows, num_episodes = num_sequences(batch), len(episodes(batch))
    counts = [f"sequences {num_rows}", *([f"episodes {num_episodes}"] if num_episodes < num_rows else [])]
    counts.append(f"groups {len(batch['group_id'].unique())}")
    sampled = batch["masks", "all_assistant_mask"]
    counts.append(f"sampled tokens {int(sampled.sum())}")
    if "pictures" in batch.keys():
        shown = [each.picture.digest for row in batch["pictures"] for each in row]
        counts.append(f"pictures {len(shown)}, {len(set(shown))} of them different")
    versions = batch["policy_version"][sampled].unique().tolist()
    if versions:
        counts.append("policy version " + " to ".join(map(str, sorted({versions[0], versions[-1]}))))
    return f", {'packed' if is_packed(batch) else 'padded'}: {', '.join(counts)}"


def _facts(batch: RolloutBatch) -> Iterator[str]:
    """Lines on finish reasons, rewards and the first sample, as far as the batch has them."""
    keys, first_rows = batch.keys(include_nested=True), [rows[0] for rows in episodes(batch)]
    column = "ended_by" if "ended_by" in keys else "finish_reason"  # of an episode, or of one answer
    if column in keys:
        given = list(batch[column])
        ends = Counter(str(given[row]) for row in first_rows)
        yield "ended by: " + ", ".join(f"{reason} {times}" for reason, times in ends.most_common())
    if ("next", "reward") in keys and (rows := [row for row in first_rows if counted(batch)[row]]):
        rewards = batch["next", "reward"][rows].float()
        yield f"reward: mean {rewards.mean():.4g}, from {rewards.min():.4g} to {rewards.max():.4g}"
    if ("text", "response") in keys and num_sequences(batch):
        yield f"first: {_short(batch['text', 'prompt'][0])} -> {_short(batch['text', 'response'][0])}"


def _keys(batch: RolloutBatch) -> Iterator[str]:
    """One line per top-level key: the shapes and dtypes below it."""
    below: dict[str, list[str]] = {}
    for key, value in leaves(batch):
        top, *rest = (key,) if isinstance(key, str) else key
        what = f"{list(value.shape)} {_dtype(value)}"
        below.setdefault(top, []).append(f"{'.'.join(rest)} {what}" if rest else what)
    shown = list(below.items())[:MAX_KEYS]
    column = max((len(name) for name, _ in shown), default=0) + 2
    for name, parts in shown:
        unbroken = ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)
        lines = textwrap.wrap(unbroken, WIDTH - column, break_long_words=False, break_on_hyphens=False)
        yield f"{name:{column}}" + ("\n" + " " * column).join(lines).replace("\N{NO-BREAK SPACE}", " ")
    if len(below) > MAX_KEYS:
        yield f"and {len(below) - MAX_KEYS} more keys"


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else "objects"


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 3] + "..."
