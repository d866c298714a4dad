/** `window.tracer`: read-only, for tests and scripts. */

import { csvOf } from "./exporter.js";
import { connectionText, notices } from "./status.js";

/** Numbers that JSON cannot hold become texts: `NaN`, `Infinity`, and whole numbers of 64 bits. */
const plain = (value) => (typeof value === "bigint" || !Number.isFinite(value) ? String(value) : value);

/** Puts the object in place: what is known as properties, what can be asked and done as functions. */
export function expose(app) {
  const known = {
    /** `idle`, `connecting`, `connected`, `lost` or `refused`. */
    state: () => app.live.state,
    role: () => app.live.role,
    step: () => app.step,
    isFollowing: () => app.time.follow,
    view: () => app.view.id,
    /** What the status line and the notices say. */
    said: () => ({ connection: connectionText(app).text, notices: notices(app).map(({ text }) => text) }),
    runs: () => [...app.store.runs.values()].map((run) => ({ ...run.info, steps: [...run.stepList] })),
    /** Whether all steps that were before have come. */
    isComplete: () => app.live.state === "connected" && app.history.isComplete(app.shownRuns()),
    /** In memory, of frames and tables. */
    bytes: () => app.store.bytes,
    plan: () => structuredClone(app.plan),
  };
  const tracer = {
    /** Numbers of a picture with their shape, or null: `value({run, step, phase, update, site, reducer})`. */
    value({ run = app.run, step = app.step, phase = "train", update = 0, site, reducer }) {
      const frame = app.store.frame(run, step, { phase, update, reducer }, site);
      if (frame === undefined) return null;
      return { shape: [...frame.shape], values: Array.from(frame.values, plain), header: structuredClone(frame.header) };
    },
    /** Numbers that are shown, as the CSV has them. */
    csv: () => csvOf(app.numbers()),
    /** Shows another view: `tokens`, `steps`, `experts`, `histogram`, `next`, `metrics` or `health`. */
    show: (id) => app.show(id),
    /** Stays at a step. */
    go: (step) => app.time.go(step),
    /** Middle of a cell of the heat map in the window, for pointers of tests. */
    cellPlace: (row, column, side = 0) => app.views[0].panes[side].placeOf(row, column),
  };
  for (const [name, get] of Object.entries(known)) Object.defineProperty(tracer, name, { get, enumerable: true });
  Object.defineProperty(window, "tracer", { value: Object.freeze(tracer) });
}
