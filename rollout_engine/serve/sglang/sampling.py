"""Sampling settings under the names and with the defaults of SGLang's clients."""

from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import MAX_PROMPT_LOGPROB_VALUES
from rollout_engine.serve.bodies import read_fields
from rollout_engine.serve.sampling import SamplingFields, Settings, SettingsReader

_EVERY_TOKEN = 1 << 30
"""How SGLang's clients write a top_k that keeps all tokens."""
_IGNORED = frozenset(("stream_interval",))


class SglangFields(SamplingFields, kw_only=True):
    """Settings of one prompt: SGLang's names, and our own."""

    max_new_tokens: Any = 128
    """SGLang's default; None: up to the longest sequence; 0: only the prompt's log-probs are wanted."""
    min_new_tokens: Any = None
    sampling_seed: Any = None
    no_stop_trim: Any = None
    structural_tag: Any = None


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about one prompt's tokens that a request wants."""

    logprobs: bool = False
    logprob_start: int = -1
    """First prompt token whose log-prob is wanted; -1: none of the prompt's."""
    num_top: int = 0
    """How many of the most likely tokens at each position."""
    token_ids: tuple[int, ...] = ()
    """Tokens whose log-probs are wanted at each position of the completion, and of the prompt from its start on."""
    routed: bool = False
    """Whether the experts of every token are wanted."""
    entropy: bool = False
    """Whether the entropy at each sampled token is wanted."""
    states: bool = False
    """Whether the hidden states of all tokens are wanted."""

    @property
    def prompt(self) -> bool:
        """Whether log-probs of the prompt are wanted."""
        return self.logprobs and self.logprob_start >= 0


def read_sampling(reader: SettingsReader, given: dict[str, Any], wanted: Wanted, kind: str) -> Settings:
    """The settings of one prompt. Raises `RequestError`, and `HttpProblem` 400 for fields that are not known."""
    fields = read_fields(SglangFields, given, "sampling_params", ignored=_IGNORED)
    for ours, theirs in (
        ("max_tokens", fields.max_new_tokens),
        ("min_tokens", fields.min_new_tokens),
        ("seed", fields.sampling_seed),
        ("include_stop_str_in_output", fields.no_stop_trim),
    ):
        if getattr(fields, ours) is None:
            setattr(fields, ours, theirs)
    if fields.top_k == _EVERY_TOKEN:
        fields.top_k = -1
    if is_scoring(given):
        fields.max_tokens = 1  # it is left out of the answer
    more: dict[str, Any] = {"output_kind": kind}
    if wanted.logprobs:
        more["logprobs"] = wanted.num_top
        if wanted.token_ids:
            more["logprob_token_ids"] = list(wanted.token_ids)
        if wanted.prompt:
            more["prompt_logprobs"] = wanted.num_top
    if wanted.routed:
        more["return_routed_experts"] = True
    if wanted.entropy:
        more["entropy"] = True
    if wanted.states:
        more["return_hidden_states"] = "all"
    return reader.read(fields, **more)


def check_num_values(num_tokens: int, num_ids: int) -> None:
    """Raise `RequestError` for more log-probs of ids at the places of a prompt than are returned."""
    if num_tokens * num_ids > MAX_PROMPT_LOGPROB_VALUES:
        bound = f"at most {MAX_PROMPT_LOGPROB_VALUES} log-probs a prompt"
        hint = "Give a higher logprob_start_len."
        raise RequestError.for_field("token_ids_logprob", f"{num_tokens} x {num_ids} ids", bound, hint)


def is_scoring(given: dict[str, Any]) -> bool:
    """Whether only the prompt's log-probs are wanted."""
    return given.get("max_new_tokens") == 0
