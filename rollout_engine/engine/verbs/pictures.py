"""Verbs that forget pictures: those kept so that each crosses once, and outputs of the vision tower.

Neither changes a result or a request in flight: those have their pictures.
"""

from rollout_engine.engine import combine
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.verb_table import VERBS


@VERBS.add(combine=combine.nothing)
def reset_mm_cache(driver: EngineDriver, *, timeout: float | None = None) -> None:
    """Forget the pictures that other processes keep so that each is sent to them once; later requests send theirs.

    Of all clients: one that reads no messages at present has its pictures kept until it does. An engine of one rank in
    this process keeps none, and this does nothing.
    """
    driver.forget_received_pictures()
    driver.executor.reset_mm_cache()


@VERBS.add(combine=combine.nothing)
def reset_encoder_cache(driver: EngineDriver, *, timeout: float | None = None) -> None:
    """Forget the vision tower's outputs, on every rank; the pictures of later requests are encoded again.

    Not needed after an update: the tower's outputs are dropped with its weights. A model without a vision tower keeps
    none, and this does nothing.
    """
    driver.executor.reset_encoder_cache()
