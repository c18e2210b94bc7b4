"""The poolings that evidence.py compares, how they are fitted to kept maps of a frozen classifier, and judged."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rotp_vision
from rotp_vision.calibration import Calibration
from rotp_vision.core import log_norm
from rotp_vision.layers import PoolOptions, ROTPool
from rotp_vision.surgery.multi_scale import MultiScale

AVERAGE, AVERAGE_GAIN, GEM, OURS = 'average', 'average + gain', 'GeM', 'ROTP (ours)'
ALONE = 'ROTP, no softmax or max'  # chosen among average and ROT pools that are neither
CHUNK = 50  # images pooled at a time

Pool = Callable[[Tensor], Tensor]


def mean(sets: Tensor) -> Tensor:
    return sets.mean(2)


def maximum(sets: Tensor) -> Tensor:
    return sets.amax(2)


def mean_max(sets: Tensor, share: float) -> Tensor:
    return torch.lerp(maximum(sets), mean(sets), share)


def gem(sets: Tensor, power: float, norm_power: float = 0.0) -> Tensor:
    """GeM; with a norm power its mean is weighted by q0 ∝ ‖x_n‖^β."""
    powers = sets.clamp_min(1e-6).pow(power)
    if not norm_power:
        return powers.mean(2).pow(1 / power)
    prior = (norm_power * log_norm(sets)).softmax(1)
    return (powers * prior.unsqueeze(1)).sum(2).pow(1 / power)


def rot(options: PoolOptions) -> Pool:
    return ROTPool(options).requires_grad_(False).pool_sets


def softmax(temperature: float) -> Pool:
    """Softmax pooling of x / rms: one module of Bregman ADMM."""
    return rot(PoolOptions('badmm-e', num_iters=1, step=temperature, gain='off'))


_POWERS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
# Every pooling with the settings among which it chooses, each with its gain where there is one to fit.
PEERS: dict[str, list[tuple[str, Pool]]] = {
    AVERAGE: [('', mean)],
    AVERAGE_GAIN: [('', mean)],
    'max': [('', maximum)],
    'mean-max': [(f'mean {s:g}', partial(mean_max, share=s)) for s in (0.98, 0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2)],
    GEM: [(f'p = {p:g}', partial(gem, power=p)) for p in _POWERS],
    'GeM with q0': [
        (f'p = {p:g}, norm power {b:g}', partial(gem, power=p, norm_power=b))
        for p in (1.0, 1.5, 2.0, 3.0, 5.0)
        for b in (0.0, 1.0, 2.0, 4.0, 6.0)
    ],
    'softmax': [(f'temperature {t:g}', softmax(t)) for t in (16.0, 8.0, 5.6, 4.0, 2.8, 2.0, 1.4, 1.0, 0.5)],
    'published BADMM-E': [('', rot(PoolOptions.paper('badmm-e')))],
    'published Sinkhorn': [('', rot(PoolOptions.paper('sinkhorn')))],
}


class Outcome(NamedTuple):
    """What one fitted pooling made of the images that judge it."""

    loss: Tensor  # (images,)
    right: Tensor  # (images,) 1.0 where the prediction is right
    setting: str


class Maps(NamedTuple):
    """Kept maps of one or several views of images, as one set an image, and labels."""

    views: Sequence[Tensor]  # (images, C, H, W) of each view
    labels: Tensor

    @property
    def places(self) -> list[int]:
        return [view[0, 0].numel() for view in self.views]

    def sets(self, index: Tensor, log_gains: Sequence[float] = ()) -> Tensor:
        """(b, C, N) sets of some images in float32, each view times its gain."""
        parts = [view[index].float().flatten(2) for view in self.views]
        factors = torch.tensor(log_gains or [0.0] * len(parts)).exp().tolist()
        return torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)], 2)


class FromMaps(nn.Module):
    """A network as a function of its last map, for `calibrate` to read kept maps instead of images."""

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
    """Several views of which the maps are kept: its images are the places (B, C, N, 1) of all views."""

    def __init__(self, model: nn.Module, places: list[int]):
        super().__init__(FromMaps(model), places, [1.0] * len(places))

    def resized(self, x: Tensor) -> list[Tensor]:
        return list(x.split(self.sizes, 2))


def calibrated(model: nn.Module, maps: Maps, index: Tensor) -> tuple[nn.Module, Calibration]:
    """The network with the default pooling as `calibrate` leaves it, as a function of maps (B, C, N, 1)."""
    converted = rotp_vision.convert(copy.deepcopy(model))
    network = FromMaps(converted) if len(maps.views) == 1 else MultiScaleOfMaps(converted, maps.places)
    batches = ((maps.sets(part).unsqueeze(3), maps.labels[part]) for part in index.split(CHUNK))
    return network.eval(), rotp_vision.calibrate(network, batches)


def judge_ours(network: nn.Module, maps: Maps, index: Tensor, report: Calibration) -> Outcome:
    setting = 'next to the mean' if report.chosen is None else report.chosen.settings()
    with torch.inference_mode():
        logits = torch.cat([network(maps.sets(part).unsqueeze(3)) for part in index.split(CHUNK)])
    return outcome(logits, maps.labels[index], setting)


def outcome(logits: Tensor, labels: Tensor, setting: str) -> Outcome:
    right = (logits.argmax(1) == labels).float()
    return Outcome(F.cross_entropy(logits, labels, reduction='none'), right, setting)


def judge_peers(
    names: Sequence[str], classifier: nn.Linear, maps: Maps, fit: Tensor, judged: Tensor
) -> dict[str, Outcome]:
    """Fit each peer's setting and gains by cross-entropy on some images, then judge it on others, once.

    Of several views the others have a gain relative to the first's, of three; average without gain sees but the first.
    """
    log_gains = [(0.0,) * len(maps.views)]
    if len(maps.views) > 1:
        log_gains += [(0.0,) + (gain,) * (len(maps.views) - 1) for gain in (-0.3, 0.3)]
    trials: dict[str, list[tuple[float, float, int, tuple[float, ...]]]] = {name: [] for name in names}
    for view_gains in log_gains:
        candidates = {(name, place): pool for name in names for place, (_, pool) in enumerate(PEERS[name])}
        for (name, place), features in pooled(candidates, maps, fit, view_gains).items():
            trials[name].append((*_best_gain(classifier, features, maps.labels[fit]), place, view_gains))
    results = {}
    for name in names:
        _, gain, place, view_gains = min(trials[name])
        text, pool = PEERS[name][place]
        said = [
            text,
            f'gain {gain:.3g}',
            'sizes times ' + ', '.join(f'{g:.2g}' for g in torch.tensor(view_gains).exp()),
        ]
        if len(maps.views) == 1:
            said.pop()
        seen = maps
        if name == AVERAGE:
            gain, said, seen, view_gains = 1.0, [], Maps(maps.views[:1], maps.labels), (0.0,)
        features = pooled({name: pool}, seen, judged, view_gains)[name]
        with torch.inference_mode():
            logits = classifier(gain * features)
        results[name] = outcome(logits, maps.labels[judged], ', '.join(filter(None, said)))
    return results


def pooled(pools: dict[Any, Pool], maps: Maps, index: Tensor, log_gains: Sequence[float] = ()) -> dict[Any, Tensor]:
    """(images, C) features by each of the pools; maps are read once."""
    # Made before the loop: small results between large temporary tensors would leave the memory in pieces.
    features = {key: torch.empty(len(index), maps.views[0].shape[1]) for key in pools}
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
