// The rollouts: unpacked from columns, filtered, listed, read, and set beside each other.

/** Columns as the page holds them, with what stands for what taken apart. */
function rolloutTable(packed) {
  const { columns, parts, texts, logs } = packed;
  const forward = (numbers) => {
    let fresh = 0;
    return Int32Array.from(numbers, (value) => (value === 0 ? fresh++ : value - 1));
  };
  const table = { parts, texts, logs, length: columns.run.length };
  for (const name of [
    "run",
    "generation",
    "problem",
    "genome",
    "attempt",
    "tags",
    "lost",
    "turns",
    "kind",
    "stop",
    "metrics",
  ]) {
    table[name] = Int32Array.from(columns[name]);
  }
  for (const name of ["reward", "turn_reward"])
    table[name] = Float64Array.from(columns[name], (v) => (v === null ? NaN : v));
  for (const name of ["seen", "action"]) table[name] = forward(columns[name]);
  table.first = new Int32Array(table.length + 1);
  for (let i = 0; i < table.length; i += 1) table.first[i + 1] = table.first[i] + table.turns[i];
  return table;
}

const startOf = (text) => (typeof text === "string" ? text : text[0]);
const endOf = (text) => (typeof text === "string" ? text : text[2]);
const wholeOf = (text) => (typeof text === "string" ? text : `${text[0]} […] ${text[2]}`);
const lengthOf = (text) => (typeof text === "string" ? text.length : text[0].length + text[1] + text[2].length);

class Rollouts {
  constructor(report, packed) {
    [this.report, this.table] = [report, rolloutTable(packed)];
    this.order = Int32Array.from({ length: this.table.length }, (_, i) => i);
  }

  tags(i) {
    return this.table.parts[this.table.tags[i]];
  }
  action(i) {
    const turn = this.table.first[i + 1] - 1;
    return turn < this.table.first[i] ? "" : this.table.texts.action[this.table.action[turn]];
  }
  problemKey(i) {
    const turn = this.table.first[i];
    return this.table.turns[i] ? `${this.table.run[i]} ${this.table.seen[turn]}` : null;
  }
  sameProblem(i) {
    const { table } = this;
    if (!table.turns[i]) return [];
    const seen = table.seen[table.first[i]];
    return Array.from(
      this.order.filter(
        (other) =>
          table.turns[other] > 0 && table.run[other] === table.run[i] && table.seen[table.first[other]] === seen,
      ),
    );
  }

  prompt(i) {
    return this.table.turns[i] ? this.table.texts.seen[this.table.seen[this.table.first[i]]] : "";
  }

  length(i) {
    let sum = 0;
    for (let t = this.table.first[i]; t < this.table.first[i + 1]; t += 1)
      sum += lengthOf(this.table.texts.action[this.table.action[t]]);
    return sum;
  }

  /** Rollouts that pass, in the order that is asked for. */
  filtered({ run, from, to, genome, problem, tag, low, high, text, sort }) {
    const { table } = this;
    const hits = text ? this.textHits(text) : null;
    const found = this.order.filter(
      (i) =>
        (run === null || table.run[i] === run) &&
        (from === null || table.generation[i] >= from) &&
        (to === null || table.generation[i] <= to) &&
        (genome === null || table.genome[i] === genome) &&
        (problem === null || table.problem[i] === problem) &&
        (tag === null || this.tags(i).includes(tag)) &&
        (low === null || table.reward[i] >= low) &&
        (high === null || table.reward[i] <= high) &&
        (hits === null || this.hit(i, hits)),
    );
    const lost = (i, otherwise) => (Number.isNaN(table.reward[i]) ? otherwise : table.reward[i]);
    const orders = {
      newest: (a, b) => table.generation[b] - table.generation[a] || a - b,
      best: (a, b) => lost(b, -Infinity) - lost(a, -Infinity) || a - b,
      worst: (a, b) => lost(a, Infinity) - lost(b, Infinity) || a - b,
      longest: (a, b) => this.length(b) - this.length(a) || a - b,
    };
    return orders[sort] ? found.sort(orders[sort]) : found;
  }

  /** Which of the texts have a match: each is searched once, however many rollouts have it. */
  textHits(pattern) {
    const among = (texts) => Uint8Array.from(texts, (text) => (wholeOf(text).search(pattern) >= 0 ? 1 : 0));
    const { seen, action, other } = this.table.texts;
    return { seen: among(seen), action: among(action), other: among(other) };
  }

  hit(i, hits) {
    const { table } = this;
    if (table.lost[i] >= 0 && hits.other[table.lost[i]]) return true;
    for (let t = table.first[i]; t < table.first[i + 1]; t += 1) {
      if (hits.seen[table.seen[t]] || hits.action[table.action[t]]) return true;
      if ((table.logs[`turn ${t}`] ?? []).some(([, text]) => hits.other[text])) return true;
    }
    return (table.logs[`rollout ${i}`] ?? []).some(([, text]) => hits.other[text]);
  }

  /** Problems with answers of several generations, the most first: their rollouts in order of time. */
  problems(among) {
    const byProblem = new Map();
    for (const i of among) {
      const key = this.problemKey(i);
      if (key === null) continue;
      if (!byProblem.has(key)) byProblem.set(key, []);
      byProblem.get(key).push(i);
    }
    const found = [...byProblem.values()].filter(
      (group) => new Set(group.map((i) => this.table.generation[i])).size > 1,
    );
    for (const group of found) group.sort((a, b) => this.table.generation[a] - this.table.generation[b] || a - b);
    return found.sort((a, b) => b.length - a.length);
  }

  /** Rollouts of two genomes that are each other's mirror image, at the same problem and attempt. */
  pairs(among) {
    const { table } = this;
    const open = new Map();
    const found = [];
    for (const i of among) {
      if (!this.report.runs[table.run[i]].mirrored || table.genome[i] < 0) continue;
      const key = [table.run[i], table.generation[i], table.problem[i], table.attempt[i], table.genome[i] >> 1].join(
        " ",
      );
      const other = open.get(key);
      if (other === undefined) open.set(key, i);
      else if (table.genome[other] !== table.genome[i])
        found.push(table.genome[other] < table.genome[i] ? [other, i] : [i, other]);
    }
    return found;
  }
}

// ---- differences ---------------------------------------------------------------------------------------------

const PIECES = /\p{L}+|\p{N}+|\s+|[^\p{L}\p{N}\s]/gu;

/** `[kind, text]` with kind -1 (only before), 0 (both), 1 (only now): the longest common subsequence of words. */
function differences(before, now) {
  const [a, b] = [before.match(PIECES) ?? [], now.match(PIECES) ?? []];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let [enda, endb] = [a.length, b.length];
  while (enda > start && endb > start && a[enda - 1] === b[endb - 1]) {
    enda -= 1;
    endb -= 1;
  }
  const middle = common(a.slice(start, enda), b.slice(start, endb));
  const parts = [
    ...a.slice(0, start).map((piece) => [0, piece]),
    ...middle,
    ...a.slice(enda).map((piece) => [0, piece]),
  ];
  const merged = [];
  for (const [kind, piece] of parts) {
    if (merged.length && merged[merged.length - 1][0] === kind) merged[merged.length - 1][1] += piece;
    else merged.push([kind, piece]);
  }
  return merged;
}

function common(a, b) {
  const replaced = [...a.map((piece) => [-1, piece]), ...b.map((piece) => [1, piece])];
  if (!a.length || !b.length || a.length * b.length > 2_000_000) return replaced;
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] =
        a[i] === b[j]
          ? lengths[(i + 1) * width + j + 1] + 1
          : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const parts = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      parts.push([0, a[i]]);
      i += 1;
      j += 1;
    } else if (j >= b.length || (i < a.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) {
      parts.push([-1, a[i]]);
      i += 1;
    } else {
      parts.push([1, b[j]]);
      j += 1;
    }
  }
  return parts;
}

// ---- a rollout on the page -----------------------------------------------------------------------------------

const TAGGED = /<(think|answer|tool_call)>([\s\S]*?)<\/\1>/g;

/** A text from a run: isolated from the direction of what is around it, and wrapped wherever it must be. */
function textBlock(text, query, plain = false) {
  const block = el("div", { class: "text", dir: "auto" });
  const put = (part) => {
    let from = 0;
    for (const match of plain ? [] : part.matchAll(TAGGED)) {
      block.append(...textNodes(part.slice(from, match.index), query));
      block.append(el("span", { class: `tagged ${match[1]}` }, ...textNodes(match[0], query)));
      from = match.index + match[0].length;
    }
    block.append(...textNodes(part.slice(from), query));
  };
  put(startOf(text));
  if (typeof text !== "string") {
    block.append(el("span", { class: "cut" }, `${plural(text[1], "character")} cut here`));
    put(endOf(text));
  }
  if (!block.hasChildNodes()) block.append(el("span", { class: "nothing" }, "(nothing)"));
  return block;
}

function changedBlock(before, now, query) {
  const block = el("div", { class: "text", dir: "auto" });
  for (const [kind, text] of differences(wholeOf(before), wholeOf(now))) {
    const nodes = textNodes(text, query);
    block.append(...(kind ? [el(kind < 0 ? "del" : "ins", {}, ...nodes)] : nodes));
  }
  return block;
}

function rewardChip(value) {
  const lost = Number.isNaN(value);
  const level = lost ? "lost" : value >= 0.999 ? "high" : value > 0.001 ? "middle" : "low";
  return el("span", { class: `chip ${level}` }, lost ? "lost" : number(value));
}

function whichText(rollouts, i) {
  const { table, report } = rollouts;
  const parts = [
    ["generation", table.generation[i]],
    ["problem", table.problem[i]],
    ["genome", table.genome[i]],
    ["attempt", table.attempt[i]],
  ];
  const told = parts
    .filter(([name, value]) => value > 0 || (value === 0 && name !== "attempt"))
    .map(([name, value]) => `${name} ${value}`);
  if (report.runs.length > 1) told.unshift(plainText(report.runs[table.run[i]].name));
  return told.join(" · ");
}

/** A whole rollout; `before` is another's last answer, from which this one's is marked to differ. */
function transcript(rollouts, i, query, before = null) {
  const { table } = rollouts;
  const card = el("article", { class: "transcript" });
  const tags = rollouts.tags(i).map((tag) => el("span", { class: "tag" }, bdi(tag)));
  card.append(el("header", {}, rewardChip(table.reward[i]), el("h4", {}, whichText(rollouts, i)), ...tags));
  if (table.lost[i] >= 0)
    card.append(turnBlock("lost", textBlock(table.texts.other[table.lost[i]], query, true), "this rollout failed"));
  for (let t = table.first[i]; t < table.first[i + 1]; t += 1) {
    const isLast = t === table.first[i + 1] - 1;
    const called = t > table.first[i] && wholeOf(table.texts.action[table.action[t - 1]]).includes("<tool_call>");
    const seen = table.texts.seen[table.seen[t]];
    const who = table.kind[t] === 0 ? "prompt" : called ? "tool result" : "environment";
    card.append(turnBlock(who, textBlock(seen, query)));
    const action = table.texts.action[table.action[t]];
    const body = before !== null && isLast ? changedBlock(before, action, query) : textBlock(action, query);
    const stop = plainText(table.parts[table.stop[t]]);
    const reward =
      table.first[i + 1] - table.first[i] > 1 && finite(table.turn_reward[t]) && table.turn_reward[t] !== 0
        ? ` · reward ${number(table.turn_reward[t])}`
        : "";
    card.append(turnBlock("model", body, `${stop && stop !== "stop" ? `stopped by ${stop}` : ""}${reward}`));
    card.append(metricChips(table.parts[table.metrics[t]]), ...logBlocks(rollouts, `turn ${t}`, query));
  }
  card.append(...logBlocks(rollouts, `rollout ${i}`, query));
  return card;
}

function turnBlock(who, body, aside = "") {
  return el(
    "section",
    { class: `turn ${who.replace(" ", "-")}` },
    el("h5", {}, who, aside ? el("span", {}, aside.replace(/^ · /, "")) : null),
    body,
  );
}

function metricChips(metrics) {
  const chips = Object.entries(metrics).map(([name, value]) =>
    el("span", { class: "metric" }, bdi(name.replaceAll("_", " ")), ` ${number(value)}`),
  );
  return chips.length ? el("p", { class: "metrics" }, ...chips) : "";
}

function logBlocks(rollouts, of, query) {
  return (rollouts.table.logs[of] ?? []).map(([name, text]) =>
    el(
      "details",
      { class: "log" },
      el("summary", {}, "log: ", bdi(name)),
      textBlock(rollouts.table.texts.other[text], query, true),
    ),
  );
}
