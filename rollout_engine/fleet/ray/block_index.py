"""The Ray actor that lists the blocks of KV of all engines: one for each layout, made by the engine that is first.

    engine   SharedIndex.add     ── owner, keys, references ──> actor   BlockIndex.add
             SharedIndex.find    ── keys ─────────────────────>         BlockIndex.find
                                 <── a reference or None for each ──

Keys and names are plain bytes and text. The bytes of blocks never pass the actor: references are to arrays of uint8 in
Ray's object store, which belong to the engine that has put them and end with it. The actor ends with the engine that
made it; another one then makes a new actor, and each adds its blocks again. Blocks of an engine that was killed stay
listed until a fetch asks for them, is a miss, and has them removed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rollout_engine.cluster.ray_cluster import RayCluster

NAMESPACE = "rollout-engine"
_ANSWER_SECONDS = 10.0
_START_SECONDS = 120.0

Blocks = tuple[list[bytes], list[Any]]
"""Keys, and Ray's reference of each."""


class BlockIndex:
    """The actor: key -> owner and reference."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, tuple[str, Any]] = {}

    def add(self, owner: str, keys: Sequence[bytes], references: Sequence[Any]) -> bool:
        """Add blocks of an engine; those of others stay."""
        for key, reference in zip(keys, references, strict=True):
            self._blocks.setdefault(key, (owner, reference))
        return True

    def find(self, keys: Sequence[bytes]) -> list[Any]:
        """References of blocks, None for those that no engine has."""
        return [self._blocks[key][1] if key in self._blocks else None for key in keys]

    def has(self, key: bytes) -> bool:
        """Whether an engine has the block."""
        return key in self._blocks

    def forget(self, owner: str, keys: Sequence[bytes]) -> bool:
        """Remove blocks of an engine; of any if `owner` is empty."""
        for key in keys:
            if key in self._blocks and owner in ("", self._blocks[key][0]):
                del self._blocks[key]
        return True

    def clear(self) -> bool:
        """Remove all blocks."""
        self._blocks.clear()
        return True


class SharedIndex:
    """An engine's handle of the actor. Any thread may use it."""

    def __init__(self, cluster: RayCluster, layout: str, owner: str, own_blocks: Callable[[], Blocks]) -> None:
        """Find the actor of a layout, or make it. `own_blocks`: those of this engine, to be added to a new actor.

        Raises Ray's errors.
        """
        self._cluster, self._ray, self._name = cluster, cluster.ray, f"{NAMESPACE}-kv-{layout}"
        self._owner, self._own_blocks = owner, own_blocks
        self._actor = self._find_actor()
        self._ray.get(self._actor.has.remote(b""), timeout=_START_SECONDS)

    def add(self, keys: list[bytes], references: list[Any]) -> None:
        """Add blocks of this engine. Raises Ray's errors, as all methods do."""
        self._ask("add", self._owner, keys, references)

    def begin_find(self, keys: list[bytes]) -> Any:
        """Ask for references, without waiting. Returns Ray's reference of the answer."""
        self._require_connection()
        return self._actor.find.remote(keys)

    def has(self, key: bytes) -> bool:
        """Whether an engine has the block."""
        return bool(self._ask("has", key))

    def forget(self, keys: list[bytes], *, of_any: bool = False) -> None:
        """Remove blocks of this engine, or of any."""
        self._ask("forget", "" if of_any else self._owner, keys)

    def clear(self) -> None:
        """Remove all blocks of the layout."""
        self._ask("clear")

    def _ask(self, method: str, *args: Any) -> Any:
        """Call the actor; if it is gone, a new one, to which this engine's blocks were added."""
        self._require_connection()
        try:
            return self._ray.get(getattr(self._actor, method).remote(*args), timeout=_ANSWER_SECONDS)
        except self._ray.exceptions.ActorDiedError:
            self._actor = self._find_actor()
            self._ray.get(self._actor.add.remote(self._owner, *self._own_blocks()), timeout=_START_SECONDS)
        return self._ray.get(getattr(self._actor, method).remote(*args), timeout=_ANSWER_SECONDS)

    def _require_connection(self) -> None:
        """Raise `ConnectionError` if the program has closed its connection: Ray would start a new cluster."""
        if not self._cluster.is_connected:
            raise ConnectionError("the connection to the Ray cluster is closed")

    def _find_actor(self) -> Any:
        options = dict(name=self._name, namespace=NAMESPACE, get_if_exists=True, num_cpus=0, max_restarts=0)
        return self._ray.remote(**options)(BlockIndex).remote()
