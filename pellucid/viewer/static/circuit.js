// Draws one circuit as SVG and answers the pointer and the keyboard. Colours and line styles live in the style sheet.
const MAX_LINKS = 240; // residual links drawn at rest; past this they appear only around the node in hand
const MAX_HITS = 500; // below this many edges each gets a wide invisible twin that is easier to point at

const curve = ({ from, to }) => {
  const y0 = from.y - from.h / 2, y1 = to.y + to.h / 2, bend = (y0 - y1) * 0.5;
  const at = (...values) => values.map((value) => value.toFixed(1)).join(" ");
  return `M${at(from.x, y0)}C${at(from.x, y0 - bend, to.x, y1 + bend, to.x, y1)}`;
};
const nodeName = (node) => `${node.site}:${node.channel}`;
const endName = (item) => (item.node ? nodeName(item.node) : `“${visible(item.token)}”`);

function nodeLines(node) {
  return [
    ["loss increase if ablated", node.importance === null ? "–" : signed(node.importance)],
    ["mean activation", number(node.mean)],
    ["edges in, out", `${whole(node.in_edges)}, ${whole(node.out_edges)}`],
  ];
}

function drawFrame(plan) {
  const parts = [];
  for (const [i, band] of plan.bands.entries()) {
    if (i) parts.push(s("line", { class: "boundary", x1: 16, x2: plan.width - 12, y1: band.bottom, y2: band.bottom }));
    const middle = (band.top + band.bottom) / 2;
    if (!band.rows.length) parts.push(s("text", { class: "site", x: 46, y: middle + 4 }, `${band.label.toLowerCase()}: no nodes`));
    else if (!band.rows[0].token)
      parts.push(s("text", { class: "band", transform: `translate(24 ${middle}) rotate(-90)` }, band.label));
    for (const row of band.rows) {
      parts.push(s("text", { class: "site", x: 46, y: row.y + (row.token ? 4 : 0) }, row.label));
      if (!row.token) parts.push(s("text", { class: "count", x: 46, y: row.y + 13 }, plural(row.count, "node")));
      for (const group of row.groups.filter((group) => group.name)) {
        const first = group.items[0], last = group.items.at(-1), x = first.x - first.w / 2 - GROUP_LABEL + 4;
        const width = last.x + last.w / 2 + 8 - x;
        parts.push(s("rect", { class: "group", x, y: row.y - 18, width, height: 36, rx: 10 }));
        parts.push(s("text", { class: "group-name", x: x + 12, y: row.y + 4 }, group.name));
      }
    }
  }
  return s("g", { class: "frame" }, parts);
}

function drawItem(item, most) {
  const { x, y, w, h: height, node } = item;
  const box = s("rect", { x: x - w / 2, y: y - height / 2, width: w, height, rx: item.tick ? Math.min(3, w / 2) : node ? 7 : 12 });
  const text = item.tick ? null : s("text", { x, y: y + 4 }, item.label);
  if (!node) return s("g", { class: "token" }, box, text);
  const share = node.importance > 0 && most > 0 ? Math.sqrt(node.importance / most) : 0;
  const element = s("g", { class: `node${item.tick ? " tick" : ""}${share > 0.62 ? " deep" : ""}`, "data-node": item.id, tabindex: -1,
    role: "button", "aria-label": `${node.site} channel ${node.channel}, ${plural(node.in_edges, "edge")} in, ${node.out_edges} out` }, box, text);
  element.style.setProperty("--share", share.toFixed(3));
  return element;
}

function drawCircuit(circuit, label, onSelect) {
  const plan = layout(circuit);
  const crowded = plan.lines.length > MAX_HITS;
  const most = circuit.nodes.reduce((top, node) => Math.max(top, node.importance ?? 0), 0);
  const byItem = new Map([...plan.items.values()].map((item) => [item, { lines: [], weak: [], links: [] }]));
  const layers = Object.fromEntries(["links", "edges", "hits", "items"].map((name) => [name, s("g", { class: name })]));

  const drawLink = (link) => (link.el = layers.links.appendChild(s("path", { class: "link", d: curve(link) })));
  const drawLine = (line) => {
    const { edge, size } = line;
    line.el = layers.edges.appendChild(s("path", { class: `edge ${edge.kind} ${sign(edge.weight)}`, d: curve(line), "stroke-width": (0.7 + 3.3 * size ** 0.8).toFixed(2) }));
    line.el.style.setProperty("--size", size.toFixed(2));
    return line.el;
  };
  for (const line of plan.weak) byItem.get(line.from).weak.push(line), byItem.get(line.to).weak.push(line);
  for (const link of plan.links) {
    byItem.get(link.from).links.push(link), byItem.get(link.to).links.push(link);
    if (plan.links.length <= MAX_LINKS) drawLink(link);
  }
  for (const line of [...plan.lines].reverse()) { // weak first, so that strong edges lie on top
    const { edge } = line;
    line.target = crowded ? drawLine(line) : (drawLine(line), layers.hits.appendChild(s("path", { class: "hit", d: curve(line) })));
    byItem.get(line.from).lines.push(line), byItem.get(line.to).lines.push(line);
    line.target.addEventListener("pointermove", (event) => {
      line.el.classList.add("hover");
      tip.show(event.clientX, event.clientY, `${endName(line.from)} → ${endName(line.to)}`, [["weight", signed(edge.weight)]]);
    });
    line.target.addEventListener("pointerleave", () => (line.el.classList.remove("hover"), tip.hide()));
  }

  const world = s("g", {}, drawFrame(plan), layers.links, layers.edges, layers.hits, layers.items);
  const svg = s("svg", { class: `circuit${crowded ? " crowded" : ""}`, viewBox: `0 0 ${plan.width} ${plan.height}`, role: "group", tabindex: -1,
    "aria-label": `${label}: circuit of ${plural(circuit.nodes.length, "node")}. Arrow keys move between nodes, Enter opens one.` }, world);
  svg.style.maxHeight = `${plan.height * 1.2}px`;
  svg.style.setProperty("--natural", `${plan.width}px`);

  // What is lit: the node under the pointer or the focus, otherwise the one that the side panel shows.
  let selected = null, lit = [], passing = [], threshold = 0;
  function light(item) {
    for (const element of lit) element.classList.remove("on", "near", "self");
    for (const element of passing) element.remove();
    (lit = []), (passing = []);
    item ??= selected;
    svg.classList.toggle("focus", Boolean(item));
    if (!item) return;
    const mark = (element, name) => (element.classList.add(name), lit.push(element));
    mark(item.el, "self");
    const weak = byItem.get(item).weak.filter((line) => Math.abs(line.edge.weight) >= threshold);
    for (const line of weak) passing.push(drawLine(line));
    for (const line of [...byItem.get(item).lines, ...weak]) mark(line.el, "on"), mark((line.from === item ? line.to : line.from).el, "near");
    for (const link of byItem.get(item).links) {
      if (plan.links.length > MAX_LINKS) passing.push(drawLink(link));
      mark(link.el, "on"), mark((link.from === item ? link.to : link.from).el, "near");
    }
  }

  for (const item of plan.items.values()) {
    item.el = layers.items.appendChild(drawItem(item, most));
    const title = endName(item), lines = item.node ? nodeLines(item.node) : [[item.id.startsWith("embed") ? "writes" : "reads", plural(byItem.get(item).lines.length, "edge")]];
    item.el.addEventListener("pointerenter", () => light(item));
    item.el.addEventListener("pointerleave", () => light(null));
    explain(item.el, title, lines);
    if (!item.node) continue;
    item.el.addEventListener("focus", () => (light(item), roam(item)));
    item.el.addEventListener("blur", () => light(null));
    item.el.addEventListener("click", () => onSelect(item.node));
  }

  // One tab stop for the whole drawing; arrows walk along a row and between rows.
  const grid = plan.rows.filter((row) => !row.token).map((row) => row.groups.flatMap((group) => group.items));
  let current = null;
  function roam(item) {
    current?.el.setAttribute("tabindex", -1);
    (current = item).el.setAttribute("tabindex", 0);
  }
  if (grid.length) roam(grid[0][0]);
  svg.addEventListener("keydown", (event) => {
    const r = grid.findIndex((row) => row.includes(current)), row = grid[r];
    const nearest = (items) => items?.reduce((best, item) => (Math.abs(item.x - current.x) < Math.abs(best.x - current.x) ? item : best));
    const next = { ArrowLeft: () => row[row.indexOf(current) - 1], ArrowRight: () => row[row.indexOf(current) + 1],
      ArrowUp: () => nearest(grid[r + 1]), ArrowDown: () => nearest(grid[r - 1]) }[event.key];
    if (row && next) event.preventDefault(), next()?.el.focus();
    else if (row && (event.key === "Enter" || event.key === " ")) event.preventDefault(), onSelect(current.node);
  });

  const view = zoomable(svg, world, plan);
  return {
    svg, plan, ...view,
    select(id) {
      selected?.el.classList.remove("selected");
      selected = plan.items.get(id) ?? null;
      if (selected) selected.el.classList.add("selected"), roam(selected);
      light(null);
    },
    reveal: (id, block) => plan.items.get(id)?.el.scrollIntoView({ block, inline: "nearest" }),
    focus: (id) => plan.items.get(id)?.el.focus({ preventScroll: true }),
    filter(least) {
      let shown = 0;
      threshold = least;
      for (const line of plan.lines) {
        line.off = Math.abs(line.edge.weight) < least;
        for (const element of [line.el, line.target]) element.classList.toggle("off", line.off);
        shown += !line.off;
      }
      for (const [item, { lines }] of byItem) item.el.classList.toggle("lone", lines.length > 0 && lines.every((line) => line.off));
      return shown;
    },
  };
}

// Wheel zooms only while the drawing has the focus or with Ctrl, so that a reader who scrolls past is not caught.
function zoomable(svg, world, plan) {
  let x = 0, y = 0, scale = 1, drag = null;
  const apply = () => {
    world.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
    svg.classList.toggle("zoomed", scale > 1.01);
  };
  const point = (event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const zoom = (factor, at = { x: plan.width / 2, y: plan.height / 2 }) => {
    const to = Math.max(0.5, Math.min(12, scale * factor));
    (x = at.x - ((at.x - x) * to) / scale), (y = at.y - ((at.y - y) * to) / scale), (scale = to);
    apply();
  };
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !svg.contains(document.activeElement)) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.0015), point(event));
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => {
    if (event.button || event.target.closest(".node")) return;
    svg.focus({ preventScroll: true });
    drag = { from: point(event), x, y };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const to = point(event);
    (x = drag.x + to.x - drag.from.x), (y = drag.y + to.y - drag.from.y);
    apply();
  });
  for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => (drag = null));
  return { zoom, fit: () => ((x = y = 0), (scale = 1), apply()) };
}
