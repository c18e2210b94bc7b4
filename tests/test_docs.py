"""Examples of docstrings run; Python blocks and commands of the pages run, or are checked as far as possible.

A page's Python blocks run one after the other, in an empty directory, with `loader` at hand: batches of a few generated
images of ten classes. `pretrained=True` leaves random weights, and large networks become small ones. A command that
trains is parsed by the script's own parser; one that installs something must name an extra that exists. A block that
cannot run stands after a comment `<!-- not run: the reason -->`.
"""

import doctest
import importlib.util
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import rotp_vision
from rotp_vision.cli import main
from rotp_vision.training.config import parse_config
from tests.test_packaging import PROJECT

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *(ROOT / 'docs').glob('*.md')])
# Small networks in place of the large ones that a page names.
SMALL = {
    'resnet50': 'test_resnet',
    'resnet50.tv_in1k': 'test_resnet',
    'tf_efficientnet_lite0': 'test_efficientnet',
    'vit_tiny_patch16_224': 'test_vit',
}
SIDES = {'multi_scale.md': 384}  # of the images of `loader`, where it matters


MODULES = [
    info.name
    for info in pkgutil.walk_packages(rotp_vision.__path__, 'rotp_vision.')
    if not info.name.endswith('__main__')
]


@pytest.mark.parametrize('name', MODULES)
def test_examples_of_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize('name', rotp_vision.__all__)
def test_public_names_have_an_example(name):
    assert '>>> ' in getattr(rotp_vision, name).__doc__


class Block(NamedTuple):
    language: str
    code: str
    reason: str  # why it is not run, or ''


def blocks(page):
    fence = r'(?:<!-- not run: ([^\n]+?) -->\n)?^```(\w+)\n(.*?)^```$'
    found = re.findall(fence, page.read_text('utf-8'), re.MULTILINE | re.DOTALL)
    return [Block(language, code, reason) for reason, language, code in found]


def commands(page):
    """The commands in the shell blocks of a page, without comments."""
    lines = (block.code.replace('\\\n', ' ') for block in blocks(page) if block.language == 'bash' and not block.reason)
    for line in '\n'.join(lines).splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index('&&') if '&&' in words else len(words)
            yield words[:end]
            words = words[end + 1 :]


def ids(page):
    return str(page.relative_to(ROOT))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty directory with the files that the pages name; nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('timm.models._builder.load_pretrained', lambda *args, **kwargs: None)
    rng = np.random.default_rng(0)
    for name in '0123456789':
        for i in range(2):
            path = tmp_path / 'val' / name / f'{i}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
    torch.save({'state_dict': timm.create_model('test_resnet', num_classes=10).state_dict()}, 'mine.pth.tar')
    return tmp_path


def test_pages_have_blocks():
    """Otherwise a fence in another spelling would go unseen."""
    for page in PAGES:
        assert page.read_text('utf-8').count('\n```') == 2 * len(blocks(page)), page
        assert {block.language for block in blocks(page)} <= {'python', 'bash', 'yaml'}, page


@pytest.mark.parametrize('page', [page for page in PAGES if any(b.language == 'python' for b in blocks(page))], ids=ids)
def test_python_runs(page, place):
    side = SIDES.get(page.name, 64)
    names = {'loader': [(torch.rand(4, 3, side, side), torch.arange(4) + 4 * i) for i in range(2)]}
    for block in blocks(page):
        if block.language == 'python' and not block.reason:
            code = re.sub(r"'(\w+)'", lambda quoted: f"'{SMALL.get(quoted[1], quoted[1])}'", block.code)
            exec(compile(code, str(page), 'exec'), names)


@pytest.mark.parametrize('page', [page for page in PAGES if list(commands(page))], ids=ids)
def test_commands_run(page, place):
    for command in commands(page):
        check(command)


def check(command):
    """Run a cheap command; of others, check that the files, modules and options exist."""
    program, *arguments = command
    if 'train_imagenet.py' in command or 'train' in command:
        check_training(command)
    elif command[:2] == ['rotp-vision', 'demo']:  # eight trainings; test_demo.py runs small ones
        assert not arguments[1:]
    elif program == 'rotp-vision':
        assert main([SMALL.get(word, word) for word in arguments]) == 0, command
    elif program == 'pip' or command[:2] == ['python', '-m']:
        check_module_or_install(command)
    elif program == '.':
        assert arguments == ['.venv/bin/activate']
    elif program in ('ruff', 'pyright', 'mkdocs', 'pytest', 'pre-commit'):
        needed = ' '.join(PROJECT['project']['optional-dependencies']['test'])
        assert program in needed or program in ('mkdocs', 'pre-commit')
    else:
        raise AssertionError(f'nobody checks {command}')


def check_training(command):
    """Check that the script knows the settings of a training run."""
    start = next(i for i, word in enumerate(command) if word in ('train_imagenet.py', 'train')) + 1
    parse_config([str(ROOT / word) if word.endswith('.yaml') else word for word in command[start:]])
    if '--config_file' in command:
        assert (ROOT / command[command.index('--config_file') + 1]).is_file()


def check_module_or_install(command):
    if 'install' in command:
        extras = {extra for word in command for extra in re.findall(r'\[(.*)\]', word)}
        assert extras <= PROJECT['project']['optional-dependencies'].keys(), command
        return
    module, arguments = command[2], command[3:]
    spec = importlib.util.find_spec(module)
    assert spec, command
    if spec.origin and spec.origin.startswith(str(ROOT)):
        source = '\n'.join(path.read_text('utf-8') for path in Path(spec.origin).parent.glob('*.py'))
        assert all(f"'{word}'" in source for word in arguments if word.startswith('--')), command


def test_commands_within_sentences_name_what_exists():
    """`python -m benchmarks.…` and `rotp-vision …` in running text."""
    for page in PAGES:
        text = page.read_text('utf-8')
        for words in re.findall(r'`(python -m [^`]*|rotp-vision [^`]*|mkdocs [^`]*)`', text):
            command = shlex.split(words.replace('…', ''))
            if command[0] == 'python':
                check_module_or_install(command)
            elif command[0] == 'rotp-vision':
                with pytest.raises(SystemExit, match='0'):
                    main([command[1], '--help'])


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r'\]\(([^)#]+)[^)]*\)', page.read_text('utf-8')):
            if '://' not in target:
                assert (page.parent / target).exists(), f'{page}: {target}'


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / 'mkdocs.yml').read_text('utf-8')
    assert [page.name for page in (ROOT / 'docs').glob('*.md') if f' {page.name}\n' not in navigation] == []


@pytest.mark.skipif(importlib.util.find_spec('mkdocs') is None, reason='pip install .[docs]')
def test_the_documentation_builds(tmp_path):
    command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--quiet', '--site-dir', str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / 'api' / 'index.html').read_text('utf-8')
    assert [name for name in rotp_vision.__all__ if f'{name}</span>' not in api] == []
