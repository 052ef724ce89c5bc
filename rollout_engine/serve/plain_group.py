"""A torch process group of a trainer and this server, as `torch.distributed.init_process_group` makes one.

Trainers that speak SGLang's dialect make such a group beside their own: rank 0 is the trainer, and each tensor is one
broadcast from it. The store and the keys are torch's, so any such trainer can be at the other end. On a CPU the
backend is gloo.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from rollout_engine.base.errors import TransferTimeoutError, WeightUpdateError
from sync.groups import GroupConfig, own_address
from sync.manifest import TensorSpec, torch_dtype

_c10d: Any = dist


class PlainGroup:
    """This process's rank in a group whose rank 0 is a trainer."""

    def __init__(self, group: Any, seconds: float) -> None:
        self._group, self._seconds = group, seconds

    @classmethod
    def join(cls, address: str, port: int, *, rank: int, world_size: int, name: str, seconds: float) -> Self:
        """Meet the trainer at its store, within `seconds`; each later broadcast may take as long. Blocks.

        Raises `TransferTimeoutError` if not all ranks connect, and `WeightUpdateError` for an impossible group.
        """
        if not 0 < rank < world_size:
            what = f"rank_offset={rank}, world_size={world_size}"
            raise WeightUpdateError(f"{what} is not allowed: the trainer is rank 0, this server a higher one.")
        timeout = timedelta(seconds=seconds)
        try:
            store = _c10d.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
            for prefix in (name, f"{name}/", "cpu/"):
                store = _c10d.PrefixStore(prefix, store)
            options = _c10d.ProcessGroupGloo._Options()
            options._timeout = timeout
            at = own_address(GroupConfig(f"tcp://{address}:{port}", rank, world_size, seconds))
            options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=at)]
            return cls(_c10d.ProcessGroupGloo(store, rank, world_size, options), seconds)
        except (RuntimeError, OSError) as problem:  # torch's errors of networks and timeouts are RuntimeErrors
            what = f"The group '{name}' of {world_size} ranks did not form at {address}:{port} within {seconds:g} s"
            raise TransferTimeoutError(f"{what} ({problem}). Is the trainer's rank 0 there?") from problem

    def receive(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
        """Take one broadcast for each tensor, in this order. Blocks; raises `TransferTimeoutError`."""
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._seconds)
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
            try:
                self._group.broadcast([tensor], options).wait()
            except RuntimeError as problem:
                raise TransferTimeoutError(f"'{spec.name}' did not come by its group ({problem}).") from problem
            yield spec.name, tensor
