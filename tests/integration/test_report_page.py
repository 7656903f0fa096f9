"""The report in Chromium: it draws, answers the mouse and the keyboard, and obeys no run's text.

A request, a dialog or a message on the console fails whatever test it happens in.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from es_cookbook.plugins.report.writing import write_report
from tests.plugins.report.made_runs import GRADIENTS, grow, make_run, rollout

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed (apt-get install chromium)", allow_module_level=True)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright, which drives Chromium, is not installed"
)
pytestmark = pytest.mark.slow
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(2)</script><a href='javascript:alert(3)'>a</a>",
    "\x1b[31mred\x1b[0m \x07 \x00",
    "left \u202etxet tfel-ot-thgir\u202c and \u2067more",
    "A" * 1_000_000,
    "half a pair: \ud83d, and a mark: \ufeff",
    "مرحبا بالعالم 1 + 2 = 3",
    "Z̸̛̼͌̀a̵̢̛͔͐l̶͙̈́g̷̰̀o̸̝͝ " * 200,
]
Opened = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: "Browser", tmp_path: Path) -> Generator[Opened]:
    """Opens a page about runs in a new window, and fails for all that a page must not do."""
    complaints: list[str] = []
    contexts = []

    def open_page(*runs: Path, url: str = "", **settings: object) -> "Page":
        if not url:
            write_report(runs, tmp_path / "report.html")
            url = (tmp_path / "report.html").as_uri()
        context = browser.new_context(**{"viewport": {"width": 1300, "height": 900}, **settings})
        contexts.append(context)
        page = context.new_page()
        page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
        page.on("console", lambda message: complaints.append(f"console {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error {error}"))
        base = url.rpartition("/")[0]
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((base, "data:", "blob:"))
                else complaints.append(f"request {request.url}")
            ),
        )
        page.goto(url)
        page.wait_for_selector("html[data-drawn=all]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", generations=8, num_generations=8)


def is_drawn(page: "Page", chart: str) -> bool:
    """Whether there is ink on a chart's canvas, once it is in sight."""
    page.locator(f"#{chart}").scroll_into_view_if_needed()
    return page.locator(f"#{chart} canvas").evaluate(
        "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)"
        ".data.some((value, i) => i % 4 === 3 && value > 0)"
    )


def counts(page: "Page", told: str) -> None:
    """Waits until the browser tells so many rollouts: filters wait for more typing first."""
    playwright.expect(page.locator("#browser .count")).to_have_text(told, timeout=10_000)


def reads(page: "Page", selector: str, *told: str) -> None:
    """Waits until an element's text holds each of these: a page draws after an event, not in it."""
    for text in told:
        playwright.expect(page.locator(selector)).to_contain_text(text, use_inner_text=True)


def lists(page: "Page", selector: str, told: list[str | re.Pattern[str]]) -> None:
    """Waits until the elements' texts are these."""
    playwright.expect(page.locator(selector)).to_have_text(told, use_inner_text=True)


def has(page: "Page", selector: str, attribute: str, value: str) -> None:
    """Waits until an element's attribute is this."""
    playwright.expect(page.locator(selector)).to_have_attribute(attribute, value)


def test_every_chart_is_drawn_and_has_its_numbers(opened: Opened, run: Path) -> None:
    page = opened(run)
    shown = page.locator(".card:visible[id]").evaluate_all("cards => cards.map(card => card.id)")
    assert set(shown) >= {"held-out", "reward", "trained", "fitness", "step", "drift", "times"}
    assert set(shown) >= {"signal", "speed", "tokens", "lengths", "any"}
    assert [chart for chart in shown if not is_drawn(page, chart)] == []
    reads(page, "#summary", "Held-out correct: 25.0 % → 75.0 % (+50.0 points)")
    page.locator("#held-out summary").click()
    lists(page, "#held-out tbody td", ["25.0 %", "45.0 %", "65.0 %", "85.0 %", "75.0 %"])
    reads(page, ".facts", "0.01")


def test_held_out_values_have_an_interval_and_what_to_look_at_is_said(
    opened: Opened, run: Path
) -> None:
    measured = {
        "progress/generation": 8,
        "rollouts/truncated": 0.4,
        "test/env/all/correct": 0.75,
        "test/low/env/all/correct": 0.61,
        "test/high/env/all/correct": 0.853,
        "test/problems": 40,
    }
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(measured) + "\n")
    page = opened(run)
    reads(page, "#tiles", "+50.0 points; 95 % interval 61.0 % to 85.3 %, 40 problems")
    assert "Bands of held-out results" not in page.inner_text("main"), "not of every point"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "test/env/all/correct" in row:
            row |= {"test/low/env/all/correct": 0.1, "test/high/env/all/correct": 0.9}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = opened(run)
    reads(drawn, "main", "Bands of held-out results are 95 % intervals.")
    reads(page, "#notes", "To look at", "40% of the answers were cut off at sampling.max_tokens")


def test_hovering_reads_and_dragging_zooms_all_charts(opened: Opened, run: Path) -> None:
    page = opened(run)
    lists(page, "#reward .where", ["last"])
    box = page.locator("#reward .u-over").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.51, middle)
    lists(page, "#reward .where", ["at 4"])
    lists(page, "#trained .where", ["at 4"])
    playwright.expect(page.locator("#unzoom")).to_be_disabled()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, middle, steps=4)
    page.mouse.up()
    playwright.expect(page.locator("#unzoom")).to_be_enabled()
    page.mouse.move(box["x"] + 2, middle)
    lists(page, "#trained .where", [re.compile("at [45]")])  # At the left edge now.
    page.mouse.dblclick(box["x"] + 2, middle)
    playwright.expect(page.locator("#unzoom")).to_be_disabled()


def test_the_keyboard_reads_and_zooms_a_chart(opened: Opened, run: Path) -> None:
    page = opened(run)
    page.locator("#drift .stage").focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    lists(page, "#drift .where", ["at 2"])
    lists(page, "#announcer", ["generation 2: drift 0.006"])
    page.keyboard.press("+")
    playwright.expect(page.locator("#unzoom")).to_be_enabled()
    page.keyboard.press("0")
    playwright.expect(page.locator("#unzoom")).to_be_disabled()
    page.locator("#held-out .entry").first.focus()
    page.keyboard.press("Space")
    has(page, "#held-out .entry >> nth=0", "aria-pressed", "false")


def test_filters_choose_rollouts(opened: Opened, run: Path) -> None:
    page = opened(run)
    counts(page, "32 rollouts")
    page.get_by_label("From generation").fill("3")
    counts(page, "20 of 32 rollouts")
    page.get_by_label("Genome", exact=True).fill("1")
    counts(page, "5 of 32 rollouts")
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Tag").select_option("hard")
    counts(page, "16 of 32 rollouts")
    page.get_by_label("From reward").fill("0.8")
    counts(page, "8 of 32 rollouts")
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Search").fill("TRY 5")
    counts(page, "4 of 32 rollouts")
    lists(page, ".reader mark", ["try 5"])
    page.get_by_label("Search").fill("no such text")
    counts(page, "0 of 32 rollouts")
    reads(page, "#rollout-view", "No rollout passes")


def test_rollouts_are_set_beside_each_other_with_their_differences(
    opened: Opened, run: Path
) -> None:
    page = opened(run)
    page.get_by_role("tab", name="Best and worst").click()
    lists(page, ".pair .chip", ["0.9", "0.25"])
    page.get_by_role("tab", name="One problem over generations").click()
    playwright.expect(page.locator(".sequence .transcript")).to_have_count(32)
    page.get_by_role("tab", name="Mirrored pairs").click()
    lists(page, ".pair h4", [re.compile("genome 0$"), re.compile("genome 1$")])
    lists(page, ".pair del", ["0"])
    lists(page, ".pair ins", ["1"])
    page.keyboard.press("ArrowLeft")
    has(page, "#tab-problem", "aria-selected", "true")


def test_turns_and_tool_calls_are_told_apart(opened: Opened, tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "calculate"}\n</tool_call>'
    turns = [
        {"prompt": "1+2=", "action": call, "stop_reason": "stop", "reward": 0, "logs": {}},
        {"added": "3", "action": "3", "stop_reason": "length", "logs": {"checked": "3 is right"}},
    ]
    page = opened(make_run(tmp_path / "run", rollouts=[rollout(0, 0, turns=turns)]))
    heads = "all => all.map(each => each.firstChild.data)"
    assert page.locator(".reader h5").evaluate_all(heads) == [
        *("prompt", "model", "tool result", "model")
    ]
    assert page.locator(".tool_call").inner_text() == call
    reads(page, ".reader", "stopped by length")
    page.locator(".log summary").click()
    reads(page, ".log", "3 is right")


@pytest.mark.parametrize("width", [390, 1300])
def test_hostile_text_is_shown_and_nothing_else(opened: Opened, tmp_path: Path, width: int) -> None:
    rollouts = [
        rollout(i, 0, text, prompt=text, tags=[text[:50]]) for i, text in enumerate(HOSTILE)
    ]
    run = make_run(
        tmp_path / HOSTILE[0].replace("/", "_"), rollouts=rollouts, model_name=HOSTILE[2]
    )
    lines = (
        (run / "metrics.jsonl").read_text().replace("env/all/format", "env/<b onclick=x>/\\u202e")
    )
    (run / "metrics.jsonl").write_text(lines)
    page = opened(run, viewport={"width": width, "height": 900})
    page.get_by_role("listbox").focus()
    shown = []
    for _ in HOSTILE:
        shown.append(page.locator(".reader .turn.model .text").inner_text())
        page.keyboard.press("ArrowDown")
    assert shown[0] == HOSTILE[0]
    assert shown[1] == "␛[31mred␛[0m ␇ ␀"
    assert shown[2] == "left U+202Etxet tfel-ot-thgirU+202C and U+2067more"
    assert "980,000 characters cut here" in shown[3]
    assert shown[4] == "half a pair: U+D83D, and a mark: U+FEFF"
    assert shown[5] == HOSTILE[5]
    for tab in page.get_by_role("tab").all():
        tab.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("main img, main script, main a[href^=javascript]").count() == 0


def test_seeds_are_a_range_and_gradients_stand_beside_them(opened: Opened, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"es-{seed}", seed=seed) for seed in range(3)]
    page = opened(*runs, make_run(tmp_path / "gradient", config=GRADIENTS))
    lists(page, "#held-out .entry bdi", ["ES", "gradients"])
    playwright.expect(page.locator("#ranges")).to_be_visible()
    page.locator("#held-out summary").click()
    head = ["generation", "ES, mean", "ES, low", "ES, high", "gradients"]
    lists(page, "#held-out thead th", head)
    page.locator("#axis").select_option("rollouts")
    lists(page, "#held-out tbody th", ["0", "256", "512"])
    page.locator("#one-run").select_option("gradient")
    playwright.expect(page.locator("#fitness")).to_be_hidden()
    page.get_by_label("Run", exact=True).select_option("es-1")
    counts(page, "16 of 64 rollouts")


def test_a_page_that_is_served_follows_the_run(opened: Opened, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", generations=2, num_generations=9)
    command = [sys.executable, "-m", "es_cookbook", "report", str(run), "watch=true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            page = opened(url=server.stdout.readline().split()[0])
            page.get_by_label("Genome", exact=True).fill("0")
            counts(page, "2 of 8 rollouts")
            grow(run, 2)
            counts(page, "3 of 9 rollouts")
            reads(page, "#summary", "3 generations")
            page.close()
        finally:
            server.terminate()
