/** View: what is wrong: NaN and infinities per step, what was dropped or is missing, what cannot be observed. */

import { NOT_FINITE } from "./color.js";
import { Plot, fit } from "./chart.js";
import { h, say } from "./dom.js";
import { clock, count, exact, whole } from "./format.js";
import { siteText } from "./frame.js";

const HEIGHT = 150;

/** Counters, and tables of where. */
export class HealthView {
  constructor(app) {
    this.app = app;
    this.id = "health";
    this.title = "Health";
    this.bars = h("canvas", { role: "img" });
    this.bars.addEventListener("click", (event) => app.time.go(this.stepAt(event)));
    this.barText = h("p", { className: "key" });
    this.sites = h("div");
    this.digests = h("div");
    this.gaps = h("div");
    this.unobserved = h("div");
    this.said = h("div");
    const card = (title, ...children) => h(
      "section",
      { className: "pane" },
      h("h2", { className: "pane-title", textContent: title }),
      ...children,
    );
    this.root = h("div", { className: "view" },
      card(
        "NaN and infinities per step",
        this.bars,
        this.barText,
      ), card("Where, at this step", this.sites), card("Digests at this step", this.digests),
      h(
        "div",
        { className: "pair" },
        card("Dropped and missing", this.gaps),
        card("Sites that cannot be observed", this.unobserved),
      ),
      card("Marks and problems", this.said));
  }

  choose() {}

  prepare() {}

  isReady() {
    return true;
  }

  /** NaN and infinities of a run per step, over all sites. */
  counts(run) {
    return this.app.store.run(run).stepList.map((step) => {
      const found = this.app.store.run(run).notFinite.get(step);
      return [step, found ? [...found.values()].reduce((sum, { number }) => sum + number, 0) : 0];
    });
  }

  render() {
    const { app } = this;
    const width = Math.max(100, this.root.clientWidth - 26);
    this.series = app.run ? this.counts(app.run) : [];
    const total = this.series.reduce((sum, [, number]) => sum + number, 0);
    const steps = this.series.filter(([, number]) => number > 0).length;
    say(
      this.barText,
      total === 0 ? `All values were finite in ${count(
        this.series.length,
        "step",
      )}, as far as watched.` : `${whole(total)} values in ${count(steps, "step")}. A click goes to the step.`,
    );
    this.paint(width, total);
    this.sites.replaceChildren(this.siteTable());
    this.digests.replaceChildren(this.digestTable());
    this.gaps.replaceChildren(this.gapTable());
    this.unobserved.replaceChildren(this.unobservedTable());
    this.said.replaceChildren(this.saidTable());
  }

  paint(width, total) {
    const context = fit(this.bars, width, HEIGHT);
    this.bars.setAttribute("aria-label", `${total} values that are not finite`);
    if (this.series.length === 0) return;
    const steps = this.series.map(([step]) => step);
    const plot = new Plot(
      context,
      { left: 52, top: 8, right: width - 10, bottom: HEIGHT - 22 },
      [steps[0] - 0.5, steps.at(-1) + 0.5],
      [0, ...this.series.map(([, number]) => number), total ? 0 : 1],
      false,
    );
    plot.low = 0;
    this.plot = plot;
    plot.axes(true);
    const size = Math.max(2, plot.x(1) - plot.x(0) - 1);
    context.fillStyle = NOT_FINITE;
    for (const [step, number] of this.series) {
      if (number > 0) context.fillRect(
        plot.x(step) - size / 2,
        Math.min(plot.y(number), plot.box.bottom - 2),
        size,
        Math.max(2, plot.box.bottom - plot.y(number)),
      );
    }
    plot.cursor(this.app.step, this.app.marks);
  }

  stepAt(event) {
    if (!this.plot) return undefined;
    const near = this.plot.stepAt(event.clientX - this.bars.getBoundingClientRect().left);
    return this.series.reduce(
      (best, [step]) => (Math.abs(step - near) < Math.abs(best - near) ? step : best),
      this.series[0]?.[0],
    );
  }

  /** Sites with values that are not finite, in the order in which the pass meets them. */
  found() {
    return this.app.sides().flatMap(({ run, step, letter }) => {
      const found = [...(this.app.store.run(run).notFinite.get(step)?.values() ?? [])];
      found.sort((a, b) => this.app.compareSites(a, b));
      return found.map((one) => ({ ...one, run, step, letter, stats: this.statsAt(run, step, one) }));
    });
  }

  statsAt(run, step, { phase, site }) {
    const frame = this.app.store.frame(run, step, { phase, reducer: "stats" }, siteText(site));
    return frame ? { nan: frame.values[7], posinf: frame.values[8], neginf: frame.values[9] } : undefined;
  }

  siteTable() {
    const found = this.found();
    if (found.length === 0) return h(
      "p",
      { className: "key", textContent: "Nothing: all values of this step are finite, as far as watched." },
    );
    const names = ["run", "phase", "site", "not finite", "NaN", "+∞", "−∞", ""];
    const rows = found.map((one) => {
      const numbers = one.stats ? [one.stats.nan, one.stats.posinf, one.stats.neginf].map(whole) : ["", "", ""];
      const go = h(
        "button",
        { type: "button", className: "quiet", textContent: "show", onclick: () => this.app.showSite(one) },
      );
      return [one.letter, one.phase, siteText(one.site), whole(one.number), ...numbers, go];
    });
    return table(names, rows, 3);
  }

  /** 64 bits per site; with two runs, whether they are equal. */
  digestTable() {
    const sides = this.app.sides();
    const seen = [...this.app.watchedOf().values()].filter(({ reducer }) => reducer === "digest");
    const rows = seen.flatMap((one) => [...one.places.keys()].map((text) => {
      const found = sides.map(
        ({ run, step }) => this.app.store.frame(
          run,
          step,
          { ...one, update: Math.max(...one.updates) },
          text,
        )?.values[0]
      );
      const same = found.includes(undefined) ? "" : found[0] === found[1] ? "equal" : "different";
      return [
        one.phase,
        text,
        ...found.map((bits) => h("code", { textContent: bits === undefined ? "nothing" : hex(bits) })),
        ...(sides.length > 1 ? [same] : []),
      ];
    }));
    if (rows.length === 0) return h(
      "p",
      {
        className: "key",
        textContent: "None is watched. With layer.out | digest two runs can be compared bit by bit.",
      },
    );
    return table(
      ["phase", "site", ...sides.map(({ letter }) => `run ${letter}`), ...(sides.length > 1 ? ["A and B"] : [])],
      rows,
      9,
    );
  }

  gapTable() {
    const rows = this.app.sides().flatMap(({ run, letter }) => [
      ...this.app.store.run(run).gaps
    ].sort((a, b) => b[0] - a[0]).flatMap(([step, phases]) =>
      [...phases].map(
        ([phase, gap]) => [letter, String(step), phase, whole(gap.dropped), gap.missing.join(", ") || "none"]
      )));
    if (rows.length === 0) return h(
      "p",
      { className: "key", textContent: "Nothing was dropped, and no rank is missing." },
    );
    return table(["run", "step", "phase", "frames dropped", "ranks missing"], rows.slice(0, 200), 9);
  }

  unobservedTable() {
    const rows = this.app.sides().flatMap(
      ({ run, letter }) => Object.entries(
        this.app.store.run(run).info.unobserved ?? {}
      ).map(([kind, why]) => [letter, kind, why])
    );
    if (rows.length === 0) return h("p", { className: "key", textContent: "None is known." });
    return table(["run", "site", "why"], rows, 9);
  }

  saidTable() {
    const { marks, problems } = this.app;
    const rows = [
      ...marks.map((mark) => ["mark", `step ${mark.step}`, mark.label, mark.at]),
      ...problems.map((problem) => ["problem", "", problem.text, problem.at]),
    ];
    if (rows.length === 0) return h("p", { className: "key", textContent: "None." });
    rows.sort((a, b) => b[3] - a[3]);
    return table(
      ["what", "at", "text", "came"],
      rows.map(([what, at, text, time]) => [what, at, text, clock(time)]),
      9,
    );
  }

  canvases() {
    return [{ title: "NaN and infinities per step", canvas: this.bars }];
  }

  numbers() {
    const rows = this.found().map(
      ({ run, step, phase, site, number, stats }) => [
        run,
        step,
        phase,
        siteText(site),
        exact(number),
        ...(stats ? [stats.nan, stats.posinf, stats.neginf].map(exact) : ["", "", ""]),
      ]
    );
    return { columns: ["run", "step", "phase", "site", "not_finite", "nan", "posinf", "neginf"], rows };
  }
}

/** Sixteen digits. */
const hex = (bits) => BigInt.asUintN(64, bits).toString(16).padStart(16, "0");

function table(names, rows, firstNumber) {
  const cell = (value, i) => h("td", { className: i >= firstNumber ? "number" : "" }, value);
  const head = h(
    "tr",
    {},
    ...names.map(
      (name, i) => h("th", { scope: "col", className: i >= firstNumber ? "number" : "", textContent: name })
    ),
  );
  return h(
    "div",
    { className: "scroll-x" },
    h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map(cell))))),
  );
}
