"""Makes logged rollouts again, token by token and bit by bit, or reports the differences and their possible causes.

    for report in replay(policy, read_jsonl("rollouts.jsonl")):
        assert report.is_equal, report

A draw depends on its seed and position alone and kernels do not see the batch. So every piece of a sample, the tokens
of one turn that one version of the weights sampled, is made again separately: its prompt is all that precedes it.
"""

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError, unknown_name
from rollout_engine.base.pictures import Picture, PlacedPicture
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.thinking import count_sampled
from rollout_engine.batches.jsonl import samples as samples_of
from rollout_engine.batches.picture_files import placed_pictures
from rollout_engine.batches.rollout_files import sample_problem
from rollout_engine.rollouts.episodes.episode import seed_of_turn
from rollout_engine.rollouts.log import describe_engine, live_digest
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.text.thinking_tags import ThinkingTags

logger = logging.getLogger("rollout_engine")

Sample = Mapping[str, Any]
"""One sample of a file, as `read_jsonl` returns it."""


class Difference(msgspec.Struct, frozen=True):
    """The first token of a sample that was not made again as it was."""

    place: int
    """Index in the response."""
    logged: tuple[int, float] | None
    """Token id and log-prob, as they were; None if the sample had ended."""
    made: tuple[int, float] | None
    """Token id and log-prob, as they are now; None if it ends now."""

    def __str__(self) -> str:
        return (
            f"token {self.place} of the response was {_describe_token(self.logged)} and is {_describe_token(self.made)}"
        )


class ReplayReport(msgspec.Struct):
    """Result for one sample: how much was made again, and the first difference."""

    group_id: int
    sample_index: int
    num_tokens: int = 0
    """Sampled tokens that were made again and compared."""
    left_out: dict[str, int] = {}
    """Why tokens could not be made again -> how many."""
    difference: Difference | None = None
    causes: list[str] = []
    """Settings, weights and versions that are others than when it was sampled; sentences without a full stop."""

    @property
    def is_equal(self) -> bool:
        """Whether every sampled token and log-prob is the same to the bit."""
        return self.difference is None and not self.left_out

    def __str__(self) -> str:
        lines = [f"group {self.group_id}, sample {self.sample_index}: {self.num_tokens} tokens made again"]
        lines[0] += ", equal to the bit" if self.difference is None and self.num_tokens else ""
        lines += [f"  {count} tokens left out: {why}" for why, count in self.left_out.items()]
        if self.difference is not None:
            lines.append(f"  first difference: {self.difference}")
        lines += [f"  {cause}" for cause in self.causes]
        return "\n".join(lines)


class _Piece(NamedTuple):
    """Consecutive tokens of a response that one turn and one version sampled."""

    sample: Sample
    report: ReplayReport
    start: int
    end: int
    digest: str | None
    """Digest of the weights that sampled it; None if the log has none."""
    params: SamplingParams

    pictures: list[PlacedPicture] = []
    """Pictures of the sample."""

    @property
    def prompt(self) -> dict[str, Any]:
        ids = [*self.sample["prompt_token_ids"], *self.sample["response_token_ids"][: self.start]]
        before = [each for each in self.pictures if each.end <= len(ids)]
        return {"prompt_token_ids": ids, "pictures": before}


def replay(policy: RolloutPolicy, samples: Iterable[Sample], weights: Sequence[Any] = ()) -> list[ReplayReport]:
    """Make samples again, and compare them. One report per sample, in order.

    `weights`: sources for `policy.update_weights`, such as directories of checkpoints. The pieces of a sample are made
    under those whose digest is that of the weights that sampled them: the live ones, or else one of these. The policy
    keeps the last of them. Pieces of weights that are not among them are made under the live ones, and `causes` lists
    that.

    A sample with a picture whose file is missing, damaged, or another's is left out, with a warning: its report counts
    its tokens under the error, which names the file. Raises `RequestError` for a sample without its sampling settings,
    which `rollout(log_to=...)` writes, and for one of an adapter that the policy does not have.
    """
    if isinstance(samples, str | os.PathLike):
        bound = "samples: read_jsonl(path) reads those of a file"
        raise RequestError.for_field("samples", os.fspath(samples), bound)
    reports: list[ReplayReport] = []
    pieces: list[_Piece] = []
    known: dict[str, Picture] = {}
    for sample in samples:
        require_log(sample)
        report = ReplayReport(sample["group_id"], sample["sample_index"])
        reports.append(report)
        try:
            pictures = placed_pictures(sample, known)
        except RequestError as problem:
            if problem.field != "picture":
                raise
            logger.warning("replay: %s, is left out. %s", name_of(sample), problem)
            report.left_out[str(problem)] = sum(version >= 0 for version in sample["policy_version"])
            continue
        made = _pieces(sample, report, policy.frontend.inputs.thinking_tags)
        pieces += (piece._replace(pictures=pictures) for piece in made)
    _require_loras(policy, pieces)
    live = live_digest(policy)
    waiting = [piece for piece in pieces if piece.digest != live]
    _make_again(policy, [piece for piece in pieces if piece.digest == live])
    for source in weights if waiting else ():
        policy.update_weights(source)
        live = live_digest(policy)
        _make_again(policy, [piece for piece in waiting if piece.digest == live])
        waiting = [piece for piece in waiting if piece.digest != live]
    for piece in waiting:
        told = "a digest that was not logged" if piece.digest is None else f"digest {piece.digest}"
        _add_cause(piece.report, f"other weights: {told} sampled it, the live ones have {live}")
    _make_again(policy, waiting)
    return reports


def require_log(sample: Sample) -> None:
    """Raise `RequestError` for a sample that is no line of a log and so lacks the settings that sampled it."""
    bound = "a line of rollout(log_to=...)"
    if reason := sample_problem(sample):
        raise RequestError.for_field("samples", sample, bound, f"{reason}.")
    where = name_of(sample)
    for name in ("sampling", "weights", "engine", "kv_min_version"):
        if sample.get(name) is None:
            hint = "to_jsonl writes what a TensorDict holds, which is not what made it."
            raise RequestError.for_field(where, f"no '{name}'", bound, hint)
    turns = sample.get("turns") or [0] * len(sample["response_token_ids"])
    numbers = [turn for turn, _ in itertools.groupby(turn for turn in turns if turn >= 0)]
    if any(after != before + 1 for before, after in itertools.pairwise(numbers)):
        raise RequestError.for_field(f"{where}: turns", turns, "turns that follow one another, -1 between them")
    sampled = [turn >= 0 for turn in turns]
    for name in ("policy_version", "kv_min_version"):
        if [version >= 0 for version in sample[name]] != sampled:
            hint = "They are -1 for tokens that no turn sampled, and for no other."
            raise RequestError.for_field(f"{where}: {name}", sample[name], "the versions of its turns", hint)


def name_of(sample: Sample) -> str:
    """Name a sample by its group and its place there."""
    return f"group {sample['group_id']}, sample {sample['sample_index']}"


def _pieces(sample: Sample, report: ReplayReport, tags: ThinkingTags) -> Iterator[_Piece]:
    """Divide a sample into pieces that can be made again, and count the tokens that cannot."""
    params = _params_of(sample["sampling"])
    versions, oldest = sample["policy_version"], sample["kv_min_version"]
    turns = sample.get("turns") or [0] * len(versions)
    end, current, first = 0, -1, 0
    for (turn, version, kv), tokens in itertools.groupby(zip(turns, versions, oldest, strict=True)):
        start, end = end, end + len(list(tokens))
        if turn != current:
            current, first = turn, start
        if version < 0:
            continue  # a template's or an environment's tokens
        why = f"version {version} sampled them over KV of version {kv}" if kv != version else ""
        is_forced = list(sample.get("forced") or [])[start:end]
        if start > first and (why_not := _looks_back(params, sample, any(is_forced))):
            why = f"an update came within their turn, and {why_not} looks at the tokens before"
        if why:
            report.left_out[why] = report.left_out.get(why, 0) + end - start
            continue
        changes: dict[str, Any] = {"seed": seed_of_turn(sample["seed"], turn), "n": 1, "max_tokens": end - start}
        changes["min_tokens"] = min(max(0, params.min_tokens - (start - first)), end - start)
        # The logged prompt was cut already, and stop strings were looked for in the text of the whole turn.
        changes |= {"truncate_prompt_tokens": None, "stop": None, "stop_regex": None}
        changes["thinking_budget"] = _budget_of(sample, start, is_forced, params, tags) if any(is_forced) else None
        yield _Piece(sample, report, start, end, sample["weights"].get(str(version)), params.clone(**changes))


def _params_of(given: Mapping[str, Any]) -> SamplingParams:
    for name in given:
        if name not in SamplingParams.__struct_fields__:
            text = unknown_name("field of sampling", name, SamplingParams.__struct_fields__)
            raise RequestError(text, field="sampling", value=name)
    try:
        return msgspec.convert(given, SamplingParams, str_keys=True)
    except msgspec.ValidationError as problem:
        raise RequestError.for_field("sampling", given, "fields of SamplingParams", f"{problem}.") from None


def _budget_of(sample: Sample, start: int, is_forced: list[bool], params: SamplingParams, tags: ThinkingTags) -> int:
    """Thinking tokens of the piece from `start` on before its first forced one. That is the budget of its turn, which
    may have been the rest of an episode's.
    """
    ids = sample["response_token_ids"]
    tags.check(params)
    rule = tags.budget_of(params, [*sample["prompt_token_ids"], *ids[:start]])
    assert rule is not None, "only a budget forces tokens"
    sampled = ids[start : start + is_forced.index(True)]
    return count_sampled(msgspec.structs.replace(rule, budget=len(ids)), sampled)


def _looks_back(params: SamplingParams, sample: Sample, is_forced: bool) -> str:
    """Name the setting by which a draw depends on which tokens before it were sampled; empty for none."""
    if is_forced:
        return "thinking_budget"
    if params.presence_penalty or params.frequency_penalty:
        return "a penalty"
    if params.bad_words or params.structured_outputs:
        return "bad_words" if params.bad_words else "structured_outputs"
    return "a logits processor" if sample["engine"]["logits_processors"] else ""


def _require_loras(policy: RolloutPolicy, pieces: list[_Piece]) -> None:
    names = {name for piece in pieces if (name := _lora_of(piece)) is not None}
    for name in sorted(names - {info.name for info in policy.list_loras()} if names else ()):
        hint = "Lines have its digest alone. In Python: policy.add_lora(...), then replay(policy, samples)."
        raise RequestError.for_field("lora", name, "an adapter that the policy has", hint)


def _make_again(policy: RolloutPolicy, pieces: list[_Piece]) -> None:
    """Sample pieces under the live weights, and record the results in their reports."""
    engine = describe_engine(policy)
    for name, with_lora in _by_lora(pieces).items():
        batch = policy.rollout(
            [piece.prompt for piece in with_lora],
            [piece.params for piece in with_lora],
            lora_request=name,
            use_tqdm=False,
        )
        adapters = {info.name: info.digest for info in policy.list_loras()} if name else {}
        for piece, made in zip(with_lora, samples_of(batch), strict=True):
            for cause in _causes(piece.sample, engine, adapters):
                _add_cause(piece.report, cause)
            _compare(piece, made)


def _by_lora(pieces: list[_Piece]) -> dict[str | None, list[_Piece]]:
    grouped: dict[str | None, list[_Piece]] = {}
    for piece in pieces:
        grouped.setdefault(_lora_of(piece), []).append(piece)
    return grouped


def _lora_of(piece: _Piece) -> str | None:
    """Name of the adapter that sampled it."""
    lora = piece.sample.get("lora")
    return None if lora is None else str(lora["name"])


def _compare(piece: _Piece, made: Sample) -> None:
    report, span = piece.report, slice(piece.start, piece.end)
    logged_ids, logged_logprobs = piece.sample["response_token_ids"][span], piece.sample["log_probs"][span]
    report.num_tokens += len(logged_ids)
    logged = list(zip(logged_ids, logged_logprobs, strict=True))
    now = list(zip(made["response_token_ids"], made["log_probs"], strict=True))
    for place, (was, is_now) in enumerate(itertools.zip_longest(logged, now)):
        if was is None or is_now is None or was[0] != is_now[0] or np.float32(was[1]) != np.float32(is_now[1]):
            found = Difference(piece.start + place, was, is_now)
            if report.difference is None or found.place < report.difference.place:
                report.difference = found
            return


def _causes(sample: Sample, engine: Mapping[str, Any], adapters: Mapping[str, str]) -> Iterator[str]:
    """Yield each setting or version that decides bits and differs from a line of the log."""
    logged = sample["engine"]
    for name in ("dtype", "fp32_head", "quantization", "deterministic", "logits_processors"):
        if (was := logged.get(name)) != engine[name]:  # lines of older versions have no quantization
            yield f"another {name}: it was {was!r}, and is {engine[name]!r}"
    for name, was in logged["made_with"].items():
        if was != (now := engine["made_with"].get(name)):
            yield f"another {name}: it was {was!r}, and is {now!r}"
    lora = sample.get("lora")
    if lora is not None and adapters.get(lora["name"]) != lora["digest"]:
        yield f"other values of the adapter {lora['name']!r}: digest {lora['digest']} sampled it"


def _add_cause(report: ReplayReport, cause: str) -> None:
    if cause not in report.causes:
        report.causes.append(cause)


def _describe_token(token: tuple[int, float] | None) -> str:
    return "not there" if token is None else f"{token[0]} with log-prob {token[1]:.9g}"
