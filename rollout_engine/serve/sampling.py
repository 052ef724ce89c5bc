"""Sampling settings in bodies of requests, under the names that OpenAI's, vLLM's and our own clients use."""

import operator
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import LogprobsMode, SamplingParams
from rollout_engine.base.seeds import MAX_SEED, MIN_SEED, unsigned
from rollout_engine.serve.forms import FORM_NAMES, form_of

_OF_ROUTES = {"logprobs", "output_kind", "detokenize", "return_routed_experts", "return_support"}
"""`SamplingParams` that routes have under other names, or set themselves."""
_OWN = [name for name in SamplingParams.__struct_fields__ if name not in _OF_ROUTES]
_FORMS = [name for name in FORM_NAMES if name not in ("structured_outputs", "structural_tag")]
if TYPE_CHECKING:

    class _Fields(msgspec.Struct):
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
else:
    _Fields = msgspec.defstruct("_Fields", [(name, Any, None) for name in (*_OWN, *_FORMS)], kw_only=True)


class SamplingFields(_Fields, kw_only=True, forbid_unknown_fields=True):
    """Fields that are `SamplingParams`' own, which checks them, and names that others have. None: its default."""

    thinking_token_budget: Any = None
    """vLLM's name of `thinking_budget`."""
    custom_params: Any = None
    """SGLang's: {"thinking_budget": tokens}."""


_OWN_NAMES = frozenset(SamplingFields.__struct_fields__) - {"seed"}
_key = msgspec.json.Encoder().encode
_MAX_KEPT = 64


class Settings(NamedTuple):
    """Sampling settings of one request."""

    params: SamplingParams
    """Without a seed."""
    seed: int | None
    """64 bits without a sign; None: drawn from the engine's."""


class SettingsReader:
    """Reads the settings of bodies. Repeated ones, equal but for the seed, are checked once."""

    def __init__(self, logprobs_mode: LogprobsMode) -> None:
        """`logprobs_mode`: of bodies that give none."""
        self._defaults = {"logprobs_mode": logprobs_mode}
        self._known: dict[tuple[type[SamplingFields], bytes], SamplingParams] = {}

    def read(self, fields: SamplingFields, **more: Any) -> Settings:
        """The settings of a body, and `more` of them. Raises `RequestError`, also if both ask for a form."""
        names, values_of = _settings_of(type(fields))
        values = values_of(fields)
        key = type(fields), _key((values, more))
        params = self._known.get(key)
        if params is None:
            own = {name: value for name, value in zip(names, values, strict=True) if value is not None}
            _rename_budgets(own)
            form = form_of({name: own.pop(name, None) for name in FORM_NAMES})
            if form is not None:
                if "structured_outputs" in more:
                    bound = "absent: tool_choice or a strict tool binds the answer already"
                    raise RequestError.for_field("structured_outputs", form, bound)
                own["structured_outputs"] = form
            params = SamplingParams(**_with_int_keys(self._defaults | own | more))
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            self._known[key] = params
        return Settings(params, _seed(fields.seed))


@cache
def _settings_of(kind: type[SamplingFields]) -> tuple[tuple[str, ...], Callable[[SamplingFields], tuple[Any, ...]]]:
    """Names of a kind of bodies' fields that are settings other than the seed, and a function that reads them."""
    names = tuple(name for name in kind.__struct_fields__ if name in _OWN_NAMES or name in FORM_NAMES)
    return names, operator.attrgetter(*names)


def _rename_budgets(own: dict[str, Any]) -> None:
    """Put the budget of thinking that a body gives under another name in its place. Raises `RequestError`."""
    custom = own.pop("custom_params", None) or {}
    if not isinstance(custom, dict) or custom.keys() - {"thinking_budget"}:
        hint = "No other parameters of custom logit processors are served."
        raise RequestError.for_field("custom_params", custom, "{'thinking_budget': tokens}, or left out", hint)
    theirs = own.pop("thinking_token_budget", None), custom.get("thinking_budget")
    for name, value in zip(("thinking_token_budget", "custom_params"), theirs, strict=True):
        if value is not None and own.setdefault("thinking_budget", value) != value:
            bound = f"thinking_budget, which is {own['thinking_budget']}"
            raise RequestError.for_field(name, value, bound, "Give one of them.")


def _with_int_keys(given: dict[str, Any]) -> dict[str, Any]:
    """The same, with the token ids of `logit_bias` as numbers: JSON's keys are strings."""
    bias = given.get("logit_bias")
    if not isinstance(bias, dict):
        return given
    return given | {"logit_bias": {int(key) if _is_int(key) else key: value for key, value in bias.items()}}


def _seed(seed: Any) -> int | None:
    """64 bits of a body's seed. None: one is drawn, also for -1, as clients of vLLM write it."""
    if seed is None or (type(seed) is int and seed == -1):
        return None
    if type(seed) is not int or not MIN_SEED <= seed <= MAX_SEED:
        SamplingParams(seed=seed)  # raises
    return unsigned(seed)


def _is_int(key: Any) -> bool:
    return isinstance(key, str) and key.removeprefix("-").isdecimal() and key.isascii()


SAMPLING_PEERS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "suffix": ("",),
    "prompt_embeds": (),
    "kv_transfer_params": ({},),
    "mm_processor_kwargs": ({},),
    "repetition_detection": (),
}
"""Fields of other servers that are not served -> the values that ask for nothing."""

IGNORED = frozenset(
    (
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
    )
)
"""Fields of clients that change no token."""

CHAT_PEERS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "web_search_options": (),
}
"""The same for conversations."""
