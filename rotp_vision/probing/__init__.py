"""From a folder of images to a good classifier on a frozen network, in minutes and on a CPU."""

from rotp_vision.probing.fit import ProbeResult, ProbeRow, fit_probe
from rotp_vision.probing.network import probe

__all__ = ['ProbeResult', 'ProbeRow', 'fit_probe', 'probe']
