"""Pools that were found, pools that replaced them, and the module around a pooling of the user's own."""

from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from rotp_vision.layers import ROTPool, SimplePool
from rotp_vision.layers.base import InputFormat, MapShape

# The name of the pool that is added to a module whose method pools by itself.
NEW_POOL = 'rot_pool'

Kind = Literal['global', 'local', 'tokens']
Layout = Literal['NCHW', 'NHWC', 'NLC', 'NCL', '']
Reduction = Literal['mean', 'max', 'other']


class Host(NamedTuple):
    """A method that pools by itself, and how it calls a pool module instead."""

    method: str
    layout: str  # of the map or tokens that it pools
    prefix: int  # number of tokens that it drops first
    before: str  # the child before which the pool is placed
    family: bool = False  # whether `classes.FAMILIES` has the changed method


class FoundPool(NamedTuple):
    """A pool of a model.

    If it is `replaceable` and has a `reason`, it is replaced only if `where` names its path.

    Example:
        >>> import timm, rotp_vision
        >>> pool = rotp_vision.find_pools(timm.create_model('test_resnet'))[-1]
        >>> pool.kind, pool.layout, pool.replaceable
        ('global', 'NCHW', True)
    """

    path: str  # where the pool is, or where a new one would be if a method pools by itself
    kind: Kind  # 'global': a map to one vector; 'local': a map to a smaller map; 'tokens': tokens to one vector
    old: str  # a readable form of what pools there now
    input_shape: tuple[int, ...]
    layout: Layout
    output: Literal['flatten', 'keep dims']
    replaceable: bool
    reason: str = ''  # why it cannot be replaced, or is replaced only if it is named
    reduction: Reduction = 'other'
    host: Host | None = None  # the method that pools by itself


def map_format(layout: Layout) -> InputFormat:
    """The format of the maps that a pool gets in a network of this layout."""
    return layout if layout in ('NHWC', 'NCL') else 'NCHW'


class UserPool(MapShape, nn.Module):
    """Adapts a pooling module of the user's own to the axes that a network expects.

    Args:
        pool: takes maps (B, C, H, W), or tokens (B, N, C), and returns (B, C) or (B, C, 1, 1).
        layout: of the network's features: 'NCHW' or 'NHWC' maps, or 'NLC' or 'NCL' tokens.
        flatten: whether the network expects (B, C) instead of the axes of its map.
    """

    pool_type = 'user'

    def __init__(self, pool: nn.Module, layout: Layout, flatten: bool):
        super().__init__()
        self.pool = pool
        self.set_shape(flatten or layout == 'NLC', map_format(layout))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The pooled map or tokens; a `mask` (B, N) is passed to the pool if there is one."""
        if self.input_fmt == 'NHWC':
            x = x.permute(0, 3, 1, 2)
        elif self.input_fmt == 'NCL':
            x = x.transpose(1, 2)
        return self.shaped((self.pool(x) if mask is None else self.pool(x, mask)).flatten(1))

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # Weights of the native network have no pool: this one keeps its own.
        if not any(key.startswith(prefix) for key in state_dict):
            state_dict.update({prefix + key: value for key, value in self.state_dict().items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


# What `convert` puts into a network; the first two have options, from which they can be made again.
NewPool = ROTPool | SimplePool | UserPool


class Replaced(NamedTuple):
    """What a new pool has replaced. The pool holds it outside its children, so that it is not in the state dict."""

    pool: FoundPool
    native: nn.Module | None  # None where a method pooled by itself


def replaced_by(pool: nn.Module) -> Replaced | None:
    """What `convert` replaced by this pool; None for a pool that it did not put there."""
    return vars(pool).get('replaced')


def rot_pools(model: nn.Module) -> dict[str, ROTPool]:
    """The ROT pools of a model by path, in the order of its modules.

    Example:
        >>> import timm, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> list(rotp_vision.rot_pools(model))
        ['global_pool']
    """
    return {path: pool for path, pool in _outermost(model, ROTPool).items() if isinstance(pool, ROTPool)}


def new_pools(model: nn.Module) -> dict[str, NewPool]:
    """ROT pools, simple pools and pools of the user's own that `convert` has placed, by path."""
    return _outermost(model, NewPool)


def described_pools(model: nn.Module) -> dict[str, ROTPool | SimplePool]:
    """The new pools that have options, by path: all but those of the user's own."""
    return {path: pool for path, pool in new_pools(model).items() if not isinstance(pool, UserPool)}


def converted_pools(model: nn.Module) -> dict[str, NewPool]:
    """The pools that replaced others, by path."""
    return {path: pool for path, pool in new_pools(model).items() if replaced_by(pool) is not None}


def is_local(pool: nn.Module) -> bool:
    """Whether a pool has replaced a local one."""
    replaced = replaced_by(pool)
    return replaced is not None and replaced.pool.kind == 'local'


def _outermost(model: nn.Module, kind: Any) -> dict[str, Any]:
    pools: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, kind) and not any(path.startswith(f'{outer}.') for outer in pools):
            pools[path] = module
    return pools
