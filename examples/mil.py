"""Multiple instance learning: a bag is positive if one of its instances is. Bags padded with a mask, or packed.

python examples/mil.py --epochs 30
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rotp_vision import ROTSetPool


def make_bags(count: int, num_features: int, generator: torch.Generator) -> tuple[list[Tensor], Tensor]:
    """Bags of 3 to 20 random instances; half of the bags have one instance that is shifted along the first feature."""
    bags, labels = [], torch.arange(count) % 2
    for label in labels.tolist():
        size = int(torch.randint(3, 21, (), generator=generator))
        bag = torch.randn(size, num_features, generator=generator)
        bag[0, 0] += 4.0 * label
        bags.append(bag[torch.randperm(size, generator=generator)])
    return bags, labels


class BagClassifier(nn.Module):
    """Instances through a network, pooled, classified."""

    def __init__(self, num_features: int, pool: nn.Module):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(num_features, 32), nn.ReLU())
        self.pool = pool
        self.classify = nn.Linear(32, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None, lengths: list[int] | None = None) -> Tensor:
        return self.classify(self.pool(self.embed(x), mask, lengths=lengths))


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--solver', default='sinkhorn')
    parser.add_argument('--epochs', type=int, default=30)
    parser.add_argument('--bags', type=int, default=400)
    args = parser.parse_args(argv)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    bags, labels = make_bags(args.bags, 8, generator)
    held_out, answers = make_bags(args.bags, 8, generator)

    model = BagClassifier(8, ROTSetPool({'solver': args.solver, 'start': 'paper', 'prior': 'attention'}, 32))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(args.epochs):
        for chosen in torch.randperm(len(bags), generator=generator).split(50):
            some = [bags[i] for i in chosen.tolist()]
            logits = model(torch.cat(some), lengths=[len(bag) for bag in some])  # packed
            loss = F.cross_entropy(logits, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    padded = pad_sequence(held_out, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor([len(bag) for bag in held_out])[:, None]
    model.eval()
    with torch.inference_mode():
        accuracy = float((model(padded, mask).argmax(1) == answers).float().mean())  # padded: the same numbers
        plan = model.pool.plan(model.embed(padded), mask)  # (bags, instances, features)
    print(f'accuracy on other bags {accuracy:.3f}')
    print('mass of the instances of the first positive bag:', [round(m, 2) for m in plan[1].sum(1)[mask[1]].tolist()])
    return accuracy


if __name__ == '__main__':
    main()
