"""Adapters of a model that is cut over ranks: read and checked by rank 0, which sends the others their matrices.

rank 0    prepare ── PrepareAdapter ──>   lays out its part, beside steps
          install ── InstallAdapter ──>   has them in the slot, between the same two steps
"""

import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.execution.rank_values import pack_value, unpack_value
from rollout_engine.execution.rank_wire import InstallAdapter, PrepareAdapter, RemoveAdapter
from rollout_engine.model.adapters.peft_format import LinearAdapter, naming_adapter, read_adapter
from rollout_engine.model.adapters.pool import AdapterPool, Pairs, PreparedAdapter


class TeamAdapters:
    """Satisfies `model.adapters.pool.Adapters` for all ranks; made by rank 0, whose own adapters `own` are."""

    def __init__(self, team: RankTeam, own: AdapterPool) -> None:
        self._team, self._own = team, own
        self._count, self._preparing = count(), threading.Lock()
        self._numbers: WeakKeyDictionary[PreparedAdapter, int] = WeakKeyDictionary()
        self._told: set[int] = set()
        """Numbers of the adapters that the other ranks may hold, installed or not."""

    def prepare(self, request: LoRARequest) -> PreparedAdapter:
        with naming_adapter(request):
            linears = read_adapter(request)
            prepared = self._own.checked(linears)
        with self._preparing:
            gone = self._told - set(self._numbers.values())
            number = self._numbers[prepared] = next(self._count)
            self._told.add(number)
            self._team.ask(PrepareAdapter(number, _packed(linears, self._own.dtype), sorted(gone)))
            self._told -= gone
        return prepared

    def install(self, slot: int, prepared: PreparedAdapter) -> None:
        self._change(InstallAdapter(slot, self._numbers[prepared]), lambda: self._own.install(slot, prepared))

    def remove(self, slot: int) -> None:
        self._change(RemoveAdapter(slot), lambda: self._own.remove(slot))

    def _change(self, message: InstallAdapter | RemoveAdapter, own: Callable[[], object]) -> None:
        try:
            self._team.ask(message, own)
        except Exception as problem:
            what = f"{type(message).__name__} failed on a rank ({type(problem).__name__}: {problem})"
            self._team.fail(
                EngineDeadError(f"{what}, and ranks whose adapters differ compute garbage: make a new engine.")
            )
            raise


class RankAdapters:
    """The adapters of a rank other than the first, which changes them as rank 0 tells it."""

    def __init__(self, own: AdapterPool) -> None:
        self._own = own
        self._prepared: dict[int, Pairs] = {}
        """By their numbers, adapters that rank 0 may still have installed."""

    def prepare(self, number: int, linears: bytes, gone: Sequence[int]) -> None:
        """Lay out this rank's part of an adapter, to be known by a number; forget the adapters of numbers `gone`."""
        for each in gone:
            self._prepared.pop(each, None)
        self._prepared[number] = self._own.pairs(_unpacked(linears))

    def install(self, slot: int, number: int) -> None:
        """Have an adapter in a slot. No step may be running on the host."""
        self._own.put(slot, self._prepared[number])

    def remove(self, slot: int) -> None:
        """Free a slot. No step may be running on the host."""
        self._own.remove(slot)


def _packed(linears: dict[str, LinearAdapter], dtype: torch.dtype) -> bytes:
    return pack_value({name: (each.a.to(dtype), each.b.to(dtype), each.scale) for name, each in linears.items()})


def _unpacked(body: bytes) -> dict[str, LinearAdapter]:
    found: dict[str, Any] = unpack_value(body)
    return {name: LinearAdapter(*each) for name, each in found.items()}
