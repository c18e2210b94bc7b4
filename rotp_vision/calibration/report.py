"""What calibration found, as rows, a table and a sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rotp_vision.calibration.scores import Difference
from rotp_vision.core import FeatureScale
from rotp_vision.layers import SimplePoolOptions
from rotp_vision.tables import markdown_table

TITLES = {'avg': 'A weighted mean', 'avgmax': 'Average + max', 'gem': 'GeM', 'rotp': 'ROTP'}
FEW = 200  # images


class Setting(NamedTuple):
    """A candidate: a pooling and its values."""

    pool: Literal['rotp', 'avg', 'avgmax', 'gem']
    feature_scale: FeatureScale = 'rms'  # of ROTP, as is the next
    temperature: float = 0.0
    power: float | None = None  # of GeM
    norm_power: float = 0.0  # β of the norm prior
    size_gains: tuple[float, ...] = ()  # log gains of the sizes of a `multi_scale` network; () means all zero

    def simple(self, gain: float = 1.0) -> SimplePoolOptions:
        """Options of a pooling without a plan."""
        return SimplePoolOptions(self.pool, self.power, self.norm_power, gain=gain)

    def __str__(self) -> str:
        parts = [f'scale {self.feature_scale}, temperature {self.temperature:.3g}'] if self.pool == 'rotp' else []
        parts += [f'p = {self.power:.3g}'] if self.power is not None else []
        parts += [f'norm power {self.norm_power:.2g}'] if self.norm_power else []
        gains = ', '.join(f'{math.exp(gain):.2g}' for gain in self.size_gains)
        return ', '.join(parts + ([f'sizes times {gains}'] if any(self.size_gains) else []))


MEAN = Setting('avg')


@dataclass(frozen=True)
class Row:
    """Scores of one kind of pooling, by settings and gains that were chosen on other images.

    Attributes:
        name: 'average', 'average + gain', 'GeM + gain', 'ROTP …', … .
        setting: chosen on all images.
        gain: fitted on all images.
        loss: cross-entropy.
        top1: share of right predictions; ties do not count as right.
        loss_difference: mean paired difference of the loss to average + gain, and its standard error.
        top1_difference: the same of the share of right predictions, to average pooling.
    """

    name: str
    setting: Setting
    gain: float
    loss: float
    top1: float
    loss_difference: Difference
    top1_difference: Difference


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found: `print` it, or read its rows.

    Attributes:
        path: of the pool in the model.
        num_images: how many images were used.
        average: average pooling as the network came; of a `multi_scale` network, the first size alone.
        average_gain: average pooling with a fitted gain.
        gem: GeM pooling with fitted power and gain.
        tried: the other kinds of pooling, ROTP with each prior that was tried among them.
        chosen: what was installed, with the scores of the whole rule; None if the pool was left at average pooling.
        sentence: the verdict.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> report = rotp_vision.calibrate(model, [(torch.rand(8, 3, 64, 64), torch.arange(8) % 3)])
        >>> [row.name for row in report.rows]
        ['average', 'average + gain', 'GeM + gain', 'average + max + gain', 'norm-weighted mean or GeM + gain', \
'ROTP, uniform prior', 'ROTP, norm prior']
    """

    path: str
    num_images: int
    average: Row
    average_gain: Row
    gem: Row
    tried: tuple[Row, ...]
    chosen: Row | None
    sentence: str

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.average, self.average_gain, self.gem, *self.tried)

    def table(self) -> str:
        """The rows as a Markdown table: scores on images that were not fitted, differences ± standard errors."""
        cells = [('pooling', 'settings', 'gain', 'cross-entropy', '− average + gain', 'top-1 %', '− average')]
        installed = [] if self.chosen is None else [self.chosen]
        for row in (*self.rows, *installed):
            loss = '' if row is self.average_gain else '{:+.4f} ± {:.4f}'.format(*row.loss_difference)
            top1 = '' if row is self.average else in_points(row.top1_difference)
            name = f'installed: {row.name}' if row is self.chosen else row.name
            cells.append(
                (name, str(row.setting), f'{row.gain:.3f}', f'{row.loss:.4f}', loss, f'{100 * row.top1:.1f}', top1)
            )
        return markdown_table(cells)

    def __str__(self) -> str:
        head = f'{self.path}: {self.num_images} images, each judged by choices on random halves without it'
        return f'{head}\n\n{self.table()}\n\n{self.sentence}'


def in_points(difference: Difference) -> str:
    """A difference of shares as percentage points."""
    return '{:+.1f} ± {:.1f}'.format(*(100 * value for value in difference))


def verdict(
    pays: bool, peers: Sequence[tuple[str, Difference, Difference]], images: str, name: str = 'ROTP', count: int = FEW
) -> str:
    """The sentence that `calibrate` and `verify` print, with the verdict first.

    Args:
        pays: whether the pooling is better than its peers.
        peers: other poolings, and the differences of the pooling to them in top-1 and in cross-entropy.
        images: what they were judged on.
        name: of the pooling.
        count: number of images; where they are few, the sentence says what gain they could show.
    """
    parts = []
    for peer, top1, loss in peers:
        words = '{:+.4f} ± {:.4f} of cross-entropy'.format(*loss)
        parts.append(f'{in_points(top1)} points of top-1 and {words} over {peer}')
    judged = f'{", ".join(parts)}, on {images}.' if pays else f'no clear gain ({", ".join(parts)}), on {images}.'
    sentence = f'{name} pays: {judged}' if pays else f'Keep average pooling: {name} has {judged}'
    if count < FEW:
        least = max(200 * peers[0][1][1], 300 / count)  # where none differ, up to 3 / count may (rule of three)
        sentence += f' {count} images are few: at best they show a gain of more than {least:.1f} points of top-1.'
    return sentence
