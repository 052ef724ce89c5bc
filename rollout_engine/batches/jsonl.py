"""Rollouts as JSON lines: one sample per line, with all that is needed to read it and to replay it.

    key                                           value
    group_id, sample_index                        which prompt, which of its samples
    seed                                          in [0, 2**64): `SamplingParams(seed=seed, n=1)` replays the sample
    finish_reason, truncated                      how it ended; whether it was cut off
    prompt, response                              text; null if the prompt was token ids without a text
    prompt_token_ids, response_token_ids          response: end token included
    pictures                                      spans in prompt and response, and digests, which name files in the
                                                  folder `pictures` (`rollout_engine.batches.picture_files`); only if
                                                  there are any
    log_probs, policy_version, kv_min_version     one per token of the response; 0, -1 and -1 if it was neither sampled
                                                  nor forced
    kept_logprob_mass                             the same, with top-k, top-p or min-p
    support                                       per token of the response the ids that its draw had left, [] for all;
                                                  with return_support
    teacher                                       {name: {log_probs, top_ids, top_log_probs}} with teachers, one entry
                                                  per token of the response; null if it was not sampled or not scored
    entropy                                       one per token of the response, 0 if it was not sampled; with entropy
    top_k                                         with logprobs=k: per token [id, log-prob] of the k most likely ones,
                                                  null for a log-prob of -inf; [] if it was not sampled
    forced                                        with a budget of thinking: whether it forced each response token
    reward, done                                  with a reward function; of episodes also `terminated`: the
                                                  environment ended it, and no limit or fault
    rewards                                       {name: number} with a list of them; null if one does not apply
    turns, turn_rewards, num_turns, episode_id, seat, ended_by, error, messages, info
                                                  of episodes (`rollouts.episodes.rows`); turns: per token
                                                  of the response the turn that wrote it, -1 for glue
    columns                                       {name: value} of your columns, and of keys that you added

In `columns`, `info` and `messages` sets are lists, and other values that JSON lacks (NaN, infinities, bytes, dates) are
a text: a warning names such values (`rollout_engine.batches.json_values`).
`rollout(log_to=...)` adds the origin of the sample (`rollout_engine.rollouts.log`); `read_jsonl` reads both.
"routed_experts" and "hidden_states" are not written. Numbers are written so that reading them gives the same bits
(float32 as its float64 value).
"""

import json
import logging
import math
import os
from collections.abc import Iterator
from io import TextIOBase
from typing import Any, TextIO

import msgspec
from tensordict import NonTensorData, TensorDictBase
from torch import Tensor

from rollout_engine.base.errors import RequestError, text_of
from rollout_engine.base.pictures import Picture
from rollout_engine.base.seeds import unsigned
from rollout_engine.base.whole_files import whole_file
from rollout_engine.batches.json_values import json_value
from rollout_engine.batches.layout import (
    EPISODE_KEYS,
    PER_TURN,
    RESERVED_KEYS,
    TEACHER,
    Key,
    Place,
    Places,
    check_batch,
    is_packed,
    leaves,
    packed_span,
    places,
    span_of,
)
from rollout_engine.batches.picture_files import as_entries, folder_beside, has_pictures, save_pictures
from rollout_engine.batches.rollout_files import append_text
from rollout_engine.batches.sampled_columns import top_rows

logger = logging.getLogger("rollout_engine")


def to_jsonl(batch: TensorDictBase, path: str | os.PathLike[str] | TextIO, *, append: bool = False) -> None:
    """Write a rollout of either layout, one line per sample with the keys of the table above.

    `path` is a file name, or a file open for text; `append=True` appends to an existing file of that name, which is
    else replaced, at once and whole. Nothing is written if a number of the rollout's own, such as a log-prob, is not
    finite: that raises `RequestError` with its name. Pictures are written to a folder next to a file of that name.
    """
    converted, made = Converted("to_jsonl"), list(samples(batch))
    text = "".join(line_of(sample, converted) + "\n" for sample in made)
    target: Any = path  # to type checkers TextIO and TextIOBase are unrelated
    if isinstance(path, TextIOBase):
        if has_pictures(made):
            hint = "Pictures are written to a folder next to it; without them it is batch.exclude('pictures')."
            raise RequestError.for_field("path", path, "the name of a file", hint)
        target.write(text)
        return
    save_pictures(folder_beside(target), made)
    if append:
        append_text(target, text)
    else:
        with whole_file(target) as file:
            file.write(text.encode())


def samples(batch: TensorDictBase) -> Iterator[dict[str, Any]]:
    """One dict per sample with the keys of the table above; columns unchanged, all else as plain Python values."""
    check_batch(batch)
    reserved = RESERVED_KEYS | (EPISODE_KEYS if "episode_id" in batch.keys() else set())
    own, extra = _plain(batch, reserved), {key: value for key, value in leaves(batch) if _top(key) not in reserved}
    where = places(batch)
    for row, (prompt, response, full) in enumerate(zip(*where, strict=True)):
        after = (full[0], slice(full[1].start + own["num_prompt_tokens"][row], full[1].stop))
        sample = {key: own[key][row] for key in ("group_id", "sample_index")}
        sample["seed"] = unsigned(own["seed"][row])
        sample |= {"finish_reason": own["finish_reason"][row], "truncated": own["truncated"][row][0]}
        sample |= {"prompt": own["text", "prompt"][row], "response": own["text", "response"][row]}
        sample["prompt_token_ids"] = batch["tokens", "prompt"][prompt].tolist()
        sample["response_token_ids"] = batch["tokens", "response"][response].tolist()
        sample["log_probs"] = batch["log_probs", "response"][response].tolist()
        if "pictures" in own and own["pictures"][row]:
            sample["pictures"] = as_entries(own["pictures"][row])
        sample |= {key: batch[key][after].tolist() for key in ("policy_version", "kv_min_version")}
        if ("masks", "forced") in batch.keys(include_nested=True):
            sample["forced"] = batch["masks", "forced"][after].tolist()
        if "kept_logprob_mass" in batch.keys():
            sample["kept_logprob_mass"] = batch["kept_logprob_mass"][response].tolist()
        if "support" in own:
            sample["support"] = own["support"][row].lists()
        if TEACHER in batch.keys():
            sample[TEACHER] = _teachers(batch, after)
        if "entropy" in batch.keys():
            sample["entropy"] = batch["entropy", "full"][after].tolist()
        if "top_k" in batch.keys():
            sample["top_k"] = top_rows(*(batch["top_k", name][after] for name in ("ids", "log_probs")))
        if "next" in batch.keys():
            ends = [key for key in ("done", "terminated") if ("next", key) in own]
            sample |= {key: own["next", key][row][0] for key in ("reward", *ends)}
        if "episode_id" in own:
            sample["turns"] = batch["masks", "turn"][after].tolist()
            sample["turn_rewards"] = own[PER_TURN][row][: own["num_turns"][row]]
            sample |= {key: own[key][row] for key in sorted(EPISODE_KEYS)}
        if functions := [key[1] for key in own if key[0] == "rewards" and key != PER_TURN]:
            each = {name: own["rewards", name][row][0] for name in functions}
            sample["rewards"] = {name: None if math.isnan(value) else value for name, value in each.items()}
        sample["columns"] = {_name(key): _value(key, value, batch, where, row) for key, value in extra.items()}
        yield sample


def _plain(batch: TensorDictBase, reserved: frozenset[str]) -> dict[Key, list[Any]]:
    """A rollout's own keys with one entry per sequence, as lists."""
    keys = {key for key, _ in leaves(batch) if span_of(key) is None} - {"cu_seqlens"}
    return {key: batch.get(key).tolist() for key in keys if _top(key) in reserved}


def _teachers(batch: TensorDictBase, after: Place) -> dict[str, dict[str, list[Any]]]:
    """The columns of each teacher at the tokens of one response; None for numbers that are not finite."""
    return {
        name: {part: _finite(values[after].tolist()) for part, values in columns.items()}
        for name, columns in batch[TEACHER].items()
    }


def _finite(value: Any) -> Any:
    """A number, or nested lists of them, with None in place of those that are not finite."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if math.isfinite(value) else None


class Converted:
    """Logs each name of a value that JSON lacks, when it is first written another way."""

    def __init__(self, written_by: str) -> None:
        """`written_by`: begins the line, such as "log_to=PATH"."""
        self._written_by, self._names = written_by, set[str]()

    def add(self, name: str, value: Any) -> None:
        """Note that `value` was converted."""
        if name not in self._names:
            self._names.add(name)
            what = "%s: %s=%.80s is nothing that JSON has and was written as %.80s"
            logger.warning(what, self._written_by, name, text_of(value, repr), json.dumps(json_value(value)))


def line_of(sample: dict[str, Any], converted: Converted | None = None) -> str:
    """One dict of `samples` as JSON; values of users that JSON lacks are converted, and noted in `converted`.

    Raises `RequestError` for another value that cannot be written, such as a log-prob that is not finite.
    """
    try:
        encoded = (f"{_dumps(name)}: {_numbers(value) or _dumps(value)}" for name, value in sample.items())
        line = f"{{{', '.join(encoded)}}}"
    except (TypeError, ValueError, RecursionError):
        given = {name: _convert(name, value, converted) for name, value in sample.items()}
        try:
            line = f"{{{', '.join(f'{_dumps(name)}: {_dumps(value)}' for name, value in given.items())}}}"
        except (TypeError, ValueError) as problem:
            raise _make_refusal(given) from problem
    # Half a surrogate pair has no UTF-8, but JSON has an escape for it.
    return line.encode(errors="backslashreplace").decode()


def _convert(name: str, value: Any, converted: Converted | None) -> Any:
    """The entry `name` of a sample with values of users as JSON has them."""
    if name == "columns":
        return {key: _convert(f"columns[{key!r}]", column, converted) for key, column in value.items()}
    if name not in ("info", "messages") and not name.startswith("columns["):
        return value
    try:
        _dumps(value)
    except (TypeError, ValueError, RecursionError):
        if converted is not None:
            converted.add(name, value)
        return json_value(value)
    return value


def _make_refusal(sample: dict[str, Any]) -> RequestError:
    """The error that names the part of a sample that cannot be written."""
    for name, value in sample.items():
        try:
            _dumps(value)
        except (TypeError, ValueError) as problem:
            where = f"{name} of group {sample['group_id']}, sample {sample['sample_index']}"
            return RequestError.for_field(where, value, "something that JSON can represent", f"{problem}.")
    raise AssertionError("every value can be written")


def _numbers(value: Any) -> str | None:
    """A list of finite numbers, as most of a line is, as JSON in a tenth of the time; None if it is not one."""
    try:
        if type(value) is list and value and math.isfinite(sum(value)):
            return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError):
        pass
    return None


def _to_lists(value: Any) -> Any:
    """Convert arrays, tensors and their scalars to lists and numbers, and pictures to their digests."""
    if isinstance(value, Picture):
        return value.digest.hex()
    if not hasattr(value, "tolist"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.tolist()


_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_to_lists).encode


def _value(key: Key, value: Any, batch: TensorDictBase, where: Places, row: int) -> Any:
    if not isinstance(value, Tensor):  # one object per sequence, or one for the batch
        one = value[row] if value.batch_dims else value
        return one.data if isinstance(one, NonTensorData) else one
    span = packed_span(key, value, batch) if is_packed(batch) else None
    return value[row if span is None else getattr(where, span)[row]].tolist()


def _top(key: Key) -> str:
    return key if isinstance(key, str) else key[0]


def _name(key: Key) -> str:
    return key if isinstance(key, str) else ".".join(key)
