"""Prompts that a teacher alone sees, in place of a rollout's."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.batches.reward_functions import RewardCall
from rollout_engine.rollouts.plan import GroupTask
from rollout_engine.text.input_processor import InputProcessor
from rollout_engine.text.prompts import as_fields, with_chat_options


def make_prompt(inputs: InputProcessor, name: str, prompt: Any, task: GroupTask, chat: Mapping[str, Any]) -> list[int]:
    """Token ids of the prompt that teacher `name` sees for a task; `prompt`: its function, or the name of a column.

    `chat`: options of the chat template. Raises `RequestError` for a column that is missing, and for a wrong prompt.
    """
    field = f"prompt of teacher '{name}'"
    if isinstance(prompt, str):
        if prompt not in task.columns:
            raise RequestError.for_field(field, prompt, f"one of the columns {sorted(task.columns)}")
        made = task.columns[prompt]
    else:
        made = _call_prompt(field, prompt, task)
    try:
        fields = as_fields(made)
        if "messages" in fields:
            [fields] = with_chat_options([fields], chat)  # type: ignore[arg-type]  # it is a part of them
        ids = inputs.token_ids_of(fields)
    except RequestError as problem:
        named = f"{field}, for prompts[{task.index}]"
        raise RequestError(f"{named}: {problem}", field=field, value=made) from problem
    if not ids:
        raise RequestError.for_field(f"{field}, for prompts[{task.index}]", made, "at least one token long")
    return ids


def check_room(name: str, info: Any, task: GroupTask, num_tokens: int) -> None:
    """Raise `RequestError` if `max_tokens` may not fit behind teacher `name`'s prompt of `num_tokens`.

    `info`: sizes of the teacher's model; None: not known.
    """
    most = task.params.max_tokens
    if info is None or num_tokens + (most or 1) <= info.max_model_len:
        return
    field = f"prompt of teacher '{name}', for prompts[{task.index}]"
    bound = f"at most its max_model_len={info.max_model_len}, with max_tokens={most} behind it"
    hint = "Shorten it, lower max_tokens, or give Teacher(on_failure='nan')."
    raise RequestError.for_field(field, f"{num_tokens} tokens", bound, hint)


def _call_prompt(field: str, function: Any, task: GroupTask) -> Any:
    """Call a teacher's function with the prompt, and the columns that it takes, as reward functions are called."""
    columns = task.columns
    call = RewardCall(partial(function, task.prompt), field, 1.0)
    if missing := call.missing(columns):
        bound = f"a function of the prompt and of columns, {sorted(columns)}"
        hint = f"It needs '{missing[0]}', which is no column."
        raise RequestError.for_field(field, function, bound, hint)
    return call.function(**{name: value for name, value in columns.items() if call.takes(name)})
