"""A trainer's end of a weight group, in a process of its own, made of plain torch."""

import contextlib
import socket
import subprocess
import sys

import torch

GROUP = "group"
_SENDER = """
import sys, torch
from datetime import timedelta
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world, Backend, PrefixStore
port, name = int(sys.argv[1]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, 2, is_master=True)
store, timeout = PrefixStore(name, store), timedelta(seconds=60)
group, _ = _new_process_group_helper(2, 0, [], Backend("gloo"), store, name, timeout=timeout)
_world.pg_group_ranks[group] = {0: 0, 1: 1}
weights = torch.load(sys.argv[2], weights_only=True)
for line in sys.stdin:
    dist.broadcast(weights[line.strip()], src=0, group=group)
"""
"""What those of SGLang's dialect do, with nothing of ours."""


@contextlib.contextmanager
def torch_trainer(weights, folder, join):
    """Yields a function that broadcasts tensors by name. `join(port)` is to have the server join the group."""
    torch.save(weights, folder / "weights.pt")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", _SENDER, str(port), str(folder / "weights.pt"), GROUP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as at_end:
        at_end.callback(process.kill)
        join(port)

        def broadcast(names):
            process.stdin.write("".join(f"{name}\n" for name in names))
            process.stdin.flush()

        yield broadcast
