"""The settings of a run: YAML plus `--key value` overrides, every field explained by `--help`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser
from jsonargparse.typing import restricted_number_type

from rotp_vision.data.config import DataConfig
from rotp_vision.layers import any_pool_options
from rotp_vision.training.script import config_file

if TYPE_CHECKING:  # type checkers do not know numbers with a range
    from builtins import float as BelowOne
    from builtins import float as NonNegativeFloat
    from builtins import float as OpenUnitInterval
    from builtins import float as PositiveFloat
    from builtins import int as AtLeast2
    from builtins import int as NonNegativeInt
    from builtins import int as PositiveInt
else:
    from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, OpenUnitInterval, PositiveFloat, PositiveInt

    AtLeast2 = restricted_number_type('AtLeast2', int, ('>=', 2))
    BelowOne = restricted_number_type('BelowOne', float, [('>=', 0), ('<', 1)])

Trained = Literal['pool', 'pool+classifier', 'all']
Scheduler = Literal['step', 'cosine', 'tanh', 'poly', 'constant']

# Settings of version 0.2 that have another name or are gone.
OLD = {
    'cache_views': 'stage2.cache_views is now called stage2.cache_repeats',
    'streaming': 'data.streaming is gone: download the dataset',
    'shuffle_buffer': 'data.shuffle_buffer is gone, as streams are',
}


@dataclass
class ModelConfig:
    """The network, with its native pooling.

    Args:
        name: a timm name, or torchvision:NAME for one of torchvision's.
        pretrained: start from the published weights of that name.
        checkpoint: start from the weights in this file (.safetensors or .pth), which may be a checkpoint of a run.
        kwargs: further arguments of the model's constructor.
    """

    name: str = 'resnet50'
    pretrained: bool = False
    checkpoint: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class PoolConfig:
    """The pooling of stage 2.

    Args:
        options: a mapping of the pooling's options (see rotp_vision.PoolOptions), a solver's name, `paper` for the
            published layer, `train` for the start of a network that trains along, or another pooling by name: `gem`,
            or {pool: gem, power: 3, learn: true}; unset for the recommended pooling, next to the mean.
        where: which pools are replaced: global (before the classifier), local (inside the network) or all.
    """

    options: str | dict[str, Any] = field(default_factory=dict)
    where: Literal['global', 'local', 'all'] = 'global'


@dataclass
class StageConfig:
    """How one stage is optimised.

    Args:
        epochs: passes over the training images; 0 leaves the stage out.
        optimizer: a timm optimizer's name.
        lr: peak learning rate, for the global batch as it is.
        momentum: momentum of the optimizers that have one.
        weight_decay: weight decay; parameters with one axis (biases, norms, weights of the pooling) do not decay.
        schedule: schedule of the learning rate: step, cosine, tanh, poly, or constant.
        decay_epochs: epochs between two decays (step).
        decay_rate: factor of a decay (step).
        min_lr: learning rate at the end (cosine, tanh, poly).
        warmup_epochs: epochs of linear warm-up; fractions are allowed.
        warmup_lr: learning rate at the start of the warm-up.
        label_smoothing: share of the label given to the other classes.
        mixup: α of mixup, 0 for none.
        cutmix: α of CutMix, 0 for none.
        clip_norm: largest norm of the gradient; unset for no clipping.
        ema_decay: decay of a moving average of the weights, which is then evaluated; unset for none.
        accumulation: forward passes whose gradients one step adds up; the global batch stays the same.
    """

    epochs: NonNegativeInt = 90
    optimizer: str = 'sgd'
    lr: PositiveFloat = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: Scheduler = 'step'
    decay_epochs: PositiveFloat = 30
    decay_rate: float = 0.1
    min_lr: float = 0.0
    warmup_epochs: float = 0
    warmup_lr: float = 1e-5
    label_smoothing: BelowOne = 0.0
    mixup: NonNegativeFloat = 0.0
    cutmix: NonNegativeFloat = 0.0
    clip_norm: float | None = None
    ema_decay: OpenUnitInterval | None = None
    accumulation: PositiveInt = 1


@dataclass
class PoolStageConfig(StageConfig):
    """How stage 2, the one with ROTP, is optimised: the fields of stage 1, where `lr` does not apply to the pooling.

    Args:
        pool_lr: peak learning rate of the pooling's own weights; it follows the same schedule.
        calibrate: number of training images held out to choose feature scale, prior, temperature and gain of the
            pooling before it trains, at most a fifth of them; 0 starts it with `pool.options`. Neither stage trains on
            these images.
        train: pool (everything else frozen, as in the paper), pool+classifier, or all.
        cache_features: compute the frozen backbone once and train from its stored maps (float16).
        cache_repeats: augmented copies stored per image, used in turn; 0 stores one copy with the evaluation transform.
        cache_dir: directory of the maps; unset for OUTPUT/cache.
    """

    epochs: NonNegativeInt = 10
    optimizer: str = 'adamw'
    lr: PositiveFloat = 0.001
    pool_lr: PositiveFloat = 0.05
    weight_decay: float = 0.0
    schedule: Scheduler = 'cosine'
    calibrate: NonNegativeInt = 512
    train: Trained = 'pool'
    cache_features: bool = False
    cache_repeats: NonNegativeInt = 1
    cache_dir: str | None = None


@dataclass
class RunConfig:
    """Train an image classifier in two stages: with its native pooling, then with ROTP in its place.

    Args:
        output: directory of the run: checkpoints, metrics, pictures, export.
        resume: auto continues the run in `output`, or starts it; never raises an error if there is a run; a path
            continues from that checkpoint.
        allow_changed_data: continue a run although its classes or images are not those that it began with.
        dry_run: print the plan and a time estimate from a few steps, write nothing.
        evaluate: only evaluate: a checkpoint, an exported directory, or a weights file of the configured network,
            native or with the configured pooling; `model` for the network as configured.
        seed: seed of initial weights, order, augmentation and the generated images.
        global_batch_size: images per optimizer step over all processes; the same run on any number of processes.
        mixed_precision: auto takes the launcher's setting, or without one bf16 on a GPU that has it.
        channels_last: memory format of images and weights.
        compile: compile the network with torch.compile.
        sync_batchnorm: synchronise batch statistics over all processes (GPU), so that they do not depend on their
            number.
        deterministic: allow only deterministic operations (needed for bit-exact runs on GPU).
        log_every: steps between two rows of steps.csv.
        checkpoint_minutes: minutes between two checkpoints inside an epoch; 0 saves at the ends of epochs only.
        checkpoint_steps: steps between two checkpoints inside an epoch, besides those by time; 0 for none.
        keep: last checkpoints kept, besides the best; at least 2.
        trackers: Accelerate's trackers, such as [tensorboard] or [wandb]; CSV is always written.
        data: the images.
        model: the network.
        pool: the pooling of stage 2.
        stage1: training with the native pooling.
        stage2: training with ROTP.
    """

    output: str = 'runs/train'
    resume: str = 'never'
    allow_changed_data: bool = False
    dry_run: bool = False
    evaluate: str | None = None
    seed: NonNegativeInt = 0
    global_batch_size: PositiveInt = 256
    mixed_precision: Literal['auto', 'no', 'bf16', 'fp16'] = 'auto'
    channels_last: bool = True
    compile: bool = False
    sync_batchnorm: bool = False
    deterministic: bool = False
    log_every: PositiveInt = 50
    checkpoint_minutes: NonNegativeFloat = 15.0
    checkpoint_steps: NonNegativeInt = 0
    keep: AtLeast2 = 2
    trackers: list[str] = field(default_factory=list)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    stage1: StageConfig = field(default_factory=StageConfig)
    stage2: PoolStageConfig = field(default_factory=PoolStageConfig)


# Settings that may differ between a run and its continuation, because no computed number depends on them.
FREE_ON_RESUME = (
    *('output', 'resume', 'allow_changed_data', 'dry_run', 'evaluate', 'log_every', 'keep', 'trackers'),
    *('checkpoint_minutes', 'checkpoint_steps'),
    *('data.path', 'data.workers', 'data.max_broken', 'stage2.cache_dir'),
)

# The largest values of settings that decide about memory or time; larger ones are slips of the pen.
LARGEST = {
    **{'global_batch_size': 2**20, 'data.image_size': 4096, 'data.train_images': 10**8, 'data.val_images': 10**8},
    **{'data.workers': 1024, 'stage2.cache_repeats': 1000, 'stage1.epochs': 10**5, 'stage2.epochs': 10**5},
}

EPOCHS = ('stage1.epochs', 'stage2.epochs')


def parse_config(args: Sequence[str] | None = None, program: str = 'train_imagenet.py') -> RunConfig:
    """Returns the settings of `--config FILE` and `--key value` arguments; exits with a message on anything wrong."""
    parser = ArgumentParser(
        prog=program,
        usage='%(prog)s [--config FILE] [--key value] [--group.key value] …',
        description=(RunConfig.__doc__ or '').splitlines()[0],
        epilog='YAML files and arguments may be mixed; later ones win.',
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument('--config', action='config', help='a YAML file of these settings, or the name of a shipped one')
    parser.add_class_arguments(RunConfig, as_group=False)
    files: list[str] = []
    try:
        args = list(_prepared(sys.argv[1:] if args is None else args, files))
        values = parser.parse_args(args).as_dict()
        del values['config']
        values = json.loads(json.dumps(values))  # torch cannot store jsonargparse's subclasses of int and float
        groups = {item.name: item.type for item in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(item.type)}
        groups = {name: cls(**values[name]) for name, cls in groups.items()}  # type: ignore[operator]
        config = RunConfig(**(values | groups))
        check_config(config)
    except (argparse.ArgumentError, ValueError) as error:
        old = [text for key, text in OLD.items() if key in str(error)]
        read = f' (configuration: {", ".join(files)})' if files else ''
        print('\n'.join([f'{program}: error: {error}{read}', *old]), file=sys.stderr)
        raise SystemExit(2) from error
    return config


def check_config(config: RunConfig) -> None:
    """Raises a ValueError for the first setting that is invalid, alone or together with another."""
    data, stage1, stage2 = config.data, config.stage1, config.stage2

    def need(right: bool, name: str, must: str, value: object) -> None:
        if not right:
            raise ValueError(f'{name} must be {must}, got {value!r}')

    for name, value in flat(to_dict(config)):
        need(name not in LARGEST or value <= LARGEST[name], name, f'at most {LARGEST.get(name)}', value)
    need(data.source == 'generated' or bool(data.path), 'data.path', f'given for source {data.source}', data.path)
    need(data.image_size >= 8, 'data.image_size', 'at least 8', data.image_size)
    need(data.workers >= 0, 'data.workers', 'at least 0', data.workers)
    need(data.train_images >= 1, 'data.train_images', 'at least 1', data.train_images)
    need(data.val_images >= 1, 'data.val_images', 'at least 1', data.val_images)
    need(0 < data.crop_pct <= 1, 'data.crop_pct', 'in (0, 1]', data.crop_pct)
    need(0 < data.scale[0] <= data.scale[1], 'data.scale', 'two shares of the area, the smaller first', data.scale)
    need(not Path(config.output).is_file(), 'output', 'a directory', config.output)
    any_pool_options(config.pool.options)
    total = stage1.epochs + stage2.epochs
    need(total > 0 or config.evaluate is not None, 'stage1.epochs + stage2.epochs', 'at least 1', total)
    need(stage2.calibrate == 0 or stage2.calibrate >= 4, 'stage2.calibrate', '0, or at least 4', stage2.calibrate)
    if stage2.cache_features:
        need(stage2.train != 'all', 'stage2.train', "'pool' or 'pool+classifier' with cache_features", stage2.train)
        mixing = max(stage2.mixup, stage2.cutmix)
        need(mixing == 0, 'stage2.mixup and cutmix', '0 with cache_features: maps do not mix like images', mixing)
        need(config.pool.where == 'global', 'pool.where', "'global' with cache_features", config.pool.where)
    begins_trained = stage1.epochs or config.model.pretrained or config.model.checkpoint
    if not begins_trained and stage2.train != 'all' and config.evaluate is None:
        raise ValueError(
            f'stage 2 by itself with stage2.train {stage2.train} needs a trained network: give model.pretrained or '
            'model.checkpoint, or train from scratch with stage2.train all'
        )


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Returns the settings as nested plain values, which YAML and JSON store without loss."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns differences that a continued run must not have, one line per setting: `stage1.lr: 0.1 → 0.2`."""
    free = {*FREE_ON_RESUME, *EPOCHS}  # `changed_epochs` checks the latter
    before, after = dict(flat(old)), dict(flat(new))
    differing = [key for key in sorted({*before, *after} - free) if before.get(key) != after.get(key)]
    return [f'{key}: {before.get(key)} → {after.get(key)}' for key in differing]


def changed_epochs(old: Mapping[str, Any], new: Mapping[str, Any], stage: int, done: int) -> list[str]:
    """Returns one line for each stage whose number of epochs a continued run changes.

    Args:
        old: settings of the checkpoint.
        new: settings of its continuation.
        stage: stage of the checkpoint.
        done: number of epochs of that stage that are done or have begun.

    Raises:
        ValueError: if that stage, or one before it, has already passed the new number.
    """
    lines = []
    for number, key in enumerate(EPOCHS, 1):
        before, after = (settings[f'stage{number}']['epochs'] for settings in (old, new))
        if before != after and number < stage:
            raise ValueError(
                f'stage {number} is over: leave {key} at {before}, or start a new run with a checkpoint of that stage '
                'as --model.checkpoint'
            )
        if number == stage and after < done:
            raise ValueError(f'{key} must be at least {done}, which are done or have begun, got {after}')
        if before != after:
            lines.append(f'{key}: {before} → {after}; the learning rate now follows the schedule of {after} epochs')
    return lines


def flat(values: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and values of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f'{prefix}{key}.')
        else:
            yield prefix + key, value


def _prepared(args: Sequence[str], files: list[str]) -> Iterator[str]:
    """Yields `--config demo --global-batch-size=8 --dry-run` as `--config=….yaml --global_batch_size=8 --dry_run=true`.

    The configuration files are added to `files`.
    """
    switches = {item.name for item in dataclasses.fields(RunConfig) if item.type is bool}
    rest = [*args]
    while rest:
        arg = rest.pop(0)
        key, sign, value = arg[2:].partition('=')
        key = key.replace('-', '_')
        if not arg.startswith('--'):
            yield arg
            continue
        if not sign and rest and not rest[0].startswith('--'):
            sign, value = '=', rest.pop(0)
        elif not sign and key in switches:
            sign, value = '=', 'true'
        if key == 'config':
            value = config_file(value)
            files.append(value)
        yield f'--{key}{sign}{value}'
