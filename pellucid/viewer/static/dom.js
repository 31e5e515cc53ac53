// Small helpers for the whole page. Text always enters as text nodes: report data is never parsed as HTML.
const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

// The token as a reader can see it: newlines, tabs, control characters and the spaces at a line's ends get a glyph.
const glyph = (c) => ({ "\n": "⏎", "\t": "⇥" })[c] ?? String.fromCharCode(0x2400 + c.charCodeAt(0));
const visible = (text) =>
  text === "" ? "∅" : text.replace(/(^|\n) +| +$/g, (run) => run.replaceAll(" ", "·")).replace(/[\u0000-\u001f]/g, glyph);
const shorten = (text, limit) => ([...text].length > limit ? [...text].slice(0, limit - 1).join("") + "…" : text);

const whole = (value) => value.toLocaleString("en-US");
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (Number.isInteger(value)) return whole(value);
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(size < 1 ? 3 : 4)));
  return text.replace("-", "−");
}
const signed = (value) => (value > 0 ? "+" : "") + number(value);
const sign = (value) => (value < 0 ? "neg" : "pos");

// One tooltip for the page. `lines` are strings or [label, value] pairs.
const tip = (() => {
  const box = h("div", { class: "tip", role: "tooltip", hidden: true });
  document.body.append(box);
  return {
    show(x, y, title, lines = []) {
      const pairs = lines.map((line) =>
        Array.isArray(line) ? h("div", { class: "pair" }, h("span", {}, line[0]), h("b", {}, line[1])) : h("p", {}, line));
      box.replaceChildren(...(title ? [h("strong", {}, title)] : []), ...pairs);
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
      box.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18}px`;
    },
    beside(element, title, lines) {
      const { left, width, bottom } = element.getBoundingClientRect();
      tip.show(left + width / 2, bottom - 8, title, lines);
    },
    hide() { box.hidden = true; },
  };
})();

// Explains an element on hover and on keyboard focus alike.
function explain(element, title, lines) {
  element.addEventListener("pointermove", (event) => tip.show(event.clientX, event.clientY, title, lines));
  element.addEventListener("focus", () => tip.beside(element, title, lines));
  for (const leave of ["pointerleave", "blur"]) element.addEventListener(leave, tip.hide);
  return element;
}
