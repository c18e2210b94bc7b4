"""Saving converted models in timm's format, publishing them, and loading them in one line."""

from rotp_vision.hub.card import shortened
from rotp_vision.hub.load import load_pretrained, native_of
from rotp_vision.hub.networks import TORCHVISION, build, num_classes_of, refuse_foreign
from rotp_vision.hub.save import push_to_hub, save_pretrained
from rotp_vision.hub.weights import fit_weights, read_state_dict, with_new_classifier, write_state_dict

__all__ = [
    'TORCHVISION',
    'build',
    'fit_weights',
    'load_pretrained',
    'native_of',
    'num_classes_of',
    'push_to_hub',
    'read_state_dict',
    'refuse_foreign',
    'save_pretrained',
    'shortened',
    'with_new_classifier',
    'write_state_dict',
]
