// What a block is, next to the pointer: who holds it, where in their text it lies, and how many share it.

import { request } from "./connection.js";
import { $, element, formatCount, shortenId } from "./format.js";
import { STATE } from "./pool_map.js";

const WORDS = ["free", "cached: held by nobody, found by the next request with the same prefix", "in use", "shared", "being copied"];
const MAX_HOLDERS = 6;

export class BlockTip {
  constructor(map) {
    this.map = map;
    this.tip = $("tip");
    this.live = null;
    this.pointed = null;
    this.texts = new Map();
  }

  update(live) {
    this.live = live;
    this.texts.clear();
    if (this.pointed) this.show(this.pointed);
  }

  /** Shows the block {id, x, y}, or hides the tip. */
  show(pointed) {
    this.pointed = pointed;
    if (!pointed || !this.live) {
      this.tip.hidden = true;
      this.map.mark([]);
      return;
    }
    this.map.mark([pointed.id]);
    this.tip.replaceChildren(...this.lines(pointed.id));
    this.tip.hidden = false;
    this.place(pointed);
  }

  lines(id) {
    const state = this.live.blocks.states[id - 1];
    const count = this.live.blocks.holders[id - 1];
    const word = state === STATE.shared ? `shared by ${formatCount(count)}` : WORDS[state];
    const lines = [element("p", "", element("b", "", `block ${formatCount(id)}`), ` · ${word}`)];
    const holders = this.holders(id);
    const ranges = new Set(holders.map(({ range }) => range));
    for (const { owner, range } of holders.slice(0, MAX_HOLDERS)) {
      // Holders of a shared block hold it at the same place, as a rule: then it is said once.
      const where = ranges.size > 1 ? [`tokens ${range} of `] : [];
      lines.push(element("p", "", ...where, element("code", "", shortenId(owner))));
    }
    if (ranges.size === 1) lines.splice(1, 0, element("p", "", `tokens ${holders[0].range} of`));
    if (holders.length > MAX_HOLDERS) lines.push(element("p", "", `and ${formatCount(holders.length - MAX_HOLDERS)} more`));
    if (this.live.shows_prompts && state !== STATE.free) lines.push(...this.textOf(id));
    return lines;
  }

  holders(id) {
    const size = this.live.block_size_tokens;
    const found = [];
    for (const one of this.live.requests) {
      for (const table of one.tables) {
        const index = table.indexOf(id);
        if (index < 0) continue;
        const end = Math.max(index * size + 1, Math.min((index + 1) * size, one.num_computed_tokens));
        found.push({ owner: one.id, range: `${formatCount(index * size)}–${formatCount(end - 1)}` });
      }
    }
    return found;
  }

  /** The text of a block, which only a server with --show-prompts gives; asked for once while the map stands still. */
  textOf(id) {
    const known = this.texts.get(id);
    if (known) return [element("p", "text", known)];
    if (known === undefined) {
      this.texts.set(id, "");
      request(`live/blocks/${id}`)
        .then((response) => (response.ok ? response.json() : null))
        .then((body) => {
          this.texts.set(id, body?.text ?? "");
          if (this.pointed?.id === id && body?.text) this.show(this.pointed);
        })
        .catch(() => {});
    }
    return [];
  }

  place({ x, y }) {
    const { width, height } = this.tip.getBoundingClientRect();
    const left = x + 16 + width > window.innerWidth ? x - width - 14 : x + 16;
    const top = y + 16 + height > window.innerHeight ? y - height - 14 : y + 16;
    this.tip.style.left = `${Math.max(8, left)}px`;
    this.tip.style.top = `${Math.max(8, top)}px`;
  }
}
