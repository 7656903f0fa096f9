// Elements and text. Whatever comes from a run is put on the page by `textContent` alone.

const byId = (id) => document.getElementById(id);

/** An element with properties (`class`, `on…`, ARIA and others) and children: elements or texts. */
function el(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

const replace = (element, ...children) => element.replaceChildren(...children.filter((child) => child !== null));

// Control, format and private characters, halves of surrogate pairs, and the other line ends. Some of
// them turn the direction of what follows, some cannot be seen: all are written out.
const HIDDEN = /(?:(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}])+/gu;

function nameOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Text as it stands for a person: a string for titles, labels and options. */
const plainText = (text) => String(text).replace(HIDDEN, (run) => [...run].map(nameOf).join(" "));

/** Text as nodes, with what cannot be seen in boxes and what was searched for marked. */
function textNodes(text, query = null) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    nodes.push(...marked(text.slice(from, match.index), query));
    const run = [...match[0]];
    const shown = run.length > 40 ? [...run.slice(0, 40).map(nameOf), `+${run.length - 40}`] : run.map(nameOf);
    nodes.push(el("span", { class: "control" }, shown.join(" ")));
    from = match.index + match[0].length;
  }
  nodes.push(...marked(text.slice(from), query));
  return nodes;
}

function marked(text, query) {
  if (!query || !text) return text ? [document.createTextNode(text)] : [];
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(query)) {
    if (match.index > from) nodes.push(document.createTextNode(text.slice(from, match.index)));
    nodes.push(el("mark", {}, match[0]));
    from = match.index + match[0].length;
  }
  if (from < text.length) nodes.push(document.createTextNode(text.slice(from)));
  return nodes;
}

/** An inline text from a run, in whatever direction its script has, which its neighbours keep out of. */
const bdi = (text) => el("bdi", {}, plainText(text));

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return whole.format(value);
  if (size >= 1000) return whole.format(value);
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function formatted(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (unit === "share") return `${(100 * value).toFixed(1)} %`;
  if (unit === "seconds") return duration(value);
  return number(value);
}

/** The same, short enough for an axis. */
function tick(value, unit) {
  if (unit === "share") return `${Number((100 * value).toFixed(2))} %`;
  if (unit === "seconds") return value === 0 ? "0" : duration(value);
  const size = Math.abs(value);
  if (size >= 10000) return compact.format(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(6)));
}

function duration(seconds) {
  if (seconds < 0.1) return `${Number((1000 * seconds).toPrecision(2))} ms`;
  if (seconds < 90) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds < 5400) return `${Number((seconds / 60).toPrecision(3))} min`;
  return `${Number((seconds / 3600).toPrecision(3))} h`;
}

const plural = (count, noun) => `${whole.format(count)} ${noun}${count === 1 ? "" : "s"}`;

const announce = (text) => {
  byId("announcer").textContent = text;
};
