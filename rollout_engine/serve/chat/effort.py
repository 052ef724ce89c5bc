"""How much to think, as fields of other servers ask for it, in the variables of chat templates that have some."""

from typing import Any

from rollout_engine.serve.served import Served

_WARNING = "Requests ask for effort %r; the chat template reads no reasoning_effort, so it changes nothing."


def template_variables(
    served: Served, chat_template: str | None, *, effort: str | None, thinks: bool | None
) -> dict[str, Any]:
    """The template's variables `reasoning_effort` and `enable_thinking`, those that it reads.

    `effort` without effect is logged once: programs send it without being asked. `thinks`: None: not given.
    """
    if effort is None and thinks is None:
        return {}
    template = served.codec.find_template(chat_template, None)
    found: dict[str, Any] = {}
    if effort is not None:
        if "reasoning_effort" in template:
            found["reasoning_effort"] = effort
        else:
            served.codec.warn_once(_WARNING % effort[:40])
    if thinks is not None and "enable_thinking" in template:
        found["enable_thinking"] = thinks
    return found
