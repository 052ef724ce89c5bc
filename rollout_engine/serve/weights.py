"""Routes of weight updates, in both dialects: the steps are `PendingUpdate`'s.

            vLLM's                          SGLang's
join        init_weight_transfer_engine     init_weights_update_group, destroy_weights_update_group
begin       start_weight_update             begin_weight_update
take        update_weights                  update_weights_from_distributed, update_weights_from_tensor
end         finish_weight_update            end_weight_update, or the last of the model's tensors
load        update_weights, fetch_weights   update_weights_from_disk
"""

import base64
import binascii
from typing import Any

import msgspec

from rollout_engine.base.errors import LifecycleError, RequestError, RPCError
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.threads import run_in_thread
from rollout_engine.engine import verbs
from rollout_engine.faces.verb_methods import awaitable
from rollout_engine.serve.pending_update import GroupFields, as_version, report_fields
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served

_get_own_names = awaitable(verbs.get_own_names)


class InitInfo(GroupFields, kw_only=True):
    """The group that a client of vLLM asks for."""

    packed: bool = False


async def init_weight_transfer_engine(served: Served, asked: Asked, *, init_info: InitInfo) -> Reply:
    """Form a torch group with a trainer, which is rank 0 of it and must call at the same time."""
    _check_packing(init_info)
    return Reply({"success": True, "message": await served.updates.join(init_info)})


class InitBody(GroupFields, kw_only=True, forbid_unknown_fields=True):
    """The group that a client of SGLang asks for."""

    rank_offset: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


async def init_weights_update_group(served: Served, asked: Asked) -> Reply:
    """Form a torch group with a trainer, which is rank 0 of it and must call at the same time."""
    return Reply({"success": True, "message": await served.updates.join(asked.body)})


async def destroy_weights_update_group(served: Served, asked: Asked, *, group_name: str | None = None) -> Reply:
    """Leave the group, and drop tensors of an update that was not finished."""
    served.updates.drop()
    served.updates.group = None
    return Reply({"success": True, "message": "The group is gone."})


async def start_weight_update(served: Served, asked: Asked, *, is_checkpoint_format: bool | None = None) -> Reply:
    """Begin an update. What an earlier one left is dropped."""
    served.updates.begin()
    return Reply({"success": True, "weight_version": served.weight_version})


async def begin_weight_update(served: Served, asked: Asked, *, weight_version: int | str | None = None) -> Reply:
    """Begin an update. What an earlier one left is dropped."""
    served.updates.begin(weight_version)
    return Reply({"success": True, "message": "Send the tensors."})


class UpdateInfo(msgspec.Struct, kw_only=True):
    """The tensors that the trainer broadcasts next, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False


async def update_weights(
    served: Served,
    asked: Asked,
    *,
    update_info: UpdateInfo | None = None,
    weight_dir: str | None = None,
    weight_version: int | str | None = None,
) -> Reply:
    """Take tensors of an update from the group; or a whole update from a published store or a checkpoint directory."""
    info = update_info
    if (info is None) == (weight_dir is None):
        raise RequestError.for_field("update_info", None, "given, or weight_dir in its place: one of them")
    if weight_dir is not None:
        return Reply(report_fields(await served.updates.load(weight_dir, weight_version)))
    assert info is not None
    _check_packing(info)
    if weight_version is not None:
        served.updates.expect(weight_version)
    await served.updates.receive(served.updates.specs(info.names, info.dtype_names, info.shapes))
    return Reply({"success": True, "num_tensors": len(info.names), "weight_version": served.weight_version})


class CommonBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request that brings weights."""

    weight_version: int | str | None = None
    flush_cache: bool | None = None
    """Changes nothing: KV is keyed by the version that made it."""
    abort_all_requests: bool = False
    """End requests in flight with the tokens they have; they need not end for an update."""
    abort_all_request: bool = False
    """The same, as some clients write it."""
    torch_empty_cache: bool | None = None
    load_format: str | None = None
    partial: bool = False
    """Commit the tensors that have arrived: the model's others keep their values."""


class DistributedBody(CommonBody, kw_only=True):
    """Fields of a request."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str | None = None


async def update_weights_from_distributed(served: Served, asked: Asked) -> Reply:
    """Take tensors from the group; once all of the model's have come, the engine changes over to them."""
    body: DistributedBody = asked.body
    _check_format(body, ())
    specs = served.updates.specs(body.names, body.dtypes, body.shapes)
    served.updates.expect(body.weight_version)
    await _abort(served, body)
    await served.updates.receive(specs)
    return await _commit_if_complete(served, body)


class TensorBody(CommonBody, kw_only=True):
    """Fields of a request."""

    serialized_named_tensors: list[str]
    """Base64 of safetensors files, one for each rank: this server has one."""


async def update_weights_from_tensor(served: Served, asked: Asked) -> Reply:
    """Take the tensors of a body: the bytes of a safetensors file in base64. Pickles are refused."""
    body: TensorBody = asked.body
    _check_format(body, ("safetensors",))
    if len(body.serialized_named_tensors) != 1:
        count = f"{len(body.serialized_named_tensors)} files"
        raise RequestError.for_field("serialized_named_tensors", count, "one: this server is one rank")
    pairs = await run_in_thread(tensors_of, body.serialized_named_tensors[0], "serialized_named_tensors")
    served.updates.expect(body.weight_version)
    await _abort(served, body)
    await served.updates.add(pairs)
    return await _commit_if_complete(served, body)


async def finish_weight_update(served: Served, asked: Asked, *, weight_version: int | str | None = None) -> Reply:
    """Commit the update that was begun, whole or not at all. Asked again with its version, it reports the same."""
    return Reply(report_fields(await served.updates.end("finish_weight_update", weight_version)))


async def end_weight_update(served: Served, asked: Asked, *, weight_version: int | str | None = None) -> Reply:
    """Commit the update that was begun, whole or not at all. Asked again with its version, it reports the same."""
    return Reply(report_fields(await served.updates.end("end_weight_update", weight_version)))


async def fetch_weights(
    served: Served,
    asked: Asked,
    *,
    target_version: int | str | None = None,
    sync_dir: str | None = None,
    uri: str | None = None,
) -> Reply:
    """Load weights from a directory of this machine: a published store, a checkpoint or a GGUF file."""
    path = sync_dir or (uri or "").removeprefix("file://")
    if not path or "://" in path:
        raise RequestError.for_field("uri", uri, "a directory of this machine, or sync_dir in its place")
    return Reply(report_fields(await served.updates.load(path, target_version)))


class DiskBody(CommonBody, kw_only=True):
    """Fields of a request."""

    model_path: str
    is_async: bool | None = None
    keep_pause: bool | None = None
    recapture_cuda_graph: bool | None = None
    token_step: int | None = None
    files: None = None
    manifest: None = None


async def update_weights_from_disk(served: Served, asked: Asked) -> Reply:
    """Take a whole update from a published store, a checkpoint or a GGUF file of this machine."""
    body: DiskBody = asked.body
    _check_format(body, ("auto", "gguf", "safetensors"))
    as_version(body.weight_version)
    await _abort(served, body)
    report = await served.updates.load(body.model_path, body.weight_version, partial=body.partial)
    if not body.partial:
        served.model_path = body.model_path
    return Reply({**report_fields(report), "num_paused_requests": 0})


async def update_weight_version(
    served: Served, asked: Asked, *, new_version: int | str, abort_all_requests: bool = False
) -> Reply:
    """Confirm the live version. A version belongs to its weights: no other can be given to weights that serve."""
    new, live = as_version(new_version), served.weight_version
    if new != live:
        what = f"the live weights have version {live}, and a version belongs to its weights"
        raise HttpProblem(409, f"update_weight_version: {what}. Send weight_version={new} with the update itself.")
    return Reply({"success": True, "message": f"The version is {live}.", "new_version": served.version_text})


async def weight_info(served: Served, asked: Asked) -> Reply:
    """Names, dtypes and shapes of the weights, their digest, and the live version."""
    weights = await served.updates.weights()
    [digest, *_] = await served.engine.collective_rpc("get_weight_digest")
    names = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in weights.items()}
    return Reply({"weights": names, "digest": digest, "weight_version": served.weight_version})


async def weight_checker(served: Served, asked: Asked, *, action: str = "checksum") -> Reply:
    """Digests of the live weights ("checksum"); remember them ("snapshot"); name those that changed ("compare")."""
    if action not in ("checksum", "snapshot", "compare"):
        hint = "Weights are not overwritten for a test."
        raise RequestError.for_field("action", action, "'checksum', 'snapshot' or 'compare'", hint)
    [digests, *_] = await served.engine.collective_rpc("get_tensor_digests")
    if action == "checksum":
        return Reply({"success": True, "checksums": digests, "weight_version": served.weight_version})
    if action == "snapshot":
        served.known_digests = digests
        return Reply({"success": True, "num_tensors": len(digests)})
    if served.known_digests is None:
        raise LifecycleError("weight_checker: there is nothing to compare with: call it with action='snapshot' first.")
    changed = [name for name, digest in digests.items() if served.known_digests.get(name) != digest]
    return Reply({"success": True, "changed": changed, "weight_version": served.weight_version})


async def get_weights_by_name(served: Served, asked: Asked, *, name: str, truncate_size: int = 100) -> Reply:
    """The first rows of one weight, by the module's name for it, or one that checkpoints of it have.

    Of a model that is cut over ranks, those that rank 0 has.
    """
    metadata = await served.engine.get_model_metadata()
    if name not in metadata:
        [name] = await _get_own_names(served.engine, [name])
    try:
        [rows, *_] = await served.engine.collective_rpc("get_weight_rows", args=(name, truncate_size))
    except RPCError as problem:
        raise HttpProblem(400, str(problem), field="name") from problem
    _, shape = metadata[name]
    if len(shape) == 2 and rows and len(rows[0]) != shape[1]:
        what = f"no rank has a whole row of '{name}', because ranks split sums without deterministic=True"
        raise HttpProblem(400, f"get_weights_by_name: {what}. Give that to the engine.", field="name")
    return Reply(rows)


async def post_process_weights(served: Served, asked: Asked) -> Reply:
    """Nothing is left to do after an update here; clients of patched servers ask for it."""
    return Reply({"success": True, "message": "Nothing to do."})


def _check_packing(info: InitInfo | UpdateInfo) -> None:
    if info.packed:
        raise RequestError.for_field("packed", True, "false: tensors come one by one")


def _check_format(body: CommonBody, known: tuple[str, ...]) -> None:
    if body.load_format not in (None, "", *known):
        one_by_one = "left out: tensors come one by one, under their own names"
        raise RequestError.for_field("load_format", body.load_format, one_by_one)


async def _abort(served: Served, body: CommonBody) -> None:
    if body.abort_all_requests or body.abort_all_request:
        await served.engine.abort(served.ids_of())


async def _commit_if_complete(served: Served, body: CommonBody) -> Reply:
    if not (body.partial or served.updates.waits_for_end) and await served.updates.have_arrived_late():
        return _reply_committed(await served.updates.commit_late())
    missing = [] if body.partial else await served.updates.missing()
    if missing or served.updates.waits_for_end:
        message = (
            f"{len(missing)} of the model's weights have not come; until the update is complete the old ones serve"
        )
        live = str(served.weight_version)
        return Reply({"success": True, "message": message, "num_missing": len(missing), "weight_version": live})
    return _reply_committed(await served.updates.commit(body.weight_version, partial=body.partial))


def _reply_committed(report: UpdateReport) -> Reply:
    return Reply({**report_fields(report), "weight_version": str(report.version)})


def tensors_of(text: str, field: str) -> list[tuple[str, Any]]:
    """The tensors of a safetensors file in base64, the value of `field`. Raises `RequestError`."""
    from safetensors import SafetensorError
    from safetensors.torch import load as load_safetensors

    bound = "the bytes of a safetensors file in base64: base64.b64encode(safetensors.torch.save({name: tensor, ...}))"
    try:
        return list(load_safetensors(base64.b64decode(text, validate=True)).items())
    except (binascii.Error, ValueError, SafetensorError) as problem:
        what = "Pickles are never read." if text.startswith(("gA", "UEs")) else f"It cannot be read: {problem}."
        raise RequestError.for_field(field, text[:24] + "...", bound, what) from None
