/** What all views have: controls, a picker of what has been watched, and what is said where nothing is there. */

import { choice, h, setOptions, toggle } from "./dom.js";
import { Picker, placesOf } from "./picker.js";

/**
 * Base of the views. One with a picker has `draw(chosen, places)`, called by `render` where something can be shown;
 * others have their own `render`. All have `numbers()` for the CSV.
 */
export class View {
  /**
   * @param {Object} about `id`, `title`, and of a view with a picker: `takes` which of the watched pictures it can show,
   *   `first` kinds of sites that are chosen at first, `missing` what is said without any, and the watch that helps
   */
  constructor(app, { id, title, takes, first, missing }) {
    Object.assign(this, { app, id, title, missing });
    this.picker = takes && new Picker(takes, () => app.changed(), first);
  }

  /** Puts the parts together: fields and switches above, then what is shown. */
  build({ fields = [], toggles = [] }, ...shown) {
    const rows = [h("div", { className: "fields" }, ...fields), h("div", { className: "toggles" }, ...toggles)];
    const tools = [...(this.picker ? [this.picker.root] : []), ...rows.filter((row) => row.childElementCount > 0)];
    [this.shown, this.nothing] = [shown, h("div")];
    const above = tools.length ? [h("div", { className: "tools" }, ...tools)] : [];
    this.root = h("div", { className: "view" }, ...above, this.nothing, ...shown);
  }

  set(values) {
    Object.assign(this, values);
    this.app.changed();
  }

  /** A switch of a property. */
  toggle(text, name, isOn = false) {
    this[name] = isOn;
    return toggle(text, isOn, (value) => this.set({ [name]: value }));
  }

  /** A select; what is chosen is read where it is needed. */
  choice(label, onchange = () => this.app.changed()) {
    return choice(label, onchange);
  }

  choose(wanted) {
    this.picker?.choose(wanted);
  }

  /** Whether a step has something to show, so that the newest step is not shown before its pictures have come. */
  isReady(run, step) {
    const chosen = this.picker?.chosen;
    return !chosen || placesOf(chosen).some((place) => this.app.store.frame(run, step, chosen, place.text));
  }

  prepare() {
    this.picker?.update(this.app.watchedOf(), this.app.order);
  }

  render() {
    const { chosen } = this.picker;
    for (const element of this.shown) element.hidden = chosen === undefined;
    this.nothing.replaceChildren(...(chosen === undefined ? [this.app.nothingYet(...this.missing)] : []));
    if (chosen !== undefined) this.draw(chosen, placesOf(chosen));
  }

  /** Offers places in a select, and gives the one that is chosen. */
  choosePlace({ select }, places, otherwise) {
    const wanted = places.some((place) => place.text === select.value) ? select.value : otherwise.text;
    setOptions(select, places.map((place) => [place.text, place.label]), wanted);
    return wanted;
  }

  /** Frames of a place at all steps of a run, as `[step, frame]`. */
  framesOf(run, chosen, place) {
    const { store } = this.app;
    return store.run(run).stepList.map((step) => [step, store.frame(run, step, chosen, place)])
      .filter(([, frame]) => frame !== undefined);
  }

  /** Name of a side where there are several. */
  sideName(side, otherwise = "") {
    return this.app.sides().length > 1 ? `run ${"AB"[side]}` : otherwise;
  }

  canvases() {
    return [];
  }
}
