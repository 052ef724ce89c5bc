"""Verbs that ask the model: scores, methods of worker extensions, functions on the module, its weights' names."""

import logging
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from rollout_engine.base.class_names import function_name
from rollout_engine.base.errors import (
    CallTimeoutError,
    LifecycleError,
    RequestError,
    RolloutEngineError,
    RPCError,
    RPCTimeoutError,
    as_weight_errors,
    refused,
)
from rollout_engine.base.lora_request import LoRALike, as_lora_request
from rollout_engine.base.pictures import PlacedPicture, SharedPictures
from rollout_engine.base.pooling_params import check_generation
from rollout_engine.base.routed_experts import as_array
from rollout_engine.base.structs import plain
from rollout_engine.base.token_scores import TokenScores, as_candidates
from rollout_engine.engine import combine
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.interrupts import allowed
from rollout_engine.engine.scored_pairs import score_pairs
from rollout_engine.engine.verb import Arguments
from rollout_engine.engine.verb_table import VERBS

logger = logging.getLogger("rollout_engine")


def _prepare_score(
    prompt_token_ids: Sequence[Sequence[int]],
    completion_token_ids: Sequence[Sequence[int]],
    temperature: float,
    lora: LoRALike | None,
    routed_experts: Sequence[np.ndarray] | None,
    pictures: Sequence[Sequence[PlacedPicture]] | None,
    timeout: float | None,
) -> Arguments:
    return {
        "prompt_token_ids": _token_ids("prompt_token_ids", prompt_token_ids),
        "completion_token_ids": _token_ids("completion_token_ids", completion_token_ids),
        "temperature": plain(temperature),
        "lora": None if lora is None else as_lora_request(lora, "lora").name,
        "routed_experts": None
        if routed_experts is None
        else [as_array(f"routed_experts[{index}]", each) for index, each in enumerate(routed_experts)],
        "pictures": None if pictures is None else SharedPictures.of(pictures),
        "timeout": plain(timeout),
    }


def _token_ids(name: str, given: Sequence[Sequence[int]]) -> Any:
    """Lists of token ids as plain numbers. Raises `RequestError` for texts."""
    listed = plain(list(given))
    for index, each in enumerate(listed):
        if isinstance(each, str):
            hint = "llm.get_tokenizer().encode(text) makes them of a text."
            raise RequestError.for_field(f"{name}[{index}]", each, "a list of token ids", hint)
    return listed


def _late_score(verb: str, arguments: Arguments, begun: bool) -> RolloutEngineError:
    what = f"{len(arguments['completion_token_ids'])} completions were not scored within {arguments['timeout']:g} s"
    return CallTimeoutError(f"{verb}: {what}; what is left of them never will be. Give fewer at a time, or more time.")


@VERBS.add_in_pieces(prepare=_prepare_score, late=partial(_late_score, "score"))
def score(
    driver: EngineDriver,
    prompt_token_ids: Sequence[list[int]],
    completion_token_ids: Sequence[list[int]],
    *,
    temperature: float = 1.0,
    lora: str | None = None,
    routed_experts: Sequence[np.ndarray] | None = None,
    pictures: SharedPictures | None = None,
    timeout: float | None = None,
) -> Generator[None, None, list[np.ndarray]]:
    """Log-probs of given completions under the live weights: per sequence float32 [len(completion)].

    They equal those that sampling the tokens at `temperature` returns ("tempered"). Steps of requests run between
    two batches of sequences; weights are those of the beginning to the end. `lora`: an adapter that the engine has, or
    its name; None: the base model alone. With `EngineConfig(quantization=...)` they are those of the rounded weights,
    and not a trainer's. `routed_experts`: for each pair, as `CompletionOutput.routed_experts`, those that its tokens
    go to in a mixture of experts; the routers choose those that are missing or -1. `pictures`: for each pair a
    sequence of `PlacedPicture`, as `RequestOutput.pictures`. Raises `RequestError`, and after `timeout` seconds
    `CallTimeoutError` (a `TimeoutError`).
    """
    given = prompt_token_ids, completion_token_ids, temperature
    options: dict[str, Any] = dict(lora=lora, routed_experts=routed_experts, pictures=pictures)
    found = yield from _score_pairs(driver, "score", *given, **options)
    return [each.logprobs for each in found]


def _prepare_candidates(
    prompt_token_ids: Sequence[Sequence[int]],
    completion_token_ids: Sequence[Sequence[int]],
    candidate_ids: Any,
    top_k: int,
    temperature: float,
    lora: LoRALike | None,
    routed_experts: Sequence[np.ndarray] | None,
    pictures: Sequence[Sequence[PlacedPicture]] | None,
    timeout: float | None,
) -> Arguments:
    given = prompt_token_ids, completion_token_ids, temperature
    arguments = _prepare_score(*given, lora, routed_experts, pictures, timeout)
    return arguments | {"candidate_ids": as_candidates(candidate_ids), "top_k": plain(top_k)}


@VERBS.add_in_pieces(prepare=_prepare_candidates, late=partial(_late_score, "score_candidates"))
def score_candidates(
    driver: EngineDriver,
    prompt_token_ids: Sequence[list[int]],
    completion_token_ids: Sequence[list[int]],
    candidate_ids: np.ndarray | None = None,
    *,
    top_k: int = 0,
    temperature: float = 1.0,
    lora: str | None = None,
    routed_experts: Sequence[np.ndarray] | None = None,
    pictures: SharedPictures | None = None,
    timeout: float | None = None,
) -> Generator[None, None, TokenScores]:
    """Log-probs of other tokens at the places of given completions: a teacher's scores, all from one pass.

    `candidate_ids`: integers [N, K], a row for each of the N tokens of the completions, end to end; `top_k`: as many of
    the most likely tokens of each place are returned, with their ids. Log-probs of any tokens are parts of one
    log-softmax over the whole vocabulary. The other arguments are those of `score`, whose values are `logprobs` of the
    result. Raises `RequestError`, also for ids outside the vocabulary, and for more than 2**26 log-probs a call.
    """
    given = prompt_token_ids, completion_token_ids, temperature
    options: dict[str, Any] = dict(lora=lora, routed_experts=routed_experts, pictures=pictures)
    options |= dict(candidate_ids=candidate_ids, num_top=top_k)
    found = yield from _score_pairs(driver, "score_candidates", *given, **options)
    empty = TokenScores.empty(None if candidate_ids is None else candidate_ids.shape[1], top_k)
    return TokenScores.join([*found, empty])


def _score_pairs(
    driver: EngineDriver,
    verb: str,
    prompt_token_ids: Sequence[list[int]],
    completion_token_ids: Sequence[list[int]],
    temperature: float,
    *,
    lora: str | None,
    pictures: SharedPictures | None,
    **options: Any,
) -> Generator[None, None, list[TokenScores]]:
    """`score_pairs` by the driver's model, for `verb`."""
    check_generation(driver.executor.info.generates)
    taken = driver.executor.info.pictures
    if pictures is None and taken is not None and any(taken.image_token_id in ids for ids in prompt_token_ids):
        logger.warning(
            "%s: prompts have the placeholder of pictures (%d) and no pictures: it is scored as an ordinary token. "
            "Give pictures=[output.pictures, ...] of the prompts that had some.",
            verb,
            taken.image_token_id,
        )
    require_weights = partial(driver.core.lifecycle.require_weights, verb)
    options["adapter_slot"] = -1 if lora is None else driver.core.adapters.use(lora).slot
    pairs = prompt_token_ids, completion_token_ids, temperature
    return score_pairs(driver.executor, *pairs, require_weights, pictures=pictures, **options)


def _prepare_rpc(
    method: str | Callable[..., Any], timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Arguments:
    wrong = None
    if not isinstance(method, str) and not callable(method):
        wrong = f"method must be a name (a str), or in process a function of the worker, not {method!r:.80}"
    elif not isinstance(args, list | tuple):
        wrong = f"args must be a list or a tuple, not {args!r:.80}"
    elif not (kwargs is None or isinstance(kwargs, dict) and all(isinstance(key, str) for key in kwargs)):
        wrong = f"kwargs must be a dict of names, not {kwargs!r:.80}"
    elif timeout is not None and not (isinstance(timeout, int | float) and timeout > 0 and math.isfinite(timeout)):
        wrong = f"timeout must be seconds, more than 0, or None; not {timeout!r:.80}"
    if wrong:
        raise RPCError(f"collective_rpc: {wrong}.", method=str(method)[:80])
    return {"method": method, "timeout": timeout, "args": list(args), "kwargs": dict(kwargs or {})}


def _rpc_late(arguments: Arguments, begun: bool) -> RolloutEngineError:
    method, timeout = function_name(arguments["method"]), arguments["timeout"]
    fate = (
        "if it has begun it goes on to its end, and steps wait for it" if begun else "it had not begun, and never will"
    )
    return RPCTimeoutError(f"{method}: no result within {timeout:g} s; {fate}.", method=method)


def _runs_beside_steps(driver: EngineDriver, arguments: Arguments) -> bool:
    driver.core.lifecycle.require_alive("collective_rpc")
    return driver.executor.runs_beside_steps(arguments["method"])


@VERBS.add(
    prepare=_prepare_rpc,
    combine=combine.end_to_end,
    needs_all=True,
    beside_steps=_runs_beside_steps,
    late=_rpc_late,
    span="collective_rpc",
    span_arguments=("method",),
)
def collective_rpc(
    driver: EngineDriver,
    method: str,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Call a method of a worker extension (`worker_ext.base`) on every rank, between two steps.

    `method`: its name; or, to an engine of one rank in this process, a function, which is called as
    `method(worker, *args, **kwargs)` with the worker that extensions have (`worker_ext.base.WorkerLike`). Functions do
    not cross processes (`LifecycleError`).

    Returns one result per rank, in order. `timeout` in seconds: `RPCTimeoutError` after it; a begun call continues
    to its end, and steps wait for it. Raises `RPCError`, nothing run, for a method that does not exist or arguments
    that are not of its types; our own errors as the method raised them; any other as `RPCError` with rank and
    traceback.

    To an engine in another process arguments and results are numbers, text, lists, dicts, arrays and tensors: these
    travel without a copy, structs arrive as dicts and tuples as lists. `RPCError` names a value that cannot travel.
    """
    with allowed():  # a method may take its time
        return driver.executor.collective_rpc(method, args, kwargs or {}, caller=driver.caller)


@VERBS.add(crosses=False, public=False, public_name="collective_rpc", late=_rpc_late, span="collective_rpc")
def call_function(
    driver: EngineDriver,
    method: Callable[..., Any],
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Do as `collective_rpc` for a function of the worker, in process only."""
    driver.core.lifecycle.require_alive("collective_rpc")
    with allowed():
        return driver.executor.call_function(method, args, kwargs or {})


@VERBS.add(crosses=False)
def apply_model(driver: EngineDriver, fn: Callable[[nn.Module], Any], *, timeout: float | None = None) -> list[Any]:
    """Call `fn(module)` on every rank's module, between two steps; returns the results. It may only read weights.

    In process only. Raises any error of `fn`; `LifecycleError` and `DirtyWeightsError` if there are no weights to
    read. `DirtyWeightsError` too if `fn` wrote to some: then the engine is DIRTY until a complete update. (A write
    through `.data` goes unnoticed.)
    """
    _require_whole_weights(driver, "apply_model")
    driver.core.begin_update("apply_model")
    try:
        with allowed():
            return driver.executor.apply_model(fn)
    finally:
        driver.core.end_update(dirty=driver.executor.dirty)


def _prepare_save(
    path: str | os.PathLike[str], pattern: str | None, max_size: int | None, timeout: float | None
) -> Arguments:
    if isinstance(path, os.PathLike) or (isinstance(path, str) and path):
        path = os.path.abspath(path)  # here: the engine's process may be in another directory
    else:
        problem = refused("path", path, "the path of a directory to write")
        raise RequestError(f"save_sharded_state: {problem}", field="path", value=path)
    return {"path": path, "pattern": pattern, "max_size": plain(max_size), "timeout": timeout}


@VERBS.add(prepare=_prepare_save)
def save_sharded_state(
    driver: EngineDriver,
    path: str,
    pattern: str | None = None,
    max_size: int | None = None,
    *,
    timeout: float | None = None,
) -> None:
    """Write the live weights to a new directory, for engines with `load_format="sharded"`; steps wait meanwhile.

    Each rank writes its part to a file of its own, with digests, so a model that is cut over ranks is nowhere
    whole. The model's configuration and tokenizer are copied next to them: the directory is a `model` for an engine of
    the same `tensor_parallel_size`, dtype and, on devices, `deterministic`, whose weights are these to the bit. It is
    on the machine that runs the model; of a fleet one replica writes it. Adapters and a draft model are not saved.

    `max_size`: most bytes of the tensors of a file, unless one tensor has more; None: a rank writes one file.
    `pattern`: the names of files, with {rank} in it, and {part} if there may be several; None: our own names.

    The directory is complete when this returns, and nothing is left there after an error. Raises `RequestError`
    if it cannot be written or is not empty, or for a pattern or size that
    is not possible; `LifecycleError` and `DirtyWeightsError` if there are no weights to
    read.
    """
    _require_whole_weights(driver, "save_sharded_state")
    with allowed():
        driver.executor.save_sharded_state(path, pattern, max_size)


@VERBS.add()
def get_model_metadata(driver: EngineDriver, *, timeout: float | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every weight."""
    return driver.executor.metadata()


@VERBS.add(public=False)
def get_missing_weights(driver: EngineDriver, names: list[str], *, timeout: float | None = None) -> list[str]:
    """Names that, with these of a source, are every weight once; none if these are enough for a whole update.

    Tied weights and the two namings of one weight count once, whichever of their names is there.
    """
    with as_weight_errors():
        return driver.executor.updater.missing(names)


@VERBS.add(public=False)
def get_unused_names(driver: EngineDriver, names: list[str], *, timeout: float | None = None) -> list[str]:
    """Those of a source's names that checkpoints of the model may have, and the model does not use."""
    with as_weight_errors():
        return driver.executor.updater.list_unused(names)


@VERBS.add(public=False)
def get_own_names(driver: EngineDriver, names: list[str], *, timeout: float | None = None) -> list[str]:
    """The model's names of the weights that checkpoints of it call `names`; names of nothing as they are."""
    return driver.executor.updater.own_names(names)


def _require_whole_weights(driver: EngineDriver, verb: str) -> None:
    """Raise, naming `verb`, if there are no weights to read, or an update is under way."""
    driver.core.lifecycle.require_weights(verb)
    if driver.core.lifecycle.updating:
        raise LifecycleError(f"{verb}: not possible while the engine is UPDATING: wait until it has ended.")
