"""Worker extensions: what may be called, with which arguments, and what is refused at start-up."""

import threading

import numpy as np
import pytest
import torch

from rollout_engine import ConfigError, LifecycleError, ManifestMismatchError, RPCError
from rollout_engine.execution import extensions
from rollout_engine.execution.extensions import STOCK, Extensions, ExtensionTable
from sync.errors import ManifestMismatch
from worker_ext.base import RESERVED, WorkerExtension, rpc, rpc_beside_steps


class FakeWorker:
    rank = 3


class Calculator(WorkerExtension):
    def __init__(self, worker):
        super().__init__(worker)
        self.ran = []

    @rpc
    def add(self, a: int, b: int = 10) -> int:
        self.ran.append((a, b))
        return a + b

    @rpc
    def scale(self, values: np.ndarray, by: torch.Tensor | None = None) -> list[np.ndarray]:
        return [values if by is None else values * by.numpy()]

    @rpc
    def lie(self) -> int:
        return "three"

    @rpc
    def divide(self, a: int) -> float:
        return a / 0

    @rpc
    def refuse(self) -> None:
        raise LifecycleError("not now")

    @rpc
    def mismatch(self) -> None:
        raise ManifestMismatch("other names")

    def unmarked(self) -> int:
        return 1

    def _private(self) -> int:
        return 1


@pytest.fixture
def called():
    return Extensions(ExtensionTable([Calculator]), FakeWorker())


def extension(**members):
    return type("Mine", (WorkerExtension,), members)


def test_a_method_is_called_by_place_and_by_name(called):
    assert called.call("add", [1]) == 11
    assert called.call("add", (1, 2)) == 3
    assert called.call("add", [1], {"b": 5}) == 6
    assert called.call("add", kwargs={"b": 5, "a": 7}) == 12


def test_arrays_and_tensors_are_passed_as_they_are(called):
    values = np.arange(4.0)
    (same,) = called.call("scale", [values])
    assert same is values
    (scaled,) = called.call("scale", [values], {"by": torch.tensor(2.0)})
    assert scaled.tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("name", ["unmarked", "_private", "__init__", "__class__", "close", "worker", "ad", "", "a.b"])
def test_what_is_not_marked_does_not_exist(called, name):
    with pytest.raises(RPCError, match="Unknown method of worker extensions") as caught:
        called.call(name)
    assert (caught.value.method, caught.value.rank) == (name, None)


def test_an_unknown_method_is_told_the_closest_one(called):
    with pytest.raises(RPCError, match="Did you mean 'scale'"):
        called.call("scael")


@pytest.mark.parametrize(
    "args, kwargs, message",
    [
        (["1"], {}, r"Expected `int`, got `str` - at `\$.a`"),
        ([1.5], {}, r"Expected `int`, got `float` - at `\$.a`"),
        ([], {}, "missing required field `a`"),
        ([1, 2, 3], {}, "takes 2 arguments, 3 came"),
        ([1], {"a": 2}, "argument 'a' came twice"),
        ([1], {"c": 2}, "Unknown argument 'c'"),
        ([1], {"self": 2}, "Unknown argument 'self'"),
    ],
)
def test_arguments_of_other_types_are_refused_before_anything_runs(called, args, kwargs, message):
    with pytest.raises(RPCError, match=message) as caught:
        called.call("add", args, kwargs)
    assert (caught.value.method, caught.value.rank) == ("add", None)
    assert called.call("add", [1]) == 11  # alone has run
    (calculator,) = called._instances.values()
    assert calculator.ran == [(1, 10)]


def test_an_array_is_no_tensor_and_a_list_no_array(called):
    with pytest.raises(RPCError, match=r"Expected `Tensor`, got `ndarray` - at `\$.by`"):
        called.call("scale", [np.ones(1), np.ones(1)])
    with pytest.raises(RPCError, match=r"Expected `ndarray`, got `list` - at `\$.values`"):
        called.call("scale", [[1.0]])


def test_what_a_method_meets_carries_rank_and_traceback(called):
    with pytest.raises(RPCError, match="divide failed on rank 3: ZeroDivisionError: division by zero") as caught:
        called.call("divide", [1])
    assert (caught.value.method, caught.value.rank) == ("divide", 3)
    assert "return a / 0" in caught.value.traceback


def test_a_result_of_another_type_is_the_methods_error(called):
    with pytest.raises(RPCError, match="lie failed on rank 3: ValidationError: Expected `int`, got `str`"):
        called.call("lie")


def test_our_own_errors_come_as_they_are_and_a_transports_as_the_public_one(called):
    with pytest.raises(LifecycleError, match="not now"):
        called.call("refuse")
    with pytest.raises(ManifestMismatchError, match="other names"):
        called.call("mismatch")


def test_methods_say_whether_they_run_beside_steps():
    class Patient(WorkerExtension):
        @rpc_beside_steps
        def wait(self) -> int:
            return 1

    made = Extensions(ExtensionTable([Calculator, Patient]), FakeWorker())
    assert made.call("wait") == 1
    assert [made.runs_beside_steps(name) for name in ("wait", "add", "absent")] == [True, False, False]


def test_two_methods_of_one_name_clash():
    class Other(WorkerExtension):
        @rpc
        def add(self) -> int:
            return 0

    with pytest.raises(ConfigError, match="Other: method 'add' clashes with that of .*Calculator"):
        ExtensionTable([Calculator, Other])
    with pytest.raises(ConfigError, match="'add' clashes"):
        ExtensionTable([Calculator, type("Derived", (Calculator,), {})])


def test_naming_a_class_twice_is_no_clash():
    assert ExtensionTable([*STOCK, Calculator, Calculator, *STOCK]).classes == [*STOCK, Calculator]


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_names_are_refused(name):
    def method(self) -> None:
        """Of the name of something else."""

    with pytest.raises(ConfigError, match=f"Mine: method '{name}' is reserved"):
        ExtensionTable([extension(**{name: rpc(method)})])


@pytest.mark.parametrize("name", ["_hidden", "__len__", "__init__"])
def test_private_names_are_refused(name):
    def method(self) -> None:
        """Of a private name."""

    with pytest.raises(ConfigError, match=f"method '{name}' is private"):
        ExtensionTable([extension(**{name: rpc(method)})])


def test_methods_that_cannot_be_checked_are_refused():
    def bare(self, a) -> int: ...
    def no_result(self, a: int): ...
    def several(self, *a: int) -> int: ...
    def named(self, **a: int) -> int: ...
    def unknown(self, a: "Nowhere") -> int: ...  # noqa: F821
    def union(self, a: np.ndarray | torch.Tensor) -> int: ...
    async def waiting(self) -> int: ...
    def generating(self) -> int:
        yield 1

    wrong = {
        bare: "argument 'a' is not annotated",
        no_result: "its result is not annotated",
        several: "has no name, or stands for several",
        named: "has no name, or stands for several",
        unknown: "'Nowhere' is not defined",
        union: "more than one custom type",
        waiting: "coroutine",
        generating: "generator",
    }
    for method, message in wrong.items():
        with pytest.raises(ConfigError, match=f"method '{method.__name__}' cannot be called by name: .*{message}"):
            ExtensionTable([extension(**{method.__name__: rpc(method)})])


@pytest.mark.parametrize(
    "name, message",
    [
        ("calculator", "must be of the form 'package.module:Class'"),
        ("calculator:", "must be of the form"),
        (":Calculator", "must be of the form"),
        ("no_such_module:Calculator", "ModuleNotFoundError"),
        ("math:Calculator", "AttributeError"),
        ("math:sqrt", "no subclass of worker_ext.base.WorkerExtension"),
        ("worker_ext.base:WorkerLike", "no subclass"),
    ],
)
def test_names_of_no_extension_are_refused(name, message):
    with pytest.raises(ConfigError, match=f"worker_extensions: '{name}' .*{message}"):
        ExtensionTable.load([name])


def test_a_module_that_fails_is_refused(tmp_path, monkeypatch):
    (tmp_path / "failing_extension.py").write_text("raise RuntimeError('at import')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'failing_extension:Mine' cannot be loaded: RuntimeError: at import"):
        ExtensionTable.load(["failing_extension:Mine"])


class Entry:
    name, value = "calculator", "package:Calculator"

    def __init__(self, load):
        self.load = load


def test_extensions_of_packages_are_found_by_entry_point(monkeypatch):
    asked = []
    monkeypatch.setattr(extensions, "entry_points", lambda group: asked.append(group) or [Entry(lambda: Calculator)])
    assert ExtensionTable.load([]).methods["add"].owner is Calculator
    assert asked == ["rollout_engine.worker_extensions"]


def test_an_entry_point_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(extensions, "entry_points", lambda group: [Entry(lambda: 1 / 0)])
    with pytest.raises(ConfigError, match="'calculator = package:Calculator' cannot be loaded: ZeroDivisionError"):
        ExtensionTable.load([])


def test_an_extension_that_cannot_be_made_is_named():
    class Picky(WorkerExtension):
        def __init__(self, worker):
            raise OSError("no room")

    with pytest.raises(ConfigError, match="Picky' cannot be made: OSError: no room"):
        Extensions(ExtensionTable([Picky]), FakeWorker())


def test_extensions_are_closed_once_the_last_one_first():
    closed = []
    first = extension(close=lambda self: closed.append("first"))
    second = extension(close=lambda self: closed.append("second"))
    made = Extensions(ExtensionTable([first, second]), FakeWorker())
    made.close()
    made.close()
    assert closed == ["second", "first"]


def test_a_method_that_exits_fails_its_call(called):
    def leave(self) -> None:
        raise SystemExit(2)

    leaver = Extensions(ExtensionTable([extension(leave=rpc(leave))]), FakeWorker())
    with pytest.raises(RPCError, match="leave failed on rank 3: SystemExit: 2"):
        leaver.call("leave")


def test_an_error_without_a_text_is_named_by_its_class():
    class Unspeakable(Exception):
        def __str__(self):
            raise ValueError("no words")

    def fail(self) -> None:
        raise Unspeakable

    made = Extensions(ExtensionTable([extension(fail=rpc(fail))]), FakeWorker())
    with pytest.raises(RPCError, match="fail failed on rank 3: Unspeakable: <Unspeakable: no words>"):
        made.call("fail")


def test_a_class_that_exits_when_it_is_made_is_refused():
    def leave(self, worker):
        raise SystemExit(4)

    with pytest.raises(ConfigError, match="cannot be made: SystemExit: 4"):
        Extensions(ExtensionTable([extension(__init__=leave)]), FakeWorker())


def test_an_extension_that_raises_in_close_is_named_and_the_others_close(caplog):
    closed = []

    def broken(self):
        raise OSError("no")

    kinds = [extension(close=lambda self: closed.append(1)), extension(close=broken)]
    Extensions(ExtensionTable(kinds), FakeWorker()).close()
    assert closed == [1]
    (record,) = caplog.records
    assert record.message == f"worker extension {__name__}:Mine raised OSError in close: no"


def test_an_extension_that_hangs_in_close_holds_no_shutdown(monkeypatch, caplog):
    monkeypatch.setattr(extensions, "CLOSE_SECONDS", 0.0)
    released = threading.Event()
    Extensions(ExtensionTable([extension(close=lambda self: released.wait())]), FakeWorker()).close()
    (record,) = caplog.records
    assert record.message == f"worker extension {__name__}:Mine has not closed within 0 s: it is left behind"
    released.set()
