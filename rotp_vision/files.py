"""Writing files that are whole at every moment, whenever the process may end."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; at the end of the block that file takes the place of `path`.

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
    """Write a whole file, text as UTF-8: readers see the old content or the new, never a part of it."""
    with replacing(path) as temporary:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())


def force_to_disk(path: Path) -> None:
    """Return when the content of a file, or the entries of a directory, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_by_umask(path: Path) -> None:
    """Give a file the permissions that the umask leaves; safetensors makes it readable by its owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def check_writable(directory: Path) -> None:
    """Raise a ValueError unless files can be written into a directory, or it could be made: asked before long work."""
    place = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise ValueError(f'cannot write into {directory}: {place}: {error.strerror}') from error
