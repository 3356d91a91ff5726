"""Write a report as one HTML file that loads nothing else."""

from __future__ import annotations

import base64
from html import escape

from .._monitor import percent
from ._figures import Figure, figures_of
from ._report import Norm, Report
from ._text import NOTHING, left_out, origin

# Plots keep a white ground on a dark page.
_CSS = """
:root { color-scheme: light dark; --text: #1b1f24; --page: #fff; --line: #d0d7de;
  --soft: #57606a; --box: #f3f5f7; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --page: #0d1117;
  --line: #3d444d; --soft: #9aa4af; --box: #161b22; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 74rem; padding: 1rem; color: var(--text);
  background: var(--page); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
h1, p, li, figcaption { overflow-wrap: anywhere; }
.soft, footer, figcaption { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.8rem 0.3rem 0;
  text-align: right; vertical-align: bottom; }
td { white-space: nowrap; }
th:first-child, td:first-child { min-width: 7rem; text-align: left;
  white-space: normal; }
pre { background: var(--box); border-radius: 6px; overflow-x: auto; padding: 0.8rem;
  font-size: 0.85rem; }
ul { padding-left: 1.2rem; }
.plots { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; }
img { background: #fff; border-radius: 6px; display: block; height: auto; width: 100%; }
figcaption { font-size: 0.9rem; margin-bottom: 0.3rem; }
footer { border-top: 1px solid var(--line); font-size: 0.85rem; margin-top: 2rem;
  padding-top: 0.5rem; }
"""


def page_of(report: Report, version: str) -> str:
    """Return the page."""
    figures = figures_of(report)
    title = f"Gradient norms of {escape(report.path.rpartition('/')[2])}"
    body = [
        f"<h1>{title}</h1>",
        f'<p class="soft">{escape(report.path)}: {escape(origin(report))}</p>',
        *_verdict(report),
        *_thresholds(report),
        *_quantiles(report),
        *_summary(report),
        *_plots(figures),
        f"<footer>Written by <code>python -m optclip report</code>, optclip {version}"
        "</footer>",
    ]
    viewport = "width=device-width, initial-scale=1"
    head = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        f'<meta name="viewport" content="{viewport}">',
        f"<title>{title}</title>",
        f"<style>{_CSS}</style></head>",
    ]
    return "\n".join([*head, "<body>", *body, "</body>", "</html>", ""])


def _verdict(report: Report) -> list[str]:
    findings = report.verdict or [f"{NOTHING.capitalize()}."]
    items = [f"<li>{escape(finding)}</li>" for finding in findings]
    return ["<h2>Verdict</h2>", "<ul>", *items, "</ul>"]


def _thresholds(report: Report) -> list[str]:
    # The suggestion is first, where a phone shows it without scrolling.
    suggested = ("norm", "suggested threshold", "would clip")
    recorded = ("median", "largest", "in step", "not finite", "steps")
    names = (*suggested, *recorded, "threshold", "clipped")
    heads = "".join(f"<th>{name}</th>" for name in names)
    rows = [f"<tr>{_cells(norm)}</tr>" for norm in report.norms]
    lines = ["<h2>Norms and thresholds</h2>", *_table(heads, rows)]
    problems = {norm.label: norm.problem for norm in report.norms if norm.problem}
    lines += [
        f'<p class="soft">No threshold for {escape(label)}: {escape(problem)}.</p>'
        for label, problem in problems.items()
    ]
    lines += [f'<p class="soft">{left_out(report)}.</p>'] if report.left else []
    return lines


def _quantiles(report: Report) -> list[str]:
    pairs = [(norm.label, norm.suggestion) for norm in report.norms]
    pairs = [(label, each) for label, each in pairs if each is not None]
    if not pairs:
        return []
    first = pairs[0][1]
    heads = "<th>norm</th>" + "".join(f"<th>{q:.0%}</th>" for q in first.quantiles)
    rows = []
    for label, each in pairs:
        cells = "".join(f"<td>{_number(x)}</td>" for x in each.quantiles.values())
        rows.append(f"<tr><td>{_name(label)}</td>{cells}</tr>")
    note = (
        f'<p class="soft">Quantiles and suggested thresholds exclude the first'
        f" {first.skipped} of {report.log.read} norms.</p>"
    )
    return ["<h2>Quantiles of the norms</h2>", *_table(heads, rows), note]


def _table(heads: str, rows: list[str]) -> list[str]:
    # A box that scrolls takes the focus, so that a keyboard can scroll it.
    box = '<div class="scroll" tabindex="0"><table>'
    return [box, f"<tr>{heads}</tr>", *rows, "</table></div>"]


def _cells(norm: Norm) -> str:
    suggestion = norm.suggestion
    numbers = (
        f"<b>{suggestion.max_norm:.9g}</b>" if suggestion else "",
        f"{suggestion.rate:.1%}" if suggestion else "",
        _number(norm.median),
        _number(norm.largest),
        "" if norm.at is None else str(norm.at),
        str(norm.nonfinite),
        str(norm.steps),
        _number(norm.threshold),
        "" if norm.clipped is None else percent(norm.clipped),
    )
    cells = "".join(f"<td>{number or '-'}</td>" for number in numbers)
    return f"<td>{_name(norm.label)}</td>{cells}"


def _name(label: str) -> str:
    """Return a name that a narrow page breaks between words only."""
    return escape(label).replace("/", "/<wbr>").replace("_", "_<wbr>")


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.4g}"


def _summary(report: Report) -> list[str]:
    if not report.summary:
        return []
    text = escape("\n".join(report.summary))
    return ["<h2>Summary of the last step</h2>", f'<pre tabindex="0">{text}</pre>']


def _plots(figures: list[Figure]) -> list[str]:
    lines = ["<h2>Plots</h2>", '<div class="plots">']
    for figure in figures:
        data = base64.b64encode(figure.png).decode()
        image = f'<img alt="{escape(figure.text)}" src="data:image/png;base64,{data}">'
        caption = f"<figcaption>{escape(figure.title)}</figcaption>"
        lines += [f"<figure>{caption}{image}</figure>"]
    return [*lines, "</div>"] if figures else []
