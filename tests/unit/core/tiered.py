"""Rigs whose core has a tier over a fake store."""

from rollout_engine.core.fake_tier import FakeStore, num_slot_bytes
from rollout_engine.core.tier import Tier


def with_tier(rig, store=None):
    """Give a rig a tier. Its weights are told apart by a serial number, which each commit raises.

    `rig.digest_delay`: steps behind a commit for which the digest of the weights is not known.
    """
    store = FakeStore() if store is None else store
    transfer, commit, step = rig.executor.transfer, rig.commit, rig.step
    transfer.store, rig.store = store, store
    rig.save_kv = rig.executor.save_kv
    rig.digest_delay = rig._unknown_for = 0
    tier = Tier(
        store,
        block_bytes=num_slot_bytes(rig.config.block_size),
        state_bytes=num_slot_bytes(1) if rig.config.num_state_slots else 0,
        weights=lambda: None if rig._unknown_for else f"weights {transfer.weights_serial}",
        save_now=rig.save_kv,
    )
    rig.core._tables.tier = rig.tier = tier
    rig.core.stats.kv_tier = tier.stats

    def commit_other_weights(version, kv="keep"):
        rig.core.quiesce()
        transfer.weights_serial += 1
        rig._unknown_for = rig.digest_delay
        return commit(version, kv)

    def step_once():
        said = step()
        rig._unknown_for = max(0, rig._unknown_for - 1)
        return said

    rig.commit, rig.step = commit_other_weights, step_once
    return rig
