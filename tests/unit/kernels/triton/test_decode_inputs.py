"""Last tokens and block tables of sequences that decode."""

import torch

from rollout_engine.kernels.triton.decode_inputs import prepare


def test_unknown_tokens_are_filled_in_and_tables_copied_as_they_have_become(device):
    tables = torch.arange(5 * 3000, dtype=torch.int32).view(5, 3000)
    last_tokens = torch.tensor([50, 51, 52, 53, 54, 55])
    token_ids, rows, lens = torch.tensor([7, -1, -1]), torch.tensor([4, 0, 2]), torch.tensor([5, 2500, 17]).int()
    places, blocks = torch.tensor([2 * 3000 + 1, 4, 4 * 3000, 77]), torch.tensor([-5, -6, -7, -8]).int()
    batch_tables = torch.full((4, 3000), 99, dtype=torch.int32)
    state = [x.to(device) for x in (token_ids, rows, lens, places, blocks, last_tokens, tables, batch_tables)]
    token_ids, rows, lens, places, blocks, last_tokens, kept, copied = state
    prepare(token_ids, rows, lens, (places, blocks, 3), last_tokens, kept, copied[:3], 2)
    assert token_ids.tolist() == [7, 50, 52]
    tables[2, 1], tables[0, 4], tables[4, 0] = -5, -6, -7  # the fourth change is not one
    assert torch.equal(kept.cpu(), tables)
    for index, (row, count) in enumerate([(4, 3), (0, 1250), (2, 9)]):
        assert torch.equal(copied[index, :count].cpu(), tables[row, :count])
        assert (copied[index, count:] == 99).all()
    assert (copied[3] == 99).all()
