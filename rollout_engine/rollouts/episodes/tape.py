"""The journal of a rollout over environments: the events of each episode, in their order.

    Played(Reset's reply) ── Answered ── Played(step's reply) ── Answered ── ...  ── Ended
                             a turn of a policy

An episode that has ended is made again from its events alone, without its environment. One that has not is played again
in a new environment, which gets the seed and the actions and must reply as before; turns of policies and results of the
rollout's own tools and functions are taken from the journal. Then it continues behind its last turn.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from envs_adapters.base import Message, Observation
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.episodes.env_host import Began, EnvFailure, name_of_env
from rollout_engine.rollouts.episodes.env_processes import digest_of_reply
from rollout_engine.rollouts.episodes.env_wire import Reply
from rollout_engine.rollouts.episodes.episode import EndedBy
from rollout_engine.rollouts.episodes.observations import plain_data
from rollout_engine.rollouts.episodes.plan import EpisodePlan
from rollout_engine.rollouts.journal.identity import FrontendWeights, as_plain, changed_fields, describe_model
from rollout_engine.rollouts.journal.journal import Head, Journal, Location, open_with
from rollout_engine.rollouts.journal.live_weights import NOTHING_SEEN, read_change
from rollout_engine.rollouts.journal.position import check_identity
from rollout_engine.rollouts.journal.records import RecordCodec

logger = logging.getLogger("rollout_engine")


class Played(msgspec.Struct, tag="played", frozen=True):
    """An environment has been reset, has taken a step, or has failed."""

    key: int
    began: Began | None = None
    observation: Observation | None = None
    failure: str | None = None


class Answered(msgspec.Struct, tag="answered", frozen=True):
    """A policy has answered."""

    key: int
    sample: CompletionOutput


class Returned(msgspec.Struct, tag="returned", frozen=True):
    """Tools of the rollout have returned messages, or the function that plays a seat a text."""

    key: int
    value: list[Message] | str


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """An episode has ended. `ended_by`: the cause if no event before it was. `error`: why it failed, if it has."""

    key: int
    ended_by: EndedBy | None = None
    error: str | None = None
    num_left: int = 0
    """Events before it that the episode has not had: its time was up while it was played again."""


class Restarted(msgspec.Struct, tag="restarted", frozen=True):
    """An episode begins anew; its earlier events no longer count."""

    key: int


class Told(msgspec.Struct, tag="told", frozen=True):
    """A group was passed to its listeners."""

    group: int


class LiveDigest(msgspec.Struct, tag="weights", frozen=True):
    """A version was live for the first time, or again with other weights."""

    version: int
    digest: str


Event: TypeAlias = Played | Answered | Returned | Ended
_Record: TypeAlias = Event | Restarted | Told | LiveDigest

_codec: RecordCodec[_Record] = RecordCodec(_Record)
_KEEP = 1_000_000


class Script:
    """The events of an episode that an earlier process played."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = deque(events)
        self.has_taken = False
        """Whether `matches` has taken the last result that arrived."""

    def __len__(self) -> int:
        return len(self._events)

    @property
    def has_end(self) -> bool:
        """Whether the episode has ended in it."""
        return bool(self._events) and isinstance(self._events[-1], Ended)

    def take_before_end(self) -> Event:
        """Take the next event of an episode that has ended; its end behind the last one that the episode has had."""
        end = self._events[-1]
        is_last = isinstance(end, Ended) and len(self._events) - 1 <= end.num_left
        return self._events.pop() if is_last else self._events.popleft()

    def take_result(self) -> Any:
        """Take the next event if it needs no environment: a sample, messages or a text; else None."""
        if not self._events or not isinstance(self._events[0], Answered | Returned):
            return None
        event = self._events.popleft()
        return event.sample if isinstance(event, Answered) else event.value  # type: ignore[union-attr]

    def matches(self, result: Any) -> bool:
        """Take the reply that an environment gave before. Returns whether `result` equals it, except for `info`."""
        event, self.has_taken = self._events.popleft(), True
        return isinstance(event, Played) and _digest(_record_of(0, result)) == _digest(event)


class EpisodeTape:
    """The journal of one rollout. Made by `open_tape`; `close` it."""

    def __init__(self, frontend: Frontend, plan: EpisodePlan) -> None:
        """Open or begin it. Raises `RequestError` for a directory that cannot be used, or holds another rollout."""
        assert plan.journal is not None, "the plan has a journal"
        self._scripts: dict[int, list[Event]] = {}
        self._told: set[int] = set()
        self._weights, self._versions = FrontendWeights(frontend, plan.lora), dict[int, str]()
        self._lost: set[int] = set()
        """Episodes with turns by weights that no longer exist."""
        self._live, self._seen = -1, NOTHING_SEEN
        """The live version, as it was noted last; and with the updates before it."""
        self._before: dict[str, Any] | None = None
        options = msgspec.structs.replace(plan.journal, keep_segments=_KEEP)
        self._journal: Journal = open_with(options, "rollout", self._take)
        try:
            seed = plan.seed if self._before is None or not plan.draws_seed else self._before.get("seed", plan.seed)
            self.plan = msgspec.structs.replace(plan, seed=seed)
            """The plan with the seed of the journal, unless the rollout has its own."""
            self._identity = identity = plan_identity(frontend, self.plan)
            if self._before is None:
                self._journal.begin(identity, {})
            check_identity(f"journal={options.directory!r}", self._before or identity, identity)
        except BaseException:
            self._journal.close()
            raise

    def script(self, key: int) -> Script:
        """The events that an episode continues behind; empty if it begins anew, or is new. Call it once for each."""
        events = self._scripts.pop(key, [])
        if not events or isinstance(events[-1], Ended):
            return Script(events)
        self.observe()
        versions = {span.policy_version for e in events if isinstance(e, Answered) for span in e.sample.version_spans}
        if self.plan.on_resume == "anew" or key in self._lost or max(versions, default=-1) > self._live:
            if versions:
                logger.warning("%s: episode %d begins anew: %s", self._name, key, self._reason(key))
            self._write(Restarted(key))
            return Script([])
        if versions - {self._live} and not self.plan.pins_version:
            text = "%s: episode %d continues under version %d; its turns so far were sampled by %s"
            logger.warning(text, self._name, key, self._live, sorted(versions))
        return Script(events)

    def observe(self) -> None:
        """Note the live weights."""
        change = read_change(self._weights, self._seen)
        if change is None:
            return
        self._seen, digest = change
        self._live = version = self._seen[0]
        if self._versions.get(version) != digest:
            self._write(LiveDigest(version, digest))

    def note(self, key: int, result: Any) -> None:
        """Append a result of an episode's environment, policy, tools or function."""
        if isinstance(result, CompletionOutput):
            self.observe()
            self._write(Answered(key, result))
        elif isinstance(result, list | str):
            self._write(Returned(key, plain_data(result)))
        else:
            self._write(_record_of(key, result))
        if self._journal.is_full:
            self._journal.begin(self._identity, {})

    def note_end(self, key: int, ended_by: EndedBy | None, error: str | None, *, num_left: int = 0) -> None:
        """Append the end of an episode. `num_left`: events of an earlier process that it has not had."""
        self._write(Ended(key, ended_by, error, num_left))

    def note_restart(self, key: int) -> None:
        """Append that an episode begins anew, because its environment did not reply as before."""
        logger.warning(
            "%s: episode %d begins anew: its environment, played again from its seed and actions, replied otherwise. "
            "An environment has to be determined by both",
            *(self._name, key),
        )
        self._write(Restarted(key))

    def is_told(self, group: int) -> bool:
        """Whether listeners have received a group."""
        return group in self._told

    def note_told(self, group: int) -> None:
        """Append that listeners have received a group."""
        self._write(Told(group))

    def sync(self) -> None:
        """Wait until all events are on the disk."""
        self._journal.sync()

    def close(self) -> None:
        """Release the directory. Calling it again is a no-op."""
        self._journal.close()

    @property
    def _name(self) -> str:
        return f"journal={self._journal.options.directory}"

    def _reason(self, key: int) -> str:
        if self.plan.on_resume == "anew":
            return "on_resume='anew'"
        return f"the weights that sampled it are not live (version {self._live})"

    def _write(self, record: _Record) -> None:
        self._journal.append(_codec.encode(record))
        if not isinstance(record, Event):
            self._apply(record)

    def _take(self, location: Location, record: Head | bytes) -> None:
        if isinstance(record, Head):
            self._before = self._before or record.identity
        else:
            self._apply(_codec.decode(record))

    def _apply(self, record: _Record) -> None:
        if isinstance(record, Event):
            self._scripts.setdefault(record.key, []).append(record)
        elif isinstance(record, Restarted):
            self._scripts.pop(record.key, None)
            self._lost.discard(record.key)
        elif isinstance(record, Told):
            self._told.add(record.group)
        else:
            version, known = record.version, self._versions.get(record.version)
            if known is None:  # turns before this record are of weights whose digest was not read
                self._lose(lambda other: other == version)
            elif known != record.digest:  # later ones no longer exist either
                self._lose(lambda other: other >= version)
            self._versions[version] = record.digest

    def _lose(self, is_lost: Callable[[int], bool]) -> None:
        """Note that turns by these versions are of weights that no longer exist, or of unknown ones."""
        for key, events in self._scripts.items():
            samples = [event.sample for event in events if isinstance(event, Answered)]
            if any(is_lost(span.policy_version) for sample in samples for span in sample.version_spans):
                self._lost.add(key)


def _record_of(key: int, result: Any) -> Played:
    """Make the record of an environment's result, with plain data in `info` and messages, as processes send them."""
    if isinstance(result, EnvFailure):
        return Played(key, failure=result.reason)
    if isinstance(result, Began):
        plain = {"observation": _plain(result.observation), "tools": plain_data(result.tools)}
        return Played(key, began=msgspec.structs.replace(result, **plain))
    if isinstance(result, Observation):
        return Played(key, observation=_plain(result))
    return Played(key, failure=f"The function of its seat returned {type(result).__name__}, not a text.")


def result_of(event: Played) -> Began | Observation | EnvFailure:
    """The result that a record was made of."""
    return event.began or event.observation or EnvFailure(event.failure or "")


def _digest(event: Played) -> bytes:
    return digest_of_reply(Reply(event.began, event.observation, event.failure or ""))


def _plain(observation: Observation) -> Observation:
    info, messages = plain_data(observation.info), plain_data(observation.messages)
    return msgspec.structs.replace(observation, info=info, messages=messages)


def plan_identity(frontend: Frontend, plan: EpisodePlan) -> dict[str, Any]:
    """Describe a rollout over environments: everything that determines its episodes."""
    return as_plain(
        {
            "env": name_of_env(plan.spec),
            "env_arguments": plain_data(dict(plan.spec.arguments)),
            "sampling_params": changed_fields(plan.params),
            "tools": sorted(plan.tools),
            "seats": sorted(plan.opponents),
            "options": plain_data(dict(plan.chat)),
            **{name: getattr(plan, name) for name in _NUMBERS},
            "starts": None if plan.starts is None else list(plan.starts),
            "lora": plan.lora,
            **describe_model(frontend),
        }
    )


_NUMBERS = (
    *("seed", "num_episodes", "num_samples", "max_turns", "max_episode_tokens", "episode_thinking_budget"),
    *("on_rewrite", "tool_format", "first_env_seed", "pins_version"),
)


def open_tape(frontend: Frontend, plan: EpisodePlan) -> tuple[EpisodeTape | None, EpisodePlan]:
    """Open the journal of a rollout if it has one. Returns the plan with the journal's seed, unless it has its own."""
    if plan.journal is None:
        return None, plan
    tape = EpisodeTape(frontend, plan)
    return tape, tape.plan
