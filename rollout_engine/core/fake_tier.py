"""A KV connector of tests: a dict, which may forget, miss, give too little, or take its time."""

import random
import struct
from collections.abc import Callable
from collections.abc import Sequence as Items

from rollout_engine.base.messages import KVLoad, KVSave
from rollout_engine.base.metrics import KVTierStats
from rollout_engine.core.fake_states import FakeKVError, FakeState, FakeStates

Place = tuple[int, int]
"""(block, offset)."""
_SLOT = struct.Struct("<Q?")


class FakeStore:
    """Satisfies `tier.Store`. Several cores may share the `held` of one.

    Args:
        misses: the share of loads of held blocks that find nothing.
        lies: the share of loads that give bytes of a wrong length.
        forgets: the share of saves behind which some held block is forgotten.
        waits: how often a wait for fetched keys returns that it is not over, at most.
    """

    def __init__(
        self,
        held: dict[bytes, bytes] | None = None,
        *,
        misses: float = 0.0,
        lies: float = 0.0,
        forgets: float = 0.0,
        waits: int = 0,
        seed: int = 0,
    ) -> None:
        self.held = {} if held is None else held
        self.stats = KVTierStats()
        self.num_fetched = 0
        """Keys that were fetched."""
        self._misses, self._lies, self._forgets, self._waits = misses, lies, forgets, waits
        self._random = random.Random(seed)

    def fetch(self, keys: Items[bytes]) -> Callable[[float], bool] | None:
        """Count the keys; returns a wait that is over when it was asked some times."""
        self.num_fetched += len(keys)
        if not self._waits:
            return None
        left = [self._random.randint(0, self._waits)]

        def is_over(seconds: float) -> bool:
            left[0] -= 1
            return left[0] < 0

        return is_over

    def load(self, key: bytes) -> memoryview | None:
        """The bytes of a key, or of a lie."""
        data = self.held.get(key)
        if data is None or self._random.random() < self._misses:
            return None
        return memoryview(data[:-1] if self._random.random() < self._lies else data)

    def save(self, key: bytes, data: bytes) -> None:
        """Hold bytes under a key."""
        self.held[key] = data
        if self._random.random() < self._forgets:
            del self.held[self._random.choice(list(self.held))]

    def holds(self, key: bytes) -> bool:
        """Whether a key is held; `load` may miss it still."""
        return key in self.held

    def drop(self, keys: Items[bytes]) -> None:
        """Forget these."""
        for key in keys:
            self.held.pop(key, None)

    def reset(self) -> None:
        """Forget everything."""
        self.held.clear()

    def count_held(self) -> tuple[int, int]:
        """Blocks and states held, and their bytes."""
        return len(self.held), sum(map(len, self.held.values()))


class FakeTransfer:
    """Moves blocks and states between the fake model's pool and a `FakeStore`, which tests set."""

    def __init__(
        self, block_size: int, slots: dict[Place, tuple[int, int]], routed: set[Place], states: FakeStates
    ) -> None:
        self.store: FakeStore | None = None
        self.weights_serial = 0
        """Number of the live weights: tests raise it in place of an update."""
        self._block_size, self._slots, self._routed, self._states = block_size, slots, routed, states
        self._serials: dict[int, int] = {}
        """Block -> number of the weights that wrote it last."""

    def note_write(self, block: int) -> None:
        """Note that a block was written under the live weights."""
        self._serials[block] = self.weights_serial

    def save(self, saves: Items[KVSave]) -> None:
        """Give blocks and states to the store. Raises `FakeKVError` for a block that was not filled."""
        for save in saves:
            assert self.store is not None, "KV is saved, and there is no connector"
            if save.is_state:
                self.store.save(save.key, pack_slots([(self._states.peek(save.place), False)], self.weights_serial))
                continue
            places = [(save.place, offset) for offset in range(self._block_size)]
            if any(place not in self._slots for place in places):
                raise FakeKVError(f"block {save.place} is saved, and was not filled")
            found = [(self._slots[place][0], place in self._routed) for place in places]
            self.store.save(save.key, pack_slots(found, self._serials[save.place]))

    def load(self, loads: Items[KVLoad], version: int) -> None:
        """Fill blocks and slots. Raises `FakeKVError` for KV of other weights than the live ones."""
        for load in loads:
            serial, found = int.from_bytes(load.data[:8], "little"), list(_SLOT.iter_unpack(load.data[8:]))
            if load.is_state:
                self._states.put(load.place, FakeState(found[0][0], version))
                continue
            if serial != self.weights_serial:
                raise FakeKVError(f"block {load.place} is loaded with KV of the weights {serial}")
            self._serials[load.place] = serial
            for offset, (digest, is_routed) in enumerate(found):
                place = load.place, offset
                self._slots[place] = digest, version
                (self._routed.add if is_routed else self._routed.discard)(place)


def num_slot_bytes(num_slots: int) -> int:
    """Bytes of this number of tokens in a `FakeStore`; of one, for a state."""
    return 8 + _SLOT.size * num_slots


def pack_slots(slots: Items[tuple[int, bool]], serial: int) -> bytes:
    """Bytes of (digest, whether its routing was recorded) of each token, and of the number of the weights."""
    return serial.to_bytes(8, "little") + b"".join(_SLOT.pack(*slot) for slot in slots)
