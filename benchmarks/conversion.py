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
    parser.add_argument('--network', default='', help='only networks with this in their name')
    parser.add_argument('--plot', help="write calibrate's plot to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for network in [network for network in NETWORKS if args.network in network.name]:
        model = build(network, args.data)
        maps, labels = maps_of(network, model, args.data, args.cache, args.limit)
        before = head(model, maps)
        print(f'\n{network.name}, {len(labels)} images', flush=True)
        print('\n| pooling | top-1 % | top-5 % | same prediction % | largest logit change |')
        print('| --- | --- | --- | --- | --- |')
        print(row('average (native)', before, before, labels))
        for name in ('default', 'sinkhorn', 'badmm-e', 'badmm-q'):
            converted = copy.deepcopy(model)
            rotp_vision.convert(converted, **({} if name == 'default' else {'pool': name}))
            print(row(f"{name}, start='mean'", head(converted, maps), before, labels), flush=True)
            if name == 'default':
                print(row('default, reverted', head(rotp_vision.revert(converted), maps), before, labels))

        half = len(labels) // 2
        fit, judge = (maps[:half], labels[:half]), (maps[half:], labels[half:])
        report = rotp_vision.calibrate(_Head(rotp_vision.convert(model)), [(fit[0][:512].float(), fit[1][:512])])
        if args.plot:
            report.plot(args.plot)
        chosen = f'{report.best.view}, temperature {report.best.temperature:.3g}, gain {report.best.gain:.2f}'
        used = f'calibrated on {report.num_images} images, judged on {len(judge[1])} others'
        print(f'\n| {used} | cross-entropy | top-1 % |')
        print('| --- | --- | --- |')
        for pooling, logits in (
            ('average', before[half:]),
            (f'average × {report.average.gain:.2f}', head(_Gain(model, report.average.gain), judge[0])),
            (chosen, head(model, judge[0])),
        ):
            print(
                f'| {pooling} | {F.cross_entropy(logits, judge[1]):.4f} | {accuracy(logits, judge[1]):.2f} |',
                flush=True,
            )


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


def row(pooling, logits, before, labels):
    same = 100 * (logits.argmax(1) == before.argmax(1)).float().mean().item()
    change = (logits - before).abs().max().item()
    top1, top5 = accuracy(logits, labels), accuracy(logits, labels, 5)
    return f'| {pooling} | {top1:.2f} | {top5:.2f} | {same:.2f} | {change:.3g} |'


if __name__ == '__main__':
    main()
