"""New classes on a frozen network: what `fit_probe` chooses from few labels, judged on groups that it has not seen.

    python -m benchmarks.probe --data DIRECTORY

For each set of images the groups are dealt to five parts. Each part is judged once, by what was fitted on a few labels
a class from the other four: so every image is judged exactly once. Every pooling gets the same classifier, and the
parameters that cross-validation on the labelled images chooses.
"""

import argparse
import importlib.util
import io
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Image as Undecoded
from datasets import load_dataset
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torchvision import transforms
from tqdm import tqdm

from rotp_vision.probing import fit_probe
from rotp_vision.probing.fit import balanced_difference, balanced_mean, pooled_features
from rotp_vision.probing.ridge import RidgeFolds, assign_folds

PARTS = 5
CHOICE = "probe's choice"


class Task(NamedTuple):
    """A set of images, and how many of each class are labelled."""

    images: str
    labels: int


TASKS = [Task('foda15', 20), Task('magnetic_tile6', 20), Task('cub25', 15)]
NETWORKS: dict[str, tuple[str, Any]] = {
    'resnet50': ('resnet50_v1_in1k', ((123.68 / 255, 116.779 / 255, 103.939 / 255), (0.229, 0.224, 0.225))),
    'tf_efficientnet_lite0': ('efficientnet_lite0_in1k', ((0.5,) * 3, (0.5,) * 3)),
}


def maps_of(network: str, images: str, data: Path, cache: Path) -> dict[str, Tensor]:
    """`maps`, `targets` and `groups` of all images of a set, from the cache or computed."""
    file = cache / f'{images}_{network}.safetensors'
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        start = time.process_time()
        save_file(_computed(network, images, data), file)
        print(f'computed {file.name} in {(time.process_time() - start) / 60:.1f} minutes of one core')
    return load_file(file)


@torch.inference_mode()
def _computed(network: str, images: str, data: Path) -> dict[str, Tensor]:
    spec = importlib.util.spec_from_file_location('builders', data / 'builders.py')
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    builder, normalization = NETWORKS[network]
    model = getattr(module, builder)().eval()
    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
    transform = transforms.Compose([*steps, transforms.Normalize(*normalization)])
    rows: Any = load_dataset('parquet', data_files=str(data / 'images' / f'{images}.parquet'), split='train')
    rows = rows.cast_column('image', Undecoded(decode=False))
    maps = []
    for first in tqdm(range(0, len(rows), 32), f'{network} on {images}'):
        batch = rows[first : first + 32]['image']
        pixels = [transform(Image.open(io.BytesIO(image['bytes'])).convert('RGB')) for image in batch]
        maps.append(model.forward_features(torch.stack(pixels)).half())
    kept = torch.cat(maps)
    if images == 'magnetic_tile6':
        groups = near_duplicates(kept.float().mean((2, 3)))
    else:
        groups = torch.from_numpy(np.unique(rows['group'], return_inverse=True)[1])
    return {'maps': kept, 'targets': torch.tensor(rows['label']), 'groups': groups}


def near_duplicates(features: Tensor, cosine: float = 0.985) -> Tensor:
    """Groups of images that are linked by features with a larger cosine."""
    unit = F.normalize(features, dim=1)
    linked = unit @ unit.T > cosine
    groups = torch.arange(len(features))
    while True:
        merged = torch.where(linked, groups[None], len(features)).amin(1)
        if torch.equal(merged, groups):
            return groups
        groups = merged


def labelled(targets: Tensor, allowed: Tensor, labels: int, seed: int) -> Tensor:
    """Indices of `labels` images of each class, drawn from those allowed."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for target in targets.unique():
        mine = ((targets == target) & allowed).nonzero().squeeze(1)
        chosen.append(mine[torch.randperm(len(mine), generator=generator)[:labels]])
    return torch.cat(chosen)


def judge(maps: Tensor, targets: Tensor, groups: Tensor, labels: int) -> tuple[dict[str, Tensor], list[str]]:
    """(n,) right predictions by pooling, each image judged in the part that was held out, and what was chosen."""
    parts = assign_folds(targets, groups, PARTS)
    num_classes = int(targets.max()) + 1
    right: dict[str, Tensor] = {}
    chosen = []
    for part in range(PARTS):
        fitted = labelled(targets, parts != part, labels, seed=part)
        others = (parts == part).nonzero().squeeze(1)
        result = fit_probe(maps[fitted], targets[fitted], groups[fitted])
        predictions = {CHOICE: result.predict(maps[others])}
        for row in result.rows:
            one_fold = torch.zeros_like(fitted)
            features = pooled_features(maps[fitted], row.pooling, None)
            classifier = RidgeFolds(features, targets[fitted], one_fold, num_classes).classifier()
            predictions[row.name] = classifier(pooled_features(maps[others], row.pooling, None)).argmax(1)
        for name, predicted in predictions.items():
            right.setdefault(name, torch.empty(len(targets)))[others] = (predicted == targets[others]).float()
        chosen.append(f'{result.chosen.name} {result.chosen.setting}'.strip())
    return right, chosen


def report(name: str, right: dict[str, Tensor], targets: Tensor, groups: Tensor, chosen: list[str]) -> str:
    names = [*(key for key in right if key != CHOICE), CHOICE]
    best = max(names[:-1], key=lambda key: balanced_mean(right[key], targets))
    lines = [f'\n### {name}\n', '| pooling | balanced accuracy % | − average | − best |', '| --- | --- | --- | --- |']
    for key in names:
        cells = [f'{100 * balanced_mean(right[key], targets):.1f}']
        for other in ('average', best):
            difference = balanced_difference(right[key], right[other], targets, groups)
            cells.append('' if key == other else '{:+.1f} ± {:.1f}'.format(*(100 * value for value in difference)))
        lines.append(f'| {key} | {" | ".join(cells)} |')
    return '\n'.join([*lines, '\nChosen in the five parts: ' + '; '.join(chosen) + '.'])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', type=Path, required=True, help='directory with images/, weights/ and builders.py')
    parser.add_argument('--cache', type=Path, default=Path('runs/maps'), help='where maps are kept between commands')
    parser.add_argument('--networks', nargs='+', choices=list(NETWORKS), default=['resnet50'])
    parser.add_argument('--threads', type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for network in args.networks:
        for task in TASKS:
            known = maps_of(network, task.images, args.data, args.cache)
            maps, targets, groups = (known[key] for key in ('maps', 'targets', 'groups'))
            right, chosen = judge(maps, targets, groups, task.labels)
            title = f'{network}, {task.images}, {task.labels} labels a class'
            print(report(title, right, targets, groups, chosen), flush=True)
        known = maps_of(network, TASKS[0].images, args.data, args.cache)
        start = time.process_time()
        result = fit_probe(known['maps'], known['targets'], known['groups'])
        minutes = (time.process_time() - start) / 60
        print(f'\nAll {result.num_images} images of {TASKS[0].images}, {minutes:.1f} minutes of one core:\n\n{result}')


if __name__ == '__main__':
    main()
