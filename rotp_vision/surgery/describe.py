"""What the new pools of a model are, what they replaced, and whether they run."""

import contextlib
from typing import Any, NamedTuple

from torch import Tensor, nn

from rotp_vision.layers import ROTPool, SimplePool
from rotp_vision.surgery.find import example_inputs
from rotp_vision.surgery.pools import NewPool, new_pools, replaced_by
from rotp_vision.surgery.trace import undisturbed
from rotp_vision.tables import text_table


class PoolRow(NamedTuple):
    """A new pool of a model."""

    path: str
    native: str  # what it replaced, or what a registered model would have without it
    new: str
    parameters: int
    trainable: int  # of the parameters
    folded: bool  # whether `fold_gain` moved its gain into the next layer
    input_shape: tuple[int, ...]  # without the batch; () if unknown
    called: int | None  # how often it ran on the example input; None without one


class PoolTable(tuple[PoolRow, ...]):
    """The rows of `describe`, printed as a table."""

    def __str__(self) -> str:
        head = ['path', 'native', 'new', 'parameters', 'trainable', 'folded', 'input shape', 'called']
        rows = [
            [
                row.path,
                row.native,
                row.new,
                f'{row.parameters:,}',
                f'{row.trainable:,}',
                'yes' if row.folded else '',
                ' × '.join(map(str, row.input_shape)),
                '' if row.called is None else str(row.called),
            ]
            for row in self
        ]
        shown = len(head) - all(row.called is None for row in self)
        return text_table([head[:shown], *(row[:shown] for row in rows)])


def describe(model: nn.Module, example_input: Tensor | tuple | None = None) -> PoolTable:
    """The new pools of a model: what they replaced, how many parameters train, and whether the model calls them.

    Args:
        model: converted, or a registered one.
        example_input: an input of the model, or a tuple of its inputs, to run it on: the last column then says how
            often each pool is called. A pool that is never called, as where a wrapper pools by itself, has a 0 there.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> (row,) = rotp_vision.describe(model, torch.rand(2, 3, 64, 64))
        >>> row.path, row.new, row.input_shape, row.called
        ('global_pool', 'GlobalROTPool2d(sinkhorn, rms)', (96, 2, 2), 1)
    """
    pools = new_pools(model)
    replaced = {path: replaced_by(pool) for path, pool in pools.items()}
    shapes = {path: one.pool.input_shape[1:] for path, one in replaced.items() if one is not None}
    calls = None
    if example_input is not None:
        calls = _calls(model, pools, example_inputs(model, example_input))
    elif len(shapes) < len(pools):  # a registered model, whose pools no conversion has seen running
        with contextlib.suppress(Exception):  # it may need another input
            shapes = {path: ran[-1] for path, ran in _calls(model, pools, example_inputs(model)).items() if ran}
    rows = []
    for path, pool in pools.items():
        known, ran = replaced[path], [] if calls is None else calls[path]
        sizes = [(p.numel(), p.requires_grad) for p in pool.parameters()]
        rows.append(
            PoolRow(
                path,
                getattr(pool, 'native', '') if known is None else known.pool.old,
                _named(pool),
                sum(size for size, _ in sizes),
                sum(size for size, trains in sizes if trains),
                isinstance(pool, ROTPool) and pool.gain_folded,
                ran[-1] if ran else tuple(shapes.get(path, ())),
                None if calls is None else len(ran),
            )
        )
    return PoolTable(rows)


def _calls(model: nn.Module, pools: dict[str, NewPool], inputs: tuple) -> dict[str, list[tuple[int, ...]]]:
    """The shapes, without the batch, of the inputs of each pool in a forward pass."""
    seen: dict[str, list[tuple[int, ...]]] = {path: [] for path in pools}
    with undisturbed(model):
        for path, pool in pools.items():

            def hook(_: Any, args: Any, path: str = path) -> None:
                seen[path].append(tuple(args[0].shape[1:]))

            pool.register_forward_pre_hook(hook)
        model(*inputs)
    return seen


def _named(pool: NewPool) -> str:
    if isinstance(pool, ROTPool):
        return f'{type(pool).__name__}({pool.options.solver}, {pool.options.feature_scale})'
    if isinstance(pool, SimplePool):
        return f'{type(pool).__name__}({", ".join(f"{k}={v}" for k, v in pool.options.to_dict().items())})'
    return type(pool.pool).__name__
