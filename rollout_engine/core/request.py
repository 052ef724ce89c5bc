"""A request in the core, and its n sequences."""

from dataclasses import dataclass, field

from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.outputs import FinishReason
from rollout_engine.base.pooling_params import PoolingParams
from rollout_engine.base.seeds import child_seed
from rollout_engine.core.adapters import Adapter
from rollout_engine.core.drafts import Draft
from rollout_engine.core.picture_keys import picture_identities
from rollout_engine.core.prefix_cache import PrefixBlock


class Request:
    """One prompt and its n sequences.

    Until the prompt is computed only one sequence exists for the scheduler: the leader, the first that has not ended.
    """

    __slots__ = (
        *("adapter", "end_token_ids", "forked", "num_cached_tokens"),
        *("num_live", "picture_identities", "prompt_keys", "sequences", "source"),
    )

    def __init__(
        self,
        source: EngineCoreRequest,
        arrival: int,
        adapter: Adapter | None = None,
        prompt_keys: list[int] | None = None,
    ) -> None:
        self.source, self.adapter = source, adapter
        self.prompt_keys = prompt_keys
        """Numbers that identify the prompt's tokens in KV blocks, as `PictureKeys` makes them for prompts with
        pictures; None: their ids do."""
        self.picture_identities = {} if prompt_keys is None else picture_identities(source, prompt_keys)
        """Number of a picture in these keys -> 16 bytes that identify it in every engine."""
        self.end_token_ids = frozenset([*source.eos_token_ids, *(source.params.stop_token_ids or ())])
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when the request was first scheduled; None before that."""
        self.forked = False
        """The prompt was computed and every sequence has its own block table."""
        self.num_live = source.params.n
        prompt, output = source.prompt_token_ids, source.output_token_ids
        token_ids = prompt + output if output else prompt
        self.sequences = [
            Sequence(
                request=self,
                sequence_id=source.first_sequence_id + index,
                order=(source.priority, arrival, index),
                seed=child_seed(source.seed, index),
                num_prompt_tokens=len(source.prompt_token_ids),
                max_num_tokens=len(source.prompt_token_ids) + source.max_tokens,
                token_ids=token_ids,
                num_lost_tokens=len(token_ids) - 1 if output else 0,
            )
            for index in range(source.params.n)
        ]

    @property
    def kv_space(self) -> int:
        """Number of the requests that it may share KV with: under the same adapter, and with routing kept or not."""
        serial = 0 if self.adapter is None else self.adapter.serial
        return 2 * serial + self.source.params.return_routed_experts

    def put_keys(self, token_ids: list[int], start: int) -> list[int]:
        """Numbers that identify these tokens of a sequence, from position `start` on, if the prompt has keys."""
        keys = self.prompt_keys or []
        return keys[start : start + len(token_ids)] + token_ids[max(len(keys) - start, 0) :]

    @property
    def live_sequences(self) -> list["Sequence"]:
        """Sequences that have not ended, in order."""
        return [sequence for sequence in self.sequences if not sequence.ended]

    @property
    def leader(self) -> "Sequence":
        """The sequence that computes the prompt for all."""
        return next(sequence for sequence in self.sequences if not sequence.ended)


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One sample of a request: its tokens, and the KV blocks of those computed so far.

    tokens   |0 ........ num_computed_tokens ........ num_tokens|
    KV       |  in block_ids                |  to catch up      |

    Steps in flight count as done: their tokens are computed, a token that they sample has no known id yet.
    """

    request: Request
    sequence_id: int
    order: tuple[int, int, int]
    """(priority, arrival, index), unique: the smallest is scheduled first."""
    seed: int
    num_prompt_tokens: int
    max_num_tokens: int
    token_ids: list[int]
    """Prompt and sampled tokens. The prompt's own list until the first token is appended."""
    num_pending_tokens: int = 0
    """Tokens that steps in flight sample: they follow those in `token_ids`."""
    num_computed_tokens: int = 0
    num_lost_tokens: int = 0
    """Tokens from the start on whose KV was computed once, and then given up, or lost with another engine."""
    block_ids: list[int] = field(default_factory=list)
    num_writable_tokens: int = 0
    """Positions from num_computed_tokens up to here have a block of their own, and the state has a slot of its own."""
    num_sent_blocks: int = 0
    """Entries of the block table that the runner has."""
    prefix: list[PrefixBlock] = field(default_factory=list)
    """Identities of the first full blocks, as far as they were published or looked up."""
    looked_up_in_vain: bytes = b""
    """Hash of the first block that was not known, until this sequence has computed it; b"" if there is none."""
    kv_min_version: int | None = None
    """Oldest policy version among the computed KV; None when there is none."""
    queue: "list[Sequence] | None" = None
    """The scheduler's queue it stands in; None before the fork and after the end."""
    in_runner: bool = False
    """The runner has (or may have) state of it."""
    ended: bool = False
    draft: Draft | None = None
    """The source of its drafts; None before it has had any."""
    state_slot: int = -1
    """Slot of the state behind `num_computed_tokens`; -1 if there is none."""
    sent_state_slot: int = -1
    """The slot that the runner has for it."""
    state_writes: tuple[tuple[int, int], ...] = ()
    """(position, slot) of further states that steps in flight write: snapshots, and those behind drafted tokens."""

    def __lt__(self, other: "Sequence") -> bool:
        return self.order < other.order

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens, pending ones included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def awaits_last_token(self) -> bool:
        """Whether a step in flight samples the last token that `max_tokens` allows."""
        return self.num_pending_tokens > 0 and self.num_tokens >= self.max_num_tokens

    @property
    def decodes_in_place(self) -> bool:
        """Whether it computes its last token next, in a block of its own, and the runner has all that it needs."""
        num_tokens = len(self.token_ids) + self.num_pending_tokens
        return (
            self.num_computed_tokens + 1 == num_tokens <= self.num_writable_tokens
            and num_tokens < self.max_num_tokens
            and self.num_sent_blocks == len(self.block_ids)
            and self.in_runner
            and self.request.forked
        )

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probs of the prompt are still to be computed."""
        asked = self.request.source.params.prompt_logprobs is not None
        return asked and self.num_tokens == self.num_prompt_tokens

    @property
    def returns_prompt(self) -> bool:
        """Whether something of each prompt token is still to be returned: the prefix cache must not skip any of it."""
        asks = self.request.source.params.return_hidden_states == "all" and self.num_tokens == self.num_prompt_tokens
        return asks or self.scores_prompt

    @property
    def pooling(self) -> PoolingParams | None:
        """Settings of a request that pools its prompt; None for a sequence that samples."""
        return self.request.source.pooling

    def append(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Append the id of the first pending token. Returns (finish_reason, stop_reason) if it ends the sequence."""
        self.num_pending_tokens -= 1
        token_ids = self.token_ids
        if len(token_ids) == self.num_prompt_tokens:
            self.token_ids = token_ids = token_ids.copy()
        token_ids.append(token_id)
        if token_id in self.request.end_token_ids:
            source = self.request.source
            if len(token_ids) - self.num_prompt_tokens >= source.params.min_tokens:
                return "stop", None if token_id in source.eos_token_ids else token_id
        return ("length", None) if len(token_ids) >= self.max_num_tokens else None

    def append_drafted(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Append the id of a further token of the same step: the one before it was drafted, and its KV is computed."""
        self.num_pending_tokens += 1
        self.num_computed_tokens += 1
        return self.append(token_id)
