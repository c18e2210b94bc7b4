"""How a function and its backward become a `torch.library` operator, the same in every room of the core."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Pair(NamedTuple):
    """What an operator and its backward do, and what they return for tensors without values."""

    forward: Callable
    backward: Callable
    fake_forward: Callable
    fake_backward: Callable


def define(name: str, pair: Pair, schema: str, schema_backward: str, num_inputs: int) -> None:
    """Make the operators `torch.ops.rotp_vision.name` and `name_backward`, with autograd and vmap.

    `name(*inputs, *options)`, of `num_inputs` tensors, gives the pooled features and maybe vectors for backward;
    `name_backward(grad, *inputs, *vectors, needs, *options)` gives the gradients.
    """
    op = torch.library.custom_op(f'rotp_vision::{name}', pair.forward, mutates_args=(), schema=schema)
    op_backward = torch.library.custom_op(
        f'rotp_vision::{name}_backward', pair.backward, mutates_args=(), schema=schema_backward
    )
    op.register_fake(pair.fake_forward)
    op_backward.register_fake(pair.fake_backward)

    def setup_context(ctx, inputs, output) -> None:
        tensors, ctx.options = inputs[:num_inputs], inputs[num_inputs:]
        ctx.save_for_backward(*tensors, *(output[1:] if isinstance(output, tuple) else ()))
        ctx.set_materialize_grads(False)  # vectors for backward have no gradients, and need no zeros in their place

    def autograd_backward(ctx, grad, *_):
        if grad is None:
            return (None,) * (num_inputs + len(ctx.options))
        needs = list(ctx.needs_input_grad[:num_inputs])
        gradients = op_backward(grad, *ctx.saved_tensors, needs, *ctx.options)
        wanted = [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]
        return *wanted, *[None] * len(ctx.options)

    op.register_autograd(autograd_backward, setup_context=setup_context)

    def no_double_backward(ctx, *grads):
        raise RuntimeError(f"{name} has no second derivative; use the solver's backend 'reference' for it")

    op_backward.register_autograd(no_double_backward, setup_context=lambda ctx, inputs, output: None)
    op.register_vmap(_one_by_one(op))
    op_backward.register_vmap(_one_by_one(op_backward))


def _one_by_one(op: Callable) -> Callable:
    """The vmap rule that calls `op` once for every entry of the mapped axis."""

    def rule(info, in_dims, *args):
        def entry(i: int):
            # A list has a list of Nones.
            pairs = zip(args, in_dims, strict=True)
            return op(*[arg.select(dim, i) if isinstance(dim, int) else arg for arg, dim in pairs])

        results = [entry(i) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(column) for column in zip(*results, strict=True)), (0,) * len(results[0])

    return rule
