"""The weights of a solver's modules."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Weight = float | Sequence[float] | Tensor


class StepWeights(NamedTuple):
    """The weights of T modules, each (T,) and positive; their length *is* the number of modules.

    What a solver does not read may be None: `step` for Sinkhorn, `proximal` for Bregman ADMM, both penalties for the
    published Bregman ADMM. Without `structure` the structural term is not computed at all.
    """

    smoothness: Tensor  # α1
    feature_penalty: Tensor | None = None  # α2
    sample_penalty: Tensor | None = None  # α3
    structure: Tensor | None = None  # α0
    step: Tensor | None = None  # ρ of Bregman ADMM
    proximal: Tensor | None = None  # τ of the outer Sinkhorn loop


def step_weights(
    num_modules: int,
    *,
    smoothness: Weight,
    feature_penalty: Weight | None = None,
    sample_penalty: Weight | None = None,
    structure: Weight | None = None,
    step: Weight | None = None,
    proximal: Weight | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> StepWeights:
    """Weights of `num_modules` modules from numbers (shared or one per module) or tensors, checked.

    Numbers must be positive; of tensors only the shape, () or (num_modules,), is checked, because reading their
    values would stall the device. `structure=0.0` means no structural term.
    """
    if num_modules < 1:
        raise ValueError(f'num_modules must be at least 1, got {num_modules}')
    if isinstance(structure, (int, float)) and structure == 0:
        structure = None

    def expand(name: str, value: Weight | None) -> Tensor | None:
        if value is None:
            return None
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=dtype, device=device)
        if not isinstance(value, Tensor) and not bool((tensor.isfinite() & (tensor > 0)).all()):
            raise ValueError(f'{name} must be positive and finite, got {value}')
        if tensor.shape not in ((), (num_modules,)):
            raise ValueError(f'{name} must be one number or {num_modules}, one per module, got {tuple(tensor.shape)}')
        return tensor.expand(num_modules)

    smooth = expand('smoothness', smoothness)
    assert smooth is not None
    return StepWeights(
        smooth,
        expand('feature_penalty', feature_penalty),
        expand('sample_penalty', sample_penalty),
        expand('structure', structure),
        expand('step', step),
        expand('proximal', proximal),
    )


def scaled_softplus(betas: Sequence[Tensor], starts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Positive weights w = start · softplus(β) / softplus(0), in float32 or wider."""
    # A half-precision model keeps its weights in half precision but solves in float32.
    wide = (beta.to(torch.promote_types(beta.dtype, torch.float32)) for beta in betas)
    return tuple(start * (F.softplus(beta) / math.log(2.0)) for beta, start in zip(wide, starts, strict=True))


def require(solver: str, weights: StepWeights, *names: str) -> list[tuple[Tensor, ...]]:
    """The named weights module by module; an error names the solver and the weight that is missing or uneven."""
    given = {name: value for name, value in zip(weights._fields, weights, strict=True) if value is not None}
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f'{solver} needs the weight(s) {", ".join(missing)}, got None')
    lengths = {name: len(value) for name, value in given.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f'the weights of {solver} must have one entry per module each, got lengths {lengths}')
    return list(zip(*(given[name].unbind() for name in names), strict=True))
