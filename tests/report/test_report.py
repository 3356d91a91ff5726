"""`python -m optclip report` reads a log, and says what its norms mean."""

import gzip
import html.parser
import io
import json
import os
import pathlib
import runpy
import struct
import subprocess
import sys
from base64 import b64decode

import numpy as np
import pytest

from optclip import plot

ROOT = pathlib.Path(__file__).parents[2]
SIZE = 100
# Falling norms with a spike, of which the threshold 1.5 clips some.
NORMS = np.random.default_rng(0).gamma(6.0, 0.2, SIZE) + 1 / np.arange(1, SIZE + 1)
NORMS[70] = 40.0
LIMIT = 1.5


def record(norms=NORMS, limit=LIMIT, name="clip", part=""):
    """Return the metrics of clipping at a threshold, one array per key."""
    arrays = {
        "norm": norms,
        "threshold": np.full_like(norms, limit),
        "coefficient": np.minimum(1.0, limit / norms),
    }
    return {"/".join(filter(None, (name, k, part))): x for k, x in arrays.items()}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def command(monkeypatch, capsys):
    """Return a function that runs the command: exit code, stdout, stderr."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["optclip", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("optclip", run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return command


@pytest.fixture
def log(tmp_path):
    """Return a function that writes a log and returns its path."""

    def write(content):
        path = tmp_path / "run.jsonl"
        if isinstance(content, dict):
            plot.save(content, path)
        else:
            path.write_bytes(
                content if isinstance(content, bytes) else content.encode()
            )
        return path

    return write


@pytest.fixture
def report(command, log):
    """Return a function that reports on a log as JSON."""

    def report(content, *options):
        code, out, err = command("report", log(content), "--json", *options)
        assert code == 0
        document = json.loads(out, parse_constant=lambda token: pytest.fail(token))
        assert (err, len(document["notes"]) <= 1) == ("", True)
        return document

    return report


def test_report_of_saved_metrics_equals_numpy(report):
    steps = 10.0 * np.arange(SIZE)
    document = report({"step": steps, **record()}, "--rate", "0.2")
    (norm,) = document["norms"]
    assert (document["first_step"], document["last_step"]) == (0, 990)
    assert (norm["name"], norm["part"], norm["threshold"]) == ("clip", None, LIMIT)
    assert (norm["largest"], norm["largest_step"]) == (40.0, 700)
    np.testing.assert_allclose(norm["median"], np.median(NORMS), rtol=1e-12)
    assert norm["clipped"] == np.mean(NORMS > LIMIT) > 0
    suggestion, later = norm["suggestion"], NORMS[SIZE // 10 :]
    assert suggestion["rate"] == np.mean(later > suggestion["max_norm"])
    assert abs(suggestion["rate"] - 0.2) <= 0.04
    for q, x in suggestion["quantiles"].items():
        np.testing.assert_allclose(x, np.quantile(later, float(q)), rtol=1e-12)
    assert any("in step 700" in finding for finding in document["verdict"])
    assert document["summary"][0].startswith(f"clip: norm {NORMS[-1]:.4g}")


STATE = [{"loss": 2.0, "grad_norm": x, "step": 10 * i} for i, x in enumerate(NORMS)]
STATE.insert(50, {"eval_loss": 1.0, "step": 490})
MIXED_UP = sorted(STATE, key=lambda row: (row["step"] // 30, -row["step"]))
RAW = [{"a/grad_norm": 1.0, "a/raw_grad_norm": x} for x in NORMS]
MIXED = [
    dict(zip(record(), x, strict=True)) for x in zip(*record().values(), strict=True)
]
MIXED.insert(3, {"eval/loss": 1.0, "eval/steps": 2})
TEXT = "".join(f"{x}\r\n" for x in NORMS)
TABLE = "".join(f"1.5e9,{10 * i},{x}\r\n" for i, x in enumerate(NORMS))
TENSORBOARD = [[1.5e9 + i, 10 * i, x] for i, x in enumerate(NORMS)]
WANDB = '"Step","a - grad_norm","a - grad_norm__MIN","a - grad_norm__MAX"\n'
WANDB += "".join(f'"{i}","{x}","0","99"\n{i + 0.5},,,\n' for i, x in enumerate(NORMS))
BAR = "\r 10%|█▎  | 50/500 [00:10<01:30, 5.00it/s]"
PRINTED = "Loading, please wait\n" + "".join(
    f"{BAR}{{'loss': {1 / x}, 'grad_norm': tensor({x}, device='cuda:0'), 'epoch': 0.01}}\n"
    for x in NORMS
)
TEXTS = "".join(f"{{'loss': '1', 'grad_norm': '{x}'}} \n\n" for x in [*NORMS, "nan"])
LEVANTER = [
    {f"{x}/norm/{y}": 9 * n for x in ("grad", "params") for y in "ab"} for n in NORMS
]
LEVANTER = [a | {"grad/norm/total": n} for a, n in zip(LEVANTER, NORMS, strict=True)]


@pytest.mark.parametrize(
    ("content", "options", "key", "last"),
    [
        (lines(STATE), (), "grad_norm", 990),
        (json.dumps({"epoch": 1.0, "log_history": STATE}, indent=2), (), "grad_norm", 990),
        (json.dumps([*NORMS, float("nan")]), (), "norm", SIZE),
        (json.dumps([*NORMS], indent=1), (), "norm", SIZE - 1),
        (b"\xef\xbb\xbf" + TEXT.encode(), (), "norm", SIZE - 1),
        (TEXT + "inf\n\nNaN\nnan\n", (), "norm", SIZE + 2),
        (lines(RAW), (), "raw_grad_norm", SIZE - 1),
        (lines({"a/b": x, "grad_norm": None} for x in NORMS), ("--norm", "a/b"), "b", SIZE - 1),
        (lines({"grad_norm": str(x)} for x in NORMS), (), "grad_norm", SIZE - 1),
        (lines(MIXED), (), "clip", SIZE - 1),
        (lines(STATE) + "{oops\n3.0\n", (), "grad_norm", 990),
        (lines(STATE[::-1]), (), "grad_norm", 990),
        (lines(MIXED_UP), (), "grad_norm", 990),
        (gzip.compress(lines(STATE).encode()) + gzip.compress(b'{"grad_no'), (), "grad_norm", 990),
        (gzip.compress(TEXT.encode() + b"1\n" * 9, 0)[: len(TEXT) + 15], (), "norm", SIZE - 1),
        (TEXT.encode("utf-16"), (), "norm", SIZE - 1),
        ("Wall time,Step,Value\r\n" + TABLE, (), "Value", 990),
        ("Wall time,Step,Value\r\n" + TABLE + "1.5e9,10", (), "Value", 990),
        (json.dumps(TENSORBOARD), (), "Value", 990),
        (WANDB, (), "grad_norm", SIZE - 1),
        ("step;grad-norm\n" + "".join(f"{i};{x}\n" for i, x in enumerate(NORMS)), (), "grad-norm", SIZE - 1),
        (PRINTED, (), "grad_norm", SIZE - 1),
        (PRINTED.encode() + BAR.encode()[:9], (), "grad_norm", SIZE - 1),
        (TEXTS, (), "grad_norm", SIZE),
        (lines({"metrics": {"loss": 1, "norms": {"grad_norm": x}}} for x in NORMS), (), "grad_norm", SIZE - 1),
        (lines(LEVANTER), (), "grad.norm.total", SIZE - 1),
        (lines({"$x$/grad_norm\ud800": x} for x in NORMS), ("--norm", "$x$/grad_norm\\ud800"), "grad_norm\\ud800", SIZE - 1),
    ],
)  # fmt: skip
def test_report_reads_each_format(report, content, options, key, last):
    document = report(content, *options)
    (norm,) = document["norms"]
    assert (norm["name"], document["last_step"]) == (key, last)
    assert norm["steps"] == SIZE + norm["nonfinite"]
    np.testing.assert_allclose(norm["median"], np.median(NORMS), rtol=1e-12)
    assert norm["largest"] == 40.0
    assert any("40 in step" in finding for finding in document["verdict"])


PROBE = ["largest_norm", "mean_coefficient", "clipped", "fraction", "nonfinite"]
PARTS = record(part="a") | record(3 * NORMS, part="b")
MANY = {
    k: x for i in range(12) for k, x in record((i + 1) * NORMS, part=f"{i}").items()
}
INF = record(part="a") | record(np.append(NORMS[1:], np.inf), part="b")
SKIP = record(name="skip") | {"skip/skipped": NORMS, "skip/consecutive": 0 * NORMS}
SKIP |= {"skip/loss": NORMS, "skip/loss_threshold": NORMS}
NO_NORM = {"clip/fraction": 0 * NORMS + 0.5}


@pytest.mark.parametrize(
    ("content", "labels", "reason"),
    [
        (PARTS, ["clip/b", "clip/a"], None),
        (MANY, [f"clip/{i}" for i in range(11, 1, -1)], None),
        (INF, ["clip/a", "clip/b"], None),
        (record() | SKIP, ["clip"], None),
        (SKIP, ["skip"], None),
        (record() | {f"cell/{field}": NORMS for field in PROBE}, ["clip"], None),
        (record() | {f"cell/{PROBE[0]}": NORMS}, ["clip"], None),
        (record() | NO_NORM, ["clip"], "record='leaves'"),
        ({k: x[:5] for k, x in record().items()}, ["clip"], "at least 10 finite numbers"),
        (record(np.full(20, np.nan), np.inf), ["clip"], "at least 10 finite numbers"),
    ],
)  # fmt: skip
def test_report_suggests_threshold_for_each_norm_or_says_why_not(
    command, report, log, content, labels, reason
):
    norms = report(content)["norms"]
    names = ["/".join(filter(None, (x["name"], x["part"]))) for x in norms]
    assert names == labels
    for norm in norms:
        assert (norm["suggestion"] is None) == (reason is not None)
        assert (reason or "") in (norm["no_suggestion"] or "")
    _, out, _ = command("report", log(content), "--skip-first", "0")
    assert all(f"Suggested threshold for {label}\n" in out for label in labels)
    assert ("and 2 more" in out) == (len(labels) == 10)


GOOD = {"grad_norm": 1.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty or damaged"),
        (" \n\n", "is empty or damaged"),
        ("[]", "has no entries"),
        ("epoch 1\n2\n", "Line 1 of"),
        (b"\x93NUMPY\x01\n", "Line 1 of"),
        (b"1\n2\n\xff\n", "Line 3 of"),
        ("1\n2\n{oops\n3\n", "Line 3 of"),
        ('{"grad_norm": \n,\n', "Line 2 of"),
        ('{\n"log_history": [\n1,,\n2]\n}', "Line 3 of"),
        ("[" * 100_000, "has no known format"),
        ('{\n"a": 1\n}', "the numbers 'a'."),
        (b"\x1f\x8b" + b"x" * 60, "is empty or damaged"),
        ("Step,a - grad_norm,a - grad_norm\n1,2,3\n", "has no known format"),
        ("Step,loss,lr\n1,2,x\n", "the numbers 'Step', 'loss'."),
        ("Step,a - grad_norm,b - grad_norm\n1,2,3\n", "--norm 'a - grad_norm'"),
        ("loss,grad_norm\n1,high\n", "Line 2 of"),
        (lines([GOOD | {"step": 1e300}]), "1e+300 at 'step'"),
        (lines([{"params/norm/total": 1.0, "params/norm/a": 1.0}]), "'params/norm/total'"),
        ("1\n-2\n", "Line 2 of"),
        (lines([{"clip/norm/a": x, "clip/steps/a": 1} for x in (1.0, -1.0)]), "Line 2 of"),
        (lines([GOOD, {"grad_norm": True}]), "Line 2 of"),
        (lines([GOOD, {"grad_norm": "high"}]), "Line 2 of"),
        ('{"grad_norm": [1.0, 2.0]}', "[1.0, 2.0] at 'grad_norm'. Log one norm per step"),
        ("[1, [2]]", "Entry 2 of"),
        (lines([GOOD | {"step": 1}, GOOD | {"step": float("nan")}]), "Line 2 of"),
        (lines([{"clip/norm": 1.0, "clip/steps": float("nan")}] * 2), "Line 1 of"),
        (lines([GOOD | {"step": 1}, GOOD]), "Line 2 of"),
        (lines([MIXED[0], {}, {"clip/norm": 1.0}]), "Line 3 of"),
        (lines([{"clip/norm": 1.0}, MIXED[0]]), "Line 1 of"),
        (lines([{"loss": 1.0, "lr": 0.1, "run": "a"}]), "the numbers 'loss', 'lr'."),
        (lines([{}]), "no numbers"),
        (lines([{"/norm": 1.0, "a/norm/": 1.0}]), "the numbers '/norm', 'a/norm/'"),
        (lines([{"a/grad_norm": 1.0, "b/grad_norm": 1.0}]), "--norm a/grad_norm"),
    ],
)  # fmt: skip
def test_bad_log_ends_with_one_line_and_code_2(command, log, content, words):
    code, out, err = command("report", log(content))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert words in err


def test_missing_key_or_file_ends_with_code_2(command, log, tmp_path):
    for content, present in (
        (lines([GOOD]), "'grad_norm'"),
        ("1\n2\n", "the numbers 'norm'"),
    ):
        code, _, err = command("report", log(content), "--norm", "x")
        assert code == 2
        assert "has no 'x'" in err
        assert present in err
    path = log(TEXT)
    for arguments, words in [
        ((tmp_path,), "Is a directory"),
        ((tmp_path / "none",), "No such file"),
        ((path, "--html", tmp_path / "none" / "page.html"), "or in none"),
        ((path, "--html", tmp_path), "is a folder"),
        ((path, "--html", path), "would replace the log"),
        ((path, "--rate", "2"), "must be from 0 to 1"),
        ((path, "--rate", "x"), "invalid fraction"),
    ]:
        code, out, err = command("report", *arguments)
        assert (code, out) == (2, "")
        assert words in err
    assert path.read_bytes() == TEXT.encode()


class Page(html.parser.HTMLParser):
    """Parse what a page loads, and the images in it."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.images, self.captions, self.last = [], {}, [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.loads += [values[k] for k in ("src", "href") if k in values]
        if tag == "img":
            self.images[values["alt"]] = b64decode(values["src"].partition(",")[2])
        self.last = tag

    def handle_data(self, data):
        self.captions += [data] if self.last == "figcaption" else []
        self.last = ""


LEAVES = {f"clip/leaf_norm/$梯{'layer/' * 9}<{i}>$": i * NORMS for i in range(3)}
PAGES = {
    "recorded": (
        {"step": np.arange(SIZE), **record(), **SKIP, **LEAVES},
        ["loss", "norm at each step", "fraction of steps clipped", "distribution", "norm of each part"],
    ),
    "planned": (TEXT, ["norm, if clipped at 1.8", "fraction that 1.8 would clip", "distribution"]),
    "groups": (MANY, ["clip/11: norm at each step", "norm of each part"]),
    "loss": (lines([{"loss": -1.0, "$x$": 1.0}, {"loss": float("inf"), "$x$": 2.0}] * 9), ["loss at each step"]),
    "short": ("1\n2\n", []),
    "not finite": (record(np.full(20, np.nan), 1.0), ["norm at each step"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_page_is_one_file_with_described_plots_for_a_phone(
    command, log, tmp_path, name
):
    content, captions = PAGES[name]
    path = tmp_path / "page.html"
    options = ["--norm", "$x$"] if name == "loss" else []
    code, _, err = command("report", log(content), "--html", path, *options)
    assert (code, err) == (0, f"wrote {path}\n")
    text = path.read_text()
    page = Page(text)
    assert all(x.startswith("data:image/png;base64,") for x in page.loads)
    assert "http" not in text
    assert "<0>" not in text
    assert "width=device-width" in text
    for words in captions:
        assert any(words in caption for caption in page.captions)
    assert len(page.captions) == len(page.loads) >= len(captions)
    for alt, png in page.images.items():
        assert len(alt) > 20
        # Twice the width of a phone's page, for its dense screen.
        assert struct.unpack(">I", png[16:20]) == (740,)


def test_report_names_and_draws_high_loss_of_each_format(command, log, tmp_path):
    path = tmp_path / "page.html"
    losses = 2.5 + 0.01 * (np.arange(SIZE) % 7) + 4 * (np.arange(SIZE) == 70)
    rows = [
        {"Step": i, "train/loss": float(x), "grad_norm": 1.0}
        for i, x in enumerate(losses)
    ]
    table = [",".join(map(str, row.values())) for row in rows]
    table = "\n".join([",".join(rows[0]), *table, ""])
    apart = [
        {"Step": row["Step"], k: row[k]}
        for k in ("lm loss", "grad_norm")
        for row in ({**x, "lm loss": x["train/loss"]} for x in rows)
    ]
    together = sorted(apart, key=lambda row: row["Step"])
    printed = "\n".join(map(str, rows))
    for content in (lines(rows), printed, table, lines(apart), lines(together)):
        _, out, _ = command("report", log(content), "--html", path, "--force")
        assert "-> loss 6.5 in step 70, 2.6 times its running median." in out
        assert "loss at each step" in Page(path.read_text()).captions


def test_page_requires_matplotlib(command, log, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "page.html"
    code, out, err = command("report", log(TEXT), "--html", path)
    assert (code, out, path.exists()) == (2, "", False)
    assert err.startswith("error: --html requires Matplotlib")


def test_incomplete_last_line_is_skipped_with_a_note(command, log):
    code, out, err = command("report", log(lines([GOOD] * 30) + '{"grad_no'))
    assert (code, err) == (0, "")
    assert "'grad_norm' in 30 lines" in out
    assert "nothing stands out" in out
    assert "note: line 31, the last, is incomplete and was skipped\n" in out


ODD = [
    1e300,
    5e-324,
    10**400,
    -1,
    True,
    None,
    [1.0],
    {"a": 1},
    "",
    "NaN",
    "$\\frac{",
    float("-inf"),
]


@pytest.mark.parametrize("key", [*MIXED[0], "step", "clip/steps", "loss", "grad_norm"])
def test_odd_numbers_end_with_a_report_or_one_line(command, log, key):
    for odd in ODD:
        rows = [
            x | {"step": i, key: odd}
            for i, x in enumerate(MIXED)
            if "eval/loss" not in x
        ]
        table = [",".join(map(str, row.values())) for row in rows]
        printed = "\n".join(map(str, rows))
        for content in (lines(rows), "\n".join([",".join(rows[0]), *table]), printed):
            code, out, err = command("report", log(content), "--json")
            assert (code, err.count("error: "), bool(out)) in (
                (0, 0, True),
                (2, 1, False),
            )
            assert "Traceback" not in err


@pytest.mark.parametrize("content", [lines(STATE), PRINTED, WANDB, TABLE, TEXT])
def test_cut_log_is_read_up_to_the_cut(command, log, content):
    content = f"Wall time,Step,Value\n{TABLE}" if content == TABLE else content
    data = content.encode()
    for cut in range(len(data) // 2, len(data) // 2 + 60):
        code, out, err = command("report", log(data[:cut]), "--json")
        assert (code, err) == (0, "")
        (norm,) = json.loads(out)["norms"]
        if "may be incomplete" not in out:
            assert norm["median"] == np.median(NORMS[: norm["steps"]])


def test_closed_pipe_ends_quietly(command, log, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert command("report", log(TEXT))[::2] == (1, "")


def test_full_disk_ends_with_one_line(command, log, monkeypatch):
    code, _, err = command("report", log(TEXT), "--html", "/dev/full")
    assert (code, err) == (2, "error: the output: No space left on device.\n")
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        code, _, err = command("report", log(TEXT))
    assert (code, err) == (2, "error: the output: No space left on device.\n")


@pytest.mark.parametrize("path", ["-", "/dev/stdin", "/dev/fd/{}"])
def test_report_reads_pipe(command, path):
    reader, writer = os.pipe()
    os.write(writer, TEXT.encode())
    os.close(writer)
    stdin = os.dup(0)
    os.dup2(reader, 0)
    try:
        code, out, err = command("report", path.format(reader))
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(reader)
    assert (code, err) == (0, "")
    assert f": 'norm' in {SIZE} lines, numbered 0 to 99\n" in out


def test_terminal_without_a_character_prints_its_code(command, log, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    path = log(lines({"é\n\x1b[31m/grad_norm": x} for x in NORMS))
    monkeypatch.setattr(sys, "stdout", stream)
    assert command("report", path.rename(path.with_name("ü.jsonl")))[::2] == (0, "")
    text = stream.buffer.getvalue().decode()
    assert "\\xfc.jsonl: '\\xe9\\n\\x1b[31m/grad_norm' in 100 lines" in " ".join(
        text.split()
    )


def test_existing_page_is_replaced_only_with_force(command, log, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("mine")
    code, _, err = command("report", log(TEXT), "--html", path)
    assert (code, path.read_text()) == (2, "mine")
    assert "Pass --force" in err
    assert command("report", log(TEXT), "--html", path, "--force")[0] == 0
    assert "<html" in path.read_text()


@pytest.mark.parametrize("key", ["step", "epoch"])
def test_report_counts_restarts(command, log, key):
    steps = [*range(60), *range(40, 50), *range(45, 75)]
    rows = [{"grad_norm": x, key: i} for i, x in zip(steps, NORMS, strict=True)]
    ends = {"step": "steps 0 to 74", "epoch": "numbered 0 to 29"}[key]
    assert f", {ends}, 2 restarts\n" in command("report", log(lines(rows)))[1]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (lines({"grad_norm": x, "step": i / 2} for i, x in enumerate(NORMS)), (), "steps 0 to 49.5\n"),
        (lines({"a/loss": 1.0, "b/loss": 1.0, "val/loss": 1.0, **GOOD} for _ in NORMS), (), "perhaps 'a/loss', 'b/loss': pass --loss KEY\n"),
        (lines(x for n in NORMS for x in ({"loss": n}, {"grad_norm": n})), (), "no 'loss' beside a norm is a number"),
        (lines({"a/loss": x, "b/loss": 1.0, **GOOD} for x in NORMS), ("--loss", "a/loss"), "-> loss 40 in step 70"),
        (lines(row | {"grad_norm": x} for row, x in zip(STATE, [1.0] * 60 + [None] * 41, strict=True)), (), "41 losses have no norm, since step 590;"),
        (lines(row | {"process": i} for row in STATE for i in (0, 1)), (), "several rows each, as of several processes"),
        ("loss,grad_norm\n" + ("2,1\n2,\n2,\n" * 20) + "2,\n" * 9, (), "11 losses have no norm, since line 60;"),
        ("loss,grad_norm\n" + "2,1\n" * 20 + "2,\n" + "2,1\n" * 9, (), "1 loss has no norm, since line 22;"),
    ],
)  # fmt: skip
def test_report_says_what_it_did_not_read(command, log, content, options, words):
    code, out, err = command("report", log(content), *options)
    assert (code, err) == (0, "")
    assert words in out
    assert ("note: " in out) == ("->" not in words and "steps" not in words)


def test_program_prints_help_and_version(command):
    assert "report on the gradient norms" in command()[1]
    words = [sys.executable, "-m", "optclip", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout[:10]) == (0, "optclip 0.")


def test_output_on_the_page_of_plots_is_printed(command, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "monitoring_and_plots.md").read_text()
    shown = text.split("```text\n")[1].split("```")[0]
    norms = np.random.default_rng(0).gamma(4.0, size=1000)
    norms[700] = 120.0
    entries = [{"grad_norm": x, "step": 10 * (i + 1)} for i, x in enumerate(norms)]
    monkeypatch.chdir(tmp_path)
    path = pathlib.Path("trainer_state.json")
    path.write_text(json.dumps({"log_history": entries}))
    assert command("report", path) == (0, shown, "")
