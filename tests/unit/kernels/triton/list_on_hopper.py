"""Plan chunks behind different numbers of decodes for a Hopper, and print how many kernels that compiles.

python -m tests.unit.kernels.triton.list_on_hopper
"""

import tempfile
from pathlib import Path

import torch

from rollout_engine.kernels.triton.work import WorkList
from tests.unit.kernels.triton.driver_stub import activate


def main() -> None:
    """Compile, and print the number."""
    shape = {"tokens_per_item": 16, "unit": 64, "num_kv_heads": 8, "num_programs": 132, "is_whole": False}
    work = WorkList(100, **shape, device="cpu")
    starts, lens = torch.arange(65, dtype=torch.int32), torch.ones(64, dtype=torch.int32)
    with tempfile.TemporaryDirectory() as folder:
        stub = activate(Path(folder))
        for count in (0, 1, 4, 7):
            work.fill(starts[count:], lens[count:], first_sequence=count)
    print(sum(kernel.name == "_list_items" for kernel in stub.kernels.values()))


if __name__ == "__main__":
    main()
