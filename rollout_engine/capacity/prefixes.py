"""Counts the tokens of an engine's KV pool: those of live requests, and the prefixes that others have left behind."""

from collections import OrderedDict


class Prefix:
    """Full blocks of a prompt, or of the part that all prompts share."""

    __slots__ = ("key", "num_holders", "num_tokens")

    def __init__(self, key: object, num_tokens: int) -> None:
        self.key, self.num_tokens = key, num_tokens
        self.num_holders = 1
        """Requests with a sequence in the batch that stand on it."""


class PrefixPool:
    """Tokens of a KV pool. Those that no live sequence holds may keep known prefixes; the oldest are dropped first."""

    def __init__(self, num_tokens: int, *, enabled: bool) -> None:
        self.num_tokens = num_tokens
        self.num_held = 0
        self._enabled = enabled
        self._known: dict[object, Prefix] = {}
        self._idle: OrderedDict[object, int] = OrderedDict()
        """Key -> tokens of prefixes without a holder, and of ended outputs, which are never found; oldest first."""
        self._num_idle = 0

    def find(self, key: object) -> Prefix | None:
        """The known prefix of that key, held from now on; None: it has to be computed."""
        self._make_room()
        found = self._known.get(key)
        if found is None:
            return None
        if not found.num_holders:
            self._num_idle -= self._idle.pop(key)
            self.num_held += found.num_tokens
        found.num_holders += 1
        return found

    def lacks(self, key: object, num_tokens: int) -> bool:
        """Whether a prefix of `num_tokens` would be known under that key, but is not."""
        return self._enabled and num_tokens > 0 and key not in self._known

    def publish(self, key: object, num_tokens: int) -> Prefix:
        """Count tokens, which the caller holds already, as the prefix of that key; the first one of a key is found."""
        prefix = Prefix(key, num_tokens)
        if self._enabled and num_tokens:
            self._known.setdefault(key, prefix)
        return prefix

    def release(self, prefix: Prefix) -> None:
        """Hold a prefix no longer. It stays as long as there is room, unless it is not known any more."""
        prefix.num_holders -= 1
        if prefix.num_holders:
            return
        self.num_held -= prefix.num_tokens
        if self._known.get(prefix.key) is prefix:
            self._keep(prefix.key, prefix.num_tokens)

    def leave(self, owner: object, num_tokens: int) -> None:
        """Leave the full blocks of an ended output behind: they take room until they are overwritten."""
        if self._enabled and num_tokens:
            self._keep(owner, num_tokens)

    def forget(self) -> None:
        """Forget all prefixes: those of another version are never found."""
        self._known.clear()
        self._idle.clear()
        self._num_idle = 0

    def _keep(self, key: object, num_tokens: int) -> None:
        self._idle[key] = num_tokens
        self._num_idle += num_tokens
        self._make_room()

    def _make_room(self) -> None:
        while self._idle and self.num_held + self._num_idle > self.num_tokens:
            key, num_tokens = self._idle.popitem(last=False)
            self._num_idle -= num_tokens
            self._known.pop(key, None)
