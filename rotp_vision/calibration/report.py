"""What calibration found, as rows, a table and a sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rotp_vision.calibration.scores import Difference
from rotp_vision.core import PENALTY, FeatureScale
from rotp_vision.tables import markdown_table


class Setting(NamedTuple):
    """The values that calibration searches."""

    feature_scale: FeatureScale
    temperature: float
    power: float = 0.0  # β of the norm prior
    penalty: float = PENALTY  # α3 over the temperature, where the solver reads it
    size_gains: tuple[float, ...] = ()  # log gains of the sizes of a `multi_scale` network; the first is zero


@dataclass(frozen=True)
class Row:
    """Scores of one pooling. Each image is judged by a fit on images of the other half.

    Attributes:
        name: 'average', 'average + gain', 'GeM + gain' or 'ROTP …'.
        gain: fitted on all images, as are the other settings.
        loss: cross-entropy.
        top1: share of right predictions; ties do not count as right.
        loss_difference: mean paired difference of the loss to average + gain, and its standard error.
        top1_difference: the same of the share of right predictions, to average pooling.
        power: of GeM.
        setting: of ROTP.
    """

    name: str
    gain: float
    loss: float
    top1: float
    loss_difference: Difference
    top1_difference: Difference
    power: float | None = None
    setting: Setting | None = None

    def settings(self) -> str:
        """The fitted settings as text."""
        if self.power is not None:
            return f'p = {self.power:.3g}'
        if self.setting is None:
            return ''
        norm = f', norm power {self.setting.power:.2g}' if self.setting.power else ''
        gains = ', '.join(f'{math.exp(gain):.2g}' for gain in self.setting.size_gains)
        sizes = f', sizes times {gains}' if gains else ''
        return f'scale {self.setting.feature_scale}, temperature {self.setting.temperature:.3g}{norm}{sizes}'


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found: `print` it, or read its rows.

    Attributes:
        path: of the pool in the model.
        num_images: how many images were used.
        average: average pooling as the network came; of a `multi_scale` network, the first size alone.
        average_gain: average pooling with a fitted gain.
        gem: GeM pooling with fitted power and gain.
        tried: ROTP with each prior that was tried.
        chosen: the row of `tried` that was installed; None if the pool was left at average pooling.
        sentence: the verdict.
        trials: every setting that was tried, with its loss on all images at the best gain.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> report = rotp_vision.calibrate(model, [(torch.rand(8, 3, 64, 64), torch.arange(8) % 3)])
        >>> [row.name for row in report.rows]
        ['average', 'average + gain', 'GeM + gain', 'ROTP, uniform prior', 'ROTP, norm prior']
    """

    path: str
    num_images: int
    average: Row
    average_gain: Row
    gem: Row
    tried: tuple[Row, ...]
    chosen: Row | None
    sentence: str
    trials: tuple[tuple[Setting, float], ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.average, self.average_gain, self.gem, *self.tried)

    def table(self) -> str:
        """The rows as a Markdown table: scores on images that were not fitted, differences ± standard errors."""
        cells = [('pooling', 'settings', 'gain', 'cross-entropy', '− average + gain', 'top-1 %', '− average')]
        for row in self.rows:
            name = row.name + (' (chosen)' if row is self.chosen else '')
            loss = '' if row is self.average_gain else '{:+.4f} ± {:.4f}'.format(*row.loss_difference)
            top1 = '' if row is self.average else in_points(row.top1_difference)
            cells.append(
                (name, row.settings(), f'{row.gain:.3f}', f'{row.loss:.4f}', loss, f'{100 * row.top1:.1f}', top1)
            )
        return markdown_table(cells)

    def __str__(self) -> str:
        head = f'{self.path}: {self.num_images} images, each judged by a fit on the other half of them'
        return f'{head}\n\n{self.table()}\n\n{self.sentence}'


def in_points(difference: Difference) -> str:
    """A difference of shares as percentage points."""
    return '{:+.1f} ± {:.1f}'.format(*(100 * value for value in difference))


def verdict(pays: bool, peers: Sequence[tuple[str, Difference, Difference]], images: str) -> str:
    """The sentence that `calibrate` and `verify` print, with the verdict first.

    Args:
        pays: whether ROTP is better than its peers.
        peers: other poolings, and the differences of ROTP to them in top-1 and in cross-entropy.
        images: what they were judged on.
    """
    parts = []
    for name, top1, loss in peers:
        words = '{:+.4f} ± {:.4f} of cross-entropy'.format(*loss)
        parts.append(f'{in_points(top1)} points of top-1 and {words} over {name}')
    if pays:
        return f'ROTP pays: {", ".join(parts)}, on {images}.'
    return f'Keep average pooling: ROTP has no clear gain ({", ".join(parts)}), on {images}.'
