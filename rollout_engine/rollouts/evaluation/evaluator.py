"""Draws the missing samples of an evaluation: all requests of a checkpoint in flight together, noted group by group."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError, RewardError, RolloutEngineError
from rollout_engine.base.version import VERSION
from rollout_engine.engine.interrupts import allowed, deliver, held
from rollout_engine.faces.verb_methods import BlockingVerbs
from rollout_engine.rollouts.agents.agent import Agent
from rollout_engine.rollouts.agents.gateway_seam import AgentGateway
from rollout_engine.rollouts.agents.plan import AgentPlan
from rollout_engine.rollouts.agents.run import AgentRun
from rollout_engine.rollouts.any_run import AnyRun
from rollout_engine.rollouts.episodes.kept_workers import KeptWorkers
from rollout_engine.rollouts.episodes.plan import EpisodePlan
from rollout_engine.rollouts.episodes.run import EpisodeRun
from rollout_engine.rollouts.evaluation.ledger import Cell, Ledger, num_sampled
from rollout_engine.rollouts.evaluation.sweep import Checkpoint, Setting, Sweep, seed_of
from rollout_engine.rollouts.evaluation.tasks import PreparedTask
from rollout_engine.rollouts.groups import AnyGroup, GroupBatcher
from rollout_engine.rollouts.log import LoggedSamples, describe_engine, live_digest
from rollout_engine.rollouts.plan import RolloutArguments, prompt_tasks
from rollout_engine.rollouts.run import RolloutRun
from rollout_engine.telemetry.progress import ProgressBar


class _Missing(NamedTuple):
    """Prompts that one checkpoint has yet to sample, of a task under a setting."""

    task: PreparedTask
    setting: Setting
    cell: Cell
    prompts: tuple[int, ...]


class Evaluator:
    """An evaluation of one policy."""

    def __init__(
        self,
        policy: BlockingVerbs,
        batcher: GroupBatcher,
        kept_workers: KeptWorkers,
        tasks: Sequence[PreparedTask],
        sweep: Sweep,
        *,
        num_samples: int,
        k: Sequence[int],
        seed: int,
        gateway: Callable[..., AgentGateway],
    ) -> None:
        """`gateway`: `RolloutPolicy.gateway`."""
        self._gateway = gateway
        self._policy, self._batcher, self._kept_workers = policy, batcher, kept_workers
        self._tasks, self._settings = tasks, sweep.named_settings()
        self._checkpoints = sweep.named_checkpoints(policy.policy_version)
        self._names = [checkpoint.name for checkpoint in self._checkpoints]
        self._first_version = policy.policy_version + 1
        self._num_samples, self._k, self._seed = num_samples, list(k), seed

    @property
    def plan(self) -> dict[str, Any]:
        """Tasks, settings and checkpoints, for the ledger."""
        return {
            "rollout_engine": VERSION,
            "seed": self._seed,
            "num_samples": self._num_samples,
            "k": self._k,
            "tasks": {task.name: {"digest": task.digest} for task in self._tasks},
            "settings": {setting.name: setting.changed for setting in self._settings},
            "checkpoints": {checkpoint.name: {"path": checkpoint.path} for checkpoint in self._checkpoints},
            "engine": describe_engine(self._policy),
        }

    def run(self, ledger: Ledger, *, shown: bool) -> None:
        """Make every sample that the ledger lacks, checkpoint by checkpoint.

        The policy keeps the weights of the last one that it loaded.
        """
        missing = [(checkpoint, self._missing(ledger, checkpoint)) for checkpoint in self._checkpoints]
        for checkpoint, cells in missing:
            if cells and checkpoint.path is not None and not os.path.exists(checkpoint.path):
                where = f"checkpoints[{checkpoint.name!r}]"
                hint = "Not all of its samples have been made: bring it back, or leave it out of the sweep."
                raise RequestError.for_field(where, checkpoint.path, "a path that exists", hint)
        num_groups = len(self._checkpoints) * len(self._settings) * sum(task.num_prompts for task in self._tasks)
        num_missing = sum(len(prompts) for _, cells in missing for *_, prompts in cells)
        num_done = num_groups - num_missing
        with ProgressBar(num_groups, desc="evaluate", unit="group", shown=shown, num_done=num_done) as progress:
            for checkpoint, cells in missing:
                if cells:
                    self._sample(ledger, checkpoint, cells, progress)
                elif not _is_as_noted(checkpoint, ledger.plan["checkpoints"][checkpoint.name]):
                    with self._load_checkpoint(ledger, checkpoint):
                        pass  # it has the weights of its samples, or that was an error

    def _missing(self, ledger: Ledger, checkpoint: Checkpoint) -> list[_Missing]:
        found = []
        for task, setting in itertools.product(self._tasks, self._settings):
            cell = Cell(checkpoint.name, task.name, setting.name)
            wanted = range(self._num_samples)
            prompts = [i for i in range(task.num_prompts) if not all(ledger.has(cell, i, index) for index in wanted)]
            if prompts:
                found.append(_Missing(task, setting, cell, tuple(prompts)))
        return found

    def _sample(self, ledger: Ledger, checkpoint: Checkpoint, cells: Sequence[_Missing], progress: ProgressBar) -> None:
        progress.describe(f"evaluate {checkpoint.name[-40:]}")
        with self._load_checkpoint(ledger, checkpoint) as lora, held(), ExitStack() as stack:
            lines = LoggedSamples(self._policy, lora)
            runs = []
            for missing in cells:
                with _name_errors(missing):
                    runs.append((missing, self._run_of(missing, lora, may_all_fail=ledger.has_any(missing.cell))))
                stack.callback(runs[-1][1].close)
            for missing, run in _turns(runs):
                deliver()
                with _name_errors(missing):
                    for group in _advance(run):
                        ledger.add(self._samples_of(missing, group, lines))
                        progress.update(group.num_tokens)
                progress.count(lambda: sum(run.num_open_tokens for _, run in runs))

    @contextmanager
    def _load_checkpoint(self, ledger: Ledger, checkpoint: Checkpoint) -> Iterator[str | None]:
        """Load a checkpoint and record its digest. Yields the name of its adapter, which is removed afterwards."""
        request, stamp = checkpoint.lora, checkpoint.stamp()  # of the files as they are before they are read
        if request is None:
            if checkpoint.source is not None:
                self._load(ledger, checkpoint)
            self._note(ledger, checkpoint, live_digest(self._policy), stamp)
            yield None
            return
        is_new = request.name not in {info.name for info in self._policy.list_loras()}
        if request.has_values:
            self._policy.add_lora(request)
        try:
            [digest] = [info.digest for info in self._policy.list_loras() if info.name == request.name] or [""]
            self._note(ledger, checkpoint, f"{live_digest(self._policy)} {digest}", stamp)
            yield request.name
        finally:
            if is_new and request.has_values:
                self._policy.remove_lora(request.name)

    def _note(self, ledger: Ledger, checkpoint: Checkpoint, digest: str, stamp: str | None) -> None:
        facts = {"path": checkpoint.path, "stamp": stamp, "digest": digest, "version": self._policy.policy_version}
        ledger.note_checkpoint(checkpoint.name, facts)

    def _load(self, ledger: Ledger, checkpoint: Checkpoint) -> None:
        """Load weights, as the version that they had before, or would have if all checkpoints were loaded in turn."""
        noted = ledger.plan["checkpoints"][checkpoint.name].get("version")
        version = self._first_version + self._names.index(checkpoint.name) if noted is None else noted
        self._policy.update_weights(checkpoint.source, version=max(version, self._policy.policy_version + 1))

    def _run_of(self, missing: _Missing, lora: str | None, *, may_all_fail: bool) -> AnyRun:
        task, frontend = missing.task, self._policy.frontend
        arguments = RolloutArguments(
            sampling_params=missing.setting.params,
            num_samples=self._num_samples,
            seed=seed_of(self._seed, task.name, missing.setting.name),
            lora_request=lora,
            options=task.task.chat,
        )
        if isinstance(task.spec, Agent):
            options = {**task.task.chat, **task.task.episodes, "env": task.spec}
            arguments = msgspec.structs.replace(arguments, prompts=task.prompts, options=options)
            of_agents = AgentPlan.of(frontend, arguments, task.spec)
            of_agents = msgspec.structs.replace(of_agents, starts=missing.prompts)
            return AgentRun(of_agents, self._gateway, may_all_fail=may_all_fail)
        if task.spec is not None:
            options = {**task.task.chat, **task.task.episodes, "env": task.spec}
            plan = EpisodePlan.of(frontend, msgspec.structs.replace(arguments, options=options))
            first, starts = task.task.first_seed, missing.prompts
            plan = msgspec.structs.replace(plan, first_env_seed=first, starts=starts, num_episodes=len(starts))
            return EpisodeRun(frontend, plan, self._kept_workers, may_all_fail=may_all_fail)
        groups = prompt_tasks(msgspec.structs.replace(arguments, prompts=task.prompts, columns=task.columns))
        wanted, weights = [groups[prompt] for prompt in missing.prompts], task.task.reward_weights
        return RolloutRun(frontend, wanted, task.reward_fn, reward_weights=weights, keeps_aborted=True)

    def _samples_of(self, missing: _Missing, group: AnyGroup, lines: LoggedSamples) -> list[dict[str, Any]]:
        """The lines of a group: of an episode of several rows the last one of the first seat that the policy plays."""
        rows: dict[int, list[dict[str, Any]]] = {}
        for sample in lines.of(self._batcher.samples(group), group.params):
            of_episode = rows.setdefault(sample["sample_index"], [])
            if not of_episode or of_episode[0].get("seat") == sample.get("seat"):
                of_episode.append(sample)
        found = [of_episode[-1] for of_episode in rows.values()]
        for sample in found:
            info = sample.pop("info", None) or {}  # of any kind, not JSON's alone
            sample.pop("episode_id", None)  # another number in an evaluation that is resumed
            sample["group_id"] = group.index
            sample["evaluation"] = {
                **missing.cell._asdict(),
                "correct": bool(np.float32(sample["reward"]) >= np.float32(missing.task.task.correct_from)),
                "answer": _answer(missing.task, sample["response"], info),
                "num_tokens": sum(map(num_sampled, rows[sample["sample_index"]])),
            }
        return found


def _is_as_noted(checkpoint: Checkpoint, noted: Mapping[str, Any]) -> bool:
    """Whether its files are those that were loaded, or are no longer at their paths, so that none need be loaded."""
    if checkpoint.path is None or checkpoint.path != noted["path"]:
        return False
    return (stamp := checkpoint.stamp()) is None or stamp == noted.get("stamp")


def _turns(runs: Sequence[tuple[_Missing, AnyRun]]) -> Iterator[tuple[_Missing, AnyRun]]:
    """The runs whose turn it is: those that can advance at once, else one that samples, so the engine always steps."""
    turn = 0
    while unfinished := [each for each in runs if each[1].unfinished]:
        ready = [each for each in unfinished if each[1].has_news]
        if not ready:
            sampling = [each for each in unfinished if each[1].is_sampling] or unfinished
            ready, turn = [sampling[turn % len(sampling)]], turn + 1
        yield from ready


def _advance(run: AnyRun) -> Sequence[AnyGroup]:
    """Advance once; prompts that an abort cut short are asked again, with the same seeds."""
    groups = run.advance()
    if isinstance(run, RolloutRun):
        aborted, run.aborted = run.aborted, []
        for task in aborted:
            run.start(task)
    return groups


def _answer(task: PreparedTask, text: str, info: Mapping[str, Any]) -> str | None:
    """The answer that a sample votes for."""
    if task.answer is None:
        given = info.get("answer", text.strip())
        return None if given is None else str(given)
    try:
        with allowed():
            found = task.answer(text)
    except Exception as problem:
        raise RewardError(f"the function answer= raised {type(problem).__name__}: {problem}") from problem
    return None if found is None else str(found)


@contextmanager
def _name_errors(missing: _Missing) -> Iterator[None]:
    """Begin the message of any error of this package with the task and the setting."""
    try:
        yield
    except RolloutEngineError as problem:
        problem.args = (f"task {missing.task.name!r}, setting {missing.setting.name!r}: {problem}", *problem.args[1:])
        raise
