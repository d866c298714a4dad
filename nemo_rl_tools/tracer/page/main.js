/** The page: what is known, what is shown, and who draws it. */

import { BandsView } from "./bands.js";
import { Tooltip, button, empty, h } from "./dom.js";
import { ExpertsView } from "./experts.js";
import { siteText, wayText } from "./frame.js";
import { HealthView } from "./health.js";
import { HeatView } from "./heat.js";
import { HistogramView } from "./histogram.js";
import { History } from "./history.js";
import { Live } from "./live.js";
import { MetricsView } from "./metrics.js";
import { expose } from "./script.js";
import { Shell } from "./shell.js";
import { Store } from "./store.js";
import { TimeBar } from "./time.js";
import { TopKView } from "./topk.js";
import { WatchPanel } from "./watches.js";

const BUDGET_BYTES = 256 << 20;
const BURST_MS = 80;
const MOST_SAID = 200; // problems and marks that are kept

/** All of it. */
class App {
  constructor() {
    this.store = new Store(BUDGET_BYTES);
    this.store.pinned = (run, step) => this.sides().some((side) => side.run === run && side.step === step);
    this.live = new Live({
      message: (message) => this.take(message),
      frame: (frame) => this.takeFrame(frame),
      state: () => this.changed(),
    });
    this.history = new History(this);
    this.catalogue = { sites: [], reducers: {} };
    this.order = {};
    this.plan = { watches: [], digest: "", effective_step: null };
    [this.problems, this.marks, this.stats] = [[], [], null];
    [this.run, this.other, this.step, this.wasDemoted] = [undefined, undefined, undefined, false];
    this.tooltip = new Tooltip();
    this.time = new TimeBar(this);
    this.watches = new WatchPanel(this);
    const views = [HeatView, BandsView, ExpertsView, HistogramView, TopKView, MetricsView, HealthView];
    this.views = views.map((Kind) => new Kind(this));
    this.view = this.views[0];
    this.shell = new Shell(this);
    this.main = this.shell.main;
  }

  /** Draws at the next moment; many changes are drawn once. */
  changed() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.render();
    });
  }

  /** Numbers that are shown, of what is known at this moment. */
  numbers() {
    this.render();
    return this.view.numbers();
  }

  render() {
    this.view.prepare();
    this.step = this.time.shown(this.view);
    for (const { run, step } of this.sides()) if (step !== undefined) this.history.need(run, step);
    this.shell.render();
    this.time.render();
    this.view.render();
    this.watches.render();
  }

  takeFrame(frame) {
    this.store.add(frame);
    this.chooseRun(frame.header.run);
    // Frames come in bursts; people look at what all of them give.
    this.soon ??= setTimeout(() => {
      this.soon = undefined;
      this.changed();
    }, BURST_MS);
  }

  take(message) {
    const takes = {
      welcome: () => this.welcomed(message),
      runs: () => message.runs.forEach((info) => this.takeRun(info)),
      run: () => this.takeRun(message),
      metrics: () => this.store.addMetrics(message.run, message.step, message.metrics),
      plan: () => this.takePlan(message),
      stats: () => (this.stats = message),
      mark: () => this.takeMark(message),
      problem: () => this.takeProblem(message.text),
      demoted: () => (this.wasDemoted = true),
      error: () => this.takeError(message),
    };
    takes[message.type]?.();
    this.changed();
  }

  keep(list, one) {
    list.push({ ...one, at: Date.now() });
    if (list.length > MOST_SAID) list.shift();
  }

  /** A hub that greets again tells again what it told before. */
  takeMark({ label, step }) {
    if (!this.marks.some((mark) => mark.label === label && mark.step === step)) this.keep(this.marks, { label, step });
  }

  takeProblem(text) {
    if (!this.problems.some((problem) => problem.text === text)) this.keep(this.problems, { text });
  }

  welcomed(message) {
    this.catalogue = { sites: message.sites, reducers: message.reducers };
    this.order = Object.fromEntries(message.sites.map(({ kind }, place) => [kind, place]));
    this.wasDemoted = false;
    this.stats = null;
    this.watches.setCatalogue(this.catalogue);
    this.takePlan(message);
    this.history.connected(message.runs);
    message.runs.forEach((info) => this.takeRun(info));
  }

  takePlan({ watches, digest, effective_step }) {
    const isOther = JSON.stringify(watches) !== JSON.stringify(this.plan.watches);
    this.plan = { watches, digest, effective_step };
    if (isOther || this.watches.isSent) this.watches.planned();
  }

  takeRun(info) {
    this.store.setInfo(info);
    this.chooseRun(info.run);
    if (this.shownRuns().includes(info.run)) this.history.start(info.run);
  }

  takeError({ code, text }) {
    if (this.live.state !== "connected") return;
    if (code === "bad_watch") this.watches.refused(text);
    else this.takeProblem(text);
  }

  /** The first run is shown; others are chosen. */
  chooseRun(id) {
    this.run ??= id;
  }

  setRuns(run, other) {
    [this.run, this.other] = [run, other === run ? undefined : other];
    this.shownRuns().forEach((id) => this.history.start(id));
    this.changed();
  }

  shownRuns() {
    return [this.run, this.other].filter((id) => id !== undefined);
  }

  /** What is shown side by side: run A, and run B where one is chosen, at the same step. */
  sides() {
    return this.shownRuns().map((run, i) => ({ run, step: this.step, letter: "AB"[i], name: this.nameOf(run) }));
  }

  nameOf(run) {
    return this.store.runs.get(run)?.info.name || run;
  }

  /** Names a side in a heading. */
  sideText(i) {
    const { name, step, letter } = this.sides()[i];
    const at = step === undefined ? "no step" : `step ${step}`;
    return this.sides().length > 1 ? `${letter}: ${name}, ${at}` : `${name}, ${at}`;
  }

  runInfo() {
    return this.store.runs.get(this.run)?.info ?? { state: "", unobserved: {} };
  }

  /** What has been watched of the runs that are shown. */
  watchedOf() {
    const [first, second] = this.shownRuns().map((id) => this.store.run(id).watched);
    if (second === undefined) return first ?? new Map();
    const both = new Map(first);
    for (const [id, seen] of second) {
      const { places = [], updates = [] } = both.get(id) ?? {};
      both.set(id, {
        ...seen,
        places: new Map([...places, ...seen.places]),
        updates: new Set([...updates, ...seen.updates]),
      });
    }
    return both;
  }

  show(id) {
    this.view = this.views.find((view) => view.id === id) ?? this.view;
    this.tooltip.hide();
    this.shell.mount();
    this.changed();
  }

  /** Orders sites with a phase as a step meets them. */
  compareSites(a, b) {
    const key = ({ phase, site }) => {
      const place = this.order[site.kind] ?? 99;
      const layer = site.layer ?? (place <= 1 ? -1 : 1 << 20);
      const sign = site.direction === "backward" ? -1 : 1;
      const when = site.kind === "param" ? -1 : site.kind === "grad" ? 2 : sign < 0 ? 1 : 0;
      return [phase === "train" ? 1 : 0, phase, when, sign * layer, sign * place];
    };
    const [left, right] = [key(a), key(b)];
    const at = left.findIndex((value, i) => value !== right[i]);
    return at < 0 ? 0 : left[at] < right[at] ? -1 : 1;
  }

  /** The first values that are not finite, as the hub says. */
  firstNonFinite(run) {
    const said = this.store.run(run).info.first_non_finite;
    return said ? { ...said, text: siteText(said.site) } : undefined;
  }

  goToNonFinite(run = this.run) {
    const found = run === undefined ? undefined : this.firstNonFinite(run);
    if (found !== undefined) this.showSite(found);
  }

  /** Shows a site at a step where it can be seen best. */
  showSite({ step, phase, site }) {
    const wanted = { phase, kind: site.kind, way: wayText(site) };
    const seen = [...this.watchedOf().values()].filter(
      (one) => one.phase === phase && one.kind === site.kind && one.way === wanted.way
    );
    this.views.forEach((view) => view.choose(wanted));
    const [heat, bands] = [this.views[0], this.views[1]];
    if (seen.some(heat.picker.takes)) this.show("tokens");
    else this.show(seen.some(bands.picker.takes) ? "steps" : "health");
    this.time.go(step);
  }

  /** What is said where a view has nothing, with the watch that would give it. */
  nothingYet(title, watch) {
    if (this.run === undefined) return empty("Waiting for a run", "It appears as soon as a job connects to the hub.");
    const can = this.watches.canEdit;
    const isRecorded = this.runInfo().state === "recorded";
    const text = can
      ? "Add this watch; its data arrives within the next steps:"
      : isRecorded ? "This watch would have given it:" : "The controller can add this watch:";
    const add = button("Add it to the watches", () => this.watches.add(watch), { className: "primary" });
    return empty(title, text, h("code", { textContent: watch }), ...(can ? [add] : []));
  }
}

const app = new App();
expose(app);
app.shell.start();
