"""A probe on the tokens of a frozen network: a pooling, BatchNorm1d(affine=False) and a linear layer, trained alone.

The tokens here are generated: the class shows in one of them only, so that the mean of all sees little of it.

python examples/probe_tokens.py --epochs 40
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rotp_vision import MEAN_POOL, ROTSetPool

NUM_CLASSES, WIDTH, NUM_TOKENS = 5, 32, 64


def make_tokens(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (count, 64, 32); the first of an image lies near the direction of its class and is longer."""
    directions = torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    tokens = torch.randn(count, NUM_TOKENS, WIDTH, generator=generator)
    tokens[:, 0] = tokens[:, 0] + 2 * directions[labels]
    return tokens, labels


class Probe(nn.Module):
    """The normalisation takes the place of a search for the learning rate: features of any scale are alike to it."""

    def __init__(self, pool: ROTSetPool):
        super().__init__()
        self.pool = pool
        self.norm = nn.BatchNorm1d(WIDTH, affine=False, eps=1e-6)
        self.classify = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classify(self.norm(self.pool(tokens)))


def fit(probe: Probe, epochs: int, tokens: Tensor, labels: Tensor, generator: torch.Generator) -> Probe:
    # The handful of weights of the pooling needs larger steps than the classifier.
    groups = [{'params': [*probe.pool.parameters()], 'lr': 0.1}, {'params': [*probe.classify.parameters()]}]
    optimizer = torch.optim.AdamW([group for group in groups if group['params']], 0.01)
    for _ in range(epochs):
        for chosen in torch.randperm(len(tokens), generator=generator).split(100):
            loss = F.cross_entropy(probe(tokens[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return probe.eval()


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--epochs', type=int, default=40)
    parser.add_argument('--images', type=int, default=500)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = make_tokens(args.images, generator)
    others, answers = make_tokens(args.images, generator)
    accuracies = {}
    for name, options in (('average', MEAN_POOL), ('ROT pooling', {'start': 'paper', 'prior': 'norm'})):
        probe = fit(Probe(ROTSetPool(options, WIDTH)), args.epochs, tokens, labels, generator)
        with torch.inference_mode():
            accuracies[name] = float((probe(others).argmax(1) == answers).float().mean())
        print(f'{name}: {accuracies[name]:.3f} of other images are right')
    return accuracies


if __name__ == '__main__':
    main()
