import pytest

from rollout_engine.core.block_pool import BlockPool


def take_all(pool):
    return [pool.allocate() for _ in range(pool.num_free)]


def test_worthless_blocks_are_reused_before_cached_ones_and_those_oldest_first():
    pool = BlockPool(4)
    blocks = take_all(pool)
    for block, worth_keeping in zip(blocks, (True, False, True, False), strict=True):
        pool.release(block, worth_keeping=worth_keeping)
    assert take_all(pool) == [blocks[3], blocks[1], blocks[0], blocks[2]]


def test_memory_that_was_never_written_is_taken_before_cached_content_is_lost():
    pool = BlockPool(5)
    first, second = pool.allocate(), pool.allocate()
    pool.release(first, worth_keeping=True)
    pool.release(second, worth_keeping=False)
    assert take_all(pool) == [second, 2, 3, 4, first]


@pytest.mark.parametrize("num_cached", range(4))
def test_blocks_are_used_again_before_new_ones_once_their_contents_are_forgotten(num_cached):
    pool = BlockPool(9)
    used = [pool.allocate() for _ in range(4)]
    for block in used[:3]:
        pool.release(block, worth_keeping=block < num_cached)
    pool.forget_contents()
    pool.check_integrity([[3]])
    pool.release(3, worth_keeping=True)
    taken = take_all(pool)
    assert (sorted(taken[:3]), taken[3:]) == ([0, 1, 2], [4, 5, 6, 7, 8, 3])


def test_a_shared_block_is_free_only_after_its_last_release():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    assert pool.is_shared(block)
    pool.release(block, worth_keeping=True)
    assert (pool.num_free, pool.is_shared(block)) == (0, False)
    pool.release(block, worth_keeping=True)
    assert pool.num_free == 1


def test_sharing_a_free_block_takes_it_out_of_the_free_list():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block, worth_keeping=True)
    pool.share(block)
    assert block not in take_all(pool)
    pool.check_integrity([[0, 1]])


def test_releasing_a_free_block_is_our_own_error():
    with pytest.raises(AssertionError, match="without a reference"):
        BlockPool(1).release(0, worth_keeping=False)


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 1]]])
def test_integrity_check_sees_a_lost_an_extra_and_a_foreign_reference(tables):
    pool = BlockPool(3)
    assert pool.allocate() == 0
    pool.check_integrity([[0]])
    with pytest.raises(AssertionError, match="references"):
        pool.check_integrity(tables)
