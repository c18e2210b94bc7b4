"""Pictures of what a pooling does: how it weighs places, what speaks for a class, and how its weights learn."""

from rotp_vision.extras import of_extra

with of_extra('train'):
    from rotp_vision.visualize.draw import displayed, plot_looked
    from rotp_vision.visualize.figures import save_figure
    from rotp_vision.visualize.history import plot_plans, plot_weights
    from rotp_vision.visualize.maps import Evidence, PoolMaps, evidence, pool_maps
    from rotp_vision.visualize.page import visualize

__all__ = [
    'Evidence',
    'PoolMaps',
    'displayed',
    'evidence',
    'plot_looked',
    'plot_plans',
    'plot_weights',
    'pool_maps',
    'save_figure',
    'visualize',
]
