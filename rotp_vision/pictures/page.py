"""Maps of many images as a contact sheet and as an HTML page."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn

from rotp_vision.files import write_atomically
from rotp_vision.images import open_image
from rotp_vision.layers import ROTPool
from rotp_vision.pictures.draw import (
    EVIDENCE_COLOURS,
    SYMBOLS,
    displayed,
    overlay,
    overlay_weight,
    to_pixels,
    to_png,
)
from rotp_vision.pictures.maps import Evidence, PoolMaps, evidence, pool_maps


def visualize(
    model: nn.Module,
    images: Iterable[str | Path],
    output: str | Path,
    *,
    titles: Sequence[str] | None = None,
    class_index: int | None = None,
    class_names: Sequence[str] | None = None,
    data_config: Mapping[str, Any] | None = None,
    total: int | None = None,
) -> list[Path]:
    """Draw, for every image, the weight of each position and its contribution to a class, beside average pooling.

    This writes `sheet.png`, all images on one sheet, and `index.html`, a page that needs no other file, into `output`.
    Where no linear classifier follows the pool, the evidence maps are left out and the page says why.

    Args:
        model: with one global ROT pool. It runs on its device and in its dtype.
        images: image files.
        output: directory, which is created if it does not exist.
        titles: titles of the images; None for their file names.
        class_index: the class whose evidence is drawn; None for the predicted one.
        class_names: names of the classes; None for those of the model's `pretrained_cfg`, if it has any.
        data_config: what to change in timm's data config of the model: input_size, mean, std, crop_pct, …
        total: number of images that these were chosen from; the page mentions it if not all are drawn.

    Returns:
        The two files.
    """
    paths = [Path(image) for image in images]
    if not paths:
        raise ValueError('images must name at least one image file, got none')
    titles = [path.name for path in paths] if titles is None else titles
    if len(titles) != len(paths):
        raise ValueError(f'titles must name every image, got {len(titles)} for {len(paths)}')
    names = _names_of(model) if class_names is None else list(class_names)
    config = resolve_data_config(dict(data_config or {}), model=model)
    transform: Any = create_transform(**config, is_training=False)
    like = next(model.parameters())
    rows, sections = [], []
    maps = None
    for path, title in zip(paths, titles, strict=True):
        x = transform(open_image(path)).unsqueeze(0)
        maps = pool_maps(model, x.to(like))
        seen = displayed(x[0], config['mean'], config['std'])
        found = None if maps.classifier is None else evidence(maps, class_index)
        row = _draw_row(title, seen, maps, found, names)
        rows.append(row)
        sections.append(_section(title, row, maps.logits[0], names))
    assert maps is not None
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    sheet, page = output / 'sheet.png', output / 'index.html'
    write_atomically(sheet, to_png(_stacked(rows)))
    pool = model.get_submodule(maps.path)
    assert isinstance(pool, ROTPool)
    drawn = f'{len(paths)} of {total} images are drawn.' if total is not None and total != len(paths) else ''
    write_atomically(page, _page(maps, pool, sections, drawn))
    return [sheet, page]


def _names_of(model: nn.Module) -> list[str] | None:
    """The class names in the `pretrained_cfg` of the model, if it names every class."""
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    names = cfg.get('label_names') if isinstance(cfg, Mapping) else None
    return list(names) if isinstance(names, (list, tuple)) and len(names) == cfg.get('num_classes') else None


# Drawing


def _draw_row(
    title: str, image: np.ndarray, maps: PoolMaps, found: Evidence | None, names: Sequence[str] | None
) -> np.ndarray:
    """The panels of one image as pixels (H, W, 3)."""
    num_panels = 2 if found is None else 4
    height, width = image.shape[:2]
    figure = Figure(figsize=(2.9 * num_panels, 2.55 * min(height / width, 2) + 0.6), layout='constrained', dpi=100)
    panels = figure.subplots(1, num_panels)
    predicted = int(maps.logits[0].argmax())
    panels[0].imshow(image)
    # parse_math is off because a $ in a name is no formula.
    panels[0].set_title(f'{_short(title)}\npredicted: {_class_name(predicted, names)}', fontsize=9, parse_math=False)
    grid = ' × '.join(str(size) for size in maps.weight[0].shape)
    panels[1].set_title(f'weight of a position ({grid})\n1 = as average pooling', fontsize=9)
    bars = [(panels[1], overlay_weight(panels[1], image, maps.weight[0]), 'max')]
    if found is not None:
        bias, name = float(found.bias[0]), _class_name(int(found.class_index[0]), names)
        reach = max(float(part[0].abs().max()) for part in (found.rotp, found.average)) or 1.0
        for axes, part, pooling in (
            (panels[2], found.rotp[0].cpu().float(), 'ROTP'),
            (panels[3], found.average[0].cpu().float(), 'average pooling'),
        ):
            logit = float(part.sum()) + bias
            axes.set_title(f'{pooling}: logit {logit:.2f}\nevidence for {name}', fontsize=9, parse_math=False)
            bars.append((axes, overlay(axes, image, part, EVIDENCE_COLOURS, (-reach, 0.0, reach)), 'neither'))
    for axes, bar, extend in bars:
        figure.colorbar(bar, ax=axes, shrink=0.8, pad=0.02, aspect=18, extend=extend)
    for axes in panels:
        axes.set(xticks=[], yticks=[], xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    return to_pixels(figure)


def _short(text: str, length: int = 34) -> str:
    return text if len(text) <= length else f'{text[: length - 1]}…'


def _class_name(index: int, names: Sequence[str] | None) -> str:
    return f'class {index}' if names is None else _short(names[index], 20)


def _stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows one below the other, narrower ones padded with white."""
    width = max(row.shape[1] for row in rows)
    return np.concatenate(
        [np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0)), constant_values=255) for row in rows]
    )


# The page


def _section(title: str, row: np.ndarray, logits: Tensor, names: Sequence[str] | None) -> str:
    share, index = logits.float().softmax(0).topk(min(5, len(logits)))
    guesses = ' · '.join(
        f'{html.escape(_class_name(i, names))} {100 * p:.1f} %'
        for p, i in zip(share.tolist(), index.tolist(), strict=True)
    )
    picture = base64.b64encode(to_png(row)).decode()
    return (
        f'<section><h2>{html.escape(title)}</h2><p>{guesses}</p>'
        f'<img alt="maps of {html.escape(title)}" src="data:image/png;base64,{picture}"></section>'
    )


def _page(maps: PoolMaps, pool: ROTPool, sections: Sequence[str], drawn: str) -> str:
    weights = ''.join(
        f'<tr><th>{html.escape(SYMBOLS.get(name, name))}</th><td>{_values(value)}</td></tr>'
        for name, value in pool.named_weights().items()
    )
    if maps.classifier is None:
        explanation = f'No evidence maps: {html.escape(maps.obstacle)}.'
    else:
        explanation = (
            'The evidence maps show what each position adds to the logit of a class, red for it and blue against it; '
            'their sum plus the bias is the logit. The two maps of an image share one scale. The map of average '
            'pooling is that of the same network with average pooling in place of the pool.'
        )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Weights and evidence of {html.escape(maps.path)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 0; }} p {{ margin: .3rem 0; }} img {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin: 1rem 0; }} th {{ text-align: left; font-weight: normal; }}
th, td {{ padding: .15rem 1.5rem .15rem 0; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }}
</style></head><body>
<h1>Weights and evidence of {html.escape(maps.path)}</h1>
<p><code>{html.escape(type(pool).__name__)}({html.escape(pool.extra_repr())})</code></p>
<table>{weights}</table>
<p>The first map shows the weight of each position in the average, itself averaged over the features by the size of the
pooled feature. 1 is the weight under average pooling; orange is more, purple is less, on one scale in all pictures.
{explanation} {drawn}</p>
{''.join(sections)}
</body></html>
"""


def _values(value: Tensor) -> str:
    """A weight as text: its values, or their range if there are many."""
    values = value.flatten().tolist()
    if len(values) > 16:
        return f'{min(values):.4g} … {max(values):.4g} ({len(values)} values)'
    return ', '.join(f'{v:.4g}' for v in values)
