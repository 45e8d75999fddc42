// The map of the pool: one cell a block, in the order of block ids. A pool of 100,000 blocks is an image of one pixel a
// block, enlarged without smoothing; it is drawn again only when a block or the room for it has changed.

export const STATE = { free: 0, cached: 1, used: 2, shared: 3, pinned: 4 };
const MAX_CELL = 26;
const TALL_CELL = 4; // smaller ones get a taller map
const MAX_ROUNDED_CELLS = 6000;

export class PoolMap {
  constructor(host, { onPoint }) {
    this.host = host;
    this.cells = host.querySelector("canvas");
    this.marks = host.querySelectorAll("canvas")[1];
    this.onPoint = onPoint;
    this.blocks = { states: new Uint8Array(0), holders: new Uint16Array(0) };
    this.marked = [];
    this.image = new OffscreenCanvas(1, 1);
    this.frameTimes = [];
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.readColours();
      this.requestDraw();
    });
    new ResizeObserver(() => this.layOut()).observe(host);
    this.marks.addEventListener("pointermove", (event) => this.point(event));
    this.marks.addEventListener("pointerdown", (event) => this.point(event));
    this.marks.addEventListener("pointerleave", () => this.onPoint(null));
  }

  /** Shows blocks {states, holders}; index 0 is block 1, the null block is not drawn. */
  show(blocks) {
    const hasResized = blocks.states.length !== this.blocks.states.length;
    const isSame = !hasResized && equal(blocks.states, this.blocks.states) && equal(blocks.holders, this.blocks.holders);
    this.blocks = blocks;
    if (hasResized) this.layOut();
    else if (!isSame) this.requestDraw();
  }

  /** Outlines blocks by id, and undoes the outlines before. */
  mark(blockIds) {
    if (blockIds.length === 0 && this.marked.length === 0) return;
    this.marked = blockIds;
    this.drawMarks();
  }

  layOut() {
    const count = this.blocks.states.length;
    const width = this.host.clientWidth;
    if (count === 0 || width === 0) return;
    this.ratio = window.devicePixelRatio || 1;
    const pixels = Math.floor(width * this.ratio);
    // The largest whole number of device pixels with which all rows fit.
    let cell = Math.max(1, Math.min(Math.floor(MAX_CELL * this.ratio), Math.floor(pixels / 8)));
    const height = () => Math.ceil(count / Math.floor(pixels / cell)) * cell;
    while (cell > 1 && height() > (cell > TALL_CELL * this.ratio ? 350 : 500) * this.ratio) cell -= 1;
    this.cell = cell;
    this.columns = Math.floor(pixels / cell);
    this.rows = Math.ceil(count / this.columns);
    this.gap = cell >= 8 ? Math.max(1, Math.round(cell / 7)) : cell >= 4 ? 1 : 0;
    for (const canvas of [this.cells, this.marks]) {
      canvas.width = this.columns * cell;
      canvas.height = this.rows * cell;
      canvas.style.width = `${canvas.width / this.ratio}px`;
      canvas.style.height = `${canvas.height / this.ratio}px`;
    }
    this.requestDraw();
  }

  requestDraw() {
    if (this.isDrawing || !this.columns) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      const start = performance.now();
      if (this.cell >= 6 && this.blocks.states.length <= MAX_ROUNDED_CELLS) this.drawRounded();
      else this.drawImage();
      this.drawMarks();
      this.frameTimes.push(performance.now() - start);
      if (this.frameTimes.length > 200) this.frameTimes.shift();
    });
  }

  /** Few cells: rounded squares, one path for each colour. */
  drawRounded() {
    const context = this.cells.getContext("2d");
    context.clearRect(0, 0, this.cells.width, this.cells.height);
    const paths = this.palette.map(() => new Path2D());
    const size = this.cell - this.gap;
    const { states, holders } = this.blocks;
    for (let index = 0; index < states.length; index += 1) {
      const x = (index % this.columns) * this.cell;
      const y = Math.floor(index / this.columns) * this.cell;
      paths[colourOf(states[index], holders[index])].roundRect(x, y, size, size, size / 4.5);
    }
    paths.forEach((path, colour) => {
      context.fillStyle = this.palette[colour];
      context.fill(path);
    });
  }

  /** Many cells: one pixel each, enlarged; gaps are lines in the colour of the card. */
  drawImage() {
    const { states, holders } = this.blocks;
    this.image.width = this.columns;
    this.image.height = this.rows;
    const inner = this.image.getContext("2d");
    const data = inner.createImageData(this.columns, this.rows);
    const pixels = new Uint32Array(data.data.buffer);
    for (let index = 0; index < states.length; index += 1) {
      pixels[index] = this.pixels[colourOf(states[index], holders[index])];
    }
    inner.putImageData(data, 0, 0);
    const context = this.cells.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, this.cells.width, this.cells.height);
    context.drawImage(this.image, 0, 0, this.cells.width, this.cells.height);
    for (let column = 1; this.gap && column <= this.columns; column += 1) {
      context.clearRect(column * this.cell - this.gap, 0, this.gap, this.cells.height);
    }
    for (let row = 1; this.gap && row <= this.rows; row += 1) {
      context.clearRect(0, row * this.cell - this.gap, this.cells.width, this.gap);
    }
  }

  drawMarks() {
    const context = this.marks.getContext("2d");
    context.clearRect(0, 0, this.marks.width, this.marks.height);
    if (!this.columns) return;
    context.strokeStyle = this.markColour;
    const line = Math.max(1, Math.round(this.cell / 9));
    context.lineWidth = line;
    const size = this.cell - this.gap;
    for (const id of this.marked) {
      const x = ((id - 1) % this.columns) * this.cell;
      const y = Math.floor((id - 1) / this.columns) * this.cell;
      if (size < 4) context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
      else context.strokeRect(x + line / 2, y + line / 2, size - line, size - line);
    }
  }

  point(event) {
    const box = this.marks.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) * this.ratio) / this.cell);
    const row = Math.floor(((event.clientY - box.top) * this.ratio) / this.cell);
    const index = row * this.columns + column;
    const isInside = column >= 0 && column < this.columns && index >= 0 && index < this.blocks.states.length;
    this.onPoint(isInside ? { id: index + 1, x: event.clientX, y: event.clientY } : null);
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["--free", "--cached", "--used", "--shared-2", "--shared-3", "--shared-5", "--pinned"];
    this.palette = names.map((name) => style.getPropertyValue(name).trim());
    this.pixels = Uint32Array.from(this.palette, toPixel);
    this.markColour = style.getPropertyValue("--mark").trim();
  }
}

/** Index into the palette; shared blocks deepen with their holders: 2, 3 or 4, 5 and more. */
export function colourOf(state, holders) {
  if (state === STATE.pinned) return 6;
  if (state !== STATE.shared) return state;
  return holders >= 5 ? 5 : holders >= 3 ? 4 : 3;
}

function toPixel(colour) {
  const value = Number.parseInt(colour.length === 4 ? colour.slice(1).replace(/./g, "$&$&") : colour.slice(1), 16);
  return (255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16);
}

function equal(one, other) {
  for (let index = 0; index < one.length; index += 1) if (one[index] !== other[index]) return false;
  return true;
}
