"""Drawing maps over images; all pictures share colours and scales."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm, to_rgb
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

# Colours below and above the middle of a scale, which colour-blind readers can tell apart.
WEIGHT_COLOURS = ('#5e3c99', '#e66101')
EVIDENCE_COLOURS = ('#1b4f9c', '#c8102e')
# Weight of a place relative to average pooling: least, middle and most. Fixed, so that a flat map looks flat.
WEIGHT_SCALE = (0.0, 1.0, 4.0)


def displayed(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """(H, W, 3) in 0 … 1: the image as the network saw it, cropped and resized."""
    image = x.cpu().float() * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    return image.clamp(0, 1).permute(1, 2, 0).numpy()


def overlay_weight(axes: Axes, image: np.ndarray, weight: Tensor) -> ScalarMappable:
    """Draw the weight (h, w) of each place over the grey image, transparent where it equals average pooling's."""
    return overlay(axes, image, weight.cpu().float() * weight.numel(), WEIGHT_COLOURS, WEIGHT_SCALE)


def overlay(
    axes: Axes, image: np.ndarray, values: Tensor, colours: tuple[str, str], scale: tuple[float, float, float]
) -> ScalarMappable:
    """Draw a map over the grey image, the more opaque the further a value is from the middle of the scale."""
    height, width = image.shape[:2]
    grey = image @ np.array([0.299, 0.587, 0.114])
    smooth = F.interpolate(values[None, None], (height, width), mode='bilinear', align_corners=False)[0, 0].numpy()
    norm = TwoSlopeNorm(scale[1], scale[0], scale[2])
    offset = 2 * norm(smooth).filled().clip(0, 1) - 1
    layer = np.empty((height, width, 4))
    layer[..., :3] = np.where(offset[..., None] < 0, to_rgb(colours[0]), to_rgb(colours[1]))
    layer[..., 3] = 0.85 * np.abs(offset)
    axes.imshow(0.35 + 0.65 * grey, cmap='gray', vmin=0, vmax=1)
    axes.imshow(layer)
    return ScalarMappable(norm, LinearSegmentedColormap.from_list('', [colours[0], 'white', colours[1]]))


def plot_looked(images: Sequence[np.ndarray], weights: Sequence[Tensor], titles: Sequence[str]) -> Figure:
    """Images, and below each the weight of its places in the pooling.

    Args:
        images: each (H, W, 3) in 0 … 1.
        weights: each (h, w), as `pool_maps` returns them.
        titles: one per image.
    """
    figure = Figure(figsize=(1.7 * len(titles) + 0.8, 3.9), layout='constrained', dpi=120)
    panels = figure.subplots(2, len(titles), squeeze=False)
    drawn = None
    for (above, below), image, weight, title in zip(panels.T, images, weights, titles, strict=True):
        above.imshow(image)
        above.set_title(title, fontsize=8, parse_math=False)  # a $ in a name does not begin a formula
        drawn = overlay_weight(below, image, weight)
        for axes in (above, below):
            axes.set_axis_off()
    if drawn is not None:
        bar = figure.colorbar(drawn, ax=panels[1].tolist(), extend='max')
        bar.set_label('weight of a place\n(average pooling: 1)', fontsize=8)
    return figure
