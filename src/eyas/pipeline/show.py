"""A result for people: nested values as an indented list, flat records as a table. Torch-free."""

from typing import Any

from rich.console import Console
from rich.table import Table

from eyas.pipeline.watch_view import look_words
from eyas.wiring.words import check_words

WIDE_LIST = 12
HIDDEN = frozenset({"files", "versions", "machine", "command", "format"})
NO_COLUMN = frozenset({"facts"})


def show(console: Console, result: dict[str, Any]) -> None:
    """Print one command's result to `console`."""
    if {"verdict", "checks", "findings"} <= result.keys():
        console.print(check_words(result), markup=False, soft_wrap=True)
        return
    if {"state", "phase", "idle_s"} <= result.keys():
        result = {"servers": [result]}
    if result.get("servers") and {"state", "idle_s"} <= result["servers"][0].keys():
        console.print("\n\n".join(look_words(one) for one in result["servers"]), markup=False, soft_wrap=True)
        return
    for key, value in result.items():
        if key not in HIDDEN:
            show_value(console, key, value, 0)


def show_value(console: Console, key: str, value: Any, depth: int) -> None:
    pad = "  " * depth
    if isinstance(value, dict) and value:
        console.print(f"{pad}{key}:", markup=False)
        for inner, item in value.items():
            if inner not in HIDDEN:
                show_value(console, inner, item, depth + 1)
    elif key == "findings" and isinstance(value, list) and value:
        show_findings(console, value, pad)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        console.print(f"{pad}{key}:", markup=False)
        console.print(table_of(value))
    else:
        console.print(f"{pad}{key}: {text_of(value)}", markup=False, soft_wrap=True)


def show_findings(console: Console, findings: list[dict[str, Any]], pad: str) -> None:
    """What is wrong, the two values that show it, and the line to change; errors first."""
    order = ("error", "warning", "info")
    console.print(f"{pad}findings:", markup=False)
    for found in sorted(findings, key=lambda item: order.index(item["severity"])):
        lines = (
            f"{found['severity']}: {found['code']} at {found['where']}",
            f"  {found['message']}",
            f"  expected: {found['expected']}",
            f"  found:    {found['found']}",
            f"  change:   {found['fix']}",
        )
        for line in lines:
            console.print(f"{pad}  {line}", markup=False, soft_wrap=True)


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Records with the first one's keys as columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    columns = [column for column in rows[0] if column not in NO_COLUMN]
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(text_of(row.get(column))) for column in columns))
    return table


def escape(text: str) -> str:
    return text.replace("[", "\\[")


def text_of(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        shown = ", ".join(text_of(item) for item in value[:WIDE_LIST])
        return f"[{shown}{', ...' if len(value) > WIDE_LIST else ''}]"
    return "none" if value is None else str(value)
