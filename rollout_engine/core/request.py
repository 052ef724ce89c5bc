"""What the core keeps of a request, and of each of its n sequences."""

from rollout_engine.core.prefix_cache import PrefixBlock
from rollout_engine.messages import EngineCoreRequest
from rollout_engine.outputs import FinishReason
from rollout_engine.seeds import child_seed


class Request:
    """One prompt and its n sequences.

    Until the prompt is computed only one sequence exists for the scheduler: the leader, the first that has not ended.
    """

    __slots__ = ("end_token_ids", "forked", "num_cached_tokens", "num_live", "sequences", "source")

    def __init__(self, source: EngineCoreRequest, arrival: int) -> None:
        self.source = source
        self.end_token_ids = frozenset([*source.eos_token_ids, *(source.params.stop_token_ids or ())])
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at first sight; None before that."""
        self.forked = False
        """The prompt was computed and every sequence has its own block table."""
        self.num_live = source.params.n
        self.sequences = [Sequence(self, index, arrival) for index in range(source.params.n)]

    @property
    def live_sequences(self) -> list["Sequence"]:
        """Those that have not ended, in index order."""
        return [sequence for sequence in self.sequences if not sequence.ended]

    @property
    def leader(self) -> "Sequence":
        """The sequence that computes the prompt for all."""
        return next(sequence for sequence in self.sequences if not sequence.ended)


class Sequence:
    """One sample of a request: its tokens, and the KV blocks of those computed so far.

    tokens   |0 ........ num_computed_tokens ........ num_tokens|
    KV       |  in block_ids                |  to catch up      |

    Steps in flight count as done: what they compute is computed, what they draw is a token whose id is not known yet.
    """

    __slots__ = (
        "block_ids",
        "ended",
        "in_runner",
        "index",
        "kv_min_version",
        "max_num_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_sent_blocks",
        "num_writable_tokens",
        "order",
        "prefix",
        "queue",
        "request",
        "seed",
        "sequence_id",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, arrival: int) -> None:
        source = request.source
        self.request = request
        self.index = index
        self.sequence_id = source.first_sequence + index
        self.order = (source.priority, arrival, index)
        """Who goes first; unique."""
        self.seed = child_seed(source.seed, index)
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + source.max_tokens
        self.token_ids = source.prompt_token_ids
        """Prompt and sampled tokens. The prompt's own list until the first token is appended."""
        self.num_pending_tokens = 0
        """Tokens that steps in flight draw: they follow those in `token_ids`."""
        self.num_computed_tokens = 0
        self.num_lost_tokens = 0
        """Tokens from the start on whose KV was computed once, and then given up."""
        self.block_ids: list[int] = []
        self.num_writable_tokens = 0
        """Positions from num_computed_tokens up to here have a block of their own."""
        self.num_sent_blocks = 0
        """How much of the block table the runner knows."""
        self.prefix: list[PrefixBlock] = []
        """What the first full blocks are, as far as the prefix cache has been told or asked."""
        self.kv_min_version: int | None = None
        """Oldest policy version among the computed KV; None when there is none."""
        self.queue: list[Sequence] | None = None
        """The scheduler's queue it stands in; None before the fork and after the end."""
        self.in_runner = False
        """The runner has (or may have) state of it."""
        self.ended = False

    def __lt__(self, other: "Sequence") -> bool:
        return self.order < other.order

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens, pending ones included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def awaits_its_last(self) -> bool:
        """Whether a step in flight draws the last token that `max_tokens` allows."""
        return self.num_pending_tokens > 0 and self.num_tokens >= self.max_num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probs of its prompt are still to be told: then every token of it is computed."""
        asked = self.request.source.params.prompt_logprobs is not None
        return asked and self.num_tokens == self.num_prompt_tokens

    def append(self, token_id: int) -> bool:
        """The first pending token is known now; whether it is the last one."""
        self.num_pending_tokens -= 1
        if len(self.token_ids) == self.num_prompt_tokens:
            self.token_ids = self.token_ids.copy()
        self.token_ids.append(token_id)
        return len(self.token_ids) >= self.max_num_tokens or self._is_stopped_by(token_id)

    def finish(self) -> tuple[FinishReason, int | None]:
        """(finish_reason, stop_reason) that the last sampled token brings about."""
        token_id = self.token_ids[-1]
        if not self._is_stopped_by(token_id):
            return "length", None
        return "stop", None if token_id in self.request.source.eos_token_ids else token_id

    def _is_stopped_by(self, token_id: int) -> bool:
        request = self.request
        return token_id in request.end_token_ids and self.num_output_tokens >= request.source.params.min_tokens
