"""Plan chunks behind different numbers of decodes for a Hopper, and print how many kernels that compiles.

python -m tests.unit.kernels.triton.list_on_hopper
"""

from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rollout_engine.kernels.triton.work import WorkList
from tests.unit.kernels.triton.compile_calls_for_hopper import Hopper


def main() -> None:
    """Compile, and print the number."""
    driver.set_active(Hopper())
    launch, compiled = JITFunction.run, set[str]()

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if self.__name__ == "_list_items":
            compiled.add(kernel.hash)
        return kernel

    JITFunction.run = compile_only
    shape = {"tokens_per_item": 16, "unit": 64, "num_kv_heads": 8, "num_programs": 132, "is_whole": False}
    work = WorkList(100, **shape, device="cpu")
    starts, lens = torch.arange(65, dtype=torch.int32), torch.ones(64, dtype=torch.int32)
    for count in (0, 1, 4, 7):
        work.fill(starts[count:], lens[count:], first_sequence=count)
    print(len(compiled))


if __name__ == "__main__":
    main()
