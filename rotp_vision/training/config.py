"""The settings of a run: YAML plus `--key value` overrides, every field explained by `--help`."""

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from jsonargparse import ArgumentParser

from rotp_vision.layers import pool_options
from rotp_vision.training.script import config_file

Trained = Literal['pool', 'pool+classifier', 'all']


@dataclass
class DataConfig:
    """Images and their preprocessing.

    Args:
        source: `folder` (class directories under train/ and val/), `hf` (Hugging Face datasets: a hub name, a directory
            of parquet files, or a copy made by save_to_disk) or `generated` (small objects on textured backgrounds).
        path: the folder, the hub name or the directory; not used by `generated`.
        train_split: name of the training split (a subfolder for `folder`).
        val_split: name of the validation split.
        image_key: column of the images (`hf`).
        label_key: column of the labels (`hf`).
        streaming: read an `hf` set as a stream instead of downloading it.
        shuffle_buffer: images a stream holds to shuffle them.
        train_images: training images of a stream whose size is not published, or of the generated set.
        val_images: validation images of a stream whose size is not published, or of the generated set.
        num_classes: classes the data must have; unset takes what is found (`generated` has at most 8).
        image_size: side of the network's square input, in pixels.
        crop_pct: share of the resized image that evaluation keeps.
        scale: smallest and largest share of the image's area a random training crop takes; (1, 1) crops nothing.
        ratio: smallest and largest aspect ratio of a random training crop.
        hflip: probability of a horizontal flip.
        color_jitter: strength of colour jitter.
        auto_augment: timm's policy string such as rand-m7-mstd0.5-inc1; unset for none.
        random_erasing: probability of erasing a random rectangle.
        draft: decode a JPEG at a half, a quarter or an eighth of its size where the training crop still has at least
            the network's resolution. Large photos load several times as fast, and their training pixels differ slightly
            from those of a full decode; evaluation always decodes in full.
        workers: data workers per process; 0 loads in the training process.
        max_broken: unreadable images tolerated, by name, before the run stops.
    """

    source: Literal['folder', 'hf', 'generated'] = 'folder'
    path: str | None = None
    train_split: str = 'train'
    val_split: str = 'val'
    image_key: str = 'image'
    label_key: str = 'label'
    streaming: bool = False
    shuffle_buffer: int = 10_000
    train_images: int | None = None
    val_images: int | None = None
    num_classes: int | None = None
    image_size: int = 224
    crop_pct: float = 0.875
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 4 / 3)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    random_erasing: float = 0.0
    draft: bool = True
    workers: int = 8
    max_broken: int = 100


@dataclass
class ModelConfig:
    """The network, with its native pooling.

    Args:
        name: a timm name, or torchvision:NAME for one of torchvision's.
        pretrained: start from the published weights of that name.
        checkpoint: start from the weights in this file (.safetensors or .pth) or checkpoint directory.
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
        options: a mapping of the pooling's options (see rotp_vision.PoolOptions), a solver's name, or `paper` for the
            published layer; unset for the recommended pooling.
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
        momentum: of the optimizers that have one.
        weight_decay: not applied to biases, norms and the pooling's positive weights.
        schedule: the learning rate's: step, cosine, tanh, poly, or constant.
        decay_epochs: epochs between two decays (step).
        decay_rate: factor of a decay (step).
        min_lr: learning rate at the end (cosine, tanh, poly).
        warmup_epochs: epochs of linear warm-up; fractions are allowed.
        warmup_lr: learning rate at the start of the warm-up.
        label_smoothing: share of the label given to the other classes.
        mixup: α of mixup, 0 for none.
        cutmix: α of CutMix, 0 for none.
        clip_norm: largest norm of the gradient; unset for no clipping.
        ema_decay: decay of the moving average of the weights, which is then what is evaluated; unset for none.
        accumulation: forward passes whose gradients one step adds up; the global batch stays the same.
    """

    epochs: int = 90
    optimizer: str = 'sgd'
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: Literal['step', 'cosine', 'tanh', 'poly', 'constant'] = 'step'
    decay_epochs: float = 30
    decay_rate: float = 0.1
    min_lr: float = 0.0
    warmup_epochs: float = 0
    warmup_lr: float = 1e-5
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    clip_norm: float | None = None
    ema_decay: float | None = None
    accumulation: int = 1


@dataclass
class PoolStageConfig(StageConfig):
    """How stage 2, the one with ROTP, is optimised: the fields of stage 1, where `lr` does not apply to the pooling.

    Args:
        pool_lr: peak learning rate of the pooling's own weights; it follows the same schedule.
        calibrate: number of training images on which view, prior, temperature and gain of the pooling are chosen before
            it trains; 0 starts it with `pool.options`. Neither stage trains on them, and they are at most a fifth of
            the training images.
        train: pool (everything else frozen, as in the paper), pool+classifier, or all.
        cache_features: compute the frozen backbone once and train from its stored maps (float16).
        cache_views: augmented views stored per image, used in turn; 0 stores the image with the evaluation transform.
        cache_dir: directory of the maps; unset for OUTPUT/cache.
    """

    epochs: int = 10
    optimizer: str = 'adamw'
    lr: float = 0.001
    pool_lr: float = 0.05
    weight_decay: float = 0.0
    schedule: Literal['step', 'cosine', 'tanh', 'poly', 'constant'] = 'cosine'
    calibrate: int = 512
    train: Trained = 'pool'
    cache_features: bool = False
    cache_views: int = 1
    cache_dir: str | None = None


@dataclass
class RunConfig:
    """Train an image classifier in two stages: with its native pooling, then with ROTP in its place.

    Args:
        output: directory of the run: checkpoints, metrics, pictures, export.
        resume: auto continues the run in `output` (or starts it), never raises an error if there is one, a path
            continues from that checkpoint.
        allow_changed_data: continue a run although its classes or images are not those that it began with.
        dry_run: print the plan and a time estimate from a few steps, write nothing.
        evaluate: only evaluate: a checkpoint directory, an exported directory, or a weights file of the configured
            network, native or with the configured pooling; `model` for the network as configured.
        seed: of initial weights, order, augmentation and the generated images.
        global_batch_size: images per optimizer step over all processes; the same run on any number of processes.
        mixed_precision: auto takes the launcher's setting, or without one bf16 on a GPU that has it.
        channels_last: memory format of images and weights.
        compile: compile the network with torch.compile.
        sync_batchnorm: synchronise batch statistics over all processes (GPU), so that they do not depend on their
            number.
        deterministic: allow only deterministic operations (needed for bit-exact runs on GPU).
        log_every: steps between two rows of steps.csv.
        checkpoint_minutes: minutes between two checkpoints inside an epoch; 0 for at epoch ends only.
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
    seed: int = 0
    global_batch_size: int = 256
    mixed_precision: Literal['auto', 'no', 'bf16', 'fp16'] = 'auto'
    channels_last: bool = True
    compile: bool = False
    sync_batchnorm: bool = False
    deterministic: bool = False
    log_every: int = 50
    checkpoint_minutes: float = 15.0
    checkpoint_steps: int = 0
    keep: int = 2
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

EPOCHS = ('stage1.epochs', 'stage2.epochs')


def parse_config(args: Sequence[str] | None = None, program: str = 'train_imagenet.py') -> RunConfig:
    """The settings from `--config FILE` and `--key value` arguments; exits with a message on anything wrong."""
    parser = ArgumentParser(
        prog=program,
        usage='%(prog)s [--config FILE] [--key value] [--group.key value] …',
        description=(RunConfig.__doc__ or '').splitlines()[0],
        epilog='YAML files and arguments may be mixed; what comes later wins.',
    )
    parser.add_argument('--config', action='config', help='a YAML file of these settings, or the name of a shipped one')
    parser.add_class_arguments(RunConfig, as_group=False)
    args = list(_normalized(sys.argv[1:] if args is None else args))
    try:
        args = list(_with_files(args))
    except ValueError as error:
        parser.error(str(error))
    unknown = list(_unknown_keys(args))
    if unknown:
        parser.error('\n'.join(unknown))
    values = parser.parse_args(args).as_dict()
    del values['config']
    groups = {item.name: item.type for item in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(item.type)}
    config = RunConfig(**(values | {name: cls(**values[name]) for name, cls in groups.items()}))  # type: ignore[operator]
    try:
        check_config(config)
    except ValueError as error:
        parser.error(str(error))
    return config


def check_config(config: RunConfig) -> None:
    """Raise a ValueError for the first setting that is invalid, alone or together with another."""
    data, stage1, stage2 = config.data, config.stage1, config.stage2

    def need(right: bool, name: str, must: str, value: object) -> None:
        if not right:
            raise ValueError(f'{name} must be {must}, got {value!r}')

    need(config.global_batch_size >= 1, 'global_batch_size', 'at least 1', config.global_batch_size)
    need(config.keep >= 2, 'keep', 'at least 2, so that a broken checkpoint has one before it', config.keep)
    need(config.log_every >= 1, 'log_every', 'at least 1', config.log_every)
    need(config.checkpoint_minutes >= 0, 'checkpoint_minutes', 'at least 0', config.checkpoint_minutes)
    need(config.checkpoint_steps >= 0, 'checkpoint_steps', 'at least 0', config.checkpoint_steps)
    need(data.source == 'generated' or bool(data.path), 'data.path', f'given for source {data.source}', data.path)
    need(not data.streaming or data.source == 'hf', 'data.streaming', 'false unless data.source is hf', True)
    need(data.image_size >= 8, 'data.image_size', 'at least 8', data.image_size)
    need(data.workers >= 0, 'data.workers', 'at least 0', data.workers)
    need(0 < data.crop_pct <= 1, 'data.crop_pct', 'in (0, 1]', data.crop_pct)
    need(0 < data.scale[0] <= data.scale[1], 'data.scale', 'two shares of the area, the smaller first', data.scale)
    need(config.seed >= 0, 'seed', 'at least 0', config.seed)
    need(not Path(config.output).is_file(), 'output', 'a directory', config.output)
    for name, count in (('data.train_images', data.train_images), ('data.val_images', data.val_images)):
        need(count is None or count >= 1, name, 'at least 1', count)
    pool_options(config.pool.options)
    for name, stage in (('stage1', stage1), ('stage2', stage2)):
        need(stage.epochs >= 0, f'{name}.epochs', 'at least 0', stage.epochs)
        need(stage.lr > 0, f'{name}.lr', 'positive', stage.lr)
        need(stage.accumulation >= 1, f'{name}.accumulation', 'at least 1', stage.accumulation)
        need(stage.decay_epochs > 0, f'{name}.decay_epochs', 'positive', stage.decay_epochs)
        need(0 <= stage.label_smoothing < 1, f'{name}.label_smoothing', 'in [0, 1)', stage.label_smoothing)
        for mixing, amount in (('mixup', stage.mixup), ('cutmix', stage.cutmix)):
            need(amount >= 0, f'{name}.{mixing}', 'at least 0', amount)
        decay = stage.ema_decay
        need(decay is None or 0 < decay < 1, f'{name}.ema_decay', 'between 0 and 1', decay)
    need(stage2.pool_lr > 0, 'stage2.pool_lr', 'positive', stage2.pool_lr)
    total = stage1.epochs + stage2.epochs
    need(total > 0 or config.evaluate is not None, 'stage1.epochs + stage2.epochs', 'at least 1', total)
    need(stage2.train in get_args(Trained), 'stage2.train', f'one of {get_args(Trained)}', stage2.train)
    need(stage2.calibrate == 0 or stage2.calibrate >= 4, 'stage2.calibrate', '0, or at least 4', stage2.calibrate)
    need(stage2.cache_views >= 0, 'stage2.cache_views', 'at least 0', stage2.cache_views)
    if stage2.cache_features:
        need(stage2.train != 'all', 'stage2.train', "'pool' or 'pool+classifier' with cache_features", stage2.train)
        mixing = max(stage2.mixup, stage2.cutmix)
        need(mixing == 0, 'stage2.mixup and cutmix', '0 with cache_features: maps do not mix like images', mixing)
        need(config.pool.where == 'global', 'pool.where', "'global' with cache_features", config.pool.where)
        need(not data.streaming, 'data.streaming', 'false with cache_features', data.streaming)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The settings as nested plain values, which YAML and JSON store without loss."""
    return dataclasses.asdict(config, dict_factory=_plain)


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences that a continued run must not have, one line per setting: `stage1.lr: 0.1 → 0.2`."""
    free = {*FREE_ON_RESUME, *EPOCHS}  # `changed_epochs` checks the latter
    if new['data']['streaming']:
        free.remove('data.workers')  # the order of a stream depends on them
    before, after = dict(flat(old)), dict(flat(new))
    differing = [key for key in sorted({*before, *after} - free) if before.get(key) != after.get(key)]
    return [f'{key}: {before.get(key)} → {after.get(key)}' for key in differing]


def changed_epochs(old: Mapping[str, Any], new: Mapping[str, Any], stage: int, done: int) -> list[str]:
    """One line for each stage whose number of epochs a continued run changes.

    Args:
        old: the settings of the checkpoint.
        new: those of its continuation.
        stage: the stage of the checkpoint.
        done: epochs of that stage that are done or have begun.

    Raises:
        ValueError: if that stage, or one before it, has already passed the new number.
    """
    lines = []
    for number, key in enumerate(('stage1', 'stage2'), 1):
        before, after = old[key]['epochs'], new[key]['epochs']
        if before == after:
            continue
        if number < stage:
            raise ValueError(
                f'stage {number} is over after its {before} epochs, {key}.epochs cannot become {after}: leave it at '
                f'{before}, or start a new run with a checkpoint of that stage as --model.checkpoint'
            )
        if number == stage and after < done:
            raise ValueError(f'{key}.epochs must be at least {done}, which are done or have begun, got {after}')
        lines.append(
            f'{key}.epochs: {before} → {after}; the learning rate follows the schedule of {after} epochs from here on'
        )
    return lines


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def flat(values: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f'{prefix}{key}.')
        else:
            yield prefix + key, value


def _fields(cls: type, prefix: str = '') -> dict[str, bool]:
    """Every dotted key of a config class, and whether it may have arbitrary subkeys."""
    keys = {}
    for item in dataclasses.fields(cls):
        nested = item.type if isinstance(item.type, type) and dataclasses.is_dataclass(item.type) else None
        keys[prefix + item.name] = 'dict' in str(item.type)
        if nested is not None:
            keys |= _fields(nested, f'{prefix}{item.name}.')
    return keys


def _normalized(args: Sequence[str]) -> Iterator[str]:
    """`--global-batch-size=8 --dry-run` as `--global_batch_size=8 --dry_run=true`."""
    switches = {item.name for item in dataclasses.fields(RunConfig) if item.type is bool}
    for arg, following in zip(args, [*args, '--'][1:], strict=True):
        if not arg.startswith('--'):
            yield arg
            continue
        key, sign, value = arg[2:].partition('=')
        key = key.replace('-', '_')
        bare = key in switches and not sign and following.startswith('--')
        yield f'--{key}=true' if bare else f'--{key}{sign}{value}'


def _with_files(args: Sequence[str]) -> Iterator[str]:
    """The arguments with names of shipped configurations replaced by their files."""
    for before, arg in zip(['', *args], args, strict=False):
        if before == '--config':
            yield config_file(arg)
        elif arg.startswith('--config='):
            yield f'--config={config_file(arg.removeprefix("--config="))}'
        else:
            yield arg


def _unknown_keys(args: Sequence[str]) -> Iterator[str]:
    """One message per unknown key, with the closest known one."""
    known = _fields(RunConfig)
    tools = ('config', 'help', 'print_config', 'print_shtab')

    def complaint(key: str, place: str) -> Iterator[str]:
        parents = ['.'.join(key.split('.')[:n]) for n in range(1, key.count('.') + 1)]
        if key in known or any(known.get(parent) for parent in parents):
            return
        group, _, last = key.rpartition('.')
        short = ''.join(word[:1] for word in last.split('_'))  # learning_rate is lr
        same = [name for name in known if name.rpartition('.')[2] in (last, short)]
        same.sort(key=lambda name: name.rpartition('.')[0] != group)
        near = difflib.get_close_matches(key, known, 1, 0.0)
        yield f'unknown key {key!r} in {place}; did you mean {(same or near)[0]!r}?'

    for position, arg in enumerate(args):
        key, _, value = arg[2:].partition('=')
        if not arg.startswith('--'):
            continue
        if key == 'config':
            file = Path(value or next(iter(args[position + 1 :]), ''))
            try:
                content = yaml.safe_load(file.read_text()) if file.is_file() else None
            except yaml.YAMLError as error:
                yield f'{file} is not YAML: {error}'
                continue
            for name, _ in flat(content) if isinstance(content, Mapping) else ():
                yield from complaint(name, str(file))
        elif key.removesuffix('+') not in tools:
            yield from complaint(key.removesuffix('+'), 'the arguments')
