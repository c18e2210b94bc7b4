"""How a solver on the tape becomes a `torch.library` operator, the same for all of them.

A solver brings one function that runs it on a `Tape`. The operator made of it keeps nothing for backward but its
inputs, works in chunks, computes in the dtype of the plan (float32 or float64) whatever autocast says, and is one node
for `torch.compile`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rotp_vision.core.explicit.scratch import ChunkSize, chunks, reads_values, store
from rotp_vision.core.explicit.tape import Batch, Coefficient, Logits, Needs, Tape, Variable
from rotp_vision.core.operator import Pair, define

# (tape, *options) -> the logits and the sample vector of the pooling
Run = Callable[..., tuple[Logits, Variable]]

INPUTS = 'Tensor features, Tensor log_p0, Tensor log_q0, Tensor coefficients'


def _batch(features, log_p0, log_q0, coefficients, view, similarity) -> Batch:
    eager = reads_values(features.device)
    num_kinds, num_modules = coefficients.shape
    numbers = coefficients.t().tolist() if eager else [[math.nan] * num_kinds] * num_modules
    values = [module.unbind() for module in coefficients.unbind(1)]
    modules = [list(map(Coefficient, *module)) for module in zip(values, numbers, strict=True)]
    any_masked = not eager or bool((log_q0 == -torch.inf).any())
    return Batch(features, log_p0, log_q0, view, similarity, modules, eager, any_masked)


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
        with torch.autocast(features.device.type, enabled=False):
            batch = _batch(features, log_p0, log_q0, coefficients, view, similarity)
            # With fewer buffers than backward, chunks of twice its size stay in the cache. A logarithm is one more.
            enlarge, parts, multiplies = chunk_size(similarity, *extra)
            size = ChunkSize(2 * enlarge, parts + (view == 'log'), multiplies)
            for sets, scratch in chunks(features, size, log_p0.dtype):
                pooled[sets] = pool(Tape(batch, sets, scratch), *extra)
        return pooled

    def pool(tape: Tape, *extra) -> Tensor:  # a function of its own, so that the next chunk may have the tape's memory
        return tape.pool(*run(tape, *extra)).squeeze(2)

    def run_backward(grad, features, log_p0, log_q0, coefficients, needs, view, similarity, *extra):
        total = make_gradients(grad, features, log_p0, log_q0, coefficients, needs)
        with torch.autocast(features.device.type, enabled=False):
            batch = _batch(features, log_p0, log_q0, coefficients, view, similarity)
            for sets, scratch in chunks(features, chunk_size(similarity, *extra)._replace(parts=1), log_p0.dtype):
                tape = Tape(batch, sets, scratch, Needs(*needs))
                gradients = tape.gradients(*run(tape, *extra), grad[sets].unsqueeze(2).to(log_p0.dtype))
                for gradient, whole in zip(gradients, total, strict=False):
                    if gradient is not None:
                        store(gradient.view(gradient.shape[0], *whole.shape[1:]), whole[sets])
                gradient = gradients = tape = None  # whose memory the next chunk may have
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
