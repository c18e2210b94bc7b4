import pytest

from rotp_vision import files
from rotp_vision.files import replacing, write_atomically


@pytest.mark.parametrize('content', ['α', 'α'.encode()])
def test_content_is_written(tmp_path, content):
    write_atomically(tmp_path / 'a.txt', 'old')
    write_atomically(tmp_path / 'a.txt', content)
    assert (tmp_path / 'a.txt').read_text('utf-8') == 'α'
    assert [path.name for path in tmp_path.iterdir()] == ['a.txt']


def test_a_failure_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / 'a.txt'
    path.write_text('old')

    def interrupted():
        with replacing(path) as temporary:
            temporary.write_text('half')
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == 'old'

    def full(temporary):
        assert path.read_text() == 'old'  # until the new content is on the disk
        raise OSError('no space left')

    monkeypatch.setattr(files, 'force_to_disk', full)
    with pytest.raises(OSError, match='no space left'):
        write_atomically(path, 'new')
    assert path.read_text() == 'old'
    assert [path.name for path in tmp_path.iterdir()] == ['a.txt']
