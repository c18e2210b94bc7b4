"""Tables as plain text."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as text in aligned columns, with a line under the first row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = '  '.join('-' * width for width in (*widths[:-1], len(rows[0][-1])))
    return '\n'.join([lines[0], rule, *lines[1:]])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, the first of which is its head."""
    lines = [f'| {" | ".join(row)} |' for row in rows]
    return '\n'.join([lines[0], '| --- ' * len(rows[0]) + '|', *lines[1:]])
