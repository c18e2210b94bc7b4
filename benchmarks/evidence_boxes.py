"""Evidence maps against the boxes of objects, part of evidence.py: do the places that speak for a class lie on it?"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.evidence_poolings import CHUNK, GEM
from benchmarks.real_data import Network, column_of, maps_of
from rotp_vision.layers import ROTPool

Box = tuple[float, float, float, float]
Boxes = dict[str, tuple[int, int, list[Box]]]  # width, height and boxes by file
CELLS = 8  # parts of a place's side, so that a box may cover a part of a place
SHARP = 8.0  # places that a map which is made as sharp as the others uses
SMALL = 0.15  # of the image, to which the largest box of a small object amounts at most


def boxes_of(network: Network, data: Path, limit: int | None) -> tuple[list[str], Boxes]:
    """Files of the network's images in their order, and width, height and boxes in pixels of each file."""
    files = column_of(network, data, 'file', limit)
    found: Boxes = {}
    with (data / 'images' / f'{network.images}_boxes.csv').open() as lines:
        for row in csv.DictReader(lines):
            size = int(row['width']), int(row['height'])
            corners = (float(row['x0']), float(row['y0']), float(row['x1']), float(row['y1']))
            found.setdefault(row['file'], (*size, []))[2].append(corners)
    return files, found


def areas_of(network: Network, data: Path, limit: int | None) -> Tensor:
    """(images,) share of the image that the largest box of each covers; NaN where there is none."""
    files, found = boxes_of(network, data, limit)

    def area(file: str) -> float:
        width, height, boxes = found.get(file, (1, 1, []))
        return max(((x1 - x0) * (y1 - y0) / (width * height) for x0, y0, x1, y1 in boxes), default=float('nan'))

    return torch.tensor([area(file) for file in files])


def coverage(network: Network, width: int, height: int, boxes: list[Box], grid: int) -> Tensor:
    """(grid, grid) share of each place of a map that boxes cover, after the network's resize and centre crop."""
    scale = network.resize / min(width, height)
    left, top = (scale * width - network.size) / 2, (scale * height - network.size) / 2
    centres = (torch.arange(grid * CELLS) + 0.5) * network.size / (grid * CELLS)
    covered = torch.zeros(grid * CELLS, grid * CELLS, dtype=torch.bool)
    for x0, y0, x1, y1 in boxes:
        across = (centres >= scale * x0 - left) & (centres <= scale * x1 - left)
        down = (centres >= scale * y0 - top) & (centres <= scale * y1 - top)
        covered |= down[:, None] & across
    return covered.float().view(grid, CELLS, grid, CELLS).mean((1, 3))


def sharpened(energy: Tensor, places: float = SHARP) -> Tensor:
    """Maps (B, N) of mass one raised to the power at which the exponential of their entropy is `places`.

    Found by bisection; a map that is zero but for fewer places stays sharper.
    """
    low, high = torch.full((len(energy), 1), -6.0), torch.full((len(energy), 1), 4.0)
    logs = energy.clamp_min(1e-12).log()
    for _ in range(40):
        middle = (low + high) / 2
        used = torch.special.entr((logs * middle.exp()).softmax(1)).sum(1, keepdim=True).exp()
        low, high = torch.where(used > places, middle, low), torch.where(used > places, high, middle)
    return (logs * high.exp()).softmax(1)


def measure(network: Network, model: nn.Module, found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Energy in the boxes and pointing game of CAM, GeM and ours on the images that judged them, as fitted on plain.

    The evidence of place n for the class c of the image is Σ_d w_cd x_dn P(n|d), P the weights of the pooling: uniform
    for CAM, x_dn^(p − 1) for GeM. What speaks against the class counts as zero.
    """
    maps, labels = maps_of(network, model, args.data, args.cache, args.limit)
    files, boxes = boxes_of(network, args.data, args.limit)
    pool = ROTPool(found['pool']['options']).requires_grad_(False)
    pool.set_weights(**found['pool']['weights'])
    power = float(found['outcomes'][GEM][2].split(',')[0].removeprefix('p = '))
    judged = torch.tensor([i for i in found['judged'].tolist() if files[i] in boxes])
    weight = model.get_classifier().weight  # pyright: ignore[reportCallIssue]
    areas, scores = areas_of(network, args.data, args.limit)[judged], defaultdict(list)
    with torch.inference_mode():
        for part in judged.split(CHUNK):
            sets = maps[part].float().flatten(2)
            wanted = weight[labels[part]].unsqueeze(2) * sets  # (B, C, N)
            powers = sets.clamp_min(1e-6).pow(power - 1)
            plans = {
                'CAM': torch.ones_like(sets) / sets.shape[2],
                GEM: powers / powers.sum(2, keepdim=True),
                'ROTP (ours)': pool.solve_sets(sets).softmax(2),
            }
            grid = maps.shape[2]
            inside = torch.stack([coverage(network, *boxes[files[i]], grid).flatten() for i in part.tolist()])
            for name, plan in plans.items():
                energy = (wanted * plan).sum(1).clamp_min(0) + 1e-12
                energy = energy / energy.sum(1, keepdim=True)
                scores[name, 'energy'].append((energy * inside).sum(1))
                scores[name, 'matched'].append((sharpened(energy) * inside).sum(1))
                scores[name, 'pointing'].append(inside.gather(1, energy.argmax(1, keepdim=True)).squeeze(1) >= 0.5)
                scores[name, 'places'].append(torch.special.entr(energy).sum(1).exp())
    rows = []
    for which, chosen in {'all': areas >= 0, f'box under {100 * SMALL:g} %': areas < SMALL}.items():
        for name in dict.fromkeys(name for name, _ in scores):
            means = {key: float(torch.cat(scores[name, key])[chosen].float().mean()) for _, key in scores}
            rows.append(
                {
                    'network': network.name,
                    'images': f'{which} ({int(chosen.sum())})',
                    'map': name,
                    'energy in box %': f'{100 * means["energy"]:.1f}',
                    f'energy at {SHARP:g} places %': f'{100 * means["matched"]:.1f}',
                    'pointing game %': f'{100 * means["pointing"]:.1f}',
                    'places used': f'{means["places"]:.1f}',
                }
            )
    return {'rows': rows}
