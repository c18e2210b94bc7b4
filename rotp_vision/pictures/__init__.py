"""Pictures of a pooling: the weight of each position, the evidence for a class, and the weights over epochs."""

from rotp_vision.extras import of_extra

with of_extra('train'):
    from rotp_vision.pictures.draw import displayed, plot_looked, plot_weights, save_figure
    from rotp_vision.pictures.maps import Evidence, PoolMaps, evidence, pool_maps
    from rotp_vision.pictures.page import visualize

__all__ = [
    'Evidence',
    'PoolMaps',
    'displayed',
    'evidence',
    'plot_looked',
    'plot_weights',
    'pool_maps',
    'save_figure',
    'visualize',
]
