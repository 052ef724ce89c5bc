"""Plays the episodes of a rollout, between the engines that answer and the environments that they answer to."""

import heapq
import logging
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

from envs_adapters.base import Observation
from rollout_engine.base.errors import EpisodeError, LifecycleError
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.episodes.conversation import Conversation
from rollout_engine.rollouts.episodes.env_calls import Began, EnvCalls, EnvFailure
from rollout_engine.rollouts.episodes.episode import Act, Ask, Consult, Episode, FirstPrompt, Next, Rules, UseTools
from rollout_engine.rollouts.episodes.group import GroupOfEpisodes
from rollout_engine.rollouts.episodes.kept_workers import KeptWorkers
from rollout_engine.rollouts.episodes.plan import EpisodePlan
from rollout_engine.rollouts.episodes.player import Player
from rollout_engine.rollouts.episodes.tape import Answered, Ended, Returned, Script, open_tape, result_of
from rollout_engine.rollouts.episodes.tool_functions import tool_messages
from rollout_engine.text.formats.tool_calls import ToolCalls

logger = logging.getLogger("rollout_engine")

_LOOK_SECONDS = 0.05
"""Seconds that it waits for environments alone, so that an interrupt is handled soon."""


class EpisodeGroup(GroupOfEpisodes[Episode], frozen=True):
    """The episodes of one start of an environment."""


class EpisodeRun:
    """Plays episodes: call `advance` until not `unfinished`, and `close` in any case."""

    def __init__(
        self, frontend: Frontend, plan: EpisodePlan, kept_workers: KeptWorkers, *, may_all_fail: bool = False
    ) -> None:
        """`may_all_fail`: only warn if every episode fails, as for those of a larger set that are played again.

        Raises `RequestError` if the chat template cannot continue conversations.
        """
        self._may_all_fail = may_all_fail
        self.tape, plan = open_tape(frontend, plan)
        """The journal, if the rollout has one."""
        try:
            self._set_up(frontend, plan, kept_workers)
        except BaseException:
            self._close_tape()
            raise

    def _set_up(self, frontend: Frontend, plan: EpisodePlan, kept_workers: KeptWorkers) -> None:
        self._plan, session = plan, f"episodes-{plan.seed:x}"
        self._own = Player(frontend, plan, session=session, lora=plan.lora)
        """Plays all seats but these, whose engines have adapters of their own."""
        opponents = plan.opponents.items()
        self._others = {seat: Player(o, plan, session=session) for seat, o in opponents if isinstance(o, Frontend)}
        self._functions = {seat: o for seat, o in opponents if not isinstance(o, Frontend)}
        self._players = [self._own, *self._others.values()]
        self._rules = Rules(
            plan.max_turns,
            self._max_tokens,
            self._new_conversation,
            self._find_calls,
            max_pictures=lambda seat: self._player(seat).max_pictures,
            min_room=max(1, plan.params.min_tokens),
            own_tools=frozenset(plan.tools),
        )
        self._num_started = 0
        self._running: dict[int, Episode] = {}
        self._scripts: dict[int, Script] = {}
        """Events of an earlier process that running episodes have not been through."""
        self._ended: dict[int, list[Episode]] = {}
        """Group -> its episodes that have ended, until all have."""
        self._first_prompts: dict[int, FirstPrompt] = {}
        """Group -> the first prompt of its episodes."""
        self._deadlines: list[tuple[float, int]] = []
        self._causes: dict[int, BaseException | None] = {}
        """Exceptions of episodes that fail now, by key."""
        self._failures: list[tuple[str, BaseException | None]] = []
        self._complete: list[EpisodeGroup] = []
        self._has_news = threading.Event()
        self._calls = EnvCalls(plan.spec, self._wake, kept_workers)

    @property
    def unfinished(self) -> bool:
        """Whether groups have not been returned yet."""
        return bool(self._running) or self._num_started < self._num_episodes

    @property
    def num_groups(self) -> int:
        """Groups in all."""
        return self._plan.num_episodes

    @property
    def has_news(self) -> bool:
        """Whether `advance` has something to do at once: an episode to start, or an answer that has arrived."""
        starts = self._num_started < self._num_episodes and len(self._running) < self._plan.max_in_flight
        return starts or self._has_news.is_set() or any(player.reader.has_news for player in self._players)

    @property
    def is_sampling(self) -> bool:
        """Whether the engine samples for it, so that `advance` computes a step if there are no news."""
        return any(map(len, self._players))

    @property
    def num_open_tokens(self) -> int:
        """Tokens sampled so far of groups that are not complete."""
        open_episodes = [*self._running.values(), *(each for group in self._ended.values() for each in group)]
        sampled = sum(episode.num_tokens for episode in open_episodes)
        return sampled + sum(player.reader.num_tokens() for player in self._players)

    def advance(self) -> list[EpisodeGroup]:
        """Do all that can be done now, then compute a step or wait a moment. Returns the groups that are complete.

        Raises `EpisodeError` if every episode failed, with the first fault as its cause, unless `may_all_fail`.
        """
        self._start()
        self._has_news.clear()
        for key, result in self._calls.take():
            if key in self._running:
                self._take_result(self._running[key], result)
        self._end_late()
        for player in self._players:
            player.queue()
        asking = [player for player in self._players if len(player)]
        for player in asking:
            for key, sample in player.read():
                episode = self._running[key]
                if sample.finish_reason == "abort":  # its version is past; others are asked for again
                    self._go_on(episode, episode.end("policy_version"))
                    continue
                if self.tape is not None:
                    self.tape.note(key, sample)
                self._go_on(episode, episode.take_sample(sample))
        if not asking and self._running:
            self._has_news.wait(_LOOK_SECONDS)
        complete, self._complete = self._complete, []
        if not self.unfinished and self.tape is not None:
            self.tape.sync()
        if not self.unfinished and self._failures:
            self._report_failures()
        return complete

    def stop_waiting(self) -> None:
        """Make an `advance` on another thread return soon: it never waits long."""

    def close(self) -> None:
        """End all that has not ended: requests and environments."""
        for key in list(self._running):
            self._calls.close(key)
        self._running.clear()
        self._num_started = self._num_episodes
        for player in self._players:
            with suppress(LifecycleError):
                player.abort_all()
        self._calls.end()
        self._close_tape()

    def _close_tape(self) -> None:
        if self.tape is not None:
            self.tape.close()

    @property
    def _num_episodes(self) -> int:
        return self._plan.num_episodes * self._plan.num_samples

    def _start(self) -> None:
        """Reset the environments of as many episodes as may run."""
        while self._num_started < self._num_episodes and len(self._running) < self._plan.max_in_flight:
            key = self._num_started
            start, member = divmod(key, self._plan.num_samples)
            group = start if self._plan.starts is None else self._plan.starts[start]
            script = Script([]) if self.tape is None else self.tape.script(key)
            self._num_started += 1
            self._running[key] = episode = self._new_episode(key, group, member)
            if script.has_end:
                self._end_again(episode, script)
                continue
            self._scripts[key] = script
            self._calls.reset(key, self._plan.env_seed(group))
            heapq.heappush(self._deadlines, (time.monotonic() + self._plan.episode_timeout, key))

    def _new_episode(self, key: int, group: int, member: int) -> Episode:
        return Episode(self._rules, key, group, member, self._plan.episode_seed(group, member))

    def _end_again(self, episode: Episode, script: Script) -> None:
        """Take an episode that ended in an earlier process through its events, without its environment."""
        while not isinstance(event := script.take_before_end(), Ended):
            if isinstance(event, Answered):
                episode.take_sample(event.sample)
            else:
                self._after(episode, event.value if isinstance(event, Returned) else result_of(event))
        if episode.first_prompt is not None:
            self._first_prompts.setdefault(episode.group, episode.first_prompt)
        if episode.ended_by is None and event.ended_by not in (None, "error"):
            episode.end(event.ended_by)
        elif episode.ended_by is None:
            episode.fail(event.error or "It ended in an earlier process.")
        self._end(episode, is_new=False)

    def _take_result(self, episode: Episode, result: Any) -> None:
        """Take the result of an episode's environment, tools or function, as an earlier process may have done."""
        script = self._scripts[episode.key]
        if script and not script.matches(result):
            self._restart(episode)
            return
        if not script.has_taken and self.tape is not None:
            self.tape.note(episode.key, result)
        script.has_taken = False
        self._go_on(episode, self._after(episode, result))

    def _take_again(self, episode: Episode, needed: Ask | UseTools | Consult, result: Any) -> Next:
        """Give an episode the result that an earlier process had. Returns `needed` if that is of another kind."""
        if isinstance(needed, Ask):
            if not isinstance(result, CompletionOutput) or result.seed != needed.seed:
                return needed
            self._player(needed.seat).note_answer(episode.key, needed, result)
            return episode.take_sample(result)
        return self._after(episode, result) if isinstance(result, list | str) else needed

    def _restart(self, episode: Episode) -> None:
        """Begin an episode anew that could not be played again as it was."""
        assert self.tape is not None, "it has the events"
        self.tape.note_restart(episode.key)
        self._calls.close(episode.key)
        for player in self._players:
            player.forget(episode.key)
        self._scripts[episode.key] = Script([])
        self._running[episode.key] = self._new_episode(episode.key, episode.group, episode.member)
        self._calls.reset(episode.key, self._plan.env_seed(episode.group))

    def _after(self, episode: Episode, result: Any) -> Next:
        """Give an episode the result of its environment, its tools or a function."""
        if isinstance(result, EnvFailure):
            self._causes[episode.key] = result.exception
            return episode.fail(result.reason)
        if isinstance(result, Began):
            return episode.began(result.observation, result.tools, result.functions, result.num_seats)
        if isinstance(result, Observation):
            return episode.take_observation(result)
        if isinstance(result, list):
            return episode.take_results(result)
        if isinstance(result, str):
            return episode.take_text(result)
        return episode.fail(f"The function of seat {episode.seat} returned {type(result).__name__}, not a text.")

    def _go_on(self, episode: Episode, needed: Next) -> None:
        """Carry out the next task of an episode."""
        script = self._scripts[episode.key]
        while script and isinstance(needed, Ask | UseTools | Consult):
            if isinstance(needed, Ask) and not self._starts_like_its_group(episode):
                return
            following = self._take_again(episode, needed, script.take_result())
            if following is needed:
                self._restart(episode)
                return
            needed = following
        if isinstance(needed, Ask):
            if self._starts_like_its_group(episode):
                self._player(needed.seat).ask(episode.key, needed)
        elif isinstance(needed, Act):
            self._calls.step(episode.key, needed.action)
        elif isinstance(needed, UseTools):
            self._calls.run(episode.key, partial(tool_messages, self._plan.tools, needed.calls))
        elif isinstance(needed, Consult):
            self._calls.run(episode.key, partial(self._functions[needed.seat], needed.messages))
        else:
            self._end(episode)

    def _starts_like_its_group(self, episode: Episode) -> bool:
        assert episode.first_prompt is not None
        if self._first_prompts.setdefault(episode.group, episode.first_prompt) == episode.first_prompt:
            return True
        what = f"reset(seed={self._plan.env_seed(episode.group)}) gave another start than to this group's first episode"
        advice = "an environment must be determined by its seed; one that draws from the global generators needs "
        episode.fail(f"{what}: {advice}make_env(..., placement='processes').")
        self._end(episode)
        return False

    def _end(self, episode: Episode, *, is_new: bool = True) -> None:
        """Take an episode that has ended out. `is_new`: not in an earlier process."""
        del self._running[episode.key]
        script = self._scripts.pop(episode.key, Script([]))
        if is_new and self.tape is not None:
            self.tape.note_end(episode.key, episode.ended_by, episode.error, num_left=len(script))
        self._calls.close(episode.key)
        if episode.error is not None:
            self._failures.append((episode.error, self._causes.pop(episode.key, None)))
        ended = self._ended.setdefault(episode.group, [])
        ended.append(episode)
        if len(ended) == self._plan.num_samples:
            del self._ended[episode.group]
            self._first_prompts.pop(episode.group, None)
            ended.sort(key=lambda each: each.member)
            self._complete.append(EpisodeGroup(episode.group, ended, self._plan.params, self._plan.lora))

    def _end_late(self) -> None:
        """End the episodes whose time is up."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, key = heapq.heappop(self._deadlines)
            if key in self._running:
                for player in self._players:
                    player.abort(key)
                episode = self._running[key]
                episode.end("episode_timeout")
                self._end(episode)

    def _report_failures(self) -> None:
        (reason, cause), count = self._failures[0], self._num_episodes
        if len(self._failures) == count and not self._may_all_fail:
            which = "The episode failed" if count == 1 else f"All {count} episodes failed; the first"
            raise EpisodeError(f"{which}: {reason}") from cause
        logger.warning("%d of %d episodes failed; the first: %s", len(self._failures), count, reason)

    def _player(self, seat: int) -> Player:
        return self._others.get(seat, self._own)

    def _max_tokens(self, seat: int) -> int | None:
        return None if seat in self._functions else self._player(seat).max_tokens

    def _new_conversation(self, seat: int, tools: list[dict[str, Any]]) -> Conversation:
        return Conversation(None) if seat in self._functions else self._player(seat).conversation(tools)

    def _find_calls(
        self, seat: int, sample: CompletionOutput, tools: list[dict[str, Any]], prompt_end: list[int]
    ) -> ToolCalls:
        return self._player(seat).find_calls(sample, tools, prompt_end)

    def _wake(self) -> None:
        self._has_news.set()
        for player in self._players:
            player.reader.nudge()
