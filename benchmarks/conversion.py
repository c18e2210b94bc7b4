"""What converting a real network costs before any training, and what calibration finds.

    python -m benchmarks.conversion --data ../shared/data

For each network: average pooling, the same converted with start='mean' for each solver, the reverted network, and
the pooling that `calibrate` chooses on one half of the images, judged on the other half.
"""

import argparse
import copy

import torch
from torch.nn import functional as F

import rotp_vision
from benchmarks.real_data import NETWORKS, add_data_arguments, build, maps_of


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_arguments(parser)
    parser.add_argument('--plot', help="write calibrate's plot of the first network to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    conversion, calibration = [], []
    for network in NETWORKS:
        model = build(network, args.data)
        maps, labels = maps_of(network, model, args.data, args.cache, args.limit)
        before = head(model, maps)
        conversion.append(row(network.name, 'average (native)', before, before, labels))
        for name in ('default', 'sinkhorn', 'badmm-e', 'badmm-q'):
            converted = copy.deepcopy(model)
            rotp_vision.convert(converted, **({} if name == 'default' else {'pool': name}))
            conversion.append(row(network.name, f"{name}, start='mean'", head(converted, maps), before, labels))
        reverted = head(rotp_vision.revert(converted), maps)
        conversion.append(row(network.name, 'reverted', reverted, before, labels))

        half = len(labels) // 2
        report = rotp_vision.calibrate(
            _Head(rotp_vision.convert(model)), [(maps[:half].float(), labels[:half])], max_images=512
        )
        if args.plot and not calibration:
            report.plot(args.plot)
        gained = head(_Gain(model, report.average.gain), maps[half:])
        for pooling, logits in (
            ('average', before[half:]),
            (f'average × {report.average.gain:.2f}', gained),
            (
                f'{report.best.view}, {report.best.temperature:.3g}, gain {report.best.gain:.2f}',
                head(model, maps[half:]),
            ),
        ):
            loss, top1 = F.cross_entropy(logits, labels[half:]), accuracy(logits, labels[half:])
            calibration.append(f'| {network.name} | {pooling} | {loss:.4f} | {top1:.2f} |')
    print('\n| network | pooling | top-1 % | top-5 % | same prediction % | largest logit change |')
    print('| --- | --- | --- | --- | --- | --- |')
    print('\n'.join(conversion))
    print('\n| network | calibrated on half of the images, judged on the other | cross-entropy | top-1 % |')
    print('| --- | --- | --- | --- |')
    print('\n'.join(calibration))


class _Head(torch.nn.Module):
    """A network as a function of its last map, for `calibrate` to read kept maps instead of images."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, maps):
        return self.model.forward_head(maps)

    forward_head = forward


class _Gain:
    """A native network's head with a gain after its average pooling."""

    def __init__(self, model, gain):
        self.model, self.gain = model, gain

    def forward_head(self, maps):
        return self.model.get_classifier()(self.gain * maps.mean((2, 3)))


def head(model, maps):
    """(images, classes) logits of the network from its last maps."""
    with torch.inference_mode():
        return torch.cat([model.forward_head(chunk.float()) for chunk in maps.split(100)])


def accuracy(logits, labels, k=1):
    return 100 * (logits.topk(k, 1).indices == labels[:, None]).any(1).float().mean().item()


def row(network, pooling, logits, before, labels):
    same = 100 * (logits.argmax(1) == before.argmax(1)).float().mean().item()
    change = (logits - before).abs().max().item()
    top1, top5 = accuracy(logits, labels), accuracy(logits, labels, 5)
    return f'| {network} | {pooling} | {top1:.2f} | {top5:.2f} | {same:.2f} | {change:.3g} |'


if __name__ == '__main__':
    main()
