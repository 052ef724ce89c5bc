"""The other ranks of an engine where each has a device of its own."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.execution.rank_wire import (
    CallMessage,
    ClosePool,
    ForwardOnDevice,
    HeadOnDevice,
    Meet,
    OpenPool,
    PackWeights,
    PrepareAdapter,
    SettleWeights,
    StageWeights,
    StartWeights,
)
from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.model.ranks.device_exchange import DeviceExchange, Form, form_of

_BESIDE_STEPS = (StartWeights, StageWeights, PackWeights, SettleWeights, PrepareAdapter)
"""Calls that touch nothing that steps read, unless weights are written in place."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class DeviceRankTeam(RankTeam):
    """A team over devices. Satisfies `model.cuda.ranked_model.DeviceFollowers`.

    Each process sees one device, and calls it the first. What ranks are told to compute they launch later than rank 0
    does, so calls that must find it launched wait for that.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            _check_devices(config.tensor_parallel_size, torch.cuda.device_count())
        self._directory = tempfile.mkdtemp(prefix="rollout-engine-ranks-")
        self._rendezvous = f"file://{self._directory}/rendezvous"
        super().__init__(config)

    def forward_on_device(
        self, forms: list[Form], num_decodes: int, pool: int, *, has_adapters: bool, is_routed: bool
    ) -> None:
        self._tell(ForwardOnDevice(forms, num_decodes, pool, has_adapters, is_routed))

    def head(self, states: Tensor) -> None:
        self._tell(HeadOnDevice(form_of(states)))
        self.exchange.send([states])

    def forward_dense(self, input_ids: Tensor, adapter_rows: AdapterRows | None, experts: Tensor | None) -> NoReturn:
        raise AssertionError("sequences are scored over KV pools")

    def open_pool(self, pool: int, num_blocks: int) -> None:
        self._tell(OpenPool(pool, num_blocks))

    def close_pool(self, pool: int) -> None:
        self._tell(ClosePool(pool))

    def shutdown(self) -> None:
        super().shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _exchange(self, memory: int) -> DeviceExchange:
        assert self._rendezvous is not None, "devices are connected"
        self.exchange = DeviceExchange(memory, 0, self.num_ranks, self._device, self._rendezvous)
        return self.exchange

    def _environment(self, rank: int) -> Mapping[str, str]:
        if self._device.type != "cuda":
            return {}
        visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
        return {_VISIBLE: visible[rank].strip() if visible else str(rank)}

    def _settle(self, message: CallMessage) -> None:
        if not isinstance(message, _BESIDE_STEPS) or getattr(message, "inplace", False):
            self._tell(Meet())
            self.exchange.turns.meet()


def _check_devices(num_ranks: int, num_devices: int) -> None:
    if num_devices < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} with device='cuda' needs {num_ranks} devices, one for each rank, and "
            f"this process sees {num_devices} ({_VISIBLE}={os.environ.get(_VISIBLE, 'not set')}). Lower it, or make "
            "more devices visible."
        )
