"""A fleet over fake models: everything but the models and the processes is real."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from rollout_engine.base.errors import EngineDeadError, RolloutEngineError
from rollout_engine.base.pictures import PictureInfo
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.engine.calls import CallFuture
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.rollout_service import RolloutService
from rollout_engine.fleet.plan.balancer import Balancer
from rollout_engine.fleet.run.client import FleetClient
from tests.unit.fake_engine import BLOCK_SIZE, CODEC, VOCAB_SIZE, FakeModel

_PIDS = itertools.count(1)


class FakeClient(LocalClient):
    """The client of a replica, an engine of this process; as over a socket, what is sent waits for no step."""

    def __init__(self, *args):
        self._sent, self._came = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        super().__init__(*args, own_thread=True)
        self.pid = next(_PIDS)
        self.on_draining, self.draining = None, None

    @property
    def ending(self):
        return self.dead_error or self.draining

    def add_request(self, request):
        self._require_alive()
        try:
            self._sent.submit(self._add, request)
        except RuntimeError:  # it has been shut down
            raise EngineDeadError("The engine is gone.") from None

    def abort(self, sequence_ids):
        with suppress(RuntimeError):
            self._sent.submit(super().abort, sequence_ids)

    def call(self, name, arguments):
        if name == "get_live_digest":
            answer = CallFuture()
            answer.succeed("of a fake model")
        else:
            answer = super().call(name, arguments)
        self._require_alive()
        return answer

    def hold_sent(self):
        """Keep what is sent from now on from the engine; the function returned passes it on, and waits for that."""
        held = threading.Event()
        self._sent.submit(held.wait)

        def release():
            held.set()
            self._sent.submit(lambda: None).result()

        return release

    def shutdown(self):
        super().shutdown()
        self._sent.shutdown(wait=False)

    def _add(self, request):
        try:
            super().add_request(request)
        except EngineDeadError:  # the dead refuse nothing: it fails with all others
            pass
        except RolloutEngineError as error:
            self._came.submit(self._listener.refuse, request.first_sequence_id, error)

    def _require_alive(self):
        """Raise, as over a socket, where it is known that the engine has died."""
        if self.dead_error is not None:
            raise EngineDeadError(*self.dead_error.args)

    def _deliver(self, outputs):
        self._came.submit(super()._deliver, outputs)

    def _fail_all(self, error):
        self._came.submit(super()._fail_all, error)


class FakeReplica:
    """An engine that can be killed."""

    node = "fake"

    def __init__(self, max_model_len, image_token_id=-1):
        executor = FakeModel(max_model_len, image_token_id=image_token_id)
        config = CoreConfig(
            num_blocks=1024,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            vocab_size=VOCAB_SIZE,
            pooling=executor.info.pooling,
            pictures=None if image_token_id < 0 else PictureInfo(image_token_id),
        )
        self.executor = executor
        self.client = FakeClient(EngineCore(executor, config), executor, executor.info)

    def kill(self, unnoticed=lambda: None):
        """End the engine; its fleet hears of it after `unnoticed` is called."""
        self.client.dead_error = EngineDeadError("The engine's thread was killed")
        unnoticed()
        self.client._give_up("was killed")
        self.client.shutdown()

    def end(self, *, kill=False):
        self.client.shutdown()


class FakeProvider:
    """Starts fake replicas; `starts` says whether it can, and `replicas` are those it has started, by index."""

    def __init__(self, max_model_len, image_token_id=-1):
        self.max_model_len, self.image_token_id, self.replicas, self.starts = max_model_len, image_token_id, {}, True

    def share(self, config, num_replicas):
        return config

    def check(self, num_more, config, num_present=0):
        pass

    def start(self, index, config):
        if not self.starts:
            raise EngineDeadError("there is no room")
        replica = self.replicas[index] = FakeReplica(self.max_model_len, self.image_token_id)
        return replica

    def close(self):
        pass

    def shutdown(self):
        pass


def make_service(num_replicas=2, *, max_model_len=4000, image_token_id=-1, **balancer):
    """A `RolloutService` and its `FakeProvider`. `image_token_id`: its cores take pictures."""
    provider = FakeProvider(max_model_len, image_token_id)
    config = FakeModel().info.config
    client = FleetClient.start(config, num_replicas=num_replicas, provider=provider, balancer=Balancer(**balancer))
    return RolloutService(Frontend(client, CODEC)), provider
