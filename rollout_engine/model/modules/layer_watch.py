"""Shows the outputs of a module's decoder layers to watchers."""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rollout_engine.base.errors import LifecycleError

logger = logging.getLogger("rollout_engine")


class LayerWatch:
    """The decoder layers of `module` and their watchers."""

    def __init__(self, module: nn.Module, num_layers: int) -> None:
        self._name = type(module).__name__
        self._layers = layers_of(module, num_layers)
        self.num_watchers = 0

    def watch(self, watcher: Callable[[int, Tensor], None]) -> Callable[[], None]:
        """Call `watcher(layer, hidden)` with a copy of every layer's output [T, H]; returns a function that stops it.

        A watcher that raises is logged and not called again; the forward continues.
        """
        if not self._layers:
            raise LifecycleError(f"watch_layers: {self._name} has no list of decoder layers to watch.")
        hooks: list[RemovableHandle] = []

        def stop() -> None:
            if hooks:
                self.num_watchers -= 1
            while hooks:
                hooks.pop().remove()

        hooks += [layer.register_forward_hook(_hook(watcher, i, stop)) for i, layer in enumerate(self._layers)]
        self.num_watchers += 1
        return stop


def _hook(
    watcher: Callable[[int, Tensor], None], index: int, stop: Callable[[], None]
) -> Callable[[nn.Module, Any, Any], None]:
    def show(layer: nn.Module, given: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        try:
            watcher(index, hidden.flatten(0, -2).clone())
        except (Exception, SystemExit) as problem:
            stop()
            name = getattr(watcher, "__qualname__", repr(watcher))
            what = "watcher %s raised %s at layer %d and is not called again: %s"
            logger.warning(what, name, type(problem).__name__, index, problem, exc_info=problem)

    return show


def layers_of(module: nn.Module, count: int) -> list[nn.Module]:
    """The module list of `count` decoder layers; empty if there is none."""
    lists = (child for child in module.modules() if isinstance(child, nn.ModuleList))
    return next((list(found) for found in lists if len(found) == count), [])
