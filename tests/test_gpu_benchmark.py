"""`benchmarks.gpu` before there is a GPU: it refuses, and its dry run executes every part but vLLM.

Of vLLM's part a dry run takes a minute and a half where it is installed (`parts=vllm`), so it is
run by hand.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, harness
from es_cookbook.common.cli import run_cli


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it measures")
def test_it_refuses_in_one_sentence_without_a_gpu_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    with pytest.raises(SystemExit) as refused:
        run_cli(gpu.main, gpu.Config, [])
    assert refused.value.code == 1
    printed = capsys.readouterr().err.strip()
    assert "benchmarks.gpu measures on an NVIDIA GPU" in printed and "\n" not in printed
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_part_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_cli(gpu.main, gpu.Config, ["dry=true", "parts=slot"])
    assert "unknown part 'slot': did you mean 'slots'?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_a_dry_run_executes_every_program_and_writes_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)  # Put back afterwards.
    options = ["dry=true", f"results={tmp_path}", "parts=noise,slots,step,torch"]
    run_cli(gpu.main, gpu.Config, options)
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert all(row["value"] > 0 for row in rows)
    # Both kinds of noise, two rows for each of four programs, and a copy; slots; steps; the engine.
    assert len(rows) == 1 + 2 * 2 * 4 + 5 + 2 * 4 + 6
    exact = [row for row in rows if "fingerprint" in row["name"] or "bit for bit" in row["name"]]
    assert len(exact) == 4 and all(row["met"] for row in exact)
