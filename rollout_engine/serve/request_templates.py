"""Chat templates of requests. Their own ones are refused unless trusted, and then rendered in a process apart."""

from functools import partial
from typing import Any

import msgspec

from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.served import Served
from rollout_engine.text.conversations import CHAT_KEYS, as_messages
from rollout_engine.text.picture_parts import images_of, without_images
from rollout_engine.text.prompts import as_fields
from rollout_engine.text.shown_tools import first_unshown, refuse_unshown


def chat_options(body: msgspec.Struct) -> dict[str, Any]:
    """The options of the chat template that a body gives."""
    return {name: value for name in CHAT_KEYS if (value := getattr(body, name)) not in (None, [])}


def brings_template(served: Served, chat_template: str | None) -> bool:
    """Whether a request has a template of its own, not the name of one of the tokenizer's.

    Raises `HttpProblem` 400 unless the server trusts it.
    """
    if chat_template is None or served.codec.has_template(chat_template):
        return False
    if not served.options.trust_request_chat_template:
        message = (
            "The request brings a chat_template, which is a program, and this server does not run those of requests. "
            "Leave it out, or start the server with --trust-request-chat-template."
        )
        raise HttpProblem(400, message, field="chat_template")
    return True


async def with_rendered_text(served: Served, prompt: Any, *, must_show_tools: bool = True) -> Any:
    """A prompt of a request, in our own form, with the text that its own chat template makes of a conversation.

    Other prompts are returned as they are. `must_show_tools`: refuse tools that the text does not show.
    Raises `RequestError`, and `HttpProblem` 400 for a template that is not trusted.
    """
    if not isinstance(prompt, dict) or not brings_template(served, prompt.get("chat_template")):
        return prompt
    fields = as_fields(prompt)
    options = {name: fields.pop(name) for name in CHAT_KEYS if name in fields}
    template = options.pop("chat_template")
    if "{" not in template:
        message = (
            "chat_template is neither a Jinja template nor the name of one of the tokenizer's. A path is not read."
        )
        raise HttpProblem(400, message, field="chat_template")
    given = as_messages(fields.pop("messages"))
    messages, images = without_images(given), [image for _, image in images_of(given)]
    served.engine.frontend.inputs.pictures.check_messages(given)

    def render() -> str:
        special_tokens = served.codec.hf.special_tokens_map
        text = served.templates.render(template, messages, options, special_tokens)
        if must_show_tools and (tools := options.pop("tools", None)):
            without = partial(served.templates.render, template, messages, options, special_tokens)
            if (unshown := first_unshown(text, tools, without)) is not None:
                raise refuse_unshown(tools, unshown)
        return text

    if images:
        fields["multi_modal_data"] = {"image": images}
    return {**fields, "prompt": await run_in_thread(render), "add_special_tokens": False}
