// What each chart draws, and of which runs.

let report = null;
let browser = null;
const xLabels = { generation: "generation", rollouts: "rollouts", tokens: "sampled tokens" };
const axis = () => byId("axis").value;
const oneRun = () => report.runs[Number(byId("one-run").value) || 0];
const holder = (id) => byId(id).querySelector(".cards");

/** Lines of metrics: by group in colour, and, with several groups, by metric in dashes. */
function lines(keys) {
  const has = (group, key) => group.runs.some((number) => valuesOf(report.runs[number], key).some(finite));
  const many = report.groups.length > 1;
  return report.groups.flatMap((group, g) =>
    keys
      .filter((key) => has(group, key))
      .map((key) => {
        const k = keys.indexOf(key);
        const label = many
          ? keys.length > 1
            ? `${plainText(group.label)}: ${labelOf(key)}`
            : plainText(group.label)
          : labelOf(key);
        const line = curve(report, group, key, axis());
        return { ...line, ...interval(group, key, line), label, colour: colour(many ? g : k), dash: many && k > 0 };
      }),
  );
}

/** Of a single run's held-out metric: where it lies with a confidence of 95 %, as a band. */
function interval(group, key, line) {
  if (report.runs.length > 1 || !key.startsWith("test/")) return {};
  const [low, high] = ["low", "high"].map((end) => curve(report, group, key.replace("test/", `test/${end}/`), axis()));
  return low.x.length === line.x.length ? { low: low.values, high: high.values, isRange: true } : {};
}

const unitOfAll = (keys) =>
  keys.every((key) => unitOf(report, key) === "share")
    ? "share"
    : unitOf(report, keys.find((key) => unitOf(report, key) !== "share") ?? keys[0]);

const metricModel =
  (keys, more = {}) =>
  () => {
    const wanted = typeof keys === "function" ? keys() : keys;
    if (!wanted.length) return null;
    const drawn = lines(wanted);
    const isMeasured = report.runs.length === 1 && drawn.some((line) => line.isRange);
    const note = isMeasured ? "Bands of held-out results are 95 % intervals." : "";
    return { unit: unitOfAll(wanted), xLabel: xLabels[axis()], lines: drawn, note, wholeX: true, ...more };
  };

const present = (keys) => keys.filter((key) => report.runs.some((run) => valuesOf(run, key).some(finite)));
const preferred = ["correct", "format", "well_formed"];
/** How many metrics fit into a chart beside several groups. */
const mostKeys = (alone) => (report.groups.length === 1 ? alone : report.groups.length < 4 ? 2 : 1);
const heldOutKeys = () => {
  const passes = keysOf(report).filter((key) => key.startsWith("test/pass@"));
  const wanted = present([...preferred.map((name) => `test/env/all/${name}`), ...passes]);
  return wanted.slice(0, mostKeys(5));
};
const trainedKeys = () => present(preferred.map((name) => `env/all/${name}`)).slice(0, mostKeys(3));

/** Rewards: of one run also those of its best and its worst genome, as a band. */
function rewardModel() {
  const model = metricModel(() => present(["reward/mean", "test/reward/mean"]))();
  if (!model || report.runs.length > 1) return model && { ...model, lines: lines(["reward/mean"]) };
  const [low, high] = ["reward/min_genome", "reward/max_genome"].map((key) =>
    curve(report, report.groups[0], key, axis()),
  );
  const own = model.lines.find((line) => line.label === "reward");
  if (own && low.x.length === own.x.length) Object.assign(own, { low: low.values, high: high.values, isRange: true });
  const ofGenomes = low.x.length ? "The band around the reward is from the worst to the best genome." : "";
  return { ...model, note: [ofGenomes, model.note].filter(Boolean).join(" ") };
}

function fitnessModel() {
  const run = oneRun();
  const { fitness } = run;
  if (!fitness) return null;
  const at = new Map(
    (run.columns[GENERATION] ?? []).map((generation, i) => [generation, places(run, axis(), false)[i]]),
  );
  const kept = fitness.generations.map((generation, i) => [at.get(generation), i]).filter(([x]) => finite(x));
  const x = kept.map(([place]) => place);
  const quantile = (q) => kept.map(([, i]) => fitness.quantiles[i][q]);
  // Bands lie on each other: `shade` is what is seen of one.
  const band = (label, low, high, area, shade) => ({
    label,
    x,
    values: quantile(3),
    low: quantile(low),
    high: quantile(high),
    isRange: true,
    bare: true,
    area,
    shade,
    colour: colour(0),
  });
  const points = (u) => {
    const spread = Math.min(
      0.36 * Math.abs(u.valToPos(x[1] ?? x[0] + 1, "x", true) - u.valToPos(x[0], "x", true)),
      14 * devicePixelRatio,
    );
    const size = Math.max(1.5, 3.2 - x.length / 150) * devicePixelRatio;
    u.ctx.save();
    u.ctx.fillStyle = faded(colour(0), Math.max(0.14, 0.5 - x.length / 800));
    const { left, top, width, height } = u.bbox;
    u.ctx.beginPath();
    u.ctx.rect(left, top, width, height);
    u.ctx.clip();
    for (const [place, i] of kept) {
      const middle = u.valToPos(place, "x", true);
      if (middle < left - 20 || middle > left + width + 20) continue;
      fitness.genomes[i].forEach((value, g) => {
        if (value !== null)
          u.ctx.fillRect(
            middle + spread * (((g * 0.618) % 1) - 0.5) - size / 2,
            u.valToPos(value, "y", true) - size / 2,
            size,
            size,
          );
      });
    }
    u.ctx.restore();
  };
  const sampled = fitness.step > 1 ? ` Points are one in ${fitness.step} genomes.` : " Points are genomes.";
  return {
    unit: "number",
    xLabel: xLabels[axis()],
    wholeX: true,
    points,
    note: `Fitness of every genome${report.runs.length > 1 ? `, of ${plainText(run.name)}` : ""}.${sampled}`,
    lines: [
      band("all genomes", 0, 6, 0.08, 0.08),
      band("middle 80 %", 1, 5, 0.1, 0.17),
      band("middle 50 %", 2, 4, 0.14, 0.29),
      { label: "median", x, values: quantile(3), colour: colour(0) },
    ],
  };
}

const PHASES = ["sample", "score", "learn", "apply", "load", "answer", "ask", "tell"];

/** Seconds of a run by phase, row by row; what the phases do not explain is "other". */
function phases(run) {
  const total = run.columns["time/total"] ?? [];
  const rows = total.map((value, i) => (finite(value) && value > 0 ? i : -1)).filter((i) => i >= 0);
  const found = PHASES.filter((name) => (run.columns[`time/${name}`] ?? []).some(finite));
  const seconds = found.map((name) => rows.map((i) => run.columns[`time/${name}`][i] ?? 0));
  const other = rows.map((i, k) => Math.max(total[i] - seconds.reduce((sum, column) => sum + column[k], 0), 0));
  return { names: [...found, "other"], rows, seconds: [...seconds, other] };
}

function timeModel() {
  const run = oneRun();
  const { names, rows, seconds } = phases(run);
  if (!rows.length) return null;
  const where = places(run, axis(), false);
  const x = rows.map((i) => where[i]);
  const sums = rows.map((_, k) => seconds.reduce((sum, column) => sum + column[k], 0) || 1);
  let below = rows.map(() => 0);
  const stacked = names
    .map((name, n) => {
      below = below.map((value, k) => value + seconds[n][k] / sums[k]);
      return {
        label: name,
        x,
        values: [...below],
        colour: colour(n),
        fill: n === 0,
        bare: false,
        share: (k) => seconds[n][k] / sums[k],
      };
    })
    .filter((_, n) => seconds[n].some((value, k) => value / sums[k] > 0.001) || n === 0);
  return {
    unit: "share",
    xLabel: xLabels[axis()],
    lines: stacked,
    stacked: true,
    wholeX: true,
    note: `Share of a generation's time${report.runs.length > 1 ? `, of ${plainText(run.name)}` : ""}.`,
  };
}

function answerLengths() {
  if (!browser) return null;
  const { rollouts } = browser;
  const chosen = report.runs.indexOf(oneRun());
  const byGeneration = new Map();
  for (let i = 0; i < rollouts.table.length; i += 1) {
    if (rollouts.table.run[i] !== chosen || !rollouts.table.turns[i]) continue;
    const generation = rollouts.table.generation[i];
    if (!byGeneration.has(generation)) byGeneration.set(generation, []);
    byGeneration.get(generation).push(rollouts.length(i));
  }
  const run = oneRun();
  const at = new Map(
    (run.columns[GENERATION] ?? []).map((generation, i) => [generation, places(run, axis(), false)[i]]),
  );
  const found = [...byGeneration.entries()]
    .map(([generation, lengths]) => [at.get(generation), lengths.sort((a, b) => a - b)])
    .filter(([x]) => finite(x))
    .sort(([a], [b]) => a - b);
  const quantile = (q) => found.map(([, lengths]) => lengths[Math.round(q * (lengths.length - 1))]);
  const x = found.map(([place]) => place);
  return {
    unit: "number",
    xLabel: xLabels[axis()],
    wholeX: true,
    fromZero: true,
    note: `Characters that the model wrote in recorded rollouts${report.runs.length > 1 ? ` of ${plainText(run.name)}` : ""}.`,
    lines: [
      {
        label: "shortest to longest",
        x,
        values: quantile(0.5),
        low: quantile(0),
        high: quantile(1),
        isRange: true,
        bare: true,
        area: 0.14,
        colour: colour(2),
      },
      { label: "median", x, values: quantile(0.5), colour: colour(2) },
    ],
  };
}

function buildCharts() {
  const add = (section, id, title, model) => new Chart(holder(section), id, title, model);
  add("progress", "held-out", "Held-out problems", metricModel(heldOutKeys));
  add("progress", "reward", "Reward", rewardModel);
  add("progress", "trained", "Correctness and format while training", metricModel(trainedKeys));
  add("population", "fitness", "Fitness over genomes", fitnessModel);
  add(
    "population",
    "signal",
    "Tied pairs and reliability",
    metricModel(() => present(["genomes/tied_fraction", "genomes/reliability"]), { fromZero: true }),
  );
  add(
    "population",
    "step",
    "Step, in σ",
    metricModel(() => present(["step/rms_over_sigma"]), { fromZero: true }),
  );
  add(
    "population",
    "drift",
    "Drift of the centre from the base",
    metricModel(() => present(["centre/drift_rms"]), { fromZero: true }),
  );
  add(
    "population",
    "sigma",
    "σ and learning rate",
    metricModel(() => present(["optimizer/sigma", "optimizer/learning_rate"]), { fromZero: true }),
  );
  add("cost", "times", "Where a generation's time goes", timeModel);
  add(
    "cost",
    "seconds",
    "Seconds a generation",
    metricModel(() => present(["time/total"]), { fromZero: true }),
  );
  add(
    "cost",
    "answers",
    "Answers a second",
    metricModel(() => present(["throughput/answers_per_second"]), { fromZero: true }),
  );
  add(
    "cost",
    "speed",
    "Sampled tokens a second",
    metricModel(() => present(["throughput/tokens_per_second"]), { fromZero: true }),
  );
  add(
    "cost",
    "tokens",
    "Tokens a rollout",
    metricModel(() => present(["tokens per rollout"]), { fromZero: true }),
  );
  add("cost", "lengths", "Length of recorded answers", answerLengths);
  const pick = el("select", { id: "metric", "aria-label": "Metric" });
  const any = add("more", "any", "Metric", () => metricModel([pick.value])());
  any.extra.append(pick);
  pick.addEventListener("change", () => {
    any.update();
    any.draw();
  });
}

function fillMetrics() {
  const pick = byId("metric");
  const before = pick.value;
  const keys = keysOf(report)
    .filter((key) => key !== GENERATION)
    .sort();
  replace(pick, ...keys.map((key) => el("option", { value: key }, plainText(key))));
  pick.value = keys.includes(before)
    ? before
    : (keys.find((key) => key.startsWith("env/") && !preferred.some((name) => key.endsWith(name))) ?? keys[0]);
}
