"""The arguments of the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ._log import LogError, log_of, read
from ._page import page_of, require_matplotlib
from ._report import json_of, report_of, text_of

_DESCRIPTION = """\
Print what a log of gradient norms says: a summary, what stands out, and a threshold
that clips a fraction of the steps.

The log is a file that optclip.plot.save wrote, JSON lines of optclip.metrics, Hugging
Face's trainer_state.json, JSON lines with a gradient norm, a JSON array, or one number
per line."""


def main(arguments: Sequence[str], version: str) -> int:
    """Run a command and return its exit code: 0, or 2 for bad input."""
    parser = _parser(version)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        _report(options, version)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has ended. Python flushes again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (LogError, ImportError) as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}.")
    return 0


def _failed(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _report(options: argparse.Namespace, version: str) -> None:
    path, page = options.log, options.html
    if page:
        # A long log takes minutes, so the page is checked first.
        require_matplotlib()
        _check_page(path, Path(page))
    report = report_of(
        path, log_of(read(path), options.norm), options.rate, options.skip_first
    )
    if page:
        Path(page).write_text(page_of(report, version), encoding="utf-8")
    print(json_of(report, version) if options.json else text_of(report))
    if page:
        print(f"wrote {page}", file=sys.stderr)


def _check_page(log: str, page: Path) -> None:
    if not page.parent.is_dir():
        raise LogError(f"There is no folder {page.parent} for --html. Create it.")
    if page.is_dir():
        raise LogError(f"--html {page} is a folder. Pass the path of a file.")
    if page.exists() and os.path.samefile(log, page):
        raise LogError(f"--html {page} would replace the log. Pass another path.")


def _parser(version: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m optclip", description="Gradient clipping for JAX."
    )
    parser.add_argument("--version", action="version", version=f"optclip {version}")
    commands = parser.add_subparsers(dest="command", title="commands")
    report = commands.add_parser(
        "report",
        help="report on the gradient norms of a logged run",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("log", metavar="LOG", help="path of the log")
    page = "also write a page with plots, one file (requires Matplotlib)"
    report.add_argument("--html", metavar="PATH", help=page)
    report.add_argument("--json", action="store_true", help="print JSON")
    norm = (
        "key of the norm, for logs of other libraries (default: grad_norm or similar)"
    )
    report.add_argument("--norm", metavar="KEY", help=norm)
    rate = "fraction of the steps that the suggested threshold clips (default: 0.1)"
    report.add_argument("--rate", type=fraction, default=0.1, help=rate)
    skip_first = "fraction of the steps to exclude at the start (default: 0.1)"
    report.add_argument("--skip-first", type=fraction, default=0.1, help=skip_first)
    return parser


def fraction(text: str) -> float:
    number = float(text)  # An error names this function.
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return number
