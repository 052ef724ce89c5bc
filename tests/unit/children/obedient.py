"""A child process that answers messages, run as ``python -m tests.unit.children.obedient DESCRIPTOR``."""

import ctypes
import os
import socket
import subprocess
import sys
import time

from rollout_engine.children.channel import Channel


def main():
    """Start a process, fork and exit, exit, or hold the interpreter in native code, as the message says; else echo."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    while True:
        try:
            word = channel.receive(str)
        except (EOFError, OSError):
            return
        if word == "start":
            channel.send(str(subprocess.Popen(["sleep", "1000"]).pid))
        elif word == "fork":
            holder = ctypes.CDLL(None).fork()  # not Python's, which would close the channel
            if holder == 0:
                time.sleep(1000)
            os._exit(4)
        elif word == "exit":
            os._exit(3)
        elif word == "hold":
            channel.send("held")
            ctypes.PyDLL(None).pause()
        else:
            channel.send(word)


if __name__ == "__main__":
    main()
