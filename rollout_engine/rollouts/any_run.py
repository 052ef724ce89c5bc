"""Runs of `rollout` and `arollout`, over prompts, environments or agents: begins one, and runs it to its end."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeAlias

from rollout_engine.base.errors import RequestError
from rollout_engine.batches.rollout_batch import Layout, check_layout
from rollout_engine.engine.interrupts import deliver, held
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.agents.agent import as_agent
from rollout_engine.rollouts.agents.gateway_seam import AgentGateway
from rollout_engine.rollouts.agents.plan import AgentPlan, CollectOptions
from rollout_engine.rollouts.agents.run import AgentRun
from rollout_engine.rollouts.episodes.kept_workers import KeptWorkers
from rollout_engine.rollouts.episodes.plan import EPISODE_KEYS, EpisodePlan, refuse_environments
from rollout_engine.rollouts.episodes.run import EpisodeRun
from rollout_engine.rollouts.plan import RolloutArguments, prompt_tasks
from rollout_engine.rollouts.run import RolloutRun
from rollout_engine.telemetry.progress import ProgressBar
from rollout_engine.text.conversations import CHAT_KEYS
from rollout_engine.text.prompts import check_chat_arguments

AnyRun: TypeAlias = RolloutRun | EpisodeRun | AgentRun


def begin_run(
    arguments: RolloutArguments,
    frontend: Frontend,
    kept_workers: KeptWorkers,
    verb: Callable[..., Any],
    loop: asyncio.AbstractEventLoop | None = None,
    *,
    gateway: Callable[..., AgentGateway],
) -> AnyRun:
    """Check the arguments and make the run. `RequestError` names arguments of `verb`.

    `loop` runs async rewards; `gateway` is `RolloutPolicy.gateway`.
    """
    check_layout(arguments.layout)
    check_chat_arguments(arguments.options, verb, [*CHAT_KEYS, *EPISODE_KEYS])
    frontend.ensure_loras(arguments.lora_request)
    teachers = arguments.teachers
    agent = as_agent(arguments.options.get("env"))
    if agent is not None:
        of_agents = AgentPlan.of(frontend, arguments, agent)
        if teachers is not None:
            teachers.refuse_prompts("Agents have prompts of their own.")
            teachers.check([of_agents.params], {})
        return AgentRun(of_agents, gateway)
    if any(name in EPISODE_KEYS for name in arguments.options):
        plan = EpisodePlan.of(frontend, arguments)
        if teachers is not None:
            teachers.refuse_prompts("Episodes have prompts of their own, which an environment gives.")
            teachers.check([plan.params], {})
        return EpisodeRun(frontend, plan, kept_workers)
    if arguments.prompts is None:
        raise RequestError("prompts=None needs env=, whose environments give the prompts.", field="prompts")
    tasks, weights = prompt_tasks(arguments), arguments.reward_weights
    if teachers is not None:
        teachers.check([task.params for task in tasks], tasks[0].columns)
        teachers.prepare_prompts(tasks)
    return RolloutRun(frontend, tasks, arguments.reward_fn, loop, reward_weights=weights)


def check_for_collect(verb: Callable[..., Any], layout: Layout, options: CollectOptions) -> None:
    """Raise `RequestError` for these arguments if a verb that plays no environments but agents does not take them."""
    check_layout(layout)
    if as_agent(options.get("env")) is not None:  # their plan checks the others
        return
    refuse_environments(verb.__name__, options)
    check_chat_arguments(options, verb)


def run_to_end(run: AnyRun, tell: Callable[[Any], None], *, shown: bool) -> list[Any]:
    """Run all groups to their end, with a progress bar if it is `shown`. Returns them in the order of their prompts."""
    groups, bar = [], ProgressBar(run.num_groups, desc="rollout", unit="group", shown=shown)
    with held(), closing(run), bar:
        while run.unfinished:
            deliver()
            for group in run.advance():
                groups.append(group)
                bar.update(group.num_tokens)
                tell_once(run, group, tell)
            bar.count(lambda: run.num_open_tokens)
    return sorted(groups, key=lambda group: group.index)


def tell_once(run: AnyRun, group: Any, tell: Callable[[Any], None]) -> None:
    """Pass a group to `tell`, unless a journal notes that an earlier process did."""
    tape = run.tape if isinstance(run, EpisodeRun) else None
    if tape is None:
        tell(group)
    elif not tape.is_told(group.index):
        tell(group)
        tape.note_told(group.index)
