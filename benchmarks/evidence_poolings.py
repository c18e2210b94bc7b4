"""The poolings that evidence.py compares, fitted and judged on cached maps of a frozen network."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rotp_vision
from rotp_vision.layers import GeMPool2d, PoolOptions, ROTPool
from rotp_vision.surgery.multi_scale import MultiScale

AVERAGE, AVERAGE_GAIN, GEM, OURS = 'average', 'average + gain', 'GeM', 'ROTP (ours)'
ALONE = 'ROTP, no softmax or max'  # chosen among average and ROT pools that are neither
INSTALLED = 'what the tool installs'  # by `calibrate` among all poolings, or by `fit_probe`
CHUNK = 50  # images pooled at a time

Pool = Callable[[Tensor], Tensor]


def mean_max(share: float) -> Pool:
    """The mean times `share` plus the maximum times the rest."""
    return lambda sets: torch.lerp(sets.amax(2), sets.mean(2), share)


def gem(power: float, norm_power: float = 0.0) -> Pool:
    """GeM, weighted by q0 ∝ ‖x_n‖^norm_power."""
    pool = GeMPool2d(power, norm_power)
    return lambda sets: pool(sets.unsqueeze(3))


def rot(options: PoolOptions) -> Pool:
    return ROTPool(options).requires_grad_(False).pool_sets


def softmax(temperature: float) -> Pool:
    """Softmax pooling of x / rms: one iteration of Bregman ADMM."""
    return rot(PoolOptions('badmm-e', num_iters=1, step=temperature, gain='off'))


_POWERS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
# Every pooling with its candidate settings; all but plain average pooling fit a gain as well.
PEERS: dict[str, list[tuple[str, Pool]]] = {
    AVERAGE: [('', mean_max(1.0))],
    AVERAGE_GAIN: [('', mean_max(1.0))],
    'max': [('', mean_max(0.0))],
    'mean-max': [(f'mean {s:g}', mean_max(s)) for s in (0.98, 0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2)],
    GEM: [(f'p = {p:g}', gem(p)) for p in _POWERS],
    'GeM with q0': [
        (f'p = {p:g}, norm power {b:g}', gem(p, b))
        for p in (1.0, 1.5, 2.0, 3.0, 5.0)
        for b in (0.0, 1.0, 2.0, 4.0, 6.0)
    ],
    'softmax': [(f'temperature {t:g}', softmax(t)) for t in (16.0, 8.0, 5.6, 4.0, 2.8, 2.0, 1.4, 1.0, 0.5)],
    'published BADMM-E': [('', rot(PoolOptions.paper('badmm-e')))],
    'published Sinkhorn': [('', rot(PoolOptions.paper('sinkhorn')))],
}


class Outcome(NamedTuple):
    """Results of one fitted pooling on the images that judge it."""

    loss: Tensor  # (images,)
    right: Tensor  # (images,) 1.0 where the prediction is right
    setting: str


class Maps(NamedTuple):
    """Cached maps of images at one or several sizes, pooled as one set per image, and labels."""

    sizes: Sequence[Tensor]  # (images, C, H, W) for each size
    labels: Tensor

    @property
    def positions(self) -> list[int]:
        return [maps[0, 0].numel() for maps in self.sizes]

    def sets(self, index: Tensor, log_gains: Sequence[float] = ()) -> Tensor:
        """(b, C, N) sets of some images in float32, each size times its gain."""
        parts = [maps[index].float().flatten(2) for maps in self.sizes]
        factors = torch.tensor(log_gains or [0.0] * len(parts)).exp().tolist()
        return torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)], 2)


class FromMaps(nn.Module):
    """A network as a function of its last map, so that `calibrate` reads cached maps instead of images."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward_features(self, maps: Tensor) -> Tensor:
        return maps

    def forward_head(self, maps: Tensor, pre_logits: bool = False) -> Tensor:
        return self.model.forward_head(maps, pre_logits=pre_logits)  # pyright: ignore[reportCallIssue]

    def forward(self, maps: Tensor) -> Tensor:
        return self.forward_head(maps)


class MultiScaleOfMaps(MultiScale):
    """Cached maps of several sizes: its images are the positions (B, C, N, 1) of all sizes."""

    def __init__(self, model: nn.Module, positions: list[int]):
        super().__init__(FromMaps(model), positions, [1.0] * len(positions))

    def resized(self, x: Tensor) -> list[Tensor]:
        return list(x.split(self.sizes, 2))


def judge_ours(
    model: nn.Module, maps: Maps, fit: Tensor, judged: Tensor, only: Literal['', 'rotp'] = 'rotp'
) -> tuple[Outcome, str]:
    """Calibrate the pooling on some images and judge it on others; also returns the report of `calibrate`."""
    converted = rotp_vision.convert(copy.deepcopy(model))
    network = FromMaps(converted) if len(maps.sizes) == 1 else MultiScaleOfMaps(converted, maps.positions)
    batches = ((maps.sets(part).unsqueeze(3), maps.labels[part]) for part in fit.split(CHUNK))
    report = rotp_vision.calibrate(network.eval(), batches, only=only)
    setting = 'next to the mean' if report.chosen is None else str(report.chosen.setting)
    if report.chosen is not None and not only:
        setting = f'{report.chosen.name} {setting}'
    with torch.inference_mode():
        logits = torch.cat([network(maps.sets(part).unsqueeze(3)) for part in judged.split(CHUNK)])
    return outcome(logits, maps.labels[judged], setting), str(report)


def outcome(logits: Tensor, labels: Tensor, setting: str) -> Outcome:
    right = (logits.argmax(1) == labels).float()
    return Outcome(F.cross_entropy(logits, labels, reduction='none'), right, setting)


def judge_peers(
    names: Sequence[str], classifier: nn.Linear, maps: Maps, fit: Tensor, judged: Tensor
) -> dict[str, Outcome]:
    """Fit each peer's setting and gains by cross-entropy on some images, then judge it on others, once.

    With several sizes, those after the first have one of three gains relative to it; average pooling without a gain
    reads only the first.
    """
    log_gains = [(0.0,) * len(maps.sizes)]
    if len(maps.sizes) > 1:
        log_gains += [(0.0,) + (gain,) * (len(maps.sizes) - 1) for gain in (-0.3, 0.3)]
    trials: dict[str, list[tuple[float, float, int, tuple[float, ...]]]] = {name: [] for name in names}
    for size_gains in log_gains:
        candidates = {(name, number): pool for name in names for number, (_, pool) in enumerate(PEERS[name])}
        for (name, number), features in pooled(candidates, maps, fit, size_gains).items():
            trials[name].append((*_best_gain(classifier, features, maps.labels[fit]), number, size_gains))
    results = {}
    for name in names:
        _, gain, number, size_gains = min(trials[name])
        text, pool = PEERS[name][number]
        said = [text, f'gain {gain:.3g}']
        if len(maps.sizes) > 1:
            said.append('sizes times ' + ', '.join(f'{g:.2g}' for g in torch.tensor(size_gains).exp()))
        seen = maps
        if name == AVERAGE:
            gain, said, seen, size_gains = 1.0, [], Maps(maps.sizes[:1], maps.labels), (0.0,)
        features = pooled({name: pool}, seen, judged, size_gains)[name]
        with torch.inference_mode():
            logits = classifier(gain * features)
        results[name] = outcome(logits, maps.labels[judged], ', '.join(filter(None, said)))
    return results


def pooled(pools: dict[Any, Pool], maps: Maps, index: Tensor, log_gains: Sequence[float] = ()) -> dict[Any, Tensor]:
    """(images, C) features of each pool; the maps are read once."""
    # Allocate the results before the loop: between large temporary tensors they would fragment the memory.
    features = {key: torch.empty(len(index), maps.sizes[0].shape[1]) for key in pools}
    with torch.inference_mode():
        for begin in range(0, len(index), CHUNK):
            sets = maps.sets(index[begin : begin + CHUNK], log_gains)
            for key, pool in pools.items():
                features[key][begin : begin + CHUNK] = pool(sets)
    return features


def _best_gain(classifier: nn.Linear, features: Tensor, labels: Tensor) -> tuple[float, float]:
    """The least cross-entropy over gains, and its gain."""
    with torch.inference_mode():
        scores, bias = F.linear(features, classifier.weight), classifier.bias
        best, step = (float('inf'), 1.0), 0.4
        for width in (8, 4, 4, 4):  # steps of 0.4, 0.1, 0.025, 0.00625 of the logarithm
            centre = torch.tensor(best[1]).log()
            gains = (centre + step * torch.arange(-width, width + 1)).exp().tolist()
            best = min(best, *((float(F.cross_entropy(gain * scores + bias, labels)), gain) for gain in gains))
            step /= 4
    return best
