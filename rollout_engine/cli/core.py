"""Starts a core for front ends elsewhere, which connect over TCP with the keys of a file.

    rollout-engine core Qwen/Qwen3-0.6B --listen tcp://10.0.0.7:5555 --key-file keys.json dtype=bfloat16

The file is made if there is none. Copy it to the machine of the front end:
AsyncLLM.connect("tcp://10.0.0.7:5555", key_file="keys.json"). The first line printed is the address, with the port that
was free where 0 was given. The core serves until it gets SIGTERM, which lets requests end first, or Ctrl-C.
"""

import argparse
import signal
from pathlib import Path
from types import FrameType

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, EngineDeadError
from rollout_engine.cli.overrides import add_overrides, parse_overrides
from rollout_engine.cli.terminal import announce
from rollout_engine.process.core_launcher import CoreProcess
from rollout_engine.process.keys import Keys
from rollout_engine.process.process_client import HEARTBEAT_SECONDS, MAX_BACKLOG_BYTES, START_SECONDS
from rollout_engine.process.tcp_address import TcpAddress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `core`."""
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("--listen", required=True, help="tcp://HOST:PORT; port 0 is any that is free")
    parser.add_argument("--key-file", type=Path, help="keys of the core and of its clients; made if there is none")
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> None:
    """Start a core, print its address, and return when it has ended. Raises `EngineDeadError` if it has failed."""
    overrides = parse_overrides(arguments.overrides)
    if overrides.sampling:
        names = ", ".join(overrides.sampling)
        raise ConfigError(f"{names}: sampling params come with each request; a core takes fields of EngineConfig.")
    config = EngineConfig.from_kwargs(model=arguments.model, **overrides.engine)
    TcpAddress.parse(arguments.listen, "listen", to_listen=True)
    keys = None if arguments.key_file is None else Keys.read_or_write(arguments.key_file)
    process = CoreProcess(
        config,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        max_backlog_bytes=MAX_BACKLOG_BYTES,
        listen=arguments.listen,
        keys=keys,
    )
    try:
        with announce(f"starting a core of {arguments.model}"):
            ready = process.wait_ready(START_SECONDS)
        _pass_signals_on(process)
        print(ready.address, flush=True)
        print(f"key file {arguments.key_file}, core process {ready.pid}, {ready.info.choices}", flush=True)
        status = process.wait(None)
    finally:
        process.end()
    if status:
        raise EngineDeadError(f"the core process {ready.pid} has ended with status {status}.")


def _pass_signals_on(process: CoreProcess) -> None:
    def pass_on(number: int, _: FrameType | None) -> None:
        process.signal(number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, pass_on)
