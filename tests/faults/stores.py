"""Published stores and checkpoints that nobody should read, each made from a good one by a function of its path."""

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

TENSOR = "model.norm.weight"
"""The tensor whose file or entry is tampered with."""
OTHER = "lm_head.weight"
FILE = f"{TENSOR}.memmap"


class BadStore(NamedTuple):
    """What is done to a good store or checkpoint, and what the error has to name."""

    tamper: Callable[[Path], object]
    named: str


def replaced(part: str, make: Callable[[Path], object]) -> BadStore:
    """A store with something else in place of one of its parts, which the error has to name."""

    def tamper(store: Path) -> None:
        path = store / part
        shutil.move(path, store.with_name("moved"))
        make(path)

    return BadStore(tamper, TENSOR if part == AT[FILE] else Path(part).name)


def changed(part: str, change: Callable[[Path], object]) -> BadStore:
    """A store of which one part has been changed."""
    return BadStore(lambda store: change(store / part), TENSOR if part == AT[FILE] else Path(part).name)


def forged(named: str, change: Callable[[dict[str, Any]], object]) -> BadStore:
    """A store whose manifest has been changed, and every digest of it."""

    def tamper(store: Path) -> None:
        path = store / AT["manifest.json"]
        manifest = json.loads(path.read_bytes())
        change(manifest)
        lines = sorted((t["name"], t["dtype"], t["shape"], t["digest"]) for t in manifest["tensors"])
        content = json.dumps(lines, separators=(",", ":"), ensure_ascii=False)
        manifest["digest"] = xxhash.xxh3_128_hexdigest(content.encode())
        path.write_text(json.dumps(manifest))
        sign(store)

    return BadStore(tamper, named)


def sign(store: Path) -> None:
    """Write into CURRENT the digest of the manifest as it is."""
    pointer = json.loads((store / "CURRENT").read_bytes())
    pointer["manifest_digest"] = xxhash.xxh3_128_hexdigest((store / AT["manifest.json"]).read_bytes())
    (store / "CURRENT").write_text(json.dumps(pointer))


AT = {name: f"versions/000001/{name}" for name in (FILE, "manifest.json", "meta.json", "lease")}


def entry(manifest: dict[str, Any]) -> dict[str, Any]:
    """The entry of TENSOR."""
    return next(tensor for tensor in manifest["tensors"] if tensor["name"] == TENSOR)


def repeat(manifest: dict[str, Any], names: list[str]) -> None:
    manifest["tensors"] += [entry(manifest) | {"name": name} for name in names]


def bind_socket(path: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as end:
        end.bind(path.name)


def link_elsewhere(path: Path) -> None:
    path.symlink_to(next(parent for parent in path.parents if (parent / "CURRENT").exists()).with_name("moved"))


def nest(path: Path) -> None:
    path.write_text('{"aliases":[' + "[" * 100_000)
    sign(path.parents[2])


def give_away(path: Path) -> None:
    os.chown(path, 12_345, -1)


def sparse(path: Path) -> None:
    os.truncate(path, 2**40)


STORES = {
    "a pipe as CURRENT": replaced("CURRENT", os.mkfifo),
    "a pipe as the manifest": replaced(AT["manifest.json"], os.mkfifo),
    "a pipe as TensorDict's metadata": replaced(AT["meta.json"], os.mkfifo),
    "a pipe as the lease": replaced(AT["lease"], os.mkfifo),
    "a pipe as a tensor": replaced(AT[FILE], os.mkfifo),
    "a socket as a tensor": replaced(AT[FILE], bind_socket),
    "a socket as CURRENT": replaced("CURRENT", bind_socket),
    "a link to a device as a tensor": replaced(AT[FILE], lambda path: path.symlink_to("/dev/zero")),
    "a directory as a tensor": replaced(AT[FILE], Path.mkdir),
    "a directory as CURRENT": replaced("CURRENT", Path.mkdir),
    "a linked tensor": replaced(AT[FILE], link_elsewhere),
    "a tensor that links to itself": replaced(AT[FILE], lambda path: path.symlink_to(path)),
    "a linked CURRENT": replaced("CURRENT", lambda path: path.symlink_to(path.parent.with_name("moved"))),
    "a linked manifest": replaced(AT["manifest.json"], link_elsewhere),
    "a linked lease": replaced(AT["lease"], link_elsewhere),
    "linked versions": replaced("versions", link_elsewhere),
    "a linked version": replaced("versions/000001", link_elsewhere),
    "versions that link to themselves": replaced("versions", lambda path: path.symlink_to(path)),
    "a linked store": replaced(".", lambda path: path.symlink_to(path.with_name("moved"))),
    "a tensor with a second name": changed(AT[FILE], lambda path: os.link(path, path.parents[3] / "other")),
    "a manifest with a second name": changed(
        AT["manifest.json"], lambda path: os.link(path, path.parents[3] / "other")
    ),
    "a store that others may write to": changed(".", lambda path: path.chmod(0o777)),
    "a CURRENT that others may write to": changed("CURRENT", lambda path: path.chmod(0o622)),
    "versions that a group may write to": changed("versions", lambda path: path.chmod(0o770)),
    "a version that others may write to": changed("versions/000001", lambda path: path.chmod(0o702)),
    "a tensor that others may write to": changed(AT[FILE], lambda path: path.chmod(0o606)),
    "another user's store": changed(".", give_away),
    "another user's CURRENT": changed("CURRENT", give_away),
    "another user's version": changed("versions/000001", give_away),
    "another user's tensor": changed(AT[FILE], give_away),
    "another user's lease": changed(AT["lease"], give_away),
    "a tensor cut short": changed(AT[FILE], lambda path: os.truncate(path, 5)),
    "a tensor of a TiB of nothing": changed(AT[FILE], sparse),
    "a manifest of a TiB of nothing": changed(AT["manifest.json"], sparse),
    "a CURRENT of a TiB of nothing": changed("CURRENT", sparse),
    "a manifest nested 100,000 deep": changed(AT["manifest.json"], nest)._replace(named="manifest of version 1"),
    "ties that form a cycle": forged(TENSOR, lambda m: m["aliases"].extend([[TENSOR, OTHER], [OTHER, TENSOR]])),
    "a tensor tied to itself": forged(TENSOR, lambda m: m["aliases"].append([TENSOR, TENSOR])),
    "a tie to a tensor that is not sent": forged("absent", lambda m: m["aliases"].append(["absent", OTHER])),
    "a tie without names": forged("alias", lambda m: m["aliases"].append([])),
    "a name in two ties": forged("twice", lambda m: m["aliases"].extend([[TENSOR, "twice"]] * 2)),
    "300,000 ties": forged("262144", lambda m: m["aliases"].append([TENSOR, *map(str, range(300_000))])),
    "a negative size": forged(TENSOR, lambda m: entry(m).update(shape=[-64])),
    "two negative sizes": forged(TENSOR, lambda m: entry(m).update(shape=[-8, -8])),
    "sizes whose product overflows": forged(TENSOR, lambda m: entry(m).update(shape=[2**32, 2**32, 2**32])),
    "a size of a thousand digits": forged(TENSOR, lambda m: entry(m).update(shape=[10**1000])),
    "a shape of nine dimensions": forged(TENSOR, lambda m: entry(m).update(shape=[64] + [1] * 8)),
    "a shape of a million dimensions": forged(TENSOR, lambda m: entry(m).update(shape=[2**40] * 1_000_000)),
    "a dtype that weights do not have": forged(TENSOR, lambda m: entry(m).update(dtype="complex128")),
    "a dtype that is no dtype": forged(TENSOR, lambda m: entry(m).update(dtype="Tensor")),
    "a version past 2**63": forged("version", lambda m: m.update(version=2**64)),
    "a name listed twice": forged(TENSOR, lambda m: repeat(m, [TENSOR])),
    "100,000 names listed twice": forged("99990 more", lambda m: repeat(m, [f"n{i}" for i in range(100_000)] * 2)),
    "300,000 names": forged("262144", lambda m: m.update(tensors=[entry(m)] * 300_000)),
    "a name with a separator": forged("a/b", lambda m: repeat(m, ["a/b"])),
    "a name that goes up": forged("../../other", lambda m: repeat(m, ["../../other"])),
    "a name with a NUL": forged("a\\x00b", lambda m: repeat(m, ["a\0b"])),
    "a name that moves the cursor": forged("a\\x1b[2J", lambda m: repeat(m, ["a\x1b[2J"])),
    "an empty name": forged("''", lambda m: repeat(m, [""])),
    "a name of a million letters": forged("aaaa", lambda m: repeat(m, ["a" * 1_000_000])),
}


def rewritten(named: str, change: Callable[[dict[str, Any]], object]) -> BadStore:
    """A checkpoint whose header has been changed."""

    def tamper(checkpoint: Path) -> None:
        path = checkpoint / "model.safetensors"
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        write_header(path, json.dumps(header).encode(), content[8 + length :])

    return BadStore(tamper, named)


def write_header(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def with_header(named: str, header: bytes) -> BadStore:
    """A checkpoint that has a header and no data."""
    return BadStore(lambda checkpoint: write_header(checkpoint / "model.safetensors", header), named)


def indexed(named: str, shard: str, make: Callable[[Path], object]) -> BadStore:
    """A checkpoint with an index that names one shard, made by `make`."""

    def tamper(checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").unlink()
        make(checkpoint / "shard")
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))

    return BadStore(tamper, named)


def add_sparse(checkpoint: Path) -> None:
    """A tensor of 2 TiB that takes no room on the disk, in a dtype that would be cast."""
    header = {TENSOR: {"dtype": "F64", "shape": [2**38], "data_offsets": [0, 2**41]}}
    path = checkpoint / "model.safetensors"
    write_header(path, json.dumps(header).encode())
    os.truncate(path, path.stat().st_size + 2**41)


CHECKPOINTS = {
    "a pipe as the weights": replaced("model.safetensors", os.mkfifo),
    "a pipe as the configuration": replaced("config.json", os.mkfifo),
    "a pipe as the index": indexed("model.safetensors.index.json", "shard", os.mkfifo)._replace(
        tamper=lambda checkpoint: (
            (checkpoint / "model.safetensors").unlink(),
            os.mkfifo(checkpoint / "model.safetensors.index.json"),
        )
    ),
    "a pipe as a shard": indexed("shard", "shard", os.mkfifo),
    "a device as the weights": replaced("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
    "weights that link to themselves": replaced("model.safetensors", lambda path: path.symlink_to(path)),
    "a directory as the weights": replaced("model.safetensors", Path.mkdir),
    "a shard elsewhere": indexed("../shard", "../shard", Path.touch),
    "a shard with a NUL in its name": indexed("shard\\x00", "shard\0", Path.touch),
    "an index nested 100,000 deep": indexed("index.json", "shard", Path.touch)._replace(
        tamper=lambda checkpoint: (
            (checkpoint / "model.safetensors").unlink(),
            (checkpoint / "model.safetensors.index.json").write_text('{"x":' + "[" * 100_000),
        )
    ),
    "tensors that overlap": rewritten(
        "begins at byte", lambda h: h[TENSOR].update(data_offsets=[start - 4 for start in h[TENSOR]["data_offsets"]])
    ),
    "a tensor before the data": rewritten(TENSOR, lambda h: h[TENSOR].update(data_offsets=[-256, 0])),
    "a tensor past the end": rewritten(TENSOR, lambda h: h[TENSOR].update(data_offsets=[2**60, 2**60 + 256])),
    "offsets past 2**64": rewritten(TENSOR, lambda h: h[TENSOR].update(data_offsets=[2**70, 2**70 + 256])),
    "negative sizes": rewritten(TENSOR, lambda h: h[TENSOR].update(shape=[-8, -8])),
    "a shape of nine dimensions": rewritten(TENSOR, lambda h: h[TENSOR].update(shape=[64] + [1] * 8)),
    "a shape of a million dimensions": rewritten(TENSOR, lambda h: h[TENSOR].update(shape=[2**62] * 1_000_000)),
    "300,000 tensors": with_header("262144", b"{" + b",".join(b'"%d":{}' % i for i in range(300_000)) + b"}"),
    "metadata nested 100,000 deep": with_header("model.safetensors", b'{"__metadata__":' + b"[" * 100_000),
    "a header of 2**63 bytes": BadStore(
        lambda checkpoint: (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", 2**63)), "model.safetensors"
    ),
    "a name with a NUL": rewritten("a\\x00b", lambda h: h.update({"a\0b": h[TENSOR]})),
    "2 TiB of nothing, to be cast": BadStore(add_sparse, TENSOR),
}
