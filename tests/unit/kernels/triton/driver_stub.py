"""Launches of compiled kernels without a device: a stub of the driver library keeps what each passes.

`activate()` once in a process, which has TRITON_INTERPRET=0, before anything is launched. Tensors are in host memory.
"""

import ctypes
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

SOURCE = Path(__file__).with_name("libcuda_stub.c")
BITS = {"u64": 64, "s64": 64, "b64": 64, "f64": 64, "u32": 32, "s32": 32, "b32": 32, "f32": 32, "u16": 16, "b16": 16}
BITS |= {"u8": 8, "s8": 8, "b8": 8}


class Launch(NamedTuple):
    """What one launch passed to the driver."""

    function: int
    grid: tuple[int, int, int]
    block: int
    shared: int
    arguments: tuple[bytes, ...]


class _Launch(ctypes.Structure):
    _fields_ = [
        *(("function", ctypes.c_int64), ("grid", ctypes.c_int32 * 3), ("block", ctypes.c_int32)),
        *(("shared", ctypes.c_int32), ("num_bytes", ctypes.c_int32), ("bytes", ctypes.c_ubyte * 1024)),
    ]


class DriverStub:
    """Triton's view of the device, and what was launched on it."""

    def __init__(self, library: ctypes.CDLL, capability: int) -> None:
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils  # needs the library to be loaded

        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.kernels: dict[int, CompiledKernel] = {}
        self._library, self._capability = library, capability
        self._sizes: dict[int, list[int]] = {}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def declare(self, kernel: CompiledKernel) -> None:
        """Tell the library the sizes of the kernel's arguments, as its PTX has them."""
        header = re.search(r"\.entry [^(]*\((.*?)\)", kernel.asm["ptx"], re.DOTALL).group(1)
        sizes = [BITS[kind] // 8 for kind in re.findall(r"\.param \.(\w+)", header)]
        assert len(sizes) == header.count(".param"), header
        self._library.stub_declare(ctypes.c_int64(kernel.function), len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        self._sizes[kernel.function], self.kernels[kernel.function] = sizes, kernel

    @property
    def num_launches(self) -> int:
        """Launches so far."""
        return ctypes.c_int64.in_dll(self._library, "num_launches").value

    def last_launch(self) -> Launch:
        """The newest launch."""
        out = _Launch.in_dll(self._library, "last_launch")
        data, arguments, at = bytes(out.bytes), [], 0
        for size in self._sizes[out.function]:
            arguments.append(data[at : at + size])
            at += size
        return Launch(out.function, tuple(out.grid), out.block, out.shared, tuple(arguments))


def activate(folder: Path, capability: int = 90) -> DriverStub:
    """Build the stub in `folder`, and make it Triton's driver for good."""
    library = folder / "libcuda.so.1"
    include = Path(nvidia.__file__).parent / "include"
    command = ["gcc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{include}", SOURCE, "-o", library]
    subprocess.run(command, check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    stub = DriverStub(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL), capability)
    load = CompiledKernel._init_handles

    def load_and_declare(kernel: Any) -> None:
        is_new = kernel.module is None
        load(kernel)
        if is_new:
            stub.declare(kernel)

    CompiledKernel._init_handles = load_and_declare
    driver.set_active(stub)
    return stub
