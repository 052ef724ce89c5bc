"""Shows a batch of rollouts in a notebook."""

from itertools import islice
from typing import Any

from tensordict import TensorDictBase

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import TokenTexts
from rollout_engine.batches import jsonl
from rollout_engine.batches.layout import check_batch, is_packed, num_sequences
from rollout_engine.looking.notebook import html_of, num_shown
from rollout_engine.looking.samples import viewed

LISTED_KEYS = {
    *(
        ("tokens", "prompt"),
        ("tokens", "response"),
        ("log_probs", "response"),
        ("text", "prompt"),
        ("text", "response"),
    ),
    *("policy_version", "kv_min_version", "group_id", "sample_index", "seed", "finish_reason", "truncated"),
}
"""Keys without which samples cannot be shown one by one."""


class ShownBatch:
    """The result of `show`: notebooks draw it by `_repr_html_`, and elsewhere it prints as the batch does."""

    def __init__(self, html: str, text: str) -> None:
        self._html, self._text = html, text

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


def show(batch: TensorDictBase, tokenizer: Any = None) -> ShownBatch:
    """A rollout for a notebook: a table of its first samples, which open to prompt, response and tokens.

        show(batch, policy.tokenizer)

    Tokens are coloured by their log-probs. `tokenizer`: a Hugging Face tokenizer, for the texts of tokens; without one
    they are boxes. Texts of samples are shown as text, never run, and cut if long. Raises `RequestError` for
    an object that is no rollout.
    """
    check_batch(batch)
    if missing := sorted(map(str, LISTED_KEYS - set(batch.keys(include_nested=True)))):
        hint = "Keep all keys that RolloutPolicy.rollout returns."
        raise RequestError.for_field("batch.keys()", sorted(map(str, batch.keys())), f"with {missing}", hint)
    return ShownBatch(html(batch, tokenizer), repr(batch))


def html(batch: TensorDictBase, tokenizer: Any = None) -> str:
    """The HTML that a notebook shows of a batch with the keys `LISTED_KEYS`; see `show`."""
    num_all, text = num_sequences(batch), repr(batch)
    first = batch if is_packed(batch) or num_all == num_shown(num_all) else batch[: num_shown(num_all)]
    texts = None if tokenizer is None else TokenTexts(tokenizer)
    samples = viewed(islice(jsonl.samples(first), num_shown(num_all)), _no_text if texts is None else texts.__getitem__)
    head, has_keys, _ = text.partition("\n  tokens ")
    if not has_keys:  # not our own `repr`
        head = f"{type(batch).__name__}: {num_all} samples"
    return html_of(head, samples, num_all, has_texts=texts is not None)


def _no_text(token_id: int) -> None:
    return None
