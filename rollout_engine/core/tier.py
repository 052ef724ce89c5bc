"""The tier: a second, larger prefix cache outside of the pool, which a KV connector holds. Nothing but hits and misses.

    request arrives ──> fetch its keys, concurrently with steps          (`prepare`)
    admitted to run ──> load blocks behind the known prefix              (`load_prefix`)   kv_loads of the same step
    block published ──> note it, if the tier lacks it                    (`note_block`)    kv_saves of the next step

A step carries saves out first. A block is written again only by a step that is scheduled after it was published, so
that its save, which was noted then, is earlier. Steps that failed or were rolled back take their saves with
them: the blocks that these name may have been written since.

While the digest of the live weights is not known, no key can be made: nothing is loaded or saved.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

from rollout_engine.base.messages import KVLoad, KVSave, SchedulerOutput
from rollout_engine.base.metrics import KVTierStats
from rollout_engine.core.prefix_cache import PrefixBlock
from rollout_engine.core.request import Request, Sequence
from rollout_engine.core.request_table import Preparation
from rollout_engine.core.tier_keys import block_key, root_key, state_key

Rows = list[tuple[int, PrefixBlock]]
"""Consecutive full blocks of a sequence: the number of one that is known here, or -1, and its identity."""
MAX_STEP_BYTES = 256 << 20
"""Loads of a step from which on it admits no further sequence, so that those that run need not wait for long."""
_NUM_DROPS = 3
"""How often keys are dropped, a step apart: steps in flight may save some of them meanwhile."""


class Store(Protocol):
    """A KV connector as the core uses it. No method raises; each is quick, but for the wait that `fetch` returns."""

    stats: KVTierStats
    """Counters of failures and seconds; the tier counts the rest in it."""

    def fetch(self, keys: Items[bytes]) -> Callable[[float], bool] | None:
        """Begin to bring these near. Returns a wait of up to `seconds` for it; None: there is nothing to wait for."""
        ...

    def load(self, key: bytes) -> memoryview | None:
        """The bytes of a key, verified and in host memory; None if it is not held."""
        ...

    def holds(self, key: bytes) -> bool:
        """Whether `load` would return bytes, as far as that is known."""
        ...

    def drop(self, keys: Items[bytes]) -> None:
        """Forget these."""

    def reset(self) -> None:
        """Forget everything."""

    def count_held(self) -> tuple[int, int]:
        """Blocks and states held, and their bytes."""
        ...


class Tables(Protocol):
    """The block tables, as a tier fills them."""

    block_size: int

    @property
    def keeps_states(self) -> bool:
        """Whether a prefix is known only up to a state."""
        ...

    def next_blocks(self, sequence: Sequence, num_blocks: int) -> Rows:
        """The full blocks of a sequence behind its known ones, up to `num_blocks` of all."""
        ...

    def splits_picture(self, sequence: Sequence, num_blocks: int) -> bool:
        """Whether this number of blocks of a sequence ends inside a picture that must be computed as a whole."""
        ...

    def attach_found(self, sequence: Sequence, found: Rows) -> list[int]:
        """Append these to the sequence's known blocks; returns the numbers of those that are new here, to be filled."""
        ...

    def attach_state(self, sequence: Sequence) -> int:
        """Give a sequence a slot for the state behind its known blocks; returns the slot, to be filled."""
        ...


class Tier:
    """Looks blocks up in a store and notes those to be saved there, for one core.

    Args:
        block_bytes, state_bytes: lengths of the bytes of a block, and of a slot of states.
        weights: gives the digest of the live weights; None while it is not known.
        save_now: has the model runner save blocks at once, while no step is in flight.
    """

    def __init__(
        self,
        store: Store,
        *,
        block_bytes: int,
        state_bytes: int = 0,
        weights: Callable[[], str | None],
        save_now: Callable[[list[KVSave]], None],
    ) -> None:
        self._store, self._weights, self._save_now = store, weights, save_now
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        self.stats = store.stats
        self._known_weights: str | None = None
        self._serial = 0
        """Number of the weights and of the store's contents, for which keys and notes of saved blocks hold."""
        self._saves: dict[tuple[int, bool], bytes] = {}
        """(block or slot, whether it is a slot) -> key, noted for the next step."""
        self._loads: list[KVLoad] = []
        """Loads of the step that is being scheduled."""
        self._num_load_bytes = 0
        """Bytes of these."""
        self._drops: list[tuple[int, list[bytes]]] = []
        """Keys to be dropped again, and how often."""

    @property
    def num_held(self) -> tuple[int, int]:
        """Blocks and states that the store holds, and their bytes."""
        return self._store.count_held()

    @property
    def num_noted(self) -> int:
        """Blocks and states that wait to be saved."""
        return len(self._saves)

    @property
    def has_loaded_enough(self) -> bool:
        """Whether the step that is being scheduled has as many loads as one should."""
        return self._num_load_bytes >= MAX_STEP_BYTES

    def prepare(self, tables: Tables, request: Request, other: Preparation | None) -> Preparation | None:
        """Begin to fetch the prefix of a new request, as far as it is not known here.

        Returns a wait for that and for `other`; None if there is nothing to wait for.
        """
        if self._is_off():
            return other
        leader = request.leader
        rows = tables.next_blocks(leader, _end_of(leader, tables.block_size))
        count = self._count_available(tables, leader, rows)
        keys = [self._key_of(identity, request) for block, identity in rows[:count] if block < 0]
        if count and tables.keeps_states:
            keys.append(state_key(self._key_of(rows[count - 1][1], request)))
        wait = self._store.fetch(keys) if keys else None
        if wait is None or other is None:
            return wait or other
        return lambda seconds: other(seconds) and wait(seconds)

    def load_prefix(self, tables: Tables, sequence: Sequence) -> None:
        """Extend the known prefix of a sequence that was just admitted by the blocks that the store holds behind it.

        Others find these blocks from now on: the step that is being scheduled fills them first.
        """
        if self._is_off():
            return
        request, has_states = sequence.request, tables.keeps_states
        rows = tables.next_blocks(sequence, _end_of(sequence, tables.block_size))
        count = self._count_available(tables, sequence, rows)
        self.stats.num_missed += count < len(rows)
        found: Rows = []
        loaded: list[memoryview] = []
        for block, identity in rows[:count]:
            if block < 0:
                data = self._load(self._key_of(identity, request), self._block_bytes)
                if data is None:
                    break
                loaded.append(data)
            found.append((block, identity))
        while len(found) < count and found and tables.splits_picture(sequence, len(sequence.prefix) + len(found)):
            if found.pop()[0] < 0:
                loaded.pop()
        state = None
        if has_states:
            if len(found) < count or not count:
                return
            state = self._load(state_key(self._key_of(found[-1][1], request)), self._state_bytes)
            if state is None:
                return
        elif not loaded:
            return
        blocks = tables.attach_found(sequence, found)
        self._loads += map(KVLoad, blocks, loaded)
        self._num_load_bytes += sum(data.nbytes for data in loaded)
        for block, identity in found:
            if block < 0:
                identity.noted_serial = self._serial
        if state is not None:
            self._loads.append(KVLoad(tables.attach_state(sequence), state, is_state=True))
        self.stats.num_loaded += len(loaded) + has_states
        self.stats.num_loaded_tokens += len(loaded) * tables.block_size

    def note_block(self, block: int, identity: PrefixBlock, request: Request) -> None:
        """Have a known full block saved by the next step. No-op if the store holds it, or it was noted before."""
        if self._is_off() or identity.noted_serial == self._serial:
            return
        identity.noted_serial = self._serial
        self._note(block, self._key_of(identity, request), is_state=False)

    def note_state(self, slot: int, identity: PrefixBlock, request: Request) -> None:
        """Have the states behind a known full block saved by the next step."""
        if not self._is_off():
            self._note(slot, state_key(self._key_of(identity, request)), is_state=True)

    def complete(self, work: SchedulerOutput) -> None:
        """Give a step that was scheduled its loads, and all saves that were noted."""
        work.kv_loads, self._loads, self._num_load_bytes = self._loads, [], 0
        work.kv_saves = self._take_saves()
        if self._drops:
            self._drop_again()

    def take_back(self, work: SchedulerOutput) -> None:
        """Note the saves of a step again that was not submitted."""
        self.stats.num_saved -= len(work.kv_saves)
        self._saves = {(save.place, save.is_state): save.key for save in work.kv_saves} | self._saves

    def save_noted(self) -> None:
        """Save all that was noted. Call it while no step is in flight."""
        if self._saves:
            self._save_now(self._take_saves())
        while self._drops:  # no step is left that saves any of them
            self._drop_again()

    def forget_noted(self) -> None:
        """Give up the saves that were noted: a step failed, and blocks may hold anything."""
        self._saves.clear()

    def drop(self, blocks: Rows, request: Request) -> None:
        """Forget blocks, given by their numbers and identities, and the states behind them, here and in the store."""
        if self._is_off():
            return
        keys = []
        for block, identity in blocks:
            self._saves.pop((block, False), None)
            identity.noted_serial = 0
            key = identity.tier_key[1] or self._key_of(identity, request)  # the one under which it may be held
            keys += [key, state_key(key)]
        dropped = set(keys)
        self._saves = {place: key for place, key in self._saves.items() if key not in dropped}
        if keys:
            self._drops.append((_NUM_DROPS, keys))
            self._drop_again()

    def reset(self) -> None:
        """Forget everything that the store holds of this engine's kind."""
        self._saves.clear()
        self._drops.clear()
        self._serial += 1
        self._store.reset()

    def _drop_again(self) -> None:
        for _, keys in self._drops:
            self._store.drop(keys)
        self._drops = [(count - 1, keys) for count, keys in self._drops if count > 1]

    def _is_off(self) -> bool:
        """Whether no keys can be made now. Begins a new serial number when the weights are others."""
        weights = self._weights()
        if weights is not None and weights != self._known_weights:
            self._known_weights = weights
            self._serial += 1
        return weights is None

    def _key_of(self, identity: PrefixBlock, request: Request) -> bytes:
        """The key of a full block; those of known blocks are computed once."""
        chain, each = [], identity
        while each.tier_key[0] != self._serial:
            chain.append(each)
            if each.parent is None:
                break
            each = each.parent
        if chain and chain[-1].parent is None:
            adapter = "" if request.adapter is None else request.adapter.info.digest
            source, weights = request.source, self._known_weights or ""
            routing = source.params.return_routed_experts
            key = root_key(weights, adapter, source.cache_salt, keeps_routing=routing)
        else:
            key = each.tier_key[1]
        for each in reversed(chain):
            key = block_key(key, each.content, request.picture_identities)
            each.tier_key = self._serial, key
        return key

    def _count_available(self, tables: Tables, sequence: Sequence, rows: Rows) -> int:
        """How many of the first of these blocks are known here or held, and end between pictures and with a state."""
        request, count = sequence.request, 0
        for block, identity in rows:
            if block < 0 and not self._store.holds(self._key_of(identity, request)):
                break
            count += 1
        while count and (
            tables.splits_picture(sequence, len(sequence.prefix) + count)
            or (tables.keeps_states and not self._store.holds(state_key(self._key_of(rows[count - 1][1], request))))
        ):
            count -= 1
        return count

    def _load(self, key: bytes, num_bytes: int) -> memoryview | None:
        data = self._store.load(key)
        if data is None:
            self.stats.num_missed += 1
        elif data.nbytes != num_bytes:
            self.stats.num_refused += 1
            return None
        return data

    def _note(self, place: int, key: bytes, *, is_state: bool) -> None:
        if not self._store.holds(key):
            self._saves[place, is_state] = key

    def _take_saves(self) -> list[KVSave]:
        saves, self._saves = self._saves, {}
        self.stats.num_saved += len(saves)
        return [KVSave(place, key, is_state) for (place, is_state), key in saves.items()]


def _end_of(sequence: Sequence, block_size: int) -> int:
    """How many full blocks of a sequence may be loaded: at least one token is left to compute."""
    return (sequence.num_tokens - 1) // block_size
