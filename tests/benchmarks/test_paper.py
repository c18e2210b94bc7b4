"""The paper's analyses at tiny size: each shows what PAPER.md says, and writes its table and its plot."""

import csv
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import paper
from benchmarks.paper_analyses import PUBLISHED_SINKHORN, RUNTIME_SOLVERS

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


def values(results, name, keys, value):
    """A column of a written table by the columns `keys`."""
    assert (results.output / f'{name}.md').read_text('utf-8').startswith('| ')
    with (results.output / f'{name}.csv').open(encoding='utf-8') as file:
        return {tuple(row[key] for key in keys): float(row[value]) for row in csv.DictReader(file)}


def test_convergence(results):
    objective = values(results, 'convergence', ['solver', 'iterations'], 'objective')
    last = {solver: value for (solver, iterations), value in objective.items() if iterations == '8'}
    assert last['coupled BADMM-E'] == pytest.approx(last['Sinkhorn'], rel=1e-3)
    assert last['BADMM-E'] > last['Sinkhorn'] + 0.1
    assert last['BADMM-Q'] > last['coupled BADMM-Q']


@pytest.mark.parametrize(
    ('name', 'keys'), [('stability', ['solver']), ('stability_settings', ['solver', 'steps', 'τ'])]
)
def test_the_printed_update_is_right_nowhere_and_ours_everywhere(results, name, keys):
    for (solver, *_), right in values(results, name, keys, 'mass one').items():
        assert right == (0 if solver == PUBLISHED_SINKHORN else 9)
    assert any(values(results, name, keys, 'NaN').values())


def test_precision(results):
    error = values(results, 'precision', ['pooling', 'setting', 'solver'], 'pooled error')
    for pooling in ('mean', 'max', 'attention'):
        assert error[pooling, 'strict', 'Sinkhorn'] < 1e-6
        assert error[pooling, 'strict', 'coupled BADMM-E'] < 1e-3
    # α1 = α3 is half way between the mean and attention, whatever their size.
    assert error['attention', 'paper', 'Sinkhorn'] > 0.1
    assert error['max', 'paper', PUBLISHED_SINKHORN] > 1
    error = values(results, 'precision_settings', ['solver', 'ρ', 'pooling', 'T'], 'pooled error')
    assert error['BADMM-E', 'α1', 'mean', '16'] < 1e-2
    assert error['BADMM-E', '1.0', 'mean', '16'] > 0.1


def test_runtime_is_relative_to_badmm_e_at_the_first_point_of_the_panel(results):
    times = values(results, 'runtime', ['α0', 'solver', 'against', 'value'], 'relative time')
    assert len(times) == 4 * 4 * 2
    for (_, solver, against, value), time in times.items():
        expected = made_up_seconds(solver, int(value)) / made_up_seconds('BADMM-E', {'T': 4, 'N': 5}[against])
        assert time == pytest.approx(expected, rel=1e-3)


def test_differences(results):
    excess = values(results, 'sinkhorn_update', ['update', 'steps'], 'objective − optimum')
    assert excess[PUBLISHED_SINKHORN, '4'] > 1
    assert 0 < excess['Sinkhorn', '4'] < 1e-4
    excess = values(results, 'dual_steps', ['variant', 'iterations'], 'relative excess')
    assert excess['coupled, Z += ρ (log P − log S)', '64'] < 1e-12
    assert excess['coupled, Z += ρ (P − S)', '64'] > 1e-3
    assert excess['published', '64'] > 1e-2
    bilinear, quadratic = values(results, 'structural_factor', ['force'], 'spread of slopes').values()
    assert bilinear < 1e-9 < 1e-2 < quadratic
    samples = values(results, 'scale', ['feature scale', 'scale'], 'effective samples')
    assert samples['raw', '100.0'] < 2 < 48 < samples['raw', '0.01']
    assert samples['rms', '100.0'] == pytest.approx(samples['rms', '0.1'], rel=1e-3)


def test_page_is_renewed_where_it_is_marked(results, tmp_path):
    """The page of the project has a mark for every table and shows every plot."""
    page = tmp_path / 'PAPER.md'
    page.write_text(PAGE.read_text('utf-8'), 'utf-8')
    paper.renew_page(page, results)
    text = page.read_text('utf-8')
    assert all(table in text for table in results.tables.values())
    assert {path.stem for path in results.figures} == set(paper.ANALYSES)
    for path in results.figures:
        assert Image.open(tmp_path / 'figures' / f'paper_{path.name}').width > 500
        assert f'](figures/paper_{path.name})' in text
    page.write_text('no marks')
    with pytest.raises(ValueError, match='must have one mark for the table convergence'):
        paper.renew_page(page, results)
