"""Prompts of later turns that begin with the ids of the turns before, as they were sampled."""

from collections.abc import Sequence
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.served import Served
from rollout_engine.text.chat_turns import ChatTurns, RewrittenTurns, once_followed
from rollout_engine.text.conversations import as_messages


def prompt_after(served: Served, prefix: Sequence[int], messages: Sequence[Any], options: dict[str, Any]) -> list[int]:
    """Token ids of a conversation that begins with `prefix`: its last answer and all before, as sampled.

    The messages after the last answer follow as the chat template writes them. Raises `RequestError` where there is no
    answer, nothing after it, or a template that rewrites earlier turns.
    """
    listed = as_messages(list(messages))
    answered = [index for index, message in enumerate(listed) if message["role"] == "assistant"]
    new = listed[answered[-1] + 1 :] if answered else []
    if not prefix or not new:
        bound = "given with messages that have an answer, and at least one message after it"
        raise RequestError.for_field("required_prefix_token_ids", list(prefix)[:8], bound)
    turns, past = ChatTurns(served.codec, **options), listed[: answered[-1]]
    opened = turns.text(past) if past else None
    sampled, roles = served.codec.decode(served.codec.without_end(prefix)), [message["role"] for message in new]
    try:
        if opened is not None and sampled.startswith(opened):
            said = sampled[len(opened) :]
            return [*prefix, *turns.between(opened, turns.text([*past, turns.message(said), *new]), said, prefix)]
        rewriting = turns.rewriting(roles)  # earlier answers differ from the messages: what was sampled is not known
    except RewrittenTurns as problem:
        rewriting = once_followed(roles, problem.how)
    if rewriting is not None:
        what = f"the chat template rewrites earlier turns ({rewriting})"
        raise RequestError(f"required_prefix_token_ids cannot be kept: {what}.", field="required_prefix_token_ids")
    return [*prefix, *turns.glue(new, prefix)]
