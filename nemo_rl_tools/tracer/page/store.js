/** What the page holds of runs: frames and tables by step, within a budget of bytes; the oldest go first. */

import { frameKey, siteText, wayText } from "./frame.js";

const HEAVY_BYTES = 4096; // of numbers: such a frame goes before small ones, which pictures over steps need

/** What a map has under a key, made where it is new. */
function inside(map, key, make = () => new Map()) {
  if (!map.has(key)) map.set(key, make());
  return map.get(key);
}

/** One run: what the hub says of it, and what has come of it. */
class Run {
  constructor(id) {
    this.id = id;
    this.info = { run: id, state: "running" };
    this.steps = new Map(); // step -> Map(key -> frame)
    this.tables = new Map(); // name -> table
    this.known = new Set(); // steps that exist, in memory or not
    this.thin = new Set(); // steps whose heavy frames have gone
    this.watched = new Map(); // phase|kind|way|reducer -> what has been seen of it
    this.metrics = new Map(); // name -> Map(step -> number)
    this.notFinite = new Map(); // step -> Map(phase|site -> {phase, site, number})
    this.gaps = new Map(); // step -> Map(phase -> {dropped, missing})
    this.bytes = 0;
  }

  /** Known steps, ascending. */
  get stepList() {
    if (this.sorted === undefined) this.sorted = [...this.known].sort((a, b) => a - b);
    return this.sorted;
  }

  know(step) {
    if (this.known.has(step)) return;
    this.known.add(step);
    this.sorted = undefined;
  }
}

/** All runs. */
export class Store {
  /** @param {number} budget in bytes */
  constructor(budget) {
    this.budget = budget;
    this.runs = new Map();
    this.pinned = () => false; // (run, step) -> whether it is shown
  }

  get bytes() {
    return [...this.runs.values()].reduce((sum, run) => sum + run.bytes, 0);
  }

  /** The run, made where it is new. */
  run(id) {
    return inside(this.runs, id, () => new Run(id));
  }

  /** What the hub says of a run. */
  setInfo(info) {
    this.run(info.run).info = info;
  }

  /** Keeps a frame or a table. */
  add(message) {
    if (message.what === "frame") this.addFrame(message);
    else if (message.what === "table") this.addTable(message);
    if (this.bytes > this.budget) this.shrink();
  }

  addFrame(message) {
    const { header } = message;
    const run = this.run(header.run);
    const site = siteText(header.site);
    const key = frameKey(header.phase, header.update, site, header.reducer);
    const frames = inside(run.steps, header.step);
    run.bytes += message.bytes - (frames.get(key)?.bytes ?? 0);
    frames.set(key, message);
    run.know(header.step);
    this.note(run, header, site);
  }

  /** Keeps in mind what has been watched, and what is not finite or lacks parts. */
  note(run, header, site) {
    const way = wayText(header.site);
    const id = `${header.phase}|${header.site.kind}|${way}|${header.reducer}`;
    const { phase, reducer } = header;
    const none = () => ({ phase, kind: header.site.kind, way, reducer, places: new Map(), updates: new Set() });
    const seen = inside(run.watched, id, none);
    seen.places.set(site, header.site);
    seen.updates.add(header.update);
    if (header.num_not_finite > 0) {
      const [found, at] = [inside(run.notFinite, header.step), `${phase}|${site}`];
      // Several reducers look at the same values.
      const number = Math.max(found.get(at)?.number ?? 0, header.num_not_finite);
      found.set(at, { phase, site: header.site, number });
    }
    if (header.dropped > 0 || header.missing.length > 0) {
      inside(run.gaps, header.step).set(phase, { dropped: header.dropped, missing: header.missing });
    }
  }

  addTable(message) {
    const { header, values, bytes } = message;
    const { name, step, keys, texts } = header;
    const run = this.run(header.run);
    const [rows, positions, ids] = [0, 1, 2].map((i) => values.subarray(i * message.shape[1], (i + 1) * message.shape[1]));
    run.bytes += bytes - (run.tables.get(name)?.bytes ?? 0);
    run.tables.set(name, { name, step, keys, texts, rows, positions, ids, bytes, byRow: undefined });
  }

  addMetrics(id, step, metrics) {
    const run = this.run(id);
    for (const [name, value] of Object.entries(metrics)) inside(run.metrics, name).set(step, Number(value ?? NaN));
    run.know(step);
  }

  /** Lets go of what is oldest until there is room. */
  shrink() {
    const target = this.budget * 0.9;
    while (this.bytes > target) {
      const run = [...this.runs.values()].reduce((most, next) => (next.bytes > most.bytes ? next : most));
      const steps = [...run.steps.keys()].filter((step) => !this.pinned(run.id, step)).sort((a, b) => a - b);
      const heavy = steps.find((step) => !run.thin.has(step));
      if (heavy !== undefined) this.forget(run, heavy, (frame) => frame.values.byteLength > HEAVY_BYTES);
      else if (steps.length > 0) this.forget(run, steps[0], () => true);
      else return;
    }
  }

  forget(run, step, isGone) {
    const frames = run.steps.get(step);
    for (const [key, frame] of frames) {
      if (!isGone(frame)) continue;
      run.bytes -= frame.bytes;
      frames.delete(key);
    }
    for (const [name, table] of run.tables) {
      if (table.step !== step) continue;
      run.bytes -= table.bytes;
      run.tables.delete(name);
    }
    run.thin.add(step);
    if (frames.size === 0) run.steps.delete(step);
  }

  /**
   * A frame, or undefined.
   * @param {string} id of the run
   * @param {{phase: string, update: number, reducer: string}} of
   */
  frame(id, step, of, site) {
    return this.runs.get(id)?.steps.get(step)?.get(frameKey(of.phase, of.update ?? 0, site, of.reducer));
  }

  /** A table, or undefined. */
  table(id, name) {
    return this.runs.get(id)?.tables.get(name);
  }

  /** Whether the hub has to be asked for a step: it is not in memory as a whole. */
  lacks(id, step) {
    const run = this.runs.get(id);
    return run === undefined || !run.steps.has(step) || run.thin.has(step);
  }
}

/**
 * Where the tokens of a row are in a table, by position.
 * @param {string} key of the row
 */
export function tokensOf(table, key) {
  if (table.byRow === undefined) {
    table.byRow = new Map(table.keys.map((name) => [name, []]));
    table.rows.forEach((row, place) => table.byRow.get(table.keys[row]).push(place));
    for (const places of table.byRow.values()) places.sort((a, b) => table.positions[a] - table.positions[b]);
  }
  return table.byRow.get(key) ?? [];
}
