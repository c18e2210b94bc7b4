"""Finds the training script and its configurations: beside the package in a checkout, inside an installed one."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from rotp_vision.extras import of_extra

SCRIPT = 'train_imagenet.py'


def home() -> Path:
    """Returns the directory that holds `train_imagenet.py` and `configs/`."""
    package = Path(__file__).resolve().parents[1]
    return package if (package / SCRIPT).is_file() else package.parent


def config_file(name: str) -> str:
    """Returns the path of a configuration, given its path or the name of a shipped one."""
    shipped = {file.stem: file for file in sorted((home() / 'configs').glob('*.yaml'))}
    if Path(name).is_file():
        return name
    if name not in shipped:
        raise ValueError(f'there is no configuration {name!r}: give a YAML file, or one of {", ".join(shipped)}')
    return str(shipped[name])


def train(args: Sequence[str]) -> None:
    """Runs the training script with these arguments."""
    spec = importlib.util.spec_from_file_location('train_imagenet', home() / SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with of_extra('train'):
        spec.loader.exec_module(script)
    script.main(args, 'rotp-vision train')
