"""Lets others see what the decoder layers of a module put out."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rollout_engine.errors import LifecycleError


class LayerWatch:
    """The decoder layers of `module`, and how many watch them."""

    def __init__(self, module: nn.Module, num_layers: int) -> None:
        self._name = type(module).__name__
        self._layers = layers_of(module, num_layers)
        self.num_watchers = 0

    def watch(self, watcher: Callable[[int, Tensor], None]) -> Callable[[], None]:
        """Call `watcher(layer, hidden)` with every layer's output [T, H]; returns what ends it."""
        if not self._layers:
            raise LifecycleError(f"watch_layers: {self._name} has no list of decoder layers to watch.")
        hooks = [layer.register_forward_hook(_hook(watcher, i)) for i, layer in enumerate(self._layers)]
        self.num_watchers += 1

        def stop() -> None:
            if hooks:
                self.num_watchers -= 1
            while hooks:
                hooks.pop().remove()

        return stop


def _hook(watcher: Callable[[int, Tensor], None], index: int) -> Callable[[nn.Module, Any, Any], None]:
    def show(layer: nn.Module, given: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        watcher(index, hidden.flatten(0, -2))

    return show


def layers_of(module: nn.Module, count: int) -> list[nn.Module]:
    """The list of `count` decoder layers; empty where there is no such list."""
    lists = (child for child in module.modules() if isinstance(child, nn.ModuleList))
    return next((list(found) for found in lists if len(found) == count), [])
