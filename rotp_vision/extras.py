"""What only a part of the package needs, and how to install it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def of_extra(extra: str) -> Iterator[None]:
    """Imports within the block are of packages that `pip install 'rotp_vision[extra]'` brings; an error says so."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split('.')[0] == 'rotp_vision':
            raise
        message = f"{error.name} is not installed; pip install 'rotp_vision[{extra}]' brings it"
        raise ModuleNotFoundError(message, name=error.name) from error
