"""What is installed: the wheel, what it needs, and what it imports."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import rotp_vision

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip('tomli')

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))


def python(code, *arguments, **kwargs):
    """Run Python code in a process of its own; its output."""
    command = [sys.executable, '-c', code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_layers_need_torch_alone():
    python(
        'import sys\n'
        "for name in ('timm', 'torchvision', 'PIL', 'safetensors', 'huggingface_hub', 'matplotlib', 'rich'):\n"
        '    sys.modules[name] = None  # importing it is an error\n'
        'import torch\n'
        'from rotp_vision.layers import GlobalROTPool2d\n'
        "assert GlobalROTPool2d('sinkhorn')(torch.rand(2, 4, 3, 3)).shape == (2, 4)\n"
        'import rotp_vision\n'
        'assert rotp_vision.ROTSetPool and rotp_vision.core\n'
    )


def test_the_models_are_registered_whichever_is_imported_first():
    """Also where one of our modules imports timm: it is half imported when the models are registered."""
    python(
        'import sys\n'
        'import rotp_vision\n'
        'from rotp_vision.surgery import convert\n'
        'import timm\n'
        "assert timm.is_model('resnet18_rotp') and timm.is_model('rotp_converted')\n"
        "missing = {'matplotlib', 'rich', 'accelerate', 'datasets', 'jsonargparse'} & set(sys.modules)\n"
        'assert not missing, missing\n'
        'import rotp_vision.cli\n'
        "missing = {'matplotlib', 'rich', 'accelerate', 'datasets', 'jsonargparse'} & set(sys.modules)\n"
        'assert not missing, missing\n'
    )


def test_public_names():
    assert set(rotp_vision.__all__) <= set(dir(rotp_vision))
    assert all(
        callable(getattr(rotp_vision, n)) for n in [*rotp_vision.__all__, 'visualize'] if not n.endswith('_POOL')
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rotp_vision.nothing  # noqa: B018


def test_what_lacks_an_extra_names_it():
    python(
        'import sys\n'
        "sys.modules['matplotlib'] = None\n"
        'try:\n'
        '    import rotp_vision.pictures\n'
        'except ModuleNotFoundError as error:\n'
        '    assert str(error).endswith("pip install \'rotp_vision[train]\' installs it"), error\n'
        'else:\n'
        "    raise AssertionError('no error')\n"
    )


def test_one_version_everywhere():
    assert 'version' in PROJECT['project']['dynamic']
    changelog = (ROOT / 'CHANGELOG.md').read_text('utf-8')
    version, date = re.search(r'^## (\S+) \((.*)\)$', changelog, re.MULTILINE).groups()
    assert version == rotp_vision.__version__
    assert re.fullmatch(r'\d{4}-\d\d-\d\d|unreleased', date)


def test_a_plain_install_is_light():
    names = {re.match(r'[\w-]+', line)[0] for line in PROJECT['project']['dependencies']}
    assert names - {'huggingface_hub', 'numpy', 'tqdm'} == {'torch', 'torchvision', 'timm', 'safetensors', 'pillow'}


def test_the_citation_is_complete():
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text('utf-8'))
    assert {'cff-version', 'message', 'title', 'authors'} <= citation.keys()
    assert [author['family-names'] for author in citation['preferred-citation']['authors']] == ['Xu', 'Cheng']


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    place = tmp_path_factory.mktemp('wheel')
    build = 'import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))'
    return place / python(build, str(place), cwd=ROOT).splitlines()[-1]


def test_the_wheel_holds_what_it_should(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    package = {name.removeprefix('rotp_vision/') for name in names if name.startswith('rotp_vision/')}
    sources = {str(path.relative_to(ROOT / 'rotp_vision')) for path in (ROOT / 'rotp_vision').rglob('*.py')}
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / 'configs').rglob('*.yaml')}
    assert package == sources | configs | {'py.typed', 'train_imagenet.py'}
    assert wheel.name == f'rotp_vision-{rotp_vision.__version__}-py3-none-any.whl'


def test_the_wheel_trains_in_an_empty_directory(wheel, tmp_path):
    target, empty = tmp_path / 'target', tmp_path / 'empty'
    empty.mkdir()
    install = [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index', '--target', target, wheel]
    subprocess.run(install, check=True)
    assert (target / 'bin' / 'rotp-vision').is_file()
    environment = os.environ | {'PYTHONPATH': str(target)}
    code = (
        'import sys, rotp_vision.cli\n'
        'assert rotp_vision.__file__.startswith(sys.argv[1]), rotp_vision.__file__\n'
        "assert rotp_vision.cli.main(['train', '--config', 'demo', '--dry-run']) == 0\n"
    )
    shown = python(code, str(target), cwd=empty, env=environment)
    assert 'Stage 1' in shown
    assert not list(empty.iterdir())
