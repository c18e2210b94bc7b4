"""ResNets with ROT pooling, registered in timm: resnet{18,34,50,101,152}_rotp{,_e,_q,_local}."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._registry import get_arch_pretrained_cfgs
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from rotp_vision.layers import (
    AnyPoolOptions,
    GlobalROTPool2d,
    LocalROTPool2d,
    PoolOptions,
    ROTPool,
    SimplePool,
    SimplePoolOptions,
    any_pool_options,
)

__all__ = ['ROTPResNet']

Options = AnyPoolOptions | Mapping[str, Any] | str | None


class ROTPResNet(ResNet):
    """timm's ResNet with ROT pooling before the classifier, and optionally in the stem.

    Args:
        rotp: options of the global pooling: `PoolOptions`, a mapping of its fields, or a name, see `pool_options`; or
            another pooling by its name, such as 'gem' (`SimplePoolOptions`). By default it starts as for training, and
            next to the mean once pretrained weights are loaded.
        rotp_stem: options of the stem's pooling; None keeps its max pooling.
        global_pool: 'rotp', or one of timm's own, with which the network is a plain ResNet.
        args, kwargs: as timm's ResNet takes them.

    Example:
        >>> import timm, rotp_vision
        >>> model = timm.create_model('resnet18_rotp', rotp={'feature_scale': 'log'})
        >>> type(model).__name__, model.global_pool.options.feature_scale
        ('ROTPResNet', 'log')
    """

    # TorchScript, which timm's suite tries, would compile it, or mistake the recorded arguments for an attribute.
    __jit_unused_properties__ = ['_model_args']  # noqa: RUF012 - it wants lists
    __jit_ignored_attributes__ = ['_model_args']  # noqa: RUF012

    def __init__(
        self,
        *args,
        rotp: Options = None,
        rotp_stem: PoolOptions | Mapping[str, Any] | str | None = None,
        global_pool: str = 'rotp',
        **kwargs,
    ):
        options: AnyPoolOptions = any_pool_options(rotp)
        super().__init__(*args, global_pool='avg' if global_pool == 'rotp' else global_pool, **kwargs)
        self.rotp: AnyPoolOptions = options
        if global_pool == 'rotp':
            self._install_pool()
        if rotp_stem is not None:
            if type(self.maxpool) is not nn.MaxPool2d:
                raise ValueError(
                    f'rotp_stem replaces a max pooling, but the stem of this network has {type(self.maxpool).__name__}'
                )
            stem = LocalROTPool2d(
                self.maxpool.kernel_size,
                self.maxpool.stride,
                self.maxpool.padding,
                options=rotp_stem,
                num_features=int(self.feature_info[0]['num_chs']),
            )
            self.maxpool = self._in_place_of(self.maxpool, stem)

    def _install_pool(self):
        options = self.rotp
        simple = isinstance(options, SimplePoolOptions)
        pool = options.make() if simple else GlobalROTPool2d(options, int(self.num_features))
        self.global_pool = self._in_place_of(self.global_pool, pool)

    def _in_place_of(self, native: nn.Module, pool: nn.Module) -> nn.Module:
        vars(pool)['native'] = ' '.join(repr(native).split())  # for `describe`
        like = next(self.parameters())
        return pool.to(like.device, like.dtype).train(self.training)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Reset the classifier, keeping the trained pooling.

        Args:
            num_classes: classes of the new classifier, 0 for none.
            global_pool: None keeps the pooling; so does 'rotp' if it is a ROT pooling. If there is no pooling, both
                make one. One of timm's own ('', 'avg', …) replaces it.
        """
        pool: Any = self.global_pool
        super().reset_classifier(num_classes, 'avg' if global_pool in (None, 'rotp') else global_pool)
        if isinstance(pool, GlobalROTPool2d | SimplePool) and global_pool in (None, 'rotp'):
            self.global_pool = pool
        elif global_pool == 'rotp' or (global_pool is None and pool.is_identity()):
            self._install_pool()

    @property
    def _model_args(self) -> dict[str, Any]:
        """The arguments with which timm saves the model: those it recorded, and the options as they are now."""
        return dict(vars(self).get('_model_args', {})) | self.pool_arguments()

    @_model_args.setter
    def _model_args(self, arguments: Mapping[str, Any]):
        vars(self)['_model_args'] = dict(arguments)

    def pool_arguments(self) -> dict[str, Any]:
        """All options of the pools as arguments; a variant would replace missing ones by its own defaults."""
        pools = {'rotp': self.global_pool, 'rotp_stem': self.maxpool}
        return {name: asdict(pool.options) for name, pool in pools.items() if isinstance(pool, ROTPool | SimplePool)}


_LAYERS = {
    'resnet18': (BasicBlock, (2, 2, 2, 2)),
    'resnet34': (BasicBlock, (3, 4, 6, 3)),
    'resnet50': (Bottleneck, (3, 4, 6, 3)),
    'resnet101': (Bottleneck, (3, 4, 23, 3)),
    'resnet152': (Bottleneck, (3, 8, 36, 3)),
}
# With pretrained weights each pool starts close to what it replaces.
_VARIANTS: dict[str, dict[str, PoolOptions]] = {
    'rotp': {'rotp': PoolOptions()},
    'rotp_e': {'rotp': PoolOptions('badmm-e')},
    'rotp_q': {'rotp': PoolOptions('badmm-q')},
    'rotp_local': {'rotp': PoolOptions(), 'rotp_stem': PoolOptions(start='max')},
}


def _native_cfgs(native: str, name: str) -> dict[str, Any]:
    """The pretrained configurations of the native network under our name, so that its weights can be loaded."""
    cfgs = get_arch_pretrained_cfgs(native)
    default = next(iter(cfgs))
    return {
        f'{name}.{full_name.split(".", 1)[1]}{"*" if full_name == default else ""}': cfg
        for full_name, cfg in cfgs.items()
    }


default_cfgs = generate_default_cfgs(
    {
        key: cfg
        for native in _LAYERS
        for variant in _VARIANTS
        for key, cfg in _native_cfgs(native, f'{native}_{variant}').items()
    }
)


def _adapt(options: PoolOptions, given: Options) -> Options:
    """The given options of a variant; mappings, 'train' and 'paper' keep the solver that it is named after."""
    if given in ('train', 'paper'):
        given = {'preset': given}
    if not isinstance(given, Mapping) or 'pool' in given or given.get('preset') == 'embedding':
        return given
    kept = {'solver': options.solver} if options.solver != PoolOptions.solver else {}
    return kept | ({} if 'preset' in given else {'start': options.start}) | dict(given)


def _register(native: str, variant: str):
    name = f'{native}_{variant}'
    block, layers = _LAYERS[native]
    defaults = _VARIANTS[variant]

    def entrypoint(pretrained: bool = False, **kwargs) -> ROTPResNet:
        kwargs |= {key: _adapt(defaults[key], kwargs[key]) for key in defaults.keys() & kwargs.keys()}
        model_args: dict[str, Any] = {'block': block, 'layers': layers} | defaults | kwargs
        model: Any = build_model_with_cfg(ROTPResNet, name, pretrained, **model_args)
        # Weights passed in the configuration would stay in it, and then it could not be saved.
        model.pretrained_cfg.pop('state_dict', None)
        return model

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = f'{native} with ROT pooling: {defaults}.'
    globals()[name] = register_model(entrypoint)


for _native in _LAYERS:
    for _variant in _VARIANTS:
        _register(_native, _variant)
