"""Run `python -m benchmarks gpu` on a CPU."""

import json

from benchmarks import __main__, gpu
from benchmarks.gpu import launches

# An excerpt of a program compiled for a GPU.
PROGRAM = """\
HloModule jit_update, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_computation (p: f32[8]) -> (f32[], f32[]) {
  %p = f32[8]{0} parameter(0)
  %zero = f32[] constant(0)
  %one = f32[] reduce(%p, %zero), dimensions={0}, to_apply=%add
  ROOT %both = (f32[], f32[]) tuple(%one, %one)
}

%branch_0 (p: f32[8]) -> f32[] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %fusion.9 = f32[] fusion(%p.1), kind=kInput, calls=%fused_computation
}

%branch_1 (p: f32[8]) -> f32[] {
  ROOT %p.2 = f32[] parameter(0)
}

%command_buffer (p: f32[8]) -> f32[] {
  %p.3 = f32[8]{0} parameter(0)
  %fusion.1 = (f32[], /*index=1*/f32[]) fusion(%p.3), kind=kInput, calls=%fused_computation
  ROOT %first = f32[] get-tuple-element(%fusion.1), index=0
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p.4 = f32[8]{0} parameter(0), metadata={op_name="call(x)"}
  %call = f32[] call(%p.4), to_apply=%command_buffer
  %small = f32[] conditional(%flag, %p.4, %call), branch_computations={%branch_0, %branch_1}
  %start = ((f32[8]{0}), f32[8]{0}) fusion-start(%p.4), calls=%async
  %done = f32[8]{0} fusion-done(%start)
  ROOT %gemm = f32[8]{0:T(128)} custom-call(%done), custom_call_target="__cublas$gemm"
}
"""


def test_launched_counts_called_computations_and_not_fused_operations():
    assert launches.launched(PROGRAM) == {
        "fusion": 2, "fusion-start": 1, "custom-call": 1,
    }  # fmt: skip


def test_gpu_small_runs_each_part_and_saves_json_and_markdown(tmp_path, capsys):
    __main__.main(["gpu", "--small", "--out", str(tmp_path)])
    saved = json.loads((tmp_path / "cpu.json").read_text())["gpu"]
    assert saved["machine"]["device"] == "cpu"
    parts = {
        part: [row for row in saved["rows"] if row["part"] == part]
        for part in gpu.PARTS
    }
    notes = {row["note"] for rows in parts.values() for row in rows if "note" in row}
    expected = {
        'no compiler for GPUs; pip install "jax[cuda12]", then run with'
        " JAX_PLATFORMS=cpu",
    }
    assert {n for n in notes if not n.endswith("for this part")} == expected
    measured = [part for part in parts if len(parts[part]) > 2]
    assert measured == [x for x in gpu.PARTS if x != "counts"]
    assert not [row for row in saved["rows"] if "failed" in row]
    # A contender with a wrong result has no time.
    ours = [r for r in saved["rows"] if r.get("contender", "").startswith("optclip")]
    assert all("ms" in row for row in ours)
    text = (tmp_path / "gpu.md").read_text()
    assert [line[4:] for line in text.splitlines() if line.startswith("### ")] == [
        *gpu.PARTS
    ]
    assert text.partition("\n\n")[2].strip() in capsys.readouterr().out
