"""The server's log, whose lines name the request that they are about."""

import logging
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that is answered here: the client's X-Request-Id, or a new one."""


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds the request's id to each line, and as `request_id` to its record."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        request_id = REQUEST_ID.get()
        kwargs["extra"] = {**kwargs.get("extra", {}), "request_id": request_id}
        if not request_id:
            return msg, kwargs
        return f"{msg} [request {request_id.replace('%', '%%')}]", kwargs


logger = RequestLog(logging.getLogger("rollout_engine.serve"))
