"""What stage 2 saves, and what loading images costs, side by side on this machine.

    python -m benchmarks.training --model resnet18 --image-size 224 --batch-size 16

The first table has the median seconds of an optimizer step (forward, backward and update) on the same synthetic images,
or on cached float16 maps. The second has the CPU milliseconds of one core per training image, from a generated JPEG of
500 × 375 pixels, ImageNet's average, to a collated batch: the least over the repetitions. Rows of a table take turns.
"""

import argparse
import io
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
from benchmarks.speed import Timing, medians
from benchmarks.tables import to_markdown
from rotp_vision.data.cache import CachedMaps
from rotp_vision.data.config import DataConfig
from rotp_vision.data.generated import generate
from rotp_vision.data.loading import Batch, TrainImages, collate
from rotp_vision.data.transforms import TrainTransform, preprocessing
from rotp_vision.data.workers import seeded
from rotp_vision.images import open_image
from rotp_vision.training.cache import PoolAndClassifier

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

    def __init__(self, files: list[bytes]):
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, *decode: Callable) -> tuple[Any, int]:
        return open_image(io.BytesIO(self.files[index]), None, *decode), 0


def generated_file(index: int) -> bytes:
    image, _ = generate(0, 0, index, 500)
    file = io.BytesIO()
    image.crop((0, 0, 500, 375)).save(file, 'JPEG', quality=90)
    return file.getvalue()


def loading_costs(files: list[bytes], size: int, repetitions: int) -> list[dict[str, Any]]:
    """Milliseconds of one core per training image, and how many times as fast as timm's transform."""
    source = Files(files)
    plain: Any = create_transform(
        **preprocessing(DataConfig(), *NORM), is_training=True, scale=(0.08, 1.0), color_jitter=0
    )

    def by_timm() -> Tensor:
        samples = []
        for index in range(len(source)):
            with seeded(0, 0, index):
                samples.append(plain(source.read(index)[0]))
        return default_collate(samples)

    def by_us(draft: bool) -> Callable[[], Tensor]:
        ours = TrainImages(source, TrainTransform(DataConfig(image_size=size, draft=draft), *NORM), 0)  # type: ignore
        return lambda: collate([ours[0, index] for index in range(len(source))]).images

    ways = {"timm's transform": by_timm, 'ours, decoded in full': by_us(False), 'ours, drafts': by_us(True)}
    least = dict.fromkeys(ways, float('inf'))
    for _ in range(repetitions):
        for name, way in ways.items():
            started = time.process_time()
            way()
            least[name] = min(least[name], (time.process_time() - started) / len(source))
    return [
        {'loading': name, 'ms': 1e3 * cost, 'times as fast': least["timm's transform"] / cost}
        for name, cost in least.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='resnet18')
    parser.add_argument('--image-size', type=int, default=224)
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--repetitions', type=int, default=7)
    args = parser.parse_args()
    print(f'{args.model}, {args.image_size} px, batch {args.batch_size}, torch {torch.__version__}')
    print(to_markdown(compare_steps(args)))
    torch.set_num_threads(1)
    files = [generated_file(index) for index in range(64)]
    print(to_markdown(loading_costs(files, args.image_size, args.repetitions)))


def compare_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
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
        cached = CachedMaps(Path(directory), 'train0', batch, maps.shape[1:])
        shards = range(cached.num_shards)
        parts = (indices for shard in shards for indices in cached.batches(shard, batch))
        list(cached.write(shards, batch, (Batch(maps[part], labels[part], []) for part in parts), nn.Identity()))

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
        times = medians(steps, Timing(time.perf_counter, args.repetitions))
    full = times['full training, native pooling']
    return [
        {'step': name, 'seconds': seconds, 'share of full training': seconds / full, 'times as fast': full / seconds}
        for name, seconds in times.items()
    ]


if __name__ == '__main__':
    main()
