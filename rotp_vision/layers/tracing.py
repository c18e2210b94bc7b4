"""What a layer is to tracers: one node for `torch.fx`, as torch's own layers are, and nothing that scripts."""

import functools
from collections.abc import Callable
from typing import Any

from torch import fx, nn


def one_node(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a module as one `call_module` node of `torch.fx`, whichever tracer runs and whatever it knows."""

    @functools.wraps(forward)
    def forward_or_node(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, fx.Proxy):
            tracer: Any = x.tracer
            return tracer.create_proxy('call_module', tracer.path_of_module(self), (x, *args), kwargs)
        return forward(self, x, *args, **kwargs)

    return forward_or_node


def refuse_script(module: nn.Module) -> nn.Module:
    """What `torch.jit.script` calls first, as a module's `__prepare_scriptable__`."""
    raise NotImplementedError(
        f'{type(module).__name__} does not script: TorchScript is deprecated. Use torch.export, whose '
        'run_decompositions(rotp_vision.core.decompositions()) needs no rotp_vision to load, or torch.jit.trace'
    )
