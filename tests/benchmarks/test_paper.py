"""The paper's analyses at tiny size: each says what PAPER.md says, and writes its table and its plot."""

import csv

import pytest
from PIL import Image

from benchmarks import paper
from benchmarks.paper_analyses import PUBLISHED_SINKHORN
from benchmarks.tables import pivot, to_markdown


@pytest.fixture
def results(tmp_path):
    return paper.Results(tmp_path)


def rows_of(results, name):
    """What was written as CSV; also that Markdown and, if asked for, the plot are there and not blank."""
    assert (results.output / f'{name}.md').read_text('utf-8').startswith('| ')
    for path in results.figures:
        image = Image.open(path)
        assert image.width > 500
        assert len(image.convert('RGB').getcolors(2**16)) > 8
    with (results.output / f'{name}.csv').open(encoding='utf-8') as file:
        return list(csv.DictReader(file))


def test_convergence(results):
    paper.convergence(results, num_sets=2, num_features=8, num_samples=20, most_modules=8)
    last = {row['solver']: float(row['objective']) for row in rows_of(results, 'convergence') if row['modules'] == '8'}
    assert last['coupled BADMM-E'] == pytest.approx(last['Sinkhorn'], rel=1e-3)
    assert last['BADMM-E'] > last['Sinkhorn'] + 0.1
    assert last['BADMM-Q'] > last['coupled BADMM-Q']
    assert [len(rows) for rows in results.tables.values()]


def test_stability(results):
    paper.stability(results, exponents=(-4, 0, 4))
    for row in rows_of(results, 'stability'):
        if row['solver'] == PUBLISHED_SINKHORN:
            assert int(row['NaN']) > 0
            assert int(row['mass one']) == 0
        else:
            assert int(row['mass one']) == 9


def test_precision(results):
    paper.precision(results)
    error = {
        (row['pooling'], row['setting'], row['solver']): float(row['pooled error'])
        for row in rows_of(results, 'precision')
    }
    for pooling in ('mean', 'max', 'attention'):
        assert error[pooling, 'strict', 'Sinkhorn'] < 1e-6
        assert error[pooling, 'strict', 'coupled BADMM-E'] < 1e-3
    # α1 = α3 is half way between the mean and attention, whatever their size.
    assert error['attention', 'paper', 'Sinkhorn'] > 0.1
    assert not error['max', 'paper', PUBLISHED_SINKHORN] < 1


def test_runtime(results):
    paper.runtime(results, repeats=1, module_counts=(1, 2), sample_counts=(5, 10))
    rows = rows_of(results, 'runtime')
    assert len(rows) == 4 * 4 * 2
    assert all(float(row['relative time']) > 0 for row in rows)


def test_differences(results):
    paper.differences(results, most_modules=64)
    excess = {(row['variant'], row['modules']): float(row['relative excess']) for row in rows_of(results, 'dual_steps')}
    assert excess['coupled, Z += ρ (log P − log S)', '64'] < 1e-12
    assert excess['coupled, Z += ρ (P − S)', '64'] > 1e-3
    assert excess['published', '64'] > 1e-2
    bilinear, quadratic = (float(row['spread of slopes']) for row in rows_of(results, 'structural_factor'))
    assert bilinear < 1e-9 < 1e-2 < quadratic
    samples = {(row['view'], row['scale']): float(row['effective samples']) for row in rows_of(results, 'scale')}
    assert samples['identity', '100.0'] < 2 < 48 < samples['identity', '0.01']
    assert samples['rms', '100.0'] == pytest.approx(samples['rms', '0.1'], rel=1e-3)


def test_page_is_renewed_where_it_is_marked(results, tmp_path):
    results.tables = {'one': '| new |\n', 'absent': ''}
    page = tmp_path / 'PAGE.md'
    page.write_text('before\n<!-- table: one -->\n| old |\n<!-- end -->\nafter\n')
    paper.renew_page(page, results)
    assert page.read_text() == 'before\n<!-- table: one -->\n| new |\n<!-- end -->\nafter\n'


def test_the_page_has_a_place_for_every_table():
    """One for each table that the tests above make; a name that changes would leave an old table standing."""
    text = (paper.Path(paper.__file__).parent / 'PAPER.md').read_text('utf-8')
    for name in (
        'convergence_expectation convergence_objective stability precision_pooled precision_plan runtime_plain_T '
        'runtime_plain_N runtime_structure_T runtime_structure_N sinkhorn_update_excess dual_steps_excess '
        'structural_factor scale_samples scale_inflation'
    ).split():
        assert f'<!-- table: {name} -->' in text, name


def test_pivot():
    rows = [{'a': 'x', 'b': 1, 'c': 0.5}, {'a': 'x', 'b': 2, 'c': float('nan')}, {'a': 'y', 'b': 1, 'c': 3}]
    assert to_markdown(pivot(rows, ['a'], 'b', 'c')) == (
        '| a | 1 | 2 |\n| --- | --- | --- |\n| x | 0.5 | NaN |\n| y | 3 |  |\n'
    )
