// Where everything goes. A layered drawing: one row a site, input at the bottom; within a row, nodes settle near
// what they are connected to. Pure: no DOM here, only world units.
const STACK = [["attn.in"], ["attn.q", "attn.k", "attn.v"], ["attn.out"], ["mlp.in"], ["mlp.act"], ["mlp.out"]];
const READERS = new Set(["attn.in", "mlp.in"]);
const WRITERS = new Set(["attn.out", "mlp.out"]);
const MAX_EDGES = 1500; // more lines than this are neither readable nor quick
const MAX_TOKENS = 20;
const ROW = { labelled: 66, crowded: 92 }, BAND_PAD = 10, EMPTY_BAND = 30, LEFT = 132, MARGIN = 30;
const CHIP = { w: 36, h: 22 }, LABEL_PITCH = 42, MAX_PITCH = 88, GROUP_GAP = 46, GROUP_LABEL = 28, MIN_PITCH = 2.4;

const kindOf = (node) => node.site.slice(String(node.layer).length + 1);
const tokenOf = (edge) => (edge.kind === "embed" ? edge.writer : edge.reader).slice("token:".length);
const strongest = (edges) => [...edges].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));

// The tokens whose weights are largest in sum, as many as one row can name.
function mainTokens(edges) {
  const sums = new Map();
  for (const edge of edges) sums.set(tokenOf(edge), (sums.get(tokenOf(edge)) ?? 0) + Math.abs(edge.weight));
  const texts = [...sums].sort((a, b) => b[1] - a[1]).map(([text]) => text);
  return { texts: texts.slice(0, MAX_TOKENS), total: texts.length };
}

function tokenBand(label, side, tokens) {
  const items = tokens.texts.map((text) => {
    const label = shorten(visible(text), 14);
    return { id: `${side}:${text}`, token: text, label, w: 16 + 7.3 * [...label].length, h: 24, near: [] };
  });
  return items.length ? [{ label, rows: [{ label: side, groups: [{ items }], token: true }] }] : [];
}

function layerBands(nodes) {
  const bySite = new Map();
  for (const node of [...nodes].sort((a, b) => a.channel - b.channel)) {
    const item = { id: node.id, node, label: String(node.channel), near: [] };
    bySite.set(node.site, [...(bySite.get(node.site) ?? []), item]);
  }
  const layers = nodes.reduce((most, node) => Math.max(most, node.layer + 1), 0);
  return Array.from({ length: layers }, (_, layer) => ({
    label: `Layer ${layer}`,
    rows: STACK.map((kinds) => ({
      label: kinds.length > 1 ? "attn.q k v" : kinds[0],
      groups: kinds.map((kind) => ({ name: kinds.length > 1 ? kind.slice(-1) : null, items: bySite.get(`${layer}.${kind}`) ?? [] }))
        .filter((group) => group.items.length),
    })).filter((row) => row.groups.length),
  }));
}

// Rows that would crowd lose their labels and become ticks, evenly packed.
function sizeRow(row, width) {
  const count = row.groups.reduce((sum, group) => sum + group.items.length, 0);
  row.count = count;
  row.space = 12;
  if (row.token) return;
  const pitch = Math.max(MIN_PITCH, Math.min(MAX_PITCH, (width - GROUP_GAP * (row.groups.length - 1)) / count));
  row.ticks = pitch < LABEL_PITCH;
  const w = row.ticks ? Math.max(1.6, Math.min(9, pitch * 0.72)) : CHIP.w;
  row.space = pitch - w;
  for (const group of row.groups)
    for (const item of group.items) Object.assign(item, { w, h: row.ticks ? 16 : CHIP.h, tick: row.ticks });
}

// The nearest places to where items want to be that keep their order and their distance: isotonic regression
// by pooling neighbours that collide.
function settle(row, centre) {
  for (const group of row.groups) {
    for (const item of group.items) {
      let mass = 0.12, sum = 0.12 * centre; // loose parts stay near the middle
      for (const [other, pull] of item.near) (mass += pull), (sum += pull * other.x);
      item.want = sum / mass;
    }
    group.items.sort((a, b) => a.want - b.want || a.x - b.x);
  }
  if (row.ticks) return pack(row, centre);
  let offset = 0, last = null;
  const blocks = [];
  for (const group of row.groups)
    for (const [i, item] of group.items.entries()) {
      if (last) offset += (last.w + item.w) / 2 + row.space + (i === 0 ? GROUP_GAP : 0);
      last = item;
      let block = { mean: item.want - offset, items: [[item, offset]] };
      while (blocks.length && blocks.at(-1).mean > block.mean) {
        const before = blocks.pop(), n = before.items.length, m = block.items.length;
        block = { mean: (before.mean * n + block.mean * m) / (n + m), items: before.items.concat(block.items) };
      }
      blocks.push(block);
    }
  for (const block of blocks) for (const [item, shift] of block.items) item.x = block.mean + shift;
}

function pack(row, centre) {
  let x = 0;
  const all = row.groups.flatMap((group, g) => group.items.map((item, i) => ((x += i || !g ? 0 : GROUP_GAP), (item.x = x), (x += item.w + row.space), item)));
  const shift = centre - (all[0].x + all.at(-1).x) / 2;
  for (const item of all) item.x += shift;
}

function residualLinks(rows) {
  const links = [], writers = new Map();
  for (const row of rows)
    for (const group of row.groups)
      for (const item of group.items) {
        if (!item.node) continue;
        const { channel } = item.node, kind = kindOf(item.node);
        if (READERS.has(kind)) for (const from of writers.get(channel) ?? []) links.push({ from, to: item });
        if (WRITERS.has(kind)) writers.set(channel, [...(writers.get(channel) ?? []), item]);
      }
  return links;
}

function layout(circuit) {
  const of = (kind) => circuit.edges.filter((edge) => edge.kind === kind);
  const tokens = { in: mainTokens(of("embed")), out: mainTokens(of("unembed")) };
  const bands = [...tokenBand("Input", "embed", tokens.in), ...layerBands(circuit.nodes), ...tokenBand("Output", "unembed", tokens.out)];
  const rows = bands.flatMap((band) => band.rows);
  const most = Math.max(1, ...rows.filter((row) => !row.token).map((row) => row.groups.reduce((sum, g) => sum + g.items.length, 0)));
  const wide = most * (LABEL_PITCH + 3) + 2 * GROUP_GAP;
  const room = wide <= 1500 ? Math.max(760, wide) : 1120; // past 1500 units labels would be too small to read
  const items = new Map();
  for (const row of rows) {
    sizeRow(row, room);
    const all = row.groups.flatMap((group) => group.items);
    for (const [i, item] of all.entries()) (item.x = ((i + 0.5) / all.length) * room), items.set(item.id, item);
  }

  const ends = (edge) => ({
    from: items.get(edge.kind === "embed" ? `embed:${tokenOf(edge)}` : edge.writer),
    to: items.get(edge.kind === "unembed" ? `unembed:${tokenOf(edge)}` : edge.reader),
  });
  const known = (edges) => edges.map((edge) => ({ edge, ...ends(edge) })).filter((line) => line.from && line.to);
  const links = residualLinks(rows), weak = []; // weak: edges past the limit, drawn only at the node in hand
  const lines = [of("weight"), [...of("embed"), ...of("unembed")]].flatMap((edges, i) => {
    const ranked = known(strongest(edges)), most = i ? MAX_EDGES / 3 : MAX_EDGES;
    const scale = Math.abs(ranked[0]?.edge.weight ?? 1) || 1; // embeddings and weights each have their own scale
    for (const line of ranked) line.size = Math.abs(line.edge.weight) / scale;
    weak.push(...ranked.slice(most));
    return ranked.slice(0, most);
  });
  const tie = (a, b, pull) => (a.near.push([b, pull]), b.near.push([a, pull]));
  for (const line of lines) tie(line.from, line.to, (line.edge.kind === "weight" ? 1 : 0.35) * (0.25 + line.size));
  for (const link of links) tie(link.from, link.to, 0.5);
  for (let sweep = 0; sweep < 30; sweep++) for (const row of sweep % 2 ? rows : [...rows].reverse()) settle(row, room / 2);

  let left = Infinity, right = -Infinity, up = MARGIN / 2;
  for (const item of items.values()) (left = Math.min(left, item.x - item.w / 2 - GROUP_LABEL)), (right = Math.max(right, item.x + item.w / 2));
  const tall = rows.some((row) => row.ticks) ? ROW.crowded : ROW.labelled;
  for (const band of bands) {
    band.bottom = up;
    up += BAND_PAD;
    for (const row of band.rows) (row.up = up + tall / 2), (up += tall);
    up += band.rows.length ? BAND_PAD : EMPTY_BAND - BAND_PAD;
    band.top = up;
  }
  const height = up + MARGIN / 2, span = Math.max(860, right - left);
  const shift = LEFT + (span - (right - left)) / 2 - left;
  for (const band of bands) {
    [band.top, band.bottom] = [height - band.top, height - band.bottom];
    for (const row of band.rows) {
      row.y = height - row.up;
      for (const group of row.groups) for (const item of group.items) (item.x += shift), (item.y = row.y), (item.row = row);
    }
  }
  return { width: LEFT + span + MARGIN, height, bands, rows, items, lines, weak, links, tokens };
}
