"""A receiving engine without the engine: it stages what a transport delivers and compares it with the manifest.

python shadow.py: one command a line on the standard input, one answer a line on the standard output.
"""

import sys
from typing import Any

import msgspec
import torch

import sync
from sync.manifest import TensorSpec, WeightManifest, describe, torch_dtype


class Command(msgspec.Struct):
    """`open` a transport with options, `receive` a manifest (or `receive_into` tensors of its form), or `close`."""

    verb: str
    transport: str = ""
    options: dict[str, Any] = {}
    manifest: WeightManifest | None = None


class Answer(msgspec.Struct):
    """What is staged now, or the error."""

    staged: list[TensorSpec] = []
    error: str = ""
    message: str = ""

    def matches(self, manifest: WeightManifest) -> bool:
        """Whether all tensors are there with their digests, which tensors of a device have without those of pieces."""
        return sorted(map(_whole, self.staged)) == sorted(map(_whole, manifest.tensors))


def _whole(spec: TensorSpec) -> tuple[Any, ...]:
    return spec.name, spec.shape, spec.dtype, spec.digest


class Shadow:
    """Holds one receiver and what it delivered last."""

    def __init__(self) -> None:
        self.receiver: sync.WeightReceiver | None = None

    def obey(self, command: Command) -> Answer:
        """Errors of `sync` are answers; others are bugs."""
        try:
            if command.verb == "open":
                self.receiver = sync.make_receiver(command.transport, **command.options)
            elif command.verb == "receive":
                staged = {name: tensor.clone() for name, tensor in self.receiver.receive(command.manifest)}
                return Answer(sorted((describe(*pair) for pair in staged.items()), key=lambda spec: spec.name))
            elif command.verb == "receive_into":
                specs = command.manifest.tensors
                shadow = {spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in specs}
                arrivals = self.receiver.receive_into(shadow, command.manifest)
                staged = [describe(*pair) for pair in shadow.items()]
                assert arrivals == {spec.name: (spec.digest, True) for spec in staged}
                return Answer(sorted(staged, key=lambda spec: spec.name))
            else:
                self.receiver.close()
        except sync.SyncError as error:
            return Answer(error=type(error).__name__, message=str(error))
        return Answer()


if __name__ == "__main__":
    shadow = Shadow()
    for line in sys.stdin.buffer:
        answer = shadow.obey(msgspec.json.decode(line, type=Command))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
