"""Fork, rewind and resume: a run goes another way from generation t, or on from its directory."""

import functools
import re
import shutil
from pathlib import Path

import anyio
import pytest

from es_cookbook.common.configs import load_config
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.schedules import Cosine
from es_cookbook.plugins.branches import rewind
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.runs.directory.directory import read_trained_on
from es_cookbook.runs.history.format import Fork
from es_cookbook.runs.history.store import read_header, read_history
from es_cookbook.runs.program import run as run_config
from tests.fakes import FakeEngineBuilder
from tests.said import refused, typed
from tests.tiny_run import TinyConfig, tiny, untimed

config = functools.partial(tiny, num_generations=6)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six generations; tests only read it."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    run_config(config(path))
    return path


def forks(*options: str) -> str:
    done = typed("fork", "trust=tests", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def resumes(log_path: Path, *options: str) -> None:
    done = typed("resume", f"log_path={log_path}", "trust=tests", *options)
    assert done.returncode == 0, done.stderr


def rewinds(log_path: Path, generation: int) -> None:
    rewind.main(rewind.Rewind(log_path=str(log_path), generation=generation))


def files(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def damage(path: Path, line: int) -> None:
    """Flip a bit of a line, counted from 1."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace(b":", b";", 1)
    path.write_bytes(b"".join(lines))


def same_run(one: Path, other: Path) -> None:
    assert list(read_history(one / "history.jsonl")) == list(read_history(other / "history.jsonl"))
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert untimed(one / name) == untimed(other / name)


# Fork.


def test_a_fork_without_changes_becomes_the_run_it_was_forked_from(
    tmp_path: Path, recorded: Path
) -> None:
    before = files(recorded)
    said = forks(f"log_path={recorded}", "generation=4", f"output={tmp_path / 'b'}")
    assert said.startswith(f"{tmp_path / 'b'} begins with generations 1 to 4 of {recorded}; to go")
    assert said.endswith(f" resume log_path={tmp_path / 'b'} trust=tests\n")
    header, parent = (read_header(path / "history.jsonl") for path in (tmp_path / "b", recorded))
    assert header is not None and parent is not None
    assert header.fork == Fork(str(recorded), 4) and header.weights == parent.weights
    assert len(list(read_history(tmp_path / "b/history.jsonl"))) == 4
    assert [row["progress/generation"] for row in untimed(tmp_path / "b/metrics.jsonl")] == [
        *range(4)
    ]
    resumes(tmp_path / "b")
    same_run(tmp_path / "b", recorded)
    assert files(recorded) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


def test_a_fork_takes_the_recorded_steps_as_given_and_its_own_fields_from_there_on(
    tmp_path: Path, recorded: Path
) -> None:
    changes = (
        *("seed=7", "num_generations=9", "engine.capacity=2", "optimizer.learning_rate=0.5"),
        "optimizer.learning_rate_schedule=cosine",
    )
    forks(f"log_path={recorded}", "generation=3", f"output={tmp_path / 'b'}", *changes)
    forked = load_config(tmp_path / "b/config.json", TinyConfig, ["tests"])
    assert forked == config(
        tmp_path / "b",
        seed=7,
        optimizer=ES(
            population_size=4, sigma=0.1, learning_rate=0.5, learning_rate_schedule=Cosine()
        ),
        num_generations=9,
        engine=FakeEngineBuilder(capacity=2),
    )
    resumes(tmp_path / "b")
    parent = list(read_history(recorded / "history.jsonl"))
    records = list(read_history(tmp_path / "b/history.jsonl"))
    assert len(records) == 9
    assert records[:3] == parent[:3] and records[3].step != parent[3].step
    # A fork of the fork, before and after where that began.
    for generation in (2, 5):
        output = tmp_path / f"c{generation}"
        forks(f"log_path={tmp_path / 'b'}", f"generation={generation}", f"output={output}")
        resumes(output)
        again = list(read_history(output / "history.jsonl"))
        assert again[:generation] == records[:generation] and len(again) == 9
    assert list(read_history(tmp_path / "c5/history.jsonl")) == records


def test_sizes_that_are_chosen_for_a_fork_without_generations_are_recorded(
    tmp_path: Path, recorded: Path
) -> None:
    sizes = ("generation=0", "size=optimizer.population_size", "num_generations=1")
    forks(f"log_path={recorded}", f"output={tmp_path / 'b'}", *sizes)
    resumes(tmp_path / "b")
    (record,) = read_history(tmp_path / "b/history.jsonl")
    found = load_config(tmp_path / "b/config.json", TinyConfig, ["tests"])
    assert found.optimizer.population_size == len(record.fitness_G) > 4


def test_what_says_what_the_steps_mean_cannot_change_and_the_rest_is_listed(
    tmp_path: Path, recorded: Path
) -> None:
    given = (f"log_path={recorded}", f"output={tmp_path / 'b'}", "trust=tests")
    for option in ("search_space.rank=2", f"model_name={tmp_path}", "preset=rank_2"):
        said = refused("fork", *given, option)
        assert "model_name cannot change in a fork" in said or "search_space cannot" in said
        assert "seed" in said and "optimizer" in said
    assert not (tmp_path / "b").exists()
    shown = forks("--help")
    assert "generation=None" in shown and "optimizer, preference, profile, rollout_timeout" in shown
    assert "model_name and search_space may not" in shown


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("generation=7",), "generation must be 0 to 6, since "),
        (("generation=-1",), "generation must be 0 to 6, since "),
        (("optimizer.sigmo=1",), "did you mean 'optimizer.sigma'?"),
        (("output={recorded}",), "output must be a new or empty directory, found "),
        (("size=num_generations",), "size is chosen before the first generation, so it needs "),
    ],
)
def test_a_mistake_in_a_fork_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, recorded: Path, options: tuple[str, ...], sentence: str
) -> None:
    given = [option.format(recorded=recorded, tmp=tmp_path) for option in options]
    output = f"output={tmp_path / 'b'}"
    assert sentence in refused("fork", f"log_path={recorded}", output, "trust=tests", *given)
    assert list(tmp_path.iterdir()) == []


def test_a_fork_saves_what_is_before_the_damage(tmp_path: Path, recorded: Path) -> None:
    shutil.copytree(recorded, tmp_path / "a")
    damage(tmp_path / "a/history.jsonl", line=5)  # Generation 3's, after the header and 0, 1, 2.
    a = tmp_path / "a"
    said = refused("resume", f"log_path={a}", "trust=tests")
    assert f" fork log_path={a} generation=3 output={a}-from-3" in said
    taken = ("generation=4", f"output={tmp_path / 'b'}", "trust=tests")
    assert "line 5 is damaged" in refused("fork", f"log_path={a}", *taken)
    (proposed,) = re.findall(r"\([\w -]+ fork ([^)]*)\)", said)
    forks(*proposed.split())
    resumes(tmp_path / "a-from-3")
    same_run(tmp_path / "a-from-3", recorded)


# Rewind.


def test_a_rewound_run_goes_on_as_it_did_and_what_was_cut_off_is_kept(
    tmp_path: Path, recorded: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    (run / "snapshots").mkdir()
    for generation in (2, 4, 6):
        (run / f"snapshots/{generation:06}.safetensors").write_bytes(b"%d" % generation)
    before = files(run)
    said = typed("rewind", str(run), "generation=4").stdout
    kept = run / "rewound" / "1"
    assert said.startswith(f"{run} holds 4 generations now, and {kept} the original run; to go")
    assert said.endswith(f" resume log_path={run}\n")
    assert len(list(read_history(run / "history.jsonl"))) == 4
    cut = files(run)
    for name, content in before.items():
        if name.startswith("snapshots"):
            assert (name in cut) == ("000006" not in name)
            assert (f"rewound/1/{name}" in cut) == ("000006" in name)
        else:
            assert cut[f"rewound/1/{name}"] == content
    rewinds(run, 1)
    resumes(run)
    same_run(run, recorded)
    assert sorted(path.name for path in (run / "rewound").iterdir()) == ["1", "2"]
    forks(f"log_path={run / 'rewound' / '1'}", f"output={tmp_path / 'again'}")
    resumes(tmp_path / "again")  # For the last evaluation, which belongs to no generation.
    same_run(tmp_path / "again", recorded)


def test_a_fork_that_is_rewound_behind_its_beginning_owns_what_follows(
    tmp_path: Path, recorded: Path
) -> None:
    forks(f"log_path={recorded}", "generation=4", f"output={tmp_path / 'b'}", "seed=3")
    rewinds(tmp_path / "b", 2)
    header = read_header(tmp_path / "b/history.jsonl")
    assert header is not None and header.fork == Fork(str(recorded), 2)
    resumes(tmp_path / "b")
    resumes(tmp_path / "b")  # Its optimizer is asked for every step from 2 on, and agrees.


def test_a_rewind_that_cannot_be_is_refused_and_changes_nothing(
    tmp_path: Path, recorded: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    before = files(run)
    with pytest.raises(ValueError, match=r"generation must be 0 to 6, since .*; found 9"):
        rewinds(run, 9)
    with pytest.raises(ValueError, match="holds 6 generations and no more: there is nothing to"):
        rewinds(run, 6)
    assert files(run) == before and not (run / "rewound").exists()


# Resume.


def test_a_run_records_what_it_trains_on_and_a_fork_what_it_was_trained_on_before(
    tmp_path: Path,
) -> None:
    def countdown(seed: int) -> CountdownDatasetBuilder:
        return CountdownDatasetBuilder(
            seed=seed, num_train=30, num_test=2, problems_per_generation=2
        )

    def digests(seed: int) -> list[tuple[int, ...]]:
        datasets = anyio.run(countdown(seed), FakeEngineBuilder().made[-1].tokenizer)
        return [problem.digests for problem in datasets.train.training_problems]

    run, forked = tmp_path / "run", tmp_path / "forked"
    run_config(config(run, dataset=countdown(0), num_generations=2))
    found = read_trained_on(run)
    assert found is not None and found.overlap(digests(0)) == 30
    others = found.overlap(digests(1))
    assert others is not None and others < 30

    forks(f"log_path={run}", f"output={forked}", "dataset.seed=1", "num_generations=3")
    resumes(forked)
    found = read_trained_on(forked)
    assert found is not None and [found.overlap(digests(seed)) for seed in (0, 1)] == [30, 30]
