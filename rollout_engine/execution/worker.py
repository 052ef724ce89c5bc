"""One device's share of the engine: the model, its KV pool, its weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from torch import Tensor, nn

from rollout_engine.config import EngineConfig
from rollout_engine.errors import DirtyWeightsError
from rollout_engine.execution.arrivals import copy_by_kernel, cross_to
from rollout_engine.execution.called_update import CalledUpdate
from rollout_engine.execution.devices import device_of
from rollout_engine.execution.extensions import Extensions, ExtensionTable
from rollout_engine.execution.kv_size import cap_model_len
from rollout_engine.execution.weights import WeightUpdater
from rollout_engine.model.loader import load_model
from rollout_engine.model.logits_processors import load_processors
from rollout_engine.model.residence import return_freed
from sync.manifest import first_names


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end and the core need to know of a loaded model."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    max_prefill_beside_decode: int
    """See `CoreConfig`."""
    choices: str
    """Every choice made at start-up, for one log line."""


class Worker:
    """Loads the model, sizes the KV pool, and owns `runner` (steps), `updater` (weights) and `extensions` (calls).

    To extensions it is a `worker_ext.base.WorkerLike`.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        copy_by_kernel()
        table = ExtensionTable.load(config.worker_extensions)
        device = device_of(config)
        loaded = load_model(config, device.torch_device)
        processors = load_processors(config.logits_processors, loaded.vocab_size)
        served = device.serve(config, loaded, processors)
        cross_to(device.torch_device, served.crossing)
        self.served, self.runner, self._packed = served, served.runner, served.packed
        num_blocks = served.num_blocks
        self.updater = WeightUpdater(
            loaded.targets, loaded.aliases, self._packed, prepare=self._take_back, moves=served.moves
        )
        plain = [view for name, view in loaded.targets.items() if not self._packed.holds(name)]
        self._weights = served.memory_of(plain)
        loaded = loaded._replace(targets={})
        return_freed()  # what was packed has lost its plain values
        self.info = ModelInfo(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=cap_model_len(config, loaded.max_model_len, num_blocks),
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            dtype=str(loaded.dtype).removeprefix("torch."),
            max_prefill_beside_decode=served.max_prefill_beside_decode,
            choices=(
                f"{type(loaded.module).__name__} from {config.model}: {served.choices}, "
                f"prefix caching {'on' if config.enable_prefix_caching else 'off'}"
            ),
        )
        self.update = CalledUpdate(self.updater)
        self.extensions = Extensions(table, self)

    @property
    def rank(self) -> int:
        """Of this worker among those of one engine."""
        return 0

    @property
    def module(self) -> nn.Module:
        """The Hugging Face module that serves."""
        return self.runner.model.module

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.info.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence."""
        return self.info.max_model_len

    def live_weights(self) -> Mapping[str, Tensor]:
        """Values by the module's names, tied ones once. Raises as `WeightUpdater.live`."""
        return self.updater.live("live_weights")

    def block_tables(self) -> dict[int, list[int]]:
        """Sequence id -> KV blocks, of every sequence whose state the runner holds."""
        return self.runner.block_tables()

    def memory_usage(self) -> dict[str, int]:
        """Bytes resident now where the model runs: "weights", "derived" (copies made of them), "kv_cache".

        "process": all of the host's that this process holds.
        """
        return {
            "weights": self._weights.num_bytes,
            "derived": self.updater.num_resident_bytes,
            "kv_cache": self.runner.model.kv.num_resident_bytes,
            "process": psutil.Process().memory_info().rss,
        }

    def watch_layers(self, watcher: Callable[[int, Tensor], None]) -> Callable[[], None]:
        """See `PagedModel.watch_layers`."""
        return self.runner.model.watch_layers(watcher)

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> Any:
        """Result of `fn(module)`, which may read weights but not write them.

        Raises `LifecycleError` and `DirtyWeightsError` where there are none to read; `DirtyWeightsError` too after
        `fn` has written some, which `updater.dirty` then says.
        """
        self.updater.live("apply_model")
        with self._packed.readable():
            weights = self.module.state_dict(keep_vars=True)
            before = {name: tensor._version for name, tensor in weights.items()}
            result = fn(self.module)
        if written := [name for name, tensor in weights.items() if tensor._version != before[name]]:
            self.updater.dirty = True
            advice = "Send a complete update: weights change by update_weights alone."
            raise DirtyWeightsError(f"apply_model: the function has written to {first_names(written)}. {advice}")
        return result

    def score(self, sequences: Sequence[list[int]], num_prompt: Sequence[int], temperature: float) -> list[np.ndarray]:
        """Log-prob float32 [len - num_prompt] of every token after the prompt, under the live weights."""
        return self.served.score(sequences, num_prompt, temperature)

    def release_kv(self) -> None:
        """Forget all KV and give its memory back to the system."""
        self.runner.model.kv.release()

    def release_weights(self, *, forget: bool) -> None:
        """Free copies of weights and the shadow of updates; on a device the weights, whose values wait on the host.

        `forget`: the weights too, and their values.
        """
        self.updater.release(forget=forget)
        self._weights.release(forget=forget)

    def restore_weights(self) -> None:
        """Have again what `release_weights(forget=False)` freed."""
        self._weights.derive()

    def _take_back(self) -> None:
        self._weights.take_back()
