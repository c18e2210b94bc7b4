"""How an explicit solver becomes a pair of `torch.library` operators, the same for all of them.

A solver brings one function that runs it on a `Tape`. The pair made of it keeps nothing for backward but its inputs,
works in chunks, computes in the dtype of the plan (float32 or float64) whatever autocast says, is one node for
`torch.compile` and `torch.export`, and can be taken apart again into plain tensor operations (`decompositions`) for a
runtime that does not know it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rotp_vision.core.explicit.scratch import ChunkSize, NoScratch, chunks, reads_values, store
from rotp_vision.core.explicit.tape import Batch, Coefficient, Logits, Needs, Tape, Variable

# (tape, modules, each with one coefficient of every kind, *options) -> the logits and the sample vector of the pooling
Run = Callable[..., tuple[Logits, Variable]]

INPUTS = 'Tensor features, Tensor log_p0, Tensor log_q0, Tensor coefficients'
_decompositions: dict[Any, Callable] = {}


def decompositions() -> dict[Any, Callable]:
    """The table for `ExportedProgram.run_decompositions` that turns our operators into plain tensor operations."""
    return dict(_decompositions)


def _batch(features, log_p0, log_q0, coefficients, view, similarity, *, eager: bool) -> Batch:
    num_kinds, num_modules = coefficients.shape
    numbers = coefficients.t().tolist() if eager else [[math.nan] * num_kinds] * num_modules
    values = [module.unbind() for module in coefficients.unbind(1)]
    modules = [[Coefficient(*pair) for pair in zip(*each, strict=True)] for each in zip(values, numbers, strict=True)]
    any_masked, ranges = True, [[-math.inf, 0.0], [-math.inf, 0.0]]
    if eager and features.shape[0]:
        present = log_q0[log_q0 != -torch.inf]
        any_masked = present.numel() < log_q0.numel()
        ranges = [torch.stack(log.aminmax()).tolist() for log in (log_p0, present)]
    return Batch(features, log_p0, log_q0, view, similarity, modules, eager, any_masked, *ranges)


def register(name: str, run: Run, options: str, chunk_size: Callable[..., ChunkSize]) -> None:
    """Make the operator `torch.ops.rotp_vision.name`.

    It takes features (B, D, N), log_p0 (B, D), log_q0 (B, N), coefficients (kinds, T), the view of the features that
    the plan sees, the similarity of the structural term ('' without) and the options; it returns (B, D).

    Args:
        name: of the operator; its backward is `name_backward`.
        run: the solver.
        options: what else the operator takes, as in a schema: ', int num_inner'.
        chunk_size: of a backward by the similarity and the options; its `parts` are for the forward alone.
    """

    def run_forward(features, log_p0, log_q0, coefficients, view, similarity, *extra) -> Tensor:
        pooled = make_pooled(features)
        eager = reads_values(features.device)
        with torch.autocast(features.device.type, enabled=False):
            batch = _batch(features, log_p0, log_q0, coefficients, view, similarity, eager=eager)
            # With fewer buffers than backward, chunks of twice its size stay in the cache. A logarithm is one more.
            enlarge, parts, multiplies = chunk_size(similarity, *extra)
            size = ChunkSize(2 * enlarge, parts + (view == 'log'), multiplies)
            for sets, scratch in chunks(features, size, log_p0.dtype):
                tape = Tape(batch, sets, scratch)
                pooled[sets] = tape.pool(*run(tape, batch.modules, *extra)).squeeze(2)
        return pooled

    def run_whole(features, log_p0, log_q0, coefficients, view, similarity, *extra) -> Tensor:
        batch = _batch(features, log_p0, log_q0, coefficients, view, similarity, eager=False)
        tape = Tape(batch, slice(None), NoScratch(features, log_p0.dtype))
        return tape.pool(*run(tape, batch.modules, *extra)).squeeze(2).to(features.dtype)

    def run_backward(grad, features, log_p0, log_q0, coefficients, needs, view, similarity, *extra):
        total = make_gradients(grad, features, log_p0, log_q0, coefficients, needs)
        eager = reads_values(features.device)
        with torch.autocast(features.device.type, enabled=False):
            batch = _batch(features, log_p0, log_q0, coefficients, view, similarity, eager=eager)
            for sets, scratch in chunks(features, chunk_size(similarity, *extra)._replace(parts=1), log_p0.dtype):
                tape = Tape(batch, sets, scratch, Needs(*needs))
                end = run(tape, batch.modules, *extra)
                parts = tape.gradients(*end, grad[sets].unsqueeze(2).to(log_p0.dtype))
                for part, whole in zip(parts, total, strict=False):
                    if part is not None:
                        store(part.view(part.shape[0], *whole.shape[1:]), whole[sets])
            if needs[-1]:
                each = [coefficient.gradient() for module in batch.modules for coefficient in module]
                total[-1].copy_(torch.stack(each).view_as(coefficients.t()).t())
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

    options = f', str view, str similarity{options}'
    define(
        name,
        Pair(run_forward, run_backward, make_pooled, make_gradients),
        f'({INPUTS}{options}) -> Tensor',
        f'(Tensor grad, {INPUTS}, bool[] needs{options}) -> (Tensor, Tensor, Tensor, Tensor)',
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
