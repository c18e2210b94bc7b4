"""What stage 2 saves, and what loading images costs, side by side on this machine.

    python -m benchmarks.training --model resnet18 --image-size 224 --batch-size 16
    python -m benchmarks.training --only loading --data FOLDER_OF_JPEGS

A row of the first table is the median over repetitions of the seconds of one optimizer step: forward, backward and
update on the same synthetic images, or on stored float16 maps for the cache. A row of the second is the CPU time of one
core per training image, from the file to a collated batch, the least over the repetitions; without `--data` the images
are generated, 500 × 375 pixels as ImageNet's are on average, and 2000 × 1500 as a camera's. Interleaving the
repetitions lets all rows see the same load.
"""

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import create_transform
from torch import Tensor, nn
from torch.utils.data import default_collate

import rotp_vision
from benchmarks.tables import to_markdown
from rotp_vision.images import open_image
from rotp_vision.training.cache import CachedMaps, PoolAndClassifier, shard_file, write_shard
from rotp_vision.training.config import DataConfig
from rotp_vision.training.data import Batch, Shard, TrainImages, TrainTransform, collate, preprocessing, seeded
from rotp_vision.training.generated import generate

NORM = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def make_step(module: nn.Module, load: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """One optimizer step on what `load` gives."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 1e-3, momentum=0.9)
    module.train()

    def step() -> None:
        images, labels = load()
        F.cross_entropy(module(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if images.is_cuda:
            torch.cuda.synchronize()

    return step


class Files:
    """JPEG files in memory, as a source of images."""

    classes = ('an image',)

    def __init__(self, files: list[bytes]):
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, *decode: Callable) -> tuple[Any, int]:
        return open_image(io.BytesIO(self.files[index]), None, *decode), 0


def generated_files(width: int, height: int, count: int) -> list[bytes]:
    files = []
    for index in range(count):
        image, _ = generate(0, 0, index, max(width, height))
        file = io.BytesIO()
        image.crop((0, 0, width, height)).save(file, 'JPEG', quality=90)
        files.append(file.getvalue())
    return files


def loading_costs(files: list[bytes], size: int, repetitions: int) -> list[dict[str, Any]]:
    """Milliseconds of one core, images a second and bytes in flight of a training image."""
    source = Files(files)
    plain: Any = create_transform(
        **preprocessing(DataConfig(), *NORM), is_training=True, scale=(0.08, 1.0), color_jitter=0
    )
    ours = {
        draft: TrainImages(source, TrainTransform(DataConfig(image_size=size, draft=draft), *NORM), 0)  # type: ignore
        for draft in (False, True)
    }

    def by_timm() -> Tensor:
        samples = []
        for index in range(len(source)):
            with seeded(0, 0, index):
                samples.append(plain(source.read(index)[0]))
        return default_collate(samples)

    ways: dict[str, Callable[[], Tensor]] = {
        "timm's transform, float32": by_timm,
        'bytes': lambda: collate([ours[False][0, index] for index in range(len(source))]).images,
        'bytes, drafts': lambda: collate([ours[True][0, index] for index in range(len(source))]).images,
    }
    least, sizes = dict.fromkeys(ways, float('inf')), dict.fromkeys(ways, 0)
    for _ in range(repetitions):
        for name, way in ways.items():
            started = time.process_time()
            images = way()
            least[name] = min(least[name], (time.process_time() - started) / len(source))
            sizes[name] = images.element_size() * images[0].numel()
    first = least["timm's transform, float32"]
    return [
        {'loading': name, 'ms': 1e3 * cost, 'images/s': 1 / cost, 'times as fast': first / cost, 'bytes': sizes[name]}
        for name, cost in least.items()
    ]


def compare_loading(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    sets = {}
    if args.data is not None:
        found = sorted(path for path in Path(args.data).rglob('*') if path.suffix.lower() in ('.jpg', '.jpeg'))
        sets[args.data] = [path.read_bytes() for path in found[:: max(1, len(found) // 128)][:128]]
    else:
        sets = {'500 × 375': generated_files(500, 375, 64), '2000 × 1500': generated_files(2000, 1500, 8)}
    for name, files in sets.items():
        mean = sum(map(len, files)) / len(files) / 1e3
        print(f'\n{len(files)} JPEGs of {name}, {mean:.0f} kB on average, to {args.image_size} px, one core')
        print(to_markdown(loading_costs(files, args.image_size, args.repetitions)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='resnet18')
    parser.add_argument('--image-size', type=int, default=224)
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--repetitions', type=int, default=7)
    parser.add_argument('--only', choices=('steps', 'loading'), help='one of the two tables')
    parser.add_argument('--data', help='folder of JPEGs to load instead of generated ones')
    args = parser.parse_args()
    if args.only != 'loading':
        compare_steps(args)
    if args.only != 'steps':
        compare_loading(args)


def compare_steps(args: argparse.Namespace) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    size, batch = args.image_size, args.batch_size
    images = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=device) % 10

    def build(train: str) -> nn.Module:
        model = timm.create_model(args.model).to(device, memory_format=torch.channels_last)
        if train != 'native':
            rotp_vision.freeze(rotp_vision.convert(model), train)  # type: ignore[arg-type]
        return model

    with tempfile.TemporaryDirectory() as directory:
        frozen = build('pool')
        maps = frozen.eval().forward_features(images).detach()
        file = shard_file(Path(directory), 'train0', Shard(0, 1))
        write_shard(file, iter([Batch(maps, labels.cpu(), [])]), lambda values: values, batch)
        cached = CachedMaps(Path(directory), 'train0', 1)

        def from_cache() -> tuple[Tensor, Tensor]:
            stored = cached[list(range(batch))]
            return stored.images.to(device).float(), stored.labels.to(device)

        steps = {
            'full training, native pooling': make_step(build('native'), lambda: (images, labels)),
            'full training, ROTP': make_step(build('all'), lambda: (images, labels)),
            'stage 2, frozen backbone': make_step(build('pool'), lambda: (images, labels)),
            'stage 2, pool and classifier': make_step(build('pool+classifier'), lambda: (images, labels)),
            'stage 2, cached features': make_step(PoolAndClassifier(frozen), from_cache),
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for repetition in range(args.repetitions + 1):
            for name, step in steps.items():
                started = time.perf_counter()
                step()
                if repetition:  # the first warms up
                    seconds[name].append(time.perf_counter() - started)
    full = statistics.median(seconds['full training, native pooling'])
    machine = f'{device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}'
    print(f'{args.model}, {size} px, batch {batch}, {machine}')
    print('| step | seconds | share of full training | times as fast |\n| --- | --- | --- | --- |')
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f'| {name} | {median:.4f} | {median / full:.3f} | {full / median:.1f} |')


if __name__ == '__main__':
    main()
