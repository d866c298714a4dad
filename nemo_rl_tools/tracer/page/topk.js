/** View: the largest values of each token: for logits, the most likely next tokens. */

import { h, note, pane, say, setOptions, table } from "./dom.js";
import { exact, short, tokenText } from "./format.js";
import { parseReducer } from "./reducer.js";
import { tokensOf } from "./store.js";
import { View } from "./view.js";

const MOST_ROWS = 400;

/** A table per run. */
export class TopKView extends View {
  constructor(app) {
    super(app, {
      id: "next",
      title: "Next tokens",
      takes: (seen) => parseReducer(seen.reducer).name === "topk",
      first: ["logits"],
      missing: ["No watch of the most likely next tokens yet.", "logits | topk(5) | train"],
    });
    this.place = this.choice("Layer");
    this.row = this.choice("Sample", (key) => this.set({ key }));
    this.note = note("");
    this.body = h("div", { className: "pair" });
    this.build({ fields: [this.place.root, this.row.root] }, this.note, this.body);
  }

  draw(chosen, places) {
    this.site = this.choosePlace(this.place, places, places[0]);
    this.place.root.hidden = places.length < 2;
    this.isLogits = chosen.kind === "logits";
    const sides = this.app.sides().map((side) => this.collect(side, chosen));
    const keys = [...new Set(sides.flatMap((side) => side?.keys ?? []))];
    const key = keys.includes(this.key) ? this.key : keys[0];
    setOptions(this.row.select, keys.map((name) => [name, name]), key ?? "");
    this.tables = sides.map((side) => (side && key !== undefined ? this.linesOf(side, key) : null));
    say(this.note, this.isLogits
      ? "Logits of each position, largest first; underlined is the token that comes next in the sample."
      : "Largest values of each token, with the feature they are at.");
    this.body.replaceChildren(...this.tables.map((lines, side) => pane(this.app.sideText(side), ...this.partsOf(lines))));
  }

  collect(side, chosen) {
    const frame = this.app.store.frame(side.run, side.step, chosen, this.site);
    const tokens = frame && this.app.store.table(side.run, frame.header.table);
    if (!frame || !tokens) return null;
    return { frame, tokens, keys: tokens.keys.filter((key) => tokensOf(tokens, key).length > 0) };
  }

  linesOf({ frame, tokens }, key) {
    const k = frame.shape[1];
    const places = tokensOf(tokens, key);
    const idAt = new Map(places.map((place) => [tokens.positions[place], tokens.ids[place]]));
    return places.map((place) => {
      const numbers = frame.values.subarray(place * k * 2, (place + 1) * k * 2);
      const pairs = Array.from({ length: k }, (_, i) => ({ value: numbers[i * 2], feature: numbers[i * 2 + 1] }));
      const [position, id] = [tokens.positions[place], tokens.ids[place]];
      const best = pairs.filter(({ feature }) => feature >= 0).map((pair) => ({ ...pair, text: this.textOf(tokens, pair) }));
      return { position, id, text: tokenText(tokens.texts[id], id), next: idAt.get(position + 1), best };
    });
  }

  textOf({ texts }, { feature }) {
    return this.isLogits ? tokenText(texts[feature], feature) : "";
  }

  partsOf(lines) {
    if (lines === null) return [note("Nothing at this step.")];
    const k = Math.max(0, ...lines.map((line) => line.best.length));
    const names = ["at", "token", ...Array.from({ length: k }, (_, i) => String(i + 1))];
    const rows = lines.slice(0, MOST_ROWS).map((line) => this.rowOf(line));
    const isCut = lines.length > MOST_ROWS;
    const cut = isCut ? [note(`The first ${MOST_ROWS} of ${lines.length} tokens; the CSV has all.`)] : [];
    return [table(names, rows, { className: "tokens" }), ...cut];
  }

  rowOf(line) {
    const cells = line.best.map(({ value, feature, text }) => {
      const className = this.isLogits && line.next === feature ? "hit" : "";
      const name = h("span", { className, textContent: this.isLogits ? text : `[${feature}]` });
      const number = h("small", { textContent: short(value), title: exact(value) });
      return h("td", { className: Number.isFinite(value) ? "" : "not-finite" }, name, number);
    });
    const position = h("td", { className: "number", textContent: String(line.position) });
    return h("tr", {}, position, h("th", { scope: "row", className: "token", textContent: line.text }), ...cells);
  }

  /** All candidates. */
  numbers() {
    const start = ["run", "step", "phase", "site", "position", "token_id", "token"];
    const rows = (this.tables ?? []).flatMap((lines, side) => (lines ?? []).flatMap((line) => {
      const { run, step } = this.app.sides()[side];
      const { position, id, text } = line;
      const of = [run, step, this.picker.chosen.phase, this.site, position, id, text];
      return line.best.map((found, i) => [...of, i + 1, exact(found.feature), found.text, exact(found.value)]);
    }));
    return { columns: [...start, "rank", "feature", "feature_text", "value"], rows };
  }
}
