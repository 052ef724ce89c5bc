"""Samples of an evaluation, made up."""

import random

from tests.unit.looking.lines import rollouts

CHECKPOINTS, SETTINGS = ("steps/100", "steps/200", "steps/300"), ("cool", "hot")
PLAN = {
    "k": [1, 4],
    "checkpoints": dict.fromkeys(CHECKPOINTS, {}),
    "tasks": {"spell": {}, "sum": {}},
    "settings": dict.fromkeys(SETTINGS, {}),
}


def evaluated(num_prompts, num_samples=4, **options):
    """Samples of two tasks under two settings by three checkpoints."""
    draws, made = random.Random(0), []
    for number, checkpoint in enumerate(CHECKPOINTS):
        for task in PLAN["tasks"]:
            for setting in SETTINGS:
                for sample in rollouts(num_prompts, num_samples, seed=number, **options):
                    correct = draws.random() < 0.2 * (number + 1)
                    of = {"checkpoint": checkpoint, "task": task, "setting": setting}
                    answer = "right" if correct else draws.choice("abc")
                    evaluation = of | {"correct": correct, "answer": answer}
                    made.append(sample | {"reward": float(correct), "evaluation": evaluation})
    return made
