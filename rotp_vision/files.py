"""Files that are complete at every moment, whenever the process may end."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; at the end of the block that file replaces `path`.

    If the block raises, the temporary file is removed and `path` stays as it was.
    """
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        yield temporary
        force_to_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a whole file, text as UTF-8: readers see the old content or the new, never a part of it."""
    with replacing(path) as temporary:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())


def force_to_disk(path: Path) -> None:
    """Returns when the content of a file, or the entries of a directory, would survive a power cut."""
    windows = os.name == 'nt'
    if windows and path.is_dir():  # which Windows cannot open
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_by_umask(path: Path) -> None:
    """Gives a file the permissions that the umask leaves; safetensors makes it readable by its owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def check_writable(directory: Path) -> None:
    """Raises a ValueError unless files can be written into a directory, which need not exist yet."""
    parent = _existing(directory)
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ValueError(f'cannot write into {directory}: {parent}: {error.strerror}') from error


def check_disk(directory: Path, needed: int, what: str, cure: str) -> None:
    """Raises an OSError unless a disk has room for `needed` bytes in a directory, which need not exist yet.

    The message reads: '`what` 3.00 GiB in … but 1.00 GiB are free: `cure`'.
    """
    free = shutil.disk_usage(_existing(directory)).free
    if needed * 1.02 > free:
        raise OSError(f'{what} {needed / 2**30:.2f} GiB in {directory} but {free / 2**30:.2f} GiB are free: {cure}')


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.absolute().parents) if path.exists())
