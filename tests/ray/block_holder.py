"""A program with a connector of its own in the cluster of RAY_ADDRESS: it keeps blocks until it is ended.

python -m tests.ray.block_holder FIRST LAST
"""

import sys

from rollout_engine.kv.tiers import make_connector
from tests.unit.kv.blocks import LAYOUT, data, key

SPEC = "rollout_engine.fleet.ray.block_connector:RayConnector"


def connect(max_bytes=1 << 20):
    """A connector in the cluster that this program is on."""
    connector = make_connector(SPEC, max_bytes)
    connector.open(LAYOUT)
    return connector


def save(connector, *numbers):
    for number in numbers:
        connector.save(key(number), data(number))
    assert connector._inner.wait_until_written(60)


if __name__ == "__main__":
    holder = connect()
    save(holder, *range(int(sys.argv[1]), int(sys.argv[2])))
    print("saved", flush=True)
    sys.stdin.read()
    holder.close()
