from pathlib import Path

import numpy as np
import pytest

from benchmarks import starts
from benchmarks.tables import to_markdown

PAGE = Path(starts.__file__).parent / 'STARTS.md'


def rows_of(scores, question='one object', network='plain', stages='1'):
    """A row per seed around each pooling's accuracy."""
    fixed = {'question': question, 'network': network, 'stages': stages}
    return [
        fixed | {'pooling': name, 'seed': str(seed), 'accuracy': str(score + seed - 1)}
        for name, score in scores.items()
        for seed in range(3)
    ]


@pytest.mark.parametrize('question', starts.DRAWN)
def test_drawn_images_depend_on_seed_split_and_index_and_classes_take_turns(question):
    first, target = starts.draw(question, 1, 0, 7)
    assert first.shape == (64, 64, 3)
    assert target == 7 % starts.DRAWN[question][1]
    assert (starts.draw(question, 1, 0, 7)[0] == first).all()
    for other in ((2, 0, 7), (1, 1, 7), (1, 0, 8)):
        assert (starts.draw(question, *other)[0] != first).mean() > 0.5


def test_how_many_objects_is_the_class(monkeypatch):
    monkeypatch.setattr(starts, 'place_objects', lambda rng, shapes, size, radius_range: shapes)
    for label in range(6):
        assert len(starts.how_many(np.random.default_rng(0), label)) == label + 1


def test_runs_are_added_once_and_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(starts, 'NUM_TRAIN', 64)
    monkeypatch.setattr(starts, 'NUM_TEST', 16)
    settings = [starts.Setting('one object', 'plain', 3, True), starts.Setting('how many', 'residual', 1)]
    monkeypatch.setattr(starts, 'SETTINGS', settings)
    monkeypatch.setattr(starts, 'TWO_STAGES', ['average', *starts.LATER])
    monkeypatch.setattr(starts, 'ONE_STAGE', ['GeM, p learned from 3', *starts.LATER])
    monkeypatch.setattr(starts, 'SEEDS', 1)
    starts.run_missing(tmp_path / 'runs.csv', (1, 2), 1e9, None)
    rows = starts.read(tmp_path / 'runs.csv')
    assert len(rows) == 4
    starts.run_missing(tmp_path / 'runs.csv', (0, 1), 1e9, None)
    assert starts.read(tmp_path / 'runs.csv')[:4] == rows
    assert len({starts.key_of(row) for row in starts.read(tmp_path / 'runs.csv')}) == 8
    again = starts.run(settings[0], rows[0]['pooling'], 0, None)
    assert str(again['accuracy']) == rows[0]['accuracy']
    assert {row['T'] != '' for row in rows if 'ROTP' in row['pooling']} == {True}


def test_a_start_is_chosen_on_the_other_questions():
    """The better candidate of each question is the worse one elsewhere: the choice has to follow the others."""
    a, b = 'ROTP, T = 2, β = 2', 'ROTP, T = 10, β = 2'
    peers = dict.fromkeys(starts.PEERS, 50.0) | {'max': 60.0}
    rest = dict.fromkeys([*starts.CANDIDATES, starts.NEXT_TO_MEAN], 10.0)
    rows = rows_of(rest | peers | {a: 70.0, b: 58.0}, 'one object')
    rows += rows_of(rest | peers | {a: 56.0, b: 59.0}, 'tiles') + rows_of(rest | peers | {a: 57.0, b: 59.0}, 'debris')
    lines = {line['pooling']: line for line in starts.tables(rows)['starts_1']}
    chosen = lines['**chosen on the other questions**']
    assert [chosen[f'{name}, plain'] for name in ('one object', 'tiles', 'debris')] == ['58.0', '56.0', '57.0']
    assert lines[a]['mean regret'] == f'{(-10 + 4 + 3) / 3:.1f}'
    assert lines[a]['worst gap'] == '4.0'
    assert lines['max']['mean'] == '60.0 ± 0.6'


def test_the_page_shows_the_runs():
    page = PAGE.read_text('utf-8')
    for table in starts.tables(starts.read(starts.RESULTS)).values():
        assert to_markdown(table) in page
