"""Says in one sentence what this machine lacks to run what needs a GPU, before anything else starts or is written.

python -m tests.gpu_check    exit status 1 and that sentence, or 0 and no output
"""

import importlib
import importlib.util
import sys

_MODULES = ("torch", "transformers", "tensordict", "msgspec", "triton", "pytest", "hypothesis")
"""Imported by the tests and benchmarks that need a GPU; a Python that is not set up for them lacks most."""


def missing() -> str | None:
    """One sentence on what is missing here; None where tests and benchmarks of a GPU can run."""
    if absent := [name for name in _MODULES if importlib.util.find_spec(name) is None]:
        return (
            f"This needs Python packages that {sys.executable} lacks: {', '.join(absent)}; name a Python that has "
            "them, as in: make test-gpu PYTHON=path/to/python."
        )
    torch, backends = map(importlib.import_module, ("torch", "rollout_engine.model.backends"))
    reason = backends.unsupported_reason(torch.device("cuda", 0))
    return None if reason is None else f"This needs a GPU, and device='cuda' is not possible: {reason}."


def require_gpu() -> None:
    """Raise `SystemExit` with the sentence of `missing`, if there is one."""
    if (sentence := missing()) is not None:
        raise SystemExit(sentence)


if __name__ == "__main__":
    require_gpu()
