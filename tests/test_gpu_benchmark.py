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
from tests.families import sampled


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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("part", sampled(["noise", "slots", "step", "torch"], 1))
def test_a_dry_run_executes_every_program_and_writes_their_rows(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)  # Put back afterwards.
    run_cli(gpu.main, gpu.Config, ["dry=true", f"results={tmp_path}", f"parts={part}"])
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert len(rows) >= 5 and all(row["value"] > 0 for row in rows)
    exact = [row for row in rows if "fingerprint" in row["name"] or "bit for bit" in row["name"]]
    assert all(row["met"] for row in exact)
