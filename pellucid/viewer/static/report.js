// The page: headline, table, model panels, the node panel, curves, how to reproduce.
const report = JSON.parse(document.getElementById("report-data").textContent);
const page = document.getElementById("page");
const views = new Map(); // model name -> { model, panel, tab, drawing }; drawings are made when first shown

const section = (title, ...children) => h("section", {}, h("h2", {}, title), ...children);
const details = (pairs) => h("dl", { class: "numbers" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

function header() {
  const [lead, ...rest] = report.summary;
  return h("header", {}, h("p", { class: "eyebrow" }, "Pellucid report"), h("h1", {}, report.title),
    lead ? h("p", { class: "lead" }, lead) : null, rest.map((sentence) => h("p", { class: "summary" }, sentence)));
}

function table() {
  const head = h("tr", {}, h("th", { scope: "col" }, "Measure"), report.columns.map((name) => h("th", { scope: "col" }, name)));
  const rows = report.rows.map((row) => {
    const name = h("span", row.help ? { class: "help", tabindex: 0, "aria-description": row.help } : {}, row.label);
    if (row.help) explain(name, null, [row.help]);
    return h("tr", {}, h("th", { scope: "row" }, name), row.values.map((value, i) =>
      h("td", { class: i === row.best ? "best" : null }, value, i === row.best ? h("span", { class: "sr" }, " (best)") : null)));
  });
  return h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Results" }, h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
}

// ---- models
const legend = () => h("ul", { class: "legend" },
  h("li", {}, h("i", { class: "key pos" }), "positive weight"), h("li", {}, h("i", { class: "key neg" }), "negative weight"),
  h("li", {}, h("i", { class: "key residual" }), "same residual channel"),
  h("li", {}, h("i", { class: "key ramp" }), "fuller node: the loss rises more without it"));

function toolbar(drawing, circuit) {
  const sizes = drawing.plan.lines.map((line) => Math.abs(line.edge.weight)).sort((a, b) => a - b);
  const output = h("output", {}), total = sizes.length;
  // The slider walks through ranks, not values: few weights are large, and a linear scale would be mostly empty.
  const slide = (event) => {
    const least = sizes[Math.min(total - 1, Number(event?.target.value ?? 0))] ?? 0;
    output.textContent = `${number(least)} · ${whole(drawing.filter(least))} of ${whole(total)} shown`;
  };
  const slider = h("input", { type: "range", min: 0, max: Math.max(0, total - 1), value: 0, oninput: slide, "aria-label": "edges with absolute weight at least" });
  slide();
  const button = (text, label, action) => h("button", { type: "button", "aria-label": label, title: label, onclick: action }, text);
  return h("div", { class: "toolbar" }, h("label", {}, h("span", {}, "edges with |weight| ≥ "), slider, output),
    h("div", { class: "zoom", title: "Click the drawing, then scroll to zoom; drag to move" },
      button("−", "zoom out", () => drawing.zoom(1 / 1.4)), button("+", "zoom in", () => drawing.zoom(1.4)), button("Fit", "show all", drawing.fit)));
}

function caption(circuit, { lines, tokens }) {
  const drawn = lines.filter((line) => line.edge.kind === "weight").length;
  const parts = [`${plural(circuit.nodes.length, "node")}, ${plural(circuit.total_edges, "edge")} and ${plural(circuit.token_edges, "token edge")}.`];
  if (drawn < circuit.total_edges) parts.push(`The strongest ${whole(drawn)} of ${whole(circuit.total_edges)} edges are drawn; point at a node to see the others it has.`);
  for (const [side, name] of [["in", "input"], ["out", "output"]])
    if (tokens[side].texts.length < tokens[side].total) parts.push(`Of ${whole(tokens[side].total)} ${name} tokens, the ${tokens[side].texts.length} with the largest weights are shown.`);
  return parts.join(" ");
}

function modelPanel(model, index) {
  return h("article", { class: "panel", id: `panel-${index}`, role: "tabpanel", "aria-labelledby": `tab-${index}` },
    h("h3", {}, model.name), h("p", { class: "about" }, model.description), model.note ? h("p", { class: "note" }, model.note) : null,
    details(Object.entries(model.metrics).map(([name, value]) => [name, number(value)])),
    h("div", { class: "figure" }));
}

function draw(view) {
  const { model, panel } = view, figure = panel.querySelector(".figure"), { circuit } = model;
  if (figure.firstChild) return;
  if (!circuit) return figure.append(h("p", { class: "empty" }, model.note ? "There is no circuit to draw." : "No circuit was pruned from this model."));
  view.drawing = drawCircuit(circuit, model.name, (node) => openNode(model.name, node.id));
  figure.append(toolbar(view.drawing, circuit), h("div", { class: "stage" }, view.drawing.svg), legend(), h("p", { class: "caption" }, caption(circuit, view.drawing.plan)));
}

function show(name, together = false) {
  const list = page.querySelector(".panels");
  list.classList.toggle("together", together);
  page.querySelector(".compare")?.setAttribute("aria-pressed", together);
  for (const view of views.values()) {
    const on = view.model.name === name && !together;
    view.panel.classList.toggle("open", on || together);
    view.tab.setAttribute("aria-selected", on);
    view.tab.tabIndex = view.model.name === name ? 0 : -1;
    if (on || together) draw(view);
  }
}

function models() {
  for (const [i, model] of report.models.entries()) {
    const size = model.circuit ? plural(model.circuit.nodes.length, "node") : "no circuit";
    const tab = h("button", { type: "button", role: "tab", id: `tab-${i}`, "aria-controls": `panel-${i}`, onclick: () => show(model.name) }, model.name, h("small", {}, size));
    views.set(model.name, { model, tab, panel: modelPanel(model, i) });
  }
  const all = [...views.values()], tabs = all.map((view) => view.tab);
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) tabs.at((tabs.indexOf(document.activeElement) + step) % tabs.length).focus(), document.activeElement.click();
  };
  const both = h("button", { type: "button", class: "compare", "aria-pressed": "false", onclick: (event) => show(all[0].model.name, event.target.getAttribute("aria-pressed") !== "true") }, "Side by side");
  return section("Circuits", h("div", { class: "tabs" }, h("div", { role: "tablist", "aria-label": "Models", onkeydown: move }, tabs), all.length > 1 ? both : null),
    h("div", { class: "panels" }, all.map((view) => view.panel)));
}

// ---- the node panel
const side = h("aside", { class: "side", tabindex: -1, "aria-label": "Node", hidden: true });
let shown = null;

function heat(snippet, scale) {
  const spans = snippet.tokens.flatMap((token, i) => {
    const value = snippet.activations[i];
    const span = explain(h("span", { class: `tok ${sign(value)}${i === snippet.focus ? " at" : ""}` }, visible(token)), visible(token), [["activation", signed(value)]]);
    span.style.setProperty("--heat", Math.min(1, Math.abs(value) / scale).toFixed(3));
    return token.endsWith("\n") ? [span, h("br", {})] : [span];
  });
  return h("div", { class: "snippet" }, h("code", {}, spans), h("span", { class: `at-value ${sign(snippet.activations[snippet.focus])}` }, signed(snippet.activations[snippet.focus])));
}

function snippets(title, list, scale) {
  return list.length ? h("section", {}, h("h4", {}, title), list.map((snippet) => heat(snippet, scale))) : null;
}

function taskExamples(list, scale) {
  const groups = new Map();
  for (const snippet of list) {
    const label = snippet.label ?? (snippet.activations[snippet.focus] < 0 ? "negative activation" : "positive activation");
    groups.set(label, [...(groups.get(label) ?? []), snippet]);
  }
  return [...groups].map(([label, group]) => snippets(`Task examples: ${label}`, group, scale));
}

function edgeList(title, edges, other, name) {
  const LIMIT = 24, most = Math.abs(edges[0]?.weight ?? 1) || 1;
  const rows = edges.slice(0, LIMIT).map((edge) => {
    const end = edge[other], isToken = edge.kind === (other === "writer" ? "embed" : "unembed");
    const bar = h("i", { class: `bar ${sign(edge.weight)}` });
    bar.style.setProperty("--part", `${((100 * Math.abs(edge.weight)) / most).toFixed(1)}%`);
    const label = isToken ? h("span", { class: "chip" }, visible(end.slice("token:".length))) : h("button", { type: "button", onclick: () => openNode(name, end) }, end);
    return h("li", {}, label, h("span", { class: "track" }, bar), h("b", {}, signed(edge.weight)));
  });
  const more = edges.length > LIMIT ? h("p", { class: "more" }, `and ${whole(edges.length - LIMIT)} weaker`) : null;
  return edges.length ? h("section", {}, h("h4", {}, title), h("ul", { class: "edge-list" }, rows), more) : null;
}

// Reads and writes of the residual stream carry no weight of their own: they share a channel.
function residual(title, links, here, other, name) {
  const ends = links.filter((link) => link[here].id === shown.id).map((link) => link[other].id);
  const rows = ends.map((end) => h("li", {}, h("button", { type: "button", onclick: () => openNode(name, end) }, end)));
  return rows.length ? h("section", {}, h("h4", {}, title), h("ul", { class: "edge-list inline" }, rows)) : null;
}

function openNode(name, id) {
  const view = views.get(name), node = view?.model.circuit?.nodes.find((other) => other.id === id);
  if (!node) return;
  if (!view.panel.classList.contains("open")) show(name);
  for (const other of views.values()) other.drawing?.select(other === view ? id : null);
  shown = { view, id };
  const scale = Math.max(1e-9, ...[...node.top, ...node.bottom, ...node.task].flatMap((snippet) => snippet.activations.map(Math.abs)));
  const edges = strongest(view.model.circuit.edges), { links } = view.drawing.plan;
  const texts = [...taskExamples(node.task, scale), snippets("Highest activations", node.top, scale), snippets("Lowest activations", node.bottom, scale)].filter(Boolean);
  side.replaceChildren(
    h("div", { class: "side-head" }, h("p", { class: "eyebrow" }, `${name} · layer ${node.layer}`), h("h3", {}, nodeName(node)),
      h("button", { type: "button", class: "close", "aria-label": "close", onclick: closeNode }, "×")),
    details(nodeLines(node)),
    ...[edgeList("Reads from", edges.filter((edge) => edge.reader === id), "writer", name),
      edgeList("Writes to", edges.filter((edge) => edge.writer === id), "reader", name),
      residual(`Residual channel ${node.channel} written by`, links, "to", "from", name), residual(`Residual channel ${node.channel} read by`, links, "from", "to", name)].filter(Boolean),
    ...(texts.length ? texts : [h("p", { class: "more" }, "No texts were recorded for this node.")]));
  side.hidden = false;
  side.scrollTop = 0;
  document.body.classList.add("with-side");
  side.focus({ preventScroll: true });
  view.drawing.reveal(id, "nearest");
  history.replaceState(null, "", `#node=${encodeURIComponent(name)}/${id}`);
}

function closeNode() {
  if (!shown) return;
  const { view, id } = shown;
  shown = null;
  side.hidden = true;
  document.body.classList.remove("with-side");
  view.drawing.select(null);
  view.drawing.focus(id);
  tip.hide();
  history.replaceState(null, "", location.pathname + location.search);
}

// A deep link: #node=MODEL/NODE or #model=MODEL.
function followHash() {
  const [, what, rest] = /^#(node|model)=(.+)$/.exec(location.hash) ?? [];
  if (!what) return;
  let text;
  try { text = decodeURIComponent(rest); } catch { return; }
  const cut = text.lastIndexOf("/");
  if (what === "node") {
    openNode(text.slice(0, cut), text.slice(cut + 1));
    shown?.view.drawing.reveal(shown.id, "center");
  } else if (views.has(text)) {
    show(text);
    page.querySelector(".tabs").scrollIntoView();
  }
}

// ---- training curves: models' curves of one name share a chart
function ticksOf(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  return Array.from({ length: Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1 }, (_, i) => (Math.ceil(low / step - 1e-9) + i) * step);
}

function chart(name, lines) {
  const W = 560, H = 260, box = { left: 46, right: W - 16, top: 14, bottom: H - 30 };
  const range = (key) => lines.flatMap(({ curve }) => curve[key]).reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const [x0, x1] = range("x"), [low, high] = range("y"), pad = (high - low || 1) * 0.06, y0 = low - pad, y1 = high + pad;
  const X = (v) => box.left + ((v - x0) / (x1 - x0 || 1)) * (box.right - box.left), Y = (v) => box.bottom - ((v - y0) / (y1 - y0)) * (box.bottom - box.top);
  const short = (v) => (Math.abs(v) >= 1000 ? `${number(v / 1000)}k` : number(v));
  const axes = [
    ...ticksOf(y0, y1, 4).flatMap((v) => [s("line", { class: "rule", x1: box.left, x2: box.right, y1: Y(v), y2: Y(v) }), s("text", { class: "y", x: box.left - 8, y: Y(v) + 4 }, short(v))]),
    ...ticksOf(x0, x1, 5).map((v) => s("text", { class: "x", x: X(v), y: H - 10 }, short(v)))];
  const paths = lines.map(({ curve, index }) => s("path", { class: `line series-${index % 4}`, d: curve.x.map((v, i) => `${i ? "L" : "M"}${X(v).toFixed(1)} ${Y(curve.y[i]).toFixed(1)}`).join("") }));
  const cursor = s("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${name}: ${lines.map(({ model, curve }) => `${model} ends at ${number(curve.y.at(-1))}`).join(", ")}` }, axes, paths, cursor);
  svg.addEventListener("pointermove", (event) => {
    const at = x0 + ((new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x - box.left) / (box.right - box.left)) * (x1 - x0);
    const values = lines.map(({ model, curve }) => {
      const i = curve.x.reduce((best, v, j) => (Math.abs(v - at) < Math.abs(curve.x[best] - at) ? j : best), 0);
      return [model, number(curve.y[i]), curve.x[i]];
    });
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, X(values[0][2]));
    cursor.setAttribute("visibility", "visible");
    tip.show(event.clientX, event.clientY, number(values[0][2]), values.map(([model, value]) => [model, value]));
  });
  svg.addEventListener("pointerleave", () => (cursor.setAttribute("visibility", "hidden"), tip.hide()));
  const keys = lines.map(({ model, curve, index }) => h("li", {}, h("i", { class: `key series-${index % 4}` }), model, h("b", {}, number(curve.y.at(-1)))));
  return h("figure", {}, h("figcaption", {}, name, h("ul", { class: "legend" }, keys)), svg);
}

function curves() {
  const charts = new Map();
  for (const [index, model] of report.models.entries())
    for (const curve of model.curves) if (curve.x.length) charts.set(curve.name, [...(charts.get(curve.name) ?? []), { model: model.name, curve, index }]);
  return charts.size ? section("Training", h("div", { class: "charts" }, [...charts].map(([name, lines]) => chart(name, lines)))) : null;
}

// ---- reproduce, provenance
function copyButton(text, code) {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch { // no clipboard without a secure context: leave the command selected for the reader's own copy
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1600);
  };
  const button = h("button", { type: "button", onclick: copy }, "Copy");
  return button;
}

function reproduce() {
  const rows = report.reproduce.map((command) => {
    const code = h("code", {}, command);
    return h("div", { class: "command" }, h("pre", {}, code), copyButton(command, code));
  });
  return rows.length ? section("How to reproduce", rows) : null;
}

function provenance() {
  const pairs = [...Object.entries(report.provenance), ["created", report.created]];
  return h("footer", {}, h("h2", {}, "Provenance"), h("dl", {}, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}

page.append(...[header(), section("Results", h("p", { class: "task" }, h("strong", {}, report.task), " ", report.task_description), report.rows.length ? table() : null),
  report.models.length ? models() : null, curves(), reproduce(), provenance()].filter(Boolean));
document.body.append(side);
if (report.models.length) show(report.models[0].name);
followHash();
addEventListener("hashchange", followHash);
addEventListener("beforeprint", () => views.forEach(draw)); // paper has no tabs: every circuit is printed
addEventListener("keydown", (event) => event.key === "Escape" && closeNode());
