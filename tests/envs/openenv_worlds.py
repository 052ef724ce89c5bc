"""Environments of OpenEnv for the tests, and a server of the first one: `uvicorn tests.envs.openenv_worlds:app`."""

import random
import threading

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: str


class Told(Observation):
    text: str


class Move(Action):
    row: int
    column: int


class Board(Observation):
    text: str
    cells: list[int]


class GuessNumber(Environment[Guess, Told, State]):
    """Guess a number from 1 to 9 that the seed determines."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, first="Guess.", **kwargs):
        self.number, self.count = random.Random(seed).randint(1, 9), 0
        return Told(text=first)

    def step(self, action, timeout_s=None, **kwargs):
        if action.guess == "hang":
            threading.Event().wait(20)
        self.count += 1
        right = int(action.guess) == self.number
        return Told(text=f"{self.count}: {right}", reward=float(right), done=right, metadata={"count": self.count})

    @property
    def state(self):
        return State(step_count=self.count)


class AwaitedNumber(GuessNumber):
    """The same, by coroutines."""

    async def reset_async(self, seed=None, **kwargs):
        return self.reset(seed, **kwargs)

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self.step(action)


class Grid(Environment[Move, Board, State]):
    """Sums of rows and columns."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Board(text="Move.", cells=[])

    def step(self, action, timeout_s=None, **kwargs):
        return Board(text="Moved.", cells=[action.row, action.column], reward=action.row + action.column)

    @property
    def state(self):
        return State()


class Unseeded(GuessNumber):
    """Its reset takes no seed."""

    def reset(self):
        return Told(text="Guess.")


app = create_fastapi_app(GuessNumber, Guess, Told, max_concurrent_envs=3)
