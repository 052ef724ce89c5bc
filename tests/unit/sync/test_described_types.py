"""Threads may read a type of message for the first time together, once it has been described."""

import subprocess
import sys

import pytest

READS = """
import sys, threading, msgspec
from sync.described_types import describe_types

sys.setswitchinterval(1e-6)
for i in range(1500):
    inner = msgspec.defstruct("Inner", [("x", int)])
    outer = msgspec.defstruct("Outer", [("inner", inner), ("more", list[inner])])
    message = msgspec.defstruct("Message", [("first", outer), ("named", dict[str, outer])], tag=True)
    other = msgspec.defstruct("Other", [("outer", outer | None)], tag=True)
    body = msgspec.msgpack.encode(message(outer(inner(3), []), {"a": outer(inner(4), [inner(5)])}))
    describe_types(message | other)
    barrier, found = threading.Barrier(4), []

    def read():
        barrier.wait()
        found.append(msgspec.msgpack.decode(body, type=message | other))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.named["a"].more[0].x for each in found] == [5] * 4
"""


@pytest.mark.slow
def test_described_types_are_read_by_many_threads_at_once():
    """Without `describe_types` the process ends within a few hundred rounds."""
    subprocess.run([sys.executable, "-c", READS], check=True, timeout=120)
