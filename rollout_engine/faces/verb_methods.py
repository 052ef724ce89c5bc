"""Methods of the faces for the verbs of `rollout_engine.engine.verbs`: blocking ones, and coroutines.

A new verb gets one line in each of the two classes; a contract test fails if a face lacks one.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from rollout_engine.base.errors import RequestError, unknown_name
from rollout_engine.base.metrics import CoreStats
from rollout_engine.base.threads import run_in_thread
from rollout_engine.engine import verbs
from rollout_engine.engine.calls import CallFuture
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.interrupts import held
from rollout_engine.engine.verb import Arguments, Verb
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.loop_waker import LoopWaker

P = ParamSpec("P")
R = TypeVar("R")


class HasFrontend(Protocol):
    """A face."""

    @property
    def frontend(self) -> Frontend: ...


def blocking(function: Callable[Concatenate[EngineDriver, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Make the method of a face that calls a verb and waits for its result."""
    verb = verbs.VERBS[function.__name__]

    def method(self: HasFrontend, *args: Any, **kwargs: Any) -> Any:
        chosen, arguments = _bind_arguments(verb, args, kwargs)
        return wait_for(self.frontend, chosen, arguments, lambda: self.frontend.client.call(chosen.name, arguments))

    return _document(method, function)


def _bind_arguments(verb: Verb, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Verb, Arguments]:
    """The verb to call, with its arguments: a function given to `collective_rpc` has one of its own."""
    arguments = verb.bind(args, kwargs)
    return (verbs.VERBS["call_function"] if callable(arguments.get("method")) else verb), arguments


def wait_for(frontend: Frontend, verb: Verb, arguments: Arguments, call: Callable[[], CallFuture]) -> Any:
    """Make a call of a verb and wait for its result, up to the verb's own timeout."""
    with frontend.span(verb, arguments), held():
        return call().wait(verb, arguments)


def awaitable(
    function: Callable[Concatenate[EngineDriver, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Make the method of a face that calls a verb and awaits its result."""
    of_function = verbs.VERBS[function.__name__]

    async def method(self: HasFrontend, *args: Any, **kwargs: Any) -> Any:
        verb, arguments = _bind_arguments(of_function, args, kwargs)
        with self.frontend.span(verb, arguments):
            waker, done = LoopWaker.of(asyncio.get_running_loop()), asyncio.Event()
            result = self.frontend.client.call(verb.name, arguments)
            try:
                result.add_done_callback(lambda _: waker.wake(done))
                async with asyncio.timeout(verb.patience(arguments)):
                    await done.wait()
            except TimeoutError:
                if not result.done():
                    result.cancel()
                    raise verb.too_late(arguments, begun=result.begun) from None
            finally:
                result.cancel()  # its caller was cancelled, or it is too late: no caller waits for it any more
            return result.result()

    return _document(method, function)


def of_frontend(function: Callable[Concatenate[Frontend, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Make the method of a face that calls the same method of its front end."""

    def method(self: HasFrontend, *args: Any, **kwargs: Any) -> Any:
        return function(self.frontend, *args, **kwargs)

    return _document(method, function)


def of_frontend_async(
    function: Callable[Concatenate[Frontend, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Make the coroutine of a face that calls a method of its front end, on a thread outside the loop."""

    async def method(self: HasFrontend, *args: Any, **kwargs: Any) -> Any:
        return await run_in_thread(function, self.frontend, *args, **kwargs)

    return _document(method, function)


def _document(method: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(method, function)
    del method.__wrapped__  # type: ignore[attr-defined]  # its first parameter is another
    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = signature.replace(parameters=[own, *parameters])  # type: ignore[attr-defined]
    return method


def check_methods(kind: type) -> None:
    """Wrap the public methods that `kind` itself defines, in place: unknown keyword arguments raise `RequestError`.

    Those that take any keyword check theirs themselves.
    """
    for name, function in list(vars(kind).items()):
        if not name.startswith("_") and inspect.isfunction(function):
            parameters = inspect.signature(function).parameters.values()
            if not any(each.kind == each.VAR_KEYWORD for each in parameters):
                setattr(kind, name, _check_keywords(name, function))


def _check_keywords(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    known = list(inspect.signature(function).parameters)[1:]
    names = frozenset(known)

    def check(given: dict[str, Any]) -> None:
        for key in given.keys() - names:
            raise RequestError(unknown_name(f"argument of {name}", key, known), field=key, value=given[key])

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(self: object, /, *args: Any, **kwargs: Any) -> Any:
            check(kwargs)
            return await function(self, *args, **kwargs)

        return call_async

    @functools.wraps(function)
    def call(self: object, /, *args: Any, **kwargs: Any) -> Any:
        check(kwargs)
        return function(self, *args, **kwargs)

    return call


class Face:
    """The base of all faces: a front end, and its shutdown.

    Keyword arguments that a method does not have raise `RequestError`, which names the nearest.
    """

    frontend: Frontend
    """Requests and results of this face's client."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_methods(cls)

    @property
    def policy_version(self) -> int:
        """Version of the live weights, as last reported: 0 as loaded, one more with each update that names no other."""
        return self.frontend.client.policy_version

    def shutdown(self) -> None:
        """End the engine and free its memory, or leave it if it is another's; open requests are dropped, or raise.

        Calling it again is a no-op. It also happens when the engine is garbage or the interpreter ends.
        """
        self.frontend.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class BlockingVerbs(Face):
    """The verbs of every synchronous engine and policy. Any thread may call them; they wait for a step in progress."""

    pause_generation = blocking(verbs.pause_generation)
    resume_generation = blocking(verbs.resume_generation)
    is_paused = blocking(verbs.is_paused)
    wait_for_requests_to_drain = blocking(verbs.wait_for_requests_to_drain)
    sleep = blocking(verbs.sleep)
    wake_up = blocking(verbs.wake_up)
    is_sleeping = blocking(verbs.is_sleeping)
    reset_prefix_cache = blocking(verbs.reset_prefix_cache)
    reset_mm_cache = blocking(verbs.reset_mm_cache)
    reset_encoder_cache = blocking(verbs.reset_encoder_cache)
    add_lora = blocking(verbs.add_lora)
    remove_lora = blocking(verbs.remove_lora)
    list_loras = blocking(verbs.list_loras)
    pin_lora = blocking(verbs.pin_lora)
    score = blocking(verbs.score)
    score_candidates = blocking(verbs.score_candidates)
    collective_rpc = blocking(verbs.collective_rpc)
    apply_model = blocking(verbs.apply_model)
    get_model_metadata = blocking(verbs.get_model_metadata)
    save_sharded_state = blocking(verbs.save_sharded_state)
    get_cache_usage = blocking(verbs.get_cache_usage)
    get_num_unfinished_requests = blocking(verbs.get_num_unfinished_requests)
    check_health = blocking(verbs.check_health)
    check_integrity = blocking(verbs.check_integrity)
    start_profile = blocking(verbs.start_profile)
    stop_profile = blocking(verbs.stop_profile)

    update_weights = of_frontend(Frontend.update_weights)
    save_drafts = of_frontend(Frontend.save_drafts)
    load_drafts = of_frontend(Frontend.load_drafts)
    get_sequence_ids = of_frontend(Frontend.get_sequence_ids)
    get_metrics = of_frontend(Frontend.get_metrics)
    do_log_stats = of_frontend(Frontend.do_log_stats)
    get_tokenizer = of_frontend(Frontend.get_tokenizer)
    get_default_sampling_params = of_frontend(Frontend.get_default_sampling_params)
    get_supported_tasks = of_frontend(Frontend.get_supported_tasks)
    is_tracing_enabled = of_frontend(Frontend.is_tracing_enabled)

    @property
    def stats(self) -> CoreStats:
        """Counters since start-up, as of now; over a fleet the sums of all replicas."""
        return self.frontend.get_metrics().core.counters


class AsyncVerbs(Face):
    """The same verbs as coroutines."""

    pause_generation = awaitable(verbs.pause_generation)
    resume_generation = awaitable(verbs.resume_generation)
    is_paused = awaitable(verbs.is_paused)
    wait_for_requests_to_drain = awaitable(verbs.wait_for_requests_to_drain)
    sleep = awaitable(verbs.sleep)
    wake_up = awaitable(verbs.wake_up)
    is_sleeping = awaitable(verbs.is_sleeping)
    reset_prefix_cache = awaitable(verbs.reset_prefix_cache)
    reset_mm_cache = awaitable(verbs.reset_mm_cache)
    reset_encoder_cache = awaitable(verbs.reset_encoder_cache)
    add_lora = awaitable(verbs.add_lora)
    remove_lora = awaitable(verbs.remove_lora)
    list_loras = awaitable(verbs.list_loras)
    pin_lora = awaitable(verbs.pin_lora)
    score = awaitable(verbs.score)
    score_candidates = awaitable(verbs.score_candidates)
    collective_rpc = awaitable(verbs.collective_rpc)
    apply_model = awaitable(verbs.apply_model)
    get_model_metadata = awaitable(verbs.get_model_metadata)
    save_sharded_state = awaitable(verbs.save_sharded_state)
    get_cache_usage = awaitable(verbs.get_cache_usage)
    get_num_unfinished_requests = awaitable(verbs.get_num_unfinished_requests)
    check_health = awaitable(verbs.check_health)
    check_integrity = awaitable(verbs.check_integrity)
    start_profile = awaitable(verbs.start_profile)
    stop_profile = awaitable(verbs.stop_profile)

    update_weights = of_frontend_async(Frontend.update_weights)
    save_drafts = of_frontend_async(Frontend.save_drafts)
    load_drafts = of_frontend_async(Frontend.load_drafts)
    get_sequence_ids = of_frontend_async(Frontend.get_sequence_ids)
    get_metrics = of_frontend_async(Frontend.get_metrics)
    do_log_stats = of_frontend_async(Frontend.do_log_stats)
    get_tokenizer = of_frontend_async(Frontend.get_tokenizer)
    get_default_sampling_params = of_frontend_async(Frontend.get_default_sampling_params)
    get_supported_tasks = of_frontend_async(Frontend.get_supported_tasks)
    is_tracing_enabled = of_frontend_async(Frontend.is_tracing_enabled)
