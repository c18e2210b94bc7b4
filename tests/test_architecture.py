"""Dependencies point one way: core <- layers <- models, surgery <- training, cli."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / 'rotp_vision'
NETWORKS = {'core', 'layers', 'models', 'surgery'}
TOOLS = {'calibration', 'evaluation', 'hub', 'pictures'}
BELOW = {
    'core': set(),
    'layers': {'core'},
    'models': {'core', 'layers'},
    'surgery': {'core', 'layers', 'tables'},
    'extras': set(),
    'files': set(),
    'images': set(),
    'tables': set(),
    **dict.fromkeys(TOOLS, NETWORKS | {'extras', 'files', 'images', 'tables'}),
    'evaluation': NETWORKS | {'calibration', 'data', 'images', 'tables'},
    'embedding': NETWORKS | {'data', 'evaluation', 'files', 'hub', 'images', 'probing', 'tables'},
    'data': NETWORKS | {'files', 'images'},
    'training': NETWORKS | TOOLS | {'data', 'extras', 'files', 'images', 'tables'},
    'probing': NETWORKS | TOOLS | {'data', 'extras', 'files', 'images', 'tables'},
    'cli': NETWORKS | TOOLS | {'embedding', 'probing', 'training', 'extras', 'files', 'tables'},
    'run': {'__init__'},
    '__init__': NETWORKS | TOOLS | {'embedding', 'probing'},
}
OUTSIDE = {'core': {'torch'}, 'layers': {'torch'}}  # what the rooms without vision may import from elsewhere


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path}: imports are absolute'
            # `from rotp_vision import core` imports rotp_vision.core as much as `import rotp_vision.core` does.
            names |= {f'{node.module}.{alias.name}' for alias in node.names}
    return names


def violations(path: Path) -> list[str]:
    room = path.relative_to(PACKAGE).parts[0].removesuffix('.py')
    wrong = []
    for name in imports(path):
        root, *rest = name.split('.')
        if root == 'rotp_vision':
            if (rest or ['__init__'])[0] not in BELOW[room] | {room}:
                wrong.append(name)
        elif room in OUTSIDE and root not in OUTSIDE[room] | sys.stdlib_module_names:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize('path', sorted(PACKAGE.rglob('*.py')), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path):
    assert violations(path) == []


@pytest.mark.parametrize(
    ('room', 'line'),
    [
        ('core', 'import timm'),
        ('core', 'from rotp_vision.layers import ROTPool'),
        ('core', 'from rotp_vision import layers'),
        ('layers', 'def f():\n    from timm.layers import create_act'),
        ('layers', 'import rotp_vision.models'),
        ('surgery', 'from rotp_vision.training.config import Config'),
        ('models', 'import rotp_vision.cli'),
    ],
)
def test_wrong_direction_is_seen(room, line, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules[__name__], 'PACKAGE', tmp_path)
    path = tmp_path / room / 'module.py'
    path.parent.mkdir()
    path.write_text(line)
    assert len(violations(path)) == 1
