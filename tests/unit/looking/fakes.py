"""Small stand-ins for the packages of trackers: they record the calls that the real ones take."""

import sys
from types import ModuleType, SimpleNamespace


def install(monkeypatch):
    """Put fakes of all four packages in place of the real ones. Returns the list that calls are added to."""
    calls = []

    def put(name, **content):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    def record(*call):
        calls.append(call)

    def init(package):
        return lambda **options: Run(record, package, options)

    put("tensorboard")
    put("torch.utils.tensorboard", SummaryWriter=lambda log_dir: SummaryWriter(record, log_dir))
    put("wandb", init=init("wandb"))
    put("trackio", init=init("trackio"))
    entities = SimpleNamespace(
        Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)
    )
    put("mlflow", MlflowClient=lambda uri: MlflowClient(record, uri), entities=entities)
    return calls


class SummaryWriter:
    def __init__(self, record, log_dir):
        self._record = record
        record("tensorboard", "made", log_dir)

    def add_scalar(self, tag, scalar_value, global_step):
        self._record("tensorboard", tag, scalar_value, global_step)

    def flush(self):
        pass

    def close(self):
        self._record("tensorboard", "closed")


class Run:
    def __init__(self, record, package, options):
        self._record, self._package = record, package
        record(package, "made", options)

    def log(self, metrics, step=None):
        self._record(self._package, metrics, step)

    def finish(self):
        self._record(self._package, "closed")


class MlflowClient:
    def __init__(self, record, tracking_uri):
        self._record = record
        record("mlflow", "made", tracking_uri)

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name, artifact_location):
        return "7"

    def create_run(self, experiment_id, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment_id}/{run_name}"))

    def log_batch(self, run_id, metrics):
        self._record("mlflow", {metric.key: metric.value for metric in metrics}, metrics[0].step, run_id)

    def set_terminated(self, run_id):
        self._record("mlflow", "closed")
