"""Links: a sender here, receiving shadows elsewhere, for every transport."""

import contextlib
import os
import runpy
import selectors
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import sync

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
_MODULE = runpy.run_path(str(HERE / "shadow.py"))
Shadow, Command, Answer = _MODULE["Shadow"], _MODULE["Command"], _MODULE["Answer"]
ANSWER_SECONDS = 300


class LocalShadow(Shadow):
    """The shadow in this process: answers are ready when asked for."""

    def tell(self, command):
        self._answer = self.obey(command)

    def answer(self):
        return self._answer

    def open(self, transport, options):
        assert not self.obey(Command("open", transport=transport, options=options)).error

    def receive(self, manifest, verb="receive"):
        self.tell(Command(verb, manifest=manifest))


class ShadowProcess:
    """The shadow in a process of its own."""

    def __init__(self):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "shadow.py")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)
        self.open("store", {"directory": "/"})  # it has started: from here on deadlines are the transport's alone

    def tell(self, command):
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")
        self.process.stdin.flush()

    def open(self, transport, options):
        self.tell(Command("open", transport=transport, options=options))
        answer = self.answer()
        assert not answer.error, answer.message

    def receive(self, manifest, verb="receive"):
        self.tell(Command(verb, manifest=manifest))

    def answer(self):
        assert self._selector.select(ANSWER_SECONDS), "the shadow does not answer"
        return msgspec.json.decode(self.process.stdout.readline(), type=Answer)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self._selector.close()


class Link:
    """One sender and its receivers."""

    def __init__(self, name, sender, shadows, options):
        self.name, self.sender, self.shadows = name, sender, shadows
        for shadow, choice in zip(shadows, options, strict=True):
            shadow.open(name, choice)

    def offer(self, source, version=1, metadata=None):
        return self.sender.offer(source, version, metadata or {})

    def deliver(self, manifest, verb="receive"):
        """Every shadow's answer, and the sender's error, if any."""
        error = None
        for shadow in self.shadows:
            shadow.receive(manifest, verb)
        try:
            self.sender.send()
        except sync.SyncError as problem:
            error = problem
        return [shadow.answer() for shadow in self.shadows], error

    def push(self, source, version=1, metadata=None):
        """Manifest and answers of a push during which nothing goes wrong."""
        manifest = self.offer(source, version, metadata)
        answers, error = self.deliver(manifest)
        assert error is None and all(answer.matches(manifest) for answer in answers), (error, answers)
        return manifest

    def close(self):
        self.sender.close()
        for shadow in self.shadows:
            if isinstance(shadow, LocalShadow) or shadow.process.poll() is None:
                shadow.tell(Command("close"))
                shadow.answer()


@pytest.fixture(scope="session")
def shadow_processes():
    """A function: the first n of a growing pool of shadow processes, replaced where one has ended."""
    pool = []

    def take(count):
        for i in range(count):
            if i == len(pool):
                pool.append(ShadowProcess())
            elif pool[i].process.poll() is not None:
                pool[i].end()
                pool[i] = ShadowProcess()
        return pool[:count]

    yield take
    for shadow in pool:
        shadow.end()


@pytest.fixture
def make_link(tmp_path, shadow_processes):
    """A function from a transport's name to a `Link` with a shadow elsewhere, closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(name):
            if name == "inproc":
                sender = sync.make_sender(name)
                link = Link(name, sender, [LocalShadow()], [{"sender": sender}])
            elif name == "gloo":
                place = {"rendezvous": f"file://{tmp_path}/rendezvous", "world_size": 3, "bucket_bytes": 4096}
                shadows = shadow_processes(2)
                sender = sync.make_sender(name, **place, timeout=30)
                ranks = [place | {"rank": rank, "timeout": 30} for rank in (1, 2)]
                link = Link(name, sender, shadows, ranks)
            elif name == "nccl":
                place = {"rendezvous": f"file://{tmp_path}/rendezvous", "world_size": 2, "bucket_bytes": 4096}
                sender = sync.make_sender(name, **place, device="cuda:0")
                link = Link(name, sender, shadow_processes(1), [place | {"rank": 1, "device": "cuda:1"}])
            elif name == "ipc":
                directory = str(tmp_path / "ipc")
                sender = sync.make_sender(name, directory=directory, bucket_bytes=4096)
                link = Link(name, sender, shadow_processes(1), [{"directory": directory, "timeout": 10}])
            elif name == "shm":
                directory = str(tmp_path / "shm")
                sender = sync.make_sender(name, directory=directory, num_threads=2)
                link = Link(name, sender, shadow_processes(1), [{"directory": directory}])
            elif name == "store":
                directory = str(tmp_path / "store")
                sender = sync.make_sender(name, directory=directory, num_threads=2)
                link = Link(name, sender, shadow_processes(1), [{"directory": directory, "num_threads": 2}])
            stack.callback(link.close)
            return link

        yield make
