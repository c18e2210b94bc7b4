"""The paper's analyses at tiny size: each says what PAPER.md says, and writes its table and its plot."""

import csv
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import paper
from benchmarks.paper_analyses import PUBLISHED_SINKHORN, RUNTIME_SOLVERS
from benchmarks.tables import pivot, to_markdown

PAGE = Path(paper.__file__).parent / 'PAPER.md'


def made_up_seconds(solver, value):
    return (2 + RUNTIME_SOLVERS.index(solver)) * value


def made_up_medians(calls, repeats):
    """In place of measured times; the forward passes run nevertheless."""
    assert all(call().isfinite().all() for call in calls.values())
    return {(solver, value): made_up_seconds(solver, value) for solver, value in calls}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    results = paper.Results(tmp_path_factory.mktemp('paper'))
    paper.convergence(results, num_sets=2, num_features=8, num_samples=20, most_iters=8)
    paper.stability(results, exponents=(-4, 0, 4), seeds=(0,))
    paper.precision(results)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('benchmarks.paper_analyses._medians', made_up_medians)
        paper.runtime(results, repeats=1, iteration_counts=(4, 8), sample_counts=(5, 10))
    paper.differences(results, most_iters=64)
    return results


def rows_of(results, name):
    assert (results.output / f'{name}.md').read_text('utf-8').startswith('| ')
    with (results.output / f'{name}.csv').open(encoding='utf-8') as file:
        return list(csv.DictReader(file))


def test_convergence(results):
    last = {
        row['solver']: float(row['objective']) for row in rows_of(results, 'convergence') if row['iterations'] == '8'
    }
    assert last['coupled BADMM-E'] == pytest.approx(last['Sinkhorn'], rel=1e-3)
    assert last['BADMM-E'] > last['Sinkhorn'] + 0.1
    assert last['BADMM-Q'] > last['coupled BADMM-Q']


def test_stability(results):
    for row in rows_of(results, 'stability'):
        if row['solver'] == PUBLISHED_SINKHORN:
            assert int(row['NaN']) > 0
            assert int(row['mass one']) == 0
        else:
            assert int(row['mass one']) == 9


def test_stability_settings(results):
    """Whatever the steps and τ, the printed update is right nowhere and ours everywhere."""
    rows = rows_of(results, 'stability_settings')
    assert len(rows) == 2 * 7
    for row in rows:
        assert int(row['mass one']) == (0 if row['solver'] == PUBLISHED_SINKHORN else 9), row


def test_precision_settings(results):
    error = {
        (row['solver'], row['ρ'], row['pooling']): float(row['pooled error'])
        for row in rows_of(results, 'precision_settings')
        if row['T'] == '16'
    }
    assert error['BADMM-E', 'α1', 'mean'] < 1e-2
    assert error['BADMM-E', '1.0', 'mean'] > 0.1


def test_precision(results):
    error = {
        (row['pooling'], row['setting'], row['solver']): float(row['pooled error'])
        for row in rows_of(results, 'precision')
    }
    for pooling in ('mean', 'max', 'attention'):
        assert error[pooling, 'strict', 'Sinkhorn'] < 1e-6
        assert error[pooling, 'strict', 'coupled BADMM-E'] < 1e-3
    # α1 = α3 is half way between the mean and attention, whatever their size.
    assert error['attention', 'paper', 'Sinkhorn'] > 0.1
    assert error['max', 'paper', PUBLISHED_SINKHORN] > 1


def test_runtime_is_relative_to_badmm_e_at_the_first_point_of_the_panel(results):
    rows = rows_of(results, 'runtime')
    assert len(rows) == 4 * 4 * 2
    first = {'T': 4, 'N': 5}
    for row in rows:
        expected = made_up_seconds(row['solver'], int(row['value'])) / made_up_seconds('BADMM-E', first[row['against']])
        assert float(row['relative time']) == pytest.approx(expected, rel=1e-3), row


def test_sinkhorn_update(results):
    excess = {
        (row['update'], row['steps']): float(row['objective − optimum']) for row in rows_of(results, 'sinkhorn_update')
    }
    assert excess[PUBLISHED_SINKHORN, '4'] > 1
    assert 0 < excess['Sinkhorn', '4'] < 1e-4


def test_dual_steps(results):
    excess = {
        (row['variant'], row['iterations']): float(row['relative excess']) for row in rows_of(results, 'dual_steps')
    }
    assert excess['coupled, Z += ρ (log P − log S)', '64'] < 1e-12
    assert excess['coupled, Z += ρ (P − S)', '64'] > 1e-3
    assert excess['published', '64'] > 1e-2


def test_structural_factor(results):
    bilinear, quadratic = (float(row['spread of slopes']) for row in rows_of(results, 'structural_factor'))
    assert bilinear < 1e-9
    assert quadratic > 1e-2


def test_scale(results):
    samples = {
        (row['feature scale'], row['scale']): float(row['effective samples']) for row in rows_of(results, 'scale')
    }
    assert samples['raw', '100.0'] < 2
    assert samples['raw', '0.01'] > 48
    assert samples['rms', '100.0'] == pytest.approx(samples['rms', '0.1'], rel=1e-3)


def test_every_analysis_has_a_plot(results):
    assert {path.stem for path in results.figures} == set(paper.ANALYSES)
    for path in results.figures:
        image = Image.open(path)
        assert image.width > 500
        assert len(image.convert('RGB').getcolors(2**16)) > 8


def test_page_is_renewed_where_it_is_marked(results, tmp_path):
    """Also: the page in the project has a place for every table and shows every plot."""
    page = tmp_path / 'PAPER.md'
    page.write_text(PAGE.read_text('utf-8'), 'utf-8')
    paper.renew_page(page, results)
    text = page.read_text('utf-8')
    for table in results.tables.values():
        assert table in text
    for path in results.figures:
        assert (tmp_path / 'figures' / f'paper_{path.name}').exists()
        assert f'](figures/paper_{path.name})' in text

    page.write_text('no marks')
    with pytest.raises(ValueError, match='must have one mark for the table convergence'):
        paper.renew_page(page, results)


def test_pivot():
    rows = [{'a': 'x', 'b': 1, 'c': 0.5}, {'a': 'x', 'b': 2, 'c': float('nan')}, {'a': 'y', 'b': 1, 'c': 3}]
    assert to_markdown(pivot(rows, ['a'], 'b', 'c')) == (
        '| a | 1 | 2 |\n| --- | --- | --- |\n| x | 0.5 | NaN |\n| y | 3 |  |\n'
    )
