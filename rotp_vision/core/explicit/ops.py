"""How an explicit solver becomes a pair of `torch.library` operators, the same for all of them.

A solver brings two functions on a chunk of the batch, `forward` and `backward`. The pair made of them keeps nothing
for backward but its inputs, works in chunks, computes in the dtype of the plan (float32 or float64) whatever autocast
says, is one node for `torch.compile` and `torch.export`, and can be taken apart again into plain tensor operations
(`decompositions`) for a runtime that does not know it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rotp_vision.core.explicit.scratch import ChunkSize, NoScratch, chunks, store


class Inputs(NamedTuple):
    """What a solver reads, for a chunk of b sets."""

    features: Tensor  # (b, D, N) any dtype
    log_p0: Tensor  # (b, D, 1)
    log_q0: Tensor  # (b, 1, N), -inf on masked samples
    view: str  # what the plan sees of the features, see `view_of`
    sets: slice  # which of the batch are in the chunk
    modules: Any  # the scalars of the modules, as the solver's `prepare` makes them of the coefficients


class Needs(NamedTuple):
    """Which gradients are wanted."""

    features: bool
    log_p0: bool
    log_q0: bool
    coefficients: bool


class Gradients(NamedTuple):
    """Gradients of `Inputs` with the same shapes; None where not wanted."""

    features: Tensor | None
    log_p0: Tensor | None
    log_q0: Tensor | None


class Slopes:
    """What the gradients of the coefficients are made of, added up over the chunks, each under a key of its own."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._parts: dict[tuple, list[Tensor]] = {}

    def add(self, key: tuple, terms: Tensor) -> None:
        """Add a chunk's slope, or several (n,), or the terms (b, ·, ·) of one, which are added up at the end."""
        self._parts.setdefault(key, []).append(terms)

    def sums(self) -> dict[tuple, Tensor]:
        parts = self._parts.items()
        return {key: torch.cat(some).sum() if some[0].dim() == 3 else torch.stack(some).sum(0) for key, some in parts}


Forward = Callable[..., Tensor]  # (inputs, scratch, *options) -> (b, D, 1) pooled
Backward = Callable[..., Gradients]  # (grad (b, D, 1), inputs, scratch, needs, slopes, *options)
Prepare = Callable[..., Any]  # (features, log_p0, log_q0, coefficients (kinds, T), eager, *options) -> `Inputs.modules`
Collect = Callable[[dict[tuple, Tensor], Tensor], Tensor]  # (sums of the slopes, coefficients) -> (kinds, T)

INPUTS = 'Tensor features, Tensor log_p0, Tensor log_q0, Tensor coefficients'
_decompositions: dict[Any, Callable] = {}


def decompositions() -> dict[Any, Callable]:
    """The table for `ExportedProgram.run_decompositions` that turns our operators into plain tensor operations."""
    return dict(_decompositions)


class Modules(NamedTuple):
    """The scalars of all modules, made once for all chunks."""

    each: list[tuple[Tensor, ...]]  # the coefficients, module by module
    eager: bool  # whether values may be read, which a trace cannot do and a GPU would wait for
    steepest: float  # if so, the largest of all their sizes


def scalars(
    features: Tensor, log_p0: Tensor, log_q0: Tensor, coefficients: Tensor, eager: bool, *options: Any
) -> Modules:
    """The coefficients (kinds, T), module by module."""
    steepest = float(coefficients.abs().amax()) if eager else math.inf
    return Modules([column.unbind() for column in coefficients.unbind(1)], eager, steepest)


def entries(sums: dict[tuple, Tensor], coefficients: Tensor) -> Tensor:
    """(kinds, T) of slopes whose key is (kind, module); zero where there is none."""
    num_kinds, num_modules = coefficients.shape
    zero = coefficients.new_zeros(())
    return torch.stack([sums.get((i, k), zero) for i in range(num_kinds) for k in range(num_modules)]).view(
        num_kinds, -1
    )


def register(
    name: str,
    forward: Forward,
    backward: Backward,
    options: str = '',
    prepare: Prepare = scalars,
    collect: Collect = entries,
    chunk_size: Callable[..., ChunkSize] = lambda *options: ChunkSize(),
) -> None:
    """Make the operator `torch.ops.rotp_vision.name(features, log_p0, log_q0, coefficients, view, *options) -> (B, D)`.

    The operator takes features (B, D, N), log_p0 (B, D), log_q0 (B, N) and the view of the features that the plan sees.

    Args:
        name: of the operator; its backward is `name_backward`.
        forward: pooled features of a chunk.
        backward: gradients of a chunk.
        options: what else the operator takes, as in a schema: ', int num_inner'.
        prepare: makes the scalars of the modules, once for all chunks; `eager` says that it may read values.
        collect: makes the gradient of the coefficients of the slopes that all chunks have added up.
        chunk_size: of a backward by the options; its `parts` are for the forward alone.
    """

    def gather(sets: slice, features, log_p0, log_q0, view, modules) -> Inputs:
        return Inputs(features[sets], log_p0[sets].unsqueeze(2), log_q0[sets].unsqueeze(1), view, sets, modules)

    def run_forward(features, log_p0, log_q0, coefficients, view, *extra) -> Tensor:
        pooled = features.new_empty(features.shape[:2])
        device = features.device.type
        with torch.autocast(device, enabled=False):
            modules = prepare(features, log_p0, log_q0, coefficients, device == 'cpu', *extra)
            # With fewer buffers than backward, chunks of twice its size stay in the cache. A logarithm is one more.
            enlarge, parts, multiplies = chunk_size(*extra)
            size = ChunkSize(2 * enlarge, parts + (view == 'log'), multiplies)
            for sets, scratch in chunks(features, size, log_p0.dtype):
                inputs = gather(sets, features, log_p0, log_q0, view, modules)
                pooled[sets] = forward(inputs, scratch, *extra).squeeze(2)
        return pooled

    def run_whole(features, log_p0, log_q0, coefficients, view, *extra) -> Tensor:
        modules = prepare(features, log_p0, log_q0, coefficients, False, *extra)
        inputs = gather(slice(None), features, log_p0, log_q0, view, modules)
        return forward(inputs, NoScratch(features, log_p0.dtype), *extra).squeeze(2).to(features.dtype)

    def run_backward(grad, features, log_p0, log_q0, coefficients, needs, view, *extra) -> tuple[Tensor, ...]:
        wanted = Needs(*needs)
        total = make_gradients(grad, features, log_p0, log_q0, coefficients, needs)
        d_features, d_log_p0, d_log_q0, d_coefficients = total
        slopes = Slopes(wanted.coefficients)
        device = features.device.type
        with torch.autocast(device, enabled=False):
            modules = prepare(features, log_p0, log_q0, coefficients, device == 'cpu', *extra)
            for sets, scratch in chunks(features, chunk_size(*extra)._replace(parts=1), log_p0.dtype):
                inputs = gather(sets, features, log_p0, log_q0, view, modules)
                part = backward(grad[sets].unsqueeze(2).to(log_p0.dtype), inputs, scratch, wanted, slopes, *extra)
                if part.features is not None:
                    store(part.features, d_features[sets])
                if part.log_p0 is not None:
                    d_log_p0[sets] = part.log_p0.squeeze(2)
                if part.log_q0 is not None:
                    d_log_q0[sets] = part.log_q0.squeeze(1)
            if slopes.wanted:
                d_coefficients.copy_(collect(slopes.sums(), coefficients))
        return total

    def make_pooled(features, *others) -> Tensor:
        return features.new_empty(features.shape[:2])

    def make_gradients(grad, features, log_p0, log_q0, coefficients, needs, *others) -> tuple[Tensor, ...]:
        return (
            torch.empty_like(features) if needs[0] else features.new_empty(0),
            log_p0.new_empty(log_p0.shape if needs[1] else 0),
            log_q0.new_empty(log_q0.shape if needs[2] else 0),
            torch.empty_like(coefficients),
        )

    define(
        name,
        Pair(run_forward, run_backward, make_pooled, make_gradients),
        f'({INPUTS}, str view{options}) -> Tensor',
        f'(Tensor grad, {INPUTS}, bool[] needs, str view{options}) -> (Tensor, Tensor, Tensor, Tensor)',
        len(Needs._fields),
    )
    _decompositions[getattr(torch.ops.rotp_vision, name).default] = run_whole


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
