"""The recipe conciseness: its questions, its command line, KL that is only reported, and a run."""

from pathlib import Path

from tests.recipe_problems import APART, short_run


def test_a_run_of_two_generations_reports_length_and_kl(tmp_path: Path) -> None:
    options = *APART, "dataset.tag=kind", "kl.problems_per_generation=2"
    first, *_, last = short_run("conciseness", tmp_path / "run", *options)
    for name in ("correct", "concise", "length", "excess"):
        assert {f"env/all/{name}", f"test/env/all/{name}"} <= first.keys()
    assert any(key.startswith("test/env/after/") for key in first)
    assert first["env/kl/kl"] > 1e-3 > abs(first["test/env/kl/kl"]), "the centre is the base"
    assert last["test/env/kl/kl"] > 1e-4, "and has moved"
