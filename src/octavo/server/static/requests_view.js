// The table of unfinished requests, each with its block table drawn in the colours of the map.

import { explainInto } from "./explain.js";
import { $, element, formatCount, formatSeconds, plural, setText, shortenId } from "./format.js";
import { colourOf } from "./pool_map.js";

const MAX_ROWS = 200;
const CELL_PADDING = 8;
const WAITING = {
  seats: "waits for a seat",
  tokens: "waits for token budget",
  blocks: "waits for blocks",
  prefix: "waits for a shared prefix",
};

export class RequestsView {
  /**
   * Args: map, whose colours are used; onMark, called with a request or null when one is pointed at; onReadEnd, called
   * with the id of a request that ended while its explanation was open.
   */
  constructor(map, { onMark, onReadEnd }) {
    this.map = map;
    this.onMark = onMark;
    this.onReadEnd = onReadEnd;
    this.pointedId = null;
    this.body = $("requests").tBodies[0];
    this.wide = $("requests").tHead.querySelector(".wide");
    this.rows = new Map();
  }

  show(live) {
    const requests = live.requests.slice(0, MAX_ROWS);
    const seen = new Set(requests.map((request) => request.id));
    for (const [id, row] of this.rows) {
      if (!seen.has(id)) {
        this.removeRow(id, row);
      }
    }
    // Asked once and before anything is written: each answer after a change would cost a layout of the page.
    this.width = this.wide.clientWidth - CELL_PADDING;
    // One scale for all tables, so that they can be compared.
    this.longest = Math.max(1, ...requests.map((request) => request.tables.flat().length));
    let next = this.body.firstChild;
    for (const request of requests) {
      const row = this.rows.get(request.id) ?? this.addRow(request.id);
      for (const node of [row.node, row.why].filter(Boolean)) {
        if (node === next) next = next.nextSibling;
        else this.body.insertBefore(node, next);
      }
      this.fill(row, request, live.blocks);
    }
    // Its table grows while it is pointed at.
    if (this.pointedId !== null) this.onMark(this.rows.get(this.pointedId).request);
    const hidden = live.requests.length - requests.length;
    $("requests").hidden = requests.length === 0;
    $("requests-empty").hidden = requests.length > 0;
    const running = live.requests.filter((request) => request.isRunning).length;
    const counts = `${formatCount(running)} running, ${formatCount(live.requests.length - running)} waiting`;
    setText($("requests-note"), requests.length ? counts + (hidden ? `; ${formatCount(hidden)} more` : "") : "");
  }

  removeRow(id, row) {
    row.node.remove();
    row.why?.remove();
    this.rows.delete(id);
    // A row that is taken away from under the pointer is never left by it.
    if (this.pointedId === id) this.point(null);
    if (row.why) this.onReadEnd(id);
  }

  point(row) {
    this.pointedId = row?.request.id ?? null;
    this.onMark(row?.request ?? null);
  }

  addRow(id) {
    const cells = {};
    const node = element("tr");
    for (const name of ["id", "state", "table", "prompt", "hits", "output", "preempted", "age"]) {
      cells[name] = element("td", ["id", "state"].includes(name) ? name : name === "table" ? "wide" : "n");
      node.append(cells[name]);
    }
    cells.state.className = "";
    cells.state.append(element("span", "state"));
    cells.table.append(element("canvas"));
    setText(cells.id, shortenId(id));
    cells.id.title = id;
    const row = { node, cells, request: null, why: null };
    node.tabIndex = 0;
    node.title = "Why did it take what it took?";
    node.addEventListener("click", () => this.toggle(row));
    node.addEventListener("keydown", (event) => { if (event.key === "Enter") this.toggle(row); });
    node.addEventListener("pointerenter", () => this.point(row));
    node.addEventListener("pointerleave", () => this.point(null));
    this.rows.set(id, row);
    return row;
  }

  /** Opens or closes the line below a request that says why it took what it took. */
  toggle(row) {
    if (row.why) {
      row.why.remove();
      row.why = null;
      return;
    }
    // As wide as what is seen of the table, which may be wider and scroll under it.
    const words = element("div", "why");
    const cell = element("td", "why", words);
    cell.colSpan = row.node.cells.length;
    row.why = element("tr", "", cell);
    row.node.after(row.why);
    explainInto(words, row.request.id);
  }

  fill(row, request, blocks) {
    row.request = request;
    const { cells } = row;
    const state = cells.state.firstChild;
    state.className = request.isRunning ? "state" : "state waiting";
    const waiting = request.num_preemptions ? "preempted, waits" : WAITING[request.wait_reason] ?? "waits";
    setText(state, request.isRunning ? "running" : waiting);
    setText(cells.prompt, formatCount(request.num_prompt_tokens));
    setText(cells.hits, formatCount(request.num_hit_tokens));
    setText(cells.output, formatCount(request.num_output_tokens));
    setText(cells.preempted, request.num_preemptions ? formatCount(request.num_preemptions) : "");
    setText(cells.age, formatSeconds(request.age_s));
    this.drawTable(cells.table.firstChild, request, blocks);
    cells.table.title = request.tables.length ? plural(request.tables.flat().filter(Boolean).length, "block") : "";
  }

  /** One cell a block while they fit, else several blocks a cell, drawn as the most shared of them. */
  drawTable(canvas, request, blocks) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.round(this.width * ratio);
    if (width <= 0) return;
    const height = Math.round(12 * ratio);
    const ids = request.tables.flat();
    const perCell = Math.max(1, Math.ceil(this.longest / Math.floor(width / (3 * ratio))));
    const colours = [];
    for (let first = 0; first < ids.length; first += perCell) {
      let colour = 0;
      for (const id of ids.slice(first, first + perCell)) {
        if (id > 0) colour = Math.max(colour, colourOf(blocks.states[id - 1], blocks.holders[id - 1]));
      }
      colours.push(colour);
    }
    const picture = `${width} ${this.longest} ${this.map.palette[2]} ${colours.join("")}`;
    if (canvas.picture === picture) return;
    canvas.picture = picture;
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    const cell = Math.min(10 * ratio, width / Math.ceil(this.longest / perCell));
    const gap = Math.max(1, Math.round(ratio));
    colours.forEach((colour, index) => {
      context.fillStyle = this.map.palette[colour];
      const x = Math.round(index * cell);
      context.fillRect(x, 0, Math.round((index + 1) * cell) - x - gap, height);
    });
  }
}
