"""What a layer is to `torch.fx`."""

from typing import Any

from torch import fx, nn


class OneNode(nn.Module):
    """A module that is one `call_module` node of `torch.fx`, as torch's own are, whichever tracer runs.

    A forward that reads shapes in Python cannot be followed symbolically, and tracers take only modules of torch for
    nodes unless they are told of others.
    """

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, fx.Proxy):
            return super().__call__(x, *args, **kwargs)
        tracer: Any = x.tracer

        def node(*args: Any, **kwargs: Any) -> fx.Proxy:
            return tracer.create_proxy('call_module', tracer.path_of_module(self), args, kwargs)

        return tracer.call_module(self, node, (x, *args), kwargs)
