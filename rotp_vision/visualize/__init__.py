"""Pictures of what a pooling does: where its plan puts mass, what speaks for a class, and how its weights learn."""

from rotp_vision.visualize.files import save_figure
from rotp_vision.visualize.history import plot_plans, plot_weights
from rotp_vision.visualize.maps import Evidence, PoolMaps, evidence, pool_maps
from rotp_vision.visualize.page import visualize

__all__ = ['Evidence', 'PoolMaps', 'evidence', 'plot_plans', 'plot_weights', 'pool_maps', 'save_figure', 'visualize']
