"""Every public name is documented, and the examples in the documentation run."""

import doctest
import importlib
import pkgutil

import pytest

import rotp_vision

MODULES = [
    info.name
    for info in pkgutil.walk_packages(rotp_vision.__path__, 'rotp_vision.')
    if not info.name.endswith('__main__')
]


@pytest.mark.parametrize('name', MODULES)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize('name', rotp_vision.__all__)
def test_public_names_are_documented(name):
    doc = getattr(rotp_vision, name).__doc__
    assert doc
    assert '>>> ' in doc, f'{name} has no example'
