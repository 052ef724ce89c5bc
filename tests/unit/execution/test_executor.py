"""The executor of one worker."""

from unittest.mock import MagicMock

import pytest

from rollout_engine.base.errors import LifecycleError
from rollout_engine.execution.executor import InlineExecutor


@pytest.mark.parametrize("wanted", ["worker", "updater", "num_weight_bytes"])
def test_whoever_uses_it_after_shutdown_is_told_so(wanted):
    executor = InlineExecutor(MagicMock())
    executor.shutdown()
    with pytest.raises(LifecycleError, match="The engine was shut down meanwhile; make a new one"):
        getattr(executor, wanted)
