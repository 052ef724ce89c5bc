"""How long it takes until the engine is ready: `import rollout_engine`, and `LLM()` after all imports."""

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

_IMPORT = "import time; s = time.perf_counter(); import rollout_engine; print(time.perf_counter() - s)"
_LLM = """
import time, torch, transformers
from rollout_engine import LLM
s = time.perf_counter()
with LLM({directory!r}, dtype={dtype!r}, load_format="dummy", skip_tokenizer_init=True):
    print(time.perf_counter() - s)
"""


def of_import(runs: int = 7) -> dict[str, Any]:
    """Milliseconds of `import rollout_engine` in fresh processes."""
    seconds = [_seconds(_IMPORT) for _ in range(runs)]
    return {"milliseconds": round(statistics.median(seconds) * 1e3, 1), "best": round(min(seconds) * 1e3, 1)}


def of_engine(directory: Path, dtype: str, runs: int = 3) -> dict[str, Any]:
    """Seconds of `LLM()` in fresh processes; a first one, which may build kernels, does not count."""
    code = _LLM.format(directory=str(directory), dtype=dtype)
    first, *seconds = [_seconds(code) for _ in range(runs + 1)]
    return {
        "seconds": round(statistics.median(seconds), 2),
        "first": round(first, 2),
        "runs": [round(s, 2) for s in seconds],
    }


def _seconds(code: str) -> float:
    return float(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout)
