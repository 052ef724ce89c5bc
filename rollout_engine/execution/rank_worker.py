"""A rank other than the first: its part of the model, its share of steps, and calls of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import msgspec
import numpy as np
import psutil
import torch
from torch import Tensor

from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.messages import KVSave, SchedulerOutput
from rollout_engine.base.picture_cache import ReceivedPictures
from rollout_engine.base.pictures import Picture, SharedPictures
from rollout_engine.base.structs import arguments_struct
from rollout_engine.base.token_scores import AskedScores, TokenScores
from rollout_engine.execution.extensions import Extensions, ExtensionTable
from rollout_engine.execution.rank_parts import RankParts
from rollout_engine.execution.rank_values import unpack_value
from rollout_engine.execution.rank_wire import (
    BeginScore,
    EndScore,
    ForgetPictures,
    Meet,
    RankSettings,
    ScorePiece,
    Step,
    StepMessage,
    TakeLogits,
    TakePicture,
)
from rollout_engine.execution.resident_weights import ResidentWeights
from rollout_engine.execution.team_adapters import unpack_linears
from rollout_engine.kernels.memory import trim_allocator
from rollout_engine.model.adapters.pool import AdapterPool, Pairs
from rollout_engine.model.backends import device_of
from rollout_engine.model.kv_size import cap_model_len
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.loading.shard_files import ShardFiles
from rollout_engine.model.loading.sharded_state import write_shard
from rollout_engine.model.ranks.part import Region
from rollout_engine.model.ranks.seat import Seat
from rollout_engine.model.sequences.kv_transfer import KVTransfer
from sync.manifest import TensorSpec

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _called(method: _Method) -> _Method:
    """Let rank 0 call a method by its name; its annotations are the types of its arguments on the wire."""
    method.is_called = True  # type: ignore[attr-defined]
    return method


class RankWorker:
    """Satisfies `worker_ext.base.WorkerLike` as far as one rank's part can: weights are its own parts."""

    def __init__(self, settings: RankSettings, seat: Seat) -> None:
        torch.set_num_threads(settings.num_threads)
        config, self.rank, self._num_ranks = settings.config, settings.rank, seat.team.num_ranks
        self._team, self._pipe = seat.team, seat.pipe
        table = ExtensionTable.load(config.worker_extensions)
        device = device_of(config)
        loaded = load_model(config, device.torch_device, seat)
        self._backend = backend = device.backend(config, loaded, ())
        self._weights = ResidentWeights(loaded, backend, device.torch_device)
        self._held = self._weights.updater.weights
        self._prepared: dict[int, Pairs] = {}
        """By their numbers, adapters that rank 0 may still have installed."""
        self._scores: dict[int, Iterator[dict[int, TokenScores]]] = {}
        """Scores of rank 0 that have begun, by number."""
        self._pictures = ReceivedPictures(config.mm_cache_bytes)
        self._transfer: KVTransfer
        """Moves this rank's parts of KV blocks, if the engine has a KV connector."""
        self._parts = RankParts(self._held, loaded.cut.parts, seat.team.window)
        self.module, self.vocab_size = loaded.module, loaded.vocab_size
        self.max_model_len = cap_model_len(config, loaded.max_model_len, backend.num_blocks)
        self._extensions = Extensions(table, self)
        del loaded
        trim_allocator()  # packed weights have given up their plain values

    @property
    def update(self) -> NoReturn:
        raise LifecycleError("Weight updates are rank 0's; the other ranks take part in them.")

    def live_weights(self) -> Mapping[str, Tensor]:
        return self._weights.updater.live("live_weights")

    def score(self, sequences: Sequence[list[int]], num_prompt: Sequence[int], temperature: float) -> list[np.ndarray]:
        raise LifecycleError("score: rank 0 alone computes scores; the other ranks take part in them.")

    def block_tables(self) -> dict[int, list[int]]:
        return {}

    def memory_usage(self) -> dict[str, int]:
        return {
            "weights": self._weights.num_bytes,
            "derived": self._held.num_resident_bytes,
            "kv_cache": self._backend.runner.model.kv.num_resident_bytes,
            "process": psutil.Process().memory_info().rss,
        }

    def watch_layers(self, watcher: Callable[[int, Tensor], None]) -> Callable[[], None]:
        raise LifecycleError("watch_layers: not possible with several ranks: each has only a part of the model.")

    def take_part(self, message: StepMessage) -> None:
        """Compute with the other ranks as a step's message from rank 0 requires."""
        runner = self._backend.runner
        match message:
            case Step(work, token_ids, serial):
                self._begin(serial)
                self._restore_pictures(work)
                runner.follow(work, np.frombuffer(bytearray(token_ids), np.int64))
            case TakePicture(digest, arrays):
                self._pictures.add(Picture(digest, unpack_value(arrays)))
            case ForgetPictures():
                self._pictures.clear()
            case TakeLogits(rows):
                runner.take_logits(rows)
            case BeginScore(number, arguments):
                *given, slot, experts, shared, asked = unpack_value(arguments)
                pictures, asked = msgspec.convert(shared, SharedPictures | None), msgspec.convert(asked, AskedScores)
                options = dict(adapter_slot=slot, routed_experts=experts, pictures=pictures, asked=asked)
                self._scores[number] = self._backend.score(*given, **options)
            case ScorePiece(number, serial):
                self._begin(serial)
                if next(self._scores[number], None) is None and self._pipe is not None:
                    self._pipe.skip()
            case EndScore(number):
                del self._scores[number]
            case Meet():
                self._team.meet()

    def _begin(self, serial: int) -> None:
        """Begin a forward of this serial."""
        if self._pipe is not None:
            self._pipe.serial = serial

    def _restore_pictures(self, work: SchedulerOutput) -> None:
        """Give new sequences the arrays of their pictures."""
        for new in work.new:
            if new.pictures:
                new.pictures = self._pictures.restore(new.pictures)

    @property
    def _adapters(self) -> AdapterPool:
        assert self._backend.adapters is not None, "rank 0 has some"
        return self._backend.adapters

    @property
    def regions(self) -> dict[str, Region]:
        """Name of a weight -> the elements of it that are this rank's."""
        return self._parts.regions

    def carry_out(self, method: str, arguments: bytes | msgspec.Raw) -> Any:
        """The result of a call of a method, with its arguments by name, as msgpack."""
        given = _CALLS[method].decode(arguments)
        return getattr(self, method)(**msgspec.structs.asdict(given))

    @_called
    def prepare_weights(self) -> None:
        """Take memory of weights back."""
        self._held.prepare_weights()

    @_called
    def start_weights(self, inplace: bool, carried: list[str] | None) -> None:
        """Begin an update, as `WeightHolder.start`."""
        self._weights.updater.dirty |= inplace
        known = None if carried is None else self._parts.known(carried)
        with self._held.beside_steps():
            self._held.start(inplace=inplace, lacking=None, carried=known)

    @_called
    def stage_weight(self, name: str, start: int, stop: int, inplace: bool, content: bytes | None = None) -> None:
        """Stage this rank's of elements [start, stop) of a weight, which are in the window.

        `content`: their bytes, if the window is the rank's own.
        """
        with self._held.beside_steps():
            if content is None:
                self._parts.stage(name, start, stop, inplace=inplace)
            else:
                self._parts.stage_sent(name, start, stop, content, inplace=inplace)

    @_called
    def read_weight(self, name: str, start: int, stop: int) -> bytes | None:
        """Write this rank's of elements [start, stop) of a live weight into the window.

        Returns their bytes, if the window is the rank's own.
        """
        return (self._parts.read if self._team.window_is_shared else self._parts.read_and_send)(name, start, stop)

    @_called
    def pack_weights(self, inplace: bool, names: list[str]) -> None:
        """Pack the staged weights, as `WeightHolder.pack`."""
        self._held.pack(inplace=inplace, lacking=None, names=self._parts.known(names))

    @_called
    def commit_weights(self) -> None:
        """Make the packed weights live: all of them, if `release_weights` had forgotten them."""
        updater = self._weights.updater
        updater.dirty = True  # until all of them are
        self._held.commit(lacking=None)
        updater.dirty = updater.forgotten = False

    @_called
    def settle_weights(self) -> None:
        """End an update, as `WeightHolder.settle`."""
        self._held.settle()

    @_called
    def reset_encoder_cache(self) -> None:
        """Forget the vision tower's outputs. No step may be running on the host."""
        self._backend.reset_encoder_cache()

    @_called
    def open_transfer(self) -> list[Any]:
        """Take part in moves of KV from now on; returns the sizes of a block's and a slot's parts, and their shapes."""
        transfer = self._transfer = self._backend.runner.open_transfer(lambda key, data: None)
        return [transfer.block_bytes, transfer.state_bytes, transfer.describe_shapes()]

    @_called
    def place_transfer(self, block_start: int, state_start: int) -> None:
        """Take the first bytes of this rank's parts in whole blocks and slots."""
        self._transfer.block_start, self._transfer.state_start = block_start, state_start

    @_called
    def read_kv(self, saves: list[KVSave]) -> list[bytes]:
        """This rank's parts of blocks and slots, in order."""
        return self._transfer.read(saves)

    @_called
    def release_kv(self) -> None:
        """Give the memory of all KV back."""
        self._backend.runner.model.kv.release()

    @_called
    def release_weights(self, forget: bool) -> None:
        """Free copies of weights; `forget`: the weights too."""
        self._weights.release(forget=forget)

    @_called
    def restore_weights(self) -> None:
        """Undo `release_weights(forget=False)`."""
        self._weights.restore()

    @_called
    def write_shard(self, directory: str, pattern: str, max_bytes: int) -> list[TensorSpec]:
        """Write the live weights to this rank's files in a directory, as `ShardFiles`. Returns their specs."""
        forms, live = self._weights.updater.metadata(), self.live_weights()
        return write_shard(Path(directory), self.rank, self._num_ranks, forms, live, ShardFiles(pattern, max_bytes))

    @_called
    def prepare_adapter(self, number: int, linears: bytes, gone: list[int]) -> None:
        """Lay out this rank's part of an adapter, to be known by a number; forget the adapters of numbers `gone`.

        `linears`: as `team_adapters.pack_linears` writes them.
        """
        for each in gone:
            self._prepared.pop(each, None)
        self._prepared[number] = self._adapters.pairs(unpack_linears(linears))

    @_called
    def install_adapter(self, slot: int, number: int) -> None:
        """Have an adapter in a slot. No step may be running on the host."""
        self._adapters.put(slot, self._prepared[number])

    @_called
    def remove_adapter(self, slot: int) -> None:
        """Free a slot. No step may be running on the host."""
        self._adapters.remove(slot)

    @_called
    def call_extension(self, name: str, arguments: bytes) -> Any:
        """Result of a method of a worker extension; `arguments` as `pack_value` writes them."""
        args, kwargs = unpack_value(arguments)
        return self._extensions.call(name, args, kwargs)

    def close(self) -> None:
        """Close the extensions."""
        self._extensions.close()


_CALLS = {
    name: msgspec.msgpack.Decoder(arguments_struct(name, parameters, get_type_hints(method)))
    for name, method, parameters in (
        (name, method, list(signature(method).parameters.values())[1:])
        for name, method in vars(RankWorker).items()
        if hasattr(method, "is_called")
    )
}
"""Decoder of the arguments of each method that rank 0 may call."""
