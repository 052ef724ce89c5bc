"""Episodes of a batch: which rows are of one episode, and which episodes failed.

Statistics count an episode once, however many rows it has (on_rewrite="branch"), and leave out the rewards of those
that failed.
"""

from tensordict import TensorDictBase

from rollout_engine.batches.layout import num_sequences


def episodes(batch: TensorDictBase) -> list[list[int]]:
    """The rows of each episode of each group, in order of appearance; of a batch without episodes each row alone."""
    if "episode_id" not in batch.keys():
        return [[row] for row in range(num_sequences(batch))]
    found: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(batch.get("group_id").tolist(), batch.get("episode_id").tolist(), strict=True)):
        found.setdefault(key, []).append(row)
    return list(found.values())


def counted(batch: TensorDictBase) -> list[bool]:
    """For each row, whether its reward counts: its episode has not failed."""
    if "episode_id" not in batch.keys() or "error" not in batch.keys():
        return [True] * num_sequences(batch)
    return [error is None for error in batch["error"]]
