"""timm's own tests of models on our names, from the source release of the installed version, which pip downloads."""

import os
import subprocess
import sys
import tarfile

import pytest
import timm

import rotp_vision  # noqa: F401 - registers the models

pytestmark = pytest.mark.slow


@pytest.fixture(scope='session')
def suite(tmp_path_factory):
    """The source release of timm, unpacked outside the repository."""
    place = tmp_path_factory.mktemp('timm')
    download = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--no-binary', ':all:']
    command = ['timeout', '300', *download, f'timm=={timm.__version__}', '--dest', str(place)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f'the source release of timm {timm.__version__} could not be fetched: {done.stderr[-300:]}')
    with tarfile.open(next(place.glob('*.tar.gz'))) as archive:
        archive.extractall(place, filter='data')
    return next(place.glob('timm-*/tests'))


def run_suite(suite, names):
    """Run timm's tests of models on some names only; the plugin picks them by their exact parameter."""
    plugin = suite.parent / 'only_names.py'
    plugin.write_text(
        'import rotp_vision\n'
        'from timm.models import _registry\n'
        '_registry._deprecated_models.pop("rotp_converted")  # which hides it from list_models\n'
        f'NAMES = {sorted(names)!r}\n'
        'def pytest_collection_modifyitems(config, items):\n'
        '    named = lambda item: getattr(item, "callspec", None) and item.callspec.params.get("model_name", "")\n'
        '    keep = [item for item in items if (named(item) or "").split(".")[0] in NAMES]\n'
        '    config.hook.pytest_deselected(items=[item for item in items if item not in keep])\n'
        '    items[:] = keep\n'
    )
    # Without a network the tests that download weights cannot run; timm leaves them out where this is set.
    environment = {**os.environ, 'GITHUB_ACTIONS': 'true', 'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'only_names', 'tests/test_models.py']
    environment['PYTHONPATH'] = f'{suite.parent}{os.pathsep}{os.environ.get("PYTHONPATH", "")}'
    done = subprocess.run(command, cwd=suite.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return int(done.stdout.rsplit(' passed', 1)[0].split()[-1])


@pytest.mark.timeout(7200)
@pytest.mark.parametrize('depth', [18, 34, 50, 101, 152])
def test_every_name_passes_timms_own_tests(suite, depth):
    """9 kinds of tests, and 3 for each of the tags."""
    names = timm.list_models(f'resnet{depth}_rotp*')
    assert len(names) == 4
    assert run_suite(suite, names) >= 9 * len(names)


def test_converted_networks_pass_timms_own_tests(suite):
    """The registered name that saved conversions are loaded by; it has no tags, so 7 kinds of tests."""
    assert run_suite(suite, ['rotp_converted']) >= 7
