"""The other ranks of an engine where each has a device of its own."""

from typing import NoReturn

from torch import Tensor

from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.execution.rank_wire import (
    CallMessage,
    CaptureGraph,
    ClosePool,
    ForwardOnDevice,
    HeadOnDevice,
    Meet,
    OpenPool,
    PackWeights,
    PrepareAdapter,
    ReplayGraph,
    SettleWeights,
    StageWeights,
    StartWeights,
)
from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.model.ranks.group_exchange import Form, GroupExchange, form_of

_BESIDE_STEPS = (StartWeights, StageWeights, PackWeights, SettleWeights, PrepareAdapter)
"""Calls that touch nothing that steps read, unless weights are written in place."""


class DeviceRankTeam(RankTeam):
    """A team over devices. Satisfies `model.cuda.ranked_model.DeviceFollowers`.

    Each process sees one device, and calls it the first. What ranks are told to compute they launch later than rank 0
    does, so calls that must find it launched wait for that.
    """

    exchange: GroupExchange

    def forward_on_device(
        self, forms: list[Form], num_decodes: int, pool: int, *, has_adapters: bool, is_routed: bool
    ) -> None:
        self._tell(ForwardOnDevice(forms, num_decodes, pool, has_adapters, is_routed))

    def head(self, states: Tensor) -> None:
        self._tell(HeadOnDevice(form_of(states)))
        self.exchange.send([states])

    def forward_dense(self, input_ids: Tensor, adapter_rows: AdapterRows | None, experts: Tensor | None) -> NoReturn:
        raise AssertionError("sequences are scored over KV pools")

    def capture_graph(self, size: int, *, has_prefixes: bool, has_adapters: bool, is_first: bool) -> None:
        self._tell(CaptureGraph(size, has_prefixes, has_adapters, is_first))

    def replay_graph(self, size: int, *, has_prefixes: bool, has_adapters: bool) -> None:
        self._tell(ReplayGraph(size, has_prefixes, has_adapters))

    def open_pool(self, pool: int, num_blocks: int) -> None:
        self._tell(OpenPool(pool, num_blocks))

    def close_pool(self, pool: int) -> None:
        self._tell(ClosePool(pool))

    def _settle(self, message: CallMessage) -> None:
        if not isinstance(message, _BESIDE_STEPS) or getattr(message, "inplace", False):
            self._tell(Meet())
            self.exchange.meet()
