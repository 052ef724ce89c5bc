"""A taskset of verifiers 0.4, written as its documentation says; `kind` chooses what its tasks need."""

import verifiers.v1 as vf

__all__ = ["AdditionTaskset"]


class AdditionData(vf.TaskData):
    answer: str


class AdditionTask(vf.Task[AdditionData]):
    @vf.reward(weight=2.0)
    async def is_right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def is_short(self, trace) -> float:
        return 0.5 if trace.num_output_tokens < 5 else 0.0

    @vf.metric
    async def num_turns(self, trace) -> float:
        return trace.num_turns


class Marked(AdditionTask):
    async def setup(self, trace) -> None:
        trace.info["began"] = True

    @vf.reward
    async def has_begun(self, trace, task) -> float:
        return float(trace.info["began"] and task.answer == self.data.answer)


class Failing(AdditionTask):
    @vf.reward
    async def fails(self, trace) -> float:
        raise KeyError("no such key")


class InSandbox(AdditionTask):
    @vf.reward
    async def runs(self, trace, runtime) -> float:
        return 1.0


class InContainer(AdditionTask):
    NEEDS_CONTAINER = True


class WithFiles(AdditionTask):
    async def setup(self, trace, runtime) -> None:
        await runtime.write("question.txt", b"?")


class AdditionConfig(vf.TasksetConfig):
    size: int = 4
    kind: str = "AdditionTask"
    prompt: bool = True


class AdditionTaskset(vf.Taskset[AdditionTask, AdditionConfig]):
    def load(self):
        kind = globals()[self.config.kind]
        return [
            kind(
                AdditionData(
                    prompt=f"{n} + 1?" if self.config.prompt else None, system_prompt="Add.", answer=str(n + 1)
                ),
                self.config.task,
            )
            for n in range(self.config.size)
        ]
