"""Watchers of layers: they see every output, change none, and their errors stay with them."""

import torch
from torch import nn

from rollout_engine.model.modules.layer_watch import LayerWatch


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_watcher_that_raises_is_logged_once_and_the_forward_goes_on(caplog):
    module, x = Decoder(), torch.ones(2, 4)
    watch, calls, seen = LayerWatch(module, 3), [], []

    def broken(layer, hidden):
        calls.append(layer)
        if layer == 1:
            raise ValueError("too large")

    expected = module(x)
    watch.watch(broken)
    stop = watch.watch(lambda layer, hidden: seen.append(layer))
    for _ in range(2):
        assert torch.equal(module(x), expected)
    assert calls == [0, 1] and seen == [0, 1, 2] * 2 and watch.num_watchers == 1
    (record,) = caplog.records
    assert "broken raised ValueError at layer 1 and is not called again: too large" in record.message
    stop()
    assert watch.num_watchers == 0


def test_a_watcher_that_writes_to_what_it_sees_changes_no_bit():
    module, x = Decoder(), torch.ones(2, 4)
    expected = module(x)
    LayerWatch(module, 3).watch(lambda layer, hidden: hidden.zero_())
    assert torch.equal(module(x), expected)
