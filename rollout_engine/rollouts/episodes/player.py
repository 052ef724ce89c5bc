"""A policy that plays: the turns of many episodes at one engine."""

import json
from collections import Counter
from functools import partial
from typing import Any, get_args

from rollout_engine.base.errors import LifecycleError, RequestError
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.thinking import count_sampled
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.reader import Reader
from rollout_engine.rollouts.episodes.conversation import Conversation, Turns, rewritten
from rollout_engine.rollouts.episodes.episode import Ask
from rollout_engine.rollouts.episodes.plan import EpisodePlan
from rollout_engine.rollouts.episodes.tool_functions import tool_name
from rollout_engine.text.chat_turns import ChatTurns
from rollout_engine.text.formats.bridge import known_bridges, message_of, needs_parts
from rollout_engine.text.formats.choose import call_format
from rollout_engine.text.formats.taught_format import taught_format
from rollout_engine.text.formats.tool_calls import TextForm, ToolCalls, ToolFormat
from rollout_engine.text.prompts import with_lora
from rollout_engine.text.text_turns import TextTurns
from rollout_engine.text.tokenizer import TextCodec


class Player:
    """Asks one engine for the turns of episodes, and reads its answers."""

    def __init__(self, frontend: Frontend, plan: EpisodePlan, *, session: str, lora: str | None = None) -> None:
        """`session`: begins the names of its sessions. `lora`: name of an adapter of its engine; None: the base alone.

        Raises `RequestError` for a template that does not fit.
        """
        if frontend.inputs.codec is None:
            raise LifecycleError("Environments speak in text: this engine has no tokenizer (skip_tokenizer_init=True).")
        self.reader = Reader(frontend)
        longest = frontend.client.info.max_model_len
        self.max_tokens = min(plan.max_episode_tokens or longest, longest)
        self._frontend = frontend
        self._codec: TextCodec = frontend.inputs.codec
        self._pictures, self._tags = frontend.inputs.pictures, frontend.inputs.thinking_tags
        self.max_pictures = self._pictures.max_pictures
        self._plan, self._session, self._lora = plan, session, lora
        self._turns: dict[str, Turns] = {}
        """Tools, as JSON -> the prompts of conversations with these tools."""
        self._has_template = bool(plan.chat.get("chat_template") or self._codec.hf.chat_template)
        self._form = plan.tool_format or self._taught_form()
        self._reader = None if self._form is None else call_format(self._codec, self._template(), self._form)
        self._require_form(self._all_tools([]))
        self._in_parts = self._reader is not None and self._takes_parts()
        self._writes = self._in_parts or (self._reader is not None and self._form not in get_args(TextForm))
        """Whether an answer's message differs from its text, in which special tokens are left out."""
        self._asked: list[tuple[int, Ask]] = []
        """Episodes whose turns are to be queued."""
        self._open: dict[str, tuple[int, Ask]] = {}
        """Request id -> the episode that it is a turn of."""
        self._requests: dict[int, str] = {}
        """The inverse of `_open`: episode -> request id."""
        self._versions: dict[int, int] = {}
        """Episode -> the policy version of all its turns, if episodes keep one."""
        self._played: set[int] = set()
        """Episodes with an answer."""
        self._num_thought: Counter[tuple[int, int]] = Counter()
        """Episode and seat -> tokens sampled inside thinking so far, with a budget of the episode."""
        self._refuses = plan.max_turns > 1 and not plan.spec.is_single_turn and plan.on_rewrite == "refuse"
        self._bridged: set[str] = set()
        """Tools, as JSON, whose calls were tried."""
        if self._refuses:
            self._require_unchanged_turns(self._turns_with([]), may_call=True)
            self._require_bridge([])

    def __len__(self) -> int:
        """Turns that have been queued and not read."""
        return len(self._open)

    def conversation(self, tools: list[dict[str, Any]]) -> Conversation:
        """Begin the conversation of a seat. Raises `RequestError`."""
        turns = self._turns_with(tools)
        if self._refuses:
            self._require_unchanged_turns(turns, may_call=bool(tools or self._plan.tools))
            self._require_bridge(tools)
        write = partial(self._write, turns, tools) if self._writes else None
        return Conversation(turns, branches=self._plan.on_rewrite == "branch", write=write)

    def find_calls(self, sample: CompletionOutput, tools: list[dict[str, Any]], prompt_end: list[int]) -> ToolCalls:
        """Find the calls in an answer to a prompt that ends with the ids `prompt_end`."""
        if self._reader is None or not (tools or self._plan.tools):
            return ToolCalls()
        parts = self._reader.read(sample.token_ids, sample.text, prompt_end=prompt_end, tools=self._all_tools(tools))
        return ToolCalls(parts.found)

    def _write(
        self, turns: Turns, tools: list[dict[str, Any]], sample: CompletionOutput, prompt_end: list[int], number: int
    ) -> dict[str, Any] | None:
        """The message of an answer whose tags are tokens: in parts, or in one text with its tags."""
        assert self._reader is not None, "it has tags"
        if not self._in_parts:
            has_tags = self._reader.has_tags(sample.token_ids)
            return turns.message(self._reader.spell_answer(sample.token_ids)) if has_tags else None
        parts = self._reader.read(sample.token_ids, sample.text, prompt_end=prompt_end, tools=self._all_tools(tools))
        return message_of(parts, [f"call{number + index:05}" for index in range(len(parts.calls))])

    def ask(self, key: int, ask: Ask) -> None:
        """Have the next `queue` ask for an episode's turn."""
        self._asked.append((key, ask))

    def queue(self) -> None:
        """Queue the requests of all turns that were asked for."""
        if not self._asked:
            return
        asked, self._asked = self._asked, []
        request_ids = self.reader.add_all(
            with_lora([{"prompt_token_ids": ask.token_ids, "pictures": ask.pictures} for _, ask in asked], self._lora),
            [self._params_of(key, ask) for key, ask in asked],
            session_id=[f"{self._session}-{key}-{ask.seat}" for key, ask in asked],
            seeds=[ask.seed for _, ask in asked],
        )
        self._open.update(zip(request_ids, asked, strict=True))
        self._requests.update((key, request_id) for request_id, (key, _) in zip(request_ids, asked, strict=True))

    def read(self) -> list[tuple[int, CompletionOutput]]:
        """Take the answers that have arrived, by episode; computes a step or waits a moment if there are none.

        Turns that a pause, sleep or update with mode="abort" has cut short are asked for again, with the same seeds.
        An answer with `finish_reason` "abort" means that an update has ended the version of an episode with turns.
        """
        answers = []
        for output in self.reader.read():
            key, ask = self._open.pop(output.request_id)
            del self._requests[key]
            [sample] = output.outputs
            if not self._keeps(key, sample):
                self.ask(key, ask)
            else:
                self._played.add(key)
                self._count_thinking(key, ask, sample)
                answers.append((key, sample))
        return answers

    def abort(self, key: int) -> None:
        """End an episode's turn without an answer."""
        self._asked = [each for each in self._asked if each[0] != key]
        request_id = self._requests.pop(key, None)
        if request_id is not None:
            del self._open[request_id]
            self.reader.abort([request_id])

    def abort_all(self) -> None:
        """End all turns without an answer."""
        unfinished, self._open, self._requests, self._asked = list(self._open), {}, {}, []
        if unfinished:
            self.reader.abort(unfinished)

    def _keeps(self, key: int, sample: CompletionOutput) -> bool:
        """Whether a turn is complete, or ends its episode because the version of that is past; else it is repeated.

        An episode without a turn begins again, under the version that is live then.
        """
        if sample.finish_reason == "abort":
            if sample.error is not None and key not in self._played and self._plan.pins_version:
                self._versions.pop(key, None)
                return False
            return sample.error is not None
        if self._plan.pins_version and key not in self._versions:  # it had to wait for its first version
            versions = {span.policy_version for span in sample.version_spans}
            if len(versions) > 1:
                return False
            self._versions.update((key, version) for version in versions)
        return True

    def _version_of(self, key: int) -> dict[str, Any]:
        """Parameters for the version of an episode: if it keeps one, the live one when its first turn is queued."""
        params, live = self._plan.params, self._frontend.client.policy_version
        if self._plan.pins_version and (key in self._versions or live >= (params.min_policy_version or 0)):
            version = self._versions.setdefault(key, live)
            return {"policy_version": version, "min_policy_version": None, "version_wait": "end"}
        return {"version_wait": "end"} if params.policy_version is not None and key in self._played else {}

    def _params_of(self, key: int, ask: Ask) -> SamplingParams:
        """Parameters of an answer, within the room that is left for it and the rest of an episode's budget."""
        params, changes = self._plan.params, self._version_of(key)
        if params.max_tokens is None or params.max_tokens > ask.room:
            changes["max_tokens"] = ask.room
        if (budget := self._plan.episode_thinking_budget) is not None:
            left = max(0, budget - self._num_thought[key, ask.seat])
            changes["thinking_budget"] = min(left, left if params.thinking_budget is None else params.thinking_budget)
        return params.clone(**changes) if changes else params

    def note_answer(self, key: int, ask: Ask, sample: CompletionOutput) -> None:
        """Note an answer to a turn that an earlier process asked for: its thinking, and the version that it keeps."""
        self._count_thinking(key, ask, sample)
        self._played.add(key)
        if self._plan.pins_version:
            self._versions.update((key, span.policy_version) for span in sample.version_spans)

    def forget(self, key: int) -> None:
        """Forget the turns of an episode, which begins anew."""
        self._versions.pop(key, None)
        self._played.discard(key)
        for of_seat in [each for each in self._num_thought if each[0] == key]:
            del self._num_thought[of_seat]

    def _count_thinking(self, key: int, ask: Ask, sample: CompletionOutput) -> None:
        if self._plan.episode_thinking_budget is None:
            return
        budget = self._tags.budget_of(self._params_of(key, ask), ask.token_ids)
        assert budget is not None, "each answer has one"
        self._num_thought[key, ask.seat] += count_sampled(budget, sample.token_ids)

    def _turns_with(self, tools: list[dict[str, Any]]) -> Turns:
        key = json.dumps(tools, sort_keys=True)
        if key not in self._turns:
            self._turns[key] = self._new_turns(self._all_tools(tools))
        return self._turns[key]

    def _all_tools(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Schemas of the rollout's tools and an environment's."""
        return [*(tool.schema for tool in self._plan.tools.values()), *tools]

    def _new_turns(self, tools: list[dict[str, Any]]) -> Turns:
        self._require_form(tools)
        if self._has_template:
            return ChatTurns(self._codec, self._pictures, **self._plan.chat, **({"tools": tools} if tools else {}))
        if tools:
            raise RequestError.for_field("tools", tools, "absent: this tokenizer has no chat template to show them")
        return TextTurns(self._codec)

    def _require_form(self, tools: list[dict[str, Any]]) -> None:
        if tools and self._has_template and self._form is None:
            forms = " or ".join(map(repr, get_args(ToolFormat)))
            hint = f"Give tool_format={forms}: the form in which the policy writes calls."
            bound = "absent: the chat template teaches no form of calls that is read here"
            raise RequestError.for_field("tools", list(map(tool_name, tools)), bound, hint)

    def _taught_form(self) -> ToolFormat | None:
        if not self._has_template:
            return None
        return taught_format(self._codec, self._template())

    def _takes_parts(self) -> bool:
        assert self._reader is not None, "it has a form"
        return self._has_template and needs_parts(self._codec, self._plan.chat, self._reader)

    def _template(self) -> str | None:
        return self._plan.chat.get("chat_template")

    def _require_bridge(self, tools: list[dict[str, Any]]) -> None:
        """Raise `RequestError` if no result can follow a call of the rollout's own tools; warn of kinds that cannot.

        An environment that has tools may answer their calls as a user, so that of those it is only warned.
        """
        key = json.dumps(tools, sort_keys=True)
        if self._reader is None or not self._has_template or key in self._bridged or not self._all_tools(tools):
            return
        self._bridged.add(key)
        options: Any = {**self._plan.chat, "tools": self._all_tools(tools)}
        tried = {kind: why for kind, why in known_bridges(self._codec, options, self._form).items() if "call" in kind}
        failed = {kind: why for kind, why in tried.items() if why is not None}
        if not failed:
            return
        kinds, reason = " and ".join(failed), next(iter(failed.values()))
        if self._plan.tools and failed.keys() == tried.keys():
            raise rewritten(f"of answers with {kinds}: {reason}")
        self._codec.warn_once(
            f"Episodes in which an answer is {kinds} end there with an error, since the chat template rewrites it "
            f"({reason}). on_rewrite='branch' begins a row behind it."
        )

    def _require_unchanged_turns(self, turns: Turns, *, may_call: bool) -> None:
        """Raise `RequestError` if the template rewrites turns before a user and, with `may_call`, before a tool too."""
        found: list[RequestError] = []
        for role in ("user", "tool") if may_call else ("user",):
            try:
                how = turns.rewriting([role])
            except RequestError as problem:  # a template may refuse a role
                found.append(problem)
                continue
            if how is None:
                return
            found.append(rewritten(how))
        raise found[0]
