"""Every face has a method for every public verb, with the verb's arguments and words, and for no other."""

import inspect

import pytest

from rollout_engine import LLM, AsyncLLM, LLMEngine, RolloutPolicy, RolloutService
from rollout_engine.engine.verbs import VERBS
from rollout_engine.process.weight_server import WEIGHT_VERBS

FACES = (LLM, LLMEngine, AsyncLLM, RolloutPolicy, RolloutService)
PUBLIC = [name for name, verb in VERBS.items() if verb.public]
OVERRIDDEN = {
    (LLM, "get_num_unfinished_requests"),
    (LLMEngine, "get_num_unfinished_requests"),
    (RolloutPolicy, "score"),
    *((RolloutService, name) for name in ("get_num_unfinished_requests", "get_cache_usage", "collective_rpc")),
}
"""Methods that say of a face's own requests, batches or replicas what the verb says of the engine's."""


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("face", FACES)
def test_a_public_verb_is_a_method_of_every_face(face, name):
    method, verb = getattr(face, name), VERBS[name]
    is_the_verbs = method.__doc__ == verb.function.__doc__ and parameters_of(method) == parameters_of(verb.function)
    assert is_the_verbs == ((face, name) not in OVERRIDDEN)
    assert inspect.iscoroutinefunction(method) == (face is AsyncLLM)
    assert method.__name__ == name and method.__doc__


@pytest.mark.parametrize("name", [*(name for name in VERBS if name not in PUBLIC), *WEIGHT_VERBS])
@pytest.mark.parametrize("face", FACES)
def test_a_verb_of_the_engines_own_is_no_method(face, name):
    assert not hasattr(face, name)


def test_the_two_tables_have_no_name_in_common():
    assert not set(VERBS) & set(WEIGHT_VERBS)
    assert not any(verb.public for verb in WEIGHT_VERBS.values())


@pytest.mark.parametrize("verb", [*VERBS.values(), *WEIGHT_VERBS.values()], ids=lambda verb: verb.name)
def test_a_verb_says_what_it_does_takes_and_gives(verb):
    assert verb.function.__doc__ and inspect.signature(verb.function).return_annotation is not inspect.Signature.empty
    assert verb.timeout or verb.name in WEIGHT_VERBS, "its caller may wait for ever"
    assert not verb.timeout or verb.timeout in verb.signature.parameters
    assert set(verb.span_arguments) <= set(verb.signature.parameters)


def parameters_of(function):
    """All but the first, which is the face or the driver."""
    return list(inspect.signature(function).parameters.values())[1:]
