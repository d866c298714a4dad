/** Elements without markup: every text goes through `textContent`. */

const DISTANCE = 14; // of the tooltip from the pointer, in pixels

/** An element with properties, attributes (those with a dash, `role` and `for`), listeners (`on...`) and children. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** A button with a text, or with more inside. */
export const button = (textContent, onclick, more = {}) => h("button", { type: "button", textContent, onclick, ...more });

/** A label above an input or a select. */
export const field = (label, input) => h("label", { className: "field" }, h("span", {}, label), input);

/** A small text. */
export const note = (textContent, more = {}) => h("p", { className: "key", textContent, ...more });

/** A card with a heading, which is a text or an element. */
export function pane(title, ...children) {
  const head = typeof title === "string" ? h("h2", { className: "pane-title", textContent: title }) : title;
  return h("section", { className: "pane" }, head, ...children);
}

/** The heading of a pane, for texts that change. */
export const paneTitle = () => h("h2", { className: "pane-title" });

/** A table in an element that scrolls; columns from `firstNumber` on are numbers. Rows are lists of texts and nodes, or rows. */
export function table(names, rows, { firstNumber = names.length, className = "" } = {}) {
  const kind = (i) => (i >= firstNumber ? "number" : "");
  const head = names.map((textContent, i) => h("th", { scope: "col", className: kind(i), textContent }));
  const line = (row) => (Array.isArray(row) ? h("tr", {}, ...row.map((cell, i) => h("td", { className: kind(i) }, cell))) : row);
  const parts = [h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows.map(line))];
  return h("div", { className: "scroll-x" }, h("table", { className }, ...parts));
}

/** A dialog with a heading and a button that closes it. */
export function dialog(label, ...children) {
  const close = button("Close", () => root.close(), { className: "primary" });
  const root = h("dialog", { className: "help", "aria-label": label }, h("h2", { textContent: label }), ...children, close);
  return root;
}

/**
 * A label and a select below it.
 * @returns {{root: HTMLElement, select: HTMLSelectElement}}
 */
export function choice(label, onchange) {
  const select = h("select", { "aria-label": label, onchange: () => onchange(select.value) });
  return { root: field(label, select), select };
}

/**
 * Puts options into a select, without touching it where they are there already.
 * @param {Array<[string, string]>} options value and text
 */
export function setOptions(select, options, value) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options !== wanted) {
    select.replaceChildren(...options.map(([key, text]) => h("option", { value: key, textContent: text })));
    select.dataset.options = wanted;
  }
  if (select.value !== value) select.value = value;
  select.disabled = options.length < 2;
}

/** A switch with a text. */
export function toggle(text, isOn, onchange) {
  const input = h("input", { type: "checkbox", checked: isOn, onchange: () => onchange(input.checked) });
  return h("label", { className: "toggle" }, input, h("span", {}, text));
}

/** Sets children where they differ, so that pointers and focus stay. */
export function keepChildren(element, children) {
  const isSame = element.children.length === children.length && children.every((child, i) => element.children[i] === child);
  if (!isSame) element.replaceChildren(...children);
}

/** Sets a text where it differs, so that screen readers say it once. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** What is said where there is nothing to show. */
export function empty(title, text, ...more) {
  return h("div", { className: "empty" }, h("h2", { textContent: title }), h("p", { textContent: text }), ...more);
}

/** The box that follows the pointer with exact numbers; one for the page. */
export class Tooltip {
  constructor() {
    this.root = h("div", { className: "tooltip", role: "status", hidden: true });
    document.body.append(this.root);
  }

  /**
   * Shows pairs of a name and a text beside a place of the window.
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
