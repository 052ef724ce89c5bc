"""Makes this engine a rollout of verl, under the name "rollout_engine": verl imports this by its group `verl.plugins`.

If only verl's own discovery is off, VERL_USE_EXTERNAL_MODULES=envs_adapters.trainers.verl_plugin does the same.
"""

import logging
from importlib.metadata import version

from envs_adapters.trainers.verl_rollout import EngineReplica

NAME = "rollout_engine"
TESTED = "0.9.1"
logger = logging.getLogger("rollout_engine")


def register() -> None:
    """Add the rollout and its replicas to verl's registries."""
    from verl.workers.rollout import base, replica

    found = version("verl")
    if found != TESTED:
        logger.warning("The adapter was tested with verl %s; this is %s.", TESTED, found)
    replica.RolloutReplicaRegistry.register(NAME, lambda: EngineReplica)
    base._ROLLOUT_REGISTRY[NAME, "async"] = "envs_adapters.trainers.verl_rollout.EngineRollout"


register()
