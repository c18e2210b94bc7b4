"""The command line: rotp-vision convert | inspect | revert | verify | probe | embed | visualize | train | demo."""

import argparse
import ast
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from timm.data.transforms_factory import create_transform
from torch import nn
from torch.utils.data import DataLoader

from rotp_vision.calibration import calibrate
from rotp_vision.embedding import Embedder, embed_folder
from rotp_vision.embedding.embedder import Precision, default_device
from rotp_vision.embedding.folder import Metric as RetrievalMetric
from rotp_vision.evaluation import ImageFiles, image_batches, image_config, record_image_config, verify
from rotp_vision.extras import of_extra
from rotp_vision.files import check_writable
from rotp_vision.hub import (
    build,
    fit_weights,
    load_pretrained,
    native_of,
    num_classes_of,
    read_state_dict,
    save_pretrained,
    shortened,
    write_state_dict,
)
from rotp_vision.layers import any_pool_options
from rotp_vision.probing import probe
from rotp_vision.surgery import MultiScale, convert, describe, find_pools, revert
from rotp_vision.surgery.pools import described_pools
from rotp_vision.tables import text_table
from rotp_vision.training.script import train


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ['train']:  # which has a parser and messages of its own
        try:
            train(arguments[1:])
        except ModuleNotFoundError as error:
            print(f'rotp-vision train: {error}', file=sys.stderr)
            return 1
        return 0
    args = _parser().parse_args(arguments)
    logging.basicConfig(format='%(message)s', level=logging.WARNING)
    try:
        args.run(args)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f'rotp-vision {args.command}: {error}', file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('rotp-vision', description='Regularized optimal transport pooling for networks.')
    commands = parser.add_subparsers(dest='command', required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> Callable[..., argparse.Action]:
        added = commands.add_parser(name, help=text)
        added.set_defaults(run=run)
        return added.add_argument

    add = command('convert', _convert, 'replace the pooling of a network and save the result')
    _add_source(add)
    add('--random-weights', action='store_true', help='convert a network with random weights')
    _add_pool(add)
    add('--where', nargs='+', default=['global'], help="'global', 'local', 'all', paths, or re:… for a pattern")
    add('--calibrate', metavar='FOLDER', help='fit the pooling to images in class folders')
    add('--only', choices=['rotp'], default='', help='calibrate among average pooling and ROTP alone')
    _add_image_size(add, 'side of the images that the network is for; goes with --calibrate')
    _add_output(add, 'directory to write (model.safetensors and config.json)')

    add = command('inspect', _inspect, 'list the pools of a network, and their weights')
    _add_source(add)

    add = command('revert', _revert, 'restore the native network of a converted one')
    add('--model', required=True, help='directory that `convert` wrote')
    _add_output(add, 'file to write (.safetensors)')

    add = command('verify', _verify, 'compare a converted network with the original on images')
    add('--model', required=True, help='directory that `convert` or training wrote')
    add('--images', required=True, help='folder of images, in class folders for accuracies')
    add('--original', metavar='NAME_OR_DIRECTORY', help='by default the same network, reverted')
    add('--checkpoint', help='weights of the original')
    _add_model_kwargs(add, 'arguments of the original: img_size=256')
    _add_image_size(add)
    add('--limit', type=int, help='use at most so many images, evenly spread')
    _add_loading(add)

    add = command('probe', _probe, 'fit a classifier of your own images, with the pooling that suits them')
    _add_source(add)
    add('--data', required=True, help='folder of class folders with images, or a parquet file of them')
    text = "keep images together that are equal in this column; in a folder: 'folder'"
    add('--group-by', metavar='COLUMN', help=text)
    add('--label', default='label', metavar='COLUMN', help='classes in a parquet file')
    _add_image_size(add)
    add('--train', action='store_true', help='then train pooling and classifier together, if that helps')
    add('--folds', type=int, default=5, help='of the cross-validation')
    add('--cache', metavar='DIRECTORY', help='keep the maps here; by default they are removed at the end')
    _add_output(add, 'directory to write (model.safetensors, config.json, probe.md)')
    _add_loading(add)

    add = command('embed', _embed, 'write feature vectors of the images in a folder')
    _add_source(add)
    add('--images', required=True, help='folder of images, in class folders for scores')
    _add_pool(add)
    _add_image_size(add)
    add('--precision', choices=get_args(Precision), default='float32')
    add('--whiten', action='store_true', help='fit mean and whitening to these images')
    add('--fit', choices=get_args(RetrievalMetric), help='choose the pooling by this score of the class folders')
    add('--group-by', choices=['folder'], help='images in one folder must not find each other')
    add('--neighbours', type=int, default=0, metavar='K', help='draw a few queries with their K nearest images')
    _add_output(add, 'directory to write (embeddings.npy, metadata.csv, embedder, embeddings.json)')
    _add_loading(add)

    add = command('visualize', _visualize, 'draw the weight of each position, and its contribution to a class')
    add('--model', required=True, help='directory that `convert` or training wrote')
    add('--images', required=True, nargs='+', help='image files, or folders of them')
    add('--class-index', type=int, help='the class whose evidence is drawn; by default the predicted one')
    _add_image_size(add)
    add('--limit', type=int, default=16, help='draw at most so many images of each folder, evenly spread')
    add('--output', required=True, help='directory for sheet.png and index.html')

    add = command('demo', _demo, 'train a small network on two questions, with ROTP, average and max pooling')
    add('--seeds', type=int, default=1, help='runs of each question and pooling')
    add('--output', default='runs/demo', help='directory to write (results.csv, looked.png, and the runs)')

    commands.add_parser('train', help='train in two stages, by `train_imagenet.py`; see `rotp-vision train --help`')
    return parser


def _add_source(add: Callable[..., Any]):
    text = "timm's name, 'torchvision:NAME', 'hf-hub:ID', or a directory of `convert`"
    add('--model', required=True, help=text)
    add('--checkpoint', help='weights: .safetensors, .pth or .pth.tar (tensors only)')
    add('--pretrained', action='store_true', help="use timm's or torchvision's pretrained weights")
    add('--num-classes', type=int, help='number of classes, if not the default')
    _add_model_kwargs(add, 'further arguments of the network: global_pool=avg img_size=256')


def _add_pool(add: Callable[..., Any]):
    add('--pool', metavar='NAME', help="'train', 'embedding', 'gem', …, a solver's name, or 'paper'; see `convert`")
    text = 'another option: --set feature_scale=log --set power=5'
    add('--set', action='append', default=[], metavar='NAME=VALUE', help=text)


def _add_model_kwargs(add: Callable[..., Any], text: str):
    add('--model-kwargs', nargs='+', default=[], metavar='NAME=VALUE', help=text)


def _add_image_size(add: Callable[..., Any], text: str = "side of the images, if not the network's own"):
    add('--image-size', type=int, metavar='PIXELS', help=text)


def _add_output(add: Callable[..., Any], text: str):
    add('--output', required=True, help=text)
    add('--force', action='store_true', help='overwrite an existing output')


def _add_loading(add: Callable[..., Any]):
    add('--batch-size', type=int, default=32)
    add('--workers', type=int, default=2)
    add('--device', default=default_device())


def _load(args: argparse.Namespace, **known: Any) -> nn.Module:
    """The network that `--model` and the arguments beside it describe, in eval mode; `known` are arguments of it."""
    if Path(args.model).is_dir():
        if args.checkpoint or args.pretrained or args.num_classes is not None or args.model_kwargs:
            raise ValueError(
                f'{args.model} is a directory with a network and weights of its own: --checkpoint, --pretrained, '
                "--num-classes and --model-kwargs go with a network's name"
            )
        return load_pretrained(args.model)
    if args.num_classes is not None and args.num_classes < 0:
        raise ValueError(f'--num-classes must be positive, or 0 for no classifier, got {args.num_classes}')
    kwargs = known | _model_kwargs(args)
    from_hub = args.model.startswith('hf-hub:')
    if args.checkpoint and (args.pretrained or from_hub):
        raise ValueError('give either --checkpoint or pretrained weights, not both')
    if args.pretrained and args.model.startswith('torchvision:'):
        kwargs['weights'] = 'DEFAULT'
    elif args.pretrained or from_hub:
        kwargs['pretrained'] = True
    try:
        model = build(args.model, **kwargs)
    except TypeError as error:
        raise ValueError(f'{args.model} does not take these --model-kwargs: {error}') from error
    if args.checkpoint:
        fit_weights(
            model,
            read_state_dict(args.checkpoint),
            f'{args.checkpoint} does not fit {args.model}',
            'choose the network that it was trained with, and its --num-classes',
        )
    return model.eval()


def _model_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    given = _assignments(args.model_kwargs, '--model-kwargs')
    return given | ({} if args.num_classes is None else {'num_classes': args.num_classes})


def _check_output(args: argparse.Namespace):
    """Raise if the output exists or cannot be written: before the work, not after it."""
    check_writable(Path(args.output).parent)
    if Path(args.output).exists() and not args.force:
        raise ValueError(f'{args.output} exists; choose another --output, or overwrite it with --force')


def _convert(args: argparse.Namespace):
    _check_output(args)
    given = _assignments(args.set, '--set')
    options = any_pool_options(args.pool, **given)
    if args.image_size is not None and not args.calibrate:
        raise ValueError('--image-size goes with --calibrate')
    model = _load(args)
    weights = _has_weights(args)
    if weights == args.random_weights:
        raise ValueError(
            f'{args.model} comes with weights: leave --random-weights out'
            if weights
            else f'{args.model} alone has random weights: give --checkpoint or --pretrained, or say --random-weights'
        )
    where = args.where[0] if args.where[0] in ('global', 'local', 'all') and len(args.where) == 1 else args.where
    convert(model, options, where=where)
    print(describe(model))
    if args.calibrate:
        images = ImageFiles(args.calibrate, _transform(model, args.image_size))
        unlabelled = _why_no_labels(images, model)
        if unlabelled:
            raise ValueError(f'--calibrate needs labels, but {unlabelled}')
        shuffled = DataLoader(images, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
        print(f'\n{calibrate(model, shuffled, only=args.only)}')
        config = {} if args.image_size is None else image_config(model, args.image_size)
        record_image_config(model, config, num_classes=len(images.classes), label_names=images.classes)
    base, arguments = _native(args)
    directory = save_pretrained(model, args.output, base=base, model_args=arguments, force=args.force)
    _print_written(directory)


def _why_no_labels(images: ImageFiles, model: nn.Module) -> str:
    """Why the class folders are no labels for a model, or ''; numbers them by its class names, if it has any."""
    names = (getattr(model, 'pretrained_cfg', None) or {}).get('label_names')
    return images.why_no_labels(num_classes_of(model)) or images.number_as(names)


def _has_weights(args: argparse.Namespace) -> bool:
    return bool(args.checkpoint or args.pretrained or args.model.startswith('hf-hub:') or Path(args.model).is_dir())


def _native(args: argparse.Namespace) -> tuple[str | None, dict[str, Any]]:
    """`base` and `model_args` for `save_pretrained`."""
    if Path(args.model).is_dir():
        return native_of(args.model)
    return args.model if not args.model.startswith('hf-hub:') else None, _model_kwargs(args)


def _print_written(directory: str | Path):
    print(f"\nwrote {directory}; load it by\n  rotp_vision.load_pretrained('{directory}')")
    print(f"  timm.create_model('local-dir:{directory}', pretrained=True)  # after import rotp_vision")


def _probe(args: argparse.Namespace):
    _check_output(args)
    if not _has_weights(args):
        raise ValueError(f'{args.model} alone has random weights: give --checkpoint or --pretrained')
    base, arguments = _native(args)
    arguments.pop('num_classes', None)
    result = probe(
        _load(args).to(args.device),
        args.data,
        args.output,
        group_by=args.group_by,
        label=args.label,
        image_size=args.image_size,
        num_folds=args.folds,
        train=args.train,
        cache=args.cache,
        base=base,
        model_args=arguments,
        batch_size=args.batch_size,
        workers=args.workers,
        force=args.force,
    )
    print(f'\n{result}')
    _print_written(args.output)


def _embed(args: argparse.Namespace):
    check_writable(Path(args.output).parent)
    given = _assignments(args.set, '--set')
    options = any_pool_options(args.pool or 'embedding', **given)
    args.pretrained = args.pretrained or not (args.checkpoint or Path(args.model).is_dir())
    embedder = Embedder(_load(args), options, image_size=args.image_size, device=args.device, precision=args.precision)
    if args.pool or given:
        embedder.set_pool(options)  # also where the network has a pool of ours already
    result = embed_folder(
        embedder,
        args.images,
        args.output,
        group_by=args.group_by,
        whiten=args.whiten,
        fit=args.fit,
        neighbours=args.neighbours,
        batch_size=args.batch_size,
        workers=args.workers,
        force=args.force,
    )
    print(f'\n{result}')


# Constants that JSON and YAML spell differently from Python.
_WORDS = {'true': True, 'false': False, 'null': None}


def _assignments(texts: Sequence[str], argument: str) -> dict[str, Any]:
    """Values by name from texts NAME=VALUE."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition('=')
        if not equals:
            raise ValueError(f'{argument} takes NAME=VALUE, got {text!r}')
        if name in values:
            raise ValueError(f'{argument} names {name} twice: leave one out')
        try:
            values[name] = _WORDS[value] if value in _WORDS else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
    return values


def _inspect(args: argparse.Namespace):
    model = _load(args)
    pools = described_pools(model)
    if pools:
        print(describe(model))
        for path, pool in pools.items():
            print(f'\n{path}: {pool.extra_repr()}')
            for name, value in pool.named_weights().items():
                print(f'  {name:16} {shortened(value)}')
        return
    rows = [('path', 'kind', 'input', 'pools now', 'can be replaced')]
    for pool in find_pools(model):
        shape = ' × '.join(str(size) for size in pool.input_shape[1:])
        rows.append((pool.path, pool.kind, shape, pool.old, pool.reason or 'yes'))
    print(text_table(rows))


def _revert(args: argparse.Namespace):
    _check_output(args)
    model = revert(load_pretrained(args.model))
    print(f'wrote {write_state_dict(model, args.output, force=args.force)}')


def _transform(model: nn.Module, image_size: int | None = None) -> Any:
    """The evaluation transform of the model, at another image size if one is given."""
    if isinstance(model, MultiScale):
        if image_size is not None:
            raise ValueError('a network of several sizes has its own: leave --image-size out')
        return model.transform()
    return create_transform(**image_config(model, image_size))


def _verify(args: argparse.Namespace):
    model = load_pretrained(args.model)
    images = ImageFiles(args.images, _transform(model, args.image_size), args.limit)
    unlabelled = _why_no_labels(images, model)
    result = verify(
        model,
        image_batches(images, args.batch_size, args.workers),
        original=_original(args, model),
        labelled=not unlabelled,
        device=args.device,
        total=-(-len(images) // args.batch_size),
    )
    probed = Path(args.model, 'probe.md')
    if unlabelled:
        print(f'no accuracies: {unlabelled}')
    if not probed.is_file():
        print(result)
        return
    print(result._replace(sentence=''))
    print(
        'The classifier was fitted to the pooling that `probe` chose, so that the other rows are no fair comparison. '
        f'In cross-validation: {probed.read_text("utf-8").strip().splitlines()[-1]}'
    )


def _original(args: argparse.Namespace, model: nn.Module) -> nn.Module | None:
    """The network to verify against, or None for the model with its native pools."""
    if args.original is None and not args.checkpoint and not args.model_kwargs:
        return None
    known: dict[str, Any] = {}
    args.num_classes, args.pretrained = num_classes_of(model), args.checkpoint is None
    if args.original is None:
        args.model, known = native_of(args.model)
    else:
        args.model = args.original
    if Path(args.model).is_dir():
        args.num_classes, args.pretrained = None, False
    return _load(args, **known)


def _visualize(args: argparse.Namespace):
    from rotp_vision.pictures import visualize  # needs matplotlib, which the other commands do without

    check_writable(Path(args.output))
    if args.limit < 1:
        raise ValueError(f'--limit must be at least one image, got {args.limit}')
    files: list[Path] = []
    titles: list[str] = []
    total = 0
    for name in map(Path, args.images):
        images = ImageFiles(name, None, args.limit) if name.is_dir() else None
        found = [name] if images is None else images.files
        total += 1 if images is None else images.total
        files += found
        # Files in different class folders may share a name, so titles include the folder.
        titles += [path.relative_to(name).as_posix() if name.is_dir() else path.name for path in found]
    model = load_pretrained(args.model)
    config = None if args.image_size is None else image_config(model, args.image_size)
    drawn = {'titles': titles, 'class_index': args.class_index, 'data_config': config, 'total': total}
    for path in visualize(model, files, args.output, **drawn):
        print(f'wrote {path}')
    if len(files) < total:
        print(f'{len(files)} of {total} images drawn, evenly spread; --limit draws more of each folder')


def _demo(args: argparse.Namespace):
    with of_extra('train'):
        from rotp_vision.training.demo import demo  # needs the packages for training

    check_writable(Path(args.output))
    print(demo(args.output, args.seeds))


if __name__ == '__main__':
    sys.exit(main())
