"""Errors that name the extra which installs a missing package."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def of_extra(extra: str) -> Iterator[None]:
    """If an import in the block fails, the error names `pip install 'rotp_vision[extra]'`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split('.')[0] == 'rotp_vision':
            raise
        message = f"{error.name} is not installed; pip install 'rotp_vision[{extra}]' installs it"
        raise ModuleNotFoundError(message, name=error.name) from error
