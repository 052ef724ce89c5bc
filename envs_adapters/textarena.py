"""Games of textarena: "textarena:TicTacToe-v0", or any other that it registers, of one player or several.

    make_env("textarena:TicTacToe-v0")

A seat is a player. It reads the game's messages to it since its last turn, not its own answers again; the game gives
all rewards at its end. The names' endings choose textarena's wrappers: those of "-train" hide the words of the other
players, and of "-raw" take answers as they are.
"""

import json
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from numbers import Real
from typing import Any

from envs_adapters.base import Action, Observation
from envs_adapters.generators import OwnGenerators
from rollout_engine.base.errors import ConfigError, refused, unknown_name

TRAITS: dict[str, Any] = {"placement": "processes"}

_MAX_PLAYERS = 15
_HIDDEN: dict[str, frozenset[str]] = {
    "": frozenset(),
    "LLMObservationWrapper": frozenset(),
    "GameMessagesObservationWrapper": frozenset({"PLAYER_ACTION"}),
    "GameMessagesAndCurrentBoardObservationWrapper": frozenset({"PLAYER_ACTION"}),
    "GameBoardObservationWrapper": frozenset({"PLAYER_ACTION", "GAME_ACTION_DESCRIPTION", "GAME_MESSAGE"}),
}
"""Wrapper of observations ("" for none) -> kinds of messages that its players do not see."""
_GAME = -1
"""Sender of the game's own messages."""
_NOTHING_NEW = "It is your turn."


def make(name: str, *, num_players: int | None = None, **options: Any) -> "TextArenaEnv":
    """One game.

    Args:
        num_players: None: two if the game can be played by two, else the fewest that can play it.
        options: of the game's class, for example max_turns=5 of "GuessTheNumber-v0".
    """
    return TextArenaEnv(name, num_players or _num_players(name, json.dumps(options, sort_keys=True)), options)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the game exists, takes the options, and starts.

    Some games need word lists of nltk, an API key, or a newer Python.
    """
    with OwnGenerators(0):
        from textarena.envs.registration import ENV_REGISTRY
    if name not in ENV_REGISTRY:
        plain = [known for known in ENV_REGISTRY if not known.endswith(("-raw", "-train"))]
        raise ConfigError(unknown_name("game of textarena", name, plain))
    players = options.get("num_players", 1)
    if type(players) is not int or not 1 <= players <= _MAX_PLAYERS:
        raise ConfigError(refused("num_players", players, f"an int from 1 to {_MAX_PLAYERS}"))
    try:
        make(name, **options).reset(0)
    except Exception as problem:
        reason = " ".join(f"{type(problem).__name__}: {problem}".replace("*", "").split())
        raise ConfigError(f"textarena:{name} does not start with {dict(options)}: {reason}") from problem


class TextArenaEnv:
    """An episode of one game.

    Its end is `terminated`: textarena does not separate a limit of turns from an end. The last `info` has "game",
    textarena's record of each player, for example {0: {"invalid_move": False, "reason": ..., ...}, ...}.
    """

    def __init__(self, name: str, num_players: int, options: Mapping[str, Any]) -> None:
        self.num_seats = num_players
        self._name, self._options = name, options
        self._generators = OwnGenerators(0)
        self._env: Any = None
        self._game: Any = None
        """The environment inside its wrappers."""
        self._wrapper = ""
        """The wrapper that makes its observations."""
        self._said: dict[int, str] = {}
        """Seat -> its last observation, if only the wrapper itself can make them."""

    def reset(self, seed: int) -> Observation:
        """Start the game."""
        import textarena

        self._generators = OwnGenerators(seed)
        with self._generators:
            self._env = textarena.make(self._name, **self._options)
            self._env.reset(num_players=self.num_seats, seed=seed)
            self._game, self._wrapper = _unwrap(self._env)
            return self._observe({})

    def step(self, action: Action) -> Observation:
        """Take the answer of the player whose turn it is."""
        with self._generators:
            done, info = self._env.step(action=action.text)
            if not done:
                return self._observe(info)
            rewards, game = self._env.close()
            last = self._observe({**info, "game": game})
        last.reward = self._check_rewards(rewards)
        last.terminated = True
        return last

    def _observe(self, info: Mapping[str, Any]) -> Observation:
        """The messages that the player whose turn it is has not read."""
        if self._wrapper in _HIDDEN:
            seat, messages = self._game.get_observation()
            said = [self._words(seat, *message) for message in messages]
            text = "\n".join(words for words in said if words)
        else:
            seat, said_so_far = self._env.get_observation()
            before, self._said[seat] = self._said.get(seat, ""), said_so_far
            text = said_so_far.removeprefix(before)
        nothing_new = "" if "game" in info else _NOTHING_NEW
        return Observation(text.strip("\n") or nothing_new, reward={}, info=info, seat=seat)

    def _check_rewards(self, rewards: Any) -> dict[int, float]:
        """The rewards of a game; some games return something else after an invalid answer."""
        if not rewards or not all(isinstance(reward, Real) for reward in rewards.values()):
            raise ValueError(f"textarena:{self._name} has ended with {rewards!r} for rewards, which are no numbers.")
        return {int(seat): float(reward) for seat, reward in rewards.items()}

    def _words(self, seat: int, sender: Any, words: Any, kind: Any) -> str:
        """A message as `seat` reads it; "" if it does not."""
        if isinstance(sender, Enum):  # some games give a player's action in another order
            sender, words, kind = words, kind, sender
        if kind.name in _HIDDEN[self._wrapper] or (kind.name == "PLAYER_ACTION" and sender == seat):
            return ""
        if _HIDDEN[self._wrapper]:
            return str(words)
        name = "GAME" if sender == _GAME else self._game.state.role_mapping.get(sender, f"Player {sender}")
        return f"[{name}] {words}"


def _unwrap(env: Any) -> tuple[Any, str]:
    """The game inside an environment, and the name of the wrapper that makes its observations."""
    from textarena.core import ObservationWrapper, Wrapper

    wrapper = ""
    while isinstance(env, Wrapper):
        if isinstance(env, ObservationWrapper):
            wrapper = wrapper or type(env).__name__
        env = env.env
    return env, wrapper


@lru_cache(maxsize=256)
def _num_players(name: str, options: str) -> int:
    """The number of players of a game, by trial. Raises the game's error if no number works."""
    import textarena

    problems = list[Exception]()
    numbers: list[int] = [2, 1, *range(3, _MAX_PLAYERS + 1)]
    for number in numbers:
        with OwnGenerators(0):
            env = textarena.make(name, **json.loads(options))
            try:
                env.reset(num_players=number, seed=0)
            except Exception as problem:
                problems.append(problem)
            else:
                return number
    raise next((problem for problem in problems if not isinstance(problem, AssertionError)), problems[0])
