/** Steps that were before this page came: asked of the hub from the newest to the oldest, while there is room. */

const CHUNK = 8; // steps at once
const MOST_CHUNK = 4096;
const ROOM = 0.85; // of the budget; the rest is for what comes live

/** What has been asked for, and what is still to come. */
export class History {
  constructor(app) {
    this.app = app;
    this.spans = []; // {run, first, last}
    this.started = new Set(); // runs
    this.asked = new Set(); // `run|step` on their way, or that the hub has no more
    this.isBusy = false;
  }

  /**
   * After each welcome: what came while nobody listened; then what was still to come.
   * @param {Array<{run: string, step: ?number}>} runs as the hub has them
   */
  connected(runs) {
    this.asked.clear();
    for (const { run, step } of runs) {
      const newest = this.app.store.run(run).stepList.at(-1);
      if (this.started.has(run) && step >= newest) this.spans.unshift({ run, first: newest, last: step });
    }
    this.fill();
  }

  /** Asks for a run's steps, once. */
  start(id) {
    const newest = this.app.store.run(id).info.step;
    if (this.started.has(id) || newest === null || newest === undefined) return;
    this.started.add(id);
    this.spans.push({ run: id, first: 0, last: newest });
    this.fill();
  }

  async fill() {
    if (this.isBusy) return;
    this.isBusy = true;
    let chunk = CHUNK;
    while (this.spans.length > 0 && this.app.store.bytes < this.app.store.budget * ROOM) {
      const span = this.spans[0];
      const first = Math.max(span.first, span.last - chunk + 1);
      const known = this.app.store.run(span.run).known.size;
      if (!(await this.app.live.history(span.run, first, span.last))) break;
      // Where nothing is, larger pieces: a run may begin at a high step.
      chunk = this.app.store.run(span.run).known.size > known ? CHUNK : Math.min(chunk * 2, MOST_CHUNK);
      span.last = first - 1;
      if (span.last < span.first) this.spans = this.spans.filter((other) => other !== span);
      this.app.changed();
    }
    this.isBusy = false;
  }

  /** Asks for one step that is shown and not in memory. */
  async need(id, step) {
    const key = `${id}|${step}`;
    if (this.asked.has(key) || !this.app.store.lacks(id, step)) return;
    this.asked.add(key);
    const { steps, thin } = this.app.store.run(id);
    // What goes while the answer comes, marks the step again: who has looked elsewhere meanwhile must ask once more.
    thin.delete(step);
    const hasCome = await this.app.live.history(id, step, step);
    if (!hasCome) thin.add(step);
    // What the hub has not is not asked for again; what goes once more, is.
    if (steps.has(step) || thin.has(step)) this.asked.delete(key);
    this.app.changed();
  }

  /** Whether all steps of these runs have been asked for, and have come. */
  isComplete(runs) {
    return !this.isBusy && this.spans.length === 0 && runs.length > 0 && runs.every((id) => this.started.has(id));
  }

  /** Whether older steps may still come. */
  get isFilling() {
    return this.isBusy;
  }
}
