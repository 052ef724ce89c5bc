"""The part of a session in one request that samples: its prompt, its settings, and the record of its answer."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import mix, unsigned
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.route import Asked
from rollout_engine.serve.sampling import Settings
from rollout_engine.sessions.known_responses import KnownResponses
from rollout_engine.sessions.place import Place
from rollout_engine.sessions.prompts import PromptCache
from rollout_engine.sessions.samples import join_parts
from rollout_engine.sessions.session import Session
from rollout_engine.text.tokenizer import TextCodec

_NOT_FORCED = frozenset(("n", "output_kind", "detokenize", "truncate_prompt_tokens", "prompt_logprobs"))
"""Sampling params that belong to single requests."""
_TURNS = 1 << 32
"""Request k is drawn as turn k of an episode is (`episodes.episode.seed_of_turn`)."""
_KEEPS_ALL = (
    'A session\'s rows keep every token of its prompts: send fewer messages (that begins a row, "compacted"), or ask '
    "for truncation outside of the session."
)
_MAX_KEPT = 64
_FEW_MESSAGES = 8
"""Messages that are found on the event loop if the body is short, too."""
ForcedParams: TypeAlias = dict[tuple[int, str], tuple[SamplingParams, SamplingParams]]


def check_forced(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling params of a session, checked. Raises `RequestError`."""
    for name in sampling:
        if name in _NOT_FORCED:
            raise RequestError.for_field(f"sampling['{name}']", sampling[name], "left to the session's requests")
    SamplingParams(**sampling)
    return dict(sampling)


class SessionCall:
    """Joins a request with its session. The application makes one for each request, and closes it."""

    def __init__(
        self,
        session: Session,
        asked: Asked,
        codec: TextCodec,
        prompts: PromptCache,
        forced: ForcedParams,
        live_version: Callable[[], int],
    ) -> None:
        """`forced`: params that were forced before, shared by all calls of a server."""
        self._session, self._asked, self._codec, self._prompts, self._forced = session, asked, codec, prompts, forced
        self._live_version = live_version
        self._place: Place | None = None
        self._has_answer = False

    @property
    def known_responses(self) -> KnownResponses:
        """Responses of the session that a request may name."""
        return self._session.known_responses

    async def begin(
        self, messages: Sequence[Any], options: Mapping[str, Any], settings: Settings, *, lora: str | None = None
    ) -> tuple[dict[str, Any], Settings]:
        """(the prompt of a conversation, continued behind sampled ids if it can be; its settings under the session's).

        Args:
            options: of the chat template, as in `ChatOptions`.
            lora: the adapter that answers.

        Raises `RequestError`, also for a chat template of the request's own.
        """
        prefix = getattr(self._asked.body, "required_prefix_token_ids", None)
        if prefix is not None:
            bound = "absent in a session: it continues behind sampled ids anyway"
            raise RequestError.for_field("required_prefix_token_ids", prefix[:8], bound)
        template = options.get("chat_template")
        if template is not None and not self._codec.has_template(template):
            bound = "absent in a session, whose later turns are rendered by the tokenizer's own template"
            raise RequestError.for_field("chat_template", template, bound)
        params = self._force(settings.params)
        place = self._place = await self._find_place(messages, options, params, lora)
        if place.max_tokens is not None and params.max_tokens != place.max_tokens:
            params = params.clone(max_tokens=place.max_tokens, min_tokens=min(params.min_tokens, place.max_tokens))
        seed = self._session.sampling.get("seed")
        if seed is not None:
            first = unsigned(seed)
            settings = settings._replace(seed=mix(first, _TURNS + place.number) if place.number else first)
        pictures = {"pictures": place.pictures} if place.pictures else {}
        return {"prompt_token_ids": place.prompt_token_ids, **pictures}, settings._replace(params=params)

    def record(self, parts: Sequence[CompletionOutput], message: Mapping[str, Any]) -> None:
        """Record a sample that has ended, before the client has the end of it.

        Args:
            parts: the sample; of a stream all its outputs, each with its new part.
            message: the answer in OpenAI's form, as it will be among the messages of later requests.
        """
        if self._place is not None:
            self._has_answer = True
            self._session.record(self._place, [join_parts(parts)], [message])

    def close(self) -> None:
        """End the request's part of the session. Samples that were not recorded are forgotten."""
        if self._place is not None:
            self._session.cancel(self._place)
            self._place = None
            if not self._has_answer:
                self._session.note_no_answer(self._live_version())

    async def _find_place(
        self, messages: Sequence[Any], options: Mapping[str, Any], params: SamplingParams, lora: str | None
    ) -> Place:
        """The request's place. One that is found on a thread after the client has left is given up."""

        def find() -> Place:
            prompts = self._prompts.find(options)
            return self._session.place(messages, prompts, now=time.monotonic(), params=params, adapter=lora)

        if not self._asked.is_long and len(messages) <= _FEW_MESSAGES:  # they may be those of an earlier response
            return find()
        work = asyncio.ensure_future(run_in_thread(find))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(self._give_up)
            raise

    def _give_up(self, work: "asyncio.Future[Place]") -> None:
        if not work.cancelled() and work.exception() is None:
            self._session.cancel(work.result())

    def _force(self, params: SamplingParams) -> SamplingParams:
        """The params of a request with those of the session, and with log-probs."""
        if params.truncate_prompt_tokens is not None:
            raise RequestError.for_field(
                "truncate_prompt_tokens", params.truncate_prompt_tokens, "absent in a session", _KEEPS_ALL
            )
        sampling = {name: value for name, value in self._session.sampling.items() if name != "seed"}
        sampling |= self._session.version_params(self._live_version())
        if not sampling and params.logprobs is not None:
            return params
        key = id(params), repr(sorted(sampling.items()))
        known = self._forced.get(key)
        if known is None:
            changes = {**sampling, "logprobs": max(params.logprobs or 0, sampling.get("logprobs") or 0)}
            if -1 in (params.logprobs, sampling.get("logprobs")):
                changes["logprobs"] = -1
            known = params, params.clone(**changes)
            if len(self._forced) >= _MAX_KEPT:
                self._forced.clear()
            self._forced[key] = known  # with the params themselves: no others get their id meanwhile
        return known[1]
