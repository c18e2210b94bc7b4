"""Whether the Triton kernels may be trusted on a device, which a GPU that nobody tried them on has to show.

At the first use of a configuration (device, solver, dtype, view, tile …) a small random problem of that tile is solved
by the kernels and by the torch operators in float64, forwards and backwards. Where they disagree, or where a kernel
does not compile, one warning says what to report, and from then on 'auto' means the torch operators there.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rotp_vision.core.problem import rot_problem
from rotp_vision.core.solver import Solver, Windows, registered
from rotp_vision.core.weights import StepWeights, scaled_softplus

# How far a result may be from float64, relative to the largest entry, besides twice the rounding of its dtype. Of
# weights the gradients are sums in which much cancels: relative to the largest of all weights'.
AGREEMENT, AGREEMENT_WEIGHTS = 1e-4, 1e-3

Results = dict[str, Tensor]  # the output and every gradient by name; those of weights have one axis or none
_logger = logging.getLogger(__name__)
_verdicts: dict['Configuration', dict[tuple, bool]] = {}
_lock = threading.Lock()


class Configuration(NamedTuple):
    """What a kernel is compiled for, but for its tile."""

    kind: str  # 'sets', 'windows' or 'softplus'
    device: str
    solver: str
    dtype: str
    view: str


def trusted(
    configuration: Configuration, tile: tuple, results: Callable[[], tuple[Results, Results]], features: Tensor
) -> bool:
    """Whether the kernels of a configuration may be used.

    Args:
        configuration: what they are compiled for.
        tile: and the constants of their tiles.
        results: makes those of the kernels, and what is right; called once for a tile, and never while a CUDA graph is
            captured: then what is known of the configuration counts, and nothing known means no.
        features: what the kernels are to run on.
    """
    verdict = _verdicts.get(configuration, {}).get(tile)
    if verdict is not None:
        return verdict
    if features.is_cuda and torch.cuda.is_current_stream_capturing():
        return known(*configuration)
    with _lock:
        verdicts = _verdicts.setdefault(configuration, {})
        if tile not in verdicts:
            verdicts[tile] = _passes(configuration, tile, results)
        return verdicts[tile]


# A compiler evaluates this when it meets it, and takes the answer for a constant.
@torch.compiler.assume_constant_result
def known(kind: str, device: str, solver: str, dtype: str, view: str) -> bool:
    """Whether a tile of a configuration has been checked, and every one that was has passed."""
    verdicts = _verdicts.get(Configuration(kind, device, solver, dtype, view), {}).values()
    return bool(verdicts) and all(verdicts)


def is_traced(features: Tensor) -> bool:
    """Whether something records or transforms what happens, or the features have no values: no time for a check."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return True
    if type(features) not in (Tensor, torch.nn.Parameter):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()


def device_of(tensor: Tensor) -> str:
    return f'{tensor.device.type}:{tensor.device.index or 0}'


def _passes(configuration: Configuration, tile: tuple, results: Callable[[], tuple[Results, Results]]) -> bool:
    _logger.info('checking the Triton kernels of %s, tile %s', configuration, tile)
    # In a thread of its own there are no autocast, no hooks of a checkpoint, no inference mode.
    with ThreadPoolExecutor(1) as apart:
        try:
            problem = disagreement(*apart.submit(results).result())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler, of a driver: whatever it is, torch can do without
            problem = f'fail with {type(error).__name__}: {str(error)[:500]}'
    if problem is None:
        return True
    warnings.warn(
        f'The Triton kernels {problem} ({configuration}, tile {tile}). The torch operators are used instead: results '
        'are right, but slower. Please report this message with what `rotp-vision bench --device '
        f'{configuration.device}` prints. With ROTP_BACKEND=torch there is neither check nor warning',
        stacklevel=2,
    )
    return False


def disagreement(got: Results, right: Results) -> str | None:
    """What is wrong with results, as a clause; None where nothing is."""
    largest = {name: float(value.abs().max()) for name, value in right.items()}
    weights = [name for name, value in right.items() if value.dim() < 2]
    largest |= dict.fromkeys(weights, max((largest[name] for name in weights), default=0.0))
    for name, value in right.items():
        limit = AGREEMENT_WEIGHTS if name in weights else AGREEMENT
        limit += 2 * torch.finfo(got[name].dtype).eps
        error = float((got[name].double() - value).abs().max())
        if not error <= limit * max(largest[name], 1e-6):  # so is NaN
            return f'disagree with the torch operators in {name!r}, by {error:.3g} of {largest[name]:.3g}'
    return None


def _differentiate(function: Callable[..., Tensor], leaves: Results, dtype: torch.dtype) -> Results:
    """The output of a function of the leaves, and their gradients, from one that is rounded to `dtype`."""
    given = {name: value.detach().requires_grad_() for name, value in leaves.items()}
    output = function(**given)
    towards = torch.linspace(-1, 2, output.numel(), device=output.device).view_as(output).to(dtype).to(output.dtype)
    gradients = torch.autograd.grad(output, list(given.values()), towards)
    return {'output': output.detach()} | dict(zip(given, gradients, strict=True))


def _both(kernels: Callable[..., Tensor], right: Callable[..., Tensor], leaves: Results) -> tuple[Results, Results]:
    """Results of the kernels, and of the torch operators in float64."""
    dtype = next(iter(leaves.values())).dtype
    exact = {name: value.double() for name, value in leaves.items()}
    return _differentiate(kernels, leaves, dtype), _differentiate(right, exact, dtype)


def _random(*shape: int, like: Tensor) -> Tensor:
    """Normal, the same every time, whatever the device; the random numbers of others are left alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(like.device, like.dtype)


def _random_weights(weights: StepWeights, solver: Solver) -> Results:
    """Those that a solver reads, from 0.5 to 1.5, and a gain."""
    names = ('smoothness', 'feature_penalty', 'sample_penalty') if solver.name == 'sinkhorn' else ('smoothness', 'step')
    device, count = weights.smoothness.device, len(weights.smoothness)
    given = {name: 0.5 + torch.rand(count, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(names)}
    return {name: value.to(device) for name, value in given.items()} | {'gain': torch.full((), 1.5, device=device)}


def set_results(
    features: Tensor, weights: StepWeights, solver: Solver, view: str, windows: None
) -> tuple[Results, Results]:
    """Of two sets as large as those of `features` (B, D, N), with priors, the second with a masked sample of NaN."""
    _, num_features, num_samples = features.shape
    x = _random(2, num_features, num_samples, like=features)
    x[1, :, 1:2] = torch.nan
    if features.stride(1) == 1:
        x = x.mT.contiguous().mT
    leaves = {'features': x, 'log_p0': _random(2, num_features, like=weights.smoothness)}
    leaves |= {'log_q0': _random(2, num_samples, like=weights.smoothness)} | _random_weights(weights, solver)
    mask = torch.ones(2, num_samples, dtype=torch.bool, device=x.device)
    mask[1, 1:2] = False

    def kernels(features: Tensor, log_p0: Tensor, log_q0: Tensor, gain: Tensor, **given: Tensor) -> Tensor:
        problem = rot_problem(features, log_p0, log_q0, mask, view, zeroed=True)
        return registered('triton').pool(problem, StepWeights(**given), solver, gain)

    def right(features: Tensor, log_p0: Tensor, log_q0: Tensor, gain: Tensor, **given: Tensor) -> Tensor:
        problem = rot_problem(features, log_p0, log_q0, mask, view)
        return registered('torch').pool(problem, StepWeights(**given), solver) * gain

    return _both(kernels, right, leaves)


def window_results(
    features: Tensor, weights: StepWeights, solver: Solver, view: str, windows: Windows
) -> tuple[Results, Results]:
    """Of a map with as many channels as `features` (B, C, H, W), and of such windows, three along each axis."""
    kernel_h, kernel_w, stride_h, stride_w, _, _, dilation_h, dilation_w, _, _ = windows
    padding = kernel_h // 2, kernel_w // 2
    height = 2 * stride_h + dilation_h * (kernel_h - 1) + 1 - 2 * padding[0]
    width = 2 * stride_w + dilation_w * (kernel_w - 1) + 1 - 2 * padding[1]
    x = _random(2, features.shape[1], max(height, 1), max(width, 1), like=features)
    if features.stride(1) == 1:
        x = x.contiguous(memory_format=torch.channels_last)
    shape = {'kernel_size': windows[:2], 'stride': windows[2:4], 'padding': padding, 'dilation': windows[6:8]}
    inside = F.unfold(torch.ones_like(x[:1, :1], dtype=torch.float32), **shape)  # (1, taps, windows)
    few = windows._replace(padding_h=padding[0], padding_w=padding[1], height=3, width=3)

    def right(features: Tensor, gain: Tensor, **given: Tensor) -> Tensor:
        cut = F.unfold(features, **shape).unflatten(1, (x.shape[1], -1))  # (B, C, taps, windows)
        sets = cut.permute(0, 3, 1, 2).flatten(0, 1)
        mask = (inside[0].T > 0).repeat(2, 1)
        pooled = registered('torch').pool(rot_problem(sets, mask=mask, view=view), StepWeights(**given), solver)
        return (pooled * gain).view(2, 9, -1).mT.reshape(2, -1, 3, 3)

    def kernels(features: Tensor, gain: Tensor, **given: Tensor) -> Tensor:
        pool_windows = registered('triton').pool_windows
        assert pool_windows is not None
        pooled = pool_windows(features, StepWeights(**given), solver, few, view, gain)
        assert pooled is not None
        return pooled

    return _both(kernels, right, {'features': x} | _random_weights(weights, solver))


def softplus_results(
    softplus: Callable[..., tuple[Tensor, ...]], betas: Sequence[Tensor], starts: Sequence[Tensor]
) -> tuple[Results, Results]:
    """Of weights of the same shapes."""
    leaves = {f'beta_{i}': _random(*beta.shape, like=beta) for i, beta in enumerate(betas)}

    def joined(function: Callable[..., tuple[Tensor, ...]], **given: Tensor) -> Tensor:
        dtype = torch.promote_types(given['beta_0'].dtype, torch.float32)
        weights = function(list(given.values()), [start.to(dtype) for start in starts])
        return torch.cat([weight.flatten() for weight in weights])

    return _both(partial(joined, softplus), partial(joined, scaled_softplus), leaves)
