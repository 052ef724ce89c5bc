"""A request and its sequences, as a simulated engine has them."""

from rollout_engine.capacity.prefixes import Prefix, PrefixPool


class EngineSequence:
    """One sample. `num_sampled` and `num_own` are brought up to date when it leaves the batch."""

    __slots__ = (
        "ends_at",
        "has_kv",
        "is_leading",
        "is_over",
        "is_parked",
        "joined_at",
        "length",
        "num_computed",
        "num_own",
        "num_prompt",
        "num_sampled",
        "num_taken_over",
        "order",
        "request",
        "sequence_id",
    )

    def __init__(self, request: "EngineRequest", sequence_id: int, length: int, num_sampled: int) -> None:
        self.request, self.sequence_id = request, sequence_id
        self.length = length
        """Sampled tokens at its end."""
        self.num_prompt = request.num_prompt
        self.num_sampled = self.num_taken_over = num_sampled
        """`num_taken_over`: those that it brought, from an engine that has ended."""
        self.num_computed = 0
        """Tokens whose KV is computed, while it prefills."""
        self.num_own = 0
        """KV tokens that it alone holds."""
        self.order = (0, 0)
        self.joined_at = self.ends_at = -1
        """The engine's count of steps when it began to decode, and when it will end."""
        self.is_parked = self.is_over = self.is_leading = False
        """Stands on a prompt that a sibling has computed; has ended; computes the prompt for its siblings."""
        self.has_kv = False
        """It is one of its request's holders."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.num_prompt + self.num_sampled


class EngineRequest:
    """A prompt, its samples, and the prefixes that they stand on together."""

    __slots__ = ("is_forked", "keys", "num_holders", "num_prompt", "prefixes", "sequences", "sizes")

    def __init__(self, num_prompt: int, prefixes: list[tuple[object, int]]) -> None:
        """`prefixes`: (key, tokens) of consecutive parts of the prompt, full blocks, that others may share."""
        self.num_prompt = num_prompt
        self.keys = [key for key, num_tokens in prefixes if num_tokens]
        self.sizes = [num_tokens for _, num_tokens in prefixes if num_tokens]
        self.prefixes: list[Prefix] = []
        """Those that are held now: the first of `keys`, in order."""
        self.sequences: list[EngineSequence] = []
        self.num_holders = 0
        """Sequences with KV."""
        self.is_forked = False
        """The prompt is computed."""

    def hold(self, pool: PrefixPool) -> None:
        """Count one more sequence that stands on the prefixes, those that are found."""
        self.num_holders += 1
        while len(self.prefixes) < len(self.keys):
            found = pool.find(self.keys[len(self.prefixes)])
            if found is None:
                break
            self.prefixes.append(found)

    def first_missing(self, pool: PrefixPool) -> object | None:
        """The key of its first prefix that is not known; None if all are."""
        keys = zip(self.keys, self.sizes, strict=True)
        return next((key for key, num_tokens in keys if pool.lacks(key, num_tokens)), None)

    def release(self, pool: PrefixPool) -> None:
        """Count one less; with the last one the prefixes are let go."""
        self.num_holders -= 1
        if not self.num_holders:
            for prefix in reversed(self.prefixes):
                pool.release(prefix)
            self.prefixes = []

    def publish(self, pool: PrefixPool, sequence: EngineSequence) -> None:
        """Share the computed part of the sequence's prefixes; its own KV is the rest."""
        for key, size in zip(self.keys[len(self.prefixes) :], self.sizes[len(self.prefixes) :], strict=True):
            self.prefixes.append(pool.publish(key, size))
            pool.num_held += size
        sequence.num_own = sequence.num_tokens - self.num_held
        pool.num_held += sequence.num_own

    @property
    def num_held(self) -> int:
        """KV tokens that its sequences hold together."""
        return sum(prefix.num_tokens for prefix in self.prefixes)
