"""What converting a real network changes before any training.

    python -m benchmarks.conversion --data DIRECTORY

For each network: average pooling, the same converted with each solver and reverted, and the stem's pooling converted
too (on some of the images, as it needs them whole).
"""

import argparse
import copy

import torch
from torch import Tensor, nn

import rotp_vision
from benchmarks.evidence_poolings import FromMaps
from benchmarks.real_data import NETWORKS, Network, add_data_arguments, build, images_of, maps_of
from rotp_vision.layers import PoolOptions

WHOLE = 300  # images that go through a whole network


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_arguments(parser)
    parser.add_argument('--network', default='', help='only networks with this in their name')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for network in [network for network in NETWORKS if args.network in network.name]:
        model = build(network, args.data)
        maps, labels = maps_of(network, model, args.data, args.cache, args.limit)
        convert(network, model, maps, labels, args)


def convert(network: Network, model: nn.Module, maps: Tensor, labels: Tensor, args: argparse.Namespace):
    before = head(model, maps)
    print(f'\n{network.name}, {len(labels)} images', flush=True)
    print('\n| pooling | top-1 % | top-5 % | same prediction % | largest logit change |')
    print('| --- | --- | --- | --- | --- |')
    print(row('average (native)', before, before, labels))
    for solver in ('sinkhorn', 'badmm-e', 'badmm-q'):
        converted = rotp_vision.convert(copy.deepcopy(model), solver)
        print(row(solver, head(converted, maps), before, labels), flush=True)
        if solver == PoolOptions.solver:
            print(row('reverted', head(rotp_vision.revert(converted), maps), before, labels))
    if hasattr(model, 'maxpool'):
        images = images_of(network, args.data, WHOLE)
        x, y = torch.stack(images[:]['x']), torch.tensor(images[:]['y'])
        converted = rotp_vision.convert(copy.deepcopy(model), where='all')
        native = whole(model, x)
        print(row(f'{PoolOptions.solver}, stem too ({WHOLE} images)', whole(converted, x), native, y), flush=True)


def head(model: nn.Module, maps: Tensor) -> Tensor:
    """(images, classes) logits of the network from its last maps."""
    return whole(FromMaps(model), maps)


def whole(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(chunk.float()) for chunk in x.split(50)])


def accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> float:
    return 100 * (logits.topk(k, 1).indices == labels[:, None]).any(1).float().mean().item()


def row(pooling: str, logits: Tensor, before: Tensor, labels: Tensor) -> str:
    same = 100 * (logits.argmax(1) == before.argmax(1)).float().mean().item()
    change = (logits - before).abs().max().item()
    top1, top5 = accuracy(logits, labels), accuracy(logits, labels, 5)
    return f'| {pooling} | {top1:.2f} | {top5:.2f} | {same:.2f} | {change:.3g} |'


if __name__ == '__main__':
    main()
