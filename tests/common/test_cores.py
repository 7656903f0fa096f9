"""Engines that share a machine are told how many threads are theirs."""

import os

import pytest

from es_cookbook.common.cores import num_cores


@pytest.mark.parametrize(
    ("asked", "threads"), [("1", 1), ("9999", None), ("", None), ("2,2", None)]
)
def test_threads_are_at_most_what_omp_num_threads_says(
    monkeypatch: pytest.MonkeyPatch, asked: str, threads: int | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    all_of_them = num_cores()
    assert 1 <= all_of_them <= (os.cpu_count() or 1)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert num_cores() == (threads or all_of_them)
