"""`benchmarks.gpu` before there is a GPU: it refuses, and its dry run executes every part."""

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.gpu.__main__ import Config, main
from benchmarks.gpu.parts import PARTS, OwnProcess, Part
from benchmarks.gpu.sizes import DRY, Emit, Sizes
from benchmarks.harness import row
from es_cookbook.common.cli import run_cli
from tests.families import sampled


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it measures")
def test_it_refuses_in_one_sentence_without_a_gpu_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    with pytest.raises(SystemExit) as refused:
        run_cli(main, Config, [])
    assert refused.value.code == 1
    printed = capsys.readouterr().err.strip()
    assert "benchmarks.gpu measures on an NVIDIA GPU" in printed and "\n" not in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("part", sampled(PARTS, 2))
def test_a_dry_run_executes_every_part_and_writes_its_rows(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm" if PARTS[part].on_vllm else "triton")
    monkeypatch.setattr(harness, "RESULTS", tmp_path)  # Put back afterwards.
    run_cli(main, Config, ["dry=true", f"results={tmp_path}", f"parts={part}", "seconds=1000"])
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert len(rows) >= 4
    exact = [row for row in rows if "fingerprint" in row["name"] or "bit for bit" in row["name"]]
    assert (exact or part in ("noise", "vllm_invariant")) and all(row["met"] for row in exact)


def fails(_: Sizes, __: Path, emit: Emit) -> None:
    emit(row("its first", [1.0], "s"))
    raise ValueError("there is no such kernel")


def overruns(_: Sizes, __: Path, ___: Emit) -> None:
    time.sleep(1000)


@pytest.mark.slow
def test_a_part_that_fails_or_overruns_is_ended_and_its_rows_are_kept(tmp_path: Path) -> None:
    long, failing = (OwnProcess(Part(run, 1), DRY, tmp_path) for run in (overruns, fails))
    assert (list(long.rows(0.1)), long.reason) == ([], "ended after 0 s, which is its time")
    assert [row.name for row in failing.rows(300)] == ["its first"]
    assert failing.reason == "there is no such kernel"
