"""The report of a long run: how long it takes to write, its size, and what a browser needs for it.

    python -m benchmarks.report

A run of 500 generations and 100,000 rollouts is made up, once with short answers, as Countdown's,
and once with long ones. Chromium (Debian's, through Playwright) opens the pages from the disk. The
time is from the start of the navigation, in a browser that is already there, until the charts are
painted. The memory is that of all its processes when the rollouts are unpacked, with pages that
processes share counted once.
"""

import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.harness import report, row
from es_cookbook.common.configs import config_to_json
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.plugins.report.writing import write_report
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from es_cookbook.runs.history.format import Header, Record, encode

GENERATIONS, ROLLOUTS, GENOMES = 500, 200, 64
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
WORDS = """the a number of so we have that first then which and is left with total each times add
subtract multiply divide remaining therefore apples trains hours miles minutes answer step now
because twice half three four seven twelve sum difference product check again wait"""


def main() -> None:
    rows = []
    for kind, long in (("short answers", False), ("long answers", True)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            make_run(path, long)
            seconds, used = [], []
            for _ in range(3):
                began, before = time.perf_counter(), time.process_time()
                write_report([path], path / "report.html")
                seconds.append(time.perf_counter() - began)
                used.append(time.process_time() - before)
            size = (path / "report.html").stat().st_size / 1e6
            opened, busy, megabytes = open_page(path / "report.html")
        rows += [
            row(f"written, {kind}", seconds, "s", at_most=10),
            row(f"processor time of writing, {kind}", used, "s"),
            row(f"size, {kind}", [size], "MB", at_most=5),
            row(f"first chart, {kind}", opened, "s", at_most=2),
            row(f"processor time of opening, {kind}", busy, "s"),
            row(f"memory of Chromium, {kind}", megabytes, "MB", at_most=500),
        ]
    report("report", rows)


def make_run(path: Path, long: bool) -> None:
    """Write the files of a run of the Countdown recipe, with made-up numbers and answers."""
    random.seed(0)
    config = CLIConfig(log_path=str(path), num_generations=GENERATIONS)
    (path / "config.json").write_text(config_to_json(config), "utf-8")
    (path / "metrics.jsonl").write_text("".join(metrics_lines()), "utf-8")
    (path / "history.jsonl").write_bytes(b"".join(history_lines()))
    with (path / "rollouts.jsonl").open("w", encoding="utf-8") as file:
        for generation in range(GENERATIONS):
            file.writelines(rollout_lines(generation, long))


def metrics_lines() -> Iterator[str]:
    for t in range(GENERATIONS + 1):
        share = t / GENERATIONS
        row = {"progress/generation": t, "progress/rollouts": 2048 * (t + 1)}
        row |= {"progress/tokens": 40_000 * (t + 1), "centre/drift_rms": 0.01 * share}
        keys = ("reward/mean", "reward/max_genome", "reward/min_genome", "reward/std_genomes")
        keys += ("env/all/correct", "env/all/format", "genomes/tied_fraction")
        keys += ("genomes/reliability", "step/rms_over_sigma", "time/ask", "time/sample")
        keys += ("time/score", "time/tell", "time/apply", "time/load", "time/total")
        row |= {key: share * random.random() for key in keys}
        if t % 10 == 0:
            row |= {f"test/env/all/{name}": random.random() for name in ("correct", "format")}
        yield json.dumps(row) + "\n"


def history_lines() -> Iterator[bytes]:
    yield encode(Header("model", None, None, "float32"))
    for t in range(GENERATIONS):
        terms = tuple(Term(random.getrandbits(63), random.gauss(0, 1e-3)) for _ in range(32))
        fitness_G = tuple(random.gauss(0, 1) for _ in range(GENOMES))
        yield encode(Record(t, Step(terms), fitness_G, random.getrandbits(64)))


def rollout_lines(generation: int, long: bool) -> Iterator[str]:
    for p in range(ROLLOUTS // 8):
        numbers = random.sample(range(1, 31), 3)
        prompt = f"{numbers[0]},{numbers[1]},{numbers[2]}={random.randrange(100)}\n"
        if long:
            prompt = f"{' '.join(random.choices(WORDS.split(), k=60))}? {prompt}"
        for _ in range(8):
            reward = random.choice((0.0, 0.1, 0.9, 1.0))
            metrics = {"correct": float(reward > 0.5), "format": 1.0, "well_formed": 1.0}
            turn = {"prompt": prompt, "action": answer(numbers, long), "stop_reason": "stop"}
            which = {"generation": generation, "problem": p, "genome": random.randrange(GENOMES)}
            rollout = {**which, "attempt": 0, "tags": [], "reward": reward}
            rollout["turns"] = [{**turn, "reward": reward, "metrics": metrics, "logs": {}}]
            yield json.dumps(rollout) + "\n"


def answer(numbers: list[int], long: bool) -> str:
    a, b, c = random.sample(numbers, 3)
    sign, other = random.choice("+-*"), random.choice("+-*")
    thought = " ".join(random.choices(WORDS.split(), k=200)) if long else f"{a}{sign}{b}={a + b}"
    return f"<think>{thought}</think><answer>{a}{sign}{b}{other}{c}</answer>"


def open_page(path: Path, repeats: int = 5) -> tuple[list[float], list[float], list[float]]:
    """Return seconds to the first chart by the clock and of processors, and unpacked megabytes."""
    from playwright.sync_api import sync_playwright

    seconds, busy, megabytes = [], [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for _ in range(repeats):
            page = browser.new_page()
            began, before = time.perf_counter(), sum(map(processor_seconds, browsers()))
            page.goto(path.as_uri(), wait_until="commit")
            page.wait_for_selector("html[data-drawn] .stage canvas", state="attached")
            page.screenshot()  # Painted, not only made.
            seconds.append(time.perf_counter() - began)
            busy.append(sum(map(processor_seconds, browsers())) - before)
            page.wait_for_selector("html[data-drawn=all]", state="attached")
            megabytes.append(memory_of_browser())
            page.close()
        browser.close()
    return seconds, busy, megabytes


def memory_of_browser() -> float:
    """Return memory of all of its processes, in megabytes."""
    return sum(process.memory_full_info().pss for process in browsers()) / 1e6


def browsers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    found = [child for child in children if "chrom" in child.name()]
    assert found, "the browser is among this process's children"
    return found


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
