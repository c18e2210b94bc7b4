"""Checkpoints that survive being interrupted at any moment.

A checkpoint is one file of `torch.save` with a SHA-256 digest behind it, because torch does not notice a changed byte.
It is written under a temporary name, forced to disk and renamed; only then are older ones removed.
"""

import hashlib
import io
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rotp_vision.files import force_to_disk, replacing

_NAME = re.compile(r'stage\d-epoch\d+-step\d+')


@dataclass
class Progress:
    """How far a run is, and everything else that a continued run needs besides tensors, as plain values."""

    stage: int = 1
    epoch: int = 0  # the current epoch
    step: int = 0  # steps of it that are done
    loss_sum: float = 0.0  # over these steps
    best: dict[str, float] = field(default_factory=dict)  # best checkpoint of each stage: name → top-1 accuracy
    steps: list[dict[str, Any]] = field(default_factory=list)  # rows of steps.csv
    epochs: list[dict[str, Any]] = field(default_factory=list)  # rows of metrics.csv
    weights: list[dict[str, Any]] = field(default_factory=list)  # rows of weights.csv
    summary: dict[str, dict[str, float]] = field(default_factory=dict)  # rows of the table at the end
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)  # calibrated options of each ROT pool
    simpler: dict[str, list[float]] = field(default_factory=dict)  # poolings to compare with: power and gain by title
    broken: list[str] = field(default_factory=list)  # names of the unreadable images so far
    data: dict[str, Any] = field(default_factory=dict)  # `inventory` of the splits

    @property
    def name(self) -> str:
        """Name of the checkpoint of this point; names sort in the order of the run."""
        return f'stage{self.stage}-epoch{self.epoch:04d}-step{self.step:06d}'

    def note_accuracy(self, top1: float) -> None:
        """Records this point as the best of its stage if its accuracy is the highest so far."""
        stage = f'stage{self.stage}-'
        before = {name: value for name, value in self.best.items() if name.startswith(stage)}
        if all(top1 > value for value in before.values()):
            self.best = {name: value for name, value in self.best.items() if name not in before} | {self.name: top1}


class Checkpoint(NamedTuple):
    """A checkpoint that was loaded."""

    path: Path
    progress: Progress
    config: dict[str, Any]
    model: dict[str, Tensor]
    state_dict_ema: dict[str, Tensor] | None  # timm reads the weights under these two names
    others: dict[str, Any]  # states of the optimizer, the loss scaler and the random generators


def save_checkpoint(
    directory: Path,
    progress: Progress,
    config: Mapping[str, Any],
    model: Mapping[str, Tensor],
    state_dict_ema: Mapping[str, Tensor] | None = None,
    others: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint of this point under `directory`, then removes all earlier ones but the last and the best.

    It also removes later checkpoints: the run would have continued from them if they were not damaged.

    Raises:
        OSError: if writing fails; earlier checkpoints are kept.
    """
    path = directory / f'{progress.name}.pt'
    content = {'progress': asdict(progress), 'config': config, 'model': model, 'state_dict_ema': state_dict_ema}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(content | {'others': others or {}}, buffer)
        buffer.write(hashlib.sha256(buffer.getbuffer()).digest())
        with replacing(path) as temporary:
            temporary.write_bytes(buffer.getbuffer())
        force_to_disk(directory)
    except OSError as error:
        raise OSError(
            f'no checkpoint written to {directory}: {error.strerror}; the checkpoints before it are whole'
        ) from error
    found = list_checkpoints(directory)
    earlier = [old for old in found if old.name <= path.name]
    later = [old for old in found if old.name > path.name]
    for old in (*earlier[:-keep], *later):
        if old.stem not in progress.best:
            old.unlink()
    return path


def list_checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints in the order of the run."""
    return sorted(path for path in directory.glob('*.pt') if is_checkpoint(path))


def is_checkpoint(path: Path) -> bool:
    """Whether a file has the name of a checkpoint of a run."""
    return path.suffix == '.pt' and _NAME.fullmatch(path.stem) is not None


def clear_leftovers(output: Path) -> None:
    """Removes the temporary files, all hidden, that a killed run left in its directory."""
    for pattern in ('.*.tmp', '.rotp_vision.*', 'export/.*', 'checkpoints/.*.tmp', 'cache/.*.tmp', 'cache/*/.*.tmp'):
        for path in output.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def load_checkpoint(path: Path) -> Checkpoint:
    """Loads and verifies a checkpoint; a ValueError says what is wrong with it."""
    if path.is_dir() and (path / 'manifest.json').is_file():
        raise ValueError(
            f'{path} is a checkpoint of rotp_vision 0.2, which this version cannot continue: start a new run, '
            f'optionally with --model.checkpoint {path / "model.safetensors"}'
        )
    try:
        data = path.read_bytes()
        if hashlib.sha256(memoryview(data)[:-32]).digest() != data[-32:]:
            raise ValueError('its content is not what was written')
        content = torch.load(io.BytesIO(data), map_location='cpu', weights_only=True)
        content['progress'] = Progress(**content['progress'])
        return Checkpoint(path, **content)
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(f'{path} is not a whole checkpoint: {error!r}') from error


def find_checkpoint(directory: Path, resume: str) -> tuple[Checkpoint | None, list[str]]:
    """Returns the checkpoint that `resume` (auto, never or a path) selects, and warnings about damaged ones."""
    warnings: list[str] = []
    candidates = list_checkpoints(directory)
    for old in sorted(directory.glob('stage*/manifest.json')):
        load_checkpoint(old.parent)  # raises: it is of another version
    if resume == 'never':
        if candidates:
            raise ValueError(
                f'{directory.parent} holds a run; continue it with --resume auto or choose another --output'
            )
        return None, warnings
    if resume != 'auto':
        checkpoint = load_checkpoint(Path(resume))
        later = [path.stem for path in candidates if path.stem > checkpoint.progress.name]
        if later:
            raise ValueError(
                f'{directory.parent} holds later checkpoints ({", ".join(later)}): continue from the last with '
                '--resume auto, or go on from this one in another --output'
            )
        return checkpoint, warnings
    for path in reversed(candidates):
        try:
            return load_checkpoint(path), warnings
        except ValueError as error:
            warnings.append(f'skipped a damaged checkpoint: {error}')
    if candidates:
        raise ValueError(f'every checkpoint in {directory} is damaged: ' + '; '.join(warnings))
    return None, warnings
