"""Multiple-instance learning: a bag is positive if one of its instances is. `ROTSetPool` beside five other poolings.

python examples/mil.py                        # bags that it makes, some seconds
python examples/mil.py DIRECTORY              # the five classic sets, a quarter of an hour on two cores
python examples/mil.py DIRECTORY musk1 fox    # two of them

DIRECTORY holds musk1.csv, musk2.csv, elephant.csv, fox.csv and tiger.csv as published on
www.multipleinstancelearning.com/datasets (columns: label, bag, features), or NAME.npz with the arrays `instances`,
`bag` (of each instance) and `label` (of each bag). docs/mil.md has their origins, the protocol and the results.
"""

import argparse
import csv
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rotp_vision import ROTSetPool
from rotp_vision.files import write_atomically
from rotp_vision.tables import markdown_table

# SHA-256 of the instances (float32), the bag of each instance (int32, from 0) and the labels of the bags (int8).
PUBLISHED = {
    'musk1': '1bdb28b1dd7a3ee7b22f6138ce04ff095f6ec7bb99e3e0beb98e296dd24198cb',
    'musk2': '21fa4260063420996c9e69c49dbcbdcfdfc2fee76ee22f4e9efe92f6229c7360',
    'elephant': '1413d6d61b5d7f0909234931a411ff5c7443a01e5edcb421971e008225defd07',
    'fox': 'cdba56c474ca21f16d53e869131d744316ae89dc085f5520ba30a9b9d1e32da2',
    'tiger': 'da6ef65e28106620dbdb8667e516907b41e7d4cc55d275cc487424f67fe2ffe0',
}
FOLDS, EPOCHS, BATCH = 10, 50, 16
WIDTH, DROPOUT, DECAY = 64, 0.5, 5e-3
RATE = 5e-4 * BATCH**0.5  # 5e-4 is for single bags
POOL_RATE = 0.02  # of weights whose steps are relative changes


class Bags(NamedTuple):
    x: Tensor  # (bags, N, D) instances, padded with zeros
    mask: Tensor  # (bags, N) True where an instance exists
    labels: Tensor  # (bags,) 0 or 1
    key: Tensor | None = None  # (bags,) the instance that makes a bag positive, where known

    def pick(self, chosen: Tensor) -> 'Bags':
        """Some of the bags, padded to the largest of them."""
        size = int(self.mask[chosen].sum(1).max())
        key = None if self.key is None else self.key[chosen]
        return Bags(self.x[chosen, :size], self.mask[chosen, :size], self.labels[chosen], key)


def pad(bags: list[Tensor], labels: Tensor, key: Tensor | None = None) -> Bags:
    mask = pad_sequence([torch.ones(len(bag), dtype=torch.bool) for bag in bags], batch_first=True)
    return Bags(pad_sequence(bags, batch_first=True), mask, labels, key)


def make_bags(count: int) -> Bags:
    """Bags of 3 to 20 random instances; half of the bags have one instance that is shifted along the first feature."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    sizes = torch.randint(3, 21, (count,), generator=generator).tolist()
    key = torch.tensor([int(torch.randint(size, (), generator=generator)) for size in sizes])
    bags = [torch.randn(size, 8, generator=generator) for size in sizes]
    for bag, label, place in zip(bags, labels.tolist(), key.tolist(), strict=True):
        bag[place, 0] += 5.0 * label
    return pad(bags, labels, key)


def read_bags(directory: Path, name: str) -> Bags:
    """A published set, checked against its SHA-256."""
    if (directory / f'{name}.npz').exists():
        with np.load(directory / f'{name}.npz') as arrays:
            instances, bag, label = (arrays[key] for key in ('instances', 'bag', 'label'))
    else:
        table = np.loadtxt(directory / f'{name}.csv', delimiter=',')
        _, first, bag = np.unique(table[:, 1], return_index=True, return_inverse=True)
        instances, label = table[:, 2:], table[first, 0]
    arrays = instances.astype('<f4'), bag.astype('<i4'), label.astype('i1')
    digest = hashlib.sha256(b''.join(array.tobytes() for array in arrays)).hexdigest()
    if digest != PUBLISHED[name]:
        raise ValueError(f'{name} in {directory} is not the published set: its SHA-256 is {digest}')
    parts = torch.from_numpy(arrays[0]).split(np.bincount(bag).tolist())
    return pad(list(parts), torch.from_numpy(arrays[2]).long())


class Mean(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)


class Max(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(~mask.unsqueeze(2), -torch.inf).amax(1)


class NormWeighted(nn.Module):
    """The mean weighted by ‖x_n‖^β: the norm prior of ROTP without its plan."""

    def __init__(self):
        super().__init__()
        self.power = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return weighted(x, self.power * x.square().sum(2).clamp_min(1e-12).log() / 2, mask)


class Attention(nn.Module):
    """Attention pooling, and its gated form, as in AttentionDeepMIL (Ilse et al., 2018)."""

    def __init__(self, gated: bool):
        super().__init__()
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH) if gated else None
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.hidden(x).tanh()
        if self.gate is not None:
            hidden = hidden * self.gate(x).sigmoid()
        return weighted(x, self.score(hidden).squeeze(2), mask)


def weighted(x: Tensor, logits: Tensor, mask: Tensor) -> Tensor:
    weights = logits.masked_fill(~mask, -torch.inf).softmax(1)
    return (weights.unsqueeze(1) @ x).squeeze(1)


POOLINGS = {
    'mean': Mean,
    'max': Max,
    'norm-weighted mean': NormWeighted,
    'attention': lambda: Attention(gated=False),
    'gated attention': lambda: Attention(gated=True),
    'ROTP (default)': ROTSetPool,
    'ROTP (T = 2)': lambda: ROTSetPool({'start': 'train', 'smoothness': 2.0, 'sample_penalty': 6.0}),
}


class BagClassifier(nn.Module):
    """Instances, standardised as those of the training bags, through a network, pooled, classified."""

    def __init__(self, training: Tensor, pooling: str):
        super().__init__()
        spread = training.std(0)
        self.register_buffer('center', training.mean(0))
        self.register_buffer('scale', torch.where(spread > 0, spread, 1.0))
        self.embed = nn.Sequential(nn.Linear(training.shape[1], WIDTH), nn.ReLU(), nn.Dropout(DROPOUT))
        self.classify = nn.Linear(WIDTH, 1)
        self.pool = POOLINGS[pooling]()

    def features(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, N, WIDTH) features of the instances; the network sees those that exist."""
        features = x.new_zeros(*mask.shape, WIDTH)
        features[mask] = self.embed((x[mask] - self.center) / self.scale)
        return features

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.classify(self.pool(self.features(x, mask), mask)).squeeze(1)


def assign_folds(labels: Tensor, repetition: int) -> Tensor:
    """The fold of each bag; every fold has the same share of positive bags, up to one bag."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(repetition))
    folds = torch.empty_like(labels)
    folds[order[labels[order].argsort(stable=True)]] = torch.arange(len(labels)) % FOLDS
    return folds


def train(bags: Bags, pooling: str, seed: int) -> BagClassifier:
    """A network trained on all of the bags; networks of the same seed start alike but for their pooling."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = BagClassifier(bags.x[bags.mask], pooling)
    own = {} if isinstance(model.pool, Attention) else {'lr': POOL_RATE, 'weight_decay': 0.0}
    network = [*model.embed.parameters(), *model.classify.parameters()]
    groups = [{'params': network}, {'params': [*model.pool.parameters()]} | own]
    optimizer = torch.optim.Adam(groups, RATE, weight_decay=DECAY, fused=True)
    for _ in range(EPOCHS):
        for chosen in batches(bags.mask.sum(1), generator):
            batch = bags.pick(chosen)
            loss = F.binary_cross_entropy_with_logits(model(batch.x, batch.mask), batch.labels.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def batches(sizes: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Random batches of bags of about the same size, so that little is padded, in random order."""
    order = (sizes.log() + torch.rand(len(sizes), generator=generator) / 2).argsort()
    parts = order.tensor_split(-(-len(sizes) // BATCH))
    for i in torch.randperm(len(parts), generator=generator).tolist():
        yield parts[i]


@torch.inference_mode()
def judge(model: BagClassifier, bags: Bags) -> tuple[float, float]:
    """Accuracy, and the area under the ROC curve."""
    logits = torch.cat([model(*bags.pick(some)[:2]) for some in torch.arange(len(bags.x)).split(BATCH)])
    positive, negative = logits[bags.labels == 1, None], logits[bags.labels == 0]
    auc = (positive > negative).double().mean() + (positive == negative).double().mean() / 2
    return float(((logits > 0) == bags.labels).double().mean()), float(auc)


def cross_validate(bags: Bags, pooling: str, repetition: int) -> dict[str, str]:
    """One ten-fold cross-validation: accuracy, AUC and training accuracy, means over the folds."""
    torch.set_num_threads(1)
    start, folds = time.process_time(), assign_folds(bags.labels, repetition)
    sums = np.zeros(3)  # percentages, summed over folds
    for k in range(FOLDS):
        training, held_out = (bags.pick(one.nonzero().squeeze(1)) for one in (folds != k, folds == k))
        model = train(training, pooling, seed=FOLDS * repetition + k)
        sums += [100 * value for value in (*judge(model, held_out), judge(model, training)[0])]
    values = [f'{value:.2f}' for value in (*(sums / FOLDS), time.process_time() - start)]
    return dict(zip(('accuracy', 'auc', 'training_accuracy', 'cpu_seconds'), values, strict=True))


def run(sets: dict[str, Bags], poolings: list[str], repetitions: int, workers: int, path: Path | None) -> list[dict]:
    """The rows of all cross-validations; those that the file `path` has are not repeated, new ones are added to it."""
    rows = list(csv.DictReader(path.read_text('utf-8').splitlines())) if path and path.exists() else []
    done = {(row['set'], row['pooling'], int(row['repetition'])) for row in rows}
    jobs = [(name, pooling, i) for name in sets for i in range(repetitions) for pooling in poolings]
    jobs = [job for job in jobs if job not in done]
    arguments = [sets[job[0]] for job in jobs], [job[1] for job in jobs], [job[2] for job in jobs]
    with ProcessPoolExecutor(workers) as executor:
        results = (executor.map if workers > 1 else map)(cross_validate, *arguments)
        for (name, pooling, i), values in zip(jobs, results, strict=True):
            rows.append({'set': name, 'pooling': pooling, 'repetition': str(i)} | values)
            print(', '.join(rows[-1].values()), flush=True)
            if path:
                lines = [','.join(cells) for cells in (rows[0], *(row.values() for row in rows))]
                write_atomically(path, '\n'.join(lines) + '\n')
    return [row for row in rows if row['set'] in sets and row['pooling'] in poolings]


def tables(rows: list[dict]) -> str:
    """Accuracy, AUC and overfitting in % as Markdown: mean ± standard deviation over repetitions, and ranks."""
    sets, poolings = (list(dict.fromkeys(row[name] for row in rows)) for name in ('set', 'pooling'))
    parts = []
    for title, sign in (('accuracy', 1), ('AUC', 1), ('training minus test accuracy', -1)):
        cells = {(pooling, name): [] for pooling in poolings for name in sets}
        for row in rows:
            accuracy, auc, training = (float(row[name]) for name in ('accuracy', 'auc', 'training_accuracy'))
            value = {'accuracy': accuracy, 'AUC': auc}.get(title, training - accuracy)
            cells[row['pooling'], row['set']].append(value)
        mean = np.array([[np.mean(cells[pooling, name]) for name in sets] for pooling in poolings])
        ranks = 0.5 + sum(np.sign(sign * (other - mean)) / 2 + 0.5 for other in mean)
        text = {key: f'{np.mean(v):.1f} ± {np.std(v, ddof=min(1, len(v) - 1)):.1f}' for key, v in cells.items()}
        lines = [[title, *sets, 'mean', 'mean rank']]
        for pooling, *last in zip(poolings, mean.mean(1), ranks.mean(1), strict=True):
            lines.append([pooling, *(text[pooling, name] for name in sets), *(f'{value:.1f}' for value in last)])
        parts.append(markdown_table(lines))
    return '\n\n'.join(parts)


def heat_map(bags: Bags, pooling: str = 'ROTP (T = 2)') -> str:
    """The instances of a held-out positive bag: their weights in the pooling, and what they add to the logit."""
    folds = assign_folds(bags.labels, 0)
    model = train(bags.pick((folds != 0).nonzero().squeeze(1)), pooling, seed=0)
    bag = bags.pick(((folds == 0) & (bags.labels == 1)).nonzero()[0])
    with torch.inference_mode():
        x = model.features(bag.x, bag.mask)
        weights = model.pool.plan(x, bag.mask)[0].sum(1)  # (N,) mass of each instance, one in all
        rows = model.pool.log_plan(x, bag.mask)[0].softmax(0)  # (N, D) weights of the instances for each feature
        adds = (rows * x[0]) @ (model.pool.named_weights()['gain'] * model.classify.weight[0])  # sums to logit - bias
    lines = ['A held-out positive bag: weight of each instance, and its contribution to the logit']
    for i, (weight, add) in enumerate(zip(weights.tolist(), adds.tolist(), strict=True)):
        known = '  <- makes the bag positive' if bag.key is not None and i == int(bag.key) else ''
        lines.append(f'{i:4d} {weight:5.2f} {add:+6.2f}  {"█" * round(40 * weight)}{known}'.rstrip())
    return '\n'.join(lines)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('directory', type=Path, nargs='?', help='of the published files; without it, bags are made')
    parser.add_argument('sets', nargs='*', help='all five if none is named')
    parser.add_argument('--poolings', nargs='+', choices=POOLINGS, default=list(POOLINGS))
    parser.add_argument('--repetitions', type=int, help='of the cross-validation; 5, or 1 on made bags')
    parser.add_argument('--bags', type=int, default=64, help='how many bags to make')
    parser.add_argument('--workers', type=int, default=os.cpu_count(), help='processes of one thread each')
    parser.add_argument('--results', type=Path, help='CSV file to add to; what it has is not computed again')
    args = parser.parse_args(argv)
    sets, repetitions = {f'{args.bags} made bags': make_bags(args.bags)}, args.repetitions or 1
    if args.directory:
        sets = {name: read_bags(args.directory, name) for name in args.sets or PUBLISHED}
        repetitions = args.repetitions or 5
    rows = run(sets, args.poolings, repetitions, args.workers, args.results)
    print(f'\n{tables(rows)}\n\n{heat_map(next(iter(sets.values())))}')
    return rows


if __name__ == '__main__':
    main()
