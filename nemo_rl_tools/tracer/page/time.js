/** Time: which step is shown; follows the newest, or stays. */

import { button, h, say } from "./dom.js";
import { whole } from "./format.js";

const LOOK_BACK = 64; // steps that may lack what is shown

/** The bar at the foot of the page. */
export class TimeBar {
  constructor(app) {
    this.app = app;
    this.follow = true;
    this.step = undefined; // where it does not follow
    const go = (name, text, title, onclick) => button(text, onclick, { className: `icon ${name}`, title, "aria-label": title });
    this.live = button("", () => this.toggle(), { className: "live" });
    const oninput = () => this.slide();
    this.slider = h("input", { type: "range", min: "0", max: "0", value: "0", "aria-label": "Step", oninput });
    this.label = h("output", { className: "step" });
    this.range = h("span", { className: "range" });
    const buttons = h(
      "div",
      { className: "buttons" },
      go("first", "|◀", "First step (Home)", () => this.end(-1)),
      go("back", "◀", "Step back (←)", () => this.move(-1)),
      go("forward", "▶", "Step forward (→)", () => this.move(1)),
      go("last", "▶|", "Newest step (End)", () => this.end(1)),
    );
    const where = h("div", { className: "where" }, this.label, this.range);
    this.root = h("footer", { className: "time", "aria-label": "Time" }, this.live, buttons, this.slider, where);
  }

  get steps() {
    return this.app.run ? this.app.store.run(this.app.run).stepList : [];
  }

  /** The step that is shown, or undefined. */
  shown(view) {
    const steps = this.steps;
    if (!this.follow) return this.step;
    for (let i = steps.length - 1; i >= Math.max(0, steps.length - LOOK_BACK); i--) {
      if (view.isReady(this.app.run, steps[i])) return steps[i];
    }
    return steps.at(-1);
  }

  /** Stays at a step. */
  go(step) {
    if (step === undefined || Number.isNaN(step)) return;
    [this.follow, this.step] = [false, step];
    this.app.changed();
  }

  /** Steps back or forward among the known ones. */
  move(by) {
    const steps = this.steps;
    if (steps.length === 0) return;
    const now = this.app.step ?? steps.at(-1);
    const next = by < 0 ? steps.findLast((step) => step < now) : steps.find((step) => step > now);
    this.go(next ?? now);
  }

  /** To the first step, or to the newest and on with it. */
  end(side) {
    if (side < 0) this.go(this.steps[0]);
    else this.toggle(true);
  }

  toggle(follow = !this.follow) {
    this.follow = follow;
    this.step = this.app.step;
    this.app.changed();
  }

  slide() {
    this.go(this.steps[Number(this.slider.value)]);
  }

  render() {
    const steps = this.steps;
    const { step } = this.app;
    this.slider.max = String(Math.max(0, steps.length - 1));
    const at = steps.findLastIndex((known) => known <= step);
    if (document.activeElement !== this.slider || this.follow) this.slider.value = String(Math.max(0, at));
    this.slider.setAttribute("aria-valuetext", step === undefined ? "no step" : `step ${step}`);
    this.slider.disabled = steps.length < 2;
    say(this.label, step === undefined ? "–" : whole(step));
    say(this.range, steps.length === 0 ? "no steps yet" : `of ${whole(steps[0])} … ${whole(steps.at(-1))}`);
    this.root.classList.toggle("filling", this.app.history.isFilling);
    this.range.title = this.app.history.isFilling ? "Loading older steps" : "Steps that are known";
    const isOn = this.app.runInfo().state === "running";
    say(this.live, this.follow ? (isOn ? "● Live" : "● Newest") : "Paused");
    this.live.classList.toggle("on", this.follow);
    this.live.setAttribute("aria-pressed", String(this.follow));
    this.live.title = this.follow ? "Stay at this step (space)" : "Follow the newest step (space)";
  }
}
