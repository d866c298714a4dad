/** View: what is wrong: NaN and infinities per step, what was dropped or is missing, what cannot be observed. */

import { Chart } from "./chart.js";
import { NOT_FINITE } from "./color.js";
import { button, h, note, pane, say, table } from "./dom.js";
import { clock, count, exact, whole } from "./format.js";
import { siteText } from "./frame.js";
import { View } from "./view.js";

const HEIGHT = 150;
const LEAST_SHARE = 0.015; // of the highest bar: a lower one would not be seen
const MOST_ROWS = 200;

/** Counters, and tables of where. */
export class HealthView extends View {
  constructor(app) {
    super(app, { id: "health", title: "Health" });
    this.bars = new Chart(app, (step) => [`step ${step}`, [["not finite", whole(new Map(this.series).get(step))]]]);
    this.barText = note("");
    [this.sites, this.digests, this.gaps, this.unobserved, this.said] = Array.from({ length: 5 }, () => h("div"));
    this.build(
      {},
      pane("NaN and infinities per step", this.bars.root, this.barText),
      pane("Where, at this step", this.sites),
      pane("Digests at this step", this.digests),
      h("div", { className: "pair" }, pane("Dropped and missing", this.gaps), pane("Sites that cannot be observed", this.unobserved)),
      pane("Marks and problems", this.said),
    );
  }

  /** NaN and infinities of a run per step, over all sites. */
  counts(run) {
    const { stepList, notFinite } = this.app.store.run(run);
    const sum = (step) => [...(notFinite.get(step)?.values() ?? [])].reduce((total, { number }) => total + number, 0);
    return stepList.map((step) => [step, sum(step)]);
  }

  render() {
    this.series = this.app.run ? this.counts(this.app.run) : [];
    const total = this.series.reduce((sum, [, number]) => sum + number, 0);
    const steps = this.series.filter(([, number]) => number > 0).length;
    say(this.barText, total === 0
      ? `All watched values were finite in ${count(this.series.length, "step")}.`
      : `${whole(total)} values in ${count(steps, "step")}. Click to go to the step.`);
    const least = LEAST_SHARE * Math.max(...this.series.map(([, number]) => number));
    this.bars.set({
      lines: [{
        points: this.series.map(([step, number]) => [step, number && Math.max(number, least)]),
        colour: NOT_FINITE,
        bars: [1, 0],
      }],
      width: Math.max(100, this.root.clientWidth - 26),
      height: HEIGHT,
      text: `${total} values that are not finite`,
    });
    this.sites.replaceChildren(this.siteTable());
    this.digests.replaceChildren(this.digestTable());
    this.gaps.replaceChildren(this.gapTable());
    this.unobserved.replaceChildren(this.unobservedTable());
    this.said.replaceChildren(this.saidTable());
  }

  /** Sites with values that are not finite, in the order in which the pass meets them. */
  found() {
    return this.app.sides().flatMap(({ run, step, letter }) => {
      const found = [...(this.app.store.run(run).notFinite.get(step)?.values() ?? [])];
      found.sort((a, b) => this.app.compareSites(a, b));
      return found.map((one) => ({ ...one, run, step, letter, stats: this.statsAt(run, step, one) }));
    });
  }

  /** Numbers of NaN, +infinity and -infinity where they are watched. */
  statsAt(run, step, { phase, site }) {
    const frame = this.app.store.frame(run, step, { phase, reducer: "stats" }, siteText(site));
    return frame && [...frame.values.subarray(7)];
  }

  siteTable() {
    const rows = this.found().map((one) => {
      const numbers = one.stats?.map(whole) ?? ["", "", ""];
      const go = button("show", () => this.app.showSite(one), { className: "quiet" });
      return [one.letter, one.phase, siteText(one.site), whole(one.number), ...numbers, go];
    });
    if (rows.length === 0) return note("None: all watched values of this step are finite.");
    return table(["run", "phase", "site", "not finite", "NaN", "+∞", "−∞", ""], rows, { firstNumber: 3 });
  }

  /** 64 bits per site; with two runs, whether they are equal. */
  digestTable() {
    const sides = this.app.sides();
    const isTwo = sides.length > 1;
    const seen = [...this.app.watchedOf().values()].filter(({ reducer }) => reducer === "digest");
    const rows = seen.flatMap((one) => [...one.places.keys()].map((text) => {
      const of = { ...one, update: Math.max(...one.updates) };
      const found = sides.map(({ run, step }) => this.app.store.frame(run, step, of, text)?.values[0]);
      const same = found.includes(undefined) ? "" : found[0] === found[1] ? "equal" : "different";
      const shown = found.map((bits) => h("code", { textContent: bits === undefined ? "nothing" : hex(bits) }));
      return [one.phase, text, ...shown, ...(isTwo ? [same] : [])];
    }));
    if (rows.length === 0) return note("None is watched. With layer.out | digest two runs can be compared bit by bit.");
    return table(["phase", "site", ...sides.map(({ letter }) => `run ${letter}`), ...(isTwo ? ["A and B"] : [])], rows);
  }

  gapTable() {
    const rows = this.app.sides().flatMap(({ run, letter }) => {
      const steps = [...this.app.store.run(run).gaps].sort((a, b) => b[0] - a[0]);
      const line = (step, [phase, { dropped, missing }]) =>
        [letter, String(step), phase, whole(dropped), missing.join(", ") || "none"];
      return steps.flatMap(([step, phases]) => [...phases].map((gap) => line(step, gap)));
    });
    if (rows.length === 0) return note("No frame was dropped, and no rank is missing.");
    return table(["run", "step", "phase", "frames dropped", "ranks missing"], rows.slice(0, MOST_ROWS));
  }

  unobservedTable() {
    const kinds = (run) => Object.entries(this.app.store.run(run).info.unobserved ?? {});
    const rows = this.app.sides().flatMap(({ run, letter }) => kinds(run).map((pair) => [letter, ...pair]));
    return rows.length === 0 ? note("None is known.") : table(["run", "site", "why"], rows);
  }

  saidTable() {
    const { marks, problems } = this.app;
    const rows = [
      ...marks.map((mark) => ["mark", `step ${mark.step}`, mark.label, mark.at]),
      ...problems.map((problem) => ["problem", "", problem.text, problem.at]),
    ].sort((a, b) => b[3] - a[3]);
    if (rows.length === 0) return note("None.");
    return table(["what", "at", "text", "came"], rows.map(([what, at, text, time]) => [what, at, text, clock(time)]));
  }

  canvases() {
    return [{ title: "NaN and infinities per step", canvas: this.bars.canvas }];
  }

  numbers() {
    const rows = this.found().map(({ run, step, phase, site, number, stats }) =>
      [run, step, phase, siteText(site), exact(number), ...(stats?.map(exact) ?? ["", "", ""])]);
    return { columns: ["run", "step", "phase", "site", "not_finite", "nan", "posinf", "neginf"], rows };
  }
}

/** Sixteen digits. */
const hex = (bits) => BigInt.asUintN(64, bits).toString(16).padStart(16, "0");
