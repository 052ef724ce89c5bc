"""Settings of a pooling request, the kinds of pooling that a model offers, and whether the two fit each other."""

from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from rollout_engine.base.errors import RequestError, did_you_mean
from rollout_engine.base.peer_options import POOLING_PEERS
from rollout_engine.base.sampling_params import TruncationSide
from rollout_engine.base.structs import UserStruct

PoolingKind = Literal["last", "mean", "cls", "token", "classify", "reward"]
KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)
_OF_HEAD = ("classify", "reward")
_PEER_KINDS = {
    "all": "kind='token' gives every token.",
    "embed": "kind='last' with normalize=True gives an embedding.",
    "score": "kind='reward' gives the logit of a head with one label; apply sigmoid to it for a score.",
    "step": "Give kind='reward' with step_token_ids.",
    "token_classify": "kind='classify' of a head for tokens gives the logits of every token.",
    "token_embed": "kind='token' gives every token.",
}
"""Names of pooling tasks and types in vLLM -> advice for this engine."""
MAX_STEP_TOKEN_IDS = 1_024
MAX_POOLED_VALUES = 1 << 25
"""Most float32 values of one result: 128 MiB."""

Positions = Literal["last", "first", "all"]


def _as_kind(value: Any) -> Any:
    if isinstance(value, str) and value not in KINDS:
        bound = f"one of {', '.join(map(repr, KINDS))}"
        hint = _PEER_KINDS.get(value.lower()) or did_you_mean(value, KINDS)
        raise RequestError.for_field("kind", value, bound, hint)
    return value


class PoolingParams(UserStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[metaclass]
    """Settings of one pooling request. Unknown names, wrong types and broken bounds raise `RequestError`.

    Hidden states are those behind the final norm, H wide; a prompt has P tokens; a head has L labels. Results are
    float32:

        kind         without step_token_ids               with them: S marked tokens
        "last"       [H], of the last token
        "mean"       [H], the mean over all tokens
        "cls"        [H], of the first token
        "token"      [P, H], of every token               [S, H]
        "classify"   [L], logits of the head,             [S, L]
                     [P, L] of a head for tokens
        "reward"     [1], of a head with one label,       [S]
                     [P] of a head for tokens

    >>> PoolingParams(kind="mean", normalize=True)
    """

    error_class = RequestError
    peers = POOLING_PEERS
    readings = {
        "kind": _as_kind,
        "step_token_ids": lambda value: [value] if type(value) is int else value,
    }

    kind: PoolingKind = "last"
    """The result: the hidden state of the last token, of the first, the mean, that of every token, or what the
    checkpoint's head computes."""
    normalize: bool = False
    """Divide each hidden state, or the mean, by its length (L2). Not of what a head computes."""
    step_token_ids: list[int] | None = None
    """Token ids that mark the ends of steps: "token", "classify" and "reward" return a row for each of them in the
    prompt, in order, and no other."""
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """Keep only this number of prompt tokens, the last ones or by `truncation_side` the first. -1: as many as fit the
    engine's `max_model_len`."""
    truncation_side: TruncationSide = "left"
    """The end of the prompt at which `truncate_prompt_tokens` cuts: "left" keeps its last tokens, "right" its first."""

    def check(self) -> None:
        ids = self.step_token_ids
        if self.normalize and self.kind in _OF_HEAD:
            hint = f"kind={self.kind!r} returns what the head computes."
            raise RequestError.for_field("normalize", True, "False", hint)
        if self.truncate_prompt_tokens == 0:
            raise RequestError.for_field("truncate_prompt_tokens", 0, "-1 or >= 1")
        if ids is None:
            return
        if self.kind not in ("token", *_OF_HEAD):
            bound = "None, or kind one of 'token', 'classify', 'reward'"
            raise RequestError.for_field("step_token_ids", ids, bound)
        if not 1 <= len(ids) <= MAX_STEP_TOKEN_IDS:
            raise RequestError.for_field("step_token_ids", f"{len(ids)} ids", f"1 to {MAX_STEP_TOKEN_IDS} ids")
        if min(ids) < 0:
            raise RequestError.for_field("step_token_ids", min(ids), "token ids >= 0")

    @property
    def uses_head(self) -> bool:
        """Whether the result is computed by the checkpoint's head."""
        return self.kind in _OF_HEAD


PoolingLike: TypeAlias = PoolingParams | dict[str, Any]
"""Pooling params as users may give them: a dict has their fields."""


def as_pooling_params(value: Any) -> PoolingParams:
    """Convert to `PoolingParams`: themselves, a dict of their fields, or None. Raises `RequestError`."""
    if value is None or isinstance(value, dict):
        return PoolingParams(**{str(name): each for name, each in (value or {}).items()})
    if not isinstance(value, PoolingParams):
        hint = "SamplingParams go to generate." if type(value).__name__ == "SamplingParams" else ""
        raise RequestError.for_field("pooling_params", value, "PoolingParams, a dict of their fields, or None", hint)
    return value


def pooling_only(params: Any) -> Any:
    """Params of a request that pools, one or a list with one each. Raises `RequestError` for others."""
    if not isinstance(params, list | tuple):
        return as_pooling_params(params)
    made = []
    for index, each in enumerate(params):
        try:
            made.append(as_pooling_params(each))
        except RequestError as error:
            where = f"prompts[{index}]: {error}"
            raise RequestError(where, field=error.field, value=error.value, bound=error.bound) from error
    return made


def refuse_pooling(params: Any) -> None:
    """Raise `RequestError` if a request that generates has `PoolingParams`."""
    for each in params if isinstance(params, list | tuple) else [params]:
        if isinstance(each, PoolingParams):
            raise RequestError.for_field("sampling_params", each, "SamplingParams", "PoolingParams go to encode.")


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kinds of pooling that a loaded model offers, and the sizes of their results."""

    hidden_size: int
    head: Literal["sequence", "token"] | None = None
    """Its classification head: for sequences, or for tokens; None: it has none."""
    labels: list[str] = []
    """Names of the head's outputs, in order."""
    is_multi_label: bool = False
    """Whether each label applies independently (sigmoid), instead of one of them (softmax)."""
    pad_token_id: int | None = None
    """transformers reads a head for sequences at the last token that is not this one."""

    def positions(self, params: PoolingParams) -> Positions:
        """Which hidden states of a prompt a result is made of; of "all", `step_token_ids` choose some."""
        if params.kind in ("mean", "token") or params.step_token_ids is not None:
            return "all"
        if params.kind == "cls":
            return "first"
        return "all" if params.uses_head and self.head == "token" else "last"

    def shape(self, params: PoolingParams, num_tokens: int) -> tuple[int, ...]:
        """The largest shape of a result for a prompt of `num_tokens` tokens."""
        width = len(self.labels) if params.uses_head else self.hidden_size
        if params.kind != "mean" and self.positions(params) == "all":
            return (num_tokens,) if params.kind == "reward" else (num_tokens, width)
        return (1,) if params.kind == "reward" else (width,)


def supported_tasks(generates: bool, info: PoolingInfo | None) -> list[str]:
    """The kinds of requests that a model serves: "generate", and kinds of pooling."""
    kinds = [] if info is None else [kind for kind in KINDS if _missing(kind, info) is None]
    return ["generate"] * generates + [str(kind) for kind in kinds]


def check_pooling(params: PoolingParams, info: PoolingInfo | None, num_tokens: int) -> None:
    """Raise `RequestError` unless a model computes `params` for a prompt of `num_tokens` tokens."""
    if info is None:
        hint = "Pool on an engine with device='cpu'."
        raise RequestError.for_field("pooling_params", params.kind, "absent: this engine's device does not pool", hint)
    missing = _missing(params.kind, info)
    if missing is not None:
        bound = f"one of {', '.join(map(repr, supported_tasks(False, info)))} for this model"
        raise RequestError.for_field("kind", params.kind, bound, missing)
    num_values = 1
    for length in info.shape(params, num_tokens):
        num_values *= length
    if num_values > MAX_POOLED_VALUES:
        bound = f"of at most {MAX_POOLED_VALUES} values"
        hint = f"{num_tokens} tokens give {num_values}. Give a shorter prompt, or another kind."
        raise RequestError.for_field("kind", params.kind, bound, hint)


def check_generation(generates: bool) -> None:
    """Raise `RequestError` for a request to generate if the model has no output head."""
    if not generates:
        raise RequestError(
            "This model cannot generate: its checkpoint has no output head (lm_head), only one that classifies. Use "
            "encode or reward (over HTTP: /pooling or /classify), or load a checkpoint of a causal LM.",
            field="sampling_params",
            bound="absent",
        )


def _missing(kind: PoolingKind, info: PoolingInfo) -> str | None:
    """Describe the part that a model lacks for a kind of pooling, as a sentence; None if it lacks nothing."""
    if kind not in _OF_HEAD:
        return None
    if info.head is None:
        return (
            "It has no classification head (no score.weight): load a checkpoint whose architecture is "
            "...ForSequenceClassification, ...ForTokenClassification or ...ForRewardModel."
        )
    if kind == "reward" and len(info.labels) != 1:
        return f"Its head has {len(info.labels)} labels, and a reward is one number: use kind='classify'."
    return None
