"""Which backend to choose on this machine: agreement of the Triton kernels with the torch operators, and times.

    rotp-vision bench --device cuda:0

prints a Markdown table with agreement, times, launches and the share of a ResNet-50 step, and the same as JSON, which
we ask you to post. On CPU there is only the torch backend, and nothing to choose.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from rotp_vision.core import Backend, backend_lacks
from rotp_vision.core.solver import OVERRIDE
from rotp_vision.layers import GlobalROTPool2d, LocalROTPool2d, pool_options

SOLVERS = ('sinkhorn', 'badmm-e', 'badmm-q')  # those that have kernels; others may be registered
SHAPES = ((512, 7, 7), (2048, 7, 7), (768, 14, 14))
LOCAL_SHAPES = ((64, 112, 112),)  # of maps that are pooled by WINDOWS
WINDOWS: dict[str, Any] = {'kernel_size': 3, 'stride': 2, 'padding': 1}
DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
# How far the Triton kernels may be from float64, relative to the largest entry; besides that the rounding of the dtype,
# and a few times what the torch backend is off itself (gradients of weights are sums in which much cancels).
AGREEMENT, OWN_ERRORS = 1e-4, 4.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--batch-size', type=int, default=64)
    parser.add_argument('--dtype', choices=DTYPES, default='float32', help='of the feature maps')
    parser.add_argument('--channels-last', action='store_true', help='memory format of the feature maps')
    parser.add_argument('--repeats', type=int, default=30)


def run(args: argparse.Namespace) -> None:
    """Check, time and print. A backend that disagrees is a RuntimeError, after the table."""
    device = torch.device(args.device)
    if args.repeats < 1 or args.batch_size < 1:
        raise ValueError(f'repeats and batch-size must be positive, got {args.repeats} and {args.batch_size}')
    if device.type == 'cuda' and (device.index or 0) >= torch.cuda.device_count():
        seen = f'torch sees {torch.cuda.device_count()} GPU(s)' if torch.cuda.is_available() else 'torch sees no GPU'
        raise ValueError(f'device must be one that torch finds, got {args.device!r}: {seen}')
    if os.environ.get(OVERRIDE):
        raise ValueError(f'{OVERRIDE} overrides the backends that are to be compared: unset it')
    # Events and kernels are those of the current device.
    with torch.cuda.device(device) if device.type == 'cuda' else nullcontext():
        _run(args, device)


def _run(args: argparse.Namespace, device: torch.device) -> None:
    missing = backend_lacks('triton', torch.empty(0, device=device))
    print(_machine(device))
    layout = ', channels_last' if args.channels_last else ''
    print(f'Forward and backward of (B = {args.batch_size}, C, H, W) maps in {args.dtype}{layout}, medians in ms.\n')
    step = _network_step(device, args) if device.type == 'cuda' else None
    if step is not None:
        print(f'A step of ResNet-50 at 224 pixels takes {step:.1f} ms.\n')
    print(
        '| map | solver | average pooling | torch | triton | torch / triton | off float64: torch | triton '
        '| launches: torch | triton | triton, % of a step |'
    )
    print('| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |')
    speedups, wrong, failed, rows = [], [], [], []
    for shape, local in [(shape, False) for shape in SHAPES] + [(shape, True) for shape in LOCAL_SHAPES]:
        x = torch.randn(args.batch_size, *shape, device=device, dtype=DTYPES[args.dtype]).relu_()
        if args.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        average = _milliseconds(nn.AvgPool2d(**WINDOWS) if local else nn.AdaptiveAvgPool2d(1), x, args.repeats)
        windows = ', 3×3 windows, stride 2' if local else ''
        for solver in SOLVERS:
            label = f'{"×".join(map(str, shape))}{windows} | {solver} | {average:.3f}'
            plain = _milliseconds(_pool(solver, 'torch', local).to(device), x, args.repeats)
            if missing:
                print(f'| {label} | {plain:.3f} | – | – | – | – | – | – | – |')
                rows.append({'map': shape, 'local': local, 'solver': solver, 'average_ms': average, 'torch_ms': plain})
                continue
            try:
                fast = _milliseconds(_pool(solver, 'triton', local).to(device), x, args.repeats)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of a compiler, of a driver: other rows, and what to post, are worth having
                print(f'| {label} | {plain:.3f} | fails | – | – | – | – | – | – |')
                rows.append({'map': shape, 'local': local, 'solver': solver, 'average_ms': average, 'torch_ms': plain})
                rows[-1]['triton_fails'] = f'{type(error).__name__}: {str(error)[:500]}'
                failed.append(label)
                continue
            right = _results(_pool(solver, 'torch', local).to(device).double(), x.detach().double().requires_grad_())
            own, error = (
                _off(_results(_pool(solver, name, local).to(device), x), right) for name in ('torch', 'triton')
            )
            launches = [_launches(_pool(solver, name, local).to(device), x) for name in ('torch', 'triton')]
            share = None if step is None else 100 * fast / step
            print(
                f'| {label} | {plain:.3f} | {fast:.3f} | {plain / fast:.2f} | {own:.1e} | {error:.1e} '
                f'| {_shown(launches[0])} | {_shown(launches[1])} | {_shown(share)} |'
            )
            rows.append(
                {'map': shape, 'local': local, 'solver': solver, 'average_ms': average, 'torch_ms': plain}
                | {'triton_ms': fast, 'torch_error': own, 'triton_error': error, 'step_share_percent': share}
                | {'torch_launches': launches[0], 'triton_launches': launches[1]}
            )
            speedups.append(plain / fast)
            if not error <= AGREEMENT + torch.finfo(x.dtype).eps + OWN_ERRORS * own:  # so is NaN
                wrong.append(label)
    print()
    summary = {'machine': _machine(device), 'batch_size': args.batch_size, 'dtype': args.dtype, 'step_ms': step}
    print('Please post this line:')
    print(json.dumps(summary | {'channels_last': args.channels_last, 'rows': rows}))
    print()
    if missing:
        print(f"Backend 'triton' {missing}: here there is the torch backend only.")
    elif wrong or failed:
        print("Choose backend='torch': the Triton kernels fail or give other numbers here. Please report this table.")
        count = len(speedups) + len(failed)
        raise RuntimeError(
            f'{len(wrong)} of {count} rows disagree and {len(failed)} fail: ' + '; '.join(wrong + failed)
        )
    else:
        choice = 'triton' if statistics.geometric_mean(speedups) > 1 else 'torch'
        slow = sum(speedup < 1 for speedup in speedups)
        print(f"Choose backend='{choice}': triton agrees everywhere, and is slower in {slow} of {len(speedups)} rows.")


def _shown(value: float | None) -> str:
    return '–' if value is None else f'{value:.3g}'


def _launches(pool: nn.Module, x: Tensor) -> int | None:
    """Kernels of forward and backward, as the profiler of the device counts them; None on CPU."""
    if not x.is_cuda:
        return None
    from torch.profiler import DeviceType, ProfilerActivity, profile

    grad = torch.ones_like(pool(x))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.autograd.grad(pool(x), [x, *pool.parameters()], grad, allow_unused=True)
        torch.cuda.synchronize(x.device)
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events() or ())


def _network_step(device: torch.device, args: argparse.Namespace) -> float:
    """Median ms of forward and backward of ResNet-50 with average pooling; half precision is under autocast."""
    import timm

    model = timm.create_model('resnet50').to(device)
    images = torch.randn(args.batch_size, 3, 224, 224, device=device)
    if args.channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    dtype = DTYPES[args.dtype]

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(images).square().mean()
        loss.backward()
        model.zero_grad()

    for _ in range(3):
        step()
    return statistics.median(_time_on_gpu(step) for _ in range(args.repeats))


def _pool(solver: str, backend: Backend, local: bool) -> nn.Module:
    options = pool_options(solver, backend=backend)
    return LocalROTPool2d(options, **WINDOWS) if local else GlobalROTPool2d(options)


def _results(pool: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and every gradient, by name."""
    out = pool(x)
    towards = torch.linspace(-1, 2, out.numel(), device=x.device).view_as(out).to(out.dtype)
    inputs = {'x': x} | dict(pool.named_parameters())
    gradients = torch.autograd.grad(out, list(inputs.values()), towards, allow_unused=True, materialize_grads=True)
    return {'output': out.detach()} | dict(zip(inputs, gradients, strict=True))


def _off(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any, relative to the largest entry of what it belongs to; NaN if there is one."""
    errors = [
        (got[name].double() - value).abs().max() / value.abs().max().clamp_min(1e-6) for name, value in expected.items()
    ]
    return torch.stack(errors).max().item()


def _milliseconds(pool: nn.Module, x: Tensor, repeats: int) -> float:
    """Median time of forward and backward; by CUDA events on a GPU, which run with its own clock."""
    out = pool(x)
    grad = torch.ones_like(out)
    inputs = [x, *pool.parameters()]

    def step() -> None:
        torch.autograd.grad(pool(x), inputs, grad, allow_unused=True)

    for _ in range(3):  # the first calls compile and allocate
        step()
    clock = _time_on_gpu if x.is_cuda else _time_on_cpu
    return statistics.median(clock(step) for _ in range(repeats))


def _time_on_gpu(step: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _time_on_cpu(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - start)


def _machine(device: torch.device) -> str:
    try:
        triton = version('triton')
    except PackageNotFoundError:
        triton = 'none'
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else f'{device.type}'
    return f'{name}; torch {torch.__version__}, triton {triton}.'
