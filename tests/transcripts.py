"""Transcripts of clients: the requests that a client sent, and the shapes of the responses that it could read.

A file is JSON: `client` (name and version) and `calls`, each with `method`, `path` (with its query), `body`, `status`
and `response`, a shape. The shape of an object is an object of shapes; of a list, `[shape of any element]`; of a stream
of events, `{"events": [shape of any event], "done": whether [DONE] came}`; of any other value, the name of its type
("string", "number", "boolean", "null"). A value that comes in several shapes has `{"any of": [...]}`; an object keyed
by tokens has the one key "*". `$CHECKPOINT` in a body stands for the directory of the model that is served. A body that
is no text is `{"$base64": ...}`. The n-th session of a client has the n-th of `SESSION_IDS` as its id.
"""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.serve.app import App
from rollout_engine.testing import tiny_checkpoint
from rollout_engine.testing.models import CHAT_TEMPLATE

FOLDER = Path(__file__).parent / "unit" / "serve" / "transcripts"
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }} by <tool_call>{% endfor %}"
_CALLS = "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
_KEYED_BY_TOKENS = ("top_logprobs", "prompt_logprobs")
SESSION_IDS = [f"{n:032d}" for n in range(1, 100)]
"""As long as the server's own, so that they can take their places in messages too."""
_OPENS_SESSION = "/api/v1/create_session"
_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


def served_checkpoint(directory: Path) -> Path:
    """Write the model that clients are recorded with: tiny, and its chat template knows of tools."""
    path = tiny_checkpoint(directory, std=0.4)  # far enough from uniform for OpenEnv's probe to measure
    path.joinpath("chat_template.jinja").write_text(_TOOLS + CHAT_TEMPLATE.replace("<eos>", f"{_CALLS}<eos>", 1))
    return path


def shape_of(value: Any, name: str = "") -> Any:
    """The shape of a JSON value that stands under `name`."""
    if isinstance(value, list):
        return [_union([shape_of(each, name) for each in value])] if value else []
    if isinstance(value, dict):
        if name in _KEYED_BY_TOKENS and not {"token", "logprob"} <= value.keys():
            return {"*": _union([shape_of(each) for each in value.values()])}
        return {key: shape_of(each, key) for key, each in value.items()}
    return _TYPES[type(value)]


def missing(recorded: Any, found: Any, where: str = "$") -> list[str]:
    """Where a shape lacks something that was recorded, or has something of another type. Empty: nowhere.

    Whether a value is null or a string may change from run to run; each shape of an object must come again.
    """
    expected, given = _choices(recorded), _choices(found)
    wrong = [_closest([_missing_one(one, each, where) for one in expected], where, each) for each in given]
    for one in (each for each in expected if isinstance(each, dict)):
        wrong.append(_closest([_missing_one(one, each, where) for each in given], where, one))
    return list(dict.fromkeys(problem for problems in wrong for problem in problems))


def _closest(problems: list[list[str]], where: str, shape: Any) -> list[str]:
    return min(problems, key=len, default=[f"{where}: no {json.dumps(shape)}"])


def _missing_one(recorded: Any, found: Any, where: str) -> list[str]:
    if type(recorded) is not type(found):
        return [f"{where}: {json.dumps(found)}, not {json.dumps(recorded)}"]
    if isinstance(recorded, list):
        if recorded and not found:
            return [f"{where} is empty"]
        return missing(recorded[0], found[0], f"{where}[]") if recorded else []
    if isinstance(recorded, dict):
        absent = [f"{where}.{key} is gone" for key in recorded if key not in found]
        shared = [key for key in recorded if key in found]
        return absent + [each for key in shared for each in missing(recorded[key], found[key], f"{where}.{key}")]
    return [] if recorded == found else [f"{where}: {found}, not {recorded}"]


def _choices(shape: Any) -> list[Any]:
    return shape["any of"] if isinstance(shape, dict) and shape.keys() == {"any of"} else [shape]


def _union(shapes: list[Any]) -> Any:
    """The shape of a value that has any of these. Objects that differ in shape alone become one where they can."""
    distinct: list[Any] = []
    for shape in (each for one in shapes for each in _choices(one)):
        if shape not in distinct:
            distinct.append(shape)
    objects = [each for each in distinct if isinstance(each, dict)]
    if len(objects) > 1 and all(each.keys() == objects[0].keys() for each in objects):
        merged = {key: _union([each[key] for each in objects]) for key in objects[0]}
        distinct = [each for each in distinct if not isinstance(each, dict)] + [merged]
    lists = [each for each in distinct if isinstance(each, list)]
    if len(lists) > 1:
        inner = [element for each in lists for element in each]
        distinct = [each for each in distinct if not isinstance(each, list)] + [[_union(inner)]]
    return distinct[0] if len(distinct) == 1 else {"any of": distinct}


def response_shape(content_type: str, data: bytes) -> Any:
    """The shape of a response's body; "string" for one that is no JSON."""
    if content_type.startswith("text/event-stream"):
        lines = [line.partition("data: ")[2] for line in data.decode().split("\n\n") if line]  # names are types, too
        ends = [line for line in lines if line == "[DONE]"]
        return {"events": shape_of([json.loads(line) for line in lines if line != "[DONE]"]), "done": len(ends) == 1}
    return shape_of(json.loads(data)) if content_type.startswith("application/json") else "string"


@contextmanager
def recording(checkpoint: Path) -> Iterator[list[dict[str, Any]]]:
    """Record the calls of every `App` in this process. A call whose shape is its predecessor's is left out."""
    calls: list[dict[str, Any]] = []
    sessions: dict[bytes, bytes] = {}
    answer = App.__call__

    async def record(self: App, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await answer(self, scope, receive, send)
        asked, said, head = bytearray(), bytearray(), {}
        query = scope["query_string"].decode()
        call: dict[str, Any] = {"method": scope["method"], "path": scope["path"] + (f"?{query}" if query else "")}
        calls.append(call)

        async def hear() -> Any:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def tell(message: Any) -> None:
            head.update(message if message["type"] == "http.response.start" else {})
            said.extend(message.get("body", b""))
            await send(message)

        try:
            await answer(self, {**scope, "extensions": {}}, hear, tell)  # so that bodies are read by `hear`
        finally:
            headers = dict(head.get("headers", ()))
            call["path"] = with_sessions(call["path"].encode(), sessions).decode()
            call["body"] = _write_body(with_sessions(bytes(asked), sessions), checkpoint)
            if scope["path"] == _OPENS_SESSION:
                sessions[json.loads(said)["session_id"].encode()] = SESSION_IDS[len(sessions)].encode()
            call["status"] = head.get("status")
            call["response"] = response_shape(headers.get(b"content-type", b"").decode(), bytes(said))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(App, "__call__", record)
        yield calls


def with_sessions(data: bytes, names: dict[bytes, bytes]) -> bytes:
    """The same with other names of sessions, each as long as the one that it replaces."""
    for name, other in names.items():
        data = data.replace(name, other)
    return data


def replay(send: Callable[..., Any], call: dict[str, Any], sessions: dict[bytes, bytes]) -> Any:
    """Send a recorded request by `send(method, path, **options)`; the response.

    `sessions`: ids of the recorded sessions that were opened so far -> those of the new ones.
    """
    path, body = with_sessions(call["path"].encode(), sessions).decode(), call["body"]
    if isinstance(body, dict) and body.keys() == {"$base64"}:
        response = send(call["method"], path, content=with_sessions(base64.b64decode(body["$base64"]), sessions))
    else:
        named = body and json.loads(with_sessions(json.dumps(body).encode(), sessions))
        response = send(call["method"], path, named)
    if call["path"] == _OPENS_SESSION:
        sessions[SESSION_IDS[len(sessions)].encode()] = response.json()["session_id"].encode()
    return response


def _write_body(data: bytes, checkpoint: Path) -> Any:
    """A body as a transcript has it."""
    try:
        text = data.decode().replace(str(checkpoint), "$CHECKPOINT")
        return json.loads(text) if text else None
    except ValueError:
        return {"$base64": base64.b64encode(data).decode()}


def save(name: str, client: str, calls: list[dict[str, Any]]) -> None:
    """Write a transcript to the folder that the quick test replays."""
    kept: list[dict[str, Any]] = []
    for call in calls:
        if (
            not kept or call["path"].startswith("/api/v1/") or _kind(kept[-1]) != _kind(call)
        ):  # Tinker's build on others
            kept.append(call)
    lines = ",\n".join(json.dumps(call) for call in kept)
    FOLDER.joinpath(f"{name}.json").write_text(f'{{"client": {json.dumps(client)}, "calls": [\n{lines}\n]}}\n')


def _kind(call: dict[str, Any]) -> Any:
    return call["method"], call["path"], shape_of(call["body"]), call["status"], call["response"]
