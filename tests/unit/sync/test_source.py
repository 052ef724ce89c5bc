"""Modules, dicts and iterators all read as plain (name, tensor) pairs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sync.errors import ManifestMismatch
from sync.offer import Offer
from sync.source import read_source, tied_groups


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


class Wrapper(nn.Module):
    """Nests a module as DistributedDataParallel (`module`) and torch.compile (`_orig_mod`) do."""

    def __init__(self, name, inner):
        super().__init__()
        self.add_module(name, inner)


class Params4bit(nn.Parameter):
    """As bitsandbytes calls its own."""


def partitioned():
    """A parameter as DeepSpeed leaves it on each rank."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_shape = torch.Size([4])
    return parameter


def names(source):
    return [name for name, _ in read_source(source)]


def test_a_module_gives_its_state_dict_without_copies():
    module = Tied()
    pairs = dict(read_source(module))
    assert set(pairs) == {"embed.weight", "head.weight", "steps"}
    assert pairs["embed.weight"].data_ptr() == module.embed.weight.data_ptr()
    assert not pairs["embed.weight"].requires_grad


def test_dict_and_iterator_read_the_same():
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    assert names(tensors) == names(iter(tensors.items())) == ["a", "b"]


@pytest.mark.parametrize("wraps", [["module"], ["_orig_mod"], ["module", "_orig_mod"], ["_orig_mod", "module"]])
def test_wrapper_prefixes_are_removed(wraps):
    module = Tied()
    for name in wraps:
        module = Wrapper(name, module)
    assert set(names(module)) == {"embed.weight", "head.weight", "steps"}


def test_compiled_submodules_are_unwrapped_too():
    module = nn.Sequential(Wrapper("_orig_mod", nn.Linear(2, 2)), nn.Linear(2, 2))
    assert names(module) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_module_prefix_that_only_some_names_have_is_part_of_the_name():
    assert names({"module.a": torch.ones(1), "b": torch.ones(1)}) == ["module.a", "b"]


def test_tied_names_are_found_by_their_memory():
    weight = torch.ones(2, 2)
    tensors = [("a", weight), ("b", weight.clone()), ("c", weight), ("d", weight.t()), ("e", torch.empty(0))]
    assert tied_groups(tensors) == [["a", "c"]]


@pytest.mark.parametrize(
    "source,message",
    [
        ("no/such/directory", "/no/such/directory does not exist"),
        (7, "not from int"),
        ({"a": [1.0]}, "'a' is list, not a tensor"),
        ({1: torch.ones(1)}, "named 1"),
        ([torch.ones(1)], "Item 0 of the weight iterator is Tensor"),
        ({"a": torch.empty(1, device="meta")}, "'a' is on the meta device"),
        ({"model": {"a": torch.ones(1)}}, "'model' is dict, not a tensor. Pass the inner dict"),
        ({"a": partitioned()}, "'a' is partitioned by DeepSpeed ZeRO-3.*GatheredParameters"),
        ({"a": Params4bit(torch.ones(1))}, "'a' is quantised by bitsandbytes .Params4bit."),
        (SimpleNamespace(model=nn.Linear(2, 2)), "not from SimpleNamespace. Pass its .model"),
    ],
)
def test_what_is_no_weight_is_refused_by_name(source, message):
    with pytest.raises(ManifestMismatch, match=message):
        read_source(source)


def cast_for(name, tensor, metadata):
    return Offer({name: tensor}, metadata).cast(0)


def test_float_casts_are_nearest_even():
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])  # bfloat16 steps by 2**-7 here
    cast = cast_for("w", halfway, {"w": ("bfloat16", (3,))})
    assert cast.dtype == torch.bfloat16
    assert cast.tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


def test_only_floats_are_cast():
    assert cast_for("w", torch.ones(2, dtype=torch.int64), {"w": ("float32", (2,))}).dtype == torch.int64
    assert cast_for("w", torch.ones(2), {"w": ("int64", (2,))}).dtype == torch.float32
    assert cast_for("unknown", torch.ones(2), {}).dtype == torch.float32


def test_a_tensor_that_fits_is_not_copied():
    tensor = torch.ones(4)
    assert cast_for("w", tensor, {"w": ("float32", (4,))}).data_ptr() == tensor.data_ptr()


def test_a_copied_tensor_is_cast_nearest_even_wherever_it_goes():
    source = torch.randn(3, 4)
    offer = Offer({"w": source}, {"w": ("bfloat16", (3, 4))})
    for out in (torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(4, 3, dtype=torch.bfloat16).t()):
        offer.copy(0, out)
        assert torch.equal(out, source.bfloat16())
