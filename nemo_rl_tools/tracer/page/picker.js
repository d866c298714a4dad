/** Choices of phase, site, direction and reducer out of what has been watched. */

import { choice, h, setOptions } from "./dom.js";

const KINDS = ["phase", "kind", "way", "reducer", "update"];
const LABELS = { phase: "Phase", kind: "Site", way: "Direction", reducer: "Reducer", update: "Update" };

/** Linked selects: what is chosen first narrows what follows. `chosen` is one of the watched pictures, or undefined. */
export class Picker {
  /**
   * @param {function(Object): boolean} takes which of the watched pictures a view can show
   * @param {string[]} [first] kinds of sites that are chosen where nobody has chosen
   */
  constructor(takes, changed, first = []) {
    this.takes = takes;
    this.first = first;
    this.wanted = {};
    this.fields = {};
    for (const kind of KINDS) {
      this.fields[kind] = choice(LABELS[kind], (value) => {
        this.wanted[kind] = value;
        changed();
      });
    }
    this.root = h("div", { className: "fields" }, ...KINDS.map((kind) => this.fields[kind].root));
  }

  /** Chooses, as far as it is there; the rest stays. */
  choose(wanted) {
    Object.assign(this.wanted, wanted);
  }

  /**
   * Reads what has been watched of a run.
   * @param {Object} catalogue site kind -> place in the order of a pass
   */
  update(watched, catalogue) {
    let left = [...watched.values()].filter(this.takes);
    const all = left;
    for (const kind of ["phase", "kind", "way", "reducer"]) {
      let options = [...new Set(left.map((seen) => seen[kind]))];
      if (kind === "kind") options.sort((a, b) => (catalogue[a] ?? 99) - (catalogue[b] ?? 99));
      if (kind === "phase") options = [...new Set(all.map((seen) => seen.phase))].sort(byPhase);
      const value = this.valueOf(kind, options);
      left = left.filter((seen) => seen[kind] === value);
      setOptions(this.fields[kind].select, options.map((name) => [name, textOf(kind, name)]), value ?? "");
      this.fields[kind].root.hidden = kind === "way" && options.length < 2;
    }
    this.chosen = left[0];
    const updates = [...(this.chosen?.updates ?? [])].sort((a, b) => a - b).map(String);
    const update = this.valueOf("update", updates);
    setOptions(this.fields.update.select, updates.map((number) => [number, number]), update ?? "");
    this.fields.update.root.hidden = updates.length < 2;
    if (this.chosen !== undefined) this.chosen = { ...this.chosen, update: Number(update) };
  }

  valueOf(kind, options) {
    const wanted = this.wanted[kind];
    if (wanted !== undefined && options.includes(wanted)) return wanted;
    const first = kind === "kind" ? this.first.find((name) => options.includes(name)) : undefined;
    return first ?? options[0];
  }
}

const ORDER = ["train", "prev_logprobs", "reference_logprobs", "forward", "generation"];
const byPhase = (a, b) => ORDER.indexOf(a) - ORDER.indexOf(b) || (a < b ? -1 : 1);

function textOf(kind, name) {
  if (kind !== "way") return name;
  return name.trim() || "forward";
}

/**
 * Sites of a chosen picture by layer, ascending; those outside the layers first, by name.
 * @returns {Array<{text: string, label: string, layer: ?number}>}
 */
export function placesOf(chosen) {
  const places = [...chosen.places].map(([text, site]) => ({ text, layer: site.layer, label: labelOf(site) }));
  return places.sort((a, b) => (a.layer ?? -1) - (b.layer ?? -1) || (a.text < b.text ? -1 : 1));
}

const labelOf = ({ layer, name, kind }) => ((layer ?? null) !== null ? `layer ${layer}` : name ?? kind);
