"use strict";
// The inspector page: texts of the program are set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const ROW = 18, CONTEXT = 3, root = document.documentElement;
const $ = (id) => document.getElementById(id);

function make(tag, attrs = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attrs)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}
function draw(tag, attrs = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attrs)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const grouped = (n) => n.toLocaleString("en-US");
function numeral(x) {
  if (typeof x !== "number") return x;
  const size = Math.abs(x);
  return Number.isInteger(x) && size < 1e9 ? String(x) : size < 1e-3 || size >= 1e6 ? x.toExponential(3) : String(Number(x.toPrecision(6)));
}
const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

// State: what is hovered and pinned (a place, a source line), the view, the search.

const state = { view: "levels", pass: 0, hover: null, pin: null, use: null, query: "", hits: [], hit: -1, panes: [], active: 0, open: {}, folds: new Set(), target: null };
const lineOf = (place) => (place < 0 ? null : data.places[place][0] + ":" + data.places[place][1]);
const byLine = new Map();
data.places.forEach((p, i) => { const key = p[0] + ":" + p[1]; if (!byLine.has(key)) byLine.set(key, []); byLine.get(key).push(i); });

// Tokens of a line: IR, target text and Python have enough in common for one table each.

const IR = /("(?:ts|tile|host|schedule|mesh|control|ptx|mbarrier|dist|builtin)\.[\w.]+")|("(?:[^"\\]|\\.)*")|(%[\w.]+)|(\/\/.*$|;.*$)|((?:tensor|!tile\.ref|!ts\.\w+)<[^>]*>|\b(?:[iuf]\d+|bf16|ui8|ptr|double|float|half)\b)/g;
const PY = /("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(#.*$)|\b(and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield|None|True|False)\b|\b(\d[\w.]*)/g;
const STYLES = { ir: ["to", "ts", "tv", "tc", "tt"], py: ["ts", "tc", "tk", "tn"] };

function paint(row, text, kind, mark) {
  // Tokens, then the marks of the search inside them.
  const pieces = [];
  const pattern = kind === "py" ? PY : IR;
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > at) pieces.push([text.slice(at, match.index), ""]);
    pieces.push([match[0], STYLES[kind][match.slice(1).findIndex((g) => g !== undefined)]]);
    at = match.index + match[0].length;
  }
  if (at < text.length) pieces.push([text.slice(at), ""]);
  const cuts = mark ? findAll(text, mark) : [];
  let start = 0;
  for (const [piece, style] of pieces) {
    const holder = style ? make("span", { class: style }) : row;
    let from = start;
    for (const [a, b] of cuts) {
      const low = Math.max(a, from), high = Math.min(b, start + piece.length);
      if (low >= high) continue;
      if (low > from) holder.append(text.slice(from, low));
      holder.append(make("mark", {}, text.slice(low, high)));
      from = high;
    }
    holder.append(text.slice(from, start + piece.length));
    if (style) row.append(holder);
    start += piece.length;
  }
}
function findAll(text, query) {
  const found = [], low = text.toLowerCase();
  for (let i = low.indexOf(query); i >= 0; i = low.indexOf(query, i + query.length)) found.push([i, i + query.length]);
  return found;
}

// Panes: lists of lines of which only those in the window are in the document.

class Pane {
  constructor(id, title, key) {
    Object.assign(this, { id, key, lines: [], cursor: 0, charWidth: 7.2, kind: "ir", rows: new Map(), rest: null });
    this.title = make("b", {}, title);
    this.count = make("span", { class: "count" });
    this.bar = make("div", { class: "bar", onclick: () => { if (this.closed) toggle(this.id); } }, key ? make("kbd", {}, key) : null, this.title, this.count);
    this.space = make("div", { class: "space" });
    this.scroll = make("div", { class: "scroll", tabindex: "0", "aria-label": title }, this.space);
    this.rail = make("div", { class: "rail", "aria-hidden": "true" });
    this.node = make("section", { class: "pane", "data-pane": id, "aria-label": title }, this.bar, make("div", { class: "body" }, this.scroll, this.rail));
    this.scroll.addEventListener("scroll", () => this.render());
    this.scroll.addEventListener("mousemove", (e) => this.point(e));
    this.scroll.addEventListener("mouseleave", () => hover(null, null));
    this.scroll.addEventListener("click", (e) => this.click(e));
    this.scroll.addEventListener("focus", () => activate(this));
  }
  get closed() { return state.open[this.id] === false; }
  fill(lines, note) {
    this.lines = lines;
    this.note = note;
    this.cursor = Math.min(this.cursor, Math.max(lines.length - 1, 0));
    const widest = lines.reduce((n, line) => Math.max(n, line.text.length), 0);
    this.gutter = String(lines.length).length + 2;
    this.space.style.height = (lines.length + (note ? 2 : 0)) * ROW + "px";
    this.space.style.width = `calc(${widest + this.gutter + 6}ch + 24px)`;
    this.count.textContent = grouped(lines.length) + (lines.length === 1 ? " line" : " lines");
    this.rebuild();
  }
  render() {
    // Rows stay in the document while they are in the window: a selection of text and a click survive a hover.
    const height = this.scroll.clientHeight || 600, first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - 8);
    const last = Math.min(this.lines.length, Math.ceil((this.scroll.scrollTop + height) / ROW) + 8);
    for (const [i, row] of this.rows) if (i < first || i >= last) { row.remove(); this.rows.delete(i); }
    for (let i = first; i < last; i++) {
      if (!this.rows.has(i)) { const row = this.row(i); this.rows.set(i, row); this.space.append(row); }
      this.restyle(this.rows.get(i), i);
    }
    if (this.note && !this.rest) {
      this.rest = make("div", { class: "row more" }, this.note);
      this.rest.style.top = this.lines.length * ROW + "px";
      this.space.append(this.rest);
    }
  }
  rebuild() {
    this.rows.clear();
    this.rest = null;
    this.space.replaceChildren();
    this.render();
  }
  row(i) {
    const line = this.lines[i], row = make("div", { "data-line": i });
    row.style.top = i * ROW + "px";
    const no = make("span", { class: "no" }, String(line.no ?? i + 1));
    no.style.setProperty("--gutter", this.gutter + "ch");
    row.append(no, this.dot(line));
    if (line.sign !== undefined) row.append(make("span", { class: "sg" }, line.sign));
    if (line.parts) line.parts.forEach((p, k) => row.append(k % 2 ? make("em", {}, p) : p));
    else paint(row, line.text, this.kind, state.query);
    return row;
  }
  restyle(row, i) {
    const line = this.lines[i], names = ["row", ...this.classes(line)], now = state.hits[state.hit];
    if (line.style) names.push(line.style);
    if (line.place < 0 && this.id !== "source" && !line.style) names.push("quiet");
    if (i === this.cursor && state.panes[state.active] === this) names.push("cursor");
    if (now && now.pane === this && now.line === i) names.push("hit");
    const name = names.join(" ");
    if (row.className !== name) row.className = name;
    const use = state.use && state.use.pane === this && state.use.scope === line.scope ? state.use.name : null;
    if (use || row.used) { row.used = Boolean(use); for (const t of row.querySelectorAll(".tv")) t.classList.toggle("use", t.textContent === use); }
    this.underline(row, line);
  }
  dot(line) {
    const bad = (line.values || []).map((v) => data.values[v]);
    const kind = bad.some((v) => v.nans) ? "nan" : bad.some((v) => v.infs) ? "inf" : "";
    const dot = make("span", { class: "dot " + kind }, kind ? "●" : "");
    if (kind) dot.title = kind === "nan" ? "holds NaN" : "holds infinity";
    return dot;
  }
  classes(line) {
    const found = [], key = this.id === "source" ? line.key : lineOf(line.place);
    for (const [mark, name] of [[state.pin, "pin"], [state.hover, "link"]]) {
      if (!mark || key === null || key !== mark.key) continue;
      found.push(mark.place === null || this.id === "source" || mark.place === line.place ? name : "same");
    }
    return found;
  }
  underline(row, line) {
    const mark = state.hover || state.pin, old = row.querySelector(".under");
    if (old) old.remove();
    if (this.id !== "source" || !mark || mark.place === null || line.key !== mark.key) return;
    const [, , column, end] = data.places[mark.place];
    if (!column) return;
    const width = (end > column ? end : line.text.length + 1) - column;
    const under = make("span", { class: "under" });
    under.style.left = `calc(${this.gutter + 1.4 + column - 1}ch)`;
    under.style.width = width + "ch";
    row.append(under);
  }
  at(e) {
    const box = this.space.getBoundingClientRect();
    const i = Math.floor((e.clientY - box.top) / ROW);
    return i >= 0 && i < this.lines.length ? i : -1;
  }
  column(e) {
    const probe = this.space.querySelector(".row .no");
    const width = probe ? probe.getBoundingClientRect().width / this.gutter : this.charWidth;
    return Math.floor((e.clientX - this.space.getBoundingClientRect().left) / width - this.gutter - 1.4) + 1;
  }
  mark(i, e) {
    const line = this.lines[i];
    if (!line) return null;
    if (this.id !== "source") return line.place < 0 ? null : { key: lineOf(line.place), place: line.place };
    const places = byLine.get(line.key);
    if (!places) return null;
    // The innermost expression under the pointer; without one, the whole line.
    const column = e ? this.column(e) : 0;
    const inside = places.filter((p) => { const [, , a, b] = data.places[p]; return a && column >= a && column < (b > a ? b : a + 1); });
    inside.sort((p, q) => (data.places[p][3] - data.places[p][2]) - (data.places[q][3] - data.places[q][2]));
    return { key: line.key, place: inside.length ? inside[0] : null };
  }
  point(e) {
    const i = this.at(e);
    const token = e.target.classList && e.target.classList.contains("tv") ? e.target.textContent : null;
    hover(i < 0 ? null : this.mark(i, e), token ? { pane: this, name: token, scope: this.lines[i].scope } : null);
  }
  click(e) {
    const i = this.at(e);
    if (i < 0 || String(window.getSelection())) return;
    activate(this);
    this.cursor = i;
    if (this.lines[i].fold !== undefined) { state.folds.add(this.lines[i].fold); fillDiff(this); renderAll(); return; }
    pin(this.mark(i, e), this);
  }
  reveal(i, middle = true) {
    const top = i * ROW, height = this.scroll.clientHeight;
    if (top >= this.scroll.scrollTop && top + ROW <= this.scroll.scrollTop + height) return;
    this.scroll.scrollTop = Math.max(0, middle ? top - height / 3 : top);
  }
  ticks() {
    const height = this.scroll.clientHeight, total = Math.max(this.lines.length * ROW, height), found = [];
    const add = (i, name) => { if (found.length < 400) { const t = make("i", { class: name }); t.style.top = (i * ROW / total) * height + "px"; found.push(t); } };
    const mark = state.hover || state.pin;
    this.lines.forEach((line, i) => {
      if (mark && (this.id === "source" ? line.key : lineOf(line.place)) === mark.key && (mark.place === null || this.id === "source" || line.place === mark.place)) add(i, "");
      if ((line.values || []).some((v) => data.values[v].nans)) add(i, "nan");
    });
    state.hits.forEach((hit) => { if (hit.pane === this) add(hit.line, "find"); });
    this.rail.replaceChildren(...found);
  }
}
function renderAll() { for (const pane of state.panes) { pane.render(); pane.ticks(); } }

const sameMark = (a, b) => (a === b) || (a && b && a.key === b.key && a.place === b.place);
function hover(mark, use) {
  const sameUse = (state.use && use) ? state.use.name === use.name && state.use.pane === use.pane && state.use.scope === use.scope : state.use === use;
  if (sameMark(state.hover, mark) && sameUse) return;
  Object.assign(state, { hover: mark, use });
  renderAll();
  describe(state.hover || state.pin);
}
function pin(mark, from) {
  state.pin = sameMark(state.pin, mark) ? null : mark;
  if (state.pin) follow(state.pin, from);
  renderAll();
  describe(state.pin);
}
function follow(mark, from) {
  // Scroll every other pane to its first line of the mark.
  for (const pane of state.panes) {
    if (pane === from) continue;
    if (pane.id === "source") showFile(Number(mark.key.split(":")[0]));
    const hit = (line) => (pane.id === "source" ? line.key : lineOf(line.place)) === mark.key;
    let i = mark.place === null || pane.id === "source" ? -1 : pane.lines.findIndex((line) => line.place === mark.place);
    if (i < 0) i = pane.lines.findIndex(hit);
    if (i >= 0) pane.reveal(i);
  }
}
function activate(pane) {
  const i = state.panes.indexOf(pane);
  if (i < 0) return;
  state.active = i;
  state.panes.forEach((p) => p.node.classList.toggle("active", p === pane));
  pane.render();
}

// What is known of a place: its source line, and what each level computed there.

function describe(mark) {
  const box = $("detail");
  if (!mark) {
    box.replaceChildren(make("span", { class: "hint" }, "Point at a line to see where it came from and what became of it; click to keep it. Keys: ?"));
    return;
  }
  const [file, number] = mark.key.split(":").map(Number), source = data.files[file];
  const place = mark.place === null ? null : data.places[mark.place];
  const where = make("div", { class: "where" }, make("b", {}, `${source ? source.name : "?"}:${number}${place && place[2] ? ":" + place[2] : ""}`),
    make("span", {}, source && number <= source.lines.length ? data.texts[source.lines[number - 1]].trim() : ""));
  const rows = [];
  for (const section of data.levels) {
    const s = data.sections[section];
    for (const [line, values] of Object.entries(s.values || {})) {
      const at = s.places[line];
      if (lineOf(at) !== mark.key || (mark.place !== null && at !== mark.place)) continue;
      values.forEach((v) => rows.push(v));
    }
  }
  box.replaceChildren(where);
  if (!rows.length) { box.append(make("span", { class: "hint" }, data.recorded ? "No value was recorded here." : "Values were not recorded.")); return; }
  box.append(valueTable(rows));
  const bad = rows.find((v) => data.values[v].origin !== undefined && (data.values[v].nans || data.values[v].infs));
  if (bad !== undefined) box.append(originChain(bad));
}
const MOST_ROWS = 60;
function valueTable(rows) {
  const table = make("table", {}, make("tr", {}, ...["level", "value", "type", "least", "greatest", "mean", "NaN", "inf", "error ≤", "runs", "first elements"].map((t) => make("th", {}, t))));
  for (const v of rows.slice(0, MOST_ROWS)) {
    const r = data.values[v], cell = (t, c = "") => make("td", { class: c, title: String(t ?? "") }, String(t ?? ""));
    table.append(make("tr", { "data-value": v }, cell(data.sections[r.section].level), cell(r.name), cell(r.type), cell(numeral(r.low), "num"), cell(numeral(r.high), "num"), cell(numeral(r.mean), "num"),
      cell(r.nans || "", "num bad"), cell(r.infs || "", "num warn"), cell(numeral(r.bound), "num"), cell(r.runs, "num"), cell((r.first || []).map(numeral).join("  "))));
  }
  if (rows.length > MOST_ROWS) table.append(make("tr", {}, make("td", { colspan: 11 }, `and ${rows.length - MOST_ROWS} more values at this line`)));
  return table;
}
function originChain(v) {
  const box = make("div", { class: "chain" }, (data.values[v].nans ? "NaN" : "Infinity") + " comes from ");
  const seen = new Set();
  let now = v;
  while (typeof now === "number" && !seen.has(now)) {
    seen.add(now);
    const own = now, r = data.values[own];
    if (now !== v) box.append(" ← ");
    box.append(make("button", { onclick: () => jump(r.section, r.line) }, `${r.name} line ${r.line + 1}`));
    now = r.origin;
  }
  if (typeof now === "string") box.append(" — " + now);
  return box;
}
function jump(section, line) {
  const s = data.sections[section];
  if (state.view !== "levels") show("levels");
  const pane = state.panes.find((p) => p.section === section);
  if (!pane) return;
  if (pane.closed) toggle(pane.id);
  pane.cursor = line;
  activate(pane);
  pane.reveal(line);
  state.pin = s.places[line] >= 0 ? { key: lineOf(s.places[line]), place: s.places[line] } : null;
  if (state.pin) follow(state.pin, pane);
  renderAll();
  describe(state.pin);
}

// Views.

function sectionLines(number) {
  const s = data.sections[number];
  let scope = 0;
  return s.lines.map((t, i) => {
    const text = data.texts[t];
    if (/"ts\.func"\(\) \(\{|\.entry |^define /.test(text)) scope++;
    return { text, place: s.places[i], values: (s.values || {})[i], scope };
  });
}
function sourcePane() {
  const pane = new Pane("source", "Source", "1");
  pane.kind = "py";
  if (data.files.length > 1) {
    pane.select = make("select", { "aria-label": "Source file", onchange: () => showFile(Number(pane.select.value), true) }, ...data.files.map((f, i) => make("option", { value: i }, f.name)));
    pane.title.after(pane.select);
  }
  pane.file = -1;
  return pane;
}
function showFile(number) {
  const pane = state.panes.find((p) => p.id === "source");
  if (!pane || pane.file === number || !data.files[number]) return;
  const f = data.files[number];
  pane.file = number;
  pane.title.textContent = f.name;
  pane.title.title = f.path;
  if (pane.select) pane.select.value = number;
  pane.fill(f.lines.map((t, i) => ({ text: data.texts[t], place: -1, key: number + ":" + (i + 1) })), f.omitted ? `… ${grouped(f.omitted)} more lines are not in this page` : "");
}
function more(s) { return s.omitted ? `… ${grouped(s.omitted)} more lines are not in this page` : ""; }

function showLevels() {
  const levels = data.levels.filter((n) => data.sections[n].level !== "target"), files = data.levels.filter((n) => data.sections[n].level === "target");
  const panes = [sourcePane()];
  levels.forEach((n, i) => {
    const s = data.sections[n], pane = new Pane("level" + n, s.name, String(i + 2));
    pane.section = n;
    pane.title.title = "hash " + s.digest;
    panes.push(pane);
  });
  if (files.length) {
    const pane = new Pane("target", "target", String(levels.length + 2));
    if (state.target === null || !files.includes(state.target)) state.target = files.reduce((a, b) => (data.sections[b].places.filter((p) => p >= 0).length > data.sections[a].places.filter((p) => p >= 0).length ? b : a));
    pane.section = state.target;
    pane.select = make("select", { "aria-label": "Target file", onchange: () => { state.target = pane.section = Number(pane.select.value); pane.fill(sectionLines(pane.section), more(data.sections[pane.section])); search(state.query, false); } },
      ...files.map((n) => make("option", { value: n }, data.sections[n].name)));
    pane.select.value = state.target;
    pane.title.after(pane.select);
    panes.push(pane);
  }
  place(panes);
  for (const pane of panes) if (pane.section !== undefined) pane.fill(sectionLines(pane.section), more(data.sections[pane.section]));
  showFile(firstFile());
}
function firstFile() { return data.places.length ? data.places[0][0] : 0; }

function place(panes) {
  state.panes = panes;
  state.active = Math.min(state.active, panes.length - 1);
  const nodes = [];
  panes.forEach((pane, i) => {
    if (i) nodes.push(splitter(panes[i - 1], pane));
    pane.node.classList.toggle("closed", pane.closed);
    nodes.push(pane.node);
  });
  $("main").append(...nodes);
  activate(panes[state.active]);
}
function splitter(left, right) {
  const bar = make("div", { class: "split", role: "separator", "aria-orientation": "vertical" });
  bar.addEventListener("pointerdown", (e) => {
    bar.setPointerCapture(e.pointerId);
    const a = left.node.offsetWidth, b = right.node.offsetWidth, x = e.clientX;
    const move = (m) => {
      const w = Math.max(80, Math.min(a + b - 80, a + m.clientX - x));
      left.node.style.flex = `${w} 1 0`;
      right.node.style.flex = `${a + b - w} 1 0`;
      for (const p of state.panes) if (p !== left && p !== right && !p.node.style.flex) p.node.style.flex = `${p.node.offsetWidth} 1 0`;
      renderAll();
    };
    bar.addEventListener("pointermove", move);
    bar.addEventListener("pointerup", () => bar.removeEventListener("pointermove", move), { once: true });
  });
  return bar;
}
function toggle(id) {
  state.open[id] = state.open[id] === false;
  const pane = state.panes.find((p) => p.id === id);
  pane.node.classList.toggle("closed", pane.closed);
  requestAnimationFrame(renderAll);
}

// Passes: the list, and the difference from the pass before with equal parts folded.

function showPasses() {
  const list = make("div", { class: "list", role: "listbox", "aria-label": "Passes" });
  data.passes.forEach((p, i) => {
    const s = data.sections[p.section];
    const change = i === 0 ? null : make("span", { class: "ch" }, make("b", {}, "+" + grouped(p.added)), " ", make("i", {}, "−" + grouped(p.removed)));
    list.append(make("button", { "data-pass": i, "aria-current": String(i === state.pass), title: "hash " + s.digest, onclick: () => choosePass(i) }, make("span", {}, s.name), make("span", { class: "lv" }, s.level), change));
  });
  $("main").append(list);
  const diff = new Pane("diff", "", ""), source = sourcePane();
  place([diff, source]);
  diff.node.style.flex = "2 1 0";
  state.open.diff = true;
  fillDiff(diff);
  showFile(firstFile());
  const current = list.querySelector('[aria-current="true"]');
  if (current) current.scrollIntoView({ block: "nearest" });
}
function choosePass(i) {
  if (i < 0 || i >= data.passes.length) return;
  state.pass = i;
  state.folds = new Set();
  if (state.view !== "passes") { show("passes"); return; }
  for (const b of document.querySelectorAll(".list button")) {
    b.setAttribute("aria-current", String(Number(b.dataset.pass) === i));
    if (Number(b.dataset.pass) === i) b.scrollIntoView({ block: "nearest" });
  }
  const diff = state.panes.find((p) => p.id === "diff");
  diff.scroll.scrollTop = 0;
  fillDiff(diff);
  search(state.query, false);
  renderAll();
}
function fillDiff(pane) {
  const p = data.passes[state.pass], after = data.sections[p.section], before = state.pass ? data.sections[data.passes[state.pass - 1].section] : null;
  const lines = [];
  const push = (s, i, style, sign, parts) => lines.push({ text: data.texts[s.lines[i]], place: s.places[i], style, sign, no: i + 1, parts, scope: 0 });
  p.diff.forEach(([kind, a, b, n], k) => {
    if (kind === "=") {
      const first = k === 0, last = k === p.diff.length - 1, head = first ? 0 : CONTEXT, tail = last ? 0 : CONTEXT;
      const folded = before && n > head + tail + 3 && !state.folds.has(k);
      for (let i = 0; i < n; i++) {
        if (folded && i === head) { lines.push({ text: `… ${grouped(n - head - tail)} equal lines (click to show)`, place: -1, style: "fold", sign: "", no: "", fold: k }); i = n - tail - 1; continue; }
        push(after, b + i, "", " ");
      }
    } else if (kind === "~") {
      for (let i = 0; i < n; i++) {
        const [x, y] = changedParts(data.texts[before.lines[a + i]], data.texts[after.lines[b + i]]);
        push(before, a + i, "del", "−", x);
        push(after, b + i, "add", "+", y);
      }
    } else for (let i = 0; i < n; i++) kind === "-" ? push(before, a + i, "del", "−") : push(after, b + i, "add", "+");
  });
  pane.title.textContent = state.pass ? `${data.sections[data.passes[state.pass - 1].section].name} → ${after.name}` : after.name;
  pane.fill(lines, more(after));
  pane.count.textContent = state.pass ? `+${grouped(p.added)} −${grouped(p.removed)}` : pane.count.textContent;
}
function changedParts(x, y) {
  let head = 0, tail = 0;
  const limit = Math.min(x.length, y.length);
  while (head < limit && x[head] === y[head]) head++;
  while (tail < limit - head && x[x.length - 1 - tail] === y[y.length - 1 - tail]) tail++;
  return [x, y].map((t) => [t.slice(0, head), t.slice(head, t.length - tail), t.slice(t.length - tail)]);
}

// Search over the panes of the view.

function search(query, move = true) {
  state.query = query.toLowerCase();
  state.hits = [];
  if (state.query) for (const pane of state.panes) {
    if (pane.closed) continue;
    pane.lines.forEach((line, i) => { if (line.text.toLowerCase().includes(state.query)) state.hits.push({ pane, line: i }); });
  }
  state.hit = -1;
  for (const pane of state.panes) pane.rebuild();
  if (move && state.hits.length) step(1); else showHits();
  renderAll();
}
function step(by) {
  if (!state.hits.length) return;
  state.hit = (state.hit + by + state.hits.length) % state.hits.length;
  const { pane, line } = state.hits[state.hit];
  pane.cursor = line;
  pane.reveal(line);
  activate(pane);
  showHits();
  renderAll();
}
function showHits() { $("hits").textContent = !state.query ? "" : state.hits.length ? `${state.hit + 1} / ${grouped(state.hits.length)}` : "none"; }

// The timeline of a GPU's kernels.

function tip(e, text) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  box.style.left = Math.min(e.clientX + 14, innerWidth - box.offsetWidth - 8) + "px";
  box.style.top = Math.min(e.clientY + 16, innerHeight - box.offsetHeight - 8) + "px";
}
function targetLine(file, line) {
  const n = data.levels.find((s) => data.sections[s].name === file), s = data.sections[n];
  return s && line - 1 < s.lines.length ? { text: data.texts[s.lines[line - 1]].trim(), place: s.places[line - 1] } : { text: "", place: -1 };
}
function placeText(place) { return place < 0 ? "" : `\n${(data.files[data.places[place][0]] || { name: "?" }).name}:${data.places[place][1]}`; }

function showGpu() {
  const board = make("div", { class: "board" });
  if (data.gpu.note) board.append(make("div", { class: "card" }, make("p", {}, data.gpu.note)));
  for (const kernel of data.gpu.kernels || []) {
    const card = make("div", { class: "card", "data-kernel": kernel.name }, make("h2", {}, kernel.name,
      make("small", {}, `grid ${kernel.grid.join(" × ")} · ${kernel.threads} threads · ${grouped(kernel.shared)} bytes of shared memory · at least ${kernel.registers} registers live`)));
    const row = make("div", { class: "occ" });
    kernel.gpus.forEach((g) => row.append(occupancy(g, kernel)));
    card.append(row);
    if (kernel.timeline) card.append(...kernelTimeline(kernel));
    card.append(make("p", {}, "Occupancy is a model for each number of registers; the estimate counts the registers that are live in the text, ptxas assigns the real number. " +
      (kernel.timeline ? `The timeline is of the first thread block in the emulator: an instruction of a warp takes one slot, a barrier lasts until its last warp arrives. It is no measurement.` + (kernel.timeline.cut ? ` It ends after ${grouped(data.gpu.slots)} slots.` : "") : "")));
    board.append(card);
  }
  $("main").append(board);
}
function occupancy(g, kernel) {
  const W = 300, H = 92, top = 12, most = Math.max(1, ...g.curve.map((c) => c[1])), step = W / g.curve.length;
  const svg = draw("svg", { width: W, height: H + 4, role: "img" });
  const label = `${g.groups} blocks a multiprocessor, ${Math.round(g.share * 100)} % of its threads, limited by ${g.limit}`;
  svg.append(draw("title", {}, label));
  const now = g.curve.findIndex((c) => c[0] >= kernel.registers);
  g.curve.forEach(([registers, groups], i) => {
    const h = ((H - top - 14) * groups) / most;
    svg.append(draw("rect", { class: "barx" + (i === now ? " now" : ""), x: i * step + 2, y: H - 14 - h, width: step - 4, height: Math.max(h, 1), rx: 2 }));
    const t = draw("text", { x: i * step + step / 2, y: H - 3, "text-anchor": "middle" });
    t.textContent = registers < 100 || i % 2 ? registers : "";
    const n = draw("text", { x: i * step + step / 2, y: H - 17 - h, "text-anchor": "middle" });
    n.textContent = groups;
    svg.append(t, n);
  });
  return make("figure", {}, make("figcaption", {}, make("b", {}, g.gpu + "  "), label), svg, make("figcaption", {}, make("small", {}, "blocks a multiprocessor, by registers a thread")));
}
const zooms = {};
function kernelTimeline(kernel) {
  const t = kernel.timeline, warpHeight = t.warps > 16 ? 8 : 13, left = 56, sharedHeight = t.shared.length ? 90 : 0;
  const canvas = make("canvas", { role: "img", "aria-label": "timeline of " + kernel.name }), holder = make("div", { class: "time", tabindex: "0" }, canvas);
  const slots = Math.max(1, Math.min(t.slots, data.gpu.slots));
  const fit = Math.max(0.25, (Math.max(600, $("main").clientWidth - 70) - left) / slots);
  zooms[kernel.name] = zooms[kernel.name] || Math.min(fit, 14);
  const paintAll = () => {
    const z = zooms[kernel.name], width = Math.min(left + slots * z + 10, 30000), height = t.warps * warpHeight + 22 + (sharedHeight ? sharedHeight + 24 : 0), ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    c.font = "10px system-ui, sans-serif";
    const colors = data.gpu.categories.map((_, i) => color("--c" + i)), dim = color("--dim"), rule = color("--line");
    for (let w = 0; w < t.warps; w++) {
      if (t.warps <= 16 || w % 4 === 0) { c.fillStyle = dim; c.fillText("warp " + w, 6, w * warpHeight + warpHeight - 3); }
      for (const [a, b, kind] of t.spans[w]) { c.fillStyle = colors[kind]; c.fillRect(left + a * z, w * warpHeight + 1, Math.max((b - a) * z - (z > 4 ? 1 : 0), 0.6), warpHeight - 2); }
    }
    const bottom = t.warps * warpHeight;
    c.fillStyle = color("--c4");
    for (const [slot] of t.barriers) c.fillRect(left + slot * z - 0.5, 0, 1, bottom);
    const every = Math.pow(10, Math.ceil(Math.log10(90 / z)));
    for (let s = 0; s <= slots; s += every) { c.fillStyle = rule; c.fillRect(left + s * z, bottom, 1, 5); c.fillStyle = dim; c.fillText(grouped(s), left + s * z + 3, bottom + 13); }
    if (!sharedHeight) return;
    const y0 = bottom + 24, top = Math.max(...t.shared.map((s) => s[3]), 1);
    c.fillStyle = dim; c.fillText("shared", 6, y0 + 10); c.fillText(grouped(top) + " B", 6, y0 + sharedHeight - 2);
    c.strokeStyle = rule; c.strokeRect(left, y0, slots * z, sharedHeight);
    for (const [a, b, low, high, written] of t.shared) { c.fillStyle = written ? color("--c2") : color("--c3"); c.fillRect(left + a * z, y0 + (low / top) * sharedHeight, Math.max((b - a) * z, 1), Math.max(((high - low) / top) * sharedHeight, 1)); }
  };
  const find = (e) => {
    const box = canvas.getBoundingClientRect(), slot = (e.clientX - box.left - left) / zooms[kernel.name], y = e.clientY - box.top, w = Math.floor(y / warpHeight);
    if (w < t.warps) { const s = t.spans[w].find(([a, b]) => slot >= a && slot < b); return s && { line: s[3], text: `warp ${w}, slots ${s[0]} to ${s[1]}: ${data.gpu.categories[s[2]]}` }; }
    const byte = ((y - t.warps * warpHeight - 24) / sharedHeight) * Math.max(...t.shared.map((s) => s[3]), 1);
    const s = t.shared.find(([a, b, low, high]) => slot >= a && slot < b && byte >= low && byte < high);
    return s && { line: s[5], text: `bytes ${grouped(s[2])} to ${grouped(s[3])} ${s[4] ? "written" : "read"}` };
  };
  canvas.addEventListener("mousemove", (e) => { const f = find(e); const l = f && targetLine(data.gpu.file, f.line); tip(e, f ? `${f.text}\n${l.text}${placeText(l.place)}` : ""); });
  canvas.addEventListener("mouseleave", () => tip(null, ""));
  canvas.addEventListener("click", (e) => { const f = find(e), n = data.levels.find((s) => data.sections[s].name === data.gpu.file); if (f && n !== undefined) { tip(null, ""); state.target = n; show("levels"); jump(n, f.line - 1); } });
  const zoom = (by) => { zooms[kernel.name] = Math.max(0.1, Math.min(40, zooms[kernel.name] * by)); paintAll(); };
  holder.addEventListener("wheel", (e) => { if (e.ctrlKey) { e.preventDefault(); zoom(e.deltaY < 0 ? 1.2 : 1 / 1.2); } }, { passive: false });
  paintAll();
  repaint.push(paintAll);
  const legend = make("div", { class: "legend" }, ...data.gpu.categories.map((n, i) => make("span", {}, make("i", { class: "k" + i }), n)), make("span", {}, "below, bytes of shared memory: ", make("i", { class: "k2" }), "written"), make("span", {}, make("i", { class: "k3" }), "read"),
    make("span", { class: "zoom" }, make("button", { "aria-label": "Zoom out", onclick: () => zoom(1 / 1.5) }, "−"), make("button", { "aria-label": "Zoom in", onclick: () => zoom(1.5) }, "+")));
  return [legend, holder];
}
let repaint = [];

// The mesh over time.

const mesh = { frame: 0, playing: null, memory: false };
function showMesh() {
  const m = data.mesh, board = make("div", { class: "board" });
  $("main").append(board);
  if (m.note) { board.append(make("div", { class: "card" }, make("p", {}, m.note))); return; }
  const grid = make("canvas", { role: "img", "aria-label": "the mesh" }), strip = make("canvas", { role: "img", "aria-label": "tasks over time" });
  const range = make("input", { type: "range", min: 0, max: m.frames - 1, value: mesh.frame, "aria-label": "Time" }), out = make("output", {}), button = make("button", { "aria-label": "Play" }, "▶ play");
  const most = Math.max(1, ...m.traffic.flat().map((t) => t[2])), cell = Math.max(16, Math.min(84, 560 / Math.max(m.width, m.height)));
  const number = new Map(m.places.map((p, i) => [p.join(), i]));
  const paintGrid = () => {
    const W = m.width * cell + 20, H = m.height * cell + 20, ratio = devicePixelRatio || 1;
    grid.width = W * ratio; grid.height = H * ratio; grid.style.width = W + "px"; grid.style.height = H + "px";
    const c = grid.getContext("2d");
    c.scale(ratio, ratio);
    const f = m.busy[mesh.frame], hot = mesh.memory ? color("--c1") : color("--accent");
    m.places.forEach(([x, y], i) => {
      const share = mesh.memory ? m.memory[i] / m.limit : f[i] / 100, size = cell * 0.62, left = 10 + x * cell + (cell - size) / 2, top = 10 + y * cell + (cell - size) / 2;
      c.fillStyle = color("--same"); c.fillRect(left, top, size, size);
      c.globalAlpha = Math.min(1, 0.06 + 0.94 * share); c.fillStyle = hot; c.fillRect(left, top, size, size); c.globalAlpha = 1;
      c.strokeStyle = color("--line"); c.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
      if (cell >= 46) { c.fillStyle = share > 0.55 ? color("--panel") : color("--dim"); c.font = "10px system-ui, sans-serif"; c.fillText(mesh.memory ? (m.memory[i] / 1024).toFixed(1) + " KB" : f[i] + " %", left + 4, top + size - 5); }
    });
    const steps = m.steps;
    for (const [p, d, n] of m.traffic[mesh.frame]) {
      const [x, y] = m.places[p], [dx, dy] = steps[d], cx = 10 + (x + 0.5) * cell, cy = 10 + (y + 0.5) * cell, side = cell * 0.1;
      const x0 = cx + dx * cell * 0.31 + dy * side, y0 = cy + dy * cell * 0.31 + dx * side, x1 = cx + dx * cell * 0.69 + dy * side, y1 = cy + dy * cell * 0.69 + dx * side;
      c.strokeStyle = c.fillStyle = color("--c2"); c.lineWidth = 1 + 3.5 * (n / most);
      c.beginPath(); c.moveTo(x0, y0); c.lineTo(x1, y1); c.stroke();
      c.beginPath(); c.moveTo(x1 + dx * 4, y1 + dy * 4); c.lineTo(x1 - dy * 4, y1 - dx * 4); c.lineTo(x1 + dy * 4, y1 + dx * 4); c.fill();
      c.lineWidth = 1;
    }
    const from = Math.round((mesh.frame * m.cycles) / m.frames), to = Math.round(((mesh.frame + 1) * m.cycles) / m.frames);
    out.textContent = `cycles ${grouped(from)} to ${grouped(to)} of ${grouped(m.cycles)}`;
  };
  const rows = Math.min(m.places.length, 64), rowHeight = rows > 32 ? 7 : 11, left = 52;
  const paintStrip = () => {
    const W = Math.max(500, $("main").clientWidth - 90), H = rows * rowHeight + 20, ratio = devicePixelRatio || 1, z = (W - left - 6) / m.cycles;
    strip.width = W * ratio; strip.height = H * ratio; strip.style.width = W + "px"; strip.style.height = H + "px";
    const c = strip.getContext("2d");
    c.scale(ratio, ratio);
    c.font = "9px system-ui, sans-serif";
    for (let r = 0; r < rows; r++) if (rows <= 32 || r % 4 === 0) { c.fillStyle = color("--dim"); c.fillText(m.places[r].join(", "), 6, r * rowHeight + rowHeight - 2); }
    for (const [p, k, a, b] of m.spans) if (p < rows) { c.fillStyle = color("--c" + (k % 4)); c.fillRect(left + a * z, p * rowHeight + 1, Math.max((b - a) * z, 0.7), rowHeight - 2); }
    for (const [name, a, b] of m.launches) { c.fillStyle = color("--dim"); c.fillRect(left + a * z, rows * rowHeight + 2, Math.max((b - a) * z, 1), 2); c.fillText(name, left + a * z + 2, rows * rowHeight + 14); }
    const at = left + ((mesh.frame + 0.5) / m.frames) * m.cycles * z;
    c.fillStyle = color("--bad"); c.fillRect(at, 0, 1, rows * rowHeight);
  };
  const busy = m.busy.map((f) => f.reduce((a, b) => a + b, 0) / f.length), sent = m.traffic.map((f) => f.reduce((a, t) => a + t[2], 0)), cursors = [];
  const chart = (title, values, top, fill) => {
    const svg = draw("svg", { viewBox: `0 0 ${m.frames} 100`, preserveAspectRatio: "none", role: "img", "aria-label": title });
    const points = values.map((v, i) => `${i},${100 - (96 * v) / top} ${i + 1},${100 - (96 * v) / top}`).join(" "), area = draw("polygon", { class: "area", points: `0,100 ${points} ${m.frames},100` }), now = draw("line", { class: "now", y1: 0, y2: 100 });
    area.style.fill = `var(${fill})`;
    svg.append(area, now);
    cursors.push(now);
    svg.addEventListener("click", (e) => { const b = svg.getBoundingClientRect(); seek(Math.floor(((e.clientX - b.left) / b.width) * m.frames)); });
    return make("figure", {}, make("figcaption", {}, title), svg);
  };
  const widest = Math.max(1, ...sent);
  const charts = make("div", { class: "charts" }, chart("elements with a running task (%)", busy, 100, "--accent"), chart(`wavelets on links, at most ${grouped(widest)} a frame`, sent, widest, "--c2"));
  const seek = (f) => { mesh.frame = Math.max(0, Math.min(m.frames - 1, f)); range.value = mesh.frame; for (const c of cursors) { c.setAttribute("x1", mesh.frame + 0.5); c.setAttribute("x2", mesh.frame + 0.5); } paintGrid(); paintStrip(); };
  const stop = () => { clearInterval(mesh.playing); mesh.playing = null; button.textContent = "▶ play"; };
  const play = () => { if (mesh.playing) { stop(); return; } button.textContent = "❚❚ pause"; mesh.playing = setInterval(() => { if (!grid.isConnected || mesh.frame >= m.frames - 1) stop(); else seek(mesh.frame + 1); }, 60); if (mesh.frame >= m.frames - 1) seek(0); };
  mesh.play = play; mesh.seek = seek;
  button.addEventListener("click", play);
  range.addEventListener("input", () => seek(Number(range.value)));
  strip.addEventListener("click", (e) => { const b = strip.getBoundingClientRect(); seek(Math.floor(((e.clientX - b.left - left) / (b.width - left - 6)) * m.frames)); });
  strip.addEventListener("mousemove", (e) => {
    const b = strip.getBoundingClientRect(), cycle = ((e.clientX - b.left - left) / (b.width - left - 6)) * m.cycles, r = Math.floor((e.clientY - b.top) / rowHeight);
    const s = m.spans.find(([p, , a, z]) => p === r && cycle >= a && cycle < z);
    tip(e, s ? `PE (${m.places[r].join(", ")}): ${m.tasks[s[1]]}\ncycles ${grouped(s[2])} to ${grouped(s[3])}` : "");
  });
  strip.addEventListener("mouseleave", () => tip(null, ""));
  grid.addEventListener("mousemove", (e) => {
    const b = grid.getBoundingClientRect(), x = Math.floor((e.clientX - b.left - 10) / cell), y = Math.floor((e.clientY - b.top - 10) / cell), i = number.get([x, y].join());
    const sent = i === undefined ? [] : m.traffic[mesh.frame].filter((t) => t[0] === i).map((t) => `${grouped(t[2])} ${m.directions[t[1]]}`);
    tip(e, i === undefined ? "" : `PE (${x}, ${y})\nbusy ${m.busy[mesh.frame][i]} %, ${grouped(m.memory[i])} of ${grouped(m.limit)} bytes\n${sent.length ? "wavelets sent: " + sent.join(", ") : "sends nothing"}`);
  });
  grid.addEventListener("mouseleave", () => tip(null, ""));
  const memory = make("button", { "aria-pressed": "false", onclick: () => { mesh.memory = !mesh.memory; memory.setAttribute("aria-pressed", String(mesh.memory)); memory.textContent = mesh.memory ? "show activity" : "show memory"; paintGrid(); } }, "show memory");
  board.append(make("div", { class: "card" }, make("h2", {}, `${m.width} × ${m.height} elements`, make("small", {}, `${grouped(m.cycles)} cycles; the widest link carries ${grouped(most)} wavelets a frame`)),
    make("div", { class: "play" }, button, range, out, memory), make("div", { class: "mesh" }, grid, charts)),
  make("div", { class: "card" }, make("h2", {}, "Tasks", make("small", {}, m.omitted ? `the first ${grouped(m.spans.length)} spans; ${grouped(m.omitted)} more are not in this page` : `${grouped(m.spans.length)} spans`)),
    make("div", { class: "legend" }, ...m.tasks.map((n, i) => make("span", {}, make("i", { class: "k" + (i % 4) }), n))), strip,
    make("p", {}, (m.places.length > rows ? `The first ${rows} of ${m.places.length} elements. ` : "") + "Click to move the time. Cycles are those of the simulator; a task that waits for wavelets counts as running.")));
  seek(mesh.frame);
  repaint.push(paintGrid, paintStrip);
}

// The frame of the page: tabs, keys, theme.

const views = [["levels", "Levels", showLevels], ["passes", "Passes", showPasses]];
if (data.gpu) views.push(["gpu", "GPU", showGpu]);
if (data.mesh) views.push(["mesh", "Mesh", showMesh]);
function show(view) {
  if (mesh.playing) { clearInterval(mesh.playing); mesh.playing = null; }
  state.view = view;
  state.panes = [];
  repaint = [];
  state.hover = state.use = null;
  $("main").replaceChildren();
  for (const b of $("tabs").children) b.setAttribute("aria-selected", String(b.dataset.view === view));
  views.find((v) => v[0] === view)[2]();
  search(state.query, false);
  if (state.pin) follow(state.pin, null);
  renderAll();
  describe(state.pin);
}
const SUN = "M8 3V1M8 15v-2M3 8H1M15 8h-2M4.5 4.5 3 3M13 13l-1.5-1.5M4.5 11.5 3 13M13 3l-1.5 1.5M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6z", MOON = "M13.5 10A6 6 0 0 1 6 2.5 6 6 0 1 0 13.5 10z";
function theme(name) {
  root.dataset.theme = name;
  $("theme").replaceChildren(draw("svg", { viewBox: "0 0 16 16", width: 15, height: 15 }, draw("path", { d: name === "dark" ? SUN : MOON })));
  for (const again of repaint) again();
}
const KEYS = [["/", "search; Enter and Shift+Enter, or n and N, go to the next and the previous hit"], ["j  k  ↓  ↑", "next and previous line"], ["h  l  ←  →", "pane to the left and to the right"], ["g  G", "first and last line"],
  ["Enter", "keep the line; the other panes go to its origin and results"], ["Esc", "release the line, clear the search"], ["1 … 9", "open or close a pane"], ["v", "next view"], ["[  ]", "previous and next pass"], ["o", "next value that holds NaN or infinity"], ["space", "play the mesh"], ["t", "light or dark"], ["?", "this list"]];

function moveCursor(by) {
  const pane = state.panes[state.active];
  if (!pane || !pane.lines.length) return;
  pane.cursor = Math.max(0, Math.min(pane.lines.length - 1, pane.cursor + by));
  pane.reveal(pane.cursor);
  hover(pane.mark(pane.cursor, null), null);
  renderAll();
}
function movePane(by) {
  for (let i = state.active + by; i >= 0 && i < state.panes.length; i += by) if (!state.panes[i].closed) { activate(state.panes[i]); state.panes[i].scroll.focus(); renderAll(); return; }
}
function nextBad() {
  const bad = data.values.map((r, i) => [r, i]).filter(([r]) => r.nans || r.infs);
  if (!bad.length) return;
  state.bad = ((state.bad ?? -1) + 1) % bad.length;
  const r = bad[state.bad][0];
  jump(r.section, r.line);
}
const ACTIONS = {
  "/": () => { $("search").focus(); $("search").select(); }, n: () => step(1), N: () => step(-1), j: () => moveCursor(1), k: () => moveCursor(-1), ArrowDown: () => moveCursor(1), ArrowUp: () => moveCursor(-1),
  h: () => movePane(-1), l: () => movePane(1), g: () => moveCursor(-1e9), G: () => moveCursor(1e9), v: () => show(views[(views.findIndex((x) => x[0] === state.view) + 1) % views.length][0]),
  "[": () => choosePass(state.view === "passes" ? state.pass - 1 : state.pass), "]": () => choosePass(state.view === "passes" ? state.pass + 1 : state.pass), t: () => theme(root.dataset.theme === "dark" ? "light" : "dark"),
  "?": () => { const d = $("keys"); d.open ? d.close() : d.showModal(); }, o: nextBad,
  Enter: () => { const p = state.panes[state.active]; if (p) { if (p.lines[p.cursor] && p.lines[p.cursor].fold !== undefined) { state.folds.add(p.lines[p.cursor].fold); fillDiff(p); renderAll(); } else pin(p.mark(p.cursor, null), p); } },
  Escape: () => { state.pin = null; $("search").value = ""; search("", false); hover(null, null); describe(null); },
  ArrowLeft: () => (state.view === "mesh" && mesh.seek ? mesh.seek(mesh.frame - 1) : movePane(-1)), ArrowRight: () => (state.view === "mesh" && mesh.seek ? mesh.seek(mesh.frame + 1) : movePane(1)), " ": () => state.view === "mesh" && mesh.play && mesh.play(),
};
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const input = e.target.tagName === "INPUT" && e.target.type === "search";
  if (input) {
    if (e.key === "Enter") { e.preventDefault(); step(e.shiftKey ? -1 : 1); }
    if (e.key === "Escape") { e.target.blur(); ACTIONS.Escape(); }
    return;
  }
  if (["SELECT"].includes(e.target.tagName) || ($("keys").open && e.key !== "?")) return;
  if (e.target.tagName === "BUTTON" && ["Enter", " "].includes(e.key)) return;
  if (e.target.tagName === "INPUT" && e.key.startsWith("Arrow")) return;
  const pane = /^[1-9]$/.test(e.key) ? state.panes[Number(e.key) - 1] : null;
  if (pane && pane.key) { toggle(pane.id); return; }
  if (Object.hasOwn(ACTIONS, e.key)) { e.preventDefault(); ACTIONS[e.key](); }
});

$("title").textContent = data.title;
$("title").title = data.title;
$("target").textContent = data.target + (data.arch ? " " + data.arch : "");
views.forEach(([id, name]) => $("tabs").append(make("button", { role: "tab", "data-view": id, onclick: () => show(id) }, name)));
$("search").addEventListener("input", (e) => search(e.target.value));
$("theme").addEventListener("click", ACTIONS.t);
$("help").addEventListener("click", ACTIONS["?"]);
$("keys").append(make("h2", {}, "Keys"), make("table", {}, ...KEYS.map(([k, what]) => make("tr", {}, make("td", {}, make("kbd", {}, k)), make("td", {}, what)))));
$("keys").addEventListener("click", () => $("keys").close());
if (data.notes.length) {
  $("notes").hidden = false;
  $("notes").append(make("ul", {}, ...data.notes.map((n) => make("li", {}, n))), make("button", { onclick: () => { $("notes").hidden = true; renderAll(); } }, "close"));
}
let timer = null;
addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(() => { renderAll(); for (const again of repaint) again(); }, 60); });
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
show("levels");
