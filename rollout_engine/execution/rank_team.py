"""The other ranks of an engine, as rank 0 holds them: their processes, messages to them, and their ends."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch

from rollout_engine.base.class_names import import_path, name_elsewhere
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, EngineDeadError, RPCError
from rollout_engine.base.messages import NewSequence, SchedulerOutput
from rollout_engine.base.picture_cache import SentPictures
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.threads import start_thread
from rollout_engine.children.failure import Failure
from rollout_engine.execution.made_with import difference
from rollout_engine.execution.rank_launcher import Rank, RankLauncher
from rollout_engine.execution.rank_pulse import BeatingRank, PulseWatch
from rollout_engine.execution.rank_values import pack_value, unpack_value
from rollout_engine.execution.rank_wire import (
    Answer,
    BeginScore,
    Call,
    Done,
    EndScore,
    ForgetPictures,
    Joined,
    Meet,
    RankSettings,
    ScorePiece,
    Started,
    Step,
    StepMessage,
    TakeLogits,
    TakePicture,
)
from rollout_engine.execution.step_feed import StepFeed
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.ranks.exchange import Exchange
from rollout_engine.model.ranks.part import Region
from rollout_engine.model.ranks.pipe_place import PipePlace
from rollout_engine.model.ranks.seat import Seat

logger = logging.getLogger("rollout_engine")

_NOTICE_SECONDS = 15.0
"""Most seconds between the effect of a rank's end and the end being noticed."""

_BESIDE_STEPS = ("start_weights", "stage_weight", "pack_weights", "settle_weights", "prepare_adapter")
"""Calls that touch nothing that steps read, unless weights are written in place."""


class RankTeam:
    """All ranks but the first. Satisfies `model.ranks.seat.Followers`; made by rank 0, which it gives a `seat`.

    When one ends, every caller that waits for it fails with `EngineDeadError`, which names it.
    """

    def __init__(
        self,
        config: EngineConfig,
        launcher: RankLauncher,
        exchange: Exchange,
        own: Joined,
        *,
        runs_ahead: bool = False,
        splits_sums: bool = False,
    ) -> None:
        """Start the processes; each begins to load. Raises `ConfigError` if that is not possible.

        Args:
            launcher: the team's from now on, also if this fails.
            exchange: rank 0's end.
            own: arithmetic and device of rank 0. Others have the same arithmetic, on other devices, or all end.
            runs_ahead: whether ranks launch steps on devices: later than rank 0 does, and before they are computed.
            splits_sums: as of `Seat`.
        """
        self._launcher, self.exchange, self._runs_ahead = launcher, exchange, runs_ahead
        self._joined = {"rank 0": own}
        self.num_ranks = exchange.num_ranks
        self._threads_before = threads = torch.get_num_threads()
        self.num_threads = config.num_threads or (threads if launcher.is_remote else max(1, threads // self.num_ranks))
        """Threads of each rank. This process has this number until `shutdown`, then the former one."""
        torch.set_num_threads(self.num_threads)
        self.error: Exception | None = None
        """Why the ranks compute nothing more: the first that ended or failed."""
        self._has_failed = threading.Event()
        self._on_death: Callable[[str], object] | None = None
        self._changing, self._is_closing = threading.Lock(), False
        self._calling, self._num_calls = threading.Lock(), 0
        self._score_numbers = count()
        self._pictures = SentPictures(config.mm_cache_bytes)
        place = launcher.place
        self.seat = Seat(exchange, self, splits_sums=splits_sums) if place is None else self._seat_at(place)
        self.feed = None if place is None else StepFeed(place.pipe, self._send_ahead)
        """Steps that other stages have, if there are several."""
        self._ranks: list[Rank] = []
        self._pulses: PulseWatch | None = None
        try:
            common = _named_elsewhere(config), self.num_threads, logger.getEffectiveLevel(), import_path()
            for rank in launcher.start([RankSettings(n, *common) for n in range(1, self.num_ranks)]):
                self._ranks.append(rank)
                start_thread(self._watch, rank, name=f"rank-{rank.rank}")
            self._pulses = PulseWatch(self._ranks, self._fail_silent, is_remote=launcher.is_remote)
        except BaseException:
            self.shutdown()
            raise

    @property
    def regions(self) -> list[Mapping[str, Region]]:
        """The parts of the ranks from 1 on, in order: name of a weight -> the rank's elements of it."""
        return [rank.regions for rank in self._ranks]

    @property
    def _peers(self) -> list[Rank]:
        """The other ranks of rank 0's stage."""
        return self._ranks[: self.seat.num_ranks - 1]

    def _seat_at(self, place: PipePlace) -> Seat:
        return Seat(place.exchange, self, team=place.team, pipe=place.pipe)

    def _send_ahead(self, work: SchedulerOutput, token_ids: np.ndarray, serial: int) -> None:
        """Send a step to the ranks of other stages."""
        message = Step(msgspec.structs.replace(work, new=list(map(_undrawn, work.new))), token_ids.tobytes(), serial)
        self._tell(message, self._ranks[self.seat.num_ranks - 1 :])

    def _settle(self, method: str, *, inplace: bool = False, **_: Any) -> None:
        """Wait until all ranks have launched their steps so far, if a call must find them launched."""
        if not inplace and method in _BESIDE_STEPS:
            return
        if self._runs_ahead:
            self._tell(Meet())
            self.exchange.meet()
        if self.feed is not None:
            try:
                self.feed.drain()
            except BrokenTurnsError as effect:
                self.raise_error(effect)

    def wait_started(self) -> None:
        """Wait until all have loaded their parts. Raises the error that prevented it."""
        for rank in self._ranks:
            rank.is_started.wait()
        self.require_alive()

    def raise_error(self, effect: Exception | None = None) -> NoReturn:
        """Raise the error of the rank that has ended or failed, of which the caller has seen an `effect`."""
        self._has_failed.wait(_NOTICE_SECONDS)
        self.require_alive()
        seen = "" if effect is None else f" ({effect})"
        raise EngineDeadError(f"A step or call of the ranks failed, and they cannot go on{seen}: make a new engine.")

    def require_alive(self) -> None:
        """Raise if a rank has ended or failed."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def watch(self, on_death: Callable[[str], object]) -> None:
        """Call `on_death` with the reason when a rank ends or fails, at once if one has."""
        with self._changing:
            self._on_death = on_death
            error = self.error
        if error is not None:
            on_death(str(error))

    def step(self, work: SchedulerOutput, token_ids: np.ndarray) -> None:
        if work.new:
            new = [self._send_pictures(each) if each.pictures else each for each in map(_undrawn, work.new)]
            work = msgspec.structs.replace(work, new=new)
        serial = -1 if self.seat.pipe is None else self.seat.pipe.serial
        self._tell(Step(work, token_ids.tobytes(), serial), self._peers)

    def forget_pictures(self) -> None:
        """Have all ranks forget the pictures that they keep for later steps."""
        self._pictures.cache.clear()
        self._tell(ForgetPictures())

    def take_logits(self, rows: list[int]) -> None:
        self._tell(TakeLogits(rows), self._peers)

    def begin_score(self, arguments: Sequence[Any]) -> int:
        number = next(self._score_numbers)
        self._tell(BeginScore(number, pack_value(arguments)))
        return number

    def score_piece(self, number: int) -> None:
        self._tell(ScorePiece(number, -1 if self.feed is None else self.feed.begin_other()))

    def end_score(self, number: int) -> None:
        with suppress(EngineDeadError):  # then no rank computes it
            self._tell(EndScore(number))

    def ask(
        self,
        method: str,
        own: Callable[[], Any] = lambda: None,
        *,
        apart: Sequence[Mapping[str, Any]] | None = None,
        **shared: Any,
    ) -> list[Any]:
        """Results of a method of `RankWorker` on every rank, rank 0's by `own`, in order.

        Raises the first error once all have ended.

        Args:
            shared: arguments for all ranks.
            apart: further ones of each rank from 1 on.
        """
        with self._calling:
            self._num_calls += 1
            try:
                self._settle(method, **shared)
                for rank, more in zip(self._ranks, apart or [{}] * len(self._ranks), strict=True):
                    arguments = msgspec.Raw(msgspec.msgpack.encode({**shared, **more}))
                    rank.calls.send(Call(self._num_calls, method, arguments))
                failure: BaseException | None = None
                results: list[Any] = [None]
                try:
                    results[0] = own()
                except BaseException as error:  # the answers are to be read, whatever happens here
                    failure = error
                for rank in self._ranks:
                    answer = self._answer(rank)
                    if isinstance(answer, Failure):
                        failure = failure or answer.as_known_error() or _call_error(answer, rank, method)
                    else:
                        results.append(unpack_value(answer.value))
            except (EOFError, OSError):
                self.raise_error()
        if failure is not None:
            raise failure
        return results

    def _answer(self, rank: Rank) -> Done | Failure:
        """Receive a rank's answer to the current call. One to another call ends the team: results would be mixed up."""
        answer: Answer = rank.calls.receive(Answer)
        if answer.number != self._num_calls:
            what = f"rank {rank.rank} answered call {answer.number} when call {self._num_calls} was made"
            error = EngineDeadError(f"{what}, as after a call that was interrupted: make a new engine.")
            self.fail(error)
            raise error
        return answer.result

    def fail(self, error: Exception) -> None:
        """Let no rank compute any more, because of `error`."""
        with self._changing:
            if self._is_closing or self.error is not None:
                return
            self.error, on_death = error, self._on_death
        logger.critical("%s", error)
        try:
            if on_death is not None:
                on_death(str(error))  # first: a step that fails ends its requests, and the engine would take others
        finally:
            self._has_failed.set()
            self.seat.break_()
            for rank in self._ranks:
                rank.is_started.set()

    def shutdown(self) -> None:
        """End all processes. Calling it again is a no-op."""
        with self._changing:
            is_closed, self._is_closing = self._is_closing, True
        if is_closed:
            return
        if self._pulses is not None:
            self._pulses.end()
        self.seat.break_()
        for rank in self._ranks:
            rank.end()
        self._launcher.close()
        if torch.get_num_threads() == self.num_threads:  # no other number was chosen since
            torch.set_num_threads(self._threads_before)

    def _send_pictures(self, new: NewSequence) -> NewSequence:
        """Send pictures that the ranks lack; returns the sequence with digests alone."""
        placed, missing = self._pictures.strip(new.pictures)
        for picture in missing:
            self._tell(TakePicture(picture.digest, pack_value(picture.arrays)))
        return msgspec.structs.replace(new, pictures=placed)

    def _tell(self, message: StepMessage, ranks: Sequence[Rank] | None = None) -> None:
        """Send a message to some ranks; None: to all."""
        try:
            for rank in self._ranks if ranks is None else ranks:
                rank.steps.send(message)
        except OSError:
            self.raise_error()

    def _require_fit(self, name: str, joined: Joined) -> None:
        """End all if a rank does not fit the others."""
        with self._changing:
            others, self._joined = dict(self._joined), {**self._joined, name: joined}
        if (found := difference(others["rank 0"].arithmetic, joined.arithmetic)) is not None:
            self.fail(
                ConfigError(
                    f"{name} does not compute as rank 0 does ({found}), so log-probs would not be those of one "
                    "process. Use the same versions, and machines of one kind, for all ranks."
                )
            )
        for other, its in others.items():
            if joined.device and joined.device == its.device:
                self.fail(
                    ConfigError(
                        f"{name} and {other} have the same GPU ({joined.device}). Ray does not know of a GPU that a "
                        "program uses outside of it: run the engine in an actor or a task with num_gpus=1, or as a "
                        "replica (placement='ray'), which does so."
                    )
                )

    def _fail_silent(self, rank: BeatingRank, reason: str) -> None:
        """End all because one gives no sign of life."""
        self.fail(EngineDeadError(f"{rank.name} {reason}."))

    def _watch(self, rank: Rank) -> None:
        """Wait for the end of a rank, on a thread of its own."""
        try:
            answer = rank.life.receive(Joined | Failure)
            if isinstance(answer, Joined):
                self._require_fit(rank.name, answer)
                answer = rank.life.receive(Started | Failure)
            if isinstance(answer, Started):
                rank.regions = answer.regions
                rank.is_started.set()
                answer = rank.life.receive(Failure)
            self.fail(answer.as_known_error() or EngineDeadError(f"rank {rank.rank} failed: {answer.text}"))
        except (EOFError, OSError, msgspec.MsgspecError):
            if not self._is_closing:
                self.fail(EngineDeadError(f"{rank.name} has ended {rank.how_it_ended()}."))


def _call_error(failure: Failure, rank: Rank, method: str) -> RPCError:
    """The error of a call of `method` for a failure that is no error of ours: the rank lives on."""
    text = f"rank {rank.rank}: {failure.text.rstrip('.')}."
    return RPCError(text, method=method, rank=rank.rank, traceback=failure.traceback)


def _undrawn(new: NewSequence) -> NewSequence:
    """A new sequence without the settings of its draws, which rank 0 alone makes; settings of forwards are left."""
    params = SamplingParams(
        prompt_logprobs=None if new.params.prompt_logprobs is None else 0,
        return_routed_experts=new.params.return_routed_experts,
        return_hidden_states=new.params.return_hidden_states,
    )
    return msgspec.structs.replace(new, params=params, seed=0, eos_token_ids=[], bad_words=[])


def _named_elsewhere(config: EngineConfig) -> EngineConfig:
    """The configuration with the user's extensions under names that another process finds."""
    names: Sequence[str] = config.worker_extensions
    extensions = tuple(name_elsewhere(name, "worker_extensions") for name in names)
    return msgspec.structs.replace(config, worker_extensions=extensions, logits_processors=())
