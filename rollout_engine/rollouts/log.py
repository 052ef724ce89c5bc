"""Rollouts as lines of a file, with their settings: `rollout(log_to=...)`. `rollout_engine.replay` makes them again.

A line has the keys of `rollout_engine.batches.jsonl`, and these:

    key         value
    schema      1: the number of this table
    sampling    the fields of `SamplingParams` that determine the samples, if they are not the default
    weights     {policy version: digest of the weights} for the versions that sampled; null if that version was replaced
                before its group ended
    lora        {name, revision, digest} of the adapter; null without one
    engine      model, dtype, fp32_head, quantization, deterministic, logits_processors, and its libraries and machine
                (`ModelInfo.made_with`); step_trace if it writes one
    made        [when the log was opened, when the group was complete], seconds since 1970 on this machine's clock
"""

import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from rollout_engine.base.errors import LifecycleError, RequestError, error_text
from rollout_engine.base.lora_request import LoRALike, as_lora_request
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.version import VERSION
from rollout_engine.batches.jsonl import Converted, line_of
from rollout_engine.batches.picture_files import folder_beside, save_pictures
from rollout_engine.batches.rollout_files import SCHEMA, append_text, end_last_line
from rollout_engine.faces.verb_methods import BlockingVerbs

logger = logging.getLogger("rollout_engine")

_DRAWS_THE_SAME = {
    "n",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "output_kind",
    "speculation",
    "policy_version",
    "min_policy_version",
    "version_wait",
    "return_routed_experts",
    "return_support",
    "entropy",
    "return_hidden_states",
    "kv_hint",
}
"""Fields of `SamplingParams` that set the number of samples, the returned values, or when a sample may begin."""


class LoggedSamples:
    """Makes the lines of rollouts, as dicts, with the settings that made them. One thread at a time may call it."""

    def __init__(self, policy: BlockingVerbs, lora: LoRALike | None = None) -> None:
        """`lora`: the adapter that samples."""
        self._policy = policy
        self._lora = None if lora is None else as_lora_request(lora).name
        self._digests: dict[int, str] = {}
        """Version -> digest of its weights."""
        self._engine = describe_engine(policy)
        self._since = time.time()
        self._learn_digest()

    def of(self, samples: Iterable[dict[str, Any]], params: SamplingParams) -> list[dict[str, Any]]:
        """The samples of a group that was drawn with `params`, as `rollout_engine.batches.jsonl` describes them."""
        self._learn_digest()
        made_by = {
            "sampling": _drawn_by(params),
            "lora": self._describe_lora(),
            "engine": self._engine,
            "made": [self._since, time.time()],
        }
        lines = []
        for sample in samples:
            versions = sorted({*sample["policy_version"], *sample["kv_min_version"]} - {-1})
            weights = {str(version): self._digests.get(version) for version in versions}
            lines.append({"schema": SCHEMA, **sample, "weights": weights, **made_by})
        return lines

    def _learn_digest(self) -> None:
        version = self._policy.policy_version
        if version not in self._digests:
            try:
                digest = live_digest(self._policy)
            except LifecycleError:  # asleep or in an update: there are no weights to read now
                return
            if self._policy.policy_version == version:  # else there was an update meanwhile: the next group asks
                self._digests[version] = digest

    def _describe_lora(self) -> dict[str, Any] | None:
        if self._lora is None:
            return None
        [info] = [each for each in self._policy.list_loras() if each.name == self._lora]
        return {"name": info.name, "revision": info.revision, "digest": info.digest}


class RolloutLog:
    """Appends rollouts to a file, one line per sample, and pictures to a folder next to it. Any thread may write.

    A group that cannot be written is missing from the file, and the first such group is logged: the samples themselves
    are worth more than their log.
    """

    def __init__(self, policy: BlockingVerbs, path: str | os.PathLike[str], lora: LoRALike | None = None) -> None:
        """The file is made if it is missing. `lora`: the adapter that samples.

        Raises `RequestError` for a file that cannot be written.
        """
        self._path = Path(path)
        self._writing = threading.Lock()
        try:
            with open(self._path, "a+b") as file:
                end_last_line(file)
        except OSError as problem:
            hint = f"{problem}." if self._path.parent.is_dir() else "Make its folder first."
            raise RequestError.for_field("log_to", str(path), "a file that can be written", hint) from problem
        self._samples, self._converted = LoggedSamples(policy, lora), Converted(f"log_to={path}")
        self._has_failed = False

    def write(self, samples: Iterable[dict[str, Any]], params: SamplingParams, group: int) -> None:
        """Append the samples of group number `group`, drawn with `params`. Raises nothing."""
        with self._writing:
            try:
                lines = self._samples.of(samples, params)
                text = "".join(line_of(sample, self._converted) + "\n" for sample in lines)
                save_pictures(folder_beside(self._path), lines)
                append_text(self._path, text, after_cut=self._has_failed)
            except Exception as problem:
                if not self._has_failed:
                    more = "Its samples are returned anyway; further groups that are missing are not reported"
                    why = error_text(problem)
                    logger.warning("log_to=%s: group %d is missing (%s). %s.", self._path, group, why, more)
                self._has_failed = True


def describe_engine(policy: BlockingVerbs) -> dict[str, Any]:
    """Return the settings and versions that determine an engine's bits in addition to its weights."""
    info = policy.frontend.client.info
    config = info.config
    return {
        "model": config.model,
        "dtype": info.dtype,
        "fp32_head": config.fp32_head,
        "quantization": config.quantization,
        "deterministic": config.deterministic,
        "logits_processors": list(config.logits_processors),
        **({} if config.step_trace is None else {"step_trace": config.step_trace}),
        "made_with": {"rollout_engine": VERSION, **info.made_with},
    }


def live_digest(policy: BlockingVerbs) -> str:
    """Digest of the live weights, of a fleet those of its first replica. `LifecycleError` if there are none."""
    results: Any = policy.collective_rpc("get_weight_digest")
    ranks = next(iter(results.values())) if isinstance(results, dict) else results
    return str(ranks[0])


def _drawn_by(params: SamplingParams) -> dict[str, Any]:
    default = SamplingParams()
    given = {name: getattr(params, name) for name in params.__struct_fields__ if name not in _DRAWS_THE_SAME}
    return {name: msgspec.to_builtins(value) for name, value in given.items() if value != getattr(default, name)}
