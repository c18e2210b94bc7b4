import errno
import hashlib
import random

import numpy as np
import pytest
import torch

import rotp_vision
from rotp_vision import files
from rotp_vision.data.workers import random_state, seed_all, set_random_state
from rotp_vision.training.checkpoint import Progress, find_checkpoint, load_checkpoint, save_checkpoint


def save(directory, *, epoch=0, step=0, value=1.0, keep=2, top1=None, progress=None):
    progress = progress or Progress()
    progress.epoch, progress.step = epoch, step
    if top1 is not None:
        progress.note_accuracy(top1)
    others = {'optimizer': {'state': {0: torch.full((2,), value)}}, 'random': [random_state()]}
    weights = {'weight': torch.full((3,), value)}
    return save_checkpoint(directory, progress, {'seed': 0}, weights, None, others, keep)


def names(directory):
    return sorted(path.name.removesuffix('.pt') for path in directory.iterdir())


def test_round_trip(tmp_path):
    progress = Progress(stage=2, epoch=3, loss_sum=0.1, epochs=[{'loss': 0.3}], summary={'native': {'top1': 1.5}})
    path = save(tmp_path, epoch=3, step=7, value=0.1, progress=progress)
    found = load_checkpoint(path)
    assert path.name == 'stage2-epoch0003-step000007.pt'
    assert found.progress == progress
    assert found.config == {'seed': 0}
    assert found.model['weight'].equal(torch.full((3,), 0.1))
    assert found.others['optimizer']['state'][0].equal(torch.full((2,), 0.1))
    assert rotp_vision.read_state_dict(path)['weight'].equal(found.model['weight'])  # as a file of weights


def test_last_ones_and_the_best_are_kept(tmp_path):
    progress = Progress()
    for epoch, top1 in enumerate([10.0, 30.0, 20.0, 25.0, 5.0]):
        save(tmp_path, epoch=epoch, top1=top1, progress=progress)
    assert names(tmp_path) == [f'stage1-epoch000{epoch}-step000000' for epoch in (1, 3, 4)]
    progress.stage = 2  # the best of stage 1 stays, stage 2 has its own
    for epoch, top1 in enumerate([7.0, 6.0, 5.0]):
        save(tmp_path, epoch=epoch, top1=top1, progress=progress)
    assert names(tmp_path)[:2] == ['stage1-epoch0001-step000000', 'stage2-epoch0000-step000000']
    assert len(names(tmp_path)) == 4


def test_a_save_removes_later_checkpoints(tmp_path):
    """They are damaged: otherwise the run would have continued from them."""
    for epoch in (1, 8, 9):
        save(tmp_path, epoch=epoch, keep=5)
    for epoch in (8, 9):
        (tmp_path / f'stage1-epoch000{epoch}-step000000.pt').write_bytes(b'')
    assert save(tmp_path, epoch=2).is_file()
    assert names(tmp_path) == ['stage1-epoch0001-step000000', 'stage1-epoch0002-step000000']


def test_going_on_from_an_earlier_point_beside_later_ones_is_refused(tmp_path):
    early, _ = save(tmp_path, epoch=1), save(tmp_path, epoch=2)
    with pytest.raises(ValueError, match=r'later checkpoints .stage1-epoch0002-step000000.*another --output'):
        find_checkpoint(tmp_path, str(early))


@pytest.mark.parametrize('damage', ['truncated', 'flipped', 'empty'])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, damage):
    save(tmp_path, epoch=1, value=1.0)
    last = save(tmp_path, epoch=2, value=2.0)
    content = bytearray(last.read_bytes())
    if damage == 'flipped':
        content[len(content) // 3] ^= 0xFF
    size = {'truncated': len(content) // 2, 'flipped': len(content), 'empty': 0}
    last.write_bytes(content[: size[damage]])
    found, warnings = find_checkpoint(tmp_path, 'auto')
    assert found is not None
    assert found.progress.epoch == 1
    assert len(warnings) == 1
    assert last.name in warnings[0]
    # The same point is saved again over the damaged one.
    save(tmp_path, epoch=2, value=3.0)
    found, warnings = find_checkpoint(tmp_path, 'auto')
    assert found is not None
    assert not warnings
    assert found.model['weight'][0] == 3.0


@pytest.mark.parametrize('content', [b'', b'\x80\x04cos\nsystem\n.', b'PK\x03\x04'])
@pytest.mark.filterwarnings('ignore:Detected pickle protocol')
def test_an_unreadable_file_with_the_right_digest_is_skipped(tmp_path, content):
    save(tmp_path, epoch=1)
    save(tmp_path, epoch=2).write_bytes(content + hashlib.sha256(content).digest())
    found, warnings = find_checkpoint(tmp_path, 'auto')
    assert found is not None
    assert (found.progress.epoch, len(warnings)) == (1, 1)


def test_a_checkpoint_of_version_0_2_is_refused_by_name(tmp_path):
    old = tmp_path / 'stage1-epoch0001-step000000'
    old.mkdir()
    (old / 'manifest.json').write_text('{}')
    for resume in ('auto', 'never', str(old)):
        with pytest.raises(ValueError, match=r'of rotp_vision 0\.2.*--model\.checkpoint .*model\.safetensors'):
            find_checkpoint(tmp_path, resume)


def test_all_damaged_is_an_error_and_nothing_is_a_start(tmp_path):
    assert find_checkpoint(tmp_path, 'auto') == (None, [])
    assert find_checkpoint(tmp_path, 'never') == (None, [])
    path = save(tmp_path)
    with pytest.raises(ValueError, match='holds a run; continue it with --resume auto'):
        find_checkpoint(tmp_path, 'never')
    path.write_bytes(b'{')
    with pytest.raises(ValueError, match=r'every checkpoint .* is damaged'):
        find_checkpoint(tmp_path, 'auto')
    with pytest.raises(ValueError, match='not a whole checkpoint'):
        find_checkpoint(tmp_path, str(path))


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    save(tmp_path, epoch=1, value=1.0)

    def full(*args):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(files, 'force_to_disk', full)
    with pytest.raises(OSError, match=r'no checkpoint written to .*: No space left on device; .* before it are whole'):
        save(tmp_path, epoch=2)
    assert names(tmp_path) == ['stage1-epoch0001-step000000']
    found, _ = find_checkpoint(tmp_path, 'auto')
    assert found is not None
    assert found.model['weight'][0] == 1.0


def test_random_state_comes_back_through_a_file(tmp_path):
    seed_all(1, 2)
    torch.save(random_state(), tmp_path / 'state.pt')
    drawn = random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
    set_random_state(torch.load(tmp_path / 'state.pt', weights_only=True))
    again = random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
    assert drawn[:2] == again[:2]
    assert drawn[2].equal(again[2])
    seed_all(1, 3)
    assert random.random() != drawn[0]
