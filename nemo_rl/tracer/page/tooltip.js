/** The box that follows the pointer with exact numbers. */

import { h } from "./dom.js";

const DISTANCE = 14;

/** One box for the page. */
export class Tooltip {
  constructor() {
    this.root = h("div", { className: "tooltip", role: "status", hidden: true });
    document.body.append(this.root);
  }

  /**
   * Shows pairs of a name and a text beside a place of the window.
   * @param {string} title
   * @param {Array<[string, string]>} pairs
   * @param {{clientX: number, clientY: number}} place
   */
  show(title, pairs, place) {
    const rows = pairs.flatMap(([name, text]) => [h("dt", { textContent: name }), h("dd", { textContent: text })]);
    this.root.replaceChildren(h("strong", { textContent: title }), h("dl", {}, ...rows));
    this.root.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.root;
    const right = place.clientX + DISTANCE + width > window.innerWidth;
    const below = place.clientY + DISTANCE + height > window.innerHeight;
    const left = right ? place.clientX - DISTANCE - width : place.clientX + DISTANCE;
    const top = below ? place.clientY - DISTANCE - height : place.clientY + DISTANCE;
    this.root.style.left = `${Math.max(4, left)}px`;
    this.root.style.top = `${Math.max(4, top)}px`;
  }

  hide() {
    this.root.hidden = true;
  }
}
