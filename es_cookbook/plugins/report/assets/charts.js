// Charts: uPlot draws them; legend, keyboard, words for a screen reader and the table are ours.

const LIGHT = ["#0063a8", "#c2500a", "#007a5a", "#a3408a", "#806500", "#56616d", "#4747b8", "#8c3b3b"];
const DARK = ["#62b5f5", "#ff9d5c", "#41cfa2", "#e79bd2", "#e3c554", "#a9b4c0", "#a5a5ff", "#ef9a9a"];
const isDark = () => getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
const colour = (i) => (isDark() ? DARK : LIGHT)[i % LIGHT.length];
const faded = (hex, alpha) =>
  hex +
  Math.round(alpha * 255)
    .toString(16)
    .padStart(2, "0");
const AREA = 0.16; // Of a band, on what is behind it.
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const charts = [];
const zoom = { min: null, max: null, busy: false };

function zoomTo(min, max) {
  if (zoom.busy) return;
  [zoom.min, zoom.max] = [min, max];
  zoom.busy = true;
  for (const chart of charts) chart.applyZoom();
  zoom.busy = false;
  byId("unzoom").disabled = min === null;
}

/** The stretch of the axis that all charts together have. */
function extent() {
  const ends = charts.filter((chart) => chart.x.length).map((chart) => [chart.x[0], chart.x[chart.x.length - 1]]);
  const [low, high] = [Math.min(...ends.map(([a]) => a)), Math.max(...ends.map(([, b]) => b))];
  const room = low < high ? 0.025 * (high - low) : 0.5;
  return [low - room, high + room];
}

class Chart {
  /**
   * A card in `parent`. `model()` returns `{ unit, xLabel, lines, note, words, points, stacked }`, each line
   * with `label`, `colour`, curve (`x`, `values`, perhaps `low` and `high`), `dash` and `area`.
   */
  constructor(parent, id, title, model) {
    [this.id, this.title, this.model, this.x, this.hidden, this.plot] = [id, title, model, [], new Set(), null];
    this.head = el("h3", { id: `${id}-title` }, title);
    this.extra = el("div", { class: "extra" });
    this.note = el("p", { class: "note" });
    this.legend = el("div", { class: "legend", role: "group", "aria-label": `${title}: curves` });
    this.stage = el("div", {
      class: "stage",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "chart",
      "aria-labelledby": `${id}-title`,
      "aria-describedby": `${id}-words`,
      onkeydown: (event) => this.key(event),
    });
    this.words = el("p", { class: "unseen", id: `${id}-words` });
    this.table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}: table` });
    this.details = el("details", { ontoggle: () => this.fillTable() }, el("summary", {}, "Table"), this.table);
    const top = el("div", { class: "card-top" }, this.head, this.extra);
    this.card = el("article", { class: "card", id }, top, this.note, this.legend, this.stage, this.words, this.details);
    parent.append(this.card);
    charts.push(this);
    new ResizeObserver(() => this.resize()).observe(this.stage);
    // What is far below is drawn when somebody comes near: the first charts are there sooner, in less memory.
    this.isNear = false;
    const near = new IntersectionObserver(
      (entries) => entries.some((entry) => entry.isIntersecting) && this.approach(),
      {
        rootMargin: "400px",
      },
    );
    near.observe(this.card);
  }

  /** Take new data; the curves that were switched off stay off. */
  update() {
    const model = this.model();
    this.now = model;
    this.card.hidden = !model || !model.lines.some((line) => line.x.length);
    this.plot?.destroy();
    this.plot = null;
    this.x = [];
    if (this.card.hidden) return;
    const { x, spread } = joined(model.lines);
    this.x = x;
    this.columns = model.lines.map((line) => ({
      values: spread(line, line.values),
      low: line.low && line.isRange ? spread(line, line.low) : null,
      high: line.high && line.isRange ? spread(line, line.high) : null,
    }));
    replace(this.note, ...(model.note ? [model.note] : []));
    this.note.hidden = !model.note;
    this.words.textContent = this.inWords();
    this.fillLegend();
    this.fillTable();
  }

  inWords() {
    const told = this.now.lines
      .filter((line) => line.values.length)
      .map((line) => {
        const [first, last] = [line.values[0], line.values[line.values.length - 1]];
        return `${line.label} from ${formatted(first, this.now.unit)} to ${formatted(last, this.now.unit)}`;
      });
    return `Over ${this.now.xLabel}: ${told.slice(0, 8).join("; ")}. Arrow keys read the points; the table has them all.`;
  }

  fillLegend() {
    this.readouts = [];
    const entries = this.now.lines.map((line, i) => {
      const readout = el("span", { class: "readout" });
      this.readouts.push(readout);
      const kind = line.bare ? " band" : line.dash ? " dashed" : "";
      const swatch = el("span", { class: `swatch${kind}`, "aria-hidden": "true" });
      swatch.style.setProperty("--swatch", line.bare ? faded(line.colour, line.shade ?? AREA) : line.colour);
      return el(
        "button",
        {
          type: "button",
          class: "entry",
          "aria-pressed": String(!this.hidden.has(line.label)),
          onclick: (event) => this.toggle(line.label, i, event.currentTarget),
        },
        swatch,
        bdi(line.label),
        readout,
      );
    });
    this.where = el("span", { class: "where" });
    replace(this.legend, ...entries, this.where);
    this.read(null);
  }

  toggle(label, i, button) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
    for (const s of this.plot ? this.slots[i] : []) this.plot.setSeries(s, { show: !this.hidden.has(label) });
  }

  approach() {
    this.isNear = true;
    if (this.now && !this.plot) this.draw();
  }

  /** Draw, for the first time or in other colours, if somebody has come near. */
  draw() {
    this.plot?.destroy();
    this.plot = null;
    const width = this.stage.clientWidth;
    if (this.card.hidden || !this.isNear || !width) return;
    const data = [this.x];
    const series = [{}];
    const bands = [];
    this.slots = this.now.lines.map((line, i) => {
      const column = this.columns[i];
      const show = !this.hidden.has(line.label);
      const shared = { show, spanGaps: true, points: { show: false } };
      const slots = [];
      const add = (values, options) => {
        slots.push(data.push(values) - 1);
        series.push({ ...shared, ...options });
      };
      if (column.low) {
        add(column.high, { stroke: "transparent", width: 0 });
        add(column.low, { stroke: "transparent", width: 0 });
        bands.push({ series: [slots[0], slots[1]], fill: faded(line.colour, line.area ?? AREA) });
      }
      const few = line.values.length <= 40;
      add(column.values, {
        stroke: line.bare ? "transparent" : line.colour,
        width: line.bare ? 0 : 2,
        dash: line.dash ? [6, 4] : undefined,
        fill: line.fill ? faded(line.colour, 0.65) : undefined,
        points: { show: few && !line.bare, size: 5, fill: line.colour, stroke: line.colour },
      });
      return slots;
    });
    if (this.now.stacked) {
      for (let s = 1; s + 1 < data.length; s += 1)
        bands.push({ series: [s + 1, s], fill: faded(this.now.lines[s].colour, 0.75) });
    }
    this.plot = new uPlot(this.options(width, series, bands), data, this.stage);
    this.applyZoom();
  }

  options(width, series, bands) {
    const [ink, grid, font] = [style("--soft"), style("--grid"), `12px ${style("--sans")}`];
    const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { show: false }, gap: 6 };
    const unit = this.now.unit;
    return {
      width,
      height: this.stage.clientHeight,
      series,
      bands,
      legend: { show: false },
      scales: {
        x: { time: false, auto: false, range: () => (zoom.min === null ? extent() : [zoom.min, zoom.max]) },
        y: { range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        {
          ...axis,
          values: (_, ticks) => ticks.map((value) => (this.now.wholeX && value % 1 ? "" : tick(value, "number"))),
          size: 28,
        },
        {
          ...axis,
          values: (_, ticks) => ticks.map((value) => tick(value, unit)),
          size: (_, labels) => 14 + 7 * Math.max(3, ...(labels ?? []).map((label) => label.length)),
        },
      ],
      cursor: {
        sync: { key: "report", setSeries: false, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        points: { size: 8 },
        bind: {
          dblclick: () => () => {
            zoomTo(null, null);
            return null;
          },
        },
      },
      hooks: {
        setCursor: [(u) => this.read(u.cursor.idx ?? null)],
        setSelect: [
          (u) => {
            const { left, width: wide } = u.select;
            if (wide > 4) zoomTo(u.posToVal(left, "x"), u.posToVal(left + wide, "x"));
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          },
        ],
        drawSeries: this.now.points
          ? [
              (u, s) => {
                if (s === 1) this.now.points(u);
              },
            ]
          : [],
      },
    };
  }

  range(low, high) {
    if (low === null || high === null || !Number.isFinite(low)) return [0, 1];
    if (this.now.stacked) return [0, 1];
    const pad = 0.08 * (high - low) || 0.1 * Math.abs(high) || 0.5;
    const isPositive = low >= 0 && (this.now.fromZero || low - pad < 0);
    const top = this.now.unit === "share" ? Math.min(high + pad, 1.005) : high + pad;
    return [isPositive ? 0 : low - pad, top];
  }

  applyZoom() {
    if (!this.plot) return;
    const [min, max] = zoom.min === null ? extent() : [zoom.min, zoom.max];
    this.plot.setScale("x", { min, max });
  }

  resize() {
    const width = this.stage.clientWidth;
    if (!width || !this.now) return;
    if (!this.plot) this.draw();
    else if (this.plot.width !== width || this.plot.height !== this.stage.clientHeight)
      this.plot.setSize({ width, height: this.stage.clientHeight });
  }

  /** Show the numbers at a place; without one, the last. */
  read(index) {
    this.at = index;
    this.now.lines.forEach((line, i) => {
      const values = this.columns[i].values;
      let value = index === null ? line.values[line.values.length - 1] : values[index];
      if (line.share && value !== null && value !== undefined) value = line.share(index ?? values.length - 1);
      let text = formatted(value, this.now.unit);
      const column = this.columns[i];
      const at = index ?? column.values.length - 1;
      if (column.low && finite(column.low[at]) && (line.bare || index !== null)) {
        const range = `${formatted(column.low[at], this.now.unit)} … ${formatted(column.high[at], this.now.unit)}`;
        text = line.bare ? range : `${text} (${range})`;
      }
      this.readouts[i].textContent = text;
    });
    this.where.textContent = index === null ? "last" : `at ${tick(this.x[index], "number")}`;
  }

  key(event) {
    const last = this.x.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    this.approach();
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      const at = Math.min(Math.max((this.at ?? (moves[event.key] > 0 ? -1 : last + 1)) + moves[event.key], 0), last);
      this.plot.setCursor({
        left: this.plot.valToPos(this.x[at], "x"),
        top: this.plot.bbox.height / devicePixelRatio / 2,
      });
      this.read(at);
      announce(
        `${this.now.xLabel} ${tick(this.x[at], "number")}: ${this.now.lines.map((line, i) => `${line.label} ${this.readouts[i].textContent}`).join(", ")}`,
      );
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      this.zoomAround(event.key === "-" ? 2 : 0.5);
    } else if (event.key === "0" || event.key === "Escape") {
      zoomTo(null, null);
    } else return;
    event.preventDefault();
  }

  zoomAround(factor) {
    const { min, max } = this.plot.scales.x;
    const [low, high] = extent();
    const middle = this.at === null ? (min + max) / 2 : this.x[this.at];
    const half = (factor * (max - min)) / 2;
    if (2 * half >= high - low) zoomTo(null, null);
    else zoomTo(Math.max(low, middle - half), Math.min(high, middle + half));
    announce(
      zoom.min === null
        ? "whole length"
        : `${tick(this.plot.scales.x.min, "number")} to ${tick(this.plot.scales.x.max, "number")}`,
    );
  }

  /** The numbers behind the picture, made when they are asked for. */
  fillTable() {
    if (!this.details.open || !this.now) return;
    const head = el(
      "tr",
      {},
      el("th", { scope: "col" }, this.now.xLabel),
      ...this.now.lines.flatMap((line, i) => {
        const names = this.columns[i].low
          ? ["mean", "low", "high"].map((what) => `${line.label}, ${what}`)
          : [line.label];
        return names.map((name) => el("th", { scope: "col" }, bdi(name)));
      }),
    );
    const step = Math.ceil(this.x.length / 1000);
    const rows = [];
    for (let i = 0; i < this.x.length; i += step) {
      const cells = this.columns.flatMap((column, c) => {
        const value = this.now.lines[c].share ? this.now.lines[c].share(i) : column.values[i];
        return column.low ? [value, column.low[i], column.high[i]] : [value];
      });
      rows.push(
        el(
          "tr",
          {},
          el("th", { scope: "row" }, tick(this.x[i], "number")),
          ...cells.map((value) => el("td", {}, formatted(value, this.now.unit))),
        ),
      );
    }
    const caption = step > 1 ? `${this.title}; one in ${step} of ${plural(this.x.length, "row")}` : this.title;
    replace(this.table, el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, ...rows)));
  }
}

function drawAll() {
  for (const chart of charts) chart.draw();
}

function updateAll() {
  for (const chart of charts) chart.update();
  drawAll();
}
