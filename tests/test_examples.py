"""The examples run and learn, and docs/paper.md names nothing that does not exist."""

import csv
import importlib
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image

import rotp_vision

ROOT = Path(__file__).parent.parent
ROWS = [
    line.split('|')
    for line in (ROOT / 'docs' / 'paper.md').read_text().splitlines()
    if line.startswith('| ') and '::' in line
]


def test_bags(tmp_path, capsys):
    main, results = runpy.run_path(str(ROOT / 'examples' / 'mil.py'))['main'], tmp_path / 'results.csv'
    arguments = ['--bags', '32', '--workers', '1', '--results', str(results), '--poolings', 'mean']
    (mean,) = main(arguments)
    mean_again, rotp = main([*arguments, 'ROTP (T = 2)'])  # reads the first row
    assert mean_again == mean
    assert float(rotp['accuracy']) > 70  # 50 by chance
    assert float(rotp['auc']) > float(mean['auc']) + 5
    shown = [line for line in capsys.readouterr().out.splitlines() if 'makes the bag positive' in line]
    assert float(shown[-1].split()[1]) > 0.3  # the weight of the one of twelve that counts


def test_page_has_the_tables_of_the_results():
    example = runpy.run_path(str(ROOT / 'examples' / 'mil.py'))
    rows = list(csv.DictReader((ROOT / 'examples' / 'mil.csv').read_text().splitlines()))
    assert len(rows) == 5 * 7 * 5
    assert example['tables'](rows) in (ROOT / 'docs' / 'mil.md').read_text()


def test_published_bags(tmp_path):
    """Either format is read, and other content is refused."""
    example = runpy.run_path(str(ROOT / 'examples' / 'mil.py'))
    instances, bag, label = np.eye(3, dtype=np.float32), np.array([0, 0, 1]), np.array([1, 0])
    np.savez(tmp_path / 'fox.npz', instances=instances, bag=bag, label=label)
    np.savetxt(tmp_path / 'tiger.csv', np.column_stack([label[bag], bag + 7, instances]), delimiter=',')
    for name in ('fox', 'tiger'):
        with pytest.raises(ValueError, match='is not the published set') as refused:
            example['read_bags'](tmp_path, name)
        example['PUBLISHED'][name] = str(refused.value).split()[-1]
        bags = example['read_bags'](tmp_path, name)
        assert bags.labels.tolist() == [1, 0]
        assert bags.x[bags.mask].tolist() == instances.tolist()
    assert example['PUBLISHED']['fox'] == example['PUBLISHED']['tiger']


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


def test_search(tmp_path, capsys):
    pytest.importorskip('faiss')
    for k in range(4):
        Image.fromarray(np.random.default_rng(k).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(
            tmp_path / f'{k}.png'
        )
    embedder = rotp_vision.Embedder(timm.create_model('test_resnet'))
    rotp_vision.embed_folder(embedder, tmp_path, tmp_path / 'vectors', workers=0, progress=False)
    main = runpy.run_path(str(ROOT / 'examples' / 'search.py'))['main']
    assert main([str(tmp_path / 'vectors'), str(tmp_path / '2.png'), '--count', '2'])[0] == '2.png'
    assert capsys.readouterr().out.splitlines()[0] == '1.000  2.png'
