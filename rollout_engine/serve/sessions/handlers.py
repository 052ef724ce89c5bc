"""Handlers of /sessions, for the program that starts agents: it makes, reads, rewards and deletes their sessions."""

import time
from typing import Any

from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.openai.shapes import array_fields, matched_stop
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served
from rollout_engine.serve.sessions.call import check_forced
from rollout_engine.sessions.pictures import name_pictures
from rollout_engine.sessions.rows import SessionRow
from rollout_engine.sessions.session import Session

_ARRAYS = ("routed_experts", "entropies", "hidden_states", "kept_logprob_mass")


async def create_session(
    served: Served,
    asked: Asked,
    *,
    group_id: int | str | None = None,
    sampling: dict[str, Any] | None = None,
    seconds: float | None = None,
    tokens: int | None = None,
    pin_version: bool = False,
) -> Reply:
    """Make a session: its id, its key, and the base URLs for clients of the three APIs."""
    registry, forced = served.sessions.require_on(), check_forced(sampling or {})
    options: Any = {"seconds": seconds, "tokens": tokens, "pin_version": pin_version}
    made = registry.create(now=time.monotonic(), group_id=group_id, sampling=forced, **options)
    scheme = asked.headers.get("x-forwarded-proto", "http")
    return Reply(addresses(made, f"{scheme}://{asked.headers.get('host', 'localhost')}"))


async def get_session(served: Served, asked: Asked) -> Reply:
    """How much a session holds, and whether it still takes requests."""
    found, now = served.sessions.require_on().find(asked.path_id), time.monotonic()
    return Reply(
        {
            "id": found.id,
            "group_id": found.group_id,
            "num_turns": found.num_turns,
            "num_running": found.num_open,
            "num_tokens": found.num_tokens,
            "num_bytes": found.num_bytes,
            "bytes_left": max(0, found.limits.num_bytes - found.num_bytes),
            "seconds_left": max(0.0, found.ends_at - now),
            "ended_by": found.ended_by(now),
            "reward": found.reward,
        }
    )


async def get_rows(served: Served, asked: Asked) -> Reply:
    """The training rows of a session: ids, masks, log-probs, versions, turns, parent row, why a branch began."""
    found = served.sessions.require_on().find(asked.path_id)
    rows, pictures = await run_in_thread(lambda: _rows_and_pictures(found.rows()))
    return Reply({"id": found.id, "group_id": found.group_id, "reward": found.reward, "rows": rows, **pictures})


async def set_reward(served: Served, asked: Asked, *, reward: float, row: int | None = None) -> Reply:
    """Set the reward of a session, or of one of its rows."""
    served.sessions.require_on().find(asked.path_id).set_reward(reward, row)
    return Reply({"success": True})


async def delete_session(served: Served, asked: Asked) -> Reply:
    """Delete a session with all that it holds. Its requests are cancelled."""
    served.sessions.require_on()
    served.sessions.delete(asked.path_id)
    return Reply({"success": True})


def addresses(session: Session, url: str) -> dict[str, Any]:
    """The id and key of a session, and its base URLs below the server's `url`."""
    base = f"{url}/sessions/{session.id}"
    return {
        "id": session.id,
        "api_key": session.api_key,
        "openai_base_url": f"{base}/v1",
        "responses_base_url": f"{base}/v1",
        "anthropic_base_url": base,
        "group_id": session.group_id,
    }


def _rows_and_pictures(rows: list[SessionRow]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the rows as JSON, the field with their different pictures by digest, if there are any)."""
    pictures = {each.picture.digest.hex(): each.picture for row in rows for each in row.pictures}
    arrays = {
        digest: {name: array_fields(array) for name, array in picture.arrays.items()}
        for digest, picture in pictures.items()
    }
    return [row_fields(row) for row in rows], {"pictures": arrays} if arrays else {}


def row_fields(row: SessionRow) -> dict[str, Any]:
    """A row as JSON. Log-probs of the response are 0 for context, which no sample of the row has.

    "pictures" name their digests, and so do parts of the messages.
    """
    logprobs = [0.0] * len(row.response)
    for start, sample in row.samples:
        if sample.logprobs is not None:
            logprobs[start : start + len(sample.logprobs)] = sample.logprobs.tolist()
    return {
        "row": row.row,
        "parent_row": row.parent_row,
        "began": row.began,
        "num_shared": row.num_shared,
        "prompt_token_ids": row.prompt_token_ids,
        "response_token_ids": row.response,
        "mask": row.mask,
        "turns": row.turns,
        "logprobs": logprobs,
        "samples": [_sample_fields(row, index) for index in range(len(row.samples))],
        "messages": name_pictures(row.messages),
        "reward": row.reward,
        **({"pictures": [_picture_fields(each) for each in row.pictures]} if row.pictures else {}),
    }


def _picture_fields(placed: PlacedPicture) -> dict[str, Any]:
    return {"start": placed.start, "end": placed.end, "picture": placed.picture.digest.hex()}


def _sample_fields(row: SessionRow, index: int) -> dict[str, Any]:
    start, sample = row.samples[index]
    arrays = {name: getattr(sample, name) for name in _ARRAYS}
    return {
        "start": start,
        "num_tokens": len(sample.token_ids),
        "text": sample.text,
        "finish_reason": sample.finish_reason,
        "matched_stop": matched_stop(sample),
        "seed": sample.seed,
        "version_spans": sample.version_spans,
        "adapter": row.adapters[index] if row.adapters else None,
        **{name: array_fields(array) for name, array in arrays.items() if array is not None},
        **({} if sample.forced is None else {"forced": sample.forced.tolist()}),
        **({} if sample.quantization is None else {"quantization": sample.quantization}),
    }
