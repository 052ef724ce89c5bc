"""The API reference: a directive of mkdocstrings for each public name, and the table of verbs: `markdown()`."""

from collections.abc import Iterator

import rollout_engine
from rollout_engine.engine.verbs import VERBS

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Engines", ("rollout_engine.faces", "rollout_engine.rollouts.policy", "rollout_engine.rollouts.reward_model")),
    (
        "Options",
        ("rollout_engine.base.config", "rollout_engine.base.sampling_params", "rollout_engine.base.pooling_params"),
    ),
    (
        "Collecting and replaying",
        ("rollout_engine.rollouts.collector", "rollout_engine.rollouts.replay", "rollout_engine.rollouts.agents"),
    ),
    ("Batches and files", ("rollout_engine.batches",)),
    ("Results", ("rollout_engine.base.outputs",)),
    ("Metrics", ("rollout_engine.base.metrics", "rollout_engine.telemetry", "rollout_engine.fleet")),
    ("Errors", ("rollout_engine.base.errors",)),
    ("More", ("",)),
)
"""Heading -> modules whose public names stand below it; a name stands below the first that fits."""
MODULES = (
    ("rollout_engine.exact", "The trainer's side of exactness"),
    ("rollout_engine.batches.advantages", "Advantages"),
    ("rollout_engine.exact.routing", "Routing replay"),
    ("sync", "Weights between processes"),
    ("worker_ext.base", "Worker extensions"),
    ("envs_adapters.base", "Environments"),
    ("rollout_engine.base.tool_call", "Calls of tools"),
    ("rollout_engine.testing", "Tiny models, for tests"),
)


def markdown() -> str:
    """The whole reference."""
    parts = []
    for heading, names in grouped():
        parts += [f"## {heading}", *(f"::: rollout_engine.{name}" for name in names)]
    parts += ["## Verbs", VERBS_TEXT, *_verbs()]
    for module, heading in MODULES:
        parts += [
            f"## {heading}",
            f"::: {module}\n    options:\n      show_root_heading: false\n      heading_level: 2",
        ]
    return "\n\n".join(parts) + "\n"


VERBS_TEXT = """What every engine does beside generating, under these names at `LLM`, `LLMEngine`, `RolloutPolicy` and
`RolloutService`; at `AsyncLLM` as coroutines. `timeout` is in seconds; None: as long as the engine is busy with what
came before."""


def grouped() -> Iterator[tuple[str, list[str]]]:
    """(heading, public names) in order; every public name is in one group."""
    left = {name: home for name, home in rollout_engine._HOMES.items()}
    for heading, homes in GROUPS:
        names = [name for name, home in left.items() if home.startswith(homes)]
        left = {name: home for name, home in left.items() if name not in names}
        if names:
            yield heading, names


def _verbs() -> Iterator[str]:
    for verb in sorted(VERBS.values(), key=lambda verb: verb.name):
        if verb.public:
            yield f"::: {verb.function.__module__}.{verb.function.__name__}"


if __name__ == "__main__":
    print(markdown())
