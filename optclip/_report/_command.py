"""The arguments of the command line."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .._monitor import wrapped
from ._entries import LogError, printable, read
from ._log import log_of
from ._page import page_of, require_matplotlib
from ._report import json_of, report_of, text_of

_DESCRIPTION = """\
Print what a log of gradient norms says: a summary, what stands out, and a threshold
that clips a fraction of the steps.

The log has metrics of optclip, or a gradient norm and perhaps a loss and a step. It is
a file that optclip.plot.save wrote, JSON lines, a JSON array, Hugging Face's
trainer_state.json or the dicts that its Trainer prints, CSV or JSON of TensorBoard, CSV
of wandb, or one number per line. It may be zipped with gzip."""


def main(arguments: Sequence[str], version: str) -> int:
    """Run a command and return its exit code: 0, or 2 for bad input."""
    parser = _parser(version)
    options = parser.parse_args(arguments)
    try:
        if options.command is None:
            _print(parser.format_help())
        else:
            _report(options, version)
    except (LogError, ImportError) as error:
        return _failed(str(error))
    except OSError as error:
        if error.filename is None:
            # Python flushes the output, which may be no file, again when it exits.
            with contextlib.suppress(io.UnsupportedOperation):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            # The reader, such as head, has ended.
            return 1
        # Only the error of a full disk has no name.
        name = printable(str(error.filename or "the output"))
        return _failed(f"{name}: {error.strerror}.")
    return 0


def _failed(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _print(text: str) -> None:
    """Print text, with escapes for characters that the terminal does not have."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _report(options: argparse.Namespace, version: str) -> None:
    path, page = options.log, options.html
    if page:
        # A long log takes minutes, so the page is checked first.
        require_matplotlib()
        _check_page(path, Path(page), force=options.force)
    entries = read(path)
    log = log_of(entries, options.norm, options.loss)
    report = report_of(entries.path, log, options.rate, options.skip_first)
    if page:
        Path(page).write_text(page_of(report, version), encoding="utf-8")
    _print(json_of(report, version) if options.json else wrapped(text_of(report)))
    if page:
        print(f"wrote {page}", file=sys.stderr)


def _check_page(log: str, page: Path, *, force: bool) -> None:
    if page.is_dir() or not page.parent.is_dir():
        raise LogError(
            f"--html {page} is a folder, or in none. Pass the path of a file."
        )
    if page.exists() and os.path.exists(log) and os.path.samefile(log, page):
        raise LogError(f"--html {page} would replace the log. Pass another path.")
    if page.is_file() and not force:
        raise LogError(f"--html {page} exists. Pass --force to replace it.")


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
    report.add_argument("log", metavar="LOG", help="path of the log, - for a pipe")
    report.add_argument(
        "--html",
        metavar="PATH",
        help="also write a page with plots, one file (requires Matplotlib)",
    )
    report.add_argument("--force", action="store_true", help="replace an existing page")
    report.add_argument("--json", action="store_true", help="print JSON")
    report.add_argument(
        "--norm",
        metavar="KEY",
        help="key of the norm, for logs of other libraries (default: grad_norm or"
        " similar)",
    )
    report.add_argument("--loss", metavar="KEY", help="key of the training loss")
    report.add_argument(
        "--rate",
        type=fraction,
        default=0.1,
        help="fraction of the steps that the suggested threshold clips (default: 0.1)",
    )
    report.add_argument(
        "--skip-first",
        type=fraction,
        default=0.1,
        help="fraction of the steps to exclude at the start (default: 0.1)",
    )
    return parser


def fraction(text: str) -> float:
    number = float(text)  # An error names this function.
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return number
