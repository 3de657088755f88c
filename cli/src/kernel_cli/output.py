"""What goes where: one JSON document on standard output, everything for people on standard error."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click


class Document:
    """Holds what a command returns until it is printed."""

    value: Any = None


@dataclass(frozen=True)
class Result:
    """What a command returns that was done and found something wrong: its document, and the exit code."""

    value: Any
    exit_code: int


@contextlib.contextmanager
def document(enabled: bool) -> Iterator[Document]:
    """Print the document's value as JSON at the end, and send all else that is printed meanwhile to standard error.

    The file descriptor is redirected, so that extension modules and child processes are too.
    """
    out = Document()
    if not enabled:
        yield out
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
    if out.value is not None:
        click.echo(json.dumps(out.value, allow_nan=False, indent=2))


class _Echo(logging.Handler):
    """Prints records on standard error: whatever that is when they come, since a progress bar may have taken it over."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


@contextlib.contextmanager
def kernel_log() -> Iterator[None]:
    """Show what the kernel logs, from information on, as plain lines."""
    logger, handler = logging.getLogger("kernel_core"), _Echo()
    level, propagate = logger.level, logger.propagate
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def columns(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Return rows as aligned columns; the last one is not padded."""
    if not rows:
        return ""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ("  ".join([*(cell.ljust(w) for cell, w in zip(row[:-1], widths, strict=False)), row[-1]]) for row in rows)
    return "\n".join(indent + line.rstrip() for line in lines)
