"""Sampling settings under the names and with the defaults of SGLang's clients."""

from typing import Any

import msgspec

from rollout_engine.errors import RequestError, unknown_name
from rollout_engine.serve.sampling import SamplingFields, Settings, SettingsReader

_DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's own."""
_EVERY_TOKEN = 1 << 30
"""How SGLang's clients write a top_k that keeps all tokens."""
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_NOT_SERVED = ("json_schema", "regex", "ebnf", "structural_tag", "custom_params", "custom_logit_processor")
_IGNORED = frozenset(("stream_interval",))
_OURS = frozenset(SamplingFields.__struct_fields__)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants to know of one prompt's tokens."""

    logprobs: bool = False
    logprob_start: int = -1
    """First prompt token whose log-prob is wanted; -1: none of the prompt's."""
    num_top: int = 0
    """How many of the most likely tokens at each position."""
    token_ids: tuple[int, ...] = ()
    """Tokens whose log-probs are wanted at each position of the completion."""

    @property
    def prompt(self) -> bool:
        """Whether log-probs of the prompt are wanted."""
        return self.logprobs and self.logprob_start >= 0


def read_sampling(reader: SettingsReader, given: dict[str, Any], wanted: Wanted, kind: str) -> Settings:
    """The settings of one prompt. Raises `RequestError`."""
    fields = {_RENAMED.get(name, name): value for name, value in given.items() if _is_set(name, value)}
    if fields.get("top_k") == _EVERY_TOKEN:
        fields["top_k"] = -1
    if "max_new_tokens" not in given:
        fields.setdefault("max_tokens", _DEFAULT_MAX_NEW_TOKENS)
    if is_scoring(given):
        fields["max_tokens"] = 1  # it is left out of the answer
    more: dict[str, Any] = {"output_kind": kind}
    if wanted.logprobs:
        more["logprobs"] = wanted.num_top
        if wanted.token_ids:
            more["logprob_token_ids"] = list(wanted.token_ids)
        if wanted.prompt:
            more["prompt_logprobs"] = wanted.num_top
    return reader.read(SamplingFields(**fields), **more)


def is_scoring(given: dict[str, Any]) -> bool:
    """Whether only the prompt's log-probs are wanted."""
    return given.get("max_new_tokens") == 0


def _is_set(name: str, value: Any) -> bool:
    """Whether a field is to be read. Raises `RequestError` for one that is not known, or asks for what is not served.

    None, and nothing in place of something, are what clients send for "not set".
    """
    if name in _NOT_SERVED:
        if value:
            raise RequestError(f"sampling_params: {name}={value!r:.80} is not served.", field=f"sampling_params.{name}")
        return False
    if name not in _RENAMED and name not in _OURS and name not in _IGNORED:
        known = [*_RENAMED, *sorted(_OURS)]
        raise RequestError(f"sampling_params: {unknown_name('field', name, known)}", field=f"sampling_params.{name}")
    return value is not None and name not in _IGNORED
