"""Mistakes with environments; `Guess` is one that is right."""

from tests.mistakes.table import Mistake

_GROUP = "Environments"
_DEFINE = '''
class Guess:
    def __init__(self, **options):
        vars(self).update(options)
    def reset(self, seed):
        return "Guess."
    def step(self, action):
        return Observation("Wrong.", reward=0.0)
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b
params = {"max_tokens": 2}
'''


def _mistake(code: str) -> Mistake:
    return Mistake(_GROUP, code, _DEFINE, varies="0x[0-9a-f]+")


def _step(returned: str) -> Mistake:
    """A step that returns something wrong."""
    return _mistake(f"Guess.step = lambda self, action: {returned}\npolicy.rollout(None, params, env=Guess)")


ENVIRONMENT_MISTAKES = [
    _mistake("policy.rollout(None, params, env=Guess())"),
    _mistake("policy.rollout(None, params, env='reasoning_gym:spell_backwards')"),
    _mistake("policy.rollout(['a'], params, env=Guess)"),
    _mistake("policy.rollout(None, params)"),
    _mistake("policy.rollout(None, params, num_episodes=4)"),
    _mistake("policy.rollout(None, params, env=Guess, num_episode=4)"),
    _mistake("policy.rollout(None, params, env=Guess, num_episodes=0)"),
    _mistake("policy.rollout(None, {'seed': 1}, env=Guess)"),
    _mistake("policy.rollout(None, params, env=Guess, reward_fn=len)"),
    _mistake("policy.rollout(None, params, env=Guess, tool_format='json')"),
    _mistake("policy.rollout(None, params, env=Guess, tools=[{'type': 'function', 'function': {'name': 'add'}}])"),
    _mistake("policy.rollout(None, params, env=Guess, tools=[lambda a: a])"),
    _mistake("policy.rollout(None, params, env=Guess, tools=[add])"),
    _mistake("policy.rollout(None, params, env=Guess, tools=[add], tool_format='hermes')"),
    _mistake("policy.rollout(None, params, env=Guess, seats={'1': policy})"),
    _mistake("policy.rollout(None, params, env=Guess, episode_timeout=0)"),
    _mistake("policy.rollout(None, params, env=Guess, on_rewrite='ignore')"),
    _mistake("policy.collect(None, params, env=Guess)"),
    _step("('Wrong.', 0.0)"),
    _step("Observation('Wrong.', reward=float('nan'))"),
    _step("Observation('Wrong.', reward='1')"),
    _step("Observation('Wrong.', seat=1)"),
    _step("1 / 0"),
    _mistake("policy.rollout(None, params, env=dict)"),
    _mistake("make_env('gymnasium')"),
    _mistake("make_env('reasoning_gim:spell_backward')"),
    _mistake("make_env('reasoning_gym:spell_backwards')"),
    _mistake("make_env('reasoning_gym:spell_backward', max_word_length=3)"),
    _mistake("make_env('reasoning_gym:spell_backward', step_timeout=0)"),
    _mistake("make_env(Guess(), num_workers=2)"),
    _mistake("make_env(Guess, placement='process')"),
]
