"""Calls the methods of worker extensions by name: one table built at start-up, typed arguments, typed results.

    names, entry points ──> ExtensionTable.load ──> Extensions(table, worker).call(name, args, kwargs)
                            clash: ConfigError      other types: RPCError

Only names in the table can be called; nothing else of a worker can be reached.
"""

import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.metadata import entry_points
from typing import Any, NamedTuple, get_origin, get_type_hints

import msgspec

from rollout_engine.base.class_names import find_class, function_name
from rollout_engine.base.errors import (
    ConfigError,
    RetryableError,
    RolloutEngineError,
    RPCError,
    as_weight_errors,
    error_text,
    text_of,
    unknown_name,
)
from rollout_engine.base.structs import arguments_struct
from rollout_engine.base.threads import start_thread
from rollout_engine.base.user_code import UserCode
from worker_ext.base import RESERVED, WorkerExtension, WorkerLike, is_rpc, runs_beside_steps
from worker_ext.inspect import InspectExtension
from worker_ext.memory import MemoryExtension
from worker_ext.score import ScoreExtension
from worker_ext.weights import WeightSyncExtension

logger = logging.getLogger("rollout_engine")

ENTRY_POINTS = "rollout_engine.worker_extensions"
CLOSE_SECONDS = 5.0
"""How long a shutdown waits for the `close` of an extension."""
STOCK: tuple[type[WorkerExtension], ...] = (
    InspectExtension,
    MemoryExtension,
    ScoreExtension,
    WeightSyncExtension,
)


class Method(NamedTuple):
    """A method that can be called: its class, the struct of its arguments and the annotation of its result."""

    owner: type[WorkerExtension]
    arguments: type[msgspec.Struct]
    result: Any
    beside_steps: bool
    """Whether it runs while steps continue."""


class ExtensionTable:
    """The methods of some extension classes. Raises `ConfigError` if one cannot be called, or two clash."""

    def __init__(self, classes: Iterable[type[WorkerExtension]]) -> None:
        self.classes = list(dict.fromkeys(classes))
        self.methods: dict[str, Method] = {}
        for owner in self.classes:
            for name, method in inspect.getmembers(owner, is_rpc):
                self._add(owner, name, method)

    @classmethod
    def load(cls, names: Sequence[str]) -> "ExtensionTable":
        """The stock extensions, those that packages have registered, and "package.module:Class" of `names`."""
        entries = entry_points(group=ENTRY_POINTS)
        registered = [_load_class(f"{entry.name} = {entry.value}", entry.load) for entry in entries]
        return cls([*STOCK, *registered, *(_load_class(name, partial(find_class, name)) for name in names)])

    def _add(self, owner: type[WorkerExtension], name: str, method: Any) -> None:
        where = f"worker extension {owner.__module__}:{owner.__qualname__}: method '{name}'"
        if name.startswith("_"):
            raise ConfigError(f"{where} is private: a method that is called by name needs a public one.")
        if name in RESERVED:
            raise ConfigError(f"{where} is reserved: that name means something else to an engine. Choose another.")
        if name in self.methods:
            other = self.methods[name].owner
            raise ConfigError(f"{where} clashes with that of {other.__module__}:{other.__qualname__}. Rename one.")
        try:
            self.methods[name] = Method(owner, *_signature_of(method), runs_beside_steps(method))
        except (TypeError, NameError) as problem:
            raise ConfigError(f"{where} cannot be called by name: {problem}.") from problem


class Extensions:
    """An instance of each class of a table, for one worker. Only methods with `beside_steps` may run concurrently."""

    def __init__(self, table: ExtensionTable, worker: WorkerLike) -> None:
        self._methods, self._rank, self._worker = table.methods, worker.rank, worker
        self._instances = {kind: _instantiate(kind, worker) for kind in table.classes}

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Result of a method. Raises `RPCError` before it runs unless the name is known and the arguments fit.

        Our own errors are raised as they are, a transport's as the public one of its meaning, any other as an
        `RPCError` with rank and traceback.
        """
        method = self._methods.get(name)
        if method is None:
            raise RPCError(unknown_name("method of worker extensions", str(name)[:80], self._methods), method=str(name))
        arguments = self._bind(name, method, args, kwargs or {})
        with self._as_rpc_errors(name):
            with as_weight_errors(), _watch_method(name, method.owner):
                value = getattr(self._instances[method.owner], name)(**arguments)
            return msgspec.convert(value, method.result, dec_hook=_pass_through)

    def call_function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of `function(worker, *args, **kwargs)`. Raises as `call` for a method that runs."""
        name = function_name(function)
        with self._as_rpc_errors(name), as_weight_errors(), UserCode(lambda: f"the function {name} of collective_rpc"):
            return function(self._worker, *args, **kwargs)

    @contextmanager
    def _as_rpc_errors(self, name: str) -> Iterator[None]:
        """Inside, errors that are not ours are raised as `RPCError`."""
        try:
            yield
        except RolloutEngineError:
            raise
        except (Exception, SystemExit) as error:
            what = f"{name} failed on rank {self._rank}: {error_text(error)}"
            trace = "".join(traceback.format_exception(error))
            raise RPCError(what, method=name, rank=self._rank, traceback=trace) from error

    def runs_beside_steps(self, name: str) -> bool:
        """Whether calls of this method run on a thread of their own while steps continue; False for an unknown name."""
        return name in self._methods and self._methods[name].beside_steps

    def owner_of(self, name: str) -> type[WorkerExtension] | None:
        """The class of a method; None for an unknown name."""
        return self._methods[name].owner if name in self._methods else None

    def close(self) -> None:
        """Close every extension, the last one first. Errors are logged; one that hangs is left behind."""
        while self._instances:
            kind, instance = self._instances.popitem()
            if kind in STOCK:
                instance.close()
            else:
                _close(instance, f"worker extension {kind.__module__}:{kind.__qualname__}")

    def _bind(self, name: str, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        fields = method.arguments.__struct_fields__
        if len(args) > len(fields):
            raise RPCError(f"{name}: takes {len(fields)} arguments, {len(args)} came.", method=name)
        given = dict(zip(fields, args, strict=False))
        for key, value in kwargs.items():
            if key in given:
                raise RPCError(f"{name}: argument '{key}' came twice.", method=name)
            if key not in fields:
                raise RPCError(f"{name}: {unknown_name('argument', str(key)[:80], fields)}", method=name)
            given[key] = value
        try:
            checked = msgspec.convert(given, method.arguments, strict=True, dec_hook=_pass_through)
        except msgspec.ValidationError as problem:
            raise RPCError(f"{name}: {problem}.", method=name) from None
        return {field: getattr(checked, field) for field in fields}


def _watch_method(name: str, owner: type[WorkerExtension]) -> AbstractContextManager[None]:
    """Let a watchdog interrupt a method of the user's; the stock ones have deadlines of their own."""
    where = f"{owner.__module__}:{owner.__qualname__}"
    return nullcontext() if owner in STOCK else UserCode(lambda: f"method '{name}' of worker extension {where}")


def _close(extension: WorkerExtension, name: str) -> None:
    def run() -> None:
        try:
            extension.close()
        except (Exception, SystemExit) as problem:
            logger.warning(
                "%s raised %s in close: %s", name, type(problem).__name__, text_of(problem), exc_info=problem
            )

    try:
        thread = start_thread(run, name="extension-close")
    except RetryableError:
        return run()  # better without a limit than not at all
    thread.join(CLOSE_SECONDS)
    if thread.is_alive():
        logger.warning("%s has not closed within %g s: it is left behind", name, CLOSE_SECONDS)


def _signature_of(method: Any) -> tuple[type[msgspec.Struct], Any]:
    """Struct of the arguments and annotation of the result. Raises `TypeError` if they cannot be checked."""
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        raise TypeError("it is a coroutine or a generator, and the engine would have to wait for it")
    parameters = list(inspect.signature(method).parameters.values())[1:]  # without self
    hints = get_type_hints(method)
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"argument '{parameter}' has no name, or stands for several")
        if parameter.name not in hints:
            raise TypeError(f"argument '{parameter.name}' is not annotated")
    if "return" not in hints:
        raise TypeError("its result is not annotated (None for none)")
    arguments = arguments_struct(method.__name__, parameters, hints)
    for kind in (arguments, hints["return"]):
        msgspec.msgpack.Decoder(kind)  # raises if no value can be of that kind
    return arguments, hints["return"]


def _pass_through(kind: Any, value: Any) -> Any:
    """Pass arrays, tensors and other types that msgspec does not support as they are, if they are of the class."""
    kind = get_origin(kind) or kind
    if not isinstance(value, kind):
        raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
    return value


def _load_class(name: str, load: Callable[[], Any]) -> type[WorkerExtension]:
    try:
        found = load()
    except (Exception, SystemExit) as problem:  # whatever the user's module does when it is loaded
        text = f"worker_extensions: '{name}' cannot be loaded: {error_text(problem).rstrip('.')}."
        hint = " Modules are found in the program's folder, in PYTHONPATH and where packages are installed."
        raise ConfigError(text + hint * isinstance(problem, ModuleNotFoundError)) from problem
    if not (isinstance(found, type) and issubclass(found, WorkerExtension)):
        raise ConfigError(f"worker_extensions: '{name}' is no subclass of worker_ext.base.WorkerExtension. Derive it.")
    return found


def _instantiate(kind: type[WorkerExtension], worker: WorkerLike) -> WorkerExtension:
    try:
        return kind(worker)
    except RolloutEngineError:
        raise
    except (Exception, SystemExit) as problem:
        where = f"{kind.__module__}:{kind.__qualname__}"
        raise ConfigError(f"worker_extensions: '{where}' cannot be made: {error_text(problem)}.") from problem
