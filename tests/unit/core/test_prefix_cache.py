import pytest

from rollout_engine.core import prefix_cache
from rollout_engine.core.prefix_cache import PrefixBlock, PrefixCache


def chain(*contents, version=1, salt=""):
    parent = None
    for token_ids in contents:
        parent = PrefixBlock(parent, token_ids, version, salt)
    return parent


def test_a_published_block_is_found_by_an_equal_chain():
    cache = PrefixCache()
    cache.publish(5, chain([1, 2], [3, 4]))
    block, identity = cache.find(chain([1, 2], [3, 4]))
    assert (block, identity.holds([3, 4])) == (5, True)


OTHERS = {
    "other tokens": chain([1, 2], [3, 5]),
    "other parent": chain([1, 1], [3, 4]),
    "no parent": chain([3, 4]),
    "longer parent": chain([1, 2], [1, 2], [3, 4]),
    "other version": chain([1, 2], [3, 4], version=2),
    "other salt": chain([1, 2], [3, 4], salt="x"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_chain_that_differs_anywhere_is_not_found(other):
    cache = PrefixCache()
    cache.publish(5, chain([1, 2], [3, 4]))
    assert cache.find(OTHERS[other]) is None


@pytest.mark.parametrize("other", OTHERS)
def test_a_hash_collision_is_a_miss(monkeypatch, other):
    monkeypatch.setattr(prefix_cache, "block_hash", lambda *fields: b"same")
    cache = PrefixCache()
    cache.publish(5, chain([1, 2], [3, 4]))
    differing = OTHERS[other]
    rebuilt, parents = None, []
    while differing is not None:
        parents.append(differing)
        differing = differing.parent
    for link in reversed(parents):
        token_ids = memoryview(link.content).cast("I").tolist()
        rebuilt = PrefixBlock(rebuilt, token_ids, link.version, link.salt)
    assert cache.find(rebuilt) is None
    assert cache.find(chain([1, 2], [3, 4])) is not None


def test_the_first_block_of_two_equal_ones_stays_published():
    cache = PrefixCache()
    cache.publish(5, chain([1, 2]))
    cache.publish(6, chain([1, 2]))
    assert cache.find(chain([1, 2]))[0] == 5
    cache.forget(6)
    assert cache.find(chain([1, 2]))[0] == 5
    cache.check_integrity()


def test_a_forgotten_block_is_not_found():
    cache = PrefixCache()
    cache.publish(5, chain([1, 2]))
    cache.forget(5)
    assert cache.find(chain([1, 2])) is None
    cache.check_integrity()


def test_a_block_is_worth_keeping_only_under_its_own_version():
    cache = PrefixCache()
    cache.publish(5, chain([1, 2], version=1))
    assert (cache.holds(5, 1), cache.holds(5, 2), cache.holds(6, 1)) == (True, False, False)


def test_hash_depends_on_every_field():
    base = (b"p" * 16, b"abcd", 1, "salt")
    changes = [
        (b"q" * 16, *base[1:]),
        (base[0], b"abce", 1, "salt"),
        (*base[:2], 2, "salt"),
        (*base[:3], "pepper"),
        (*base, 3),
    ]
    hashes = {prefix_cache.block_hash(*fields) for fields in [base, *changes]}
    assert len(hashes) == 6 and {len(h) for h in hashes} == {16}


def test_a_very_long_chain_is_compared_and_freed_without_recursion():
    one, two = chain(*([[7]] * 50_000)), chain(*([[7]] * 50_000))
    assert one.same_as(two)
    del one, two


def test_integrity_check_sees_a_hash_that_leads_elsewhere():
    cache = PrefixCache()
    cache.publish(5, chain([1, 2]))
    cache._block_by_hash[chain([1, 2]).hash] = 6
    with pytest.raises(AssertionError, match="not found by its own hash"):
        cache.check_integrity()
