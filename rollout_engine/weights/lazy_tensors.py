"""A mapping whose tensors are made on access."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor


class LazyTensors(Mapping[str, Tensor]):
    """Maps each of `names` to `make(name)`, which is called on every access."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Tensor]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
