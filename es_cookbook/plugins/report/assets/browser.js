// The rollout browser: filters, a list with a reader, and three ways to set rollouts side by side.

const PER_PAGE = 50;
const VIEWS = {
  list: "All",
  extremes: "Best and worst",
  problem: "One problem over generations",
  pairs: "Mirrored pairs",
};

class Browser {
  constructor(parent, report, rollouts) {
    [this.parent, this.view, this.page, this.chosen, this.which] = [parent, "list", 0, null, 0];
    this.fields = {};
    this.build();
    this.take(report, rollouts);
  }

  /** New data, in which every filter stays as it is. */
  take(report, rollouts) {
    [this.report, this.rollouts] = [report, rollouts];
    const { run, tag } = this.fields;
    this.options(run, [["", "all runs"], ...report.runs.map((each, i) => [String(i), plainText(each.name)])]);
    run.parentElement.hidden = report.runs.length < 2;
    const tags = [...new Set(rollouts.order.length ? rollouts.table.parts.filter(Array.isArray).flat() : [])].sort();
    this.options(tag, [["", "all tags"], ...tags.slice(0, 500).map((name) => [name, plainText(name)])]);
    tag.parentElement.hidden = !tags.length;
    const [inList, scrolled] = [document.activeElement === this.rows, this.rows?.scrollTop];
    this.refresh();
    if (this.rows && scrolled) this.rows.scrollTop = scrolled;
    if (inList) this.rows.focus();
  }

  options(select, entries) {
    const before = select.value;
    replace(select, ...entries.map(([value, label]) => el("option", { value }, label)));
    if (entries.some(([value]) => value === before)) select.value = before;
  }

  build() {
    const field = (name, label, input, spoken = label) => {
      this.fields[name] = input;
      input.setAttribute("aria-label", spoken);
      input.addEventListener("input", () => this.soon());
      return el("label", {}, label, " ", input);
    };
    const counted = (placeholder) =>
      el("input", { type: "number", min: "0", step: "1", placeholder, inputmode: "numeric" });
    const any = (placeholder) => el("input", { type: "number", step: "any", placeholder });
    const form = el(
      "form",
      {
        class: "filters",
        role: "search",
        "aria-label": "Filter rollouts",
        onsubmit: (event) => event.preventDefault(),
      },
      field(
        "text",
        "Search",
        el("input", { type: "search", placeholder: "in prompts, answers and logs", class: "wide" }),
      ),
      field("run", "Run", el("select")),
      el(
        "span",
        { class: "range" },
        field("from", "Generation", counted("from"), "From generation"),
        field("to", "to", counted("to"), "To generation"),
      ),
      field("problem", "Problem", counted("any")),
      field("genome", "Genome", counted("any")),
      el(
        "span",
        { class: "range" },
        field("low", "Reward", any("from"), "From reward"),
        field("high", "to", any("to"), "To reward"),
      ),
      field("tag", "Tag", el("select")),
      field(
        "sort",
        "Order",
        el(
          "select",
          {},
          ...Object.entries({
            recorded: "as recorded",
            newest: "newest first",
            best: "best first",
            worst: "worst first",
            longest: "longest first",
          }).map(([value, label]) => el("option", { value }, label)),
        ),
      ),
      el("button", { type: "reset", onclick: () => setTimeout(() => this.refresh(true)) }, "Clear"),
    );
    this.tabs = el(
      "div",
      { class: "tabs", role: "tablist", "aria-label": "Views", onkeydown: (event) => this.tabKey(event) },
      ...Object.entries(VIEWS).map(([name, label]) =>
        el(
          "button",
          {
            type: "button",
            role: "tab",
            id: `tab-${name}`,
            "aria-controls": "rollout-view",
            onclick: () => this.show(name),
          },
          label,
        ),
      ),
    );
    this.count = el("p", { class: "count", role: "status" });
    this.body = el("div", { id: "rollout-view", role: "tabpanel" });
    replace(this.parent, form, this.tabs, this.count, this.body);
  }

  tabKey(event) {
    const names = Object.keys(VIEWS);
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    this.show(names[(names.indexOf(this.view) + move + names.length) % names.length]);
    byId(`tab-${this.view}`).focus();
  }

  show(view) {
    [this.view, this.page, this.which, this.open] = [view, 0, 0, null];
    this.refresh();
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(true), 120);
  }

  get filter() {
    const value = (name) => this.fields[name].value;
    const numeric = (name) => (value(name) === "" || Number.isNaN(Number(value(name))) ? null : Number(value(name)));
    const text = value("text");
    return {
      run: value("run") === "" ? null : Number(value("run")),
      tag: value("tag") || null,
      sort: value("sort"),
      from: numeric("from"),
      to: numeric("to"),
      problem: numeric("problem"),
      genome: numeric("genome"),
      low: numeric("low"),
      high: numeric("high"),
      text: text ? new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "iu") : null,
    };
  }

  refresh(fromStart = false) {
    if (fromStart) [this.page, this.which, this.open] = [0, 0, null];
    const filter = this.filter;
    this.query = filter.text && new RegExp(filter.text.source, "giu");
    this.found = this.rollouts.filtered(filter);
    for (const tab of this.tabs.children) {
      const isShown = tab.id === `tab-${this.view}`;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1;
    }
    this.body.setAttribute("aria-labelledby", `tab-${this.view}`);
    const [shown, all] = [this.found.length, this.rollouts.table.length];
    this.count.textContent =
      shown === all ? plural(all, "rollout") : `${whole.format(shown)} of ${plural(all, "rollout")}`;
    const views = {
      list: () => this.list(),
      extremes: () => this.extremes(),
      problem: () => this.problem(),
      pairs: () => this.pairs(),
    };
    replace(this.body, ...(this.open ? this.besides() : views[this.view]()));
  }

  // ---- all of them: a list, and one to read ----

  list() {
    if (!this.found.length) return [el("p", { class: "empty" }, "No rollout passes these filters.")];
    if (!this.found.includes(this.chosen)) this.chosen = this.found[this.page * PER_PAGE];
    const rows = Array.from(this.found.slice(this.page * PER_PAGE, (this.page + 1) * PER_PAGE), (i) => this.row(i));
    this.rows = el(
      "div",
      {
        class: "rows",
        role: "listbox",
        "aria-label": "Rollouts",
        tabindex: "0",
        onkeydown: (event) => this.listKey(event),
      },
      ...rows,
    );
    this.reader = el("div", { class: "reader", "aria-live": "off" });
    this.read();
    return [el("div", { class: "split" }, el("div", {}, this.rows, this.pager(this.found.length)), this.reader)];
  }

  row(i) {
    const answer = plainText(startOf(this.rollouts.action(i)).slice(0, 140).replace(/\s+/g, " "));
    return el(
      "div",
      { class: "row", role: "option", id: `rollout-${i}`, onclick: () => this.choose(i) },
      rewardChip(this.rollouts.table.reward[i]),
      el(
        "span",
        { class: "what" },
        el("span", { class: "which" }, whichText(this.rollouts, i)),
        el("bdi", { class: "snippet" }, answer || "(nothing)"),
      ),
    );
  }

  choose(i) {
    this.chosen = i;
    this.read();
  }

  read() {
    for (const row of this.rows.children)
      row.setAttribute("aria-selected", String(row.id === `rollout-${this.chosen}`));
    this.rows.setAttribute("aria-activedescendant", `rollout-${this.chosen}`);
    replace(this.reader, transcript(this.rollouts, this.chosen, this.query), this.links(this.chosen));
  }

  /** From a rollout to the same problem at other times, and to its mirror image. */
  links(i) {
    const same = this.rollouts.sameProblem(i);
    const pair = this.rollouts.pairs(same).find((each) => each.includes(i));
    const button = (label, action) => el("button", { type: "button", onclick: action }, label);
    return el(
      "p",
      { class: "links" },
      same.length > 1
        ? button(`All ${same.length} answers to this problem`, () => this.beside(same, "Answers to this problem"))
        : null,
      pair ? button("Beside its mirror image", () => this.beside(pair, "A mirrored pair")) : null,
    );
  }

  beside(group, title) {
    this.open = { group: group.slice(0, 60), title };
    this.refresh();
    this.body.querySelector("button").focus();
  }

  besides() {
    const back = el(
      "button",
      {
        type: "button",
        onclick: () => {
          this.open = null;
          this.refresh();
          this.rows?.focus();
        },
      },
      "← Back",
    );
    return [el("div", { class: "bar" }, back, el("h3", {}, this.open.title)), this.sequence(this.open.group)];
  }

  listKey(event) {
    const at = this.found.indexOf(this.chosen);
    const to = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      PageDown: at + PER_PAGE,
      PageUp: at - PER_PAGE,
      Home: 0,
      End: this.found.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.chosen = this.found[Math.min(Math.max(to, 0), this.found.length - 1)];
    const page = Math.floor(this.found.indexOf(this.chosen) / PER_PAGE);
    if (page !== this.page) {
      this.page = page;
      replace(this.body, ...this.list());
      this.rows.focus();
    } else this.read();
    byId(`rollout-${this.chosen}`).scrollIntoView({ block: "nearest" });
  }

  pager(count) {
    const pages = Math.ceil(count / PER_PAGE);
    if (pages < 2) return null;
    return this.turner("page", this.page, pages, (to) => {
      this.page = to;
      this.chosen = null;
    });
  }

  // One of so many `what`, with buttons to the one before and the one behind it.
  turner(what, at, count, go) {
    const turn = (to, label) =>
      el(
        "button",
        {
          type: "button",
          disabled: to < 0 || to >= count,
          onclick: () => {
            go(to);
            this.refresh();
          },
        },
        label,
      );
    return el(
      "p",
      { class: "pager" },
      turn(at - 1, "← Previous"),
      `${what} ${whole.format(at + 1)} of ${whole.format(count)}`,
      turn(at + 1, "Next →"),
    );
  }

  // ---- side by side ----

  sequence(group) {
    const cards = group.map((i, k) =>
      transcript(this.rollouts, i, this.query, k ? this.rollouts.action(group[k - 1]) : null),
    );
    return el("div", { class: group.length > 2 ? "sequence" : "pair" }, ...cards);
  }

  stepper(count, what) {
    return this.turner(what, this.which, count, (to) => {
      this.which = to;
    });
  }

  extremes() {
    const rewarded = this.rollouts
      .filtered({ ...this.filter, sort: "best" })
      .filter((i) => !Number.isNaN(this.rollouts.table.reward[i]));
    if (rewarded.length < 2)
      return [el("p", { class: "empty" }, "There are not two rollouts with a reward among these.")];
    const [best, worst] = [rewarded[this.which], rewarded[rewarded.length - 1 - this.which]];
    const column = (title, i) => el("div", {}, el("h3", {}, title), transcript(this.rollouts, i, this.query));
    return [
      this.stepper(Math.floor(rewarded.length / 2), "rank"),
      el("div", { class: "pair" }, column("Best", best), column("Worst", worst)),
    ];
  }

  problem() {
    const groups = this.rollouts.problems(this.found);
    if (!groups.length)
      return [
        el(
          "p",
          { class: "empty" },
          "No problem among these was recorded in two generations. More are, with trackers.jsonl.rollouts_per_generation.",
        ),
      ];
    const pick = el(
      "select",
      {
        "aria-label": "Problem",
        onchange: (event) => {
          this.which = Number(event.target.value);
          this.refresh();
          byId("problem-pick").focus();
        },
        id: "problem-pick",
      },
      ...groups
        .slice(0, 500)
        .map((group, k) =>
          el(
            "option",
            { value: String(k) },
            `${plainText(startOf(this.rollouts.prompt(group[0])).replace(/\s+/g, " ").slice(-70))} (${group.length})`,
          ),
        ),
    );
    pick.value = String(this.which);
    const group = groups[this.which];
    const more =
      group.length > 60
        ? el("p", { class: "hint" }, `The first 60 of ${group.length}; the filters choose others.`)
        : null;
    return [
      el(
        "p",
        { class: "bar" },
        el("label", {}, "Problem ", pick),
        el("span", { class: "hint" }, "Marked: what differs from the answer before."),
      ),
      more ?? "",
      this.sequence(group.slice(0, 60)),
    ];
  }

  pairs() {
    const pairs = this.rollouts.pairs(this.found);
    if (!pairs.length)
      return [
        el(
          "p",
          { class: "empty" },
          "No two genomes of a mirrored pair were recorded at the same problem. More are, with trackers.jsonl.rollouts_per_generation.",
        ),
      ];
    return [
      this.stepper(pairs.length, "pair"),
      el("p", { class: "hint" }, "The same problem with +σ and −σ of the same noise. Marked: what differs."),
      this.sequence(pairs[this.which]),
    ];
  }
}
