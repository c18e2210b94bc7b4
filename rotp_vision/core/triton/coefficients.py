"""What the kernels need of the weights, in one launch each way: softplus of the raw ones, and coefficients of those.

Coefficients are one vector: kind by kind (4, T), and at its end the gain. Of the published Bregman ADMM the kinds are

    β_k = 1/ρ_k + κ_{k-1} β_{k-1}     κ_k = ρ_k / (α1_k + ρ_k), or 1 if quadratic     ρ_k     α1_k / ρ_k if quadratic

and of Sinkhorn, where without structural and proximal terms only the last module counts, T is 1 and they are

    s = 1 / α1      lift = 1 / (α1 + α2)      rate_a = α2 / (α1 + α2)      rate_b = α3 / (α1 + α3)
"""

# Kernels are not Python to a type checker.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotp_vision.core.operator import Pair, define
from rotp_vision.core.triton import tiles
from rotp_vision.core.weights import StepWeights

BLOCK = 256
LOG_2 = tl.constexpr(math.log(2.0))
OPTIONS = {'num_warps': 1, 'enable_fp_fusion': True}


@triton.jit
def softplus_forward(betas, starts, weights, sizes, BLOCK: tl.constexpr):
    """weights = start · softplus(β) / softplus(0), tensor by tensor, in one program."""
    for i in tl.static_range(len(betas)):
        for first in range(0, sizes[i], BLOCK):
            j = first + tl.arange(0, BLOCK)
            beta = tl.load(betas[i] + j, mask=j < sizes[i], other=0.0).to(tl.float32)
            start = tl.load(starts[i] + j, mask=j < sizes[i], other=0.0).to(tl.float32)
            # log(1 + small) without the loss of digits in 1 + small
            small = tl.exp(-tl.abs(beta))
            more = 1.0 + small
            tail = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
            tl.store(weights[i] + j, start * ((tl.maximum(beta, 0.0) + tail) / LOG_2), mask=j < sizes[i])


@triton.jit
def softplus_backward(grads, betas, starts, d_betas, sizes, BLOCK: tl.constexpr):
    for i in tl.static_range(len(betas)):
        for first in range(0, sizes[i], BLOCK):
            j = first + tl.arange(0, BLOCK)
            beta = tl.load(betas[i] + j, mask=j < sizes[i], other=0.0).to(tl.float32)
            start = tl.load(starts[i] + j, mask=j < sizes[i], other=0.0).to(tl.float32)
            grad = tl.load(grads[i] + j, mask=j < sizes[i], other=0.0).to(tl.float32)
            d_beta = grad * (start / LOG_2) / (1.0 + tl.exp(-beta))
            tl.store(d_betas[i] + j, d_beta.to(d_betas[i].dtype.element_ty), mask=j < sizes[i])


@triton.jit
def _kappa(alpha, rho, QUADRATIC: tl.constexpr):
    if QUADRATIC:
        return rho * 0.0 + 1.0
    else:
        return rho / (alpha + rho)


@triton.jit(do_not_specialize=['num_modules'])
def badmm_coefficients_forward(smoothness, steps, gain, out, num_modules, strides, QUADRATIC: tl.constexpr):
    kappa = 0.0
    beta = 0.0
    for k in range(num_modules):
        alpha = tl.load(smoothness + k * strides[0]).to(tl.float32)
        rho = tl.load(steps + k * strides[1]).to(tl.float32)
        beta = 1.0 / rho + kappa * beta
        kappa = _kappa(alpha, rho, QUADRATIC)
        rough = 0.0 * rho
        if QUADRATIC:
            rough = alpha / rho
        tl.store(out + k, beta)
        tl.store(out + num_modules + k, kappa)
        tl.store(out + 2 * num_modules + k, rho)
        tl.store(out + 3 * num_modules + k, rough)
    tl.store(out + 4 * num_modules, tl.load(gain).to(tl.float32))


@triton.jit(do_not_specialize=['num_modules'])
def badmm_coefficients_backward(
    d_out, smoothness, steps, d_smoothness, d_step, d_gain, num_modules, strides, QUADRATIC: tl.constexpr
):
    d_beta = 0.0
    for i in range(num_modules):
        k = num_modules - 1 - i
        beta = 0.0
        kappa = 0.0
        for j in range(k + 1):
            alpha = tl.load(smoothness + j * strides[0]).to(tl.float32)
            rho = tl.load(steps + j * strides[1]).to(tl.float32)
            beta = 1.0 / rho + kappa * beta
            kappa = _kappa(alpha, rho, QUADRATIC)
        alpha = tl.load(smoothness + k * strides[0]).to(tl.float32)
        rho = tl.load(steps + k * strides[1]).to(tl.float32)
        d_kappa = tl.load(d_out + num_modules + k) + beta * d_beta
        d_beta = tl.load(d_out + k) + kappa * d_beta
        d_rho = tl.load(d_out + 2 * num_modules + k) - d_beta / rho / rho
        if QUADRATIC:
            d_rough = tl.load(d_out + 3 * num_modules + k)
            d_alpha = d_rough / rho
            d_rho -= d_rough / rho * (alpha / rho)
        else:
            d_alpha = -d_kappa * kappa / (alpha + rho)
            d_rho += d_kappa / (alpha + rho) * (alpha / (alpha + rho))
        tl.store(d_smoothness + k, d_alpha)
        tl.store(d_step + k, d_rho)
    tl.store(d_gain, tl.load(d_out + 4 * num_modules))


@triton.jit
def sinkhorn_coefficients_forward(smoothness, feature_penalty, sample_penalty, gain, out):
    alpha1, alpha2 = tl.load(smoothness).to(tl.float32), tl.load(feature_penalty).to(tl.float32)
    alpha3 = tl.load(sample_penalty).to(tl.float32)
    tl.store(out, 1.0 / alpha1)
    tl.store(out + 1, 1.0 / (alpha1 + alpha2))
    tl.store(out + 2, alpha2 / (alpha1 + alpha2))
    tl.store(out + 3, alpha3 / (alpha1 + alpha3))
    tl.store(out + 4, tl.load(gain).to(tl.float32))


@triton.jit(do_not_specialize=['last'])
def sinkhorn_coefficients_backward(
    d_out, smoothness, feature_penalty, sample_penalty, d_smoothness, d_feature_penalty, d_sample_penalty, d_gain, last
):
    """The gradients are zero but for the `last` module."""
    alpha1, alpha2 = tl.load(smoothness).to(tl.float32), tl.load(feature_penalty).to(tl.float32)
    alpha3 = tl.load(sample_penalty).to(tl.float32)
    both, other = alpha1 + alpha2, alpha1 + alpha3
    d_s, d_lift, d_rate_a, d_rate_b = tl.load(d_out), tl.load(d_out + 1), tl.load(d_out + 2), tl.load(d_out + 3)
    for k in range(last):
        tl.store(d_smoothness + k, 0.0)
        tl.store(d_feature_penalty + k, 0.0)
        tl.store(d_sample_penalty + k, 0.0)
    d_alpha1 = -d_s / alpha1 / alpha1 - d_lift / both / both - d_rate_a / both * (alpha2 / both)
    tl.store(d_smoothness + last, d_alpha1 - d_rate_b / other * (alpha3 / other))
    tl.store(d_feature_penalty + last, d_rate_a / both * (alpha1 / both) - d_lift / both / both)
    tl.store(d_sample_penalty + last, d_rate_b / other * (alpha1 / other))
    tl.store(d_gain, tl.load(d_out + 4))


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous memory for gradients, in float32."""
    return tuple(tensor.new_empty(tensor.shape, dtype=torch.float32) for tensor in tensors)


def _vector(like: Tensor, num_modules: int) -> Tensor:
    return like.new_empty(tiles.KINDS * num_modules + 1, dtype=torch.float32)


def _badmm(smoothness, step, gain, quadratic) -> Tensor:
    out = _vector(step, len(step))
    with tiles.on_device(step):
        tiles.launch(
            badmm_coefficients_forward, (1,), smoothness, step, gain, out, len(step),
            (smoothness.stride(0), step.stride(0)), QUADRATIC=quadratic, **OPTIONS,
        )  # fmt: skip
    return out


def _badmm_backward(grad, smoothness, step, gain, needs, quadratic) -> tuple[Tensor, ...]:
    gradients = _like(smoothness, step, gain)
    with tiles.on_device(step):
        tiles.launch(
            badmm_coefficients_backward, (1,), grad, smoothness, step, *gradients, len(step),
            (smoothness.stride(0), step.stride(0)), QUADRATIC=quadratic, **OPTIONS,
        )  # fmt: skip
    return gradients


def _sinkhorn(smoothness, feature_penalty, sample_penalty, gain) -> Tensor:
    out = _vector(smoothness, 1)
    with tiles.on_device(smoothness):
        last = (weight[-1:] for weight in (smoothness, feature_penalty, sample_penalty))
        tiles.launch(sinkhorn_coefficients_forward, (1,), *last, gain, out, **OPTIONS)
    return out


def _sinkhorn_backward(grad, smoothness, feature_penalty, sample_penalty, gain, needs) -> tuple[Tensor, ...]:
    gradients = _like(smoothness, feature_penalty, sample_penalty, gain)
    with tiles.on_device(smoothness):
        last = (weight[-1:] for weight in (smoothness, feature_penalty, sample_penalty))
        tiles.launch(sinkhorn_coefficients_backward, (1,), grad, *last, *gradients, len(smoothness) - 1, **OPTIONS)
    return gradients


define(
    'triton_badmm_coefficients',
    Pair(
        _badmm,
        _badmm_backward,
        lambda smoothness, step, gain, quadratic: _vector(step, step.shape[0]),
        lambda grad, smoothness, step, gain, needs, quadratic: _like(smoothness, step, gain),
    ),
    '(Tensor smoothness, Tensor step, Tensor gain, bool quadratic) -> Tensor',
    '(Tensor grad, Tensor smoothness, Tensor step, Tensor gain, bool[] needs, bool quadratic) '
    '-> (Tensor, Tensor, Tensor)',
    num_inputs=3,
)
define(
    'triton_sinkhorn_coefficients',
    Pair(
        _sinkhorn,
        _sinkhorn_backward,
        lambda smoothness, *others: _vector(smoothness, 1),
        lambda grad, *inputs: _like(*inputs[:4]),
    ),
    '(Tensor smoothness, Tensor feature_penalty, Tensor sample_penalty, Tensor gain) -> Tensor',
    '(Tensor grad, Tensor smoothness, Tensor feature_penalty, Tensor sample_penalty, Tensor gain, bool[] needs) '
    '-> (Tensor, Tensor, Tensor, Tensor)',
    num_inputs=4,
)


def badmm_coefficients(weights: StepWeights, gain: Tensor | None, quadratic: bool) -> Tensor:
    """(4 T + 1,) coefficients of the published Bregman ADMM."""
    assert weights.step is not None
    smoothness, step = weights.smoothness, weights.step
    return torch.ops.rotp_vision.triton_badmm_coefficients(smoothness, step, _gain(gain, step), quadratic)


def sinkhorn_coefficients(weights: StepWeights, gain: Tensor | None) -> Tensor:
    """(5,) coefficients of Sinkhorn scaling."""
    assert weights.feature_penalty is not None
    assert weights.sample_penalty is not None
    given = weights.smoothness, weights.feature_penalty, weights.sample_penalty
    return torch.ops.rotp_vision.triton_sinkhorn_coefficients(*given, _gain(gain, weights.smoothness))


def _gain(gain: Tensor | None, like: Tensor) -> Tensor:
    return like.new_ones((), dtype=torch.float32) if gain is None else gain


class _Softplus(torch.autograd.Function):
    """`scaled_softplus` of all tensors, in one launch each way."""

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        betas, starts = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        weights = _like(*starts)
        with tiles.on_device(betas[0]):
            tiles.launch(softplus_forward, (1,), betas, starts, weights, _sizes(betas), BLOCK=BLOCK, **OPTIONS)
        return weights

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        betas, starts = tensors[: len(grads)], tensors[len(grads) :]
        gradients = tuple(torch.empty_like(beta) for beta in betas)
        given = tuple(grad.contiguous() for grad in grads)
        with tiles.on_device(betas[0]):
            tiles.launch(
                softplus_backward, (1,), given, betas, starts, gradients, _sizes(betas), BLOCK=BLOCK, **OPTIONS
            )
        return *gradients, *[None] * len(betas)


def _sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def softplus(betas: Sequence[Tensor], starts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As `scaled_softplus`; `starts` get no gradients."""
    return _Softplus.apply(*betas, *starts)  # pyright: ignore[reportReturnType]
