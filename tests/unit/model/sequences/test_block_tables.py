"""The matrix of block tables holds every sequence's own, however many there are and however long they grow."""

import random

from rollout_engine.base.messages import ScheduledSequence
from rollout_engine.model.sequences.block_tables import BlockTableMatrix


def read(rows, sequence_id, length):
    (row,) = rows.rows([sequence_id])
    assert len(rows.tables()[sequence_id]) == length
    return rows.matrix[row, :length].tolist()


def test_tables_grow_and_change_in_place():
    rows = BlockTableMatrix()
    rows.add([0, 1])
    rows.extend([ScheduledSequence(0, 0, 1, [5, 6, 7]), ScheduledSequence(1, 0, 1, [1])])
    rows.extend([ScheduledSequence(0, 3, 1, [9, 8], first_block=2), ScheduledSequence(1, 1, 1, [], first_block=1)])
    assert (read(rows, 0, 4), read(rows, 1, 1)) == ([5, 6, 9, 8], [1])


def test_many_long_tables_survive_growth_and_the_end_of_others():
    rows, draws, tables = BlockTableMatrix(), random.Random(0), {}
    for i in range(300):
        tables[i] = [draws.randrange(1000) for _ in range(draws.randint(1, 200))]
        rows.add([i])
        rows.extend([ScheduledSequence(i, 0, 1, tables[i])])
        if i % 3 == 0:
            gone = draws.choice([*tables])
            del tables[gone]
            rows.forget(gone)
    rows.forget(-1)
    assert all(read(rows, name, len(table)) == table for name, table in tables.items())


def test_rows_of_ended_sequences_are_used_again():
    rows = BlockTableMatrix()
    for i in range(1000):
        rows.add([i])
        rows.extend([ScheduledSequence(i, 0, 1, [i])])
        rows.forget(i)
    assert len(rows.matrix) == 64
