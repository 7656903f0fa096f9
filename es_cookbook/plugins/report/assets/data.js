// The data inside the page, and curves made of them.

async function unpacked(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/** What a data element of the page holds; the element is emptied, since its text is no longer needed. */
function embedded(id) {
  const element = byId(id);
  const binary = atob(element.textContent);
  element.textContent = "";
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return unpacked(bytes);
}

const GENERATION = "progress/generation";
const PROGRESS = { rollouts: "progress/rollouts", tokens: "progress/tokens" };
const isHeldOut = (key) => key.startsWith("test/");
const finite = (value) => typeof value === "number" && Number.isFinite(value);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Where on an axis every row of a run is. A held-out metric was measured before its generation. */
function places(run, axis, heldOut) {
  const generations = run.columns[GENERATION] ?? [];
  if (axis === "generation") return generations;
  const counts = run.columns[PROGRESS[axis]] ?? [];
  return generations.map((_, i) => (heldOut ? (i ? counts[i - 1] : 0) : counts[i]) ?? null);
}

const DERIVED = {
  "tokens per rollout": (run) => {
    const [tokens, rollouts] = [run.columns[PROGRESS.tokens] ?? [], run.columns[PROGRESS.rollouts] ?? []];
    return tokens.map((value, i) => {
      const made = rollouts[i] - (i ? rollouts[i - 1] : 0);
      return made > 0 ? (value - (i ? tokens[i - 1] : 0)) / made : null;
    });
  },
};

/** What an object itself has under a name that a run gave: "constructor" is in every object. */
const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

const valuesOf = (run, key) => own(DERIVED, key)?.(run) ?? own(run.columns, key) ?? [];

/** A metric of a group of runs: mean, lowest and highest over those that measured it, by generation. */
function curve(report, group, key, axis) {
  const found = new Map();
  for (const number of group.runs) {
    const run = report.runs[number];
    const [generations, where] = [run.columns[GENERATION] ?? [], places(run, axis, isHeldOut(key))];
    valuesOf(run, key).forEach((value, i) => {
      if (!finite(value) || !finite(generations[i]) || !finite(where[i])) return;
      if (!found.has(generations[i])) found.set(generations[i], { x: [], values: [] });
      found.get(generations[i]).x.push(where[i]);
      found.get(generations[i]).values.push(value);
    });
  }
  const points = [...found.entries()].sort(([a], [b]) => a - b).map(([, point]) => point);
  return {
    x: points.map((point) => mean(point.x)),
    values: points.map((point) => mean(point.values)),
    low: points.map((point) => Math.min(...point.values)),
    high: points.map((point) => Math.max(...point.values)),
    isRange: group.runs.length > 1,
  };
}

/** Curves on one axis: every place that one of them has, and null where another has none. */
function joined(curves) {
  const x = [...new Set(curves.flatMap((each) => each.x))].sort((a, b) => a - b);
  const index = new Map(x.map((value, i) => [value, i]));
  const spread = (each, values) => {
    const column = new Array(x.length).fill(null);
    each.x.forEach((value, i) => {
      column[index.get(value)] = values[i];
    });
    return column;
  };
  return { x, spread };
}

const isShare = (key) => /env\/|^test\/pass@|tied_fraction|reliability/.test(key);

/** How a metric's numbers are written: shares in percent, where all of them can be shares. */
function unitOf(report, key) {
  if (key.startsWith("time/") && key !== "time/unix") return "seconds";
  if (!isShare(key)) return "number";
  const fits = report.runs.every((run) => (own(run.columns, key) ?? []).every((v) => v === null || (v >= 0 && v <= 1)));
  return fits ? "share" : "number";
}

/** A short name for a metric, as in the terminal. */
function labelOf(key) {
  const names = {
    "reward/mean": "reward",
    "reward/max_genome": "best genome",
    "reward/min_genome": "worst genome",
    "test/reward/mean": "held-out reward",
    "genomes/tied_fraction": "tied pairs",
    "genomes/reliability": "reliability",
    "step/rms_over_sigma": "step in σ",
    "centre/drift_rms": "drift",
    "optimizer/sigma": "σ",
    "optimizer/learning_rate": "learning rate",
    "throughput/answers_per_second": "answers/s",
    "throughput/tokens_per_second": "tokens/s",
  };
  return plainText(
    own(names, key) ??
      key
        .replace(/^test\//, "")
        .replace(/^env\/all\//, "")
        .replaceAll("_", " "),
  );
}

/** Metrics that some run has, in the order of the first that has them. */
const keysOf = (report) => [...new Set(report.runs.flatMap((run) => Object.keys(run.columns)))];
