"""Choosing a pooling from a few hundred labelled images, and saying whether it pays."""

from rotp_vision.calibration.fit import TriedPrior, calibrate, fit_gain
from rotp_vision.calibration.report import Calibration, Row, Setting

__all__ = ['Calibration', 'Row', 'Setting', 'TriedPrior', 'calibrate', 'fit_gain']
