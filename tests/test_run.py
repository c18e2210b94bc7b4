import sys

import pytest

from rotp_vision import run


def test_a_script_finds_the_models_and_its_own_arguments(tmp_path, monkeypatch, capsys):
    (tmp_path / 'beside_the_script.py').write_text('FOUND = True')
    script = tmp_path / 'script.py'
    script.write_text(
        'import sys, timm, beside_the_script\n'
        "print(__name__, timm.is_model('resnet50_rotp'), beside_the_script.FOUND, sys.argv[1:])"
    )
    monkeypatch.setattr(sys, 'path', ['', *sys.path])
    monkeypatch.setattr(sys, 'argv', ['run', str(script), '--model', 'resnet50_rotp'])
    run.main()
    assert capsys.readouterr().out == "__main__ True True ['--model', 'resnet50_rotp']\n"


def test_errors(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['run'])
    with pytest.raises(SystemExit, match='usage: python -m'):
        run.main()
    monkeypatch.setattr(sys, 'argv', ['run', 'nowhere.py'])
    with pytest.raises(SystemExit, match='there is no script nowhere'):
        run.main()
