"""The weight update that every face offers."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakKeyDictionary

import msgspec
from torch import nn

from rollout_engine.base.errors import ManifestMismatchError, WeightUpdateError, as_weight_errors, refused
from rollout_engine.base.messages import KvMode, Staging, UpdateMode, UpdateOptions
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.provenance import note_sent, weights_state
from rollout_engine.base.structs import plain
from rollout_engine.engine.client import EngineClient
from rollout_engine.faces.adapter_updates import update_adapter
from rollout_engine.telemetry.spans import Spans
from sync.adapters import has_merged
from sync.base import WeightSource
from sync.change_notice import ChangeNotice
from sync.source import gathers_finished, read_source

_notices: "WeakKeyDictionary[HasUpdates, ChangeNotice]" = WeakKeyDictionary()
"""The notice of each front end, which is logged once."""


class HasUpdates(Protocol):
    """A front end, as an update sees it."""

    num_updates: int

    @property
    def client(self) -> EngineClient: ...
    @property
    def spans(self) -> Spans: ...


def update_weights(
    frontend: HasUpdates,
    source: WeightSource,
    *,
    version: int | None = None,
    mode: UpdateMode = "keep",
    kv: KvMode = "keep",
    staging: Staging = "auto",
    transport: str | None = None,
    reset_version: bool = False,
    allow_nonfinite: bool = False,
    timeout: float = 300,
    partial: bool = False,
    merge: bool = True,
    delta: bool = True,
    draft: bool = False,
) -> UpdateReport:
    """Replace the live weights between two steps, wholly or not at all.

    Args:
        source: nn.Module, dict, iterator of (name, tensor), or path of a published store, of a checkpoint (quantised or
            not) or of a GGUF file, whose configuration, if it has one, must be that of the engine; floating dtypes are
            cast to the engine's. Its tensors must not change meanwhile. A module may be compiled or under DDP, FSDP1
            or FSDP2 (other ranks call `sync.join_gathers`, which also returns if this raises); of a `PeftModel` the
            active adapters are merged into the sent weights, and its own weights are not touched. A checkpoint that is
            rewritten meanwhile is refused.
        version: of the new weights, higher than the live one; None: a published store's own, else one more than
            the live version.
        mode: of requests in flight. "keep": they continue under the new weights. "wait": they finish first, under the
            old ones (an engine in this process is stepped by this call, as others may). "abort": they end with the
            tokens they have, and continue when resubmitted with these and their seed. New requests wait in the last
            two.
        kv: "keep": requests in flight continue over their old KV, recorded in `kv_min_version`. "recompute": they
            compute it again under the new weights.
        staging: "shadow": a copy next to the live weights, which serve until the commit. "inplace": over them, with
            no memory but theirs; no steps meanwhile, and after a failure none before a complete update. "auto":
            "shadow" if memory allows, "inplace" if the live weights are incomplete anyway.
        transport: in process "inproc"; to an engine in a process of its own "shm" (shared memory, the default),
            "store", "gloo", or "ipc" if both use one CUDA device. A path needs none.
        reset_version: allow any `version`, for a trainer that restarted.
        allow_nonfinite: take NaN and infinities, which are refused otherwise.
        timeout: seconds for the weights to arrive, requests in flight to finish, and other work of the engine to end.
        partial: `source` may lack weights, which keep their values: a transaction as of all, whose version and digest
            are those of all live weights. After `DirtyWeightsError`, or a sleep that discarded the weights, send all. A
            fleet takes a part once all weights were sent; both as tensors then, not as a path.
        merge: False sends the active LoRA of a `PeftModel` alone, for requests that name it (`docs/adapters.md`).
        delta: skip tensors, and pieces of 512 KiB, whose digest equals that of the live ones, if that
            saves most of the bytes; the report has the number of staged bytes. False: send and stage all again.
        draft: they are of `SpeculationConfig.draft_model`, with versions of its own.

    Raises the weight errors of `rollout_engine.base.errors`; then the old weights serve on (after `DirtyWeightsError`
    nothing does). `LifecycleError` while another update is open or the weights are released; `DrainTimeoutError`
    when requests do not finish in time.
    """
    options = UpdateOptions.from_values(
        mode=mode, kv=kv, staging=staging, transport=transport, reset_version=reset_version,
        allow_nonfinite=allow_nonfinite, timeout=timeout, partial=partial, delta=delta, draft=draft,
    )  # fmt: skip
    return _carry_out_and_note(merge, frontend, source, version, options)


def _carry_out_and_note(
    merge: object, frontend: HasUpdates, source: WeightSource, version: int | None, options: UpdateOptions
) -> UpdateReport:
    """Carry the update out, and note on a module which version it was sent as, for `exact.check`."""
    state = weights_state(source)
    try:
        report = _carry_out_of(merge)(frontend, source, version, options)
    finally:
        frontend.num_updates += 1
    if not options.draft:
        note_sent(source, state, report.version)
    return report


def _carry_out_of(merge: object) -> Callable[[HasUpdates, WeightSource, int | None, UpdateOptions], UpdateReport]:
    if type(merge) is not bool:
        raise WeightUpdateError(refused("merge", merge, "True, or False for a LoRA that is sent by itself"))
    return _carry_out if merge else _carry_out_adapter


def _carry_out(frontend: HasUpdates, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
    def send(source: WeightSource) -> UpdateReport:
        with _naming_draft_model(frontend, options):
            return frontend.spans.update(lambda: frontend.client.update_weights(source, plain(version), options))

    if isinstance(source, str | os.PathLike | Iterator):
        return send(source)  # an iterator is read once the update has begun: another one refuses it before
    with as_weight_errors():
        pairs = read_source(source)
    with as_weight_errors(), gathers_finished(pairs):
        report = send(pairs)
    if has_merged(tensor for _, tensor in pairs):
        return msgspec.structs.replace(report, adapter="merged")
    if not options.partial and report.changed_share is not None:
        _notice_of(frontend).warn_if_hardly_changed(pairs, report.changed_share / _share_trained(source))
    return report


def _share_trained(source: WeightSource) -> float:
    """The share of a module's weights that are trained: others cannot change. 1 if that is not known."""
    weights = list(source.parameters()) if isinstance(source, nn.Module) else []
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return trained / sum(weight.numel() for weight in weights) if trained else 1.0


@contextmanager
def _naming_draft_model(frontend: HasUpdates, options: UpdateOptions) -> Iterator[None]:
    """Add to a `ManifestMismatchError` of a draft update that its weights were compared with the draft model's."""
    try:
        yield
    except ManifestMismatchError as problem:
        speculation = frontend.client.info.config.speculates
        if not options.draft or speculation is None:
            raise
        model = f"draft=True sends them to the draft model '{speculation.draft_model}'"
        raise ManifestMismatchError(f"{problem} {model}; leave it out for the policy's weights.") from problem


def _carry_out_adapter(
    frontend: HasUpdates, source: WeightSource, version: int | None, options: UpdateOptions
) -> UpdateReport:
    report = frontend.spans.update(lambda: update_adapter(frontend.client, source, plain(version), options))
    return msgspec.structs.replace(report, adapter="alone")


def _notice_of(frontend: HasUpdates) -> ChangeNotice:
    if frontend not in _notices:
        _notices[frontend] = ChangeNotice()
    return _notices[frontend]
