"""`rotp-vision bench` where there is nothing to choose; `sets_interpreted` has the rest."""

import argparse
import json

import pytest

from rotp_vision import bench
from rotp_vision.core import SOLVERS
from rotp_vision.core import triton as triton_room


def run(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    bench.run(parser.parse_args(['--batch-size', '2', '--repeats', '1', *arguments]))


@pytest.mark.parametrize(('installed', 'need'), [(True, 'needs tensors on a GPU'), (False, 'needs the package triton')])
def test_times_torch_and_says_why_not_triton(installed, need, monkeypatch, capsys):
    monkeypatch.setattr(bench, 'SHAPES', ((8, 2, 2),))
    monkeypatch.setattr(bench, 'LOCAL_SHAPES', ((4, 6, 6),))
    monkeypatch.setattr(triton_room, 'INSTALLED', installed)
    monkeypatch.setitem(SOLVERS, 'mine', SOLVERS['sinkhorn'])  # which is not what is asked for
    run('--device', 'cpu', '--dtype', 'bfloat16')
    printed = capsys.readouterr().out
    assert printed.count('| 8×2×2 |') == 3
    assert printed.count('| 4×6×6, 3×3 windows, stride 2 |') == 3
    assert f"Backend 'triton' {need}" in printed
    assert 'here there is the torch backend only' in printed
    posted = json.loads(printed.split('Please post this line:\n')[1].splitlines()[0])
    assert len(posted['rows']) == 6
    assert posted['dtype'] == 'bfloat16'


def test_bad_arguments():
    with pytest.raises(ValueError, match='repeats'):
        run('--device', 'cpu', '--repeats', '0')


def test_a_gpu_that_is_not_there(monkeypatch):
    with pytest.raises(ValueError, match="got 'cuda:7': torch sees"):
        run('--device', 'cuda:7')
    monkeypatch.setenv('ROTP_BACKEND', 'torch')
    with pytest.raises(ValueError, match='ROTP_BACKEND overrides the backends that are to be compared'):
        run('--device', 'cpu')
