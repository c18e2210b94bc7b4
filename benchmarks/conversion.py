"""What converting a real network changes before any training, and what calibration gains on images it has not seen.

    python -m benchmarks.conversion --data ../shared/data                 # photos as the network was trained on
    python -m benchmarks.conversion --data ../shared/data --task small    # shrunk to half the side, on another photo

For each network: average pooling, the same converted with each solver and reverted, the stem's pooling converted too
(on some of the images, as it needs them whole); then `calibrate` on 500 images, judged on all others beside average
pooling, average pooling with a gain and GeM with a gain, fitted on the same 500.
"""

import argparse
import copy
import math
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rotp_vision
from benchmarks.real_data import NETWORKS, Network, add_data_arguments, build, images_of, maps_of

FITTED = 500  # images that calibrate sees
WHOLE = 300  # images that go through a whole network


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_arguments(parser)
    parser.add_argument('--network', default='', help='only networks with this in their name')
    parser.add_argument('--task', choices=['plain', 'small', 'small-sharp'], default='plain')
    parser.add_argument('--solver', default='badmm-e', help='of the pooling that is calibrated')
    parser.add_argument('--plot', help="write calibrate's plot to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for network in [network for network in NETWORKS if args.network in network.name]:
        if args.task != 'plain' and network.size < 224:
            continue
        model = build(network, args.data)
        maps, labels = maps_of(network, model, args.data, args.cache, args.limit, args.task)
        if args.task == 'plain':
            convert(network, model, maps, labels, args)
        calibrate(network, model, maps, labels, args)


def convert(network: Network, model: nn.Module, maps: Tensor, labels: Tensor, args: argparse.Namespace):
    before = head(model, maps)
    print(f'\n{network.name}, {len(labels)} images', flush=True)
    print('\n| pooling | top-1 % | top-5 % | same prediction % | largest logit change |')
    print('| --- | --- | --- | --- | --- |')
    print(row('average (native)', before, before, labels))
    for solver in ('badmm-e', 'sinkhorn', 'badmm-q'):
        converted = rotp_vision.convert(copy.deepcopy(model), solver)
        print(row(solver, head(converted, maps), before, labels), flush=True)
        if solver == 'badmm-e':
            print(row('reverted', head(rotp_vision.revert(converted), maps), before, labels))
    if hasattr(model, 'maxpool'):
        images = images_of(network, args.data, WHOLE)
        x, y = torch.stack(images[:]['x']), torch.tensor(images[:]['y'])
        converted = rotp_vision.convert(copy.deepcopy(model), where='all')
        native = whole(model, x)
        print(row(f'badmm-e, stem too ({WHOLE} images)', whole(converted, x), native, y), flush=True)


def calibrate(network: Network, model: nn.Module, maps: Tensor, labels: Tensor, args: argparse.Namespace):
    before, classifier = head(model, maps)[FITTED:], model.get_classifier()  # pyright: ignore[reportCallIssue]
    fit = [(x.float(), y) for x, y in zip(maps[:FITTED].split(100), labels[:FITTED].split(100), strict=True)]
    judged, target = maps[FITTED:], labels[FITTED:]
    started = time.perf_counter()
    report = rotp_vision.calibrate(FromMaps(rotp_vision.convert(model, args.solver)), fit)
    print(f'\n{network.name}, {args.task}: calibrated in {time.perf_counter() - started:.0f} s\n\n{report}')
    if args.plot:
        report.plot(args.plot)

    def pooled(gain: float, power: float) -> Tensor:
        means = [x.float().clamp_min(1e-6).pow(power).mean((2, 3)).pow(1 / power) for x in judged.split(100)]
        with torch.inference_mode():
            return classifier(gain * torch.cat(means))

    ours = head(model, judged)
    print(f'\n| judged on {len(target)} other images | cross-entropy | top-1 % | ours − it | ours − it, top-1 |')
    print('| --- | --- | --- | --- | --- |')
    for name, logits in {
        'average': before,
        'average + gain': pooled(report.average_gain.gain, 1.0),
        'GeM + gain': pooled(report.gem.gain, report.gem.power or 1.0),
        'ROTP as calibrated': ours,
    }.items():
        loss, right = scores(logits, target)
        our_loss, our_right = scores(ours, target)
        differences = f'{paired(our_loss - loss, 1, 4)} | {paired(our_right - right, 100, 1)}'
        print(f'| {name} | {loss.mean():.4f} | {100 * right.mean():.2f} | {differences} |', flush=True)


class FromMaps(nn.Module):
    """A network as a function of its last map, for `calibrate` to read kept maps instead of images."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, maps: Tensor) -> Tensor:
        return self.model.forward_head(maps)  # pyright: ignore[reportCallIssue]


def head(model: nn.Module, maps: Tensor) -> Tensor:
    """(images, classes) logits of the network from its last maps."""
    return whole(FromMaps(model), maps)


def whole(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(chunk.float()) for chunk in x.split(50)])


def scores(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each image, and whether its prediction is right."""
    return F.cross_entropy(logits, target, reduction='none'), (logits.argmax(1) == target).float()


def paired(difference: Tensor, scale: float, digits: int) -> str:
    error = scale * difference.std().item() / math.sqrt(len(difference))
    return f'{scale * difference.mean().item():+.{digits}f} ± {error:.{digits}f}'


def accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> float:
    return 100 * (logits.topk(k, 1).indices == labels[:, None]).any(1).float().mean().item()


def row(pooling: str, logits: Tensor, before: Tensor, labels: Tensor) -> str:
    same = 100 * (logits.argmax(1) == before.argmax(1)).float().mean().item()
    change = (logits - before).abs().max().item()
    top1, top5 = accuracy(logits, labels), accuracy(logits, labels, 5)
    return f'| {pooling} | {top1:.2f} | {top5:.2f} | {same:.2f} | {change:.3g} |'


if __name__ == '__main__':
    main()
