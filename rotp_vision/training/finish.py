"""Output of a run: its plan at the start, and tables, pictures and the exported model at the end."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import timm
import torch
from torch import nn

from rotp_vision.data.loading import ValImages, collate, split_batch
from rotp_vision.data.transforms import preprocessing
from rotp_vision.evaluation import UsedPositions, positions_sentence
from rotp_vision.files import open_by_umask, write_atomically
from rotp_vision.hub import TORCHVISION, save_pretrained, write_state_dict
from rotp_vision.layers import PoolOptions, SimplePoolOptions, any_pool_options
from rotp_vision.pictures import displayed, plot_looked, plot_weights, pool_maps, save_figure
from rotp_vision.surgery.pools import described_pools
from rotp_vision.training import report
from rotp_vision.training.cache import open_cache
from rotp_vision.training.config import PoolConfig, PoolStageConfig, RunConfig, StageConfig
from rotp_vision.training.model import count_parameters, normalization
from rotp_vision.training.processes import ON_CPU, gather
from rotp_vision.training.run import Run

NATIVE = 'native pooling'

# From timm's pretrained_cfg an export keeps the entries that hold for any weights of the network, and the license and
# origin of the weights that the run started from, but not their tag, labels or sizes.
OF_THE_NETWORK = ('first_conv', 'classifier', 'fixed_input_size', 'min_input_size')
OF_THE_BEGINNING = ('license', 'origin_url', 'paper_name', 'paper_ids')


def pool_title(config: PoolConfig) -> str:
    """Returns the name of the trained pooling in tables."""
    options = any_pool_options(config.options)
    if isinstance(options, SimplePoolOptions):
        return options.pool
    return f'ROTP {options.solver}' + (' as published' if options == PoolOptions.paper(options.solver) else '')


def show_stage(run: Run, model: nn.Module, stage: int, settings: StageConfig, steps: int) -> None:
    """Prints what a stage is about to do."""
    config = run.config
    total, trained = count_parameters(model)
    micro = split_batch(config.global_batch_size, run.shard.processes, settings.accumulation)
    facts: dict[str, object] = {
        'model': f'{config.model.name}, {total:,} parameters, {trained:,} trained',
        'images': ', '.join(_images(run)),
        'batch': f'{config.global_batch_size} = {run.shard.processes} processes × {settings.accumulation} × {micro}',
        'device': run.accelerator.device.type,
        'steps': f'{settings.epochs} epochs × {steps} = {settings.epochs * steps:,}',
        'optimizer': f'{settings.optimizer}, learning rate {_rates(settings)}, {settings.schedule}',
        'precision': run.accelerator.mixed_precision,
    }
    if run.accelerator.device.type == 'cpu' and run.shard.processes == 1:
        facts['device'] = f'cpu; two processes: {ON_CPU} …'
    if stage == 2:
        paths = ', '.join(described_pools(model))
        facts['pooling'] = f'{paths}: {pool_title(config.pool)}, trains {config.stage2.train}'
    if stage == 2 and config.stage2.cache_features:
        cache = open_cache(run, model)
        facts['cache'] = f'{cache.bytes / 2**30:.2f} GiB of {cache.val.shape} maps in float16'
    run.say(report.plan(f'Stage {stage}: with {NATIVE if stage == 1 else "ROTP"}', facts))


def _images(run: Run) -> Iterator[str]:
    yield f'{len(run.train):,} for training'
    if run.held is not None:
        yield f'{len(run.held):,} for calibration'
    yield f'{len(run.val):,} for validation'
    yield f'{len(run.train.classes)} classes'
    if run.config.data.source != 'generated':
        crops = 'crops of large JPEGs at a fraction of their size (data.draft)'
        yield f'training decodes {crops if run.config.data.draft else "in full"}'


def _rates(settings: StageConfig) -> str:
    if not isinstance(settings, PoolStageConfig):
        return f'{settings.lr:g}'
    pooling = f'{settings.pool_lr:g} of the pooling'
    return pooling if settings.train == 'pool' else f'{pooling}, {settings.lr:g} of the rest'


def finish(run: Run, model: nn.Module, note: str) -> None:
    """Exports the model, prints the tables, the note below them and draws the pictures."""
    progress, output = run.progress, run.output
    loading = export(model, run.config, output / 'export', run.val.classes)  # first, in case drawing a picture fails
    run.to_device(model)
    pools = described_pools(model)
    run.say(report.summary(progress.summary, report.learned_weights(pools), len(run.val.classes)))
    if note:
        run.say(note)
    for title, metrics in progress.summary.items():
        if not math.isfinite(metrics['loss']):
            run.warn(
                f'with {title} the validation loss is not finite, so the exported model is useless. Lower the learning '
                'rate, lengthen the warm-up or clip gradients, and start a new run'
            )
    pictures = ['curves.png']
    report.plot_curves(output / 'curves.png', progress.epochs)
    if (output / 'weights.csv').is_file():  # average pooling has no weights
        save_figure(plot_weights(output / 'weights.csv'), output / 'weights.png')
        pictures.append('weights.png')
    if pools:
        pictures += _picture_where_looked(run, model)
    run.say('pictures: ' + ', '.join(str(output / name) for name in pictures))
    run.say(f'metrics:  {output / "metrics.csv"}, {output / "steps.csv"}')
    run.say(f'load it:  {loading}')


def export(model: nn.Module, config: RunConfig, directory: Path, classes: Sequence[str]) -> str:
    """Writes safetensors and config.json in timm's layout; returns the line that loads them."""
    name, kwargs = config.model.name, config.model.kwargs
    model.cpu().eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # safetensors needs it
    if described_pools(model):
        save_pretrained(
            model, directory, base=name if name.startswith(TORCHVISION) else None, model_args=kwargs, force=True
        )
        line = f"rotp_vision.load_pretrained('{directory}')"
    elif name.startswith(TORCHVISION):
        write_state_dict(model, directory.with_suffix('.safetensors'), force=True)
        return f"--model.checkpoint '{directory.with_suffix('.safetensors')}'"
    else:
        timm.models.save_for_hf(model, str(directory), model_args=kwargs, safe_serialization=True)  # type: ignore
        open_by_umask(directory / 'model.safetensors')
        line = f"timm.create_model('local-dir:{directory}', pretrained=True)"
    _describe(directory / 'config.json', model, config, classes)
    return line


def _describe(path: Path, model: nn.Module, config: RunConfig, classes: Sequence[str]) -> None:
    """Replaces timm's pretrained_cfg in an exported config.json by that of the run."""
    written = json.loads(path.read_text())
    published = written['pretrained_cfg']
    kept = OF_THE_NETWORK
    if config.model.pretrained and config.model.checkpoint is None:
        kept += OF_THE_BEGINNING
    written['pretrained_cfg'] = {
        **{key: published[key] for key in kept if key in published},
        **preprocessing(config.data, *normalization(model)),
        'num_classes': written['num_classes'],
        'label_names': list(classes),
    }
    write_atomically(path, json.dumps(written, indent=2))


def describe_positions(run: Run, positions: UsedPositions) -> str:
    """Returns a sentence about how far the plan is from uniform, over the images of all processes, or ''."""
    used, count = run.sum(sum(float(some.sum()) for some in positions.used), sum(map(len, positions.used)))
    total = max(gather(positions.total))
    return positions_sentence(used / count, total) if count else ''


def _picture_where_looked(run: Run, model: nn.Module) -> list[str]:
    """Draws looked.png, validation images with the weight of each position, if the model has one global ROT pool."""
    dataset = ValImages(run.val, run.val_transform)
    batch = collate([dataset[int(index)] for index in torch.linspace(0, len(dataset) - 1, 8)])
    images = run.prepare(batch).images
    try:
        maps = pool_maps(model, images)
    except ValueError as error:
        run.say(f'looked.png is not drawn: {error}')
        return []
    names = run.val.classes
    titles = [
        names[label] if guess == label else f'{names[label]}\nseen as {names[guess]}'
        for label, guess in zip(batch.labels.tolist(), maps.logits.argmax(1).tolist(), strict=True)
    ]
    pictures = [displayed(image, *run.norm) for image in images]
    save_figure(plot_looked(pictures, list(maps.weight), titles), run.output / 'looked.png')
    return ['looked.png']
