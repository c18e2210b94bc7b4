"""What stage 2 saves: the cost of its steps as a share of a full training step, side by side on this machine.

    python -m benchmarks.training --model resnet18 --image-size 224 --batch-size 16

A row is the median over repetitions of the seconds of one optimizer step: forward, backward and update on the same
synthetic images, or on stored float16 maps for the cache. Interleaving the repetitions lets all rows see the same load.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rotp_vision
from rotp_vision.training.cache import CachedMaps, PoolAndClassifier, shard_file, write_shard
from rotp_vision.training.data import Batch, Shard


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='resnet18')
    parser.add_argument('--image-size', type=int, default=224)
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--repetitions', type=int, default=7)
    args = parser.parse_args()
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
