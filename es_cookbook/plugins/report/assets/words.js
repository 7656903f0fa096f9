// The words around the charts: summary, numbers, notes and Configs.

function fillSummary() {
  const tasks = [...new Set(report.groups.map((group) => group.sentence.split(" by ")[0]))];
  const title =
    report.runs.length === 1
      ? report.runs[0].name
      : tasks.length < 4
        ? `${tasks.join(", ")}: ${report.groups.length > 1 ? "runs compared" : plural(report.runs.length, "run")}`
        : plural(report.runs.length, "run");
  byId("title").textContent = plainText(title);
  document.title = `${plainText(title)} – es_cookbook report`;
  const many = report.groups.length > 1;
  const sentences = report.groups.map((group, g) => {
    const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.setProperty("--swatch", colour(g));
    return el("p", { class: "lead" }, many ? swatch : null, el("bdi", {}, plainText(group.sentence)), stateChip(group));
  });
  replace(byId("sentences"), ...sentences, facts());
  fillTiles();
  const ofRuns = (name) =>
    report.runs.flatMap((run) => run[name].map((text) => (report.runs.length > 1 ? `${run.name}: ${text}` : text)));
  const findings = ofRuns("findings");
  const notes = [...report.unread, ...ofRuns("problems")];
  const said = [
    ...notes.map((text) => el("li", {}, bdi(text))),
    ...report.notes.map((text) => el("li", {}, bdi(text))),
  ];
  replace(
    byId("notes"),
    findings.length
      ? el(
          "div",
          { class: "notice" },
          el("p", {}, "To look at"),
          el("ul", {}, ...findings.map((text) => el("li", {}, bdi(text)))),
        )
      : null,
    said.length
      ? el(
          "details",
          { class: "notice", open: notes.length > 0 },
          el("summary", {}, `${plural(said.length, "note")} about what is shown`),
          el("ul", {}, ...said),
        )
      : null,
  );
}

const FACTS = {
  model_name: "model",
  optimizer: "optimizer",
  method: "method",
  "optimizer.sigma": "σ",
  "optimizer.learning_rate": "learning rate",
  learning_rate: "learning rate",
  "optimizer.population_size": "genomes",
  attempts: "attempts",
  "dataset.problems_per_generation": "problems",
  search_space: "search space",
  engine: "engine",
  "sampling.temperature": "temperature",
};

/** The settings that matter most, where all runs have the same ones. */
function facts() {
  if (report.groups.length > 1) return null;
  const config = new Map(report.runs[report.groups[0].runs[0]].config);
  const short = (value) =>
    (/^[\w.]+:\w+$/.test(value) ? value.split(":")[1] : value.split("/").filter(Boolean).slice(-2).join("/")).slice(
      0,
      60,
    );
  const chips = Object.entries(FACTS)
    .filter(([field]) => config.has(field))
    .map(([field, label]) => el("span", { class: "fact" }, `${label} `, el("b", {}, bdi(short(config.get(field))))));
  const seeds = report.groups[0].runs.map((number) => report.runs[number].seed).filter((seed) => seed !== null);
  if (seeds.length)
    chips.push(
      el("span", { class: "fact" }, seeds.length > 1 ? "seeds " : "seed ", el("b", {}, seeds.slice(0, 12).join(", "))),
    );
  return chips.length
    ? el("p", { class: "facts" }, ...chips, el("a", { href: "#configs", class: "fact" }, "whole Config"))
    : null;
}

function stateChip(group) {
  const states = group.runs.map((number) => report.runs[number]);
  const told = [...new Set(states.map((run) => run.state))].map((state) => {
    const count = states.filter((run) => run.state === state).length;
    return states.length > 1 && count < states.length ? `${count} ${state}` : state;
  });
  return el(
    "span",
    { class: `state ${states.every((run) => run.state === "complete") ? "complete" : "open"}` },
    told.join(", "),
  );
}

/** The interval of a held-out metric's last value, and how many problems it is over; of one run alone. */
function sure(group, key, unit) {
  if (group.runs.length > 1 || !isHeldOut(key)) return "";
  const { columns } = report.runs[group.runs[0]];
  const last = (name) => (columns[name] ?? []).findLast(finite);
  const rest = key.replace(/^test\//, "");
  const [low, high, problems] = [`test/low/${rest}`, `test/high/${rest}`, "test/problems"].map(last);
  if (![low, high, problems].every(finite) || low === high) return "";
  return `; 95 % interval ${formatted(low, unit)} to ${formatted(high, unit)}, ${plural(problems, "problem")}`;
}

function fillTiles() {
  const tile = (label, value, aside = "") =>
    el("div", { class: "tile" }, el("dt", {}, label), el("dd", {}, value, aside ? el("small", {}, aside) : null));
  const tiles = [];
  if (report.groups.length === 1) {
    const group = report.groups[0];
    const change = (key, label) => {
      const { values } = curve(report, group, key, "generation");
      if (!values.length) return;
      const [first, last, unit] = [values[0], values[values.length - 1], unitOf(report, key)];
      const gain =
        unit === "share"
          ? `${last >= first ? "+" : "−"}${Math.abs(100 * (last - first)).toFixed(1)} points`
          : `${last >= first ? "+" : "−"}${Math.abs(last - first).toFixed(3)}`;
      const told = `from ${formatted(first, unit)}, ${gain}${sure(group, key, unit)}`;
      tiles.push(tile(label, formatted(last, unit), told));
    };
    const heldOut = present(["test/env/all/correct", "test/env/all/format"]);
    for (const key of heldOut.length ? heldOut : present(["test/reward/mean"]))
      change(key, `Held-out ${labelOf(key).replace("held-out ", "")}`);
    change("reward/mean", "Reward");
    const runs = group.runs.map((number) => report.runs[number]);
    const done = Math.max(...runs.map((run) => run.done));
    const planned = Math.max(...runs.map((run) => run.planned));
    tiles.push(tile("Generations", whole.format(done), planned ? `of ${whole.format(planned)}` : ""));
    tiles.push(
      tile(
        "Time in generations",
        duration(mean(runs.map((run) => run.seconds))),
        done ? `${duration(mean(runs.map((run) => run.seconds)) / done)} each` : "",
      ),
    );
    const { values: speeds } = curve(report, group, "throughput/tokens_per_second", "generation");
    if (speeds.length) tiles.push(tile("Sampled tokens a second", compact.format(mean(speeds)), "mean"));
  }
  replace(byId("tiles"), tiles.length ? el("dl", {}, ...tiles) : null);
}

function fillConfigs() {
  const parts = [];
  const differing = Object.keys(report.groups[0]?.differs ?? {});
  if (differing.length) {
    const head = el(
      "tr",
      {},
      el("th", { scope: "col" }, "Field"),
      ...report.groups.map((group) => el("th", { scope: "col" }, bdi(group.label))),
    );
    const rows = differing.map((field) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, bdi(field)),
        ...report.groups.map((group) => el("td", {}, bdi(group.differs[field]))),
      ),
    );
    parts.push(
      el("h3", {}, "What differs"),
      el(
        "div",
        { class: "card" },
        el(
          "div",
          { class: "scroll", tabindex: "0", role: "region", "aria-label": "What differs" },
          el("table", { class: "config" }, el("thead", {}, head), el("tbody", {}, ...rows)),
        ),
      ),
    );
  }
  for (const run of report.runs) {
    const rows = run.config.map(([field, value]) =>
      el("tr", {}, el("th", { scope: "row" }, bdi(field)), el("td", {}, bdi(value))),
    );
    const body = rows.length
      ? el("table", { class: "config" }, el("tbody", {}, ...rows))
      : el("p", {}, "Its Config could not be read.");
    parts.push(
      el(
        "details",
        { class: "card", open: report.runs.length === 1 && rows.length < 40 },
        el("summary", {}, bdi(run.path)),
        el(
          "div",
          { class: "scroll", tabindex: "0", role: "region", "aria-label": `Config of ${plainText(run.name)}` },
          body,
        ),
      ),
    );
  }
  replace(byId("config-body"), ...parts);
}
