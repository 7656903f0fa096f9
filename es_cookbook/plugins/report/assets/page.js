// The page: its theme, how it begins, and how it follows a run.

// ---- theme ---------------------------------------------------------------------------------------------------

const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

function remembered() {
  try {
    return localStorage.getItem("es_cookbook theme") ?? "auto";
  } catch {
    return "auto";
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = THEMES[theme];
  try {
    localStorage.setItem("es_cookbook theme", theme);
  } catch {
    /* a page from a disk may keep nothing */
  }
}

function recolour() {
  if (!report) return;
  fillSummary();
  updateAll();
}

function watchTheme() {
  setTheme(remembered() in THEMES ? remembered() : "auto");
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
    recolour();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
}

// ---- beginning, and going on ---------------------------------------------------------------------------------

function takeReport(found) {
  report = found;
  const pick = byId("one-run");
  const before = pick.value;
  replace(pick, ...report.runs.map((run, i) => el("option", { value: String(i) }, plainText(run.name))));
  if (before !== "") pick.value = before;
  byId("one-run-label").hidden = report.runs.length < 2;
  byId("ranges").hidden = report.groups.every((group) => group.runs.length < 2);
  byId("controls").hidden = false;
  fillSummary();
  fillMetrics();
  updateAll();
  for (const id of ["progress", "population", "cost", "more"])
    byId(id).hidden = ![...holder(id).children].some((card) => !card.hidden);
  fillConfigs();
}

function takeRollouts(packed) {
  const rollouts = new Rollouts(report, packed);
  const isThere = rollouts.table.length > 0;
  byId("browser").hidden = !isThere;
  byId("rollouts-state").hidden = isThere;
  byId("rollouts-state").textContent = "No rollouts were recorded.";
  if (browser) browser.take(report, rollouts);
  else browser = new Browser(byId("browser"), report, rollouts);
  const lengths = charts.find((chart) => chart.id === "lengths");
  lengths.update();
  lengths.draw();
}

/** Takes new data from the server of `report watch=true`, if they are of another version. */
async function follow(version) {
  const get = (name) => fetch(name, { cache: "no-store" });
  const data = async (name) => unpacked(await (await get(name)).arrayBuffer());
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 2000));
    try {
      const latest = await (await get("version")).text();
      if (latest !== version) {
        const [found, packed] = [await data("charts"), await data("rollouts")];
        takeReport(found);
        takeRollouts(packed);
        version = latest;
      }
      byId("broken").hidden = true;
    } catch {
      byId("broken").hidden = false;
      byId("broken").textContent = "Not connected: this report is no longer served.";
    }
  }
}

async function begin() {
  watchTheme();
  buildCharts();
  byId("axis").addEventListener("change", () => {
    zoomTo(null, null);
    updateAll();
  });
  byId("one-run").addEventListener("change", updateAll);
  addEventListener("beforeprint", () => charts.forEach((chart) => chart.approach()));
  byId("unzoom").addEventListener("click", () => zoomTo(null, null));
  takeReport(await embedded("charts-data"));
  document.documentElement.dataset.drawn = "charts";
  await new Promise((resolve) => setTimeout(resolve));
  takeRollouts(await embedded("rollouts-data"));
  document.documentElement.dataset.drawn = "all";
  if (document.body.dataset.follow) follow(document.body.dataset.follow);
}

begin().catch((error) => {
  byId("broken").hidden = false;
  byId("broken").textContent =
    `This report cannot be shown: ${error.message ?? error}. It needs a browser of 2023 or later.`;
  throw error;
});
