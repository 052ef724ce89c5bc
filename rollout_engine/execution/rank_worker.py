"""A rank other than the first: its part of the model, what it computes with the others, and calls of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import torch
from torch import Tensor

from rollout_engine.base.errors import LifecycleError
from rollout_engine.execution.extensions import Extensions, ExtensionTable
from rollout_engine.execution.rank_parts import RankParts
from rollout_engine.execution.rank_values import unpack_value
from rollout_engine.execution.rank_wire import (
    BeginScore,
    CallExtension,
    CallMessage,
    CommitWeights,
    EndScore,
    InstallAdapter,
    Meet,
    PackWeights,
    PrepareAdapter,
    PrepareWeights,
    RankSettings,
    ReadWeights,
    ReleaseKV,
    ReleaseWeights,
    RemoveAdapter,
    RestoreWeights,
    ScorePiece,
    SettleWeights,
    StageWeights,
    StartWeights,
    Step,
    StepMessage,
    TakeLogits,
    WriteShard,
)
from rollout_engine.execution.resident_weights import ResidentWeights
from rollout_engine.execution.team_adapters import RankAdapters
from rollout_engine.kernels.memory import trim_allocator
from rollout_engine.model.backends import device_of
from rollout_engine.model.kv_size import cap_model_len
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.loading.sharded_state import write_shard
from rollout_engine.model.ranks.part import Region
from rollout_engine.model.ranks.seat import Seat


class RankWorker:
    """Satisfies `worker_ext.base.WorkerLike` as far as one rank's part can: weights are its own parts."""

    def __init__(self, settings: RankSettings, seat: Seat) -> None:
        torch.set_num_threads(settings.num_threads)
        config, self.rank, self._num_ranks = settings.config, settings.rank, seat.num_ranks
        self._exchange = seat.exchange
        table = ExtensionTable.load(config.worker_extensions)
        device = device_of(config)
        loaded = load_model(config, device.torch_device, seat)
        self._backend = backend = device.backend(config, loaded, ())
        self._weights = ResidentWeights(loaded, backend, device.torch_device)
        self._held = self._weights.updater.weights
        self._adapters = RankAdapters(backend.adapters)
        self._scores: dict[int, Iterator[dict[int, np.ndarray]]] = {}
        """Scores of rank 0 that have begun, by number."""
        self._parts = RankParts(self._held, loaded.cut.parts, seat.exchange.window)
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
        raise LifecycleError("watch_layers: not possible with tensor_parallel_size above 1.")

    def take_part(self, message: StepMessage) -> None:
        """Compute with the other ranks what rank 0 has told."""
        runner = self._backend.runner
        match message:
            case Step(work, token_ids):
                runner.follow(work, np.frombuffer(bytearray(token_ids), np.int64))
            case TakeLogits(rows):
                runner.take_logits(rows)
            case BeginScore(number, arguments):
                *given, slot, experts = unpack_value(arguments)
                self._scores[number] = self._backend.score(*given, adapter_slot=slot, routed_experts=experts)
            case ScorePiece(number):
                next(self._scores[number], None)
            case EndScore(number):
                del self._scores[number]
            case Meet():
                self._exchange.meet()

    @property
    def regions(self) -> dict[str, Region]:
        """Name of a weight -> the elements of it that are this rank's."""
        return self._parts.regions

    def carry_out(self, message: CallMessage) -> Any:
        """The result of a call."""
        held, parts = self._held, self._parts
        match message:
            case StageWeights(name, start, stop, inplace, content):
                with held.beside_steps():
                    if content is not None:
                        return parts.stage_sent(name, start, stop, content, inplace=inplace)
                    return parts.stage(name, start, stop, inplace=inplace)
            case ReadWeights(name, start, stop):
                return (parts.read if self._exchange.window_is_shared else parts.read_and_send)(name, start, stop)
            case PrepareWeights():
                return held.prepare()
            case StartWeights(inplace, carried):
                self._weights.updater.dirty |= inplace
                known = None if carried is None else parts.known(carried)
                with held.beside_steps():
                    return held.start(inplace=inplace, lacking=None, carried=known)
            case PackWeights(inplace, names):
                return held.pack(inplace=inplace, lacking=None, names=parts.known(names))
            case CommitWeights():
                return self._commit()
            case SettleWeights():
                return held.settle()
            case ReleaseKV():
                return self._backend.runner.model.kv.release()
            case ReleaseWeights(forget):
                return self._weights.release(forget=forget)
            case RestoreWeights():
                return self._weights.restore()
            case WriteShard(directory):
                forms, live = self._weights.updater.metadata(), self.live_weights()
                return write_shard(Path(directory), self.rank, self._num_ranks, forms, live)
            case PrepareAdapter(number, linears, gone):
                return self._adapters.prepare(number, linears, gone)
            case InstallAdapter(slot, number):
                return self._adapters.install(slot, number)
            case RemoveAdapter(slot):
                return self._adapters.remove(slot)
            case CallExtension(method, arguments):
                args, kwargs = unpack_value(arguments)
                return self._extensions.call(method, args, kwargs)
        raise AssertionError(f"{type(message).__name__} is no call")

    def _commit(self) -> None:
        """Make the packed weights live: all of them, where `ReleaseWeights` had forgotten them."""
        updater = self._weights.updater
        updater.dirty = True  # until all of them are
        self._held.commit(lacking=None)
        updater.dirty = updater.forgotten = False

    def close(self) -> None:
        """Close the extensions."""
        self._extensions.close()
