"""Weight updates: by a torch group of trainer and server, or from a directory."""

from typing import Any

import msgspec

from rollout_engine.base.errors import LifecycleError, RequestError
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.pending_update import report_fields
from rollout_engine.serve.plain_group import PlainGroup
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served

_GROUP_SECONDS = 300.0


class InitInfo(msgspec.Struct, kw_only=True):
    """How a trainer and this server find one another."""

    master_address: str
    master_port: int | str
    world_size: int
    rank_offset: int = 1
    backend: str = "gloo"
    group_name: str = "weights"
    timeout: float = _GROUP_SECONDS
    packed: bool = False


class InitBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    init_info: InitInfo


async def init_weight_transfer_engine(served: Served, asked: Asked) -> Reply:
    """Form a torch group with a trainer, which is rank 0 of it and must call at the same time."""
    info: InitInfo = asked.body.init_info
    if info.packed:
        raise RequestError.for_field("packed", True, "false: tensors come one by one")
    await join(served, info.backend, info.master_address, info.master_port, info.rank_offset, info.world_size,
               info.group_name, info.timeout)  # fmt: skip
    return Reply({"success": True, "message": f"rank {info.rank_offset} of {info.world_size} is ready"})


async def join(
    served: Served, backend: str, address: str, port: int | str, rank: int, world_size: int, name: str, seconds: float
) -> None:
    """Make the group that brings weights. What an update of an earlier trainer has left is dropped."""
    if backend != "gloo":
        message = f"backend='{backend:.40}' is not served over HTTP: give 'gloo', or send a directory of weights."
        raise served.not_supported(message)
    if not str(port).isdecimal() or not 0 < int(port) < 65536:
        raise RequestError.for_field("master_port", port, "a port, 1 to 65535")
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "name": name, "seconds": seconds}
    served.updates.drop()
    served.updates.group = None  # the former one's trainer may be gone, whether another one comes or not
    served.updates.group = await run_in_thread(PlainGroup.join, address, int(port), **options)


class StartBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    is_checkpoint_format: bool | None = None


async def start_weight_update(served: Served, asked: Asked) -> Reply:
    """Begin an update. What an earlier one left is dropped."""
    served.updates.begin()
    return Reply({"success": True, "weight_version": served.weight_version})


class UpdateInfo(msgspec.Struct, kw_only=True):
    """The tensors that the trainer broadcasts next, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False


class UpdateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request: tensors to come, or a directory."""

    update_info: UpdateInfo | None = None
    weight_dir: str | None = None
    weight_version: int | str | None = None


async def update_weights(served: Served, asked: Asked) -> Reply:
    """Take tensors of an update from the group; or a whole update from a published store or a checkpoint directory."""
    body: UpdateBody = asked.body
    if (body.update_info is None) == (body.weight_dir is None):
        raise RequestError.for_field("update_info", None, "given, or weight_dir in its place: one of them")
    if body.weight_dir is not None:
        return Reply(report_fields(await served.updates.load(body.weight_dir, body.weight_version)))
    info = body.update_info
    assert info is not None
    if info.packed:
        raise RequestError.for_field("packed", True, "false: tensors come one by one")
    if body.weight_version is not None:
        served.updates.expect(body.weight_version)
    await served.updates.receive(served.updates.specs(info.names, info.dtype_names, info.shapes))
    return Reply({"success": True, "num_tensors": len(info.names), "weight_version": served.weight_version})


class FinishBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    weight_version: int | str | None = None


async def finish_weight_update(served: Served, asked: Asked) -> Reply:
    """Commit the update that was begun, whole or not at all. Asked again with its version, it reports the same."""
    return Reply(report_fields(await served.updates.end("finish_weight_update", asked.body.weight_version)))


class FetchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    target_version: int | str | None = None
    sync_dir: str | None = None
    uri: str | None = None


async def fetch_weights(served: Served, asked: Asked) -> Reply:
    """Load weights from a directory of this machine: a published store, or a safetensors checkpoint."""
    body: FetchBody = asked.body
    path = body.sync_dir or (body.uri or "").removeprefix("file://")
    if not path or "://" in path:
        raise RequestError.for_field("uri", body.uri, "a directory of this machine, or sync_dir in its place")
    return Reply(report_fields(await served.updates.load(path, body.target_version)))


async def weight_info(served: Served, asked: Asked) -> Reply:
    """Names, dtypes and shapes of the weights, their digest, and the live version."""
    weights = await served.updates.weights()
    [digest, *_] = await served.engine.collective_rpc("get_weight_digest")
    names = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in weights.items()}
    return Reply({"weights": names, "digest": digest, "weight_version": served.weight_version})


class CheckerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    action: str = "checksum"


async def weight_checker(served: Served, asked: Asked) -> Reply:
    """Digests of the live weights ("checksum"); remember them ("snapshot"); name those that changed ("compare")."""
    action = asked.body.action
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
