"""One device's share of the engine: the model, its KV pool, its weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from torch import Tensor, nn

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import DirtyWeightsError, RPCError, error_text
from rollout_engine.base.messages import KVSave
from rollout_engine.base.user_code import UserCode
from rollout_engine.execution.draft_worker import DraftWorker, load_draft
from rollout_engine.execution.extensions import Extensions, ExtensionTable
from rollout_engine.execution.kv_layout import Transfer, describe_layout
from rollout_engine.execution.kv_link import KVLink
from rollout_engine.execution.made_with import made_with
from rollout_engine.execution.model_info import ModelInfo
from rollout_engine.execution.resident_weights import ResidentWeights
from rollout_engine.execution.step_costs import step_costs
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.grammars.tokenizer_file import tokenizer_text
from rollout_engine.grammars.vocabulary import GrammarError, Vocabulary
from rollout_engine.kernels.memory import trim_allocator
from rollout_engine.kv.connector import KVConnector
from rollout_engine.model.backend import Backend
from rollout_engine.model.backends import device_of
from rollout_engine.model.kv_size import cap_model_len
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.loading.shard_files import ShardFiles
from rollout_engine.model.loading.sharded_state import save_state, write_shard
from rollout_engine.model.modules.loaded_model import LoadedModel
from rollout_engine.model.ranks.seat import Seat
from rollout_engine.model.sampling.logits_processors import load_processors
from rollout_engine.weights.update_session import UpdateSession
from sync.manifest import TensorSpec, first_names


class Worker:
    """Loads the model, sizes the KV pool, and owns `runner` (steps), `updater` (weights) and `extensions` (calls).

    Satisfies `worker_ext.base.WorkerLike`, which extensions see of it.
    """

    rank = 0

    def __init__(self, config: EngineConfig, seat: Seat | None = None) -> None:
        """`seat`: rank 0's, if the model is cut over ranks."""
        if config.num_threads is not None and seat is None:
            torch.set_num_threads(config.num_threads)
        table = ExtensionTable.load(config.worker_extensions)
        device = device_of(config)
        draft = load_draft(config, device)
        loaded = self._load(config, device.torch_device, seat)
        processors = load_processors(config.logits_processors, loaded.vocab_size)
        self.grammars = GrammarCompiler(partial(_vocabulary, config, loaded.vocab_size, tuple(loaded.eos_token_ids)))
        backend = device.backend(config, loaded, processors, self.grammars)
        self.backend, self.runner = backend, backend.runner
        self._weights = self._resident_weights(loaded, backend, device.torch_device)
        self.updater = self._weights.updater
        self._has_columns = loaded.cut is not None and bool(loaded.cut.columns)
        self._num_stages = config.pipeline_parallel_size
        loaded = loaded._replace(targets={}, cut=None, tower=None)
        trim_allocator()  # packed weights have given up their plain values
        self._begin_to_serve()
        costs = step_costs(config, backend)
        drafts = draft if costs.plain else None
        self.draft = None if drafts is None else DraftWorker(config, drafts, device, loaded, backend)
        self.info = ModelInfo(
            num_blocks=backend.num_blocks,
            block_size=config.tokens_per_block,
            max_model_len=cap_model_len(config, loaded.max_model_len, backend.num_blocks),
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            dtype=str(loaded.dtype).removeprefix("torch."),
            max_prefill_beside_decode=backend.max_prefill_beside_decode,
            step_seconds=costs.plain,
            drafted_step_seconds=costs.with_drafts,
            draft=None if self.draft is None else self.draft.info,
            made_with=made_with(device.torch_device),
            generates=backend.generates,
            pooling=backend.pooling,
            routing=backend.routing,
            num_state_slots=backend.num_state_slots,
            pictures=loaded.picture_info,
            choices=(
                f"{type(loaded.module).__name__} from {config.model}: {backend.choices}, "
                f"prefix caching {'on' if config.enable_prefix_caching else 'off'}"
                f"{'' if self.draft is None else f', {self.draft.choices}'}"
            ),
        )
        self.module, self._files = loaded.module, loaded.files
        self._config, self._device = config, device.torch_device
        self.vocab_size, self.max_model_len = self.info.vocab_size, self.info.max_model_len
        self.update = UpdateSession(self.updater)
        self.extensions = Extensions(table, self)

    def _load(self, config: EngineConfig, device: torch.device, seat: Seat | None) -> LoadedModel:
        return load_model(config, device, seat)

    def _resident_weights(self, loaded: LoadedModel, backend: Backend, device: torch.device) -> ResidentWeights:
        return ResidentWeights(loaded, backend, device)

    def _begin_to_serve(self) -> None:
        """Called once the model is loaded, before its first step."""

    def shared_digest(self) -> str:
        """Digest of the live weights that all engines of a fleet hold whole, whose sizes may differ."""
        return self.updater.digest()

    def live_weights(self) -> Mapping[str, Tensor]:
        return self.updater.live("live_weights")

    def block_tables(self) -> dict[int, list[int]]:
        tables: dict[int, list[int]] = self.runner.block_tables()
        return tables

    def memory_usage(self) -> dict[str, int]:
        return {
            "weights": self._weights.num_bytes,
            "derived": self.updater.num_resident_bytes,
            "kv_cache": self.runner.model.kv.num_resident_bytes,
            "process": psutil.Process().memory_info().rss,
        } | ({} if self.draft is None else {"draft_model": self.draft.num_resident_bytes})

    def watch_layers(self, watcher: Callable[[int, Tensor], None]) -> Callable[[], None]:
        end: Callable[[], None] = self.runner.model.layer_watch.watch(watcher)
        return end

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> Any:
        """Result of `fn(module)`, which may read weights but not write them.

        Raises as `WeightUpdater.live` if there are none to read. After `fn` has written some it sets
        `updater.dirty` and raises `DirtyWeightsError`.
        """
        self.updater.live("apply_model")
        with self.backend.packed.readable():
            weights = self.module.state_dict(keep_vars=True)
            before = {name: tensor._version for name, tensor in weights.items()}
            name = f"the function {getattr(fn, '__qualname__', type(fn).__qualname__)} of apply_model"
            try:
                with UserCode(lambda: name):
                    result = fn(self.module)
            except SystemExit as problem:  # it would end the thread that computes
                raise RPCError(f"{name} raised {error_text(problem)}.", method="apply_model") from problem
        if written := [name for name, tensor in weights.items() if tensor._version != before[name]]:
            self.updater.dirty = True
            advice = "Send a complete update: weights change by update_weights alone."
            raise DirtyWeightsError(f"apply_model: the function has written to {first_names(written)}. {advice}")
        return result

    def score(self, sequences: Sequence[list[int]], num_prompt: Sequence[int], temperature: float) -> list[np.ndarray]:
        pieces = self.backend.score(sequences, num_prompt, temperature)
        found = {index: scores for piece in pieces for index, scores in piece.items()}
        return [found[i].logprobs for i in range(len(sequences))]

    def save_sharded_state(self, path: Path, files: ShardFiles) -> None:
        """Write the live weights to a directory, as `load_format="sharded"` reads them. Raises as `save_state`."""
        save_state(
            path,
            self._files,
            self.info.dtype,
            self.updater.version,
            partial(self._write_shards, files=files),
            has_columns=self._has_columns,
            shard_files=files,
            num_stages=self._num_stages,
        )

    def _write_shards(self, directory: Path, files: ShardFiles) -> list[list[TensorSpec]]:
        """Have every rank write its weights to files in `directory`; returns the specs written by each, in order."""
        return [write_shard(directory, 0, 1, self.updater.metadata(), self.updater.live("save_sharded_state"), files)]

    def reset_encoder_cache(self) -> None:
        """Forget the vision tower's outputs. No step may be running on the host."""
        self.backend.reset_encoder_cache()

    def open_link(self, connector: KVConnector) -> KVLink:
        """Open a KV connector over the model's pools. Call it before the first step. Raises `ConfigError`."""
        link: KVLink
        transfer = self._open_transfer(lambda key, data: link.save(key, data))
        layout = describe_layout(self._config, self.module.config, self.backend, transfer, self._device)
        link = KVLink(connector, str(self._config.kv_connector), layout, self._config.kv_connector_bytes)
        self.info = msgspec.structs.replace(self.info, kv_handshake=link.handshake)
        self.updater.live_digest.keep()
        return link

    def _open_transfer(self, save: Callable[[bytes, memoryview], None]) -> Transfer:
        transfer: Transfer = self.runner.open_transfer(save)
        return transfer

    def save_kv(self, saves: list[KVSave]) -> None:
        """Hand blocks of KV and states on, between two steps."""
        self.runner.save_kv(saves)

    def release_kv(self) -> None:
        """Give the memory of all KV back to the system."""
        self.runner.model.kv.release()
        if self.draft is not None:
            self.draft.release_kv()

    def release_weights(self, *, forget: bool) -> None:
        """Free copies of weights and the shadow of updates; on a device move the weights to the host.

        `forget`: free the weights and lose their values.
        """
        self._weights.release(forget=forget)
        if self.draft is not None:
            self.draft.release_weights(forget=forget)

    def restore_weights(self) -> None:
        """Undo `release_weights(forget=False)`."""
        self._weights.restore()
        if self.draft is not None:
            self.draft.restore_weights()


def _vocabulary(config: EngineConfig, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Read the tokenizer for grammars. Raises `GrammarError` and the loader's errors about its files."""
    if config.skip_tokenizer_init:
        raise GrammarError("the engine has no tokenizer (skip_tokenizer_init=True)")
    name, field = (config.tokenizer, "tokenizer") if config.tokenizer else (config.model, "model")
    return Vocabulary(tokenizer_text(name, field), vocab_size, eos_token_ids)
