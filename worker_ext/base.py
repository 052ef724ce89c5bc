"""Methods of a worker that are called from outside by name: subclass `WorkerExtension`, mark them with `@rpc`.

    class LargestWeights(WorkerExtension):
        @rpc
        def largest_weights(self, count: int = 3) -> dict[str, float]:
            norms = {name: tensor.norm().item() for name, tensor in self.worker.live_weights().items()}
            return dict(sorted(norms.items(), key=lambda item: -item[1])[:count])

    engine = LLM(path, worker_extensions=[LargestWeights])  # or by name: "my_package.weights:LargestWeights"
    engine.collective_rpc("largest_weights", kwargs={"count": 5})     # one result per rank

Annotate every argument and the result, with types that msgspec supports, `torch.Tensor` or `numpy.ndarray`: calls are
checked against the annotations. A call runs between two steps, never inside one; methods marked `@rpc_beside_steps` run
on a thread of their own instead. Arrays cross processes without a copy, so return none that changes afterwards; structs
arrive as dicts and tuples as lists.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from torch import Tensor, nn

from sync.base import WeightReceiver
from sync.manifest import WeightManifest

_Method = TypeVar("_Method", bound=Callable[..., Any])
_MARK = "_rpc_runs"


class WeightTransaction(Protocol):
    """The one weight update of a worker that RPC calls may have open. Every method raises if it is out of order."""

    def metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every name that an update may send."""

    def digest(self) -> str:
        """Total digest of the live weights under the module's own names."""

    def manifest(self, verb: str) -> WeightManifest:
        """The manifest of the open update. Raises, naming `verb`, if none is open."""

    def begin(
        self, manifest: WeightManifest, *, reset_version: bool, timeout: float = 300.0, partial: bool = False
    ) -> bool:
        """Open an update, to be committed within `timeout` seconds; False where these very weights are live under this
        version. `partial`: weights that the manifest leaves out keep their values."""

    def stage(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors into the staging memory of the next weights."""

    def receive(self, receiver: WeightReceiver, manifest: WeightManifest | None = None) -> None:
        """Stage the tensors of `manifest` (None: all of the open update) as `receiver` brings them.

        Faster than `stage`, and it ends when the client that began the update leaves.
        """

    def verify(self) -> str:
        """Total digest of the staged tensors. Raises unless they are all of the manifest, unchanged and finite."""

    def commit(self, version: int, kv: Literal["keep", "recompute"]) -> str:
        """Make the staged weights live between two steps; returns the digest of the live weights."""

    def abort(self) -> None:
        """Drop the staged tensors and close the update. No-op without an open update."""


class WorkerLike(Protocol):
    """The worker as an extension sees it. All attributes are for reading."""

    rank: int
    """Index of this worker among those of one engine, from 0."""
    vocab_size: int
    """Width of the logits."""
    max_model_len: int
    """Largest number of tokens of one sequence."""

    @property
    def module(self) -> nn.Module:
        """The Hugging Face module that serves. Read its structure here, and its values from `live_weights`."""

    @property
    def update(self) -> WeightTransaction:
        """Weight updates. Use it in methods run by `rpc_beside_steps`, except `metadata` and `digest`."""

    def live_weights(self) -> Mapping[str, Tensor]:
        """Every weight under the module's name, tied ones once; not to be written. Each is read when it is asked for.

        Of a model that is cut over ranks, each has its own part of every weight (docs/ranks.md).
        Raises if they have no values: while an update is open, and after one that failed half-way or a sleep that
        dropped them.
        """

    def score(self, sequences: Sequence[list[int]], num_prompt: Sequence[int], temperature: float) -> list[np.ndarray]:
        """Log-prob float32 [len - num_prompt] of every token after the prompt, under the live weights."""

    def block_tables(self) -> dict[int, list[int]]:
        """Sequence id -> KV blocks, of every sequence that the worker holds state of. The ids are the core's."""

    def memory_usage(self) -> dict[str, int]:
        """Bytes resident now: "weights", "derived" (copies made of them), "kv_cache", "process" (all).

        With a draft model also "draft_model": all of it.
        """

    def watch_layers(self, watcher: Callable[[int, Tensor], None]) -> Callable[[], None]:
        """Call `watcher(layer, hidden)` with the output [T, H] of every decoder layer, in steps and scores alike.

        Returns a function that ends the calls. `hidden` is a copy. A watcher that raises is logged, and is not called
        again. Compiled layers run as modules meanwhile: more slowly, and to the same bits.
        """


class WorkerExtension:
    """Base of extensions. One is made per worker once its model is loaded; calls arrive one at a time."""

    def __init__(self, worker: WorkerLike) -> None:
        self.worker = worker

    def close(self) -> None:
        """Release the resources of the extension: the worker is shutting down."""


RESERVED = frozenset(
    "abort add_request apply_model close collective_rpc execute generate pause_generation reset_prefix_cache "
    "resume_generation score shutdown sleep step update_weights wake_up worker".split()
)
"""Names that RPC methods cannot have: verbs of the engine, and attributes of `WorkerExtension` itself."""


def rpc(method: _Method) -> _Method:
    """Mark a method of a `WorkerExtension` as one that can be called by name, between two steps."""
    setattr(method, _MARK, "between steps")
    return method


def rpc_beside_steps(method: _Method) -> _Method:
    """Mark a method as callable by name, on a thread of its own during steps: for long work on nothing shared."""
    setattr(method, _MARK, "beside steps")
    return method


def is_rpc(method: object) -> bool:
    """Whether the method can be called by name."""
    return getattr(method, _MARK, None) in ("between steps", "beside steps")


def runs_beside_steps(method: object) -> bool:
    """Whether the method is marked `rpc_beside_steps`."""
    return getattr(method, _MARK, None) == "beside steps"
