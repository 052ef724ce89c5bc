"""Users of a simulated engine: they add requests, call verbs and send weights, and every answer is checked.

The oracle: every request ends once, with tokens that spell the versions it names (`Ledger`, `check_spelling`); a call
that returned ran once, one that "never will" begin never ran (`NoteBook`); what a verb promises is so at the moment it
is answered (`check_promise`).
"""

import queue
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from rollout_engine.base.errors import RolloutEngineError, RPCTimeoutError
from rollout_engine.base.outputs import VersionSpan
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import child_seed, mix
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.engine.driver import Call
from rollout_engine.engine.verbs import VERBS
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.verb_methods import blocking
from tests.faults.ledger import Entry, Ledger
from tests.simulation.faults import RandomFaults
from tests.simulation.scheduler import Scheduler
from tests.simulation.spelling_worker import VOCAB_SIZE, NoteBook, spelled_token, weights_of
from tests.simulation.threads import SimulatedQueue

ERRORS = (RolloutEngineError, MemoryError, OSError, RuntimeError)
"""What a call may raise: an engine's own errors, and those of a machine that has run out of something."""
_READ_SECONDS = 0.05
_LATE_SECONDS, _LATE_STEPS = 1.5, 3
"""By how much a call may pass its deadline: the grace that it is given, and steps in progress."""
_VERBS = {name: blocking(verb.function) for name, verb in VERBS.items()}


def check_promise(core: EngineCore, call: Call) -> None:
    """AssertionError unless what a verb promises is so now, at the moment it is answered without an error."""
    lifecycle, name = core.lifecycle, call.verb.name
    if call.future.cancelled() or call.future.exception() is not None:
        return
    if name in ("pause_generation", "sleep", "wait_for_requests_to_drain"):
        assert not lifecycle.dead, f"{name} was answered as done by an engine that is shut down"
        assert not lifecycle.draining, f"{name} was answered while requests drain"
    if name == "pause_generation" and lifecycle.paused not in (None, "keep"):
        assert not core.num_in_flight, f"{name} was answered with requests in flight"
    if name == "wait_for_requests_to_drain":
        assert not core.num_in_flight, f"{name} was answered with {core.num_in_flight} requests in flight"
    if name == "reset_prefix_cache" and call.future.result() is True:
        assert not core.cache_usage(), f"{name} was answered with blocks in use"


def check_versions(all_users: "list[Users]") -> None:
    """AssertionError where a token was made over KV that an update had asked to be computed again."""
    if any(users.versions_go_back for users in all_users):
        return
    for version in [version for users in all_users for version in users.recomputed]:
        for span in [span for users in all_users for span in users.spans]:
            is_new = span.policy_version < version or span.kv_min_version >= version
            assert is_new, f"{span} over KV from before update {version}"


class Users:
    """Users of one client; each is a task that calls one thing after the other."""

    def __init__(
        self,
        scheduler: Scheduler,
        frontend: Frontend,
        ledger: Ledger,
        notes: NoteBook,
        faults: RandomFaults,
        step_seconds: float,
    ) -> None:
        """`notes`: what extensions were called with. `step_seconds`: how long a step takes at least."""
        self.frontend, self.operations = frontend, OPERATIONS
        self._step_seconds = step_seconds
        self._scheduler, self._choices, self._faults = scheduler, scheduler.choices, faults
        self.ledger, self._notes = ledger, notes
        self._num_busy = self._num_calls = 0
        self.outcomes: Counter[str] = Counter()
        """What was called, and how it ended."""
        self._fates: dict[int, str] = {}
        """Number of a noted call -> how it ended."""
        self._prefix = f"c{frontend.client.index}"
        self._open: dict[str, Any] = {}
        self.recomputed: list[int] = []
        """Versions whose updates had all KV computed again."""
        self.versions_go_back = False
        self.spans: list[VersionSpan] = []
        """Of all tokens."""

    def start(self, count: int, num_operations: int) -> None:
        """Start `count` users with as many operations each."""
        for i in range(count):
            self._spawn(f"{self._prefix} user {i}", partial(self._operate, num_operations))

    @property
    def are_done(self) -> bool:
        """Whether every user has ended, and every request was read to its end."""
        return not self._num_busy

    @property
    def engine_runs(self) -> bool:
        """Whether the engine says that it runs."""
        return self._state() == "RUNNING"

    def calm(self) -> None:
        """Let what is paused, asleep or dirty go on."""
        if self._state() != "RUNNING":
            for verb in ("wake_up", "resume_generation"):
                self._call(verb)
        if self._state() == "DIRTY":
            self._update(self.frontend.client.policy_version + 10)  # others may have sent some that it has not heard of

    def check_calls(self) -> None:
        """AssertionError where a call ran though it was told that it never would, or not though it returned."""
        ran = Counter(self._notes.numbers)
        for number, fate in self._fates.items():
            if fate in ("returned", "raised by user code"):
                assert ran[number] == 1, f"call {number} {fate}, and ran {ran[number]} times"
            elif fate == "never":
                assert not ran[number], f"call {number} ran, though its caller was told that it never would"
            else:
                assert ran[number] <= 1, f"call {number} ran {ran[number]} times"

    def _operate(self, num_operations: int) -> None:
        for number in range(num_operations):
            if self._choices.are_over:
                return
            kind, operate = self._choices.pick(self.operations if number else OPERATIONS[:1])
            self._scheduler.note(kind)
            operate(self)
            if self._choices.chance(0.3):
                self._scheduler.sleep(self._choices.pick([0.001, 0.02, 0.5]))

    def _spawn(self, name: str, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._num_busy -= 1

        self._num_busy += 1
        self._scheduler.spawn(name, run)

    def _call(self, name: str, **arguments: Any) -> Any:
        start, num_stalls = self._scheduler.clock.now, self._faults.counts["clock"]
        result = self._call_now(name, arguments)
        seconds = VERBS[name].seconds(arguments)
        waits_alone = not self.frontend.client.needs_turns  # else others may take the lock first, again and again
        if seconds is not None and waits_alone and num_stalls == self._faults.counts["clock"]:
            took = self._scheduler.clock.now - start
            latest = seconds + _LATE_SECONDS + _LATE_STEPS * self._step_seconds
            assert took <= latest, f"{name}: {took:.3f} s, though its caller waits for {seconds:g} s"
        return result

    def _call_now(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            result = _VERBS[name](self, **arguments)
        except ERRORS as error:
            self._note_end(name, type(error).__name__)
            return error
        self._note_end(name, "returned")
        return result

    def _note_end(self, name: str, how: str) -> None:
        self.outcomes[f"{name} {how}"] += 1
        self._scheduler.note(f"{name}: {how}")

    def _state(self) -> str:
        try:
            return str(self.frontend.client.call("get_core_metrics", {}).result().state)
        except ERRORS:
            return ""

    # Requests

    def _add(self) -> None:
        choices = self._choices
        prompt = [3, 5, 7, 9, 11, 13, 17, 19, 23][: 1 + choices.below(9)] + [choices.below(3)]
        kind = choices.pick(["cumulative", "delta", "final_only"])
        n, max_tokens = choices.pick([1, 1, 1, 2, 3]), choices.pick([8, 1, 3, 20])
        stops = choices.pick([None, None, list(range(0, VOCAB_SIZE, 16))])
        seed = choices.below(4)
        params = SamplingParams(
            n=n, max_tokens=max_tokens, seed=seed, output_kind=kind, stop_token_ids=stops, detokenize=False
        )
        leave_after = choices.pick([0, 0, 0, 0, 1, 2])
        self._num_calls += 1
        name = f"{self._prefix}r{self._num_calls}"
        self._spawn(name, partial(self._read, name, prompt, params, leave_after))

    def _read(self, name: str, prompt: list[int], params: SamplingParams, leave_after: int) -> None:
        entry = self.ledger.begin(name, params, partial(check_spelling, prompt, params))
        arrived = SimulatedQueue(self._scheduler)
        try:
            stream = self.frontend.add_request(prompt, params, name, arrived.put, session_id=self._session())
        except ERRORS as error:
            self._end(entry, self._name(error))
            return
        self._open[name] = stream
        how = ""
        while not how:
            try:
                how = self._read_some(stream, arrived, entry, leave_after)
            except ERRORS as error:
                self.frontend.close(stream)
                how = self._name(error)
        del self._open[name]
        self._end(entry, how)

    def _session(self) -> str | None:
        """The session of the next request."""
        return None

    def _read_some(self, stream: Any, arrived: Any, entry: Entry, leave_after: int) -> str:
        """Take an output and check it, or wait for news; returns how the request has ended, or ""."""
        while not arrived.empty():
            arrived.get()
        output = self.frontend.take(stream)
        if output is None:
            if not self.frontend.client.turn(lambda: not arrived.empty()):
                with suppress(queue.Empty):
                    arrived.get(timeout=_READ_SECONDS)
            return ""
        entry.hear(output)
        for sample in output.outputs:
            _check_error(sample.error)
        tokens = [len(sample.token_ids) for sample in output.outputs]
        self._scheduler.note(f"{entry.name}: {tokens}{' finished' * output.finished}")
        if output.finished:
            return "finished"
        leaves = leave_after and sum(map(len, entry.tokens.values())) >= leave_after
        if leaves:
            self.frontend.close(stream)
        return "left" if leaves else ""

    def _name(self, error: Exception) -> str:
        """How a request has ended that failed with an error."""
        return type(error).__name__

    def _end(self, entry: Entry, how: str) -> None:
        for spans in entry.spans.values():
            self.spans += spans
        self.ledger.end(entry, how)
        self._scheduler.note(f"{entry.name}: {how}")

    def _abort(self) -> None:
        names = [self._choices.pick([*self._open, "nobody"]) for _ in range(1 + self._choices.below(2))]
        self._try("abort", lambda: self.frontend.abort(names))

    # Verbs

    def _pause(self) -> None:
        mode = self._choices.pick(["keep", "wait", "abort"])
        self._call("pause_generation", mode=mode, clear_cache=self._choices.chance(0.3))

    def _resume(self) -> None:
        self._call("resume_generation")

    def _sleep(self) -> None:
        level, mode = self._choices.pick([1, 1, 2]), self._choices.pick(["keep", "wait", "abort"])
        self._call("sleep", level=level, mode=mode)

    def _wake(self) -> None:
        self._call("wake_up", tags=self._choices.pick([None, None, "weights", "kv_cache"]))

    def _reset(self) -> None:
        self._call("reset_prefix_cache", reset_running_requests=self._choices.chance(0.5))

    def _drain(self) -> None:
        self._call("wait_for_requests_to_drain", drain_timeout=self._choices.pick([0.001, 0.0, 0.1, 5.0]))

    def _score(self) -> None:
        result = self._call("score", prompt_token_ids=[[1, 2], [1]], completion_token_ids=[[3, 4, 5], [6]])
        if not isinstance(result, Exception):
            assert [values.tolist() for values in result] == [[-2.0, -3.0, -4.0], [-1.0]]

    def _look(self) -> None:
        verb = self._choices.pick(["check_integrity", "is_paused", "get_cache_usage", "get_num_unfinished_requests"])
        self._call(verb)

    def _note_call(self) -> None:
        self._num_calls += 1
        number = self._num_calls + 1000 * self.frontend.client.index
        method = self._choices.pick(["note", "note_slowly", "note_beside", "stumble"])
        arguments: dict[str, Any] = {"number": number}
        if method in ("note_slowly", "note_beside"):
            arguments["seconds"] = self._choices.pick([0.0, 0.01, 0.3])
        timeout = self._choices.pick([None, 0.005, 0.1])
        result = self._call("collective_rpc", method=method, timeout=timeout, kwargs=arguments)
        self._fates[number] = self._fate(result, number)
        self._scheduler.note(f"call {number}: {self._fates[number]}")

    def _fate(self, result: Any, number: int) -> str:
        """How a noted call has ended, as its caller was told."""
        if not isinstance(result, Exception):
            assert result == [number], f"call {number} returned {result}"
            return "returned"
        if isinstance(result, RPCTimeoutError):
            return "never" if "never will" in str(result) else "late"
        if "user code fails" in str(result):
            return "raised by user code"
        return "never" if "start new thread" in str(result) else type(result).__name__

    # Weights

    def _send_weights(self) -> None:
        choices = self._choices
        version = self.frontend.client.policy_version + choices.pick([1, 1, 2, 0])
        options: dict[str, Any] = dict(
            mode=choices.pick(["keep", "wait", "abort"]),
            staging=choices.pick(["auto", "shadow", "inplace"]),
            kv=choices.pick(["keep", "recompute"]),
            reset_version=choices.chance(0.05),
        )
        self.versions_go_back |= options["reset_version"]
        self._update(version, **options)

    def _update(self, version: int, **options: Any) -> None:
        update = partial(self.frontend.update_weights, self._source(version), version=version, timeout=5.0, **options)
        report = self._try("update_weights", update)
        if report is not None and report.num_tensors and options.get("kv") == "recompute":
            self.recomputed.append(version)

    def _source(self, version: int) -> Any:
        """The tensors of a version, as an iterator that reads each from somewhere."""
        for pair in weights_of(version).items():
            self._faults.reach("read")
            yield pair

    def _try(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work`; None where it raised."""
        try:
            result = work()
        except ERRORS as error:
            self._note_end(name, type(error).__name__)
            return None
        self._note_end(name, "returned")
        return result

    def span(self, verb: Any, arguments: Any) -> Any:
        return self.frontend.span(verb, arguments)


OPERATIONS: list[tuple[str, Callable[[Users], None]]] = [
    *[("add", Users._add)] * 20,
    *[("abort", Users._abort)] * 6,
    *[("pause", Users._pause)] * 3,
    *[("resume", Users._resume)] * 4,
    *[("sleep", Users._sleep)] * 2,
    *[("wake", Users._wake)] * 4,
    *[("reset", Users._reset)] * 2,
    *[("drain", Users._drain)] * 3,
    *[("score", Users._score)] * 1,
    *[("look", Users._look)] * 2,
    *[("note", Users._note_call)] * 5,
    *[("send weights", Users._send_weights)] * 4,
]


def _check_error(error: str | None) -> None:
    """AssertionError where a sample failed by itself: only injected failures may end one by an error."""
    known = error is None or any(
        cause in error for cause in ("no memory is left", "a logits processor failed", "DirtyW")
    )
    assert known, f"a sample failed by itself: {error}"


def check_spelling(prompt: list[int], params: SamplingParams, index: int, tokens: list[int], spans: Any) -> None:
    """AssertionError unless the tokens of a sample are those of the versions that its spans name."""
    assert params.seed is not None
    seed, context = child_seed(params.seed, index), 0
    for token in prompt:
        context = mix(context, token)
    for span in spans:
        version, kv_version = span.policy_version, span.kv_min_version
        for position in range(span.start, span.end):
            expected = spelled_token(context, seed, version, version, kv_version)
            assert tokens[position] == expected, f"sample {index}: token {position} is not what {span} spells"
            context = mix(context, tokens[position])
