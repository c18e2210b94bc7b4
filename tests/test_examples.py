"""The examples run and learn, and docs/paper.md names nothing that does not exist."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = [
    line.split('|')
    for line in (ROOT / 'docs' / 'paper.md').read_text().splitlines()
    if line.startswith('| ') and '::' in line
]


def test_bags():
    main = runpy.run_path(str(ROOT / 'examples' / 'mil.py'))['main']
    assert main(['--bags', '200', '--epochs', '20']) > 0.85  # one half by chance


def test_probe_on_tokens():
    main = runpy.run_path(str(ROOT / 'examples' / 'probe_tokens.py'))['main']
    accuracies = main(['--images', '300', '--epochs', '20'])
    assert accuracies['ROT pooling'] > accuracies['average'] > 0.2


@pytest.mark.parametrize('row', ROWS, ids=lambda row: row[1].strip())
def test_paper_page_names_what_exists(row):
    _, _, _, code, test, _ = row
    (name,), (place,) = re.findall('`(.*?)`', code), re.findall('`(.*?)`', test)
    module, parts = 'rotp_vision', name.split('.')[1:]
    found = importlib.import_module(module)
    for i, part in enumerate(parts):
        if not hasattr(found, part):
            found = importlib.import_module('.'.join([module, *parts[: i + 1]]))
        else:
            found = getattr(found, part)
    assert found is not None
    file, function = place.split('::')
    assert f'def {function}(' in (ROOT / file).read_text()


def test_paper_page_covers_what_the_paper_has():
    text = '\n'.join(row[1] for row in ROWS)
    for item in ('Theorem 1', 'Proposition 1', 'Proposition 2', 'Algorithm 1', 'Algorithm 2', 'eq. uotp', 'eq. hrotp'):
        assert item in text
