"""Checkpoints that survive being interrupted at any moment.

A checkpoint is a directory: model.safetensors, state.pt (everything else, read with `weights_only=True`) and, written
last, manifest.json with the progress, the configuration and the digests of the other files. It is written under another
name, forced to disk, renamed, and only then are older ones removed.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rotp_vision.files import force_to_disk, open_by_umask

MODEL, STATE, MANIFEST = 'model.safetensors', 'state.pt', 'manifest.json'


@dataclass
class Progress:
    """How far a run is, and all else that a continued run needs besides tensors; plain values, stored as JSON."""

    stage: int = 1
    epoch: int = 0  # the current epoch
    step: int = 0  # steps of it that are done
    loss_sum: float = 0.0  # over these steps
    best: dict[str, float] = field(default_factory=dict)  # best checkpoint of each stage: name → top-1 accuracy
    steps: list[dict[str, Any]] = field(default_factory=list)  # rows of steps.csv
    epochs: list[dict[str, Any]] = field(default_factory=list)  # rows of metrics.csv
    weights: list[dict[str, Any]] = field(default_factory=list)  # rows of weights.csv
    summary: dict[str, dict[str, float]] = field(default_factory=dict)  # rows of the table at the end
    pools: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # options of each ROT pool, as calibration chose them
    simpler: dict[str, list[float]] = field(default_factory=dict)  # poolings to compare with: power and gain by title
    broken: list[str] = field(default_factory=list)  # names of the unreadable images so far
    data: dict[str, Any] = field(default_factory=dict)  # `sources.inventory` of the splits

    @property
    def name(self) -> str:
        """Name of the checkpoint of this point; names sort in the order of the run."""
        return f'stage{self.stage}-epoch{self.epoch:04d}-step{self.step:06d}'

    def note_accuracy(self, top1: float) -> None:
        """Record this point as the best of its stage if its accuracy is the highest so far."""
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
    state: dict[str, Any]


def save_checkpoint(
    directory: Path,
    progress: Progress,
    config: dict[str, Any],
    model: Mapping[str, Tensor],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint of this point under `directory`, then remove all earlier ones but the last and the best.

    Later checkpoints are removed too: the run would have continued from them, so they must be damaged.

    Raises:
        OSError: if writing fails, with a message that says whether the disk is full; earlier checkpoints are kept.
    """
    path = directory / progress.name
    temporary = directory / f'.{progress.name}.tmp'
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in model.items()}, temporary / MODEL)
        open_by_umask(temporary / MODEL)
        torch.save(state, temporary / STATE)
        manifest = {
            'progress': asdict(progress),
            'config': config,
            'digests': {name: digest_of(temporary / name) for name in (MODEL, STATE)},
        }
        text = json.dumps(manifest | {'digest': _manifest_digest(manifest)})
        (temporary / MANIFEST).write_text(text)
        for file in (temporary / MODEL, temporary / STATE, temporary / MANIFEST, temporary):
            force_to_disk(file)
        _remove(path)  # a damaged one of the same point, because a directory cannot replace one that is not empty
        temporary.rename(path)
        force_to_disk(directory)
    except (OSError, RuntimeError, SafetensorError) as error:
        explained = _explained(error, directory)  # before the removal frees disk space
        shutil.rmtree(temporary, ignore_errors=True)
        raise explained from error
    earlier = [old for old in list_checkpoints(directory) if old.name <= path.name]
    later = [old for old in list_checkpoints(directory) if old.name > path.name]
    for old in (*earlier[:-keep], *later):
        if old.name not in progress.best:
            _remove(old)
    return path


def _remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that an interruption leaves no partial one under its name."""
    if path.exists():
        shutil.rmtree(path.rename(path.with_name(f'.{path.name}.old')))


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints in the order of the run."""
    return sorted(path for path in directory.glob('stage*-epoch*-step*') if path.is_dir())


def clear_leftovers(output: Path) -> None:
    """Remove the temporary files, all hidden, that a killed run left in its directory."""
    for pattern in ('.*.tmp', '.export.*', 'export/.*.tmp', 'checkpoints/.stage*'):
        for path in output.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def load_checkpoint(path: Path) -> Checkpoint:
    """Load and verify a checkpoint; a ValueError says what is wrong with it."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest.pop('digest') != _manifest_digest(manifest):
            raise ValueError(f'{MANIFEST} is not what was written')
        for name, digest in manifest['digests'].items():
            if digest_of(path / name) != digest:
                raise ValueError(f'{name} is not what was written')
        model = load_file(path / MODEL)
        state = torch.load(path / STATE, map_location='cpu', weights_only=True)
        return Checkpoint(path, Progress(**manifest['progress']), manifest['config'], model, state)
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(f'{path} is not a whole checkpoint: {error!r}') from error


def find_checkpoint(directory: Path, resume: str) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that `resume` (auto, never or a path) selects, and warnings about damaged ones."""
    warnings: list[str] = []
    candidates = list_checkpoints(directory)
    if resume == 'never':
        if candidates:
            raise ValueError(
                f'{directory.parent} holds a run; continue it with --resume auto or choose another --output'
            )
        return None, warnings
    if resume != 'auto':
        checkpoint = load_checkpoint(Path(resume))
        later = [path.name for path in candidates if path.name > checkpoint.progress.name]
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
            warnings.append(f'passed over a damaged checkpoint: {error}')
    if candidates:
        raise ValueError(f'every checkpoint in {directory} is damaged: ' + '; '.join(warnings))
    return None, warnings


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open('rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _explained(error: Exception, directory: Path) -> OSError:
    """The error as an OSError that says whether the disk is full; torch reports that as a RuntimeError."""
    usage = shutil.disk_usage(directory if directory.exists() else directory.parent)
    full = getattr(error, 'errno', None) in (errno.ENOSPC, errno.EDQUOT) or usage.free < 1 << 20
    full = full or 'No space left' in str(error)
    reason = 'the disk is full' if full else f'writing failed ({error})'
    free = f'{usage.free / 2**30:.2f} GiB free'
    return OSError(f'no checkpoint written to {directory}: {reason}, {free}; the checkpoints before it are whole')
