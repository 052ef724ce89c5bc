"""Messages between front end, core and model runner, typed. New fields go last and have a default.

                add_request                    execute
    front end ───────────────> EngineCore ───────────────> ModelRunner
              EngineCoreRequest            SchedulerOutput
              <─────────────── (scheduler) <───────────────
              EngineCoreOutputs            ModelRunnerOutput

Core and runner identify sequences by ids that the front end counts up: sample i of a request is sequence
`first_sequence_id + i`. Request ids stay in the front end.
"""

from typing import Any, Literal, get_args

import msgspec
import numpy as np

from rollout_engine.base.errors import WeightUpdateError, refused
from rollout_engine.base.outputs import FinishReason
from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.base.pooling_params import PoolingParams
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.sequence_rows import IdLogprobs, SupportIds
from rollout_engine.base.structs import plain
from rollout_engine.base.thinking import Thinking

MAX_CACHE_SALT_BYTES = 1_024
"""Longest cache salt, as UTF-8."""


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, ready for the core: ids checked, seeds and stop ids resolved."""

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """`params.max_tokens` resolved against `max_model_len`."""
    seed: int
    """Sequence seed of sample 0; sample i uses `child_seed(seed, i)`."""
    first_sequence_id: int
    """Sample i is sequence `first_sequence_id + i`. The front end uses no id twice."""
    eos_token_ids: list[int] = []
    """The checkpoint's end ids, empty with `ignore_eos`."""
    priority: int = 0
    """Lower runs first; ties by arrival."""
    cache_salt: str = ""
    """Prompts share KV only with prompts of the same salt."""
    bad_words: list[list[int]] = []
    """`params.bad_words` as token ids, every spelling of each."""
    output_token_ids: list[int] = []
    """Tokens that the only sample has already, from an engine that is gone: it continues after them as if it had
    sampled them here. They are not returned again. Only with `params.n` == 1 and without `prompt_logprobs`."""
    pooling: PoolingParams | None = None
    """The request pools its prompt instead of sampling: `params.n` is 1 and `max_tokens` 0."""
    lora: str = ""
    """Name of the adapter that it runs under; "": the base model."""
    pictures: list[PlacedPicture] = []
    """Pictures in the prompt, in order of their places, which do not overlap."""
    thinking: Thinking | None = None
    """`params.thinking_budget`, in token ids."""


class SequenceEnd(msgspec.Struct):
    """The end of one sequence. Its last token, if the step brought one, is in the columns."""

    sequence_id: int
    finish_reason: FinishReason
    stop_reason: int | None = None
    """The stop id; None for the checkpoint's end token."""
    error: str | None = None
    is_given_up: bool = False
    """Whether the engine itself ends, and aborts it for that alone: another engine may continue it."""


class PromptLogprobs(msgspec.Struct):
    """Log-probs of a prompt's P tokens, NaN for the first."""

    logprobs: np.ndarray
    """float32 [P]."""
    top_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    """(int32 [P, k], float32 [P, k]), the first row -1 and NaN; None if k is 0."""
    ranks: np.ndarray | None = None
    """int32 [P], of the prompt's own tokens: 1 for the most likely one, ties to the lowest id, 0 for the first. Model
    runners always give them."""


class Pooled(msgspec.Struct):
    """Result of a pooling request."""

    data: np.ndarray
    """float32, in a shape of `PoolingParams`."""
    kv_min_version: int
    """Oldest version among the KV that it attended."""


class EngineCoreOutputs(msgspec.Struct):
    """Outputs of one step: columns over the N sequences that gained a token, and the few that ended."""

    policy_version: int
    """Version that sampled all N tokens."""
    sequence_ids: list[int] = []
    """[N], `EngineCoreRequest.first_sequence_id` + sample index; each at most once."""
    token_ids: list[int] = []
    """[N]."""
    kv_min_versions: list[int] = []
    """[N], the oldest version among the KV that each token attended."""
    logprobs: list[float] | None = None
    """[N]; a column is None when no request of the step asked for it, and holds anything for those that did not."""
    kept_logprob_mass: list[float] | None = None
    """[N]."""
    top_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    """(int32 [N, K], float32 [N, K]) with K the largest k asked."""
    ended: list[SequenceEnd] = []
    """Ends, also of sequences without a token in this step: aborted or failed."""
    num_cached_tokens: dict[int, int] = {}
    """`first_sequence_id` -> prompt tokens found in the prefix cache: in the outputs of the request's first step, and
    perhaps again."""
    start_time: float = 0.0
    """When the step began, seconds on the system's monotonic clock: filled in by the caller of `EngineCore.step`."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """`first_sequence_id` -> log-probs of its prompt, with the first tokens of a request that asked for them."""
    sampled_ranks: np.ndarray | None = None
    """int32 [N], 1 for the most likely token; None when no request of the step asked for more than its log-prob."""
    id_logprobs: IdLogprobs | None = None
    """Values of the sequences that asked; None when none did."""
    pooled: dict[int, Pooled] = {}
    """Sequence id -> result of a pooling request; its end is in the same message, or with later outputs."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16 [N, L, k]: experts of the token before each; None when no request of the step asked."""
    prompt_routed_experts: dict[int, np.ndarray] = {}
    """`first_sequence_id` -> those of its prompt's tokens but the last, [P - 1, L, k], with the first tokens of a
    request that asked; perhaps again."""
    supports: SupportIds | None = None
    """Supports of the sequences that asked; None when none did."""
    entropies: np.ndarray | None = None
    """float32 [N], 0 for requests that did not ask; None when no request of the step asked."""
    hidden_states: np.ndarray | None = None
    """int16 (bits of bfloat16) or float32 [N, H], 0 for requests that did not ask; None when none of the step asked."""
    prompt_hidden_states: dict[int, np.ndarray] = {}
    """`first_sequence_id` -> [P, H] of its prompt's tokens, with the first tokens of a request that asked for all."""

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these of the N rows in every column. Lists and arrays are replaced, not changed."""
        for name in ("sequence_ids", "token_ids", "kv_min_versions", "logprobs", "kept_logprob_mass"):
            column = getattr(self, name)
            if column is not None:
                setattr(self, name, [column[row] for row in rows])
        if self.top_logprobs is not None:
            ids, values = self.top_logprobs
            self.top_logprobs = ids[rows], values[rows]
        if self.sampled_ranks is not None:
            self.sampled_ranks = self.sampled_ranks[rows]
        if self.routed_experts is not None:
            self.routed_experts = self.routed_experts[rows]
        if self.entropies is not None:
            self.entropies = self.entropies[rows]
        if self.hidden_states is not None:
            self.hidden_states = self.hidden_states[rows]
        if self.id_logprobs is not None:
            self.id_logprobs = self.id_logprobs.keep(self.sequence_ids)
        if self.supports is not None:
            self.supports = self.supports.keep(self.sequence_ids)


class NewSequence(msgspec.Struct):
    """The full state of a sequence that is new to the runner, or returns after preemption."""

    sequence_id: int
    token_ids: list[int]
    """Prompt and tokens sampled so far. The list is the runner's own: it appends the tokens that it samples."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """This sequence's own seed."""
    eos_token_ids: list[int] = []
    bad_words: list[list[int]] = []
    """Token ids of which the last must not complete the rest."""
    pooling: PoolingParams | None = None
    """Its prompt is pooled, and nothing sampled."""
    adapter_slot: int = -1
    """The runner's slot of its adapter; -1: it runs under the base model."""
    pictures: list[PlacedPicture] = []
    """Pictures in its prompt, in order."""
    thinking: Thinking | None = None
    """Its budget of thinking, by which some tokens are forced."""


class StateMove(msgspec.Struct, gc=False):
    """Slots of a pool of states that one row of a step reads and writes. Only for models whose layers keep states.

    No slot is written by two rows of a step, or written by one and read by another; a row may write the slot it reads.
    """

    source: int
    """Slot with the state before the first scheduled token; -1: the row begins with zeros."""
    slot: int
    """Slot written behind the last scheduled token. The runner reads and writes it in place from then on."""
    others: list[tuple[int, int]] = []
    """(n, slot), rising in n: also written, behind the first n scheduled tokens; 1 <= n < all of them."""


class ScheduledSequence(msgspec.Struct, gc=False):
    """Work of one sequence in one step: compute `num_scheduled_tokens` tokens from `num_computed_tokens` on."""

    sequence_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: list[int]
    """Block table entries from `first_block` on: those that the runner does not have yet, or that have changed."""
    first_block: int = 0
    draft_token_ids: list[int] = []
    """Guesses at the next tokens, the last of the scheduled ones: a token is drawn behind each, and those up to the
    first that differs from its guess are kept."""
    state: StateMove | None = None
    """None: its state is read and written in place, in the slot that the runner has for it, also by a row of several
    tokens; or the model keeps none."""


class SampleTask(msgspec.Struct, gc=False):
    """Draw one token for `sequence_id` from the logits of the last scheduled token of `scheduled[row]`.

    Several tasks share a row when the prompt of n samples has just been computed.
    """

    sequence_id: int
    row: int


class KVSave(msgspec.Struct, gc=False):
    """Hand the bytes of a KV block, or of a slot of states, to the KV connector under a key."""

    place: int
    """Number of the block, or of the slot."""
    key: bytes
    """32 bytes, as `core.tier_keys` makes them."""
    is_state: bool = False


class KVLoad(msgspec.Struct, gc=False):
    """Fill a KV block, or a slot of states, with bytes that the KV connector has given."""

    place: int
    """Number of the block, or of the slot."""
    data: memoryview
    """As many bytes as a block, or a slot, has; verified, and in host memory."""
    is_state: bool = False


class SchedulerOutput(msgspec.Struct):
    """The work of one step, in this order: drop `finished_sequence_ids`, add `new`, save KV, load KV, copy blocks,
    compute, sample."""

    step: int
    policy_version: int
    finished_sequence_ids: list[int]
    """Sequences whose state the runner releases (ended or preempted)."""
    new: list[NewSequence]
    block_copies: list[tuple[int, int]]
    """(source, destination) block ids, whole blocks, copied before anything is computed."""
    scheduled: list[ScheduledSequence]
    samples: list[SampleTask]
    kv_saves: list[KVSave] = []
    """Blocks and slots that earlier steps filled: read before anything is written, each at most once."""
    kv_loads: list[KVLoad] = []
    """Blocks and slots that this step reads, written before `block_copies`; each at most once."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of all `scheduled` sequences."""
        return sum(s.num_scheduled_tokens for s in self.scheduled)


class ModelRunnerOutput(msgspec.Struct):
    """The tokens of each `SchedulerOutput.samples` entry, in order, as columns: one each, more behind right drafts."""

    token_ids: list[int]
    logprobs: list[float] | None
    """In each request's own mode; None when no request of the step asked."""
    kept_logprob_mass: list[float] | None = None
    """Log of the kept mass; 0.0 for requests without truncation. None when no request of the step truncates."""
    top_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    """(int32 [N, K], float32 [N, K]) with K the largest k asked; None if no request of the step asked."""
    errors: dict[int, str] = {}
    """Sample index -> why that sequence cannot continue (for example NaN logits); its token id is -1."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """Index into `SchedulerOutput.scheduled` -> log-probs of that prompt, in the step that completes it."""
    sampled_ranks: np.ndarray | None = None
    """int32 [N], 1 for the most likely token, 0 for requests that did not ask; None if none asked."""
    id_logprobs: dict[int, np.ndarray] = {}
    """Sample index -> float32 log-probs of the ids that its request asked for, all of the vocabulary's included."""
    num_drawn: list[int] | None = None
    """Tokens of each sample: they stand end to end in all columns, and a "sample index" counts them. None: one each."""
    pooled: dict[int, np.ndarray] = {}
    """Index into `SchedulerOutput.scheduled` -> float32 result of a pooling request, in the step that completes it."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16 [N, L, k]: experts of the token behind which each was drawn; None if no request asked."""
    prompt_routed_experts: dict[int, np.ndarray] = {}
    """Index into `SchedulerOutput.scheduled` -> those of the tokens before, in the step that completes a prompt."""
    num_encoded_pictures: int = 0
    """Pictures that the step encoded."""
    supports: dict[int, np.ndarray] = {}
    """Sample index -> int32 ids that its draw had left, ascending; none for the whole vocabulary. Only if asked for."""
    entropies: np.ndarray | None = None
    """float32 [N], nats, of the tempered distribution; 0 for requests that did not ask, None if none asked."""
    hidden_states: np.ndarray | None = None
    """int16 (bits of bfloat16) or float32 [N, H]: the state behind the final norm that each was drawn from; 0 for
    requests that did not ask, None if none asked."""
    prompt_hidden_states: dict[int, np.ndarray] = {}
    """Index into `SchedulerOutput.scheduled` -> [P, H] of that prompt's tokens, in the step that completes it."""


UpdateMode = Literal["keep", "wait", "abort"]
"""Treatment of requests in flight at a weight update: continue under the new weights, finish first, or end now."""
KvMode = Literal["keep", "recompute"]
"""Treatment of their KV: keep it, or compute it again."""
Staging = Literal["auto", "shadow", "inplace"]


class UpdateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a weight update is carried out: the arguments of `update_weights`, which explains them."""

    mode: UpdateMode = "keep"
    kv: KvMode = "keep"
    staging: Staging = "auto"
    reset_version: bool = False
    allow_nonfinite: bool = False
    timeout: float = 300.0
    """Seconds."""
    transport: str | None = None
    """None: the engine's own choice."""
    partial: bool = False
    delta: bool = True
    draft: bool = False
    """The weights are the draft model's."""

    @classmethod
    def from_values(cls, **values: Any) -> "UpdateOptions":
        """Check types and values. Raises `WeightUpdateError` naming the option that is not allowed."""
        values, defaults = plain(values), cls()
        for name, kind in (("mode", UpdateMode), ("kv", KvMode), ("staging", Staging)):
            if name in values and values[name] not in get_args(kind):
                raise WeightUpdateError(refused(name, values[name], f"one of {', '.join(map(repr, get_args(kind)))}"))
        for name, value in values.items():
            if isinstance(getattr(defaults, name, None), bool) and not isinstance(value, bool):
                raise WeightUpdateError(refused(name, value, "True or False"))
        timeout = values.get("timeout", defaults.timeout)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 1e6:
            raise WeightUpdateError(refused("timeout", timeout, "seconds in (0, 1e6]"))
        try:
            options = msgspec.convert(values, cls)
        except msgspec.ValidationError as problem:
            raise WeightUpdateError(f"update_weights: {problem}.") from None
        for name in ("mode", "kv") if options.draft else ():
            if getattr(options, name) != "keep":
                what = f"{name}={getattr(options, name)!r} does not go with draft=True"
                raise WeightUpdateError(f"update_weights: {what}: requests go on as they are. Leave {name} out.")
        return options
