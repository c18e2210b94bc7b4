"""The report of evidence.py: scores, paired differences, and the regret of each pooling."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.evidence_poolings import ALONE, AVERAGE, GEM, OURS, Outcome
from benchmarks.paper import Results
from benchmarks.tables import pivot
from rotp_vision.probing.ridge import class_weights

SAMPLES = 2000  # of the bootstrap
AREAS = {'box under 15 %': (0.0, 0.15), 'box 15 to 50 %': (0.15, 0.5), 'box over 50 %': (0.5, 1.01)}
FAMILIES = ('plain', 'natural, by box', 'other sizes', 'small objects', 'two scales', 'new classes')
SHIFTED = FAMILIES[2:]


class Setting(NamedTuple):
    """One task on one network: the score of each pooling, as a weighted sum over groups of images.

    Attributes:
        shares: (groups,) of each pooling, which add up to its score in %.
        losses: cross-entropy of each pooling, where the classifier is the network's own.
        said: the settings that were chosen.
    """

    network: str
    family: str
    task: str
    shares: dict[str, Tensor]
    losses: dict[str, float]
    said: dict[str, str]

    @property
    def scores(self) -> dict[str, float]:
        return {name: float(shares.sum()) for name, shares in self.shares.items()}

    @property
    def regrets(self) -> dict[str, float]:
        scores = self.scores
        return {name: max(scores.values()) - score for name, score in scores.items()}

    def difference(self, ours: str, theirs: str) -> tuple[float, float, float]:
        """Difference of two scores, and its 95 % interval by bootstrap over the groups."""
        shares = (self.shares[ours] - self.shares[theirs]).double()
        drawn = torch.randint(len(shares), (SAMPLES, len(shares)), generator=torch.Generator().manual_seed(0))
        low, high = shares[drawn].sum(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return float(shares.sum()), low, high


def frozen(network: str, task: str, outcomes: dict[str, Outcome]) -> Setting:
    """Top-1 of the network's own classifier; each image is its own group."""
    family = 'plain' if task == 'plain' else 'two scales' if '+' in task else 'small objects'
    family = 'other sizes' if task.isdigit() else family
    return Setting(
        network,
        family,
        f'{task} px' if '+' in task or task.isdigit() else task,
        {name: 100 * outcome.right / len(outcome.right) for name, outcome in outcomes.items()},
        {name: float(outcome.loss.mean()) for name, outcome in outcomes.items()},
        {name: outcome.setting for name, outcome in outcomes.items()},
    )


def by_area(network: str, outcomes: dict[str, Outcome], areas: Tensor) -> list[Setting]:
    """Natural images by the share of the image that the object's box covers."""
    settings = []
    for task, (low, high) in AREAS.items():
        chosen = (areas >= low) & (areas < high)
        if chosen.any():
            parts = {name: Outcome(o.loss[chosen], o.right[chosen], o.setting) for name, o in outcomes.items()}
            settings.append(frozen(network, task, parts)._replace(family='natural, by box'))
    return settings


def two_scales(network: str, both: dict[str, Outcome], large: dict[str, Outcome]) -> list[dict[str, Any]]:
    """Rows of the small size alone, the large size alone and both as one set; differences ± standard errors."""
    small = both[AVERAGE]
    judged = {('224 px alone', AVERAGE): small}
    judged |= {('384 px alone', name): outcome for name, outcome in large.items()}
    judged |= {('both', name): both[name] for name in both if name not in (AVERAGE, ALONE)}
    rows = []
    for (seen, name), outcome in judged.items():
        difference = 100 * (outcome.right - small.right)
        error = float(difference.std()) / len(difference) ** 0.5
        rows.append(
            {'network': network, 'sizes': seen, 'pooling': name, 'top-1 %': f'{100 * float(outcome.right.mean()):.1f}'}
            | {'− 224 px alone': '' if outcome is small else f'{float(difference.mean()):+.1f} ± {error:.1f}'}
            | {'cross-entropy': f'{float(outcome.loss.mean()):.3f}', 'setting': outcome.setting}
        )
    return rows


def of_classes(network: str, dataset: str, found: dict[str, Any], labels: int) -> Setting:
    """Balanced accuracy of new classes, the mean over the splits, by group."""
    runs = [run for run in found['runs'] if run['labels'] == labels]
    _, members = found['groups'].unique(return_inverse=True)
    shares: dict[str, Tensor] = {}
    for run in runs:
        weights = class_weights(found['targets'][run['judged']])
        for name, right in run['right'].items():
            total = shares.setdefault(name, torch.zeros(int(members.max()) + 1, dtype=torch.float64))
            total.index_add_(0, members[run['judged']], (100 / len(runs) * weights * right).double())
    said = {name: '; '.join(run['setting'][name] for run in runs) for name in runs[0]['setting']}
    return Setting(network, 'new classes', f'{dataset}, {labels} labels', shares, {}, said)


def write(results: Results, settings: Sequence[Setting], scales: Sequence[dict[str, Any]]):
    """Write the tables and the figure."""
    if not settings:
        return
    names = _by_regret(settings)
    rows = [
        {'network': s.network, 'family': s.family, 'task': s.task, 'pooling': name, 'score': s.scores[name]}
        | {'regret': s.regrets[name], 'cross-entropy': s.losses.get(name, ''), 'setting': s.said.get(name, '')}
        for s in settings
        for name in s.scores
    ]
    tables = {}
    for network in dict.fromkeys(s.network for s in settings):
        scores = [row | {'shown': f'{row["score"]:.1f}'} for row in rows if row['network'] == network]
        tables[f'scores_{network.split("-")[0].lower()}'] = pivot(scores, ['task'], 'pooling', 'shown')
    losses = [r | {'shown': f'{r["cross-entropy"]:.3f}'} for r in rows if r['cross-entropy'] != '']
    if losses:
        tables['losses'] = pivot(losses, ['network', 'task'], 'pooling', 'shown')
    tables['differences'] = [
        {'network': s.network, 'task': s.task, 'ours %': f'{s.scores[OURS]:.1f}'}
        | {
            f'− {name}': _interval(*s.difference(OURS, name))
            for name in (AVERAGE, GEM, 'GeM with q0', 'max', 'softmax')
        }
        | {'chosen': s.said[OURS]}
        for s in settings
    ]
    tables['regret'] = _regret_table(settings, names)
    results.table('tasks', rows, **tables)
    results.tables['verdict'] = '\n'.join(f'- {line}' for line in verdict(settings)) + '\n'
    if scales:
        results.table('two_scales', scales)
    results.figure('regret', draw(settings, names))


def verdict(settings: Sequence[Setting]) -> list[str]:
    """Whether ours has the least mean regret, is ever the worst, and what it gains over average, in words."""
    whole = {name: regret for name, regret in _mean_regret(settings).items() if all(name in s.scores for s in settings)}
    ranks = sorted(whole, key=whole.__getitem__)
    worst = [f'{s.network}, {s.task}' for s in settings if max(s.regrets, key=s.regrets.__getitem__) == OURS]
    used = [s for s in settings if s.family in SHIFTED]
    lines = [
        f'Mean regret over {len(settings)} settings: '
        + ', '.join(f'{name} {whole[name]:.2f}' for name in ranks)
        + f'. Ours is number {ranks.index(OURS) + 1} of {len(ranks)}.',
        f'Ours is the worst in {len(worst)} of them{": " + "; ".join(worst) if worst else ""}.',
    ]
    if used:
        gains = torch.tensor([s.scores[OURS] - s.scores[AVERAGE] for s in used])
        pairs = zip(used, gains.tolist(), strict=True)
        below = [f'{s.network}, {s.task} ({gain:+.1f})' for s, gain in pairs if gain < 0]
        lines.append(
            f'Over the {len(used)} settings with shifted images or new classes ours gains {gains.mean():+.2f} points '
            f'on average pooling (from {gains.min():+.1f} to {gains.max():+.1f})'
            + (f'; below it: {"; ".join(below)}.' if below else '; it is nowhere below it.')
        )
        others = {name: _mean([s.scores[name] - s.scores[AVERAGE] for s in used]) for name in ranks if name != OURS}
        lines.append(
            'The others gain ' + ', '.join(f'{name} {others[name]:+.2f}' for name in others if name != AVERAGE) + '.'
        )
    return lines


def _mean_regret(settings: Sequence[Setting]) -> dict[str, float]:
    """The mean over the settings that a pooling took part in."""
    names = dict.fromkeys(name for s in settings for name in s.scores)
    return {name: _mean([s.regrets[name] for s in settings if name in s.regrets]) for name in names}


def _by_regret(settings: Sequence[Setting]) -> list[str]:
    means = _mean_regret(settings)
    everywhere = [name for name in means if all(name in s.scores for s in settings)]
    return sorted(means, key=lambda name: (name not in everywhere, means[name]))


def _regret_table(settings: Sequence[Setting], names: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        row: dict[str, Any] = {'pooling': name}
        for family in FAMILIES:
            regrets = [s.regrets[name] for s in settings if s.family == family and name in s.regrets]
            row[family] = f'{_mean(regrets):.2f}' if regrets else ''
        mine = [s for s in settings if name in s.regrets]
        row['mean'] = f'{_mean([s.regrets[name] for s in mine]):.2f}'
        row['worst in'] = sum(max(s.regrets, key=s.regrets.__getitem__) == name for s in mine)
        row['settings'] = len(mine)
        rows.append(row)
    return rows


def draw(settings: Sequence[Setting], names: Sequence[str]) -> Figure:
    """The regret of each pooling by task, the mean over the networks, and over all in the last column."""
    tasks = list(dict.fromkeys(s.task for s in sorted(settings, key=lambda s: FAMILIES.index(s.family))))
    columns = [_mean_regret([s for s in settings if s.task == task]) for task in tasks] + [_mean_regret(settings)]
    values = torch.tensor([[column.get(name, float('nan')) for column in columns] for name in names])
    figure = Figure(figsize=(2.2 + 0.55 * (len(tasks) + 1), 1.6 + 0.36 * len(names)), layout='constrained')
    axes = figure.subplots()
    axes.imshow(values.clamp_max(6).numpy(), cmap='YlOrRd', aspect='auto', vmin=0, vmax=8)
    for y, row in enumerate(values.tolist()):
        for x, value in enumerate(row):
            axes.text(x, y, '' if value != value else f'{value:.1f}', ha='center', va='center', fontsize=8)
    axes.axvline(len(tasks) - 0.5, color='black', linewidth=1)
    axes.set_xticks(range(len(tasks) + 1), [*tasks, 'mean'], rotation=45, ha='right', fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_title('Points behind the best pooling of each task (mean over the networks)', fontsize=10)
    return figure


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float('nan')


def _interval(value: float, low: float, high: float) -> str:
    return f'{value:+.1f} ({low:+.1f} to {high:+.1f})'
