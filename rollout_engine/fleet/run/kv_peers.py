"""Introduces the KV connectors of a fleet's engines to one another."""

from collections.abc import Mapping

from rollout_engine.fleet.run.member import Member


def introduce_kv_peers(members: Mapping[int, Member]) -> None:
    """Have each connector meet the others, by the metadata that their engines started with. Waits for none of them.

    A connector without the metadata of a peer has a miss in place of that peer's blocks.
    """
    handshakes = {index: member.client.info.kv_handshake for index, member in members.items()}
    if len(members) < 2 or not any(handshakes.values()):
        return
    for index, member in members.items():
        peers = [each for other, each in handshakes.items() if other != index and each]
        member.client.call("meet_kv_peers", {"peers": peers, "timeout": None})
