"""Tables of results: rows as mappings, written as CSV and as Markdown."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rotp_vision.tables import markdown_table

Row = Mapping[str, Any]


def to_markdown(rows: Sequence[Row]) -> str:
    """A Markdown table with the keys of the first row as its head."""
    head = list(rows[0])
    return markdown_table([head, *([_readable(row[name]) for name in head] for row in rows)]) + '\n'


def pivot(rows: Sequence[Row], index: Sequence[str], column: str, value: str) -> list[dict[str, Any]]:
    """One row per `index` with a column per value of `column`; empty where there is no such row."""
    columns = dict.fromkeys(f'{row[column]}' for row in rows)
    table: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in index)
        line = table.setdefault(key, dict(zip(index, key, strict=True)) | dict.fromkeys(columns, ''))
        line[f'{row[column]}'] = row[value]
    return list(table.values())


def to_csv(rows: Sequence[Row]) -> str:
    """The same as CSV, numbers in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _readable(value: Any) -> str:
    return f'{value:.4g}'.replace('nan', 'NaN') if isinstance(value, float) else str(value)
