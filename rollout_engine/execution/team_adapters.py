"""Adapters of a model that is cut over ranks: read and checked by rank 0, which sends the others their matrices.

rank 0    prepare ── prepare_adapter ──>   lays out its part, concurrently with steps
          install ── install_adapter ──>   has them in the slot, between the same two steps
"""

import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.execution.rank_values import pack_value, unpack_value
from rollout_engine.model.adapters.peft_format import LinearAdapter, naming_adapter
from rollout_engine.model.adapters.pool import AdapterPool, PreparedAdapter


class TeamAdapters:
    """Satisfies `model.adapters.pool.Adapters` for all ranks; made by rank 0, whose own adapters `own` are."""

    def __init__(self, team: RankTeam, own: AdapterPool) -> None:
        self._team, self._own = team, own
        self._count, self._preparing = count(), threading.Lock()
        self._numbers: WeakKeyDictionary[PreparedAdapter, int] = WeakKeyDictionary()
        self._told: set[int] = set()
        """Numbers of the adapters that the other ranks may hold, installed or not."""

    def prepare_adapter(self, request: LoRARequest) -> PreparedAdapter:
        with naming_adapter(request):
            linears = self._own.read_linears(request)
            prepared = self._own.check_adapter(linears)
        with self._preparing:
            gone = self._told - set(self._numbers.values())
            number = self._numbers[prepared] = next(self._count)
            self._told.add(number)
            packed = pack_linears(linears, self._own.dtype)
            self._team.ask("prepare_adapter", number=number, linears=packed, gone=sorted(gone))
            self._told -= gone
        return prepared

    def install(self, slot: int, prepared: PreparedAdapter) -> None:
        install = partial(self._own.install, slot, prepared)
        self._change("install_adapter", install, slot=slot, number=self._numbers[prepared])

    def remove(self, slot: int) -> None:
        self._change("remove_adapter", partial(self._own.remove, slot), slot=slot)

    def _change(self, method: str, own: Callable[[], object], **arguments: Any) -> None:
        try:
            self._team.ask(method, own, **arguments)
        except Exception as problem:
            what = f"{method} failed on a rank ({type(problem).__name__}: {problem})"
            self._team.fail(
                EngineDeadError(f"{what}, and ranks whose adapters differ compute garbage: make a new engine.")
            )
            raise


def pack_linears(linears: dict[str, LinearAdapter], dtype: torch.dtype) -> bytes:
    """Encode the matrices of an adapter by the names of their linears, in this dtype."""
    return pack_value({name: (each.a.to(dtype), each.b.to(dtype), each.scale) for name, each in linears.items()})


def unpack_linears(body: bytes) -> dict[str, LinearAdapter]:
    """Decode the result of `pack_linears`."""
    found: dict[str, Any] = unpack_value(body)
    return {name: LinearAdapter(*each) for name, each in found.items()}
